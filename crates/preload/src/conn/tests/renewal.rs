//! Connections whose rings are over, and that begin again.

mod threads;

use super::*;
use crate::broker::tests::{alone::alone, broker};
use crate::conn::{Cursor, REPLACED, UNBORN, accounts, candidate, may_be_inherited};
use crate::{broker, process, table};
use libc::iovec;
use std::ops::RangeInclusive;

const MOST_LOOKS: usize = 8;

/// As if a relay between the two machines had ended, and both sides had noticed and unmapped their rings.
fn part(p: &Pair) {
    for conn in [p.conn_a(), p.conn_b()] {
        conn.ring_path.set_flag(flags::FAR, true);
    }
    let _ = rustix::net::shutdown(sys::borrow(p.conn_a().bell().fd()), rustix::net::Shutdown::Both);
    p.conn_a().death().look();
    p.conn_b().death().look();
    for _ in 0..4 {
        look_at_both(p);
    }
    assert!(p.conn_a().has(flags::PARTED) && p.conn_b().has(flags::PARTED));
}

fn look_at_both(p: &Pair) {
    for fd in [p.a, p.b] {
        assert_eq!(recv(fd, 9, libc::MSG_DONTWAIT), Err(Errno::AGAIN));
    }
}

/// The pause is over.
fn skip_pause(conn: &Conn) {
    conn.moves.next_renewal_at.store(0, Ordering::Relaxed);
}

/// Calls that find nothing, with all pauses over. Returns whether the descriptor has another connection by now.
fn is_renewed_by_calls(fd: c_int) -> bool {
    is_renewed_by(fd, libc::MSG_DONTWAIT)
}

fn is_renewed_by(fd: c_int, message: c_int) -> bool {
    let before = table::get(fd);
    for _ in 0..MOST_LOOKS {
        if let Some(conn) = Conn::of(fd) {
            skip_pause(conn);
        }
        let _ = recv(fd, 9, message);
    }
    table::get(fd) != before
}

/// Both sides begin again, and meet.
fn renew_both(p: &Pair) {
    assert!(is_renewed_by_calls(p.a) && is_renewed_by_calls(p.b));
    p.bring_up();
}

/// After `p.b` has begun again, `p.a` does, and they meet.
fn renew_a(p: &Pair) {
    assert!(is_renewed_by_calls(p.a));
    p.bring_up();
}

/// Another program has the socket of `p.a` from here on, by `exec`: this process has nothing of the connection left but the descriptor.
fn exec_in_place_of_a(p: &Pair) {
    let old = p.conn_a();
    old.bring_down(Reason::Exec);
    assert!(!old.has(flags::BROKEN));
    table::remove(p.a, old.entry());
    old.bell().discard();
    old.local().own.vacate();
    old.local().peer.vacate();
    old.ring_path.set_stage(ConnStage::Tcp);
    old.identity.holders.leave(process::owner());
    crate::arena::free(old.index());
    // What a set of the other side would report.
    p.conn_b().death().look();
}

fn adopt_again(p: &Pair, role: Role) {
    let counts = accounts::kernel_counts(role, p.a).unwrap();
    let (peer, local) = p.conn_b().identity.addresses();
    candidate::adopt_carrying(counts, p.a, role, local, peer).unwrap();
}

fn exchange_by_ring(p: &Pair) {
    for (from, to) in [(p.a, p.b), (p.b, p.a)] {
        send(from, b"by ring", 0).unwrap();
        assert_eq!(recv(to, 9, 0).unwrap(), b"by ring");
        assert_eq!(ways(Conn::of(from).unwrap()).0, Way::Ring);
    }
}

#[test]
fn parted_connection_has_rings_again() {
    let p = Pair::up(4096);
    exchange_by_ring(&p);
    part(&p);
    for (from, to) in [(p.a, p.b), (p.b, p.a)] {
        send(from, b"by tcp", 0).unwrap();
        assert_eq!(recv(to, 9, 0).unwrap(), b"by tcp");
    }
    let old = [p.conn_a().entry(), p.conn_b().entry()];
    renew_both(&p);
    assert!(p.conn_a().entry() != old[0] && p.conn_b().entry() != old[1]);
    exchange_by_ring(&p);
    assert_eq!((p.conn_a().role(), p.conn_b().role()), (Role::Connecting, Role::Accepting));
}

