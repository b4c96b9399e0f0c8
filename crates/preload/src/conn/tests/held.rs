//! Bytes that are held back in a ring, because the sender has said that more follows.

use super::*;
use crate::conn::{Interest, RingReadiness};

/// A pair whose ring from `a` to `b` is in use.
fn on_ring(ring_size: u64) -> Pair {
    let p = Pair::up(ring_size);
    send(p.a, b"x", 0).unwrap();
    assert_eq!(recv(p.b, 1, 0).unwrap(), b"x");
    p
}

/// The bytes that can be read now.
fn there(p: &Pair) -> Result<Vec<u8>, Errno> {
    recv(p.b, 1 << 20, libc::MSG_DONTWAIT)
}

fn assert_held(p: &Pair) {
    assert_eq!(ioctl_number(p.b, libc::FIONREAD), 0);
    assert_eq!(p.conn_b().look().readable(), RingReadiness::No);
    assert_eq!(recv(p.b, 9, libc::MSG_DONTWAIT | libc::MSG_PEEK), Err(Errno::AGAIN));
    assert_eq!(there(p), Err(Errno::AGAIN));
}

fn nodelay(p: &Pair) {
    number_option(p.a, libc::IPPROTO_TCP, libc::TCP_NODELAY, 1);
}

#[test]
fn bytes_of_msg_more_come_with_those_that_follow() {
    let p = on_ring(1 << 20);
    send(p.a, b"one ", libc::MSG_MORE).unwrap();
    assert_held(&p);
    send(p.a, b"two ", libc::MSG_MORE).unwrap();
    assert_held(&p);
    send(p.a, b"three", 0).unwrap();
    assert_eq!(ioctl_number(p.b, libc::FIONREAD), 13);
    assert_eq!(there(&p).unwrap(), b"one two three");
}

#[test]
fn bytes_below_a_cork_come_when_it_is_pulled() {
    type Pull = fn(&Pair);
    let pulls: [Pull; 2] = [|p| cork(p.a, false), nodelay];
    for pull in pulls {
        let p = on_ring(1 << 20);
        cork(p.a, true);
        send(p.a, b"one ", 0).unwrap();
        send(p.a, b"two", 0).unwrap();
        assert_held(&p);
        pull(&p);
        assert_eq!(there(&p).unwrap(), b"one two");
    }
}

#[test]
fn bytes_that_came_before_are_read_at_once() {
    let p = on_ring(1 << 20);
    send(p.a, b"one ", 0).unwrap();
    send(p.a, b"two", libc::MSG_MORE).unwrap();
    assert_eq!(ioctl_number(p.b, libc::FIONREAD), 4);
    assert_eq!(there(&p).unwrap(), b"one ");
    assert_held(&p);
    send(p.a, b"!", 0).unwrap();
    assert_eq!(there(&p).unwrap(), b"two!");
}

#[test]
fn sleeping_reader_wakes_for_release_and_for_idle_sender() {
    for is_released in [true, false] {
        let p = on_ring(1 << 20);
        timeout(p.b, libc::SO_RCVTIMEO, 100_000);
        std::thread::scope(|s| {
            let reader = s.spawn(|| recv(p.b, 100, 0));
            std::thread::sleep(Duration::from_millis(30));
            send(p.a, b"one ", libc::MSG_MORE).unwrap();
            if is_released {
                send(p.a, b"two", 0).unwrap();
            }
            let expected: &[u8] = if is_released { b"one two" } else { b"one " };
            assert_eq!(reader.join().unwrap().unwrap(), expected);
        });
    }
}

#[test]
fn segment_that_is_full_is_not_held_back() {
    let p = on_ring(1 << 20);
    send(p.a, &vec![7; 100 << 10], libc::MSG_MORE).unwrap();
    let first = there(&p).unwrap().len();
    assert!((64 << 10..100 << 10).contains(&first), "{first}");
    send(p.a, b"x", 0).unwrap();
    assert_eq!(there(&p).unwrap().len(), (100 << 10) - first + 1);
}

#[test]
fn sender_without_room_holds_nothing_back() {
    let p = on_ring(4096);
    assert_eq!(send(p.a, &[7; 8192], libc::MSG_MORE | libc::MSG_DONTWAIT), Ok(4096));
    assert_eq!(there(&p).unwrap().len(), 4096);
    // The case in which only the last bytes are held back.
    assert_eq!(send(p.a, &[7; 4000], libc::MSG_DONTWAIT), Ok(4000));
    assert_eq!(send(p.a, &[7; 200], libc::MSG_MORE | libc::MSG_DONTWAIT), Ok(96));
    assert_eq!(there(&p).unwrap().len(), 4096);
}

