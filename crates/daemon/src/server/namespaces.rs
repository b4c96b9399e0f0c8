//! Finds the network namespaces of the operator's list (`[[network]]`), and makes sockets in them (protocol U13).
//!
//! The list names files. A file may come to stand for another namespace at any time, as when a container starts again, so it is looked at
//! whenever a program shows a socket for datagrams, and with each look at the flows. A number of a namespace is never used again, so a number
//! that was learned from a file stands for that namespace only.
//!
//! To make a socket in a namespace, a thread enters the namespace and ends. No descriptor of a namespace is kept beyond that: the
//! broker must not keep a namespace from going away. The sockets of [`super::watch`] do so while flows of the namespace last, which the
//! programs' sockets do anyway.
//!
//! The list also names virtual machines. The namespace of a machine's agent is known when the agent has answered a question of the broker.
//! It counts for machines that the list does not name, too: for flows within them (protocol U15).

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::thread;

use partywall_protocol::socket::NamespaceId;
use partywall_protocol::wire::{MachineId, Name, Origin};
use partywall_region::inspect::receivers::{ReceiverFinder, destroy_notices};
use rustix::fs::{Mode, OFlags, Stat};
use rustix::io::Errno;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::core::{MachineNews, Networks};
use crate::policy::{NamespacePlace, NetworkEntry};

/// What tells the file of one namespace from that of a later one: device, inode, and when the inode came to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct FileId([u64; 4]);

impl FileId {
    fn of(stat: &Stat) -> Self {
        // The casts keep every bit.
        Self([stat.st_dev, stat.st_ino, stat.st_ctime.cast_unsigned(), stat.st_ctime_nsec])
    }
}

/// A namespace of the list.
#[derive(Debug)]
struct ListedNamespace {
    entry: NetworkEntry,
    /// The file at its path when that was last looked at; `None` if there was none.
    file: Option<FileId>,
    /// The namespace; `None` if there is none, or the broker may not enter it, or cannot ask the machine's agent.
    found: Option<NamespaceId>,
}

/// The sockets with which a namespace is asked about its sockets.
#[derive(Debug)]
pub(super) struct EnteredNamespace {
    /// Where questions are asked.
    pub(super) finder: ReceiverFinder,
    /// The kernel's notices of destroyed sockets, if it gives any.
    pub(super) notices: Option<OwnedFd>,
}

/// The operator's list, and what the broker has found of it.
#[derive(Debug)]
pub(super) struct ListedNamespaces {
    /// The broker's own namespace; `None` if the kernel does not report sockets.
    own: Option<u64>,
    listed: Vec<ListedNamespace>,
    /// The machines that are attached, and the numbers of their agents' namespaces, as far as these are known.
    machines: BTreeMap<MachineId, (Name, Option<u64>)>,
    /// Those whose agents have greeted and have not answered.
    silent: BTreeSet<MachineId>,
    /// One of these numbers has changed since the list was last found.
    has_learned: bool,
    networks: Networks,
}

impl ListedNamespaces {
    /// An empty list.
    pub(super) fn new(own: Option<u64>) -> Self {
        let networks = Networks::new(own, []);
        Self {
            own,
            listed: Vec::new(),
            machines: BTreeMap::new(),
            silent: BTreeSet::new(),
            has_learned: false,
            networks,
        }
    }

    /// The list as it was last found.
    pub(super) fn networks(&self) -> &Networks {
        &self.networks
    }

    /// Takes another list, and looks for the namespaces of it.
    pub(super) fn set_list(&mut self, list: &[NetworkEntry]) {
        let listed = |entry: &NetworkEntry| ListedNamespace { entry: entry.clone(), file: None, found: None };
        self.listed = list.iter().map(listed).collect();
        self.look();
        self.networks = self.found();
        for listed in self.listed.iter().filter(|listed| listed.file.is_none()) {
            if let NamespacePlace::File(path) = &listed.entry.namespace {
                tracing::info!(path = %path.display(), "a network namespace of the policy is not there yet");
            }
        }
    }

