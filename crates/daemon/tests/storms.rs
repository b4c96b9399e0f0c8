//! Many sessions, and clients that do not stop: bounded, and the others are served.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;

use std::os::fd::AsFd;

use common::*;
use partywall_daemon::Broker;
use partywall_protocol::wire::{self, Kind, Message, Refusal, What};
use partywall_region::packet;
use rustix::process::{Resource, getrlimit};

fn resident_kib() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|l| l.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
fn two_thousand_sessions_are_served_within_memory_limit() {
    let _alone = alone();
    let before = open_descriptors();
    let broker = Broker::embedded().unwrap();
    // Each takes two descriptors of this process, and the broker admits a third of the limit.
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(1 << 20) as usize;
    let many = 2000.min((limit - 100) / 3 - 10);
    let memory = resident_kib();
    let mut clients: Vec<_> = (0..many).map(|i| Client::join(broker.path(), &format!("d{}", i % 50))).collect();
    let grown = resident_kib().saturating_sub(memory);
    assert!(grown < many * 16, "{grown} KiB for {many} sessions");
    for client in &mut clients {
        assert!(client.is_served());
    }
    eventually("all are counted", || broker.status().sessions == many);
    assert_eq!(broker.status().domains, 50);
    clients.truncate(many / 2);
    eventually("half are gone", || broker.status().sessions == many / 2);
    assert!(clients.iter_mut().all(Client::is_served));
    drop(clients);
    eventually("all are gone", || broker.status().sessions == 0);
    drop(broker);
    await_descriptors(before);
}

/// Sends until the broker hangs up, without reading anything.
fn flood(client: &Client, bytes: &[u8]) {
    // Far more than both sockets hold.
    for _ in 0..200_000 {
        if client.send_bytes(bytes, &[]).is_err() {
            return;
        }
    }
    panic!("the broker never hung up");
}

#[test]
fn client_that_leaves_answers_unread_is_disconnected() {
    let _alone = alone();
    let broker = Broker::embedded().unwrap();
    let mut other = Client::join(broker.path(), "other");
    let mut longest = LongestAnswer::default();
    for message in [Message::Ping {}, Message::List { what: What::Domains, after: 0 }, Message::Done {}] {
        let mut bytes = Vec::new();
        wire::encode(1, &message, &mut bytes);
        flood(&Client::join(broker.path(), "rude"), &bytes);
        assert!(longest.of(|| other.is_served()));
    }
    let mut bad = Vec::new();
    wire::encode(1, &Message::Ping {}, &mut bad);
    bad.push(7);
    flood(&Client::join(broker.path(), "rude"), &bad);
    assert!(longest.of(|| other.is_served()));
    longest.judge();
    eventually("only the other is left", || broker.status().sessions == 1);
}

#[test]
fn flood_with_read_answers_does_not_starve_other_clients() {
    let _alone = alone();
    let broker = Broker::embedded().unwrap();
    let path = broker.path().to_owned();
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                let mut client = Client::join(&path, "busy");
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    assert!(client.is_served());
                }
            });
        }
        let mut other = Client::join(&path, "other");
        let mut longest = LongestAnswer::default();
        for _ in 0..1000 {
            assert!(longest.of(|| other.is_served()));
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        longest.judge();
    });
}

#[test]
fn sessions_that_come_and_go_leave_nothing() {
    let _alone = alone();
    let broker = Broker::embedded().unwrap();
    let before = open_descriptors();
    for i in 0..2000 {
        let mut client = Client::connect(broker.path());
        match i % 4 {
            0 => {}
            1 => drop(client.send_bytes(b"WP", &[])),
            2 => drop(client.tell(&Message::Join { version: wire::VERSION, name: "x".to_owned() }, &[])),
            _ => {
                let join = Message::Join { version: wire::VERSION, name: "y".to_owned() };
                assert!(matches!(client.ask(&join), Message::Joined { .. }));
                client.tell(&bind("s", 1), &[]);
            }
        }
    }
    eventually("all are gone", || broker.status() == partywall_daemon::core::CoreStatus::default());
    await_descriptors(before);
}

#[test]
fn listener_with_full_backlog_still_gets_answers() {
    let _alone = alone();
    let broker = Broker::embedded().unwrap();
    let long = "n".repeat(64);
    let mut db = Client::join(broker.path(), "db");
    for i in 0..60 {
        // A list of services is then longer than a packet.
        db.bind(&format!("{}{i:02}", "s".repeat(62)), 1);
    }
    assert_eq!(
        db.ask(&Message::Bind { service: "sql".into(), kind: Kind::Stream, backlog: u16::MAX }),
        Message::Done {}
    );
    let mut web = Client::join(broker.path(), &long);
    let mut links = Vec::new();
    let refused = loop {
        let region = region(4096);
        let answer = web.ask_with(&connect("db", "sql", 4096), &[region.as_fd()]);
        match answer.message {
            Message::Connected { .. } => links.push(answer.fds),
            Message::Refused { code, .. } => break code,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!((refused, links.len()), (Refusal::BacklogFull, 128));
    db.tell(&Message::List { what: What::Services, after: 0 }, &[]);
    for _ in 0..128 {
        assert!(matches!(db.receive().unwrap().message, Message::Incoming { .. }));
    }
    assert!(matches!(db.receive().unwrap().message, Message::Services { page } if page.more));
    // The listener closed them by dropping what it received; the connecting side sees that.
    let mut buf = [0; 1];
    assert_eq!(packet::recv(links[0][0].as_fd(), &mut buf).unwrap().len, 0);
}
