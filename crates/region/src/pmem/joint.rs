//! A member's window of a group, mapped where all members map it, and the seat of this process in its own member's (protocol J).
//!
//! ```text
//!   address          + base                             + base + size
//!   | header | ...   | pages of the seat | buffers ...  | other seats |
//!     read-only        read-write, if the seat is this process's       read-only
//! ```
//!
//! Where a virtual machine is a member of the group, a window is one file, which the machine's hypervisor maps as a whole. In a group of
//! the host alone each seat has separate, sealed memory ([`SeatMemory`]), and a window is only a range of addresses
//! ([`WindowAddresses`]) that these are mapped in.
#![expect(unsafe_code, reason = "maps shared memory at given addresses, and hands out references and pointers into it")]

use crate::window::Window;
use crate::{RegionError, memfd};
use partywall_shm::bytes::PeerBytes;
use partywall_shm::carve::Carve;
use partywall_shm::corrupt::Corrupt;
use partywall_shm::group::{CONTROL, SeatPages};
use partywall_shm::layout::PAGE;
use partywall_shm::sync::{Own, Peer};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::MemfdFlags;
use rustix::io::Errno;
use rustix::mm::{MapFlags, MremapFlags, ProtFlags, mmap, mmap_anonymous, mremap_fixed, munmap};
use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut, Range};
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The addresses of a window whose seats have separate memory. This process maps nothing else there.
#[derive(Debug)]
pub struct WindowAddresses {
    base: *mut u8,
    len: u64,
    /// The parts where a seat is mapped: where each begins and ends.
    used: Mutex<BTreeMap<u64, u64>>,
}

// SAFETY: addresses belong to the process, not to a thread. Nothing is read or written through this pointer.
unsafe impl Send for WindowAddresses {}
// SAFETY: as above, and `used` is behind a lock.
unsafe impl Sync for WindowAddresses {}

impl WindowAddresses {
    /// Takes `len` bytes of addresses, of which nothing can be read yet.
    ///
    /// # Errors
    /// [`RegionError::Taken`] if anything is at that address.
    pub fn reserve(address: u64, len: u64) -> Result<Arc<Self>, RegionError> {
        let error = |e| RegionError::system("reserve the addresses of a group's window", len, e);
        let (wanted, size) = place(address, len).map_err(error)?;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED_NOREPLACE;
        // SAFETY: the flags let it succeed only where nothing is mapped, so it overlays nothing.
        let base = unsafe { mmap_anonymous(ptr::without_provenance_mut(wanted), size, ProtFlags::empty(), flags) };
        let base = at(wanted, base, error)?;
        let this = Self { base, len, used: Mutex::default() };
        if base.addr() != wanted {
            // Kernels before 4.17 take the address for a hint. Dropping gives it back.
            return Err(RegionError::Taken { address });
        }
        Ok(Arc::new(this))
    }

    /// Marks a part as used by a seat. Two mappings of one part would each unmap the other's.
    fn take(self: &Arc<Self>, base: u64, size: u64) -> Result<UsedPart, RegionError> {
        if !within(self.len, base, size) || size < CONTROL || !size.is_multiple_of(PAGE) {
            return Err(Corrupt::BadRegion.into());
        }
        let end = base + size;
        let mut used = self.used();
        if used.range(..end).next_back().is_some_and(|(_, before)| *before > base) {
            return Err(RegionError::Taken { address: self.base.addr() as u64 + base });
        }
        used.insert(base, end);
        Ok(UsedPart { window: Arc::clone(self), part: base..end })
    }

    fn used(&self) -> MutexGuard<'_, BTreeMap<u64, u64>> {
        // Each change is complete or has not been made.
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for WindowAddresses {
    fn drop(&mut self) {
        // SAFETY: exactly what `reserve` mapped; all that was mapped in it has ended, because it keeps this alive.
        let _ = unsafe { munmap(self.base.cast(), self.len as usize) };
    }
}

/// A part of a window's addresses in which one seat is mapped. Nothing can be read there any more once this is dropped.
#[derive(Debug)]
struct UsedPart {
    window: Arc<WindowAddresses>,
    part: Range<u64>,
}

impl UsedPart {
    fn first(&self) -> *mut u8 {
        self.window.base.wrapping_add(self.part.start as usize)
    }

