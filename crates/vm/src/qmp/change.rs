//! The commands that add devices to a machine, and remove them.

use super::client::Qmp;
use super::error::QmpError;
use super::query::{MemoryDevice, list_memory_devices, memory_devices};
use rustix::fd::BorrowedFd;
use serde_json::{Value, json};
use std::path::Path;
use std::time::Instant;

/// A file that QEMU was given as a descriptor.
#[derive(Debug)]
pub(crate) struct GivenFile {
    set: u64,
    descriptor: u64,
}

/// Memory behind a device: a file that QEMU was given.
#[derive(Debug)]
pub(crate) struct MemoryBackend {
    pub(crate) name: String,
    pub(crate) size: u64,
    pub(crate) read_only: bool,
}

/// The kind of a device to plug in, with its back end.
#[derive(Debug)]
pub(crate) enum DeviceKind {
    /// Memory that the machine writes.
    VirtioPmem { memory: String },
    /// Memory that the machine only reads.
    Nvdimm { memory: String },
    /// Memory of a PCI device.
    IvshmemPlain { memory: String },
    /// A doorbell device on a chardev.
    IvshmemDoorbell { chardev: String, vectors: u16 },
    /// A network card on a netdev.
    Card { netdev: String, card: CardOptions, no_vectors: bool },
    /// A disk on a chardev whose other end is a vhost-user back end.
    Disk { chardev: String, queues: u16 },
}

/// The settings of a network card that is plugged in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CardOptions {
    /// Its Ethernet address.
    pub mac: String,
    /// Entries of each of its queues.
    pub entries: u16,
    /// Its pairs of queues.
    pub queues: u16,
    /// The largest packet that the guest sends, in bytes; the guest's own choice without it.
    pub mtu: Option<u16>,
}

/// A device that is to be plugged in.
#[derive(Debug)]
pub(crate) struct NewDevice {
    pub(crate) name: String,
    pub(crate) kind: DeviceKind,
    /// The port that it is plugged into; `None` where QEMU chooses.
    pub(crate) port: Option<String>,
}

/// The result of plugging in memory and a device together.
#[derive(Debug)]
pub(crate) struct PluggedTogether {
    pub(crate) memory: Result<(), QmpError>,
    pub(crate) device: Result<(), QmpError>,
    /// The memory devices in the machine afterwards.
    pub(crate) devices: Vec<MemoryDevice>,
}

