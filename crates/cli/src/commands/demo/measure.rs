//! The transfers and the pings, each over Partywall and over TCP in turns.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::Duration;

use partywall_terminal::{Show, table, typed};
use serde_json::Value;

use super::children::DemoChild;
use super::payload::{CarriedFile, checksum};
use super::world::{DemoSide, World};
use crate::exit::{CommandFailure, Context};
use crate::human;

/// A guard against hangs, far longer than anything here takes.
pub(super) const LONGEST: Duration = Duration::from_secs(60);

/// The name of the demo's service.
const SERVICE: &str = "demo";

/// Seconds of each transfer.
#[derive(Debug, Default)]
pub(super) struct Transfers {
    partywall: Vec<f64>,
    tcp: Vec<f64>,
    tcp_route: &'static str,
}

impl Transfers {
    pub(super) fn run(world: &World, payload: &CarriedFile, rounds: u32, show: &Show) -> Result<Self, CommandFailure> {
        show.step("The file from domain a to domain b");
        let mut all = Self { tcp_route: world.tcp_route(), ..Self::default() };
        for round in 1..=rounds {
            show.show_commands(round == 1);
            show.busy(&format!("Partywall, round {round} of {rounds}"));
            all.partywall.push(over_partywall(world, payload, show)?);
            show.busy(&format!("{}, round {round} of {rounds}", all.tcp_route));
            all.tcp.push(over_tcp(world, payload, show)?);
        }
        Ok(all)
    }

    /// How many copies were made and compared.
    pub(super) fn copies(&self) -> usize {
        self.partywall.len() + self.tcp.len()
    }

    pub(super) fn to_text(&self, payload: &CarriedFile) -> String {
        let mut rows = table(&["file to file", ">rate", ">seconds", ">slowest", ">fastest"]);
        let (ours, theirs) = (median(&self.partywall), median(&self.tcp));
        for (name, times, middle) in [("Partywall", &self.partywall, ours), (self.tcp_route, &self.tcp, theirs)] {
            let rate = |seconds: f64| human::rate(payload.size, seconds);
            let slowest = times.iter().copied().fold(f64::MIN, f64::max);
            let fastest = times.iter().copied().fold(f64::MAX, f64::min);
            rows.add_row([name.to_owned(), rate(middle), format!("{middle:.3}"), rate(slowest), rate(fastest)]);
        }
        format!("{rows}\n{}", compare(theirs, ours, "as fast as", self.tcp_route))
    }
}

/// `Partywall is 2.1 times as fast as TCP`, or however it is.
pub(super) fn compare(theirs: f64, ours: f64, than: &str, what: &str) -> String {
    format!("Partywall is {:.1} times {than} {what}", theirs / ours)
}

fn over_partywall(world: &World, payload: &CarriedFile, show: &Show) -> Result<f64, CommandFailure> {
    let output = world.dir().join("copy");
    let (to, from) = (output.to_string_lossy(), payload.path.to_string_lossy());
    let (here, there) = cpus();
    let listen = ["cat", "-l", SERVICE, "--recv-only", "--report", "--cpu", &there, "-o", &to];
    let target = format!("b:{SERVICE}");
    let connect = ["cat", &target, "--send-only", "--wait", "10", "--cpu", &here, "-i", &from];
    let mut receiver = started(world.partywall(DemoSide::B, "receiver", &listen)?, show)?;
    let mut sender = started(world.partywall(DemoSide::A, "sender", &connect)?, show)?;
    finish(world, &mut sender, &mut receiver)?;
    received(world, payload)
}

fn over_tcp(world: &World, payload: &CarriedFile, show: &Show) -> Result<f64, CommandFailure> {
    let output = world.dir().join("copy");
    let (to, from) = (output.to_string_lossy(), payload.path.to_string_lossy());
    let (here, there) = cpus();
    let any = format!("{}:0", world.address(DemoSide::B));
    let (mut receiver, address) = listening(
        world.partywall(DemoSide::B, "receiver", &["tcp-cat", "-l", &any, "--report", "--cpu", &there, "-o", &to])?,
        show,
    )?;
    let connect = ["tcp-cat", &address, "--cpu", &here, "-i", &from];
    let mut sender = started(world.partywall(DemoSide::A, "sender", &connect)?, show)?;
    finish(world, &mut sender, &mut receiver)?;
    received(world, payload)
}

