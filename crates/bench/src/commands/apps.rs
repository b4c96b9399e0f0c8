//! Real programs, unmodified, without and with the library, side by side.

use std::{collections::BTreeMap, path::Path};

use super::CommandResults;
use crate::{
    affinity,
    apps::{
        self, App, Case,
        accounts::Accounts,
        site::{BenchScene, Locality, Site, find},
    },
    args::{Common, Scale},
    bench::Bench,
    error::{BenchError, Result},
    mechanism::Mechanism,
    report::{
        cell::{Cell, Key, Problem},
        metric::Metric,
        plot::{Axis, Bar, Bars, Picture},
        stats::RunSummary,
        table::{self, Layout},
        verdict::{Bound, Verdict},
    },
};

const NAME: &str = "apps";
/// Without the library, and with it.
pub(crate) const SIDES: [Mechanism; 2] = [Mechanism::Tcp, Mechanism::Transparent];

/// The promised figures: program, case, quantity, least or greatest ratio to plain TCP, on loopback with two processors.
const TARGETS: &[(&str, &str, Metric, Bound, f64)] = &[
    ("redis", "GET 3 B -c 1 -P 1", Metric::PerSecond, Bound::AtLeast, 4.0),
    ("redis", "SET 3 B -c 1 -P 1", Metric::PerSecond, Bound::AtLeast, 4.0),
    ("redis", "GET 3 B -c 50 -P 1", Metric::PerSecond, Bound::AtLeast, 3.0),
    ("redis", "SET 3 B -c 50 -P 1", Metric::PerSecond, Bound::AtLeast, 3.0),
    ("redis", "GET 3 B -c 50 -P 16", Metric::PerSecond, Bound::AtLeast, 1.3),
    ("redis", "GET 3 B -c 1 -P 1", Metric::P99Ns, Bound::AtMost, 1.0),
    ("redis", "GET 3 B -c 50 -P 1", Metric::P99Ns, Bound::AtMost, 1.0),
    ("redis", "GET 3 B -c 50 -P 16", Metric::P99Ns, Bound::AtMost, 1.0),
    ("iperf3", "TCP, 1 stream", Metric::BytesPerSecond, Bound::AtLeast, 2.2),
    ("nginx", "612 B, kept, 1", Metric::PerSecond, Bound::AtLeast, 3.0),
    ("nginx", "612 B, kept, 50", Metric::PerSecond, Bound::AtLeast, 2.0),
    ("nginx", "64 KiB, kept, 1", Metric::PerSecond, Bound::AtLeast, 1.5),
    ("nginx", "64 KiB, kept, 50", Metric::PerSecond, Bound::AtLeast, 1.5),
    ("nginx", "1 MiB, kept, 1", Metric::PerSecond, Bound::AtLeast, 1.5),
    ("nginx", "1 MiB, kept, 50", Metric::PerSecond, Bound::AtLeast, 1.5),
    ("postgresql", "select prepared -c 8", Metric::PerSecond, Bound::AtLeast, 1.2),
    ("sockperf", "TCP, awake", Metric::P50Ns, Bound::AtMost, 0.1),
    ("sockperf", "UDP, awake", Metric::P50Ns, Bound::AtMost, 0.1),
    ("sockperf", "TCP, 200 a second: both sleep", Metric::P50Ns, Bound::AtMost, 1.0),
    ("sockperf", "UDP, 200 a second: both sleep", Metric::P50Ns, Bound::AtMost, 1.0),
];
/// "No worse" allows for what runs of the same program differ by.
const NO_WORSE: f64 = 0.97;

/// Cases that are measured at a place.
fn cases(app: &App, place: Locality, scale: Scale) -> Vec<Case> {
    let all = (app.cases)(scale);
    match (place, scale) {
        (Locality::Loopback, _) => all,
        (_, Scale::Full) => all,
        // In short: that it works, and about how fast.
        _ => all.into_iter().take(2).collect(),
    }
}

fn places(scene: &BenchScene<'_>, scale: Scale) -> Vec<Locality> {
    let mut places = vec![Locality::Loopback];
    places.extend(scene.spaces.is_some().then_some(Locality::Veth));
    places.extend((scale > Scale::Smoke).then_some(Locality::OneCpu));
    places
}

fn key(app: &App, case: &Case, place: Locality, mechanism: Mechanism) -> Key {
    Key::new(NAME, mechanism).with("program", app.name).with("case", case.label.as_str()).with("place", place.name())
}