    /// Looks whether the files of the list stand for other namespaces than before. Returns the list if it has changed.
    ///
    /// Each socket for datagrams that a program shows leads here. As long as nothing has changed, a call costs one `stat` for each file.
    pub(super) fn follow(&mut self) -> Option<&Networks> {
        let has_learned = std::mem::take(&mut self.has_learned);
        if !self.look() && !has_learned {
            return None;
        }
        self.networks = self.found();
        Some(&self.networks)
    }

    /// Looks which namespaces the entries of the list stand for. Returns whether any stands for another one than before.
    fn look(&mut self) -> bool {
        let Some(own) = self.own else { return false };
        let mut has_changed = false;
        for listed in &mut self.listed {
            has_changed |= listed.follow(own, &self.machines);
        }
        has_changed
    }

    /// The list with the namespaces that were found.
    fn found(&self) -> Networks {
        let owners = self.listed.iter().filter_map(|listed| Some((listed, listed.found?)));
        let owners = owners.flat_map(|(listed, found)| listed.entry.addresses.iter().map(move |ip| (*ip, found)));
        let agents = self.machines.iter().filter_map(|(machine, (_, netns))| Some((*machine, (*netns)?)));
        Networks::new(self.own, owners).with_agents(agents)
    }

    /// Makes sockets in a namespace of the list, if its file still stands for it.
    pub(super) fn enter(&self, netns: u64) -> Option<EnteredNamespace> {
        let wanted = NamespaceId { origin: Origin::Host, cookie: netns };
        let listed = self.listed.iter().find(|listed| listed.found == Some(wanted))?;
        let NamespacePlace::File(path) = &listed.entry.namespace else { return None };
        let (_, entered) = enter(path).ok()?;
        (entered.finder.netns() == netns).then_some(entered)
    }

    /// Takes in what concerns the namespaces of machines.
    pub(super) fn hear<F>(&mut self, news: &MachineNews<F>) {
        match news {
            MachineNews::Added { machine, name, .. } => {
                let before = self.machines.insert(*machine, (name.clone(), None));
                self.has_learned |= before.is_some();
            }
            MachineNews::Removed { machine } => {
                self.silent.remove(machine);
                self.has_learned |= self.machines.remove(machine).is_some();
            }
            // An agent that has started again may run in another namespace.
            MachineNews::Up { machine, up } => {
                self.learn(*machine, None);
                if *up {
                    self.silent.insert(*machine);
                }
            }
            _ => {}
        }
    }

    /// The agent of a machine has said which namespace it asks about. Returns whether that is news.
    pub(super) fn learn(&mut self, machine: MachineId, netns: Option<u64>) -> bool {
        self.silent.remove(&machine);
        let Some((_, known)) = self.machines.get_mut(&machine) else { return false };
        let is_news = std::mem::replace(known, netns) != netns;
        self.has_learned |= is_news;
        is_news
    }

    /// The machines whose agents' namespaces are not known.
    pub(super) fn unknown_machines(&self) -> Vec<MachineId> {
        let unknown = self.machines.iter().filter(|(_, (_, netns))| netns.is_none());
        unknown.map(|(machine, _)| *machine).collect()
    }

    /// The machines whose agents have greeted and have not answered. An agent that cannot ask its kernel has answered, too.
    pub(super) fn silent_agents(&self) -> Vec<MachineId> {
        self.silent.iter().copied().collect()
    }
}

impl ListedNamespace {
    /// Looks at what it stands for. Returns whether that is another namespace than before.
    fn follow(&mut self, own: u64, machines: &BTreeMap<MachineId, (Name, Option<u64>)>) -> bool {
        let before = self.found;
        self.look(own, machines);
        self.found != before
    }

