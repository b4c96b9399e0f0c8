//! Raw packets against an embedded broker: what is right is done, what is wrong is refused, and nothing is left behind.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;

use std::os::fd::{AsFd, OwnedFd};

use common::*;
use partywall_daemon::Broker;
use partywall_protocol::wire::{self, Message, Refusal, RegionReference, What};
use partywall_region::packet;
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};

fn encoded(message: &Message) -> Vec<u8> {
    let mut bytes = Vec::new();
    wire::encode(42, message, &mut bytes);
    bytes
}

#[test]
fn channel_is_made_shown_and_forgotten() {
    let _alone = alone();
    let before = open_descriptors();
    let broker = Broker::embedded().unwrap();
    let mut web = Client::join(broker.path(), "web");
    let mut db = Client::join(broker.path(), "db");
    db.bind("sql", 4);
    let (channel, links) = web.open("db", "sql");

    let incoming = db.receive().unwrap();
    let Message::Incoming { channel: offered, name, pid, region: reference, .. } = incoming.message else { panic!() };
    assert_eq!((offered, name.as_str(), pid, reference.ring_size), (channel, "web", std::process::id(), 8192));
    // The links are the very ones: what is sent at one end comes out at the other.
    packet::send(links[1].as_fd(), b"B", &[]).unwrap();
    let mut buf = [0; 8];
    assert_eq!(packet::recv(incoming.fds[2].as_fd(), &mut buf).unwrap().len, 1);

    let mine = region(16384);
    let accepted = Message::Accepted { channel, start: 0, region: RegionReference::with_ring(16384) };
    assert_eq!(db.ask_with(&accepted, &[mine.as_fd()]).message, Message::Done {});
    let attached = web.receive().unwrap();
    assert_eq!(attached.message, Message::Attached { channel, start: 0, region: RegionReference::with_ring(16384) });
    assert!(db.is_served());
    let shown = web.ask_with(&Message::Inspect { channel }, &[]);
    let sizes: Vec<_> = shown.fds.iter().map(|fd| rustix::fs::fstat(fd).unwrap().st_size).collect();
    assert_eq!(sizes, [4096 + 8192, 4096 + 16384]);

    // The broker's status is renewed after each round of its loop.
    eventually("the channel is counted", || broker.status().channels == 1);
    web.tell(&Message::Closed { channel }, &[]);
    db.tell(&Message::Closed { channel }, &[]);
    assert!(web.is_served() && db.is_served());
    eventually("the channel is forgotten", || broker.status().channels == 0);
    drop((web, db, links, incoming.fds, mine, shown.fds, attached.fds));
    let dir = broker.path().parent().unwrap().to_owned();
    drop(broker);
    await_descriptors(before);
    assert!(!dir.exists());
}

#[test]
fn every_malformed_packet_is_refused_and_leaks_nothing() {
    let _alone = alone();
    let broker = Broker::embedded().unwrap();
    let mut client = Client::join(broker.path(), "a");
    client.bind("s", 4);
    let region = region(8192);
    let before = open_descriptors();

    // Cut anywhere: the session ends only if the cut is in the header.
    let whole = encoded(&connect("a", "s", 8192));
    for end in 1..whole.len() {
        let client = Client::join(broker.path(), "a");
        client.send_bytes(&whole[..end], &[region.as_fd()]).unwrap();
        assert_eq!(client.refused(), Refusal::Protocol, "cut at {end}");
        if end < wire::HEADER {
            client.is_hung_up_on();
        }
    }
    // Well framed, and wrong.
    let mut trailing = whole.clone();
    trailing.push(0);
    let mut unknown = encoded(&Message::Ping {});
    unknown[2] = 99;
    let mut kind = encoded(&bind("s", 1));
    kind[wire::HEADER + 3] = 77;
    let mut text = encoded(&bind("s", 1));
    text[wire::HEADER + 2] = 0xff;
    for bad in [
        &trailing,
        &unknown,
        &kind,
        &text,
        &encoded(&Message::Done {}),
        &encoded(&Message::Join { version: wire::VERSION, name: "b".to_owned() }),
    ] {
        client.send_bytes(bad, &[region.as_fd()]).unwrap();
        let answer = client.receive().unwrap();
        assert!(matches!(answer.message, Message::Refused { code: Refusal::Protocol, .. }), "{:?}", answer.message);
        assert_eq!(answer.request, 42);
    }
    // A wrong number of descriptors.
    let fds = [region.as_fd(); 4];
    for some in [&fds[..0], &fds[..2], &fds[..3], &fds[..4]] {
        client.send_bytes(&whole, some).unwrap();
        assert_eq!(client.refused(), Refusal::Protocol, "{} descriptors", some.len());
    }
    assert!(client.is_served());
    // Not framed at all: refused, and the end.
    let mut magic = whole.clone();
    magic[0] = b'X';
    let oversized = [whole.clone(), vec![0; 5000]].concat();
    for (bad, with) in [(&b""[..], &fds[..0]), (b"", &fds[..1]), (&magic, &fds[..1]), (&oversized, &fds[..1])] {
        let client = Client::join(broker.path(), "a");
        client.send_bytes(bad, with).unwrap();
        assert_eq!(client.refused(), Refusal::Protocol);
        client.is_hung_up_on();
    }
    eventually("no session but one is left", || broker.status().sessions == 1);
    await_descriptors(before);
}

