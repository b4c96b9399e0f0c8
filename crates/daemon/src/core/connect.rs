//! `Connect`, and what the two sides say of the channel afterwards: `Accepted`, `Grow`, `Closed` (protocol A1, A2, C7).
//!
//! ```text
//!   connecting client            broker                 listener
//!   Connect [region] ---------->  checks everything, makes the links
//!                                 Offer -------------->  Incoming [region, links]
//!   Connected [links] <---------  delivered
//!            (from here on bells go over the links; memory comes by the broker, who has looked at it)
//!   Attached [region] <---------  Accepted [region] <---
//!                                 Done --------------->
//!   Grow [region] ------------->  Ring [region] ------->  (and the other way round)
//!   Done <----------------------  delivered
//!   Closed -------------------->         <------------- Closed
//! ```

use partywall_protocol::wire::{
    Directions, EventKind, Kind, Located, Message, Name, Origin, Refusal, RegionReference, Side, User,
};
use partywall_shm::layout::Geometry;

use super::channel::{Channel, ChannelEnd, EndState};
use super::further_regions::{Addition, FurtherRegions};
use super::happened::{Happened, Party};
use super::id::{ChannelId, DomainId, ServiceKey, SessionId};
use super::pair_window::Holder;
use super::refuse::{self, Denial, Refuse, refuse};
use super::region::{check_region, located};
use super::service::MAX_WAITING;
use super::{Action, Core, Descriptor, OfferDelivery};
use crate::credentials::Credentials;
use crate::policy::Ruling;

/// A client's description of its side of a channel.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    pub(super) kind: Kind,
    pub(super) directions: Directions,
    pub(super) region: RegionReference,
}

impl Shape {
    /// Proves what can be proved without the descriptors.
    pub(super) fn check(self) -> Result<(Located, Geometry), Refuse> {
        if self.kind == Kind::Socket {
            return refuse(Refusal::Protocol, "a channel of this kind is made by Take alone (protocol T4)");
        }
        if self.kind == Kind::Broadcast && self.directions != Directions::REVERSE {
            return refuse(Refusal::Protocol, "a broadcast channel has the direction reverse only (protocol B1)");
        }
        located(self.region)
    }
}

/// A request that is answered when something has been put into another session's socket.
#[derive(Debug)]
pub(super) struct Offering<F> {
    pub(super) channel: ChannelId,
    /// The session that waits for the answer.
    session: SessionId,
    request: u32,
    pub(super) what: Offered<F>,
}

/// An offer in transit to another session.
#[derive(Debug)]
pub(super) enum Offered<F> {
    /// `Incoming`, to the listener. The connecting side's link ends are kept for the answer.
    Connection { links: Vec<F>, ruling: Ruling },
    /// `Attached`, to the connecting side.
    Region,
    /// `Ring`, to the other side. The domain's account changes when it has been delivered.
    Ring { side: Side, domain: DomainId, size: u64 },
    /// `RegionAdded`, to the other side. Both domains' accounts change when it has been delivered.
    Further(Addition),
}

/// A client's description of a ring that it wants to continue in.
#[derive(Debug, Clone, Copy)]
pub(super) struct Growth {
    pub(super) channel: ChannelId,
    pub(super) side: Side,
    pub(super) generation: u32,
    pub(super) region: RegionReference,
}

/// A checked request for a connection. Its memory has not been checked.
#[derive(Debug)]
pub(super) struct ConnectPlan {
    pub(super) from: DomainId,
    pub(super) peer: Credentials,
    /// The connecting side's name for the listener.
    pub(super) shown: String,
    pub(super) at_home: bool,
    /// The other host that the connecting side is on, if it is not on this one.
    pub(super) host: Option<Name>,
    pub(super) target: Name,
    pub(super) to: DomainId,
    pub(super) service: Name,
    pub(super) key: ServiceKey,
    /// The session that the service belongs to.
    pub(super) listener: SessionId,
    pub(super) here: Origin,
    pub(super) there: Origin,
    pub(super) ruling: Ruling,
}

/// The descriptors of a connection.
#[derive(Debug)]
pub(super) struct ConnectMemory<F> {
    /// The region of the connecting side, for programs that inspect the channel.
    pub(super) kept: Option<F>,
    /// The connecting side's link ends.
    pub(super) links: Vec<F>,
    /// The descriptors that the listener receives.
    pub(super) with: Vec<F>,
}

