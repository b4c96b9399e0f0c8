//! The set-up of the demo around the transfers, and its removal.

use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use partywall::Domain;
use partywall_protocol::environment;
use partywall_terminal::{Show, typed};
use tempfile::TempDir;

use super::children::{DemoChild, run};
use crate::exit::{CommandFailure, Context};
use crate::{human, siblings};

/// The longest that is waited for what ends by itself: the broker's children see its end and follow.
const MOMENT: Duration = Duration::from_secs(10);

/// Begins the names of everything that the demo makes; the process id follows.
const PREFIX: &str = "pw-demo-";

/// A side of the demo: one of the two domains.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DemoSide {
    A,
    B,
}

impl DemoSide {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::A => "a",
            Self::B => "b",
        }
    }
}

/// Files, namespaces and broker of one run.
#[derive(Debug)]
pub(super) struct World {
    dir: Option<TempDir>,
    /// Whether each side has a network namespace.
    separated: bool,
    broker: Option<DemoChild>,
    program: PathBuf,
    daemon: PathBuf,
}

impl World {
    /// Finds the programs and makes a directory; after this, there is something to take down.
    pub(super) fn new(show: &Show) -> Result<Self, CommandFailure> {
        let program = std::env::current_exe().context("cannot tell where this program is")?;
        let daemon = siblings::find("partywalld", "partywall-daemon")?;
        remove_stale(&program, show);
        let shm = Path::new("/dev/shm");
        // In memory where possible: the disk is not what is measured.
        let parent = if shm.is_dir() { shm.to_owned() } else { std::env::temp_dir() };
        let dir = tempfile::Builder::new().prefix(&format!("{PREFIX}{}-", std::process::id())).tempdir_in(parent);
        Ok(Self { dir: Some(dir.context("cannot make a directory")?), separated: false, broker: None, program, daemon })
    }

    /// Where everything of this run lies. Empty once taken down.
    pub(super) fn dir(&self) -> &Path {
        self.dir.as_ref().map_or(Path::new(""), TempDir::path)
    }

    /// Fails early if a copy would not fit.
    pub(super) fn make_room_for(&self, size: u64) -> Result<(), CommandFailure> {
        let stat = rustix::fs::statvfs(self.dir()).context("cannot ask for free space")?;
        let free = stat.f_bavail.saturating_mul(stat.f_frsize);
        if free < size {
            let (needed, dir) = (human::bytes(size), self.dir().display());
            return Err(CommandFailure::general(format!(
                "{dir} has {} free; a copy needs {needed}",
                human::bytes(free)
            ))
            .hint("use a smaller --size"));
        }
        Ok(())
    }

    fn socket(&self) -> PathBuf {
        self.dir().join("broker.sock")
    }

    fn namespace(side: DemoSide) -> String {
        format!("{PREFIX}{}-{}", std::process::id(), side.name())
    }

    /// At most 15 characters; unique while this process lives.
    fn interface(side: DemoSide) -> String {
        format!("pw{}{}", std::process::id(), side.name())
    }

    /// Makes a namespace for each side and a cable between them, if that is possible here.
    pub(super) fn separate(&mut self, unwanted: bool, show: &Show) -> Result<(), CommandFailure> {
        show.step("Two domains");
        let why_not = match (unwanted, rustix::process::geteuid().is_root(), has_ip()) {
            (true, ..) => Some("--no-namespaces"),
            (_, false, _) => Some("we are not root"),
            (.., false) => Some("there is no program `ip`"),
            _ => None,
        };
        if let Some(reason) = why_not {
            show.say(&format!("   both in this network namespace ({reason}); TCP goes over loopback"));
            return Ok(());
        }
        // From here on there may be something to remove, also if only half of this works.
        self.separated = true;
        let (a, b) = (Self::namespace(DemoSide::A), Self::namespace(DemoSide::B));
        let (va, vb) = (Self::interface(DemoSide::A), Self::interface(DemoSide::B));
        let mut lines = vec![
            format!("netns add {a}"),
            format!("netns add {b}"),
            format!("link add {va} netns {a} type veth peer name {vb} netns {b}"),
        ];
        for (side, netns, interface) in [(DemoSide::A, &a, &va), (DemoSide::B, &b, &vb)] {
            lines.push(format!("-n {netns} address add {}/30 dev {interface}", self.address(side)));
            lines.push(format!("-n {netns} link set {interface} up"));
            lines.push(format!("-n {netns} link set lo up"));
        }
        for line in lines {
            let mut ip = Command::new("ip");
            ip.args(line.split(' '));
            show.command("", &typed(&ip));
            run(&mut ip)?;
        }
        Ok(())
    }

    /// Where the TCP side of the comparison listens.
    pub(super) fn address(&self, side: DemoSide) -> IpAddr {
        match (self.separated, side) {
            (false, _) => Ipv4Addr::LOCALHOST.into(),
            (true, DemoSide::A) => Ipv4Addr::new(10, 77, 0, 1).into(),
            (true, DemoSide::B) => Ipv4Addr::new(10, 77, 0, 2).into(),
        }
    }

