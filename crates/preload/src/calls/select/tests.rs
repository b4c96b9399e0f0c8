//! `select` with connections that have rings, both ends in this process.

#![expect(unsafe_code, reason = "calls the exported functions as a program does")]

use super::super::epoll::tests::{fill, interrupted, receive, send};
use super::super::testing::shutdown;
use super::*;
use crate::conn::Pair;
use rustix::fd::AsRawFd;

fn up() -> Pair {
    Pair::up(64 << 10)
}

fn set_of(fds: &[c_int]) -> fd_set {
    // SAFETY: memory and descriptors of this test.
    let mut set: fd_set = unsafe { std::mem::zeroed() };
    for fd in fds {
        // SAFETY: memory and descriptors of this test.
        unsafe { libc::FD_SET(*fd, &raw mut set) };
    }
    set
}

/// The descriptors left in each of the three sets, and the time left.
fn ask(sets: [&[c_int]; 3], millis: i64) -> Result<(c_int, [Vec<c_int>; 3], Duration), Errno> {
    let mut given = sets.map(set_of);
    let mut time = timeval { tv_sec: millis / 1000, tv_usec: millis % 1000 * 1000 };
    let [r, w, e] = &mut given;
    // SAFETY: memory and descriptors of this test.
    let n = unsafe { select(1024, r, w, e, &raw mut time) };
    if n < 0 {
        return Err(sys::errno());
    }
    // SAFETY: memory and descriptors of this test.
    let left = given.map(|set| (0..1024).filter(|fd| unsafe { libc::FD_ISSET(*fd, &raw const set) }).collect());
    Ok((n, left, Duration::new(time.tv_sec as u64, time.tv_usec as u32 * 1000)))
}

#[test]
fn select_leaves_only_ready_descriptors_in_sets() {
    let (pairs, (reader, writer)) = ([up(), up()], rustix::pipe::pipe().unwrap());
    let read = [pairs[0].b, pairs[1].b, reader.as_raw_fd()];
    let (n, left, time) = ask([&read, &[pairs[0].b], &read], 100_000).unwrap();
    assert_eq!((n, &left), (1, &[vec![], vec![pairs[0].b], vec![]]));
    assert!(time > Duration::from_secs(50), "what is left of the time is returned");
    send(pairs[1].a, b"x").unwrap();
    rustix::io::write(&writer, b"x").unwrap();
    let (n, mut left, _) = ask([&read, &[pairs[0].b], &[]], 100_000).unwrap();
    left[0].sort_unstable();
    let mut wanted = vec![pairs[1].b, reader.as_raw_fd()];
    wanted.sort_unstable();
    assert_eq!((n, left), (3, [wanted, vec![pairs[0].b], vec![]]));
    receive(pairs[1].b, 1).unwrap();
    rustix::io::read(&reader, &mut [0; 1]).unwrap();
    let (n, left, time) = ask([&read, &[], &[]], 10).unwrap();
    assert_eq!((n, left, time), (0, [vec![], vec![], vec![]], Duration::ZERO));
}

#[test]
fn select_sleeper_is_woken_and_two_sets_count_twice() {
    let pair = up();
    std::thread::scope(|s| {
        let sleeper = s.spawn(|| ask([&[pair.b], &[], &[pair.b]], 100_000).unwrap());
        std::thread::sleep(Duration::from_millis(10));
        send(pair.a, b"x").unwrap();
        assert_eq!(sleeper.join().unwrap().1, [vec![pair.b], vec![], vec![]]);
    });
    assert_eq!(ask([&[pair.b], &[pair.b], &[]], 100_000).unwrap().0, 2);
}

#[test]
fn end_of_stream_does_not_end_wait_for_exceptions() {
    let pair = up();
    send(pair.a, b"x").unwrap();
    receive(pair.b, 1).unwrap();
    for end in [pair.a, pair.b] {
        shutdown(end, libc::SHUT_WR);
    }
    // `poll` would report HUP on every call; `select` has no exception to report.
    let (n, left, time) = ask([&[], &[], &[pair.a]], 30).unwrap();
    assert_eq!((n, left, time), (0, [vec![], vec![], vec![]], Duration::ZERO), "it waits on");
}

#[test]
fn descriptors_that_are_none_and_signals_are_errors() {
    let pair = up();
    fill(pair.a);
    assert_eq!(ask([&[pair.b, 1000], &[], &[]], 10), Err(Errno::BADF));
    assert_eq!(interrupted(|| ask([&[pair.a], &[], &[]], 100_000)), Err(Errno::INTR));
    let mut set = set_of(&[pair.a]);
    let time = timespec { tv_sec: 0, tv_nsec: -1 };
    assert_eq!(
        // SAFETY: memory and descriptors of this test.
        unsafe { pselect(1024, &raw mut set, ptr::null_mut(), ptr::null_mut(), &raw const time, ptr::null()) },
        -1
    );
    assert_eq!(sys::errno(), Errno::INVAL);
    // SAFETY: memory and descriptors of this test.
    assert_eq!(unsafe { select(-1, &raw mut set, ptr::null_mut(), ptr::null_mut(), ptr::null_mut()) }, -1);
    assert_eq!(sys::errno(), Errno::INVAL);
}

#[test]
fn pselect6_by_number_finds_ready_connection() {
    let pair = up();
    send(pair.a, b"x").unwrap();
    let blocked = 1u64 << (libc::SIGUSR1 - 1);
    let mask = MaskArgument { mask: &raw const blocked, size: 8 };
    let call = |mask: *const MaskArgument, millis: i64| {
        let (mut set, mut time) = (set_of(&[pair.b]), timespec { tv_sec: 0, tv_nsec: millis * 1_000_000 });
        let none = 0;
        let (read, limit, mask) = ((&raw mut set).addr(), (&raw mut time).addr(), mask.addr());
        let [read, limit, mask] = [read, limit, mask].map(|pointer| pointer as libc::c_ulong);
        // SAFETY: memory and descriptors of this test.
        let n = unsafe { super::super::syscall::syscall(libc::SYS_pselect6, 1024, read, none, none, limit, mask) };
        (n, time)
    };
    for mask in [ptr::null(), &raw const mask] {
        let (n, time) = call(mask, 900);
        assert_eq!(n, 1);
        assert!(time.tv_nsec < 900_000_000, "what is left of the time is returned");
    }
    let refused = MaskArgument { mask: &raw const blocked, size: 4 };
    assert_eq!((call(&raw const refused, 900).0, sys::errno()), (-1, Errno::INVAL));
    receive(pair.b, 1).unwrap();
    let (n, time) = call(ptr::null(), 1);
    assert_eq!((n, time.tv_sec, time.tv_nsec), (0, 0, 0));
}
