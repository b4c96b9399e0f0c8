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
//! here, and a refused request changes nothing. Descriptors are opaque ([`Descriptor`]): tests use counters, the event loop
//! uses real ones, and dropping one closes it. Each concept has its file:
//!
//! - `id` has the numbers by which records name one another, `happened` describes an event, and `refuse` a refusal;
//! - `action` defines the events and actions, and `dispatch` gives each message to the part that answers it;
//! - `session` opens and ends sessions, `join` makes domains of them, `domain` accounts for what a domain has;
//! - `service` binds, `connect` makes channels, `channel` keeps their two ends, `reclaim` takes them over from an earlier broker
//!   (protocol C9);
//! - `view` answers `List` and `Inspect` (C10), and `explain` reports what the policy would decide (C17);
//! - `further` passes on further regions, and `further_regions` accounts for those of an end (F); `region` proves what a client says of one;
//! - `machine` knows virtual machines, `pair_window` the places in a window between two, and `window_places` hands them out (protocol G);
//! - `cluster` reports this host's names to the gateway, and hands it connections to other hosts (H); `claim` is a request that waits for a name;
//! - `events` reports events to sessions that follow them (C18);
//! - `report` counts the work done, for metrics;
//! - `group` knows the members of groups, and hands out seats (protocol J);
//! - `networks` knows the network namespaces between which datagrams may go by rings (U13);
//! - `socket` keeps the directory, and matches the two ends of TCP connections (protocol T).

mod action;
mod channel;
mod claim;
mod cluster;
mod connect;
mod descriptor;
mod dispatch;
mod domain;
mod ended_handshakes;
mod events;
mod explain;
mod further;
mod further_regions;
mod group;
mod happened;
mod id;
#[cfg(any(test, feature = "invariants"))]
mod invariants;
mod join;
mod log;
mod machine;
mod networks;
mod pair_window;
mod reclaim;
mod refuse;
mod region;
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

use partywall_protocol::wire::{EventKind, Message, Name, Origin, Refusal, Side, User};

pub use action::{Action, CoreEvent, FlowSocket, OfferDelivery, Order};
pub use descriptor::Descriptor;
pub use group::Membership;
pub use id::SessionId;
pub use machine::MachineNews;
pub use networks::Networks;
pub(crate) use report::{CoreReport, DecisionKey};
pub use socket::{Identity, NamespaceId, Numbers, SocketFacts, SocketId, SocketState};

use crate::credentials::Account;
use crate::policy::{Policy, SocketRules};
use channel::Channel;
use cluster::Cluster;
use connect::Offering;
use domain::DomainRecord;
use events::EventQueues;
use group::Groups;
use happened::Happened;
use id::{ChannelId, DomainId, ServiceKey};
use log::LogBudget;
use machine::Machines;
use report::RequestCounts;
use service::Service;
use session::SessionRecord;
use socket::Sockets;

/// The capacity of the machine, so that the broker sheds load before the kernel does.
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
    /// The domains by name.
    domain_ids: HashMap<Name, DomainId>,
    service_keys: HashMap<(DomainId, Name), ServiceKey>,
    /// Region descriptors kept, over all channels.
    regions: usize,
    sockets: Sockets<F>,
    machines: Machines<F>,
    groups: Groups<F>,
    cluster: Cluster<F>,
    /// The directory's memory, for clients to map.
    directory: Option<F>,
    /// The rules that an administrator has set instead of the file's.
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
    /// All accounts are recomputed after each event.
    #[cfg(any(test, feature = "invariants"))]
    checked: bool,
}

/// Channel ids and epochs of one instance; the next instance begins above them.
pub(crate) const IDS_PER_INSTANCE: u64 = 1 << 32;

impl<F: Descriptor> Core<F> {
    /// A broker without sessions. `instance` must exceed that of every broker before it by 2^32.
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
            cluster: Cluster::new(instance),
            directory: None,
            live_policy: None,
            offering: None,
            inboxes: HashMap::new(),
            log: LogBudget::default(),
            tally: RequestCounts::default(),
            events: EventQueues::default(),
            now: 0,
            actions: Vec::new(),
            #[cfg(any(test, feature = "invariants"))]
            checked: cfg!(test),
        }
    }

    /// Takes in one event at `now` (seconds since 1970) and says what to do about it.
    pub fn handle(&mut self, now: u64, event: CoreEvent<F>) -> Vec<Action<F>> {
        self.now = now;
        #[cfg(any(test, feature = "invariants"))]
        let before = self.checked.then(|| self.accounts_before(&event));
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
            CoreEvent::Networks(networks) => self.set_networks(networks),
            CoreEvent::LookAtUntaken => self.look_at_untaken(),
            CoreEvent::Tick => {
                self.log.report(now);
                self.tick();
                self.tick_cluster();
                self.tick_waiting();
            }
        }
        self.serve_followers();
        self.serve_names();
        self.keep_books();
        let actions = std::mem::take(&mut self.actions);
        #[cfg(any(test, feature = "invariants"))]
        if let Some(before) = before {
            self.check_step(before, &actions);
        }
        actions
    }

    /// Has all accounts recomputed after each event from now on, and panics if one is wrong.
    #[cfg(feature = "invariants")]
    pub(crate) fn check_each_event(&mut self) {
        self.checked = true;
    }

    /// Puts another policy in force at `now` (seconds since 1970). It judges every later request; a session that it would not let join is
    /// refused and ended. Channels that are open stay open: they are not the broker's.
    pub fn set_policy(&mut self, now: u64, policy: Arc<Policy>) -> Vec<Action<F>> {
        self.now = now;
        let before = self.visibility();
        self.policy = policy;
        self.live_policy = None;
        self.publish_policy();
        self.show_again(&before);
        self.rejudge();
        self.rejudge_follower();
        self.list_forwarded_again();
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
