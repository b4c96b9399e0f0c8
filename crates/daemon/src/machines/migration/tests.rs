//! Machines that leave, stay or are taken over by the next broker, with a QEMU and a guest that the test plays.

use super::*;
use crate::control::ServerControl;
use crate::core::Order;
use crate::machines::state::{self, AttachmentFile};
use crate::machines::tests::{HANG, hold, path, work};
use crate::machines::{Attendant, Task};
use crate::policy::MachineEntry;
use partywall_protocol::agent::Say;
use partywall_protocol::port::{Decoder, Frame, Item, greeting};
use partywall_protocol::window::WindowId;
use partywall_region::packet;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const ROOM: u64 = 8 << 20;

/// A QEMU that keeps what is plugged in, and serves one client of its monitor after the other.
struct FakeQemu {
    listener: UnixListener,
    has: Arc<Mutex<QemuState>>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct QemuState {
    port: String,
    memories: BTreeMap<String, Value>,
    devices: Vec<Value>,
    files: Vec<OwnedFd>,
    heard: Vec<String>,
    /// The devices that it was told to remove.
    removed: Vec<String>,
    refuses_devices: bool,
    migrates: bool,
    /// Called before a device is added.
    before_device: Option<Box<dyn FnMut() + Send>>,
}

impl FakeQemu {
    fn start(folder: &tempfile::TempDir) -> Self {
        let listener = UnixListener::bind(path(folder, "a.monitor")).unwrap();
        let has = Arc::new(Mutex::new(QemuState { port: path(folder, "a.port"), ..QemuState::default() }));
        let (listening, shared) = (listener.try_clone().unwrap(), Arc::clone(&has));
        let thread = std::thread::spawn(move || {
            while let Ok((stream, _)) = listening.accept() {
                serve(&stream, &shared);
            }
        });
        Self { listener, has, thread: Some(thread) }
    }

    fn with<T>(&self, work: impl FnOnce(&mut QemuState) -> T) -> T {
        work(&mut self.has.lock().unwrap())
    }

    /// How many devices it was told to add, since this was asked last.
    fn added(&self) -> usize {
        self.with(|has| std::mem::take(&mut has.heard)).iter().filter(|command| *command == "device_add").count()
    }
}

impl Drop for FakeQemu {
    fn drop(&mut self) {
        let _ = rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both);
        self.thread.take().map(JoinHandle::join);
    }
}

fn serve(mut stream: &UnixStream, has: &Mutex<QemuState>) {
    let mut said = Vec::new();
    let mut going = stream.write_all(b"{\"QMP\": {}}\n").is_ok();
    while going {
        let mut piece = [0; 4096];
        let Ok(received) = packet::recv(stream.as_fd(), &mut piece) else { return };
        if received.len == 0 {
            return;
        }
        said.extend_from_slice(&piece[..received.len]);
        has.lock().unwrap().files.extend(received.fds);
        while let Some(end) = said.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = said.drain(..=end).collect();
            let answer = has.lock().unwrap().answer(&serde_json::from_slice(&line).unwrap());
            going &= writeln!(stream, "{answer}").is_ok();
        }
    }
}

impl QemuState {
    fn answer(&mut self, asked: &Value) -> Value {
        let (command, arguments) = (asked["execute"].as_str().unwrap(), &asked["arguments"]);
        self.heard.push(command.to_owned());
        let name = arguments["id"].as_str().unwrap_or_default().to_owned();
        let result = match command {
            "query-status" => json!({ "status": "running" }),
            "query-migrate" if self.migrates => json!({ "status": "active" }),
            "query-chardev" => json!([{ "label": "p", "filename": format!("unix:{},server=on", self.port) }]),
            "query-memory-devices" => json!(self.devices),
            "qom-list" => json!([]),
            "qom-get" => match arguments["property"].as_str().unwrap() {
                "nvdimm" => json!(true),
                "memory" => json!({ "size": 0, "max-size": 1u64 << 33, "slots": 16 }),
                _ => json!("pc"),
            },
            "add-fd" => json!({ "fdset-id": 1, "fd": 20 }),
            "object-add" => {
                self.memories.insert(name, arguments["size"].clone());
                json!({})
            }
            "device_del" => {
                self.devices.retain(|device| device["data"]["id"] != *name);
                self.removed.push(name);
                json!({})
            }
            "device_add" if self.refuses_devices => return json!({ "error": { "desc": "no place" } }),
            "device_add" => {
                self.before_device.iter_mut().for_each(|call| call());
                let size = &self.memories[arguments["memdev"].as_str().unwrap()];
                self.devices.push(json!({ "data": { "id": name, "size": size, "memaddr": 4096 } }));
                json!({})
            }
            _ => json!({}),
        };
        json!({ "return": result })
    }
}

