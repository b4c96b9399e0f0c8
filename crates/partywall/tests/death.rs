//! `kill -9` of a peer at any moment: what it had committed is read, then it is dead, soon, and nothing is left over.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;

use common::process::{self, Process, alone, assert_nothing_left, child, footprint};
use common::*;
use partywall::{Domain, Error, Listener, Publisher, SlowReader, StatPage, Stream, Subscriber};
use std::io::{Read, Write};
use std::thread;
use std::time::{Duration, Instant};

/// Prints how long it took until a death was noticed. The promise is 100 ms, which a busy machine can miss. The hang guard ensures that
/// it is noticed at all.
fn report(what: &str, times: &[Duration]) {
    let mut times = times.to_vec();
    times.sort();
    let (median, longest) = (times[times.len() / 2], times[times.len() - 1]);
    eprintln!("from kill to dead, {what}: median {median:?}, longest {longest:?} of {}", times.len());
}

struct Doomed {
    process: Process,
    stream: Stream,
    /// Its control page, which tells after its death what it had committed.
    page: StatPage,
}

/// A peer of this role that has connected and begun.
fn doomed(world: &World, listener: &mut Listener, role: &str) -> Doomed {
    let process = child(role, world.broker.path());
    let (mut stream, info) = listener.accept().unwrap();
    assert_eq!((info.name.as_str(), info.pid), ("doomed", Some(process.id())));
    let page = world.web.inspect(stream.channel_id().unwrap()).unwrap().remove(0);
    assert!(page.is_connecting());
    stream.reader().unwrap().peek().unwrap();
    Doomed { process, stream, page }
}

/// A world in a separate process, which must be as before in the end.
fn in_a_world(test: &str, body: impl FnOnce(&World, &mut Listener)) {
    alone(test, || {
        let _guard = hang_guard();
        let world = World::new();
        drop(world.connection(&fixed(4096)));
        world.assert_no_channel_is_left();
        let mut listener = world.web.bind_with("death", &adaptive(4096, 1 << 20)).unwrap();
        let before = footprint();
        body(&world, &mut listener);
        world.assert_no_channel_is_left();
        eventually("no domain of the dead is left", || world.web.domains().unwrap().len() == 2);
        assert_nothing_left(before);
    });
}

/// Reads all there is and checks it; ends when the peer is dead.
fn read_to_death(stream: &mut Stream, mut at: u64) -> u64 {
    let mut buf = vec![0; 50_000];
    loop {
        match stream.read(&mut buf) {
            Ok(0) => panic!("an orderly end"),
            Ok(n) => {
                Pattern.check(at, &buf[..n]);
                at += n as u64;
            }
            Err(e) => {
                assert!(matches!(cause(&e), Error::Dead { attached: true }), "{e:?}");
                return at;
            }
        }
    }
}

#[test]
fn reader_gets_all_committed_bytes_of_writer_killed_under_load() {
    in_a_world("reader_gets_all_committed_bytes_of_writer_killed_under_load", |world, listener| {
        let mut times = Vec::new();
        let mut dice = Dice::new(u64::from(std::process::id()));
        for _ in 0..25 {
            let Doomed { mut process, mut stream, page } = doomed(world, listener, "writer");
            thread::scope(|s| {
                let reader = s.spawn(|| {
                    let read = read_to_death(&mut stream, 0);
                    (read, Instant::now())
                });
                thread::sleep(Duration::from_micros(dice.below(15_000)));
                let killed = process.kill();
                let (read, dead) = reader.join().unwrap();
                times.push(dead - killed);
                assert_eq!(read, page.cursors().0, "every committed byte, and no other");
            });
            process.wait();
            // The other half hears of it by the keeper, which is another thread.
            eventually("the writing half learns it", || stream.write(b"x").is_err());
            for _ in 0..2 {
                assert_fails!(stream.read(&mut [0]), Error::Dead { attached: true });
                assert_fails!(stream.write(b"x"), Error::Dead { attached: true });
            }
        }
        report("reading under load", &times);
    });
}

