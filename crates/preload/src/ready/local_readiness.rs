//! The readiness state that this process keeps of a connection, beside the connection itself.

use super::budget::SpinBudget;
use crate::arena;
use crate::conn::Conn;
use partywall_shm::status::Reason;
use std::sync::atomic::{AtomicU32, Ordering};

/// The readiness state of a connection in this process. All zeros when new.
#[derive(Debug)]
pub(super) struct LocalReadiness {
    /// Its first registration in an epoll set.
    pub(super) first: AtomicU32,
    /// It is in a set that we do not know.
    pub(super) unknown: AtomicU32,
    /// Hidden sets that hold it, by serial number.
    hidden: [AtomicU32; 4],
    /// How long blocking calls stay awake for it.
    pub(super) budget: SpinBudget,
}

impl LocalReadiness {
    const fn new() -> Self {
        Self {
            first: AtomicU32::new(0),
            unknown: AtomicU32::new(0),
            hidden: [const { AtomicU32::new(0) }; 4],
            budget: SpinBudget::new(),
        }
    }

    /// For the next connection.
    pub(super) fn reset(&self) {
        self.unknown.store(0, Ordering::Relaxed);
        self.budget.reset();
        self.leave_hidden();
    }

    /// No hidden set holds it any more, or it has another link.
    pub(super) fn leave_hidden(&self) {
        for place in &self.hidden {
            place.store(0, Ordering::Relaxed);
        }
    }

    /// Whether threads may wait for it by other means than epoll.
    pub(super) fn is_hidden(&self) -> bool {
        self.hidden.iter().any(|place| place.load(Ordering::Relaxed) != 0)
    }

    /// Whether the hidden set of that serial number holds it.
    pub(super) fn is_in(&self, serial: u32) -> bool {
        self.hidden.iter().any(|place| place.load(Ordering::Relaxed) == serial)
    }

    /// The hidden set of that serial number holds it now.
    pub(super) fn enter(&self, serial: u32) {
        // Any place will do: whose place it was enters it again.
        let place = self.hidden.iter().find(|place| place.load(Ordering::Relaxed) == 0);
        place.unwrap_or(&self.hidden[serial as usize % 4]).store(serial, Ordering::Relaxed);
    }

    /// The hidden set of that serial number is to hold it no more. Returns whether it did.
    pub(super) fn leave(&self, serial: u32) -> bool {
        let mut has_left = false;
        for place in self.hidden.iter().filter(|place| place.load(Ordering::Relaxed) == serial) {
            place.store(0, Ordering::Relaxed);
            has_left = true;
        }
        has_left
    }
}

/// The readiness state of a connection.
#[inline]
pub(super) fn local(conn: &Conn) -> &'static LocalReadiness {
    &LOCALS[usize::from(conn.index())]
}

/// By a connection's index in the arena. Private memory, so that a child has its own; untouched pages of it cost nothing.
static LOCALS: [LocalReadiness; arena::CONNECTIONS] = [const { LocalReadiness::new() }; arena::CONNECTIONS];

/// It is in a set that we do not look after, or is used past us: the kernel must know all there is to know of it. `reason` is what
/// `partywall top` shows.
pub(super) fn forbid(conn: &'static Conn, reason: Reason) {
    local(conn).unknown.store(1, Ordering::Relaxed);
    if conn.is_up() {
        conn.bring_down(reason);
    } else {
        conn.stay_on_tcp(reason);
    }
}
