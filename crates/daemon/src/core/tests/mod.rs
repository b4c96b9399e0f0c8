//! The core with integers for sockets and counted tokens for descriptors.

mod cluster;
mod connect;
mod containers;
mod datagrams;
mod events;
mod explain;
mod further;
mod further_in_windows;
mod groups;
mod guest_datagrams;
mod guest_sockets;
mod join;
mod machines;
mod migration;
mod networks;
mod passed;
mod random;
mod reclaim;
pub(crate) mod sockets;
mod view;

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::rc::Rc;

use partywall_protocol::directory::{Clause, DirectoryChange, Fingerprint, Terms, Transport, slot_of};
use partywall_protocol::wire::{self, Directions, Kind, MachineId, RegionReference};
use partywall_shm::layout::Geometry;

use super::*;
use crate::credentials::{Credentials, Home};

/// The time of all events, in seconds since 1970.
pub(super) const NOW: u64 = 77;
pub(super) const INSTANCE: u64 = 5 << 32;
/// Bytes that the owner of each region has written.
pub(super) const WRITTEN: u64 = 640;

/// A socket in namespace 1, which is trusted. Nothing has passed through it. Without a remote end it listens.
pub(super) fn facts(transport: Transport, local: SocketAddr, remote: Option<SocketAddr>) -> SocketFacts {
    SocketFacts {
        origin: Origin::Host,
        transport,
        local,
        remote,
        state: remote.map_or(SocketState::Listening, |_| SocketState::Established),
        only_v6: false,
        cookie: 0,
        netns: 1,
        trusted: true,
        acknowledged: 0,
        received: 0,
        sent: 0,
        identity: Identity::default(),
    }
}

/// A descriptor that is what it says, and whose copies can be counted.
#[derive(Debug, Clone)]
pub(super) enum Fake {
    Region(u64, Rc<()>),
    /// Memory for a region of this size that is not made yet.
    Reserved(u64, Rc<()>),
    Link(Rc<()>),
    /// An end of a bell.
    Bell(Rc<()>),
    Other(Rc<()>),
}

thread_local! {
    /// Counts the link ends that the core makes, once a world says by what.
    static LINKS: std::cell::RefCell<Rc<()>> = Rc::new(()).into();
}

impl Descriptor for Fake {
    fn link() -> Result<(Self, Self), String> {
        let token = LINKS.with_borrow(Rc::clone);
        Ok((Self::Link(token.clone()), Self::Link(token)))
    }

    fn link_to_machine() -> Result<(Self, Self), String> {
        Self::link()
    }

    fn hang_up(&self) {}

    fn check_region(&self, geometry: Geometry) -> Result<(), String> {
        match self {
            Self::Region(size, _) if *size == geometry.region_size() => Ok(()),
            _ => Err("no region of this size".to_owned()),
        }
    }

    fn check_reserved(&self, geometry: Geometry) -> Result<(), String> {
        match self {
            Self::Reserved(size, _) if *size == geometry.region_size() => Ok(()),
            _ => self.check_region(geometry),
        }
    }

    fn check_seat(&self, size: u64) -> Result<(), String> {
        match self {
            Self::Region(has, _) if *has == size => Ok(()),
            _ => Err("no memory of this size".to_owned()),
        }
    }

    fn make_bell(&self) -> Result<[Self; 2], String> {
        let (Self::Region(_, token)
        | Self::Reserved(_, token)
        | Self::Link(token)
        | Self::Bell(token)
        | Self::Other(token)) = self;
        Ok([Self::Bell(token.clone()), Self::Bell(token.clone())])
    }

    fn written(&self, _: partywall_protocol::wire::Located) -> u64 {
        WRITTEN
    }
}

/// The owner of a session: a number is a user of the host.
pub(super) trait Who {
    fn with(self, pid: u32) -> Credentials;
}

impl Who for u32 {
    fn with(self, pid: u32) -> Credentials {
        (self, Home::Broker).with(pid)
    }
}

impl Who for (u32, Home) {
    fn with(self, pid: u32) -> Credentials {
        Credentials::on_host(self.0, self.0, self.1, pid)
    }
}

impl Who for MachineId {
    fn with(self, pid: u32) -> Credentials {
        Credentials::in_machine(self, pid)
    }
}

