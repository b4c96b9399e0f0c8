//! File systems of virtual machines, under the workloads of `fs`.
//!
//! ```text
//!   machine a, the client            machine b, the server             a third machine          host
//!   partywall fs mount ============= partywall fs export
//!   NFS, sshfs ---- virtio-net ----- nfsd, sftp-server                 9p, virtiofs ==== QEMU, virtiofsd
//! ```
//!
//! The third machine has no windows, since QEMU gives a device of vhost-user few places for memory. It boots when it is first wanted.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use partywall_lab::{Guest, GuestOptions, ImageOptions, KernelKind, Lab, Running, beside, nas};
use rustix::process::Signal;

use super::{
    NAME,
    machines::{PROGRAM, fault, read_answer},
    program::{LOOK, START, await_end, listens},
};
use crate::{
    affinity,
    apps::{accounts::Accounts, site},
    args::{Common, Scale},
    bench::{Bench, BenchPlan},
    commands::fs,
    error::{BenchError, During, Result},
    files::{
        mounts,
        workload::{FileWork, FilesOrder, FilesStep, Personality},
    },
    interrupt::Interrupt,
    mechanism::{Mechanism, Tuning},
    process::GuardedChild,
    report::{
        cell::{Cell, Key, Problem},
        metric::Metric,
        plot::Picture,
        table::{self, Layout},
        verdict::{Bound, Verdict},
    },
    task::{Figures, MeasuringWork},
};

/// All ways, in the order of tables.
const WAYS: [Mechanism; 7] = [
    Mechanism::PartywallFs,
    Mechanism::PartywallFsTcp,
    Mechanism::Nfs,
    Mechanism::Sshfs,
    Mechanism::NineP,
    Mechanism::Virtiofs,
    Mechanism::Local,
];
/// The workloads. Large reads would need more memory than a machine has.
const PERSONALITIES: [Personality; 3] = [Personality::Mail, Personality::Web, Personality::File];
/// Kernel modules of the two machines.
const MODULES: [&str; 3] = ["fuse", "nfsd", "nfsv4"];
/// The exported folder in its machine.
const EXPORT: &str = "/export";
/// Folders of a machine where its mounts are.
const MOUNTS: &str = "/mnt";
/// The ports of the servers of TCP.
const PARTYWALL_PORT: u16 = 7201;
const SFTP_PORT: u16 = 7202;
/// The server of sshfs, which ssh would start.
const SFTP_SERVER: &str = "/usr/lib/openssh/sftp-server";
/// Where Debian has the server of virtiofs: by itself, and as a part of an older QEMU.
const VIRTIOFSD: [&str; 2] = ["/usr/libexec/virtiofsd", "/usr/lib/qemu/virtiofsd"];
/// MiB of the third machine.
const MEMORY: u32 = 512;

/// Whether the options ask for any of the ways.
pub(super) fn are_wanted(common: &Common) -> bool {
    WAYS.into_iter().any(|way| common.wants(way))
}

/// The kernel modules that the two machines load for the ways that the options ask for.
pub(super) fn modules(common: &Common) -> &'static [&'static str] {
    if are_wanted(common) { &MODULES } else { &[] }
}

/// Programs of the host for the two machines, with their names there. A missing one is reported when it is measured.
pub(super) fn programs(common: &Common) -> Vec<(PathBuf, String)> {
    if !are_wanted(common) {
        return Vec::new();
    }
    let mut programs: Vec<(PathBuf, String)> =
        beside("partywall-fs").into_iter().map(|path| (path, "partywall-fs".to_owned())).collect();
    let found = |(program, package): &(&str, &str)| {
        let path = site::find(program, package).ok().filter(|path| path.is_file())?;
        let name = path.file_name()?.to_string_lossy().into_owned();
        Some((path, name))
    };
    let nfs = if common.wants(Mechanism::Nfs) { nas::NFS_SERVER } else { &[] };
    let sshfs: &[_] = if common.wants(Mechanism::Sshfs) { &SSHFS } else { &[] };
    programs.extend(nfs.iter().chain(sshfs).filter_map(found));
    programs
}

