//! The pictures of a live migration under load, from the figures of `partywall-lab migrate`: throughput by time, and pauses.

use std::{collections::BTreeMap, fs, path::Path};

use serde::Deserialize;

use crate::{
    bench::Bench,
    commands::CommandResults,
    error::{BenchError, During, Result},
    mechanism::Mechanism,
    report::{
        plot::{Axis, Bar, Bars, Chart, MarkedChart, Picture, Series},
        stats::RunSummary,
    },
};

/// What is shown before the first moment of a round, and after the last one, in milliseconds.
const MARGIN_MS: f64 = 1_000.0;

/// The part of the file that is drawn.
#[derive(Debug, Deserialize)]
struct MigrationFile {
    column_ms: u32,
    migrations: Vec<Migration>,
    streams: Vec<MigratedStream>,
}

#[derive(Debug, Deserialize)]
struct Migration {
    round: u32,
    direction: String,
    marks: Vec<Moment>,
    streams: Vec<StreamPauses>,
}

#[derive(Debug, Deserialize)]
struct Moment {
    at_ms: f64,
    name: String,
}

/// How long a stream paused during a migration.
#[derive(Debug, Deserialize)]
struct StreamPauses {
    stream: String,
    transport_before: String,
    longest_pause_beyond_qemu_ms: f64,
}

#[derive(Debug, Deserialize)]
struct MigratedStream {
    name: String,
    partywall: bool,
    bytes_by_column: Vec<u64>,
    transports: Vec<TransportChange>,
}

#[derive(Debug, Deserialize)]
struct TransportChange {
    at_ms: f64,
    to: String,
}

/// Draws what is in the file.
pub(crate) fn run(bench: &mut Bench, path: &Path) -> Result<CommandResults> {
    if bench.common.plots.is_none() && bench.common.html.is_none() {
        return Err(BenchError::Usage("name a folder with --plots or a file with --html for the pictures".into()));
    }
    let text = fs::read_to_string(path).during(format!("reading {}", path.display()))?;
    let file: MigrationFile = serde_json::from_str(&text).map_err(|e| {
        BenchError::Usage(format!("{} is no file of `partywall-lab migrate --json`: {e}", path.display()))
    })?;
    let pictures = pictures(&file);
    bench.draw(&pictures)?;
    bench.say(&format!("# {}: {} pictures of {} migrations", path.display(), pictures.len(), file.migrations.len()))?;
    Ok(CommandResults::default())
}

fn pictures(file: &MigrationFile) -> BTreeMap<String, Picture> {
    let mut rounds: Vec<u32> = file.migrations.iter().map(|migration| migration.round).collect();
    rounds.dedup();
    let mut pictures: BTreeMap<String, Picture> =
        rounds.into_iter().map(|round| (format!("migration-{round}"), time_line(file, round))).collect();
    pictures.insert("migration-pauses".into(), Picture::Bars(pauses(file)));
    pictures
}

/// The throughput of all streams during a round.
fn time_line(file: &MigrationFile, round: u32) -> Picture {
    let of_round = file.migrations.iter().filter(|migration| migration.round == round);
    let mut moments: Vec<(f64, String)> = of_round
        .flat_map(|migration| {
            migration.marks.iter().map(|mark| (mark.at_ms, format!("{}: {}", migration.direction, mark.name)))
        })
        .collect();
    let times = || moments.iter().map(|(at, _)| *at);
    let (from, to) = (times().fold(f64::INFINITY, f64::min) - MARGIN_MS, times().fold(0.0, f64::max) + MARGIN_MS);
    let is_shown = |at: f64| (from..=to).contains(&at);
    for stream in &file.streams {
        let changes = stream.transports.iter().filter(|change| is_shown(change.at_ms));
        moments.extend(changes.map(|change| {
            let carrier = if change.to == "ring" { "a ring" } else { "TCP" };
            (change.at_ms, format!("{}: on {carrier}", stream.name))
        }));
    }
    moments.sort_by(|(a, _), (b, _)| a.total_cmp(b));
    let column = f64::from(file.column_ms.max(1));
    let series = file.streams.iter().map(|stream| {
        let bytes = &stream.bytes_by_column;
        // Before its begin and after its end, a stream has no rate; in between, a column without bytes is a pause.
        let has = |bytes: &u64| *bytes > 0;
        let (first, last) = (bytes.iter().position(has), bytes.iter().rposition(has));
        let columns = first.zip(last).map_or(0..0, |(first, last)| first..last + 1);
        let points = columns.filter_map(|at| {
            let (begin, rate) = (at as f64 * column, bytes[at] as f64 * 1000.0 / column);
            is_shown(begin).then_some((begin / 1000.0, RunSummary { median: rate, min: rate, max: rate, runs: 1 }))
        });
        let mechanism = match (stream.partywall, stream.name.starts_with("new")) {
            (false, _) => Mechanism::Tcp,
            (true, true) => Mechanism::PartywallZeroCopy,
            (true, false) => Mechanism::Transparent,
        };
        Series { name: stream.name.clone(), mechanism, dashed: !stream.partywall, points: points.collect() }
    });
    Picture::MarkedChart(MarkedChart {
        chart: Chart {
            title: format!("Throughput during live migrations, round {round}, in columns of {column:.0} ms"),
            x: ("", Axis::Seconds),
            y: ("", Axis::EvenRate),
            series: series.collect(),
        },
        marks: moments.into_iter().map(|(at, what)| (at / 1000.0, what)).collect(),
    })
}

