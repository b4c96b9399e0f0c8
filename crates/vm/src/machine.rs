//! A running machine: what it can take, what is in it, and how to change that.

use crate::error::VmError;
use crate::facts::{Facts, Obstacle};
use crate::qmp::{Qmp, QmpError};
use crate::window::{Plugged, Role, WindowDevice, device_name, memory_name, parse_name};
use partywall_protocol::window::{DATA_OFFSET, STEP};
use partywall_region::pmem::{WindowId, let_in};
use rustix::fd::{AsFd as _, BorrowedFd};
use rustix::fs::{Mode, OFlags};
use serde_json::{Value, json};
use std::path::Path;
use std::time::{Duration, Instant};

/// How long a guest may take to release a device. An emulated guest on a busy host is slow.
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
    /// What has been found out in this session, as far as this session has not changed it.
    known: Option<Known>,
}

/// A machine's facts, and the memory devices that are in it.
#[derive(Debug, Clone)]
struct Known {
    facts: Facts,
    devices: Vec<MemoryDevice>,
    /// Ports of which it is not known whether they are free.
    ports: Vec<String>,
}

impl Known {
    /// Takes note of what is in the machine now.
    fn now_has(&mut self, devices: Vec<MemoryDevice>) {
        self.facts.slots_used = devices.iter().filter(|d| d.slot).count() as u64;
        self.facts.room_used = devices.iter().map(|d| d.size).sum();
        self.devices = devices;
    }

