//! The processes that stand between strangers and the broker's event loop (protocol C13).
//!
//! ```text
//!   user A's sessions --> reader of A --\
//!   user B's sessions --> reader of B ----> event loop, which alone answers, on copies of the sessions' sockets
//!   who is refused  ----> disposer          spawner: forks and kills the others
//!   ends that the broker made ----> closer
//! ```
//!
//! Whatever a stranger sends may hang a thread that takes, queries or closes it: a socket that lingers, a file of a file system of the
//! stranger's own. So the event loop does none of that. A **reader** takes the packets of one user's sessions, judges what comes
//! with them, and passes on bytes, facts and memory. A timer that it winds up before each such step goes off when it hangs;
//! then it is killed, and its user refused until it is gone. Nobody else is concerned.
//!
//! To close the last copy of a session's socket is to close all that was left unread in it. So the event loop never closes the
//! last: it sends its copy to the reader, or, where there is none, to the **disposer** ([`disposer`]).

mod disposer;
mod process;
mod reader;
mod report;
mod spawner;
mod urgency;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use partywall_protocol::wire::User;
use partywall_region::packet;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::time::{TimerfdClockId, TimerfdFlags, timerfd_create};

use super::accept::closing_collects_nothing;
use crate::credentials::{Account, Home};
pub(in crate::server) use disposer::LATE;
use disposer::{Disposer, FULL};
use report::ReaderOrder;
pub(super) use report::{MAX_REPORT, ReaderReport};
use spawner::{Job, Spawner};
use urgency::MOST_URGENT;

/// Protocol C14: how long a reader may take for one packet, or for closing one session: what takes microseconds, on a machine however busy.
const DEADLINE: Duration = Duration::from_secs(3);
/// How long a user is refused at least whose reader hung or ended.
const REST: Duration = Duration::from_secs(5);
/// Readers at a time, those that hang included.
const MOST: usize = 256;
/// Readers that are kept though they have no session.
pub(super) const MOST_IDLE: usize = 8;
/// Orders that a reader is sent in a turn of the event loop: one that was slow has room for hundreds at once.
const ORDERS: usize = 32;
/// Orders about one user's readers that wait for the spawner, and orders about disposers (protocol C13.5). Beyond that, the user gets no other reader, and the
/// disposer is not replaced.
const MOST_ORDERS: usize = 4;
/// Orders that wait for one user's reader. Beyond that, the user's new sessions are refused.
const MOST_BACKLOG: usize = 1024;
/// Descriptors of one user that no disposer took. While a user has as many, the broker takes no connection out of the kernel's queue: it learns
/// whose a connection is only afterwards.
const MOST_UNDISPOSED: usize = 128;

/// Epoll's names for what belongs to readers have this bit; sessions do not reach it.
const READER: u64 = 1 << 63;
const TIMER: u64 = 1 << 62;
const SPAWNER: u64 = READER | u32::MAX as u64;

/// The subject of an epoll event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ReaderEvent {
    /// A reader's socket.
    Socket(u32),
    /// A reader's timer.
    Timer(u32),
    /// The spawner takes more.
    Spawner,
}

impl ReaderEvent {
    /// `None` if it is about something else.
    pub(super) fn of(data: u64) -> Option<Self> {
        let number = data as u32;
        match data {
            SPAWNER => Some(Self::Spawner),
            _ if data & READER == 0 => None,
            _ if data & TIMER != 0 => Some(Self::Timer(number)),
            _ => Some(Self::Socket(number)),
        }
    }
}

/// How a reader came to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ReaderEnd {
    /// It took too long for one step, and the broker kills it (protocol C14).
    Hung,
    /// Its process ended or could not be started.
    Ended,
}

impl ReaderEnd {
    /// The reason that programs of its user are given.
    pub(super) fn reason(self, account: Account) -> String {
        match self {
            Self::Hung => format!("a session of {account} brought a descriptor that hung the process that read it"),
            Self::Ended => format!(
                "the process that reads the sessions of {account} ended or could not be started (out of processes or \
                 memory?); the kernel's log may say why"
            ),
        }
    }
}

