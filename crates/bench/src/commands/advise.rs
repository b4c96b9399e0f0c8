//! The best mechanism for each size on this machine, by its own measurements: a table and one sentence.

use super::{CommandResults, RoundTripPace, round_trip_plan, stream_plan};
use crate::{
    args::Scale,
    bench::{Bench, BenchPlan},
    error::Result,
    mechanism::{Mechanism, WaitMode},
    report::{cell::Cell, metric::Metric, table, unit},
    task::MeasuringWork,
};

/// The mechanisms that a program can choose from. Bare rings and cache lines are no choice, and neither is a ring of fixed size beside
/// one that adapts.
const STREAMS: [Mechanism; 8] = [
    Mechanism::Pipe,
    Mechanism::Unix,
    Mechanism::Tcp,
    Mechanism::TcpVeth,
    Mechanism::Iceoryx2,
    Mechanism::Iceoryx2ZeroCopy,
    Mechanism::Partywall,
    Mechanism::PartywallZeroCopy,
];
const ROUND_TRIPS: [Mechanism; 6] =
    [Mechanism::Pipe, Mechanism::Unix, Mechanism::Tcp, Mechanism::TcpVeth, Mechanism::Iceoryx2, Mechanism::Partywall];

fn sizes(scale: Scale) -> Vec<u64> {
    match scale {
        Scale::Smoke => vec![64],
        Scale::Quick => vec![64, 4 << 10, 64 << 10, 1 << 20],
        Scale::Full => vec![64, 512, 4 << 10, 64 << 10, 1 << 20, 16 << 20],
    }
}

fn plans(scale: Scale) -> Vec<BenchPlan> {
    let mut plans = Vec::new();
    for message in sizes(scale) {
        plans.extend(STREAMS.map(|mechanism| stream_plan("stream", scale, mechanism, message)));
        if message <= 64 << 10 {
            plans.extend(ROUND_TRIPS.map(|mechanism| {
                let waiting = match mechanism {
                    Mechanism::Partywall => WaitMode::Adaptive,
                    Mechanism::Iceoryx2 => WaitMode::Spinning,
                    _ => WaitMode::Blocking,
                };
                round_trip_plan("latency", scale, mechanism, message, RoundTripPace::Tight, waiting)
            }));
        }
    }
    if scale == Scale::Quick {
        plans.iter_mut().for_each(|plan| shorten(&mut plan.work));
    }
    plans
}

/// Advice is asked for in passing, and what it chooses between lies far apart: the whole, with its runs, is to take a minute.
fn shorten(work: &mut MeasuringWork) {
    match work {
        MeasuringWork::Stream { measured, warm_up, .. } => (*measured, *warm_up) = (*measured / 4, *warm_up / 2),
        MeasuringWork::RoundTrip { count, warm_up, .. } => (*count, *warm_up) = (*count / 10, *warm_up / 10),
        _ => {}
    }
}

/// Measures and shows.
pub(crate) fn run(bench: &mut Bench) -> Result<CommandResults> {
    let cells = bench.measure(plans(bench.scale()))?;
    show(bench, &cells)?;
    Ok(cells.into())
}

/// The best mechanism for one size, with its figure and that of UNIX sockets.
#[derive(Debug, Clone, PartialEq)]
struct BestMechanism {
    size: u64,
    best: Mechanism,
    figure: f64,
    unix: Option<f64>,
}

/// Shows what follows from figures that were measured by this or another subcommand.
pub(crate) fn show(bench: &Bench, cells: &[Cell]) -> Result<()> {
    bench.say("\n## What to use on this machine\n")?;
    let streams = choices(cells, "stream", &STREAMS, Metric::BytesPerSecond);
    let trips = choices(cells, "latency", &ROUND_TRIPS, Metric::P50Ns);
    let mut out =
        table::table(&[">size", "quickest stream", ">rate", ">x unix", "quickest round trip", ">p50", ">x unix"]);
    let mut sizes: Vec<u64> = streams.iter().chain(&trips).map(|choice| choice.size).collect();
    sizes.sort_unstable();
    sizes.dedup();
    for size in sizes {
        let part = |choices: &[BestMechanism], metric: Metric| {
            let choice = choices.iter().find(|choice| choice.size == size);
            choice.map_or_else(
                || ["-"; 3].map(String::from),
                |choice| {
                    let ratio = choice.unix.map_or_else(|| "-".into(), |unix| unit::digits(choice.figure / unix));
                    [choice.best.to_string(), metric.show(choice.figure), ratio]
                },
            )
        };
        let mut row = vec![unit::bytes(size)];
        row.extend(part(&streams, Metric::BytesPerSecond));
        row.extend(part(&trips, Metric::P50Ns));
        out.add_row(row);
    }
    bench.say(&table::text(&out))?;
    bench.say(&format!("\n{}", sentence(&streams, &trips)))
}