/// Something a session was sent.
#[derive(Debug)]
pub(super) struct Sent {
    pub(super) session: u64,
    pub(super) request: u32,
    pub(super) message: Message,
    pub(super) with: Vec<Fake>,
}

pub(super) struct World {
    pub(super) core: Core<Fake>,
    /// The result of offers.
    pub(super) delivery: OfferDelivery,
    pub(super) sent: Vec<Sent>,
    pub(super) closed: Vec<u64>,
    pub(super) orders: Vec<Order>,
    /// Places that the books of windows have: where each begins, and its bytes.
    pub(super) booked: BTreeSet<(u64, u64)>,
    /// The entries of the directory, with their counts.
    pub(super) listed: BTreeMap<(char, Fingerprint), u32>,
    pub(super) listed_in_machines: BTreeMap<(MachineId, char, Fingerprint), u32>,
    /// Machines that have a directory.
    directories: BTreeSet<MachineId>,
    /// The policy in it, once there is one.
    pub(super) terms: Option<(Terms, Vec<Clause>)>,
    /// Flows that the directory calls proved.
    pub(super) flows: BTreeSet<u64>,
    /// The same, with the directories that say so: `None` for the host's.
    pub(super) shown_flows: BTreeSet<(u64, Option<MachineId>)>,
    /// The flows of these that have separate proofs.
    pub(super) separate_flows: BTreeSet<u64>,
    /// Flows that have ended, and their limits.
    pub(super) ended: BTreeMap<u64, u64>,
    /// Sockets that are watched.
    pub(super) watched: BTreeMap<u64, [FlowSocket; 2]>,
    /// Published sockets of groups, once for each publication.
    pub(super) members: Vec<u64>,
    /// Sockets that the kernel does not find when it is asked.
    pub(super) gone: BTreeSet<u64>,
    /// The executable of programs that open sessions from now on, as far as the broker may read it.
    pub(super) program: Option<String>,
    token: Rc<()>,
    next_session: u64,
    next_request: u32,
}

impl World {
    pub(super) fn new() -> Self {
        Self::with(Policy::for_user(1000), INSTANCE)
    }

    pub(super) fn with_policy(text: &str) -> Self {
        Self::with(Policy::parse(text).unwrap(), INSTANCE)
    }

    pub(super) fn with(policy: Policy, instance: u64) -> Self {
        Self::sized(policy, instance, Capacity { sessions: 1000, regions: 1000, offers: 1000, entries: 1000 })
    }

    pub(super) fn sized(policy: Policy, instance: u64, capacity: Capacity) -> Self {
        let token = Rc::new(());
        LINKS.replace(token.clone());
        let mut core = Core::new(Arc::new(policy), instance, capacity);
        // The namespace of `facts` is the broker's own.
        core.set_networks(Networks::new(Some(1), []));
        Self {
            core,
            delivery: OfferDelivery::Done,
            sent: Vec::new(),
            closed: Vec::new(),
            orders: Vec::new(),
            booked: BTreeSet::new(),
            listed: BTreeMap::new(),
            listed_in_machines: BTreeMap::new(),
            directories: BTreeSet::new(),
            terms: None,
            flows: BTreeSet::new(),
            shown_flows: BTreeSet::new(),
            separate_flows: BTreeSet::new(),
            ended: BTreeMap::new(),
            watched: BTreeMap::new(),
            members: Vec::new(),
            gone: BTreeSet::new(),
            program: None,
            token,
            next_session: 1,
            next_request: 1,
        }
    }

    pub(super) fn region(&self, ring: u64) -> Fake {
        Fake::Region(4096 + ring, self.token.clone())
    }

    /// Memory of which no region has been made.
    pub(super) fn reserved(&self, ring: u64) -> Fake {
        Fake::Reserved(4096 + ring, self.token.clone())
    }

    pub(super) fn link(&self) -> Fake {
        Fake::Link(self.token.clone())
    }

    pub(super) fn other(&self) -> Fake {
        Fake::Other(self.token.clone())
    }

    /// Descriptors that are open, in the core or in what was sent and is still in `sent`.
    pub(super) fn open_descriptors(&self) -> usize {
        let made = LINKS.with_borrow(|token| Rc::ptr_eq(token, &self.token));
        Rc::strong_count(&self.token) - 1 - usize::from(made)
    }

    pub(super) fn feed(&mut self, event: CoreEvent<Fake>) {
        let actions = self.core.handle(NOW, event);
        self.perform(actions);
    }

