//! How long to stay awake, and how.
//!
//! As [`partywall_region::wait::Spin`], whose reasons hold here too, but shared by threads and kept in a static. While awake
//! one looks at rings only; the kernel is asked now and then, so that what else is waited for does not starve.

use crate::signals::BlockedSignals;
use crate::{broker, patience, sys};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// Looks before signals are held back and the clock is read: most waits of a busy connection end within them.
const FIRST_LOOKS: u32 = 64;
/// Times that a processor is given up before a sleep.
const YIELDS: u32 = 4;
/// Looks between two readings of the clock.
const BATCH: u32 = 8;
/// The kernel is asked that often.
const ASK: Duration = Duration::from_micros(20);
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
/// Where it starts again after it had stopped.
const FIRST: u32 = 10_000;
/// A sleep up to this would have been worth staying awake for: falling asleep and being woken are part of it.
const SHORT: Duration = Duration::from_micros(100);
/// The initial budget for peers on another machine: doorbells go through serial ports, until sleeps have shown how long these take.
const FAR_FIRST: u32 = 500_000;
/// The longest budget, wherever the peer is.
const FAR_LONGEST: u32 = 4_000_000;

/// How long those who share it stay awake.
#[derive(Debug)]
pub(crate) struct SpinBudget {
    /// The reduction from the longest time, in nanoseconds.
    off: AtomicU32,
    /// The last peers were on another machine.
    is_far: AtomicBool,
}

/// The shortest sleep of late that a peer on another machine has ended, in nanoseconds; 0 for [`FAR_FIRST`].
///
/// Staying awake is worth it for as long as falling asleep and being woken take. On one machine that is a constant of microseconds. Between
/// machines it depends on how doorbells go: some microseconds by interrupts that the processor injects, milliseconds by the serial port of
/// an emulated machine. So it is measured.
static QUICKEST_FAR: AtomicU32 = AtomicU32::new(0);

fn quickest_far() -> u32 {
    match QUICKEST_FAR.load(Ordering::Relaxed) {
        0 => FAR_FIRST,
        known => known,
    }
}

/// Where the peers run that a thread would wait for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Peers {
    /// One at least on another processor.
    Elsewhere,
    /// One at least on another machine.
    Far,
    /// On this one, as far as is known.
    Here,
    /// There are none to be looked at.
    None,
}

/// How staying awake ended.
#[derive(Debug)]
pub(super) enum Awake {
    /// Something is ready.
    Ready,
    /// The kernel has something.
    Kernel,
    /// The spin found no event; signals may be held back.
    Vain,
}

impl SpinBudget {
    /// The full time to begin with; stored so that a new one is all zeros.
    pub(crate) const fn new() -> Self {
        Self { off: AtomicU32::new(0), is_far: AtomicBool::new(false) }
    }

    fn of(&self, longest: u32) -> u32 {
        longest.saturating_sub(self.off.load(Ordering::Relaxed))
    }

    /// The longest spin for the peers of the last wait. The policy's value is for peers on this machine; with 0 no thread spins.
    fn longest(&self) -> u32 {
        match patience::longest_spin() {
            longest if longest == 0 || !self.is_far.load(Ordering::Relaxed) => longest,
            longest => quickest_far().saturating_mul(2).min(FAR_LONGEST).max(longest),
        }
    }

    /// Resets the budget.
    pub(super) fn reset(&self) {
        self.off.store(0, Ordering::Relaxed);
    }

    /// Learns from a sleep.
    pub(super) fn slept(&self, time: Duration) {
        if self.is_far.load(Ordering::Relaxed) {
            let (known, time) = (quickest_far(), u32::try_from(time.as_nanos()).unwrap_or(u32::MAX));
            // It may get slower again, too.
            QUICKEST_FAR.store(time.min(known.saturating_add(known / 8)).max(FIRST), Ordering::Relaxed);
        }
        self.learn(time, self.longest());
    }

    fn learn(&self, time: Duration, longest: u32) {
        let now = self.of(longest);
        let next = if time <= SHORT.max(Duration::from_nanos(u64::from(longest))) {
            now.saturating_mul(2).max(FIRST).min(longest)
        } else if now / 2 < FIRST {
            0
        } else {
            now / 2
        };
        self.off.store(longest.saturating_sub(next), Ordering::Relaxed);
    }

