//! The control messages between a client and the broker (protocol C): their types, and nothing that sends them.
//!
//! **One job.** Encode a [`Message`] as the bytes of one packet, and decode a packet from an untrusted sender into a [`Message`] or a
//! [`WireError`]. Both ends of the control socket use this module, so they cannot disagree.
//!
//! One table, in `message`, defines all numbers and field positions. The broker and the library use the allocating form ([`Message`]).
//! Code that runs inside other programs must not allocate, and uses the same messages as they lie in a packet ([`BorrowedMessage`]).
//!
//! No system calls, no unsafe code.
//!
//! ```text
//!  0        2        4                 8
//!  +--------+--------+-----------------+----------------------------------+
//!  | 0x5057 |  kind  |     request     | the fields of this kind in order |   at most 4096 bytes
//!  +--------+--------+-----------------+----------------------------------+
//!    integer: little-endian    string: u16 length, UTF-8 without NUL    bool: 0 or 1    nothing may follow the last field
//! ```
//!
//! What decoding proves: the packet is exactly one message of [`VERSION`], every enumeration is in range, every string is UTF-8
//! without NUL. It does not prove that a name is a [`Name`], that a [`RegionReference`] describes a possible region, or that the sender
//! may ask for it.
//! Decoding allocates no more than a small multiple of the packet's own length, whatever the packet claims.

pub(crate) mod codec;
mod declare;
mod descriptors;
mod message;
mod name;
mod packet;
mod page;
mod region;
pub(crate) mod table;
mod text;
mod user;
mod values;

#[cfg(test)]
mod strategies;
#[cfg(test)]
mod tests;

pub use codec::WireError;
pub use message::{BorrowedMessage, Message, MessageKind};
pub use name::{Name, NameError};
pub use packet::{decode, decode_borrowed, encode, encode_into, request_of};
pub use page::{BorrowedPage, ChannelRow, DomainRow, EventRow, GroupRow, MachineRow, NameRow, Page, ServiceRow};
pub use region::{Located, RegionReference, Within};
pub use text::{AddressList, BorrowedAddresses, BorrowedText, Text};
pub use user::{MachineId, Origin, User};
pub use values::{
    BellWay, Directions, EventKind, Kind, Mobility, NameNews, PluggedAs, PolicyQuestion, Refusal, RungBy, Side, What,
};

/// The largest control packet in bytes (protocol C1).
pub const MAX_PACKET: usize = 4096;

/// The version of the protocol that this code speaks; `Join` carries it. It changes with the messages (protocol C4.2).
pub const VERSION: u16 = 4;

/// The first two bytes of every packet: `WP` in memory, `0x5057` as an integer.
pub const MAGIC: u16 = 0x5057;

/// Bytes of the header before the fields.
pub const HEADER: usize = 8;

/// The longest string that [`encode`] writes; it cuts longer ones, so that every encoded message fits a packet.
///
/// Far above the 64 bytes of a name, so a name that was cut is still refused as too long and never mistaken for another.
pub const MAX_STRING: usize = 512;
