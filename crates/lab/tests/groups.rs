//! A group of three guests, and a fourth that is not of it: buffers are written in one, and read in another at the same address after
//! their handle went through the third. One set of guests for all of it.
#![cfg(not(miri))]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

#[allow(dead_code, reason = "other tests use the rest")]
mod world;

use partywall_lab::{Guest, ImageOptions, Running};
use partywall_region::pmem::dax;
use partywall_shm::group::Handle;
use rustix::mm::{MapFlags, ProtFlags};
use rustix::process::Signal;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};
use world::{HANG, Inside, World};

const POLICY: &str = "[[group]]\nname = \"pool\"\nmachines = [\"a\", \"b\", \"c\"]\nroom = 8388608\n";
/// The variable with the task of this program in a guest.
const TASK: &str = "PARTYWALL_GROUP_TASK";

#[test]
fn buffer_is_read_in_c_after_its_handle_went_through_b() {
    let image = ImageOptions::default().program(std::env::current_exe().unwrap(), "inside");
    let mut world = World::with("groups", image);
    world.kill_broker();
    world.start_broker_with(POLICY);
    let [a, b, c, d] = world.boot(["a", "b", "c", "d"]);
    for guest in [&a, &b, &c, &d] {
        let said = world.attach(guest);
        assert_eq!(said.status, 0, "{}", String::from_utf8_lossy(&said.stderr));
    }
    world.wait_ready(4);
    println!("{}", world.partywall(&["group", "list"]).text());
    let pool = Pool { free: free(&world), world: &world };
    // Two of these do not fit: without the release of one there is no room for the next.
    a.sh("dd if=/dev/urandom of=/tmp/file bs=1000 count=7001");
    b.sh("echo small > /tmp/small");

    let first = pool.through_b(&a, &b, &c);
    let second = pool.through_b(&a, &b, &c);
    assert_eq!(first, second, "the same memory again");
    println!("read in place at {first}");
    pool.addresses_are_the_same([&a, &b, &c]);
    pool.killed_holder_frees_its_memory(&a, &b, &c);
    pool.only_owner_changes_group_memory(&a, &c);
    a_stranger_sees_nothing(&c, &d);
    pool.a_machine_dies(&a, c);
}

/// The tasks of this program in a guest.
#[test]
fn in_a_guest() {
    let Ok(task) = std::env::var(TASK) else { return };
    let windows = dax::devices().into_iter().filter(|d| d.header.as_ref().is_some_and(|header| header.peer == "pool"));
    let said = match task.as_str() {
        "count" => windows.count(),
        "scribble" => windows.filter(|window| window.read_only).map(|window| scribble(&window.name)).count(),
        other => panic!("no task {other}"),
    };
    println!("\nSAYS {said}");
}

/// Overwrites a whole window, as a hostile guest does.
#[expect(unsafe_code, reason = "maps memory as a hostile guest would")]
fn scribble(device: &str) {
    let window = dax::open(device, true).unwrap();
    let (len, access) = (window.size() as usize, ProtFlags::READ | ProtFlags::WRITE);
    // SAFETY: a fresh mapping, never unmapped, of memory that nothing else in this process uses.
    let bytes = unsafe {
        let start = rustix::mm::mmap(std::ptr::null_mut(), len, access, MapFlags::SHARED, window.as_fd(), 0).unwrap();
        std::slice::from_raw_parts_mut(start.cast::<u8>(), len)
    };
    bytes.fill(0xee);
}

fn inside(guest: &Guest, task: &str) -> usize {
    let said = guest.sh(&format!("{TASK}={task} inside --exact in_a_guest --nocapture --test-threads 1"));
    said.lines().find_map(|line| line.strip_prefix("SAYS ")).unwrap().parse().unwrap()
}

fn lines(world: &World) -> Vec<serde_json::Value> {
    let said = world.partywall(&["group", "list", "--json"]);
    serde_json::from_slice(&said.stdout).unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(&said.stderr)))
}

fn free(world: &World) -> Vec<u64> {
    lines(world).iter().map(|line| line["free"].as_u64().unwrap()).collect()
}

/// `put` in a guest, and the handle that it has printed.
fn put<'a>(guest: &'a Guest, file: &str) -> (Running<'a>, String) {
    let mut put = guest.begin(&format!("exec partywall -v group put pool {file} 2>/tmp/put.log"));
    put.wait_for("\n", HANG).unwrap();
    let handle = put.so_far().text().trim().to_owned();
    (put, handle)
}

fn ended(put: Running<'_>) {
    let done = put.wait(HANG).unwrap();
    assert_eq!(done.status, 0, "{}", String::from_utf8_lossy(&done.stderr));
}

/// A program that has opened a handle, and reads on.
fn holds<'a>(guest: &'a Guest, handle: &str) -> Running<'a> {
    let mut held = guest.begin(&format!("exec partywall group get --hold {handle} 2>&1 > /tmp/got"));
    held.wait_for("holding", HANG).unwrap();
    held
}

struct Pool<'a> {
    world: &'a World,
    /// The free memory of the members while no process takes part.
    free: Vec<u64>,
}

