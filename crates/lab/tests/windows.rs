//! Windows between real guests: their memory, the rights to write it, and their state after a death. One set of guests for all tests.
#![cfg(not(miri))]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod inside;

use inside::{Guests, HANG, Inside, LINKS};
use partywall_lab::Guest;
use partywall_region::Link;
use partywall_region::pmem::{WindowFile, WindowSpec};
use partywall_region::relay::{Notice, Notices};
use partywall_vm::ivshmem::{IvshmemOptions, IvshmemServer};
use partywall_vm::{Machine, Unplugged, VmError, WindowDevice, WindowRole};
use rustix::fd::AsFd;
use serde_json::json;
use std::os::unix::fs::MetadataExt;

const MIB: u64 = 1 << 20;

fn window(owner: &str, peer: &str, room: u64) -> WindowFile {
    WindowFile::create(&WindowSpec { room, owner: owner.into(), peer: peer.into() }).unwrap()
}

fn plug(guest: &Guest, file: &WindowFile, role: WindowRole) {
    let mut machine = Machine::connect(guest.monitor()).unwrap();
    let plugged = machine.plug(&WindowDevice::of(file), role).unwrap();
    println!("{}: {} MiB window as {role} in {:?}", guest.name(), plugged.size / MIB, plugged.took.unwrap());
    // The guest sees it soon.
    guest.wait_inside("window", &[&file.id().to_string(), &(role == WindowRole::Owner).to_string()]);
}

#[test]
fn windows_between_guests() {
    let guests = Guests::boot("windows", &["a", "b", "c"]);
    let [a, b, c] = guests.all();
    conformance(&guests, a);
    doorbells_and_memory_go_between_guests(&guests, a, b);
    memory_crosses_and_only_its_owner_can_write(a, b, c);
    second_plug_changes_nothing_and_obstacles_are_named(a);
    unplug_reports_whether_window_was_kept(c);
    ivshmem_guests_share_the_same_memory(b, c);
    link_hang_up_reports_paused_or_killed_machine(&guests, a, c);
    a_window_outlives_reset_and_death(guests);
}

/// The suite that sealed memfds pass, with the owner's memory through one device and the peer's through another; first with links within
/// the guest, then with links that go out to the host and come back.
fn conformance(guests: &Guests, a: &Guest) {
    let file = window("a", "a", 8 * MIB);
    let id = file.id().to_string();
    plug(a, &file, WindowRole::Owner);
    plug(a, &file, WindowRole::Peer);
    assert_eq!(a.inside("conformance", &[&id]), "conforms");

    let (relay, notices) = guests.relay(0);
    relay.window(file.id(), file.as_fd().try_clone_to_owned().unwrap());
    let guest = std::thread::scope(|s| {
        let guest = s.spawn(|| a.inside("relay-conformance", &[&id]));
        up(&notices);
        for pair in 0..LINKS {
            let (x, y) = Link::pair().unwrap();
            relay.link(2 * pair, x, None);
            relay.link(2 * pair + 1, y, None);
        }
        relay.control(b"ready").unwrap();
        guest.join().unwrap()
    });
    assert_eq!(guest, "conforms");
}

fn up(notices: &Notices) {
    while notices.recv_timeout(HANG).unwrap() != Notice::Up {}
}

/// The connection of two processes in different guests: a window, and links through the host.
fn doorbells_and_memory_go_between_guests(guests: &Guests, a: &Guest, b: &Guest) {
    let file = window("a", "b", MIB);
    let id = file.id().to_string();
    plug(a, &file, WindowRole::Owner);
    plug(b, &file, WindowRole::Peer);
    let ((to_a, from_a), (to_b, from_b)) = (guests.relay(0), guests.relay(1));
    let (x, y) = Link::pair().unwrap();
    std::thread::scope(|s| {
        let offer = s.spawn(|| a.inside("offer", &[&id, "200"]));
        let take = s.spawn(|| b.inside("take", &[&id]));
        for (relay, notices, socket) in [(&to_a, &from_a, x), (&to_b, &from_b, y)] {
            up(notices);
            relay.window(file.id(), file.as_fd().try_clone_to_owned().unwrap());
            relay.link(0, socket, None);
        }
        // Both ends are there before anything is said.
        [&from_a, &from_b].into_iter().for_each(inside::said);
        to_a.control(b"ready").unwrap();
        to_b.control(b"ready").unwrap();
        println!("a ring and one back, through both serial ports: {}", offer.join().unwrap());
        assert_eq!(take.join().unwrap(), "200");
    });
}

