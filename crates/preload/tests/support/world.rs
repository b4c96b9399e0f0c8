//! A broker of this test, and programs that are loaded with the library.

use std::{
    ffi::OsStr,
    fs::File,
    os::unix::fs::FileTypeExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::OnceLock,
};

use tempfile::TempDir;

use super::{built, eventually, guard::Guard};

pub(crate) use partywall_protocol::environment::{BROKER, LIBRARY};

/// The library that programs are loaded with: this package's, or another one that the environment names.
pub(crate) fn library() -> &'static Path {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| {
        let named = std::env::var_os("PARTYWALL_TEST_LIBRARY").map(PathBuf::from);
        named.unwrap_or_else(|| build("partywall-preload", &["--lib"], LIBRARY))
    })
}

/// Builds a package's program or library, or finds it fresh: for a test, cargo puts only what is linked into it where it can be found.
/// Not if the environment says that everything is built (`make test` does).
fn build(package: &str, which: &[&str], name: &str) -> PathBuf {
    let folder = built();
    if std::env::var_os("PARTYWALL_PROGRAMS_ARE_BUILT").is_some() && folder.join(name).exists() {
        return folder.join(name);
    }
    let profile = folder.file_name().unwrap().to_str().unwrap();
    let mut build = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    build.args(["build", "--quiet", "--package", package]).args(which);
    build.args(["--profile", if profile == "debug" { "dev" } else { profile }]);
    build.arg("--target-dir").arg(folder.parent().unwrap()).current_dir(env!("CARGO_MANIFEST_DIR"));
    let built = build.status().is_ok_and(|status| status.success());
    let path = folder.join(name);
    assert!(path.exists(), "{name} is neither built nor can it be (cargo succeeded: {built})");
    path
}

fn partywalld() -> &'static Path {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| build("partywall-daemon", &["--bin", "partywalld"], "partywalld"))
}

/// Starts root's programs as an ordinary user's: without the right to read sequence numbers.
pub(crate) const WITHOUT_NET_ADMIN: &[&str] = &["setpriv", "--bounding-set=-net_admin", "--inh-caps=-net_admin"];

/// Starts root's programs without any right that root has beyond others.
const WITHOUT_CAPABILITIES: &[&str] = &["setpriv", "--bounding-set=-all", "--inh-caps=-all"];

/// Whether this process has that right.
pub(crate) fn has_net_admin() -> bool {
    const NET_ADMIN: u32 = 12;
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap();
    u64::from_str_radix(effective.trim(), 16).unwrap() & 1 << NET_ADMIN != 0
}

/// A command that has `launcher` start a program; an empty one starts it as it is.
pub(crate) fn launched(launcher: &[&str], program: &Path) -> Command {
    let words: Vec<_> = launcher.iter().map(OsStr::new).chain([program.as_os_str()]).collect();
    let mut command = Command::new(words[0]);
    command.args(&words[1..]);
    command
}

/// The folder in which a record of sequence numbers may be kept.
const KEPT: &str = "kept";

/// Separates the rules that every test has from its own.
const FURTHER: &str = "# further\n";

/// A broker in its own folder; both go with this value.
pub(crate) struct World {
    /// The command that starts the broker.
    launcher: &'static [&'static str],
    // Fields drop in order: the broker ends before its folder goes.
    broker: std::cell::RefCell<Guard>,
    folder: TempDir,
}

impl World {
    pub(crate) fn new() -> Self {
        Self::with_broker_started_by(&[])
    }

    /// A world whose broker may not read sequence numbers, as that of an ordinary user.
    pub(crate) fn without_sequence_numbers() -> Self {
        Self::with_broker_started_by(WITHOUT_NET_ADMIN)
    }

    /// A world whose broker has no capability, as one that is installed has.
    pub(crate) fn without_capabilities() -> Self {
        Self::with_broker_started_by(WITHOUT_CAPABILITIES)
    }