fn started(mut command: Command, show: &Show) -> Result<DemoChild, CommandFailure> {
    show.command("", &typed(&command));
    DemoChild::start(&mut command)
}

/// Starts a TCP listener on a free port, and reads from it which one that is.
pub(super) fn listening(mut command: Command, show: &Show) -> Result<(DemoChild, String), CommandFailure> {
    command.stdout(Stdio::piped());
    let mut child = started(command, show)?;
    let stdout = child.take_stdout().ok_or_else(|| CommandFailure::general("the listener has no output"))?;
    let mut line = String::new();
    BufReader::new(stdout).read_line(&mut line).context("cannot read the listener's address")?;
    match line.trim() {
        "" => Err(CommandFailure::general("the listener did not say where it listens")),
        address => Ok((child, address.to_owned())),
    }
}

/// Waits for both sides; the one that failed first explains itself.
fn finish(world: &World, sender: &mut DemoChild, receiver: &mut DemoChild) -> Result<(), CommandFailure> {
    let explain = |failure: CommandFailure| {
        let logs = ["sender", "receiver"].map(|name| world.read_log(name));
        failure.hint(logs.map(|log| log.trim().to_owned()).join("\n  "))
    };
    sender.finish(LONGEST).map_err(explain)?;
    receiver.finish(LONGEST).map_err(explain)
}

/// Checks the copy, removes it, and returns the seconds that the receiver took.
fn received(world: &World, payload: &CarriedFile) -> Result<f64, CommandFailure> {
    let copy = world.dir().join("copy");
    let (size, sum) = checksum(&copy)?;
    if (size, &sum) != (payload.size, &payload.sum) {
        return Err(CommandFailure::general(format!("the copy differs: {size} bytes, SHA-256 {sum}")));
    }
    std::fs::remove_file(&copy).context("cannot remove the copy")?;
    let log = world.read_log("receiver");
    let report = log.lines().find_map(|line| serde_json::from_str::<Value>(line).ok());
    report
        .and_then(|report| report["received"]["seconds"].as_f64())
        .ok_or_else(|| CommandFailure::general(format!("the receiver did not report: {}", log.trim())))
}

/// Two processors to keep the two sides apart, as command line arguments; the same twice if there is only one.
pub(super) fn cpus() -> (String, String) {
    let set = rustix::thread::sched_getaffinity(None).unwrap_or_default();
    let mut usable = (0..rustix::thread::CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu));
    let first = usable.next().unwrap_or(0);
    let last = usable.next_back().unwrap_or(first);
    (first.to_string(), last.to_string())
}

pub(super) fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Round trips of one kind, in nanoseconds: of each round p50, p99 and p99.9.
#[derive(Debug)]
struct Pings {
    name: &'static str,
    rounds: Vec<[f64; 3]>,
}

/// Round trips of all kinds.
#[derive(Debug)]
pub(super) struct Latencies(Vec<Pings>);

impl Latencies {
    pub(super) fn run(world: &World, rounds: u32, pings: u32, show: &Show) -> Result<Self, CommandFailure> {
        show.step("Round trips of 64 bytes");
        let names = ["Partywall, awake (spins before it sleeps)", "Partywall, asleep (--spin 0)", world.tcp_route()];
        let mut all = names.map(|name| Pings { name, rounds: Vec::new() });
        for round in 1..=rounds {
            show.show_commands(round == 1);
            for (kind, pings_of) in all.iter_mut().enumerate() {
                show.busy(&format!("{}, round {round} of {rounds}", pings_of.name));
                pings_of.rounds.push(match kind {
                    0 => ping_partywall(world, pings, &[], show)?,
                    1 => ping_partywall(world, pings, &["--spin", "0"], show)?,
                    _ => ping_tcp(world, pings, show)?,
                });
            }
        }
        Ok(Self(all.into()))
    }

