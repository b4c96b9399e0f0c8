//! The frames that a port sends: taken from its queue, checked, and handed over.

use super::{Engine, EnginePort, PortEnd, SpentWork, WaitingUplink};
use crate::VhostError;
use crate::card::{CardFormat, PAIRS, Parked};
use crate::chain::ChainBuffers;
use crate::offload::{LONG, NetHeader, SHORT};
use crate::ring::VirtioRing;
use crate::spin::nanoseconds;
use crate::switch::{DiscardReason, FrameDecision, HEAD, PortNumber};
use crate::transfer::{FrameBytes, read};
use std::ops::Range;
use vm_memory::GuestMemoryMmap;

/// A port's turn ends with this many frames, or bytes.
const TURN_FRAMES: usize = 64;
const TURN_BYTES: usize = 512 << 10;
/// Pieces of memory whose frames end a port's turn.
const TURN_PIECES: usize = 4096;
/// Frames that are taken together. The processor waits for the cache lines of their beginnings at the same time, and not for one after
/// the other.
const BATCH: usize = 16;
/// The cost of a segment that the switch makes, beside its bytes, in bytes.
const SEGMENT: usize = 256;

/// The fate of a frame.
pub(super) enum Handed {
    Done,
    /// Its receiver has no buffers in this queue, whose driver was at this position.
    Full(PortNumber, usize, u16),
}

/// A frame that was taken from its queue, and is not handed over yet.
#[derive(Debug)]
struct TakenFrame {
    /// The queue's position in front of it.
    position: u16,
    head: u16,
    /// Its buffers, among those of the batch.
    buffers: Range<usize>,
    /// Bytes of its buffers.
    total: usize,
    /// How many of its first bytes were read.
    got: usize,
}

/// Frames that were taken together.
#[derive(Debug)]
pub(super) struct TakenBatch {
    frames: Vec<TakenFrame>,
    buffers: ChainBuffers,
    /// The first bytes of each frame, the header included.
    starts: Box<[[u8; LONG + HEAD]; BATCH]>,
}

impl Default for TakenBatch {
    fn default() -> Self {
        Self { frames: Vec::new(), buffers: ChainBuffers::default(), starts: Box::new([[0; LONG + HEAD]; BATCH]) }
    }
}

impl TakenBatch {
    /// Takes at most this many frames. An error is one of the frame behind those that were taken.
    fn take(
        &mut self,
        ring: &mut VirtioRing,
        memory: &GuestMemoryMmap,
        header: usize,
        most: usize,
    ) -> Result<(), VhostError> {
        self.frames.clear();
        self.buffers.clear();
        let mut fault = Ok(());
        while self.frames.len() < most.min(BATCH) && self.buffers.readable.len() < TURN_PIECES {
            let position = ring.position();
            match self.take_chain(ring, memory) {
                Ok(Some((head, buffers))) => {
                    let total = self.buffers.readable[buffers.clone()].iter().map(|piece| piece.length).sum();
                    self.frames.push(TakenFrame { position, head, buffers, total, got: 0 });
                }
                Ok(None) => break,
                Err(e) => {
                    fault = Err(e);
                    break;
                }
            }
        }
        for (frame, start) in self.frames.iter_mut().zip(self.starts.iter_mut()) {
            let wanted = (header + HEAD).min(frame.total);
            let buffers = &self.buffers.readable[frame.buffers.clone()];
            frame.got = read(memory, buffers, 0, &mut start[..wanted]).unwrap_or(0);
        }
        fault
    }

    /// The next chain: its head, and its buffers among those of the batch.
    fn take_chain(
        &mut self,
        ring: &mut VirtioRing,
        memory: &GuestMemoryMmap,
    ) -> Result<Option<(u16, Range<usize>)>, VhostError> {
        let begin = self.buffers.readable.len();
        let Some(head) = ring.next_head(memory)? else { return Ok(None) };
        ring.append_buffers(memory, head, &mut self.buffers)?;
        if !self.buffers.writable.is_empty() {
            return Err(VhostError::Queue("a buffer is of the wrong direction"));
        }
        Ok(Some((head, begin..self.buffers.readable.len())))
    }
}

/// Whether a frame may wait for its receiver.
struct HoldAllowance {
    /// Its sender has not waited too much lately, for whomever.
    may_wait: bool,
    /// The receiver that it has waited for already.
    expired: Option<PortNumber>,
}

impl Engine {
    /// A port's turn; whether any frame moved.
    pub(super) fn transmit(&mut self, port: &mut EnginePort) -> bool {
        match &port.end {
            PortEnd::Card(card) if card.session.is_none() => false,
            PortEnd::Card(_) => {
                let mut worked = false;
                for pair in 0..PAIRS {
                    worked |= self.transmit_ring(port, pair);
                }
                worked
            }
            PortEnd::Uplink { .. } => self.transmit_uplink(port),
        }
    }

