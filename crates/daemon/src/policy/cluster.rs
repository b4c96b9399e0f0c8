//! The part of this host in a cluster (protocol H): its name, its gateway, and the rules for domains of other hosts.

use partywall_protocol::wire::Name;
use serde::Deserialize;
use toml::Spanned;

use super::{ConnectRule, Grounds, HostUser, NamePattern, Policy};
use crate::credentials::{Credentials, Home};

/// The table `[cluster]`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClusterTable {
    /// The name of this host in the cluster.
    #[serde(deserialize_with = "name")]
    pub(crate) host: Name,
    /// The domain of the gateway.
    #[serde(default = "default_gateway", deserialize_with = "name")]
    pub(crate) gateway: Name,
    /// The users who may be the gateway, beside administrators.
    #[serde(default)]
    users: Vec<HostUser>,
    /// Whether virtual machines have a part in the cluster. The gateway then has the memory that the host shares with them.
    #[serde(default)]
    pub(crate) machines: bool,
}

fn name<'de, D: serde::Deserializer<'de>>(text: D) -> Result<Name, D::Error> {
    Name::new(&String::deserialize(text)?).map_err(serde::de::Error::custom)
}

fn default_gateway() -> Name {
    Name::new("gateway").expect("a constant that is a name")
}

impl Policy {
    /// The part of this host in a cluster, if it has one.
    pub(crate) fn cluster(&self) -> Option<&ClusterTable> {
        self.cluster.as_ref()
    }

    /// Whether this process, which has joined as `domain`, is the gateway (protocol H1).
    pub(crate) fn is_gateway(&self, peer: Credentials, domain: &Name) -> bool {
        self.cluster.as_ref().is_some_and(|cluster| {
            let is_user = || peer.home == Home::Broker && cluster.users.iter().any(|user| user.is(peer.user));
            cluster.gateway == *domain && (self.is_administrator(peer) || is_user())
        })
    }

    /// Whether this process is the gateway, and may have channels to virtual machines.
    pub(crate) fn is_gateway_of_machines(&self, peer: Credentials, domain: &Name) -> bool {
        self.cluster.as_ref().is_some_and(|cluster| cluster.machines) && self.is_gateway(peer, domain)
    }

    /// Whether some rule lets `from` connect to something of `to` on another host.
    pub(crate) fn may_reach_elsewhere(&self, from: &Name, to: &Name) -> bool {
        self.cluster_rule(|rule| {
            rule.from_host.is_none() && rule.to_host.is_some() && rule.from.matches(from) && rule.to.matches(to)
        })
        .allow()
    }

