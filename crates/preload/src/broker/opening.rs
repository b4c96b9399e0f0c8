//! How a session opens: a step at a time, across calls of the program.
//!
//! ```text
//!   none --connect, send Join--> Join --send Directory--> Directory --map--> open --> Publish, for each listener --> ReclaimSocket, for
//!                                 |                           |                        each ring --> nothing is left
//!                                 +-- the answer is taken by this call, or by a later one --+
//! ```
//!
//! A broker may be long in answering: it is starting, or it is plugging windows into a machine that has just arrived. A call of the program
//! that waited for it would be a pause in all that the program does. So a call waits at most [`BRIEF`] for an answer, once for each, and
//! leaves it to later calls otherwise (protocol T14.6). Only the first `listen` or `connect` of a process waits, since what it asks it asks only once
//! ([`Turn::is_patient`]).
//!
//! The thread that has the turn takes the next step, whichever thread that is. What is in between is in [`super::state`], so that a child of
//! `fork` begins with no session, and its parent's goes on.

use super::claim::each_claim;
use super::packet::Answer;
use super::session::{
    ABSENT, BRIEF, BrokerFailure, LIMIT, Received, SILENT, Turn, enter, enter_if_room, is_quiet, nanos, wait,
};
use super::settings::{self, DefaultName};
use super::state::{self, LISTENERS};
use super::{addresses, listeners, memory, netns};
use crate::log::log;
use crate::{hidden, process, sys};
use partywall_protocol::directory::{Directory, OfferKey};
use partywall_protocol::wire::{BorrowedMessage, Refusal, VERSION};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};
use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// How long an answer may take before the session is given up, where no call waits for it (protocol T14.7).
pub(super) const SILENCE: Duration = Duration::from_secs(10);
/// A broker that was late with an answer is shown no connection for this time.
const SLOW: Duration = Duration::from_secs(1);
/// The longest that one call spends on sending a new broker our listeners and rings again. Each takes about 50 us.
const TELLING: Duration = Duration::from_millis(20);
/// In place of a listener's slot, for a socket of which only the addresses of its namespace are published.
pub(super) const NO_SLOT: usize = LISTENERS;

/// The request whose answer is outstanding, and is taken by any later call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum OpeningStep {
    /// There is none.
    None = 0,
    Join = 1,
    Directory = 2,
    Publish = 3,
}

impl OpeningStep {
    const fn of(number: u32) -> Self {
        match number {
            1 => Self::Join,
            2 => Self::Directory,
            3 => Self::Publish,
            _ => Self::None,
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::None => "nothing",
            Self::Join => "Join",
            Self::Directory => "Directory",
            Self::Publish => "Publish",
        }
    }
}

/// How far a publication has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PublicationStep {
    /// The broker has answered. A listener that has no key then was refused.
    Answered,
    /// The broker has the request, and a later call takes the answer.
    Outstanding,
    /// The broker is late with an earlier one. A later call sends that of a listener.
    Deferred,
}

/// The broker has denied the last session.
static DENIED: AtomicBool = AtomicBool::new(false);

/// Whether the last session did not open because the broker's policy denies it.
#[inline]
pub(super) fn was_denied() -> bool {
    DENIED.load(Ordering::Relaxed)
}

/// The broker has not been asked by this process, or is asked again.
pub(super) fn forget_denial() {
    DENIED.store(false, Ordering::Relaxed);
}

impl Turn {
    /// Whether there is a session, and its end has not come. Opens one if `open` and it is time to, and takes the next steps of one that is
    /// opening.
    pub(super) fn look(&self, open: bool) {
        match self.session() {
            Some(_) if self.is_under_way() => {
                let _ = self.be_open();
                return;
            }
            Some(session) if is_quiet(session) => return,
            // An answer to an earlier step, or the end.
            Some(_) => {
                self.take_late_answers();
                if self.session().is_some() {
                    return;
                }
            }
            // A parent's session shows as well whether the broker is there.
            None if !self.has_ancestors() => memory::forget(),
            None => {}
        }
        if open {
            let _ = self.be_open();
        }
    }

