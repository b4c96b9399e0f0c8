//! Membership of a domain: joining the broker, requests to it, and rejoining after its restart.

use crate::arrivals::FurtherMail;
use crate::desk::{EndId, Mail, SessionDesk, Ticket};
use crate::memory::Place;
use crate::session::{BrokerSession, JoinedIdentity, default_broker_path, unexpected};
use crate::{Error, PeerInfo, Result};
use partywall_protocol::environment;
use partywall_protocol::wire::{
    ChannelRow, Directions, DomainRow, Kind, Message, Origin, RegionReference, ServiceRow, Side, What,
};
use partywall_region::Link;
use partywall_shm::layout::Geometry;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

/// Membership of a domain. It is cheap to clone, and ends when its last clone, listener and channel are dropped.
///
/// Any number of processes of one user can be members of a domain. Any thread may use it. In the child of a `fork` its
/// requests fail, and so does joining again: fork before the first join, or call `exec` in the child.
///
/// ```
/// use partywall::Domain;
///
/// # let broker = partywall_daemon::Broker::embedded()?;
/// # let web = Domain::builder().name("web").broker(broker.path()).join()?;
/// assert_eq!(web.name(), "web");
/// // The number is this domain's while it exists; the epoch tells it from an earlier domain of the same name.
/// let row = web.domains()?.into_iter().find(|row| row.id == web.id()).expect("this domain itself");
/// assert_eq!((row.name.as_str(), row.epoch), (web.name(), web.epoch()));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct Domain {
    inner: Arc<DomainInner>,
}

#[derive(Debug)]
struct DomainInner {
    path: PathBuf,
    desk: SessionDesk,
    identity: Mutex<JoinedIdentity>,
    name: String,
    /// Open channels, to be told of to a broker that has come again.
    channels: Mutex<HashMap<EndId, OpenChannel>>,
}

/// Another thread has dropped the end of a channel that a new broker was to hear of.
const DROPPED: Error = Error::Closed("this end has been dropped");

/// Another thread has claimed the end of a channel from this broker.
const CLAIMED: Error = Error::Closed("this end has been claimed");

/// An end that a new broker is to hear of.
#[derive(Debug)]
struct OpenChannel {
    claim: Arc<ReclaimRequest>,
    /// The number of the session by which the end was connected, or claimed last. `None` if that was another session than the domain's.
    session: Option<u64>,
}

/// The description of a channel that a new broker is sent.
#[derive(Debug)]
struct ReclaimRequest {
    message: Message,
    region: OwnedFd,
}

/// Makes a channel known as long as it lives.
#[derive(Debug)]
pub(crate) struct ChannelRegistration {
    domain: Arc<DomainInner>,
    end: EndId,
}

/// Options for joining a domain.
///
/// ```
/// use partywall::Domain;
///
/// let broker = partywall_daemon::Broker::embedded()?;
/// let web = Domain::builder().name("web").broker(broker.path()).join()?;
/// assert_eq!(web.broker_path(), broker.path());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Default)]
#[must_use]
pub struct DomainBuilder {
    name: Option<String>,
    broker: Option<PathBuf>,
}

impl DomainBuilder {
    /// The domain's name: 1 to 64 characters of `A-Z a-z 0-9 . _ -`, beginning with a letter or digit.
    ///
    /// Without it, `$PARTYWALL_DOMAIN`, or else the program's name and process id.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// The broker's socket. Without it, [`default_broker_path`](crate::default_broker_path).
    pub fn broker(mut self, path: impl Into<PathBuf>) -> Self {
        self.broker = Some(path.into());
        self
    }

