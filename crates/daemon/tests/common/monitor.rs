//! A virtual machine that is its monitor alone, in this process. Like QEMU it keeps the files that it is given. Like QEMU 7.2 it
//! removes no device.

use std::io::Write as _;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};

use partywall_region::packet;
use serde_json::{Value, json};

const MIB: u64 = 1 << 20;

/// A monitor. Its copies are the same one.
#[derive(Clone, Default)]
pub(crate) struct Monitor(Arc<Mutex<Machine>>);

#[derive(Default)]
struct Machine {
    devices: Vec<Value>,
    files: Vec<OwnedFd>,
    /// Runs before the first device is plugged.
    first: Option<Box<dyn FnOnce() + Send>>,
    /// Devices that it takes; as many as come if there is no number.
    most: Option<usize>,
    /// Devices that it was asked to remove.
    unplugged: Vec<Value>,
    /// QEMU has migrated the machine to another host.
    has_left: bool,
}

impl Monitor {
    pub(crate) fn listen(path: &Path) -> Self {
        let listener = UnixListener::bind(path).unwrap();
        let this = Self::default();
        let serving = this.clone();
        // It ends with the test.
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let serving = serving.clone();
                std::thread::spawn(move || serving.serve(&stream));
            }
        });
        this
    }

    fn machine(&self) -> MutexGuard<'_, Machine> {
        self.0.lock().unwrap()
    }

    pub(crate) fn before_the_first(&self, what: impl FnOnce() + Send + 'static) {
        self.machine().first = Some(Box::new(what));
    }

    pub(crate) fn take_at_most(&self, devices: Option<usize>) {
        self.machine().most = devices;
    }

    pub(crate) fn migrate_away(&self) {
        self.machine().has_left = true;
    }

    /// The names of the devices that it has.
    pub(crate) fn devices(&self) -> Vec<Value> {
        self.machine().devices.iter().map(|device| device["id"].clone()).collect()
    }

    /// The names of the devices that it was asked to remove.
    pub(crate) fn unplugged(&self) -> Vec<Value> {
        self.machine().unplugged.clone()
    }

    pub(crate) fn plugged(&self) -> usize {
        self.machine().devices.len()
    }

    /// The machine loses the files, as one does that has ended, and keeps its devices.
    pub(crate) fn close_files(&self) {
        self.machine().files.clear();
    }

    /// A restart of the machine closes its files and removes its devices.
    pub(crate) fn restart(&self) {
        *self.machine() = Machine::default();
    }

    fn serve(&self, mut stream: &UnixStream) -> Option<()> {
        let version = json!({ "qemu": { "major": 7, "minor": 2, "micro": 0 } });
        writeln!(stream, "{}", json!({ "QMP": { "version": version, "capabilities": [] } })).ok()?;
        let (mut text, mut packet) = (Vec::new(), vec![0; 1 << 16]);
        loop {
            let received = packet::recv(stream.as_fd(), &mut packet).ok()?;
            self.machine().files.extend(received.fds);
            if received.len == 0 {
                return None;
            }
            text.extend_from_slice(&packet[..received.len]);
            while let Some(end) = text.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = text.drain(..=end).collect();
                let asked: Value = serde_json::from_slice(&line).ok()?;
                let answer = self.answer(asked["execute"].as_str()?, &asked["arguments"]);
                let refusal = json!({ "error": { "class": "CommandNotFound", "desc": "not here" } });
                let mut answer = answer.map_or(refusal, |value| json!({ "return": value }));
                answer["id"] = asked["id"].clone();
                writeln!(stream, "{answer}").ok()?;
            }
        }
    }

    fn answer(&self, command: &str, arguments: &Value) -> Option<Value> {
        if command == "object-add" {
            let first = self.machine().first.take();
            if let Some(first) = first {
                first();
            }
        }
        let machine = &mut *self.machine();
        let devices = &mut machine.devices;
        Some(match command {
            "qmp_capabilities" | "remove-fd" | "query-migrate" => json!({}),
            "query-name" => json!({ "name": "vm" }),
            "query-version" => json!({ "qemu": { "major": 7, "minor": 2, "micro": 0 } }),
            "query-status" if machine.has_left => json!({ "status": "postmigrate" }),
            "query-status" => json!({ "status": "running" }),
            "query-kvm" => json!({ "enabled": false }),
            "query-chardev" => json!([
                { "label": "compat_monitor0", "filename": "unix:/x/monitor,server=on", "frontend-open": true },
                { "label": "p", "filename": "disconnected:unix:/x/port,server=on", "frontend-open": true },
                { "label": "a", "filename": "unix:/x/a.port,server=on", "frontend-open": true },
                { "label": "b", "filename": "unix:/x/b.port,server=on", "frontend-open": true },
            ]),
            "qom-get" => match arguments["property"].as_str()? {
                "type" => json!("pc-i440fx-7.2-machine"),
                "memory" => json!({ "size": 512 * MIB, "slots": 16, "max-size": 1024 * 1024 * MIB }),
                "nvdimm" => json!(true),
                _ => return None,
            },
            "add-fd" => json!({ "fdset-id": 1, "fd": 9 }),
            "object-add" => {
                devices.push(json!({ "memory": arguments["id"], "size": arguments["size"] }));
                json!({})
            }
            "device_del" => {
                machine.unplugged.push(arguments["id"].clone());
                return None;
            }
            "object-del" => {
                devices.retain(|device| device["memory"] != arguments["id"]);
                json!({})
            }
            "device_add" => {
                if machine.most.is_some_and(|most| devices.len() > most) {
                    return None;
                }
                let device = devices.iter_mut().find(|device| device["memory"] == arguments["memdev"])?;
                device["id"] = arguments["id"].clone();
                device["memaddr"] = json!(0x1_0000_0000_u64);
                json!({})
            }
            "query-memory-devices" => {
                let there = devices.iter().filter(|device| device.get("id").is_some());
                Value::Array(there.map(|device| json!({ "type": "virtio-pmem", "data": device })).collect())
            }
            _ => return None,
        })
    }
}
