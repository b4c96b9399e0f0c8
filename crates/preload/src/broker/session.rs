//! One request at a time to the broker, and never long: what does not answer in time is left alone for a while.
//!
//! ```text
//!   none --(first listen or connect)--> open: connect, Join, Directory, map, publish again what was published
//!    ^                                    |
//!    +---- not before `retry_at` <--------+ refused, absent, silent, gone
//! ```
#![expect(unsafe_code, reason = "blocks signals while it holds the lock")]

use super::claim::{ConnClaim, each_claim};
use super::packet::{Answer, Descriptors, LONGEST_REQUEST};
use super::settings::{self, DefaultName};
use super::state::{self, NAMESPACES, State};
use super::{addresses, listeners, memory, netns};
use crate::log::log;
use crate::{hidden, process, sys};
use partywall_protocol::directory::{Directory, OfferKey};
use partywall_protocol::wire::{self, BorrowedMessage, Refusal, RegionReference, Side, VERSION};
use partywall_region::packet as packets;
use partywall_shm::status::Role;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};
use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// The longest that one call of the program waits for the broker, all told. A broker that is there answers in less than a
/// millisecond, unless the machine has much else to do; a listener that gave it up then would stay unknown to all who connect.
/// (Tests run on machines that are busier.)
const LIMIT: Duration = Duration::from_millis(if cfg!(test) { 5000 } else { 1000 });
/// How long a thread waits for another one that speaks to the broker, if what it wants can be wanted again later.
const BRIEF: Duration = Duration::from_millis(2);
/// How long the broker is left alone after it was found absent, at first and at most.
const ABSENT: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));
/// The pauses after a broker that was silent or refused this process.
const SILENT: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// How long one call of the program waits, after the broker has come again, until it has heard of our rings. It takes some 50 us each.
const CLAIMS: Duration = Duration::from_millis(20);

/// The descriptors of sessions, plus 1, where `fork` does not empty them: our own, and those of the processes that we descend
/// from. Those are kept, and never used: a server that listens, forks and ends goes on in its children, and is to be found as
/// long as they have a copy of the session that has published it.
static SESSIONS: [AtomicU32; 4] = [const { AtomicU32::new(0) }; 4];

/// Why there is no answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BrokerFailure {
    /// There is no broker, or it does not answer. For now.
    Absent,
    /// It said no.
    Refused(Refusal),
    /// Another thread speaks to it.
    Busy,
}

/// How badly a request is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Urgency {
    /// It will be wanted again.
    Brief,
    /// Now or not at all.
    Long,
}

/// The right to speak to the broker: the lock, with all signals blocked.
#[derive(Debug)]
pub(super) struct Turn {
    state: &'static State,
    mask: MaybeUninit<libc::sigset_t>,
    deadline: Duration,
}

impl Turn {
    /// Waits for one's turn.
    pub(super) fn take(patience: Urgency) -> Result<Self, BrokerFailure> {
        // A child of `vfork` must not touch what is its parent's.
        if process::is_visitor() {
            return Err(BrokerFailure::Absent);
        }
        let state = state::get().ok_or(BrokerFailure::Absent)?;
        let mask = block_signals();
        let now = sys::now();
        let until = now + if patience == Urgency::Long { LIMIT } else { BRIEF };
        // EDGE turn: acquires from the last turn.
        while state.lock.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_err() {
            if sys::now() >= until {
                restore_signals(&mask);
                return Err(BrokerFailure::Busy);
            }
            let _ = rustix::thread::nanosleep(&Timespec { tv_sec: 0, tv_nsec: 20_000 });
        }
        Ok(Self { state, mask, deadline: now + LIMIT })
    }

