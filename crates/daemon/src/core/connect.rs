//! `Connect`, and what the two sides say of the channel afterwards: `Accepted`, `Closed` (protocol A1, C7).
//!
//! ```text
//!   connecting client            broker                 listener
//!   Connect [region, links] --->  checks everything
//!                                 Offer -------------->  Incoming [region, links]
//!   Connected <-----------------  delivered
//!            (from here on the two sides speak over the links; the broker only keeps account)
//!                                 Accepted [region] <---
//!   Closed -------------------->         <------------- Closed
//! ```

use partywall_shm::layout::Geometry;
use partywall_shm::window;
use partywall_shm::wire::{Directions, Kind, Message, Refusal, Side};

use super::channel::{Channel, ChannelId, End, State};
use super::domain::DomainId;
use super::machine::{HOST, Holder, machine_of};
use super::refuse::{self, Refuse, refuse};
use super::service::MAX_WAITING;
use super::{Action, Core, Delivery, Descriptor, SessionId};

/// What a client says of its side of a channel.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    pub(super) kind: Kind,
    pub(super) directions: Directions,
    pub(super) ring_offset: u64,
    pub(super) ring_size: u64,
}

impl Shape {
    /// Proves what can be proved without the descriptors. Says where in its memory the region begins: 0, or a place in a window.
    pub(super) fn check(self) -> Result<(u64, Geometry), Refuse> {
        if self.kind == Kind::Socket {
            return refuse(Refusal::Protocol, "a channel of this kind is made by Take alone (protocol T4)");
        }
        if self.kind == Kind::Broadcast && self.directions != Directions::REVERSE {
            return refuse(Refusal::Protocol, "a broadcast channel has the direction reverse only (protocol B1)");
        }
        placed(self.ring_offset, self.ring_size)
    }
}

/// Proves a geometry that may be in a window, or refuses it.
fn placed(ring_offset: u64, ring_size: u64) -> Result<(u64, Geometry), Refuse> {
    window::placed(ring_offset, ring_size).or_else(|e| refuse(Refusal::BadRegion, e.to_string()))
}

/// Proves a geometry, or refuses it.
pub(super) fn geometry(ring_offset: u64, ring_size: u64) -> Result<Geometry, Refuse> {
    Geometry::new(ring_offset, ring_size).or_else(|e| refuse(Refusal::BadRegion, e.to_string()))
}

/// A `Connect` whose offer is on its way to the listener.
#[derive(Debug)]
pub(super) struct Offering {
    channel: ChannelId,
    /// Who waits for the answer.
    session: SessionId,
    request: u32,
}