/// Measures and shows.
pub(crate) fn run(bench: &mut Bench) -> Result<CommandResults> {
    let cells = {
        let common = bench.common.clone();
        let scene = bench.scene()?;
        measure(&scene, &common)?
    };
    bench.say("\n## Unmodified programs: plain TCP, and with the library\n")?;
    let layout = Layout {
        group: &[("program", "program"), ("case", "case"), ("place", "place")],
        row: &[],
        metrics: &[
            Metric::PerSecond,
            Metric::BytesPerSecond,
            Metric::P50Ns,
            Metric::P99Ns,
            Metric::MachineCpuPercent,
            Metric::LostPercent,
        ],
        baseline: Mechanism::Tcp,
    };
    bench.say(&table::cells(&cells, &layout))?;
    let verdicts = judge(&cells);
    bench.say("\n## What is promised, and what was measured (ratios of medians of this run)\n")?;
    bench.say(&table::verdicts(&verdicts))?;
    bench.draw(&pictures(&cells))?;
    Ok(CommandResults { cells, verdicts })
}

fn measure(scene: &BenchScene<'_>, common: &Common) -> Result<Vec<Cell>> {
    let scale = common.scale();
    let mut cells: Vec<Cell> = Vec::new();
    // Programs that are missing, or do not start, are said once.
    let mut given_up: Vec<(&str, Locality)> = Vec::new();
    for run in 0..common.runs() {
        for app in &apps::ALL {
            for place in places(scene, scale) {
                if given_up.contains(&(app.name, place)) {
                    continue;
                }
                let cases = cases(app, place, scale);
                for (case, mechanism) in cases.iter().flat_map(|case| SIDES.map(|mechanism| (case, mechanism))) {
                    let key = key(app, case, place, mechanism);
                    if run == 0 && common.wants(mechanism) {
                        cells.push(Cell::new(key));
                    }
                }
                let folder = scene.scratch.join(format!("{}-{}-{run}", app.name, place.name()));
                match play(scene, app, place, &cases, &folder, common, &mut cells) {
                    Ok(()) => {}
                    Err(BenchError::Interrupted) => return Err(BenchError::Interrupted),
                    Err(e) => {
                        eprintln!("partywall-bench: {} ({}): {e}", app.name, place.name());
                        given_up.push((app.name, place));
                        let problem = match e {
                            BenchError::Unavailable(why) => Problem::Unavailable(why),
                            e => Problem::Failed(e.to_string()),
                        };
                        let of_app = |cell: &&mut Cell| {
                            cell.key.word("program") == Some(app.name) && cell.key.word("place") == Some(place.name())
                        };
                        cells.iter_mut().filter(of_app).for_each(|cell| cell.problem = Some(problem.clone()));
                    }
                }
                // Databases and files of a run are large.
                let _ = std::fs::remove_dir_all(&folder);
            }
        }
    }
    Ok(cells)
}

/// One run of one program at one place: both servers are there, and are asked in turn.
fn play(
    scene: &BenchScene<'_>,
    app: &App,
    place: Locality,
    cases: &[Case],
    folder: &Path,
    common: &Common,
    cells: &mut [Cell],
) -> Result<()> {
    for (program, package) in app.needs {
        find(program, package)?;
    }
    let mut servers = Vec::new();
    for mechanism in SIDES.into_iter().filter(|mechanism| common.wants(*mechanism)) {
        let site = Site::new(scene, mechanism, place, folder.join(mechanism.name()))?;
        let mut server = (app.serve)(&site)?;
        site.await_listener(&mut server)?;
        servers.push((site, server));
    }
    for case in cases {
        for (site, server) in &servers {
            let wanted = key(app, case, place, site.mechanism);
            let Some(cell) = cells.iter_mut().find(|cell| cell.key == wanted && cell.problem.is_none()) else {
                continue;
            };
            let accounts = Accounts::now(server.id());
            match app.drive(site, case, common.scale()) {
                Ok(mut figures) => {
                    figures.extend(accounts.since(affinity::allowed()?.len()));
                    cell.runs.push(figures);
                }
                Err(BenchError::Interrupted) => return Err(BenchError::Interrupted),
                Err(e) => {
                    eprintln!("partywall-bench: {wanted}: {e}");
                    cell.problem = Some(Problem::Failed(e.to_string()));
                }
            }
        }
    }
    for (_, server) in servers {
        server.terminate(std::time::Duration::from_secs(5));
    }
    Ok(())
}

/// The median of one quantity.
fn median(
    cells: &[Cell],
    program: &str,
    case: &str,
    place: Locality,
    mechanism: Mechanism,
    metric: Metric,
) -> Option<f64> {
    let fits = |cell: &&Cell| {
        cell.key.experiment == NAME
            && cell.key.mechanism == mechanism
            && cell.key.word("program") == Some(program)
            && cell.key.word("case") == Some(case)
            && cell.key.word("place") == Some(place.name())
    };
    cells.iter().find(fits)?.median(metric)
}

