//! The queries about a machine's state.

use super::client::Qmp;
use super::error::QmpError;
use serde_json::{Value, json};
use std::path::Path;

/// Where QEMU has the devices that it was started with, or was given later: those with a name, and those without.
pub(crate) const DEVICE_FOLDERS: [&str; 2] = ["/machine/peripheral", "/machine/peripheral-anon"];

/// The options that a machine was started with, and its memory devices.
#[derive(Debug)]
pub(crate) struct Survey {
    /// `running`, `paused` and so on.
    pub(crate) status: String,
    /// QEMU's version.
    pub(crate) version: String,
    /// Its kind, as `pc-q35-7.2-machine`.
    pub(crate) machine: String,
    pub(crate) kvm: bool,
    pub(crate) nvdimm: bool,
    /// Places for nvdimms.
    pub(crate) slots: u64,
    /// Bytes of address space for memory devices.
    pub(crate) room: u64,
    pub(crate) devices: Vec<MemoryDevice>,
}

/// A character device, as `query-chardev` has it.
#[derive(Debug)]
pub(crate) struct Chardev {
    pub(crate) name: String,
    /// `unix:/run/a.port,server=on`, with `disconnected:` before it while no client is connected.
    pub(crate) filename: String,
    /// Whether a program of the guest has it open.
    pub(crate) open: bool,
}

impl Chardev {
    fn address(&self) -> &str {
        self.filename.strip_prefix("disconnected:").unwrap_or(&self.filename)
    }

    /// Where its socket is, if it is a UNIX socket that QEMU serves and that has a path.
    pub(crate) fn path(&self) -> Option<&str> {
        // QEMU 7.2 writes `,server=on`, others `,server`.
        let (path, _) = self.address().strip_prefix("unix:")?.split_once(",server")?;
        Some(path).filter(|path| !path.is_empty())
    }

    pub(crate) fn is_socket(&self) -> bool {
        self.address().starts_with("unix:") || self.address().starts_with("fd:")
    }

    /// Its folder may have been told to QEMU by another name.
    pub(crate) fn is_at(&self, socket: &Path) -> bool {
        self.path().is_some_and(|path| Path::new(path).file_name() == socket.file_name())
    }

    /// QEMU's own name for what `-qmp` and `-monitor` make.
    pub(crate) fn is_monitor(&self) -> bool {
        self.name.starts_with("compat_monitor")
    }
}

/// An object inside another, as `qom-list` has it.
#[derive(Debug)]
pub(crate) struct QomChild {
    pub(crate) name: String,
    /// As `child<virtio-pmem-pci>`.
    pub(crate) kind: String,
}

/// Memory that QEMU has made, as `query-memdev` has it.
#[derive(Debug)]
pub(crate) struct HostMemory {
    pub(crate) name: String,
    pub(crate) shared: bool,
}

/// A line of `query-memory-devices`.
#[derive(Debug, Clone)]
pub(crate) struct MemoryDevice {
    /// Empty if it was given none.
    pub(crate) name: String,
    pub(crate) size: u64,
    pub(crate) address: u64,
    /// It takes one of the slots.
    pub(crate) slot: bool,
}

const MEMORY_DEVICES: &str = "query-memory-devices";

impl Qmp {
    /// The name that the machine was started with (`-name`).
    pub(crate) fn machine_name(&mut self) -> Result<Option<String>, QmpError> {
        let named = self.execute("query-name", json!({}))?;
        Ok(named.get("name").and_then(Value::as_str).map(str::to_owned))
    }

    /// All that windows depend on, except for ports.
    pub(crate) fn survey(&mut self) -> Result<Survey, QmpError> {
        let property = |name: &str| ("qom-get", json!({ "path": "/machine", "property": name }));
        let asked = [
            ("query-version", json!({})),
            ("query-status", json!({})),
            ("query-kvm", json!({})),
            (MEMORY_DEVICES, json!({})),
            property("type"),
            property("memory"),
            property("nvdimm"),
        ];
        let mut answers = self.execute_all(&asked)?.into_iter();
        let mut next = || answers.next().unwrap_or(Ok(Value::Null));
        let (version, status, kvm, listed) = (next()?, next()?, next()?, next()?);
        let (machine, memory) = (next()?, next()?);
        // Machines that know nothing of nvdimms have no such property.
        let nvdimm = next().is_ok_and(|value| value == true);
        let number = |part: &str| version["qemu"][part].as_u64().unwrap_or(0);
        let bytes = |part: &str| memory.get(part).and_then(Value::as_u64).unwrap_or(0);
        let status = status["status"].as_str().ok_or(QmpError::Answer { command: "query-status" })?;
        Ok(Survey {
            status: status.to_owned(),
            version: format!("{}.{}.{}", number("major"), number("minor"), number("micro")),
            machine: machine.as_str().unwrap_or_default().to_owned(),
            kvm: kvm["enabled"].as_bool().unwrap_or(false),
            nvdimm,
            slots: bytes("slots"),
            room: bytes("max-size").saturating_sub(bytes("size")),
            devices: memory_devices(&listed)?,
        })
    }

