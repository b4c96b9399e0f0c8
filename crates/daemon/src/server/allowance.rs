//! How long a thread may run at a raised priority.
//!
//! A thread that uses little processor time keeps the priority. One that uses more than its allowance in a period runs at the usual
//! priority for a while, so it cannot take a processor from all other programs.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Limits of the time at a raised priority.
#[derive(Debug, Clone, Copy)]
pub(super) struct AllowanceLimits {
    /// How long a period lasts.
    pub(super) period: Duration,
    /// Processor time that the thread may use in a period.
    pub(super) allowance: Duration,
    /// How long a thread that used more runs at the usual priority.
    pub(super) rest: Duration,
}

/// What a thread has used, and whether it may run at the raised priority.
#[derive(Debug)]
pub(super) struct TimeAllowance {
    limits: AllowanceLimits,
    begun: Duration,
    used_before: Duration,
    /// When the priority may be raised again; `None` while it is raised.
    rests_until: Option<Duration>,
}

impl TimeAllowance {
    /// For a thread that is not raised yet, and may be. `used` is the processor time that it has used so far.
    pub(super) fn new(limits: AllowanceLimits, now: Duration, used: Duration) -> Self {
        Self { limits, begun: now, used_before: used, rests_until: Some(now) }
    }

    /// `Some(true)`: raise the priority now. `Some(false)`: lower it. `None`: leave it.
    pub(super) fn judge(&mut self, now: Duration, used: Duration) -> Option<bool> {
        if now.saturating_sub(self.begun) >= self.limits.period {
            (self.begun, self.used_before) = (now, used);
        }
        if used.saturating_sub(self.used_before) > self.limits.allowance {
            return self.rests_until.replace(now + self.limits.rest).is_none().then_some(false);
        }
        self.rests_until.take_if(|until| now >= *until).map(|_| true)
    }
}

/// A clock that never goes back and costs little.
pub(super) fn coarse() -> Duration {
    // The kernel reports no negative times.
    clock_gettime(ClockId::MonotonicCoarse).try_into().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);
    const LIMITS: AllowanceLimits = AllowanceLimits {
        period: Duration::from_millis(100),
        allowance: Duration::from_millis(5),
        rest: Duration::from_secs(1),
    };

    #[test]
    fn thread_that_uses_little_is_raised_once_and_stays() {
        let mut allowance = TimeAllowance::new(LIMITS, MS * 5, MS);
        assert_eq!(allowance.judge(MS * 5, MS), Some(true));
        for at in 1..2000 {
            assert_eq!(allowance.judge(MS * (5 + at), MS + MS * at / 25), None, "{at} ms");
        }
    }

    #[test]
    fn thread_beyond_its_allowance_is_lowered_and_raised_after_rest() {
        let mut allowance = TimeAllowance::new(LIMITS, MS, Duration::ZERO);
        assert_eq!(allowance.judge(MS, Duration::ZERO), Some(true));
        assert_eq!(allowance.judge(MS * 3, LIMITS.allowance), None);
        assert_eq!(allowance.judge(MS * 4, LIMITS.allowance + MS), Some(false));
        assert_eq!(allowance.judge(MS * 900, LIMITS.allowance + MS), None, "it rests");
        assert_eq!(allowance.judge(MS * 4 + LIMITS.rest, LIMITS.allowance + MS), Some(true));
    }

    #[test]
    fn thread_without_pause_is_not_raised_again() {
        let mut allowance = TimeAllowance::new(LIMITS, MS, Duration::ZERO);
        let mut raised = Vec::new();
        for at in 1..5000 {
            if let Some(change) = allowance.judge(MS * at, MS * at / 2) {
                raised.push((at, change));
            }
        }
        assert!(matches!(raised[..], [(1, true), (_, false)]), "{raised:?}");
    }
}
