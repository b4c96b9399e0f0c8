//! Where a program runs: on loopback, on one processor, or in one of two namespaces; with the library or without.

use std::{
    ffi::OsString,
    fs::{self, File},
    net::{Ipv4Addr, TcpListener, UdpSocket},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, Instant},
};

use super::AppAddress;
use crate::{
    error::{BenchError, During, Result},
    interrupt::Interrupt,
    mechanism::Mechanism,
    netns::NamespaceEnds,
    process::GuardedChild,
};

/// The first of the ports that are looked at.
const FIRST: u16 = 10_000;
const ROOM: u16 = 20_000;

/// Where the servers of a measurement run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Locality {
    /// On this host's loopback interface.
    Loopback,
    /// Between two network namespaces joined by a veth pair, as between containers.
    Veth,
    /// On loopback, everything on one processor.
    OneCpu,
}

impl Locality {
    /// The name in tables and results.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Loopback => "loopback",
            Self::Veth => "veth",
            Self::OneCpu => "one-cpu",
        }
    }
}

/// The surroundings of the programs while the bench runs.
#[derive(Debug)]
pub(crate) struct BenchScene<'a> {
    /// The library that is loaded into programs, and the broker's socket.
    pub(crate) library: PathBuf,
    /// The broker's socket.
    pub(crate) broker: PathBuf,
    /// The two namespaces, if there are any.
    pub(crate) spaces: Option<NamespaceEnds>,
    /// The bench's own folder.
    pub(crate) scratch: &'a Path,
    /// Ctrl-C.
    pub(crate) interrupt: &'a Interrupt,
    /// The processor of what runs on one.
    pub(crate) cpu: usize,
}

/// The place of one server.
#[derive(Debug)]
pub(crate) struct Site<'a> {
    pub(crate) scene: &'a BenchScene<'a>,
    /// Plain or transparent.
    pub(crate) mechanism: Mechanism,
    pub(crate) place: Locality,
    pub(crate) port: u16,
    /// The folder of this server alone.
    pub(crate) folder: PathBuf,
}

/// The role of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AppRole {
    Server,
    Client,
}

impl<'a> Site<'a> {
    pub(crate) fn new(
        scene: &'a BenchScene<'a>,
        mechanism: Mechanism,
        place: Locality,
        folder: PathBuf,
    ) -> Result<Self> {
        fs::create_dir_all(&folder).during(format!("making {}", folder.display()))?;
        // Programs that become another user must be able to go there.
        let open = <fs::Permissions as std::os::unix::fs::PermissionsExt>::from_mode(0o755);
        fs::set_permissions(&folder, open).during("opening a folder")?;
        Ok(Self { scene, mechanism, place, port: free_ports()?, folder })
    }

    /// The address that clients connect to.
    pub(crate) fn address(&self) -> String {
        let between = self.scene.spaces.as_ref().filter(|_| self.place == Locality::Veth);
        between.map_or(Ipv4Addr::LOCALHOST, |ends| ends.addresses[1]).to_string()
    }

    /// Where clients find the server.
    pub(crate) fn endpoint(&self) -> AppAddress {
        AppAddress { address: self.address(), port: self.port, slowness: 1 }
    }

    pub(crate) fn port(&self) -> String {
        self.port.to_string()
    }

    /// A program at its place. It ends with the bench, and has the library if it is to have it.
    pub(crate) fn command(&self, part: AppRole, program: &str) -> Result<Command> {
        let mut words: Vec<OsString> = Vec::new();
        if let (Locality::Veth, Some(spaces)) = (self.place, &self.scene.spaces) {
            // The client is where the bench's sender would be.
            let space = &spaces.names[usize::from(part == AppRole::Server)];
            words.extend(["ip", "netns", "exec", space].map(OsString::from));
        }
        words.extend(["setpriv", "--pdeathsig", "TERM"].map(OsString::from));
        if self.place == Locality::OneCpu {
            words.extend(["taskset".into(), "-c".into(), self.scene.cpu.to_string().into()]);
        }
        words.push("env".into());
        if self.mechanism == Mechanism::Transparent {
            let setting = |name: &str, value: &Path| {
                let mut word = OsString::from(name);
                word.push("=");
                word.push(value);
                word
            };
            words.push(setting("LD_PRELOAD", &self.scene.library));
            words.push(setting(partywall_protocol::environment::BROKER, &self.scene.broker));
        }
        words.push(find(program, "")?.into());
        let mut command = Command::new(&words[0]);
        command
            .args(&words[1..])
            .current_dir(&self.folder)
            .env_remove("LD_PRELOAD")
            .env("LC_ALL", "C")
            .stdin(Stdio::null());
        Ok(command)
    }

    /// Starts a server; what it says is kept in its folder.
    pub(crate) fn serve(&self, program: &str, arguments: &[&str]) -> Result<GuardedChild> {
        let log = File::create(self.folder.join("server.log")).during("making a log")?;
        let mut command = self.command(AppRole::Server, program)?;
        command.args(arguments).stdout(log.try_clone().during("making a log")?).stderr(log);
        GuardedChild::spawn(&mut command)
    }

