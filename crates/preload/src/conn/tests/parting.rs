//! Connections to another machine whose bell is lost: both sides unmap their rings, and no byte is lost.

use super::*;
use crate::conn::accounts;
use crate::conn::leave;

/// As if a relay between the two machines had ended.
fn lose_bell(p: &Pair) {
    for conn in [p.conn_a(), p.conn_b()] {
        conn.ring_path.set_flag(flags::FAR, true);
    }
    let _ = rustix::net::shutdown(sys::borrow(p.conn_a().bell().fd()), rustix::net::Shutdown::Both);
    // Each side notices when it makes a call.
    p.conn_a().death().look();
}

fn is_mapped(conn: &Conn) -> bool {
    conn.local().own.ring_size() != 0 || conn.local().peer.ring_size() != 0
}

/// Calls that find nothing.
fn poll_both(p: &Pair) {
    p.conn_b().death().look();
    for _ in 0..4 {
        for fd in [p.a, p.b] {
            assert_eq!(recv(fd, 9, libc::MSG_DONTWAIT), Err(Errno::AGAIN));
        }
    }
}

#[test]
fn lost_bell_unmaps_rings_on_both_sides_and_bytes_go_on_by_tcp() {
    let p = Pair::up(4096);
    for (from, to) in [(p.a, p.b), (p.b, p.a)] {
        send(from, b"by ring", 0).unwrap();
        assert_eq!(recv(to, 9, 0).unwrap(), b"by ring");
    }
    lose_bell(&p);
    poll_both(&p);
    for conn in [p.conn_a(), p.conn_b()] {
        assert!(conn.has(flags::PARTED) && !is_mapped(conn) && !conn.has(flags::BROKEN));
        assert!(conn.is_tcp_permanently());
        assert_eq!(
            accounts::is_accounted_for(conn, conn.fd()),
            Some(true),
            "what is counted is what the kernel has carried"
        );
    }
    for (from, to) in [(p.a, p.b), (p.b, p.a)] {
        send(from, b"by tcp", 0).unwrap();
        assert_eq!(recv(to, 9, 0).unwrap(), b"by tcp");
        assert_eq!(recv(to, 9, libc::MSG_DONTWAIT), Err(Errno::AGAIN));
    }
    shutdown(p.a, libc::SHUT_WR);
    assert_eq!(recv(p.b, 9, 0).unwrap(), b"");
    send(p.b, b"half", 0).unwrap();
    assert_eq!(recv(p.a, 9, 0).unwrap(), b"half");
}

#[test]
fn ring_with_unread_bytes_stays_mapped_until_they_are_read() {
    let p = Pair::up(4096);
    send(p.a, b"unread", 0).unwrap();
    lose_bell(&p);
    for _ in 0..4 {
        send(p.a, b".", 0).unwrap();
        assert_eq!(recv(p.a, 9, libc::MSG_DONTWAIT), Err(Errno::AGAIN));
    }
    assert!(is_mapped(p.conn_a()) && is_mapped(p.conn_b()), "the peer has not followed to TCP");
    let mut got = Vec::new();
    while got.len() < 10 {
        got.extend(recv(p.b, 99, 0).unwrap());
    }
    assert_eq!(got, b"unread....");
    poll_both(&p);
    assert!(!is_mapped(p.conn_a()) && !is_mapped(p.conn_b()));
}

#[test]
fn side_with_silent_peer_keeps_rings_and_does_not_wait() {
    let p = Pair::up(4096);
    lose_bell(&p);
    for _ in 0..4 {
        assert_eq!(recv(p.a, 9, libc::MSG_DONTWAIT), Err(Errno::AGAIN));
    }
    assert!(!p.conn_a().has(flags::PARTED) && is_mapped(p.conn_a()));
    send(p.a, b"goes out", 0).unwrap();
    assert_eq!(recv(p.b, 9, 0).unwrap(), b"goes out");
}

#[test]
fn sleeping_reader_unmaps_and_sleeps_on() {
    let p = Pair::up(4096);
    std::thread::scope(|s| {
        let reads = s.spawn(|| recv(p.b, 9, 0).unwrap());
        while p.conn_b().pages().unwrap().own.control.rx.control.data_wanted.load(Ordering::Relaxed) == u64::MAX {
            std::thread::sleep(Duration::from_millis(1));
        }
        lose_bell(&p);
        let deadline = crate::sys::now() + Duration::from_secs(60);
        while is_mapped(p.conn_b()) {
            assert!(crate::sys::now() < deadline, "the sleeper has not unmapped");
            let _ = recv(p.a, 9, libc::MSG_DONTWAIT);
            std::thread::sleep(Duration::from_millis(1));
        }
        send(p.a, b"wakes it", 0).unwrap();
        assert_eq!(reads.join().unwrap(), b"wakes it");
    });
}

#[test]
fn side_that_has_said_tcp_only_never_goes_back_to_its_ring() {
    let p = Pair::up(4096);
    let a = p.conn_a();
    // Another thread has noticed the lost bell, and has not asked for TCP yet.
    a.ring_path.set_flag(flags::LINK_LOST, true);
    assert_eq!(recv(p.a, 9, libc::MSG_DONTWAIT), Err(Errno::AGAIN));
    let said = || a.pages().unwrap().own.rx_path.flags.load(Ordering::Relaxed);
    assert_eq!(said() & path_flags::TCP_ONLY, path_flags::TCP_ONLY);
    a.ring_path.set_flag(flags::WANT_TCP, true);
    a.allow_ring(a.ring_path.reason());
    assert_eq!(said() & path_flags::WANT_TCP, path_flags::WANT_TCP, "the peer would go up");
    a.ring_path.set_flag(flags::WANT_TCP, false);
    for _ in 0..4 {
        send(p.a, b"x", 0).unwrap();
        assert_eq!(ways(a).0, Way::Tcp);
        assert_eq!(recv(p.b, 9, 0).unwrap(), b"x");
    }
}

/// One thread lets the connection have its ring again while another asks for TCP.
#[test]
fn wish_for_tcp_that_comes_while_the_ring_is_allowed_stands() {
    for lost in [false, true] {
        let p = Pair::up(4096);
        let a = p.conn_a();
        a.stay_on_tcp(Reason::MovesNever);
        // It has found that reason, and this comes before it has taken the wish back.
        if lost {
            a.ring_path.set_flag(flags::FAR, true);
            a.death().link_has_hung_up();
        } else {
            a.stay_on_tcp(Reason::Option);
        }
        let reason = if lost { Reason::LinkLost } else { Reason::Option };
        a.allow_ring(Reason::MovesNever);
        let said = || a.pages().unwrap().own.rx_path.flags.load(Ordering::Relaxed) & path_flags::WANT_TCP != 0;
        assert_eq!((a.ring_path.reason(), a.has(flags::WANT_TCP), said()), (reason, true, true));
        // The same race, one step later.
        leave::take_wish_back(a);
        assert_eq!((a.ring_path.reason(), a.has(flags::WANT_TCP), said()), (reason, true, true));
        send(p.a, b"x", 0).unwrap();
        assert_eq!((ways(a).0, recv(p.b, 9, 0).unwrap()), (Way::Tcp, b"x".to_vec()));
    }
    let p = Pair::up(4096);
    p.conn_a().stay_on_tcp(Reason::MovesNever);
    p.conn_a().allow_ring(Reason::MovesNever);
    assert!(p.is_on_ring(), "it may have its ring where nobody objects");
}
