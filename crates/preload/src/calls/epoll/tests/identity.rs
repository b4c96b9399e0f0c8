//! The identity of connections in a set: reused numbers, copies, sets in sets, and sets in other programs.

#![expect(unsafe_code, reason = "calls the exported functions as a program does")]

use super::*;

#[test]
fn removed_and_added_descriptor_is_reported_as_new() {
    let (set, pair) = (Set::new(), up());
    set.add(pair.b, IN, 1);
    send(pair.a, b"x").unwrap();
    for n in 2..100 {
        set.take_out(pair.b).unwrap();
        assert_eq!(set.now(), []);
        set.add(pair.b, IN, n);
        assert_eq!(set.now(), [(IN, n)]);
        set.change(pair.b, OUT, n);
        // The way out is still TCP: nothing was sent by this side. The kernel is asked in the second place.
        assert_eq!(set.wait(), [(OUT, n)]);
        set.change(pair.b, 0, n);
        assert_eq!(set.now(), []);
    }
}

#[test]
fn reused_descriptor_number_is_another_connection() {
    let set = Set::new();
    for n in 0..50 {
        let pair = if n % 3 == 0 { candidates() } else { up() };
        set.add(pair.a, IN, n);
        set.add(pair.b, IN, n + 1000);
        if n % 3 == 0 {
            pair.bring_up();
        }
        send(pair.a, b"x").unwrap();
        assert_eq!(set.wait(), [(IN, n + 1000)]);
        if n % 2 == 0 {
            set.take_out(pair.b).unwrap();
        }
    }
    assert_eq!(set.now(), []);
}

#[test]
fn copies_of_a_set_and_of_a_connection_are_the_same_thing() {
    let (set, pair) = (Set::new(), up());
    let copy = Set(dup(set.0));
    let other = dup(pair.b);
    set.add(pair.b, IN, 1);
    copy.add(other, IN, 2);
    send(pair.a, b"x").unwrap();
    let mut told = copy.wait();
    told.sort_unstable();
    assert_eq!(told, [(IN, 1), (IN, 2)]);
    drop(set);
    assert_eq!(copy.now().len(), 2, "the set lives on in its copy");
    close(other);
    receive(pair.b, 1).unwrap();
    assert_eq!(copy.now(), []);
}

#[test]
fn nested_set_reports_readiness_of_inner_set() {
    let (outer, inner) = (Set::new(), Set::new());
    let pairs = [up(), up()];
    for (pair, n) in pairs.iter().zip(10..) {
        inner.add(pair.b, IN, n);
    }
    outer.add(inner.0, IN, 1);
    assert_eq!(outer.now(), []);
    std::thread::scope(|s| {
        let sleeper = s.spawn(|| outer.wait());
        std::thread::sleep(Duration::from_millis(20));
        send(pairs[0].a, b"x").unwrap();
        assert_eq!(sleeper.join().unwrap(), [(IN, 1)]);
    });
    send(pairs[1].a, b"x").unwrap();
    assert_eq!(inner.wait_for(1, LONG).unwrap().len(), 1);
    assert_eq!(outer.wait(), [(IN, 1)], "the other one is ready still");
    for pair in &pairs {
        receive(pair.b, 10).unwrap();
    }
    // At most one report too many, until the next look.
    assert_eq!(inner.now(), []);
    assert_eq!(outer.now(), []);
    let mut one = libc::pollfd { fd: inner.0, events: libc::POLLIN, revents: 0 };
    send(pairs[1].a, b"x").unwrap();
    // SAFETY: memory and descriptors of this test.
    assert_eq!(unsafe { crate::calls::poll::poll(&raw mut one, 1, LONG) }, 1);
}

