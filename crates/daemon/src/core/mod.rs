//! The broker as a state machine without I/O: events in, actions out.
//!
//! ```text
//!   session opened, message, session closed          +------+   send, offer, close
//!   ----------------- Event ------------------------>| Core |---------- Action ------------->
//!   an offer was delivered or was not                +------+
//!
//!   Domain (name, epoch, quota)  1 --- n  Session (one socket)  1 --- n  Service (name, kind, backlog)
//!        |                                                                  |
//!        +-- 1 --- n  Process --- holds ---> End  2 --- 1  Channel <--- made by Connect
//! ```
//!
//! Everything a client says arrives here decoded but unproven; names, geometries, descriptors, rights and quotas are checked
//! here, and whatever is refused changes nothing. Descriptors are opaque ([`Descriptor`]): tests use counters, the event loop
//! uses real ones, and dropping one closes it. Each concept has its file:
//!
//! - `session` opens and ends sessions, `join` makes domains of them, `domain` accounts for what a domain has;
//! - `service` binds, `connect` makes channels, `channel` keeps their two ends, `reclaim` hears of them again (protocol C9);
//! - `view` answers `List` and `Inspect` (C10), and `explain` says what the policy would decide (C17);
//! - `machine` knows virtual machines, and `window_places` hands out places in the windows between them (protocol G);
//! - `machine` knows virtual machines, and hands out places in the windows between them (protocol G);
//! - `events` tells those who follow what has happened (C18);
//! - `report` counts what is done, for metrics;
//! - `group` knows who takes part in which group, and hands out seats (protocol J);
//! - `socket` keeps the directory, and matches the two ends of TCP connections (protocol T).

mod channel;
mod connect;
mod descriptor;
mod domain;
mod events;
mod explain;
mod further;
mod group;
#[cfg(test)]
mod invariants;
mod join;
mod log;
mod machine;
mod reclaim;
mod refuse;
mod report;
mod service;
mod session;
mod socket;
#[cfg(test)]
pub(crate) mod tests;
mod view;
mod window_places;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use partywall_protocol::directory::DirectoryChange;
use partywall_protocol::wire::{EventKind, MachineId, Message, Name, Origin, Refusal, Side, User};

pub use descriptor::Descriptor;
pub use group::Membership;
pub use machine::{MachineNews, Order};
pub(crate) use report::{CoreReport, DecisionKey};
pub use session::SessionId;
pub use socket::{FlowSocket, Identity, NamespaceId, Numbers, SocketFacts, SocketId, SocketState};

use crate::credentials::{Account, Credentials};
use crate::policy::{Policy, SocketRules};
use channel::{Channel, ChannelId};
use connect::Offering;
use domain::{DomainId, DomainRecord};
use events::{AskedFor, EventQueues, Happened};
use explain::{AskedUser, PolicyQuery};
use group::Groups;
use log::LogBudget;
use machine::Machines;
use refuse::{Refuse, refuse};
use report::RequestCounts;
use service::{Service, ServiceKey};
use session::SessionRecord;
use socket::{Sockets, at};

