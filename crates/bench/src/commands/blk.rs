//! Disks for virtual machines, without a machine: `partywall-blk` beside `qemu-storage-daemon`, by one driver, on one file.

use std::{
    collections::BTreeMap,
    fs::File,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use partywall_vhost::disk::load::{DiskLoad, LoadGenerator};

use super::CommandResults;
use crate::{
    args::Scale,
    bench::{Bench, BenchPlan},
    error::{BenchError, During, Result},
    measure::cpu,
    mechanism::{Mechanism, Tuning},
    peers::sources::missing,
    process::GuardedChild,
    report::{
        cell::{Cell, Key},
        metric::Metric,
        plot::{Axis, Bar, Bars, Picture},
        table::{self, Layout},
        unit,
        verdict::{Bound, Verdict},
    },
    task::{Figures, MeasuringWork},
};

/// How long the driver looks for completions before it sleeps.
const SPIN: Duration = Duration::from_micros(50);
/// The most runs of one measurement, if the processor time of each is less than the kernel counts.
const TRIES: u32 = 20;
/// How long a server may take to listen, or to end.
const PATIENCE: Duration = Duration::from_secs(30);
/// The file system that is in memory, `TMPFS_MAGIC` of Linux.
const TMPFS: rustix::fs::FsWord = 0x0102_1994;

/// The settings of a cell, by name.
const ACCESS: &str = "access";
const REQUEST: &str = "request";
const DEPTH: &str = "depth";
const CACHE: &str = "cache";
const QUEUES: &str = "queues";
const AIO: &str = "aio";

/// Kinds of access to the disk.
const ACCESSES: [&str; 2] = ["read", "write"];
/// Bytes of a request, requests in flight in each queue, and the ratio of requests per second that is promised.
const CASES: [(u32, u16, f64); 4] = [(4096, 1, 1.0), (4096, 32, 1.3), (1 << 20, 1, 1.0), (1 << 20, 8, 1.0)];
/// The ratio of processor time for each request that is promised.
const CPU_RATIO: f64 = 0.8;
/// The cases of the smallest scale.
const SMOKE_CASES: [(&str, u32); 2] = [("read", 4096), ("write", 1 << 20)];

/// How the disk is served and used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DiskServing {
    /// The servers bypass the page cache.
    pub(crate) direct: bool,
    /// Queues of the disk.
    pub(crate) queues: u16,
}

impl DiskServing {
    /// By the page cache, with one queue.
    pub(crate) const CACHED: Self = Self { direct: false, queues: 1 };

    fn cache(self) -> &'static str {
        if self.direct { "direct" } else { "page" }
    }

    /// The ways of `qemu-storage-daemon` to access the file. Its `native` is only for files without the page cache.
    fn ways(self) -> &'static [&'static str] {
        if self.direct { &["threads", "io_uring", "native"] } else { &["threads", "io_uring"] }
    }
}

/// The server of the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DiskServer<'a> {
    Partywall,
    Qemu { aio: &'a str },
}

