//! The sending side of a socket: to where it sends, and by which ring (protocol U3, U5-U8, U10).

use super::asks::BusyPause;
use super::flow::{FlowPlaces, proof_for_sender};
use super::retry::OfferRetry;
use super::segments::SentSegments;
use super::{DatagramCarrier, DatagramSocket, address, flags};
use crate::buffers::CallerBuffers;
use crate::conn::{Cursor, FENCING};
use crate::log::log;
use crate::{broker, real, sys};
use libc::{c_int, ssize_t};
use partywall_protocol::directory::Proof;
use partywall_region::wait::this_core;
use partywall_shm::address::wide;
use partywall_shm::bytes::PeerBytes;
use partywall_shm::counters::add;
use partywall_shm::half::{Ending, WritingHalf};
use partywall_shm::layout::path_flags;
use partywall_shm::record;
use partywall_shm::status::Reason;
use partywall_shm::sync::load_acquire_u32;
use rustix::fd::{AsFd, BorrowedFd};
use rustix::io::Errno;
use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Destinations that a socket remembers. Of more, those that it sends to least stay on the kernel.
const DESTINATIONS: usize = 16;
/// Looks for the answer to an offer on each call, so often; after that on every sixteenth.
const EAGER: u32 = 64;
/// Looks at a full ring before a datagram is dropped: about as long as the kernel would take to carry it.
const LOOKS: u32 = 100;
/// Datagrams that one call may be split into. Later kernels take twice as many.
const SEGMENTS: usize = 64;
/// The time after which an offer that was not taken has ended (protocol U3.3), and the next may be made.
const OFFER_LIFE: Duration = Duration::from_secs(31);
/// The shortest ring: that of the longest datagram, and room for others.
const LEAST: u64 = 128 << 10;
/// Sends to a receiver that has not read the last, before its cursor is looked at though there is room.
const DOUBT: u32 = 32;

/// How far the way to a ring has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
enum FlowStage {
    /// Counting.
    Counting,
    /// Offered.
    Offered,
    /// There is one.
    Attached,
}

#[derive(Debug)]
struct Outbound {
    ip: u128,
    port: u16,
    stage: FlowStage,
    calls: u64,
    bytes: u64,
    /// The number of listeners when one was looked for and not found.
    asked: u64,
    retry: OfferRetry,
    busy: BusyPause,
    flow: Option<&'static FlowPlaces>,
    channel: u64,
    half: WritingHalf,
    /// Datagrams that went by the kernel; modulo 2^32.
    by_kernel: u32,
    looks: u32,
    unread: u32,
    /// When it was offered.
    offered: Duration,
    /// The segments that the kernel has sent there.
    segments: SentSegments,
}

impl Outbound {
    const NONE: Self = Self {
        ip: 0,
        port: 0,
        stage: FlowStage::Counting,
        calls: 0,
        bytes: 0,
        asked: 0,
        retry: OfferRetry::NONE,
        busy: BusyPause::NONE,
        flow: None,
        channel: 0,
        half: WritingHalf::new(0),
        by_kernel: 0,
        looks: 0,
        unread: 0,
        offered: Duration::ZERO,
        segments: SentSegments::NONE,
    };

    fn to(&self) -> SocketAddr {
        SocketAddr::new(partywall_shm::address::narrow(self.ip), self.port)
    }

    /// What an offered or attached ring demands of a receiving call that sleeps.
    fn demand(&mut self) -> RingsOut {
        if self.stage == FlowStage::Offered {
            // Our region is in a window already.
            let is_far = self.flow.is_some_and(FlowPlaces::is_between_machines);
            return if is_far { RingsOut::BetweenMachines } else { RingsOut::None };
        }
        let Some((flow, (_, peer))) = self.flow.and_then(|flow| Some((flow, flow.pages()?))) else {
            return RingsOut::None;
        };
        if self.half.refresh(&peer.control.rx).is_ok() && !self.half.is_drained() {
            RingsOut::Unread
        } else if flow.is_between_machines() {
            RingsOut::BetweenMachines
        } else {
            RingsOut::None
        }
    }

