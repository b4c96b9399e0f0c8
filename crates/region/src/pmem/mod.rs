//! Windows: memory of one virtual machine that it alone can write, and that another, or the host, can read (protocol V1).
//!
//! On the host a window is a file ([`WindowFile`]). QEMU shows it to its owner as a writable `virtio-pmem` device and to the
//! peer as a read-only `nvdimm`, and a stock kernel in the guest makes `/dev/dax*` of either ([`dax`]); or, in machines without room for
//! these, it is the memory of a PCI device ([`bar`]). Each of them can be opened as a [`Window`]. From a window, regions are carved out ([`Space`]) that are as good as a sealed memfd each: the hypervisor,
//! instead of a seal, keeps the peer from writing. A window of a group's member is mapped whole, where all members map it
//! ([`Joint`]).
//!
//! ```text
//!   host file    | info block | header | region | region | free ...     |
//!   owner's dax               | header | region | region | free ...     |  read-write
//!   peer's dax                | header | region | region | free ...     |  read-only
//! ```

mod access;
pub mod book;
pub mod dax;
mod file;
mod found;
mod joint;
pub mod memory;
mod space;

pub use access::let_in;
pub use file::{WindowFile, WindowSpec};
pub use found::WindowTrace;
pub use joint::{Joint, OwnSeat, OwnSpan, SeatMemory, WindowAddresses};
use partywall_protocol::window::DATA_OFFSET;
pub use partywall_protocol::window::{WindowHeader, WindowId};
pub use space::Space;

use crate::error::FindError;
use crate::window::Window;
use crate::{PeerRegion, RegionError, bar};
use partywall_shm::corrupt::Corrupt;
use partywall_shm::layout::{Geometry, RegionKind};
use rustix::fd::BorrowedFd;
use rustix::fs::FileType;

/// Opens the window with this id in a guest, for writing if it is one's own, whatever device shows it.
pub fn find(id: WindowId, writable: bool) -> Result<Window, FindError> {
    match dax::find(id, writable) {
        Err(absent @ FindError::Absent { .. }) => bar::find(id, writable)?.ok_or(absent),
        found => found,
    }
}

/// The window behind a descriptor that was passed to us: a guest's device, or a sealed file of the host's.
///
/// # Errors
/// The descriptor is of something else, or it cannot be duplicated.
pub fn received(fd: BorrowedFd<'_>) -> Result<Window, RegionError> {
    let fd = rustix::io::fcntl_dupfd_cloexec(fd, 0).map_err(|e| RegionError::system("keep the window", 0, e))?;
    let mode = rustix::fs::fstat(&fd).map_err(|_| Corrupt::BadRegion)?.st_mode;
    match FileType::from_raw_mode(mode) {
        FileType::CharacterDevice => dax::device_window(fd),
        FileType::RegularFile if bar::is_of_device(&fd) => bar::resource_window(fd),
        _ => file::received(fd),
    }
}

/// Where the data begins in the memory behind a descriptor of a window that was passed to us, if `end` bytes of data are there.
///
/// As [`received`], without allocating. The size of a character device can be read only from files of the kernel. For a guest's device
/// the agent and the broker are trusted: they have found the window and hand out parts of it.
///
/// # Errors
/// The descriptor is of something else, or the window ends before that.
pub fn data_offset(fd: BorrowedFd<'_>, end: u64) -> Result<u64, RegionError> {
    let stat = rustix::fs::fstat(fd).map_err(|_| Corrupt::BadRegion)?;
    let size = u64::try_from(stat.st_size).unwrap_or(0);
    let from = match FileType::from_raw_mode(stat.st_mode) {
        FileType::CharacterDevice => return Ok(0),
        FileType::RegularFile if bar::is_of_device(fd) => bar::data_offset(size),
        FileType::RegularFile if file::is_sealed(fd) => DATA_OFFSET,
        _ => return Err(Corrupt::BadRegion.into()),
    };
    match from.checked_add(end) {
        Some(end) if end <= size => Ok(from),
        _ => Err(Corrupt::BadRegion.into()),
    }
}

/// Attaches a peer's region at byte `base` of what was passed to us: 0 is a region with memory to itself, anything else a place in a
/// window.
///
/// # Errors
/// As [`PeerRegion::attach`] and [`Window::attach`].
pub fn attach(fd: BorrowedFd<'_>, base: u64, kind: RegionKind, geometry: Geometry) -> Result<PeerRegion, RegionError> {
    if base == 0 {
        return PeerRegion::attach(fd, kind, geometry);
    }
    received(fd)?.attach(base, kind, geometry)
}