fn name() -> Name {
    Name::new("a").unwrap()
}

fn machine_a(folder: &tempfile::TempDir) -> NewMachine {
    let (monitor, socket) = (path(folder, "a.monitor"), path(folder, "a.port"));
    NewMachine { name: name(), monitor, socket, room: ROOM, layout: WindowLayout::Migratable }
}

fn entry(folder: &tempfile::TempDir) -> MachineEntry {
    let (monitor, port) = (path(folder, "a.monitor"), path(folder, "a.port"));
    MachineEntry { name: "a".into(), monitor, port, room: ROOM, migratable: true }
}

fn ids(work: &Work) -> Vec<WindowId> {
    work.windows.of(MachineId::MIN).into_iter().map(|(_, window)| window.id).collect()
}

/// A broker that has attached the machine, which has released its windows. The broker ends then. Returns the windows.
fn release_and_end(folder: &tempfile::TempDir) -> Vec<WindowId> {
    let mut work = attach_whole(folder);
    release_at_once(&mut work);
    ids(&work)
}

/// A broker that has attached the machine. Its windows have all their memory, without which the next broker would not use them.
fn attach_whole(folder: &tempfile::TempDir) -> Work {
    let mut work = work(&ServerControl::new().unwrap(), &folder.path().join("broker"));
    work.add(machine_a(folder), true).unwrap();
    work.windows.complete(MachineId::MIN, drop).unwrap();
    work
}

/// The machine's agent has removed the windows.
fn release_at_once(work: &mut Work) {
    let step = MigrationStep::Releasing { session: SessionId(7), request: 5 };
    work.machines.get_mut(&MachineId::MIN).unwrap().migration = step;
    work.released(MachineId::MIN, None);
}

fn leaves(control: &ServerControl) -> Vec<bool> {
    let leaves = |errand| match errand {
        Errand::News(MachineNews::Migrating { leaves, .. }) => Some(leaves),
        _ => None,
    };
    control.take_errands().into_iter().filter_map(leaves).collect()
}

