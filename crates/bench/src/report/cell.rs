//! One measured combination of mechanism and settings, with all its runs.

use std::{collections::BTreeMap, fmt};

use serde::{Deserialize, Serialize};

use crate::{
    mechanism::Mechanism,
    report::{
        metric::Metric,
        stats::{MedianInterval, RunSummary},
        unit,
    },
    task::Figures,
};

/// One setting of a measurement: a number (mostly bytes) or a word.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(untagged)]
pub(crate) enum Setting {
    /// A count, or bytes.
    Number(u64),
    /// A choice.
    Word(String),
}

impl From<u64> for Setting {
    fn from(number: u64) -> Self {
        Self::Number(number)
    }
}

impl From<&str> for Setting {
    fn from(word: &str) -> Self {
        Self::Word(word.into())
    }
}

/// All settings of a measurement that tell it from its neighbours, by name.
pub(crate) type Settings = BTreeMap<String, Setting>;

/// Why a cell has no figures.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Problem {
    /// It cannot be done on this machine.
    Unavailable(String),
    /// It should work and did not.
    Failed(String),
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unavailable(why) => write!(f, "not measured: {why}"),
            Self::Failed(why) => write!(f, "FAILED: {why}"),
        }
    }
}

/// The identity of a cell in a report.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(crate) struct Key {
    /// The subcommand that it belongs to.
    pub(crate) experiment: String,
    /// The mechanism that was measured.
    pub(crate) mechanism: Mechanism,
    /// The settings of the measurement.
    pub(crate) settings: Settings,
}

impl Key {
    /// Without settings yet.
    pub(crate) fn new(experiment: &str, mechanism: Mechanism) -> Self {
        Self { experiment: experiment.into(), mechanism, settings: Settings::new() }
    }

    /// With one more setting.
    pub(crate) fn with(mut self, name: &str, value: impl Into<Setting>) -> Self {
        self.settings.insert(name.into(), value.into());
        self
    }

    /// A numeric setting.
    pub(crate) fn number(&self, name: &str) -> Option<u64> {
        match self.settings.get(name)? {
            Setting::Number(number) => Some(*number),
            Setting::Word(_) => None,
        }
    }

    /// A setting that is a word.
    pub(crate) fn word(&self, name: &str) -> Option<&str> {
        match self.settings.get(name)? {
            Setting::Word(word) => Some(word),
            Setting::Number(_) => None,
        }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.experiment, self.mechanism)?;
        for (name, value) in &self.settings {
            match value {
                Setting::Number(n) if is_bytes(name) => write!(f, " {name}={}", unit::bytes(*n).replace(' ', ""))?,
                Setting::Number(n) => write!(f, " {name}={n}")?,
                Setting::Word(w) => write!(f, " {name}={w}")?,
            }
        }
        Ok(())
    }
}

/// Whether a numeric setting of this name counts bytes.
fn is_bytes(name: &str) -> bool {
    matches!(name, "message" | "request" | "total" | "ring" | "rate")
}

/// A key and what was measured under it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Cell {
    /// The mechanism and the settings.
    #[serde(flatten)]
    pub(crate) key: Key,
    /// The figures of every run, in order.
    pub(crate) runs: Vec<Figures>,
    /// Why there are none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) problem: Option<Problem>,
}

impl Cell {
    /// A cell without figures.
    pub(crate) fn new(key: Key) -> Self {
        Self { key, runs: Vec::new(), problem: None }
    }

    /// Median and range of one quantity over the runs.
    pub(crate) fn summary(&self, metric: Metric) -> Option<RunSummary> {
        RunSummary::of(self.runs.iter().filter_map(|run| run.get(&metric).copied()))
    }

    /// The median alone.
    pub(crate) fn median(&self, metric: Metric) -> Option<f64> {
        self.summary(metric).map(|s| s.median)
    }

    /// This cell's value for each value of another's that was measured in the same turn. A machine that gets slower or faster between two
    /// turns moves both values of a turn, so these ratios lie closer together than the values do.
    pub(crate) fn ratios_to(&self, other: &Self, metric: Metric) -> Option<RunSummary> {
        RunSummary::of(self.ratios_by_turn(other, metric))
    }

    /// The median of these ratios, with the interval of the true one.
    pub(crate) fn interval_to(&self, other: &Self, metric: Metric) -> Option<MedianInterval> {
        MedianInterval::of(self.ratios_by_turn(other, metric))
    }

    fn ratios_by_turn(&self, other: &Self, metric: Metric) -> impl Iterator<Item = f64> {
        self.runs.iter().zip(&other.runs).filter_map(move |(ours, theirs)| {
            let theirs = theirs.get(&metric).copied().filter(|&theirs| theirs > 0.0)?;
            Some(ours.get(&metric)? / theirs)
        })
    }

    /// Every quantity that was measured, in a fixed order.
    pub(crate) fn metrics(&self) -> Vec<Metric> {
        let mut all: Vec<Metric> = self.runs.iter().flat_map(|run| run.keys().copied()).collect();
        all.sort_unstable();
        all.dedup();
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_compare_values_of_the_same_turn() {
        let cell = |values: &[f64]| Cell {
            runs: values.iter().map(|&value| Figures::from([(Metric::P50Ns, value)])).collect(),
            ..Cell::new(Key::new("x", Mechanism::Tcp))
        };
        // The machine is ten times slower in the middle turn.
        let (ours, theirs) = (cell(&[2.0, 30.0, 2.0]), cell(&[1.0, 10.0, 1.0]));
        let ratios = ours.ratios_to(&theirs, Metric::P50Ns).unwrap();
        assert_eq!((ratios.median, ratios.min, ratios.max, ratios.runs), (2.0, 2.0, 3.0, 3));
        assert_eq!(ours.ratios_to(&cell(&[1.0]), Metric::P50Ns).unwrap().runs, 1, "a turn that one of them lacks");
        assert_eq!(ours.ratios_to(&cell(&[0.0]), Metric::P50Ns), None);
        assert_eq!(ours.ratios_to(&theirs, Metric::BytesPerSecond), None);
    }
}
