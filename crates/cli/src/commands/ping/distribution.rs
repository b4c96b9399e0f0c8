//! How latencies are spread: numbers for programs, percentiles and bars for people.

use hdrhistogram::Histogram;
use partywall_terminal::table;
use serde::Serialize;

use super::exchange::PingResults;
use crate::human;

/// Width of the longest bar.
const WIDTH: u64 = 40;

/// The answer of `--json`.
#[derive(Debug, Serialize)]
pub(crate) struct PingSummary {
    target: String,
    size: u32,
    count: u64,
    round_trip_ns: Percentiles,
    #[serde(skip_serializing_if = "Option::is_none")]
    there_ns: Option<Percentiles>,
    #[serde(skip_serializing_if = "Option::is_none")]
    back_ns: Option<Percentiles>,
}

/// The usual points of a distribution.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct Percentiles {
    min: u64,
    pub(crate) p50: u64,
    p90: u64,
    pub(crate) p99: u64,
    #[serde(rename = "p99.9")]
    pub(crate) p99_9: u64,
    max: u64,
    mean: u64,
}

impl Percentiles {
    pub(crate) fn of(histogram: &Histogram<u64>) -> Self {
        Self {
            min: histogram.min(),
            p50: histogram.value_at_quantile(0.5),
            p90: histogram.value_at_quantile(0.9),
            p99: histogram.value_at_quantile(0.99),
            p99_9: histogram.value_at_quantile(0.999),
            max: histogram.max(),
            mean: histogram.mean().round() as u64,
        }
    }
}

impl PingSummary {
    pub(crate) fn of(target: &str, size: u32, results: &PingResults) -> Self {
        let way = |n: usize| results.ways.as_ref().map(|ways| Percentiles::of(&ways[n]));
        Self {
            target: target.into(),
            size,
            count: results.round_trip.len(),
            round_trip_ns: Percentiles::of(&results.round_trip),
            there_ns: way(0),
            back_ns: way(1),
        }
    }
}

/// A table of percentiles, then the round trips as bars.
pub(crate) fn describe(target: &str, size: u32, results: &PingResults) -> String {
    let mut percentiles = table(&["", ">min", ">p50", ">p90", ">p99", ">p99.9", ">max", ">mean"]);
    let rows = [("round trip", Some(&results.round_trip))]
        .into_iter()
        .chain(["there", "back"].into_iter().zip([0, 1].map(|n| results.ways.as_ref().map(|ways| &ways[n]))));
    for (name, histogram) in rows {
        if let Some(histogram) = histogram {
            let p = Percentiles::of(histogram);
            let values = [p.min, p.p50, p.p90, p.p99, p.p99_9, p.max, p.mean].map(human::nanos);
            percentiles.add_row([name.to_owned()].into_iter().chain(values));
        }
    }
    format!(
        "{target}: {} messages of {size} bytes\n\n{percentiles}\n\n{}",
        results.round_trip.len(),
        bars(&results.round_trip)
    )
}

/// One line per doubling of the latency.
fn bars(histogram: &Histogram<u64>) -> String {
    let mut rows = table(&[">up to", ">messages", "", ""]);
    let mut buckets: Vec<(u64, u64)> = Vec::new();
    for step in histogram.iter_log(lowest_bound(histogram.min()), 2.0) {
        buckets.push((step.value_iterated_to(), step.count_since_last_iteration()));
    }
    let most = buckets.iter().map(|&(_, count)| count).max().unwrap_or(0).max(1);
    let total = histogram.len().max(1);
    for (bound, count) in buckets {
        // Even a single sample is shown, as one mark.
        let width = (count * WIDTH).div_ceil(most);
        let bar = "#".repeat(usize::try_from(width).unwrap_or(0));
        let share = format!("{:.1}%", count as f64 * 100.0 / total as f64);
        rows.add_row([human::nanos(bound), count.to_string(), share, bar]);
    }
    rows.to_string()
}

/// The power of two that the least latency lies under.
fn lowest_bound(least: u64) -> u64 {
    (least + 1).next_power_of_two()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Histogram<u64> {
        let mut histogram = Histogram::new_with_bounds(1, 1_000_000_000, 3).unwrap();
        for n in 1..=1000u64 {
            histogram.record(n * 1000).unwrap();
        }
        histogram
    }

    #[test]
    fn percentiles_are_those_of_the_samples() {
        let p = Percentiles::of(&sample());
        assert!((499_000..=501_000).contains(&p.p50), "{p:?}");
        assert!((989_000..=991_000).contains(&p.p99), "{p:?}");
        assert!(p.max >= 1_000_000 && p.min <= 1000);
    }

    #[test]
    fn bars_count_every_sample_once() {
        let text = bars(&sample());
        let counted: u64 =
            text.lines().skip(1).filter_map(|line| line.split_whitespace().nth(2)?.parse::<u64>().ok()).sum();
        assert_eq!(counted, 1000, "{text}");
        assert!(text.contains(&"#".repeat(40)), "{text}");
    }

    #[test]
    fn description_shows_one_way_times_only_when_measured() {
        let alone = PingResults { round_trip: sample(), ways: None };
        assert!(!describe("a:ping", 64, &alone).contains("there"));
        let both = PingResults { round_trip: sample(), ways: Some([sample(), sample()]) };
        let text = describe("a:ping", 64, &both);
        assert!(text.contains("there") && text.contains("back") && text.contains("p99.9"));
    }
}
