//! One ring that a socket receives by, and the datagrams in it.

use crate::conn::{Cursor, FENCING};
use crate::datagram::address;
use crate::datagram::arrivals::KernelArrivals;
use crate::datagram::closed_ring::ClosedRing;
use crate::datagram::flow::{FlowPlaces, proof_for_receiver};
use crate::sys;
use partywall_protocol::directory::Proof;
use partywall_shm::counters::add;
use partywall_shm::half::{Ending, ReadingHalf};
use partywall_shm::record;
use partywall_shm::sync::load_acquire;
use std::net::SocketAddr;

/// Datagrams that are joined, at most (`UDP_GRO`).
const JOINED: usize = 64;
/// Looks at a sender that is in the middle of a datagram, before others are let run, and before the receiver sleeps nevertheless.
const LOOKS: (u32, u32) = (200, 1000);

/// A ring, and whose.
#[derive(Debug)]
pub(super) struct Inbound {
    pub(super) flow: Option<&'static FlowPlaces>,
    pub(super) ip: u128,
    pub(super) port: u16,
    pub(super) half: ReadingHalf,
    pub(super) channel: u64,
    /// It is read to its end, and not used again.
    pub(super) closed: Option<ClosedRing>,
    /// What its sender has sent by the kernel, and what of that has come, if the sender is on another machine.
    pub(super) arrivals: KernelArrivals,
    /// Sleeps in a row before which its sender was in the middle of a datagram.
    pub(super) unfinished: u32,
}

/// What lies in a ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RingContent {
    /// Nothing that will ever be read.
    Nothing,
    /// Bytes whose proof the broker has not renewed.
    Unproved,
    /// This number of bytes that are proved to be the sender's.
    Proved(u64),
}

impl Inbound {
    pub(super) const NONE: Self = Self {
        flow: None,
        ip: 0,
        port: 0,
        half: ReadingHalf::new(0, 0),
        channel: 0,
        closed: None,
        arrivals: KernelArrivals::NONE,
        unfinished: 0,
    };

    pub(super) fn from(&self) -> SocketAddr {
        SocketAddr::new(partywall_shm::address::narrow(self.ip), self.port)
    }

    pub(super) fn is_from(&self, from: SocketAddr) -> bool {
        self.port == from.port() && self.ip == partywall_shm::address::wide(from.ip())
    }

    /// Whether a datagram that its sender has sent by the kernel is in the queue when the sender counts it.
    pub(super) fn is_of_this_kernel(&self) -> bool {
        self.flow.is_none_or(|flow| !flow.is_between_machines())
    }

    /// Bytes that wait in it, and are proved to be of the socket that they are said to be of (protocol U11). A sender that breaks the
    /// protocol has none.
    #[inline]
    pub(super) fn waiting(&mut self) -> u64 {
        match self.content() {
            RingContent::Proved(n) => n,
            RingContent::Nothing | RingContent::Unproved => 0,
        }
    }

    /// What lies in it, by one look at the broker's proof.
    #[inline]
    pub(super) fn content(&mut self) -> RingContent {
        let n = match self.unproved() {
            0 => return RingContent::Nothing,
            n => n,
        };
        match proof_for_receiver(self.channel) {
            Proof::Good => RingContent::Proved(n),
            Proof::Ended { limit } => match limit.saturating_sub(self.half.head()) {
                left @ 1.. if left <= self.half.capacity() => RingContent::Proved(n.min(left)),
                // The sender's word about its tail was false when its socket was gone. It would let it write without end (protocol U11.16).
                _ => RingContent::Nothing,
            },
            Proof::Stale => RingContent::Unproved,
            Proof::Unknown => RingContent::Nothing,
        }
    }

    /// Bytes that lie in it, whosever they are. A sender that breaks the protocol has none.
    #[inline]
    pub(super) fn unproved(&mut self) -> u64 {
        match self.closed {
            None => self.written(),
            Some(closed) => self.written_before_end(closed),
        }
    }

    /// Bytes that its sender has written and that were not read.
    #[inline]
    pub(super) fn written(&mut self) -> u64 {
        match self.half.available() {
            0 => self.refresh(),
            n => n,
        }
    }

    /// The same, by another look at the sender's cursor.
    #[inline]
    pub(super) fn refresh(&mut self) -> u64 {
        let Some((own, peer)) = self.flow.and_then(FlowPlaces::pages).filter(|_| self.half.ended().is_none()) else {
            return self.half.available();
        };
        self.half.refresh(&peer.control.tx).unwrap_or_else(|what| {
            self.half.end(&own.control.rx, Ending::Corrupt(what));
            0
        })
    }

