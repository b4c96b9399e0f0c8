//! The near end of one link: the socket whose other end a process has.

use super::DirectionWatch;
use super::core::MemoryDelivery;
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
    /// On the host, where the guest cannot ring the other end itself: what to signal for it.
    pub(super) event: Option<OwnedFd>,
}

impl LocalLink {
    pub(super) fn new(socket: OwnedFd, watch: Option<DirectionWatch>) -> Self {
        let link = Arc::new(Link::Socket(socket));
        Self { link, judged_as: None, waits_for_judge: false, watch, event: None }
    }

    /// Rings the process.
    pub(super) fn ring(&self) {
        match &self.event {
            Some(event) => drop(rustix::io::write(event, &1u64.to_ne_bytes())),
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
