//! Doorbell devices (protocol I): QEMU's `ivshmem-doorbell` on a [`Switchboard`](crate::ivshmem::Switchboard), by which a guest rings and
//! is rung without its serial port. The guest's agent drives it by vfio, which takes an IOMMU.
//!
//! They are never taken out. QEMU (7.2, emulating) goes on looking at the descriptors of a device that is gone, by then perhaps others',
//! and ends, machine and all.

use crate::error::VmError;
use crate::facts::WindowObstacle;
use crate::ivshmem::VECTORS;
use crate::machine::Machine;
use crate::qmp::{DEVICE_FOLDERS, DeviceKind, NewDevice};
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;

/// IOMMUs whose machines let a guest's user space have interrupts.
const IOMMUS: [&str; 2] = ["child<intel-iommu>", "child<amd-iommu>"];

/// The device's name in QEMU; its chardev has the same.
fn device_name(id: u128) -> String {
    format!("pw-doorbell-{id:032x}")
}

/// The id in a device's name; `None` for a device that is not Partywall's.
fn parse_name(name: &str) -> Option<u128> {
    u128::from_str_radix(name.strip_prefix("pw-doorbell-")?, 16).ok()
}

impl Machine {
    /// The doorbell devices that it has, by their ids.
    pub fn doorbells(&mut self) -> Result<Vec<u128>, VmError> {
        let devices = self.qmp.children(DEVICE_FOLDERS[0])?;
        let ours = devices.into_iter().filter(|device| device.kind == "child<ivshmem-doorbell>");
        Ok(ours.filter_map(|device| parse_name(&device.name)).collect())
    }

    /// Plugs one in, with the other end of its switchboard's socket.
    ///
    /// It leaves a place for a window: where only one PCI Express port is free, that is [`WindowObstacle::NoPort`].
    pub fn plug_doorbell(&mut self, id: u128, socket: &UnixStream) -> Result<(), VmError> {
        let machine = self.name().to_owned();
        let blocked = |obstacle| Err(VmError::Obstacle { machine, obstacle });
        let mut devices = self.qmp.children(DEVICE_FOLDERS[0])?;
        devices.extend(self.qmp.children(DEVICE_FOLDERS[1])?);
        if !devices.iter().any(|device| IOMMUS.contains(&device.kind.as_str())) {
            return blocked(WindowObstacle::NoIommu);
        }
        if self.facts()?.free_ports.is_some_and(|ports| ports.len() < 2) {
            return blocked(WindowObstacle::NoPort);
        }
        let port = self.take_port()?;
        let name = device_name(id);
        self.qmp.add_chardev(&name, socket.as_fd())?;
        let kind = DeviceKind::IvshmemDoorbell { chardev: name.clone(), vectors: VECTORS };
        if let Err(e) = self.qmp.add_device(&NewDevice { name: name.clone(), kind, port }) {
            let _ = self.qmp.remove_chardev(&name);
            return Err(e.into());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_name_parses_back_to_its_parts() {
        for id in [0, 7, u128::MAX] {
            assert_eq!(parse_name(&device_name(id)), Some(id));
        }
        assert_eq!(parse_name("pw-owner-5a"), None);
    }
}
