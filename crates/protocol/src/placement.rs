//! Where a region lies, as messages say it (protocol C3, G3).

use partywall_shm::layout::{BadGeometry, Geometry, HUGE_PAGE, PAGE};

/// Where a region lies, by what a message says of it (protocol G3): `ring_offset` is where in the memory the ring begins.
///
/// In a memory that has nothing else it is one of two values, and the region begins at 0. Anything else is in a window, with the control
/// page right before the ring.
pub fn placed(ring_offset: u64, ring_size: u64) -> Result<(u64, Geometry), BadGeometry> {
    if ring_offset == PAGE || ring_offset == HUGE_PAGE {
        return Ok((0, Geometry::new(ring_offset, ring_size)?));
    }
    if ring_offset < PAGE || !ring_offset.is_multiple_of(PAGE) {
        return Err(BadGeometry);
    }
    Ok((ring_offset - PAGE, Geometry::new(PAGE, ring_size)?))
}

/// The `ring_offset` that says that a region begins at byte `base` of a window, or, if that is 0, of a memory that has nothing else.
pub fn ring_offset(base: u64, geometry: Geometry) -> u64 {
    base + geometry.ring_offset()
}
