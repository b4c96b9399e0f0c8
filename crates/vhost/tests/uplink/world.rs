//! Network namespaces, and a switch in one of them.

use crate::common::HANG;
use partywall_vhost::control::{PortReport, SwitchReport};
use partywall_vhost::driver::{DriverOptions, GuestDriver};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A process that ends with the test.
pub(crate) struct Guarded(pub(crate) Child);

impl Drop for Guarded {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Whether this can be tested; otherwise it prints what is missing.
pub(crate) fn is_possible() -> bool {
    let found =
        |name: &&&str| ["/bin", "/sbin", "/usr/bin", "/usr/sbin"].iter().any(|at| Path::new(at).join(name).exists());
    let missing = ["unshare", "nsenter", "ip", "python3"].iter().find(|name| !found(name));
    if rustix::process::geteuid().is_root() && Path::new("/dev/net/tun").exists() && missing.is_none() {
        return true;
    }
    println!("skipped: an uplink needs root, /dev/net/tun, unshare, nsenter, ip and python3 (missing: {missing:?})");
    false
}

/// A network namespace, with a process that keeps it.
pub(crate) struct Namespace(Guarded);

impl Namespace {
    pub(crate) fn new() -> Self {
        let sleep = Command::new("unshare").args(["--net", "sleep", "infinity"]).stdin(Stdio::null()).spawn().unwrap();
        let this = Self(Guarded(sleep));
        let comm = format!("/proc/{}/comm", this.pid());
        wait_until("the namespace is made", || std::fs::read_to_string(&comm).unwrap() == "sleep\n");
        this
    }

    pub(crate) fn pid(&self) -> u32 {
        self.0.0.id()
    }

    pub(crate) fn command(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net=/proc/{}/ns/net", self.pid())).arg(program);
        command
    }

    /// Whether `ip` succeeds with these words, and what it prints.
    pub(crate) fn try_ip(&self, words: &str) -> (bool, String) {
        let done = self.command("ip").args(words.split(' ')).output().unwrap();
        let text = [done.stdout, done.stderr].concat();
        (done.status.success(), String::from_utf8_lossy(&text).into_owned())
    }

    pub(crate) fn ip(&self, words: &str) -> String {
        let (done, text) = self.try_ip(words);
        assert!(done, "ip {words}: {text}");
        text
    }
}

/// A switch, its folder, and the namespace that it runs in.
pub(crate) struct Host {
    pub(crate) namespace: Namespace,
    folder: tempfile::TempDir,
    switch: Option<Guarded>,
}

impl Host {
    pub(crate) fn new() -> Self {
        let mut this = Self { namespace: Namespace::new(), folder: tempfile::tempdir().unwrap(), switch: None };
        this.start();
        this
    }

    /// Writes the file that the switch is started with from now on.
    pub(crate) fn write_file(&self, text: &str) {
        let path = self.file();
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o644)).unwrap();
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("lan.toml")
    }

    pub(crate) fn start(&mut self) {
        let log = std::fs::File::options().create(true).append(true).open(self.folder.path().join("log")).unwrap();
        let mut command = self.command();
        command.args(["run", "lan"]);
        if self.file().exists() {
            command.arg("--config").arg(self.file());
        }
        let switch = command.stdout(Stdio::null()).stderr(log).spawn().unwrap();
        self.switch = Some(Guarded(switch));
        wait_until("the switch answers", || {
            let pid = self.switch_pid();
            assert!(Path::new(&format!("/proc/{pid}/exe")).exists(), "{}", self.log());
            self.command().args(["show", "lan"]).stdout(Stdio::null()).stderr(Stdio::null()).status().unwrap().success()
        });
    }

    fn command(&self) -> Command {
        let mut command = self.namespace.command(env!("CARGO_BIN_EXE_partywall-net"));
        command.arg("--folder").arg(self.folder.path()).env_remove("RUST_LOG");
        command
    }

    /// With SIGKILL.
    pub(crate) fn kill(&mut self) {
        self.switch = None;
    }

    /// With SIGTERM.
    pub(crate) fn stop(&mut self) {
        let mut switch = self.switch.take().unwrap();
        rustix::process::kill_process(rustix::process::Pid::from_child(&switch.0), rustix::process::Signal::TERM)
            .unwrap();
        assert!(switch.0.wait().unwrap().success());
    }

    pub(crate) fn switch_pid(&self) -> u32 {
        self.switch.as_ref().unwrap().0.id()
    }

    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap()
    }

    pub(crate) fn ask(&self, words: &[&str]) -> String {
        let (done, text) = self.try_ask(words);
        assert!(done, "{words:?}: {text}");
        text
    }

    /// Whether the command succeeds, and what it prints.
    pub(crate) fn try_ask(&self, words: &[&str]) -> (bool, String) {
        let done = self.command().args(words).output().unwrap();
        let text = if done.status.success() { done.stdout } else { done.stderr };
        (done.status.success(), String::from_utf8_lossy(&text).into_owned())
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn port(&self, name: &str) -> PortReport {
        let report: SwitchReport = serde_json::from_str(&self.ask(&["show", "lan", "--json"])).unwrap();
        report.ports.into_iter().find(|row| row.port.name == name).unwrap()
    }

    pub(crate) fn driver(&self, port: &str) -> GuestDriver {
        self.driver_with(port, DriverOptions::default())
    }

    /// The switch sends a driver away until it has seen that the one before has gone.
    pub(crate) fn driver_with(&self, port: &str, options: DriverOptions) -> GuestDriver {
        wait_until("the port's last driver has gone", || !self.port(port).occupied);
        GuestDriver::connect(&self.path(&format!("lan/{port}.port")), options).unwrap()
    }
}

pub(crate) fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + HANG;
    while !done() {
        assert!(Instant::now() < deadline, "never: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The processor time of a process.
pub(crate) fn processor_time(pid: u32) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    // Behind the name, which is in parentheses, the state is the first word.
    let words: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    let ticks: u64 = words[11..13].iter().map(|word| word.parse::<u64>().unwrap()).sum();
    Duration::from_secs_f64(ticks as f64 / rustix::param::clock_ticks_per_second() as f64)
}
