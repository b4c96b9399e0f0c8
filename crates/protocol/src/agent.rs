//! The control frames between a guest's agent and the broker (protocol G2): sessions of the guest's programs, carried over one port.
//!
//! ```text
//!   program --socket-- agent ==serial port, control frames== port of the broker --socket-- broker
//! ```
//!
//! A program in a guest has an ordinary session, and so has the broker. Between them each packet travels as [`Say::Packet`].
//! Descriptors cannot: a region's memory is named by its window, a link's end by the number that the link has on the port.

use crate::socket::{ReceiverCookies, ReceiverQuestion, SocketFacts};
use crate::window::WindowId;
use crate::wire::WireError;
use crate::wire::codec::{PacketReader, PacketWriter, Put, Take, append};
use crate::wire::table::frames;
use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;

/// The most links that one message brings.
pub const MAX_LINKS: usize = 2;
/// The longest name that is said.
const MAX_NAME: usize = 64;

frames! {
    /// One thing said in a control frame.
    Say: u8 {
        /// Agent: a program has connected. Its description of the program is for people to read.
        1 Open {
            /// The session's number, on this port, chosen by the agent.
            session: u32,
            /// The program's process, in the guest.
            pid: u32,
        }
        /// Either: this session has ended.
        2 Close {
            /// No process of the guest has the session any more. Otherwise its program may live. Said by the agent only.
            by_program: bool,
            /// The session that has ended.
            session: u32,
        }
        /// Either: a packet of protocol C.
        3 Packet {
            /// The session that the packet belongs to.
            session: u32,
            /// The window that its memory lies in. Only the broker sets it: memory of a guest lies at the place that the broker gave out.
            window: Option<WindowId>,
            /// Its link ends, by their numbers on this port.
            links: Vec<u32>,
            /// The state of the packet's socket, as the guest's kernel reports it. Only the agent sets it.
            socket: Option<SocketFacts>,
            /// The packet as it was sent or is to be sent.
            bytes: Vec<u8>,
        }
        /// Broker: this window is, or will soon be, plugged into the guest.
        4 Window {
            /// The window that is plugged in.
            id: WindowId,
            /// The guest writes it; otherwise it reads it.
            owner: bool,
            /// The machine on the other side, for people to read.
            peer: LastName,
        }
        /// Agent: the window is there.
        5 Seen {
            /// The window that the agent has found.
            id: WindowId,
            /// Whether the guest writes the window.
            owner: bool,
        }
        /// Broker: this is the name of the guest.
        6 Name {
            /// The name of the guest.
            name: LastName,
        }
        /// Broker: this doorbell device is, or will soon be, plugged into the guest.
        7 Doorbell {
            /// The identity of the device.
            id: u128,
        }
        /// Agent: the doorbell device is in use.
        8 DoorbellSeen {
            /// The identity of the device.
            id: u128,
        }
        /// Broker: the guest is to be migrated, so the agent gives up its windows.
        9 Release {}
        /// Agent: what has become of that.
        10 Released {
            /// The processes that still hold a window, and the remedy; empty if there are none.
            held: LastReason,
        }
        /// Broker: which sockets of the agent's network namespace receive datagrams with these ends (protocol U14).
        11 FindReceivers {
            /// The number that the answer repeats.
            number: u32,
            /// The ends of the datagrams.
            questions: Vec<ReceiverQuestion>,
        }
        /// Agent: the answer to that.
        12 ReceiversAre {
            /// As in the question.
            number: u32,
            /// The number of the agent's network namespace; 0 if the kernel does not find sockets.
            netns: u64,
            /// When the agent began to ask its kernel, in milliseconds of the machine's `CLOCK_MONOTONIC_COARSE`.
            at: u64,
            /// The sockets, in the order of the questions.
            receivers: ReceiverCookies,
        }
        /// Agent: how far a program has written the ring of a flow within the guest, before the broker hears that the program has given the
        /// flow up, or that its session or its socket has gone (protocol U15.6, U15.7).
        13 FlowWritten {
            /// The flow.
            flow: u64,
            /// The byte up to which the ring was written.
            tail: u64,
        }
    }
}

/// A control frame that says nothing in this protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BadSay;

impl core::fmt::Display for BadSay {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("a control frame on the serial port that the protocol does not have")
    }
}

impl core::error::Error for BadSay {}

impl Say {
    /// As it travels.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = vec![self.kind()];
        append(self, &mut out);
        out
    }

    /// Reads what the other side has said.
    pub fn decode(bytes: &[u8]) -> Result<Self, BadSay> {
        let mut reader = PacketReader::new(bytes);
        let said = u8::take(&mut reader).and_then(|kind| Self::take_fields(kind, &mut reader));
        said.ok().filter(|_| reader.remaining() == 0).ok_or(BadSay)
    }
}

