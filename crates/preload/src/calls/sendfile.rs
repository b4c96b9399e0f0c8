//! `sendfile` and `splice`: straight between a file or pipe and the ring.
#![expect(unsafe_code, reason = "C functions")]

use crate::conn::{ByteSource, CandidateStep, Conn, KernelCall, REPLACED, SendFault, kernel_send};
use crate::{real, scratch, sys};
use libc::{c_int, c_uint, iovec, loff_t, off_t, size_t, ssize_t};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fd::BorrowedFd;
use rustix::fs::{Mode, OFlags, SeekFrom};
use rustix::io::Errno;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

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
            (None, None) => crate::datagram::past_rings(to, kernel),
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
    let Some(conn) = Conn::of(to) else { return crate::datagram::past_rings(to, kernel) };
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
    const RAISES_SIGPIPE: bool = false;

    fn take(&mut self, room: &mut [u8]) -> Result<usize, Errno> {
        let n = rustix::io::pread(self.file, room, self.at)?;
        self.at += n as u64;
        Ok(n)
    }

    fn give(&mut self, fd: c_int, most: usize) -> Result<usize, SendFault> {
        scratch::with_memory(most, 0u8, |buffer| Ok(self.give_by(fd, buffer))).map_err(SendFault::Source)?
    }
}

/// A pipe. Bytes that were read from it cannot be put back, so the kernel moves those that go by TCP.
struct PipeSource {
    pipe: c_int,
    /// The most that the socket takes at once ([`most_at_once`]), once that was asked for.
    at_once: Option<usize>,
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
}

impl ByteSource for PipeSource {
    const RAISES_SIGPIPE: bool = true;

    fn take(&mut self, room: &mut [u8]) -> Result<usize, Errno> {
        // Empty: what has gone has gone.
        if self.is_ready()? { rustix::io::read(sys::borrow(self.pipe), room) } else { Ok(0) }
    }

    fn give(&mut self, fd: c_int, most: usize) -> Result<usize, SendFault> {
        if !self.is_ready().map_err(SendFault::Source)? {
            return Ok(0);
        }
        // `SPLICE_F_NONBLOCK` concerns the pipe alone: a socket that waits does so in this call too.
        let (none, flags) = (ptr::null_mut(), libc::SPLICE_F_NONBLOCK);
        let most = most.min(*self.at_once.get_or_insert_with(|| most_at_once(fd)));
        // SAFETY: two descriptors without offsets, so the kernel reads and writes no memory of this process.
        match sys::take(unsafe { real::splice(self.pipe, none, fd, none, most, flags) }) {
            Err(Errno::PIPE) => Err(SendFault::Signalled),
            Err(error @ (Errno::INTR | Errno::INVAL | Errno::BADF | Errno::NOMEM)) => Err(SendFault::Source(error)),
            result => result.map_err(SendFault::Connection),
        }
    }
}

/// How many bytes the kernel takes from a pipe at once without waiting, of a socket that has room.
fn most_at_once(fd: c_int) -> usize {
    if is_nonblocking(fd) {
        return usize::MAX;
    }
    // A third of the buffer is free. The kernel's own data about a packet take less than the packet.
    let size = rustix::net::sockopt::socket_send_buffer_size(sys::borrow(fd)).unwrap_or(0) / 6;
    let mut unsent: c_int = 0;
    sys::read_option(fd, libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT, &mut unsent);
    // Half of it is free, and the first packet has room also if it is larger.
    let unsent = match unsent.cast_unsigned() as usize {
        // The socket has no separate limit.
        0 => most_unsent(),
        unsent => unsent,
    };
    size.min((unsent / 2).max(SMALL_PACKET)).max(1)
}

/// The bytes that TCP leaves unsent in a socket without a separate limit (the sysctl `net.ipv4.tcp_notsent_lowat`), as they were when this process first asked. Without `/proc`,
/// the kernel's default: no limit.
fn most_unsent() -> usize {
    /// The limit plus 1; 0 if it is not known yet.
    static KNOWN: AtomicU64 = AtomicU64::new(0);
    if let Some(known) = KNOWN.load(Ordering::Relaxed).checked_sub(1) {
        return usize::try_from(known).unwrap_or(usize::MAX);
    }
    let mut text = [0; 16];
    let read =
        rustix::fs::open(c"/proc/sys/net/ipv4/tcp_notsent_lowat", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
            .and_then(|file| rustix::io::read(&file, &mut text));
    let text = read.ok().and_then(|len| str::from_utf8(text.get(..len)?).ok());
    let limit = text.and_then(|text| text.trim().parse::<u32>().ok()).unwrap_or(u32::MAX);
    KNOWN.store(u64::from(limit) + 1, Ordering::Relaxed);
    limit as usize
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

/// A packet of TCP is at least as large, unless the network is made for smaller ones.
const SMALL_PACKET: usize = 512;
/// How much a pipe that is ready takes at once, whole.
const WHOLE: usize = 4096;

fn to_pipe(conn: &'static Conn, from: c_int, pipe: c_int, len: usize, dont_wait: bool) -> Result<usize, Errno> {
    if pipe < 0 {
        return Err(Errno::BADF);
    }
    let mut done = 0;
    // Some at least, as far as there are some; never in the pipe's way while the connection is held.
    while done < len.min(MOST) {
        // `SPLICE_F_NONBLOCK` concerns the pipe alone: a socket that waits does so in this call too.
        let got = pipe_is_ready(pipe, PollFlags::OUT, dont_wait || done > 0).and_then(|()| {
            conn.receive_into(from, (len - done).min(WHOLE), done > 0, |bytes, n| {
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
    conn.send_from(to, len.min(MOST), dont_wait, &mut PipeSource { pipe, at_once: None })
}
