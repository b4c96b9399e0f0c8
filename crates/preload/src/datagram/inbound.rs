//! The receiving side of a socket: the rings of those who send to it, and the kernel's queue behind them (protocol U6-U8).

use super::address::{self, Wanted};
use super::arrivals::KernelArrivals;
use super::asks::OfferAsks;
use super::closed_ring::ClosedRing;
use super::flow::{FlowPlaces, proof_for_receiver};
use super::guarded::SharedMutexGuard;
use super::kernel_queue;
use super::{DatagramSocket, flags};
use crate::broker;
use crate::buffers::CallerBuffers;
use crate::conn::{Cursor, FENCING, heavy_fence};
use crate::log::log;
use crate::sys;
use libc::c_int;
use partywall_protocol::directory::Proof;
use partywall_region::wait::this_core;
use partywall_shm::corrupt::Corrupt;
use partywall_shm::counters::add;
use partywall_shm::half::{Ending, Fenced, ReadingHalf, SecondLook};
use partywall_shm::layout::path_flags;
use partywall_shm::record;
use partywall_shm::status::Reason;
use partywall_shm::sync::{load_acquire, load_acquire_u32};
use rustix::fd::{AsFd, BorrowedFd};
use rustix::io::Errno;
use std::net::SocketAddr;
use std::sync::atomic::Ordering;

/// Rings that one socket receives by, at most.
pub(super) const RINGS: usize = 64;
/// Datagrams that are joined, at most (`UDP_GRO`).
const JOINED: usize = 64;
/// Calls in a row that rings may serve before the kernel's queue has its turn.
const TURNS: u32 = 16;
/// Larger rings of a peer than this are not mapped.
const MAX_PEER_RING: u64 = 64 << 20;
/// Looks at a sender that is in the middle of a datagram, before others are let run, and before the receiver sleeps nevertheless.
const LOOKS: (u32, u32) = (200, 1000);
/// Naps of a receiver during which a sender stays in the middle of a datagram, before its ring is given up.
const UNFINISHED: u32 = 20;

/// A ring, and whose.
#[derive(Debug)]
struct Inbound {
    flow: Option<&'static FlowPlaces>,
    ip: u128,
    port: u16,
    half: ReadingHalf,
    channel: u64,
    /// It is read to its end, and not used again.
    closed: Option<ClosedRing>,
    /// What its sender has sent by the kernel, and what of that has come, if the sender is on another machine.
    arrivals: KernelArrivals,
    /// Sleeps in a row before which its sender was in the middle of a datagram.
    unfinished: u32,
}

/// What lies in a ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RingContent {
    /// Nothing that will ever be read.
    Nothing,
    /// Bytes whose proof the broker has not renewed.
    Unproved,
    /// This number of bytes that are proved to be the sender's.
    Proved(u64),
}

impl Inbound {
    const NONE: Self = Self {
        flow: None,
        ip: 0,
        port: 0,
        half: ReadingHalf::new(0, 0),
        channel: 0,
        closed: None,
        arrivals: KernelArrivals::NONE,
        unfinished: 0,
    };

    fn from(&self) -> SocketAddr {
        SocketAddr::new(partywall_shm::address::narrow(self.ip), self.port)
    }

    fn is_from(&self, from: SocketAddr) -> bool {
        self.port == from.port() && self.ip == partywall_shm::address::wide(from.ip())
    }

    /// Whether a datagram that its sender has sent by the kernel is in the queue when the sender counts it.
    fn is_of_this_kernel(&self) -> bool {
        self.flow.is_none_or(|flow| !flow.is_between_machines())
    }

    /// Bytes that wait in it, and are proved to be of the socket that they are said to be of (protocol U11). A sender that breaks the
    /// protocol has none.
    #[inline]
    fn waiting(&mut self) -> u64 {
        match self.content() {
            RingContent::Proved(n) => n,
            RingContent::Nothing | RingContent::Unproved => 0,
        }
    }

