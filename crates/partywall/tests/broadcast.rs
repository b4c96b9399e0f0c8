//! Broadcast: one write, many readers; the slow hold or are dropped, and never take a torn message for a whole one.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;

use common::feed::{SHORT, number_of, numbered, publisher, subscriber};
use common::process::{self, Daemon, child};
use common::raw::RING;
use common::*;
use partywall::{Domain, Error, Publisher, SlowReader, Subscriber};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::AsFd;
use rustix::process::Signal;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

/// A subscriber of a real broker whose publisher has admitted it and has sent, while the broker was stopped.
fn sent_while_broker_is_stopped(message: &[u8]) -> (Daemon, Publisher, Subscriber) {
    let broker = Daemon::start();
    let join = |name: &str| Domain::builder().name(name).broker(broker.path()).join().unwrap();
    let (web, shop) = (join("web"), join("shop"));
    let mut publisher = Publisher::bind(&web, "feed", SlowReader::Hold, &fixed(RING)).unwrap();
    let mut subscriber = subscriber(&shop);
    subscriber.set_nonblocking(true);
    assert!(is_readable(&publisher), "the subscriber waits to be admitted");
    broker.signal(Signal::STOP);
    publisher.admit().unwrap();
    publisher.send(message).unwrap();
    (broker, publisher, subscriber)
}

/// Waits until a descriptor is readable, for as long as a test may take.
fn is_readable(fd: &impl AsFd) -> bool {
    let limit = Timespec { tv_sec: HANG.as_secs() as i64, tv_nsec: 0 };
    poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&limit)).unwrap() == 1
}

#[test]
fn late_answer_of_broker_wakes_subscriber_of_idle_publisher() {
    let _guard = hang_guard();
    let (broker, publisher, mut subscriber) = sent_while_broker_is_stopped(b"tick");
    let mut message = Vec::new();
    assert_fails!(subscriber.recv(&mut message), Error::WouldBlock);
    broker.signal(Signal::CONT);
    // The publisher makes no call from here on.
    while let Err(error) = subscriber.recv(&mut message) {
        assert!(matches!(error, Error::WouldBlock), "{error}");
        assert!(is_readable(&subscriber), "the broker's answer rings the subscriber");
    }
    assert_eq!(message, b"tick");
    drop(publisher);
}

#[test]
fn subscribers_with_late_answers_come_and_go() {
    let _guard = hang_guard();
    let (broker, mut publisher, first) = sent_while_broker_is_stopped(b"tick");
    drop(first);
    broker.signal(Signal::CONT);
    let domain = Domain::builder().name("shop").broker(broker.path()).join().unwrap();
    for _ in 0..3 {
        let mut subscriber = subscriber(&domain);
        assert!(is_readable(&publisher), "the subscriber waits to be admitted");
        broker.signal(Signal::STOP);
        publisher.admit().unwrap();
        broker.signal(Signal::CONT);
        publisher.send(b"tock").unwrap();
        let mut message = Vec::new();
        subscriber.recv(&mut message).unwrap();
        assert_eq!(message, b"tock");
    }
}

#[test]
fn death_of_broker_before_its_answer_ends_subscriber() {
    let _guard = hang_guard();
    let (broker, publisher, mut subscriber) = sent_while_broker_is_stopped(b"tick");
    let mut message = Vec::new();
    assert_fails!(subscriber.recv(&mut message), Error::WouldBlock);
    broker.signal(Signal::KILL);
    let error = loop {
        match subscriber.recv(&mut message) {
            Err(Error::WouldBlock) => assert!(is_readable(&subscriber), "the subscriber never gets the ring"),
            other => break other.unwrap_err(),
        }
    };
    assert!(matches!(error, Error::Dead { .. } | Error::Closed(_)), "{error}");
    drop(publisher);
}

#[test]
fn every_subscriber_gets_every_message() {
    let _guard = hang_guard();
    let world = World::new();
    let mut publisher = publisher(&world, SlowReader::Hold, 16384);
    let subscribers: Vec<Subscriber> = (0..8).map(|_| subscriber(&world.shop)).collect();
    publisher.admit().unwrap();
    assert_eq!(publisher.subscribers(), 8);
    thread::scope(|s| {
        for mut subscriber in subscribers {
            s.spawn(move || {
                let mut message = Vec::new();
                for expected in 0..2000 {
                    subscriber.recv(&mut message).unwrap();
                    assert_eq!(number_of(&message), expected);
                }
                assert_fails!(subscriber.recv(&mut message), Error::Closed(_));
                assert_fails!(subscriber.recv(&mut message), Error::Closed(_));
                assert_eq!(subscriber.counters().messages, 2000);
            });
        }
        let mut dice = Dice::new(8);
        for number in 0..2000 {
            publisher.send(&numbered(number, dice.size(11))).unwrap();
        }
        assert_eq!(publisher.counters().messages, 2000);
        drop(publisher);
    });
}

