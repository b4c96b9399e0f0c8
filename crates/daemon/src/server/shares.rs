//! How much of the event loop's processor time one user may use.
//!
//! ```text
//!   period    |<------- 10 ms ------->|<------- 10 ms ------->|
//!   user A    [#####]   not heard     [#####]   not heard          keeps sending
//!   user B            [#]                        [#]               is answered
//! ```
//!
//! The event loop serves users in turn. One user could still keep the loop busy without pause, which has two costs. The loop takes a
//! processor from other programs, at the broker's priority. And the scheduler makes a thread that never sleeps wait for its next
//! slice, so other users' answers come late. A user who has used half of a period is therefore not heard until the period is over:
//! what that user sends stays in the sockets, and the senders wait or get `EAGAIN`.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

use crate::credentials::Account;

/// Protocol C16: how long a period lasts.
const PERIOD: Duration = Duration::from_millis(10);
/// Protocol C16: how much of it one user may use.
const SHARE: Duration = Duration::from_millis(5);

/// The time that each user has used of the present period.
#[derive(Debug)]
pub(super) struct Shares {
    begun: Instant,
    used: HashMap<Account, Duration>,
    /// Whether any user has used up a share.
    any_used_up: bool,
}

impl Shares {
    pub(super) fn new(now: Instant) -> Self {
        Self { begun: now, used: HashMap::new(), any_used_up: false }
    }

    /// Begins a new period if the present one is over. Whether users may be heard again who could not be before.
    pub(super) fn renew(&mut self, now: Instant) -> bool {
        if now.saturating_duration_since(self.begun) < PERIOD {
            return false;
        }
        self.begun = now;
        self.used.clear();
        std::mem::take(&mut self.any_used_up)
    }

    /// Adds time that was used for a user. Whether the user's share is used up.
    pub(super) fn charge(&mut self, account: Account, time: Duration) -> bool {
        let used = self.used.entry(account).or_default();
        *used += time;
        let used_up = *used >= SHARE;
        self.any_used_up |= used_up;
        used_up
    }

    #[cfg(test)]
    pub(super) fn used_for_test(&self, account: Account) -> Duration {
        self.used.get(&account).copied().unwrap_or_default()
    }

    pub(super) fn is_used_up(&self, account: Account) -> bool {
        self.any_used_up && self.used.get(&account).is_some_and(|used| *used >= SHARE)
    }

    /// How long it is until users can be heard again who cannot be now; `None` if there are none.
    pub(super) fn renews_in(&self, now: Instant) -> Option<Duration> {
        self.any_used_up.then(|| PERIOD.saturating_sub(now.saturating_duration_since(self.begun)))
    }
}

/// Measures the processor time of the calling thread.
#[derive(Debug)]
pub(super) struct Stopwatch(Duration);

impl Stopwatch {
    pub(super) fn start() -> Self {
        Self(used_by_this_thread())
    }

    pub(super) fn elapsed(&self) -> Duration {
        used_by_this_thread().saturating_sub(self.0)
    }
}

/// Processor time that the calling thread has used.
pub(super) fn used_by_this_thread() -> Duration {
    // A clock that never goes back, and the kernel gives no negative times.
    clock_gettime(ClockId::ThreadCPUTime).try_into().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::credentials::Home;
    use partywall_protocol::wire::User;

    #[test]
    fn container_user_does_not_use_up_share_of_host_user() {
        let mut shares = Shares::new(Instant::now());
        let [host, container] = [Home::Broker, Home::Container { user: 1, pid: 2 }].map(|home| account(0, home));
        assert!(shares.charge(container, SHARE));
        assert!(!shares.is_used_up(host));
    }

    fn account(user: u32, home: Home) -> Account {
        Account::of(User::Host(user), home)
    }

    #[test]
    fn user_with_used_share_is_heard_again_in_next_period() {
        let [one, other] = [1, 2].map(|user| account(user, Home::Broker));
        let begin = Instant::now();
        let mut shares = Shares::new(begin);
        assert!(!shares.charge(one, SHARE - Duration::from_nanos(1)));
        assert_eq!(shares.renews_in(begin), None, "nobody waits");
        assert!(shares.charge(one, Duration::from_nanos(1)));
        assert!(shares.is_used_up(one));
        assert!(!shares.is_used_up(other));
        assert_eq!(shares.renews_in(begin + PERIOD / 4), Some(PERIOD / 4 * 3));
        assert!(!shares.renew(begin + PERIOD / 2), "the period is not over");
        assert!(shares.renew(begin + PERIOD), "somebody may be heard again");
        assert!(!shares.is_used_up(one));
        assert!(!shares.renew(begin + PERIOD * 2), "nobody waited");
    }

    #[test]
    fn stopwatch_counts_work_and_not_sleep() {
        let watch = Stopwatch::start();
        std::thread::sleep(Duration::from_millis(50));
        let slept = watch.elapsed();
        let mut sum = 0u64;
        while watch.elapsed() < slept + Duration::from_millis(1) {
            sum = std::hint::black_box(sum + 1);
        }
        assert!(slept < Duration::from_millis(50), "sleeping took {slept:?} of the processor");
    }
}
