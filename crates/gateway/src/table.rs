//! The names of the cluster, in memory: which host each domain is on, its services, and where each host's gateway listens.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use partywall::Kind;

use crate::entry::{DomainEntry, HostEntry};

/// Domains that are kept. Later ones are ignored, and counted.
pub const MAX_DOMAINS: usize = 500_000;
/// Services that are kept.
pub const MAX_SERVICES: usize = 2_000_000;
/// Hosts that are kept.
pub const MAX_HOSTS: usize = 20_000;

/// The names of a cluster.
///
/// ```
/// use partywall::Kind;
/// use partywall_gateway::entry::{DomainEntry, HostEntry};
/// use partywall_gateway::table::NameTable;
///
/// let mut table = NameTable::default();
/// table.put_host("alpha", HostEntry { address: "alpha.example:7411".into() });
/// table.put_domain("db", DomainEntry { host: "alpha".into(), services: [("sql".into(), Kind::Stream)].into() });
/// let host = table.host_of("db").expect("it was put there");
/// assert_eq!(table.address_of(host), Some("alpha.example:7411"));
/// assert_eq!((table.domains(), table.services()), (1, 1));
/// table.remove_domain("db");
/// assert_eq!((table.host_of("db"), table.services()), (None, 0));
/// ```
#[derive(Debug, Default)]
pub struct NameTable {
    addresses: HashMap<Arc<str>, Box<str>>,
    domains: HashMap<Box<str>, TableDomain>,
    /// The names of hosts, once each.
    names: HashSet<Arc<str>>,
    services: usize,
    ignored: u64,
    lost: LostNames,
    /// How many entries that were lost have been written again.
    returned: usize,
}

/// What was known when the directory lost its data, and its hosts have not written again: the host of each domain, and addresses.
#[derive(Debug, Default)]
struct LostNames {
    domains: HashMap<Box<str>, Box<str>>,
    addresses: HashMap<Box<str>, Box<str>>,
}

impl LostNames {
    fn len(&self) -> usize {
        self.domains.len() + self.addresses.len()
    }
}

#[derive(Debug)]
struct TableDomain {
    host: Arc<str>,
    services: Box<[(Box<str>, Kind)]>,
}

/// A domain of the cluster.
#[derive(Debug, Clone, Copy)]
pub struct Row<'a> {
    /// Its name.
    pub domain: &'a str,
    /// The host that it is on.
    pub host: &'a str,
    /// Its services, by name, and the kinds of their channels.
    pub services: &'a [(Box<str>, Kind)],
}

impl NameTable {
    /// Enters a domain, or replaces what is known of it.
    pub fn put_domain(&mut self, name: &str, entry: DomainEntry) {
        self.returned += usize::from(self.lost.domains.contains_key(name));
        self.remove_domain(name);
        let (count, is_known) = (entry.services.len(), self.names.contains(entry.host.as_str()));
        let is_full = self.domains.len() >= MAX_DOMAINS
            || self.services + count > MAX_SERVICES
            || !is_known && self.names.len() >= MAX_HOSTS;
        if is_full {
            self.ignored += 1;
            return;
        }
        let host = self.shared(&entry.host);
        let services = entry.services.into_iter().map(|(name, kind)| (name.into_boxed_str(), kind)).collect();
        self.services += count;
        self.domains.insert(name.into(), TableDomain { host, services });
    }

    /// Forgets a domain.
    pub fn remove_domain(&mut self, name: &str) {
        self.lost.domains.remove(name);
        if let Some(domain) = self.domains.remove(name) {
            self.services -= domain.services.len();
        }
    }

    /// Enters a host, or replaces what is known of it.
    pub fn put_host(&mut self, name: &str, entry: HostEntry) {
        if !self.names.contains(name) && self.names.len() >= MAX_HOSTS {
            self.ignored += 1;
            return;
        }
        let name = self.shared(name);
        self.returned += usize::from(self.lost.addresses.remove(&*name).is_some());
        self.addresses.insert(name, entry.address.into_boxed_str());
    }

    /// Forgets a host. Its domains have separate entries.
    pub fn remove_host(&mut self, name: &str) {
        self.lost.addresses.remove(name);
        self.addresses.remove(name);
    }

    /// Takes the place of `old`. If the directory has lost its data since then (`is_data_lost`), hosts other than `own` still have their names
    /// here until they have written them again, or [`forget_lost`](Self::forget_lost) is called.
    pub(crate) fn replace(&mut self, old: Self, is_data_lost: bool, own: &str) {
        (self.lost, self.returned) = (old.lost, old.returned);
        if is_data_lost {
            let domains = old.domains.into_iter().filter(|(_, of)| &*of.host != own);
            self.lost.domains.extend(domains.map(|(name, of)| (name, Box::from(&*of.host))));
            let addresses = old.addresses.into_iter().filter(|(host, _)| &**host != own);
            self.lost.addresses.extend(addresses.map(|(host, address)| (Box::from(&*host), address)));
        }
        let before = self.lost.len();
        self.lost.domains.retain(|name, _| !self.domains.contains_key(name));
        self.lost.addresses.retain(|host, _| !self.addresses.contains_key(&**host));
        self.returned += before - self.lost.len();
    }

    /// How many entries that were lost with the directory's data have been written again so far. Each counts once for each loss.
    pub(crate) fn returned(&self) -> usize {
        self.returned
    }

