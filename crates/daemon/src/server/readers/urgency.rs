//! When a reader may run at the raised priority (protocol C16.1).
//!
//! A user who asks now and then is answered soon, also while programs keep all processors busy: the reader that takes the
//! user's packets does not wait behind them. A user who sends without pause gains nothing by it. Such a user's reader soon
//! runs at the ordinary priority, and competes like any program of that user.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

use crate::priority;
use crate::server::shares::used_by_this_thread;

/// How long a period lasts.
const PERIOD: Duration = Duration::from_millis(100);
/// How much processor time a reader may use in a period at the raised priority.
const ALLOWANCE: Duration = Duration::from_millis(5);
/// How long a reader that used more runs at the ordinary priority.
const REST: Duration = Duration::from_secs(1);

/// What a reader has used, and the priority that it may have by that.
#[derive(Debug)]
struct TimeAllowance {
    begun: Duration,
    used_before: Duration,
    /// When it may be raised again; `None` while it is raised.
    rests_until: Option<Duration>,
}

impl TimeAllowance {
    /// Not raised yet, and free to be.
    fn new(now: Duration, used: Duration) -> Self {
        Self { begun: now, used_before: used, rests_until: Some(now) }
    }

    /// Whether the priority is to be raised now, or lowered; `None`: it stays.
    fn judge(&mut self, now: Duration, used: Duration) -> Option<bool> {
        if now.saturating_sub(self.begun) >= PERIOD {
            (self.begun, self.used_before) = (now, used);
        }
        if used.saturating_sub(self.used_before) > ALLOWANCE {
            return self.rests_until.replace(now + REST).is_none().then_some(false);
        }
        self.rests_until.take_if(|until| now >= *until).map(|_| true)
    }
}

/// Readers that may raise their priority at a time. Together they use at most 40% of a processor at the raised one, and the time of one packet
/// each.
pub(super) const MOST_URGENT: usize = 8;

/// The priority of the process that calls it, which has one thread.
#[derive(Debug)]
pub(super) struct ReaderUrgency {
    /// `None`: this process may not raise its priority, or has one that the operator chose.
    allowance: Option<TimeAllowance>,
}

impl ReaderUrgency {
    /// Of a process that `may` raise its priority, or may not.
    pub(super) fn new(may: bool) -> Self {
        Self { allowance: (may && priority::is_ordinary()).then(|| TimeAllowance::new(now(), used_by_this_thread())) }
    }

    /// Looks at what was used. To be called before and after each piece of work.
    pub(super) fn look(&mut self) {
        let Some(allowance) = &mut self.allowance else { return };
        let refused = match allowance.judge(now(), used_by_this_thread()) {
            Some(true) => priority::try_raise().is_err(),
            Some(false) => {
                priority::lower();
                false
            }
            None => false,
        };
        if refused {
            self.allowance = None;
        }
    }
}

fn now() -> Duration {
    // A clock that never goes back, and the kernel gives no negative times.
    clock_gettime(ClockId::MonotonicCoarse).try_into().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn reader_that_uses_little_is_raised_once_and_stays() {
        let mut allowance = TimeAllowance::new(MS * 5, MS);
        assert_eq!(allowance.judge(MS * 5, MS), Some(true));
        for at in 1..2000 {
            assert_eq!(allowance.judge(MS * (5 + at), MS + MS * at / 25), None, "{at} ms");
        }
    }

    #[test]
    fn reader_that_uses_more_than_its_allowance_is_lowered_for_a_second_and_raised_again() {
        let mut allowance = TimeAllowance::new(MS, Duration::ZERO);
        assert_eq!(allowance.judge(MS, Duration::ZERO), Some(true));
        assert_eq!(allowance.judge(MS * 3, ALLOWANCE), None);
        assert_eq!(allowance.judge(MS * 4, ALLOWANCE + MS), Some(false));
        assert_eq!(allowance.judge(MS * 900, ALLOWANCE + MS), None, "it rests");
        assert_eq!(allowance.judge(MS * 4 + REST, ALLOWANCE + MS), Some(true));
    }

    #[test]
    fn reader_that_goes_on_without_pause_is_not_raised_however_long_it_waits() {
        let mut allowance = TimeAllowance::new(MS, Duration::ZERO);
        let mut raised = Vec::new();
        for at in 1..5000 {
            if let Some(change) = allowance.judge(MS * at, MS * at / 2) {
                raised.push((at, change));
            }
        }
        assert!(matches!(raised[..], [(1, true), (_, false)]), "{raised:?}");
    }
}