    pub(super) fn to_text(&self) -> String {
        let mut rows = table(&["round trip", ">p50", ">p99", ">p99.9"]);
        let middle = |pings: &Pings, n: usize| median(&pings.rounds.iter().map(|round| round[n]).collect::<Vec<_>>());
        for pings in &self.0 {
            let cells = [0, 1, 2].map(|n| human::nanos(middle(pings, n) as u64));
            rows.add_row([pings.name.to_owned()].into_iter().chain(cells));
        }
        let last = match &self.0[..] {
            [awake, _, tcp] => compare(middle(tcp, 0), middle(awake, 0), "as quick as", tcp.name),
            _ => String::new(),
        };
        format!("{rows}\n{last}")
    }
}

fn ping_partywall(world: &World, pings: u32, more: &[&str], show: &Show) -> Result<[f64; 3], CommandFailure> {
    let (here, there) = cpus();
    let answer = [&["ping", "-l", SERVICE, "--cpu", &there], more].concat();
    let (target, pings) = (format!("b:{SERVICE}"), pings.to_string());
    let ask = [&["ping", &target, "-c", &pings, "--wait", "10", "--json", "--cpu", &here], more].concat();
    // Ends with its guard: a responder never ends by itself.
    let _responder = started(world.partywall(DemoSide::B, "receiver", &answer)?, show)?;
    ask_for_percentiles(world, world.partywall(DemoSide::A, "sender", &ask)?, show)
}

fn ping_tcp(world: &World, pings: u32, show: &Show) -> Result<[f64; 3], CommandFailure> {
    let (here, there) = cpus();
    let (any, pings) = (format!("{}:0", world.address(DemoSide::B)), pings.to_string());
    let answer = world.partywall(DemoSide::B, "receiver", &["tcp-ping", "-l", &any, "--cpu", &there])?;
    let (_responder, address) = listening(answer, show)?;
    let ask = ["tcp-ping", &address, "-c", &pings, "--json", "--cpu", &here];
    ask_for_percentiles(world, world.partywall(DemoSide::A, "sender", &ask)?, show)
}

fn ask_for_percentiles(world: &World, mut command: Command, show: &Show) -> Result<[f64; 3], CommandFailure> {
    let path = world.dir().join("answer");
    let file = std::fs::File::create(&path).context(format_args!("cannot write {}", path.display()))?;
    command.stdout(file);
    let explain = |failure: CommandFailure| {
        let logs = ["sender", "receiver"].map(|name| world.read_log(name));
        failure.hint(logs.map(|log| log.trim().to_owned()).join("\n  "))
    };
    started(command, show)?.finish(LONGEST).map_err(explain)?;
    let text = std::fs::read_to_string(&path).context("cannot read ping's answer")?;
    let answer: Value =
        serde_json::from_str(&text).map_err(|e| CommandFailure::general(format!("ping's answer: {e}")))?;
    let point = |name: &str| answer["round_trip_ns"][name].as_f64();
    match (point("p50"), point("p99"), point("p99.9")) {
        (Some(p50), Some(p99), Some(p99_9)) => Ok([p50, p99, p99_9]),
        _ => Err(CommandFailure::general("ping's answer lacks percentiles")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_is_middle_value_or_nan() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[5.0]), 5.0);
        assert!(median(&[]).is_nan());
    }

    #[test]
    fn tables_show_medians_and_the_ratio() {
        let payload = CarriedFile { path: "x".into(), size: 1_000_000_000, sum: String::new() };
        let transfers =
            Transfers { partywall: vec![0.5, 0.4, 0.6], tcp: vec![1.0, 1.0, 2.0], tcp_route: "TCP over veth" };
        let text = transfers.to_text(&payload);
        assert!(text.contains("2.00 GB/s") && text.contains("2.0 times as fast as TCP over veth"), "{text}");
    }
}
