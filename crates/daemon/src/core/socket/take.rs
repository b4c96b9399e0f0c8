//! `Take`, `Confirm` and `Finish`: the two ends of an offered connection show their sockets in turn (protocol T4, T5).
//!
//! Nothing that is believed here is older than the handshake. The accepting side's socket is shown first and last, the connecting side's
//! in between: each is established then, and the accepting side's is the same connection both times. So there is a moment at which both
//! are established with each other's ends; within a network namespace no third socket can have either end then, as long as nobody
//! translates addresses. The sequence numbers that a connection began with say more, where the broker may read them: they hold between
//! namespaces and past translators.

use partywall_protocol::wire::{Directions, Kind, Message, Name, Refusal, RegionReference, Side};

use super::facts::{Ends, NotPeers, SocketFacts, are_peers, carries_on};
use super::handshake::Taker;
use super::offer::{Offer, connected_with};
use crate::core::channel::{Channel, ChannelEnd, ChannelId, State};
use crate::core::connect::check_region;
use crate::core::domain::DomainId;
use crate::core::refuse::{self, Refuse, refuse};
use crate::core::{Action, Core, Descriptor, SessionId};
use crate::credentials::Credentials;

impl<F: Descriptor> Core<F> {
    pub(in crate::core) fn take(
        &mut self,
        id: SessionId,
        request: u32,
        reference: RegionReference,
        socket: SocketFacts,
        with: Vec<F>,
    ) -> Result<(), Refuse> {
        let (remote, shape) = connected_with(&socket, reference)?;
        let Some((domain, of, peer)) = self.member(id) else { return Ok(()) };
        self.not_yet(&socket)?;
        of.afford(reference.ring_size)?;
        let Some(region) = with.into_iter().next() else { return Ok(()) };
        check_region(&region, shape)?;
        let offer_id = self.matching(&socket, Ends::new(socket.local, remote), peer)?;
        let taker = Taker { session: id, domain, peer, socket, reference, region };
        if let Err(refused) = self.may_be_a_channel(offer_id, &taker) {
            if refused.code == Refusal::Denied {
                if self.log.allows(peer.user, self.now) {
                    tracing::info!(reason = %refused.reason, user = %peer.user, "ring denied by policy");
                }
                self.drop_offer(offer_id);
            }
            return Err(refused);
        }
        let Some(offer) = self.sockets.offers.get_mut(&offer_id) else { return Ok(()) };
        let Some(handshake) = &mut offer.handshake else { return Ok(()) };
        let Some(far) = handshake.far.take() else { return Ok(()) };
        handshake.taker = Some(taker);
        offer.ticks = 0;
        self.sockets.cookies.insert(socket.cookie, offer_id);
        if let Some(session) = self.sessions.get_mut(&id) {
            session.takes.insert(offer_id);
        }
        // The offering side is to confirm.
        self.actions.push(Action::Ring { bell: far.clone() });
        let (message, descriptors) = (Message::Bell { offer: offer_id }, vec![far]);
        self.actions.push(Action::Send { session: id, request, message, descriptors });
        Ok(())
    }

    /// The offering side shows its socket once more, now that the other has shown the other end.
    pub(in crate::core) fn confirm(
        &mut self,
        id: SessionId,
        request: u32,
        offer_id: ChannelId,
        socket: SocketFacts,
    ) -> Result<(), Refuse> {
        let is_theirs = self.sessions.get(&id).is_some_and(|session| session.offers.contains(&offer_id));
        let offer = self.sockets.offers.get(&offer_id).filter(|_| is_theirs);
        let handshake = offer.and_then(|offer| Some((offer, offer.handshake.as_ref()?)));
        let Some((offer, handshake)) = handshake else { return no_such(offer_id) };
        let Some(taker) = handshake.taker.as_ref().filter(|_| handshake.confirmed.is_none()) else {
            return refuse(Refusal::NoSuchOffer, format!("nobody waits for your offer {offer_id} to be confirmed"));
        };
        let one_user = offer.peer.is_user_of(taker.peer);
        let shown = still(&socket, &offer.socket).and_then(|()| {
            are_peers(&socket, &taker.socket, one_user)
                .and_then(|()| carries_on(&taker.socket, &socket))
                .or_else(not_peers)
        });
        if let Err(refused) = shown {
            self.drop_offer(offer_id);
            return Err(refused);
        }
        let message = self.peer_is(taker.domain, taker.peer, taker.reference);
        let (region, bell) = (taker.region.clone(), handshake.ring_far.clone());
        if let Some(handshake) = self.sockets.offers.get_mut(&offer_id).and_then(|offer| offer.handshake.as_mut()) {
            handshake.confirmed = Some(socket);
        }
        // The accepting side is to finish.
        self.actions.push(Action::Ring { bell });
        self.actions.push(Action::Send { session: id, request, message, descriptors: vec![region] });
        Ok(())
    }

