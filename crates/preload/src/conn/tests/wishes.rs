//! Wishes and the bells that they bring.

use super::*;

/// Bells that lie in a link.
fn bells(conn: &Conn) -> u64 {
    rustix::io::ioctl_fionread(crate::sys::borrow(conn.bell().fd())).unwrap()
}

#[test]
fn reader_is_woken_though_its_link_is_full() {
    let p = Pair::up(4096);
    send(p.a, b"x", 0).unwrap();
    recv(p.b, 1, 0).unwrap();
    // More than it holds, and the edge of the last one is used up by a wait that ends without a result.
    for _ in 0..10_000 {
        p.conn_a().bell().ring();
    }
    assert!(bells(p.conn_b()) > 200);
    timeout(p.b, libc::SO_RCVTIMEO, 20);
    assert_eq!(recv(p.b, 1, 0), Err(Errno::AGAIN));
    for _ in 0..10_000 {
        p.conn_a().bell().ring();
    }
    timeout(p.b, libc::SO_RCVTIMEO, 100_000);
    std::thread::scope(|s| {
        let reader = s.spawn(|| recv(p.b, 1, 0));
        std::thread::sleep(Duration::from_millis(100));
        let sent = crate::sys::now();
        send(p.a, b"y", 0).unwrap();
        assert_eq!(reader.join().unwrap().unwrap(), b"y");
        assert!(crate::sys::now() - sent < Duration::from_secs(60), "found when time was up: nobody was woken");
    });
}

#[test]
fn sleeper_that_finds_too_little_or_too_late_arms_again() {
    use crate::conn::Interest;
    let p = Pair::up(4096);
    let (a, b) = (p.conn_a(), p.conn_b());
    // The reader waits for two bytes, and the first comes before the peer could see its wish.
    let armed = Armed::begin(b, Interest::IN);
    send(p.a, b"x", 0).unwrap();
    assert!(!armed.is_in_force(b), "the second byte would not be rung for");
    let armed = Armed::begin(b, Interest::IN);
    assert!(armed.is_in_force(b));
    // Room comes before the peer could see that it is waited for, and another thread uses it.
    let n = send(p.a, &[0; 8192], libc::MSG_DONTWAIT).unwrap();
    let armed = Armed::begin(a, Interest::OUT);
    assert!(armed.is_in_force(a));
    recv(p.b, n, libc::MSG_WAITALL).unwrap();
    send(p.a, &vec![0; n], libc::MSG_DONTWAIT).unwrap();
    assert!(!armed.is_in_force(a), "the next room would not be rung for");
    let armed = Armed::begin(a, Interest::OUT);
    assert!(armed.is_in_force(a));
}

#[test]
fn wake_requests_do_not_fill_unattended_link() {
    let p = Pair::up(4096);
    for round in 0..5000 {
        // As a set does that is busy: it asks to be rung, and finds something at its next look.
        crate::ready::arm_for_tests(p.conn_b());
        crate::conn::heavy_fence();
        send(p.a, b"x", 0).unwrap();
        recv(p.b, 1, 0).unwrap();
        let waiting = bells(p.conn_b());
        assert!(waiting < 200, "{waiting} bells after {round} wishes");
        assert!(round < 100 || waiting > 0, "the last bell was taken, and with it the edges of others who wait");
    }
    // A writer whose reader stands still does not ring for nothing either.
    let before = bells(p.conn_b());
    for _ in 0..4000 {
        send(p.a, b"x", 0).unwrap();
    }
    assert!(bells(p.conn_b()) <= before + 1);
}

#[test]
fn alternating_policy_does_not_fill_link() {
    let p = Pair::up(4096);
    send(p.b, b"x", 0).unwrap();
    recv(p.a, 1, 0).unwrap();
    let before = bells(p.conn_b());
    for _ in 0..500 {
        p.conn_a().stay_on_tcp(Reason::Told);
        p.conn_a().allow_ring(p.conn_a().ring_path.reason());
    }
    assert!(bells(p.conn_b()) <= before + 4, "{} bells", bells(p.conn_b()));
}