    fn transmit_ring(&mut self, port: &mut EnginePort, pair: usize) -> bool {
        let now = self.turn_time();
        let PortEnd::Card(card) = &mut port.end else { return false };
        let Some(session) = &mut card.session else { return false };
        let format = CardFormat::of(session.features());
        let (table, rings) = session.parts();
        let ring = &mut rings[2 * pair + 1];
        if !ring.runs() {
            card.parked[pair] = None;
            return false;
        }
        let memory: &GuestMemoryMmap = table.map();
        if !ring.has_work(memory) {
            card.parked[pair] = None;
            return false;
        }
        let mut expired = None;
        if let Some(parked) = card.parked[pair] {
            if !self.may_go_on(parked, now) {
                return false;
            }
            card.parked[pair] = None;
            if parked.on.is_some() {
                card.waits.take(now, now.saturating_sub(parked.since) / 1000);
            }
            expired = self.waited(parked, now);
        }
        let may_wait = card.waits.wait(now) == 0;
        let mut batch = std::mem::take(&mut self.scratch.batch);
        let (mut frames, mut bytes, mut taken_pieces, mut ends) = (0, 0, 0, false);
        while !ends && frames < TURN_FRAMES && bytes < TURN_BYTES && taken_pieces < TURN_PIECES {
            let fault = batch.take(ring, memory, format.header, TURN_FRAMES - frames);
            ends = batch.frames.is_empty();
            for (taken, start) in batch.frames.iter().zip(batch.starts.iter()) {
                if bytes >= TURN_BYTES || taken_pieces >= TURN_PIECES {
                    ring.rewind(taken.position);
                    ends = true;
                    break;
                }
                frames += 1;
                taken_pieces += taken.buffers.len();
                // The header and the frame's beginning, if both were read. Whether the frame has a good length is judged with the header. Nothing of
                // it is moved: a move reads more than was written last, and so waits until those stores are done.
                let wanted = (format.header + HEAD).min(taken.total);
                let head = start.get(format.header..wanted).filter(|_| taken.got == wanted);
                let (Some(head), Some(short)) = (head, start.first_chunk()) else {
                    port.counters.malformed += 1;
                    let _ = ring.complete(memory, taken.head, 0);
                    continue;
                };
                let length = taken.total - format.header;
                let mut header = NetHeader::default();
                if !header.read(short, head, length) {
                    port.counters.malformed += 1;
                    let _ = ring.complete(memory, taken.head, 0);
                    continue;
                }
                let buffers = &batch.buffers.readable[taken.buffers.clone()];
                let rest = (head.len() < length).then_some((memory, buffers, wanted));
                let frame = &FrameBytes { head, rest, length };
                if let Some(rate) = &mut port.rate {
                    let wait = rate.wait(now);
                    if wait > 0 {
                        ring.rewind(taken.position);
                        card.parked[pair] = Some(Parked { since: now, until: now + wait, on: None });
                        ends = true;
                        break;
                    }
                }
                let allowance = HoldAllowance { may_wait, expired: expired.take() };
                let handed = self.hand_over(now, port.number, &mut port.counters, &header, frame, allowance);
                if let Handed::Full(to, queue, seen) = handed {
                    port.counters.held += 1;
                    ring.rewind(taken.position);
                    let until = now + nanoseconds(self.options.hold);
                    card.parked[pair] = Some(Parked { since: now, until, on: Some((to, queue, seen)) });
                    ends = true;
                    break;
                }
                if let Some(rate) = &mut port.rate {
                    rate.take(now, (frame.length + SEGMENT * self.spent.segments) as u64);
                }
                port.counters.sent += 1;
                port.counters.sent_bytes += frame.length as u64;
                bytes += frame.length.max(self.spent.bytes) + SEGMENT * self.spent.segments;
                if ring.complete(memory, taken.head, 0).is_err() {
                    port.counters.broken += 1;
                    ring.give_up();
                    ends = true;
                    break;
                }
            }
            if let (Err(e), false) = (fault, ends && !batch.frames.is_empty()) {
                port.counters.broken += 1;
                tracing::warn!(port = %port.spec.name, "{e}");
                ring.give_up();
                ends = true;
            }
        }
        ring.publish(memory);
        ring.notify(memory);
        self.scratch.batch = batch;
        self.note_turn(frames, bytes);
        frames > 0
    }

