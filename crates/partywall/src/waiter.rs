//! How a half waits: does what the engine asks for ([`partywall_shm::half`]), which is to spin, to fence and to sleep on the link.

mod retry;

use crate::keeper::HangUpWatch;
use crate::{Error, Result};
use partywall_region::wait::{Spin, publish_core};
use partywall_region::{Link, LinkEvent, membarrier};
use partywall_shm::counters::{Counters, add};
use partywall_shm::half::{Effect, Ending, Idle};
use partywall_shm::sync::ReadOnly;
use partywall_shm::wake::Fencing;
pub(crate) use retry::{RetrySet, RetryTimer};
use std::convert::Infallible;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// The waiting side of one half.
#[derive(Debug)]
pub(crate) struct Waiter {
    pub(crate) link: Link,
    pub(crate) nonblocking: bool,
    pub(crate) timeout: Option<Duration>,
    spin: Spin,
}

/// One wait, from its first look to its end.
#[derive(Debug)]
pub(crate) struct WaitTurn {
    pub(crate) deadline: Option<Instant>,
    /// A look has found nothing: the wait counts as a stall, and spinning had its chance.
    stalled: bool,
    /// Events taken by a call that must not block.
    taken: u32,
}

/// Events that a non-blocking call takes before it leaves the rest for the next: a peer that rings without end must not
/// keep the caller from returning.
const MOST_EVENTS: u32 = 64;

/// The context of a wait, besides the state of its half.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WaitScene<'a> {
    pub(crate) core: &'a AtomicU32,
    pub(crate) counters: &'a Counters,
    /// The peer's core; `None` before it has attached.
    pub(crate) peer_core: Option<&'a ReadOnly<AtomicU32>>,
    /// The peer is on another machine, and so is its core whatever number it has.
    pub(crate) elsewhere: bool,
    pub(crate) fencing: Fencing,
    /// The longest sleep before the caller looks again, if the link may not tell of everything; `None`: it does.
    pub(crate) nap: Option<Duration>,
    /// Knows if the peer goes while we spin.
    pub(crate) watch: &'a HangUpWatch,
}

/// How a step of waiting ended.
#[derive(Debug)]
pub(crate) enum WaitStep {
    /// The event has happened.
    Ready,
    /// It will not come any more.
    Ended(Ending),
    /// Something arrived on the link, or a nap is over: handle it and look again.
    Event(LinkEvent),
}

impl Waiter {
    pub(crate) fn new(link: Link, spin: Duration) -> Self {
        Self { link, nonblocking: false, timeout: None, spin: Spin::new(spin) }
    }

    /// Whether a wait would begin by spinning.
    #[inline]
    pub(crate) fn spins(&self) -> bool {
        !self.nonblocking && !self.spin.budget().is_zero()
    }

    /// A wait begins.
    pub(crate) fn begin(&self) -> WaitTurn {
        // A timeout beyond the range of `Instant` means no deadline.
        let deadline = self.timeout.and_then(|t| Instant::now().checked_add(t));
        WaitTurn { deadline, stalled: false, taken: 0 }
    }

    /// One step: does what the half asks for ([`partywall_shm::half`]) until it is ready, or the link says something. Spins once per wait.
    ///
    /// After [`Error::WouldBlock`] on a non-blocking half its wish stands: its descriptor becomes readable.
    pub(crate) fn step(
        &mut self,
        turn: &mut WaitTurn,
        scene: WaitScene<'_>,
        mut next: impl FnMut(Idle) -> Effect,
    ) -> Result<WaitStep> {
        if !turn.stalled && next(Idle::Spin) == Effect::LookAgain {
            turn.stalled = true;
            add(&scene.counters.stalls, 1);
            if self.spin(turn, scene, || next(Idle::Spin) != Effect::LookAgain) {
                add(&scene.counters.spins, 1);
            }
        }
        loop {
            match next(Idle::Sleep) {
                Effect::Ready => return Ok(WaitStep::Ready),
                Effect::Ended(ending) => return Ok(WaitStep::Ended(ending)),
                Effect::Fence => membarrier::heavy(scene.fencing),
                Effect::Sleep { .. } => return self.sleep(turn, scene).map(WaitStep::Event),
                Effect::LookAgain => {}
            }
        }
    }

    fn spin(&mut self, turn: &WaitTurn, scene: WaitScene<'_>, mut stirs: impl FnMut() -> bool) -> bool {
        if self.nonblocking {
            return false;
        }
        let core = publish_core(scene.core);
        // Before the peer has attached there is no memory to see it in: the link will tell.
        let futile =
            scene.peer_core.is_none_or(|peer| !scene.elsewhere && core != 0 && peer.load(Ordering::Relaxed) == core);
        let hopeless = || scene.watch.has_hung_up() || turn.deadline.is_some_and(|deadline| Instant::now() >= deadline);
        !futile && self.spin.spin(|| Ok::<_, Infallible>(stirs()), hopeless) == Ok(true)
    }

    /// Sleeps until the link says something or a nap is over. A half that must not block looks at the link instead.
    fn sleep(&mut self, turn: &mut WaitTurn, scene: WaitScene<'_>) -> Result<LinkEvent> {
        if self.nonblocking {
            turn.taken += 1;
            if turn.taken > MOST_EVENTS {
                return Err(Error::WouldBlock);
            }
            let event = self.link.try_next().map_err(|e| Error::system("look at the link", e))?;
            return event.ok_or(Error::WouldBlock);
        }
        let asleep = Instant::now();
        // Looked at here too: with rings always waiting, the link would never say that time is up.
        if turn.deadline.is_some_and(|deadline| asleep >= deadline) {
            return Err(Error::TimedOut);
        }
        add(&scene.counters.sleeps, 1);
        let nap = scene.nap.map(|nap| asleep + nap);
        let until = turn.deadline.into_iter().chain(nap).min();
        let event = self.link.wait(until).map_err(|e| Error::system("wait on the link", e))?;
        self.spin.slept(asleep.elapsed());
        let is_late = || turn.deadline.is_some_and(|deadline| Instant::now() >= deadline);
        if matches!(event, LinkEvent::TimedOut) && is_late() { Err(Error::TimedOut) } else { Ok(event) }
    }

    /// Before a reader's look: pauses where that has been found to pay, since more is there then.
    #[inline]
    pub(crate) fn pause(&self) {
        if !self.nonblocking {
            self.spin.pause();
        }
    }

    /// A reader's look has found this many bytes to read, of a ring of that size, without a wait.
    #[inline]
    pub(crate) fn found_at_once(&mut self, bytes: u64, ring: u64) {
        if !self.nonblocking {
            self.spin.found_at_once(bytes, ring);
        }
    }

    /// A reader's wait has ended with this many bytes to read, of a ring of that size.
    #[inline]
    pub(crate) fn found(&mut self, turn: &WaitTurn, bytes: u64, ring: u64) {
        // Bytes that arrive between two looks were not waited for.
        if turn.stalled { self.spin.found(bytes, ring) } else { self.spin.found_at_once(bytes, ring) }
    }

    /// Hangs up the link while its descriptor stays valid.
    pub(crate) fn hang_up(&self) {
        self.link.hang_up();
    }
}
