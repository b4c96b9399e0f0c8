//! One finding, and all of them together.

use std::io::IsTerminal;

use serde::Serialize;

/// How good a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum FindingStatus {
    /// As it should be.
    Ok,
    /// Something is slower, smaller or absent.
    Warn,
    /// Partywall cannot work like this.
    Fail,
}

/// One finding.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Check {
    pub(super) area: &'static str,
    pub(super) name: &'static str,
    pub(super) status: FindingStatus,
    /// The fact that was found.
    pub(super) found: String,
    /// The consequence for Partywall.
    pub(super) means: &'static str,
    /// The remedy, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) remedy: Option<String>,
}

impl Check {
    /// A finding that is as it should be, until [`Check::warn`] or [`Check::fail`] says otherwise.
    pub(super) fn ok(area: &'static str, name: &'static str, means: &'static str, found: impl Into<String>) -> Self {
        Self { area, name, status: FindingStatus::Ok, found: found.into(), means, remedy: None }
    }

    pub(super) fn warn(self, remedy: impl Into<String>) -> Self {
        Self { status: FindingStatus::Warn, remedy: Some(remedy.into()), ..self }
    }

    pub(super) fn fail(self, remedy: impl Into<String>) -> Self {
        Self { status: FindingStatus::Fail, remedy: Some(remedy.into()), ..self }
    }
}

/// All findings.
#[derive(Debug, Serialize)]
pub(super) struct DoctorReport {
    version: &'static str,
    checks: Vec<Check>,
    ok: usize,
    warn: usize,
    fail: usize,
}

impl DoctorReport {
    pub(super) fn of(checks: Vec<Check>) -> Self {
        let count = |status| checks.iter().filter(|c| c.status == status).count();
        let (ok, warn, fail) = (count(FindingStatus::Ok), count(FindingStatus::Warn), count(FindingStatus::Fail));
        Self { version: env!("CARGO_PKG_VERSION"), checks, ok, warn, fail }
    }

    /// How many things are needed and missing.
    pub(super) fn failed(&self) -> usize {
        self.fail
    }

    /// A line each; with meaning and remedy where there is something to do.
    pub(super) fn to_text(&self) -> String {
        let colour = std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
        let width = self.checks.iter().map(|c| c.name.len()).max().unwrap_or(0);
        let mut lines = Vec::new();
        let mut area = "";
        for check in &self.checks {
            if check.area != area {
                area = check.area;
                lines.push(format!("{}{area}", if lines.is_empty() { "" } else { "\n" }));
            }
            lines.push(format!("  {} {:width$}  {}", mark(check.status, colour), check.name, check.found));
            if check.status != FindingStatus::Ok {
                lines.push(format!("       {:width$}  {}", "", check.means));
            }
            if let Some(remedy) = &check.remedy {
                lines.push(format!("       {:width$}  do: {}", "", remedy.replace('\n', "\n    ")));
            }
        }
        lines.push(format!("\n{} ok, {} to consider, {} missing", self.ok, self.warn, self.fail));
        lines.join("\n")
    }
}

fn mark(status: FindingStatus, colour: bool) -> &'static str {
    match (status, colour) {
        (FindingStatus::Ok, false) => "ok  ",
        (FindingStatus::Warn, false) => "warn",
        (FindingStatus::Fail, false) => "FAIL",
        (FindingStatus::Ok, true) => "\x1b[32mok\x1b[0m  ",
        (FindingStatus::Warn, true) => "\x1b[33mwarn\x1b[0m",
        (FindingStatus::Fail, true) => "\x1b[31;1mFAIL\x1b[0m",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summary_counts_findings_and_names_remedies() {
        let check = || Check::ok("memory", "seals", "peers cannot trust memory without", "none");
        let report = DoctorReport::of(vec![check(), check().warn("use them"), check().fail("get a kernel")]);
        assert_eq!((report.ok, report.warn, report.fail), (1, 1, 1));
        let text = report.to_text();
        assert!(text.contains("do: get a kernel") && text.contains("FAIL"), "{text}");
        assert_eq!(text.matches("memory").count(), 3, "the heading once, the meaning twice:\n{text}");
    }
}
