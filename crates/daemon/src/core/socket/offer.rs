//! `Offer` and `Cancel`: the connecting side of a connection brings what it takes to have it on a ring (protocol T4).

use std::net::SocketAddr;

use partywall_protocol::directory::{DirectoryChange, Fingerprint, Transport, slot_of};
use partywall_protocol::wire::{Message, Refusal, RegionReference};
use partywall_shm::layout::Geometry;

use super::facts::{Ends, SocketFacts, SocketState};
use super::handshake::{Handshake, bell};
use crate::core::channel::ChannelId;
use crate::core::connect::{check_region, own_memory};
use crate::core::domain::{DomainId, DomainRecord};
use crate::core::refuse::{Refuse, refuse};
use crate::core::session::SessionRecord;
use crate::core::{Action, Core, Descriptor, SessionId};
use crate::credentials::Credentials;

/// An offer lives between so many ticks and one less. The other side looks whenever it is called upon to do something with the
/// connection; what is quiet for longer is offered again when it is not.
const TICKS: u8 = 30;
/// Network namespaces in which one offer can be found: so many may have the address that it is for.
const MOST_NAMESPACES: usize = 4;

/// A connection that waits for its other end.
#[derive(Debug)]
pub(in crate::core) struct Offer<F> {
    pub(in crate::core) session: SessionId,
    pub(in crate::core) domain: DomainId,
    pub(in crate::core) peer: Credentials,
    pub(in crate::core) socket: SocketFacts,
    pub(in crate::core) ends: Ends,
    /// What the directory has of it: for a connection, one for each namespace in which it may be accepted.
    pub(in crate::core) fingerprints: Vec<Fingerprint>,
    pub(in crate::core) reference: RegionReference,
    pub(in crate::core) region: F,
    pub(in crate::core) of: OfferOf<F>,
    pub(super) ticks: u8,
}

/// What is offered a ring.
#[derive(Debug)]
pub(in crate::core) enum OfferOf<F> {
    /// A connection, and how far its two ends have come.
    Connection(Box<Handshake<F>>),
    /// Datagrams to this address.
    Datagrams { to: SocketAddr },
}

impl<F> Offer<F> {
    /// How far the two ends of a connection have come; `None` for datagrams.
    pub(in crate::core) fn handshake(&self) -> Option<&Handshake<F>> {
        match &self.of {
            OfferOf::Connection(handshake) => Some(handshake),
            OfferOf::Datagrams { .. } => None,
        }
    }

    pub(super) fn handshake_mut(&mut self) -> Option<&mut Handshake<F>> {
        match &mut self.of {
            OfferOf::Connection(handshake) => Some(handshake),
            OfferOf::Datagrams { .. } => None,
        }
    }

    /// Where datagrams go that are offered a ring; `None` for a connection.
    pub(in crate::core) fn to(&self) -> Option<SocketAddr> {
        match self.of {
            OfferOf::Connection(_) => None,
            OfferOf::Datagrams { to } => Some(to),
        }
    }
}

impl<F: Descriptor> Core<F> {
    pub(in crate::core) fn offer(
        &mut self,
        id: SessionId,
        request: u32,
        reference: RegionReference,
        socket: SocketFacts,
        with: Vec<F>,
    ) -> Result<(), Refuse> {
        let (remote, shape) = connected_with(&socket, reference)?;
        let Some((domain_id, domain, peer)) = self.member(id) else { return Ok(()) };
        self.not_yet(&socket)?;
        self.may_offer(domain, reference.ring_size)?;
        let Some(region) = with.into_iter().next() else { return Ok(()) };
        check_region(&region, shape)?;
        let [own, far] = bell(&region)?;
        let ends = Ends::new(remote, socket.local);
        // The older one is of a socket that has gone: two that are established have never the same ends in one namespace.
        let stale = |offer: &Offer<F>| offer.handshake().is_some() && offer.socket.netns == socket.netns;
        for twin in self.offers_of(ends, stale) {
            self.drop_offer(twin);
        }

        let offer = self.add_offer(Offer {
            session: id,
            domain: domain_id,
            peer,
            socket,
            ends,
            fingerprints: self.accepted_in(remote, &socket),
            reference,
            region,
            of: OfferOf::Connection(Box::new(Handshake::new(far, own.clone()))),
            ticks: 0,
        });
        let descriptors = vec![own];
        self.actions.push(Action::Send { session: id, request, message: Message::Bell { offer }, descriptors });
        Ok(())
    }

    /// The fingerprints by which the accepting side finds the offer of a socket that is connected to `remote`.
    ///
    /// One for each network namespace that it may be in, with that namespace's key: the socket's own, unless nobody listens there and
    /// somebody does elsewhere, and the broker can tell connections of two namespaces apart.
    fn accepted_in(&self, remote: SocketAddr, socket: &SocketFacts) -> Vec<Fingerprint> {
        let listener = Fingerprint::listener(Transport::Tcp, remote, socket.netns);
        let elsewhere = self.sockets.listening.get(&listener).filter(|all| !all.contains_key(&socket.netns));
        let elsewhere = elsewhere.filter(|_| socket.identity.numbers.is_some());
        let mut all: Vec<u64> =
            elsewhere.into_iter().flat_map(|all| all.keys().copied().take(MOST_NAMESPACES)).collect();
        if all.is_empty() {
            all.push(socket.netns);
        }
        all.into_iter().map(|netns| Fingerprint::connection(remote, socket.local, self.sockets.key_of(netns))).collect()
    }

