//! A place in the address space where regions are mapped one after the other, and which is never given back.
//!
//! It serves code that cannot know whether another thread still reads a region that is to be given up. Where a region was, there is
//! afterwards a page of zeros or the next region, but never an unmapped page. Such a late read gets a meaningless value, which must be
//! harmless, as every value from a peer must be; it never faults.
//!
//! A berth is all zeros when new, and of interior mutability, so that it can be a `static` of a foreign program.
#![expect(unsafe_code, reason = "maps shared memory at addresses that stay reserved, and hands out pointers into it")]

use crate::mapping::{Mapping, PageUse};
use crate::region::RegionOptions;
use crate::{RegionError, memfd, pmem};
use partywall_shm::bytes::{OwnBytes, PeerBytes};
use partywall_shm::corrupt::Corrupt;
use partywall_shm::layout::{Geometry, PAGE, RegionKind, SocketPage};
use partywall_shm::sync::{Own, Peer};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

/// The page of cursors and wishes.
const FIRST_PAGE: usize = partywall_shm::layout::PAGE as usize;
const _: () = assert!(size_of::<SocketPage<Own>>() <= FIRST_PAGE);

/// The place. One thread at a time makes or changes what is in it; any number look.
#[derive(Debug)]
pub struct Berth {
    /// Null until the first region comes.
    base: AtomicPtr<u8>,
    /// Bytes that are reserved at `base`.
    reserved: AtomicU64,
    /// `ring_offset` of what is mapped now.
    ring_offset: AtomicU64,
    /// `ring_size` of what is mapped now; 0 if nothing is.
    ring_size: AtomicU64,
    /// How often something was mapped or given up here.
    changes: AtomicU64,
}

impl Berth {
    /// An empty one.
    pub const fn new() -> Self {
        Self {
            base: AtomicPtr::new(ptr::null_mut()),
            reserved: AtomicU64::new(0),
            ring_offset: AtomicU64::new(0),
            ring_size: AtomicU64::new(0),
            changes: AtomicU64::new(0),
        }
    }

    /// Makes this side's region here, as [`crate::OwnRegion::create`] does, except that both sides fence (protocol W4). A process with
    /// many connections sleeps so often that interrupting the other processors each time costs more than a fence per message. Returns the
    /// region's descriptor.
    pub fn create(&self, options: &RegionOptions) -> Result<OwnedFd, RegionError> {
        self.reserve(options)?.fill()
    }

