//! Sets with connections that have rings, both ends in this process.

#![expect(unsafe_code, reason = "calls the exported functions as a program does")]

use super::super::testing::{EpollSet as Set, HUNG, LONG, close, dup, dup2, low_water, shutdown};
use super::super::{read, write};
use super::*;
use crate::conn::{Conn, Pair};
use crate::sys;
use rustix::io::Errno;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

mod bells;
mod early;
mod ends;
mod identity;
mod interrupts;
mod sleepers;

const IN: u32 = libc::EPOLLIN as u32;
const OUT: u32 = libc::EPOLLOUT as u32;
const RDHUP: u32 = libc::EPOLLRDHUP as u32;
const HUP: u32 = libc::EPOLLHUP as u32;
const ET: u32 = libc::EPOLLET as u32;
const ONESHOT: u32 = libc::EPOLLONESHOT as u32;
const EXCLUSIVE: u32 = libc::EPOLLEXCLUSIVE as u32;
/// Long enough for anything in transit to arrive.
const SOON: c_int = 30;

fn candidates() -> Pair {
    Pair::candidates(64 << 10)
}

fn up() -> Pair {
    Pair::up(64 << 10)
}

pub(in crate::calls) fn send(fd: c_int, bytes: &[u8]) -> Result<usize, Errno> {
    // SAFETY: memory and descriptors of this test.
    sys::take(unsafe { write::send(fd, bytes.as_ptr().cast(), bytes.len(), libc::MSG_DONTWAIT) })
}

pub(in crate::calls) fn receive(fd: c_int, len: usize) -> Result<Vec<u8>, Errno> {
    let mut buffer = vec![0; len];
    // SAFETY: memory and descriptors of this test.
    let n = sys::take(unsafe { read::recv(fd, buffer.as_mut_ptr().cast(), len, libc::MSG_DONTWAIT) })?;
    buffer.truncate(n);
    Ok(buffer)
}

/// Sends until there is no more room; how much went.
pub(in crate::calls) fn fill(fd: c_int) -> usize {
    let piece = [7u8; 4096];
    let mut sent = 0;
    loop {
        match send(fd, &piece) {
            Ok(n) => sent += n,
            Err(error) => {
                assert_eq!(error, Errno::AGAIN);
                return sent;
            }
        }
    }
}

pub(in crate::calls) fn drain(fd: c_int) -> usize {
    let mut got = 0;
    while let Ok(bytes) = receive(fd, 1 << 16) {
        got += bytes.len();
    }
    got
}

#[test]
fn setting_low_water_mark_is_edge_for_unread_bytes() {
    let (p, set) = (up(), Set::new());
    set.add(p.b, IN | ET, 7);
    send(p.a, b"twelve bytes").unwrap();
    assert_eq!(set.wait(), [(IN, 7)]);
    assert_eq!(set.now(), [], "told once");
    low_water(p.b, 1);
    assert_eq!(set.now(), [(IN, 7)]);
    assert_eq!(set.now(), [], "told once");
    low_water(p.b, 100);
    assert_eq!(set.now(), [], "less than that is no news");
    receive(p.b, 100).unwrap();
    low_water(p.b, 1);
    assert_eq!(set.now(), [], "there is nothing to read");
}

#[test]
fn lowering_low_water_mark_wakes_epoll_sleeper() {
    let (p, set) = (up(), Set::new());
    low_water(p.b, 100);
    set.add(p.b, IN, 7);
    send(p.a, b"twelve bytes").unwrap();
    assert_eq!(set.now(), []);
    std::thread::scope(|scope| {
        let sleeper = scope.spawn(|| set.wait());
        std::thread::sleep(Duration::from_millis(50));
        low_water(p.b, 1);
        assert_eq!(sleeper.join().unwrap(), [(IN, 7)]);
    });
}

