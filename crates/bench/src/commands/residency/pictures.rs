//! The pictures of the study: rates and round trips by message size, local and remote flows mixed, and the cost of the library with its interval.

use std::collections::{BTreeMap, BTreeSet};

use super::{FLOWS, judge_cell};
use crate::{
    commands::apps::SIDES,
    mechanism::Mechanism,
    report::{
        cell::Cell,
        metric::Metric,
        plot::{Axis, Chart, Picture, Series},
        stats::RunSummary,
    },
};

/// All of them, by name. Those without data are not drawn.
pub(super) fn all(cells: &[Cell]) -> BTreeMap<String, Picture> {
    let mut pictures = BTreeMap::new();
    let by_size = [
        ("stream", "TCP", Metric::BytesPerSecond, Axis::RateByTens),
        ("udp-stream", "UDP", Metric::BytesPerSecond, Axis::RateByTens),
        ("rounds", "Round trips by TCP, median", Metric::P50Ns, Axis::TimeByTens),
        ("udp-rounds", "Round trips by UDP, median", Metric::P50Ns, Axis::TimeByTens),
    ];
    for (flow, name, metric, axis) in by_size {
        let chart = Chart {
            title: format!("{name} by message size, separate processors and one"),
            x: ("message", Axis::Bytes),
            y: ("", axis),
            series: series_by_size(cells, flow, metric),
        };
        pictures.insert(format!("residency-{flow}"), Picture::Chart(chart));
    }
    pictures.insert("residency-mixed".into(), Picture::Chart(mixed(cells)));
    pictures.insert("residency-remote".into(), Picture::Chart(remote(cells)));
    pictures
}

fn cells_in<'a>(cells: &'a [Cell], part: &'a str, mechanism: Mechanism) -> impl Iterator<Item = &'a Cell> {
    cells.iter().filter(move |cell| cell.key.mechanism == mechanism && cell.key.word("part") == Some(part))
}

fn series_by_size(cells: &[Cell], flow: &str, metric: Metric) -> Vec<Series> {
    let places: BTreeSet<&str> = cells.iter().filter_map(|cell| cell.key.word("place")).collect();
    let of = |mechanism: Mechanism, place: &str| {
        let points = cells_in(cells, "sizes", mechanism)
            .filter(|cell| cell.key.word("flow") == Some(flow) && cell.key.word("place") == Some(place))
            .filter_map(|cell| Some((cell.key.number("message")? as f64, cell.summary(metric)?)))
            .collect();
        Series { name: format!("{mechanism}, {place}"), mechanism, dashed: place.ends_with("one-cpu"), points }
    };
    SIDES
        .into_iter()
        .flat_map(|mechanism| places.iter().map(move |place| (mechanism, *place)))
        .map(|(m, p)| of(m, p))
        .collect()
}

/// The rate of all flows, and of the remote ones among them, by how many are local.
fn mixed(cells: &[Cell]) -> Chart {
    let series = SIDES.into_iter().flat_map(|mechanism| {
        [(Metric::BytesPerSecond, "all", false), (Metric::RemoteBytesPerSecond, "remote", true)].map(
            |(metric, what, dashed)| {
                let points = cells_in(cells, "mixed", mechanism)
                    .filter_map(|cell| Some((cell.key.number("local")? as f64, cell.summary(metric)?)))
                    .collect();
                Series { name: format!("{mechanism}, {what}"), mechanism, dashed, points }
            },
        )
    });
    Chart {
        title: format!("{FLOWS} flows to local and to remote peers"),
        x: ("local flows", Axis::Number),
        y: ("", Axis::EvenRate),
        series: series.collect(),
    }
}

/// The rate with the library, as a part of the rate without it, where every peer is remote. The bars are the intervals that contain the true
/// ratio in 95 of 100 such experiments.
fn remote(cells: &[Cell]) -> Chart {
    let flows: BTreeSet<(&str, u64)> = cells_in(cells, "remote", Mechanism::Tcp)
        .filter_map(|cell| Some((cell.key.word("flow")?, cell.key.number("entries")?)))
        .collect();
    let series = flows.into_iter().map(|(flow, entries)| {
        let of_flow = |cell: &&Cell| cell.key.word("flow") == Some(flow) && cell.key.number("entries") == Some(entries);
        let points = cells_in(cells, "remote", Mechanism::Tcp).filter(of_flow).filter_map(|plain| {
            let ours = cells_in(cells, "remote", Mechanism::Transparent)
                .find(|cell| cell.key.settings == plain.key.settings)?;
            let verdict = judge_cell(plain, Some(ours));
            let median = verdict.measured?;
            let (min, max) = verdict.interval.map_or((median, median), |interval| (interval.low, interval.high));
            Some((plain.key.number("message")? as f64, RunSummary { median, min, max, runs: plain.runs.len() }))
        });
        Series {
            name: format!("{flow}, {entries}"),
            mechanism: if flow == "stream" { Mechanism::Transparent } else { Mechanism::Tcp },
            dashed: entries > 1,
            points: points.collect(),
        }
    });
    Chart {
        title: "A remote peer: rate with the library, as a part of the rate without it".into(),
        x: ("message", Axis::Bytes),
        y: ("flow, entries of the directory; bars: intervals of 95 %", Axis::Ratio),
        series: series.collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{report::cell::Key, task::Figures};

    fn cell(mechanism: Mechanism, part: &str, name: &str, rates: &[f64]) -> Cell {
        let key = Key::new("residency", mechanism).with("part", part).with("flow", "rounds").with("entries", 1u64);
        let mut cell = Cell::new(key.with(name, 4u64));
        let figures = |rate: &f64| {
            Figures::from([
                (Metric::PerSecond, *rate),
                (Metric::BytesPerSecond, 2.0 * rate),
                (Metric::RemoteBytesPerSecond, *rate),
            ])
        };
        cell.runs = rates.iter().map(figures).collect();
        cell
    }

    fn series(picture: &Picture) -> &[Series] {
        let Picture::Chart(chart) = picture else { panic!("{picture:?}") };
        &chart.series
    }

    #[test]
    fn picture_of_remote_peers_has_intervals_of_ratios() {
        let ours = [0.98, 0.99, 1.0, 1.0, 1.01, 1.02].map(|ratio| ratio * 50.0);
        let cells = [
            cell(Mechanism::Tcp, "remote", "message", &[50.0; 6]),
            cell(Mechanism::Transparent, "remote", "message", &ours),
        ];
        let pictures = all(&cells);
        let [Series { name, points, .. }] = series(&pictures["residency-remote"]) else { panic!("one series") };
        assert_eq!(name, "rounds, 1");
        let (x, RunSummary { median, min, max, .. }) = points[0];
        assert_eq!(x, 4.0);
        assert!((median - 1.0).abs() < 1e-9 && (min - 0.98).abs() < 1e-9 && (max - 1.02).abs() < 1e-9, "{points:?}");
    }

    #[test]
    fn picture_of_mixed_flows_shows_remote_ones_apart() {
        let cells =
            [cell(Mechanism::Tcp, "mixed", "local", &[5.0]), cell(Mechanism::Transparent, "mixed", "local", &[6.0])];
        let pictures = all(&cells);
        let shown = series(&pictures["residency-mixed"]).iter();
        let medians: Vec<_> = shown.map(|series| (series.name.as_str(), series.points[0].1.median)).collect();
        assert_eq!(
            medians,
            [("tcp, all", 10.0), ("tcp, remote", 5.0), ("transparent, all", 12.0), ("transparent, remote", 6.0)]
        );
    }
}
