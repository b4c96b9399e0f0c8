//! The event loop around the core: sockets, descriptors and epoll, and no decisions.
//!
//! ```text
//!            +----------------------- Server::turn ------------------------+
//!   epoll -->| listener: accept, by user in turn    -> Opened              |
//!            | readers:  packet, decode -> Message | Malformed --> Core -->| send, offer, close
//!            | readers:  gone, hung  -> Closed                             |
//!            | control:  stop, policy                                      |
//!            +-------------------------------------------------------------+
//! ```
//!
//! One thread, which blocks only in `epoll_wait`. It never receives, queries or closes a descriptor that a client made: the processes of
//! [`readers`] do. It takes a session's first packet itself if no descriptor comes with it, so a client that joins waits for no reader.
//! A session costs a map entry here and its accounts in the core. Messages in transit to a client lie only in the kernel's buffer of its
//! socket, which is limited to 256 KiB (protocol C12): an answer that does not fit ends the session.
//!
//! A turn does a bounded piece of work for each user, so a user who floods the broker delays another by that piece and no more:
//! [`BURST`] packets, and as many new sessions. No user takes more than a share of the loop's time ([`shares`]). New sessions of all
//! users come by one queue, the kernel's. The loop takes a bounded number of connections out of that queue in each turn, and begins
//! sessions by user in turn ([`turns`]).

mod accept;
mod allowance;
mod charge;
mod containers;
mod descriptor;
mod home;
mod judge;
mod limits;
mod machine_sockets;
mod machine_turns;
mod namespaces;
mod perform;
mod published;
mod readers;
mod receive;
mod shares;
mod socket;
#[cfg(test)]
mod tests;
mod turns;
mod urgency;
mod watch;

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use partywall_protocol::directory::{DirectoryChange, Transport};
use partywall_protocol::wire::{self, MachineId, Origin, Side};
use partywall_region::directory::OwnDirectory;
use partywall_region::inspect::receivers::coarse_now;
use rustix::event::epoll::{self, EventData, EventFlags};

use crate::config::Config;
use crate::control::{Errand, ErrandPlace, ServerControl};
use crate::core::{Core, CoreEvent, CoreStatus, FlowSocket, MachineNews, SessionId, SocketFacts};
use crate::credentials::Account;
use crate::machines::{Attendant, GroupWindows, Task, state};
use crate::metrics::Exporter;
use crate::policy::{MetricsAddress, NetworkEntry, PolicyError};
use accept::{Arrival, Door, Gate, Listeners};
use containers::ContainerSocket;
use descriptor::ClientDescriptor;
use machine_sockets::{Answered, FlowDate, MachineSockets};
use machine_turns::{MachineTurns, machine_of};
use namespaces::ListedNamespaces;
use published::Published;
use readers::{LATE, MAX_REPORT, ReaderEvent, Readers};
use shares::{Shares, Stopwatch};
use socket::{BACKLOG, ServedSocket};
use turns::Turns;
use urgency::LoopUrgency;
use watch::FlowWatch;

/// Packets handled of one user, and sessions begun for it, before the others get their turn.
const BURST: usize = 4;

/// How often the core hears of the time.
const TICK: Duration = Duration::from_secs(1);
/// The time after which an offer counts as not taken at once, within a factor of two ([`CoreEvent::LookAtUntaken`]).
const UNTAKEN: Duration = Duration::from_millis(50);

/// The epoll data of the listening socket, the control bell and the notices of destroyed sockets; sessions count up from
/// [`FIRST_SESSION`].
const LISTENER: u64 = 0;
const CONTROL: u64 = 1;
const NOTICES: u64 = 2;
/// The listening socket for containers.
const CONTAINERS: u64 = 3;
const FIRST_SESSION: u64 = 4;

