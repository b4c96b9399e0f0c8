//! Long and rough: transfers across hundreds of switches, sudden deaths of either side and of the broker, and thousands of
//! connections after which nothing is left.
#![expect(clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::{
    path::Path,
    process::{Command, Stdio},
    sync::OnceLock,
    time::Duration,
};

use rustix::process::Signal;
use support::{
    c,
    client::Client,
    eventually, free_port,
    guard::Guard,
    random::Random,
    skipped,
    switch::Switch,
    world::{WITHOUT_NET_ADMIN, World, has_net_admin, launched},
};

fn load() -> &'static Path {
    static LOAD: OnceLock<std::path::PathBuf> = OnceLock::new();
    LOAD.get_or_init(|| c::program("load", &["load.c"], &[]))
}

/// Exit statuses of a client.
const FINE: Option<i32> = Some(0);
const GONE: Option<i32> = Some(10);

fn run(world: &World, words: &[String]) -> Guard {
    let mut command = Command::new(load());
    world.preload(&mut command);
    // How many arenas there are depends on how many threads happen to run at once, and is nothing that connections leave.
    command.env("MALLOC_ARENA_MAX", "1");
    Guard::spawn(command.args(words).stdin(Stdio::null()))
}

fn words(words: &[&dyn std::fmt::Display]) -> Vec<String> {
    words.iter().map(ToString::to_string).collect()
}

fn server(world: &World) -> (Guard, u16) {
    server_that(world, "serve")
}

fn server_that(world: &World, serves: &str) -> (Guard, u16) {
    let port = free_port();
    let mut server = run(world, &words(&[&serves, &port]));
    server.await_listener(port, &String::new);
    (server, port)
}

/// A server and a client with one connection, made while no broker ran, or none that let them join, move to a ring once one does.
fn moves_when_a_broker_comes(serves: &str, prepare: impl Fn(&World), come: impl Fn(&World)) {
    let world = World::new();
    prepare(&world);
    let (_server, port) = server_that(&world, serves);
    let mut client = run(&world, &words(&[&"echo", &port, &1_000_000, &5]));
    // Some calls without a broker.
    std::thread::sleep(Duration::from_millis(300));
    come(&world);
    let switch = Switch::new(&world);
    eventually("the connection is on a ring", || {
        assert_eq!(client.ended(), None, "the client ended before");
        let seen = switch.seen();
        seen.channels == 1 && seen.ring_bytes > 1 << 20
    });
    client.signal(Signal::KILL);
}

#[test]
fn connection_made_before_the_broker_moves_when_it_comes() {
    moves_when_a_broker_comes("serve", World::kill_broker, World::restart_broker);
}

/// Its parent, which has the listener, makes no call after the broker has come.
#[test]
fn connection_of_forked_child_moves_when_broker_starts() {
    moves_when_a_broker_comes("fork", World::kill_broker, World::restart_broker);
}

/// A server that waits, and makes no call when the broker comes.
fn sleeping_server_joins(waits: &str, before: impl Fn(&World), asleep: impl Fn(&World)) {
    let world = World::new();
    before(&world);
    let (server, _) = server_that(&world, waits);
    // It sleeps by now.
    std::thread::sleep(Duration::from_millis(300));
    asleep(&world);
    let mut client = Client::join(&world.socket(), "looks").unwrap();
    eventually("the server has joined", || client.knows(server.id()));
}

#[test]
fn sleeping_server_joins_when_broker_comes() {
    for waits in ["await", "await-in-turns", "poll", "poll-in-turns"] {
        sleeping_server_joins(waits, World::kill_broker, World::restart_broker);
    }
}

#[test]
fn sleeping_server_joins_when_broker_is_replaced() {
    let replace = |world: &World| {
        world.kill_broker();
        world.restart_broker();
    };
    for waits in ["await", "await-in-turns"] {
        sleeping_server_joins(waits, |_| {}, replace);
    }
}

#[test]
fn connection_moves_when_policy_admits_denied_program() {
    let policy = |world: &World| world.path("policy.toml");
    let admitted = std::cell::OnceCell::new();
    let deny = |world: &World| {
        let rules = std::fs::read_to_string(policy(world)).unwrap();
        let denied = "administrators = [4242]\n[[join]]\ndomain = \"nobody\"\nusers = [4242]\n";
        std::fs::write(policy(world), denied).unwrap();
        world.reload_policy();
        admitted.set(rules).unwrap();
    };
    moves_when_a_broker_comes("serve", deny, |world| {
        std::fs::write(policy(world), admitted.get().unwrap()).unwrap();
        world.reload_policy();
    });
}

/// Scales what a test does: `make soak` does a lot more.
fn times(usual: u64) -> u64 {
    let factor = std::env::var("PARTYWALL_ENDURANCE").ok().and_then(|text| text.parse().ok()).unwrap_or(1);
    usual * factor
}

