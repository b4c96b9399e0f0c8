//! The memory that one side of a channel writes: a separate memfd, or, for a peer on another machine, a place in the window to it.

use crate::Result;
use crate::options::Options;
use partywall_protocol::wire::{Directions, Side};
use partywall_region::{OwnRegion, RegionOptions, pmem};
use partywall_shm::layout::PAGE;
use rustix::fd::{AsFd, OwnedFd};

/// A place in a window for this side's region (protocol G4).
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) memory: OwnedFd,
    pub(crate) base: u64,
}

/// The direction that a side writes.
pub(crate) fn writes(side: Side) -> Directions {
    match side {
        Side::Connecting => Directions::FORWARD,
        Side::Accepting => Directions::REVERSE,
    }
}

/// Makes the endpoint region of a side. The region of a side that does not write has no ring.
pub(crate) fn endpoint(
    side: Side,
    directions: Directions,
    options: &Options,
    ring: u64,
    epoch: u64,
) -> Result<(OwnRegion, OwnedFd)> {
    let ring_size = if directions.contains(writes(side)) { ring } else { 0 };
    let (huge_pages, symmetric) = (options.huge_pages, options.sleeps_often);
    let options = RegionOptions { huge_pages, symmetric, epoch, ..RegionOptions::endpoint(ring_size) };
    Ok(OwnRegion::create(&options)?)
}

/// The largest initial size of a ring in a window. A ring so small that it is slow while both sides wait for each other by way of the
/// host would never be measured as worth growing.
const WINDOW_RING: u64 = 1 << 20;

/// Smallest and largest size of a ring in a window, where those are its sizes elsewhere.
pub(crate) fn window_ring(ring: (u64, u64)) -> (u64, u64) {
    (ring.1.min(WINDOW_RING).max(ring.0), ring.1)
}

/// Bytes of the region that a side needs.
pub(crate) fn region_size(side: Side, directions: Directions, ring: u64) -> u64 {
    PAGE + if directions.contains(writes(side)) { ring } else { 0 }
}

/// Makes a ring to go on in, or a further region, in a window.
pub(crate) fn extension_at(place: &Place, options: &RegionOptions) -> Result<OwnRegion> {
    Ok(pmem::received(place.memory.as_fd())?.create(place.base, options)?)
}

/// Makes the endpoint region of a side in a window.
pub(crate) fn endpoint_at(
    place: &Place,
    side: Side,
    directions: Directions,
    ring: u64,
    epoch: u64,
) -> Result<OwnRegion> {
    let ring_size = if directions.contains(writes(side)) { ring } else { 0 };
    let options = RegionOptions { epoch, ..RegionOptions::endpoint(ring_size) };
    Ok(pmem::received(place.memory.as_fd())?.create(place.base, &options)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use partywall_region::membarrier;
    use partywall_shm::layout::flags::ASYMMETRIC;

    #[test]
    fn region_of_side_that_sleeps_often_asks_for_fences() {
        let flags = |options: &Options| {
            endpoint(Side::Connecting, Directions::BOTH, options, PAGE, 1).unwrap().0.flags() & ASYMMETRIC
        };
        assert_eq!(flags(&Options::default()), membarrier::register());
        assert_eq!(flags(&Options::default().sleeps_often(true)), 0);
    }
}