/// The answer to a request of a client.
fn answer_to(attendant: &Attendant, control: &ServerControl, order: Order) -> (Message, Vec<bool>) {
    attendant.tell(Task::Order { session: SessionId(7), request: 5, order }).unwrap();
    let (start, mut migrating) = (Instant::now(), Vec::new());
    loop {
        for errand in control.take_errands() {
            match errand {
                Errand::Answer(SessionId(7), 5, answer) => return (answer, migrating),
                Errand::News(MachineNews::Migrating { leaves, .. }) => migrating.push(leaves),
                _ => {}
            }
        }
        assert!(start.elapsed() < HANG, "no answer");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn released_machine_of_last_broker_keeps_its_windows() {
    for is_entry in [true, false] {
        let folder = tempfile::tempdir().unwrap();
        let qemu = FakeQemu::start(&folder);
        let had = release_and_end(&folder);
        assert_eq!((had.len(), qemu.added()), (2, 2));
        let (control, socket) = (ServerControl::new().unwrap(), folder.path().join("broker"));
        let attendant = Attendant::start(control.clone(), &socket, HANG).unwrap();
        if is_entry {
            attendant.tell(Task::Entry(entry(&folder))).unwrap();
        }
        attendant.tell(Task::Remembered).unwrap();
        let (answer, migrating) = answer_to(&attendant, &control, Order::Resume { name: name() });
        assert!(matches!(answer, Message::MachineAdded { .. }), "{answer:?}");
        assert_eq!(migrating, [true, false], "entry: {is_entry}");
        assert_eq!(qemu.added(), 0, "its windows are in it, entry: {is_entry}");
        drop(attendant);
        let has = AttachmentFile::open(&socket).windows_left("a");
        let had: Vec<String> = had.iter().map(WindowId::to_string).collect();
        assert!(has.len() == 2 && has.iter().all(|window| had.contains(&window.id)), "{has:?}, and had {had:?}");
    }
}

#[test]
fn released_machine_of_held_monitor_waits_for_windows() {
    let folder = tempfile::tempdir().unwrap();
    let qemu = FakeQemu::start(&folder);
    let had = release_and_end(&folder);
    qemu.added();
    let (control, socket) = (ServerControl::new().unwrap(), folder.path().join("broker"));
    let mut next = work(&control, &socket);
    let held = hold(&path(&folder, "a.monitor"));
    next.attach_remembered();
    assert_eq!((leaves(&control), ids(&next)), (vec![true], Vec::new()));
    let file = AttachmentFile::open(&socket);
    assert_eq!((file.released_left().len(), file.windows_left("a").len()), (1, 2), "the third broker must know it");
    // It is not the machine that the same request would attach.
    assert!(next.add(machine_a(&folder), true).is_err());
    drop(held);
    let why = next.add(machine_a(&folder), true).unwrap_err();
    assert!(why.contains("--resume"), "{why}");
    next.resume(&name()).unwrap();
    assert_eq!((ids(&next), qemu.added()), (had, 0));
    assert_eq!(leaves(&control), [false]);
}

#[test]
fn released_machine_with_new_qemu_is_attached_or_dropped() {
    for is_entry in [true, false] {
        let folder = tempfile::tempdir().unwrap();
        let qemu = FakeQemu::start(&folder);
        release_and_end(&folder);
        qemu.added();
        qemu.with(|has| has.devices.clear());
        let control = ServerControl::new().unwrap();
        let mut next = work(&control, &folder.path().join("broker"));
        if is_entry {
            next.add(machine_a(&folder), false).unwrap();
        }
        next.attach_remembered();
        let wanted = if is_entry { 1 } else { 0 };
        assert_eq!((next.machines.len(), qemu.added()), (wanted, 2 * wanted), "entry: {is_entry}");
        assert_eq!(leaves(&control), Vec::<bool>::new());
    }
}

#[test]
fn machine_that_has_not_released_is_attached_as_before() {
    let folder = tempfile::tempdir().unwrap();
    let qemu = FakeQemu::start(&folder);
    let socket = folder.path().join("broker");
    let mut before = attach_whole(&folder);
    before.machines.get_mut(&MachineId::MIN).unwrap().migration =
        MigrationStep::Releasing { session: SessionId(7), request: 5 };
    before.released(MachineId::MIN, Some("process 7 maps one".into()));
    drop(before);
    qemu.added();
    let control = ServerControl::new().unwrap();
    let mut next = work(&control, &socket);
    next.attach_remembered();
    assert_eq!((leaves(&control), next.machines.len(), qemu.added()), (Vec::new(), 1, 0));
}

#[test]
fn entry_whose_monitor_is_held_is_not_attached() {
    let folder = tempfile::tempdir().unwrap();
    let _qemu = FakeQemu::start(&folder);
    let control = ServerControl::new().unwrap();
    let mut work = work(&control, &folder.path().join("broker"));
    let held = hold(&path(&folder, "a.monitor"));
    let why = work.add(machine_a(&folder), false).unwrap_err();
    assert!(why.contains("may be migrating"), "{why}");
    let errands = control.take_errands();
    assert!(!errands.iter().any(|errand| matches!(errand, Errand::News(MachineNews::Added { .. }))), "{errands:?}");
    drop(held);
    work.add(machine_a(&folder), false).unwrap();
}

#[test]
fn entry_of_held_monitor_is_attached_once_it_is_free() {
    let folder = tempfile::tempdir().unwrap();
    let qemu = FakeQemu::start(&folder);
    let had = ids(&attach_whole(&folder));
    qemu.added();
    let (control, socket) = (ServerControl::new().unwrap(), folder.path().join("broker"));
    let mut next = work(&control, &socket);
    let held = hold(&path(&folder, "a.monitor"));
    let mut task = Task::Entry(entry(&folder));
    for _ in 0..2 {
        let Task::Entry(entry) = task else { panic!("{task:?}") };
        next.attend_entry(entry);
        task = next.tasks.take_later().pop().expect("it is tried again");
        next.attach_remembered();
    }
    let errands = control.take_errands();
    assert!(!errands.iter().any(|errand| matches!(errand, Errand::News(MachineNews::Added { .. }))), "{errands:?}");
    let file = AttachmentFile::open(&socket);
    assert_eq!((file.machines_left().len(), file.windows_left("a").len()), (1, 2), "the third broker must know it");
    drop(held);
    let Task::Entry(entry) = task else { panic!("{task:?}") };
    next.attend_entry(entry);
    assert_eq!((ids(&next), qemu.added(), next.tasks.take_later().len()), (had, 0, 0));
}

#[test]
fn usual_entry_of_held_monitor_is_attached_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let _qemu = FakeQemu::start(&folder);
    let mut work = work(&ServerControl::new().unwrap(), &folder.path().join("broker"));
    let _held = hold(&path(&folder, "a.monitor"));
    work.attend_entry(MachineEntry { migratable: false, ..entry(&folder) });
    assert_eq!((work.machines.len(), work.tasks.take_later().len()), (1, 0));
}

#[test]
fn usual_entry_with_windows_waits_for_held_monitor() {
    let folder = tempfile::tempdir().unwrap();
    let qemu = FakeQemu::start(&folder);
    let had = ids(&attach_whole(&folder));
    let mut next = work(&ServerControl::new().unwrap(), &folder.path().join("broker"));
    let held = hold(&path(&folder, "a.monitor"));
    next.attend_entry(MachineEntry { migratable: false, ..entry(&folder) });
    assert!(next.machines.is_empty(), "its windows are not known yet");
    let Some(Task::Entry(entry)) = next.tasks.take_later().pop() else { panic!("it is not tried again") };
    drop(held);
    qemu.added();
    next.attend_entry(entry);
    assert_eq!((ids(&next), qemu.added()), (had, 0));
}

#[test]
fn entry_of_migrating_machine_is_attached_if_migration_fails() {
    let folder = tempfile::tempdir().unwrap();
    let qemu = FakeQemu::start(&folder);
    qemu.with(|has| has.migrates = true);
    let mut work = work(&ServerControl::new().unwrap(), &folder.path().join("broker"));
    work.attend_entry(entry(&folder));
    assert!(work.machines.is_empty(), "it may be leaving");
    let Some(Task::Entry(entry)) = work.tasks.take_later().pop() else { panic!("it is not tried again") };
    qemu.with(|has| has.migrates = false);
    work.attend_entry(entry);
    assert_eq!((work.machines.len(), work.tasks.take_later().len()), (1, 0));
}

/// Attaches the machine, whose agent greets.
fn attach_greeted(work: &mut Work, folder: &tempfile::TempDir) -> UnixStream {
    let listener = UnixListener::bind(path(folder, "a.port")).unwrap();
    work.add(machine_a(folder), true).unwrap();
    let (mut guest, _) = listener.accept().unwrap();
    guest.set_read_timeout(Some(HANG)).unwrap();
    guest.write_all(&greeting(7)).unwrap();
    let start = Instant::now();
    while !work.machines[&MachineId::MIN].has_greeted() {
        assert!(start.elapsed() < HANG, "the port does not take the greeting");
        std::thread::sleep(Duration::from_millis(1));
    }
    guest
}

/// What the agent hears until it is to release its windows.
fn heard_until_release(work: &Work, mut guest: &UnixStream) -> Vec<Say> {
    work.machines[&MachineId::MIN].port.as_ref().unwrap().release();
    let mut heard = Vec::new();
    let mut decoder = Decoder::default();
    while !heard.contains(&Say::Release {}) {
        if let Some(item) = decoder.take().unwrap() {
            if let Item::Frame(Frame::Control { message }) = item {
                heard.push(Say::decode(&message).unwrap());
            }
            continue;
        }
        let mut piece = [0; 4096];
        let read = guest.read(&mut piece).unwrap();
        assert!(read > 0, "the port was closed");
        decoder.push(&piece[..read]);
    }
    heard
}

fn windows_in(heard: &[Say]) -> usize {
    heard.iter().filter(|said| matches!(said, Say::Window { .. })).count()
}

#[test]
fn guest_gets_windows_once_its_monitor_is_free() {
    for attaches_again in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let _qemu = FakeQemu::start(&folder);
        let mut work = work(&ServerControl::new().unwrap(), &folder.path().join("broker"));
        let guest = attach_greeted(&mut work, &folder);
        let held = hold(&path(&folder, "a.monitor"));
        work.plug_and_tell(MachineId::MIN, true);
        assert!(work.machines[&MachineId::MIN].untold);
        drop(held);
        let later = work.tasks.take_later();
        assert!(matches!(later[..], [Task::Up { machine: MachineId::MIN }]), "{later:?}");
        if attaches_again {
            work.add(machine_a(&folder), true).unwrap();
        } else {
            work.plug_and_tell(MachineId::MIN, true);
        }
        assert!(!work.machines[&MachineId::MIN].untold && work.tasks.take_later().is_empty());
        assert_eq!(windows_in(&heard_until_release(&work, &guest)), 2, "attached again: {attaches_again}");
    }
}