/// The programs of sshfs on both sides, and the packages that they are in.
const SSHFS: [(&str, &str); 3] = [("sshfs", "sshfs"), ("socat", "socat"), (SFTP_SERVER, "openssh-sftp-server")];

/// All of it.
pub(super) fn plans(scale: Scale) -> Vec<BenchPlan> {
    let (time, divide) = match scale {
        Scale::Smoke => (50, 100),
        Scale::Quick => (2_000, 20),
        Scale::Full => (5_000, 20),
    };
    let workloads = if scale == Scale::Smoke { &PERSONALITIES[..1] } else { &PERSONALITIES };
    let plan = |personality: Personality, way: Mechanism| BenchPlan {
        key: Key::new(NAME, way).with("workload", personality.name()).with("divided", u64::from(divide)),
        tuning: Tuning::of(way, 0),
        work: MeasuringWork::Files(FileWork { personality, divide, time: Duration::from_millis(time) }),
        one_cpu: false,
    };
    workloads.iter().flat_map(|&personality| WAYS.map(|way| plan(personality, way))).collect()
}

/// The file systems of the machines, each mounted when it is first wanted. Dropping it unmounts them.
pub(super) struct GuestFiles<'a> {
    client: &'a Guest,
    server: &'a Guest,
    mounted: BTreeMap<Mechanism, std::result::Result<(), Problem>>,
    /// The programs of mounts and exports.
    running: Vec<Running<'a>>,
    is_exported: bool,
    folder_machine: Option<std::result::Result<FolderMachine, Problem>>,
    turn: u32,
}