    /// Gives up a flow that is offered, if it has ended, or was not taken in time. Returns what the broker says of it.
    fn look_for_end(&mut self) -> Proof {
        let proof = proof_for_sender(self.channel);
        match proof {
            Proof::Good | Proof::Stale => {}
            Proof::Ended { .. } => self.give_up(),
            Proof::Unknown => {
                if sys::coarse_now().saturating_sub(self.offered) >= OFFER_LIFE {
                    self.give_up();
                }
            }
        }
        proof
    }

    /// Back to the kernel, and to counting.
    fn give_up(&mut self) {
        let channel = std::mem::take(&mut self.channel);
        let is_attached = self.stage == FlowStage::Attached;
        if is_attached {
            // The flow may have ended because a machine was late, and its receiver is still there (protocol U14.17).
            self.retry.put_off(sys::coarse_millis());
        }
        if let Some(flow) = self.flow.take() {
            if let (true, Some((own, _))) = (is_attached, flow.pages()) {
                self.half.finish(&own.control.tx);
            }
            // First: the broker may give our place in a window to another program from then on (protocol U14.12).
            flow.free();
            if is_attached {
                broker::closed(channel);
            } else {
                broker::cancel(channel);
            }
        }
        self.stage = FlowStage::Counting;
        // Not before as many again.
        (self.calls, self.bytes) = (0, 0);
    }
}

/// The state that the lock of the sending side guards.
#[derive(Debug)]
pub(super) struct DatagramTx {
    to: [Outbound; DESTINATIONS],
    last: usize,
}

impl DatagramTx {
    pub(super) const fn new() -> Self {
        Self { to: [const { Outbound::NONE }; DESTINATIONS], last: 0 }
    }

    /// The place of a destination.
    #[inline]
    fn find(&mut self, to: SocketAddr) -> Option<usize> {
        let (ip, port) = (wide(to.ip()), to.port());
        let is = |one: &Outbound| one.port == port && one.ip == ip;
        if is(&self.to[self.last]) {
            return Some(self.last);
        }
        let at = self.to.iter().position(is).or_else(|| {
            let idle = self.to.iter().enumerate().filter(|(_, one)| one.stage == FlowStage::Counting);
            let (at, _) = idle.min_by_key(|(_, one)| one.calls)?;
            self.to[at] = Outbound { ip, port, ..Outbound::NONE };
            Some(at)
        })?;
        self.last = at;
        Some(at)
    }

    /// Gives up all rings. Unread datagrams in them can still be read.
    pub(super) fn give_up(&mut self) {
        for one in &mut self.to {
            one.give_up();
        }
    }

    /// In a child: they are its parent's.
    pub(super) fn forget(&mut self) {
        *self = Self::new();
    }
}

/// What the rings that a socket sends by demand of a receiving call that sleeps: how often it has to look after them
/// ([`DatagramSocket::look_after_receivers`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum RingsOut {
    /// Nothing.
    None,
    /// A ring leads to another machine, or is offered there. It has to be unmapped when its flow has ended.
    BetweenMachines,
    /// A datagram lies unread in a ring. Should the flow end, it goes by the kernel.
    Unread,
}

/// The fate of a datagram.
enum Sent {
    /// It is in a ring, or was dropped as the kernel would have.
    Done(usize),
    /// The kernel is to have it.
    Kernel,
    /// And is to be counted there.
    Counted,
}

