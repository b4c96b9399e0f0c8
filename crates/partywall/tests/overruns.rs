//! A broadcast that overruns slow readers: they continue at the newest message, and never take a torn message for a whole one.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;

use common::feed::{SHORT, number_of, numbered, publisher, subscriber};
use common::raw::{RING, RawPeer, YesBroker};
use common::*;
use partywall::{Error, SlowReader, Subscriber};
use partywall_region::{OwnRegion, RegionOptions};
use partywall_shm::corrupt::Corrupt;
use partywall_shm::layout::flags;
use partywall_shm::record;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

#[test]
fn overrun_subscriber_continues_at_the_newest_message() {
    let _guard = hang_guard();
    let world = World::new();
    let mut publisher = publisher(&world, SlowReader::Newest, 4096);
    let (mut slow, mut fast) = (subscriber(&world.shop), subscriber(&world.shop));
    publisher.admit().unwrap();
    let mut message = Vec::new();
    for n in 0..=100 {
        publisher.send(&numbered(n, 992)).unwrap();
        fast.recv(&mut message).unwrap();
        assert_eq!(number_of(&message), n);
        if n == 0 {
            slow.recv(&mut message).unwrap();
        }
    }
    slow.recv(&mut message).unwrap();
    assert_eq!((number_of(&message), slow.lost(), fast.lost()), (100, 99, 0));
    // It is a subscriber like any other again.
    for n in 101..104 {
        publisher.send(&numbered(n, 992)).unwrap();
    }
    for n in 101..104 {
        slow.recv(&mut message).unwrap();
        assert_eq!((number_of(&message), slow.lost()), (n, 99));
    }
    assert_eq!((publisher.subscribers(), publisher.dropped()), (2, 0));
    drop(publisher);
    assert_fails!(slow.recv(&mut message), Error::Closed(_));
}

#[test]
fn subscriber_100_times_slower_always_gets_the_latest_sample() {
    let _guard = hang_guard();
    let world = World::new();
    let mut publisher = publisher(&world, SlowReader::Newest, 4096);
    let mut slow = subscriber(&world.shop);
    publisher.admit().unwrap();
    let (mut message, mut dice) = (Vec::new(), Dice::new(100));
    for round in 0..200u64 {
        for n in 0..100 {
            publisher.send(&numbered(round * 100 + n, dice.size(10))).unwrap();
        }
        slow.recv_newest(&mut message).unwrap();
        assert_eq!((number_of(&message), slow.lost()), (round * 100 + 99, round * 99));
    }
    slow.set_timeout(Some(SHORT));
    assert_fails!(slow.recv_newest(&mut message), Error::TimedOut);
    slow.set_nonblocking(true);
    assert_fails!(slow.recv_newest(&mut message), Error::WouldBlock);
}

#[test]
fn message_above_half_of_overrun_ring_is_refused() {
    let _guard = hang_guard();
    let world = World::new();
    let mut publisher = publisher(&world, SlowReader::Newest, 4096);
    let mut subscriber = subscriber(&world.shop);
    publisher.admit().unwrap();
    assert_eq!(publisher.max_message(), 2032);
    assert_fails!(publisher.send(&[0; 2033]), Error::TooLarge { asked: 2033, max: 2032, .. });
    publisher.send(&[7; 2032]).unwrap();
    publisher.send(&[]).unwrap();
    let mut message = Vec::new();
    subscriber.recv(&mut message).unwrap();
    assert_eq!(message, [7; 2032]);
    subscriber.recv(&mut message).unwrap();
    assert!(message.is_empty());
}