impl<'a> GuestFiles<'a> {
    pub(super) fn new([client, server]: [&'a Guest; 2]) -> Self {
        Self {
            client,
            server,
            mounted: BTreeMap::new(),
            running: Vec::new(),
            is_exported: false,
            folder_machine: None,
            turn: 0,
        }
    }

    /// One measurement, in a new folder, of which no cache knows anything.
    pub(super) fn run(&mut self, bench: &Bench, plan: &BenchPlan) -> Result<Figures> {
        let MeasuringWork::Files(work) = &plan.work else {
            return Err(BenchError::Transport("not a workload of files".into()));
        };
        let (way, interrupt) = (plan.key.mechanism, &bench.interrupt);
        self.mount(way, bench)?;
        self.turn += 1;
        let turn = format!("turn-{}", self.turn);
        let there = Path::new(MOUNTS).join(way.name()).join(&turn);
        let order = |step, folder: &Path| FilesOrder { step, work: work.clone(), folder: folder.to_owned() };
        match way {
            Mechanism::NineP | Mechanism::Virtiofs => {
                let machine = self.folder_machine(bench)?;
                let host = machine.folder.path().join("export").join(&turn);
                let used =
                    work.make(&host).and_then(|()| measure(&machine.guest, &order(FilesStep::Use, &there), interrupt));
                let removed = FileWork::remove(&host);
                used.and_then(|figures| removed.map(|()| figures))
            }
            _ => {
                let local = way == Mechanism::Local;
                let (server, folder) =
                    if local { (self.client, there.clone()) } else { (self.server, Path::new(EXPORT).join(&turn)) };
                let used = execute(server, &order(FilesStep::Make, &folder), interrupt)
                    .and_then(|_| measure(self.client, &order(FilesStep::Use, &there), interrupt));
                let removed = execute(server, &order(FilesStep::Remove, &folder), interrupt);
                used.and_then(|figures| removed.map(|_| figures))
            }
        }
    }

    fn mount(&mut self, way: Mechanism, bench: &Bench) -> Result<()> {
        if !self.mounted.contains_key(&way) {
            let mounted = match self.try_mount(way, bench) {
                Err(BenchError::Interrupted) => return Err(BenchError::Interrupted),
                mounted => mounted.map_err(problem),
            };
            self.mounted.insert(way, mounted);
        }
        match self.mounted.get(&way) {
            Some(Err(problem)) => Err(again(problem)),
            _ => Ok(()),
        }
    }

    fn try_mount(&mut self, way: Mechanism, bench: &Bench) -> Result<()> {
        let at = format!("{MOUNTS}/{way}");
        let interrupt = &bench.interrupt;
        match way {
            Mechanism::NineP | Mechanism::Virtiofs => return self.folder_machine(bench)?.mount(way, &at),
            Mechanism::Local => return shell(self.client, &format!("mkdir -p {at} && mount -t tmpfs tmpfs {at}")),
            _ => {}
        }
        shell(self.client, &format!("mkdir -p {at}"))?;
        if !self.is_exported {
            shell(self.server, &format!("mkdir -p {EXPORT} && mount -t tmpfs tmpfs {EXPORT}"))?;
            self.is_exported = true;
        }
        match way {
            Mechanism::PartywallFs => {
                beside("partywall-fs").map_err(fault)?;
                self.begin(
                    self.server,
                    &format!("partywall fs export {EXPORT} --squash none --as files:data"),
                    "exporting",
                )?;
                let service = format!("{}.files:data", self.server.name());
                await_line(self.client, &format!("partywall list services | grep -q {service}"), interrupt)?;
                let said = self.begin(self.client, &format!("partywall fs mount {service} {at}"), "mounted")?;
                // By a stream it would be another measurement.
                if !said.contains("by calls") {
                    return Err(BenchError::Transport(format!("it is not mounted by calls: {said}")));
                }
            }
            Mechanism::PartywallFsTcp => {
                beside("partywall-fs").map_err(fault)?;
                let address = format!("{}:{PARTYWALL_PORT}", self.server_address()?);
                let export = format!("partywall fs export {EXPORT} --squash none --insecure --tcp {address}");
                self.begin(self.server, &export, "exporting")?;
                let mount = format!("partywall fs mount --transport tcp --insecure {address} {at}");
                self.begin(self.client, &mount, "mounted")?;
            }
            Mechanism::Nfs => {
                needs(nas::NFS_SERVER)?;
                let server = self.server_address()?;
                let own = self.client.address().map(|address| address.to_string()).unwrap_or_default();
                // No client of an earlier server is waited for.
                let start = nas::nfs_server(EXPORT) + "echo Y > /proc/fs/nfsd/v4_end_grace";
                shell(self.server, &start)?;
                let options = nas::nfs_options(&server, &own);
                await_line(self.client, &format!("mount -t nfs4 -o {options} {server}:/ {at}"), interrupt)?;
            }
            _ => {
                needs(&SSHFS)?;
                let server = self.server_address()?;
                // It serves users that have a name.
                shell(
                    self.server,
                    "mkdir -p /etc; echo root:x:0:0::/:/bin/sh > /etc/passwd; echo root:x:0: > /etc/group",
                )?;
                let listen = format!("TCP-LISTEN:{SFTP_PORT},fork,nodelay,reuseaddr");
                let socat = format!("socat {listen} EXEC:/bin/sftp-server,nofork");
                let running = self.server.start(&["sh", "-c", &format!("exec {socat}")]).map_err(fault)?;
                self.running.push(running);
                await_line(self.server, &listens(SFTP_PORT), interrupt)?;
                let mount = format!("exec sshfs -f -o directport={SFTP_PORT} {server}:{EXPORT} {at}");
                self.running.push(self.client.start(&["sh", "-c", &mount]).map_err(fault)?);
                await_line(self.client, &format!("grep -q ' {at} ' /proc/mounts"), interrupt)?;
            }
        }
        Ok(())
    }

    /// Starts a program that goes on until it is ended, and waits until it has said a word. Returns what it has said.
    fn begin(&mut self, guest: &'a Guest, line: &str, word: &str) -> Result<String> {
        let mut running = guest.start(&["sh", "-c", &format!("exec {line} 2>&1")]).map_err(fault)?;
        let waited = running.wait_for(word, START);
        let said = running.so_far().text();
        // It is ended with the others, also if it has not said the word.
        self.running.push(running);
        waited.map_err(fault)?;
        Ok(said)
    }

    fn server_address(&self) -> Result<String> {
        let address = self.server.address().map(|address| address.to_string());
        address.ok_or_else(|| BenchError::Unavailable("the machines have no network".into()))
    }

    fn folder_machine(&mut self, bench: &Bench) -> Result<&FolderMachine> {
        let machine = self.folder_machine.get_or_insert_with(|| {
            bench.progress("a third machine boots, for 9p and virtiofs");
            FolderMachine::boot(&bench.scratch()).map_err(problem)
        });
        machine.as_ref().map_err(again)
    }
}

/// An error as it is remembered, so that a mount is not tried again for each workload.
fn problem(e: BenchError) -> Problem {
    match e {
        BenchError::Unavailable(why) => Problem::Unavailable(why),
        e => Problem::Failed(e.to_string()),
    }
}

/// The remembered error.
fn again(problem: &Problem) -> BenchError {
    match problem {
        Problem::Unavailable(why) => BenchError::Unavailable(why.clone()),
        Problem::Failed(why) => BenchError::Transport(why.clone()),
    }
}

impl Drop for GuestFiles<'_> {
    fn drop(&mut self) {
        for way in self.mounted.keys() {
            // A mount is gone with its machine, and one that is busy goes when it is not.
            let _ = self.client.shell(&format!("umount -l {MOUNTS}/{way} 2> /dev/null; true"));
        }
        for running in &self.running {
            let _ = running.signal(Signal::KILL);
        }
    }
}

