//! A running machine: what it can take, what is in it, and how to change that.

use crate::error::VmError;
use crate::facts::Facts;
use crate::qmp::{Qmp, QmpError};
use crate::window::{Plugged, Role, Window, device_name, memory_name, parse_name};
use partywall_region::pmem::WindowId;
use partywall_shm::window::{DATA_OFFSET, STEP};
use serde_json::{Value, json};
use std::path::Path;
use std::time::{Duration, Instant};

/// How long a guest may take to let go of a device. Emulated and busy, it is slow.
const LET_GO: Duration = Duration::from_secs(10);

/// What became of a window that was to be taken out.
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

/// A machine, by its monitor.
#[derive(Debug)]
pub struct Machine {
    qmp: Qmp,
    name: String,
}

impl Machine {
    /// Connects to a monitor (`-qmp unix:PATH,server=on,wait=off`).
    pub fn connect(path: impl AsRef<Path>) -> Result<Self, VmError> {
        let mut qmp = Qmp::connect(path)?;
        let named = qmp.execute("query-name", json!({}))?;
        let name = match named.get("name").and_then(Value::as_str) {
            Some(name) => name.to_owned(),
            None => qmp.path().display().to_string(),
        };
        Ok(Self { qmp, name })
    }

    /// What it was started with (`-name`), or else its monitor's path.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What it was started with, as far as windows depend on it.
    pub fn facts(&mut self) -> Result<Facts, VmError> {
        let answer = |command| VmError::Answer { command };
        let version = self.qmp.execute("query-version", json!({}))?;
        let number = |part: &str| version["qemu"][part].as_u64().unwrap_or(0);
        let status = self.qmp.execute("query-status", json!({}))?;
        let kvm = self.qmp.execute("query-kvm", json!({}))?;
        let machine = self.property("type")?.and_then(|v| Some(v.as_str()?.to_owned())).unwrap_or_default();
        // Machines that know nothing of nvdimms have no such property.
        let nvdimm = self.property("nvdimm")?.and_then(|v| v.as_bool()).unwrap_or(false);
        let memory = self.property("memory")?.ok_or(answer("qom-get /machine memory"))?;
        let bytes = |part: &str| memory.get(part).and_then(Value::as_u64).unwrap_or(0);
        let devices = self.memory_devices()?;
        let free_ports = if machine.contains("q35") { Some(self.free_ports()?) } else { None };
        Ok(Facts {
            name: self.name.clone(),
            status: status["status"].as_str().ok_or(answer("query-status"))?.to_owned(),
            version: format!("{}.{}.{}", number("major"), number("minor"), number("micro")),
            machine,
            kvm: kvm["enabled"].as_bool().unwrap_or(false),
            nvdimm,
            slots: bytes("slots"),
            slots_used: devices.iter().filter(|d| d.slot).count() as u64,
            room: bytes("max-size").saturating_sub(bytes("size")),
            room_used: devices.iter().map(|d| d.size).sum(),
            free_ports,
        })
    }

    /// The windows in it.
    pub fn windows(&mut self) -> Result<Vec<Plugged>, VmError> {
        let devices = self.memory_devices()?;
        let ours = devices.into_iter().filter_map(|d| {
            let (id, role) = parse_name(&d.name)?;
            Some(Plugged { id, role, size: d.size, address: d.address, took: None })
        });
        Ok(ours.collect())
    }

    /// Plugs a window in. Where it is in already, nothing happens and [`Plugged::took`] is `None`.
    pub fn plug(&mut self, window: &Window, role: Role) -> Result<Plugged, VmError> {
        if window.size <= DATA_OFFSET || !window.size.is_multiple_of(STEP) {
            return Err(VmError::Size { size: window.size });
        }
        if let Some(there) = self.find(window.id, role)? {
            let taken = || VmError::Taken { machine: self.name.clone(), id: window.id };
            return if there.size == window.size { Ok(there) } else { Err(taken()) };
        }
        let facts = self.facts()?;
        if let Some(obstacle) = facts.obstacle(window.size, role) {
            return Err(VmError::Obstacle { machine: self.name.clone(), obstacle });
        }
        let start = Instant::now();
        self.add_memory(window, role)?;
        let memory = memory_name(window.id, role);
        let mut device = json!({ "id": device_name(window.id, role), "memdev": memory });
        match role {
            Role::Owner => {
                device["driver"] = json!("virtio-pmem-pci");
                if let Some(port) = facts.free_ports.iter().flatten().next() {
                    device["bus"] = json!(port);
                }
            }
            Role::Peer => {
                device["driver"] = json!("nvdimm");
                device["unarmed"] = json!(true);
            }
        }
        if let Err(e) = self.qmp.execute("device_add", device) {
            // Nothing stays behind, as far as QEMU lets us.
            let _ = self.qmp.execute("object-del", json!({ "id": memory }));
            return Err(e.into());
        }
        let took = start.elapsed();
        let there = self.find(window.id, role)?.ok_or(VmError::Answer { command: "query-memory-devices" })?;
        Ok(Plugged { took: Some(took), ..there })
    }

