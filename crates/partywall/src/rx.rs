//! The reading half of an endpoint: what is there, release, doorbell, the peer's change of ring, and every way it can end.
//! `records` waits for records of calls.

mod records;

use crate::endpoint::{Endpoint, PeerEndpoint};
use crate::keeper::HangUpWatch;
use crate::waiter::{WaitScene, WaitStep, Waiter};
use crate::{Error, Result};
use partywall_region::wait::publish_core;
use partywall_region::{Link, LinkEvent, PeerRegion};
use partywall_shm::bytes::PeerBytes;
use partywall_shm::corrupt::Corrupt;
use partywall_shm::counters::{Snapshot, add};
use partywall_shm::half::{Ending, ReadingHalf};
use partywall_shm::layout::{Geometry, RxHalf, flags};
use partywall_shm::state::RxState;
use partywall_shm::wake::Fencing;
use rustix::fd::OwnedFd;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The largest piece that is copied before it is released, so that the writer can go on during a long read.
const PIECE: u64 = 128 << 10;
/// A reading half.
#[derive(Debug)]
pub(crate) struct StreamRx {
    endpoint: Arc<Endpoint>,
    /// The ring that is read: the peer's endpoint region at first, then its extensions. `None` until it attaches.
    ring: Option<PeerRegion>,
    /// The next rings, in order, once they have arrived.
    next: VecDeque<PeerRegion>,
    half: ReadingHalf,
    pub(crate) waiter: Waiter,
    /// The link has hung up: what is committed is all there is.
    hung_up: bool,
    /// The peer may tell us to begin elsewhere than at the first byte (protocol B1).
    is_broadcast: bool,
    /// It has said that it drops us.
    dropped: bool,
    /// A private copy of the next bytes, for `BufRead`. They stay in the ring until they are consumed.
    front: Front,
    watch: HangUpWatch,
}

/// Copied bytes, of which the first `at` have been consumed.
#[derive(Debug, Default)]
struct Front {
    bytes: Vec<u8>,
    at: usize,
}

/// Rings that are kept until they are used. An honest peer announces one before it sends the next, so two can come while
/// this side does not look. Each takes mappings, and the kernel limits how many a process has.
const MOST_RINGS: usize = 4;

/// Packets that are looked through for a ring that must have been sent before: more than a link holds.
const MOST_PACKETS: u32 = 1 << 14;

/// How much is copied at once for `BufRead`.
const FRONT: usize = 8 << 10;

impl StreamRx {
    pub(crate) fn new(endpoint: Arc<Endpoint>, link: Link, watch: HangUpWatch, spin: Duration) -> Self {
        let waiter = Waiter::new(link, spin);
        let half = ReadingHalf::new(0, 0);
        Self {
            endpoint,
            ring: None,
            next: VecDeque::new(),
            half,
            waiter,
            hung_up: false,
            is_broadcast: false,
            dropped: false,
            front: Front::default(),
            watch,
        }
    }

    /// The same half for a broadcast, which begins at the byte that the peer names.
    pub(crate) fn for_broadcast(mut self) -> Self {
        self.is_broadcast = true;
        self
    }

    fn own(&self) -> &RxHalf {
        &self.endpoint.own().page().rx
    }

    pub(crate) fn endpoint(&self) -> &Arc<Endpoint> {
        &self.endpoint
    }

    pub(crate) fn capacity(&self) -> u64 {
        self.half.capacity()
    }

    pub(crate) fn counters(&self) -> Snapshot {
        self.own().counters.snapshot()
    }

    /// Starts reading the peer's first ring, if the peer has attached (perhaps by the other half's link).
    ///
    /// Here, and not where the peer attaches, since the other half does not read and so has no say about the byte to begin at.
    fn adopt(&mut self) -> Result<()> {
        let Self { endpoint, half, ring, is_broadcast, .. } = self;
        let Some(peer) = endpoint.peer().filter(|_| ring.is_none()) else { return Ok(()) };
        if peer.start != 0 && !*is_broadcast {
            return Err(self.corrupt(Corrupt::BadPacket));
        }
        half.start(&endpoint.own().page().rx, peer.region.geometry().ring_size(), peer.start);
        if *is_broadcast && peer.region.flags() & flags::OVERRUNS != 0 {
            half.let_overrun();
        }
        *ring = Some(peer.region.clone());
        Ok(())
    }