#[test]
fn level_triggered_readiness_lasts_until_all_is_read() {
    let (set, pair) = (Set::new(), up());
    set.add(pair.b, IN, 77);
    assert_eq!(set.now(), []);
    send(pair.a, b"abc").unwrap();
    assert_eq!(set.wait(), [(IN, 77)]);
    assert_eq!(receive(pair.b, 2).unwrap(), b"ab");
    assert_eq!(set.now(), [(IN, 77)], "one byte is left");
    receive(pair.b, 2).unwrap();
    assert_eq!(set.now(), []);
    assert_eq!(set.wait_for(16, SOON).unwrap(), []);
}

#[test]
fn registration_before_ring_keeps_programs_event_data() {
    for flags in [0, ET] {
        let (set, pair) = (Set::new(), candidates());
        set.add(pair.b, IN | flags, u64::MAX);
        send(pair.a, b"over TCP").unwrap();
        assert_eq!(set.wait(), [(IN, u64::MAX)]);
        assert_eq!(receive(pair.b, 100).unwrap(), b"over TCP");
        pair.bring_up();
        assert!(set.now().iter().all(|e| e.1 == u64::MAX), "at most one too many");
        send(pair.a, b"by the ring").unwrap();
        assert_eq!(set.wait(), [(IN, u64::MAX)]);
        assert_eq!(receive(pair.b, 100).unwrap(), b"by the ring");
        assert_eq!(set.now(), []);
    }
}

#[test]
fn bytes_left_in_kernel_when_ring_comes_are_reported() {
    for flags in [0, ET] {
        let (set, pair) = (Set::new(), candidates());
        set.add(pair.b, IN | flags, 5);
        pair.bring_up();
        // Past the library, so that they go by TCP although there is a ring.
        let conn = Conn::of(pair.b).unwrap();
        assert!(conn.is_up());
        drop((set, pair));
        let (set, pair) = (Set::new(), candidates());
        set.add(pair.b, IN | flags, 5);
        send(pair.a, b"early").unwrap();
        pair.bring_up();
        assert_eq!(set.wait(), [(IN, 5)]);
        assert_eq!(receive(pair.b, 100).unwrap(), b"early");
        assert_eq!(set.wait_for(4, SOON).unwrap(), []);
    }
}

#[test]
fn edge_is_reported_once_and_again_when_more_comes() {
    let (set, pair) = (Set::new(), up());
    set.add(pair.b, IN | ET, 1);
    set.now();
    send(pair.a, b"one").unwrap();
    assert_eq!(set.wait(), [(IN, 1)]);
    assert_eq!(set.wait_for(4, SOON).unwrap(), [], "told before");
    send(pair.a, b"two").unwrap();
    assert_eq!(set.wait(), [(IN, 1)], "news, although the first was not read");
    set.change(pair.b, IN | ET, 2);
    assert_eq!(set.wait(), [(IN, 2)], "a change makes it news");
    assert_eq!(set.now(), []);
}

#[test]
fn sleeper_is_woken_for_edge_behind_unread_bytes() {
    let (set, pair) = (Set::new(), up());
    set.add(pair.b, IN | ET, 1);
    send(pair.a, b"one").unwrap();
    assert_eq!(set.wait(), [(IN, 1)]);
    std::thread::scope(|s| {
        let sleeper = s.spawn(|| set.wait());
        std::thread::sleep(Duration::from_millis(30));
        send(pair.a, b"two").unwrap();
        assert_eq!(sleeper.join().unwrap(), [(IN, 1)]);
    });
}

#[test]
fn one_shot_reports_once_until_rearmed() {
    for up_before in [true, false] {
        let (set, pair) = (Set::new(), candidates());
        if up_before {
            pair.bring_up();
        }
        set.add(pair.b, IN | ONESHOT, 3);
        send(pair.a, b"x").unwrap();
        assert_eq!(set.wait(), [(IN, 3)], "up before: {up_before}");
        if !up_before {
            assert_eq!(receive(pair.b, 10).unwrap(), b"x");
            pair.bring_up();
        }
        send(pair.a, b"y").unwrap();
        assert_eq!(set.wait_for(4, SOON).unwrap(), [], "spent; up before: {up_before}");
        set.change(pair.b, IN | ONESHOT, 4);
        assert_eq!(set.wait(), [(IN, 4)]);
        assert_eq!(set.now(), []);
    }
}

