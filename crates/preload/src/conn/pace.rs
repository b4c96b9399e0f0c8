//! How often a program may begin to bring connections up to rings between machines.
//!
//! A step of such a connection is read by the machine's agent, some 1 ms in an emulated machine, and the thread that takes it does nothing else
//! meanwhile. (It does not wait for the host, [`crate::broker::LateStep`].) So steps that are begun at once, by many new connections, would be in
//! the way of the bytes of all.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The rest after a step, in lengths of that step. A rest of 3 was tried: fifty connections of nginx between emulated machines came up later, and
/// their p99 was no better.
const REST: u32 = 1;
/// A step that took longer counts as one of this length: the process was stopped meanwhile, or the broker does not answer.
const LONGEST_STEP: Duration = Duration::from_millis(250);
/// No connection waits longer than this. An offer lives for some 30 s (protocol T4.7).
const LONGEST_REST: Duration = Duration::from_secs(2);

/// The pace of a process.
#[derive(Debug)]
pub(super) struct Pace {
    /// When the next connection may begin, in nanoseconds of [`crate::sys::now`].
    next_at: AtomicU64,
}

/// The pace of this process. A child begins with its parent's, which ends in any case.
pub(super) static PACE: Pace = Pace::new();

impl Pace {
    const fn new() -> Self {
        Self { next_at: AtomicU64::new(0) }
    }

    /// Whether a further connection may begin now. The time may be some milliseconds late.
    pub(super) fn may_begin(&self, now: impl FnOnce() -> Duration) -> bool {
        let next = self.next_at.load(Ordering::Relaxed);
        next == 0 || now() >= Duration::from_nanos(next)
    }

    /// A connection to another machine has taken a step, which lasted from `begun` to `now`. Steps that end a handshake are not put off, but
    /// they count.
    pub(super) fn took(&self, begun: Duration, now: Duration) {
        let share = now.saturating_sub(begun).min(LONGEST_STEP) * (1 + REST);
        let add = |next: u64| {
            let next = (Duration::from_nanos(next).max(begun) + share).min(now + LONGEST_REST);
            u64::try_from(next.as_nanos()).ok()
        };
        let _ = self.next_at.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_begin_in_half_of_the_time() {
        let ms = Duration::from_millis;
        let pace = Pace::new();
        let (mut now, mut at_work, mut begun) = (ms(5000), ms(0), 0);
        while now < ms(15_000) {
            if !pace.may_begin(|| now) {
                now += ms(1);
                continue;
            }
            // The second step of a connection is not put off.
            for step in [ms(15), ms(10)] {
                pace.took(now, now + step);
                (now, at_work) = (now + step, at_work + step);
            }
            begun += 1;
        }
        assert_eq!((begun, at_work), (200, ms(5000)));
    }

    #[test]
    fn rest_is_bounded_whatever_steps_took() {
        let (pace, hour) = (Pace::new(), Duration::from_secs(3600));
        // The process was stopped.
        pace.took(Duration::ZERO, hour);
        assert!(pace.may_begin(|| hour));
        for _ in 0..100 {
            pace.took(hour, hour + Duration::from_secs(1));
        }
        let bound = hour + Duration::from_secs(3);
        assert!(!pace.may_begin(|| bound - Duration::from_millis(1)) && pace.may_begin(|| bound));
    }

    #[test]
    fn process_without_such_connections_asks_for_no_time() {
        assert!(Pace::new().may_begin(|| panic!("the time is not needed")));
    }
}
