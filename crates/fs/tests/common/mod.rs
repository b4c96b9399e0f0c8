//! A broker, an export and mounts of it, as processes; and random numbers that a seed repeats.
#![allow(dead_code, reason = "each test uses a part of it")]

pub(crate) mod held_disk;
#[path = "../../../shm/tests/random/mod.rs"]
pub(crate) mod random;

use partywall::Domain;
use partywall_daemon::Broker;
use partywall_fs::remote::ServerAddress;
use rustix::process::{Pid, Signal, kill_process};
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// How requests travel in a test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    Calls,
    Stream,
    Tcp,
}

/// A process that is ended with the test.
#[derive(Debug)]
pub(crate) struct Guard(pub(crate) Child);

impl Guard {
    pub(crate) fn kill(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A mounted export.
pub(crate) struct Mounted {
    process: Guard,
    path: PathBuf,
    _folder: TempDir,
}

impl Mounted {
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn join(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    pub(crate) fn kill(&mut self) {
        self.process.kill();
    }

    /// Asks the mount to end, and returns whether it did so in order.
    pub(crate) fn end(mut self) -> bool {
        kill_process(Pid::from_child(&self.process.0), Signal::TERM).unwrap();
        self.process.0.wait().unwrap().success()
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.path, rustix::mount::UnmountFlags::DETACH);
        self.process.kill();
    }
}

/// A broker and an exported directory.
pub(crate) struct World {
    broker: Option<Broker>,
    socket: PathBuf,
    folder: TempDir,
    server: Option<Guard>,
    address: Option<String>,
    options: Vec<&'static str>,
    way: Way,
    boot: Option<PathBuf>,
}

/// `None`, and the reason on standard error, where nothing can be mounted.
pub(crate) fn world(way: Way, options: &[&'static str]) -> Option<World> {
    if !rustix::process::geteuid().is_root() || File::options().read(true).write(true).open("/dev/fuse").is_err() {
        eprintln!("SKIPPED: this test mounts a file system, which takes root and /dev/fuse");
        return None;
    }
    let mut options = options.to_vec();
    if !options.contains(&"--squash") {
        options.extend(["--squash", "none"]);
    }
    let folder = tempfile::Builder::new().prefix("partywall-fs-").tempdir().unwrap();
    let broker = Broker::embedded().unwrap();
    let socket = broker.path().to_owned();
    let mut world =
        World { broker: Some(broker), socket, folder, server: None, address: None, options, way, boot: None };
    world.start();
    Some(world)
}

/// A program that says on its first line that it is ready, and that line.
fn start(command: &mut Command) -> (Guard, String) {
    let mut child = command.stdout(Stdio::piped()).stdin(Stdio::null()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    (Guard(child), line)
}

/// Copies a program that is to be started.
///
/// A copy that this process wrote would be open for writing in a child that another test starts meanwhile, until that child executes
/// its own program. The kernel refuses to execute a file that is open for writing.
pub(crate) fn copy_program(from: &Path, to: &Path) {
    assert!(Command::new("cp").args([from, to]).status().unwrap().success());
}

impl World {
    fn program(&self) -> Command {
        self.started_by(Command::new(env!("CARGO_BIN_EXE_partywall-fs")))
    }

    fn started_by(&self, mut command: Command) -> Command {
        command.env("PARTYWALL_BROKER", &self.socket).env_remove("PARTYWALL_DOMAIN").env("RUST_LOG", "error");
        command
    }

    /// The exported directory, as the server sees it.
    pub(crate) fn export(&self) -> &Path {
        self.folder.path()
    }

    /// Has the server find another number for the boot of its kernel at its next start.
    pub(crate) fn boot(&mut self, number: &str) {
        let path = self.folder.path().join(".boot");
        std::fs::write(&path, number).unwrap();
        self.boot = Some(path);
    }

    /// Starts the server; again, if it was killed.
    pub(crate) fn start(&mut self) {
        let mut command = self.program();
        if let Some(boot) = &self.boot {
            let program = command.get_program().to_owned();
            command = self.started_by(Command::new("unshare"));
            command.args(["--mount", "sh", "-c"]);
            command.arg("mount --bind \"$0\" /proc/sys/kernel/random/boot_id && exec \"$@\"").arg(boot).arg(program);
        }
        command.arg("export").arg(self.folder.path()).args(&self.options);
        match (self.way, &self.address) {
            (Way::Tcp, None) => command.args(["--tcp", "127.0.0.1:0"]),
            (Way::Tcp, Some(address)) => command.args(["--tcp", address]),
            _ => command.args(["--as", "files:data"]),
        };
        let (server, line) = start(&mut command);
        assert!(line.starts_with("exporting"), "{line}");
        if self.way == Way::Tcp {
            self.address = Some(line.trim_end().rsplit(' ').next().unwrap().to_owned());
        }
        self.server = Some(server);
    }

    /// How a client without a mount reaches the server.
    pub(crate) fn server_address(&self) -> ServerAddress {
        if self.way == Way::Tcp {
            return ServerAddress::Tcp(self.address());
        }
        let domain = Domain::builder().name("client").broker(&self.socket).join().unwrap();
        ServerAddress::Service { domain, target: "files:data".into(), calls: self.way == Way::Calls }
    }

    /// Has the server stand still, and waits until all of its threads do.
    pub(crate) fn stop_server(&self) {
        self.signal_server(Signal::STOP);
        let is_stopped = |task: std::io::Result<std::fs::DirEntry>| {
            let stat = std::fs::read_to_string(task.unwrap().path().join("stat")).unwrap_or_default();
            stat.rsplit(')').next().is_some_and(|fields| fields.trim_start().starts_with('T'))
        };
        eventually("the server does not stop", || {
            std::fs::read_dir(format!("/proc/{}/task", self.server_pid())).unwrap().all(is_stopped)
        });
    }

    /// Has a stopped server go on.
    pub(crate) fn continue_server(&self) {
        self.signal_server(Signal::CONT);
    }

    fn signal_server(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.server.as_ref().unwrap().0), signal).unwrap();
    }

    /// Where the server of [`Way::Tcp`] listens.
    pub(crate) fn address(&self) -> std::net::SocketAddr {
        self.address.as_ref().unwrap().parse().unwrap()
    }

    pub(crate) fn kill_server(&mut self) {
        self.server.take().unwrap().kill();
    }

    pub(crate) fn end_broker(&mut self) {
        self.broker = None;
    }

    pub(crate) fn server_pid(&self) -> u32 {
        self.server.as_ref().unwrap().0.id()
    }

    pub(crate) fn mount(&self, options: &[&str]) -> Mounted {
        let folder = tempfile::Builder::new().prefix("partywall-mount-").tempdir().unwrap();
        self.mount_by(self.program(), folder, options)
    }

    /// The message with which a mount on this folder fails.
    pub(crate) fn refused_mount(&self, folder: &Path) -> String {
        let mut child = self.program();
        child.arg("mount").arg("files:data").arg(folder).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut mount = Mounted {
            process: Guard(child.spawn().unwrap()),
            path: folder.to_owned(),
            _folder: tempfile::tempdir().unwrap(),
        };
        // A mount that is made after all says so.
        let mut said = String::new();
        BufReader::new(mount.process.0.stdout.take().unwrap()).read_line(&mut said).unwrap();
        assert_eq!(said, "");
        mount.process.0.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        assert_eq!(mount.process.0.wait().unwrap().code(), Some(1), "{said}");
        said
    }

    /// Mounts as another user, who may be unable to reach the program where it was built.
    pub(crate) fn mount_as(&self, user: u32) -> Mounted {
        let program = self.folder.path().with_extension("program");
        copy_program(env!("CARGO_BIN_EXE_partywall-fs").as_ref(), &program);
        let folder = tempfile::Builder::new().prefix("partywall-mount-").tempdir().unwrap();
        std::os::unix::fs::chown(folder.path(), Some(user), Some(user)).unwrap();
        let mut command = Command::new(&program);
        command.env("RUST_LOG", "error").uid(user).gid(user);
        let mounted = self.mount_by(command, folder, &[]);
        std::fs::remove_file(program).unwrap();
        mounted
    }

    fn mount_by(&self, command: Command, folder: TempDir, options: &[&str]) -> Mounted {
        let (target, by) = match self.way {
            Way::Calls => (&["files:data"][..], "by calls"),
            Way::Stream => (&["--transport", "stream", "files:data"][..], "by a stream"),
            Way::Tcp => (&["--transport", "tcp", self.address.as_ref().unwrap()][..], "by TCP"),
        };
        let (mounted, line) = mount(command, target, folder, options);
        assert!(line.trim_end().ends_with(by), "{line}");
        mounted
    }
}

fn mount(mut command: Command, target: &[&str], folder: TempDir, options: &[&str]) -> (Mounted, String) {
    command.arg("mount").args(target).arg(folder.path()).args(options);
    let (process, line) = start(&mut command);
    (Mounted { process, path: folder.path().to_owned(), _folder: folder }, line)
}

/// Mounts what a server of this process exports over TCP.
pub(crate) fn mount_tcp(address: std::net::SocketAddr, options: &[&str]) -> Mounted {
    let folder = tempfile::Builder::new().prefix("partywall-mount-").tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_partywall-fs"));
    command.env("RUST_LOG", "error");
    mount(command, &["--transport", "tcp", &address.to_string()], folder, options).0
}

/// Waits until something holds. The limit only guards against hanging.
pub(crate) fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !holds() {
        assert!(begin.elapsed() < Duration::from_secs(60), "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}