#[test]
fn room_is_reported_when_full_ring_has_been_read() {
    for flags in [0, ET] {
        let (set, pair) = (Set::new(), candidates());
        pair.bring_up();
        send(pair.a, b"x").unwrap();
        receive(pair.b, 1).unwrap();
        assert!(fill(pair.a) >= 64 << 10);
        set.add(pair.a, OUT | flags, 9);
        while !set.now().is_empty() {}
        assert!(send(pair.a, b"x").is_err());
        std::thread::scope(|s| {
            let sleeper = s.spawn(|| set.wait());
            std::thread::sleep(Duration::from_millis(20));
            drain(pair.b);
            assert_eq!(sleeper.join().unwrap(), [(OUT, 9)], "flags {flags:#x}");
        });
        if flags == ET {
            assert_eq!(set.wait_for(4, SOON).unwrap(), [], "no news");
            send(pair.a, b"hello").unwrap();
            drain(pair.b);
            assert_eq!(set.wait_for(4, SOON).unwrap(), [], "reading is no news to who was not refused");
        } else {
            assert_eq!(set.now(), [(OUT, 9)]);
        }
    }
}

#[test]
fn room_after_a_refusal_in_another_thread_wakes_a_sleeper() {
    let (set, pair) = (Set::new(), up());
    send(pair.a, &vec![0; 1000]).unwrap();
    receive(pair.b, 1000).unwrap();
    set.add(pair.a, IN | OUT | ET, 9);
    while !set.now().is_empty() {}
    for round in 0..3 {
        std::thread::scope(|s| {
            // A runtime's thread sleeps while there is room, and a worker uses it up.
            let sleeper = s.spawn(|| set.wait());
            std::thread::sleep(Duration::from_millis(30));
            fill(pair.a);
            drain(pair.b);
            assert_eq!(sleeper.join().unwrap(), [(OUT, 9)], "round {round}");
        });
    }
}

#[test]
fn end_is_reported_as_kernel_reports_it() {
    let (set, mut pair) = (Set::new(), up());
    set.add(pair.b, IN | RDHUP, 1);
    send(pair.a, b"last").unwrap();
    shutdown(pair.a, libc::SHUT_WR);
    let deadline = Instant::now() + Duration::from_secs(100);
    while set.wait() != [(IN | RDHUP, 1)] {
        assert!(Instant::now() < deadline);
    }
    assert_eq!(receive(pair.b, 10).unwrap(), b"last");
    assert_eq!(set.wait(), [(IN | RDHUP, 1)], "the end itself");
    assert_eq!(receive(pair.b, 10).unwrap(), b"");
    shutdown(pair.b, libc::SHUT_WR);
    while set.wait() != [(IN | RDHUP | HUP, 1)] {
        assert!(Instant::now() < deadline);
    }
    close(pair.a);
    pair.a = -1;
    assert_eq!(set.wait(), [(IN | RDHUP | HUP, 1)]);
}

#[test]
fn sleeper_is_woken_by_peer_that_closes() {
    let (set, mut pair) = (Set::new(), up());
    set.add(pair.b, IN | RDHUP | ET, 1);
    set.now();
    std::thread::scope(|s| {
        let sleeper = s.spawn(|| set.wait());
        std::thread::sleep(Duration::from_millis(30));
        close(std::mem::replace(&mut pair.a, -1));
        let told = sleeper.join().unwrap();
        assert!(told.len() == 1 && told[0].0 & IN != 0, "{told:?}");
        // The ring ends just before the kernel's socket does, whose end is a separate edge for a thread that was that quick.
        let rest = if told[0].0 & RDHUP == 0 { set.wait() } else { told };
        assert!(rest.len() == 1 && rest[0].0 & (IN | RDHUP) == IN | RDHUP, "{rest:?}");
    });
}

