//! Windows as PCI devices: machines that were started without memory slots talk to one another, to one that has such places, and to
//! the host, and what they write into a peer's window is dropped all the same. Their agent is the static one, where Rust can make that. One set of guests for all.
#![cfg(not(miri))]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

#[allow(dead_code, reason = "other tests use the rest")]
mod world;

use partywall_lab::{Guest, GuestOptions, ImageOptions};
use partywall_region::bar;
use rustix::mm::{MapFlags, ProtFlags};
use std::io::{BufRead as _, BufReader};
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Command, Stdio};
use world::{HANG, Inside, World, program, static_program};

/// The variable with the task of this program in a guest.
const TASK: &str = "PARTYWALL_DEVICES_TASK";

#[test]
fn machine_without_slots_gets_pci_windows() {
    let image = ImageOptions::default().program(std::env::current_exe().unwrap(), "inside");
    let agent = static_program("partywall-agent", "partywall-agent");
    agent.iter().for_each(|agent| is_static(agent));
    let agent = agent.unwrap_or_else(|| program("partywall-agent", "partywall-agent"));
    let world = World::with_agent("devices", image, agent);
    // One QEMU is another user's than the broker.
    let runs_as: &[&str] = if rustix::process::geteuid().is_root() { &["-runas", "nobody"] } else { &[] };
    let m = GuestOptions::new("m").arguments(runs_as.iter().copied());
    let [a, b, m] = world.boot_as([GuestOptions::new("a").slots(0), GuestOptions::new("b").slots(0), m]);
    for (guest, kind, why) in [
        (&a, "as PCI devices (ivshmem)", "started without memory slots"),
        (&b, "as PCI devices (ivshmem)", "maxmem"),
        (&m, "as memory devices", "it was started with places"),
    ] {
        let said = world.attach(guest);
        println!("{}", said.text());
        assert_eq!(said.status, 0, "{}", String::from_utf8_lossy(&said.stderr));
        assert!(said.text().contains(kind) && said.text().contains(why), "{}", said.text());
    }
    world.wait_ready(3);
    the_list_says_so(&world);
    let again = world.attach(&a).text();
    assert!(again.contains("in place") && again.contains("PCI devices"), "{again}");
    let count = devices(&a).len();
    assert_eq!(count, 6, "to and from b, m and the host");
    doctors_say_so(&world, &a);
    card_needs_a_switch_and_shared_memory(&world);

    for guest in [&a, &b, &m] {
        guest.sh("dd if=/dev/urandom of=/tmp/file bs=100k count=31 2>/dev/null");
    }
    for (from, to) in [(&a, &b), (&b, &m), (&m, &a)] {
        a_file_goes(from, to);
    }
    the_host_takes_part(&world, &a);
    only_owners_write(&a, &b);

    // The devices are there again after a reset, at whatever addresses the firmware gives them.
    assert_eq!(world.partywall(&["vm", "detach", "m"]).status, 0);
    std::thread::scope(|s| [&b, &m].map(|guest| s.spawn(|| guest.reset().unwrap())).map(|reset| reset.join().unwrap()));
    b.start_agent();
    // A machine without an agent may be about to start, and would not notice memory that it only reads.
    let said = world.attach(&m).text();
    assert!(said.contains("3 windows plugged in") && said.contains("when its agent greets: 3 more"), "{said}");
    m.start_agent();
    world.wait_ready(3);
    b.sh("dd if=/dev/urandom of=/tmp/file bs=100k count=3 2>/dev/null");
    a_file_goes(&b, &a);

    // A process may still map earlier devices, so they stay where they are; a machine that is attached again gets other devices.
    let before = devices(&a).len();
    assert_eq!(world.partywall(&["vm", "detach", "a"]).status, 0);
    assert_eq!(devices(&a).len(), before, "no device is unplugged");
    assert_eq!(world.attach(&a).status, 0);
    world.wait_ready(3);
    assert_eq!(devices(&a).len(), before + count);
    a_file_goes(&a, &b);
}

/// No library is asked for, nor something that would load one.
fn is_static(program: &Path) {
    let parts =
        Command::new("readelf").args(["--program-headers", "--dynamic", "--wide"]).arg(program).output().unwrap();
    let parts = String::from_utf8_lossy(&parts.stdout);
    assert!(parts.contains("LOAD") && !parts.contains("INTERP") && !parts.contains("NEEDED"), "{parts}");
}

/// The devices that its QEMU has.
fn devices(guest: &Guest) -> Vec<String> {
    let listed = guest.monitor_command("qom-list", serde_json::json!({ "path": "/machine/peripheral" })).unwrap();
    let devices = listed.as_array().unwrap().iter().filter(|device| device["type"] == "child<ivshmem-plain>");
    devices.map(|device| device["name"].as_str().unwrap().to_owned()).collect()
}

fn the_list_says_so(world: &World) {
    let said = world.partywall(&["vm", "list", "--json"]);
    let lines: Vec<serde_json::Value> = serde_json::from_slice(&said.stdout).unwrap();
    let kinds: Vec<_> = lines.iter().map(|line| (line["name"].as_str(), line["plugged_as"].as_str())).collect();
    assert_eq!(kinds, [(Some("a"), Some("pci")), (Some("b"), Some("pci")), (Some("m"), Some("memory"))]);
    let table = world.partywall(&["vm", "list"]).text();
    assert!(table.contains("PCI devices") && table.contains("memory devices"), "{table}");
}

