//! Memory that both measuring processes map: the only unsafe code of the bench.
//!
//! The mechanisms built on it stand for the least that a C program would do, so nothing here checks the other side: it is this
//! same program. What is checked, once and outside the loops, is that every access lies inside the mapping.
#![expect(
    unsafe_code,
    reason = "maps memory and copies in and out of it, as the plain mechanisms to compare with have to"
)]

use std::{
    os::fd::OwnedFd,
    ptr::{self, NonNull},
    sync::atomic::{AtomicU64, Ordering},
};

use rustix::{
    fs::{FallocateFlags, MemfdFlags, fallocate, ftruncate, memfd_create},
    mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap},
};

use partywall::Peeked;

use crate::{
    error::{During, Result},
    measure::sum::WordSum,
};

/// The most that is summed up at once.
pub(crate) const SPAN: usize = 64 << 10;

/// Adds up the first `n` bytes, at most [`SPAN`], of what a Partywall peer has committed, where they lie.
pub(crate) fn sum_peeked(peeked: &Peeked<'_>, n: usize, sum: &mut WordSum) {
    assert!(n <= peeked.len(), "more was to be summed up than there is");
    let start = peeked.as_ptr().cast::<u64>();
    assert!(start.is_aligned(), "messages are whole words, so every span begins with one");
    // Four sums at once, since each addition waits for the last.
    let mut sums = [0u64; 4];
    let word = |at: usize| {
        // SAFETY: `at < n / 8`, so the word lies within the `peeked.len()` bytes that stay mapped while `peeked` is borrowed; it is
        // aligned (checked above). Another process may write it, therefore the load is atomic.
        unsafe { AtomicU64::from_ptr(start.add(at).cast_mut()) }.load(Ordering::Relaxed)
    };
    let words = n / 8;
    for at in (0..words / 4 * 4).step_by(4) {
        for (lane, sum) in sums.iter_mut().enumerate() {
            *sum = sum.wrapping_add(word(at + lane));
        }
    }
    let rest = (words / 4 * 4..words).map(word);
    sum.add_value(sums.into_iter().chain(rest).fold(0, u64::wrapping_add));
}

/// Bytes before the data: room for cursors, each on separate lines.
pub(crate) const CONTROL: usize = 4096;

/// `CONTROL` bytes of control page, and then `data` bytes twice in a row, so that every span of up to `data` bytes is contiguous.
///
/// ```text
/// 0         CONTROL      CONTROL + data    CONTROL + 2 * data
/// | control | data       | the same data   |
/// ```
#[derive(Debug)]
pub(crate) struct RawRingMemory {
    base: NonNull<u8>,
    data: usize,
}

/// New memory for a mapping with `data` bytes of data, a multiple of the page size.
pub(crate) fn create(data: usize) -> Result<OwnedFd> {
    let doing = || format!("allocating {data} bytes of shared memory");
    let fd = memfd_create("partywall-bench", MemfdFlags::CLOEXEC).during(doing())?;
    fallocate(&fd, FallocateFlags::empty(), 0, (CONTROL + data) as u64).during(doing())?;
    Ok(fd)
}

impl RawRingMemory {
    /// Maps what [`create`] made. `data` is a multiple of the page size.
    pub(crate) fn new(fd: &OwnedFd, data: usize) -> Result<Self> {
        let doing = || format!("mapping {data} bytes of shared memory twice");
        let len = CONTROL + 2 * data;
        let rw = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: asks for fresh address space where the kernel likes, so no existing memory is affected.
        let base =
            unsafe { mmap_anonymous(ptr::null_mut(), len, ProtFlags::empty(), MapFlags::PRIVATE) }.during(doing())?;
        let nowhere = || std::io::Error::other("the kernel mapped address 0");
        // From here on a failure drops `mapping`, which gives the address space back.
        let mapping = Self { base: NonNull::new(base.cast()).ok_or_else(nowhere).during(doing())?, data };
        for (at, len, offset) in [(0, CONTROL + data, 0), (CONTROL + data, data, CONTROL as u64)] {
            let to = base.wrapping_byte_add(at);
            // SAFETY: replaces a part of the address space reserved above, which is ours, unused, and at least that long.
            unsafe { mmap(to, len, rw, MapFlags::SHARED | MapFlags::FIXED | MapFlags::POPULATE, fd, offset) }
                .during(doing())?;
        }
        Ok(mapping)
    }

