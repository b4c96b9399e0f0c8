//! How long to stay awake, and how.
//!
//! As [`partywall_region::wait::Spin`], whose reasons hold here too, but shared by threads and kept in a static. While awake
//! one looks at rings only; the kernel is asked now and then, so that what else is waited for does not starve.

use crate::awake::{AwakeBudget, QuickestSleep};
use crate::kernel_questions::KernelQuestions;
use crate::processor_turns::{ProcessorTurns, give_way, may_give_way};
use crate::signals::BlockedSignals;
use crate::{broker, sys};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Looks before signals are held back and the clock is read: most waits of a busy connection end within them.
const FIRST_LOOKS: u32 = 64;
/// Times that a processor is given up before a sleep.
const YIELDS: u32 = 4;
/// Looks between two readings of the clock.
const BATCH: u32 = 8;

/// How long those who share it stay awake.
#[derive(Debug)]
pub(crate) struct SpinBudget {
    budget: AwakeBudget,
    /// The last peers were on another machine.
    is_far: AtomicBool,
}

/// Of sleeps that the doorbell of a peer on another machine has ended.
static QUICKEST_FAR: QuickestSleep = QuickestSleep::new();

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
        Self { budget: AwakeBudget::new(), is_far: AtomicBool::new(false) }
    }

    /// Resets the budget.
    pub(super) fn reset(&self) {
        self.budget.reset();
    }

    /// Learns from a sleep.
    pub(super) fn slept(&self, time: Duration) {
        self.budget.slept(time, self.far());
    }

    fn nanos(&self) -> u32 {
        self.budget.nanos(self.far())
    }

    fn far(&self) -> Option<&'static QuickestSleep> {
        self.is_far.load(Ordering::Relaxed).then_some(&QUICKEST_FAR)
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
        if self.nanos() == 0 {
            return Awake::Vain;
        }
        let peers = peers();
        self.is_far.store(peers == Peers::Far, Ordering::Relaxed);
        let budget = self.nanos();
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
        let (mut questions, mut turns) = (KernelQuestions::from(start), ProcessorTurns::from(start));
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
            let (now, kernel_has_something) = questions.ask(now, &mut ask);
            if kernel_has_something {
                return Awake::Kernel;
            }
            if turns.are_wanted(now) {
                return if look() { Awake::Ready } else { Awake::Vain };
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::processor_turns;

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
            processor_turns::hog_until(time);
            of(Peers::Here)
        };
        assert!((0..100).any(|_| matches!(hogged_until(u64::MAX), Awake::Vain)), "hogged");
        assert!((0..100).any(|_| matches!(hogged_until(0), Awake::Ready)), "looked at all the same");
    }
}