/// Makes the links of a channel. Returns the connecting side's ends, and appends the listener's ends to `with`.
///
/// An end that goes to a machine is its port's, and the agent makes the program's. Within a machine the agent makes the whole link and passes
/// the memory; what comes and goes here stands for them.
pub(super) fn make_links<F: Descriptor>(count: usize, is_here: bool, with: &mut Vec<F>) -> Result<Vec<F>, Refuse> {
    let make_link = if is_here { F::link } else { F::link_to_machine };
    let mut links = Vec::new();
    for _ in 0..count {
        let (near, far) = make_link().or_else(|e| refuse(Refusal::OutOfResources, e))?;
        links.push(near);
        with.push(far);
    }
    Ok(links)
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
        let (located, geometry) = shape.check()?;
        let Some((_, _, peer)) = self.member(id) else { return Ok(()) };
        let target = self.meant(peer, target);
        if self.connect_elsewhere((id, request), (&target, &service), (shape, located, geometry), &with)? {
            return Ok(());
        }
        // The policy comes first: a client that may not connect must not learn whether the target exists.
        let Some(ruling) = self.may_connect(id, &target, &service)? else { return Ok(()) };
        let Some(plan) = self.plan_connect(id, (target, service), shape, located, ruling)? else { return Ok(()) };
        self.carry_out((id, request), plan, (shape, located, geometry), with)
    }

    /// Checks the memory of a connection whose request was checked, makes the links, and offers it to the listener.
    pub(super) fn carry_out(
        &mut self,
        (id, request): (SessionId, u32),
        plan: ConnectPlan,
        (shape, located, geometry): (Shape, Located, Geometry),
        mut with: Vec<F>,
    ) -> Result<(), Refuse> {
        let Some(region) = with.first() else { return Ok(()) };
        let is_here = plan.here == plan.there;
        let mut kept = None;
        if is_here && plan.here == Origin::Host {
            check_region(region, geometry)?;
            kept = Some(region.clone());
        }
        let links = make_links(shape.directions.count(), is_here, &mut with)?;
        if !is_here && let Located::Window { base } = located {
            let holder = Holder::Process { domain: plan.from, pid: plan.peer.pid };
            let size = geometry.region_size();
            with[0] = self.machines.settle((plan.here, plan.there), base, size, holder, self.next_channel)?;
        }
        // From here on a request is refused only for want of room in the listener's socket.
        self.apply_connect((id, request), plan, shape, ConnectMemory { kept, links, with });
        Ok(())
    }

    /// The policy's decision about a connection. `None` if the session has ended.
    fn may_connect(&mut self, id: SessionId, target: &Name, service: &Name) -> Result<Option<Ruling>, Refuse> {
        let Some((domain, from, peer)) = self.member(id) else { return Ok(None) };
        let ruling = self.policy.ruling(&self.policy.judge_connect(peer, &from.name, target, service));
        let from = from.name.to_string();
        self.tally.decision("connect", &ruling);
        if ruling.allowed {
            return Ok(Some(ruling));
        }
        let reason = format!("the policy does not let {from} connect to {target}:{service}");
        let (kind, to, service) = (EventKind::ConnectRefused, target.to_string(), service.to_string());
        Err(Refuse::denied(reason, Denial { kind, peer, domain, from, to, service, other: None, ruling }))
    }

    /// Checks everything except the connection's memory, and changes nothing. `None` if the session has ended.
    pub(super) fn plan_connect(
        &self,
        id: SessionId,
        (target, service): (Name, Name),
        shape: Shape,
        located: Located,
        ruling: Ruling,
    ) -> Result<Option<ConnectPlan>, Refuse> {
        let Some((from_id, from, peer)) = self.member(id) else { return Ok(None) };
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
        from.afford(shape.region.ring_size)?;
        if to_id == from_id && to.ends + 1 >= to.quota.channels {
            return refuse(Refusal::Quota, format!("{target} can hold no more channels, by its quota"));
        }
        self.may_wait(to_id, key, bound.session)?;
        let (here, there) = (peer.origin(), to.founder.origin());
        if here != there && shape.kind == Kind::Broadcast {
            self.may_leave(peer, &from.name)?;
            // One ring for all, and a window is seen by two.
            let reason = format!(
                "{target}:{service} is a broadcast on another machine; all its subscribers read one ring, which is memory of that \
                 machine: have it bind messages, which cross, for the programs here"
            );
            return refuse(Refusal::Machine, reason);
        }
        self.may_be_between(peer, &from.name, (&target, there), located)?;
        let listener = bound.session;
        let (shown, at_home, from) = (from.name.to_string(), peer.sees_what_its_user_has(), from_id);
        let to = to_id;
        Ok(Some(ConnectPlan {
            from,
            peer,
            shown,
            at_home,
            host: None,
            target,
            to,
            service,
            key,
            listener,
            here,
            there,
            ruling,
        }))
    }

    /// Whether the connecting side may have a channel to where its target is, and its region is in a window exactly if it must be.
    pub(super) fn may_be_between(
        &self,
        peer: Credentials,
        from: &Name,
        (target, there): (&Name, Origin),
        located: Located,
    ) -> Result<(), Refuse> {
        let is_here = peer.origin() == there;
        if !is_here {
            self.may_leave(peer, from)?;
        }
        match located {
            Located::OwnMemory if !is_here => refuse(
                Refusal::Elsewhere,
                format!("{target} is on another machine: the region must be in a window (protocol G4)"),
            ),
            Located::Window { .. } if is_here => {
                refuse(Refusal::BadRegion, "a place in a window is for channels to other machines")
            }
            _ => Ok(()),
        }
    }

    /// Whether a listener's domain can hold one more end, and its socket one more connection.
    pub(super) fn may_wait(&self, to: DomainId, key: ServiceKey, listener: SessionId) -> Result<(), Refuse> {
        let (Some(to), Some(bound)) = (self.domains.get(&to), self.services.get(&key)) else { return Ok(()) };
        let (target, service) = (&to.name, &bound.name);
        if to.ends >= to.quota.channels {
            return refuse(Refusal::Quota, format!("{target} can hold no more channels, by its quota"));
        }
        let in_socket = self.sessions.get(&listener).map_or(0, |s| s.waiting.len());
        if bound.waiting >= bound.backlog || in_socket >= MAX_WAITING {
            let waiting = bound.waiting;
            return refuse(Refusal::BacklogFull, format!("{waiting} connections wait for {target}:{service} already"));
        }
        Ok(())
    }

    /// Makes the channel, and offers it to the listener.
    pub(super) fn apply_connect(
        &mut self,
        (id, request): (SessionId, u32),
        plan: ConnectPlan,
        shape: Shape,
        ConnectMemory { kept, links, with }: ConnectMemory<F>,
    ) {
        let ConnectPlan {
            from: from_id,
            peer,
            shown,
            at_home,
            host,
            target,
            to: to_id,
            service,
            key,
            listener,
            ruling,
            ..
        } = plan;
        let Some(from) = self.domains.get(&from_id) else { return };
        let channel = self.next_channel;
        let incoming = Message::Incoming {
            channel,
            domain: from_id,
            epoch: from.epoch,
            name: shown,
            user: peer.user,
            pid: peer.pid,
            at_home,
            kind: shape.kind,
            directions: shape.directions,
            region: shape.region,
        };
        let connecting = ChannelEnd {
            name: from.name.clone(),
            domain: from_id,
            user: Some(peer.user),
            state: EndState::Held { domain: from_id, pid: peer.pid },
            ring_size: shape.region.ring_size,
            region: kept.and_then(|region| self.keep(region)),
            socket: None,
            further: FurtherRegions::default(),
        };
        let accepting = ChannelEnd {
            name: target,
            domain: to_id,
            user: self.domains.get(&to_id).map(|to| to.founder.user),
            state: EndState::Waiting { listener, service: key },
            ring_size: 0,
            region: None,
            socket: None,
            further: FurtherRegions::default(),
        };
        self.next_channel += 1;
        self.hold(channel, Side::Connecting, from_id, peer.pid, shape.region.ring_size);
        self.inboxes.insert((channel, Side::Connecting), id);
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
        self.channels
            .insert(channel, Channel { kind, directions, service, since, host, ends: [connecting, accepting] });
        let what = Offered::Connection { links, ruling };
        self.offering = Some(Offering { channel, session: id, request, what });
        self.actions.push(Action::Offer { session: listener, channel, message: incoming, descriptors: with });
    }

    /// The offer has reached the other session or not: only now is the request answered (protocol C7).
    pub(super) fn offered(&mut self, id: ChannelId, delivery: OfferDelivery) {
        let Some(Offering { session, request, what, .. }) = self.offering.take_if(|o| o.channel == id) else { return };
        // A connecting side that ends while it is accepted is like one that has ended just before: what it had written can still be read.
        if matches!((&what, &delivery), (Offered::Region, OfferDelivery::Gone)) {
            return self.delivered(session, request, id, what);
        }
        let (code, full, gone) = match what {
            Offered::Connection { .. } => {
                (Refusal::NoSuchService, "the listener does not read its connections", "the listener has just gone")
            }
            Offered::Region | Offered::Ring { .. } | Offered::Further(_) => (
                Refusal::NoSuchChannel,
                "the other side does not read what the broker sends it",
                "the other side has just gone",
            ),
        };
        let (code, reason) = match delivery {
            OfferDelivery::Done => return self.delivered(session, request, id, what),
            OfferDelivery::Full => (Refusal::BacklogFull, full.to_owned()),
            OfferDelivery::Gone => (code, gone.to_owned()),
            OfferDelivery::Failed(why) => {
                (Refusal::OutOfResources, format!("the descriptors cannot be handed on: {why}"))
            }
        };
        self.forget_route(id);
        if let (Offered::Connection { .. }, Some(channel)) = (&what, self.channels.get(&id)) {
            let states = [channel.ends[0].state, channel.ends[1].state];
            self.release(id, Side::Connecting, states[0]);
            self.release(id, Side::Accepting, states[1]);
        }
        if let Offered::Further(Addition { side, number, .. }) = what {
            self.machines.further_gone(id, side, number);
        }
        let name = match &what {
            Offered::Connection { .. } => "Connect",
            Offered::Region => "Accepted",
            Offered::Ring { .. } => "Grow",
            Offered::Further(_) => "AddRegion",
        };
        self.tally.refusal(name, code);
        self.send(session, request, Message::Refused { code, reason });
    }

    fn delivered(&mut self, session: SessionId, request: u32, id: ChannelId, what: Offered<F>) {
        match what {
            Offered::Connection { links, ruling } => {
                // The gateway answers for another host.
                let Some(links) = self.keep_for_route(id, links) else { return };
                self.note_connected(id, EventKind::Connected, &ruling);
                self.answer_connect((session, request), id, links);
            }
            Offered::Region => self.send(session, request, Message::Done {}),
            Offered::Ring { side, domain, size } => {
                if let (Some(channel), Some(account)) = (self.channels.get_mut(&id), self.domains.get_mut(&domain)) {
                    let end = channel.end_mut(side);
                    account.ring_bytes = account.ring_bytes - end.ring_size + size;
                    end.ring_size = size;
                }
                self.send(session, request, Message::Done {});
            }
            Offered::Further(addition) => {
                self.count_region(addition);
                self.send(session, request, Message::Done {});
            }
        }
    }

    /// Answers `Connect`.
    pub(super) fn answer_connect(&mut self, (session, request): (SessionId, u32), id: ChannelId, links: Vec<F>) {
        let Some(channel) = self.channels.get(&id) else { return };
        let domain = channel.end(Side::Accepting).domain;
        let epoch = self.domains.get(&domain).map_or(0, |d| d.epoch);
        let count = u8::try_from(links.len()).unwrap_or(0);
        let message = Message::Connected { channel: id, domain, epoch, links: count };
        self.actions.push(Action::Send { session, request, message, descriptors: links });
    }

    /// Notes that a channel has been made.
    pub(super) fn note_connected(&mut self, id: ChannelId, kind: EventKind, ruling: &Ruling) {
        let Some(channel) = self.channels.get(&id) else { return };
        let (from, to) = (channel.end(Side::Connecting), channel.end(Side::Accepting));
        let (Some(user), EndState::Held { pid, domain }) = (from.user, from.state) else { return };
        let peer = self.domains.get(&domain).map(|domain| Credentials { user, pid, ..domain.founder });
        let other = to.user.map(|user| Party { user, domain: to.domain });
        let happened = Happened {
            channel: id,
            from: from.name.to_string(),
            to: to.name.to_string(),
            service: channel.service.to_string(),
            other,
            ..Happened::by(ruling)
        };
        if let Some(peer) = peer {
            self.note(kind, peer, domain, happened);
        }
    }

    /// The listener took an offer. It holds the channel from now on, even if the region it shows is refused: what two sides
    /// have between them is not the broker's to end.
    pub(super) fn accepted(
        &mut self,
        id: SessionId,
        request: u32,
        channel_id: ChannelId,
        start: u64,
        region: RegionReference,
        with: Vec<F>,
    ) -> Result<(), Refuse> {
        let Some((domain, _, peer)) = self.member(id) else { return Ok(()) };
        // The number may be of an offer whose listening session has ended in the meantime, which is not an error.
        self.may_accept(channel_id)?;
        let Some(channel) = self.channels.get_mut(&channel_id) else {
            return refuse(Refusal::NoSuchChannel, format!("channel {channel_id} is gone"));
        };
        let end = channel.end_mut(Side::Accepting);
        let EndState::Waiting { listener, service } = end.state else {
            return refuse(Refusal::Protocol, format!("channel {channel_id} is not waiting to be accepted"));
        };
        let same_process = |of: &super::SessionRecord| of.domain == Some(domain) && of.peer.pid == peer.pid;
        if !self.sessions.get(&listener).is_some_and(same_process) {
            return refuse(Refusal::NoSuchChannel, format!("channel {channel_id} was not offered to you"));
        }
        end.state = EndState::Held { domain, pid: peer.pid };
        end.user = Some(peer.user);
        self.no_longer_waiting(channel_id, listener, service);
        if let Some(service) = self.services.get_mut(&service) {
            service.accepted += 1;
        }
        if let Some(process) = self.domains.get_mut(&domain).and_then(|d| d.processes.get_mut(&peer.pid)) {
            process.held.insert((channel_id, Side::Accepting));
        }
        self.answer_route(channel_id);

        let (located, geometry) = located(region)?;
        let Some(memory) = with.into_iter().next() else { return Ok(()) };
        let here = peer.origin();
        let there =
            self.channels.get(&channel_id).and_then(|c| c.end(Side::Connecting).user).map_or(here, User::origin);
        match located {
            Located::Window { base } if here != there => {
                let holder = Holder::Channel(channel_id);
                self.machines.settle((here, there), base, geometry.region_size(), holder, channel_id)?;
            }
            Located::OwnMemory if here != there => {
                return refuse(
                    Refusal::BadRegion,
                    "the other side is on another machine: the region must be in a window",
                );
            }
            Located::Window { .. } => {
                return refuse(Refusal::BadRegion, "a place in a window is for channels to other machines");
            }
            Located::OwnMemory if here == Origin::Host => check_region(&memory, geometry)?,
            // The memory is in the machine.
            Located::OwnMemory => {}
        }
        let Some(account) = self.domains.get_mut(&domain) else { return Ok(()) };
        account.afford_ring(region.ring_size)?;
        account.ring_bytes += region.ring_size;
        let kept = if here == there && here == Origin::Host { self.keep(memory.clone()) } else { None };
        if let Some(end) = self.channels.get_mut(&channel_id).map(|c| c.end_mut(Side::Accepting)) {
            (end.ring_size, end.region) = (region.ring_size, kept);
        }
        self.inboxes.insert((channel_id, Side::Accepting), id);
        // Between machines the region has gone ahead, by the links.
        match self.inbox(channel_id, Side::Connecting).filter(|_| here == there) {
            Some(Ok(session)) => {
                self.offering = Some(Offering { channel: channel_id, session: id, request, what: Offered::Region });
                let message = Message::Attached { channel: channel_id, start, region };
                self.actions.push(Action::Offer { session, channel: channel_id, message, descriptors: vec![memory] });
                Ok(())
            }
            Some(Err(refused)) => Err(refused),
            // Bytes that it had written before it ended can still be read.
            None => {
                self.send(id, request, Message::Done {});
                Ok(())
            }
        }
    }

    /// The session by which a side is sent memory; `None` if the side has been given up.
    fn inbox(&self, channel: ChannelId, side: Side) -> Option<Result<SessionId, Refuse>> {
        let EndState::Held { .. } = self.channels.get(&channel)?.end(side).state else { return None };
        let session = self.inboxes.get(&(channel, side)).filter(|session| self.sessions.contains_key(session));
        Some(match session {
            Some(session) => Ok(*session),
            None => refuse(Refusal::NoSuchChannel, "the other side has lost the session that made the channel"),
        })
    }

    /// A side wants to go on in another ring. The other side is sent it before this one gets the answer to use it.
    pub(super) fn grow(&mut self, id: SessionId, request: u32, growth: Growth, with: Vec<F>) -> Result<(), Refuse> {
        let Growth { channel: number, side, generation, region } = growth;
        let Some((domain, account, peer)) = self.member(id) else { return Ok(()) };
        let Some(channel) = self.channels.get(&number) else {
            return refuse(Refusal::NoSuchChannel, format!("there is no channel {number}"));
        };
        let end = channel.end(side);
        if end.state != (EndState::Held { domain, pid: peer.pid }) {
            return refuse(Refusal::NoSuchChannel, format!("you do not have the {side} side of channel {number}"));
        }
        let writes = match side {
            Side::Connecting => Directions::FORWARD,
            Side::Accepting => Directions::REVERSE,
        };
        if !matches!(channel.kind, Kind::Stream | Kind::Message) || !channel.directions.contains(writes) {
            return refuse(Refusal::Protocol, "this side has no ring that could change its size");
        }
        let elsewhere = channel.end(side.other()).user.is_some_and(|user| user.origin() != peer.origin());
        let (located, geometry) = located(region)?;
        if located != Located::OwnMemory || elsewhere || region.ring_size == 0 {
            return refuse(Refusal::BadRegion, "a ring between machines goes over its link, and no ring is empty");
        }
        account.afford_ring_instead(region.ring_size, end.ring_size)?;
        let Some(memory) = with.into_iter().next() else { return Ok(()) };
        if peer.origin() == Origin::Host {
            check_region(&memory, geometry)?;
        }
        let Some(session) = self.inbox(number, side.other()).transpose()? else {
            return refuse(Refusal::NoSuchChannel, "the other side is not there to take a ring");
        };
        let what = Offered::Ring { side, domain, size: region.ring_size };
        self.offering = Some(Offering { channel: number, session: id, request, what });
        let message = Message::Ring { channel: number, side, generation, region };
        self.actions.push(Action::Offer { session, channel: number, message, descriptors: vec![memory] });
        Ok(())
    }

    /// The session by which a side takes further regions.
    pub(super) fn inbox_for_region(&self, channel: ChannelId, to: Side) -> Result<SessionId, Refuse> {
        match self.inbox(channel, to).transpose()? {
            Some(session) => Ok(session),
            None => refuse(Refusal::NoSuchChannel, "the other side is not there to take a region"),
        }
    }

    /// Has a further region put into the socket by which a side takes memory (protocol F3).
    pub(super) fn offer_region(
        &mut self,
        (id, request): (SessionId, u32),
        to: SessionId,
        addition: Addition,
        message: Message,
        memory: F,
    ) {
        let channel = addition.channel;
        self.offering = Some(Offering { channel, session: id, request, what: Offered::Further(addition) });
        self.actions.push(Action::Offer { session: to, channel, message, descriptors: vec![memory] });
    }

    /// A connection that came to nothing leaves no place taken.
    pub(super) fn give_place_back(&mut self, id: SessionId, region: RegionReference) {
        if let Ok((Located::Window { base }, _)) = located(region)
            && let Some((domain, _, peer)) = self.member(id)
        {
            self.machines.give_back(peer.origin(), base, domain, peer.pid);
        }
    }

    /// A side gives up its end. If one process has both, each `Closed` is for one of them.
    pub(super) fn closed(&mut self, id: SessionId, channel_id: ChannelId) -> Result<(), Refuse> {
        let Some((domain, member, peer)) = self.member(id) else { return Ok(()) };
        // The other side may have closed first, and this one's end been lost with its session: then there is nothing to do.
        let Some(channel) = self.channels.get(&channel_id) else {
            // It may be the number of an offer or a take.
            self.take_back(id, channel_id);
            return Ok(());
        };
        let mine = |state| match state {
            EndState::Held { domain: d, pid } => (d, pid) == (domain, peer.pid),
            EndState::Waiting { listener, .. } => {
                self.sessions.get(&listener).is_some_and(|l| l.domain == Some(domain) && l.peer.pid == peer.pid)
            }
            EndState::Unclaimed | EndState::Released => false,
        };
        // A listener's session speaks for what waits for it first: its process may have the connecting side as well.
        let waits = |state| matches!(state, EndState::Waiting { listener, .. } if listener == id);
        let sides = [Side::Connecting, Side::Accepting];
        let waiting = sides.into_iter().find(|&side| waits(channel.end(side).state));
        match waiting.or_else(|| sides.into_iter().find(|&side| mine(channel.end(side).state))) {
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
