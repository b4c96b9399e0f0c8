//! Mappings of regions: the whole region once, and its ring a second time behind the first.
//!
//! ```text
//!   | control page | ring bytes        | the same ring bytes again |
//!   base           base+ring_offset    base+ring_offset+ring_size
//! ```
//!
//! Any span of up to `ring_size` bytes is then contiguous, wherever in the ring it starts.
#![expect(unsafe_code, reason = "maps shared memory and hands out pointers into it")]

use crate::RegionError;
use partywall_shm::bytes::{OwnBytes, PeerBytes};
use partywall_shm::layout::{ControlPage, Geometry};
use rustix::fd::BorrowedFd;
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};
use std::ffi::c_void;
use std::ptr;

/// A mapped region, unmapped on drop.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: *mut u8,
    len: usize,
    geometry: Geometry,
    writable: bool,
}

// SAFETY: the mapping belongs to the process, not to a thread; unmapping from another thread is fine. What is reached
// through it is atomics (the control page), or spans whose exclusiveness their own contracts regulate.
unsafe impl Send for Mapping {}
// SAFETY: as above; `&Mapping` gives shared access to atomics only, and its span methods are unsafe or read-only copies.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `fd`, which must have been made by us or verified, so that it has the geometry's size and cannot shrink.
    pub(crate) fn new(fd: BorrowedFd<'_>, geometry: Geometry, writable: bool) -> Result<Self, RegionError> {
        let whole = geometry.region_size();
        let total = whole + geometry.ring_size();
        let (len, first, ring, offset) = match (
            usize::try_from(total),
            usize::try_from(whole),
            usize::try_from(geometry.ring_size()),
            usize::try_from(geometry.ring_offset()),
        ) {
            (Ok(len), Ok(first), Ok(ring), Ok(offset)) => (len, first, ring, offset),
            _ => return Err(RegionError::Geometry(partywall_shm::layout::BadGeometry)),
        };
        let error = |e| RegionError::system("map shared memory", total, e);
        // A mapping in huge pages must begin at a multiple of one: reserve more and use the aligned part.
        let align = offset.max(4096);
        let reserved = len + align;
        // SAFETY: a fresh reservation that nothing else uses; it overlays nothing.
        let start = unsafe { mmap_anonymous(ptr::null_mut(), reserved, ProtFlags::empty(), MapFlags::PRIVATE) }
            .map_err(error)?;
        let base = start.cast::<u8>().wrapping_add(start.cast::<u8>().align_offset(align));
        let slack = base.addr() - start.addr();
        // From here on the mapping is dropped, and so unmapped, when anything fails.
        // SAFETY: head and tail of our own reservation, which nobody has a pointer to.
        unsafe {
            if slack > 0 {
                munmap(start, slack).map_err(error)?;
            }
            if reserved - slack - len > 0 {
                munmap(base.wrapping_add(len).cast(), reserved - slack - len).map_err(error)?;
            }
        }
        let this = Self { base, len, geometry, writable };
        let prot = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        // Populated at once: page faults in the middle of a transfer would cost more, one by one.
        let flags = MapFlags::SHARED | MapFlags::FIXED | MapFlags::POPULATE;
        // SAFETY: fixed mappings inside our own reservation (`first + ring == len`), which nothing has pointers into.
        unsafe {
            mmap(base.cast::<c_void>(), first, prot, flags, fd, 0).map_err(error)?;
            if ring > 0 {
                mmap(base.wrapping_add(first).cast::<c_void>(), ring, prot, flags, fd, geometry.ring_offset())
                    .map_err(error)?;
            }
        }
        Ok(this)
    }

    pub(crate) fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// The control page. All its fields are atomics, of which peers' are only ever loaded, relaxed.
    pub(crate) fn page(&self) -> &ControlPage {
        // SAFETY: the first 4096 bytes are mapped as long as `self` lives, page-aligned, and `ControlPage` is `repr(C)`
        // of atomics alone, valid for any bytes. Other processes change them only as atomics may change. A read-only
        // mapping is only loaded from, relaxed (see `shm::sync::load_acquire`): stores go through `OwnRegion` alone,
        // whose mapping is writable.
        unsafe { &*self.base.cast::<ControlPage>() }
    }

    /// The address of byte `position` of the stream, from where a whole ring's length is mapped contiguously.
    #[inline]
    fn at(&self, position: u64) -> *mut u8 {
        // `ring_size` is a power of two (or 0, when the mask makes any position 0 and the length below is 0 too).
        let mask = self.geometry.ring_size().wrapping_sub(1);
        let offset = if self.geometry.ring_size() == 0 { 0 } else { position & mask };
        self.base.wrapping_add((self.geometry.ring_offset() + offset) as usize)
    }

    /// `len` bytes to read from `position` on; at most the ring's size.
    #[inline]
    pub(crate) fn peer_span(&self, position: u64, len: u64) -> PeerBytes<'_> {
        let len = len.min(self.geometry.ring_size()) as usize;
        // SAFETY: `at` is below `ring_offset + ring_size`, and `ring_size` further bytes are mapped from there by the double
        // mapping, for as long as `self` is borrowed. This process holds no references into a peer's ring.
        unsafe { PeerBytes::new(self.at(position), len) }
    }

    /// `len` bytes to write from `position` on; at most the ring's size.
    ///
    /// # Safety
    /// The mapping is writable, and no other span that overlaps this one exists meanwhile in this process.
    #[inline]
    pub(crate) unsafe fn own_span(&self, position: u64, len: u64) -> OwnBytes<'_> {
        debug_assert!(self.writable);
        let len = len.min(self.geometry.ring_size()) as usize;
        // SAFETY: mapped for that long as above; writable and exclusive by the caller's contract.
        unsafe { OwnBytes::new(self.at(position), len) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: exactly what `new` reserved; borrows of `self` have ended, and spans borrow from it.
        // Unmapping what one has mapped fails only for arguments that are not these.
        let _ = unsafe { munmap(self.base.cast(), self.len) };
    }
}