/// As the documentation of `Publisher` has it: what is sent after it was admitted, whether or not it has looked yet.
#[test]
fn subscriber_gets_messages_sent_after_its_admission() {
    let _guard = hang_guard();
    let world = World::new();
    let mut publisher = publisher(&world, SlowReader::Hold, 16384);
    publisher.send(b"before anyone came").unwrap();
    let mut early = subscriber(&world.shop);
    publisher.admit().unwrap();
    publisher.send(b"one").unwrap();
    let mut late = subscriber(&world.shop);
    publisher.admit().unwrap();
    publisher.send(b"two").unwrap();
    let mut message = Vec::new();
    for (subscriber, first) in [(&mut early, &b"one"[..]), (&mut late, b"two")] {
        subscriber.set_timeout(Some(HANG / 4));
        subscriber.recv(&mut message).unwrap();
        assert_eq!(message, first);
    }
    early.recv(&mut message).unwrap();
    assert_eq!(message, b"two");
}

#[test]
fn subscriber_gets_messages_of_publisher_that_ended() {
    let _guard = hang_guard();
    let broker = Daemon::start();
    let join = |name: &str| Domain::builder().name(name).broker(broker.path()).join().unwrap();
    let (web, shop) = (join("web"), join("shop"));
    let mut publisher = Publisher::bind(&web, "feed", SlowReader::Hold, &fixed(4096)).unwrap();
    let mut subscriber = subscriber(&shop);
    assert!(readable(&publisher, Duration::from_secs(60)), "the broker tells it of the subscriber");
    // The broker passes the ring on only after the publisher has begun to end.
    broker.signal(Signal::STOP);
    publisher.admit().unwrap();
    assert_eq!(publisher.subscribers(), 1);
    publisher.send(b"last words").unwrap();
    thread::scope(|s| {
        s.spawn(|| {
            thread::sleep(SHORT);
            broker.signal(Signal::CONT);
        });
        drop(publisher);
    });
    let mut message = Vec::new();
    subscriber.recv(&mut message).unwrap();
    assert_eq!(message, b"last words");
    assert!(matches!(subscriber.recv(&mut message), Err(Error::Closed(_))));
}

#[test]
fn slow_reader_blocks_publisher_in_hold_mode() {
    let _guard = hang_guard();
    let world = World::new();
    let mut publisher = publisher(&world, SlowReader::Hold, 4096);
    let (mut slow, mut fast) = (subscriber(&world.shop), subscriber(&world.shop));
    publisher.admit().unwrap();
    publisher.set_timeout(Some(SHORT));
    let mut message = Vec::new();
    let sent = (0..).take_while(|&n| publisher.send(&numbered(n, 992)).is_ok()).count();
    assert_eq!(sent, 4, "records of 1008 bytes fit four times");
    for n in 0..4 {
        fast.recv(&mut message).unwrap();
        assert_eq!(number_of(&message), n);
    }
    assert_fails!(publisher.send(&numbered(4, 992)), Error::TimedOut);
    publisher.set_nonblocking(true);
    assert_fails!(publisher.send(&numbered(4, 992)), Error::WouldBlock);
    publisher.set_nonblocking(false);
    publisher.set_timeout(None);
    thread::scope(|s| {
        let sender = s.spawn(|| publisher.send(&numbered(4, 992)));
        for n in 0..5 {
            slow.recv(&mut message).unwrap();
            assert_eq!(number_of(&message), n);
        }
        sender.join().unwrap().unwrap();
    });
    assert_eq!((publisher.subscribers(), publisher.dropped()), (2, 0));
    // A subscriber that has left no longer blocks the publisher.
    drop(slow);
    thread::scope(|s| {
        s.spawn(|| (5..50).for_each(|n| publisher.send(&numbered(n, 992)).unwrap()));
        for n in 4..50 {
            fast.recv(&mut message).unwrap();
            assert_eq!(number_of(&message), n);
        }
    });
}

#[test]
fn slow_reader_is_dropped_with_lagged_error_in_drop_mode() {
    let _guard = hang_guard();
    let world = World::new();
    let mut publisher = publisher(&world, SlowReader::Drop, 4096);
    let (mut slow, mut fast) = (subscriber(&world.shop), subscriber(&world.shop));
    publisher.admit().unwrap();
    let mut message = Vec::new();
    for n in 0..20 {
        publisher.send(&numbered(n, 992)).unwrap();
        fast.recv(&mut message).unwrap();
        assert_eq!(number_of(&message), n);
    }
    assert_eq!((publisher.subscribers(), publisher.dropped()), (1, 1));
    for _ in 0..2 {
        assert_fails!(slow.recv(&mut message), Error::Lagged);
    }
}

