//! The near end of one link: the socket whose other end a process has.

use super::DirectionWatch;
use super::core::{LinkUse, MemoryDelivery};
use super::doorbells;
use super::judge;
use super::memory::WindowMemory;
use crate::link::Packet;
use crate::{Link, LinkEvent};
use rustix::fd::{AsFd as _, OwnedFd};
use std::io;
use std::sync::Arc;

/// The relay loop's part of one link: its descriptors. The protocol state is in the state machine.
#[derive(Debug)]
pub(super) struct LocalLink {
    /// Shared with a thread that takes a packet out of it.
    pub(super) link: Arc<Link>,
    /// It rests: a packet with descriptors is being judged, under this number.
    pub(super) judged_as: Option<u64>,
    /// It rests until one of those that judge is free.
    pub(super) waits_for_judge: bool,
    pub(super) watch: Option<DirectionWatch>,
    pub(super) carries: LinkUse,
    /// On the host, where the guest cannot ring the other end itself: what to signal for it.
    pub(super) event: Option<OwnedFd>,
    /// On the host: what rings the guest by an interrupt when this link's process rings.
    pub(super) vector: Option<OwnedFd>,
    /// In a guest: what the process of a bell signals instead of ringing by the link.
    pub(super) ringing: Option<RingingEvent>,
}

/// An event by which a process rings (protocol I7).
#[derive(Debug)]
pub(super) struct RingingEvent {
    pub(super) event: OwnedFd,
    /// The kernel rings by the device whenever it is signalled. Until then the relay takes the signals.
    pub(super) is_bound: bool,
}

impl LocalLink {
    pub(super) fn new(socket: OwnedFd, watch: Option<DirectionWatch>, carries: LinkUse) -> Self {
        let link = Arc::new(Link::Socket(socket));
        let (event, vector, ringing) = (None, None, None);
        Self { link, judged_as: None, waits_for_judge: false, watch, carries, event, vector, ringing }
    }

    /// The doorbell device is another, or none. What the old one rang is rung by the port.
    pub(super) fn forget_device(&mut self) {
        (self.event, self.vector) = (None, None);
        if let Some(ringing) = &mut self.ringing {
            ringing.is_bound = false;
        }
    }

    /// The event by which the process rings, if the relay is to take its signals.
    pub(super) fn unbound(&self) -> Option<&OwnedFd> {
        self.ringing.as_ref().filter(|ringing| !ringing.is_bound).map(|ringing| &ringing.event)
    }

    /// Rings the process.
    pub(super) fn ring(&self) {
        match &self.event {
            Some(event) => doorbells::signal(event),
            None => self.link.ring(),
        }
    }

    /// Sends memory to the process; `false` if there is no room for it yet.
    pub(super) fn deliver(&self, d: &MemoryDelivery<Arc<WindowMemory>>) -> bool {
        let sent = self.link.attach_at(d.base, d.start, d.generation, d.geometry, d.memory.as_fd());
        // Any other error: the process has gone, which the hang-up reports.
        !sent.is_err_and(|e| e.kind() == io::ErrorKind::WouldBlock)
    }

    /// Hangs up. No descriptor that the process has left in the link is closed by this thread.
    pub(super) fn close(self) {
        judge::close(self.link);
    }

    /// Whether nothing is taken from it now.
    pub(super) fn rests(&self) -> bool {
        self.judged_as.is_some() || self.waits_for_judge
    }

    /// The next packet of the process, if it brings no descriptors.
    pub(super) fn next(&self) -> Option<Packet> {
        // An error of our own socket is as good as its end.
        self.link.try_packet().unwrap_or(Some(LinkEvent::HungUp.into()))
    }
}
