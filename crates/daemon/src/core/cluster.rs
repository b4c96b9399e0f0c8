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

use std::collections::{BTreeMap, HashMap, HashSet};

use partywall_protocol::wire::{EventKind, Kind, Message, Name, NameNews, NameRow, Origin, Page, Refusal, Side};

use super::claim::{Claiming, WaitingRequest};
use super::connect::{ConnectMemory, ConnectPlan, Shape, make_links};
use super::id::{ChannelId, DomainId, ServiceKey};
use super::refuse::{self, Denial, Refuse, refuse};
use super::region::{check_region, own_memory};
use super::{Core, Descriptor, SessionId};
use crate::credentials::Credentials;
use crate::policy::Ruling;

/// The service by which the gateway takes connections to other hosts (protocol H4).
const SERVICE: &str = "cluster";
/// Seconds that a name may wait for the cluster's decision (protocol H3.2).
const CLAIM_PATIENCE: u64 = 4;
/// Seconds that a connection may wait for the gateway (protocol H4.3): less than clients wait for the broker.
const ROUTE_PATIENCE: u64 = 8;
/// More rows than the smallest of them fit into a packet; encoding cuts the page to what does.
const ROWS: usize = 300;

/// A domain, or a service of it.
type NameKey = (Name, Option<Name>);

/// The state of this host's part in a cluster.
#[derive(Debug)]
pub(super) struct Cluster<F> {
    follower: Option<NameFollower>,
    claims: BTreeMap<Name, Claim>,
    routes: BTreeMap<ChannelId, PendingRoute<F>>,
}

impl<F> Default for Cluster<F> {
    fn default() -> Self {
        Self { follower: None, claims: BTreeMap::new(), routes: BTreeMap::new() }
    }
}

/// The session by which the gateway hears of names.
#[derive(Debug)]
struct NameFollower {
    session: SessionId,
    last: u64,
    /// Names that have changed since the gateway acknowledged them, in the order of their last changes.
    outbox: BTreeMap<u64, NameKey>,
    keys: HashMap<NameKey, u64>,
    /// Names of which the gateway has heard that they are there. Others need no row when they go, so a name that comes and goes takes no memory.
    told: HashSet<NameKey>,
    waiting: Option<u32>,
    /// No answer has been sent yet.
    is_new: bool,
}

impl NameFollower {
    /// Has a name reported, in its latest state. `is_gone` says that it is not there any more.
    fn touch(&mut self, name: NameKey, is_gone: bool) {
        if let Some(key) = self.keys.remove(&name) {
            self.outbox.remove(&key);
        }
        if is_gone && !self.told.contains(&name) {
            return;
        }
        self.last += 1;
        self.outbox.insert(self.last, name.clone());
        self.keys.insert(name, self.last);
    }
}

/// A name that the cluster has not decided about.
#[derive(Debug)]
struct Claim {
    since: u64,
    waiting: Vec<WaitingRequest>,
}