#[test]
fn bytes_in_transit_by_tcp_are_counted_once() {
    let p = Pair::up(4096);
    exchange_by_ring(&p);
    part(&p);
    // One side has sent bytes that the other has not read when both begin again.
    send(p.a, b"in transit", 0).unwrap();
    assert!(is_renewed_by_calls(p.a) && is_renewed_by(p.b, libc::MSG_DONTWAIT | libc::MSG_PEEK));
    p.bring_up();
    send(p.a, b", by ring", 0).unwrap();
    let mut got = Vec::new();
    while got.len() < 19 {
        got.extend(recv(p.b, 99, 0).unwrap());
    }
    assert_eq!(got, b"in transit, by ring");
    exchange_by_ring(&p);
}

#[test]
fn connection_is_not_replaced_while_its_bytes_are_spliced() {
    let p = Pair::up(4096);
    exchange_by_ring(&p);
    part(&p);
    send(p.a, b"by tcp, more", 0).unwrap();
    let old = p.conn_b();
    // Between the look at the bytes and their consumption.
    let try_to_replace = |_, n| {
        for _ in 0..MOST_LOOKS {
            skip_pause(old);
            assert!(old.renewed(p.b).is_none());
        }
        Ok(n)
    };
    assert_eq!(old.receive_into(p.b, 8, true, try_to_replace), Ok(8));
    assert!(is_renewed_by(p.b, libc::MSG_DONTWAIT | libc::MSG_PEEK));
    assert_eq!(recv(p.b, 9, 0).unwrap(), b"more");
    renew_a(&p);
    exchange_by_ring(&p);
}

#[test]
fn connection_handed_over_by_exec_has_rings_again() {
    for (unread, far) in [(false, false), (true, false), (false, true), (true, true)] {
        let p = Pair::up(4096);
        exchange_by_ring(&p);
        for conn in [p.conn_a(), p.conn_b()] {
            conn.ring_path.set_flag(flags::FAR, far);
        }
        if unread {
            send(p.b, b"unread", 0).unwrap();
        }
        exec_in_place_of_a(&p);
        // A call that has nothing to send sends the unread bytes again.
        p.conn_b().attend();
        assert!(is_renewed_by_calls(p.b), "the peer's end of the bell has hung up");
        adopt_again(&p, Role::Connecting);
        if unread {
            assert_eq!(recv(p.a, 9, 0).unwrap(), b"unread", "it was sent again by TCP");
        }
        p.bring_up();
        exchange_by_ring(&p);
    }
}

#[test]
fn poll_without_timeout_sends_left_bytes_again() {
    let p = Pair::up(4096);
    exchange_by_ring(&p);
    send(p.b, b"unread", 0).unwrap();
    exec_in_place_of_a(&p);
    assert_eq!(crate::calls::testing::poll(p.b, libc::POLLIN, 0), Ok(0));
    let mut got = [0; 9];
    let (n, _) = rustix::net::recv(sys::borrow(p.a), &mut got[..], rustix::net::RecvFlags::DONTWAIT).unwrap();
    assert_eq!(&got[..n], b"unread");
}

/// Bounds, in milliseconds, of the pause that a connection makes before it begins again, once its rings are over. The pause begins between two
/// looks at the clock. `None` if the connection stays on TCP.
fn pause_before_renewal(p: &Pair) -> Option<RangeInclusive<u64>> {
    part(p);
    let (before, moves) = (p.conn_b().entry(), &p.conn_b().moves);
    moves.rings_are_over.store(0, Ordering::Relaxed);
    skip_pause(p.conn_b());
    let begin = sys::coarse_millis();
    assert_eq!(recv(p.b, 9, libc::MSG_DONTWAIT), Err(Errno::AGAIN));
    let (ends, end) = (moves.next_renewal_at.load(Ordering::Relaxed), sys::coarse_millis());
    assert_eq!(p.conn_b().entry(), before);
    is_renewed_by_calls(p.b).then(|| ends.saturating_sub(end)..=ends.saturating_sub(begin))
}