    /// Looks until something is there or the time is over. If the peer needs this processor, this thread yields to it between two looks:
    /// a switch there and back costs less than a sleep that the peer has to end, and the kernel moves two runnable threads apart.
    ///
    /// After the first microseconds signals are blocked: a handler that ran in here would be followed by a sleep, although the program
    /// expects it to interrupt the call. The following sleep unblocks them.
    #[inline]
    pub(super) fn stay_awake(
        &self,
        held: &mut BlockedSignals,
        limit: Option<Duration>,
        peers: impl FnOnce() -> Peers,
        mut look: impl FnMut() -> bool,
        mut ask: impl FnMut() -> bool,
    ) -> Awake {
        // There is time now to see whether the broker is still the same: calls that find what they want do not look.
        broker::tick();
        // The peers of earlier waits show whether it is worth asking for the peers of this one.
        if self.of(self.longest()) == 0 {
            return Awake::Vain;
        }
        let peers = peers();
        self.is_far.store(peers == Peers::Far, Ordering::Relaxed);
        let budget = self.of(self.longest());
        match peers {
            Peers::Elsewhere | Peers::Far => {}
            Peers::Here => return Self::let_peer_run(held, look),
            Peers::None => return Awake::Vain,
        }
        for _ in 0..FIRST_LOOKS {
            if look() {
                return Awake::Ready;
            }
            std::hint::spin_loop();
        }
        let budget = Duration::from_nanos(u64::from(budget)).min(limit.unwrap_or(Duration::MAX));
        held.hold();
        let start = sys::now();
        let (mut asked, mut gave_way) = (start, start);
        let mut contended = 0;
        loop {
            for _ in 0..BATCH {
                if look() {
                    return Awake::Ready;
                }
                std::hint::spin_loop();
            }
            let now = sys::now();
            if now.saturating_sub(start) >= budget {
                return Awake::Vain;
            }
            if now.saturating_sub(asked) >= ASK {
                asked = now;
                if ask() {
                    return Awake::Kernel;
                }
            }
            if now.saturating_sub(gave_way) >= SHARE {
                gave_way = now;
                if let Some(back) = give_way(now) {
                    gave_way = back;
                    contended += u32::from(back.saturating_sub(now) >= OTHERS);
                    if contended == CROWD {
                        // Others have work for this processor, which is more than we have.
                        return if look() { Awake::Ready } else { Awake::Vain };
                    }
                }
            }
        }
    }
}

impl SpinBudget {
    /// Lets the peer run, a few times.
    fn let_peer_run(held: &mut BlockedSignals, mut look: impl FnMut() -> bool) -> Awake {
        let mut now = sys::now();
        if !may_give_way(now) {
            return Awake::Vain;
        }
        held.hold();
        for _ in 0..YIELDS {
            let Some(back) = give_way(now) else { break };
            if look() {
                return Awake::Ready;
            }
            now = back;
        }
        Awake::Vain
    }
}

/// Until when the processor is not given up, in nanoseconds of the monotonic clock.
static HOGGED: AtomicU64 = AtomicU64::new(0);

fn may_give_way(now: Duration) -> bool {
    now.as_nanos() as u64 >= HOGGED.load(Ordering::Relaxed)
}

/// Yields the processor and returns the time at which this thread has it back, or `None` if that would take long.
///
/// A thread that yields to a computing program gets the processor back after milliseconds, whereas a sleeping thread gets it at once when
/// woken. The difference is not known beforehand, so yielding is tried. After a failure it is not tried again until the loss is a small
/// part of the time.
fn give_way(now: Duration) -> Option<Duration> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_sleeps_raise_spin_budget_and_long_ones_clear_it() {
        let (b, longest) = (SpinBudget::new(), 50_000);
        assert_eq!(b.of(longest), 50_000);
        for _ in 0..5 {
            b.learn(Duration::from_millis(5), longest);
        }
        assert_eq!(b.of(longest), 0);
        b.learn(Duration::from_micros(40), longest);
        assert_eq!(b.of(longest), FIRST);
        for _ in 0..5 {
            b.learn(Duration::from_micros(40), longest);
        }
        assert_eq!(b.of(longest), 50_000);
        assert_eq!(b.of(0), 0, "the policy is obeyed at once");
    }

    #[test]
    fn time_awake_for_another_machine_follows_the_shortest_sleeps() {
        let b = SpinBudget::new();
        b.is_far.store(true, Ordering::Relaxed);
        // Threads of other tests may be woken from another machine, too, just then: once more.
        let after_sleeps_of = |time: Duration| {
            for _ in 0..50 {
                b.slept(time);
            }
            b.longest()
        };
        let begin = || {
            QUICKEST_FAR.store(0, Ordering::Relaxed);
            b.longest()
        };
        assert!((0..100).any(|_| begin() == 2 * FAR_FIRST));
        let short = 80_000.max(patience::longest_spin());
        assert!((0..100).any(|_| after_sleeps_of(Duration::from_micros(40)) == short));
        let far = || (after_sleeps_of(Duration::from_secs(3)), b.of(FAR_LONGEST));
        assert!((0..100).any(|_| far() == (FAR_LONGEST, 0)), "who sleeps for long does not stay awake");
        b.is_far.store(false, Ordering::Relaxed);
        assert_eq!(b.longest(), patience::longest_spin());
        QUICKEST_FAR.store(0, Ordering::Relaxed);
    }

    #[test]
    fn kernel_is_asked_while_no_event_comes() {
        let b = SpinBudget::new();
        let (mut looks, mut asks) = (0, 0);
        let look = || {
            looks += 1;
            // Slowly, so that the time for asking comes.
            std::thread::sleep(Duration::from_micros(if looks > 64 { 5 } else { 0 }));
            false
        };
        let mut held = BlockedSignals::none();
        let end = b.stay_awake(
            &mut held,
            None,
            || Peers::Elsewhere,
            look,
            || {
                asks += 1;
                true
            },
        );
        assert!(matches!(end, Awake::Kernel | Awake::Vain), "{end:?}");
        assert!(asks == 1 || matches!(end, Awake::Vain));
        let mut of = |peers| b.stay_awake(&mut held, None, || peers, || true, || true);
        assert!(matches!(of(Peers::None), Awake::Vain), "nothing to look at");
        // Threads of other tests may find out about the processor, too, just then: once more.
        let mut hogged_until = |time| {
            HOGGED.store(time, Ordering::Relaxed);
            of(Peers::Here)
        };
        assert!((0..100).any(|_| matches!(hogged_until(u64::MAX), Awake::Vain)), "hogged");
        assert!((0..100).any(|_| matches!(hogged_until(0), Awake::Ready)), "looked at all the same");
    }
}