/// Why a broker does not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// Another broker serves the path.
    #[error("another broker serves {}; stop it first, or choose another socket path", path.display())]
    Running {
        /// The path of the socket.
        path: PathBuf,
    },
    /// There is something else at the path, which is not ours to remove.
    #[error("{} exists and is not a socket; remove it, or choose another socket path", path.display())]
    NotASocket {
        /// The path of the other file.
        path: PathBuf,
    },
    /// The system refuses the socket or its lock.
    #[error("cannot {doing} {}: {source}", path.display())]
    Socket {
        /// The operation that failed.
        doing: &'static str,
        /// The path of the socket.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The policy cannot be used.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// The system refuses the memory of the directory.
    #[error("cannot make the directory: {0}")]
    Directory(#[from] partywall_region::RegionError),
    /// The system refuses the memory of the groups' members.
    #[error("cannot make the windows of groups: {0}")]
    Groups(partywall_region::RegionError),
    /// Metrics cannot be served where they are wanted.
    #[error(
        "cannot serve metrics at {address}: {source}; choose another address or path with --metrics, or in [metrics] of the policy; \
         a service needs a unit that permits a network (`systemctl edit partywalld`: PrivateNetwork=no, RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6)"
    )]
    Metrics {
        /// The address that metrics were to be served at.
        address: MetricsAddress,
        /// What the system said.
        source: io::Error,
    },
    /// The system refuses something else.
    #[error("cannot set up the broker: {0}")]
    System(#[from] io::Error),
}

/// A broker that serves its socket while [`run`](Self::run) runs, and removes it when it is dropped.
#[derive(Debug)]
pub struct Server {
    epoll: OwnedFd,
    socket: ServedSocket,
    /// Its socket for containers, if there is a folder for it.
    containers: Option<ContainerSocket>,
    control: ServerControl,
    gate: Gate,
    /// Connections that were accepted and are no sessions yet.
    arrivals: Turns<Account, Arrival>,
    shares: Shares,
    urgency: LoopUrgency,
    core: Core<ClientDescriptor>,
    directory: Published,
    /// Those of machines, in their windows from the host.
    machine_directories: BTreeMap<MachineId, Published>,
    /// The sockets of flows of datagrams.
    watch: FlowWatch,
    /// Those of them that are in virtual machines.
    machine_sockets: MachineSockets,
    /// Network namespaces between which datagrams may go by rings.
    namespaces: ListedNamespaces,
    /// When the core is to hear of the time, while it wants to.
    next_tick: Option<Instant>,
    next_emptying: Option<Instant>,
    next_look_at_untaken: Option<Instant>,
    /// When agents are to be asked again that have not said which namespace they are in, while there are any.
    next_question: Option<Instant>,
    sessions: HashMap<SessionId, SessionSocket>,
    machine_turns: MachineTurns,
    /// The time of all reports of rings so far, which was charged to the machines whose agents sent them.
    rings_time: Duration,
    /// Errands of machines that had used up their shares. They are done, and count as waiting until the next period.
    unpaid_errands: Vec<ErrandPlace>,
    /// Dropped after the sessions, whose sockets they close last.
    readers: Readers,
    next_session: u64,
    /// How often a reader has said that it has nothing left; tests wait for that.
    synced: usize,
    /// Where packets are built and received; one of each does, because nothing is queued.
    outgoing: Vec<u8>,
    /// The last number that was given to a packet for a program of a machine.
    sent_to_machines: u64,
    incoming: Vec<u8>,
    running: bool,
    /// The thread that attends to virtual machines, once there are any.
    attendant: Option<Attendant>,
    /// How long a virtual machine may send nothing before it counts as hung.
    silence: Duration,
    /// The metrics server, if there is one.
    exporter: Option<Exporter>,
}