    /// The host that had a domain when the directory lost its data, if no host has written the domain again.
    pub(crate) fn lost_host_of(&self, domain: &str) -> Option<&str> {
        self.lost.domains.get(domain).map(|host| &**host)
    }

    /// Forgets names that were lost with the directory's data, and that no host has written again.
    pub(crate) fn forget_lost(&mut self) {
        self.lost = LostNames::default();
    }

    fn shared(&mut self, name: &str) -> Arc<str> {
        match self.names.get(name) {
            Some(name) => Arc::clone(name),
            None => {
                let name: Arc<str> = name.into();
                self.names.insert(Arc::clone(&name));
                name
            }
        }
    }

    /// The host that a domain is on.
    pub fn host_of(&self, domain: &str) -> Option<&str> {
        self.domains.get(domain).map(|domain| &*domain.host).or_else(|| self.lost_host_of(domain))
    }

    /// Where a host's gateway listens.
    pub fn address_of(&self, host: &str) -> Option<&str> {
        self.addresses.get(host).or_else(|| self.lost.addresses.get(host)).map(|address| &**address)
    }

    /// All domains, in no order.
    pub fn rows(&self) -> impl Iterator<Item = Row<'_>> {
        self.domains.iter().map(|(domain, of)| Row { domain, host: &of.host, services: &of.services })
    }

    /// How many hosts have an address.
    pub fn hosts(&self) -> usize {
        self.addresses.len()
    }

    /// How many domains there are.
    pub fn domains(&self) -> usize {
        self.domains.len()
    }

    /// How many services there are.
    pub fn services(&self) -> usize {
        self.services
    }

    /// How many entries were ignored because the table was full.
    pub fn ignored(&self) -> u64 {
        self.ignored
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(host: &str, services: usize) -> DomainEntry {
        let services = (0..services).map(|n| (format!("s{n}"), Kind::Stream)).collect();
        DomainEntry { host: host.into(), services }
    }

    #[test]
    fn full_table_ignores_further_entries() {
        let mut table = NameTable::default();
        let most = crate::entry::MAX_SERVICES;
        for number in 0..=MAX_SERVICES / most {
            table.put_domain(&format!("d{number}"), entry("alpha", most));
        }
        assert!(table.services() <= MAX_SERVICES && table.ignored() == 1);
        // A smaller entry of the same domain fits.
        let last = format!("d{}", MAX_SERVICES / most);
        table.put_domain(&last, entry("alpha", 1));
        assert_eq!((table.host_of(&last), table.ignored()), (Some("alpha"), 1));

        let mut table = NameTable::default();
        for number in 0..=MAX_HOSTS {
            table.put_host(&format!("h{number}"), HostEntry { address: "a:1".into() });
        }
        table.put_domain("d", entry("another", 0));
        assert_eq!((table.hosts(), table.domains(), table.ignored()), (MAX_HOSTS, 0, 2));
    }

    #[test]
    fn names_lost_with_data_stay_until_written_again_or_forgotten() {
        let address = || HostEntry { address: "a:1".into() };
        let mut old = NameTable::default();
        old.put_host("beta", address());
        for (name, host) in [("gone", "beta"), ("moved", "beta"), ("same", "beta"), ("left", "beta"), ("own", "alpha")]
        {
            old.put_domain(name, entry(host, 1));
        }
        let mut table = NameTable::default();
        table.put_domain("moved", entry("gamma", 0));
        table.replace(old, true, "alpha");
        let hosts = |table: &NameTable| {
            ["gone", "moved", "same", "left", "own"].map(|name| table.host_of(name).map(str::to_owned))
        };
        let [beta, gamma] = ["beta", "gamma"].map(|host| Some(host.to_owned()));
        assert_eq!(hosts(&table), [beta.clone(), gamma.clone(), beta.clone(), beta.clone(), None]);
        assert_eq!((table.address_of("beta"), table.domains(), table.hosts()), (Some("a:1"), 1, 0));
        assert_eq!(
            (table.returned(), table.lost_host_of("moved"), table.lost_host_of("same")),
            (1, None, Some("beta"))
        );
        // The next session finds the same data, in which one domain is back and one has ended.
        let mut next = NameTable::default();
        next.replace(table, false, "alpha");
        next.put_domain("same", entry("beta", 1));
        next.put_domain("same", entry("beta", 2));
        next.remove_domain("left");
        assert_eq!(next.returned(), 2, "an entry that has ended, or is written twice, does not return");
        assert_eq!(hosts(&next), [beta.clone(), None, beta.clone(), None, None]);
        next.forget_lost();
        assert_eq!((hosts(&next), next.address_of("beta")), ([None, None, beta, None, None], None));
        // A name that is missing from the same data has ended.
        let mut last = NameTable::default();
        last.replace(next, false, "alpha");
        assert_eq!(last.host_of("same"), None);
    }

    #[test]
    fn counts_follow_replaced_and_removed_domains() {
        let mut table = NameTable::default();
        table.put_domain("d", entry("alpha", 5));
        table.put_domain("d", entry("beta", 2));
        assert_eq!((table.domains(), table.services(), table.host_of("d")), (1, 2, Some("beta")));
        table.remove_domain("d");
        table.remove_domain("d");
        assert_eq!((table.domains(), table.services()), (0, 0));
    }
}
