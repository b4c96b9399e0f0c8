//! The sockets of programs under `partywall run`, found in /proc: what their library says of them, and what the kernel says.
//!
//! A program is one of these if the library keeps its status memory ([`partywall_shm::status`]) open there, or if its environment
//! names the library. The environment alone would not do: servers write their titles over it (nginx, redis).
//! The status memory is copied, never mapped. A socket of which the library says nothing is one that it has nothing to do with.
//! Processes that are not ours to look into are left out.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use super::gather::Scope;
use crate::reopen;
use partywall::PolicyUser;
use partywall_protocol::environment::{DOMAIN, LIBRARY, PRELOAD};
use partywall_shm::status::{self, LineSnapshot, LineState, Reason};
use procfs::net::{TcpNetEntry, TcpState};
use procfs::process::{FDInfo, FDTarget, Process};
use rustix::fs::{CWD, MemfdFlags, Mode, OFlags};

/// The name of the directory's memory in programs that have mapped it (`region::directory`).
const DIRECTORY: &str = "memfd:partywall-directory";

/// One connected socket.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ConnectedSocket {
    pub(crate) program: String,
    pub(crate) pid: u32,
    pub(crate) fd: u32,
    pub(crate) local: SocketAddr,
    pub(crate) remote: SocketAddr,
    /// The library's status of the socket.
    pub(crate) seen: Option<LineSnapshot>,
    /// Whether the library is in the program at all.
    pub(crate) loaded: bool,
    /// Whether that library is of another version, whose word on its connections cannot be read.
    pub(crate) unreadable: bool,
    /// Whether it has ever met a broker there.
    pub(crate) joined: bool,
    /// The reason why the policy does not let it join, if the broker gives one.
    pub(crate) refusal: Option<String>,
}

impl ConnectedSocket {
    /// Whether its program has the library, and no session with a broker: a worker may have the directory of its parent, and none itself.
    pub(crate) fn lacks_broker(&self) -> bool {
        let seen_without = self.seen.as_ref().is_some_and(|seen| seen.identity.reason == Reason::BrokerAbsent);
        self.loaded && (!self.joined || seen_without)
    }

    /// Whether its program may lack a session although it has the directory: the accepting worker of a server that has joined cannot look for an
    /// offer without a session, and says only that it counts.
    pub(crate) fn may_lack_session(&self) -> bool {
        let counts = self.seen.as_ref().is_some_and(|seen| seen.identity.state == LineState::Counting);
        self.loaded && self.joined && counts
    }
}

/// Most domains that a process whose name is not known is compared with.
const GUESSES: usize = 32;

/// As whom a process joins, and the names under which it may do so, as far as /proc and the broker's list say. `None` if that cannot be told.
///
/// A process has one name, unless it has written over its environment, as servers do that set a title (nginx). It may then have the name of a domain that a
/// process of the same program has joined, or a process that has ended: servers that become daemons do both. `domains`: the broker's list, by process.
pub(crate) fn joins_as(socket: &ConnectedSocket, domains: &HashMap<u32, String>) -> Option<(PolicyUser, Vec<String>)> {
    let process = Process::new(i32::try_from(socket.pid).ok()?).ok()?;
    let status = process.status().ok()?;
    let user = PolicyUser::Host { uid: status.euid, gid: Some(status.egid) };
    let environment = process.environ().unwrap_or_default();
    let chosen = environment.get(std::ffi::OsStr::new(DOMAIN)).map(|name| name.to_string_lossy().into_owned());
    let name = chosen.filter(|name| !name.is_empty()).unwrap_or_else(|| format!("{}-{}", socket.program, socket.pid));
    let mut names = vec![name];
    // The variable that has brought the library is there, if the others are.
    if socket.joined && !environment.contains_key(std::ffi::OsStr::new(PRELOAD)) {
        let may_be_its = |process: u32| {
            let stat = i32::try_from(process).ok().and_then(|process| Process::new(process).ok()?.stat().ok());
            stat.is_none_or(|stat| stat.comm == socket.program)
        };
        names.extend(domains.iter().filter(|(process, _)| may_be_its(**process)).map(|(_, name)| name.clone()));
        if names.len() > GUESSES {
            return None;
        }
    }
    Some((user, names))
}

