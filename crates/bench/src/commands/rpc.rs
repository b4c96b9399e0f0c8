//! Calls: null calls, 1 MiB by reference, pipelined calls, many clients and sequences, beside other libraries for calls and the least that the
//! machine allows.

use std::{collections::BTreeMap, time::Duration};

use super::{CommandResults, RoundTripPace, round_trip_plan, waitings};
use crate::{
    args::Scale,
    bench::{Bench, BenchPlan},
    error::Result,
    mechanism::{Mechanism, Tuning, WaitMode},
    peers::{
        order::{OrderKind, PayloadPlace, PeerOrder},
        programs::{PeerLibraries, PeerSurroundings},
    },
    report::{
        cell::{Cell, Key, Setting},
        metric::Metric,
        plot::{Axis, Chart, Picture, Series},
        table::{self, Layout},
        unit,
        verdict::{Bound, Verdict},
    },
    task::MeasuringWork,
};

const NAME: &str = "rpc";
/// The mechanisms to compare, with the bytes that each carries. Arguments of 8 bytes travel in the call, 1 MiB stays in the heap.
const CELLS: [(Mechanism, u64); 7] = [
    (Mechanism::OneLine, 8),
    (Mechanism::TwoLine, 64),
    (Mechanism::Eventfd, 8),
    (Mechanism::Unix, 64),
    (Mechanism::PartywallCall, 8),
    (Mechanism::PartywallCall, MIB),
    (Mechanism::Iceoryx2Call, 8),
];
const MIB: u64 = 1 << 20;
/// Libraries of which null calls are measured by separate programs.
const LIBRARIES: [Mechanism; 4] = [Mechanism::Ice, Mechanism::XmlRpc, Mechanism::Grpc, Mechanism::Capnp];
/// What sequences are passed by. Partywall does it in three ways.
const CARRIERS: [(Mechanism, PayloadPlace); 8] = [
    (Mechanism::PartywallCall, PayloadPlace::InHeap),
    (Mechanism::PartywallCall, PayloadPlace::Built),
    (Mechanism::PartywallCall, PayloadPlace::Copied),
    (Mechanism::Unix, PayloadPlace::Copied),
    (Mechanism::Ice, PayloadPlace::Copied),
    (Mechanism::XmlRpc, PayloadPlace::Copied),
    (Mechanism::Grpc, PayloadPlace::Copied),
    (Mechanism::Capnp, PayloadPlace::Copied),
];
/// The kinds of sequences, with the least speed-up over Ice with the building of a block.
pub(crate) const KINDS: [(OrderKind, f64); 3] =
    [(OrderKind::Byte, 3.0), (OrderKind::Fixed, 10.0), (OrderKind::Variable, 6.0)];
/// Sequences of this number of elements and more have a promised speed-up.
pub(crate) const LONG: u64 = 10_000;

fn elements(scale: Scale) -> Vec<u64> {
    match scale {
        Scale::Smoke => vec![100],
        Scale::Quick => vec![100, LONG, 1_000_000],
        Scale::Full => vec![100, 1_000, LONG, 100_000, 1_000_000, 10_000_000],
    }
}

/// A measurement by the separate programs of a library.
pub(crate) fn peer_plan(
    experiment: &str,
    mechanism: Mechanism,
    order: PeerOrder,
    settings: &[(&str, Setting)],
) -> BenchPlan {
    let key = settings.iter().fold(Key::new(experiment, mechanism), |key, (name, value)| key.with(name, value.clone()));
    BenchPlan { key, tuning: Tuning::of(mechanism, order.elements), work: MeasuringWork::Peer(order), one_cpu: false }
}

/// Calls for this long.
fn time(scale: Scale) -> Duration {
    Duration::from_millis(match scale {
        Scale::Smoke => 1,
        Scale::Quick => 60,
        Scale::Full => 120,
    })
}

/// The order of null calls.
pub(crate) fn null_order(scale: Scale) -> PeerOrder {
    let most = if scale == Scale::Smoke { 10 } else { 20_000 };
    PeerOrder {
        kind: OrderKind::Null,
        sends: true,
        elements: 0,
        most,
        time: time(scale) * 4,
        place: PayloadPlace::Copied,
    }
}

