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

#[cfg(test)]
mod tests {
    use super::*;

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
