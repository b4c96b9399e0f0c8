//! The interface from a connection to the threads and sets that wait for it.
//!
//! `ready` is above this module and implements [`ConnWaiters`]. The calls that make connections [install](install) it.

use super::Conn;
use crate::installed::Installed;
use crate::sys;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The events that a wait is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Interest(pub(crate) u32);

impl Interest {
    /// Something to read, or the end.
    pub(crate) const IN: Self = Self(1);
    /// Room to write, or no reader.
    pub(crate) const OUT: Self = Self(2);

    /// Whether this includes that.
    #[inline]
    pub(crate) const fn has(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }
}

/// How a wait ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WaitOutcome {
    /// Something has changed: try again.
    Ready,
    /// The deadline has come.
    TimedOut,
    /// A signal handler ran.
    Interrupted,
}

/// When a wait ends at the latest, by the monotonic clock; `None` never.
pub(crate) type Deadline = Option<Duration>;

/// When a call that waits now is to give up, by a time limit of the socket in nanoseconds.
pub(super) fn deadline(timeout: &AtomicU64) -> Deadline {
    match timeout.load(Ordering::Relaxed) {
        0 => None,
        nanoseconds => Some(sys::now() + Duration::from_nanos(nanoseconds)),
    }
}

/// The waiting side of readiness, as connections see it.
pub(crate) trait ConnWaiters: Sync {
    /// Waits until a connection may have become ready. May return early. `may_restart`: the wait goes on after a handler with `SA_RESTART`.
    fn wait(&self, conn: &'static Conn, interest: Interest, deadline: Deadline, may_restart: bool) -> WaitOutcome;

    /// A connection has a ring now. The caller calls this once [`Conn::is_up`] is true, and before the peer may use the ring. `false`: a
    /// thread or a set that waits for the connection cannot be woken by a ring, so the connection must stay on TCP.
    fn brought_up(&self, conn: &'static Conn) -> bool;

    /// Whether a connection may be offered for a ring now. `false`: what a set would report of it is not known at the moment.
    fn may_come_up(&self, conn: &Conn) -> bool;

    /// Whether all that waits for a connection can wait for a [renewed](super::renewal) one instead, and this thread has interrupted nothing
    /// that would be in the way.
    fn may_be_renewed(&self, conn: &Conn) -> bool;

    /// All that waits for a connection waits for another one from here on, which has no ring yet and stands for the same socket: the table
    /// has it already, and threads that meet it wait until this has returned.
    fn renewed(&self, old: &'static Conn, new: &'static Conn);

    /// A connection's last descriptor in this process is about to be closed.
    fn gone(&self, conn: &'static Conn);
}

static INSTALLED: Installed<&'static dyn ConnWaiters> = Installed::new();

/// Installs them. To be called before a connection is adopted.
pub(crate) fn install(waiters: &'static &'static dyn ConnWaiters) {
    INSTALLED.set(waiters);
}

/// The installed implementation.
pub(super) fn waiters() -> &'static dyn ConnWaiters {
    INSTALLED.get().copied().unwrap_or(&NoWaiters)
}

/// The default without waiters: a connection stays on TCP.
struct NoWaiters;

impl ConnWaiters for NoWaiters {
    fn wait(&self, _: &'static Conn, _: Interest, _: Deadline, _: bool) -> WaitOutcome {
        WaitOutcome::Ready
    }

    fn brought_up(&self, _: &'static Conn) -> bool {
        false
    }

    fn may_come_up(&self, _: &Conn) -> bool {
        true
    }

    fn may_be_renewed(&self, _: &Conn) -> bool {
        false
    }

    fn renewed(&self, _: &'static Conn, _: &'static Conn) {}

    fn gone(&self, _: &'static Conn) {}
}