#[test]
fn errors_are_the_kernels() {
    let (set, pair) = (Set::new(), up());
    assert_eq!(set.ctl(libc::EPOLL_CTL_MOD, pair.b, IN, 0), Err(Errno::NOENT));
    assert_eq!(set.take_out(pair.b), Err(Errno::NOENT));
    set.add(pair.b, IN, 1);
    assert_eq!(set.ctl(libc::EPOLL_CTL_ADD, pair.b, IN, 2), Err(Errno::EXIST));
    set.take_out(pair.b).unwrap();
    assert_eq!(set.take_out(pair.b), Err(Errno::NOENT));
    assert_eq!(set.ctl(libc::EPOLL_CTL_MOD, pair.b, IN, 0), Err(Errno::NOENT));
    assert_eq!(set.ctl(libc::EPOLL_CTL_ADD, pair.b, IN | ONESHOT | EXCLUSIVE, 2), Err(Errno::INVAL));
    set.add(pair.b, IN | EXCLUSIVE, 2);
    assert_eq!(set.ctl(libc::EPOLL_CTL_MOD, pair.b, IN, 2), Err(Errno::INVAL));
    send(pair.a, b"x").unwrap();
    assert_eq!(set.wait(), [(IN, 2)]);
    assert_eq!(set.wait_for(0, 0), Err(Errno::INVAL));
    assert_eq!(set.ctl(99, pair.b, IN, 2), Err(Errno::INVAL));
    // SAFETY: memory and descriptors of this test.
    assert_eq!(unsafe { epoll_ctl(set.0, libc::EPOLL_CTL_ADD, pair.a, ptr::null_mut()) }, -1);
    assert_eq!(sys::errno(), Errno::FAULT);
    // SAFETY: memory and descriptors of this test.
    assert_eq!(unsafe { epoll_ctl(set.0, libc::EPOLL_CTL_MOD, pair.b, ptr::null_mut()) }, -1);
    assert_eq!(sys::errno(), Errno::FAULT);
}

#[test]
fn event_while_one_thread_is_busy_wakes_another() {
    let (set, pairs) = (Set::new(), [up(), up()]);
    for (pair, n) in pairs.iter().zip(1..) {
        set.add(pair.b, IN | ET, n);
    }
    set.now();
    {
        for round in 0..20 {
            // Both sleep, or stay awake; one gets the first connection and is away for long. The other must get the second.
            let away = AtomicBool::new(true);
            let told = AtomicU32::new(0);
            std::thread::scope(|s| {
                for _ in 0..2 {
                    s.spawn(|| {
                        let events = set.wait_for(1, LONG).unwrap();
                        told.fetch_add(events[0].1 as u32, Ordering::SeqCst);
                        if events[0].1 == 1 {
                            let deadline = Instant::now() + Duration::from_secs(100);
                            while away.load(Ordering::SeqCst) && Instant::now() < deadline {
                                std::thread::yield_now();
                            }
                        } else {
                            away.store(false, Ordering::SeqCst);
                        }
                    });
                }
                std::thread::sleep(Duration::from_millis(round % 3 * 5));
                send(pairs[0].a, b"x").unwrap();
                while told.load(Ordering::SeqCst) != 1 {
                    std::thread::yield_now();
                }
                std::thread::sleep(Duration::from_millis(round % 2 * 5));
                send(pairs[1].a, b"x").unwrap();
            });
            assert_eq!(told.into_inner(), 3);
        }
    }
}

#[test]
fn many_ready_connections_starve_neither_pipe_nor_each_other() {
    let set = Set::new();
    let pairs: Vec<_> = (0..150).map(|_| up()).collect();
    for (pair, n) in pairs.iter().zip(0..) {
        set.add(pair.b, IN, n);
    }
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    use rustix::fd::AsRawFd;
    set.add(reader.as_raw_fd(), IN, 9999);
    for pair in &pairs {
        send(pair.a, b"x").unwrap();
    }
    rustix::io::write(&writer, b"x").unwrap();
    let mut seen = vec![0; pairs.len()];
    let mut pipe = 0;
    for _ in 0..200 {
        for (_, n) in set.wait_for(7, LONG).unwrap() {
            if n == 9999 { pipe += 1 } else { seen[n as usize] += 1 }
        }
    }
    assert!(seen.iter().all(|n| *n > 0), "{seen:?}");
    assert!(pipe > 10, "{pipe}");
    // One stays busy until all others are cold; their events come all the same.
    for pair in &pairs {
        receive(pair.b, 10).unwrap();
    }
    rustix::io::read(&reader, &mut [0; 1]).unwrap();
    for _ in 0..2000 {
        send(pairs[0].a, b"x").unwrap();
        assert_eq!(set.wait(), [(IN, 0)]);
        receive(pairs[0].b, 10).unwrap();
    }
    for n in [140, 3, 77] {
        send(pairs[n].a, b"x").unwrap();
        assert_eq!(set.wait(), [(IN, n as u64)]);
        receive(pairs[n].b, 10).unwrap();
    }
}

