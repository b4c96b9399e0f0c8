//! Requests to the broker, and never long: what does not answer in time is left alone for a while.
//!
//! ```text
//!   none --(first listen or connect)--> open: connect, Join, Directory, map, publish again what was published
//!    ^                                    |
//!    +---- not before `retry_at` <--------+ refused, absent, silent, gone
//! ```
//!
//! How a session opens is in [`super::opening`].
#![expect(unsafe_code, reason = "blocks signals while it holds the lock")]

use super::claim::ConnClaim;
use super::memory;
use super::packet::{Answer, Descriptors, LONGEST_REQUEST};
use super::repair_mode::end_repair_mode;
use super::state::{self, NAMESPACES, State};
use crate::log::log;
use crate::{hidden, process, sys};
use partywall_protocol::wire::{self, BorrowedMessage, Refusal, RegionReference, Side};
use partywall_region::packet as packets;
use partywall_shm::status::Role;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use rustix::net::sockopt;
use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// The longest that one call of the program waits for the broker, all told. A broker that is there answers in less than a
/// millisecond, unless the machine has much else to do; a listener that gave it up then would stay unknown to all who connect.
/// (Tests run on machines that are busier.)
pub(super) const LIMIT: Duration = Duration::from_millis(if cfg!(test) { 5000 } else { 1000 });
/// The longest that one call waits until the broker has looked at a connection with a ring that is older than it. No other thread may use the
/// connection meanwhile (protocol T3.3). (Tests as above.)
const CLAIM: Duration = Duration::from_millis(if cfg!(test) { 5000 } else { 20 });
/// How long a thread waits for another one that speaks to the broker, if what it wants can be wanted again later.
pub(super) const BRIEF: Duration = Duration::from_millis(2);
/// How long the broker is left alone after it was found absent, at first and at most.
pub(super) const ABSENT: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));
/// The pauses after a broker that was silent or refused this process.
pub(super) const SILENT: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

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
    /// Another thread speaks to it, or it is behind with an earlier answer.
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
    pub(super) state: &'static State,
    mask: MaybeUninit<libc::sigset_t>,
    pub(super) begun: Duration,
    pub(super) deadline: Duration,
    /// The call waits for a session to open: it is wanted now or not at all, and this process has had none before.
    pub(super) is_patient: bool,
}

impl Turn {
    /// Waits for one's turn.
    pub(super) fn take(patience: Urgency) -> Result<Self, BrokerFailure> {
        Self::take_within(if patience == Urgency::Long { LIMIT } else { BRIEF }, patience)
    }

    /// Takes the turn unless another thread has it.
    pub(super) fn take_if_free() -> Result<Self, BrokerFailure> {
        Self::take_within(Duration::ZERO, Urgency::Brief)
    }

    fn take_within(longest: Duration, patience: Urgency) -> Result<Self, BrokerFailure> {
        // A child of `vfork` must not touch what is its parent's.
        if process::is_visitor() {
            return Err(BrokerFailure::Absent);
        }
        let state = state::get().ok_or(BrokerFailure::Absent)?;
        let mask = block_signals();
        let now = sys::now();
        let until = now + longest;
        // EDGE turn: acquires from the last turn.
        while state.lock.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_err() {
            if sys::now() >= until {
                restore_signals(&mask);
                return Err(BrokerFailure::Busy);
            }
            let _ = rustix::thread::nanosleep(&Timespec { tv_sec: 0, tv_nsec: 20_000 });
        }
        let is_first = state.sessions.load(Ordering::Relaxed) == 0;
        Ok(Self { state, mask, begun: now, deadline: now + LIMIT, is_patient: is_first && patience == Urgency::Long })
    }

