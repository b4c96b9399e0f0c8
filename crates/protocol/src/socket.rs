//! The facts about a socket that a program shows (protocol T3), as they travel to the broker from the process that asked the kernel.
//!
//! On the host a process of the broker asks, in a virtual machine the machine's agent (protocol G6). The broker's core trusts these facts
//! as far as it trusts that process: a machine is trusted about its own sockets only.

use core::fmt;
use core::net::{IpAddr, SocketAddr};

use crate::directory::Transport;
use crate::wire::codec::{PacketReader, PacketWriter, Put, Take, append};
use crate::wire::{Origin, WireError};
use alloc::vec::Vec;
use partywall_shm::address::{narrow, wide};
use partywall_shm::numbered;

/// The facts about a TCP or UDP socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SocketFacts {
    /// The machine whose kernel has the socket. It is not part of the encoding: the broker knows which machine sent the facts.
    pub origin: Origin,
    /// Its own end.
    pub local: SocketAddr,
    /// The other end, if it is connected.
    pub remote: Option<SocketAddr>,
    /// TCP, or UDP.
    pub transport: Transport,
    /// The state of the socket. A UDP socket that has a port counts as listening.
    pub state: SocketState,
    /// It is an IPv6 socket that takes no IPv4.
    pub only_v6: bool,
    /// Its own number, which no other socket of its kernel has until the next boot (`SO_COOKIE`).
    pub cookie: u64,
    /// Its network namespace's number, likewise (`SO_NETNS_COOKIE`).
    pub netns: u64,
    /// The namespace belongs to the user namespace of the broker or agent: only who could do anything to that one made it.
    pub trusted: bool,
    /// Bytes of it that the peer's kernel has acknowledged.
    pub acknowledged: u64,
    /// Bytes that have come.
    pub received: u64,
    /// Bytes that have gone out, those sent again counted again.
    pub sent: u64,
    /// Further values that identify the other end.
    pub identity: Identity,
}

/// A network namespace of some machine. Two kernels number theirs alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NamespaceId {
    /// The kernel that the namespace belongs to.
    pub origin: Origin,
    /// Its number there.
    pub cookie: u64,
}

/// A socket of some machine, likewise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SocketId {
    /// The kernel that the socket belongs to.
    pub origin: Origin,
    /// Its number there.
    pub cookie: u64,
}

impl SocketFacts {
    /// Its network namespace.
    pub fn namespace(&self) -> NamespaceId {
        NamespaceId { origin: self.origin, cookie: self.netns }
    }

    /// The socket itself.
    pub fn id(&self) -> SocketId {
        SocketId { origin: self.origin, cookie: self.cookie }
    }

    /// Whether this is the socket that was shown `earlier`, established now, with the ends that it had then.
    ///
    /// The cookie alone does not say that: `connect` with `AF_UNSPEC` and again makes another connection of the same socket.
    pub fn is_still(&self, earlier: &Self) -> bool {
        let name = |facts: &Self| (facts.id(), facts.namespace(), facts.local, facts.remote);
        let same_numbers = match (self.identity.numbers, earlier.identity.numbers) {
            (Some(now), Some(then)) => now == then,
            // They could not be read once.
            _ => true,
        };
        self.state == SocketState::Established && name(self) == name(earlier) && same_numbers
    }

    /// Whether this is a UDP socket that may have flows, alone at its address or in a group.
    pub fn may_have_flows(&self) -> bool {
        self.transport == Transport::Udp && matches!(self.state, SocketState::Listening | SocketState::Grouped)
    }

    /// As it travels.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        append(self, &mut out);
        out
    }

    /// Reads what [`encode`](Self::encode) wrote.
    ///
    /// # Errors
    /// [`WireError`] if it is anything else.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let mut reader = PacketReader::new(bytes);
        let facts = Self::take(&mut reader)?;
        match reader.remaining() {
            0 => Ok(facts),
            more => Err(WireError::Trailing(more)),
        }
    }
}

/// The values that identify the other end of a connection, besides its addresses (protocol T5).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Identity {
    /// The socket is bound to a device. The kernel lets an unbound socket of the namespace have the same two ends.
    pub bound_to_device: bool,
    /// The kernel tracks the connection, and so may translate its addresses: another socket can have the ends that the translated
    /// peer seems to have.
    pub tracked: bool,
    /// The sequence numbers that it began with, if the process that asked may read them.
    pub numbers: Option<Numbers>,
}

/// The sequence numbers of the first byte each way. No two connections of a host have the same 64 bits, and no user can read those of
/// another user's connection. So they are never logged.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Numbers {
    /// As the kernel counts what was acknowledged: that of the SYN for the side that connected, of the first byte for the other.
    pub sent_from: u32,
    /// The sequence number of the first received byte.
    pub received_from: u32,
}