    /// Opens a session if there is none and it is time to, or takes the next steps. `Absent` until requests can be sent in it.
    pub(super) fn be_open(&self) -> Result<(), BrokerFailure> {
        let has_session = self.session().is_some();
        if has_session && !self.is_under_way() {
            return Ok(());
        }
        if !has_session && nanos(sys::now()) < self.state.retry_at.load(Ordering::Relaxed) {
            return Err(BrokerFailure::Absent);
        }
        let begun = if has_session { Ok(()) } else { self.begin(false) };
        match begun.and_then(|()| self.go_on()) {
            Ok(true) => Ok(()),
            Ok(false) => Err(BrokerFailure::Absent),
            Err(failure) => {
                self.note_failure(failure);
                Err(failure)
            }
        }
    }

    /// No session opens, or one has ended before the broker had all of our sockets again.
    fn note_failure(&self, failure: BrokerFailure) {
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
        let is_denied = failure == BrokerFailure::Refused(Refusal::Denied);
        DENIED.store(is_denied, Ordering::Relaxed);
        if is_denied {
            log_remedy();
        }
    }

    /// Connects and sends `Join`: as the configured domain, or, if there is none for this user or `as_own`, as a domain of this process.
    fn begin(&self, as_own: bool) -> Result<(), BrokerFailure> {
        let socket = connect()?;
        forget_denial();
        let cookie = sockopt::socket_cookie(&socket).map_err(|_| BrokerFailure::Absent)?;
        let fd = hidden::keep(socket);
        self.state.process.store(process::kernel_pid(), Ordering::Relaxed);
        self.state.cookie.store(cookie, Ordering::Relaxed);
        self.state.session.store(fd.cast_unsigned() + 1, Ordering::Relaxed);
        // A child of a `fork` between two steps closes its copy by this.
        enter_if_room(fd);
        self.forget_awaited();
        for key in &self.state.keys {
            key.store(0, Ordering::Relaxed);
        }
        listeners::all().for_each(|(_, listener)| listener.set_sent(false));
        self.state.joins_as_own.store(as_own.into(), Ordering::Relaxed);
        let settings = settings::get();
        let own = DefaultName::new(&settings.program, process::kernel_pid());
        let domain = settings.domain_of(rustix::process::geteuid().as_raw()).filter(|_| !as_own);
        let name = domain.map_or(own.as_bytes(), str::as_bytes);
        // A name that is too long, or no text, is refused, and not cut to another process's name.
        let name = name.get(..name.len().min(200)).unwrap_or_default();
        let name = str::from_utf8(name).map_err(|_| BrokerFailure::Refused(Refusal::NameInvalid))?;
        self.request(OpeningStep::Join, &BorrowedMessage::Join { version: VERSION, name })
    }

    /// Sends the request of a step.
    fn request(&self, step: OpeningStep, request: &BorrowedMessage<'_>) -> Result<(), BrokerFailure> {
        let session = self.session().ok_or(BrokerFailure::Absent)?;
        let number = self.send(session, request, &[])?;
        self.leave_to_later(step, number);
        Ok(())
    }

    /// The answer to this request is taken by any call from here on.
    fn leave_to_later(&self, step: OpeningStep, number: u32) {
        self.state.step_sent.store(nanos(sys::now()), Ordering::Relaxed);
        self.state.awaited.store(number, Ordering::Relaxed);
        self.state.step.store(step as u32, Ordering::Relaxed);
    }

    /// Takes the answers that are there, and sends the requests that come next. Returns whether the session is open.
    fn go_on(&self) -> Result<bool, BrokerFailure> {
        let call_ends = self.begun + TELLING;
        loop {
            if self.step() != OpeningStep::None {
                let sent = self.step_sent();
                let until = if self.is_patient { self.patience_ends() } else { (sent + BRIEF).min(call_ends) };
                if !self.take_step(until)? {
                    if sys::now() >= sent + SILENCE {
                        return Err(self.give_up_silent());
                    }
                    self.note_slow();
                    return Ok(!self.is_opening());
                }
            } else if !self.is_patient && sys::now() >= call_ends || !self.tell_next()? {
                return Ok(true);
            }
        }
    }

