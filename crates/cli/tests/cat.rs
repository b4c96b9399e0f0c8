//! `cat` carries bytes whole, both ways, and says how it ended.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::process::Stdio;

use common::random::noise;
use common::{Guard, World, said};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

#[test]
fn files_arrive_whole_both_ways_at_once() {
    let world = World::new();
    let (a, b) = (world.file("from-a", 5 << 20), world.file("from-bb", 3 << 20));
    let (at_a, at_b) = (world.path("at-a"), world.path("at-b"));
    let mut listener = world.partywall("b", &["cat", "-l", "swap"]);
    let listener = Guard::spawn(listener.arg("-i").arg(&b).arg("-o").arg(&at_b));
    let mut connector = world.partywall("a", &["cat", "b:swap", "--wait", "60"]);
    let connector = Guard::spawn(connector.arg("-i").arg(&a).arg("-o").arg(&at_a)).output();
    assert!(connector.status.success(), "{}", said(&connector));
    assert!(listener.output().status.success());
    assert!(std::fs::read(&at_b).unwrap() == std::fs::read(&a).unwrap());
    assert!(std::fs::read(&at_a).unwrap() == std::fs::read(&b).unwrap());
}

#[test]
fn pipes_and_every_ring_size_lose_nothing() {
    let world = World::new();
    let data = noise(7, (1 << 20) + 4321);
    for ring in ["4K", "64K", "4M", "auto"] {
        let listener = Guard::spawn(&mut world.partywall("b", &["cat", "-l", "in", "--recv-only"]));
        let mut sender = world.partywall("a", &["cat", "b:in", "--wait", "60", "--ring", ring]);
        let mut sender = Guard::spawn(sender.stdin(Stdio::piped()));
        let mut stdin = sender.0.stdin.take().unwrap();
        let feed = std::thread::spawn({
            let data = data.clone();
            move || data.chunks(9_999).try_for_each(|piece| stdin.write_all(piece))
        });
        let received = listener.output();
        let fed = feed.join().unwrap();
        let sent = sender.output();
        assert!(
            sent.status.success() && fed.is_ok(),
            "ring {ring}: {fed:?}, {} (the other side: {})",
            said(&sent),
            said(&received)
        );
        assert!(received.status.success(), "ring {ring}: {}", said(&received));
        assert!(received.stdout == data, "ring {ring}");
    }
}

#[test]
fn end_of_input_returns_from_an_echo() {
    let world = World::new();
    // The listener sends back everything that it receives: its output is its input.
    let (reader, writer) = std::io::pipe().unwrap();
    let listener = Guard::spawn(world.partywall("b", &["cat", "-l", "echo"]).stdin(reader).stdout(writer));
    let data = world.file("data", 1 << 20);
    let mut connector = world.partywall("a", &["cat", "b:echo", "--wait", "60"]);
    let output = Guard::spawn(connector.stdin(File::open(&data).unwrap())).output();
    assert!(output.status.success(), "{}", said(&output));
    assert!(output.stdout == std::fs::read(&data).unwrap());
    assert!(listener.output().status.success());
}

#[test]
fn one_way_connections_carry_forward_only() {
    let world = World::new();
    let data = world.file("data", 1 << 20);
    let listener = Guard::spawn(&mut world.partywall("b", &["cat", "-l", "in", "--one-way"]));
    let mut sender = world.partywall("a", &["cat", "b:in", "--one-way", "--wait", "60"]);
    let sender = Guard::spawn(sender.arg("-i").arg(&data));
    let received = listener.output();
    assert!(received.status.success() && received.stdout == std::fs::read(&data).unwrap());
    let sender = sender.output();
    assert!(sender.status.success(), "{}", said(&sender));
    for wrong in [&["cat", "b:in", "--one-way", "--recv-only"][..], &["cat", "-l", "in", "--one-way", "--send-only"]] {
        assert_eq!(world.run("a", wrong).status.code(), Some(2));
    }
}

