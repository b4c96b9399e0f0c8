//! What the kernel says of a socket that a client handed over. The event loop asks, the core believes.

use std::net::SocketAddr;

use partywall_protocol::directory::Transport;
use partywall_shm::address::wide;
use serde::{Deserialize, Serialize};

/// What a TCP or UDP socket is, read by the broker itself from the descriptor (protocol T3).
///
/// They are read in another process than the core's, and come from there as JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SocketFacts {
    /// Its own end.
    pub local: SocketAddr,
    /// The other end, if it is connected.
    pub remote: Option<SocketAddr>,
    /// TCP, or UDP.
    #[serde(with = "transport_number")]
    pub transport: Transport,
    /// What it can do now. A UDP socket that has a port listens.
    pub state: SocketState,
    /// It is an IPv6 socket that takes no IPv4.
    pub only_v6: bool,
    /// Its own number, which no other socket has until the next boot (`SO_COOKIE`).
    pub cookie: u64,
    /// Its network namespace's number, likewise (`SO_NETNS_COOKIE`).
    pub netns: u64,
    /// The namespace belongs to the broker's own user namespace: only who could do anything to the broker made it.
    pub trusted: bool,
    /// Bytes of it that the peer's kernel has acknowledged.
    pub acknowledged: u64,
    /// Bytes that have come.
    pub received: u64,
    /// Bytes that have gone out, those sent again counted again.
    pub sent: u64,
    /// What else tells whose other end it is.
    pub identity: Identity,
}

impl SocketFacts {
    /// Whether this is the socket that was shown `earlier`, established now, with the ends that it had then.
    ///
    /// The cookie alone does not say that: `connect` with `AF_UNSPEC` and again makes another connection of the same socket.
    pub(in crate::core) fn is_still(&self, earlier: &Self) -> bool {
        let name = |facts: &Self| (facts.cookie, facts.netns, facts.local, facts.remote);
        let same_numbers = match (self.identity.numbers, earlier.identity.numbers) {
            (Some(now), Some(then)) => now == then,
            // They could not be read once.
            _ => true,
        };
        self.state == SocketState::Established && name(self) == name(earlier) && same_numbers
    }
}

/// What tells the other end of a connection, beside its addresses (protocol T5).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Identity {
    /// The socket is bound to a device. The kernel lets an unbound socket of the namespace have the same two ends.
    pub bound_to_device: bool,
    /// The kernel tracks the connection, and so may translate its addresses: another socket can have the ends that the translated
    /// peer seems to have.
    pub tracked: bool,
    /// The sequence numbers that it began with, if the broker may read them.
    pub numbers: Option<Numbers>,
}

/// The sequence numbers of the first byte each way. No two connections of a host have the same 64 bits, and nobody can read those of
/// others: so they are never logged.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Numbers {
    /// As the kernel counts what was acknowledged: that of the SYN for the side that connected, of the first byte for the other.
    pub sent_from: u32,
    /// Of the first byte that came.
    pub received_from: u32,
}

impl std::fmt::Debug for Numbers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Numbers(not shown)")
    }
}

/// Why two sockets are not known to be the ends of one connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(in crate::core) enum NotPeers {
    #[error("the sequence numbers of the two sockets say that they are not ends of one connection")]
    OtherNumbers,
    #[error("what the two sockets have carried says that they are not ends of one connection")]
    OtherBytes,
    #[error(
        "the sockets are in different network namespaces, and the broker may not read their sequence numbers; give it CAP_NET_ADMIN"
    )]
    OtherNamespace,
    #[error("a socket is bound to a device, so another may have the same addresses")]
    Bound,
    #[error(
        "the kernel tracks this connection and may translate its addresses, and the broker may not read its sequence numbers; give it CAP_NET_ADMIN"
    )]
    Tracked,
}

/// Whether the two sockets are the ends of one connection, if both were established at one moment (protocol T5).
///
/// The caller has seen that their ends are each other's. `one_user`: both processes are of one user, who has both connections anyway.
pub(super) fn are_peers(connecting: &SocketFacts, accepting: &SocketFacts, one_user: bool) -> Result<(), NotPeers> {
    let (c, a) = (connecting.identity, accepting.identity);
    match (c.numbers, a.numbers) {
        (Some(c), Some(a)) => {
            if c.sent_from.wrapping_add(1) == a.received_from && a.sent_from == c.received_from {
                Ok(())
            } else {
                Err(NotPeers::OtherNumbers)
            }
        }
        _ if connecting.netns != accepting.netns => Err(NotPeers::OtherNamespace),
        _ if c.bound_to_device || a.bound_to_device => Err(NotPeers::Bound),
        _ if (c.tracked || a.tracked) && !one_user => Err(NotPeers::Tracked),
        _ => Ok(()),
    }
}

/// Whether the bytes that `first` had carried when it was shown can be among those that `second` has when it is shown later. Of two ends
/// of one connection this is always true; it proves nothing, and finds what a translator or proxy has put between them.
pub(super) fn carries_on(first: &SocketFacts, second: &SocketFacts) -> Result<(), NotPeers> {
    if first.acknowledged <= second.received && first.received <= second.sent {
        Ok(())
    } else {
        Err(NotPeers::OtherBytes)
    }
}

/// As much of TCP's states as matters here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum SocketState {
    /// It takes connections.
    Listening,
    /// It carries bytes both ways.
    Established,
    /// The peer has ended its direction (CLOSE_WAIT).
    HalfClosed,
    /// Anything else.
    Other,
}

/// The transport as its number among IP's protocols, as in the directory.
mod transport_number {
    use partywall_protocol::directory::Transport;
    use serde::{Deserialize as _, Deserializer, Serializer, de::Error as _};

    pub(super) fn serialize<S: Serializer>(transport: &Transport, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_u8(*transport as u8)
    }

    pub(super) fn deserialize<'a, D: Deserializer<'a>>(from: D) -> Result<Transport, D::Error> {
        let number = u8::deserialize(from)?;
        let known = [Transport::Tcp, Transport::Udp].into_iter().find(|transport| *transport as u8 == number);
        known.ok_or_else(|| D::Error::custom("neither TCP nor UDP"))
    }
}

/// The two ends of a connection, as its accepting side sees them. IPv4 addresses have one spelling here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(in crate::core) struct Ends {
    pub(in crate::core) accepting: (u128, u16),
    pub(in crate::core) connecting: (u128, u16),
}

impl Ends {
    pub(super) fn new(accepting: SocketAddr, connecting: SocketAddr) -> Self {
        let end = |at: SocketAddr| (wide(at.ip()), at.port());
        Self { accepting: end(accepting), connecting: end(connecting) }
    }
}
