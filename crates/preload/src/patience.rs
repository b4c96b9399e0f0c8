//! How long a call may wait, and how much of that it may be awake.

use crate::sys;
use std::ffi::c_int;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// The time limit of a call. It starts to run when the remaining time is first asked for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TimeLimit {
    limit: Option<Duration>,
    end: Option<Duration>,
}

impl TimeLimit {
    /// No limit.
    pub(crate) const ENDLESS: Self = Self { limit: None, end: None };

    /// A limit.
    pub(crate) const fn of(limit: Duration) -> Self {
        Self { limit: Some(limit), end: None }
    }

    /// As in `poll` and `epoll_wait`: a negative value is no limit.
    pub(crate) fn from_millis(millis: c_int) -> Self {
        u64::try_from(millis).map_or(Self::ENDLESS, |ms| Self::of(Duration::from_millis(ms)))
    }

    /// As `ppoll` has it; `None` if the kernel would refuse it.
    pub(crate) fn from_timespec(t: Option<&libc::timespec>) -> Option<Self> {
        let Some(t) = t else { return Some(Self::ENDLESS) };
        let seconds = u64::try_from(t.tv_sec).ok()?;
        let nanos = u32::try_from(t.tv_nsec).ok().filter(|&n| n < 1_000_000_000)?;
        Some(Self::of(Duration::new(seconds, nanos)))
    }

    /// Up to a time of the monotonic clock.
    pub(crate) fn until(deadline: Option<Duration>) -> Self {
        Self { limit: deadline, end: deadline }
    }

    /// Whether the call may not wait at all.
    #[inline]
    pub(crate) fn is_none(&self) -> bool {
        self.limit.is_some_and(|l| l.is_zero())
    }

    /// The time that is left; `None` means no limit.
    pub(crate) fn left(&mut self) -> Option<Duration> {
        let limit = self.limit?;
        let now = sys::now();
        // A time beyond the range of the clock means no limit.
        let end = match self.end {
            Some(end) => end,
            None => now.checked_add(limit)?,
        };
        self.end = Some(end);
        Some(end.saturating_sub(now))
    }
}

/// Whole milliseconds, rounded up: a sleeper must not wake too early.
pub(crate) fn millis(left: Option<Duration>) -> c_int {
    let Some(left) = left else { return -1 };
    c_int::try_from(left.as_nanos().div_ceil(1_000_000)).unwrap_or(c_int::MAX)
}

/// As the kernel wants it.
pub(crate) fn timespec(left: Duration) -> libc::timespec {
    libc::timespec {
        tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX).min(1 << 40),
        tv_nsec: i64::from(left.subsec_nanos()),
    }
}

/// The shorter of two times; `None` is no limit.
pub(crate) fn shorter(one: Option<Duration>, other: Option<Duration>) -> Option<Duration> {
    match (one, other) {
        (Some(one), Some(other)) => Some(one.min(other)),
        (one, other) => one.or(other),
    }
}

/// The longest time awake in nanoseconds, until the policy says otherwise.
static LONGEST: AtomicU32 = AtomicU32::new(50_000);

/// Sets the longest time that a thread spins.
pub(crate) fn set_longest_spin(time: Duration) {
    LONGEST.store(u32::try_from(time.as_nanos()).unwrap_or(u32::MAX), Ordering::Relaxed);
}

/// The longest time that a thread spins, in nanoseconds.
#[inline]
pub(crate) fn longest_spin() -> u32 {
    LONGEST.load(Ordering::Relaxed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_runs_from_the_first_question_on() {
        let mut p = TimeLimit::of(Duration::from_secs(3600));
        let first = p.left().unwrap();
        assert_eq!(first, Duration::from_secs(3600));
        std::thread::sleep(Duration::from_millis(2));
        assert!(p.left().unwrap() < first);
        let mut endless = TimeLimit::ENDLESS;
        assert_eq!(endless.left(), None);
        assert_eq!(TimeLimit::from_millis(-7).left(), None);
        assert!(TimeLimit::from_millis(0).is_none() && !TimeLimit::from_millis(1).is_none());
    }

    #[test]
    fn times_that_the_kernel_refuses_are_not_guessed_at() {
        let t = |tv_sec, tv_nsec| TimeLimit::from_timespec(Some(&libc::timespec { tv_sec, tv_nsec }));
        assert!(t(-1, 0).is_none() && t(0, 1_000_000_000).is_none() && t(0, -1).is_none());
        assert!(t(0, 0).unwrap().is_none());
        let left = t(i64::MAX, 0).unwrap().left().unwrap();
        assert_eq!(timespec(left).tv_sec, 1 << 40, "what the kernel takes");
    }

    #[test]
    fn milliseconds_are_rounded_up() {
        assert_eq!(millis(None), -1);
        assert_eq!(millis(Some(Duration::ZERO)), 0);
        assert_eq!(millis(Some(Duration::from_nanos(1))), 1);
        assert_eq!(millis(Some(Duration::from_micros(1001))), 2);
        assert_eq!(millis(Some(Duration::from_secs(1 << 40))), c_int::MAX);
    }
}
