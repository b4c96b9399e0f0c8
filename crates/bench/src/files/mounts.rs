//! The ways to one exported folder: itself, and mounts of it.

use std::{
    collections::BTreeMap,
    fs,
    net::{Ipv4Addr, TcpStream},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use crate::{
    apps::site::free_ports,
    error::{BenchError, During, Result},
    interrupt::Interrupt,
    mechanism::Mechanism,
    peers::sources::missing,
    process::GuardedChild,
};

/// How every exported folder begins; the process id of its bench follows.
const PREFIX: &str = "partywall-bench-fs-";
/// How long a mount may take to appear, and a program to end.
const PATIENCE: Duration = Duration::from_secs(20);
/// The server of sshfs, which ssh would start.
const SFTP_SERVER: &str = "/usr/lib/openssh/sftp-server";

/// All ways, in the order of tables.
pub(crate) const WAYS: [Mechanism; 5] =
    [Mechanism::PartywallFs, Mechanism::PartywallFsTcp, Mechanism::Sshfs, Mechanism::Bindfs, Mechanism::Local];

/// An exported folder with its mounts. Dropping it unmounts them and removes the folder.
#[derive(Debug)]
pub(crate) struct Mounts {
    // Mounts go before their folders.
    mounted: BTreeMap<Mechanism, Result<Mount, String>>,
    folder: tempfile::TempDir,
    /// The broker's socket, if there is a broker.
    broker: Result<PathBuf, String>,
    interrupt: Interrupt,
}

#[derive(Debug)]
struct Mount {
    at: PathBuf,
    client: Option<GuardedChild>,
    _server: Option<GuardedChild>,
}

impl Mounts {
    /// Makes a folder to export below `parent`; mounts nothing yet.
    pub(crate) fn new(parent: &Path, broker: Result<PathBuf, String>, interrupt: Interrupt) -> Result<Self> {
        let folder = folder_below(parent)?;
        fs::create_dir(folder.path().join("export")).during("making a folder to export")?;
        Ok(Self { mounted: BTreeMap::new(), folder, broker, interrupt })
    }

    /// The exported folder.
    pub(crate) fn exported(&self) -> PathBuf {
        self.folder.path().join("export")
    }

    /// The exported folder by one of the ways, which is mounted if it is not yet.
    pub(crate) fn folder(&mut self, way: Mechanism) -> Result<PathBuf> {
        if way == Mechanism::Local {
            return Ok(self.exported());
        }
        if !self.mounted.contains_key(&way) {
            let mounted = match self.mount(way) {
                Err(BenchError::Interrupted) => return Err(BenchError::Interrupted),
                mounted => mounted.map_err(|e| e.to_string()),
            };
            self.mounted.insert(way, mounted);
        }
        match self.mounted.get(&way) {
            Some(Ok(mount)) => Ok(mount.at.clone()),
            Some(Err(why)) => Err(BenchError::Unavailable(why.clone())),
            None => Err(BenchError::Unavailable("it is not mounted".into())),
        }
    }

    fn mount(&self, way: Mechanism) -> Result<Mount> {
        if !Path::new("/dev/fuse").exists() {
            return Err(BenchError::Unavailable("there is no /dev/fuse here".into()));
        }
        let needs: &[(&str, &'static str)] = match way {
            Mechanism::Sshfs => &[("sshfs", "sshfs"), ("socat", "socat"), (SFTP_SERVER, "openssh-sftp-server")],
            Mechanism::Bindfs => &[("bindfs", "bindfs")],
            _ => &[],
        };
        let missing = missing(needs);
        if !missing.is_empty() {
            return Err(BenchError::Unavailable(format!("it needs Debian's {}", missing.join(" "))));
        }
        let (exported, at) = (self.exported(), self.folder.path().join(way.name()));
        fs::create_dir(&at).during(format!("making {}", at.display()))?;
        let port = free_ports()?;
        let (server, client) = match way {
            Mechanism::PartywallFs => {
                let broker = self.broker.as_ref().map_err(|why| BenchError::Unavailable(why.clone()))?;
                let name = format!("bench-{}-files:data", std::process::id());
                let mut export = partywall_fs()?;
                export.args(["export", "--squash", "none", "--as", &name, "--broker"]).arg(broker).arg(&exported);
                let server = start(&export)?;
                let mut mount = partywall_fs()?;
                mount.args(["mount", "--broker"]).arg(broker).arg("--domain");
                mount.arg(format!("bench-{}-client", std::process::id())).arg(&name).arg(&at);
                (Some(server), mount)
            }
            Mechanism::PartywallFsTcp => {
                let address = format!("127.0.0.1:{port}");
                let mut export = partywall_fs()?;
                export.args(["export", "--squash", "none", "--tcp", &address]).arg(&exported);
                let server = self.await_port(start(&export)?, port)?;
                let mut mount = partywall_fs()?;
                mount.args(["mount", "--transport", "tcp", &address]).arg(&at);
                (Some(server), mount)
            }
            Mechanism::Sshfs => {
                let mut socat = Command::new("socat");
                socat.arg(format!("TCP-LISTEN:{port},bind=127.0.0.1,fork,nodelay,reuseaddr"));
                socat.arg(format!("EXEC:{SFTP_SERVER},nofork"));
                let server = self.await_port(start(&socat)?, port)?;
                let mut mount = Command::new("sshfs");
                mount.arg("-f").arg("-o").arg(format!("directport={port}"));
                mount.arg(format!("localhost:{}", exported.display())).arg(&at);
                (Some(server), mount)
            }
            _ => {
                let mut mount = Command::new("bindfs");
                mount.arg("-f").arg(&exported).arg(&at);
                (None, mount)
            }
        };
        // An export binds its service a moment after it was started; a mount that comes too early ends, and is repeated.
        let deadline = Instant::now() + PATIENCE;
        loop {
            let mut started = start(&client)?;
            loop {
                self.interrupt.check()?;
                if is_mounted(&at) {
                    return Ok(Mount { at, client: Some(started), _server: server });
                }
                if let Some(end) = started.ended() {
                    if Instant::now() > deadline {
                        return Err(BenchError::Transport(format!("the program that mounts it ended: {end}")));
                    }
                    break;
                }
                if Instant::now() > deadline {
                    return Err(BenchError::Transport(format!("it was not mounted within {} s", PATIENCE.as_secs())));
                }
                std::thread::sleep(Duration::from_millis(5));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Waits until a server listens.
    fn await_port(&self, mut server: GuardedChild, port: u16) -> Result<GuardedChild> {
        let deadline = Instant::now() + PATIENCE;
        while TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_err() {
            self.interrupt.check()?;
            if let Some(end) = server.ended() {
                return Err(BenchError::Transport(format!("a server ended: {end}")));
            }
            if Instant::now() > deadline {
                return Err(BenchError::Transport(format!("a server does not listen on port {port}")));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(server)
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let unmount = Command::new("umount").arg(&self.at).stderr(Stdio::null()).status();
        if !unmount.is_ok_and(|status| status.success()) && is_mounted(&self.at) {
            let lazily = Command::new("umount").arg("-l").arg(&self.at).status();
            if !lazily.is_ok_and(|status| status.success()) {
                eprintln!("partywall-bench: {} stays mounted: umount {0}", self.at.display());
            }
        }
        if let Some(client) = self.client.take() {
            client.terminate(PATIENCE);
        }
    }
}

/// A folder for exported files, which ends with the bench, or with the next one if this one is killed.
pub(crate) fn folder_below(parent: &Path) -> Result<tempfile::TempDir> {
    remove_leftovers(parent);
    let folder = tempfile::Builder::new().prefix(&format!("{PREFIX}{}-", std::process::id())).tempdir_in(parent);
    folder.during(format!("making a folder below {}", parent.display()))
}

/// Removes the folders of benches that were killed, unless something is still mounted there.
fn remove_leftovers(parent: &Path) {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let pid = name.strip_prefix(PREFIX).and_then(|rest| rest.split('-').next()?.parse::<u32>().ok());
        let gone = pid.is_some_and(|pid| !fs::exists(format!("/proc/{pid}")).unwrap_or(true));
        if gone
            && !mounts.contains(&name)
            && let Err(e) = fs::remove_dir_all(entry.path())
        {
            eprintln!("partywall-bench: {} stays behind: {e}", entry.path().display());
        }
    }
}

/// Kernel's file systems of other kinds that could show the same folder, which this machine has.
pub(crate) fn kernels_own() -> Vec<String> {
    let known = fs::read_to_string("/proc/filesystems").unwrap_or_default();
    parse_filesystems(&known)
}

fn parse_filesystems(known: &str) -> Vec<String> {
    let names = known.lines().filter_map(|line| line.split_whitespace().last());
    names.filter(|name| ["nfs", "nfs4", "9p", "virtiofs"].contains(name)).map(str::to_owned).collect()
}

/// Starts a program that ends, and unmounts, when the bench is killed.
pub(crate) fn start(command: &Command) -> Result<GuardedChild> {
    let mut tied = Command::new("setpriv");
    tied.args(["--pdeathsig", "TERM"]).arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        if let Some(value) = value {
            tied.env(name, value);
        }
    }
    GuardedChild::spawn(tied.stdin(Stdio::null()).stdout(Stdio::null()))
}

/// Partywall's own program, beside this one or on the path.
fn partywall_fs() -> Result<Command> {
    const PROGRAM: &str = "partywall-fs";
    let here = std::env::current_exe().during("finding this program")?;
    let beside = here.ancestors().skip(1).take(2).map(|folder| folder.join(PROGRAM)).find(|path| path.is_file());
    if beside.is_none() && !missing(&[(PROGRAM, PROGRAM)]).is_empty() {
        return Err(BenchError::Unavailable(format!("no {PROGRAM} beside this program or on the path; build it")));
    }
    let mut command = Command::new(beside.unwrap_or_else(|| PROGRAM.into()));
    command.env(partywall_protocol::environment::LOG_FILTER, "warn");
    Ok(command)
}

fn is_mounted(at: &Path) -> bool {
    // Paths of the bench have no character that the kernel escapes.
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    mounts.lines().any(|line| line.split(' ').nth(1) == at.to_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_systems_of_the_kernel_are_found_by_name() {
        let known = "nodev\tsysfs\n\text4\nnodev\tnfs\nnodev\tnfsd\nnodev\tvirtiofs\nfuseblk\n";
        assert_eq!(parse_filesystems(known), ["nfs", "virtiofs"]);
    }

    #[test]
    fn folders_of_killed_benches_are_removed() {
        let parent = tempfile::tempdir().unwrap();
        // No process has this number: it is above the largest that the kernel gives.
        let (gone, alive) = (format!("{PREFIX}4194305-a"), format!("{PREFIX}{}-b", std::process::id()));
        for name in [gone.as_str(), alive.as_str(), "another"] {
            fs::create_dir_all(parent.path().join(name).join("export")).unwrap();
        }
        remove_leftovers(parent.path());
        assert!(!parent.path().join(gone).exists());
        assert!(parent.path().join(alive).exists() && parent.path().join("another").exists());
    }

    #[test]
    fn local_way_is_the_exported_folder() {
        let (parent, interrupt) = (tempfile::tempdir().unwrap(), Interrupt::catch().unwrap());
        let mut mounts = Mounts::new(parent.path(), Err("no broker".into()), interrupt).unwrap();
        assert_eq!(mounts.folder(Mechanism::Local).unwrap(), mounts.exported());
        assert!(mounts.exported().is_dir());
        drop(mounts);
        assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 0);
    }
}
