//! Metrics of a real broker: their values, clients that must not block it, and whether a real Prometheus reads them.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};

use common::{Client, HANG, eventually};
use partywall_daemon::{Broker, Config};
use partywall_protocol::wire::{self, Message};

const DOCUMENT: &str = include_str!("../../../docs/metrics.md");

struct World {
    broker: Broker,
    dir: tempfile::TempDir,
}

impl World {
    fn new() -> Self {
        Self::with_policy(None)
    }

    fn with_policy(policy: Option<&str>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut config = Config::new(dir.path().join("b.sock")).metrics("127.0.0.1:0".parse().unwrap());
        if let Some(policy) = policy {
            let file = dir.path().join("policy.toml");
            std::fs::write(&file, policy).unwrap();
            config = config.policy_file(file);
        }
        Self { broker: Broker::start(&config).unwrap(), dir }
    }

    fn port(&self) -> SocketAddr {
        self.broker.metrics_port().unwrap()
    }

    fn scrape(&self) -> String {
        let request = "GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n";
        let answer = metrics_from(|| ask(TcpStream::connect(self.port()).unwrap(), request));
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
        assert!(head.contains("application/openmetrics-text; version=1.0.0"), "{head}");
        assert!(head.contains(&format!("Content-Length: {}\r\n", body.len())), "{head}");
        body.to_owned()
    }
}

/// Asks again after an answer without metrics, which comes where a loaded machine keeps the event loop from answering in time.
fn metrics_from(mut ask: impl FnMut() -> String) -> String {
    let mut answer = String::new();
    eventually("the broker answers with metrics", || {
        answer = ask();
        !answer.starts_with("HTTP/1.1 503 ") || !answer.ends_with("\r\n\r\nthe broker does not answer now\n")
    });
    answer
}

