//! The open files and directories of a mount, which of them may have locks, and which have changes that were not synced.

use super::Caller;
use super::link::RequestFailure;
use rustix::io::Errno;
use std::cmp::Ordering;
use std::collections::{BTreeSet, HashMap, HashSet};

/// An open file or directory of the mount.
#[derive(Debug, Clone, Copy)]
pub(super) struct RemoteHandle {
    /// Its node.
    pub(super) number: u64,
    /// The flags of its `open`; 0 for a directory.
    pub(super) flags: u32,
    pub(super) is_directory: bool,
    /// The caller that opened it. In a new connection it is opened again as this caller (protocol N6.7).
    pub(super) opener: Caller,
    /// Its number at the server, in the connection `epoch`.
    pub(super) server: u64,
    pub(super) epoch: u64,
}

#[derive(Debug)]
struct KnownHandle {
    open: RemoteHandle,
    /// A lock was taken on it in the connection `epoch`. A new connection would not have that lock (protocol N9.3).
    has_locks: bool,
    /// Requests that take a lock and have no reply yet.
    lock_requests: usize,
    /// Changes of its node were lost in a crash of the server's machine, which the next *Sync* reports.
    has_lost_changes: bool,
}

impl KnownHandle {
    fn may_have_locks(&self) -> bool {
        self.has_locks || self.lock_requests > 0
    }
}

/// All open files and directories, by the numbers that the kernel has for them.
#[derive(Debug, Default)]
pub(super) struct RemoteHandles {
    handles: HashMap<u64, KnownHandle>,
    /// Node and handle of each open file that may have locks.
    locked: BTreeSet<(u64, u64)>,
    /// The nodes with changes since their last *Sync*, and the number of the last change of each.
    changed: HashMap<u64, u64>,
    /// The number of the last change of all.
    latest_change: u64,
    /// The nodes whose changes a boot has lost, until a *Sync* has reported it: who opens such a file later gets the report, too.
    lost: HashSet<u64>,
    /// There are more than [`MOST_CHANGED`]: any node may have changes.
    are_all_changed: bool,
    latest: u64,
}

/// Nodes whose changes are counted.
const MOST_CHANGED: usize = 1 << 16;

impl RemoteHandles {
    pub(super) fn add(&mut self, open: RemoteHandle) -> u64 {
        self.latest += 1;
        let has_lost_changes = self.lost.contains(&open.number);
        self.handles.insert(self.latest, KnownHandle { open, has_locks: false, lock_requests: 0, has_lost_changes });
        self.latest
    }

    pub(super) fn get(&self, handle: u64) -> Option<RemoteHandle> {
        self.handles.get(&handle).map(|known| known.open)
    }

    /// Removes an open file. Returns also whether it may have locks.
    pub(super) fn remove(&mut self, handle: u64) -> Option<(RemoteHandle, bool)> {
        let known = self.handles.remove(&handle)?;
        self.locked.remove(&(known.open.number, handle));
        Some((known.open, known.may_have_locks()))
    }

    /// An open file, for a request in the connection `epoch`.
    ///
    /// # Errors
    /// `EBADF` if there is none. `EIO` if it may have locks of an earlier connection: another client may have had them meanwhile. The end of the
    /// connection if another thread has opened the file again in a later one.
    pub(super) fn usable(&self, handle: u64, epoch: u64) -> Result<RemoteHandle, RequestFailure> {
        let known = self.handles.get(&handle).ok_or(RequestFailure::Errno(Errno::BADF))?;
        match known.open.epoch.cmp(&epoch) {
            Ordering::Less if known.may_have_locks() => Err(RequestFailure::Errno(Errno::IO)),
            Ordering::Less | Ordering::Equal => Ok(known.open),
            Ordering::Greater => Err(RequestFailure::Ended { may_be_executed: false }),
        }
    }

    /// A file has been opened again in the connection `epoch`. Returns the number at the server that requests use. That is another one if another
    /// thread has opened the file first.
    ///
    /// # Errors
    /// As [`RemoteHandles::usable`].
    pub(super) fn reopened(&mut self, handle: u64, epoch: u64, server: u64) -> Result<u64, RequestFailure> {
        let open = self.usable(handle, epoch)?;
        if open.epoch == epoch {
            return Ok(open.server);
        }
        if let Some(known) = self.handles.get_mut(&handle) {
            (known.open.server, known.open.epoch) = (server, epoch);
        }
        Ok(server)
    }

