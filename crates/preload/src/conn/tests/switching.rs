//! Switches between TCP and the ring.

use super::*;
use crate::conn::accounts;

#[test]
fn bytes_go_by_the_ring_and_counts_by_tcp_go_on() {
    let p = Pair::candidates(1 << 16);
    assert_eq!(send(p.a, b"first by tcp", 0), Ok(12));
    assert_eq!(recv(p.b, 5, 0).unwrap(), b"first");
    call_by_kernel(p.conn_b(), p.b).received(-1, false);
    p.bring_up();
    assert_eq!(send(p.a, b", then by ring", 0), Ok(14));
    assert_eq!(ways(p.conn_a()).0, Way::Ring);
    assert_eq!(ioctl_number(p.b, libc::FIONREAD), 7 + 14, "what is in both");
    // One call takes all there is, as from one stream.
    assert_eq!(recv(p.b, 100, libc::MSG_PEEK).unwrap(), b" by tcp, then by ring");
    assert_eq!(recv(p.b, 100, 0).unwrap(), b" by tcp, then by ring");
    assert_eq!(recv(p.b, 100, libc::MSG_DONTWAIT), Err(Errno::AGAIN));
    assert_eq!(send(p.b, b"and back", 0), Ok(8));
    assert_eq!(recv(p.a, 100, 0).unwrap(), b"and back");
    assert_eq!(ioctl_number(p.a, libc::TIOCOUTQ), 0);
}

#[test]
fn bytes_that_passed_unseen_keep_it_on_tcp() {
    let p = Pair::candidates(1 << 16);
    assert_eq!(accounts::is_accounted_for(p.conn_a(), p.a), Some(true));
    assert_eq!(accounts::is_accounted_for(p.conn_b(), p.b), Some(true));
    // Past our functions, as by a raw system call.
    rustix::io::write(crate::sys::borrow(p.a), b"unseen").unwrap();
    assert_eq!(accounts::is_accounted_for(p.conn_a(), p.a), Some(false));
    assert_eq!(accounts::is_accounted_for(p.conn_b(), p.b), Some(true), "not read yet");
    rustix::io::read(crate::sys::borrow(p.b), &mut [0; 3]).unwrap();
    assert_eq!(accounts::is_accounted_for(p.conn_b(), p.b), Some(false));
}

#[test]
fn down_and_up_again_in_mid_stream() {
    let p = Pair::up(1 << 14);
    let mut sent = 0u32;
    let mut received = Vec::new();
    let mut expected = Vec::new();
    for round in 0..200u32 {
        for _ in 0..round % 7 {
            let piece: Vec<u8> = (0..round * 13 % 300).map(|i| (sent + i) as u8).collect();
            sent += piece.len() as u32;
            expected.extend_from_slice(&piece);
            assert_eq!(send(p.a, &piece, 0), Ok(piece.len()));
        }
        match round % 5 {
            1 => p.conn_b().stay_on_tcp(Reason::Told),
            3 => p.conn_b().allow_ring(p.conn_b().ring_path.reason()),
            _ => {}
        }
        while let Ok(bytes) = recv(p.b, (round as usize * 7) % 500 + 1, libc::MSG_DONTWAIT) {
            received.extend_from_slice(&bytes);
            if received.len() >= expected.len() && round % 3 == 0 {
                break;
            }
        }
    }
    while received.len() < expected.len() {
        received.extend_from_slice(&recv(p.b, 4096, 0).unwrap());
    }
    assert_eq!(received, expected);
    assert!(p.conn_a().tx.hold().unwrap().path.switches() > 20, "it went up and down");
}

#[test]
fn stream_survives_constant_switching_with_small_ring() {
    let p = Pair::up(4096);
    let total = 2_000_000usize;
    let byte = |i: usize| (i * 31 + i / 251) as u8;
    std::thread::scope(|s| {
        s.spawn(|| {
            let mut at = 0;
            while at < total {
                let n = (at * 7 % 9000 + 1).min(total - at);
                let piece: Vec<u8> = (at..at + n).map(byte).collect();
                assert_eq!(send(p.a, &piece, 0), Ok(n));
                at += n;
            }
        });
        s.spawn(|| {
            for i in 0..200 {
                std::thread::sleep(Duration::from_micros(300));
                if i % 2 == 0 {
                    p.conn_b().stay_on_tcp(Reason::Told)
                } else {
                    p.conn_b().allow_ring(p.conn_b().ring_path.reason())
                }
            }
        });
        let mut at = 0;
        while at < total {
            let got = recv(p.b, 5000, 0).unwrap();
            assert!(!got.is_empty());
            for b in got {
                assert_eq!(b, byte(at), "byte {at}");
                at += 1;
            }
        }
    });
}

