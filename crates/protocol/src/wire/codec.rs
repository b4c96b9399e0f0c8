//! Bytes in, bytes out: the primitive fields, and the one way in which a packet can be wrong. Nothing here allocates, except where a field
//! owns what it says.

use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::fmt;
use core::num::NonZeroU64;

use super::{MAGIC, MAX_PACKET, MAX_STRING};
use partywall_shm::layout::Geometry;

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
    Kind(u32),
    /// A field holds a value that its type does not have.
    Value {
        /// The type of the field.
        field: &'static str,
        /// The value in the packet.
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
    /// Whether no value of the packet can be trusted, not even its request number: the session should end (protocol C4).
    pub fn breaks_framing(&self) -> bool {
        matches!(self, Self::TooLong(_) | Self::Magic(_) | Self::Truncated("the header"))
    }
}

/// Appends what `message` says to a stream.
pub(crate) fn append(message: &impl Put, out: &mut Vec<u8>) {
    let mut measured = PacketWriter::new(&mut []);
    message.put(&mut measured);
    let begin = out.len();
    out.resize(begin + measured.len(), 0);
    message.put(&mut PacketWriter::new(&mut out[begin..]));
}

/// Reads what must be there.
pub(crate) fn take_constant<'a, T>(reader: &mut PacketReader<'a>, constant: T) -> Result<(), WireError>
where
    T: Take<'a> + Into<u64> + PartialEq,
{
    let value = T::take(reader)?;
    if value == constant { Ok(()) } else { Err(WireError::Value { field: "what is reserved", value: value.into() }) }
}

/// The part of a packet that has not been read yet.
#[derive(Debug)]
pub struct PacketReader<'a>(&'a [u8]);

impl<'a> PacketReader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    pub(crate) fn remaining(&self) -> usize {
        self.0.len()
    }

    /// All bytes that have not been read.
    pub(super) fn rest(&self) -> &'a [u8] {
        self.0
    }

    pub(crate) fn bytes(&mut self, n: usize, what: &'static str) -> Result<&'a [u8], WireError> {
        let (head, tail) = self.0.split_at_checked(n).ok_or(WireError::Truncated(what))?;
        self.0 = tail;
        Ok(head)
    }
}

/// A packet that is being written to memory of the caller. It counts what does not fit, and does not write it.
#[derive(Debug)]
pub struct PacketWriter<'a> {
    memory: &'a mut [u8],
    len: usize,
}

