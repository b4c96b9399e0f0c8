//! The windows that the host has told of: looked for until they are seen, and kept open.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd as _, OwnedFd};

use partywall_region::pmem::{self, WindowId};
use partywall_region::window::{UNCACHED, Window};

/// A window is known by its id, and whether it is this machine's own.
type Key = (WindowId, bool);

#[derive(Debug)]
struct Known {
    peer: String,
    device: Option<Window>,
    /// Why it is not seen has been told.
    told: bool,
}

/// Windows that were announced, once nothing here has them open any more.
#[derive(Debug, Default)]
pub(crate) struct FormerWindows {
    pub(crate) ids: BTreeSet<WindowId>,
    /// The ids of those that were not found.
    pub(crate) unfound: BTreeSet<WindowId>,
    /// The device numbers of those that were found. A window's owner can change its header, and not these.
    pub(crate) devices: BTreeSet<u64>,
}

/// All of them.
#[derive(Debug, Default)]
pub(crate) struct GuestWindows {
    known: BTreeMap<Key, Known>,
}

impl GuestWindows {
    /// The host says that there is one.
    pub(crate) fn expect(&mut self, id: WindowId, owner: bool, peer: String) {
        self.known.entry((id, owner)).or_insert(Known { peer, device: None, told: false });
    }

    /// Takes them all. No window is open or expected any more.
    pub(crate) fn take(&mut self) -> FormerWindows {
        let mut former = FormerWindows::default();
        for ((id, _), known) in std::mem::take(&mut self.known) {
            former.ids.insert(id);
            match known.device.and_then(|window| rustix::fs::fstat(window.as_fd()).ok()) {
                Some(device) => former.devices.insert(device.st_rdev),
                None => former.unfound.insert(id),
            };
        }
        former
    }

    /// Whether all are there.
    pub(crate) fn all_seen(&self) -> bool {
        self.known.values().all(|known| known.device.is_some())
    }

    /// Looks for those that are not there, and returns those that are now.
    pub(crate) fn look(&mut self) -> Vec<(Key, OwnedFd)> {
        let mut found = Vec::new();
        for (&(id, owner), known) in self.known.iter_mut().filter(|(_, known)| known.device.is_none()) {
            match pmem::find(id, owner) {
                Ok(window) => {
                    let direction = if owner { "to" } else { "from" };
                    tracing::info!(size = window.size(), "the window {direction} {} is there", known.peer);
                    if let Ok(times @ UNCACHED..) = window.slowness() {
                        tracing::warn!(
                            "it is read {times:.0} times slower than memory, so TCP may well be faster: see `partywall doctor`"
                        );
                    }
                    if let Ok(memory) = window.as_fd().try_clone_to_owned() {
                        found.push(((id, owner), memory));
                    }
                    known.device = Some(window);
                }
                Err(error) if !known.told => {
                    known.told = true;
                    tracing::info!(peer = known.peer, %error, "waiting for a window");
                }
                Err(_) => {}
            }
        }
        found
    }

    /// Whether the window is there already, for a host that asks again.
    pub(crate) fn is_seen(&self, id: WindowId, owner: bool) -> bool {
        self.known.get(&(id, owner)).is_some_and(|known| known.device.is_some())
    }

    /// A descriptor for a program.
    pub(crate) fn memory(&self, id: WindowId, owner: bool) -> Option<OwnedFd> {
        self.known.get(&(id, owner))?.device.as_ref()?.as_fd().try_clone_to_owned().ok()
    }
}