    pub(crate) fn chardevs(&mut self) -> Result<Vec<Chardev>, QmpError> {
        let listed = self.execute("query-chardev", json!({}))?;
        let read = |port: &Value| Chardev {
            name: word(port, "label"),
            filename: word(port, "filename"),
            open: port["frontend-open"] == true,
        };
        Ok(listed.as_array().into_iter().flatten().map(read).collect())
    }

    pub(crate) fn memory_devices(&mut self) -> Result<Vec<MemoryDevice>, QmpError> {
        memory_devices(&self.execute(MEMORY_DEVICES, json!({}))?)
    }

    pub(crate) fn memory_backends(&mut self) -> Result<Vec<HostMemory>, QmpError> {
        let listed = self.execute("query-memdev", json!({}))?;
        let read = |memory: &Value| HostMemory { name: word(memory, "id"), shared: memory["share"] == true };
        Ok(listed.as_array().into_iter().flatten().map(read).collect())
    }

    /// A property of an object of QEMU's.
    pub(crate) fn property(&mut self, path: &str, property: &str) -> Result<Value, QmpError> {
        self.execute("qom-get", json!({ "path": path, "property": property }))
    }

    /// The objects inside an object of QEMU's.
    pub(crate) fn children(&mut self, path: &str) -> Result<Vec<QomChild>, QmpError> {
        children(&self.execute("qom-list", json!({ "path": path }))?)
    }

    /// The children of several objects, asked for together.
    pub(crate) fn children_of_each(&mut self, paths: &[String]) -> Result<Vec<Vec<QomChild>>, QmpError> {
        let asked: Vec<_> = paths.iter().map(|path| ("qom-list", json!({ "path": path }))).collect();
        self.execute_all(&asked)?.into_iter().map(|answer| children(&answer?)).collect()
    }
}

/// The command whose answer [`memory_devices`] reads.
pub(super) fn list_memory_devices() -> (&'static str, Value) {
    (MEMORY_DEVICES, json!({}))
}

pub(super) fn memory_devices(listed: &Value) -> Result<Vec<MemoryDevice>, QmpError> {
    let answer = || QmpError::Answer { command: MEMORY_DEVICES };
    let read = |device: &Value| {
        let data = device.get("data")?;
        Some(MemoryDevice {
            name: word(data, "id"),
            size: data.get("size")?.as_u64()?,
            address: data.get("addr").or(data.get("memaddr"))?.as_u64()?,
            slot: data.get("slot").is_some(),
        })
    };
    let devices = listed.as_array().ok_or_else(answer)?;
    devices.iter().map(|device| read(device).ok_or_else(answer)).collect()
}

fn children(listed: &Value) -> Result<Vec<QomChild>, QmpError> {
    let children = listed.as_array().ok_or(QmpError::Answer { command: "qom-list" })?;
    Ok(children.iter().map(|c| QomChild { name: word(c, "name"), kind: word(c, "type") }).collect())
}

fn word(of: &Value, part: &str) -> String {
    of[part].as_str().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chardev_that_was_handed_over_may_be_any_socket_that_exists() {
        let chardev = |filename: &str| Chardev { name: "c".into(), filename: filename.into(), open: false };
        let handed = chardev("disconnected:fd:24,server=on");
        assert!(handed.is_socket() && handed.path().is_none());
        let named = chardev("unix:/var/lib/libvirt/p,server");
        assert_eq!(named.path(), Some("/var/lib/libvirt/p"));
        assert!(!chardev("pty:/dev/pts/3").is_socket() && chardev("unix:/run/a.port").path().is_none());
    }
}