impl Server {
    /// Starts to serve `config.socket`. Clients can connect at once, and are answered once [`run`](Self::run) runs.
    ///
    /// # Errors
    /// [`StartError`] says what is in the way.
    pub fn open(config: &Config) -> Result<Self, StartError> {
        let policy = config.policy()?;
        policy.log_warnings();
        // Before there is anything that its process should not have.
        let readers = Readers::start(config.number_record.clone())?;
        let entries = policy.machines().to_vec();
        let groups = policy.groups().to_vec();
        let networks = policy.networks().to_vec();
        let metrics = config.metrics.as_ref().or(policy.metrics()).cloned();
        limits::raise();
        let socket = ServedSocket::serve(&config.socket, config.socket_mode, now())?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(io::Error::from)?;
        limits::make_table(&epoll);
        let control = ServerControl::new()?;
        epoll::add(&epoll, &control, EventData::new_u64(CONTROL), EventFlags::IN).map_err(io::Error::from)?;
        let containers = ContainerSocket::serve(socket.path(), config.socket_mode, BACKLOG);
        let gate = Gate::open(epoll.as_fd(), listeners(&socket, containers.as_ref()))?;
        let readers = readers.watched_by(epoll.as_fd())?;
        let watch = FlowWatch::open();
        let namespaces = ListedNamespaces::new(watch.own());
        let capacity = limits::capacity();
        let core = Core::new(Arc::new(policy), socket.instance(), capacity);
        let (directory, handle) = OwnDirectory::create()?;
        let directory = Published::begin(directory, socket.instance());
        let mut this = Self {
            epoll,
            socket,
            containers,
            control,
            gate,
            arrivals: Turns::new(capacity.sessions.min(accept::MOST_ARRIVALS)),
            shares: Shares::new(Instant::now()),
            urgency: LoopUrgency::default(),
            core,
            directory,
            machine_directories: BTreeMap::new(),
            watch,
            machine_sockets: MachineSockets::default(),
            namespaces,
            next_tick: None,
            next_emptying: None,
            next_look_at_untaken: None,
            next_question: None,
            sessions: HashMap::new(),
            machine_turns: MachineTurns::default(),
            rings_time: Duration::ZERO,
            unpaid_errands: Vec::new(),
            readers,
            synced: 0,
            next_session: FIRST_SESSION,
            outgoing: Vec::with_capacity(wire::MAX_PACKET),
            sent_to_machines: 0,
            incoming: vec![0; MAX_REPORT],
            running: true,
            attendant: None,
            silence: config.machine_silence,
            exporter: None,
        };
        let (windows, news) = GroupWindows::open(&groups, &entries, this.socket.path()).map_err(StartError::Groups)?;
        this.core.set_groups(&groups);
        for news in news {
            this.core.machine_news(now(), news.map(ClientDescriptor::from));
        }
        if windows.has_machines() {
            this.attend_machines(Task::Groups(windows))?;
        }
        for entry in entries {
            this.attend_machines(Task::Entry(entry))?;
        }
        if state::is_there(this.socket.path()) {
            this.attend_machines(Task::Remembered)?;
        }
        let actions = this.core.set_directory(handle.into());
        this.perform(actions);
        this.set_networks(&networks);
        if let Some(address) = metrics {
            match Exporter::start(&address, this.control()) {
                Ok(exporter) => this.exporter = Some(exporter),
                Err(source) if config.metrics.is_some() => return Err(StartError::Metrics { address, source }),
                // Connections matter more than their graphs, so a line in the policy does not keep the broker from them.
                Err(source) => {
                    tracing::error!("{}; the broker serves without", StartError::Metrics { address, source })
                }
            }
        }
        Ok(this)
    }

    /// The port at which metrics are served, if they are served at a port.
    pub fn metrics_port(&self) -> Option<SocketAddr> {
        self.exporter.as_ref().and_then(Exporter::port)
    }

    /// The socket that it serves.
    pub fn path(&self) -> &Path {
        self.socket.path()
    }

    /// A handle for other threads.
    pub fn control(&self) -> ServerControl {
        self.control.clone()
    }

    /// Serves as [`run`](Self::run) does, on the calling thread before all ordinary programs where the system permits that (protocol C16.6).
    ///
    /// # Errors
    /// As `run`.
    pub fn run_urgently(&mut self, observer: impl FnMut(CoreStatus)) -> io::Result<()> {
        self.urgency = LoopUrgency::begin();
        self.run(observer)
    }

    /// Serves until [`ServerControl::stop`]. Tells `observer` whenever the numbers have changed.
    ///
    /// # Errors
    /// Only if `epoll_wait` fails, which it does not.
    pub fn run(&mut self, mut observer: impl FnMut(CoreStatus)) -> io::Result<()> {
        let mut known = None;
        while self.running {
            self.turn(None)?;
            let status = self.core.status();
            if known != Some(status) {
                known = Some(status);
                self.control.set_status(status);
                observer(status);
            }
        }
        Ok(())
    }

