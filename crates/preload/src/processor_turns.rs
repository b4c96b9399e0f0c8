//! A thread that is awake leaves its processor to others that want it.

use crate::sys;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// Others that want this processor get it that often.
const SHARE: Duration = Duration::from_micros(4);
/// How many times as long as giving it up takes the caller keeps it, at least.
const SHARE_FACTOR: u32 = 4;
/// To give it up takes less than this if no other thread wants it, unless the processor is emulated.
const QUICK: Duration = Duration::from_nanos(1500);
/// How many times as long as usual giving it up takes when others may have had it.
const SLOW_FACTOR: u32 = 2;
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
    start: Duration,
    gave_way: Duration,
    contended: u32,
    /// [`sys::involuntary_switches`] of this thread before it last gave way. `None` before the first time.
    switches: Option<u64>,
}

impl ProcessorTurns {
    /// It is awake from this time on.
    pub(crate) const fn from(start: Duration) -> Self {
        Self { start, gave_way: start, contended: 0, switches: None }
    }

    /// Lets others run if it is time to. Returns whether they have work for this processor, which is more than the caller has.
    #[inline]
    pub(crate) fn are_wanted(&mut self, now: Duration) -> bool {
        if now.saturating_sub(self.gave_way) < SHARE.max(USUAL.time() * SHARE_FACTOR) {
            return false;
        }
        self.gave_way = now;
        if !may_give_way(now) {
            // Who waits for a peer on another machine may be awake for much longer than this.
            return now.saturating_sub(self.start) >= HOG;
        }
        if self.switches.is_none() {
            self.switches = sys::involuntary_switches();
        }
        let before = sys::now();
        rustix::thread::sched_yield();
        self.gave_way = sys::now();
        let away = self.gave_way.saturating_sub(before);
        if self.others_ran(away, &USUAL, sys::involuntary_switches) {
            self.contended += 1;
            if away >= HOG {
                hog(self.gave_way, away);
                return true;
            }
        }
        self.contended >= CROWD
    }

    /// Whether another thread has run while this one had given up its processor for this time. The kernel is asked only if the time says
    /// that one may have run.
    fn others_ran(&mut self, away: Duration, usual: &UsualTime, switches: impl FnOnce() -> Option<u64>) -> bool {
        if away >= QUICK.max(usual.time() * SLOW_FACTOR) {
            let now = switches();
            // If the kernel does not say, the time decides.
            if now.is_none() || std::mem::replace(&mut self.switches, now) != now {
                return true;
            }
        }
        usual.note(away);
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

    /// An eighth of the way to the new time. One that an interrupt made long counts as [`HOG`].
    fn note(&self, time: Duration) {
        let (known, time) = (self.time(), time.min(HOG));
        let next = (known * 7 + time) / 8;
        self.0.store(next.as_nanos() as u32, Ordering::Relaxed);
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
        hog(back, away);
    }
    Some(back)
}

/// Another program had the processor for this time.
fn hog(back: Duration, away: Duration) {
    let until = back + (away * PAUSE_FACTOR).min(LONGEST_PAUSE);
    HOGGED.store(until.as_nanos() as u64, Ordering::Relaxed);
}

/// As if others had the processor until then.
#[cfg(test)]
pub(crate) fn hog_until(nanos: u64) {
    HOGGED.store(nanos, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLOW: Duration = Duration::from_micros(9);

    #[test]
    fn slow_processor_without_others_is_not_left() {
        let usual = UsualTime(AtomicU32::new(0));
        let mut turns = ProcessorTurns { switches: Some(7), ..ProcessorTurns::from(Duration::ZERO) };
        let verdicts = [(); 30].map(|()| turns.others_ran(SLOW, &usual, || Some(7)));
        assert_eq!(verdicts, [false; 30]);
        assert!(!turns.others_ran(SLOW, &usual, || unreachable!("the usual time raises no question")));
        assert!(turns.others_ran(SLOW * 3, &usual, || Some(8)), "another thread has run");
        assert!(!turns.others_ran(SLOW * 3, &usual, || Some(8)), "an interrupt only");
    }

    #[test]
    fn others_on_fast_processor_are_seen() {
        let usual = UsualTime(AtomicU32::new(0));
        let mut turns = ProcessorTurns { switches: Some(0), ..ProcessorTurns::from(Duration::ZERO) };
        assert!(!turns.others_ran(QUICK / 4, &usual, || unreachable!("quick enough for an idle processor")));
        let mut count = 0;
        let verdicts = [(); 30].map(|()| {
            turns.others_ran(QUICK, &usual, || {
                count += 1;
                Some(count)
            })
        });
        assert_eq!(verdicts, [true; 30], "times with others are not usual times");
        assert!(turns.others_ran(QUICK, &usual, || None), "a filter of system calls refuses the question");
    }

    #[test]
    fn long_wait_ends_while_a_program_computes_here() {
        // Another test may say meanwhile that none computes: once more.
        let waits_while_hogged = || {
            hog_until(u64::MAX);
            let mut turns = ProcessorTurns::from(Duration::ZERO);
            [HOG / 2, Duration::from_secs(1)].map(|now| turns.are_wanted(now))
        };
        let ends_in_time = (0..100).any(|_| waits_while_hogged() == [false, true]);
        hog_until(0);
        assert!(ends_in_time);
    }

    #[test]
    fn involuntary_switches_are_counted_when_another_thread_runs() {
        let mut only = rustix::thread::CpuSet::new();
        let all = rustix::thread::sched_getaffinity(None).unwrap();
        only.set((0..rustix::thread::CpuSet::MAX_CPU).find(|&at| all.is_set(at)).unwrap());
        let done = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            let on_one = |work: fn(&std::sync::atomic::AtomicBool)| {
                let done = &done;
                move || {
                    rustix::thread::sched_setaffinity(None, &only).unwrap();
                    work(done);
                }
            };
            let yielding = scope.spawn(on_one(|done| {
                while !done.load(Ordering::Relaxed) {
                    rustix::thread::sched_yield();
                }
            }));
            let counting = scope.spawn(on_one(|done| {
                let before = sys::involuntary_switches().unwrap();
                while sys::involuntary_switches().unwrap() < before + 10 {
                    rustix::thread::sched_yield();
                }
                done.store(true, Ordering::Relaxed);
            }));
            counting.join().unwrap();
            yielding.join().unwrap();
        });
    }
}