    /// Makes the memory of this side's region: of its final size, mapped here and sealed, but not allocated beyond its first page, where a
    /// thread that is late (see the module) may write. [`Berth::create_in`] may make the region elsewhere instead (protocol T4.8).
    ///
    /// # Errors
    /// The options are wrong or ask for huge pages, or a system call fails.
    pub fn reserve(&self, options: &RegionOptions) -> Result<ReservedRegion<'_>, RegionError> {
        let geometry = options.geometry()?;
        if geometry.ring_offset() != PAGE {
            return Err(Corrupt::BadRegion.into());
        }
        let memory = memfd::create_empty(geometry.region_size(), MemfdFlags::empty())?;
        memfd::allocate(memory.as_fd(), PAGE)?;
        self.map(memory.as_fd(), 0, geometry, PageUse::WriteLater)?;
        memfd::seal(memory.as_fd(), geometry.region_size())?;
        let change = self.changes.load(Ordering::Relaxed);
        Ok(ReservedRegion { berth: self, change, memory, options: *options, geometry })
    }

    /// Continues with memory that [`ReservedRegion::suspend`] has returned with this number. `options` are those of [`Berth::reserve`].
    ///
    /// # Errors
    /// Something else has come into the berth since, or has left it.
    pub fn resume(
        &self,
        memory: OwnedFd,
        change: u64,
        options: &RegionOptions,
    ) -> Result<ReservedRegion<'_>, RegionError> {
        let geometry = options.geometry()?;
        let reserved = ReservedRegion { berth: self, change, memory, options: *options, geometry };
        reserved.is_there().then_some(reserved).ok_or_else(|| Corrupt::BadRegion.into())
    }

    /// Makes this side's region at byte `at` of a window, for a peer on another machine. The broker gave that place to this process.
    ///
    /// # Errors
    /// It is no window, or has no room for the region there, or the system's.
    pub fn create_in(&self, window: BorrowedFd<'_>, at: u64, options: &RegionOptions) -> Result<(), RegionError> {
        let geometry = options.geometry()?;
        let from = place_in(window, at, geometry)?;
        let base = self.map(window, from, geometry, PageUse::Write)?;
        let len = usize::try_from(geometry.region_size()).map_err(|_| Corrupt::BadRegion)?;
        // The content of an earlier region must not reach the next one's peer (protocol V4.3).
        // SAFETY: just mapped, writable, this long at least, and used by no other process: the broker gave the place to this process alone.
        unsafe { base.write_bytes(0, len) };
        self.establish(base, options, geometry);
        Ok(())
    }

    /// Writes the control page and, last, the header of a region of zeros that is mapped writable at `base`.
    fn establish(&self, base: *mut u8, options: &RegionOptions, geometry: Geometry) {
        let flags = options.header_flags();
        // SAFETY: mapped writable, its first page allocated, and of atomics alone.
        let page = unsafe { &*base.cast::<SocketPage<Own>>() };
        page.control.awaken(geometry);
        let pid = u32::try_from(rustix::process::getpid().as_raw_nonzero().get()).unwrap_or(0);
        page.control.header.write(options.kind, geometry, flags, pid, options.epoch);
    }

    /// Verifies, maps and checks a peer's region here, as [`crate::PeerRegion::attach`] does. Returns its header flags.
    pub fn attach(&self, fd: BorrowedFd<'_>, kind: RegionKind, geometry: Geometry) -> Result<u32, RegionError> {
        memfd::verify(fd, geometry)?;
        self.attach_at(fd, 0, kind, geometry)
    }

    /// Attaches a region at byte `at` of a window that this machine reads.
    ///
    /// # Errors
    /// It is no window, or ends before the region does, or what is there is no such region, or the system's.
    pub fn attach_in(
        &self,
        window: BorrowedFd<'_>,
        at: u64,
        kind: RegionKind,
        geometry: Geometry,
    ) -> Result<u32, RegionError> {
        self.attach_at(window, place_in(window, at, geometry)?, kind, geometry)
    }

    fn attach_at(
        &self,
        fd: BorrowedFd<'_>,
        from: u64,
        kind: RegionKind,
        geometry: Geometry,
    ) -> Result<u32, RegionError> {
        let base = self.map(fd, from, geometry, PageUse::Read)?;
        // SAFETY: just mapped, at least a page, and valid for any bytes; peers' words are only loaded.
        let page = unsafe { &*base.cast::<SocketPage<Peer>>() };
        Ok(page.control.header.check(kind, geometry)?)
    }

    fn map(&self, fd: BorrowedFd<'_>, from: u64, geometry: Geometry, pages: PageUse) -> Result<*mut u8, RegionError> {
        let needed = Mapping::span(geometry);
        self.changes.fetch_add(1, Ordering::Relaxed);
        let mut base = self.base.load(Ordering::Acquire);
        if base.is_null() || self.reserved.load(Ordering::Relaxed) < needed {
            // A smaller reservation from before stays where it is, for those who still look there.
            base = Mapping::reserve(geometry)?;
            self.reserved.store(needed, Ordering::Relaxed);
        }
        // SAFETY: `base` is the beginning of a reservation of at least `needed` bytes that only this berth maps into.
        unsafe { Mapping::place_at(base, fd, from, geometry, pages) }?;
        self.ring_offset.store(geometry.ring_offset(), Ordering::Relaxed);
        self.ring_size.store(geometry.ring_size(), Ordering::Relaxed);
        self.base.store(base, Ordering::Release);
        Ok(base)
    }

    /// Gives up the region that is here. The memory goes, the addresses stay readable, and the first page writable: a thread that is
    /// about to say in its region that it sleeps, or where it runs, holds no lock while it does.
    pub fn vacate(&self) {
        let base = self.base.load(Ordering::Acquire);
        self.changes.fetch_add(1, Ordering::Relaxed);
        self.ring_size.store(0, Ordering::Relaxed);
        let Ok(len) = usize::try_from(self.reserved.load(Ordering::Relaxed)) else { return };
        if base.is_null() {
            return;
        }
        let first = FIRST_PAGE.min(len);
        let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
        let writable = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: both over our own reservation. Late reads find zeros, and late stores reach no other process.
        unsafe {
            let _ = mmap_anonymous(base.cast(), first, writable, flags);
            if len > first {
                let _ = mmap_anonymous(base.wrapping_add(first).cast(), len - first, ProtFlags::READ, flags);
            }
        }
    }

    /// Size of the ring that is here; 0 if there is none.
    #[inline]
    pub fn ring_size(&self) -> u64 {
        self.ring_size.load(Ordering::Relaxed)
    }

    /// The first page of this side's region.
    ///
    /// # Safety
    /// What was put here last was made by [`Berth::create`], [`Berth::reserve`] or [`Berth::create_in`], whose first page is allocated and writable. Stores after it was given up go nowhere, or into the next region.
    #[inline]
    pub unsafe fn own_page(&self) -> Option<&'static SocketPage<Own>> {
        // SAFETY: addresses of a berth are never unmapped; the page consists of atomics. Writable by the caller's contract.
        unsafe { self.base.load(Ordering::Acquire).cast::<SocketPage<Own>>().as_ref() }
    }

    /// The first page of a peer's region; every value in it is hostile, or meaningless when it was given up.
    #[inline]
    pub fn peer_page(&self) -> Option<&'static SocketPage<Peer>> {
        // SAFETY: addresses of a berth are never unmapped; the page consists of words that can only be loaded.
        unsafe { self.base.load(Ordering::Acquire).cast::<SocketPage<Peer>>().as_ref() }
    }

    #[inline]
    fn at(&self, position: u64) -> *mut u8 {
        let mask = self.ring_size().wrapping_sub(1);
        let offset = self.ring_offset.load(Ordering::Relaxed) + (position & mask);
        self.base.load(Ordering::Acquire).wrapping_add(offset as usize)
    }

    /// `len` bytes of a peer's ring from byte `position` on; at most the ring's size.
    ///
    /// # Safety
    /// The region is not given up or replaced while the result is used.
    #[inline]
    pub unsafe fn peer_span(&self, position: u64, len: u64) -> PeerBytes<'_> {
        let len = len.min(self.ring_size()) as usize;
        // SAFETY: the ring is mapped twice, so that `len` bytes follow wherever in it one begins.
        unsafe { PeerBytes::new(self.at(position), len) }
    }

    /// `len` bytes of this side's ring to write from byte `position` on; at most the ring's size.
    ///
    /// # Safety
    /// As [`Berth::peer_span`], what is here is a region of this side's, made by [`Berth::create`], [`ReservedRegion::fill`] or [`Berth::create_in`], and no other span that overlaps exists meanwhile.
    #[inline]
    pub unsafe fn own_span(&self, position: u64, len: u64) -> OwnBytes<'_> {
        let len = len.min(self.ring_size()) as usize;
        // SAFETY: as in `peer_span`; writable and exclusive by the caller's word.
        unsafe { OwnBytes::new(self.at(position), len) }
    }
}

