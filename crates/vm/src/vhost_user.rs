//! Devices that a back end serves over vhost-user: a network card on a switch, and a disk. They come and go while the machine runs.
//!
//! QEMU has up to three objects for one: a chardev on the back end's socket, for a card a netdev, and the PCI device. Those that are made
//! here have the same name. A device is found by the socket of its chardev, whatever its name is; a card's netdev must have the name of its
//! chardev. Nothing is removed whose chardev is on another socket: names may be an operator's.

use crate::error::VmError;
use crate::facts::WindowObstacle;
use crate::machine::Machine;
use crate::qmp::{CardOptions, DEVICE_FOLDERS, DeviceKind, NewDevice, QmpError};
use crate::window;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The only kind of memory that can neither shrink nor be private.
const MEMFD: &str = "child<memory-backend-memfd>";
/// How often a chardev is tried whose device is gone. QEMU frees a device soon after it has reported its end.
const RETRY: Duration = Duration::from_millis(20);

/// A device on a vhost-user back end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VhostUserDevice {
    /// The name in QEMU that it and its back end there get when it is plugged in.
    pub name: String,
    /// The absolute path of the socket where its back end listens. It says which device this is.
    pub socket: PathBuf,
    /// The kind of device for the machine.
    pub kind: VhostUserKind,
}

/// The kind of a device from a vhost-user back end.
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
    /// The settings of a network card.
    Card(CardOptions),
    /// The settings of a disk.
    Disk {
        /// Its queues.
        queues: u16,
    },
}

/// A device that the machine has.
struct PluggedVhostUser {
    /// Where QEMU has it.
    path: String,
    /// The name of its chardev, and of a card's netdev.
    back_end: String,
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

    /// Removes what an earlier device left: a guest may release it after the command has ended that waited for it. Until then, QEMU stays
    /// connected to the back end.
    pub fn remove_vhost_user_leftovers(&mut self, device: &VhostUserDevice) -> Result<(), VmError> {
        self.remove_back_end(device, &device.name).map(drop)
    }

    /// Plugs a device in; `false` if it was there before, and nothing is done then.
    pub fn plug_vhost_user(&mut self, device: &VhostUserDevice, options: &VhostUserOptions) -> Result<bool, VmError> {
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
        self.remove_vhost_user_leftovers(device)?;
        let name = &device.name;
        if let Some(socket) = self.socket_of(name)?
            && !is_same_socket(&socket, &device.socket)
        {
            return Err(VmError::OtherSocket { machine: self.name().to_owned(), name: name.clone(), socket });
        }
        self.qmp.add_chardev_at(name, &device.socket)?;
        let kind = match options {
            VhostUserOptions::Card(card) => DeviceKind::Card { netdev: name.clone(), card: card.clone(), no_vectors },
            VhostUserOptions::Disk { queues } => DeviceKind::Disk { chardev: name.clone(), queues: *queues },
        };
        let added = match options {
            VhostUserOptions::Card(card) => self.qmp.add_netdev(name, card.queues),
            VhostUserOptions::Disk { .. } => Ok(()),
        };
        let added = added.and_then(|()| self.qmp.add_device(&NewDevice { name: name.clone(), kind, port }));
        match added {
            Ok(()) => Ok(true),
            Err(e) => {
                let _ = self.remove_back_end(device, name);
                Err(if e.is_no_slot() { no_place() } else { e.into() })
            }
        }
    }

    /// Takes a device out, which its guest has to release until `deadline`; `false` if there is none.
    pub fn unplug_vhost_user(&mut self, device: &VhostUserDevice, deadline: Instant) -> Result<bool, VmError> {
        let found = self.find_vhost_user(device)?;
        if let Some(PluggedVhostUser { path, .. }) = &found {
            match self.qmp.delete_device(path) {
                // The guest was asked before.
                Err(e) if e.is_being_unplugged() => {}
                asked => asked?,
            }
            if !self.qmp.wait_until_deleted(path, deadline)? && self.has_vhost_user(device)? {
                return Err(VmError::NotReleased { machine: self.name().to_owned(), device: device.name.clone() });
            }
        }
        // Objects that are still in use for a moment are tried again.
        let back_end = found.as_ref().map_or(&device.name, |found| &found.back_end);
        while self.remove_back_end(device, back_end)? && Instant::now() < deadline {
            std::thread::sleep(RETRY);
        }
        Ok(found.is_some())
    }