    /// Joins. Blocks until the broker has answered, at most ten seconds.
    ///
    /// # Errors
    /// [`Error::BrokerAbsent`], or [`Error::Refused`] by policy or for the name.
    pub fn join(self) -> Result<Domain> {
        let path = self.broker.unwrap_or_else(default_broker_path);
        let name = self.name.unwrap_or_else(default_name);
        let (session, identity) = BrokerSession::join(&path, &name)?;
        let inner = Arc::new(DomainInner {
            path,
            desk: SessionDesk::new(session)?,
            name: identity.name.clone(),
            identity: Mutex::new(identity),
            channels: Mutex::default(),
        });
        DomainInner::watch_session(&inner)?;
        let domain = Domain { inner };
        let mut current = lock(&CURRENT);
        if current.upgrade().is_none() {
            *current = Arc::downgrade(&domain.inner);
        }
        Ok(domain)
    }
}

/// The domain that [`Domain::current`] gives: the first joined that still lives.
static CURRENT: Mutex<Weak<DomainInner>> = Mutex::new(Weak::new());

fn default_name() -> String {
    if let Some(name) = std::env::var(environment::DOMAIN).ok().filter(|n| !n.is_empty()) {
        return name;
    }
    let program = std::env::current_exe().ok().and_then(|p| p.file_stem().map(|s| s.to_string_lossy().into_owned()));
    let clean: String = program
        .unwrap_or_default()
        .chars()
        .filter(|c| c.is_ascii_alphanumeric() || *c == '_')
        .take(40)
        .skip_while(|c| *c == '_')
        .collect();
    format!("{}-{}", if clean.is_empty() { "program" } else { &clean }, std::process::id())
}