/// A reader that is overtaken again and again, in the middle of copying too: what it accepts is whole, and what it lost adds up.
#[test]
fn overrun_subscriber_accepts_no_torn_message_and_counts_all() {
    let _guard = hang_guard();
    let world = World::new();
    let mut publisher = publisher(&world, SlowReader::Newest, 4096);
    let mut reader = subscriber(&world.shop);
    publisher.admit().unwrap();
    let stop = AtomicBool::new(false);
    let (accepted, last_sent) = thread::scope(|s| {
        let reading = s.spawn(|| {
            let (mut dice, mut message, mut first, mut last) = (Dice::new(5), Vec::new(), None, None);
            let (mut accepted, mut lagged) = (0u64, 0u64);
            loop {
                let got = if dice.one_in(3) { reader.recv_newest(&mut message) } else { reader.recv(&mut message) };
                match got {
                    Ok(()) => {
                        let number = number_of(&message);
                        assert!(last.is_none_or(|last| last < number), "{last:?} then {number}");
                        accepted += 1;
                        let first = *first.get_or_insert(number);
                        assert_eq!(accepted + reader.lost(), number - first + 1);
                        last = Some(number);
                    }
                    // Another program had the processor during each copy.
                    Err(Error::Lagged) => lagged += 1,
                    Err(Error::Closed(_)) => break,
                    Err(e) => panic!("{e}"),
                }
                if dice.one_in(50) {
                    thread::sleep(Duration::from_micros(dice.below(300)));
                }
                if accepted >= 20_000 && reader.lost() >= 1000 {
                    stop.store(true, Relaxed);
                }
            }
            println!("accepted {accepted}, lost {}, lagged {lagged}", reader.lost());
            last
        });
        let (mut dice, mut number) = (Dice::new(99), 0);
        while !stop.load(Relaxed) && !reading.is_finished() {
            for _ in 0..dice.size(6) {
                publisher.send(&numbered(number, dice.size(10))).unwrap();
                number += 1;
            }
            if dice.one_in(4) {
                thread::yield_now();
            }
        }
        drop(publisher);
        (reading.join().unwrap(), number - 1)
    });
    assert_eq!(accepted, Some(last_sent), "the newest one is there in the end");
}

/// A publisher that overruns its subscribers, played by hand, and its subscriber.
fn overrun_by_hand(broker: &YesBroker) -> (Subscriber, RawPeer) {
    let mut subscriber = subscriber(&broker.join("shop"));
    let mut peer = broker.next_connect();
    let options = RegionOptions { flags: flags::BROADCAST | flags::OVERRUNS, ..RegionOptions::endpoint(RING) };
    (peer.region, peer.memory) = OwnRegion::create(&options).unwrap();
    peer.attach();
    // Its one link is that of the direction that it writes.
    peer.connecting = true;
    subscriber.set_timeout(Some(SHORT));
    assert_fails!(subscriber.recv(&mut Vec::new()), Error::TimedOut);
    (subscriber, peer)
}

impl RawPeer {
    /// Publishes a record of this number at `at`, of `len` bytes with the number, in 48 bytes.
    fn publish(&mut self, at: u64, number: u64, len: u32) {
        self.page().tx.control.intent.store(at + 48, Relaxed);
        let content = [&record::header(len)[..], &number.to_le_bytes(), &[number as u8; 32]].concat();
        self.put(at, &content);
        self.page().tx.control.newest.store(at, Relaxed);
    }
}

#[test]
fn record_torn_in_the_middle_of_a_copy_is_left_for_the_newest() {
    let _guard = hang_guard();
    let broker = YesBroker::start();
    let (mut subscriber, mut peer) = overrun_by_hand(&broker);
    let mut message = Vec::new();
    (0..3).for_each(|n| peer.publish(n * 48, n, 40));
    subscriber.recv(&mut message).unwrap();
    assert_eq!(message, [0; 32]);
    // The publisher is about to overwrite the second record, and has written half of it.
    peer.page().tx.control.intent.store(RING + 96, Relaxed);
    peer.region.span(48, 20).copy_from(0, &[0xEE; 20]);
    subscriber.recv(&mut message).unwrap();
    assert_eq!((&message[..], subscriber.lost()), (&[2; 32][..], 1));
}

