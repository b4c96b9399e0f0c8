//! Regions: one's own, writable, and a peer's, read-only.
#![expect(unsafe_code, reason = "hands out what is writable of this side's region")]

use crate::mapping::Mapping;
use crate::{RegionError, membarrier, memfd};
use partywall_shm::bytes::{OwnBytes, PeerBytes};
use partywall_shm::layout::{ControlPage, Geometry, HUGE_PAGE, PAGE, RegionKind};
use partywall_shm::sync::Peer;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// The properties of a new region.
#[derive(Debug, Clone, Copy)]
pub struct RegionOptions {
    /// The purpose of the region.
    pub kind: RegionKind,
    /// Bytes of ring: 0, or a power of two from 4096 to 2^30.
    pub ring_size: u64,
    /// Take huge pages (which the operator must have reserved); the ring is then at least 2 MiB.
    pub huge_pages: bool,
    /// Leave out `ASYMMETRIC` (protocol W4): both sides fence whenever they move a cursor, and a sleeper interrupts no other core.
    pub symmetric: bool,
    /// Further header flags.
    pub flags: u32,
    /// The owner domain's epoch, for people to read.
    pub epoch: u64,
}

impl RegionOptions {
    /// An ordinary endpoint.
    pub const fn endpoint(ring_size: u64) -> Self {
        Self { kind: RegionKind::Endpoint, ring_size, huge_pages: false, symmetric: false, flags: 0, epoch: 0 }
    }

    pub(crate) fn geometry(&self) -> Result<Geometry, RegionError> {
        let offset = if self.huge_pages { HUGE_PAGE } else { PAGE };
        Ok(Geometry::new(offset, self.ring_size)?)
    }

    /// The header flags that were asked for.
    pub(crate) fn header_flags(&self) -> u32 {
        let huge = if self.huge_pages { partywall_shm::layout::flags::HUGE_PAGES } else { 0 };
        self.flags | huge
    }
}

/// This side's region: mapped writable, sealed against any other writer.
///
/// Handles to it (the two halves of a channel) share the mapping by [`Arc`]; each writes only its own half's lines.
#[derive(Debug)]
pub struct OwnRegion {
    map: Arc<Mapping>,
    flags: u32,
}

impl OwnRegion {
    /// Makes a region: created, wholly allocated, mapped, its header written, and sealed, in that order (protocol M1).
    ///
    /// The descriptor is for handing to the peer; the region itself does not need it.
    pub fn create(options: &RegionOptions) -> Result<(Self, OwnedFd), RegionError> {
        let geometry = options.geometry()?;
        let fd = memfd::create(geometry)?;
        let map = Mapping::new(fd.as_fd(), geometry, true)?;
        let fencing = if options.symmetric { 0 } else { membarrier::register() };
        let flags = options.header_flags() | fencing;
        let this = Self::establish(map, options, flags);
        memfd::seal(fd.as_fd(), geometry.region_size())?;
        Ok((this, fd))
    }

    /// Makes a region of zeroed memory that is not shared yet: its control page and, last, its header.
    ///
    /// # Panics
    /// If the mapping is read-only.
    pub(crate) fn establish(map: Mapping, options: &RegionOptions, flags: u32) -> Self {
        assert!(map.is_writable(), "this side's region is mapped writable");
        let this = Self { map: Arc::new(map), flags };
        let (page, geometry) = (this.page(), this.geometry());
        page.awaken(geometry);
        let pid = u32::try_from(rustix::process::getpid().as_raw_nonzero().get()).unwrap_or(0);
        page.header.write(options.kind, geometry, flags, pid, options.epoch);
        this
    }

    /// The place and size of the ring in the region.
    pub fn geometry(&self) -> Geometry {
        self.map.geometry()
    }

    /// Its header flags.
    pub fn flags(&self) -> u32 {
        self.flags
    }

    /// Its control page.
    pub fn page(&self) -> &ControlPage {
        // SAFETY: `establish`, where all regions of this type come from, has seen that it is writable.
        unsafe { self.map.own_page() }
    }

    /// Another handle to the same region's control page, for the other half of a channel.
    pub fn handle(&self) -> RegionHandle {
        RegionHandle { map: Arc::clone(&self.map) }
    }

    /// `len` bytes of ring to write, from byte `position` of the stream on; at most the ring's size.
    #[inline]
    pub fn span(&mut self, position: u64, len: u64) -> OwnBytes<'_> {
        // SAFETY: our mapping is writable. Spans of a ring come only from here, and `&mut self` lets one exist at a time:
        // there is one `OwnRegion` per mapping (handles give the control page alone, the double's peers copy out only).
        unsafe { self.map.own_span(position, len) }
    }

    /// The view that a peer would have of this region, within the process: for the in-process double.
    pub(crate) fn peek_at_self(&self) -> PeerRegion {
        PeerRegion { map: Arc::clone(&self.map), flags: self.flags }
    }
}

/// The control page of this side's region, kept mapped.
#[derive(Debug, Clone)]
pub struct RegionHandle {
    map: Arc<Mapping>,
}

impl RegionHandle {
    /// The control page of the region.
    #[inline]
    pub fn page(&self) -> &ControlPage {
        // SAFETY: handles are made by `OwnRegion`, whose mapping is writable.
        unsafe { self.map.own_page() }
    }
}

/// A peer's region, mapped read-only. Its memory stays valid until this is dropped, whatever becomes of the peer.
#[derive(Debug, Clone)]
pub struct PeerRegion {
    map: Arc<Mapping>,
    flags: u32,
}

impl PeerRegion {
    /// Verifies, maps and checks a region that a peer made (protocol M2, M6). The descriptor is not needed afterwards.
    pub fn attach(fd: BorrowedFd<'_>, kind: RegionKind, geometry: Geometry) -> Result<Self, RegionError> {
        memfd::verify(fd, geometry)?;
        let map = Mapping::new(fd, geometry, false)?;
        let flags = map.peer_page().header.check(kind, geometry)?;
        Ok(Self { map: Arc::new(map), flags })
    }

    /// A region whose memory was verified in another way; its header has been checked.
    pub(crate) fn of(map: Mapping, flags: u32) -> Self {
        Self { map: Arc::new(map), flags }
    }

    /// Its shape, as told and verified at attach.
    pub fn geometry(&self) -> Geometry {
        self.map.geometry()
    }

    /// Its header flags, as read at attach.
    pub fn flags(&self) -> u32 {
        self.flags
    }

    /// Its control page; every value in it is hostile. Its words can be loaded, which is all that can be done:
    ///
    /// ```
    /// # use std::sync::atomic::Ordering::Relaxed;
    /// fn tail(peer: &partywall_region::PeerRegion) -> u64 {
    ///     peer.page().tx.cursor.tail.load(Relaxed)
    /// }
    /// fn set_tail(own: &partywall_region::OwnRegion, tail: u64) {
    ///     own.page().tx.cursor.tail.store(tail, Relaxed)
    /// }
    /// ```
    /// ```compile_fail,E0599
    /// # use std::sync::atomic::Ordering::Relaxed;
    /// fn set_tail(peer: &partywall_region::PeerRegion, tail: u64) {
    ///     peer.page().tx.cursor.tail.store(tail, Relaxed)
    /// }
    /// ```
    #[inline]
    pub fn page(&self) -> &ControlPage<Peer> {
        self.map.peer_page()
    }

    /// `len` bytes of ring to read, from byte `position` of the stream on; at most the ring's size.
    #[inline]
    pub fn span(&self, position: u64, len: u64) -> PeerBytes<'_> {
        self.map.peer_span(position, len)
    }
}