    /// Reads what there is, up to `buf.len()`. `Ok(0)` is the end of the stream.
    #[inline]
    pub(crate) fn read(&mut self, buf: &mut [u8]) -> Result<usize> {
        if buf.is_empty() {
            return Ok(0);
        }
        // Bytes that the caller has peeked at are returned as they were shown; they are not fetched a second time.
        let mut done = self.read_front(buf);
        let mut available = if done > 0 { self.half.available() } else { self.available_for_read()? };
        while available > 0 && done < buf.len() {
            // Pieces, so that the writer has room before all is copied; never more than what was seen at once,
            // so that a fast writer cannot keep this call from returning.
            let n = available.min(PIECE).min((buf.len() - done) as u64);
            let Some(ring) = &self.ring else { break };
            ring.span(self.half.head(), n).copy_to(&mut buf[done..done + n as usize]);
            self.release(n);
            done += n as usize;
            available -= n;
        }
        Ok(done)
    }

    #[inline]
    fn available_for_read(&mut self) -> Result<u64> {
        match self.half.available() {
            0 => self.wait(1),
            n => Ok(n),
        }
    }

    /// Takes bytes from the private copy, if there is one.
    #[inline]
    fn read_front(&mut self, buf: &mut [u8]) -> usize {
        let shown = &self.front.bytes[self.front.at..];
        let n = shown.len().min(buf.len());
        if n > 0 {
            buf[..n].copy_from_slice(&shown[..n]);
            self.release(n as u64);
        }
        n
    }

    /// A private copy of the next bytes; empty at the end of the stream.
    pub(crate) fn fill_front(&mut self) -> Result<&[u8]> {
        if self.front.at == self.front.bytes.len() {
            let n = self.available_for_read()?.min(FRONT as u64);
            let Self { front, ring, half, .. } = self;
            front.at = 0;
            front.bytes.resize(n as usize, 0);
            if let Some(ring) = ring {
                ring.span(half.head(), n).copy_to(&mut front.bytes);
            }
        }
        Ok(&self.front.bytes[self.front.at..])
    }

    /// Waits until `want` bytes (at most the ring) can be read, and returns how many can.
    ///
    /// Fewer than `want` at the end of the stream, and where the peer changes to another ring; 0 is the end.
    #[inline]
    pub(crate) fn wait(&mut self, want: u64) -> Result<u64> {
        let want = want.max(1);
        let known = self.half.available();
        if known >= want {
            return Ok(known);
        }
        self.waiter.pause();
        match self.look(want)? {
            n if n >= want => {
                self.waiter.found_at_once(n, self.half.capacity());
                Ok(n)
            }
            _ => self.wait_slow(want),
        }
    }