/// Their rings have not lasted by now, however slow this machine is.
fn rings_are_new(p: &Pair) {
    p.conn_b().moves.up_at.store(sys::coarse_millis() + 60_000, Ordering::Relaxed);
}

fn renew_after_b(p: &Pair) {
    assert!(is_renewed_by_calls(p.a));
    p.bring_up();
    exchange_by_ring(p);
}

#[test]
fn connection_is_replaced_only_after_a_pause_that_doubles() {
    let p = Pair::up(4096);
    for rings in 1..32 {
        rings_are_new(&p);
        let pause = pause_before_renewal(&p).unwrap();
        let expected = 1000 << (rings - 1).min(6);
        assert!(pause.contains(&expected), "{pause:?} ms after {rings} rings");
        renew_after_b(&p);
    }
    assert_eq!(pause_before_renewal(&p), None, "it has had rings 32 times");
}

#[test]
fn pause_after_rings_that_lasted_is_the_first() {
    let p = Pair::up(4096);
    for lasting in [false, false, true, false] {
        assert_ne!(p.conn_b().moves.up_at.load(Ordering::Relaxed), 0);
        let before = p.conn_b().moves.short_lived.load(Ordering::Relaxed);
        if lasting {
            p.conn_b().moves.up_at.fetch_sub(2000, Ordering::Relaxed);
        } else {
            rings_are_new(&p);
        }
        let expected = if lasting { 1000 } else { 1000 << before };
        let pause = pause_before_renewal(&p).unwrap();
        assert!(pause.contains(&expected), "{pause:?} ms, {lasting}, after {before} that did not last");
        renew_after_b(&p);
    }
    assert_eq!(p.conn_b().moves.short_lived.load(Ordering::Relaxed), 2, "those that lasted, and the last");
}

#[test]
fn any_count_of_renewals_in_shared_memory_is_taken() {
    let p = Pair::up(4096);
    part(&p);
    p.conn_b().moves.short_lived.store(u32::MAX, Ordering::Relaxed);
    for count in [u32::MAX, u32::MAX - 1, 32, 31] {
        p.conn_b().moves.renewals.store(count, Ordering::Relaxed);
        assert!(!is_renewed_by_calls(p.b));
    }
    p.conn_b().moves.renewals.store(30, Ordering::Relaxed);
    assert!(is_renewed_by_calls(p.b));
}

#[test]
fn connection_that_must_stay_on_tcp_is_not_replaced() {
    let p = Pair::up(4096);
    p.conn_b().stay_on_tcp(Reason::Option);
    send(p.b, b"x", 0).unwrap();
    assert_eq!(recv(p.a, 9, 0).unwrap(), b"x");
    part(&p);
    assert_eq!(p.conn_b().ring_path.reason(), Reason::LinkLost, "that came later");
    assert!(!is_renewed_by_calls(p.b));
    // A policy is no such reason.
    let p = Pair::up(4096);
    p.conn_b().stay_on_tcp(Reason::MovesNever);
    part(&p);
    assert!(is_renewed_by_calls(p.b));
}

#[test]
fn connection_of_several_processes_is_not_replaced() {
    let p = Pair::up(4096);
    part(&p);
    p.conn_b().identity.holders.add(process::kernel_pid() | UNBORN);
    assert!(!is_renewed_by_calls(p.b));
    assert!(is_renewed_by_calls(p.a));
}

#[test]
fn shared_connection_is_not_noted_for_next_program() {
    for p in [Pair::candidates(4096), Pair::up(4096)] {
        assert!(may_be_inherited(p.conn_a()) && may_be_inherited(p.conn_b()));
        p.conn_a().identity.holders.add(process::kernel_pid() | UNBORN);
        assert!(!may_be_inherited(p.conn_a()));
        p.conn_b().stay_on_tcp(Reason::Option);
        assert!(!may_be_inherited(p.conn_b()));
    }
}

