//! With a broker: being introduced, being refused, coming and going, and its restart.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;

use common::process::{Daemon, alone, assert_nothing_left, footprint};
use common::*;
use partywall::{Domain, Error, Options, Origin, Refusal, Stream};
use partywall_protocol::wire::{self, Directions, Kind, Message, RegionReference};
use partywall_region::{OwnRegion, RegionOptions, packet};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::io::{Read, Write};
use std::net::Shutdown;
use std::path::Path;
use std::thread;
use std::time::Duration;

/// One message each way.
fn assert_works(a: &mut Stream, b: &mut Stream) {
    let say = |from: &mut Stream, to: &mut Stream| {
        let mut buf = [0; 5];
        from.write_all(b"hello").unwrap();
        to.read_exact(&mut buf).unwrap();
        assert_eq!(&buf, b"hello");
    };
    say(a, b);
    say(b, a);
}

#[test]
fn connection_gives_each_side_its_peers_identity() {
    let _guard = hang_guard();
    let world = World::new();
    let mut listener = world.web.bind("echo").unwrap();
    let mut there = world.shop.connect("web:echo").unwrap();
    // It can be written to before it is accepted; the answer waits.
    there.write_all(b"early").unwrap();
    let (mut here, peer) = listener.accept().unwrap();
    assert_eq!((peer.name.as_str(), peer.service.as_str()), ("shop", "echo"));
    assert_eq!((peer.domain_id, peer.epoch), (world.shop.id(), world.shop.epoch()));
    assert_eq!(
        (peer.pid, peer.uid(), peer.origin()),
        (Some(std::process::id()), Some(rustix::process::getuid().as_raw()), Some(Origin::Host))
    );
    assert_eq!(there.peer().unwrap().name, "web");
    assert_eq!(there.channel_id(), here.channel_id());
    here.read_exact(&mut [0; 5]).unwrap();
    assert_works(&mut there, &mut here);
    assert_works(&mut here, &mut there);

    let channels = world.shop.channels().unwrap();
    assert_eq!(channels.len(), 1);
    assert_eq!((channels[0].from_name.as_str(), channels[0].to_name.as_str()), ("shop", "web"));
    let names: Vec<_> = world.web.domains().unwrap().into_iter().map(|row| row.name).collect();
    assert_eq!(names, ["web", "shop"]);
    assert_eq!(world.shop.services().unwrap()[0].name, "echo");
    let pages = world.web.inspect(channels[0].channel).unwrap();
    assert_eq!(pages.len(), 2);
    assert!(pages[0].is_connecting() && !pages[1].is_connecting());
    assert_eq!((pages[0].written().bytes, pages[1].read().bytes), (15, 15));
    assert_eq!(pages[1].cursors(), (10, 15));
    drop((there, here));
    world.assert_no_channel_is_left();
}

#[test]
fn refused_requests_return_code_and_reason() {
    let _guard = hang_guard();
    let world = World::new();
    let _echo = world.web.bind("echo").unwrap();
    let refused = |target: &str, expected: Refusal| match world.shop.connect(target) {
        Err(Error::Refused { code, reason }) => {
            assert_eq!(code, expected, "{target}");
            assert!(!reason.is_empty());
        }
        other => panic!("{target}: {other:?}"),
    };
    refused("nobody:echo", Refusal::NoSuchDomain);
    refused("web:nothing", Refusal::NoSuchService);
    refused("we b:echo", Refusal::NameInvalid);
    for nonsense in ["", "web", ":echo", "web:"] {
        assert_fails!(world.shop.connect(nonsense), Error::Invalid(_));
    }
    assert_fails!(world.web.bind("echo"), Error::Refused { code: Refusal::ServiceTaken, .. });
    assert_fails!(world.web.bind("-"), Error::Refused { code: Refusal::NameInvalid, .. });
    let join = |name: &str| Domain::builder().name(name).broker(world.broker.path()).join();
    assert_fails!(join("no spaces"), Error::Refused { code: Refusal::NameInvalid, .. });
    let nowhere = Domain::builder().name("x").broker("/nonexistent/broker.sock").join();
    let said = nowhere.unwrap_err().to_string();
    assert!(said.contains("/nonexistent/broker.sock") && said.contains("partywalld"), "{said}");
    world.assert_no_channel_is_left();
}