    fn find(&self, id: WindowId, role: Role) -> Option<Plugged> {
        self.devices.iter().filter_map(MemoryDevice::window).find(|p| (p.id, p.role) == (id, role))
    }
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
        Ok(Self { qmp, name, known: None })
    }

    /// What it was started with (`-name`), or else its monitor's path.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What it was started with, as far as windows depend on it.
    pub fn facts(&mut self) -> Result<Facts, VmError> {
        self.known = None;
        Ok(self.know()?.facts.clone())
    }

    /// The same, asked for once in a session.
    fn know(&mut self) -> Result<&mut Known, VmError> {
        let known = match self.known.take() {
            Some(known) => known,
            None => self.find_out()?,
        };
        Ok(self.known.insert(known))
    }

    fn find_out(&mut self) -> Result<Known, VmError> {
        let answer = |command| VmError::Answer { command };
        let property = |name: &str| ("qom-get", json!({ "path": "/machine", "property": name }));
        let asked = [
            ("query-version", json!({})),
            ("query-status", json!({})),
            ("query-kvm", json!({})),
            ("query-memory-devices", json!({})),
            property("type"),
            property("memory"),
            property("nvdimm"),
        ];
        let mut answers = self.qmp.execute_all(&asked)?.into_iter();
        let mut next = || answers.next().unwrap_or(Ok(Value::Null));
        let (version, status, kvm, listed) = (next()?, next()?, next()?, next()?);
        let (machine, memory) = (next()?, next()?);
        // Machines that know nothing of nvdimms have no such property.
        let nvdimm = next().is_ok_and(|value| value == true);
        let number = |part: &str| version["qemu"][part].as_u64().unwrap_or(0);
        let bytes = |part: &str| memory.get(part).and_then(Value::as_u64).unwrap_or(0);
        let machine = machine.as_str().unwrap_or_default().to_owned();
        let mut ports = if machine.contains("q35") { self.ports()? } else { Vec::new() };
        let free_ports = if machine.contains("q35") { Some(self.free_ports(&mut ports)?) } else { None };
        let facts = Facts {
            name: self.name.clone(),
            status: status["status"].as_str().ok_or(answer("query-status"))?.to_owned(),
            version: format!("{}.{}.{}", number("major"), number("minor"), number("micro")),
            machine,
            kvm: kvm["enabled"].as_bool().unwrap_or(false),
            nvdimm,
            slots: bytes("slots"),
            slots_used: 0,
            room: bytes("max-size").saturating_sub(bytes("size")),
            room_used: 0,
            free_ports,
        };
        let mut known = Known { facts, devices: Vec::new(), ports };
        known.now_has(memory_devices(&listed)?);
        Ok(known)
    }

    /// Whether a program of the guest has the port open whose host's end is this socket; `true` if QEMU does not know such a socket.
    pub fn is_listening(&mut self, socket: &Path) -> Result<bool, VmError> {
        let listed = self.chardevs()?;
        let open: Vec<bool> = listed.iter().filter(|port| port.is_at(socket)).map(|port| port.open).collect();
        Ok(open.is_empty() || open.contains(&true))
    }

    /// Fails if none of the machine's chardevs is this socket. One that QEMU was handed as a descriptor (libvirt does so) has no path
    /// that QEMU knows, so it may be the one.
    pub fn expect_port(&mut self, socket: &Path) -> Result<(), VmError> {
        let listed = self.chardevs()?;
        let exists = std::fs::symlink_metadata(socket).is_ok();
        if listed.iter().any(|port| port.is_at(socket) || exists && port.path().is_none() && port.is_socket()) {
            return Ok(());
        }
        let monitor = self.qmp.path();
        let there = listed.iter().filter(|port| !port.is_monitor() && !port.is_at(monitor));
        let there = there.filter_map(|port| Some((port.name.clone(), port.path()?.to_owned()))).collect();
        Err(VmError::NoSuchPort { machine: self.name.clone(), port: socket.to_owned(), there })
    }

    fn chardevs(&mut self) -> Result<Vec<Chardev>, VmError> {
        let listed = self.qmp.execute("query-chardev", json!({}))?;
        let word = |port: &Value, part: &str| port[part].as_str().unwrap_or_default().to_owned();
        let read = |port: &Value| Chardev {
            name: word(port, "label"),
            filename: word(port, "filename"),
            open: port["frontend-open"] == true,
        };
        Ok(listed.as_array().into_iter().flatten().map(read).collect())
    }

    /// The windows in it.
    pub fn windows(&mut self) -> Result<Vec<Plugged>, VmError> {
        let devices = memory_devices(&self.qmp.execute("query-memory-devices", json!({}))?)?;
        Ok(devices.iter().filter_map(MemoryDevice::window).collect())
    }

    /// Plugs a window in. Where it is in already, nothing happens and [`Plugged::took`] is `None`.
    pub fn plug(&mut self, window: &WindowDevice, role: Role) -> Result<Plugged, VmError> {
        if window.size <= DATA_OFFSET || !window.size.is_multiple_of(STEP) {
            return Err(VmError::Size { size: window.size });
        }
        if let Some(there) = self.know()?.find(window.id, role) {
            return self.same(there, window);
        }
        self.know_a_free_port()?;
        let facts = &self.know()?.facts;
        if let Some(obstacle) = facts.obstacle(window.size, role) {
            return Err(VmError::Obstacle { machine: self.name.clone(), obstacle });
        }
        let port = facts.free_ports.iter().flatten().next().filter(|_| role == Role::Owner).cloned();
        let start = Instant::now();
        let memory = memory_name(window.id, role);
        let given = self.give(window, role)?;
        let (added, device) = (memory_of(window, role, &given), device_of(window.id, role, port.as_deref()));
        let asked =
            [("object-add", added), ("device_add", device), given.taken_back(), ("query-memory-devices", json!({}))];
        let mut answers = self.qmp.execute_all(&asked)?.into_iter();
        let mut next = || answers.next().unwrap_or(Ok(Value::Null));
        let (added, plugged, _, listed) = (next(), next(), next(), next()?);
        let took = start.elapsed();
        let known = self.know()?;
        known.now_has(memory_devices(&listed)?);
        let there = known.find(window.id, role);
        match (added, plugged) {
            // Memory that is there already is what an attempt left that ended between memory and device.
            (Ok(_), Ok(_)) => {}
            (Err(e), Ok(_)) if is_duplicate(&e) => {}
            // Or somebody else has plugged it in meanwhile, by another monitor.
            (Err(e), Err(refused)) if is_duplicate(&e) => match there {
                Some(there) => return self.same(there, window),
                None => return Err(refused.into()),
            },
            (Err(e), _) => return Err(self.blame(e, window)),
            (Ok(_), Err(e)) => {
                // Nothing stays behind, as far as QEMU lets us.
                let _ = self.qmp.execute("object-del", json!({ "id": memory }));
                return Err(e.into());
            }
        }
        if let (Some(port), Some(free)) = (port, &mut known.facts.free_ports) {
            free.retain(|other| *other != port);
        }
        let there = there.ok_or(VmError::Answer { command: "query-memory-devices" })?;
        Ok(Plugged { took: Some(took), ..self.same(there, window)? })
    }

    /// A window that is in the machine, if it is the one that is meant.
    fn same(&self, there: Plugged, window: &WindowDevice) -> Result<Plugged, VmError> {
        let taken = || VmError::Taken { machine: self.name.clone(), id: window.id };
        if there.size == window.size { Ok(there) } else { Err(taken()) }
    }

    /// Unplugs a window, if QEMU and the guest release it. Programs in the guest must have unmapped it before.
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
            return kept(format!("the guest has not released it within {LET_GO:?}"));
        }
        match self.qmp.execute("object-del", json!({ "id": memory_name(id, role) })) {
            Ok(_) => Ok(Unplugged::Gone),
            Err(QmpError::Refused { why, .. }) => kept(why),
            Err(e) => Err(e.into()),
        }
    }

    /// Whether it is in the machine now, whatever was known.
    fn find(&mut self, id: WindowId, role: Role) -> Result<Option<Plugged>, VmError> {
        self.known = None;
        Ok(self.windows()?.into_iter().find(|p| (p.id, p.role) == (id, role)))
    }

    /// The memory behind a window.
    pub(crate) fn add_memory(&mut self, window: &WindowDevice, role: Role) -> Result<(), VmError> {
        let given = self.give(window, role)?;
        let asked = [("object-add", memory_of(window, role, &given)), given.taken_back()];
        match self.qmp.execute_all(&asked)?.into_iter().next().unwrap_or(Ok(Value::Null)) {
            // An earlier attempt ended between memory and device.
            Err(e) if is_duplicate(&e) => Ok(()),
            Err(e) => Err(self.blame(e, window)),
            Ok(_) => Ok(()),
        }
    }

    /// A command to its monitor.
    pub(crate) fn execute(&mut self, command: &'static str, arguments: Value) -> Result<Value, QmpError> {
        self.qmp.execute(command, arguments)
    }

    /// The same with a descriptor.
    pub(crate) fn execute_with(
        &mut self,
        command: &'static str,
        arguments: Value,
        fd: BorrowedFd<'_>,
    ) -> Result<Value, QmpError> {
        self.qmp.execute_with(command, arguments, fd)
    }

    /// A port for a PCI device, which from now on is taken; `None` where the bus takes devices directly.
    pub(crate) fn take_port(&mut self) -> Result<Option<String>, VmError> {
        self.know_a_free_port()?;
        let machine = self.name.clone();
        match &mut self.know()?.facts.free_ports {
            None => Ok(None),
            Some(ports) if ports.is_empty() => Err(VmError::Obstacle { machine, obstacle: Obstacle::NoPort }),
            Some(ports) => Ok(Some(ports.remove(0))),
        }
    }

    /// What is inside an object of QEMU's.
    pub(crate) fn children(&mut self, path: &str) -> Result<Vec<Child>, VmError> {
        children(&self.qmp.execute("qom-list", json!({ "path": path }))?)
    }

    /// Gives QEMU the window's file. Another user's QEMU, or one that is confined, could not open a path of this process; what it
    /// has been given it opens again as its own.
    fn give(&mut self, window: &WindowDevice, role: Role) -> Result<Given, VmError> {
        let path = || window.path.clone();
        let access = if role == Role::Owner { OFlags::RDWR } else { OFlags::RDONLY };
        let (machine, user) = (self.name.clone(), self.qmp.user()?);
        let file = rustix::fs::open(&window.path, access | OFlags::CLOEXEC, Mode::empty());
        let granted = file.map_err(std::io::Error::from).and_then(|file| {
            if user != 0 && user != rustix::process::geteuid().as_raw() {
                let_in(&file, user, role == Role::Owner)?;
            }
            Ok(file)
        });
        let file = granted.map_err(|source| VmError::Grant { machine, path: path(), user, source })?;
        let answer = self.qmp.execute_with("add-fd", json!({ "opaque": "partywall" }), file.as_fd())?;
        let number = |part: &str| answer[part].as_u64().ok_or(VmError::Answer { command: "add-fd" });
        Ok(Given { set: number("fdset-id")?, descriptor: number("fd")? })
    }

    fn blame(&self, e: QmpError, window: &WindowDevice) -> VmError {
        match e {
            QmpError::Refused { why, .. } if why.contains("open") => {
                VmError::NoAccess { machine: self.name.clone(), path: window.path.clone(), why }
            }
            e => e.into(),
        }
    }

    /// Ports that have a name to plug into.
    fn ports(&mut self) -> Result<Vec<String>, VmError> {
        const PORTS: [&str; 3] = ["child<pcie-root-port>", "child<ioh3420>", "child<xio3130-downstream>"];
        let devices = self.children("/machine/peripheral")?;
        Ok(devices.into_iter().filter(|device| PORTS.contains(&device.kind.as_str())).map(|port| port.name).collect())
    }

    /// Some ports below which there is nothing, from the first on; those that were not looked at are left in `ports`. None are left if
    /// if there is no free one. (Each costs QEMU half a millisecond.)
    ///
    /// Not from `query-pci`: until the firmware has numbered the buses, that shows every port as empty.
    fn free_ports(&mut self, ports: &mut Vec<String>) -> Result<Vec<String>, VmError> {
        /// Looked at together.
        const SOME: usize = 8;
        /// Free ports that are enough for now.
        const ENOUGH: usize = 4;
        // A port's bus has the port's name, and a link for each device on it.
        let bus = |port: &String| json!({ "path": format!("/machine/peripheral/{port}/{port}") });
        let mut free = Vec::new();
        while free.len() < ENOUGH && !ports.is_empty() {
            let some: Vec<String> = ports.drain(..ports.len().min(SOME)).collect();
            let buses: Vec<_> = some.iter().map(|port| ("qom-list", bus(port))).collect();
            for (port, answer) in some.into_iter().zip(self.qmp.execute_all(&buses)?) {
                if !children(&answer?)?.iter().any(|child| child.name.starts_with("child[")) {
                    free.push(port);
                }
            }
        }
        Ok(free)
    }

    /// Looks for more free ports if those that are known are used up.
    fn know_a_free_port(&mut self) -> Result<(), VmError> {
        let known = self.know()?;
        if known.facts.free_ports.as_ref().is_some_and(Vec::is_empty) && !known.ports.is_empty() {
            let mut ports = std::mem::take(&mut known.ports);
            let free = self.free_ports(&mut ports)?;
            let known = self.know()?;
            (known.ports, known.facts.free_ports) = (ports, Some(free));
        }
        Ok(())
    }
}

