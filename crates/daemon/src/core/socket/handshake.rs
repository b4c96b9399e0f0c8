//! How far the two ends of an offered connection have come, and the bells that the broker makes for them (protocol T4, T5).

use partywall_shm::wire::Refusal;

use super::facts::SocketFacts;
use crate::core::domain::DomainId;
use crate::core::refuse::{Refuse, refuse};
use crate::core::{Credentials, Descriptor, SessionId};

/// What one side has of a pair of bells.
#[derive(Debug)]
pub(in crate::core) struct Bells<F> {
    /// Hears the other side, and hangs up when nobody can ring it any more.
    pub(in crate::core) listen: F,
    /// Rings the other side.
    pub(in crate::core) ring: F,
}

impl<F> Bells<F> {
    /// In the order in which they travel.
    pub(in crate::core) fn into_descriptors(self) -> Vec<F> {
        vec![self.listen, self.ring]
    }
}

/// The bells of the offering and of the accepting side.
pub(super) fn bells<F: Descriptor>(maker: &F) -> Result<(Bells<F>, Bells<F>), Refuse> {
    match maker.make_bells() {
        Ok([[a_listen, a_ring], [b_listen, b_ring]]) => {
            Ok((Bells { listen: a_listen, ring: a_ring }, Bells { listen: b_listen, ring: b_ring }))
        }
        Err(reason) => refuse(Refusal::OutOfResources, format!("the broker cannot make bells: {reason}")),
    }
}

/// Between the offer of a connection and its channel.
#[derive(Debug)]
pub(in crate::core) struct Handshake<F> {
    /// The accepting side's bells, until it has taken.
    pub(in crate::core) far: Option<Bells<F>>,
    /// A copy of what the offering side rings by, to say in its place that it has confirmed.
    pub(in crate::core) ring_far: F,
    /// The accepting side, once it has taken.
    pub(in crate::core) taker: Option<Taker<F>>,
    /// The offering side's socket as it was when that side confirmed.
    pub(in crate::core) confirmed: Option<SocketFacts>,
}

impl<F> Handshake<F> {
    pub(super) fn new(far: Bells<F>, ring_far: F) -> Self {
        Self { far: Some(far), ring_far, taker: None, confirmed: None }
    }
}

/// The accepting side of a connection that is not a channel yet.
#[derive(Debug)]
pub(in crate::core) struct Taker<F> {
    pub(in crate::core) session: SessionId,
    pub(in crate::core) domain: DomainId,
    pub(in crate::core) peer: Credentials,
    /// Its socket as it was when it took.
    pub(in crate::core) socket: SocketFacts,
    pub(in crate::core) ring_offset: u64,
    pub(in crate::core) ring_size: u64,
    pub(in crate::core) region: F,
}