    /// An 8-byte word of the control page.
    pub(crate) fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8) && offset + 8 <= CONTROL, "word {offset} lies outside the control page");
        // SAFETY: inside the mapping and aligned (checked above; the base is page-aligned), lives as long as `self`, and is only
        // ever accessed as an atomic, by this process and the other.
        unsafe { AtomicU64::from_ptr(self.base.as_ptr().add(offset).cast()) }
    }

    /// Copies `from` into the data at `offset`, which may lie in either image.
    pub(crate) fn write(&self, offset: usize, from: &[u8]) {
        assert!(offset + from.len() <= 2 * self.data, "write outside the mapping");
        // SAFETY: inside the mapping (checked above). The other process does not look at these bytes until a cursor is stored with
        // release after this, and no reference to them exists in this one.
        unsafe { ptr::copy_nonoverlapping(from.as_ptr(), self.base.as_ptr().add(CONTROL + offset), from.len()) }
    }

    /// Copies data at `offset` into `to`.
    pub(crate) fn read(&self, offset: usize, to: &mut [u8]) {
        assert!(offset + to.len() <= 2 * self.data, "read outside the mapping");
        // SAFETY: inside the mapping (checked above). The caller has loaded, with acquire, a cursor that the other process stored
        // after writing these bytes, and it does not write them again until told.
        unsafe { ptr::copy_nonoverlapping(self.base.as_ptr().add(CONTROL + offset), to.as_mut_ptr(), to.len()) }
    }
}

impl Drop for RawRingMemory {
    fn drop(&mut self) {
        // SAFETY: the whole range was mapped in `new`, and `word` lends nothing that outlives `self`.
        // Unmapping one's own mapping does not fail.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), CONTROL + 2 * self.data) };
    }
}

/// Shared memory as the kernel makes it, mapped once: what the set-up of a heap is compared with.
#[derive(Debug)]
pub(crate) struct KernelMemory {
    base: NonNull<u8>,
    len: usize,
}

impl KernelMemory {
    /// Maps `len` bytes. They are allocated now if `populated`, else when they are first touched.
    pub(crate) fn new(len: usize, populated: bool) -> Result<Self> {
        let doing = || format!("mapping {len} bytes of shared memory");
        let fd = memfd_create("partywall-bench", MemfdFlags::CLOEXEC).during(doing())?;
        ftruncate(&fd, len as u64).during(doing())?;
        let flags = if populated { MapFlags::SHARED | MapFlags::POPULATE } else { MapFlags::SHARED };
        // SAFETY: asks for fresh address space where the kernel likes, so no existing memory is affected.
        let base = unsafe { mmap(ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, flags, &fd, 0) };
        let nowhere = || std::io::Error::other("the kernel mapped address 0");
        let base = NonNull::new(base.during(doing())?.cast()).ok_or_else(nowhere).during(doing())?;
        Ok(Self { base, len })
    }

    /// Its bytes.
    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: `new` mapped `len` bytes, which stay mapped as long as `self` is borrowed. No other process has the descriptor.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.len) }
    }
}

impl Drop for KernelMemory {
    fn drop(&mut self) {
        // SAFETY: the whole range was mapped in `new`, and `bytes` lends nothing that outlives `self`.
        // Unmapping one's own mapping does not fail.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_memory_begins_with_zeros() {
        for populated in [false, true] {
            let mut memory = KernelMemory::new(10_000, populated).unwrap();
            assert_eq!(memory.bytes(), [0; 10_000]);
            memory.bytes()[9_999] = 1;
        }
    }

    #[test]
    fn two_mappings_and_two_images_are_one_memory() {
        let fd = create(4096).unwrap();
        let (a, b) = (RawRingMemory::new(&fd, 4096).unwrap(), RawRingMemory::new(&fd, 4096).unwrap());
        a.write(4094, b"wrap");
        let mut found = [0; 4];
        b.read(4094, &mut found);
        assert_eq!(&found, b"wrap");
        b.read(0, &mut found[..2]);
        assert_eq!(&found[..2], b"ap");
        a.word(64).store(7, Ordering::Release);
        assert_eq!(b.word(64).load(Ordering::Acquire), 7);
    }
}
