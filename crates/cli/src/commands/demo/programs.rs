//! Unmodified programs, over TCP as they are and under `partywall run`: redis, or where that is missing a pair in Python.

use std::net::{Ipv4Addr, TcpListener};
use std::process::Command;
use std::time::{Duration, Instant};

use partywall_terminal::{Show, table, typed};

use super::children::DemoChild;
use super::measure::{LONGEST, median};
use super::world::{DemoSide, World};
use crate::exit::{CommandFailure, Context};
use crate::program::resolve;
use crate::{human, siblings};

/// The server's log line once it accepts connections.
const READY: &str = "eady to accept connections";

const PYTHON_SERVER: &str = include_str!("server.py");
const PYTHON_CLIENT: &str = include_str!("client.py");

/// The programs that are there to be shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DemoPrograms {
    Redis,
    Python,
}

/// How one figure is to be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Unit {
    Requests,
    Bytes,
}

/// One figure, per second, over TCP and over Partywall.
#[derive(Debug)]
struct Figure {
    name: &'static str,
    unit: Unit,
    tcp: Vec<f64>,
    ours: Vec<f64>,
}

/// The measurements.
#[derive(Debug)]
pub(super) struct Programs {
    pair: DemoPrograms,
    route: &'static str,
    figures: Vec<Figure>,
}

impl Programs {
    /// `None`, having said why, if there is nothing to show.
    pub(super) fn run(world: &World, rounds: u32, quick: bool, show: &Show) -> Result<Option<Self>, CommandFailure> {
        show.step("Unmodified programs");
        let Some(pair) = DemoPrograms::find() else {
            show.say("   left out: there is neither redis-server with redis-benchmark nor python3");
            return Ok(None);
        };
        if let Err(failure) = siblings::find_library() {
            show.say(&format!("   left out: {}", failure.to_string().replace("\n  ", "; ")));
            return Ok(None);
        }
        let figure = |&(name, unit)| Figure { name, unit, tcp: Vec::new(), ours: Vec::new() };
        let mut all = Self { pair, route: world.tcp_route(), figures: pair.figures().iter().map(figure).collect() };
        for round in 1..=rounds {
            show.show_commands(round == 1);
            for accelerated in [false, true] {
                let what = if accelerated { "Partywall" } else { all.route };
                show.busy(&format!("{} over {what}, round {round} of {rounds}", pair.name()));
                let values = Run { world, pair, accelerated, quick, show }.measure()?;
                for (figure, value) in all.figures.iter_mut().zip(values) {
                    if accelerated { figure.ours.push(value) } else { figure.tcp.push(value) }
                }
            }
        }
        Ok(Some(all))
    }

    pub(super) fn to_text(&self) -> String {
        let [tcp, ours] = [format!(">{}", self.route), ">partywall run".into()];
        let mut rows = table(&[self.pair.name(), &tcp, &ours, ">times"]);
        for figure in &self.figures {
            let [tcp, ours] = [&figure.tcp, &figure.ours].map(|values| median(values));
            let times = format!("{:.1}", ours / tcp);
            rows.add_row([figure.name.to_owned(), figure.unit.show(tcp), figure.unit.show(ours), times]);
        }
        rows.to_string()
    }
}

impl Unit {
    fn show(self, value: f64) -> String {
        match self {
            Self::Requests => format!("{value:.0}/s"),
            Self::Bytes => human::rate(value as u64, 1.0),
        }
    }
}

impl DemoPrograms {
    fn find() -> Option<Self> {
        let there = |name: &str| resolve::find(name.as_ref()).is_ok();
        if there("redis-server") && there("redis-benchmark") {
            Some(Self::Redis)
        } else {
            there("python3").then_some(Self::Python)
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Redis => "redis, unmodified",
            Self::Python => "a Python client and server, unmodified",
        }
    }

    /// The figures that [`Run::measure`] returns, in its order.
    fn figures(self) -> &'static [(&'static str, Unit)] {
        match self {
            Self::Redis => &[
                ("GET, 1 client", Unit::Requests),
                ("GET, 50 clients", Unit::Requests),
                ("GET of 64 KiB, 8 clients", Unit::Bytes),
            ],
            Self::Python => &[("question and answer of 64 B", Unit::Requests), ("one stream", Unit::Bytes)],
        }
    }
}

/// One server, and what its client measures.
struct Run<'a> {
    world: &'a World,
    pair: DemoPrograms,
    accelerated: bool,
    quick: bool,
    show: &'a Show,
}

