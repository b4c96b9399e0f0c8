//! A claim about a ratio of two measurements, and whether it held.

use serde::{Deserialize, Serialize};

use crate::report::{cell::Cell, metric::Metric, stats::MedianInterval, unit};

/// On which side of the limit the ratio has to lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Bound {
    /// The ratio is to be no less.
    AtLeast,
    /// The ratio is to be no more.
    AtMost,
    /// There is no limit; the figure is only reported.
    Report,
}

/// One line of the list of claims.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Verdict {
    /// The claim, in words.
    pub(crate) claim: String,
    /// The side of the limit.
    pub(crate) bound: Bound,
    /// The value that the figure is compared with.
    pub(crate) limit: f64,
    /// The ratio that was measured; absent if one side of it could not be.
    pub(crate) measured: Option<f64>,
    /// The interval that contains the true ratio in 95 of 100 such experiments, where the turns are enough for one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) interval: Option<MedianInterval>,
    /// The two figures behind it, for people.
    pub(crate) figures: String,
}

impl Verdict {
    /// Whether the claim held, if it could be tested. `None` also if the interval of the ratio contains the limit.
    pub(crate) fn met(&self) -> Option<bool> {
        let measured = self.measured?;
        if self.interval.is_some_and(|interval| !interval.decides(self.limit)) {
            return None;
        }
        match self.bound {
            Bound::AtLeast => Some(measured >= self.limit),
            Bound::AtMost => Some(measured <= self.limit),
            Bound::Report => None,
        }
    }

    /// `met`, `MISSED`, `undecided`, `not measured`, or nothing to judge.
    pub(crate) fn word(&self) -> &'static str {
        match (self.met(), self.bound, self.measured) {
            (Some(true), ..) => "met",
            (Some(false), ..) => "MISSED",
            (None, Bound::Report, Some(_)) => "reported",
            (None, _, Some(_)) => "undecided",
            (None, ..) => "not measured",
        }
    }

    /// The ratio of two medians of the same quantity.
    pub(crate) fn ratio(
        claim: impl Into<String>,
        bound: Bound,
        limit: f64,
        metric: Metric,
        ours: Option<f64>,
        theirs: Option<f64>,
    ) -> Self {
        let show = |value: Option<f64>| value.map_or_else(|| "-".into(), |v| metric.show(v));
        Self {
            claim: claim.into(),
            bound,
            limit,
            measured: ours.zip(theirs).filter(|(_, theirs)| *theirs > 0.0).map(|(ours, theirs)| ours / theirs),
            interval: None,
            figures: format!("{} : {}", show(ours), show(theirs)),
        }
    }

    /// The median of the ratios of two cells in each turn that both were measured in, with the range of these ratios.
    pub(crate) fn by_turns(
        claim: impl Into<String>,
        bound: Bound,
        limit: f64,
        metric: Metric,
        ours: Option<&Cell>,
        theirs: Option<&Cell>,
    ) -> Self {
        let median = |cell: Option<&Cell>| cell.and_then(|cell| cell.median(metric));
        let mut verdict = Self::ratio(claim, bound, limit, metric, median(ours), median(theirs));
        let ratios = ours.zip(theirs).and_then(|(ours, theirs)| ours.ratios_to(theirs, metric));
        verdict.measured = ratios.map(|ratios| ratios.median);
        if let Some(ratios) = ratios {
            verdict.figures += &format!("; turns from {} to {}", unit::digits(ratios.min), unit::digits(ratios.max));
        }
        verdict
    }

    /// The same verdict, judged by the interval of the true ratio: a limit inside of it is undecided.
    pub(crate) fn with_interval(mut self, interval: Option<MedianInterval>) -> Self {
        if let Some(MedianInterval { low, high, values, .. }) = interval {
            self.figures += &format!("; 95 of 100 within {low:.4} to {high:.4}, by {values} pairs");
        }
        self.interval = interval;
        self
    }

    /// A figure that is judged by itself.
    pub(crate) fn figure(claim: impl Into<String>, bound: Bound, limit: f64, measured: Option<f64>) -> Self {
        Self { claim: claim.into(), bound, limit, measured, interval: None, figures: String::new() }
    }

    /// The limit, for people.
    pub(crate) fn target(&self) -> String {
        match self.bound {
            Bound::AtLeast => format!(">= {}", unit::digits(self.limit)),
            Bound::AtMost => format!("<= {}", unit::digits(self.limit)),
            Bound::Report => "-".into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn judges_by_the_bound() {
        let of = |bound, ours, theirs| Verdict::ratio("x", bound, 2.0, Metric::P50Ns, ours, theirs).word();
        assert_eq!(of(Bound::AtLeast, Some(4.0), Some(2.0)), "met");
        assert_eq!(of(Bound::AtLeast, Some(3.9), Some(2.0)), "MISSED");
        assert_eq!(of(Bound::AtMost, Some(4.0), Some(2.0)), "met");
        assert_eq!(of(Bound::AtMost, Some(4.1), Some(2.0)), "MISSED");
        assert_eq!(of(Bound::AtMost, Some(4.1), None), "not measured");
        assert_eq!(of(Bound::AtLeast, Some(4.1), Some(0.0)), "not measured");
        assert_eq!(of(Bound::Report, Some(4.1), Some(1.0)), "reported");
    }

    #[test]
    fn limit_inside_of_the_interval_is_undecided() {
        let word = |limit, ratios: &[f64]| {
            let verdict = Verdict::ratio("x", Bound::AtLeast, limit, Metric::PerSecond, Some(1.0), Some(1.0));
            verdict.with_interval(MedianInterval::of(ratios.iter().copied())).word()
        };
        let ratios = [0.98, 0.99, 1.0, 1.0, 1.01, 1.02];
        assert_eq!(word(0.97, &ratios), "met");
        assert_eq!(word(0.99, &ratios), "undecided");
        assert_eq!(word(1.03, &ratios), "MISSED");
        assert_eq!(word(0.99, &ratios[..5]), "met", "without an interval, the median counts");
    }
}