fn judge(cells: &[Cell]) -> Vec<Verdict> {
    let pair = |program: &str, case: &str, place, metric| {
        [Mechanism::Transparent, Mechanism::Tcp].map(|m| median(cells, program, case, place, m, metric))
    };
    let mut verdicts: Vec<Verdict> = TARGETS
        .iter()
        .map(|(program, case, metric, bound, limit)| {
            let [ours, theirs] = pair(program, case, Locality::Loopback, *metric);
            Verdict::ratio(
                format!("{program} {case}, {} : plain TCP", metric.name()),
                *bound,
                *limit,
                *metric,
                ours,
                theirs,
            )
        })
        .collect();
    // One processor: nothing is worse.
    let shared = cells
        .iter()
        .filter(|cell| cell.key.mechanism == Mechanism::Tcp && cell.key.word("place") == Some(Locality::OneCpu.name()));
    for cell in shared {
        let (Some(program), Some(case)) = (cell.key.word("program"), cell.key.word("case")) else { continue };
        let main = [
            (Metric::PerSecond, Bound::AtLeast, NO_WORSE),
            (Metric::BytesPerSecond, Bound::AtLeast, NO_WORSE),
            (Metric::P50Ns, Bound::AtMost, 1.0 / NO_WORSE),
        ];
        let Some((metric, bound, limit)) = main.into_iter().find(|(metric, ..)| cell.median(*metric).is_some()) else {
            continue;
        };
        let [ours, theirs] = pair(program, case, Locality::OneCpu, metric);
        let claim = format!("{program} {case}, on one processor, {} : plain TCP", metric.name());
        verdicts.push(Verdict::ratio(claim, bound, limit, metric, ours, theirs));
    }
    let between = cells
        .iter()
        .filter(|cell| cell.key.mechanism == Mechanism::Tcp && cell.key.word("place") == Some(Locality::Veth.name()));
    for cell in between {
        let (Some(program), Some(case)) = (cell.key.word("program"), cell.key.word("case")) else { continue };
        let main = [Metric::PerSecond, Metric::BytesPerSecond, Metric::P50Ns];
        let Some(metric) = main.into_iter().find(|metric| cell.median(*metric).is_some()) else { continue };
        let [ours, theirs] = pair(program, case, Locality::Veth, metric);
        let claim = format!("{program} {case}, between namespaces, {} : plain TCP", metric.name());
        verdicts.push(Verdict::ratio(claim, Bound::Report, 0.0, metric, ours, theirs));
    }
    verdicts
}

/// Bars of the ratios: 100 % is plain TCP.
fn pictures(cells: &[Cell]) -> BTreeMap<String, Picture> {
    let mut groups: Vec<(String, Vec<Bar>)> = Vec::new();
    for cell in cells.iter().filter(|cell| cell.key.mechanism == Mechanism::Transparent) {
        let (Some(program), Some(case), Some(place)) =
            (cell.key.word("program"), cell.key.word("case"), cell.key.word("place"))
        else {
            continue;
        };
        if place != Locality::Loopback.name() {
            continue;
        }
        let metric =
            [Metric::PerSecond, Metric::BytesPerSecond, Metric::P50Ns].into_iter().find(|m| cell.median(*m).is_some());
        let Some(metric) = metric else { continue };
        let plain = median(cells, program, case, Locality::Loopback, Mechanism::Tcp, metric);
        let (Some(ours), Some(plain)) = (cell.summary(metric), plain) else { continue };
        let part = |value: f64| if metric == Metric::P50Ns { 100.0 * plain / value } else { 100.0 * value / plain };
        let [a, b] = [part(ours.min), part(ours.max)];
        let value = RunSummary { median: part(ours.median), min: a.min(b), max: a.max(b), ..ours };
        let label = format!("{:.2}x  ({} : {})", value.median / 100.0, metric.show(ours.median), metric.show(plain));
        let bar = Bar { name: case.to_owned(), mechanism: Mechanism::Transparent, value, label };
        match groups.last_mut() {
            Some((heading, bars)) if heading == program => bars.push(bar),
            _ => groups.push((program.to_owned(), vec![bar])),
        }
    }
    let bars = Bars {
        title: "Unmodified programs with the library; plain TCP over loopback is 100 %".into(),
        x: ("of plain TCP", Axis::Percent),
        groups,
    };
    BTreeMap::from([("apps".into(), Picture::Bars(bars))])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::task::Figures;

    #[test]
    fn every_target_is_about_something_that_is_measured() {
        let mut cells = Vec::new();
        for app in &apps::ALL {
            for case in cases(app, Locality::Loopback, Scale::Full) {
                for mechanism in SIDES {
                    let mut cell = Cell::new(key(app, &case, Locality::Loopback, mechanism));
                    let all = [Metric::PerSecond, Metric::BytesPerSecond, Metric::P50Ns, Metric::P99Ns];
                    cell.runs = vec![all.map(|metric| (metric, 2.0)).into_iter().collect::<Figures>()];
                    cells.push(cell);
                }
            }
        }
        for verdict in judge(&cells) {
            assert!(verdict.measured.is_some(), "{} has no figures", verdict.claim);
        }
        assert!(judge(&[]).iter().all(|verdict| verdict.measured.is_none()));
    }
}
