//! One packet: its header, and the message in it.
//!
//! There is one encoder and one decoder, and neither allocates. [`encode_into`] writes to memory of the caller, [`decode_borrowed`]
//! returns a message whose texts and lists lie in the packet. [`encode`] and [`decode`] are these two with a [`Message`] that owns
//! what it says.

use alloc::vec::Vec;

use super::codec::{PacketReader, PacketWriter, Put, Take as _, WireError};
use super::message::{BorrowedMessage, Message, MessageKind};
use super::{HEADER, MAGIC, MAX_PACKET};

/// Replaces what is in `out` by the packet that says `message`, at most [`MAX_PACKET`] bytes.
///
/// Never fails: a string over [`MAX_STRING`](super::MAX_STRING) is cut, and a [`Page`](super::Page) takes the rows that fit and says `more`.
pub fn encode(request: u32, message: &Message, out: &mut Vec<u8>) {
    out.clear();
    out.resize(MAX_PACKET, 0);
    let mut writer = PacketWriter::new(out);
    write(request, message.kind(), message, &mut writer);
    debug_assert!(!writer.is_overfull(), "{} does not fit a packet", message.name());
    let len = writer.len();
    out.truncate(len);
}

/// Writes the packet that says `message` to the beginning of `memory`, without allocating. `None` if it does not fit.
pub fn encode_into<'a>(request: u32, message: &BorrowedMessage<'_>, memory: &'a mut [u8]) -> Option<&'a [u8]> {
    let mut writer = PacketWriter::new(memory);
    write(request, message.kind(), message, &mut writer);
    let len = (!writer.is_overfull()).then_some(writer.len())?;
    memory.get(..len)
}

fn write(request: u32, kind: u16, fields: &impl Put, out: &mut PacketWriter<'_>) {
    MAGIC.put(out);
    kind.put(out);
    request.put(out);
    fields.put(out);
}

/// Reads one packet: its request number and its message.
///
/// # Errors
/// [`WireError`] when the packet is anything but exactly one well-formed message.
pub fn decode(packet: &[u8]) -> Result<(u32, Message), WireError> {
    let (request, message) = decode_borrowed(packet)?;
    Ok((request, Message::own(message)))
}

/// As [`decode`], without allocating: the message's texts and lists lie in the packet.
///
/// # Errors
/// The same as those of [`decode`].
pub fn decode_borrowed(packet: &[u8]) -> Result<(u32, BorrowedMessage<'_>), WireError> {
    if packet.len() > MAX_PACKET {
        return Err(WireError::TooLong(packet.len()));
    }
    if packet.len() < HEADER {
        return Err(WireError::Truncated("the header"));
    }
    let mut reader = PacketReader::new(packet);
    let magic = u16::take(&mut reader)?;
    if magic != MAGIC {
        return Err(WireError::Magic(magic));
    }
    let kind = u16::take(&mut reader)?;
    let request = u32::take(&mut reader)?;
    let message = BorrowedMessage::take_fields(kind, &mut reader)?;
    match reader.remaining() {
        0 => Ok((request, message)),
        n => Err(WireError::Trailing(n)),
    }
}

/// The request number of a packet whose header is sound, though its fields may not be: so that a refusal can repeat it.
pub fn request_of(packet: &[u8]) -> Option<u32> {
    let mut reader = PacketReader::new(packet.get(..HEADER)?);
    let magic = u16::take(&mut reader).ok()?;
    let _kind = u16::take(&mut reader).ok()?;
    let request = u32::take(&mut reader).ok()?;
    (magic == MAGIC).then_some(request)
}

impl MessageKind {
    /// Bytes of the longest packet with a message of any of these kinds.
    pub const fn longest_of(kinds: &[Self]) -> usize {
        let (mut longest, mut at) = (0, 0);
        while at < kinds.len() {
            let bytes = kinds[at].longest();
            longest = if bytes > longest { bytes } else { longest };
            at += 1;
        }
        longest
    }
}
