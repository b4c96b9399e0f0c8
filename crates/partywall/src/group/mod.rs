//! Groups: buffers that all members read in place, at the same addresses, in processes and virtual machines (protocol J).
//!
//! Each handle has one token. A process that opens the handle holds the token until it drops the opened buffer or passes it on. A token has at
//! most one holder. Each process records its use of tokens in its own memory, where the owner reads it: the broker takes no part, and
//! no process writes another's memory. If the holder of a token dies, the broker reports that to the owner, and the token has ended.

mod buffer;
mod members;
mod part;
mod shared;
mod tokens;

use crate::domain::lock;
use crate::keeper::HangUpWatch;
use crate::session::{BrokerSession, unexpected};
use crate::{Domain, Error, Result};
use members::{Members, Missing};
use partywall_protocol::wire::{GroupRow, Message, Refusal, What};
use partywall_region::pmem::{OwnSeat, SeatMemory};
use partywall_shm::group::{CONTROL, SEATS, Serials, TokenClaim, TokenState as Claimed};
use partywall_shm::layout::PAGE;
use rustix::fd::{AsFd as _, OwnedFd};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError, Weak};
use tokens::Tokens;

pub use buffer::{Buffer, BufferPart, Lent};
pub use part::{BorrowedPart, MachineWindow};
/// A reference to a buffer and a token, for the process that is to open the buffer: plain bytes, or a line of text.
///
/// ```
/// use partywall::{BadHandle, Handle};
///
/// let handle = Handle { owner: 1 << 32, address: 1 << 40, len: 4096, serial: 1, place: 0, hop: 0 };
/// assert_eq!(Handle::from_bytes(&handle.to_bytes()), Ok(handle));
/// assert_eq!(handle.to_string().parse(), Ok(handle));
/// assert_eq!("something else".parse::<Handle>(), Err(BadHandle));
/// ```
pub use partywall_shm::group::{BadHandle, Handle};
pub use shared::Shared;

/// Participation of this process in a group. It is cheap to clone, and ends when its last clone, buffer and opened handle are dropped.
///
/// A process takes part in a group once, as the domain that it has joined as; in a virtual machine, as the machine.
///
/// ```
/// use partywall::{Domain, Group};
///
/// # let folder = tempfile::tempdir()?;
/// # let policy = folder.path().join("policy.toml");
/// # std::fs::write(&policy, "[[group]]\nname = 'pool'\ndomains = ['web']\nroom = '4M'\n")?;
/// # let config = partywall_daemon::Config::new(folder.path().join("broker.sock")).policy_file(policy);
/// # let broker = partywall_daemon::Broker::start(&config)?;
/// # let web = Domain::builder().name("web").broker(broker.path()).join()?;
/// let pool = Group::join(&web, "pool")?;
/// assert_eq!(pool.name(), "pool");
/// assert!(!pool.is_alone());
/// let free = pool.free();
///
/// let mut buffer = pool.alloc(4096)?;
/// buffer[..5].copy_from_slice(b"hello");
/// let lent = buffer.lend();
/// let handle = lent.handle()?; // Plain bytes: send them to another member by any stream or message.
/// assert!(!lent.is_free());
///
/// pool.release(&handle)?; // What the other member does when it has read the buffer.
/// drop(lent);
/// assert_eq!(pool.free(), free);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct Group {
    inner: Arc<GroupInner>,
}

/// Options for taking part in a group.
///
/// ```
/// use partywall::{Domain, Group};
///
/// # let folder = tempfile::tempdir()?;
/// # let policy = folder.path().join("policy.toml");
/// # std::fs::write(&policy, "[[group]]\nname = 'pool'\ndomains = ['web']\nroom = '4M'\n")?;
/// # let config = partywall_daemon::Config::new(folder.path().join("broker.sock")).policy_file(policy);
/// # let broker = partywall_daemon::Broker::start(&config)?;
/// # let web = Domain::builder().name("web").broker(broker.path()).join()?;
/// // This process only reads what others lend.
/// let pool = Group::builder("pool").room(0).join(&web)?;
/// assert_eq!(pool.free(), 0);
/// assert!(pool.alloc(1).is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
#[must_use]
pub struct GroupBuilder {
    name: String,
    room: u64,
}