/// Null calls, and other calls whose arguments do not matter.
fn call_plans(scale: Scale) -> Vec<BenchPlan> {
    let plan = |(mechanism, message): (Mechanism, u64)| {
        waitings(mechanism)
            .iter()
            .map(move |waiting| round_trip_plan(NAME, scale, mechanism, message, RoundTripPace::Tight, *waiting))
    };
    let mut plans: Vec<BenchPlan> = CELLS.into_iter().flat_map(plan).collect();
    // Those that are compared are measured one after the other: all that spin, and at last those that sleep, as the libraries do.
    plans.sort_by_key(|plan| match plan.tuning.waiting {
        WaitMode::Spinning => 0,
        WaitMode::Adaptive => 1,
        WaitMode::Blocking => 2,
    });
    let settings =
        |message: u64| [("message", message.into()), ("load", "tight".into()), ("waiting", "as it does".into())];
    let null = null_order(scale);
    plans.extend(LIBRARIES.map(|library| peer_plan(NAME, library, null, &settings(0))));
    let array = PeerOrder { kind: OrderKind::Array, elements: MIB, ..null };
    plans.push(peer_plan(NAME, Mechanism::PartywallPython, null, &settings(0)));
    plans.push(peer_plan(NAME, Mechanism::PartywallPython, array, &settings(MIB)));
    plans
}

/// Calls that begin before earlier ones have returned, and one client among many.
fn many_plans(scale: Scale) -> Vec<BenchPlan> {
    let pipelined = PeerOrder { kind: OrderKind::Pipelined, ..null_order(scale) };
    let clients = if scale == Scale::Smoke { 5 } else { 1_000 };
    let crowd = PeerOrder { kind: OrderKind::Crowd, elements: clients, time: time(scale) * 4, ..pipelined };
    vec![
        peer_plan(NAME, Mechanism::PartywallCall, pipelined, &[("load", "pipelined".into())]),
        peer_plan(NAME, Mechanism::PartywallCall, crowd, &[("clients", clients.into())]),
    ]
}

fn sequence_plans(scale: Scale) -> Vec<BenchPlan> {
    sequences_by(NAME, &CARRIERS, &elements(scale), time(scale))
}

/// Calls with sequences of these numbers of elements, of each kind and in both directions.
pub(crate) fn sequences_by(
    experiment: &str,
    carriers: &[(Mechanism, PayloadPlace)],
    counts: &[u64],
    time: Duration,
) -> Vec<BenchPlan> {
    let mut plans = Vec::new();
    for (kind, _) in KINDS {
        for sends in [true, false] {
            for &count in counts {
                // Those that are compared are measured one after the other.
                for &(mechanism, place) in carriers {
                    let order = PeerOrder { kind, sends, elements: count, most: 2_000, time, place };
                    let settings = [
                        ("kind", kind.name().into()),
                        ("direction", direction(sends).into()),
                        ("elements", count.into()),
                        ("place", place.name().into()),
                    ];
                    plans.push(peer_plan(experiment, mechanism, order, &settings));
                }
            }
        }
    }
    plans
}

pub(crate) fn direction(sends: bool) -> &'static str {
    if sends { "send" } else { "receive" }
}

/// Measures, by pairs of measuring processes and by the separate programs of libraries.
pub(crate) fn measure(bench: &mut Bench, plans: Vec<BenchPlan>) -> Result<Vec<Cell>> {
    let mut peers = PeerLibraries::default();
    let (scratch, placement, interrupt) = (bench.scratch(), bench.placement, bench.interrupt.again()?);
    let runs = bench.common.runs();
    bench.measure_by(plans, runs, |bench, plan| {
        let MeasuringWork::Peer(order) = &plan.work else { return bench.run(plan) };
        let mechanism = plan.key.mechanism;
        // Memory of the kernel is measured by Partywall's own program.
        let needs_broker = mechanism.is_partywall() || mechanism == Mechanism::Memfd;
        let broker = needs_broker.then(|| bench.broker().map(|broker| broker.socket().to_owned())).transpose()?;
        peers.execute(
            &plan.key,
            order,
            &PeerSurroundings { scratch: &scratch, placement, interrupt: &interrupt, broker },
        )
    })
}

