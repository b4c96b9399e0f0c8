//! Not waiting, waiting for a while, and being told: non-blocking halves, timeouts, descriptors to poll, counters.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;

use common::*;
use partywall::{Error, Options, WriteHalf};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd};
use std::thread;
use std::time::{Duration, Instant};

const SHORT: Duration = Duration::from_millis(30);

#[test]
fn non_blocking_halves_say_that_they_would_block() {
    let _guard = hang_guard();
    let (mut a, mut b) = pair(&fixed(4096));
    a.set_nonblocking(true);
    b.set_nonblocking(true);
    assert_fails!(b.read(&mut [0; 10]), Error::WouldBlock);
    assert_fails!(b.reader().unwrap().peek(), Error::WouldBlock);
    assert_eq!(a.write(&[1; 5000]).unwrap(), 4096, "what fits");
    assert_fails!(a.write(&[1]), Error::WouldBlock);
    assert_fails!(a.writer().unwrap().reserve(1), Error::WouldBlock);
    assert_eq!(b.read(&mut [0; 1000]).unwrap(), 1000);
    assert_fails!(a.writer().unwrap().reserve(1001), Error::WouldBlock);
    assert_eq!(a.writer().unwrap().reserve(1000).unwrap().len(), 1000);
    assert_eq!(a.write(&[2; 5000]).unwrap(), 1000);
    let mut all = vec![0; 4096];
    b.read_exact(&mut all).unwrap();
    assert!(all[..3096].iter().all(|&x| x == 1) && all[3096..].iter().all(|&x| x == 2));
    assert_fails!(b.read(&mut all), Error::WouldBlock);
}

/// Both halves non-blocking, driven by `poll` on their descriptors alone.
#[test]
fn polling_the_descriptors_drives_both_directions() {
    let _guard = hang_guard();
    let (mut a, mut b) = pair(&fixed(4096));
    a.set_nonblocking(true);
    b.set_nonblocking(true);
    const TOTAL: u64 = 2 << 20;
    thread::scope(|s| {
        s.spawn(move || {
            let (mut at, mut dice) = (0, Dice::new(3));
            while at < TOTAL {
                let n = (dice.size(13) as u64).min(TOTAL - at) as usize;
                match a.write(&Pattern.bytes(at, n)) {
                    Ok(n) => at += n as u64,
                    Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {
                        assert!(readable(a.writer().unwrap(), HANG / 2), "not told of room");
                    }
                    Err(e) => panic!("{e}"),
                }
            }
        });
        let (mut at, mut dice, mut buf) = (0, Dice::new(4), vec![0; 1 << 13]);
        loop {
            let n = dice.size(13);
            match b.read(&mut buf[..n]) {
                Ok(0) => break,
                Ok(n) => {
                    Pattern.check(at, &buf[..n]);
                    at += n as u64;
                }
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {
                    assert!(readable(b.reader().unwrap(), HANG / 2), "not told of bytes");
                }
                Err(e) => panic!("{e}"),
            }
        }
        assert_eq!(at, TOTAL);
    });
}

#[test]
fn descriptor_is_readable_only_when_there_is_news() {
    let (mut a, mut b) = pair(&fixed(4096));
    a.set_nonblocking(true);
    b.set_nonblocking(true);
    assert!(!readable(b.reader().unwrap(), Duration::ZERO));
    assert_fails!(b.read(&mut [0; 10]), Error::WouldBlock);
    assert!(!readable(b.reader().unwrap(), Duration::ZERO), "still nothing");
    a.write_all(b"x").unwrap();
    assert!(readable(b.reader().unwrap(), HANG));
    assert_eq!(b.read(&mut [0; 10]).unwrap(), 1);
    // Rings that are left are taken by the call that finds nothing.
    assert_fails!(b.read(&mut [0; 10]), Error::WouldBlock);
    assert!(!readable(b.reader().unwrap(), Duration::ZERO));

    assert_eq!(a.write(&[0; 9999]).unwrap(), 4096);
    assert_fails!(a.write(b"x"), Error::WouldBlock);
    assert!(!readable(a.writer().unwrap(), Duration::ZERO));
    assert_eq!(b.read(&mut [0; 9999]).unwrap(), 4096);
    assert!(readable(a.writer().unwrap(), HANG));
    drop(b);
    assert!(readable(a.reader().unwrap(), HANG), "the end is news");
    assert!(readable(a.writer().unwrap(), HANG), "the end is news");
    assert_eq!(a.reader().unwrap().as_fd().as_raw_fd(), a.reader().unwrap().as_raw_fd());
}

