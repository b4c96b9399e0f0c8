//! Places in the windows between machines: their holders, and the requests that wait for one (protocol G).
//!
//! ```text
//!   Window (owner, peer)  1 --- n  place --- held by ---> a process, then a channel
//! ```
//!
//! One machine writes a window ([`PairWindow`]), and another reads it. A process asks for a place and then makes a channel with
//! it. The broker knows when both ends of a channel are gone, so the broker hands out places and takes them back. A guest that
//! writes elsewhere in its window spoils only its own data.

use partywall_protocol::wire::{Message, Name, Origin, Refusal, Side};
use partywall_shm::layout::{Geometry, PAGE};

use super::channel::{ChannelEnd, EndState};
use super::domain::DomainProcess;
#[cfg(any(test, feature = "invariants"))]
use super::further_regions::FurtherKey;
use super::id::{ChannelId, DomainId, SessionId};
use super::machine::Machines;
use super::pair_window::{Holder, PairWindow, PlaceContent, Waiting, WindowPlace};
use super::refuse::{self, Refuse, refuse};
use super::{Action, Core, Descriptor};
use crate::credentials::Credentials;

/// Places that one process may have without a channel in them.
const MOST_RESERVED: usize = 64;
/// Places of one end of a channel: where its region is, and rings that it has grown to.
const MOST_OF_AN_END: usize = 4;
/// Seconds that a request of a process that is about to connect may wait for memory (protocol C2.1): less than clients wait for the broker.
const ROOM_PATIENCE: u64 = 8;
/// A ring that grows takes at most this part of what is free in its window, so that there is room for others.
const SHARE: u64 = 4;
/// The ring of a connection takes at most this part of what is free in its window, so that there is room for later ones.
const SHARE_OF_A_CONNECTION: u64 = 32;
/// But a ring is not made smaller than this.
const LEAST_RING: u64 = 16 << 10;

impl<F> Machines<F> {
    /// The window from one machine to another, if both see it.
    fn ready_window(&mut self, between: (Origin, Origin)) -> Result<&mut PairWindow<F>, Refuse> {
        let (from, to) = (self.called(between.0).to_owned(), self.called(between.1).to_owned());
        if let Some(leaves) = self.migrating(between) {
            let reason = format!("{leaves} is being migrated; connect again when it has arrived");
            return refuse(Refusal::Machine, reason);
        }
        let Some(window) = self.windows.get_mut(&between) else {
            let advice = "attach both with `partywall vm attach`";
            return refuse(Refusal::Machine, format!("there is no window from {from} to {to}; {advice}"));
        };
        if window.seen_by_owner && window.seen_by_peer {
            return Ok(window);
        }
        let blind = if window.seen_by_owner { &to } else { &from };
        refuse(
            Refusal::Machine,
            format!("the window from {from} to {to} is not seen by {blind} yet; `partywall vm list` says more"),
        )
    }

    /// Frees the places of a channel that is gone.
    pub(super) fn channel_gone(&mut self, channel: ChannelId) {
        self.windows.values_mut().for_each(|w| w.free(|place| place.holder == Holder::Channel(channel)));
    }

    /// Whether a channel, or a handshake with this number, has a place.
    pub(super) fn has_places(&self, channel: ChannelId) -> bool {
        self.windows.values().any(|w| w.places.values().any(|place| place.holder == Holder::Channel(channel)))
    }

    /// A program with an end of this channel may still run, though its session has ended: the channel's places stay unused.
    pub(super) fn abandon(&mut self, channel: ChannelId) {
        for window in self.windows.values_mut() {
            let held = window.places.values_mut().filter(|place| place.holder == Holder::Channel(channel));
            held.for_each(|place| place.holder = Holder::Abandoned);
        }
    }

    /// Frees the places of a process that is gone, except those that have become a channel's.
    pub(super) fn process_gone(&mut self, domain: DomainId, pid: u32) {
        self.windows.values_mut().for_each(|w| w.free(|place| place.holder == Holder::Process { domain, pid }));
    }

    /// A process may live, though its session has ended: it may still use the places that it was given.
    pub(super) fn abandon_process(&mut self, domain: DomainId, pid: u32) {
        for window in self.windows.values_mut() {
            let held = window.places.values_mut().filter(|place| place.holder == Holder::Process { domain, pid });
            held.for_each(|place| place.holder = Holder::Abandoned);
        }
    }