    fn look(&mut self, own: u64, machines: &BTreeMap<MachineId, (Name, Option<u64>)>) {
        let host_namespace = |cookie| NamespaceId { origin: Origin::Host, cookie };
        let path = match &self.entry.namespace {
            NamespacePlace::Own => {
                self.found = Some(host_namespace(own));
                return;
            }
            NamespacePlace::Machine(name) => {
                let found = machines.iter().find(|(_, (of, _))| of == name);
                self.found = found.and_then(|(machine, (_, netns))| {
                    Some(NamespaceId { origin: Origin::Machine(*machine), cookie: (*netns)? })
                });
                return;
            }
            NamespacePlace::File(path) => path,
        };
        let file = rustix::fs::stat(path).ok().as_ref().map(FileId::of);
        if file == self.file {
            return;
        }
        (self.file, self.found) = (file, None);
        if file.is_none() {
            tracing::info!(path = %path.display(), "a network namespace has gone: its datagrams stay on the kernel");
            return;
        }
        match enter(path) {
            Ok((file, entered)) => {
                (self.file, self.found) = (Some(file), Some(host_namespace(entered.finder.netns())));
                tracing::info!(path = %path.display(), "datagrams of a network namespace may go by rings");
            }
            // The next look tries again.
            Err(error) if is_shortage(&error) => {
                tracing::debug!(path = %path.display(), %error, "a network namespace could not be entered");
                self.file = None;
            }
            Err(error) => {
                let error = explain(&error);
                tracing::warn!(path = %path.display(), error, "datagrams of a network namespace stay on the kernel");
            }
        }
    }
}

/// Whether the system lacked something that it may have later.
fn is_shortage(error: &io::Error) -> bool {
    matches!(
        Errno::from_io_error(error),
        Some(Errno::AGAIN | Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS)
    )
}

/// What an operator can do about an error.
fn explain(error: &io::Error) -> String {
    match Errno::from_io_error(error) {
        Some(Errno::PERM) => format!(
            "the broker may not enter it: {error}; give the broker CAP_SYS_ADMIN (`systemctl edit partywalld`, docs/packages.md)"
        ),
        Some(Errno::INVAL) => format!("the file stands for no network namespace: {error}"),
        _ => error.to_string(),
    }
}

/// Makes sockets in the namespace of a file.
fn enter(path: &Path) -> io::Result<(FileId, EnteredNamespace)> {
    check_owners(path)?;
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = rustix::fs::open(path, flags, Mode::empty())?;
    let id = FileId::of(&rustix::fs::fstat(&file)?);
    // A separate thread, because no thread returns from another namespace with certainty.
    let inside = move || -> io::Result<EnteredNamespace> {
        move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))?;
        Ok(EnteredNamespace { finder: ReceiverFinder::open()?, notices: destroy_notices().ok() })
    };
    let thread = thread::Builder::new().name("partywall-netns".to_owned()).spawn(inside)?;
    let entered = thread.join().map_err(|_| io::Error::other("the thread that entered it failed"))??;
    Ok((id, entered))
}