#[test]
fn timeouts_end_waits_and_lose_nothing() {
    let _guard = hang_guard();
    for spin in [Duration::ZERO, Duration::from_micros(100)] {
        let (mut a, mut b) = pair(&fixed(4096).spin(spin));
        a.set_write_timeout(Some(SHORT));
        b.set_read_timeout(Some(SHORT));
        let start = Instant::now();
        assert_fails!(b.read(&mut [0; 10]), Error::TimedOut);
        assert!(start.elapsed() >= SHORT, "not early");
        a.write_all(b"abc").unwrap();
        assert_fails!(b.reader().unwrap().peek_at_least(4), Error::TimedOut);
        let mut buf = [0; 10];
        assert_eq!(b.read(&mut buf).unwrap(), 3);
        assert_eq!(&buf[..3], b"abc");

        assert_eq!(a.write(&[7; 5000]).unwrap(), 4096, "what was written counts");
        let start = Instant::now();
        assert_fails!(a.write(&[7; 5000]), Error::TimedOut);
        assert_fails!(a.writer().unwrap().reserve(1), Error::TimedOut);
        assert!(start.elapsed() >= 2 * SHORT, "not early");
        let mut all = vec![0; 4096];
        b.read_exact(&mut all).unwrap();
        assert!(all.iter().all(|&x| x == 7));
        a.set_write_timeout(None);
        a.write_all(b"again").unwrap();
        b.set_read_timeout(None);
        assert_eq!(b.read(&mut all).unwrap(), 5);
    }
}

#[test]
fn timeout_of_any_length_is_accepted() {
    let (mut a, mut b) = pair(&fixed(4096));
    b.set_read_timeout(Some(Duration::ZERO));
    assert_fails!(b.read(&mut [0]), Error::TimedOut);
    b.set_read_timeout(Some(Duration::MAX));
    thread::scope(|s| {
        s.spawn(move || {
            thread::sleep(SHORT);
            a.write_all(b"x").unwrap();
            a
        });
        assert_eq!(b.read(&mut [0; 2]).unwrap(), 1);
    });
}

#[test]
fn long_spin_ends_at_timeout_or_shutdown() {
    let _guard = hang_guard();
    let spinning = fixed(4096).spin(Duration::from_secs(3600));
    let (mut a, mut b) = pair(&spinning);
    b.set_read_timeout(Some(SHORT));
    assert_fails!(b.read(&mut [0]), Error::TimedOut);
    b.set_read_timeout(None);
    thread::scope(|s| {
        let reader = s.spawn(move || b.read(&mut [0]).unwrap());
        thread::sleep(SHORT);
        a.shutdown(Shutdown::Both).unwrap();
        assert_eq!(reader.join().unwrap(), 0);
    });
}

#[test]
fn peeked_bytes_stay_until_they_are_released() {
    let _guard = hang_guard();
    let (mut a, mut b) = pair(&fixed(4096));
    let reader = b.reader().unwrap();
    for round in 0..200u64 {
        let at = round * 1000;
        a.write_all(&Pattern.bytes(at, 1000)).unwrap();
        let peeked = reader.peek_at_least(1000).unwrap();
        assert_eq!(peeked.len(), 1000);
        let mut copy = vec![0; 400];
        assert_eq!(peeked.copy_to(300, &mut copy), 400);
        Pattern.check(at + 300, &copy);
        assert_eq!(peeked.copy_to(900, &mut copy), 100, "as many as there are");
        assert_eq!(peeked.copy_to(1001, &mut copy), 0);
        assert!(!peeked.as_ptr().is_null());
        let peeked = reader.peek().unwrap();
        assert_eq!(peeked.len(), 1000, "looking takes nothing");
        peeked.release(250);
        let mut rest = vec![0; 750];
        reader.read_exact(&mut rest).unwrap();
        Pattern.check(at + 250, &rest);
    }
}

#[test]
fn peek_at_least_waits_for_as_much_as_asked() {
    let _guard = hang_guard();
    let (mut a, mut b) = pair(&fixed(4096));
    thread::scope(|s| {
        s.spawn(move || {
            for at in 0..4096 {
                a.write_all(&Pattern.bytes(at, 1)).unwrap();
                if at % 512 == 0 {
                    thread::sleep(Duration::from_millis(1));
                }
            }
            a
        });
        let reader = b.reader().unwrap();
        let peeked = reader.peek_at_least(300).unwrap();
        assert!(peeked.len() >= 300, "{} of 300", peeked.len());
        peeked.release(300);
        assert!(reader.peek_at_least(3000).unwrap().len() >= 3000);
        assert_eq!(reader.peek_at_least(3796).unwrap().len(), 3796);
    });
}

#[test]
fn descriptor_receives_bytes_straight_from_ring() {
    let _guard = hang_guard();
    let (mut a, mut b) = pair(&fixed(8192));
    let (mut from_pipe, to_pipe) = std::io::pipe().unwrap();
    thread::scope(|s| {
        s.spawn(move || Pattern.send(&mut a, 1 << 20, || 5000));
        s.spawn(move || {
            let reader = b.reader().unwrap();
            loop {
                let peeked = reader.peek().unwrap();
                if peeked.is_empty() {
                    break;
                }
                let n = peeked.write_to(&to_pipe, 3000).unwrap();
                assert!(n > 0 && n <= 3000);
                peeked.release(n);
            }
        });
        assert_eq!(Pattern.receive(&mut from_pipe, || 10_000), 1 << 20);
    });
}