/// A session of a program that reads nothing which the broker sends. More lies unread than the broker lets lie when it sends something unasked.
fn session_without_reader(broker: &Path) -> OwnedFd {
    /// Each answer takes some hundred bytes of the socket's buffer.
    const UNREAD: u32 = 150;
    let flags = SocketFlags::CLOEXEC;
    let session = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    rustix::net::connect(&session, &SocketAddrUnix::new(broker).unwrap()).unwrap();
    send(&session, 1, &Message::Join { version: wire::VERSION, name: "deaf".to_owned() }, &[]);
    (0..UNREAD).for_each(|number| send(&session, 2 + number, &Message::Ping {}, &[]));
    session
}

fn send(session: &OwnedFd, request: u32, message: &Message, fds: &[BorrowedFd<'_>]) {
    let mut bytes = Vec::new();
    wire::encode(request, message, &mut bytes);
    packet::send(session.as_fd(), &bytes, fds).unwrap();
}

#[test]
fn visitor_that_does_not_read_its_session_is_skipped() {
    let _guard = hang_guard();
    let world = World::new();
    let mut listener = world.web.bind("echo").unwrap();
    let deaf = session_without_reader(world.broker.path());
    let (region, memory) = OwnRegion::create(&RegionOptions::endpoint(4096)).unwrap();
    let (target, service, kind) = ("web".to_owned(), "echo".to_owned(), Kind::Stream);
    let shape = RegionReference::own_memory(region.geometry());
    let connect = Message::Connect { target, service, kind, directions: Directions::BOTH, region: shape };
    send(&deaf, 1000, &connect, &[memory.as_fd()]);
    eventually("it waits for the listener", || world.broker.status().channels == 1);
    let mut there = world.shop.connect("web:echo").unwrap();
    let (mut here, peer) = listener.accept().unwrap();
    assert_eq!(peer.name, "shop");
    assert_works(&mut there, &mut here);
    drop((there, here, deaf));
    world.assert_no_channel_is_left();
}

#[test]
fn full_backlog_refuses_and_dropped_listener_ends_waiting() {
    let _guard = hang_guard();
    let world = World::new();
    let listener = world.web.bind_with("echo", &Options::default().backlog(2)).unwrap();
    let mut waiting: Vec<Stream> = (0..2).map(|_| world.shop.connect("web:echo").unwrap()).collect();
    assert_fails!(world.shop.connect("web:echo"), Error::Refused { code: Refusal::BacklogFull, .. });
    drop(listener);
    for stream in &mut waiting {
        assert_fails!(stream.read(&mut [0]), Error::Dead { attached: false });
        eventually("the writer learns it", || stream.write(b"x").is_err());
    }
    drop(waiting);
    world.assert_no_channel_is_left();
    // The name is free again.
    let mut listener = world.web.bind("echo").unwrap();
    let mut there = world.shop.connect("web:echo").unwrap();
    assert_works(&mut there, &mut listener.accept().unwrap().0);
}

#[test]
fn one_way_channel_reserves_ring_for_one_direction_only() {
    let _guard = hang_guard();
    let world = World::new();
    let mut listener = world.web.bind("inbox").unwrap();
    let there = world.shop.connect_with("web:inbox", &Options::default().one_way(true)).unwrap();
    let _here = listener.accept().unwrap();
    let channel = there.channel_id().unwrap();
    let sizes = || {
        let pages = world.shop.inspect(channel).unwrap();
        pages.iter().map(|page| page.ring_size()).collect::<Vec<_>>()
    };
    eventually("both sides are shown", || sizes().len() == 2);
    assert_eq!(sizes(), [16 << 10, 0]);
}

#[test]
fn inspection_shows_ring_in_use_as_it_changes() {
    let _guard = hang_guard();
    let world = World::new();
    let options = adaptive(4096, 1 << 20);
    let mut listener = world.web.bind_with("echo", &options).unwrap();
    let mut there = world.shop.connect_with("web:echo", &options).unwrap();
    let mut here = listener.accept().unwrap().0;
    let channel = there.channel_id().unwrap();
    let sizes = || world.shop.inspect(channel).unwrap().iter().map(|page| page.ring_size()).collect::<Vec<_>>();
    eventually("both sides are shown", || sizes().len() == 2);
    assert_eq!(sizes(), [4096, 4096]);
    // The accepting side grows as well as the connecting one, and either is seen by itself.
    here.writer().unwrap().reserve(60_000).unwrap().commit(10);
    assert_eq!(sizes(), [4096, 65536]);
    there.writer().unwrap().reserve(1 << 20).unwrap().commit(10);
    assert_eq!(sizes(), [1 << 20, 65536]);
    there.read_exact(&mut [0; 10]).unwrap();
    eventually("the ring is small again", || {
        here.writer().unwrap().trim().unwrap();
        sizes() == [1 << 20, 4096]
    });
}

#[test]
fn listener_can_be_polled() {
    let _guard = hang_guard();
    let world = World::new();
    let mut listener = world.web.bind("echo").unwrap();
    listener.set_nonblocking(true);
    assert_fails!(listener.accept(), Error::WouldBlock);
    assert!(!readable(&listener, Duration::ZERO));
    let mut there = world.shop.connect("web:echo").unwrap();
    assert!(readable(&listener, HANG));
    assert_works(&mut there, &mut listener.accept().unwrap().0);
    assert_fails!(listener.accept(), Error::WouldBlock);
}

#[test]
fn domain_that_joins_again_gets_new_epoch() {
    let _guard = hang_guard();
    let world = World::new();
    let join = || Domain::builder().name("again").broker(world.broker.path()).join().unwrap();
    let first = join();
    let same = join();
    assert_eq!((first.id(), first.epoch()), (same.id(), same.epoch()), "one domain as long as it lasts");
    let epoch = first.epoch();
    drop((first, same));
    eventually("it is gone", || !world.web.domains().unwrap().iter().any(|row| row.name == "again"));
    assert!(join().epoch() > epoch);
}

#[test]
fn channel_outlives_listener_and_domain_handles() {
    let _guard = hang_guard();
    let world = World::new();
    let (mut there, mut here) = world.connection(&fixed(4096));
    let World { web, shop, broker } = world;
    drop((web, shop));
    assert_works(&mut there, &mut here);
    drop(broker);
    assert_works(&mut there, &mut here);
    drop(here);
    assert_eq!(there.read(&mut [0]).unwrap(), 0);
}

#[test]
fn answer_of_peer_that_leaves_at_once_is_received() {
    let _guard = hang_guard();
    let world = World::new();
    let mut listener = world.web.bind("echo").unwrap();
    for _ in 0..200 {
        let mut there = world.shop.connect("web:echo").unwrap();
        for _ in 0..20 {
            there.write_all(b"question").unwrap();
        }
        let (mut here, _) = listener.accept().unwrap();
        here.write_all(b"answer").unwrap();
        drop(here);
        let mut answer = String::new();
        there.read_to_string(&mut answer).unwrap();
        assert_eq!(answer, "answer");
        eventually("the writer learns it", || there.write(b"more").is_err());
        assert_fails!(there.write(b"more"), Error::Closed(_));
    }
}

#[test]
fn thousand_channels_work_and_leave_nothing() {
    alone("thousand_channels_work_and_leave_nothing", || {
        let _guard = hang_guard();
        let world = World::new();
        drop(world.connection(&fixed(4096)));
        world.assert_no_channel_is_left();
        let before = footprint();
        let mut listener = world.web.bind_with("echo", &fixed(4096)).unwrap();
        // Both sides and the broker have descriptors of each in this process: as many as a small limit allows, if there is one.
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX);
        let many = usize::try_from(limit / 16).unwrap_or(usize::MAX).min(1000);
        let mut all = Vec::new();
        for _ in 0..many {
            let there = world.shop.connect_with("web:echo", &fixed(4096)).unwrap();
            all.push((there, listener.accept().unwrap().0));
        }
        assert_eq!(world.web.channels().unwrap().len(), many, "more than one page of the list");
        for (there, here) in &mut all {
            assert_works(there, here);
        }
        drop((all, listener));
        world.assert_no_channel_is_left();
        assert_nothing_left(before);
    });
}

