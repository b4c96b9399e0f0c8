//! Rings that change their size: growing, shrinking, spans larger than the ring, under checked traffic.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;

use common::*;
use partywall::{Error, RingSize};
use std::io::{Read, Write};
use std::thread;

#[test]
fn ring_grows_for_larger_span() {
    let _guard = hang_guard();
    let (mut a, mut b) = pair(&adaptive(4096, 1 << 20));
    thread::scope(|s| {
        s.spawn(move || {
            let writer = a.writer().unwrap();
            let (mut at, mut dice) = (0u64, Dice::new(1));
            for n in [100, 4096, 4097, 10, 100_000, 1 << 20, 5] {
                let mut span = writer.reserve(n).unwrap();
                assert_eq!(span.len(), n);
                Pattern.fill(at, &mut span);
                // Sometimes less than was reserved is committed.
                let k = if dice.one_in(2) { n } else { n / 2 };
                span.commit(k);
                at += k as u64;
            }
            assert_eq!(writer.ring_size(), 1 << 20);
            assert_fails!(writer.reserve((1 << 20) + 1), Error::TooLarge { asked: 1_048_577, max: 1_048_576, .. });
            assert_eq!(writer.counters().switches, 3);
            at
        });
        let mut dice = Dice::new(2);
        Pattern.receive(&mut b, || dice.size(16));
        assert_eq!(b.reader().unwrap().ring_size(), 1 << 20);
        assert_eq!(b.reader().unwrap().counters().switches, 3);
    });
}

#[test]
fn many_reservations_without_commits_grow_to_largest_ring() {
    let _guard = hang_guard();
    let (mut a, _b) = pair(&adaptive(4096, 1 << 24));
    let writer = a.writer().unwrap();
    for n in (13..=24).map(|power| 1 << power) {
        assert_eq!(writer.reserve(n).unwrap().len(), n);
    }
}

#[test]
fn fixed_ring_rejects_larger_span() {
    let (mut a, _b) = pair(&fixed(4096));
    assert_fails!(a.writer().unwrap().reserve(4097), Error::TooLarge { asked: 4097, max: 4096, .. });
    assert_eq!(a.writer().unwrap().reserve(4096).unwrap().len(), 4096, "and can still be used");
    a.writer().unwrap().trim().unwrap();
    assert_eq!(a.writer().unwrap().counters().switches, 0);
}

#[test]
fn dropped_reservation_commits_nothing() {
    let (mut a, mut b) = pair(&adaptive(4096, 65536));
    b.set_nonblocking(true);
    let writer = a.writer().unwrap();
    writer.reserve(100).unwrap().fill(1);
    assert_fails!(b.read(&mut [0; 10]), Error::WouldBlock);
    // Also one for which the ring grew.
    writer.reserve(10_000).unwrap().fill(1);
    assert_fails!(b.read(&mut [0; 10]), Error::WouldBlock);
    let mut span = writer.reserve(3).unwrap();
    span.copy_from_slice(b"abc");
    span.commit(3);
    let mut buf = [0; 10];
    assert_eq!(b.read(&mut buf).unwrap(), 3);
    assert_eq!(&buf[..3], b"abc");
}

#[test]
fn fast_stream_grows_ring_and_trim_shrinks_it() {
    let _guard = hang_guard();
    let (mut a, mut b) = pair(&adaptive(4096, 1 << 20));
    thread::scope(|s| {
        let sender = s.spawn(move || {
            let chunk = vec![1; 64 << 10];
            // It grows once it has been fast for a while: how long that takes is the machine's affair.
            let mut rounds = 0;
            while a.writer().unwrap().ring_size() < 1 << 20 && rounds < 20_000 {
                a.write_all(&chunk).unwrap();
                rounds += 1;
            }
            a
        });
        let receiver = s.spawn(move || {
            let (mut buf, ones) = (vec![0; 64 << 10], vec![1; 64 << 10]);
            let mut total = 0;
            loop {
                let n = b.read(&mut buf).unwrap();
                if n == 0 {
                    break total;
                }
                assert!(buf[..n] == ones[..n]);
                total += n;
            }
        });
        let mut a = sender.join().unwrap();
        assert_eq!(a.writer().unwrap().ring_size(), 1 << 20, "a ring that is busy grows");
        // The change back needs the reader to have come into the present ring.
        eventually("the ring is small again", || {
            a.writer().unwrap().trim().unwrap();
            a.write_all(&[1]).unwrap();
            a.writer().unwrap().ring_size() == 4096
        });
        a.write_all(&[1; 10_000]).unwrap();
        drop(a);
        assert!(receiver.join().unwrap() > 10_000);
    });
}

