//! Calls between the two machines, the client in one and the server in the other: Partywall's, beside raw sockets and Ice over TCP.
//!
//! The programs are those of `rpc`. They run in the machines, and get the same orders.

use std::{
    collections::BTreeMap,
    path::PathBuf,
    time::{Duration, Instant},
};

use partywall_lab::{Guest, Running};
use rustix::process::Signal;

use super::{
    NAME,
    machines::{PROGRAM, fault},
    program::{LOOK, START},
    round_trip,
};
use crate::{
    args::Scale,
    bench::{Bench, BenchPlan},
    commands::rpc::{self, RpcCells, direction},
    error::{BenchError, Result},
    interrupt::Interrupt,
    mechanism::{Mechanism, WaitMode},
    peers::{
        order::{PayloadPlace, PeerOrder},
        running::RunningPeers,
        sources::SOURCES,
    },
    report::{
        cell::Cell,
        metric::Metric,
        table::{self, Layout},
        verdict::{Bound, Verdict},
    },
    task::{Figures, MeasuringWork},
};

const MIB: u64 = 1 << 20;
/// Programs that are compiled on the host: the mechanism between machines, the mechanism of its source, and its name in the machines.
const COMPILED: [(Mechanism, Mechanism, &str); 2] =
    [(Mechanism::TcpVirtio, Mechanism::Unix, "peer-sockets"), (Mechanism::Ice, Mechanism::Ice, "peer-ice")];
/// What sequences are passed by.
const CARRIERS: [(Mechanism, PayloadPlace); 5] = [
    (Mechanism::PartywallCall, PayloadPlace::InHeap),
    (Mechanism::PartywallCall, PayloadPlace::Built),
    (Mechanism::PartywallCall, PayloadPlace::Copied),
    (Mechanism::TcpVirtio, PayloadPlace::Copied),
    (Mechanism::Ice, PayloadPlace::Copied),
];
/// The carriers that Partywall is compared with, and how verdicts name them.
const OTHERS: [(Mechanism, &str); 2] =
    [(Mechanism::TcpVirtio, "raw sockets over TCP"), (Mechanism::Ice, "Ice over TCP")];
/// The first port; each pair of programs has its own.
const FIRST_PORT: u16 = 7300;
/// The longest time for one order beyond its own.
const PATIENCE: Duration = Duration::from_secs(60);

fn elements(scale: Scale) -> Vec<u64> {
    match scale {
        Scale::Smoke => vec![100],
        Scale::Quick => vec![rpc::LONG],
        Scale::Full => vec![100, 1_000, rpc::LONG],
    }
}

/// Calls for this long: an emulated machine does a thousand of them in the time.
fn time(scale: Scale) -> Duration {
    Duration::from_millis(match scale {
        Scale::Smoke => 1,
        Scale::Quick => 300,
        Scale::Full => 600,
    })
}

/// Null calls and calls with 1 MiB by reference, by pairs of measuring processes.
pub(super) fn trips(scale: Scale) -> Vec<BenchPlan> {
    let call = |message, waiting| round_trip(scale, Mechanism::PartywallCall, message, waiting);
    let null = [WaitMode::Spinning, WaitMode::Adaptive, WaitMode::Blocking].map(|waiting| call(8, waiting));
    null.into_iter().chain([call(MIB, WaitMode::Spinning)]).collect()
}

/// Null calls of the other libraries, and calls with sequences.
pub(super) fn plans(scale: Scale) -> Vec<BenchPlan> {
    let null = PeerOrder { time: time(scale) * 4, ..rpc::null_order(scale) };
    let settings = [("message", 0.into()), ("load", "tight".into()), ("waiting", "as it does".into())];
    let mut plans: Vec<BenchPlan> =
        OTHERS.iter().map(|(mechanism, _)| rpc::peer_plan(NAME, *mechanism, null, &settings)).collect();
    plans.extend(rpc::sequences_by(NAME, &CARRIERS, &elements(scale), time(scale)));
    plans
}

/// The compiled programs, or the reasons why there are none.
#[derive(Debug, Default)]
pub(super) struct CallPrograms(BTreeMap<Mechanism, std::result::Result<PathBuf, String>>);

impl CallPrograms {
    /// Compiles what the options ask for.
    pub(super) fn compile(bench: &Bench) -> Self {
        let mut all = BTreeMap::new();
        for (mechanism, source, name) in COMPILED.into_iter().filter(|one| bench.common.wants(one.0)) {
            let Some(source) = SOURCES.iter().find(|one| one.mechanism == source) else { continue };
            if source.missing().is_empty() {
                bench.progress(&format!("compiling {name} for the machines"));
            }
            all.insert(mechanism, source.build(&bench.scratch().join(name)).map_err(|e| e.to_string()));
        }
        Self(all)
    }

