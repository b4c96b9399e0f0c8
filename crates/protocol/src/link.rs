//! The packets of a link (protocol L2, I3, I4). Descriptors travel beside them.
//!
//! ```text
//!   | signal u8 |                                                        one byte
//!   | 1 u32 | generation u32 | ring_offset u64 | ring_size u64 | start u64 |             32 bytes
//!   | 2 u32 | generation u32 | ring_offset u64 | ring_size u64 | start u64 | base u64 |  40 bytes
//! ```

use crate::wire::codec::{PacketReader, PacketWriter, Put, Take};
use crate::wire::table::frames;
use core::num::NonZeroU64;
use partywall_shm::layout::Geometry;
use partywall_shm::numbered;

numbered! {
    /// A packet of one byte.
    LinkSignal: u8 {
        /// Look again.
        Bell = 0x42 "ring",
        /// The publisher drops this subscriber (protocol B2).
        Dropped = 0x44 "dropped",
        /// Brings an event that rings the sender (protocol I4).
        RingAt = 0x52 "ring at",
        /// Brings an event by which rings may come too (protocol I3).
        Listen = 0x4c "listen",
        /// A machine at one end of the channel is being migrated (protocol G7.8).
        Moved = 0x4d "moved",
    }
}

impl LinkSignal {
    /// The packet that carries the signal.
    pub const fn packet(self) -> [u8; 1] {
        [self.number()]
    }
}

frames! {
    /// A packet that brings memory.
    LinkMemory: u32 {
        /// A region in memory that has nothing else in it.
        1 Attach {
            /// The generation of the sender's ring.
            generation: u32,
            /// The place and size of the ring in the region.
            geometry: Geometry,
            /// The byte of the stream that the receiver begins at.
            start: u64,
        }
        /// A region in a window (protocol V4).
        2 AttachAt {
            /// The generation of the sender's ring.
            generation: u32,
            /// The place and size of the ring in the region.
            geometry: Geometry,
            /// The byte of the stream that the receiver begins at.
            start: u64,
            /// The byte of the window at which the region begins.
            base: NonZeroU64,
        }
    }
}

impl LinkMemory {
    /// Bytes of the longest packet.
    pub const MAX: usize = 40;

    /// A region that begins at byte `base` of a window, or, if that is 0, of separate memory.
    pub fn new(base: u64, start: u64, generation: u32, geometry: Geometry) -> Self {
        match NonZeroU64::new(base) {
            None => Self::Attach { generation, geometry, start },
            Some(base) => Self::AttachAt { generation, geometry, start, base },
        }
    }

    /// Writes its packet to `memory`, without allocating.
    pub fn encode<'a>(&self, memory: &'a mut [u8; Self::MAX]) -> &'a [u8] {
        let mut writer = PacketWriter::new(memory);
        self.kind().put(&mut writer);
        self.put(&mut writer);
        let len = writer.len();
        &memory[..len]
    }

    /// Reads a packet; `None` if it is not one.
    pub fn decode(packet: &[u8]) -> Option<Self> {
        let mut reader = PacketReader::new(packet);
        let kind = u32::take(&mut reader).ok()?;
        Self::take_fields(kind, &mut reader).ok().filter(|_| reader.remaining() == 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec::Vec;
    use partywall_shm::layout::PAGE;

    const START: u64 = 5 | 1 << 56;

    /// The fields of both packets, up to `start`.
    fn fields() -> Vec<u8> {
        let fields: [&[u8]; 4] =
            [&[3, 0, 0, 0], &[0, 16, 0, 0, 0, 0, 0, 0], &[0, 32, 0, 0, 0, 0, 0, 0], &[5, 0, 0, 0, 0, 0, 0, 1]];
        fields.concat()
    }

    #[test]
    fn attach_packets_are_as_documented() {
        let geometry = Geometry::new(PAGE, 8192).unwrap();
        let short = [&[1, 0, 0, 0], &fields()[..]].concat();
        let long = [&[2, 0, 0, 0], &fields()[..], &[0, 0, 0x30, 0, 0, 0, 0, 0]].concat();
        for (base, bytes) in [(0, short), (0x30_0000, long)] {
            let said = LinkMemory::new(base, START, 3, geometry);
            assert_eq!(said.encode(&mut [0xee; LinkMemory::MAX]), bytes);
            assert_eq!(LinkMemory::decode(&bytes), Some(said));
            for end in 0..bytes.len() {
                assert_eq!(LinkMemory::decode(&bytes[..end]), None, "cut at {end}");
            }
            assert_eq!(LinkMemory::decode(&[&bytes[..], &[0]].concat()), None);
            // No such ring, and no such kind.
            for wrong in [4 + 4, 4 + 12, 1] {
                let mut bytes = bytes.clone();
                bytes[wrong] = 1;
                assert_eq!(LinkMemory::decode(&bytes), None, "{wrong}");
            }
        }
        let zero = [&[2, 0, 0, 0], &fields()[..], &[0; 8]].concat();
        assert_eq!(LinkMemory::decode(&zero), None, "a window does not begin with a region");
    }

    #[test]
    fn signals_are_as_documented() {
        let packets: Vec<[u8; 1]> = LinkSignal::ALL.iter().map(|signal| signal.packet()).collect();
        assert_eq!(packets, [*b"B", *b"D", *b"R", *b"L", *b"M"]);
    }
}
