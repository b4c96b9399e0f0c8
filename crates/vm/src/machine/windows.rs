//! Windows as memory devices of a machine.

use super::{Machine, WindowLayout, window};
use crate::error::VmError;
use crate::qmp::{DeviceKind, GivenFile, MemoryBackend, NewDevice, PluggedTogether, QmpError};
use crate::window::{PluggedWindow, WindowDevice, WindowRole, device_name, memory_name};
use partywall_protocol::window::{DATA_OFFSET, STEP};
use partywall_region::pmem::{WindowId, let_in};
use rustix::fd::AsFd as _;
use rustix::fs::{Mode, OFlags};
use std::time::{Duration, Instant};

/// How long a guest may take to release a device. An emulated guest on a busy host is slow.
const LET_GO: Duration = Duration::from_secs(10);

/// The result of unplugging a window.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Unplugged {
    /// It is gone.
    Gone,
    /// It was not there.
    Absent,
    /// QEMU or the guest keeps it until the machine ends. Its memory still belongs to this pair of machines and must not
    /// be used for another.
    Kept {
        /// In QEMU's words.
        why: String,
    },
}

/// The memory behind a window.
fn memory_of(window: &WindowDevice, role: WindowRole) -> MemoryBackend {
    MemoryBackend { name: memory_name(window.id, role), size: window.size, read_only: role == WindowRole::Peer }
}

/// The memory device that a window is.
fn device_of(id: WindowId, role: WindowRole, layout: WindowLayout, port: Option<String>) -> NewDevice {
    let memory = memory_name(id, role);
    let kind = match (role, layout) {
        (WindowRole::Owner, _) | (_, WindowLayout::Migratable) => DeviceKind::VirtioPmem { memory },
        (WindowRole::Peer, WindowLayout::Usual) => DeviceKind::Nvdimm { memory },
    };
    NewDevice { name: device_name(id, role), kind, port }
}

impl Machine {
    /// The windows in it.
    pub fn windows(&mut self) -> Result<Vec<PluggedWindow>, VmError> {
        Ok(self.qmp.memory_devices()?.iter().filter_map(window).collect())
    }

    /// Plugs a window in. Where it is in already, nothing happens and [`PluggedWindow::took`] is `None`.
    pub fn plug(&mut self, window: &WindowDevice, role: WindowRole) -> Result<PluggedWindow, VmError> {
        if window.size <= DATA_OFFSET || !window.size.is_multiple_of(STEP) {
            return Err(VmError::Size { size: window.size });
        }
        if let Some(there) = self.know()?.find(window.id, role) {
            return self.same(there, window);
        }
        self.know_a_free_port()?;
        let layout = self.layout;
        let facts = &self.know()?.facts;
        // A window that is a `virtio-pmem` takes what one takes that the machine writes.
        let takes = if layout == WindowLayout::Migratable { WindowRole::Owner } else { role };
        if let Some(obstacle) = facts.obstacle(window.size, takes) {
            return Err(VmError::Obstacle { machine: self.name.clone(), obstacle });
        }
        let port = facts.free_ports.iter().flatten().next().filter(|_| takes == WindowRole::Owner).cloned();
        let start = Instant::now();
        let given = self.give(window, role)?;
        let asked =
            self.qmp.plug(&memory_of(window, role), &given, &device_of(window.id, role, layout, port.clone()))?;
        let PluggedTogether { memory, device, devices } = asked;
        let took = start.elapsed();
        let known = self.know()?;
        known.now_has(devices);
        let there = known.find(window.id, role);
        match (memory, device) {
            // Memory that is there already is what an attempt left that ended between memory and device.
            (Ok(()), Ok(())) => {}
            (Err(e), Ok(())) if e.is_duplicate() => {}
            // Another client may have plugged it in meanwhile, through another monitor.
            (Err(e), Err(refused)) if e.is_duplicate() => match there {
                Some(there) => return self.same(there, window),
                None => return Err(refused.into()),
            },
            (Err(e), _) => return Err(self.blame(e, window)),
            (Ok(()), Err(e)) => {
                // Removes the memory again, if QEMU allows it.
                let _ = self.qmp.delete_object(&memory_name(window.id, role));
                return Err(e.into());
            }
        }
        if let (Some(port), Some(free)) = (port, &mut known.facts.free_ports) {
            free.retain(|other| *other != port);
        }
        let there = there.ok_or(QmpError::Answer { command: "query-memory-devices" })?;
        Ok(PluggedWindow { took: Some(took), ..self.same(there, window)? })
    }

