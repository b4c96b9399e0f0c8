//! The open objects of one session: nodes, files and locks, each with a number that is never reused, and each bounded.

use super::actor::Actor;
use rustix::fd::OwnedFd;
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// The most that one session may have.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct SessionLimits {
    /// Nodes that the server keeps. Beyond it, those are dropped that were used least recently; a client finds them again by their names.
    pub nodes: usize,
    /// Open files and directories.
    pub handles: usize,
    /// Owners of locks, counted for each file.
    pub lock_owners: usize,
}

impl Default for SessionLimits {
    fn default() -> Self {
        Self { nodes: 16_384, handles: 8_192, lock_owners: 4_096 }
    }
}

/// The file system's number and the inode.
pub(crate) type FileKey = (u64, u64);

/// A file or directory that the client may name. The descriptor is of kind `O_PATH`: it gives no access to data, and pins the inode.
#[derive(Debug)]
pub(crate) struct ExportedNode {
    pub(crate) number: u64,
    pub(crate) path: OwnedFd,
    pub(crate) identity: FileKey,
    /// `S_IFMT` bits, which never change.
    pub(crate) kind: u32,
    /// Counts of use, for the choice of what is dropped.
    used: AtomicU64,
}

/// An open file or directory.
#[derive(Debug)]
pub(crate) struct OpenHandle {
    pub(crate) file: OwnedFd,
    /// Whether `file` has `O_APPEND` now. A write holds this lock, so that the flag is the same until the write is done.
    appends: RwLock<bool>,
    pub(crate) node: Arc<ExportedNode>,
    /// The user that opened it: reads and writes are executed as this user.
    pub(crate) actor: Actor,
    pub(crate) is_directory: bool,
    /// Held while the directory is listed: the position of the listing belongs to `file`.
    pub(crate) listing: Mutex<()>,
}

impl OpenHandle {
    /// A file or directory that was opened with these flags.
    pub(crate) fn new(file: OwnedFd, flags: OFlags, node: Arc<ExportedNode>, actor: Actor) -> Self {
        let is_directory = node.kind == super::DIRECTORY;
        let appends = RwLock::new(flags.contains(OFlags::APPEND));
        Self { file, appends, node, actor, is_directory, listing: Mutex::default() }
    }

    /// Lets writes append to the file, or write where they say, until what is returned is dropped.
    ///
    /// `RWF_APPEND` would do without the lock, but FUSE, and overlayfs of older kernels, do not pass it on to what is below them.
    ///
    /// # Errors
    /// The system's: `EPERM` for a file that can only be appended to.
    pub(crate) fn writing(&self, appends: bool) -> Result<RwLockReadGuard<'_, bool>, Errno> {
        let current = self.appends.read().unwrap_or_else(PoisonError::into_inner);
        if *current == appends {
            return Ok(current);
        }
        drop(current);
        let mut current = self.appends.write().unwrap_or_else(PoisonError::into_inner);
        if *current != appends {
            let mut flags = rustix::fs::fcntl_getfl(&self.file)?;
            flags.set(OFlags::APPEND, appends);
            rustix::fs::fcntl_setfl(&self.file, flags)?;
            *current = appends;
        }
        Ok(RwLockWriteGuard::downgrade(current))
    }
}

/// What the close of an open file takes out of the tables. Dropping it can wait for a disk, so it is dropped without the lock of the tables.
#[derive(Debug)]
pub(crate) struct ClosedFile {
    pub(crate) handle: Arc<OpenHandle>,
    pub(crate) locks: Vec<Arc<OwnedFd>>,
}

struct Mention {
    node: Arc<ExportedNode>,
    /// How often replies have mentioned it, less what the client has given back.
    count: u64,
}

/// All of a session's nodes, open files and locks.
pub(crate) struct Tables {
    limits: SessionLimits,
    nodes: HashMap<u64, Mention>,
    by_identity: HashMap<FileKey, u64>,
    handles: HashMap<u64, Arc<OpenHandle>>,
    /// By file and owner: an open file description whose locks are the owner's. A file that is open may get another node, because nodes are dropped
    /// for others.
    locks: HashMap<(FileKey, u64), Arc<OwnedFd>>,
    /// Nodes that were dropped for others and are not closed yet.
    dropped: Vec<Arc<ExportedNode>>,
    next: u64,
    clock: u64,
    /// No more entries are accepted.
    has_ended: bool,
}

impl Tables {
    pub(crate) fn new(root: OwnedFd, identity: FileKey, limits: SessionLimits) -> Self {
        let number = crate::wire::ROOT;
        let node = ExportedNode { number, path: root, identity, kind: super::DIRECTORY, used: AtomicU64::new(0) };
        Self {
            limits,
            nodes: HashMap::from([(number, Mention { node: Arc::new(node), count: 1 })]),
            by_identity: HashMap::from([(identity, number)]),
            handles: HashMap::new(),
            locks: HashMap::new(),
            dropped: Vec::new(),
            next: number + 1,
            clock: 0,
            has_ended: false,
        }
    }

