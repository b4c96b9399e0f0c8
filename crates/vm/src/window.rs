//! A window as a device of a machine.

use partywall_region::pmem::{WindowFile, WindowId};
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

/// The side of a window that a machine is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum WindowRole {
    /// It writes.
    Owner,
    /// It reads; the hypervisor drops what it writes.
    Peer,
}

impl fmt::Display for WindowRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Owner => "owner",
            Self::Peer => "peer",
        })
    }
}

/// A window that is to be plugged in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WindowDevice {
    /// The window to plug in.
    pub id: WindowId,
    /// Where this process can open its file, which it gives to QEMU.
    pub path: PathBuf,
    /// The file's size.
    pub size: u64,
}

impl WindowDevice {
    /// A window whose file this process holds; it is to be plugged in while it does.
    pub fn of(file: &WindowFile) -> Self {
        Self { id: file.id(), path: file.path(), size: file.size() }
    }
}

/// A window that is plugged in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PluggedWindow {
    /// The window that is plugged in.
    pub id: WindowId,
    /// The side of the window that this machine has.
    pub role: WindowRole,
    /// The file's size.
    pub size: u64,
    /// Where the guest sees it.
    pub address: u64,
    /// How long it took the host; `None` if it was there before.
    pub took: Option<Duration>,
}

/// The device's name in QEMU. The memory behind it has the same with another ending.
pub(crate) fn device_name(id: WindowId, role: WindowRole) -> String {
    format!("pw-{role}-{id}")
}

/// The name of the memory behind a device.
pub(crate) fn memory_name(id: WindowId, role: WindowRole) -> String {
    format!("{}-memory", device_name(id, role))
}

/// Whether memory of this name is a window's.
pub(crate) fn is_memory(name: &str) -> bool {
    name.strip_suffix("-memory").is_some_and(|device| parse_name(device).is_some())
}

/// The window and the role in a device's name; `None` for a device that is not Partywall's.
pub(crate) fn parse_name(name: &str) -> Option<(WindowId, WindowRole)> {
    let (role, id) = name.strip_prefix("pw-")?.split_once('-')?;
    let role = [WindowRole::Owner, WindowRole::Peer].into_iter().find(|r| r.to_string() == role)?;
    Some((id.parse().ok()?, role))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_name_parses_back_to_its_parts() {
        for role in [WindowRole::Owner, WindowRole::Peer] {
            let id = WindowId([0x5a; 16]);
            assert_eq!(parse_name(&device_name(id, role)), Some((id, role)));
            assert_eq!(parse_name(&memory_name(id, role)), None);
        }
        assert_eq!(parse_name("dimm1"), None);
        assert_eq!(parse_name("pw-owner-12"), None);
    }
}