impl DatagramSocket {
    /// Sends a datagram. `kernel` is the call as the program made it.
    pub(super) fn send_to(
        &'static self,
        fd: c_int,
        to: SocketAddr,
        carrier: DatagramCarrier,
        buffers: CallerBuffers<'_>,
        kernel: impl FnOnce() -> ssize_t,
    ) -> ssize_t {
        let Some(mut tx) = self.tx.hold() else { return kernel() };
        let Some(at) = tx.find(to) else { return kernel() };
        let one = &mut tx.to[at];
        let len = buffers.len();
        let sent = match (one.stage, carrier) {
            (FlowStage::Attached, DatagramCarrier::Any(segment)) => self.send_by_ring(fd, one, buffers, (len, segment)),
            // It comes before those that follow it by the ring.
            (FlowStage::Attached, DatagramCarrier::Kernel) => Sent::Counted,
            (_, DatagramCarrier::Kernel) => Sent::Kernel,
            _ => {
                one.calls += 1;
                one.bytes += len as u64;
                self.advance(fd, one);
                // Not before the ring, but beside it: what follows must not overtake it.
                if one.stage == FlowStage::Attached { Sent::Counted } else { Sent::Kernel }
            }
        };
        match sent {
            Sent::Done(n) => ssize_t::try_from(n).unwrap_or(ssize_t::MAX),
            Sent::Kernel => {
                drop(tx);
                kernel()
            }
            Sent::Counted => {
                let flow = one.flow.map(std::ptr::from_ref);
                drop(tx);
                let result = kernel();
                let errno = sys::errno_number();
                // Now it is in the receiver's queue, or lost.
                if let Some(mut tx) = self.tx.hold() {
                    let one = &mut tx.to[at];
                    if one.stage == FlowStage::Attached
                        && one.flow.map(std::ptr::from_ref) == flow
                        && let Some((own, _)) = one.flow.and_then(FlowPlaces::pages)
                    {
                        if let (DatagramCarrier::Any(segment), 0..) = (carrier, result) {
                            one.segments.note(segment, len);
                        }
                        let segment = match carrier {
                            DatagramCarrier::Any(segment) => segment,
                            DatagramCarrier::Kernel => self.segment.load(Ordering::Relaxed) as u16,
                        };
                        let count = if result < 0 { 1 } else { datagrams_of(len, segment) };
                        one.by_kernel = one.by_kernel.wrapping_add(count);
                        // EDGE sent-by-kernel: the datagram is in the receiver's queue before this is seen; acquired in `DatagramRx::sent`.
                        own.tx_path.switches.store(one.by_kernel, Ordering::Release);
                    }
                }
                sys::restore_errno(errno);
                result
            }
        }
    }

    fn send_by_ring(
        &self,
        fd: c_int,
        one: &mut Outbound,
        buffers: CallerBuffers<'_>,
        (len, segment): (usize, u16),
    ) -> Sent {
        let Some((own, peer)) = one.flow.and_then(FlowPlaces::pages) else { return Sent::Kernel };
        // Each datagram goes by a ring only while both sockets are those that the ring is for (protocol U11).
        match proof_for_sender(one.channel) {
            Proof::Good => {}
            Proof::Stale => return Sent::Counted,
            Proof::Ended { limit } => {
                self.take_back(fd, one, limit);
                return Sent::Kernel;
            }
            Proof::Unknown => {
                one.give_up();
                return Sent::Kernel;
            }
        }
        let core = this_core();
        if own.control.tx.control.cpu.load(Ordering::Relaxed) != core {
            own.control.tx.control.cpu.store(core, Ordering::Relaxed);
        }
        // EDGE ring-open, received: acquires what the receiver took from the kernel's queue before it opened the ring.
        if load_acquire_u32(&peer.rx_path.flags) & path_flags::WATCHING == 0
            || load_acquire_u32(&peer.rx_path.seen) != one.by_kernel
        {
            if !WritingHalf::is_read(Some(&peer.control.rx)) {
                one.give_up();
                return Sent::Kernel;
            }
            return Sent::Counted;
        }
        let longest = if segment == 0 { usize::MAX } else { usize::from(segment) * SEGMENTS };
        if len > address::longest(one.to().ip()).min(longest)
            || !one.segments.have(segment, len)
            || record::footprint(len as u64) > one.half.capacity()
        {
            return Sent::Counted;
        }
        // From here on the receiver waits for us before it sleeps (protocol U6).
        own.tx_path.switched_at.store(1, Ordering::Relaxed);
        FENCING.light();
        let sent = self.write_all(one, buffers, len, segment);
        // EDGE sender-idle: releases what was written to the ring; acquired in `wait_until_idle`.
        own.tx_path.switched_at.store(0, Ordering::Release);
        // Without room, the receiver's buffer is full: what it has no room for is dropped.
        sent.unwrap_or(Sent::Done(len))
    }

