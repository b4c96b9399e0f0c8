//! Both ends of a connection in one process, each with its own block, regions and link, and no broker between.

mod attaching;

use super::{Conn, ConnStage, flags};
use crate::broker::PolicyView;
use crate::calls::testing::{ioctl_number, *};
use crate::conn::candidate::CandidateStep;
use crate::sys;
use partywall_protocol::upgrade::Upgrade;
use partywall_shm::layout::path_flags;
use partywall_shm::path::Way;
use partywall_shm::state::{RxState, TxState};
use partywall_shm::status::{Reason, Role};
use rustix::fd::{AsFd, AsRawFd, IntoRawFd};
use rustix::io::Errno;
use std::ffi::c_int;
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Two descriptors of one TCP connection.
pub(crate) struct Pair {
    pub(crate) a: c_int,
    pub(crate) b: c_int,
}

impl Pair {
    /// On TCP, and looked after by us on both sides.
    pub(crate) fn candidates(ring_size: u64) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let a = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (b, _) = listener.accept().unwrap();
        let policy = PolicyView { upgrade: Upgrade::After { calls: 0, bytes: 0 }, ring_size, spin_us: 20 };
        for (s, role) in [(&a, Role::Connecting), (&b, Role::Accepting)] {
            let (local, peer) = (s.local_addr().unwrap(), s.peer_addr().unwrap());
            Conn::adopt_under(policy, s.as_raw_fd(), role, local, peer).unwrap();
        }
        Self { a: a.into_raw_fd(), b: b.into_raw_fd() }
    }

    /// With a ring each way.
    pub(crate) fn up(ring_size: u64) -> Self {
        let pair = Self::candidates(ring_size);
        pair.bring_up();
        pair
    }

    /// What the broker and the two sides do together.
    pub(crate) fn bring_up(&self) {
        let (a, b) = (self.conn_a(), self.conn_b());
        let (ra, ga) = a.make_region().unwrap();
        let (rb, gb) = b.make_region().unwrap();
        let (bell_a, bell_b) = partywall_region::bell::pair().unwrap();
        assert!(a.local().keep_bell(bell_a) && b.local().keep_bell(bell_b));
        for (conn, fd, region, geometry) in [(a, self.a, &rb, gb), (b, self.b, &ra, ga)] {
            let (mut tx, mut rx) = (conn.tx.hold().unwrap(), conn.rx.hold().unwrap());
            assert!(conn.is_quiet());
            conn.attach(fd, &mut tx, &mut rx, region.as_fd(), geometry).unwrap();
        }
    }

    /// As if the broker had said that this process is at the other end of `b`.
    pub(crate) fn introduce(&self) {
        self.conn_b().note_neighbour(Some(crate::process::kernel_pid()));
    }

    /// Bells that `b` has rung for what it has written.
    pub(crate) fn bells_of_b(&self) -> u64 {
        self.conn_b().pages().unwrap().own.control.tx.counters.bells_rung.load(std::sync::atomic::Ordering::Relaxed)
    }

    pub(crate) fn conn_a(&self) -> &'static Conn {
        Conn::of(self.a).unwrap()
    }

    pub(crate) fn conn_b(&self) -> &'static Conn {
        Conn::of(self.b).unwrap()
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        for fd in [self.a, self.b] {
            if fd >= 0 {
                close(fd);
            }
        }
    }
}

fn ways(conn: &Conn) -> (Way, Way) {
    (conn.tx.hold().unwrap().path.way(), conn.rx.hold().unwrap().path.way())
}

