//! A shortage of memory for windows: before a machine is attached, and after its windows have been plugged in.
//!
//! The machine is its monitor alone. The memory is limited by the broker's `RLIMIT_FSIZE`, which the kernel would enforce.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;

use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use common::monitor::Monitor;
use common::{Client, eventually};
use partywall_protocol::wire::{Message, Refusal};
use rustix::process::{Pid, Resource, Rlimit, prlimit};

const MIB: u64 = 1 << 20;

/// A broker that does not outlive its test.
struct Broker {
    child: Child,
    dir: tempfile::TempDir,
}

impl Broker {
    fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let log = std::fs::File::create(dir.path().join("log")).unwrap();
        let child = Command::new(env!("CARGO_BIN_EXE_partywalld"))
            .arg("--socket")
            .arg(dir.path().join("broker"))
            .args(["--log", "warn"])
            .env_remove("NOTIFY_SOCKET")
            .stdin(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        let this = Self { child, dir };
        eventually("the broker answers", || Client::try_connect(&this.path("broker")).is_some());
        this
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.path("log")).unwrap()
    }

    fn attach(&self, client: &mut Client, room: u64) -> Message {
        let [monitor, port] = ["monitor", "port"].map(|name| self.path(name).to_str().unwrap().to_owned());
        client.ask(&Message::AddMachine { room, migratable: false, name: "vm".into(), monitor, port })
    }

    /// The bytes of memory that each of the windows that it holds has.
    fn windows(&self) -> Vec<u64> {
        let folder = format!("/proc/{}/fd", self.child.id());
        let mut inodes: Vec<(u64, u64)> = std::fs::read_dir(folder)
            .unwrap()
            .filter_map(|entry| {
                let path = entry.ok()?.path();
                let target = std::fs::read_link(&path).ok()?;
                let file = std::fs::metadata(&path).ok()?;
                target.to_str()?.starts_with("/memfd:partywall-window").then(|| (file.ino(), file.blocks() * 512))
            })
            .collect();
        inodes.sort_unstable();
        inodes.dedup();
        inodes.into_iter().map(|(_, bytes)| bytes).collect()
    }

    fn limit(&self, bytes: Option<u64>) {
        limit(self.child.id(), bytes);
    }
}

/// Limits the size of files that a process may make or enlarge.
fn limit(process: u32, bytes: Option<u64>) {
    let process = Pid::from_raw(i32::try_from(process).unwrap());
    prlimit(process, Resource::Fsize, Rlimit { current: bytes, maximum: None }).unwrap();
}

impl Drop for Broker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn memory_shortage_after_plugging_leaves_windows_usable() {
    let broker = Broker::start();
    let monitor = Monitor::listen(&broker.path("monitor"));
    let pid = broker.child.id();
    monitor.before_the_first(move || limit(pid, Some(40 * MIB)));
    let mut root = Client::join(&broker.path("broker"), "root");
    let said = broker.attach(&mut root, 64 * MIB);
    assert!(matches!(said, Message::MachineAdded { plugged: 2, .. }), "{said:?}");
    eventually("both windows have what they can have", || broker.log().matches("only some of its memory").count() == 2);
    assert!(broker.log().contains("ulimit -f"), "{}", broker.log());
    let some = broker.windows();
    assert!(some.len() == 2 && some.iter().all(|bytes| (6 * MIB..=40 * MIB).contains(bytes)), "{some:?}");