    fn find_vhost_user(&mut self, device: &VhostUserDevice) -> Result<Option<PluggedVhostUser>, VmError> {
        for folder in DEVICE_FOLDERS {
            for child in self.qmp.children(folder)? {
                if !child.kind.contains(device.kind.driver()) {
                    continue;
                }
                let path = format!("{folder}/{}", child.name);
                let back_end = self.qmp.property(&path, device.kind.back_end())?;
                let Some(back_end) = back_end.as_str().filter(|name| !name.is_empty()) else { continue };
                if self.is_on_socket(back_end, &device.socket)? {
                    return Ok(Some(PluggedVhostUser { path, back_end: back_end.to_owned() }));
                }
            }
        }
        Ok(None)
    }

    /// Removes what no device uses and is on the device's socket; `true` if something is still in use.
    fn remove_back_end(&mut self, device: &VhostUserDevice, name: &str) -> Result<bool, VmError> {
        if !self.is_on_socket(name, &device.socket)? {
            return Ok(false);
        }
        if device.kind == VhostUserKind::Card {
            let _ = self.qmp.delete_netdev(name);
        }
        Ok(self.qmp.remove_chardev(name).is_err_and(|e| e.is_in_use()))
    }

    fn is_on_socket(&mut self, chardev: &str, socket: &Path) -> Result<bool, VmError> {
        Ok(self.socket_of(chardev)?.is_some_and(|there| is_same_socket(&there, socket)))
    }

    /// The UNIX socket of a chardev; `None` if there is no such chardev, or it is something else.
    ///
    /// `query-chardev` does not say it: while a client is connected, QEMU shows the address of the client's own end, which is empty.
    fn socket_of(&mut self, chardev: &str) -> Result<Option<PathBuf>, VmError> {
        match self.qmp.property(&format!("/chardevs/{chardev}"), "addr") {
            Ok(address) if address["type"] == "unix" => Ok(address["path"].as_str().map(PathBuf::from)),
            Ok(_) | Err(QmpError::Refused { .. }) => Ok(None),
            Err(e) => Err(e.into()),
        }
    }

    /// A back end maps the machine's memory.
    fn expect_shared_memory(&mut self) -> Result<(), VmError> {
        let main = self.qmp.property("/machine", "memory-backend")?;
        let main = main.as_str().and_then(|path| path.rsplit('/').next()).unwrap_or_default();
        let kinds = self.qmp.children("/objects")?;
        for memory in self.qmp.memory_backends()? {
            let is_memfd = kinds.iter().any(|object| object.name == memory.name && object.kind == MEMFD);
            // Without one for the whole machine, its nodes have theirs. Windows are none of them.
            let is_main = if main.is_empty() { !window::is_memory(&memory.name) } else { memory.name == main };
            if is_main && !(memory.shared && is_memfd) {
                return Err(VmError::NoSharedMemory { machine: self.name().to_owned(), memory: memory.name });
            }
        }
        Ok(())
    }
}

