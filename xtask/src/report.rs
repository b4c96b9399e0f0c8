//! The result of a check, and its output.

use std::fmt;

/// One thing that is wrong, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Finding {
    /// `file:line`, or the name of a crate.
    pub(crate) place: String,
    /// The fault, and the remedy.
    pub(crate) what: String,
}

impl Finding {
    pub(crate) fn new(place: impl Into<String>, what: impl Into<String>) -> Self {
        Finding { place: place.into(), what: what.into() }
    }
}

/// The outcome of one check.
#[derive(Clone, Debug, Default)]
pub(crate) struct Report {
    /// The check, as given on the command line.
    pub(crate) check: &'static str,
    /// The subject of the check, in a few words.
    pub(crate) looked_at: String,
    /// Worth knowing, but not wrong.
    pub(crate) notes: Vec<String>,
    /// The faults.
    pub(crate) findings: Vec<Finding>,
}

impl Report {
    pub(crate) fn is_clean(&self) -> bool {
        self.findings.is_empty()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for note in &self.notes {
            writeln!(f, "  {note}")?;
        }
        for finding in &self.findings {
            writeln!(f, "error: {}: {}", finding.place, finding.what)?;
        }
        let verdict = match self.findings.len() {
            0 => "ok".to_owned(),
            1 => "1 finding".to_owned(),
            n => format!("{n} findings"),
        };
        writeln!(f, "{}: {}: {verdict}", self.check, self.looked_at)
    }
}
