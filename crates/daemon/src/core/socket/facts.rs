//! Whether two sockets are the ends of one connection, by what their kernels say of them.

use std::net::SocketAddr;

use partywall_protocol::socket::SocketFacts;
use partywall_shm::address::wide;

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
/// The caller has checked that the ends of the two match. `one_user`: both processes are of one user, which has both connections anyway.
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
        _ if connecting.namespace() != accepting.namespace() => Err(NotPeers::OtherNamespace),
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