/// All that there are in a scope, and the processes that the kernel does not let this user inspect.
pub(crate) fn sockets(scope: Scope) -> (Vec<ConnectedSocket>, Vec<i32>) {
    let mut finder = Finder { all: scope == Scope::All, ..Finder::default() };
    for process in procfs::process::all_processes().into_iter().flatten().flatten() {
        finder.add(&process);
    }
    finder.add_rest();
    (finder.sockets, finder.hidden)
}

#[derive(Default)]
struct Finder {
    sockets: Vec<ConnectedSocket>,
    /// Also those of programs that the library is not in.
    all: bool,
    hidden: Vec<i32>,
    /// The device number of memory files (memfds).
    device: Option<(u32, u32)>,
    /// The content of each status memory, by the number of its file: a process shares it with its forks.
    memories: HashMap<u64, Memory>,
    /// Sockets that have been seen, by number: processes share them likewise.
    known: HashSet<u64>,
    /// The kernel's tables, by network namespace.
    tables: HashMap<u64, HashMap<u64, TcpNetEntry>>,
}

/// Status memory that was found in a process.
enum StatusFound {
    /// It was read, and has this number.
    Read(u64),
    /// A library of another version keeps it.
    OtherVersion,
}

#[derive(Clone, Default)]
struct Memory {
    program: String,
    lines: Vec<LineSnapshot>,
    /// The network namespace in which its process was found.
    namespace: u64,
    /// Lines whose socket was found.
    found: HashSet<u32>,
}

impl Finder {
    fn add(&mut self, process: &Process) {
        let environment = match process.environ() {
            Ok(environment) => environment,
            Err(procfs::ProcError::PermissionDenied(_)) => {
                self.hidden.push(process.pid());
                return;
            }
            // It has ended, or is the kernel's.
            Err(_) => return,
        };
        let preloads = environment.get(std::ffi::OsStr::new(PRELOAD));
        let named = preloads.is_some_and(|preloads| preloads.to_string_lossy().contains(LIBRARY));
        let (Ok(pid), Ok(fds)) = (u32::try_from(process.pid()), process.fd()) else { return };
        let fds: Vec<_> = fds.flatten().collect();
        let has_status = |fd: &FDInfo| matches!(&fd.target, FDTarget::MemFD(name) if is_status(name));
        if !self.all && !named && !fds.iter().any(has_status) {
            return;
        }
        let program = process.stat().map_or_else(|_| "?".into(), |stat| stat.comm);
        let Some(namespace) = namespace(process) else { return };
        let place = Memory { program: program.clone(), lines: Vec::new(), namespace, found: HashSet::new() };
        let status = fds.iter().filter(|fd| has_status(fd)).find_map(|fd| self.memory(pid, fd.fd, &place));
        let (memory, unreadable) = match status {
            Some(StatusFound::Read(memory)) => (Some(memory), false),
            other => (None, other.is_some()),
        };
        let (mapped, joined) = library_and_directory(process);
        let loaded = memory.is_some() || unreadable || mapped;
        let Some(table) = self.table(process, namespace) else { return };
        let mut found = Vec::new();
        for fd in &fds {
            let FDTarget::Socket(inode) = fd.target else { continue };
            if let (Some(entry), Ok(number)) = (table.get(&inode), u32::try_from(fd.fd)) {
                found.push((inode, number, entry.local_address, entry.remote_address));
            }
        }
        for (inode, fd, local, remote) in found {
            if !self.known.insert(inode) {
                continue;
            }
            let seen = memory.and_then(|memory| self.memories.get_mut(&memory)?.take(fd, local, remote));
            self.sockets.push(ConnectedSocket {
                program: program.clone(),
                pid,
                fd,
                local,
                remote,
                seen,
                loaded,
                unreadable,
                joined,
                refusal: None,
            });
        }
    }

