//! The attendant with machines whose monitors and guests are played by the test.

use super::*;
use partywall_protocol::port::greeting;
use std::io::{Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

/// Longer is a hang.
const HANG: Duration = Duration::from_secs(30);

/// A monitor that takes this long to end each connection, without a word. Returns how many connections it has had.
fn slow_monitor(path: &Path, takes: Duration) -> Arc<AtomicUsize> {
    let listener = UnixListener::bind(path).unwrap();
    let asked = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&asked);
    // It ends with the test.
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            count.fetch_add(1, Ordering::Relaxed);
            std::thread::sleep(takes);
            drop(stream);
        }
    });
    asked
}

/// A guest that greets without end and reads all that it is sent, until this is set.
fn greet_without_end(mut stream: UnixStream, stop: Arc<AtomicBool>) -> std::thread::JoinHandle<()> {
    let mut reading = stream.try_clone().unwrap();
    std::thread::spawn(move || while reading.read(&mut [0; 65536]).is_ok_and(|read| read > 0) {});
    std::thread::spawn(move || {
        let many: Vec<u8> = (1..1000).flat_map(greeting).collect();
        while !stop.load(Ordering::Relaxed) && stream.write_all(&many).is_ok() {}
        let _ = stream.shutdown(std::net::Shutdown::Both);
    })
}

fn path(folder: &tempfile::TempDir, name: &str) -> String {
    folder.path().join(name).to_str().unwrap().to_owned()
}

#[test]
fn machine_attaches_while_another_guest_greets_endlessly() {
    let folder = tempfile::tempdir().unwrap();
    let control = ServerControl::new().unwrap();
    let attendant = Attendant::start(control.clone(), &folder.path().join("broker"), HANG * 10).unwrap();
    let asked = slow_monitor(Path::new(&path(&folder, "a.monitor")), Duration::from_millis(200));
    let listener = UnixListener::bind(path(&folder, "a.port")).unwrap();
    let (monitor, port) = (path(&folder, "a.monitor"), path(&folder, "a.port"));
    let entry = MachineEntry { name: "a".into(), monitor, port, room: 8 << 20, migratable: false };
    attendant.tell(Task::Entry(entry)).unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let guest = greet_without_end(listener.accept().unwrap().0, Arc::clone(&stop));
    // The attendant has begun to serve greetings when the monitor is asked again.
    let start = Instant::now();
    let before = asked.load(Ordering::Relaxed);
    while asked.load(Ordering::Relaxed) < before + 3 {
        assert!(start.elapsed() < HANG, "no greeting was served");
        std::thread::sleep(Duration::from_millis(10));
    }
    // The second machine has no monitor, and the answer to its request says so.
    let (name, monitor, port) = (Name::new("b").unwrap(), path(&folder, "b.monitor"), path(&folder, "b.port"));
    let order = Order::Add { name, monitor, port, room: 8 << 20, migratable: false };
    attendant.tell(Task::Order { session: SessionId(7), request: 5, order }).unwrap();
    let (start, mut errands) = (Instant::now(), 0);
    let answer = loop {
        let taken = control.take_wishes().errands;
        errands += taken.len();
        let answer = taken.into_iter().find_map(|errand| match errand {
            Errand::Answer(session, request, answer) => Some((session, request, answer)),
            _ => None,
        });
        if let Some(answer) = answer {
            break answer;
        }
        assert!(start.elapsed() < HANG, "the request waits behind the greetings");
        std::thread::sleep(Duration::from_millis(1));
    };
    assert!(matches!(answer, (SessionId(7), 5, Message::Refused { code: Refusal::Machine, .. })), "{answer:?}");
    assert!(errands < 1000, "{errands} errands of a guest that only greets");
    stop.store(true, Ordering::Relaxed);
    guest.join().unwrap();
    let start = Instant::now();
    drop(attendant);
    assert!(start.elapsed() < HANG);
}

#[test]
fn released_machine_is_not_remembered() {
    let folder = tempfile::tempdir().unwrap();
    let (control, socket) = (ServerControl::new().unwrap(), folder.path().join("broker"));
    let mut work = Work {
        control: control.clone(),
        silence: HANG,
        tasks: AttendantTasks::default(),
        windows: Windows::default(),
        groups: GroupWindows::default(),
        state: AttachmentFile::open(&socket),
        machines: BTreeMap::new(),
        left: BTreeMap::new(),
        next: MachineId::MIN,
    };
    let attended = |name: &str, migration| Attended {
        name: Name::new(name).unwrap(),
        monitor: path(&folder, name),
        socket: path(&folder, name),
        room: 8 << 20,
        port: None,
        layout: WindowLayout::Migratable,
        migration,
        doorbell: Err(NOT_YET.to_owned()),
    };
    let remembered = || {
        let all = state::remembered(&socket).machines;
        all.into_iter().map(|machine| machine.name).collect::<Vec<_>>()
    };
    let releasing = MigrationStep::Releasing { session: SessionId(7), request: 5 };
    work.machines.insert(MachineId::MIN, attended("leaves", releasing));
    work.machines.insert(MachineId::new(2).unwrap(), attended("stays", MigrationStep::None));
    work.remember();
    assert_eq!(remembered(), ["leaves", "stays"]);
    work.released(MachineId::MIN, None);
    let errands = control.take_wishes().errands;
    assert!(matches!(errands[..], [Errand::Answer(SessionId(7), 5, Message::Done {})]), "{errands:?}");
    assert_eq!(remembered(), ["stays"], "a broker that starts now would plug in its windows again");
}
