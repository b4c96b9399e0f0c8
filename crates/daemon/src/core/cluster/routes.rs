//! Connections of this host's programs to domains that are not on this host (protocol H4).

use partywall_protocol::wire::{EventKind, Kind, Located, Message, Name, Origin, Refusal, Side};
use partywall_shm::layout::Geometry;

use crate::core::connect::{ConnectPlan, Shape};
use crate::core::id::{ChannelId, DomainId, ServiceKey, SessionId};
use crate::core::refuse::{self, Denial, Refuse, refuse};
use crate::core::{Core, Descriptor};
use crate::credentials::Credentials;
use crate::policy::{ClusterTable, Ruling};

/// The service by which the gateway takes connections to other hosts (protocol H4).
const SERVICE: &str = "cluster";
/// Seconds that a connection may wait for the gateway (protocol H4.3): less than clients wait for the broker.
const ROUTE_PATIENCE: u64 = 8;

/// A connection to another host that waits for the gateway.
#[derive(Debug)]
pub(super) struct PendingRoute<F> {
    pub(super) session: SessionId,
    request: u32,
    since: u64,
    from_id: DomainId,
    from: Name,
    peer: Credentials,
    target: Name,
    service: Name,
    /// The connecting side's link ends.
    links: Vec<F>,
    /// The policy's decision about the host that the gateway has named.
    ruling: Option<Ruling>,
}

impl<F: Descriptor> Core<F> {
    /// Hands a connection to a domain that is not on this host to the gateway. `false` if it is not for the gateway.
    pub(in crate::core) fn connect_elsewhere(
        &mut self,
        (id, request): (SessionId, u32),
        (target, service): (&Name, &Name),
        (shape, located, geometry): (Shape, Located, Geometry),
        with: &[F],
    ) -> Result<bool, Refuse> {
        let Some((from_id, from, peer)) = self.member(id) else { return Ok(false) };
        if !self.leads_elsewhere(peer, target) {
            return Ok(false);
        }
        let Some((to_id, key, listener)) = self.gateways_service() else { return Ok(false) };
        let grounds = self.policy.judge_connect_to(peer, &from.name, (target, None), service);
        if !grounds.allow() {
            // The policy for this host gives the answer, so that the client does not learn whether there is such a domain elsewhere.
            return Ok(false);
        }
        let ruling = self.policy.ruling(&grounds);
        if shape.kind != Kind::Stream {
            let reason =
                format!("{target} is not on this host, and only streams go to other hosts, not {}", shape.kind);
            return refuse(Refusal::KindMismatch, reason);
        }
        self.may_be_between(peer, &from.name, (target, Origin::Host), located)?;
        from.afford(shape.region.ring_size)?;
        self.may_wait(to_id, key, listener)?;
        let from = from.name.clone();
        let (shown, at_home) = (from.to_string(), peer.sees_what_its_user_has());
        let (target, service) = (target.clone(), service.clone());
        let plan = ConnectPlan {
            from: from_id,
            peer,
            shown,
            at_home,
            host: None,
            target: target.clone(),
            to: to_id,
            service: service.clone(),
            key,
            listener,
            here: peer.origin(),
            there: Origin::Host,
            ruling,
        };
        let since = self.now;
        let route = PendingRoute {
            session: id,
            request,
            since,
            from_id,
            from,
            peer,
            target,
            service,
            links: Vec::new(),
            ruling: None,
        };
        let channel = self.next_channel;
        self.cluster.routes.insert(channel, route);
        let done = self.carry_out((id, request), plan, (shape, located, geometry), with.to_vec());
        if done.is_err() {
            self.forget_route(channel);
        }
        done.map(|()| true)
    }

    /// Whether a client's connection to a domain may be one to another host: the domain is not here, there is a gateway, and it may have
    /// channels to where the client is.
    pub(in crate::core) fn leads_elsewhere(&self, peer: Credentials, target: &Name) -> bool {
        let takes_part = |cluster: &ClusterTable| peer.origin() == Origin::Host || cluster.machines;
        self.policy.cluster().is_some_and(|cluster| takes_part(cluster) && cluster.gateway != *target)
            && self.domain_named(target).is_none()
            && self.gateways_service().is_some()
    }

    /// The service by which the gateway takes connections, and its session.
    fn gateways_service(&self) -> Option<(DomainId, ServiceKey, SessionId)> {
        let domain = self.domain_named(&self.policy.cluster()?.gateway)?;
        let key = self.service_named(domain, &Name::new(SERVICE).ok()?)?;
        let bound = self.services.get(&key).filter(|bound| bound.kind == Kind::Stream)?;
        self.as_gateway(bound.session).ok()?;
        Some((domain, key, bound.session))
    }

    /// Keeps the connecting side's links until the gateway has answered. Gives them back if the channel needs no gateway.
    pub(in crate::core) fn keep_for_route(&mut self, channel: ChannelId, links: Vec<F>) -> Option<Vec<F>> {
        match self.cluster.routes.get_mut(&channel) {
            Some(route) => {
                route.links = links;
                None
            }
            None => Some(links),
        }
    }

    /// Forgets a connection that the gateway did not get.
    pub(in crate::core) fn forget_route(&mut self, channel: ChannelId) {
        self.cluster.routes.remove(&channel);
    }

    pub(in crate::core) fn route(&mut self, id: SessionId, request: u32, channel: ChannelId) -> Result<(), Refuse> {
        self.as_gateway(id)?;
        let route = self.waiting_route(channel)?;
        let answer = Message::RouteIs { domain: route.target.to_string(), service: route.service.to_string() };
        self.send(id, request, answer);
        Ok(())
    }