/// The broker's side of a reader.
#[derive(Debug)]
struct ReaderHandle {
    account: Account,
    socket: OwnedFd,
    timer: OwnedFd,
    /// Sessions that it has been given and has not closed.
    open: usize,
    /// Orders that its socket did not take yet.
    backlog: VecDeque<(ReaderOrder, Option<OwnedFd>)>,
    /// It hung, and is waited for to end.
    killed: bool,
    /// Its user has used up a share of the event loop's time, so its reports wait in its socket.
    left_alone: bool,
    /// It may raise its priority.
    may_be_urgent: bool,
}

impl ReaderHandle {
    /// Whether it has no session. A killed reader is not idle.
    fn is_idle(&self) -> bool {
        self.open == 0 && !self.killed
    }

    /// Sets what epoll watches of its socket. Epoll reports the end of a reader in any case.
    fn watch(&self, epoll: &OwnedFd, number: u32) {
        let mut flags = EventFlags::empty();
        flags.set(EventFlags::IN, !self.killed && !self.left_alone);
        flags.set(EventFlags::OUT, !self.killed && !self.backlog.is_empty());
        let data = EventData::new_u64(READER | u64::from(number));
        if let Err(error) = epoll::modify(epoll, &self.socket, data, flags) {
            tracing::error!(%error, "cannot change what is watched of a reading process");
        }
    }
}

/// All of them. The event loop's epoll set tells of their sockets and timers by [`ReaderEvent`].
#[derive(Debug)]
pub(super) struct Readers {
    epoll: OwnedFd,
    readers: BTreeMap<u32, ReaderHandle>,
    by_account: HashMap<Account, u32>,
    /// Users that get no reader until this time, because theirs ended.
    resting: HashMap<Account, (Instant, ReaderEnd)>,
    disposer: Disposer,
    closer: Disposer,
    /// Sockets that no disposer took, with the user that they came from, where that is known. They are tried again when the next disposer is made.
    undisposed: Vec<(Option<Account>, OwnedFd)>,
    next: u32,
    /// Dropped last: it kills the others.
    spawner: Spawner,
}

impl Readers {
    /// Before the broker has anything of a stranger's.
    pub(super) fn start(number_record: Option<PathBuf>) -> io::Result<Spawned> {
        Ok(Spawned(Spawner::start(number_record)?))
    }

    fn number(&mut self) -> u32 {
        self.next += 1;
        self.next
    }

    /// The reader of a user; a reason if the user is not to have one now.
    pub(super) fn reader_of(&mut self, account: Account) -> Result<u32, String> {
        self.resting.retain(|_, (until, _)| *until > Instant::now());
        // A killed reader that is still listed hangs: one that has ended is forgotten at once.
        let hangs = self.by_account.get(&account).is_some_and(|number| self.is_killed(*number));
        let end = if hangs { Some(ReaderEnd::Hung) } else { self.resting.get(&account).map(|(_, end)| *end) };
        if let Some(end) = end {
            return Err(format!(
                "{}; the broker serves this user again when that process has ended, after {} seconds at the earliest",
                end.reason(account),
                REST.as_secs()
            ));
        }
        if let Some(number) = self.by_account.get(&account) {
            let waiting = self.readers.get(number).map_or(0, |reader| reader.backlog.len());
            if waiting >= MOST_BACKLOG {
                return Err(format!(
                    "{waiting} orders about sessions of {account} wait for the process that reads them"
                ));
            }
            return Ok(*number);
        }
        if self.spawner.waiting(Some(account)) >= MOST_ORDERS {
            return Err(format!(
                "the broker still makes earlier processes to read sessions of {account}; try again later"
            ));
        }
        if self.readers.len() >= MOST {
            return Err(format!("the broker reads from as many users as it may at once ({MOST}); try again later"));
        }
        self.spawn(account).map_err(|e| format!("the broker cannot make a process to read your sessions: {e}"))
    }

