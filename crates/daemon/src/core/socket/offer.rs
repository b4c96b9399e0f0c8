//! `Offer` and `Cancel`: the connecting side of a connection brings what it takes to have it on a ring (protocol T4).

use std::iter;
use std::net::SocketAddr;

use partywall_protocol::directory::{DirectoryChange, Fingerprint, Transport, is_scoped, slot_of};
use partywall_protocol::wire::{Located, Message, Origin, Refusal, RegionReference};
use partywall_shm::layout::Geometry;

use super::facts::{Ends, NotPeers, NumberedEnd, not_peers};
use super::handshake::{Handshake, SideRegion, bell, bell_way};
use super::{NamespaceId, NamespaceIndex, SocketFacts, SocketState, Sockets};
use crate::core::domain::DomainRecord;
use crate::core::ended_handshakes::HandshakeSide;
use crate::core::id::{ChannelId, DomainId};
use crate::core::refuse::{Refuse, refuse};
use crate::core::region::{check_reserved, located};
use crate::core::session::SessionRecord;
use crate::core::window_places::SocketPlace;
use crate::core::{Core, Descriptor, SessionId};
use crate::credentials::Credentials;

/// An offer lives for 29 to 30 ticks. The other side looks for it at each call on the connection. A connection that was quiet for
/// longer is offered again at its next call.
const TICKS: u8 = 30;
/// The most network namespaces in which one offer can be found. Several namespaces may have the address that it is for.
const MOST_NAMESPACES: usize = 4;

/// A connection that waits for its other end.
#[derive(Debug)]
pub(in crate::core) struct Offer<F> {
    pub(in crate::core) session: SessionId,
    pub(in crate::core) domain: DomainId,
    pub(in crate::core) peer: Credentials,
    pub(in crate::core) socket: SocketFacts,
    pub(in crate::core) ends: Ends,
    /// Its entries in the directory: for a connection, one for each namespace and address at which it may be accepted.
    pub(in crate::core) fingerprints: Vec<Fingerprint>,
    /// The machine of these namespaces, or the host.
    pub(in crate::core) accepted_on: Origin,
    pub(in crate::core) reference: RegionReference,
    pub(in crate::core) region: F,
    pub(in crate::core) of: OfferOf<F>,
    pub(super) ticks: u8,
}