    /// Frees a place that a process asked for and could not use. If the process has a place at this byte in several windows, the
    /// broker cannot tell which one is meant, and all of them stay until the process ends.
    pub(super) fn give_back(&mut self, owner: Origin, base: u64, domain: DomainId, pid: u32) {
        let mine = Holder::Process { domain, pid };
        let own = self.windows.iter_mut().filter(|((of, _), _)| *of == owner).map(|(_, window)| window);
        let mut held = own.filter(|window| window.places.get(&base).is_some_and(|place| place.holder == mine));
        if let (Some(window), None) = (held.next(), held.next()) {
            window.free_one(base);
        }
    }

    /// Whether the place is the holder's and has this size; it is the channel's from now on. Returns the memory for the peer.
    pub(super) fn settle(
        &mut self,
        between: (Origin, Origin),
        base: u64,
        size: u64,
        holder: Holder,
        channel: ChannelId,
    ) -> Result<F, Refuse>
    where
        F: Descriptor,
    {
        let place = self.windows.get_mut(&between).and_then(|w| Some((w.places.get_mut(&base)?, &w.reader)));
        match place {
            Some((place, reader)) if place.may_take(holder, size) => {
                (place.holder, place.content) = (Holder::Channel(channel), PlaceContent::Endpoint);
                Ok(reader.clone())
            }
            _ => refuse(
                Refusal::BadRegion,
                format!("no place of {size} bytes at {base} in the window was given to this process"),
            ),
        }
    }

    /// Whether the place is the channel's, unused and of this size; this further region lies there from now on. Returns the memory for the
    /// peer.
    pub(super) fn settle_further(
        &mut self,
        between: (Origin, Origin),
        (base, size): (u64, u64),
        channel: ChannelId,
        (side, number): (Side, u32),
    ) -> Result<F, Refuse>
    where
        F: Descriptor,
    {
        let place = self.windows.get_mut(&between).and_then(|w| Some((w.places.get_mut(&base)?, &w.reader)));
        match place {
            Some((place, reader)) if place.may_take(Holder::Channel(channel), size) => {
                place.content = PlaceContent::Further { side, number };
                Ok(reader.clone())
            }
            _ => refuse(Refusal::BadRegion, format!("no unused place at {base} in the window is channel {channel}'s")),
        }
    }

    /// Frees the place of a further region that neither side has any more.
    pub(super) fn further_gone(&mut self, channel: ChannelId, side: Side, number: u32) {
        let (holder, content) = (Holder::Channel(channel), PlaceContent::Further { side, number });
        self.windows.values_mut().for_each(|w| w.free(|place| place.holder == holder && place.content == content));
    }

    /// Frees a place of a channel that was meant for a further region, which was refused.
    pub(super) fn give_back_unused(&mut self, between: (Origin, Origin), base: u64, channel: ChannelId) {
        if let Some(window) = self.windows.get_mut(&between)
            && window.places.get(&base).is_some_and(|place| place.is_unused_by(Holder::Channel(channel)))
        {
            window.free_one(base);
        }
    }
}

/// What a request for a place is for.
#[derive(Debug, Clone, Copy)]
struct PlaceWish {
    /// Where the other side runs.
    there: Origin,
    holder: Holder,
    /// It is for another ring of a channel.
    grows: bool,
}

/// The region for which one side of a socket asks for a place.
#[derive(Debug, Clone, Copy)]
struct SocketWish {
    shape: Geometry,
    /// The bytes that its ring can be reduced to.
    least_ring: u64,
}

impl SocketWish {
    /// The ring of a connection can be smaller.
    fn for_connection(shape: Geometry) -> Self {
        Self { shape, least_ring: shape.ring_size().min(LEAST_RING) }
    }

    /// The ring of a flow of datagrams must have room for the largest.
    fn for_datagrams(shape: Geometry) -> Self {
        Self { shape, least_ring: shape.ring_size() }
    }

    /// Shapes of its region to look for in a window of which this much is free, the best first. The ring is halved until it is no more than
    /// its share, and further where the free parts are smaller.
    fn shapes_in(self, free: u64) -> impl Iterator<Item = Geometry> {
        let (whole, least) = (self.shape.ring_size(), self.least_ring);
        let smaller = move |ring: &u64| (*ring > least).then_some(ring / 2);
        let rings = std::iter::successors(Some(whole), smaller);
        let is_too_large = move |ring: &u64| *ring > least && *ring > free / SHARE_OF_A_CONNECTION;
        let rings = rings.skip_while(is_too_large);
        rings.filter_map(move |ring| Geometry::new(self.shape.ring_offset(), ring).ok())
    }
}

