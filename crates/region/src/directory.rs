//! The memory of the directory: made and written by the broker, mapped read-only by everyone else (protocol T1).
#![expect(unsafe_code, reason = "maps the directory, and makes a reference of the address")]

use crate::pmem::data_offset;
use crate::{RegionError, memfd};
use partywall_protocol::directory::{Directory, SIZE};
use partywall_shm::corrupt::Corrupt;
use partywall_shm::layout::PAGE;
use partywall_shm::sync::Peer;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{FallocateFlags, MemfdFlags};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::ffi::c_void;
use std::ops::Deref;
use std::ptr::{self, NonNull};

const LEN: usize = SIZE as usize;

/// A directory that this process writes: all zeros at first, mapped writable, sealed against any other writer.
#[derive(Debug)]
pub struct OwnDirectory {
    memory: NonNull<Directory>,
}

// SAFETY: the mapping belongs to the process, not to a thread, and what is reached through it is atomics.
unsafe impl Send for OwnDirectory {}
// SAFETY: as above.
unsafe impl Sync for OwnDirectory {}

impl OwnDirectory {
    /// Makes one: created, wholly allocated, mapped, and sealed, in that order. Returns its descriptor, for those who read it.
    ///
    /// # Errors
    /// The system's.
    pub fn create() -> Result<(Self, OwnedFd), RegionError> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create("partywall-directory", flags)
            .map_err(|e| RegionError::system("create shared memory", SIZE, e))?;
        memfd::check_limit(SIZE)
            .and_then(|()| rustix::fs::ftruncate(&fd, SIZE))
            .map_err(|e| RegionError::system("size shared memory", SIZE, e))?;
        rustix::fs::fallocate(&fd, FallocateFlags::empty(), 0, SIZE)
            .map_err(|e| RegionError::system("allocate shared memory", SIZE, e))?;
        let memory = map(fd.as_fd(), 0, ProtFlags::READ | ProtFlags::WRITE, None)?;
        let this = Self { memory: memory.cast() };
        memfd::seal(fd.as_fd(), SIZE)?;
        Ok((this, fd))
    }

    /// Makes a directory at byte `base` of a window that this host owns, for the machine that reads the window. It overwrites the remains
    /// of an earlier directory.
    ///
    /// # Errors
    /// It is no window of the host's, or has no room for a directory there, or the system's.
    pub fn in_window(window: BorrowedFd<'_>, base: u64) -> Result<Self, RegionError> {
        let from = place(window, base)?;
        let memory = map(window, from, ProtFlags::READ | ProtFlags::WRITE, None)?;
        // SAFETY: just mapped, writable, of this length; readers in the machine find loads of atomics in whatever is there.
        unsafe { memory.cast::<u8>().write_bytes(0, LEN) };
        Ok(Self { memory: memory.cast() })
    }
}

impl Deref for OwnDirectory {
    type Target = Directory;

    fn deref(&self) -> &Directory {
        // SAFETY: mapped as long as `self` lives, page-aligned, of the directory's size (asserted where it is laid out), of
        // atomics alone, for which any bytes are a value.
        unsafe { self.memory.as_ref() }
    }
}

impl Drop for OwnDirectory {
    fn drop(&mut self) {
        // SAFETY: exactly what `create` mapped; borrows of `self` have ended. Unmapping what one has mapped does not fail.
        let _ = unsafe { munmap(self.memory.as_ptr().cast(), LEN) };
    }
}

/// Verifies and maps a directory that a broker made, and checks its layout. It is never unmapped, because other threads may still read
/// it. An earlier directory is passed in `over`, and the new one is mapped in its place.
///
/// # Errors
/// The memory is not what a broker makes, or holds no directory of this layout, or the system's.
pub fn attach(
    fd: BorrowedFd<'_>,
    over: Option<&'static Directory<Peer>>,
) -> Result<&'static Directory<Peer>, RegionError> {
    let seals = rustix::fs::fcntl_get_seals(fd).map_err(|_| Corrupt::BadRegion)?;
    let stat = rustix::fs::fstat(fd).map_err(|_| Corrupt::BadRegion)?;
    if !seals.contains(memfd::SEALS) || u64::try_from(stat.st_size) != Ok(SIZE) {
        return Err(Corrupt::BadRegion.into());
    }
    attach_at(fd, 0, over)
}

/// Attaches a directory that begins at byte `base` of this machine's window from the host. The hypervisor makes the window read-only in
/// this machine.
///
/// # Errors
/// As [`attach`].
pub fn attach_in_window(
    window: BorrowedFd<'_>,
    base: u64,
    over: Option<&'static Directory<Peer>>,
) -> Result<&'static Directory<Peer>, RegionError> {
    attach_at(window, place(window, base)?, over)
}

/// Where in the memory of a window a directory is that begins at byte `base` of the data.
fn place(window: BorrowedFd<'_>, base: u64) -> Result<u64, RegionError> {
    let end = base.checked_add(SIZE).filter(|_| base.is_multiple_of(PAGE) && base >= PAGE);
    let from = end.ok_or(Corrupt::BadRegion).map_err(RegionError::from).and_then(|end| data_offset(window, end))?;
    from.checked_add(base).ok_or_else(|| Corrupt::BadRegion.into())
}