/// A file that QEMU was given.
struct Given {
    set: u64,
    descriptor: u64,
}

impl Given {
    /// Where QEMU opens it.
    fn path(&self) -> String {
        format!("/proc/self/fd/{}", self.descriptor)
    }

    /// The command that makes QEMU close the descriptor, once it has opened the file again.
    fn taken_back(&self) -> (&'static str, Value) {
        ("remove-fd", json!({ "fdset-id": self.set }))
    }
}

/// The arguments for the memory behind a window.
fn memory_of(window: &WindowDevice, role: Role, given: &Given) -> Value {
    json!({
        "qom-type": "memory-backend-file",
        "id": memory_name(window.id, role),
        "mem-path": given.path(),
        "size": window.size,
        "share": true,
        "readonly": role == Role::Peer,
    })
}

/// The arguments for the device.
fn device_of(id: WindowId, role: Role, port: Option<&str>) -> Value {
    let mut device = json!({ "id": device_name(id, role), "memdev": memory_name(id, role) });
    match role {
        Role::Owner => device["driver"] = json!("virtio-pmem-pci"),
        Role::Peer => {
            device["driver"] = json!("nvdimm");
            device["unarmed"] = json!(true);
        }
    }
    if let Some(port) = port {
        device["bus"] = json!(port);
    }
    device
}

