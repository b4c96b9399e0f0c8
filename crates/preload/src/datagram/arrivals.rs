//! Which datagrams of a sender on another machine are still in transit (protocol U14.15).
//!
//! Within one kernel a datagram is in the receiver's queue, or lost, when the sender's call returns. Between two machines it may still be in
//! transit, and one that follows by the ring would overtake it. So the receiver compares the sender's count with its own.

use std::time::Duration;

/// The time after which datagrams that have not come count as lost.
const GRACE: Duration = Duration::from_millis(20);

/// How far the comparison of the counts has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CountingStage {
    /// The sender has counted nothing.
    New,
    /// Datagrams from before the ring may still be in transit, and nobody has counted those.
    Settling,
    /// Each datagram that comes was counted.
    Counting,
}

/// What has come by the kernel from one sender.
#[derive(Debug)]
pub(super) struct KernelArrivals {
    stage: CountingStage,
    /// Datagrams that have come or count as lost; modulo 2^32.
    settled: u32,
    /// The fewest and the most that were missing since then.
    missing: (i32, i32),
    since: Duration,
}

impl KernelArrivals {
    pub(super) const NONE: Self =
        Self { stage: CountingStage::New, settled: 0, missing: (0, 0), since: Duration::ZERO };

    /// One more has come.
    pub(super) fn count(&mut self) {
        // Before that, it may be one from before the ring, and must not stand for another that is in transit.
        if self.stage == CountingStage::Counting {
            self.settled = self.settled.wrapping_add(1);
        }
    }

    /// Whether all that the sender has sent by the kernel, by its own count, has come or is lost. Any count of a sender delays only its own
    /// datagrams, and for a bounded time.
    pub(super) fn are_complete(&mut self, sent: u32, now: Duration) -> bool {
        if self.stage == CountingStage::New {
            // The sender's count begins with 1, which stands for all datagrams before the ring.
            (self.stage, self.settled, self.since) = (CountingStage::Settling, sent.wrapping_sub(1), now);
            return false;
        }
        let missing = sent.wrapping_sub(1).wrapping_sub(self.settled).cast_signed();
        if self.stage == CountingStage::Settling {
            if now.saturating_sub(self.since) < GRACE {
                return false;
            }
            // What was sent up to the first look has come or is lost.
            (self.stage, self.missing, self.since) = (CountingStage::Counting, (missing, missing), now);
            return missing <= 0;
        }
        let (fewest, most) = (self.missing.0.min(missing), self.missing.1.max(missing));
        if now.saturating_sub(self.since) < GRACE {
            self.missing = (fewest, most);
            return missing <= 0;
        }
        // Those that were missing all the time are lost. If too many came all the time, some were late.
        let wrong = if fewest > 0 { fewest } else { most.min(0) };
        self.settled = self.settled.wrapping_add_signed(wrong);
        let missing = missing.wrapping_sub(wrong);
        (self.missing, self.since) = ((missing, missing), now);
        missing <= 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(time: u64) -> Duration {
        Duration::from_millis(time)
    }

    /// At 100 ms the sender has counted nothing since the ring was made, and what was sent before has come.
    fn counting() -> KernelArrivals {
        let mut arrivals = KernelArrivals::NONE;
        assert!(!arrivals.are_complete(1, ms(80)) && arrivals.are_complete(1, ms(100)));
        arrivals
    }

    #[test]
    fn datagram_from_before_the_ring_stands_for_no_other() {
        let mut arrivals = KernelArrivals::NONE;
        for time in [100, 105, 119] {
            assert!(!arrivals.are_complete(2, ms(time)), "some may be in transit that nobody has counted");
            arrivals.count();
        }
        assert!(!arrivals.are_complete(3, ms(120)), "one was sent since the first look");
        arrivals.count();
        assert!(arrivals.are_complete(3, ms(121)));
    }

    #[test]
    fn datagram_in_transit_is_waited_for() {
        let mut arrivals = counting();
        assert!(!arrivals.are_complete(3, ms(101)), "two are in transit");
        arrivals.count();
        assert!(!arrivals.are_complete(3, ms(102)));
        arrivals.count();
        assert!(arrivals.are_complete(3, ms(103)));
        arrivals.count();
        assert!(arrivals.are_complete(3, ms(104)), "it has come before the sender could count it");
        assert!(arrivals.are_complete(4, ms(130)) && !arrivals.are_complete(5, ms(131)));
    }

    #[test]
    fn lost_datagram_delays_the_ring_for_a_bounded_time() {
        let mut arrivals = counting();
        // One of the first two is lost, and others follow without end.
        let mut sent = 2;
        let mut time = 101;
        while !arrivals.are_complete(sent, ms(time)) {
            assert!(time < 101 + 3 * 20, "{arrivals:?}");
            arrivals.count();
            (sent, time) = (sent + 1, time + 1);
        }
        assert!(!arrivals.are_complete(sent + 1, ms(time)), "what is sent from then on is waited for");
    }

    #[test]
    fn surplus_is_forgotten_after_a_while() {
        let mut arrivals = counting();
        // More than the sender has counted.
        (0..3).for_each(|_| arrivals.count());
        for time in [101, 121, 142, 163] {
            assert!(arrivals.are_complete(1, ms(time)));
        }
        assert!(!arrivals.are_complete(2, ms(164)));
    }

    #[test]
    fn any_count_of_a_sender_is_settled() {
        for sent in [0, u32::MAX, 1 << 31, (1 << 31) + 1, 7] {
            let mut arrivals = KernelArrivals::NONE;
            let done = (0..10).any(|n| arrivals.are_complete(sent, ms(100 + 20 * n)));
            assert!(done, "{sent}");
        }
    }
}