#[test]
fn coming_and_going_leaves_nothing() {
    alone("coming_and_going_leaves_nothing", || {
        let _guard = hang_guard();
        let outside = footprint();
        {
            let world = World::new();
            let mut listener = world.web.bind_with("echo", &fixed(4096)).unwrap();
            let mut round = |i: u32| {
                let mut there = world.shop.connect_with("web:echo", &fixed(4096)).unwrap();
                if i.is_multiple_of(3) {
                    // It goes before it is accepted.
                    drop(there);
                    drop(listener.accept().unwrap());
                    return;
                }
                let (mut here, _) = listener.accept().unwrap();
                assert_works(&mut there, &mut here);
                there.shutdown(Shutdown::Write).unwrap();
                if i.is_multiple_of(2) { drop(there) } else { drop(here) }
            };
            round(1);
            world.assert_no_channel_is_left();
            let before = footprint();
            (0..500).for_each(&mut round);
            world.assert_no_channel_is_left();
            assert_nothing_left(before);
            for i in 0..50 {
                let domain = Domain::builder().name(format!("d{i}")).broker(world.broker.path()).join().unwrap();
                drop(domain.bind("some").unwrap());
            }
            assert_nothing_left(before);
        }
        // The keeper's own descriptor stays.
        let after = footprint();
        assert!(after.0 <= outside.0 + 1 && after.1 == outside.1, "{after:?}, {outside:?} before there was anything");
    });
}

