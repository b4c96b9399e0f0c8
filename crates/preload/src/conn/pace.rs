//! How often a program may take steps that bring connections up to rings between machines.
//!
//! A step lasts some 6 ms in an emulated machine: the agent reads the socket, and memory of windows is mapped. The thread that takes the step does
//! nothing else meanwhile. (It waits 1 ms for the host at most, [`crate::broker::LateStep`].) A thread that serves many new connections would take their
//! steps one after the other, in the way of the bytes of all. So the steps of a process have two thirds of its time.
//!
//! A step is taken in a call of its connection, and that connection may make no other call for long. If steps were taken only while no rest is left, a
//! connection would mostly miss its turn. So some steps may be taken before the rests of earlier ones are over, which then last longer. A lone
//! connection meets no rest at all.
//!
//! Fifty connections of nginx between emulated machines showed what this is for. While only the first step of each side was paced, the p99 of a
//! request was 3 to 5 times that by TCP. Then it was 1.3 times that. With rests as long as the steps it was no better, and the connections came up
//! so late that clients of 12 s had two thirds of the requests.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The rest after a step is this part of the step.
const REST_PART: u32 = 2;
/// How many steps of the usual length, each with its rest, a connection that begins may be ahead of the pace.
const AHEAD_AT_BEGIN: u32 = 1;
/// And a connection that has begun. It goes before those that have not.
const AHEAD: u32 = 3;
/// The part that one step has of the usual length.
const PART: u64 = 4;
/// What lasts less than this part of the usual length was no step: it was refused before anything was done.
const TRIFLE: u64 = 8;
/// A step that took longer counts as one of this length: the process was stopped meanwhile, or the broker does not answer.
const LONGEST_STEP: Duration = Duration::from_millis(250);
/// No connection waits longer than this. An offer lives for some 30 s (protocol T4.7).
const LONGEST_REST: Duration = Duration::from_secs(2);

/// The pace of a process.
#[derive(Debug)]
pub(super) struct Pace {
    /// When the steps so far and the rests after them are over, in nanoseconds of [`crate::sys::now`].
    over_at: AtomicU64,
    /// The usual length of a step, in nanoseconds.
    usual: AtomicU64,
}

/// The pace of this process. A child begins with its parent's, which ends in any case.
pub(super) static PACE: Pace = Pace::new();

impl Pace {
    const fn new() -> Self {
        Self { over_at: AtomicU64::new(0), usual: AtomicU64::new(0) }
    }

    /// Whether a further connection may begin now. The time may be some milliseconds late.
    pub(super) fn may_begin(&self, now: impl FnOnce() -> Duration) -> bool {
        self.allows(now, AHEAD_AT_BEGIN)
    }

    /// Whether a connection that has begun may take its next step now.
    pub(super) fn may_continue(&self, now: impl FnOnce() -> Duration) -> bool {
        self.allows(now, AHEAD)
    }

    fn allows(&self, now: impl FnOnce() -> Duration, ahead: u32) -> bool {
        let over = self.over_at.load(Ordering::Relaxed);
        let usual = Duration::from_nanos(self.usual.load(Ordering::Relaxed));
        over == 0 || now() + with_rest(usual) * ahead >= Duration::from_nanos(over)
    }

    /// A connection to another machine has taken a step, which lasted from `begun` to `now`.
    pub(super) fn took(&self, begun: Duration, now: Duration) {
        let length = now.saturating_sub(begun).min(LONGEST_STEP);
        let add = |over: u64| {
            let over = (Duration::from_nanos(over).max(begun) + with_rest(length)).min(now + LONGEST_REST);
            u64::try_from(over.as_nanos()).ok()
        };
        let _ = self.over_at.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
        let length = u64::try_from(length.as_nanos()).unwrap_or(u64::MAX);
        // Two threads at once lose one step's part.
        let usual = self.usual.load(Ordering::Relaxed);
        if usual == 0 {
            self.usual.store(length, Ordering::Relaxed);
        } else if length >= usual / TRIFLE {
            self.usual.store(usual - usual / PART + length / PART, Ordering::Relaxed);
        }
    }
}

fn with_rest(step: Duration) -> Duration {
    step + step / REST_PART
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn steps_of_many_connections_take_two_thirds_of_the_time() {
        let pace = Pace::new();
        let (mut now, mut at_work, mut begun, mut waiting) = (ms(5000), ms(0), 0, 0);
        while now < ms(15_000) {
            let length = if waiting > 0 && pace.may_continue(|| now) {
                waiting -= 1;
                ms(10)
            } else if pace.may_begin(|| now) {
                (begun, waiting) = (begun + 1, waiting + 1);
                ms(15)
            } else {
                now += ms(1);
                continue;
            };
            pace.took(now, now + length);
            (now, at_work) = (now + length, at_work + length);
        }
        assert!((ms(6600)..ms(6800)).contains(&at_work), "{at_work:?}");
        assert!((260..=275).contains(&begun) && waiting < 3, "{begun} begun, {waiting} of them wait");
    }

    #[test]
    fn lone_connection_meets_no_rest() {
        let pace = Pace::new();
        assert!(pace.may_begin(|| ms(5000)));
        pace.took(ms(5000), ms(5010));
        // Its next step comes at once.
        assert!(pace.may_continue(|| ms(5010)));
    }

    #[test]
    fn connections_that_have_begun_go_first() {
        let pace = Pace::new();
        let mut now = ms(5000);
        while pace.may_begin(|| now) {
            pace.took(now, now + ms(10));
            now += ms(10);
        }
        assert!(pace.may_continue(|| now));
        while pace.may_continue(|| now) {
            pace.took(now, now + ms(10));
            now += ms(10);
        }
        assert!(!pace.may_begin(|| now) && pace.may_begin(|| now + ms(100)));
    }

    #[test]
    fn refused_attempts_leave_usual_length_of_step() {
        let pace = Pace::new();
        pace.took(ms(5000), ms(5010));
        for _ in 0..100 {
            pace.took(ms(5010), ms(5010) + Duration::from_micros(5));
        }
        assert!(pace.may_continue(|| ms(5010)) && pace.may_begin(|| ms(5011)));
        pace.took(ms(5010), ms(5020));
        pace.took(ms(5020), ms(5030));
        assert!(pace.may_continue(|| ms(5030)) && !pace.may_begin(|| ms(5030)));
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
        let bound = hour + Duration::from_secs(1) + LONGEST_REST;
        assert!(!pace.may_continue(|| hour) && pace.may_begin(|| bound));
    }

    #[test]
    fn process_without_such_connections_asks_for_no_time() {
        assert!(Pace::new().may_begin(|| panic!("the time is not needed")));
    }
}
