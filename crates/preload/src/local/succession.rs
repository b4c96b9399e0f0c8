//! The word by which threads find out that another connection has replaced theirs ([`crate::conn`]), and the descriptors that come with it.
//! Loom runs this code (`crates/shm/tests/loom_preload.rs`).

use partywall_shm::sync::{AtomicU32, Ordering, fence};

/// The place of the connection that has replaced one, plus 1; 0 while there is none.
#[derive(Debug)]
pub(crate) struct SuccessorWord(AtomicU32);

impl SuccessorWord {
    #[cfg(not(loom))]
    pub(crate) const fn new() -> Self {
        Self(AtomicU32::new(0))
    }

    #[cfg(loom)]
    pub(crate) fn new() -> Self {
        Self(AtomicU32::new(0))
    }

    /// The successor.
    #[inline]
    pub(crate) fn get(&self) -> u32 {
        // EDGE succession: acquires from `SuccessorWord::publish`; the successor is set up.
        self.0.load(Ordering::Acquire)
    }

    /// The successor, after something lasting was done to the connection. If there is none, the thread that [publishes](Self::publish) one
    /// sees what was done.
    #[inline]
    pub(crate) fn after_change(&self) -> u32 {
        // EDGE succession-fence: in one order with the fence in `SuccessorWord::publish`.
        fence(Ordering::SeqCst);
        self.get()
    }

    /// There is a successor. Loads that follow see what other threads did to the connection before they looked and found none.
    pub(crate) fn publish(&self, successor: u32) {
        // EDGE succession: releases the successor; acquired in `SuccessorWord::get`.
        self.0.store(successor, Ordering::Release);
        // EDGE succession-fence: in one order with the fence in `SuccessorWord::after_change`.
        fence(Ordering::SeqCst);
    }

    /// For the next connection in the place.
    pub(crate) fn clear(&self) {
        self.0.store(0, Ordering::Relaxed);
    }
}

/// Hands a descriptor over to a connection with this count of them. Several threads may try; `replace` succeeds for one.
pub(crate) fn hand_over(descriptors: &AtomicU32, replace: impl FnOnce() -> bool) {
    // EDGE descriptors: counted before the table has it; the last to close it acquires what all did with theirs.
    descriptors.fetch_add(1, Ordering::AcqRel);
    if !replace() {
        descriptors.fetch_sub(1, Ordering::AcqRel);
    }
}
