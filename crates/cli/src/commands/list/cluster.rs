//! `partywall list --cluster`: the names of all hosts, as this host's gateway knows them.

use std::io::{BufRead, Read};
use std::time::Duration;

use partywall::Domain;
use partywall_terminal::{printable, table};
use serde::{Deserialize, Serialize};

/// The service of the gateway.
const SERVICE: &str = "directory";
/// The largest list that is read.
const LONGEST: u64 = 1 << 30;
/// How long the gateway may pause.
const PATIENCE: Duration = Duration::from_secs(10);

/// The list of the cluster.
#[derive(Debug, Serialize)]
pub(super) struct ClusterListing {
    #[serde(flatten)]
    state: ClusterState,
    domains: Vec<ClusterDomain>,
}

/// The first line of the gateway's answer.
#[derive(Debug, Serialize, Deserialize)]
struct ClusterState {
    /// This host.
    host: String,
    /// Whether the directory is what etcd has.
    fresh: bool,
    /// Seconds for which it has been fresh or stale.
    for_s: u64,
    #[serde(rename(serialize = "host_count"))]
    hosts: usize,
    /// Names of this host that other hosts have, and those hosts.
    conflicts: Vec<(String, String)>,
}

/// A further line.
#[derive(Debug, Serialize, Deserialize)]
struct ClusterDomain {
    domain: String,
    host: String,
    /// Names and kinds.
    services: Vec<(String, String)>,
}

/// Reads the list of the gateway whose domain is called `gateway`.
pub(super) fn ask(domain: &Domain, gateway: &str) -> partywall::Result<ClusterListing> {
    let mut stream = domain.connect(&format!("{gateway}:{SERVICE}"))?;
    stream.set_read_timeout(Some(PATIENCE));
    let mut lines = stream.take(LONGEST).lines();
    let wrong = |reason: String| partywall::Error::Invalid(format!("the list of the gateway: {reason}"));
    let first = lines.next().ok_or_else(|| wrong("it is empty".to_owned()))?;
    let parse = |line: std::io::Result<String>| line.map_err(|e| wrong(e.to_string()));
    let state = serde_json::from_str(&parse(first)?).map_err(|e| wrong(e.to_string()))?;
    let row = |line| serde_json::from_str(&parse(line)?).map_err(|e| wrong(e.to_string()));
    let domains = lines.map(row).collect::<partywall::Result<_>>()?;
    Ok(ClusterListing { state, domains })
}

impl ClusterListing {
    pub(super) fn to_text(&self) -> String {
        let Self { state: ClusterState { host, fresh, for_s, hosts, conflicts }, domains } = self;
        let mut t = table(&["DOMAIN", "HOST", "SERVICES"]);
        for row in domains {
            let service = |(name, kind): &(String, String)| match kind.as_str() {
                "stream" => name.clone(),
                kind => format!("{name} ({kind})"),
            };
            let services: Vec<_> = row.services.iter().map(service).collect();
            t.add_row([printable(&row.domain), printable(&row.host), printable(&services.join(", "))]);
        }
        let mut text = super::or_none(&t, domains.is_empty(), "no host has a domain");
        for (domain, other) in conflicts {
            text += &format!(
                "\n{}: the host {} has this name, so other hosts do not find the domain of this host",
                printable(domain),
                printable(other)
            );
        }
        text += &match fresh {
            true => format!("\n\nhost {}, of {hosts}; the directory is up to date", printable(host)),
            false => format!(
                "\n\nhost {}; STALE: the gateway lost etcd {for_s} s ago and goes on with what it knows",
                printable(host)
            ),
        };
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listing(fresh: bool) -> ClusterListing {
        let state = ClusterState {
            host: "alpha".into(),
            fresh,
            for_s: 7,
            hosts: 2,
            conflicts: vec![("x".into(), "beta".into())],
        };
        let services = vec![("queries".into(), "stream".into()), ("news".into(), "broadcast".into())];
        ClusterListing { state, domains: vec![ClusterDomain { domain: "db".into(), host: "beta".into(), services }] }
    }

    #[test]
    fn stale_directory_is_shown_as_stale() {
        let text = listing(true).to_text();
        assert!(text.contains("up to date") && text.contains("queries, news (broadcast)"), "{text}");
        assert!(text.contains("x: the host beta has this name"), "{text}");
        let text = listing(false).to_text();
        assert!(text.contains("STALE") && text.contains("7 s ago"), "{text}");
    }
}