/// A place for one side of a socket.
#[derive(Debug)]
pub(super) struct SocketPlace<F> {
    pub(super) base: u64,
    /// The region that fills it.
    pub(super) shape: Geometry,
    /// The window for its owner.
    pub(super) memory: F,
    /// The window for the other side.
    pub(super) reader: F,
}

impl<F: Descriptor> Core<F> {
    /// Has the books of windows written, where places have changed hands.
    pub(super) fn keep_books(&mut self) {
        self.keep_books_of_groups();
        for window in self.machines.windows.values_mut() {
            for (base, size, in_use) in window.changes.drain(..) {
                self.actions.push(Action::Book { window: window.memory.clone(), base, size, in_use });
            }
        }
    }

    /// Answers the waiting requests for a place that can be answered now.
    pub(super) fn serve_waiting(&mut self) {
        // A request that must wait longer is put back.
        for Waiting { session, request, since, channel, size, target } in std::mem::take(&mut self.machines.waiting) {
            let before = self.machines.waiting.len();
            if let Err(Refuse { code, reason, .. }) = self.room(session, request, channel, size, &target) {
                self.send(session, request, Message::Refused { code, reason });
            }
            if let Some(again) = self.machines.waiting.get_mut(before) {
                again.since = since;
            }
        }
    }

    /// Refuses requests of processes that are about to connect and have waited too long (protocol C2.1): a process that has stopped waiting
    /// would keep its place unused. A place may have become free since a request was looked at last.
    pub(super) fn tick_waiting(&mut self) {
        self.serve_waiting();
        let now = self.now;
        let is_late = |one: &mut Waiting| one.channel == 0 && now >= one.since.saturating_add(ROOM_PATIENCE);
        for Waiting { session, request, .. } in self.machines.waiting.extract_if(.., is_late).collect::<Vec<_>>() {
            let reason = "the window's memory is still being allocated; try again later".to_owned();
            self.tally.refusal("Room", Refusal::OutOfResources);
            self.send(session, request, Message::Refused { code: Refusal::OutOfResources, reason });
        }
    }

    /// Whether a request waits that [`Self::tick_waiting`] ends.
    pub(super) fn waits_for_room(&self) -> bool {
        self.machines.waiting.iter().any(|one| one.channel == 0)
    }

    /// Hands out a place in a window. If its memory is being made, the answer waits for that.
    pub(super) fn room(
        &mut self,
        id: SessionId,
        request: u32,
        channel: ChannelId,
        size: u64,
        named: &str,
    ) -> Result<(), Refuse> {
        let Some((domain_id, domain, peer)) = self.member(id) else { return Ok(()) };
        self.may_leave(peer, &domain.name)?;
        let here = peer.origin();
        let PlaceWish { there, holder, grows } = match channel {
            0 => PlaceWish {
                there: self.origin_to_reach(&domain.name, peer, refuse::name(named)?)?,
                holder: Holder::Process { domain: domain_id, pid: peer.pid },
                grows: false,
            },
            // The channel says where its other side is. Its name may be that of a domain of another host.
            number => self.wish_of_channel(number, domain_id, peer)?,
        };
        if here == there {
            return refuse(Refusal::Protocol, "both sides are on this machine: use a region in a memfd");
        }
        if grows { domain.afford_ring(size.saturating_sub(PAGE)) } else { domain.afford(size) }?;
        let (most, whose) = match (channel, grows) {
            (0, _) => (MOST_RESERVED, "this process has as many places as it may have without using them"),
            (_, false) => (1, "this end of the channel has its place"),
            (_, true) => (MOST_OF_AN_END, "this end of the channel has as many places as it may have"),
        };
        let (from, to) = (self.machines.called(here).to_owned(), self.machines.called(there).to_owned());
        let window = self.machines.ready_window((here, there))?;
        let is_further = |place: &&WindowPlace| matches!(place.content, PlaceContent::Further { .. });
        let held = window.places.values().filter(|place| place.holder == holder && !is_further(place));
        if held.count() >= most {
            return refuse(Refusal::Quota, whose);
        }
        let coming = window.coming();
        let free = window.carve.free() + coming;
        if grows && size > free / SHARE {
            let reason = format!("{size} bytes are more than a part in {SHARE} of the {free} free from {from} to {to}");
            return refuse(Refusal::OutOfResources, reason);
        }
        let Some((base, memory)) = window.place(size, holder) else {
            if coming > 0 && size <= free {
                let waiting = &mut self.machines.waiting;
                if waiting.iter().filter(|w| w.session == id).count() >= MOST_RESERVED {
                    return refuse(Refusal::Quota, "this process waits for as many places as it may");
                }
                let (since, target) = (self.now, named.to_owned());
                waiting.push(Waiting { session: id, request, since, channel, size, target });
                return Ok(());
            }
            return refuse(Refusal::OutOfResources, window.no_room(size, &from, &to));
        };
        self.keep_books();
        self.send_with(id, request, Message::RoomIs { base, size }, vec![memory]);
        Ok(())
    }

