//! A peer that lies with descriptors and doorbells: floods, full links, borrowed ends, memory that is not what it is said to be.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;
#[path = "../../shm/tests/program_time/mod.rs"]
mod program_time;

use common::raw::{RING, RawPeer, YesBroker, offer, offer_told, say};
use common::*;
use partywall::{Error, Kind, MessageListener, Publisher, SlowReader, Stream};
use partywall_protocol::wire::{Message, RegionReference, Within};
use partywall_region::{Link, OwnRegion, RegionOptions, link, packet};
use partywall_shm::layout::{Geometry, PAGE, RegionKind};
use program_time::ProgramTime;
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{MemfdFlags, SealFlags};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Relaxed, Release};
use std::thread;
use std::time::Duration;

const SHORT: Duration = Duration::from_millis(50);

/// Does `calls` while another thread does `flood` without end.
fn during(flood: impl Fn() + Send + Sync, calls: impl FnOnce()) {
    let stop = AtomicBool::new(false);
    thread::scope(|s| {
        // More than one, to be ahead of who takes what they send.
        for _ in 0..3 {
            s.spawn(|| {
                while !stop.load(Relaxed) {
                    flood();
                }
            });
        }
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(calls));
        stop.store(true, Relaxed);
        result.unwrap_or_else(|e| std::panic::resume_unwind(e));
    });
}

#[test]
fn doorbell_flood_does_not_keep_calls_from_returning() {
    let _guard = hang_guard();
    let broker = YesBroker::start();
    let (mut stream, peer, ..) = broker.accepted(&fixed(4096));
    stream.write_all(&[0; 4096]).unwrap();
    let links = [peer.outward(), peer.inward()];
    during(
        || links.iter().for_each(|link| link.ring()),
        || {
            stream.set_nonblocking(true);
            for _ in 0..2000 {
                assert_fails!(stream.read(&mut [0; 10]), Error::WouldBlock);
                assert_fails!(stream.write(&[0; 10]), Error::WouldBlock);
                assert_fails!(stream.writer().unwrap().reserve(10), Error::WouldBlock);
            }
            stream.set_nonblocking(false);
            stream.set_read_timeout(Some(SHORT));
            stream.set_write_timeout(Some(SHORT));
            for _ in 0..3 {
                assert_fails!(stream.read(&mut [0; 10]), Error::TimedOut);
                assert_fails!(stream.write(&[0; 10]), Error::TimedOut);
            }
            // And it can still be used.
            peer.set_head(1000);
            stream.write_all(&[0; 1000]).unwrap();
            peer.page().tx.cursor.tail.store(5, Release);
            stream.set_read_timeout(None);
            stream.read_exact(&mut [0; 5]).unwrap();
        },
    );
}

/// The above shows that calls return; this, that it is not by luck.
#[test]
fn nonblocking_call_takes_limited_number_of_doorbells() {
    let broker = YesBroker::start();
    let (mut stream, peer, ..) = broker.accepted(&fixed(4096));
    stream.set_nonblocking(true);
    stream.write_all(&[0; 4096]).unwrap();
    for link in [peer.outward(), peer.inward()] {
        while packet::try_send(link.as_fd(), &[0x42], &[]).is_ok() {}
    }
    assert_fails!(stream.read(&mut [0; 10]), Error::WouldBlock);
    assert!(readable(stream.reader().unwrap(), Duration::ZERO), "it went on until there were none left");
    assert_fails!(stream.write(&[0; 10]), Error::WouldBlock);
    assert!(readable(stream.writer().unwrap(), Duration::ZERO), "it went on until there were none left");
}

