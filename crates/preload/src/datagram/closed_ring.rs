//! How long a ring is read that its receiver has closed permanently (protocol U9.3.1).
//!
//! Its sender may not heed that, and its broker may be gone. So it has an end and a deadline. Times are in milliseconds of
//! [`crate::sys::coarse_millis`].

/// The time from the closing after which a sender in the middle of a datagram is not waited for any more.
const FINISHING: u64 = 1000;
/// The time for which looks have found bytes that the broker does not prove, before these are given up.
const PROVING: u64 = 5000;

/// A ring that was closed permanently.
#[derive(Debug, Clone, Copy)]
pub(super) struct ClosedRing {
    since: u64,
    end: Option<u64>,
    /// When a look first found bytes without proof, since the last look that did not.
    unproved_since: Option<u64>,
}

impl ClosedRing {
    pub(super) fn new(now: u64) -> Self {
        Self { since: now, end: None, unproved_since: None }
    }

    /// The byte up to which it is read, once its sender was seen between two datagrams.
    pub(super) fn end(self) -> Option<u64> {
        self.end
    }

    /// A sender that goes on to write is not read beyond this byte.
    pub(super) fn ending_at(self, end: u64) -> Self {
        Self { end: Some(end), ..self }
    }

    /// Whether its sender has had the time to finish a datagram.
    pub(super) fn must_be_finished(self, now: u64) -> bool {
        now.saturating_sub(self.since) > FINISHING
    }

    /// Notes a look that has found bytes without a proof, or none such. Returns whether they will hardly be proved any more.
    pub(super) fn is_hopeless(&mut self, is_proved: bool, now: u64) -> bool {
        if is_proved {
            self.unproved_since = None;
            return false;
        }
        now.saturating_sub(*self.unproved_since.get_or_insert(now)) > PROVING
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unproved_bytes_are_given_up_after_looks_for_five_seconds() {
        let mut closed = ClosedRing::new(0);
        assert!(!closed.is_hopeless(false, 60_000), "nobody has looked before");
        assert!(!closed.is_hopeless(false, 65_000) && closed.is_hopeless(false, 65_001));
        assert!(!closed.is_hopeless(true, 66_000) && !closed.is_hopeless(false, 67_000), "they were proved meanwhile");
        assert!(!closed.is_hopeless(false, 72_000) && closed.is_hopeless(false, 72_001));
    }

    #[test]
    fn sender_of_closed_ring_has_a_second_to_finish() {
        let closed = ClosedRing::new(500).ending_at(8);
        assert_eq!(closed.end(), Some(8));
        assert!(!closed.must_be_finished(1500) && closed.must_be_finished(1501));
    }
}
