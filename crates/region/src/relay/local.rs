//! The near end of one link: the socket whose other end a process has.

use super::Watch;
use crate::link::Packet;
use crate::{Event, Link};
use partywall_shm::layout::Geometry;
use rustix::fd::{BorrowedFd, OwnedFd};
use std::collections::VecDeque;
use std::io;

/// Memory that could not be delivered yet (protocol P4). An honest producer is never further ahead than this (protocol A4).
const PENDING: usize = 8;

/// Memory in transit to a process.
#[derive(Debug)]
pub(super) struct Delivery {
    pub(super) base: u64,
    pub(super) start: u64,
    pub(super) generation: u32,
    pub(super) geometry: Geometry,
    pub(super) memory: OwnedFd,
}

/// One link.
#[derive(Debug)]
pub(super) struct Local {
    pub(super) link: Link,
    pub(super) watch: Option<Watch>,
    pending: VecDeque<Delivery>,
    /// The far end has hung up; so will this one, when everything is delivered.
    ending: bool,
    pub(super) shortcut: Shortcut,
}

/// How rings of a link go past the port (protocol I).
#[derive(Debug, Default)]
pub(super) struct Shortcut {
    /// In the guest: what its process is rung by. On the host: the guest has said what.
    pub(super) vector: Option<u32>,
    /// In the guest: as whom its device rings the other end. On the host: as whom the guest has been told to.
    pub(super) peer: Option<u32>,
    /// In the guest: how often it has done so.
    pub(super) rings: u64,
    /// On the host, where the guest cannot ring the other end itself: what to signal for it.
    pub(super) event: Option<OwnedFd>,
}

impl Local {
    pub(super) fn new(socket: OwnedFd, watch: Option<Watch>) -> Self {
        Self {
            link: Link::Socket(socket),
            watch,
            pending: VecDeque::new(),
            ending: false,
            shortcut: Shortcut::default(),
        }
    }

    /// Queues memory; `false` if there is more than an honest producer sends.
    pub(super) fn deliver(&mut self, delivery: Delivery) -> bool {
        self.pending.push_back(delivery);
        self.flush();
        self.pending.len() <= PENDING
    }

    /// Delivers what there is room for.
    pub(super) fn flush(&mut self) {
        while let Some(d) = self.pending.front() {
            let memory: BorrowedFd<'_> = rustix::fd::AsFd::as_fd(&d.memory);
            match self.link.attach_at(d.base, d.start, d.generation, d.geometry, memory) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return,
                // Delivered; or nobody is there any more, which the hang-up tells.
                _ => drop(self.pending.pop_front()),
            }
        }
    }

    pub(super) fn is_waiting_for_room(&self) -> bool {
        !self.pending.is_empty()
    }

    /// The far end says nothing more.
    pub(super) fn end(&mut self) {
        self.ending = true;
    }

    /// Everything that the far end said has been delivered, its hang-up included if this is dropped now.
    pub(super) fn is_over(&self) -> bool {
        self.ending && self.pending.is_empty()
    }

    /// What the process says next.
    pub(super) fn next(&self) -> Option<Packet> {
        // An error of our own socket is as good as its end.
        self.link.try_packet().unwrap_or(Some(Event::HungUp.into()))
    }
}