fn memory_crosses_and_only_its_owner_can_write(a: &Guest, b: &Guest, c: &Guest) {
    let file = window("a", "b", 4 * MIB);
    let id = file.id().to_string();
    plug(b, &file, WindowRole::Peer);
    plug(a, &file, WindowRole::Owner);
    let base = a.inside("write", &[&id]);
    assert_eq!(b.inside("read", &[&id, &base]), "as written");

    // The peer's writes do not arrive: neither in the owner's view nor in the host's.
    let before = a.inside("sum", &[&id]);
    assert_eq!(b.inside("scribble", &[&id]), "scribbled");
    assert_eq!(a.inside("sum", &[&id]), before);
    assert_eq!(b.inside("read", &[&id, &base]), "as written");

    // A third machine has no such device, and no window at all.
    assert_eq!(c.inside("devices", &[]), "");

    // A process of the host is party to it by the same file.
    assert_eq!(inside::read(&file.window().unwrap(), base.parse().unwrap()), "as written");

    // A machine may write anything into its own window, even the header: then the window is not found any more, and nothing else happens.
    let other = window("a", "b", MIB);
    plug(a, &other, WindowRole::Owner);
    plug(b, &other, WindowRole::Peer);
    a.inside("forge", &[&other.id().to_string(), &id]);
    assert!(b.inside("find", &[&id]).contains("more than once"), "a duplicated id is refused");
    assert!(b.inside("find", &[&other.id().to_string()]).contains("not plugged in"));
}

fn second_plug_changes_nothing_and_obstacles_are_named(a: &Guest) {
    let file = window("a", "x", MIB);
    let mut machine = Machine::connect(a.monitor()).unwrap();
    assert!(machine.plug(&WindowDevice::of(&file), WindowRole::Peer).unwrap().took.is_some());
    assert!(machine.plug(&WindowDevice::of(&file), WindowRole::Peer).unwrap().took.is_none());
    let known = machine.windows().unwrap();
    assert_eq!(known.iter().filter(|w| (w.id, w.role) == (file.id(), WindowRole::Peer)).count(), 1);
    let facts = machine.facts().unwrap();
    assert!(facts.nvdimm && facts.slots_used > 0 && facts.status == "running", "{facts:?}");

    let lost = WindowDevice { path: "/no/such/file".into(), ..WindowDevice::of(&window("a", "y", MIB)) };
    assert!(matches!(machine.plug(&lost, WindowRole::Owner), Err(VmError::Grant { .. })));
    // An attempt that was cut in the middle is taken up.
    let half = window("a", "z", MIB);
    let memory = json!({ "qom-type": "memory-backend-file", "id": format!("pw-owner-{}-memory", half.id()),
        "mem-path": half.path(), "size": half.size(), "share": true });
    a.monitor_command("object-add", memory).unwrap();
    assert!(machine.plug(&WindowDevice::of(&half), WindowRole::Owner).unwrap().took.is_some());
    let odd = WindowDevice { size: 5, ..WindowDevice::of(&half) };
    assert!(matches!(machine.plug(&odd, WindowRole::Owner), Err(VmError::Size { .. })));
    let other_size = WindowDevice { size: 64 * MIB, ..WindowDevice::of(&half) };
    assert!(matches!(machine.plug(&other_size, WindowRole::Owner), Err(VmError::Taken { .. })));
}

fn unplug_reports_whether_window_was_kept(c: &Guest) {
    let file = window("c", "x", MIB);
    let mut machine = Machine::connect(c.monitor()).unwrap();
    assert_eq!(machine.unplug(file.id(), WindowRole::Owner).unwrap(), Unplugged::Absent);
    for role in [WindowRole::Owner, WindowRole::Peer] {
        drop(machine);
        plug(c, &file, role);
        machine = Machine::connect(c.monitor()).unwrap();
        // QEMU 7.2 keeps both kinds, and other versions may not. The outcome must be reported either way.
        let outcome = machine.unplug(file.id(), role).unwrap();
        println!("unplugging as {role}: {outcome:?}");
        let there = machine.windows().unwrap().iter().any(|w| (w.id, w.role) == (file.id(), role));
        assert_eq!(there, matches!(outcome, Unplugged::Kept { .. }));
    }
}

