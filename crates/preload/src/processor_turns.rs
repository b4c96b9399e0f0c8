//! A thread that is awake leaves its processor to others that want it.

use crate::sys;
use partywall_region::wait::this_core;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// Others that want this processor get it that often.
const SHARE: Duration = Duration::from_micros(4);
/// How many times as long as giving it up takes the caller keeps it, if that is no longer than [`LONGEST_SHARE`].
const SHARE_FACTOR: u32 = 4;
/// A short time awake has a chance to see others, too.
const LONGEST_SHARE: Duration = Duration::from_micros(25);
/// To give it up takes less than this if no other thread wants it, unless the processor is emulated.
const QUICK: Duration = Duration::from_nanos(1500);
/// How many times as long as usual giving it up takes when others may have had it.
const SLOW_FACTOR: u32 = 2;
/// The number of times that others have had it after which a thread is awake no longer.
const CROWD: u32 = 2;
/// A process that has the processor for this long is not a peer that answers a question.
const HOG: Duration = Duration::from_micros(50);
/// The same, as a multiple of the usual time to give it up.
const HOG_FACTOR: u32 = 8;
/// How many times as long it is not given up then.
const PAUSE_FACTOR: u32 = 32;
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// The turns of a thread that is awake and leaves its processor to others now and then.
#[derive(Debug)]
pub(crate) struct ProcessorTurns {
    start: Duration,
    gave_way: Duration,
    /// How long the processor is kept from then on.
    share: Duration,
    contended: u32,
    /// The times from which the next time away is counted: before the first yield, and after each slow one.
    looked: Option<ThreadTimes>,
}

/// The time, and how long the thread has had a processor until then.
#[derive(Debug, Clone, Copy)]
struct ThreadTimes {
    now: Duration,
    ran: Duration,
}

impl ThreadTimes {
    fn now() -> Self {
        Self { now: sys::now(), ran: sys::thread_time() }
    }

    /// How long the thread was without a processor since an earlier time.
    fn away_since(self, earlier: Self) -> Duration {
        self.now.saturating_sub(earlier.now).saturating_sub(self.ran.saturating_sub(earlier.ran))
    }
}

impl ProcessorTurns {
    /// It is awake from this time on.
    pub(crate) fn from(start: Duration) -> Self {
        Self { start, gave_way: start, share: USUAL.share(), contended: 0, looked: None }
    }

    /// Lets others run if it is time to. Returns whether they have work for this processor, which is more than the caller has.
    #[inline]
    pub(crate) fn are_wanted(&mut self, now: Duration) -> bool {
        if now.saturating_sub(self.gave_way) < self.share {
            return false;
        }
        self.gave_way = now;
        if !may_give_way(now) {
            // A wait for a peer on another machine could last for milliseconds.
            return now.saturating_sub(self.start) >= HOG;
        }
        let earlier = *self.looked.get_or_insert_with(ThreadTimes::now);
        let before = sys::now();
        rustix::thread::sched_yield();
        self.gave_way = sys::now();
        let took = self.gave_way.saturating_sub(before);
        let usual = USUAL.time();
        if took >= QUICK.max(usual * SLOW_FACTOR) {
            let looked = ThreadTimes::now();
            self.looked = Some(looked);
            // An interrupt, or a hypervisor, makes it slow as well, and leaves the processor to the thread as far as the kernel knows.
            if looked.away_since(earlier) >= took / 2 {
                self.contended += 1;
                if took >= HOG.max(usual * HOG_FACTOR) {
                    hog(self.gave_way, took);
                    return true;
                }
                return self.contended >= CROWD;
            }
        }
        USUAL.note(took);
        self.share = USUAL.share();
        false
    }
}

/// How long it takes of late to give up a processor that no other thread wants: a fraction of a microsecond, or many where the processor
/// is emulated. Shared by all threads of the process.
#[derive(Debug)]
struct UsualTime(AtomicU32);

static USUAL: UsualTime = UsualTime(AtomicU32::new(0));

impl UsualTime {
    fn time(&self) -> Duration {
        Duration::from_nanos(u64::from(self.0.load(Ordering::Relaxed)))
    }

    /// How long a thread keeps its processor.
    fn share(&self) -> Duration {
        SHARE.max((self.time() * SHARE_FACTOR).min(LONGEST_SHARE))
    }