#[test]
fn search_for_missing_ring_ends_with_error() {
    let _guard = hang_guard();
    let broker = YesBroker::start();
    for rings in [false, true] {
        let (mut stream, peer, ..) = broker.accepted(&fixed(4096));
        let (region, memory) =
            OwnRegion::create(&RegionOptions { kind: RegionKind::Extension, ..RegionOptions::endpoint(4096) }).unwrap();
        let generation = std::sync::atomic::AtomicU32::new(1);
        // The switch is announced far ahead; before it come rings (of the other sort) or doorbells.
        peer.page().tx.control.generation.store(u32::MAX / 2, Release);
        let flood = || {
            if !rings {
                peer.outward().ring();
            } else if peer.send_ring(generation.load(Relaxed), region.geometry(), &memory) {
                generation.fetch_add(1, Relaxed);
            }
        };
        during(flood, || {
            stream.set_nonblocking(true);
            assert_fails!(stream.read(&mut [0; 10]), Error::Corrupt(_));
        });
    }
}

/// A TCP socket that takes five minutes to close, and what keeps it so.
fn lingering() -> (TcpStream, (TcpListener, TcpStream)) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (server, _) = listener.accept().unwrap();
    client.set_nonblocking(true).unwrap();
    while (&client).write(&[0; 65536]).is_ok() {}
    client.set_nonblocking(false).unwrap();
    rustix::net::sockopt::set_socket_linger(&client, Some(Duration::from_secs(300))).unwrap();
    (client, (listener, server))
}

/// Sends the other side a lingering socket on each link. Returns whether the kernel takes it. If not, no process has to close it
/// afterwards.
fn send_lingering(peer: &RawPeer) -> (bool, (TcpListener, TcpStream)) {
    let (socket, peers) = lingering();
    let sent = peer.links.iter().all(|link| packet::try_send(link.as_fd(), &[0x42], &[socket.as_fd()]).is_ok());
    // The last copy, if the kernel has refused it.
    thread::spawn(move || drop(socket));
    (sent, peers)
}

/// A process that closes such a descriptor waits for the peer. With links on which it arrived, a publisher with a time-out of 100 ms took five seconds, and a
/// server kept its other clients waiting as long.
#[test]
fn descriptor_whose_close_blocks_delays_no_call() {
    let _guard = hang_guard();
    // The longest that a call takes beyond its own time limit.
    let mut longest = Duration::ZERO;
    let timer = || ProgramTime::start(|| vec![program_time::this_thread()]);
    // `limited`: how many of the calls have a time limit.
    let mut record =
        |time: &ProgramTime<_>, limited: u32| longest = longest.max(time.elapsed().saturating_sub(SHORT * limited));
    // Links as the broker makes them, and as before Linux 6.16, where a socket cannot refuse descriptors.
    for is_guarded in [true, false] {
        let pair = || if is_guarded { link::pair() } else { packet::pair() }.unwrap();
        let own = |ring| OwnRegion::create(&RegionOptions::endpoint(ring)).unwrap();
        let broker = YesBroker::start();
        let (mut listener, session) = broker.listener(&fixed(4096));
        let (region, memory) = own(RING);
        let mut peer = RawPeer::offer_by(&session, Kind::Stream, region, memory, [pair(), pair()]);
        let (mut stream, _) = listener.accept().unwrap();
        peer.take_memory(&broker);
        stream.write_all(&[0; 4096]).unwrap();
        let (is_taken, _peers) = send_lingering(&peer);
        stream.set_read_timeout(Some(SHORT));
        stream.set_write_timeout(Some(SHORT));
        for _ in 0..2 {
            let time = timer();
            if is_taken {
                assert_fails!(stream.read(&mut [0; 10]), Error::Corrupt(_));
                assert_fails!(stream.write(&[0; 10]), Error::Corrupt(_));
            } else {
                assert_fails!(stream.read(&mut [0; 10]), Error::TimedOut);
                assert_fails!(stream.write(&[0; 10]), Error::TimedOut);
            }
            record(&time, 2);
        }
        let time = timer();
        drop(stream);
        record(&time, 1);

        let domain = broker.join("news");
        let mut publisher = Publisher::bind(&domain, "feed", SlowReader::Hold, &fixed(4096)).unwrap();
        let session = broker.next_bound();
        let (region, memory) = own(0);
        let (near, far) = pair();
        let incoming = offer(&session, Kind::Broadcast, region.geometry(), &[memory.as_fd(), far.as_fd()]);
        let link = Link::bells(near).unwrap();
        eventually("the subscriber is admitted", || publisher.admit().is_ok() && publisher.subscribers() == 1);
        let hostile = RawPeer {
            region,
            memory,
            links: vec![link],
            theirs: None,
            connecting: true,
            channel: incoming,
            session: None,
        };
        let (_, _peers) = send_lingering(&hostile);
        publisher.set_timeout(Some(SHORT));
        // Its ring is full after four. Then the publisher waits for the subscriber, or finds that it has broken the protocol.
        for _ in 0..6 {
            let time = timer();
            match publisher.send(&[0; 992]) {
                Ok(()) | Err(Error::TimedOut) => {}
                Err(other) => panic!("{other}"),
            }
            record(&time, 1);
        }
        let time = timer();
        drop(publisher);
        record(&time, 1);
    }
    let _ = writeln!(std::io::stderr(), "longest call beyond its time limit {:.1} ms", longest.as_secs_f64() * 1e3);
    assert!(longest < Duration::from_secs(2), "load does not explain {longest:?}");
}