#[test]
fn writing_to_a_bad_descriptor_is_an_error_and_takes_nothing() {
    let (mut a, mut b) = pair(&fixed(4096));
    a.write_all(b"bytes").unwrap();
    let (reader, _writer) = std::io::pipe().unwrap();
    let peeked = b.reader().unwrap().peek().unwrap();
    assert!(peeked.write_to(&reader, 5).is_err(), "the wrong end");
    assert_eq!(peeked.len(), 5);
}

#[test]
fn counters_count() {
    let (mut a, mut b) = pair(&fixed(4096));
    for _ in 0..10 {
        a.write_all(&[0; 100]).unwrap();
    }
    assert_eq!(b.read(&mut [0; 4096]).unwrap(), 1000);
    let (written, read) = (a.writer().unwrap().counters(), b.reader().unwrap().counters());
    assert_eq!((written.bytes, written.messages), (1000, 10));
    assert_eq!((read.bytes, read.messages), (1000, 1));
    assert_eq!(written.bells_rung, 0, "nobody slept");
    assert_eq!((written.stalls, read.stalls), (0, 0));
    b.set_nonblocking(true);
    assert_fails!(b.read(&mut [0]), Error::WouldBlock);
    assert_eq!(b.reader().unwrap().counters().stalls, 1);
    a.write_all(b"x").unwrap();
    assert_eq!(a.writer().unwrap().counters().bells_rung, 1, "one who waits is rung");
    a.write_all(b"x").unwrap();
    assert_eq!(a.writer().unwrap().counters().bells_rung, 1, "once");
}

#[test]
fn idle_connection_uses_no_cpu() {
    let _guard = hang_guard();
    let (mut a, mut b) = pair(&Options::default());
    thread::scope(|s| {
        let reader = s.spawn(move || {
            let before = thread_cpu();
            b.read_exact(&mut [0; 1]).unwrap();
            thread_cpu() - before
        });
        thread::sleep(Duration::from_millis(1500));
        a.write_all(b"x").unwrap();
        // The spin's budget and the calls around it, and what other machines on this host take meanwhile. A waiter that does not
        // sleep would have used all 1500.
        let used = reader.join().unwrap();
        assert!(used < Duration::from_millis(750), "{used:?}");
    });
}

fn thread_cpu() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(now.tv_sec.cast_unsigned(), u32::try_from(now.tv_nsec).unwrap())
}

/// Before the peer has accepted, each write rings. A writer that never has to wait finds out all the same when that is over.
#[test]
fn writer_stops_ringing_after_peer_has_attached() {
    let _guard = hang_guard();
    let world = World::new();
    let mut listener = world.web.bind("late").unwrap();
    let mut there = world.shop.connect_with("web:late", &fixed(1 << 20)).unwrap();
    let writer = there.writer().unwrap();
    for _ in 0..20 {
        writer.write_all(b"x").unwrap();
    }
    assert_eq!(writer.counters().bells_rung, 20);
    let _here = listener.accept().unwrap();
    for _ in 0..1000 {
        writer.write_all(b"x").unwrap();
    }
    assert!(writer.counters().bells_rung < 30, "{} rings", writer.counters().bells_rung);
}

/// Before the peer has accepted, each write rings: the link fills. A larger ring comes by the broker.
#[test]
fn larger_ring_is_used_though_the_link_is_full() {
    let _guard = hang_guard();
    let world = World::new();
    let options = adaptive(4096, 1 << 20);
    let mut listener = world.web.bind_with("late", &options).unwrap();
    let mut there = world.shop.connect_with("web:late", &options).unwrap();
    let writer = there.writer().unwrap();
    writer.set_nonblocking(true);
    for at in 0..4096 {
        writer.write_all(&Pattern.bytes(at, 1)).unwrap();
    }
    let mut here = listener.accept().unwrap().0;
    // Until the broker has answered there is no room, and no call waits for that.
    eventually("there is a larger ring", || match writer.reserve(10_000) {
        Ok(_) => true,
        Err(Error::WouldBlock) => false,
        Err(e) => panic!("{e}"),
    });
    let writable = |writer: &WriteHalf| {
        let mut fds = [PollFd::new(writer, PollFlags::OUT)];
        poll(&mut fds, Some(&Timespec::default())).unwrap() == 1
    };
    assert!(!writable(writer), "the link is full");
    assert!(!readable(&*writer, Duration::ZERO), "nobody is going to ring");

    // The peer takes the doorbells when it waits for more than there is.
    here.set_nonblocking(true);
    let mut received = [0; 4096];
    here.read_exact(&mut received).unwrap();
    Pattern.check(0, &received);
    eventually("the link has room", || {
        assert_fails!(here.read(&mut [0]), Error::WouldBlock);
        writable(writer)
    });
    let mut span = writer.reserve(10_000).unwrap();
    Pattern.fill(4096, &mut span);
    span.commit(10_000);
    let mut received = vec![0; 10_000];
    here.read_exact(&mut received).unwrap();
    Pattern.check(4096, &received);
    assert_eq!(writer.ring_size(), 16_384);
}
