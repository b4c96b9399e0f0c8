//! The step from awake to asleep of a thread that waits on views of halves (protocol W1, W2). Other threads may wait on the same halves.
//!
//! ```text
//!   wishes stored --> Fenced::after --> look --> Found: awake
//!        ^                               |
//!        |                            Nothing
//!        |                               v
//!        +-- ArmAgain <------------ Rounds::next --> Sleep, for any time or for a moment
//! ```
//!
//! Only the step before makes the value that the next step needs. So a thread gets [`SleepStep::Sleep`] only if it has fenced after its wishes
//! and has looked after the fence. A half with one owner takes the same step inside its `next` ([`super::Effect`]).

use crate::sync::{Ordering, fence};
use core::time::Duration;

/// Times in a row that a sleeper arms again because something has come between. After that it sleeps for a moment each time: a peer that lies,
/// and other threads that are busy, must not keep it awake.
pub const ROUNDS: u32 = 4;
/// The sleep of a thread that nothing might wake.
pub const NAP: Duration = Duration::from_millis(1);
/// How often such a sleep is doubled while nothing changes. If the way to the peer's machine is lost, nothing changes for long.
const DOUBLINGS: u32 = 3;

/// The wishes of a sleeper are stored, and it has fenced in full. The second look follows.
#[derive(Debug, Clone, Copy)]
#[must_use]
pub struct Fenced<A>(A);

impl<A> Fenced<A> {
    /// Fences, after the caller has stored its wishes for any number of halves. `armed` is what these said, for [`Rounds::next`].
    #[inline]
    pub fn after(armed: A) -> Self {
        fence(Ordering::SeqCst);
        Self(armed)
    }

    /// The second look (protocol W2). `look` returns what it has found.
    #[inline]
    pub fn look<N>(self, look: impl FnOnce() -> Option<N>) -> SecondLook<A, N> {
        match look() {
            Some(news) => SecondLook::Found(news),
            None => SecondLook::Nothing(Quiet(self.0)),
        }
    }
}

/// The result of the look after the fence.
#[derive(Debug)]
#[must_use]
pub enum SecondLook<A, N> {
    /// The thread stays awake for this.
    Found(N),
    /// The thread may sleep if the peers will ring it.
    Nothing(Quiet<A>),
}

/// A look after the fence has found nothing.
#[derive(Debug)]
#[must_use]
pub struct Quiet<A>(A);

impl<A> Quiet<A> {
    /// Whether the peers will ring for all that was armed, as the views' `is_armed` says.
    #[inline]
    pub fn is_armed(self, is_armed: impl FnOnce(A) -> bool) -> bool {
        is_armed(self.0)
    }
}

/// What a sleeper does after a look that has found nothing.
#[derive(Debug, PartialEq, Eq)]
#[must_use]
pub enum SleepStep {
    /// Something came between that was not enough, or that another thread has taken. Arm again at once.
    ArmAgain,
    /// Sleep, no longer than this. `None` sets no limit.
    Sleep(Option<Duration>),
}

/// The rounds of one sleeper.
#[derive(Debug, Default)]
pub struct Rounds {
    /// Rounds in a row after which not all was armed.
    failed: u32,
}

impl Rounds {
    /// Before the first round.
    pub const fn new() -> Self {
        Self { failed: 0 }
    }

    /// A round has ended without news. `is_armed` says whether the peers will ring for all that was armed.
    pub fn next<A>(&mut self, quiet: Quiet<A>, is_armed: impl FnOnce(A) -> bool) -> SleepStep {
        if quiet.is_armed(is_armed) {
            self.failed = 0;
            return SleepStep::Sleep(None);
        }
        self.failed = self.failed.saturating_add(1);
        match self.failed.checked_sub(ROUNDS) {
            None => SleepStep::ArmAgain,
            Some(naps) => SleepStep::Sleep(Some(NAP * (1 << naps.min(DOUBLINGS)))),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn round(rounds: &mut Rounds, is_armed: bool) -> SleepStep {
        match Fenced::after(is_armed).look(|| None::<()>) {
            SecondLook::Nothing(quiet) => rounds.next(quiet, |is_armed| is_armed),
            SecondLook::Found(()) => unreachable!("the look finds nothing"),
        }
    }

    #[test]
    fn sleeper_that_cannot_arm_naps_until_it_can() {
        let mut rounds = Rounds::new();
        for _ in 1..ROUNDS {
            assert_eq!(round(&mut rounds, false), SleepStep::ArmAgain);
        }
        for factor in [1, 2, 4, 8, 8, 8] {
            assert_eq!(
                round(&mut rounds, false),
                SleepStep::Sleep(Some(NAP * factor)),
                "it does not go back to looking all the time"
            );
        }
        assert_eq!(round(&mut rounds, true), SleepStep::Sleep(None));
        assert_eq!(round(&mut rounds, false), SleepStep::ArmAgain, "it counts from the start");
    }

    #[test]
    fn news_after_the_fence_prevents_the_sleep() {
        assert!(matches!(Fenced::after(()).look(|| Some(7)), SecondLook::Found(7)));
    }
}