/// A machine that has a folder of the host by 9p and by virtiofs.
struct FolderMachine {
    // The machine ends before what serves it.
    guest: Guest,
    _virtiofsd: Option<GuardedChild>,
    _lock: LockFile,
    /// Why there is no 9p, or no virtiofs.
    lacks: BTreeMap<Mechanism, String>,
    folder: tempfile::TempDir,
}

/// The file by which the virtiofsd of QEMU reserves its socket, and which it leaves behind.
struct LockFile(PathBuf);

impl LockFile {
    fn of(socket: &Path) -> Self {
        Self(Path::new("/run/virtiofsd").join(format!("{}.pid", socket.display().to_string().replace('/', "."))))
    }
}

impl Drop for LockFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

impl FolderMachine {
    fn boot(scratch: &Path) -> Result<Self> {
        let folder = mounts::folder_below(&fs::memory_folder())?;
        let export = folder.path().join("export");
        std::fs::create_dir(&export).during(format!("making {}", export.display()))?;
        let mut lacks = BTreeMap::new();
        let lab = Self::lab(&mut lacks)?;
        let mut options = GuestOptions::new("c").slots(0).memory(MEMORY);
        if !lacks.contains_key(&Mechanism::NineP) {
            let device = format!("local,id=nine,path={},security_model=none", export.display());
            options = options.arguments(["-fsdev", &device, "-device", "virtio-9p-pci,fsdev=nine,mount_tag=9p"]);
        }
        let socket = scratch.join("virtiofs.sock");
        let lock = LockFile::of(&socket);
        let server = match Self::serve(&export, &socket) {
            Ok(server) => {
                // The server maps the memory of the machine.
                let socket = format!("socket,id=files,path={}", socket.display());
                let device = "vhost-user-fs-pci,chardev=files,tag=virtiofs";
                options = options.shared_memory().arguments(["-chardev", &socket, "-device", device]);
                Some(server)
            }
            Err(e) => {
                lacks.insert(Mechanism::Virtiofs, e.to_string());
                None
            }
        };
        let guest = lab.boot(options).map_err(fault)?;
        Ok(Self { guest, _virtiofsd: server, _lock: lock, lacks, folder })
    }

