//! A group of two guests and a domain of the host: buffers go from each to each, and the group gets over a guest that is held up, one
//! that is reset, and the broker's death. One set of guests for all of it.
#![cfg(not(miri))]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

#[allow(dead_code, reason = "other tests use the rest")]
mod world;

use partywall_lab::{Guest, Running};
use std::fs::File;
use std::io::{BufRead as _, BufReader};
use std::process::Stdio;
use std::time::{Duration, Instant};
use world::{HANG, Inside, Process, World};

const POLICY: &str =
    "[[group]]\nname = \"pool\"\nmachines = [\"a\", \"b\"]\ndomains = [\"collector\"]\nroom = 8388608\n";

#[test]
fn mixed_group_survives_pause_reset_and_broker_death() {
    let mut world = World::new("mixed");
    world.kill_broker();
    world.start_broker_with(POLICY);
    let [a, b] = world.boot(["a", "b"]);
    for guest in [&a, &b] {
        let said = world.attach(guest);
        assert_eq!(said.status, 0, "{}", String::from_utf8_lossy(&said.stderr));
        guest.sh("dd if=/dev/urandom of=/tmp/file bs=1000 count=2001 2>/dev/null");
    }
    world.wait_ready(2);
    File::create(world.path("file")).unwrap().set_len(2_001_000).unwrap();
    each_member_reads_from_the_others(&world, &a, &b);

    // A reader that is held up loses what it had open, and is a member again when it goes on.
    let (waiting, handle) = put(&a);
    let held = holds(&b, &handle);
    b.pause().unwrap();
    ended(waiting);
    from_guest_to_host(&world, &a);
    b.resume().unwrap();
    drop(held);
    world.wait_ready(2);
    each_member_reads_from_the_others(&world, &a, &b);

    let (waiting, handle) = put(&a);
    let held = holds(&b, &handle);
    b.reset().unwrap();
    drop(held);
    ended(waiting);
    b.start_agent();
    world.wait_ready(2);
    b.sh("dd if=/dev/urandom of=/tmp/file bs=1000 count=2001 2>/dev/null");
    each_member_reads_from_the_others(&world, &a, &b);

    // Buffers that are open when the broker dies stay readable, and can be released; then all members join again with the next broker.
    let (waiting, handle) = put(&a);
    let held = holds(&b, &handle);
    world.kill_broker();
    held.end_input().unwrap();
    ended(held);
    assert_eq!(b.sh("sha256sum < /tmp/held"), a.sh("sha256sum < /tmp/file"));
    ended(waiting);
    let machines = [&a, &b].map(|guest| world.entry(guest)).concat();
    world.start_broker_with(&format!("{POLICY}{machines}"));
    world.wait_ready(2);
    each_member_reads_from_the_others(&world, &a, &b);
}

fn each_member_reads_from_the_others(world: &World, a: &Guest, b: &Guest) {
    let (waiting, handle) = put(a);
    b.sh(&format!("timeout 60 partywall --domain b group get {handle} > /tmp/got"));
    ended(waiting);
    assert_eq!(b.sh("sha256sum < /tmp/got"), a.sh("sha256sum < /tmp/file"));
    from_guest_to_host(world, b);
    from_host_to_guests(world, [a, b]);
    nothing_is_taken(world);
}

/// `put` in a guest, and the handle that it has printed.
fn put(guest: &Guest) -> (Running<'_>, String) {
    let name = guest.name();
    let mut put = guest.begin(&format!("exec partywall --domain {name} group put pool /tmp/file"));
    put.wait_for("\n", HANG).unwrap();
    let handle = put.so_far().text().trim().to_owned();
    (put, handle)
}

/// A program that has opened a handle, and reads on.
fn holds<'a>(guest: &'a Guest, handle: &str) -> Running<'a> {
    let name = guest.name();
    let mut held =
        guest.begin(&format!("exec partywall -v --domain {name} group get --hold {handle} 2>&1 > /tmp/held"));
    held.wait_for("holding", HANG).unwrap();
    held
}

fn ended(one: Running<'_>) {
    let done = one.wait(HANG).unwrap();
    assert_eq!(done.status, 0, "{} {}", done.text(), String::from_utf8_lossy(&done.stderr));
}

fn from_guest_to_host(world: &World, guest: &Guest) {
    let (waiting, handle) = put(guest);
    let got = world.partywall(&["--domain", "collector", "group", "get", &handle]);
    assert_eq!(got.status, 0, "{}", String::from_utf8_lossy(&got.stderr));
    ended(waiting);
    assert!(got.stdout == guest.get("/tmp/file").unwrap());
}

/// One buffer, read by a guest each.
fn from_host_to_guests<const N: usize>(world: &World, guests: [&Guest; N]) {
    let (readers, file) = (N.to_string(), world.path("file"));
    let mut put = world.command(&["--domain", "collector", "group", "put", "pool", "-n", &readers]);
    let mut put = Process(put.arg(&file).stdout(Stdio::piped()).spawn().unwrap());
    let handles = BufReader::new(put.0.stdout.take().unwrap()).lines().take(N);
    for (guest, handle) in guests.into_iter().zip(handles) {
        let (name, handle) = (guest.name(), handle.unwrap());
        guest.sh(&format!("timeout 60 partywall --domain {name} group get {handle} > /tmp/got"));
        assert!(guest.get("/tmp/got").unwrap() == std::fs::read(&file).unwrap());
    }
    assert!(put.0.wait().unwrap().success());
}

/// Until each member has all of its memory again.
fn nothing_is_taken(world: &World) {
    let deadline = Instant::now() + HANG;
    loop {
        let said = world.partywall(&["group", "list", "--json"]);
        let lines: Vec<serde_json::Value> = serde_json::from_slice(&said.stdout).unwrap_or_default();
        let free = |line: &serde_json::Value| line["free"].as_u64().unwrap() >= 8_388_608;
        if lines.len() == 3 && lines.iter().all(free) {
            return;
        }
        assert!(Instant::now() < deadline, "{lines:?}\n{}", world.log());
        std::thread::sleep(Duration::from_millis(50));
    }
}