    /// The files for the machines, with their names there.
    pub(super) fn files(&self) -> Vec<(PathBuf, String)> {
        let built = |(mechanism, _, name): &(Mechanism, Mechanism, &str)| {
            Some((self.0.get(mechanism)?.as_ref().ok()?.clone(), (*name).to_owned()))
        };
        COMPILED.iter().filter_map(built).collect()
    }

    /// The first words of a program's command line in a machine.
    fn line(&self, mechanism: Mechanism) -> Result<Vec<&'static str>> {
        let Some((_, _, name)) = COMPILED.iter().find(|one| one.0 == mechanism) else {
            return Ok(vec![PROGRAM, "peer"]);
        };
        match self.0.get(&mechanism) {
            Some(Ok(_)) => Ok(vec![name]),
            Some(Err(why)) => Err(BenchError::Unavailable(why.clone())),
            None => Err(BenchError::Unavailable("its program was not compiled".into())),
        }
    }
}

/// The programs that run in the machines. Dropping it ends them.
pub(super) struct GuestPeers<'a> {
    client: &'a Guest,
    server: &'a Guest,
    programs: &'a CallPrograms,
    running: RunningPeers<CallPair<'a>>,
}

struct CallPair<'a> {
    // The client goes first.
    client: GuestProgram<'a>,
    _server: GuestProgram<'a>,
}

impl<'a> GuestPeers<'a> {
    pub(super) fn new([client, server]: [&'a Guest; 2], programs: &'a CallPrograms) -> Self {
        Self { client, server, programs, running: RunningPeers::default() }
    }

    /// One measurement.
    pub(super) fn run(&mut self, plan: &BenchPlan, interrupt: &Interrupt) -> Result<Figures> {
        let MeasuringWork::Peer(order) = &plan.work else {
            return Err(BenchError::Transport("not an order for a peer".into()));
        };
        let Self { client, server, programs, running } = self;
        let start = |number| Self::start([*client, *server], programs, (plan.key.mechanism, number), interrupt);
        running.execute(&plan.key, start, |pair| pair.client.ask(order, interrupt))
    }

    fn start(
        [client, server]: [&'a Guest; 2],
        programs: &CallPrograms,
        (mechanism, number): (Mechanism, u32),
        interrupt: &Interrupt,
    ) -> Result<CallPair<'a>> {
        let program = programs.line(mechanism)?;
        let (own, address) = if mechanism == Mechanism::PartywallCall {
            let name = |guest: &Guest| format!("{}.bench-calls-{number}", guest.name());
            (name(client), name(server))
        } else {
            let address = server.address();
            let address = address.ok_or_else(|| BenchError::Unavailable("the machines have no network".into()))?;
            let address = format!("{address}:{}", u32::from(FIRST_PORT) + number);
            (address.clone(), address)
        };
        let start = |guest: &'a Guest, role: &[&str]| {
            let mut started = GuestProgram::start(guest, &[&program, role].concat())?;
            match started.line(START, interrupt)?.as_str() {
                "ready" => Ok(started),
                said => Err(BenchError::Transport(format!(
                    "`{}` in machine {} answered \"{said}\"",
                    role.join(" "),
                    guest.name()
                ))),
            }
        };
        let server = start(server, &["serve", &address])?;
        let role: &[&str] = if own == address { &["call", &address] } else { &["call", &own, &address] };
        let client = start(client, role)?;
        Ok(CallPair { client, _server: server })
    }
}

/// A program in a machine whose output is read line by line. Dropping it ends it.
struct GuestProgram<'a> {
    running: Running<'a>,
    ended: bool,
    /// Bytes of its output that have been taken.
    taken: usize,
}

impl<'a> GuestProgram<'a> {
    fn start(guest: &'a Guest, words: &[&str]) -> Result<Self> {
        Ok(Self { running: guest.start(words).map_err(fault)?, ended: false, taken: 0 })
    }

    fn ask(&mut self, order: &PeerOrder, interrupt: &Interrupt) -> Result<String> {
        self.running.input(format!("{order}\n").as_bytes()).map_err(fault)?;
        self.line(order.time + PATIENCE, interrupt)
    }

