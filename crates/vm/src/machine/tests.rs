use super::*;
use crate::window::{WindowDevice, WindowRole, memory_name};
use serde_json::{Value, json};
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

const SIZE: u64 = 4 << 20;
/// Only a guard against hanging.
const LONG: Duration = Duration::from_secs(60);

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

/// A monitor that gives these answers to `query-migrate`, one after the other, and then closes.
fn migrating_monitor(answers: Vec<Value>) -> (tempfile::TempDir, Machine) {
    migrating_monitor_in("running", answers)
}

/// The same for a machine in this state.
fn migrating_monitor_in(state: &'static str, answers: Vec<Value>) -> (tempfile::TempDir, Machine) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("qmp");
    let listener = UnixListener::bind(&path).unwrap();
    std::thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        (&stream).write_all(b"{\"QMP\": {}}\n").unwrap();
        let mut answers = answers.into_iter();
        for line in BufReader::new(stream.try_clone().unwrap()).lines() {
            let asked: Value = serde_json::from_str(&line.unwrap()).unwrap();
            let answer = match asked["execute"].as_str() {
                Some("query-migrate") => answers.next(),
                Some("query-status") => Some(json!({ "status": state })),
                Some("query-memory-devices") => Some(json!([])),
                Some("qom-get") => Some(match asked["arguments"]["property"].as_str() {
                    Some("nvdimm") => json!(true),
                    Some("memory") => json!({ "size": 0, "max-size": 1u64 << 33, "slots": 2 }),
                    _ => json!("pc"),
                }),
                _ => Some(json!({})),
            };
            let Some(answer) = answer else { return };
            writeln!(&stream, "{}", json!({ "return": answer })).unwrap();
        }
    });
    (dir, Machine::connect(&path).unwrap())
}

fn window(number: u8) -> WindowDevice {
    WindowDevice { id: WindowId([number; 16]), path: "/dev/null".into(), size: SIZE }
}

#[test]
fn second_window_takes_few_commands() {
    let (_dir, path, heard) = monitor(Vec::new(), false);
    let mut machine = Machine::connect(&path).unwrap();
    assert!(machine.plug(&window(1), WindowRole::Owner).unwrap().took.is_some());
    heard.try_iter().for_each(drop);
    assert!(machine.plug(&window(2), WindowRole::Peer).unwrap().took.is_some());
    let few = ["add-fd", "object-add", "device_add", "remove-fd", "query-memory-devices"];
    assert_eq!(heard.try_iter().collect::<Vec<_>>(), few);
    // Devices that this session has plugged in count.
    assert!(machine.plug(&window(1), WindowRole::Owner).unwrap().took.is_none());
    machine.plug(&window(3), WindowRole::Peer).unwrap();
    let e = machine.plug(&window(4), WindowRole::Peer).unwrap_err().to_string();
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
fn retry_reuses_memory_and_refusal_leaves_none() {
    let left = memory_name(window(1).id, WindowRole::Owner);
    let (_dir, path, _heard) = monitor(vec![left], false);
    let mut machine = Machine::connect(&path).unwrap();
    assert!(machine.plug(&window(1), WindowRole::Owner).unwrap().took.is_some());

    let (_dir, path, heard) = monitor(Vec::new(), true);
    let mut machine = Machine::connect(&path).unwrap();
    let e = machine.plug(&window(1), WindowRole::Owner).unwrap_err().to_string();
    assert!(e.contains("no place"), "{e}");
    assert_eq!(heard.try_iter().last().as_deref(), Some("object-del"));
    assert_eq!(machine.windows().unwrap(), []);
}

#[test]
fn downtime_is_asked_for_until_qemu_has_computed_it() {
    let early = json!({ "status": "completed", "total-time": 0, "downtime": 0 });
    let late = json!({ "status": "completed", "total-time": 1250, "downtime": 240 });
    let (_dir, mut machine) = migrating_monitor(vec![early.clone(), early.clone(), late]);
    let done = machine.migration_progress().unwrap();
    assert_eq!((done.end(), done.downtime_ms), (Some(true), None));
    assert_eq!(machine.await_downtime(done, LONG).downtime_ms, Some(240));

    // QEMU ends before it has said it. The migration has succeeded all the same.
    let (_dir, mut machine) = migrating_monitor(vec![early]);
    let done = machine.migration_progress().unwrap();
    let done = machine.await_downtime(done, LONG);
    assert_eq!((done.end(), done.downtime_ms), (Some(true), None));
}

#[test]
fn machine_has_left_when_migration_is_finished() {
    for (state, status, left) in [
        ("postmigrate", "completed", true),
        ("finish-migrate", "completed", true),
        ("finish-migrate", "device", false),
        ("finish-migrate", "cancelled", false),
        // The status of a machine that has arrived.
        ("running", "completed", false),
        ("paused", "failed", false),
    ] {
        let (_dir, mut machine) = migrating_monitor_in(state, vec![json!({ "status": status })]);
        assert_eq!(machine.has_migrated_away().unwrap(), left, "{state}, {status}");
    }
}