/// The object that is offered a ring.
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

    /// What its accepting side shows whatever translates its addresses; `None` if both sides see the same addresses.
    pub(in crate::core) fn translated_end(&self) -> Option<NumberedEnd> {
        let handshake = self.handshake().filter(|handshake| !handshake.translated.is_empty())?;
        NumberedEnd::from_connecting(&self.socket, handshake.accepted_at)
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
        let (remote, shape) = (connected(&socket)?, near_region_of(reference)?);
        let Some((domain_id, domain, peer)) = self.member(id) else { return Ok(()) };
        self.not_yet(&socket)?;
        if self.sockets.guesses.is_over(socket.id()) {
            return not_peers(NotPeers::Guessed);
        }
        self.may_offer(domain, reference.ring_size)?;
        let Some(region) = with.into_iter().next() else { return Ok(()) };
        let (accepted_at, namespaces) = self.accepted_by(remote, &socket);
        let here = peer.origin();
        let there = namespaces.first().map_or(here, |namespace| namespace.origin);
        let [own, far] = bell(&region, (here, there))?;
        let number = self.next_channel;
        let SideRegion { reference, region, window } =
            self.handshake_region((id, number), (here, there), shape, region)?;
        let ends = Ends::new(remote, socket.local);
        // The older one is of a socket that has gone: two that are established have never the same ends in one namespace.
        let stale = |offer: &Offer<F>| offer.handshake().is_some() && offer.socket.namespace() == socket.namespace();
        for twin in self.offers_of(ends, stale) {
            self.drop_offer(twin);
        }
        let keys = || namespaces.iter().map(|namespace| self.sockets.key_of(*namespace));
        // A listener that is reached at several addresses is found by the one that it shows.
        let mut seen_at = vec![remote, accepted_at];
        seen_at.dedup();
        let connection = |key| seen_at.iter().map(move |at| Fingerprint::connection(*at, socket.local, key));
        let fingerprints = keys().flat_map(connection).collect();
        // Within a namespace, both sides see the same addresses.
        let is_elsewhere = !namespaces.contains(&socket.namespace());
        let translated = keys().filter(|_| is_elsewhere).map(|key| Fingerprint::translated(accepted_at, key)).collect();
        let handshake = Handshake::new(far, (accepted_at, namespaces), translated);

        let offer = self.add_offer(Offer {
            session: id,
            domain: domain_id,
            peer,
            socket,
            ends,
            fingerprints,
            accepted_on: there,
            reference,
            region,
            of: OfferOf::Connection(Box::new(handshake)),
            ticks: 0,
        });
        let message = Message::Bell { offer, way: bell_way(here, there), region: reference };
        self.send_with(id, request, message, iter::once(own).chain(window).collect());
        Ok(())
    }

    /// The address at which the accepting side of a socket that is connected to `remote` may be, and the network namespaces, all on one
    /// machine or on the host.
    ///
    /// It is the socket's own namespace, unless `remote` is forwarded to a listener elsewhere, or there is no listener here but one elsewhere.
    /// Without any listener, since that was closed or another program has taken the connection over, programs that run at the address show
    /// where the other side is. All this holds only if the broker can tell connections of two namespaces apart.
    fn accepted_by(&self, remote: SocketAddr, socket: &SocketFacts) -> (SocketAddr, Vec<NamespaceId>) {
        let own = socket.namespace();
        let here = (remote, vec![own]);
        if socket.identity.numbers.is_none() || is_scoped(remote.ip()) {
            return here;
        }
        let Sockets { listening, resident, .. } = &self.sockets;
        let listener = |at| Fingerprint::listener(Transport::Tcp, at, socket.netns);
        let to_listener = |at| Some((at, self.elsewhere(listening, listener(at), own)?));
        let to_program = |at: SocketAddr| {
            let program = Fingerprint::address(at.ip(), socket.netns);
            let is_here = resident.has(program, own);
            Some((at, self.elsewhere(resident, program, own).filter(|_| !is_here)?))
        };
        let forwarded = self.forwarded(remote);
        if let Some(accepted) = forwarded.and_then(to_listener) {
            return accepted;
        }
        if listening.has(listener(remote), own) {
            return here;
        }
        to_listener(remote).or_else(|| to_program(forwarded?)).or_else(|| to_program(remote)).unwrap_or(here)
    }

    /// The network namespaces other than `own` that have something, on one machine or on the host: on that of `own` if there are some. If
    /// several machines have it, each offer is for the next of them.
    fn elsewhere(&self, index: &NamespaceIndex, of: Fingerprint, own: NamespaceId) -> Option<Vec<NamespaceId>> {
        let others = || index.of(of).filter(|namespace| *namespace != own);
        let is_near = others().any(|namespace| namespace.origin == own.origin);
        let mut origins: Vec<Origin> = others().map(|namespace| namespace.origin).collect();
        origins.dedup();
        let turn = usize::try_from(self.next_channel).unwrap_or(0) % origins.len().max(1);
        let there = if is_near { own.origin } else { *origins.get(turn)? };
        Some(others().filter(|namespace| namespace.origin == there).take(MOST_NAMESPACES).collect())
    }

    /// The region of one side of a handshake: the one that it has shown, if both sides are on one machine, and otherwise one for which it gets
    /// a place in the window to the other (protocol T4.8).
    pub(super) fn handshake_region(
        &mut self,
        (id, handshake): (SessionId, ChannelId),
        (here, there): (Origin, Origin),
        shape: Geometry,
        shown: F,
    ) -> Result<SideRegion<F>, Refuse> {
        if here != there {
            let SocketPlace { base, shape, memory, reader } = self.handshake_place(id, there, shape, handshake)?;
            let reference = RegionReference::in_window(base, shape);
            return Ok(SideRegion { reference, region: reader, window: Some(memory) });
        }
        // In a machine, the memory does not leave it.
        if here == Origin::Host {
            check_reserved(&shown, shape)?;
        }
        Ok(SideRegion { reference: RegionReference::own_memory(shape), region: shown, window: None })
    }

    /// Whether this domain may offer one thing more, with a ring of this size.
    pub(super) fn may_offer(&self, domain: &DomainRecord, ring_size: u64) -> Result<(), Refuse> {
        domain.afford(ring_size)?;
        if domain.offers >= domain.quota.offers {
            let (name, has) = (&domain.name, domain.offers);
            return refuse(Refusal::Quota, format!("{name} has {has} offers waiting, its quota"));
        }
        self.sockets.may_have(domain.founder.origin(), |counts| counts.offers, 1, self.capacity.offers)?;
        if self.sockets.offers.len() >= self.capacity.offers {
            return refuse(Refusal::OutOfResources, "as many offers wait as the broker has descriptors for");
        }
        Ok(())
    }

    /// Puts an offer into the tables and into the directory: [`Self::remove_offer`] takes it out again. Returns its number.
    pub(super) fn add_offer(&mut self, mut offer: Offer<F>) -> ChannelId {
        let id = self.next_channel;
        self.next_channel += 1;
        if let Some(domain) = self.domains.get_mut(&offer.domain) {
            domain.offers += 1;
        }
        if let Some(session) = self.sessions.get_mut(&offer.session) {
            session.offers.insert(id);
        }
        if let Some(counts) = self.sockets.counts_of(offer.peer.origin()) {
            counts.offers += 1;
            counts.flow_slots += usize::from(offer.to().is_some());
        }
        self.sockets.offered.entry(offer.ends).or_default().push(id);
        if let Some(end) = offer.translated_end() {
            self.sockets.translated.entry(end).or_default().push(id);
            self.sockets.young.insert(id);
        }
        let (socket, end) = (offer.socket.id(), offer.translated_end());
        if let Some(handshake) = offer.handshake_mut() {
            handshake.wrong = self.sockets.guesses.offer_came(socket, end, &handshake.namespaces);
        }
        match offer.of {
            OfferOf::Connection(_) => drop(self.sockets.in_use.insert(offer.socket.id(), id)),
            OfferOf::Datagrams { .. } => drop(self.sockets.slots.insert(slot_of(id))),
        }
        let found = offer.fingerprints.iter().map(|f| DirectoryChange::Offer(*f));
        self.show_on(offer.accepted_on, found.collect());
        self.sockets.offers.insert(id, offer);
        id
    }

    pub(in crate::core) fn cancel(&mut self, id: SessionId, request: u32, offer: ChannelId) -> Result<(), Refuse> {
        if !self.take_back(id, offer) {
            return refuse(Refusal::NoSuchOffer, format!("you have no offer {offer} that still waits"));
        }
        self.send(id, request, Message::Done {});
        Ok(())
    }

    /// A session gives up its offer or its take, which may have ended already. Returns whether it had one of this number.
    pub(in crate::core) fn take_back(&mut self, id: SessionId, offer: ChannelId) -> bool {
        let Some((domain, _, peer)) = self.member(id) else { return false };
        let is_theirs = |session: &SessionRecord| session.offers.contains(&offer) || session.takes.contains(&offer);
        let waits = self.sessions.get(&id).is_some_and(is_theirs);
        if waits {
            self.drop_offer(offer);
        }
        self.give_up_handshake(offer, domain, peer.pid) || waits
    }

    /// One step of the ageing of offers. The holders of an expired offer's bell see it hang up.
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
        self.waits_for_gateway() || self.waits_for_room() || !self.sockets.offers.is_empty() || self.log.owes_report()
    }

    /// Takes an offer out of the tables.
    pub(in crate::core) fn remove_offer(&mut self, id: ChannelId) -> Option<Offer<F>> {
        self.hide_translated(id);
        let offer = self.sockets.offers.remove(&id)?;
        if let Some(end) = offer.translated_end()
            && let Some(of) = self.sockets.translated.get_mut(&end)
        {
            of.retain(|other| *other != id);
            if of.is_empty() {
                self.sockets.translated.remove(&end);
            }
        }
        if let Some(handshake) = offer.handshake() {
            let (end, Handshake { namespaces, wrong, .. }) = (offer.translated_end(), handshake);
            self.sockets.guesses.offer_went(offer.socket.id(), end, namespaces, *wrong);
        }
        if let Some(counts) = self.sockets.counts_of(offer.peer.origin()) {
            counts.offers -= 1;
            counts.flow_slots -= usize::from(offer.to().is_some());
        }
        if let Some(of) = self.sockets.offered.get_mut(&offer.ends) {
            of.retain(|other| *other != id);
            if of.is_empty() {
                self.sockets.offered.remove(&offer.ends);
            }
        }
        match offer.of {
            OfferOf::Connection(_) => drop(self.sockets.in_use.remove(&offer.socket.id())),
            OfferOf::Datagrams { .. } => drop(self.sockets.slots.remove(&slot_of(id))),
        }
        if let Some(taker) = offer.handshake().and_then(|handshake| handshake.taker.as_ref()) {
            self.sockets.in_use.remove(&taker.socket.id());
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
        self.show_on(offer.accepted_on, offer.fingerprints.iter().map(|f| DirectoryChange::NoOffer(*f)).collect());
        Some(offer)
    }

    /// Forgets an offer, and hangs up its bell if the other end was not taken, by which its maker hears of that. Places in windows stay with the two sides
    /// of a connection until each gives them up.
    pub(in crate::core) fn drop_offer(&mut self, id: ChannelId) {
        let Some(offer) = self.remove_offer(id) else { return };
        let Some(handshake) = offer.handshake() else { return self.machines.channel_gone(id) };
        if let Some(far) = &handshake.far {
            far.hang_up();
        }
        let side = |domain, peer: Credentials, region: RegionReference| HandshakeSide {
            domain,
            pid: peer.pid,
            ring_size: region.ring_size,
        };
        let taker = handshake.taker.as_ref().map(|taker| side(taker.domain, taker.peer, taker.reference));
        let sides = iter::once(side(offer.domain, offer.peer, offer.reference)).chain(taker).collect();
        self.handshake_ended(id, sides);
    }

    /// The offers of a connection that fit.
    pub(super) fn offers_of(&self, ends: Ends, fits: impl Fn(&Offer<F>) -> bool) -> Vec<ChannelId> {
        let all = self.sockets.offered.get(&ends).map_or(&[][..], Vec::as_slice);
        all.iter().copied().filter(|id| self.sockets.offers.get(id).is_some_and(&fits)).collect()
    }

    /// Refuses a socket that is offered, or on a ring, already.
    pub(super) fn not_yet(&self, socket: &SocketFacts) -> Result<(), Refuse> {
        match self.sockets.in_use.get(&socket.id()) {
            Some(known) => refuse(Refusal::SelfContradiction, format!("this socket is channel {known} already")),
            None => Ok(()),
        }
    }
}

/// Where the region of a socket is, and what it must be: one with a ring.
pub(super) fn region_of(reference: RegionReference) -> Result<(Located, Geometry), Refuse> {
    if reference.ring_size == 0 {
        return refuse(Refusal::BadRegion, "a socket's region has a ring");
    }
    located(reference)
}

/// The required region that a connected socket is shown with: one in separate memory.
pub(super) fn near_region_of(reference: RegionReference) -> Result<Geometry, Refuse> {
    match region_of(reference)? {
        (Located::OwnMemory, shape) => Ok(shape),
        (Located::Window { .. }, _) => {
            refuse(Refusal::BadRegion, "a connection is shown with a region in separate memory")
        }
    }
}

/// The other end of a socket that can be offered or taken.
pub(super) fn connected(socket: &SocketFacts) -> Result<SocketAddr, Refuse> {
    match (socket.state, socket.remote) {
        (SocketState::Established, Some(remote)) if socket.transport == Transport::Tcp => Ok(remote),
        _ => refuse(Refusal::BadSocket, "the socket is not connected, or one side has ended"),
    }
}
