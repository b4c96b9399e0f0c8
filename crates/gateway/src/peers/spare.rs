//! The second connection to a host: how long it is kept, and when it is used in place of the first.
//!
//! Two hosts that connect at once use one of the two connections, and close the other. A gateway that was killed, and started again, connects as
//! well, while the other gateway still counts its earlier connection as alive. Only what comes by a connection shows which case it is.

use std::sync::atomic::Ordering;
use std::time::Duration;

use super::{PeerHost, SIGN_OF_LIFE};

/// Time between two looks: something comes by a live connection in each, or in the next one.
const LOOK: Duration = SIGN_OF_LIFE;
/// A spare connection is closed after it had no stream for this many looks.
const QUIET: u32 = 3;
/// The used connection counts as dead after nothing has come by it for this many looks, while something has come by the spare one. This is fewer than
/// [`QUIET`], so a spare connection is not closed in favour of a dead one.
const SILENT: u32 = 2;

/// The state of the two connections at one moment. Numbers count from the beginning of a connection.
#[derive(Debug, Clone, Copy)]
struct SpareLook {
    /// Streams that the spare connection has, and has had.
    streams: usize,
    begun: usize,
    used_received: u64,
    spare_received: u64,
}

impl SpareLook {
    fn at(used: &PeerHost, spare: &PeerHost) -> Self {
        Self {
            streams: spare.streams.load(Ordering::Relaxed),
            begun: spare.begun.load(Ordering::Relaxed),
            used_received: used.received(),
            spare_received: spare.received(),
        }
    }
}

/// The future of a spare connection.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum SpareOutcome {
    /// It has ended by itself.
    Ended,
    /// The other gateway opens no stream on it any more.
    Unneeded,
    /// The used connection is dead.
    Needed,
}

/// Looks at a spare connection from time to time.
#[derive(Debug)]
pub(super) struct SpareWatch {
    last: SpareLook,
    quiet: u32,
    silent: u32,
}

impl SpareWatch {
    pub(super) fn of(used: &PeerHost, spare: &PeerHost) -> Self {
        Self::from(SpareLook::at(used, spare))
    }

    fn from(last: SpareLook) -> Self {
        Self { last, quiet: 0, silent: 0 }
    }

    /// Waits until it is clear what becomes of the spare connection.
    pub(super) async fn outcome(mut self, used: &PeerHost, spare: &PeerHost) -> SpareOutcome {
        loop {
            let used_ended = tokio::time::timeout(LOOK, used.connection.closed()).await.is_ok();
            if !spare.is_alive() {
                return SpareOutcome::Ended;
            }
            if used_ended {
                return SpareOutcome::Needed;
            }
            if let Some(outcome) = self.look(SpareLook::at(used, spare)) {
                return outcome;
            }
        }
    }

    fn look(&mut self, now: SpareLook) -> Option<SpareOutcome> {
        let last = std::mem::replace(&mut self.last, now);
        // A short stream may have begun and ended since. The other gateway may not have noticed the better connection yet.
        let is_quiet = now.streams == 0 && now.begun == last.begun;
        self.quiet = if is_quiet { self.quiet + 1 } else { 0 };
        if now.used_received != last.used_received {
            self.silent = 0;
        } else if now.spare_received != last.spare_received {
            self.silent += 1;
        }
        if self.silent >= SILENT {
            return Some(SpareOutcome::Needed);
        }
        (self.quiet >= QUIET && self.silent == 0).then_some(SpareOutcome::Unneeded)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Looks at which the connections have received these numbers of datagrams, and the spare one has had these streams.
    fn outcomes(looks: &[(u64, u64, usize)]) -> Vec<Option<SpareOutcome>> {
        let look = |&(used_received, spare_received, begun): &(u64, u64, usize)| SpareLook {
            streams: 0,
            begun,
            used_received,
            spare_received,
        };
        let mut watch = SpareWatch::from(look(&looks[0]));
        looks[1..].iter().map(|now| watch.look(look(now))).collect()
    }

    #[test]
    fn short_streams_between_looks_keep_spare_connection() {
        let streams = [0, 1, 2, 3, 4, 4, 4, 4];
        let looks: Vec<_> = (0..).zip(streams).map(|(at, begun)| (at, at, begun)).collect();
        let mut expected: Vec<_> = (0..6).map(|_| None).collect();
        expected.push(Some(SpareOutcome::Unneeded));
        assert_eq!(outcomes(&looks), expected);
    }

    #[test]
    fn silent_connection_is_replaced_if_spare_one_receives() {
        assert_eq!(outcomes(&[(7, 1, 0), (7, 2, 0), (7, 3, 0)]), [None, Some(SpareOutcome::Needed)]);
        // One look without a datagram is nothing unusual.
        assert_eq!(outcomes(&[(7, 1, 0), (7, 2, 0), (8, 3, 0), (8, 4, 0)]), [None, None, None]);
        // The network is cut: neither is better.
        assert_eq!(outcomes(&[(7, 1, 0), (7, 1, 0), (7, 1, 0)]), [None, None]);
    }

    #[test]
    fn spare_connection_is_not_closed_for_one_that_is_silent() {
        let looks = [(7, 1, 0), (8, 1, 0), (9, 1, 0), (9, 2, 0), (10, 3, 0)];
        assert_eq!(outcomes(&looks), [None, None, None, Some(SpareOutcome::Unneeded)]);
    }
}
