//! A broker and domains made of the real binaries, in a temporary directory, removed when the test ends.

#![allow(dead_code, reason = "every test file uses its own part")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod collect;
#[path = "../../../shm/tests/random/mod.rs"]
pub(crate) mod random;

use std::fs::File;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

use collect::collect;
use tempfile::TempDir;

/// A guard against hangs; nothing here takes nearly as long.
pub(crate) const LONGEST: Duration = Duration::from_secs(120);

pub(crate) const PARTYWALL: &str = env!("CARGO_BIN_EXE_partywall");

/// `partywalld` beside `partywall`. Cargo builds a test's own binaries only, so this builds the broker (or finds it fresh).
pub(crate) fn partywalld() -> &'static Path {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| built("partywall-daemon", "partywalld"))
}

/// The library that `partywall run` preloads, beside it likewise.
pub(crate) fn library() -> &'static Path {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| built("partywall-preload", partywall_protocol::environment::LIBRARY))
}

/// The programs of `partywall net` and `partywall blk`.
pub(crate) fn devices() {
    built("partywall-vhost", "partywall-net");
    built("partywall-vhost", "partywall-blk");
}

/// The program of `partywall fs`.
pub(crate) fn file_system() {
    built("partywall-fs", "partywall-fs");
}

/// The program that boots virtual machines, with the agent that runs in them.
pub(crate) fn lab() -> &'static Path {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| {
        built("partywall-agent", "partywall-agent");
        built("partywall-lab", "partywall-lab")
    })
}

/// Builds a file, unless the environment says that everything is built (`make test` does).
fn built(package: &str, file: &str) -> PathBuf {
    let directory = Path::new(PARTYWALL).parent().unwrap();
    if std::env::var_os("PARTYWALL_PROGRAMS_ARE_BUILT").is_some() && directory.join(file).exists() {
        return directory.join(file);
    }
    let profile = directory.file_name().unwrap().to_str().unwrap();
    let mut build = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    build.args(["build", "--quiet", "--package", package]);
    build.args(["--profile", if profile == "debug" { "dev" } else { profile }]);
    build.arg("--target-dir").arg(directory.parent().unwrap()).current_dir(env!("CARGO_MANIFEST_DIR"));
    let built = build.status().is_ok_and(|status| status.success());
    let path = directory.join(file);
    assert!(path.exists(), "{file} is neither built nor can it be (cargo succeeded: {built})");
    path
}

/// A child that does not outlive its test.
pub(crate) struct Guard(pub(crate) Child);

impl Guard {
    pub(crate) fn spawn(command: &mut Command) -> Self {
        Self(command.spawn().unwrap_or_else(|e| panic!("{command:?}: {e}")))
    }

    /// Its end; a test whose child hangs fails.
    pub(crate) fn wait(&mut self) -> ExitStatus {
        let deadline = Instant::now() + LONGEST;
        loop {
            if let Some(status) = self.0.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < deadline, "process {} does not end", self.0.id());
            thread::sleep(Duration::from_millis(2));
        }
    }

    pub(crate) fn code(&mut self) -> Option<i32> {
        self.wait().code()
    }

    /// Its end, with everything that it says on piped outputs.
    pub(crate) fn output(mut self) -> Output {
        let [stdout, stderr] = collect(&mut self.0);
        let status = self.wait();
        Output { status, stdout: stdout.join().unwrap(), stderr: stderr.join().unwrap() }
    }

    pub(crate) fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        // Ended already is fine.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A broker of this test.
pub(crate) struct World {
    // Fields drop in order: the broker ends before its directory goes.
    broker: Guard,
    dir: TempDir,
}

impl World {
    pub(crate) fn new() -> Self {
        Self::with_policy(None)
    }

    pub(crate) fn with_policy(policy: Option<&str>) -> Self {
        let dir = tempfile::Builder::new().prefix("partywall-cli-test-").tempdir().unwrap();
        let rules = policy
            .map_or_else(|| format!("administrators = [{}]\n", rustix::process::geteuid().as_raw()), str::to_owned);
        std::fs::write(dir.path().join("policy.toml"), rules).unwrap();
        let world = Self { broker: broker_in(dir.path()), dir };
        world.await_broker();
        world
    }