    fn size(&self) -> usize {
        (self.part.end - self.part.start) as usize
    }
}

impl Drop for UsedPart {
    fn drop(&mut self) {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
        // This part stays marked as used until its pages are unmapped.
        let mut used = self.window.used();
        // SAFETY: a part of our own reservation that was marked as this one's alone, and whose borrowers have ended.
        let gone = unsafe { mmap_anonymous(self.first().cast(), self.size(), ProtFlags::empty(), flags) };
        if gone.is_ok() {
            used.remove(&self.part.start);
        }
    }
}

/// A window that is mapped at a given address, or one seat of it: read-only except for this member's seat. Unmapped on drop.
#[derive(Debug)]
pub struct Joint {
    /// Where the mapped part is.
    base: *mut u8,
    /// Where the window begins.
    address: u64,
    /// The part of the window that is mapped.
    part: Range<u64>,
    /// The range that may be written: its start and its length.
    own: Option<(u64, u64)>,
    /// `None`: all of the window is mapped. Otherwise one seat is, and this unmaps it.
    seat: Option<UsedPart>,
}

// SAFETY: a mapping belongs to the process, not to a thread. What is reached through it is atomics, or racing copies, or spans
// each of which is given out once (`OwnSeat`).
unsafe impl Send for Joint {}
// SAFETY: as above.
unsafe impl Sync for Joint {}

impl Joint {
    /// Maps a window of another member.
    ///
    /// # Errors
    /// [`RegionError::Taken`] if anything is at that address.
    pub fn map(window: &Window, address: u64) -> Result<Self, RegionError> {
        let (fd, from, len) = window.parts();
        let error = |e| RegionError::system("map a group's window", len, e);
        let (wanted, size) = place(address, len).map_err(error)?;
        let flags = MapFlags::SHARED | MapFlags::FIXED_NOREPLACE;
        // SAFETY: the flags let it succeed only where nothing is mapped, so it overlays nothing; the file is sealed, or a device
        // that does not shrink.
        let base = unsafe { mmap(ptr::without_provenance_mut(wanted), size, ProtFlags::READ, flags, fd, from) };
        let base = at(wanted, base, error)?;
        let this = Self { base, address, part: 0..len, own: None, seat: None };
        if base.addr() != wanted {
            // Kernels before 4.17 take the address for a hint. Dropping gives it back.
            return Err(RegionError::Taken { address });
        }
        Ok(this)
    }

    /// Verifies and maps the memory of another process's seat, which lies at `base` of its member's window (protocol J3.7).
    ///
    /// # Errors
    /// [`RegionError::Corrupt`] if the memory is not as it must be; [`RegionError::Taken`] if an earlier seat is mapped there still.
    pub fn map_seat(
        memory: BorrowedFd<'_>,
        window: &Arc<WindowAddresses>,
        base: u64,
        size: u64,
    ) -> Result<Self, RegionError> {
        memfd::verify_seat(memory, size)?;
        let part = window.take(base, size)?;
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        // SAFETY: a part of our own reservation that nothing else is mapped in. The memory's size is sealed.
        unsafe { mmap(part.first().cast(), part.size(), ProtFlags::READ, flags, memory, 0) }
            .map_err(|e| RegionError::system("map a seat in a group's window", size, e))?;
        Ok(Self::from_seat(part, false))
    }

    /// The window as far as one seat goes, which is mapped.
    fn from_seat(part: UsedPart, own: bool) -> Self {
        let (from, size) = (part.part.start, part.part.end - part.part.start);
        Self {
            base: part.first(),
            address: part.window.base.addr() as u64,
            part: part.part.clone(),
            own: own.then_some((from, size)),
            seat: Some(part),
        }
    }