impl Run<'_> {
    fn measure(&self) -> Result<Vec<f64>, CommandFailure> {
        let host = self.world.address(DemoSide::B).to_string();
        let port = free_port()?.to_string();
        let mut server = self.start(self.server(&host, &port)?)?;
        self.await_server(&mut server)?;
        let values = match self.pair {
            DemoPrograms::Redis => self.redis(&host, &port),
            DemoPrograms::Python => self.python(&host, &port),
        };
        server.stop();
        values
    }

    fn server(&self, host: &str, port: &str) -> Result<Command, CommandFailure> {
        let dir = self.world.dir().to_string_lossy();
        let script = self.script("server.py", PYTHON_SERVER)?;
        let words = match self.pair {
            DemoPrograms::Redis => {
                format!(
                    "redis-server --bind {host} --port {port} --protected-mode no --save  --appendonly no --dir {dir}"
                )
            }
            DemoPrograms::Python => format!("python3 {script} {host} {port}"),
        };
        // A single space separates; two leave an empty word between them, which is what --save wants.
        self.command(DemoSide::B, "server", &words.split(' ').collect::<Vec<_>>())
    }

    fn redis(&self, host: &str, port: &str) -> Result<Vec<f64>, CommandFailure> {
        let few = |n: u32| if self.quick { n / 10 } else { n };
        let ask = |tests: &str, clients: u32, requests: u32, size: u32| {
            let words = format!(
                "redis-benchmark -h {host} -p {port} --csv -t {tests} -c {clients} -n {} -d {size}",
                few(requests)
            );
            let text = self.client(&words.split(' ').collect::<Vec<_>>())?;
            requests_per_second(&text)
                .ok_or_else(|| CommandFailure::general(format!("redis-benchmark said nothing of GET: {}", text.trim())))
        };
        let size = 64 << 10;
        let large = |requests: f64| requests * f64::from(size);
        Ok(vec![ask("get", 1, 100_000, 3)?, ask("get", 50, 300_000, 3)?, ask("set,get", 8, 40_000, size).map(large)?])
    }

    fn python(&self, host: &str, port: &str) -> Result<Vec<f64>, CommandFailure> {
        let script = self.script("client.py", PYTHON_CLIENT)?;
        let seconds = if self.quick { "0.3" } else { "2" };
        let text = self.client(&["python3", &script, host, port, seconds])?;
        let values: Vec<f64> = text.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        match values.len() {
            2 => Ok(values),
            _ => Err(CommandFailure::general(format!("the Python client said no two figures: {}", text.trim()))),
        }
    }

    /// Writes a script to be run; returns where.
    fn script(&self, name: &str, text: &str) -> Result<String, CommandFailure> {
        let path = self.world.dir().join(name);
        std::fs::write(&path, text).context(format_args!("cannot write {}", path.display()))?;
        Ok(path.to_string_lossy().into_owned())
    }

    /// Runs a client to its end; returns what it says.
    fn client(&self, words: &[&str]) -> Result<String, CommandFailure> {
        let mut command = self.command(DemoSide::A, "client", words)?;
        let path = self.world.dir().join("answer");
        let file = std::fs::File::create(&path).context(format_args!("cannot write {}", path.display()))?;
        command.stdout(file);
        let explain = |failure: CommandFailure| failure.hint(self.world.read_log("client").trim().to_owned());
        self.start(command)?.finish(LONGEST).map_err(explain)?;
        std::fs::read_to_string(&path).context("cannot read the client's answer")
    }

    fn command(&self, side: DemoSide, log: &str, words: &[&str]) -> Result<Command, CommandFailure> {
        if self.accelerated { self.world.accelerated(side, log, words) } else { self.world.plain(side, log, words) }
    }

    fn start(&self, mut command: Command) -> Result<DemoChild, CommandFailure> {
        self.show.command("", &typed(&command));
        DemoChild::start(&mut command)
    }

    /// Servers say on standard output, which is their log, when they can be connected to.
    fn await_server(&self, server: &mut DemoChild) -> Result<(), CommandFailure> {
        let deadline = Instant::now() + LONGEST;
        loop {
            let said = self.world.read_log("server");
            if said.contains(READY) {
                return Ok(());
            }
            if server.try_wait()?.is_some() || Instant::now() > deadline {
                return Err(CommandFailure::general(format!("the server does not start: {}", said.trim())));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// The line of GET in what redis-benchmark prints as CSV.
fn requests_per_second(csv: &str) -> Option<f64> {
    let line = csv.lines().rfind(|line| line.starts_with("\"GET\""))?;
    line.split(',').nth(1)?.trim_matches('"').parse().ok()
}

/// A port that was free a moment ago; in the demo's namespaces all are. It lies below those the kernel gives to a program that names
/// none, so that no connection of another program takes it before the server does.
fn free_port() -> Result<u16, CommandFailure> {
    let begin = 10_000 + u16::try_from(std::process::id() % 20_000).unwrap_or_default();
    let free = |port: &u16| TcpListener::bind((Ipv4Addr::UNSPECIFIED, *port)).is_ok();
    (begin..begin + 1000).find(free).ok_or_else(|| CommandFailure::general("there is no free port"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn get_row_of_redis_benchmark_is_parsed() {
        let csv = "\"test\",\"rps\",\"avg_latency_ms\"\n\"SET\",\"1000.5\",\"0.1\"\n\"GET\",\"90909.09\",\"0.2\"\n";
        assert_eq!(requests_per_second(csv), Some(90909.09));
        assert_eq!(requests_per_second("Could not connect"), None);
    }

    #[test]
    fn figures_stand_side_by_side() {
        let figure = |name, unit, tcp, ours| Figure { name, unit, tcp: vec![tcp], ours: vec![ours] };
        let figures = vec![figure("GET", Unit::Requests, 1000.0, 4000.0), figure("big", Unit::Bytes, 1e9, 2.5e9)];
        let text = Programs { pair: DemoPrograms::Redis, route: "TCP over veth", figures }.to_text();
        for words in ["redis, unmodified", "TCP over veth", "partywall run", "4000/s", "4.0", "2.50 GB/s", "2.5"] {
            assert!(text.contains(words), "{words} is missing:\n{text}");
        }
    }
}
