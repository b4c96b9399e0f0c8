//! `poll` with connections that have rings, both ends in this process.

#![expect(unsafe_code, reason = "calls the exported functions as a program does")]

use super::super::epoll::tests::{drain, fill, interrupted, receive, send};
use super::super::testing::{close, low_water, recv, shutdown};
use super::*;
use crate::conn::Pair;
use rustix::fd::AsRawFd;
use rustix::io::Errno;
use std::time::{Duration, Instant};

const IN: i16 = libc::POLLIN;
const OUT: i16 = libc::POLLOUT;
const RDHUP: i16 = libc::POLLRDHUP;
const HUP: i16 = libc::POLLHUP;
/// A test that takes so long hangs.
const LONG: c_int = 100_000;

fn up() -> Pair {
    Pair::up(64 << 10)
}

/// The events that are found for each of the descriptors.
fn ask(asked: &[(c_int, i16)], timeout: c_int) -> Result<Vec<i16>, Errno> {
    let mut fds: Vec<_> = asked.iter().map(|&(fd, events)| pollfd { fd, events, revents: 77 }).collect();
    let start = Instant::now();
    // SAFETY: memory and descriptors of this test.
    let n = unsafe { poll(fds.as_mut_ptr(), fds.len() as nfds_t, timeout) };
    assert!(n <= 0 || start.elapsed() < Duration::from_secs(60), "found when time was up: nobody was woken");
    if n < 0 {
        return Err(sys::errno());
    }
    assert_eq!(n as usize, fds.iter().filter(|one| one.revents != 0).count());
    assert!(fds.iter().zip(asked).all(|(one, &(fd, events))| one.fd == fd && one.events == events), "left alone");
    Ok(fds.iter().map(|one| one.revents).collect())
}

#[test]
fn poll_reports_rings_and_other_descriptors_together() {
    let (pairs, (reader, writer)) = ([up(), up()], rustix::pipe::pipe().unwrap());
    let asked = [(pairs[0].b, IN), (-5, IN), (reader.as_raw_fd(), IN), (pairs[1].b, IN | OUT), (9999, IN)];
    assert_eq!(ask(&asked[..4], 0).unwrap(), [0, 0, 0, OUT]);
    send(pairs[0].a, b"x").unwrap();
    rustix::io::write(&writer, b"x").unwrap();
    assert_eq!(ask(&asked, LONG).unwrap(), [IN, 0, IN, OUT, libc::POLLNVAL]);
    receive(pairs[0].b, 1).unwrap();
    assert_eq!(ask(&asked, 0).unwrap(), [0, 0, IN, OUT, libc::POLLNVAL]);
    assert_eq!(ask(&[(pairs[0].b, 0)], 0).unwrap(), [0]);
}

#[test]
fn poll_sleeper_is_woken_by_ring_and_by_pipe() {
    let (pair, (reader, writer)) = (up(), rustix::pipe::pipe().unwrap());
    for round in 0..10 {
        for with_pipe in [true, false] {
            let asked = [(pair.b, IN), (if with_pipe { reader.as_raw_fd() } else { -1 }, IN)];
            std::thread::scope(|s| {
                let sleeper = s.spawn(|| ask(&asked, LONG).unwrap());
                std::thread::sleep(Duration::from_millis(round % 3 * 4));
                send(pair.a, b"x").unwrap();
                assert_eq!(sleeper.join().unwrap(), [IN, 0]);
            });
            receive(pair.b, 1).unwrap();
        }
        std::thread::scope(|s| {
            let sleeper = s.spawn(|| ask(&[(pair.b, IN), (reader.as_raw_fd(), IN)], LONG).unwrap());
            std::thread::sleep(Duration::from_millis(round % 3 * 4));
            rustix::io::write(&writer, b"x").unwrap();
            assert_eq!(sleeper.join().unwrap(), [0, IN]);
        });
        rustix::io::read(&reader, &mut [0; 1]).unwrap();
    }
}

