//! Segments of heaps: a further region whose content both sides map once, at the same address where that is free.
//!
//! ```text
//!   | control page | content ...                |
//!   base           base + ring_offset           base + ring_offset + ring_size
//! ```
//! The content is not a ring, so it is not mapped a second time behind the first. `address` below is that of the content.
#![expect(unsafe_code, reason = "maps shared memory at given addresses, and hands out pointers into it")]

use crate::{RegionError, membarrier, memfd, pmem};
use partywall_shm::bytes::PeerBytes;
use partywall_shm::corrupt::Corrupt;
use partywall_shm::layout::{ControlPage, Geometry, HUGE_PAGE, PAGE, RegionKind, flags};
use partywall_shm::state::TxState;
use partywall_shm::sync::Peer;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, MlockFlags, ProtFlags, madvise, mlock_with, mmap, mmap_anonymous, munmap};
use std::ptr;

/// Where heaps are mapped (protocol K6). Nothing else of Partywall is there.
pub const HEAP_ADDRESSES: std::ops::Range<u64> = 0x3000_0000_0000..0x5000_0000_0000;

/// A mapping of a segment, unmapped on drop.
#[derive(Debug)]
struct SegmentMapping {
    base: *mut u8,
    len: usize,
    geometry: Geometry,
}

// SAFETY: the mapping belongs to the process, not to a thread. What is reached through it is atomic words, copies, or memory whose exclusive
// use its owner's allocator regulates.
unsafe impl Send for SegmentMapping {}
// SAFETY: as above.
unsafe impl Sync for SegmentMapping {}