    /// Writes the datagrams of one call. `None`: for one of them there is no room, and those behind it are dropped with it.
    fn write_all(&self, one: &mut Outbound, buffers: CallerBuffers<'_>, len: usize, segment: u16) -> Option<Sent> {
        let (_, peer) = one.flow?.pages()?;
        // Once for all: the receiver waits for us if it closes the ring meanwhile.
        if peer.rx_path.flags.load(Ordering::Relaxed) & path_flags::WATCHING == 0 {
            return Some(Sent::Counted);
        }
        #[expect(unsafe_code, reason = "takes the caller's buffers")]
        // SAFETY: the buffers are valid by the contract of `CallerBuffers::new`.
        let mut cursor = unsafe { Cursor::new(buffers.list()) }?;
        let mut left = len;
        loop {
            let part = if segment == 0 { left } else { left.min(segment.into()) };
            match self.write(one, &mut cursor, part)? {
                Sent::Done(_) => left -= part,
                // The first ones have gone, and are not sent twice.
                _ if left < len => return None,
                other => return Some(other),
            }
            if left == 0 {
                return Some(Sent::Done(len));
            }
        }
    }

    /// Writes one datagram. `None`: no room.
    fn write(&self, one: &mut Outbound, cursor: &mut Cursor<'_>, len: usize) -> Option<Sent> {
        let flow = one.flow?;
        let (own, peer) = flow.pages()?;
        let footprint = record::footprint(len as u64);
        one.unread += 1;
        let mut free = one.half.free();
        if free < footprint || one.unread >= DOUBT {
            let mut gave_way = false;
            let mut look = 0;
            loop {
                look += 1;
                free = match one.half.refresh(&peer.control.rx) {
                    Ok(free) => free,
                    Err(error) => {
                        log!("a receiver of datagrams broke the protocol: {error}");
                        one.half.end(&own.control.tx, Ending::Corrupt(error));
                        one.give_up();
                        return Some(Sent::Kernel);
                    }
                };
                if free >= footprint {
                    break;
                }
                if look < LOOKS {
                    std::hint::spin_loop();
                    continue;
                }
                // A receiver that is awake on this very core cannot make room while we have it.
                let core = partywall_region::wait::this_core();
                if gave_way
                    || core == 0
                    || flow.is_between_machines()
                    || peer.control.rx.control.cpu.load(Ordering::Relaxed) != core
                {
                    add(&own.control.tx.counters.stalls, 1);
                    return None;
                }
                std::thread::yield_now();
                (gave_way, look) = (true, 0);
            }
        }
        if one.half.is_drained() {
            one.unread = 0;
        }
        #[expect(unsafe_code, reason = "writes our ring")]
        // SAFETY: the ring is ours, and free from its tail on for this many bytes. It is used under this lock alone.
        let mut span = unsafe { flow.own.own_span(one.half.tail(), footprint) };
        // At most the ring's size.
        span.copy_from(0, &record::header(len as u32));
        #[expect(unsafe_code, reason = "the rest of a span")]
        // SAFETY: `footprint` is at least the header and `len`; the span is not used any more.
        let rest = unsafe { partywall_shm::bytes::OwnBytes::new(span.as_mut_ptr().add(record::HEADER as usize), len) };
        cursor.copy_into(rest);
        one.half.commit(&own.control.tx, Some(&peer.control.rx), footprint, FENCING);
        add(&own.control.tx.counters.messages, 1);
        Some(Sent::Done(len))
    }

    /// A flow has ended. The bytes of its ring from `limit` on are not the receiver's: they go by the kernel, as they would have from the
    /// moment at which the receiver's socket was gone.
    #[cold]
    fn take_back(&self, fd: c_int, one: &mut Outbound, limit: u64) {
        let Some((flow, (_, peer))) = one.flow.and_then(|flow| Some((flow, flow.pages()?))) else { return };
        let to = one.to();
        log!("datagrams to {to} no longer go by a ring: one of the two sockets is gone");
        // Bytes that were read are not sent again. If a head breaks the protocol, the last valid one counts.
        let _ = one.half.refresh(&peer.control.rx);
        let end = one.half.tail();
        let mut at = (end - (one.half.capacity() - one.half.free())).max(limit);
        while at < end {
            let mut header = [0; record::HEADER as usize];
            #[expect(unsafe_code, reason = "reads our own ring")]
            // SAFETY: our own ring, between its head and its tail, under the lock of the sending side.
            let span = unsafe { flow.own.peer_span(at, end - at) };
            span.copy_to(&mut header);
            let Ok(len) = record::parse(header, end - at, record::longest(flow.own.ring_size())) else { break };
            let body = span.slice(record::HEADER as usize, len as usize);
            let splits = self.segment.load(Ordering::Relaxed) != 0;
            send_past(fd, body, to, (self.has(flags::SIX), splits));
            at += record::footprint(len.into());
        }
        one.give_up();
    }