/// For machines without places for windows: a PCI device, whose memory both write.
fn ivshmem_guests_share_the_same_memory(b: &Guest, c: &Guest) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ivshmem");
    let server = IvshmemServer::start(&path, IvshmemOptions::default()).unwrap();
    for guest in [b, c] {
        let address = json!({ "type": "unix", "data": { "path": path } });
        let backend = json!({ "type": "socket", "data": { "addr": address, "server": false } });
        guest.monitor_command("chardev-add", json!({ "id": "iv", "backend": backend })).unwrap();
        let device = json!({ "driver": "ivshmem-doorbell", "id": "ivdev", "chardev": "iv", "vectors": 1 });
        guest.monitor_command("device_add", device).unwrap();
    }
    assert_eq!(b.inside("bar-write", &["windows"]), "");
    assert_eq!(c.inside("bar-read", &[]), "windows");
    let mut bytes = [0; 7];
    rustix::io::pread(server.memory(), &mut bytes, 0).unwrap();
    assert_eq!(&bytes, b"windows");
    assert_eq!(b.inside("bar-conformance", &[]), "conforms");
}

/// A guest that is held up, an agent that is killed, a machine that is: the other side of a link hears of each.
fn link_hang_up_reports_paused_or_killed_machine(guests: &Guests, a: &Guest, c: &Guest) {
    enum Fault {
        Hold,
        KillAgent,
        KillMachine,
    }
    for fault in [Fault::Hold, Fault::KillAgent, Fault::KillMachine] {
        let ((to_a, from_a), (to_c, from_c)) = (guests.relay(0), guests.relay(2));
        let (x, y) = Link::pair().unwrap();
        let (mut near, mut far) = (a.begin_inside("idle"), c.begin_inside("idle"));
        for (relay, notices, socket) in [(&to_a, &from_a, x), (&to_c, &from_c, y)] {
            up(notices);
            relay.link(0, socket, None);
            relay.control(b"ready").unwrap();
        }
        near.wait_for("READY", HANG).unwrap();
        far.wait_for("READY", HANG).unwrap();
        match fault {
            Fault::Hold => c.pause().unwrap(),
            Fault::KillAgent => far.signal(rustix::process::Signal::KILL).unwrap(),
            Fault::KillMachine => c.kill(),
        }
        near.wait_for("SAYS hung up", HANG).unwrap();
        let wanted = |notice: &Notice| match fault {
            Fault::KillMachine => matches!(notice, Notice::Down { .. }),
            _ => *notice == Notice::Silent,
        };
        while !wanted(&from_c.recv_timeout(HANG).unwrap()) {}
        if let Fault::Hold = fault {
            c.resume().unwrap();
            far.wait_for("SAYS hung up", HANG).unwrap();
        }
    }
}

fn a_window_outlives_reset_and_death(guests: Guests) {
    let file = window("a", "b", MIB);
    let id = file.id().to_string();
    let [a, b, _] = guests.all();
    plug(a, &file, WindowRole::Owner);
    plug(b, &file, WindowRole::Peer);
    let base = a.inside("write", &[&id]);
    a.reset().unwrap();
    // The device is there again, under whatever number, and so is what was in it.
    a.wait_inside("window", &[&id, "true"]);
    assert_eq!(b.inside("read", &[&id, &base]), "as written");
    a.kill();
    assert_eq!(b.inside("read", &[&id, &base]), "as written");
    // The window is gone when the last process has closed it.
    let pids = [std::process::id(), b.pid()];
    assert!(pids.iter().all(|pid| has_open(*pid, &file)), "this process and the peer");
    drop(guests);
    let path = file.path();
    assert!(path.exists());
    drop(file);
    assert!(!path.exists(), "nobody else has it open");
}

/// Whether a process has the file of a window open.
fn has_open(pid: u32, file: &WindowFile) -> bool {
    let inode = rustix::fs::fstat(file).unwrap().st_ino;
    let open = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    open.flatten().any(|fd| std::fs::metadata(fd.path()).is_ok_and(|meta| meta.ino() == inode))
}

/// Not a separate test: it runs in a guest.
#[test]
fn in_a_guest() {
    inside::main();
}