fn is_duplicate(e: &QmpError) -> bool {
    matches!(e, QmpError::Refused { why, .. } if why.contains("duplicate"))
}

fn memory_devices(listed: &Value) -> Result<Vec<MemoryDevice>, VmError> {
    let answer = || VmError::Answer { command: "query-memory-devices" };
    let devices = listed.as_array().ok_or_else(answer)?;
    devices.iter().map(|device| MemoryDevice::read(device).ok_or_else(answer)).collect()
}

fn children(listed: &Value) -> Result<Vec<Child>, VmError> {
    let children = listed.as_array().ok_or(VmError::Answer { command: "qom-list" })?;
    let word = |child: &Value, part: &str| child[part].as_str().unwrap_or_default().to_owned();
    Ok(children.iter().map(|c| Child { name: word(c, "name"), kind: word(c, "type") }).collect())
}

/// One of a machine's character devices, as `query-chardev` has it.
#[derive(Debug)]
struct Chardev {
    name: String,
    /// `unix:/run/a.port,server=on`, with `disconnected:` before it while nobody is connected.
    filename: String,
    /// Whether a program of the guest has it open.
    open: bool,
}

impl Chardev {
    fn address(&self) -> &str {
        self.filename.strip_prefix("disconnected:").unwrap_or(&self.filename)
    }

