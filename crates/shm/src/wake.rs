//! The wake-up protocol (protocol W): which side sleeps, when the other must ring, and the fences between.
//!
//! A sleeper stores the cursor value it waits to see passed, fences, and looks again before it sleeps; a mover stores
//! its cursor, fences, and looks whether it has just passed what the sleeper waits for:
//!
//! ```text
//!        sleeper                          mover
//!        wanted = w                       cursor = b        (was a)
//!        -- heavy fence --                -- light fence --
//!        cursor > w ? stay awake          a <= wanted <= b ? ring
//!        else sleep on the doorbell
//! ```
//!
//! With a store-to-load fence on both sides, one of the two always sees the other: no wake-up is lost. The mover's
//! side is paid with every message and the sleeper's only when it sleeps anyway, so where both processes can, the
//! mover's fence is left to the compiler and the sleeper's makes every other core fence, by `membarrier` (W4).

use crate::sync::{Load, Ordering, compiler_fence, fence};

/// The wish of a half that is awake: never ring.
pub const AWAKE: u64 = u64::MAX;

/// How the two sides of a channel order "store mine, load yours".
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fencing {
    /// Both sides fence in full.
    Symmetric,
    /// The mover fences for the compiler only; the sleeper issues an expedited membarrier.
    Asymmetric,
}

impl Fencing {
    /// The mover's fence.
    #[inline]
    pub fn light(self) {
        match self {
            Self::Symmetric => fence(Ordering::SeqCst),
            // Loom cannot model a membarrier, whose effect is that of this fence on the core that it interrupts.
            Self::Asymmetric if cfg!(loom) => fence(Ordering::SeqCst),
            Self::Asymmetric => compiler_fence(Ordering::SeqCst),
        }
    }
}

/// Whether to ring for a cursor that moved from `from` to `to`, given what `wanted` says (W3): if the wish was passed, or is `to` itself.
///
/// A wish for `to` was stored after the cursor had moved. Where several sleepers share the word it may hide an older one that was passed.
#[inline]
pub fn must_ring(wanted: &impl Load<Value = u64>, from: u64, to: u64) -> bool {
    // One load: the peer may change it at any time, and any value is only a wish.
    let wanted = wanted.load(Ordering::Relaxed);
    from <= wanted && wanted <= to && wanted != AWAKE
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::sync::AtomicU64;

    #[test]
    fn rings_exactly_when_the_wish_is_crossed_or_reached() {
        let w = AtomicU64::new(10);
        assert!(!must_ring(&w, 0, 9));
        assert!(must_ring(&w, 0, 10), "stored since: it may hide one that was crossed");
        assert!(must_ring(&w, 0, 11));
        assert!(must_ring(&w, 10, 11));
        assert!(!must_ring(&w, 11, 20), "already passed: it was rung for before");
        w.store(AWAKE, Ordering::Relaxed);
        assert!(!must_ring(&w, 0, u64::MAX));
    }
}