type Command = (&'static str, Value);

impl GivenFile {
    /// Makes QEMU close the descriptor, once it has opened the file again.
    fn taken_back(&self) -> Command {
        ("remove-fd", json!({ "fdset-id": self.set }))
    }
}

impl MemoryBackend {
    fn add(&self, file: &GivenFile) -> Command {
        let arguments = json!({
            "qom-type": "memory-backend-file",
            "id": self.name,
            // QEMU opens it as its own.
            "mem-path": format!("/proc/self/fd/{}", file.descriptor),
            "size": self.size,
            "share": true,
            "readonly": self.read_only,
        });
        ("object-add", arguments)
    }
}

impl NewDevice {
    fn add(&self) -> Command {
        let name = &self.name;
        let mut arguments = match &self.kind {
            DeviceKind::VirtioPmem { memory } => json!({ "driver": "virtio-pmem-pci", "id": name, "memdev": memory }),
            DeviceKind::Nvdimm { memory } => {
                json!({ "driver": "nvdimm", "id": name, "memdev": memory, "unarmed": true })
            }
            // A device that is not master of its memory keeps the machine from being saved or migrated. QEMU 10 takes the word alone.
            DeviceKind::IvshmemPlain { memory } => {
                json!({ "driver": "ivshmem-plain", "id": name, "memdev": memory, "master": "on" })
            }
            DeviceKind::IvshmemDoorbell { chardev, vectors } => json!({
                "driver": "ivshmem-doorbell", "id": name, "chardev": chardev, "vectors": vectors, "master": "on",
            }),
            DeviceKind::Card { netdev, card: CardOptions { mac, entries, queues, mtu }, no_vectors } => {
                let mut card = json!({
                    "driver": "virtio-net-pci", "id": name, "netdev": netdev, "mac": mac,
                    "rx_queue_size": entries, "tx_queue_size": entries,
                });
                // QEMU computes the number of interrupt vectors from the number of queues.
                if *queues > 1 {
                    card["mq"] = json!(true);
                }
                if let Some(mtu) = mtu {
                    card["host_mtu"] = json!(mtu);
                }
                if *no_vectors {
                    card["vectors"] = json!(0);
                }
                card
            }
            DeviceKind::Disk { chardev, queues } => {
                json!({ "driver": "vhost-user-blk-pci", "id": name, "chardev": chardev, "num-queues": queues })
            }
        };
        if let Some(port) = &self.port {
            arguments["bus"] = json!(port);
        }
        ("device_add", arguments)
    }
}

impl Qmp {
    /// Gives QEMU a file.
    pub(crate) fn give(&mut self, file: BorrowedFd<'_>) -> Result<GivenFile, QmpError> {
        let answer = self.execute_with("add-fd", json!({ "opaque": "partywall" }), file)?;
        let number = |part: &str| answer[part].as_u64().ok_or(QmpError::Answer { command: "add-fd" });
        Ok(GivenFile { set: number("fdset-id")?, descriptor: number("fd")? })
    }

    /// Adds memory from a file, which QEMU then no longer holds as given.
    pub(crate) fn add_memory(&mut self, memory: &MemoryBackend, file: &GivenFile) -> Result<(), QmpError> {
        let asked = [memory.add(file), file.taken_back()];
        self.execute_all(&asked)?.into_iter().next().unwrap_or(Ok(Value::Null)).map(drop)
    }

    /// Adds memory and the device in front of it, all sent together.
    pub(crate) fn plug(
        &mut self,
        memory: &MemoryBackend,
        file: &GivenFile,
        device: &NewDevice,
    ) -> Result<PluggedTogether, QmpError> {
        let asked = [memory.add(file), device.add(), file.taken_back(), list_memory_devices()];
        let mut answers = self.execute_all(&asked)?.into_iter();
        let mut next = || answers.next().unwrap_or(Ok(Value::Null));
        let (memory, device, _, listed) = (next().map(drop), next().map(drop), next(), next()?);
        Ok(PluggedTogether { memory, device, devices: memory_devices(&listed)? })
    }

    pub(crate) fn add_device(&mut self, device: &NewDevice) -> Result<(), QmpError> {
        let (command, arguments) = device.add();
        self.execute(command, arguments).map(drop)
    }

    /// Asks the guest to release a device, named by its id or its path: [`Self::wait_until_deleted`].
    pub(crate) fn delete_device(&mut self, name: &str) -> Result<(), QmpError> {
        self.execute("device_del", json!({ "id": name })).map(drop)
    }

    /// Waits until the guest has released a device; `false` if it has not by `deadline`.
    pub(crate) fn wait_until_deleted(&mut self, name: &str, deadline: Instant) -> Result<bool, QmpError> {
        let is_it = |data: &Value| ["device", "path"].iter().any(|part| data[part] == name);
        self.wait_event("DEVICE_DELETED", deadline, is_it)
    }

    pub(crate) fn delete_object(&mut self, name: &str) -> Result<(), QmpError> {
        self.execute("object-del", json!({ "id": name })).map(drop)
    }

    /// Adds a chardev on a connected UNIX socket, which QEMU is given.
    pub(crate) fn add_chardev(&mut self, name: &str, socket: BorrowedFd<'_>) -> Result<(), QmpError> {
        self.execute_with("getfd", json!({ "fdname": name }), socket)?;
        let address = json!({ "type": "fd", "data": { "str": name } });
        let backend = json!({ "type": "socket", "data": { "addr": address, "server": false } });
        let added = self.execute("chardev-add", json!({ "id": name, "backend": backend }));
        if added.is_err() {
            let _ = self.execute("closefd", json!({ "fdname": name }));
        }
        added.map(drop)
    }

    /// Adds a chardev on the UNIX socket that a back end serves at `path`. QEMU connects again when the back end has ended.
    pub(crate) fn add_chardev_at(&mut self, name: &str, path: &Path) -> Result<(), QmpError> {
        let address = json!({ "type": "unix", "data": { "path": path } });
        let backend = json!({ "type": "socket", "data": { "addr": address, "server": false, "reconnect": 1 } });
        self.execute("chardev-add", json!({ "id": name, "backend": backend })).map(drop)
    }

    /// Adds a vhost-user netdev on the chardev of the same name.
    pub(crate) fn add_netdev(&mut self, name: &str, queues: u16) -> Result<(), QmpError> {
        let netdev = json!({ "type": "vhost-user", "id": name, "chardev": name, "queues": queues });
        self.execute("netdev_add", netdev).map(drop)
    }

    pub(crate) fn delete_netdev(&mut self, name: &str) -> Result<(), QmpError> {
        self.execute("netdev_del", json!({ "id": name })).map(drop)
    }

    pub(crate) fn remove_chardev(&mut self, name: &str) -> Result<(), QmpError> {
        self.execute("chardev-remove", json!({ "id": name })).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_device_is_added_with_its_options() {
        let memory = || "m".to_owned();
        let cases = [
            (DeviceKind::VirtioPmem { memory: memory() }, json!({ "driver": "virtio-pmem-pci", "memdev": "m" })),
            (DeviceKind::Nvdimm { memory: memory() }, json!({ "driver": "nvdimm", "memdev": "m", "unarmed": true })),
            (
                DeviceKind::IvshmemPlain { memory: memory() },
                json!({ "driver": "ivshmem-plain", "memdev": "m", "master": "on" }),
            ),
            (
                DeviceKind::IvshmemDoorbell { chardev: "c".into(), vectors: 32 },
                json!({ "driver": "ivshmem-doorbell", "chardev": "c", "vectors": 32, "master": "on" }),
            ),
            (
                DeviceKind::Disk { chardev: "c".into(), queues: 2 },
                json!({ "driver": "vhost-user-blk-pci", "chardev": "c", "num-queues": 2 }),
            ),
        ];
        for (kind, mut expected) in cases {
            expected["id"] = json!("d");
            let device = NewDevice { name: "d".into(), kind, port: None };
            assert_eq!(device.add(), ("device_add", expected.clone()));
            expected["bus"] = json!("port1");
            assert_eq!(NewDevice { port: Some("port1".into()), ..device }.add(), ("device_add", expected));
        }
    }

    #[test]
    fn card_is_added_with_its_queues_and_mtu() {
        let added = |queues, mtu, no_vectors| {
            let card = CardOptions { mac: "52:54:00:00:00:01".into(), entries: 1024, queues, mtu };
            let kind = DeviceKind::Card { netdev: "n".into(), card, no_vectors };
            NewDevice { name: "d".into(), kind, port: None }.add().1
        };
        let mut expected = json!({
            "driver": "virtio-net-pci", "id": "d", "netdev": "n", "mac": "52:54:00:00:00:01",
            "rx_queue_size": 1024, "tx_queue_size": 1024,
        });
        assert_eq!(added(1, None, false), expected);
        expected["vectors"] = json!(0);
        assert_eq!(added(1, None, true), expected);
        expected["mq"] = json!(true);
        expected["host_mtu"] = json!(9000);
        assert_eq!(added(4, Some(9000), true), expected);
    }

    #[test]
    fn memory_backend_is_shared_and_opened_by_descriptor() {
        let file = GivenFile { set: 3, descriptor: 20 };
        for read_only in [false, true] {
            let expected = json!({
                "qom-type": "memory-backend-file", "id": "m", "mem-path": "/proc/self/fd/20",
                "size": 4096, "share": true, "readonly": read_only,
            });
            let memory = MemoryBackend { name: "m".into(), size: 4096, read_only };
            assert_eq!(memory.add(&file), ("object-add", expected));
        }
        assert_eq!(file.taken_back(), ("remove-fd", json!({ "fdset-id": 3 })));
    }
}
