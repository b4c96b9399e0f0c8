//! The writing half of an endpoint: room, commit, doorbell, and every way it can end. `change` is the change of its ring.

mod change;

use crate::endpoint::Endpoint;
use crate::keeper::HangUpWatch;
use crate::options::Options;
use crate::waiter::{WaitScene, WaitStep, Waiter};
use crate::{Error, Result};
use change::RingChange;
use partywall_region::wait::publish_core;
use partywall_region::{LinkEvent, OwnRegion};
use partywall_shm::call::{CallLine, CallRecord, RECORD};
use partywall_shm::corrupt::Corrupt;
use partywall_shm::counters::{Snapshot, add};
use partywall_shm::half::{Ending, Need, WritingHalf};
use partywall_shm::layout::{RxHalf, TxHalf};
use partywall_shm::sizing::Sizing;
use partywall_shm::sync::{Peer, load_acquire};
use partywall_shm::wake::Fencing;
use std::io::IoSlice;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The largest piece that is copied before it is committed (protocol R6).
const PIECE: u64 = 128 << 10;

/// Between two looks for the broker's answer, where there is nothing else to do.
const LOOK: Duration = Duration::from_millis(1);

/// The memory that is written, beside everything else, so that a span of it can be lent out.
#[derive(Debug)]
pub(crate) struct StreamTx {
    ring: OwnRegion,
    pub(crate) core: TxCore,
}

/// Packets that are looked through after a hang-up: more than a link holds.
const MOST_PACKETS: u32 = 1 << 14;

/// Commits between two looks for a peer that has not attached.
const LOOK_EVERY: u32 = 8;

/// A writing half without its memory.
#[derive(Debug)]
pub(crate) struct TxCore {
    endpoint: Arc<Endpoint>,
    half: WritingHalf,
    pub(crate) waiter: Waiter,
    sizing: Sizing,
    huge_pages: bool,
    /// A change of ring that is under way.
    change: RingChange,
    /// Changes since which nothing has been committed, and where they were made.
    unused: (u64, u32),
    /// Commits before the peer had attached.
    unseen: u32,
    /// Knows of a hang-up that nothing has run into yet.
    watch: HangUpWatch,
}

impl StreamTx {
    pub(crate) fn new(
        endpoint: Arc<Endpoint>,
        ring: OwnRegion,
        link: partywall_region::Link,
        watch: HangUpWatch,
        sizing: Sizing,
        options: &Options,
    ) -> Self {
        let half = WritingHalf::new(ring.geometry().ring_size());
        let waiter = Waiter::new(link, options.spin);
        let huge_pages = options.huge_pages;
        let change = RingChange::None;
        let core = TxCore { endpoint, half, waiter, sizing, huge_pages, change, unused: (0, 0), unseen: 0, watch };
        Self { ring, core }
    }

    /// Writes all of `buf`, or on a non-blocking half what fits. Returns how much; an error only if nothing was written.
    #[inline]
    pub(crate) fn write(&mut self, buf: &[u8]) -> Result<usize> {
        self.core.check()?;
        let len = buf.len() as u64;
        if len == 0 {
            return Ok(0);
        }
        // The common case first: a message that fits.
        if len <= self.core.half.free() && len <= PIECE {
            self.put(buf);
            return Ok(buf.len());
        }
        self.write_pieces(buf)
    }

    /// Copies a piece that is known to fit and commits it.
    #[inline]
    fn put(&mut self, piece: &[u8]) {
        let len = piece.len() as u64;
        self.ring.span(self.core.half.tail(), len).copy_from(0, piece);
        self.core.commit(len);
        self.judge_if_due();
    }

    /// Writes one record of a call, waiting for room as this half may, and returns the byte of the stream where it begins (protocol K2).
    #[inline]
    pub(crate) fn put_record(&mut self, record: &CallRecord) -> Result<u64> {
        self.core.check()?;
        if self.core.room(RECORD)? < RECORD {
            // A sender that is woken is to find more than one record's room.
            let want = if self.core.waiter.nonblocking { self.core.half.capacity() / 4 } else { RECORD };
            self.core.wait_for(Need::Room(want))?;
        }
        let position = self.core.half.tail();
        let Some(line) = CallLine::in_own(self.ring.span(position, RECORD)) else {
            return Err(Error::Invalid("this channel has carried other things than records".into()));
        };
        line.write(record);
        self.core.commit(RECORD);
        line.stamp(position);
        Ok(position)
    }

