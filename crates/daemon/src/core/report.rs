//! The source of the metrics: the present counts, and the work done since the start.
//!
//! A report is made on request. Everything that a client chooses is bounded here: at most [`DOMAINS`] domains are named.

use std::collections::{BTreeMap, BTreeSet};

use partywall_protocol::wire::{Kind, Origin, Refusal, Side, User};

use super::channel::EndState;
use super::{Core, CoreStatus, Descriptor};
use crate::credentials::{Credentials, Home};
use crate::policy::{RuleCode, Ruling};

/// Domains that are named.
const DOMAINS: usize = 50;
/// The common name of all other domains. No domain can have this name.
const REST: &str = "(rest)";

/// The work done since the start.
#[derive(Debug, Default)]
pub(super) struct RequestCounts {
    sessions: u64,
    pub(super) rings_made: u64,
    requests: BTreeMap<&'static str, u64>,
    refusals: BTreeMap<(&'static str, Refusal), u64>,
    decisions: BTreeMap<DecisionKey, u64>,
    /// Domains that have a series.
    named: BTreeSet<String>,
}

/// The kind of decision, whether the policy allowed it, and the clause that decided. A file has few clauses.
pub(crate) type DecisionKey = (&'static str, bool, RuleCode);

impl RequestCounts {
    pub(super) fn decision(&mut self, request: &'static str, ruling: &Ruling) {
        *self.decisions.entry((request, ruling.allowed, ruling.rule)).or_default() += 1;
    }

    pub(super) fn session(&mut self) {
        self.sessions += 1;
    }

    pub(super) fn request(&mut self, name: &'static str) {
        *self.requests.entry(name).or_default() += 1;
    }

    /// `request`: the name of a message, or what else is refused.
    pub(super) fn refusal(&mut self, request: &'static str, code: Refusal) {
        *self.refusals.entry((request, code)).or_default() += 1;
    }
}

/// Everything at one moment.
#[derive(Debug, Clone, Default)]
pub(crate) struct CoreReport {
    pub(crate) status: CoreStatus,
    /// By the kind of user: `root`, `user`, `container`, `machine`.
    pub(crate) sessions: BTreeMap<&'static str, u64>,
    /// By kind and state.
    pub(crate) channels: BTreeMap<(&'static str, &'static str), u64>,
    pub(crate) offers: u64,
    pub(crate) listeners: u64,
    /// Bytes of the rings that each domain brought. `NAME-PID` is `NAME-*`.
    pub(crate) ring_bytes: Vec<(String, u64)>,
    /// Machines whose port is connected, and others.
    pub(crate) machines: [u64; 2],
    pub(crate) sessions_opened: u64,
    pub(crate) requests: BTreeMap<&'static str, u64>,
    pub(crate) refusals: BTreeMap<(&'static str, Refusal), u64>,
    pub(crate) decisions: BTreeMap<DecisionKey, u64>,
    /// Connections that have got rings, and flows that have got one, since the start.
    pub(crate) rings_made: u64,
}

impl<F: Descriptor> Core<F> {
    pub(crate) fn report(&mut self) -> CoreReport {
        let mut sessions: BTreeMap<_, u64> = ["container", "machine", "root", "user"].map(|kind| (kind, 0)).into();
        for session in self.sessions.values() {
            *sessions.entry(kind_of_user(session.peer)).or_default() += 1;
        }
        let mut channels: BTreeMap<_, u64> = BTreeMap::new();
        for channel in self.channels.values() {
            let kind = match channel.kind {
                Kind::Socket if channel.is_flow() => "udp",
                Kind::Socket => "tcp",
                other => other.words(),
            };
            let live = |side| channel.end(side).state.is_live();
            let state = match channel.end(Side::Accepting).state {
                EndState::Waiting { .. } => "waiting",
                _ if live(Side::Connecting) && live(Side::Accepting) => "open",
                _ => "half",
            };
            *channels.entry((kind, state)).or_default() += 1;
        }
        let ring_bytes = self.ring_bytes();
        CoreReport {
            status: self.status(),
            sessions,
            channels,
            offers: self.sockets.offers.len() as u64,
            listeners: self.sockets.entries as u64,
            ring_bytes,
            machines: self.machines.up_and_down(),
            sessions_opened: self.tally.sessions,
            requests: self.tally.requests.clone(),
            refusals: self.tally.refusals.clone(),
            decisions: self.tally.decisions.clone(),
            rings_made: self.tally.rings_made,
        }
    }

    fn ring_bytes(&mut self) -> Vec<(String, u64)> {
        let mut by_name: BTreeMap<String, u64> = BTreeMap::new();
        for domain in self.domains.values().filter(|domain| domain.ring_bytes > 0) {
            *by_name.entry(without_process(domain.name.as_ref())).or_default() += domain.ring_bytes;
        }
        name_some(&mut self.tally.named, by_name)
    }
}

/// Gives as many names as may have a series, each for as long as the broker runs: a scraper keeps every series that it ever saw. The largest that
/// have none yet come first; all others are one.
fn name_some(named: &mut BTreeSet<String>, by_name: BTreeMap<String, u64>) -> Vec<(String, u64)> {
    let mut all: Vec<(String, u64)> = by_name.into_iter().collect();
    all.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
    let mut rest = None;
    all.retain(|(name, bytes)| {
        let is_named = named.contains(name) || named.len() < DOMAINS && named.insert(name.clone());
        if !is_named {
            *rest.get_or_insert(0) += bytes;
        }
        is_named
    });
    all.extend(rest.map(|bytes| (REST.into(), bytes)));
    all
}

fn kind_of_user(peer: Credentials) -> &'static str {
    match (peer.origin(), peer.home, peer.user) {
        (Origin::Machine(_), ..) => "machine",
        (Origin::Host, Home::Broker, User::Host(0)) => "root",
        (Origin::Host, Home::Broker, _) => "user",
        (Origin::Host, ..) => "container",
    }
}

/// `nginx-4242` is a name that a program gets by default: each start of it would be another series.
fn without_process(name: &str) -> String {
    match name.rsplit_once('-') {
        Some((program, number)) if !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()) => {
            format!("{program}-*")
        }
        _ => name.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metric_names_are_limited_to_fifty_and_stable() {
        let mut named = BTreeSet::new();
        let many = |from: u64, n: u64| (from..from + n).map(|at| (format!("d{at}"), at)).collect::<BTreeMap<_, _>>();
        let first = name_some(&mut named, many(0, 51));
        assert_eq!((first.len(), first.last()), (51, Some(&(REST.to_owned(), 0))), "the smallest has none");
        let second = name_some(&mut named, many(1000, 60));
        assert_eq!(second, [(REST.to_owned(), (1000..1060).sum())], "new names get none, however large");
        assert_eq!(name_some(&mut named, many(1, 50)).len(), 50);
    }

    #[test]
    fn per_process_domains_share_one_metric_series() {
        for (name, expected) in
            [("nginx-4242", "nginx-*"), ("web", "web"), ("web-a", "web-a"), ("a-", "a-"), ("a-1-2", "a-1-*")]
        {
            assert_eq!(without_process(name), expected);
        }
    }
}
