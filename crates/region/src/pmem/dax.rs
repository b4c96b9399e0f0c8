//! Windows in a guest: the character devices that its kernel makes of them.
//!
//! Their numbers follow the order in which they were plugged in, and mean nothing. A window is found by its id, which was
//! told to this guest over a trusted path and cannot be guessed by the owner of another window.

use super::{WindowHeader, WindowId};
use crate::RegionError;
use crate::error::FindError;
use crate::window::Window;
use partywall_shm::corrupt::Corrupt;
use rustix::fd::OwnedFd;
use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use std::fs;
use std::path::{Path, PathBuf};

/// Where the kernel lists them.
const DEVICES: &str = "/sys/bus/dax/devices";

/// The PCI ids of `virtio-pmem`: vendor and device.
const VIRTIO_PMEM: (&str, &str) = ("0x1af4", "0x105b");
/// The place in the header's page of a trial store, which shows whether this machine may write the window (protocol V1.5).
const TRIAL_WORD: usize = 4088;

/// A device that may be a window.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DaxDevice {
    /// Its name, as `dax0.0`.
    pub name: String,
    /// Bytes.
    pub size: u64,
    /// The hypervisor drops what this guest writes to it.
    pub read_only: bool,
    /// The header of the window; `None` if the device is no window.
    pub header: Option<WindowHeader>,
}

/// Every dax device that this process may open.
pub fn devices() -> Vec<DaxDevice> {
    let mut devices: Vec<DaxDevice> = fs::read_dir(DEVICES)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let window = open(&name, false).ok()?;
            let header = window.header().ok().flatten();
            // sysfs calls a `virtio-pmem` device writable although the hypervisor shows it read-only. A window's header has a word for a
            // trial store.
            let read_only = is_read_only(&entry.path())
                || header.is_some()
                    && open(&name, true).and_then(|window| takes_stores(&window)).is_ok_and(|takes| !takes);
            Some(DaxDevice { size: window.size(), read_only, header, name })
        })
        .collect();
    devices.sort_by(|a, b| a.name.cmp(&b.name));
    devices
}

/// Whether the hypervisor lets this guest write a window. The word that is tried is the last one of the header's page.
fn takes_stores(window: &Window) -> Result<bool, RegionError> {
    Ok(window.first_page_writable()?.takes_stores_at(TRIAL_WORD))
}

/// The PCI device that is behind a dax device, if it is a `virtio-pmem`: its folder in sysfs.
///
/// An `nvdimm` has none, and other devices are ignored.
pub fn virtio_device(name: &str) -> Option<PathBuf> {
    let device = fs::canonicalize(Path::new(DEVICES).join(name)).ok()?;
    virtio_above(&device)
}

fn virtio_above(device: &Path) -> Option<PathBuf> {
    let says =
        |folder: &Path, file: &str, id: &str| fs::read_to_string(folder.join(file)).is_ok_and(|text| text.trim() == id);
    let is_it = |folder: &&Path| {
        let (vendor, device) = VIRTIO_PMEM;
        says(folder, "vendor", vendor) && says(folder, "device", device) && folder.join("remove").exists()
    };
    device.ancestors().skip(1).find(is_it).map(Path::to_owned)
}

/// Opens the window with this id, for writing if it is one's own.
///
/// A guest may see one window twice, writable and not (it then is its own peer); each time it is the one that was asked for.
pub fn find(id: WindowId, writable: bool) -> Result<Window, FindError> {
    let devices = devices();
    let found: Vec<&DaxDevice> = devices
        .iter()
        .filter(|d| d.read_only != writable && d.header.as_ref().is_some_and(|header| header.id == id))
        .collect();
    match &found[..] {
        [] => Err(FindError::Absent { id, devices: devices.len() }),
        [device] => {
            open(&device.name, writable).map_err(|source| FindError::Region { name: device.name.clone(), source })
        }
        several => {
            let names: Vec<&str> = several.iter().map(|d| d.name.as_str()).collect();
            Err(FindError::Ambiguous { id, names: names.join(", ") })
        }
    }
}