/// Measures and shows.
pub(crate) fn run(bench: &mut Bench) -> Result<CommandResults> {
    let scale = bench.scale();
    let plans = [call_plans(scale), many_plans(scale), sequence_plans(scale)].concat();
    let cells = measure(bench, plans)?;
    let some = |wanted: fn(&Cell) -> bool| cells.iter().filter(|cell| wanted(cell)).cloned().collect::<Vec<_>>();
    let calls = some(|cell| cell.key.word("load") == Some("tight"));
    let layout = Layout {
        group: &[],
        row: &[("message", "arguments"), ("waiting", "waiting")],
        metrics: &[Metric::P50Ns, Metric::P99Ns, Metric::P999Ns],
        baseline: Mechanism::TwoLine,
    };
    bench.say(&format!("\n## Calls, one after the other, beside round trips\n\n{}", table::cells(&calls, &layout)))?;
    let many = some(|cell| cell.key.word("load") == Some("pipelined") || cell.key.number("clients").is_some());
    bench.say(&format!("\n## Pipelined calls, and one client among many\n\n{}", table::listing(&many)))?;
    let sequences = some(|cell| cell.key.word("kind").is_some());
    bench.say(&sequence_table(&sequences, Mechanism::Ice))?;
    bench.say(&format!(
        "\n## Speed-ups of Partywall's calls, blocks being built : other libraries\n\n{}",
        speed_ups(&sequences)
    ))?;
    let verdicts = judge(&cells);
    bench.say("\n## What is promised, and what was measured (median of the ratios of the turns of this run; figures are medians)\n")?;
    bench.say(&table::verdicts(&verdicts))?;
    bench.draw(&pictures(&sequences))?;
    Ok(CommandResults { cells, verdicts })
}

/// The table of calls with sequences, under its heading.
pub(crate) fn sequence_table(cells: &[Cell], baseline: Mechanism) -> String {
    let layout = Layout {
        group: &[("kind", "elements are"), ("direction", "the client"), ("elements", "elements")],
        row: &[("place", "place")],
        metrics: &[Metric::P50Ns, Metric::P99Ns],
        baseline,
    };
    format!("\n## Calls with sequences\n\n{}", table::cells(cells, &layout))
}

/// Looks cells up.
pub(crate) struct RpcCells<'a>(pub(crate) &'a [Cell]);

impl RpcCells<'_> {
    /// A call by its mechanism, the bytes of its arguments and its way to wait.
    pub(crate) fn call(&self, mechanism: Mechanism, message: u64, waiting: &str) -> Option<&Cell> {
        self.0.iter().find(|cell| {
            cell.key.mechanism == mechanism
                && cell.key.number("message") == Some(message)
                && cell.key.word("waiting") == Some(waiting)
        })
    }

    /// A call with a sequence.
    pub(crate) fn sequence(
        &self,
        (mechanism, place): (Mechanism, PayloadPlace),
        kind: OrderKind,
        sends: bool,
        count: u64,
    ) -> Option<&Cell> {
        self.0.iter().find(|cell| {
            cell.key.mechanism == mechanism
                && cell.key.word("place") == Some(place.name())
                && cell.key.word("kind") == Some(kind.name())
                && cell.key.word("direction") == Some(direction(sends))
                && cell.key.number("elements") == Some(count)
        })
    }

    /// The numbers of elements that were measured.
    fn counts(&self) -> Vec<u64> {
        let mut counts: Vec<u64> = self.0.iter().filter_map(|cell| cell.key.number("elements")).collect();
        counts.sort_unstable();
        counts.dedup();
        counts
    }
}

