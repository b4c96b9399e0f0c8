//! When the event loop may run in real time (protocol C16.6).
//!
//! An ordinary thread, at whatever priority, is interrupted for whole slices of other threads as soon as it has used a little more than
//! they have. With some threads that never sleep on each processor, a turn of the loop that takes a third of a millisecond then lasts four.
//! A real-time thread is not interrupted by ordinary ones.
//!
//! No user gets more than half of the loop's time ([`super::shares`]). Several users together could still keep the loop busy. So the
//! loop leaves real time for a while once it has used more than its allowance.

use std::time::Duration;

use super::allowance::{AllowanceLimits, TimeAllowance, coarse};
use super::shares::used_by_this_thread;
use crate::priority;

const LIMITS: AllowanceLimits = AllowanceLimits {
    period: Duration::from_millis(100),
    allowance: Duration::from_millis(80),
    rest: Duration::from_millis(100),
};

/// The scheduling policy of the event loop's thread.
#[derive(Debug, Default)]
pub(super) struct LoopUrgency {
    /// `None`: the loop stays an ordinary thread.
    allowance: Option<TimeAllowance>,
}

impl LoopUrgency {
    /// For the calling thread, which may enter real time if the system permits that and the operator has chosen no priority for it.
    pub(super) fn begin() -> Self {
        let may = priority::is_ordinary();
        priority::raise();
        Self { allowance: may.then(|| TimeAllowance::new(LIMITS, coarse(), used_by_this_thread())) }
    }

    /// Looks at the time that the loop has used. To be called in each turn.
    pub(super) fn look(&mut self) {
        let Some(allowance) = &mut self.allowance else { return };
        match allowance.judge(coarse(), used_by_this_thread()) {
            Some(true) => {
                if let Err(error) = priority::enter_real_time() {
                    tracing::debug!(%error, "the broker runs as an ordinary thread: while others keep all processors busy, answers come later");
                    self.allowance = None;
                }
            }
            Some(false) => priority::leave_real_time(),
            None => {}
        }
    }
}