    /// Whether the peer has taken the record that begins at this byte of the stream.
    pub(crate) fn is_taken(&mut self, position: u64) -> bool {
        // A false value here only misstates the peer's own reading.
        self.core.peer().is_some_and(|peer| load_acquire(&peer.cursor.head) > position)
    }

    fn write_pieces(&mut self, buf: &[u8]) -> Result<usize> {
        let mut done = 0;
        while done < buf.len() {
            let left = &buf[done..];
            let piece = (left.len() as u64).min(self.piece());
            let room = match self.core.room(piece) {
                Ok(0) if self.core.waiter.nonblocking && done > 0 => break,
                // Half the ring, so that a writer that is much faster than its reader does not wake for each piece.
                Ok(0) => {
                    let want = (left.len() as u64).min(self.core.half.capacity() / 2).max(1);
                    self.core.wait_for(Need::Room(want)).map(|()| self.core.half.free())
                }
                other => other,
            };
            match room {
                Ok(room) => {
                    let n = piece.min(room) as usize;
                    self.put(&left[..n]);
                    done += n;
                }
                // The bytes written so far count; the next call fails with the same error.
                Err(_) if done > 0 => break,
                Err(e) => return Err(e),
            }
        }
        Ok(done)
    }

    /// Pieces are at most a quarter of the ring: reader and writer then work at the same time.
    fn piece(&self) -> u64 {
        (self.core.half.capacity() / 4).clamp(1, PIECE)
    }

    /// Writes the buffers one after the other.
    pub(crate) fn write_vectored(&mut self, bufs: &[IoSlice<'_>]) -> Result<usize> {
        let mut done = 0;
        for buf in bufs.iter().filter(|b| !b.is_empty()) {
            match self.write(buf) {
                Ok(n) => {
                    done += n;
                    if n < buf.len() {
                        break;
                    }
                }
                Err(_) if done > 0 => break,
                Err(e) => return Err(e),
            }
        }
        Ok(done)
    }

    /// Waits until `n` contiguous bytes are free, growing the ring if it is too small, and lends them.
    pub(crate) fn reserve(&mut self, n: u64) -> Result<(&mut [u8], &mut TxCore)> {
        self.core.check()?;
        // Bytes that were committed through an earlier span count as use, too.
        self.judge_if_due();
        if n > self.core.half.capacity() {
            self.grow_to(n)?;
        }
        if self.core.room(n)? < n {
            self.core.wait_for(Need::Room(n))?;
        }
        let span = self.ring.span(self.core.half.tail(), n);
        Ok((span.into_mut_slice(), &mut self.core))
    }
}

impl TxCore {
    /// Waits briefly for the broker's answer or for room on the link, and handles the events of the link.
    fn wait_for_answer(&mut self, deadline: Option<Instant>) -> Result<()> {
        if self.waiter.nonblocking {
            return Err(Error::WouldBlock);
        }
        let now = Instant::now();
        if deadline.is_some_and(|deadline| now >= deadline) {
            return Err(Error::TimedOut);
        }
        let soon = now + LOOK;
        let until = deadline.map_or(soon, |deadline| deadline.min(soon));
        let event = self.waiter.link.wait(Some(until)).map_err(|e| Error::system("wait on the link", e))?;
        self.handle(event)
    }

    #[inline]
    fn own(&self) -> &TxHalf {
        &self.endpoint.own().page().tx
    }

    #[inline]
    fn peer(&self) -> Option<&RxHalf<Peer>> {
        self.endpoint.peer().map(|p| &p.region.page().rx)
    }

    pub(crate) fn endpoint(&self) -> &Arc<Endpoint> {
        &self.endpoint
    }

    pub(crate) fn capacity(&self) -> u64 {
        self.half.capacity()
    }

    pub(crate) fn max_ring(&self) -> u64 {
        self.sizing.max()
    }

    pub(crate) fn counters(&self) -> Snapshot {
        self.own().counters.snapshot()
    }