/// A name that is the last field of a message: it has no length, and ends with the message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LastName(pub String);

impl core::fmt::Display for LastName {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<&str> for LastName {
    fn from(name: &str) -> Self {
        Self(name.into())
    }
}

impl Put for LastName {
    fn put(&self, out: &mut PacketWriter<'_>) {
        out.bytes(self.0.as_bytes());
    }
}

impl<'a> Take<'a> for LastName {
    const MIN: usize = 0;
    fn take(reader: &mut PacketReader<'a>) -> Result<Self, WireError> {
        let length = reader.remaining();
        match core::str::from_utf8(reader.bytes(length, "a name")?) {
            Ok(name) if length <= MAX_NAME => Ok(name.into()),
            _ => Err(WireError::Text),
        }
    }
}

/// A reason for people that is the last field of a message: it has no length, and ends with the message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LastReason(pub String);

impl LastReason {
    /// The greatest length. Longer text is cut.
    pub const MAX: usize = 1024;
}

impl Put for LastReason {
    fn put(&self, out: &mut PacketWriter<'_>) {
        let end = (0..=self.0.len().min(Self::MAX)).rev().find(|&end| self.0.is_char_boundary(end));
        out.bytes(&self.0.as_bytes()[..end.unwrap_or(0)]);
    }
}

impl<'a> Take<'a> for LastReason {
    const MIN: usize = 0;
    fn take(reader: &mut PacketReader<'a>) -> Result<Self, WireError> {
        let length = reader.remaining();
        match core::str::from_utf8(reader.bytes(length, "a reason")?) {
            Ok(reason) if length <= Self::MAX => Ok(Self(reason.into())),
            _ => Err(WireError::Text),
        }
    }
}

/// The links that a message brings, by their numbers on the port: `count u8`, which is at most [`MAX_LINKS`], and a `u32` each.
impl Put for Vec<u32> {
    fn put(&self, out: &mut PacketWriter<'_>) {
        // It is at most 2.
        (self.len().min(MAX_LINKS) as u8).put(out);
        self.iter().take(MAX_LINKS).for_each(|link| link.put(out));
    }
}

impl<'a> Take<'a> for Vec<u32> {
    const MIN: usize = 1;
    fn take(reader: &mut PacketReader<'a>) -> Result<Self, WireError> {
        let count = u8::take(reader)?;
        if usize::from(count) > MAX_LINKS {
            return Err(WireError::Value { field: "the number of links", value: count.into() });
        }
        (0..count).map(|_| u32::take(reader)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::socket::MOST_QUESTIONS;

    fn question() -> ReceiverQuestion {
        let at = |text: &str| text.parse().unwrap();
        ReceiverQuestion { from: at("[2001:db8::1]:513"), to: at("[::ffff:10.0.0.1]:7"), in_group: true }
    }

    #[test]
    fn agent_messages_round_trip_and_others_are_refused() {
        let id = WindowId([9; 16]);
        let all = [
            Say::Open { session: 1, pid: 77 },
            Say::Close { by_program: true, session: u32::MAX },
            Say::Packet { session: 3, window: None, links: vec![], socket: None, bytes: vec![] },
            Say::Packet { session: 3, window: Some(id), links: vec![4, 6], socket: None, bytes: vec![1; 4096] },
            Say::Window { id, owner: true, peer: "b".into() },
            Say::Seen { id, owner: false },
            Say::Name { name: LastName("a".repeat(64)) },
            Say::Doorbell { id: 1 << 100 },
            Say::DoorbellSeen { id: 7 },
            Say::Release {},
            Say::Released { held: LastReason(String::new()) },
            Say::Released { held: LastReason("r".repeat(LastReason::MAX)) },
            Say::FindReceivers { number: 1, questions: vec![] },
            Say::FindReceivers { number: u32::MAX, questions: vec![question(); MOST_QUESTIONS] },
            Say::ReceiversAre { number: 1, netns: 2, at: 3, receivers: ReceiverCookies(vec![]) },
            Say::ReceiversAre {
                number: 1,
                netns: 2,
                at: 3,
                receivers: ReceiverCookies(vec![u64::MAX; MOST_QUESTIONS]),
            },
            Say::FlowWritten { flow: u64::MAX, tail: 2 },
        ];
        for said in all {
            let bytes = said.encode();
            assert!(bytes.len() <= crate::port::MAX_PAYLOAD);
            assert_eq!(Say::decode(&bytes), Ok(said.clone()));
            // Cut anywhere before what may have any length, it is nothing.
            for cut in 0..bytes.len().min(6) {
                assert!(Say::decode(&bytes[..cut]) != Ok(said.clone()), "{said:?} cut at {cut}");
            }
        }
        for bad in [
            &[][..],
            &[0],
            &[7],
            &[9, 0],
            &[11],
            &[11, 0, 0, 0, 0, 1],
            &[13],
            &[14],
            &[2, 0, 0, 0],
            &[2, 0, 0, 0, 0, 0, 0],
            &[3, 0, 0, 0, 0, 2],
            &[3, 0, 0, 0, 0, 0, 3],
            &[3, 0, 0, 0, 0, 0, 0, 2],
        ] {
            assert_eq!(Say::decode(bad), Err(BadSay), "{bad:?}");
        }
        assert_eq!(Say::decode(&[&[6][..], &[b'a'; 65]].concat()), Err(BadSay));
        assert_eq!(Say::decode(&[6, 0xff]), Err(BadSay));
    }

    #[test]
    fn agent_messages_are_as_documented() {
        let id = WindowId([9; 16]);
        let (window, session) = ([9; 16], [1, 0, 0, 0x20]);
        let cases: [(Say, Vec<u8>); 14] = [
            (Say::Open { session: 0x2000_0001, pid: 0x0403 }, [&[1][..], &session, &[3, 4, 0, 0]].concat()),
            (Say::Close { by_program: true, session: 0x2000_0001 }, [&[2, 1][..], &session].concat()),
            (
                Say::Packet { session: 0x2000_0001, window: None, links: vec![], socket: None, bytes: vec![] },
                [&[3][..], &session, &[0, 0, 0]].concat(),
            ),
            (
                Say::Packet {
                    session: 0x2000_0001,
                    window: Some(id),
                    links: vec![4, 6],
                    socket: None,
                    bytes: vec![7, 8],
                },
                [&[3][..], &session, &[1], &window, &[2, 4, 0, 0, 0, 6, 0, 0, 0, 0, 7, 8]].concat(),
            ),
            (Say::Window { id, owner: true, peer: "b-2".into() }, [&[4][..], &window, b"\x01b-2"].concat()),
            (Say::Seen { id, owner: false }, [&[5][..], &window, &[0]].concat()),
            (Say::Name { name: "web".into() }, b"\x06web".to_vec()),
            (Say::Doorbell { id: 2 }, [&[7, 2][..], &[0; 15]].concat()),
            (Say::DoorbellSeen { id: 1 << 120 }, [&[8][..], &[0; 15], &[1]].concat()),
            (Say::Release {}, vec![9]),
            (Say::Released { held: LastReason("x".into()) }, b"\x0ax".to_vec()),
            (
                Say::FindReceivers { number: 1, questions: vec![question()] },
                [
                    &[11, 1, 0, 0, 0, 1, 0][..],
                    &0x2001_0db8_0000_0000_0000_0000_0000_0001_u128.to_le_bytes(),
                    &[1, 2, 0],
                    &0xffff_0a00_0001_u128.to_le_bytes(),
                    &[7, 0, 1],
                ]
                .concat(),
            ),
            (
                Say::ReceiversAre { number: 1, netns: 2, at: 3, receivers: ReceiverCookies(vec![4]) },
                [&[12, 1, 0, 0, 0, 2][..], &[0; 7], &[3], &[0; 7], &[1, 4], &[0; 7]].concat(),
            ),
            (Say::FlowWritten { flow: 2, tail: 3 }, [&[13, 2][..], &[0; 7], &[3], &[0; 7]].concat()),
        ];
        for (said, bytes) in cases {
            assert_eq!(said.encode(), bytes, "{said:?}");
            assert_eq!(Say::decode(&bytes), Ok(said));
        }
    }

    #[test]
    fn reason_is_cut_between_characters_and_longer_one_is_refused() {
        let long = Say::Released { held: LastReason(["x", &"\u{e9}".repeat(LastReason::MAX)].concat()) };
        let bytes = long.encode();
        assert_eq!(bytes.len(), LastReason::MAX);
        assert!(matches!(Say::decode(&bytes), Ok(Say::Released { .. })));
        assert_eq!(Say::decode(&[&[10][..], &[b'a'; LastReason::MAX + 1]].concat()), Err(BadSay));
        assert_eq!(Say::decode(&[10, 0xff]), Err(BadSay));
    }

    #[test]
    fn links_beyond_the_most_are_not_sent() {
        let said = Say::Packet { session: 1, window: None, links: vec![1, 2, 3], socket: None, bytes: vec![] };
        assert_eq!(said.encode().len(), 1 + 4 + 1 + 1 + 2 * 4 + 1);
    }

    #[test]
    fn more_questions_than_a_frame_has_are_refused() {
        let count = (MOST_QUESTIONS + 1) as u8;
        let questions = [&[11, 1, 0, 0, 0, count][..], &vec![0; 39 * usize::from(count)]].concat();
        let receivers = [&[12][..], &[0; 20], &[count], &vec![0; 8 * usize::from(count)]].concat();
        for bad in [questions, receivers] {
            assert_eq!(Say::decode(&bad), Err(BadSay));
        }
    }
}
