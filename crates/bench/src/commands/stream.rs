//! Throughput by message size, as in XenSocket's Figs. 5 and 6.

use std::collections::BTreeMap;

use super::{CommandResults, stream_plan};
use crate::{
    args::Scale,
    bench::{Bench, BenchPlan},
    error::Result,
    mechanism::Mechanism,
    report::{
        cell::Cell,
        metric::Metric,
        plot::{Axis, Chart, Picture, Series},
        table::{self, Layout},
    },
};

/// Also the order of the legend.
pub(super) const MECHANISMS: [Mechanism; 11] = [
    Mechanism::Pipe,
    Mechanism::Unix,
    Mechanism::Tcp,
    Mechanism::TcpVeth,
    Mechanism::Iceoryx2,
    Mechanism::Iceoryx2ZeroCopy,
    Mechanism::PlainRing,
    Mechanism::PartywallFixed,
    Mechanism::PartywallMessage,
    Mechanism::Partywall,
    Mechanism::PartywallZeroCopy,
];

/// Where the figure of small messages ends and that of large ones begins.
const BORDER: u64 = 64 << 10;

fn messages(scale: Scale) -> Vec<u64> {
    match scale {
        Scale::Smoke => vec![64, 64 << 10],
        Scale::Quick => vec![64, 512, 4 << 10, 64 << 10, 1 << 20, 16 << 20],
        Scale::Full => (6..=26).map(|power| 1 << power).collect(),
    }
}

fn plans(scale: Scale) -> Vec<BenchPlan> {
    messages(scale)
        .into_iter()
        .flat_map(|message| MECHANISMS.map(|mechanism| stream_plan("stream", scale, mechanism, message)))
        .collect()
}

/// Measures and shows.
pub(crate) fn run(bench: &mut Bench) -> Result<CommandResults> {
    let cells = bench.measure(plans(bench.scale()))?;
    bench.say("\n## Streams: rate by size of the message (XenSocket's Figs. 5 and 6)\n")?;
    let layout = Layout {
        group: &[("message", "message")],
        row: &[],
        metrics: &[Metric::BytesPerSecond, Metric::RingBytes],
        baseline: Mechanism::Unix,
    };
    bench.say(&table::cells(&cells, &layout))?;
    bench.draw(&pictures(&cells))?;
    Ok(cells.into())
}

fn pictures(cells: &[Cell]) -> BTreeMap<String, Picture> {
    let chart = |title: &str, axis: Axis, label: &'static str, shown: &dyn Fn(u64) -> bool| {
        let some: Vec<Cell> =
            cells.iter().filter(|cell| cell.key.number("message").is_some_and(shown)).cloned().collect();
        let series =
            MECHANISMS.map(|mechanism| Series::of(&some, mechanism, "message", Metric::BytesPerSecond, 1.0)).into();
        Picture::Chart(Chart { title: title.into(), x: ("bytes per message", Axis::Bytes), y: (label, axis), series })
    };
    BTreeMap::from([
        ("stream-small".into(), chart("Throughput of small messages", Axis::RateByTens, "rate", &|n| n <= BORDER)),
        ("stream-large".into(), chart("Throughput of large messages", Axis::Rate, "GB/s", &|n| n >= BORDER)),
    ])
}