/// A connection to another host that waits for the gateway.
#[derive(Debug)]
struct PendingRoute<F> {
    session: SessionId,
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

/// Whether a name is like those that programs get by default, `nginx-4242`.
fn is_of_process(name: &Name) -> bool {
    let number = name.as_str().rsplit_once('-').map(|(_, number)| number);
    number.is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
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

    /// Whether the cluster has to be asked before a program may be this domain (protocol H3).
    pub(super) fn must_claim(&self, name: &Name, binds: bool) -> bool {
        self.cluster.follower.is_some()
            && self.policy.cluster().is_some()
            && !self.is_gateways_name(name)
            && binds == is_of_process(name)
    }

    /// Has a request wait until the cluster has decided about a name.
    pub(super) fn claim(&mut self, name: Name, waiting: WaitingRequest) -> Result<(), Refuse> {
        if self.cluster.claims.values().flat_map(|claim| &claim.waiting).any(|one| one.session == waiting.session) {
            return refuse(Refusal::Protocol, "this session waits for its name already");
        }
        let since = self.now;
        let claim = self.cluster.claims.entry(name.clone()).or_insert_with(|| Claim { since, waiting: Vec::new() });
        claim.waiting.push(waiting);
        self.touch_name(&name, None);
        Ok(())
    }

    pub(super) fn name_claimed(
        &mut self,
        id: SessionId,
        request: u32,
        domain: &str,
        holder: &str,
    ) -> Result<(), Refuse> {
        self.as_gateway(id)?;
        let domain = refuse::name(domain)?;
        let holder = if holder.is_empty() { None } else { Some(refuse::name(holder)?) };
        self.send(id, request, Message::Done {});
        self.decide_claim(&domain, holder.as_ref());
        Ok(())
    }

    /// Executes the requests that wait for a name, or refuses them because another host has it.
    fn decide_claim(&mut self, name: &Name, holder: Option<&Name>) {
        let Some(claim) = self.cluster.claims.remove(name) else { return };
        for WaitingRequest { session, request, what } in claim.waiting {
            let (asked, done) = match (what, holder) {
                (Claiming::Join { version }, None) => {
                    ("Join", self.join(session, request, version, name.as_str(), true))
                }
                (Claiming::Bind { service, kind, backlog }, None) => {
                    ("Bind", self.bind(session, request, &service, kind, backlog, true))
                }
                (what, Some(host)) => {
                    let asked = if matches!(what, Claiming::Join { .. }) { "Join" } else { "Bind" };
                    (asked, refuse(Refusal::NameTaken, format!("{name} is a domain of the host {host}")))
                }
            };
            if let Err(refused) = done {
                self.refuse_later(session, request, asked, refused);
            }
        }
        self.touch_name(name, None);
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

    /// What the gateway is to hear of a name.
    fn news_of(&self, (domain, service): &NameKey) -> NameNews {
        let found = self.domain_named(domain).and_then(|id| Some((id, self.domains.get(&id)?)));
        match (found, service) {
            (Some((id, _)), Some(service)) if self.service_named(id, service).is_some() => NameNews::Present,
            (Some((_, record)), None) if record.services > 0 || !is_of_process(domain) => NameNews::Present,
            (_, None) if self.cluster.claims.contains_key(domain) => NameNews::Claim,
            _ => NameNews::Gone,
        }
    }

    /// Notes that a domain or a service has come or gone.
    pub(super) fn touch_name(&mut self, domain: &Name, service: Option<&Name>) {
        if self.cluster.follower.is_none() || self.is_gateways_name(domain) {
            return;
        }
        let key = (domain.clone(), service.cloned());
        let is_gone = self.news_of(&key) == NameNews::Gone;
        if let Some(follower) = &mut self.cluster.follower {
            follower.touch(key, is_gone);
        }
        if service.is_some() && is_of_process(domain) {
            self.touch_name(domain, None);
        }
    }

    pub(super) fn follow_names(&mut self, id: SessionId, request: u32, after: u64) -> Result<(), Refuse> {
        self.as_gateway(id)?;
        match &self.cluster.follower {
            None => self.begin_to_follow(id),
            Some(follower) if follower.session != id => {
                return refuse(Refusal::Quota, "another session follows names; there is one gateway for each host");
            }
            Some(follower) if follower.waiting.is_some() => {
                return refuse(Refusal::Protocol, "this session waits for names already");
            }
            Some(follower) => {
                let known: Vec<_> = follower.outbox.range(..=after).map(|(key, name)| (*key, name.clone())).collect();
                for (key, name) in known {
                    let is_gone = self.news_of(&name) == NameNews::Gone;
                    let Some(follower) = &mut self.cluster.follower else { break };
                    follower.outbox.remove(&key);
                    follower.keys.remove(&name);
                    if is_gone {
                        follower.told.remove(&name);
                    }
                }
            }
        }
        if let Some(follower) = &mut self.cluster.follower {
            follower.waiting = Some(request);
        }
        Ok(())
    }

    fn begin_to_follow(&mut self, session: SessionId) {
        self.cluster.follower = Some(NameFollower {
            session,
            last: 0,
            outbox: BTreeMap::new(),
            keys: HashMap::new(),
            told: HashSet::new(),
            waiting: None,
            is_new: true,
        });
        let domains: Vec<_> = self.domains.values().map(|domain| domain.name.clone()).collect();
        for domain in domains {
            self.touch_name(&domain, None);
        }
        let bound = self.services.values();
        let services: Vec<_> =
            bound.filter_map(|service| Some((self.name_of(service.domain)?.clone(), service.name.clone()))).collect();
        for (domain, service) in services {
            self.touch_name(&domain, Some(&service));
        }
        tracing::info!("the gateway follows names");
    }

    /// Answers the gateway if some names have changed.
    pub(super) fn serve_names(&mut self) {
        let Some(follower) = &self.cluster.follower else { return };
        let (Some(request), Some(cluster)) = (follower.waiting, self.policy.cluster()) else { return };
        if follower.outbox.is_empty() && !follower.is_new || self.as_gateway(follower.session).is_err() {
            return;
        }
        let row = |(key, name): (&u64, &NameKey)| {
            let id = self.domain_named(&name.0);
            let service = name.1.as_ref().zip(id).and_then(|(service, id)| self.service_named(id, service));
            let kind = service.and_then(|key| self.services.get(&key)).map_or(Kind::Stream, |service| service.kind);
            let (domain, service) = (name.0.to_string(), name.1.as_ref().map_or_else(String::new, Name::to_string));
            NameRow { key: *key, news: self.news_of(name), kind, domain, service }
        };
        let rows: Vec<_> = follower.outbox.iter().take(ROWS).map(row).collect();
        let more = follower.outbox.len() > rows.len();
        let (session, host) = (follower.session, cluster.host.to_string());
        let Some(follower) = &mut self.cluster.follower else { return };
        // The encoder may cut the page. Names of rows that it left out count as told, which only means that they are reported when they go.
        let told: Vec<_> = follower.outbox.values().take(ROWS).cloned().collect();
        follower.told.extend(told);
        (follower.waiting, follower.is_new) = (None, false);
        self.send(session, request, Message::Names { host, page: Page { more, rows } });
    }

    /// A session has ended: the gateway's, or one that waits.
    pub(super) fn end_in_cluster(&mut self, id: SessionId) {
        if self.cluster.follower.as_ref().is_some_and(|follower| follower.session == id) {
            self.cluster.follower = None;
            tracing::warn!("the gateway is gone: programs find domains of this host only");
            self.decide_all(|_| true);
        }
        let waits = |claim: &Claim| claim.waiting.iter().any(|one| one.session == id);
        let names: Vec<_> =
            self.cluster.claims.iter().filter(|(_, claim)| waits(claim)).map(|(name, _)| name.clone()).collect();
        for name in names {
            let Some(claim) = self.cluster.claims.get_mut(&name) else { continue };
            claim.waiting.retain(|one| one.session != id);
            if claim.waiting.is_empty() {
                self.cluster.claims.remove(&name);
                self.touch_name(&name, None);
            }
        }
        let routes: Vec<_> =
            self.cluster.routes.iter().filter(|(_, route)| route.session == id).map(|(channel, _)| *channel).collect();
        for channel in routes {
            self.cluster.routes.remove(&channel);
            self.release_both(channel);
        }
    }

    /// Executes the waiting requests of some claims, as without a cluster.
    fn decide_all(&mut self, which: impl Fn(&Claim) -> bool) {
        let names: Vec<_> =
            self.cluster.claims.iter().filter(|(_, claim)| which(claim)).map(|(name, _)| name.clone()).collect();
        for name in names {
            tracing::warn!(domain = %name, "the cluster has not decided about this name: it is used without");
            self.decide_claim(&name, None);
        }
    }

    /// Ends what has waited too long.
    pub(super) fn tick_cluster(&mut self) {
        let now = self.now;
        self.decide_all(|claim| now >= claim.since.saturating_add(CLAIM_PATIENCE));
        let late = |route: &PendingRoute<F>| now >= route.since.saturating_add(ROUTE_PATIENCE);
        let late: Vec<_> =
            self.cluster.routes.iter().filter(|(_, route)| late(route)).map(|(channel, _)| *channel).collect();
        for channel in late {
            self.refuse_route_to_client(channel, Refusal::OutOfResources, "the gateway does not answer".to_owned());
        }
    }

    /// Whether something waits for the gateway, which [`Self::tick_cluster`] ends.
    pub(super) fn waits_for_gateway(&self) -> bool {
        !self.cluster.claims.is_empty() || !self.cluster.routes.is_empty()
    }

    /// Hands a connection to a domain that is not on this host to the gateway. `false` if it is not for the gateway.
    pub(super) fn connect_elsewhere(
        &mut self,
        (id, request): (SessionId, u32),
        (target, service): (&Name, &Name),
        shape: Shape,
        with: &[F],
    ) -> Result<bool, Refuse> {
        let Some(cluster) = self.policy.cluster() else { return Ok(false) };
        let Some((from_id, from, peer)) = self.member(id) else { return Ok(false) };
        if self.domain_named(target).is_some() || cluster.gateway == *target || peer.origin() != Origin::Host {
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
        let geometry = own_memory(shape.region)?;
        from.afford(shape.region.ring_size)?;
        self.may_wait(to_id, key, listener)?;
        let Some(region) = with.first() else { return Ok(true) };
        check_region(region, geometry)?;
        let from = from.name.clone();
        let mut with = with.to_vec();
        let links = make_links(shape.directions.count(), true, &mut with)?;
        let memory = ConnectMemory { kept: Some(region.clone()), links, with };
        let (shown, at_home) = (from.to_string(), peer.sees_what_its_user_has());
        let (target, service) = (target.clone(), service.clone());
        let plan = ConnectPlan {
            from: from_id,
            peer,
            shown,
            at_home,
            target: target.clone(),
            to: to_id,
            service: service.clone(),
            key,
            listener,
            here: Origin::Host,
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
        self.cluster.routes.insert(self.next_channel, route);
        self.apply_connect((id, request), plan, shape, memory);
        Ok(true)
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
    pub(super) fn keep_for_route(&mut self, channel: ChannelId, links: Vec<F>) -> Option<Vec<F>> {
        match self.cluster.routes.get_mut(&channel) {
            Some(route) => {
                route.links = links;
                None
            }
            None => Some(links),
        }
    }

    /// Forgets a connection that the gateway did not get.
    pub(super) fn forget_route(&mut self, channel: ChannelId) {
        self.cluster.routes.remove(&channel);
    }

    pub(super) fn route(&mut self, id: SessionId, request: u32, channel: ChannelId) -> Result<(), Refuse> {
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
    pub(super) fn route_to(
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

    pub(super) fn refuse_route(
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
    pub(super) fn route_is_lost(&mut self, channel: ChannelId) {
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
    pub(super) fn may_accept(&self, channel: ChannelId) -> Result<(), Refuse> {
        match self.cluster.routes.get(&channel) {
            Some(route) if route.ruling.is_none() => refuse(
                Refusal::Protocol,
                format!("the host of channel {channel} is not known yet: RouteTo comes first"),
            ),
            _ => Ok(()),
        }
    }

    /// The gateway has accepted: the connecting side gets its answer.
    pub(super) fn answer_route(&mut self, channel: ChannelId) {
        let Some(PendingRoute { session, request, links, ruling, .. }) = self.cluster.routes.remove(&channel) else {
            return;
        };
        if let Some(ruling) = ruling {
            self.note_connected(channel, EventKind::Connected, &ruling);
        }
        self.answer_connect((session, request), channel, links);
    }

    /// Connects the gateway to a service here for a domain of another host (protocol H5).
    pub(super) fn connect_for(
        &mut self,
        (id, request): (SessionId, u32),
        client: &str,
        (target, service): (&str, &str),
        (shape, with): (Shape, Vec<F>),
    ) -> Result<(), Refuse> {
        self.as_gateway(id)?;
        let Some((from, host)) = client.split_once('@') else {
            return refuse(Refusal::NameInvalid, "a client of another host is called DOMAIN@HOST");
        };
        let [from, host, target, service] =
            [refuse::name(from)?, refuse::name(host)?, refuse::name(target)?, refuse::name(service)?];
        let (located, geometry) = shape.check()?;
        let Some((domain, _, peer)) = self.member(id) else { return Ok(()) };
        let ruling = self.policy.ruling(&self.policy.judge_connect_from((&from, &host), &target, &service));
        self.tally.decision("connect", &ruling);
        if !ruling.allowed {
            let reason = format!("the policy does not let {from} of the host {host} connect to {target}:{service}");
            let (kind, from, to) = (EventKind::ConnectRefused, format!("{from}@{host}"), target.to_string());
            let service = service.to_string();
            return Err(Refuse::denied(reason, Denial { kind, peer, domain, from, to, service, other: None, ruling }));
        }
        if shape.kind != Kind::Stream {
            return refuse(Refusal::KindMismatch, "only streams go to other hosts");
        }
        let machine = |id| self.domains.get(&id).is_some_and(|d| d.founder.origin() != Origin::Host);
        if self.domain_named(&target).is_some_and(machine) {
            return refuse(
                Refusal::Machine,
                format!("{target} is in a virtual machine, which other hosts do not reach"),
            );
        }
        if self.is_gateways_name(&target) {
            return refuse(Refusal::NoSuchDomain, format!("no domain is called {target} now"));
        }
        let Some(region) = with.first() else { return Ok(()) };
        let Some(mut plan) = self.plan_connect(id, (target, service), shape, located, ruling)? else { return Ok(()) };
        (plan.shown, plan.at_home) = (format!("{from}@{host}"), false);
        check_region(region, geometry)?;
        let kept = Some(region.clone());
        let mut with = with.clone();
        let links = make_links(shape.directions.count(), true, &mut with)?;
        self.apply_connect((id, request), plan, shape, ConnectMemory { kept, links, with });
        Ok(())
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
            Message::NameClaimed { domain, holder } => self.name_claimed(id, request, &domain, &holder),
            Message::Route { channel } => self.route(id, request, channel),
            Message::RouteTo { channel, host } => self.route_to(id, request, channel, &host),
            Message::RefuseRoute { channel, code, reason } => self.refuse_route(id, request, channel, code, reason),
            Message::ConnectFor { client, target, service, kind, directions, region } => {
                let shape = Shape { kind, directions, region };
                self.connect_for((id, request), &client, (&target, &service), (shape, with))
            }
            other => super::dispatch::no_request(&other),
        }
    }

    /// Panics if a claim or a route belongs to nothing.
    #[cfg(any(test, feature = "invariants"))]
    pub(super) fn check_cluster(&self) {
        let Cluster { follower, claims, routes } = &self.cluster;
        assert!(follower.is_some() || claims.is_empty(), "a claim that nothing will decide");
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
        if let Some(NameFollower { session, outbox, keys, .. }) = follower {
            assert!(self.sessions.contains_key(session) && outbox.len() == keys.len());
            assert!(outbox.iter().all(|(key, name)| keys[name] == *key));
        }
    }
}