    /// Commits `n` bytes that are in place, and rings if the reader sleeps.
    #[inline]
    pub(crate) fn commit(&mut self, n: u64) {
        if self.endpoint.peer().is_none() {
            self.look_for_peer();
        }
        let own = &self.endpoint.own().page().tx;
        let (peer, fencing) = match self.endpoint.peer() {
            Some(p) => (Some(&p.region.page().rx), p.fencing),
            None => (None, Fencing::Symmetric),
        };
        let ring = self.half.commit(own, peer, n, fencing);
        add(&own.counters.messages, 1);
        if ring {
            publish_core(&own.control.cpu);
            self.waiter.link.ring();
            add(&own.counters.bells_rung, 1);
        } else {
            add(&own.counters.bells_saved, 1);
        }
    }

    /// As long as the peer's memory has not come, each commit rings, since the peer may sleep where that cannot be seen. It comes by the
    /// link, which a writer that always has room would not look at.
    #[cold]
    fn look_for_peer(&mut self) {
        self.unseen = self.unseen.wrapping_add(1);
        if !self.unseen.is_multiple_of(LOOK_EVERY) {
            return;
        }
        // If either finds the end, this half has ended, and its next call reports that.
        let _ = self.look_for_region();
        if let Ok(Some(event)) = self.waiter.link.try_next() {
            let _ = self.handle(event);
        }
    }

    /// Fails if this half has ended, or should.
    #[inline]
    pub(crate) fn check(&mut self) -> Result<()> {
        if let Some(ending) = self.half.ended() {
            return Err(self.error_of(ending));
        }
        if WritingHalf::is_read(self.peer()) && !self.watch.has_hung_up() {
            return Ok(());
        }
        Err(self.find_end())
    }

    /// The peer's half is gone, or says that it is ending.
    #[cold]
    fn find_end(&mut self) -> Error {
        if let Err(e) = self.take_what_is_left() {
            return e;
        }
        // The link has hung up, or the peer's state is another than open.
        let ending = WritingHalf::judge(self.peer(), true).unwrap_or(Ending::Dead { attached: false });
        if matches!(ending, Ending::Dead { .. }) && self.endpoint.is_windowed() {
            self.look_for_move();
        }
        self.end(ending)
    }

    /// Takes what is left on a link that has hung up, since a writing half may not have looked at it for a long time. The relay reports a
    /// move before it hangs up (protocol G7.8).
    fn look_for_move(&self) {
        for _ in 0..MOST_PACKETS {
            match self.waiter.link.try_next() {
                Ok(Some(LinkEvent::HungUp) | None) | Err(_) => break,
                Ok(Some(_)) => {}
            }
        }
    }

    /// The error of every call on this half after its end.
    fn error_of(&self, ending: Ending) -> Error {
        match ending {
            Ending::Here => Error::Closed("this side has finished writing"),
            Ending::Orderly => Error::Closed("the peer reads no more"),
            Ending::Dead { .. } if self.waiter.link.has_moved() => {
                Error::Moved { target: self.endpoint.info().target() }
            }
            Ending::Dead { attached } => Error::Dead { attached },
            Ending::Corrupt(what) => Error::Corrupt(what),
            Ending::Accused => Error::Accused,
        }
    }

    /// A peer that has gone before we looked at its memory: what it had sent is still on the link, and says how it went.
    fn take_what_is_left(&mut self) -> Result<()> {
        self.look_for_region()?;
        while self.endpoint.peer().is_none() {
            match self.waiter.link.try_next() {
                Ok(None | Some(LinkEvent::HungUp)) | Err(_) => break,
                Ok(Some(event)) => self.handle(event)?,
            }
        }
        Ok(())
    }

    fn end(&mut self, ending: Ending) -> Error {
        let Self { endpoint, half, .. } = self;
        let ending = half.end(&endpoint.own().page().tx, ending);
        if matches!(ending, Ending::Corrupt(_)) {
            self.waiter.hang_up();
        }
        self.error_of(ending)
    }

    /// Ends this half because the peer broke the protocol (protocol R4).
    #[cold]
    fn corrupt(&mut self, what: Corrupt) -> Error {
        self.end(Ending::Corrupt(what))
    }

