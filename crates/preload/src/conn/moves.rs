//! When a connection is worth a step: calls that are counted, and what was looked at last.

use crate::broker;
use partywall_protocol::upgrade::Upgrade;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Calls until the next attempt when another thread was in the way.
const SOON: u64 = 16;
/// Milliseconds from the first failed attempt to the next, unless calls bring that earlier. Each later wait is twice as long.
const BETWEEN_ATTEMPTS_MS: u64 = 1000;
/// Doublings of that wait: it is 68 minutes at most.
const MOST_DOUBLINGS: u32 = 12;
/// The longest wait for the other side's next step towards a ring, in milliseconds. The broker forgets a handshake before that (protocol T4.7).
const LONGEST_WAIT_MS: u64 = 40_000;
/// A connection that has waited for this long does not wait for others. An answer that nobody takes keeps its place in the process for 5 s at least.
const LONG_WAIT_MS: u64 = 3_000;
/// Looks for an answer on each call, so often; after that on every sixteenth.
const EAGER: u32 = 64;
/// The most times that a connection asks for an offer that may be another connection's, because addresses are translated.
const GUESSES: u32 = 8;
/// The time from the first such guess to the second, in milliseconds. Each later one waits twice as long as the one before.
const BETWEEN_GUESSES_MS: u64 = 50;
/// The time before the first guess of a connection from an address that a program has: its own offer has come by then.
const BEFORE_UNLIKELY_GUESS_MS: u64 = 2000;

/// Counts, and numbers of the latest observations. They may be inexact where threads race: each says when to look, and not what is found.
#[derive(Debug)]
#[cfg_attr(test, derive(Default))]
#[repr(C)]
pub(super) struct MoveCounters {
    /// Sending calls that were refused, wholly or in part, for want of room.
    pub(super) refusals: AtomicU32,
    /// Calls that carried bytes.
    calls: AtomicU32,
    /// Looks for the peer's answer since the last step towards a ring ([`super::bring_up`]).
    pub(super) looks_for_answer: AtomicU32,
    /// When the connection stops waiting for that answer, in milliseconds of [`crate::sys::coarse_now`].
    wait_ends_at: AtomicU64,
    /// The policy that the connection was judged by last.
    policy_seen: AtomicU32,
    /// The number of calls, or of bytes, at which the connection goes to a ring.
    due_calls: AtomicU64,
    due_bytes: AtomicU64,
    /// When the next attempt is due unless calls bring it earlier, in milliseconds of [`crate::sys::coarse_now`]. 0: time does not count.
    next_attempt_at: AtomicU64,
    /// Attempts that have failed.
    failed_attempts: AtomicU32,
    /// The last change of offers that was looked at.
    pub(super) offers_seen: AtomicU64,
    /// When the kernel was asked last whether the peer is alive, in [`crate::sys::ticks`].
    pub(super) looked_at: AtomicU64,
    /// When it was asked last, by a reader whose ring was empty, whether the end has come.
    pub(super) asked_at: AtomicU64,
    /// How often the connection has asked for an offer that may be another connection's.
    guesses: AtomicU32,
    /// When it may ask next, in milliseconds of [`crate::sys::coarse_now`]. 0: it has found no such offer yet.
    next_guess_at: AtomicU64,
    /// How often the socket's rings were given up and the connection began again ([`super::renewal`]).
    pub(super) renewals: AtomicU32,
    /// How many rings before the present ones, one after another, did not last.
    pub(super) short_lived: AtomicU32,
    /// When its present rings came up, in milliseconds of [`crate::sys::coarse_now`]. 0: it has had none.
    pub(super) up_at: AtomicU64,
    /// 1 once its rings were found to be over.
    pub(super) rings_are_over: AtomicU32,
    /// When it is next looked at whether it may begin again, in milliseconds of [`crate::sys::coarse_now`].
    pub(super) next_renewal_at: AtomicU64,
}

/// Whether a connection may ask for an offer that may be another connection's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Guess {
    Now,
    Later,
    /// It has asked as often as it may.
    Never,
}