/// Rings replaced before anything was in them: the reader has to skip one (protocol A4).
#[test]
fn trimming_twice_in_a_row_loses_nothing() {
    let (mut a, mut b) = pair(&adaptive(4096, 65536));
    let mut at = 0;
    for unread in [0, 100, 3000] {
        let writer = a.writer().unwrap();
        writer.write_all(&Pattern.bytes(at, unread)).unwrap();
        for size in [5000, 20_000, 65_536] {
            assert_eq!(writer.reserve(size).unwrap().len(), size);
            writer.trim().unwrap();
            writer.trim().unwrap();
        }
        assert_eq!(writer.ring_size(), 4096);
        writer.write_all(&Pattern.bytes(at + unread as u64, 2000)).unwrap();
        let mut buf = vec![0; unread + 2000];
        b.read_exact(&mut buf).unwrap();
        Pattern.check(at, &buf);
        at += buf.len() as u64;
    }
}

/// The ring changes while the reader waits for more bytes than there are, so it takes rings from the link as they come.
#[test]
fn rings_that_change_under_a_waiting_reader_lose_nothing() {
    let _guard = hang_guard();
    for spin in [0, 50] {
        let options = adaptive(4096, 65536).spin(std::time::Duration::from_micros(spin));
        let (mut a, mut b) = pair(&options);
        thread::scope(|s| {
            s.spawn(move || {
                let (mut at, mut dice) = (0, Dice::new(spin));
                let writer = a.writer().unwrap();
                for _ in 0..4000 {
                    match dice.below(4) {
                        0 => drop(writer.reserve(dice.size(16)).unwrap()),
                        1 => writer.trim().unwrap(),
                        _ => {
                            let n = dice.size(9);
                            writer.write_all(&Pattern.bytes(at, n)).unwrap();
                            at += n as u64;
                        }
                    }
                    if dice.one_in(20) {
                        thread::yield_now();
                    }
                }
            });
            let (mut at, mut dice, mut buf) = (0, Dice::new(spin + 1), Vec::new());
            let reader = b.reader().unwrap();
            loop {
                // The wait has a limit: the writer may need a release here before it can change its ring again.
                reader.set_timeout(Some(std::time::Duration::from_millis(1)));
                if let Err(e) = reader.peek_at_least(dice.size(12)) {
                    assert!(matches!(e, Error::TimedOut), "{e}");
                }
                reader.set_timeout(None);
                let peeked = reader.peek().unwrap();
                if peeked.is_empty() {
                    break;
                }
                let n = 1 + dice.below(peeked.len() as u64) as usize;
                buf.resize(n, 0);
                assert_eq!(peeked.copy_to(0, &mut buf), n);
                Pattern.check(at, &buf);
                peeked.release(n);
                at += n as u64;
            }
        });
    }
}

#[test]
fn random_use_of_every_way_to_write_with_rings_that_change() {
    let _guard = hang_guard();
    for seed in 0..6 {
        let (mut a, mut b) = pair(&adaptive(4096, 256 << 10));
        thread::scope(|s| {
            let sender = s.spawn(move || {
                let (mut at, mut dice) = (0, Dice::new(seed));
                let writer = a.writer().unwrap();
                while at < 4 << 20 {
                    let n = dice.size(17);
                    match dice.below(8) {
                        0 => writer.trim().unwrap(),
                        1..4 => {
                            let mut span = writer.reserve(n).unwrap();
                            Pattern.fill(at, &mut span);
                            let k = dice.below(n as u64 + 1);
                            span.commit(k as usize);
                            at += k;
                        }
                        _ => {
                            writer.write_all(&Pattern.bytes(at, n)).unwrap();
                            at += n as u64;
                        }
                    }
                }
                (at, writer.counters().switches)
            });
            let mut dice = Dice::new(seed + 1000);
            let received = Pattern.receive(&mut b, || dice.size(17));
            let (sent, switches) = sender.join().unwrap();
            assert_eq!(received, sent);
            assert!(switches > 2, "{switches}: the test is of rings that change");
        });
    }
}

#[test]
fn each_side_sets_size_of_ring_it_writes() {
    let (mut a, mut b) = pair(&fixed(5000));
    assert_eq!(a.writer().unwrap().ring_size(), 8192, "rounded up");
    a.write_all(b"x").unwrap();
    b.read_exact(&mut [0]).unwrap();
    assert_eq!(b.reader().unwrap().ring_size(), 8192);
    for wrong in [RingSize::Fixed(0), RingSize::Fixed(1 << 40), RingSize::Adaptive { initial: 8192, max: 4096 }] {
        let refused = partywall::Stream::pair(&partywall::Options::default().ring(wrong));
        assert_fails!(refused, Error::Invalid(_));
    }
}