#[derive(Debug)]
pub(crate) struct GroupInner {
    name: String,
    /// Locked before `state`, and alone by the thread that talks to the broker.
    session: Mutex<BrokerSession>,
    /// An event has come that was not handled yet.
    unheard: AtomicBool,
    /// The broker is gone.
    alone: AtomicBool,
    own: Arc<OwnSeat>,
    me: u64,
    /// This seat's place, by which others speak of its tokens.
    seat: usize,
    state: Mutex<GroupState>,
    watch: Mutex<Option<HangUpWatch>>,
}

#[derive(Debug)]
struct GroupState {
    members: Members,
    tokens: Tokens,
    /// Dead seats of which the broker was not told yet that this process is done with them, because it did not read.
    untold: VecDeque<u64>,
    /// The keeper looks for room in the session's socket.
    awaits_room: bool,
}

impl GroupState {
    fn new(members: Members, tokens: Tokens) -> Self {
        Self { members, tokens, untold: VecDeque::new(), awaits_room: false }
    }
}

impl GroupBuilder {
    /// The bytes of the member's memory that this process takes for its own buffers. With 0, it can only read the buffers of others. The default is a
    /// quarter of the member's memory.
    pub fn room(mut self, bytes: u64) -> Self {
        // A size of `u64::MAX` means a quarter on the wire, and no member can have that much.
        self.room = bytes.min(u64::MAX - 1);
        self
    }

    /// Takes part. Maps the windows of all members.
    ///
    /// # Errors
    /// [`Error::Refused`] if the domain (or machine) is no member, or its member has no room; [`Error::Memory`] if this process
    /// uses the group's addresses already.
    pub fn join(self, domain: &Domain) -> Result<Group> {
        let rows: Vec<GroupRow> = domain.groups()?.into_iter().filter(|row| row.group == self.name).collect();
        // Administrators see groups that they are no members of; those the broker refuses.
        let is_of_host = rows.iter().any(|row| row.member == domain.name()) && rows.iter().all(|row| !row.machine);
        let mut session = domain.session()?;
        let (seat, key, own, all) =
            if is_of_host { self.bring_seat(&mut session, &rows)? } else { self.take_seat(&mut session)? };
        let random = std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), key);
        let state = GroupState::new(all, Tokens::new(Serials::new(random)));
        let inner = Arc::new(GroupInner {
            name: self.name,
            session: Mutex::new(session),
            unheard: AtomicBool::new(true),
            alone: AtomicBool::new(false),
            own,
            me: key,
            seat: seat.into(),
            state: Mutex::new(state),
            watch: Mutex::default(),
        });
        GroupInner::watch_session(&inner)?;
        Ok(Group { inner })
    }

    /// Takes part with a seat that is a part of the member's window. Maps all windows.
    fn take_seat(&self, session: &mut BrokerSession) -> Result<Seated> {
        let joined = self.ask(session, self.room, None)?;
        let Joined { seat, key, member, members, base, size } = joined;
        let mut all = Members::new(members);
        let own = {
            let window = all.fetch(session, member)?;
            Arc::new(OwnSeat::take(&window.window, window.address, base, size, key)?)
        };
        all.add_own(member, &own);
        for other in (0..members).filter(|other| *other != member) {
            match all.map(session, other) {
                // It may come later.
                Err(Error::Refused { code: Refusal::Machine, .. }) => {}
                done => done?,
            }
        }
        Ok((seat, key, own, all))
    }

    /// Takes part with a seat that has separate memory: this process makes and seals it, so that it cannot take pages out of it while
    /// others read (protocol J3.7). The memory of others comes with what the broker says of them.
    fn bring_seat(&self, session: &mut BrokerSession, rows: &[GroupRow]) -> Result<Seated> {
        let whole = rows.iter().map(|row| row.size).min().unwrap_or(0);
        let all = Members::on_host(rows)?;
        let room = match self.room {
            u64::MAX => whole.saturating_sub(PAGE + SEATS as u64 * CONTROL) / 4,
            room if room > whole => {
                // The broker refuses a size that it has no room for, with the reason, before any memory is made.
                self.ask(session, room, None)?;
                return Err(Error::BrokerConfused("a seat that is larger than its window".into()));
            }
            room => room,
        };
        let (memory, fd) = SeatMemory::create(room)?;
        let Joined { seat, key, member, members, base, size } = self.ask(session, room, Some(&fd))?;
        match all.addresses(member) {
            Some(addresses) if usize::from(members) == rows.len() && size == memory.size() => {
                let own = Arc::new(OwnSeat::settle(memory, addresses, base, key)?);
                Ok((seat, key, own, all))
            }
            _ => Err(Error::BrokerConfused("a seat that is not as it was asked for".into())),
        }
    }

    fn ask(&self, session: &mut BrokerSession, room: u64, memory: Option<&OwnedFd>) -> Result<Joined> {
        let asked = Message::JoinGroup { room, memory: memory.is_some(), group: self.name.clone() };
        let fds: Vec<_> = memory.into_iter().map(|fd| fd.as_fd()).collect();
        match session.request(&asked, &fds)? {
            (Message::GroupJoined { key, seat, member, members, base, size }, _) => {
                Ok(Joined { seat, key, member, members, base, size })
            }
            (other, _) => Err(unexpected(&other)),
        }
    }
}