/// Opens a device by its name. Fails with `ENXIO` while no driver of the kernel has it.
pub fn open(name: &str, writable: bool) -> Result<Window, RegionError> {
    if !is_bound(&Path::new(DEVICES).join(name)) {
        return Err(RegionError::system("open the window", 0, Errno::NXIO));
    }
    let access = if writable { OFlags::RDWR } else { OFlags::RDONLY };
    let fd = rustix::fs::open(Path::new("/dev").join(name), access | OFlags::CLOEXEC, Mode::empty())
        .map_err(|e| RegionError::system("open the window", 0, e))?;
    device_window(fd)
}

/// Whether the kernel's driver has got this device ready.
///
/// The file in `/dev` is there before that. Linux opens it half-way through the driver's `probe`, and an `mmap` of what it then returns
/// follows a null pointer in the kernel, which ends the calling thread with the kernel's locks held. The link `driver` appears when
/// `probe` begins, under the lock of the device. To read `size` takes the same lock (until Linux 6.8), and so waits for the end of `probe`.
fn is_bound(device: &Path) -> bool {
    device.join("driver").exists() && fs::read(device.join("size")).is_ok()
}

/// The window behind a descriptor of a dax device. Only root can make such devices, and they never shrink while open.
pub(super) fn device_window(fd: OwnedFd) -> Result<Window, RegionError> {
    let sysfs = sysfs(&fd)?;
    let subsystem = fs::canonicalize(sysfs.join("subsystem")).map_err(|_| Corrupt::BadRegion)?;
    if subsystem.file_name().is_none_or(|name| name != "dax") {
        return Err(Corrupt::BadRegion.into());
    }
    let size = fs::read_to_string(sysfs.join("size")).ok().and_then(|text| text.trim().parse().ok());
    let size = size.ok_or(RegionError::Corrupt(Corrupt::BadRegion))?;
    Ok(Window::new(fd, 0, size))
}

fn sysfs(fd: &OwnedFd) -> Result<PathBuf, RegionError> {
    let stat = rustix::fs::fstat(fd).map_err(|e: Errno| RegionError::system("look at the window", 0, e))?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::CharacterDevice {
        return Err(Corrupt::BadRegion.into());
    }
    let (major, minor) = (rustix::fs::major(stat.st_rdev), rustix::fs::minor(stat.st_rdev));
    Ok(PathBuf::from(format!("/sys/dev/char/{major}:{minor}")))
}

/// The memory region above a dax device knows.
fn is_read_only(device: &Path) -> bool {
    let Ok(path) = fs::canonicalize(device) else { return false };
    path.ancestors()
        .find_map(|above| fs::read_to_string(above.join("read_only")).ok())
        .is_some_and(|text| text.trim() == "1")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn virtio_device_is_found_above_and_others_are_not() {
        let folder = tempfile::tempdir().unwrap();
        for (name, device) in [("a", "0x105b"), ("b", "0x1041")] {
            let pci = folder.path().join(name);
            let dax = pci.join("virtio3/ndbus1/region1/dax1.0/dax1.0");
            fs::create_dir_all(&dax).unwrap();
            for (file, text) in [("vendor", "0x1af4"), ("device", device), ("remove", "")] {
                fs::write(pci.join(file), format!("{text}\n")).unwrap();
            }
            assert_eq!(virtio_above(&dax), (name == "a").then_some(pci), "{name}");
        }
    }

    #[test]
    fn device_is_bound_once_it_has_driver_and_size() {
        let device = tempfile::tempdir().unwrap();
        fs::write(device.path().join("size"), "4096\n").unwrap();
        assert!(!is_bound(device.path()), "probe has not begun");
        std::os::unix::fs::symlink("/", device.path().join("driver")).unwrap();
        assert!(is_bound(device.path()));
        fs::remove_file(device.path().join("size")).unwrap();
        assert!(!is_bound(device.path()), "it is being taken out");
    }
}
