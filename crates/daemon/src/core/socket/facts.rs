//! What the kernel says of a socket that a client handed over. The event loop asks, the core believes.

use std::net::{IpAddr, SocketAddr};

use partywall_shm::directory::{Transport, wide};
use serde::{Deserialize, Serialize};

/// What a TCP or UDP socket is, read by the broker itself from the descriptor (protocol T4).
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
}

/// As much of TCP's states as matters here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum SocketState {
    /// It takes connections.
    Listening,
    /// It carries bytes at least one way: ESTABLISHED or CLOSE_WAIT.
    Connected,
    /// Anything else.
    Other,
}

/// The transport as its number among IP's protocols, as in the directory.
mod transport_number {
    use partywall_shm::directory::Transport;
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

/// One spelling for an address.
pub(super) fn key(ip: IpAddr) -> u128 {
    wide(ip)
}
