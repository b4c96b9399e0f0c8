//! Why a window is not plugged in, and what to do about it.

use crate::facts::Obstacle;
use crate::qmp::QmpError;
use partywall_region::pmem::WindowId;
use std::path::PathBuf;

/// What went wrong.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VmError {
    /// The monitor.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// The machine was started in a way that leaves no place for it.
    #[error("machine {machine} cannot take this window: {obstacle}")]
    Obstacle {
        /// Its name.
        machine: String,
        /// What is in the way, and what to do.
        obstacle: Obstacle,
    },
    /// Its QEMU runs as a user, or in a sandbox, that may not open the file.
    #[error("QEMU of {machine} cannot open {path} ({why}); it must run as the user who owns the window, and be allowed that path if AppArmor or SELinux confine it", path = path.display())]
    NoAccess {
        /// The machine's name.
        machine: String,
        /// The window's file.
        path: PathBuf,
        /// In QEMU's words.
        why: String,
    },
    /// Not a size that a guest can map.
    #[error("a window of {size} bytes cannot be plugged in: sizes are multiples of 2 MiB, from 4 MiB on")]
    Size {
        /// Bytes.
        size: u64,
    },
    /// Not a size that a PCI device can have.
    #[error("a window of {size} bytes cannot be a PCI device: its file has to be a power of two, from 4 MiB on")]
    DeviceSize {
        /// Bytes.
        size: u64,
    },
    /// Something else has the name that this window's device would have.
    #[error("machine {machine} has another device under the name of window {id}; unplug it, or make a new window")]
    Taken {
        /// The machine's name.
        machine: String,
        /// The window.
        id: WindowId,
    },
    /// An answer of QEMU's was not what its documentation says.
    #[error("QEMU's answer to {command} is not understood; this is a version that Partywall does not know")]
    Answer {
        /// The command.
        command: &'static str,
    },
}