    fn transmit_uplink(&mut self, port: &mut EnginePort) -> bool {
        let now = self.turn_time();
        let PortEnd::Uplink { device, waiting, buffer } = &mut port.end else { return false };
        let mut expired = None;
        let mut again = None;
        if let Some(WaitingUplink { frame, parked }) = *waiting {
            if !self.may_go_on(parked, now) {
                return false;
            }
            *waiting = None;
            expired = self.waited(parked, now);
            again = frame;
        }
        device.resume();
        let (mut frames, mut bytes) = (0, 0);
        while frames < TURN_FRAMES && bytes < TURN_BYTES {
            let wait = port.rate.as_mut().map_or(0, |rate| rate.wait(now));
            if wait > 0 {
                let parked = Parked { since: now, until: now.saturating_add(wait), on: None };
                *waiting = Some(WaitingUplink { frame: again.take(), parked });
                break;
            }
            let Some(length) = again.take().or_else(|| device.receive(buffer)) else { break };
            frames += 1;
            let (start, frame) = buffer[..length].split_at(LONG);
            let mut short = [0; SHORT];
            short.copy_from_slice(&start[..SHORT]);
            let Some(header) = NetHeader::checked(&short, &frame[..frame.len().min(HEAD)], frame.len()) else {
                port.counters.malformed += 1;
                continue;
            };
            let bytes_of = FrameBytes::flat(frame);
            let allowance = HoldAllowance { may_wait: true, expired: expired.take() };
            let handed = self.hand_over(now, port.number, &mut port.counters, &header, &bytes_of, allowance);
            if let Handed::Full(to, queue, seen) = handed {
                port.counters.held += 1;
                let until = now + nanoseconds(self.options.hold);
                let parked = Parked { since: now, until, on: Some((to, queue, seen)) };
                *waiting = Some(WaitingUplink { frame: Some(length), parked });
                break;
            }
            if let Some(rate) = &mut port.rate {
                rate.take(now, (frame.len() + SEGMENT * self.spent.segments) as u64);
            }
            bytes += frame.len().max(self.spent.bytes) + SEGMENT * self.spent.segments;
            port.counters.sent += 1;
            port.counters.sent_bytes += frame.len() as u64;
        }
        self.note_turn(frames, bytes);
        frames > 0
    }

    /// Judges a frame and gives it to those that it goes to.
    fn hand_over(
        &mut self,
        now: u64,
        from: PortNumber,
        counters: &mut crate::PortCounters,
        header: &NetHeader,
        frame: &FrameBytes<'_>,
        allowance: HoldAllowance,
    ) -> Handed {
        self.spent = SpentWork::default();
        let head = &frame.head[..frame.head.len().min(HEAD)];
        match self.switch.admit_segments(now, from, head, header.segments(frame.length) as u64) {
            FrameDecision::Forward(to) => {
                let may_wait = allowance.may_wait && allowance.expired != Some(to);
                return self.deliver(now, to, header, frame, may_wait);
            }
            FrameDecision::Flood => {
                let others: Vec<PortNumber> = self.ports.keys().copied().collect();
                for to in others {
                    self.deliver(now, to, header, frame, false);
                }
            }
            FrameDecision::Discard(DiscardReason::Spoofed) => counters.spoofed += 1,
            FrameDecision::Discard(DiscardReason::FloodLimit) => counters.flood_limited += 1,
            FrameDecision::Discard(DiscardReason::Malformed) => counters.malformed += 1,
            FrameDecision::Discard(DiscardReason::Reserved | DiscardReason::SamePort | DiscardReason::NoPort) => {}
        }
        Handed::Done
    }

    /// Whether a queue need not wait any longer.
    fn may_go_on(&mut self, parked: Parked, now: u64) -> bool {
        if now >= parked.until {
            return true;
        }
        let Some((number, queue, seen)) = parked.on else { return false };
        let Some(EnginePort { end: PortEnd::Card(card), .. }) = self.ports.get_mut(&number) else { return true };
        let Some(session) = &mut card.session else { return true };
        let (memory, rings) = session.parts();
        !rings[queue].runs() || rings[queue].offered(memory.map()) != seen
    }

    /// Charges the wait to the receiver. Returns it if the wait was without success.
    fn waited(&mut self, parked: Parked, now: u64) -> Option<PortNumber> {
        let (number, queue, seen) = parked.on?;
        let Some(EnginePort { end: PortEnd::Card(card), .. }) = self.ports.get_mut(&number) else { return None };
        card.patience.take(now, now.saturating_sub(parked.since) / 1000);
        let session = card.session.as_mut()?;
        let (memory, rings) = session.parts();
        let moved = rings[queue].offered(memory.map()) != seen;
        if now >= parked.until && !moved {
            card.stalled = true;
            return Some(number);
        }
        None
    }
}