#[test]
fn handler_replaces_connection_unless_it_interrupted_a_holder() {
    static FD: std::sync::atomic::AtomicI32 = std::sync::atomic::AtomicI32::new(-1);
    static RENEWED: std::sync::atomic::AtomicBool = std::sync::atomic::AtomicBool::new(true);
    extern "C" fn handler(_: c_int) {
        RENEWED.store(is_renewed_by_calls(FD.load(Ordering::Relaxed)), Ordering::Relaxed);
    }
    let p = Pair::up(4096);
    let set = EpollSet::new();
    part(&p);
    FD.store(p.b, Ordering::Relaxed);
    let signal = libc::SIGRTMIN() + 7;
    #[expect(unsafe_code, reason = "a signal handler of this test")]
    // SAFETY: the handler makes calls of this library and stores the result; nothing else here uses the signal.
    let is_renewed_by_handler = || unsafe {
        libc::signal(signal, handler as *const () as libc::sighandler_t);
        libc::raise(signal);
        RENEWED.load(Ordering::Relaxed)
    };
    let held = p.conn_b().tx.hold().unwrap();
    assert!(!is_renewed_by_handler());
    drop(held);
    crate::ready::hold_set_for_tests(set.0, || assert!(!is_renewed_by_handler()));
    assert!(is_renewed_by_handler());
    renew_a(&p);
    exchange_by_ring(&p);
}

#[test]
fn ring_with_unread_bytes_is_kept_until_they_are_read() {
    let p = Pair::up(4096);
    exchange_by_ring(&p);
    send(p.a, b"unread", 0).unwrap();
    p.conn_a().stay_on_tcp(Reason::Exec);
    assert_eq!(ways(p.conn_a()).0, Way::Tcp);
    p.conn_b().ring_path.set_flag(flags::PEER_GONE, true);
    assert!(!is_renewed_by(p.b, libc::MSG_DONTWAIT | libc::MSG_PEEK));
    assert_eq!(recv(p.b, 9, 0).unwrap(), b"unread");
    assert_eq!(recv(p.b, 9, libc::MSG_DONTWAIT), Err(Errno::AGAIN));
    assert!(is_renewed_by_calls(p.b));
}

#[test]
fn peer_whose_bell_hung_up_may_not_go_to_its_ring() {
    let p = Pair::up(4096);
    exchange_by_ring(&p);
    p.conn_a().stay_on_tcp(Reason::Option);
    // It lives, and is on TCP both ways.
    for (from, to) in [(p.a, p.b), (p.b, p.a), (p.a, p.b)] {
        send(from, b"by tcp", 0).unwrap();
        assert_eq!(recv(to, 9, 0).unwrap(), b"by tcp");
    }
    let b = p.conn_b();
    b.ring_path.set_flag(flags::PEER_GONE, true);
    let said = || b.pages().unwrap().own.rx_path.flags.load(Ordering::Relaxed) & path_flags::WANT_TCP;
    assert_eq!(said(), 0);
    assert_eq!(recv(p.b, 9, libc::MSG_DONTWAIT), Err(Errno::AGAIN));
    assert_eq!(said(), path_flags::WANT_TCP, "and a pause comes before the rings are given up");
}

#[test]
fn end_that_comes_during_the_pause_is_reported_by_tcp() {
    let p = Pair::up(4096);
    part(&p);
    shutdown(p.a, libc::SHUT_WR);
    assert!(!is_renewed_by(p.b, libc::MSG_DONTWAIT | libc::MSG_PEEK));
    assert_eq!(recv(p.b, 9, 0).unwrap(), b"");
}

#[test]
fn copies_of_a_descriptor_stand_for_the_replaced_connection() {
    let p = Pair::up(4096);
    let copy = dup(p.b);
    part(&p);
    renew_both(&p);
    assert_eq!(table::get(copy), p.conn_b().entry());
    send(p.a, b"one two", 0).unwrap();
    assert_eq!(recv(copy, 4, 0).unwrap(), b"one ");
    close(copy);
    assert_eq!(recv(p.b, 4, 0).unwrap(), b"two");
}

