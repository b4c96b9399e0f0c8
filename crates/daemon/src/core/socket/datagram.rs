//! `OfferDatagrams`, `TakeDatagrams` and `FetchReceiver`: a ring from one UDP socket to another (protocol U3, U4), which lasts as long as
//! both sockets have their addresses (U11).
//!
//! A connection is identified by its ends. A datagram is identified by the sender's statement of its destination, and by the kernel's
//! report of its source at the receiver. Both must follow from the sockets' own addresses in one network namespace, or, between two namespaces,
//! from the operator's list of their addresses ([`Networks`]). Between machines the regions lie in windows, which both sides learn from the
//! answer `RoomIs` (protocol U14). Within a machine they are the agent's to pass on, and it says how far a sender has written (U15).
//!
//! ```text
//!   sender                        broker                        receiver
//!   OfferDatagrams [region] ----> offer
//!                                 flow: live in the directory <---- TakeDatagrams [region]
//!                                 watches both sockets ----------> DatagramsTaken [sender's region]
//!   sees it live
//!   FetchReceiver --------------> Receiver [receiver's region]
//!                                 a socket lost its address: ended in the directory
//! ```

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use partywall_protocol::directory::{DirectoryChange, FLOWS, Fingerprint, Transport, slot_of};
use partywall_protocol::wire::{Directions, Located, MachineId, Message, Origin, Refusal, RegionReference, Side};
use partywall_shm::address::narrow;
use partywall_shm::layout::Geometry;

use super::facts::Ends;
use super::flow_slots;
use super::offer::{Offer, OfferOf, region_of};
use super::open::{SocketSide, affords_both_ends, service_of};
use super::{SocketFacts, SocketState};
use crate::core::action::FlowSocket;
use crate::core::channel::EndState;
use crate::core::id::ChannelId;
use crate::core::networks::Networks;
use crate::core::pair_window::Holder;
use crate::core::refuse::{Refuse, refuse};
use crate::core::region::{check_region, located};
use crate::core::{Action, Core, Descriptor, SessionId};

/// An address of a message.
pub(in crate::core) fn at(high: u64, low: u64, port: u16) -> SocketAddr {
    SocketAddr::new(narrow(u128::from(high) << 64 | u128::from(low)), port)
}

/// Stands for every address of the receiver in the directory's fingerprint of an offer: the receiver of a wildcard does not
/// know to which of its addresses a datagram was sent.
const ANY: IpAddr = IpAddr::V6(Ipv6Addr::UNSPECIFIED);

/// The core's record of a flow, beside its channel.
#[derive(Debug)]
pub(in crate::core) struct FlowRecord<F> {
    /// The sender's and the receiver's socket.
    pub(in crate::core) sockets: [FlowSocket; 2],
    /// The sender's socket as it was offered.
    offered: SocketFacts,
    /// The sender's region, of which the tail is read when the flow ends.
    sender: (F, Located),
    /// The receiver's, until the sender has fetched it.
    receiver: Option<(F, RegionReference)>,
    /// Within a machine, the byte up to which the sender had written when its agent last said so.
    reported: u64,
}

impl<F> FlowRecord<F> {
    /// Where the sender and the receiver run.
    fn origins(&self) -> [Origin; 2] {
        self.sockets.map(|socket| socket.namespace.origin)
    }

    /// The machines that it counts for, once each.
    pub(in crate::core) fn machines(&self) -> impl Iterator<Item = MachineId> + use<F> {
        let [sender, receiver] = self.origins().map(Origin::machine);
        sender.into_iter().chain(receiver.filter(|_| receiver != sender))
    }

    /// Whether both sockets are in one machine, where their regions are, too.
    fn is_within_machine(&self) -> bool {
        let [sender, receiver] = self.origins();
        sender == receiver && sender != Origin::Host
    }
}

