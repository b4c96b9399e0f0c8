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
use partywall_shm::layout::{ControlPage, Geometry, HUGE_PAGE};
use partywall_shm::sync::Peer;
use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
use std::ffi::c_void;
use std::hint::black_box;
use std::ptr;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

/// How the pages of a mapping are used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PageUse {
    Read,
    Write,
    /// Written, but not yet: its memory may not be allocated.
    WriteLater,
}

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
        Self::new_at(fd, 0, geometry, writable)
    }

    /// Maps a region that begins at byte `from` of larger memory, a multiple of a page.
    pub(crate) fn new_at(
        fd: BorrowedFd<'_>,
        from: u64,
        geometry: Geometry,
        writable: bool,
    ) -> Result<Self, RegionError> {
        let base = Self::reserve(geometry)?;
        // From here on the mapping is dropped, and so unmapped, when anything fails.
        let this = Self { base, len: sizes(geometry)?.len, geometry, writable };
        let pages = if writable { PageUse::Write } else { PageUse::Read };
        // SAFETY: our own reservation for this geometry, which nothing has pointers into.
        unsafe { Self::place_at(base, fd, from, geometry, pages) }?;
        Ok(this)
    }

    /// Bytes of address space that a region takes.
    pub(crate) fn span(geometry: Geometry) -> u64 {
        geometry.region_size() + geometry.ring_size()
    }

    /// Reserves address space for a region, [`Mapping::span`] bytes of it, that nothing can be read from yet.
    pub(crate) fn reserve(geometry: Geometry) -> Result<*mut u8, RegionError> {
        let Sizes { len, align, .. } = sizes(geometry)?;
        let error = |e| RegionError::system("map shared memory", Self::span(geometry), e);
        // A mapping in huge pages must begin at a multiple of one: reserve more and use the aligned part.
        let reserved = len + align;
        // SAFETY: a fresh reservation that nothing else uses; it overlays nothing.
        let start = unsafe { mmap_anonymous(ptr::null_mut(), reserved, ProtFlags::empty(), MapFlags::PRIVATE) }
            .map_err(error)?;
        let base = start.cast::<u8>().wrapping_add(start.cast::<u8>().align_offset(align));
        let slack = base.addr() - start.addr();
        // SAFETY: head and tail of our own reservation, without pointers into them.
        unsafe {
            if slack > 0 {
                munmap(start, slack).map_err(error)?;
            }
            if reserved - slack - len > 0 {
                munmap(base.wrapping_add(len).cast(), reserved - slack - len).map_err(error)?;
            }
        }
        Ok(base)
    }

    /// Maps a region's memory, from byte `from` of it on, into a reservation.
    ///
    /// # Safety
    /// `base` is the beginning of a reservation for this geometry or a larger one, and nothing that is reached through it is
    /// in use.
    pub(crate) unsafe fn place_at(
        base: *mut u8,
        fd: BorrowedFd<'_>,
        from: u64,
        geometry: Geometry,
        pages: PageUse,
    ) -> Result<(), RegionError> {
        let Sizes { first, ring, .. } = sizes(geometry)?;
        let error = |e| RegionError::system("map shared memory", Self::span(geometry), e);
        let prot = if pages == PageUse::Read { ProtFlags::READ } else { ProtFlags::READ | ProtFlags::WRITE };
        // Populated at once: page faults in the middle of a transfer would cost more, one by one.
        let populate = if pages == PageUse::WriteLater { MapFlags::empty() } else { MapFlags::POPULATE };
        let flags = MapFlags::SHARED | MapFlags::FIXED | populate;
        // SAFETY: fixed mappings inside the caller's reservation (`first + ring` is its length, or less).
        unsafe {
            mmap(base.cast::<c_void>(), first, prot, flags, fd, from).map_err(error)?;
            if ring > 0 {
                mmap(base.wrapping_add(first).cast::<c_void>(), ring, prot, flags, fd, from + geometry.ring_offset())
                    .map_err(error)?;
            }
        }
        if geometry.ring_offset() != HUGE_PAGE {
            return Ok(());
        }
        // The kernel does not report holes of huge pages. A later read of a hole would be a bus error where a limit (cgroup hugetlb) leaves
        // no page for it, and populating above fails silently.
        // SAFETY: pages that were mapped just now; the call only reads them.
        match unsafe { madvise(base.cast::<c_void>(), first, Advice::LinuxPopulateRead) } {
            // Linux 5.14 knows the call.
            Ok(()) | Err(Errno::INVAL) => Ok(()),
            Err(Errno::FAULT) => Err(error(Errno::NOMEM)),
            Err(e) => Err(error(e)),
        }
    }

    /// Maps the pages of a region that was placed by [`PageUse::WriteLater`], once its memory is allocated. Memory that is allocated but was never
    /// mapped counts as a hole (protocol M2.4).
    ///
    /// # Safety
    /// Such a region of this geometry is at `base`.
    pub(crate) unsafe fn populate(base: *mut u8, geometry: Geometry) {
        let Ok(len) = usize::try_from(Self::span(geometry)) else { return };
        // SAFETY: the region's mappings by the caller's contract. The call leaves their content as it is.
        let is_done = unsafe { madvise(base.cast::<c_void>(), len, Advice::LinuxPopulateWrite) }.is_ok();
        if !is_done {
            // The call is of Linux 5.14, and a filter of system calls may forbid it.
            // SAFETY: as above.
            unsafe { Self::touch(base, len) };
        }
    }

    /// Reads a byte of each page, which maps it.
    ///
    /// # Safety
    /// `len` bytes are mapped at `base`, of memory that is allocated.
    unsafe fn touch(base: *mut u8, len: usize) {
        for at in (0..len).step_by(partywall_shm::layout::PAGE as usize) {
            // SAFETY: within the caller's mapping. Relaxed atomic loads may race with any store.
            let byte = unsafe { (*base.add(at).cast::<AtomicU8>()).load(Ordering::Relaxed) };
            // The load is made though nobody uses the byte.
            black_box(byte);
        }
    }

    pub(crate) fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Whether it may be stored to.
    pub(crate) fn is_writable(&self) -> bool {
        self.writable
    }

    /// The control page of this side's region.
    ///
    /// # Safety
    /// The mapping is writable.
    #[inline]
    pub(crate) unsafe fn own_page(&self) -> &ControlPage {
        debug_assert!(self.writable);
        // SAFETY: the first 4096 bytes are mapped as long as `self` lives, page-aligned, and `ControlPage` is `repr(C)`
        // of atomics alone, valid for any bytes. Other processes change them only as atomics may change. Stores go
        // through by the caller's contract.
        unsafe { &*self.base.cast::<ControlPage>() }
    }

    /// The control page, to be loaded from alone: what a mapping that may be read-only allows.
    #[inline]
    pub(crate) fn peer_page(&self) -> &ControlPage<Peer> {
        // SAFETY: as above, but that it need not be writable: `ReadOnly` words, of the same layout as the atomics in
        // them, have no store. Loads are relaxed (see `shm::sync::load_acquire`).
        unsafe { &*self.base.cast::<ControlPage<Peer>>() }
    }

    /// The bytes of the control page, where they are something else.
    pub(crate) fn first_page(&self) -> PeerBytes<'_> {
        // SAFETY: the first page is mapped for as long as `self` is borrowed, and this process holds no references into it
        // but to atomics.
        unsafe { PeerBytes::new(self.base, partywall_shm::layout::PAGE as usize) }
    }

    /// Makes all of it zeros, control page and ring, before anyone else knows of it.
    pub(crate) fn clear(&self) {
        debug_assert!(self.writable);
        for at in (0..self.geometry.region_size() as usize).step_by(size_of::<u64>()) {
            // SAFETY: an aligned word of the mapping, which is writable; relaxed atomic stores may race with any reader.
            unsafe { (*self.base.add(at).cast::<AtomicU64>()).store(0, Ordering::Relaxed) };
        }
    }

    /// Whether what is stored to the first word arrives, where it may also be dropped. It counts the attempts.
    pub(crate) fn takes_stores(&self) -> bool {
        self.takes_stores_at(0)
    }

    /// Like [`Self::takes_stores`], for the word at this byte of the first page, a multiple of 8.
    pub(crate) fn takes_stores_at(&self, byte: usize) -> bool {
        debug_assert!(self.writable);
        assert!(byte.is_multiple_of(8) && byte < partywall_shm::layout::PAGE as usize, "a word of the first page");
        // SAFETY: an aligned word of the first page, which is mapped and writable; atomic accesses may race with anyone's. No
        // read-modify-write: memory that drops stores is emulated, and not every hypervisor emulates those.
        let word = unsafe { &*self.base.add(byte).cast::<AtomicU64>() };
        let before = word.load(Ordering::Relaxed);
        word.store(before.wrapping_add(1), Ordering::SeqCst);
        word.load(Ordering::SeqCst) != before
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

/// A geometry in numbers of this machine.
struct Sizes {
    /// Control page, ring, and ring again.
    len: usize,
    /// Control page and ring.
    first: usize,
    ring: usize,
    align: usize,
}

fn sizes(geometry: Geometry) -> Result<Sizes, RegionError> {
    if !geometry.can_be_ring() {
        return Err(partywall_shm::corrupt::Corrupt::BadRegion.into());
    }
    let size = |n| usize::try_from(n).map_err(|_| RegionError::Geometry(partywall_shm::layout::BadGeometry));
    Ok(Sizes {
        len: size(Mapping::span(geometry))?,
        first: size(geometry.region_size())?,
        ring: size(geometry.ring_size())?,
        align: size(geometry.ring_offset())?.max(4096),
    })
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: exactly what `new` reserved; borrows of `self` have ended, and spans borrow from it.
        // Unmapping what one has mapped fails only for arguments that are not these.
        let _ = unsafe { munmap(self.base.cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memfd;
    use partywall_shm::layout::PAGE;
    use rustix::fd::AsFd as _;
    use rustix::fs::MemfdFlags;

    #[test]
    fn touched_pages_are_no_holes_where_the_kernel_cannot_populate() {
        let geometry = Geometry::new(PAGE, 65536).unwrap();
        let memory = memfd::create_empty(geometry.region_size(), MemfdFlags::empty()).unwrap();
        let base = Mapping::reserve(geometry).unwrap();
        // SAFETY: a reservation for this geometry, which this test alone uses.
        unsafe { Mapping::place_at(base, memory.as_fd(), 0, geometry, PageUse::WriteLater) }.unwrap();
        memfd::seal(memory.as_fd(), geometry.region_size()).unwrap();
        memfd::allocate(memory.as_fd(), geometry.region_size()).unwrap();
        assert!(memfd::verify(memory.as_fd(), geometry).is_err(), "allocated, and never mapped");
        let len = usize::try_from(Mapping::span(geometry)).unwrap();
        // SAFETY: mapped above, and its memory is allocated.
        unsafe { Mapping::touch(base, len) };
        memfd::verify(memory.as_fd(), geometry).unwrap();
        // SAFETY: nothing points there any more.
        unsafe { munmap(base.cast(), len) }.unwrap();
    }
}
