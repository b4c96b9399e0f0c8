//! Which user pays for the event loop's work (protocol C16).

use std::os::fd::AsFd as _;
use std::time::Duration;

use partywall_protocol::wire::User;

use super::Server;
use super::shares::Stopwatch;
use crate::credentials::Account;

/// Work of the event loop that one user pays for, from its beginning on.
#[derive(Debug)]
pub(super) struct ChargedWork {
    watch: Stopwatch,
    /// The time of all reports of rings before it.
    rings_time: Duration,
}

impl Server {
    /// Charges work to a user. A user that has used up a share is not served for a while (protocol C16).
    pub(super) fn charge(&mut self, account: Account, time: Duration) {
        if self.shares.charge(account, time) {
            self.leave_alone(account);
        }
    }

    /// Begins to measure work that one user pays for.
    pub(super) fn begin_work(&self) -> ChargedWork {
        ChargedWork { watch: Stopwatch::start(), rings_time: self.rings_time }
    }

    /// Charges work to a user, except for reports of rings that were taken meanwhile: the machines that sent those have paid for them.
    pub(super) fn charge_work(&mut self, account: Account, work: ChargedWork) {
        let paid = self.rings_time.saturating_sub(work.rings_time);
        self.charge(account, work.watch.elapsed().saturating_sub(paid));
    }

    /// Leaves what a user sends where it is, until [`hear_all_users`](Self::hear_all_users).
    pub(super) fn leave_alone(&mut self, account: Account) {
        match account.user {
            User::Host(_) => self.readers.leave_alone(account),
            User::Machine(machine) => self.machine_turns.leave_alone(self.epoll.as_fd(), machine),
        }
    }
}