    /// Maps this member's window, with `size` writable bytes from `base` on.
    fn map_own(window: &Window, address: u64, base: u64, size: u64) -> Result<Self, RegionError> {
        let mut this = Self::map(window, address)?;
        let (fd, from, len) = window.parts();
        if !within(len, base, size) || size < CONTROL || !size.is_multiple_of(PAGE) {
            return Err(Corrupt::BadRegion.into());
        }
        let error = |e| RegionError::system("map a seat in a group's window", size, e);
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        // SAFETY: inside the mapping just made, which has no pointers into it yet.
        unsafe { mmap(this.base.add(base as usize).cast(), size as usize, access, flags, fd, from + base) }
            .map_err(error)?;
        this.own = Some((base, size));
        Ok(this)
    }

    /// Where the window begins.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Whether the byte at `offset` of the window is mapped.
    pub fn covers(&self, offset: u64) -> bool {
        self.part.contains(&offset)
    }

    /// The pages of a seat that begins at `base`: `None` if they are not in what is mapped.
    pub fn seat(&self, base: u64) -> Option<&SeatPages<Peer>> {
        if !within(self.part.end, base, CONTROL) || base < self.part.start {
            return None;
        }
        // SAFETY: mapped as long as `self` lives, on a page, and of words that may be loaded whatever they hold.
        Some(unsafe { &*self.at(base).cast::<SeatPages<Peer>>() })
    }

    /// Bytes that another process writes: `None` if they are not all mapped, or are this process's own.
    pub fn bytes(&self, offset: u64, len: u64) -> Option<PeerBytes<'_>> {
        let end = offset.checked_add(len).filter(|end| *end <= self.part.end && offset >= self.part.start)?;
        if self.own.is_some_and(|(base, size)| offset < base + size && base < end) {
            return None;
        }
        // SAFETY: mapped for as long as `self` is borrowed; outside the own seat this process holds no references to anything
        // but atomics.
        Some(unsafe { PeerBytes::new(self.at(offset), len as usize) })
    }

    /// The byte at `offset` of the window, which must be in the part that is mapped.
    fn at(&self, offset: u64) -> *mut u8 {
        self.base.wrapping_add((offset - self.part.start) as usize)
    }
}

/// An address, and a number of bytes, where something can be mapped.
fn place(address: u64, len: u64) -> Result<(usize, usize), Errno> {
    let wanted = usize::try_from(address).map_err(|_| Errno::INVAL)?;
    let size = usize::try_from(len).map_err(|_| Errno::INVAL)?;
    if wanted == 0 || !address.is_multiple_of(PAGE) { Err(Errno::INVAL) } else { Ok((wanted, size)) }
}

/// The result of mapping at an address where nothing may be mapped yet.
fn at(
    wanted: usize,
    mapped: Result<*mut std::ffi::c_void, Errno>,
    error: impl Fn(Errno) -> RegionError,
) -> Result<*mut u8, RegionError> {
    match mapped {
        Ok(base) => Ok(base.cast::<u8>()),
        Err(Errno::EXIST) => Err(RegionError::Taken { address: wanted as u64 }),
        Err(e) => Err(error(e)),
    }
}

/// Whether `size` bytes at `base`, on a page and behind the header, are in a window of `len`.
fn within(len: u64, base: u64, size: u64) -> bool {
    base >= PAGE && base.is_multiple_of(PAGE) && base.checked_add(size).is_some_and(|end| end <= len)
}

impl Drop for Joint {
    fn drop(&mut self) {
        if self.seat.is_none() {
            // SAFETY: exactly what `map` mapped; borrows of `self` have ended. It fails only for arguments that are not these.
            let _ = unsafe { munmap(self.base.cast(), (self.part.end - self.part.start) as usize) };
        }
    }
}

/// New memory for a seat: mapped writable and then sealed, so that no other process can write it, and no process can take pages out of
/// it.
#[derive(Debug)]
pub struct SeatMemory {
    base: *mut u8,
    size: u64,
}

// SAFETY: a mapping belongs to the process, not to a thread, and nothing is read or written through this pointer.
unsafe impl Send for SeatMemory {}

