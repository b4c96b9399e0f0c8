//! This host's names, as the gateway hears of them (protocol H2).

use std::collections::{BTreeMap, HashMap, HashSet};

use partywall_protocol::wire::{Kind, Message, Name, NameNews, NameRow, Page, Refusal};

use crate::core::id::SessionId;
use crate::core::refuse::{Refuse, refuse};
use crate::core::{Core, Descriptor};

/// More rows than the smallest of them fit into a packet; encoding cuts the page to what does.
const ROWS: usize = 300;

/// A domain, or a service of it.
type NameKey = (Name, Option<Name>);

/// The session by which the gateway hears of names.
#[derive(Debug)]
pub(super) struct NameFollower {
    pub(super) session: SessionId,
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

/// Whether a name is like those that programs get by default, `nginx-4242`.
pub(super) fn is_of_process(name: &Name) -> bool {
    let number = name.as_str().rsplit_once('-').map(|(_, number)| number);
    number.is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
}

impl<F: Descriptor> Core<F> {
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
    pub(in crate::core) fn touch_name(&mut self, domain: &Name, service: Option<&Name>) {
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
    pub(in crate::core) fn serve_names(&mut self) {
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
            let news = self.news_of(name);
            let waiting = self.cluster.claims.get(&name.0).filter(|_| news == NameNews::Claim);
            let claim = waiting.map_or(0, |claim| claim.number);
            NameRow { key: *key, news, kind, claim, domain, service }
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

    /// Ends the following of names by a session that the policy names as the gateway no longer (protocol H2.2).
    pub(in crate::core) fn rejudge_follower(&mut self) {
        let Some(NameFollower { session, waiting, .. }) = self.cluster.follower else { return };
        let Err(refused) = self.as_gateway(session) else { return };
        if let Some(request) = waiting {
            self.refuse_later(session, request, "FollowNames", refused);
        }
        self.end_names(session);
    }

    /// A session has ended that may be the one which follows names.
    pub(super) fn end_names(&mut self, id: SessionId) {
        if self.cluster.follower.as_ref().is_some_and(|follower| follower.session == id) {
            self.cluster.follower = None;
            tracing::warn!("the gateway is gone: programs find domains of this host only");
            self.decide_all(|_| true);
        }
    }

    /// Panics if the follower belongs to nothing.
    #[cfg(any(test, feature = "invariants"))]
    pub(super) fn check_names(&self) {
        if let Some(NameFollower { session, outbox, keys, .. }) = &self.cluster.follower {
            assert!(self.sessions.contains_key(session) && outbox.len() == keys.len());
            assert!(outbox.iter().all(|(key, name)| keys[name] == *key));
        }
    }
}
