//! The session of a domain, as all threads of its channels use it.
//!
//! Threads make requests and wait for their answers independently: a `Connect` to another host may be answered seconds later (protocol H4),
//! and the answer to another request comes before it. All threads may send at any time, and look for messages without waiting for the
//! broker. The thread that looks receives everything in the socket, and files each message for the channel or the request that it belongs
//! to. Of the threads that wait, one watches the socket. The others sleep until their answers are filed, or until it is their turn to watch.
//!
//! A message without an answer never waits for the broker. If the socket is full, the message is kept, and the keeper sends it as soon as there
//! is room.
//!
//! ```text
//!   socket of the session --> file() --> answers   by number of the request
//!                                   \-> mailboxes by channel and side: the peer's region, and its next rings
//! ```

use crate::arrivals::FurtherMail;
use crate::keeper::HangUpWatch;
use crate::session::{BrokerSession, PATIENCE, whole};
use crate::{Error, Result};
pub(crate) use mailbox::{Mail, Mailbox, Parcel};
use partywall_protocol::wire::{Message, Side};
use partywall_region::Link;
use places::RequestPlaces;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::Thread;
use std::time::{Duration, Instant};

mod mailbox;
mod places;

/// Rings that wait in a mailbox (protocol A4). They are descriptors; only those that are about to be used are mapped.
pub(crate) const MOST_RINGS: usize = 8;

/// Requests for connections that wait for their answers. Each may take as long as a gateway does (protocol H4.3).
const CONNECTS_AT_ONCE: usize = 64;

/// Other requests that wait for their answers. Together with the connections, their answers fit into the session's socket: the broker ends a
/// session whose socket is full (protocol C12).
const REQUESTS_AT_ONCE: usize = 32;

/// The longest that a thread waits before it looks again whether another thread has filed its answer. In this crate's tests it is longer than
/// any request may take, so that a wake-up that is lost fails them.
const LOOK: Duration = if cfg!(test) { Duration::from_secs(3600) } else { Duration::from_millis(100) };

/// The same for a thread that cannot wait for the broker's socket, because the process has no descriptors left.
const SHORT_LOOK: Duration = Duration::from_millis(1);

/// An end of a channel: the channel's number and the side.
pub(crate) type EndId = (u64, Side);

/// A request whose answer is asked for later.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ticket {
    request: u32,
    /// The session of the domain that it was sent on. A new broker does not know requests of earlier sessions.
    session: u64,
}

type Answer = Result<(Message, Vec<OwnedFd>)>;

#[derive(Debug)]
struct DeskState {
    /// The keeper's watch of the session's socket. Dropped before the socket is closed.
    watch: Option<HangUpWatch>,
    session: BrokerSession,
    /// Counts the domain's sessions.
    number: u64,
    last_request: u32,
    /// Requests whose answers are wanted, and the answers that have come.
    answers: HashMap<u32, Option<Answer>>,
    mailboxes: HashMap<EndId, Mailbox>,
    /// Links that are rung when the answer to a request comes, and hung up if it is a refusal or does not come.
    bells: HashMap<u32, Link>,
    /// Messages without an answer that could not be sent yet, because the broker was away or did not read, in their order.
    untold: VecDeque<Message>,
    /// The keeper sends them when the socket has room.
    awaits_room: bool,
    /// A thread watches the socket.
    is_watched: bool,
    /// Threads that sleep until the answers to their requests are filed, or until one of them is to watch the socket.
    sleepers: HashMap<u32, Thread>,
}

/// A session that threads share.
#[derive(Debug)]
pub(crate) struct SessionDesk {
    connects: RequestPlaces,
    requests: RequestPlaces,
    state: Mutex<DeskState>,
    /// Signalled when another thread has filed an answer: the thread that watches the socket may sleep there, and the socket is empty then.
    filed: OwnedFd,
}

/// The part of a thread that waits for an answer.
enum WaitingPart<'a> {
    /// It watches the socket, until this is dropped.
    Watcher(SocketWatch<'a>),
    /// It sleeps until it is woken.
    Sleeper,
    /// The answer is there.
    Served,
}

/// Watching the socket. When it ends, another thread is woken to watch.
struct SocketWatch<'a>(&'a SessionDesk);

impl Ticket {
    /// The number of the session that the request was sent on.
    pub(crate) fn session(self) -> u64 {
        self.session
    }
}

impl Drop for SocketWatch<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.is_watched = false;
        state.wake_next();
    }
}

