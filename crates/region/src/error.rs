//! The errors of memory operations, and which of them are the peer's fault.

use partywall_protocol::window::WindowId;
use partywall_shm::corrupt::Corrupt;
use partywall_shm::layout::BadGeometry;
use std::io;

/// Why a region could not be made or attached.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegionError {
    /// The caller asked for a shape that no region has.
    #[error("{0}")]
    Geometry(#[from] BadGeometry),
    /// This machine, or a limit on it, refused.
    #[error("cannot {doing} ({size} bytes): {source}{}", advice(source))]
    System {
        /// The operation that failed.
        doing: &'static str,
        /// Bytes asked for.
        size: u64,
        /// The error of the kernel.
        source: io::Error,
    },
    /// A window of a group must be at an address where this process has something else, or has it already.
    #[error(
        "address {address:#x}, where all members of the group map this window, is in use in this process: it can take part once, \
         and not before all of an earlier time is dropped"
    )]
    Taken {
        /// The address that was asked for.
        address: u64,
    },
    /// A heap must be at an address where this process has something else.
    #[error(
        "address {address:#x}, where the heap is mapped on the other side, is in use in this process by {user}: map that elsewhere, or allow \
         the heap to be mapped at another address"
    )]
    HeapAddress {
        /// The address that was asked for.
        address: u64,
        /// The mapping that is in the way.
        user: String,
    },
    /// The peer's region is not what the protocol requires.
    #[error("the peer broke the protocol: {0}")]
    Corrupt(#[from] Corrupt),
}

impl RegionError {
    pub(crate) fn system(doing: &'static str, size: u64, source: impl Into<io::Error>) -> Self {
        Self::System { doing, size, source: source.into() }
    }
}

/// Advice about limits that users commonly reach.
fn advice(source: &io::Error) -> &'static str {
    match source.raw_os_error().map(rustix::io::Errno::from_raw_os_error) {
        Some(rustix::io::Errno::MFILE) => "; raise this process's limit of open files (ulimit -n)",
        Some(rustix::io::Errno::NFILE) => "; raise the system's limit of open files (sysctl fs.file-max)",
        Some(rustix::io::Errno::NOMEM) => "; free memory, reserve more huge pages, or raise sysctl vm.max_map_count",
        Some(rustix::io::Errno::NOSPC) => "; free memory, or reserve more huge pages (sysctl vm.nr_hugepages)",
        Some(rustix::io::Errno::FBIG) => {
            "; raise this process's limit of the size of files (ulimit -f), which shared memory counts as"
        }
        _ => "",
    }
}

/// Why a window cannot be used in this guest.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FindError {
    /// No device has this id.
    #[error("window {id} is not plugged into this machine (none of {devices} dax devices has this id){}", missing_modules(*devices))]
    Absent {
        /// The id that was looked for.
        id: WindowId,
        /// How many devices there are.
        devices: usize,
    },
    /// Several devices have this id: an owner has copied another's header.
    #[error("window {id} is there more than once ({names}): one of their owners lies, so none of them is used")]
    Ambiguous {
        /// The id that was looked for.
        id: WindowId,
        /// The names of these devices.
        names: String,
    },
    /// A PCI device may be the window, but the kernel has assigned no addresses to its memory.
    #[error(
        "the memory of {name} (ivshmem) has no addresses in this machine: attach it with smaller windows, or start it with more room for PCI devices (q35: pref64-reserve= of the pcie-root-port)"
    )]
    NoAddress {
        /// The name of the device.
        name: String,
    },
    /// The device cannot be mapped.
    #[error("{name}: {source}")]
    Region {
        /// The name of the device.
        name: String,
        /// Why it cannot be mapped.
        source: RegionError,
    },
}

fn missing_modules(devices: usize) -> &'static str {
    if devices > 0 {
        ""
    } else {
        "; if it was plugged in, this kernel lacks modules: modprobe -a virtio_pmem nd_pmem nfit dax_pmem device_dax"
    }
}
