//! How far the two ends of an offered connection have come, and the bell that the broker makes for them (protocol T4, T5).

use std::net::SocketAddr;

use partywall_protocol::directory::Fingerprint;
use partywall_protocol::wire::{BellWay, Origin, Refusal, RegionReference};

use super::guesses::WrongAttempts;
use super::{NamespaceId, SocketFacts};
use crate::core::id::DomainId;
use crate::core::refuse::{Refuse, refuse};
use crate::core::{Descriptor, SessionId};
use crate::credentials::Credentials;

/// The ends of a bell for the offering and for the accepting side.
///
/// To a machine it is a link, of which a relay has an end. A process has the other, and gets no descriptor by it (protocol L2.2), so it refuses them as
/// links of the host do. Between two machines relays have both ends, and send each other the events of doorbell devices (protocol I4).
pub(super) fn bell<F: Descriptor>(maker: &F, (here, there): (Origin, Origin)) -> Result<[F; 2], Refuse> {
    let made = match bell_way(here, there) {
        BellWay::Relays => F::link_to_machine().map(Into::into),
        _ if here == there => maker.make_bell(),
        _ => F::link().map(Into::into),
    };
    made.or_else(|reason| refuse(Refusal::OutOfResources, format!("the broker cannot make a bell: {reason}")))
}

/// The way of the bell of a side at `here` whose peer is at `there`.
pub(super) fn bell_way(here: Origin, there: Origin) -> BellWay {
    match (here.machine(), there.machine()) {
        (Some(one), Some(other)) if one != other => BellWay::Relays,
        _ => BellWay::Link,
    }
}

/// Between the offer of a connection and its channel.
#[derive(Debug)]
pub(in crate::core) struct Handshake<F> {
    /// The accepting side's end of the bell, until it has taken.
    pub(in crate::core) far: Option<F>,
    /// The accepting side, once it has taken.
    pub(in crate::core) taker: Option<Taker<F>>,
    /// The network namespaces in which it may be accepted.
    pub(in crate::core) namespaces: Vec<NamespaceId>,
    /// Where it may be accepted: at the connecting socket's other end, unless that is forwarded.
    pub(in crate::core) accepted_at: SocketAddr,
    /// What was tried at the connection with wrong numbers.
    pub(super) wrong: WrongAttempts,
    /// Its entries in the directory by its accepting end alone, one for each namespace: none if it may not be translated.
    pub(in crate::core) translated: Vec<Fingerprint>,
    /// They are in the directory.
    pub(in crate::core) is_shown_translated: bool,
    /// The offering side's socket as it was when that side confirmed.
    pub(in crate::core) confirmed: Option<SocketFacts>,
}

impl<F> Handshake<F> {
    pub(super) fn new(
        far: F,
        (accepted_at, namespaces): (SocketAddr, Vec<NamespaceId>),
        translated: Vec<Fingerprint>,
    ) -> Self {
        Self {
            far: Some(far),
            taker: None,
            namespaces,
            accepted_at,
            wrong: WrongAttempts::default(),
            translated,
            is_shown_translated: false,
            confirmed: None,
        }
    }
}

/// The region of one side of a handshake.
#[derive(Debug)]
pub(super) struct SideRegion<F> {
    /// The region as the other side will get it.
    pub(super) reference: RegionReference,
    /// The memory that it is in, for the other side.
    pub(super) region: F,
    /// The window for the side itself, if it is to make the region there.
    pub(super) window: Option<F>,
}

/// The accepting side of a connection that is not a channel yet.
#[derive(Debug)]
pub(in crate::core) struct Taker<F> {
    pub(in crate::core) session: SessionId,
    pub(in crate::core) domain: DomainId,
    pub(in crate::core) peer: Credentials,
    /// Its socket as it was when it took.
    pub(in crate::core) socket: SocketFacts,
    pub(in crate::core) reference: RegionReference,
    pub(in crate::core) region: F,
}