    /// The image of the machine. Debian's kernel for clouds has no 9p.
    fn lab(lacks: &mut BTreeMap<Mechanism, String>) -> Result<Lab> {
        let bench = std::env::current_exe().during("finding this program")?;
        let image = ImageOptions::default().program(bench, PROGRAM).module("virtiofs");
        let with_9p = image.clone().kernel(KernelKind::Full).module("9p").module("9pnet_virtio");
        Lab::new("bench-vm-folder", &with_9p).or_else(|e| {
            lacks.insert(Mechanism::NineP, e.to_string());
            Lab::new("bench-vm-folder", &image).map_err(fault)
        })
    }

    fn serve(export: &Path, socket: &Path) -> Result<GuardedChild> {
        let program = VIRTIOFSD.into_iter().find(|path| Path::new(path).is_file());
        let program = program.ok_or_else(|| BenchError::Unavailable("it needs Debian's virtiofsd".into()))?;
        let log = socket.with_extension("log");
        // It also reports the orderly end of its machine as an error.
        let mut command = Command::new("sh");
        command.args(["-c", "log=$1; shift; exec \"$0\" \"$@\" 2> \"$log\"", program]).arg(&log);
        command
            .arg(format!("--socket-path={}", socket.display()))
            .arg("-o")
            .arg(format!("source={}", export.display()));
        let mut server = mounts::start(&command)?;
        let deadline = Instant::now() + START;
        while !socket.exists() {
            let ended = server.ended();
            if ended.is_some() || Instant::now() > deadline {
                let said = std::fs::read_to_string(&log).unwrap_or_default();
                let end = ended.unwrap_or_else(|| "it does not listen".into());
                return Err(BenchError::Unavailable(format!("virtiofsd: {end}: {}", said.trim())));
            }
            std::thread::sleep(LOOK);
        }
        Ok(server)
    }

    fn mount(&self, way: Mechanism, at: &str) -> Result<()> {
        if let Some(why) = self.lacks.get(&way) {
            return Err(BenchError::Unavailable(why.clone()));
        }
        let kind = match way {
            Mechanism::NineP => "9p -o trans=virtio,version=9p2000.L,msize=524288",
            _ => "virtiofs",
        };
        shell(&self.guest, &format!("mkdir -p {at} && mount -t {kind} {way} {at}"))
    }
}