    /// Asks the broker, and reads what matters from its answer and the descriptors that come with it. `read` returns `None` for a message
    /// that is no answer to this request. A session that has ended is opened again, once. A broker that is behind with an earlier answer is not
    /// asked now.
    pub(super) fn ask<T>(
        &self,
        request: &BorrowedMessage<'_>,
        with: &[BorrowedFd<'_>],
        read: impl FnOnce(BorrowedMessage<'_>, &mut Descriptors) -> Option<T>,
    ) -> Result<T, BrokerFailure> {
        let answer = self.answer(request, with)?;
        self.read(answer, read)
    }

    /// As [`Turn::ask`]. Returns the answer unread.
    pub(super) fn answer(
        &self,
        request: &BorrowedMessage<'_>,
        with: &[BorrowedFd<'_>],
    ) -> Result<Answer, BrokerFailure> {
        self.be_open_now()?;
        if self.is_behind() {
            return Err(BrokerFailure::Busy);
        }
        match self.exchange(self.deadline, request, with) {
            Err(BrokerFailure::Absent) if self.session().is_none() && sys::now() < self.deadline => {
                self.state.retry_at.store(0, Ordering::Relaxed);
                self.be_open_now()?;
                self.exchange(self.deadline, request, with)
            }
            other => other,
        }
    }

    /// Asks in the present session, with a separate deadline, whether the broker is behind or not.
    pub(super) fn ask_here_until<T>(
        &self,
        deadline: Duration,
        request: &BorrowedMessage<'_>,
        with: &[BorrowedFd<'_>],
        read: impl FnOnce(BorrowedMessage<'_>, &mut Descriptors) -> Option<T>,
    ) -> Result<T, BrokerFailure> {
        let answer = self.exchange(deadline, request, with)?;
        self.read(answer, read)
    }

    /// Reads an answer. A session that gives another one is given up.
    pub(super) fn read<T>(
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

    /// Sends a message that has no answer, if there is a session. Returns `false` if there is one, and it was not sent.
    pub(super) fn tell(&self, message: &BorrowedMessage<'_>) -> bool {
        let Some(session) = self.open_session() else { return true };
        let mut space = [0; LONGEST_REQUEST];
        let Some(bytes) = wire::encode_into(self.next_request(), message, &mut space) else { return false };
        let is_sent = packets::try_send(session, bytes, &[]).is_ok();
        if !is_sent {
            self.lose();
        }
        is_sent
    }

    /// Tells the broker of the channels, offers and takes whose end it could not be told when it came.
    pub(super) fn tell_owed(&self) {
        while self.open_session().is_some()
            && let Some(channel) = state::take_owed()
        {
            self.tell(&BorrowedMessage::Closed { channel });
        }
    }

    /// This process' session, if it has one. It may still be opening.
    pub(super) fn session(&self) -> Option<BorrowedFd<'static>> {
        let fd = self.state.session.load(Ordering::Relaxed).checked_sub(1)?.cast_signed();
        let session = sys::borrow(fd);
        let process = self.state.process.load(Ordering::Relaxed);
        let ours = process == process::kernel_pid()
            && sockopt::socket_cookie(session) == Ok(self.state.cookie.load(Ordering::Relaxed));
        if !ours {
            // The program has closed it past us. The number may be another descriptor by now, which must stay open.
            self.state.session.store(0, Ordering::Relaxed);
            self.forget_awaited();
            self.lose_late();
            leave(fd);
            memory::forget();
            return None;
        }
        Some(session)
    }

    /// This process' session, if it has one that requests can be sent in.
    pub(super) fn open_session(&self) -> Option<BorrowedFd<'static>> {
        self.session().filter(|_| !self.is_opening())
    }

    /// Lets the next attempt come at once.
    pub(super) fn retry_now(&self) {
        self.state.retry_at.store(0, Ordering::Relaxed);
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
    pub(super) fn leave_alone(&self, (first, most): (Duration, Duration)) {
        let before = Duration::from_nanos(self.state.patience.load(Ordering::Relaxed));
        let patience = (before * 2).clamp(first, most);
        self.state.patience.store(nanos(patience), Ordering::Relaxed);
        self.state.retry_at.store(nanos(sys::now() + patience), Ordering::Relaxed);
    }

    /// Sends a request and waits for its answer until then. A refusal is a failure. A broker that takes long counts as slow for a while.
    fn exchange(
        &self,
        deadline: Duration,
        request: &BorrowedMessage<'_>,
        with: &[BorrowedFd<'_>],
    ) -> Result<Answer, BrokerFailure> {
        let sent = sys::now();
        let answer = self.answer_to(deadline, request, with);
        if sys::now() > sent + BRIEF {
            self.note_slow();
        }
        answer
    }

    fn answer_to(
        &self,
        deadline: Duration,
        request: &BorrowedMessage<'_>,
        with: &[BorrowedFd<'_>],
    ) -> Result<Answer, BrokerFailure> {
        let session = self.open_session().ok_or(BrokerFailure::Absent)?;
        let number = self.send(session, request, with)?;
        self.await_answer(number, deadline, request.name())?.ok_or_else(|| self.give_up_silent())
    }

    /// Waits until then for the answer to the request with this number and name. A refusal is a failure. `None` if no answer has come.
    pub(super) fn await_answer(
        &self,
        number: u32,
        deadline: Duration,
        name: &str,
    ) -> Result<Option<Answer>, BrokerFailure> {
        loop {
            let session = self.open_session().ok_or(BrokerFailure::Absent)?;
            match self.receive(session, number, name)? {
                Received::Answer(answer) => return Ok(Some(answer)),
                Received::Refusal(code) => return Err(BrokerFailure::Refused(code)),
                Received::Other => {}
                Received::Nothing if wait(session, deadline) => {}
                Received::Nothing => return Ok(None),
            }
        }
    }

    /// Sends a request, and returns its number. A session that does not take it is given up.
    pub(super) fn send(
        &self,
        session: BorrowedFd<'_>,
        request: &BorrowedMessage<'_>,
        with: &[BorrowedFd<'_>],
    ) -> Result<u32, BrokerFailure> {
        let number = self.next_request();
        let mut memory = [0; LONGEST_REQUEST];
        let bytes = wire::encode_into(number, request, &mut memory).ok_or(BrokerFailure::Refused(Refusal::Protocol))?;
        if let Err(error) = packets::try_send(session, bytes, with) {
            log!("the broker's session failed: {error}");
            let farewell = Answer::receive(session).ok().flatten();
            self.lose();
            let joins = matches!(request, BorrowedMessage::Join { .. });
            return Err(farewell.map_or(BrokerFailure::Absent, |answer| ended(joins, &answer)));
        }
        Ok(number)
    }

    /// Takes the next packet out of the session, without waiting: the answer to the request with this number and name, or one that an earlier
    /// call has left to later ones, which is dealt with here. A session that brings anything else is given up.
    pub(super) fn receive(&self, session: BorrowedFd<'_>, number: u32, name: &str) -> Result<Received, BrokerFailure> {
        let mut answer = match Answer::receive(session) {
            Ok(Some(answer)) => answer,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(Received::Nothing),
            Ok(None) | Err(_) => {
                self.lose();
                return Err(BrokerFailure::Absent);
            }
        };
        let of = answer.message().map(|(of, _)| of).filter(|of| *of != 0);
        if of == Some(number) {
            if let Some((_, BorrowedMessage::Refused { code, reason })) = answer.message() {
                log!("the broker refused {name}: {code}: {reason}");
                return Ok(Received::Refusal(code));
            }
            return Ok(Received::Answer(answer));
        }
        if let Some(of) = of
            && (self.awaited() == Some(of) && self.settle(&mut answer) || self.settle_late(of, &mut answer))
        {
            return Ok(Received::Other);
        }
        let joins = self.is_joining();
        self.lose();
        Err(ended(joins, &answer))
    }

    /// Gives up a session that has not answered in time.
    pub(super) fn give_up_silent(&self) -> BrokerFailure {
        log!("the broker did not answer in time");
        self.lose();
        self.leave_alone(SILENT);
        BrokerFailure::Absent
    }

    fn next_request(&self) -> u32 {
        let number = self.state.request.load(Ordering::Relaxed).wrapping_add(1).max(1);
        self.state.request.store(number, Ordering::Relaxed);
        number
    }

    /// Gives the session up. The next session publishes its listeners again.
    pub(super) fn lose(&self) {
        memory::forget();
        self.forget_awaited();
        self.lose_late();
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
    pub(super) fn has_ancestors(&self) -> bool {
        let own = self.state.session.load(Ordering::Relaxed);
        let mut any = false;
        for place in &SESSIONS {
            let number = place.load(Ordering::Relaxed);
            let Some(fd) = number.checked_sub(1).map(u32::cast_signed).filter(|_| number != own) else { continue };
            // An answer that its process has not taken yet does not end it.
            if hidden::is(fd) && !packets::has_hung_up(sys::borrow(fd)) {
                any = true;
            } else {
                place.store(0, Ordering::Relaxed);
                hidden::discard(fd);
            }
        }
        any
    }

    /// Tells the broker of a ring that is older than it. `false` if there is no use in another.
    pub(super) fn claim(&self, claim: &ConnClaim) -> bool {
        let request = BorrowedMessage::ReclaimSocket {
            channel: claim.channel,
            side: if claim.role == Role::Accepting { Side::Accepting } else { Side::Connecting },
            region: RegionReference::own_memory(claim.geometry),
        };
        let deadline = self.deadline.min(sys::now() + CLAIM);
        match self.ask_here_until(deadline, &request, &[claim.socket, claim.region], done) {
            // Refused, it is not listed, and all is well otherwise.
            Ok(_) | Err(BrokerFailure::Refused(_)) => true,
            Err(_) => {
                // The step is not repeated here (protocol T3.8).
                end_repair_mode(claim.socket, deadline);
                false
            }
        }
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

/// What a session has brought.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "nothing here allocates")]
pub(super) enum Received {
    /// The answer to the request.
    Answer(Answer),
    /// The request is refused.
    Refusal(Refusal),
    /// The answer to an earlier request, which was dealt with.
    Other,
    /// Nothing yet.
    Nothing,
}

impl Drop for Turn {
    fn drop(&mut self) {
        // EDGE turn: releases the session to the next turn; acquired in `Turn::take`.
        self.state.lock.store(0, Ordering::Release);
        restore_signals(&self.mask);
    }
}

/// The meaning of an unrequested message after which the session has ended: a refusal, or no message at all. `joins`: the request was a
/// `Join`.
fn ended(joins: bool, farewell: &Answer) -> BrokerFailure {
    let Some((_, BorrowedMessage::Refused { code, reason })) = farewell.message() else { return BrokerFailure::Absent };
    log!("the broker ended the session: {code}: {reason}");
    // It does not wait for a request from a user who may join under no name.
    if joins { BrokerFailure::Refused(code) } else { BrokerFailure::Absent }
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
pub(super) fn enter(fd: c_int) {
    if enter_if_room(fd) {
        return;
    }
    let before = SESSIONS[0].swap(fd.cast_unsigned() + 1, Ordering::Relaxed);
    if let Some(oldest) = before.checked_sub(1) {
        hidden::discard(oldest.cast_signed());
    }
}

/// Notes a session of this process, if there is room; whether it is noted.
pub(super) fn enter_if_room(fd: c_int) -> bool {
    let number = fd.cast_unsigned() + 1;
    let has = |wanted: u32| SESSIONS.iter().find(|place| place.load(Ordering::Relaxed) == wanted);
    if has(number).is_some() {
        return true;
    }
    has(0).is_some_and(|free| {
        free.store(number, Ordering::Relaxed);
        true
    })
}

/// Forgets a session of this process.
fn leave(fd: c_int) {
    for place in &SESSIONS {
        let _ = place.compare_exchange(fd.cast_unsigned() + 1, 0, Ordering::Relaxed, Ordering::Relaxed);
    }
}

/// Whether nothing has come over a session: no late answer, no end, and no goodbye of the broker.
pub(super) fn is_quiet(session: BorrowedFd<'_>) -> bool {
    let flags = rustix::net::RecvFlags::PEEK | rustix::net::RecvFlags::DONTWAIT;
    matches!(rustix::net::recv(session, &mut [0u8; 1], flags), Err(Errno::AGAIN | Errno::INTR))
}

/// Waits until there is something to receive; `false` if that was not before `deadline`.
pub(super) fn wait(fd: BorrowedFd<'_>, deadline: Duration) -> bool {
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

pub(super) fn nanos(time: Duration) -> u64 {
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