/// Readers that are overtaken again and again, in the middle of copying too: what they accept is whole and in order.
#[test]
fn no_torn_message_is_ever_accepted() {
    let _guard = hang_guard();
    let world = World::new();
    let mut publisher = publisher(&world, SlowReader::Drop, 4096);
    let stop = AtomicBool::new(false);
    // The number of messages that each reader has accepted, and the number of times it was overtaken.
    let seen: [[AtomicU64; 2]; 2] = Default::default();
    thread::scope(|s| {
        let readers: Vec<_> = (0..)
            .zip(&seen)
            .map(|(seed, [accepted, lagged])| {
                let (world, stop) = (&world, &stop);
                s.spawn(move || {
                    let (mut dice, mut message) = (Dice::new(seed), Vec::new());
                    while !stop.load(Relaxed) {
                        let mut subscriber = subscriber(&world.shop);
                        subscriber.set_timeout(Some(SHORT));
                        let mut last = None;
                        loop {
                            match subscriber.recv(&mut message) {
                                Ok(()) => {
                                    let number = number_of(&message);
                                    assert!(last.is_none_or(|last| number == last + 1), "{last:?} then {number}");
                                    last = Some(number);
                                    accepted.fetch_add(1, Relaxed);
                                }
                                Err(Error::Lagged) => {
                                    lagged.fetch_add(1, Relaxed);
                                    break;
                                }
                                Err(Error::TimedOut) => break,
                                Err(e) => panic!("{e}"),
                            }
                            if dice.one_in(50) {
                                thread::sleep(Duration::from_micros(dice.below(300)));
                            }
                        }
                    }
                })
            })
            .collect();
        let mut dice = Dice::new(99);
        let end = std::time::Instant::now() + Duration::from_secs(2);
        let mut number = 0;
        // The test is of readers that read and of readers that are overtaken: how soon each has done both is the machine's affair.
        let both = || seen.iter().flatten().all(|count| count.load(Relaxed) > 0);
        while (std::time::Instant::now() < end || !both()) && !readers.iter().any(|reader| reader.is_finished()) {
            // Few or many at once, with pauses. Some pauses are long enough that the scheduler runs a reader.
            for _ in 0..dice.size(6) {
                publisher.send(&numbered(number, dice.size(11))).unwrap();
                number += 1;
            }
            thread::sleep(Duration::from_micros(if dice.one_in(20) { dice.size(14) as u64 } else { 50 }));
        }
        stop.store(true, Relaxed);
        readers.into_iter().for_each(|reader| reader.join().unwrap());
        println!("accepted and overtaken: {seen:?}");
    });
}

#[test]
fn newest_message_is_there_for_held_subscribers_too() {
    let _guard = hang_guard();
    let world = World::new();
    let mut publisher = publisher(&world, SlowReader::Hold, 4096);
    let mut subscriber = subscriber(&world.shop);
    publisher.admit().unwrap();
    let mut message = Vec::new();
    for round in 1..=50u64 {
        (0..4).for_each(|n| publisher.send(&numbered(round * 4 + n, 992)).unwrap());
        subscriber.recv_newest(&mut message).unwrap();
        assert_eq!((number_of(&message), subscriber.lost()), (round * 4 + 3, round * 3));
    }
}

#[test]
fn too_large_broadcast_message_is_refused() {
    let world = World::new();
    let mut publisher = publisher(&world, SlowReader::Hold, 4096);
    assert_eq!(publisher.max_message(), 4088);
    assert_fails!(publisher.send(&[0; 4089]), Error::TooLarge { asked: 4089, max: 4088, .. });
    publisher.send(&[0; 4088]).unwrap();
}

#[test]
fn killed_subscriber_does_not_block_publisher() {
    let _guard = hang_guard();
    let world = World::new();
    let mut publisher = publisher(&world, SlowReader::Hold, 4096);
    let mut living = subscriber(&world.shop);
    let mut killed = child("subscriber", world.broker.path());
    eventually("both are there", || publisher.admit().is_ok() && publisher.subscribers() == 2);
    let mut message = Vec::new();
    thread::scope(|s| {
        s.spawn(|| {
            for n in 0..500 {
                publisher.send(&numbered(n, 500)).unwrap();
            }
        });
        for n in 0..500 {
            living.recv(&mut message).unwrap();
            assert_eq!(number_of(&message), n);
            if n == 100 {
                killed.kill();
            }
        }
    });
    killed.wait();
    eventually("it is let go", || publisher.admit().is_ok() && publisher.subscribers() == 1);
}

/// Not a separate test: the process that is killed.
#[test]
fn child_main() {
    let Some((role, broker)) = process::role() else { return };
    assert_eq!(role, "subscriber");
    let domain = Domain::builder().name("doomed").broker(broker).join().unwrap();
    let mut subscriber = subscriber(&domain);
    let mut message = Vec::new();
    // Reads slowly, so that the publisher waits for it when it is killed.
    while subscriber.recv(&mut message).is_ok() {
        thread::sleep(Duration::from_millis(1));
    }
}
