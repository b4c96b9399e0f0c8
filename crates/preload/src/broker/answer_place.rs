//! A place in which the answer to a step of a handshake is kept until a later call takes it ([`super::late`]).

use super::packet::{Answer, Descriptors};
use crate::log::log;
use crate::{hidden, sys};
use partywall_protocol::wire::{self, BorrowedMessage, User};
use rustix::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Bytes of a packet that is kept, without its texts.
const KEPT: usize = 64;

/// Steps whose answers a process may wait for at once. Others are put off.
pub(super) const STEPS: usize = if cfg!(test) { 8 } else { 64 };

/// What a place is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum AnswerPhase {
    Free = 0,
    Awaited = 1,
    Here = 2,
    Lost = 3,
    Unwanted = 4,
}

impl AnswerPhase {
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
pub(super) struct AnswerPlace {
    phase: AtomicU32,
    request: AtomicU32,
    /// When the request was sent, or the answer came, in milliseconds of [`sys::coarse_millis`].
    since: AtomicU64,
    /// The answer, without its texts.
    packet: [AtomicU64; KEPT / 8],
    len: AtomicU32,
    /// Its descriptors, hidden, plus 1; 0 for none.
    fds: [AtomicU32; 4],
}

impl AnswerPlace {
    pub(super) fn phase(&self) -> AnswerPhase {
        AnswerPhase::of(self.phase.load(Ordering::Relaxed))
    }

    pub(super) fn set(&self, phase: AnswerPhase) {
        self.phase.store(phase as u32, Ordering::Relaxed);
    }

    /// Whether it is in use for this request.
    pub(super) fn is_of(&self, request: u32) -> bool {
        self.phase() != AnswerPhase::Free && self.request.load(Ordering::Relaxed) == request
    }

    /// When the request was sent, or the answer came, in milliseconds of [`sys::coarse_millis`].
    pub(super) fn since(&self) -> u64 {
        self.since.load(Ordering::Relaxed)
    }

    /// Whether the request was sent, or its answer came, that many milliseconds ago.
    pub(super) fn is_older_than(&self, age: u64) -> bool {
        sys::coarse_millis() >= self.since() + age
    }

    /// As if that many milliseconds had passed.
    #[cfg(test)]
    pub(super) fn age(&self, by: u64) {
        let since = self.since.load(Ordering::Relaxed);
        self.since.store(since.saturating_sub(by), Ordering::Relaxed);
    }

    /// The answer to this request comes later.
    pub(super) fn begin(&self, request: u32) {
        self.request.store(request, Ordering::Relaxed);
        self.len.store(0, Ordering::Relaxed);
        self.since.store(sys::coarse_millis(), Ordering::Relaxed);
        self.set(AnswerPhase::Awaited);
    }

    /// Keeps an answer. `false` if it is none that a step has.
    pub(super) fn keep(&self, answer: &mut Answer) -> bool {
        let mut space = [0; KEPT];
        let message = answer.message().and_then(|(request, message)| Some((request, without_texts(message)?)));
        let kept = message.and_then(|(request, message)| wire::encode_into(request, &message, &mut space));
        let Some(len) = kept.map(<[u8]>::len) else { return false };
        self.len.store(len as u32, Ordering::Relaxed);
        for (place, bytes) in self.packet.iter().zip(space.as_chunks().0) {
            place.store(u64::from_le_bytes(*bytes), Ordering::Relaxed);
        }
        if let Some((_, fds)) = answer.parts() {
            for (place, fd) in self.fds.iter().zip(fds) {
                let kept = fd.take().map_or(0, |fd| hidden::keep(fd).cast_unsigned() + 1);
                place.store(kept, Ordering::Relaxed);
            }
        }
        self.since.store(sys::coarse_millis(), Ordering::Relaxed);
        self.set(AnswerPhase::Here);
        true
    }

    /// Takes the answer out. The place is free then.
    pub(super) fn take(&self) -> KeptAnswer {
        let mut bytes = [0; KEPT];
        for (bytes, place) in bytes.as_chunks_mut().0.iter_mut().zip(&self.packet) {
            *bytes = place.load(Ordering::Relaxed).to_le_bytes();
        }
        let fds = std::array::from_fn(|at| self.take_fd(at));
        self.set(AnswerPhase::Free);
        KeptAnswer { bytes, len: self.len.load(Ordering::Relaxed) as usize, fds }
    }

    fn take_fd(&self, at: usize) -> Option<OwnedFd> {
        let kept = self.fds.get(at)?.swap(0, Ordering::Relaxed).checked_sub(1)?;
        hidden::take_back(kept.cast_signed())
    }
}

/// An answer that was kept.
#[derive(Debug)]
pub(super) struct KeptAnswer {
    bytes: [u8; KEPT],
    len: usize,
    fds: Descriptors,
}

impl KeptAnswer {
    /// The answer, and its descriptors. `None` if there was none, or one that no step has.
    pub(super) fn parts(&mut self) -> Option<(BorrowedMessage<'_>, &mut Descriptors)> {
        let (_, message) = wire::decode_borrowed(self.bytes.get(..self.len)?).ok()?;
        Some((message, &mut self.fds))
    }
}

/// The message without what is only for people. `None` if it is no answer to a step.
fn without_texts(message: BorrowedMessage<'_>) -> Option<BorrowedMessage<'_>> {
    match message {
        BorrowedMessage::PeerIs { region, program, .. } => {
            Some(BorrowedMessage::PeerIs { region, program, user: User::Host(0), name: "" })
        }
        BorrowedMessage::Refused { code, reason } => {
            log!("the broker refused a step: {code}: {reason}");
            Some(BorrowedMessage::Refused { code, reason: "" })
        }
        BorrowedMessage::Bell { .. } => Some(message),
        _ => None,
    }
}
