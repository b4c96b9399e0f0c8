//! Devices of windows that a migrated machine has brought, and that its present QEMU does not have (protocol G7.15).
//!
//! A machine that is migrated without a release keeps the devices of its windows in its kernel. Where they were, there is nothing, or a new
//! window that QEMU has plugged into the same slot. The kernel shows such a window with the size and the driver of the earlier device. A
//! ghost is known by its PCI registers, which the driver of a device has set and which no new device has.

use std::fs;
use std::io::Read as _;
use std::path::Path;
use std::time::{Duration, Instant};

use partywall_region::pmem::dax;

use crate::removal::{self, RemovableDevice};

/// Answers of a PCI slot without a device.
const ABSENT: u16 = 0xffff;
/// The bits of the command register by which a driver lets its device use memory and answer.
const IN_USE: u16 = 0x6;

/// Between two looks at ghosts that a process maps.
const PAUSE: Duration = Duration::from_secs(1);
/// The time for programs to unmap them. After that the windows of other slots are looked for.
const PATIENCE: Duration = Duration::from_secs(30);
/// Between two looks after that time.
const LATE_PAUSE: Duration = Duration::from_secs(10);

/// The removal of ghosts while windows are looked for.
#[derive(Debug, Default)]
pub(crate) struct GhostHunt {
    /// When a ghost was in the way first, and when it is looked for next.
    kept: Option<(Instant, Instant)>,
    /// Some may have been removed since the kernel has looked for devices.
    has_removed: bool,
}

/// What to do about windows.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum HuntStep {
    /// A ghost may stand for one.
    Wait,
    /// Ghosts were removed: the kernel must look for devices again.
    Removed,
    /// No ghost is there, or one that a process keeps.
    Over,
}

impl GhostHunt {
    /// All windows are there.
    pub(crate) fn end(&mut self) {
        self.kept = None;
    }

    /// Removes the ghosts that no process maps. `word` is the file of the word of revocation.
    pub(crate) fn step(&mut self, word: u64) -> HuntStep {
        self.step_at(Instant::now(), |hunt| {
            let ghosts = ghosts();
            (!ghosts.is_empty()).then(|| hunt.remove(&ghosts, word))
        })
    }

    /// The same at this time. `clear` removes the ghosts, and returns `None` if there are none.
    fn step_at(&mut self, now: Instant, clear: impl FnOnce(&mut Self) -> Option<Result<(), String>>) -> HuntStep {
        let since = self.kept.map_or(now, |(since, _)| since);
        let is_late = now.duration_since(since) >= PATIENCE;
        if self.kept.is_none_or(|(_, next)| now >= next) {
            match clear(self) {
                None => {
                    self.kept = None;
                    return self.over();
                }
                Some(Ok(())) => {
                    self.kept = None;
                    tracing::info!("devices of the host that the machine has left were removed");
                    return self.over();
                }
                Some(Err(why)) => {
                    if self.kept.is_none() {
                        tracing::warn!(
                            why,
                            "devices of the host that the machine has left are in the way of its windows"
                        );
                    }
                    self.kept = Some((since, now + if is_late { LATE_PAUSE } else { PAUSE }));
                }
            }
        }
        if is_late { self.over() } else { HuntStep::Wait }
    }

    fn over(&mut self) -> HuntStep {
        if std::mem::take(&mut self.has_removed) { HuntStep::Removed } else { HuntStep::Over }
    }

    /// Removes as many as the kernel lets it. Fails if one is left.
    fn remove(&mut self, ghosts: &[RemovableDevice], word: u64) -> Result<(), String> {
        let held = removal::holders(ghosts, word).map_err(|error| error.to_string())?;
        if !held.is_empty() {
            return Err(format!("{} maps one", held.join(", ")));
        }
        self.has_removed = true;
        // Each is tried.
        ghosts.iter().map(RemovableDevice::remove).fold(Ok(()), Result::and)
    }
}

fn ghosts() -> Vec<RemovableDevice> {
    let device = |device: dax::DaxDevice| {
        dax::virtio_device(&device.name).map(|folder| RemovableDevice { name: device.name, folder })
    };
    dax::devices().into_iter().filter_map(device).filter(|of| is_ghost(&of.folder)).collect()
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
    fn ghost_that_is_kept_long_is_looked_for_again() {
        let mut hunt = GhostHunt::default();
        let start = Instant::now();
        let kept = |_: &mut GhostHunt| Some(Err("process 7 maps one".to_owned()));
        let unseen = |_: &mut GhostHunt| panic!("it is looked for between two looks");
        assert_eq!(hunt.step_at(start, kept), HuntStep::Wait);
        assert_eq!(hunt.step_at(start, unseen), HuntStep::Wait);
        assert_eq!(hunt.step_at(start + PAUSE, kept), HuntStep::Wait);
        // The windows of other slots are looked for now.
        let late = start + PATIENCE;
        assert_eq!(hunt.step_at(late, kept), HuntStep::Over);
        assert_eq!(hunt.step_at(late + PAUSE, unseen), HuntStep::Over);
        // The process has ended.
        let removed = |hunt: &mut GhostHunt| {
            hunt.has_removed = true;
            Some(Ok(()))
        };
        assert_eq!(hunt.step_at(late + LATE_PAUSE, removed), HuntStep::Removed);
        assert_eq!(hunt.step_at(late + LATE_PAUSE, |_| None), HuntStep::Over);
    }

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
