//! The order between the end of one connection and bytes of another (protocol T17).
//!
//! Bytes in a ring are seen at once. The end of a connection comes by the kernel, which a program that has enough to read in its rings asks
//! only now and then. So a sender says in its ring how many connections its process has ended, and a reader that sees this change asks the
//! kernel before it reports the bytes.

use partywall_shm::layout::TxPath;
use std::sync::atomic::{AtomicU32, Ordering};

/// How many connections this process has ended, or directions of them.
static ENDED: AtomicU32 = AtomicU32::new(0);

/// The kernel has ended a connection, or a direction of one, for the program.
pub(crate) fn note() {
    // EDGE ended (protocol T17): the kernel's end comes before the count; acquired in `show`, and carried to the peer by the tail (EDGE
    // tail).
    ENDED.fetch_add(1, Ordering::Release);
}

/// Publishes the count in a ring in which bytes are about to be committed. The caller holds the sending direction.
#[inline]
pub(super) fn show(own: &TxPath) {
    // EDGE ended (protocol T17): acquires from `note`.
    let ended = ENDED.load(Ordering::Acquire);
    if own.ends.load(Ordering::Relaxed) != ended {
        own.ends.store(ended, Ordering::Relaxed);
    }
}
