//! `sendfile` and `splice` on a connection whose way is TCP, and whose peer reads slowly.

use super::*;
use crate::broker::tests::alone::alone;
use crate::conn::{ByteSource, SendFault};
use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::sync::atomic::AtomicI32;

/// A source that has some bytes, and then fails.
pub(super) struct Failing {
    pub(super) left: usize,
}

impl ByteSource for Failing {
    const RAISES_SIGPIPE: bool = false;

    fn take(&mut self, _: &mut [u8]) -> Result<usize, Errno> {
        Some(std::mem::take(&mut self.left)).filter(|left| *left > 0).ok_or(Errno::IO)
    }

    fn give(&mut self, _: c_int, _: usize) -> Result<usize, SendFault> {
        panic!("the way is the ring")
    }
}

/// More than the buffers of both sockets hold.
const TOTAL: usize = 1 << 20;

fn content() -> Vec<u8> {
    (0..TOTAL).map(|i| (i * 31 + i / 251) as u8).collect()
}

fn file() -> File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&content()).unwrap();
    file.seek(SeekFrom::Start(0)).unwrap();
    file
}

/// A pair whose first side sends by TCP, with small buffers.
fn on_tcp(is_nonblocking: bool) -> Pair {
    let p = Pair::up(4096);
    number_option(p.a, libc::SOL_SOCKET, libc::SO_SNDBUF, 8192);
    number_option(p.b, libc::SOL_SOCKET, libc::SO_RCVBUF, 8192);
    p.conn_b().stay_on_tcp(Reason::Told);
    while ways(p.conn_a()).0 != Way::Tcp {
        send(p.a, b"x", 0).unwrap();
        recv(p.b, 1, 0).unwrap();
    }
    nonblocking(p.a, is_nonblocking);
    p
}

/// The result of a call on the first side in another thread. A call that waits for the second side would wait forever.
fn without_waiting(p: &Pair, call: impl FnOnce() -> Result<usize, Errno> + Send + 'static) -> Result<usize, Errno> {
    let (tell, hear) = std::sync::mpsc::channel();
    std::thread::spawn(move || tell.send(call()));
    hear.recv_timeout(HUNG).unwrap_or_else(|_| {
        // Its end first: it holds what is needed to close the connection.
        while hear.recv_timeout(Duration::from_millis(1)).is_err() {
            let _ = recv(p.b, 50_000, libc::MSG_DONTWAIT);
        }
        panic!("the call waits for the peer")
    })
}

/// Sends all by calls of `send`, which gets the number of bytes that are left and does not wait. Reads when a call finds no room, and compares
/// the bytes. Returns how many calls have sent less than they were to send.
fn send_in_parts(p: &Pair, mut send: impl FnMut(usize, usize) -> Result<usize, Errno>) -> usize {
    let (mut received, mut sent, mut partial) = (Vec::new(), 0, 0);
    while received.len() < TOTAL {
        match if sent < TOTAL { send(sent, TOTAL - sent) } else { Err(Errno::AGAIN) } {
            Ok(n) => {
                assert!(n > 0, "the end at {sent}");
                partial += usize::from(n < TOTAL - sent);
                sent += n;
            }
            Err(error) => {
                assert_eq!(error, Errno::AGAIN);
                received.extend(recv(p.b, 50_000, 0).unwrap());
            }
        }
    }
    assert!(received == content(), "the bytes differ");
    partial
}

#[test]
fn sendfile_to_slow_peer_returns_number_of_bytes_sent() {
    let (p, file) = (on_tcp(true), file());
    let (a, from) = (p.a, file.as_raw_fd());
    let partial = send_in_parts(&p, |sent, left| {
        let (n, offset) = std::sync::mpsc::channel();
        let result = without_waiting(&p, move || {
            let mut offset = sent as i64;
            let result = sendfile(a, from, &mut offset, left);
            n.send(offset).unwrap();
            result
        });
        assert_eq!(offset.recv().unwrap() as usize, sent + result.unwrap_or(0));
        result
    });
    assert!(partial > 0);
    assert_eq!((&file).stream_position().unwrap(), 0, "its own offset stays");
}

#[test]
fn sendfile_moves_file_offset_by_number_of_bytes_sent() {
    let (p, file) = (on_tcp(true), file());
    let (a, from) = (p.a, file.as_raw_fd());
    let partial = send_in_parts(&p, |sent, left| {
        let result = without_waiting(&p, move || sendfile_on(a, from, left));
        assert_eq!((&file).stream_position().unwrap() as usize, sent + result.unwrap_or(0));
        result
    });
    assert!(partial > 0);
    let (reader, _writer) = rustix::pipe::pipe().unwrap();
    assert_eq!(sendfile_on(a, reader.as_raw_fd(), 1), Err(Errno::INVAL), "a pipe has no offset");
}

/// Sends all by `splice` from a pipe that is kept full, and compares what stays in the pipe. Returns how many calls have sent less than they
/// were to send.
fn splice_in_parts(p: &Pair) -> usize {
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let (a, from) = (p.a, reader.as_raw_fd());
    let (content, mut written) = (content(), 0);
    rustix::io::ioctl_fionbio(&writer, true).unwrap();
    send_in_parts(p, |sent, left| {
        while let Ok(n) = rustix::io::write(&writer, &content[written..]) {
            written += n;
            if written == TOTAL {
                break;
            }
        }
        let result = without_waiting(p, move || splice(from, a, left));
        let in_pipe = rustix::io::ioctl_fionread(&reader).unwrap() as usize;
        assert_eq!(in_pipe, written - sent - result.unwrap_or(0));
        result
    })
}