    pub(super) fn perform(&mut self, mut actions: Vec<Action<Fake>>) {
        while !actions.is_empty() {
            let mut more = Vec::new();
            for action in actions {
                match action {
                    Action::Send { session, request, message, descriptors } => {
                        assert_eq!(message.fd_count(), descriptors.len());
                        self.sent.push(Sent { session: session.0, request, message, with: descriptors });
                    }
                    Action::Offer { session, channel, message, descriptors } => {
                        assert_eq!(message.fd_count(), descriptors.len());
                        if self.delivery == OfferDelivery::Done {
                            self.sent.push(Sent { session: session.0, request: 0, message, with: descriptors });
                        }
                        let delivery = self.delivery.clone();
                        more.extend(self.core.handle(NOW, CoreEvent::Offered { channel, delivery }));
                    }
                    Action::Directory(change) => self.change(None, change),
                    Action::BeginDirectory { machine, .. } => assert!(self.directories.insert(machine)),
                    Action::MachineDirectory { machine, change } => {
                        assert!(self.directories.contains(&machine), "it has begun");
                        self.change(Some(machine), change);
                    }
                    Action::EndDirectory { machine } => {
                        self.directories.remove(&machine);
                        self.listed_in_machines.retain(|(of, ..), _| *of != machine);
                    }
                    Action::Watch { flow, sockets } => {
                        self.watched.insert(flow, sockets);
                        for (socket, side) in sockets.iter().zip([Side::Connecting, Side::Accepting]) {
                            if self.gone.contains(&socket.cookie) {
                                more.extend(self.core.handle(NOW, CoreEvent::FlowLost { flow, side }));
                            }
                        }
                    }
                    Action::Unwatch { flow } => {
                        self.watched.remove(&flow).expect("what is watched no longer was watched");
                    }
                    Action::Member { cookie, is_published: true } => self.members.push(cookie),
                    Action::Member { cookie, is_published: false } => self.members.retain(|member| *member != cookie),
                    Action::Book { base, size, in_use: true, .. } => drop(self.booked.insert((base, size))),
                    Action::Book { base, size, in_use: false, .. } => drop(self.booked.remove(&(base, size))),
                    Action::Order { order, .. } => self.orders.push(order),
                    Action::Close { session } => self.closed.push(session.0),
                }
            }
            actions = more;
        }
        self.core.check_invariants();
    }

    fn change(&mut self, machine: Option<MachineId>, change: DirectoryChange) {
        let (table, fingerprint, comes) = match change {
            DirectoryChange::Listener(f) => ('l', f, true),
            DirectoryChange::NoListener(f) => ('l', f, false),
            DirectoryChange::Address(f) => ('a', f, true),
            DirectoryChange::NoAddress(f) => ('a', f, false),
            DirectoryChange::Offer(f) => ('o', f, true),
            DirectoryChange::NoOffer(f) => ('o', f, false),
            DirectoryChange::Policy { terms, clauses } => return self.terms = Some((terms, clauses)),
            DirectoryChange::Flow(flow) | DirectoryChange::SeparateFlow(flow) => {
                if matches!(change, DirectoryChange::SeparateFlow(_)) {
                    self.separate_flows.insert(flow);
                }
                let slots: BTreeSet<_> = self.flows.iter().map(|flow| slot_of(*flow)).collect();
                let is_again = self.shown_flows.iter().any(|(of, _)| *of == flow);
                assert!(is_again || !slots.contains(&slot_of(flow)), "another flow has that slot");
                self.flows.insert(flow);
                assert!(self.shown_flows.insert((flow, machine)));
                return;
            }
            DirectoryChange::FlowEnded { flow, limit } => {
                assert!(self.shown_flows.remove(&(flow, machine)), "what ends has begun there");
                self.flows.remove(&flow);
                self.separate_flows.remove(&flow);
                self.ended.insert(flow, limit);
                return;
            }
            DirectoryChange::FlowProved { .. } | DirectoryChange::Proved(_) => return,
        };
        let count = match machine {
            None => self.listed.entry((table, fingerprint)).or_default(),
            Some(machine) => self.listed_in_machines.entry((machine, table, fingerprint)).or_default(),
        };
        if comes {
            *count += 1;
        } else {
            *count = count.checked_sub(1).expect("what goes had come");
        }
        self.listed.retain(|_, count| *count > 0);
        self.listed_in_machines.retain(|_, count| *count > 0);
    }

