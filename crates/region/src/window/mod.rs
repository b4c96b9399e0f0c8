//! A window as one side sees it: a descriptor, where in it the header is, and how many bytes follow from there.
//!
//! Regions are mapped from it. How a process comes by the descriptor is in [`crate::pmem`] and [`crate::bar`].

mod speed;

use crate::RegionError;
use crate::mapping::Mapping;
use crate::region::{OwnRegion, PeerRegion, RegionOptions};
use partywall_protocol::window::{BLOCK, WindowHeader};
use partywall_shm::corrupt::Corrupt;
use partywall_shm::layout::{Geometry, PAGE, RegionKind};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};

pub use speed::UNCACHED;

/// A window that can be mapped.
#[derive(Debug)]
pub struct Window {
    fd: OwnedFd,
    /// Where in `fd` the header is.
    from: u64,
    /// From there to the end.
    size: u64,
}

impl Window {
    /// The maker has made sure of the size, and that it cannot become less while anything is mapped.
    pub(crate) fn new(fd: OwnedFd, from: u64, size: u64) -> Self {
        Self { fd, from, size }
    }

    /// Bytes from the header's first to the last.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Descriptor, where in it the header is, and bytes from there on.
    pub(crate) fn parts(&self) -> (BorrowedFd<'_>, u64, u64) {
        (self.fd.as_fd(), self.from, self.size)
    }

    /// The header as it is now. Only the window's owner can write it, so it is as trustworthy as the owner.
    pub fn header(&self) -> Result<Option<WindowHeader>, RegionError> {
        Ok(WindowHeader::decode(&self.first_bytes()?))
    }

    /// The current content of its first page.
    pub(crate) fn first_bytes(&self) -> Result<[u8; BLOCK], RegionError> {
        let map = self.first_page()?;
        let mut block = [0; BLOCK];
        map.first_page().copy_to(&mut block);
        Ok(block)
    }

    /// The header's page, to be written. The descriptor allows that.
    pub(crate) fn first_page_writable(&self) -> Result<Mapping, RegionError> {
        Mapping::new_at(self.fd.as_fd(), self.from, page()?, true)
    }

    /// The header's page. It holds no ring, so it looks like a region without one.
    fn first_page(&self) -> Result<Mapping, RegionError> {
        Mapping::new_at(self.fd.as_fd(), self.from, page()?, false)
    }

    /// Attaches a region that the peer has carved out at `base`: verifies, maps read-only and checks it (protocol V4).
    pub fn attach(&self, base: u64, kind: RegionKind, geometry: Geometry) -> Result<PeerRegion, RegionError> {
        let map = self.map(base, geometry, false)?;
        let flags = map.peer_page().header.check(kind, geometry)?;
        Ok(PeerRegion::of(map, flags))
    }

    /// Makes a region at `base`, as [`OwnRegion::create`] makes one in new memory. The place must belong to this process alone.
    pub fn create(&self, base: u64, options: &RegionOptions) -> Result<OwnRegion, RegionError> {
        let map = self.map(base, options.geometry()?, true)?;
        // The content of an earlier region must not reach the next one's peer.
        map.clear();
        // No `ASYMMETRIC`: a membarrier of this kernel does not reach the peer, which has another kernel (protocol V5).
        Ok(OwnRegion::establish(map, options, options.header_flags()))
    }

    /// Maps a region at `base`, which must be where regions can be.
    pub(crate) fn map(&self, base: u64, geometry: Geometry, writable: bool) -> Result<Mapping, RegionError> {
        Mapping::new_at(self.fd.as_fd(), self.place(base, geometry)?, geometry, writable)
    }

    /// Where in the descriptor the region at `base` begins. It must be where regions can be: behind the header, whole, on a page.
    pub(crate) fn place(&self, base: u64, geometry: Geometry) -> Result<u64, RegionError> {
        let end = base.checked_add(geometry.region_size());
        if base < PAGE || !base.is_multiple_of(PAGE) || end.is_none_or(|end| end > self.size) {
            return Err(Corrupt::BadRegion.into());
        }
        if geometry.ring_offset() != PAGE {
            // Memory of a window is of whatever pages the host has given it.
            return Err(Corrupt::BadRegion.into());
        }
        Ok(self.from + base)
    }
}

impl AsFd for Window {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn page() -> Result<Geometry, RegionError> {
    Ok(Geometry::new(PAGE, 0)?)
}