impl<F: Descriptor> Core<F> {
    pub(in crate::core) fn offer_datagrams(
        &mut self,
        id: SessionId,
        request: u32,
        to: SocketAddr,
        reference: RegionReference,
        socket: SocketFacts,
        with: Vec<F>,
    ) -> Result<(), Refuse> {
        self.is_admitted(&socket)?;
        let from = self.source(&socket, to)?;
        let (place, shape) = region_of(reference)?;
        let Some((domain_id, domain, peer)) = self.member(id) else { return Ok(()) };
        self.may_offer(domain, reference.ring_size)?;
        let Some(region) = with.into_iter().next() else { return Ok(()) };
        let here = peer.origin();
        let there = self.sockets.networks.origin_of(to.ip()).unwrap_or(here);
        let ends = Ends::new(SocketAddr::new(ANY, to.port()), from);
        let same = |offer: &Offer<F>| offer.socket.id() == socket.id() && offer.to() == Some(to);
        let before = self.offers_of(ends, same).first().copied();
        // The offer that this one replaces leaves its slot to it.
        let freed = before.and_then(|before| self.sockets.offers.get(&before)?.peer.origin().machine());
        self.may_have_flow(here, usize::from(freed.is_some() && freed == here.machine()))?;
        let holder = Holder::Process { domain: domain_id, pid: peer.pid };
        if place == Located::OwnMemory && here != there {
            return self.datagram_room((id, request), there, shape);
        }
        if let Some(before) = before {
            self.drop_offer(before);
        }
        self.skip_to_free_slot()?;
        let region = self.flow_region((here, there), (place, shape), region, holder, self.next_channel)?;
        let fingerprint = Fingerprint::offer(Transport::Udp, SocketAddr::new(ANY, to.port()), from, socket.netns);
        let offer = self.add_offer(Offer {
            session: id,
            domain: domain_id,
            peer,
            socket,
            ends,
            fingerprints: vec![fingerprint],
            accepted_on: there,
            reference,
            region,
            of: OfferOf::Datagrams { to },
            ticks: 0,
        });
        self.send(id, request, Message::Offered { offer });
        Ok(())
    }

    /// The memory of the region of a socket for datagrams, for the other side, if it is what the client says: separate memory where both sides
    /// are on one machine, and otherwise a place that this holder was given in the window, which is the channel's from now on.
    fn flow_region(
        &mut self,
        between: (Origin, Origin),
        (located, shape): (Located, Geometry),
        region: F,
        holder: Holder,
        channel: ChannelId,
    ) -> Result<F, Refuse> {
        let (here, there) = between;
        match located {
            Located::Window { base } if here != there => {
                self.machines.settle(between, base, shape.region_size(), holder, channel)
            }
            Located::Window { .. } => {
                refuse(Refusal::BadRegion, "a place in a window is for connections to other machines")
            }
            Located::OwnMemory if here != there => {
                refuse(Refusal::BadRegion, "the other side is on another machine: the region must be in a window")
            }
            // In a machine, the memory does not leave it, and its agent has checked it (protocol U15.2).
            Located::OwnMemory if here != Origin::Host => Ok(region),
            Located::OwnMemory => check_region(&region, shape).map(|()| region),
        }
    }

