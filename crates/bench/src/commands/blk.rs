//! Disks for virtual machines, without a machine: `partywall-blk` beside `qemu-storage-daemon`, by one driver, on one file.

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use partywall_terminal::table;
use partywall_vhost::disk::load::{DiskLoad, LoadGenerator};

use crate::{
    error::{BenchError, During, Result},
    process::GuardedChild,
};

/// Bytes of the file.
const SIZE: u64 = 256 << 20;
const SPIN: Duration = Duration::from_micros(50);
/// Kernel's unit of processor time, in nanoseconds.
const TICK_NS: f64 = 1e7;
/// How long a server may take to listen.
const PATIENCE: Duration = Duration::from_secs(30);

/// The server of the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DiskServer {
    Partywall,
    Qemu { aio: &'static str },
}

impl DiskServer {
    const ALL: [Self; 3] = [Self::Partywall, Self::Qemu { aio: "threads" }, Self::Qemu { aio: "io_uring" }];

    /// The name in tables.
    pub(super) fn name(self) -> String {
        match self {
            Self::Partywall => "partywall blk".to_owned(),
            Self::Qemu { aio } => format!("qemu-storage-daemon, {aio}"),
        }
    }

    /// Starts it, and waits until it listens.
    pub(super) fn start(self, image: &Path, socket: &Path) -> Result<GuardedChild> {
        let (image, at) = (image.display(), socket.display());
        let mut command = match self {
            Self::Partywall => {
                let here = std::env::current_exe().during("finding this program")?;
                let mut command = Command::new(here.with_file_name("partywall-blk"));
                command.args(["serve", &image.to_string(), "--socket", &at.to_string(), "--queues", "1"]);
                command.env("RUST_LOG", "warn");
                command
            }
            Self::Qemu { aio } => {
                let mut command = Command::new("qemu-storage-daemon");
                command.args(["--blockdev", &format!("driver=file,node-name=file,filename={image},aio={aio}")]);
                command.args(["--blockdev", "driver=raw,node-name=disk,file=file"]);
                let export =
                    format!("type=vhost-user-blk,id=e,node-name=disk,addr.type=unix,addr.path={at},writable=on");
                command.args(["--export", &export]);
                command
            }
        };
        let mut child = GuardedChild::spawn(command.stdout(Stdio::null()))?;
        let begin = Instant::now();
        while !socket.exists() {
            if let Some(end) = child.ended().or_else(|| (begin.elapsed() > PATIENCE).then(|| "no socket".to_owned())) {
                return Err(BenchError::Unavailable(format!("{}: {end}", self.name())));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(child)
    }
}

/// The figures of one server in one run of one case.
#[derive(Debug, Clone, Copy, Default)]
struct DiskFigures {
    per_second: f64,
    cpu_ns: f64,
}

/// The processor time of a process and all its threads, in ticks.
fn ticks(process: u32) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
    fields.skip(11).take(2).filter_map(|field| field.parse::<f64>().ok()).sum()
}

fn measure(server: DiskServer, load: DiskLoad, folder: &Path) -> Result<DiskFigures> {
    let (image, socket) = (folder.join("image"), folder.join("socket"));
    let _ = std::fs::remove_file(&socket);
    let child = server.start(&image, &socket)?;
    let failed = |e| BenchError::transport(&server.name(), e);
    let mut generator = LoadGenerator::connect(&socket, load.bytes, load.depth).map_err(failed)?;
    generator.run(DiskLoad { measured: load.measured / 4, ..load }).map_err(failed)?;
    let before = ticks(child.id());
    let rate = generator.run(load).map_err(failed)?;
    let cpu = (ticks(child.id()) - before) * TICK_NS;
    drop(generator);
    child.terminate(PATIENCE);
    Ok(DiskFigures { per_second: rate.per_second(), cpu_ns: cpu / rate.requests as f64 })
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

/// Measures and shows. `folder` holds the disk's file while it runs.
pub(crate) fn run(quick: bool, runs: u32, folder: Option<PathBuf>) -> Result<()> {
    let scratch = match folder {
        Some(folder) => tempfile::tempdir_in(folder),
        None => tempfile::tempdir(),
    }
    .during("making a temporary folder")?;
    // All of it is written, and in the page cache.
    std::fs::write(scratch.path().join("image"), vec![1; SIZE as usize]).during("writing the disk's file")?;
    let measured = Duration::from_millis(if quick { 300 } else { 2000 });
    println!("# {} MiB in {}, page cache, one queue, {runs} runs", SIZE >> 20, scratch.path().display());
    let mut shown = table(&["CASE", "SERVER", ">REQUESTS/S", ">MB/S", ">CPU/REQUEST", ">RATE", ">CPU"]);
    let cases = [(4096, 1), (4096, 32), (1 << 20, 1), (1 << 20, 8)];
    for (bytes, depth, writes) in
        cases.into_iter().flat_map(|(bytes, depth)| [(bytes, depth, false), (bytes, depth, true)])
    {
        let load = DiskLoad { writes, bytes, depth, measured, spin: SPIN };
        let mut figures = DiskServer::ALL.map(|server| (server, Vec::new(), None));
        // Servers take turns, so that a slow minute of the machine touches all of them.
        for _ in 0..runs {
            for (server, done, problem) in &mut figures {
                if problem.is_none() {
                    match measure(*server, load, scratch.path()) {
                        Ok(one) => done.push(one),
                        Err(e) if *server == DiskServer::Partywall => return Err(e),
                        Err(e) => *problem = Some(e.to_string()),
                    }
                }
            }
        }
        let of = |done: &[DiskFigures], pick: fn(&DiskFigures) -> f64| median(done.iter().map(pick).collect());
        let ours = (of(&figures[0].1, |f| f.per_second), of(&figures[0].1, |f| f.cpu_ns));
        for (server, done, problem) in &figures {
            let direction = if writes { "write" } else { "read" };
            let case = format!("{direction} {} KiB, depth {depth}", bytes / 1024);
            if let Some(problem) = problem {
                shown.add_row([case, server.name(), problem.clone()]);
                continue;
            }
            let (rate, cpu) = (of(done, |f| f.per_second), of(done, |f| f.cpu_ns));
            shown.add_row([
                case,
                server.name(),
                format!("{rate:.0}"),
                format!("{:.0}", rate * f64::from(bytes) / 1e6),
                format!("{:.1} us", cpu / 1000.0),
                format!("{:.2}", ours.0 / rate),
                format!("{:.2}", ours.1 / cpu),
            ]);
        }
    }
    println!("{shown}\n# RATE and CPU: partywall blk's figure divided by the server's");
    Ok(())
}