    /// Whether domain `from` of this host, run by `peer`, may connect to `service` of domain `to` on another host, and why. `host` is that host;
    /// without it, some host.
    pub(crate) fn judge_connect_to(
        &self,
        peer: Credentials,
        from: &Name,
        (to, host): (&Name, Option<&Name>),
        service: &Name,
    ) -> Grounds<'_> {
        let fits = |pattern: &NamePattern| host.is_none_or(|host| pattern.matches(host));
        self.administrator(peer).unwrap_or_else(|| {
            self.cluster_rule(|rule| {
                rule.from_host.is_none()
                    && rule.to_host.as_ref().is_some_and(fits)
                    && rule.from.matches(from)
                    && rule.to.matches(to)
                    && rule.service.matches(service)
            })
        })
    }

    /// Whether domain `from` of the other host `host` may connect to `service` of domain `to` of this host, and why. Only a rule that names the
    /// other host can allow it.
    pub(crate) fn judge_connect_from(&self, (from, host): (&Name, &Name), to: &Name, service: &Name) -> Grounds<'_> {
        self.cluster_rule(|rule| {
            rule.to_host.is_none()
                && rule.from_host.as_ref().is_some_and(|pattern| pattern.matches(host))
                && rule.from.matches(from)
                && rule.to.matches(to)
                && rule.service.matches(service)
        })
    }

    fn cluster_rule(&self, allows: impl Fn(&ConnectRule) -> bool) -> Grounds<'_> {
        match (1..).zip(&self.connect).find(|(_, rule)| allows(Spanned::get_ref(rule))) {
            Some((number, rule)) => Grounds::ConnectRule { number, rule },
            None => Grounds::NoConnectRule,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "\
administrators = [7]
[cluster]
host = 'alpha'
users = [44]
[[connect]]
from = '*'
to = '*'
[[connect]]
from = 'web-*'
to = 'db'
to_host = 'beta'
service = 'sql'
[[connect]]
from = 'web-*'
from_host = 'beta'
to = 'mail'
";

    fn named(text: &str) -> Name {
        Name::new(text).unwrap()
    }

    fn user(uid: u32) -> Credentials {
        Credentials::on_host(uid, uid, Home::Broker, 1)
    }

    #[test]
    fn local_rule_allows_nothing_across_hosts() {
        let policy = Policy::parse(FILE).unwrap();
        let [web, db, mail, beta, gamma, sql] = ["web-1", "db", "mail", "beta", "gamma", "sql"].map(named);
        for (host, service, allowed) in
            [(Some(&beta), &sql, true), (None, &sql, true), (Some(&gamma), &sql, false), (Some(&beta), &mail, false)]
        {
            let grounds = policy.judge_connect_to(user(33), &web, (&db, host), service);
            assert_eq!(grounds.allow(), allowed, "{host:?} {service}");
        }
        assert!(policy.judge_connect_to(user(7), &mail, (&db, Some(&gamma)), &sql).allow(), "an administrator");
        assert!(policy.judge_connect_from((&web, &beta), &mail, &sql).allow());
        assert!(!policy.judge_connect_from((&web, &gamma), &mail, &sql).allow());
        assert!(!policy.judge_connect_from((&web, &beta), &db, &sql).allow());
        assert!(!policy.judge_connect_from((&mail, &beta), &mail, &sql).allow(), "a domain may connect to itself here");
    }

    #[test]
    fn rule_for_other_host_allows_nothing_here() {
        let policy = Policy::parse(&FILE.replace("from = '*'\nto = '*'", "from = 'x'\nto = 'y'")).unwrap();
        let [web, db, mail, sql] = ["web-1", "db", "mail", "sql"].map(named);
        assert!(!policy.may_connect(user(33), &web, &db, &sql) && !policy.may_reach(&web, &db));
        assert!(!policy.may_connect(user(33), &web, &mail, &sql) && !policy.may_reach(&web, &mail));
    }

    #[test]
    fn gateway_is_a_listed_user_or_administrator() {
        let policy = Policy::parse(FILE).unwrap();
        let [gateway, web] = ["gateway", "web-1"].map(named);
        let in_container = Credentials { home: Home::Container { user: 1, pid: 1 }, ..user(44) };
        for (peer, domain, expected) in [
            (user(44), &gateway, true),
            (user(7), &gateway, true),
            (user(33), &gateway, false),
            (user(44), &web, false),
            (in_container, &gateway, false),
        ] {
            assert_eq!(policy.is_gateway(peer, domain), expected, "{peer:?} {domain}");
        }
        assert!(!Policy::for_user(44).is_gateway(user(44), &gateway), "there is no cluster");
    }

    #[test]
    fn gateway_has_channels_to_machines_only_if_the_file_says_so() {
        let [gateway, web] = ["gateway", "web-1"].map(named);
        let policy = Policy::parse(FILE).unwrap();
        assert!(!policy.is_gateway_of_machines(user(44), &gateway));
        let policy = Policy::parse(&FILE.replace("users = [44]", "users = [44]\nmachines = true")).unwrap();
        assert!(policy.is_gateway_of_machines(user(44), &gateway));
        assert!(!policy.is_gateway_of_machines(user(44), &web) && !policy.is_gateway_of_machines(user(33), &gateway));
    }

    #[test]
    fn domain_reaches_elsewhere_by_rules_for_other_hosts_alone() {
        let policy = Policy::parse(FILE).unwrap();
        let [web, db, mail] = ["web-1", "db", "mail"].map(named);
        assert!(policy.may_reach_elsewhere(&web, &db));
        assert!(!policy.may_reach_elsewhere(&web, &mail) && !policy.may_reach_elsewhere(&mail, &db));
    }
}
