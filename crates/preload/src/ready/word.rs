//! Words that a lock guards, in statics: atomics for the compiler's sake, read and written as if they were plain.

use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};

/// Plain access to an atomic word; the order comes from the lock that guards it.
pub(super) trait AtomicWord {
    /// The type of its value.
    type Value;
    /// Reads it.
    fn get(&self) -> Self::Value;
    /// Writes it.
    fn put(&self, value: Self::Value);
}

macro_rules! word {
    ($($atomic:ty: $value:ty),*) => {
        $(impl AtomicWord for $atomic {
            type Value = $value;
            #[inline(always)]
            fn get(&self) -> $value {
                self.load(Ordering::Relaxed)
            }
            #[inline(always)]
            fn put(&self, value: $value) {
                self.store(value, Ordering::Relaxed);
            }
        })*
    };
}

word!(AtomicU32: u32, AtomicU64: u64, AtomicI32: i32);
