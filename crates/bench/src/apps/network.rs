//! Programs that do nothing but measure a network: iperf3 and sockperf.

use super::{App, AppAddress, Case, after, seconds, site::Site, words};
use crate::{
    args::Scale,
    error::{BenchError, Result},
    process::GuardedChild,
    report::metric::Metric,
    task::Figures,
};

pub(crate) const IPERF3: App = App {
    name: "iperf3",
    needs: &[("iperf3", "iperf3")],
    cases: iperf3_cases,
    serve: iperf3_serve,
    client: iperf3_client,
    figures: |case, report| iperf3_figures(&case.words, report),
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

fn iperf3_client(at: &AppAddress, case: &Case, scale: Scale) -> Vec<String> {
    let mut line = words(&["iperf3", "-c", &at.address, "-p", &at.port(), "-J", "-t", &seconds(scale).to_string()]);
    line.extend(case.words.iter().cloned());
    line
}

/// The figures of a report in JSON. `words` are the options of the kind of stream.
pub(crate) fn iperf3_figures(words: &[String], report: &str) -> Result<Figures> {
    let report: serde_json::Value =
        serde_json::from_str(report).map_err(|e| BenchError::transport("reading iperf3's report", e))?;
    let end = &report["end"];
    let is_udp = words.first().is_some_and(|word| word == "-u");
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

/// Seconds of the longest run of sockperf.
const LONGEST_RUN: u32 = 8;

pub(crate) const SOCKPERF: App = App {
    name: "sockperf",
    needs: &[("sockperf", "sockperf")],
    cases: sockperf_cases,
    serve: sockperf_serve,
    client: sockperf_client,
    figures: sockperf_figures,
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

fn sockperf_client(at: &AppAddress, case: &Case, scale: Scale) -> Vec<String> {
    let mut line = words(&["sockperf", "pp", "-i", &at.address, "-p", &at.port(), "-m", case.word(2), "-t"]);
    line.extend(words(&[&seconds(scale).to_string(), "--full-rtt"]));
    if case.word(0) == "tcp" {
        line.push("--tcp".into());
    }
    // It has room for the times of 300,000 messages a second, and ends at more.
    line.extend(words(&["--mps", if case.word(1) == "max" { "300000" } else { case.word(1) }]));
    line
}

/// The line of a longer run, if sockperf says that this run has measured nothing: the machine may stop both programs for all of a second.
/// `None` also after the longest run.
pub(super) fn longer_run(line: &[String], said: &str) -> Option<Vec<String>> {
    if !["No messages were received", "No valid observations"].iter().any(|words| said.contains(words)) {
        return None;
    }
    let length = line.iter().position(|word| word == "-t")? + 1;
    let seconds = 2 * line.get(length)?.parse::<u32>().ok()?;
    let mut longer = line.to_vec();
    longer[length] = seconds.to_string();
    (seconds <= LONGEST_RUN).then_some(longer)
}

fn sockperf_figures(_: &Case, report: &str) -> Result<Figures> {
    let figure = |word: &str| {
        after(report, word)
            .map(|us| us * 1e3)
            .ok_or_else(|| BenchError::Transport(format!("sockperf says no {word}: {report}")))
    };
    Ok(Figures::from([
        (Metric::P50Ns, figure("percentile 50.000")?),
        (Metric::P99Ns, figure("percentile 99.000")?),
        (Metric::P999Ns, figure("percentile 99.900")?),
    ]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockperf_without_messages_runs_longer_up_to_a_limit() {
        let line = |seconds: &str| words(&["partywall", "run", "--", "sockperf", "pp", "-t", seconds, "--full-rtt"]);
        let nothing = "sockperf: No messages were received from the server. Is the server down?";
        assert_eq!(longer_run(&line("1"), nothing), Some(line("2")));
        assert_eq!(longer_run(&line("4"), nothing), Some(line("8")));
        assert_eq!(longer_run(&line("8"), nothing), None);
        assert_eq!(longer_run(&line("1"), "---> percentile 50.000 =    5.123"), None);
        assert_eq!(longer_run(&words(&["curl"]), nothing), None);
    }
}
