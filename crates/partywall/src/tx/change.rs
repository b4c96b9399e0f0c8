//! The change to a ring of another size: when it is due, what is asked for, and the switch (protocol A2 to A4).

use super::{StreamTx, TxCore};
use crate::desk;
use crate::endpoint::PendingRequest;
use crate::memory::{self, Place};
use crate::{Error, Result};
use partywall_protocol::wire::Refusal;
use partywall_region::{OwnRegion, RegionOptions};
use partywall_shm::half::Need;
use partywall_shm::layout::{PAGE, RegionKind};
use rustix::fd::AsFd;
use std::time::{Duration, Instant};

/// Changes in a row, with nothing committed between them, that may wait in the peer's mailbox beside the one before.
const MOST_UNUSED: u32 = desk::MOST_RINGS as u32 - 1;

/// The longest that `trim` waits for the broker.
const TRIM: Duration = Duration::from_millis(100);

/// A change to another ring. The writer does not wait for the broker: it goes on in the present ring until the answer has come.
///
/// ```text
///         own memory:  None ---> Passing { ring } ------------------------> None, in the new ring
///   place in a window:  None ---> Asking ---> Placed { place } -----------> None, in the new ring
///                                                  (until the link has room)
/// ```
#[derive(Debug)]
pub(super) enum RingChange {
    None,
    /// The broker is to pass this ring on to the peer.
    Passing {
        asked: PendingRequest,
        size: u64,
        ring: OwnRegion,
    },
    /// It is to give a place in the window for a ring of this size.
    Asking {
        asked: PendingRequest,
        size: u64,
    },
    /// There is a place, and the link to the peer was full.
    Placed {
        size: u64,
        place: Place,
    },
}

impl StreamTx {
    /// Changes to a ring that `n` bytes fit in. Unlike a write, this cannot go on without, and waits for as long as this half may.
    pub(super) fn grow_to(&mut self, n: u64) -> Result<()> {
        let Some(size) = self.core.sizing.fit(n) else {
            let advice = "ask for a larger ring (Options::ring), or send it in parts";
            return Err(Error::TooLarge { asked: n, max: self.core.sizing.max(), advice });
        };
        // A ring can only be handed to a peer that is there, and only one at a time.
        let turn = self.core.waiter.begin();
        loop {
            self.core.wait_for(Need::Switch)?;
            if matches!(self.core.change, RingChange::None) && !self.begin_growth(n, size)? {
                self.core.wait_for_answer(turn.deadline)?;
                self.core.check()?;
                continue;
            }
            // A smaller change that was under way comes first.
            match self.go_on_changing() {
                Ok(_) if n <= self.core.half.capacity() => return Ok(()),
                Ok(true) => {}
                Ok(false) => self.core.wait_for_answer(turn.deadline)?,
                Err(e) => return Err(e),
            }
            self.core.check()?;
        }
    }

    /// Asks for a ring of this size, which `n` bytes fit in; `false` if the broker does not read now. The last ring that the peer keeps before bytes come
    /// is the largest: no further one would be needed.
    fn begin_growth(&mut self, n: u64, size: u64) -> Result<bool> {
        let unused = self.unused_rings();
        if unused >= MOST_UNUSED {
            let advice =
                "commit some bytes first: the peer keeps no further ring before it has read what comes before it";
            return Err(Error::TooLarge { asked: n, max: self.core.half.capacity(), advice });
        }
        let largest = self.core.sizing.max();
        match self.begin_change(if unused + 1 == MOST_UNUSED { largest } else { size }) {
            Ok(()) => Ok(true),
            Err(Error::WouldBlock) => Ok(false),
            Err(e) => Err(e),
        }
    }

    /// The rings that the peer has and has not come to (protocol A4).
    fn unused_rings(&self) -> u32 {
        let (tail, count) = self.core.unused;
        if tail == self.core.half.tail() { count } else { 0 }
    }

