//! `Take`, `Confirm` and `Finish`: the two ends of an offered connection show their sockets in turn (protocol T4, T5).
//!
//! All facts used here are from this handshake. The accepting side's socket is shown first and last, the connecting side's
//! in between: each is established then, and the accepting side's is the same connection both times. So there is a moment at which both
//! are established with each other's ends; within a network namespace no third socket can have either end then, unless addresses are
//! translated. The initial sequence numbers of a connection prove more, where the broker may read them: they hold between
//! namespaces, and where addresses are translated between these.

use std::collections::BTreeSet;
use std::iter;

use partywall_protocol::directory::Transport;
use partywall_protocol::wire::{Directions, Located, Message, Origin, Refusal, RegionReference, Side};

use super::SocketFacts;
use super::facts::{Ends, NotPeers, are_peers, carries_on, not_peers};
use super::handshake::{Handshake, Taker, bell_way};
use super::offer::{Offer, OfferOf, connected, near_region_of};
use super::open::{SocketSide, affords_both_ends, service_of};
use crate::core::id::{ChannelId, DomainId};
use crate::core::refuse::{Refuse, refuse};
use crate::core::region::{check_region, located};
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
        let (remote, shape) = (connected(&socket)?, near_region_of(reference)?);
        let Some((domain, of, peer)) = self.member(id) else { return Ok(()) };
        self.not_yet(&socket)?;
        of.afford(reference.ring_size)?;
        let Some(region) = with.into_iter().next() else { return Ok(()) };
        let offer_id = self.matching(&socket, Ends::new(socket.local, remote), peer)?;
        let mut taker = Taker { session: id, domain, peer, socket, reference, region };
        if let Err(refused) = self.may_be_a_channel(offer_id, &taker) {
            if refused.code == Refusal::Denied {
                self.drop_offer(offer_id);
            }
            return Err(refused);
        }
        let here = peer.origin();
        let there = self.sockets.offers.get(&offer_id).map_or(here, |offer| offer.peer.origin());
        let side = self.handshake_region((id, offer_id), (here, there), shape, taker.region)?;
        let (reference, window) = (side.reference, side.window);
        (taker.reference, taker.region) = (reference, side.region);
        let Some(offer) = self.sockets.offers.get_mut(&offer_id) else { return Ok(()) };
        offer.ticks = 0;
        let Some(handshake) = offer.handshake_mut() else { return Ok(()) };
        let Some(far) = handshake.far.take() else { return Ok(()) };
        handshake.taker = Some(taker);
        self.hide_translated(offer_id);
        self.sockets.in_use.insert(socket.id(), offer_id);
        if let Some(session) = self.sessions.get_mut(&id) {
            session.takes.insert(offer_id);
        }
        let message = Message::Bell { offer: offer_id, way: bell_way(here, there), region: reference };
        self.send_with(id, request, message, iter::once(far).chain(window).collect());
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
        let (offer, handshake) = self.handshake_of(offer_id, self.sessions.get(&id).map(|session| &session.offers))?;
        let Some(taker) = handshake.taker.as_ref().filter(|_| handshake.confirmed.is_none()) else {
            return refuse(Refusal::NoSuchOffer, format!("no program waits for your offer {offer_id} to be confirmed"));
        };
        let one_user = are_one_user(offer.peer, taker.peer);
        let shown = shown_again((&socket, Side::Connecting), &offer.socket, &taker.socket, one_user)
            .and_then(|()| is_made(taker.peer.origin(), taker.reference, &taker.region));
        if let Err(refused) = shown {
            self.drop_offer(offer_id);
            return Err(refused);
        }
        let message = self.peer_is(taker.domain, taker.peer, taker.reference);
        let region = taker.region.clone();
        if let Some(handshake) = self.sockets.offers.get_mut(&offer_id).and_then(Offer::handshake_mut) {
            handshake.confirmed = Some(socket);
        }
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
        let (offer, handshake) = self.handshake_of(offer_id, self.sessions.get(&id).map(|session| &session.takes))?;
        let Some((taker, confirmed)) = handshake.taker.as_ref().zip(handshake.confirmed.as_ref()) else {
            return refuse(Refusal::NoSuchOffer, format!("offer {offer_id} is not confirmed yet"));
        };
        let one_user = are_one_user(offer.peer, taker.peer);
        let shown = shown_again((&socket, Side::Accepting), &taker.socket, confirmed, one_user)
            .and_then(|()| is_made(offer.peer.origin(), offer.reference, &offer.region))
            .and_then(|()| self.may_be_a_channel(offer_id, taker));
        if let Err(refused) = shown {
            self.drop_offer(offer_id);
            return Err(refused);
        }

        // From here on the request cannot be refused.
        let Some(offer) = self.remove_offer(offer_id) else { return Ok(()) };
        let OfferOf::Connection(handshake) = offer.of else { return Ok(()) };
        let Some(taker) = handshake.taker else { return Ok(()) };
        let message = self.peer_is(offer.domain, offer.peer, offer.reference);
        let service = service_of(Transport::Tcp, socket.local.port())?;
        let connecting = SocketSide {
            domain: offer.domain,
            peer: offer.peer,
            ring_size: offer.reference.ring_size,
            region: offer.region.clone(),
            socket: Some(offer.socket.id()),
        };
        let accepting = SocketSide {
            domain: taker.domain,
            peer: taker.peer,
            ring_size: taker.reference.ring_size,
            region: taker.region,
            socket: Some(socket.id()),
        };
        self.open_socket_channel(offer_id, service, Directions::BOTH, [connecting, accepting]);
        self.actions.push(Action::Send { session: id, request, message, descriptors: vec![offer.region] });
        Ok(())
    }

    /// An offer of a connection, if it is one of `own`, and how far its ends have come.
    fn handshake_of(
        &self,
        offer_id: ChannelId,
        own: Option<&BTreeSet<ChannelId>>,
    ) -> Result<(&Offer<F>, &Handshake<F>), Refuse> {
        let is_own = own.is_some_and(|own| own.contains(&offer_id));
        let offer = self.sockets.offers.get(&offer_id).filter(|_| is_own);
        offer.and_then(|offer| Some((offer, offer.handshake()?))).map_or_else(|| no_such(offer_id), Ok)
    }

    /// Describes one side to the other.
    fn peer_is(&self, domain: DomainId, peer: Credentials, reference: RegionReference) -> Message {
        let name = self.name_of(domain).map_or_else(String::new, |name| name.to_string());
        // As with channels, another broker's numbers are below this one's instance, or above all of its numbers.
        let program = self.instance + u64::from(domain);
        Message::PeerIs { region: reference, program, user: peer.user, name }
    }

    /// Whether policy and quotas allow a channel of the offer and the side that takes it.
    fn may_be_a_channel(&self, offer_id: ChannelId, taker: &Taker<F>) -> Result<(), Refuse> {
        let Some(offer) = self.sockets.offers.get(&offer_id) else { return no_such(offer_id) };
        let (Some(from), Some(to)) = (self.domains.get(&offer.domain), self.domains.get(&taker.domain)) else {
            return no_such(offer_id);
        };
        let service = service_of(Transport::Tcp, taker.socket.local.port())?;
        self.allows_ring(offer, from, (to, taker.peer), (&service, "connect to"))?;
        if offer.domain == taker.domain {
            let rings = [offer.reference.ring_size, taker.reference.ring_size];
            affords_both_ends(from, rings.into_iter().fold(from.ring_bytes, u64::saturating_add))?;
        }
        to.afford(taker.reference.ring_size)?;
        from.afford(offer.reference.ring_size)
    }

    /// Whether a translated offer may be taken still.
    fn are_guesses_few(&self, offer: &Offer<F>) -> bool {
        let few = |handshake: &Handshake<F>| {
            self.sockets.guesses.are_few(offer.translated_end(), &handshake.namespaces, handshake.wrong)
        };
        offer.handshake().is_some_and(few)
    }

    /// A socket has asked for an offer with numbers that are those of none. The offers `of_ends` have its ends.
    fn guessed_wrong(&mut self, socket: &SocketFacts, of_ends: &[ChannelId], taker: Credentials) {
        let mut reached = self.sockets.guesses.guess(socket);
        for id in of_ends {
            let handshake = self.sockets.offers.get_mut(id).and_then(Offer::handshake_mut);
            reached = handshake.and_then(|handshake| handshake.wrong.take()).or(reached);
        }
        if let Some(wrong) = reached.filter(|_| self.log.allows(taker.user, self.now)) {
            let (user, pid, at) = (taker.user, taker.pid, socket.local);
            tracing::warn!(%user, pid, %at, wrong, "{}: connections stay on TCP", NotPeers::Guessed);
        }
    }

    /// The only offer whose socket is the other end of this one.
    fn matching(&mut self, socket: &SocketFacts, ends: Ends, taker: Credentials) -> Result<ChannelId, Refuse> {
        let namespace = socket.namespace();
        let waits = |offer: &Offer<F>| {
            offer
                .handshake()
                .is_some_and(|handshake| handshake.far.is_some() && handshake.namespaces.contains(&namespace))
        };
        // An offer that may not be taken any more is answered like none: the answer is not to tell whose guess was right.
        let (mut why, mut wrong) = (None, Vec::new());
        for id in self.offers_of(ends, waits) {
            let Some(offer) = self.sockets.offers.get(&id) else { continue };
            if !offer.handshake().is_some_and(|handshake| handshake.wrong.takes_are_few()) {
                continue;
            }
            match are_peers(&offer.socket, socket, are_one_user(offer.peer, taker)) {
                Ok(()) => {
                    carries_on(&offer.socket, socket).or_else(not_peers)?;
                    return Ok(id);
                }
                Err(reason) => why = Some(reason),
            }
            if why == Some(NotPeers::OtherNumbers) {
                wrong.push(id);
            }
        }
        // The connecting end may be another there: then the numbers alone say whose connection it is, and only one offer can have them.
        if let [id] = *self.translated_offers_of(socket, waits)
            && let Some(offer) = self.sockets.offers.get(&id).filter(|offer| self.are_guesses_few(offer))
        {
            return carries_on(&offer.socket, socket).or_else(not_peers).map(|()| id);
        }
        self.guessed_wrong(socket, &wrong, taker);
        match why {
            None | Some(NotPeers::OtherNumbers) => refuse(Refusal::NoSuchOffer, "no offer of this connection now"),
            Some(reason) => not_peers(reason),
        }
    }
}

