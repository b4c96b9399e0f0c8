//! The events that a link delivers.

use partywall_shm::corrupt::Corrupt;
use partywall_shm::layout::Geometry;
use rustix::fd::OwnedFd;

/// One event of a link.
#[derive(Debug)]
pub enum LinkEvent {
    /// Look again.
    Bell,
    /// The peer's memory.
    Attach {
        /// The generation of the peer's ring.
        generation: u32,
        /// Its shape as the peer says.
        geometry: Geometry,
        /// The byte of the stream that the receiver begins at: 0, except for broadcast.
        start: u64,
        /// Where the region begins in its memory: 0, or a place in a window (protocol V4).
        base: u64,
        /// Its memory, not yet verified.
        memory: OwnedFd,
    },
    /// The publisher lets this subscriber go because it is too slow (protocol B2); the hang-up follows.
    Dropped,
    /// The peer's half is gone. Its state word says whether in order.
    HungUp,
    /// No event up to the deadline.
    TimedOut,
    /// The peer broke the protocol.
    Corrupt(Corrupt),
}
