//! How a connection ends: orderly, by a reset, by a peer that breaks the protocol.

use super::*;

#[test]
fn bytes_after_both_directions_are_shut_cause_reset() {
    let p = Pair::up(4096);
    send(p.a, b"read", 0).unwrap();
    assert_eq!(recv(p.b, 9, 0).unwrap(), b"read");
    shutdown(p.b, libc::SHUT_RDWR);
    assert_eq!(send(p.a, b"too late", libc::MSG_NOSIGNAL), Ok(8), "as over TCP: taken");
    assert_eq!(send(p.a, b"too late", libc::MSG_NOSIGNAL), Err(Errno::PIPE), "and answered");
    assert_eq!(recv(p.b, 9, 0), Err(Errno::CONNRESET), "and nobody gets it");
    assert_eq!(recv(p.b, 9, 0).unwrap(), b"");
}

#[test]
fn bytes_sent_before_close_are_read_and_then_end() {
    let mut p = Pair::up(4096);
    send(p.a, b"last words", 0).unwrap();
    close(p.a);
    p.a = -1;
    assert_eq!(recv(p.b, 4, 0).unwrap(), b"last");
    assert_eq!(recv(p.b, 100, 0).unwrap(), b" words");
    assert_eq!(recv(p.b, 100, 0).unwrap(), b"");
    assert_eq!(recv(p.b, 100, 0).unwrap(), b"");
    // As over TCP: the first write is taken, and answered with a reset; the next one fails.
    assert_eq!(send(p.b, b"hello?", libc::MSG_NOSIGNAL), Ok(6));
    let deadline = crate::sys::now() + Duration::from_secs(60);
    let failed = loop {
        std::thread::sleep(Duration::from_millis(1));
        let failed = send(p.b, b"hello?", libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL).err();
        // The ring is full until the writer learns that the reader has gone.
        let is_full = failed == Some(Errno::AGAIN);
        if (failed.is_some() && !is_full) || crate::sys::now() > deadline {
            break failed;
        }
    };
    assert!(matches!(failed, Some(Errno::PIPE | Errno::CONNRESET)), "{failed:?}");
}

#[test]
fn closing_with_bytes_unread_resets() {
    let mut p = Pair::up(4096);
    send(p.a, b"never read", 0).unwrap();
    send(p.b, b"read", 0).unwrap();
    close(p.b);
    p.b = -1;
    assert_eq!(recv(p.a, 100, 0).unwrap(), b"read", "what came before the reset is still there");
    assert_eq!(recv(p.a, 100, 0), Err(Errno::CONNRESET));
    assert_eq!(recv(p.a, 100, 0).unwrap(), b"");
}

/// The peer's kernel has said nothing yet: what a sender gets is decided by memory alone.
#[test]
fn sender_asleep_on_full_ring_is_reset_by_peer_state() {
    for (finished, told) in [(false, Errno::CONNRESET), (true, Errno::PIPE)] {
        let p = Pair::up(4096);
        send(p.b, b"read", 0).unwrap();
        while send(p.a, &[7; 1000], libc::MSG_DONTWAIT).is_ok() {}
        std::thread::scope(|s| {
            let sender = s.spawn(|| send(p.a, b"more", libc::MSG_NOSIGNAL));
            std::thread::sleep(Duration::from_millis(30));
            let own = p.conn_b().pages().unwrap().own;
            if finished {
                TxState::Finished.store(&own.control.tx.control.state);
            }
            RxState::Reset.store(&own.control.rx.control.state);
            p.conn_b().bell().ring();
            assert_eq!(sender.join().unwrap(), Err(told), "finished: {finished}");
        });
        assert_eq!(send(p.a, b"more", libc::MSG_NOSIGNAL), Err(Errno::PIPE), "the error is reported once");
        assert_eq!(recv(p.a, 100, 0).unwrap(), b"read", "what came before the reset is still there");
        assert_eq!(recv(p.a, 100, 0).unwrap(), b"");
    }
}

#[test]
fn closing_says_in_memory_whether_bytes_stay_unread() {
    for (unread, said) in [(true, (TxState::Open, RxState::Reset)), (false, (TxState::Finished, RxState::Closed))] {
        let mut p = Pair::up(4096);
        send(p.a, b"byte", 0).unwrap();
        recv(p.b, if unread { 3 } else { 4 }, 0).unwrap();
        close(p.b);
        p.b = -1;
        let peer = p.conn_a().pages().unwrap().peer;
        let tx = TxState::load(&peer.control.tx.control.state).unwrap();
        let rx = RxState::load(&peer.control.rx.control.state).unwrap();
        assert_eq!((tx, rx), said, "unread: {unread}");
    }
}

#[test]
fn shutdown_in_each_direction() {
    let p = Pair::up(4096);
    send(p.a, b"request", 0).unwrap();
    shutdown(p.a, libc::SHUT_WR);
    assert_eq!(send(p.a, b"more", libc::MSG_NOSIGNAL), Err(Errno::PIPE));
    assert_eq!(recv(p.b, 100, 0).unwrap(), b"request");
    assert_eq!(recv(p.b, 100, 0).unwrap(), b"");
    send(p.b, b"answer", 0).unwrap();
    assert_eq!(recv(p.a, 100, 0).unwrap(), b"answer");
    shutdown(p.a, libc::SHUT_RD);
    assert_eq!(recv(p.a, 100, 0).unwrap(), b"");
}