    pub(in crate::core) fn take_datagrams(
        &mut self,
        id: SessionId,
        request: u32,
        (from, reference): (SocketAddr, RegionReference),
        socket: SocketFacts,
        with: Vec<F>,
    ) -> Result<(), Refuse> {
        self.is_admitted(&socket)?;
        is_one(&socket)?;
        let (place, shape) = region_without_ring(reference)?;
        let Some((domain_id, domain, peer)) = self.member(id) else { return Ok(()) };
        domain.afford(0)?;
        let Some(region) = with.into_iter().next() else { return Ok(()) };
        let ends = Ends::new(SocketAddr::new(ANY, socket.local.port()), from);
        let networks = &self.sockets.networks;
        let is_own = |to: SocketAddr| networks.has(socket.namespace(), to.ip());
        let fits = |offer: &Offer<F>| {
            // The room for its region, and who sees it, were chosen for the machine that the list named when it was made.
            offer.accepted_on == peer.origin()
                && offer.to().is_some_and(|to| {
                    networks.allow([(offer.socket.namespace(), from.ip()), (socket.namespace(), to.ip())])
                        && receives(&socket, to, from, is_own(to))
                })
        };
        let Some(offer_id) = self.offers_of(ends, fits).first().copied() else {
            return refuse(Refusal::NoSuchOffer, "no program offers a ring for datagrams to this socket now");
        };
        let Some(offer) = self.sockets.offers.get(&offer_id) else { return Ok(()) };
        if offer.socket.id() == socket.id() {
            self.drop_offer(offer_id);
            return refuse(Refusal::SelfContradiction, "a socket that sends to itself needs no ring");
        }
        if self.regions + 2 > self.capacity.regions {
            return refuse(Refusal::OutOfResources, "the broker has no descriptors left for another flow of datagrams");
        }
        let service = service_of(Transport::Udp, socket.local.port())?;
        let Some(sender) = self.domains.get(&offer.domain) else { return Ok(()) };
        // A refusal of the sender would refuse its next takers too.
        let allowed = self
            .allows_ring(offer, sender, (domain, peer), (&service, "send to"))
            .and_then(|()| sender.afford(offer.reference.ring_size));
        if allowed.is_err() {
            self.drop_offer(offer_id);
            return allowed;
        }
        if offer.domain == domain_id {
            affords_both_ends(sender, sender.ring_bytes.saturating_add(offer.reference.ring_size))?;
        }

        let (here, there) = (peer.origin(), offer.peer.origin());
        let (sender_place, _) = located(offer.reference)?;
        // For the sender's machine the offer counts already.
        if here != there {
            self.may_have_flow(here, 0)?;
        }
        let holder = Holder::Process { domain: domain_id, pid: peer.pid };
        if place == Located::OwnMemory && here != there {
            return self.datagram_room((id, request), there, shape);
        }
        let region = self.flow_region((here, there), (place, shape), region, holder, offer_id)?;

        // From here on the request cannot be refused.
        // The flow keeps the slot that its offer had.
        let Some(offer) = self.remove_offer(offer_id) else { return Ok(()) };
        self.sockets.slots.insert(slot_of(offer_id));
        let side = |domain, peer, ring_size, region: &F| SocketSide {
            domain,
            peer,
            ring_size,
            region: region.clone(),
            // A UDP socket may have flows to many.
            socket: None,
        };
        let sides = [
            side(offer.domain, offer.peer, offer.reference.ring_size, &offer.region),
            side(domain_id, peer, 0, &region),
        ];
        self.open_socket_channel(offer_id, service, Directions::FORWARD, sides);
        let to = offer.to().unwrap_or(socket.local);
        let probe = |of: &SocketFacts, from, to| FlowSocket {
            cookie: of.cookie,
            namespace: of.namespace(),
            from,
            to,
            is_chosen: of.state == SocketState::Grouped,
        };
        // A sender that is connected is reached from its peer alone.
        let remote = offer.socket.remote.map(|remote| SocketAddr::new(remote.ip().to_canonical(), remote.port()));
        let sockets = [probe(&offer.socket, remote.unwrap_or(to), from), probe(&socket, from, to)];
        let flow = FlowRecord {
            sockets,
            offered: offer.socket,
            sender: (offer.region.clone(), sender_place),
            receiver: Some((region, reference)),
            reported: 0,
        };
        let begins = match flow.origins() {
            [Origin::Host, Origin::Host] => DirectoryChange::Flow(offer_id),
            _ => DirectoryChange::SeparateFlow(offer_id),
        };
        // The order matters: if the look finds that a socket has gone since it was shown, the flow ends before any program learns of it.
        self.show_flow(flow.origins(), &begins);
        self.count_flow(&flow, |slots| slots + 1);
        self.sockets.flows.insert(offer_id, flow);
        self.actions.push(Action::Watch { flow: offer_id, sockets });
        let message = Message::DatagramsTaken { flow: offer_id, region: offer.reference };
        self.actions.push(Action::Send { session: id, request, message, descriptors: vec![offer.region] });
        Ok(())
    }

