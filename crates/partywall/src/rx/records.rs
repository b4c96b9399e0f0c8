//! Records of calls: found by their stamps, without a look at the cursor (protocol K2).

use super::{StreamRx, begun};
use crate::endpoint::PeerEndpoint;
use crate::waiter::{WaitScene, WaitStep};
use crate::{Error, Result};
use partywall_region::PeerRegion;
use partywall_region::wait::publish_core;
use partywall_shm::call::{CallLine, CallRecord, RECORD};
use partywall_shm::corrupt::Corrupt;
use partywall_shm::half::{Effect, Ending, Idle, ReadingHalf};
use partywall_shm::wake::Fencing;
use std::sync::atomic::Ordering;

/// Looks for a record before a wait begins in earnest, which reads the clock. A call takes about as long when both sides are awake.
const LOOKS: u32 = 64;

impl StreamRx {
    /// The next record of a call, waited for and released; `None` at the end of the stream (protocol K2).
    #[inline]
    pub(crate) fn next_record(&mut self) -> Result<Option<CallRecord>> {
        let mut record = CallRecord::BLANK;
        Ok(self.next_record_to(&mut record)?.then_some(record))
    }

    /// The same, to a place where the record stays while it is used; `false` at the end of the stream.
    #[inline]
    pub(crate) fn next_record_to(&mut self, record: &mut CallRecord) -> Result<bool> {
        if !self.spin_for_record(LOOKS, || true) {
            match self.wait_for_record()? {
                0 => return Ok(false),
                n if n < RECORD => return Err(self.corrupt(Corrupt::BadRecord)),
                _ => {}
            }
        }
        let line = self.span(0, RECORD).and_then(CallLine::in_peer);
        let Some(words) = line.map(CallLine::snapshot) else {
            return Err(self.corrupt(Corrupt::BadRecord));
        };
        self.release(RECORD);
        words.judge_to(record).map(|()| true).map_err(|what| self.corrupt(what))
    }

    /// Whether the record at the head of the present ring has been handed over by its stamp. Only its own line is looked at.
    #[inline]
    fn sees_stamp(&mut self) -> bool {
        let Self { ring, half, .. } = self;
        is_stamped(ring.as_ref(), half) && half.admit(RECORD)
    }

    /// Looks for a record some times, for as long as `may_go_on`. `true` if there is one, and then [`StreamRx::next_record`] does not wait.
    ///
    /// Does not look for long: no clock is read, and no other thing that happens to the connection is noticed.
    #[inline]
    pub(crate) fn spin_for_record(&mut self, looks: u32, may_go_on: impl Fn() -> bool) -> bool {
        if self.half.available() >= RECORD {
            return true;
        }
        if self.sees_stamp() {
            return true;
        }
        if !self.waiter.spins() || self.shares_core() {
            return false;
        }
        for _ in 0..looks {
            std::hint::spin_loop();
            if self.sees_stamp() {
                return true;
            }
            if !may_go_on() {
                return false;
            }
        }
        false
    }

    /// Whether the peer has last been seen on the core that this thread is on: then it cannot get ahead while this thread spins.
    #[inline]
    fn shares_core(&self) -> bool {
        let core = publish_core(&self.own().control.cpu);
        let is_same =
            |peer: &PeerEndpoint| core != 0 && peer.region.page().tx.control.cpu.load(Ordering::Relaxed) == core;
        self.endpoint.peer().is_none_or(|peer| !self.endpoint.is_windowed() && is_same(peer))
    }

    /// Waits for a record. Spinning looks at the record's line alone: a look at the cursor would take that line from the writer each time.
    fn wait_for_record(&mut self) -> Result<u64> {
        let mut turn = self.waiter.begin();
        let mut has_looked = self.ring.is_some();
        loop {
            if !std::mem::replace(&mut has_looked, false) {
                let n = self.look(RECORD)?;
                if n > 0 {
                    self.half.awake(&self.endpoint.own().page().rx);
                    return Ok(n);
                }
                if self.half.must_switch() && self.endpoint.is_windowed() && self.half.ended().is_none() {
                    self.wait_for_ring(turn.deadline)?;
                    continue;
                }
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
            let step = waiter.step(&mut turn, scene, |idle| {
                if is_stamped(ring.as_ref(), half) && half.admit(RECORD) {
                    half.awake(own);
                    return Effect::Ready;
                }
                match idle {
                    Idle::Spin => Effect::LookAgain,
                    Idle::Sleep => half.next(own, writer, *hung_up, RECORD, idle),
                }
            });
            match step {
                Ok(WaitStep::Ready) if half.available() > 0 => return Ok(half.available()),
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
    }
}

/// Whether the record at the head has been handed over by its stamp.
#[inline]
fn is_stamped(ring: Option<&PeerRegion>, half: &ReadingHalf) -> bool {
    let line = ring.and_then(|ring| CallLine::in_peer(ring.span(half.head(), RECORD)));
    line.is_some_and(|line| line.is_stamped(half.head()))
}
