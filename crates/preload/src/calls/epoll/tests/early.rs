//! Sockets that are entered into sets before they are connected.

use super::*;
use crate::calls::testing::copy_by_fcntl;
use crate::table::{self, Entry};
use crate::{unconnected, watched};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd, IntoRawFd};

fn early(enter: impl FnOnce(c_int)) -> Pair {
    Pair::entered_early(64 << 10, enter)
}

/// A byte from the other side, by the ring if there is one, is reported once under the program's own number.
fn hears(set: &Set, pair: &Pair, expected: (u32, u64)) {
    assert_eq!(set.wait_for(16, SOON).unwrap(), []);
    send(pair.b, b"x").unwrap();
    assert_eq!(set.wait(), [expected]);
    assert_eq!(receive(pair.a, 10).unwrap(), b"x");
}

#[test]
fn socket_entered_before_connect_reports_its_ring() {
    for flags in [0, ET, EXCLUSIVE, EXCLUSIVE | ET] {
        let set = Set::new();
        let pair = early(|fd| set.add(fd, IN | flags, u64::MAX));
        hears(&set, &pair, (IN, u64::MAX));
        pair.bring_up();
        assert!(pair.is_on_ring(), "flags {flags:#x}");
        assert!(set.now().iter().all(|e| e.1 == u64::MAX), "at most one too many");
        for _ in 0..3 {
            hears(&set, &pair, (IN, u64::MAX));
        }
    }
}

#[test]
fn bytes_that_came_before_the_ring_are_reported() {
    for flags in [0, ET] {
        let set = Set::new();
        let pair = early(|fd| set.add(fd, IN | flags, 5));
        send(pair.b, b"over TCP").unwrap();
        pair.bring_up();
        assert_eq!(set.wait(), [(IN, 5)]);
        assert_eq!(receive(pair.a, 100).unwrap(), b"over TCP");
        hears(&set, &pair, (IN, 5));
    }
}

#[test]
fn last_change_before_connect_holds() {
    let (set, other) = (Set::new(), Set::new());
    let pair = early(|fd| {
        set.add(fd, OUT, 1);
        assert_eq!(set.ctl(libc::EPOLL_CTL_ADD, fd, IN, 2), Err(Errno::EXIST));
        assert_eq!(set.now(), [(OUT | HUP, 1)], "as the kernel reports a socket that is not connected");
        set.change(fd, IN, 3);
        other.add(fd, IN, 4);
        other.take_out(fd).unwrap();
        assert_eq!(other.ctl(libc::EPOLL_CTL_MOD, fd, IN, 4), Err(Errno::NOENT));
    });
    pair.bring_up();
    assert!(pair.is_on_ring());
    hears(&set, &pair, (IN, 3));
    assert_eq!(other.now(), [], "it was taken out");
}

#[test]
fn every_set_with_an_early_socket_reports_its_ring() {
    let sets = [Set::new(), Set::new(), Set::new()];
    let pair = early(|fd| (1..).zip(&sets).for_each(|(n, set)| set.add(fd, IN, n)));
    pair.bring_up();
    assert!(pair.is_on_ring());
    send(pair.b, b"x").unwrap();
    for (n, set) in (1..).zip(&sets) {
        assert_eq!(set.wait(), [(IN, n)]);
    }
}

#[test]
fn one_shot_fired_before_connect_fires_again_only_when_armed() {
    let set = Set::new();
    let pair = early(|fd| {
        set.add(fd, IN | ONESHOT, 1);
        assert_eq!(set.now(), [(HUP, 1)]);
    });
    assert!(!pair.may_come_up(), "whether it has fired, only the kernel knows");
    send(pair.b, b"x").unwrap();
    assert_eq!(set.wait_for(4, SOON).unwrap(), [], "spent");
    set.change(pair.a, IN | ONESHOT, 2);
    assert!(pair.may_come_up());
    pair.bring_up();
    assert!(pair.is_on_ring());
    assert_eq!(set.wait(), [(IN, 2)]);
    assert_eq!(receive(pair.a, 10).unwrap(), b"x");
    send(pair.b, b"y").unwrap();
    assert_eq!(set.wait_for(4, SOON).unwrap(), [], "spent");
    set.change(pair.a, IN | ONESHOT, 3);
    assert_eq!(set.wait(), [(IN, 3)]);
}

