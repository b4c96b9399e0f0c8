//! `OfferDatagrams` and `TakeDatagrams`: a ring from one UDP socket to another (protocol U3, U4).
//!
//! A connection is named by its ends; a datagram by what its sender says of where it goes, and by what the kernel says at the
//! receiver of where it came from. Both must be what the sockets' own addresses imply, in one network namespace.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use partywall_shm::directory::{Change, Fingerprint, Transport, narrow};
use partywall_shm::layout::PAGE;
use partywall_shm::wire::{Directions, Kind, Message, Name, Refusal, Side};

use super::facts::{Ends, SocketFacts, SocketState};
use super::offer::Offer;
use crate::core::channel::{Channel, End, State};
use crate::core::connect::{check_region, geometry};
use crate::core::refuse::{self, Refuse, refuse};
use crate::core::{Action, Core, Credentials, Descriptor, SessionId};

/// An address of a message.
pub(in crate::core) fn at(high: u64, low: u64, port: u16) -> SocketAddr {
    SocketAddr::new(narrow(u128::from(high) << 64 | u128::from(low)), port)
}

/// Stands for every address of the receiver in the directory's fingerprint of an offer: the receiver of a wildcard does not
/// know to which of its addresses a datagram was sent.
const ANY: IpAddr = IpAddr::V6(Ipv6Addr::UNSPECIFIED);

impl<F: Descriptor> Core<F> {
    pub(in crate::core) fn offer_datagrams(
        &mut self,
        id: SessionId,
        request: u32,
        to: SocketAddr,
        (ring_offset, ring_size): (u64, u64),
        socket: SocketFacts,
        with: Vec<F>,
    ) -> Result<(), Refuse> {
        let from = source(&socket, to)?;
        let shape = geometry(ring_offset, ring_size)?;
        if ring_size == 0 {
            return refuse(Refusal::BadRegion, "a sender's region has a ring");
        }
        let Some((domain_id, domain, peer)) = self.member(id) else { return Ok(()) };
        domain.afford(ring_size)?;
        if domain.offers >= domain.quota.offers {
            let (name, has) = (&domain.name, domain.offers);
            return refuse(Refusal::Quota, format!("{name} has {has} offers waiting, its quota"));
        }
        if self.sockets.offers.len() >= self.capacity.offers {
            return refuse(Refusal::OutOfResources, "as many offers wait as the broker has descriptors for");
        }
        let Ok([region, link]) = <[F; 2]>::try_from(with) else { return Ok(()) };
        check_region(&region, shape)?;
        link.check_stream_link().or_else(|e| refuse(Refusal::BadLink, e))?;
        let ends = Ends::new(SocketAddr::new(ANY, to.port()), from);
        let same = |offer: &Offer<F>| offer.socket.cookie == socket.cookie && offer.to == Some(to);
        if let Some(before) = self.offers_of(ends, same).first().copied() {
            self.drop_offer(before);
        }
        let fingerprint = Fingerprint::offer(Transport::Udp, SocketAddr::new(ANY, to.port()), from, socket.netns);
        let offer = self.begin_offer(id, domain_id);
        self.sockets.offered.entry(ends).or_default().push(offer);
        self.actions.push(Action::Directory(Change::Offer(fingerprint)));
        let entry = Offer {
            session: id,
            domain: domain_id,
            peer,
            socket,
            ends,
            fingerprint,
            ring_offset,
            ring_size,
            region,
            link,
            to: Some(to),
            ticks: 0,
        };
        self.sockets.offers.insert(offer, entry);
        self.send(id, request, Message::Offered { offer });
        Ok(())
    }

