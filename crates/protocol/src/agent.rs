//! What a guest's agent and the broker say to each other in control frames (protocol G2): sessions of the guest's programs, carried
//! over one port.
//!
//! ```text
//!   program --socket-- agent ==serial port, control frames== port of the broker --socket-- broker
//! ```
//!
//! A program in a guest has an ordinary session, and so has the broker; in between each packet travels as [`Say::Packet`].
//! Descriptors cannot: a region's memory is named by its window, a link's end by the number that the link has on the port.

use crate::window::WindowId;
use alloc::string::String;
use alloc::vec::Vec;

/// The most links that one message brings.
pub const MAX_LINKS: usize = 2;
/// The longest name that is said.
const MAX_NAME: usize = 64;

/// One thing said in a control frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Say {
    /// Agent: a program has connected. What it says of the program is for people to read.
    Open {
        /// The session's number, on this port, chosen by the agent.
        session: u32,
        /// The program's process, in the guest.
        pid: u32,
    },
    /// Either: this session has ended.
    Close {
        /// Which.
        session: u32,
    },
    /// Either: a packet of protocol C.
    Packet {
        /// Of which session.
        session: u32,
        /// The window that its memory lies in. Said by the broker only: what a guest brings lies where the broker gave it a place.
        window: Option<WindowId>,
        /// Its link ends, by their numbers on this port.
        links: Vec<u32>,
        /// The packet.
        bytes: Vec<u8>,
    },
    /// Broker: this window is, or will soon be, plugged into the guest.
    Window {
        /// Which.
        id: WindowId,
        /// The guest writes it; otherwise it reads it.
        owner: bool,
        /// The machine on the other side, for people to read.
        peer: String,
    },
    /// Agent: the window is there.
    Seen {
        /// Which.
        id: WindowId,
        /// As which.
        owner: bool,
    },
    /// Broker: this is the name of the guest.
    Name {
        /// The name.
        name: String,
    },
    /// Broker: this doorbell device is, or will soon be, plugged into the guest.
    Doorbell {
        /// Which.
        id: u128,
    },
    /// Agent: the doorbell device is in use.
    DoorbellSeen {
        /// Which.
        id: u128,
    },
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
        let mut out = Vec::new();
        match self {
            Self::Open { session, pid } => {
                out.push(1);
                out.extend_from_slice(&session.to_le_bytes());
                out.extend_from_slice(&pid.to_le_bytes());
            }
            Self::Close { session } => {
                out.push(2);
                out.extend_from_slice(&session.to_le_bytes());
            }
            Self::Packet { session, window, links, bytes } => {
                out.push(3);
                out.extend_from_slice(&session.to_le_bytes());
                out.push(u8::from(window.is_some()));
                if let Some(id) = window {
                    out.extend_from_slice(&id.0);
                }
                out.push(links.len().min(MAX_LINKS) as u8);
                for link in links.iter().take(MAX_LINKS) {
                    out.extend_from_slice(&link.to_le_bytes());
                }
                out.extend_from_slice(bytes);
            }
            Self::Window { id, owner, peer } => {
                out.push(4);
                out.extend_from_slice(&id.0);
                out.push(u8::from(*owner));
                out.extend_from_slice(peer.as_bytes());
            }
            Self::Seen { id, owner } => {
                out.push(5);
                out.extend_from_slice(&id.0);
                out.push(u8::from(*owner));
            }
            Self::Name { name } => {
                out.push(6);
                out.extend_from_slice(name.as_bytes());
            }
            Self::Doorbell { id } => {
                out.push(7);
                out.extend_from_slice(&id.to_le_bytes());
            }
            Self::DoorbellSeen { id } => {
                out.push(8);
                out.extend_from_slice(&id.to_le_bytes());
            }
        }
        out
    }

    /// Reads what the other side has said.
    pub fn decode(bytes: &[u8]) -> Result<Self, BadSay> {
        let mut rest = Rest(bytes);
        let said = match rest.byte()? {
            1 => Self::Open { session: rest.number()?, pid: rest.number()? },
            2 => Self::Close { session: rest.number()? },
            3 => {
                let session = rest.number()?;
                let window = if rest.flag()? { Some(rest.id()?) } else { None };
                let count = usize::from(rest.byte()?);
                if count > MAX_LINKS {
                    return Err(BadSay);
                }
                let links = (0..count).map(|_| rest.number()).collect::<Result<_, _>>()?;
                Self::Packet { session, window, links, bytes: rest.all().into() }
            }
            4 => Self::Window { id: rest.id()?, owner: rest.flag()?, peer: rest.text()? },
            5 => Self::Seen { id: rest.id()?, owner: rest.flag()? },
            6 => Self::Name { name: rest.text()? },
            7 => Self::Doorbell { id: rest.take().map(u128::from_le_bytes)? },
            8 => Self::DoorbellSeen { id: rest.take().map(u128::from_le_bytes)? },
            _ => return Err(BadSay),
        };
        if rest.0.is_empty() { Ok(said) } else { Err(BadSay) }
    }
}