#[test]
fn sleeping_reader_is_woken_by_close_of_peer() {
    let mut p = Pair::up(4096);
    let a = p.a;
    p.a = -1;
    std::thread::scope(|s| {
        let reader = s.spawn(|| recv(p.b, 10, 0));
        std::thread::sleep(Duration::from_millis(30));
        close(a);
        assert_eq!(reader.join().unwrap().unwrap(), b"");
    });
}

#[test]
fn peer_with_false_switch_count_is_reset() {
    let p = Pair::up(4096);
    send(p.a, b"x", 0).unwrap();
    recv(p.b, 1, 0).unwrap();
    let pages = p.conn_a().pages().unwrap();
    pages.own.tx_path.switches.store(77, Ordering::Relaxed);
    assert_eq!(recv(p.b, 1, libc::MSG_DONTWAIT), Err(Errno::CONNRESET));
    assert_eq!(send(p.b, b"x", libc::MSG_NOSIGNAL), Err(Errno::CONNRESET));
    assert_eq!(p.conn_b().ring_path.reason(), Reason::Corrupt);
}

#[test]
fn unknown_state_of_the_peer_resets_the_connection() {
    for (tx, rx) in [(9, 0), (0, 9)] {
        let p = Pair::up(4096);
        assert_eq!(send(p.a, b"to the ring", 0), Ok(11));
        assert_eq!(send(p.b, b"and back", 0), Ok(8));
        assert_eq!(recv(p.a, 10, 0).unwrap(), b"and back");
        let b = p.conn_b().pages().unwrap().own;
        b.control.tx.control.state.store(tx, Ordering::Relaxed);
        b.control.rx.control.state.store(rx, Ordering::Relaxed);
        assert_eq!(recv(p.a, 10, libc::MSG_DONTWAIT), Err(Errno::CONNRESET), "{tx} {rx}");
        assert_eq!(send(p.a, b"more", libc::MSG_NOSIGNAL), Err(Errno::CONNRESET), "{tx} {rx}");
        assert!(p.conn_a().death().is_reset(), "and not an end in order");
    }
}

#[test]
fn unknown_state_of_the_reader_resets_the_first_send() {
    let p = Pair::up(4096);
    assert_eq!(send(p.a, b"to the ring", 0), Ok(11));
    p.conn_b().pages().unwrap().own.control.rx.control.state.store(9, Ordering::Relaxed);
    // The rare question whether the peer is alive is not due: the sender sees the word when it chooses between ring and TCP.
    p.conn_a().moves.looked_at.store(sys::ticks(), Ordering::Relaxed);
    assert_eq!(send(p.a, b"more", libc::MSG_NOSIGNAL), Err(Errno::CONNRESET), "and not an end in order");
    assert_eq!(p.conn_a().ring_path.reason(), Reason::Corrupt);
}

#[test]
fn half_closed_reader_does_not_take_its_peer_for_dead() {
    let p = Pair::up(4096);
    assert_eq!(send(p.a, b"unread", 0), Ok(6));
    shutdown(p.a, libc::SHUT_RD);
    assert!(!p.conn_a().death().look_for_reset());
    assert_eq!(send(p.a, b", and more", 0), Ok(10));
    assert_eq!(recv(p.b, 100, 0).unwrap(), b"unread, and more");
}

impl Conn {
    /// Whether a thread sleeps in the kernel on it.
    pub(crate) fn is_slept_on(&self) -> bool {
        self.kernel.in_kernel.load(Ordering::SeqCst) != 0
    }
}

#[test]
fn peer_that_omits_bytes_at_switch_is_reset() {
    let p = Pair::up(4096);
    send(p.a, b"x", 0).unwrap();
    recv(p.b, 1, 0).unwrap();
    // It says that it left the ring two bytes further on than it wrote.
    let pages = p.conn_a().pages().unwrap();
    pages.own.tx_path.switched_at.store(3, Ordering::Relaxed);
    pages.own.tx_path.switches.store(2, Ordering::Relaxed);
    assert_eq!(recv(p.b, 1, libc::MSG_DONTWAIT), Err(Errno::CONNRESET));
}

/// A peer that announces the next change of way whenever the last one was followed always has something to look at again.
#[test]
fn liar_that_switches_whenever_it_is_followed_keeps_no_call() {
    let p = Pair::up(4096);
    let (a, b) = (p.conn_a().pages().unwrap().own, p.conn_b().pages().unwrap().own);
    timeout(p.a, libc::SO_RCVTIMEO, 30);
    let stop = std::sync::atomic::AtomicBool::new(false);
    let longest = std::thread::scope(|s| {
        s.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                let seen = a.rx_path.seen.load(Ordering::Acquire);
                b.tx_path.switches.store(seen.wrapping_add(1), Ordering::Release);
            }
        });
        let passed = || a.control.rx.counters.switches.load(Ordering::Relaxed);
        let mut longest = 0;
        for flags in [libc::MSG_DONTWAIT, libc::MSG_DONTWAIT | libc::MSG_PEEK].repeat(2000) {
            let before = passed();
            assert_eq!(recv(p.a, 9, flags), Err(Errno::AGAIN));
            longest = longest.max(passed() - before);
        }
        for _ in 0..3 {
            assert_eq!(recv(p.a, 9, 0), Err(Errno::AGAIN), "the time is over");
        }
        stop.store(true, Ordering::Relaxed);
        longest
    });
    assert!((1..=16).contains(&longest), "one call has followed {longest} changes");
}