#[test]
fn splice_to_slow_peer_leaves_the_rest_in_the_pipe() {
    // A socket that waits, and a call with `SPLICE_F_NONBLOCK`, too.
    for is_nonblocking in [true, false] {
        assert!(splice_in_parts(&on_tcp(is_nonblocking)) > 0);
    }
}

#[test]
fn splice_with_a_limit_of_unsent_bytes_does_not_wait() {
    for is_nonblocking in [true, false] {
        let p = on_tcp(is_nonblocking);
        number_option(p.a, libc::SOL_SOCKET, libc::SO_SNDBUF, 1 << 20);
        number_option(p.a, libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT, 4096);
        assert!(splice_in_parts(&p) > 0);
    }
}

#[test]
fn blocking_sendfile_to_slow_peer_sends_everything() {
    let (p, file) = (on_tcp(false), file());
    std::thread::scope(|scope| {
        let (a, from) = (p.a, file.as_raw_fd());
        let sending = scope.spawn(move || {
            let mut offset = 0;
            (sendfile(a, from, &mut offset, TOTAL), offset)
        });
        let mut received = Vec::new();
        while received.len() < TOTAL {
            received.extend(recv(p.b, 10_000, 0).unwrap());
        }
        assert!(received == content(), "the bytes differ");
        assert_eq!(sending.join().unwrap(), (Ok(TOTAL), TOTAL as i64));
    });
}

#[test]
fn splice_to_a_reset_connection_fails_with_the_error() {
    let mut p = on_tcp(true);
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    rustix::io::write(&writer, b"bytes").unwrap();
    let linger = libc::linger { l_onoff: 1, l_linger: 0 };
    assert!(sys::set_option(p.b, libc::SOL_SOCKET, libc::SO_LINGER, &linger));
    close(p.b);
    p.b = -1;
    let reset = rustix::event::PollFd::from_borrowed_fd(sys::borrow(p.a), rustix::event::PollFlags::empty());
    let a_minute = rustix::event::Timespec { tv_sec: 60, tv_nsec: 0 };
    assert_eq!(rustix::event::poll(&mut [reset], Some(&a_minute)), Ok(1), "the reset has come");
    assert_eq!(splice(reader.as_raw_fd(), p.a, 5), Err(Errno::CONNRESET));
    assert_eq!(rustix::io::ioctl_fionread(&reader).unwrap(), 5, "they stay in the pipe");
}

#[test]
fn handler_of_sigpipe_runs_with_direction_free() {
    let Some(_alone) = alone!() else { return };
    static SOCKET: AtomicI32 = AtomicI32::new(-1);
    static FREE: AtomicI32 = AtomicI32::new(-1);
    extern "C" fn handler(_: c_int) {
        let is_free = Conn::of(SOCKET.load(Ordering::Relaxed)).is_some_and(|conn| conn.tx.try_hold().is_some());
        FREE.store(is_free.into(), Ordering::Relaxed);
    }
    let p = on_tcp(true);
    SOCKET.store(p.a, Ordering::Relaxed);
    #[expect(unsafe_code, reason = "a signal handler of this test")]
    // SAFETY: no other test runs in this process, and the handler takes and gives back what handlers may take.
    unsafe {
        libc::signal(libc::SIGPIPE, handler as *const () as libc::sighandler_t);
    }
    crate::signals::changed();
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    rustix::io::write(&writer, b"bytes").unwrap();
    // Past the library, so that the kernel finds it.
    rustix::net::shutdown(sys::borrow(p.a), rustix::net::Shutdown::Write).unwrap();
    assert_eq!(splice(reader.as_raw_fd(), p.a, 5), Err(Errno::PIPE));
    assert_eq!(FREE.load(Ordering::Relaxed), 1);
}

#[test]
fn reader_waits_while_bytes_that_came_by_tcp_are_spliced() {
    let p = on_tcp(false);
    send(p.a, b"by tcp, more", 0).unwrap();
    std::thread::scope(|scope| {
        let mut reader = None;
        let write = |_, n| {
            reader = Some(scope.spawn(|| recv(p.b, 4, 0)));
            // Long enough for a reader that does not wait.
            std::thread::sleep(Duration::from_millis(100));
            Ok(n)
        };
        assert_eq!(p.conn_b().receive_into(p.b, 8, false, write), Ok(8));
        assert_eq!(reader.unwrap().join().unwrap().unwrap(), b"more");
    });
}

#[test]
fn splice_without_waiting_for_pipe_waits_for_blocking_socket() {
    let p = Pair::up(4096);
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    std::thread::scope(|scope| {
        let splicing = scope.spawn(|| splice(p.b, writer.as_raw_fd(), 10));
        std::thread::sleep(Duration::from_millis(50));
        send(p.a, b"x", 0).unwrap();
        assert_eq!(splicing.join().unwrap(), Ok(1));
    });
    assert_eq!(rustix::io::ioctl_fionread(&reader), Ok(1));
}