impl SegmentMapping {
    /// Maps a segment from byte `from` of `fd` on, which this process has made or verified. `address`: where the content is to be; `None`:
    /// anywhere. Its pages are mapped at once.
    fn new(
        (fd, from): (BorrowedFd<'_>, u64),
        geometry: Geometry,
        writable: bool,
        address: Option<u64>,
    ) -> Result<Self, RegionError> {
        Self::with_flags((fd, from), geometry, writable, address, MapFlags::POPULATE)
    }

    /// The same with other flags of the mapping: without [`MapFlags::POPULATE`], a page is mapped when it is used first.
    fn with_flags(
        (fd, from): (BorrowedFd<'_>, u64),
        geometry: Geometry,
        writable: bool,
        address: Option<u64>,
        flags: MapFlags,
    ) -> Result<Self, RegionError> {
        let size = geometry.region_size();
        let error = |e| RegionError::system("map a segment of a heap", size, e);
        let len = usize::try_from(size).map_err(|_| error(Errno::NOMEM))?;
        let base = match address {
            Some(address) => reserve_at(address, geometry, len)?,
            None => reserve(geometry, len)?,
        };
        let prot = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        let flags = MapFlags::SHARED | MapFlags::FIXED | flags;
        // If this fails, the kernel may have removed the reservation already, and another thread may have mapped something there. So it is
        // left alone.
        // SAFETY: a fixed mapping over all of the reservation that was made just now, which nothing has pointers into.
        unsafe { mmap(base.cast(), len, prot, flags, fd, from) }.map_err(error)?;
        // From here on it is dropped, and so unmapped, when anything fails.
        let this = Self { base, len, geometry };
        if geometry.ring_offset() == HUGE_PAGE {
            // The kernel does not report holes of huge pages, and a later read of a hole would be a bus error.
            // SAFETY: pages that were mapped just now; the call only reads them.
            match unsafe { madvise(base.cast(), len, Advice::LinuxPopulateRead) } {
                Ok(()) | Err(Errno::INVAL) => {}
                Err(Errno::FAULT) => return Err(error(Errno::NOMEM)),
                Err(e) => return Err(error(e)),
            }
        }
        Ok(this)
    }

    fn content(&self) -> *mut u8 {
        self.base.wrapping_add(self.geometry.ring_offset() as usize)
    }
}

impl Drop for SegmentMapping {
    fn drop(&mut self) {
        // SAFETY: exactly what was reserved; pointers into it have ended, which the users of `OwnSegment` and `PeerSegment` see to.
        let _ = unsafe { munmap(self.base.cast(), self.len) };
    }
}

/// Reserves addresses so that the content begins at `address`, where nothing else is mapped.
fn reserve_at(address: u64, geometry: Geometry, len: usize) -> Result<*mut u8, RegionError> {
    let base = address.wrapping_sub(geometry.ring_offset());
    let align = geometry.ring_offset().max(PAGE);
    let end = base.checked_add(len as u64).ok_or(Corrupt::BadRegion)?;
    if base < HEAP_ADDRESSES.start || end > HEAP_ADDRESSES.end || !base.is_multiple_of(align) {
        return Err(Corrupt::BadRegion.into());
    }
    let wanted = usize::try_from(base).map_err(|_| Corrupt::BadRegion)?;
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED_NOREPLACE;
    // SAFETY: the flags let it succeed only where nothing is mapped, so it overlays nothing.
    match unsafe { mmap_anonymous(ptr::without_provenance_mut(wanted), len, ProtFlags::empty(), flags) } {
        Ok(got) if got.addr() == wanted => Ok(got.cast()),
        Ok(elsewhere) => {
            // Kernels before 4.17 take the address for a hint.
            // SAFETY: what was mapped just now, and nothing uses.
            let _ = unsafe { munmap(elsewhere, len) };
            Err(RegionError::HeapAddress { address, user: user_of(base..end) })
        }
        Err(Errno::EXIST) => Err(RegionError::HeapAddress { address, user: user_of(base..end) }),
        Err(e) => Err(RegionError::system("reserve the addresses of a heap", len as u64, e)),
    }
}

/// Reserves addresses anywhere, aligned as the pages are.
fn reserve(geometry: Geometry, len: usize) -> Result<*mut u8, RegionError> {
    let error = |e| RegionError::system("reserve the addresses of a heap", len as u64, e);
    let align = usize::try_from(geometry.ring_offset().max(PAGE)).map_err(|_| Corrupt::BadRegion)?;
    let reserved = len + align;
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: a fresh reservation that overlays nothing.
    let start = unsafe { mmap_anonymous(ptr::null_mut(), reserved, ProtFlags::empty(), flags) }.map_err(error)?;
    let base = start.cast::<u8>().wrapping_add(start.cast::<u8>().align_offset(align));
    let slack = base.addr() - start.addr();
    // SAFETY: head and tail of this function's own reservation, without pointers into them.
    unsafe {
        if slack > 0 {
            munmap(start, slack).map_err(error)?;
        }
        if align > slack {
            munmap(base.wrapping_add(len).cast(), align - slack).map_err(error)?;
        }
    }
    Ok(base)
}

/// The mapping of this process in a range of addresses, as the kernel names it.
fn user_of(range: std::ops::Range<u64>) -> String {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let found = maps.lines().find(|line| {
        let bounds = line.split(' ').next().and_then(|bounds| bounds.split_once('-'));
        let parsed = bounds
            .and_then(|(from, to)| Some((u64::from_str_radix(from, 16).ok()?, u64::from_str_radix(to, 16).ok()?)));
        parsed.is_some_and(|(from, to)| from < range.end && to > range.start)
    });
    let name = |line: &str| {
        let mut words = line.split_whitespace();
        let bounds = words.next().unwrap_or_default().to_owned();
        format!("{} ({bounds})", words.nth(4).unwrap_or("anonymous memory"))
    };
    found.map_or_else(|| "a mapping that has gone meanwhile".to_owned(), name)
}

/// How a segment in separate memory is made.
#[derive(Debug, Clone, Copy, Default)]
pub struct SegmentOptions {
    /// Take huge pages, which the operator must have reserved.
    pub huge_pages: bool,
    /// Keep the memory from being swapped out.
    pub locked: bool,
    /// Where the content is to be; `None`: anywhere.
    pub address: Option<u64>,
}

/// A segment of this side's heap. Only this process writes it.
#[derive(Debug)]
pub struct OwnSegment {
    map: SegmentMapping,
}

impl OwnSegment {
    /// Makes a segment with `size` bytes of content, a number of whole pages: created, wholly allocated, mapped, its header written, and
    /// sealed, in that order (protocol M1). The descriptor is for the peer.
    ///
    /// # Errors
    /// [`RegionError::HeapAddress`] if something else is at that address, or the system's.
    pub fn create(size: u64, options: SegmentOptions) -> Result<(Self, OwnedFd), RegionError> {
        let SegmentOptions { huge_pages, locked, address } = options;
        let geometry = Geometry::of_content(if huge_pages { HUGE_PAGE } else { PAGE }, size)?;
        let fd = memfd::create(geometry)?;
        // Locking maps the pages as well, and takes as long for pages that are mapped already.
        let populate = if locked { MapFlags::empty() } else { MapFlags::POPULATE };
        let this = Self { map: SegmentMapping::with_flags((fd.as_fd(), 0), geometry, true, address, populate)? };
        if locked {
            this.lock()?;
        }
        this.establish(membarrier::register() | if huge_pages { flags::HUGE_PAGES } else { 0 });
        memfd::seal(fd.as_fd(), geometry.region_size())?;
        Ok((this, fd))
    }

    /// Makes a segment at byte `base` of a window, for a peer on another machine. The broker gave that place to this process alone.
    ///
    /// # Errors
    /// As [`OwnSegment::create`]; [`RegionError::Corrupt`] if the window has no room for the segment there.
    pub fn create_in(window: BorrowedFd<'_>, base: u64, size: u64, address: Option<u64>) -> Result<Self, RegionError> {
        let geometry = Geometry::new(PAGE, size)?;
        let window = pmem::received(window)?;
        let from = window.place(base, geometry)?;
        let this = Self { map: SegmentMapping::new((window.as_fd(), from), geometry, true, address)? };
        // The content of an earlier region must not reach the next one's peer (protocol V4.3).
        // SAFETY: mapped writable just now, this long, and without pointers into it. Peers only read.
        unsafe { this.map.base.write_bytes(0, this.map.len) };
        this.establish(0);
        Ok(this)
    }

    /// Writes the control page of a new segment of zeros and, last, its header.
    fn establish(&self, flags: u32) {
        let (page, geometry) = (self.page(), self.geometry());
        page.awaken(geometry);
        let pid = u32::try_from(rustix::process::getpid().as_raw_nonzero().get()).unwrap_or(0);
        page.header.write(RegionKind::Further, geometry, flags, pid, 0);
    }

    fn page(&self) -> &ControlPage {
        // SAFETY: the first 4096 bytes are mapped writable as long as `self` lives, page-aligned, and of atomic words alone.
        unsafe { &*self.map.base.cast::<ControlPage>() }
    }

    /// The shape of the segment.
    pub fn geometry(&self) -> Geometry {
        self.map.geometry
    }

    /// Where its content begins. `geometry().ring_size()` bytes are mapped writable from there for as long as this lives.
    pub fn content(&self) -> *mut u8 {
        self.map.content()
    }

    /// Keeps its memory from being swapped out.
    ///
    /// # Errors
    /// The process's limit of locked memory (`ulimit -l`) is too small, or the system's.
    pub fn lock(&self) -> Result<(), RegionError> {
        let flags = MlockFlags::empty();
        // SAFETY: this value's own mapping; locking changes no content.
        unsafe { mlock_with(self.map.base.cast(), self.map.len, flags) }
            .map_err(|e| RegionError::system("lock a segment of a heap", self.map.len as u64, e))
    }

    /// Marks the segment as given up (protocol F5).
    pub fn give_up(&self) {
        TxState::Finished.store(&self.page().tx.control.state);
    }
}

/// A segment of a peer's heap, mapped read-only. Its memory stays valid until this is dropped, whatever becomes of the peer.
#[derive(Debug)]
pub struct PeerSegment {
    map: SegmentMapping,
}

impl PeerSegment {
    /// Verifies, maps and checks a segment that a peer made (protocol M2, M6). `address`: where its content is to be; `None`: anywhere.
    ///
    /// # Errors
    /// [`RegionError::HeapAddress`] if this process has something else at that address; [`RegionError::Corrupt`] if the address is none of
    /// [`HEAP_ADDRESSES`], or the memory is not what it should be.
    pub fn attach(fd: BorrowedFd<'_>, geometry: Geometry, address: Option<u64>) -> Result<Self, RegionError> {
        memfd::verify(fd, geometry)?;
        Self::check(SegmentMapping::new((fd, 0), geometry, false, address)?)
    }

    /// The same for a segment at byte `base` of a window that this machine reads (protocol V4).
    ///
    /// # Errors
    /// As [`PeerSegment::attach`].
    pub fn attach_in(
        window: BorrowedFd<'_>,
        base: u64,
        geometry: Geometry,
        address: Option<u64>,
    ) -> Result<Self, RegionError> {
        let window = pmem::received(window)?;
        let from = window.place(base, geometry)?;
        Self::check(SegmentMapping::new((window.as_fd(), from), geometry, false, address)?)
    }

    fn check(map: SegmentMapping) -> Result<Self, RegionError> {
        // SAFETY: the first 4096 bytes are mapped readable as long as `map` lives; words that can only be loaded.
        let page = unsafe { &*map.base.cast::<ControlPage<Peer>>() };
        page.header.check(RegionKind::Further, map.geometry)?;
        Ok(Self { map })
    }

    /// Bytes of its content.
    pub fn size(&self) -> u64 {
        self.map.geometry.ring_size()
    }

    /// Where its content begins in this process.
    pub fn address(&self) -> u64 {
        self.map.content().addr() as u64
    }

    /// `len` bytes from byte `at` of the content on; `None` if they are not all within it.
    #[inline]
    pub fn bytes(&self, at: u64, len: u64) -> Option<PeerBytes<'_>> {
        if at.checked_add(len).is_none_or(|end| end > self.size()) {
            return None;
        }
        // SAFETY: `at + len` is within the content, which is mapped readable as long as `self` lives. This process holds no references into
        // it, except those whose maker has promised that the peer leaves the bytes alone.
        Some(unsafe { PeerBytes::new(self.map.content().wrapping_add(at as usize), len as usize) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AT: u64 = HEAP_ADDRESSES.end - (1 << 32);

    #[test]
    #[cfg_attr(miri, ignore = "maps at fixed addresses")]
    fn segment_at_taken_address_names_its_user() {
        let (own, fd) =
            OwnSegment::create(1 << 16, SegmentOptions { address: Some(AT), ..SegmentOptions::default() }).unwrap();
        assert_eq!(own.content().addr() as u64, AT);
        let Err(RegionError::HeapAddress { address, user }) = PeerSegment::attach(fd.as_fd(), own.geometry(), Some(AT))
        else {
            panic!("the address is taken");
        };
        assert!(address == AT && user.contains("memfd:partywall"), "{user}");
        let theirs = PeerSegment::attach(fd.as_fd(), own.geometry(), None).unwrap();
        // SAFETY: this test alone writes its own mapping.
        unsafe { own.content().add(65_530).copy_from(b"abcdef".as_ptr(), 6) };
        let mut seen = [0; 6];
        assert_eq!(theirs.bytes(65_530, 6).unwrap().copy_to(&mut seen), 6);
        assert_eq!(&seen, b"abcdef");
        drop(own);
        // Now the addresses are free, and the memory is still there.
        let again = PeerSegment::attach(fd.as_fd(), Geometry::new(PAGE, 1 << 16).unwrap(), Some(AT)).unwrap();
        assert_eq!(again.address(), AT);
    }

    #[test]
    #[cfg_attr(miri, ignore = "makes a window")]
    fn segment_in_window_begins_empty_and_is_read_at_its_place() {
        let spec = crate::pmem::WindowSpec { room: 8 << 20, owner: "a".into(), peer: "b".into() };
        let window = crate::pmem::WindowFile::create(&spec).unwrap();
        let (size, place) = (1 << 16, 2 << 20);
        for at in [AT, AT + (64 << 20)] {
            let own = OwnSegment::create_in(window.as_fd(), place, size, Some(at)).unwrap();
            assert_eq!(own.content().addr() as u64, at);
            let theirs = PeerSegment::attach_in(window.as_fd(), place, own.geometry(), None).unwrap();
            let mut seen = [1; 8];
            theirs.bytes(65_528, 8).unwrap().copy_to(&mut seen);
            assert_eq!(seen, [0; 8], "what an earlier segment left is gone");
            // SAFETY: this test alone writes its own mapping.
            unsafe { own.content().add(65_528).copy_from(b"leftover".as_ptr(), 8) };
            theirs.bytes(65_528, 8).unwrap().copy_to(&mut seen);
            assert_eq!(&seen, b"leftover");
            let taken = PeerSegment::attach_in(window.as_fd(), place, own.geometry(), Some(at));
            assert!(matches!(taken, Err(RegionError::HeapAddress { .. })), "{taken:?}");
            let geometry = own.geometry();
            drop(own);
            assert_eq!(PeerSegment::attach_in(window.as_fd(), place, geometry, Some(at)).unwrap().address(), at);
            let wrong = Geometry::new(PAGE, 2 * size).unwrap();
            assert!(PeerSegment::attach_in(window.as_fd(), place, wrong, None).is_err(), "another size");
        }
        let geometry = Geometry::new(PAGE, size).unwrap();
        for bad in [0, 2048, window.window().unwrap().size() - size, !4095] {
            assert!(OwnSegment::create_in(window.as_fd(), bad, size, None).is_err(), "{bad}");
            assert!(PeerSegment::attach_in(window.as_fd(), bad, geometry, None).is_err(), "{bad}");
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "maps shared memory")]
    fn extent_outside_the_content_is_refused() {
        let (own, fd) = OwnSegment::create(4096, SegmentOptions::default()).unwrap();
        let theirs = PeerSegment::attach(fd.as_fd(), own.geometry(), None).unwrap();
        for (at, len, fits) in [
            (0, 4096, true),
            (4096, 0, true),
            (1, 4096, false),
            (4097, 0, false),
            (u64::MAX, 1, false),
            (1, u64::MAX, false),
        ] {
            assert_eq!(theirs.bytes(at, len).is_some(), fits, "{len} bytes at {at}");
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "maps shared memory")]
    fn segment_of_three_pages_is_no_ring() {
        for locked in [false, true] {
            let options = SegmentOptions { locked, ..SegmentOptions::default() };
            let (own, fd) = OwnSegment::create(3 * PAGE, options).unwrap();
            let geometry = Geometry::of_content(PAGE, 3 * PAGE).unwrap();
            assert_eq!((own.geometry(), Geometry::new(PAGE, 3 * PAGE).is_err()), (geometry, true));
            // SAFETY: this test alone writes its own mapping.
            unsafe { own.content().add(3 * PAGE as usize - 1).write(7) };
            let theirs = PeerSegment::attach(fd.as_fd(), geometry, None).unwrap();
            let mut last = [0];
            theirs.bytes(3 * PAGE - 1, 1).unwrap().copy_to(&mut last);
            assert_eq!((last, theirs.bytes(3 * PAGE, 1).is_none()), ([7], true));
            // A ring's reader would find positions in it with a mask.
            let ring = crate::PeerRegion::attach(fd.as_fd(), RegionKind::Further, geometry);
            assert!(matches!(ring, Err(RegionError::Corrupt(_))), "{ring:?}");
        }
        for size in [0, 1, PAGE + 1, (1 << 30) + PAGE] {
            assert!(OwnSegment::create(size, SegmentOptions::default()).is_err(), "{size}");
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "maps shared memory")]
    fn locked_segment_is_in_locked_memory() {
        for locked in [false, true] {
            let options = SegmentOptions { locked, ..SegmentOptions::default() };
            let (own, _fd) = OwnSegment::create(PAGE, options).unwrap();
            let begin = format!("{:x}-", own.map.base.addr());
            let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
            let mut lines = maps.lines().skip_while(|line| !line.starts_with(&begin));
            let flags = lines.find(|line| line.starts_with("VmFlags:")).unwrap();
            assert_eq!(flags.split_whitespace().any(|flag| flag == "lo"), locked, "{flags}");
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "maps at fixed addresses")]
    fn address_outside_the_range_of_heaps_is_refused() {
        let (own, fd) = OwnSegment::create(4096, SegmentOptions::default()).unwrap();
        for address in [0, 4096, HEAP_ADDRESSES.start, HEAP_ADDRESSES.end, HEAP_ADDRESSES.end - 4096 + 8, u64::MAX] {
            let result = PeerSegment::attach(fd.as_fd(), own.geometry(), Some(address));
            assert!(matches!(result, Err(RegionError::Corrupt(_))), "{address:#x}: {result:?}");
        }
    }
}
