//! The record of a tap device that a switch has made, in the switch's folder. By it, the next process of the switch knows the device again
//! and may remove it. A device without a record belongs to the operator.

use crate::VhostError;
use std::path::{Path, PathBuf};

/// The record of one device.
#[derive(Debug)]
pub(crate) struct TapRecord(PathBuf);

impl TapRecord {
    /// The record of the device of this name, whether it is there or not.
    pub(crate) fn new(folder: &Path, name: &str) -> Self {
        Self(folder.join(format!("{name}.tap")))
    }

    /// Whether there is a record of any device of this name, since the host has booted.
    pub(crate) fn exists(&self) -> bool {
        self.text().is_some_and(|text| text.ends_with(&boot_id()))
    }

    /// Whether it is of the device with this index.
    pub(crate) fn is_of(&self, index: u32) -> bool {
        self.text().as_deref() == Some(&*content(index))
    }

    /// Notes that the switch has made the device with this index.
    pub(crate) fn write(&self, index: u32) -> Result<(), VhostError> {
        std::fs::write(&self.0, content(index)).map_err(VhostError::file("write", &self.0))
    }

    pub(crate) fn remove(&self) {
        let _ = std::fs::remove_file(&self.0);
    }

    fn text(&self) -> Option<String> {
        std::fs::read_to_string(&self.0).ok()
    }
}

/// Indices of devices begin again when the host boots.
fn content(index: u32) -> String {
    format!("{index} {}", boot_id())
}

fn boot_id() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default()
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    use super::*;

    #[test]
    fn record_is_of_one_device_and_of_one_boot() {
        let folder = tempfile::tempdir().unwrap();
        let record = TapRecord::new(folder.path(), "up0");
        assert!(!record.exists() && !record.is_of(7));
        record.write(7).unwrap();
        assert!(record.exists() && record.is_of(7) && !record.is_of(70));
        assert!(!TapRecord::new(folder.path(), "up1").exists());
        std::fs::write(folder.path().join("up0.tap"), "7 another boot\n").unwrap();
        assert!(!record.exists() && !record.is_of(7));
        record.remove();
        assert!(!record.exists());
    }
}
