//! The frames between a host and a guest on a serial port (protocol P2, P3): rings, memory and hang-ups of many links, and
//! control messages, in one stream of bytes.
//!
//! ```text
//!   | len u16 | kind u8 | 0 u8 | link u32 | len bytes |
//! ```
//!
//! A guest can be reset in the middle of a frame, and a broker can be restarted. So each side begins with a greeting,
//! 32 bytes that no honest frame contains, a version and a number, and discards everything before the other side's greeting. The guest
//! chooses the number and the host's answer repeats it; a host that greets first, because it has just started, sends 0.

use crate::window::WindowId;
use crate::wire::codec::{PacketReader, append};
use crate::wire::table::frames;
use alloc::vec::Vec;
use partywall_shm::layout::Geometry;

/// The longest payload: a control message (protocol C1) and what comes with it.
pub const MAX_PAYLOAD: usize = 4096 + 256;
/// Bytes before the payload: length, kind, a zero, and the link.
const HEADER: usize = 8;
/// Bytes of a frame before its fields, the first of which is the link.
const BEFORE_FIELDS: usize = 4;
/// The version of the frames and of the messages in them (protocol P3.6). It changes whenever [`crate::wire::VERSION`] does.
pub const VERSION: u32 = 4;
/// Bytes of a greeting.
const GREETING: usize = BEFORE_NUMBER + 8;
/// Bytes of a greeting before its number.
const BEFORE_NUMBER: usize = SIGN + 4;
/// The first bytes of a greeting, which are always the same.
const SIGN: usize = 32;

frames! {
    /// One thing said: on the wire `len u16`, the kind, a zero, and then these fields, of which `len` counts those after the first four
    /// bytes.
    Frame: u8 {
        /// Ring this link (protocol L2).
        1 Bell {
            /// The number of the link on this port.
            link: u32,
        }
        /// Its publisher lets a subscriber go (protocol B2).
        2 Dropped {
            /// The number of the link on this port.
            link: u32,
        }
        /// Its other end has hung up.
        3 HungUp {
            /// The number of the link on this port.
            link: u32,
        }
        /// Memory for it, for a receiver that has the same windows.
        4 Attach {
            /// The number of the link on this port.
            link: u32,
            /// The generation of the producer's ring.
            generation: u32,
            [0u32]
            /// The place and size of the ring in the region.
            geometry: Geometry,
            /// The byte of the stream that the receiver begins at.
            start: u64,
            /// The byte of the window at which the region begins.
            base: u64,
            /// The window that the region lies in.
            window: WindowId,
        }
        /// A control message.
        5 Control {
            [0u32]
            /// At least one byte, and at most [`MAX_PAYLOAD`].
            message: Vec<u8>,
        }
        /// A request for a sign of life.
        6 Ping { [0u32] }
        /// The answer to a ping.
        7 Pong { [0u32] }
        /// Guest: this link is rung by this vector of its doorbell device, not by the port (protocol I3).
        8 RungBy {
            /// The number of the link on this port.
            link: u32,
            /// The vector of the guest's doorbell device.
            vector: u32,
        }
        /// Host: this link is to be rung by the doorbell device, as this peer (protocol I4).
        9 RingAs {
            /// The number of the link on this port.
            link: u32,
            /// The peer's number.
            peer: u32,
        }
        /// Host: its other end has hung up because a machine is being migrated (protocol G7.8).
        10 Moved {
            /// The number of the link on this port.
            link: u32,
        }
    }
}

/// An item of the decoded stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Item {
    /// The other side has begun, or begun again.
    Greeting(u64),
    /// It has said something.
    Frame(Frame),
}

/// What the other side sent is not in the protocol. The rest of the stream cannot be decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PortError {
    /// A frame that the protocol does not have.
    Frame,
    /// A greeting with another version than [`VERSION`].
    Version(u32),
}

impl core::fmt::Display for PortError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Frame => f.write_str("a frame on the serial port that the protocol does not have"),
            Self::Version(theirs) => write!(
                f,
                "the other end of the serial port has version {theirs} of the protocol, and this end has {VERSION}: \
                 install the broker and the agent of one release"
            ),
        }
    }
}

impl core::error::Error for PortError {}

/// The signature of a greeting. It is computed when needed, so that no program file contains it, and no byte of it is UTF-8.
fn sign() -> [u8; SIGN] {
    core::array::from_fn(|i| 0x80 | (i as u8).wrapping_mul(151))
}

