//! Channels: what the broker knows of two ends that no longer need it.

use partywall_protocol::socket::SocketId;
use partywall_protocol::wire::{Directions, EventKind, Kind, Name, Side, User};

use super::further_regions::{FurtherKey, FurtherRegions};
use super::happened::{Happened, Party};
use super::id::{ChannelId, DomainId, ServiceKey, SessionId};
use super::{Core, Descriptor};
use crate::credentials::Credentials;

#[derive(Debug)]
pub(super) struct Channel<F> {
    pub(super) kind: Kind,
    pub(super) directions: Directions,
    pub(super) service: Name,
    /// Seconds since 1970 when this broker first heard of it.
    pub(super) since: u64,
    /// The other host that the connecting side is on, if the gateway has connected for it (protocol H5).
    pub(super) host: Option<Name>,
    /// The connecting end, then the accepting one.
    pub(super) ends: [ChannelEnd<F>; 2],
}

#[derive(Debug)]
pub(super) struct ChannelEnd<F> {
    /// Name of its domain.
    pub(super) name: Name,
    /// The domain, once known; 0 before.
    pub(super) domain: DomainId,
    /// The user of its process, once known.
    pub(super) user: Option<User>,
    pub(super) state: EndState,
    /// Bytes of its ring that count against the domain's quota.
    pub(super) ring_size: u64,
    /// Its region, kept for `Inspect`.
    pub(super) region: Option<F>,
    /// Its TCP socket, if it has one.
    pub(super) socket: Option<SocketId>,
    /// Memory of the channel beside its rings (protocol F).
    pub(super) further: FurtherRegions,
}

/// The holder of an end. A channel is forgotten when neither end has a holder.
///
/// ```text
///   connecting:  (Connect) -> Held -> Released      (Reclaim of the other side) -> Unclaimed -> Held
///   accepting:   (Connect) -> Waiting -> Held -> Released        Released -> Held again by Reclaim
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EndState {
    /// The other side has spoken of it after a restart; this side has not come yet.
    Unclaimed,
    /// Offered to a listener that has not answered.
    Waiting { listener: SessionId, service: ServiceKey },
    /// A process has it.
    Held { domain: DomainId, pid: u32 },
    /// Closed, or its process is gone.
    Released,
}

impl EndState {
    /// Whether a session holds the end, or is expected to.
    pub(super) fn is_live(self) -> bool {
        matches!(self, Self::Waiting { .. } | Self::Held { .. })
    }
}

pub(super) fn index(side: Side) -> usize {
    match side {
        Side::Connecting => 0,
        Side::Accepting => 1,
    }
}

impl<F> ChannelEnd<F> {
    /// An end that a process of a domain has. [`Core::hold`] charges the bytes of its ring.
    pub(super) fn held(name: Name, domain: DomainId, peer: Credentials, ring_size: u64, region: Option<F>) -> Self {
        let state = EndState::Held { domain, pid: peer.pid };
        Self {
            name,
            domain,
            user: Some(peer.user),
            state,
            ring_size,
            region,
            socket: None,
            further: FurtherRegions::default(),
        }
    }

    /// An end of which the other side alone has spoken.
    pub(super) fn unclaimed(name: &Name) -> Self {
        Self {
            name: name.clone(),
            domain: 0,
            user: None,
            state: EndState::Unclaimed,
            ring_size: 0,
            region: None,
            socket: None,
            further: FurtherRegions::default(),
        }
    }
}

impl<F> Channel<F> {
    pub(super) fn end(&self, side: Side) -> &ChannelEnd<F> {
        &self.ends[index(side)]
    }

    pub(super) fn end_mut(&mut self, side: Side) -> &mut ChannelEnd<F> {
        &mut self.ends[index(side)]
    }

    /// Whether it carries what one UDP socket sends to another (protocol U1).
    pub(super) fn is_flow(&self) -> bool {
        self.kind == Kind::Socket && self.directions == Directions::FORWARD
    }