#[test]
fn connection_registered_before_adoption_stays_on_kernel() {
    use std::os::fd::IntoRawFd;
    let set = Set::new();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let stream = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (here, there) = (stream.local_addr().unwrap(), stream.peer_addr().unwrap());
    let fd = stream.into_raw_fd();
    set.add(fd, IN, 1);
    assert!(crate::watched::was_watched(fd));
    assert!(Conn::adopt(fd, partywall_shm::status::Role::Connecting, here, there).is_none());
    close(fd);
}

extern "C" fn note_signal(_: c_int) {}

/// Calls `what` in a thread that is sent signals, without restart, until it has ended.
pub(in crate::calls) fn interrupted<T: Send>(what: impl FnOnce() -> T + Send) -> T {
    // SAFETY: memory and descriptors of this test.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = note_signal as extern "C" fn(c_int) as libc::sighandler_t;
    // SAFETY: memory and descriptors of this test.
    unsafe { libc::sigaction(libc::SIGUSR2, &raw const action, ptr::null_mut()) };
    let (done, thread) = (AtomicBool::new(false), std::sync::atomic::AtomicU64::new(0));
    let (done, thread) = (&done, &thread);
    std::thread::scope(|s| {
        let sleeper = s.spawn(move || {
            // SAFETY: memory and descriptors of this test.
            thread.store(unsafe { libc::pthread_self() }, Ordering::SeqCst);
            let result = what();
            done.store(true, Ordering::SeqCst);
            // Not gone before the last signal was sent.
            std::thread::sleep(Duration::from_millis(30));
            result
        });
        while !done.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(10));
            let thread = thread.load(Ordering::SeqCst);
            if thread != 0 && !done.load(Ordering::SeqCst) {
                // SAFETY: memory and descriptors of this test.
                unsafe { libc::pthread_kill(thread, libc::SIGUSR2) };
            }
        }
        sleeper.join().unwrap()
    })
}

#[test]
fn signal_interrupts_wait_and_mask_admits_it() {
    let (set, pair) = (Set::new(), up());
    set.add(pair.b, IN, 1);
    assert_eq!(interrupted(|| set.wait_for(4, LONG)), Err(Errno::INTR));
    let result = interrupted(|| {
        // SAFETY: memory and descriptors of this test.
        let mut all: sigset_t = unsafe { std::mem::zeroed() };
        let mut none = all;
        let mut event = epoll_event { events: 0, u64: 0 };
        // SAFETY: memory and descriptors of this test.
        unsafe {
            libc::sigfillset(&raw mut all);
            libc::sigemptyset(&raw mut none);
            libc::pthread_sigmask(libc::SIG_BLOCK, &raw const all, ptr::null_mut());
            let blocked = epoll_pwait(set.0, &raw mut event, 1, SOON * 3, ptr::null());
            let open = epoll_pwait(set.0, &raw mut event, 1, LONG, &raw const none);
            (blocked, open, sys::errno())
        }
    });
    assert_eq!(result, (0, -1, Errno::INTR));
}