#[test]
fn shutdown_or_close_releases_held_bytes() {
    let mut p = on_ring(1 << 20);
    send(p.a, b"last", libc::MSG_MORE).unwrap();
    shutdown(p.a, libc::SHUT_WR);
    assert_eq!(recv(p.b, 9, 0).unwrap(), b"last");
    assert_eq!(recv(p.b, 9, 0).unwrap(), b"");
    p = on_ring(1 << 20);
    send(p.a, b"last", libc::MSG_MORE).unwrap();
    close(std::mem::replace(&mut p.a, -1));
    assert_eq!(recv(p.b, 9, 0).unwrap(), b"last");
    assert_eq!(recv(p.b, 9, 0).unwrap(), b"");
}

#[test]
fn way_to_tcp_and_back_keeps_held_bytes_in_order() {
    let p = on_ring(1 << 20);
    send(p.a, b"one ", libc::MSG_MORE).unwrap();
    Descent { conn: p.conn_a(), reason: Reason::Option, shared: true }.begin();
    send(p.a, b"two ", 0).unwrap();
    assert_eq!(ways(p.conn_a()).0, Way::Tcp);
    assert_eq!(recv(p.b, 8, libc::MSG_WAITALL).unwrap(), b"one two ");
    p.conn_a().allow_ring(p.conn_a().ring_path.reason());
    send(p.a, b"three ", 0).unwrap();
    assert_eq!(ways(p.conn_a()).0, Way::Ring);
    assert_eq!(recv(p.b, 6, libc::MSG_WAITALL).unwrap(), b"three ");
    send(p.a, b"four", libc::MSG_MORE).unwrap();
    assert_held(&p);
}

#[test]
fn sleeper_beside_held_bytes_is_not_armed() {
    let p = on_ring(1 << 20);
    let b = p.conn_b();
    send(p.a, b"one ", libc::MSG_MORE).unwrap();
    let armed = Armed::begin(b, Interest::IN);
    assert!(!armed.is_in_force(b), "nobody rings when the time of the hold is over");
    let bells = || p.conn_a().pages().unwrap().own.control.tx.counters.bells_rung.load(Ordering::Relaxed);
    let before = bells();
    send(p.a, b"two ", libc::MSG_MORE).unwrap();
    assert_eq!(bells(), before, "there is nothing to be read");
    cork(p.a, false);
    assert_eq!(bells(), before + 1);
    assert_eq!(there(&p).unwrap(), b"one two ");
}

#[test]
fn full_ring_for_pipe_releases_held_bytes() {
    let p = on_ring(4096);
    send(p.a, &[7; 4000], libc::MSG_DONTWAIT).unwrap();
    assert_eq!(send(p.a, &[7; 96], libc::MSG_MORE | libc::MSG_DONTWAIT), Ok(96));
    assert_eq!(ioctl_number(p.b, libc::FIONREAD), 4000);
    assert_eq!(p.conn_a().send_from(p.a, 100, true, &mut relay::Failing { left: 1 }), Err(Errno::AGAIN));
    assert_eq!(there(&p).unwrap().len(), 4096);
}

#[test]
fn changing_held_word_does_not_restart_timeout() {
    let p = on_ring(4096);
    let word = &p.conn_a().pages().unwrap().own.tx_path.held;
    send(p.a, b"bytes", 0).unwrap();
    let deadline = crate::sys::now() + Duration::from_secs(60);
    for lie in [1, 2].into_iter().cycle() {
        word.store(lie, Ordering::Relaxed);
        if there(&p).is_ok() {
            break;
        }
        assert!(crate::sys::now() < deadline, "its bytes are held back for ever");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn liar_delays_its_own_bytes_only_and_keeps_no_thread() {
    let p = on_ring(4096);
    let word = &p.conn_a().pages().unwrap().own.tx_path.held;
    timeout(p.b, libc::SO_RCVTIMEO, 100_000);
    for lie in [1, 2, 3, 1000, u64::MAX - 1, u64::MAX] {
        send(p.a, b"bytes", 0).unwrap();
        word.store(lie, Ordering::Relaxed);
        assert_eq!(recv(p.b, 5, libc::MSG_WAITALL).unwrap(), b"bytes", "{lie}");
    }
    // At the end, and at a switch, whatever it says.
    send(p.a, b"bytes", 0).unwrap();
    Descent { conn: p.conn_a(), reason: Reason::Option, shared: true }.begin();
    send(p.a, b"!", 0).unwrap();
    word.store(2, Ordering::Relaxed);
    assert_eq!(recv(p.b, 6, libc::MSG_WAITALL).unwrap(), b"bytes!");
    shutdown(p.a, libc::SHUT_WR);
    word.store(2, Ordering::Relaxed);
    assert_eq!(recv(p.b, 6, 0).unwrap(), b"");
}