    /// How TCP gets from one side to the other.
    pub(super) fn tcp_route(&self) -> &'static str {
        if self.separated { "TCP over veth" } else { "TCP over loopback" }
    }

    /// Starts a broker that only this demo knows, and waits until it answers.
    pub(super) fn start_broker(&mut self, show: &Show) -> Result<(), CommandFailure> {
        show.step("A private broker");
        let policy = self.dir().join("policy.toml");
        // A private policy: the machine's may forbid everything to us.
        let rule = format!("administrators = [{}]\n", rustix::process::geteuid().as_raw());
        std::fs::write(&policy, rule).context("cannot write a policy")?;
        let mut command = Command::new(&self.daemon);
        command.arg("--socket").arg(self.socket()).arg("--policy").arg(&policy);
        show.command("", &typed(&command));
        let log = self.log("broker")?;
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let broker = self.broker.insert(DemoChild::start(&mut command)?);
        let socket = self.dir.as_ref().map_or_else(PathBuf::new, |dir| dir.path().join("broker.sock"));
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let joined = Domain::builder().name("demo").broker(&socket).join();
            match joined {
                Ok(_) => return Ok(()),
                Err(_) if broker.try_wait()?.is_none() && Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(5))
                }
                Err(error) => {
                    let said = self.read_log("broker");
                    return Err(
                        CommandFailure::from(error).context(format_args!("the broker does not start: {}", said.trim()))
                    );
                }
            }
        }
    }

    /// `partywall ...` in the namespace of `side`, its standard error in the log `name`.
    pub(super) fn partywall(&self, side: DemoSide, name: &str, arguments: &[&str]) -> Result<Command, CommandFailure> {
        let mut command = if self.separated {
            let mut ip = Command::new("ip");
            ip.args(["netns", "exec", &Self::namespace(side)]).arg(&self.program);
            ip
        } else {
            Command::new(&self.program)
        };
        self.complete(&mut command, side, name, arguments)?;
        Ok(command)
    }

    /// The same in this namespace.
    pub(super) fn partywall_here(
        &self,
        side: DemoSide,
        name: &str,
        arguments: &[&str],
    ) -> Result<Command, CommandFailure> {
        let mut command = Command::new(&self.program);
        self.complete(&mut command, side, name, arguments)?;
        Ok(command)
    }

    fn complete(
        &self,
        command: &mut Command,
        side: DemoSide,
        name: &str,
        arguments: &[&str],
    ) -> Result<(), CommandFailure> {
        if !arguments.first().is_some_and(|first| first.starts_with("tcp-")) && !arguments.contains(&"--tcp") {
            command.arg("--broker").arg(self.socket()).args(["--domain", side.name()]);
        }
        command.args(arguments);
        // The environment of the user's shell does not apply to the demo.
        command.env_remove(environment::BROKER).env_remove(environment::DOMAIN).env_remove("RUST_LOG");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(self.log(name)?);
        Ok(())
    }

    /// Unmounts what is mounted at a path, if anything is.
    pub(super) fn unmount(&self, mountpoint: &Path) {
        if !mounts_below(mountpoint).is_empty() {
            // What stays is reported at the end.
            let _ = run(Command::new(&self.program).args(["fs", "unmount"]).arg(mountpoint));
        }
    }

    /// A program as it is in the namespace of `side`, both its outputs in the log `name`.
    pub(super) fn plain(&self, side: DemoSide, name: &str, words: &[&str]) -> Result<Command, CommandFailure> {
        let (program, arguments) = words.split_first().ok_or_else(|| CommandFailure::usage("no program"))?;
        let mut command = if self.separated {
            let mut ip = Command::new("ip");
            ip.args(["netns", "exec", &Self::namespace(side)]).arg(program);
            ip
        } else {
            Command::new(program)
        };
        command.args(arguments);
        self.log_both(&mut command, name)?;
        Ok(command)
    }

    /// The command of a program under `partywall run`.
    pub(super) fn accelerated(&self, side: DemoSide, name: &str, words: &[&str]) -> Result<Command, CommandFailure> {
        let mut command = self.partywall(side, name, &[&["run", "--"], words].concat())?;
        self.log_both(&mut command, name)?;
        Ok(command)
    }

    fn log_both(&self, command: &mut Command, name: &str) -> Result<(), CommandFailure> {
        let path = self.dir().join(name).with_extension("log");
        let file = std::fs::File::create(&path).context(format_args!("cannot write {}", path.display()))?;
        let second = file.try_clone().context("cannot have a descriptor twice")?;
        command.stdin(Stdio::null()).stdout(file).stderr(second);
        Ok(())
    }

    fn log(&self, name: &str) -> Result<Stdio, CommandFailure> {
        let path = self.dir().join(name).with_extension("log");
        let file = std::fs::File::create(&path).context(format_args!("cannot write {}", path.display()))?;
        Ok(file.into())
    }

    /// The log of a command.
    pub(super) fn read_log(&self, name: &str) -> String {
        std::fs::read_to_string(self.dir().join(name).with_extension("log")).unwrap_or_default()
    }

    /// Removes everything, and returns what is still there.
    pub(super) fn take_down(&mut self, show: &Show) -> Vec<String> {
        if let Some(mut broker) = self.broker.take() {
            broker.stop();
        }
        let mut left = Vec::new();
        if self.separated {
            self.separated = false;
            for side in [DemoSide::A, DemoSide::B] {
                let name = Self::namespace(side);
                if !netns_path(&name).exists() {
                    continue;
                }
                let mut ip = Command::new("ip");
                ip.args(["netns", "delete", &name]);
                show.command("", &typed(&ip));
                if let Err(failure) = run(&mut ip) {
                    left.push(failure.to_string());
                }
            }
        }
        let Some(dir) = self.dir.take() else { return left };
        let path = dir.path().to_owned();
        if let Err(error) = dir.close() {
            left.push(format!("{}: {error}", path.display()));
        }
        let deadline = Instant::now() + MOMENT;
        loop {
            let there = leftovers(&path);
            if there.is_empty() || Instant::now() > deadline {
                left.extend(there);
                return left;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for World {
    /// Cleans up on every other way out.
    fn drop(&mut self) {
        self.take_down(&Show::new());
    }
}

fn netns_path(name: &str) -> PathBuf {
    Path::new("/run/netns").join(name)
}

fn has_ip() -> bool {
    run(Command::new("ip").arg("-V")).is_ok()
}

/// Everything that can still be seen of this run.
fn leftovers(dir: &Path) -> Vec<String> {
    let mut left: Vec<String> = [DemoSide::A, DemoSide::B]
        .into_iter()
        .flat_map(|side| {
            [netns_path(&World::namespace(side)), Path::new("/sys/class/net").join(World::interface(side))]
        })
        .chain([dir.to_owned()])
        .filter(|path| path.exists())
        .map(|path| path.display().to_string())
        .collect();
    left.extend(mounts_below(dir).into_iter().map(|path| format!("mount {}", path.display())));
    left.extend(processes_naming(dir));
    left
}

/// Where something is mounted at a path or below it. The kernel's table is asked: a mount without its server does not answer.
fn mounts_below(path: &Path) -> Vec<PathBuf> {
    let table = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let points = table.lines().filter_map(|line| line.split(' ').nth(1)).map(PathBuf::from);
    points.filter(|point| point.starts_with(path)).collect()
}

/// Processes with our directory on their command line.
fn processes_naming(dir: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    let needle = dir.to_string_lossy();
    let lines = entries.filter_map(|entry| std::fs::read(entry.ok()?.path().join("cmdline")).ok());
    let lines = lines.map(|line| String::from_utf8_lossy(&line).replace('\0', " "));
    lines.filter(|line| line.contains(needle.as_ref())).map(|line| format!("process `{}`", line.trim())).collect()
}

/// Removes what a demo has left that was killed so hard (SIGKILL) that it could not do so itself.
fn remove_stale(program: &Path, show: &Show) {
    let names = |dir: &str| {
        let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
        entries
            .filter_map(|entry| entry.file_name().into_string().ok())
            .filter(|name| is_stale(name))
            .collect::<Vec<_>>()
    };
    for name in names("/run/netns") {
        show.say(&format!("removing {name}, left by a demo that was killed"));
        // Another user's stays.
        let _ = run(Command::new("ip").args(["netns", "delete", &name]));
    }
    for name in names("/dev/shm") {
        show.say(&format!("removing /dev/shm/{name}, left by a demo that was killed"));
        let path = Path::new("/dev/shm").join(name);
        for mountpoint in mounts_below(&path) {
            let _ = run(Command::new(program).args(["fs", "unmount"]).arg(mountpoint));
        }
        let _ = std::fs::remove_dir_all(path);
    }
}

/// Whether this is a name that a demo gave, and that demo is gone.
fn is_stale(name: &str) -> bool {
    let pid = name.strip_prefix(PREFIX).and_then(|rest| rest.split('-').next()).and_then(|pid| pid.parse::<u32>().ok());
    pid.is_some_and(|pid| !Path::new("/proc").join(pid.to_string()).exists())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_leftovers_of_dead_demos_are_stale() {
        let own = std::process::id();
        assert!(!is_stale(&format!("{PREFIX}{own}-a")));
        assert!(is_stale(&format!("{PREFIX}4194999-a")), "beyond the largest process id");
        assert!(!is_stale("web") && !is_stale(PREFIX) && !is_stale("pw-demo-x-a"));
    }

    #[test]
    fn interface_names_fit_the_kernel() {
        assert!(World::interface(DemoSide::A).len() <= 15);
        assert!("pw4194304a".len() <= 15);
    }

    #[test]
    fn remaining_directory_is_reported_as_leftover() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(leftovers(dir.path()), [dir.path().display().to_string()]);
    }

    #[test]
    fn mounts_are_found_below_their_directory() {
        assert!(mounts_below(Path::new("/")).contains(&PathBuf::from("/proc")));
        assert_eq!(mounts_below(Path::new("/no-such-directory")), Vec::<PathBuf>::new());
    }
}