    // Attaching it again reports the missing memory as long as there is none, and completes the windows when there is.
    match broker.attach(&mut root, 64 * MIB) {
        Message::Refused { code: Refusal::Machine, reason } => {
            assert!(reason.contains(" of its 67108864 bytes") && reason.contains("ulimit -f"), "{reason}");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(monitor.plugged(), 2, "no window is plugged in twice");
    broker.limit(None);
    let said = broker.attach(&mut root, 64 * MIB);
    assert!(matches!(said, Message::MachineAdded { plugged: 0, .. }), "{said:?}");
    assert_eq!(broker.windows(), [64 * MIB; 2]);

    assert_eq!(root.ask(&Message::RemoveMachine { name: "vm".into() }), Message::Done {});
    eventually("no window is left", || broker.windows().is_empty());
}

#[test]
fn machine_without_memory_for_windows_is_refused_unplugged() {
    let broker = Broker::start();
    let monitor = Monitor::listen(&broker.path("monitor"));
    let mut root = Client::join(&broker.path("broker"), "root");
    let refused = |root: &mut Client, room: u64| match broker.attach(root, room) {
        Message::Refused { code: Refusal::Machine, reason } => reason,
        other => panic!("{other:?}"),
    };
    // More than the broker may have in one file. The kernel would end it, were it not to look.
    broker.limit(Some(MIB));
    let reason = refused(&mut root, 64 * MIB);
    assert!(reason.contains("ulimit -f"), "{reason}");
    broker.limit(None);
    // More than most hosts have at all.
    let host = partywall_region::pmem::memory::available().unwrap();
    if host < 100 << 30 {
        let reason = refused(&mut root, 64 << 30);
        assert!(reason.contains("131060 MiB") && reason.contains("--window"), "{reason}");
    }
    assert_eq!(monitor.plugged(), 0);
    eventually("no window is left", || broker.windows().is_empty());
    // No remains of it are in the way.
    let said = broker.attach(&mut root, 8 * MIB);
    assert!(matches!(said, Message::MachineAdded { plugged: 2, .. }), "{said:?}");
    eventually("its windows are whole", || broker.windows() == [8 * MIB; 2]);
}

#[test]
fn machine_without_named_port_is_refused_listing_its_ports() {
    let broker = Broker::start();
    let monitor = Monitor::listen(&broker.path("monitor"));
    let mut root = Client::join(&broker.path("broker"), "root");
    let (name, port) = ("vm".into(), "/nonexistent/x.port".to_owned());
    let monitor_path = broker.path("monitor").to_str().unwrap().to_owned();
    match root.ask(&Message::AddMachine { room: 8 * MIB, migratable: false, name, monitor: monitor_path, port }) {
        Message::Refused { code: Refusal::Machine, reason } => {
            assert!(reason.contains("/nonexistent/x.port") && reason.contains("/x/port (chardev p)"), "{reason}");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(monitor.plugged(), 0);
    eventually("no window is left", || broker.windows().is_empty());
    let said = broker.attach(&mut root, 8 * MIB);
    assert!(matches!(said, Message::MachineAdded { plugged: 2, .. }), "{said:?}");
}

#[test]
fn attach_that_fails_for_one_window_takes_back_the_others() {
    let broker = Broker::start();
    let monitor = Monitor::listen(&broker.path("monitor"));
    monitor.take_at_most(Some(1));
    let mut root = Client::join(&broker.path("broker"), "root");
    let said = broker.attach(&mut root, 8 * MIB);
    assert!(matches!(said, Message::Refused { code: Refusal::Machine, .. }), "{said:?}");
    let devices = monitor.devices();
    assert_eq!(devices.len(), 1, "it keeps what it does not let go");
    assert_eq!(monitor.unplugged(), devices);
    eventually("no window is left", || broker.windows().is_empty());
    monitor.take_at_most(None);
    let said = broker.attach(&mut root, 8 * MIB);
    assert!(matches!(said, Message::MachineAdded { plugged: 2, .. }), "{said:?}");
}

#[test]
fn machine_that_has_migrated_away_is_replaced_by_attach() {
    let broker = Broker::start();
    let (monitor, next) = (Monitor::listen(&broker.path("monitor")), Monitor::listen(&broker.path("next")));
    let mut root = Client::join(&broker.path("broker"), "root");
    let said = broker.attach(&mut root, 8 * MIB);
    assert!(matches!(said, Message::MachineAdded { machine: 1, plugged: 2, .. }), "{said:?}");
    let again = |root: &mut Client| {
        let [monitor, port] = ["next", "port"].map(|name| broker.path(name).to_str().unwrap().to_owned());
        root.ask(&Message::AddMachine { room: 8 * MIB, migratable: false, name: "vm".into(), monitor, port })
    };
    match again(&mut root) {
        Message::Refused { code: Refusal::Machine, reason } => assert!(reason.contains("detach it first"), "{reason}"),
        other => panic!("a machine that runs was replaced: {other:?}"),
    }
    monitor.migrate_away();
    let said = again(&mut root);
    assert!(matches!(said, Message::MachineAdded { machine: 2, plugged: 2, .. }), "{said:?}");
    assert_eq!(next.plugged(), 2);
    eventually("the windows of the machine that has left are gone", || broker.windows().len() == 2);
}

#[test]
fn release_needs_agent_and_resume_needs_release() {
    let broker = Broker::start();
    let _monitor = Monitor::listen(&broker.path("monitor"));
    let mut root = Client::join(&broker.path("broker"), "root");
    let mut refused = |message: Message| match root.ask(&message) {
        Message::Refused { code: Refusal::Machine, reason } => reason,
        other => panic!("{other:?}"),
    };
    let (release, resume) =
        (Message::ReleaseMachine { name: "vm".into() }, Message::ResumeMachine { name: "vm".into() });
    assert!(refused(release.clone()).contains("no machine is called vm"));
    assert!(refused(resume.clone()).contains("no machine is called vm"));
    let said = broker.attach(&mut Client::join(&broker.path("broker"), "root"), 8 * MIB);
    assert!(matches!(said, Message::MachineAdded { .. }), "{said:?}");
    assert!(refused(release).contains("agent of vm is not connected"));
    assert!(refused(resume).contains("was not released"));
}
