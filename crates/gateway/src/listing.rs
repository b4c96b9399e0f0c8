//! The service `directory` of the gateway's domain: the names of the cluster as JSON, one line each, for `partywall list --cluster`.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use partywall::Domain;
use partywall::asynchronous::AsyncListener;
use serde::Serialize;
use tokio::io::AsyncWriteExt;
use tokio::sync::Semaphore;

use crate::directory::ClusterDirectory;
use crate::table::Row;

/// The name of the service.
const SERVICE: &str = "directory";
/// How long a reader may take.
const READER: Duration = Duration::from_secs(30);
/// Readers at a time.
const READERS: usize = 16;

/// The first line: the state of the directory.
#[derive(Debug, Serialize)]
struct ListingState<'a> {
    /// This host.
    host: &'a str,
    /// Whether the directory is what etcd has.
    fresh: bool,
    /// Seconds since it is fresh or stale.
    for_s: u64,
    /// Hosts with a gateway.
    hosts: usize,
    /// Domains of all hosts.
    domains: usize,
    /// Services of all domains.
    services: usize,
    /// Names of this host that other hosts have.
    conflicts: Vec<(String, String)>,
}

/// A further line: a domain.
#[derive(Debug, Serialize)]
struct ListedDomain<'a> {
    domain: &'a str,
    host: &'a str,
    /// Names and kinds.
    services: Vec<(&'a str, String)>,
}

/// Serves the list until the gateway ends.
pub(crate) async fn serve(domain: Domain, directory: Arc<ClusterDirectory>) {
    let readers = Arc::new(Semaphore::new(READERS));
    loop {
        let bound = {
            let domain = domain.clone();
            tokio::task::spawn_blocking(move || domain.bind(SERVICE)).await
        };
        let Ok(Ok(listener)) = bound else {
            tokio::time::sleep(Duration::from_secs(1)).await;
            continue;
        };
        let mut listener = AsyncListener::new(listener);
        loop {
            let mut stream = match listener.accept().await {
                Ok((stream, _)) => stream,
                Err(error) => {
                    tracing::warn!(%error, "the list of the cluster is not served for a moment");
                    break;
                }
            };
            let Ok(turn) = Arc::clone(&readers).try_acquire_owned() else { continue };
            let directory = Arc::clone(&directory);
            tokio::spawn(async move {
                let _turn = turn;
                let text = text(&directory);
                let sent = async {
                    stream.write_all(text.as_bytes()).await?;
                    stream.shutdown().await
                };
                // A reader that goes, or does not read, has its list no longer.
                let _ = tokio::time::timeout(READER, sent).await;
            });
        }
    }
}

fn text(directory: &ClusterDirectory) -> String {
    let (fresh, since) = directory.freshness();
    let conflicts = directory.with_own(|own| own.conflicts());
    directory.with_table(|table| {
        let (hosts, domains, services) = (table.hosts(), table.domains(), table.services());
        let host = directory.host().as_str();
        let mut text = String::new();
        let state = ListingState { host, fresh, for_s: since.as_secs(), hosts, domains, services, conflicts };
        line(&mut text, &state);
        let mut rows: Vec<Row<'_>> = table.rows().collect();
        rows.sort_by_key(|row| row.domain);
        for Row { domain, host, services } in rows {
            let services = services.iter().map(|(name, kind)| (&**name, kind.to_string())).collect();
            line(&mut text, &ListedDomain { domain, host, services });
        }
        text
    })
}

fn line(text: &mut String, value: &impl Serialize) {
    // Text and numbers always serialise, and writing to a string cannot fail.
    let _ = writeln!(text, "{}", serde_json::to_string(value).unwrap_or_default());
}
