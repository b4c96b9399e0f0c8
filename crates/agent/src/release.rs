//! Giving up the windows, because the machine is to be migrated (protocol G7).
//!
//! ```text
//!   Release --> sessions end, links hang up, directories are revoked
//!           --> programs bring their connections back to TCP and unmap the rings    (looked for in /proc/PID/maps)
//!           --> the devices are removed through sysfs                               (each found by its device number, see [`of_windows`])
//!           --> no device of them is left --> Released
//! ```
//!
//! No device is removed while a process may look there ([`removal`]).

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use partywall_region::pmem::{WindowId, dax};

use crate::removal::{self, RemovableDevice};
use crate::windows::FormerWindows;

/// The time for programs to unmap. A program that makes no call does not unmap.
const PATIENCE: Duration = Duration::from_secs(30);
/// Between the revocation of directories and the first look: a thread that has looked at the word has looked at the directory by then.
const GRACE: Duration = Duration::from_millis(200);

/// A release under way.
#[derive(Debug)]
pub(crate) struct Releasing {
    windows: FormerWindows,
    /// The file of the word of revocation.
    word: u64,
    since: Instant,
}

/// How a release goes on.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ReleaseStep {
    /// Some process still maps a window.
    Wait,
    /// It has ended: what still holds a window, or nothing.
    End(Option<String>),
}

impl Releasing {
    /// Begins: sessions and links have ended, and nothing here has the windows open any more.
    pub(crate) fn new(windows: FormerWindows, word: u64) -> Self {
        Self { windows, word, since: Instant::now() }
    }

    /// Removes the devices if no process is in the way.
    pub(crate) fn step(&self) -> ReleaseStep {
        let waited = self.since.elapsed();
        if waited < GRACE {
            return ReleaseStep::Wait;
        }
        let devices = match self.devices() {
            Ok(devices) => devices,
            Err(why) => return ReleaseStep::End(Some(why)),
        };
        match removal::holders(&devices, self.word) {
            Ok(held) if held.is_empty() => ReleaseStep::End(self.remove(&devices).err()),
            Ok(_) if waited < PATIENCE => ReleaseStep::Wait,
            Ok(held) => ReleaseStep::End(Some(format!(
                "{} still maps a window and makes no call; end it, or let it run",
                held.join(", ")
            ))),
            Err(error) => ReleaseStep::End(Some(format!(
                "the agent may not see which processes map the windows ({error}); it takes CAP_SYS_PTRACE"
            ))),
        }
    }

    /// The devices that show these windows.
    fn devices(&self) -> Result<Vec<RemovableDevice>, String> {
        let shown = dax::devices().into_iter().map(|device| ShownDevice {
            number: std::fs::metadata(Path::new("/dev").join(&device.name)).map_or(0, |node| node.rdev()),
            id: device.header.map(|header| header.id),
            folder: dax::virtio_device(&device.name),
            name: device.name,
        });
        let removable = of_windows(shown.collect(), &self.windows)?.into_iter().map(|device| match device.folder {
            Some(folder) => Ok(RemovableDevice { name: device.name, folder }),
            None => Err(format!("{} is not a virtio-pmem device, and the kernel cannot remove it", device.name)),
        });
        removable.collect()
    }

    fn remove(&self, devices: &[RemovableDevice]) -> Result<(), String> {
        devices.iter().try_for_each(RemovableDevice::remove)?;
        match self.devices()?.first() {
            Some(left) => Err(format!("the kernel keeps {}, though it was told to remove it", left.name)),
            None => Ok(()),
        }
    }
}

/// A device of the kernel that may show a window.
#[derive(Debug, Clone, PartialEq, Eq)]
struct ShownDevice {
    name: String,
    /// Its device number.
    number: u64,
    /// In the header that it shows now.
    id: Option<WindowId>,
    /// Of its `virtio-pmem` device.
    folder: Option<PathBuf>,
}

/// The devices that show these windows: those that the windows were found in, and those whose headers name one.
///
/// The owner of a window can change its header at any time, so a device is not passed over for its header. Fails if a window was never found, and
/// a `virtio-pmem` device may be it.
fn of_windows(shown: Vec<ShownDevice>, windows: &FormerWindows) -> Result<Vec<ShownDevice>, String> {
    let names = |device: &ShownDevice, ids: &BTreeSet<WindowId>| device.id.is_some_and(|id| ids.contains(&id));
    let is_found = |id: &WindowId| shown.iter().any(|device| device.id == Some(*id));
    let is_missing = !windows.unfound.iter().all(is_found);
    let (ours, others): (Vec<_>, Vec<_>) =
        shown.into_iter().partition(|device| windows.devices.contains(&device.number) || names(device, &windows.ids));
    match others.iter().find(|device| is_missing && device.folder.is_some()) {
        Some(device) => Err(format!(
            "{} may be a window whose header its owner has changed; detach the machine without --for-migration",
            device.name
        )),
        None => Ok(ours),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: WindowId = WindowId([7; 16]);

    fn shown(number: u64, id: Option<WindowId>) -> ShownDevice {
        ShownDevice { name: format!("dax{number}.0"), number, id, folder: Some("/sys/pmem".into()) }
    }

    fn windows(unfound: &[WindowId], devices: &[u64]) -> FormerWindows {
        FormerWindows {
            ids: [ID].into(),
            unfound: unfound.iter().copied().collect(),
            devices: devices.iter().copied().collect(),
        }
    }

    fn names(shown: Vec<ShownDevice>, windows: &FormerWindows) -> Result<Vec<String>, String> {
        Ok(of_windows(shown, windows)?.into_iter().map(|device| device.name).collect())
    }

    #[test]
    fn window_is_released_whatever_its_header_says_by_then() {
        let other = WindowId([8; 16]);
        for id in [Some(ID), Some(other), None] {
            let devices = vec![shown(1, id), shown(2, Some(other)), shown(3, None)];
            assert_eq!(names(devices, &windows(&[], &[1])).unwrap(), ["dax1.0"]);
        }
    }

    #[test]
    fn window_that_was_never_found_may_be_any_unknown_device() {
        let (unfound, known) = (windows(&[ID], &[]), shown(1, Some(ID)));
        assert_eq!(names(vec![known, shown(2, None)], &unfound).unwrap(), ["dax1.0"], "its header names it now");
        assert!(names(vec![shown(2, None)], &unfound).unwrap_err().contains("dax2.0"));
        let foreign = ShownDevice { folder: None, ..shown(2, None) };
        assert_eq!(names(vec![foreign], &unfound).unwrap(), [""; 0], "no device of a window");
    }
}