    /// Before sleeping: whether flows have ended, in which something of ours may lie unread, or which the program may never use again.
    pub(super) fn look_after_receivers(&self, fd: c_int) {
        let Some(mut tx) = self.tx.hold() else { return };
        for one in tx.to.iter_mut().filter(|one| one.stage != FlowStage::Counting) {
            if one.stage == FlowStage::Offered {
                one.look_for_end();
                continue;
            }
            match proof_for_sender(one.channel) {
                Proof::Ended { limit } => self.take_back(fd, one, limit),
                Proof::Unknown => one.give_up(),
                Proof::Good | Proof::Stale => {}
            }
        }
    }

    /// What the rings that it sends by demand of a receiving call that sleeps.
    pub(super) fn rings_out(&self) -> RingsOut {
        // The lock is held while the broker is asked. A socket without such rings does not wait for that when it receives.
        if !self.has(flags::RING_OUT) {
            return RingsOut::None;
        }
        let Some(mut tx) = self.tx.hold() else { return RingsOut::None };
        let mut begun = tx.to.iter_mut().filter(|one| one.stage != FlowStage::Counting).peekable();
        // Under the lock under which it is set.
        self.set(flags::RING_OUT, begun.peek().is_some());
        begun.map(Outbound::demand).max().unwrap_or(RingsOut::None)
    }

    /// The next step towards a ring, if it is time for it.
    fn advance(&self, fd: c_int, one: &mut Outbound) {
        match one.stage {
            FlowStage::Counting => {
                if !self.is_due(fd, one.calls, one.bytes, one.to()) {
                    return;
                }
                let generation = broker::listener_generation();
                let is_time_again = one.retry.is_due(sys::coarse_millis());
                if generation == one.asked && !is_time_again {
                    return;
                }
                one.asked = generation;
                if broker::knows_receiver(fd, one.to()) {
                    one.retry.begin();
                    self.offer(fd, one);
                } else if is_time_again {
                    one.retry.put_off(sys::coarse_millis());
                }
            }
            FlowStage::Offered => {
                one.looks = one.looks.wrapping_add(1);
                if one.looks < EAGER || one.looks.is_multiple_of(16) {
                    self.look_for_answer(one);
                }
            }
            FlowStage::Attached => {}
        }
    }

    #[cold]
    fn offer(&self, fd: c_int, one: &mut Outbound) {
        let errno = sys::errno_number();
        if let Some(flow) = FlowPlaces::allocate() {
            match self.offer_by(fd, one, flow) {
                Ok(()) => {
                    one.flow = Some(flow);
                    one.stage = FlowStage::Offered;
                    self.set(flags::RING_OUT, true);
                    one.looks = 0;
                    one.offered = sys::coarse_now();
                }
                Err(reason) => {
                    log!("no ring for datagrams to {}: {}", one.to(), reason.words());
                    flow.free();
                    if matches!(reason, Reason::NoWindow | Reason::Resources | Reason::BrokerAbsent) {
                        one.retry.put_off(sys::coarse_millis());
                    }
                }
            }
        }
        sys::restore_errno(errno);
    }

    fn offer_by(&self, fd: c_int, one: &mut Outbound, flow: &'static FlowPlaces) -> Result<(), Reason> {
        let size = self.ring_size(one.to()).max(LEAST);
        let (region, geometry) = flow.make_region(size)?;
        let move_to = |base: u64, window: BorrowedFd<'_>| flow.move_region(size, base, window);
        one.channel = broker::offer_datagrams(fd, one.to(), (geometry, region.as_fd()), move_to)?;
        one.half = WritingHalf::new(size);
        Ok(())
    }