/// An event that the driver reports to the core.
#[derive(Debug)]
pub enum CoreEvent<F> {
    /// Somebody connected to the broker's socket.
    Opened {
        /// The session from now on.
        session: SessionId,
        /// Who it is, from the kernel (protocol C3).
        peer: Credentials,
        /// The path of its executable, where the broker may read it.
        program: Option<String>,
    },
    /// A packet that decoded.
    Message {
        /// Who sent it.
        session: SessionId,
        /// Its request number.
        request: u32,
        /// What it says.
        message: Message,
        /// What came with it, except a socket that it brings to be looked at ([`Message::brings_socket`]).
        descriptors: Vec<F>,
        /// What that socket is, or why it is not one. `None` if none came.
        socket: Option<Result<SocketFacts, String>>,
    },
    /// A packet that did not decode, or lost some of its descriptors.
    Malformed {
        /// Who sent it.
        session: SessionId,
        /// Its request number, or 0.
        request: u32,
        /// Whose fault it was.
        code: Refusal,
        /// What was wrong with it.
        reason: String,
        /// Whether nothing that follows can be trusted (protocol C4).
        fatal: bool,
    },
    /// What became of an [`Action::Offer`]. Must follow it before any other event.
    Offered {
        /// The channel offered.
        channel: u64,
        /// Whether the listener has it in its socket.
        delivery: OfferDelivery,
    },
    /// The session's socket ended, or could not be written.
    Closed {
        /// The session that ended.
        session: SessionId,
        /// No process has the other end any more. Otherwise its program may live, and use memory that it was given.
        by_program: bool,
    },
    /// The kernel has closed the UDP socket that has this number (`SO_COOKIE`).
    SocketGone {
        /// The cookie of the closed socket.
        cookie: u64,
    },
    /// The socket of one side of a flow, of which [`Action::Watch`] told, no longer receives what is sent to its address.
    FlowLost {
        /// The flow that the socket belongs to.
        flow: u64,
        /// The side whose socket it was.
        side: Side,
    },
    /// About a second has passed. Only needed while [`Core::wants_ticks`].
    Tick,
}

/// What became of an offer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OfferDelivery {
    /// It lies in the listener's socket.
    Done,
    /// The listener's socket has no room.
    Full,
    /// The listener's socket has ended; that it has closed is yet to be reported.
    Gone,
    /// The kernel would not carry it.
    Failed(String),
}

/// What to do, in order. Descriptors in it are the event loop's to send and drop.
#[derive(Debug, PartialEq, Eq)]
pub enum Action<F> {
    /// Answer a session. If that fails, the session is to be closed, and [`CoreEvent::Closed`] to be reported.
    Send {
        /// The session that receives the message.
        session: SessionId,
        /// The number of the request that it answers.
        request: u32,
        /// The message to send.
        message: Message,
        /// The descriptors that travel with the message.
        descriptors: Vec<F>,
    },
    /// Put something that a session has not asked for into its socket, and report [`CoreEvent::Offered`]. A failure is that of the session
    /// that asked for it.
    Offer {
        /// The session that receives the message.
        session: SessionId,
        /// The channel that it is about.
        channel: u64,
        /// What to say.
        message: Message,
        /// A region, and with a connection its link ends.
        descriptors: Vec<F>,
    },
    /// Change the host's directory.
    Directory(DirectoryChange),
    /// Begin the directory of a machine, in its window from the host.
    BeginDirectory {
        /// Which machine.
        machine: MachineId,
        /// The window, writable.
        window: F,
        /// Where in it the directory begins.
        base: u64,
    },
    /// Change the directory of a machine.
    MachineDirectory {
        /// Which machine.
        machine: MachineId,
        /// What changes.
        change: DirectoryChange,
    },
    /// The machine has gone, and its directory with it.
    EndDirectory {
        /// Which machine.
        machine: MachineId,
    },
    /// Note in a window's book that a place is in use from now on, or no longer (protocol V2.4). Before what is sent about it.
    Book {
        /// The window, writable.
        window: F,
        /// Where the place begins, from the header on.
        base: u64,
        /// The place's bytes.
        size: u64,
        /// Whether somebody has it.
        in_use: bool,
    },
    /// Watch the sockets of a flow, sender's and receiver's: look at both before the next action, and report [`CoreEvent::FlowLost`] whenever
    /// one no longer receives what is sent to its address.
    Watch {
        /// The flow to watch.
        flow: u64,
        /// The sockets of sender and receiver.
        sockets: [FlowSocket; 2],
    },
    /// Watch them no longer.
    Unwatch {
        /// The flow that needs no watching any more.
        flow: u64,
    },
    /// Ring a bell that [`Descriptor::make_bell`] has made.
    Ring {
        /// The end that rings.
        bell: F,
    },
    /// Do something to a machine, and have [`Core::answer`] tell how it went.
    Order {
        /// The session that asks for it.
        session: SessionId,
        /// The number of the request.
        request: u32,
        /// What to do to the machine.
        order: Order,
    },
    /// Close the socket of a session, which the core has forgotten already.
    Close {
        /// The session whose socket is to be closed.
        session: SessionId,
    },
}