    /// Where a domain runs that a client may connect to, or that may connect to the client's.
    fn origin_to_reach(&self, from: &Name, peer: Credentials, target: Name) -> Result<Origin, Refuse> {
        let target = self.meant(peer, target);
        let found = self.domain_named(&target).and_then(|d| self.domains.get(&d)).filter(|to| {
            self.policy.is_administrator(peer)
                || self.policy.is_gateway_of_machines(peer, from)
                || self.policy.may_reach(from, &to.name)
                || self.policy.may_reach(&to.name, from)
        });
        match found {
            Some(found) => Ok(found.founder.origin()),
            // The gateway, which is on the host, takes the connection.
            None if self.leads_elsewhere(peer, &target) && self.policy.may_reach_elsewhere(from, &target) => {
                Ok(Origin::Host)
            }
            None => refuse(Refusal::NoSuchDomain, format!("no domain is called {target} now")),
        }
    }

    /// A place for an end of a channel: of one that waits for this process, or for another ring of one that it holds.
    fn wish_of_channel(&self, number: ChannelId, domain: DomainId, peer: Credentials) -> Result<PlaceWish, Refuse> {
        let waits = |state| match state {
            EndState::Waiting { listener, .. } => {
                self.sessions.get(&listener).is_some_and(|l| l.domain == Some(domain) && l.peer.pid == peer.pid)
            }
            _ => false,
        };
        let holds =
            |end: &ChannelEnd<F>| end.state == EndState::Held { domain, pid: peer.pid } && end.user == Some(peer.user);
        let found = self.channels.get(&number).and_then(|channel| {
            let [connecting, accepting] = &channel.ends;
            let are_held = channel.ends.iter().all(|end| matches!(end.state, EndState::Held { .. }));
            let (other, grows) = if waits(accepting.state) {
                (connecting, false)
            } else if are_held && holds(connecting) {
                (accepting, true)
            } else if are_held && holds(accepting) {
                (connecting, true)
            } else {
                return None;
            };
            Some(PlaceWish { there: other.user?.origin(), holder: Holder::Channel(number), grows })
        });
        found.map_or_else(
            || refuse(Refusal::NoSuchChannel, format!("channel {number} is not waiting for you, nor yours")),
            Ok,
        )
    }

    /// Answers with a place for the region of a socket that sends or receives datagrams of another machine (protocol U14.4).
    pub(super) fn datagram_room(
        &mut self,
        (id, request): (SessionId, u32),
        there: Origin,
        shape: Geometry,
    ) -> Result<(), Refuse> {
        let Some((domain, record, peer)) = self.member(id) else { return Ok(()) };
        // First: a refusal of the window names machines.
        self.may_leave(peer, &record.name)?;
        let holder = Holder::Process { domain, pid: peer.pid };
        let window = self.machines.ready_window((peer.origin(), there))?;
        if window.places.values().filter(|place| place.holder == holder).count() >= MOST_RESERVED {
            return refuse(Refusal::Quota, "this process has as many places as it may have without using them");
        }
        let SocketPlace { base, shape, memory, .. } =
            self.socket_place(id, there, SocketWish::for_datagrams(shape), holder)?;
        self.send_with(id, request, Message::RoomIs { base, size: shape.region_size() }, vec![memory]);
        Ok(())
    }

    /// Hands out the place of one side of a handshake of this number with another machine (protocol T4.8).
    pub(super) fn handshake_place(
        &mut self,
        id: SessionId,
        there: Origin,
        shape: Geometry,
        handshake: ChannelId,
    ) -> Result<SocketPlace<F>, Refuse> {
        let (holder, wish) = (Holder::Channel(handshake), SocketWish::for_connection(shape));
        let place = self.socket_place(id, there, wish, holder)?;
        let window = (self.member(id).map(|(.., peer)| peer.origin()))
            .and_then(|here| self.machines.windows.get_mut(&(here, there)));
        if let Some(found) = window.and_then(|window| window.places.get_mut(&place.base)) {
            found.content = PlaceContent::Endpoint;
        }
        Ok(place)
    }

