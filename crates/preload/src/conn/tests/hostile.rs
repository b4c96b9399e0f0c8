//! Another process, forked while the connection lived, stores anything in the block that it shares with this one.

use super::*;

/// What a word that counts or marks something can hardly be.
const VALUES: [u64; 9] = [0, 1, 2, 7, 4096, 1 << 32, 1 << 62, u64::MAX - 1, u64::MAX];

/// A pair whose end `a` has carried bytes each way, and has more to read and to be read.
fn carrying() -> Pair {
    let p = Pair::up(4096);
    for _ in 0..3 {
        send(p.a, &[1; 3000], 0).unwrap();
        assert_eq!(recv(p.b, 2000, libc::MSG_WAITALL).unwrap().len(), 2000);
        send(p.b, &[2; 3000], 0).unwrap();
        assert_eq!(recv(p.a, 3000, libc::MSG_WAITALL).unwrap().len(), 3000);
        assert_eq!(recv(p.b, 1000, libc::MSG_WAITALL).unwrap().len(), 1000);
    }
    send(p.a, &[3; 500], 0).unwrap();
    send(p.b, &[4; 500], 0).unwrap();
    p
}

/// All kinds of calls. They may fail.
fn use_it(p: &Pair) {
    for _ in 0..2 {
        let _ = send(p.a, &[5; 100], libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL);
        let _ = send(p.a, &[5; 9000], libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL | libc::MSG_MORE);
        let _ = recv(p.a, 50, libc::MSG_DONTWAIT | libc::MSG_PEEK);
        let _ = recv(p.a, 9000, libc::MSG_DONTWAIT);
        let _ = crate::calls::testing::poll(p.a, libc::POLLIN | libc::POLLOUT, 0);
        p.conn_a().stay_on_tcp(Reason::Option);
    }
}

#[test]
fn words_of_a_direction_never_crash_a_call() {
    for is_exposed in [false, true] {
        for at in 0..crate::conn::direction::WORDS {
            for value in VALUES {
                for is_sending in [false, true] {
                    let p = carrying();
                    if is_exposed {
                        p.conn_a().local().expose();
                    }
                    let (tx, rx) = (&p.conn_a().tx, &p.conn_a().rx);
                    if is_sending {
                        tx.store_word(at, value)
                    } else {
                        rx.store_word(at, value)
                    }
                    use_it(&p);
                }
            }
        }
    }
}

#[test]
fn words_that_no_connection_has_reset_it() {
    // Head and tail beyond each other, more in the ring than it holds, and switches that were never made.
    for (at, value) in [(0, 0), (0, u64::MAX), (0, 1 << 20), (1, u64::MAX), (3, 9), (4, u64::MAX), (5, 1 << 40)] {
        let p = carrying();
        p.conn_a().tx.store_word(at, value);
        let sent = send(p.a, b"x", libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL);
        assert_eq!(sent, Err(Errno::CONNRESET), "word {at} of the sending direction is {value:#x}");
        assert!(p.conn_a().has(flags::BROKEN));
    }
    for (at, value) in [(0, u64::MAX), (0, 1 << 40), (1, 0), (1, 1 << 20), (4, 1)] {
        let p = carrying();
        p.conn_a().rx.store_word(at, value);
        let received = recv(p.a, 9, libc::MSG_DONTWAIT);
        assert_eq!(received, Err(Errno::CONNRESET), "word {at} of the receiving direction is {value:#x}");
    }
}

#[test]
fn error_word_that_is_no_error_is_none() {
    for value in [4096, 1 << 16, u32::MAX] {
        let p = carrying();
        p.conn_a().kernel.error.store(value, Ordering::Relaxed);
        assert_eq!(p.conn_a().errors().take(), None, "{value:#x}");
    }
}

#[test]
fn threads_exclude_each_other_after_child_frees_lock() {
    let p = carrying();
    p.conn_a().local().expose();
    let held = p.conn_a().tx.hold().unwrap();
    assert!(p.conn_a().tx.try_hold().is_none(), "this thread has it");
    p.conn_a().tx.free_lock();
    let other = std::thread::scope(|s| s.spawn(|| p.conn_a().tx.try_hold().is_none()).join().unwrap());
    assert!(other, "another thread of this process got the direction");
    drop(held);
    assert_eq!(send(p.a, b"x", 0), Ok(1));
}

#[test]
fn lock_that_another_process_keeps_delays_a_call_and_no_more() {
    let p = carrying();
    let (a, fd) = (p.conn_a(), p.a);
    a.local().expose();
    std::thread::scope(|s| {
        let (tell, told) = std::sync::mpsc::channel();
        let (end, ended) = std::sync::mpsc::channel::<()>();
        s.spawn(move || {
            // As a process that lives would, which has no part in the private locks of this one.
            a.tx.keep_lock();
            a.rx.keep_lock();
            tell.send(()).unwrap();
            let _ = ended.recv();
            a.tx.free_lock();
            a.rx.free_lock();
        });
        told.recv().unwrap();
        let refused = Err(Errno::AGAIN);
        assert_eq!(send(fd, b"x", libc::MSG_DONTWAIT), refused);
        assert_eq!(recv(fd, 9, libc::MSG_DONTWAIT), Err(Errno::AGAIN));
        drop(end);
    });
    assert_eq!(send(fd, b"x", 0), Ok(1));
}
