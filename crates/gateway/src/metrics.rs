//! Metrics over HTTP, for Prometheus and its like (OpenMetrics 1.0), as the broker serves its own.
//!
//! All that a scraper can do is bounded: the number of scrapers, the size of a request, and the time for all of it.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::counters::GatewayCounters;
use crate::directory::ClusterDirectory;

/// The most scrapers at once. One more takes the place of the oldest, so silent ones keep no other out.
const SCRAPERS: usize = 32;
/// How long a scraper may take for all of it.
const PATIENCE: Duration = Duration::from_secs(5);
/// Longest request that is read.
const LONGEST: usize = 8 << 10;
/// Headers that a request may have.
const HEADERS: usize = 64;
/// How long to wait when no connection can be accepted.
const PAUSE: Duration = Duration::from_millis(100);

const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const PLAIN: &str = "text/plain; charset=utf-8";

type Labels = Vec<(&'static str, String)>;

/// What the metrics are made of.
pub(crate) struct MetricsSource {
    pub(crate) counters: Arc<GatewayCounters>,
    pub(crate) directory: Arc<ClusterDirectory>,
}

/// Listens for scrapers.
pub(crate) async fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    TcpListener::bind(address).await
}

/// Serves metrics until the gateway ends.
pub(crate) async fn serve(listener: TcpListener, source: MetricsSource) {
    let source = Arc::new(source);
    let mut scrapers = VecDeque::new();
    loop {
        let Ok((socket, _)) = listener.accept().await else {
            // No descriptors are left, or the scraper has gone again.
            tokio::time::sleep(PAUSE).await;
            continue;
        };
        scrapers.retain(|scraper: &tokio::task::JoinHandle<()>| !scraper.is_finished());
        if scrapers.len() >= SCRAPERS
            && let Some(oldest) = scrapers.pop_front()
        {
            oldest.abort();
        }
        let source = Arc::clone(&source);
        scrapers.push_back(tokio::spawn(async move {
            // A scraper that goes, or is slow, gets no metrics.
            let _ = tokio::time::timeout(PATIENCE, answer(socket, &source)).await;
        }));
    }
}

/// Answers one scraper.
async fn answer(mut socket: TcpStream, source: &MetricsSource) -> io::Result<()> {
    let mut request = Vec::new();
    let status = loop {
        if socket.read_buf(&mut request).await? == 0 {
            return Ok(());
        }
        match status_of(&request) {
            Some(status) => break status,
            None if request.len() > LONGEST => break "431 Request Header Fields Too Large",
            None => {}
        }
    };
    let text = if status == OK { text(source).map_err(io::Error::other)? } else { String::new() };
    let (kind, body) = if status == OK { (OPENMETRICS, text.as_str()) } else { (PLAIN, body_of(status)) };
    let length = body.len();
    let head =
        format!("HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n");
    socket.write_all(&[head.as_bytes(), body.as_bytes()].concat()).await?;
    socket.shutdown().await?;
    // A socket that is closed with bytes unread resets the connection, and the scraper may lose the answer.
    let mut rest = [0; 4096];
    while socket.read(&mut rest).await? > 0 {}
    Ok(())
}

const OK: &str = "200 OK";
/// The status of a request with the name of another host.
const MISDIRECTED: &str = "421 Misdirected Request";

/// The text of an answer that has no metrics.
fn body_of(status: &str) -> &'static str {
    match status {
        MISDIRECTED => "the Host header must be localhost or a loopback address\n",
        _ => "metrics are at /metrics\n",
    }
}

/// The status of the answer to a request; `None` while the request is incomplete.
fn status_of(bytes: &[u8]) -> Option<&'static str> {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS];
    let mut request = httparse::Request::new(&mut headers);
    match request.parse(bytes) {
        Ok(httparse::Status::Partial) => None,
        // A page in a browser of this host can reach a loopback port by another name, but cannot hide that name.
        Ok(httparse::Status::Complete(_)) if !request.headers.iter().all(is_not_strange) => Some(MISDIRECTED),
        Ok(httparse::Status::Complete(_)) => Some(match (request.method, request.path) {
            (Some("GET"), Some(path)) if path.split('?').next() == Some("/metrics") => OK,
            (Some("GET"), _) => "404 Not Found",
            _ => "405 Method Not Allowed",
        }),
        Err(_) => Some("400 Bad Request"),
    }
}