impl<'a> PacketWriter<'a> {
    pub(crate) fn new(memory: &'a mut [u8]) -> Self {
        Self { memory, len: 0 }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn is_overfull(&self) -> bool {
        self.len > self.memory.len()
    }

    pub(crate) fn bytes(&mut self, bytes: &[u8]) {
        let end = self.len.saturating_add(bytes.len());
        if let Some(place) = self.memory.get_mut(self.len..end) {
            place.copy_from_slice(bytes);
        }
        self.len = end;
    }

    /// Goes back to where [`len`](Self::len) was `len`.
    pub(super) fn rewind(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Writes over what was written at `at`.
    pub(super) fn patch(&mut self, at: usize, bytes: &[u8]) {
        if let Some(place) = self.memory.get_mut(at..at + bytes.len()) {
            place.copy_from_slice(bytes);
        }
    }
}

/// A value that can be written to a packet.
pub trait Put {
    /// Appends the value.
    fn put(&self, out: &mut PacketWriter<'_>);
}

/// A value that is read from a packet without allocating; what it says lies in the packet.
pub trait Take<'a>: Put + Sized {
    /// The fewest bytes that a value takes: bounds what a claimed count may reserve.
    const MIN: usize;
    /// Reads the value and checks it.
    fn take(reader: &mut PacketReader<'a>) -> Result<Self, WireError>;
}

/// The type of a field of [`Message`](super::Message): a value that owns what it says, and has one representation on the wire.
pub trait Field: Put + Sized {
    /// The type of the field in [`BorrowedMessage`](super::BorrowedMessage), while the value lies in a packet.
    type Borrowed<'a>: Take<'a>;
    /// The most bytes that a value takes: what a field of fixed size takes, unless its type says otherwise.
    const MAX: usize = <Self::Borrowed<'static> as Take<'static>>::MIN;
    /// Copies the value out of a packet.
    fn own(borrowed: Self::Borrowed<'_>) -> Self;
    /// Appends the field as the tables of docs/protocol.md spell it, which a test compares with the code.
    #[cfg(test)]
    fn spell(name: &str, out: &mut String);
}

/// The type of a field that a message itself holds in either case.
macro_rules! plain_field {
    ($($t:ty, $spelled:expr;)*) => {$(
        impl $crate::wire::codec::Field for $t {
            type Borrowed<'a> = Self;
            fn own(borrowed: Self) -> Self {
                borrowed
            }
            #[cfg(test)]
            fn spell(name: &str, out: &mut alloc::string::String) {
                out.push_str(&str::replace($spelled, "{name}", name));
            }
        }
    )*};
}
pub(super) use plain_field;

macro_rules! integers {
    ($($t:ty),*) => {$(
        impl Put for $t {
            fn put(&self, out: &mut PacketWriter<'_>) {
                out.bytes(&self.to_le_bytes());
            }
        }
        impl<'a> Take<'a> for $t {
            const MIN: usize = size_of::<$t>();
            fn take(reader: &mut PacketReader<'a>) -> Result<Self, WireError> {
                let mut bytes = [0; size_of::<$t>()];
                bytes.copy_from_slice(reader.bytes(size_of::<$t>(), stringify!($t))?);
                Ok(<$t>::from_le_bytes(bytes))
            }
        }
    )*};
}
integers!(u8, u16, u32, u64, u128);
plain_field! { u8, "{name} u8"; u16, "{name} u16"; u32, "{name} u32"; u64, "{name} u64"; bool, "{name} bool"; }

impl Put for bool {
    fn put(&self, out: &mut PacketWriter<'_>) {
        u8::from(*self).put(out);
    }
}

impl<'a> Take<'a> for bool {
    const MIN: usize = 1;
    fn take(reader: &mut PacketReader<'a>) -> Result<Self, WireError> {
        match u8::take(reader)? {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(WireError::Value { field: "bool", value: other.into() }),
        }
    }
}

/// `0`, or `1` and the value.
impl<T: Put> Put for Option<T> {
    fn put(&self, out: &mut PacketWriter<'_>) {
        self.is_some().put(out);
        self.iter().for_each(|value| value.put(out));
    }
}

impl<'a, T: Take<'a>> Take<'a> for Option<T> {
    const MIN: usize = bool::MIN;
    fn take(reader: &mut PacketReader<'a>) -> Result<Self, WireError> {
        bool::take(reader)?.then(|| T::take(reader)).transpose()
    }
}

impl Put for NonZeroU64 {
    fn put(&self, out: &mut PacketWriter<'_>) {
        self.get().put(out);
    }
}

impl<'a> Take<'a> for NonZeroU64 {
    const MIN: usize = size_of::<u64>();
    fn take(reader: &mut PacketReader<'a>) -> Result<Self, WireError> {
        Self::new(u64::take(reader)?).ok_or(WireError::Value { field: "what is not 0", value: 0 })
    }
}

/// `ring_offset u64, ring_size u64`, of which there can be a ring.
impl Put for Geometry {
    fn put(&self, out: &mut PacketWriter<'_>) {
        self.ring_offset().put(out);
        self.ring_size().put(out);
    }
}

impl<'a> Take<'a> for Geometry {
    const MIN: usize = 2 * size_of::<u64>();
    fn take(reader: &mut PacketReader<'a>) -> Result<Self, WireError> {
        let (offset, size) = (u64::take(reader)?, u64::take(reader)?);
        Self::new(offset, size).map_err(|_| WireError::Value { field: "the size of a ring", value: size })
    }
}

/// Bytes up to the end of the packet: the last field of a message, without a length.
impl Put for Vec<u8> {
    fn put(&self, out: &mut PacketWriter<'_>) {
        out.bytes(self);
    }
}

impl<'a> Take<'a> for Vec<u8> {
    const MIN: usize = 0;
    fn take(reader: &mut PacketReader<'a>) -> Result<Self, WireError> {
        let all = reader.remaining();
        Ok(reader.bytes(all, "bytes")?.to_vec())
    }
}

impl Put for &str {
    fn put(&self, out: &mut PacketWriter<'_>) {
        put_text(self, MAX_STRING, out);
    }
}

impl<'a> Take<'a> for &'a str {
    const MIN: usize = 2;
    fn take(reader: &mut PacketReader<'a>) -> Result<Self, WireError> {
        let length = u16::take(reader)?;
        take_text(length, "a string", reader)
    }
}

impl Put for String {
    fn put(&self, out: &mut PacketWriter<'_>) {
        self.as_str().put(out);
    }
}

impl Field for String {
    type Borrowed<'a> = &'a str;
    const MAX: usize = size_of::<u16>() + MAX_STRING;
    fn own(borrowed: &str) -> Self {
        borrowed.to_string()
    }
    #[cfg(test)]
    fn spell(name: &str, out: &mut String) {
        out.push_str(&alloc::format!("{name} string"));
    }
}

/// Writes a length and a text, of which at most `max` bytes, cut between characters. `max` is far below 2^16.
pub(super) fn put_text(text: &str, max: usize, out: &mut PacketWriter<'_>) {
    let mut end = text.len().min(max);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    (end as u16).put(out);
    out.bytes(&text.as_bytes()[..end]);
}

/// Reads a text of this length.
pub(super) fn take_text<'a>(
    length: u16,
    what: &'static str,
    reader: &mut PacketReader<'a>,
) -> Result<&'a str, WireError> {
    let bytes = reader.bytes(length.into(), what)?;
    match core::str::from_utf8(bytes) {
        Ok(text) if !bytes.contains(&0) => Ok(text),
        _ => Err(WireError::Text),
    }
}
