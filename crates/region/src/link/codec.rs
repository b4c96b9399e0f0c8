//! The decoder of a link's packets and their descriptors (protocol L2, I3, I4).

use crate::event::LinkEvent;
use crate::packet::ReceivedPacket;
use partywall_protocol::link::{LinkMemory, LinkSignal};
use partywall_shm::corrupt::Corrupt;
use rustix::fd::OwnedFd;
use std::ops::{Deref, DerefMut};

pub(super) const BELL: [u8; 1] = LinkSignal::Bell.packet();
pub(super) const DROPPED: [u8; 1] = LinkSignal::Dropped.packet();
pub(super) const RING_AT: [u8; 1] = LinkSignal::RingAt.packet();
pub(super) const LISTEN: [u8; 1] = LinkSignal::Listen.packet();
pub(super) const MOVED: [u8; 1] = LinkSignal::Moved.packet();

/// Room for a packet: one byte longer than the longest, so that a longer one shows.
pub(super) struct PacketBuffer([u8; LinkMemory::MAX + 1]);

impl Default for PacketBuffer {
    fn default() -> Self {
        Self([0; LinkMemory::MAX + 1])
    }
}

impl Deref for PacketBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl DerefMut for PacketBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

/// A packet of a link.
#[derive(Debug)]
pub(crate) enum Packet {
    /// An event for the half at this end.
    Event(LinkEvent),
    /// To ring, this event is to be signalled.
    RingAt(OwnedFd),
    /// Rings may also come by this event.
    Listen(OwnedFd),
    /// The hang-up that follows is that of a machine which is being migrated.
    Moved,
}

impl Packet {
    /// For a half whose peer is on this machine. Only relays send the other packets.
    pub(super) fn expected(self) -> LinkEvent {
        match self {
            Self::Event(event) => event,
            Self::RingAt(_) | Self::Listen(_) | Self::Moved => LinkEvent::Corrupt(Corrupt::BadPacket),
        }
    }
}

impl From<LinkEvent> for Packet {
    fn from(event: LinkEvent) -> Self {
        Self::Event(event)
    }
}

/// Decodes a packet (protocol L2).
pub(super) fn decode(buf: &PacketBuffer, mut received: ReceivedPacket) -> Packet {
    let corrupt = || LinkEvent::Corrupt(Corrupt::BadPacket).into();
    if received.truncated {
        return corrupt();
    }
    let data = &buf[..received.len];
    let signal = data.first_chunk().filter(|_| data.len() == 1).and_then(|[byte]| LinkSignal::from_number(*byte));
    match (signal, received.fds.pop(), received.fds.is_empty()) {
        (None, None, _) if data.is_empty() => LinkEvent::HungUp.into(),
        (Some(LinkSignal::Bell), None, _) => LinkEvent::Bell.into(),
        (Some(LinkSignal::Dropped), None, _) => LinkEvent::Dropped.into(),
        (Some(LinkSignal::Moved), None, _) => Packet::Moved,
        (Some(LinkSignal::RingAt), Some(event), true) => Packet::RingAt(event),
        (Some(LinkSignal::Listen), Some(event), true) => Packet::Listen(event),
        (None, Some(memory), true) => match LinkMemory::decode(data) {
            Some(LinkMemory::Attach { generation, geometry, start }) => {
                LinkEvent::Attach { generation, geometry, start, base: 0, memory }.into()
            }
            Some(LinkMemory::AttachAt { generation, geometry, start, base }) => {
                LinkEvent::Attach { generation, geometry, start, base: base.get(), memory }.into()
            }
            None => corrupt(),
        },
        _ => corrupt(),
    }
}