    fn spawn(&mut self, account: Account) -> io::Result<u32> {
        let number = self.number();
        let (socket, theirs) = packet::pair()?;
        let timer = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC)?;
        let data = READER | u64::from(number);
        epoll::add(&self.epoll, &socket, EventData::new_u64(data), EventFlags::IN)?;
        epoll::add(&self.epoll, &timer, EventData::new_u64(data | TIMER), EventFlags::IN)?;
        let urgent = self.readers.values().filter(|reader| reader.may_be_urgent).count() < MOST_URGENT;
        let job = if urgent { Job::ReadUrgently } else { Job::Read };
        self.spawner.spawn(number, job, Some(account), vec![theirs, timer.try_clone()?]);
        self.watch_spawner();
        let reader = ReaderHandle {
            account,
            socket,
            timer,
            open: 0,
            backlog: VecDeque::new(),
            killed: false,
            left_alone: false,
            may_be_urgent: urgent,
        };
        self.readers.insert(number, reader);
        self.by_account.insert(account, number);
        Ok(number)
    }

    /// Has a reader read a session, of which it gets a copy.
    pub(super) fn serve(&mut self, number: u32, session: u64, socket: BorrowedFd<'_>) -> io::Result<()> {
        let copy = socket.try_clone_to_owned()?;
        if let Some(reader) = self.readers.get_mut(&number) {
            reader.open += 1;
        }
        self.order(number, ReaderOrder::Serve(session), Some(copy));
        Ok(())
    }

    /// A session has ended; its reader closes it.
    pub(super) fn end(&mut self, number: u32, session: u64, socket: OwnedFd) {
        // The other side hears of it at once, whenever it is closed.
        let _ = rustix::net::shutdown(&socket, rustix::net::Shutdown::Both);
        self.order(number, ReaderOrder::End(session), Some(socket));
    }

    /// Sends back a [`Report::Synced`] when all that is there has been read.
    #[cfg(test)]
    pub(super) fn sync(&mut self, number: u64) -> usize {
        let numbers: Vec<u32> = self.readers.iter().filter(|(_, r)| !r.killed).map(|(number, _)| *number).collect();
        numbers.iter().for_each(|reader| self.order(*reader, ReaderOrder::Sync(number), None));
        numbers.len()
    }

    /// As if the disposer had ended, and no other could be made.
    #[cfg(test)]
    pub(super) fn lose_disposer(&mut self) {
        let (socket, other) = packet::pair().unwrap();
        drop(other);
        self.spawner.kill(self.disposer.number(), None);
        self.disposer = Disposer::new(self.disposer.number(), socket);
    }

    /// The number of the closer.
    #[cfg(test)]
    pub(super) fn closer_for_test(&self) -> u32 {
        self.closer.number()
    }

    /// As if no disposer had taken this.
    #[cfg(test)]
    pub(super) fn keep_undisposed(&mut self, fd: OwnedFd) {
        self.undisposed.push((None, fd));
    }

    /// As if the spawner took no orders, until [`unblock_spawner`](Self::unblock_spawner).
    #[cfg(test)]
    pub(super) fn block_spawner(&mut self) -> spawner::BlockedSpawner {
        self.spawner.block()
    }

    #[cfg(test)]
    pub(super) fn unblock_spawner(&mut self, blocked: spawner::BlockedSpawner) {
        self.spawner.unblock(blocked);
        self.watch_spawner();
    }

    /// Orders about a user, or about disposers, that wait for the spawner; and descriptors of this user that wait for a disposer.
    #[cfg(test)]
    pub(super) fn waiting_for_test(&self, account: Option<Account>) -> (usize, usize) {
        (self.spawner.waiting(account), self.undisposed_of(account))
    }

    /// As if the reader of a user had ended.
    #[cfg(test)]
    pub(super) fn end_for_test(&self, account: Account) {
        rustix::net::shutdown(&self.readers[&self.by_account[&account]].socket, rustix::net::Shutdown::Both).unwrap();
    }

    /// Waits until the reader of a user has something to say.
    #[cfg(test)]
    pub(super) fn await_report(&self, account: Account) {
        use rustix::event::{PollFd, PollFlags, poll};
        let socket = &self.readers[&self.by_account[&account]].socket;
        assert_eq!(poll(&mut [PollFd::new(socket, PollFlags::IN)], None), Ok(1));
    }

    fn order(&mut self, number: u32, order: ReaderOrder, with: Option<OwnedFd>) {
        match self.readers.get_mut(&number) {
            Some(reader) if !reader.killed => {
                reader.backlog.push_back((order, with));
                // Otherwise epoll tells when there is room.
                if reader.backlog.len() == 1 {
                    self.flush(number);
                }
            }
            other => {
                let account = other.map(|reader| reader.account);
                with.into_iter().for_each(|fd| self.dispose(account, fd));
            }
        }
    }

    /// Sends a reader what waits for it, as far as there is room and a turn of the event loop allows. Epoll tells when there is room for more.
    fn flush(&mut self, number: u32) {
        let Some(reader) = self.readers.get_mut(&number) else { return };
        for _ in 0..ORDERS {
            let Some((order, with)) = reader.backlog.front() else { break };
            let fds: Vec<BorrowedFd<'_>> = with.iter().map(AsFd::as_fd).collect();
            match packet::try_send(reader.socket.as_fd(), &order.encode(), &fds) {
                Ok(()) => drop(reader.backlog.pop_front()),
                // Full; or dead, which its hang-up tells as well, and then all of it is disposed of.
                Err(_) => break,
            }
        }
        reader.watch(&self.epoll, number);
    }

    /// Leaves the reports of a user where they are, until [`listen_to_all`](Self::listen_to_all).
    pub(super) fn leave_alone(&mut self, account: Account) {
        let Some(number) = self.by_account.get(&account) else { return };
        if let Some(reader) = self.readers.get_mut(number).filter(|reader| !reader.left_alone) {
            reader.left_alone = true;
            reader.watch(&self.epoll, *number);
        }
    }

    /// Hears of the reports of all users again.
    pub(super) fn listen_to_all(&mut self) {
        for (number, reader) in self.readers.iter_mut().filter(|(_, reader)| reader.left_alone) {
            reader.left_alone = false;
            reader.watch(&self.epoll, *number);
        }
    }

    /// Its socket has room again.
    pub(super) fn writable(&mut self, number: u32) {
        self.flush(number);
    }

    /// The next report of a reader, in `buffer`; `None` when there is no more.
    pub(super) fn receive(&self, number: u32, buffer: &mut [u8]) -> FromReader {
        match self.readers.get(&number).filter(|reader| !reader.killed) {
            None => FromReader::Nothing,
            Some(reader) => match packet::try_recv(reader.socket.as_fd(), buffer) {
                Ok(received) if received.len > 0 => FromReader::Report(received),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => FromReader::Nothing,
                _ => FromReader::Dead,
            },
        }
    }

    /// A reader has closed a session.
    pub(super) fn ended(&mut self, number: u32) {
        if let Some(reader) = self.readers.get_mut(&number) {
            reader.open = reader.open.saturating_sub(1);
        }
        self.end_if_idle(number);
    }

    /// Ends a reader that has no session, unless it is one of the few that are kept without.
    pub(super) fn end_if_idle(&mut self, number: u32) {
        if self.readers.get(&number).is_some_and(ReaderHandle::is_idle) && self.idle() > MOST_IDLE {
            // A reader ends by itself when its socket is closed here.
            self.forget(number);
        }
    }

    /// The number of readers that have no session.
    pub(super) fn idle(&self) -> usize {
        self.readers.values().filter(|reader| reader.is_idle()).count()
    }

    pub(super) fn account_of(&self, number: u32) -> Option<Account> {
        self.readers.get(&number).map(|reader| reader.account)
    }

    pub(super) fn is_killed(&self, number: u32) -> bool {
        self.readers.get(&number).is_some_and(|reader| reader.killed)
    }

    /// The timer of a reader has gone off. Whether it hangs indeed.
    pub(super) fn is_hung(&self, number: u32) -> bool {
        // A reader that went on has wound the timer again, or off.
        self.readers.get(&number).is_some_and(|r| !r.killed && rustix::io::read(&r.timer, &mut [0; 8]) == Ok(8))
    }

    /// Kills a reader that hangs or has ended. Its user is refused from now on.
    pub(super) fn kill(&mut self, number: u32, end: ReaderEnd) {
        let Some(reader) = self.readers.get_mut(&number) else { return };
        reader.killed = true;
        // Only its end is waited for.
        reader.watch(&self.epoll, number);
        let _ = epoll::delete(&self.epoll, &reader.timer);
        let (account, backlog) = (reader.account, std::mem::take(&mut reader.backlog));
        self.resting.insert(account, (Instant::now() + REST, end));
        self.spawner.kill(number, Some(account));
        self.watch_spawner();
        backlog.into_iter().filter_map(|(_, fd)| fd).for_each(|fd| self.dispose(Some(account), fd));
    }

    pub(super) fn forget(&mut self, number: u32) {
        if let Some(reader) = self.readers.remove(&number) {
            self.by_account.remove(&reader.account);
            let account = Some(reader.account);
            reader.backlog.into_iter().filter_map(|(_, fd)| fd).for_each(|fd| self.dispose(account, fd));
        }
    }

    /// Shuts a session's socket down, and has another process close it without waiting. `account` is the user that it came from, where that is
    /// known.
    pub(super) fn dispose(&mut self, account: Option<Account>, fd: OwnedFd) {
        let _ = rustix::net::shutdown(&fd, rustix::net::Shutdown::Both);
        self.close(account, fd);
    }

    /// Closes a stranger's descriptor, not here. Other copies of it stay as they are.
    pub(super) fn close(&mut self, account: Option<Account>, fd: OwnedFd) {
        if let Err(fd) = self.pass_to_disposer(fd) {
            // There is no descriptor to make another, or the spawner is behind: the socket stays open for a while, so that the loop is not
            // blocked.
            if self.undisposed.is_empty() {
                tracing::error!("descriptors of clients cannot be closed safely, and stay open until they can");
            }
            self.undisposed.push((account, fd));
        }
    }

    /// Has an end of a link or a bell closed that the broker has made. The other end hangs up only when this copy is closed, so the closer closes it at
    /// once.
    pub(super) fn close_made(&mut self, fd: OwnedFd) {
        match self.pass_to_closer(fd).or_else(|fd| self.pass_to_disposer(fd)) {
            // If it refuses descriptors and holds nothing, it is closed here.
            Err(fd) if !packet::refuses_descriptors(&fd) || packet::holds_anything(&fd) => {
                self.undisposed.push((None, fd));
            }
            Ok(()) | Err(_) => {}
        }
    }

    fn undisposed_of(&self, account: Option<Account>) -> usize {
        self.undisposed.iter().filter(|(of, _)| *of == account).count()
    }

    /// Whether a user has reached the limit of descriptors that wait to be closed. The sessions of that user wait then, too.
    pub(super) fn is_clogged_by(&self, account: Option<Account>) -> bool {
        self.undisposed.len() >= MOST_UNDISPOSED && self.undisposed_of(account) >= MOST_UNDISPOSED
    }

    /// Whether any user has reached that limit. No connection is accepted then.
    pub(super) fn is_clogged(&self) -> bool {
        self.undisposed.len() >= MOST_UNDISPOSED
            && self.undisposed.iter().any(|(account, _)| self.undisposed_of(*account) >= MOST_UNDISPOSED)
    }

    fn pass_to_closer(&mut self, mut fd: OwnedFd) -> Result<(), OwnedFd> {
        for _ in 0..2 {
            fd = match self.closer.give(fd) {
                Err(fd) => fd,
                Ok(()) => return Ok(()),
            };
            // Full, or it has ended.
            self.replace_closer();
        }
        Err(fd)
    }

    fn pass_to_disposer(&mut self, mut fd: OwnedFd) -> Result<(), OwnedFd> {
        for _ in 0..2 {
            fd = match self.disposer.give(fd) {
                Err(fd) => fd,
                Ok(()) => return Ok(()),
            };
            // Full, or it has ended.
            self.replace_disposer();
        }
        Err(fd)
    }

    /// Whether there is anything that should be closed some day.
    pub(super) fn has_waste(&mut self) -> bool {
        self.has_ends_to_close() || self.disposer.holds_any() || !self.undisposed.is_empty()
    }

    /// Whether the closer has an end that it has not closed yet.
    pub(super) fn has_ends_to_close(&mut self) -> bool {
        self.closer.holds_any()
    }

    /// Replaces the disposer if it holds anything, and the closer if it is late.
    pub(super) fn empty_disposer(&mut self) {
        if self.closer.is_late() {
            self.replace_closer();
        }
        if self.disposer.holds_any() {
            self.replace_disposer();
        }
        // At most as many as one disposer takes, so that a turn stays short.
        for _ in 0..FULL {
            let Some((account, fd)) = self.undisposed.pop() else { break };
            if let Err(fd) = self.pass_to_disposer(fd) {
                self.undisposed.push((account, fd));
                break;
            }
        }
    }

    fn replace_disposer(&mut self) {
        if let Some((number, socket)) = self.spawn_disposer(Job::Dispose) {
            let old = std::mem::replace(&mut self.disposer, Disposer::new(number, socket));
            self.spawner.kill(old.number(), None);
            self.close_own(old.into_socket());
            self.watch_spawner();
        }
    }

    fn replace_closer(&mut self) {
        if let Some((number, socket)) = self.spawn_disposer(Job::Close) {
            let old = std::mem::replace(&mut self.closer, Disposer::closer(number, socket));
            self.spawner.kill(old.number(), None);
            self.close_own(old.into_socket());
            self.watch_spawner();
        }
    }

    /// Closes a UNIX socket that only the broker has had. Where that collects unreachable sockets of others, the closer does it.
    fn close_own(&mut self, socket: OwnedFd) {
        if !closing_collects_nothing() {
            let _ = self.closer.give(socket);
        }
    }

    /// `None` if it cannot be made now.
    fn spawn_disposer(&mut self, job: Job) -> Option<(u32, OwnedFd)> {
        if self.spawner.waiting(None) >= MOST_ORDERS {
            return None;
        }
        let number = self.number();
        let (socket, theirs) = packet::pair().ok()?;
        self.spawner.spawn(number, job, None, vec![theirs]);
        Some((number, socket))
    }

    /// The spawner takes more, if it was full.
    pub(super) fn watch_spawner(&mut self) {
        let flags = if self.spawner.flush() { EventFlags::empty() } else { EventFlags::OUT };
        let _ = epoll::modify(&self.epoll, self.spawner.as_fd(), EventData::new_u64(SPAWNER), flags);
    }
}

