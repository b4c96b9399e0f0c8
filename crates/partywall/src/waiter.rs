//! How a half waits: spin, say what for, look again, sleep (protocol W).

use crate::keeper::Watch;
use crate::{Error, Result};
use partywall_region::wait::{Spin, publish_core};
use partywall_region::{Event, Link, membarrier};
use partywall_shm::counters::{Counters, add};
use partywall_shm::sync::ReadOnly;
use partywall_shm::wake::{AWAKE, Fencing};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The waiting side of one half.
#[derive(Debug)]
pub(crate) struct Waiter {
    pub(crate) link: Link,
    pub(crate) nonblocking: bool,
    pub(crate) timeout: Option<Duration>,
    spin: Spin,
    /// What our wish word says. While it stands and has been re-checked, it need not be said again.
    wish: u64,
}

/// One wait, from its first look to its end.
#[derive(Debug)]
pub(crate) struct Turn {
    pub(crate) deadline: Option<Instant>,
    spun: bool,
    /// Events taken by a call that must not block.
    taken: u32,
}

/// Events that a non-blocking call takes before it leaves the rest for the next: a peer that rings without end must not
/// keep the caller from returning.
const MOST_EVENTS: u32 = 64;

/// The words of shared memory that a wait needs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Words<'a> {
    pub(crate) wanted: &'a AtomicU64,
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
    pub(crate) watch: &'a Watch,
}

/// How a step of waiting ended.
#[derive(Debug)]
pub(crate) enum Step {
    /// What was waited for is there.
    Ready,
    /// Something arrived on the link: handle it and look again.
    Event(Event),
}

impl Waiter {
    pub(crate) fn new(link: Link, spin: Duration) -> Self {
        Self { link, nonblocking: false, timeout: None, spin: Spin::new(spin), wish: AWAKE }
    }

    /// A wait begins.
    pub(crate) fn begin(&self) -> Turn {
        // What is too long to be a time is for ever.
        let deadline = self.timeout.and_then(|t| Instant::now().checked_add(t));
        Turn { deadline, spun: false, taken: 0 }
    }

    /// One step: spins (once per wait), arms for `wish`, re-checks, and sleeps until the link says something.
    ///
    /// [`Error::WouldBlock`] on a non-blocking half leaves it armed: its descriptor becomes readable.
    pub(crate) fn step(
        &mut self,
        turn: &mut Turn,
        words: Words<'_>,
        wish: u64,
        mut ready: impl FnMut() -> Result<bool>,
    ) -> Result<Step> {
        if !turn.spun && !self.nonblocking {
            turn.spun = true;
            let core = publish_core(words.core);
            // Before the peer has attached there is no memory to see it in: the link will tell.
            let futile = words
                .peer_core
                .is_none_or(|peer| !words.elsewhere && core != 0 && peer.load(Ordering::Relaxed) == core);
            let hopeless =
                || words.watch.has_hung_up() || turn.deadline.is_some_and(|deadline| Instant::now() >= deadline);
            if !futile && self.spin.spin(&mut ready, hopeless)? {
                add(&words.counters.spins, 1);
                return Ok(Step::Ready);
            }
        }
        if self.wish != wish {
            self.wish = wish;
            words.wanted.store(wish, Ordering::Relaxed);
            membarrier::heavy(words.fencing);
            if ready()? {
                self.disarm(words.wanted);
                return Ok(Step::Ready);
            }
        }
        if self.nonblocking {
            turn.taken += 1;
            if turn.taken > MOST_EVENTS {
                return Err(Error::WouldBlock);
            }
            let event = self.link.try_next().map_err(|e| Error::system("look at the link", e))?;
            return event.map(Step::Event).ok_or(Error::WouldBlock);
        }
        let asleep = Instant::now();
        // Looked at here too: with rings always waiting, the link would never say that time is up.
        if turn.deadline.is_some_and(|deadline| asleep >= deadline) {
            self.disarm(words.wanted);
            return Err(Error::TimedOut);
        }
        add(&words.counters.sleeps, 1);
        let nap = words.nap.map(|nap| asleep + nap);
        let until = turn.deadline.into_iter().chain(nap).min();
        let event = self.link.wait(until).map_err(|e| Error::system("wait on the link", e))?;
        self.spin.slept(asleep.elapsed());
        match event {
            Event::TimedOut if turn.deadline.is_none_or(|deadline| Instant::now() < deadline) => Ok(Step::Ready),
            Event::TimedOut => {
                self.disarm(words.wanted);
                Err(Error::TimedOut)
            }
            event => Ok(Step::Event(event)),
        }
    }

    /// Before a reader's look: pauses where that has been found to pay, since more is there then.
    #[inline]
    pub(crate) fn pause(&self) {
        if !self.nonblocking {
            self.spin.pause();
        }
    }

    /// A reader's look has found so many bytes to read, of a ring of that size, without a wait.
    #[inline]
    pub(crate) fn found_at_once(&mut self, bytes: u64, ring: u64) {
        if !self.nonblocking {
            self.spin.found_at_once(bytes, ring);
        }
    }

    /// A reader's wait has ended with so many bytes to read, of a ring of that size.
    #[inline]
    pub(crate) fn found(&mut self, bytes: u64, ring: u64) {
        self.spin.found(bytes, ring);
    }

    /// Hangs up the link while its descriptor stays valid.
    pub(crate) fn hang_up(&self) {
        self.link.hang_up();
    }

    /// Awake again: the peer need not ring.
    #[inline]
    pub(crate) fn disarm(&mut self, wanted: &AtomicU64) {
        if self.wish != AWAKE {
            self.wish = AWAKE;
            wanted.store(AWAKE, Ordering::Relaxed);
        }
    }
}