/// Whether the region of a side at `origin` is made, which is handed to the other side now (protocol T4.13). Memory of a machine's program does not
/// leave the machine, and a window always has the memory of its regions.
fn is_made<F: Descriptor>(origin: Origin, reference: RegionReference, region: &F) -> Result<(), Refuse> {
    match located(reference)? {
        (Located::OwnMemory, shape) if origin == Origin::Host => check_region(region, shape).or_else(|refused| {
            refuse(Refusal::NoSuchOffer, format!("the other side has not made its region: {}", refused.reason))
        }),
        _ => Ok(()),
    }
}

/// Whether both processes certainly are of one user, which has both connections anyway. In a machine the broker sees no users.
fn are_one_user(one: Credentials, other: Credentials) -> bool {
    one.origin() == Origin::Host && one.is_user_of(other)
}

/// A socket that was shown before must be the same connection still.
fn still(now: &SocketFacts, earlier: &SocketFacts) -> Result<(), Refuse> {
    if now.is_still(earlier) {
        return Ok(());
    }
    refuse(Refusal::BadSocket, "this is not the connection that you have shown before, or one side has ended it")
}

/// A socket is shown `now`, by this side, that was shown `before`: it must be the same connection still, and what `other` is the other
/// end of, which the other side has shown meanwhile.
fn shown_again(
    (now, side): (&SocketFacts, Side),
    before: &SocketFacts,
    other: &SocketFacts,
    one_user: bool,
) -> Result<(), Refuse> {
    still(now, before)?;
    let (connecting, accepting) = match side {
        Side::Connecting => (now, other),
        Side::Accepting => (other, now),
    };
    are_peers(connecting, accepting, one_user).and_then(|()| carries_on(other, now)).or_else(not_peers)
}

fn no_such<T>(offer: ChannelId) -> Result<T, Refuse> {
    refuse(Refusal::NoSuchOffer, format!("you have no offer {offer} that still waits"))
}
