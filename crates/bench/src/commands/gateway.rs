//! The gateway between hosts: a stream and round trips through two gateways with TLS, beside plain TCP, all on this machine.

use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use super::{CommandResults, RoundTripPace};
use crate::{
    apps::{accounts::BusyStretch, network, site},
    args::Scale,
    bench::{Bench, BenchPlan},
    error::{BenchError, During, Result},
    hosts::{TwoHosts, bound},
    interrupt::Interrupt,
    mechanism::{Mechanism, Tuning},
    process::GuardedChild,
    report::{
        cell::{Cell, Key},
        metric::Metric,
        stats::RunSummary,
        table::{self, Layout},
        unit,
        verdict::{Bound, Verdict},
    },
    task::{Figures, MeasuringWork},
};

/// Bytes of each write of the stream, as of iperf3's.
const WRITE: u64 = 128 << 10;
/// Bytes of the messages that go there and back.
const MESSAGE: u64 = 64;
/// The part of iperf3's rate that one stream is to reach.
const RATE: f64 = 0.5;
/// The time that a round trip may take beyond one of plain TCP.
const BEYOND_US: f64 = 100.0;
/// The kinds of measurements.
const STREAM: &str = "gateway-stream";
const TRIP: &str = "gateway-trip";
const LOAD: &str = "load";

/// How long the stream is measured, and how long it runs before. iperf3 counts whole seconds.
fn stretch(scale: Scale) -> (Duration, Duration) {
    match scale {
        Scale::Smoke => (Duration::from_millis(20), Duration::from_millis(10)),
        Scale::Quick => (Duration::from_secs(1), Duration::from_secs(1)),
        Scale::Full => (Duration::from_secs(4), Duration::from_secs(1)),
    }
}

fn plans(scale: Scale) -> Vec<BenchPlan> {
    let (measured, warm_up) = stretch(scale);
    let plan = |experiment: &str, mechanism, message, work| BenchPlan {
        key: Key::new(experiment, mechanism).with("message", message),
        tuning: Tuning::of(mechanism, message).prompt(),
        work,
        one_cpu: false,
    };
    let stream =
        |mechanism| plan(STREAM, mechanism, WRITE, MeasuringWork::Stream { message: WRITE, measured, warm_up });
    let mut plans = [Mechanism::PartywallGateway, Mechanism::Iperf3].map(stream).to_vec();
    for load in [RoundTripPace::Tight, RoundTripPace::Light] {
        let (count, think) = match (scale, load) {
            (Scale::Smoke, _) => (10, Duration::ZERO),
            (Scale::Quick, RoundTripPace::Tight) => (3_000, Duration::ZERO),
            (Scale::Full, RoundTripPace::Tight) => (20_000, Duration::ZERO),
            (Scale::Quick, RoundTripPace::Light) => (300, Duration::from_millis(1)),
            (Scale::Full, RoundTripPace::Light) => (1_000, Duration::from_millis(1)),
        };
        let work = MeasuringWork::RoundTrip { message: MESSAGE, warm_up: count / 10 + 1, count, think };
        for mechanism in [Mechanism::PartywallGateway, Mechanism::Tcp] {
            let mut one = plan(TRIP, mechanism, MESSAGE, work.clone());
            one.key = one.key.with(LOAD, load.name());
            plans.push(one);
        }
    }
    plans
}

