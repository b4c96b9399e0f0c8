//! Giving up the windows, because the machine is to be migrated (protocol G7).
//!
//! ```text
//!   Release --> sessions end, links hang up, directories are revoked
//!           --> programs bring their connections back to TCP and unmap the rings    (looked for in /proc/PID/maps)
//!           --> the devices are removed through sysfs                               (each found by the header of its window)
//!           --> no device of them is left --> Released
//! ```
//!
//! No device is removed while a process may look there ([`removal`]).

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use partywall_region::pmem::{WindowId, dax};

use crate::removal::{self, RemovableDevice};

/// The time for programs to unmap. A program that makes no call does not unmap.
const PATIENCE: Duration = Duration::from_secs(30);
/// Between the revocation of directories and the first look: a thread that has looked at the word has looked at the directory by then.
const GRACE: Duration = Duration::from_millis(200);

/// A release under way.
#[derive(Debug)]
pub(crate) struct Releasing {
    windows: BTreeSet<WindowId>,
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
    pub(crate) fn new(windows: BTreeSet<WindowId>, word: u64) -> Self {
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
        let ours = dax::devices()
            .into_iter()
            .filter(|device| device.header.as_ref().is_some_and(|header| self.windows.contains(&header.id)));
        let found = ours.map(|device| match dax::virtio_device(&device.name) {
            Some(folder) => Ok(RemovableDevice { name: device.name, folder }),
            None => Err(format!("{} is not a virtio-pmem device, and the kernel cannot remove it", device.name)),
        });
        found.collect()
    }

    fn remove(&self, devices: &[RemovableDevice]) -> Result<(), String> {
        devices.iter().try_for_each(RemovableDevice::remove)?;
        match self.devices()?.first() {
            Some(left) => Err(format!("the kernel keeps {}, though it was told to remove it", left.name)),
            None => Ok(()),
        }
    }
}