impl SessionDesk {
    pub(crate) fn new(session: BrokerSession) -> Result<Self> {
        let filed = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| Error::system("make an event", e))?;
        let state = DeskState {
            watch: None,
            session,
            number: 1,
            // The session has made one request, to join.
            last_request: 1,
            answers: HashMap::new(),
            mailboxes: HashMap::new(),
            bells: HashMap::new(),
            untold: VecDeque::new(),
            awaits_room: false,
            is_watched: false,
            sleepers: HashMap::new(),
        };
        let (connects, requests) = (RequestPlaces::new(CONNECTS_AT_ONCE), RequestPlaces::new(REQUESTS_AT_ONCE));
        Ok(Self { connects, requests, state: Mutex::new(state), filed })
    }

    /// Held for as long as it takes to file what has come, or to send without waiting.
    fn state(&self) -> MutexGuard<'_, DeskState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a request and waits for its answer, at most [`PATIENCE`]; a refusal is an error.
    pub(crate) fn request(&self, message: &Message, fds: &[BorrowedFd<'_>]) -> Answer {
        self.request_within(PATIENCE, message, fds)
    }

    /// Makes a request that takes longer than the broker's own work: a virtual machine has to answer.
    pub(crate) fn request_within(&self, limit: Duration, message: &Message, fds: &[BorrowedFd<'_>]) -> Answer {
        self.exchange(limit, message, fds).map(|(_, answer)| answer)
    }

    /// As [`Self::request`]. The ticket says which session has answered ([`Self::is_current`]).
    pub(crate) fn request_with_ticket(
        &self,
        message: &Message,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(Ticket, (Message, Vec<OwnedFd>))> {
        self.exchange(PATIENCE, message, fds)
    }

    fn exchange(
        &self,
        limit: Duration,
        message: &Message,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(Ticket, (Message, Vec<OwnedFd>))> {
        let places = match message {
            Message::Connect { .. } | Message::ConnectFor { .. } => &self.connects,
            _ => &self.requests,
        };
        self.exchange_by(places, limit, || self.ask(message, fds))
    }

    /// As [`Self::request`], by a closure that asks without waiting ([`Self::ask`]), or fails.
    pub(crate) fn request_by(&self, ask: impl FnMut() -> Result<Ticket>) -> Answer {
        self.exchange_by(&self.requests, PATIENCE, ask).map(|(_, answer)| answer)
    }

    fn exchange_by(
        &self,
        places: &RequestPlaces,
        limit: Duration,
        mut ask: impl FnMut() -> Result<Ticket>,
    ) -> Result<(Ticket, (Message, Vec<OwnedFd>))> {
        let deadline = Instant::now() + limit;
        let _place = places.take(deadline).ok_or(Error::TimedOut)?;
        let ticket = loop {
            match ask() {
                Err(Error::WouldBlock) if Instant::now() < deadline => self.await_room(deadline)?,
                Err(Error::WouldBlock) => return Err(Error::TimedOut),
                other => break other?,
            }
        };
        let answer = self.await_answer(ticket, deadline);
        self.forget(ticket);
        answer.map(|answer| (ticket, answer))
    }

    /// The thread that made a request waits for its answer no more.
    pub(crate) fn forget(&self, ticket: Ticket) {
        let mut state = self.state();
        if state.number == ticket.session {
            state.sleepers.remove(&ticket.request);
            // It may have come after the last look.
            if let Some(Some(Ok((unheard, _fds)))) = state.answers.remove(&ticket.request) {
                state.give_back(&unheard);
            }
        }
        // This thread may have been woken to watch, and needs to no more.
        state.wake_next();
    }

    fn await_answer(&self, ticket: Ticket, deadline: Instant) -> Answer {
        loop {
            if let Some(answer) = self.answer(ticket) {
                return answer;
            }
            if Instant::now() >= deadline {
                return Err(Error::TimedOut);
            }
            match self.part(ticket) {
                WaitingPart::Watcher(_watch) => loop {
                    self.watch(deadline)?;
                    if let Some(answer) = self.answer(ticket) {
                        return answer;
                    }
                    if Instant::now() >= deadline {
                        return Err(Error::TimedOut);
                    }
                },
                WaitingPart::Sleeper => {
                    std::thread::park_timeout(deadline.saturating_duration_since(Instant::now()).min(LOOK));
                }
                WaitingPart::Served => {}
            }
        }
    }

    /// Decides whether the thread that waits for an answer watches the socket.
    fn part(&self, ticket: Ticket) -> WaitingPart<'_> {
        let mut state = self.state();
        let is_awaited = state.number == ticket.session && matches!(state.answers.get(&ticket.request), Some(None));
        if !is_awaited {
            return WaitingPart::Served;
        }
        if state.is_watched {
            state.sleepers.insert(ticket.request, std::thread::current());
            return WaitingPart::Sleeper;
        }
        state.sleepers.remove(&ticket.request);
        state.is_watched = true;
        WaitingPart::Watcher(SocketWatch(self))
    }

    /// Sleeps until there may be news in the socket, or another thread has filed an answer.
    fn watch(&self, deadline: Instant) -> Result<()> {
        let socket = self.socket();
        let mut fds = vec![PollFd::new(&self.filed, PollFlags::IN)];
        fds.extend(socket.as_ref().map(|socket| PollFd::new(socket, PollFlags::IN)));
        sleep_on(&mut fds, deadline, socket.is_some())?;
        let _ = rustix::io::read(&self.filed, &mut [0; 8]);
        Ok(())
    }

    /// Sleeps until the socket may have room.
    fn await_room(&self, deadline: Instant) -> Result<()> {
        let socket = self.socket();
        let mut fds: Vec<_> = socket.iter().map(|socket| PollFd::new(socket, PollFlags::OUT)).collect();
        sleep_on(&mut fds, deadline, socket.is_some())
    }

    /// A copy of the socket, because another thread may open another session meanwhile. A process without free descriptors gets none, and looks
    /// again soon: to fail would leave a request whose answer is never heard.
    fn socket(&self) -> Option<OwnedFd> {
        self.state().session.as_fd().try_clone_to_owned().ok()
    }

    /// Makes a request without waiting, not even for room: [`Error::WouldBlock`] if the broker does not read.
    pub(crate) fn ask(&self, message: &Message, fds: &[BorrowedFd<'_>]) -> Result<Ticket> {
        let mut state = self.state();
        state.tell_untold();
        state.last_request = state.last_request.wrapping_add(1).max(1);
        let request = state.last_request;
        match state.session.try_post(request, message, fds) {
            Ok(()) => {}
            Err(Error::WouldBlock) => return Err(Error::WouldBlock),
            // It has gone, and may have said why.
            Err(e) => return Err(state.last_words().unwrap_or(e)),
        }
        state.answers.insert(request, None);
        Ok(Ticket { request, session: state.number })
    }

    /// Whether the session that a request was sent on is still in use: a broker that has come again knows nothing of it.
    pub(crate) fn is_current(&self, ticket: Ticket) -> bool {
        self.is_session(ticket.session)
    }

    /// Whether the session of this number is still in use.
    pub(crate) fn is_session(&self, number: u64) -> bool {
        self.state().number == number
    }

    /// The answer to a request, if it has come; a refusal is an error, and so is the end of the session.
    pub(crate) fn answer(&self, ticket: Ticket) -> Option<Answer> {
        let mut state = self.state();
        if state.number != ticket.session {
            return Some(Err(Error::system(
                "talk to the broker",
                std::io::Error::from(std::io::ErrorKind::BrokenPipe),
            )));
        }
        let others = state.file(Some(ticket.request));
        let answer = match state.answers.get(&ticket.request) {
            Some(Some(_)) => state.answers.remove(&ticket.request).flatten(),
            Some(None) => None,
            None => Some(Err(Error::TimedOut)),
        };
        drop(state);
        self.wake(others);
        answer
    }

    /// Has the thread that files the answer to a request ring a link, or hang it up if the broker refuses or goes away. `false` if the answer
    /// has come.
    pub(crate) fn ring_when_answered(&self, ticket: Ticket, link: Link) -> bool {
        let mut state = self.state();
        let is_awaited = state.number == ticket.session && matches!(state.answers.get(&ticket.request), Some(None));
        if is_awaited {
            state.bells.insert(ticket.request, link);
        }
        is_awaited
    }

    /// Requests whose answers are wanted, and answers that were not taken.
    #[cfg(test)]
    pub(crate) fn kept_answers(&self) -> usize {
        self.state().answers.len()
    }

    /// Forgets the link of a request.
    pub(crate) fn forget_bell(&self, ticket: Ticket) {
        let mut state = self.state();
        // Requests of another session have the same numbers.
        if state.number == ticket.session {
            state.bells.remove(&ticket.request);
        }
    }

    /// Files what has come, for threads that do not look by themselves.
    pub(crate) fn file_news(&self) {
        let others = self.state().file(None);
        self.wake(others);
    }

    /// Sends what has no answer, without waiting. A `Closed` that cannot be sent now is sent later.
    pub(crate) fn close(&self, channel: u64) {
        self.tell(Message::Closed { channel });
    }

    /// Sends a message without an answer, now or as soon as the broker reads.
    pub(crate) fn tell(&self, message: Message) {
        self.state().tell(message);
    }

    /// Sends messages without an answer for which there was no room.
    pub(crate) fn tell_untold(&self) {
        self.state().tell_untold();
    }

    /// Has the keeper watch the session. When it ends, the keeper calls `ended` once. When there may be room for messages without an answer, the
    /// keeper calls `room`, which calls [`Self::tell_untold`].
    pub(crate) fn watch_session(
        &self,
        ended: impl FnOnce() + Send + 'static,
        room: impl Fn() + Send + Sync + 'static,
    ) -> Result<()> {
        // Locked until the watch is stored: `ended` may be called at once, and the watch of the next session must be stored after this one.
        let mut state = self.state();
        let watch = HangUpWatch::session(state.session.as_fd(), ended, room)?;
        state.watch = Some(watch);
        // The socket may have been full before there was a watch.
        state.awaits_room = false;
        state.tell_untold();
        Ok(())
    }

    /// Opens the mailbox of an end.
    pub(crate) fn open(&self, end: EndId) {
        self.state().mailboxes.entry(end).or_default();
    }

    /// Closes a mailbox.
    pub(crate) fn shut(&self, end: EndId) {
        self.state().mailboxes.remove(&end);
    }

    /// The peer's region, if it has come.
    pub(crate) fn region(&self, end: EndId) -> Mail {
        self.look(end, Mailbox::take_region)
    }

    /// The peer's next ring, if it has come.
    pub(crate) fn ring(&self, end: EndId) -> Mail {
        self.look(end, Mailbox::take_ring)
    }

    /// The further regions of an end, after what lies in the socket has been filed; `None` if the end has no mailbox.
    pub(crate) fn further<T>(&self, end: EndId, with: impl FnOnce(&mut FurtherMail) -> T) -> Option<T> {
        let mut state = self.state();
        let others = state.file(None);
        let result = state.mailboxes.get_mut(&end).map(|mailbox| with(&mut mailbox.further));
        drop(state);
        self.wake(others);
        result
    }

    fn look(&self, end: EndId, take: impl FnOnce(&mut Mailbox) -> Mail) -> Mail {
        let mut state = self.state();
        let others = state.file(None);
        let mail = state.mailboxes.get_mut(&end).map_or(Mail::Nothing, take);
        drop(state);
        self.wake(others);
        mail
    }

    fn wake(&self, others: bool) {
        if others {
            // It fails only when the count is full, and then it is readable.
            let _ = rustix::io::write(&self.filed, &1u64.to_ne_bytes());
        }
    }

    /// The session's socket, for as long as `with` runs.
    pub(crate) fn with_socket<T>(&self, with: impl FnOnce(BorrowedFd<'_>) -> T) -> T {
        with(self.state().session.as_fd())
    }

    /// Continues with another session. Messages that have come on the old one are kept.
    pub(crate) fn replace(&self, mut session: BrokerSession) {
        let mut state = self.state();
        state.file(None);
        for (message, fds) in session.take_unasked() {
            state.deliver(message, fds);
        }
        (state.watch, state.awaits_room) = (None, false);
        state.session = session;
        state.number += 1;
        // The requests that are remembered, and those of the session's own, have different numbers.
        state.last_request = state.last_request.max(1 << 16);
        state.answers.clear();
        state.end_waits();
        state.tell_untold();
        drop(state);
        self.wake(true);
    }
}

/// Sleeps on some descriptors. Without the session's socket among them, only for a short time.
fn sleep_on(fds: &mut [PollFd<'_>], deadline: Instant, has_socket: bool) -> Result<()> {
    let longest = if has_socket { LOOK } else { SHORT_LOOK };
    let left = deadline.saturating_duration_since(Instant::now()).min(longest);
    let left = Timespec { tv_sec: left.as_secs().cast_signed(), tv_nsec: left.subsec_nanos().into() };
    match rustix::event::poll(fds, Some(&left)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(e) => Err(Error::system("wait for the broker", e)),
    }
}

impl DeskState {
    /// Wakes a thread to watch the socket, if none does.
    fn wake_next(&self) {
        if let Some(next) = self.sleepers.values().next().filter(|_| !self.is_watched) {
            next.unpark();
        }
    }

    fn tell(&mut self, message: Message) {
        self.untold.push_back(message);
        self.tell_untold();
    }

    /// Sends what has no answer, as far as the broker reads. The keeper goes on when there is room again. The next session gets what is left of a
    /// session that has ended.
    fn tell_untold(&mut self) {
        let mut is_full = false;
        while let Some(message) = self.untold.front() {
            if let Err(e) = self.session.try_post(0, message, &[]) {
                is_full = matches!(e, Error::WouldBlock);
                break;
            }
            self.untold.pop_front();
        }
        if is_full != self.awaits_room
            && let Some(watch) = &self.watch
        {
            watch.await_room(self.session.as_fd(), is_full);
            self.awaits_room = is_full;
        }
    }

    /// Takes out of the socket what is there. Whether there was an answer for another than `mine`.
    fn file(&mut self, mine: Option<u32>) -> bool {
        let mut others = false;
        loop {
            match self.session.try_receive_any() {
                Ok((0, message, fds)) => self.deliver(message, fds),
                Ok((request, message, fds)) => {
                    others |= mine != Some(request) && !self.sleepers.contains_key(&request);
                    self.settle(request, message, fds);
                }
                Err(Error::WouldBlock) => return others,
                Err(e) => return self.fail(&e) || others,
            }
        }
    }

    /// The reason that the broker gave for ending the session, if it gave one. Other messages before it are filed first: a ring among
    /// them may be in use already.
    fn last_words(&mut self) -> Option<Error> {
        loop {
            match self.session.try_receive_any() {
                Ok((0, Message::Refused { code, reason }, _)) => {
                    self.fail(&Error::Refused { code, reason: reason.clone() });
                    return Some(Error::Refused { code, reason });
                }
                Ok((0, message, fds)) => self.deliver(message, fds),
                Ok((request, message, fds)) => self.settle(request, message, fds),
                Err(_) => return None,
            }
        }
    }

    fn settle(&mut self, request: u32, message: Message, fds: Vec<OwnedFd>) {
        // The request was given up, so no thread waits for this answer.
        let Some(place) = self.answers.get_mut(&request) else { return self.give_back(&message) };
        let is_refused = matches!(message, Message::Refused { .. });
        match self.bells.remove(&request) {
            Some(link) if is_refused => link.hang_up(),
            Some(link) => link.ring(),
            None => {}
        }
        *place = Some(match message {
            Message::Refused { code, reason } => Err(Error::Refused { code, reason }),
            message => {
                let complete = whole(&message, &fds);
                match (&message, &complete) {
                    // The peer's region may be the next packet.
                    (Message::Connected { channel, .. }, Ok(())) => {
                        self.mailboxes.entry((*channel, Side::Connecting)).or_default();
                    }
                    // A channel whose links this process could not take is not used.
                    (Message::Connected { channel, .. }, Err(_)) => {
                        self.untold.push_back(Message::Closed { channel: *channel });
                    }
                    _ => {}
                }
                complete.map(|()| (message, fds))
            }
        });
        if let Some(sleeper) = self.sleepers.remove(&request) {
            sleeper.unpark();
        }
        self.tell_untold();
    }

    /// No thread takes this answer: the broker hears that the channel that came with it, if one did, is not used.
    fn give_back(&mut self, answer: &Message) {
        if let Message::Connected { channel, .. } = answer {
            self.mailboxes.remove(&(*channel, Side::Connecting));
            self.tell(Message::Closed { channel: *channel });
        }
    }

    fn deliver(&mut self, message: Message, fds: Vec<OwnedFd>) {
        let (end, generation, start, region) = match message {
            Message::Attached { channel, start, region } => ((channel, Side::Connecting), None, start, region),
            Message::Ring { channel, side, generation, region } => {
                ((channel, side.other()), Some(generation), 0, region)
            }
            Message::RegionAdded { channel, side, number, kind, region } => {
                if let Some(mailbox) = self.mailboxes.get_mut(&(channel, side.other())) {
                    mailbox.further.deliver(number, kind, region, fds);
                }
                return;
            }
            Message::Refused { code, reason } => {
                // The broker ends the session, for this reason.
                let why = Error::Refused { code, reason };
                self.fail(&why);
                return;
            }
            _ => return,
        };
        // An end that has been dropped has none.
        if let Some(mailbox) = self.mailboxes.get_mut(&end) {
            mailbox.put(generation, start, region, fds);
        }
    }

    /// No answer comes any more.
    fn end_waits(&mut self) {
        self.bells.drain().for_each(|(_, link)| link.hang_up());
        self.sleepers.drain().for_each(|(_, sleeper)| sleeper.unpark());
    }

    /// The session has ended: no answer comes any more.
    fn fail(&mut self, why: &Error) -> bool {
        let mut any = false;
        self.end_waits();
        for answer in self.answers.values_mut().filter(|answer| answer.is_none()) {
            any = true;
            *answer = Some(Err(match why {
                Error::Refused { code, reason } => Error::Refused { code: *code, reason: reason.clone() },
                other => Error::system("talk to the broker", std::io::Error::other(other.to_string())),
            }));
        }
        any
    }
}

#[cfg(test)]
mod tests;