    #[inline]
    pub(super) fn judge_if_due(&mut self) {
        if self.core.sizing.is_due(self.core.half.tail()) {
            self.judge_size();
        }
    }

    /// Once a revolution: is the ring of the right size?
    #[cold]
    fn judge_size(&mut self) {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let now = u64::try_from(now.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(now.tv_nsec).unwrap_or(0);
        let size = self.core.sizing.judge(self.core.half.tail(), now);
        if matches!(self.core.change, RingChange::None) {
            let Some(size) = size else { return };
            // In a window a ring only grows: the place that it leaves stays the channel's.
            let useless = self.core.endpoint.is_windowed() && size <= self.core.half.capacity();
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
                RingChange::None => match self.core.sizing.trim() {
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
        if self.unused_rings() >= MOST_UNUSED {
            return Err(Error::WouldBlock);
        }
        let endpoint = &self.core.endpoint;
        self.core.change = if endpoint.is_windowed() {
            RingChange::Asking { asked: endpoint.ask_room(PAGE + size)?, size }
        } else {
            let (ring, memory) = OwnRegion::create(&self.ring_options(size))?;
            let generation = self.core.half.generation().wrapping_add(1);
            RingChange::Passing { asked: endpoint.ask_grow(generation, ring.geometry(), memory)?, size, ring }
        };
        Ok(())
    }

    /// Changes to the other ring if nothing is missing for it any more and the peer has come to the present one (protocol A4); `false` if
    /// not. Does not wait.
    fn go_on_changing(&mut self) -> Result<bool> {
        // Bytes written since the change began may be in a ring that the peer has not reached.
        if !matches!(self.core.change, RingChange::None) && !self.core.may_switch() {
            return Ok(false);
        }
        match std::mem::replace(&mut self.core.change, RingChange::None) {
            RingChange::None => Ok(true),
            RingChange::Passing { asked, size, ring } => match self.core.endpoint.is_delivered(asked) {
                None => {
                    self.core.change = RingChange::Passing { asked, size, ring };
                    Ok(false)
                }
                Some(delivered) => {
                    delivered?;
                    self.switch(size, ring);
                    Ok(true)
                }
            },
            RingChange::Asking { asked, size } => match self.core.endpoint.place(asked) {
                None => {
                    self.core.change = RingChange::Asking { asked, size };
                    Ok(false)
                }
                Some(Ok(place)) => self.switch_in_window(size, place),
                // There is less room: half of it may do.
                Some(Err(Error::Refused { code: Refusal::OutOfResources, .. }))
                    if size / 2 > self.core.half.capacity() =>
                {
                    self.begin_change(size / 2).map(|()| false)
                }
                Some(Err(e)) => {
                    // Each request takes the broker a look at the window, so after the first refusal the ring keeps its size.
                    self.core.sizing.settle();
                    Err(e)
                }
            },
            RingChange::Placed { size, place } => self.switch_in_window(size, place),
        }
    }

    /// Sends the peer a ring in a window and goes on in it; `false` if the link is full.
    fn switch_in_window(&mut self, size: u64, place: Place) -> Result<bool> {
        let ring = memory::extension_at(&place, &self.ring_options(size))?;
        let generation = self.core.half.generation().wrapping_add(1);
        match self.core.waiter.link.attach_at(place.base, 0, generation, ring.geometry(), place.memory.as_fd()) {
            Ok(()) => {
                self.switch(size, ring);
                Ok(true)
            }
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {
                self.core.change = RingChange::Placed { size, place };
                Ok(false)
            }
            Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => Err(self.core.find_end()),
            Err(e) => Err(Error::system("send a ring", e)),
        }
    }

    /// Protocol A2: the peer has the ring.
    fn switch(&mut self, size: u64, ring: OwnRegion) {
        self.core.unused = (self.core.half.tail(), self.unused_rings() + 1);
        let TxCore { endpoint, half, .. } = &mut self.core;
        half.switch(&endpoint.own().page().tx, size);
        self.core.sizing.changed(size);
        self.ring = ring;
    }
}
