//! When the broker is asked again after a request that failed.

use partywall_shm::status::Reason;

/// How long a socket that has found the session busy makes no further request, in milliseconds. Each attempt may wait for 2 ms for the thread
/// that has the session, so a program that keeps its session busy spends at most a tenth of a call's time so.
const BUSY_MS: u64 = 20;
/// Refusals at one number of offers after which the broker is not asked again until the number changes.
const MOST_REFUSALS: u32 = 4;

/// The pause of a socket that has found the session with the broker busy. Times are in milliseconds of [`crate::sys::coarse_now`].
#[derive(Debug, Clone, Copy)]
pub(super) struct BusyPause {
    /// 0: there is none.
    until: u64,
}

impl BusyPause {
    /// The session was not found busy.
    pub(super) const NONE: Self = Self { until: 0 };

    /// Whether a request may be made.
    pub(super) fn is_over(self, now: u64) -> bool {
        now >= self.until
    }

    /// The session is busy.
    pub(super) fn begin(&mut self, now: u64) {
        self.until = now + BUSY_MS;
    }
}

/// The requests of one receiving socket for the offers of its senders.
///
/// The directory shows a hash of each offer, so a request for an offer that it shows may be refused, and the next datagram would bring the
/// next request. The number of offers (`broker::offer_generation`) bounds the requests:
///
/// - A request that succeeds uses up its offer. There are no more of these than offers.
/// - Requests that are refused: at most [`MOST_REFUSALS`] for each number, so that an offer that is refused does not hide those beside it.
/// - A busy session was not asked, and is looked at again after [`BusyPause`].
///
/// So a sender has to make an offer, which the broker charges to it, for each of the few requests that it can provoke.
#[derive(Debug, Clone, Copy)]
pub(super) struct OfferAsks {
    /// The number of offers at which the broker is being asked, or is not asked again. 0: there is none.
    held: u64,
    /// The number of offers at the last refusal, and the refusals at that number.
    refused: (u64, u32),
    busy: BusyPause,
}

impl OfferAsks {
    /// Nothing was asked for.
    pub(super) const NONE: Self = Self { held: 0, refused: (0, 0), busy: BusyPause::NONE };

    /// Whether no request is to be made at this number of offers.
    #[inline]
    pub(super) fn are_held(&self, generation: u64) -> bool {
        self.held == generation
    }

    /// The broker is about to be asked. Other threads do not ask until [`Self::end`]. `false`: not now.
    pub(super) fn begin(&mut self, generation: u64, now: u64) -> bool {
        if !self.busy.is_over(now) {
            return false;
        }
        self.held = generation;
        true
    }

    /// The answer to the request that has begun at this number.
    pub(super) fn end(&mut self, generation: u64, answer: Result<(), Reason>, now: u64) {
        match answer {
            Ok(()) => {}
            Err(Reason::BrokerAbsent) => self.busy.begin(now),
            Err(_) => {
                let before = if self.refused.0 == generation { self.refused.1 } else { 0 };
                self.refused = (generation, before + 1);
                if before + 1 >= MOST_REFUSALS {
                    return;
                }
            }
        }
        // Another thread may ask at a later number meanwhile.
        if self.held == generation {
            self.held = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A request at this number, if one may be made.
    fn ask(asks: &mut OfferAsks, generation: u64, now: u64, answer: Result<(), Reason>) -> bool {
        let may = !asks.are_held(generation) && asks.begin(generation, now);
        if may {
            assert!(asks.are_held(generation), "other threads wait for the answer");
            asks.end(generation, answer, now);
        }
        may
    }

    #[test]
    fn refused_requests_are_few_for_each_number_of_offers() {
        let mut asks = OfferAsks::NONE;
        for generation in 1..4 {
            let asked = (0..100).filter(|_| ask(&mut asks, generation, 0, Err(Reason::NotTaken))).count();
            assert_eq!(asked, MOST_REFUSALS as usize);
            assert!(!ask(&mut asks, generation, u64::MAX, Ok(())), "time does not help");
        }
    }

    #[test]
    fn success_and_one_refusal_leave_room_for_requests() {
        let mut asks = OfferAsks::NONE;
        for answer in [Ok(()), Err(Reason::Refused), Ok(()), Ok(()), Ok(()), Ok(()), Ok(())] {
            assert!(ask(&mut asks, 7, 0, answer));
        }
    }

    #[test]
    fn busy_session_is_asked_again_after_a_pause() {
        let mut asks = OfferAsks::NONE;
        for at in (1..10).map(|i| i * BUSY_MS) {
            assert!(ask(&mut asks, 7, at, Err(Reason::BrokerAbsent)));
            assert!(!ask(&mut asks, 7, at + BUSY_MS - 1, Ok(())) && !ask(&mut asks, 8, at + BUSY_MS - 1, Ok(())));
        }
        assert!(ask(&mut asks, 7, 10 * BUSY_MS, Ok(())));
    }

    #[test]
    fn late_answer_does_not_end_the_request_of_another_thread() {
        let mut asks = OfferAsks::NONE;
        assert!(asks.begin(7, 0) && asks.begin(8, 0));
        asks.end(7, Ok(()), 0);
        assert!(asks.are_held(8));
    }
}
