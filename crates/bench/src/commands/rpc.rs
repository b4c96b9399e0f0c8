//! Calls: a null call awake and asleep, and one with 1 MiB by reference, beside the least that the machine allows.

use super::{CommandResults, RoundTripPace, round_trip_plan, waitings};
use crate::{
    args::Scale,
    bench::{Bench, BenchPlan},
    error::Result,
    mechanism::Mechanism,
    report::{
        metric::Metric,
        table::{self, Layout},
    },
};

/// The mechanisms to compare, with the bytes that each carries. Arguments of 8 bytes travel in the call, 1 MiB stays in the heap.
const CELLS: [(Mechanism, u64); 6] = [
    (Mechanism::OneLine, 8),
    (Mechanism::TwoLine, 64),
    (Mechanism::Eventfd, 8),
    (Mechanism::Unix, 64),
    (Mechanism::PartywallCall, 8),
    (Mechanism::PartywallCall, 1 << 20),
];

fn plans(scale: Scale) -> Vec<BenchPlan> {
    let plan = |(mechanism, message): (Mechanism, u64)| {
        waitings(mechanism)
            .iter()
            .map(move |waiting| round_trip_plan("rpc", scale, mechanism, message, RoundTripPace::Tight, *waiting))
    };
    CELLS.into_iter().flat_map(plan).collect()
}

/// Measures and shows.
pub(crate) fn run(bench: &mut Bench) -> Result<CommandResults> {
    let cells = bench.measure(plans(bench.scale()))?;
    let layout = Layout {
        group: &[],
        row: &[("message", "arguments"), ("waiting", "waiting")],
        metrics: &[Metric::P50Ns, Metric::P99Ns, Metric::P999Ns],
        baseline: Mechanism::TwoLine,
    };
    bench.say(&format!("\n## Calls, one after the other, beside round trips\n\n{}", table::cells(&cells, &layout)))?;
    Ok(cells.into())
}