impl SeatMemory {
    /// Makes memory for a seat with `room` bytes for buffers, and its descriptor, which is for others.
    ///
    /// # Errors
    /// The system's.
    pub fn create(room: u64) -> Result<(Self, OwnedFd), RegionError> {
        let error = |e| RegionError::system("make memory for a seat in a group", room, e);
        let size = room.checked_next_multiple_of(PAGE).and_then(|room| room.checked_add(CONTROL));
        let size = size.ok_or_else(|| error(Errno::NOMEM))?;
        let len = usize::try_from(size).map_err(|_| error(Errno::NOMEM))?;
        let fd = memfd::create_of(size, MemfdFlags::empty())?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // A page that was allocated and never touched looks like a hole to those who verify it.
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: new memory, at an address that the kernel chooses.
        let base = unsafe { mmap(ptr::null_mut(), len, access, flags, &fd, 0) }.map_err(error)?;
        let this = Self { base: base.cast(), size };
        memfd::seal(fd.as_fd(), size)?;
        Ok((this, fd))
    }

    /// Bytes of it.
    pub fn size(&self) -> u64 {
        self.size
    }
}

impl Drop for SeatMemory {
    fn drop(&mut self) {
        // SAFETY: exactly what `create` mapped, unless it was moved, and then it is not dropped.
        let _ = unsafe { munmap(self.base.cast(), self.size as usize) };
    }
}

/// The seat of this process: its pages, and its buffers.
#[derive(Debug)]
pub struct OwnSeat {
    map: Arc<Joint>,
    base: u64,
    size: u64,
    carve: Mutex<Carve>,
}

impl OwnSeat {
    /// Maps this member's window and begins the seat `key` in it, at a place that the broker has given to no other process.
    ///
    /// # Errors
    /// As [`Joint::map`].
    pub fn take(window: &Window, address: u64, base: u64, size: u64, key: u64) -> Result<Self, RegionError> {
        Ok(Self::begin(Joint::map_own(window, address, base, size)?, base, size, key))
    }

    /// Moves memory of this process to `base` of a window, and begins the seat `key` in it. The broker has given that place to no other
    /// process.
    ///
    /// # Errors
    /// As [`Joint::map_seat`].
    pub fn settle(memory: SeatMemory, window: &Arc<WindowAddresses>, base: u64, key: u64) -> Result<Self, RegionError> {
        let size = memory.size;
        let part = window.take(base, size)?;
        let (len, to) = (part.size(), part.first().cast());
        // SAFETY: `memory` is mapped, has that size, and has no pointers into it. The target is a part of our own reservation
        // that nothing else is mapped in.
        unsafe { mremap_fixed(memory.base.cast(), len, len, MremapFlags::MAYMOVE, to) }
            .map_err(|e| RegionError::system("map a seat in a group's window", size, e))?;
        // It is where `part` is now, which unmaps it.
        std::mem::forget(memory);
        Ok(Self::begin(Joint::from_seat(part, true), base, size, key))
    }

    fn begin(map: Joint, base: u64, size: u64, key: u64) -> Self {
        let this = Self { map: Arc::new(map), base, size, carve: Mutex::new(Carve::new(base + CONTROL, base + size)) };
        this.pages().begin(key);
        this
    }

    /// The window that it is in, or as much of it as is mapped with it.
    pub fn window(&self) -> &Arc<Joint> {
        &self.map
    }

    /// The pages of the seat that other members read.
    pub fn pages(&self) -> &SeatPages<Own> {
        // SAFETY: mapped writable as long as `self` lives (`map_own`), on a page, and of atomics alone, for which any bytes are
        // a value.
        unsafe { &*self.map.at(self.base).cast::<SeatPages<Own>>() }
    }

    /// Takes room for a buffer, in whole pages; `None` if there is no such piece. The room still has the content of an earlier buffer.
    pub fn take_span(self: &Arc<Self>, len: u64) -> Option<OwnSpan> {
        let size = usize::try_from(len).ok()?;
        let offset = self.carve().take(len)?;
        Some(OwnSpan { seat: Arc::clone(self), offset, len: size })
    }

    /// Bytes for buffers, in all.
    pub fn room(&self) -> u64 {
        self.size - CONTROL
    }

    /// How many of its bytes are free.
    pub fn free(&self) -> u64 {
        self.carve().free()
    }

