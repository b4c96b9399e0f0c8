//! Limits on the log lines about each user, so that no user fills the log.

use std::collections::BTreeMap;

use partywall_protocol::wire::User;

/// Lines about one user in one period; the rest are counted.
const LINES: u32 = 50;
/// Seconds in a period.
const PERIOD: u64 = 10;
/// Users with a separate count in a period; all others share one.
const USERS: usize = 256;

/// The lines of the current periods.
#[derive(Debug, Default)]
pub(super) struct LogBudget {
    users: BTreeMap<Option<User>, Written>,
}

#[derive(Debug, Clone, Copy)]
struct Written {
    begun: u64,
    written: u32,
    left_out: u64,
}

impl LogBudget {
    /// Whether one more line about this user may be written at `now`, in seconds. An unknown user shares the account of all
    /// users beyond [`USERS`].
    pub(super) fn allows(&mut self, user: impl Into<Option<User>>, now: u64) -> bool {
        self.report(now);
        let known = |user: &User| self.users.contains_key(&Some(*user)) || self.users.len() < USERS;
        let key = user.into().filter(known);
        let account = self.users.entry(key).or_insert(Written { begun: now, written: 0, left_out: 0 });
        if account.written < LINES {
            account.written += 1;
            return true;
        }
        account.left_out += 1;
        false
    }

    /// Logs how many lines were left out in periods that are over, and forgets these; returns the number.
    pub(super) fn report(&mut self, now: u64) -> u64 {
        // A clock that was set back ends a period as well.
        let over = |account: &Written| !(account.begun..account.begun.saturating_add(PERIOD)).contains(&now);
        let mut left_out = 0;
        self.users.retain(|user, account| {
            if over(account) && account.left_out > 0 {
                left_out += account.left_out;
                match user {
                    Some(user) => {
                        tracing::info!(%user, lines = account.left_out, "more lines about this user were left out")
                    }
                    None => tracing::info!(lines = account.left_out, "more lines about other users were left out"),
                }
            }
            !over(account)
        });
        left_out
    }

    /// Whether lines were left out and not reported yet.
    pub(super) fn owes_report(&self) -> bool {
        self.users.values().any(|account| account.left_out > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_beyond_budget_are_counted_and_reported_after_period() {
        let mut budget = LogBudget::default();
        let written = (0..1000).filter(|_| budget.allows(User::Host(7), 100)).count();
        assert_eq!(written, LINES as usize);
        assert!(budget.allows(User::Host(8), 100), "another user has a budget too");
        assert!(budget.owes_report());
        assert_eq!(budget.report(100 + PERIOD - 1), 0);
        assert_eq!(budget.report(100 + PERIOD), 1000 - u64::from(LINES));
        assert!(!budget.owes_report());
        assert!(budget.allows(User::Host(7), 100 + PERIOD));
    }

    #[test]
    fn users_beyond_limit_share_one_budget() {
        let mut budget = LogBudget::default();
        let written = (0..100_000).filter(|user| budget.allows(User::Host(*user), 5)).count();
        assert_eq!(written, USERS + LINES as usize);
        assert!(budget.users.len() <= USERS + 1);
    }
}
