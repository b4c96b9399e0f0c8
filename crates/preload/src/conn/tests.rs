//! Both ends of a connection in one process, each with its own block, regions and link, and no broker between.

mod attaching;
mod ending;
mod handover;
mod held;
mod hostile;
mod interrupts;
mod late_steps;
mod parting;
mod passing;
mod relay;
mod renewal;
mod signals;
mod switching;
mod wishes;

use super::{Armed, Conn, ConnStage, Descent, KernelSleep, flags};
use crate::broker::PolicyView;
use crate::calls::testing::{ioctl_number, *};
use crate::conn::bring_up;
use crate::conn::candidate;
use crate::conn::candidate::{CandidateStep, KernelCall};
use crate::sys;
use partywall_protocol::upgrade::Upgrade;
use partywall_protocol::wire::Located;
use partywall_shm::layout::path_flags;
use partywall_shm::path::Way;
use partywall_shm::state::{RxState, TxState};
use partywall_shm::status::{Reason, Role};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsFd, AsRawFd, IntoRawFd, OwnedFd};
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
        super::install(&crate::ready::WAITERS);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let a = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (b, _) = listener.accept().unwrap();
        let policy = PolicyView {
            upgrade: Upgrade::After { calls: 0, bytes: 0 },
            ring_size,
            spin_us: 20,
            ..PolicyView::UNKNOWN
        };
        for (s, role) in [(&a, Role::Connecting), (&b, Role::Accepting)] {
            let (local, peer) = (s.local_addr().unwrap(), s.peer_addr().unwrap());
            candidate::adopt_under(policy, s.as_raw_fd(), role, local, peer).unwrap();
        }
        Self { a: a.into_raw_fd(), b: b.into_raw_fd() }
    }

    /// A pair whose socket `enter` has seen before it was connected.
    pub(crate) fn entered_early(ring_size: u64, enter: impl FnOnce(c_int)) -> Self {
        super::install(&crate::ready::WAITERS);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap();
        let socket = rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::STREAM, None);
        let a = TcpStream::from(socket.unwrap());
        // As the exported `socket` and `connect` do.
        crate::ready::renumbered(a.as_raw_fd());
        crate::unconnected::made(a.as_raw_fd(), true);
        enter(a.as_raw_fd());
        rustix::net::connect(&a, &at).unwrap();
        let (b, _) = listener.accept().unwrap();
        let policy = PolicyView {
            upgrade: Upgrade::After { calls: 0, bytes: 0 },
            ring_size,
            spin_us: 20,
            ..PolicyView::UNKNOWN
        };
        for (s, role) in [(&a, Role::Connecting), (&b, Role::Accepting)] {
            let (local, peer) = (s.local_addr().unwrap(), s.peer_addr().unwrap());
            candidate::adopt_under(policy, s.as_raw_fd(), role, local, peer).unwrap();
        }
        crate::ready::connected(a.as_raw_fd());
        Self { a: a.into_raw_fd(), b: b.into_raw_fd() }
    }

    /// Whether the connecting side may be offered for a ring, as far as sets go.
    pub(crate) fn may_come_up(&self) -> bool {
        super::waiters::waiters().may_come_up(self.conn_a())
    }

    /// Whether the connecting side may go by its ring.
    pub(crate) fn is_on_ring(&self) -> bool {
        self.conn_a().is_up() && !self.conn_a().has(flags::WANT_TCP)
    }

    /// With a ring each way.
    pub(crate) fn up(ring_size: u64) -> Self {
        let pair = Self::candidates(ring_size);
        pair.bring_up();
        pair
    }

    /// With a ring each way and events beside the bell, as between machines with doorbell devices. If interrupts are lost, no event reaches
    /// the other side.
    pub(crate) fn up_with_events(ring_size: u64, are_lost: bool) -> Self {
        let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let way = || {
            let heard = event();
            let ringing = if are_lost { event() } else { heard.try_clone().unwrap() };
            (heard, ringing)
        };
        let ((heard_by_a, rung_by_b), (heard_by_b, rung_by_a)) = (way(), way());
        let pair = Self::candidates(ring_size);
        assert!(pair.bring_up_with([Some((heard_by_a, rung_by_a)), Some((heard_by_b, rung_by_b))], || {}));
        pair
    }

    /// Brings both sides up, as the broker and the two sides do together.
    pub(crate) fn bring_up(&self) {
        assert!(self.try_to_bring_up(|| {}));
    }

    /// The same, unless other threads are in the kernel with either end after `wait`.
    pub(crate) fn try_to_bring_up(&self, wait: impl FnOnce()) -> bool {
        self.bring_up_with([None, None], wait)
    }

    fn bring_up_with(&self, [of_a, of_b]: [Option<(OwnedFd, OwnedFd)>; 2], wait: impl FnOnce()) -> bool {
        let (a, b) = (self.conn_a(), self.conn_b());
        let mut held = [a, b].map(|conn| (conn.tx.hold().unwrap(), conn.rx.hold().unwrap()));
        let _ = (bring_up::is_quiet(a), bring_up::is_quiet(b));
        wait();
        if !a.kernel.is_quiet() || !b.kernel.is_quiet() {
            [a, b].iter().for_each(|conn| conn.ring_path.set_stage(ConnStage::Candidate));
            return false;
        }
        let (ra, ga) = bring_up::make_region(a).unwrap();
        let (rb, gb) = bring_up::make_region(b).unwrap();
        let (bell_a, bell_b) = partywall_region::bell::pair().unwrap();
        assert!(a.bell().keep(bell_a, of_a) && b.bell().keep(bell_b, of_b));
        let ends = [(a, self.a, &rb, gb), (b, self.b, &ra, ga)];
        for ((conn, fd, region, geometry), (tx, rx)) in ends.into_iter().zip(&mut held) {
            bring_up::attach(conn, fd, tx, rx, region.as_fd(), (Located::OwnMemory, geometry)).unwrap();
        }
        true
    }

    /// As if the broker had said that this program is at the other end of `b`.
    pub(crate) fn introduce(&self) {
        super::bell::note_neighbour(self.conn_b(), Some(crate::process::kernel_pid().into()));
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

#[test]
fn c_library_stream_uses_ring() {
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
fn call_restarts_after_handler_only_with_sa_restart() {
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
fn full_ring_and_timeouts_return_eagain() {
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
    nonblocking(p.b, true);
    assert_eq!(splice(p.b, writer.as_raw_fd(), 10), Err(Errno::AGAIN));
    nonblocking(p.b, false);
    rustix::io::write(&writer, b"through a pipe").unwrap();
    assert_eq!(splice(reader.as_raw_fd(), p.a, 100), Ok(14));
    assert_eq!(recv(p.b, 100, 0).unwrap(), b"through a pipe");
}

#[test]
fn file_error_after_partial_send_is_not_connection_error() {
    let p = Pair::up(4096);
    let sent = p.conn_a().send_from(p.a, 100, false, &mut relay::Failing { left: 4 });
    assert_eq!(sent, Ok(4));
    assert_eq!(recv(p.a, 9, libc::MSG_DONTWAIT), Err(Errno::AGAIN));
    assert_eq!(send(p.a, b"more", 0), Ok(4));
    assert_eq!(recv(p.b, 9, 0).unwrap().len(), 8);
}

/// Begins a call of a connection without a ring, which the kernel carries out.
fn call_by_kernel(conn: &'static Conn, fd: c_int) -> KernelCall {
    match conn.before_call(fd) {
        CandidateStep::Kernel(call) => call,
        CandidateStep::Up(_) => panic!("fd {fd} has a ring"),
    }
}