fn ask(mut stream: impl Read + Write, request: &str) -> String {
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

fn try_ask(mut stream: TcpStream, request: &str) -> std::io::Result<String> {
    stream.set_read_timeout(Some(std::time::Duration::from_secs(5)))?;
    stream.write_all(request.as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

/// The samples of an OpenMetrics text, which must be one to the letter: each family has a type and a help before its samples, counters end
/// in `_total`, no sample comes twice, and the end is marked.
fn samples(text: &str) -> BTreeMap<String, f64> {
    let mut samples = BTreeMap::new();
    let mut families = BTreeSet::new();
    let (mut family, mut kind) = ("", "");
    let body = text.strip_suffix("# EOF\n").unwrap_or_else(|| panic!("no end: {text}"));
    for line in body.lines() {
        if let Some(comment) = line.strip_prefix("# ") {
            let mut words = comment.splitn(3, ' ');
            let (what, name, rest) = (words.next().unwrap(), words.next().unwrap(), words.next().unwrap());
            match what {
                "HELP" => assert!(families.insert(name) && !rest.is_empty(), "twice, or empty: {line}"),
                "TYPE" => (family, kind) = (name, rest),
                "UNIT" => assert!(name == family && name.ends_with(&format!("_{rest}")), "{line}"),
                _ => panic!("{line}"),
            }
            continue;
        }
        let (series, value) = line.rsplit_once(' ').unwrap();
        let (name, labels) = series.split_once('{').unwrap_or((series, "}"));
        let suffix = match kind {
            "counter" => "_total",
            "info" => "_info",
            "gauge" => "",
            "histogram" => ["_bucket", "_sum", "_count"].into_iter().find(|end| name.ends_with(end)).unwrap_or("_none"),
            other => panic!("type {other}: {line}"),
        };
        assert!(families.contains(family) && name == format!("{family}{suffix}"), "{family} {kind}: {line}");
        let labels = labels.strip_suffix('}').unwrap();
        for label in labels.split(',').filter(|label| !label.is_empty()) {
            let (key, value) = label.split_once('=').unwrap();
            assert!(key.bytes().all(|b| b.is_ascii_lowercase() || b == b'_'), "{line}");
            assert!(value.len() > 2 && value.starts_with('"') && value.ends_with('"'), "{line}");
        }
        assert!(samples.insert(series.to_owned(), value.parse().unwrap()).is_none(), "twice: {line}");
    }
    samples
}

#[test]
fn metrics_are_strict_openmetrics_with_expected_values() {
    let world = World::new();
    let path = world.broker.path();
    let mut server = Client::join(path, "db");
    server.bind("in", 4);
    let mut client = Client::join(path, "web-4242");
    client.open("db", "in");
    let region = common::region(8192);
    let refused = client.ask_with(&common::connect("db", "absent", 8192), &[region.as_fd()]).message;
    assert!(matches!(refused, Message::Refused { .. }), "{refused:?}");
    let text = world.scrape();
    let samples = samples(&text);
    for family in text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next()) {
        assert!(DOCUMENT.contains(&format!("| `{family}")), "{family} is not in docs/metrics.md");
    }
    let user = if rustix::process::geteuid().is_root() { "root" } else { "user" };
    for (series, value) in [
        (format!("partywall_sessions{{user=\"{user}\"}}"), 2.0),
        ("partywall_sessions{user=\"machine\"}".into(), 0.0),
        ("partywall_domains".into(), 2.0),
        ("partywall_services".into(), 1.0),
        ("partywall_channels{kind=\"stream\",state=\"waiting\"}".into(), 1.0),
        ("partywall_ring_bytes{domain=\"web-*\"}".into(), 8192.0),
        ("partywall_machines{state=\"up\"}".into(), 0.0),
        ("partywall_sessions_opened_total".into(), 2.0),
        ("partywall_requests_total{request=\"join\"}".into(), 2.0),
        ("partywall_refusals_total{request=\"connect\",reason=\"no-such-service\"}".into(), 1.0),
    ] {
        assert_eq!(samples.get(&series), Some(&value), "{series}: {samples:#?}");
    }
    let build =
        format!("partywall_build_info{{version=\"{}\",protocol=\"{}\"}}", env!("CARGO_PKG_VERSION"), wire::VERSION);
    assert_eq!(samples.get(&build), Some(&1.0), "{samples:#?}");
    for (request, status) in [
        ("GET / HTTP/1.1\r\n\r\n", "404"),
        ("POST /metrics HTTP/1.1\r\n\r\n", "405"),
        ("nonsense\r\n\r\n", "400"),
        (&format!("GET /{} HTTP/1.1\r\n", "x".repeat(9000)), "431"),
    ] {
        let answer = ask(TcpStream::connect(world.port()).unwrap(), request);
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{request:?}: {answer}");
    }
}

#[test]
fn decisions_of_the_policy_are_counted_by_rule() {
    let user = rustix::process::geteuid().as_raw();
    let policy = format!(
        "administrators = []\n[[join]]\ndomain = \"none\"\nusers = [4000000000]\n[[join]]\ndomain = \"*\"\nusers = [{user}]\n\
         [[connect]]\nfrom = \"web\"\nto = \"db\"\nservice = \"in\"\n"
    );
    let world = World::with_policy(Some(&policy));
    let path = world.broker.path();
    let mut server = Client::join(path, "db");
    server.bind("in", 4);
    server.bind("other", 4);
    let mut client = Client::join(path, "web");
    client.open("db", "in");
    let region = common::region(8192);
    for _ in 0..2 {
        let refused = client.ask_with(&common::connect("db", "other", 8192), &[region.as_fd()]).message;
        assert!(matches!(refused, Message::Refused { .. }), "{refused:?}");
    }
    let samples = samples(&world.scrape());
    for (request, decision, rule, count) in [
        ("join", "allowed", "join-2", 2.0),
        ("connect", "allowed", "connect-1", 1.0),
        ("connect", "refused", "no-connect-rule", 2.0),
    ] {
        let series = format!(
            "partywall_policy_decisions_total{{request=\"{request}\",decision=\"{decision}\",rule=\"{rule}\"}}"
        );
        assert_eq!(samples.get(&series), Some(&count), "{series}: {samples:#?}");
    }
    assert!(
        !samples.keys().any(|series| series.contains("join-1")),
        "a rule that decides nothing has no series: {samples:#?}"
    );
}

#[test]
fn hostile_scrapers_delay_neither_broker_nor_other_scrapers() {
    let world = World::new();
    let mut client = Client::join(world.broker.path(), "honest");
    let mut hostile = Vec::new();
    for n in 0..200 {
        let mut stream = TcpStream::connect(world.port()).unwrap();
        // Nothing, half a request, endless garbage, and a request whose answer is not read. A connection that the broker has ended is
        // fine.
        let bytes: &[u8] = [b"".as_slice(), b"GET /metr", &[0xFF; 4096], b"GET /metrics HTTP/1.1\r\n\r\n"][n % 4];
        let _ = stream.write_all(bytes);
        hostile.push(stream);
        if n % 20 == 0 {
            assert!(client.is_served());
            assert!(!samples(&world.scrape()).is_empty());
        }
    }
    assert!(client.is_served());
    drop(world.broker);
    assert_eq!(hostile.len(), 200, "they were open until the broker had stopped");
}

#[test]
fn metrics_socket_is_of_the_broker_alone_and_goes_with_it() {
    use std::os::unix::fs::PermissionsExt as _;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("metrics.sock");
    let config = Config::new(dir.path().join("b.sock")).metrics(path.to_str().unwrap().parse().unwrap());
    // The socket of a broker that was killed.
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    let broker = Broker::start(&config).unwrap();
    assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o660);
    let answer = metrics_from(|| ask(UnixStream::connect(&path).unwrap(), "GET /metrics HTTP/1.1\r\n\r\n"));
    assert!(samples(answer.split_once("\r\n\r\n").unwrap().1).contains_key("partywall_domains"), "{answer}");
    let twin = Config::new(dir.path().join("c.sock")).metrics(path.to_str().unwrap().parse().unwrap());
    let error = Broker::start(&twin).unwrap_err().to_string();
    assert!(error.contains("metrics.sock") && error.contains("--metrics"), "{error}");
    broker.stop().unwrap();
    assert!(!path.exists());
}

#[test]
fn broker_serves_without_metrics_that_its_policy_cannot_have() {
    let dir = tempfile::tempdir().unwrap();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let file = dir.path().join("policy.toml");
    std::fs::write(&file, format!("[metrics]\nlisten = \"{}\"\n", taken.local_addr().unwrap())).unwrap();
    let broker = Broker::start(&Config::new(dir.path().join("b.sock")).policy_file(file)).unwrap();
    assert_eq!(broker.metrics_port(), None);
    broker.stop().unwrap();
}

#[test]
fn foreign_file_or_socket_at_metrics_path_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("metrics.sock");
    let start = || {
        let config = Config::new(dir.path().join("b.sock")).metrics(path.to_str().unwrap().parse().unwrap());
        Broker::start(&config).unwrap_err().to_string()
    };
    std::fs::write(&path, "precious").unwrap();
    let error = start();
    assert!(error.contains("metrics.sock") && error.contains("no socket"), "{error}");
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
    std::fs::remove_file(&path).unwrap();
    // Its program is stopped: connections wait in its queue, which is full.
    let theirs = std::os::unix::net::UnixListener::bind(&path).unwrap();
    rustix::net::listen(&theirs, 0).unwrap();
    let mut waiting = UnixStream::connect(&path).unwrap();
    let error = start();
    assert!(error.contains("metrics.sock") && error.contains("another program"), "{error}");
    waiting.write_all(b"x").unwrap();
    assert_eq!(theirs.accept().unwrap().0.read(&mut [0; 2]).unwrap(), 1, "who connects there still reaches them");
}

