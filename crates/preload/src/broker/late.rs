//! Answers to steps of handshakes that a later call of the program takes (protocol T3.12).
//!
//! A virtual machine's agent reads the socket of a step, says so, and passes the step on to the broker of the host. The serial port makes that slow: some
//! 10 ms in an emulated machine. The program may use the socket meanwhile, so the call that has taken the step does not wait.
//!
//! ```text
//!   free --SocketRead--> awaited --answer--> here --a later call takes it--> free
//!                           |                 |
//!                           |                 +--given up, or nobody has come in time: taken back--> free
//!                           +--the session ends--> lost --a later call finds that--> free
//!                           +--given up--> unwanted --answer: taken back, or the session ends--> free
//! ```
//!
//! Only the thread that has the [`Turn`] uses a place. A child of `fork` has none: its state is empty, and a [`LateStep`] of its parent
//! is not known in it.

use super::opening::SILENCE;
use super::packet::{Answer, Descriptors};
use super::session::{BrokerFailure, Received, Turn, Urgency, nanos};
use crate::log::log;
use crate::{hidden, process, sys};
use partywall_protocol::wire::{self, BorrowedMessage, User};
use rustix::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// Steps whose answers a process may wait for at a time. Others are put off.
pub(super) const STEPS: usize = 64;
/// The longest that the call which has taken a step waits for the answer, once the socket is read. On machines with hardware virtualisation the answer
/// comes within this time.
const BRIEFLY: Duration = Duration::from_millis(1);
/// An answer that nobody has taken for this long is taken back: its connection is no more. A connection waits for 40 s at most.
const UNTAKEN: Duration = Duration::from_secs(60);
/// Bytes of a packet that is kept, without its texts.
const KEPT: usize = 64;

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

/// What a place is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
enum Phase {
    Free = 0,
    Awaited = 1,
    Here = 2,
    Lost = 3,
    Unwanted = 4,
}

impl Phase {
    const fn of(number: u32) -> Self {
        match number {
            1 => Self::Awaited,
            2 => Self::Here,
            3 => Self::Lost,
            4 => Self::Unwanted,
            _ => Self::Free,
        }
    }
}

/// A place for one step. All zeros when free.
#[derive(Debug)]
#[repr(C)]
pub(super) struct LateAnswer {
    phase: AtomicU32,
    request: AtomicU32,
    /// When the request was sent, or the answer came, in nanoseconds of the monotonic clock.
    since: AtomicU64,
    /// The answer, without its texts.
    packet: [AtomicU64; KEPT / 8],
    len: AtomicU32,
    /// Its descriptors, hidden, plus 1; 0 for none.
    fds: [AtomicU32; 4],
}

impl LateAnswer {
    fn phase(&self) -> Phase {
        Phase::of(self.phase.load(Ordering::Relaxed))
    }

    fn set(&self, phase: Phase) {
        self.phase.store(phase as u32, Ordering::Relaxed);
    }

    fn is_of(&self, request: u32) -> bool {
        self.phase() != Phase::Free && self.request.load(Ordering::Relaxed) == request
    }

    fn is_older_than(&self, age: Duration) -> bool {
        sys::now() >= Duration::from_nanos(self.since.load(Ordering::Relaxed)) + age
    }

    fn begin(&self, request: u32) {
        self.request.store(request, Ordering::Relaxed);
        self.len.store(0, Ordering::Relaxed);
        self.since.store(nanos(sys::now()), Ordering::Relaxed);
        self.set(Phase::Awaited);
    }

    /// Keeps an answer.
    fn keep(&self, answer: &mut Answer) {
        let mut space = [0; KEPT];
        let len = answer.message().and_then(|(request, message)| {
            Some(wire::encode_into(request, &without_texts(message), &mut space)?.len())
        });
        // An answer that cannot be kept is none.
        self.len.store(len.unwrap_or(0) as u32, Ordering::Relaxed);
        for (place, bytes) in self.packet.iter().zip(space.as_chunks().0) {
            place.store(u64::from_le_bytes(*bytes), Ordering::Relaxed);
        }
        if let Some((_, fds)) = answer.parts() {
            for (place, fd) in self.fds.iter().zip(fds) {
                let kept = fd.take().map_or(0, |fd| hidden::keep(fd).cast_unsigned() + 1);
                place.store(kept, Ordering::Relaxed);
            }
        }
        self.since.store(nanos(sys::now()), Ordering::Relaxed);
        self.set(Phase::Here);
    }