impl DiskServer<'_> {
    /// The name in errors.
    fn name(self) -> String {
        match self {
            Self::Partywall => "partywall-blk".to_owned(),
            Self::Qemu { aio } => format!("qemu-storage-daemon, {aio}"),
        }
    }

    /// Starts it, and waits until it listens. Its errors are in a file beside the socket.
    pub(super) fn start(
        self,
        image: &Path,
        socket: &Path,
        DiskServing { direct, queues }: DiskServing,
    ) -> Result<GuardedChild> {
        let (file, at) = (image.display(), socket.display());
        let mut command = match self {
            Self::Partywall => {
                let here = std::env::current_exe().during("finding this program")?;
                let program = here.with_file_name("partywall-blk");
                if !program.exists() {
                    let why = format!("{} is not there: run `make build`", program.display());
                    return Err(BenchError::Unavailable(why));
                }
                let mut command = Command::new(program);
                command.arg("serve").arg(image).arg("--socket").arg(socket).args(["--queues", &queues.to_string()]);
                command.args(direct.then_some("--direct")).env("RUST_LOG", "warn");
                command
            }
            Self::Qemu { aio } => {
                let missing = missing(&[("qemu-storage-daemon", "qemu-system-common")]);
                if !missing.is_empty() {
                    return Err(BenchError::Unavailable(format!("it needs Debian's {}", missing.join(" "))));
                }
                let mut command = Command::new("qemu-storage-daemon");
                let cache = if direct { ",cache.direct=on" } else { "" };
                let blockdev = |node: String| ["--blockdev".to_owned(), node];
                command.args(blockdev(format!("driver=file,node-name=file,filename={file},aio={aio}{cache}")));
                command.args(blockdev(format!("driver=raw,node-name=disk,file=file{cache}")));
                let export =
                    format!("type=vhost-user-blk,id=e,node-name=disk,addr.type=unix,addr.path={at},writable=on");
                command.args(["--export", &format!("{export},num-queues={queues}")]);
                command
            }
        };
        let log = socket.with_extension("log");
        let output = File::create(&log).during("making a log of the disk's server")?;
        let mut child = GuardedChild::spawn(command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(output))?;
        let begin = Instant::now();
        while !socket.exists() {
            let late = || (begin.elapsed() > PATIENCE).then(|| "it does not listen".to_owned());
            if let Some(end) = child.ended().or_else(late) {
                let said = std::fs::read_to_string(&log).unwrap_or_default();
                let line = said.lines().rfind(|line| !line.trim().is_empty()).unwrap_or_default();
                return Err(BenchError::Unavailable(format!("{}: {end}: {line}", self.name())));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(child)
    }
}

/// How long requests are measured.
fn measured(scale: Scale) -> Duration {
    Duration::from_millis(match scale {
        Scale::Smoke => 5,
        Scale::Quick => 300,
        Scale::Full => 2000,
    })
}

/// Bytes of the disk.
fn size(scale: Scale) -> usize {
    if scale == Scale::Smoke { 8 << 20 } else { 256 << 20 }
}

fn plans(scale: Scale, disk: DiskServing) -> Vec<BenchPlan> {
    let mut plans = Vec::new();
    for (bytes, depth, _) in CASES {
        for access in ACCESSES {
            let key = |mechanism| {
                Key::new("blk", mechanism)
                    .with(ACCESS, access)
                    .with(REQUEST, u64::from(bytes))
                    .with(DEPTH, u64::from(depth))
                    .with(CACHE, disk.cache())
                    .with(QUEUES, u64::from(disk.queues))
            };
            // Servers take turns, so that a slow minute of the machine touches all of them.
            let peers = disk.ways().iter().map(|aio| key(Mechanism::QemuStorageDaemon).with(AIO, *aio));
            for key in std::iter::once(key(Mechanism::PartywallBlk)).chain(peers) {
                let message = u64::from(bytes);
                let measured = measured(scale);
                let work = MeasuringWork::Stream { message, measured, warm_up: measured / 4 };
                plans.push(BenchPlan { tuning: Tuning::of(key.mechanism, message), key, work, one_cpu: false });
            }
        }
    }
    if scale == Scale::Smoke {
        let is_shown = |key: &Key| {
            SMOKE_CASES.iter().any(|(access, bytes)| {
                key.word(ACCESS) == Some(access) && key.number(REQUEST) == Some(u64::from(*bytes))
            }) && key.number(DEPTH) != Some(1)
        };
        plans.retain(|plan| is_shown(&plan.key));
    }
    plans
}

/// Processor time of a process so far, by both sums of the kernel.
#[derive(Debug, Clone, Copy)]
struct ServerTime {
    /// Lacks the threads that have ended.
    exact: Duration,
    /// Counts ticks.
    whole: Duration,
}

impl ServerTime {
    fn now(child: &GuardedChild, name: &str) -> Result<Self> {
        let exact = cpu::time_of(child.id()).ok_or_else(|| BenchError::transport(name, "it has ended"))?;
        Ok(Self { exact, whole: cpu::whole_time_of(child.id()).unwrap_or_default() })
    }

    /// The time from this reading to a later one. Each sum is compared with itself: at this reading, the sum by ticks may be up to a tick ahead
    /// of the exact one, so that the larger of both does not grow in a short run.
    fn until(self, later: Self) -> Duration {
        later.exact.saturating_sub(self.exact).max(later.whole.saturating_sub(self.whole))
    }
}

fn measure(plan: &BenchPlan, disk: DiskServing, folder: &Path) -> Result<Figures> {
    let MeasuringWork::Stream { measured, warm_up, .. } = plan.work else {
        return Err(BenchError::Transport("this is not a measurement of a disk".into()));
    };
    let key = &plan.key;
    let server = match key.word(AIO) {
        Some(aio) => DiskServer::Qemu { aio },
        None => DiskServer::Partywall,
    };
    let number = |name| key.number(name).and_then(|number| u32::try_from(number).ok()).unwrap_or(1);
    let (bytes, depth) = (number(REQUEST), u16::try_from(number(DEPTH)).unwrap_or(1));
    let load = DiskLoad { writes: key.word(ACCESS) == Some("write"), bytes, depth, measured, spin: SPIN };
    let socket = folder.join("socket");
    let _ = std::fs::remove_file(&socket);
    let child = server.start(&folder.join("image"), &socket, disk)?;
    let name = server.name();
    let failed = |e| BenchError::transport(&name, e);
    let mut generator = LoadGenerator::connect(&socket, disk.queues, bytes, depth).map_err(failed)?;
    generator.run(DiskLoad { measured: warm_up, ..load }).map_err(failed)?;
    let mut run = || -> Result<_> {
        let before = ServerTime::now(&child, &name)?;
        let rate = generator.run(load).map_err(failed)?;
        Ok((rate, before.until(ServerTime::now(&child, &name)?)))
    };
    let (mut rate, mut cpu) = run()?;
    // After a few milliseconds, the kernel may not have added what the server has used to either sum.
    for _ in 1..TRIES {
        if !cpu.is_zero() {
            break;
        }
        (rate, cpu) = run()?;
    }
    let cpu = cpu.as_secs_f64();
    drop(generator);
    child.terminate(PATIENCE);
    Ok(Figures::from([
        (Metric::PerSecond, rate.per_second()),
        (Metric::BytesPerSecond, rate.per_second() * f64::from(bytes)),
        (Metric::MiddleCpuPercent, 100.0 * cpu / rate.seconds),
        (Metric::CpuNsPerOperation, cpu * 1e9 / rate.requests as f64),
    ]))
}

/// Writes the disk's file: all of it has blocks, is durable, and is in the page cache.
fn write_image(path: &Path, size: usize) -> std::io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(&vec![1; size])?;
    file.sync_all()
}

