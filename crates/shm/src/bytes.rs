//! All copying of bytes that another domain may be changing or reading at the same time.
//!
//! Rust has no `memcpy` that may race: a `&[u8]` over such memory, or `ptr::copy` from it, would let the compiler
//! assume that the bytes hold still (it may read them twice and be surprised). So there is no slice over a peer's memory
//! anywhere, and the copy out of it is made by machine code that the compiler does not look into (`copying.rs`): on
//! x86-64 mostly a call of the platform's `memcpy` from inline assembly; elsewhere, and under Miri, relaxed atomic loads.
//! What arrives in private memory is *some* bytes; whether they make sense is for the caller to check, there.
#![expect(unsafe_code, reason = "copies between private memory and mappings that a peer reads or writes")]

use crate::copying::{copy, copy_still};
use core::marker::PhantomData;

/// Memory that someone else may change at any time. It can be copied from and nothing else.
#[derive(Debug, Clone, Copy)]
pub struct PeerBytes<'a> {
    ptr: *const u8,
    len: usize,
    _mapping: PhantomData<&'a ()>,
}

/// Memory of this side's region: no other process writes it, but a peer may be reading it.
#[derive(Debug)]
pub struct OwnBytes<'a> {
    ptr: *mut u8,
    len: usize,
    _mapping: PhantomData<&'a mut ()>,
}

impl<'a> PeerBytes<'a> {
    /// A view of `len` bytes at `ptr`.
    ///
    /// # Safety
    /// `ptr..ptr+len` must be mapped readable for all of `'a`. It may change at any time by other processes, but this
    /// process must hold no reference into it and not write it through ordinary stores.
    pub const unsafe fn new(ptr: *const u8, len: usize) -> Self {
        Self { ptr, len, _mapping: PhantomData }
    }

    /// How many bytes.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where they are, for system calls that read them (`write`, `send`): the kernel copies racing memory safely.
    pub const fn as_ptr(&self) -> *const u8 {
        self.ptr
    }

    /// The bytes from `from` on, at most `len` of them; empty past the end.
    pub fn slice(&self, from: usize, len: usize) -> Self {
        let from = from.min(self.len);
        let len = len.min(self.len - from);
        // `wrapping_add`: in bounds of the mapping since `from <= self.len`.
        Self { ptr: self.ptr.wrapping_add(from), len, _mapping: PhantomData }
    }

    /// Copies as much as fits into `to` and returns how much that was.
    #[inline]
    pub fn copy_to(&self, to: &mut [u8]) -> usize {
        let n = to.len().min(self.len);
        // SAFETY: `ptr..ptr+n` is mapped readable by `new`'s contract, and `to` is ours, writable and of at least `n`
        // bytes; they cannot overlap, because no reference into a peer's memory may exist.
        unsafe { copy(to.as_mut_ptr(), self.ptr, n) };
        n
    }
}

impl<'a> OwnBytes<'a> {
    /// A view of `len` bytes at `ptr`.
    ///
    /// # Safety
    /// `ptr..ptr+len` must be mapped writable for all of `'a`, and nothing in this process may read or write it
    /// meanwhile but through the result.
    pub const unsafe fn new(ptr: *mut u8, len: usize) -> Self {
        Self { ptr, len, _mapping: PhantomData }
    }

    /// How many bytes.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where they are, for system calls that fill them (`read`, `recv`).
    pub const fn as_mut_ptr(&mut self) -> *mut u8 {
        self.ptr
    }

    /// Copies as much of `from` as fits, starting `at` bytes in, and returns how much that was.
    #[inline]
    pub fn copy_from(&mut self, at: usize, from: &[u8]) -> usize {
        let at = at.min(self.len);
        let n = from.len().min(self.len - at);
        // SAFETY: `at + n <= len`, all mapped writable and ours alone to write by `new`'s contract; `from` cannot overlap
        // it, since no reference into it may exist. A peer that reads what is not committed yet reads garbage, which
        // is its own affair.
        unsafe { copy_still(self.ptr.add(at), from.as_ptr(), n) };
        n
    }

    /// The bytes as a slice to fill in place.
    ///
    /// No other process writes them: the region is sealed against any other writer before anyone else has it (protocol M1), so
    /// exclusive access is what the kernel enforces. Their content is whatever an earlier revolution left.
    pub fn into_mut_slice(self) -> &'a mut [u8] {
        // SAFETY: by `new`'s contract the range is mapped writable and only we access it in this process; other processes
        // can only read it. It was zeroed when the region was made, so it is initialised.
        unsafe { core::slice::from_raw_parts_mut(self.ptr, self.len) }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use alloc::vec;
    use alloc::vec::Vec;

    #[test]
    fn copies_every_length_at_every_alignment() {
        let mut source: Vec<u8> = (0..600u32).map(|i| (i * 7) as u8).collect();
        for len in (0..70).chain([127, 128, 255, 256, 511]) {
            for from in 0..9 {
                let mut to = vec![0xEE; len + 2];
                // SAFETY: a vector of 600 bytes, of which `from..from+len` is within bounds.
                let bytes = unsafe { PeerBytes::new(source.as_ptr().add(from), len) };
                assert_eq!(bytes.copy_to(&mut to[1..=len]), len);
                assert_eq!(&to[1..=len], &source[from..from + len]);
                assert_eq!((to[0], to[len + 1]), (0xEE, 0xEE), "nothing beside it was touched");
            }
        }
        // SAFETY: as above, and nothing else uses the vector meanwhile.
        let mut own = unsafe { OwnBytes::new(source.as_mut_ptr(), 10) };
        assert_eq!(own.copy_from(8, b"abcdef"), 2);
        assert_eq!(own.copy_from(11, b"x"), 0);
        assert_eq!(&own.into_mut_slice()[8..], b"ab");
    }

    #[test]
    fn slices_stay_inside() {
        let source = [1u8, 2, 3, 4];
        // SAFETY: an array of four bytes.
        let bytes = unsafe { PeerBytes::new(source.as_ptr(), 4) };
        assert_eq!(bytes.slice(1, 2).len(), 2);
        assert_eq!(bytes.slice(3, 9).len(), 1);
        assert!(bytes.slice(9, 9).is_empty());
    }
}