#[test]
fn reader_gets_unread_bytes_of_killed_writer() {
    in_a_world("reader_gets_unread_bytes_of_killed_writer", |world, listener| {
        for _ in 0..5 {
            let Doomed { mut process, mut stream, page } = doomed(world, listener, "writer");
            thread::sleep(Duration::from_millis(3));
            process.kill();
            process.wait();
            let committed = page.cursors().0;
            assert!(committed > 0);
            assert_eq!(read_to_death(&mut stream, 0), committed);
        }
    });
}

#[test]
fn reader_notices_death_of_slow_writer() {
    in_a_world("reader_notices_death_of_slow_writer", |world, listener| {
        let mut times = Vec::new();
        for _ in 0..5 {
            let Doomed { mut process, mut stream, page } = doomed(world, listener, "slow writer");
            thread::scope(|s| {
                let reader = s.spawn(|| (read_to_death(&mut stream, 0), Instant::now()));
                thread::sleep(Duration::from_millis(35));
                let killed = process.kill();
                let (read, dead) = reader.join().unwrap();
                times.push(dead - killed);
                assert_eq!(read, page.cursors().0);
            });
        }
        report("reading what comes slowly", &times);
    });
}

/// The survivor writes seldom, and has room: it sleeps on nothing that would tell it.
#[test]
fn slow_writer_notices_death_of_reader() {
    in_a_world("slow_writer_notices_death_of_reader", |world, listener| {
        let mut times = Vec::new();
        for role in ["idle", "reader", "idle", "reader"] {
            let Doomed { mut process, mut stream, .. } = doomed(world, listener, role);
            let mut killed = None;
            for round in 0.. {
                match stream.write(b"x") {
                    Ok(_) => {}
                    Err(e) => {
                        assert!(matches!(cause(&e), Error::Dead { attached: true }), "{e:?}");
                        times.push(killed.map(|at: Instant| at.elapsed()).unwrap());
                        break;
                    }
                }
                if round == 4 {
                    killed = Some(process.kill());
                }
                thread::sleep(Duration::from_millis(10));
            }
        }
        report("writing a byte every 10 ms", &times);
    });
}

#[test]
fn writer_notices_death_of_busy_or_blocking_reader() {
    in_a_world("writer_notices_death_of_busy_or_blocking_reader", |world, listener| {
        let mut dice = Dice::new(5);
        for role in ["reader", "idle"] {
            let mut times = Vec::new();
            for _ in 0..8 {
                let Doomed { mut process, mut stream, .. } = doomed(world, listener, role);
                thread::scope(|s| {
                    let writer = s.spawn(|| {
                        let bytes = Pattern.bytes(0, 30_000);
                        let refused = loop {
                            if let Err(e) = stream.write_all(&bytes) {
                                break e;
                            }
                        };
                        assert!(matches!(cause(&refused), Error::Dead { attached: true }), "{refused:?}");
                        Instant::now()
                    });
                    thread::sleep(Duration::from_millis(2 + dice.below(10)));
                    let killed = process.kill();
                    times.push(writer.join().unwrap() - killed);
                });
            }
            report(&format!("writing to a peer that is {role}"), &times);
        }
    });
}

#[test]
fn bytes_of_peer_killed_before_accept_are_readable() {
    in_a_world("bytes_of_peer_killed_before_accept_are_readable", |world, listener| {
        let mut process = child("slow writer", world.broker.path());
        eventually("it waits to be accepted", || {
            world.web.services().unwrap().iter().any(|row| row.name == "death" && row.waiting == 1)
        });
        eventually("it has said something", || {
            let channels = world.web.channels().unwrap();
            let pages = channels.iter().filter_map(|row| world.web.inspect(row.channel).ok()).flatten();
            pages.into_iter().any(|page| page.cursors().0 > 0)
        });
        process.kill();
        process.wait();
        // It may have been taken out of the backlog with its session; if not, it is there, with its bytes.
        listener.set_nonblocking(true);
        if let Ok((mut stream, _)) = listener.accept() {
            assert!(read_to_death(&mut stream, 0) > 0);
        }
    });
}