#[test]
fn bytes_go_by_the_ring_and_counts_by_tcp_go_on() {
    let p = Pair::candidates(1 << 16);
    assert_eq!(send(p.a, b"first by tcp", 0), Ok(12));
    assert_eq!(recv(p.b, 5, 0).unwrap(), b"first");
    assert_eq!(p.conn_b().before_receiving(p.b), CandidateStep::Kernel);
    p.conn_b().received(-1, false);
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
    assert_eq!(p.conn_a().is_accounted_for(p.a), Some(true));
    assert_eq!(p.conn_b().is_accounted_for(p.b), Some(true));
    // Past our functions, as by a raw system call.
    rustix::io::write(crate::sys::borrow(p.a), b"unseen").unwrap();
    assert_eq!(p.conn_a().is_accounted_for(p.a), Some(false));
    assert_eq!(p.conn_b().is_accounted_for(p.b), Some(true), "not read yet");
    rustix::io::read(crate::sys::borrow(p.b), &mut [0; 3]).unwrap();
    assert_eq!(p.conn_b().is_accounted_for(p.b), Some(false));
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
            3 => p.conn_b().allow_ring(),
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
fn two_threads_and_a_small_ring_under_constant_switching() {
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
                if i % 2 == 0 { p.conn_b().stay_on_tcp(Reason::Told) } else { p.conn_b().allow_ring() }
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
fn peek_waitall_and_trunc() {
    let p = Pair::up(4096);
    send(p.a, b"abcdef", 0).unwrap();
    assert_eq!(recv(p.b, 4, libc::MSG_PEEK).unwrap(), b"abcd");
    assert_eq!(recv(p.b, 2, libc::MSG_TRUNC).unwrap().len(), 2, "discarded");
    assert_eq!(recv(p.b, 2, 0).unwrap(), b"cd");
    std::thread::scope(|s| {
        s.spawn(|| {
            for piece in [b"gh", b"ij", b"kl"] {
                std::thread::sleep(Duration::from_millis(10));
                send(p.a, piece, 0).unwrap();
            }
        });
        assert_eq!(recv(p.b, 8, libc::MSG_WAITALL).unwrap(), b"efghijkl");
    });
    send(p.a, b"x", 0).unwrap();
    assert_eq!(recv(p.b, 4, libc::MSG_WAITALL | libc::MSG_DONTWAIT).unwrap(), b"x");
    assert_eq!(recv(p.b, 0, libc::MSG_DONTWAIT), Err(Errno::AGAIN), "nothing of nothing");
    send(p.a, b"y", 0).unwrap();
    assert_eq!(recv(p.b, 0, 0).unwrap(), b"");
    assert_eq!(recv(p.b, 9, 0).unwrap(), b"y");
}

/// Bells that lie in a link.
fn bells(conn: &Conn) -> u64 {
    rustix::io::ioctl_fionread(crate::sys::borrow(conn.link())).unwrap()
}

#[test]
fn nobody_sleeps_on_a_full_link() {
    let p = Pair::up(4096);
    send(p.a, b"x", 0).unwrap();
    recv(p.b, 1, 0).unwrap();
    // More than it holds, and the edge of the last one is used up by a wait that ends without a result.
    for _ in 0..10_000 {
        p.conn_a().ring();
    }
    assert!(bells(p.conn_b()) > 200);
    timeout(p.b, libc::SO_RCVTIMEO, 20);
    assert_eq!(recv(p.b, 1, 0), Err(Errno::AGAIN));
    for _ in 0..10_000 {
        p.conn_a().ring();
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
    use crate::ready::Interest;
    let p = Pair::up(4096);
    let (a, b) = (p.conn_a(), p.conn_b());
    // What it waits for is two bytes, and the first comes before the peer could see its wish.
    let armed = b.arm(Interest::IN);
    send(p.a, b"x", 0).unwrap();
    assert!(!b.is_armed(armed), "the second byte would not be rung for");
    let armed = b.arm(Interest::IN);
    assert!(b.is_armed(armed));
    // Room comes before the peer could see that it is waited for, and another thread uses it.
    let n = send(p.a, &[0; 8192], libc::MSG_DONTWAIT).unwrap();
    let armed = a.arm(Interest::OUT);
    assert!(a.is_armed(armed));
    recv(p.b, n, libc::MSG_WAITALL).unwrap();
    send(p.a, &vec![0; n], libc::MSG_DONTWAIT).unwrap();
    assert!(!a.is_armed(armed), "the next room would not be rung for");
    let armed = a.arm(Interest::OUT);
    assert!(a.is_armed(armed));
}

#[test]
fn wishes_never_fill_a_link_that_nobody_sleeps_on() {
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
    // Nor does a writer whose reader stands still ring for nothing.
    let before = bells(p.conn_b());
    for _ in 0..4000 {
        send(p.a, b"x", 0).unwrap();
    }
    assert!(bells(p.conn_b()) <= before + 1);
}

#[test]
fn a_policy_that_changes_to_and_fro_does_not_fill_a_link() {
    let p = Pair::up(4096);
    send(p.b, b"x", 0).unwrap();
    recv(p.a, 1, 0).unwrap();
    let before = bells(p.conn_b());
    for _ in 0..500 {
        p.conn_a().stay_on_tcp(Reason::Told);
        p.conn_a().allow_ring();
    }
    assert!(bells(p.conn_b()) <= before + 4, "{} bells", bells(p.conn_b()));
}

#[test]
fn a_connection_at_rest_is_handed_over_though_its_peer_is_elsewhere() {
    let p = Pair::up(4096);
    for (from, to) in [(p.a, p.b), (p.b, p.a)] {
        send(from, b"by ring", 0).unwrap();
        assert_eq!(recv(to, 9, 0).unwrap(), b"by ring");
    }
    assert_eq!(ways(p.conn_a()), (Way::Ring, Way::Ring));
    // The peer makes no call of ours meanwhile.
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
fn what_lies_unread_in_a_ring_comes_by_tcp_to_whoever_takes_the_connection_over() {
    let p = Pair::up(4096);
    send(p.b, b"unread", 0).unwrap();
    // The peer makes no call meanwhile, and this is not for ever.
    p.conn_a().bring_down(Reason::Exec);
    assert!(!p.conn_a().has(flags::BROKEN));
    assert_eq!(read_past(p.a), b"", "it is under way");
    assert_eq!(ioctl_number(p.a, libc::FIONREAD), 0, "and for us likewise");
    send(p.b, b", and more", 0).unwrap();
    assert_eq!(read_past(p.a), b"unread, and more");
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
fn a_peer_that_waits_sends_again_at_once_what_was_left_in_its_ring() {
    let p = Pair::up(1 << 20);
    // More than the kernel takes while nobody reads there; not much more, as it takes so little at a time only after a pause.
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
fn what_cannot_be_sent_again_is_a_reset() {
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
fn a_stream_of_the_c_library_goes_by_the_ring() {
    let p = Pair::up(4096);
    send(p.a, b"a line\n", 0).unwrap();
    let fd = dup(p.b);
    // SAFETY: a descriptor of this test, which the stream owns from here on, and buffers of this test.
    #[expect(unsafe_code, reason = "calls C functions")]
    unsafe {
        let stream = crate::calls::testing::fdopen(fd, c"r+".as_ptr());
        assert!(!stream.is_null());
        assert_eq!(libc::fileno(stream), fd);
        let mut line = [0u8; 32];
        assert!(!libc::fgets(line.as_mut_ptr().cast(), 32, stream).is_null());
        assert_eq!(&line[..8], b"a line\n\0");
        assert_eq!(libc::fputs(c"an answer".as_ptr(), stream), 1);
        assert_eq!(libc::fclose(stream), 0);
    }
    assert_eq!(recv(p.a, 99, 0).unwrap(), b"an answer");
    assert!(Conn::of(fd).is_none(), "closed with the stream");
    assert_eq!(ways(p.conn_b()).0, Way::Ring);
}

#[test]
fn calls_go_on_after_handlers_that_ask_for_it_and_fail_after_others() {
    extern "C" fn nothing(_: i32) {}
    let install = |signal: i32, flags: i32| {
        // SAFETY: a handler that does nothing, for a signal that no other test uses.
        #[expect(unsafe_code, reason = "installs a signal handler")]
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = nothing as *const () as usize;
            action.sa_flags = flags;
            assert_eq!(crate::calls::testing::sigaction(signal, &action), 0);
        }
    };
    let (goes_on, fails) = (libc::SIGRTMIN() + 3, libc::SIGRTMIN() + 4);
    install(goes_on, libc::SA_RESTART);
    install(fails, 0);
    let p = Pair::up(4096);
    for (signal, result) in [(goes_on, Ok(b"x".to_vec())), (fails, Err(Errno::INTR))] {
        std::thread::scope(|s| {
            let (tell, hear) = std::sync::mpsc::channel();
            let reader = s.spawn(move || {
                // SAFETY: asks for this thread.
                #[expect(unsafe_code, reason = "calls a C function")]
                let me = unsafe { libc::pthread_self() };
                tell.send(me).unwrap();
                recv(p.b, 1, 0)
            });
            let thread = hear.recv().unwrap();
            // As often as it takes to find it in its call, if that ends it; otherwise a few times.
            for round in 0..1000 {
                std::thread::sleep(Duration::from_millis(20));
                if reader.is_finished() || (round == 3 && result.is_ok()) {
                    break;
                }
                // SAFETY: the thread has not been joined.
                #[expect(unsafe_code, reason = "calls a C function")]
                unsafe {
                    libc::pthread_kill(thread, signal);
                }
            }
            send(p.a, b"x", 0).unwrap();
            assert_eq!(reader.join().unwrap(), result);
        });
    }
}

#[test]
fn what_comes_after_both_directions_are_shut_is_answered_with_a_reset() {
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
fn what_was_sent_before_the_end_is_read_and_then_the_end() {
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
        // Full until it is known that nobody reads any more.
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
fn sender_asleep_on_a_full_ring_is_reset_by_the_word_of_the_peer() {
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
            p.conn_b().ring();
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
fn what_the_kernel_holds_back_goes_when_the_stream_goes_on_by_the_ring() {
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
        assert_eq!(ioctl_number(p.b, libc::FIONREAD), 9 + 14, "corked: {corked}");
        assert_eq!(recv(p.b, 100, libc::MSG_DONTWAIT).unwrap(), b"held back, not any more");
        assert_eq!(is_corked(p.a), corked);
        assert_eq!(rustix::net::sockopt::tcp_nodelay(crate::sys::borrow(p.a)), Ok(false));
    }
}

#[test]
fn what_the_ring_need_not_know_of_corks_the_kernel_learns_when_it_must() {
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
    p.conn_a().begin_down(Reason::Option, false);
    assert!(in_kernel());
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
fn a_full_ring_is_full_and_a_timeout_is_a_timeout() {
    let p = Pair::up(4096);
    assert_eq!(send(p.a, &[7; 10_000], libc::MSG_DONTWAIT), Ok(4096));
    assert_eq!(send(p.a, &[7; 10], libc::MSG_DONTWAIT), Err(Errno::AGAIN));
    timeout(p.a, libc::SO_SNDTIMEO, 30);
    assert_eq!(send(p.a, &[7; 10], 0), Err(Errno::AGAIN));
    timeout(p.a, libc::SO_RCVTIMEO, 30);
    assert_eq!(recv(p.a, 10, 0), Err(Errno::AGAIN));
    assert_eq!(recv(p.b, 10_000, 0).unwrap().len(), 4096);
    assert_eq!(send(p.a, &[7; 10], 0), Ok(10));
}

#[test]
fn non_blocking_sockets_do_not_wait() {
    let p = Pair::up(4096);
    nonblocking(p.b, true);
    assert_eq!(recv(p.b, 1, 0), Err(Errno::AGAIN));
    nonblocking(p.b, false);
    std::thread::scope(|s| {
        s.spawn(|| {
            std::thread::sleep(Duration::from_millis(20));
            send(p.a, b"x", 0).unwrap();
        });
        assert_eq!(recv(p.b, 1, 0).unwrap(), b"x");
    });
}

#[test]
fn copies_of_a_descriptor_are_the_same_connection() {
    let p = Pair::up(4096);
    let copy = dup(p.b);
    assert_eq!(Conn::of(copy).unwrap().index(), p.conn_b().index());
    send(p.a, b"one two", 0).unwrap();
    assert_eq!(recv(copy, 4, 0).unwrap(), b"one ");
    assert_eq!(recv(p.b, 4, 0).unwrap(), b"two");
    close(copy);
    assert!(Conn::of(copy).is_none());
    send(p.a, b"still", 0).unwrap();
    assert_eq!(recv(p.b, 9, 0).unwrap(), b"still", "the other descriptor is open");
}

#[test]
fn a_reader_asleep_is_woken_by_close_of_the_peer() {
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
fn to_bring_down_means_that_nothing_is_left_in_rings() {
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
fn a_peer_that_lies_about_its_switches_is_reset() {
    let p = Pair::up(4096);
    send(p.a, b"x", 0).unwrap();
    recv(p.b, 1, 0).unwrap();
    let pages = p.conn_a().pages().unwrap();
    pages.own.tx_path.switches.store(77, Ordering::Relaxed);
    assert_eq!(recv(p.b, 1, libc::MSG_DONTWAIT), Err(Errno::CONNRESET));
    assert_eq!(send(p.b, b"x", libc::MSG_NOSIGNAL), Err(Errno::CONNRESET));
    assert_eq!(p.conn_b().reason(), Reason::Corrupt);
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
        assert!(p.conn_a().is_reset(), "and not an end in order");
    }
}

#[test]
fn unknown_state_of_the_reader_resets_the_first_send() {
    let p = Pair::up(4096);
    assert_eq!(send(p.a, b"to the ring", 0), Ok(11));
    p.conn_b().pages().unwrap().own.control.rx.control.state.store(9, Ordering::Relaxed);
    // The rare question whether the peer is alive is not due: the sender sees the word when it chooses between ring and TCP.
    p.conn_a().looked_at.store(sys::ticks(), Ordering::Relaxed);
    assert_eq!(send(p.a, b"more", libc::MSG_NOSIGNAL), Err(Errno::CONNRESET), "and not an end in order");
    assert_eq!(p.conn_a().reason(), Reason::Corrupt);
}

#[test]
fn half_closed_reader_does_not_take_its_peer_for_dead() {
    let p = Pair::up(4096);
    assert_eq!(send(p.a, b"unread", 0), Ok(6));
    shutdown(p.a, libc::SHUT_RD);
    assert!(!p.conn_a().look_for_reset());
    assert_eq!(send(p.a, b", and more", 0), Ok(10));
    assert_eq!(recv(p.b, 100, 0).unwrap(), b"unread, and more");
}

#[test]
fn a_peer_that_does_not_watch_is_left_on_tcp() {
    let p = Pair::up(4096);
    let pages = p.conn_b().pages().unwrap();
    pages.own.rx_path.flags.fetch_and(!path_flags::WATCHING, Ordering::Relaxed);
    send(p.a, b"by tcp", 0).unwrap();
    assert_eq!(ways(p.conn_a()).0, Way::Tcp);
    assert_eq!(recv(p.b, 9, 0).unwrap(), b"by tcp");
    assert_eq!(p.conn_a().stage(), ConnStage::Attached);
}

impl Conn {
    /// Whether a thread sleeps in the kernel on it.
    pub(crate) fn is_slept_on(&self) -> bool {
        self.in_kernel.load(Ordering::SeqCst) != 0
    }
}

#[test]
fn a_peer_that_leaves_bytes_out_at_a_switch_is_reset() {
    let p = Pair::up(4096);
    send(p.a, b"x", 0).unwrap();
    recv(p.b, 1, 0).unwrap();
    // It says that it left the ring two bytes further on than it wrote.
    let pages = p.conn_a().pages().unwrap();
    pages.own.tx_path.switched_at.store(3, Ordering::Relaxed);
    pages.own.tx_path.switches.store(2, Ordering::Relaxed);
    assert_eq!(recv(p.b, 1, libc::MSG_DONTWAIT), Err(Errno::CONNRESET));
}

#[test]
fn bytes_that_come_over_tcp_past_the_ring_are_noticed() {
    let p = Pair::up(4096);
    send(p.a, b"x", 0).unwrap();
    recv(p.b, 1, 0).unwrap();
    // Past our functions: nobody could say where in the stream these belong.
    rustix::io::write(crate::sys::borrow(p.a), b"unseen").unwrap();
    assert_eq!(recv(p.b, 10, 0), Err(Errno::CONNRESET));
}

#[test]
fn files_and_pipes_go_straight_through_the_ring() {
    let p = Pair::up(8192);
    let mut file = tempfile::tempfile().unwrap();
    let content: Vec<u8> = (0..6000u32).map(|i| (i * 7) as u8).collect();
    std::io::Write::write_all(&mut file, &content).unwrap();
    let mut offset = 1000;
    assert_eq!(sendfile(p.a, file.as_raw_fd(), &mut offset, 100_000), Ok(5000), "up to the end of the file");
    assert_eq!(offset, 6000);
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let mut got = Vec::new();
    while got.len() < 5000 {
        let n = splice(p.b, writer.as_raw_fd(), 5000 - got.len()).unwrap();
        let mut part = vec![0; n];
        rustix::io::read(&reader, &mut part).unwrap();
        got.extend_from_slice(&part);
    }
    assert_eq!(got, &content[1000..]);
    assert_eq!(splice(p.b, writer.as_raw_fd(), 10), Err(Errno::AGAIN));
    rustix::io::write(&writer, b"through a pipe").unwrap();
    assert_eq!(splice(reader.as_raw_fd(), p.a, 100), Ok(14));
    assert_eq!(recv(p.b, 100, 0).unwrap(), b"through a pipe");
}

#[test]
fn error_of_a_file_that_is_sent_in_part_is_no_error_of_the_connection() {
    let p = Pair::up(4096);
    let mut pieces = [Ok(4), Err(Errno::IO)].into_iter();
    let sent = p.conn_a().send_from(p.a, 100, false, |_| pieces.next().unwrap());
    assert_eq!(sent, Ok(4));
    assert_eq!(recv(p.a, 9, libc::MSG_DONTWAIT), Err(Errno::AGAIN));
    assert_eq!(send(p.a, b"more", 0), Ok(4));
    assert_eq!(recv(p.b, 9, 0).unwrap().len(), 8);
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
    assert_eq!(p.conn_a().reason(), Reason::Option);
}

#[test]
fn a_connection_that_lingers_is_not_handed_over() {
    let p = Pair::candidates(4096);
    super::leave::reset_on_close(p.a);
    p.conn_a().offer(p.a);
    assert_eq!((p.conn_a().stage(), p.conn_a().reason()), (ConnStage::Tcp, Reason::Option));
}
