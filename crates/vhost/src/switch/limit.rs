//! Limits of a rate.

/// Tokens that come at a fixed rate, up to a burst, and are taken by what is limited.
#[derive(Debug, Clone)]
pub struct TokenBucket {
    rate: u64,
    burst: u64,
    /// In billionths of a token.
    level: i128,
    last: u64,
}

const SECOND: i128 = 1_000_000_000;

impl TokenBucket {
    /// A full bucket with `rate` tokens a second.
    pub fn new(rate: u64, burst: u64, now: u64) -> Self {
        Self { rate, burst, level: i128::from(burst) * SECOND, last: now }
    }

    /// Takes `n` tokens if there is at least one. Tokens taken beyond the level are a debt: later callers wait for it.
    pub fn take(&mut self, now: u64, n: u64) -> bool {
        self.fill(now);
        if self.level < SECOND {
            return false;
        }
        self.level -= i128::from(n) * SECOND;
        true
    }

    /// The time until a token is there, in nanoseconds; 0 if one is.
    pub fn wait(&mut self, now: u64) -> u64 {
        self.fill(now);
        let missing = (SECOND - self.level).max(0);
        let rate = i128::from(self.rate.max(1));
        u64::try_from((missing + rate - 1) / rate).unwrap_or(u64::MAX)
    }

    fn fill(&mut self, now: u64) {
        let passed = now.saturating_sub(self.last);
        self.last = self.last.max(now);
        let new = i128::from(passed) * i128::from(self.rate);
        self.level = self.level.saturating_add(new).min(i128::from(self.burst) * SECOND);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn burst_passes_and_then_the_rate() {
        let mut bucket = TokenBucket::new(10, 3, 0);
        assert_eq!((0..5).filter(|_| bucket.take(0, 1)).count(), 3);
        assert_eq!(bucket.wait(0), 100_000_000);
        assert!(!bucket.take(99_999_999, 1));
        assert!(bucket.take(100_000_000, 1) && !bucket.take(100_000_000, 1));
        // Time that goes backwards brings nothing.
        assert!(!bucket.take(5, 1));
        // A long pause brings no more than a burst.
        assert_eq!((0..9).filter(|_| bucket.take(u64::MAX, 1)).count(), 3);
    }

    #[test]
    fn large_taking_is_owed_by_later_ones() {
        let mut bucket = TokenBucket::new(10, 1, 0);
        assert!(bucket.take(0, 11) && !bucket.take(1_000_000_000, 1) && bucket.take(1_100_000_000, 1));
    }

    #[test]
    fn bucket_without_a_rate_ends_after_its_burst() {
        let mut bucket = TokenBucket::new(0, 1, 0);
        assert!(bucket.take(0, 1) && !bucket.take(u64::MAX, 1));
    }
}
