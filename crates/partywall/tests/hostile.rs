//! A peer that lies about its cursors, states and rings: the channel ends as corrupt, and nothing else happens.
//!
//! The peer is driven by hand, word by word (see `common::raw`), in the same process, so that what the stream sees is known.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;

use common::raw::{RING, RawPeer, YesBroker};
use common::*;
use partywall::{Error, Stream};
use partywall_region::{LinkEvent, OwnRegion, RegionOptions};
use partywall_shm::layout::RegionKind;
use rustix::fd::{AsFd, OwnedFd};
use std::io::{Read, Write};
use std::sync::atomic::Ordering::{Relaxed, Release};
use std::time::Duration;

/// Runs `lie` against a stream, on the accepting and on the connecting side in turn, each with an honest channel beside it.
fn against_both_sides(lie: impl Fn(&mut Stream, &mut RawPeer)) {
    let _guard = hang_guard();
    let broker = YesBroker::start();
    for accepting in [true, false] {
        let options = fixed(4096);
        let (mut stream, mut peer, beside) = if accepting {
            let (stream, peer, listener, session) = broker.accepted(&options);
            (stream, peer, Some((listener, session)))
        } else {
            let (stream, peer) = broker.connected(&options);
            peer.attach();
            (stream, peer, None)
        };
        let (mut honest, mut other) = pair(&options);
        honest.write_all(b"before").unwrap();
        lie(&mut stream, &mut peer);
        // A channel beside it, and the listener it came from, are not affected.
        honest.write_all(b"after").unwrap();
        other.read_exact(&mut [0; 11]).unwrap();
        if let Some((mut listener, session)) = beside {
            let _next = RawPeer::offer(&session);
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(b"fine").unwrap();
        }
    }
}

/// The reading half has ended as corrupt, stays so, and has told the peer.
fn assert_reader_ended(stream: &mut Stream, peer: &RawPeer) {
    for _ in 0..2 {
        assert_fails!(stream.read(&mut [0; 16]), Error::Corrupt(_));
        assert_fails!(stream.reader().unwrap().peek(), Error::Corrupt(_));
    }
    assert_eq!(peer.their_page().rx.control.state.load(Relaxed), 2, "broken");
    assert!(peer.outward().is_hung_up());
}

/// Asserts that the writing half has ended.
fn assert_writer_ended(stream: &mut Stream, peer: &RawPeer) {
    for _ in 0..2 {
        assert_fails!(stream.write(&[0; 16]), Error::Corrupt(_));
        assert_fails!(stream.writer().unwrap().reserve(1), Error::Corrupt(_));
    }
    assert_eq!(peer.their_page().tx.control.state.load(Relaxed), 2, "broken");
    assert!(peer.inward().is_hung_up());
}

#[test]
fn honest_by_hand_is_taken_for_honest() {
    against_both_sides(|stream, peer| {
        let mut buf = vec![0; 3000];
        for round in 0..50 {
            peer.put(round * 3000, &Pattern.bytes(round * 3000, 3000));
            stream.read_exact(&mut buf).unwrap();
            Pattern.check(round * 3000, &buf);
            stream.write_all(&buf).unwrap();
            peer.set_head((round + 1) * 3000);
        }
        // The peer's ring is what its region says, ours what ours does.
        assert_eq!((stream.reader().unwrap().ring_size(), stream.writer().unwrap().ring_size()), (RING, 4096));
    });
}

#[test]
fn tail_beyond_ring_is_corrupt() {
    for lie in [RING + 1, RING * 2, 1 << 63, u64::MAX] {
        against_both_sides(|stream, peer| {
            peer.set_tail(lie);
            assert_reader_ended(stream, peer);
        });
    }
}

#[test]
fn decreased_tail_is_corrupt_and_drops_unread_bytes() {
    against_both_sides(|stream, peer| {
        peer.put(0, &[7; 100]);
        assert_eq!(stream.read(&mut [0; 40]).unwrap(), 40);
        peer.set_tail(99);
        stream.set_read_timeout(Some(Duration::from_secs(5)));
        assert_fails!(stream.reader().unwrap().peek_at_least(61), Error::Corrupt(_));
        assert_reader_ended(stream, peer);
        // The other direction is another matter.
        stream.write_all(b"still").unwrap();
    });
}

#[test]
fn impossible_head_is_corrupt() {
    for (first, lie) in [(0, 4097), (0, u64::MAX), (100, 99), (4000, 0)] {
        against_both_sides(|stream, peer| {
            stream.write_all(&[1; 4096]).unwrap();
            peer.set_head(first);
            let room = vec![2; first as usize];
            stream.write_all(&room).unwrap();
            peer.set_head(if lie > 4096 { lie + first } else { lie });
            assert_fails!(stream.write(&[3; 100]), Error::Corrupt(_));
            assert_writer_ended(stream, peer);
            peer.put(0, b"still");
            stream.read_exact(&mut [0; 5]).unwrap();
        });
    }
}

