//! What a half's wish word says, remembered, so that it is stored and fenced for only when it changes.

use super::Effect;
use crate::sync::{AtomicU64, Ordering};
use crate::wake::AWAKE;

#[derive(Debug)]
pub(super) struct Wish {
    says: u64,
    /// Whether the peer's page was mapped when the word was stored: if not, the fence was not the one that the two have agreed on.
    attached: bool,
}

impl Wish {
    pub(super) const fn new() -> Self {
        Self { says: AWAKE, attached: false }
    }

    /// Nothing was found: stores the wish, or lets the driver sleep if it stands already and was looked at since.
    pub(super) fn arm(&mut self, word: &AtomicU64, until: u64, attached: bool) -> Effect {
        if self.says == until && self.attached == attached {
            return Effect::Sleep { until };
        }
        (self.says, self.attached) = (until, attached);
        word.store(until, Ordering::Relaxed);
        Effect::Fence
    }

    /// The half is awake: the peer need not ring.
    #[inline]
    pub(super) fn withdraw(&mut self, word: &AtomicU64) {
        if self.says != AWAKE {
            self.says = AWAKE;
            word.store(AWAKE, Ordering::Relaxed);
        }
    }
}