/// What the machine can bear, so that the broker sheds load before the kernel does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capacity {
    /// Sessions at a time.
    pub sessions: usize,
    /// Region descriptors kept for `Inspect`; beyond them a channel works, but cannot be inspected.
    pub regions: usize,
    /// Offers of connections at a time.
    pub offers: usize,
    /// Entries in the directory.
    pub entries: usize,
}

/// How much there is of everything.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CoreStatus {
    /// Sockets open.
    pub sessions: usize,
    /// Domains that exist.
    pub domains: usize,
    /// Services bound.
    pub services: usize,
    /// Channels known.
    pub channels: usize,
}

/// The broker without its sockets.
#[derive(Debug)]
pub struct Core<F> {
    policy: Arc<Policy>,
    capacity: Capacity,
    /// This incarnation of the broker; greater than every one before it on the same path.
    instance: u64,
    /// Ids count up from the instance, so they never meet those of another instance (protocol C9).
    next_channel: ChannelId,
    next_epoch: u64,
    next_domain: DomainId,
    next_service: ServiceKey,
    sessions: HashMap<SessionId, SessionRecord>,
    sessions_by_account: HashMap<Account, u32>,
    domains: BTreeMap<DomainId, DomainRecord>,
    services: BTreeMap<ServiceKey, Service>,
    channels: BTreeMap<ChannelId, Channel<F>>,
    /// Who is called what.
    domain_ids: HashMap<Name, DomainId>,
    service_keys: HashMap<(DomainId, Name), ServiceKey>,
    /// Region descriptors kept, over all channels.
    regions: usize,
    sockets: Sockets<F>,
    machines: Machines<F>,
    groups: Groups<F>,
    /// The directory's memory, for clients to map.
    directory: Option<F>,
    /// What an administrator said instead of the file.
    live_policy: Option<SocketRules>,
    offering: Option<Offering<F>>,
    /// The session by which each side of a channel is sent memory.
    inboxes: HashMap<(ChannelId, Side), SessionId>,
    log: LogBudget,
    tally: RequestCounts,
    events: EventQueues,
    /// Seconds since 1970 at the event under way.
    now: u64,
    actions: Vec<Action<F>>,
}

/// Channel ids and epochs of one instance; the next instance begins above them.
pub(crate) const IDS_PER_INSTANCE: u64 = 1 << 32;

impl<F: Descriptor> Core<F> {
    /// A broker that knows nobody. `instance` must exceed that of every broker before it by 2^32.
    pub fn new(policy: Arc<Policy>, instance: u64, capacity: Capacity) -> Self {
        Self {
            policy,
            capacity,
            instance,
            next_channel: instance + 1,
            next_epoch: instance + 1,
            next_domain: 1,
            next_service: 1,
            sessions: HashMap::new(),
            sessions_by_account: HashMap::new(),
            domains: BTreeMap::new(),
            services: BTreeMap::new(),
            channels: BTreeMap::new(),
            domain_ids: HashMap::new(),
            service_keys: HashMap::new(),
            regions: 0,
            sockets: Sockets::new(),
            machines: Machines::default(),
            groups: Groups::new(instance),
            directory: None,
            live_policy: None,
            offering: None,
            inboxes: HashMap::new(),
            log: LogBudget::default(),
            tally: RequestCounts::default(),
            events: EventQueues::default(),
            now: 0,
            actions: Vec::new(),
        }
    }