/// Whether a header is no `Host`, or names this host.
fn is_not_strange(header: &httparse::Header<'_>) -> bool {
    if !header.name.eq_ignore_ascii_case("host") {
        return true;
    }
    let Ok(host) = std::str::from_utf8(header.value) else { return false };
    let is_loopback = |host: &str| host.parse().is_ok_and(|ip: IpAddr| ip.is_loopback());
    let name = match host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((six, _)) => return is_loopback(six),
        None => host.split(':').next().unwrap_or_default(),
    };
    name.is_empty() || name.eq_ignore_ascii_case("localhost") || is_loopback(name)
}

/// The whole answer.
fn text(source: &MetricsSource) -> Result<String, fmt::Error> {
    let MetricsSource { counters, directory } = source;
    let (fresh, _) = directory.freshness();
    let (hosts, domains, services) = directory.with_table(|table| (table.hosts(), table.domains(), table.services()));
    let conflicts = directory.with_own(|own| own.conflicts()).len();
    let mut registry = Registry::with_prefix("partywall_gateway");
    let info = vec![("version", env!("CARGO_PKG_VERSION").to_owned()), ("host", directory.host().to_string())];
    registry.register("build", "The gateway that serves this", Info::new(info));
    for (name, help, value) in [
        ("directory_fresh", "1 while etcd is reached and the directory is what it has, otherwise 0", u64::from(fresh)),
        ("directory_hosts", "Hosts of the cluster that have a gateway", hosts as u64),
        ("directory_domains", "Domains of all hosts", domains as u64),
        ("directory_services", "Services of all domains", services as u64),
        ("directory_conflicts", "Domains of this host whose names other hosts have", conflicts as u64),
    ] {
        registry.register(name, help, ConstGauge::new(value));
    }
    let streams = Family::<Labels, Gauge>::default();
    for ((host, direction), count) in counters.streams() {
        let labels = vec![("host", host.to_string()), ("direction", direction.label().to_owned())];
        streams.get_or_create(&labels).set(i64::try_from(count).unwrap_or(i64::MAX));
    }
    registry.register("streams", "Open streams by the other host, and by which side has connected", streams);
    let bytes = Family::<Labels, Counter>::default();
    for (direction, count) in counters.bytes() {
        bytes.get_or_create(&vec![("direction", direction.label().to_owned())]).inc_by(count);
    }
    registry.register("bytes", "Bytes of streams from and to other hosts since the start", bytes);
    let refusals = Family::<Labels, Counter>::default();
    for (direction, code, count) in counters.refusals() {
        let labels = vec![("direction", direction.label().to_owned()), ("reason", kebab(&format!("{code:?}")))];
        refusals.get_or_create(&labels).inc_by(count);
    }
    registry.register("refusals", "Connections from and to other hosts that were refused, since the start", refusals);
    let mut text = String::new();
    encode(&mut text, &registry)?;
    Ok(text)
}

/// The stable code of a refusal, such as `name-taken`.
fn kebab(name: &str) -> String {
    let mut kebab = String::new();
    for letter in name.chars() {
        if letter.is_ascii_uppercase() && !kebab.is_empty() {
            kebab.push('-');
        }
        kebab.push(letter.to_ascii_lowercase());
    }
    kebab
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_is_answered_once_it_is_whole() {
        for (text, expected) in [
            ("", None),
            ("GET /metrics HTTP/1.1\r\nHost: localhost\r\n", None),
            ("GET /metrics HTTP/1.1\r\nHost: localhost:9465\r\n\r\n", Some(OK)),
            ("GET /metrics?name=x HTTP/1.0\r\n\r\n", Some(OK)),
            ("GET /metrics HTTP/1.1\r\nHost: evil.example:9465\r\n\r\n", Some("421 Misdirected Request")),
            ("GET / HTTP/1.1\r\n\r\n", Some("404 Not Found")),
            ("POST /metrics HTTP/1.1\r\n\r\n", Some("405 Method Not Allowed")),
            ("\u{1}\u{2}\r\n\r\n", Some("400 Bad Request")),
        ] {
            assert_eq!(status_of(text.as_bytes()), expected, "{text:?}");
        }
    }
}