impl MoveCounters {
    /// For a new connection, under a given policy.
    pub(super) fn begin(&self, upgrade: Upgrade) {
        let renewal = [&self.renewals, &self.short_lived, &self.rings_are_over];
        for word in [&self.refusals, &self.calls, &self.looks_for_answer, &self.guesses].into_iter().chain(renewal) {
            word.store(0, Ordering::Relaxed);
        }
        self.looked_at.store(0, Ordering::Relaxed);
        self.asked_at.store(0, Ordering::Relaxed);
        self.next_guess_at.store(0, Ordering::Relaxed);
        self.next_renewal_at.store(0, Ordering::Relaxed);
        self.up_at.store(0, Ordering::Relaxed);
        self.note_policy();
        self.set_due(upgrade);
        // One before the present, so that an offer that is there already is found.
        self.offers_seen.store(broker::offer_generation().wrapping_sub(1), Ordering::Relaxed);
    }

    /// The next call asks the policy.
    pub(super) fn judge_later(&self) {
        self.policy_seen.fetch_sub(1, Ordering::Relaxed);
    }

    /// Sets the number of calls or bytes from which on it is worth a ring.
    pub(super) fn set_due(&self, upgrade: Upgrade) {
        let or_never = |count: u64| if count == 0 { u64::MAX } else { count };
        let (calls, bytes) = match upgrade {
            Upgrade::Now => (0, 0),
            Upgrade::Never => (u64::MAX, u64::MAX),
            Upgrade::After { calls, bytes } => (or_never(calls), or_never(bytes)),
        };
        self.due_calls.store(calls, Ordering::Relaxed);
        self.due_bytes.store(bytes, Ordering::Relaxed);
        self.next_attempt_at.store(0, Ordering::Relaxed);
        self.failed_attempts.store(0, Ordering::Relaxed);
    }

    /// Whether the policy is the one that the connection was judged by.
    #[inline]
    pub(super) fn has_seen_policy(&self) -> bool {
        broker::policy_generation() == self.policy_seen.load(Ordering::Relaxed)
    }

    /// The connection is judged by the present policy.
    pub(super) fn note_policy(&self) {
        self.policy_seen.store(broker::policy_generation(), Ordering::Relaxed);
    }

    /// Counts a call, and returns how many there have been.
    pub(super) fn count_call(&self) -> u32 {
        let calls = self.calls.load(Ordering::Relaxed).saturating_add(1);
        self.calls.store(calls, Ordering::Relaxed);
        calls
    }

    /// Whether a step towards a ring is due after this many bytes.
    pub(super) fn is_due(&self, bytes: u64) -> bool {
        u64::from(self.calls.load(Ordering::Relaxed)) > self.due_calls.load(Ordering::Relaxed)
            || bytes >= self.due_bytes.load(Ordering::Relaxed)
    }

    /// The next attempt comes after a few calls.
    pub(super) fn try_again_soon(&self) {
        self.try_again_after(u64::from(self.calls.load(Ordering::Relaxed)) + SOON);
    }

    /// The next attempt comes after ten times as many calls, or after a time that grows with each attempt. `now` is in milliseconds.
    pub(super) fn try_again_later(&self, now: u64) {
        self.try_again_after(u64::from(self.calls.load(Ordering::Relaxed)).max(100) * 10);
        let failed = self.failed_attempts.load(Ordering::Relaxed).min(MOST_DOUBLINGS);
        self.failed_attempts.store(failed + 1, Ordering::Relaxed);
        self.next_attempt_at.store(now + (BETWEEN_ATTEMPTS_MS << failed), Ordering::Relaxed);
    }

    /// Whether an attempt is due by time, at this time in milliseconds.
    pub(super) fn is_time_for_attempt(&self, now: impl FnOnce() -> u64) -> bool {
        let at = self.next_attempt_at.load(Ordering::Relaxed);
        at != 0 && now() >= at
    }

    fn try_again_after(&self, calls: u64) {
        self.due_calls.store(calls, Ordering::Relaxed);
        self.due_bytes.store(u64::MAX, Ordering::Relaxed);
        self.next_attempt_at.store(0, Ordering::Relaxed);
    }

    /// Whether the connection may ask for an offer that may be another's, at this time in milliseconds. The first guess waits for
    /// [`BEFORE_UNLIKELY_GUESS_MS`] unless it `is_likely` that the offer is its own.
    pub(super) fn may_guess(&self, now: u64, is_likely: bool) -> Guess {
        if self.guesses.load(Ordering::Relaxed) >= GUESSES {
            return Guess::Never;
        }
        if self.next_guess_at.load(Ordering::Relaxed) == 0 {
            let first = now + if is_likely { 0 } else { BEFORE_UNLIKELY_GUESS_MS };
            self.next_guess_at.store(first, Ordering::Relaxed);
        }
        if now < self.next_guess_at.load(Ordering::Relaxed) { Guess::Later } else { Guess::Now }
    }

