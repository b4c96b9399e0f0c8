//! The step from a taken offer to a channel, for connections and for datagrams: policy, quotas, and the channel itself.

use partywall_protocol::directory::Transport;
use partywall_protocol::wire::{Directions, EventKind, Kind, Name, Origin, Refusal, Side};

use super::SocketId;
use super::offer::Offer;
use crate::core::channel::{Channel, ChannelEnd};
use crate::core::domain::DomainRecord;
use crate::core::id::{ChannelId, DomainId};
use crate::core::refuse::{self, Denial, Refuse, refuse};
use crate::core::{Core, Descriptor};
use crate::credentials::Credentials;
use crate::policy::Ruling;

/// One side of a new channel.
#[derive(Debug)]
pub(super) struct SocketSide<F> {
    pub(super) domain: DomainId,
    pub(super) peer: Credentials,
    pub(super) ring_size: u64,
    pub(super) region: F,
    /// Its socket, if no other channel may have that.
    pub(super) socket: Option<SocketId>,
}

/// The service that a port stands for, in the policy and in lists.
pub(super) fn service_of(transport: Transport, port: u16) -> Result<Name, Refuse> {
    let transport = match transport {
        Transport::Tcp => "tcp",
        Transport::Udp => "udp",
    };
    refuse::name(&format!("{transport}-{port}"))
}

impl<F: Descriptor> Core<F> {
    pub(in crate::core) fn name_of(&self, domain: DomainId) -> Option<Name> {
        self.domains.get(&domain).map(|domain| domain.name.clone())
    }

    /// Whether the policy lets the domain of an offer have a ring to the domain that takes it. `way` says what for.
    pub(super) fn allows_ring(
        &self,
        offer: &Offer<F>,
        from: &DomainRecord,
        (to, taker): (&DomainRecord, Credentials),
        (service, way): (&Name, &str),
    ) -> Result<(), Refuse> {
        let ruling = self.ring_ruling(offer, from, (to, taker), service);
        if ruling.allowed {
            return Ok(());
        }
        let reason = format!("the policy does not let {} {way} {}:{service}, on a ring", from.name, to.name);
        // The other side is not told who asked.
        let other = None;
        let (from, to, service) = (from.name.to_string(), to.name.to_string(), service.to_string());
        let (kind, peer, domain) = (EventKind::RingRefused, offer.peer, offer.domain);
        Err(Refuse::denied(reason, Denial { kind, peer, domain, from, to, service, other, ruling }))
    }

    /// The policy's decision about a ring for an offer.
    pub(super) fn ring_ruling(
        &self,
        offer: &Offer<F>,
        from: &DomainRecord,
        (to, taker): (&DomainRecord, Credentials),
        service: &Name,
    ) -> Ruling {
        let one_user = offer.peer.is_user_of(taker);
        self.policy.ruling(&self.policy.judge_share(offer.peer, one_user, (&from.name, &to.name), service))
    }

    /// Makes the channel of an offer that was taken. Nothing refuses it any more.
    pub(super) fn open_socket_channel(
        &mut self,
        id: ChannelId,
        service: Name,
        directions: Directions,
        [connecting, accepting]: [SocketSide<F>; 2],
    ) {
        let one_user = connecting.peer.is_user_of(accepting.peer);
        let (from, to) = (self.name_of(connecting.domain), self.name_of(accepting.domain));
        let (Some(from), Some(to)) = (from, to) else { return };
        let ruling = self.policy.ruling(&self.policy.judge_share(connecting.peer, one_user, (&from, &to), &service));
        // Memory that others may inspect is the host's.
        let is_shown = [&connecting, &accepting].iter().all(|side| side.peer.origin() == Origin::Host);
        let held = [(Side::Connecting, &connecting), (Side::Accepting, &accepting)]
            .map(|(side, of)| (side, of.domain, of.peer.pid, of.ring_size, of.socket));
        let ends = [(from, connecting), (to, accepting)].map(|(name, of)| ChannelEnd {
            socket: of.socket,
            ..ChannelEnd::held(name, of.domain, of.peer, of.ring_size, is_shown.then(|| self.keep(of.region)).flatten())
        });
        let (kind, since) = (Kind::Socket, self.now);
        self.channels.insert(id, Channel { kind, directions, service, since, host: None, ends });
        for (side, domain, pid, ring_size, socket) in held {
            self.sockets.in_use.extend(socket.map(|socket| (socket, id)));
            self.hold(id, side, domain, pid, ring_size);
        }
        self.tally.rings_made += 1;
        self.tally.decision("ring", &ruling);
        self.note_connected(id, EventKind::RingMade, &ruling);
    }
}

/// Whether a domain that has both ends can hold them, with this many bytes of rings in all.
pub(super) fn affords_both_ends(domain: &DomainRecord, rings: u64) -> Result<(), Refuse> {
    if domain.ends + 2 > domain.quota.channels || rings > domain.quota.ring_bytes {
        return refuse(Refusal::Quota, format!("{} can hold no more channels or rings, by its quota", domain.name));
    }
    Ok(())
}