/// A greeting with this number.
pub fn greeting(number: u64) -> [u8; GREETING] {
    let mut bytes = [0; GREETING];
    bytes[..SIGN].copy_from_slice(&sign());
    bytes[SIGN..BEFORE_NUMBER].copy_from_slice(&VERSION.to_le_bytes());
    bytes[BEFORE_NUMBER..].copy_from_slice(&number.to_le_bytes());
    bytes
}

impl Frame {
    /// Appends it to a stream.
    ///
    /// A control message must not be longer than [`MAX_PAYLOAD`].
    pub fn encode(&self, out: &mut Vec<u8>) {
        let begin = out.len();
        out.extend_from_slice(&[0, 0, self.kind(), 0]);
        append(self, out);
        let payload = out.len() - begin - HEADER;
        debug_assert!(payload <= MAX_PAYLOAD);
        out[begin..begin + 2].copy_from_slice(&(payload as u16).to_le_bytes());
    }

    fn decode(kind: u8, fields: &[u8]) -> Result<Self, PortError> {
        let mut reader = PacketReader::new(fields);
        match Self::take_fields(kind, &mut reader) {
            Ok(Self::Control { message }) if message.is_empty() => Err(PortError::Frame),
            Ok(frame) if reader.remaining() == 0 => Ok(frame),
            _ => Err(PortError::Frame),
        }
    }
}

/// Takes items out of a stream. It holds one frame and one read at most.
#[derive(Debug, Default)]
pub struct Decoder {
    buf: Vec<u8>,
    /// How much of it has been taken.
    taken: usize,
    /// Before here no greeting begins.
    searched: usize,
    /// A greeting has been heard; before it nothing means anything.
    greeted: bool,
}

impl Decoder {
    /// Adds what has been read. Everything is to be taken out before more is added.
    pub fn push(&mut self, bytes: &[u8]) {
        self.buf.drain(..self.taken);
        self.searched -= self.taken;
        self.taken = 0;
        self.buf.extend_from_slice(bytes);
    }

    /// The next item; `None` if it is not there as a whole.
    pub fn take(&mut self) -> Result<Option<Item>, PortError> {
        if self.find_greeting() {
            // The version comes first: what follows it may be different in another.
            let (version, number) = (self.searched + SIGN, self.searched + BEFORE_NUMBER);
            let Some(bytes) = self.buf[version..].first_chunk() else { return Ok(None) };
            let version = u32::from_le_bytes(*bytes);
            if version != VERSION {
                return Err(PortError::Version(version));
            }
            let Some(bytes) = self.buf[number..].first_chunk() else { return Ok(None) };
            let number = u64::from_le_bytes(*bytes);
            // Bytes before the greeting are discarded.
            self.taken = self.searched + GREETING;
            self.searched = self.taken;
            self.greeted = true;
            return Ok(Some(Item::Greeting(number)));
        }
        if !self.greeted {
            self.taken = self.searched;
            return Ok(None);
        }
        let rest = &self.buf[self.taken..];
        // Perhaps a greeting, of which a part has come. No frame begins like this: it would be too long.
        if self.searched == self.taken && rest.len() > 1 {
            return Ok(None);
        }
        let Some(header) = rest.first_chunk::<HEADER>() else { return Ok(None) };
        let [l0, l1, kind, reserved, ..] = *header;
        let len = usize::from(u16::from_le_bytes([l0, l1]));
        if reserved != 0 || len > MAX_PAYLOAD || !Frame::KINDS.contains(&kind) {
            return Err(PortError::Frame);
        }
        let Some(fields) = rest.get(BEFORE_FIELDS..HEADER + len) else { return Ok(None) };
        let frame = Frame::decode(kind, fields)?;
        self.taken += HEADER + len;
        self.searched = self.searched.max(self.taken);
        Ok(Some(Item::Frame(frame)))
    }