    #[cold]
    pub(super) fn written_before_end(&mut self, closed: ClosedRing) -> u64 {
        let end = match closed.end() {
            Some(end) => end,
            // In this order: what a sender has written before it was idle is found.
            None if !self.is_written() || closed.must_be_finished(sys::coarse_millis()) => {
                let end = self.half.head() + self.refresh();
                self.closed = Some(closed.ending_at(end));
                end
            }
            None => return self.written(),
        };
        self.written().min(end.saturating_sub(self.half.head()))
    }

    /// Whether bytes may still come by it though it is closed for a sleep: its sender has not finished a datagram, or the broker has not
    /// renewed the proof of the bytes in it.
    pub(super) fn is_unsettled(&mut self) -> bool {
        let is_written = self.is_written();
        self.unfinished = if is_written { self.unfinished + 1 } else { 0 };
        is_written || self.content() == RingContent::Unproved
    }

    /// Whether its sender is in the middle of a datagram.
    pub(super) fn is_written(&self) -> bool {
        // EDGE sender-idle: as in `wait_until_idle`.
        self.flow.and_then(FlowPlaces::pages).is_some_and(|(_, peer)| load_acquire(&peer.tx_path.switched_at) != 0)
    }

    /// Whether bytes may still come by it, or may still be proved, though it is closed.
    pub(super) fn awaits_more(&mut self) -> bool {
        self.is_written() || self.content() == RingContent::Unproved
    }

    /// Whether a ring that is not used any more can be given up: nothing will be read from it.
    pub(super) fn is_read(&mut self) -> bool {
        let content = self.content();
        let is_proved = content != RingContent::Unproved;
        let is_given_up =
            self.closed.as_mut().is_some_and(|closed| closed.is_hopeless(is_proved, sys::coarse_millis()));
        match content {
            // Until it has an end, a sender that saw the ring open may still write to it.
            RingContent::Nothing => self.closed.is_none_or(|closed| closed.end().is_some()),
            RingContent::Unproved => is_given_up,
            RingContent::Proved(_) => false,
        }
    }

    /// Whether it will not be written any more, as far as the broker says.
    pub(super) fn has_ended(&self) -> bool {
        matches!(proof_for_receiver(self.channel), Proof::Ended { .. } | Proof::Unknown)
    }
}

/// Bytes of the next datagram. `None`: there is none, or its sender breaks the protocol.
pub(super) fn ring_head(ring: &mut Inbound) -> Option<u32> {
    let available = ring.waiting();
    let flow = ring.flow?;
    let mut header = [0; record::HEADER as usize];
    #[expect(unsafe_code, reason = "reads from the peer's ring")]
    // SAFETY: the flow is in use, under the lock of the receiving side, which the thread that frees it holds.
    let span = unsafe { flow.peer.peer_span(ring.half.head(), record::HEADER) };
    span.copy_to(&mut header);
    // A record may be as long as the ring allows; a datagram may not.
    let longest = record::longest(flow.peer.ring_size()).min(address::longest(ring.from().ip()) as u64);
    record::parse(header, available, longest).ok()
}

/// Takes the datagrams behind one of `size` bytes that may be joined with it (`UDP_GRO`): they have that length, except that the last one may
/// be shorter, and the caller's buffers have room for all of them. Returns their bytes.
pub(super) fn join(ring: &mut Inbound, flow: &FlowPlaces, size: usize, cursor: &mut Cursor<'_>) -> usize {
    let longest = address::longest(ring.from().ip());
    let mut joined = 0;
    for _ in 1..JOINED {
        if ring.waiting() == 0 {
            break;
        }
        // What breaks the protocol is found again by the next call.
        let Some(len) = ring_head(ring).map(|len| len as usize) else { break };
        if len == 0 || len > size || len > cursor.left() || size + joined + len > longest {
            break;
        }
        let Some((own, peer)) = flow.pages() else { break };
        let footprint = record::footprint(len as u64);
        #[expect(unsafe_code, reason = "reads from the peer's ring")]
        // SAFETY: the flow is in use as in `ring_head`, which has found that the record lies in the ring.
        let span = unsafe { flow.peer.peer_span(ring.half.head(), footprint) };
        joined += cursor.copy_from(span.slice(record::HEADER as usize, len));
        ring.half.release(&own.control.rx, &peer.control.tx, footprint, FENCING);
        add(&own.control.rx.counters.messages, 1);
        if len < size {
            break;
        }
    }
    joined
}

/// Waits a little for a sender that is in the middle of a datagram.
pub(super) fn wait_until_idle(ring: &Inbound) {
    let Some((_, peer)) = ring.flow.and_then(FlowPlaces::pages) else { return };
    let mut looks = 0;
    // EDGE sender-idle: acquires what the sender wrote to the ring, from `DatagramSocket::send_by_ring`.
    while load_acquire(&peer.tx_path.switched_at) != 0 {
        looks += 1;
        match looks {
            _ if looks > LOOKS.1 => return,
            // It may need this very core.
            _ if looks > LOOKS.0 => std::thread::yield_now(),
            _ => std::hint::spin_loop(),
        }
    }
}
