//! Packets with descriptors, which are taken, judged and closed by threads that may hang.
//!
//! A process delivers memory as a descriptor of a window, and may send any other descriptor. Asking the kernel about a file of a FUSE
//! server, or closing a lingering TCP socket, takes as long as its maker likes. So the relay's own thread examines a packet before it
//! receives it, and neither receives nor closes an untrusted descriptor. A thread of this module does that while the link rests; other
//! links do not wait.
//!
//! ```text
//!   relay's thread                        a judge, for one packet
//!   peeks: no descriptor --> takes it
//!          descriptors  ----------------> receives, asks what it is, closes the unneeded ones
//!          the link rests                        |
//!          goes on with the link <---------------'  what the packet says
//! ```

use super::core::MemoryDelivery;
use super::doorbells::VectorEvent;
use super::memory::{FileNumbers, numbers_of};
use crate::closing::{self, begin};
use crate::link::Packet;
use crate::{Link, LinkEvent, packet};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::RecvFlags;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

/// The content of a packet with descriptors.
#[derive(Debug)]
pub(super) enum JudgedPacket {
    /// Memory, of a file with these numbers.
    Memory(MemoryDelivery<FileNumbers>),
    /// An event that this process has made.
    RingAt(OwnedFd),
    /// An event that it has not made, which means nothing.
    Nothing,
    /// The end of the link, or nonsense.
    End,
}

/// Judged packets in transit to the relay.
#[derive(Debug)]
pub(super) struct Judges {
    results: Sender<(u64, JudgedPacket)>,
    judged: Receiver<(u64, JudgedPacket)>,
    wake: Arc<OwnedFd>,
}

impl Judges {
    /// `wake` is signalled when a packet has been judged.
    pub(super) fn new(wake: Arc<OwnedFd>) -> Self {
        let (results, judged) = channel();
        Self { results, judged, wake }
    }

    /// Has the next packet of a link judged, under this number. `false` if too many are at work.
    pub(super) fn judge(&self, number: u64, link: &Arc<Link>) -> bool {
        let (link, results, wake) = (Arc::clone(link), self.results.clone(), Arc::clone(&self.wake));
        begin("partywall-judge", move || {
            // It fails only if the relay has ended.
            let _ = results.send((number, judge(&link)));
            let _ = rustix::io::write(&wake, &1u64.to_ne_bytes());
            close_last(link);
        })
    }

    /// The next packet that has been judged, and its number.
    pub(super) fn next(&self) -> Option<(u64, JudgedPacket)> {
        self.judged.try_recv().ok()
    }
}

fn judge(link: &Link) -> JudgedPacket {
    match link.try_packet() {
        Ok(Some(Packet::Event(LinkEvent::Attach { generation, geometry, start, base, memory }))) => {
            match numbers_of(&memory) {
                Some(memory) => JudgedPacket::Memory(MemoryDelivery { base, start, generation, geometry, memory }),
                None => JudgedPacket::End,
            }
        }
        Ok(Some(Packet::RingAt(event))) if VectorEvent::is_one(&event) => JudgedPacket::RingAt(event),
        Ok(Some(Packet::RingAt(_)) | None) => JudgedPacket::Nothing,
        Ok(Some(_)) | Err(_) => JudgedPacket::End,
    }
}

/// Whether the next packet has descriptors. They are not taken.
pub(super) fn has_descriptors(link: &Link) -> bool {
    let Link::Socket(socket) = link else { return false };
    loop {
        match packet::has_descriptors(socket, RecvFlags::DONTWAIT) {
            Ok(has) => return has,
            // A reset is reported once, before what the peer had sent.
            Err(Errno::INTR | Errno::CONNRESET) => {}
            Err(_) => return false,
        }
    }
}

/// Closes the relay's end of a link, in which there may be descriptors that would be closed with it.
pub(super) fn close(link: Arc<Link>) {
    // The process sees this at once, even if a judge has the socket. From here on nothing is added to it.
    link.hang_up();
    close_last(link);
}

/// Closes the socket if this is its last user. Otherwise the other user closes it: the relay, or a judge after the relay has hung up.
fn close_last(link: Arc<Link>) {
    if let Some(Link::Socket(socket)) = Arc::into_inner(link) {
        closing::close(socket);
    }
}