/// Memory in a [`Berth`] that is to become this side's region.
#[derive(Debug)]
pub struct ReservedRegion<'a> {
    berth: &'a Berth,
    /// The count of the berth's changes when it was mapped there.
    change: u64,
    memory: OwnedFd,
    options: RegionOptions,
    geometry: Geometry,
}

impl ReservedRegion<'_> {
    /// The shape of the region.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Whether the berth still has this memory, with a ring of this size.
    fn is_there(&self) -> bool {
        self.berth.changes.load(Ordering::Relaxed) == self.change
            && self.berth.ring_size() == self.geometry.ring_size()
            && self.berth.ring_offset.load(Ordering::Relaxed) == self.geometry.ring_offset()
    }

    /// Leaves the memory in the berth, to be made a region later ([`Berth::resume`]). Returns its descriptor, and the number that identifies
    /// this state of the berth.
    pub fn suspend(self) -> (OwnedFd, u64) {
        (self.memory, self.change)
    }

    /// Allocates the memory and makes the region. Returns the memory's descriptor.
    ///
    /// # Errors
    /// Not enough memory is free, a signal has come meanwhile, or the berth has something else by now.
    pub fn fill(self) -> Result<OwnedFd, RegionError> {
        if !self.is_there() {
            return Err(Corrupt::BadRegion.into());
        }
        let base = self.berth.base.load(Ordering::Acquire);
        memfd::allocate(self.memory.as_fd(), self.geometry.region_size())?;
        // SAFETY: `reserve` has mapped the memory at `base` for this geometry, and nothing has come into the berth since.
        unsafe { Mapping::populate(base, self.geometry) };
        self.berth.establish(base, &self.options, self.geometry);
        Ok(self.memory)
    }
}

