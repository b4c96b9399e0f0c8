//! The Grafana dashboard of docs/grafana: a real Prometheus answers each of its queries with something.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;

#[path = "../../gateway/tests/common/ports.rs"]
mod ports;

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use common::{Guard, LONGEST, World, library};
use ports::free_port;
use serde_json::Value;

const DASHBOARD: &str = include_str!("../../../docs/grafana/partywall.json");
const PICTURE: &str = include_str!("../../../docs/grafana/partywall.svg");
const DOCUMENT: &str = include_str!("../../../docs/metrics.md");

/// The queries of all panels.
fn queries() -> Vec<String> {
    let dashboard: Value = serde_json::from_str(DASHBOARD).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let targets = panels.iter().flat_map(|panel| panel["targets"].as_array().unwrap());
    targets.map(|target| target["expr"].as_str().unwrap().to_owned()).collect()
}

fn free_address() -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, free_port()))
}

/// Serves a file by HTTP, as the node exporter serves its text files, for as long as the test runs.
fn serve(file: PathBuf) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            let body = std::fs::read_to_string(&file).unwrap_or_default();
            let _ = stream.read(&mut [0; 4096]);
            let head = "HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\nConnection: close";
            let _ = write!(stream, "{head}\r\nContent-Length: {}\r\n\r\n{body}", body.len());
        }
    });
    at
}

/// The answer of Prometheus; `None` while it does not answer.
fn query(prometheus: SocketAddr, query: &str) -> Option<Value> {
    let mut encoded = String::new();
    for byte in query.replace("$__rate_interval", "30s").bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' => encoded.push(byte.into()),
            _ => encoded.push_str(&format!("%{byte:02X}")),
        }
    }
    let mut stream = TcpStream::connect(prometheus).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(10))).ok()?;
    write!(stream, "GET /api/v1/query?query={encoded} HTTP/1.0\r\n\r\n").ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    serde_json::from_str(answer.split_once("\r\n\r\n")?.1).ok()
}

fn start_prometheus(folder: &Path, targets: [SocketAddr; 2]) -> (Guard, SocketAddr) {
    let [one, two] = targets;
    let config = format!(
        "scrape_configs:\n- job_name: partywall\n  scrape_interval: 1s\n  static_configs:\n  - targets: ['{one}', '{two}']\n"
    );
    std::fs::write(folder.join("prometheus.yml"), config).unwrap();
    let at = free_address();
    let mut command = Command::new("prometheus");
    command.arg(format!("--config.file={}", folder.join("prometheus.yml").display()));
    command.arg(format!("--storage.tsdb.path={}", folder.join("data").display()));
    command.arg(format!("--web.listen-address={at}"));
    (Guard::spawn(command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null())), at)
}

#[test]
fn dashboard_queries_return_results_from_real_prometheus() {
    if !Command::new("prometheus").arg("--version").output().is_ok_and(|output| output.status.success()) {
        let said: &[u8] =
            b"NOT TESTED: dashboard_queries_return_results_from_real_prometheus: prometheus is not installed\n";
        std::io::stderr().write_all(said).unwrap();
        return;
    }
    let broker_address = free_address();
    let uid = rustix::process::geteuid().as_raw();
    let world =
        World::with_policy(Some(&format!("administrators = [{uid}]\n[metrics]\nlisten = '{broker_address}'\n")));
    // A channel that stays open, a refused connection, and an unmodified program whose peer is not under Partywall.
    let _db = Guard::spawn(&mut world.partywall("db", &["cat", "-l", "in", "--recv-only"]));
    world.await_service("db", "in");
    let mut web = world.partywall("web", &["cat", "db:in"]);
    let mut web = Guard::spawn(web.stdin(Stdio::piped()));
    web.0.stdin.as_mut().unwrap().write_all(b"hello").unwrap();
    world.run("web", &["cat", "db:out"]);
    library();
    let lonely = TcpListener::bind("127.0.0.1:0").unwrap();
    let script = format!("exec 3<>/dev/tcp/127.0.0.1/{}; echo x >&3; read -r", lonely.local_addr().unwrap().port());
    let mut program = world.partywall("program", &["run", "--", "bash", "-c", &script]);
    let _program = Guard::spawn(program.stdin(Stdio::piped()));
    let file = world.path("partywall.prom");
    let name = file.to_str().unwrap();
    let _totals =
        Guard::spawn(&mut world.partywall("watcher", &["stat", "--total", "--watch", "0.5", "--metrics", name]));
    let (mut prometheus, at) = start_prometheus(&world.path(""), [broker_address, serve(file.clone())]);

    let deadline = std::time::Instant::now() + LONGEST;
    for expression in queries() {
        loop {
            let answer = query(at, &expression);
            let result = answer.as_ref().and_then(|answer| answer["data"]["result"].as_array());
            if result.is_some_and(|result| !result.is_empty()) {
                break;
            }
            assert!(prometheus.0.try_wait().unwrap().is_none(), "Prometheus has ended");
            let wrong = answer.as_ref().is_some_and(|answer| answer["status"] == "error");
            assert!(!wrong && std::time::Instant::now() < deadline, "{expression}: {answer:?}");
            std::thread::sleep(Duration::from_millis(100));
        }
    }
    world.await_that("the totals have the bytes of hello", || {
        let throughput = query(at, "partywall_bytes_total{way=\"ring\"}").unwrap_or_default();
        let bytes: Option<u64> =
            throughput["data"]["result"][0]["value"][1].as_str().map(|bytes| bytes.parse().unwrap());
        // The totals are those of the machine, on which other programs may run under Partywall too.
        bytes >= Some(5)
    });
    let channels: Value = serde_json::from_slice(&world.run("watcher", &["stat", "--json"]).stdout).unwrap();
    assert_eq!(channels["channels"][0]["sides"][0]["written"]["bytes"], 5, "hello: {channels}");
}

#[test]
fn picture_in_docs_has_every_panel_of_the_dashboard() {
    let dashboard: Value = serde_json::from_str(DASHBOARD).unwrap();
    let titles = dashboard["panels"].as_array().unwrap().iter().map(|panel| panel["title"].as_str().unwrap());
    let missing: Vec<&str> =
        titles.filter(|title| !PICTURE.contains(&format!("class=\"title\">{title}</text>"))).collect();
    assert!(missing.is_empty(), "make it again by scripts/dashboard.sh: {missing:?}");
    assert!(DOCUMENT.contains("](grafana/partywall.svg)"));
}

#[test]
fn every_metric_of_the_dashboard_and_of_totals_is_documented() {
    let is_name = |c: char| c.is_ascii_lowercase() || c == '_';
    for query in queries() {
        for name in query.split(|c| !is_name(c)).filter(|word| word.starts_with("partywall_")) {
            // A histogram's buckets are one metric.
            let name = name.strip_suffix("_bucket").unwrap_or(name);
            assert!(DOCUMENT.contains(&format!("| `{name}`")), "{name} is not in docs/metrics.md");
        }
    }
    let world = World::new();
    let file = world.path("x.prom");
    let done = world.run("watcher", &["stat", "--total", "--metrics", file.to_str().unwrap()]);
    assert!(done.status.success(), "{}", common::said(&done));
    let text = std::fs::read_to_string(file).unwrap();
    let families: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next()).collect();
    assert_eq!(families.len(), 5);
    assert!(families.iter().all(|family| DOCUMENT.contains(&format!("| `{family}`"))), "{families:?}");
}