#[test]
fn full_link_does_not_block_writer() {
    let _guard = hang_guard();
    let broker = YesBroker::start();
    let (mut stream, peer, ..) = broker.accepted(&fixed(4096));
    // The peer always says that it sleeps, and takes no doorbell.
    for round in 0..2000u64 {
        peer.page().rx.control.data_wanted.store(round, Relaxed);
        stream.write_all(b"x").unwrap();
    }
    assert_eq!(stream.writer().unwrap().counters().bells_rung, 2000);
    assert_eq!(peer.their_page().tx.cursor.tail.load(Relaxed), 2000);
}

/// A memfd that is no region: of this size, with these seals.
fn forged(size: u64, seals: SealFlags) -> OwnedFd {
    let fd = rustix::fs::memfd_create("forged", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&fd, size).unwrap();
    rustix::fs::fallocate(&fd, rustix::fs::FallocateFlags::empty(), 0, size.max(1)).unwrap();
    rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
    fd
}

fn lies_of_memory() -> Vec<(&'static str, OwnedFd)> {
    let seals = partywall_region::memfd::SEALS;
    let whole = PAGE + RING;
    let (reader, _) = std::io::pipe().unwrap();
    let extension = RegionOptions { kind: RegionKind::Extension, ..RegionOptions::endpoint(RING) };
    vec![
        ("unsealed", forged(whole, SealFlags::empty())),
        ("can shrink", forged(whole, seals.difference(SealFlags::SHRINK))),
        ("can be written", forged(whole, seals.difference(SealFlags::FUTURE_WRITE))),
        ("truncated", forged(whole - 4096, seals)),
        ("not ready", forged(whole, seals)),
        ("of another size", OwnRegion::create(&RegionOptions::endpoint(RING * 2)).unwrap().1),
        ("a ring extension", OwnRegion::create(&extension).unwrap().1),
        ("a pipe", reader.into()),
    ]
}