impl AsFd for ReservedRegion<'_> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }
}

/// Where in the memory of a window the region at byte `at` of the data begins: behind the header, whole, on a page (protocol V4).
fn place_in(window: BorrowedFd<'_>, at: u64, geometry: Geometry) -> Result<u64, RegionError> {
    let end = at.checked_add(geometry.region_size()).ok_or(Corrupt::BadRegion)?;
    if at < PAGE || !at.is_multiple_of(PAGE) || geometry.ring_offset() != PAGE {
        return Err(Corrupt::BadRegion.into());
    }
    let from = pmem::data_offset(window, end)?;
    from.checked_add(at).ok_or_else(|| Corrupt::BadRegion.into())
}

impl Default for Berth {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering::Relaxed;

    fn options(ring_size: u64) -> RegionOptions {
        RegionOptions { kind: RegionKind::Socket, ..RegionOptions::endpoint(ring_size) }
    }

    #[test]
    fn regions_come_and_go_at_one_place() {
        let (mine, theirs) = (Berth::new(), Berth::new());
        assert!(theirs.peer_page().is_none());
        let mut places = Vec::new();
        for size in [8192, 4096, 16384, 16384] {
            let fd = mine.create(&options(size)).unwrap();
            let geometry = Geometry::new(4096, size).unwrap();
            assert_eq!(theirs.attach(fd.as_fd(), RegionKind::Socket, geometry).unwrap(), 0, "both sides fence");
            // Over the end of the ring: mapped twice.
            // SAFETY: nothing else uses these berths.
            unsafe { mine.own_span(size - 3, 6) }.copy_from(0, b"abcdef");
            let mut seen = [0; 6];
            // SAFETY: as above.
            assert_eq!(unsafe { theirs.peer_span(size - 3, 6) }.copy_to(&mut seen), 6);
            assert_eq!(&seen, b"abcdef");
            let page = theirs.peer_page().unwrap();
            places.push(std::ptr::from_ref(page).addr());
            // SAFETY: made by `create`.
            unsafe { mine.own_page() }.unwrap().control.tx.cursor.tail.store(9, Relaxed);
            assert_eq!(page.control.tx.cursor.tail.load(Relaxed), 9);
            theirs.vacate();
            assert_eq!(page.control.tx.cursor.tail.load(Relaxed), 0, "a late look finds nothing, and lives");
            mine.vacate();
            // SAFETY: made by `create`.
            unsafe { mine.own_page() }.unwrap().control.rx.control.cpu.store(7, Relaxed);
        }
        assert_eq!(places[0], places[1]);
        assert_eq!(places[2], places[3]);
    }

    #[test]
    fn reserved_region_is_a_region_once_it_is_filled() {
        let (mine, theirs) = (Berth::new(), Berth::new());
        let reserved = mine.reserve(&options(65536)).unwrap();
        let geometry = reserved.geometry();
        assert!(theirs.attach(reserved.as_fd(), RegionKind::Socket, geometry).is_err(), "holes");
        let fd = reserved.fill().unwrap();
        theirs.attach(fd.as_fd(), RegionKind::Socket, geometry).unwrap();
        // SAFETY: nothing else uses these berths.
        unsafe { mine.own_span(65_530, 12) }.copy_from(0, b"over the end");
        let mut seen = [0; 12];
        // SAFETY: as above.
        unsafe { theirs.peer_span(65_530, 12) }.copy_to(&mut seen);
        assert_eq!(&seen, b"over the end");
    }