#[test]
fn session_without_initial_join_is_refused_and_ended() {
    let _alone = alone();
    let broker = Broker::embedded().unwrap();
    let region = region(8192);
    let before = open_descriptors();
    for message in [
        connect("a", "s", 8192),
        bind("s", 1),
        Message::Ping {},
        Message::List { what: What::Domains, after: 0 },
        Message::Join { version: 9, name: "a".into() },
    ] {
        let mut client = Client::connect(broker.path());
        let fds = [region.as_fd()];
        client.tell(&message, &fds[..message.fd_count()]);
        let code = client.refused();
        assert!(matches!(code, Refusal::Protocol | Refusal::Version));
        client.is_hung_up_on();
    }
    eventually("no session is left", || broker.status().sessions == 0);
    await_descriptors(before);
}

/// A memfd of this size, allocated and sealed as asked.
fn memfd(size: u64, allocate: u64, seals: SealFlags) -> OwnedFd {
    let fd = rustix::fs::memfd_create("lie", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&fd, size).unwrap();
    if allocate > 0 {
        rustix::fs::fallocate(&fd, FallocateFlags::empty(), 0, allocate).unwrap();
    }
    rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
    fd
}

#[test]
fn lying_descriptors_are_refused_and_closed() {
    let _alone = alone();
    let broker = Broker::embedded().unwrap();
    let mut client = Client::join(broker.path(), "a");
    client.bind("s", 4);
    let good = region(8192);
    let all = SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE | SealFlags::SEAL;
    let size = 4096 + 8192;
    let file = tempfile::tempfile().unwrap();
    file.set_len(size).unwrap();
    let regions: Vec<OwnedFd> = vec![
        memfd(size, size, SealFlags::empty()),
        memfd(size, size, all - SealFlags::SEAL),
        memfd(size, size, all - SealFlags::SHRINK),
        memfd(size, size, all - SealFlags::FUTURE_WRITE),
        memfd(size, 4096, all),
        memfd(size - 4096, size - 4096, all),
        memfd(size + 4096, size + 4096, all),
        file.into(),
        packet::pair().unwrap().0,
        rustix::pipe::pipe().unwrap().0,
    ];
    let before = open_descriptors();
    for region in &regions {
        let answer = client.ask_with(&connect("a", "s", 8192), &[region.as_fd()]);
        assert!(matches!(answer.message, Message::Refused { code: Refusal::BadRegion, .. }), "{:?}", answer.message);
    }
    await_descriptors(before);
    assert_eq!(broker.status().channels, 0);
    client.tell(&connect("a", "s", 8192), &[good.as_fd()]);
    assert!(matches!(client.receive().unwrap().message, Message::Incoming { .. }));
    assert!(matches!(client.receive().unwrap().message, Message::Connected { .. }));
}

#[test]
fn abrupt_end_removes_domain_services_and_waiting_offers() {
    let _alone = alone();
    let broker = Broker::embedded().unwrap();
    let mut web = Client::join(broker.path(), "web");
    let before = open_descriptors();
    let mut db = Client::join(broker.path(), "db");
    db.bind("sql", 4);
    let (_, links) = web.open("db", "sql");
    // As kill -9 does: the kernel closes the socket, with the offer unread in it.
    drop(db);
    let mut buf = [0; 8];
    for link in &links {
        // A hang-up on the link tells the connecting side.
        assert_eq!(packet::recv(link.as_fd(), &mut buf).unwrap().len, 0);
    }
    eventually("the domain is gone", || broker.status().domains == 1);
    assert_eq!(broker.status().services, 0);
    let region = region(8192);
    let answer = web.ask_with(&connect("db", "sql", 8192), &[region.as_fd()]);
    assert!(matches!(answer.message, Message::Refused { code: Refusal::NoSuchDomain, .. }));
    drop((links, region));
    drop(web);
    eventually("all is gone", || broker.status() == partywall_daemon::core::CoreStatus::default());
    // Less web's own end, and the broker's end of it.
    await_descriptors(before - 2);
}
