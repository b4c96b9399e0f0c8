//! Processes of a test: peers that can be killed, a broker that can be killed, and a process for a test alone.

use super::{HANG, eventually};
use rustix::process::{Pid, Signal, kill_process};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant, SystemTime};

/// Set in a process that a test has started, to say what it is to do.
const ROLE: &str = "PARTYWALL_TEST_ROLE";
/// The broker's socket, for such a process.
const BROKER: &str = "PARTYWALL_TEST_BROKER";

/// A process that is killed when the test is done with it.
pub(crate) struct Process(Child);

impl Process {
    pub(crate) fn new(child: Child) -> Self {
        Self(child)
    }

    pub(crate) fn id(&self) -> u32 {
        self.0.id()
    }

    /// `kill -9`. Returns the moment before.
    pub(crate) fn kill(&mut self) -> Instant {
        let at = Instant::now();
        self.0.kill().unwrap();
        at
    }

    pub(crate) fn is_running(&mut self) -> bool {
        self.0.try_wait().unwrap().is_none()
    }

    /// Waits until it has ended, and says whether well.
    pub(crate) fn wait(&mut self) -> bool {
        let start = Instant::now();
        loop {
            if let Some(status) = self.0.try_wait().unwrap() {
                return status.success();
            }
            assert!(start.elapsed() < HANG, "process {} does not end", self.id());
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The role that this process was started for, if a test started it. From then on it ends with the process that started it.
pub(crate) fn role() -> Option<(String, PathBuf)> {
    let role = std::env::var(ROLE).ok()?;
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL)).unwrap();
    Some((role, std::env::var_os(BROKER).unwrap_or_default().into()))
}

/// Starts this test program again, to run only its `child_main`, which asks for its [`role`].
pub(crate) fn child(role: &str, broker: &Path) -> Process {
    test_of_this_program("child_main", role, broker)
}

fn test_of_this_program(test: &str, role: &str, broker: &Path) -> Process {
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture", "--include-ignored"])
        .env(ROLE, role)
        .env(BROKER, broker)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn();
    Process(child.unwrap())
}

/// Runs a test in a separate process, where no other test opens and closes descriptors meanwhile. `test` is its name.
pub(crate) fn alone(test: &str, body: impl FnOnce()) {
    if role().is_some_and(|(role, _)| role == test) {
        body();
    } else {
        let mut process = test_of_this_program(test, test, Path::new(""));
        // Without a limit: it has its own hang guard, and knows how long it may take.
        assert!(process.0.wait().unwrap().success(), "{test} failed; what it said is above");
    }
}

/// The footprint of [`partywall_region::conformance::footprint`], and the processes of ours that live or were not waited for.
pub(crate) fn footprint() -> (usize, usize, usize) {
    let (descriptors, maps) = partywall_region::conformance::footprint();
    let me = std::process::id();
    let children = std::fs::read_to_string(format!("/proc/{me}/task/{me}/children")).unwrap_or_default();
    (descriptors, maps, children.split_whitespace().count())
}

/// Asserts that a footprint comes back to what it was. Threads that are just ending may need a moment for it.
pub(crate) fn assert_nothing_left(before: (usize, usize, usize)) {
    eventually(&format!("as few (descriptors, mappings, processes) as before, {before:?}"), || footprint() <= before);
    assert_eq!(footprint(), before, "(descriptors, mappings, processes)");
}

/// A real `partywalld`, which can be killed and started again on the same socket.
pub(crate) struct Daemon {
    dir: tempfile::TempDir,
    process: Option<Process>,
}

impl Daemon {
    pub(crate) fn start() -> Self {
        let mut daemon = Self { dir: tempfile::tempdir().unwrap(), process: None };
        daemon.restart();
        daemon
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.dir.path().join("broker.sock")
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let process = Pid::from_child(&self.process.as_ref().unwrap().0);
        kill_process(process, signal).unwrap();
    }

    /// `kill -9`, and waits until it is gone.
    pub(crate) fn kill(&mut self) {
        self.process = None;
    }

    pub(crate) fn restart(&mut self) {
        self.kill();
        let mut command = Command::new(partywalld());
        command.arg("--socket").arg(self.path()).env_remove("PARTYWALL_LOG").stdin(Stdio::null());
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let mut log = child.stderr.take().unwrap();
        self.process = Some(Process(child));
        // Read to its end, so that the daemon never waits for a reader of its log.
        std::thread::spawn(move || log.read_to_string(&mut String::new()));
        eventually("a broker answers", || {
            partywall::Domain::builder().name("probe").broker(self.path()).join().is_ok()
        });
    }
}

/// The program `partywalld`.
///
/// Cargo builds the programs of a package for that package's own tests only, so this one is built here.
fn partywalld() -> &'static Path {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| built("partywalld", &["--package", "partywall-daemon", "--bin", "partywalld"]))
}

/// A file in the directory of this build, above that of the test programs. Built if it is not there or older than the sources, unless
/// the environment says that everything is built (`make test` does).
pub(crate) fn built(name: &str, options: &[&str]) -> PathBuf {
    let test_program = std::env::current_exe().unwrap();
    let profile = test_program.parent().and_then(Path::parent).unwrap();
    let path = profile.join(name);
    if std::env::var_os("PARTYWALL_PROGRAMS_ARE_BUILT").is_some() && path.exists() {
        return path;
    }
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let sources = ["shm/src", "region/src", "daemon/src", "partywall/src", "partywall/examples"];
    let newest = sources.iter().map(|dir| newest_source(&crates.join(dir))).max();
    let made = std::fs::metadata(&path).and_then(|m| m.modified()).ok();
    if made < newest {
        let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        cargo.args(["build", "--quiet"]).args(options).arg("--target-dir").arg(profile.parent().unwrap());
        if profile.ends_with("release") {
            cargo.arg("--release");
        }
        assert!(cargo.current_dir(crates).status().unwrap().success(), "{name} cannot be built");
    }
    path
}

fn newest_source(dir: &Path) -> SystemTime {
    let mut newest = SystemTime::UNIX_EPOCH;
    for entry in std::fs::read_dir(dir).unwrap().map(Result::unwrap) {
        let of = if entry.file_type().unwrap().is_dir() {
            newest_source(&entry.path())
        } else {
            entry.metadata().unwrap().modified().unwrap()
        };
        newest = newest.max(of);
    }
    newest
}
