//! Two reports side by side, with a verdict that knows how far the runs lay apart.

use crate::report::{
    cell::{Cell, Key},
    json::BenchReport,
    metric::{Better, Metric},
    stats::RunSummary,
};

/// The change of one figure between two reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ResultChange {
    /// The ranges do not touch, and the new one is the good one.
    Better,
    /// The ranges do not touch, and the new one is the bad one.
    Worse,
    /// The ranges touch, or too few runs were made to tell.
    Same,
}

impl ResultChange {
    /// The result in one word, for tables.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Better => "better",
            Self::Worse => "WORSE",
            Self::Same => "no clear difference",
        }
    }
}

/// One quantity of one cell in both reports.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Pairing {
    /// The cell that both reports have.
    pub(crate) key: Key,
    /// The quantity of the cell that is compared.
    pub(crate) metric: Metric,
    /// In the first report.
    pub(crate) before: RunSummary,
    /// In the second.
    pub(crate) after: RunSummary,
    /// Whether the quantity got better or worse.
    pub(crate) change: ResultChange,
}

impl Pairing {
    /// The second median over the first.
    pub(crate) fn ratio(&self) -> Option<f64> {
        (self.before.median != 0.0).then(|| self.after.median / self.before.median)
    }
}

/// All that two reports have in common, and how many cells only one of them has.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Comparison {
    /// Measured in both.
    pub(crate) pairings: Vec<Pairing>,
    /// Cells that only the first has.
    pub(crate) only_before: usize,
    /// Cells that only the second has.
    pub(crate) only_after: usize,
}

/// Sets two reports side by side.
pub(crate) fn compare(before: &BenchReport, after: &BenchReport) -> Comparison {
    let find = |report: &'_ BenchReport, key: &Key| {
        report.cells.iter().position(|cell| cell.key == *key && !cell.runs.is_empty())
    };
    let mut pairings = Vec::new();
    let mut only_before = 0;
    for cell in measured(before) {
        match find(after, &cell.key) {
            Some(at) => pair(cell, &after.cells[at], &mut pairings),
            None => only_before += 1,
        }
    }
    let only_after = measured(after).filter(|cell| find(before, &cell.key).is_none()).count();
    Comparison { pairings, only_before, only_after }
}

fn measured(report: &BenchReport) -> impl Iterator<Item = &Cell> {
    report.cells.iter().filter(|cell| !cell.runs.is_empty())
}

fn pair(before: &Cell, after: &Cell, into: &mut Vec<Pairing>) {
    for metric in before.metrics() {
        // The extremes of a distribution are chance by nature, and times and rates of one cell say the same thing twice.
        if metric.better() == Better::Neither || metric == Metric::MaxNs {
            continue;
        }
        if let (Some(b), Some(a)) = (before.summary(metric), after.summary(metric)) {
            into.push(Pairing { key: before.key.clone(), metric, before: b, after: a, change: judge(metric, &b, &a) });
        }
    }
}

/// With fewer runs than this, ranges say nothing.
const ENOUGH_RUNS: usize = 3;

fn judge(metric: Metric, before: &RunSummary, after: &RunSummary) -> ResultChange {
    if before.runs.min(after.runs) < ENOUGH_RUNS || before.overlaps(after) {
        return ResultChange::Same;
    }
    if (after.median > before.median) == (metric.better() == Better::Higher) {
        ResultChange::Better
    } else {
        ResultChange::Worse
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::json::tests::sample;

    fn change(before: &[f64], after: &[f64]) -> ResultChange {
        compare(&sample(before), &sample(after)).pairings[0].change
    }

    #[test]
    fn judges_by_ranges_and_not_by_medians_alone() {
        assert_eq!(change(&[1.0, 2.0, 3.0], &[2.9, 9.0, 9.0]), ResultChange::Same, "ranges touch");
        assert_eq!(change(&[1.0, 2.0, 3.0], &[3.1, 9.0, 9.0]), ResultChange::Better);
        assert_eq!(change(&[3.1, 9.0, 9.0], &[1.0, 2.0, 3.0]), ResultChange::Worse);
        assert_eq!(change(&[1.0, 2.0], &[8.0, 9.0, 9.0]), ResultChange::Same, "two runs prove nothing");
    }

    #[test]
    fn knows_that_less_latency_is_better() {
        let of = |v: f64| RunSummary { median: v, min: v, max: v, runs: 5 };
        assert_eq!(judge(Metric::P50Ns, &of(2.0), &of(1.0)), ResultChange::Better);
        assert_eq!(judge(Metric::P50Ns, &of(1.0), &of(2.0)), ResultChange::Worse);
    }

    #[test]
    fn cells_without_partner_are_counted() {
        let before = sample(&[1.0, 2.0, 3.0]);
        let mut after = before.clone();
        after.cells[0].key = after.cells[0].key.clone().with("message", 128);
        let comparison = compare(&before, &after);
        assert_eq!((comparison.pairings.len(), comparison.only_before, comparison.only_after), (0, 1, 1));
        let same = compare(&before, &before);
        assert_eq!((same.pairings[0].ratio(), same.only_before), (Some(1.0), 0));
    }
}