#[test]
fn publisher_that_overruns_and_lies_is_corrupt() {
    let _guard = hang_guard();
    let broker = YesBroker::start();
    type Lie = fn(&mut RawPeer);
    let lies: [(&str, Corrupt, Lie); 11] = [
        ("newest went back", Corrupt::CursorWentBackwards, |p| p.set_tail(3 * RING)),
        ("newest is not committed", Corrupt::CursorOutOfRange, |p| {
            p.page().tx.control.newest.store(3 * RING, Relaxed);
            p.set_tail(3 * RING);
        }),
        ("newest is beyond everything", Corrupt::CursorOutOfRange, |p| {
            p.page().tx.control.newest.store(u64::MAX, Relaxed);
            p.set_tail(u64::MAX - 1);
        }),
        ("newest is no record", Corrupt::BadRecord, |p| {
            p.page().tx.control.newest.store(u64::MAX - 48, Relaxed);
            p.set_tail(u64::MAX - 1);
        }),
        ("tail went back", Corrupt::CursorWentBackwards, |p| p.set_tail(8)),
        ("everything is about to be overwritten", Corrupt::CursorWentBackwards, |p| {
            p.publish(48, 1, 40);
            p.page().tx.control.intent.store(u64::MAX, Relaxed);
        }),
        ("a number twice", Corrupt::BadRecord, |p| p.publish(48, 0, 40)),
        ("a number left out", Corrupt::BadRecord, |p| p.publish(48, 2, 40)),
        ("more lost than there was room for", Corrupt::BadRecord, |p| {
            (1..400).for_each(|n| p.publish(n * 48, n, 40));
            p.publish(400 * 48, 400 * 4, 40);
        }),
        ("no number", Corrupt::BadRecord, |p| p.publish(48, 1, 7)),
        ("another ring", Corrupt::BadSwitch, |p| {
            p.page().tx.control.generation.store(1, Relaxed);
            p.publish(48, 1, 40);
        }),
    ];
    for (lie, what, tell) in lies {
        let (mut subscriber, mut peer) = overrun_by_hand(&broker);
        let mut message = Vec::new();
        peer.publish(0, 0, 40);
        subscriber.recv(&mut message).unwrap();
        tell(&mut peer);
        for _ in 0..2 {
            match subscriber.recv(&mut message) {
                Err(Error::Corrupt(found)) => assert_eq!(found, what, "{lie}"),
                other => panic!("{lie}: {other:?}"),
            }
        }
        assert_eq!(subscriber.lost(), 0, "{lie}");
    }
}

/// Each call returns, whatever the publisher stores while it runs.
#[test]
fn publisher_that_never_lets_a_copy_succeed_keeps_no_call() {
    let _guard = hang_guard();
    let broker = YesBroker::start();
    let (mut dice, stop) = (Dice::new(11), AtomicBool::new(false));
    let (mut subscriber, mut peer) = overrun_by_hand(&broker);
    peer.publish(0, 0, 40);
    subscriber.recv(&mut Vec::new()).unwrap();
    thread::scope(|s| {
        s.spawn(|| {
            // Everything moves on, and is overwritten already.
            let tx = &peer.page().tx;
            tx.control.intent.store(u64::MAX, Relaxed);
            for at in (1..).take_while(|_| !stop.load(Relaxed)) {
                tx.cursor.tail.store(at * 48 + 48, Relaxed);
                tx.control.newest.store(at * 48, Relaxed);
            }
        });
        let mut message = Vec::new();
        for _ in 0..1000 {
            let newest = dice.one_in(2);
            let got = if newest { subscriber.recv_newest(&mut message) } else { subscriber.recv(&mut message) };
            match got {
                Err(Error::Lagged | Error::Corrupt(_) | Error::TimedOut) => assert!(message.is_empty()),
                other => panic!("{other:?}"),
            }
        }
        stop.store(true, Relaxed);
    });
}
