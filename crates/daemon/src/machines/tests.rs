//! The attendant with machines whose monitors and guests are played by the test.

use super::*;
use partywall_protocol::port::greeting;
use std::io::{Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

/// Longer is a hang.
pub(super) const HANG: Duration = Duration::from_secs(30);

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

/// A broker's attendant, without its thread.
pub(super) fn work(control: &ServerControl, socket: &Path) -> Work {
    Work {
        control: control.clone(),
        silence: HANG,
        tasks: AttendantTasks::default(),
        windows: Windows::default(),
        groups: GroupWindows::default(),
        state: AttachmentFile::open(socket),
        machines: BTreeMap::new(),
        left: BTreeMap::new(),
        held: BTreeSet::new(),
        next: MachineId::MIN,
    }
}

/// A machine whose port nobody serves.
fn attended(folder: &tempfile::TempDir, name: &str, migration: MigrationStep) -> Attended {
    Attended {
        name: Name::new(name).unwrap(),
        monitor: path(folder, name),
        socket: path(folder, name),
        room: 8 << 20,
        port: None,
        layout: WindowLayout::Migratable,
        migration,
        has_windows: true,
        plug_failure: None,
        untold: false,
        doorbell: Err(NOT_YET.to_owned()),
    }
}

/// A monitor that another program holds, while others wait. Until this is dropped.
pub(super) struct HeldMonitor {
    path: String,
    _listener: OwnedFd,
    _waiting: Vec<UnixStream>,
}

/// Holds the monitor at this path.
pub(super) fn hold(path: &str) -> HeldMonitor {
    std::fs::rename(path, format!("{path}.free")).unwrap();
    let (family, kind) = (rustix::net::AddressFamily::UNIX, rustix::net::SocketType::STREAM);
    let listener = rustix::net::socket(family, kind, None).unwrap();
    rustix::net::bind(&listener, &rustix::net::SocketAddrUnix::new(path).unwrap()).unwrap();
    rustix::net::listen(&listener, 1).unwrap();
    let waiting = (0..2).map(|_| UnixStream::connect(path).unwrap()).collect();
    HeldMonitor { path: path.to_owned(), _listener: listener, _waiting: waiting }
}

impl Drop for HeldMonitor {
    fn drop(&mut self) {
        let _ = std::fs::rename(format!("{}.free", self.path), &self.path);
    }
}

pub(super) fn path(folder: &tempfile::TempDir, name: &str) -> String {
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
        let taken = control.take_errands();
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
fn released_machine_is_remembered_as_released() {
    let folder = tempfile::tempdir().unwrap();
    let (control, socket) = (ServerControl::new().unwrap(), folder.path().join("broker"));
    let mut work = work(&control, &socket);
    let attended = |name: &str, migration| attended(&folder, name, migration);
    let names = |all: Vec<AttachmentRecord>| all.into_iter().map(|machine| machine.name).collect::<Vec<_>>();
    let remembered = || names(state::remembered(&socket).machines);
    let releasing = MigrationStep::Releasing { session: SessionId(7), request: 5 };
    work.machines.insert(MachineId::MIN, attended("leaves", releasing));
    work.machines.insert(MachineId::new(2).unwrap(), attended("stays", MigrationStep::None));
    work.remember();
    assert_eq!(remembered(), ["leaves", "stays"]);
    work.released(MachineId::MIN, None);
    let errands = control.take_errands();
    assert!(matches!(errands[..], [Errand::Answer(SessionId(7), 5, Message::Done {})]), "{errands:?}");
    assert_eq!(remembered(), ["stays"], "a broker that starts now would plug in its windows again");
    assert_eq!(names(state::remembered(&socket).released), ["leaves"]);
}

#[test]
fn doorbell_of_ended_qemu_is_dropped() {
    let folder = tempfile::tempdir().unwrap();
    let mut work = work(&ServerControl::new().unwrap(), &folder.path().join("broker"));
    // A process that ends when its input does.
    let mut qemu = std::process::Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
    for (monitor, process) in [("ends", qemu.id()), ("stays", std::process::id())] {
        let process = rustix::process::Pid::from_raw(process as i32).unwrap();
        let qemu = rustix::process::pidfd_open(process, rustix::process::PidfdFlags::empty()).unwrap();
        work.left.insert(monitor.to_owned(), LeftDoorbell { doorbell: Switchboard::new().unwrap().0, qemu });
    }
    work.drop_ended_doorbells();
    let had = work.left.len();
    drop(qemu.stdin.take());
    qemu.wait().unwrap();
    work.drop_ended_doorbells();
    assert_eq!((had, work.left.keys().map(String::as_str).collect::<Vec<_>>()), (2, vec!["stays"]));
}

#[test]
fn doorbell_of_machine_without_monitor_is_not_kept() {
    let folder = tempfile::tempdir().unwrap();
    let mut work = work(&ServerControl::new().unwrap(), &folder.path().join("broker"));
    let doorbell = Ok(Switchboard::new().unwrap().0);
    work.machines.insert(MachineId::MIN, Attended { doorbell, ..attended(&folder, "a", MigrationStep::None) });
    work.remove(&Name::new("a").unwrap()).unwrap();
    assert!(work.machines.is_empty() && work.left.is_empty());
}

/// Counts the events that are logged.
struct Counted(Arc<AtomicUsize>);

impl<S: tracing::Subscriber> tracing_subscriber::Layer<S> for Counted {
    fn on_event(&self, _: &tracing::Event<'_>, _: tracing_subscriber::layer::Context<'_, S>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn repeated_plug_failure_is_logged_once() {
    use tracing_subscriber::layer::SubscriberExt as _;
    let folder = tempfile::tempdir().unwrap();
    let mut work = work(&ServerControl::new().unwrap(), &folder.path().join("broker"));
    let machine = Attended { layout: WindowLayout::Usual, ..attended(&folder, "a", MigrationStep::None) };
    work.machines.insert(MachineId::MIN, machine);
    let logged = Arc::new(AtomicUsize::new(0));
    let subscriber = tracing_subscriber::registry().with(Counted(Arc::clone(&logged)));
    let counts = tracing::subscriber::with_default(subscriber, || {
        let mut counts = Vec::new();
        for _ in 0..3 {
            work.plug_and_tell(MachineId::MIN, true);
            counts.push(logged.swap(0, Ordering::Relaxed));
        }
        for _ in 0..3 {
            work.plug_doorbell(MachineId::MIN);
            counts.push(logged.swap(0, Ordering::Relaxed));
        }
        counts
    });
    assert_eq!(counts, [1, 0, 0, 1, 0, 0]);
}
