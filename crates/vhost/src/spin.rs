//! For how long an engine looks for work before it sleeps.

use std::time::Duration;

/// Spinning as long as it pays: longer if what ended the last sleep came soon, and shorter if it did not. Times are nanoseconds since any start.
#[derive(Debug)]
pub(crate) struct AdaptiveSpin {
    longest: u64,
    now: u64,
    last_work: u64,
}

impl AdaptiveSpin {
    pub(crate) fn new(longest: Duration) -> Self {
        let longest = nanoseconds(longest);
        Self { longest, now: longest, last_work: 0 }
    }

    pub(crate) fn worked(&mut self, at: u64) {
        self.last_work = at;
    }

    /// Whether work is so near that looking for it is cheaper than sleeping.
    pub(crate) fn goes_on(&self, at: u64) -> bool {
        at.saturating_sub(self.last_work) < self.now
    }

    /// A sleep has ended, by an event or because its time was over.
    pub(crate) fn slept(&mut self, from: u64, to: u64, by_event: bool) {
        let near = by_event && to.saturating_sub(from) < self.longest;
        let wanted = if near { (self.now * 2).max(1_000) } else { self.now / 2 };
        self.now = wanted.min(self.longest);
        if by_event {
            self.last_work = to;
        }
    }
}

pub(crate) fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spin_grows_after_early_work_and_shrinks_after_late_work() {
        let mut spin = AdaptiveSpin::new(Duration::from_micros(50));
        spin.worked(1_000);
        assert!(spin.goes_on(50_999) && !spin.goes_on(51_000));
        for _ in 0..20 {
            spin.slept(0, 1_000_000, false);
        }
        spin.worked(2_000_000);
        assert!(!spin.goes_on(2_000_000), "work came late each time");
        spin.slept(3_000_000, 3_010_000, true);
        assert!(spin.goes_on(3_010_999) && !spin.goes_on(3_011_000), "it begins again with a microsecond");
        for _ in 0..20 {
            spin.slept(4_000_000, 4_010_000, true);
        }
        assert!(spin.goes_on(4_059_999) && !spin.goes_on(4_060_000), "no longer than the longest");
        let mut never = AdaptiveSpin::new(Duration::ZERO);
        never.slept(0, 0, true);
        assert!(!never.goes_on(0));
    }
}
