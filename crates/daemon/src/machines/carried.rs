//! How a packet of a guest's program goes from the thread at the machine's port to the event loop, with what the machine's kernel says of the
//! socket that the packet brings.
//!
//! ```text
//!   length of the facts u16 (0: no socket), facts (protocol G6), packet (protocol C1)
//!   or [`GONE`]
//! ```
//!
//! A packet for such a program goes back as `number u64, packet`. The numbers rise in the order in which the event loop has sent packets to
//! programs of machines.

use partywall_protocol::socket::SocketFacts;
use partywall_protocol::wire;

/// The marker that is sent last when no process of the guest has the session any more. It is longer than any facts.
pub(crate) const GONE: [u8; 2] = u16::MAX.to_le_bytes();

/// Bytes before and between.
const LENGTH: usize = size_of::<u16>();

/// As it goes to the event loop.
pub(crate) fn encode(socket: Option<&SocketFacts>, packet: &[u8]) -> Vec<u8> {
    let facts = socket.map(SocketFacts::encode).unwrap_or_default();
    // They are some hundred bytes.
    [&(facts.len() as u16).to_le_bytes(), &facts[..], packet].concat()
}

/// The socket and the packet. `None` if it makes no sense, which a thread of this program does not say.
pub(crate) fn decode(bytes: &[u8]) -> Option<(Option<SocketFacts>, &[u8])> {
    let (length, rest) = bytes.split_first_chunk::<LENGTH>()?;
    let (facts, packet) = rest.split_at_checked(u16::from_le_bytes(*length).into())?;
    let socket = if facts.is_empty() { None } else { Some(SocketFacts::decode(facts).ok()?) };
    Some((socket, packet))
}

/// Bytes of the number.
pub(crate) const NUMBER: usize = size_of::<u64>();

/// The largest packet with its number.
pub(super) const MAX_NUMBERED: usize = NUMBER + wire::MAX_PACKET;

/// Puts the number before a packet for a program of a machine.
pub(crate) fn number(number: u64, packet: &mut Vec<u8>) {
    packet.splice(..0, number.to_le_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::tests::sockets::listening;

    #[test]
    fn carried_packet_has_its_socket_or_none() {
        let facts = listening("10.0.0.1:7");
        for socket in [None, Some(facts)] {
            assert_eq!(decode(&encode(socket.as_ref(), b"packet")), Some((socket, &b"packet"[..])));
        }
        for bad in [&[][..], &[1], &[3, 0, 1, 1], &[1, 0, 9, 9]] {
            assert_eq!(decode(bad), None, "{bad:?}");
        }
    }
}