#[test]
fn bytes_held_by_kernel_are_sent_when_stream_moves_to_ring() {
    for corked in [false, true] {
        let p = Pair::candidates(65536);
        if corked {
            cork(p.a, true);
        }
        assert_eq!(send(p.a, b"held back", libc::MSG_MORE), Ok(9));
        assert_eq!(ioctl_number(p.b, libc::FIONREAD), 0);
        p.bring_up();
        assert_eq!(send(p.a, b", not any more", 0), Ok(14));
        assert_eq!(ways(p.conn_a()).0, Way::Ring);
        let there = if corked { 9 } else { 9 + 14 };
        assert_eq!(ioctl_number(p.b, libc::FIONREAD), there, "corked: {corked}");
        assert_eq!(recv(p.b, 100, libc::MSG_DONTWAIT).unwrap(), b"held back, not any more"[..there as usize]);
        assert_eq!(is_corked(p.a), corked);
        if corked {
            cork(p.a, false);
            assert_eq!(recv(p.b, 100, libc::MSG_DONTWAIT).unwrap(), b", not any more");
            cork(p.a, true);
        }
        assert_eq!(rustix::net::sockopt::tcp_nodelay(crate::sys::borrow(p.a)), Ok(false));
    }
}

#[test]
fn cork_reaches_kernel_only_when_it_is_needed() {
    let p = Pair::up(65536);
    let in_kernel = || rustix::net::sockopt::tcp_cork(crate::sys::borrow(p.a)).unwrap();
    // Not on the ring yet: bytes that the kernel holds back would hold up what follows them.
    cork(p.a, true);
    assert!(in_kernel());
    assert_eq!(send(p.a, b"x", 0), Ok(1));
    cork(p.a, false);
    assert!(!in_kernel());
    assert_eq!(ways(p.conn_a()).0, Way::Ring);
    // On the ring.
    cork(p.a, true);
    assert!(!in_kernel(), "no need to know");
    cork(p.a, false);
    cork(p.a, true);
    assert!(is_corked(p.a), "the program reads what it has set");
    assert!(in_kernel());
    cork(p.a, false);
    assert!(!in_kernel());
    // Back on TCP.
    cork(p.a, true);
    Descent { conn: p.conn_a(), reason: Reason::Option, shared: false }.begin();
    assert!(in_kernel());
}

#[test]
fn connection_brought_down_has_no_bytes_in_rings() {
    let p = Pair::up(4096);
    send(p.a, b"up", 0).unwrap();
    assert_eq!(recv(p.b, 9, 0).unwrap(), b"up");
    send(p.b, b"up", 0).unwrap();
    assert_eq!(recv(p.a, 9, 0).unwrap(), b"up");
    assert_eq!(ways(p.conn_a()), (Way::Ring, Way::Ring));
    std::thread::scope(|s| {
        // The peer sleeps in its own call, as most do.
        let peer = s.spawn(|| recv(p.b, 100, 0));
        std::thread::sleep(Duration::from_millis(20));
        p.conn_a().bring_down(Reason::Exec);
        assert!(!p.conn_a().has(flags::BROKEN));
        // From here on past us, as another program would.
        rustix::io::write(crate::sys::borrow(p.a), b"from beyond").unwrap();
        assert_eq!(peer.join().unwrap().unwrap(), b"from beyond");
    });
    send(p.b, b"answer", 0).unwrap();
    let mut buffer = [0; 100];
    assert_eq!(rustix::io::read(crate::sys::borrow(p.a), &mut buffer).unwrap(), 6);
}

#[test]
fn peer_without_watching_flag_is_left_on_tcp() {
    let p = Pair::up(4096);
    let pages = p.conn_b().pages().unwrap();
    pages.own.rx_path.flags.fetch_and(!path_flags::WATCHING, Ordering::Relaxed);
    send(p.a, b"by tcp", 0).unwrap();
    assert_eq!(ways(p.conn_a()).0, Way::Tcp);
    assert_eq!(recv(p.b, 9, 0).unwrap(), b"by tcp");
    assert_eq!(p.conn_a().ring_path.stage(), ConnStage::Attached);
}

#[test]
fn bytes_that_come_over_tcp_past_the_ring_are_noticed() {
    let p = Pair::up(4096);
    send(p.a, b"x", 0).unwrap();
    recv(p.b, 1, 0).unwrap();
    // These bytes bypass our functions, so their place in the stream is unknown.
    rustix::io::write(crate::sys::borrow(p.a), b"unseen").unwrap();
    assert_eq!(recv(p.b, 10, 0), Err(Errno::CONNRESET));
}

#[test]
fn urgent_bytes_go_by_tcp_and_the_rest_after_them_too() {
    let p = Pair::up(4096);
    send(p.a, b"before", 0).unwrap();
    assert_eq!(recv(p.b, 100, 0).unwrap(), b"before");
    assert_eq!(send(p.a, b"!", libc::MSG_OOB), Ok(1));
    assert_eq!(recv(p.b, 1, libc::MSG_OOB).unwrap(), b"!");
    assert_eq!(send(p.a, b"after", 0), Ok(5));
    assert_eq!(recv(p.b, 100, 0).unwrap(), b"after");
    assert_eq!(ways(p.conn_a()).0, Way::Tcp);
    assert_eq!(p.conn_a().ring_path.reason(), Reason::Option);
}
