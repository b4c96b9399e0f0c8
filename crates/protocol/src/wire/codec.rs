//! Bytes in, bytes out: the header, the primitive fields, and the one way in which a packet can be wrong.

use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::fmt;

use super::{HEADER, MAGIC, MAX_PACKET, MAX_STRING, Message};

/// Why a packet is not a message. Always the sender's fault.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum WireError {
    /// Longer than [`MAX_PACKET`].
    TooLong(usize),
    /// It ends inside its header or one of its fields.
    Truncated(&'static str),
    /// The first two bytes are not [`MAGIC`]: this is no Partywall packet at all.
    Magic(u16),
    /// No message has this kind.
    Kind(u16),
    /// A field holds a value that its type does not have.
    Value {
        /// The type of the field.
        field: &'static str,
        /// What was found there.
        value: u64,
    },
    /// A string is not UTF-8, or has a NUL in it.
    Text,
    /// Bytes follow the last field.
    Trailing(usize),
}

impl fmt::Display for WireError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooLong(n) => write!(f, "the packet has {n} bytes, and may have at most {MAX_PACKET}"),
            Self::Truncated(what) => write!(f, "the packet ends inside {what}"),
            Self::Magic(found) => write!(f, "the packet begins with {found:#06x}, not with {MAGIC:#06x}"),
            Self::Kind(kind) => write!(f, "message kind {kind} is unknown"),
            Self::Value { field, value } => write!(f, "{field} cannot be {value}"),
            Self::Text => f.write_str("a string is not UTF-8 without NUL"),
            Self::Trailing(n) => write!(f, "{n} bytes follow the last field"),
        }
    }
}

impl core::error::Error for WireError {}

impl WireError {
    /// Whether nothing in the packet can be believed, not even its request number: the session should end (protocol C4).
    pub fn breaks_framing(&self) -> bool {
        matches!(self, Self::TooLong(_) | Self::Magic(_) | Self::Truncated("the header"))
    }
}

/// Replaces what is in `out` by the packet that says `message`, at most [`MAX_PACKET`] bytes.
///
/// Never fails: a string over [`MAX_STRING`] is cut, and a [`Page`](super::Page) takes the rows that fit and says `more`.
pub fn encode(request: u32, message: &Message, out: &mut Vec<u8>) {
    out.clear();
    MAGIC.put(out);
    message.kind().put(out);
    request.put(out);
    message.put_fields(out);
    debug_assert!(out.len() <= MAX_PACKET);
}

/// Reads one packet: its request number and its message.
///
/// # Errors
/// [`WireError`] when the packet is anything but exactly one well-formed message.
pub fn decode(packet: &[u8]) -> Result<(u32, Message), WireError> {
    if packet.len() > MAX_PACKET {
        return Err(WireError::TooLong(packet.len()));
    }
    if packet.len() < HEADER {
        return Err(WireError::Truncated("the header"));
    }
    let mut reader = Reader(packet);
    let magic = u16::take(&mut reader)?;
    if magic != MAGIC {
        return Err(WireError::Magic(magic));
    }
    let kind = u16::take(&mut reader)?;
    let request = u32::take(&mut reader)?;
    let message = Message::take_fields(kind, &mut reader)?;
    match reader.remaining() {
        0 => Ok((request, message)),
        n => Err(WireError::Trailing(n)),
    }
}

/// The request number of a packet whose header is sound, though its fields may not be: so that a refusal can repeat it.
pub fn request_of(packet: &[u8]) -> Option<u32> {
    let mut reader = Reader(packet.get(..HEADER)?);
    let magic = u16::take(&mut reader).ok()?;
    let _kind = u16::take(&mut reader).ok()?;
    let request = u32::take(&mut reader).ok()?;
    (magic == MAGIC).then_some(request)
}

/// What has not been read of a packet yet.
pub(super) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    pub(super) fn remaining(&self) -> usize {
        self.0.len()
    }

    pub(super) fn bytes(&mut self, n: usize, what: &'static str) -> Result<&'a [u8], WireError> {
        let (head, tail) = self.0.split_at_checked(n).ok_or(WireError::Truncated(what))?;
        self.0 = tail;
        Ok(head)
    }
}

/// A value with one representation on the wire.
pub(super) trait Field: Sized {
    /// The fewest bytes that a value takes: bounds what a claimed count may reserve.
    const MIN: usize;
    fn put(&self, out: &mut Vec<u8>);
    fn take(reader: &mut Reader<'_>) -> Result<Self, WireError>;
}

macro_rules! integers {
    ($($t:ty),*) => {$(
        impl Field for $t {
            const MIN: usize = size_of::<$t>();
            fn put(&self, out: &mut Vec<u8>) {
                out.extend_from_slice(&self.to_le_bytes());
            }
            fn take(reader: &mut Reader<'_>) -> Result<Self, WireError> {
                let mut bytes = [0; size_of::<$t>()];
                bytes.copy_from_slice(reader.bytes(size_of::<$t>(), stringify!($t))?);
                Ok(<$t>::from_le_bytes(bytes))
            }
        }
    )*};
}
integers!(u8, u16, u32, u64);

impl Field for bool {
    const MIN: usize = 1;
    fn put(&self, out: &mut Vec<u8>) {
        u8::from(*self).put(out);
    }
    fn take(reader: &mut Reader<'_>) -> Result<Self, WireError> {
        match u8::take(reader)? {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(WireError::Value { field: "bool", value: other.into() }),
        }
    }
}

impl Field for String {
    const MIN: usize = 2;
    fn put(&self, out: &mut Vec<u8>) {
        let mut end = self.len().min(MAX_STRING);
        while !self.is_char_boundary(end) {
            end -= 1;
        }
        // `end` is at most MAX_STRING, so the cast keeps it.
        (end as u16).put(out);
        out.extend_from_slice(&self.as_bytes()[..end]);
    }
    fn take(reader: &mut Reader<'_>) -> Result<Self, WireError> {
        let length = u16::take(reader)?;
        let bytes = reader.bytes(length.into(), "a string")?;
        match core::str::from_utf8(bytes) {
            Ok(text) if !bytes.contains(&0) => Ok(text.to_string()),
            _ => Err(WireError::Text),
        }
    }
}