#[test]
fn times_are_kept() {
    let (set, pair) = (Set::new(), up());
    set.add(pair.b, IN, 1);
    for micros in [300, 3_000, 30_000] {
        let time = timespec { tv_sec: 0, tv_nsec: micros * 1000 };
        let mut event = epoll_event { events: 0, u64: 0 };
        let start = Instant::now();
        // SAFETY: memory and descriptors of this test.
        assert_eq!(unsafe { epoll_pwait2(set.0, &raw mut event, 1, &raw const time, ptr::null()) }, 0);
        assert!(start.elapsed() >= Duration::from_micros(micros as u64), "{micros}");
    }
    let start = Instant::now();
    assert_eq!(set.wait_for(1, 20).unwrap(), []);
    assert!(start.elapsed() >= Duration::from_millis(20));
    let bad = timespec { tv_sec: 0, tv_nsec: -1 };
    let mut event = epoll_event { events: 0, u64: 0 };
    // SAFETY: memory and descriptors of this test.
    assert_eq!(unsafe { epoll_pwait2(set.0, &raw mut event, 1, &raw const bad, ptr::null()) }, -1);
    assert_eq!(sys::errno(), Errno::INVAL);
}

#[test]
fn link_never_fills_so_far_that_bell_is_lost() {
    // A link holds some 270; each round brings one or two.
    for blocking in [false, true] {
        let (set, pair) = (Set::new(), up());
        set.add(pair.b, IN, 1);
        std::thread::scope(|s| {
            s.spawn(|| {
                for _ in 0..700 {
                    let mut byte = 0u8;
                    if !blocking {
                        assert_eq!(set.wait(), [(IN, 1)]);
                    }
                    // SAFETY: memory and descriptors of this test.
                    let n = unsafe { read::recv(pair.b, (&raw mut byte).cast(), 1, 0) };
                    assert_eq!(n, 1);
                    send(pair.b, b"!").unwrap();
                }
            });
            let mut one = libc::pollfd { fd: pair.a, events: libc::POLLIN, revents: 0 };
            for round in 0..700 {
                // Asleep by then, as it has nothing to stay awake for.
                std::thread::sleep(Duration::from_micros(300));
                send(pair.a, b"?").unwrap();
                // SAFETY: memory and descriptors of this test.
                assert_eq!(unsafe { super::super::poll::poll(&raw mut one, 1, LONG) }, 1, "round {round}");
                receive(pair.a, 1).unwrap();
            }
        });
    }
}

#[test]
fn reported_bytes_are_readable_though_ring_is_ahead_of_tcp() {
    for flags in [0, ET] {
        let (set, pair) = (Set::new(), candidates());
        let sent = fill(pair.a);
        set.add(pair.b, IN | flags, 1);
        pair.bring_up();
        // By the ring, while TCP is full still.
        let sent = sent + send(pair.a, &[8; 5000]).unwrap();
        let mut got = 0;
        while got < sent {
            assert_eq!(set.wait(), [(IN, 1)], "{got} of {sent}");
            got += receive(pair.b, 3000).unwrap().len();
            while flags == ET
                && let Ok(bytes) = receive(pair.b, 3000)
            {
                got += bytes.len();
            }
        }
        assert_eq!(got, sent);
        assert_eq!(set.wait_for(4, SOON).unwrap(), []);
    }
}

#[test]
fn more_for_a_connection_whose_thread_is_away_wakes_another() {
    let (set, pair) = (Set::new(), up());
    set.add(pair.b, IN | ET, 1);
    set.now();
    for _ in 0..20 {
        let told = AtomicU32::new(0);
        std::thread::scope(|s| {
            for _ in 0..2 {
                s.spawn(|| {
                    // There is no event if the wait ended without a wake-up.
                    if set.wait() == [(IN, 1)] {
                        receive(pair.b, 10).unwrap();
                        told.fetch_add(1, Ordering::SeqCst);
                    }
                });
            }
            // Both are asleep; the first byte wakes one, which does not come back.
            std::thread::sleep(Duration::from_millis(10));
            let deadline = Instant::now() + Duration::from_secs(100);
            for n in 1..=2 {
                send(pair.a, b"x").unwrap();
                while told.load(Ordering::SeqCst) != n && Instant::now() < deadline {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        });
        assert_eq!(told.into_inner(), 2);
    }
}