    /// Takes in one event at `now` (seconds since 1970) and says what to do about it.
    pub fn handle(&mut self, now: u64, event: CoreEvent<F>) -> Vec<Action<F>> {
        self.now = now;
        match event {
            CoreEvent::Opened { session, peer, program } => self.open(session, peer, program),
            CoreEvent::Message { session, request, message, descriptors, socket } => {
                self.message(session, request, message, descriptors, socket);
            }
            CoreEvent::Malformed { session, request, code, reason, fatal } => {
                if let Some(joined) = self.sessions.get(&session).map(|s| s.domain.is_some()) {
                    self.tally.refusal("malformed", code);
                    self.send(session, request, Message::Refused { code, reason });
                    if fatal || !joined {
                        self.dismiss(session);
                    }
                }
            }
            CoreEvent::Offered { channel, delivery } => self.offered(channel, delivery),
            CoreEvent::Closed { session, by_program } => self.end(session, by_program),
            CoreEvent::SocketGone { cookie } => self.socket_gone(cookie),
            CoreEvent::FlowLost { flow, side } => self.flow_lost(flow, side),
            CoreEvent::Tick => {
                self.log.report(now);
                self.tick();
            }
        }
        self.serve_followers();
        self.keep_books();
        std::mem::take(&mut self.actions)
    }

    /// Puts another policy in force. It judges every later request; a session that it would not let join is refused and ended.
    /// Channels that are open stay open: they are not the broker's.
    pub fn set_policy(&mut self, policy: Arc<Policy>) -> Vec<Action<F>> {
        let before = self.visibility();
        self.policy = policy;
        self.live_policy = None;
        self.publish_policy();
        self.show_again(&before);
        self.rejudge();
        let file = self.policy.file().map_or_else(String::new, |path| path.display().to_string());
        let happened = Happened { grounds: file, ..Happened::default() };
        self.record(EventKind::PolicyChanged, User::Host(0), 0, 0, happened);
        self.serve_followers();
        std::mem::take(&mut self.actions)
    }

    /// Whether one more line about what this user does may be logged; `None` if it is not known who it is.
    pub(crate) fn may_log(&mut self, user: impl Into<Option<User>>) -> bool {
        self.log.allows(user, self.now)
    }

    /// Counts a session that was refused outside of the core.
    pub(crate) fn count_refused_session(&mut self, code: Refusal) {
        self.tally.refusal("session", code);
    }

    /// The user of a session.
    pub(crate) fn user_of_session(&self, session: SessionId) -> Option<User> {
        self.sessions.get(&session).map(|session| session.peer.user)
    }

    /// How much there is of everything.
    pub fn status(&self) -> CoreStatus {
        CoreStatus {
            sessions: self.sessions.len(),
            domains: self.domains.len(),
            services: self.services.len(),
            channels: self.channels.len(),
        }
    }

    fn message(
        &mut self,
        id: SessionId,
        request: u32,
        message: Message,
        descriptors: Vec<F>,
        socket: Option<Result<SocketFacts, String>>,
    ) {
        let Some(session) = self.sessions.get(&id) else {
            // It was dismissed by an earlier packet of the same read.
            return;
        };
        let joined = session.domain.is_some();
        let name = message.name();
        self.tally.request(name);
        let wanted = (!self.events.is_idle()).then(|| AskedFor::of(&message)).flatten();
        let came = descriptors.len() + usize::from(socket.is_some());
        let answer = if message.fd_count() == came && message.brings_socket() == socket.is_some() {
            self.dispatch(id, request, message, descriptors, socket)
        } else {
            let due = message.fd_count();
            refuse(Refusal::Protocol, format!("{name} brings {due} descriptors, but {came} came"))
        };
        match answer {
            Ok(()) => {}
            Err(Refuse { code, reason, denied }) => {
                tracing::debug!(session = id.0, request = name, %code, reason, "refused");
                self.tally.refusal(name, code);
                match denied {
                    Some(denial) => self.note_denied(*denial),
                    None => self.note_refused(id, wanted, code, &reason),
                }
                self.send(id, request, Message::Refused { code, reason });
                // A session that failed to join may say nothing more (protocol C3).
                if !joined {
                    self.dismiss(id);
                }
            }
        }
    }