    /// Hands out a place for the region of a socket whose other end is on another machine. It does not wait for memory: the client asks again
    /// later.
    fn socket_place(
        &mut self,
        id: SessionId,
        there: Origin,
        wish: SocketWish,
        holder: Holder,
    ) -> Result<SocketPlace<F>, Refuse> {
        let Some((_, domain, peer)) = self.member(id) else { return refuse(Refusal::Protocol, "join first") };
        domain.afford(wish.shape.region_size())?;
        self.may_leave(peer, &domain.name)?;
        let here = peer.origin();
        let (from, to) = (self.machines.called(here).to_owned(), self.machines.called(there).to_owned());
        let window = self.machines.ready_window((here, there))?;
        let coming = window.coming();
        let shapes = wish.shapes_in(window.carve.free() + coming);
        // While memory is coming, only the best size: a connection keeps the ring that it gets first.
        let most = if coming == 0 { usize::MAX } else { 1 };
        let place =
            |shape: Geometry| window.place(shape.region_size(), holder).map(|(base, memory)| (base, shape, memory));
        let Some((base, shape, memory)) = shapes.take(most).find_map(place) else {
            let wanted = wish.shape.region_size();
            return refuse(Refusal::OutOfResources, window.no_room(wanted, &from, &to));
        };
        let reader = window.reader.clone();
        self.keep_books();
        Ok(SocketPlace { base, shape, memory, reader })
    }

    /// The process of a session of the host, if it has places in windows or shares channels there.
    pub(crate) fn process_in_windows(&self, id: SessionId) -> Option<u32> {
        let session = self.sessions.get(&id)?;
        let (domain, pid) = (session.domain?, session.peer.pid);
        if session.peer.origin() != Origin::Host {
            return None;
        }
        let DomainProcess { held, ended, .. } = self.domains.get(&domain)?.processes.get(&pid)?;
        let has_handshake =
            |id: ChannelId| session.offers.contains(&id) || session.takes.contains(&id) || ended.contains(&id);
        let is_its = |holder: Holder| match holder {
            Holder::Process { domain: of, pid: by } => (of, by) == (domain, pid),
            Holder::Channel(channel) => held.iter().any(|(id, _)| *id == channel) || has_handshake(channel),
            Holder::Abandoned => false,
        };
        let mut places = self.machines.windows.values().flat_map(|window| window.places.values());
        places.any(|place| is_its(place.holder)).then_some(pid)
    }
}

#[cfg(any(test, feature = "invariants"))]
impl<F: Descriptor> Core<F> {
    /// Panics if the places of a window contradict its free room, or those who hold them.
    pub(super) fn check_windows(&self) {
        for ((owner, peer), window) in &self.machines.windows {
            let of = format!("the window from {} to {}", self.machines.called(*owner), self.machines.called(*peer));
            let mut end = 0;
            for (base, place) in &window.places {
                assert!(end <= *base && base + place.size <= window.allocated, "{of}: {base}: {place:?}");
                end = base + place.size;
                let there = match place.holder {
                    Holder::Process { domain, pid } => {
                        self.domains.get(&domain).is_some_and(|domain| domain.processes.contains_key(&pid))
                    }
                    Holder::Channel(id) => {
                        self.channels.contains_key(&id)
                            || self.sockets.offers.contains_key(&id)
                            || self.machines.ended.contains_key(&id)
                    }
                    Holder::Abandoned => true,
                };
                assert!(there, "{of}: {base}: {place:?} is held by nobody");
                if let (Holder::Channel(id), PlaceContent::Further { side, number }) = (place.holder, place.content) {
                    let key = FurtherKey { own: true, number };
                    let counts = self.channels.get(&id).is_some_and(|channel| {
                        channel.end(side).further.counts(key)
                            || channel.end(side.other()).further.counts(key.seen_from_other_side())
                    });
                    assert!(counts, "{of}: {base}: {place:?} is a region that no side has");
                }
            }
            let used: u64 = window.places.values().map(|place| place.size).sum();
            assert_eq!(window.carve.taken(), used, "{of}");
        }
    }
}