fn needs(programs: &[(&str, &'static str)]) -> Result<()> {
    match crate::peers::sources::missing(programs)[..] {
        [] => Ok(()),
        ref missing => {
            let mut packages = missing.to_vec();
            packages.dedup();
            Err(BenchError::Unavailable(format!("it needs Debian's {}", packages.join(" "))))
        }
    }
}

fn shell(guest: &Guest, line: &str) -> Result<()> {
    guest.shell(line).map(drop).map_err(fault)
}

/// Repeats a line of shell until it succeeds.
fn await_line(guest: &Guest, line: &str, interrupt: &Interrupt) -> Result<()> {
    let deadline = Instant::now() + START;
    loop {
        let done = guest.run(&["sh", "-c", line]).map_err(fault)?;
        interrupt.check()?;
        if done.status == 0 {
            return Ok(());
        }
        if Instant::now() > deadline {
            let said = String::from_utf8_lossy(&done.stderr);
            let machine = guest.name();
            return Err(BenchError::Transport(format!(
                "`{line}` in machine {machine} fails with {}: {said}",
                done.status
            )));
        }
        std::thread::sleep(LOOK);
    }
}

/// Executes the use of files. The processor time is that of the host, which contains the emulation of all machines.
fn measure(guest: &Guest, order: &FilesOrder, interrupt: &Interrupt) -> Result<Figures> {
    let processors = affinity::allowed()?.len();
    let accounts = Accounts::now(guest.pid());
    let mut figures = execute(guest, order, interrupt)?;
    let host = accounts.since(processors);
    // The machine's own account knows nothing of the server's machine or of the host.
    figures.remove(&Metric::CpuNsPerOperation);
    figures.extend(host.into_iter().filter(|(metric, _)| *metric == Metric::MachineCpuPercent));
    Ok(figures)
}

/// Executes an order by the bench in a machine.
fn execute(guest: &Guest, order: &FilesOrder, interrupt: &Interrupt) -> Result<Figures> {
    let mut running = guest.start(&[PROGRAM, "inside", "files"]).map_err(fault)?;
    let mut line = serde_json::to_vec(order).map_err(|e| BenchError::transport("writing an order", e))?;
    line.push(b'\n');
    running.input(&line).map_err(fault)?;
    await_end(&mut running, START + order.work.time * 20, interrupt, || format!("the bench in {}", guest.name()))?;
    read_answer(running.so_far(), |why| BenchError::Transport(format!("machine {}: {why}", guest.name())))
}

/// The table.
pub(super) fn show(bench: &Bench, cells: &[Cell]) -> Result<()> {
    if cells.is_empty() {
        return Ok(());
    }
    let layout = Layout {
        group: &[("workload", "workload")],
        row: &[],
        metrics: &[Metric::PerSecond, Metric::BytesPerSecond, Metric::MeanNs, Metric::P99Ns, Metric::MachineCpuPercent],
        baseline: Mechanism::PartywallFsTcp,
    };
    let divided = cells.iter().find_map(|cell| cell.key.number("divided")).unwrap_or(1);
    let title =
        "File systems of machines: between two, of a third one with the host (9p, virtiofs), and within one (local)";
    bench.say(&format!(
        "\n## {title}\n\nfilebench's numbers of files divided by {divided}\n\n{}",
        table::cells(cells, &layout)
    ))
}

/// Partywall's file system beside each other one between two machines that was measured. Those of the host in the third machine serve something
/// else: their server is no emulated machine.
pub(super) fn judge(cells: &[Cell]) -> Vec<Verdict> {
    let mut verdicts = Vec::new();
    for personality in PERSONALITIES {
        let ours = fs::find(cells, Mechanism::PartywallFs, personality);
        for rival in [Mechanism::PartywallFsTcp, Mechanism::Nfs, Mechanism::Sshfs] {
            let text = format!("{}: partywall-fs : {rival}", personality.name());
            let theirs = fs::find(cells, rival, personality);
            verdicts.push(Verdict::by_turns(text, Bound::Report, 1.0, Metric::PerSecond, ours, theirs));
        }
    }
    verdicts.retain(|verdict| verdict.measured.is_some());
    verdicts
}

/// The picture of all ways.
pub(super) fn picture(cells: &[Cell]) -> Picture {
    fs::bars(cells, "Mean time of an operation in virtual machines", &WAYS, &PERSONALITIES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_comparison_of_file_systems_finds_its_cells() {
        let cells: Vec<Cell> = plans(Scale::Full)
            .into_iter()
            .map(|plan| Cell { runs: vec![Figures::from([(Metric::PerSecond, 1.0)])], ..Cell::new(plan.key) })
            .collect();
        let verdicts = judge(&cells);
        assert_eq!(verdicts.len(), 3 * 3);
        for verdict in verdicts {
            assert!(verdict.measured.is_some(), "{}", verdict.claim);
        }
    }

    #[test]
    fn missing_programs_of_a_mount_name_their_package_once() {
        let why = needs(&[("no-such-program", "one"), ("no-such-other", "one")]).unwrap_err().to_string();
        assert!(why.ends_with("it needs Debian's one"), "{why}");
        assert!(needs(&[("sh", "dash")]).is_ok());
    }
}