/// The best of `candidates` at each size that was measured, on two processors and without pauses.
fn choices(cells: &[Cell], experiment: &str, candidates: &[Mechanism], metric: Metric) -> Vec<BestMechanism> {
    let relevant: Vec<&Cell> = cells
        .iter()
        .filter(|cell| {
            let key = &cell.key;
            key.experiment == experiment
                && candidates.contains(&key.mechanism)
                && key.number("processors").is_none()
                && key.word("load").is_none_or(|load| load == RoundTripPace::Tight.name())
                // A program that does not say how to wait gets the adaptive way.
                && (key.mechanism != Mechanism::Partywall || key.word("waiting").is_none_or(|w| w == WaitMode::Adaptive.name()))
        })
        .collect();
    let mut sizes: Vec<u64> = relevant.iter().filter_map(|cell| cell.key.number("message")).collect();
    sizes.sort_unstable();
    sizes.dedup();
    let more = metric.better() == crate::report::metric::Better::Higher;
    let at = |size: u64| {
        let figures = || {
            let here = relevant.iter().filter(move |cell| cell.key.number("message") == Some(size));
            here.filter_map(|cell| Some((cell.key.mechanism, cell.median(metric)?)))
        };
        let order =
            |a: &(Mechanism, f64), b: &(Mechanism, f64)| if more { a.1.total_cmp(&b.1) } else { b.1.total_cmp(&a.1) };
        let (best, figure) = figures().max_by(order)?;
        let unix = figures().find(|(mechanism, _)| *mechanism == Mechanism::Unix).map(|(_, figure)| figure);
        Some(BestMechanism { size, best, figure, unix })
    };
    sizes.into_iter().filter_map(at).collect()
}

/// The table in words.
fn sentence(streams: &[BestMechanism], trips: &[BestMechanism]) -> String {
    let part = |choices: &[BestMechanism]| {
        let mut runs: Vec<(Mechanism, u64, u64)> = Vec::new();
        for choice in choices {
            match runs.last_mut() {
                Some((best, _, last)) if *best == choice.best => *last = choice.size,
                _ => runs.push((choice.best, choice.size, choice.size)),
            }
        }
        let phrase = |(best, first, last): &(Mechanism, u64, u64)| match (first == last, runs.len()) {
            (_, 1) => format!("{best} at every size"),
            (true, _) => format!("{best} at {}", unit::bytes(*first)),
            (false, _) => format!("{best} from {} to {}", unit::bytes(*first), unit::bytes(*last)),
        };
        let phrases: Vec<String> = runs.iter().map(phrase).collect();
        if phrases.is_empty() { "nothing that was measured".to_owned() } else { phrases.join(", ") }
    };
    format!("On this machine, stream with {}; for round trips use {}.", part(streams), part(trips))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{report::cell::Key, task::Figures};

    fn cell(mechanism: Mechanism, size: u64, rate: f64) -> Cell {
        let mut cell = Cell::new(Key::new("stream", mechanism).with("message", size));
        cell.runs = vec![Figures::from([(Metric::BytesPerSecond, rate)])];
        cell
    }

    #[test]
    fn quick_scale_with_five_runs_takes_about_a_minute() {
        // At 50 us for a round trip, which is slow, and 150 ms to start two processes and to end them.
        let takes = |plan: BenchPlan| {
            Duration::from_millis(150)
                + match plan.work {
                    MeasuringWork::Stream { measured, warm_up, .. } => measured + warm_up,
                    MeasuringWork::RoundTrip { count, warm_up, .. } => {
                        Duration::from_micros(50) * (count + warm_up) as u32
                    }
                    other => panic!("{other:?} is not for advice"),
                }
        };
        let five_runs: Duration = plans(Scale::Quick).into_iter().map(takes).sum::<Duration>() * 5;
        assert!(five_runs < Duration::from_secs(75), "{five_runs:?}");
    }

    #[test]
    fn advice_names_fastest_mechanism_by_size() {
        let cells = [
            cell(Mechanism::Unix, 64, 1.0),
            cell(Mechanism::Partywall, 64, 20.0),
            cell(Mechanism::PlainRing, 64, 99.0),
            cell(Mechanism::Unix, 4096, 2.0),
            cell(Mechanism::Partywall, 4096, 8.0),
            cell(Mechanism::Unix, 1 << 20, 9.0),
            cell(Mechanism::Partywall, 1 << 20, 8.0),
        ];
        let streams = choices(&cells, "stream", &STREAMS, Metric::BytesPerSecond);
        assert_eq!(streams[0], BestMechanism { size: 64, best: Mechanism::Partywall, figure: 20.0, unix: Some(1.0) });
        assert_eq!(
            sentence(&streams, &[]),
            "On this machine, stream with partywall from 64 B to 4 KiB, unix at 1 MiB; for round trips use nothing that was measured."
        );
        assert!(sentence(&streams[..2], &[]).contains("partywall at every size"));
    }
}