    /// Moves `searched` to the next greeting; `false` if there is none, and then to where one may still begin.
    fn find_greeting(&mut self) -> bool {
        let sign = sign();
        while let Some(rest) = self.buf.get(self.searched..).filter(|rest| !rest.is_empty()) {
            // Its first byte is rare.
            match rest.iter().position(|byte| *byte == sign[0]) {
                None => self.searched = self.buf.len(),
                Some(at) => {
                    self.searched += at;
                    let rest = &rest[at..];
                    if rest.starts_with(&sign) {
                        return true;
                    }
                    if sign.starts_with(rest) {
                        return false;
                    }
                    self.searched += 1;
                }
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    fn frames() -> Vec<Frame> {
        let geometry = Geometry::new(4096, 8192).unwrap();
        let (window, base) = (WindowId([3; 16]), 12288);
        vec![
            Frame::Bell { link: 7 },
            Frame::Attach { link: 9, generation: 2, geometry, start: 1 << 40, base, window },
            Frame::Control { message: vec![1; MAX_PAYLOAD] },
            Frame::Dropped { link: 1 },
            Frame::HungUp { link: u32::MAX },
            Frame::Ping {},
            Frame::RungBy { link: 3, vector: 31 },
            Frame::RingAs { link: 3, peer: u32::MAX },
            Frame::Moved { link: 5 },
            Frame::Pong {},
        ]
    }

    fn stream() -> Vec<u8> {
        let mut bytes = greeting(77).to_vec();
        frames().iter().for_each(|f| f.encode(&mut bytes));
        bytes
    }

    fn all(decoder: &mut Decoder) -> Result<Vec<Item>, PortError> {
        core::iter::from_fn(|| decoder.take().transpose()).collect()
    }

    #[test]
    fn port_frames_survive_any_fragmentation() {
        let bytes = stream();
        for step in [1, 3, 32, 1000, bytes.len()] {
            let (mut decoder, mut heard) = (Decoder::default(), Vec::new());
            for piece in bytes.chunks(step) {
                decoder.push(piece);
                heard.extend(all(&mut decoder).unwrap());
            }
            let said: Vec<Item> =
                [Item::Greeting(77)].into_iter().chain(frames().into_iter().map(Item::Frame)).collect();
            assert_eq!(heard, said, "in steps of {step}");
        }
    }

    #[test]
    fn greeting_resynchronises_a_cut_stream() {
        let bytes = stream();
        for cut in 0..200 {
            let mut decoder = Decoder::default();
            decoder.push(&bytes[..GREETING + cut]);
            let before = all(&mut decoder).unwrap();
            decoder.push(&bytes);
            let after = all(&mut decoder).unwrap();
            assert_eq!(after.len(), 1 + frames().len(), "cut at {cut}, after {}", before.len());
            assert_eq!(after[0], Item::Greeting(77));
        }
    }

    #[test]
    fn greeting_in_two_pieces_after_a_frame_is_heard() {
        let bytes = stream();
        for cut in 1..GREETING {
            let mut decoder = Decoder::default();
            decoder.push(&bytes);
            assert_eq!(all(&mut decoder).unwrap().len(), 1 + frames().len());
            decoder.push(&bytes[..cut]);
            assert_eq!(all(&mut decoder), Ok(vec![]), "cut at {cut}");
            decoder.push(&bytes[cut..]);
            assert_eq!(all(&mut decoder).unwrap().len(), 1 + frames().len(), "cut at {cut}");
        }
    }

    #[test]
    fn greeting_of_another_version_is_an_error() {
        for theirs in [0, 2, VERSION + 1, u32::MAX] {
            let mut decoder = Decoder::default();
            decoder.push(&[7; 5]);
            assert_eq!(all(&mut decoder), Ok(vec![]));
            decoder.push(&greeting(77)[..SIGN]);
            assert_eq!(all(&mut decoder), Ok(vec![]), "the version has not come");
            // Whatever another version has in place of the number.
            decoder.push(&theirs.to_le_bytes());
            assert_eq!(all(&mut decoder), Err(PortError::Version(theirs)));
        }
    }

    #[test]
    fn version_error_has_both_versions_and_the_remedy() {
        let said = alloc::format!("{}", PortError::Version(2));
        let both = alloc::format!("has version 2 of the protocol, and this end has {VERSION}: ");
        assert!(said.contains(&both) && said.ends_with("install the broker and the agent of one release"), "{said}");
    }

    #[test]
    fn bytes_before_the_greeting_are_dropped() {
        let mut decoder = Decoder::default();
        for _ in 0..100 {
            decoder.push(&[1; 1000]);
            assert_eq!(all(&mut decoder), Ok(vec![]));
            assert!(decoder.buf.len() - decoder.taken < SIGN);
        }
    }

    #[test]
    fn malformed_frame_is_an_error() {
        let cases: [&[u8]; 11] = [
            // An unknown kind, before its payload is there.
            &[9, 0, 11, 0, 0, 0, 0, 0],
            &[0, 0, 0, 0, 0, 0, 0, 0],
            &[0, 0, 11, 0, 0, 0, 0, 0],
            &[0, 0, 8, 0, 1, 0, 0, 0],
            &[3, 0, 9, 0, 1, 0, 0, 0, 1, 1, 1],
            &[0, 0, 6, 0, 1, 0, 0, 0],
            &[0, 0, 1, 1, 0, 0, 0, 0],
            &[1, 0, 1, 0, 0, 0, 0, 0, 9],
            &[0xff, 0xff, 5, 0, 0, 0, 0, 0],
            &[1, 0, 5, 0, 1, 0, 0, 0, 9],
            &[0, 0, 5, 0, 0, 0, 0, 0],
        ];
        for bytes in cases {
            let mut decoder = Decoder::default();
            decoder.push(&greeting(0));
            decoder.push(bytes);
            assert_eq!(all(&mut decoder), Err(PortError::Frame), "{bytes:?}");
        }
    }

    /// Each frame, and its bytes as P2 has them.
    fn vectors() -> Vec<(Frame, Vec<u8>)> {
        let header = |len: u8, kind: u8, link: [u8; 4]| [&[len, 0, kind, 0][..], &link].concat();
        let attach = [
            &header(56, 4, [9, 0, 0, 0])[..],
            &[2, 0, 0, 0, 0, 0, 0, 0],
            &[0, 16, 0, 0, 0, 0, 0, 0],
            &[0, 32, 0, 0, 0, 0, 0, 0],
            &[0, 0, 0, 0, 0, 1, 0, 0],
            &[0, 48, 0, 0, 0, 0, 0, 0],
            &[3; 16],
        ];
        let geometry = Geometry::new(4096, 8192).unwrap();
        let (window, base) = (WindowId([3; 16]), 12288);
        vec![
            (Frame::Bell { link: 7 }, header(0, 1, [7, 0, 0, 0])),
            (Frame::Dropped { link: 1 }, header(0, 2, [1, 0, 0, 0])),
            (Frame::HungUp { link: u32::MAX }, header(0, 3, [255; 4])),
            (Frame::Attach { link: 9, generation: 2, geometry, start: 1 << 40, base, window }, attach.concat()),
            (Frame::Control { message: vec![8, 9] }, [&header(2, 5, [0; 4])[..], &[8, 9]].concat()),
            (Frame::Ping {}, header(0, 6, [0; 4])),
            (Frame::Pong {}, header(0, 7, [0; 4])),
            (Frame::RungBy { link: 3, vector: 31 }, [&header(4, 8, [3, 0, 0, 0])[..], &[31, 0, 0, 0]].concat()),
            (Frame::RingAs { link: 3, peer: 1 << 24 }, [&header(4, 9, [3, 0, 0, 0])[..], &[0, 0, 0, 1]].concat()),
            (Frame::Moved { link: 5 }, header(0, 10, [5, 0, 0, 0])),
        ]
    }

    #[test]
    fn port_frames_are_as_documented() {
        for (frame, bytes) in vectors() {
            let mut out = vec![0xee];
            frame.encode(&mut out);
            assert_eq!(out[1..], bytes, "{frame:?}");
            let mut decoder = Decoder::default();
            decoder.push(&[&greeting(1)[..], &bytes].concat());
            assert_eq!(all(&mut decoder), Ok(vec![Item::Greeting(1), Item::Frame(frame)]));
        }
    }

    #[test]
    fn port_frame_of_another_length_or_with_a_wrong_zero_is_refused() {
        for (frame, bytes) in vectors() {
            let is_control = bytes[2] == 5;
            let refused = |bytes: &[u8]| {
                let mut decoder = Decoder::default();
                decoder.push(&[&greeting(1)[..], bytes].concat());
                assert_eq!(all(&mut decoder), Err(PortError::Frame), "{frame:?} {bytes:?}");
            };
            if !is_control {
                let longer = [&[bytes[0] + 1], &bytes[1..], &[0]].concat();
                refused(&longer);
            }
            if bytes.len() > HEADER && !is_control {
                refused(&[&[bytes[0] - 1], &bytes[1..bytes.len() - 1]].concat());
            }
            // Reserved: in the header, the link of a frame that is of none, and in an attach.
            let zeros: &[usize] = match bytes[2] {
                4 => &[3, 12, 15],
                5..=7 => &[3, 4, 7],
                _ => &[3],
            };
            for zero in zeros {
                let mut wrong = bytes.clone();
                wrong[*zero] = 1;
                refused(&wrong);
            }
        }
    }
}