/// The broker's answer to a request to take part.
#[derive(Debug)]
struct Joined {
    seat: u8,
    key: u64,
    member: u8,
    members: u8,
    base: u64,
    size: u64,
}

/// A seat of this process: its place, its number, its memory, and who else takes part.
type Seated = (u8, u64, Arc<OwnSeat>, Members);

impl Group {
    /// Takes part in a group, with a quarter of its member's room for its own buffers.
    ///
    /// # Errors
    /// As [`GroupBuilder::join`].
    pub fn join(domain: &Domain, name: &str) -> Result<Self> {
        Self::builder(name).join(domain)
    }

    /// Options for taking part; [`GroupBuilder::join`] joins.
    pub fn builder(name: impl Into<String>) -> GroupBuilder {
        GroupBuilder { name: name.into(), room: u64::MAX }
    }

    /// The group's name in the broker's policy.
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// Makes a buffer of `len` bytes, which no other process sees before it is lent. It occupies whole pages of 4096 bytes.
    ///
    /// # Errors
    /// [`Error::Full`] if not enough is free now; [`Error::TooLarge`] if it never can be.
    pub fn alloc(&self, len: usize) -> Result<Buffer> {
        let own = &self.inner.own;
        if len == 0 {
            return Err(Error::Invalid("a buffer has at least one byte".into()));
        }
        if len as u64 > own.room() {
            let advice = "join the group with more `room`";
            return Err(Error::TooLarge { asked: len as u64, max: own.room(), advice });
        }
        let span = own.take_span(len as u64).or_else(|| {
            self.inner.collect();
            own.take_span(len as u64)
        });
        let span = span.ok_or(Error::Full("no piece of this size is free among this process's buffers"))?;
        Ok(Buffer::new(span, &self.inner))
    }

    /// Opens a buffer of another process for reading in place. From now on this process holds the token.
    ///
    /// # Errors
    /// [`Error::Gone`] if the token or its owner has ended; [`Error::Invalid`] if the handle is not valid in this group.
    pub fn open(&self, handle: &Handle) -> Result<Shared> {
        let map = self.inner.claim(handle, Claimed::Held)?;
        Ok(Shared::new(&self.inner, map, *handle))
    }

    /// Gives a token back without reading; the token may be one of this process.
    ///
    /// # Errors
    /// As [`Group::open`].
    pub fn release(&self, handle: &Handle) -> Result<()> {
        self.inner.claim(handle, Claimed::Released).map(drop)
    }

    /// The sum of free bytes for buffers of this process.
    pub fn free(&self) -> u64 {
        self.inner.collect();
        self.inner.own.free()
    }

    /// Whether the broker is gone: members no longer learn of new and dead processes. Open buffers stay readable. To continue, drop
    /// everything of the group and join it again.
    pub fn is_alone(&self) -> bool {
        self.inner.alone.load(Ordering::Relaxed)
    }
}

impl Domain {
    /// The members of groups that are visible to this domain. Blocks until the broker has answered.
    ///
    /// # Errors
    /// As [`Domain::domains`].
    ///
    /// ```
    /// use partywall::Domain;
    ///
    /// # let folder = tempfile::tempdir()?;
    /// # let policy = folder.path().join("policy.toml");
    /// # std::fs::write(&policy, "[[group]]\nname = 'pool'\ndomains = ['web']\nroom = '4M'\n")?;
    /// # let config = partywall_daemon::Config::new(folder.path().join("broker.sock")).policy_file(policy);
    /// # let broker = partywall_daemon::Broker::start(&config)?;
    /// # let web = Domain::builder().name("web").broker(broker.path()).join()?;
    /// let members = web.groups()?;
    /// assert_eq!((members[0].group.as_str(), members[0].member.as_str()), ("pool", "web"));
    /// assert_eq!(members[0].seats, 0); // No process takes part yet.
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn groups(&self) -> Result<Vec<GroupRow>> {
        self.list(
            What::Groups,
            |m| match m {
                Message::Groups { page } => Ok((page.more, page.rows)),
                other => Err(unexpected(&other)),
            },
            |row| u64::from(row.key),
        )
    }
}