    /// The bytes that [`StreamRx::wait`] has announced, `len` of them from `from` on.
    #[inline]
    pub(crate) fn span(&self, from: u64, len: u64) -> Option<PeerBytes<'_>> {
        let available = self.half.available();
        let from = from.min(available);
        self.ring.as_ref().map(|ring| ring.span(self.half.head() + from, len.min(available - from)))
    }

    /// Bytes that can be read without asking the peer.
    pub(crate) fn available(&self) -> u64 {
        self.half.available()
    }

    /// Gives `n` bytes back to the writer.
    #[inline]
    pub(crate) fn release(&mut self, n: u64) {
        let Some(PeerEndpoint { region, fencing, .. }) = self.endpoint.peer() else { return };
        self.front.at = self.front.bytes.len().min(self.front.at + n as usize);
        let own = &self.endpoint.own().page().rx;
        let ring = self.half.release(own, &region.page().tx, n, *fencing);
        add(&own.counters.messages, 1);
        if ring {
            publish_core(&own.control.cpu);
            self.waiter.link.ring();
            add(&own.counters.bells_rung, 1);
        } else {
            add(&own.counters.bells_saved, 1);
        }
    }

    /// The number of bytes that are there now. Follows the peer to its next ring.
    #[inline]
    fn look(&mut self, want: u64) -> Result<u64> {
        if self.ring.is_none() {
            self.adopt()?;
        }
        let n = self.half.available();
        if n >= want {
            return Ok(n);
        }
        self.look_again()
    }

    fn look_again(&mut self) -> Result<u64> {
        match self.half.ended() {
            Some(Ending::Corrupt(what)) => return Err(what.into()),
            Some(Ending::Here) => return Ok(0),
            _ => {}
        }
        let mut packets = MOST_PACKETS;
        loop {
            if self.half.must_switch() && !self.take_next(&mut packets)? {
                return Ok(0);
            }
            let Some(peer) = begun(self.ring.as_ref(), &self.endpoint) else { return Ok(0) };
            let n = self.half.refresh(&peer.region.page().tx).map_err(|what| self.corrupt(what))?;
            if n > 0 || !self.half.must_switch() {
                return Ok(n);
            }
        }
    }

    /// Protocol A3: the broker had passed the ring after this one on before its use was announced, so it has arrived; or, from another
    /// machine, is in transit (protocol G5), which is `false`.
    #[cold]
    fn take_next(&mut self, packets: &mut u32) -> Result<bool> {
        loop {
            if let Some(ring) = self.next.pop_front() {
                let Self { endpoint, half, .. } = self;
                half.switch(&endpoint.own().page().rx, ring.geometry().ring_size());
                self.ring = Some(ring);
                return Ok(true);
            }
            if !self.endpoint.is_windowed() {
                let ring = self.endpoint.next_ring().map_err(|e| self.blame_for(e))?;
                let Some(ring) = ring else { return Err(self.corrupt(Corrupt::BadSwitch)) };
                self.take_memory(ring.generation, ring.geometry, 0, 0, &ring.memory).map_err(|e| self.blame_for(e))?;
                continue;
            }
            // A peer that sends without end what is not the ring must not keep this call from returning.
            let Some(left) = packets.checked_sub(1) else { return Err(self.corrupt(Corrupt::BadSwitch)) };
            *packets = left;
            match self.waiter.link.try_next().map_err(|e| Error::system("look at the link", e))? {
                None if self.endpoint.is_windowed() && !self.hung_up => return Ok(false),
                // The relay has ended the link with the ring in transit.
                None | Some(LinkEvent::HungUp) if self.waiter.link.has_moved() => {
                    return Err(self.end(Ending::Dead { attached: true }));
                }
                // After a hang-up, what had been sent before is still delivered first.
                None | Some(LinkEvent::HungUp | LinkEvent::TimedOut) => return Err(self.corrupt(Corrupt::BadSwitch)),
                Some(event) => self.handle(event)?,
            }
        }
    }

    #[cold]
    fn wait_slow(&mut self, asked: u64) -> Result<u64> {
        let mut turn = self.waiter.begin();
        loop {
            let n = self.look(asked)?;
            if self.ring.is_none() && self.endpoint.has_unmapped_region() {
                self.look_for_region()?;
                continue;
            }
            // A ring does not hold more: then what is there is all that can come. (Which ring it is may change while waiting.)
            let want = asked.clamp(1, self.half.capacity().max(1));
            if n >= want || (n > 0 && self.half.wish(want).is_none()) {
                self.half.awake(&self.endpoint.own().page().rx);
                break;
            }
            if self.half.must_switch() && self.endpoint.is_windowed() && self.half.ended().is_none() {
                // Whatever the memory shows, the link brings the ring or the end.
                self.wait_for_ring(turn.deadline)?;
                continue;
            }
            let Self { endpoint, half, waiter, watch, hung_up, ring, .. } = self;
            let own = &endpoint.own().page().rx;
            let peer = begun(ring.as_ref(), endpoint);
            let writer = peer.map(|p| &p.region.page().tx);
            let scene = WaitScene {
                core: &own.control.cpu,
                counters: &own.counters,
                peer_core: writer.map(|writer| &writer.control.cpu),
                elsewhere: endpoint.is_windowed(),
                fencing: peer.map_or(Fencing::Symmetric, |p| p.fencing),
                nap: None,
                watch,
            };
            // The keeper may have seen a hang-up that this link has not delivered yet; memory sent before it comes first.
            match waiter.step(&mut turn, scene, |idle| half.next(own, writer, *hung_up, want, idle)) {
                // At the end there may be fewer than wanted.
                Ok(WaitStep::Ready) if half.available() > 0 => break,
                // The next ring has to be taken.
                Ok(WaitStep::Ready) => {}
                Ok(WaitStep::Event(event)) => self.handle(event)?,
                Ok(WaitStep::Ended(Ending::Orderly | Ending::Here)) => return Ok(0),
                Ok(WaitStep::Ended(ending)) => return Err(self.end(ending)),
                Err(e) => {
                    if matches!(e, Error::TimedOut) {
                        half.awake(own);
                    }
                    return Err(e);
                }
            }
        }
        let Self { waiter, half, .. } = self;
        waiter.found(&turn, half.available(), half.capacity());
        Ok(half.available())
    }

    /// Sleeps until the link says something. Nothing is asked for by that: the ring was sent before.
    #[cold]
    fn wait_for_ring(&mut self, deadline: Option<Instant>) -> Result<()> {
        if self.waiter.nonblocking {
            // The link was empty just now, and is readable when the ring comes.
            return Err(Error::WouldBlock);
        }
        match self.waiter.link.wait(deadline).map_err(|e| Error::system("wait on the link", e))? {
            LinkEvent::TimedOut => Err(Error::TimedOut),
            event => self.handle(event),
        }
    }

    fn handle(&mut self, event: LinkEvent) -> Result<()> {
        match event {
            LinkEvent::TimedOut | LinkEvent::Bell => self.look_for_region(),
            LinkEvent::Dropped if self.is_broadcast => {
                self.dropped = true;
                Ok(())
            }
            LinkEvent::Dropped => Err(self.corrupt(Corrupt::BadPacket)),
            LinkEvent::HungUp => {
                self.hung_up = true;
                // Packets that the peer sent before it went still count.
                self.look_for_region()
            }
            LinkEvent::Attach { generation, geometry, start, base, memory } => {
                self.take_memory(generation, geometry, start, base, &memory).map_err(|e| self.blame_for(e))
            }
            LinkEvent::Corrupt(what) => Err(self.corrupt(what)),
        }
    }

    /// Ends this half if the error is the peer's fault.
    fn blame_for(&mut self, e: Error) -> Error {
        match e {
            Error::Corrupt(what) => self.corrupt(what),
            other => other,
        }
    }

    /// Takes the peer's region if it has come by the broker.
    fn look_for_region(&mut self) -> Result<()> {
        if self.ring.is_some() {
            return Ok(());
        }
        self.endpoint.look_for_region().map_err(|e| self.blame_for(e))?;
        self.adopt()
    }

    fn take_memory(
        &mut self,
        generation: u32,
        geometry: Geometry,
        start: u64,
        base: u64,
        memory: &OwnedFd,
    ) -> Result<()> {
        if start != 0 && !self.is_broadcast {
            return Err(Corrupt::BadPacket.into());
        }
        if generation == 0 {
            self.endpoint.attach(memory, base, start, geometry)?;
            return self.adopt();
        }
        // In order (protocol A4), and only of a peer that has attached.
        let newest = self.half.generation().wrapping_add(self.next.len() as u32);
        let is_next = generation == newest.wrapping_add(1) && self.next.len() < MOST_RINGS;
        if !is_next || self.endpoint.peer().is_none() || geometry.ring_size() == 0 {
            return Err(Corrupt::BadSwitch.into());
        }
        let waiting: u64 = self.next.iter().map(|ring| ring.geometry().ring_size()).sum();
        let ring = self.endpoint.map(memory, base, geometry, waiting)?;
        self.next.push_back(ring);
        Ok(())
    }

    fn end(&mut self, ending: Ending) -> Error {
        let Self { endpoint, half, .. } = self;
        match half.end(&endpoint.own().page().rx, ending) {
            Ending::Orderly | Ending::Here => Error::Closed("nothing more to read"),
            Ending::Dead { .. } if self.waiter.link.has_moved() => {
                Error::Moved { target: self.endpoint.info().target() }
            }
            Ending::Dead { attached } => Error::Dead { attached },
            Ending::Accused => Error::Accused,
            Ending::Corrupt(what) => {
                self.drop_link();
                Error::Corrupt(what)
            }
        }
    }

    /// Ends this half because the peer broke the protocol (protocol R4).
    #[cold]
    fn corrupt(&mut self, what: Corrupt) -> Error {
        self.end(Ending::Corrupt(what))
    }

    /// Whether the publisher has said that it drops this subscriber.
    pub(crate) fn is_dropped(&self) -> bool {
        self.dropped
    }

    /// Whether a publisher may have overwritten bytes from our head on, up to this moment (protocol B3).
    pub(crate) fn is_overwritten(&self) -> bool {
        begun(self.ring.as_ref(), &self.endpoint).is_some_and(|peer| self.half.is_overwritten(&peer.region.page().tx))
    }

    /// Whether the publisher overruns this subscriber (protocol B4). Not known before the publisher's region has come.
    pub(crate) fn may_be_overrun(&self) -> bool {
        self.is_broadcast && self.endpoint.peer().is_some_and(|peer| peer.region.flags() & flags::OVERRUNS != 0)
    }

    /// Continues at the newest record, because the one at the head was overwritten (protocol B4.3).
    pub(crate) fn recover(&mut self) -> Result<()> {
        let Some(peer) = begun(self.ring.as_ref(), &self.endpoint) else { return Ok(()) };
        self.half.recover(&peer.region.page().tx).map(drop).map_err(|what| self.corrupt(what))
    }

    /// Continues at the newest record if that is further than the head.
    pub(crate) fn skip_to_newest(&mut self) -> Result<()> {
        let Some(peer) = begun(self.ring.as_ref(), &self.endpoint) else { return Ok(()) };
        self.half.skip_to_newest(&peer.region.page().tx).map(drop).map_err(|what| self.corrupt(what))
    }

    /// Bytes of the stream before the next one.
    pub(crate) fn head(&self) -> u64 {
        self.half.head()
    }

    /// Ends this half because a record is malformed (protocol D2).
    pub(crate) fn blame(&mut self, what: Corrupt) -> Error {
        self.corrupt(what)
    }

    /// Ends this half without a word, as if this process had died (protocol L4).
    pub(crate) fn abort(&mut self) {
        let Self { endpoint, half, .. } = self;
        if half.ended().is_none() {
            half.end(&endpoint.own().page().rx, Ending::Dead { attached: true });
            self.drop_link();
        }
    }

    /// Closes this half: this side reads no more.
    pub(crate) fn close(&mut self) {
        let Self { endpoint, half, .. } = self;
        if half.close(&endpoint.own().page().rx) {
            self.drop_link();
        }
    }

    /// A descriptor that another thread of this process shuts down for reading to end this half's sleep.
    pub(crate) fn stopper(&self) -> Result<OwnedFd> {
        // The link's own descriptor need not be a socket: to another machine it is an `epoll` set.
        self.waiter.link.life().try_clone_to_owned().map_err(|e| Error::system("keep a link", e))
    }

    /// Ends this half in order although it has found its own link shut down by the [`StreamRx::stopper`].
    pub(crate) fn close_after_shutdown(&mut self) {
        RxState::Closed.store(&self.own().control.state);
        self.drop_link();
    }

    /// This half has ended permanently.
    fn drop_link(&mut self) {
        self.front = Front::default();
        self.waiter.hang_up();
    }

    /// Whether the peer is gone, without reading: for those who poll.
    pub(crate) fn is_hung_up(&self) -> bool {
        self.hung_up || self.watch.has_hung_up()
    }
}

impl Drop for StreamRx {
    fn drop(&mut self) {
        self.close();
    }
}

/// The peer, if this half has begun to read a ring of the peer's.
///
/// The writing half attaches the peer too, from another thread and at any moment. Until this half has adopted the peer's ring it knows neither the
/// ring's size nor where to begin, and would take each byte of the peer's for one that is out of range.
#[inline]
fn begun<'a>(ring: Option<&PeerRegion>, endpoint: &'a Endpoint) -> Option<&'a PeerEndpoint> {
    ring.and_then(|_| endpoint.peer())
}

#[cfg(test)]
mod tests {
    use crate::{Options, channel};

    #[test]
    fn peer_attached_by_the_other_half_is_adopted_before_it_is_read() {
        let ((tx, _back), (_, rx)) = channel::pair(&Options::default()).unwrap();
        let (mut tx, mut rx) = (tx.unwrap(), rx.unwrap());
        assert_eq!(tx.write(b"first").unwrap(), 5);
        // The rest of a look that had found no peer, which the other half has attached since.
        assert_eq!(rx.look_again().unwrap(), 0);
        assert_eq!(rx.wait(1).unwrap(), 5);
    }
}
