//! A member's window of a group, mapped where all members map it, and the seat of this process in its own member's (protocol J).
//!
//! ```text
//!   address          + base                             + base + size
//!   | header | ...   | pages of the seat | buffers ...  | other seats |
//!     read-only        read-write, if the seat is this process's       read-only
//! ```
#![expect(unsafe_code, reason = "maps shared memory at given addresses, and hands out references and pointers into it")]

use crate::RegionError;
use crate::window::Window;
use partywall_shm::bytes::PeerBytes;
use partywall_shm::carve::Carve;
use partywall_shm::corrupt::Corrupt;
use partywall_shm::group::{CONTROL, SeatPages};
use partywall_shm::layout::PAGE;
use partywall_shm::sync::{Own, Peer};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::ops::{Deref, DerefMut};
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A window that is mapped at a given address, read-only except for this member's seat. Unmapped on drop.
#[derive(Debug)]
pub struct Joint {
    base: *mut u8,
    len: u64,
    /// What may be written: where it begins, and how long it is.
    own: Option<(u64, u64)>,
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
        let wanted = usize::try_from(address).map_err(|_| error(Errno::INVAL))?;
        let size = usize::try_from(len).map_err(|_| error(Errno::INVAL))?;
        if wanted == 0 || !address.is_multiple_of(PAGE) {
            return Err(error(Errno::INVAL));
        }
        let flags = MapFlags::SHARED | MapFlags::FIXED_NOREPLACE;
        // SAFETY: the flags let it succeed only where nothing is mapped, so it overlays nothing; the file is sealed, or a device
        // that does not shrink.
        let base = unsafe { mmap(ptr::without_provenance_mut(wanted), size, ProtFlags::READ, flags, fd, from) };
        let base = match base {
            Ok(base) => base.cast::<u8>(),
            Err(Errno::EXIST) => return Err(RegionError::Taken { address }),
            Err(e) => return Err(error(e)),
        };
        let this = Self { base, len, own: None };
        if base.addr() != wanted {
            // Kernels before 4.17 take the address for a hint. Dropping gives it back.
            return Err(RegionError::Taken { address });
        }
        Ok(this)
    }

    /// The same of this member's window, with `size` bytes from `base` on to be written.
    fn map_own(window: &Window, address: u64, base: u64, size: u64) -> Result<Self, RegionError> {
        let mut this = Self::map(window, address)?;
        let (fd, from, len) = window.parts();
        if !within(len, base, size) || size < CONTROL || !size.is_multiple_of(PAGE) {
            return Err(Corrupt::BadRegion.into());
        }
        let error = |e| RegionError::system("map a seat in a group's window", size, e);
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        // SAFETY: inside the mapping just made, which nobody has a pointer into.
        unsafe { mmap(this.base.add(base as usize).cast(), size as usize, access, flags, fd, from + base) }
            .map_err(error)?;
        this.own = Some((base, size));
        Ok(this)
    }

    /// Where it is.
    pub fn address(&self) -> u64 {
        self.base.addr() as u64
    }

    /// The pages of a seat that begins at `base`: `None` if there is no room for them.
    pub fn seat(&self, base: u64) -> Option<&SeatPages<Peer>> {
        if !within(self.len, base, CONTROL) {
            return None;
        }
        // SAFETY: mapped as long as `self` lives, on a page, and of words that may be loaded whatever they hold.
        Some(unsafe { &*self.base.add(base as usize).cast::<SeatPages<Peer>>() })
    }

    /// Bytes that somebody else writes: `None` if they are not all in the window, or this process's own.
    pub fn bytes(&self, offset: u64, len: u64) -> Option<PeerBytes<'_>> {
        let end = offset.checked_add(len).filter(|end| *end <= self.len)?;
        if self.own.is_some_and(|(base, size)| offset < base + size && base < end) {
            return None;
        }
        // SAFETY: mapped for as long as `self` is borrowed; outside the own seat this process holds no references to anything
        // but atomics.
        Some(unsafe { PeerBytes::new(self.base.add(offset as usize), len as usize) })
    }
}

/// Whether `size` bytes at `base`, on a page and behind the header, are in a window of `len`.
fn within(len: u64, base: u64, size: u64) -> bool {
    base >= PAGE && base.is_multiple_of(PAGE) && base.checked_add(size).is_some_and(|end| end <= len)
}

impl Drop for Joint {
    fn drop(&mut self) {
        // SAFETY: exactly what `map` mapped; borrows of `self` have ended. It fails only for arguments that are not these.
        let _ = unsafe { munmap(self.base.cast(), self.len as usize) };
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
    /// Maps this member's window and begins the seat `key` in it, whose place the broker has given to nobody else.
    ///
    /// # Errors
    /// As [`Joint::map`].
    pub fn take(window: &Window, address: u64, base: u64, size: u64, key: u64) -> Result<Self, RegionError> {
        let map = Arc::new(Joint::map_own(window, address, base, size)?);
        let this = Self { map, base, size, carve: Mutex::new(Carve::new(base + CONTROL, base + size)) };
        this.pages().begin(key);
        Ok(this)
    }

    /// The window it is in.
    pub fn window(&self) -> &Arc<Joint> {
        &self.map
    }

    /// Its pages.
    pub fn pages(&self) -> &SeatPages<Own> {
        // SAFETY: mapped writable as long as `self` lives (`map_own`), on a page, and of atomics alone, for which any bytes are
        // a value.
        unsafe { &*self.map.base.add(self.base as usize).cast::<SeatPages<Own>>() }
    }

    /// Takes room for a buffer, in whole pages: `None` if there is no such piece. What an earlier one has left is in it.
    pub fn take_span(self: &Arc<Self>, len: u64) -> Option<OwnSpan> {
        let size = usize::try_from(len).ok()?;
        let offset = self.carve().take(len)?;
        Some(OwnSpan { seat: Arc::clone(self), offset, len: size })
    }

    /// Bytes for buffers, in all.
    pub fn room(&self) -> u64 {
        self.size - CONTROL
    }

    /// Of which so many are free.
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
        unsafe { std::slice::from_raw_parts(self.seat.map.base.add(self.offset as usize), self.len) }
    }
}

impl DerefMut for OwnSpan {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and exclusive by `&mut self`. Others may read meanwhile, which is their own affair.
        unsafe { std::slice::from_raw_parts_mut(self.seat.map.base.add(self.offset as usize), self.len) }
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
    use partywall_shm::group::{Claim, State};

    /// Far from what [`partywall_shm::group::address`] gives, and each test its own.
    const HERE: u64 = 0x4800_0000_0000;

    fn window() -> WindowFile {
        WindowFile::create(&WindowSpec { room: 1 << 20, owner: "a".into(), peer: "g".into() }).unwrap()
    }

    #[test]
    fn a_window_is_where_it_was_to_be_or_nowhere() {
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
    fn a_seat_is_written_and_everything_else_read() {
        let file = window();
        let (address, base, size) = (HERE + (1 << 36), 2 * PAGE, CONTROL + 4 * PAGE);
        let seat = Arc::new(OwnSeat::take(&file.window().unwrap(), address, base, size, 9).unwrap());
        let other = Joint::map(&file.window().unwrap(), address + (1 << 36)).unwrap();
        assert!(other.seat(base).unwrap().is_of(9) && !other.seat(base).unwrap().is_of(8));
        seat.pages().say(1, 2, 3, Claim { hop: 0, state: State::Passed });
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

        // What is not there, or this process's own, is not read.
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
}