    #[test]
    fn suspended_region_is_made_where_it_was_reserved() {
        let (mine, theirs) = (Berth::new(), Berth::new());
        let reserved = mine.reserve(&options(8192)).unwrap();
        let geometry = reserved.geometry();
        let (memory, change) = reserved.suspend();
        let fd = mine.resume(memory, change, &options(8192)).unwrap().fill().unwrap();
        theirs.attach(fd.as_fd(), RegionKind::Socket, geometry).unwrap();
    }

    #[test]
    fn suspended_region_whose_berth_has_changed_is_not_resumed() {
        let mine = Berth::new();
        let suspend = || mine.reserve(&options(8192)).unwrap().suspend();
        let (memory, change) = suspend();
        assert!(mine.resume(memory, change, &options(4096)).is_err(), "another size");
        let (memory, change) = suspend();
        mine.vacate();
        assert!(mine.resume(memory, change, &options(8192)).is_err());
        let (memory, change) = suspend();
        let (_later, _) = suspend();
        assert!(mine.resume(memory, change, &options(8192)).is_err(), "another region is there");
    }

    #[test]
    fn reserved_region_whose_berth_has_changed_is_not_filled() {
        let (mine, theirs) = (Berth::new(), Berth::new());
        let reserved = mine.reserve(&options(8192)).unwrap();
        mine.vacate();
        assert!(reserved.fill().is_err());
        let reserved = mine.reserve(&options(8192)).unwrap();
        let other = theirs.create(&options(8192)).unwrap();
        mine.attach(other.as_fd(), RegionKind::Socket, reserved.geometry()).unwrap();
        assert!(reserved.fill().is_err());
    }

    #[test]
    #[cfg_attr(miri, ignore = "makes a window")]
    fn region_in_window_is_read_at_its_place_and_begins_empty() {
        let spec = crate::pmem::WindowSpec { room: 8 << 20, owner: "a".into(), peer: "b".into() };
        let window = crate::pmem::WindowFile::create(&spec).unwrap();
        let (mine, theirs) = (Berth::new(), Berth::new());
        let geometry = Geometry::new(4096, 8192).unwrap();
        let attach = |at| theirs.attach_in(window.as_fd(), at, RegionKind::Socket, geometry);
        for _ in 0..2 {
            mine.create_in(window.as_fd(), 2 << 20, &options(8192)).unwrap();
            assert_eq!(attach(2 << 20).unwrap(), 0, "both sides fence");
            let mut seen = [1; 8];
            // SAFETY: nothing else uses these berths.
            unsafe {
                theirs.peer_span(0, 8).copy_to(&mut seen);
                mine.own_span(0, 8).copy_from(0, b"leftover");
            }
            assert_eq!(seen, [0; 8], "what an earlier region left is gone");
        }
        for bad in [0, 4095, window.window().unwrap().size() - 4096, !4095] {
            assert!(attach(bad).is_err(), "{bad}");
            assert!(mine.create_in(window.as_fd(), bad, &options(8192)).is_err(), "{bad}");
        }
        let (socket, _other) = crate::packet::pair().unwrap();
        assert!(mine.create_in(socket.as_fd(), 2 << 20, &options(8192)).is_err());
    }

    #[test]
    fn region_of_unexpected_size_or_kind_is_refused() {
        let (mine, theirs) = (Berth::new(), Berth::new());
        let fd = mine.create(&options(8192)).unwrap();
        assert!(theirs.attach(fd.as_fd(), RegionKind::Socket, Geometry::new(4096, 4096).unwrap()).is_err());
        assert!(theirs.attach(fd.as_fd(), RegionKind::Endpoint, Geometry::new(4096, 8192).unwrap()).is_err());
    }
}
