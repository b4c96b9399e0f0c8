//! Medians and ranges of a handful of runs.

use serde::{Deserialize, Serialize};

/// The middle of several runs, and how far they lay apart.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct RunSummary {
    /// The middle run; of an even number, the mean of the two in the middle.
    pub(crate) median: f64,
    /// The least value of any run.
    pub(crate) min: f64,
    /// The greatest value of any run.
    pub(crate) max: f64,
    /// How many runs.
    pub(crate) runs: usize,
}

impl RunSummary {
    /// Summarises the values; `None` without any.
    pub(crate) fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut sorted: Vec<f64> = values.into_iter().collect();
        sorted.sort_by(f64::total_cmp);
        let (min, max) = (*sorted.first()?, *sorted.last()?);
        let half = sorted.len() / 2;
        let median = if sorted.len() % 2 == 1 { sorted[half] } else { (sorted[half - 1] + sorted[half]) / 2.0 };
        Some(Self { median, min, max, runs: sorted.len() })
    }

    /// Whether the ranges of two sets of runs touch, so that the difference may be chance.
    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        self.min <= other.max && other.min <= self.max
    }
}

/// The median of several values, and the interval around it that contains the true median in 95 of 100 such experiments.
///
/// The interval is that of the order statistics: the number of values below the true median has the binomial distribution of as many tosses of
/// a coin, whatever the distribution of the values is. (H. A. David, H. N. Nagaraja, *Order Statistics*, section 7.1.)
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct MedianInterval {
    /// The middle value.
    pub(crate) median: f64,
    /// The lower end.
    pub(crate) low: f64,
    /// The upper end.
    pub(crate) high: f64,
    /// How many values.
    pub(crate) values: usize,
}

/// Values beyond that many say nothing more, and their weights are too small for a floating-point number.
const MOST_VALUES: usize = 1000;

impl MedianInterval {
    /// `None` for fewer than six values: no interval between two of them is sure enough.
    pub(crate) fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut sorted: Vec<f64> = values.into_iter().take(MOST_VALUES).collect();
        sorted.sort_by(f64::total_cmp);
        let count = sorted.len();
        // The chance that at most `rank` tosses of `count` show heads.
        let (mut weight, mut chance, mut rank) = (0.5f64.powi(i32::try_from(count).ok()?), 0.0, 0);
        while chance + weight <= 0.025 {
            chance += weight;
            weight *= (count - rank) as f64 / (rank + 1) as f64;
            rank += 1;
        }
        let median = RunSummary::of(sorted.iter().copied())?.median;
        let low = *sorted.get(rank.checked_sub(1)?)?;
        Some(Self { median, low, high: sorted[count - rank], values: count })
    }

    /// Whether the interval lies on one side of a limit.
    pub(crate) fn decides(&self, limit: f64) -> bool {
        limit <= self.low || self.high < limit
    }

    /// Whether a limit also lies outside of a wider interval, which contains the true median in about 99 of 100 experiments. It is for an experiment
    /// that is judged several times and ends once it is decided.
    pub(crate) fn decides_clearly(&self, limit: f64) -> bool {
        // Of a normal distribution, 95 % lie within 1.96 standard deviations, and 99 % within 2.58. Other distributions differ a little.
        let more = 2.58 / 1.96;
        let wider = |end: f64| self.median + (end - self.median) * more;
        limit <= wider(self.low) || wider(self.high) < limit
    }

    /// How far the ends lie apart, as a part of the median.
    pub(crate) fn width(&self) -> f64 {
        (self.high - self.low) / self.median
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_interval_has_the_ranks_of_the_tables() {
        // The ranks of the tables for 95 of 100: 1 of 6, 2 of 9, 6 of 20, 40 of 100.
        for (count, rank) in [(6, 1), (9, 2), (20, 6), (100, 40)] {
            let interval = MedianInterval::of((1..=count).map(f64::from)).unwrap();
            let ends = (f64::from(rank), f64::from(count + 1 - rank));
            assert_eq!((interval.low, interval.high), ends, "of {count}");
        }
        assert_eq!(MedianInterval::of([1.0; 5]), None);
        assert!(MedianInterval::of((0..5000).map(f64::from)).is_some());
    }

    #[test]
    fn clear_decision_needs_more_than_a_decision() {
        let interval = MedianInterval::of([1.0, 1.0, 1.5, 1.5, 2.0, 2.0]).unwrap();
        assert!(interval.decides(0.9) && !interval.decides_clearly(0.9), "{interval:?}");
        assert!(interval.decides(2.1) && !interval.decides_clearly(2.1));
        assert!(interval.decides_clearly(0.8) && interval.decides_clearly(2.2));
    }

    #[test]
    fn interval_on_one_side_of_a_limit_decides() {
        let interval = MedianInterval::of([1.0, 1.0, 1.5, 1.5, 2.0, 2.0]).unwrap();
        assert!(interval.decides(1.0) && interval.decides(2.1), "{interval:?}");
        assert!(!interval.decides(1.2) && !interval.decides(2.0), "{interval:?}");
        assert!((interval.width() - 1.0 / 1.5).abs() < 1e-9);
    }

    #[test]
    fn takes_the_middle() {
        assert_eq!(RunSummary::of([]), None);
        assert_eq!(RunSummary::of([3.0, 1.0, 9.0]), Some(RunSummary { median: 3.0, min: 1.0, max: 9.0, runs: 3 }));
        assert_eq!(RunSummary::of([4.0, 1.0, 2.0, 9.0]).unwrap().median, 3.0);
    }

    #[test]
    fn sees_ranges_touch() {
        let of = |values: &[f64]| RunSummary::of(values.iter().copied()).unwrap();
        assert!(of(&[1.0, 2.0]).overlaps(&of(&[2.0, 3.0])));
        assert!(of(&[1.0, 9.0]).overlaps(&of(&[2.0, 3.0])));
        assert!(!of(&[1.0, 2.0]).overlaps(&of(&[2.1, 3.0])));
    }
}
