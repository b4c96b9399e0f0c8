//! `ReclaimSocket`: after a restart of the broker, the two ends of a connection report it (protocol T14).
//!
//! Each end reports itself and proves with its socket that it is one. The second end must match the first. A false claim gains at most a
//! line in a list in place of the true end: the content of a ring is shown to the user of that end alone, and no connection depends on
//! the broker's record of it.

use std::net::SocketAddr;

use partywall_protocol::directory::{Transport, is_scoped};
use partywall_protocol::wire::{Directions, Kind, Message, Refusal, RegionReference, Side};

use super::facts::{Ends, NumberedEnd, carries_on};
use super::offer::near_region_of;
use super::open::service_of;
use super::{SocketFacts, SocketState};
use crate::core::channel::{Channel, ChannelEnd, EndState};
use crate::core::id::ChannelId;
use crate::core::refuse::{self, Refuse, refuse};
use crate::core::region::check_region;
use crate::core::{Core, Descriptor, SessionId};

/// The name of the other end until it reclaims.
const UNKNOWN: &str = "unknown";

impl<F: Descriptor> Core<F> {
    pub(in crate::core) fn reclaim_socket(
        &mut self,
        id: SessionId,
        request: u32,
        (number, side): (ChannelId, Side),
        reference: RegionReference,
        socket: SocketFacts,
        with: Vec<F>,
    ) -> Result<(), Refuse> {
        let (Some(remote), SocketState::Established | SocketState::HalfClosed) = (socket.remote, socket.state) else {
            return refuse(Refusal::BadSocket, "the socket is not connected");
        };
        let shape = near_region_of(reference)?;
        self.has_been(number)?;
        let Some((domain_id, domain, peer)) = self.member(id) else { return Ok(()) };
        let name = domain.name.clone();
        self.not_yet(&socket)?;
        domain.afford(reference.ring_size)?;
        let Some(region) = with.into_iter().next() else { return Ok(()) };
        check_region(&region, shape)?;
        let port = match side {
            Side::Connecting => self.forwarded(remote).unwrap_or(remote).port(),
            Side::Accepting => socket.local.port(),
        };
        let (service, unknown) = (service_of(Transport::Tcp, port)?, refuse::name(UNKNOWN)?);
        if let Some(channel) = self.channels.get(&number) {
            let first = self.sockets.claimed.get(&number);
            let agrees = channel.kind == Kind::Socket
                && channel.end(side).state == EndState::Unclaimed
                && first.is_some_and(|first| are_ends(first, (&socket, side), |to| self.forwarded(to)));
            if !agrees {
                let reason = format!("channel {number} is another connection, or has its {side} side already");
                return refuse(Refusal::SelfContradiction, reason);
            }
        }

        // From here on the request cannot be refused.
        let region = self.keep(region);
        let (kind, directions, since) = (Kind::Socket, Directions::BOTH, self.now);
        if self.sockets.claimed.remove(&number).is_none() {
            let ends = [ChannelEnd::unclaimed(&unknown), ChannelEnd::unclaimed(&unknown)];
            self.channels.insert(number, Channel { kind, directions, service, since, host: None, ends });
            self.sockets.claimed.insert(number, socket);
        }
        let Some(channel) = self.channels.get_mut(&number) else { return Ok(()) };
        *channel.end_mut(side) = ChannelEnd {
            socket: Some(socket.id()),
            ..ChannelEnd::held(name, domain_id, peer, reference.ring_size, region)
        };
        self.sockets.in_use.insert(socket.id(), number);
        self.hold(number, side, domain_id, peer.pid, reference.ring_size);
        self.send(id, request, Message::Done {});
        Ok(())
    }
}

/// Whether `second` is the other end of `first`, as far as the facts show. The bytes that the first had sent and received when it
/// reclaimed, the second must have received and sent when it reclaims later. Where addresses are translated, only numbers show it, at the
/// connecting side's other end or at the address that this end is forwarded to.
fn are_ends(
    first: &SocketFacts,
    (second, side): (&SocketFacts, Side),
    forwarded: impl Fn(SocketAddr) -> Option<SocketAddr>,
) -> bool {
    let (Some(theirs), Some(ours)) = (first.remote, second.remote) else { return false };
    let (a, b) = (Ends::new(first.local, theirs), Ends::new(ours, second.local));
    let apart = first.trusted && second.trusted && !is_scoped(second.local.ip()) && !is_scoped(ours.ip());
    let by_ends = a == b && (first.namespace() == second.namespace() || apart);
    let (connecting, accepting) = match side {
        Side::Connecting => (second, first),
        Side::Accepting => (first, second),
    };
    let accepted_at = connecting.remote.into_iter().chain(connecting.remote.and_then(forwarded));
    let mut from_connecting = accepted_at.filter_map(|at| NumberedEnd::from_connecting(connecting, at));
    let by_numbers =
        first.origin == second.origin && from_connecting.any(|end| Some(end) == NumberedEnd::from_accepting(accepting));
    (by_ends || by_numbers) && carries_on(first, second).is_ok()
}
