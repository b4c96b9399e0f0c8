//! The record of a tap device that a switch has made, in the switch's folder. By it, the next process of the switch knows the device again
//! and may remove it. A device without a record belongs to the operator.
//!
//! Each network namespace has its own names and indices, and both begin again when the host boots. So a record also names these two.

use crate::VhostError;
use std::path::{Path, PathBuf};

/// What a record has in place of a network namespace that could not be looked at.
const UNKNOWN: &str = "unknown";

/// The record of one device.
#[derive(Debug)]
pub(crate) struct TapRecord {
    path: PathBuf,
    /// The network namespace of this process; `None` where it is unknown, and no record is believed.
    namespace: Option<String>,
}

/// The device that a record is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RecordedDevice {
    /// There is no record since the host has booted.
    Absent,
    /// A device of another network namespace.
    Elsewhere,
    /// A device of a network namespace that cannot be compared with this one: an earlier version wrote the record, or a namespace could
    /// not be looked at.
    Unknown,
    /// The device with this index in this network namespace.
    Here(u32),
}

impl TapRecord {
    /// The record of the device of this name, whether it is there or not.
    pub(crate) fn new(folder: &Path, name: &str, namespace: Option<String>) -> Self {
        Self { path: folder.join(format!("{name}.tap")), namespace }
    }

    /// Reads it.
    pub(crate) fn find(&self) -> RecordedDevice {
        let text = std::fs::read_to_string(&self.path).unwrap_or_default();
        let words: Vec<&str> = text.split_whitespace().collect();
        match words[..] {
            [index, namespace, boot] if boot == boot_id() => match (index.parse(), self.namespace.as_deref()) {
                (Ok(index), Some(own)) if own == namespace => RecordedDevice::Here(index),
                (Ok(_), Some(_)) if namespace != UNKNOWN => RecordedDevice::Elsewhere,
                _ => RecordedDevice::Unknown,
            },
            // Earlier versions wrote no namespace.
            [_, boot] if boot == boot_id() => RecordedDevice::Unknown,
            _ => RecordedDevice::Absent,
        }
    }

    /// Notes that the switch has made the device with this index.
    pub(crate) fn write(&self, index: u32) -> Result<(), VhostError> {
        let namespace = self.namespace.as_deref().unwrap_or(UNKNOWN);
        let text = format!("{index} {namespace} {}\n", boot_id());
        std::fs::write(&self.path, text).map_err(VhostError::file("write", &self.path))
    }

    pub(crate) fn remove(&self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

fn boot_id() -> String {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    text.trim().to_owned()
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    use super::*;
    use RecordedDevice::{Absent, Elsewhere, Here, Unknown};

    fn record(folder: &Path, name: &str, namespace: &str) -> TapRecord {
        TapRecord::new(folder, name, Some(namespace.to_owned()))
    }

    #[test]
    fn record_is_of_one_device_and_of_one_boot() {
        let folder = tempfile::tempdir().unwrap();
        let own = record(folder.path(), "up0", "4:26:1");
        assert_eq!(own.find(), Absent);
        own.write(7).unwrap();
        assert_eq!(own.find(), Here(7));
        assert_eq!(record(folder.path(), "up1", "4:26:1").find(), Absent);
        for text in ["7 4:26:1 another-boot\n", "7 another-boot\n", "7", ""] {
            std::fs::write(folder.path().join("up0.tap"), text).unwrap();
            assert_eq!(own.find(), Absent, "{text}");
        }
        own.remove();
        assert_eq!(own.find(), Absent);
    }

    #[test]
    fn record_of_another_or_no_namespace_is_not_believed() {
        let folder = tempfile::tempdir().unwrap();
        record(folder.path(), "up0", "4:26:1").write(7).unwrap();
        let of = |namespace: Option<&str>| TapRecord::new(folder.path(), "up0", namespace.map(str::to_owned));
        assert_eq!(of(Some("4:26:1")).find(), Here(7));
        assert_eq!([of(Some("4:26:2")).find(), of(None).find()], [Elsewhere, Unknown]);
        of(None).write(7).unwrap();
        assert_eq!([of(None).find(), of(Some("4:26:1")).find()], [Unknown, Unknown]);
        // As an earlier version wrote it.
        std::fs::write(folder.path().join("up0.tap"), format!("7 {}\n", boot_id())).unwrap();
        assert_eq!(of(Some("4:26:1")).find(), Unknown);
    }
}
