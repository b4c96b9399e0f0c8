//! Many open channels: what they cost the one in use, what they take while idle, and how many connections a second make.

use std::time::Duration;

use rustix::process::{Resource, getrlimit};

use super::{CommandResults, stretch};
use crate::{
    args::Scale,
    bench::{Bench, BenchPlan},
    error::Result,
    mechanism::{Mechanism, Tuning},
    report::{
        cell::{Cell, Key},
        metric::Metric,
        table, unit,
        verdict::{Bound, Verdict},
    },
    task::MeasuringWork,
};

/// Bytes per message on the channel in use.
const MESSAGE: u64 = 64 << 10;
/// The ring of a quiet channel.
const QUIET_RING: u64 = 4 << 10;

/// Open channels beside the one in use, and open and idle.
fn counts(scale: Scale) -> (u64, u64) {
    if scale == Scale::Smoke { (10, 20) } else { (1_000, 10_000) }
}

/// The measurements, under the name of the calling bench.
pub(crate) fn plans(scale: Scale, experiment: &str) -> Vec<BenchPlan> {
    let (measured, warm_up) = stretch(scale);
    let (beside, idle) = counts(scale);
    let turns = if scale == Scale::Smoke { 1 } else { 5 };
    let watch = Duration::from_millis(if scale == Scale::Smoke { 20 } else { 3000 });
    let plan = |key: Key, work: MeasuringWork| BenchPlan {
        key,
        tuning: Tuning::of(Mechanism::Partywall, MESSAGE).ring(QUIET_RING),
        work,
        one_cpu: false,
    };
    let key = || Key::new(experiment, Mechanism::Partywall);
    vec![
        plan(
            key().with("open", beside),
            MeasuringWork::ManyChannels {
                channels: beside,
                turns,
                message: MESSAGE,
                measured: measured / 2,
                warm_up: warm_up / 2,
            },
        ),
        plan(key().with("idle", idle), MeasuringWork::OpenChannels { channels: idle, share: idle, idle: watch }),
        plan(key().with("what", "connect"), MeasuringWork::ConnectClose { measured: measured * 2 }),
    ]
}

/// Measures without showing.
pub(crate) fn measure(bench: &mut Bench, experiment: &str) -> Result<Vec<Cell>> {
    bench.measure(plans(bench.scale(), experiment))
}

/// Measures and shows.
pub(crate) fn run(bench: &mut Bench) -> Result<CommandResults> {
    let cells = measure(bench, "channels")?;
    let verdicts = judge(&cells, "channels");
    bench.say("\n## Many channels\n")?;
    bench.say(&table::verdicts(&verdicts))?;
    bench.say("")?;
    bench.say(&table::listing(&cells))?;
    Ok(CommandResults { cells, verdicts })
}

/// The claims about channels.
pub(crate) fn judge(cells: &[Cell], experiment: &str) -> Vec<Verdict> {
    let mine = || cells.iter().filter(|cell| cell.key.experiment == experiment);
    let open = mine().find(|cell| cell.key.number("open").is_some());
    let many = open.and_then(|cell| cell.key.number("open")).unwrap_or(1_000);
    let of_open = |metric: Metric| open.and_then(|cell| cell.summary(metric));
    let ratios = of_open(Metric::BesideToAlone);
    let idle = mine().find(|cell| cell.key.number("idle").is_some());
    let wanted = idle.and_then(|cell| cell.key.number("idle")).unwrap_or(10_000);
    let of_idle = |metric: Metric| idle.and_then(|cell| cell.median(metric));
    let connects =
        mine().find(|cell| cell.key.word("what") == Some("connect")).and_then(|cell| cell.median(Metric::PerSecond));
    vec![
        Verdict {
            // The figures are of ratios by turns, because the medians of the two rates would be of different moments.
            figures: ratios.map_or_else(String::new, |s| {
                format!("by turns; runs from {} to {}", unit::digits(s.min), unit::digits(s.max))
            }),
            ..Verdict::figure(
                format!("stream of 64 KiB with {many} channels open : with one"),
                Bound::AtLeast,
                0.9,
                ratios.map(|s| s.median),
            )
        },
        Verdict {
            // The limits that usually end it, which are not Partywall's.
            figures: format!(
                "{} pairs of processes, {} descriptors allowed each",
                of_idle(Metric::Pairs).map_or_else(|| "-".into(), |pairs| format!("{pairs:.0}")),
                descriptors()
            ),
            ..Verdict::figure(
                format!("{wanted} small channels open at once"),
                Bound::AtLeast,
                wanted as f64,
                of_idle(Metric::Channels),
            )
        },
        Verdict::figure(
            format!("{wanted} open and idle, percent of one processor, both sides and broker"),
            Bound::AtMost,
            0.1,
            of_idle(Metric::AllCpuPercent),
        ),
        Verdict::figure(
            "memory of an open small channel, both sides, KiB",
            Bound::Report,
            0.0,
            of_idle(Metric::BytesPerChannel).map(|b| b / 1024.0),
        ),
        Verdict::figure(
            "descriptors of an open channel, each side",
            Bound::Report,
            0.0,
            of_idle(Metric::FdsPerChannel),
        ),
        Verdict::figure(
            "mappings of an open channel, each side",
            Bound::Report,
            0.0,
            of_idle(Metric::MappingsPerChannel),
        ),
        Verdict::figure("connect + accept + close per second", Bound::Report, 0.0, connects),
    ]
}

/// The descriptors that one process may have, as every process that the bench starts may.
fn descriptors() -> String {
    getrlimit(Resource::Nofile).current.map_or_else(|| "unlimited".into(), |limit| limit.to_string())
}