impl<F: Descriptor> Core<F> {
    pub(super) fn connect(
        &mut self,
        id: SessionId,
        request: u32,
        target: &str,
        service: &str,
        shape: Shape,
        with: Vec<F>,
    ) -> Result<(), Refuse> {
        let (target, service) = (refuse::name(target)?, refuse::name(service)?);
        let (base, geometry) = shape.check()?;
        let Some((from_id, from, peer)) = self.member(id) else { return Ok(()) };
        let target = self.meant(peer, target);
        // Policy first: what exists is no business of somebody who may not connect to it.
        if !self.policy.may_connect(peer.uid, &from.name, &target, &service) {
            let from = from.name.clone();
            if self.log.allows(peer.uid, self.now) {
                tracing::info!(%from, to = %target, %service, uid = peer.uid, "connect denied by policy");
            }
            return refuse(Refusal::Denied, format!("the policy does not let {from} connect to {target}:{service}"));
        }
        let Some((to_id, to)) = self.domain_named(&target).and_then(|d| Some((d, self.domains.get(&d)?))) else {
            return refuse(Refusal::NoSuchDomain, format!("no domain is called {target} now"));
        };
        let bound = self.service_named(to_id, &service).and_then(|key| Some((key, self.services.get(&key)?)));
        let Some((key, bound)) = bound else {
            return refuse(Refusal::NoSuchService, format!("{target} has no service {service} now"));
        };
        if bound.kind != shape.kind {
            let (has, asked) = (bound.kind, shape.kind);
            return refuse(Refusal::KindMismatch, format!("{target}:{service} carries {has}, not {asked}"));
        }
        from.afford(shape.ring_size)?;
        if to.ends + u32::from(to_id == from_id) >= to.quota.channels {
            return refuse(Refusal::Quota, format!("{target} can hold no more channels, by its quota"));
        }
        let in_socket = self.sessions.get(&bound.session).map_or(0, |s| s.waiting.len());
        if bound.waiting >= bound.backlog || in_socket >= MAX_WAITING {
            let waiting = bound.waiting;
            return refuse(Refusal::BacklogFull, format!("{waiting} connections wait for {target}:{service} already"));
        }
        let Some((region, links)) = with.split_first() else { return Ok(()) };
        let (here, there) = (machine_of(peer.uid), machine_of(to.uid));
        let mut kept = None;
        if here != there {
            self.may_leave(peer)?;
            if shape.kind == Kind::Broadcast {
                // One ring for all, and a window is seen by two.
                let reason = format!(
                    "{target}:{service} is a broadcast on another machine; all its subscribers read one ring, which is memory of \
                     that machine: have it bind messages, which cross, for the programs here"
                );
                return refuse(Refusal::Machine, reason);
            }
            if base == 0 {
                let reason = format!("{target} is on another machine: the region must be in a window (protocol G4)");
                return refuse(Refusal::Elsewhere, reason);
            }
        } else if base != 0 {
            return refuse(Refusal::BadRegion, "a place in a window is for channels to other machines");
        } else if here == HOST {
            check_region(region, geometry)?;
            for link in links {
                link.check_link().or_else(|e| refuse(Refusal::BadLink, e))?;
            }
            kept = Some(region.clone());
        }
        // Within a machine its own agent passes memory and links; what came here stands for them.
        let mut with = with;
        if here != there {
            let holder = Holder::Process { domain: from_id, pid: peer.pid };
            let size = geometry.region_size();
            with[0] = self.machines.settle((here, there), base, size, holder, self.next_channel)?;
        }
        let Some((from_id, from, peer)) = self.member(id) else { return Ok(()) };

        // Nothing is refused from here on, except for want of room in the listener's socket.
        let listener = bound.session;
        let channel = self.next_channel;
        let incoming = Message::Incoming {
            channel,
            domain: from_id,
            epoch: from.epoch,
            name: from.name.to_string(),
            uid: peer.uid,
            pid: peer.pid,
            kind: shape.kind,
            directions: shape.directions,
            ring_offset: shape.ring_offset,
            ring_size: shape.ring_size,
        };
        let connecting = End {
            name: from.name.clone(),
            domain: from_id,
            uid: Some(peer.uid),
            state: State::Held { domain: from_id, pid: peer.pid },
            ring_size: shape.ring_size,
            region: kept.and_then(|region| self.keep(region)),
            cookie: None,
        };
        let accepting = End {
            name: target,
            domain: to_id,
            uid: self.domains.get(&to_id).map(|to| to.uid),
            state: State::Waiting { listener, service: key },
            ring_size: 0,
            region: None,
            cookie: None,
        };
        self.next_channel += 1;
        self.hold(channel, Side::Connecting, from_id, peer.pid, shape.ring_size);
        if let Some(to) = self.domains.get_mut(&to_id) {
            to.ends += 1;
        }
        if let Some(bound) = self.services.get_mut(&key) {
            bound.waiting += 1;
        }
        if let Some(session) = self.sessions.get_mut(&listener) {
            session.waiting.insert(channel);
        }
        let (kind, directions, since) = (shape.kind, shape.directions, self.now);
        self.channels.insert(channel, Channel { kind, directions, service, since, ends: [connecting, accepting] });
        self.offering = Some(Offering { channel, session: id, request });
        self.actions.push(Action::Offer { session: listener, channel, message: incoming, descriptors: with });
        Ok(())
    }

    /// The offer reached the listener or did not: only now is `Connect` answered (protocol C7).
    pub(super) fn offered(&mut self, id: ChannelId, delivery: Delivery) {
        let Some(Offering { session, request, .. }) = self.offering.take_if(|o| o.channel == id) else { return };
        let Some(channel) = self.channels.get(&id) else { return };
        let (code, reason) = match delivery {
            Delivery::Done => {
                let domain = channel.end(Side::Accepting).domain;
                let epoch = self.domains.get(&domain).map_or(0, |d| d.epoch);
                self.send(session, request, Message::Connected { channel: id, domain, epoch });
                return;
            }
            Delivery::Full => (Refusal::BacklogFull, "the listener does not read its connections".to_owned()),
            Delivery::Gone => (Refusal::NoSuchService, "the listener has just gone".to_owned()),
            Delivery::Failed(why) => (Refusal::OutOfResources, format!("the descriptors cannot be handed on: {why}")),
        };
        let states = [channel.ends[0].state, channel.ends[1].state];
        self.release(id, Side::Connecting, states[0]);
        self.release(id, Side::Accepting, states[1]);
        self.send(session, request, Message::Refused { code, reason });
    }

