//! A publisher whose broker is the test.

use super::*;
use crate::{Publisher, SlowReader};
use partywall_protocol::wire::{self, User};
use partywall_region::packet;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::collections::BTreeSet;
use std::thread;

/// How long a result may take before the test fails.
const HANG: Timespec = Timespec { tv_sec: 60, tv_nsec: 0 };

/// A publisher whose broker reads nothing from its sessions.
struct Published {
    publisher: Publisher,
    /// The broker's ends of the sessions of the domain and of the service.
    sessions: [OwnedFd; 2],
    /// Where the broker listens.
    listener: OwnedFd,
    _dir: tempfile::TempDir,
}

fn published() -> Published {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("broker.sock");
    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    let listener = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None).unwrap();
    rustix::net::bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    rustix::net::listen(&listener, 2).unwrap();
    let broker = thread::spawn(move || {
        let [of_domain, of_service] = [(); 2].map(|()| {
            let session = rustix::net::accept_with(&listener, SocketFlags::CLOEXEC).unwrap();
            answer_next(&session);
            session
        });
        answer_next(&of_service);
        ([of_domain, of_service], listener)
    });
    let domain = Domain::builder().name("web").broker(&path).join().unwrap();
    let publisher = Publisher::bind(&domain, "ticks", SlowReader::Hold, &Options::default()).unwrap();
    let (sessions, listener) = broker.join().unwrap();
    Published { publisher, sessions, listener, _dir: dir }
}

/// Grants the next request of a session.
fn answer_next(session: &OwnedFd) {
    let mut buffer = [0; wire::MAX_PACKET];
    let received = packet::recv(session.as_fd(), &mut buffer).unwrap();
    let (request, message) = wire::decode(&buffer[..received.len]).unwrap();
    let answer = match message {
        Message::Join { name, .. } => {
            let user = User::Host(0);
            Message::Joined { domain: 1, epoch: 1, instance: 1, max_ring: 1 << 30, max_channels: 10, user, name }
        }
        _ => Message::Done {},
    };
    send(session, request, &answer);
}

fn send(session: &OwnedFd, request: u32, message: &Message) {
    let mut out = Vec::new();
    wire::encode(request, message, &mut out);
    packet::send(session.as_fd(), &out, &[]).unwrap();
}

/// Offers a subscriber without memory and links, as far as the session has room. Whether it had.
fn offer_faulty_subscriber(session: &OwnedFd, channel: u64) -> bool {
    let incoming = Message::Incoming {
        channel,
        domain: 9,
        epoch: 1,
        name: "liar".to_owned(),
        user: User::Host(0),
        pid: 1,
        at_home: true,
        kind: Kind::Broadcast,
        directions: Directions::REVERSE,
        region: RegionReference::with_ring(0),
    };
    let mut out = Vec::new();
    wire::encode(0, &incoming, &mut out);
    packet::try_send(session.as_fd(), &out, &[]).is_ok()
}

#[test]
fn faulty_subscribers_do_not_make_publisher_wait_for_broker() {
    // More than the sockets of both sessions take.
    const SUBSCRIBERS: u64 = 3000;
    let Published { mut publisher, sessions, .. } = published();
    for channel in 0..SUBSCRIBERS {
        while !offer_faulty_subscriber(&sessions[1], channel) {
            publisher.admit().unwrap();
        }
    }
    publisher.admit().unwrap();
    // The broker reads again.
    let mut buffer = [0; wire::MAX_PACKET];
    let mut closed = BTreeSet::new();
    while closed.len() < SUBSCRIBERS as usize {
        let mut ready = sessions.each_ref().map(|session| PollFd::new(session, PollFlags::IN));
        assert_ne!(poll(&mut ready, Some(&HANG)), Ok(0), "only {} places in the backlog are free again", closed.len());
        for session in &sessions {
            while let Ok(received) = packet::try_recv(session.as_fd(), &mut buffer) {
                match wire::decode(&buffer[..received.len]).unwrap() {
                    (0, Message::Closed { channel }) => assert!(closed.insert(channel), "{channel} is closed twice"),
                    other => panic!("{other:?}"),
                }
            }
        }
    }
    assert!(closed.into_iter().eq(0..SUBSCRIBERS));
}

#[test]
fn send_succeeds_while_broker_refuses_publisher() {
    let Published { mut publisher, sessions, listener, _dir } = published();
    let refusing = listener.try_clone().unwrap();
    let broker = thread::spawn(move || {
        while let Ok(session) = rustix::net::accept_with(&refusing, SocketFlags::CLOEXEC) {
            send(&session, 0, &Message::Refused { code: Refusal::Denied, reason: "the policy has changed".to_owned() });
        }
    });
    drop(sessions);
    // Each of them tries to admit a subscriber, if the one before was long enough ago.
    for _ in 0..20 {
        publisher.send(b"tick").unwrap();
        thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(publisher.counters().messages, 20);
    let refused = publisher.admit();
    assert!(matches!(refused, Err(Error::Refused { code: Refusal::Denied, .. })), "{refused:?}");
    drop(publisher);
    rustix::net::shutdown(&listener, rustix::net::Shutdown::Both).unwrap();
    broker.join().unwrap();
}