/// Runs on the keeper's thread: the broker has said something, has read something that this process waits for, or is gone.
fn notice(inner: &Weak<GroupInner>, gone: bool) {
    if let Some(inner) = inner.upgrade() {
        inner.unheard.store(true, Ordering::SeqCst);
        inner.hear();
        if gone {
            inner.alone.store(true, Ordering::Relaxed);
        }
    }
}

impl GroupInner {
    /// Has the keeper listen to the broker, and process what the broker has said before.
    fn watch_session(this: &Arc<Self>) -> Result<()> {
        let weak = Arc::downgrade(this);
        let watch = HangUpWatch::notify(lock(&this.session).as_fd(), move |gone| notice(&weak, gone))?;
        *lock(&this.watch) = Some(watch);
        // The keeper may have processed something, and found the socket full, before the watch was stored.
        this.unheard.store(true, Ordering::SeqCst);
        this.hear();
        Ok(())
    }

    /// Processes the broker's notices about other members, unless another thread is doing so.
    fn hear(&self) {
        while self.unheard.load(Ordering::SeqCst) {
            match self.session.try_lock() {
                Ok(mut session) => {
                    self.unheard.store(false, Ordering::SeqCst);
                    self.take_in(&mut session);
                }
                Err(TryLockError::Poisoned(_)) => return,
                // Its holder calls this when it has released it.
                Err(TryLockError::WouldBlock) => return,
            }
        }
    }

    fn take_in(&self, session: &mut BrokerSession) {
        let said = session.take_unasked();
        let mut state = lock(&self.state);
        said.into_iter().for_each(|(message, fds)| state.members.hear(message, &fds));
        self.settle(&mut state, session);
    }

    /// Talks to the broker, and hears what it has said before it answered.
    fn ask<T>(&self, what: impl FnOnce(&mut BrokerSession) -> Result<T>) -> Result<T> {
        let answer = {
            let mut session = lock(&self.session);
            let answer = what(&mut session);
            self.take_in(&mut session);
            answer
        };
        self.hear();
        answer
    }

    /// Reads the fates of the tokens, and frees the buffers that have none left.
    fn collect(&self) {
        let unmapped = {
            let mut state = lock(&self.state);
            self.sweep(&mut state);
            state.members.unmapped()
        };
        for missing in unmapped {
            let done = match missing {
                // A member that has come later.
                Missing::Window(member) => self.map_window(member),
                // This process had no descriptor free for it, or something else where it belongs.
                Missing::Seat(key) => self
                    .ask(|session| session.request(&Message::FetchSeat { key }, &[]))
                    .map(|(seat, fds)| lock(&self.state).members.hear(seat, &fds)),
            };
            if let Err(error) = done {
                tracing::debug!(group = self.name, ?missing, %error, "what a member writes cannot be mapped yet");
            }
        }
    }

    /// Maps the window that a member has now.
    fn map_window(&self, member: u8) -> Result<()> {
        let window = self.ask(|session| Members::get(session, member))?;
        lock(&self.state).members.put(member, &window)
    }

    /// Whether this window of a member is mapped, which is done now if it is not.
    fn has_window(&self, member: u8, life: u32, size: u64) -> bool {
        if lock(&self.state).members.is_mapped(member, life, size) {
            return true;
        }
        if let Err(error) = self.map_window(member) {
            tracing::warn!(group = self.name, member, %error, "the window of a member cannot be mapped");
        }
        lock(&self.state).members.is_mapped(member, life, size)
    }

    fn sweep(&self, state: &mut GroupState) {
        let GroupState { members, tokens, .. } = state;
        let own = self.own.pages();
        let complete = members.unmapped().is_empty();
        tokens.sweep(own, complete, |place, serial| {
            let mine = own.claim_of(self.seat, place, serial).map(|claim| (true, claim));
            members.claims(self.seat, place, serial).chain(mine).collect()
        });
    }

    /// Drops dead members of which nothing is open, once what they had of ours is known.
    fn settle(&self, state: &mut GroupState, session: &BrokerSession) {
        if state.members.any_dead() {
            self.sweep(state);
            if state.tokens.is_empty() || state.members.unmapped().is_empty() {
                let buried = state.members.bury();
                state.untold.extend(buried);
            }
        }
        self.let_go(state, session);
    }

