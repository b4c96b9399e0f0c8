//! The sessions of an exported disk. A disk that can be written has one user at a time.

use crate::VhostError;
use partywall::{PeerInfo, User};
use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};
use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};
use std::time::Duration;

/// The longest that a new user waits for the end of the previous one. It asks again after that.
const HANDOVER: Duration = Duration::from_secs(2);
/// Users of a read-only disk at a time.
const MOST_READERS: usize = 64;

/// One user of the disk, until its stream ends.
#[derive(Debug)]
pub(super) struct UserSession {
    peer: PeerKey,
    /// Each request holds it for reading. The session's end takes it for writing, once all requests are over.
    is_over: RwLock<bool>,
}

/// A request that is executed. Its session does not end before this is dropped.
#[derive(Debug)]
pub(super) struct HeldSession<'a>(#[expect(dead_code, reason = "the lock is held")] RwLockReadGuard<'a, bool>);

impl UserSession {
    /// `None` if the session is over.
    pub(super) fn enter(&self) -> Option<HeldSession<'_>> {
        let is_over = self.is_over.read().unwrap_or_else(PoisonError::into_inner);
        (!*is_over).then_some(HeldSession(is_over))
    }

    /// Lets no further request in, and returns once those inside are over.
    fn close(&self) {
        *self.is_over.write().unwrap_or_else(PoisonError::into_inner) = true;
    }
}

/// The identity of a peer.
type PeerKey = (u32, u64, Option<User>, bool);

fn key_of(peer: &PeerInfo) -> PeerKey {
    (peer.domain_id, peer.epoch, peer.user, peer.at_home)
}

/// All sessions.
#[derive(Debug)]
pub(super) struct UserSessions {
    table: Mutex<SessionTable>,
    changed: Condvar,
}

#[derive(Debug)]
struct SessionTable {
    /// The number of the last session. The first one's is random: a user may connect to this exporter with the number of a session of an earlier
    /// one, and such a request must be of no session here (protocol E1.5).
    last: u64,
    open: HashMap<u64, Arc<UserSession>>,
}

impl UserSessions {
    /// No session yet.
    ///
    /// # Errors
    /// The kernel gives no random number.
    pub(super) fn new() -> Result<Self, VhostError> {
        let mut random = [0; 8];
        let taken = getrandom(&mut random, GetRandomFlags::empty());
        taken.map_err(VhostError::system("take a random number for sessions"))?;
        let table = SessionTable { last: u64::from_ne_bytes(random), open: HashMap::new() };
        Ok(Self { table: Mutex::new(table), changed: Condvar::new() })
    }

    fn table(&self) -> MutexGuard<'_, SessionTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a session, alone or beside other readers (protocol E1.1).
    ///
    /// # Errors
    /// `EBUSY` while others use the disk.
    pub(super) fn begin(&self, peer: &PeerInfo, is_read_only: bool) -> Result<u64, Errno> {
        let most = if is_read_only { MOST_READERS } else { 1 };
        let is_full = |table: &mut SessionTable| table.open.len() >= most;
        let waited = self.changed.wait_timeout_while(self.table(), HANDOVER, is_full);
        let mut table = waited.unwrap_or_else(PoisonError::into_inner).0;
        if is_full(&mut table) {
            return Err(Errno::BUSY);
        }
        table.last = table.last.wrapping_add(1);
        let number = table.last;
        table.open.insert(number, Arc::new(UserSession { peer: key_of(peer), is_over: RwLock::new(false) }));
        Ok(number)
    }

    /// The session that a request names, if it is the peer's.
    pub(super) fn find(&self, number: u64, peer: &PeerInfo) -> Option<Arc<UserSession>> {
        let session = self.table().open.get(&number).cloned()?;
        (session.peer == key_of(peer)).then_some(session)
    }

    /// Ends a session (protocol E1.2): returns once none of its requests is executed any more, and none will be.
    pub(super) fn end(&self, number: u64) {
        let Some(session) = self.table().open.get(&number).cloned() else { return };
        session.close();
        self.table().open.remove(&number);
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};

    #[test]
    fn session_ends_after_the_requests_inside_it() {
        let session = UserSession { peer: (1, 1, None, true), is_over: RwLock::new(false) };
        let is_done = AtomicBool::new(false);
        std::thread::scope(|s| {
            let running = session.enter().unwrap();
            let closing = s.spawn(|| {
                session.close();
                assert!(is_done.load(Ordering::SeqCst), "a request was still inside");
            });
            std::thread::sleep(Duration::from_millis(50));
            is_done.store(true, Ordering::SeqCst);
            drop(running);
            closing.join().unwrap();
        });
        assert!(session.enter().is_none());
    }
}
