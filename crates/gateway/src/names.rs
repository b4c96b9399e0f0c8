//! This host's names: what the broker reports, and what the cluster has decided about each.

use std::collections::{BTreeMap, BTreeSet};

use partywall::Kind;
use partywall::cluster::{NameNews, NameRow};
use tokio::sync::oneshot;

use crate::entry::{DomainEntry, MAX_SERVICES};

/// The decision about a claim: the host that has the name, or `None` if this host may use it.
pub(crate) type Decision = Option<String>;

/// A domain of this host.
#[derive(Debug, Default)]
struct OwnDomain {
    is_present: bool,
    /// The broker's session that has reported it last.
    session: u64,
    services: BTreeMap<String, Kind>,
    claims: Vec<oneshot::Sender<Decision>>,
    /// The other host that has the name.
    held_by: Option<String>,
}

/// The domains of this host, and those whose entries in the directory are not up to date.
#[derive(Debug, Default)]
pub(crate) struct OwnNames {
    domains: BTreeMap<String, OwnDomain>,
    dirty: BTreeSet<String>,
    session: u64,
}

impl OwnNames {
    /// The broker begins to report all names again. Returns the number of this session.
    pub(crate) fn begin(&mut self) -> u64 {
        self.session += 1;
        self.session
    }

    /// Forgets names that the broker has not reported since it began session `number`. They get some time: after a restart of the broker its
    /// clients come back one after the other.
    pub(crate) fn forget_unreported(&mut self, number: u64) {
        let old: Vec<_> = self.domains.iter().filter(|(_, domain)| domain.session < number).collect();
        let old: Vec<_> = old.into_iter().map(|(name, _)| name.clone()).collect();
        for name in old {
            self.forget(&name);
        }
    }

    fn forget(&mut self, name: &str) {
        self.domains.remove(name);
        self.dirty.insert(name.to_owned());
    }

    /// Takes in a change. A claim is to be made by [`Self::claim`].
    pub(crate) fn apply(&mut self, row: &NameRow) {
        let NameRow { news, domain: name, service, kind, .. } = row;
        let session = self.session;
        match (news, service.is_empty()) {
            (NameNews::Claim, _) => return,
            (NameNews::Gone, true) => return self.forget(name),
            (NameNews::Gone, false) => {
                let Some(domain) = self.domains.get_mut(name) else { return };
                domain.services.remove(service);
            }
            (NameNews::Present, is_domain) => {
                let domain = self.domains.entry(name.clone()).or_default();
                if domain.session < session {
                    // What is left of the earlier session is reported again.
                    domain.services.clear();
                }
                (domain.is_present, domain.session) = (true, session);
                if !is_domain {
                    if domain.services.len() >= MAX_SERVICES {
                        tracing::warn!(domain = %name, "it has more services than the directory shows of one domain");
                        return;
                    }
                    domain.services.insert(service.clone(), *kind);
                }
            }
        }
        self.dirty.insert(name.clone());
    }

    /// Wants a name for this host. The decision comes when the directory has been asked.
    pub(crate) fn claim(&mut self, name: &str) -> oneshot::Receiver<Decision> {
        let (decide, decision) = oneshot::channel();
        let session = self.session;
        let domain = self.domains.entry(name.to_owned()).or_default();
        domain.session = session;
        domain.claims.push(decide);
        self.dirty.insert(name.to_owned());
        decision
    }

    /// The entry in the directory that a name should have; `None` if it should have none.
    pub(crate) fn wanted(&self, name: &str, host: &str) -> Option<DomainEntry> {
        let domain = self.domains.get(name)?;
        Some(DomainEntry { host: host.to_owned(), services: domain.services.clone() })
    }