    /// Asks the broker, and reads what matters from its answer and the descriptors that come with it. `read` returns `None` for a message
    /// that is no answer to this request. A session that has ended is opened again, once.
    pub(super) fn ask<T>(
        &self,
        request: &BorrowedMessage<'_>,
        with: &[BorrowedFd<'_>],
        read: impl FnOnce(BorrowedMessage<'_>, &mut Descriptors) -> Option<T>,
    ) -> Result<T, BrokerFailure> {
        self.be_open_now()?;
        let answer = match self.exchange(request, with) {
            Err(BrokerFailure::Absent) if self.session().is_none() && sys::now() < self.deadline => {
                self.state.retry_at.store(0, Ordering::Relaxed);
                self.be_open_now()?;
                self.exchange(request, with)
            }
            other => other,
        };
        self.read(answer?, read)
    }

    /// Asks in the present session.
    fn ask_here<T>(
        &self,
        request: &BorrowedMessage<'_>,
        with: &[BorrowedFd<'_>],
        read: impl FnOnce(BorrowedMessage<'_>, &mut Descriptors) -> Option<T>,
    ) -> Result<T, BrokerFailure> {
        let answer = self.exchange(request, with)?;
        self.read(answer, read)
    }

    /// Reads an answer. A session that gives another one is given up.
    fn read<T>(
        &self,
        mut answer: Answer,
        read: impl FnOnce(BorrowedMessage<'_>, &mut Descriptors) -> Option<T>,
    ) -> Result<T, BrokerFailure> {
        match answer.parts().and_then(|(message, fds)| read(message, fds)) {
            Some(read) => Ok(read),
            None => {
                self.lose();
                Err(BrokerFailure::Absent)
            }
        }
    }

    /// Sends a message that has no answer, if there is a session.
    pub(super) fn tell(&self, message: &BorrowedMessage<'_>) {
        if let Some(session) = self.session()
            && let Some(bytes) = wire::encode_into(self.next_request(), message, &mut [0; LONGEST_REQUEST])
            && packets::try_send(session, bytes, &[]).is_err()
        {
            self.lose();
        }
    }

    /// Whether there is a session, and its end has not come. Opens one if `open` and it is time to.
    pub(super) fn look(&self, open: bool) {
        match self.session() {
            Some(session) if is_quiet(session) => return,
            Some(_) => self.lose(),
            // Our parent's session tells as well whether the broker is there.
            None if !self.has_ancestors() => memory::forget(),
            None => {}
        }
        if open {
            let _ = self.be_open();
        }
    }

    /// This process' session, if it has one.
    fn session(&self) -> Option<BorrowedFd<'static>> {
        let fd = self.state.session.load(Ordering::Relaxed).checked_sub(1)?.cast_signed();
        let session = sys::borrow(fd);
        let process = self.state.process.load(Ordering::Relaxed);
        let ours = process == process::kernel_pid()
            && sockopt::socket_cookie(session) == Ok(self.state.cookie.load(Ordering::Relaxed));
        if !ours {
            // The program has closed it past us. The number may be another descriptor by now, which must stay open.
            self.state.session.store(0, Ordering::Relaxed);
            leave(fd);
            memory::forget();
            return None;
        }
        Some(session)
    }

    pub(super) fn be_open(&self) -> Result<(), BrokerFailure> {
        if self.session().is_some() {
            return Ok(());
        }
        let now = sys::now();
        if nanos(now) < self.state.retry_at.load(Ordering::Relaxed) {
            return Err(BrokerFailure::Absent);
        }
        let result = self.open();
        match result {
            Ok(()) => {
                self.state.patience.store(0, Ordering::Relaxed);
                self.publish_again();
                self.reclaim();
            }
            Err(failure) => {
                self.lose();
                // Unless it was silent, which was seen to.
                if nanos(sys::now()) >= self.state.retry_at.load(Ordering::Relaxed) {
                    self.leave_alone(match failure {
                        // A policy that is corrected takes effect soon, without a restart of the program.
                        BrokerFailure::Absent | BrokerFailure::Refused(Refusal::Denied) => ABSENT,
                        _ => SILENT,
                    });
                }
                log!("no session with a broker: {failure:?}");
                if failure == BrokerFailure::Refused(Refusal::Denied) {
                    self.log_remedy();
                }
            }
        }
        result
    }

    /// Lets the next attempt come at once.
    #[cfg(test)]
    pub(super) fn retry_now(&self) {
        self.state.retry_at.store(0, Ordering::Relaxed);
    }

    /// Logs the policy change that would let this program join.
    fn log_remedy(&self) {
        let settings = settings::get();
        let user = rustix::process::geteuid().as_raw();
        match settings.domain_of(user) {
            Some(domain) => log!(
                "to let it join, add to the broker's policy a [[join]] rule with domain = \"{domain}\" and users = [{user}]"
            ),
            None => log!(
                "to let it join, add to the broker's policy a [[join]] rule with domain = \"{}-*\" and users = [{user}]",
                DefaultName::stem(&settings.program)
            ),
        }
    }

    /// Like [`be_open`](Self::be_open), for a connection. A policy that does not let this program join says nothing about the connection,
    /// which may have a ring once the policy changes. Until then, the broker counts as absent.
    fn be_open_now(&self) -> Result<(), BrokerFailure> {
        self.be_open().map_err(|failure| match failure {
            BrokerFailure::Refused(Refusal::Denied) => BrokerFailure::Absent,
            other => other,
        })
    }

    /// Does not try the broker again for a while, and for longer each time.
    fn leave_alone(&self, (first, most): (Duration, Duration)) {
        let before = Duration::from_nanos(self.state.patience.load(Ordering::Relaxed));
        let patience = (before * 2).clamp(first, most);
        self.state.patience.store(nanos(patience), Ordering::Relaxed);
        self.state.retry_at.store(nanos(sys::now() + patience), Ordering::Relaxed);
    }

    /// Opens a session as the configured domain. If there is none for this user, or another user has that domain (as for the workers of a
    /// server that changes its user), opens one as a domain of this process.
    fn open(&self) -> Result<(), BrokerFailure> {
        let settings = settings::get();
        let own = DefaultName::new(&settings.program, process::kernel_pid());
        let user = rustix::process::geteuid().as_raw();
        let Some(domain) = settings.domain_of(user) else { return self.open_as(own.as_bytes()) };
        match self.open_as(domain.as_bytes()) {
            Err(BrokerFailure::Refused(Refusal::NameTaken)) => {
                self.lose();
                self.open_as(own.as_bytes())
            }
            other => other,
        }
    }

    /// Connects, joins, and maps the directory.
    fn open_as(&self, name: &[u8]) -> Result<(), BrokerFailure> {
        let socket = connect()?;
        let cookie = sockopt::socket_cookie(&socket).map_err(|_| BrokerFailure::Absent)?;
        let fd = hidden::keep(socket);
        self.state.process.store(process::kernel_pid(), Ordering::Relaxed);
        self.state.cookie.store(cookie, Ordering::Relaxed);
        self.state.session.store(fd.cast_unsigned() + 1, Ordering::Relaxed);
        for key in &self.state.keys {
            key.store(0, Ordering::Relaxed);
        }
        // A name that is too long, or no text, is refused, and not cut to another process's name.
        let name = name.get(..name.len().min(200)).unwrap_or_default();
        let name = str::from_utf8(name).map_err(|_| BrokerFailure::Refused(Refusal::NameInvalid))?;
        let join = BorrowedMessage::Join { version: VERSION, name };
        self.ask_here(&join, &[], |answer, _| matches!(answer, BorrowedMessage::Joined { .. }).then_some(()))?;
        let memory = self.ask_here(&BorrowedMessage::Directory {}, &[], |answer, [memory, word]| match answer {
            BorrowedMessage::DirectoryIs { base, .. } => Some(memory.take().map(|memory| (memory, base, word.take()))),
            _ => None,
        })?;
        // There is no directory, for want of descriptors here, or it is unreadable: not worth asking soon.
        let useless = BrokerFailure::Refused(Refusal::OutOfResources);
        let (memory, base, word) = memory.ok_or(useless)?;
        memory::map(&memory, base, word.as_ref()).map_err(|_| useless)?;
        enter(fd);
        log!("joined the broker");
        Ok(())
    }

    /// Sends a request and waits for its answer, until the deadline of this turn. A refusal is a failure.
    fn exchange(&self, request: &BorrowedMessage<'_>, with: &[BorrowedFd<'_>]) -> Result<Answer, BrokerFailure> {
        let session = self.session().ok_or(BrokerFailure::Absent)?;
        let number = self.next_request();
        let mut memory = [0; LONGEST_REQUEST];
        let bytes = wire::encode_into(number, request, &mut memory).ok_or(BrokerFailure::Refused(Refusal::Protocol))?;
        if let Err(error) = packets::try_send(session, bytes, with) {
            log!("the broker's session failed: {error}");
            let farewell = Answer::receive(session).ok().flatten();
            self.lose();
            return Err(farewell.map_or(BrokerFailure::Absent, |answer| ended(request, &answer)));
        }
        loop {
            match Answer::receive(session) {
                Ok(Some(answer)) => match answer.message() {
                    Some((of, BorrowedMessage::Refused { code, reason })) if of == number => {
                        log!("the broker refused {}: {code}: {reason}", request.name());
                        return Err(BrokerFailure::Refused(code));
                    }
                    Some((of, _)) if of == number => return Ok(answer),
                    _ => {
                        self.lose();
                        return Err(ended(request, &answer));
                    }
                },
                Ok(None) => {
                    self.lose();
                    return Err(BrokerFailure::Absent);
                }
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(_) => {
                    self.lose();
                    return Err(BrokerFailure::Absent);
                }
            }
            if !wait(session, self.deadline) {
                log!("the broker did not answer in time");
                self.lose();
                self.leave_alone(SILENT);
                return Err(BrokerFailure::Absent);
            }
        }
    }

    fn next_request(&self) -> u32 {
        let number = self.state.request.load(Ordering::Relaxed).wrapping_add(1).max(1);
        self.state.request.store(number, Ordering::Relaxed);
        number
    }

    /// Gives the session up. The next session publishes its listeners again.
    fn lose(&self) {
        memory::forget();
        for announced in &self.state.announced {
            announced.store(0, Ordering::Relaxed);
        }
        let fd = self.state.session.swap(0, Ordering::Relaxed);
        if fd != 0 {
            leave((fd - 1).cast_signed());
            hidden::discard((fd - 1).cast_signed());
        }
    }

    /// This session's key of the listener in a slot.
    pub(super) fn key(&self, at: usize) -> Option<&'static AtomicU64> {
        self.state.keys.get(at)
    }

    /// Whether sessions of ancestor processes are still open. Ended sessions are closed.
    fn has_ancestors(&self) -> bool {
        let own = self.state.session.load(Ordering::Relaxed);
        let mut any = false;
        for place in &SESSIONS {
            let number = place.load(Ordering::Relaxed);
            let Some(fd) = number.checked_sub(1).map(u32::cast_signed).filter(|_| number != own) else { continue };
            if hidden::is(fd) && is_quiet(sys::borrow(fd)) {
                any = true;
            } else {
                place.store(0, Ordering::Relaxed);
                hidden::discard(fd);
            }
        }
        any
    }

    /// Tells the broker of the listeners that it does not know of: of those that we have inherited, if their session is gone.
    fn publish_again(&self) {
        let inherited_too = !self.has_ancestors();
        let me = process::kernel_pid();
        for (at, listener) in listeners::all() {
            let (Some(fd), Some(key)) = (listener.fd(), self.key(at)) else { continue };
            if sockopt::socket_cookie(sys::borrow(fd)) != Ok(listener.cookie()) {
                // Closed past us.
                listener.clear();
            } else if key.load(Ordering::Relaxed) == 0
                && (inherited_too || listener.process() == me)
                && let Ok(new) = self.publish(fd)
            {
                key.store(new, Ordering::Relaxed);
            }
        }
    }

    /// Tells the broker of the rings that are older than it.
    fn reclaim(&self) {
        let Some(broker) = memory::get().map(Directory::instance) else { return };
        let until = sys::now() + CLAIMS;
        each_claim(broker, &mut |claim| self.claim(claim) && sys::now() < until);
    }

    /// Tells the broker of one. `false` if there is no use in another.
    pub(super) fn claim(&self, claim: &ConnClaim) -> bool {
        let request = BorrowedMessage::ReclaimSocket {
            channel: claim.channel,
            side: if claim.role == Role::Accepting { Side::Accepting } else { Side::Connecting },
            region: RegionReference::own_memory(claim.geometry),
        };
        match self.ask_here(&request, &[claim.socket, claim.region], done) {
            // Refused, it is not listed, and all is well otherwise.
            Ok(_) | Err(BrokerFailure::Refused(_)) => true,
            Err(_) => false,
        }
    }

    /// Publishes a socket, or, if it does not listen, the addresses of its namespace. There is a session.
    pub(super) fn publish(&self, fd: c_int) -> Result<u64, BrokerFailure> {
        let here = addresses::Addresses::in_this_namespace();
        let publish = BorrowedMessage::Publish { addresses: here.field() };
        let (key, secret) = self.ask_here(&publish, &[sys::borrow(fd)], |answer, _| match answer {
            BorrowedMessage::Published { key, secret_low, secret_high } => {
                Some((key, OfferKey([secret_low, secret_high])))
            }
            _ => None,
        })?;
        if let Some(directory) = memory::get() {
            netns::learn_key(netns::cookie(fd), directory.instance(), secret);
        }
        Ok(key)
    }

    /// Notes that this session has published the addresses of a namespace; whether that is new.
    pub(super) fn announce(&self, netns: u64) -> bool {
        for place in &self.state.announced {
            match place.load(Ordering::Relaxed) {
                0 => {
                    place.store(netns, Ordering::Relaxed);
                    return true;
                }
                known if known == netns => return false,
                _ => {}
            }
        }
        // More than there is room for: the latest take the first place in turn.
        let at = netns as usize % NAMESPACES;
        self.state.announced[at].store(netns, Ordering::Relaxed);
        true
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        // EDGE turn: releases the session to the next turn; acquired in `Turn::take`.
        self.state.lock.store(0, Ordering::Release);
        restore_signals(&self.mask);
    }
}

/// The meaning of an unrequested message after which the session has ended: a refusal, or no message at all.
fn ended(request: &BorrowedMessage<'_>, farewell: &Answer) -> BrokerFailure {
    let Some((_, BorrowedMessage::Refused { code, reason })) = farewell.message() else { return BrokerFailure::Absent };
    log!("the broker ended the session: {code}: {reason}");
    match request {
        // It does not wait for a request from a user who may join under no name.
        BorrowedMessage::Join { .. } => BrokerFailure::Refused(code),
        _ => BrokerFailure::Absent,
    }
}

/// Reads an answer that says only that it was done.
pub(super) fn done(answer: BorrowedMessage<'_>, _: &mut Descriptors) -> Option<()> {
    matches!(answer, BorrowedMessage::Done {}).then_some(())
}

/// Whether a session was ever wanted in this process, and when the next attempt is due.
pub(super) fn may_be_open() -> bool {
    match state::peek() {
        None => true,
        Some(state) => {
            state.session.load(Ordering::Relaxed) != 0 || nanos(sys::now()) >= state.retry_at.load(Ordering::Relaxed)
        }
    }
}

/// Whether any namespace is announced already.
#[inline]
pub(super) fn has_announced() -> bool {
    state::peek().is_some_and(|state| state.announced[0].load(Ordering::Relaxed) != 0)
}

/// Whether a namespace is announced already, without a turn.
pub(super) fn is_announced(netns: u64) -> bool {
    state::peek().is_some_and(|state| state.announced.iter().any(|place| place.load(Ordering::Relaxed) == netns))
}

/// Notes a session of this process. Where there is no room, the oldest goes.
fn enter(fd: c_int) {
    let free = SESSIONS.iter().find(|place| place.load(Ordering::Relaxed) == 0).unwrap_or(&SESSIONS[0]);
    let before = free.swap(fd.cast_unsigned() + 1, Ordering::Relaxed);
    if let Some(oldest) = before.checked_sub(1) {
        hidden::discard(oldest.cast_signed());
    }
}

/// Forgets a session of this process.
fn leave(fd: c_int) {
    for place in &SESSIONS {
        let _ = place.compare_exchange(fd.cast_unsigned() + 1, 0, Ordering::Relaxed, Ordering::Relaxed);
    }
}

/// Whether nothing has come over a session: no answer is due, so that anything is the end of it, or the broker's goodbye.
fn is_quiet(session: BorrowedFd<'_>) -> bool {
    let flags = rustix::net::RecvFlags::PEEK | rustix::net::RecvFlags::DONTWAIT;
    matches!(rustix::net::recv(session, &mut [0u8; 1], flags), Err(Errno::AGAIN | Errno::INTR))
}

fn connect() -> Result<rustix::fd::OwnedFd, BrokerFailure> {
    for path in &settings::get().sockets {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
            .map_err(|_| BrokerFailure::Absent)?;
        let Ok(address) = SocketAddrUnix::new(path.as_slice()) else { continue };
        // Not blocking: a broker whose queue is full is as good as none.
        if rustix::net::connect(&socket, &address).is_ok() {
            return Ok(socket);
        }
    }
    Err(BrokerFailure::Absent)
}

/// Waits until there is something to receive; `false` if that was not before `deadline`.
fn wait(fd: BorrowedFd<'_>, deadline: Duration) -> bool {
    loop {
        let left = deadline.saturating_sub(sys::now());
        if left.is_zero() {
            return false;
        }
        let seconds = i64::try_from(left.as_secs()).unwrap_or(0);
        let timeout = Timespec { tv_sec: seconds, tv_nsec: i64::from(left.subsec_nanos()) };
        match rustix::event::poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&timeout)) {
            Ok(0) | Err(Errno::INTR) => {}
            _ => return true,
        }
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn block_signals() -> MaybeUninit<libc::sigset_t> {
    let mut all = MaybeUninit::<libc::sigset_t>::uninit();
    let mut before = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: `sigfillset` initialises `all`, and `pthread_sigmask` reads it and initialises `before`; neither fails with
    // these arguments.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
    }
    before
}

fn restore_signals(before: &MaybeUninit<libc::sigset_t>) {
    // SAFETY: `before` was initialised by `block_signals`.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut()) };
}
