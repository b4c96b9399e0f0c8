//! Channels between programs in guests, and between them and programs of the host: as users have them, and their state after a death. One
//! set of guests for all of it.
#![cfg(not(miri))]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

#[allow(dead_code, reason = "other tests use the rest")]
mod world;

use partywall::Domain;
use partywall::rpc::{Block, CallClient};
use partywall_lab::{Guest, ImageOptions, Running};
use rustix::process::{Pid, Signal};
use std::fs::File;
use std::process::Stdio;
use std::time::Instant;
use world::{HANG, Inside, Process, World};

/// The exit code of our commands when the peer has died.
const DIED: i32 = 4;

#[test]
fn programs_in_guests_and_on_the_host_connect() {
    let program = world::program("partywall-cli", "partywall");
    let shared_table = program.parent().unwrap().join("examples/shared_table");
    let shared_tree = program.parent().unwrap().join("examples/shared_tree");
    let image = ImageOptions::default().program(&shared_table, "shared_table").program(&shared_tree, "shared_tree");
    let mut world = World::with("channels", image);
    let [a, b] = world.boot(["a", "b"]);
    let before = open_files(&world);
    obstacles_are_named(&world, &a);
    let said = diagnosis_inside(&a);
    assert!(said.contains("warn windows: not found") && said.contains("ok agent: runs"), "{said}");
    for guest in [&a, &b] {
        let said = world.attach(guest);
        println!("{}", said.text());
        assert_eq!(said.status, 0, "{}", String::from_utf8_lossy(&said.stderr));
        assert!(world.attach(guest).text().contains("in place"), "a second time nothing happens");
    }
    world.wait_ready(2);
    doctor_finds_everything_well(&world, &a);
    for guest in [&a, &b] {
        guest.sh("dd if=/dev/urandom of=/tmp/file bs=100k count=31");
    }

    // Where memory is mapped, and found again by address, random addresses count.
    for guest in [&a, &b] {
        guest.randomize_addresses(true);
    }
    a_file_goes(&a, &b, "big", "/tmp/file");
    guest_and_host(&world, &a);
    within_a_guest(&a);
    tables_are_shared(&world, &shared_table, &a, &b);
    trees_are_walked_in_place(&world, &shared_tree, &a, &b);
    kept_block_outlives_its_channel(&world, &a);
    for guest in [&a, &b] {
        guest.randomize_addresses(false);
    }
    names_are_the_machines_own(&world, &a, &b);
    rings_of_many_channels_are_given_back(&a, &b);

    a_program_dies(&a, &b);
    an_agent_dies(&world, &a, &b);
    a_guest_is_held_up(&world, &a, &b);
    a_guest_is_reset(&world, &a, &b);
    the_broker_dies(&mut world, &a, &b);
    a_machine_dies(&world, &a, &b);

    // The broker has no objects left but those of the attendant itself.
    for guest in ["a", "b"] {
        assert_eq!(world.partywall(&["vm", "detach", guest]).status, 0);
    }
    no_memory_without_a_device(&a);
    drop([a, b]);
    let deadline = Instant::now() + HANG;
    while open_files(&world) > before + 4 {
        assert!(Instant::now() < deadline, "{} files are open, {before} were before", open_files(&world));
    }
    assert!(world.partywall(&["vm", "list"]).text().contains("no machine"));
    assert_eq!(windows_of(&world), Vec::<String>::new(), "no memory of a window is held");
}

/// Files of windows that the broker has open.
fn windows_of(world: &World) -> Vec<String> {
    let all = std::fs::read_dir(format!("/proc/{}/fd", world.broker_pid())).unwrap().flatten();
    let targets = all.filter_map(|entry| Some(std::fs::read_link(entry.path()).ok()?.display().to_string()));
    targets.filter(|target| target.contains("memfd:") && target.contains("window")).collect()
}