/// For each kind, direction and length, how many times longer the others take.
fn speed_ups(sequences: &[Cell]) -> String {
    let others = &CARRIERS[3..];
    let mut headings = vec!["elements are".to_owned(), "the client".into(), ">elements".into()];
    headings.extend(others.iter().map(|(mechanism, _)| format!(">{mechanism}")));
    headings.push(">ice, in heap".into());
    let mut shown = table::table(&headings.iter().map(String::as_str).collect::<Vec<_>>());
    let cells = RpcCells(sequences);
    for ((kind, _), sends) in KINDS.into_iter().flat_map(|kind| [(kind, true), (kind, false)]) {
        for count in cells.counts() {
            let find = |carrier| cells.sequence(carrier, kind, sends, count);
            let ratio = |theirs: (Mechanism, PayloadPlace), ours: PayloadPlace| {
                let ours = find((Mechanism::PartywallCall, ours))?;
                find(theirs)?.ratios_to(ours, Metric::P50Ns).map(|ratios| unit::digits(ratios.median))
            };
            let show = |ratio: Option<String>| ratio.unwrap_or_else(|| "-".into());
            let mut row = vec![kind.name().to_owned(), direction(sends).into(), count.to_string()];
            row.extend(others.iter().map(|other| show(ratio(*other, PayloadPlace::Built))));
            row.push(show(ratio((Mechanism::Ice, PayloadPlace::Copied), PayloadPlace::InHeap)));
            shown.add_row(row);
        }
    }
    table::text(&shown)
}

fn judge(cells: &[Cell]) -> Vec<Verdict> {
    let figures = RpcCells(cells);
    let [spinning, blocking] = [WaitMode::Spinning, WaitMode::Blocking]
        .map(|waiting| figures.call(Mechanism::PartywallCall, 8, waiting.name()));
    let library = |library| figures.call(library, 0, "as it does");
    let at_most =
        |text: &str, limit, ours, theirs| Verdict::by_turns(text, Bound::AtMost, limit, Metric::P50Ns, ours, theirs);
    let faster =
        |text: &str, limit, theirs, ours| Verdict::by_turns(text, Bound::AtLeast, limit, Metric::P50Ns, theirs, ours);
    let two_line = figures.call(Mechanism::TwoLine, 64, WaitMode::Spinning.name());
    let eventfd = figures.call(Mechanism::Eventfd, 8, WaitMode::Blocking.name());
    let large = figures.call(Mechanism::PartywallCall, MIB, WaitMode::Spinning.name());
    let mut verdicts = vec![
        at_most("null call, awake : two-line ping-pong", 1.3, spinning, two_line),
        faster("Ice : null call, awake", 60.0, library(Mechanism::Ice), spinning),
        faster("gRPC over a UNIX socket : null call, awake", 150.0, library(Mechanism::Grpc), spinning),
        at_most("null call, blocking : eventfd ping-pong", 1.2, blocking, eventfd),
        faster("Ice : null call, blocking", 2.5, library(Mechanism::Ice), blocking),
        at_most("call with 1 MiB by reference : null call", 1.2, large, spinning),
    ];
    for (kind, built) in KINDS {
        for sends in [true, false] {
            for count in figures.counts().into_iter().filter(|count| *count >= LONG) {
                let ice = figures.sequence((Mechanism::Ice, PayloadPlace::Copied), kind, sends, count);
                for (place, limit) in [(PayloadPlace::InHeap, 300.0), (PayloadPlace::Built, built)] {
                    let ours = figures.sequence((Mechanism::PartywallCall, place), kind, sends, count);
                    let text = format!("Ice : {} of {count} {}, {}", direction(sends), kind.name(), place.name());
                    verdicts.push(faster(&text, limit, ice, ours));
                }
            }
        }
    }
    let of = |wanted: fn(&Key) -> bool, metric| {
        cells.iter().find(|cell| wanted(&cell.key)).and_then(|cell| cell.median(metric))
    };
    let is_crowd: fn(&Key) -> bool = |key| key.number("clients").is_some();
    let rate = of(|key| key.word("load") == Some("pipelined"), Metric::PerSecond);
    let python = |message| figures.call(Mechanism::PartywallPython, message, "as it does");
    let python_null = python(0).and_then(|cell| cell.median(Metric::P50Ns));
    verdicts.extend([
        Verdict::figure("pipelined null calls, millions a second", Bound::AtLeast, 10.0, rate.map(|rate| rate / 1e6)),
        Verdict::figure(
            "rate of one client, others connected : alone",
            Bound::AtLeast,
            0.9,
            of(is_crowd, Metric::BesideToAlone),
        ),
        Verdict::figure(
            "clients connected and idle, percent of one processor, both sides",
            Bound::AtMost,
            0.1,
            of(is_crowd, Metric::BothCpuPercent),
        ),
        Verdict::figure("Python: null call, awake, us", Bound::AtMost, 3.0, python_null.map(|ns| ns / 1e3)),
        at_most("Python: NumPy array of 1 MiB : null call", 1.2, python(MIB), python(0)),
    ]);
    verdicts
}

