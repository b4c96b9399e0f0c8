//! `sendfile` and `splice`: straight between a file or pipe and the ring.
#![expect(unsafe_code, reason = "C functions")]

use crate::conn::{CandidateStep, Conn, KernelCall, REPLACED};
use crate::{real, sys};
use libc::{c_int, c_uint, loff_t, off_t, size_t, ssize_t};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;

/// The most bytes of one call, as in the kernel.
const MOST: usize = 0x7fff_f000;

export! {
    /// `sendfile`
    fn sendfile(to: c_int, from: c_int, offset: *mut off_t, count: size_t) -> ssize_t {
        // SAFETY: the caller's arguments, passed on; its offset is null or its own to be read and written during the call.
        unsafe { send(to, from, offset, count, || real::sendfile(to, from, offset, count)) }
    }

    /// `sendfile` of programs with large files.
    fn sendfile64(to: c_int, from: c_int, offset: *mut off_t, count: size_t) -> ssize_t {
        // SAFETY: as for `sendfile`.
        unsafe { send(to, from, offset, count, || real::sendfile64(to, from, offset, count)) }
    }

    /// `splice`
    fn splice(
        from: c_int,
        from_offset: *mut loff_t,
        to: c_int,
        to_offset: *mut loff_t,
        len: size_t,
        flags: c_uint,
    ) -> ssize_t {
        // SAFETY: the caller's arguments, passed on.
        let kernel = || unsafe { real::splice(from, from_offset, to, to_offset, len, flags) };
        let dont_wait = flags & libc::SPLICE_F_NONBLOCK != 0;
        match (Conn::of(from), Conn::of(to)) {
            (Some(conn), _) => {
                with_conn(conn, from, kernel, KernelCall::took, |conn| to_pipe(conn, from, to, len, dont_wait))
            }
            (None, Some(conn)) => {
                with_conn(conn, to, kernel, KernelCall::sent, |conn| from_pipe(conn, from, to, len, dont_wait))
            }
            (None, None) => kernel(),
        }
    }
}

/// Makes a call by the kernel, whose result is reported by `report`, or by the rings of the connection.
fn with_conn(
    mut conn: &'static Conn,
    fd: c_int,
    kernel: impl Fn() -> ssize_t,
    report: impl Fn(KernelCall, isize),
    mut ring: impl FnMut(&'static Conn) -> Result<usize, Errno>,
) -> ssize_t {
    loop {
        match conn.before_call(fd) {
            CandidateStep::Kernel(call) => {
                let result = kernel();
                report(call, result);
                return result;
            }
            CandidateStep::Up(up) => match ring(up) {
                Err(REPLACED) => conn = up.now(),
                result => return sys::give(result),
            },
        }
    }
}

/// # Safety
/// `offset` is null, or valid for reads and writes during the call, in which nothing else uses it.
unsafe fn send(to: c_int, from: c_int, offset: *mut off_t, count: size_t, kernel: impl Fn() -> ssize_t) -> ssize_t {
    let Some(conn) = Conn::of(to) else { return kernel() };
    with_conn(conn, to, kernel, KernelCall::sent, |conn| {
        // SAFETY: by this function's contract.
        let offset = unsafe { offset.as_mut() };
        send_file(conn, to, from, offset, count.min(MOST))
    })
}

fn send_file(
    conn: &'static Conn,
    to: c_int,
    from: c_int,
    offset: Option<&mut off_t>,
    count: usize,
) -> Result<usize, Errno> {
    if from < 0 {
        return Err(Errno::BADF);
    }
    if Conn::of(from).is_some() {
        return Err(Errno::INVAL);
    }
    let file = sys::borrow(from);
    match offset {
        Some(offset) => {
            let mut at = u64::try_from(*offset).map_err(|_| Errno::INVAL)?;
            let sent = conn.send_from(to, count, false, |room| {
                let n = rustix::io::pread(file, room, at)?;
                at += n as u64;
                Ok(n)
            });
            *offset = off_t::try_from(at).unwrap_or(off_t::MAX);
            sent
        }
        None => conn.send_from(to, count, false, |room| rustix::io::read(file, room)),
    }
}

/// Whether a pipe can be read or written without waiting; waits for it if allowed to.
fn pipe_is_ready(pipe: c_int, what: PollFlags, dont_wait: bool) -> Result<(), Errno> {
    let mut one = [PollFd::from_borrowed_fd(sys::borrow(pipe), what)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    let nonblocking =
        || rustix::fs::fcntl_getfl(sys::borrow(pipe)).is_ok_and(|f| f.contains(rustix::fs::OFlags::NONBLOCK));
    let limit = if dont_wait || nonblocking() { Some(&now) } else { None };
    if rustix::event::poll(&mut one, limit)? == 0 { Err(Errno::AGAIN) } else { Ok(()) }
}

/// How much a pipe that is ready takes at once, whole.
const WHOLE: usize = 4096;

fn to_pipe(conn: &'static Conn, from: c_int, pipe: c_int, len: usize, dont_wait: bool) -> Result<usize, Errno> {
    if pipe < 0 {
        return Err(Errno::BADF);
    }
    let mut done = 0;
    // Some at least, as far as there are some; never in the pipe's way while the connection is held.
    while done < len.min(MOST) {
        let dont_wait = dont_wait || done > 0;
        let got = pipe_is_ready(pipe, PollFlags::OUT, dont_wait).and_then(|()| {
            conn.receive_into(from, (len - done).min(WHOLE), dont_wait, |bytes, n| {
                // SAFETY: the ring's own memory, which the kernel copies as it is at that moment.
                sys::take(unsafe { real::write(pipe, bytes.cast(), n.min(WHOLE)) })
            })
        });
        match got {
            Ok(0) => break,
            Ok(n) => done += n,
            Err(_) if done > 0 => break,
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

fn from_pipe(conn: &'static Conn, pipe: c_int, to: c_int, len: usize, dont_wait: bool) -> Result<usize, Errno> {
    if pipe < 0 {
        return Err(Errno::BADF);
    }
    pipe_is_ready(pipe, PollFlags::IN, dont_wait)?;
    let file = sys::borrow(pipe);
    conn.send_from(to, len.min(MOST), dont_wait, |room| match pipe_is_ready(pipe, PollFlags::IN, true) {
        Ok(()) => rustix::io::read(file, room),
        // Empty: what has gone has gone.
        Err(Errno::AGAIN) => Ok(0),
        Err(error) => Err(error),
    })
}
