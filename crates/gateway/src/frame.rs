//! What gateways send each other: a request at the beginning of a stream, its answer, and pieces of the stream's bytes.
//!
//! QUIC discards bytes that are not read yet when a stream is reset. A death must not do that (protocol L4), so ends are sent in order, as pieces
//! without bytes. A stream that ends without one has died.

use partywall::cluster::Name;
use partywall::{Directions, Refusal};
use quinn::{RecvStream, SendStream, VarInt};
use serde::{Deserialize, Serialize};

/// The most bytes of a request or an answer (protocol H6.4).
const MAX_HEADER: usize = 2048;
/// The most bytes of a piece.
pub(crate) const MAX_PIECE: usize = 64 << 10;
/// Pieces that end a stream.
const ENDED: u32 = 0;
const DIED: u32 = u32::MAX;

/// The reader reads no more.
pub(crate) const CLOSED_BY_READER: VarInt = VarInt::from_u32(1);
/// The reader is dead.
pub(crate) const READER_DIED: VarInt = VarInt::from_u32(2);

/// The request for a connection, as it comes from another host.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RequestFrame {
    from: String,
    target: String,
    service: String,
    directions: u8,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct AnswerFrame {
    /// 0, or the number of a refusal.
    code: u16,
    reason: String,
}

/// A request for a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RouteRequest {
    /// The domain that connects. The host is the one that the connection has proved.
    pub(crate) from: String,
    pub(crate) target: String,
    pub(crate) service: String,
    pub(crate) directions: Directions,
}

/// Why another host refuses a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RemoteRefusal {
    pub(crate) code: Refusal,
    pub(crate) reason: String,
}

impl RemoteRefusal {
    pub(crate) fn new(code: Refusal, reason: impl Into<String>) -> Self {
        Self { code, reason: reason.into() }
    }
}

async fn send_header(stream: &mut SendStream, value: &impl Serialize) -> Result<(), String> {
    let text = serde_json::to_vec(value).map_err(|e| e.to_string())?;
    let length = u16::try_from(text.len()).map_err(|_| "the header is too long".to_owned())?;
    let mut packet = length.to_le_bytes().to_vec();
    packet.extend(text);
    stream.write_all(&packet).await.map_err(|e| e.to_string())
}

async fn receive_header<T: for<'a> Deserialize<'a>>(stream: &mut RecvStream) -> Result<T, String> {
    let mut length = [0; 2];
    stream.read_exact(&mut length).await.map_err(|e| e.to_string())?;
    let length = usize::from(u16::from_le_bytes(length));
    if length > MAX_HEADER {
        return Err(format!("a header of {length} bytes"));
    }
    let mut text = vec![0; length];
    stream.read_exact(&mut text).await.map_err(|e| e.to_string())?;
    serde_json::from_slice(&text).map_err(printable)
}

impl RouteRequest {
    pub(crate) async fn send(&self, stream: &mut SendStream) -> Result<(), String> {
        let Self { from, target, service, directions } = self.clone();
        send_header(stream, &RequestFrame { from, target, service, directions: directions.bits() }).await
    }

    /// Receives a request. Its names are names.
    pub(crate) async fn receive(stream: &mut RecvStream) -> Result<Self, String> {
        let RequestFrame { from, target, service, directions } = receive_header(stream).await?;
        for name in [&from, &target, &service] {
            Name::new(name).map_err(printable)?;
        }
        let directions = Directions::from_bits(directions).ok_or("a stream without a direction")?;
        Ok(Self { from, target, service, directions })
    }
}

/// Answers a request.
pub(crate) async fn send_answer(stream: &mut SendStream, answer: &Result<(), RemoteRefusal>) -> Result<(), String> {
    let frame = match answer {
        Ok(()) => AnswerFrame { code: 0, reason: String::new() },
        Err(RemoteRefusal { code, reason }) => {
            AnswerFrame { code: code.number(), reason: reason.chars().take(300).collect() }
        }
    };
    send_header(stream, &frame).await
}

/// Receives the answer to a request.
pub(crate) async fn receive_answer(stream: &mut RecvStream) -> Result<Result<(), RemoteRefusal>, String> {
    let AnswerFrame { code, reason } = receive_header(stream).await?;
    if code == 0 {
        return Ok(Ok(()));
    }
    Ok(Err(refusal_of(code, &reason)))
}

/// Text with words of another host, for a terminal or a log of this host.
pub(crate) fn printable(text: impl std::fmt::Display) -> String {
    text.to_string().chars().filter(|c| !c.is_control()).take(300).collect()
}

/// The refusal of another host.
fn refusal_of(code: u16, reason: &str) -> RemoteRefusal {
    let code = Refusal::from_number(code).unwrap_or(Refusal::OutOfResources);
    RemoteRefusal { code, reason: printable(reason) }
}

/// A piece of a stream.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum StreamPiece {
    /// This many bytes follow.
    Bytes(usize),
    /// The writer has ended the stream in order.
    Ended,
    /// The writer has died.
    Died,
}

