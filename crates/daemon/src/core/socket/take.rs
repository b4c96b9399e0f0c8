//! `Take`: the accepting side of a connection shows that it has the other end of one that is offered (protocol T4, T5).
//!
//! An established TCP connection is named by its two ends within one network namespace, and nobody can have a socket with ends
//! that are not its own there. Between namespaces that is true only as far as their addresses differ: so both must have been
//! made by those who run the broker, and no third one may be known to have an address of either end.

use partywall_shm::directory::is_scoped;
use partywall_shm::wire::{Directions, Kind, Message, Name, Refusal, Side};

use super::facts::{Ends, SocketFacts, key};
use super::offer::{Offer, connected, connected_with};
use crate::core::channel::{Channel, ChannelId, End, State};
use crate::core::connect::check_region;
use crate::core::refuse::{self, Refuse, refuse};
use crate::core::{Action, Core, Descriptor, SessionId};

impl<F: Descriptor> Core<F> {
    pub(in crate::core) fn take(
        &mut self,
        id: SessionId,
        request: u32,
        (ring_offset, ring_size): (u64, u64),
        socket: SocketFacts,
        with: Vec<F>,
    ) -> Result<(), Refuse> {
        let (remote, shape) = connected_with(&socket, ring_offset, ring_size)?;
        let Some((domain_id, domain, peer)) = self.member(id) else { return Ok(()) };
        let name = domain.name.clone();
        self.not_yet(&socket)?;
        domain.afford(ring_size)?;
        let Some(region) = with.into_iter().next() else { return Ok(()) };
        check_region(&region, shape)?;
        let offer_id = self.matching(&socket, Ends::new(socket.local, remote))?;
        let Some(offer) = self.sockets.offers.get(&offer_id) else { return Ok(()) };
        let service = refuse::name(&format!("tcp-{}", socket.local.port()))?;
        let Some(from) = self.domains.get(&offer.domain) else { return Ok(()) };
        // Processes of one user can reach into each other's memory anyway.
        let same_user = offer.peer.uid == peer.uid;
        if !same_user && !self.policy.may_connect(offer.peer.uid, &from.name, &name, &service) {
            let from = from.name.clone();
            if self.log.allows(offer.peer.uid, self.now) {
                tracing::info!(%from, to = %name, %service, uid = offer.peer.uid, "ring denied by policy");
            }
            self.drop_offer(offer_id);
            let reason = format!("the policy does not let {from} connect to {name}:{service}, on a ring");
            return refuse(Refusal::Denied, reason);
        }
        let both = offer.ring_size.saturating_add(ring_size).saturating_add(from.ring_bytes);
        if offer.domain == domain_id && (from.ends + 2 > from.quota.channels || both > from.quota.ring_bytes) {
            return refuse(Refusal::Quota, format!("{name} can hold no more channels or rings, by its quota"));
        }
        if let Err(refused) = from.afford(offer.ring_size) {
            self.drop_offer(offer_id);
            return Err(refused);
        }

        // Nothing is refused from here on.
        let Some(offer) = self.remove_offer(offer_id) else { return Ok(()) };
        let from_name = self.domains.get(&offer.domain).map_or_else(|| name.clone(), |from| from.name.clone());
        let end = |name: &Name, domain, of: crate::core::Credentials, ring_size, region, cookie| End {
            name: name.clone(),
            domain,
            uid: Some(of.uid),
            state: State::Held { domain, pid: of.pid },
            ring_size,
            region,
            cookie: Some(cookie),
        };
        let (theirs, mine) = (self.keep(offer.region.clone()), self.keep(region));
        let ends = [
            end(&from_name, offer.domain, offer.peer, offer.ring_size, theirs, offer.socket.cookie),
            end(&name, domain_id, peer, ring_size, mine, socket.cookie),
        ];
        let (kind, directions, since) = (Kind::Socket, Directions::BOTH, self.now);
        self.channels.insert(offer_id, Channel { kind, directions, service, since, ends });
        self.sockets.cookies.insert(offer.socket.cookie, offer_id);
        self.sockets.cookies.insert(socket.cookie, offer_id);
        self.hold(offer_id, Side::Connecting, offer.domain, offer.peer.pid, offer.ring_size);
        self.hold(offer_id, Side::Accepting, domain_id, peer.pid, ring_size);
        let message = Message::Taken {
            channel: offer_id,
            ring_offset: offer.ring_offset,
            ring_size: offer.ring_size,
            pid: offer.peer.pid,
            uid: offer.peer.uid,
            name: from_name.to_string(),
        };
        let descriptors = std::iter::once(offer.region).chain(offer.link).collect();
        self.actions.push(Action::Send { session: id, request, message, descriptors });
        Ok(())
    }

    /// The one offer whose socket is the other end of this one.
    fn matching(&mut self, socket: &SocketFacts, ends: Ends) -> Result<ChannelId, Refuse> {
        let here = self.offers_of(ends, |offer| offer.socket.netns == socket.netns);
        if let Some(&offer) = here.first() {
            return self.plausible(offer, socket);
        }
        let none = || refuse(Refusal::NoSuchOffer, "nobody offers this connection now");
        let remote = connected(socket)?;
        if !socket.trusted || is_scoped(socket.local.ip()) || is_scoped(remote.ip()) {
            return none();
        }
        let elsewhere = self.offers_of(ends, |offer| offer.socket.trusted);
        match elsewhere[..] {
            [] => none(),
            [offer] if self.is_unambiguous(offer, socket) => self.plausible(offer, socket),
            _ => refuse(Refusal::Ambiguous, "its addresses are known in more than one network namespace"),
        }
    }

    /// Whether no third namespace is known to have the address of either end.
    fn is_unambiguous(&self, offer: ChannelId, socket: &SocketFacts) -> bool {
        let Some(offer) = self.sockets.offers.get(&offer) else { return false };
        [(offer.socket.local, offer.socket.netns), (socket.local, socket.netns)].into_iter().all(|(at, netns)| {
            let known = self.sockets.residents.get(&key(at.ip()));
            known.is_none_or(|known| known.keys().all(|of| *of == netns))
        })
    }

    /// Holds the numbers of two ends against each other: what the one's peer acknowledged the other has received, and what the
    /// one has received the other has sent. Of two ends of one connection this is true at all times.
    fn plausible(&mut self, id: ChannelId, socket: &SocketFacts) -> Result<ChannelId, Refuse> {
        let Some(Offer { socket: other, .. }) = self.sockets.offers.get(&id) else { return Ok(id) };
        if other.acknowledged <= socket.received && other.received <= socket.sent {
            return Ok(id);
        }
        self.drop_offer(id);
        refuse(Refusal::Ambiguous, "what the two sockets have carried says that they are not ends of one connection")
    }
}
