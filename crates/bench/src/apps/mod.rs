//! Real programs, unmodified: how to start each, what to ask of it, and where its client says how fast that was.

pub(crate) mod accounts;
pub(crate) mod databases;
pub(crate) mod network;
pub(crate) mod site;
pub(crate) mod web;

use std::time::Duration;

use crate::{
    args::Scale,
    error::{BenchError, Result},
    process::GuardedChild,
    task::Figures,
};
use site::Site;

/// One workload of a program.
#[derive(Debug, Clone)]
pub(crate) struct Case {
    /// Its name in tables and results.
    pub(crate) label: String,
    /// The arguments of the case, for the program's client.
    pub(crate) words: Vec<String>,
}

impl Case {
    pub(crate) fn new(label: impl Into<String>, words: &[&str]) -> Self {
        Self { label: label.into(), words: words.iter().map(|word| (*word).to_owned()).collect() }
    }

    pub(crate) fn word(&self, at: usize) -> &str {
        self.words.get(at).map_or("", String::as_str)
    }
}

/// A server with its client.
#[derive(Debug, Clone, Copy)]
pub(crate) struct App {
    /// Its name in tables and results.
    pub(crate) name: &'static str,
    /// Programs it takes, and the Debian packages they are in.
    pub(crate) needs: &'static [(&'static str, &'static str)],
    /// The cases to measure, for each scale.
    pub(crate) cases: fn(Scale) -> Vec<Case>,
    /// Starts the server; it need not listen yet.
    pub(crate) serve: fn(&Site<'_>) -> Result<GuardedChild>,
    /// The client's program and its arguments, for one case.
    pub(crate) client: fn(&AppAddress, &Case, Scale) -> Vec<String>,
    /// The figures in what the client printed.
    pub(crate) figures: fn(&Case, &str) -> Result<Figures>,
}

/// Where a client finds its server.
#[derive(Debug, Clone)]
pub(crate) struct AppAddress {
    pub(crate) address: String,
    pub(crate) port: u16,
    /// How many times slower than this host's processor the programs are. Clients that count requests send fewer of them.
    pub(crate) slowness: u32,
}

impl AppAddress {
    pub(crate) fn port(&self) -> String {
        self.port.to_string()
    }

    /// How many times longer a client with this many connections runs. Between emulated machines, fifty connections take some seconds to
    /// get their rings, each after its first calls, and the tables are about what follows.
    fn times_longer(&self, connections: &str) -> u32 {
        if self.slowness > 1 && connections != "1" { SETTLING } else { 1 }
    }

    /// The address of a page.
    fn url(&self, page: &str) -> String {
        format!("http://{}:{}/{page}", self.address, self.port)
    }
}

/// How many times longer clients with many connections run between emulated machines.
const SETTLING: u32 = 4;

/// Longer than any client runs.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

impl App {
    /// Asks once.
    pub(crate) fn drive(&self, site: &Site<'_>, case: &Case, scale: Scale) -> Result<Figures> {
        let said = ask_until_measured((self.client)(&site.endpoint(), case, scale), |line| {
            let words: Vec<&str> = line.iter().map(String::as_str).collect();
            let (program, arguments) = words.split_first().ok_or(BenchError::Transport("no client".into()))?;
            site.ask(program, arguments, PATIENCE)
        })?;
        (self.figures)(case, &said)
    }
}

/// Runs a client by this line, and once more for longer each time it has measured nothing.
pub(crate) fn ask_until_measured(mut line: Vec<String>, ask: impl Fn(&[String]) -> Result<String>) -> Result<String> {
    loop {
        let said = ask(&line)?;
        match network::longer_run(&line, &said) {
            Some(longer) => line = longer,
            None => return Ok(said),
        }
    }
}

/// Words of a command line.
fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}

/// All of them.
pub(crate) const ALL: [App; 8] = [
    databases::REDIS,
    web::NGINX,
    databases::POSTGRESQL,
    databases::MEMCACHED,
    network::IPERF3,
    network::SOCKPERF,
    web::PYTHON,
    web::NODE,
];

/// Seconds for which a client runs.
pub(crate) const fn seconds(scale: Scale) -> u32 {
    match scale {
        Scale::Smoke | Scale::Quick => 1,
        Scale::Full => 3,
    }
}

/// The number after a word in a program's report: `after(text, "Requests/sec:")`.
pub(crate) fn after(text: &str, word: &str) -> Option<f64> {
    let (_, rest) = text.split_once(word)?;
    let number: String =
        rest.trim_start_matches([' ', '=', '\t']).chars().take_while(|c| c.is_ascii_digit() || *c == '.').collect();
    number.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_numbers_behind_words() {
        assert_eq!(after("Requests/sec:  1234.50\nx", "Requests/sec:"), Some(1234.5));
        assert_eq!(after("---> percentile 99.000 =   12.345", "percentile 99.000"), Some(12.345));
        assert_eq!(after("tps = 31000.123 (without", "tps ="), Some(31000.123));
        assert_eq!(after("nothing", "tps ="), None);
    }

    #[test]
    fn case_labels_of_each_app_are_unique() {
        for app in ALL {
            let mut labels: Vec<String> = (app.cases)(Scale::Full).into_iter().map(|case| case.label).collect();
            let count = labels.len();
            labels.sort();
            labels.dedup();
            assert_eq!(labels.len(), count, "{}", app.name);
            let quick = (app.cases)(Scale::Smoke);
            assert!(!quick.is_empty() && quick.iter().all(|case| labels.contains(&case.label)), "{}", app.name);
        }
    }
}
