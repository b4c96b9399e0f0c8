//! `sendfile` and `splice`: straight between a file or pipe and the ring.
#![expect(unsafe_code, reason = "C functions")]

use crate::conn::{ByteSource, CandidateStep, Conn, KernelCall, REPLACED, SendFault, kernel_send};
use crate::{real, scratch, sys};
use libc::{c_int, c_uint, iovec, loff_t, off_t, size_t, ssize_t};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fd::BorrowedFd;
use rustix::fs::{OFlags, SeekFrom};
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
    // As the kernel, this takes only files that have an offset, and moves the file's own once, after the last byte.
    let from = match &offset {
        Some(offset) => u64::try_from(**offset).map_err(|_| Errno::INVAL)?,
        None => rustix::fs::tell(file).map_err(|error| if error == Errno::SPIPE { Errno::INVAL } else { error })?,
    };
    let mut source = FileSource { file, at: from };
    let sent = conn.send_from(to, count, false, &mut source);
    match offset {
        Some(offset) => *offset = off_t::try_from(source.at).unwrap_or(off_t::MAX),
        None if source.at == from => {}
        None => {
            let _ = rustix::fs::seek(file, SeekFrom::Start(source.at));
        }
    }
    sent
}

/// A file that is read without moving its own offset.
struct FileSource {
    file: BorrowedFd<'static>,
    /// Of the next byte.
    at: u64,
}

impl FileSource {
    fn give_by(&mut self, fd: c_int, buffer: &mut [u8]) -> Result<usize, SendFault> {
        let n = rustix::io::pread(self.file, &mut *buffer, self.at).map_err(SendFault::Source)?;
        if n == 0 {
            return Ok(0);
        }
        let mut list = [iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: n }];
        let sent = kernel_send(fd, &mut list, 0)?;
        self.at += sent as u64;
        Ok(sent)
    }
}

impl ByteSource for FileSource {
    fn take(&mut self, room: &mut [u8]) -> Result<usize, Errno> {
        let n = rustix::io::pread(self.file, room, self.at)?;
        self.at += n as u64;
        Ok(n)
    }

    fn give(&mut self, fd: c_int, most: usize) -> Result<usize, SendFault> {
        scratch::with_memory(most, 0u8, |buffer| Ok(self.give_by(fd, buffer))).map_err(SendFault::Source)?
    }
}

/// A pipe. Bytes that were read from it cannot be put back.
struct PipeSource {
    pipe: c_int,
}

impl PipeSource {
    /// Whether there is anything to read, or the end.
    fn is_ready(&self) -> Result<bool, Errno> {
        match pipe_is_ready(self.pipe, PollFlags::IN, true) {
            Ok(()) => Ok(true),
            Err(Errno::AGAIN) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// What is read cannot be put back, so it is no more than a socket that has room usually takes at once. If the kernel takes a part, the
    /// rest waits for room, also at a socket that does not wait.
    fn give_by(&self, fd: c_int, buffer: &mut [u8]) -> Result<usize, SendFault> {
        let n = rustix::io::read(sys::borrow(self.pipe), &mut *buffer).map_err(SendFault::Source)?;
        let mut sent = 0;
        while sent < n {
            let rest = &mut buffer[sent..n];
            let mut list = [iovec { iov_base: rest.as_mut_ptr().cast(), iov_len: rest.len() }];
            match kernel_send(fd, &mut list, 0) {
                Ok(more) => sent += more,
                Err(Errno::AGAIN) => {
                    let mut one = [PollFd::from_borrowed_fd(sys::borrow(fd), PollFlags::OUT)];
                    let _ = rustix::event::poll(&mut one, None);
                }
                // The next call gets the error of a connection that has ended.
                Err(_) if sent > 0 => break,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(sent)
    }
}

impl ByteSource for PipeSource {
    fn take(&mut self, room: &mut [u8]) -> Result<usize, Errno> {
        // Empty: what has gone has gone.
        if self.is_ready()? { rustix::io::read(sys::borrow(self.pipe), room) } else { Ok(0) }
    }

    fn give(&mut self, fd: c_int, most: usize) -> Result<usize, SendFault> {
        if !self.is_ready().map_err(SendFault::Source)? {
            return Ok(0);
        }
        if sys::poll_now(fd, 0) != 0 {
            // The error of a connection that has failed, with the bytes left in the pipe.
            kernel_send(fd, &mut [], 0)?;
        }
        // Of a socket with room, a third of the buffer is free. The kernel's own data about a packet take less than the packet.
        let size = rustix::net::sockopt::socket_send_buffer_size(sys::borrow(fd)).unwrap_or(0);
        let most = most.min((size / 6).max(1));
        scratch::with_memory(most, 0u8, |buffer| Ok(self.give_by(fd, buffer))).map_err(SendFault::Source)?
    }
}

fn is_nonblocking(fd: c_int) -> bool {
    rustix::fs::fcntl_getfl(sys::borrow(fd)).is_ok_and(|flags| flags.contains(OFlags::NONBLOCK))
}

/// Whether a pipe can be read or written without waiting; waits for it if allowed to.
fn pipe_is_ready(pipe: c_int, what: PollFlags, dont_wait: bool) -> Result<(), Errno> {
    let mut one = [PollFd::from_borrowed_fd(sys::borrow(pipe), what)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    let limit = if dont_wait || is_nonblocking(pipe) { Some(&now) } else { None };
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
    conn.send_from(to, len.min(MOST), dont_wait, &mut PipeSource { pipe })
}