#[test]
fn connections_notice_death_of_listener() {
    in_a_world("connections_notice_death_of_listener", |world, _| {
        let mut process = child("listener", world.broker.path());
        let connect = || world.shop.connect_with("doomed:service", &fixed(4096)).ok();
        let mut accepted = None;
        eventually("it listens", || {
            accepted = connect();
            accepted.is_some()
        });
        let mut accepted = accepted.unwrap();
        accepted.read_exact(&mut [0; 5]).unwrap();
        // It accepts only one.
        let mut waiting = connect().unwrap();
        waiting.write_all(b"unread").unwrap();
        let killed = process.kill();
        assert_fails!(accepted.read(&mut [0; 9]), Error::Dead { attached: true });
        assert_fails!(waiting.read(&mut [0; 9]), Error::Dead { attached: false });
        report("two connections to a listener", &[killed.elapsed()]);
        eventually("writers learn it", || accepted.write(b"x").is_err() && waiting.write(b"x").is_err());
        process.wait();
    });
}

#[test]
fn subscriber_notices_death_of_publisher() {
    in_a_world("subscriber_notices_death_of_publisher", |world, _| {
        let mut process = child("publisher", world.broker.path());
        let mut subscriber = None;
        eventually("it publishes", || {
            subscriber = Subscriber::connect_with(&world.shop, "doomed:feed", &fixed(4096)).ok();
            subscriber.is_some()
        });
        let (mut subscriber, mut message, mut next) = (subscriber.unwrap(), Vec::new(), None);
        let (mut killed, mut received) = (None, 0);
        let end = loop {
            match subscriber.recv(&mut message) {
                Ok(()) => {
                    let number = u64::from_le_bytes(message[..].try_into().unwrap());
                    assert!(next.is_none_or(|next| number == next));
                    next = Some(number + 1);
                    received += 1;
                    if received == 1000 {
                        killed = Some(process.kill());
                    }
                }
                Err(e) => break e,
            }
        };
        assert!(matches!(end, Error::Dead { .. }), "{end:?}");
        report("subscribed", &[killed.unwrap().elapsed()]);
    });
}

/// Not a separate test: the process that is killed.
#[test]
fn child_main() {
    let Some((role, broker)) = process::role() else { return };
    let domain = Domain::builder().name("doomed").broker(&broker).join().unwrap();
    match role.as_str() {
        "listener" => {
            let mut listener = domain.bind("service").unwrap();
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(b"hello").unwrap();
            return thread::sleep(HANG);
        }
        "publisher" => {
            let mut publisher = Publisher::bind(&domain, "feed", SlowReader::Hold, &fixed(4096)).unwrap();
            for number in 0u64.. {
                publisher.send(&number.to_le_bytes()).unwrap();
            }
        }
        _ => {}
    }
    let mut stream = domain.connect_with("web:death", &adaptive(4096, 256 << 10)).unwrap();
    let mut dice = Dice::new(u64::from(std::process::id()));
    let mut at = 0;
    match role.as_str() {
        "writer" => {
            let writer = stream.writer().unwrap();
            loop {
                let n = dice.size(16);
                if dice.one_in(3) {
                    let mut span = writer.reserve(n).unwrap();
                    Pattern.fill(at, &mut span);
                    span.commit(n);
                } else {
                    writer.write_all(&Pattern.bytes(at, n)).unwrap();
                }
                at += n as u64;
                if dice.one_in(100) {
                    writer.trim().unwrap();
                }
            }
        }
        "slow writer" => loop {
            stream.write_all(&Pattern.bytes(at, 1)).unwrap();
            at += 1;
            thread::sleep(Duration::from_millis(10));
        },
        "reader" => {
            stream.write_all(&Pattern.bytes(0, 1)).unwrap();
            let mut buf = vec![0; 10_000];
            while stream.read(&mut buf).is_ok_and(|n| n > 0) {}
        }
        _ => {
            stream.write_all(&Pattern.bytes(0, 1)).unwrap();
            thread::sleep(HANG);
        }
    }
}
