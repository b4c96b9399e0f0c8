//! Processor time of both sides at fixed rates, as in XenSocket's Table 1, and of a connection that is open and idle.

use std::{collections::BTreeMap, time::Duration};

use super::CommandResults;
use crate::{
    args::Scale,
    bench::{Bench, BenchPlan},
    error::Result,
    mechanism::{Mechanism, Tuning, WaitMode},
    report::{
        cell::{Cell, Key},
        metric::Metric,
        plot::{Axis, Bar, Bars, Picture},
        stats::RunSummary,
        table::{self, Layout},
        unit,
    },
    task::MeasuringWork,
};

const MECHANISMS: [Mechanism; 6] = [
    Mechanism::Pipe,
    Mechanism::Unix,
    Mechanism::Tcp,
    Mechanism::TcpVeth,
    Mechanism::Partywall,
    Mechanism::PartywallZeroCopy,
];
/// Bytes per message.
const MESSAGE: u64 = 16 << 10;

fn rates(scale: Scale) -> Vec<u64> {
    let mb = 1_000_000;
    match scale {
        Scale::Smoke => vec![0, 10 * mb],
        Scale::Quick => vec![0, 100 * mb, 1000 * mb],
        Scale::Full => vec![0, 10 * mb, 100 * mb, 500 * mb, 1000 * mb, 2000 * mb],
    }
}

fn plans(scale: Scale) -> Vec<BenchPlan> {
    let measured = Duration::from_millis(match scale {
        Scale::Smoke => 10,
        Scale::Quick => 500,
        Scale::Full => 2000,
    });
    let plan = |rate: u64, mechanism: Mechanism, waiting: WaitMode| BenchPlan {
        key: Key::new("cpu", mechanism).with("rate", rate).with("waiting", waiting.name()),
        tuning: Tuning::of(mechanism, MESSAGE).waiting(waiting).prompt(),
        work: MeasuringWork::Paced { message: MESSAGE, rate, measured },
        one_cpu: false,
    };
    let mut plans = Vec::new();
    for rate in rates(scale) {
        for mechanism in MECHANISMS {
            plans.extend(waitings(mechanism).iter().map(|waiting| plan(rate, mechanism, *waiting)));
        }
    }
    plans
}

fn waitings(mechanism: Mechanism) -> &'static [WaitMode] {
    if mechanism.is_partywall() { &[WaitMode::Adaptive, WaitMode::Blocking] } else { &[WaitMode::Blocking] }
}

/// Measures and shows.
pub(crate) fn run(bench: &mut Bench) -> Result<CommandResults> {
    let cells = bench.measure(plans(bench.scale()))?;
    bench.say("\n## Processor time at fixed rates, in percent of one processor (XenSocket's Table 1)\n")?;
    let layout = Layout {
        group: &[("rate", "rate")],
        row: &[("waiting", "waiting")],
        metrics: &[
            Metric::BothCpuPercent,
            Metric::SenderCpuPercent,
            Metric::SenderKernelPercent,
            Metric::ReceiverCpuPercent,
            Metric::ReceiverKernelPercent,
            Metric::MachineCpuPercent,
            Metric::BytesPerSecond,
        ],
        baseline: Mechanism::Unix,
    };
    bench.say(&table::cells(&cells, &layout))?;
    bench.draw(&pictures(&cells))?;
    Ok(cells.into())
}

fn pictures(cells: &[Cell]) -> BTreeMap<String, Picture> {
    let mut rates: Vec<u64> = cells.iter().filter_map(|cell| cell.key.number("rate")).collect();
    rates.dedup();
    let bar = |cell: &Cell| {
        let value: RunSummary = cell.summary(Metric::BothCpuPercent)?;
        let name = if cell.key.mechanism.is_partywall() {
            format!("{}, {}", cell.key.mechanism, cell.key.word("waiting").unwrap_or(""))
        } else {
            cell.key.mechanism.to_string()
        };
        Some(Bar { name, mechanism: cell.key.mechanism, value, label: Metric::BothCpuPercent.show(value.median) })
    };
    let groups = rates.into_iter().map(|rate| {
        let heading = if rate == 0 { "idle".into() } else { unit::rate(rate as f64) };
        (heading, cells.iter().filter(|cell| cell.key.number("rate") == Some(rate)).filter_map(bar).collect())
    });
    let bars = Bars {
        title: "Processor time of sender and receiver at fixed rates".into(),
        x: ("of one processor", Axis::Percent),
        groups: groups.collect(),
    };
    BTreeMap::from([("cpu".into(), Picture::Bars(bars))])
}
