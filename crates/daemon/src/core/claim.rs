//! A request that waits until the cluster has decided about a name (protocol H3).

use partywall_protocol::wire::Kind;

use super::id::SessionId;

/// A request that waits for a name.
#[derive(Debug)]
pub(super) struct WaitingRequest {
    pub(super) session: SessionId,
    pub(super) request: u32,
    pub(super) what: Claiming,
}

/// The request that makes a domain's name one of the cluster.
#[derive(Debug)]
pub(super) enum Claiming {
    Join { version: u16 },
    Bind { service: String, kind: Kind, backlog: u16 },
}
