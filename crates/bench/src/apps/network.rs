//! Programs that do nothing but measure a network: iperf3 and sockperf.

use std::time::Duration;

use super::{
    App, Case, after, seconds,
    site::{AppRole, Site},
};
use crate::{
    args::Scale,
    error::{BenchError, Result},
    process::GuardedChild,
    report::metric::Metric,
    task::Figures,
};

const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) const IPERF3: App = App {
    name: "iperf3",
    needs: &[("iperf3", "iperf3")],
    cases: iperf3_cases,
    serve: iperf3_serve,
    drive: iperf3_drive,
};

fn iperf3_cases(scale: Scale) -> Vec<Case> {
    let mut cases = vec![
        Case::new("TCP, 1 stream", &["-P", "1", "-l", "128K"]),
        Case::new("TCP, 4 streams", &["-P", "4", "-l", "128K"]),
        Case::new("UDP, 8 KiB", &["-u", "-b", "0", "-l", "8K"]),
    ];
    if scale == Scale::Smoke {
        cases.truncate(1);
    }
    cases
}

fn iperf3_serve(site: &Site<'_>) -> Result<GuardedChild> {
    site.serve("iperf3", &["-s", "-p", &site.port()])
}

fn iperf3_drive(site: &Site<'_>, case: &Case, scale: Scale) -> Result<Figures> {
    let (address, port) = (site.address(), site.port());
    let mut words = vec!["-c", &address, "-p", &port, "-J", "-t", seconds(scale)];
    words.extend(case.words.iter().map(String::as_str));
    let report = site.ask("iperf3", &words, PATIENCE)?;
    let report: serde_json::Value =
        serde_json::from_str(&report).map_err(|e| BenchError::transport("reading iperf3's report", e))?;
    let end = &report["end"];
    let is_udp = case.word(0) == "-u";
    let sum = if is_udp { &end["sum"] } else { &end["sum_received"] };
    let bits = sum["bits_per_second"].as_f64().ok_or_else(|| BenchError::Transport("iperf3 says no rate".into()))?;
    let lost = sum["lost_percent"].as_f64().unwrap_or(0.0);
    let mut figures =
        Figures::from([(Metric::BytesPerSecond, bits / 8.0 * if is_udp { 1.0 - lost / 100.0 } else { 1.0 })]);
    if is_udp {
        figures.insert(Metric::LostPercent, lost);
    }
    Ok(figures)
}

pub(crate) const SOCKPERF: App = App {
    name: "sockperf",
    needs: &[("sockperf", "sockperf")],
    cases: sockperf_cases,
    serve: sockperf_serve,
    drive: sockperf_drive,
};

fn sockperf_cases(scale: Scale) -> Vec<Case> {
    let mut cases = vec![
        Case::new("TCP, awake", &["tcp", "max", "14"]),
        Case::new("TCP, 200 a second: both sleep", &["tcp", "200", "14"]),
        Case::new("UDP, awake", &["udp", "max", "14"]),
        Case::new("UDP, 200 a second: both sleep", &["udp", "200", "14"]),
        Case::new("TCP 16 KiB, awake", &["tcp", "max", "16384"]),
    ];
    if scale == Scale::Smoke {
        cases.truncate(1);
    }
    cases
}

/// Both kinds, told apart by the port: sockperf serves one only.
fn sockperf_serve(site: &Site<'_>) -> Result<GuardedChild> {
    let (address, port) = (site.address(), site.port());
    let feed = site.folder.join("feed");
    let lines = format!("T:{address}:{port}\nU:{address}:{port}\n");
    std::fs::write(&feed, lines).map_err(|e| BenchError::transport("writing the list of sockets", e))?;
    site.serve("sockperf", &["sr", "-f", &feed.to_string_lossy(), "-F", "epoll"])
}

fn sockperf_drive(site: &Site<'_>, case: &Case, scale: Scale) -> Result<Figures> {
    let (address, port) = (site.address(), site.port());
    let mut words = vec!["pp", "-i", &address, "-p", &port, "-m", case.word(2), "-t", seconds(scale), "--full-rtt"];
    if case.word(0) == "tcp" {
        words.push("--tcp");
    }
    // It has room for the times of 300,000 messages a second, and ends at more.
    words.extend(["--mps", if case.word(1) == "max" { "300000" } else { case.word(1) }]);
    let mut client = site.command(AppRole::Client, "sockperf")?;
    let report = site.run(client.args(&words), "sockperf", PATIENCE)?;
    let figure = |word: &str| {
        after(&report, word)
            .map(|us| us * 1e3)
            .ok_or_else(|| BenchError::Transport(format!("sockperf says no {word}: {report}")))
    };
    Ok(Figures::from([
        (Metric::P50Ns, figure("percentile 50.000")?),
        (Metric::P99Ns, figure("percentile 99.000")?),
        (Metric::P999Ns, figure("percentile 99.900")?),
    ]))
}