    /// The free space now. It reads the peer's cursor if the known space is less than `want`.
    #[inline]
    fn room(&mut self, want: u64) -> Result<u64> {
        let free = self.half.free();
        if free >= want {
            return Ok(free);
        }
        let Some(peer) = self.endpoint.peer() else { return Ok(free) };
        self.half.refresh(&peer.region.page().rx).map_err(|what| self.corrupt(what))
    }

    /// Whether the ring may be replaced now.
    fn may_switch(&mut self) -> bool {
        if !self.half.may_switch() {
            // Corruption found here is found again by the next write.
            if let Some(peer) = self.endpoint.peer() {
                let _ = self.half.refresh(&peer.region.page().rx);
            }
        }
        self.endpoint.peer().is_some() && self.half.may_switch()
    }

    /// Whether room for `n` bytes depends on the broker's next answer, and not on the peer: the link does not report it.
    #[cold]
    pub(crate) fn waits_for_broker(&mut self, n: u64) -> bool {
        n > self.half.capacity() && self.may_switch()
    }

    /// Waits for room, at most the capacity, or until the ring may be replaced.
    #[cold]
    fn wait_for(&mut self, need: Need) -> Result<()> {
        let mut turn = self.waiter.begin();
        loop {
            if self.endpoint.has_unmapped_region() {
                self.look_for_region()?;
            }
            let Self { endpoint, half, waiter, watch, .. } = self;
            let own = &endpoint.own().page().tx;
            let peer = endpoint.peer();
            let reader = peer.map(|p| &p.region.page().rx);
            let scene = WaitScene {
                core: &own.control.cpu,
                counters: &own.counters,
                peer_core: reader.map(|reader| &reader.control.cpu),
                elsewhere: endpoint.is_windowed(),
                fencing: peer.map_or(Fencing::Symmetric, |p| p.fencing),
                nap: None,
                watch,
            };
            let hung_up = watch.has_hung_up();
            match waiter.step(&mut turn, scene, |idle| half.next(own, reader, hung_up, need, idle)) {
                Ok(WaitStep::Ready) => return Ok(()),
                Ok(WaitStep::Event(event)) => self.handle(event)?,
                Ok(WaitStep::Ended(Ending::Corrupt(what))) => return Err(self.corrupt(what)),
                Ok(WaitStep::Ended(_)) => return Err(self.find_end()),
                Err(e) => {
                    if matches!(e, Error::TimedOut) {
                        half.awake(own);
                    }
                    return Err(e);
                }
            }
        }
    }

    /// Takes the peer's region if it has come by the broker.
    fn look_for_region(&mut self) -> Result<()> {
        self.endpoint.look_for_region().map_err(|e| self.blame(e))
    }

    fn handle(&mut self, event: LinkEvent) -> Result<()> {
        match event {
            LinkEvent::TimedOut => Ok(()),
            LinkEvent::Bell => self.look_for_region(),
            LinkEvent::HungUp => Err(self.find_end()),
            LinkEvent::Attach { generation: 0, start: 0, base, geometry, memory } => {
                self.endpoint.attach(&memory, base, 0, geometry).map_err(|e| self.blame(e))
            }
            // A reader has no further rings to send.
            LinkEvent::Attach { .. } | LinkEvent::Dropped => Err(self.corrupt(Corrupt::BadPacket)),
            LinkEvent::Corrupt(what) => Err(self.corrupt(what)),
        }
    }

    /// Ends this half if the error is the peer's fault.
    fn blame(&mut self, e: Error) -> Error {
        match e {
            Error::Corrupt(what) => self.corrupt(what),
            other => other,
        }
    }

    /// Ends this half without a word, as if this process had died (protocol L4). Committed bytes stay readable.
    pub(crate) fn abort(&mut self) {
        if self.half.ended().is_none() {
            self.end(Ending::Dead { attached: true });
            self.waiter.hang_up();
        }
    }

    /// Finishes this half: no bytes follow (protocol S2). Committed bytes stay readable.
    pub(crate) fn finish(&mut self) {
        let Self { endpoint, half, .. } = self;
        if half.finish(&endpoint.own().page().tx) {
            self.waiter.hang_up();
        }
    }
}

impl Drop for TxCore {
    fn drop(&mut self) {
        self.finish();
        if let RingChange::Asking { asked, .. } | RingChange::Passing { asked, .. } = self.change {
            self.endpoint.give_up(asked);
        }
    }
}