    fn dispatch(
        &mut self,
        id: SessionId,
        request: u32,
        message: Message,
        with: Vec<F>,
        socket: Option<Result<SocketFacts, String>>,
    ) -> Result<(), Refuse> {
        let origin = self.sessions.get(&id).map_or(Origin::Host, |session| session.peer.origin());
        // There is one exactly if the message brings one.
        let socket = || match socket {
            // What an agent says of namespaces is about its own machine's.
            Some(Ok(facts)) => Ok(SocketFacts { origin, trusted: facts.trusted && origin == Origin::Host, ..facts }),
            Some(Err(reason)) => refuse(Refusal::BadSocket, reason),
            None => refuse(Refusal::Protocol, "a socket is missing"),
        };
        match message {
            Message::Join { version, name } => self.join(id, request, version, &name),
            client if self.sessions.get(&id).is_none_or(|s| s.domain.is_none()) => {
                refuse(Refusal::Protocol, format!("the first message of a session is Join, not {}", client.name()))
            }
            Message::Bind { service, kind, backlog } => self.bind(id, request, &service, kind, backlog),
            Message::Connect { target, service, kind, directions, region } => {
                let shape = connect::Shape { kind, directions, region };
                let done = self.connect(id, request, &target, &service, shape, with);
                if done.is_err() {
                    self.give_place_back(id, region);
                }
                done
            }
            Message::Accepted { channel, start, region } => self.accepted(id, request, channel, start, region, with),
            Message::Grow { channel, side, generation, region } => {
                let growth = connect::Growth { channel, side, generation, region };
                self.grow(id, request, growth, with)
            }
            Message::TakeRegions { channel, side, kind, count, bytes } => {
                let allowance = further::TakenKind { count, bytes };
                self.take_regions(id, request, (channel, side), kind, allowance)
            }
            Message::AddRegion { channel, side, number, kind, region } => {
                let addition = further::Addition { channel, side, number, kind, region };
                self.add_region(id, request, addition, with)
            }
            Message::ReclaimRegion { channel, side, own, number, kind, bytes } => {
                let (key, region) = (further::FurtherKey { own, number }, further::FurtherRegion { kind, bytes });
                self.reclaim_region(id, request, (channel, side), key, region)
            }
            Message::DropRegion { channel, side, own, number } => {
                self.drop_region(id, (channel, side), further::FurtherKey { own, number })
            }
            Message::Closed { channel } => self.closed(id, channel),
            Message::List { what, after } => self.list(id, request, what, after),
            Message::Inspect { channel } => self.inspect(id, request, channel),
            Message::Room { channel, size, peer } => self.room(id, request, channel, size, &peer),
            Message::AddMachine { room, migratable, name, monitor, port } => {
                let name = refuse::name(&name)?;
                self.order(id, request, Order::Add { name, monitor, port, room, migratable })
            }
            Message::ReleaseMachine { name } => {
                let name = refuse::name(&name)?;
                self.order(id, request, Order::Release { name })
            }
            Message::ResumeMachine { name } => {
                let name = refuse::name(&name)?;
                self.order(id, request, Order::Resume { name })
            }
            Message::RemoveMachine { name } => {
                let name = refuse::name(&name)?;
                self.order(id, request, Order::Remove { name })
            }
            Message::ReclaimSocket { .. } | Message::OfferDatagrams { .. } | Message::TakeDatagrams { .. }
                if self.is_in_machine(id) =>
            {
                let name = message.name();
                refuse(Refusal::Machine, format!("{name} is for programs of the host"))
            }
            Message::JoinGroup { room, group, .. } => self.join_group(id, request, room, &group, with),
            Message::FetchSeat { key } => self.fetch_seat(id, request, key),
            Message::GroupWindow { member } => self.group_window(id, request, member),
            Message::LetGo { key } => {
                self.let_go(id, key);
                Ok(())
            }
            Message::Ping {} => {
                self.send(id, request, Message::Done {});
                Ok(())
            }
            Message::Reclaim { channel, side, peer, service, kind, directions, region } => {
                let shape = connect::Shape { kind, directions, region };
                self.reclaim(id, request, reclaim::ChannelClaim { channel, side, peer, service, shape }, with)
            }
            Message::Directory {} => self.directory(id, request),
            Message::Publish { addresses } => self.publish(id, request, &addresses.0, &socket()?),
            Message::Withdraw { key } => self.withdraw(id, request, key),
            Message::Offer { region } => {
                let socket = socket()?;
                let done = self.may_move(id).and_then(|()| self.offer(id, request, region, socket, with));
                if done.is_err() {
                    self.give_place_back(id, region);
                }
                done
            }
            Message::Cancel { offer } => self.cancel(id, request, offer),
            Message::Take { region } => {
                self.may_move(id)?;
                self.take(id, request, region, socket()?, with)
            }
            Message::Confirm { offer } => self.confirm(id, request, offer, socket()?),
            Message::Finish { offer } => self.finish(id, request, offer, socket()?),
            Message::ReclaimSocket { channel, side, region } => {
                self.reclaim_socket(id, request, (channel, side), region, socket()?, with)
            }
            Message::OfferDatagrams { to_high, to_low, to_port, region } => {
                self.may_move(id)?;
                let to = at(to_high, to_low, to_port);
                self.offer_datagrams(id, request, to, region, socket()?, with)
            }
            Message::TakeDatagrams { from_high, from_low, from_port } => {
                self.may_move(id)?;
                self.take_datagrams(id, request, at(from_high, from_low, from_port), socket()?, with)
            }
            Message::FetchReceiver { flow } => self.fetch_receiver(id, request, flow),
            Message::SetMoveRules { reset, clauses, ring_size, spin_us } => {
                self.set_move_rules(id, request, reset, &clauses.0, ring_size, spin_us)
            }
            Message::GetMoveRules {} => {
                self.get_move_rules(id, request);
                Ok(())
            }
            Message::TestPolicy { question, own, user, gid, to_own, to_user, from, to, service } => {
                let asked = |own, user, gid| if own { AskedUser::Own } else { AskedUser::Other { user, gid } };
                let gid = (gid != u32::MAX).then_some(gid);
                let (of, to_user) = (asked(own, user, gid), asked(to_own, to_user, None));
                let asked = PolicyQuery { question, of, to: to_user, names: [from, to, service] };
                self.test_policy(id, request, &asked)
            }
            Message::FollowEvents { after } => self.follow_events(id, request, after),
            Message::Joined { .. }
            | Message::DirectoryIs { .. }
            | Message::Published { .. }
            | Message::Offered { .. }
            | Message::Bell { .. }
            | Message::PeerIs { .. }
            | Message::DatagramsTaken { .. }
            | Message::Receiver {}
            | Message::MoveRulesAre { .. }
            | Message::PolicyDecides { .. }
            | Message::Events { .. }
            | Message::RoomIs { .. }
            | Message::MachineAdded { .. }
            | Message::Machines { .. }
            | Message::GroupJoined { .. }
            | Message::GroupWindowIs { .. }
            | Message::SeatIs { .. }
            | Message::Groups { .. }
            | Message::Refused { .. }
            | Message::Done {}
            | Message::Connected { .. }
            | Message::Incoming { .. }
            | Message::Attached { .. }
            | Message::Ring { .. }
            | Message::RegionAdded { .. }
            | Message::Domains { .. }
            | Message::Services { .. }
            | Message::Channels { .. }
            | Message::Regions { .. } => {
                refuse(Refusal::Protocol, format!("{} is a message of the broker, not of a client", message.name()))
            }
        }
    }

    /// Answers a request of which [`Action::Order`] told.
    pub fn answer(&mut self, session: SessionId, request: u32, message: Message) -> Vec<Action<F>> {
        if self.sessions.contains_key(&session) {
            self.send(session, request, message);
        }
        std::mem::take(&mut self.actions)
    }

    fn is_in_machine(&self, id: SessionId) -> bool {
        self.sessions.get(&id).is_some_and(|s| s.peer.origin() != Origin::Host)
    }

    fn send(&mut self, session: SessionId, request: u32, message: Message) {
        self.send_with(session, request, message, Vec::new());
    }

    fn send_with(&mut self, session: SessionId, request: u32, message: Message, descriptors: Vec<F>) {
        self.actions.push(Action::Send { session, request, message, descriptors });
    }
}
