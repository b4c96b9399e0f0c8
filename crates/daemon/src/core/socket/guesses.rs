//! Limits on the sockets that ask for an offer with numbers that are not those of its connection (protocol T5.12 to T5.14).
//!
//! Linux makes an initial sequence number of a hash of the connection's ends and of a clock, and the hash is the same in all network
//! namespaces of a kernel. A process that can have the same ends in another namespace can measure the hash there. It then has to
//! guess the moments, in ticks of 64 ns, at which the two ends of the connection were made.
//!
//! The numbers of a connection stay the same as long as it lasts, so its guesses are counted over all of its offers. The answer to a guess
//! does not tell whether it was right or came too late.

use std::collections::{BTreeMap, HashMap, VecDeque};

use partywall_protocol::socket::Numbers;

use super::facts::NumberedEnd;
use super::{NamespaceId, SocketFacts, SocketId};

/// The most sockets with the ends of an offer and other numbers. An honest one is of a connection that came after the offered one,
/// with its ends, before the broker heard that the offered one has gone.
const MOST_WRONG_TAKES: u64 = 4;
/// The most different numbers of sockets with the accepting end of a translated offer. Honest ones are of other connections of that listener.
const MOST_GUESSES: u64 = 64;
/// The connections whose guesses are remembered between their offers. The newest replaces the oldest.
const REMEMBERED: usize = 4096;

/// How often sockets have asked with wrong numbers.
#[derive(Debug, Default)]
pub(in crate::core) struct Guesses {
    /// For each accepting end of waiting translated offers, in each namespace where these may be accepted.
    ends: BTreeMap<((u128, u16), NamespaceId), OfEnd>,
    /// For connecting sockets that have no offer now.
    remembered: HashMap<SocketId, WrongAttempts>,
    /// These sockets, the oldest first.
    order: VecDeque<SocketId>,
}

#[derive(Debug, Default)]
struct OfEnd {
    offers: usize,
    guesses: u64,
    /// The latest different numbers: a socket that asks again guesses nothing new.
    latest: VecDeque<Numbers>,
}

/// The wrong attempts at one connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct WrongAttempts {
    /// Sockets with its ends and other numbers.
    takes: u64,
    /// Numbers of sockets with its accepting end, in its offers before the present one.
    guesses: u64,
    /// The guesses at the ends of the present offer before it came, which do not concern it.
    before: u64,
}

impl Guesses {
    /// A connection is offered, to be accepted in one of `namespaces`, at this end if it may be translated. What has been tried at it before.
    pub(super) fn offer_came(
        &mut self,
        socket: SocketId,
        end: Option<NumberedEnd>,
        namespaces: &[NamespaceId],
    ) -> WrongAttempts {
        let mut attempts = self.remembered.get(&socket).copied().unwrap_or_default();
        if let Some(end) = end {
            for namespace in namespaces {
                let of = self.ends.entry((end.accepting(), *namespace)).or_default();
                of.offers += 1;
                attempts.before += of.guesses;
            }
        }
        attempts
    }

    /// The offer ends, at which `wrong` was tried.
    pub(super) fn offer_went(
        &mut self,
        socket: SocketId,
        end: Option<NumberedEnd>,
        namespaces: &[NamespaceId],
        wrong: WrongAttempts,
    ) {
        let guesses = self.guesses(end, namespaces, wrong);
        if let Some(end) = end {
            for namespace in namespaces {
                let key = (end.accepting(), *namespace);
                if let Some(of) = self.ends.get_mut(&key) {
                    of.offers -= 1;
                    if of.offers == 0 {
                        self.ends.remove(&key);
                    }
                }
            }
        }
        let takes = wrong.takes;
        if (takes, guesses) == (0, 0) {
            return;
        }
        if self.remembered.insert(socket, WrongAttempts { takes, guesses, before: 0 }).is_none() {
            self.order.push_back(socket);
        }
        if self.order.len() > REMEMBERED
            && let Some(oldest) = self.order.pop_front()
        {
            self.remembered.remove(&oldest);
        }
    }

    /// The guesses at a connection whose offer waits.
    fn guesses(&self, end: Option<NumberedEnd>, namespaces: &[NamespaceId], wrong: WrongAttempts) -> u64 {
        let of = |namespace: &NamespaceId| end.and_then(|end| self.ends.get(&(end.accepting(), *namespace)));
        let now: u64 = namespaces.iter().filter_map(of).map(|of| of.guesses).sum();
        wrong.guesses + now.saturating_sub(wrong.before)
    }

    /// Whether a translated connection may be taken: so few have guessed at it.
    pub(super) fn are_few(&self, end: Option<NumberedEnd>, namespaces: &[NamespaceId], wrong: WrongAttempts) -> bool {
        self.guesses(end, namespaces, wrong) < MOST_GUESSES
    }

    /// A socket at the accepting end of connections has asked with wrong numbers. Returns the limit if it is reached.
    pub(super) fn guess(&mut self, socket: &SocketFacts) -> Option<u64> {
        let (end, numbers) = NumberedEnd::from_accepting(socket).zip(socket.identity.numbers)?;
        let of = self.ends.get_mut(&(end.accepting(), socket.namespace()))?;
        if of.latest.contains(&numbers) {
            return None;
        }
        of.guesses += 1;
        of.latest.push_back(numbers);
        if of.latest.len() as u64 > MOST_GUESSES {
            of.latest.pop_front();
        }
        (of.guesses % MOST_GUESSES == 0).then_some(MOST_GUESSES)
    }

    /// Whether the wrong attempts at this connection have reached their limit: the broker makes no channel of it.
    pub(super) fn is_over(&self, socket: SocketId) -> bool {
        let over = |wrong: &WrongAttempts| wrong.takes >= MOST_WRONG_TAKES || wrong.guesses >= MOST_GUESSES;
        self.remembered.get(&socket).is_some_and(over)
    }

    /// For each accepting end and namespace, the number of waiting translated offers.
    #[cfg(any(test, feature = "invariants"))]
    pub(in crate::core) fn counts(&self) -> BTreeMap<((u128, u16), NamespaceId), usize> {
        assert!(self.order.len() == self.remembered.len() && self.order.len() <= REMEMBERED);
        self.ends.iter().map(|(key, of)| (*key, of.offers)).collect()
    }
}

impl WrongAttempts {
    /// Whether the connection may be taken by its ends: so few with these have had other numbers.
    pub(super) fn takes_are_few(self) -> bool {
        self.takes < MOST_WRONG_TAKES
    }

    /// A socket with the connection's ends has other numbers. Returns the limit if it is reached.
    pub(super) fn take(&mut self) -> Option<u64> {
        self.takes = self.takes.saturating_add(1);
        (self.takes == MOST_WRONG_TAKES).then_some(MOST_WRONG_TAKES)
    }
}