    /// Whether its two ends are on different machines. Then its regions lie in windows.
    pub(super) fn is_between_machines(&self) -> bool {
        let [one, other] = self.ends.each_ref().map(|end| end.user.map(User::origin));
        one != other
    }

    pub(super) fn is_live(&self) -> bool {
        self.ends.iter().any(|end| end.state.is_live())
    }
}

impl<F: Descriptor> Core<F> {
    /// Keeps a region for `Inspect` while there are descriptors to spare.
    pub(super) fn keep(&mut self, region: F) -> Option<F> {
        if self.regions >= self.capacity.regions {
            return None;
        }
        self.regions += 1;
        Some(region)
    }

    /// Gives up an end that is in state `from`: its region is dropped, its domain's account relieved, and the channel forgotten if the
    /// other end has no session either.
    pub(super) fn release(&mut self, id: ChannelId, side: Side, from: EndState) {
        let Some(channel) = self.channels.get_mut(&id) else { return };
        let end = channel.end_mut(side);
        if end.state != from || !from.is_live() {
            return;
        }
        end.state = EndState::Released;
        self.inboxes.remove(&(id, side));
        if end.region.take().is_some() {
            self.regions -= 1;
        }
        if let Some(domain) = self.domains.get_mut(&end.domain) {
            domain.ends -= 1;
            domain.ring_bytes -= end.ring_size + end.further.bytes();
        }
        end.ring_size = 0;
        let further = std::mem::take(&mut end.further);
        let other = channel.end(side.other());
        let unused = |key: &FurtherKey| !other.further.counts(key.seen_from_other_side());
        for key in further.keys().filter(unused) {
            let owner = if key.own { side } else { side.other() };
            self.machines.further_gone(id, owner, key.number);
        }
        let end = channel.end_mut(side);
        if let Some(socket) = end.socket.take() {
            self.sockets.in_use.remove(&socket);
        }
        if !channel.is_live() {
            self.note_ended(id);
            self.channels.remove(&id);
            self.sockets.claimed.remove(&id);
            self.machines.channel_gone(id);
        }
        match from {
            EndState::Waiting { listener, service } => self.no_longer_waiting(id, listener, service),
            EndState::Held { domain, pid } => {
                if let Some(process) = self.domains.get_mut(&domain).and_then(|d| d.processes.get_mut(&pid)) {
                    process.held.remove(&(id, side));
                }
            }
            EndState::Unclaimed | EndState::Released => {}
        }
        self.end_flow(id, side);
        if side == Side::Accepting && matches!(from, EndState::Waiting { .. }) {
            self.route_is_lost(id);
        }
        // A flow of datagrams is no more when either end is gone: what lies in it is read, or lost, without us. Between machines the other
        // side keeps its end until it closes it, because until then it may use a place in a window (protocol U14).
        let is_near_flow = |channel: &&Channel<F>| channel.is_flow() && !channel.is_between_machines();
        if let Some(flow) = self.channels.get(&id).filter(is_near_flow) {
            let state = flow.end(side.other()).state;
            self.release(id, side.other(), state);
        }
    }

    /// Notes that no session holds an end of a channel any more.
    fn note_ended(&mut self, id: ChannelId) {
        let Some(channel) = self.channels.get(&id) else { return };
        let [from, to] = &channel.ends;
        let parties = [from, to].map(|end| end.user.map(|user| Party { user, domain: end.domain }));
        let Some(first) = parties[0].or(parties[1]) else { return };
        let happened = Happened {
            channel: id,
            from: from.name.to_string(),
            to: to.name.to_string(),
            service: channel.service.to_string(),
            other: parties[1],
            ..Happened::default()
        };
        self.note_of(EventKind::Ended, first, happened);
    }

    /// Takes an offer out of the account of its listener.
    pub(super) fn no_longer_waiting(&mut self, id: ChannelId, listener: SessionId, service: ServiceKey) {
        if let Some(session) = self.sessions.get_mut(&listener) {
            session.waiting.remove(&id);
        }
        if let Some(service) = self.services.get_mut(&service) {
            service.waiting -= 1;
        }
    }
}