    /// Waits until then for the outstanding answer, and takes it. Returns whether it has come.
    fn take_step(&self, until: Duration) -> Result<bool, BrokerFailure> {
        loop {
            let (step, number) = (self.step(), self.awaited());
            let (Some(session), Some(number)) = (self.session(), number) else { return Err(BrokerFailure::Absent) };
            match self.receive(session, number, step.name())? {
                Received::Answer(mut answer) => {
                    return match step {
                        OpeningStep::Join | OpeningStep::Directory => {
                            self.take_opening(step, &mut answer).map(|()| true)
                        }
                        _ if self.settle(&mut answer) => Ok(true),
                        _ => Err(BrokerFailure::Absent),
                    };
                }
                Received::Refusal(code) => return self.take_refusal(step, code).map(|()| true),
                Received::Other => {}
                Received::Nothing if wait(session, until) => {}
                Received::Nothing => return Ok(false),
            }
        }
    }

    /// Takes the answer to `Join` or `Directory`.
    fn take_opening(&self, step: OpeningStep, answer: &mut Answer) -> Result<(), BrokerFailure> {
        self.forget_step();
        match (step, answer.parts()) {
            (OpeningStep::Join, Some((BorrowedMessage::Joined { .. }, _))) => {
                self.request(OpeningStep::Directory, &BorrowedMessage::Directory {})
            }
            (OpeningStep::Directory, Some((BorrowedMessage::DirectoryIs { base, .. }, [memory, word, ..]))) => {
                // There is no directory, for want of descriptors here, or it is unreadable: not worth asking soon.
                let useless = BrokerFailure::Refused(Refusal::OutOfResources);
                let memory = memory.take().ok_or(useless)?;
                memory::map(&memory, base, word.as_ref()).map_err(|_| useless)?;
                self.begin_telling();
                Ok(())
            }
            _ => Err(BrokerFailure::Absent),
        }
    }

    /// The session is open. The broker is to get our listeners, and the rings that are older than it.
    fn begin_telling(&self) {
        if let Some(fd) = self.state.session.load(Ordering::Relaxed).checked_sub(1) {
            enter(fd.cast_signed());
        }
        self.state.patience.store(0, Ordering::Relaxed);
        self.state.sessions.fetch_add(1, Ordering::Relaxed);
        self.state.told.store(1, Ordering::Relaxed);
        log!("joined the broker");
    }

    /// The outstanding request is refused.
    fn take_refusal(&self, step: OpeningStep, code: Refusal) -> Result<(), BrokerFailure> {
        self.forget_step();
        match step {
            // Another user has that domain, as for the workers of a server that changes its user.
            OpeningStep::Join if code == Refusal::NameTaken && self.state.joins_as_own.load(Ordering::Relaxed) == 0 => {
                self.lose();
                self.begin(true)
            }
            OpeningStep::Join | OpeningStep::Directory => Err(BrokerFailure::Refused(code)),
            // It may be published the next time.
            OpeningStep::Publish | OpeningStep::None => Ok(()),
        }
    }

    /// Takes the answer to a publication. `false` if it is no such answer.
    pub(super) fn settle(&self, answer: &mut Answer) -> bool {
        let step = self.step();
        self.forget_step();
        match (step, answer.message()) {
            (OpeningStep::Publish, Some((_, BorrowedMessage::Published { key, secret_low, secret_high }))) => {
                let slot = self.state.step_slot.load(Ordering::Relaxed) as usize;
                if let Some(place) = self.key(slot) {
                    place.store(key, Ordering::Relaxed);
                }
                if let Some(directory) = memory::get() {
                    let netns = self.state.step_netns.load(Ordering::Relaxed);
                    netns::learn_key(netns, directory.instance(), OfferKey([secret_low, secret_high]));
                }
                true
            }
            (OpeningStep::Publish, Some((_, BorrowedMessage::Refused { .. }))) => true,
            _ => false,
        }
    }