#[test]
fn poll_reports_room_and_ends() {
    let mut pair = up();
    send(pair.a, b"x").unwrap();
    receive(pair.b, 1).unwrap();
    fill(pair.a);
    assert_eq!(ask(&[(pair.a, OUT)], 0).unwrap(), [0]);
    std::thread::scope(|s| {
        let sleeper = s.spawn(|| ask(&[(pair.a, OUT)], LONG).unwrap());
        std::thread::sleep(Duration::from_millis(10));
        drain(pair.b);
        assert_eq!(sleeper.join().unwrap(), [OUT]);
    });
    std::thread::scope(|s| {
        let sleeper = s.spawn(|| ask(&[(pair.b, IN | RDHUP)], LONG).unwrap());
        std::thread::sleep(Duration::from_millis(10));
        shutdown(pair.a, libc::SHUT_WR);
        assert_eq!(sleeper.join().unwrap(), [IN | RDHUP]);
    });
    assert_eq!(ask(&[(pair.b, OUT | RDHUP)], 0).unwrap(), [OUT | RDHUP]);
    shutdown(pair.b, libc::SHUT_WR);
    assert_eq!(ask(&[(pair.b, IN)], LONG).unwrap(), [IN | HUP]);
    close(pair.a);
    pair.a = -1;
    assert_eq!(ask(&[(pair.b, 0)], LONG).unwrap(), [HUP]);
}

#[test]
fn poll_ignores_data_below_low_water_mark() {
    let pair = up();
    low_water(pair.b, 5);
    send(pair.a, b"abc").unwrap();
    assert_eq!(ask(&[(pair.b, IN)], 0).unwrap(), [0]);
    std::thread::scope(|s| {
        let sleeper = s.spawn(|| ask(&[(pair.b, IN)], LONG).unwrap());
        std::thread::sleep(Duration::from_millis(10));
        send(pair.a, b"d").unwrap();
        std::thread::sleep(Duration::from_millis(10));
        assert!(!sleeper.is_finished());
        send(pair.a, b"e").unwrap();
        assert_eq!(sleeper.join().unwrap(), [IN]);
    });
    assert_eq!(receive(pair.b, 10).unwrap(), b"abcde");
    // A caller that asks for fewer bytes gets them.
    send(pair.a, b"fg").unwrap();
    assert_eq!(ask(&[(pair.b, IN)], 0).unwrap(), [0]);
    assert_eq!(receive(pair.b, 2).unwrap(), b"fg");
}

#[test]
fn end_is_found_by_poll_without_waiting() {
    let pair = up();
    assert_eq!(ask(&[(pair.b, IN)], 0).unwrap(), [0]);
    shutdown(pair.a, libc::SHUT_WR);
    let deadline = Instant::now() + Duration::from_secs(100);
    while ask(&[(pair.b, IN)], 0).unwrap() != [IN] {
        assert!(Instant::now() < deadline);
    }
}

#[test]
fn error_met_behind_bytes_is_polled_until_it_is_returned() {
    const ERR: i16 = libc::POLLERR;
    for (asked, told) in [(0, ERR | HUP), (IN | RDHUP, IN | RDHUP | ERR | HUP)] {
        let mut p = up();
        send(p.a, b"never read").unwrap();
        send(p.b, b"read").unwrap();
        close(p.b);
        p.b = -1;
        assert_eq!(recv(p.a, 100, libc::MSG_WAITALL).unwrap(), b"read");
        assert_eq!(ask(&[(p.a, asked)], 0).unwrap(), [told]);
        assert_eq!(recv(p.a, 100, 0), Err(Errno::CONNRESET));
        assert_eq!(ask(&[(p.a, asked)], 0).unwrap(), [told & !ERR]);
    }
}

