//! Devices that a back end serves over vhost-user: a network card on a switch, and a disk. They come and go while the machine runs.
//!
//! QEMU has up to three objects for one: a chardev on the back end's socket, for a card a netdev, and the PCI device. All have the same
//! name. A device that the machine was started with may have another name; it is found by its back end's.

use crate::error::VmError;
use crate::facts::WindowObstacle;
use crate::machine::Machine;
use crate::qmp::{DEVICE_FOLDERS, DeviceKind, NewDevice, QmpError};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// The only kind of memory that can neither shrink nor be private.
const MEMFD: &str = "child<memory-backend-memfd>";
/// How often a chardev is tried whose device is gone. QEMU frees a device soon after it has reported its end.
const RETRY: Duration = Duration::from_millis(20);

/// A device on a vhost-user back end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VhostUserDevice {
    /// Its name in QEMU, and that of its back end there.
    pub name: String,
    /// What the machine gets.
    pub kind: VhostUserKind,
}

/// What a machine gets from a vhost-user back end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VhostUserKind {
    /// A network card.
    Card,
    /// A disk.
    Disk,
}

/// How a device is plugged in: [`Machine::plug_vhost_user`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VhostUserOptions {
    /// Of a network card.
    Card {
        /// Its Ethernet address.
        mac: String,
        /// Entries of each of its queues.
        entries: u16,
    },
    /// Of a disk.
    Disk {
        /// Its queues.
        queues: u16,
    },
}

impl VhostUserKind {
    /// Part of the kind of all devices of QEMU that are such a device.
    fn driver(&self) -> &'static str {
        match self {
            Self::Card => "virtio-net",
            Self::Disk => "vhost-user-blk",
        }
    }

    /// The property of a device that names its back end.
    fn back_end(&self) -> &'static str {
        match self {
            Self::Card => "netdev",
            Self::Disk => "chardev",
        }
    }
}

impl Machine {
    /// Whether it has the device.
    pub fn has_vhost_user(&mut self, device: &VhostUserDevice) -> Result<bool, VmError> {
        Ok(self.find_vhost_user(device)?.is_some())
    }

    /// Plugs a device in whose back end listens at `socket`; `false` if it was there before, and nothing is done then.
    pub fn plug_vhost_user(
        &mut self,
        device: &VhostUserDevice,
        socket: PathBuf,
        options: &VhostUserOptions,
    ) -> Result<bool, VmError> {
        if self.has_vhost_user(device)? {
            return Ok(false);
        }
        self.expect_shared_memory()?;
        // Under emulation, QEMU 7.2 ends when the guest's driver asks such a card for interrupt vectors.
        let no_vectors = !self.facts()?.kvm;
        let machine = self.name().to_owned();
        let no_place = || VmError::NoPlace { machine: machine.clone() };
        let port = self.take_port().map_err(|e| match e {
            VmError::Obstacle { obstacle: WindowObstacle::NoPort, .. } => no_place(),
            other => other,
        })?;
        // Left by a device that its guest released after the command had ended that waited for it.
        self.remove_back_end(device);
        let name = &device.name;
        self.qmp.add_chardev_at(name, &socket)?;
        let kind = match options {
            VhostUserOptions::Card { mac, entries } => {
                DeviceKind::Card { netdev: name.clone(), mac: mac.clone(), entries: *entries, no_vectors }
            }
            VhostUserOptions::Disk { queues } => DeviceKind::Disk { chardev: name.clone(), queues: *queues },
        };
        let added = match device.kind {
            VhostUserKind::Card => self.qmp.add_netdev(name),
            VhostUserKind::Disk => Ok(()),
        };
        let added = added.and_then(|()| self.qmp.add_device(&NewDevice { name: name.clone(), kind, port }));
        match added {
            Ok(()) => Ok(true),
            Err(e) => {
                self.remove_back_end(device);
                Err(if e.is_no_slot() { no_place() } else { e.into() })
            }
        }
    }

    /// Takes a device out, which its guest has to release until `deadline`; `false` if there is none.
    pub fn unplug_vhost_user(&mut self, device: &VhostUserDevice, deadline: Instant) -> Result<bool, VmError> {
        let found = self.find_vhost_user(device)?;
        if let Some(path) = &found {
            match self.qmp.delete_device(path) {
                // The guest was asked before.
                Err(e) if e.is_being_unplugged() => {}
                asked => asked?,
            }
            if !self.qmp.wait_until_deleted(path, deadline)? && self.has_vhost_user(device)? {
                return Err(VmError::NotReleased { machine: self.name().to_owned(), device: device.name.clone() });
            }
        }
        // What is still in use for a moment is tried again.
        while self.remove_back_end(device) && Instant::now() < deadline {
            std::thread::sleep(RETRY);
        }
        Ok(found.is_some())
    }

    /// Where QEMU has the device.
    fn find_vhost_user(&mut self, device: &VhostUserDevice) -> Result<Option<String>, VmError> {
        for folder in DEVICE_FOLDERS {
            for child in self.qmp.children(folder)? {
                let path = format!("{folder}/{}", child.name);
                if child.kind.contains(device.kind.driver())
                    && self.qmp.property(&path, device.kind.back_end())? == device.name.as_str()
                {
                    return Ok(Some(path));
                }
            }
        }
        Ok(None)
    }

    /// Removes what no device uses; `true` if something is still in use.
    fn remove_back_end(&mut self, device: &VhostUserDevice) -> bool {
        if device.kind == VhostUserKind::Card {
            let _ = self.qmp.delete_netdev(&device.name);
        }
        self.qmp.remove_chardev(&device.name).is_err_and(|e| e.is_in_use())
    }

    /// A back end maps the machine's memory.
    fn expect_shared_memory(&mut self) -> Result<(), VmError> {
        let main = self.qmp.property("/machine", "memory-backend")?;
        let main = main.as_str().and_then(|path| path.rsplit('/').next()).unwrap_or_default();
        let kinds = self.qmp.children("/objects")?;
        for memory in self.qmp.memory_backends()? {
            let is_memfd = kinds.iter().any(|object| object.name == memory.name && object.kind == MEMFD);
            // Without one for the whole machine, its nodes have theirs. Windows are none of them, and are shared.
            let is_main = if main.is_empty() { !memory.shared } else { memory.name == main };
            if is_main && !(memory.shared && is_memfd) {
                return Err(VmError::NoSharedMemory { machine: self.name().to_owned(), memory: memory.name });
            }
        }
        Ok(())
    }
}

impl QmpError {
    fn says(&self, words: &str) -> bool {
        matches!(self, Self::Refused { why, .. } if why.contains(words))
    }

    /// No place on the machine's bus is free.
    fn is_no_slot(&self) -> bool {
        self.says("no slot/function available")
    }

    /// The guest has been asked to release the device, and has not yet.
    fn is_being_unplugged(&self) -> bool {
        self.says("already in the process of unplug")
    }

    /// A device still uses the object.
    fn is_in_use(&self) -> bool {
        self.says("busy") || self.says("in use")
    }
}