fn doctors_say_so(world: &World, a: &Guest) {
    let outside = String::from_utf8(world.partywall(&["doctor", "--json"]).stdout).unwrap();
    assert!(outside.contains("a: up, all 6 windows (PCI devices) are seen by both sides"), "{outside}");
    let inside = String::from_utf8(a.run(&["partywall", "doctor", "--json"]).unwrap().stdout).unwrap();
    assert!(inside.contains("6 (3 to write, towards b, host, m), of "), "{inside}");
}

/// The broker knows the machine's monitor. These machines have private memory.
fn card_needs_a_switch_and_shared_memory(world: &World) {
    let folder = world.path("net").display().to_string();
    let refused = |machine: &str| {
        let said = world.partywall(&["vm", "attach", machine, "--net", "lan", "--folder", &folder]);
        assert_ne!(said.status, 0, "{}", said.text());
        String::from_utf8(said.stderr).unwrap()
    };
    let absent = refused("a");
    assert!(absent.contains("no switch runs in") && absent.contains("partywall net run"), "{absent}");
    let mut switch = Command::new(program("partywall-vhost", "partywall-net"));
    switch.args(["--folder", &folder, "run", "lan"]).stdout(Stdio::piped());
    let mut switch = world::Process(switch.spawn().unwrap());
    let mut line = String::new();
    BufReader::new(switch.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.starts_with("serving"), "{line}");
    let private = refused("a");
    assert!(private.contains("is not shared") && private.contains("memory-backend-memfd"), "{private}");
    assert!(refused("absent").contains("no machine called absent is attached"));
}

/// A file from one guest to the other, whose sums are compared.
fn a_file_goes(from: &Guest, to: &Guest) {
    let (me, you) = (from.name(), to.name());
    let receiver = to.begin(&format!("exec partywall --domain {you} cat -l file < /dev/null > /tmp/got"));
    from.wait_service("file");
    from.sh(&format!("timeout 60 partywall --domain {me} cat {you}:file < /tmp/file"));
    assert_eq!(receiver.wait(HANG).unwrap().status, 0);
    assert_eq!(to.sh("sha256sum < /tmp/got"), from.sh("sha256sum < /tmp/file"));
}

fn the_host_takes_part(world: &World, a: &Guest) {
    let receiver = a.begin("exec partywall --domain a cat -l down < /dev/null > /tmp/got");
    let content: Vec<u8> = (0..3_000_000u32).map(|n| (n % 251) as u8).collect();
    std::fs::write(world.path("content"), &content).unwrap();
    let mut sender = world.command(&["--domain", "h", "cat", "--wait", "30s", "a:down"]);
    assert!(sender.stdin(std::fs::File::open(world.path("content")).unwrap()).status().unwrap().success());
    assert_eq!(receiver.wait(HANG).unwrap().status, 0);
    assert!(a.get("/tmp/got").unwrap() == content);
}

/// A guest whose root writes all over what it may only read changes nothing that its peer sees.
fn only_owners_write(a: &Guest, b: &Guest) {
    let before = inside(a, "sum own");
    assert_eq!(inside(b, "scribble"), "3", "what the others write, and the host");
    assert_eq!(inside(a, "sum own"), before);
    // And where it is the owner, it arrives.
    a_file_goes(a, b);
}

/// The tasks of this program in a guest.
#[test]
fn in_a_guest() {
    let Ok(task) = std::env::var(TASK) else { return };
    let windows = bar::windows();
    let said = match task.as_str() {
        "sum own" => {
            let sum = |bytes: &[u8]| {
                bytes.chunks_exact(8).fold(0u64, |sum, word| {
                    sum.rotate_left(5)
                        ^ u64::from_le_bytes(word.try_into().unwrap()).wrapping_mul(0x9e37_79b9_7f4a_7c15)
                })
            };
            let own = windows.iter().filter(|shown| !shown.read_only);
            own.map(|shown| sum(&raw(&shown.device)[1 << 20..])).fold(0, |all, sum| all ^ sum)
        }
        "scribble" => {
            windows.iter().filter(|shown| shown.read_only).map(|shown| raw(&shown.device).fill(0xee)).count() as u64
        }
        other => panic!("no task {other}"),
    };
    println!("\nSAYS {said}");
}

/// All of a device's memory, mapped as a hostile guest maps it.
#[expect(unsafe_code, reason = "maps memory as a hostile guest would")]
fn raw(device: &bar::BarDevice) -> &'static mut [u8] {
    let window = bar::open(device, true).unwrap();
    let (len, access) = (usize::try_from(device.size).unwrap(), ProtFlags::READ | ProtFlags::WRITE);
    // SAFETY: a fresh mapping, never unmapped, of memory that nothing else in this process uses.
    unsafe {
        let start = rustix::mm::mmap(std::ptr::null_mut(), len, access, MapFlags::SHARED, window.as_fd(), 0).unwrap();
        std::slice::from_raw_parts_mut(start.cast::<u8>(), len)
    }
}

fn inside(guest: &Guest, task: &str) -> String {
    let said = guest.sh(&format!("{TASK}='{task}' inside --exact in_a_guest --nocapture --test-threads 1"));
    said.lines().find_map(|line| line.strip_prefix("SAYS ")).unwrap().to_owned()
}