#[test]
fn ring_is_refused_to_one_shot_that_may_have_fired() {
    let set = Set::new();
    let pair = early(|fd| set.add(fd, IN | ONESHOT, 1));
    pair.bring_up();
    assert!(!pair.is_on_ring());
    send(pair.b, b"x").unwrap();
    assert_eq!(set.wait(), [(IN, 1)]);
    assert_eq!(set.wait_for(4, SOON).unwrap(), [], "reported once");
}

#[test]
fn sleeper_from_before_connect_is_woken_by_the_ring() {
    for flags in [0, ET] {
        let set = Set::new();
        std::thread::scope(|scope| {
            let (pair, sleeper) = {
                let mut sleeper = None;
                let pair = early(|fd| {
                    // The kernel reports a socket that is not connected as hung up; by edges, once.
                    set.add(fd, IN | ET, 9);
                    assert_eq!(set.now(), [(HUP, 9)]);
                    sleeper = Some(scope.spawn(|| {
                        let mut told = set.wait();
                        while told == [(HUP, 9)] {
                            told = set.wait();
                        }
                        told
                    }));
                    std::thread::sleep(Duration::from_millis(20));
                });
                (pair, sleeper.unwrap())
            };
            if flags == 0 {
                std::thread::sleep(Duration::from_millis(20));
            }
            pair.bring_up();
            assert!(pair.is_on_ring());
            std::thread::sleep(Duration::from_millis(20));
            send(pair.b, b"x").unwrap();
            assert_eq!(sleeper.join().unwrap(), [(IN, 9)]);
        });
    }
}

#[test]
fn early_registrations_end_with_their_set_and_their_descriptor() {
    let set = Set::new();
    for n in 0..200 {
        let gone = Set::new();
        let pair = early(|fd| {
            gone.add(fd, IN, 1000);
            drop(gone);
            set.add(fd, IN, n);
        });
        pair.bring_up();
        assert!(pair.is_on_ring());
        hears(&set, &pair, (IN, n));
    }
    let fd = {
        let socket = rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::STREAM, None);
        let fd = std::os::fd::IntoRawFd::into_raw_fd(socket.unwrap());
        unconnected::made(fd, true);
        set.add(fd, IN, 7);
        close(fd);
        fd
    };
    assert!(!unconnected::is_fresh(fd));
    assert_eq!(set.now(), []);
    let pair = candidates();
    set.add(pair.b, IN, 8);
    pair.bring_up();
    send(pair.a, b"x").unwrap();
    assert_eq!(set.wait(), [(IN, 8)]);
}

#[test]
fn socket_connected_elsewhere_is_not_followed_any_more() {
    let set = Set::new();
    let socket = rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::STREAM, None).unwrap();
    let fd = std::os::fd::IntoRawFd::into_raw_fd(socket);
    unconnected::made(fd, true);
    set.add(fd, IN, 7);
    crate::ready::connected(fd);
    assert!(watched::was_watched(fd), "if it is connected again, it stays on TCP");
    set.change(fd, IN | OUT, 8);
    assert_eq!(set.now(), [(OUT | HUP, 8)]);
    close(fd);
    assert!(!watched::was_watched(fd));
}

#[test]
fn copy_of_an_early_socket_stays_on_tcp() {
    for copy in [dup as fn(c_int) -> c_int, copy_by_fcntl] {
        early_socket_stays_on_tcp_if_copied(copy);
    }
}

fn early_socket_stays_on_tcp_if_copied(copy: fn(c_int) -> c_int) {
    let set = Set::new();
    let socket = rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::STREAM, None).unwrap();
    let fd = std::os::fd::IntoRawFd::into_raw_fd(socket);
    crate::ready::renumbered(fd);
    unconnected::made(fd, true);
    set.add(fd, IN, 7);
    assert!(!watched::was_watched(fd));
    // A set knows a socket by the number that it was entered by, and nothing would tell the copy of a ring.
    let copy = copy(fd);
    for fd in [fd, copy] {
        assert!(watched::was_watched(fd));
        let any = std::net::SocketAddr::from(([127, 0, 0, 1], 9));
        Conn::adopt(fd, partywall_shm::status::Role::Connecting, any, any);
        assert!(Conn::of(fd).is_none());
        close(fd);
        assert!(!watched::was_watched(fd));
    }
}

