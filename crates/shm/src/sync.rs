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

/// A word of a peer's region. It can only be loaded: the region is mapped read-only, where a store would be fatal.
#[derive(Debug)]
#[repr(transparent)]
pub struct ReadOnly<T>(T);

/// The operations of every word, whichever side may store to it.
pub trait Load {
    /// The type of its value.
    type Value;

    /// Loads it.
    fn load(&self, order: Ordering) -> Self::Value;
}

macro_rules! words {
    ($($word:ident: $value:ident,)*) => { $(
        impl Load for $word {
            type Value = $value;

            #[inline]
            fn load(&self, order: Ordering) -> $value {
                $word::load(self, order)
            }
        }

        impl ReadOnly<$word> {
            /// Loads it. Memory that is mapped read-only takes [`Ordering::Relaxed`] alone: see [`load_acquire`].
            #[inline]
            pub fn load(&self, order: Ordering) -> $value {
                self.0.load(order)
            }
        }

        impl Load for ReadOnly<$word> {
            type Value = $value;

            #[inline]
            fn load(&self, order: Ordering) -> $value {
                self.0.load(order)
            }
        }
    )* };
}

words! { AtomicU32: u32, AtomicU64: u64, }

/// The owner of the words of a structure: this side or the peer. The layout is the same for both; the permitted operations differ.
pub trait Access: core::fmt::Debug {
    /// A word of 32 bits.
    type U32: Load<Value = u32> + core::fmt::Debug;
    /// A word of 64 bits.
    type U64: Load<Value = u64> + core::fmt::Debug;
}

/// One's own words: to load and to store.
#[derive(Debug, Clone, Copy)]
pub struct Own;

/// A peer's words: to load.
#[derive(Debug, Clone, Copy)]
pub struct Peer;

impl Access for Own {
    type U32 = AtomicU32;
    type U64 = AtomicU64;
}

impl Access for Peer {
    type U32 = ReadOnly<AtomicU32>;
    type U64 = ReadOnly<AtomicU64>;
}

/// An acquiring load from memory that may be mapped read-only.
///
/// Rust promises that small *relaxed* loads work on read-only memory and no other atomic access; the fence after it makes
/// it acquire. On x86-64 both together are one plain load.
#[inline]
pub fn load_acquire(word: &impl Load<Value = u64>) -> u64 {
    let value = word.load(Ordering::Relaxed);
    fence(Ordering::Acquire);
    value
}

/// [`load_acquire`] of 32 bits.
#[inline]
pub fn load_acquire_u32(word: &impl Load<Value = u32>) -> u32 {
    let value = word.load(Ordering::Relaxed);
    fence(Ordering::Acquire);
    value
}