#[test]
fn bytes_over_tcp_are_polled_beside_ring() {
    let pair = Pair::candidates(4096);
    send(pair.a, b"early").unwrap();
    pair.bring_up();
    assert_eq!(ask(&[(pair.b, IN)], LONG).unwrap(), [IN]);
    receive(pair.b, 9).unwrap();
    assert_eq!(ask(&[(pair.b, IN)], 5).unwrap(), [0]);
}

#[test]
fn poll_sleeper_on_tcp_counts_until_it_wakes() {
    let pair = Pair::candidates(4096);
    std::thread::scope(|s| {
        let sleeper = s.spawn(|| ask(&[(pair.b, IN)], LONG).unwrap());
        let deadline = Instant::now() + Duration::from_secs(100);
        while !pair.conn_b().is_slept_on() {
            assert!(Instant::now() < deadline, "it must not get a ring meanwhile");
        }
        send(pair.a, b"x").unwrap();
        assert_eq!(sleeper.join().unwrap(), [IN]);
    });
    assert!(!pair.conn_b().is_slept_on());
    assert_eq!(receive(pair.b, 9).unwrap(), b"x");
    pair.bring_up();
    assert_eq!(ask(&[(pair.b, IN)], 5).unwrap(), [0]);
}

#[test]
fn poll_of_forty_connections_finds_the_ready_one() {
    let pairs: Vec<_> = (0..40).map(|_| up()).collect();
    let asked: Vec<_> = pairs.iter().map(|p| (p.b, IN)).collect();
    for n in [0, 17, 39] {
        std::thread::scope(|s| {
            let sleeper = s.spawn(|| ask(&asked, LONG).unwrap());
            std::thread::sleep(Duration::from_millis(5));
            send(pairs[n].a, b"x").unwrap();
            let found = sleeper.join().unwrap();
            assert!(found.iter().enumerate().all(|(i, &f)| (f == IN) == (i == n)), "{found:?}");
        });
        receive(pairs[n].b, 1).unwrap();
    }
}

#[test]
fn signals_and_times_are_the_kernels() {
    let pair = up();
    assert_eq!(interrupted(|| ask(&[(pair.b, IN)], LONG)), Err(Errno::INTR));
    assert_eq!(interrupted(|| ask(&[(pair.b, IN), (0, 0)], LONG)), Err(Errno::INTR));
    let result = interrupted(|| {
        // SAFETY: memory and descriptors of this test.
        let mut all: sigset_t = unsafe { std::mem::zeroed() };
        let mut none = all;
        let mut one = pollfd { fd: pair.b, events: IN, revents: 0 };
        let long = timespec { tv_sec: 100, tv_nsec: 0 };
        let short = timespec { tv_sec: 0, tv_nsec: 50_000_000 };
        // SAFETY: memory and descriptors of this test.
        unsafe {
            libc::sigfillset(&raw mut all);
            libc::sigemptyset(&raw mut none);
            libc::pthread_sigmask(libc::SIG_BLOCK, &raw const all, ptr::null_mut());
            let blocked = ppoll(&raw mut one, 1, &raw const short, ptr::null());
            let open = ppoll(&raw mut one, 1, &raw const long, &raw const none);
            (blocked, open, sys::errno())
        }
    });
    assert_eq!(result, (0, -1, Errno::INTR));
    for millis in [1, 20] {
        let start = Instant::now();
        assert_eq!(ask(&[(pair.b, IN)], millis).unwrap(), [0]);
        assert!(start.elapsed() >= Duration::from_millis(millis as u64));
    }
    let bad = timespec { tv_sec: 0, tv_nsec: 1_000_000_000 };
    let mut one = pollfd { fd: pair.b, events: IN, revents: 0 };
    // SAFETY: memory and descriptors of this test.
    assert_eq!(unsafe { ppoll(&raw mut one, 1, &raw const bad, ptr::null()) }, -1);
    assert_eq!(sys::errno(), Errno::INVAL);
}