    /// Goes an eighth of the way to the new time. A single slow one, as an interrupt makes it, counts for little.
    fn note(&self, time: Duration) {
        let known = self.time();
        let time = time.min(QUICK.max(known * SLOW_FACTOR)).min(HOG);
        let next = (known * 7 + time) / 8;
        if next != known {
            self.0.store(next.as_nanos() as u32, Ordering::Relaxed);
        }
    }
}

/// Until when a processor is not given up, in nanoseconds of the monotonic clock.
static HOGGED: AtomicU64 = AtomicU64::new(0);
/// The processor that this is about: the last one that another program had for long.
static HOGGED_CORE: AtomicU32 = AtomicU32::new(0);

pub(crate) fn may_give_way(now: Duration) -> bool {
    now.as_nanos() as u64 >= HOGGED.load(Ordering::Relaxed) || this_core() != HOGGED_CORE.load(Ordering::Relaxed)
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
        hog(back, away);
    }
    Some(back)
}

/// Another program had the processor for this time.
fn hog(back: Duration, away: Duration) {
    let until = back + (away * PAUSE_FACTOR).min(LONGEST_PAUSE);
    HOGGED_CORE.store(this_core(), Ordering::Relaxed);
    HOGGED.store(until.as_nanos() as u64, Ordering::Relaxed);
}

/// As if others had this processor until then.
#[cfg(test)]
pub(crate) fn hog_until(nanos: u64) {
    HOGGED_CORE.store(this_core(), Ordering::Relaxed);
    HOGGED.store(nanos, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    const SLOW: Duration = Duration::from_micros(9);

    #[test]
    fn usual_time_follows_many_slow_yields_and_not_one() {
        let usual = UsualTime(AtomicU32::new(300));
        usual.note(Duration::from_millis(3));
        assert!(usual.time() < QUICK && usual.share() == SHARE);
        (0..60).for_each(|_| usual.note(SLOW));
        assert!(usual.time() * SLOW_FACTOR > SLOW, "an emulated processor's yields raise no question: {usual:?}");
        assert_eq!(usual.share(), LONGEST_SHARE);
        (0..60).for_each(|_| usual.note(Duration::from_nanos(300)));
        assert_eq!(usual.share(), SHARE);
    }

    #[test]
    fn only_time_without_processor_is_time_away() {
        let at = |now, ran| ThreadTimes { now: Duration::from_micros(now), ran: Duration::from_micros(ran) };
        assert_eq!(at(30, 25).away_since(at(10, 5)), Duration::ZERO, "it ran all the time");
        assert_eq!(at(30, 6).away_since(at(10, 5)), Duration::from_micros(19));
        assert_eq!(at(9, 6).away_since(at(10, 5)), Duration::ZERO, "the clock went back");
    }

    #[test]
    fn long_wait_ends_while_a_program_computes_here() {
        // Another test may say meanwhile that none computes, and this thread may come to another processor: once more.
        let waits_while_hogged = || {
            hog_until(u64::MAX);
            let mut turns = ProcessorTurns::from(Duration::ZERO);
            [HOG / 2, Duration::from_secs(1)].map(|now| turns.are_wanted(now))
        };
        let ends_in_time = (0..100).any(|_| waits_while_hogged() == [false, true]);
        hog_until(0);
        assert!(ends_in_time);
    }

    /// Says at its end that it has ended, also if it panics.
    struct Done<'a>(&'a AtomicBool);

    impl Drop for Done<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    #[test]
    fn thread_that_computes_on_the_same_processor_ends_the_wait() {
        let all = rustix::thread::sched_getaffinity(None).unwrap();
        let mut only = rustix::thread::CpuSet::new();
        only.set((0..rustix::thread::CpuSet::MAX_CPU).find(|&at| all.is_set(at)).unwrap());
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                rustix::thread::sched_setaffinity(None, &only).unwrap();
                while !done.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
            let waiting = scope.spawn(|| {
                let _done = Done(&done);
                rustix::thread::sched_setaffinity(None, &only).unwrap();
                let start = sys::now();
                let mut turns = ProcessorTurns::from(start);
                while !turns.are_wanted(sys::now()) {
                    assert!(sys::now() < start + Duration::from_secs(60), "it is not seen");
                }
            });
            waiting.join().unwrap();
        });
    }
}