    /// Whether this domain may offer one thing more, with a ring of this size.
    pub(super) fn may_offer(&self, domain: &DomainRecord, ring_size: u64) -> Result<(), Refuse> {
        domain.afford(ring_size)?;
        if domain.offers >= domain.quota.offers {
            let (name, has) = (&domain.name, domain.offers);
            return refuse(Refusal::Quota, format!("{name} has {has} offers waiting, its quota"));
        }
        if self.sockets.offers.len() >= self.capacity.offers {
            return refuse(Refusal::OutOfResources, "as many offers wait as the broker has descriptors for");
        }
        Ok(())
    }

    /// Puts an offer into the tables and into the directory: [`Self::remove_offer`] takes it out again. Returns its number.
    pub(super) fn add_offer(&mut self, offer: Offer<F>) -> ChannelId {
        let id = self.next_channel;
        self.next_channel += 1;
        if let Some(domain) = self.domains.get_mut(&offer.domain) {
            domain.offers += 1;
        }
        if let Some(session) = self.sessions.get_mut(&offer.session) {
            session.offers.insert(id);
        }
        self.sockets.offered.entry(offer.ends).or_default().push(id);
        match offer.of {
            OfferOf::Connection(_) => drop(self.sockets.cookies.insert(offer.socket.cookie, id)),
            OfferOf::Datagrams { .. } => drop(self.sockets.slots.insert(slot_of(id))),
        }
        self.actions.extend(offer.fingerprints.iter().map(|f| Action::Directory(DirectoryChange::Offer(*f))));
        self.sockets.offers.insert(id, offer);
        id
    }

    pub(in crate::core) fn cancel(&mut self, id: SessionId, request: u32, offer: ChannelId) -> Result<(), Refuse> {
        let is_theirs = |session: &SessionRecord| session.offers.contains(&offer) || session.takes.contains(&offer);
        if !self.sessions.get(&id).is_some_and(is_theirs) {
            return refuse(Refusal::NoSuchOffer, format!("you have no offer {offer} that still waits"));
        }
        self.drop_offer(offer);
        self.send(id, request, Message::Done {});
        Ok(())
    }

    /// One of the regular moments at which offers grow old. Those who have an end of its bell hear it hang up.
    pub(in crate::core) fn tick(&mut self) {
        let mut old = Vec::new();
        for (id, offer) in &mut self.sockets.offers {
            offer.ticks += 1;
            if offer.ticks >= TICKS {
                old.push(*id);
            }
        }
        for id in old {
            self.drop_offer(id);
        }
    }

    /// Whether [`CoreEvent::Tick`](crate::core::CoreEvent::Tick) means anything now.
    pub fn wants_ticks(&self) -> bool {
        !self.sockets.offers.is_empty() || self.log.owes_report()
    }

    /// Takes an offer out of the tables.
    pub(in crate::core) fn remove_offer(&mut self, id: ChannelId) -> Option<Offer<F>> {
        let offer = self.sockets.offers.remove(&id)?;
        if let Some(of) = self.sockets.offered.get_mut(&offer.ends) {
            of.retain(|other| *other != id);
            if of.is_empty() {
                self.sockets.offered.remove(&offer.ends);
            }
        }
        match offer.of {
            OfferOf::Connection(_) => drop(self.sockets.cookies.remove(&offer.socket.cookie)),
            OfferOf::Datagrams { .. } => drop(self.sockets.slots.remove(&slot_of(id))),
        }
        if let Some(taker) = offer.handshake().and_then(|handshake| handshake.taker.as_ref()) {
            self.sockets.cookies.remove(&taker.socket.cookie);
            if let Some(session) = self.sessions.get_mut(&taker.session) {
                session.takes.remove(&id);
            }
        }
        if let Some(session) = self.sessions.get_mut(&offer.session) {
            session.offers.remove(&id);
        }
        if let Some(domain) = self.domains.get_mut(&offer.domain) {
            domain.offers -= 1;
        }
        self.actions.extend(offer.fingerprints.iter().map(|f| Action::Directory(DirectoryChange::NoOffer(*f))));
        Some(offer)
    }

    /// Forgets an offer: with it go the broker's ends of its bell, by which its maker hears of that.
    pub(in crate::core) fn drop_offer(&mut self, id: ChannelId) {
        drop(self.remove_offer(id));
    }

    /// The offers of a connection that fit.
    pub(super) fn offers_of(&self, ends: Ends, fits: impl Fn(&Offer<F>) -> bool) -> Vec<ChannelId> {
        let all = self.sockets.offered.get(&ends).map_or(&[][..], Vec::as_slice);
        all.iter().copied().filter(|id| self.sockets.offers.get(id).is_some_and(&fits)).collect()
    }

    /// Refuses a socket that is offered, or on a ring, already.
    pub(super) fn not_yet(&self, socket: &SocketFacts) -> Result<(), Refuse> {
        match self.sockets.cookies.get(&socket.cookie) {
            Some(known) => refuse(Refusal::SelfContradiction, format!("this socket is channel {known} already")),
            None => Ok(()),
        }
    }
}

/// The other end of a socket that comes with a region, and what that region must be: one with a ring.
pub(super) fn connected_with(
    socket: &SocketFacts,
    reference: RegionReference,
) -> Result<(SocketAddr, Geometry), Refuse> {
    Ok((connected(socket)?, region_of(reference)?))
}

/// What the region of a socket must be: one with a ring.
pub(super) fn region_of(reference: RegionReference) -> Result<Geometry, Refuse> {
    if reference.ring_size == 0 {
        return refuse(Refusal::BadRegion, "a socket's region has a ring");
    }
    own_memory(reference)
}

/// The other end of a socket that can be offered or taken.
fn connected(socket: &SocketFacts) -> Result<SocketAddr, Refuse> {
    match (socket.state, socket.remote) {
        (SocketState::Established, Some(remote)) if socket.transport == Transport::Tcp => Ok(remote),
        _ => refuse(Refusal::BadSocket, "the socket is not connected, or one side has ended"),
    }
}