#[test]
fn edge_triggered_set_loses_no_edge_across_replacement() {
    const IN: u32 = libc::EPOLLIN as u32;
    const ET: u32 = libc::EPOLLET as u32;
    let p = Pair::up(4096);
    let set = EpollSet::new();
    set.add(p.b, IN | ET, 7);
    send(p.a, b"by ring", 0).unwrap();
    assert_eq!(set.wait(), [(IN, 7)]);
    assert_eq!(recv(p.b, 9, 0).unwrap(), b"by ring");
    part(&p);
    // By TCP, before the replacement, and not reported before it.
    send(p.a, b"early", 0).unwrap();
    assert!(is_renewed_by_calls(p.a) && is_renewed_by(p.b, libc::MSG_DONTWAIT | libc::MSG_PEEK));
    assert_eq!(set.wait(), [(IN, 7)]);
    assert_eq!(recv(p.b, 9, 0).unwrap(), b"early");
    assert_eq!(set.now(), []);
    // By TCP, after it.
    send(p.a, b"later", 0).unwrap();
    assert_eq!(set.wait(), [(IN, 7)]);
    assert_eq!(recv(p.b, 9, 0).unwrap(), b"later");
    p.bring_up();
    // By the new ring, as many bytes as the old one had brought.
    send(p.a, b"by ring", 0).unwrap();
    assert_eq!(ways(p.conn_a()).0, Way::Ring);
    assert_eq!(set.wait(), [(IN, 7)]);
    assert_eq!(set.now(), []);
    assert_eq!(recv(p.b, 9, 0).unwrap(), b"by ring");
    assert_eq!(set.now(), []);
}

#[test]
fn new_ring_as_long_as_the_old_one_is_an_edge() {
    const IN: u32 = libc::EPOLLIN as u32;
    const ET: u32 = libc::EPOLLET as u32;
    let p = Pair::up(4096);
    let set = EpollSet::new();
    set.add(p.b, IN | ET, 7);
    for rings in 0..3 {
        send(p.a, b"by ring", 0).unwrap();
        assert_eq!(ways(p.conn_a()).0, Way::Ring);
        assert_eq!(set.wait(), [(IN, 7)], "after {rings} rings");
        assert_eq!(recv(p.b, 9, 0).unwrap(), b"by ring");
        part(&p);
        renew_both(&p);
    }
}

#[test]
fn one_shot_registration_stays_spent_across_replacement() {
    const IN: u32 = libc::EPOLLIN as u32;
    const ONESHOT: u32 = libc::EPOLLONESHOT as u32;
    let p = Pair::up(4096);
    let set = EpollSet::new();
    set.add(p.b, IN | ONESHOT, 7);
    send(p.a, b"by ring", 0).unwrap();
    assert_eq!(set.wait(), [(IN, 7)]);
    assert_eq!(recv(p.b, 9, 0).unwrap(), b"by ring");
    part(&p);
    renew_both(&p);
    exchange_by_ring(&p);
    send(p.a, b"by ring", 0).unwrap();
    assert_eq!(set.now(), []);
    set.change(p.b, IN | ONESHOT, 8);
    assert_eq!(set.wait(), [(IN, 8)]);
}