    /// Tells the broker which dead seats this process is done with. The keeper's thread may be here, so it does not wait for room.
    fn let_go(&self, state: &mut GroupState, session: &BrokerSession) {
        let mut is_full = false;
        while let Some(key) = state.untold.front() {
            if let Err(Error::WouldBlock) = session.try_post(0, &Message::LetGo { key: *key }, &[]) {
                is_full = true;
                break;
            }
            // A broker that is gone has forgotten the seat anyhow.
            state.untold.pop_front();
        }
        if is_full != state.awaits_room
            && let Some(watch) = &*lock(&self.watch)
        {
            watch.await_room(session.as_fd(), is_full);
            state.awaits_room = is_full;
        }
    }

    /// Claims the token of a handle. No value of the handle is trusted.
    fn claim(&self, handle: &Handle, state: Claimed) -> Result<Arc<partywall_region::pmem::Joint>> {
        self.with_owner(handle.owner, || self.try_claim(handle, state))
    }

    /// Does something with a buffer of this owner, and tries it again if the owner was not known before.
    fn with_owner<T>(&self, owner: u64, attempt: impl Fn() -> Result<T>) -> Result<T> {
        self.hear();
        match attempt() {
            // The broker's notice about the owner may be in transit, as may be the owner's window.
            Err(Error::Gone(_)) if !self.is_known(owner) => {
                self.ask(|session| session.request(&Message::Ping {}, &[]).map(drop))?;
                self.collect();
                attempt()
            }
            done => done,
        }
    }

    fn is_known(&self, owner: u64) -> bool {
        owner == self.me || lock(&self.state).members.is_open_to(owner)
    }

    fn try_claim(&self, handle: &Handle, claimed: Claimed) -> Result<Arc<partywall_region::pmem::Joint>> {
        let (place, serial) = (usize::from(handle.place), handle.serial);
        let pages = self.own.pages();
        let mut state = lock(&self.state);
        if handle.owner == self.me {
            if claimed != Claimed::Released {
                return Err(Error::Invalid("this buffer is this process's own: read it there".into()));
            }
            if pages.issued(place) != serial {
                return Err(Error::Gone(ENDED));
            }
            pages.say(self.seat, place, serial, TokenClaim { hop: handle.hop, state: claimed });
            self.sweep(&mut state);
            return Ok(Arc::clone(self.own.window()));
        }
        let Handle { owner, address, len, .. } = *handle;
        let found = state.members.owner(&BufferPart { owner, address, len })?;
        let theirs = found.map.seat(found.base).filter(|theirs| theirs.is_of(handle.owner));
        let theirs = theirs.ok_or(Error::Gone("the owner's seat does not look like one"))?;
        if theirs.issued(place) != serial {
            return Err(Error::Gone(ENDED));
        }
        match pages.claim_of(found.seat, place, serial) {
            Some(TokenClaim { state: Claimed::Held, .. }) => {
                return Err(Error::Invalid("this handle is open in this process already".into()));
            }
            Some(TokenClaim { state: Claimed::Released, .. }) => return Err(Error::Gone(ENDED)),
            _ => {}
        }
        let say = |state| pages.say(found.seat, place, serial, TokenClaim { hop: handle.hop, state });
        say(claimed);
        if claimed == Claimed::Held {
            // The owner may have withdrawn the token at the same time; one of the two sees the other (protocol J6).
            if theirs.issued(place) != serial {
                say(Claimed::Released);
                return Err(Error::Gone(ENDED));
            }
            state.members.opened(handle.owner);
        }
        Ok(found.map)
    }

    /// This process has done with a token that it held.
    fn end(&self, handle: &Handle, claimed: Claimed) {
        let mut state = lock(&self.state);
        if let Some(seat) = state.members.closed(handle.owner) {
            let claim = TokenClaim { hop: handle.hop, state: claimed };
            self.own.pages().say(seat, handle.place.into(), handle.serial, claim);
        }
        self.bury_later(state);
    }

    /// This process has done with a part that it had borrowed.
    fn returned(&self, owner: u64) {
        let mut state = lock(&self.state);
        state.members.closed(owner);
        self.bury_later(state);
    }

    fn bury_later(&self, state: MutexGuard<'_, GroupState>) {
        if state.members.any_dead() {
            drop(state);
            // It may have been the last open buffer of a dead process.
            self.unheard.store(true, Ordering::SeqCst);
            self.hear();
        }
    }
}

/// The error for a token that has ended.
const ENDED: &str = "the token has come to its end: released, taken back, or its owner's buffer is gone";