#[test]
fn long_transfers_cross_hundreds_of_switches() {
    let world = World::new();
    let switch = Switch::new(&world);
    let (_server, port) = server(&world);
    let mut clients: Vec<Guard> =
        (0..3).map(|seed| run(&world, &words(&[&"pull", &port, &(times(1500) << 20), &(seed + 7)]))).collect();
    clients.push(run(&world, &words(&[&"echo", &port, &times(100_000), &5])));
    // On a busy machine one may be at its end before another has its ring.
    eventually("all are on rings", || {
        switch.seen().channels >= 4 || clients.iter_mut().any(|client| client.ended().is_some())
    });
    let flips = switch.flip_at_random(11);
    for client in &mut clients {
        assert_eq!(client.wait_for(Duration::from_secs(300 * times(1))).map(|status| status.code()), Some(FINE));
    }
    drop(flips);
    let seen = switch.seen();
    assert!(seen.switches >= 200, "{seen:?}");
    assert!(seen.ring_bytes > 10 << 20, "{seen:?}");
}

#[test]
fn threads_attaching_at_once_do_not_disturb_each_other() {
    let world = World::new();
    let switch = Switch::new(&world);
    let crowd = c::program("crowd", &["crowd.c"], &["-pthread"]);
    let start = |words: &[&dyn std::fmt::Display], log: &str| {
        let mut command = Command::new(&crowd);
        world.preload(&mut command);
        command.env("PARTYWALL_PRELOAD_LOG", world.path(log)).stdin(Stdio::null());
        Guard::spawn(command.args(self::words(words)))
    };
    let port = free_port();
    let mut server = start(&[&"serve", &port], "server.log");
    server.await_listener(port, &String::new);
    // A handshake takes four steps, each on some call of either side: a connection must live for longer than that.
    // On a busy machine all of a client's connections may have ended before their peers came to take a step.
    let log = |name: &str| String::from_utf8_lossy(&std::fs::read(world.path(name)).unwrap()).into_owned();
    for _ in 0..10 {
        let mut client = start(&[&"go", &port, &12, &times(30), &600], "client.log");
        assert_eq!(client.wait().code(), FINE);
        if ["client.log", "server.log"].into_iter().all(|name| log(name).contains("has a ring")) {
            break;
        }
    }
    for name in ["client.log", "server.log"] {
        let log = log(name);
        assert!(log.contains("has a ring"), "{name}: nothing came up: {log}");
        // No thread has repeated a step that another thread had done.
        assert!(!log.contains("contradiction") && !log.contains("broke the protocol"), "{name}: {log}");
    }
    assert!(switch.seen().channels > 0);
}

/// Some clients, of which each ends or is killed; those that live on are all right.
fn deaths(kill: impl Fn(&World, &mut Random, &mut Guard, &mut Vec<Guard>), all_may_go: bool) {
    let world = World::new();
    let switch = Switch::new(&world);
    let mut random = Random(0x1234_5678_9abc_def1);
    for round in 0..times(12) {
        let (mut server, port) = server(&world);
        let mut clients: Vec<Guard> = (0..4)
            .map(|at| {
                let kind: &dyn std::fmt::Display = if at % 2 == 0 { &"pull" } else { &"echo" };
                let amount = if at % 2 == 0 { 100u64 << 20 } else { 10_000 };
                run(&world, &words(&[kind, &port, &amount, &(round * 10 + at)]))
            })
            .collect();
        let flips = (round % 3 == 2).then(|| switch.flip_at_random(round + 1));
        std::thread::sleep(Duration::from_micros(random.below(200_000)));
        kill(&world, &mut random, &mut server, &mut clients);
        for client in &mut clients {
            let end =
                client.wait_for(Duration::from_secs(100)).unwrap_or_else(|| panic!("round {round}: a client hangs"));
            let killed = std::os::unix::process::ExitStatusExt::signal(&end) == Some(9);
            let gone = all_may_go && end.code() == GONE;
            assert!(end.code() == FINE || killed || gone, "round {round}: a client ended with {end}");
        }
        drop(flips);
    }
}

#[test]
fn clients_see_a_killed_server_as_over_tcp() {
    deaths(|_, _, server, _| server.signal(Signal::KILL), true);
}

#[test]
fn server_outlives_killed_clients() {
    deaths(
        |_, random, server, clients| {
            let victim = random.below(4) as usize;
            clients[victim].signal(Signal::KILL);
            assert!(server.ended().is_none(), "the server ended with a client");
        },
        false,
    );
}

#[test]
fn connections_outlive_killed_broker() {
    deaths(
        |world, random, _, _| {
            world.kill_broker();
            std::thread::sleep(Duration::from_micros(random.below(100_000)));
            world.restart_broker();
        },
        false,
    );
}