    /// Waits for events, at most so long, and handles them.
    fn turn(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        let next = [self.next_tick, self.next_look_at_untaken, self.next_question, self.next_emptying];
        let tick = next.into_iter().flatten().min();
        let tick = tick.map(|at| at.saturating_duration_since(Instant::now()));
        let arrivals = self.arrivals.has_any(|account| self.may_begin(*account)).then_some(Duration::ZERO);
        let shares = self.shares.renews_in(Instant::now());
        let timeout =
            [self.gate.reopens_in(), self.watch.due_in(), tick, timeout, arrivals, shares].into_iter().flatten().min();
        let timeout = timeout.map(|t| t.try_into()).transpose().map_err(io::Error::other)?;
        let mut room = [MaybeUninit::uninit(); 64];
        let events = match epoll::wait(&self.epoll, &mut room, timeout.as_ref()) {
            Ok((events, _)) => events,
            Err(rustix::io::Errno::INTR) => return Ok(()),
            Err(e) => return Err(e.into()),
        };
        self.urgency.look();
        self.gate.reopen(self.epoll.as_fd(), listeners(&self.socket, self.containers.as_ref()));
        if self.shares.renew(Instant::now()) {
            self.hear_all_users();
        }
        for event in events.iter() {
            // The event is packed; its fields are copied out before use.
            let (data, flags) = (event.data, event.flags);
            match (data.u64(), ReaderEvent::of(data.u64())) {
                (LISTENER, _) => self.accept(Door::Host),
                (CONTAINERS, _) => self.accept(Door::Containers),
                (CONTROL, _) => self.obey(),
                (NOTICES, _) => self.hear_of_sockets(),
                (_, Some(token)) => self.attend_readers(token, flags),
                (data, None) => machine_of(data).into_iter().for_each(|machine| self.attend_machine(machine)),
            }
        }
        self.admit_arrivals();
        self.look_at_flows();
        self.ask_silent_agents();
        self.tell_time();
        self.close_left_sockets();
        Ok(())
    }

    /// Whether a user's next session may begin now.
    fn may_begin(&self, account: Account) -> bool {
        !self.shares.is_used_up(account) && !self.readers.is_clogged_by(Some(account))
    }

    /// A new period has begun: users who had used up their shares are served again.
    fn hear_all_users(&mut self) {
        self.readers.listen_to_all();
        self.machine_turns.listen_to_all(self.epoll.as_fd());
        self.unpaid_errands.clear();
    }

    /// Ends the flows of sockets that the kernel has closed.
    fn hear_of_sockets(&mut self) {
        for cookie in self.watch.destroyed() {
            self.feed(CoreEvent::SocketGone { cookie });
        }
    }

    /// If it is time, ends the flows whose sockets have lost their addresses, and dates the proof of the others.
    fn look_at_flows(&mut self) {
        if self.watch.due_in() == Some(Duration::ZERO) {
            self.follow_networks();
        }
        let Some((lost, proved_at)) = self.watch.look() else { return };
        for (flow, side) in lost {
            self.feed(CoreEvent::FlowLost { flow, side });
        }
        self.directory.apply(&DirectoryChange::Proved(proved_at));
        self.machine_sockets.found_here(proved_at);
        for (flow, side) in self.machine_sockets.late(proved_at) {
            self.feed(CoreEvent::FlowLost { flow, side });
        }
        self.machine_sockets.ask(&[], coarse_now());
    }

    /// Asks the agents of machines for their network namespaces, as far as these are not known.
    fn ask_for_namespaces(&mut self) {
        let unknown = self.namespaces.unknown_machines();
        if !unknown.is_empty() {
            self.machine_sockets.ask(&unknown, coarse_now());
        }
    }

    /// Asks agents again that have greeted and have not said which network namespace they are in. A question to an agent that has just ended is
    /// lost, and the next agent is not always news (protocol U14.18).
    fn ask_silent_agents(&mut self) {
        let silent = self.namespaces.silent_agents();
        if silent.is_empty() {
            self.next_question = None;
            return;
        }
        let now = Instant::now();
        if self.next_question.is_some_and(|at| at <= now) {
            self.next_question = None;
            self.machine_sockets.ask(&silent, coarse_now());
        }
        self.next_question.get_or_insert(now + TICK);
    }

    /// The agent of a machine has answered a question about its sockets.
    fn hear_of_machine_sockets(&mut self, (machine, netns): (MachineId, u64), question: (u32, u64), receivers: &[u64]) {
        let asked = self.machine_sockets.answered((machine, netns), question, receivers, coarse_now());
        let Some(Answered { lost, proved }) = asked else { return };
        if self.namespaces.learn(machine, (netns != 0).then_some(netns)) {
            self.follow_networks();
        }
        for (flow, side) in lost {
            self.feed(CoreEvent::FlowLost { flow, side });
        }
        for FlowDate { flow, reader, at } in proved {
            let directory = match reader {
                Origin::Host => Some(&mut self.directory),
                Origin::Machine(machine) => self.machine_directories.get_mut(&machine),
            };
            if let Some(directory) = directory {
                directory.apply(&DirectoryChange::FlowProved { flow, at });
            }
        }
    }

