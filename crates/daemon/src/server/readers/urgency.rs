//! When a reader may run at the raised priority (protocol C16.1).
//!
//! A user who asks now and then is answered soon, also while programs keep all processors busy: the reader that takes the
//! user's packets does not wait behind them. A user who sends without pause gains nothing by it. Such a user's reader soon
//! runs at the ordinary priority, and competes like any program of that user.

use std::time::Duration;

use crate::priority;
use crate::server::allowance::{AllowanceLimits, TimeAllowance, coarse};
use crate::server::shares::used_by_this_thread;

const LIMITS: AllowanceLimits = AllowanceLimits {
    period: Duration::from_millis(100),
    allowance: Duration::from_millis(5),
    rest: Duration::from_secs(1),
};

/// Readers that may raise their priority at a time. Together they use at most 40% of a processor at the raised one, and the time of one packet
/// each.
pub(super) const MOST_URGENT: usize = 8;

/// The priority of the process that calls it, which has one thread.
#[derive(Debug)]
pub(super) struct ReaderUrgency {
    /// `None`: this process may not raise its priority, or has one that the operator chose.
    allowance: Option<TimeAllowance>,
}

impl ReaderUrgency {
    /// Of a process that `may` raise its priority, or may not.
    pub(super) fn new(may: bool) -> Self {
        let may = may && priority::is_ordinary();
        Self { allowance: may.then(|| TimeAllowance::new(LIMITS, coarse(), used_by_this_thread())) }
    }

    /// Looks at what was used. To be called before and after each piece of work.
    pub(super) fn look(&mut self) {
        let Some(allowance) = &mut self.allowance else { return };
        let refused = match allowance.judge(coarse(), used_by_this_thread()) {
            Some(true) => priority::try_raise().is_err(),
            Some(false) => {
                priority::lower();
                false
            }
            None => false,
        };
        if refused {
            self.allowance = None;
        }
    }
}