#[test]
fn guest_of_held_monitor_is_not_told_of_windows() {
    let folder = tempfile::tempdir().unwrap();
    let _qemu = FakeQemu::start(&folder);
    let control = ServerControl::new().unwrap();
    let mut work = work(&control, &folder.path().join("broker"));
    let guest = attach_greeted(&mut work, &folder);
    let held = hold(&path(&folder, "a.monitor"));
    work.plug_and_tell(MachineId::MIN, true);
    let heard = heard_until_release(&work, &guest);
    assert!(!heard.iter().any(|said| matches!(said, Say::Window { .. })), "{heard:?}");
    drop(held);
}

#[test]
fn failed_plug_of_resume_names_command_to_try_again() {
    let folder = tempfile::tempdir().unwrap();
    let qemu = FakeQemu::start(&folder);
    let control = ServerControl::new().unwrap();
    let mut work = work(&control, &folder.path().join("broker"));
    work.add(machine_a(&folder), true).unwrap();
    release_at_once(&mut work);
    qemu.with(|has| (has.refuses_devices, has.devices) = (true, Vec::new()));
    qemu.added();
    let answer = work.resume(&name()).unwrap();
    let Message::MachineAdded { remark, .. } = answer else { panic!("{answer:?}") };
    let advice = format!("`partywall vm attach a --qmp {}", path(&folder, "a.monitor"));
    assert!(remark.0.starts_with("some windows are not plugged in") && remark.0.contains(&advice), "{}", remark.0);
    // It stays, so there is nothing to take back.
    let why = work.resume(&name()).unwrap_err();
    assert!(why.contains("was not released"), "{why}");
    qemu.with(|has| has.refuses_devices = false);
    qemu.added();
    work.add(machine_a(&folder), true).unwrap();
    assert_eq!(qemu.added(), 2);
}