/// Kills the broker while it has a connection in repair mode, at the first to fourth time that it enters the mode or chooses a queue. `killed` is `all` (the broker and its processes) or
/// `broker`. `launcher` starts the programs. With `restarts`, a new broker starts 100 ms later. The programs must not notice.
fn broker_dies_reading_numbers(killed: &str, launcher: &[&str], restarts: bool) {
    if !has_net_admin() {
        return skipped("the broker reads no sequence numbers without CAP_NET_ADMIN");
    }
    let library = c::library("die-reading", &["die_reading.c"], &[]);
    for reading in 1..=4 {
        let folder = tempfile::tempdir().unwrap();
        let order = folder.path().join("order");
        std::fs::write(&order, format!("{reading} {} {killed}", reading % 3)).unwrap();
        let names = [format!("LD_PRELOAD={}", library.display()), format!("DIE_READING={}", order.display())];
        let [preload, order_is] = names.map(|name| &*name.leak());
        let world = World::with_broker_started_by(vec!["env", preload, order_is].leak());
        let start = |words: &[String]| {
            let mut command = launched(launcher, load());
            world.preload(&mut command);
            Guard::spawn(command.args(words).stdin(Stdio::null()))
        };
        let port = free_port();
        let mut server = start(&words(&[&"serve", &port]));
        server.await_listener(port, &String::new);
        let client = || start(&words(&[&"echo", &port, &3000, &reading]));
        let mut last = client();
        eventually("the broker has died", || {
            let ended = last.ended();
            if !order.exists() {
                return true;
            }
            // On a busy machine a client may end before the handshake is through.
            if let Some(status) = ended {
                assert_eq!(status.code(), FINE, "reading {reading}: the client ended before");
                last = client();
            }
            false
        });
        if restarts {
            // The programs meet the connection as it is without a broker first.
            std::thread::sleep(Duration::from_millis(100));
            world.kill_broker();
            world.restart_broker();
        }
        let end = last.wait_for(Duration::from_secs(100)).map(|status| status.code());
        assert_eq!(end, Some(FINE), "reading {reading}");
    }
}

#[test]
fn next_broker_ends_repair_mode_of_a_killed_one() {
    broker_dies_reading_numbers("all", WITHOUT_NET_ADMIN, true);
}

#[test]
fn program_with_the_capability_ends_repair_mode_itself() {
    broker_dies_reading_numbers("all", &[], false);
}

#[test]
fn reader_of_a_killed_broker_ends_repair_mode() {
    broker_dies_reading_numbers("broker", WITHOUT_NET_ADMIN, false);
}

/// Descriptors, resident kilobytes and mappings of a process.
fn holds(process: u32) -> (usize, u64, usize) {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.split_whitespace().next()?.parse().ok());
    let maps = std::fs::read_to_string(format!("/proc/{process}/maps")).unwrap();
    let descriptors = std::fs::read_dir(format!("/proc/{process}/fd")).unwrap().count();
    (descriptors, resident.unwrap_or(0), maps.lines().count())
}

#[test]
fn thousands_of_connections_leave_nothing() {
    let world = World::new();
    let switch = Switch::new(&world);
    let (server, port) = server(&world);
    // In batches, so that every kind of thing that is kept for reuse is there before the count begins.
    let come = |count: u64, at_once: u64| {
        let mut clients: Vec<Guard> =
            (0..at_once).map(|at| run(&world, &words(&[&"come", &port, &(count / at_once), &(at + 3)]))).collect();
        for client in &mut clients {
            assert_eq!(client.wait_for(Duration::from_secs(600)).map(|status| status.code()), Some(FINE));
        }
    };
    // And more at once, so that what threads leave behind for the next is there for as many as may run together on a busy machine.
    come(1000, 20);
    // Blocks of connections are used in turn, and each keeps the addresses of its rings: connections that certainly have rings pass
    // through all of the first 64 blocks, twice.
    for batch in 0..16u64 {
        let seeds = batch * 8..batch * 8 + 8;
        let mut clients: Vec<Guard> =
            seeds.map(|seed| run(&world, &words(&[&"echo", &port, &600, &(seed + 3)]))).collect();
        for client in &mut clients {
            assert_eq!(client.wait_for(Duration::from_secs(600)).map(|status| status.code()), Some(FINE));
        }
    }
    let settled = |before: Option<(usize, u64, usize)>| {
        // Threads of the last connections end in their own time.
        let mut last = holds(server.id());
        eventually("the server has come to rest", || {
            std::thread::sleep(Duration::from_millis(10));
            let now = holds(server.id());
            std::mem::replace(&mut last, now) == now && before.is_none_or(|before| now.0 <= before.0 + 2)
        });
        last
    };
    let broker_descriptors = || world.broker_descriptors();
    let (before, broker_before) = (settled(None), broker_descriptors());
    let count = times(5000);
    come(count, 2);
    let after = settled(Some(before));
    let seen = switch.seen();
    assert!(seen.channels > 0, "none of them was on a ring: {seen:?}");
    assert!(after.0 <= before.0 + 2, "descriptors: {} before, {} after {count} connections", before.0, after.0);
    assert!(after.2 <= before.2 + 8, "mappings: {} before, {} after {count} connections", before.2, after.2);
    assert!(
        after.1 <= before.1 + 4096,
        "resident memory: {} kB before, {} kB after {count} connections",
        before.1,
        after.1
    );
    eventually("the broker has as few descriptors as before", || broker_descriptors() <= broker_before + 4);
}
