//! Memory of PCI devices in a guest: QEMU's ivshmem, for machines that cannot take windows as memory.
//!
//! ```text
//!   /sys/bus/pci/devices/0000:00:05.0/   vendor 0x1af4, device 0x1110
//!        resource2      the shared memory: a whole window's file, from its first byte
//! ```
//!
//! The host shows the file to its owner writable and to the peer read-only, so the hypervisor enforces who may write it, as with memory
//! devices. A device of `ivshmem-doorbell`'s (see `partywall ivshmem-server`) has no owner: every machine with the device can write all
//! of it.
//!
//! It may be mapped uncached, and then is many times slower than a window should be ([`Window::slowness`] tells). There is
//! also `resource2_wc`, which is written faster; but stores to it may be seen in another order than they were made, which rings cannot
//! bear. And a mapping is **not taken away when the device is unplugged**: later writes go to the device that is plugged in there next.

use crate::RegionError;
use crate::error::FindError;
use crate::mapping::Mapping;
use crate::window::Window;
use partywall_protocol::doorbell;
use partywall_protocol::window::{DATA_OFFSET, TRIAL_OFFSET, WindowHeader, WindowId};
use partywall_shm::corrupt::Corrupt;
use partywall_shm::layout::{Geometry, PAGE};
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{FileType, Mode, OFlags};
use std::fs;
use std::path::{Path, PathBuf};

/// Where the kernel lists PCI devices.
const DEVICES: &str = "/sys/bus/pci/devices";
/// QEMU's ivshmem: vendor and device.
const IVSHMEM: [(&str, &str); 2] = [("vendor", "0x1af4"), ("device", "0x1110")];
/// The resource with the shared memory.
const RESOURCE: &str = "resource2";
/// The file system in which such files are.
const SYSFS_MAGIC: i64 = 0x6265_6572;

/// A PCI device with shared memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BarDevice {
    /// Its address on the bus, as `0000:00:05.0`.
    pub name: String,
    /// Bytes of shared memory; 0 if this kernel has found no addresses for it.
    pub size: u64,
    folder: PathBuf,
}

impl BarDevice {
    /// The device's folder in sysfs.
    pub fn folder(&self) -> &Path {
        &self.folder
    }
}

/// Every such device of this machine.
pub fn devices() -> Vec<BarDevice> {
    devices_in(Path::new(DEVICES))
}

fn devices_in(folder: &Path) -> Vec<BarDevice> {
    let mut found: Vec<BarDevice> = fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| {
            let folder = entry.path();
            let says =
                |(file, id): &(&str, &str)| fs::read_to_string(folder.join(file)).is_ok_and(|text| text.trim() == *id);
            let name = entry.file_name().into_string().ok()?;
            IVSHMEM.iter().all(says).then(|| {
                let size = fs::metadata(folder.join(RESOURCE)).map_or(0, |file| file.len());
                BarDevice { name, size, folder }
            })
        })
        .collect();
    found.sort_by(|a, b| a.name.cmp(&b.name));
    found
}

/// Opens the memory of a device, to write or only to read; that takes root.
pub fn open(device: &BarDevice, writable: bool) -> Result<Window, RegionError> {
    let enable = device.folder.join("enable");
    // A device without a driver decodes no address until it is enabled.
    if fs::read_to_string(&enable).is_ok_and(|text| text.trim() == "0") {
        fs::write(&enable, "1").map_err(|e| RegionError::system("enable the device", device.size, errno(&e)))?;
    }
    let access = if writable { OFlags::RDWR } else { OFlags::RDONLY };
    let fd = rustix::fs::open(device.folder.join(RESOURCE), access | OFlags::CLOEXEC, Mode::empty())
        .map_err(|e| RegionError::system("open the memory of the device", device.size, e))?;
    resource_window(fd)
}

/// A device whose memory is a window.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BarWindow {
    /// The device whose memory it is.
    pub device: BarDevice,
    /// The header of the window.
    pub header: WindowHeader,
    /// The hypervisor drops what this guest writes to it.
    pub read_only: bool,
}

/// Those devices that this process may open and whose memory is a window.
pub fn windows() -> Vec<BarWindow> {
    let shown = |device: BarDevice| {
        let header = open(&device, false).ok()?.header().ok().flatten()?;
        // It says that it is a window, so it has a place to try this.
        let read_only = !open(&device, true).and_then(|window| takes_stores(&window)).ok()?;
        Some(BarWindow { device, header, read_only })
    };
    devices().into_iter().filter_map(shown).collect()
}