/// Measures and shows. `folder` holds the disk's file while it runs.
pub(crate) fn run(bench: &mut Bench, disk: DiskServing, folder: Option<&PathBuf>) -> Result<CommandResults> {
    let scale = bench.scale();
    let scratch = match folder {
        Some(folder) => tempfile::Builder::new().prefix("partywall-bench-blk-").tempdir_in(folder),
        None => tempfile::Builder::new().prefix("partywall-bench-blk-").tempdir(),
    };
    let scratch = scratch.during("making a temporary folder")?;
    write_image(&scratch.path().join("image"), size(scale)).during("writing the disk's file")?;
    let cache = if disk.direct { "without the page cache (O_DIRECT)" } else { "in the page cache" };
    bench.say(&format!(
        "# a file of {}, {cache}, {}; nothing is pinned to a processor",
        unit::bytes(size(scale) as u64),
        if disk.queues == 1 {
            "one queue".to_owned()
        } else {
            format!("{} queues with as many requests each", disk.queues)
        },
    ))?;
    let is_in_memory = rustix::fs::statfs(scratch.path()).is_ok_and(|found| found.f_type == TMPFS);
    if disk.direct && is_in_memory {
        bench.say("# NOTE: the folder is in memory, so no storage is behind it: name another one with --folder")?;
    }
    let runs = bench.common.runs();
    let cells = bench.measure_by(plans(scale, disk), runs, |bench, plan| {
        bench.interrupt.check()?;
        measure(plan, disk, scratch.path())
    })?;
    let layout = Layout {
        group: &[(ACCESS, "access"), (REQUEST, "request"), (DEPTH, "depth")],
        row: &[(AIO, "its aio")],
        metrics: &[Metric::PerSecond, Metric::BytesPerSecond, Metric::CpuNsPerOperation, Metric::MiddleCpuPercent],
        baseline: Mechanism::QemuStorageDaemon,
    };
    bench.say(&format!("\n## Requests, and processor time of the server\n\n{}", table::cells(&cells, &layout)))?;
    let verdicts = judge(&cells);
    bench.say("\n## What is promised, and what was measured (median of the ratios of the turns of this run; figures are medians)\n")?;
    bench.say(&table::verdicts(&verdicts))?;
    bench.draw(&pictures(&cells))?;
    Ok(CommandResults { cells, verdicts })
}

/// The cells of one case: that of `partywall-blk`, and those of the ways of `qemu-storage-daemon`.
fn cells_with<'a>(cells: &'a [Cell], access: &str, bytes: u32, depth: u16) -> impl Iterator<Item = &'a Cell> {
    cells.iter().filter(move |cell| {
        let key = &cell.key;
        let numbers = [REQUEST, DEPTH].map(|name| key.number(name));
        key.word(ACCESS) == Some(access) && numbers == [Some(bytes.into()), Some(depth.into())]
    })
}

fn case_name(access: &str, bytes: u32, depth: u16) -> String {
    format!("{access} {}, depth {depth}", unit::bytes(bytes.into()))
}