/// Objects that QEMU does not remove from a running machine stay, but each piece of memory with its device.
fn no_memory_without_a_device(guest: &Guest) {
    let ask = |command, arguments| guest.monitor_command(command, arguments).unwrap();
    let objects = ask("qom-list", serde_json::json!({ "path": "/objects" }));
    let objects = objects.as_array().unwrap().iter().filter(|o| o["type"] == "child<memory-backend-file>");
    let mut objects: Vec<String> = objects.map(|o| format!("/objects/{}", o["name"].as_str().unwrap())).collect();
    let devices = ask("query-memory-devices", serde_json::json!({}));
    let memory = |device: &serde_json::Value| device["data"]["memdev"].as_str().unwrap().to_owned();
    let mut devices: Vec<String> = devices.as_array().unwrap().iter().map(memory).collect();
    objects.sort();
    devices.sort();
    assert!(!devices.is_empty() && objects == devices, "{objects:?} {devices:?}");
}

/// Descriptors of the broker.
fn open_files(world: &World) -> usize {
    std::fs::read_dir(format!("/proc/{}/fd", world.broker_pid())).unwrap().count()
}

fn error(of: partywall_lab::CommandOutput) -> String {
    assert_ne!(of.status, 0, "{}", of.text());
    String::from_utf8_lossy(&of.stderr).into_owned()
}

fn obstacles_are_named(world: &World, a: &Guest) {
    let nowhere = world.path("nowhere");
    let said = error(world.attach_by("a", &nowhere, &world.port("a")));
    assert!(said.contains("nowhere"), "{said}");
    let said = error(world.partywall(&["vm", "detach", "a"]));
    assert!(said.contains("no machine is called a"), "{said}");
    // A window that is larger than what the machine was started with.
    let (qmp, port) = (a.monitor(), world.port("a"));
    let words = ["vm", "attach", "a", "--qmp", qmp.to_str().unwrap(), "--port", port.to_str().unwrap()];
    let said = error(world.partywall(&[&words[..], &["--window", "40G"]].concat()));
    assert!(said.contains("maxmem") || said.contains("room") || said.contains("allocate"), "{said}");
    assert!(world.partywall(&["vm", "list"]).text().contains("no machine"), "what failed left nothing");
    // The guest has no broker in the meantime.
    assert!(a.shell("partywall list").unwrap_err().to_string().contains("no broker"));
}

/// The findings of `partywall doctor` about virtual machines, a line each.
fn diagnosis(said: &[u8], area: &str) -> String {
    let report: serde_json::Value = serde_json::from_slice(said).unwrap();
    let word = |check: &serde_json::Value, part: &str| check[part].as_str().unwrap_or_default().to_owned();
    let all = report["checks"].as_array().unwrap().iter().filter(|check| check["area"] == area);
    let line = |check| {
        format!(
            "{} {}: {} {}\n",
            word(check, "status"),
            word(check, "name"),
            word(check, "found"),
            word(check, "remedy")
        )
    };
    all.map(line).collect()
}

fn diagnosis_inside(guest: &Guest) -> String {
    diagnosis(&guest.run(&["partywall", "doctor", "--json"]).unwrap().stdout, "this virtual machine")
}

fn diagnosis_outside(world: &World) -> String {
    diagnosis(&world.partywall(&["doctor", "--json"]).stdout, "virtual machines")
}

/// Waits until the doctor's report contains this.
fn wait_for_diagnosis(world: &World, part: &str) {
    let deadline = Instant::now() + HANG;
    while !diagnosis_outside(world).contains(part) {
        assert!(Instant::now() < deadline, "{part} is not in\n{}", diagnosis_outside(world));
    }
}

fn doctor_finds_everything_well(world: &World, a: &Guest) {
    let said = diagnosis_inside(a);
    for part in [
        "ok serial port: org.partywall.0 is /dev/vport",
        "ok modules: all are there",
        "ok agent: runs as process",
        "ok windows: 4 (2 to write, towards b, host), of ",
    ] {
        assert!(said.contains(part), "{part} is not in\n{said}");
    }
    assert!(!said.contains("warn"), "{said}");
    let said = diagnosis_outside(world);
    for part in ["ok QEMU: version", "ok machine: a: up, all 4 windows", "ok machine: b: up, all 4 windows"] {
        assert!(said.contains(part), "{part} is not in\n{said}");
    }
}