    pub(crate) fn node(&mut self, number: u64) -> Result<Arc<ExportedNode>, Errno> {
        if self.has_ended {
            return Err(Errno::NOTCONN);
        }
        self.clock += 1;
        let mention = self.nodes.get(&number).ok_or(Errno::STALE)?;
        mention.node.used.store(self.clock, Ordering::Relaxed);
        Ok(Arc::clone(&mention.node))
    }

    /// Fails for a request in flight after the session has ended. The request may have changed something, so the client must not get
    /// `ENOTCONN`, which means that it was not executed.
    fn must_go_on(&self) -> Result<(), Errno> {
        if self.has_ended { Err(Errno::IO) } else { Ok(()) }
    }

    /// The node of a descriptor that was just opened: an older one if it is the same file.
    pub(crate) fn mention(&mut self, path: OwnedFd, identity: FileKey, kind: u32) -> Result<Arc<ExportedNode>, Errno> {
        self.must_go_on()?;
        self.clock += 1;
        let known = self.by_identity.get(&identity).and_then(|number| self.nodes.get_mut(number));
        if let Some(mention) = known {
            mention.count += 1;
            mention.node.used.store(self.clock, Ordering::Relaxed);
            return Ok(Arc::clone(&mention.node));
        }
        if self.nodes.len() >= self.limits.nodes {
            self.drop_oldest();
        }
        let number = self.next;
        self.next += 1;
        let node = Arc::new(ExportedNode { number, path, identity, kind, used: AtomicU64::new(self.clock) });
        self.nodes.insert(number, Mention { node: Arc::clone(&node), count: 1 });
        self.by_identity.insert(identity, number);
        Ok(node)
    }

    /// Drops a quarter of all nodes, and never the root.
    fn drop_oldest(&mut self) {
        let mut ages: Vec<(u64, u64)> =
            self.nodes.values().map(|m| (m.node.used.load(Ordering::Relaxed), m.node.number)).collect();
        ages.retain(|(_, number)| *number != crate::wire::ROOT);
        ages.sort_unstable();
        for (_, number) in ages.into_iter().take((self.limits.nodes / 4).max(1)) {
            let node = self.remove(number);
            self.dropped.extend(node);
        }
    }

    /// Nodes that were dropped for others since the last call. To close the last descriptor of a removed file frees its blocks, so the caller drops
    /// them without the lock of the tables.
    pub(crate) fn take_dropped(&mut self) -> Vec<Arc<ExportedNode>> {
        std::mem::take(&mut self.dropped)
    }

    fn remove(&mut self, number: u64) -> Option<Arc<ExportedNode>> {
        let mention = self.nodes.remove(&number)?;
        self.by_identity.remove(&mention.node.identity);
        Some(mention.node)
    }

    /// Gives mentions of a node back. Returns the node if it is in the tables no more; it is to be dropped without their lock.
    pub(crate) fn forget(&mut self, number: u64, count: u64) -> Option<Arc<ExportedNode>> {
        let mention = self.nodes.get_mut(&number)?;
        mention.count = mention.count.saturating_sub(count);
        if mention.count == 0 && number != crate::wire::ROOT { self.remove(number) } else { None }
    }

    pub(crate) fn open(&mut self, handle: OpenHandle) -> Result<u64, Errno> {
        self.must_go_on()?;
        if self.handles.len() >= self.limits.handles {
            return Err(Errno::MFILE);
        }
        let number = self.next;
        self.next += 1;
        self.handles.insert(number, Arc::new(handle));
        Ok(number)
    }

    pub(crate) fn handle(&self, number: u64) -> Result<Arc<OpenHandle>, Errno> {
        let missing = if self.has_ended { Errno::NOTCONN } else { Errno::BADF };
        self.handles.get(&number).cloned().ok_or(missing)
    }

    /// Closes an open file, and all locks on the file if the session has it open no more.
    pub(crate) fn close(&mut self, number: u64, owner: u64) -> Result<ClosedFile, Errno> {
        let handle = self.handles.remove(&number).ok_or(Errno::BADF)?;
        let file = handle.node.identity;
        let mut locks = Vec::from_iter(self.unlock(file, owner));
        if !self.locks.is_empty() && !self.handles.values().any(|other| other.node.identity == file) {
            locks.extend(self.locks.extract_if(|(locked, _), _| *locked == file).map(|(_, locks)| locks));
        }
        Ok(ClosedFile { handle, locks })
    }

    /// Takes out the locks of an owner on a file. They are given up when the result is dropped.
    pub(crate) fn unlock(&mut self, file: FileKey, owner: u64) -> Option<Arc<OwnedFd>> {
        self.locks.remove(&(file, owner))
    }

    pub(crate) fn locks_of(&self, file: FileKey, owner: u64) -> Option<Arc<OwnedFd>> {
        self.locks.get(&(file, owner)).cloned()
    }

    /// Keeps a description for the locks of an owner. Returns the one that the owner has if another request has added one first.
    pub(crate) fn add_locks(&mut self, file: FileKey, owner: u64, locks: OwnedFd) -> Result<Arc<OwnedFd>, Errno> {
        self.must_go_on()?;
        if self.locks.len() >= self.limits.lock_owners {
            return Err(Errno::NOLCK);
        }
        Ok(Arc::clone(self.locks.entry((file, owner)).or_insert_with(|| Arc::new(locks))))
    }