impl Drop for Readers {
    fn drop(&mut self) {
        // What the core had is dropped by now. The process that ends the broker must not wait for what is in there.
        let left = super::descriptor::take_left();
        let undisposed = std::mem::take(&mut self.undisposed).into_iter().map(|(_, fd)| fd);
        for fd in left.into_iter().chain(undisposed) {
            if let Err(fd) = self.pass_to_disposer(fd) {
                std::mem::forget(fd);
            }
        }
    }
}

/// The result of a look at a reader's socket.
#[derive(Debug)]
pub(super) enum FromReader {
    /// This, for [`ReaderReport::decode`].
    Report(packet::ReceivedPacket),
    /// No packet now.
    Nothing,
    /// The reader has ended.
    Dead,
}

/// A spawner, made before there was anything to watch it with.
#[derive(Debug)]
pub(super) struct Spawned(Spawner);

impl Spawned {
    /// The rest, watched by this epoll set. The reader of the broker's own user is there from the beginning.
    pub(super) fn watched_by(self, epoll: BorrowedFd<'_>) -> io::Result<Readers> {
        let mut spawner = self.0;
        epoll::add(epoll, spawner.as_fd(), EventData::new_u64(SPAWNER), EventFlags::empty())?;
        let (disposer, theirs) = packet::pair()?;
        spawner.spawn(1, Job::Dispose, None, vec![theirs]);
        let (closer, theirs) = packet::pair()?;
        spawner.spawn(2, Job::Close, None, vec![theirs]);
        let mut this = Readers {
            epoll: epoll.try_clone_to_owned()?,
            readers: BTreeMap::new(),
            by_account: HashMap::new(),
            resting: HashMap::new(),
            disposer: Disposer::new(1, disposer),
            closer: Disposer::closer(2, closer),
            undisposed: Vec::new(),
            next: 2,
            spawner,
        };
        let own = User::Host(rustix::process::geteuid().as_raw());
        this.spawn(Account::of(own, Home::Broker))?;
        Ok(this)
    }
}