    /// The directory has decided about a name.
    pub(crate) fn decided(&mut self, name: &str, holder: Decision) {
        let Some(domain) = self.domains.get_mut(name) else { return };
        for claim in domain.claims.drain(..) {
            // A claim that has given up needs no answer.
            let _ = claim.send(holder.clone());
        }
        if domain.is_present && holder.is_some() && domain.held_by != holder {
            let host = holder.as_deref().unwrap_or_default();
            tracing::warn!(domain = name, host, "another host has this name: the domain is known on this host only");
        }
        domain.held_by = holder;
        // It was claimed without success, and is no domain of this host.
        if !domain.is_present && domain.held_by.is_some() {
            self.domains.remove(name);
        }
    }

    /// Names whose entries are to be brought up to date, at most `count`.
    pub(crate) fn take_dirty(&mut self, count: usize) -> Vec<String> {
        let some: Vec<_> = self.dirty.iter().take(count).cloned().collect();
        for name in &some {
            self.dirty.remove(name);
        }
        some
    }

    pub(crate) fn is_dirty(&self) -> bool {
        !self.dirty.is_empty()
    }

    pub(crate) fn mark_dirty(&mut self, name: &str) {
        self.dirty.insert(name.to_owned());
    }

    /// All entries are to be written again.
    pub(crate) fn mark_all_dirty(&mut self) {
        self.dirty.extend(self.domains.keys().cloned());
    }

    /// Entries of names that other hosts have are to be written again.
    pub(crate) fn mark_conflicts_dirty(&mut self) {
        let held = self.domains.iter().filter(|(_, domain)| domain.held_by.is_some());
        self.dirty.extend(held.map(|(name, _)| name.clone()));
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.domains.contains_key(name)
    }

    /// The names that other hosts have, and those hosts.
    pub(crate) fn conflicts(&self) -> Vec<(String, String)> {
        let conflict = |(name, domain): (&String, &OwnDomain)| Some((name.clone(), domain.held_by.clone()?));
        self.domains.iter().filter_map(conflict).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(news: NameNews, domain: &str, service: &str) -> NameRow {
        NameRow { key: 1, news, kind: Kind::Stream, claim: 0, domain: domain.into(), service: service.into() }
    }

    #[test]
    fn names_follow_the_brokers_reports() {
        let mut own = OwnNames::default();
        own.begin();
        own.apply(&row(NameNews::Present, "db", ""));
        own.apply(&row(NameNews::Present, "db", "sql"));
        assert_eq!(own.take_dirty(9), ["db"]);
        let entry = own.wanted("db", "alpha").unwrap();
        assert_eq!(entry.services.keys().collect::<Vec<_>>(), ["sql"]);
        own.apply(&row(NameNews::Gone, "db", "sql"));
        assert_eq!(own.wanted("db", "alpha").unwrap().services.len(), 0);
        own.apply(&row(NameNews::Gone, "db", ""));
        assert_eq!((own.wanted("db", "alpha"), own.take_dirty(9)), (None, vec!["db".to_owned()]));
    }

    #[test]
    fn names_unreported_after_restart_of_broker_are_forgotten() {
        let mut own = OwnNames::default();
        own.begin();
        for domain in ["db", "web"] {
            own.apply(&row(NameNews::Present, domain, ""));
            own.apply(&row(NameNews::Present, domain, "old"));
        }
        let second = own.begin();
        own.apply(&row(NameNews::Present, "web", ""));
        own.forget_unreported(second);
        assert!(!own.has("db") && own.has("web"));
        assert_eq!(own.wanted("web", "alpha").unwrap().services.len(), 0, "services are reported again as well");
    }

    #[test]
    fn claim_is_decided_once_and_lost_name_is_forgotten() {
        let mut own = OwnNames::default();
        let mut claim = own.claim("db");
        own.decided("db", Some("beta".into()));
        assert_eq!(claim.try_recv().unwrap(), Some("beta".into()));
        assert!(!own.has("db"));
        // A domain that is here already stays, as a conflict.
        own.begin();
        own.apply(&row(NameNews::Present, "db", ""));
        own.decided("db", Some("beta".into()));
        assert_eq!(own.conflicts(), [("db".to_owned(), "beta".to_owned())]);
    }
}