#[test]
fn keep_listening_serves_visitors_in_turn() {
    let world = World::new();
    let mut listener = world.partywall("b", &["cat", "-l", "-k", "in", "--recv-only"]);
    let mut listener = Guard::spawn(listener.arg("-o").arg(world.path("all")));
    for text in ["one ", "two ", "three"] {
        std::fs::write(world.path("word"), text).unwrap();
        let mut sender = world.partywall("a", &["cat", "b:in", "--wait", "60"]);
        let sender = Guard::spawn(sender.stdin(File::open(world.path("word")).unwrap())).output();
        assert!(sender.status.success(), "{}", said(&sender));
    }
    world.await_that("all words are there", || {
        std::fs::read_to_string(world.path("all")).is_ok_and(|s| s == "one two three")
    });
    assert!(listener.0.try_wait().unwrap().is_none(), "it goes on listening");
}

#[test]
fn cat_without_half_close_ends_with_its_peer() {
    let world = World::new();
    let mut listener = world.partywall("b", &["cat", "-l", "in", "-v"]);
    let mut listener = Guard::spawn(listener.stdin(Stdio::piped()));
    let mut connector = Guard::spawn(&mut world.partywall("a", &["cat", "b:in", "--wait", "60", "--no-shutdown"]));
    let mut stdin = listener.0.stdin.take().unwrap();
    stdin.write_all(b"still here").unwrap();
    let mut heard = [0; 10];
    connector.0.stdout.as_mut().unwrap().read_exact(&mut heard).unwrap();
    assert_eq!(&heard, b"still here");
    // Its input has long ended, and it has not.
    assert!(connector.0.try_wait().unwrap().is_none() && listener.0.try_wait().unwrap().is_none());
    drop(stdin);
    assert_eq!((connector.code(), listener.code()), (Some(0), Some(0)));
}

#[test]
fn killed_sender_has_its_bytes_delivered_then_exit_code_4() {
    let world = World::new();
    let data = world.file("data", 16 << 20);
    let mut receiver = world.partywall("b", &["cat", "-l", "in", "--recv-only"]);
    let receiver = Guard::spawn(&mut receiver);
    let mut sender = world.partywall("a", &["cat", "b:in", "--wait", "60", "--ring", "1M"]);
    let mut sender = Guard::spawn(sender.arg("-i").arg(&data));
    // The receiver's output is not read: the pipe fills, then the ring, and then the sender stands still.
    still(&world);
    // A receiver that was held up may go on just now, and make room for more. A stopped sender commits nothing.
    stop(&sender);
    let committed = committed(&world).unwrap();
    assert!((1 << 20..16 << 20).contains(&committed), "{committed} bytes committed");
    sender.kill();
    let received = receiver.output();
    assert_eq!(received.status.code(), Some(4), "{}", said(&received));
    assert!(said(&received).contains("died"), "{}", said(&received));
    assert_eq!(received.stdout.len() as u64, committed);
    assert!(received.stdout == std::fs::read(&data).unwrap()[..received.stdout.len()]);
}

/// Stops a process, and waits until all of its threads have stopped.
fn stop(process: &Guard) {
    let pid = Pid::from_child(&process.0);
    kill_process(pid, Signal::STOP).unwrap();
    let status = waitpid(Some(pid), WaitOptions::UNTRACED).unwrap().unwrap().1;
    assert!(status.stopped(), "{status:?}");
}

/// Bytes that the connecting side of the only channel has committed. `None` without a channel.
fn committed(world: &World) -> Option<u64> {
    let stat = world.run("watcher", &["stat", "--json"]);
    let stat: serde_json::Value = serde_json::from_slice(&stat.stdout).ok()?;
    stat["channels"][0]["sides"][0]["written"]["bytes"].as_u64()
}

/// Waits until the number of committed bytes stays the same for some looks, as a busy machine may hold up a receiver for longer than it takes
/// to look twice.
fn still(world: &World) {
    let (mut before, mut looks) = (0, 0);
    world.await_that("the ring is full", || {
        std::thread::sleep(std::time::Duration::from_millis(100));
        let now = committed(world).unwrap_or(0);
        looks = if now > 0 && std::mem::replace(&mut before, now) == now { looks + 1 } else { 0 };
        looks == 10
    });
}

#[test]
fn killed_receiver_ends_the_sender_with_exit_code_4() {
    let world = World::new();
    let data = world.file("data", 16 << 20);
    let mut receiver = Guard::spawn(&mut world.partywall("b", &["cat", "-l", "in", "--recv-only"]));
    let mut sender = world.partywall("a", &["cat", "b:in", "--wait", "60", "--ring", "1M"]);
    let sender = Guard::spawn(sender.arg("-i").arg(&data));
    still(&world);
    receiver.kill();
    let output = sender.output();
    assert_eq!(output.status.code(), Some(4), "{}", said(&output));
    assert!(said(&output).contains("sent"), "says how far it came: {}", said(&output));
}