#[test]
fn client_that_sends_a_body_gets_its_answer() {
    let world = World::new();
    let body = "x".repeat(400 << 10);
    for (head, status) in [
        (format!("POST /metrics HTTP/1.1\r\nContent-Length: {}\r\n\r\n", body.len()), "405"),
        ("GET /".to_owned(), "431"),
        ("GET /metrics HTTP/1.1\r\n\r\n".to_owned(), "200"),
    ] {
        let answer = metrics_from(|| {
            let mut stream = TcpStream::connect(world.port()).unwrap();
            stream.write_all([&head, &body[..1000]].concat().as_bytes()).unwrap();
            // By now the broker has answered. The unread rest of the request must not reset the connection.
            std::thread::sleep(std::time::Duration::from_millis(50));
            ask(stream, &body)
        });
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{status}: {answer}");
    }
    // A client that goes on sending is disconnected all the same.
    let mut endless = TcpStream::connect(world.port()).unwrap();
    while endless.write_all(body.as_bytes()).is_ok() {}
    assert!(!samples(&world.scrape()).is_empty());
}

/// A program that does not outlive its test.
struct Guard(Child);

impl Drop for Guard {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn real_prometheus_scrapes_the_broker() {
    if !Command::new("prometheus").arg("--version").output().is_ok_and(|output| output.status.success()) {
        // Past the harness, which keeps what tests print to itself.
        let said = b"NOT TESTED: real_prometheus_scrapes_the_broker: prometheus is not installed (Debian's package `prometheus`)\n";
        std::io::stderr().write_all(said).unwrap();
        return;
    }
    let world = World::new();
    let config = world.dir.path().join("prometheus.yml");
    let text = format!(
        "scrape_configs:\n- job_name: partywall\n  scrape_interval: 1s\n  static_configs:\n  - targets: ['{}']\n",
        world.port()
    );
    std::fs::write(&config, text).unwrap();
    // A port that is free now; another test may take it before Prometheus does, so a few are tried.
    for attempt in 0..5 {
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let mut prometheus = Guard(
            Command::new("prometheus")
                .arg(format!("--config.file={}", config.display()))
                .arg(format!("--storage.tsdb.path={}", world.dir.path().join(format!("data-{attempt}")).display()))
                .arg(format!("--web.listen-address={port}"))
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .unwrap(),
        );
        let begin = std::time::Instant::now();
        let query = "GET /api/v1/query?query=partywall_domains HTTP/1.0\r\n\r\n";
        while prometheus.0.try_wait().unwrap().is_none() {
            assert!(begin.elapsed() < HANG, "Prometheus never has the metrics");
            // Another program may have the port, and may never answer.
            let answer = TcpStream::connect(port).and_then(|stream| try_ask(stream, query)).unwrap_or_default();
            if answer.contains("\"__name__\":\"partywall_domains\"") {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
    }
    panic!("Prometheus does not start");
}
