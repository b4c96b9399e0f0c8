//! When an offer that was refused for a reason that passes is made again: a machine that is being migrated, say (protocol U14.17).

/// The first pause, in milliseconds. Each later one is twice as long.
const FIRST_MS: u64 = 1000;
/// How often the pause doubles, at most: to 64 seconds.
const MOST_DOUBLINGS: u32 = 6;

/// The pauses between the offers to one destination. Times are in milliseconds of [`crate::sys::coarse_now`].
#[derive(Debug, Clone, Copy)]
pub(super) struct OfferRetry {
    refusals: u32,
    /// 0: only a change of the directory brings the next offer.
    next_at: u64,
}

impl OfferRetry {
    /// No offer was refused.
    pub(super) const NONE: Self = Self { refusals: 0, next_at: 0 };

    /// Whether the next offer may be made though nothing has changed.
    pub(super) fn is_due(self, now: u64) -> bool {
        self.next_at != 0 && now >= self.next_at
    }

    /// The offer was refused, or there is nobody to offer to.
    pub(super) fn put_off(&mut self, now: u64) {
        self.next_at = now + (FIRST_MS << self.refusals.min(MOST_DOUBLINGS));
        self.refusals = self.refusals.saturating_add(1);
    }

    /// The offer is made now. If it is refused, the pause is longer than the last.
    pub(super) fn begin(&mut self) {
        self.next_at = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refused_offer_is_due_again_after_pauses_that_double() {
        let (mut retry, mut now) = (OfferRetry::NONE, 5000);
        assert!(!retry.is_due(u64::MAX), "nothing was refused");
        for seconds in [1, 2, 4, 8, 16, 32, 64, 64] {
            retry.put_off(now);
            let next = now + seconds * 1000;
            assert!(!retry.is_due(next - 1) && retry.is_due(next), "{seconds} s");
            now = next;
            retry.begin();
            assert!(!retry.is_due(u64::MAX), "it is being made");
        }
    }
}