impl StreamPiece {
    /// The bytes before a piece.
    pub(crate) fn header(&self) -> [u8; 4] {
        match self {
            // Pieces are far smaller than this type's range.
            Self::Bytes(length) => u32::try_from(*length).unwrap_or(DIED),
            Self::Ended => ENDED,
            Self::Died => DIED,
        }
        .to_le_bytes()
    }

    /// Reads what [`Self::header`] makes. A piece that is too long is the peer's fault, and ends the stream as dead.
    pub(crate) fn parse(header: [u8; 4]) -> Self {
        match u32::from_le_bytes(header) {
            ENDED => Self::Ended,
            length if length as usize <= MAX_PIECE => Self::Bytes(length as usize),
            _ => Self::Died,
        }
    }
}

/// A part of a stream, as it has come from another host.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum PiecePart<'a> {
    /// Bytes of a piece.
    Bytes(&'a [u8]),
    /// The writer has ended the stream in order.
    Ended,
    /// The writer has died.
    Died,
}

/// Takes pieces apart where they lie. Chunks of a stream begin and end anywhere, also within the header of a piece.
#[derive(Debug, Default)]
pub(crate) struct PieceReader {
    header: [u8; 4],
    /// The bytes of the header that have come.
    known: usize,
    /// The bytes of the present piece that have not come.
    left: usize,
}

impl PieceReader {
    /// Takes the next part from the front of `came`. `None` when the rest of a header or of a piece has yet to come.
    pub(crate) fn next<'a>(&mut self, came: &mut &'a [u8]) -> Option<PiecePart<'a>> {
        while !came.is_empty() {
            if self.left > 0 {
                let bytes = came.split_off(..self.left.min(came.len()))?;
                self.left -= bytes.len();
                return Some(PiecePart::Bytes(bytes));
            }
            let part = came.split_off(..came.len().min(self.header.len() - self.known))?;
            self.header[self.known..self.known + part.len()].copy_from_slice(part);
            self.known += part.len();
            if self.known < self.header.len() {
                return None;
            }
            self.known = 0;
            match StreamPiece::parse(self.header) {
                StreamPiece::Bytes(length) => self.left = length,
                StreamPiece::Ended => return Some(PiecePart::Ended),
                StreamPiece::Died => return Some(PiecePart::Died),
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_of_refusal_are_removed() {
        let refusal = refusal_of(5, "no\u{1b}[2J\nmore");
        assert_eq!((refusal.code, refusal.reason.as_str()), (Refusal::Denied, "no[2Jmore"));
        assert_eq!(refusal_of(60_000, &"x".repeat(1000)).reason.len(), 300);
        assert_eq!(refusal_of(60_000, "").code, Refusal::OutOfResources);
    }

    /// The bytes of a stream and whether it has ended in order, in whatever chunks it comes.
    fn taken_apart<'a>(chunks: impl Iterator<Item = &'a [u8]>) -> (Vec<u8>, Option<bool>) {
        let (mut reader, mut bytes) = (PieceReader::default(), Vec::new());
        for mut chunk in chunks {
            while let Some(part) = reader.next(&mut chunk) {
                match part {
                    PiecePart::Bytes(more) => bytes.extend(more),
                    PiecePart::Ended => return (bytes, Some(true)),
                    PiecePart::Died => return (bytes, Some(false)),
                }
            }
        }
        (bytes, None)
    }

    #[test]
    fn pieces_are_same_in_chunks_of_any_size() {
        let mut wire = Vec::new();
        let pieces: [&[u8]; 4] = [b"a", b"hello", &[7; 300], b"bc"];
        for piece in pieces {
            wire.extend(StreamPiece::Bytes(piece.len()).header());
            wire.extend(piece);
        }
        let bytes = pieces.concat();
        for (end, expected) in
            [(None, None), (Some(StreamPiece::Ended), Some(true)), (Some(StreamPiece::Died), Some(false))]
        {
            let mut wire = wire.clone();
            wire.extend(end.iter().flat_map(StreamPiece::header));
            for size in 1..=wire.len() {
                assert_eq!(taken_apart(wire.chunks(size)), (bytes.clone(), expected), "chunks of {size}");
            }
        }
    }

    #[test]
    fn piece_that_is_too_long_ends_stream_as_dead() {
        let wire = u32::try_from(MAX_PIECE + 1).unwrap().to_le_bytes();
        assert_eq!(taken_apart(wire.chunks(3)), (Vec::new(), Some(false)));
    }

    #[test]
    fn piece_headers_round_trip_and_long_pieces_are_dead() {
        for piece in [StreamPiece::Bytes(1), StreamPiece::Bytes(MAX_PIECE), StreamPiece::Ended, StreamPiece::Died] {
            assert_eq!(StreamPiece::parse(piece.header()), piece);
        }
        assert_eq!(StreamPiece::parse(StreamPiece::Bytes(MAX_PIECE + 1).header()), StreamPiece::Died);
    }
}