    fn carve(&self) -> MutexGuard<'_, Carve> {
        // Each change is complete or has not been made.
        self.carve.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Memory for one buffer, which this process alone writes. Free again when dropped.
#[derive(Debug)]
pub struct OwnSpan {
    seat: Arc<OwnSeat>,
    offset: u64,
    len: usize,
}

impl OwnSpan {
    /// Where it is, in every member.
    pub fn address(&self) -> u64 {
        self.seat.map.address() + self.offset
    }
}

impl Deref for OwnSpan {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: mapped as long as `self` lives, and given out once (`Carve::take`) for as long; only this process writes it,
        // which takes `&mut self`. Memory of a file is initialised.
        unsafe { std::slice::from_raw_parts(self.seat.map.at(self.offset), self.len) }
    }
}

impl DerefMut for OwnSpan {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and exclusive by `&mut self`. Peers may read at the same time, and must cope with changes.
        unsafe { std::slice::from_raw_parts_mut(self.seat.map.at(self.offset), self.len) }
    }
}

impl Drop for OwnSpan {
    fn drop(&mut self) {
        self.seat.carve().give_back(self.offset);
    }
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    use super::super::{WindowFile, WindowSpec};
    use super::*;
    use partywall_shm::group::{TokenClaim, TokenState};

    /// Far from what [`partywall_shm::group::address`] gives, and each test its own.
    const HERE: u64 = 0x4800_0000_0000;

    fn window() -> WindowFile {
        WindowFile::create(&WindowSpec { room: 1 << 20, owner: "a".into(), peer: "g".into() }).unwrap()
    }

    #[test]
    fn window_is_mapped_at_given_address_or_not_at_all() {
        let file = window();
        let map = Joint::map(&file.window().unwrap(), HERE).unwrap();
        assert_eq!(map.address(), HERE);
        let again = Joint::map(&file.window().unwrap(), HERE).unwrap_err();
        assert!(matches!(again, RegionError::Taken { address: HERE }) && again.to_string().contains("0x480000000000"));
        drop(map);
        drop(Joint::map(&file.window().unwrap(), HERE).unwrap());
        assert!(Joint::map(&file.window().unwrap(), HERE + 5).is_err());
        assert!(Joint::map(&file.window().unwrap(), 0).is_err());
    }

    #[test]
    fn seat_is_writable_and_rest_of_window_readable() {
        let file = window();
        let (address, base, size) = (HERE + (1 << 36), 2 * PAGE, CONTROL + 4 * PAGE);
        let seat = Arc::new(OwnSeat::take(&file.window().unwrap(), address, base, size, 9).unwrap());
        let other = Joint::map(&file.window().unwrap(), address + (1 << 36)).unwrap();
        assert!(other.seat(base).unwrap().is_of(9) && !other.seat(base).unwrap().is_of(8));
        seat.pages().say(1, 2, 3, TokenClaim { hop: 0, state: TokenState::Passed });
        assert!(other.seat(base).unwrap().claim_of(1, 2, 3).is_some());

        let mut span = seat.take_span(2 * PAGE + 1).unwrap();
        span.fill(7);
        assert!(seat.take_span(2 * PAGE).is_none() && seat.free() == PAGE);
        let offset = span.address() - address;
        let mut seen = [0; 5];
        assert_eq!(other.bytes(offset + 1, 5).unwrap().copy_to(&mut seen), 5);
        assert_eq!(seen, [7; 5]);
        drop(span);
        assert_eq!(seat.free(), 4 * PAGE);

        // Ranges outside the window, or in this process's own seat, are not read.
        let len = file.window().unwrap().size();
        assert!(
            other.bytes(len - 1, 1).is_some() && other.bytes(len, 1).is_none() && other.bytes(5, u64::MAX).is_none()
        );
        assert!(seat.window().bytes(base + size - 1, 1).is_none() && seat.window().bytes(base - 1, 2).is_none());
        assert!(seat.window().bytes(base + size, 1).is_some() && seat.window().bytes(base - 1, 1).is_some());
        for bad in [0, PAGE + 1, len, u64::MAX - 4095] {
            assert!(other.seat(bad).is_none(), "{bad}");
        }
        drop(seat);
        for (base, size) in [(0, size), (base, CONTROL - PAGE), (base, len), (base + 1, size)] {
            assert!(OwnSeat::take(&file.window().unwrap(), address, base, size, 1).is_err(), "{base} {size}");
        }
    }