/// The longest pauses of streams, beyond QEMU's own downtime.
fn pauses(file: &MigrationFile) -> Bars {
    let is_ours = |name: &str| file.streams.iter().any(|stream| stream.name == name && stream.partywall);
    let bar = |direction: &str, name: &str, mechanism: Mechanism, fits: &dyn Fn(&StreamPauses) -> bool| {
        let of_direction = file.migrations.iter().filter(|migration| migration.direction == direction);
        let pauses = of_direction.flat_map(|migration| &migration.streams).filter(|pauses| fits(pauses));
        let value = RunSummary::of(pauses.map(|pauses| pauses.longest_pause_beyond_qemu_ms))?;
        let RunSummary { median, min, max, .. } = value;
        Some(Bar { name: name.into(), mechanism, value, label: format!("{median:.0} ms ({min:.0} to {max:.0})") })
    };
    let group = |direction: &str| {
        let bars = [
            bar(direction, "on a ring before", Mechanism::PartywallZeroCopy, &|pauses| {
                is_ours(&pauses.stream) && pauses.transport_before == "ring"
            }),
            bar(direction, "on TCP, with the library", Mechanism::Transparent, &|pauses| {
                is_ours(&pauses.stream) && pauses.transport_before != "ring"
            }),
            bar(direction, "without the library", Mechanism::Tcp, &|pauses| !is_ours(&pauses.stream)),
        ];
        (direction.to_owned(), bars.into_iter().flatten().collect())
    };
    Bars {
        title: "The longest pause of each stream beyond QEMU's downtime".into(),
        x: ("milliseconds", Axis::Number),
        groups: ["away", "back"].map(group).into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A round of one migration, with a stream that pauses and one that begins later.
    const FILE: &str = r#"{
        "column_ms": 100, "rate": 1,
        "migrations": [{ "round": 1, "direction": "away", "qemu_downtime_ms": 5.0,
            "marks": [{ "at_ms": 1200.0, "name": "detach begins" }, { "at_ms": 1400.0, "name": "windows released" }],
            "streams": [
                { "stream": "transfer", "transport_before": "ring", "longest_pause_beyond_qemu_ms": 40.0 },
                { "stream": "plain", "transport_before": "tcp", "longest_pause_beyond_qemu_ms": 30.0 }] }],
        "streams": [
            { "name": "transfer", "partywall": true, "bytes_by_column": [0, 10, 20, 0, 30, 0],
              "transports": [{ "at_ms": 100.0, "to": "ring" }, { "at_ms": 1300.0, "to": "tcp" }] },
            { "name": "plain", "partywall": false, "bytes_by_column": [0, 0, 0, 0, 0, 7], "transports": [] }]
    }"#;

    #[test]
    fn time_line_has_pauses_and_moments_in_order() {
        let pictures = pictures(&serde_json::from_str(FILE).unwrap());
        assert_eq!(pictures.keys().collect::<Vec<_>>(), ["migration-1", "migration-pauses"]);
        let Picture::MarkedChart(MarkedChart { chart, marks }) = &pictures["migration-1"] else { panic!() };
        let said: Vec<_> = marks.iter().map(|(_, what)| what.as_str()).collect();
        assert_eq!(said, ["away: detach begins", "transfer: on TCP", "away: windows released"]);
        let rates: Vec<Vec<f64>> =
            chart.series.iter().map(|series| series.points.iter().map(|(_, s)| s.median).collect()).collect();
        // The first column, at 100 ms, is earlier than what is shown.
        assert_eq!(rates, [vec![200.0, 0.0, 300.0], vec![70.0]]);
    }

    #[test]
    fn pauses_are_grouped_by_earlier_transport() {
        let Picture::Bars(bars) = &pictures(&serde_json::from_str(FILE).unwrap())["migration-pauses"] else { panic!() };
        let shown: Vec<_> = bars.groups[0].1.iter().map(|bar| (bar.name.as_str(), bar.value.median)).collect();
        assert_eq!(shown, [("on a ring before", 40.0), ("without the library", 30.0)]);
        assert!(bars.groups[1].1.is_empty());
    }
}