    /// What lies in it, by one look at the broker's proof.
    #[inline]
    fn content(&mut self) -> RingContent {
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
    fn unproved(&mut self) -> u64 {
        match self.closed {
            None => self.written(),
            Some(closed) => self.written_before_end(closed),
        }
    }

    /// Bytes that its sender has written and that were not read.
    #[inline]
    fn written(&mut self) -> u64 {
        match self.half.available() {
            0 => self.refresh(),
            n => n,
        }
    }

    /// The same, by another look at the sender's cursor.
    #[inline]
    fn refresh(&mut self) -> u64 {
        let Some((own, peer)) = self.flow.and_then(FlowPlaces::pages).filter(|_| self.half.ended().is_none()) else {
            return self.half.available();
        };
        self.half.refresh(&peer.control.tx).unwrap_or_else(|what| {
            self.half.end(&own.control.rx, Ending::Corrupt(what));
            0
        })
    }

    #[cold]
    fn written_before_end(&mut self, closed: ClosedRing) -> u64 {
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
    fn is_unsettled(&mut self) -> bool {
        let is_written = self.is_written();
        self.unfinished = if is_written { self.unfinished + 1 } else { 0 };
        is_written || self.content() == RingContent::Unproved
    }

    /// Whether its sender is in the middle of a datagram.
    fn is_written(&self) -> bool {
        // EDGE sender-idle: as in `wait_until_idle`.
        self.flow.and_then(FlowPlaces::pages).is_some_and(|(_, peer)| load_acquire(&peer.tx_path.switched_at) != 0)
    }

    /// Whether bytes may still come by it, or may still be proved, though it is closed.
    fn awaits_more(&mut self) -> bool {
        self.is_written() || self.content() == RingContent::Unproved
    }

    /// Whether a ring that is not used any more can be given up: nothing will be read from it.
    fn is_read(&mut self) -> bool {
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
    fn has_ended(&self) -> bool {
        matches!(proof_for_receiver(self.channel), Proof::Ended { .. } | Proof::Unknown)
    }
}

/// The state that the lock of the receiving side guards.
#[derive(Debug)]
pub(super) struct DatagramRx {
    rings: [Inbound; RINGS],
    /// How many of them are in use, all at the beginning.
    count: usize,
    /// Where the next look begins.
    next: usize,
    turns: u32,
    /// `WATCHING` is set in all of them.
    open: bool,
    /// Bytes could still come by a ring, or be proved, at the last look before a sleep.
    was_unsettled: bool,
    /// What the broker was asked for.
    asks: OfferAsks,
    /// The socket's network namespace, which never changes, once it was needed: a look at the directory is no system call.
    netns: Option<u64>,
}

impl DatagramRx {
    pub(super) const fn new() -> Self {
        Self {
            rings: [const { Inbound::NONE }; RINGS],
            count: 0,
            next: 0,
            turns: 0,
            open: false,
            was_unsettled: false,
            asks: OfferAsks::NONE,
            netns: None,
        }
    }

    fn in_use(&mut self) -> &mut [Inbound] {
        &mut self.rings[..self.count]
    }

    /// How many rings there are.
    pub(super) fn count(&self) -> u32 {
        self.count as u32
    }

    /// The counts of senders up to which the kernel's queue was read.
    #[cfg(test)]
    pub(super) fn seen(&mut self) -> Vec<u32> {
        let pages = self.in_use().iter().filter_map(|ring| ring.flow.and_then(FlowPlaces::pages));
        pages.map(|(own, _)| own.rx_path.seen.load(Ordering::Relaxed)).collect()
    }

    /// As if all its rings were of senders on another machine.
    #[cfg(test)]
    pub(super) fn pretend_between_machines(&mut self) {
        self.in_use().iter().filter_map(|ring| ring.flow).for_each(FlowPlaces::pretend_between_machines);
    }

    /// Whether a ring is of a sender on another machine.
    pub(super) fn is_between_machines(&mut self) -> bool {
        self.in_use().iter().any(|ring| !ring.is_of_this_kernel())
    }

    pub(super) fn is_waiting(&mut self) -> bool {
        self.in_use().iter_mut().any(|ring| ring.waiting() > 0)
    }

    /// Whether anything lies in a ring, proved or not.
    pub(super) fn has_bytes(&mut self) -> bool {
        self.in_use().iter_mut().any(|ring| ring.unproved() > 0)
    }

    /// If something lies in a ring, a number that changes with every datagram that comes.
    pub(super) fn mark(&mut self) -> Option<u64> {
        let mut waiting = 0;
        let mut mark = 0u64;
        for ring in self.in_use() {
            waiting += ring.waiting();
            let tail = ring.half.head() + ring.half.available();
            mark = mark.wrapping_add(tail.wrapping_mul(2 * ring.channel + 1)).wrapping_add(ring.channel);
        }
        (waiting > 0).then_some(mark)
    }

    /// Bytes of the next datagram, if it lies in a ring.
    pub(super) fn next_len(&mut self) -> Option<u32> {
        let at = self.in_use().iter_mut().position(|ring| ring.waiting() > 0)?;
        let ring = &mut self.rings[at];
        ring_head(ring)
    }

    /// Whether every peer was, when it last said so, on the core that this thread is on.
    pub(super) fn shares_core(&mut self) -> bool {
        let core = this_core();
        core != 0
            && self.in_use().iter().filter_map(|ring| ring.flow).all(|flow| !flow.is_between_machines())
            && self.in_use().iter().filter_map(|ring| ring.flow.and_then(FlowPlaces::pages)).all(|(own, peer)| {
                if own.control.rx.control.cpu.load(Ordering::Relaxed) != core {
                    own.control.rx.control.cpu.store(core, Ordering::Relaxed);
                }
                peer.control.tx.control.cpu.load(Ordering::Relaxed) == core
            })
    }

    /// Lets those who have a ring use it, or not.
    pub(super) fn open(&mut self, open: bool) {
        self.open = open;
        for ring in self.in_use() {
            if let Some((own, _)) = ring.flow.and_then(FlowPlaces::pages) {
                let flags = if open && ring.closed.is_none() { path_flags::WATCHING } else { 0 };
                // EDGE ring-open: releases that the kernel's queue was read up to here; acquired in `DatagramSocket::send_by_ring`.
                own.rx_path.flags.store(flags, Ordering::Release);
            }
        }
    }

    /// Closes all of them permanently.
    pub(super) fn close(&mut self) {
        let closed = ClosedRing::new(sys::coarse_millis());
        self.in_use().iter_mut().filter(|ring| ring.closed.is_none()).for_each(|ring| ring.closed = Some(closed));
        self.open(false);
        // A sender that saw `WATCHING` is seen to write from here on, or has written (protocol U6.1).
        heavy_fence();
    }

    pub(super) fn is_open(&self) -> bool {
        self.open
    }

    /// Gives up a ring; what is in it is lost, as what lies in the queue of a socket that is closed.
    fn remove(&mut self, at: usize) {
        let mut ring = std::mem::replace(&mut self.rings[at], Inbound::NONE);
        self.count -= 1;
        self.rings.swap(at, self.count);
        let Some(flow) = ring.flow else { return };
        if let Some((own, _)) = flow.pages() {
            own.rx_path.flags.store(0, Ordering::Relaxed);
            ring.half.close(&own.control.rx);
        }
        flow.free();
        broker::closed(ring.channel);
    }

    pub(super) fn remove_all(&mut self) {
        while self.count > 0 {
            self.remove(self.count - 1);
        }
        // The next socket in this place has asked for nothing.
        self.asks = OfferAsks::NONE;
        self.netns = None;
    }

    /// In a child: they are its parent's.
    pub(super) fn forget(&mut self) {
        self.rings = [const { Inbound::NONE }; RINGS];
        self.count = 0;
        // The thread that awaits an answer is not in the child.
        self.asks = OfferAsks::NONE;
    }

    /// Whether the directory shows an offer from there to this socket.
    pub(super) fn shows_offer(&mut self, fd: c_int, port: u16, from: SocketAddr) -> bool {
        broker::knows_datagram_offer((fd, &mut self.netns), port, from)
    }

    /// How many datagrams each sender says to have sent by the kernel.
    fn sent(&mut self) -> [u32; RINGS] {
        let mut sent = [0; RINGS];
        for (sent, ring) in sent.iter_mut().zip(self.in_use()) {
            *sent =
                // EDGE sent-by-kernel: acquires from `DatagramSocket::send_to`.
                ring.flow.and_then(FlowPlaces::pages).map_or(0, |(_, peer)| load_acquire_u32(&peer.tx_path.switches));
        }
        sent
    }

    /// The kernel's queue was found empty after these had been sent by it.
    fn has_seen(&mut self, sent: &[u32; RINGS]) {
        for (sent, ring) in sent.iter().zip(self.in_use()) {
            if let Some((own, _)) = ring.flow.and_then(FlowPlaces::pages)
                && own.rx_path.seen.load(Ordering::Relaxed) != *sent
                && (ring.is_of_this_kernel() || ring.arrivals.are_complete(*sent, sys::now()))
            {
                // EDGE received: the kernel's queue was read up to these before this is seen; acquired in `DatagramSocket::send_by_ring`.
                own.rx_path.seen.store(*sent, Ordering::Release);
            }
        }
    }

    /// Whether something may come by a ring during a sleep for which all are closed. A sender that never finishes loses its ring.
    pub(super) fn is_unsettled(&mut self) -> bool {
        let mut unsettled = self.was_unsettled && self.count > 0;
        for at in (0..self.count).rev() {
            unsettled |= self.rings[at].is_unsettled();
            if self.rings[at].unfinished > UNFINISHED {
                log!("a sender of datagrams does not finish what it has begun");
                self.remove(at);
            }
        }
        unsettled
    }

    /// Gives up the rings that are not used any more, once they are read: their senders have finished or have gone, or they are closed.
    pub(super) fn sweep(&mut self) {
        for at in (0..self.count).rev() {
            let ring = &mut self.rings[at];
            let Some((_, peer)) = ring.flow.and_then(FlowPlaces::pages) else { continue };
            if ring.closed.is_none() && ring.half.judge(Some(&peer.control.tx), false).is_some() {
                ring.closed = Some(ClosedRing::new(sys::coarse_millis()));
            }
            if (ring.closed.is_some() || ring.has_ended()) && ring.is_read() {
                self.remove(at);
            }
        }
    }
}

fn ring_head(ring: &mut Inbound) -> Option<u32> {
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
fn join(ring: &mut Inbound, flow: &FlowPlaces, size: usize, cursor: &mut Cursor<'_>) -> usize {
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

/// The result of a look for a datagram.
pub(super) enum DatagramFound {
    /// The result of the call.
    Datagram(usize),
    /// There is none now.
    Nothing,
}

impl DatagramSocket {
    /// Takes the next datagram, from a ring or from the kernel, without waiting.
    pub(super) fn try_receive(
        &self,
        fd: c_int,
        buffers: CallerBuffers<'_>,
        message: c_int,
        wanted: Wanted,
    ) -> Result<DatagramFound, Errno> {
        let Some(mut rx) = self.rx.hold() else { return Err(Errno::AGAIN) };
        rx.turns += 1;
        if rx.turns >= TURNS && self.may_have_rings() {
            rx.turns = 0;
            rx.sweep();
            // EDGE inbound: as in `DatagramSocket::longest_sleep`.
            self.inbound.store(rx.count(), Ordering::Release);
            // The kernel's queue first; but what its first sender has sent before by a ring comes before that.
            if let Some(from) = kernel_queue::peek_source(fd)? {
                let of = |ring: &mut Inbound| ring.is_from(from) && ring.waiting() > 0;
                return match rx.in_use().iter_mut().position(of) {
                    Some(at) => self.deliver(&mut rx, at, buffers, message, wanted),
                    None => self.receive_from_kernel(rx, fd, buffers, message, wanted),
                };
            }
        }
        let count = rx.count;
        for i in 0..count {
            let at = (rx.next + i) % count;
            if rx.rings[at].waiting() > 0 {
                rx.next = at + usize::from(message & libc::MSG_PEEK == 0);
                return self.deliver(&mut rx, at, buffers, message, wanted);
            }
        }
        rx.turns = 0;
        self.receive_from_kernel(rx, fd, buffers, message, wanted)
    }

    fn deliver(
        &self,
        rx: &mut DatagramRx,
        at: usize,
        buffers: CallerBuffers<'_>,
        message: c_int,
        wanted: Wanted,
    ) -> Result<DatagramFound, Errno> {
        let ring = &mut rx.rings[at];
        let (Some(len), Some(flow)) = (ring_head(ring), ring.flow) else {
            log!("a sender of datagrams broke the protocol");
            if let Some((own, _)) = ring.flow.and_then(FlowPlaces::pages) {
                ring.half.end(&own.control.rx, Ending::Corrupt(Corrupt::BadRecord));
            }
            rx.remove(at);
            // EDGE inbound: as in `DatagramSocket::longest_sleep`.
            self.inbound.store(rx.count(), Ordering::Release);
            return Ok(DatagramFound::Nothing);
        };
        #[expect(unsafe_code, reason = "takes the caller's buffers, and reads from the peer's ring")]
        // SAFETY: the buffers are valid by the contract of `CallerBuffers::new`; the flow is in use as in `ring_head`.
        let (cursor, span) = unsafe {
            let whole = record::footprint(len.into());
            (Cursor::new(buffers.list()), flow.peer.peer_span(ring.half.head(), whole))
        };
        let Some(mut cursor) = cursor else { return Err(Errno::INVAL) };
        let len = len as usize;
        let mut got = cursor.copy_from(span.slice(record::HEADER as usize, len));
        let from = ring.from();
        if message & libc::MSG_PEEK == 0
            && let Some((own, peer)) = flow.pages()
        {
            let footprint = record::footprint(len as u64);
            ring.half.release(&own.control.rx, &peer.control.tx, footprint, FENCING);
            add(&own.control.rx.counters.messages, 1);
        }
        let mut all = len;
        let space = wanted.control();
        if self.has(flags::JOINS) && message & libc::MSG_PEEK == 0 && got == len && wanted.can_join() {
            got += join(ring, flow, len, &mut cursor);
            all = got;
        }
        let cut = if got < all { libc::MSG_TRUNC } else { 0 };
        wanted.give(from, self.has(flags::SIX), cut | message & libc::MSG_CMSG_CLOEXEC);
        if let (Some((space, room)), true) = (space, all > len) {
            // A datagram has less than 2^16 bytes.
            wanted.put_joined(space, room, len as c_int);
        }
        Ok(DatagramFound::Datagram(if message & libc::MSG_TRUNC != 0 { all } else { got }))
    }

    /// A datagram has come by the kernel, from a sender that may be on another machine.
    pub(super) fn note_arrival(&self, from: SocketAddr) {
        let Some(mut rx) = self.rx.hold() else { return };
        rx.in_use().iter_mut().filter(|ring| ring.is_from(from)).for_each(|ring| ring.arrivals.count());
    }

    /// Asks the kernel, and tells the senders, if its queue is empty, that it was (protocol U7).
    fn receive_from_kernel(
        &self,
        mut rx: SharedMutexGuard<'_, DatagramRx>,
        fd: c_int,
        buffers: CallerBuffers<'_>,
        message: c_int,
        wanted: Wanted,
    ) -> Result<DatagramFound, Errno> {
        let sent = rx.sent();
        match kernel_queue::take(fd, buffers, message, wanted) {
            Err(Errno::AGAIN) => {
                rx.has_seen(&sent);
                Ok(DatagramFound::Nothing)
            }
            Err(error) => Err(error),
            Ok(taken) => {
                drop(rx);
                if message & libc::MSG_PEEK == 0 {
                    self.came_by_kernel(fd, taken.len, || taken.from);
                }
                Ok(DatagramFound::Datagram(taken.len))
            }
        }
    }

    /// Lets senders know that the kernel's queue is empty, if it is, and one of them waits for that.
    pub(super) fn settle(&self, fd: c_int) {
        let Some(mut rx) = self.rx.hold() else { return };
        let sent = rx.sent();
        let waits = |ring: &Inbound, sent: u32| {
            ring.flow
                .and_then(FlowPlaces::pages)
                .is_some_and(|(own, _)| own.rx_path.seen.load(Ordering::Relaxed) != sent)
        };
        if rx.in_use().iter().zip(sent).any(|(ring, sent)| waits(ring, sent)) && !kernel_queue::has_something(fd) {
            rx.has_seen(&sent);
        }
    }

    /// Looks for an offer of the sender of a datagram that the kernel has delivered just now.
    #[cold]
    pub(super) fn look_for_offer(&self, fd: c_int, from: SocketAddr) {
        let (generation, closings, is_full) = {
            let Some(mut rx) = self.rx.hold() else { return };
            let closings = self.closings();
            let generation = broker::offer_generation();
            let known = rx.in_use().iter().any(|ring| ring.is_from(from) && ring.closed.is_none() && !ring.has_ended());
            if known || rx.asks.are_held(generation) || !rx.shows_offer(fd, self.port(fd), from) {
                return;
            }
            rx.sweep();
            // What lies in this sender's last ring is read before it gets another.
            if rx.in_use().iter().any(|ring| ring.is_from(from)) || !rx.asks.begin(generation, sys::coarse_millis()) {
                return;
            }
            (generation, closings, rx.count == RINGS)
        };
        let answer = if is_full { Err(Reason::Resources) } else { self.take_offer(fd, from, closings) };
        if let Some(mut rx) = self.rx.hold() {
            rx.asks.end(generation, answer, sys::coarse_millis());
        }
    }

    /// Takes an offer of this sender, unless another thread has closed the rings since `closings` were counted, as `connect` does.
    pub(super) fn take_offer(&self, fd: c_int, from: SocketAddr, closings: u32) -> Result<(), Reason> {
        let Some(flow) = FlowPlaces::allocate() else { return Err(Reason::Resources) };
        let mut taken = None;
        let result = self.take(fd, flow, (from, closings), &mut taken);
        if let Err(reason) = result {
            log!("no ring for datagrams from {from}: {}", reason.words());
            // First: the broker may give our place in a window to another program from then on (protocol U14.12).
            flow.free();
            if let Some(number) = taken {
                broker::closed(number);
            }
        }
        result
    }

    /// `number` becomes that of the flow when the broker has made it, whether or not this process can use it.
    fn take(
        &self,
        fd: c_int,
        flow: &'static FlowPlaces,
        (from, closings): (SocketAddr, u32),
        number: &mut Option<u64>,
    ) -> Result<(), Reason> {
        if crate::unseen::may_be() {
            return Err(Reason::RawCalls);
        }
        let (region, geometry) = flow.make_region(0)?;
        let move_to = |base: u64, window: BorrowedFd<'_>| {
            // Its kernel joins datagrams, so that they cannot be counted one by one.
            if self.has(flags::JOINS) { Err(Reason::Option) } else { flow.move_region(0, base, window) }
        };
        let taken = broker::take_datagrams(fd, from, (geometry, region.as_fd()), move_to)?;
        *number = Some(taken.number);
        let (place, memory) = taken.region?;
        let size = place.1.ring_size();
        match size {
            1..=MAX_PEER_RING => flow.attach_peer(place, &memory)?,
            _ => return Err(Reason::Corrupt),
        }
        let Some(mut rx) = self.rx.hold() else { return Err(Reason::Resources) };
        // Rings that are closed after this look are closed under the lock, and this one with them.
        if self.closings() != closings
            || rx.count == RINGS
            || !self.may_have_rings()
            || (flow.is_between_machines() && self.has(flags::JOINS))
        {
            return Err(Reason::Option);
        }
        let at = rx.count;
        rx.rings[at] = Inbound {
            flow: Some(flow),
            ip: partywall_shm::address::wide(from.ip()),
            port: from.port(),
            half: ReadingHalf::new(size, 0),
            channel: taken.number,
            closed: None,
            arrivals: KernelArrivals::NONE,
            unfinished: 0,
        };
        rx.count += 1;
        if flow.is_between_machines() {
            self.set(flags::ARRIVALS, true);
        }
        // EDGE inbound: as in `DatagramSocket::longest_sleep`. Before the look at the sleepers, in the order that
        // `DatagramSocket::on_kernel_alone` relies on.
        self.inbound.store(rx.count(), Ordering::SeqCst);
        // If a thread of this socket sleeps, the ring stays closed until it has woken (protocol U6.3).
        rx.open(!self.sleepers.are_any());
        log!("fd {fd} receives from {from} by a ring of {size} bytes");
        Ok(())
    }

    /// Closes the rings before a sleep on the socket of this generation (protocol U6). Returns `false` if a datagram lies in one already.
    pub(super) fn fall_asleep(&self, generation: u32) -> bool {
        self.fall_asleep_unless(generation, DatagramRx::is_waiting)
    }

    /// Like [`Self::fall_asleep`], with another reason to stay awake.
    pub(super) fn fall_asleep_unless(&self, generation: u32, is_news: impl FnOnce(&mut DatagramRx) -> bool) -> bool {
        self.sleepers.enter(generation);
        let Some(mut rx) = self.rx.hold() else { return true };
        let was_open = rx.open;
        if was_open {
            rx.open(false);
        }
        let closed = Fenced::after(());
        if was_open {
            // A sender that was interrupted in the middle of a datagram is checked again after a nap.
            rx.in_use().iter().for_each(wait_until_idle);
        }
        // Before the look: what comes between the two is found after a nap.
        rx.was_unsettled = rx.in_use().iter_mut().any(Inbound::awaits_more);
        if let SecondLook::Found(()) = closed.look(|| is_news(&mut rx).then_some(())) {
            self.rise(generation, &mut rx, true);
            return false;
        }
        rx.sweep();
        // EDGE inbound: as in `DatagramSocket::longest_sleep`.
        self.inbound.store(rx.count(), Ordering::Release);
        true
    }

    /// Opens the rings again after a sleep on the socket of this generation.
    pub(super) fn wake_up(&self, generation: u32, open: bool) {
        if let Some(mut rx) = self.rx.hold() {
            self.rise(generation, &mut rx, open);
        } else {
            self.sleepers.leave(generation);
        }
    }

    fn rise(&self, generation: u32, rx: &mut DatagramRx, open: bool) {
        let last = self.sleepers.leave(generation);
        if last && open && !rx.open && rx.count > 0 && self.may_have_rings() {
            rx.open(true);
        }
    }
}

/// Waits a little for a sender that is in the middle of a datagram.
fn wait_until_idle(ring: &Inbound) {
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