impl Domain {
    /// Joins a domain by the default broker.
    ///
    /// # Errors
    /// As [`DomainBuilder::join`].
    ///
    /// ```
    /// use partywall::Domain;
    ///
    /// # // A broker where programs look for one. Nothing else runs yet that could read the environment.
    /// # let folder = tempfile::tempdir()?;
    /// # let socket = folder.path().join("broker.sock");
    /// # unsafe { std::env::set_var("PARTYWALL_BROKER", &socket) };
    /// # let broker = partywall_daemon::Broker::start(&partywall_daemon::Config::new(&socket))?;
    /// let web = Domain::join("web")?;
    /// assert_eq!(web.broker_path(), partywall::default_broker_path());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn join(name: &str) -> Result<Self> {
        Self::builder().name(name).join()
    }

    /// Options for joining; [`DomainBuilder::join`] joins.
    pub fn builder() -> DomainBuilder {
        DomainBuilder::default()
    }

    /// The first domain that this process has joined and not left. If there is none, joins under the default name, which blocks as
    /// [`DomainBuilder::join`].
    ///
    /// # Errors
    /// As [`DomainBuilder::join`].
    ///
    /// ```
    /// use partywall::Domain;
    ///
    /// # let broker = partywall_daemon::Broker::embedded()?;
    /// # let web = Domain::builder().name("web").broker(broker.path()).join()?;
    /// // Somewhere else in the same program:
    /// assert_eq!(Domain::current()?.name(), "web");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn current() -> Result<Self> {
        let current = lock(&CURRENT).upgrade();
        match current {
            Some(inner) => Ok(Self { inner }),
            None => Self::builder().join(),
        }
    }

    /// The name of the domain. In a virtual machine the broker may have put the machine's name before it.
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// The domain's id, unique while the domain exists.
    pub fn id(&self) -> u32 {
        lock(&self.inner.identity).domain
    }

    /// The domain's incarnation: greater each time that a domain of this name appears.
    pub fn epoch(&self) -> u64 {
        lock(&self.inner.identity).epoch
    }

    /// The broker's socket.
    pub fn broker_path(&self) -> &Path {
        &self.inner.path
    }

    /// Domains that the policy lets this domain see. Blocks until the broker has answered.
    ///
    /// # Errors
    /// [`Error::System`] if the broker is gone; [`Error::Refused`] by policy.
    pub fn domains(&self) -> Result<Vec<DomainRow>> {
        self.list(
            What::Domains,
            |m| match m {
                Message::Domains { page } => Ok((page.more, page.rows)),
                other => Err(unexpected(&other)),
            },
            |row| u64::from(row.id),
        )
    }

    /// Services of the domains that the policy lets this domain see. Blocks until the broker has answered.
    ///
    /// # Errors
    /// As [`Domain::domains`].
    ///
    /// ```
    /// use partywall::{Domain, Kind};
    ///
    /// # let broker = partywall_daemon::Broker::embedded()?;
    /// # let web = Domain::builder().name("web").broker(broker.path()).join()?;
    /// let _listener = web.bind("echo")?;
    /// let services = web.services()?;
    /// assert_eq!((services[0].name.as_str(), services[0].kind), ("echo", Kind::Stream));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn services(&self) -> Result<Vec<ServiceRow>> {
        self.list(
            What::Services,
            |m| match m {
                Message::Services { page } => Ok((page.more, page.rows)),
                other => Err(unexpected(&other)),
            },
            |row| row.key,
        )
    }

    /// Open channels that this domain may see. Blocks until the broker has answered.
    ///
    /// # Errors
    /// As [`Domain::domains`].
    ///
    /// ```
    /// use partywall::{Directions, Domain};
    ///
    /// # let broker = partywall_daemon::Broker::embedded()?;
    /// # let web = Domain::builder().name("web").broker(broker.path()).join()?;
    /// let _listener = web.bind("echo")?;
    /// let client = web.connect("web:echo")?;
    /// let channels = web.channels()?;
    /// assert_eq!(Some(channels[0].channel), client.channel_id());
    /// assert_eq!(channels[0].directions, Directions::BOTH);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn channels(&self) -> Result<Vec<ChannelRow>> {
        self.list(
            What::Channels,
            |m| match m {
                Message::Channels { page } => Ok((page.more, page.rows)),
                other => Err(unexpected(&other)),
            },
            |row| row.channel,
        )
    }

    pub(crate) fn list<T>(
        &self,
        what: What,
        rows_of: impl Fn(Message) -> Result<(bool, Vec<T>)>,
        key: impl Fn(&T) -> u64,
    ) -> Result<Vec<T>> {
        let mut all = Vec::new();
        let mut after = 0;
        loop {
            let (message, _) = self.request(&Message::List { what, after }, &[])?;
            let (more, rows) = rows_of(message)?;
            // A page that does not advance would cause endless requests.
            let last = rows.last().map(&key).filter(|last| *last > after);
            all.extend(rows);
            match last {
                Some(last) if more => after = last,
                _ => return Ok(all),
            }
        }
    }

    pub(crate) fn request(
        &self,
        message: &Message,
        fds: &[rustix::fd::BorrowedFd<'_>],
    ) -> Result<(Message, Vec<OwnedFd>)> {
        self.inner.desk.request(message, fds)
    }

    /// As [`SessionDesk::request_with_ticket`].
    pub(crate) fn request_with_ticket(
        &self,
        message: &Message,
        fds: &[rustix::fd::BorrowedFd<'_>],
    ) -> Result<(Ticket, (Message, Vec<OwnedFd>))> {
        self.inner.desk.request_with_ticket(message, fds)
    }

    /// Makes a request whose answer takes longer than the broker itself.
    pub(crate) fn request_within(&self, limit: Duration, message: &Message) -> Result<(Message, Vec<OwnedFd>)> {
        self.inner.desk.request_within(limit, message, &[])
    }

    pub(crate) fn max_ring(&self) -> u64 {
        lock(&self.inner.identity).max_ring
    }

    /// Gives up a connection that has come and was not accepted.
    pub(crate) fn close(&self, channel: u64) {
        self.inner.desk.close(channel);
    }

    /// Makes a request without waiting for its answer.
    pub(crate) fn ask(&self, message: &Message, fds: &[rustix::fd::BorrowedFd<'_>]) -> Result<Ticket> {
        self.inner.desk.ask(message, fds)
    }

    /// The answer to it, if it has come.
    pub(crate) fn answer(&self, ticket: Ticket) -> Option<Result<(Message, Vec<OwnedFd>)>> {
        self.inner.desk.answer(ticket)
    }

    /// As [`SessionDesk::ring_when_answered`].
    pub(crate) fn ring_when_answered(&self, ticket: Ticket, link: Link) -> bool {
        self.inner.desk.ring_when_answered(ticket, link)
    }

    /// As [`SessionDesk::forget_bell`].
    pub(crate) fn forget_bell(&self, ticket: Ticket) {
        self.inner.desk.forget_bell(ticket);
    }

    /// As [`SessionDesk::file_news`].
    pub(crate) fn file_news(&self) {
        self.inner.desk.file_news();
    }

    /// The session's socket, for as long as `with` runs.
    pub(crate) fn with_session<T>(&self, with: impl FnOnce(BorrowedFd<'_>) -> T) -> T {
        self.inner.desk.with_socket(with)
    }

    /// A further session of the same domain, for a listener.
    pub(crate) fn session(&self) -> Result<BrokerSession> {
        BrokerSession::join(&self.inner.path, &self.inner.name).map(|(session, _)| session)
    }

    /// Asks for a place in a window (protocol G4).
    pub(crate) fn room(&self, channel: u64, peer: &str, size: u64) -> Result<Place> {
        place(self.request(&Message::Room { channel, size, peer: peer.to_owned() }, &[])?)
    }

    /// Remembers a channel for the broker's restart, if its region is a memfd. One between machines ends with the broker, who
    /// carries its links. `connected` is the request by which this session has connected the channel. If the domain has another session since,
    /// this claims the channel from the new broker: the thread that has joined again may have listed the channels before.
    #[expect(clippy::too_many_arguments, reason = "the fields of one message")]
    pub(crate) fn register(
        &self,
        id: u64,
        side: Side,
        info: &PeerInfo,
        kind: Kind,
        directions: Directions,
        geometry: Geometry,
        region: Option<OwnedFd>,
        connected: Option<Ticket>,
    ) -> ChannelRegistration {
        let end = (id, side);
        self.inner.desk.open(end);
        let registration = ChannelRegistration { domain: Arc::clone(&self.inner), end };
        let Some(region) = region else { return registration };
        let message = Message::Reclaim {
            channel: id,
            side,
            peer: info.name.clone(),
            service: info.service.clone(),
            kind,
            directions,
            region: RegionReference::own_memory(geometry),
        };
        let claim = Arc::new(ReclaimRequest { message, region });
        let open = OpenChannel { claim: Arc::clone(&claim), session: connected.map(Ticket::session) };
        lock(&self.inner.channels).insert(end, open);
        // Looked at after the channel is in the list. A session that replaces the present one later is followed by another look at the list.
        if connected.is_some_and(|ticket| !self.inner.desk.is_current(ticket)) {
            self.inner.reclaim(vec![(end, claim)]);
        }
        registration
    }
}

/// The place that an answer gives.
pub(crate) fn place((answer, fds): (Message, Vec<OwnedFd>)) -> Result<Place> {
    match answer {
        Message::RoomIs { base, .. } => match fds.into_iter().next() {
            Some(memory) if base != 0 => Ok(Place { memory, base }),
            _ => Err(Error::BrokerConfused("a place without a window".into())),
        },
        other => Err(unexpected(&other)),
    }
}

impl ChannelRegistration {
    /// In a virtual machine, waits until everything is there that the broker had sent to this process before: it comes by way of the
    /// machine's port, and what the peer writes into shared memory may overtake it (protocol F3.3).
    pub(crate) fn catch_up(&self) -> Result<()> {
        match lock(&self.domain.identity).origin {
            Origin::Host => Ok(()),
            Origin::Machine(_) => self.settle(),
        }
    }

    /// Waits until the broker has heard all that this process has told it before.
    pub(crate) fn settle(&self) -> Result<()> {
        self.request(&Message::Ping {}, &[]).map(drop)
    }

    /// Asks for a further place in the window to the peer (protocol G4), and waits for the answer.
    pub(crate) fn room(&self, peer: &str, size: u64) -> Result<Place> {
        let message = Message::Room { channel: self.end.0, size, peer: peer.to_owned() };
        place(self.domain.desk.request(&message, &[])?)
    }

    /// Asks for one, and does not wait.
    pub(crate) fn ask_room(&self, peer: &str, size: u64) -> Result<Ticket> {
        self.domain.desk.ask(&Message::Room { channel: self.end.0, size, peer: peer.to_owned() }, &[])
    }

    /// Has the broker pass a ring on to the peer (protocol A2). Does not wait.
    pub(crate) fn ask_grow(&self, generation: u32, geometry: Geometry, memory: &OwnedFd) -> Result<Ticket> {
        let (channel, side) = self.end;
        let region = RegionReference::own_memory(geometry);
        let message = Message::Grow { channel, side, generation, region };
        self.domain.desk.ask(&message, &[memory.as_fd()])
    }

    /// The answer to either, if it has come.
    pub(crate) fn answer(&self, ticket: Ticket) -> Option<Result<(Message, Vec<OwnedFd>)>> {
        self.domain.desk.answer(ticket)
    }

    /// The answer to a request is not waited for any more.
    pub(crate) fn give_up(&self, ticket: Ticket) {
        self.domain.desk.forget(ticket);
    }

    /// The channel and the side of this end.
    pub(crate) fn end(&self) -> EndId {
        self.end
    }

    /// Makes a request about the channel, and waits for its answer.
    pub(crate) fn request(&self, message: &Message, fds: &[rustix::fd::BorrowedFd<'_>]) -> Result<Message> {
        self.domain.desk.request(message, fds).map(|(answer, _)| answer)
    }

    /// Makes a request about the channel, and waits for its answer. The ticket says which session has answered.
    pub(crate) fn request_with_ticket(
        &self,
        message: &Message,
        fds: &[rustix::fd::BorrowedFd<'_>],
    ) -> Result<(Ticket, Message)> {
        self.domain.desk.request_with_ticket(message, fds).map(|(ticket, (answer, _))| (ticket, answer))
    }

    /// Whether the broker of that session is the present one.
    pub(crate) fn is_current(&self, ticket: Ticket) -> bool {
        self.domain.desk.is_current(ticket)
    }

    /// Sends a message about the channel that has no answer.
    pub(crate) fn tell(&self, message: Message) {
        self.domain.desk.tell(message);
    }

    /// The further regions that the peer has added, and what this end takes.
    pub(crate) fn further<T>(&self, with: impl FnOnce(&mut FurtherMail) -> T) -> Option<T> {
        self.domain.desk.further(self.end, with)
    }

    /// The peer's region, if it has come.
    pub(crate) fn region(&self) -> Mail {
        self.domain.desk.region(self.end)
    }

    /// The peer's next ring, if it has come.
    pub(crate) fn ring(&self) -> Mail {
        self.domain.desk.ring(self.end)
    }
}

impl Drop for ChannelRegistration {
    fn drop(&mut self) {
        lock(&self.domain.channels).remove(&self.end);
        self.domain.desk.shut(self.end);
        // If there is no broker, the next one gets the message: it may have the channel already, from the other side or by a listener that was
        // faster than this session.
        self.domain.desk.close(self.end.0);
    }
}

impl DomainInner {
    /// Has the keeper rejoin when the broker goes (protocol C9), and send what the broker's socket had no room for.
    fn watch_session(this: &Arc<Self>) -> Result<()> {
        let (weak, speaker) = (Arc::downgrade(this), Arc::downgrade(this));
        let ended = move || {
            // This runs on another thread, because the keeper must go on watching links.
            let rejoin = std::thread::Builder::new().name("partywall-rejoin".into()).spawn(move || Self::rejoin(&weak));
            if let Err(e) = rejoin {
                tracing::warn!(error = %e, "the broker is gone and no thread can be had to wait for it");
            }
        };
        let room = move || {
            if let Some(this) = speaker.upgrade() {
                this.desk.tell_untold();
            }
        };
        this.desk.watch_session(ended, room)
    }

    /// Tries until a broker is there or the domain is dropped.
    fn rejoin(weak: &Weak<Self>) {
        let mut pause = Duration::from_millis(10);
        loop {
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_secs(1));
            let Some(this) = weak.upgrade() else { return };
            match this.rejoin_once() {
                Ok(()) => match Self::watch_session(&this) {
                    Ok(()) => return,
                    Err(e) => tracing::warn!(error = %e, "cannot watch the new session"),
                },
                Err(e) => tracing::debug!(domain = this.name, error = %e, "no broker yet"),
            }
        }
    }

    fn rejoin_once(&self) -> Result<()> {
        let (session, identity) = BrokerSession::join(&self.path, &self.name)?;
        // Before the broker hears of a channel: from then on the other side may send a ring and use it at once, and a reader looks
        // for it in the session in use.
        self.desk.replace(session);
        *lock(&self.identity) = identity;
        self.reclaim(self.claims());
        tracing::info!(domain = self.name, "joined the broker again");
        Ok(())
    }

    /// What a new broker is to hear of the channels.
    fn claims(&self) -> Vec<(EndId, Arc<ReclaimRequest>)> {
        lock(&self.channels).iter().map(|(end, open)| (*end, Arc::clone(&open.claim))).collect()
    }

    /// Claims the ends of channels from a new broker (protocol C9). No lock is held while the broker answers: a channel that is dropped at the same
    /// time must not wait for that.
    fn reclaim(&self, claims: Vec<(EndId, Arc<ReclaimRequest>)>) {
        let mut reclaimed = Vec::with_capacity(claims.len());
        for (end, claim) in claims {
            match self.claim(end, &claim) {
                Ok(()) => reclaimed.push(end),
                Err(Error::Closed(_)) => {}
                // The channel itself does not depend on it.
                Err(e) => tracing::warn!(domain = self.name, error = %e, "the new broker did not take a channel"),
            }
        }
        // A channel may have 2048 regions, and each is a request that waits for its answer. No other channel waits for that.
        for end in reclaimed {
            self.reclaim_regions(end);
        }
    }

    /// Claims an end, unless the end has been dropped, or has been claimed from this broker.
    fn claim(&self, end: EndId, claim: &ReclaimRequest) -> Result<()> {
        let claim_if_held = || {
            // Under the lock, so that the `Closed` of a thread that drops the end comes after the claim. Before it, it would leave the end
            // in the broker for ever.
            let mut channels = lock(&self.channels);
            let open = channels.get_mut(&end).ok_or(DROPPED)?;
            if open.session.is_some_and(|number| self.desk.is_session(number)) {
                return Err(CLAIMED);
            }
            let ticket = self.desk.ask(&claim.message, &[claim.region.as_fd()])?;
            open.session = Some(ticket.session());
            Ok(ticket)
        };
        self.desk.request_by(claim_if_held).map(drop)
    }

    /// Reports the further regions of an end to a new broker, and then what it takes (protocol F6).
    fn reclaim_regions(&self, end: EndId) {
        for (key, message) in self.desk.further(end, |further| further.reclaim_requests(end)).unwrap_or_default() {
            if let Err(e) = self.desk.request(&message, &[]) {
                tracing::warn!(domain = self.name, error = %e, "the new broker does not count a further region");
            }
            // Another thread may have given the region up before this request, when the broker did not know the region yet.
            if self.desk.further(end, |further| further.has(key)) == Some(false) {
                let ((channel, side), own, number) = (end, key.own, key.number);
                self.desk.tell(Message::DropRegion { channel, side, own, number });
            }
        }
        for message in self.desk.further(end, |further| further.take_requests(end)).unwrap_or_default() {
            if let Err(e) = self.desk.request(&message, &[]) {
                tracing::warn!(domain = self.name, error = %e, "the new broker does not pass on further regions");
            }
        }
    }
}

/// A thread that panicked while it held one of these locks left the value whole.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
