//! Whether two sockets are the ends of one connection, by what their kernels say of them.

use std::net::SocketAddr;

use partywall_protocol::socket::{Numbers, SocketFacts};
use partywall_protocol::wire::Refusal;
use partywall_shm::address::wide;

use crate::core::refuse::{Refuse, refuse};

/// Why two sockets are not known to be the ends of one connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(in crate::core) enum NotPeers {
    #[error("the sequence numbers of the two sockets say that they are not ends of one connection")]
    OtherNumbers,
    #[error(
        "sockets with other sequence numbers have asked for this connection too often, so the right numbers may be a guess"
    )]
    Guessed,
    #[error("what the two sockets have carried says that they are not ends of one connection")]
    OtherBytes,
    #[error(
        "the ends of the two sockets are not each other's, and the broker may not read their sequence numbers; give it CAP_NET_ADMIN, or have the kernel record them (partywall numbers on)"
    )]
    OtherEnds,
    #[error(
        "the sockets are in different network namespaces, and the broker may not read their sequence numbers; give it CAP_NET_ADMIN, or have the kernel record them (partywall numbers on)"
    )]
    OtherNamespace,
    #[error("a socket is bound to a device, so another may have the same addresses")]
    Bound,
    #[error(
        "the kernel tracks this connection and may translate its addresses, and the broker may not read its sequence numbers; give it CAP_NET_ADMIN, or have the kernel record them (partywall numbers on)"
    )]
    Tracked,
}

/// Refuses sockets that are not known to be the ends of one connection.
pub(super) fn not_peers<T>(reason: NotPeers) -> Result<T, Refuse> {
    refuse(Refusal::Ambiguous, reason.to_string())
}

/// Whether the two sockets are the ends of one connection, if both were established at one moment (protocol T5).
///
/// Numbers decide where both are read, because addresses may be translated on the way. `one_user`: both processes are of one user, which
/// has both connections anyway.
pub(super) fn are_peers(connecting: &SocketFacts, accepting: &SocketFacts, one_user: bool) -> Result<(), NotPeers> {
    let (c, a) = (connecting.identity, accepting.identity);
    match (c.numbers, a.numbers) {
        (Some(c), Some(a)) => {
            if c.seen_by_accepting_side() == a {
                Ok(())
            } else {
                Err(NotPeers::OtherNumbers)
            }
        }
        _ if !have_each_others_ends(connecting, accepting) => Err(NotPeers::OtherEnds),
        _ if connecting.namespace() != accepting.namespace() => Err(NotPeers::OtherNamespace),
        _ if c.bound_to_device || a.bound_to_device => Err(NotPeers::Bound),
        _ if (c.tracked || a.tracked) && !one_user => Err(NotPeers::Tracked),
        _ => Ok(()),
    }
}

/// Whether the ends of the two sockets are each other's.
pub(super) fn have_each_others_ends(connecting: &SocketFacts, accepting: &SocketFacts) -> bool {
    let (Some(to), Some(from)) = (connecting.remote, accepting.remote) else { return false };
    Ends::new(to, connecting.local) == Ends::new(accepting.local, from)
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

/// The two ends of a connection, as its accepting side sees them. IPv4 addresses have one spelling here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(in crate::core) struct Ends {
    pub(in crate::core) accepting: (u128, u16),
    pub(in crate::core) connecting: (u128, u16),
}

impl Ends {
    pub(super) fn new(accepting: SocketAddr, connecting: SocketAddr) -> Self {
        Self { accepting: end(accepting), connecting: end(connecting) }
    }
}

fn end(at: SocketAddr) -> (u128, u16) {
    (wide(at.ip()), at.port())
}

/// A connection as its accepting side sees it, whatever its connecting end seems to be there: only a translator changes that end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(in crate::core) struct NumberedEnd {
    accepting: (u128, u16),
    /// The accepting side's.
    numbers: Numbers,
}

impl NumberedEnd {
    /// By the numbers of the connecting side's socket, accepted at this address; `None` if the numbers are not read.
    pub(in crate::core) fn from_connecting(socket: &SocketFacts, accepted_at: SocketAddr) -> Option<Self> {
        let numbers = socket.identity.numbers?;
        Some(Self { accepting: end(accepted_at), numbers: numbers.seen_by_accepting_side() })
    }

    pub(in crate::core) fn accepting(&self) -> (u128, u16) {
        self.accepting
    }

    /// As the socket of the accepting side shows it; `None` if its numbers are not read.
    pub(super) fn from_accepting(socket: &SocketFacts) -> Option<Self> {
        Some(Self { accepting: end(socket.local), numbers: socket.identity.numbers? })
    }
}
