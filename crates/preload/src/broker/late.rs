//! Answers to steps of handshakes that a later call of the program takes (protocol T3.12).
//!
//! A virtual machine's agent reads the socket of a step, says so, and passes the step on to the broker of the host. The serial port makes that slow: some
//! 10 ms in an emulated machine. The program may use the socket meanwhile, so the call that has taken the step does not wait.
//!
//! ```text
//!   free --SocketRead--> awaited --answer--> here --a later call takes it--> free
//!                           |                 |
//!                           |                 +--given up, or not taken in time: taken back--> free
//!                           +--the session ends--> lost --a later call finds that--> free
//!                           +--given up--> unwanted --answer: taken back, or the session ends--> free
//! ```
//!
//! Only the thread that has the [`Turn`] uses a place. A child of `fork` has none: its state is empty, and a [`LateStep`] of its parent
//! is not known in it.

use super::answer_place::{AnswerPhase, AnswerPlace};
use super::opening::SILENCE;
use super::packet::{Answer, Descriptors};
use super::session::{BrokerFailure, Received, Turn, Urgency};
use crate::{process, sys};
use partywall_protocol::wire::BorrowedMessage;
use rustix::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The longest that the call which has taken a step waits for the answer, once the socket is read. On machines with hardware virtualisation the answer
/// comes within this time.
const BRIEFLY: Duration = Duration::from_millis(1);
/// An answer that was not taken for this many milliseconds gives its place to another step if no other place is free.
const RARE: u64 = 5_000;
/// An answer that was not taken for this many milliseconds is taken back: its connection is no more. A connection waits for 40 s at most.
const UNTAKEN: u64 = 60_000;

/// A step whose answer comes later: the process that waits for it, and the number of its request. 0 is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LateStep(u64);

impl LateStep {
    fn new(request: u32) -> Self {
        Self(u64::from(process::kernel_pid()) << 32 | u64::from(request))
    }

    /// From the word that a step has stored it in.
    pub(crate) fn of(word: &AtomicU64) -> Option<Self> {
        Some(Self(word.load(Ordering::Relaxed))).filter(|step| step.0 != 0)
    }

    /// Takes it out of the word.
    pub(crate) fn take_from(word: &AtomicU64) -> Option<Self> {
        Some(Self(word.swap(0, Ordering::Relaxed))).filter(|step| step.0 != 0)
    }

    /// The request, if this process has made it.
    fn request(self) -> Option<u32> {
        ((self.0 >> 32) as u32 == process::kernel_pid()).then_some(self.0 as u32)
    }
}

/// The answer to a step, now or later.
#[derive(Debug)]
pub(crate) enum StepAnswer<T> {
    Now(T),
    Later,
}

