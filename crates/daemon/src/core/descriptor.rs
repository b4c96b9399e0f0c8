//! The core's interface to a descriptor that a client sent.

use partywall_protocol::wire::Located;
use partywall_shm::layout::Geometry;

/// A descriptor: a clone is another handle on the same one, and it closes when the last is dropped.
pub trait Descriptor: Clone {
    /// Makes a link (protocol L1): the connecting side's end, and the accepting side's.
    ///
    /// # Errors
    /// Why the system refuses, for the one who asked.
    fn link() -> Result<(Self, Self), String>;

    /// Makes a link to another machine (protocol L2), of which a relay has one end or both.
    ///
    /// # Errors
    /// Why the system refuses, for the one who asked.
    fn link_to_machine() -> Result<(Self, Self), String>;

    /// Hangs up a link or a bell that the broker has made, of which no other process has this end. Never waits.
    fn hang_up(&self);

    /// Whether it is a region as far as the broker verifies one (protocol M2.6): sealed, exactly this big, with as much memory. Never waits.
    ///
    /// # Errors
    /// What it is instead, for the one who sent it.
    fn check_region(&self, geometry: Geometry) -> Result<(), String>;

    /// Whether it is memory of which its maker is to make such a region (protocol T4.8): sealed, exactly this big, perhaps not allocated yet.
    ///
    /// # Errors
    /// As [`Self::check_region`].
    fn check_reserved(&self, geometry: Geometry) -> Result<(), String>;

    /// Whether it is memory for a seat in a group (protocol J3.8), likewise.
    ///
    /// # Errors
    /// What it is instead, for the one who sent it.
    fn check_seat(&self, size: u64) -> Result<(), String>;

    /// Makes a bell: an end for each of two parties, which listens to it and rings the other by it.
    ///
    /// # Errors
    /// What the system lacks.
    fn make_bell(&self) -> Result<[Self; 2], String>;

    /// For a region with a ring, in separate memory or at byte `base` of a window: the byte up to which its owner has written, by the owner's own
    /// word.
    fn written(&self, located: Located) -> u64;
}