    /// Reads the status memory that is open there, unless it is known already. Returns which it is.
    fn memory(&mut self, pid: u32, fd: i32, of: &Memory) -> Option<StatusFound> {
        let named = open_named(Path::new(&format!("/proc/{pid}/fd/{fd}"))).ok()?;
        let device = match self.device {
            Some(device) => device,
            None => *self.device.insert(memory_device().ok()?),
        };
        // The name says little: in a mount namespace of its user, any file can have it.
        let (file, number) = reopen::regular_on(named.as_fd(), device).ok()?;
        if let Entry::Vacant(place) = self.memories.entry(number) {
            let Some(lines) = read(&file) else {
                return is_of_other_version(&file).then_some(StatusFound::OtherVersion);
            };
            place.insert(Memory { lines, ..of.clone() });
        }
        Some(StatusFound::Read(number))
    }

    /// The established connections of the namespace that a process is in, by the number of the socket. `None` if the process has ended: another
    /// one is asked then.
    fn table(&mut self, process: &Process, of: u64) -> Option<&HashMap<u64, TcpNetEntry>> {
        match self.tables.entry(of) {
            Entry::Occupied(known) => Some(known.into_mut()),
            Entry::Vacant(place) => {
                let four = process.tcp().ok()?;
                let six = match process.tcp6() {
                    Ok(six) => six,
                    // A kernel without IPv6, if the process is there still.
                    Err(_) if namespace(process) == Some(of) => Vec::new(),
                    Err(_) => return None,
                };
                let connected = |entry: &TcpNetEntry| {
                    !matches!(entry.state, TcpState::Listen | TcpState::TimeWait | TcpState::Close)
                };
                let all = four.into_iter().chain(six).filter(connected);
                Some(place.insert(all.map(|entry| (entry.inode, entry)).collect()))
            }
        }
    }

    /// Connections that the library speaks of, that the kernel has, and whose sockets were found in no process: one that may not be
    /// looked into has them. Without the kernel's word they would be connections that have ended: a line stays behind where
    /// one process closes what another has accepted.
    fn add_rest(&mut self) {
        for memory in self.memories.values() {
            let table = self.tables.get(&memory.namespace);
            let rest =
                || table.into_iter().flat_map(HashMap::values).filter(|entry| !self.known.contains(&entry.inode));
            for seen in memory.lines.iter().filter(|seen| !memory.found.contains(&seen.index)) {
                let status::LineIdentity { pid, fd, local, remote, .. } = seen.identity;
                if !rest().any(|entry| same(local, entry.local_address) && same(remote, entry.remote_address)) {
                    continue;
                }
                let program = memory.program.clone();
                self.sockets.push(ConnectedSocket {
                    program,
                    pid,
                    fd,
                    local,
                    remote,
                    seen: Some(*seen),
                    loaded: true,
                    unreadable: false,
                    joined: true,
                    refusal: None,
                });
            }
        }
    }
}

impl Memory {
    fn take(&mut self, fd: u32, local: SocketAddr, remote: SocketAddr) -> Option<LineSnapshot> {
        // The library asks for a connection's own address when that has lived for a while.
        let is_own = |seen: &status::LineIdentity| {
            let unknown = seen.local.ip().is_unspecified();
            same(seen.local, local)
                || unknown && (seen.local.port() == local.port() || seen.local.port() == 0 && seen.fd == fd)
        };
        let seen = self.lines.iter().find(|seen| {
            is_own(&seen.identity) && same(seen.identity.remote, remote) && !self.found.contains(&seen.index)
        })?;
        self.found.insert(seen.index);
        Some(*seen)
    }
}

fn same(a: SocketAddr, b: SocketAddr) -> bool {
    a.port() == b.port() && canonical(a.ip()) == canonical(b.ip())
}

fn canonical(ip: IpAddr) -> IpAddr {
    ip.to_canonical()
}

/// The number of the network namespace that a process is in.
fn namespace(process: &Process) -> Option<u64> {
    std::fs::metadata(format!("/proc/{}/ns/net", process.pid())).ok().map(|file| file.ino())
}

fn is_status(name: &str) -> bool {
    without_mark(name) == status::MEMFD
}

/// The kernel adds that a memory has no path.
fn without_mark(name: &str) -> &str {
    name.strip_suffix(" (deleted)").unwrap_or(name)
}