    /// Publishes the listener in a slot, or, for [`NO_SLOT`], the addresses of a socket's namespace. There is a session. An answer that is late
    /// is left to later calls: the broker has the request, and a server that sleeps in `accept` makes no call that could repeat it.
    pub(super) fn publish(&self, slot: usize, fd: c_int) -> Result<PublicationStep, BrokerFailure> {
        let patience_ends =
            if slot == NO_SLOT { self.patience_ends() } else { self.deadline.min(self.step_sent() + 2 * LIMIT) };
        if self.step() == OpeningStep::Publish && !self.take_step(patience_ends)? {
            self.tell_from(slot);
            return Ok(PublicationStep::Deferred);
        }
        self.send_publication(slot, fd)?;
        let is_answered = self.take_step(self.patience_ends())?;
        if sys::now() > self.step_sent() + BRIEF {
            self.note_slow();
        }
        Ok(if is_answered { PublicationStep::Answered } else { PublicationStep::Outstanding })
    }

    /// Later calls publish the listeners from this slot on that the broker does not know of.
    fn tell_from(&self, slot: usize) {
        let told = &self.state.told;
        let first = told.load(Ordering::Relaxed).checked_sub(1).map_or(slot, |first| slot.min(first as usize));
        // It is a position among `LISTENERS`, or the one past them.
        told.store(first as u32 + 1, Ordering::Relaxed);
    }

    fn send_publication(&self, slot: usize, fd: c_int) -> Result<(), BrokerFailure> {
        let here = addresses::Addresses::in_this_namespace();
        let session = self.session().ok_or(BrokerFailure::Absent)?;
        let number = self.send(session, &BorrowedMessage::Publish { addresses: here.field() }, &[sys::borrow(fd)])?;
        // It is a position among `LISTENERS`, or the one past them.
        self.state.step_slot.store(slot as u32, Ordering::Relaxed);
        self.state.step_netns.store(netns::cookie(fd), Ordering::Relaxed);
        if let Some(listener) = listeners::at(slot) {
            listener.set_sent(true);
        }
        self.leave_to_later(OpeningStep::Publish, number);
        Ok(())
    }

    /// Waits for the answer about the listener in a slot, if an earlier call has published it and left the answer to later ones. `false` if
    /// it does not come.
    pub(super) fn await_publication(&self, slot: usize) -> bool {
        let is_awaited =
            || self.step() == OpeningStep::Publish && self.state.step_slot.load(Ordering::Relaxed) as usize == slot;
        while is_awaited() {
            match self.take_step(self.patience_ends()) {
                Ok(true) => {}
                Ok(false) => return false,
                Err(failure) => self.note_failure(failure),
            }
        }
        true
    }

    /// Likewise, before the slot is freed. A session in which the answer does not come is given up, and with it the publication.
    pub(super) fn finish_publication(&self, slot: usize) {
        if !self.await_publication(slot) {
            self.give_up_silent();
        }
    }

    /// Sends a new broker the next listener, or the rings. `false` if it has all of them, or if a later call goes on.
    fn tell_next(&self) -> Result<bool, BrokerFailure> {
        let Some(from) = self.state.told.load(Ordering::Relaxed).checked_sub(1) else { return Ok(false) };
        if self.publish_next(from as usize)? {
            return Ok(true);
        }
        if self.is_slow() {
            return Ok(false);
        }
        let until = self.begun + TELLING;
        let mut goes_on = false;
        if let Some(broker) = memory::get().map(Directory::instance) {
            let mut any = false;
            each_claim(broker, &mut |claim| {
                // One in each call at least.
                goes_on = any && (self.is_slow() || sys::now() >= until);
                any = true;
                !goes_on && self.claim(claim)
            });
        }
        if self.session().is_none() {
            return Err(BrokerFailure::Absent);
        }
        if !goes_on {
            self.state.told.store(0, Ordering::Relaxed);
        }
        Ok(goes_on)
    }

    /// Whether the broker was late with an answer a moment ago. It is not shown a connection then: until it has answered, no other thread may
    /// use the socket (protocol T3.3, T14.8), so the call would have to wait.
    pub(super) fn is_slow(&self) -> bool {
        nanos(sys::now()) < self.state.slow_until.load(Ordering::Relaxed)
    }

    /// The broker was late with an answer just now.
    pub(super) fn note_slow(&self) {
        self.state.slow_until.store(nanos(sys::now() + SLOW), Ordering::Relaxed);
    }