    /// A world whose broker this command starts.
    pub(crate) fn with_broker_started_by(launcher: &'static [&'static str]) -> Self {
        let folder = tempfile::Builder::new().prefix("partywall-preload-test-").tempdir().unwrap();
        // Programs that become another user must find the broker.
        let open = <std::fs::Permissions as std::os::unix::fs::PermissionsExt>::from_mode(0o755);
        std::fs::set_permissions(folder.path(), open).unwrap();
        let everyone = "[[join]]\ndomain = \"*\"\nusers = [\"*\"]\n[[connect]]\nfrom = \"*\"\nto = \"*\"\n";
        let rules = format!("administrators = [{}]\n{everyone}", rustix::process::geteuid().as_raw());
        std::fs::write(folder.path().join("policy.toml"), rules).unwrap();
        std::fs::create_dir(folder.path().join(KEPT)).unwrap();
        let broker = std::cell::RefCell::new(Self::start(launcher, folder.path()));
        Self { launcher, broker, folder }
    }

    fn start(launcher: &[&str], folder: &Path) -> Guard {
        let mut command = launched(launcher, partywalld());
        let socket = folder.join("broker.sock");
        command.arg("--socket").arg(&socket).arg("--policy").arg(folder.join("policy.toml"));
        // Never that of this machine.
        command.arg("--number-record").arg(folder.join(KEPT).join("numbers"));
        let log = File::options().append(true).create(true).open(folder.join("broker.log")).unwrap();
        let mut broker = Guard::spawn(command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log));
        eventually("the broker listens", || {
            assert!(broker.ended().is_none(), "{}", std::fs::read_to_string(folder.join("broker.log")).unwrap());
            let is_there = socket.metadata().is_ok_and(|metadata| metadata.file_type().is_socket());
            is_there && super::client::Client::try_connect(&socket).is_some()
        });
        broker
    }

    /// Where the broker looks for a record of sequence numbers. There is none at first.
    pub(crate) fn number_record(&self) -> PathBuf {
        self.path(KEPT).join("numbers")
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.path("broker.sock")
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A file with bytes that are not like their neighbours.
    pub(crate) fn file(&self, name: &str, size: usize) -> PathBuf {
        let path = self.path(name);
        std::fs::write(&path, super::random::noise(name.len() as u64, size)).unwrap();
        path
    }

    /// Loads a program with the library, as `partywall run` does.
    pub(crate) fn preload(&self, command: &mut Command) {
        command.env("LD_PRELOAD", library()).env(BROKER, self.socket());
    }

    /// The broker's end, as by a crash.
    pub(crate) fn kill_broker(&self) {
        let mut broker = self.broker.borrow_mut();
        broker.signal_all(rustix::process::Signal::KILL);
        broker.wait();
    }

    /// A new one in its place.
    pub(crate) fn restart_broker(&self) {
        *self.broker.borrow_mut() = Self::start(self.launcher, self.folder.path());
    }

    /// Replaces what follows the rules of its policy file, and has the broker read that.
    pub(crate) fn set_further_policy(&self, text: &str) {
        let file = self.path("policy.toml");
        let rules = std::fs::read_to_string(&file).unwrap();
        let rules = rules.split_once(FURTHER).map_or(&*rules, |(rules, _)| rules);
        std::fs::write(&file, format!("{rules}{FURTHER}{text}")).unwrap();
        self.reload_policy();
    }

    /// Has the broker read its policy file again.
    pub(crate) fn reload_policy(&self) {
        let log = || std::fs::read_to_string(self.path("broker.log")).unwrap().matches("loaded the policy").count();
        let before = log();
        self.broker.borrow().signal(rustix::process::Signal::HUP);
        eventually("the policy is loaded", || log() > before);
    }

    /// Descriptors that the broker has open.
    pub(crate) fn broker_descriptors(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.broker.borrow().id())).unwrap().count()
    }
}