/// Waits for something that another thread is about to do.
fn soon(what: &str, is: impl Fn() -> bool) {
    let begin = std::time::Instant::now();
    while !is() {
        assert!(begin.elapsed() < HUNG, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn thread_that_is_blocked_in_recv_moves_to_the_new_connection() {
    let p = Pair::up(4096);
    part(&p);
    std::thread::scope(|s| {
        let reader = s.spawn(|| recv(p.b, 9, 0));
        // It sleeps by the time that its hidden set has the connection, or is about to.
        soon("it waits", || crate::ready::is_waited_for(p.conn_b()));
        assert!(is_renewed_by_calls(p.b));
        // By the new connection a thread without a ring waits in the kernel.
        soon("it has moved", || !p.conn_b().kernel.is_quiet());
        assert!(is_renewed_by_calls(p.a));
        send(p.a, b"by tcp", 0).unwrap();
        assert_eq!(reader.join().unwrap().unwrap(), b"by tcp");
    });
    assert_eq!(accounts::is_accounted_for(p.conn_b(), p.b), Some(true));
    p.bring_up();
    exchange_by_ring(&p);
}

#[test]
fn poll_that_sleeps_moves_to_the_new_connection() {
    let p = Pair::up(4096);
    part(&p);
    std::thread::scope(|s| {
        let poller = s.spawn(|| poll(p.b, libc::POLLIN, LONG));
        soon("it waits", || crate::ready::is_waited_for(p.conn_b()));
        assert!(is_renewed_by_calls(p.b));
        soon("it has moved", || !p.conn_b().kernel.is_quiet());
        send(p.a, b"x", 0).unwrap();
        assert_eq!(poller.join().unwrap(), Ok(1));
    });
}

#[test]
fn call_that_has_moved_bytes_goes_on_by_the_new_connection() {
    // More than the kernel has room for.
    const LEN: usize = 32 << 20;
    let p = Pair::up(4096);
    part(&p);
    let bytes: Vec<u8> = (0..LEN).map(|n| (n / 251) as u8).collect();
    // Before the calls, which replace the connections themselves where the test is late.
    let both = [p.a, p.b].map(|fd| (fd, Conn::of(fd).unwrap()));
    std::thread::scope(|s| {
        let sender = s.spawn(|| send(p.a, &bytes, 0));
        let reader = s.spawn(|| recv(p.b, LEN, libc::MSG_WAITALL));
        for (fd, old) in both {
            // Only calls that move nothing: the other direction, and a look.
            soon("it is replaced", || {
                skip_pause(old);
                let _ = if fd == p.a { recv(fd, 1, libc::MSG_DONTWAIT).map(|_| 0) } else { send(fd, b"", 0) };
                Conn::of(fd).unwrap().entry() != old.entry()
            });
        }
        assert_eq!(sender.join().unwrap(), Ok(LEN));
        assert!(reader.join().unwrap().unwrap() == bytes);
    });
    for (conn, fd) in [(p.conn_a(), p.a), (p.conn_b(), p.b)] {
        assert_eq!(accounts::is_accounted_for(conn, fd), Some(true));
    }
    p.bring_up();
    exchange_by_ring(&p);
}

#[test]
fn rest_of_a_call_leaves_an_error_to_the_next_call() {
    let reset = || {
        let mut p = Pair::candidates(4096);
        crate::conn::leave::reset_on_close(p.a);
        close(p.a);
        p.a = -1;
        p
    };
    let mut byte = [0u8; 9];
    let mut list = [iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 9 }];
    let p = reset();
    let mut cursor = Cursor::of(&mut list).unwrap();
    assert_eq!(p.conn_b().receive_rest(p.b, &mut cursor, 0, 9), 0);
    assert_eq!(recv(p.b, 9, 0), Err(Errno::CONNRESET));
    let p = reset();
    let mut cursor = Cursor::of(&mut list).unwrap();
    assert_eq!(p.conn_b().send_rest(p.b, &mut cursor, 0), 0);
    assert_eq!(recv(p.b, 9, 0), Err(Errno::CONNRESET));
}

#[test]
fn late_thread_acts_on_the_connection_that_replaced_its_own() {
    let late = |what: &dyn Fn(&Pair, &'static Conn)| {
        let p = Pair::up(4096);
        part(&p);
        let old = p.conn_b();
        assert!(is_renewed_by_calls(p.b));
        what(&p, old);
        p
    };
    // What only TCP can do.
    for forbid in [
        (|old| old.stay_on_tcp(Reason::Option)) as fn(&'static Conn),
        |old| old.bring_down(Reason::Passed),
        |old| old.shut(libc::SHUT_RD),
    ] {
        let p = late(&|_, old| forbid(old));
        assert_eq!(p.conn_b().ring_path.stage(), ConnStage::Tcp);
    }
    // A call.
    let p = late(&|p, old| call_by_kernel(old, p.b).sent(-1));
    assert!(p.conn_b().kernel.is_quiet());
    late(&|p, old| {
        let CandidateStep::Kernel(call) = old.before_call(p.b) else { panic!("there is no ring") };
        assert!(!p.conn_b().kernel.is_quiet() && old.kernel.is_quiet(), "it counts where the new one sees it");
        call.sent(-1);
    });
    let p = late(&|p, old| {
        let mut byte = [0u8];
        let mut list = [iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 1 }];
        let mut cursor = Cursor::of(&mut list).unwrap();
        assert_eq!(old.receive(p.b, &mut cursor, 0), Err(REPLACED));
        assert_eq!(old.send(p.b, &mut cursor, 0), Err(REPLACED));
        assert!(std::ptr::eq(old.now(), p.conn_b()));
    });
    // A copy of the descriptor.
    #[expect(unsafe_code, reason = "calls a C function")]
    // SAFETY: a descriptor of this test, copied without the library.
    let copy = unsafe { crate::real::dup(p.b) };
    let ancestor = p.conn_b().ancestors().next().unwrap();
    ancestor.add_descriptor(copy);
    assert_eq!((table::get(copy), p.conn_b().local().descriptors.load(Ordering::Relaxed)), (p.conn_b().entry(), 2));
    close(copy);
    // The end.
    let place = kept_place(ancestor);
    assert!(is_kept(&place));
    ancestor.drop_descriptor(p.b);
    assert!(Conn::of(p.b).is_none() && !is_kept(&place));
}

#[test]
fn place_of_replaced_connection_is_free_after_the_last_close() {
    let mut p = Pair::up(4096);
    let mut kept = vec![kept_place(p.conn_b())];
    for _ in 0..2 {
        part(&p);
        renew_both(&p);
        kept.push(kept_place(p.conn_b()));
    }
    let bells = p.conn_b().ancestors().filter(|old| old.bell().fd() >= 0).count();
    assert_eq!(bells, 1, "older bells are closed");
    let copy = dup(p.b);
    close(p.b);
    p.b = -1;
    assert!(kept.iter().all(is_kept));
    close(copy);
    assert!(!kept.iter().any(is_kept));
}

/// The place of a connection, and how many have had it before.
fn kept_place(conn: &'static Conn) -> (&'static Conn, u32) {
    (conn, conn.generation())
}

/// Whether the place is in use, and by no other connection.
fn is_kept((conn, generation): &(&'static Conn, u32)) -> bool {
    crate::arena::is_in_use(conn.index()) && conn.generation() == *generation
}

/// A machine that has left takes its listeners with it, and brings them back.
#[test]
fn renewed_connection_is_offered_once_its_peer_is_back() {
    let Some(_alone) = alone!() else { return };
    let _broker = broker();
    let p = Pair::candidates(4096);
    let (conn, at) = (p.conn_a(), p.conn_a().identity.addresses().1);
    assert!(!broker::knows_program(p.a, at));
    conn.moves.renewals.store(1, Ordering::Relaxed);
    let look = || drop(recv(p.a, 9, libc::MSG_DONTWAIT));
    soon("the broker is met, and does not know the peer", || {
        look();
        assert_eq!(conn.ring_path.stage(), ConnStage::Candidate);
        eprintln!(
            "{:?} {:?} {:?}",
            broker::directory().is_some(),
            conn.ring_path.reason(),
            broker::knows_program(p.a, at)
        );
        broker::directory().is_some() && conn.ring_path.reason() == Reason::NoPeer
    });
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    assert_ne!(listener.local_addr().unwrap(), at);
    broker::publish(listener.as_raw_fd()).unwrap();
    soon("the peer's address is known, and the connection is offered", || {
        look();
        conn.ring_path.stage() == ConnStage::Offered
    });
}
