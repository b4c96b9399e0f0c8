//! Names and streams of a cluster of hosts (protocol H): what the gateway hears of this host's names, names that wait until the cluster has
//! decided about them, and connections to domains that are not on this host.
//!
//! ```text
//!   client        Join ---------->  broker  claim ------------------>  gateway  (asks the directory of the cluster)
//!                 Joined <--------          NameClaimed <-----------
//!
//!   client        Connect ------->  broker  Incoming --------------->  gateway
//!                                           PendingRoute, RouteTo <---------           (finds the host, connects to its gateway)
//!                 Connected <-----          Accepted <---------------
//! ```
//!
//! The broker keeps no name of another host, and waits for the gateway for a limited time.
//!
//! - `names` has what the gateway is to hear of this host's names, and `claims` names that wait for the cluster.
//! - `routes` has connections of this host's programs to other hosts, and `remote` those of other hosts' programs to this one.

use std::collections::BTreeMap;
#[cfg(any(test, feature = "invariants"))]
use std::collections::BTreeSet;

#[cfg(any(test, feature = "invariants"))]
use partywall_protocol::wire::Side;
use partywall_protocol::wire::{Message, Name, Refusal};

use super::connect::Shape;
use super::id::{ChannelId, SessionId};
use super::refuse::{Refuse, refuse};
use super::{Core, Descriptor};
use claims::Claim;
use names::NameFollower;
use routes::PendingRoute;

mod claims;
mod names;
mod remote;
mod routes;

/// The state of this host's part in a cluster.
#[derive(Debug)]
pub(super) struct Cluster<F> {
    follower: Option<NameFollower>,
    claims: BTreeMap<Name, Claim>,
    next_claim: u64,
    routes: BTreeMap<ChannelId, PendingRoute<F>>,
}

impl<F> Cluster<F> {
    /// Nothing waits yet. Numbers of claims count up from the broker's instance, as those of channels do: the gateway may answer a claim of an
    /// earlier broker.
    pub(super) fn new(instance: u64) -> Self {
        Self { follower: None, claims: BTreeMap::new(), next_claim: instance + 1, routes: BTreeMap::new() }
    }
}

impl<F: Descriptor> Core<F> {
    /// Fails unless the session is the gateway's (protocol H1).
    fn as_gateway(&self, id: SessionId) -> Result<(), Refuse> {
        match self.member(id) {
            Some((_, domain, peer)) if self.policy.is_gateway(peer, &domain.name) => Ok(()),
            _ => refuse(Refusal::Denied, "this is for the gateway that [cluster] of the policy names"),
        }
    }

    fn is_gateways_name(&self, name: &Name) -> bool {
        self.policy.cluster().is_some_and(|cluster| cluster.gateway == *name)
    }

    /// Refuses a request that has waited.
    fn refuse_later(&mut self, session: SessionId, request: u32, asked: &'static str, refused: Refuse) {
        let Refuse { code, reason, denied } = refused;
        let Some(joined) = self.sessions.get(&session).map(|s| s.domain.is_some()) else { return };
        self.tally.refusal(asked, code);
        if let Some(denial) = denied {
            self.note_denied(*denial);
        }
        self.send(session, request, Message::Refused { code, reason });
        if !joined {
            self.dismiss(session);
        }
    }

    /// A session has ended: the gateway's, or one that waits.
    pub(super) fn end_in_cluster(&mut self, id: SessionId, by_program: bool) {
        self.end_names(id);
        self.end_claims(id);
        self.end_routes(id, by_program);
    }

    /// Ends what has waited too long.
    pub(super) fn tick_cluster(&mut self) {
        self.tick_claims();
        self.tick_routes();
    }

    /// Whether something waits for the gateway, which [`Self::tick_cluster`] ends.
    pub(super) fn waits_for_gateway(&self) -> bool {
        !self.cluster.claims.is_empty() || !self.cluster.routes.is_empty()
    }

    /// Requests of the gateway.
    pub(super) fn dispatch_cluster(
        &mut self,
        id: SessionId,
        request: u32,
        message: Message,
        with: Vec<F>,
    ) -> Result<(), Refuse> {
        match message {
            Message::FollowNames { after } => self.follow_names(id, request, after),
            Message::NameClaimed { domain, claim, holder } => self.name_claimed(id, request, (&domain, claim), &holder),
            Message::Route { channel } => self.route(id, request, channel),
            Message::RouteTo { channel, host } => self.route_to(id, request, channel, &host),
            Message::RefuseRoute { channel, code, reason } => self.refuse_route(id, request, channel, code, reason),
            Message::ConnectFor { client, target, service, kind, directions, region } => {
                let shape = Shape { kind, directions, region };
                let done = self.connect_for((id, request), &client, (&target, &service), (shape, with));
                if done.is_err() {
                    self.give_place_back(id, region);
                }
                done
            }
            other => super::dispatch::no_request(&other),
        }
    }

    /// Panics if a claim or a route belongs to nothing.
    #[cfg(any(test, feature = "invariants"))]
    pub(super) fn check_cluster(&self) {
        let Cluster { follower, claims, next_claim, routes } = &self.cluster;
        assert!(follower.is_some() || claims.is_empty(), "a claim that nothing will decide");
        let numbers: BTreeSet<_> = claims.values().map(|claim| claim.number).collect();
        assert!(numbers.len() == claims.len() && numbers.iter().all(|number| number < next_claim));
        for claim in claims.values() {
            assert!(!claim.waiting.is_empty());
            for one in &claim.waiting {
                assert!(self.sessions.contains_key(&one.session), "a claim of a session that has ended");
            }
        }
        for (channel, route) in routes {
            assert!(self.sessions.contains_key(&route.session), "a route of a session that has ended");
            let end = self.channels[channel].end(Side::Accepting);
            assert!(matches!(end.state, super::channel::EndState::Waiting { .. }), "a route that waits for nothing");
        }
        self.check_names();
    }
}
