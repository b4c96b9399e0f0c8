//! Broadcast: one write, many readers; the slow hold, are dropped or keep the newest, and never take a torn message for a whole one.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;

use common::process::{self, Daemon, child};
use common::raw::{RING, RawPeer, YesBroker};
use common::*;
use partywall::{Domain, Error, Options, Publisher, SlowReader, Subscriber};
use partywall_region::{OwnRegion, RegionOptions};
use partywall_shm::corrupt::Corrupt;
use partywall_shm::layout::flags;
use partywall_shm::record;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::AsFd;
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