#[test]
fn connection_with_wrong_memory_is_dropped_and_next_accepted() {
    let _guard = hang_guard();
    let broker = YesBroker::start();
    let (mut listener, session) = broker.listener(&fixed(4096));
    let geometry = Geometry::new(PAGE, RING).unwrap();
    let (a, b) = link::pair().unwrap();
    for (_, memory) in lies_of_memory() {
        offer(&session, Kind::Stream, geometry, &[memory.as_fd(), a.as_fd(), b.as_fd()]);
    }
    let (_, memory) = OwnRegion::create(&RegionOptions::endpoint(RING)).unwrap();
    let (reader, writer) = std::io::pipe().unwrap();
    offer(&session, Kind::Stream, geometry, &[memory.as_fd(), reader.as_fd(), writer.as_fd()]);
    offer(&session, Kind::Message, geometry, &[memory.as_fd(), a.as_fd(), b.as_fd()]);
    let own = |ring_offset, ring_size| RegionReference { ring_offset, ..RegionReference::with_ring(ring_size) };
    let shapes = [(0, RING), (PAGE, 5000), (PAGE, 1 << 30), (PAGE, 1 << 40), (u64::MAX, u64::MAX)];
    let shapes = shapes.map(|(offset, size)| own(offset, size));
    // Memory that is no window does not become one by being called so, and separate memory begins at byte 0.
    let window = RegionReference { within: Within::Window, base: PAGE, ..own(PAGE, RING) };
    let places = [window, RegionReference { base: PAGE, ..own(PAGE, RING) }, RegionReference { base: 0, ..window }];
    for told in shapes.into_iter().chain(places) {
        offer_told(&session, Kind::Stream, told, &[memory.as_fd(), a.as_fd(), b.as_fd()]);
    }
    let _honest = RawPeer::offer(&session);
    let (mut stream, _) = listener.accept().unwrap();
    stream.write_all(b"fine").unwrap();
    drop((a, b));
}

#[test]
fn link_rung_before_first_use_works() {
    let _guard = hang_guard();
    let broker = YesBroker::start();
    let (mut listener, session) = broker.listener(&fixed(4096));
    let mut peer = RawPeer::offer(&session);
    while packet::try_send(peer.outward().as_fd(), &[0x42], &[]).is_ok() {}
    let (mut stream, _) = listener.accept().unwrap();
    peer.take_memory(&broker);
    stream.set_read_timeout(Some(SHORT));
    assert_fails!(stream.read(&mut [0; 4]), Error::TimedOut);
    peer.put(0, b"four");
    assert_eq!(stream.read(&mut [0; 4]).unwrap(), 4);
}

#[test]
fn wrong_memory_sent_by_the_accepting_side_is_corrupt() {
    let _guard = hang_guard();
    let broker = YesBroker::start();
    let geometry = Geometry::new(PAGE, RING).unwrap();
    for (what, memory) in lies_of_memory() {
        eprintln!("{what}");
        let (mut stream, peer) = broker.connected(&fixed(4096));
        stream.write_all(b"before it accepts").unwrap();
        peer.attach_memory(geometry, &memory);
        assert_fails!(stream.read(&mut [0; 4]), Error::Corrupt(_));
        assert_fails!(stream.read(&mut [0; 4]), Error::Corrupt(_));
        stream.set_write_timeout(Some(Duration::from_secs(10)));
        let _ = stream.write(&[0; 9000]);
        assert_fails!(stream.write(&[0; 9000]), Error::Corrupt(_));
    }
    // More than this side is willing to map.
    let (mut stream, peer) = broker.connected(&fixed(4096));
    peer.attach_memory(Geometry::new(PAGE, 1 << 27).unwrap(), &peer.memory);
    assert_fails!(stream.read(&mut [0; 4]), Error::Corrupt(_));
}

/// Before the other side has attached, each write rings: a link that is full of that must not keep a ring from growing.
#[test]
fn ring_grows_though_link_is_full_of_doorbells() {
    let _guard = hang_guard();
    let broker = YesBroker::start();
    let (mut stream, mut peer) = broker.connected(&adaptive(4096, 65536));
    for at in 0..4000 {
        stream.write_all(&Pattern.bytes(at, 1)).unwrap();
    }
    peer.attach();
    let writer = stream.writer().unwrap();
    writer.trim().unwrap();
    assert_eq!(writer.reserve(50_000).map(|span| span.len()).unwrap(), 50_000);
    assert!(matches!(broker.grown.recv_timeout(HANG).unwrap().1.0, Message::Grow { generation: 1, .. }));
    assert_eq!(peer.their_page().tx.control.generation.load(Relaxed), 1);
    peer.put(0, b"");
}

