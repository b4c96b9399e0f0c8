//! Faults that a test wants: errors in place of answers, and answers that take long.

use super::request::{DiskOperation, DiskRequest, SECTOR};
use std::str::FromStr;
use std::time::Duration;

/// The faults to inject.
#[derive(Debug, Clone, Default)]
pub struct FaultPlan {
    /// Requests that fail.
    pub errors: Vec<FaultRule>,
    /// How long each request takes at least.
    pub delay: Duration,
}

impl FaultPlan {
    /// Whether a request fails.
    pub fn fails(&self, request: &DiskRequest) -> bool {
        self.errors.iter().any(|rule| rule.matches(request))
    }
}

/// Requests that fail: of one kind, and if they touch one of these sectors.
///
/// ```
/// use partywall_vhost::disk::FaultRule;
///
/// let rule: FaultRule = "write:2048-4095".parse().unwrap();
/// assert!("read".parse::<FaultRule>().is_ok() && "write:9-8".parse::<FaultRule>().is_err());
/// # let _ = rule;
/// ```
#[derive(Debug, Clone)]
pub struct FaultRule {
    kind: &'static str,
    first: u64,
    last: u64,
}

/// Names of the kinds, as users write them.
const KINDS: [&str; 5] = ["read", "write", "flush", "discard", "write-zeroes"];

fn name(operation: DiskOperation) -> &'static str {
    match operation {
        DiskOperation::Read => "read",
        DiskOperation::Write => "write",
        DiskOperation::Flush => "flush",
        DiskOperation::Discard => "discard",
        DiskOperation::WriteZeroes { .. } => "write-zeroes",
        DiskOperation::Identify => "identify",
    }
}

impl FaultRule {
    fn matches(&self, request: &DiskRequest) -> bool {
        let (first, last) = (request.offset / SECTOR, (request.offset + request.length.max(1) - 1) / SECTOR);
        name(request.operation) == self.kind && first <= self.last && last >= self.first
    }
}

impl FromStr for FaultRule {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (kind, sectors) = text.split_once(':').unwrap_or((text, ""));
        let known = KINDS.iter().find(|known| **known == kind);
        let kind = known.copied().ok_or_else(|| format!("write one of {}", KINDS.join(", ")))?;
        if sectors.is_empty() {
            return Ok(Self { kind, first: 0, last: u64::MAX });
        }
        let (first, last) = sectors.split_once('-').unwrap_or((sectors, sectors));
        match (first.parse(), last.parse()) {
            (Ok(first), Ok(last)) if first <= last => Ok(Self { kind, first, last }),
            _ => Err("write sectors as FIRST-LAST".to_owned()),
        }
    }
}