    /// Takes the list of network namespaces of a policy.
    fn set_networks(&mut self, list: &[NetworkEntry]) {
        self.namespaces.set_list(list);
        let networks = self.namespaces.networks().clone();
        self.feed(CoreEvent::Networks(networks));
        self.ask_for_namespaces();
    }

    /// Reports to the core if the files of that list stand for other namespaces than before.
    fn follow_networks(&mut self) {
        if let Some(networks) = self.namespaces.follow().cloned() {
            self.feed(CoreEvent::Networks(networks));
        }
    }

    /// A program shows a socket. The core judges a UDP socket by the list of namespaces, which is to be the present one.
    fn look_before_judging(&mut self, socket: &SocketFacts) {
        if socket.transport == Transport::Udp {
            self.follow_networks();
        }
    }

    /// Begins to watch the sockets of a flow. Returns the side that has no socket any more, if there is one.
    fn watch(&mut self, flow: u64, sockets: [FlowSocket; 2]) -> Option<Side> {
        let now = coarse_now();
        for netns in sockets.iter().filter_map(FlowSocket::host_netns) {
            if self.watch.lacks(netns)
                && let Some(entered) = self.namespaces.enter(netns)
            {
                self.watch.take_in(entered);
            }
        }
        let lost = self.watch.add(flow, sockets);
        let crowded = self.machine_sockets.add(flow, sockets, now);
        self.watch.await_notices(|notices| {
            if let Err(error) = epoll::add(&self.epoll, notices, EventData::new_u64(NOTICES), EventFlags::IN) {
                tracing::warn!(%error, "the broker is not woken when sockets are closed; it finds out when it looks");
            }
        });
        if lost.is_none() && self.watch.is_first() {
            self.directory.apply(&DirectoryChange::Proved(now));
        }
        lost.or(crowded)
    }

    /// Passes ends of links and bells that the core has dropped, and in which there may be descriptors, to the closer, and replaces a closer that is late.
    fn close_left_sockets(&mut self) {
        let left = descriptor::take_left();
        if !left.is_empty() {
            left.into_iter().for_each(|socket| self.readers.close_made(socket));
            self.next_emptying.get_or_insert(Instant::now() + LATE);
        }
        if self.next_emptying.is_some_and(|at| at <= Instant::now()) {
            self.readers.empty_disposer();
            self.next_emptying = self.readers.has_ends_to_close().then(|| Instant::now() + LATE);
        }
    }

    /// Lets offers grow old, and has closed what was disposed of, while there is any of either.
    fn tell_time(&mut self) {
        if self.next_tick.is_some_and(|at| at <= Instant::now()) {
            self.next_tick = None;
            self.readers.empty_disposer();
            self.feed(CoreEvent::Tick);
        }
        if !self.core.wants_ticks() && !self.readers.has_waste() {
            self.next_tick = None;
        } else if self.next_tick.is_none() {
            self.next_tick = Some(Instant::now() + TICK);
        }
        if self.next_look_at_untaken.is_some_and(|at| at <= Instant::now()) {
            self.next_look_at_untaken = None;
            self.feed(CoreEvent::LookAtUntaken);
        }
        if !self.core.wants_look_at_untaken() {
            self.next_look_at_untaken = None;
        } else if self.next_look_at_untaken.is_none() {
            self.next_look_at_untaken = Some(Instant::now() + UNTAKEN);
        }
    }

    fn obey(&mut self) {
        let wishes = self.control.take_wishes();
        if let Some(policy) = wishes.policy {
            policy.log_warnings();
            let networks = policy.networks().to_vec();
            self.hear_of_rings();
            let actions = self.core.set_policy(now(), Arc::new(policy));
            self.perform(actions);
            self.set_networks(&networks);
        }
        for (errand, place) in wishes.errands {
            match place {
                Some(place) => self.do_errand_of_machine(errand, place),
                None => self.do_errand(errand),
            }
        }
        if wishes.report {
            self.control.set_report(self.core.report());
        }
        self.running &= !wishes.stop;
    }

