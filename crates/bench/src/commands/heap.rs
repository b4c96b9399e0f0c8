//! The set-up of a heap for calls, by its size, beside memory of the kernel.

use std::{collections::BTreeMap, time::Duration};

use super::{CommandResults, rpc};
use crate::{
    args::Scale,
    bench::{Bench, BenchPlan},
    error::Result,
    mechanism::Mechanism,
    peers::order::{OrderKind, PayloadPlace, PeerOrder},
    report::{
        cell::Cell,
        metric::Metric,
        plot::{Axis, Chart, Picture, Series},
        table::{self, Layout},
        verdict::{Bound, Verdict},
    },
};

const NAME: &str = "heap";
/// The size of the claim.
const LARGEST: u64 = 100_000_000;
/// What is set up, and how.
const CASES: [(Mechanism, PayloadPlace); 4] = [
    (Mechanism::PartywallCall, PayloadPlace::Allocated),
    (Mechanism::PartywallCall, PayloadPlace::Locked),
    (Mechanism::Memfd, PayloadPlace::Mapped),
    (Mechanism::Memfd, PayloadPlace::Populated),
];

fn sizes(scale: Scale) -> Vec<u64> {
    match scale {
        Scale::Smoke => vec![1_000, 1_000_000],
        Scale::Quick => vec![1_000, 1_000_000, LARGEST],
        Scale::Full => vec![1_000, 10_000, 100_000, 1_000_000, 10_000_000, LARGEST],
    }
}

fn plans(scale: Scale) -> Vec<BenchPlan> {
    let mut plans = Vec::new();
    for size in sizes(scale) {
        for (mechanism, place) in CASES {
            let most = if scale == Scale::Smoke { 2 } else { 5 };
            let order = PeerOrder {
                kind: OrderKind::Heap,
                sends: true,
                elements: size,
                most,
                time: Duration::from_secs(1),
                place,
            };
            plans.push(rpc::peer_plan(
                NAME,
                mechanism,
                order,
                &[("bytes", size.into()), ("memory", place.name().into())],
            ));
        }
    }
    plans
}

/// Measures and shows.
pub(crate) fn run(bench: &mut Bench) -> Result<CommandResults> {
    let cells = rpc::measure(bench, plans(bench.scale()))?;
    let layout = Layout {
        group: &[("bytes", "bytes")],
        row: &[("memory", "memory")],
        metrics: &[Metric::Seconds, Metric::MemorySeconds, Metric::PeerSeconds],
        baseline: Mechanism::Memfd,
    };
    let title = "Set-up of a heap: until it can be used, until its owner has touched each page, and then until the server has read each page";
    bench.say(&format!("\n## {title}\n\n{}", table::cells(&cells, &layout)))?;
    let verdicts = judge(&cells);
    bench.say("\n## What is promised, and what was measured (median of the ratios of the turns of this run; figures are medians)\n")?;
    bench.say(&table::verdicts(&verdicts))?;
    bench.draw(&pictures(&cells))?;
    Ok(CommandResults { cells, verdicts })
}

fn find(cells: &[Cell], place: PayloadPlace, bytes: u64) -> Option<&Cell> {
    cells.iter().find(|cell| cell.key.number("bytes") == Some(bytes) && cell.key.word("memory") == Some(place.name()))
}

fn judge(cells: &[Cell]) -> Vec<Verdict> {
    let claim = |text: &str, metric, place, theirs| {
        let (ours, kernel) = (find(cells, place, LARGEST), find(cells, theirs, LARGEST));
        Verdict::by_turns(text, Bound::AtMost, 1.1, metric, ours, kernel)
    };
    vec![
        claim(
            "heap of 100 MB, set up : the kernel's fault-in of 100 MB",
            Metric::Seconds,
            PayloadPlace::Allocated,
            PayloadPlace::Populated,
        ),
        claim(
            "heap of 100 MB, set up and locked : the kernel's fault-in of 100 MB",
            Metric::Seconds,
            PayloadPlace::Locked,
            PayloadPlace::Populated,
        ),
        claim(
            "heap of 100 MB, set up and touched : memory that the kernel allocates while it is touched",
            Metric::MemorySeconds,
            PayloadPlace::Allocated,
            PayloadPlace::Mapped,
        ),
    ]
}

fn pictures(cells: &[Cell]) -> BTreeMap<String, Picture> {
    let series = CASES.map(|(mechanism, place)| {
        let some: Vec<Cell> =
            cells.iter().filter(|cell| cell.key.word("memory") == Some(place.name())).cloned().collect();
        let mut one = Series::of(&some, mechanism, "bytes", Metric::Seconds, 1e9);
        one.name = format!("{mechanism}, {}", place.name());
        one.dashed = matches!(place, PayloadPlace::Allocated | PayloadPlace::Mapped);
        one
    });
    let chart = Chart {
        title: "Set-up of a heap".into(),
        x: ("bytes", Axis::CountByTens),
        y: ("time", Axis::TimeByTens),
        series: series.into(),
    };
    BTreeMap::from([("heap".into(), Picture::Chart(chart))])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::task::Figures;

    #[test]
    fn every_claim_finds_its_cells() {
        let cells: Vec<Cell> = plans(Scale::Full)
            .into_iter()
            .map(|plan| {
                let mut cell = Cell::new(plan.key);
                cell.runs.push(Figures::from([(Metric::Seconds, 1.0), (Metric::MemorySeconds, 1.0)]));
                cell
            })
            .collect();
        for verdict in judge(&cells) {
            assert!(verdict.measured.is_some(), "{}", verdict.claim);
        }
    }
}