fn ended_well(command: Running<'_>) {
    let done = command.wait(HANG).unwrap();
    assert_eq!(done.status, 0, "{}", String::from_utf8_lossy(&done.stderr));
}

/// A file from one guest to the other, whose sums are compared.
fn a_file_goes(from: &Guest, to: &Guest, service: &str, file: &str) {
    let name = to.name();
    let receiver = to.begin(&format!("exec partywall --domain {name} -v cat -l {service} < /dev/null > /tmp/got"));
    from.wait_service(service);
    from.sh(&format!("timeout 60 partywall --domain {} cat {name}:{service} < {file}", from.name()));
    ended_well(receiver);
    let sum = |guest: &Guest, file: &str| guest.sh(&format!("sha256sum < {file}"));
    assert_eq!(sum(to, "/tmp/got"), sum(from, file));
}

fn guest_and_host(world: &World, a: &Guest) {
    // From the guest to the host ...
    let got = world.path("got");
    let mut receiver = world.command(&["--domain", "h", "cat", "-l", "up"]);
    let mut receiver = Process(receiver.stdout(File::create(&got).unwrap()).spawn().unwrap());
    a.wait_service("up");
    a.sh("timeout 60 partywall --domain a cat h:up < /tmp/file");
    assert!(receiver.0.wait().unwrap().success());
    let sent = a.sh("sha256sum < /tmp/file");
    let sum = |path: &std::path::Path| {
        let output = std::process::Command::new("sha256sum").stdin(File::open(path).unwrap()).output().unwrap();
        String::from_utf8(output.stdout).unwrap().trim_end().to_owned()
    };
    assert_eq!(sum(&got), sent);

    // ... and back.
    let receiver = a.begin("exec partywall --domain a cat -l down < /dev/null > /tmp/back");
    let sent_back =
        world.command(&["--domain", "h", "cat", "--wait", "30s", "a:down"]).stdin(File::open(&got).unwrap()).status();
    assert!(sent_back.unwrap().success());
    ended_well(receiver);
    assert_eq!(a.sh("sha256sum < /tmp/back"), sent);
}

/// Two programs of one guest: their memory and links do not leave it.
fn within_a_guest(a: &Guest) {
    let receiver = a.begin("exec partywall --domain one -v cat -l near < /dev/null > /tmp/near");
    a.wait_service("near");
    a.sh("timeout 60 partywall --domain two cat one:near < /tmp/file");
    ended_well(receiver);
    assert_eq!(a.sh("sha256sum < /tmp/near"), a.sh("sha256sum < /tmp/file"));
}

/// Further regions of a channel: more of them one after the other than there are places for at a time.
fn tables_are_shared(world: &World, shared_table: &std::path::Path, a: &Guest, b: &Guest) {
    let sum = format!("sum {}", (0..14u64).sum::<u64>() * (256 << 10));
    let server = b.begin("exec shared_table serve b tables");
    b.wait_service("tables");
    // From one guest to another, ...
    assert!(a.sh("timeout 60 shared_table read a b:tables").contains(&sum));
    ended_well(server);
    // ... within a guest, ...
    let server = a.begin("exec shared_table serve one tables");
    a.wait_service("tables");
    assert!(a.sh("timeout 60 shared_table read two one:tables").contains(&sum));
    ended_well(server);
    // ... from a guest to the host, and from the host to a guest.
    let on_host = |words: &[&str]| {
        let mut command = std::process::Command::new(shared_table);
        command.args(words).env("PARTYWALL_BROKER", world.path("broker.sock")).stdout(Stdio::piped());
        Process(command.spawn().unwrap())
    };
    let mut server = on_host(&["serve", "h", "tables"]);
    a.wait_service("tables");
    assert!(a.sh("timeout 60 shared_table read a h:tables").contains(&sum));
    assert!(server.0.wait().unwrap().success());
    let server = a.begin("exec shared_table serve a tables");
    a.wait_service("tables");
    let mut reader = on_host(&["read", "h", "a:tables"]);
    let mut said = String::new();
    std::io::Read::read_to_string(&mut reader.0.stdout.take().unwrap(), &mut said).unwrap();
    assert!(said.contains(&sum), "{said}");
    ended_well(server);
}