/// Whether the library is in a program, and whether it has the broker's directory, which it keeps once it has met one.
fn library_and_directory(process: &Process) -> (bool, bool) {
    use procfs::process::MMapPath;
    let Ok(maps) = process.maps() else { return (false, false) };
    let is_mapped = |is_it: fn(&str) -> bool| {
        maps.iter().any(|map| {
            let MMapPath::Path(path) = &map.pathname else { return false };
            path.file_name().is_some_and(|file| is_it(without_mark(&file.to_string_lossy())))
        })
    };
    // In a virtual machine the directory lies in a window, which is a device.
    let is_window = |name: &str| name.starts_with("dax") || name == "resource2";
    (is_mapped(|name| name == LIBRARY), is_mapped(|name| name == DIRECTORY) || is_mapped(is_window))
}

/// Opens the target of a path by name only, without opening the file itself.
fn open_named(path: &Path) -> io::Result<OwnedFd> {
    Ok(rustix::fs::openat(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?)
}

/// The device of all memory that is a file.
fn memory_device() -> io::Result<(u32, u32)> {
    let memory = rustix::fs::memfd_create("partywall-device", MemfdFlags::CLOEXEC)?;
    reopen::device(memory.as_fd())
}

/// The lines of a status memory; `None` if it is none.
fn read(file: &File) -> Option<Vec<LineSnapshot>> {
    let mut header = [0; status::LINE];
    file.read_exact_at(&mut header, 0).ok()?;
    let bytes = status::used_bytes(&header).ok()?;
    let copy = || {
        let mut copy = vec![0; bytes];
        file.read_exact_at(&mut copy, 0).ok().map(|()| copy)
    };
    let (first, second) = (copy()?, copy()?);
    Some(status::read_all(&first, &second))
}

fn is_of_other_version(file: &File) -> bool {
    let mut header = [0; status::LINE];
    file.read_exact_at(&mut header, 0).is_ok() && status::is_of_other_version(&header)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn process_that_has_ended_does_not_hide_connections_of_others() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let _client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let ended = Process::new(i32::try_from(child.id()).unwrap()).unwrap();
        let here = namespace(&ended).unwrap();
        drop(child.stdin.take());
        child.wait().unwrap();
        let mut finder = Finder::default();
        assert!(finder.table(&ended, here).is_none());
        assert!(!finder.table(&Process::myself().unwrap(), here).unwrap().is_empty());
    }

    #[test]
    fn new_connection_is_matched_by_descriptor_or_port() {
        use partywall_shm::status::{DirectionSeen, LineIdentity, LineState, Reason, Role};
        let [near, far, unknown] = ["10.0.0.1:40000", "10.0.0.2:80", "0.0.0.0:0"].map(|a| a.parse().unwrap());
        let line = |index: u32, fd: u32, local: SocketAddr, remote: SocketAddr| {
            let (state, reason, role) = (LineState::Counting, Reason::TooShort, Role::Connecting);
            let identity = LineIdentity { state, reason, role, pid: 1, fd, local, remote, channel: 0 };
            LineSnapshot { index, identity, tx: DirectionSeen::default(), rx: DirectionSeen::default() }
        };
        let with_port = "0.0.0.0:80".parse().unwrap();
        let lines = vec![line(0, 5, unknown, far), line(1, 6, unknown, far), line(2, 7, with_port, near)];
        let mut memory = Memory { program: "x".into(), lines, ..Memory::default() };
        assert_eq!(memory.take(9, near, far), None, "another descriptor, of a connection that is not looked after");
        assert_eq!(memory.take(6, near, far).map(|seen| seen.index), Some(1));
        assert_eq!(memory.take(8, far, near).map(|seen| seen.index), Some(2), "accepted: the peer tells it apart");
        assert_eq!(memory.take(7, near, near), None, "not the listener's port");
    }

    #[test]
    fn line_without_a_connection_of_the_kernel_is_left_out() {
        use partywall_shm::status::{DirectionSeen, LineIdentity, LineState, Reason, Role};
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (near, far) = (client.local_addr().unwrap(), client.peer_addr().unwrap());
        let line = |index: u32, local: SocketAddr, remote: SocketAddr| {
            let (state, reason, role) = (LineState::Counting, Reason::TooShort, Role::Connecting);
            let identity = LineIdentity { state, reason, role, pid: 1, fd: 3, local, remote, channel: 0 };
            LineSnapshot { index, identity, tx: DirectionSeen::default(), rx: DirectionSeen::default() }
        };
        let gone = "127.0.0.1:1".parse().unwrap();
        let lines = vec![line(0, near, far), line(1, near, gone), line(2, gone, far)];
        let mut finder = Finder::default();
        let process = Process::myself().unwrap();
        let namespace = namespace(&process).unwrap();
        finder.table(&process, namespace);
        finder.memories.insert(1, Memory { program: "x".into(), lines, namespace, ..Memory::default() });
        finder.add_rest();
        let found: Vec<SocketAddr> = finder.sockets.iter().map(|socket| socket.remote).collect();
        assert_eq!(found, [far], "the others have ended");
        assert_eq!(finder.sockets[0].local, near);
    }

    #[test]
    fn memfd_names_are_distinguished() {
        assert!(is_status("partywall-status") && is_status("partywall-status (deleted)"));
        assert!(!is_status("partywall") && !is_status("partywall-status-x"));
    }

    #[test]
    fn only_memory_is_opened_whatever_its_name_says() {
        use std::os::fd::AsRawFd as _;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(status::MEMFD);
        rustix::fs::mknodat(CWD, &path, rustix::fs::FileType::Fifo, Mode::RWXU, 0).unwrap();
        // Open for both ways: with a mistake, the test fails and does not hang.
        let fifo = File::options().read(true).write(true).open(&path).unwrap();
        let memory = File::from(rustix::fs::memfd_create("x", MemfdFlags::CLOEXEC).unwrap());
        let disk = tempfile::tempfile_in(dir.path()).unwrap();
        for file in [&memory, &disk] {
            let words = [&status::MAGIC.to_le_bytes()[..], &status::VERSION.to_le_bytes(), &[0; status::LINE]];
            file.write_all_at(&words.concat(), 0).unwrap();
        }
        let (mut finder, place) = (Finder::default(), Memory::default());
        let mut look = |file: &File| finder.memory(std::process::id(), file.as_raw_fd(), &place).is_some();
        assert!(look(&memory));
        let older = File::from(rustix::fs::memfd_create("x", MemfdFlags::CLOEXEC).unwrap());
        let words = [&status::MAGIC.to_le_bytes()[..], &(status::VERSION - 1).to_le_bytes(), &[0; status::LINE]];
        older.write_all_at(&words.concat(), 0).unwrap();
        let older_memory = Finder::default().memory(std::process::id(), older.as_raw_fd(), &Memory::default());
        assert!(matches!(older_memory, Some(StatusFound::OtherVersion)));
        assert!(!look(&disk), "a file of another file system, such as FUSE");
        assert!(!look(&fifo));
        // This drops only the FIFO: an ordinary open would wait for a writer.
        drop(fifo);
        let named = open_named(&path).unwrap();
        assert!(reopen::regular(named.as_fd()).is_err());
        assert!(reopen::regular_on(named.as_fd(), memory_device().unwrap()).is_err());
    }

    #[test]
    fn preloaded_program_is_found_with_its_socket() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        // bash has its own sockets; the library in its environment does not exist.
        let script = format!("exec 3<>/dev/tcp/127.0.0.1/{}; echo; read -r", address.port());
        let mut child = Command::new("bash")
            .args(["-c", &script])
            .env(PRELOAD, format!("/nonexistent/{LIBRARY}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let accepted: TcpStream = listener.accept().unwrap().0;
        // The child reports when it has the socket in the right place.
        child.stdout.take().unwrap().read_exact(&mut [0]).unwrap();
        let (all, _) = sockets(Scope::Preloaded);
        let found: Vec<_> = all.iter().filter(|socket| socket.pid == child.id()).collect();
        assert_eq!(found.len(), 1, "{all:?}");
        assert_eq!((found[0].remote, found[0].fd), (address, 3));
        assert_eq!((found[0].local, found[0].loaded), (accepted.peer_addr().unwrap(), false));
        assert_eq!((found[0].program.as_str(), found[0].seen), ("bash", None));
        child.stdin.take().unwrap().write_all(b"\n").unwrap();
        child.wait().unwrap();
    }
}