    /// Gives the sender of a flow the receiver's region.
    pub(in crate::core) fn fetch_receiver(&mut self, id: SessionId, request: u32, flow: u64) -> Result<(), Refuse> {
        let Some((domain, _, peer)) = self.member(id) else { return Ok(()) };
        let own = EndState::Held { domain, pid: peer.pid };
        let is_own = self.channels.get(&flow).is_some_and(|channel| channel.end(Side::Connecting).state == own);
        let region = self.sockets.flows.get_mut(&flow).filter(|_| is_own).and_then(|flow| flow.receiver.take());
        let Some((memory, region)) = region else {
            return refuse(Refusal::NoSuchChannel, format!("you offer no flow {flow} that was taken just now"));
        };
        let message = Message::Receiver { region };
        self.actions.push(Action::Send { session: id, request, message, descriptors: vec![memory] });
        Ok(())
    }

    /// The agent of a machine says up to which byte the sender of a flow within the machine has written its ring, before the flow ends because
    /// its sender is gone (protocol U15.6 to U15.8). Of other flows, this says nothing. By itself it has no consequence.
    pub fn flow_written(&mut self, machine: MachineId, flow: u64, tail: u64) {
        let within = [Origin::Machine(machine); 2];
        if let Some(flow) = self.sockets.flows.get_mut(&flow).filter(|flow| flow.origins() == within) {
            flow.reported = tail;
        }
    }

    /// The host's kernel has closed a socket.
    pub(in crate::core) fn socket_gone(&mut self, cookie: u64) {
        // Sockets of machines may have the same number.
        let has = |flow: &FlowRecord<F>, side: usize| {
            let socket = flow.sockets[side];
            socket.cookie == cookie && socket.host_netns().is_some()
        };
        let lost: Vec<_> = (self.sockets.flows.iter())
            .flat_map(|(id, flow)| {
                let sides = [(0, Side::Connecting), (1, Side::Accepting)];
                sides.into_iter().filter(|(at, _)| has(flow, *at)).map(|(_, side)| (*id, side))
            })
            .collect();
        for (flow, side) in lost {
            self.flow_lost(flow, side);
        }
    }

    /// The socket of one side of a flow has its address no more.
    pub(in crate::core) fn flow_lost(&mut self, flow: ChannelId, side: Side) {
        if !self.sockets.flows.contains_key(&flow) {
            return;
        }
        let Some(channel) = self.channels.get(&flow) else { return };
        tracing::debug!(flow, ?side, "a flow of datagrams has lost one of its sockets");
        if channel.is_between_machines() {
            // Each side may use its place in a window until it closes its end.
            self.end_flow(flow, side);
        } else {
            self.release(flow, side, channel.end(side).state);
        }
    }

    /// Puts another list in force. Flows and offers that it does not allow end, and the directory follows it.
    ///
    /// Only what concerns the host or a machine for which the list has changed is judged again: an agent that greets again and again keeps the
    /// event loop no longer than its own flows and sockets take.
    pub(in crate::core) fn set_networks(&mut self, networks: Networks) {
        let changed = networks.changed(&self.sockets.networks);
        self.sockets.networks = networks;
        let concerns = |networks: &Networks, origins: &[Origin], to: SocketAddr| {
            let owner = networks.origin_of(to.ip());
            origins.iter().chain(&owner).any(|origin| changed.contains(origin))
        };
        let offers = self.sockets.offers.iter().filter_map(|(id, offer)| Some((*id, offer, offer.to()?)));
        let networks = &self.sockets.networks;
        let offers = offers
            .filter(|(_, offer, to)| concerns(networks, &[offer.socket.namespace().origin, offer.accepted_on], *to));
        let leads_to = |offer: &Offer<F>, to: SocketAddr| {
            self.sockets.networks.origin_of(to.ip()).unwrap_or(offer.peer.origin()) == offer.accepted_on
        };
        let offers =
            offers.filter(|(_, offer, to)| !leads_to(offer, *to) || !self.has_source(&offer.socket, *to, offer.ends));
        let dropped: Vec<_> = offers.map(|(id, ..)| id).collect();
        for offer in dropped {
            self.drop_offer(offer);
        }
        let is_allowed = |flow: &FlowRecord<F>| {
            let [sender, receiver] = &flow.sockets;
            let from = Ends::new(SocketAddr::new(ANY, receiver.to.port()), sender.to);
            self.sockets.networks.allow(flow.sockets.map(|socket| (socket.namespace, socket.to.ip())))
                && self.has_source(&flow.offered, receiver.to, from)
        };
        let networks = &self.sockets.networks;
        let flows = self.sockets.flows.iter();
        let flows = flows.filter(|(_, flow)| concerns(networks, &flow.origins(), flow.sockets[1].to));
        let flows = flows.filter(|(_, flow)| !is_allowed(flow));
        let ended: Vec<_> = flows.map(|(id, _)| *id).collect();
        for flow in ended {
            // What the receiver has not read goes by the kernel.
            self.flow_lost(flow, Side::Accepting);
        }
        self.list_datagrams_again(&changed);
    }

