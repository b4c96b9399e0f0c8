//! A word by which an agent tells the programs of its machine that memory which they map is about to go away.
//!
//! A directory lies in a device of the machine. When the device is removed, each program that looks at the directory gets a bus error. A
//! program that sleeps in the kernel cannot be told to unmap it. So each read of the directory comes after a read of this word, which
//! lies in memory that stays mapped.
#![expect(unsafe_code, reason = "maps the page of the word, and makes a reference of the address")]

use crate::{RegionError, memfd};
use partywall_shm::corrupt::Corrupt;
use partywall_shm::layout::{Geometry, PAGE};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::ffi::c_void;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

const LEN: usize = PAGE as usize;

/// The side that revokes.
#[derive(Debug)]
pub struct Revoker {
    memory: OwnedFd,
    word: NonNull<AtomicU32>,
}

// SAFETY: the mapping belongs to the process, not to a thread, and what is reached through it is an atomic.
unsafe impl Send for Revoker {}

impl Revoker {
    /// Makes a page whose word is 0: nothing is revoked.
    ///
    /// # Errors
    /// The system's.
    pub fn new() -> Result<Self, RegionError> {
        let memory = memfd::create(Geometry::new(PAGE, 0)?)?;
        let word = map(memory.as_fd(), ProtFlags::READ | ProtFlags::WRITE, ptr::null_mut())?.cast();
        let this = Self { memory, word };
        // A page that was never written counts as a hole, which readers refuse.
        // SAFETY: just mapped, page-aligned, writable.
        unsafe { this.word.as_ref() }.store(0, Ordering::SeqCst);
        memfd::seal(this.memory.as_fd(), PAGE)?;
        Ok(this)
    }

    /// Tells every program that has the word.
    pub fn revoke(&self) {
        // SAFETY: mapped as long as `self` lives, page-aligned.
        unsafe { self.word.as_ref() }.store(1, Ordering::SeqCst);
    }

    /// Whether it has told them.
    pub fn is_revoked(&self) -> bool {
        // SAFETY: as above.
        unsafe { self.word.as_ref() }.load(Ordering::Relaxed) != 0
    }

    /// The number of its file, by which `/proc/PID/maps` shows the processes that map the word.
    pub fn inode(&self) -> u64 {
        rustix::fs::fstat(&self.memory).map_or(0, |stat| stat.st_ino)
    }

    /// A descriptor for a program; `None` if there are none left.
    pub fn reader(&self) -> Option<OwnedFd> {
        self.memory.try_clone().ok()
    }
}

impl Drop for Revoker {
    fn drop(&mut self) {
        // SAFETY: exactly what `new` mapped, and no reference to it is left.
        let _ = unsafe { munmap(self.word.as_ptr().cast(), LEN) };
    }
}

/// The side that looks. It can be a `static` of a foreign program: it begins with zeros, and its page is never unmapped.
#[derive(Debug)]
pub struct Revocation {
    word: AtomicPtr<AtomicU32>,
}

impl Revocation {
    /// One without a word: nothing is revoked.
    pub const fn new() -> Self {
        Self { word: AtomicPtr::new(ptr::null_mut()) }
    }

    /// Looks at the word of this memory from now on. One thread at a time.
    ///
    /// # Errors
    /// It is not what [`Revoker::new`] makes, or the system's.
    pub fn attach(&self, memory: BorrowedFd<'_>) -> Result<(), RegionError> {
        memfd::verify(memory, Geometry::new(PAGE, 0)?)?;
        // The new word replaces an earlier one in place, so that no thread reads an unmapped page.
        let word = map(memory, ProtFlags::READ, self.word.load(Ordering::Relaxed).cast())?;
        self.word.store(word.as_ptr().cast(), Ordering::Release);
        Ok(())
    }

    /// Whether the memory that this is about is going away.
    #[inline]
    pub fn is_revoked(&self) -> bool {
        // SAFETY: a page that stays mapped once it is here, of memory that cannot shrink; only loads.
        unsafe { self.word.load(Ordering::Acquire).as_ref() }.is_some_and(|word| word.load(Ordering::Acquire) != 0)
    }
}

impl Default for Revocation {
    fn default() -> Self {
        Self::new()
    }
}

fn map(fd: BorrowedFd<'_>, prot: ProtFlags, over: *mut c_void) -> Result<NonNull<c_void>, RegionError> {
    let fixed = if over.is_null() { MapFlags::empty() } else { MapFlags::FIXED };
    // SAFETY: where the kernel likes it; or over the page that `attach` mapped, which replaces it at once for all readers.
    let memory = unsafe { mmap(over, LEN, prot, MapFlags::SHARED | fixed, fd, 0) }
        .map_err(|e| RegionError::system("map the word of revocation", PAGE, e))?;
    NonNull::new(memory).ok_or_else(|| Corrupt::BadRegion.into())
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    use super::*;

    #[test]
    fn word_is_seen_by_readers_and_replaced_by_the_next() {
        let seen = Revocation::new();
        assert!(!seen.is_revoked());
        let (first, second) = (Revoker::new().unwrap(), Revoker::new().unwrap());
        seen.attach(first.reader().unwrap().as_fd()).unwrap();
        assert!(!seen.is_revoked());
        first.revoke();
        assert!(seen.is_revoked());
        drop(first);
        assert!(seen.is_revoked(), "its maker has gone");
        seen.attach(second.reader().unwrap().as_fd()).unwrap();
        assert!(!seen.is_revoked());
    }

    #[test]
    fn memory_that_can_shrink_is_refused() {
        let plain = rustix::fs::memfd_create("x", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&plain, PAGE).unwrap();
        let seen = Revocation::new();
        assert!(seen.attach(plain.as_fd()).is_err() && !seen.is_revoked());
        let writer = Revoker::new().unwrap();
        assert!(rustix::io::write(writer.reader().unwrap(), b"x").is_err(), "only its maker writes");
    }
}
