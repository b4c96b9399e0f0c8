//! Broadcast: one write, many readers; the slow hold or are dropped, and never take a torn message for a whole one.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;

use common::process::{self, Daemon, child};
use common::*;
use partywall::{Domain, Error, Options, Publisher, SlowReader, Subscriber};
use rustix::process::Signal;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

const SHORT: Duration = Duration::from_millis(30);

fn publisher(world: &World, slow: SlowReader, ring: u64) -> Publisher {
    Publisher::bind(&world.web, "feed", slow, &fixed(ring)).unwrap()
}

fn subscriber(domain: &Domain) -> Subscriber {
    Subscriber::connect_with(domain, "web:feed", &Options::default()).unwrap()
}

/// A message that shows if parts of two were mixed: its number, and bytes that follow from it.
fn numbered(number: u64, len: usize) -> Vec<u8> {
    let mut message = number.to_le_bytes().to_vec();
    message.extend(Pattern.bytes(number.wrapping_mul(7919), len));
    message
}

/// Checks it, and returns its number.
fn number_of(message: &[u8]) -> u64 {
    let (number, rest) = message.split_at(8);
    let number = u64::from_le_bytes(number.try_into().unwrap());
    Pattern.check(number.wrapping_mul(7919), rest);
    number
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
fn a_subscriber_gets_what_is_sent_after_it_was_admitted() {
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
fn subscriber_of_a_publisher_that_ends_at_once_gets_what_was_sent() {
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
fn a_slow_reader_holds_the_publisher_if_so_chosen() {
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
    // One that leaves holds nobody up any more.
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
fn a_slow_reader_is_dropped_and_told_so_if_so_chosen() {
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
    // What each of the readers has accepted, and how often it was overtaken.
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
            // Few at a time or many; and pauses, some of them so long that a reader is let run by whatever else this machine does.
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
fn a_message_that_is_too_large_is_refused() {
    let world = World::new();
    let mut publisher = publisher(&world, SlowReader::Hold, 4096);
    assert_eq!(publisher.max_message(), 4088);
    assert_fails!(publisher.send(&[0; 4089]), Error::TooLarge { asked: 4089, max: 4088, .. });
    publisher.send(&[0; 4088]).unwrap();
}

#[test]
fn a_subscriber_that_is_killed_holds_nobody_up() {
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