#[test]
fn states_without_a_meaning_are_corrupt() {
    for (tx, rx) in [(3, 4), (77, 77), (u32::MAX, u32::MAX)] {
        against_both_sides(|stream, peer| {
            peer.put(0, b"x");
            peer.page().tx.control.state.store(tx, Release);
            assert_eq!(stream.read(&mut [0; 9]).unwrap(), 1, "what was committed is read first");
            assert_reader_ended(stream, peer);
            peer.page().rx.control.state.store(rx, Release);
            assert_writer_ended(stream, peer);
        });
    }
}

#[test]
fn being_accused_is_not_being_corrupt() {
    against_both_sides(|stream, peer| {
        peer.put(0, b"x");
        peer.page().tx.control.state.store(2, Release);
        peer.page().rx.control.state.store(2, Release);
        assert_eq!(stream.read(&mut [0; 9]).unwrap(), 1);
        assert_fails!(stream.read(&mut [0; 9]), Error::Accused);
        assert_fails!(stream.write(b"x"), Error::Accused);
        assert_fails!(stream.write(b"x"), Error::Accused);
    });
}

fn ring(size: u64, kind: RegionKind) -> (OwnRegion, OwnedFd) {
    OwnRegion::create(&RegionOptions { kind, ..RegionOptions::endpoint(size) }).unwrap()
}

/// Announces a switch as the owner of a ring does.
fn announce(peer: &RawPeer, at: u64, generation: u32) {
    peer.page().tx.control.switch_at.store(at, Relaxed);
    peer.page().tx.control.generation.store(generation, Release);
}

fn send(peer: &RawPeer, generation: u32, size: u64) -> OwnRegion {
    let (ring, memory) = ring(size, RegionKind::Extension);
    assert!(peer.send_ring(generation, ring.geometry(), &memory));
    peer.outward().ring();
    ring
}

#[test]
fn honest_ring_change_is_followed() {
    against_both_sides(|stream, peer| {
        peer.put(0, b"old");
        let mut next = send(peer, 1, 65536);
        announce(peer, 3, 1);
        next.span(3, 3).copy_from(0, b"new");
        peer.set_tail(6);
        let mut buf = [0; 6];
        stream.read_exact(&mut buf).unwrap();
        assert_eq!(&buf, b"oldnew");
        assert_eq!(stream.reader().unwrap().ring_size(), 65536);
    });
}

/// As after a broker that ended before it could answer: the writer does not know that its ring has been passed on, and sends another.
#[test]
fn ring_sent_again_replaces_the_one_that_waits() {
    against_both_sides(|stream, peer| {
        peer.put(0, b"old");
        send(peer, 1, 16384);
        let mut next = send(peer, 1, 65536);
        announce(peer, 3, 1);
        next.span(3, 3).copy_from(0, b"new");
        peer.set_tail(6);
        let mut buf = [0; 6];
        stream.read_exact(&mut buf).unwrap();
        assert_eq!(&buf, b"oldnew");
        assert_eq!(stream.reader().unwrap().ring_size(), 65536);
    });
}

/// An honest order of events that needs an unlucky moment: the reader takes the next ring before its use is announced, and
/// the one after that when both have been.
#[test]
fn ring_that_arrives_before_earlier_one_is_used_is_taken_next() {
    for unread in [false, true] {
        against_both_sides(|stream, peer| {
            let at = if unread { 3 } else { 0 };
            peer.put(0, &b"old"[..at as usize]);
            std::thread::scope(|s| {
                let slept = || peer.their_page().rx.counters.sleeps.load(Relaxed);
                let reader = s.spawn(|| {
                    let first = stream.reader().unwrap().peek_at_least(at as usize + 1).map(|p| p.len());
                    let mut buf = vec![0; at as usize + 3];
                    (first.unwrap(), stream.read_exact(&mut buf).map(|()| buf))
                });
                eventually("the reader sleeps", || slept() >= 1);
                let before = slept();
                send(peer, 1, 16384);
                eventually("the reader sleeps on the ring it was sent", || slept() > before);
                announce(peer, at, 1);
                announce(peer, at, 2);
                let mut newest = send(peer, 2, 32768);
                newest.span(at, 3).copy_from(0, b"new");
                peer.page().tx.cursor.tail.store(at + 3, Release);
                peer.outward().ring();
                let (first, read) = reader.join().unwrap();
                assert_eq!(first, 3);
                assert!(read.unwrap().ends_with(b"new"));
            });
            assert_eq!(stream.reader().unwrap().ring_size(), 32768);
        });
    }
}