    /// A request that takes a lock is about to be sent in the connection `epoch`.
    pub(super) fn lock_begins(&mut self, handle: u64, epoch: u64) -> Result<(), RequestFailure> {
        let known = self.handles.get_mut(&handle).ok_or(RequestFailure::Errno(Errno::BADF))?;
        if known.open.epoch != epoch {
            // Another thread has opened the file again in a later connection, which has no locks of this one.
            return Err(RequestFailure::Ended { may_be_executed: false });
        }
        known.lock_requests += 1;
        self.locked.insert((known.open.number, handle));
        Ok(())
    }

    /// That request has its outcome. A request that failed has left no lock, not even if the server has executed it and the connection ended before
    /// the reply: the end of a session releases its locks.
    pub(super) fn lock_ends(&mut self, handle: u64, is_taken: bool) {
        let Some(known) = self.handles.get_mut(&handle) else { return };
        known.lock_requests -= 1;
        known.has_locks |= is_taken;
        if !known.may_have_locks() {
            self.locked.remove(&(known.open.number, handle));
        }
    }

    /// A request that changes this node is about to be sent.
    pub(super) fn change(&mut self, node: u64) {
        if self.changed.len() < MOST_CHANGED || self.changed.contains_key(&node) {
            self.latest_change += 1;
            self.changed.insert(node, self.latest_change);
        } else {
            self.are_all_changed = true;
        }
    }

    /// A request that changes this open file is about to be sent.
    pub(super) fn change_file(&mut self, handle: u64) {
        if let Some(open) = self.get(handle) {
            self.change(open.number);
        }
    }

    /// An open file is about to be synced. Returns the changes that this makes durable, for [`RemoteHandles::synced`].
    ///
    /// # Errors
    /// `EIO`, once, if changes of its node were lost (protocol N9.4).
    pub(super) fn begin_sync(&mut self, handle: u64) -> Result<Option<(u64, u64)>, RequestFailure> {
        let known = self.handles.get_mut(&handle).ok_or(RequestFailure::Errno(Errno::BADF))?;
        if std::mem::take(&mut known.has_lost_changes) {
            self.lost.remove(&known.open.number);
            return Err(RequestFailure::Errno(Errno::IO));
        }
        let node = known.open.number;
        Ok(self.changed.get(&node).map(|changes| (node, *changes)))
    }

    /// The server has made these changes durable. Later ones are not.
    pub(super) fn synced(&mut self, (node, changes): (u64, u64)) {
        if self.changed.get(&node) == Some(&changes) {
            self.changed.remove(&node);
        }
    }

    /// The server's machine has booted since the last connection: changes that were not synced may be lost.
    pub(super) fn server_has_booted(&mut self) {
        for known in self.handles.values_mut() {
            known.has_lost_changes |= self.are_all_changed || self.changed.contains_key(&known.open.number);
        }
        self.lost.extend(self.changed.drain().map(|(node, _)| node).take(MOST_CHANGED));
        self.are_all_changed = false;
    }

