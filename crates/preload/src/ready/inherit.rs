//! Sets that several processes use, since `fork` hands them on.
//!
//! A child that uses its parent's set knows neither what the parent has registered since, nor does the parent know what the
//! child does. So the child says in shared memory ([`super::shared_flag`]) that it is there, and both leave that set to the kernel:
//! its connections go back to TCP, and none in it gets a ring any more. Most children never touch what they inherit.

use super::set::Set;
use crate::conn::Conn;
use crate::scratch;
use partywall_shm::status::Reason;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// As many as there are numbers of connections.
const PLACES: usize = 1 << 16;

/// How long a parent sleeps at most before it looks whether a child has come to its set.
const SLICE: Duration = Duration::from_millis(100);

/// To be called before and after waiting in a set: gives it up if it is shared.
#[inline]
pub(super) fn check(set: &'static Set) {
    if set.forks_since() || !set.is_own() {
        give_up(set);
    }
}

#[cold]
fn give_up(set: &'static Set) {
    if !set.is_own() {
        set.shared.raise();
    }
    if set.is_shared() {
        set.give_datagrams_up();
        empty(set);
    } else {
        set.give_once_up();
    }
}

/// Leaves a set to the kernel permanently: a program without this library gets it.
pub(super) fn lose(set: &'static Set) {
    set.lost.store(1, Ordering::Relaxed);
    set.give_datagrams_up();
    if !set.is_own() {
        // Its maker must know, too.
        set.shared.raise();
    }
    empty(set);
    set.leave_to_stranger();
}

fn empty(set: &'static Set) {
    if set.rings.load(Ordering::Relaxed) != 0 {
        // One after the other: the lock of the set is not held while a connection waits for its peer. And once each: a peer that makes no call
        // leaves the ring when it does, and is not waited for again. Without memory to note them, the kernel is left with what it has.
        let _ = scratch::with_memory(PLACES.div_ceil(64), 0u64, |done| {
            let at = |conn: &Conn| (usize::from(conn.index()) / 64, 1 << (conn.index() % 64));
            let is_done = |done: &[u64], conn: &Conn| done.get(at(conn).0).is_some_and(|bits| bits & at(conn).1 != 0);
            while let Some(conn) = set.first_ring(|conn| !conn.is_tcp_permanently() && !is_done(done, conn)) {
                if let Some(bits) = done.get_mut(at(conn).0) {
                    *bits |= at(conn).1;
                }
                conn.bring_down(Reason::Shared);
            }
            Ok(())
        });
        set.lower_all();
    }
}

/// How long to sleep at most in this set.
pub(super) fn slice(set: &Set) -> Option<Duration> {
    set.forks_since().then_some(SLICE)
}
