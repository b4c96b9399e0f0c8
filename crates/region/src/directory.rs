//! The memory of the directory: made and written by the broker, mapped read-only by everyone else (protocol T1).
#![expect(unsafe_code, reason = "maps the directory, and makes a reference of the address")]

use crate::{RegionError, memfd};
use partywall_protocol::directory::{Directory, SIZE};
use partywall_shm::corrupt::Corrupt;
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
    fd: OwnedFd,
}

// SAFETY: the mapping belongs to the process, not to a thread, and what is reached through it is atomics.
unsafe impl Send for OwnDirectory {}
// SAFETY: as above.
unsafe impl Sync for OwnDirectory {}

impl OwnDirectory {
    /// Makes one: created, wholly allocated, mapped, and sealed, in that order.
    pub fn create() -> Result<Self, RegionError> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create("partywall-directory", flags)
            .map_err(|e| RegionError::system("create shared memory", SIZE, e))?;
        memfd::check_limit(SIZE)
            .and_then(|()| rustix::fs::ftruncate(&fd, SIZE))
            .map_err(|e| RegionError::system("size shared memory", SIZE, e))?;
        rustix::fs::fallocate(&fd, FallocateFlags::empty(), 0, SIZE)
            .map_err(|e| RegionError::system("allocate shared memory", SIZE, e))?;
        let memory = map(fd.as_fd(), ProtFlags::READ | ProtFlags::WRITE, None)?;
        let this = Self { memory: memory.cast(), fd };
        memfd::seal(this.fd.as_fd(), SIZE)?;
        Ok(this)
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

impl AsFd for OwnDirectory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for OwnDirectory {
    fn drop(&mut self) {
        // SAFETY: exactly what `create` mapped; borrows of `self` have ended. Unmapping what one has mapped does not fail.
        let _ = unsafe { munmap(self.memory.as_ptr().cast(), LEN) };
    }
}

/// Verifies and maps a directory that a broker made, and checks its layout. It stays mapped for ever, so that nobody need know
/// whether others still look at it; one that came before is given in `over`, and the new one takes its place.
pub fn attach(
    fd: BorrowedFd<'_>,
    over: Option<&'static Directory<Peer>>,
) -> Result<&'static Directory<Peer>, RegionError> {
    let seals = rustix::fs::fcntl_get_seals(fd).map_err(|_| Corrupt::BadRegion)?;
    let stat = rustix::fs::fstat(fd).map_err(|_| Corrupt::BadRegion)?;
    if !seals.contains(memfd::SEALS) || u64::try_from(stat.st_size) != Ok(SIZE) {
        return Err(Corrupt::BadRegion.into());
    }
    // Looked at where nobody else is before it replaces what others look at.
    let fresh = map(fd, ProtFlags::READ, None)?;
    // SAFETY: just mapped, page-aligned, of the directory's size and sealed so that it cannot shrink; only loads.
    let known = unsafe { fresh.cast::<Directory<Peer>>().as_ref() }.check();
    if known.is_ok() && over.is_none() {
        // SAFETY: as above, and nothing unmaps it any more.
        return Ok(unsafe { fresh.cast().as_ref() });
    }
    // SAFETY: exactly what was just mapped, and no reference to it is left.
    let _ = unsafe { munmap(fresh.as_ptr(), LEN) };
    known.map_err(|_| Corrupt::BadHeader)?;
    let memory = map(fd, ProtFlags::READ, over)?;
    // SAFETY: as above; at the address of the one before, whose readers find loads of atomics in either.
    Ok(unsafe { memory.cast().as_ref() })
}

fn map(
    fd: BorrowedFd<'_>,
    prot: ProtFlags,
    over: Option<&'static Directory<Peer>>,
) -> Result<NonNull<c_void>, RegionError> {
    let (at, fixed) = match over {
        Some(before) => (ptr::from_ref(before).cast_mut().cast(), MapFlags::FIXED),
        None => (ptr::null_mut(), MapFlags::empty()),
    };
    // SAFETY: where the kernel likes it; or over a whole mapping of the same size that `attach` made, which replaces it at
    // once for all readers.
    let memory = unsafe { mmap(at, LEN, prot, MapFlags::SHARED | fixed, fd, 0) }
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
    fn what_the_maker_writes_the_others_read_and_the_next_takes_its_place() {
        let own = OwnDirectory::create().unwrap();
        let mut keeper = DirectoryKeeper::begin(&own, 7);
        let reader = attach(own.as_fd(), None).unwrap();
        assert!(!reader.has_listener(listener(80)));
        keeper.apply(&own, &DirectoryChange::Listener(listener(80)));
        assert!(reader.has_listener(listener(80)) && reader.instance() == 7);

        let next = OwnDirectory::create().unwrap();
        DirectoryKeeper::begin(&next, 8);
        let again = attach(next.as_fd(), Some(reader)).unwrap();
        assert!(ptr::eq(reader, again) && reader.instance() == 8 && !reader.has_listener(listener(80)));
        // A process that mapped it can read it when its maker has gone.
        drop((own, next));
        assert_eq!(reader.instance(), 8);
    }

    #[test]
    fn nobody_but_the_maker_can_write_it_and_what_is_none_is_refused() {
        let own = OwnDirectory::create().unwrap();
        assert!(attach(own.as_fd(), None).is_err(), "not begun");
        DirectoryKeeper::begin(&own, 7);
        assert!(attach(own.as_fd(), None).is_ok());
        assert!(map(own.as_fd(), ProtFlags::READ | ProtFlags::WRITE, None).is_err());
        assert!(rustix::io::write(&own, b"x").is_err() && rustix::fs::ftruncate(&own, 0).is_err());
        // The same bytes in memory that can shrink under its readers, and in memory that is too small.
        let mut bytes = vec![0; LEN];
        assert_eq!(rustix::io::pread(&own, &mut bytes, 0), Ok(LEN));
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
}
