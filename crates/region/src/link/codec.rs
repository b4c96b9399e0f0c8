//! The packets of a link (protocol L2, I3, I4).

use crate::event::Event;
use crate::packet::Received;
use partywall_shm::corrupt::Corrupt;
use partywall_shm::layout::Geometry;
use rustix::fd::OwnedFd;
use std::ops::{Deref, DerefMut};

pub(super) const BELL: [u8; 1] = [0x42];
pub(super) const DROPPED: [u8; 1] = [0x44];
pub(super) const RING_AT: [u8; 1] = [0x52];
pub(super) const LISTEN: [u8; 1] = [0x4c];
pub(super) const ATTACH_LEN: usize = 32;
pub(super) const ATTACH_AT_LEN: usize = 40;

/// Room for a packet: one byte longer than the longest, so that a longer one shows.
pub(super) struct Buffer([u8; ATTACH_AT_LEN + 1]);

impl Default for Buffer {
    fn default() -> Self {
        Self([0; ATTACH_AT_LEN + 1])
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

/// What has come on a link.
#[derive(Debug)]
pub(crate) enum Packet {
    /// What any half may be told.
    Event(Event),
    /// To ring, this event is to be signalled.
    RingAt(OwnedFd),
    /// Rings may also come by this event.
    Listen(OwnedFd),
}

impl Packet {
    /// For a half whose peer is on this machine, and has no business with the other two.
    pub(super) fn expected(self) -> Event {
        match self {
            Self::Event(event) => event,
            Self::RingAt(_) | Self::Listen(_) => Event::Corrupt(Corrupt::BadPacket),
        }
    }
}

impl From<Event> for Packet {
    fn from(event: Event) -> Self {
        Self::Event(event)
    }
}

/// The long form, of which the short form is the beginning except for its kind.
pub(super) fn encode_attach(base: u64, start: u64, generation: u32, geometry: Geometry) -> [u8; ATTACH_AT_LEN] {
    let kind = if base == 0 { 1u32 } else { 2 };
    let mut packet = [0; ATTACH_AT_LEN];
    packet[0..4].copy_from_slice(&kind.to_le_bytes());
    packet[4..8].copy_from_slice(&generation.to_le_bytes());
    packet[8..16].copy_from_slice(&geometry.ring_offset().to_le_bytes());
    packet[16..24].copy_from_slice(&geometry.ring_size().to_le_bytes());
    packet[24..32].copy_from_slice(&start.to_le_bytes());
    packet[32..40].copy_from_slice(&base.to_le_bytes());
    packet
}

/// Protocol L2.
pub(super) fn decode(buf: &Buffer, mut received: Received) -> Packet {
    let data = &buf[..received.len];
    if received.truncated {
        return Event::Corrupt(Corrupt::BadPacket).into();
    }
    if received.fds.is_empty() {
        return match data {
            [] => Event::HungUp.into(),
            data if data == BELL => Event::Bell.into(),
            data if data == DROPPED => Event::Dropped.into(),
            _ => Event::Corrupt(Corrupt::BadPacket).into(),
        };
    }
    let (Some(fd), true) = (received.fds.pop(), received.fds.is_empty()) else {
        return Event::Corrupt(Corrupt::BadPacket).into();
    };
    if data == RING_AT {
        return Packet::RingAt(fd);
    }
    if data == LISTEN {
        return Packet::Listen(fd);
    }
    let word = |at: usize| data.get(at..at + 4).and_then(|b| b.try_into().ok()).map(u32::from_le_bytes);
    let long = |at: usize| data.get(at..at + 8).and_then(|b| b.try_into().ok()).map(u64::from_le_bytes);
    let base = match (word(0), data.len()) {
        (Some(1), ATTACH_LEN) => Some(0),
        (Some(2), ATTACH_AT_LEN) => long(32).filter(|base| *base != 0),
        _ => None,
    };
    if let (Some(base), Some(generation)) = (base, word(4))
        && let (Some(offset), Some(size), Some(start)) = (long(8), long(16), long(24))
        && let Ok(geometry) = Geometry::new(offset, size)
    {
        return Event::Attach { generation, geometry, start, base, memory: fd }.into();
    }
    Event::Corrupt(Corrupt::BadPacket).into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use partywall_shm::layout::PAGE;

    #[test]
    fn attach_packets_are_as_documented() {
        let geometry = Geometry::new(PAGE, 8192).unwrap();
        let fields =
            [&[3, 0, 0, 0][..], &[0, 16, 0, 0, 0, 0, 0, 0], &[0, 32, 0, 0, 0, 0, 0, 0], &[5, 0, 0, 0, 0, 0, 0, 1]]
                .concat();
        let start = 5 | 1 << 56;
        assert_eq!(encode_attach(0, start, 3, geometry)[..ATTACH_LEN], [&[1, 0, 0, 0], &fields[..]].concat());
        let base = [0, 0, 0x30, 0, 0, 0, 0, 0];
        let long = [&[2, 0, 0, 0], &fields[..], &base].concat();
        assert_eq!(encode_attach(0x30_0000, start, 3, geometry)[..], long);
    }
}
