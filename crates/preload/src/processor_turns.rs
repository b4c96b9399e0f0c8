//! A thread that is awake leaves its processor to others that want it.

use crate::sys;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Others that want this processor get it that often.
const SHARE: Duration = Duration::from_micros(4);
/// To give it up takes so long if there are any, and less if there are none.
const OTHERS: Duration = Duration::from_nanos(1500);
/// So often others have had it when one leaves it to them.
const CROWD: u32 = 2;
/// A process that has the processor for this long is not a peer that answers a question.
const HOG: Duration = Duration::from_micros(50);
/// How many times as long it is not given up then.
const PAUSE_FACTOR: u32 = 32;
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// The turns of a thread that is awake and leaves its processor to others now and then.
#[derive(Debug)]
pub(crate) struct ProcessorTurns {
    gave_way: Duration,
    contended: u32,
}

impl ProcessorTurns {
    /// It is awake from this time on.
    pub(crate) const fn from(start: Duration) -> Self {
        Self { gave_way: start, contended: 0 }
    }

    /// Lets others run if it is time to. Returns whether they have work for this processor, which is more than the caller has.
    #[inline]
    pub(crate) fn are_wanted(&mut self, now: Duration) -> bool {
        if now.saturating_sub(self.gave_way) < SHARE {
            return false;
        }
        self.gave_way = now;
        if let Some(back) = give_way(now) {
            self.gave_way = back;
            self.contended += u32::from(back.saturating_sub(now) >= OTHERS);
        }
        self.contended == CROWD
    }
}

/// Until when the processor is not given up, in nanoseconds of the monotonic clock.
static HOGGED: AtomicU64 = AtomicU64::new(0);

pub(crate) fn may_give_way(now: Duration) -> bool {
    now.as_nanos() as u64 >= HOGGED.load(Ordering::Relaxed)
}

/// Yields the processor and returns the time at which this thread has it back, or `None` if that would take long.
///
/// A thread that yields to a computing program gets the processor back after milliseconds, whereas a sleeping thread gets it at once when
/// woken. The difference is not known beforehand, so yielding is tried. After a failure it is not tried again until the loss is a small
/// part of the time.
pub(crate) fn give_way(now: Duration) -> Option<Duration> {
    if !may_give_way(now) {
        return None;
    }
    rustix::thread::sched_yield();
    let back = sys::now();
    let away = back.saturating_sub(now);
    if away >= HOG {
        let until = back + (away * PAUSE_FACTOR).min(LONGEST_PAUSE);
        HOGGED.store(until.as_nanos() as u64, Ordering::Relaxed);
    }
    Some(back)
}

/// As if others had the processor until then.
#[cfg(test)]
pub(crate) fn hog_until(nanos: u64) {
    HOGGED.store(nanos, Ordering::Relaxed);
}
