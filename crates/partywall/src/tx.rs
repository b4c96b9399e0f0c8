//! The writing half of an endpoint: room, commit, doorbell, change of ring, and every way it can end.

use crate::desk;
use crate::endpoint::{Asked, Endpoint};
use crate::keeper::Watch;
use crate::memory::{self, Place};
use crate::options::Options;
use crate::waiter::{Step, Waiter, Words};
use crate::{Error, Result};
use partywall_protocol::wire::Refusal;
use partywall_region::wait::publish_core;
use partywall_region::{Event, OwnRegion, RegionOptions};
use partywall_shm::corrupt::Corrupt;
use partywall_shm::counters::{Snapshot, add};
use partywall_shm::layout::{PAGE, RegionKind, RxHalf, TxHalf};
use partywall_shm::producer::Producer;
use partywall_shm::sizing::Sizing;
use partywall_shm::state::{End, RxState, TxState, writer_end};
use partywall_shm::sync::Peer;
use partywall_shm::wake::Fencing;
use rustix::fd::AsFd;
use std::io::IoSlice;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The largest piece that is copied before it is committed (protocol R6).
const PIECE: u64 = 128 << 10;

/// Changes in a row, with nothing committed between them, that may wait in the peer's mailbox beside the one before.
const MOST_UNUSED: u32 = desk::MOST_RINGS as u32 - 1;

/// Between two looks for the broker's answer, where there is nothing else to do.
const LOOK: Duration = Duration::from_millis(1);
/// The longest that `trim` waits for the broker.
const TRIM: Duration = Duration::from_millis(100);

/// The memory that is written, beside everything else, so that a span of it can be lent out.
#[derive(Debug)]
pub(crate) struct Tx {
    ring: OwnRegion,
    pub(crate) core: TxCore,
}

/// Commits between two looks for a peer that has not attached.
const LOOK_EVERY: u32 = 8;

/// A writing half without its memory.
#[derive(Debug)]
pub(crate) struct TxCore {
    endpoint: Arc<Endpoint>,
    producer: Producer,
    pub(crate) waiter: Waiter,
    sizing: Sizing,
    huge_pages: bool,
    /// A change of ring that is under way.
    change: Change,
    /// Changes since which nothing has been committed, and where they were made.
    unused: (u64, u32),
    /// Commits before the peer had attached.
    unseen: u32,
    ended: Option<Ending>,
    /// Knows of a hang-up that nothing has run into yet.
    watch: Watch,
}

/// A change to another ring. Nobody waits for the broker: writing goes on in the present ring until its answer has come.
///
/// ```text
///         own memory:  None ---> Passing { ring } ------------------------> None, in the new ring
///   place in a window:  None ---> Asking ---> Placed { place } -----------> None, in the new ring
///                                                  (until the link has room)
/// ```
#[derive(Debug)]
enum Change {
    None,
    /// The broker is to pass this ring on to the peer.
    Passing {
        asked: Asked,
        size: u64,
        ring: OwnRegion,
    },
    /// It is to give a place in the window for a ring of this size.
    Asking {
        asked: Asked,
        size: u64,
    },
    /// There is a place, and the link to the peer was full.
    Placed {
        size: u64,
        place: Place,
    },
}

/// Why this half has ended.
#[derive(Debug, Clone, Copy)]
enum Ending {
    Finished,
    PeerClosed,
    Dead { attached: bool },
    Corrupt(Corrupt),
    Accused,
}

impl From<Ending> for Error {
    fn from(e: Ending) -> Self {
        match e {
            Ending::Finished => Self::Closed("this side has finished writing"),
            Ending::PeerClosed => Self::Closed("the peer reads no more"),
            Ending::Dead { attached } => Self::Dead { attached },
            Ending::Corrupt(what) => Self::Corrupt(what),
            Ending::Accused => Self::Accused,
        }
    }
}

