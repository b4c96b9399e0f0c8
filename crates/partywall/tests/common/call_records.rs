//! Records of calls, for peers that send what no library would. They speak through a message socket: a message of 56 bytes is a record whose
//! words are theirs.

use partywall::{Options, RingSize};

// The kinds of records (protocol K3), and the flag of one that refers to a heap.
pub(crate) const HELLO: u64 = 1;
pub(crate) const CALL: u64 = 2;
pub(crate) const NOTICE: u64 = 3;
pub(crate) const REPLY: u64 = 4;
pub(crate) const RELEASE: u64 = 5;
pub(crate) const SEGMENT: u64 = 6;
pub(crate) const BY_REFERENCE: u64 = 1 << 8;

/// The words of a record behind its stamp.
pub(crate) fn record(kind: u64, id: u32, method: u32, payload: &[u64]) -> Vec<u8> {
    let mut words = vec![u64::from(id) | u64::from(method) << 32, kind];
    words.extend(payload);
    words.resize(7, 0);
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// The first record of a client that takes no calls, and of a server.
pub(crate) fn hello() -> Vec<u8> {
    record(HELLO, 0, 1, &[])
}

/// Options of the channel, whose ring is as large as that of a connection of calls.
pub(crate) fn options() -> Options {
    Options::default().ring(RingSize::Fixed(1 << 16))
}
