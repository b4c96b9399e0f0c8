//! File systems: mail, web and file servers, and large reads, by Partywall's file system, its TCP transport, sshfs and bindfs.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    time::Duration,
};

use super::CommandResults;
use crate::{
    affinity,
    args::Scale,
    bench::{Bench, BenchPlan},
    error::Result,
    files::{
        mounts::{Mounts, WAYS, kernels_own},
        workload::{FileWork, Folders, Personality},
    },
    mechanism::{Mechanism, Tuning},
    report::{
        cell::{Cell, Key},
        metric::Metric,
        plot::{Axis, Bar, Bars, Picture},
        table::{self, Layout},
        verdict::{Bound, Verdict},
    },
    task::MeasuringWork,
};

const NAME: &str = "fs";
/// The folder that is exported is here unless the options name another: no disk hides the transports.
const MEMORY: &str = "/dev/shm";

fn plans(scale: Scale, divide: u32) -> Vec<BenchPlan> {
    let time = Duration::from_millis(match scale {
        Scale::Smoke => 50,
        Scale::Quick => 1_000,
        Scale::Full => 3_000,
    });
    let divide = if scale == Scale::Smoke { 100 } else { divide };
    let mut plans = Vec::new();
    for personality in Personality::ALL {
        for way in WAYS {
            plans.push(BenchPlan {
                key: Key::new(NAME, way).with("workload", personality.name()).with("divided", u64::from(divide)),
                tuning: Tuning::of(way, 0),
                work: MeasuringWork::Files(FileWork { personality, divide, time }),
                one_cpu: false,
            });
        }
    }
    plans
}

/// Measures and shows. `folder` holds the exported folder while it runs.
pub(crate) fn run(bench: &mut Bench, divide: u32, folder: Option<PathBuf>) -> Result<CommandResults> {
    let scale = bench.scale();
    let plans = plans(scale, divide);
    let folder = folder.unwrap_or_else(memory_folder);
    let divided = if scale == Scale::Smoke { 100 } else { divide };
    bench.say(&format!(
        "# exported folder below {}; filebench's numbers of files divided by {divided}; nothing is pinned",
        folder.display()
    ))?;
    let own = kernels_own();
    let own = if own.is_empty() { "none of them".to_owned() } else { own.join(", ") + ", which is not measured" }
        + " (`vm` measures them in machines)";
    bench.say(&format!("# of NFS, 9p and virtiofs, this kernel has {own}"))?;
    let (processors, interrupt) = (affinity::allowed()?.len(), bench.interrupt.again()?);
    let broker = bench.broker().map(|broker| broker.socket().to_owned()).map_err(|e| e.to_string());
    let mut mounts = Mounts::new(&folder, broker, bench.interrupt.again()?)?;
    let (runs, mut turn) = (bench.common.runs(), 0);
    let cells = bench.measure_by(plans, runs, |_, plan| {
        let MeasuringWork::Files(work) = &plan.work else { return Ok(crate::task::Figures::new()) };
        // Each turn has a new folder, of which no cache knows anything.
        turn += 1;
        let client = mounts.folder(plan.key.mechanism)?.join(format!("turn-{turn}"));
        let server = mounts.exported().join(format!("turn-{turn}"));
        work.run(Folders { server: &server, client: &client }, processors, &interrupt)
    })?;
    drop(mounts);
    let layout = Layout {
        group: &[("workload", "workload")],
        row: &[],
        metrics: &[Metric::PerSecond, Metric::BytesPerSecond, Metric::MeanNs, Metric::P99Ns, Metric::CpuNsPerOperation],
        baseline: Mechanism::PartywallFsTcp,
    };
    bench.say(&format!(
        "\n## File systems: operations, and processor time of the whole machine for each\n\n{}",
        table::cells(&cells, &layout)
    ))?;
    let verdicts = judge(&cells);
    bench.say("\n## What is promised, and what was measured (median of the ratios of the turns of this run; figures are medians)\n")?;
    bench.say(&table::verdicts(&verdicts))?;
    bench.draw(&pictures(&cells))?;
    Ok(CommandResults { cells, verdicts })
}

/// The folder in memory for exported files.
pub(crate) fn memory_folder() -> PathBuf {
    let memory = Path::new(MEMORY);
    if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() }
}

/// A workload by one of the ways.
pub(crate) fn find(cells: &[Cell], way: Mechanism, personality: Personality) -> Option<&Cell> {
    cells.iter().find(|cell| cell.key.mechanism == way && cell.key.word("workload") == Some(personality.name()))
}

fn judge(cells: &[Cell]) -> Vec<Verdict> {
    let claim = |limit, metric, rival, personality: Personality| {
        let text = format!("{}: partywall-fs : {rival}", personality.name());
        let ours = find(cells, Mechanism::PartywallFs, personality);
        Verdict::by_turns(text, Bound::AtLeast, limit, metric, ours, find(cells, rival, personality))
    };
    let mut verdicts = Vec::new();
    for personality in [Personality::Mail, Personality::Web, Personality::File] {
        verdicts.push(claim(1.7, Metric::PerSecond, Mechanism::PartywallFsTcp, personality));
        verdicts.push(claim(1.0, Metric::PerSecond, Mechanism::Sshfs, personality));
    }
    verdicts.push(claim(0.8, Metric::BytesPerSecond, Mechanism::Bindfs, Personality::Large));
    verdicts
}

fn pictures(cells: &[Cell]) -> BTreeMap<String, Picture> {
    let picture = bars(cells, "Mean time of an operation", &WAYS, &Personality::ALL);
    BTreeMap::from([("fs".into(), picture)])
}

/// Bars for the mean time of an operation, by workload and way.
pub(crate) fn bars(cells: &[Cell], title: &str, ways: &[Mechanism], personalities: &[Personality]) -> Picture {
    let group = |personality: Personality| {
        let bar = |&way: &Mechanism| {
            let value = find(cells, way, personality)?.summary(Metric::MeanNs)?;
            Some(Bar { name: way.to_string(), mechanism: way, value, label: Metric::MeanNs.show(value.median) })
        };
        (personality.name().to_owned(), ways.iter().filter_map(bar).collect())
    };
    let groups = personalities.iter().copied().map(group).collect();
    Picture::Bars(Bars { title: title.into(), x: ("time", Axis::TimeByTens), groups })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::task::Figures;

    #[test]
    fn every_claim_finds_its_cells() {
        let cells: Vec<Cell> = plans(Scale::Full, 10)
            .into_iter()
            .map(|plan| {
                let mut cell = Cell::new(plan.key);
                let all = [Metric::PerSecond, Metric::BytesPerSecond];
                cell.runs.push(Figures::from(all.map(|metric| (metric, 1.0))));
                cell
            })
            .collect();
        let verdicts = judge(&cells);
        assert_eq!(verdicts.len(), 7);
        for verdict in verdicts {
            assert!(verdict.measured.is_some(), "{}", verdict.claim);
        }
    }
}