/// Opens the window with this id, for writing if it is one's own; `None` if no device shows it.
///
/// # Errors
/// As [`crate::pmem::find`], except for an absent window.
pub fn find(id: WindowId, writable: bool) -> Result<Option<Window>, FindError> {
    let windows = windows();
    let found: Vec<&BarWindow> = windows.iter().filter(|w| w.read_only != writable && w.header.id == id).collect();
    match &found[..] {
        [] => devices().into_iter().find_map(obstacle).map_or(Ok(None), Err),
        [one] => open(&one.device, writable)
            .map(Some)
            .map_err(|source| FindError::Region { name: one.device.name.clone(), source }),
        several => {
            let names: Vec<&str> = several.iter().map(|w| w.device.name.as_str()).collect();
            Err(FindError::Ambiguous { id, names: names.join(", ") })
        }
    }
}

/// The reason why this process cannot look into a device, which may be the one that is wanted.
fn obstacle(device: BarDevice) -> Option<FindError> {
    let BarDevice { name, size, .. } = device.clone();
    if size == 0 {
        return Some(FindError::NoAddress { name });
    }
    open(&device, false).err().map(|source| FindError::Region { name, source })
}

/// The id of a doorbell device (protocol I1). `None` if it is none, or this process may not open it.
pub fn doorbell_id(device: &BarDevice) -> Option<u128> {
    doorbell::id(&open(device, false).ok()?.first_bytes().ok()?)
}

fn takes_stores(window: &Window) -> Result<bool, RegionError> {
    Ok(Mapping::new_at(window.as_fd(), TRIAL_OFFSET, Geometry::new(PAGE, 0)?, true)?.takes_stores())
}

fn errno(e: &std::io::Error) -> rustix::io::Errno {
    rustix::io::Errno::from_io_error(e).unwrap_or(rustix::io::Errno::IO)
}

/// Whether a descriptor is a file of the kernel's about devices, which no other process can make.
pub(crate) fn is_of_device(fd: impl AsFd) -> bool {
    rustix::fs::fstatfs(fd).is_ok_and(|system| system.f_type == SYSFS_MAGIC)
}

/// Where the data begins in the memory of a device of this size.
///
/// The device shows a window's file, whose data follows the info block. Memory too small for that is data only.
pub(crate) fn data_offset(size: u64) -> u64 {
    if size > DATA_OFFSET { DATA_OFFSET } else { 0 }
}

/// The memory behind a descriptor of a device's resource. It never shrinks.
pub(crate) fn resource_window(fd: OwnedFd) -> Result<Window, RegionError> {
    let stat = rustix::fs::fstat(&fd).map_err(|_| Corrupt::BadRegion)?;
    let size = u64::try_from(stat.st_size).map_err(|_| Corrupt::BadRegion)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile || size < PAGE {
        return Err(Corrupt::BadRegion.into());
    }
    let from = data_offset(size);
    Ok(Window::new(fd, from, size - from))
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    use super::*;

    #[test]
    fn devices_are_found_by_vendor_and_device_number() {
        let folder = tempfile::tempdir().unwrap();
        for (name, vendor, device, size) in [
            ("b", "0x1af4", "0x1110", Some(8192)),
            ("a", "0x1af4", "0x1000", Some(4096)),
            ("c", "0x8086", "0x1110", Some(4096)),
            ("d", "0x1af4", "0x1110", None),
        ] {
            let at = folder.path().join(name);
            fs::create_dir(&at).unwrap();
            fs::write(at.join("vendor"), format!("{vendor}\n")).unwrap();
            fs::write(at.join("device"), format!("{device}\n")).unwrap();
            if let Some(size) = size {
                fs::write(at.join("resource2"), vec![0; size]).unwrap();
            }
        }
        let found = devices_in(folder.path());
        assert_eq!(found.iter().map(|d| (d.name.as_str(), d.size)).collect::<Vec<_>>(), [("b", 8192), ("d", 0)]);
    }

    #[test]
    fn files_of_users_are_not_taken_for_devices() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4096).unwrap();
        assert!(!is_of_device(&file));
        let kernels = fs::File::open("/sys/kernel/uevent_helper").or_else(|_| fs::File::open("/sys/kernel/notes"));
        assert!(kernels.is_ok_and(|file| is_of_device(&file)));
    }

    #[test]
    fn test_store_detects_writable_memory() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(DATA_OFFSET + PAGE).unwrap();
        let window = resource_window(file.into()).unwrap();
        assert_eq!(window.size(), PAGE, "data alone");
        assert!(takes_stores(&window).unwrap());
    }
}