    /// Starts a broker again, after [`Self::kill_broker`].
    pub(crate) fn start_broker(&mut self) {
        std::fs::remove_file(self.socket()).unwrap();
        self.broker = broker_in(self.dir.path());
        self.await_broker();
    }

    fn await_broker(&self) {
        let deadline = Instant::now() + LONGEST;
        while !self.socket().metadata().is_ok_and(|metadata| metadata.file_type().is_socket()) {
            let log = std::fs::read_to_string(self.path("broker.log")).unwrap_or_default();
            assert!(Instant::now() < deadline, "the broker does not start: {log}");
            thread::sleep(Duration::from_millis(2));
        }
    }

    /// Writes another policy, and has the broker load it.
    pub(crate) fn set_policy(&self, policy: &str) {
        std::fs::write(self.path("policy.toml"), policy).unwrap();
        let broker = rustix::process::Pid::from_child(&self.broker.0);
        rustix::process::kill_process(broker, rustix::process::Signal::HUP).unwrap();
    }

    /// Has the broker end, as by a crash.
    pub(crate) fn kill_broker(&mut self) {
        self.broker.kill();
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.path("broker.sock")
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// `partywall ARGUMENTS` in the domain `domain`, with nothing to read and both outputs piped.
    pub(crate) fn partywall(&self, domain: &str, arguments: &[&str]) -> Command {
        let mut command = partywall(arguments);
        command.env("PARTYWALL_BROKER", self.socket()).env("PARTYWALL_DOMAIN", domain);
        command
    }

    /// Runs it to its end.
    pub(crate) fn run(&self, domain: &str, arguments: &[&str]) -> Output {
        Guard::spawn(&mut self.partywall(domain, arguments)).output()
    }

    /// A file with bytes that are not like their neighbours.
    pub(crate) fn file(&self, name: &str, size: usize) -> PathBuf {
        let path = self.path(name);
        std::fs::write(&path, random::noise(name.len() as u64, size)).unwrap();
        path
    }

    /// Waits until `service` of `domain` can be connected to.
    pub(crate) fn await_service(&self, domain: &str, service: &str) {
        self.await_that(&format!("{domain}:{service} is offered"), || {
            let listing = self.run("watcher", &["list", "services", "--json"]);
            let listing: serde_json::Value = serde_json::from_slice(&listing.stdout).unwrap();
            let services = listing["services"].as_array().unwrap().clone();
            services.iter().any(|s| s["domain"] == domain && s["service"] == service)
        });
    }

    pub(crate) fn await_that(&self, what: &str, mut is: impl FnMut() -> bool) {
        let deadline = Instant::now() + LONGEST;
        while !is() {
            assert!(Instant::now() < deadline, "never: {what}");
            thread::sleep(Duration::from_millis(5));
        }
    }
}

/// A broker whose socket, policy and log are in this folder.
fn broker_in(folder: &Path) -> Guard {
    let mut command = Command::new(partywalld());
    command.arg("--socket").arg(folder.join("broker.sock"));
    command.arg("--policy").arg(folder.join("policy.toml"));
    let log = File::create(folder.join("broker.log")).unwrap();
    Guard::spawn(command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log))
}

/// `partywall ARGUMENTS` with none of this shell's settings.
pub(crate) fn partywall(arguments: &[&str]) -> Command {
    let mut command = Command::new(PARTYWALL);
    for key in partywall_protocol::environment::ALL.into_iter().chain(["RUST_LOG"]) {
        command.env_remove(key);
    }
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// The standard error of a command.
pub(crate) fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Copies a program so that it can be run at once.
///
/// Another process copies it: a process that another test starts just then would inherit our descriptor of the copy, and a file that is
/// open for writing cannot be run.
pub(crate) fn copy_program(from: impl AsRef<Path>, to: impl AsRef<Path>) {
    assert!(Command::new("cp").arg("--preserve=mode").args([from.as_ref(), to.as_ref()]).status().unwrap().success());
}

/// Makes a script that can be run at once. A shell writes it, for the reason of [`copy_program`].
pub(crate) fn make_script(path: &Path, lines: &str) {
    let write = "printf '#!/bin/sh\\n%s\\n' \"$1\" > \"$2\" && chmod 755 \"$2\"";
    assert!(Command::new("sh").args(["-c", write, "sh", lines]).arg(path).status().unwrap().success());
}

/// A program that is not executable is not found.
pub(crate) fn make_executable(path: &Path) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
}
