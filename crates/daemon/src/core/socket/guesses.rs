//! Limits on the sockets that ask for an offer with numbers that are not those of its connection (protocol T5.12, T5.13).
//!
//! Linux makes an initial sequence number of a hash of the connection's ends and of a clock, and the hash is the same in all network
//! namespaces of a kernel. A process that can have the same ends in another namespace can measure the hash there. It then has to
//! guess the moments, in ticks of 64 ns, at which the two ends of the connection were made.

use std::collections::BTreeMap;

use super::SocketFacts;
use super::facts::{NotPeers, NumberedEnd, not_peers};
use super::offer::Offer;
use crate::core::id::ChannelId;
use crate::core::refuse::Refuse;
use crate::core::{Core, Descriptor};
use crate::credentials::Credentials;

/// The most sockets with the ends of an offer and other numbers. An honest one is of a connection that came after the offered one,
/// with its ends, before the broker heard that the offered one has gone.
pub(super) const MOST_WRONG_TAKES: u64 = 4;
/// The most sockets with the accepting end of a translated offer and other numbers, while it waits. Honest ones are of other connections
/// of that listener, each of which asks a few times.
pub(super) const MOST_GUESSES: u64 = 64;

/// For each accepting end of waiting translated offers, how many sockets have asked with wrong numbers.
#[derive(Debug, Default)]
pub(in crate::core) struct Guesses {
    ends: BTreeMap<(u128, u16), OfEnd>,
}

#[derive(Debug, Default)]
struct OfEnd {
    offers: usize,
    guesses: u64,
}

impl Guesses {
    /// An offer with this accepting end has come. Returns the number of guesses so far, which do not concern it.
    pub(super) fn offer_came(&mut self, end: (u128, u16)) -> u64 {
        let of = self.ends.entry(end).or_default();
        of.offers += 1;
        of.guesses
    }

    pub(super) fn offer_went(&mut self, end: (u128, u16)) {
        if let Some(of) = self.ends.get_mut(&end) {
            of.offers -= 1;
            if of.offers == 0 {
                self.ends.remove(&end);
            }
        }
    }

    /// The number of ends with waiting offers, and of these offers.
    #[cfg(any(test, feature = "invariants"))]
    pub(in crate::core) fn counts(&self) -> (usize, usize) {
        (self.ends.len(), self.ends.values().map(|of| of.offers).sum())
    }
}

impl<F: Descriptor> Core<F> {
    /// A socket has asked for an offer, and its numbers are not those of any. `of_ends` have its ends.
    pub(super) fn guessed_wrong(&mut self, socket: &SocketFacts, of_ends: &[ChannelId]) {
        for id in of_ends {
            if let Some(handshake) = self.sockets.offers.get_mut(id).and_then(Offer::handshake_mut) {
                handshake.wrong_takes = handshake.wrong_takes.saturating_add(1);
            }
        }
        if let Some(end) = NumberedEnd::from_accepting(socket)
            && let Some(of) = self.sockets.guesses.ends.get_mut(&end.accepting())
        {
            of.guesses += 1;
        }
    }

    /// The offer that a socket has found. Refused if more than `most` sockets have asked for it with wrong numbers before: this one may
    /// have guessed them.
    pub(super) fn unless_guessed(
        &mut self,
        offer: ChannelId,
        (wrong, most): (u64, u64),
        taker: Credentials,
    ) -> Result<ChannelId, Refuse> {
        if wrong <= most {
            return Ok(offer);
        }
        if self.log.allows(taker.user, self.now) {
            tracing::warn!(user = %taker.user, pid = taker.pid, offer, wrong, "{}", NotPeers::Guessed);
        }
        not_peers(NotPeers::Guessed)
    }

    /// The guesses at the accepting end of a translated offer since it came.
    pub(super) fn guesses_at(&self, offer: &Offer<F>) -> u64 {
        let end = offer.translated_end().and_then(|end| self.sockets.guesses.ends.get(&end.accepting()));
        let before = offer.handshake().map_or(0, |handshake| handshake.guesses_before);
        end.map_or(0, |of| of.guesses - before)
    }
}