    #[test]
    fn seat_memory_is_read_at_address_where_owner_writes() {
        let (at, len, base) = (HERE + (4 << 36), 64 << 20, 50 * PAGE);
        let owner = WindowAddresses::reserve(at, len).unwrap();
        // The other member, which is this process too: at another address.
        let reader = WindowAddresses::reserve(at + (1 << 36), len).unwrap();
        let (memory, fd) = SeatMemory::create(4 * PAGE).unwrap();
        let size = memory.size();
        let seat = Arc::new(OwnSeat::settle(memory, &owner, base, 9).unwrap());
        let other = Joint::map_seat(fd.as_fd(), &reader, base, size).unwrap();
        let mut span = seat.take_span(2 * PAGE).unwrap();
        span.fill(7);
        let offset = span.address() - at;
        let mut seen = [0; 5];
        assert_eq!(other.bytes(offset, 5).unwrap().copy_to(&mut seen), 5);
        assert_eq!(seen, [7; 5]);
        assert!(other.seat(base).unwrap().is_of(9) && other.address() == at + (1 << 36));
        // Nothing else of the window is mapped.
        for (offset, len) in [(base - 1, 2), (base + size, 1), (base + size - 1, 2), (0, 1), (u64::MAX, 1)] {
            assert!(other.bytes(offset, len).is_none(), "{offset} {len}");
        }
        for bad in [0, base - PAGE, base + size] {
            assert!(other.seat(bad).is_none(), "{bad}");
        }

        // A part is mapped once, and again when its first mapping is gone.
        let taken = |result: Result<Joint, RegionError>| matches!(result, Err(RegionError::Taken { .. }));
        let (next, next_fd) = SeatMemory::create(0).unwrap();
        let small = next.size();
        for base in [base, base + size - PAGE, base - small + PAGE] {
            assert!(taken(Joint::map_seat(next_fd.as_fd(), &reader, base, small)), "{base}");
        }
        assert!(matches!(WindowAddresses::reserve(at, len), Err(RegionError::Taken { .. })));
        drop(Joint::map_seat(next_fd.as_fd(), &reader, base + size, small).unwrap());
        drop(other);
        drop(Joint::map_seat(next_fd.as_fd(), &reader, base, small).unwrap());
        assert!(Joint::map_seat(next_fd.as_fd(), &reader, len - PAGE, small).is_err(), "beyond its end");
        drop((reader, next));
        // All is given back.
        drop(WindowAddresses::reserve(at + (1 << 36), len).unwrap());
    }

    #[test]
    fn seat_memory_is_sealed_against_writes_and_holes() {
        let reader = WindowAddresses::reserve(HERE + (6 << 36), 64 << 20).unwrap();
        let (memory, fd) = SeatMemory::create(PAGE).unwrap();
        let size = memory.size();
        let mode = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
        assert_eq!(rustix::fs::fallocate(&fd, mode, 0, PAGE), Err(Errno::PERM));
        // SAFETY: memory of this test, of which nothing is used.
        let removed =
            unsafe { rustix::mm::madvise(memory.base.cast(), PAGE as usize, rustix::mm::Advice::LinuxRemove) };
        assert_eq!(removed, Err(Errno::PERM));
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: new memory, at an address that the kernel chooses.
        let mapped = unsafe { mmap(ptr::null_mut(), PAGE as usize, access, MapFlags::SHARED, &fd, 0) };
        assert_eq!(mapped.err(), Some(Errno::PERM));

        let corrupt = |fd: &OwnedFd, size| {
            let mapped = Joint::map_seat(fd.as_fd(), &reader, PAGE, size);
            matches!(mapped, Err(RegionError::Corrupt(Corrupt::BadRegion)))
        };
        assert!(corrupt(&fd, size + PAGE) && corrupt(&fd, size - PAGE), "of another size");
        let unsealed = memfd::create_of(size, MemfdFlags::empty()).unwrap();
        assert!(corrupt(&unsealed, size));
        rustix::fs::fallocate(&unsealed, mode, PAGE, PAGE).unwrap();
        memfd::seal(unsealed.as_fd(), size).unwrap();
        assert!(corrupt(&unsealed, size), "with a hole");
    }
}
