//! Why a window is not plugged in, and what to do about it.

use crate::facts::WindowObstacle;
use crate::qmp::QmpError;
use partywall_region::pmem::WindowId;
use std::path::PathBuf;

/// The failure of an operation on a machine.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VmError {
    /// The machine's monitor failed or refused a command.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// The machine was started in a way that leaves no place for it.
    #[error("machine {machine} cannot take this window: {obstacle}")]
    Obstacle {
        /// The name of the machine.
        machine: String,
        /// The obstacle, and the remedy.
        obstacle: WindowObstacle,
    },
    /// Its QEMU runs in a sandbox that does not let it open the file, or its monitor's socket was made by another user.
    #[error("QEMU of {machine} may not open {path}, which it was given ({why}); AppArmor or SELinux must let it (see `partywall vm args --libvirt`), and its monitor's socket be its own", path = path.display())]
    NoAccess {
        /// The machine's name.
        machine: String,
        /// The window's file.
        path: PathBuf,
        /// In QEMU's words.
        why: String,
    },
    /// The window's file cannot be given to QEMU's user.
    #[error("cannot give {path} to the user {user}, as whom QEMU of {machine} runs: {source}; run QEMU as the broker's user", path = path.display())]
    Grant {
        /// The machine's name.
        machine: String,
        /// The window's file.
        path: PathBuf,
        /// QEMU's user.
        user: u32,
        /// Why the system refused.
        source: std::io::Error,
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
    /// The host's end of its serial port is not where it was looked for.
    #[error("machine {machine} has no socket {port}, which was named as its serial port; {}", ports_there(there), port = port.display())]
    NoSuchPort {
        /// The machine's name.
        machine: String,
        /// The requested socket.
        port: PathBuf,
        /// The sockets that it does have, except for monitors: the name of each chardev, and its path.
        there: Vec<(String, String)>,
    },
    /// Something else has the name that this window's device would have.
    #[error("machine {machine} has another device under the name of window {id}; unplug it, or make a new window")]
    Taken {
        /// The machine's name.
        machine: String,
        /// The window that cannot be plugged in.
        id: WindowId,
    },
    /// A vhost-user back end could not map its memory.
    #[error(
        "the memory of machine {machine} ({memory}) is not shared memory of a memory-backend-memfd, which alone the back end maps; start it with -object memory-backend-memfd,id=ram,size=SIZE,share=on -machine memory-backend=ram"
    )]
    NoSharedMemory {
        /// The machine's name.
        machine: String,
        /// QEMU's name for the memory.
        memory: String,
    },
    /// Something else of the machine has the name that the device's chardev would have.
    #[error("machine {machine} has a chardev {name} on another socket, {socket}; remove it first", socket = socket.display())]
    OtherSocket {
        /// The machine's name.
        machine: String,
        /// The name of the chardev.
        name: String,
        /// Its socket.
        socket: PathBuf,
    },
    /// Its PCI bus is full, or each PCI Express port has a device.
    #[error(
        "machine {machine} has no free place for a PCI device; start it with more (with -machine q35: -device pcie-root-port,id=pw1,chassis=11), or unplug another device"
    )]
    NoPlace {
        /// The machine's name.
        machine: String,
    },
    /// Its guest has not released a device that it was asked to release.
    #[error(
        "the guest of machine {machine} has not released {device} yet; it needs a running kernel with PCI hot-plug that does not keep the device in use, and the same command waits again"
    )]
    NotReleased {
        /// The machine's name.
        machine: String,
        /// The device.
        device: String,
    },
    /// This machine, the host, refused.
    #[error("cannot make what a machine is rung by: {0}")]
    System(#[from] std::io::Error),
}

/// The ports to name instead.
fn ports_there(there: &[(String, String)]) -> String {
    if there.is_empty() {
        return "it has none; start it with the options that `partywall vm args` prints".to_owned();
    }
    let listed: Vec<String> = there.iter().map(|(name, path)| format!("{path} (chardev {name})")).collect();
    format!("it has {}", listed.join(", "))
}