#[test]
fn killed_and_restarted_broker_interrupts_no_channel() {
    let _guard = hang_guard();
    let mut daemon = Daemon::start();
    let join = |name: &str| Domain::builder().name(name).broker(daemon.path()).join().unwrap();
    let (web, shop) = (join("web"), join("shop"));
    let mut listener = web.bind("echo").unwrap();
    let mut there = shop.connect("web:echo").unwrap();
    let mut here = listener.accept().unwrap().0;
    let id = there.channel_id().unwrap();
    let epoch = shop.epoch();

    let flowing = std::sync::atomic::AtomicBool::new(true);
    thread::scope(|s| {
        let (writer, reader) = (there.writer().unwrap(), here.reader().unwrap());
        let flowing = &flowing;
        s.spawn(move || {
            let mut dice = Dice::new(1);
            let mut at = 0;
            while flowing.load(std::sync::atomic::Ordering::Relaxed) {
                let n = dice.size(14);
                writer.write_all(&Pattern.bytes(at, n)).unwrap();
                at += n as u64;
            }
            writer.finish();
        });
        let reading = s.spawn(move || Pattern.receive(reader, || 10_000));
        for round in 0..3 {
            daemon.kill();
            assert_fails!(shop.channels(), Error::System { .. });
            assert_fails!(shop.connect("web:echo"), Error::System { .. } | Error::BrokerAbsent { .. });
            daemon.restart();
            eventually("both sides have told the new broker of their channel", || {
                shop.channels().is_ok_and(|rows| {
                    rows.iter().any(|row| {
                        row.channel == id && (row.from_name.as_str(), row.to_name.as_str()) == ("shop", "web")
                    })
                })
            });
            assert_eq!(shop.channels().unwrap().len(), 1, "round {round}");
            // The listener, asleep or not, is bound again: connections go on.
            let (mut there, mut here) = thread::scope(|s| {
                let accepting = s.spawn(|| listener.accept().unwrap().0);
                let mut there = None;
                eventually("the service is back", || {
                    there = shop.connect("web:echo").ok();
                    there.is_some()
                });
                (there.unwrap(), accepting.join().unwrap())
            });
            assert!(there.channel_id().unwrap() > id, "numbers never come again");
            assert_works(&mut there, &mut here);
            drop((there, here));
            eventually("and goes when it is closed", || shop.channels().is_ok_and(|rows| rows.len() == 1));
        }
        flowing.store(false, std::sync::atomic::Ordering::Relaxed);
        assert!(reading.join().unwrap() > 0);
    });
    assert!(shop.epoch() > epoch, "a domain of a new broker is a new incarnation");
    drop((there, here));
    eventually("the new broker forgets it", || shop.channels().unwrap().is_empty());
}

#[test]
fn first_joined_domain_is_current() {
    alone("first_joined_domain_is_current", || {
        let world = World::new();
        let current = Domain::current().unwrap();
        assert_eq!(current.name(), "web");
        let mut listener = partywall::Listener::bind("echo").unwrap();
        let mut there = Stream::connect("web:echo").unwrap();
        assert_works(&mut there, &mut listener.accept().unwrap().0);
        assert_eq!(current.broker_path(), world.broker.path());
    });
}
