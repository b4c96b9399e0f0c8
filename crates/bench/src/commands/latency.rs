//! Round trips: by size, by way of waiting, tight and lightly loaded, on two processors and on one, copied and by reference.

use std::collections::BTreeMap;

use super::{CommandResults, RoundTripPace, hand_over_plan, round_trip_plan, waitings};
use crate::{
    args::Scale,
    bench::{Bench, BenchPlan},
    error::Result,
    mechanism::{Mechanism, WaitMode},
    report::{
        cell::Cell,
        metric::Metric,
        plot::{Axis, Bar, Bars, Chart, Picture, Series},
        table::{self, Layout},
    },
};

/// Mechanisms that carry any size.
const CARRIERS: [Mechanism; 8] = [
    Mechanism::Pipe,
    Mechanism::Unix,
    Mechanism::Tcp,
    Mechanism::TcpVeth,
    Mechanism::Iceoryx2,
    Mechanism::PlainRing,
    Mechanism::PartywallMessage,
    Mechanism::Partywall,
];
/// Mechanisms that show what the machine can do at best, with the size that they stand for.
const FLOORS: [(Mechanism, u64); 3] = [(Mechanism::OneLine, 8), (Mechanism::TwoLine, 64), (Mechanism::Eventfd, 8)];
/// The mechanisms to compare under light load, and on one processor.
const BLOCKERS: [Mechanism; 6] = [
    Mechanism::Pipe,
    Mechanism::Unix,
    Mechanism::Tcp,
    Mechanism::TcpVeth,
    Mechanism::PartywallMessage,
    Mechanism::Partywall,
];

fn sizes(scale: Scale) -> Vec<u64> {
    match scale {
        Scale::Smoke => vec![1, 64],
        Scale::Quick => vec![1, 64, 4 << 10, 64 << 10],
        Scale::Full => vec![1, 8, 64, 256, 1 << 10, 4 << 10, 16 << 10, 64 << 10],
    }
}

fn references(scale: Scale) -> Vec<u64> {
    match scale {
        Scale::Smoke => vec![64],
        Scale::Quick => vec![64, 1 << 20],
        Scale::Full => vec![64, 1 << 10, 16 << 10, 256 << 10, 1 << 20],
    }
}

fn plans(scale: Scale) -> Vec<BenchPlan> {
    let plan = |mechanism, message, load, waiting| round_trip_plan("latency", scale, mechanism, message, load, waiting);
    let mut plans = Vec::new();
    for (mechanism, message) in FLOORS {
        plans
            .extend(waitings(mechanism).iter().map(|waiting| plan(mechanism, message, RoundTripPace::Tight, *waiting)));
    }
    for message in sizes(scale) {
        for mechanism in CARRIERS {
            plans.extend(
                waitings(mechanism).iter().map(|waiting| plan(mechanism, message, RoundTripPace::Tight, *waiting)),
            );
        }
    }
    plans.push(plan(Mechanism::Eventfd, 8, RoundTripPace::Light, WaitMode::Blocking));
    for mechanism in BLOCKERS {
        plans.extend(waitings(mechanism).iter().map(|waiting| plan(mechanism, 64, RoundTripPace::Light, *waiting)));
    }
    let one = |mut plan: BenchPlan| {
        plan.key = plan.key.with("processors", 1);
        plan.one_cpu = true;
        plan
    };
    plans.push(one(plan(Mechanism::Eventfd, 8, RoundTripPace::Tight, WaitMode::Blocking)));
    for mechanism in BLOCKERS {
        let sleeping = waitings(mechanism).iter().filter(|waiting| **waiting != WaitMode::Spinning);
        plans.extend(sleeping.map(|waiting| one(plan(mechanism, 64, RoundTripPace::Tight, *waiting))));
    }
    for message in references(scale) {
        plans.extend(
            [Mechanism::Iceoryx2ZeroCopy, Mechanism::PartywallZeroCopy]
                .map(|m| hand_over_plan("latency", scale, m, message)),
        );
    }
    plans
}

/// Measures and shows.
pub(crate) fn run(bench: &mut Bench) -> Result<CommandResults> {
    let cells = bench.measure(plans(bench.scale()))?;
    let metrics = &[Metric::P50Ns, Metric::P99Ns, Metric::P999Ns];
    let sections: [(&str, &str, Option<u64>, Mechanism); 4] = [
        ("Round trips on two processors, one after the other", "tight", None, Mechanism::Unix),
        ("Round trips with 1 ms of pause before each", "light", None, Mechanism::Unix),
        ("Round trips with both sides on one processor", "tight", Some(1), Mechanism::Unix),
        ("Hand-over by reference, there and back", "by-reference", None, Mechanism::Iceoryx2ZeroCopy),
    ];
    for (title, load, processors, baseline) in sections {
        let some: Vec<Cell> = cells
            .iter()
            .filter(|cell| cell.key.word("load") == Some(load) && cell.key.number("processors") == processors)
            .cloned()
            .collect();
        let layout = Layout { group: &[("message", "message")], row: &[("waiting", "waiting")], metrics, baseline };
        bench.say(&format!("\n## {title}\n\n{}", table::cells(&some, &layout)))?;
    }
    bench.draw(&pictures(&cells))?;
    Ok(cells.into())
}

fn pictures(cells: &[Cell]) -> BTreeMap<String, Picture> {
    let tight: Vec<Cell> = cells
        .iter()
        .filter(|cell| cell.key.word("load") == Some("tight") && cell.key.number("processors").is_none())
        .cloned()
        .collect();
    let mut series = Vec::new();
    for mechanism in CARRIERS {
        // While both sides are awake, adaptive is spinning: one line for both.
        let several = waitings(mechanism).len() > 1;
        for waiting in waitings(mechanism).iter().filter(|waiting| !several || **waiting != WaitMode::Spinning) {
            let some: Vec<Cell> =
                tight.iter().filter(|cell| cell.key.word("waiting") == Some(waiting.name())).cloned().collect();
            let mut one = Series::of(&some, mechanism, "message", Metric::P50Ns, 1.0);
            if several {
                one.name = format!("{mechanism}, {}", waiting.name());
            }
            one.dashed = several && *waiting == WaitMode::Blocking;
            series.push(one);
        }
    }
    let by_size = Chart {
        title: "Round trip, median, two processors".into(),
        x: ("bytes each way", Axis::Bytes),
        y: ("time", Axis::TimeByTens),
        series,
    };
    BTreeMap::from([
        ("latency-size".into(), Picture::Chart(by_size)),
        ("latency-tails".into(), Picture::Bars(tails(&tight))),
    ])
}

/// Median, 99 and 99.9 percent of 64 bytes; on a scale by tens the rare long waits and the common short ones can both be read.
fn tails(tight: &[Cell]) -> Bars {
    let groups = [Metric::P50Ns, Metric::P99Ns, Metric::P999Ns].map(|metric| {
        let of_64 = tight.iter().filter(|cell| cell.key.number("message") == Some(64));
        let bars = of_64.filter_map(|cell| {
            let value = cell.summary(metric)?;
            let name = match waitings(cell.key.mechanism).len() {
                1 => cell.key.mechanism.to_string(),
                _ => format!("{}, {}", cell.key.mechanism, cell.key.word("waiting").unwrap_or("")),
            };
            Some(Bar { name, mechanism: cell.key.mechanism, value, label: metric.show(value.median) })
        });
        (metric.name().to_owned(), bars.collect())
    });
    Bars {
        title: "Round trip of 64 bytes: median and tails".into(),
        x: ("time", Axis::TimeByTens),
        groups: groups.into(),
    }
}