    /// Whether datagrams of this socket to `to` have, by the present list, the source that an offer said (protocol U13.4).
    fn has_source(&self, socket: &SocketFacts, to: SocketAddr, ends: Ends) -> bool {
        let now = self.is_admitted(socket).and_then(|()| self.source(socket, to));
        now.is_ok_and(|from| Ends::new(SocketAddr::new(ANY, to.port()), from) == ends)
    }

    /// A flow ends because one side has gone: both ends find that in the directory, and up to which byte it was proved.
    pub(in crate::core) fn end_flow(&mut self, id: ChannelId, gone: Side) {
        let Some(flow) = self.sockets.flows.remove(&id) else { return };
        self.sockets.slots.remove(&slot_of(id));
        self.count_flow(&flow, |slots| slots - 1);
        let limit = match gone {
            Side::Connecting if flow.is_within_machine() => flow.reported,
            // The bytes that it has written until now were its own.
            Side::Connecting => flow.sender.0.written(flow.sender.1),
            // The next owner of the receiver's address is to have what was not read.
            Side::Accepting => 0,
        };
        self.actions.push(Action::Unwatch { flow: id });
        self.show_flow(flow.origins(), &DirectoryChange::FlowEnded { flow: id, limit });
    }

    /// Makes a change of a flow in the directories of its two ends.
    fn show_flow(&mut self, [sender, receiver]: [Origin; 2], change: &DirectoryChange) {
        self.show_on(sender, vec![change.clone()]);
        if sender != receiver {
            self.show_on(receiver, vec![change.clone()]);
        }
    }

    /// A UDP socket in a namespace that the broker can watch, at an address that is that namespace's (protocol U2).
    fn is_admitted(&self, socket: &SocketFacts) -> Result<(), Refuse> {
        if socket.transport != Transport::Udp || self.sockets.networks.admits(socket) {
            return Ok(());
        }
        let reason = format!(
            "the policy ([[network]]) does not list {} for this socket's network namespace or machine, or the broker cannot ask there",
            socket.local.ip()
        );
        refuse(Refusal::BadSocket, reason)
    }

    /// The source address that the receiver of a datagram will see.
    fn source(&self, socket: &SocketFacts, to: SocketAddr) -> Result<SocketAddr, Refuse> {
        is_one(socket)?;
        if to.port() == 0 || to.ip().is_unspecified() || to.ip().is_multicast() {
            return refuse(Refusal::BadSocket, "datagrams to this address may come to many");
        }
        let ip = match (self.sockets.networks.source_to(socket, to.ip()), socket.local.ip().to_canonical(), to.ip()) {
            (Some(Some(listed)), ..) => listed,
            (Some(None), ..) => {
                let reason = format!(
                    "{to} is in another network namespace or machine, and the policy does not list one address of this socket's namespace \
                     ([[network]]) that its datagrams come from"
                );
                return refuse(Refusal::BadSocket, reason);
            }
            (None, own, _) if !own.is_unspecified() => own,
            (None, _, to) if !to.is_loopback() => to,
            // The kernel sends from the destination address within this host, except that all of 127/8 uses the first address.
            (None, _, IpAddr::V4(_)) => IpAddr::V4(Ipv4Addr::LOCALHOST),
            (None, _, IpAddr::V6(_)) => IpAddr::V6(Ipv6Addr::LOCALHOST),
        };
        Ok(SocketAddr::new(ip, socket.local.port()))
    }