/// Whether two paths name the same socket. Its back end may have ended, and a folder may have two names.
fn is_same_socket(a: &Path, b: &Path) -> bool {
    let folder = |path: &Path| path.parent().and_then(|folder| folder.canonicalize().ok());
    a == b || a.file_name() == b.file_name() && folder(a).is_some_and(|of_a| folder(b) == Some(of_a))
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

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};
    use std::collections::BTreeMap;
    use std::io::{BufRead as _, BufReader, Write as _};
    use std::os::unix::net::UnixListener;

    /// The objects of a test machine. The commands that change it are recorded.
    #[derive(Clone)]
    struct TestMachine {
        /// Cards by their names, each with its netdev.
        cards: BTreeMap<String, String>,
        /// Chardevs and their sockets.
        chardevs: BTreeMap<String, String>,
        /// Kinds of memory, which is shared.
        memory: Vec<(&'static str, &'static str)>,
        /// Netdevs that were added, with their options.
        netdevs: Vec<Value>,
    }

    impl TestMachine {
        fn new(devices: &[(&str, &str)]) -> Self {
            let pairs = |f: fn(&(&str, &str)) -> (String, String)| devices.iter().map(f).collect();
            Self {
                cards: pairs(|(name, _)| ((*name).into(), (*name).into())),
                chardevs: pairs(|(name, socket)| ((*name).into(), (*socket).into())),
                memory: Vec::new(),
                netdevs: Vec::new(),
            }
        }

        fn answer(&mut self, command: &str, arguments: &Value) -> Value {
            let name = arguments["id"].as_str().unwrap_or_default().to_owned();
            let path = arguments["path"].as_str().unwrap_or_default();
            let last = path.rsplit('/').next().unwrap_or_default();
            let absent = json!({ "error": { "desc": "not found" } });
            let mut events = String::new();
            let answer = match (command, arguments["property"].as_str()) {
                ("qom-list", _) if path == "/machine/peripheral" => {
                    json!(
                        self.cards
                            .keys()
                            .map(|n| json!({ "name": n, "type": "child<virtio-net-pci>" }))
                            .collect::<Vec<_>>()
                    )
                }
                ("qom-list", _) if path == "/objects" => {
                    json!(self.memory.iter().map(|(n, kind)| json!({ "name": n, "type": kind })).collect::<Vec<_>>())
                }
                ("query-memdev", _) => {
                    json!(self.memory.iter().map(|(n, _)| json!({ "id": n, "share": true })).collect::<Vec<_>>())
                }
                ("qom-list" | "query-memory-devices", _) => json!([]),
                ("qom-get", Some("addr")) => match self.chardevs.get(last) {
                    Some(socket) => json!({ "type": "unix", "path": socket }),
                    None => return absent,
                },
                ("qom-get", Some("netdev")) => json!(self.cards.get(last)),
                ("qom-get", Some("memory-backend")) => json!(""),
                ("qom-get", Some("type")) => json!("pc"),
                ("query-status", _) => json!({ "status": "running" }),
                ("device_del", _) => {
                    events = format!("{}\n", json!({ "event": "DEVICE_DELETED", "data": { "path": name } }));
                    self.cards.remove(name.rsplit('/').next().unwrap_or_default());
                    json!({})
                }
                ("netdev_add", _) => {
                    self.netdevs.push(arguments.clone());
                    json!({})
                }
                ("chardev-add", _) => {
                    self.chardevs
                        .insert(name, arguments["backend"]["data"]["addr"]["data"]["path"].as_str().unwrap().into());
                    json!({})
                }
                ("chardev-remove", _) => {
                    self.chardevs.remove(&name);
                    json!({})
                }
                ("device_add", _) => {
                    self.cards.insert(name, arguments["netdev"].as_str().unwrap().into());
                    json!({})
                }
                _ => json!({}),
            };
            json!({ "answer": { "return": answer }, "events": events })
        }

        /// Its monitor, for one client at a time, and what the client asked to change.
        fn run(mut self, test: impl FnOnce(&mut Machine)) -> (Self, Vec<String>) {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("qmp");
            let listener = UnixListener::bind(&path).unwrap();
            let served = std::thread::spawn(move || {
                let (stream, _) = listener.accept().unwrap();
                (&stream).write_all(b"{\"QMP\": {}}\n").unwrap();
                let mut changes = Vec::new();
                for line in BufReader::new(stream.try_clone().unwrap()).lines() {
                    let asked: Value = serde_json::from_str(&line.unwrap()).unwrap();
                    let command = asked["execute"].as_str().unwrap();
                    if ["netdev_del", "netdev_add", "chardev-remove", "chardev-add", "device_del"].contains(&command) {
                        changes.push(format!("{command} {}", asked["arguments"]["id"].as_str().unwrap()));
                    }
                    let answer = self.answer(command, &asked["arguments"]);
                    let line = if answer["error"].is_null() { &answer["answer"] } else { &answer };
                    write!(&stream, "{line}\n{}", answer["events"].as_str().unwrap_or_default()).unwrap();
                }
                (self, changes)
            });
            let mut machine = Machine::connect(&path).unwrap();
            test(&mut machine);
            drop(machine);
            served.join().unwrap()
        }
    }

    fn card(name: &str, socket: &str) -> VhostUserDevice {
        VhostUserDevice { name: name.into(), socket: socket.into(), kind: VhostUserKind::Card }
    }

    fn options() -> VhostUserOptions {
        VhostUserOptions::Card(CardOptions { mac: "52:54:00:00:00:01".into(), entries: 256, queues: 2, mtu: None })
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    #[test]
    fn card_on_another_socket_is_another_card_whatever_its_name() {
        let lan = card("net-a", "/run/lan/a.port");
        let there = TestMachine::new(&[("net-a", "/run/wan/a.port"), ("of-the-operator", "/run/lan/b.port")]);
        let (after, changes) = there.run(|machine| {
            assert!(!machine.has_vhost_user(&lan).unwrap());
            assert!(!machine.unplug_vhost_user(&lan, soon()).unwrap());
            let refused = machine.plug_vhost_user(&lan, &options()).unwrap_err().to_string();
            assert!(refused.contains("net-a") && refused.contains("/run/wan/a.port"), "{refused}");
            assert!(machine.plug_vhost_user(&card("net-lan-a", "/run/lan/a.port"), &options()).unwrap());
            assert!(!machine.plug_vhost_user(&lan, &options()).unwrap(), "in place");
            assert!(machine.unplug_vhost_user(&card("net-lan-b", "/run/lan/b.port"), soon()).unwrap());
        });
        assert_eq!(after.cards.keys().collect::<Vec<_>>(), ["net-a", "net-lan-a"]);
        let netdev = json!({ "type": "vhost-user", "id": "net-lan-a", "chardev": "net-lan-a", "queues": 2 });
        assert_eq!(after.netdevs, [netdev]);
        let of_b = "device_del /machine/peripheral/of-the-operator";
        let ended = [of_b, "netdev_del of-the-operator", "chardev-remove of-the-operator"];
        assert_eq!(changes, [&["chardev-add net-lan-a", "netdev_add net-lan-a"][..], &ended].concat());
    }

    #[test]
    fn leftovers_are_removed_only_from_the_own_socket() {
        let mut there = TestMachine::new(&[("ours", "/run/lan/a.port"), ("other", "/run/x")]);
        there.cards.clear();
        let (_, changes) = there.run(|machine| {
            for name in ["ours", "other", "no-chardev"] {
                machine.remove_vhost_user_leftovers(&card(name, "/run/lan/a.port")).unwrap();
            }
        });
        assert_eq!(changes, ["netdev_del ours", "chardev-remove ours"]);
    }

    #[test]
    fn shared_file_of_a_node_is_refused_and_a_window_is_not() {
        let file = "child<memory-backend-file>";
        let window = window::memory_name(partywall_region::pmem::WindowId([1; 16]), window::WindowRole::Owner);
        let window: &'static str = window.leak();
        for (other, is_refused) in [("node1", true), (window, false)] {
            let mut there = TestMachine::new(&[]);
            there.memory = vec![("node0", MEMFD), (other, file)];
            there.run(|machine| {
                let done = machine.plug_vhost_user(&card("c", "/run/lan/a.port"), &options());
                assert_eq!(matches!(done, Err(VmError::NoSharedMemory { .. })), is_refused, "{other}: {done:?}");
            });
        }
    }
}