    /// Waits until a server listens.
    pub(crate) fn await_listener(&self, server: &mut GuardedChild) -> Result<()> {
        let deadline = Instant::now() + Duration::from_secs(30);
        let tail = || fs::read_to_string(self.folder.join("server.log")).unwrap_or_default();
        loop {
            self.scene.interrupt.check()?;
            if let Some(end) = server.ended() {
                return Err(BenchError::Transport(format!("the server ended: {end}: {}", tail().trim())));
            }
            if listens(server.id(), self.port) {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(BenchError::Transport(format!("the server does not listen: {}", tail().trim())));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Runs a client to its end; what it printed.
    pub(crate) fn ask(&self, program: &str, arguments: &[&str], patience: Duration) -> Result<String> {
        let mut command = self.command(AppRole::Client, program)?;
        command.args(arguments);
        self.run(&mut command, program, patience)
    }

    /// Runs a command to its end.
    pub(crate) fn run(&self, command: &mut Command, name: &str, patience: Duration) -> Result<String> {
        run(command, name, patience, &self.folder, self.scene.interrupt)
    }
}

/// Runs a command to its end, with its output in files of a folder, and returns what it has printed.
pub(crate) fn run(
    command: &mut Command,
    name: &str,
    patience: Duration,
    folder: &Path,
    interrupt: &Interrupt,
) -> Result<String> {
    let (out, errors) = (folder.join("client.out"), folder.join("client.err"));
    let file = |path: &Path| File::create(path).during("making a file for output");
    let mut child = GuardedChild::spawn(command.stdout(file(&out)?).stderr(file(&errors)?))?;
    let deadline = Instant::now() + patience;
    let end = loop {
        interrupt.check()?;
        if let Some(end) = child.ended() {
            break end;
        }
        if Instant::now() > deadline {
            return Err(BenchError::Transport(format!("{name} does not end within {} s", patience.as_secs())));
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    if end != "exit status: 0" {
        let said = fs::read_to_string(&errors).unwrap_or_default();
        return Err(BenchError::Transport(format!("{name} ended with {end}: {}", said.trim())));
    }
    fs::read_to_string(&out).during("reading what a client printed")
}

/// The library that is loaded into programs: beside this one, one folder up, or where `make install` puts it.
pub(crate) fn library() -> Result<PathBuf> {
    let here = std::env::current_exe().during("finding this program")?;
    let folders: Vec<&Path> = here.ancestors().skip(1).take(2).collect();
    let installed = folders.get(1).map(|prefix| prefix.join("lib/partywall"));
    folders.into_iter().map(Path::to_owned).chain(installed).map(|folder| folder.join(partywall_protocol::environment::LIBRARY)).find(|path| path.is_file()).ok_or_else(
        || BenchError::Unavailable("the library that programs are loaded with is not there; build it (cargo build --release -p partywall-preload)".into()),
    )
}

/// A program of the system.
pub(crate) fn find(program: &str, package: &str) -> Result<PathBuf> {
    if program.starts_with('/') {
        return Ok(program.into());
    }
    let path = std::env::var("PATH").unwrap_or_default() + ":/usr/sbin:/sbin";
    let ordinary = std::env::split_paths(&path).collect::<Vec<_>>();
    // Debian keeps the programs of each version of PostgreSQL apart, and has scripts in the ordinary places that find them.
    let mut versions: Vec<PathBuf> =
        fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten().map(|e| e.path().join("bin")).collect();
    versions.sort();
    versions
        .into_iter()
        .rev()
        .chain(ordinary)
        .map(|folder| folder.join(program))
        .find(|path| path.is_file())
        .ok_or_else(|| {
            BenchError::Unavailable(format!("no {program} on this machine; it is in Debian's package {package}"))
        })
}

/// A free port whose next port is free too (`flow` needs two). It lies below the ports that the kernel assigns itself, so that no
/// connection of another program takes it between this look and the server's; and processes begin to look at
/// different places, so that two benches at once do not choose the same.
pub(crate) fn free_ports() -> Result<u16> {
    static LOOKED: AtomicU32 = AtomicU32::new(0);
    for _ in 0..ROOM {
        let nth = std::process::id().wrapping_mul(31).wrapping_add(LOOKED.fetch_add(2, Ordering::Relaxed));
        let first = FIRST + u16::try_from(nth % u32::from(ROOM)).unwrap_or_default();
        let free = |port| {
            TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).is_ok()
                && UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port)).is_ok()
        };
        if free(first) && free(first + 1) {
            return Ok(first);
        }
    }
    Err(BenchError::Unavailable(format!("no two free ports from {FIRST} to {}", FIRST + ROOM)))
}

/// Whether a process in the network namespace of `process` listens on a port.
pub(crate) fn listens(process: u32, port: u16) -> bool {
    ["tcp", "tcp6"].iter().any(|table| {
        let table = fs::read_to_string(format!("/proc/{process}/net/{table}")).unwrap_or_default();
        table.lines().skip(1).any(|line| {
            let mut fields = line.split_whitespace().skip(1);
            let local = fields.next().unwrap_or_default();
            local.ends_with(&format!(":{port:04X}")) && fields.nth(1) == Some("0A")
        })
    })
}