/// Refuses a path of which another user can replace a part: that user would say whose the addresses are. A symbolic link may lead through
/// such a part, or to a process whose number another one gets.
fn check_owners(path: &Path) -> io::Result<()> {
    let own = rustix::process::geteuid().as_raw();
    for part in path.ancestors() {
        let found = part.symlink_metadata()?;
        if found.is_symlink() {
            let reason = format!("{} is a symbolic link: name the file that it leads to", part.display());
            return Err(io::Error::other(reason));
        }
        let is_writable = found.is_dir() && found.mode() & 0o022 != 0 && found.mode() & libc::S_ISVTX == 0;
        if is_writable || ![0, own].contains(&found.uid()) {
            return Err(io::Error::other(format!("another user can replace {}", part.display())));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    #[test]
    fn path_that_another_user_can_replace_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let (folder, file) = (dir.path().join("folder"), dir.path().join("folder/netns"));
        std::fs::create_dir(&folder).unwrap();
        std::fs::write(&file, "").unwrap();
        let mode = |mode| std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(mode)).unwrap();
        mode(0o755);
        check_owners(&file).unwrap();
        for writable in [0o775, 0o757] {
            mode(writable);
            assert!(check_owners(&file).unwrap_err().to_string().contains("can replace"));
        }
        // In a sticky folder, as /tmp is, others replace only what is theirs.
        mode(0o1777);
        check_owners(&file).unwrap();
        let links = [(&file, dir.path().join("link")), (&folder, dir.path().join("folder-link"))];
        for (to, link) in &links {
            symlink(to, link).unwrap();
        }
        for path in [links[0].1.clone(), links[1].1.join("netns")] {
            assert!(check_owners(&path).unwrap_err().to_string().contains("is a symbolic link"));
        }
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(&folder, Some(1234), None).unwrap();
            check_owners(&file).unwrap_err();
        }
    }

    #[test]
    fn list_is_reported_only_when_a_namespace_changes() {
        let dir = tempfile::tempdir().unwrap();
        let files = ["blue", "red"].map(|name| dir.path().join(name));
        let entry = |namespace, text: &str| NetworkEntry { namespace, addresses: vec![text.parse().unwrap()] };
        let mut list = vec![entry(NamespacePlace::Own, "10.0.0.1")];
        for (file, text) in files.iter().zip(["10.0.0.2", "10.0.0.3"]) {
            std::fs::write(file, "").unwrap();
            list.push(entry(NamespacePlace::File(file.clone()), text));
        }
        let host_namespace = |cookie| NamespaceId { origin: Origin::Host, cookie };
        let own = Networks::new(Some(7), [("10.0.0.1".parse().unwrap(), host_namespace(7))]);
        let mut namespaces = ListedNamespaces::new(Some(7));
        namespaces.set_list(&list);
        assert_eq!((namespaces.networks(), namespaces.listed.len()), (&own, 3));
        assert_eq!(namespaces.follow(), None);
        // As after namespaces were found there.
        for (listed, cookie) in namespaces.listed.iter_mut().zip(7..) {
            listed.found = Some(host_namespace(cookie));
        }
        assert_eq!(namespaces.follow(), None, "the files are the same");
        files.iter().for_each(|file| std::fs::remove_file(file).unwrap());
        assert_eq!(namespaces.follow(), Some(&own));
        assert_eq!(namespaces.follow(), None, "one look has found both gone");
    }

    #[test]
    fn namespace_of_an_agent_counts_without_the_list() {
        let machine = MachineId::MIN;
        let mut namespaces = ListedNamespaces::new(Some(7));
        let name = Name::new("a").unwrap();
        let (monitor, port) = (String::new(), String::new());
        namespaces.hear::<()>(&MachineNews::Added { machine, name, monitor, port });
        assert_eq!(namespaces.follow(), None);
        assert_eq!(namespaces.unknown_machines(), [machine]);
        let none = Networks::new(Some(7), []);
        assert!(namespaces.learn(machine, Some(3)) && !namespaces.learn(machine, Some(3)));
        assert_eq!(namespaces.follow(), Some(&none.clone().with_agents([(machine, 3)])));
        assert_eq!(namespaces.follow(), None);
        assert_eq!(namespaces.unknown_machines(), []);
        namespaces.hear::<()>(&MachineNews::Up { machine, up: true });
        assert_eq!(namespaces.follow(), Some(&none), "another agent");
        namespaces.learn(machine, Some(3));
        namespaces.follow();
        namespaces.hear::<()>(&MachineNews::Removed { machine });
        assert_eq!(namespaces.follow(), Some(&none));
    }

    #[test]
    fn agent_is_silent_from_its_greeting_to_its_answer() {
        let machine = MachineId::MIN;
        let mut namespaces = ListedNamespaces::new(Some(7));
        let name = Name::new("a").unwrap();
        let (monitor, port) = (String::new(), String::new());
        namespaces.hear::<()>(&MachineNews::Added { machine, name, monitor, port });
        assert_eq!(namespaces.silent_agents(), [], "there is no agent");
        for netns in [Some(3), None] {
            namespaces.hear::<()>(&MachineNews::Up { machine, up: true });
            assert_eq!(namespaces.silent_agents(), [machine]);
            namespaces.learn(machine, netns);
            assert_eq!(namespaces.silent_agents(), [], "{netns:?}");
        }
        for news in [MachineNews::<()>::Up { machine, up: false }, MachineNews::Removed { machine }] {
            namespaces.hear::<()>(&MachineNews::Up { machine, up: true });
            namespaces.hear(&news);
            assert_eq!(namespaces.silent_agents(), [], "{news:?}");
        }
    }

    #[test]
    fn file_that_is_no_namespace_is_not_entered() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("netns");
        std::fs::write(&file, "").unwrap();
        let error = enter(&file).unwrap_err();
        assert!(explain(&error).contains("no network namespace"), "{error}");
        let error = enter(&dir.path().join("nothing")).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