impl Numbers {
    /// The numbers of the accepting side, if these are the connecting side's: the first byte that each side sent is the first byte that
    /// the other side received (protocol T5.5).
    #[must_use]
    pub const fn seen_by_accepting_side(self) -> Self {
        Self { sent_from: self.received_from, received_from: self.sent_from.wrapping_add(1) }
    }
}

impl fmt::Debug for Numbers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Numbers(not shown)")
    }
}

numbered! {
    /// As much of TCP's states as matters here.
    SocketState: u8 {
        /// It takes connections.
        Listening = 1 "listening",
        /// It carries bytes both ways.
        Established = 2 "established",
        /// The peer has ended its direction (CLOSE_WAIT).
        HalfClosed = 3 "half-closed",
        /// Any other state.
        Other = 4 "in another state",
        /// A UDP socket that has a port, and lets others of its user have it too (`SO_REUSEPORT`).
        Grouped = 5 "in a group",
    }
}

/// Protocol G6: the facts in the order of their table, an address as 16 bytes and a port.
impl Put for SocketFacts {
    fn put(&self, out: &mut PacketWriter<'_>) {
        (self.transport as u8).put(out);
        (self.state as u8).put(out);
        WireAddress(self.local).put(out);
        self.remote.map(WireAddress).put(out);
        self.only_v6.put(out);
        self.cookie.put(out);
        self.netns.put(out);
        self.trusted.put(out);
        self.acknowledged.put(out);
        self.received.put(out);
        self.sent.put(out);
        self.identity.bound_to_device.put(out);
        self.identity.tracked.put(out);
        self.identity.numbers.put(out);
    }
}

impl<'a> Take<'a> for SocketFacts {
    const MIN: usize = 2 + WireAddress::MIN + 1 + 1 + 16 + 1 + 24 + 2 + 1;
    fn take(reader: &mut PacketReader<'a>) -> Result<Self, WireError> {
        let transport = take_transport(reader)?;
        let state = u8::take(reader)?;
        let state = SocketState::from_number(state)
            .ok_or(WireError::Value { field: "a socket's state", value: state.into() })?;
        Ok(Self {
            origin: Origin::Host,
            transport,
            state,
            local: WireAddress::take(reader)?.0,
            remote: <Option<WireAddress> as Take>::take(reader)?.map(|WireAddress(at)| at),
            only_v6: bool::take(reader)?,
            cookie: u64::take(reader)?,
            netns: u64::take(reader)?,
            trusted: bool::take(reader)?,
            acknowledged: u64::take(reader)?,
            received: u64::take(reader)?,
            sent: u64::take(reader)?,
            identity: Identity {
                bound_to_device: bool::take(reader)?,
                tracked: bool::take(reader)?,
                numbers: <Option<Numbers> as Take>::take(reader)?,
            },
        })
    }
}

fn take_transport(reader: &mut PacketReader<'_>) -> Result<Transport, WireError> {
    let number = u8::take(reader)?;
    let known = [Transport::Tcp, Transport::Udp].into_iter().find(|transport| *transport as u8 == number);
    known.ok_or(WireError::Value { field: "a transport", value: number.into() })
}

impl Put for Numbers {
    fn put(&self, out: &mut PacketWriter<'_>) {
        self.sent_from.put(out);
        self.received_from.put(out);
    }
}

impl<'a> Take<'a> for Numbers {
    const MIN: usize = 8;
    fn take(reader: &mut PacketReader<'a>) -> Result<Self, WireError> {
        Ok(Self { sent_from: u32::take(reader)?, received_from: u32::take(reader)? })
    }
}

/// The most questions about sockets that one message of the port has, so that it is not too long for a frame.
pub const MOST_QUESTIONS: usize = 100;

/// The question which socket receives a datagram with these ends (protocol U11, U14).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReceiverQuestion {
    /// Where the datagram is from.
    pub from: SocketAddr,
    /// Where it is sent to.
    pub to: SocketAddr,
    /// The socket that is to receive is in a group (U2.5): its members are to be looked for, too (U11.12).
    pub in_group: bool,
}

/// `count u8`, at most [`MOST_QUESTIONS`], and two addresses and a `bool` each.
impl Put for Vec<ReceiverQuestion> {
    fn put(&self, out: &mut PacketWriter<'_>) {
        // It is at most 100.
        (self.len().min(MOST_QUESTIONS) as u8).put(out);
        for question in self.iter().take(MOST_QUESTIONS) {
            WireAddress(question.from).put(out);
            WireAddress(question.to).put(out);
            question.in_group.put(out);
        }
    }
}