    fn waiting_route(&self, channel: ChannelId) -> Result<&PendingRoute<F>, Refuse> {
        match self.cluster.routes.get(&channel) {
            Some(route) => Ok(route),
            None => refuse(Refusal::NoSuchChannel, format!("channel {channel} does not wait for a host")),
        }
    }

    /// The gateway has found the host: the policy has the last word (protocol H4.1).
    pub(in crate::core) fn route_to(
        &mut self,
        id: SessionId,
        request: u32,
        channel: ChannelId,
        host: &str,
    ) -> Result<(), Refuse> {
        self.as_gateway(id)?;
        let host = refuse::name(host)?;
        let route = self.waiting_route(channel)?;
        let grounds =
            self.policy.judge_connect_to(route.peer, &route.from, (&route.target, Some(&host)), &route.service);
        let ruling = self.policy.ruling(&grounds);
        self.tally.decision("connect", &ruling);
        if ruling.allowed {
            if let Some(route) = self.cluster.routes.get_mut(&channel) {
                route.ruling = Some(ruling);
            }
            self.send(id, request, Message::Done {});
            return Ok(());
        }
        let Some(route) = self.cluster.routes.remove(&channel) else { return Ok(()) };
        let PendingRoute { from_id, from, peer, target, service, .. } = route;
        let reason = format!("the policy does not let {from} connect to {target}:{service} on the host {host}");
        let (kind, to) = (EventKind::ConnectRefused, format!("{target}@{host}"));
        let (from, service) = (from.to_string(), service.to_string());
        let denial = Denial { kind, peer, domain: from_id, from, to, service, other: None, ruling };
        self.refuse_later(route.session, route.request, "Connect", Refuse::denied(reason.clone(), denial));
        self.release_both(channel);
        refuse(Refusal::Denied, reason)
    }

    pub(in crate::core) fn refuse_route(
        &mut self,
        id: SessionId,
        request: u32,
        channel: ChannelId,
        code: Refusal,
        reason: String,
    ) -> Result<(), Refuse> {
        self.as_gateway(id)?;
        self.waiting_route(channel)?;
        self.refuse_route_to_client(channel, code, reason);
        self.send(id, request, Message::Done {});
        Ok(())
    }

    fn refuse_route_to_client(&mut self, channel: ChannelId, code: Refusal, reason: String) {
        let Some(route) = self.cluster.routes.remove(&channel) else { return };
        self.refuse_later(route.session, route.request, "Connect", Refuse { code, reason, denied: None });
        self.release_both(channel);
    }

    /// The gateway has given up a connection that waits (protocol H4.3).
    pub(in crate::core) fn route_is_lost(&mut self, channel: ChannelId) {
        let reason = "the gateway has closed the connection".to_owned();
        self.refuse_route_to_client(channel, Refusal::OutOfResources, reason);
    }

    fn release_both(&mut self, channel: ChannelId) {
        for side in [Side::Connecting, Side::Accepting] {
            if let Some(state) = self.channels.get(&channel).map(|c| c.end(side).state) {
                self.release(channel, side, state);
            }
        }
    }

    /// Whether the gateway may accept a connection now (protocol H4.2).
    pub(in crate::core) fn may_accept(&self, channel: ChannelId) -> Result<(), Refuse> {
        match self.cluster.routes.get(&channel) {
            Some(route) if route.ruling.is_none() => refuse(
                Refusal::Protocol,
                format!("the host of channel {channel} is not known yet: RouteTo comes first"),
            ),
            _ => Ok(()),
        }
    }

    /// The gateway has accepted: the connecting side gets its answer.
    pub(in crate::core) fn answer_route(&mut self, channel: ChannelId) {
        let Some(PendingRoute { session, request, links, ruling, .. }) = self.cluster.routes.remove(&channel) else {
            return;
        };
        if let Some(ruling) = ruling {
            self.note_connected(channel, EventKind::Connected, &ruling);
        }
        self.answer_connect((session, request), channel, links);
    }

    /// Refuses connections that have waited too long.
    pub(super) fn tick_routes(&mut self) {
        let now = self.now;
        let late = |route: &PendingRoute<F>| now >= route.since.saturating_add(ROUTE_PATIENCE);
        let late: Vec<_> =
            self.cluster.routes.iter().filter(|(_, route)| late(route)).map(|(channel, _)| *channel).collect();
        for channel in late {
            let Some(route) = self.cluster.routes.remove(&channel) else { continue };
            let reason = "the gateway does not answer".to_owned();
            let refused = Refuse { code: Refusal::OutOfResources, reason, denied: None };
            self.refuse_later(route.session, route.request, "Connect", refused);
            self.release_unanswered(channel);
        }
    }

    /// The client does not wait for the gateway any more. Between machines the gateway keeps its end until it closes it: it may be about to
    /// accept, and to write in the place in a window that it was given (protocol G4.4).
    fn release_unanswered(&mut self, channel: ChannelId) {
        match self.channels.get(&channel) {
            Some(found) if found.is_between_machines() => {
                let state = found.end(Side::Connecting).state;
                self.release(channel, Side::Connecting, state);
            }
            _ => self.release_both(channel),
        }
    }

    /// A session has ended that may wait for the gateway.
    pub(super) fn end_routes(&mut self, id: SessionId, by_program: bool) {
        let routes: Vec<_> =
            self.cluster.routes.iter().filter(|(_, route)| route.session == id).map(|(channel, _)| *channel).collect();
        for channel in routes {
            self.cluster.routes.remove(&channel);
            if !by_program {
                // The client may live (protocol G4.1).
                self.machines.abandon(channel);
            }
            self.release_unanswered(channel);
        }
    }
}