impl Tx {
    pub(crate) fn new(
        endpoint: Arc<Endpoint>,
        ring: OwnRegion,
        link: partywall_region::Link,
        watch: Watch,
        sizing: Sizing,
        options: &Options,
    ) -> Self {
        let producer = Producer::new(ring.geometry().ring_size());
        let waiter = Waiter::new(link, options.spin);
        let huge_pages = options.huge_pages;
        let change = Change::None;
        let core = TxCore {
            endpoint,
            producer,
            waiter,
            sizing,
            huge_pages,
            change,
            unused: (0, 0),
            unseen: 0,
            ended: None,
            watch,
        };
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
        if len <= self.core.producer.free() && len <= PIECE {
            self.put(buf);
            return Ok(buf.len());
        }
        self.write_pieces(buf)
    }

    /// Copies a piece that is known to fit and commits it.
    #[inline]
    fn put(&mut self, piece: &[u8]) {
        let len = piece.len() as u64;
        self.ring.span(self.core.producer.tail(), len).copy_from(0, piece);
        self.core.commit(len);
        self.judge_if_due();
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
                    let want = (left.len() as u64).min(self.core.producer.capacity() / 2).max(1);
                    self.core.wait_room(want).map(|()| self.core.producer.free())
                }
                other => other,
            };
            match room {
                Ok(room) => {
                    let n = piece.min(room) as usize;
                    self.put(&left[..n]);
                    done += n;
                }
                // What was written counts; the error is met again by the next call.
                Err(_) if done > 0 => break,
                Err(e) => return Err(e),
            }
        }
        Ok(done)
    }

    /// Pieces are at most a quarter of the ring: reader and writer then work at the same time.
    fn piece(&self) -> u64 {
        (self.core.producer.capacity() / 4).clamp(1, PIECE)
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
        // What was committed through an earlier span counts as use, too.
        self.judge_if_due();
        if n > self.core.producer.capacity() {
            self.grow_to(n)?;
        }
        if self.core.room(n)? < n {
            self.core.wait_room(n)?;
        }
        let span = self.ring.span(self.core.producer.tail(), n);
        Ok((span.into_mut_slice(), &mut self.core))
    }

    /// Changes to a ring that `n` bytes fit in. Unlike a write, this cannot go on without, and waits for as long as this half may.
    fn grow_to(&mut self, n: u64) -> Result<()> {
        let Some(size) = self.core.sizing.fit(n) else {
            let advice = "ask for a larger ring (Options::ring), or send it in parts";
            return Err(Error::TooLarge { asked: n, max: self.core.sizing.max(), advice });
        };
        // A ring can only be handed to a peer that is there, and only one at a time.
        let turn = self.core.waiter.begin();
        loop {
            while self.core.endpoint.peer().is_none() || !self.core.producer.may_switch() {
                let all = self.core.producer.capacity();
                self.core.wait_for(all, |core| core.endpoint.peer().is_some() && core.producer.may_switch())?;
            }
            if matches!(self.core.change, Change::None) {
                self.begin_change(size)?;
            }
            // A smaller change that was under way comes first.
            match self.go_on_changing() {
                Ok(_) if n <= self.core.producer.capacity() => return Ok(()),
                Ok(true) => {}
                Ok(false) => self.core.wait_for_answer(turn.deadline)?,
                Err(e) => return Err(e),
            }
            self.core.check()?;
        }
    }

    #[inline]
    fn judge_if_due(&mut self) {
        if self.core.sizing.is_due(self.core.producer.tail()) {
            self.judge_size();
        }
    }

    /// Once a revolution: is the ring of the right size?
    #[cold]
    fn judge_size(&mut self) {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let now = u64::try_from(now.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(now.tv_nsec).unwrap_or(0);
        let size = self.core.sizing.judge(self.core.producer.tail(), now);
        if matches!(self.core.change, Change::None) {
            let Some(size) = size else { return };
            // In a window a ring only grows: the place that it leaves stays the channel's.
            let useless = self.core.endpoint.is_windowed() && size <= self.core.producer.capacity();
            if useless || !self.core.may_switch() {
                return;
            }
            // A ring that cannot be had now is no reason to fail: the present one serves.
            if let Err(e) = self.begin_change(size) {
                tracing::debug!(size, error = %e, "the ring keeps its size");
                return;
            }
        }
        if let Err(e) = self.go_on_changing() {
            tracing::debug!(error = %e, "the ring keeps its size");
        }
    }

    /// Goes back to the smallest ring, for a connection that is about to be quiet.
    pub(crate) fn trim(&mut self) -> Result<()> {
        self.core.check()?;
        // To leave a place in a window gives nothing back.
        if self.core.endpoint.is_windowed() {
            return Ok(());
        }
        let deadline = Instant::now() + TRIM;
        loop {
            // A change that was under way comes first.
            let done = match self.core.change {
                Change::None => match self.core.sizing.trim() {
                    Some(size) if self.core.may_switch() => match self.begin_change(size) {
                        // The broker has enough to do, or is gone: another time.
                        Err(Error::WouldBlock | Error::System { .. } | Error::Refused { .. }) => return Ok(()),
                        other => other.and_then(|()| self.go_on_changing())?,
                    },
                    _ => return Ok(()),
                },
                _ => match self.go_on_changing() {
                    Err(Error::WouldBlock | Error::System { .. } | Error::Refused { .. }) => return Ok(()),
                    other => other?,
                },
            };
            if !done && (self.core.waiter.nonblocking || Instant::now() >= deadline) {
                // A later call finds the answer.
                return Ok(());
            }
            if !done {
                self.core.wait_for_answer(Some(deadline)).or_else(|e| match e {
                    Error::TimedOut => Ok(()),
                    other => Err(other),
                })?;
            }
        }
    }

    fn ring_options(&self, size: u64) -> RegionOptions {
        RegionOptions { kind: RegionKind::Extension, huge_pages: self.core.huge_pages, ..RegionOptions::endpoint(size) }
    }

    /// Asks for what a ring of this size needs. Does not wait.
    fn begin_change(&mut self, size: u64) -> Result<()> {
        let tail = self.core.producer.tail();
        // The peer keeps only so many rings that it has not come to (protocol A4).
        if self.core.unused.0 == tail && self.core.unused.1 >= MOST_UNUSED {
            return Err(Error::WouldBlock);
        }
        let endpoint = &self.core.endpoint;
        self.core.change = if endpoint.is_windowed() {
            Change::Asking { asked: endpoint.ask_room(PAGE + size)?, size }
        } else {
            let (ring, memory) = OwnRegion::create(&self.ring_options(size))?;
            let generation = self.core.producer.generation().wrapping_add(1);
            Change::Passing { asked: endpoint.ask_grow(generation, ring.geometry(), memory)?, size, ring }
        };
        Ok(())
    }

    /// Changes to the other ring if nothing is missing for it any more and the peer has come to the present one (protocol A4); `false` if
    /// not. Does not wait.
    fn go_on_changing(&mut self) -> Result<bool> {
        // What was written since the change began may be in a ring that the peer has not come to.
        if !matches!(self.core.change, Change::None) && !self.core.may_switch() {
            return Ok(false);
        }
        match std::mem::replace(&mut self.core.change, Change::None) {
            Change::None => Ok(true),
            Change::Passing { asked, size, ring } => match self.core.endpoint.is_delivered(asked) {
                None => {
                    self.core.change = Change::Passing { asked, size, ring };
                    Ok(false)
                }
                Some(delivered) => {
                    delivered?;
                    self.switch(size, ring);
                    Ok(true)
                }
            },
            Change::Asking { asked, size } => match self.core.endpoint.place(asked) {
                None => {
                    self.core.change = Change::Asking { asked, size };
                    Ok(false)
                }
                Some(Ok(place)) => self.switch_in_window(size, place),
                // There is less room: half of it may do.
                Some(Err(Error::Refused { code: Refusal::OutOfResources, .. }))
                    if size / 2 > self.core.producer.capacity() =>
                {
                    self.begin_change(size / 2).map(|()| false)
                }
                Some(Err(e)) => {
                    // Each request takes the broker a look at the window, so after the first refusal the ring keeps its size.
                    self.core.sizing.settle();
                    Err(e)
                }
            },
            Change::Placed { size, place } => self.switch_in_window(size, place),
        }
    }

    /// Sends the peer a ring in a window and goes on in it; `false` if the link is full.
    fn switch_in_window(&mut self, size: u64, place: Place) -> Result<bool> {
        let ring = memory::extension_at(&place, &self.ring_options(size))?;
        let generation = self.core.producer.generation().wrapping_add(1);
        match self.core.waiter.link.attach_at(place.base, 0, generation, ring.geometry(), place.memory.as_fd()) {
            Ok(()) => {
                self.switch(size, ring);
                Ok(true)
            }
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {
                self.core.change = Change::Placed { size, place };
                Ok(false)
            }
            Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => Err(self.core.find_end()),
            Err(e) => Err(Error::system("send a ring", e)),
        }
    }

    /// Protocol A2: the peer has the ring.
    fn switch(&mut self, size: u64, ring: OwnRegion) {
        let tail = self.core.producer.tail();
        let before = if self.core.unused.0 == tail { self.core.unused.1 } else { 0 };
        self.core.unused = (tail, before + 1);
        let TxCore { endpoint, producer, .. } = &mut self.core;
        producer.switch(&endpoint.own().page().tx, size);
        self.core.sizing.changed(size);
        add(&self.core.own().counters.switches, 1);
        self.ring = ring;
    }
}

