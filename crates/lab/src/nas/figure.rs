//! What a run of a load has measured.

use std::fmt;

/// What a figure counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NasUnit {
    /// Millions of bytes a second.
    MegabytesPerSecond,
    /// Transactions a minute.
    PerMinute,
    /// Milliseconds: less is better.
    Milliseconds,
}

impl fmt::Display for NasUnit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::MegabytesPerSecond => "MB/s",
            Self::PerMinute => "1/min",
            Self::Milliseconds => "ms",
        })
    }
}

/// A figure of a load's run.
#[derive(Debug, Clone, PartialEq)]
pub struct NasFigure {
    /// What was measured.
    pub name: String,
    /// The unit of its value.
    pub unit: NasUnit,
    /// Its value.
    pub value: f64,
}
