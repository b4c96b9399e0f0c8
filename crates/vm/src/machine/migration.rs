//! Live migration: whether a machine's windows allow it, and QEMU's part of it.

use super::{Machine, WindowLayout, window};
use crate::error::VmError;
use crate::facts::{Facts, WindowObstacle};
use crate::qmp::QmpError;
use crate::window::WindowRole;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// Between two questions for the downtime.
const LOOK: Duration = Duration::from_millis(5);

/// How far a migration has come, as QEMU reports it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MigrationProgress {
    /// `setup`, `active`, `completed`, `failed`, `cancelled` and so on; empty before the first migration.
    pub status: String,
    /// Bytes of memory that were sent.
    pub sent: u64,
    /// Bytes of memory that are left to send.
    pub left: u64,
    /// Milliseconds for which the machine did not run; `None` while QEMU has not computed that.
    pub downtime_ms: Option<u64>,
    /// Why it failed, in QEMU's words.
    pub why: Option<String>,
}

impl MigrationProgress {
    /// Whether the machine may still leave.
    pub fn is_under_way(&self) -> bool {
        self.end().is_none()
    }

    /// Whether it has ended, and if so, whether the machine has arrived.
    pub fn end(&self) -> Option<bool> {
        match self.status.as_str() {
            "completed" => Some(true),
            "failed" | "cancelled" | "" => Some(false),
            _ => None,
        }
    }
}

impl Facts {
    /// The obstacle to windows of `size` bytes that are all `virtio-pmem`.
    pub fn migratable_obstacle(&self, size: u64) -> Option<WindowObstacle> {
        self.obstacle(size, WindowRole::Owner)
    }
}

impl Machine {
    /// The reason why Partywall's devices prevent a migration of this machine; `None` if they do not.
    ///
    /// QEMU copies the memory of an `nvdimm` and of an ivshmem device that is its own master, and overwrites the destination's with
    /// it. It refuses other ivshmem devices.
    pub fn migration_obstacle(&mut self) -> Result<Option<String>, VmError> {
        let advice = "detach the machine, start it again and attach it with --migratable";
        if self.qmp.memory_devices()?.iter().any(|device| device.slot && window(device).is_some()) {
            return Ok(Some(format!("it has windows as nvdimm, which QEMU would copy; {advice}")));
        }
        if !self.devices()?.is_empty() {
            return Ok(Some(format!("it has windows as PCI devices (ivshmem), which QEMU does not migrate; {advice}")));
        }
        if !self.doorbells()?.is_empty() {
            return Ok(Some(format!("it has a doorbell device, which does not survive a migration; {advice}")));
        }
        Ok(None)
    }

    /// Whether the machine has left this QEMU for another.
    ///
    /// Between the end of a migration and the state `postmigrate`, QEMU reports `finish-migrate`. A status of `completed` alone does not
    /// count: QEMU also reports it for a machine that has arrived.
    pub fn has_migrated_away(&mut self) -> Result<bool, VmError> {
        match self.facts()?.status.as_str() {
            "postmigrate" => Ok(true),
            "finish-migrate" => Ok(self.migration_progress()?.end() == Some(true)),
            _ => Ok(false),
        }
    }

    /// Begins to migrate it to `uri`, as `tcp:HOST:PORT` or `unix:PATH`.
    pub fn begin_migration(&mut self, uri: &str) -> Result<(), VmError> {
        Ok(self.qmp.execute("migrate", json!({ "uri": uri })).map(drop)?)
    }

    /// Ends a migration that is under way. The machine stays.
    pub fn cancel_migration(&mut self) -> Result<(), VmError> {
        Ok(self.qmp.execute("migrate_cancel", json!({})).map(drop)?)
    }

    /// How far the migration has come.
    pub fn migration_progress(&mut self) -> Result<MigrationProgress, VmError> {
        let answer = self.qmp.execute("query-migrate", json!({}))?;
        if !answer.is_object() {
            return Err(QmpError::Answer { command: "query-migrate" }.into());
        }
        let number = |part: &str| answer["ram"][part].as_u64().unwrap_or(0);
        Ok(MigrationProgress {
            status: answer["status"].as_str().unwrap_or_default().to_owned(),
            sent: number("transferred"),
            left: number("remaining"),
            downtime_ms: downtime(&answer),
            why: answer["error-desc"].as_str().map(str::to_owned),
        })
    }

    /// Asks for the downtime of a migration that has completed, until QEMU has computed it, for at most `limit`.
    ///
    /// The machine has arrived, so a monitor that fails here is no failure of the migration: the downtime stays unknown.
    pub fn await_downtime(&mut self, mut done: MigrationProgress, limit: Duration) -> MigrationProgress {
        let start = Instant::now();
        while done.downtime_ms.is_none() && start.elapsed() < limit {
            std::thread::sleep(LOOK);
            match self.migration_progress() {
                Ok(progress) if progress.end() == Some(true) => done = progress,
                _ => break,
            }
        }
        done
    }

    /// The kind of devices that its windows are.
    pub fn layout(&self) -> WindowLayout {
        self.layout
    }
}

/// The downtime in an answer to `query-migrate`, if QEMU has computed it.
///
/// QEMU 7.2 first sets the status to `completed` and then takes its big lock, under which it computes the downtime and the total time.
/// An answer in between has 0 for both. Later releases (`migration_completion_end`) do all of this under the lock. A total time says
/// that the downtime beside it has been computed, so 0 is then a downtime of less than a millisecond.
fn downtime(answer: &Value) -> Option<u64> {
    let downtime = answer["downtime"].as_u64()?;
    (downtime > 0 || answer["total-time"].as_u64() > Some(0)).then_some(downtime)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn downtime_without_total_time_is_unknown() {
        for (answer, known) in [
            (json!({ "status": "active", "total-time": 40, "expected-downtime": 300 }), None),
            (json!({ "status": "completed" }), None),
            (json!({ "status": "completed", "total-time": 0, "downtime": 0 }), None),
            (json!({ "status": "completed", "downtime": 182 }), Some(182)),
            (json!({ "status": "completed", "total-time": 1002, "downtime": 302 }), Some(302)),
            (json!({ "status": "completed", "total-time": 1002, "downtime": 0 }), Some(0)),
        ] {
            assert_eq!(downtime(&answer), known, "{answer}");
        }
    }

    #[test]
    fn migration_ends_with_success_failure_or_cancel() {
        let progress =
            |status: &str| MigrationProgress { status: status.into(), sent: 0, left: 0, downtime_ms: None, why: None };
        for (status, end) in [
            ("setup", None),
            ("active", None),
            ("device", None),
            ("completed", Some(true)),
            ("failed", Some(false)),
            ("cancelled", Some(false)),
        ] {
            assert_eq!(progress(status).end(), end, "{status}");
        }
    }
}