/// A peer that accepts, and is gone before this side has looked: what it said before is still heard.
#[test]
fn bytes_sent_before_hang_up_are_received() {
    let _guard = hang_guard();
    let broker = YesBroker::start();
    for orderly in [true, false] {
        let (mut stream, mut peer) = broker.connected(&fixed(4096));
        stream.write_all(b"question").unwrap();
        peer.attach();
        peer.put(0, b"answer");
        if orderly {
            peer.page().tx.control.state.store(1, Release);
            peer.page().rx.control.state.store(1, Release);
        }
        drop(peer);
        eventually("the hang-up is known", || stream.reader().unwrap().is_hung_up());
        let mut refused = None;
        eventually("the writer learns it", || {
            refused = stream.write(b"x").err();
            refused.is_some()
        });
        let refused = refused.unwrap();
        match orderly {
            true => assert!(matches!(cause(&refused), Error::Closed(_)), "{refused:?}"),
            false => assert!(matches!(cause(&refused), Error::Dead { attached: true }), "{refused:?}"),
        }
        let mut answer = [0; 6];
        stream.read_exact(&mut answer).unwrap();
        assert_eq!(&answer, b"answer");
        match orderly {
            true => assert_eq!(stream.read(&mut answer).unwrap(), 0),
            false => assert_fails!(stream.read(&mut answer), Error::Dead { attached: true }),
        }
    }
    // Without having accepted, it is a refusal by going away.
    let (mut stream, peer) = broker.connected(&fixed(4096));
    drop(peer);
    assert_fails!(stream.read(&mut [0; 4]), Error::Dead { attached: false });
    eventually("the writer learns it", || stream.write(b"x").is_err());
    assert_fails!(stream.write(b"x"), Error::Dead { attached: false });
}

#[test]
fn malformed_records_are_corrupt_before_allocation() {
    let _guard = hang_guard();
    let broker = YesBroker::start();
    let domain = broker.join("web");
    let mut listener = MessageListener::bind(&domain, "raw", &fixed(4096)).unwrap();
    let session = broker.next_bound();
    let header = |len: u32, reserved: u32| [len.to_le_bytes(), reserved.to_le_bytes()].concat();
    let lies =
        [header(100, 0), header(u32::MAX, 0), header(RING as u32, 0), header(0, 1), header(1, 0), b"only".to_vec()];
    for lie in lies {
        let (region, memory) = OwnRegion::create(&RegionOptions::endpoint(RING)).unwrap();
        let mut peer = RawPeer::offer_with(&session, Kind::Message, region, memory);
        let (mut socket, _) = listener.accept().unwrap();
        peer.put(0, &[header(3, 0), b"ok!.....".to_vec()].concat());
        let mut message = Vec::new();
        socket.recv(&mut message).unwrap();
        assert_eq!(message, b"ok!");
        peer.put(16, &lie);
        socket.set_timeout(Some(SHORT));
        let refused = socket.recv(&mut message);
        if lie.len() < 8 {
            // Less than a header: nothing of a record yet, which no honest peer commits. It may wait, or refuse.
            assert!(matches!(refused, Err(Error::Corrupt(_) | Error::TimedOut)), "{refused:?}");
        } else {
            assert_fails!(refused, Error::Corrupt(_));
            assert_fails!(socket.recv(&mut message), Error::Corrupt(_));
        }
        socket.send(b"still").unwrap();
    }
}

/// Every word of the control page and every kind of packet, at random, for a while: whatever comes of it, every call returns.
#[test]
fn random_control_pages_cause_no_crash_or_hang() {
    let _guard = hang_guard();
    let broker = YesBroker::start();
    for seed in 0..60 {
        let (mut stream, mut peer, _listener, _session): (Stream, _, _, _) = broker.accepted(&adaptive(4096, 65536));
        stream.set_read_timeout(Some(Duration::from_millis(1)));
        stream.set_write_timeout(Some(Duration::from_millis(1)));
        let mut dice = Dice::new(seed);
        for _ in 0..60 {
            peer.scramble(&mut dice);
            let _ = stream.read(&mut vec![0; dice.size(14)]);
            let _ = stream.write(&vec![1; dice.size(14)]);
            let _ = stream.reader().unwrap().peek_at_least(dice.size(14)).map(|p| {
                let half = p.len() / 2;
                p.release(half);
            });
            let n = dice.size(16);
            let _ = stream.writer().unwrap().reserve(n).map(|r| r.commit(n / 2));
            let _ = stream.writer().unwrap().trim();
        }
    }
}

