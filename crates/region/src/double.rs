//! The in-process double: links within one process whose doorbells can be made to fail, for tests of the layers above.
//!
//! A real link never loses a ring, so code that depends on more rings than the protocol promises, or on fewer, would go unnoticed. The
//! double can swallow rings that the protocol says may be merged, and add spurious ones (W5).

use crate::event::LinkEvent;
use crate::region::{OwnRegion, PeerRegion};
use partywall_shm::layout::Geometry;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// How a double's doorbell misbehaves, within what the protocol allows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Faults {
    /// Every ring arrives twice.
    pub spurious: bool,
    /// A ring is merged with one that is still waiting.
    pub merge: bool,
}

#[derive(Debug, Default)]
struct EventQueue {
    events: VecDeque<LinkEvent>,
    hung_up: bool,
}

#[derive(Debug)]
struct DoubleShared {
    queues: [Mutex<EventQueue>; 2],
    changed: [Condvar; 2],
    /// Readable while a queue has something, for those who poll.
    readable: [OwnedFd; 2],
}

/// One end of an in-process link.
#[derive(Debug)]
pub struct DoubleLink {
    shared: Arc<DoubleShared>,
    side: usize,
    faults: Faults,
}

/// A connected pair of links in this process.
pub fn link_pair(faults: Faults) -> io::Result<(DoubleLink, DoubleLink)> {
    let readable = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
    let shared = Arc::new(DoubleShared {
        queues: Default::default(),
        changed: Default::default(),
        readable: [readable()?, readable()?],
    });
    Ok((DoubleLink { shared: Arc::clone(&shared), side: 0, faults }, DoubleLink { shared, side: 1, faults }))
}

/// The view that a peer in the same process has of a region.
pub fn peer_of(region: &OwnRegion) -> PeerRegion {
    region.peek_at_self()
}

impl DoubleLink {
    fn queue(&self, side: usize) -> MutexGuard<'_, EventQueue> {
        // A panicking test thread leaves a queue that is still consistent.
        self.shared.queues[side].lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, event: LinkEvent) {
        let other = 1 - self.side;
        self.queue(other).events.push_back(event);
        self.tell(other);
    }

    fn tell(&self, side: usize) {
        self.shared.changed[side].notify_all();
        // It fails only when the count is full, and then it is readable.
        let _ = rustix::io::write(&self.shared.readable[side], &1u64.to_ne_bytes());
    }

    fn pop(&self, queue: &mut EventQueue) -> Option<LinkEvent> {
        let event = queue.events.pop_front();
        if queue.events.is_empty() && !queue.hung_up {
            let _ = rustix::io::read(&self.shared.readable[self.side], &mut [0; 8]);
        }
        event.or(queue.hung_up.then_some(LinkEvent::HungUp))
    }

    pub(crate) fn ring(&self) {
        let waiting = self.queue(1 - self.side).events.iter().any(|e| matches!(e, LinkEvent::Bell));
        if self.faults.merge && waiting {
            return;
        }
        self.push(LinkEvent::Bell);
        if self.faults.spurious {
            self.push(LinkEvent::Bell);
        }
    }

    pub(crate) fn say_dropped(&self) {
        self.push(LinkEvent::Dropped);
    }

    pub(crate) fn attach(
        &self,
        base: u64,
        start: u64,
        generation: u32,
        geometry: Geometry,
        memory: BorrowedFd<'_>,
    ) -> io::Result<()> {
        let memory: OwnedFd = memory.try_clone_to_owned()?;
        self.push(LinkEvent::Attach { generation, geometry, start, base, memory });
        Ok(())
    }

    pub(crate) fn try_next(&self) -> Option<LinkEvent> {
        let mut queue = self.queue(self.side);
        self.pop(&mut queue)
    }

    pub(crate) fn is_hung_up(&self) -> bool {
        self.queue(self.side).hung_up
    }

    pub(crate) fn hang_up(&self) {
        let other = 1 - self.side;
        self.queue(other).hung_up = true;
        self.tell(other);
    }

    pub(crate) fn wait(&self, deadline: Option<Instant>) -> LinkEvent {
        let changed = &self.shared.changed[self.side];
        let mut queue = self.queue(self.side);
        loop {
            if let Some(event) = self.pop(&mut queue) {
                return event;
            }
            queue = match deadline {
                None => changed.wait(queue).unwrap_or_else(PoisonError::into_inner),
                Some(deadline) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return LinkEvent::TimedOut;
                    }
                    changed.wait_timeout(queue, left).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }
}

impl AsFd for DoubleLink {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.readable[self.side].as_fd()
    }
}

impl Drop for DoubleLink {
    fn drop(&mut self) {
        self.hang_up();
    }
}