impl Turn {
    fn late(&self, request: u32) -> Option<&'static AnswerPlace> {
        self.state.late.iter().find(|place| place.is_of(request))
    }

    /// Asks the broker for a step, as [`Turn::ask`] does. If the answer comes later, `late` gets what identifies it while no signal handler
    /// can run. Without a place for another step the broker counts as busy.
    pub(super) fn ask_step<T>(
        &self,
        request: &BorrowedMessage<'_>,
        with: &[BorrowedFd<'_>],
        late: &AtomicU64,
        read: impl FnOnce(BorrowedMessage<'_>, &mut Descriptors) -> Option<T>,
    ) -> Result<StepAnswer<T>, BrokerFailure> {
        // First: an answer that has come is not late.
        self.take_late_answers();
        let place = self.free_place().ok_or(BrokerFailure::Busy)?;
        let mut answer = self.answer(request, with)?;
        if let Some((number, BorrowedMessage::SocketRead {})) = answer.message() {
            match self.await_answer(number, sys::now() + BRIEFLY, request.name())? {
                Some(here) => answer = here,
                None => {
                    place.begin(number);
                    late.store(LateStep::new(number).0, Ordering::Relaxed);
                    return Ok(StepAnswer::Later);
                }
            }
        }
        self.read(answer, read).map(StepAnswer::Now)
    }

    /// A place for another step. Without a free one, the answer that has waited longest is taken back if its connection makes calls too rarely:
    /// it would keep the place from all others.
    fn free_place(&self) -> Option<&'static AnswerPlace> {
        let is_free = |place: &&AnswerPlace| place.phase() == AnswerPhase::Free;
        if let Some(free) = self.state.late.iter().find(is_free) {
            return Some(free);
        }
        let is_rare = |place: &&AnswerPlace| place.phase() == AnswerPhase::Here && place.is_older_than(RARE);
        let oldest = self.state.late.iter().filter(is_rare).min_by_key(|place| place.since())?;
        self.undo(oldest);
        Some(oldest)
    }

    /// Keeps the answer to an earlier step. `false` if it is no such answer.
    pub(super) fn settle_late(&self, request: u32, answer: &mut Answer) -> bool {
        let Some(place) = self.late(request) else { return false };
        match place.phase() {
            AnswerPhase::Awaited => place.keep(answer),
            AnswerPhase::Unwanted => {
                let is_kept = place.keep(answer);
                if is_kept {
                    self.undo(place);
                }
                is_kept
            }
            // A second answer.
            AnswerPhase::Here | AnswerPhase::Lost | AnswerPhase::Free => false,
        }
    }

    /// Takes what has come over the session. A session that has ended, or that owes an answer for too long, is given up.
    pub(super) fn take_late_answers(&self) {
        while let Some(session) = self.open_session() {
            // No request has this number.
            match self.receive(session, 0, "nothing") {
                Ok(Received::Nothing) | Err(_) => break,
                Ok(_) => {}
            }
        }
        self.tidy_late();
    }

    /// The session ends, and no further answer comes.
    pub(super) fn lose_late(&self) {
        for place in &self.state.late {
            match place.phase() {
                AnswerPhase::Awaited => place.set(AnswerPhase::Lost),
                AnswerPhase::Unwanted => place.set(AnswerPhase::Free),
                AnswerPhase::Free | AnswerPhase::Here | AnswerPhase::Lost => {}
            }
        }
    }

    /// Frees places that nobody will come for.
    fn tidy_late(&self) {
        let is_owed = |place: &AnswerPlace| matches!(place.phase(), AnswerPhase::Awaited | AnswerPhase::Unwanted);
        if self.state.late.iter().any(|place| is_owed(place) && place.is_older_than(SILENCE.as_millis() as u64)) {
            self.give_up_silent();
        }
        for place in &self.state.late {
            if matches!(place.phase(), AnswerPhase::Here | AnswerPhase::Lost) && place.is_older_than(UNTAKEN) {
                self.undo(place);
            }
        }
    }

    /// As if that much time had passed since the requests and the answers.
    #[cfg(test)]
    pub(super) fn age_late(&self, by: Duration) {
        self.state.late.iter().for_each(|place| place.age(by.as_millis() as u64));
    }

    /// Takes back what this answer has given, and frees its place. What a `Confirm` or a `Finish` has given is taken back with their offer.
    fn undo(&self, place: &AnswerPlace) {
        let mut answer = place.take();
        if let Some((BorrowedMessage::Bell { offer, .. }, _)) = answer.parts() {
            self.tell(&BorrowedMessage::Closed { channel: offer });
        }
    }
}

/// Whether the answer to a step is here, or will not come. `false` as well while another thread speaks to the broker.
pub(crate) fn is_answered(step: LateStep) -> bool {
    // A child of `vfork` must not touch what is its parent's.
    if process::is_visitor() {
        return false;
    }
    let Some(request) = step.request() else { return true };
    let Ok(turn) = Turn::take_if_free() else { return false };
    let is_awaited = || turn.late(request).is_some_and(|place| place.phase() == AnswerPhase::Awaited);
    if is_awaited() {
        turn.take_late_answers();
    }
    !is_awaited()
}

/// Takes the answer to a step, and reads it. Returns the turn with it. `None` if it is not here yet, or if another thread speaks to the
/// broker. An answer that will not come is [`BrokerFailure::Absent`].
pub(super) fn take<T>(
    step: LateStep,
    read: impl FnOnce(BorrowedMessage<'_>, &mut Descriptors) -> Option<T>,
) -> Option<Result<(Turn, T), BrokerFailure>> {
    let Some(request) = step.request() else { return Some(Err(BrokerFailure::Absent)) };
    let turn = match Turn::take(Urgency::Brief) {
        Ok(turn) => turn,
        Err(BrokerFailure::Busy) => return None,
        Err(failure) => return Some(Err(failure)),
    };
    let Some(place) = turn.late(request) else { return Some(Err(BrokerFailure::Absent)) };
    if place.phase() == AnswerPhase::Awaited {
        return None;
    }
    let mut kept = place.take();
    let answer = match kept.parts() {
        Some((BorrowedMessage::Refused { code, .. }, _)) => Err(BrokerFailure::Refused(code)),
        // The answer to another step ends the session, as one that comes at once does.
        Some((message, fds)) => read(message, fds).ok_or(BrokerFailure::Absent).inspect_err(|_| turn.lose()),
        // The session has ended before it came.
        None => Err(BrokerFailure::Absent),
    };
    Some(answer.map(|answer| (turn, answer)))
}

/// Gives a step up. What its answer brings is taken back, now or when it comes. If the session is busy, it is taken back after a minute.
pub(crate) fn give_up(step: LateStep) {
    let Some(request) = step.request() else { return };
    let Ok(turn) = Turn::take(Urgency::Long) else { return };
    if let Some(place) = turn.late(request) {
        match place.phase() {
            AnswerPhase::Awaited => place.set(AnswerPhase::Unwanted),
            AnswerPhase::Here | AnswerPhase::Lost => turn.undo(place),
            AnswerPhase::Unwanted | AnswerPhase::Free => {}
        }
    }
}
