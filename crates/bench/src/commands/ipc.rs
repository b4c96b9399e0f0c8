//! Whole transfers from 16 KB to 4 GB, as in the study that compares pipes, sockets and shared memory: its Tables V and VI, Fig. 1.

use std::{collections::BTreeMap, time::Duration};

use super::CommandResults;
use crate::{
    args::Scale,
    bench::{Bench, BenchPlan},
    error::Result,
    mechanism::{Mechanism, Tuning},
    report::{
        cell::{Cell, Key},
        metric::Metric,
        plot::{Axis, Chart, Picture, Series},
        table::{self, Layout},
    },
    task::MeasuringWork,
};

const MECHANISMS: [Mechanism; 7] = [
    Mechanism::Pipe,
    Mechanism::Unix,
    Mechanism::Tcp,
    Mechanism::TcpVeth,
    Mechanism::PlainRing,
    Mechanism::Partywall,
    Mechanism::PartywallZeroCopy,
];

/// Bytes of one write; smaller transfers are one write.
const MESSAGE: u64 = 64 << 10;

/// The sizes of transfers.
fn totals(scale: Scale) -> Vec<u64> {
    let (kib, mib, gib) = (1 << 10, 1 << 20, 1 << 30);
    match scale {
        Scale::Smoke => vec![16 * kib, 2 * mib],
        Scale::Quick => vec![16 * kib, 128 * kib, 2 * mib, 100 * mib, 400 * mib, gib],
        Scale::Full => {
            let small = (4..12).map(|power| kib << power);
            let middle = (1..=6).map(|n| n * 100 * mib);
            small.chain(middle).chain((1..=4).map(|n| n * gib)).collect()
        }
    }
}

fn plans(scale: Scale) -> Vec<BenchPlan> {
    let warm_up = Duration::from_millis(if scale == Scale::Smoke { 1 } else { 100 });
    let plan = |total: u64, mechanism: Mechanism| {
        let message = total.min(MESSAGE);
        let repeats = match (scale, total) {
            (Scale::Smoke, _) => 2,
            (_, total) if total > 2 << 20 => 1,
            (Scale::Quick, _) => 30,
            (Scale::Full, _) => 200,
        };
        BenchPlan {
            key: Key::new("ipc", mechanism).with("total", total),
            tuning: Tuning::of(mechanism, message).prompt(),
            work: MeasuringWork::Transfer { message, total, repeats, warm_up },
            one_cpu: false,
        }
    };
    totals(scale).into_iter().flat_map(|total| MECHANISMS.map(|mechanism| plan(total, mechanism))).collect()
}

/// Measures and shows.
pub(crate) fn run(bench: &mut Bench) -> Result<CommandResults> {
    let cells = bench.measure(plans(bench.scale()))?;
    bench.say("\n## Transfers: rate and time by size (the study's Tables V and VI)\n")?;
    let layout = Layout {
        group: &[("total", "transfer")],
        row: &[],
        metrics: &[Metric::BytesPerSecond, Metric::Seconds],
        baseline: Mechanism::Unix,
    };
    bench.say(&table::cells(&cells, &layout))?;
    bench.draw(&pictures(&cells))?;
    Ok(cells.into())
}

fn pictures(cells: &[Cell]) -> BTreeMap<String, Picture> {
    let chart = |title: &str, metric: Metric, scale: f64, label: &'static str, axis: Axis| {
        Picture::Chart(Chart {
            title: title.into(),
            x: ("bytes transferred", Axis::Bytes),
            y: (label, axis),
            series: MECHANISMS.map(|mechanism| Series::of(cells, mechanism, "total", metric, scale)).into(),
        })
    };
    BTreeMap::from([
        ("ipc-time".into(), chart("Time of one transfer", Metric::Seconds, 1e9, "time", Axis::TimeByTens)),
        ("ipc-rate".into(), chart("Rate by size of the transfer", Metric::BytesPerSecond, 1.0, "GB/s", Axis::Rate)),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn covers_the_sizes_of_the_study() {
        let sizes = totals(Scale::Full);
        assert_eq!(sizes.len(), 8 + 6 + 4);
        assert_eq!((sizes[0], sizes[7]), (16 << 10, 2 << 20));
        assert_eq!((sizes[8], sizes[13]), (100 << 20, 600 << 20));
        assert_eq!((sizes[14], sizes[17]), (1 << 30, 4 << 30));
        assert!(sizes.iter().all(|total| total % MESSAGE.min(*total) == 0), "transfers are whole messages");
    }
}
