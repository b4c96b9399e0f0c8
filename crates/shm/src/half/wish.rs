//! The value of a half's wish word, remembered so that it is stored and fenced for only when it changes.

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

    /// A look has found nothing: stores the wish, or lets the driver sleep if the wish is stored already and a look came after it.
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

/// Stores a wish in a word that several sleepers share. Each waits for a cursor to pass its own `until`. The greatest value matters, so a
/// smaller one never replaces it. Returns the new value of the word. The caller then executes the heavy fence and looks again.
///
/// The wish is not withdrawn, since another sleeper may share it. A wish that has come true or is given up costs the peer at most one ring.
pub(super) fn arm_shared(word: &AtomicU64, until: u64) -> u64 {
    let newer = |old: u64| (old == AWAKE || old < until).then_some(until);
    word.fetch_update(Ordering::Relaxed, Ordering::Relaxed, newer).map_or_else(|newest| newest, |_| until)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn latest_of_shared_wishes_stands() {
        let word = AtomicU64::new(AWAKE);
        for (until, says) in [(5, 5), (3, 5), (7, 7), (7, 7)] {
            assert_eq!(arm_shared(&word, until), says, "after a wish for {until}");
            assert_eq!(word.load(Ordering::Relaxed), says, "after a wish for {until}");
        }
    }
}
