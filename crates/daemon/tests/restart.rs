//! A broker that starts again attends to the machines that the last one had, and uses their windows again.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;

use std::collections::BTreeMap;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use common::monitor::Monitor;
use common::{Client, eventually};
use partywall_protocol::wire::Message;
use partywall_region::packet;

const MIB: u64 = 1 << 20;

/// A broker that does not outlive its test.
struct Broker(Child);

impl Broker {
    fn start(dir: &Path) -> Self {
        Self::by(Command::new(env!("CARGO_BIN_EXE_partywalld")), dir, None)
    }

    /// Starts it by a command that takes its arguments, with a service manager that listens there or none.
    fn by(mut command: Command, dir: &Path, manager: Option<&Path>) -> Self {
        let log = std::fs::File::options().create(true).append(true).open(dir.join("log")).unwrap();
        match manager {
            Some(manager) => command.env("NOTIFY_SOCKET", manager),
            None => command.env_remove("NOTIFY_SOCKET"),
        };
        if dir.join("policy").exists() {
            command.arg("--policy").arg(dir.join("policy"));
        }
        let child = command
            .arg("--socket")
            .arg(dir.join("broker"))
            .args(["--log", "info"])
            .stdin(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        let this = Self(child);
        eventually("the broker answers", || Client::try_connect(&dir.join("broker")).is_some());
        this
    }

    fn kill(mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

struct Stage {
    dir: tempfile::TempDir,
    monitors: [Monitor; 2],
}

impl Stage {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let monitors = ["a", "b"].map(|name| Monitor::listen(&dir.path().join(format!("{name}.qmp"))));
        Self { dir, monitors }
    }

    /// The operator's file has a group of these machines and of the domain `web`.
    fn with_group(machines: &str) -> Self {
        let this = Self::new();
        this.set_group(machines);
        this
    }

    fn set_group(&self, machines: &str) {
        let policy = format!("[[group]]\nname = 'pool'\nmachines = [{machines}]\ndomains = ['web']\nroom = '4M'\n");
        std::fs::write(self.path("policy"), policy).unwrap();
    }

    /// A process takes part in the group. Where its seat is.
    fn take_part(&self) -> (Client, u64) {
        let mut web = Client::join(&self.path("broker"), "web");
        match web.ask(&Message::JoinGroup { room: 4096, memory: false, group: "pool".into() }) {
            Message::GroupJoined { base, .. } => (web, base),
            other => panic!("{other:?}"),
        }
    }

    /// Kills the broker, and waits until the next one attends to both machines.
    fn restart(&self, broker: Broker) -> Broker {
        broker.kill();
        std::fs::write(self.path("log"), "").unwrap();
        let broker = self.broker();
        self.attached_again();
        broker
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn broker(&self) -> Broker {
        Broker::start(self.dir.path())
    }

    fn client(&self) -> Client {
        Client::join(&self.path("broker"), "root")
    }

    fn attach(&self, name: &str, room: u64) -> u32 {
        let [monitor, port] = ["qmp", "port"].map(|what| self.path(&format!("{name}.{what}")).display().to_string());
        match self.client().ask(&Message::AddMachine { room, migratable: false, name: name.into(), monitor, port }) {
            Message::MachineAdded { plugged, .. } => plugged,
            other => panic!("{other:?}"),
        }
    }

    fn plugged(&self) -> [usize; 2] {
        [0, 1].map(|machine| self.monitors[machine].plugged())
    }

    /// The windows of a whole machine have all of their memory when the files of the broker have.
    fn await_memory(&self, broker: &Broker, size: u64) {
        use std::os::unix::fs::MetadataExt as _;
        eventually("all windows are whole", || {
            let files = std::fs::read_dir(format!("/proc/{}/fd", broker.0.id())).unwrap();
            files.flatten().map(|entry| entry.path()).all(|path| {
                let is_window = std::fs::read_link(&path)
                    .is_ok_and(|target| target.starts_with("/memfd:partywall-window (deleted)"));
                !is_window || std::fs::metadata(&path).is_ok_and(|file| file.blocks() * 512 >= size)
            })
        });
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.path("log")).unwrap()
    }

    fn attached_again(&self) {
        let times = self.log().matches("as it was with the last broker").count();
        eventually("both machines are attended to again", || {
            self.log().matches("as it was with the last broker").count() >= times.max(2)
        });
    }
}

#[test]
fn restarts_of_the_broker_use_up_no_slots() {
    let stage = Stage::new();
    let mut broker = stage.broker();
    assert_eq!((stage.attach("a", 8 * MIB), stage.attach("b", 8 * MIB)), (2, 4));
    assert_eq!(stage.plugged(), [4, 4]);
    stage.await_memory(&broker, 8 * MIB);
    for restart in 1..=3 {
        broker.kill();
        std::fs::write(stage.path("log"), "").unwrap();
        broker = stage.broker();
        stage.attached_again();
        // No administrator has attached them; and attaching them again changes nothing.
        assert_eq!(
            (stage.attach("a", 8 * MIB), stage.attach("b", 8 * MIB)),
            (0, 0),
            "restart {restart}:\n{}",
            stage.log()
        );
        assert_eq!(stage.plugged(), [4, 4]);
    }
}

#[test]
fn restarts_of_the_broker_use_up_no_slots_for_groups() {
    let stage = Stage::with_group("'a', 'b'");
    let mut broker = stage.broker();
    // Each has four windows with the other and the host, and three of the group.
    assert_eq!((stage.attach("a", 8 * MIB), stage.attach("b", 8 * MIB)), (4, 7));
    assert_eq!(stage.plugged(), [7, 7]);
    stage.await_memory(&broker, 8 * MIB);
    for restart in 1..=3 {
        broker = stage.restart(broker);
        let again = (stage.attach("a", 8 * MIB), stage.attach("b", 8 * MIB));
        assert_eq!(again, (0, 0), "restart {restart}:\n{}", stage.log());
        assert_eq!(stage.plugged(), [7, 7], "restart {restart}");
    }
    // A machine has every window of a group as a device, so one that is no member any more must not have those that are used from now on.
    stage.set_group("'a'");
    let _broker = stage.restart(broker);
    assert_eq!((stage.attach("a", 8 * MIB), stage.attach("b", 8 * MIB)), (0, 0));
    assert_eq!(stage.plugged(), [9, 7], "two new windows for the first: its own, and that of the domain");
}

/// Processes that took part with the last broker may still read and write there (protocol J10.1).
#[test]
fn seats_of_the_last_broker_are_given_to_no_other_process() {
    let stage = Stage::with_group("'a', 'b'");
    let broker = stage.broker();
    stage.attach("a", 8 * MIB);
    stage.attach("b", 8 * MIB);
    stage.await_memory(&broker, 8 * MIB);
    let (_first, kept) = stage.take_part();
    let broker = stage.restart(broker);
    let (second, other) = stage.take_part();
    assert_ne!(other, kept);
    // One that has left is not kept.
    drop(second);
    eventually("its place is free", || stage.take_part().1 == other);
    let broker = stage.restart(broker);
    let (_third, base) = stage.take_part();
    assert_ne!(base, kept);
    assert_eq!(stage.plugged(), [7, 7]);
    drop(broker);
}

#[test]
fn machine_that_was_started_again_gets_its_windows_once() {
    let stage = Stage::new();
    let broker = stage.broker();
    stage.attach("a", 8 * MIB);
    stage.attach("b", 8 * MIB);
    stage.await_memory(&broker, 8 * MIB);
    broker.kill();
    stage.monitors[1].restart();
    std::fs::write(stage.path("log"), "").unwrap();
    let _broker = stage.broker();
    stage.attached_again();
    // The windows between the two were still in the first machine. Those between the second and the host were nowhere else, and are new.
    assert_eq!((stage.attach("a", 8 * MIB), stage.attach("b", 8 * MIB)), (0, 0), "{}", stage.log());
    assert_eq!(stage.plugged(), [4, 4]);
}

#[test]
fn detached_machine_stays_detached() {
    let stage = Stage::new();
    let broker = stage.broker();
    stage.attach("a", 8 * MIB);
    assert!(stage.path("broker.machines").exists());
    assert_eq!(stage.client().ask(&Message::RemoveMachine { name: "a".into() }), Message::Done {});
    assert!(!stage.path("broker.machines").exists());
    broker.kill();
    let _broker = stage.broker();
    assert!(!stage.log().contains("as it was with the last broker"), "{}", stage.log());
}

/// The files that a broker has handed to its service manager and has not taken back.
fn kept(manager: &UnixDatagram, files: &mut BTreeMap<String, OwnedFd>) {
    let mut packet = [0; 4096];
    while let Ok(received) = packet::try_recv(manager.as_fd(), &mut packet) {
        let text = String::from_utf8_lossy(&packet[..received.len]);
        let Some(name) = text.lines().find_map(|line| line.strip_prefix("FDNAME=")) else { continue };
        match received.fds.into_iter().next() {
            Some(file) => drop(files.insert(name.to_owned(), file)),
            None => drop(files.remove(name)),
        }
    }
}

/// A broker that gets descriptors from 3 on, with their names, as the manager passes them.
fn broker_with_passed(stage: &Stage, manager: &Path, files: &BTreeMap<String, OwnedFd>) -> Broker {
    let opened: Vec<String> = (3..)
        .zip(files.values())
        .map(|(n, file)| format!("{n}<>/proc/{}/fd/{}", std::process::id(), file.as_raw_fd()))
        .collect();
    let names: Vec<&str> = files.keys().map(String::as_str).collect();
    let mut command = Command::new("bash");
    let script = format!(
        "export LISTEN_PID=$$ LISTEN_FDS={} LISTEN_FDNAMES={}; exec \"$0\" \"$@\" {}",
        files.len(),
        names.join(":"),
        opened.join(" ")
    );
    command.args(["-c", &script, env!("CARGO_BIN_EXE_partywalld")]);
    Broker::by(command, stage.dir.path(), Some(manager))
}

/// As of a broker without capabilities, which may not look into QEMU's process.
#[test]
fn windows_that_the_service_manager_has_kept_are_used_again() {
    let stage = Stage::new();
    let path = stage.path("manager");
    let manager = UnixDatagram::bind(&path).unwrap();
    let mut files = BTreeMap::new();
    let broker = Broker::by(Command::new(env!("CARGO_BIN_EXE_partywalld")), stage.dir.path(), Some(&path));
    stage.attach("a", 8 * MIB);
    stage.await_memory(&broker, 8 * MIB);
    kept(&manager, &mut files);
    assert_eq!(files.len(), 2);
    broker.kill();
    stage.monitors[0].close_files();
    std::fs::write(stage.path("log"), "").unwrap();
    let _broker = broker_with_passed(&stage, &path, &files);
    eventually("the machine is attended to again", || stage.log().contains("as it was with the last broker"));
    assert_eq!(stage.attach("a", 8 * MIB), 0, "{}", stage.log());
    assert_eq!(stage.monitors[0].plugged(), 2);
    assert_eq!(stage.client().ask(&Message::RemoveMachine { name: "a".into() }), Message::Done {});
    kept(&manager, &mut files);
    assert_eq!(files.len(), 0, "what is detached is kept no longer");
}

/// They were passed to each broker, which closed them, and the manager kept their memory for as long as there was a broker.
#[test]
fn stored_files_that_no_broker_uses_again_are_given_up() {
    let stage = Stage::new();
    let path = stage.path("manager");
    let manager = UnixDatagram::bind(&path).unwrap();
    let mut files = BTreeMap::new();
    let broker = Broker::by(Command::new(env!("CARGO_BIN_EXE_partywalld")), stage.dir.path(), Some(&path));
    stage.attach("a", 8 * MIB);
    stage.await_memory(&broker, 8 * MIB);
    kept(&manager, &mut files);
    assert_eq!(files.len(), 2);
    broker.kill();
    stage.monitors[0].close_files();
    // Two windows that the machine has, and one without an owner, as left by a broker that is killed in the middle of a detachment.
    let stray = files.values().next().unwrap().try_clone().unwrap();
    files.insert("window-00000000000000000000000000000001".into(), stray);
    std::fs::write(stage.path("log"), "").unwrap();
    let broker = broker_with_passed(&stage, &path, &files);
    eventually("the machine is attended to again", || stage.log().contains("as it was with the last broker"));
    eventually("what nobody has is given up", || {
        kept(&manager, &mut files);
        !files.contains_key("window-00000000000000000000000000000001")
    });
    assert_eq!(files.len(), 2, "those of the machine are kept");
    broker.kill();
    // All other windows go too, when no file remembers the machine.
    std::fs::remove_file(stage.path("broker.machines")).unwrap();
    let _broker = broker_with_passed(&stage, &path, &files);
    eventually("all are given up", || {
        kept(&manager, &mut files);
        files.is_empty()
    });
}