    /// Whether a receiver has taken the flow that was offered.
    fn look_for_answer(&self, one: &mut Outbound) {
        if one.look_for_end() == Proof::Good && one.busy.is_over(sys::coarse_millis()) {
            self.attach(one);
        }
    }

    #[cold]
    fn attach(&self, one: &mut Outbound) {
        let errno = sys::errno_number();
        let fetched = one.flow.ok_or(Reason::Refused).and_then(|flow| {
            let (place, region) = broker::fetch_receiver(one.channel)?;
            if place.1.ring_size() == 0 { flow.attach_peer(place, &region) } else { Err(Reason::Corrupt) }
        });
        sys::restore_errno(errno);
        if fetched == Err(Reason::BrokerAbsent) {
            // The flow stands, and the receiver makes no other. The broker gives the receiver's region out once. A session that was busy has
            // not asked for it, and one that has ended after it did is refused the next time, which gives the flow up.
            one.busy.begin(sys::coarse_millis());
            return;
        }
        let Some((own, _)) = one.flow.and_then(FlowPlaces::pages).filter(|_| fetched.is_ok()) else {
            one.give_up();
            // A receiver is there, so the next offer does not wait for one to come. The pauses double until a flow is attached, so that a
            // receiver whose region is never valid costs little.
            one.retry.put_off(sys::coarse_millis());
            return;
        };
        one.stage = FlowStage::Attached;
        one.retry = OfferRetry::NONE;
        self.set(flags::RING_OUT, true);
        // The datagrams that have gone by the kernel so far count as one.
        one.by_kernel = 1;
        // EDGE sent-by-kernel: as in `DatagramSocket::send_to`.
        own.tx_path.switches.store(1, Ordering::Release);
        log!("datagrams to {} go by a ring", one.to());
    }

    /// Datagrams that went to the kernel at once, counted for their destination.
    pub(super) fn sent_many(&self, fd: c_int, to: SocketAddr, count: u32) {
        let Some(mut tx) = self.tx.hold() else { return };
        let Some(at) = tx.find(to) else { return };
        let one = &mut tx.to[at];
        one.calls += u64::from(count);
        self.advance(fd, one);
    }

    /// Whether a list of messages may hold some that could go by a ring.
    pub(super) fn has_ring_out(&self) -> bool {
        self.tx.hold().is_some_and(|tx| tx.to.iter().any(|one| one.stage == FlowStage::Attached))
    }
}

/// How many datagrams the kernel makes of a call of `len` bytes. A receiver on another machine counts them one by one.
fn datagrams_of(len: usize, segment: u16) -> u32 {
    let count = if segment == 0 { 1 } else { len.div_ceil(segment.into()).max(1) };
    u32::try_from(count).unwrap_or(u32::MAX)
}

/// A datagram by the kernel, past everything. `splits`: the socket has `UDP_SEGMENT`, by which the kernel would split this one, too.
fn send_past(fd: c_int, bytes: PeerBytes<'_>, to: SocketAddr, (six, splits): (bool, bool)) {
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    address::with(to, six, |name, len| {
        if splits {
            send_whole(fd, bytes, (name, len), flags);
            return;
        }
        #[expect(unsafe_code, reason = "hands memory of our own to the kernel")]
        // SAFETY: a span of our ring, and an address of ours, which both live to the end of this closure.
        let send = || unsafe { real::sendto(fd, bytes.as_ptr().cast(), bytes.len(), flags, name, len) };
        if send() < 0 && sys::errno() == Errno::CONNREFUSED {
            // That was about an earlier datagram.
            send();
        }
    });
}