/// What has not been read yet.
struct Rest<'a>(&'a [u8]);

impl<'a> Rest<'a> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], BadSay> {
        let (taken, rest) = self.0.split_first_chunk().ok_or(BadSay)?;
        self.0 = rest;
        Ok(*taken)
    }

    fn byte(&mut self) -> Result<u8, BadSay> {
        self.take().map(|[byte]| byte)
    }

    fn number(&mut self) -> Result<u32, BadSay> {
        self.take().map(u32::from_le_bytes)
    }

    fn id(&mut self) -> Result<WindowId, BadSay> {
        self.take().map(WindowId)
    }

    fn flag(&mut self) -> Result<bool, BadSay> {
        match self.byte()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(BadSay),
        }
    }

    fn all(&mut self) -> &'a [u8] {
        core::mem::take(&mut self.0)
    }

    fn text(&mut self) -> Result<String, BadSay> {
        match core::str::from_utf8(self.all()) {
            Ok(text) if text.len() <= MAX_NAME => Ok(text.into()),
            _ => Err(BadSay),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    #[test]
    fn agent_messages_round_trip_and_others_are_refused() {
        let id = WindowId([9; 16]);
        let all = [
            Say::Open { session: 1, pid: 77 },
            Say::Close { session: u32::MAX },
            Say::Packet { session: 3, window: None, links: vec![], bytes: vec![] },
            Say::Packet { session: 3, window: Some(id), links: vec![4, 6], bytes: vec![1; 4096] },
            Say::Window { id, owner: true, peer: "b".into() },
            Say::Seen { id, owner: false },
            Say::Name { name: "a".repeat(64) },
            Say::Doorbell { id: 1 << 100 },
            Say::DoorbellSeen { id: 7 },
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
        for bad in
            [&[][..], &[0], &[7], &[9], &[2, 0, 0, 0], &[2, 0, 0, 0, 0, 0], &[3, 0, 0, 0, 0, 2], &[3, 0, 0, 0, 0, 0, 3]]
        {
            assert_eq!(Say::decode(bad), Err(BadSay), "{bad:?}");
        }
        assert_eq!(Say::decode(&[&[6][..], &[b'a'; 65]].concat()), Err(BadSay));
        assert_eq!(Say::decode(&[6, 0xff]), Err(BadSay));
    }

    #[test]
    fn agent_messages_are_as_documented() {
        let id = WindowId([9; 16]);
        let (window, session) = ([9; 16], [1, 0, 0, 0x20]);
        let cases: [(Say, Vec<u8>); 9] = [
            (Say::Open { session: 0x2000_0001, pid: 0x0403 }, [&[1][..], &session, &[3, 4, 0, 0]].concat()),
            (Say::Close { session: 0x2000_0001 }, [&[2][..], &session].concat()),
            (
                Say::Packet { session: 0x2000_0001, window: None, links: vec![], bytes: vec![] },
                [&[3][..], &session, &[0, 0]].concat(),
            ),
            (
                Say::Packet { session: 0x2000_0001, window: Some(id), links: vec![4, 6], bytes: vec![7, 8] },
                [&[3][..], &session, &[1], &window, &[2, 4, 0, 0, 0, 6, 0, 0, 0, 7, 8]].concat(),
            ),
            (Say::Window { id, owner: true, peer: "b-2".into() }, [&[4][..], &window, b"\x01b-2"].concat()),
            (Say::Seen { id, owner: false }, [&[5][..], &window, &[0]].concat()),
            (Say::Name { name: "web".into() }, b"\x06web".to_vec()),
            (Say::Doorbell { id: 2 }, [&[7, 2][..], &[0; 15]].concat()),
            (Say::DoorbellSeen { id: 1 << 120 }, [&[8][..], &[0; 15], &[1]].concat()),
        ];
        for (said, bytes) in cases {
            assert_eq!(said.encode(), bytes, "{said:?}");
            assert_eq!(Say::decode(&bytes), Ok(said));
        }
    }

    #[test]
    fn links_beyond_the_most_are_not_sent() {
        let said = Say::Packet { session: 1, window: None, links: vec![1, 2, 3], bytes: vec![] };
        assert_eq!(said.encode().len(), 1 + 4 + 1 + 1 + 2 * 4);
    }
}
