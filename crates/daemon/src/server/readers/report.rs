//! The packets between the broker and a reading process. Both are the same program, so there is one version.
//!
//! ```text
//!   order    what u8, session u64                                         [the session's socket]
//!   report   what u8, session u64, then of a packet:
//!            truncated u8, came u8, sorts u8, sort u8 each, facts u16, 1 and facts, or 0 and why there are none, the packet's bytes   [what is kept]
//! ```

use crate::core::SocketFacts;
use crate::server::judge::{Judged, Sort};
use partywall_protocol::wire::MAX_PACKET;

/// Longer than any report: a packet, its facts and the numbers before them.
pub(in crate::server) const MAX_REPORT: usize = MAX_PACKET + 4096;

/// From the broker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ReaderOrder {
    /// Read this session. Brings its socket.
    Serve(u64),
    /// It has ended. Brings the broker's copy of the socket, so that this process closes the last.
    End(u64),
    /// Report when nothing is left to be read.
    Sync(u64),
}

impl ReaderOrder {
    pub(super) const SIZE: usize = 9;

    pub(super) fn encode(self) -> [u8; Self::SIZE] {
        let (what, number) = match self {
            Self::Serve(session) => (1, session),
            Self::End(session) => (2, session),
            Self::Sync(number) => (3, number),
        };
        let mut bytes = [what; Self::SIZE];
        bytes[1..].copy_from_slice(&number.to_le_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8; Self::SIZE]) -> Option<Self> {
        let [what, number @ ..] = *bytes;
        let number = u64::from_le_bytes(number);
        match what {
            1 => Some(Self::Serve(number)),
            2 => Some(Self::End(number)),
            3 => Some(Self::Sync(number)),
            _ => None,
        }
    }
}

/// From the reading process.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "a report is made, encoded and dropped; nobody keeps many")]
pub(in crate::server) enum ReaderReport<'a> {
    /// A packet of a session.
    Packet { session: u64, judged: Judged, bytes: &'a [u8] },
    /// The other end of a session is gone.
    Gone { session: u64 },
    /// All copies of a session's socket that this process had are closed.
    Ended { session: u64 },
    /// The answer to [`ReaderOrder::Sync`].
    Synced { number: u64 },
}

impl<'a> ReaderReport<'a> {
    pub(super) fn encode(&self) -> Vec<u8> {
        self.encode_as(false)
    }

    /// The report of a packet whose descriptors were all lost.
    pub(super) fn encode_without_descriptors(&self) -> Vec<u8> {
        self.encode_as(true)
    }

    fn encode_as(&self, lost: bool) -> Vec<u8> {
        let (what, number) = match self {
            Self::Packet { session, .. } => (1, session),
            Self::Gone { session } => (2, session),
            Self::Ended { session } => (3, session),
            Self::Synced { number } => (4, number),
        };
        let mut out = vec![what];
        out.extend(number.to_le_bytes());
        if let Self::Packet { judged, bytes, .. } = self {
            // A packet brings at most `packet::MAX_FDS`.
            let came = if lost { 0 } else { judged.came as u8 };
            let sorts: &[Sort] = if lost { &[] } else { &judged.sorts };
            let facts = match &judged.socket {
                Some(Ok(facts)) if !lost => [&[1][..], &facts.encode()].concat(),
                Some(Err(why)) if !lost => [&[0][..], why.as_bytes()].concat(),
                _ => Vec::new(),
            };
            out.extend([u8::from(judged.truncated || lost), came, sorts.len() as u8]);
            out.extend(sorts.iter().map(|sort| *sort as u8));
            out.extend((facts.len() as u16).to_le_bytes());
            out.extend(facts);
            out.extend(*bytes);
        }
        out
    }

    /// Decodes a report whose descriptors the caller has. `None` if it is malformed, which the same program never sends.
    pub(in crate::server) fn decode(bytes: &'a [u8]) -> Option<Self> {
        let (&what, bytes) = bytes.split_first()?;
        let (number, bytes) = bytes.split_first_chunk()?;
        let session = u64::from_le_bytes(*number);
        Some(match what {
            1 => {
                let (&[truncated, came, sorts], bytes) = bytes.split_first_chunk()?;
                let (sorts, bytes) = bytes.split_at_checked(sorts.into())?;
                let sorts = sorts.iter().map(|sort| sort_of(*sort)).collect::<Option<_>>()?;
                let (facts, bytes) = bytes.split_first_chunk()?;
                let (facts, bytes) = bytes.split_at_checked(u16::from_le_bytes(*facts).into())?;
                let socket = match facts.split_first() {
                    None => None,
                    Some((1, facts)) => Some(Ok(SocketFacts::decode(facts).ok()?)),
                    Some((_, why)) => Some(Err(str::from_utf8(why).ok()?.to_owned())),
                };
                let kept = Vec::new();
                let judged =
                    Judged { len: bytes.len(), truncated: truncated != 0, came: came.into(), socket, sorts, kept };
                Self::Packet { session, judged, bytes }
            }
            2 => Self::Gone { session },
            3 => Self::Ended { session },
            4 => Self::Synced { number: session },
            _ => return None,
        })
    }
}

fn sort_of(number: u8) -> Option<Sort> {
    [Sort::Nothing, Sort::Memory].into_iter().find(|sort| *sort as u8 == number)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::tests::sockets::client;

    #[test]
    fn report_of_packet_survives_encoding() {
        for socket in [None, Some(Ok(client())), Some(Err("no \"socket\"".to_owned()))] {
            let judged = Judged {
                len: 5,
                truncated: true,
                came: 3,
                socket: socket.clone(),
                sorts: vec![Sort::Memory, Sort::Nothing, Sort::Memory],
                kept: Vec::new(),
            };
            let report = ReaderReport::Packet { session: 77, judged, bytes: b"hello" };
            let encoded = report.encode();
            let Some(ReaderReport::Packet { session, judged, bytes }) = ReaderReport::decode(&encoded) else {
                panic!()
            };
            assert_eq!((session, bytes, judged.truncated, judged.came), (77, &b"hello"[..], true, 3));
            assert_eq!(judged.sorts, [Sort::Memory, Sort::Nothing, Sort::Memory]);
            assert_eq!(judged.socket, socket);
            let without = report.encode_without_descriptors();
            let Some(ReaderReport::Packet { judged, .. }) = ReaderReport::decode(&without) else { panic!() };
            assert_eq!((judged.came, judged.truncated, judged.socket.is_some()), (0, true, false));
        }
    }

    #[test]
    fn orders_survive_encoding() {
        for order in [ReaderOrder::Serve(2), ReaderOrder::End(u64::MAX), ReaderOrder::Sync(3)] {
            assert_eq!(ReaderOrder::decode(&order.encode()), Some(order));
        }
        assert_eq!(ReaderOrder::decode(&[9; ReaderOrder::SIZE]), None);
    }
}