/// One stream of iperf3 over loopback: its rate, and the processor time of the whole machine meanwhile.
fn iperf3(plan: &BenchPlan, folder: &Path, interrupt: &Interrupt) -> Result<Figures> {
    let MeasuringWork::Stream { message, measured, warm_up } = plan.work else {
        return Err(BenchError::Transport("iperf3 only measures streams".into()));
    };
    let program = site::find("iperf3", "iperf3")?;
    let folder = folder.join("iperf3");
    fs::create_dir_all(&folder).during("making a folder for iperf3")?;
    let port = site::free_ports()?;
    let mut server = bound(&program);
    server.args(["-s", "-1", "-p", &port.to_string()]).stderr(Stdio::null());
    let mut server = GuardedChild::spawn(&mut server)?;
    let waited = std::time::Instant::now();
    while !site::listens(server.id(), port) {
        interrupt.check()?;
        if let Some(end) = server.ended() {
            return Err(BenchError::Transport(format!("the server of iperf3 ended: {end}")));
        }
        if waited.elapsed() > Duration::from_secs(30) {
            return Err(BenchError::Transport("the server of iperf3 does not listen".into()));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let seconds = measured.as_secs().max(1);
    let mut client = Command::new(&program);
    client.args(["-c", "127.0.0.1", "-p", &port.to_string(), "-J", "-P", "1", "-l", &message.to_string()]);
    client.args(["-t", &seconds.to_string(), "-O", &warm_up.as_secs().to_string()]).stdin(Stdio::null());
    let (report, busy) = std::thread::scope(|scope| {
        // Within the seconds that count.
        let busy = scope.spawn(|| {
            std::thread::sleep(Duration::from_secs(warm_up.as_secs()) + Duration::from_millis(200));
            let busy = BusyStretch::begin();
            std::thread::sleep(Duration::from_millis(1000 * seconds - 400));
            busy.end(1.0)
        });
        let report = site::run(&mut client, "iperf3", Duration::from_secs(60), &folder, interrupt);
        (report, busy.join())
    });
    let mut figures = network::iperf3_figures(&[], &report?)?;
    let busy = busy.map_err(|_| BenchError::Transport("the thread that reads processor time has panicked".into()))?;
    if let (Some(rate), Some(percent)) = (figures.get(&Metric::BytesPerSecond), busy.get(&Metric::MachineCpuPercent)) {
        figures.insert(Metric::CpuSecondsPerGigabyte, percent / 100.0 / (rate / 1e9));
    }
    Ok(figures)
}

/// Measures and shows.
pub(crate) fn run(bench: &mut Bench) -> Result<CommandResults> {
    bench.say(
        "# two hosts on this machine, each with a broker and a gateway, and one etcd; QUIC with TLS 1.3 over loopback\n\
         # nothing is pinned to a processor; TCP has TCP_NODELAY in round trips\n\
         # processor time is that of the whole machine",
    )?;
    let folder = bench.scratch().join("hosts");
    fs::create_dir_all(&folder).during("making the folder of the hosts")?;
    let mut hosts = TwoHosts::start(&folder, &bench.interrupt)?;
    let brokers = hosts.brokers();
    let cells = bench.measure_by(plans(bench.scale()), bench.common.runs(), |bench, plan| {
        bench.interrupt.check()?;
        match plan.key.mechanism {
            Mechanism::Iperf3 => iperf3(plan, &folder, &bench.interrupt),
            Mechanism::PartywallGateway => {
                hosts.check()?;
                bench.run_unpinned(plan, Some(&brokers))
            }
            _ => bench.run_unpinned(plan, None),
        }
    })?;
    let of = |experiment: &str| -> Vec<Cell> {
        cells.iter().filter(|cell| cell.key.experiment == experiment).cloned().collect()
    };
    let layout = |group, metrics, baseline| Layout { group, row: &[], metrics, baseline };
    let metrics = [Metric::BytesPerSecond, Metric::CpuSecondsPerGigabyte];
    bench.say(&format!(
        "\n## One stream\n\n{}",
        table::cells(&of(STREAM), &layout(&[("message", "write")], &metrics, Mechanism::Iperf3))
    ))?;
    let metrics = [Metric::P50Ns, Metric::P99Ns];
    bench.say(&format!(
        "\n## Round trips\n\n{}",
        table::cells(&of(TRIP), &layout(&[("message", "message"), (LOAD, "load")], &metrics, Mechanism::Tcp))
    ))?;
    let verdicts = judge(&cells);
    bench
        .say("\n## What is promised, and what was measured (median of the turns of this run; figures are medians)\n")?;
    bench.say(&table::verdicts(&verdicts))?;
    Ok(CommandResults { cells, verdicts })
}

fn judge(cells: &[Cell]) -> Vec<Verdict> {
    let find = |experiment: &str, mechanism: Mechanism, load: Option<&str>| {
        let fits = |cell: &&Cell| {
            let key = &cell.key;
            key.experiment == experiment && key.mechanism == mechanism && key.word(LOAD) == load
        };
        cells.iter().find(fits)
    };
    let [ours, theirs] =
        [Mechanism::PartywallGateway, Mechanism::Iperf3].map(|mechanism| find(STREAM, mechanism, None));
    let rate = "one stream through two gateways, with TLS : iperf3 over plain TCP";
    let spent = "processor time for a byte : iperf3's";
    let mut verdicts = vec![
        Verdict::by_turns(rate, Bound::AtLeast, RATE, Metric::BytesPerSecond, ours, theirs),
        Verdict::by_turns(spent, Bound::Report, 1.0, Metric::CpuSecondsPerGigabyte, ours, theirs),
    ];
    for load in [RoundTripPace::Tight, RoundTripPace::Light] {
        let [ours, theirs] =
            [Mechanism::PartywallGateway, Mechanism::Tcp].map(|mechanism| find(TRIP, mechanism, Some(load.name())));
        let claim = format!("round trip of {}, {}: us beyond plain TCP", unit::bytes(MESSAGE), load.name());
        verdicts.push(beyond(claim, ours, theirs));
    }
    verdicts
}

/// The time of a round trip beyond that of another mechanism in the same turn.
fn beyond(claim: String, ours: Option<&Cell>, theirs: Option<&Cell>) -> Verdict {
    let difference = ours.zip(theirs).and_then(|(ours, theirs)| {
        let turns = ours.runs.iter().zip(&theirs.runs);
        RunSummary::of(turns.filter_map(|(a, b)| Some((a.get(&Metric::P50Ns)? - b.get(&Metric::P50Ns)?) / 1e3)))
    });
    let show = |cell: Option<&Cell>| {
        cell.and_then(|cell| cell.median(Metric::P50Ns)).map_or_else(|| "-".into(), unit::nanoseconds)
    };
    let mut figures = format!("{} : {}", show(ours), show(theirs));
    if let Some(turns) = difference {
        figures += &format!("; turns from {} to {} us", unit::digits(turns.min), unit::digits(turns.max));
    }
    let measured = difference.map(|turns| turns.median);
    Verdict { figures, ..Verdict::figure(claim, Bound::AtMost, BEYOND_US, measured) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cells(of: impl Fn(Mechanism) -> [f64; 3]) -> Vec<Cell> {
        let cell = |plan: BenchPlan| {
            let mut cell = Cell::new(plan.key);
            let metrics = [Metric::BytesPerSecond, Metric::P50Ns, Metric::CpuSecondsPerGigabyte];
            let values = of(cell.key.mechanism);
            cell.runs = values.map(|value| Figures::from(metrics.map(|metric| (metric, value)))).into();
            cell
        };
        plans(Scale::Full).into_iter().map(cell).collect()
    }

    #[test]
    fn every_claim_finds_its_cells() {
        let verdicts = judge(&cells(|_| [1.0; 3]));
        assert_eq!(verdicts.len(), 4);
        for verdict in verdicts {
            assert!(verdict.measured.is_some(), "{}", verdict.claim);
        }
        assert!(judge(&[]).iter().all(|verdict| verdict.measured.is_none()));
    }

    #[test]
    fn round_trips_are_judged_by_difference_of_turns() {
        let words = |ours: [f64; 3]| -> Vec<&str> {
            let of = |mechanism| if mechanism == Mechanism::PartywallGateway { ours } else { [20e3, 900e3, 20e3] };
            judge(&cells(of)).iter().skip(2).map(Verdict::word).collect()
        };
        // The machine is slow in the middle turn.
        assert_eq!(words([119e3, 990e3, 119e3]), ["met"; 2]);
        assert_eq!(words([121e3, 990e3, 121e3]), ["MISSED"; 2]);
    }
}
