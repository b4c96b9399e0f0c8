//! Memory of a PCI device in a guest: QEMU's ivshmem, for machines that cannot take windows.
//!
//! ```text
//!   /sys/bus/pci/devices/0000:00:05.0/   vendor 0x1af4, device 0x1110
//!        resource2_wc   the shared memory, write-combining where the processor is told so
//!        resource2      the same, uncached
//! ```
//!
//! What a window has and this has not: an owner. Every machine that has the device can write all of it, so it is for machines that
//! trust one another. It is mapped like a window nevertheless, each side writing only its own regions.
//!
//! Such memory may be mapped uncached, and then is many times slower than a window ([`Bar::slowness`] tells). And a mapping is **not
//! taken away when the device is unplugged**: what is written to it afterwards goes to whatever is plugged in there next.

use crate::RegionError;
use crate::pmem::Window;
use partywall_shm::corrupt::Corrupt;
use partywall_shm::layout::PAGE;
use rustix::fd::OwnedFd;
use rustix::fs::{FileType, Mode, OFlags};
use std::fs;
use std::path::{Path, PathBuf};

/// Where the kernel lists PCI devices.
const DEVICES: &str = "/sys/bus/pci/devices";
/// QEMU's ivshmem: vendor and device.
const IVSHMEM: [(&str, &str); 2] = [("vendor", "0x1af4"), ("device", "0x1110")];
/// The resource with the shared memory, and how it may be called in the order of preference.
const FILES: [&str; 2] = ["resource2_wc", "resource2"];
/// The file system in which such files are.
const SYSFS_MAGIC: i64 = 0x6265_6572;
/// A device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// Its address on the bus, as `0000:00:05.0`.
    pub name: String,
    /// Bytes of shared memory.
    pub size: u64,
    folder: PathBuf,
}

/// The memory of a device.
#[derive(Debug)]
pub struct Bar {
    window: Window,
    write_combining: bool,
}

/// Every such device of this machine.
pub fn devices() -> Vec<Device> {
    devices_in(Path::new(DEVICES))
}

fn devices_in(folder: &Path) -> Vec<Device> {
    let mut found: Vec<Device> = fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| {
            let folder = entry.path();
            let says =
                |(file, id): &(&str, &str)| fs::read_to_string(folder.join(file)).is_ok_and(|text| text.trim() == *id);
            let size = fs::metadata(folder.join(FILES[1])).ok()?.len();
            let name = entry.file_name().into_string().ok()?;
            IVSHMEM.iter().all(says).then_some(Device { name, size, folder })
        })
        .collect();
    found.sort_by(|a, b| a.name.cmp(&b.name));
    found
}

/// Opens the memory of a device; that takes root.
pub fn open(device: &Device) -> Result<Bar, RegionError> {
    let enable = device.folder.join("enable");
    // A device without a driver answers to no address until somebody says so.
    if fs::read_to_string(&enable).is_ok_and(|text| text.trim() == "0") {
        fs::write(&enable, "1").map_err(|e| RegionError::system("enable the device", device.size, errno(&e)))?;
    }
    let mut refused = rustix::io::Errno::NOENT;
    for file in FILES {
        match rustix::fs::open(device.folder.join(file), OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()) {
            Ok(fd) => return Ok(Bar { window: of_resource(fd)?, write_combining: file == FILES[0] }),
            Err(e) => refused = e,
        }
    }
    Err(RegionError::system("open the memory of the device", device.size, refused))
}

fn errno(e: &std::io::Error) -> rustix::io::Errno {
    rustix::io::Errno::from_io_error(e).unwrap_or(rustix::io::Errno::IO)
}

/// Whether a descriptor is one of the kernel's files about devices, which nobody else can make.
pub(crate) fn is_of_device(fd: &OwnedFd) -> bool {
    rustix::fs::fstatfs(fd).is_ok_and(|system| system.f_type == SYSFS_MAGIC)
}

/// The memory behind a descriptor of a device's resource. It never shrinks.
pub(crate) fn of_resource(fd: OwnedFd) -> Result<Window, RegionError> {
    let stat = rustix::fs::fstat(&fd).map_err(|_| Corrupt::BadRegion)?;
    let size = u64::try_from(stat.st_size).map_err(|_| Corrupt::BadRegion)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile || size < PAGE {
        return Err(Corrupt::BadRegion.into());
    }
    Ok(Window::new(fd, 0, size))
}

impl Bar {
    /// It as a window, for regions of both sides.
    pub fn into_window(self) -> Window {
        self.window
    }

    /// Mapped so that at least writes are gathered, as far as the kernel was told.
    pub fn is_write_combining(&self) -> bool {
        self.write_combining
    }

    /// How many times slower it is read than memory of this process. More than [`UNCACHED`](crate::pmem::UNCACHED), and it is not cached: then TCP may well
    /// be faster.
    pub fn slowness(&self) -> Result<f64, RegionError> {
        self.window.slowness()
    }
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    use super::*;

    #[test]
    fn devices_are_known_by_what_they_say_of_themselves() {
        let folder = tempfile::tempdir().unwrap();
        for (name, vendor, device, size) in
            [("b", "0x1af4", "0x1110", 8192), ("a", "0x1af4", "0x1000", 4096), ("c", "0x8086", "0x1110", 4096)]
        {
            let at = folder.path().join(name);
            fs::create_dir(&at).unwrap();
            fs::write(at.join("vendor"), format!("{vendor}\n")).unwrap();
            fs::write(at.join("device"), format!("{device}\n")).unwrap();
            fs::write(at.join("resource2"), vec![0; size]).unwrap();
        }
        let found = devices_in(folder.path());
        assert_eq!(found.iter().map(|d| (d.name.as_str(), d.size)).collect::<Vec<_>>(), [("b", 8192)]);
    }

    #[test]
    fn files_of_users_are_not_taken_for_devices() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4096).unwrap();
        assert!(!is_of_device(&file.into()));
        let kernels = fs::File::open("/sys/kernel/uevent_helper").or_else(|_| fs::File::open("/sys/kernel/notes"));
        assert!(kernels.is_ok_and(|file| is_of_device(&file.into())));
    }
}