    pub(in crate::core) fn take_datagrams(
        &mut self,
        id: SessionId,
        request: u32,
        from: SocketAddr,
        socket: SocketFacts,
        with: Vec<F>,
    ) -> Result<(), Refuse> {
        is_one(&socket)?;
        let Some((domain_id, domain, peer)) = self.member(id) else { return Ok(()) };
        let name = domain.name.clone();
        domain.afford(0)?;
        let Some(region) = with.into_iter().next() else { return Ok(()) };
        check_region(&region, geometry(PAGE, 0)?)?;
        let ends = Ends::new(SocketAddr::new(ANY, socket.local.port()), from);
        let fits = |offer: &Offer<F>| {
            offer.socket.netns == socket.netns && offer.to.is_some_and(|to| receives(&socket, to, from))
        };
        let Some(offer_id) = self.offers_of(ends, fits).first().copied() else {
            return refuse(Refusal::NoSuchOffer, "nobody offers a ring for datagrams to this socket now");
        };
        let Some(offer) = self.sockets.offers.get(&offer_id) else { return Ok(()) };
        if offer.socket.cookie == socket.cookie {
            self.drop_offer(offer_id);
            return refuse(Refusal::SelfContradiction, "a socket that sends to itself needs no ring");
        }
        let service = refuse::name(&format!("udp-{}", socket.local.port()))?;
        let Some(sender) = self.domains.get(&offer.domain) else { return Ok(()) };
        let same_user = offer.peer.uid == peer.uid;
        if !same_user && !self.policy.may_connect(offer.peer.uid, &sender.name, &name, &service) {
            let reason = format!("the policy does not let {} send to {name}:{service}, by a ring", sender.name);
            self.drop_offer(offer_id);
            return refuse(Refusal::Denied, reason);
        }
        if let Err(refused) = sender.afford(offer.ring_size) {
            self.drop_offer(offer_id);
            return Err(refused);
        }
        if offer.domain == domain_id && sender.ends + 2 > sender.quota.channels {
            return refuse(Refusal::Quota, format!("{name} can hold no more channels, by its quota"));
        }

        // Nothing is refused from here on.
        let from_name = sender.name.clone();
        let Some(offer) = self.remove_offer(offer_id) else { return Ok(()) };
        let end = |name: &Name, domain, of: Credentials, ring_size, region| End {
            name: name.clone(),
            domain,
            uid: Some(of.uid),
            state: State::Held { domain, pid: of.pid },
            ring_size,
            region,
            cookie: None,
        };
        let (theirs, mine) = (self.keep(offer.region.clone()), self.keep(region));
        let ends =
            [end(&from_name, offer.domain, offer.peer, offer.ring_size, theirs), end(&name, domain_id, peer, 0, mine)];
        let (kind, directions, since) = (Kind::Socket, Directions::FORWARD, self.now);
        self.channels.insert(offer_id, Channel { kind, directions, service, since, ends });
        self.hold(offer_id, Side::Connecting, offer.domain, offer.peer.pid, offer.ring_size);
        self.hold(offer_id, Side::Accepting, domain_id, peer.pid, 0);
        let message = Message::Taken {
            channel: offer_id,
            ring_offset: offer.ring_offset,
            ring_size: offer.ring_size,
            pid: offer.peer.pid,
            uid: offer.peer.uid,
            name: from_name.to_string(),
        };
        let descriptors = vec![offer.region, offer.link];
        self.actions.push(Action::Send { session: id, request, message, descriptors });
        Ok(())
    }
}

/// A UDP socket with a port, to which whatever is sent there comes.
fn is_one(socket: &SocketFacts) -> Result<(), Refuse> {
    if socket.transport == Transport::Udp && socket.state == SocketState::Listening {
        return Ok(());
    }
    refuse(Refusal::BadSocket, "the socket is not one for datagrams that has its address to itself")
}

/// What the receiver of a datagram will be told that it is from.
fn source(socket: &SocketFacts, to: SocketAddr) -> Result<SocketAddr, Refuse> {
    is_one(socket)?;
    let ip = match (socket.local.ip().to_canonical(), to.ip()) {
        (own, _) if !own.is_unspecified() => own,
        (_, to) if !to.is_loopback() => to,
        // What the kernel sends from within this host has the address it is sent to; but of all of 127/8, the first.
        (_, IpAddr::V4(_)) => IpAddr::V4(Ipv4Addr::LOCALHOST),
        (_, IpAddr::V6(_)) => IpAddr::V6(Ipv6Addr::LOCALHOST),
    };
    if to.port() == 0 || to.ip().is_unspecified() || to.ip().is_multicast() {
        return refuse(Refusal::BadSocket, "datagrams to this address may come to many");
    }
    Ok(SocketAddr::new(ip, socket.local.port()))
}

/// Whether what is sent to `to` within the namespace of this socket comes to it and to no other.
fn receives(socket: &SocketFacts, to: SocketAddr, from: SocketAddr) -> bool {
    let own = socket.local.ip().to_canonical();
    let family = to.is_ipv6() || socket.local.is_ipv4() || !socket.only_v6;
    // Which addresses else are of this namespace the broker does not know.
    let here = own == to.ip()
        || (socket.local.ip().is_unspecified()
            && to.ip().is_loopback()
            && (to.is_ipv4() || socket.local.is_ipv6())
            && family);
    let wanted = socket
        .remote
        .is_none_or(|remote| (remote.ip().to_canonical(), remote.port()) == (from.ip().to_canonical(), from.port()));
    here && wanted && socket.local.port() == to.port()
}