/// Calls whose arguments and results lie in heaps. Each heap outgrows its first segment.
fn trees_are_walked_in_place(world: &World, shared_tree: &std::path::Path, a: &Guest, b: &Guest) {
    let nodes = 20_000u64;
    let expected = format!("{nodes} nodes, sum {}, read at the client's addresses", (0..nodes).sum::<u64>());
    // From one guest to another more often than the window has room for heaps at the same time, ...
    let server = b.begin("exec shared_tree serve b trees");
    b.wait_service("trees");
    for _ in 0..12 {
        let said = a.sh(&format!("timeout 60 shared_tree sum a b:trees {nodes}"));
        assert!(said.contains(&expected), "{said}");
    }
    server.signal(Signal::KILL).unwrap();
    // ... within a guest, ...
    let server = a.begin("exec shared_tree serve one grove");
    a.wait_service("grove");
    let said = a.sh(&format!("timeout 60 shared_tree sum two one:grove {nodes}"));
    assert!(said.contains(&expected), "{said}");
    server.signal(Signal::KILL).unwrap();
    // ... and from a guest to the host.
    let mut command = std::process::Command::new(shared_tree);
    command.args(["serve", "h", "wood"]).env("PARTYWALL_BROKER", world.path("broker.sock"));
    let mut server = Process(command.spawn().unwrap());
    a.wait_service("wood");
    let said = a.sh(&format!("timeout 60 shared_tree sum a h:wood {nodes}"));
    assert!(said.contains(&expected), "{said}");
    server.0.kill().unwrap();
}

/// Blocks that are kept beyond the end of their channels. The channels after that get other places in the window.
fn kept_block_outlives_its_channel(world: &World, a: &Guest) {
    let server = a.begin("exec shared_tree serve one hedge");
    a.wait_service("hedge");
    let domain = Domain::builder().name("keeper").broker(world.path("broker.sock")).join().unwrap();
    let block = |byte| {
        let client = CallClient::builder().connect(&domain, "a.one:hedge").unwrap();
        let mut block = client.heap().allocate(100_000).unwrap();
        block.fill(byte);
        block
    };
    let kept: Vec<Block> = (1..=3).map(block).collect();
    for (block, byte) in kept.iter().zip(1..) {
        assert!(block.iter().all(|found| *found == byte), "block {byte} has another's bytes");
    }
    drop(kept);
    server.signal(Signal::KILL).unwrap();
}

/// A guest can be what its machine is called, and what begins with that; others' names it does not get.
fn names_are_the_machines_own(world: &World, a: &Guest, b: &Guest) {
    let _b = b.begin("exec partywall --domain b cat -l real");
    let _a = a.begin("exec partywall --domain b cat -l false");
    a.wait_service("real");
    a.wait_service("false");
    let listed = world.partywall(&["list", "services"]).text();
    let line = |service: &str| listed.lines().find(|line| line.contains(service)).unwrap_or_default().to_owned();
    assert!(line("false").contains("a.b"), "{listed}");
    assert!(!line("real").contains("a.b"), "{listed}");
    let said = a.shell("partywall --domain a vm list").unwrap_err().to_string();
    assert!(said.contains("administrators"), "{said}");
    _a.signal(Signal::KILL).unwrap();
    _b.signal(Signal::KILL).unwrap();
}

/// More channels, one after the other, than a window has room for.
fn rings_of_many_channels_are_given_back(a: &Guest, b: &Guest) {
    a.sh("echo small > /tmp/small");
    for n in 0..12 {
        a_file_goes(a, b, &format!("n{n}"), "/tmp/small");
    }
}