fn pictures(sequences: &[Cell]) -> BTreeMap<String, Picture> {
    let mut pictures = BTreeMap::new();
    for ((kind, _), sends) in KINDS.into_iter().flat_map(|kind| [(kind, true), (kind, false)]) {
        let series = CARRIERS.map(|(mechanism, place)| {
            let some: Vec<Cell> = sequences
                .iter()
                .filter(|cell| {
                    cell.key.word("kind") == Some(kind.name())
                        && cell.key.word("direction") == Some(direction(sends))
                        && cell.key.word("place") == Some(place.name())
                })
                .cloned()
                .collect();
            let mut one = Series::of(&some, mechanism, "elements", Metric::P50Ns, 1.0);
            if mechanism == Mechanism::PartywallCall {
                one.name = format!("{mechanism}, {}", place.name());
                one.dashed = place != PayloadPlace::Built;
            }
            one
        });
        let chart = Chart {
            title: format!("{} of a sequence, {} elements, median", direction(sends), kind.name()),
            x: ("elements", Axis::CountByTens),
            y: ("time", Axis::TimeByTens),
            series: series.into(),
        };
        pictures.insert(format!("rpc-{}-{}", kind.name(), direction(sends)), Picture::Chart(chart));
    }
    pictures
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::task::Figures;

    #[test]
    fn every_claim_finds_its_cells() {
        let scale = Scale::Full;
        let cells: Vec<Cell> = [call_plans(scale), many_plans(scale), sequence_plans(scale)]
            .concat()
            .into_iter()
            .map(|plan| {
                let mut cell = Cell::new(plan.key);
                let all = [Metric::P50Ns, Metric::PerSecond, Metric::BesideToAlone, Metric::BothCpuPercent];
                cell.runs.push(Figures::from(all.map(|metric| (metric, 1.0))));
                cell
            })
            .collect();
        let verdicts = judge(&cells);
        assert_eq!(verdicts.len(), 6 + 3 * 2 * 4 * 2 + 5);
        for verdict in &verdicts {
            assert!(verdict.measured.is_some(), "{}", verdict.claim);
        }
        let shown = speed_ups(&cells);
        assert!(shown.split_whitespace().all(|word| word != "-"), "{shown}");
    }

    #[test]
    fn compared_calls_are_measured_one_after_the_other() {
        let place = |plans: &[BenchPlan], mechanism, waiting| {
            let is = |plan: &BenchPlan| plan.key.mechanism == mechanism && plan.tuning.waiting == waiting;
            plans.iter().position(is).unwrap()
        };
        let plans = call_plans(Scale::Full);
        let two_line = place(&plans, Mechanism::TwoLine, WaitMode::Spinning);
        assert_eq!(place(&plans, Mechanism::PartywallCall, WaitMode::Spinning), two_line + 1);
        let eventfd = place(&plans, Mechanism::Eventfd, WaitMode::Blocking);
        assert!(place(&plans, Mechanism::PartywallCall, WaitMode::Blocking) <= eventfd + 2);
    }

    #[test]
    fn keys_of_plans_are_unique() {
        for scale in [Scale::Smoke, Scale::Quick, Scale::Full] {
            let plans = [call_plans(scale), many_plans(scale), sequence_plans(scale)].concat();
            let mut keys: Vec<Key> = plans.into_iter().map(|plan| plan.key).collect();
            let count = keys.len();
            keys.sort();
            keys.dedup();
            assert_eq!(keys.len(), count);
        }
    }
}