    pub(super) fn open(&mut self, who: impl Who, pid: u32) -> u64 {
        let session = self.next_session;
        self.next_session += 1;
        let program = self.program.clone();
        self.feed(CoreEvent::Opened { session: SessionId(session), peer: who.with(pid), program });
        session
    }

    pub(super) fn end(&mut self, session: u64) {
        self.feed(CoreEvent::Closed { session: SessionId(session), by_program: true });
    }

    /// Ends a session whose program may live.
    pub(super) fn lose(&mut self, session: u64) {
        self.feed(CoreEvent::Closed { session: SessionId(session), by_program: false });
    }

    /// Sends a message, and returns the answer, if there is one. Messages to other sessions stay in `sent`.
    pub(super) fn say(&mut self, session: u64, message: Message, descriptors: Vec<Fake>) -> Option<Message> {
        let request = self.next_request;
        self.next_request += 1;
        self.hear(session, request, message, descriptors, None)
    }

    /// As [`say`](Self::say), of a socket that comes with it.
    pub(super) fn say_of(
        &mut self,
        session: u64,
        message: Message,
        socket: SocketFacts,
        descriptors: Vec<Fake>,
    ) -> Option<Message> {
        let request = self.next_request;
        self.next_request += 1;
        self.hear(session, request, message, descriptors, Some(Ok(socket)))
    }

    fn hear(
        &mut self,
        session: u64,
        request: u32,
        message: Message,
        descriptors: Vec<Fake>,
        socket: Option<Result<SocketFacts, String>>,
    ) -> Option<Message> {
        self.feed(CoreEvent::Message { session: SessionId(session), request, message, descriptors, socket });
        let at = self.sent.iter().position(|s| s.session == session && s.request == request)?;
        Some(self.sent.remove(at).message)
    }

    pub(super) fn ask(&mut self, session: u64, message: Message) -> Message {
        self.say(session, message, Vec::new()).expect("an answer")
    }

    pub(super) fn refused(&mut self, session: u64, message: Message, with: Vec<Fake>) -> Refusal {
        match self.say(session, message, with) {
            Some(Message::Refused { code, reason }) => {
                assert!(!reason.is_empty());
                code
            }
            other => panic!("not refused: {other:?}"),
        }
    }

    /// A session of user 1000 that has joined.
    pub(super) fn join(&mut self, name: &str, pid: u32) -> u64 {
        self.join_as(1000, name, pid)
    }

    pub(super) fn join_as(&mut self, who: impl Who, name: &str, pid: u32) -> u64 {
        let session = self.open(who, pid);
        let answer = self.ask(session, join(name));
        assert!(matches!(answer, Message::Joined { .. }), "{answer:?}");
        session
    }

    pub(super) fn bind(&mut self, session: u64, service: &str, backlog: u16) {
        assert_eq!(self.ask(session, bind(service, backlog)), Message::Done {});
    }

    /// Connects, and leaves the `Incoming` in `sent`.
    pub(super) fn connect(&mut self, session: u64, target: &str, service: &str) -> u64 {
        let with = vec![self.region(8192)];
        match self.say(session, connect(target, service, 8192), with) {
            Some(Message::Connected { channel, links: 2, .. }) => channel,
            other => panic!("not connected: {other:?}"),
        }
    }

    pub(super) fn accept(&mut self, session: u64, channel: u64) {
        let with = vec![self.region(16384)];
        let accepted = Message::Accepted { channel, start: 0, region: RegionReference::with_ring(16384) };
        assert_eq!(self.say(session, accepted, with), Some(Message::Done {}));
        let attached = |sent: &Sent| matches!(sent.message, Message::Attached { channel: of, .. } if of == channel);
        self.sent.retain(|sent| !attached(sent));
    }
}

pub(super) fn join(name: &str) -> Message {
    Message::Join { version: wire::VERSION, name: name.to_owned() }
}

pub(super) fn bind(service: &str, backlog: u16) -> Message {
    Message::Bind { service: service.to_owned(), kind: Kind::Stream, backlog }
}

pub(super) fn connect(target: &str, service: &str, ring_size: u64) -> Message {
    Message::Connect {
        target: target.to_owned(),
        service: service.to_owned(),
        kind: Kind::Stream,
        directions: Directions::BOTH,
        region: RegionReference::with_ring(ring_size),
    }
}
