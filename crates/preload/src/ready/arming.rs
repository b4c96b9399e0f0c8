//! How a sleeper goes on after it has armed what it waits for.
//!
//! ```text
//!   arm, fence, look --> nothing there, all armed: sleep
//!     ^          | something came between, and another thread has taken it
//!     '----------'  ROUNDS times, and then sleep for a moment each time
//! ```
//! A peer that lies, and other threads that are busy, can keep a sleeper from arming. They must not keep it awake.

use crate::conn::ROUNDS;
use std::time::Duration;

/// The sleep of a thread that nothing might wake: a descriptor is missing for that, or it could not be armed.
pub(super) const NAP: Duration = Duration::from_millis(1);
/// How often such a sleep is doubled while nothing changes: where the way to the peer's machine is lost, that can be for long.
const DOUBLINGS: u32 = 3;

/// The rounds of one sleeper.
#[derive(Debug, Default)]
pub(super) struct Arming {
    /// Rounds in a row after which not all was armed.
    failed_rounds: u32,
}

/// The next step of a sleeper after a round.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum NextStep {
    /// Arm and look again at once.
    LookAgain,
    /// Sleep, no longer than this. `None` sets no limit.
    Sleep(Option<Duration>),
}

impl Arming {
    /// Before the first round.
    pub(super) const fn new() -> Self {
        Self { failed_rounds: 0 }
    }

    /// To be asked after a round: the sleeper has armed, issued a heavy fence, looked, and found nothing.
    pub(super) fn next(&mut self, is_armed: bool) -> NextStep {
        if is_armed {
            self.failed_rounds = 0;
            return NextStep::Sleep(None);
        }
        self.failed_rounds = self.failed_rounds.saturating_add(1);
        match self.failed_rounds.checked_sub(ROUNDS) {
            None => NextStep::LookAgain,
            Some(naps) => NextStep::Sleep(Some(NAP * (1 << naps.min(DOUBLINGS)))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sleeper_that_cannot_arm_naps_until_it_can() {
        let mut arming = Arming::new();
        for _ in 1..ROUNDS {
            assert_eq!(arming.next(false), NextStep::LookAgain);
        }
        for factor in [1, 2, 4, 8, 8, 8] {
            assert_eq!(
                arming.next(false),
                NextStep::Sleep(Some(NAP * factor)),
                "it does not go back to looking all the time"
            );
        }
        assert_eq!(arming.next(true), NextStep::Sleep(None));
        assert_eq!(arming.next(false), NextStep::LookAgain, "it counts from the start");
    }
}