/// Sends a datagram that is not to be split, whatever the socket's option says.
#[cold]
fn send_whole(fd: c_int, bytes: PeerBytes<'_>, (name, len): (*const libc::sockaddr, libc::socklen_t), flags: c_int) {
    // `cmsghdr {len, level, type}`, and a `u16` behind it that is 0.
    let mut control = [0u64; 3];
    let mut one = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    #[expect(unsafe_code, reason = "hands memory of our own to the kernel")]
    // SAFETY: zeros are a message without anything. `control` is aligned for a `cmsghdr` and has room for it and two bytes. All that the message
    // points to, a span of our ring and an address of ours, lives to the end of the call, and the kernel only reads it.
    unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        (message.msg_name, message.msg_namelen) = (name.cast_mut().cast(), len);
        (message.msg_iov, message.msg_iovlen) = (&raw mut one, 1);
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = libc::CMSG_SPACE(2) as _;
        if let Some(head) = libc::CMSG_FIRSTHDR(&raw const message).as_mut() {
            (head.cmsg_level, head.cmsg_type) = (libc::SOL_UDP, libc::UDP_SEGMENT);
            head.cmsg_len = libc::CMSG_LEN(2) as _;
        }
        real::sendmsg(fd, &raw const message, flags);
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::open_session;
    use super::super::{dropped, made};
    use super::*;
    use crate::broker::tests::alone::alone;
    use crate::broker::tests::{broker as start_broker, busy_session};
    use crate::calls::testing::{EpollSet, poll, recv};
    use rustix::fd::AsRawFd;
    use std::net::UdpSocket;
    use std::time::Instant;

    /// Two sockets of ours, of which the first receives. A flow from the second to it was offered and taken, and is proved.
    fn taken_flow() -> [UdpSocket; 2] {
        let sockets = [(); 2].map(|()| UdpSocket::bind(("127.0.0.1", 0)).unwrap());
        let [to, from] = sockets.each_ref().map(|socket| socket.local_addr().unwrap());
        sockets.iter().for_each(|socket| made(socket.as_raw_fd(), libc::AF_INET, libc::SOCK_DGRAM, 0));
        open_session();
        let [receiver, sender] = sockets.each_ref().map(|socket| DatagramSocket::of(socket.as_raw_fd()).unwrap());
        receiver.publish(sockets[0].as_raw_fd());
        let mut tx = sender.tx.hold().unwrap();
        let at = tx.find(to).unwrap();
        sender.offer(sockets[1].as_raw_fd(), &mut tx.to[at]);
        assert_eq!(receiver.take_offer(sockets[0].as_raw_fd(), from, receiver.closings()), Ok(()));
        assert_eq!(receiver.inbound.load(Ordering::Relaxed), 1);
        assert_eq!(proof_for_sender(tx.to[at].channel), Proof::Good);
        sockets
    }

    #[test]
    fn taken_flow_survives_a_busy_session() {
        let Some(_alone) = alone!() else { return };
        let _broker = start_broker();
        let sockets = taken_flow();
        let sender = DatagramSocket::of(sockets[1].as_raw_fd()).unwrap();
        // A look for the answer, as a sending call makes it.
        let look = || {
            let mut tx = sender.tx.hold().unwrap();
            let at = tx.find(sockets[0].local_addr().unwrap()).unwrap();
            sender.look_for_answer(&mut tx.to[at]);
            tx.to[at].stage
        };
        let busy = busy_session();
        assert_eq!(look(), FlowStage::Offered, "the broker could not be asked");
        drop(busy);
        let start = Instant::now();
        while look() != FlowStage::Attached {
            assert!(start.elapsed() < Duration::from_secs(100), "it has no ring");
            std::thread::sleep(Duration::from_millis(1));
        }
        sockets.iter().for_each(|socket| dropped(socket.as_raw_fd()));
    }

    #[test]
    fn flow_whose_receiver_cannot_be_fetched_is_offered_again() {
        let Some(_alone) = alone!() else { return };
        let _broker = start_broker();
        let sockets = taken_flow();
        let sender = DatagramSocket::of(sockets[1].as_raw_fd()).unwrap();
        let mut tx = sender.tx.hold().unwrap();
        let at = tx.find(sockets[0].local_addr().unwrap()).unwrap();
        let one = &mut tx.to[at];
        // As an answer of the broker that was lost with the session: it is given once.
        drop(broker::fetch_receiver(one.channel).unwrap());
        let before = one.retry;
        sender.look_for_answer(one);
        assert_eq!(one.stage, FlowStage::Counting);
        assert!(!before.is_due(u64::MAX) && one.retry.is_due(u64::MAX), "a later call offers another");
        drop(tx);
        sockets.iter().for_each(|socket| dropped(socket.as_raw_fd()));
    }

    #[test]
    fn unread_datagram_of_polling_sender_goes_by_kernel() {
        let Some(_alone) = alone!() else { return };
        let _broker = start_broker();
        let looks: [fn(&EpollSet, c_int); 3] = [
            |_, fd| assert_eq!(recv(fd, 8, libc::MSG_DONTWAIT), Err(Errno::AGAIN)),
            |_, fd| assert_eq!(poll(fd, libc::POLLIN, 0), Ok(0)),
            |set, _| assert_eq!(set.now(), []),
        ];
        for (number, look) in looks.into_iter().enumerate() {
            let [receiver, sender] = taken_flow();
            let (to, fd) = (receiver.local_addr().unwrap(), sender.as_raw_fd());
            let set = EpollSet::new();
            set.add(fd, libc::EPOLLIN as u32, 7);
            let socket = DatagramSocket::of(fd).unwrap();
            {
                let mut tx = socket.tx.hold().unwrap();
                let at = tx.find(to).unwrap();
                socket.look_for_answer(&mut tx.to[at]);
                assert_eq!(tx.to[at].stage, FlowStage::Attached);
            }
            // The receiver has seen that the kernel's queue is empty.
            assert_eq!(recv(receiver.as_raw_fd(), 8, libc::MSG_DONTWAIT), Err(Errno::AGAIN));
            let bytes = [7u8; 5];
            let list = [libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() }];
            #[expect(unsafe_code, reason = "stands for the C library's caller")]
            // SAFETY: a vector that lives to the end of the block.
            let buffers = unsafe { CallerBuffers::new(&list) };
            let sent = socket.send_to(fd, to, DatagramCarrier::Any(0), buffers, || panic!("by the kernel"));
            assert_eq!(sent, 5);
            // The kernel says that the socket is gone. The library, which has both ends here, says nothing: the broker would not know of which.
            let closed = receiver.as_raw_fd();
            drop(receiver);
            let next = UdpSocket::bind(to).unwrap();
            next.set_nonblocking(true).unwrap();
            let start = Instant::now();
            while next.recv(&mut [0; 8]).is_err() {
                assert!(start.elapsed() < Duration::from_secs(100), "{number}: it stays in the ring");
                look(&set, fd);
            }
            dropped(closed);
            dropped(fd);
        }
    }

    #[test]
    fn datagram_that_is_taken_back_is_not_split() {
        let [to, from] = [(); 2].map(|()| UdpSocket::bind(("127.0.0.1", 0)).unwrap());
        let (fd, at) = (from.as_raw_fd(), to.local_addr().unwrap());
        crate::calls::testing::number_option(fd, libc::SOL_UDP, libc::UDP_SEGMENT, 10);
        let bytes = [7; 25];
        #[expect(unsafe_code, reason = "memory of this test")]
        // SAFETY: an array that outlives the call.
        let body = unsafe { PeerBytes::new(bytes.as_ptr(), bytes.len()) };
        from.send_to(&bytes, at).unwrap();
        send_past(fd, body, at, (false, true));
        let lengths = [(); 4].map(|()| to.recv(&mut [0; 100]).unwrap());
        assert_eq!(lengths, [10, 10, 5, 25]);
    }

    #[test]
    fn call_counts_as_the_datagrams_that_it_is_split_into() {
        for (len, segment, count) in [(0, 0, 1), (3000, 0, 1), (0, 1000, 1), (1000, 1000, 1), (1001, 1000, 2)] {
            assert_eq!(datagrams_of(len, segment), count, "{len} {segment}");
        }
    }

    #[test]
    fn destination_of_ended_flow_is_offered_a_ring_again() {
        let mut one = Outbound { stage: FlowStage::Attached, ..Outbound::NONE };
        one.give_up();
        assert!(!one.retry.is_due(sys::coarse_millis()) && one.retry.is_due(sys::coarse_millis() + 1000));
        let mut one = Outbound { stage: FlowStage::Offered, ..Outbound::NONE };
        one.give_up();
        assert!(!one.retry.is_due(u64::MAX), "an offer that nobody took waits for a change of the directory");
    }
}