    /// Publishes the next listener that the broker does not know of, from this slot on: of those that we have inherited, if their session is
    /// gone or has never had them. Returns whether there was one.
    fn publish_next(&self, from: usize) -> Result<bool, BrokerFailure> {
        let inherited_too = !self.has_ancestors();
        let me = process::kernel_pid();
        for (at, listener) in listeners::all().skip_while(|(at, _)| *at < from) {
            let (Some(fd), Some(key)) = (listener.fd(), self.key(at)) else { continue };
            let socket = sys::borrow(fd);
            if sockopt::socket_cookie(socket) != Ok(listener.cookie()) {
                // Closed past us. The next listener in the slot is to be published.
                listener.clear();
                key.store(0, Ordering::Relaxed);
            } else if key.load(Ordering::Relaxed) == 0
                && (inherited_too || listener.process() == me || !listener.is_sent())
            {
                self.send_publication(at, fd)?;
                self.state.told.store(at as u32 + 2, Ordering::Relaxed);
                return Ok(true);
            }
        }
        self.state.told.store(LISTENERS as u32 + 1, Ordering::Relaxed);
        Ok(false)
    }

    fn step_sent(&self) -> Duration {
        Duration::from_nanos(self.state.step_sent.load(Ordering::Relaxed))
    }

    /// Whether the broker owes an answer about a publication for longer than a call waits for it. Another answer would not come before that
    /// one, and a session in which it did not come in time would be given up with the publication.
    pub(super) fn is_behind(&self) -> bool {
        self.step() == OpeningStep::Publish
            && sys::now() >= self.step_sent() + LIMIT
            && !self.take_step(Duration::ZERO).unwrap_or(true)
    }

    /// When a call that waits for the outstanding answer leaves it to later ones, which do not wait for it again.
    fn patience_ends(&self) -> Duration {
        self.deadline.min(self.step_sent() + LIMIT)
    }

    /// The request whose answer is outstanding.
    pub(super) fn step(&self) -> OpeningStep {
        OpeningStep::of(self.state.step.load(Ordering::Relaxed))
    }

    /// The number of that request.
    pub(super) fn awaited(&self) -> Option<u32> {
        Some(self.state.awaited.load(Ordering::Relaxed)).filter(|number| *number != 0)
    }

    /// Whether the answer to `Join` is outstanding.
    pub(super) fn is_joining(&self) -> bool {
        self.step() == OpeningStep::Join
    }

    /// Whether a session is there in which no request can be sent yet.
    pub(super) fn is_opening(&self) -> bool {
        matches!(self.step(), OpeningStep::Join | OpeningStep::Directory)
    }

    /// Whether later calls are to go on with the session.
    fn is_under_way(&self) -> bool {
        is_under_way_in(self.state)
    }

    fn forget_step(&self) {
        self.state.awaited.store(0, Ordering::Relaxed);
        self.state.step.store(OpeningStep::None as u32, Ordering::Relaxed);
    }

    /// The session is gone, and with it all that was outstanding.
    pub(super) fn forget_awaited(&self) {
        self.forget_step();
        self.state.told.store(0, Ordering::Relaxed);
    }

    /// As if the latest answer had been in time.
    #[cfg(test)]
    pub(super) fn be_quick(&self) {
        self.state.slow_until.store(0, Ordering::Relaxed);
    }

    /// Lets the outstanding answer be late by this time.
    #[cfg(test)]
    pub(super) fn be_late(&self, by: Duration) {
        self.state.step_sent.fetch_sub(nanos(by), Ordering::Relaxed);
    }
}

/// Whether an answer is outstanding that a later call takes, or the broker is still to get listeners or rings.
#[inline]
pub(super) fn is_under_way() -> bool {
    state::peek().is_some_and(is_under_way_in)
}

fn is_under_way_in(state: &state::State) -> bool {
    state.step.load(Ordering::Relaxed) != OpeningStep::None as u32 || state.told.load(Ordering::Relaxed) != 0
}

/// Logs the policy change that would let this program join.
fn log_remedy() {
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