fn attach_at(
    fd: BorrowedFd<'_>,
    from: u64,
    over: Option<&'static Directory<Peer>>,
) -> Result<&'static Directory<Peer>, RegionError> {
    // It is checked at a private address before it replaces the mapping that other threads read.
    let fresh = map(fd, from, ProtFlags::READ, None)?;
    // SAFETY: just mapped, page-aligned, of the directory's size and of memory that cannot shrink (sealed, or a window); only loads.
    let known = unsafe { fresh.cast::<Directory<Peer>>().as_ref() }.check();
    if known.is_ok() && over.is_none() {
        // SAFETY: as above, and nothing unmaps it any more.
        return Ok(unsafe { fresh.cast().as_ref() });
    }
    // SAFETY: exactly what was just mapped, and no reference to it is left.
    let _ = unsafe { munmap(fresh.as_ptr(), LEN) };
    known.map_err(|_| Corrupt::BadHeader)?;
    let memory = map(fd, from, ProtFlags::READ, over)?;
    // SAFETY: as above; at the address of the one before, whose readers find loads of atomics in either.
    Ok(unsafe { memory.cast().as_ref() })
}

fn map(
    fd: BorrowedFd<'_>,
    from: u64,
    prot: ProtFlags,
    over: Option<&'static Directory<Peer>>,
) -> Result<NonNull<c_void>, RegionError> {
    let (at, fixed) = match over {
        Some(before) => (ptr::from_ref(before).cast_mut().cast(), MapFlags::FIXED),
        None => (ptr::null_mut(), MapFlags::empty()),
    };
    // SAFETY: where the kernel likes it; or over a whole mapping of the same size that `attach` made, which replaces it at
    // once for all readers.
    let memory = unsafe { mmap(at, LEN, prot, MapFlags::SHARED | fixed, fd, from) }
        .map_err(|e| RegionError::system("map the directory", SIZE, e))?;
    NonNull::new(memory).ok_or_else(|| Corrupt::BadRegion.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use partywall_protocol::directory::{DirectoryChange, DirectoryKeeper, Fingerprint, Transport};

    fn listener(port: u16) -> Fingerprint {
        Fingerprint::listener(Transport::Tcp, ([10, 0, 0, 1], port).into(), 0)
    }

    #[test]
    fn directory_is_shared_and_replaced_in_place_by_next() {
        let (own, memory) = OwnDirectory::create().unwrap();
        let mut keeper = DirectoryKeeper::begin(&own, 7);
        let reader = attach(memory.as_fd(), None).unwrap();
        assert!(!reader.has_listener(listener(80)));
        keeper.apply(&own, &DirectoryChange::Listener(listener(80)));
        assert!(reader.has_listener(listener(80)) && reader.instance() == 7);

        let (next, next_memory) = OwnDirectory::create().unwrap();
        DirectoryKeeper::begin(&next, 8);
        let again = attach(next_memory.as_fd(), Some(reader)).unwrap();
        assert!(ptr::eq(reader, again) && reader.instance() == 8 && !reader.has_listener(listener(80)));
        // A process that mapped it can read it when its maker has gone.
        drop((own, next));
        assert_eq!(reader.instance(), 8);
    }

    #[test]
    fn directory_is_read_only_and_false_ones_are_refused() {
        let (own, memory) = OwnDirectory::create().unwrap();
        assert!(attach(memory.as_fd(), None).is_err(), "not begun");
        DirectoryKeeper::begin(&own, 7);
        assert!(attach(memory.as_fd(), None).is_ok());
        assert!(map(memory.as_fd(), 0, ProtFlags::READ | ProtFlags::WRITE, None).is_err());
        assert!(rustix::io::write(&memory, b"x").is_err() && rustix::fs::ftruncate(&memory, 0).is_err());
        // The same bytes in memory that can shrink under its readers, and in memory that is too small.
        let mut bytes = vec![0; LEN];
        assert_eq!(rustix::io::pread(&memory, &mut bytes, 0), Ok(LEN));
        for len in [LEN, LEN - 4096] {
            let copy = rustix::fs::memfd_create("x", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
            assert_eq!(rustix::io::pwrite(&copy, &bytes[..len], 0), Ok(len));
            if len < LEN {
                memfd::seal(copy.as_fd(), SIZE).unwrap();
            }
            assert!(attach(copy.as_fd(), None).is_err());
        }
        let (pipe, _other) = rustix::pipe::pipe().unwrap();
        assert!(attach(pipe.as_fd(), None).is_err());
    }

    #[test]
    fn directory_in_window_is_read_only_within_its_bounds() {
        let spec = crate::pmem::WindowSpec { room: 8 << 20, owner: "host".into(), peer: "a".into() };
        let window = crate::pmem::WindowFile::create(&spec).unwrap();
        let base = 2 << 20;
        let own = OwnDirectory::in_window(window.as_fd(), base).unwrap();
        assert!(attach_in_window(window.as_fd(), base, None).is_err(), "not begun");
        let mut keeper = DirectoryKeeper::begin(&own, 7);
        let reader = attach_in_window(window.as_fd(), base, None).unwrap();
        keeper.apply(&own, &DirectoryChange::Listener(listener(80)));
        assert!(reader.has_listener(listener(80)) && reader.instance() == 7);
        for bad in [0, base + 1, window.window().unwrap().size() - 4096, u64::MAX - 4095] {
            assert!(OwnDirectory::in_window(window.as_fd(), bad).is_err(), "{bad}");
            assert!(attach_in_window(window.as_fd(), bad, None).is_err(), "{bad}");
        }
    }
}