#[test]
fn changes_in_the_moment_of_connect_are_not_lost() {
    let set = Set::new();
    for round in 0..200u64 {
        let started = AtomicBool::new(false);
        let last = std::thread::scope(|scope| {
            let mut changer = None;
            let pair = early(|fd| {
                set.add(fd, IN, 0);
                let (set, started) = (&set, &started);
                changer = Some(scope.spawn(move || {
                    let mut n = 0;
                    while n < 50 {
                        n += 1;
                        set.change(fd, IN, round * 1000 + n);
                        started.store(true, Ordering::SeqCst);
                    }
                    round * 1000 + n
                }));
                while !started.load(Ordering::SeqCst) {
                    std::hint::spin_loop();
                }
            });
            if round % 2 == 0 {
                pair.bring_up();
            }
            let last = changer.unwrap().join().unwrap();
            if round % 2 == 1 {
                pair.bring_up();
            }
            assert!(pair.is_on_ring());
            hears(&set, &pair, (IN, last));
            pair
        });
        drop(last);
    }
}

#[test]
fn bell_that_was_rung_before_does_not_hide_another_event() {
    let (outer, set) = (Set::new(), Set::new());
    let pairs = [up(), up()];
    for (pair, n) in pairs.iter().zip(10..) {
        set.add(pair.b, IN, n);
        send(pair.a, b"x").unwrap();
    }
    outer.add(set.0, IN, 1);
    assert_eq!(set.wait_for(1, LONG).unwrap().len(), 1);
    assert_eq!(outer.wait(), [(IN, 1)], "the bell was rung for the other one");
    drop(pairs);
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    rustix::io::write(&writer, b"x").unwrap();
    set.add(std::os::fd::AsRawFd::as_raw_fd(&reader), IN, 2);
    assert_eq!(set.wait_for(1, 0).unwrap(), [(IN, 2)]);
}

/// Where there is no broker, the connection begins before `connect`. Other tests of this process have a broker now and then, which says that the
/// peer is none of ours.
#[test]
fn connect_that_fails_leaves_nothing_of_the_connection() {
    let socket = || rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::STREAM, None);
    let nobody = TcpListener::bind("127.0.0.1:0").unwrap();
    let std::net::SocketAddr::V4(at) = nobody.local_addr().unwrap() else { unreachable!() };
    // Bound, and it does not listen.
    drop(nobody);
    let keeper = socket().unwrap();
    rustix::net::bind(&keeper, &at).unwrap();
    crate::conn::install(&crate::ready::WAITERS);
    for _ in 0..500 {
        let set = Set::new();
        let fd = socket().unwrap().into_raw_fd();
        // As the exported `socket` does.
        crate::ready::renumbered(fd);
        unconnected::made(fd, true);
        set.add(fd, IN | OUT, 7);
        assert_eq!(super::super::super::testing::connect(fd, at), Err(Errno::CONNREFUSED));
        assert!(table::get(fd) == Entry::NONE, "it is no connection");
        let had_begun = watched::was_watched(fd);
        let there = TcpListener::bind("127.0.0.1:0").unwrap();
        let std::net::SocketAddr::V4(open) = there.local_addr().unwrap() else { unreachable!() };
        // It may be connected elsewhere, and the set tells what the kernel has.
        assert_eq!(super::super::super::testing::connect(fd, open), Ok(0));
        let (mut peer, _): (TcpStream, _) = there.accept().unwrap();
        std::io::Write::write_all(&mut peer, b"x").unwrap();
        assert_eq!(set.wait(), [(IN | OUT, 7)]);
        assert!(peer.as_raw_fd() != fd);
        close(fd);
        if had_begun {
            return;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    panic!("there was a broker all the time");
}