    /// A window that is in the machine, if it is the one that is meant.
    fn same(&self, there: PluggedWindow, window: &WindowDevice) -> Result<PluggedWindow, VmError> {
        let taken = || VmError::Taken { machine: self.name.clone(), id: window.id };
        if there.size == window.size { Ok(there) } else { Err(taken()) }
    }

    /// Unplugs a window, if QEMU and the guest release it. Programs in the guest must have unmapped it before.
    pub fn unplug(&mut self, id: WindowId, role: WindowRole) -> Result<Unplugged, VmError> {
        if self.find(id, role)?.is_none() {
            return Ok(Unplugged::Absent);
        }
        let name = device_name(id, role);
        let kept = |why| Ok(Unplugged::Kept { why });
        match self.qmp.delete_device(&name) {
            Ok(()) => {}
            Err(QmpError::Refused { why, .. }) => return kept(why),
            Err(e) => return Err(e.into()),
        }
        if !self.qmp.wait_until_deleted(&name, Instant::now() + LET_GO)? && self.find(id, role)?.is_some() {
            return kept(format!("the guest has not released it within {LET_GO:?}"));
        }
        match self.qmp.delete_object(&memory_name(id, role)) {
            Ok(()) => Ok(Unplugged::Gone),
            Err(QmpError::Refused { why, .. }) => kept(why),
            Err(e) => Err(e.into()),
        }
    }

    /// Whether it is in the machine now, whatever was known.
    fn find(&mut self, id: WindowId, role: WindowRole) -> Result<Option<PluggedWindow>, VmError> {
        self.known = None;
        Ok(self.windows()?.into_iter().find(|p| (p.id, p.role) == (id, role)))
    }

    /// Adds the memory behind a window.
    pub(crate) fn add_memory(&mut self, window: &WindowDevice, role: WindowRole) -> Result<(), VmError> {
        let given = self.give(window, role)?;
        match self.qmp.add_memory(&memory_of(window, role), &given) {
            // An earlier attempt ended between memory and device.
            Err(e) if e.is_duplicate() => Ok(()),
            Err(e) => Err(self.blame(e, window)),
            Ok(()) => Ok(()),
        }
    }

    /// Gives QEMU the window's file. Another user's QEMU, or one that is confined, could not open a path of this process; what it
    /// has been given it opens again as its own.
    fn give(&mut self, window: &WindowDevice, role: WindowRole) -> Result<GivenFile, VmError> {
        let path = || window.path.clone();
        let access = if role == WindowRole::Owner { OFlags::RDWR } else { OFlags::RDONLY };
        let (machine, user) = (self.name.clone(), self.qmp.user()?);
        let file = rustix::fs::open(&window.path, access | OFlags::CLOEXEC, Mode::empty());
        let granted = file.map_err(std::io::Error::from).and_then(|file| {
            if user != 0 && user != rustix::process::geteuid().as_raw() {
                let_in(&file, user, role == WindowRole::Owner)?;
            }
            Ok(file)
        });
        let file = granted.map_err(|source| VmError::Grant { machine, path: path(), user, source })?;
        Ok(self.qmp.give(file.as_fd())?)
    }

    fn blame(&self, e: QmpError, window: &WindowDevice) -> VmError {
        match e {
            QmpError::Refused { why, .. } if why.contains("open") => {
                VmError::NoAccess { machine: self.name.clone(), path: window.path.clone(), why }
            }
            e => e.into(),
        }
    }
}