    /// Takes the answer out. The place is free then.
    fn take(&self) -> KeptAnswer {
        let mut bytes = [0; KEPT];
        for (bytes, place) in bytes.as_chunks_mut().0.iter_mut().zip(&self.packet) {
            *bytes = place.load(Ordering::Relaxed).to_le_bytes();
        }
        let fds = std::array::from_fn(|at| self.take_fd(at));
        self.set(Phase::Free);
        KeptAnswer { bytes, len: self.len.load(Ordering::Relaxed) as usize, fds }
    }

    fn take_fd(&self, at: usize) -> Option<OwnedFd> {
        let kept = self.fds.get(at)?.swap(0, Ordering::Relaxed).checked_sub(1)?;
        hidden::take_back(kept.cast_signed())
    }
}

/// An answer that was kept.
#[derive(Debug)]
struct KeptAnswer {
    bytes: [u8; KEPT],
    len: usize,
    fds: Descriptors,
}

impl KeptAnswer {
    fn message(&self) -> Option<BorrowedMessage<'_>> {
        Some(wire::decode_borrowed(self.bytes.get(..self.len)?).ok()?.1)
    }
}

/// The message without what is only for people.
fn without_texts(message: BorrowedMessage<'_>) -> BorrowedMessage<'_> {
    match message {
        BorrowedMessage::PeerIs { region, program, .. } => {
            BorrowedMessage::PeerIs { region, program, user: User::Host(0), name: "" }
        }
        BorrowedMessage::Refused { code, reason } => {
            log!("the broker refused a step: {code}: {reason}");
            BorrowedMessage::Refused { code, reason: "" }
        }
        other => other,
    }
}

impl Turn {
    fn late(&self, request: u32) -> Option<&'static LateAnswer> {
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
        self.tidy_late();
        let place = self.state.late.iter().find(|place| place.phase() == Phase::Free).ok_or(BrokerFailure::Busy)?;
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

    /// Keeps the answer to an earlier step. `false` if it is no such answer.
    pub(super) fn settle_late(&self, request: u32, answer: &mut Answer) -> bool {
        let Some(place) = self.late(request) else { return false };
        match place.phase() {
            Phase::Awaited => place.keep(answer),
            Phase::Unwanted => {
                place.keep(answer);
                self.undo(place);
            }
            // A second answer.
            Phase::Here | Phase::Lost | Phase::Free => return false,
        }
        true
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
                Phase::Awaited => place.set(Phase::Lost),
                Phase::Unwanted => place.set(Phase::Free),
                Phase::Free | Phase::Here | Phase::Lost => {}
            }
        }
    }

    /// Frees places that nobody will come for.
    fn tidy_late(&self) {
        let is_owed = |place: &LateAnswer| matches!(place.phase(), Phase::Awaited | Phase::Unwanted);
        if self.state.late.iter().any(|place| is_owed(place) && place.is_older_than(SILENCE)) {
            self.give_up_silent();
        }
        for place in &self.state.late {
            if matches!(place.phase(), Phase::Here | Phase::Lost) && place.is_older_than(UNTAKEN) {
                self.undo(place);
            }
        }
    }

    /// As if that much time had passed since the requests and the answers.
    #[cfg(test)]
    pub(super) fn age_late(&self, by: Duration) {
        for place in &self.state.late {
            let since = place.since.load(Ordering::Relaxed);
            place.since.store(since.saturating_sub(nanos(by)), Ordering::Relaxed);
        }
    }

    /// Takes back what this answer has given, and frees its place. What a `Confirm` or a `Finish` has given is taken back with their offer.
    fn undo(&self, place: &LateAnswer) {
        let answer = place.take();
        if let Some(BorrowedMessage::Bell { offer, .. }) = answer.message() {
            self.tell(&BorrowedMessage::Closed { channel: offer });
        }
    }
}

/// Whether the answer to a step is here, or will not come. `false` as well while another thread speaks to the broker.
pub(crate) fn is_answered(step: LateStep) -> bool {
    let Some(request) = step.request() else { return true };
    let Ok(turn) = Turn::take_if_free() else { return false };
    let is_awaited = || turn.late(request).is_some_and(|place| place.phase() == Phase::Awaited);
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
    if place.phase() == Phase::Awaited {
        return None;
    }
    let KeptAnswer { bytes, len, mut fds } = place.take();
    let answer = match bytes.get(..len).and_then(|bytes| wire::decode_borrowed(bytes).ok()) {
        Some((_, BorrowedMessage::Refused { code, .. })) => Err(BrokerFailure::Refused(code)),
        Some((_, message)) => read(message, &mut fds).ok_or(BrokerFailure::Absent),
        // The session has ended before it came, or it was no answer.
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
            Phase::Awaited => place.set(Phase::Unwanted),
            Phase::Here | Phase::Lost => turn.undo(place),
            Phase::Unwanted | Phase::Free => {}
        }
    }
}