    /// Drops everything but the root. Nothing is put in afterwards.
    pub(crate) fn end(&mut self) {
        self.has_ended = true;
        self.nodes.retain(|number, _| *number == crate::wire::ROOT);
        self.by_identity.retain(|_, number| *number == crate::wire::ROOT);
        self.handles.clear();
        self.locks.clear();
    }

    /// How many nodes, open files and owners of locks there are.
    pub(crate) fn counts(&self) -> (usize, usize, usize) {
        (self.nodes.len(), self.handles.len(), self.locks.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn any_fd() -> OwnedFd {
        OwnedFd::from(std::fs::File::open("/dev/null").unwrap())
    }

    fn open_of(node: &Arc<ExportedNode>) -> OpenHandle {
        OpenHandle::new(any_fd(), OFlags::RDONLY, Arc::clone(node), Actor::Server)
    }

    #[test]
    fn locks_of_open_file_stay_its_own_when_it_gets_another_node() {
        let mut tables = Tables::new(any_fd(), (0, 0), SessionLimits::default());
        let file = (0, 1);
        let first = tables.mention(any_fd(), file, 0).unwrap();
        let locked = tables.open(open_of(&first)).unwrap();
        tables.add_locks(first.identity, 3, any_fd()).unwrap();
        tables.forget(first.number, 1);
        let second = tables.mention(any_fd(), file, 0).unwrap();
        assert_ne!(second.number, first.number);
        let other = tables.open(open_of(&second)).unwrap();
        assert!(tables.locks_of(second.identity, 3).is_some());
        // The owner of the locks does not close this one.
        tables.close(other, 0).unwrap();
        assert!(tables.locks_of(file, 3).is_some());
        let other = tables.open(open_of(&second)).unwrap();
        tables.close(locked, 0).unwrap();
        assert!(tables.locks_of(file, 3).is_some(), "the file is still open");
        tables.close(other, 0).unwrap();
        assert!(tables.locks_of(file, 3).is_none());
    }

    #[test]
    fn node_limit_evicts_least_recently_used_but_never_root() {
        let limits = SessionLimits { nodes: 8, ..SessionLimits::default() };
        let mut tables = Tables::new(any_fd(), (0, 0), limits);
        let first = tables.mention(any_fd(), (0, 1), 0).unwrap().number;
        for inode in 2..100 {
            tables.mention(any_fd(), (0, inode), 0).unwrap();
            tables.node(first).expect("it is in use");
            assert!(tables.counts().0 <= 8);
        }
        assert!(tables.node(crate::wire::ROOT).is_ok());
        assert_eq!(tables.node(first + 1).unwrap_err(), Errno::STALE);
    }

    #[test]
    fn excess_forget_drops_one_node_and_keeps_root() {
        let mut tables = Tables::new(any_fd(), (0, 0), SessionLimits::default());
        let node = tables.mention(any_fd(), (0, 1), 0).unwrap().number;
        assert_eq!(tables.mention(any_fd(), (0, 1), 0).unwrap().number, node);
        tables.forget(node, 1);
        assert!(tables.node(node).is_ok());
        tables.forget(node, u64::MAX);
        assert!(tables.node(node).is_err());
        tables.forget(crate::wire::ROOT, u64::MAX);
        assert!(tables.node(crate::wire::ROOT).is_ok());
        tables.forget(12_345, 1);
    }

    #[test]
    fn handles_are_bounded_and_their_numbers_are_not_given_again() {
        let limits = SessionLimits { handles: 1, ..SessionLimits::default() };
        let mut tables = Tables::new(any_fd(), (0, 0), limits);
        let node = tables.node(crate::wire::ROOT).unwrap();
        let handle = || open_of(&node);
        let first = tables.open(handle()).unwrap();
        assert_eq!(tables.open(handle()).unwrap_err(), Errno::MFILE);
        tables.close(first, 0).unwrap();
        assert_eq!(tables.close(first, 0).unwrap_err(), Errno::BADF);
        assert_ne!(tables.open(handle()).unwrap(), first);
    }

    #[test]
    fn nothing_is_put_into_the_tables_of_a_session_that_has_ended() {
        let mut tables = Tables::new(any_fd(), (0, 0), SessionLimits::default());
        let node = tables.node(crate::wire::ROOT).unwrap();
        let open = open_of(&node);
        tables.end();
        assert_eq!(tables.mention(any_fd(), (0, 1), 0).unwrap_err(), Errno::IO);
        assert_eq!(tables.open(open).unwrap_err(), Errno::IO);
        assert_eq!(tables.add_locks((0, 2), 3, any_fd()).unwrap_err(), Errno::IO);
        assert_eq!(tables.node(crate::wire::ROOT).unwrap_err(), Errno::NOTCONN);
        assert_eq!(tables.counts(), (1, 0, 0));
    }
}