#[test]
fn early_closed_output_is_reported_on_both_sides() {
    let world = World::new();
    let data = world.file("data", 16 << 20);
    let mut sender = world.partywall("b", &["cat", "-l", "out", "--send-only"]);
    let sender = Guard::spawn(sender.arg("-i").arg(&data));
    let mut receiver = Guard::spawn(&mut world.partywall("a", &["cat", "b:out", "--recv-only", "--wait", "60"]));
    let mut first = [0; 1000];
    let mut stdout = receiver.0.stdout.take().unwrap();
    stdout.read_exact(&mut first).unwrap();
    drop(stdout);
    assert!(first == noise(4, 1000)[..]);
    let (receiver, sender) = (receiver.output(), sender.output());
    assert_eq!(receiver.status.code(), Some(1), "{}", said(&receiver));
    assert!(said(&receiver).contains("closed by its reader"), "{}", said(&receiver));
    assert_eq!(sender.status.code(), Some(1), "{}", said(&sender));
    assert!(said(&sender).contains("stopped reading"), "{}", said(&sender));
}

#[test]
fn full_disk_is_reported_with_exact_count() {
    let world = World::new();
    let data = world.file("data", 1 << 20);
    let mut sender = world.partywall("b", &["cat", "-l", "-k", "out", "--send-only"]);
    let sender = Guard::spawn(sender.arg("-i").arg(&data));
    let by_name = world.run("a", &["cat", "b:out", "--recv-only", "--wait", "60", "-o", "/dev/full"]);
    assert_eq!(by_name.status.code(), Some(1));
    assert!(said(&by_name).contains("/dev/full") && said(&by_name).contains("No space left"), "{}", said(&by_name));
    assert!(!said(&by_name).contains("b:out"), "the full disk is not the peer's: {}", said(&by_name));
    drop(sender);
    let mut sender = world.partywall("b", &["cat", "-l", "more", "--send-only"]);
    let _sender = Guard::spawn(sender.arg("-i").arg(&data));
    let mut receiver = world.partywall("a", &["cat", "b:more", "--recv-only", "--wait", "60"]);
    let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
    let output = Guard::spawn(receiver.stdout(full)).output();
    assert_eq!(output.status.code(), Some(1));
    assert!(said(&output).contains("standard output") && said(&output).contains("No space left"), "{}", said(&output));
}

#[test]
fn input_cut_off_by_broken_output_is_not_reported_as_its_end() {
    let world = World::new();
    let data = world.file("data", 16 << 20);
    let mut receiver = world.partywall("b", &["cat", "-l", "in"]);
    let receiver = Guard::spawn(receiver.arg("-i").arg(&data));
    // More input comes as long as its pipe is open.
    let mut broken = world.partywall("a", &["cat", "b:in", "--wait", "60", "-o", "/dev/full"]);
    let mut broken = Guard::spawn(broken.stdin(Stdio::piped()));
    let _stdin = broken.0.stdin.take();
    let broken = broken.output();
    assert_eq!(broken.status.code(), Some(1));
    let receiver = receiver.output();
    assert_eq!(receiver.status.code(), Some(4), "not an orderly end: {}", said(&receiver));
}

#[test]
fn input_cut_off_by_end_of_peer_is_not_reported_as_its_end() {
    let world = World::new();
    let data = world.file("data", 16 << 20);
    // Its input is empty, so it ends its direction at once, and with that a sender that does not half-close.
    let mut receiver = world.partywall("b", &["cat", "-l", "in"]);
    let receiver = Guard::spawn(receiver.stdin(Stdio::null()));
    let mut sender = world.partywall("a", &["cat", "b:in", "--wait", "60", "--no-shutdown"]);
    let sender = Guard::spawn(sender.arg("-i").arg(&data)).output();
    let receiver = receiver.output();
    if sender.status.code() == Some(0) {
        assert_eq!((receiver.status.code(), receiver.stdout.len()), (Some(0), 16 << 20), "all of it went");
    } else {
        assert_eq!(sender.status.code(), Some(1), "{}", said(&sender));
        assert!(said(&sender).contains("more input was waiting"), "{}", said(&sender));
        assert_eq!(receiver.status.code(), Some(4), "not an orderly end: {}", said(&receiver));
    }
}