#[test]
fn set_handed_to_another_program_works_through_kernel() {
    let (set, pair) = (Set::new(), up());
    set.add(pair.b, IN, 41);
    send(pair.a, b"by the ring").unwrap();
    assert_eq!(set.wait(), [(IN, 41)]);
    receive(pair.b, 20).unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|s| {
        // The other end goes along, as a program that is busy with it would.
        s.spawn(|| {
            while !done.load(Ordering::SeqCst) {
                Conn::of(pair.a).unwrap().attend();
                let _ = receive(pair.a, 1);
                std::thread::sleep(Duration::from_micros(100));
            }
        });
        crate::ready::hand_over(set.0);
        done.store(true, Ordering::SeqCst);
    });
    send(pair.a, b"by TCP").unwrap();
    let mut event = epoll_event { events: 0, u64: 0 };
    // SAFETY: memory and descriptors of this test. The next definition is what a program without us would call.
    assert_eq!(unsafe { real::epoll_wait(set.0, &raw mut event, 1, LONG) }, 1);
    assert_eq!((event.events, event.u64), (IN, 41));
    assert_eq!(receive(pair.b, 20).unwrap(), b"by TCP");
    let other = candidates();
    set.add(other.b, IN, 42);
    let conn = Conn::of(other.b).unwrap();
    assert!(conn.is_tcp_permanently(), "what is put in now stays on TCP");
}

#[test]
fn hand_over_of_set_ends_without_a_call_of_the_peer() {
    let (set, pair) = (Set::new(), up());
    set.add(pair.b, IN, 41);
    send(pair.a, b"by the ring").unwrap();
    assert_eq!(set.wait(), [(IN, 41)]);
    receive(pair.b, 20).unwrap();
    let (done, ended) = std::sync::mpsc::channel();
    let fd = set.0;
    std::thread::spawn(move || {
        crate::ready::hand_over(fd);
        let _ = done.send(());
    });
    ended.recv_timeout(HUNG).unwrap();
    // The peer comes back.
    send(pair.a, b"by TCP").unwrap();
    let mut event = epoll_event { events: 0, u64: 0 };
    // SAFETY: memory and descriptors of this test. The next definition is what a program without us would call.
    assert_eq!(unsafe { real::epoll_wait(set.0, &raw mut event, 1, LONG) }, 1);
    assert_eq!((event.events, event.u64), (IN, 41));
}

#[test]
fn kernel_events_of_closed_connection_are_dropped() {
    let mut p = up();
    let set = Set::new();
    set.add(p.b, IN | RDHUP, 7);
    assert_eq!(set.now(), []);
    // Open elsewhere, as the broker has them while it passes them on: what is closed here stays in the kernel's set.
    let link = rustix::io::dup(sys::borrow(Conn::of(p.b).unwrap().bell().fd())).unwrap();
    let socket = rustix::io::dup(sys::borrow(p.b)).unwrap();
    close(p.b);
    p.b = -1;
    close(p.a);
    p.a = -1;
    for _ in 0..3 {
        assert_eq!(set.wait_for(16, SOON), Ok(vec![]));
    }
    drop((link, socket));
}

#[test]
fn bell_of_copies_reaches_idle_registration_of_either() {
    let (set, busy) = (Set::new(), up());
    let pairs: Vec<Pair> = (0..10).map(|_| up()).collect();
    for (pair, n) in pairs.iter().zip(10..) {
        set.add(pair.b, IN, n);
    }
    let other = dup(pairs[0].b);
    set.add(other, RDHUP | ET, 1);
    set.add(busy.b, IN, 2);
    // Until the set no longer looks at the others, and relies on their bells.
    for _ in 0..400 {
        send(busy.a, b"x").unwrap();
        assert_eq!(set.wait(), [(IN, 2)]);
        receive(busy.b, 1).unwrap();
    }
    send(pairs[0].a, b"x").unwrap();
    assert_eq!(set.wait(), [(IN, 10)]);
    close(other);
}

#[test]
fn removed_copy_leaves_bell_to_other_descriptor() {
    for is_nested in [false, true] {
        let (outer, inner, pair) = (Set::new(), Set::new(), up());
        if is_nested {
            outer.add(inner.0, IN, 1);
        }
        let other = dup(pair.b);
        inner.add(pair.b, IN, 2);
        inner.add(other, IN, 3);
        assert_eq!(inner.now(), []);
        inner.take_out(other).unwrap();
        let set = if is_nested { &outer } else { &inner };
        std::thread::scope(|s| {
            let sleeper = s.spawn(|| set.wait());
            std::thread::sleep(Duration::from_millis(50));
            send(pair.a, b"x").unwrap();
            assert_eq!(sleeper.join().unwrap(), [(IN, if is_nested { 1 } else { 2 })]);
        });
        close(other);
    }
}