    /// It asks at this time.
    pub(super) fn count_guess(&self, now: u64) {
        let guesses = self.guesses.load(Ordering::Relaxed).min(GUESSES);
        self.guesses.store(guesses + 1, Ordering::Relaxed);
        self.next_guess_at.store(now + (BETWEEN_GUESSES_MS << guesses), Ordering::Relaxed);
    }

    /// The connection waits for the other side's next step from now on, in milliseconds.
    pub(super) fn wait_for_answer(&self, now: u64) {
        self.looks_for_answer.store(0, Ordering::Relaxed);
        self.wait_ends_at.store(now + LONGEST_WAIT_MS, Ordering::Relaxed);
    }

    /// Whether no answer can be expected any more at this time, in milliseconds.
    pub(super) fn is_wait_over(&self, now: u64) -> bool {
        now >= self.wait_ends_at.load(Ordering::Relaxed)
    }

    /// Whether it has waited for an answer, or for its turn to look for one, for longer than others should delay it.
    pub(super) fn has_waited_long(&self, now: u64) -> bool {
        now + LONGEST_WAIT_MS >= self.wait_ends_at.load(Ordering::Relaxed) + LONG_WAIT_MS
    }

    /// As if it had waited that long.
    #[cfg(test)]
    pub(super) fn end_wait(&self) {
        self.wait_ends_at.store(0, Ordering::Relaxed);
    }

    /// Whether a call of a connection that waits for an answer looks for it.
    pub(super) fn is_to_look(&self) -> bool {
        let looks = self.looks_for_answer.load(Ordering::Relaxed).saturating_add(1);
        self.looks_for_answer.store(looks, Ordering::Relaxed);
        looks < EAGER || looks.is_multiple_of(16)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_wait_is_noticed_before_it_is_over() {
        let moves = MoveCounters::default();
        moves.wait_for_answer(10_000);
        assert!(!moves.has_waited_long(12_999) && moves.has_waited_long(13_000));
        assert!(!moves.is_wait_over(49_999) && moves.is_wait_over(50_000));
    }

    #[test]
    fn failed_attempt_is_repeated_after_calls_or_time() {
        let moves = MoveCounters::default();
        // Twice: a connection in the place of an earlier one counts from 0.
        for _ in 0..2 {
            moves.begin(Upgrade::Now);
            assert!(moves.is_due(0) && !moves.is_time_for_attempt(|| u64::MAX));
            let mut now = 5000;
            for wait in (0..14).map(|failed: u32| 1000 << failed.min(12)) {
                moves.try_again_later(now);
                assert!(!moves.is_due(1 << 40));
                assert!(!moves.is_time_for_attempt(|| now + wait - 1) && moves.is_time_for_attempt(|| now + wait));
                now += wait;
            }
            // A thread that was in the way puts the attempt off by calls, although its time has come.
            moves.try_again_soon();
            assert!(!moves.is_due(1 << 40) && !moves.is_time_for_attempt(|| u64::MAX));
            moves.try_again_later(now);
            (0..=1000).for_each(|_| assert!(moves.count_call() > 0));
            assert!(moves.is_due(0));
            // Another policy decides alone.
            moves.set_due(Upgrade::Never);
            assert!(!moves.is_due(1 << 40) && !moves.is_time_for_attempt(|| u64::MAX));
        }
    }

    #[test]
    fn connection_guesses_eight_times_and_ever_more_rarely() {
        let moves = MoveCounters::default();
        for (is_likely, first) in [(true, 0), (false, 2000)] {
            // A connection in the place of an earlier one.
            moves.begin(Upgrade::Now);
            let mut guesses = Vec::new();
            for now in 1000..60_000 {
                match moves.may_guess(now, is_likely) {
                    Guess::Now => {
                        moves.count_guess(now);
                        guesses.push(now - 1000 - first);
                    }
                    Guess::Later => assert!(guesses.len() < 8),
                    Guess::Never => assert_eq!(guesses.len(), 8),
                }
            }
            assert_eq!(guesses, [0, 50, 150, 350, 750, 1550, 3150, 6350]);
        }
    }
}