    /// The accepting side shows its socket once more: it has been established throughout, and so the other was at the same time.
    pub(in crate::core) fn finish(
        &mut self,
        id: SessionId,
        request: u32,
        offer_id: ChannelId,
        socket: SocketFacts,
    ) -> Result<(), Refuse> {
        let is_theirs = self.sessions.get(&id).is_some_and(|session| session.takes.contains(&offer_id));
        let offer = self.sockets.offers.get(&offer_id).filter(|_| is_theirs);
        let handshake = offer.and_then(|offer| Some((offer, offer.handshake.as_ref()?)));
        let Some((offer, handshake)) = handshake else { return no_such(offer_id) };
        let Some((taker, confirmed)) = handshake.taker.as_ref().zip(handshake.confirmed.as_ref()) else {
            return refuse(Refusal::NoSuchOffer, format!("offer {offer_id} is not confirmed yet"));
        };
        let one_user = offer.peer.is_user_of(taker.peer);
        let shown = still(&socket, &taker.socket)
            .and_then(|()| {
                are_peers(confirmed, &socket, one_user).and_then(|()| carries_on(confirmed, &socket)).or_else(not_peers)
            })
            .and_then(|()| self.may_be_a_channel(offer_id, taker));
        if let Err(refused) = shown {
            self.drop_offer(offer_id);
            return Err(refused);
        }

        // Nothing is refused from here on.
        let Some(offer) = self.remove_offer(offer_id) else { return Ok(()) };
        let Some(taker) = offer.handshake.and_then(|handshake| handshake.taker) else { return Ok(()) };
        let message = self.peer_is(offer.domain, offer.peer, offer.reference);
        let service = refuse::name(&format!("tcp-{}", socket.local.port()))?;
        let (from_name, name) = (self.name_of(offer.domain), self.name_of(taker.domain));
        let (Some(from_name), Some(name)) = (from_name, name) else { return Ok(()) };
        let end = |name: Name, domain, of: Credentials, ring_size, region, cookie| ChannelEnd {
            name,
            domain,
            user: Some(of.user),
            state: State::Held { domain, pid: of.pid },
            ring_size,
            region,
            cookie: Some(cookie),
        };
        let (theirs, mine) = (self.keep(offer.region.clone()), self.keep(taker.region));
        let ends = [
            end(from_name, offer.domain, offer.peer, offer.reference.ring_size, theirs, offer.socket.cookie),
            end(name, taker.domain, taker.peer, taker.reference.ring_size, mine, socket.cookie),
        ];
        let (kind, directions, since) = (Kind::Socket, Directions::BOTH, self.now);
        self.channels.insert(offer_id, Channel { kind, directions, service, since, ends });
        self.sockets.cookies.insert(offer.socket.cookie, offer_id);
        self.sockets.cookies.insert(socket.cookie, offer_id);
        self.hold(offer_id, Side::Connecting, offer.domain, offer.peer.pid, offer.reference.ring_size);
        self.hold(offer_id, Side::Accepting, taker.domain, taker.peer.pid, taker.reference.ring_size);
        self.actions.push(Action::Send { session: id, request, message, descriptors: vec![offer.region] });
        Ok(())
    }

    fn name_of(&self, domain: DomainId) -> Option<Name> {
        self.domains.get(&domain).map(|domain| domain.name.clone())
    }

    fn peer_is(&self, domain: DomainId, peer: Credentials, reference: RegionReference) -> Message {
        let name = self.name_of(domain).map_or_else(String::new, |name| name.to_string());
        Message::PeerIs { region: reference, pid: peer.pid, user: peer.user, name }
    }

    /// Whether policy and quotas allow a channel of the offer and the side that takes it.
    fn may_be_a_channel(&self, offer_id: ChannelId, taker: &Taker<F>) -> Result<(), Refuse> {
        let Some(offer) = self.sockets.offers.get(&offer_id) else { return no_such(offer_id) };
        let (Some(from), Some(to)) = (self.domains.get(&offer.domain), self.domains.get(&taker.domain)) else {
            return no_such(offer_id);
        };
        let service = refuse::name(&format!("tcp-{}", taker.socket.local.port()))?;
        let one_user = offer.peer.is_user_of(taker.peer);
        if !self.policy.may_share(offer.peer, one_user, (&from.name, &to.name), &service) {
            let reason = format!("the policy does not let {} connect to {}:{service}, on a ring", from.name, to.name);
            return refuse(Refusal::Denied, reason);
        }
        let both = offer.reference.ring_size.saturating_add(taker.reference.ring_size).saturating_add(from.ring_bytes);
        if offer.domain == taker.domain && (from.ends + 2 > from.quota.channels || both > from.quota.ring_bytes) {
            return refuse(Refusal::Quota, format!("{} can hold no more channels or rings, by its quota", to.name));
        }
        to.afford(taker.reference.ring_size)?;
        from.afford(offer.reference.ring_size)
    }

    /// The one offer whose socket is the other end of this one.
    fn matching(&self, socket: &SocketFacts, ends: Ends, taker: Credentials) -> Result<ChannelId, Refuse> {
        let waits = |offer: &Offer<F>| offer.handshake.as_ref().is_some_and(|handshake| handshake.far.is_some());
        let mut why = None;
        for id in self.offers_of(ends, waits) {
            let Some(offer) = self.sockets.offers.get(&id) else { continue };
            match are_peers(&offer.socket, socket, offer.peer.is_user_of(taker)) {
                Ok(()) => {
                    carries_on(&offer.socket, socket).or_else(not_peers)?;
                    return Ok(id);
                }
                Err(reason) => why = Some(reason),
            }
        }
        match why {
            None | Some(NotPeers::OtherNumbers) => refuse(Refusal::NoSuchOffer, "nobody offers this connection now"),
            Some(reason) => not_peers(reason),
        }
    }
}

/// A socket that was shown before must be the same connection still.
fn still(now: &SocketFacts, earlier: &SocketFacts) -> Result<(), Refuse> {
    if now.is_still(earlier) {
        return Ok(());
    }
    refuse(Refusal::BadSocket, "this is not the connection that you have shown before, or one side has ended it")
}

fn not_peers<T>(reason: NotPeers) -> Result<T, Refuse> {
    refuse(Refusal::Ambiguous, reason.to_string())
}

fn no_such(offer: ChannelId) -> Result<(), Refuse> {
    refuse(Refusal::NoSuchOffer, format!("you have no offer {offer} that still waits"))
}