    fn line(&mut self, patience: Duration, interrupt: &Interrupt) -> Result<String> {
        let deadline = Instant::now() + patience;
        loop {
            let rest = &self.running.so_far().stdout[self.taken..];
            if let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
                let line = String::from_utf8_lossy(&rest[..end]).trim_end().to_owned();
                self.taken += end + 1;
                return Ok(line);
            }
            interrupt.check()?;
            let output = self.running.so_far();
            if self.ended {
                let said = String::from_utf8_lossy(&output.stderr);
                let end = format!("a program in a machine ended with {}: {}", output.status, said.trim());
                return Err(BenchError::Transport(end));
            }
            if Instant::now() > deadline {
                return Err(BenchError::Transport("a program in a machine does not answer".into()));
            }
            self.ended = self.running.look(LOOK).map_err(fault)? == Some(true);
        }
    }
}

impl Drop for GuestProgram<'_> {
    fn drop(&mut self) {
        if !self.ended {
            // If it cannot be told it is gone.
            let _ = self.running.signal(Signal::KILL);
        }
    }
}

/// The tables.
pub(super) fn show(bench: &Bench, cells: &[Cell]) -> Result<()> {
    if cells.is_empty() {
        return Ok(());
    }
    let some = |wanted: fn(&Cell) -> bool| cells.iter().filter(|cell| wanted(cell)).cloned().collect::<Vec<_>>();
    let layout = Layout {
        group: &[],
        row: &[("message", "arguments"), ("waiting", "waiting")],
        metrics: &[Metric::P50Ns, Metric::P99Ns],
        baseline: Mechanism::TcpVirtio,
    };
    let calls = some(|cell| cell.key.word("load") == Some("tight"));
    bench.say(&format!("\n## Calls, one after the other\n\n{}", table::cells(&calls, &layout)))?;
    bench.say(&rpc::sequence_table(&some(|cell| cell.key.word("kind").is_some()), Mechanism::TcpVirtio))
}

/// The speed-ups over the other carriers that were measured.
pub(super) fn judge(cells: &[Cell]) -> Vec<Verdict> {
    let figures = RpcCells(cells);
    let faster = |text: String, theirs, ours| Verdict::by_turns(text, Bound::Report, 1.0, Metric::P50Ns, theirs, ours);
    let call = |message, waiting: WaitMode| figures.call(Mechanism::PartywallCall, message, waiting.name());
    let mut verdicts = Vec::new();
    for (other, name) in OTHERS {
        let theirs = figures.call(other, 0, "as it does");
        for (waiting, how) in
            [(WaitMode::Spinning, "awake"), (WaitMode::Adaptive, "adaptive"), (WaitMode::Blocking, "blocking")]
        {
            // The others run later than Partywall, so there are no turns to compare.
            let median = |cell: Option<&Cell>| cell.and_then(|cell| cell.median(Metric::P50Ns));
            let claim = format!("{name} : null call, {how}");
            let (theirs, ours) = (median(theirs), median(call(8, waiting)));
            verdicts.push(Verdict::ratio(claim, Bound::Report, 1.0, Metric::P50Ns, theirs, ours));
        }
    }
    verdicts.push(faster(
        "call with 1 MiB by reference : null call, awake".into(),
        call(MIB, WaitMode::Spinning),
        call(8, WaitMode::Spinning),
    ));
    let longest = cells.iter().filter_map(|cell| cell.key.number("elements")).max().unwrap_or(rpc::LONG);
    for (kind, sends) in rpc::KINDS.into_iter().flat_map(|(kind, _)| [(kind, true), (kind, false)]) {
        for (other, name) in OTHERS {
            let theirs = figures.sequence((other, PayloadPlace::Copied), kind, sends, longest);
            for place in [PayloadPlace::InHeap, PayloadPlace::Built] {
                let ours = figures.sequence((Mechanism::PartywallCall, place), kind, sends, longest);
                let text = format!("{name} : {} of {longest} {}, {}", direction(sends), kind.name(), place.name());
                verdicts.push(faster(text, theirs, ours));
            }
        }
    }
    verdicts.retain(|verdict| verdict.measured.is_some());
    verdicts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_comparison_of_calls_finds_its_cells() {
        let cells: Vec<Cell> = [trips(Scale::Full), plans(Scale::Full)]
            .concat()
            .into_iter()
            .map(|plan| Cell { runs: vec![Figures::from([(Metric::P50Ns, 1.0)])], ..Cell::new(plan.key) })
            .collect();
        let verdicts = judge(&cells);
        assert_eq!(verdicts.len(), 2 * 3 + 1 + 3 * 2 * 2 * 2);
        for verdict in verdicts {
            assert!(verdict.measured.is_some(), "{}", verdict.claim);
        }
    }

    #[test]
    fn sequences_between_machines_fit_first_service() {
        // The larger service begins with a heap of 1 GiB, for which no window has room.
        let largest = elements(Scale::Full).into_iter().max().unwrap();
        assert!(rpc::KINDS.iter().all(|(kind, _)| crate::peers::calls::fits_small(*kind, largest)));
    }
}