    /// An open file of this file's node that may have locks in the connection `epoch`.
    pub(super) fn locked_of_node(&self, handle: u64, epoch: u64) -> Option<RemoteHandle> {
        let node = self.get(handle)?.number;
        let mut locked = self.locked.range((node, 0)..=(node, u64::MAX)).filter_map(|(_, handle)| self.get(*handle));
        locked.find(|open| open.epoch == epoch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NODE: u64 = 40;
    const IO: RequestFailure = RequestFailure::Errno(Errno::IO);
    const ENDED: RequestFailure = RequestFailure::Ended { may_be_executed: false };

    fn open(number: u64) -> RemoteHandle {
        RemoteHandle { number, flags: 0, is_directory: false, opener: (1000, 1000), server: 7, epoch: 1 }
    }

    fn table() -> (RemoteHandles, u64) {
        let mut handles = RemoteHandles::default();
        let handle = handles.add(open(NODE));
        (handles, handle)
    }

    #[test]
    fn refused_lock_leaves_file_usable_in_next_connection() {
        let (mut handles, handle) = table();
        handles.lock_begins(handle, 1).unwrap();
        assert_eq!(handles.usable(handle, 2).unwrap_err(), IO, "the lock may be taken");
        assert!(handles.usable(handle, 1).is_ok());
        handles.lock_ends(handle, false);
        assert!(handles.usable(handle, 2).is_ok());
        assert_eq!(handles.reopened(handle, 2, 8), Ok(8));
        assert_eq!(handles.get(handle).unwrap().server, 8);
    }

    #[test]
    fn lock_taken_beside_refused_one_stays_recorded() {
        for first_is_taken in [true, false] {
            let (mut handles, handle) = table();
            handles.lock_begins(handle, 1).unwrap();
            handles.lock_begins(handle, 1).unwrap();
            handles.lock_ends(handle, first_is_taken);
            assert_eq!(handles.usable(handle, 2).unwrap_err(), IO);
            handles.lock_ends(handle, !first_is_taken);
            assert_eq!(handles.usable(handle, 2).unwrap_err(), IO);
            assert_eq!(handles.remove(handle).map(|(_, may_have_locks)| may_have_locks), Some(true));
        }
    }

    #[test]
    fn lock_in_ended_connection_is_not_requested() {
        let (mut handles, handle) = table();
        handles.reopened(handle, 2, 8).unwrap();
        assert_eq!(handles.lock_begins(handle, 1), Err(ENDED));
        assert!(handles.usable(handle, 3).is_ok(), "nothing is recorded");
    }

    #[test]
    fn file_opened_again_by_two_threads_keeps_first_number() {
        let (mut handles, handle) = table();
        assert_eq!(handles.reopened(handle, 2, 8), Ok(8));
        assert_eq!(handles.reopened(handle, 2, 9), Ok(8));
    }

    #[test]
    fn late_reply_of_ended_connection_changes_no_open_file() {
        let (mut handles, handle) = table();
        handles.reopened(handle, 3, 8).unwrap();
        assert_eq!(handles.usable(handle, 2).unwrap_err(), ENDED);
        assert_eq!(handles.reopened(handle, 2, 9), Err(ENDED));
        handles.lock_begins(handle, 3).unwrap();
        assert_eq!(handles.usable(handle, 2).unwrap_err(), ENDED, "the file has no locks of an earlier connection");
        assert_eq!(handles.get(handle).unwrap().server, 8);
    }

    #[test]
    fn locked_file_of_node_is_found_by_any_of_its_handles() {
        let (mut handles, locked) = table();
        let (same, other) = (handles.add(open(NODE)), handles.add(open(NODE + 1)));
        assert!(handles.locked_of_node(same, 1).is_none());
        handles.lock_begins(locked, 1).unwrap();
        handles.lock_ends(locked, true);
        assert_eq!(handles.locked_of_node(same, 1).unwrap().number, NODE);
        assert!(handles.locked_of_node(other, 1).is_none());
        assert!(handles.locked_of_node(same, 2).is_none(), "the end of the connection has released the locks");
        handles.remove(locked);
        assert!(handles.locked_of_node(same, 1).is_none());
    }

    #[test]
    fn sync_reports_changes_that_a_boot_has_lost_once_for_each_file() {
        let (mut handles, handle) = table();
        let (same, other) = (handles.add(open(NODE)), handles.add(open(NODE + 1)));
        handles.change(NODE);
        handles.server_has_booted();
        let later = handles.add(open(NODE));
        for lost in [handle, same, later] {
            assert_eq!(handles.begin_sync(lost).unwrap_err(), IO);
            assert_eq!(handles.begin_sync(lost), Ok(None), "reported once");
        }
        let reported = handles.add(open(NODE));
        assert_eq!((handles.begin_sync(other), handles.begin_sync(reported)), (Ok(None), Ok(None)));
    }

    #[test]
    fn synced_changes_are_not_lost_and_later_ones_are() {
        let (mut handles, handle) = table();
        handles.change(NODE);
        let all = handles.begin_sync(handle).unwrap().unwrap();
        handles.synced(all);
        handles.server_has_booted();
        assert_eq!(handles.begin_sync(handle), Ok(None));
        handles.change(NODE);
        let first = handles.begin_sync(handle).unwrap().unwrap();
        handles.change(NODE);
        handles.synced(first);
        handles.server_has_booted();
        assert_eq!(handles.begin_sync(handle).unwrap_err(), IO, "a change that came during the sync");
    }

    #[test]
    fn changes_of_too_many_nodes_count_for_all_files() {
        let (mut handles, handle) = table();
        (0..=MOST_CHANGED as u64).for_each(|node| handles.change(1000 + node));
        assert_eq!(handles.changed.len(), MOST_CHANGED);
        handles.server_has_booted();
        assert_eq!(handles.begin_sync(handle).unwrap_err(), IO);
        handles.server_has_booted();
        assert_eq!(handles.begin_sync(handle), Ok(None));
    }
}