impl Pool<'_> {
    /// Until `a` and `b` have everything free.
    fn settled(&self) {
        let deadline = Instant::now() + HANG;
        while free(self.world)[..2] != self.free[..2] {
            let list = self.world.partywall(&["group", "list"]).text();
            assert!(Instant::now() < deadline, "{:?} were free: {list}\n{}", self.free, self.world.log());
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// A writes, B passes the handle and nothing else, C reads. Where the bytes were.
    fn through_b(&self, a: &Guest, b: &Guest, c: &Guest) -> String {
        let reader = c.begin(
            "partywall --domain c cat -l handles < /dev/null > /tmp/handle && \
             exec partywall -v group get $(cat /tmp/handle) > /tmp/got 2> /tmp/get.log",
        );
        c.wait_service("handles");
        let between = b.begin("partywall --domain b cat -l via < /dev/null | partywall --domain b cat c:handles");
        a.wait_service("via");
        let (put, handle) = put(a, "/tmp/file");
        a.sh(&format!("echo {handle} | timeout 60 partywall --domain a cat b:via"));
        ended(between);
        ended(reader);
        ended(put);
        assert_eq!(c.sh("sha256sum < /tmp/got"), a.sh("sha256sum < /tmp/file"));
        let at = |guest: &Guest, log: &str| guest.sh(&format!("grep -o '[0-9]* bytes at 0x[0-9a-f]*' {log}"));
        let (there, here) = (at(a, "/tmp/put.log"), at(c, "/tmp/get.log"));
        assert!(there.starts_with("7001000 bytes at 0x2000"), "{there}");
        assert_eq!(there, here);
        self.settled();
        there
    }

    /// The windows, as the kernels of the guests map them, are where the broker says.
    fn addresses_are_the_same(&self, guests: [&Guest; 3]) {
        let addresses: Vec<String> = lines(self.world)
            .iter()
            .map(|line| line["address"].as_str().unwrap().trim_start_matches("0x").to_owned())
            .collect();
        assert_eq!(addresses.len(), 3);
        let [a, b, c] = guests;
        let (large, handle) = put(a, "/tmp/file");
        let (small, unread) = put(b, "/tmp/small");
        let held = holds(c, &handle);
        for guest in guests {
            let maps = guest.sh("cat /proc/$(pidof partywall | cut -d' ' -f1)/maps");
            let dax = |line: &&str| line.contains("/dev/dax");
            for address in &addresses {
                let found = maps.lines().filter(dax).any(|line| line.starts_with(address.as_str()));
                assert!(found, "{}: {address}\n{maps}", guest.name());
            }
            // It writes in its own alone.
            let written = maps.lines().filter(dax).filter(|line| line.contains(" rw-s ")).count();
            assert_eq!(written, 1, "{}: {maps}", guest.name());
        }
        held.end_input().unwrap();
        ended(held);
        ended(large);
        assert_eq!(a.sh(&format!("partywall group get {unread}")).trim(), "small");
        ended(small);
        self.settled();
    }

    fn killed_holder_frees_its_memory(&self, a: &Guest, b: &Guest, c: &Guest) {
        for holder in [b, c] {
            let (put, handle) = put(a, "/tmp/file");
            let held = holds(holder, &handle);
            held.signal(Signal::KILL).unwrap();
            ended(put);
            self.settled();
        }
        // An agent takes all that its machine has open with it.
        let (put, handle) = put(a, "/tmp/file");
        let held = holds(b, &handle);
        b.kill_agent();
        ended(put);
        held.signal(Signal::KILL).unwrap();
        b.start_agent();
        self.world.wait_ready(4);
        self.settled();
    }

    /// A guest that writes all over what it was given to read changes nothing.
    fn only_owner_changes_group_memory(&self, a: &Guest, c: &Guest) {
        let (put, handle) = put(a, "/tmp/file");
        assert_eq!(inside(c, "scribble"), 2, "the windows of the two others");
        c.sh(&format!("partywall group get {handle} > /tmp/got"));
        ended(put);
        assert_eq!(c.sh("sha256sum < /tmp/got"), a.sh("sha256sum < /tmp/file"));
        self.settled();
    }

    /// Its QEMU is killed while it reads; the owner has its memory back, and the others go on.
    fn a_machine_dies(&self, a: &Guest, c: Guest) {
        let (put, handle) = put(a, "/tmp/file");
        let held = holds(&c, &handle);
        c.kill();
        ended(put);
        drop(held);
        self.settled();
        let (put, handle) = self::put(a, "/tmp/file");
        a.sh(&format!("partywall group get {handle} > /tmp/got && cmp /tmp/got /tmp/file"));
        ended(put);
        self.settled();
    }
}

/// A machine outside the group has no window of it, and its requests are refused.
fn a_stranger_sees_nothing(c: &Guest, d: &Guest) {
    let nobodys = Handle { owner: 1, address: 1 << 45, len: 1, serial: 1, place: 0, hop: 0 };
    let said = d.shell(&format!("partywall group get pool:{nobodys} 2>&1")).unwrap_err().to_string();
    assert!(said.contains("no group pool of which d is a member"), "{said}");
    assert!(d.sh("partywall group list").contains("no visible groups"));
    let said = c.shell(&format!("partywall group get pool:{nobodys} 2>&1")).unwrap_err().to_string();
    assert!(said.contains("gone"), "{said}");
    assert_eq!((inside(c, "count"), inside(d, "count")), (3, 0));
}