#[test]
fn second_release_of_released_machine_is_done() {
    let folder = tempfile::tempdir().unwrap();
    let _qemu = FakeQemu::start(&folder);
    let control = ServerControl::new().unwrap();
    let mut work = work(&control, &folder.path().join("broker"));
    work.add(machine_a(&folder), true).unwrap();
    release_at_once(&mut work);
    control.take_errands();
    work.release(&name(), SessionId(8), 6).unwrap();
    let errands = control.take_errands();
    assert!(matches!(errands[..], [Errand::Answer(SessionId(8), 6, Message::Done {})]), "{errands:?}");
}

#[test]
fn failed_release_without_port_is_not_a_release() {
    let folder = tempfile::tempdir().unwrap();
    let _qemu = FakeQemu::start(&folder);
    let (control, socket) = (ServerControl::new().unwrap(), folder.path().join("broker"));
    let mut work = work(&control, &socket);
    work.add(machine_a(&folder), true).unwrap();
    work.settle();
    let attended = work.machines.get_mut(&MachineId::MIN).unwrap();
    attended.migration = MigrationStep::Releasing { session: SessionId(7), request: 5 };
    work.released(MachineId::MIN, Some("process 7 maps one".into()));
    // As after a port that could not be opened again.
    work.machines.get_mut(&MachineId::MIN).unwrap().port = None;
    control.take_errands();
    let why = work.release(&name(), SessionId(8), 6).unwrap_err();
    assert!(why.contains("--resume") && control.take_errands().is_empty(), "{why}");
    work.remember();
    let file = AttachmentFile::open(&socket);
    assert_eq!((file.machines_left().len(), file.released_left().len()), (1, 0));
    work.resume(&name()).unwrap();
}

#[test]
fn detach_unplugs_windows_to_machine_that_was_taken_over() {
    let folder = tempfile::tempdir().unwrap();
    let qemu = FakeQemu::start(&folder);
    let had = release_and_end(&folder);
    let (control, socket) = (ServerControl::new().unwrap(), folder.path().join("broker"));
    let mut next = work(&control, &socket);
    next.attach_remembered();
    assert_eq!((next.machines.len(), ids(&next)), (1, Vec::new()), "its windows are not looked for yet");
    qemu.with(|has| has.removed.clear());
    next.remove(&name()).unwrap();
    let removed = qemu.with(|has| std::mem::take(&mut has.removed));
    for id in had {
        assert!(removed.iter().any(|device| device.contains(&id.to_string())), "{id} is not among {removed:?}");
    }
    assert_eq!(next.state.windows_left("a"), []);
}

#[test]
fn windows_are_remembered_before_they_are_plugged_in() {
    let folder = tempfile::tempdir().unwrap();
    let qemu = FakeQemu::start(&folder);
    let socket = folder.path().join("broker");
    let (tell, told) = channel();
    let at = socket.clone();
    let look = move || {
        let machines = state::remembered(&at).machines.len();
        tell.send((machines, AttachmentFile::open(&at).windows_left("a").len())).unwrap();
    };
    qemu.with(|has| has.before_device = Some(Box::new(look)));
    let mut work = work(&ServerControl::new().unwrap(), &socket);
    work.add(machine_a(&folder), true).unwrap();
    assert_eq!(told.try_iter().collect::<Vec<_>>(), [(1, 2), (1, 2)]);
}