    /// Takes a window out, if QEMU and the guest let go of it. Whoever uses it in the guest must have let go before.
    pub fn unplug(&mut self, id: WindowId, role: Role) -> Result<Unplugged, VmError> {
        if self.find(id, role)?.is_none() {
            return Ok(Unplugged::Absent);
        }
        let name = device_name(id, role);
        let kept = |why| Ok(Unplugged::Kept { why });
        match self.qmp.execute("device_del", json!({ "id": name })) {
            Ok(_) => {}
            Err(QmpError::Refused { why, .. }) => return kept(why),
            Err(e) => return Err(e.into()),
        }
        let deadline = Instant::now() + LET_GO;
        let is_ours = |data: &Value| data.get("device").and_then(Value::as_str) == Some(&name);
        if !self.qmp.wait_event("DEVICE_DELETED", deadline, is_ours)? && self.find(id, role)?.is_some() {
            return kept(format!("the guest has not let go of it within {LET_GO:?}"));
        }
        match self.qmp.execute("object-del", json!({ "id": memory_name(id, role) })) {
            Ok(_) => Ok(Unplugged::Gone),
            Err(QmpError::Refused { why, .. }) => kept(why),
            Err(e) => Err(e.into()),
        }
    }

    fn find(&mut self, id: WindowId, role: Role) -> Result<Option<Plugged>, VmError> {
        Ok(self.windows()?.into_iter().find(|p| (p.id, p.role) == (id, role)))
    }

    fn add_memory(&mut self, window: &Window, role: Role) -> Result<(), VmError> {
        let id = memory_name(window.id, role);
        let memory = json!({
            "qom-type": "memory-backend-file",
            "id": id,
            "mem-path": window.path,
            "size": window.size,
            "share": true,
            "readonly": role == Role::Peer,
        });
        match self.qmp.execute("object-add", memory.clone()) {
            Ok(_) => return Ok(()),
            // An earlier attempt ended between memory and device. There is no device, so it can be made anew.
            Err(QmpError::Refused { why, .. }) if why.contains("duplicate") => {
                self.qmp.execute("object-del", json!({ "id": id }))?;
            }
            Err(e) => return Err(self.blame(e, window)),
        }
        self.qmp.execute("object-add", memory).map(drop).map_err(|e| self.blame(e, window))
    }

    fn blame(&self, e: QmpError, window: &Window) -> VmError {
        match e {
            QmpError::Refused { why, .. } if why.contains("open") => {
                VmError::NoAccess { machine: self.name.clone(), path: window.path.clone(), why }
            }
            e => e.into(),
        }
    }

    /// A property of the machine; `None` if it has none of that name.
    fn property(&mut self, name: &str) -> Result<Option<Value>, VmError> {
        match self.qmp.execute("qom-get", json!({ "path": "/machine", "property": name })) {
            Ok(value) => Ok(Some(value)),
            Err(QmpError::Refused { .. }) => Ok(None),
            Err(e) => Err(e.into()),
        }
    }

    fn memory_devices(&mut self) -> Result<Vec<MemoryDevice>, VmError> {
        let answer = || VmError::Answer { command: "query-memory-devices" };
        let listed = self.qmp.execute("query-memory-devices", json!({}))?;
        let devices = listed.as_array().ok_or_else(answer)?;
        devices.iter().map(|device| MemoryDevice::read(device).ok_or_else(answer)).collect()
    }

    /// Ports below which there is nothing, and that have a name to plug into.
    ///
    /// Not from `query-pci`: until the firmware has numbered the buses, that shows every port as empty.
    fn free_ports(&mut self) -> Result<Vec<String>, VmError> {
        let mut free = Vec::new();
        for device in self.children("/machine/peripheral")? {
            let is_port = ["pcie-root-port", "ioh3420", "xio3130-downstream"]
                .iter()
                .any(|kind| device.kind == format!("child<{kind}>"));
            // A port's bus has the port's name, and a link for each device on it.
            if is_port
                && !self
                    .children(&format!("/machine/peripheral/{0}/{0}", device.name))?
                    .iter()
                    .any(|child| child.name.starts_with("child["))
            {
                free.push(device.name);
            }
        }
        Ok(free)
    }

    fn children(&mut self, path: &str) -> Result<Vec<Child>, VmError> {
        let listed = self.qmp.execute("qom-list", json!({ "path": path }))?;
        let children = listed.as_array().ok_or(VmError::Answer { command: "qom-list" })?;
        let word = |child: &Value, part: &str| child[part].as_str().unwrap_or_default().to_owned();
        Ok(children.iter().map(|c| Child { name: word(c, "name"), kind: word(c, "type") }).collect())
    }
}

/// An object inside another, as `qom-list` has it.
struct Child {
    name: String,
    kind: String,
}

/// What a line of `query-memory-devices` says.
struct MemoryDevice {
    name: String,
    size: u64,
    address: u64,
    /// It takes one of the slots.
    slot: bool,
}

impl MemoryDevice {
    fn read(device: &Value) -> Option<Self> {
        let data = device.get("data")?;
        Some(Self {
            // One that was given no name is none of ours.
            name: data.get("id").and_then(Value::as_str).unwrap_or_default().to_owned(),
            size: data.get("size")?.as_u64()?,
            address: data.get("addr").or(data.get("memaddr"))?.as_u64()?,
            slot: data.get("slot").is_some(),
        })
    }
}