    /// Where its socket is, if it is a UNIX socket that QEMU serves and that has a path.
    fn path(&self) -> Option<&str> {
        // QEMU 7.2 writes `,server=on`, others `,server`.
        let (path, _) = self.address().strip_prefix("unix:")?.split_once(",server")?;
        Some(path).filter(|path| !path.is_empty())
    }

    fn is_socket(&self) -> bool {
        self.address().starts_with("unix:") || self.address().starts_with("fd:")
    }

    /// Its folder may have been told to QEMU by another name.
    fn is_at(&self, socket: &Path) -> bool {
        self.path().is_some_and(|path| Path::new(path).file_name() == socket.file_name())
    }

    /// QEMU's own name for what `-qmp` and `-monitor` make.
    fn is_monitor(&self) -> bool {
        self.name.starts_with("compat_monitor")
    }
}

/// An object inside another, as `qom-list` has it.
pub(crate) struct Child {
    pub(crate) name: String,
    pub(crate) kind: String,
}

/// What a line of `query-memory-devices` says.
#[derive(Debug, Clone)]
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

    /// The window that it is, if it is one of ours.
    fn window(&self) -> Option<Plugged> {
        let (id, role) = parse_name(&self.name)?;
        Some(Plugged { id, role, size: self.size, address: self.address, took: None })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead as _, BufReader, Write as _};
    use std::os::unix::net::UnixListener;
    use std::path::PathBuf;
    use std::sync::mpsc::{Receiver, channel};

    const SIZE: u64 = 4 << 20;

    /// A monitor that keeps what is added to it, like QEMU's; and the commands that it hears. It refuses what is in `memories` and
    /// devices that have no memory, or, if told so, all devices.
    fn monitor(mut memories: Vec<String>, refuses_devices: bool) -> (tempfile::TempDir, PathBuf, Receiver<String>) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("qmp");
        let listener = UnixListener::bind(&path).unwrap();
        let (tell, heard) = channel();
        std::thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            (&stream).write_all(b"{\"QMP\": {}}\n").unwrap();
            let mut devices: Vec<Value> = Vec::new();
            for line in BufReader::new(stream.try_clone().unwrap()).lines() {
                let asked: Value = serde_json::from_str(&line.unwrap()).unwrap();
                let (command, arguments) = (asked["execute"].as_str().unwrap(), &asked["arguments"]);
                let name = arguments["id"].as_str().unwrap_or_default().to_owned();
                let refused = |why: &str| json!({ "error": { "desc": why } });
                let answer = match command {
                    "query-status" => json!({ "return": { "status": "running" } }),
                    "query-chardev" => json!({ "return": [
                        { "label": "compat_monitor0", "filename": "unix:/run/partywall/a.qmp,server=on", "frontend-open": true },
                        { "label": "p", "filename": "unix:/run/partywall/a.port,server=on", "frontend-open": true },
                        { "label": "q", "filename": "disconnected:unix:/run/partywall/b.port,server=on", "frontend-open": false },
                    ] }),
                    "query-memory-devices" => json!({ "return": devices }),
                    "qom-get" => match arguments["property"].as_str().unwrap() {
                        "nvdimm" => json!({ "return": true }),
                        "memory" => json!({ "return": { "size": 0, "max-size": 1u64 << 33, "slots": 2 } }),
                        _ => json!({ "return": "pc" }),
                    },
                    "add-fd" => json!({ "return": { "fdset-id": 1, "fd": 20 } }),
                    "object-add" if arguments["mem-path"] != "/proc/self/fd/20" => refused("no such file"),
                    "object-add" if memories.contains(&name) => refused("attempt to add duplicate property"),
                    "object-add" => {
                        memories.push(name);
                        json!({ "return": {} })
                    }
                    "object-del" => {
                        memories.retain(|memory| *memory != name);
                        json!({ "return": {} })
                    }
                    "device_add" if refuses_devices || !memories.iter().any(|m| arguments["memdev"] == **m) => {
                        refused("no place")
                    }
                    "device_add" => {
                        let mut data = json!({ "id": name, "size": SIZE, "memaddr": 4096 });
                        if arguments["driver"] == "nvdimm" {
                            data["slot"] = json!(0);
                        }
                        devices.push(json!({ "data": data }));
                        json!({ "return": {} })
                    }
                    _ => json!({ "return": {} }),
                };
                if tell.send(command.to_owned()).is_err() || writeln!(&stream, "{answer}").is_err() {
                    return;
                }
            }
        });
        (dir, path, heard)
    }

    fn window(number: u8) -> WindowDevice {
        WindowDevice { id: WindowId([number; 16]), path: "/dev/null".into(), size: SIZE }
    }

    #[test]
    fn second_window_takes_few_commands() {
        let (_dir, path, heard) = monitor(Vec::new(), false);
        let mut machine = Machine::connect(&path).unwrap();
        assert!(machine.plug(&window(1), Role::Owner).unwrap().took.is_some());
        heard.try_iter().for_each(drop);
        assert!(machine.plug(&window(2), Role::Peer).unwrap().took.is_some());
        let few = ["add-fd", "object-add", "device_add", "remove-fd", "query-memory-devices"];
        assert_eq!(heard.try_iter().collect::<Vec<_>>(), few);
        // What this session has plugged in counts.
        assert!(machine.plug(&window(1), Role::Owner).unwrap().took.is_none());
        machine.plug(&window(3), Role::Peer).unwrap();
        let e = machine.plug(&window(4), Role::Peer).unwrap_err().to_string();
        assert!(e.contains("slots"), "{e}");
        assert_eq!(machine.facts().unwrap().slots_used, 2);
        assert_eq!(machine.windows().unwrap().len(), 3);
    }

    #[test]
    fn open_guest_port_is_found_by_socket_name() {
        let (_dir, path, _heard) = monitor(Vec::new(), false);
        let mut machine = Machine::connect(&path).unwrap();
        for (socket, listening) in [
            ("/run/partywall/a.port", true),
            ("/run/partywall/b.port", false),
            ("/var/run/partywall/b.port", false),
            ("/run/partywall/absent.port", true),
        ] {
            assert_eq!(machine.is_listening(Path::new(socket)).unwrap(), listening, "{socket}");
        }
    }

    #[test]
    fn port_that_is_no_chardev_is_refused_with_those_there_are() {
        let (_dir, path, _heard) = monitor(Vec::new(), false);
        let mut machine = Machine::connect(&path).unwrap();
        for port in ["/run/partywall/a.port", "/var/run/partywall/b.port"] {
            machine.expect_port(Path::new(port)).unwrap();
        }
        // The monitor's own socket is none.
        for port in ["/run/partywall/absent.port", "/run/partywall/port"] {
            let e = machine.expect_port(Path::new(port)).unwrap_err().to_string();
            let ports = "it has /run/partywall/a.port (chardev p), /run/partywall/b.port (chardev q)";
            assert!(e.contains(port) && e.ends_with(ports), "{e}");
        }
    }

    #[test]
    fn chardev_that_was_handed_over_may_be_any_socket_that_exists() {
        let chardev = |filename: &str| Chardev { name: "c".into(), filename: filename.into(), open: false };
        let handed = chardev("disconnected:fd:24,server=on");
        assert!(handed.is_socket() && handed.path().is_none());
        let named = chardev("unix:/var/lib/libvirt/p,server");
        assert_eq!(named.path(), Some("/var/lib/libvirt/p"));
        assert!(!chardev("pty:/dev/pts/3").is_socket() && chardev("unix:/run/a.port").path().is_none());
    }

    #[test]
    fn retry_reuses_memory_and_refusal_leaves_none() {
        let left = memory_name(window(1).id, Role::Owner);
        let (_dir, path, _heard) = monitor(vec![left], false);
        let mut machine = Machine::connect(&path).unwrap();
        assert!(machine.plug(&window(1), Role::Owner).unwrap().took.is_some());

        let (_dir, path, heard) = monitor(Vec::new(), true);
        let mut machine = Machine::connect(&path).unwrap();
        let e = machine.plug(&window(1), Role::Owner).unwrap_err().to_string();
        assert!(e.contains("no place"), "{e}");
        assert_eq!(heard.try_iter().last().as_deref(), Some("object-del"));
        assert_eq!(machine.windows().unwrap(), []);
    }
}