impl<'a> Take<'a> for Vec<ReceiverQuestion> {
    const MIN: usize = 1;
    fn take(reader: &mut PacketReader<'a>) -> Result<Self, WireError> {
        let question = |reader: &mut PacketReader<'a>| {
            let (from, to) = (WireAddress::take(reader)?.0, WireAddress::take(reader)?.0);
            Ok(ReceiverQuestion { from, to, in_group: bool::take(reader)? })
        };
        (0..take_count(reader)?).map(|_| question(reader)).collect()
    }
}

/// The cookies of the sockets that receive, in the order of the questions; 0 where the kernel finds none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReceiverCookies(pub Vec<u64>);

/// `count u8`, at most [`MOST_QUESTIONS`], and a `u64` each.
impl Put for ReceiverCookies {
    fn put(&self, out: &mut PacketWriter<'_>) {
        // It is at most 100.
        (self.0.len().min(MOST_QUESTIONS) as u8).put(out);
        self.0.iter().take(MOST_QUESTIONS).for_each(|cookie| cookie.put(out));
    }
}

impl<'a> Take<'a> for ReceiverCookies {
    const MIN: usize = 1;
    fn take(reader: &mut PacketReader<'a>) -> Result<Self, WireError> {
        (0..take_count(reader)?).map(|_| u64::take(reader)).collect::<Result<_, _>>().map(Self)
    }
}

fn take_count(reader: &mut PacketReader<'_>) -> Result<u8, WireError> {
    match u8::take(reader)? {
        count if usize::from(count) <= MOST_QUESTIONS => Ok(count),
        count => Err(WireError::Value { field: "the number of questions about sockets", value: count.into() }),
    }
}

/// An address and port. An IPv4 address travels as IPv6 has it, and its kind apart, because a socket of IPv6 can have such an address.
struct WireAddress(SocketAddr);

impl Put for WireAddress {
    fn put(&self, out: &mut PacketWriter<'_>) {
        self.0.is_ipv4().put(out);
        wide(self.0.ip()).put(out);
        self.0.port().put(out);
    }
}

impl<'a> Take<'a> for WireAddress {
    const MIN: usize = 1 + 16 + 2;
    fn take(reader: &mut PacketReader<'a>) -> Result<Self, WireError> {
        let is_v4 = bool::take(reader)?;
        let wide = u128::take(reader)?;
        let ip = match narrow(wide) {
            IpAddr::V4(ip) if is_v4 => IpAddr::V4(ip),
            IpAddr::V6(_) if is_v4 => return Err(WireError::Value { field: "the kind of an address", value: 1 }),
            _ => IpAddr::V6(wide.into()),
        };
        Ok(Self(SocketAddr::new(ip, u16::take(reader)?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    fn facts() -> SocketFacts {
        SocketFacts {
            origin: Origin::Host,
            transport: Transport::Udp,
            local: "[::ffff:10.0.0.1]:7".parse().unwrap(),
            remote: Some("127.0.0.1:8".parse().unwrap()),
            state: SocketState::Established,
            only_v6: true,
            cookie: u64::MAX,
            netns: u64::MAX - 1,
            trusted: true,
            acknowledged: 1,
            received: 2,
            sent: 3,
            identity: Identity {
                bound_to_device: true,
                tracked: true,
                numbers: Some(Numbers { sent_from: 4, received_from: u32::MAX }),
            },
        }
    }

    #[test]
    fn socket_facts_survive_encoding() {
        let bare = SocketFacts { remote: None, identity: Identity::default(), ..facts() };
        for facts in [facts(), bare] {
            assert_eq!(SocketFacts::decode(&facts.encode()), Ok(facts));
        }
    }

    #[test]
    fn malformed_socket_facts_are_refused() {
        let good = facts().encode();
        for cut in 0..good.len() {
            assert!(SocketFacts::decode(&good[..cut]).is_err(), "cut at {cut}");
        }
        let with = |at: usize, byte: u8| {
            let mut bad = good.clone();
            bad[at] = byte;
            SocketFacts::decode(&bad).is_err()
        };
        // A transport, a state, and an address of IPv6 that is said to be one of IPv4.
        assert!(with(0, 5) && with(1, 9) && with(2, 2));
        let mut v6 = SocketFacts { local: "[::1]:7".parse().unwrap(), ..facts() }.encode();
        v6[2] = 1;
        assert!(SocketFacts::decode(&v6).is_err());
        assert!(SocketFacts::decode(&[good, vec![0]].concat()).is_err());
    }
}