/// A channel between the guests without traffic.
fn idle<'a>(a: &'a Guest, b: &'a Guest) -> (Running<'a>, Running<'a>) {
    let mut listener = b.begin("exec partywall --domain b -v cat -l idle 2>&1");
    a.wait_service("idle");
    let mut caller = a.begin("exec partywall --domain a -v cat b:idle 2>&1");
    caller.wait_for("connected to", HANG).unwrap();
    listener.wait_for("connection from", HANG).unwrap();
    (caller, listener)
}

fn died(one: Running<'_>, of: &str) {
    let done = one.wait(HANG).unwrap();
    assert_eq!(done.status, DIED, "{of}: {}", done.text());
}

fn a_program_dies(a: &Guest, b: &Guest) {
    let (caller, listener) = idle(a, b);
    listener.signal(Signal::KILL).unwrap();
    died(caller, "its listener was killed");
    let (caller, listener) = idle(a, b);
    caller.signal(Signal::KILL).unwrap();
    died(listener, "its caller was killed");
}

fn an_agent_dies(world: &World, a: &Guest, b: &Guest) {
    let (caller, listener) = idle(a, b);
    b.kill_agent();
    died(listener, "its own agent was killed");
    died(caller, "its peer's agent was killed");
    wait_for_diagnosis(world, "machine: b: its agent is silent in the machine: partywall agent");
    assert!(diagnosis_inside(b).contains("warn agent: does not run"));
    b.start_agent();
    world.wait_ready(2);
    a_file_goes(a, b, "again", "/tmp/small");
}

fn a_guest_is_held_up(world: &World, a: &Guest, b: &Guest) {
    let (caller, listener) = idle(a, b);
    b.pause().unwrap();
    wait_for_diagnosis(world, "machine: b: it is paused");
    died(caller, "its peer's machine was stopped");
    b.resume().unwrap();
    died(listener, "its machine was stopped");
    world.wait_ready(2);
    a_file_goes(a, b, "awake", "/tmp/small");
}

fn a_guest_is_reset(world: &World, a: &Guest, b: &Guest) {
    let (caller, _lost) = idle(a, b);
    b.reset().unwrap();
    b.start_agent();
    died(caller, "its peer's machine was reset");
    world.wait_ready(2);
    a_file_goes(a, b, "afresh", "/tmp/small");
}

/// Links between machines are carried by the broker, and end with it. The next one attends to the same machines, and their windows are
/// used again.
fn the_broker_dies(world: &mut World, a: &Guest, b: &Guest) {
    let (caller, listener) = idle(a, b);
    world.kill_broker();
    died(caller, "the broker was killed");
    died(listener, "the broker was killed");
    let before = [a, b].map(windows);
    world.start_broker();
    world.wait_ready(2);
    a_file_goes(a, b, "again", "/tmp/small");
    assert_eq!([a, b].map(windows), before, "{}", world.log());
}

/// The windows that a machine has in its slots.
fn windows(guest: &Guest) -> Vec<String> {
    let mut monitor = partywall_vm::Machine::connect(guest.monitor()).unwrap();
    monitor.windows().unwrap().iter().map(|window| format!("{} {}", window.role, window.id)).collect()
}

fn a_machine_dies(world: &World, a: &Guest, b: &Guest) {
    let (caller, _lost) = idle(a, b);
    let host = Process(
        world.command(&["--domain", "h", "cat", "b:x", "--wait", "60s"]).stdin(Stdio::piped()).spawn().unwrap(),
    );
    let pid = Pid::from_raw(i32::try_from(b.pid()).unwrap()).unwrap();
    rustix::process::kill_process(pid, Signal::KILL).unwrap();
    died(caller, "its peer's QEMU was killed");
    drop(host);
    let deadline = Instant::now() + HANG;
    while !world.partywall(&["vm", "list"]).text().contains("not there") {
        assert!(Instant::now() < deadline, "{}", world.log());
    }
    wait_for_diagnosis(world, "machine: b: its monitor does not answer");
    assert!(diagnosis_outside(world).contains("partywall vm detach b"));
    // The other goes on.
    within_a_guest(a);
}
