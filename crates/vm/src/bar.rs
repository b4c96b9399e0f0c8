//! Windows as PCI devices, for machines that were started without memory slots: QEMU's `ivshmem-plain` over the window's file.
//!
//! The memory behind the peer's device is read-only, as it is behind an `nvdimm`, so the hypervisor drops what the peer writes. The
//! guest, however, may map such memory uncached (`region::bar`).
//!
//! These devices are never removed. A mapping of such a device in the guest outlives it, and would write to whatever is plugged in there
//! next.

use crate::error::VmError;
use crate::machine::Machine;
use crate::qmp::{DeviceKind, NewDevice};
use crate::window::{WindowDevice, WindowRole, device_name, memory_name, parse_name};
use partywall_protocol::window::DATA_OFFSET;
use partywall_region::pmem::WindowId;
use std::time::{Duration, Instant};

/// A window that is plugged in as a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PluggedDevice {
    /// The window that the device shows.
    pub id: WindowId,
    /// The side of the window that this machine has.
    pub role: WindowRole,
    /// How long it took the host; `None` if it was there before.
    pub took: Option<Duration>,
}

impl Machine {
    /// The windows that are devices of it.
    pub fn devices(&mut self) -> Result<Vec<PluggedDevice>, VmError> {
        let devices = self.qmp.children("/machine/peripheral")?;
        let ours = devices.into_iter().filter(|device| device.kind == "child<ivshmem-plain>");
        let named = ours.filter_map(|device| parse_name(&device.name));
        Ok(named.map(|(id, role)| PluggedDevice { id, role, took: None }).collect())
    }

    /// Plugs a window in as a device. Where it is in already, nothing happens and [`PluggedDevice::took`] is `None`.
    pub fn plug_device(&mut self, window: &WindowDevice, role: WindowRole) -> Result<PluggedDevice, VmError> {
        // QEMU ends, machine and all, when a device's memory is of another size.
        if window.size <= DATA_OFFSET || !window.size.is_power_of_two() {
            return Err(VmError::DeviceSize { size: window.size });
        }
        if let Some(there) = self.devices()?.into_iter().find(|d| (d.id, d.role) == (window.id, role)) {
            return Ok(there);
        }
        let port = self.take_port()?;
        let start = Instant::now();
        self.add_memory(window, role)?;
        let (name, memory) = (device_name(window.id, role), memory_name(window.id, role));
        let kind = DeviceKind::IvshmemPlain { memory: memory.clone() };
        if let Err(e) = self.qmp.add_device(&NewDevice { name, kind, port }) {
            // Removes the memory again, if QEMU allows it.
            let _ = self.qmp.delete_object(&memory);
            return Err(e.into());
        }
        Ok(PluggedDevice { id: window.id, role, took: Some(start.elapsed()) })
    }
}
