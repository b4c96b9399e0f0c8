//! A running machine: what it can take, what is in it, and how to change that.
//!
//! `migration` finds out whether and how it migrates, `ports` finds places for PCI devices, `serial` the host's end of the serial port, `windows` plugs windows in as memory devices.

mod migration;
mod ports;
mod serial;
#[cfg(test)]
mod tests;
mod windows;

use crate::error::VmError;
use crate::facts::Facts;
use crate::qmp::{MemoryDevice, Qmp, Survey};
use crate::window::{PluggedWindow, WindowRole, parse_name};
use partywall_region::pmem::WindowId;
use std::path::Path;

pub use migration::MigrationProgress;
pub use windows::Unplugged;

/// A machine, by its monitor.
#[derive(Debug)]
pub struct Machine {
    pub(crate) qmp: Qmp,
    name: String,
    /// The facts found in this session, as far as this session has not changed them.
    known: Option<KnownMachine>,
    /// The kind of devices that its windows are.
    pub(crate) layout: WindowLayout,
}

/// The kind of devices of a machine's windows, where it takes them as memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum WindowLayout {
    /// `virtio-pmem` for a window that it writes, `nvdimm` for one that it reads.
    #[default]
    Usual,
    /// `virtio-pmem` for both, so that QEMU can migrate the machine.
    Migratable,
}

/// A machine's facts, and the memory devices that are in it.
#[derive(Debug, Clone)]
struct KnownMachine {
    facts: Facts,
    devices: Vec<MemoryDevice>,
    /// Ports of which it is not known whether they are free.
    ports: Vec<String>,
}

impl KnownMachine {
    /// Takes note of what is in the machine now.
    fn now_has(&mut self, devices: Vec<MemoryDevice>) {
        self.facts.slots_used = devices.iter().filter(|d| d.slot).count() as u64;
        self.facts.room_used = devices.iter().map(|d| d.size).sum();
        self.devices = devices;
    }

    fn find(&self, id: WindowId, role: WindowRole) -> Option<PluggedWindow> {
        self.devices.iter().filter_map(window).find(|p| (p.id, p.role) == (id, role))
    }
}

/// The window that a memory device is, if it is one of ours.
fn window(device: &MemoryDevice) -> Option<PluggedWindow> {
    let (id, role) = parse_name(&device.name)?;
    Some(PluggedWindow { id, role, size: device.size, address: device.address, took: None })
}

impl Machine {
    /// Connects to a monitor (`-qmp unix:PATH,server=on,wait=off`).
    pub fn connect(path: impl AsRef<Path>) -> Result<Self, VmError> {
        let mut qmp = Qmp::connect(path)?;
        let name = match qmp.machine_name()? {
            Some(name) => name,
            None => qmp.path().display().to_string(),
        };
        Ok(Self { qmp, name, known: None, layout: WindowLayout::Usual })
    }

    /// Plugs windows in as these devices from now on.
    #[must_use]
    pub fn with_layout(mut self, layout: WindowLayout) -> Self {
        self.layout = layout;
        self
    }

    /// The process behind the monitor, as far as the kernel says.
    pub fn process(&self) -> Result<u32, VmError> {
        Ok(self.qmp.process()?)
    }

    /// The name of the machine (`-name`), or else its monitor's path.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The options that it was started with, as far as windows depend on them.
    pub fn facts(&mut self) -> Result<Facts, VmError> {
        self.known = None;
        Ok(self.know()?.facts.clone())
    }

    /// The facts about the machine, asked for once in a session.
    fn know(&mut self) -> Result<&mut KnownMachine, VmError> {
        let known = match self.known.take() {
            Some(known) => known,
            None => self.find_out()?,
        };
        Ok(self.known.insert(known))
    }

    fn find_out(&mut self) -> Result<KnownMachine, VmError> {
        let Survey { status, version, machine, kvm, nvdimm, slots, room, devices } = self.qmp.survey()?;
        let has_ports = machine.contains("q35");
        let mut ports = if has_ports { self.ports()? } else { Vec::new() };
        let free_ports = if has_ports { Some(self.free_ports(&mut ports)?) } else { None };
        let name = self.name.clone();
        let (slots_used, room_used) = (0, 0);
        let facts =
            Facts { name, status, version, machine, kvm, nvdimm, slots, slots_used, room, room_used, free_ports };
        let mut known = KnownMachine { facts, devices: Vec::new(), ports };
        known.now_has(devices);
        Ok(known)
    }
}