    /// Whether programs of this machine may have another flow, or offer one (protocol U14.7). Its agent is asked about all of its flows, again
    /// and again, and the host's programs need slots, too. `freed`: slots of the machine that become free if it may.
    fn may_have_flow(&self, of: Origin, freed: usize) -> Result<(), Refuse> {
        let Some(machine) = of.machine() else { return Ok(()) };
        let counts = &self.sockets.machine_counts;
        let own = counts.get(&machine).map_or(0, |counts| counts.flow_slots - freed);
        let others = counts.iter().filter(|(other, _)| **other != machine).map(|(_, counts)| counts.flow_slots);
        if flow_slots::may_have_another(own, others.chain([own]), self.machines.count()) {
            return Ok(());
        }
        let name = self.machines.called(of);
        let reason = match own {
            flow_slots::OF_MACHINE.. => {
                format!("{name} has {own} flows of datagrams and offers of them, the most a machine can have")
            }
            _ => format!(
                "{name} has {own} flows of datagrams and offers of them, and the machines of this host together have the most they can"
            ),
        };
        refuse(Refusal::OutOfResources, reason)
    }

    /// Counts a flow, which comes or goes, for the machines that have an end of it.
    fn count_flow(&mut self, flow: &FlowRecord<F>, change: impl Fn(usize) -> usize) {
        for machine in flow.machines() {
            if let Some(counts) = self.sockets.counts_of(machine.into()) {
                counts.flow_slots = change(counts.flow_slots);
            }
        }
    }

    /// Moves the number of the next channel to one whose slot in the directory no other flow has.
    fn skip_to_free_slot(&mut self) -> Result<(), Refuse> {
        if self.sockets.slots.len() >= FLOWS {
            return refuse(
                Refusal::OutOfResources,
                format!("this host has {FLOWS} flows of datagrams, the most it can"),
            );
        }
        while self.sockets.slots.contains(&slot_of(self.next_channel)) {
            self.next_channel += 1;
        }
        Ok(())
    }
}

/// A UDP socket with a port, to which comes what is sent there; of a socket in a group, the watch proves that (protocol U11).
fn is_one(socket: &SocketFacts) -> Result<(), Refuse> {
    if socket.may_have_flows() {
        return Ok(());
    }
    refuse(Refusal::BadSocket, "the socket is not one for datagrams that is reached by its address alone")
}

/// Where the region of a receiver is, and its shape.
fn region_without_ring(reference: RegionReference) -> Result<(Located, Geometry), Refuse> {
    if reference.ring_size != 0 {
        return refuse(Refusal::BadRegion, "the region of a receiver of datagrams has no ring");
    }
    located(reference)
}

/// Whether what is sent to `to` comes to this socket and to no other. `is_own`: the operator lists the address for the socket's namespace.
fn receives(socket: &SocketFacts, to: SocketAddr, from: SocketAddr, is_own: bool) -> bool {
    let own = socket.local.ip().to_canonical();
    let family = to.is_ipv6() || socket.local.is_ipv4() || !socket.only_v6;
    // The broker does not know the other addresses of this namespace.
    let here = own == to.ip()
        || (socket.local.ip().is_unspecified()
            && (to.ip().is_loopback() || is_own)
            && (to.is_ipv4() || socket.local.is_ipv6())
            && family);
    let wanted = socket
        .remote
        .is_none_or(|remote| (remote.ip().to_canonical(), remote.port()) == (from.ip().to_canonical(), from.port()));
    here && wanted && socket.local.port() == to.port()
}