    /// The listener took an offer. It holds the channel from now on, even if the region it shows is refused: what two sides
    /// have between them is not the broker's to end.
    pub(super) fn accepted(
        &mut self,
        id: SessionId,
        channel_id: ChannelId,
        ring_offset: u64,
        ring_size: u64,
        with: Vec<F>,
    ) -> Result<(), Refuse> {
        let Some((domain, _, peer)) = self.member(id) else { return Ok(()) };
        // The number may be of an offer whose listening session has ended meanwhile: no fault of anybody.
        let Some(channel) = self.channels.get_mut(&channel_id) else { return Ok(()) };
        let end = channel.end_mut(Side::Accepting);
        let State::Waiting { listener, service } = end.state else {
            return refuse(Refusal::Protocol, format!("channel {channel_id} is not waiting to be accepted"));
        };
        let same_process = |of: &super::Session| of.domain == Some(domain) && of.peer.pid == peer.pid;
        if !self.sessions.get(&listener).is_some_and(same_process) {
            return refuse(Refusal::NoSuchChannel, format!("channel {channel_id} was not offered to you"));
        }
        end.state = State::Held { domain, pid: peer.pid };
        end.uid = Some(peer.uid);
        self.no_longer_waiting(channel_id, listener, service);
        if let Some(service) = self.services.get_mut(&service) {
            service.accepted += 1;
        }
        if let Some(process) = self.domains.get_mut(&domain).and_then(|d| d.processes.get_mut(&peer.pid)) {
            process.held.insert((channel_id, Side::Accepting));
        }

        let (base, geometry) = placed(ring_offset, ring_size)?;
        let Some(region) = with.into_iter().next() else { return Ok(()) };
        let here = machine_of(peer.uid);
        let there = self.channels.get(&channel_id).and_then(|c| c.end(Side::Connecting).uid).map_or(here, machine_of);
        let mut kept = None;
        if here != there {
            let holder = Holder::Channel(channel_id);
            self.machines.settle((here, there), base, geometry.region_size(), holder, channel_id)?;
        } else if base != 0 {
            return refuse(Refusal::BadRegion, "a place in a window is for channels to other machines");
        } else if here == HOST {
            check_region(&region, geometry)?;
            kept = Some(region);
        }
        let Some(account) = self.domains.get_mut(&domain) else { return Ok(()) };
        account.afford_ring(ring_size)?;
        account.ring_bytes += ring_size;
        let region = kept.and_then(|region| self.keep(region));
        if let Some(end) = self.channels.get_mut(&channel_id).map(|c| c.end_mut(Side::Accepting)) {
            (end.ring_size, end.region) = (ring_size, region);
        }
        Ok(())
    }

    /// A connection that came to nothing leaves no place taken.
    pub(super) fn give_place_back(&mut self, id: SessionId, shape: Shape) {
        if let Ok((base @ 1.., _)) = shape.check()
            && let Some((domain, _, peer)) = self.member(id)
        {
            self.machines.give_back(machine_of(peer.uid), base, domain, peer.pid);
        }
    }

    /// A side gives up its end. If one process has both, each `Closed` is for one of them.
    pub(super) fn closed(&mut self, id: SessionId, channel_id: ChannelId) -> Result<(), Refuse> {
        let Some((domain, member, peer)) = self.member(id) else { return Ok(()) };
        // The other side may have closed first, and this one's end been lost with its session: then there is nothing to do.
        let Some(channel) = self.channels.get(&channel_id) else { return Ok(()) };
        let mine = |state| match state {
            State::Held { domain: d, pid } => (d, pid) == (domain, peer.pid),
            State::Waiting { listener, .. } => {
                self.sessions.get(&listener).is_some_and(|l| l.domain == Some(domain) && l.peer.pid == peer.pid)
            }
            State::Unclaimed | State::Released => false,
        };
        match [Side::Connecting, Side::Accepting].into_iter().find(|&side| mine(channel.end(side).state)) {
            Some(side) => {
                let state = channel.end(side).state;
                self.release(channel_id, side, state);
                Ok(())
            }
            None if channel.ends.iter().any(|end| end.name == member.name) => Ok(()),
            None => refuse(Refusal::NoSuchChannel, format!("you have no end of channel {channel_id}")),
        }
    }

    /// Enters an end into the accounts of the process that has it.
    pub(super) fn hold(&mut self, channel: ChannelId, side: Side, domain: DomainId, pid: u32, ring_size: u64) {
        let Some(domain) = self.domains.get_mut(&domain) else { return };
        domain.ends += 1;
        domain.ring_bytes += ring_size;
        if let Some(process) = domain.processes.get_mut(&pid) {
            process.held.insert((channel, side));
        }
    }
}

pub(super) fn check_region<F: Descriptor>(region: &F, geometry: Geometry) -> Result<(), Refuse> {
    region.check_region(geometry).or_else(|e| refuse(Refusal::BadRegion, e))
}
