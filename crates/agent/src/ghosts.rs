//! Devices of windows that a migrated machine has brought, and that its present QEMU does not have (protocol G7.15).
//!
//! A machine that is migrated without a release keeps the devices of its windows in its kernel. Where they were, there is nothing, or a new
//! window that QEMU has plugged into the same slot. The kernel shows such a window with the size and the driver of the earlier device. A
//! ghost is known by its PCI registers, which the driver of a device has set and which no new device has.

use std::fs;
use std::io::Read as _;
use std::path::Path;

use partywall_region::pmem::dax;

use crate::removal::{self, RemovableDevice};

/// Answers of a PCI slot without a device.
const ABSENT: u16 = 0xffff;
/// The bits of the command register by which a driver lets its device use memory and answer.
const IN_USE: u16 = 0x6;

/// What has become of the ghosts of this machine.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum GhostHunt {
    /// There is none.
    None,
    /// They were removed, and the kernel has looked for devices again.
    Removed,
    /// They are still there, and why.
    Kept(String),
}

/// Removes all ghosts, unless a process maps one. `word` is the file of the word of revocation.
pub(crate) fn remove(word: u64) -> GhostHunt {
    let device = |device: dax::DaxDevice| {
        dax::virtio_device(&device.name).map(|folder| RemovableDevice { name: device.name, folder })
    };
    let ghosts: Vec<_> = dax::devices().into_iter().filter_map(device).filter(|of| is_ghost(&of.folder)).collect();
    if ghosts.is_empty() {
        return GhostHunt::None;
    }
    match removal::holders(&ghosts, word) {
        Ok(held) if held.is_empty() => {}
        Ok(held) => {
            return GhostHunt::Kept(format!("{} maps a window of the host that the machine left", held.join(", ")));
        }
        Err(error) => return GhostHunt::Kept(error.to_string()),
    }
    let removed = ghosts.iter().try_for_each(RemovableDevice::remove);
    match removed.and_then(|()| removal::rescan().map_err(|error| error.to_string())) {
        Ok(()) => GhostHunt::Removed,
        Err(why) => GhostHunt::Kept(why),
    }
}

/// Whether the PCI device that the kernel's driver has set up is not there any more, or is another one.
fn is_ghost(folder: &Path) -> bool {
    if !folder.join("driver").exists() {
        return false;
    }
    // Registers 0 and 4, which the kernel reads from the device.
    let mut registers = [0; 6];
    let read = fs::File::open(folder.join("config")).and_then(|mut config| config.read_exact(&mut registers));
    if read.is_err() {
        return false;
    }
    let [vendor, command] = [[registers[0], registers[1]], [registers[4], registers[5]]].map(u16::from_le_bytes);
    vendor == ABSENT || command & IN_USE == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ghost_is_known_by_registers_that_no_driver_has_set() {
        let folder = tempfile::tempdir().unwrap();
        let config = |vendor: u16, command: u16| {
            let registers = [vendor, 0x105b, command, 0x10].map(u16::to_le_bytes).concat();
            fs::write(folder.path().join("config"), registers).unwrap();
        };
        config(ABSENT, ABSENT);
        assert!(!is_ghost(folder.path()), "no driver has set it up");
        fs::write(folder.path().join("driver"), "").unwrap();
        assert!(is_ghost(folder.path()), "the slot is empty");
        for (command, expected) in [(0x0507, false), (0x0506, false), (0, true), (0x0400, true)] {
            config(0x1af4, command);
            assert_eq!(is_ghost(folder.path()), expected, "{command:#x}");
        }
        fs::write(folder.path().join("config"), [0; 3]).unwrap();
        assert!(!is_ghost(folder.path()), "the kernel does not say");
    }
}