/// A broker that is stopped, or busy, for as long as it likes.
#[test]
fn writes_go_on_while_broker_leaves_growth_unanswered() {
    let _guard = hang_guard();
    let broker = YesBroker::start();
    broker.silent.store(true, Relaxed);
    // Often enough that a wait of each until the request is given up would be found by the guard.
    for _ in 0..12 {
        let (mut stream, peer, ..) = broker.accepted(&adaptive(4096, 65536));
        let mut written = 0;
        let mut write = |stream: &mut Stream| {
            stream.write_all(&[1; 2048]).unwrap();
            written += 2048;
            peer.set_head(written);
        };
        let (request, (message, _, session)) = loop {
            write(&mut stream);
            if let Ok(asked) = broker.grown.try_recv() {
                break asked;
            }
        };
        assert!(matches!(message, Message::Grow { generation: 1, .. }), "{message:?}");
        (0..200).for_each(|_| write(&mut stream));
        assert_eq!(stream.writer().unwrap().ring_size(), 4096, "nobody has said that the peer has the other ring");
        assert!(broker.grown.try_recv().is_err(), "asked once");
        common::raw::say(session.as_fd(), request, &Message::Done {}, &[]);
        eventually("the answer is found", || {
            write(&mut stream);
            stream.writer().unwrap().ring_size() > 4096
        });
        assert_eq!(peer.their_page().tx.control.generation.load(Relaxed), 1);
    }
}

/// As where this process had no descriptors left: the kernel then leaves out those that come with a packet.
#[test]
fn connection_without_descriptors_is_closed_and_next_accepted() {
    let _guard = hang_guard();
    let broker = YesBroker::start();
    let (mut listener, session) = broker.listener(&fixed(4096));
    for _ in 0..20 {
        let channel = offer(&session, Kind::Stream, Geometry::new(PAGE, RING).unwrap(), &[]);
        assert_fails!(listener.accept(), Error::System { .. });
        assert_eq!(broker.closed.recv_timeout(HANG).unwrap(), channel, "its place in the backlog is free");
    }
    let _honest = RawPeer::offer(&session);
    listener.accept().unwrap();
}

/// A ring to which nothing was written may be replaced. Once something was, the reader must have come to it first (protocol A4).
#[test]
fn ring_used_while_its_change_is_pending_is_kept_until_read() {
    let _guard = hang_guard();
    let broker = YesBroker::start();
    let (mut stream, peer, ..) = broker.accepted(&adaptive(4096, 65536));
    stream.writer().unwrap().reserve(50_000).unwrap();
    broker.grown.recv_timeout(HANG).unwrap();
    let generation = || peer.their_page().tx.control.generation.load(Relaxed);
    assert_eq!(generation(), 1);
    broker.silent.store(true, Relaxed);
    stream.set_nonblocking(true);
    stream.writer().unwrap().trim().unwrap();
    let (request, (_, _, session)) = broker.grown.recv_timeout(HANG).unwrap();
    stream.write_all(&[1; 100]).unwrap();
    say(session.as_fd(), request, &Message::Done {}, &[]);
    for _ in 0..100 {
        stream.writer().unwrap().trim().unwrap();
        thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(generation(), 1, "the reader has not come to the ring that was replaced");
    peer.set_head(50);
    eventually("the change is made", || {
        stream.writer().unwrap().trim().unwrap();
        generation() == 2
    });
    stream.write_all(&[2; 100]).unwrap();
}
