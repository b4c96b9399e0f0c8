//! The counters of a half, in its region. Any process that may map the region can read them (as Aeron's counters file).
//!
//! They are for people. Only the owner writes them, with plain stores. No decision depends on a peer's counters.

use crate::sync::{Access, AtomicU64, Load, Ordering, Own};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// One line of counters, written by one half.
        #[derive(Debug)]
        #[repr(C, align(64))]
        pub struct Counters<A: Access = Own> { $($(#[$doc])* pub $name: A::U64,)* }

        /// A copy of [`Counters`] at one moment. Values of different counters may be from slightly different moments.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct Snapshot { $($(#[$doc])* pub $name: u64,)* }

        impl Counters {
            /// Counters that are all zero.
            pub fn new() -> Self {
                Self { $($name: AtomicU64::new(0),)* }
            }
        }

        impl Default for Counters {
            fn default() -> Self {
                Self::new()
            }
        }

        impl<A: Access> Counters<A> {
            /// Reads all counters once.
            pub fn snapshot(&self) -> Snapshot {
                Snapshot { $($name: self.$name.load(Ordering::Relaxed),)* }
            }
        }

        impl Snapshot {
            /// The counters by name, in the order of the layout.
            pub fn named(&self) -> [(&'static str, u64); 8] {
                [$((stringify!($name), self.$name),)*]
            }
        }
    };
}

counters! {
    /// Bytes committed or released.
    bytes,
    /// Calls that committed or released something; for message channels, messages.
    messages,
    /// Times that nothing could be done at once: the ring was full, or empty.
    stalls,
    /// Doorbells rung.
    bells_rung,
    /// Doorbells not rung because the peer was awake.
    bells_saved,
    /// Times this half slept on its doorbell.
    sleeps,
    /// Waits that ended while still spinning.
    spins,
    /// Times the ring was replaced by one of another size.
    switches,
}

/// Adds to a counter of this half: a load and a store, since only this half writes it.
#[inline]
pub fn add(counter: &AtomicU64, n: u64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn snapshot_names_counters_with_added_values() {
        let c = Counters::new();
        add(&c.bytes, 5);
        add(&c.bytes, 6);
        add(&c.switches, 1);
        let named = c.snapshot().named();
        assert_eq!(named[0], ("bytes", 11));
        assert_eq!(named[7], ("switches", 1));
        assert_eq!(core::mem::size_of::<Counters>(), 64);
    }
}
