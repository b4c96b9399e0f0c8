//! Connections that leave for another program, and what lies unread in their rings.

use super::*;
use crate::conn::bring_up;

#[test]
fn idle_connection_is_handed_over_without_call_of_peer() {
    let p = Pair::up(4096);
    for (from, to) in [(p.a, p.b), (p.b, p.a)] {
        send(from, b"by ring", 0).unwrap();
        assert_eq!(recv(to, 9, 0).unwrap(), b"by ring");
    }
    assert_eq!(ways(p.conn_a()), (Way::Ring, Way::Ring));
    // The peer makes no call of ours in the meantime.
    p.conn_a().bring_down(Reason::Exec);
    assert!(!p.conn_a().has(flags::BROKEN));
    let passed = crate::sys::borrow(p.a);
    rustix::io::write(passed, b"past us").unwrap();
    assert_eq!(recv(p.b, 9, 0).unwrap(), b"past us");
    send(p.b, b"and back", 0).unwrap();
    let mut buffer = [0; 100];
    assert_eq!(rustix::io::read(passed, &mut buffer).unwrap(), 8);
}

/// All there is, past us, as another program would read it.
fn read_past(fd: c_int) -> Vec<u8> {
    let mut all = Vec::new();
    let mut buffer = [0; 4096];
    while let Ok(n @ 1..) =
        rustix::net::recv(crate::sys::borrow(fd), &mut buffer, rustix::net::RecvFlags::DONTWAIT).map(|n| n.0)
    {
        all.extend_from_slice(&buffer[..n]);
    }
    all
}

#[test]
fn unread_ring_bytes_are_resent_by_tcp_after_handover() {
    let p = Pair::up(4096);
    send(p.b, b"unread", 0).unwrap();
    // The peer makes no call meanwhile, and the handover returns all the same.
    p.conn_a().bring_down(Reason::Exec);
    assert!(!p.conn_a().has(flags::BROKEN));
    assert_eq!(read_past(p.a), b"", "it is under way");
    assert_eq!(ioctl_number(p.a, libc::FIONREAD), 0, "and for us likewise");
    send(p.b, b", and more", 0).unwrap();
    assert_eq!(read_past(p.a), b"unread, and more");
    assert_eq!(p.conn_b().look().unsent(), 0, "it is in the kernel's queue alone");
    send(p.b, b"and to us", 0).unwrap();
    assert_eq!(recv(p.a, 99, libc::MSG_PEEK).unwrap(), b"and to us", "if we read on ourselves, that is TCP");
    assert_eq!(recv(p.a, 99, 0).unwrap(), b"and to us");
    assert_eq!(recv(p.a, 99, libc::MSG_DONTWAIT), Err(Errno::AGAIN));
    send(p.a, b"answer", 0).unwrap();
    assert_eq!(recv(p.b, 9, 0).unwrap(), b"answer");
    // Not even known to have gone to the ring, behind bytes by TCP; and the peer's next call is a `shutdown`.
    for end in [libc::SHUT_WR, -1] {
        let mut p = Pair::candidates(4096);
        send(p.b, b"by tcp, ", 0).unwrap();
        p.bring_up();
        send(p.b, b"by ring", 0).unwrap();
        p.conn_a().bring_down(Reason::Passed);
        if end >= 0 {
            shutdown(p.b, end);
        } else {
            close(p.b);
            p.b = -1;
        }
        assert_eq!(read_past(p.a), b"by tcp, by ring");
        assert_eq!(recv(p.a, 9, 0).unwrap(), b"", "the end");
    }
}

#[test]
fn waiting_peer_resends_unread_ring_bytes_at_once() {
    let p = Pair::up(1 << 20);
    // More than the kernel takes while there is no reader, but not much more, as it takes only little at once and only after a pause.
    rustix::net::sockopt::set_socket_send_buffer_size(crate::sys::borrow(p.b), 4096).unwrap();
    rustix::net::sockopt::set_socket_recv_buffer_size(crate::sys::borrow(p.a), 4096).unwrap();
    let sent: Vec<u8> = (0..200_000u32).map(|i| (i * 7 + i / 251) as u8).collect();
    send(p.b, &sent, 0).unwrap();
    let mut got = recv(p.a, 1234, 0).unwrap();
    std::thread::scope(|s| {
        let waits = s.spawn(|| recv(p.b, 9, 0));
        std::thread::sleep(Duration::from_millis(50));
        let began = crate::sys::now();
        p.conn_a().bring_down(Reason::Exec);
        assert!(!p.conn_a().has(flags::BROKEN));
        while got.len() < sent.len() {
            got.extend_from_slice(&read_past(p.a));
            assert!(crate::sys::now() - began < Duration::from_secs(240), "{} of {} bytes came", got.len(), sent.len());
        }
        assert!(got == sent, "the same bytes");
        send(p.a, b"thanks", 0).unwrap();
        assert_eq!(waits.join().unwrap().unwrap(), b"thanks");
    });
}

#[test]
fn handover_resets_connection_whose_bytes_cannot_be_resent() {
    // The peer has ended.
    let p = Pair::up(4096);
    send(p.b, b"unread", 0).unwrap();
    shutdown(p.b, libc::SHUT_WR);
    p.conn_a().bring_down(Reason::Exec);
    assert!(p.conn_a().has(flags::BROKEN));
    // Or it has gone on by TCP behind what is unread.
    let p = Pair::up(4096);
    send(p.b, b"first", 0).unwrap();
    assert_eq!(recv(p.a, 1, 0).unwrap(), b"f");
    p.conn_b().stay_on_tcp(Reason::Told);
    send(p.b, b"second", 0).unwrap();
    assert_eq!(ways(p.conn_b()).0, Way::Tcp);
    p.conn_a().bring_down(Reason::Exec);
    assert!(p.conn_a().has(flags::BROKEN));
}

#[test]
fn lingering_connection_stays_on_tcp() {
    let p = Pair::candidates(4096);
    crate::conn::leave::reset_on_close(p.a);
    bring_up::offer(p.conn_a(), p.a);
    assert_eq!((p.conn_a().ring_path.stage(), p.conn_a().ring_path.reason()), (ConnStage::Tcp, Reason::Option));
}