#[test]
fn changes_of_ring_that_no_honest_peer_makes_are_corrupt() {
    let lies: [fn(&mut RawPeer); 11] = [
        // Announced, and never sent.
        |peer| announce(peer, 10, 1),
        |peer| announce(peer, 10, u32::MAX),
        // From a byte that is not committed, or before what was seen, or beyond the ring.
        |peer| {
            send(peer, 1, 65536);
            announce(peer, 11, 1);
        },
        |peer| {
            send(peer, 1, 65536);
            announce(peer, 3, 1);
        },
        |peer| {
            send(peer, 1, 65536);
            peer.page().tx.cursor.tail.store(1 << 20, Release);
            announce(peer, 1 << 20, 1);
        },
        // Sent with another number than announced.
        |peer| {
            send(peer, 5, 65536);
            announce(peer, 10, 1);
        },
        // Two steps announced, one made.
        |peer| {
            send(peer, 1, 65536);
            announce(peer, 10, 2);
        },
        // No ring at all, or an endpoint's region in place of one.
        |peer| {
            send(peer, 1, 0);
            announce(peer, 10, 1);
        },
        |peer| {
            let (region, memory) = ring(65536, RegionKind::Endpoint);
            assert!(peer.send_ring(1, region.geometry(), &memory));
            announce(peer, 10, 1);
        },
        // The ring has another size than announced.
        |peer| {
            let (region, _) = ring(65536, RegionKind::Extension);
            let (_, smaller) = ring(32768, RegionKind::Extension);
            assert!(peer.send_ring(1, region.geometry(), &smaller));
            announce(peer, 10, 1);
        },
        // Larger than this side maps (the default is 64 MiB); told, and not even made.
        |peer| {
            let (_, memory) = ring(4096, RegionKind::Extension);
            let huge = partywall_shm::layout::Geometry::new(4096, 1 << 27).unwrap();
            assert!(peer.send_ring(1, huge, &memory));
            announce(peer, 10, 1);
        },
    ];
    for (number, lie) in lies.iter().enumerate() {
        eprintln!("lie {number}");
        against_both_sides(|stream, peer| {
            peer.put(0, &[1; 10]);
            assert_eq!(stream.read(&mut [0; 4]).unwrap(), 4);
            lie(peer);
            peer.outward().ring();
            // Bytes that were committed before may be readable or not.
            while stream.read(&mut [0; 100]).is_ok_and(|n| n > 0) {}
            assert_reader_ended(stream, peer);
            stream.write_all(b"still").unwrap();
        });
    }
}

#[test]
fn more_rings_than_are_announced_are_not_collected() {
    against_both_sides(|stream, peer| {
        stream.set_nonblocking(true);
        for generation in 1..20 {
            send(peer, generation, 4096);
        }
        announce(peer, 0, 19);
        for _ in 0..20 {
            let _ = stream.read(&mut [0; 100]);
        }
        assert_reader_ended(stream, peer);
    });
}

#[test]
fn packets_that_are_unknown_are_corrupt() {
    let packets: [&[u8]; 5] = [b"C", b"BB", &[1; 32], &[1; 40], &[1; 2000]];
    for bytes in packets {
        against_both_sides(|stream, peer| {
            for link in [peer.outward(), peer.inward()] {
                partywall_region::packet::send(link.as_fd(), bytes, &[]).unwrap();
            }
            assert_reader_ended(stream, peer);
            let _ = stream.write(&[0; 9000]);
            assert_writer_ended(stream, peer);
        });
    }
}

#[test]
fn header_rewritten_after_attach_has_no_effect() {
    against_both_sides(|stream, peer| {
        peer.put(0, b"attached");
        stream.read_exact(&mut [0; 8]).unwrap();
        let header = &peer.page().header;
        header.magic.store(1, Relaxed);
        header.version.store(9, Relaxed);
        header.ring_offset.store(1 << 40, Relaxed);
        header.ring_size.store(1 << 20, Relaxed);
        header.flags.store(u32::MAX, Relaxed);
        header.pid.store(1, Relaxed);
        peer.page().tx.control.cpu.store(u32::MAX, Relaxed);
        peer.page().rx.control.cpu.store(1, Relaxed);
        let mut buf = vec![0; 3000];
        for round in 0..10 {
            let at = 8 + round * 3000;
            peer.put(at, &Pattern.bytes(at, 3000));
            stream.read_exact(&mut buf).unwrap();
            Pattern.check(at, &buf);
        }
        assert_eq!(stream.reader().unwrap().ring_size(), RING);
    });
}

#[test]
fn any_wish_is_only_a_wish() {
    against_both_sides(|stream, peer| {
        for wish in [0, 1, 50, 1 << 63, u64::MAX - 1, u64::MAX] {
            peer.page().rx.control.data_wanted.store(wish, Relaxed);
            peer.page().tx.control.space_wanted.store(wish, Relaxed);
            stream.write_all(b"ok").unwrap();
        }
        while let Some(event) = peer.inward().try_next().unwrap() {
            assert!(matches!(event, LinkEvent::Bell));
        }
        peer.put(0, b"ok");
        stream.read_exact(&mut [0; 2]).unwrap();
    });
}