impl TxCore {
    /// Waits a little, for the broker's answer or for room on the link, and hears what the link says meanwhile.
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
        self.producer.capacity()
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
        let ring = self.producer.commit(own, peer, n, fencing);
        add(&own.counters.bytes, n);
        add(&own.counters.messages, 1);
        if ring {
            publish_core(&own.control.cpu);
            self.waiter.link.ring();
            add(&own.counters.bells_rung, 1);
        } else {
            add(&own.counters.bells_saved, 1);
        }
        self.waiter.disarm(&own.control.space_wanted);
    }

    /// As long as the peer's memory has not come, each commit rings, since the peer may sleep where that cannot be seen. It comes by the
    /// link, which a writer that always has room would not look at.
    #[cold]
    fn look_for_peer(&mut self) {
        self.unseen = self.unseen.wrapping_add(1);
        if !self.unseen.is_multiple_of(LOOK_EVERY) {
            return;
        }
        // If either finds the end, this half has ended, and its next call says so.
        let _ = self.look_for_region();
        if let Ok(Some(event)) = self.waiter.link.try_next() {
            let _ = self.handle(event);
        }
    }

    /// Fails if this half has ended, or should.
    #[inline]
    pub(crate) fn check(&mut self) -> Result<()> {
        if let Some(ending) = self.ended {
            return Err(ending.into());
        }
        let open = match self.peer() {
            Some(peer) => RxState::load(&peer.control.state) == Ok(RxState::Open),
            None => true,
        };
        if open && !self.watch.has_hung_up() {
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
        let ending = match self.peer().map(|peer| RxState::load(&peer.control.state)) {
            Some(Ok(state)) => match writer_end(state) {
                End::Orderly => Ending::PeerClosed,
                End::Dead => Ending::Dead { attached: true },
                End::Accused => Ending::Accused,
            },
            Some(Err(what)) => return self.corrupt(what),
            None => Ending::Dead { attached: false },
        };
        self.end(ending)
    }

    /// A peer that has gone before we looked at its memory: what it had sent is still on the link, and says how it went.
    fn take_what_is_left(&mut self) -> Result<()> {
        self.look_for_region()?;
        while self.endpoint.peer().is_none() {
            match self.waiter.link.try_next() {
                Ok(None | Some(Event::HungUp)) | Err(_) => break,
                Ok(Some(event)) => self.handle(event)?,
            }
        }
        Ok(())
    }

    fn end(&mut self, ending: Ending) -> Error {
        self.ended = Some(ending);
        ending.into()
    }

    /// Ends this half because the peer broke the protocol (protocol R4).
    #[cold]
    fn corrupt(&mut self, what: Corrupt) -> Error {
        TxState::Broken.store(&self.own().control.state);
        self.waiter.hang_up();
        self.end(Ending::Corrupt(what))
    }

    /// How much room there is now; asks the peer's cursor if less than `want` is known of.
    #[inline]
    fn room(&mut self, want: u64) -> Result<u64> {
        let free = self.producer.free();
        if free >= want {
            return Ok(free);
        }
        let Some(peer) = self.endpoint.peer() else { return Ok(free) };
        self.producer.refresh(&peer.region.page().rx).map_err(|what| self.corrupt(what))
    }

    /// Whether the ring may be replaced now.
    fn may_switch(&mut self) -> bool {
        if !self.producer.may_switch() {
            // Corruption found here is found again by the next write.
            if let Some(peer) = self.endpoint.peer() {
                let _ = self.producer.refresh(&peer.region.page().rx);
            }
        }
        self.endpoint.peer().is_some() && self.producer.may_switch()
    }

    /// Waits until `want` bytes (at most the capacity) are free.
    #[cold]
    fn wait_room(&mut self, want: u64) -> Result<()> {
        self.wait_for(want, |core| core.producer.free() >= want)
    }

    /// Waits for `enough`, which has to become true once `want` bytes are free.
    fn wait_for(&mut self, want: u64, mut enough: impl FnMut(&Self) -> bool) -> Result<()> {
        add(&self.own().counters.stalls, 1);
        let mut turn = self.waiter.begin();
        loop {
            self.room(want)?;
            if enough(self) {
                break;
            }
            self.check()?;
            // Where the bytes are free already, it is the peer's attaching that is waited for: the link tells.
            let wish = self.producer.wish(want).unwrap_or(self.producer.tail());
            let Self { endpoint, producer, waiter, watch, .. } = self;
            let own = &endpoint.own().page().tx;
            let peer = endpoint.peer();
            let words = Words {
                wanted: &own.control.space_wanted,
                core: &own.control.cpu,
                counters: &own.counters,
                peer_core: peer.map(|p| &p.region.page().rx.control.cpu),
                elsewhere: endpoint.is_windowed(),
                fencing: peer.map_or(Fencing::Symmetric, |p| p.fencing),
                nap: None,
                watch,
            };
            let step = waiter.step(&mut turn, words, wish, || match peer {
                Some(peer) => {
                    let head = &peer.region.page().rx;
                    producer.refresh(head)?;
                    Ok(producer.wish(want).is_none() || RxState::load(&head.control.state)? != RxState::Open)
                }
                None => Ok(false),
            });
            match step {
                Ok(Step::Ready) => {}
                Ok(Step::Event(event)) => self.handle(event)?,
                Err(Error::Corrupt(what)) => return Err(self.corrupt(what)),
                Err(e) => return Err(e),
            }
        }
        let Self { endpoint, waiter, .. } = self;
        waiter.disarm(&endpoint.own().page().tx.control.space_wanted);
        Ok(())
    }

    /// Takes the peer's region if it has come by the broker.
    fn look_for_region(&mut self) -> Result<()> {
        self.endpoint.look_for_region().map_err(|e| self.blame(e))
    }

    fn handle(&mut self, event: Event) -> Result<()> {
        match event {
            Event::TimedOut => Ok(()),
            Event::Bell => self.look_for_region(),
            Event::HungUp => Err(self.find_end()),
            Event::Attach { generation: 0, start: 0, base, geometry, memory } => {
                self.endpoint.attach(&memory, base, 0, geometry).map_err(|e| self.blame(e))
            }
            // A reader has no further rings to send.
            Event::Attach { .. } | Event::Dropped => Err(self.corrupt(Corrupt::BadPacket)),
            Event::Corrupt(what) => Err(self.corrupt(what)),
        }
    }

    /// Ends this half if the error is the peer's fault.
    fn blame(&mut self, e: Error) -> Error {
        match e {
            Error::Corrupt(what) => self.corrupt(what),
            other => other,
        }
    }

    /// Says that nothing follows (protocol S2). What is committed stays readable.
    pub(crate) fn finish(&mut self) {
        if self.ended.is_none() {
            TxState::Finished.store(&self.own().control.state);
            self.ended = Some(Ending::Finished);
            self.waiter.hang_up();
        }
    }
}

impl Drop for TxCore {
    fn drop(&mut self) {
        self.finish();
    }
}
