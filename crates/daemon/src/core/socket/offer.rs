//! `Offer` and `Cancel`: the connecting side of a connection brings what it takes to have it on a ring (protocol T3).

use std::net::SocketAddr;

use partywall_shm::directory::{Change, Fingerprint, Transport, slot_of};
use partywall_shm::layout::Geometry;
use partywall_shm::wire::{Message, Refusal};

use super::facts::{Ends, SocketFacts, SocketState};
use crate::core::channel::ChannelId;
use crate::core::connect::{check_region, geometry};
use crate::core::domain::DomainId;
use crate::core::refuse::{Refuse, refuse};
use crate::core::{Action, Core, Credentials, Descriptor, SessionId};

/// An offer lives between so many ticks and one less. The other side looks whenever it is called upon to do something with the
/// connection; what is quiet for longer is offered anew when it is not.
const TICKS: u8 = 30;

/// A connection that waits for its other end.
#[derive(Debug)]
pub(in crate::core) struct Offer<F> {
    pub(in crate::core) session: SessionId,
    pub(in crate::core) domain: DomainId,
    pub(in crate::core) peer: Credentials,
    pub(in crate::core) socket: SocketFacts,
    pub(in crate::core) ends: Ends,
    pub(in crate::core) fingerprint: Fingerprint,
    pub(in crate::core) ring_offset: u64,
    pub(in crate::core) ring_size: u64,
    pub(in crate::core) region: F,
    /// The other side's end of the link; `None` for datagrams.
    pub(in crate::core) link: Option<F>,
    /// Where datagrams go that are offered a ring; `None` for a connection.
    pub(in crate::core) to: Option<SocketAddr>,
    pub(super) ticks: u8,
}

impl<F: Descriptor> Core<F> {
    pub(in crate::core) fn offer(
        &mut self,
        id: SessionId,
        request: u32,
        (ring_offset, ring_size): (u64, u64),
        socket: SocketFacts,
        with: Vec<F>,
    ) -> Result<(), Refuse> {
        let (remote, shape) = connected_with(&socket, ring_offset, ring_size)?;
        let Some((domain_id, domain, peer)) = self.member(id) else { return Ok(()) };
        self.not_yet(&socket)?;
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
        let ends = Ends::new(remote, socket.local);
        // Two sockets of one namespace with the same ends: by them nobody can say whose the other end is.
        if let Some(twin) = self.offers_of(ends, |offer| offer.socket.netns == socket.netns).first().copied() {
            self.drop_offer(twin);
            return refuse(Refusal::Ambiguous, "another socket of this namespace with the same ends is offered");
        }

        let fingerprint = Fingerprint::offer(Transport::Tcp, remote, socket.local, socket.netns);
        let offer = self.begin_offer(id, domain_id);
        self.sockets.offered.entry(ends).or_default().push(offer);
        self.sockets.cookies.insert(socket.cookie, offer);
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
            link: Some(link),
            to: None,
            ticks: 0,
        };
        self.sockets.offers.insert(offer, entry);
        self.send(id, request, Message::Offered { offer });
        Ok(())
    }

    /// The number of a new offer, which counts as its domain's and its session's from here on.
    pub(super) fn begin_offer(&mut self, id: SessionId, domain: DomainId) -> ChannelId {
        let offer = self.next_channel;
        self.next_channel += 1;
        if let Some(domain) = self.domains.get_mut(&domain) {
            domain.offers += 1;
        }
        if let Some(session) = self.sessions.get_mut(&id) {
            session.offers.insert(offer);
        }
        offer
    }

    pub(in crate::core) fn cancel(&mut self, id: SessionId, request: u32, offer: ChannelId) -> Result<(), Refuse> {
        if !self.sessions.get(&id).is_some_and(|session| session.offers.contains(&offer)) {
            return refuse(Refusal::NoSuchOffer, format!("you have no offer {offer} that still waits"));
        }
        self.drop_offer(offer);
        self.send(id, request, Message::Done {});
        Ok(())
    }

    /// One of the regular moments at which offers grow old. Who made one that is dropped sees its link hang up.
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

    /// Whether [`Event::Tick`](crate::core::Event::Tick) means anything now.
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
        if offer.to.is_none() {
            self.sockets.cookies.remove(&offer.socket.cookie);
        } else {
            self.sockets.slots.remove(&slot_of(id));
        }
        if let Some(session) = self.sessions.get_mut(&offer.session) {
            session.offers.remove(&id);
        }
        if let Some(domain) = self.domains.get_mut(&offer.domain) {
            domain.offers -= 1;
        }
        self.actions.push(Action::Directory(Change::NoOffer(offer.fingerprint)));
        Some(offer)
    }

    /// Forgets an offer: with it goes the broker's copy of the link end, by which its maker hears of that.
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
    ring_offset: u64,
    ring_size: u64,
) -> Result<(SocketAddr, Geometry), Refuse> {
    let remote = connected(socket)?;
    let shape = geometry(ring_offset, ring_size)?;
    if ring_size == 0 {
        return refuse(Refusal::BadRegion, "a socket's region has a ring");
    }
    Ok((remote, shape))
}

/// The other end of a socket that can be offered or taken.
pub(super) fn connected(socket: &SocketFacts) -> Result<SocketAddr, Refuse> {
    match (socket.state, socket.remote) {
        (SocketState::Connected, Some(remote)) if socket.transport == Transport::Tcp => Ok(remote),
        _ => refuse(Refusal::BadSocket, "the socket is not connected"),
    }
}
