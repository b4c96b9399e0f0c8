//! How long it is worth to stay awake before a sleep, as earlier sleeps have shown.
//!
//! Staying awake is worth it for as long as falling asleep and being woken take. On one machine that is a constant of microseconds. Between
//! machines it depends on what wakes a sleeper: some microseconds by interrupts that the processor injects, milliseconds by the serial port
//! or the network card of an emulated machine. So it is measured.

use crate::patience::longest_spin;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// A budget below this is not worth it, and one that had been used up starts again here or a little above.
const FIRST: u32 = 10_000;
/// A sleep up to this would have been worth staying awake for: falling asleep and being woken are part of it.
const SHORT: Duration = Duration::from_micros(100);
/// The initial budget for peers on another machine, until sleeps have shown how long these take.
const FAR_FIRST: u32 = 500_000;
/// The longest budget, wherever the peer is.
const FAR_LONGEST: u32 = 4_000_000;

/// The shortest sleep of late that a peer on another machine has ended, in nanoseconds; 0 for [`FAR_FIRST`].
#[derive(Debug)]
pub(crate) struct QuickestSleep(AtomicU32);

impl QuickestSleep {
    pub(crate) const fn new() -> Self {
        Self(AtomicU32::new(0))
    }

    fn nanos(&self) -> u32 {
        match self.0.load(Ordering::Relaxed) {
            0 => FAR_FIRST,
            known => known,
        }
    }

    fn note(&self, time: Duration) {
        let (known, time) = (self.nanos(), u32::try_from(time.as_nanos()).unwrap_or(u32::MAX));
        // It may get slower again, too.
        self.0.store(time.min(known.saturating_add(known / 8)).max(FIRST), Ordering::Relaxed);
    }
}

/// How long those who share it stay awake, as a part of the longest time for the peers that they wait for. All zeros when new: the full time.
#[derive(Debug)]
pub(crate) struct AwakeBudget {
    /// How often the time was halved.
    halvings: AtomicU32,
}

impl AwakeBudget {
    pub(crate) const fn new() -> Self {
        Self { halvings: AtomicU32::new(0) }
    }

    pub(crate) fn reset(&self) {
        self.halvings.store(0, Ordering::Relaxed);
    }

    /// The time to stay awake now, in nanoseconds. `far`: of the sleeps that the peers end, if one of them is on another machine.
    pub(crate) fn nanos(&self, far: Option<&QuickestSleep>) -> u32 {
        self.of(longest(far))
    }

    /// Learns from a sleep that a peer has ended. Returns whether it is worth it to be awake again.
    pub(crate) fn slept(&self, time: Duration, far: Option<&QuickestSleep>) -> bool {
        if let Some(far) = far {
            far.note(time);
        }
        self.learn(time, longest(far))
    }

    /// Learns from a sleep that a time limit or a signal has ended, which counts as long. Returns the same.
    pub(crate) fn slept_for_nothing(&self, far: Option<&QuickestSleep>) -> bool {
        self.learn(Duration::MAX, longest(far))
    }

    fn of(&self, longest: u32) -> u32 {
        let now = longest.checked_shr(self.halvings.load(Ordering::Relaxed)).unwrap_or(0);
        if now < FIRST.min(longest) { 0 } else { now }
    }

    fn learn(&self, time: Duration, longest: u32) -> bool {
        let (halvings, is_awake) = (self.halvings.load(Ordering::Relaxed), self.of(longest) != 0);
        let next = match (time <= SHORT.max(Duration::from_nanos(u64::from(longest))), is_awake) {
            (true, true) => halvings.saturating_sub(1),
            (true, false) => (longest / FIRST).checked_ilog2().unwrap_or(0),
            (false, true) => halvings + 1,
            (false, false) => halvings,
        };
        self.halvings.store(next, Ordering::Relaxed);
        self.of(longest) != 0
    }
}

/// The longest time awake. The policy's value is for peers on this machine; with 0 no thread stays awake.
fn longest(far: Option<&QuickestSleep>) -> u32 {
    match (longest_spin(), far) {
        (0, _) => 0,
        (near, None) => near,
        (near, Some(far)) => far.nanos().saturating_mul(2).min(FAR_LONGEST).max(near),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_sleeps_raise_budget_and_long_ones_clear_it() {
        let (b, longest) = (AwakeBudget::new(), 50_000);
        assert_eq!(b.of(longest), 50_000);
        let long_sleeps = [(); 5].map(|()| b.learn(Duration::from_millis(5), longest));
        assert_eq!((b.of(longest), long_sleeps), (0, [true, true, false, false, false]));
        assert!(b.learn(Duration::from_micros(40), longest));
        assert_eq!(b.of(longest), 12_500);
        for _ in 0..5 {
            b.learn(Duration::from_micros(40), longest);
        }
        assert_eq!(b.of(longest), 50_000);
        assert_eq!(b.of(0), 0, "the policy is obeyed at once");
        assert_eq!(b.of(5000), 5000, "a short time of the policy is used whole");
    }

    #[test]
    fn budget_is_the_same_part_for_near_and_far_peers() {
        let b = AwakeBudget::new();
        assert!(b.learn(Duration::MAX, FAR_LONGEST));
        assert_eq!((b.of(FAR_LONGEST), b.of(50_000)), (FAR_LONGEST / 2, 25_000));
    }

    #[test]
    fn time_awake_for_another_machine_follows_shortest_sleeps() {
        let (b, quickest) = (AwakeBudget::new(), QuickestSleep::new());
        let far = Some(&quickest);
        let after_sleeps_of = |time: Duration| {
            let worth = (0..50).fold(true, |_, _| b.slept(time, far));
            (longest(far), worth)
        };
        assert_eq!(longest(far), 2 * FAR_FIRST);
        assert_eq!(after_sleeps_of(Duration::from_micros(40)), (80_000.max(longest_spin()), true));
        let idle = after_sleeps_of(Duration::from_secs(3));
        assert_eq!(idle, (FAR_LONGEST, false), "who sleeps for long does not stay awake");
        assert_eq!(b.nanos(far), 0);
        assert_eq!(after_sleeps_of(Duration::from_millis(2)).0, FAR_LONGEST);
        assert_eq!(b.nanos(far), FAR_LONGEST, "peers that take 2 ms are waited for");
        // Whatever the time limit of its calls is, and however often a signal comes.
        assert!(!(0..50).fold(true, |_, _| b.slept_for_nothing(far)));
        assert_eq!((b.nanos(far), longest(far)), (0, FAR_LONGEST), "an idle socket does not stay awake");
        assert_eq!(longest(None), longest_spin());
    }
}
