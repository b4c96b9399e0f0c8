//! The proof of what a client says of a region.

use partywall_protocol::wire::{Located, Refusal, RegionReference};
use partywall_shm::layout::Geometry;

use super::Descriptor;
use super::refuse::{Refuse, refuse};

/// Proves that there can be such a region, which may be in a window, or refuses it.
pub(super) fn located(region: RegionReference) -> Result<(Located, Geometry), Refuse> {
    region.check().or_else(|e| refuse(Refusal::BadRegion, e.to_string()))
}

/// Proves that there can be such a further region, which may be in a window, or refuses it.
pub(super) fn located_further(region: RegionReference) -> Result<(Located, Geometry), Refuse> {
    region.check_further().or_else(|e| refuse(Refusal::BadRegion, e.to_string()))
}

/// Proves that the memory can become a region of this shape, or refuses it.
pub(super) fn check_reserved<F: Descriptor>(memory: &F, geometry: Geometry) -> Result<(), Refuse> {
    memory.check_reserved(geometry).or_else(|e| refuse(Refusal::BadRegion, e))
}

/// Proves that the memory is of this shape and allocated, as far as the broker can (protocol M2.6), or refuses it.
pub(super) fn check_region<F: Descriptor>(region: &F, geometry: Geometry) -> Result<(), Refuse> {
    region.check_region(geometry).or_else(|e| refuse(Refusal::BadRegion, e))
}