fn judge(cells: &[Cell]) -> Vec<Verdict> {
    let mut verdicts = Vec::new();
    for (bytes, depth, limit) in CASES {
        for access in ACCESSES {
            let rate = |cell: &&Cell| cell.median(Metric::PerSecond).unwrap_or(0.0);
            let all = || cells_with(cells, access, bytes, depth);
            let ours = all().find(|cell| cell.key.mechanism == Mechanism::PartywallBlk);
            let peers = all().filter(|cell| cell.key.mechanism == Mechanism::QemuStorageDaemon);
            // Of the ways of the peer, the fastest one counts.
            let theirs = peers.max_by(|a, b| rate(a).total_cmp(&rate(b)));
            let case = case_name(access, bytes, depth);
            for (what, metric, bound, limit) in [
                ("requests per second", Metric::PerSecond, Bound::AtLeast, limit),
                ("cpu per request", Metric::CpuNsPerOperation, Bound::AtMost, CPU_RATIO),
            ] {
                let claim = format!("{case}, {what}: partywall-blk : qemu-storage-daemon");
                let interval = ours.zip(theirs).and_then(|(ours, theirs)| ours.interval_to(theirs, metric));
                verdicts.push(Verdict::by_turns(claim, bound, limit, metric, ours, theirs).with_interval(interval));
            }
        }
    }
    verdicts
}

/// Requests per second, and processor time of each request, by access, size and depth.
fn pictures(cells: &[Cell]) -> BTreeMap<String, Picture> {
    let picture = |title: &str, x, metric: Metric| {
        let group = |access: &str, bytes: u32, depth: u16| {
            let bar = |cell: &Cell| {
                let (mechanism, value) = (cell.key.mechanism, cell.summary(metric)?);
                let name = cell.key.word(AIO).map_or(mechanism.to_string(), |aio| format!("{mechanism}, {aio}"));
                Some(Bar { name, mechanism, value, label: metric.show(value.median) })
            };
            (
                case_name(access, bytes, depth),
                cells_with(cells, access, bytes, depth).filter_map(bar).collect::<Vec<_>>(),
            )
        };
        let cases = CASES.into_iter().flat_map(|(bytes, depth, _)| ACCESSES.map(|access| group(access, bytes, depth)));
        let groups = cases.filter(|(_, bars)| !bars.is_empty()).collect();
        Picture::Bars(Bars { title: title.into(), x, groups })
    };
    let requests = ("requests per second", Axis::CountByTens);
    let times = ("processor time of the server", Axis::TimeByTens);
    BTreeMap::from([
        ("blk-requests".into(), picture("Requests of a disk", requests, Metric::PerSecond)),
        ("blk-cpu".into(), picture("Processor time of a request", times, Metric::CpuNsPerOperation)),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Cells of all plans, with figures by mechanism and way.
    fn cells(disk: DiskServing, runs: usize, figures: impl Fn(&Key) -> [f64; 2]) -> Vec<Cell> {
        let cell = |plan: BenchPlan| {
            let [rate, cpu] = figures(&plan.key);
            let run = Figures::from([(Metric::PerSecond, rate), (Metric::CpuNsPerOperation, cpu)]);
            Cell { runs: vec![run; runs], ..Cell::new(plan.key) }
        };
        plans(Scale::Full, disk).into_iter().map(cell).collect()
    }

    #[test]
    fn every_claim_about_disks_finds_its_cells() {
        for disk in [DiskServing::CACHED, DiskServing { direct: true, queues: 4 }] {
            let verdicts = judge(&cells(disk, 1, |_| [1.0; 2]));
            assert_eq!(verdicts.len(), 16);
            for verdict in verdicts {
                assert!(verdict.measured.is_some(), "{}", verdict.claim);
            }
        }
        assert!(judge(&[]).iter().all(|verdict| verdict.measured.is_none()));
    }

    #[test]
    fn fastest_way_of_the_peer_counts_for_rate_and_cpu() {
        let figures = |key: &Key| match key.word(AIO) {
            None => [1.2, 0.7],
            Some("threads") => [1.0, 0.5],
            Some(_) => [0.5, 1.0],
        };
        let words: Vec<&str> = judge(&cells(DiskServing::CACHED, 6, figures)).iter().map(Verdict::word).collect();
        let [plain, deep] = [["met", "MISSED"], ["MISSED"; 2]];
        assert_eq!(words, [plain, plain, deep, deep, plain, plain, plain, plain].concat());
    }

    #[test]
    fn plans_of_disks_have_unique_keys_and_all_ways() {
        for (scale, direct, count) in [
            (Scale::Full, false, 8 * 3),
            (Scale::Quick, true, 8 * 4),
            (Scale::Smoke, false, 2 * 3),
            (Scale::Smoke, true, 2 * 4),
        ] {
            let plans = plans(scale, DiskServing { direct, queues: 1 });
            let mut keys: Vec<Key> = plans.into_iter().map(|plan| plan.key).collect();
            keys.sort();
            keys.dedup();
            assert_eq!(keys.len(), count, "{scale:?}, direct {direct}");
        }
    }
}