    /// Does an errand of a machine's port at the expense of the machine (protocol C16.8).
    fn do_errand_of_machine(&mut self, errand: Errand, place: ErrandPlace) {
        let account = Account::of_machine(place.machine());
        let work = self.begin_work();
        self.do_errand(errand);
        self.charge_work(account, work);
        // The port hears its guest no more while many errands count.
        if self.shares.is_used_up(account) {
            self.unpaid_errands.push(place);
        }
    }

    fn do_errand(&mut self, errand: Errand) {
        match errand {
            Errand::Admit(socket, machine, pid) => {
                if let Err(error) = self.admit_as(socket, machine, pid) {
                    tracing::warn!(%error, "a session of a virtual machine could not be set up");
                }
            }
            Errand::News(news) => {
                self.namespaces.hear(&news);
                self.machine_sockets.hear(&news);
                let concerns_list =
                    matches!(news, MachineNews::Added { .. } | MachineNews::Removed { .. } | MachineNews::Up { .. });
                self.hear_of_rings();
                let actions = self.core.machine_news(now(), news.map(ClientDescriptor::from));
                self.perform(actions);
                if concerns_list {
                    self.follow_networks();
                    self.ask_for_namespaces();
                }
            }
            Errand::Port(machine, port) => self.machine_sockets.has_port(machine, port),
            Errand::Receivers { machine, number, netns, at, receivers } => {
                self.hear_of_machine_sockets((machine, netns), (number, at), &receivers);
            }
            Errand::Answer(session, request, message) => {
                let actions = self.core.answer(session, request, message);
                self.perform(actions);
            }
        }
    }

    /// Has something done about virtual machines.
    fn attend_machines(&mut self, task: Task) -> io::Result<()> {
        let attendant = match self.attendant.take() {
            Some(attendant) => attendant,
            None => Attendant::start(self.control.clone(), self.socket.path(), self.silence)?,
        };
        self.attendant.insert(attendant).tell(task)
    }

    /// Has the core recompute all accounts after each event.
    #[cfg(feature = "invariants")]
    pub(crate) fn check_each_event(&mut self) {
        self.core.check_each_event();
    }

    /// Gives an event to the core, and does what it says.
    fn feed(&mut self, event: CoreEvent<ClientDescriptor>) {
        self.hear_of_rings();
        let actions = self.core.handle(now(), event);
        self.perform(actions);
    }

    /// Tells the core what agents have said of rings. To be called before anything that may end a flow (protocol U15.10).
    fn hear_of_rings(&mut self) {
        // The reports of a machine lie together.
        for reports in self.control.ring_reports().take().chunk_by(|one, next| one.0 == next.0) {
            let watch = Stopwatch::start();
            for (machine, flow, tail) in reports {
                self.core.flow_written(*machine, *flow, *tail);
            }
            if let Some((machine, ..)) = reports.first() {
                let time = watch.elapsed();
                self.rings_time += time;
                self.charge(Account::of_machine(*machine), time);
            }
        }
    }
}

/// The sockets at which clients arrive.
fn listeners<'a>(socket: &'a ServedSocket, containers: Option<&'a ContainerSocket>) -> Listeners<'a> {
    [(Door::Host, Some(socket.as_fd())), (Door::Containers, containers.map(AsFd::as_fd))]
}

/// A session's socket. The broker sends by it, and is never the last to close it if a stranger made the other end.
#[derive(Debug)]
struct SessionSocket {
    socket: OwnedFd,
    read: ReadBy,
}

/// The reader of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ReadBy {
    /// The event loop: it is of a program in this virtual machine, and its other end is the broker's own.
    EventLoop(MachineId),
    /// The process that reads it.
    Reader(u32),
    /// No reader: it is about to be refused, or to get one.
    Nobody(Account),
}

impl SessionSocket {
    fn is_read_by(&self, reader: u32) -> bool {
        self.read == ReadBy::Reader(reader)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.control.end_reports();
        // Before the lock is given up: a broker that waits for it may want the same port.
        self.exporter = None;
        while let Some((_, arrival)) = self.arrivals.next(|_| true) {
            self.readers.dispose(Some(arrival.account()), arrival.socket);
        }
    }
}

/// Seconds since 1970.
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}
