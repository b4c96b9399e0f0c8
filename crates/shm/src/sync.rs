//! The atomics that shared structures are made of: `core`'s, or loom's when a model is checked.
//!
//! Loom's atomics are larger than real ones, so a structure made of them cannot be laid over a mapping: models build
//! their control pages on the heap, and every size assertion is under `cfg(not(loom))`.

#[cfg(not(loom))]
pub use core::sync::atomic::{AtomicU32, AtomicU64, Ordering, compiler_fence, fence};
#[cfg(loom)]
pub use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

/// Loom has no compiler fence to model; it never reorders by compiler.
#[cfg(loom)]
pub fn compiler_fence(_: Ordering) {}

/// An acquiring load from memory that may be mapped read-only.
///
/// Rust promises that small *relaxed* loads work on read-only memory and no other atomic access; the fence after it makes
/// it acquire. On x86-64 both together are one plain load.
#[inline]
pub fn load_acquire(word: &AtomicU64) -> u64 {
    let value = word.load(Ordering::Relaxed);
    fence(Ordering::Acquire);
    value
}

/// [`load_acquire`] of 32 bits.
#[inline]
pub fn load_acquire_u32(word: &AtomicU32) -> u32 {
    let value = word.load(Ordering::Relaxed);
    fence(Ordering::Acquire);
    value
}