#[test]
fn empty_input_is_not_reported_as_cut_off() {
    let world = World::new();
    for round in 0..10 {
        let service = format!("in{round}");
        let mut receiver = world.partywall("b", &["cat", "-l", &service]);
        let receiver = Guard::spawn(receiver.stdin(Stdio::null()));
        // It gives its reading half up at once.
        let target = format!("b:{service}");
        let mut sender = world.partywall("a", &["cat", &target, "--wait", "60", "--send-only"]);
        let sender = Guard::spawn(sender.stdin(Stdio::null())).output();
        assert_eq!(sender.status.code(), Some(0), "{}", said(&sender));
        let receiver = receiver.output();
        assert_eq!(receiver.status.code(), Some(0), "{}", said(&receiver));
    }
}

#[test]
fn unreadable_input_is_not_reported_as_its_end() {
    let world = World::new();
    let receiver = Guard::spawn(&mut world.partywall("b", &["cat", "-l", "in", "--recv-only"]));
    let mut sender = world.partywall("a", &["cat", "b:in", "--wait", "60"]);
    let sender = Guard::spawn(sender.stdin(File::open("/").unwrap())).output();
    assert_eq!(sender.status.code(), Some(1));
    assert!(said(&sender).contains("cannot read standard input"), "{}", said(&sender));
    let receiver = receiver.output();
    assert_eq!(receiver.status.code(), Some(4), "not an orderly end: {}", said(&receiver));
}

#[test]
fn idle_timeout_ends_a_quiet_connection() {
    let world = World::new();
    // If the machine stops the sender for longer than the limit, the connection is quiet before the bytes come. Then a longer limit follows.
    let limits = ["200ms", "1s", "5s", "20s"];
    for (round, limit) in limits.into_iter().enumerate() {
        let service = format!("in{round}");
        let mut receiver = world.partywall("b", &["cat", "-l", &service, "--idle-timeout", limit]);
        let mut receiver = Guard::spawn(receiver.stdin(Stdio::piped()));
        // The bytes are in the sender's input before the sender starts. Both inputs stay open.
        let (input, mut feed) = std::io::pipe().unwrap();
        feed.write_all(b"only this").unwrap();
        let target = format!("b:{service}");
        let mut sender = world.partywall("a", &["cat", &target, "--wait", "60"]);
        let mut sender = Guard::spawn(sender.stdin(input));
        let _stdin = receiver.0.stdin.take();
        let output = receiver.output();
        assert_eq!(output.status.code(), Some(6), "{limit}: {}", said(&output));
        if output.stdout.is_empty() && round + 1 < limits.len() {
            continue;
        }
        assert_eq!(output.stdout, b"only this", "{limit}");
        assert_eq!(sender.code(), Some(0), "the peer has ended in good order, and nothing more was to be sent");
        return;
    }
}

#[test]
fn idle_timeout_ends_a_blocked_output() {
    let world = World::new();
    let data = world.file("data", 16 << 20);
    let _sender = Guard::spawn(world.partywall("b", &["cat", "-l", "out", "--send-only"]).arg("-i").arg(&data));
    let receive = ["cat", "b:out", "--recv-only", "--wait", "60", "--idle-timeout", "200ms"];
    let mut receiver = Guard::spawn(&mut world.partywall("a", &receive));
    assert_eq!(receiver.code(), Some(6), "its pipe was full all the time");
}

#[test]
fn report_counts_carried_bytes() {
    let world = World::new();
    let data = world.file("data", 300_000);
    let receiver = Guard::spawn(&mut world.partywall("b", &["cat", "-l", "in", "--report", "--progress", "always"]));
    let mut sender = world.partywall("a", &["cat", "b:in", "--wait", "60", "--report"]);
    let sender = Guard::spawn(sender.arg("-i").arg(&data));
    for (output, way) in [(receiver.output(), "received"), (sender.output(), "sent")] {
        let line = said(&output).lines().find(|line| line.starts_with('{')).map(str::to_owned).expect("a line of JSON");
        let report: serde_json::Value = serde_json::from_str(&line).unwrap();
        assert_eq!(report[way]["bytes"], 300_000);
    }
}
