//! Bytes between a connection and a file or a pipe (`sendfile`, `splice`), without a copy where they are in a ring.

use super::cursor::Cursor;
use super::rx::{BytesFound, ReceiveTurn};
use super::tx::{PIECE, SendTurn, raise_sigpipe};
use super::{Conn, Interest, Pages, flags};
use crate::signals::BlockedSignals;
use crate::sys;
use libc::{c_int, iovec};
use partywall_shm::counters::add;
use partywall_shm::half::ROUNDS;
use partywall_shm::path::Way;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;

/// Why a source has sent nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SendFault {
    /// The file or the pipe has failed. `EAGAIN`: it has nothing to read now.
    Source(Errno),
    /// The connection has failed. `EAGAIN`: it has no room now.
    Connection(Errno),
    /// The connection has no reader any more, and the kernel has raised `SIGPIPE` for it.
    Signalled,
}

impl SendFault {
    fn error(self) -> Errno {
        match self {
            Self::Source(error) | Self::Connection(error) => error,
            Self::Signalled => Errno::PIPE,
        }
    }
}

impl From<Errno> for SendFault {
    fn from(error: Errno) -> Self {
        Self::Connection(error)
    }
}

/// Where the bytes come from that [`Conn::send_from`] sends.
pub(crate) trait ByteSource {
    /// Whether the kernel may raise `SIGPIPE` in [`Self::give`].
    const RAISES_SIGPIPE: bool;

    /// Takes the next bytes from the source into `room`, and returns how many these are. 0 ends the call.
    fn take(&mut self, room: &mut [u8]) -> Result<usize, Errno>;

    /// Sends at most `most` of the next bytes by the kernel's socket `fd`, and returns how many these are. 0 ends the call. Bytes that the
    /// kernel does not accept stay in the source, if that can keep them.
    fn give(&mut self, fd: c_int, most: usize) -> Result<usize, SendFault>;
}

impl Conn {
    /// Sends what comes from `source`, at most `wanted` bytes: into the ring, or by the kernel where the way is TCP.
    pub(crate) fn send_from(
        &'static self,
        fd: c_int,
        wanted: usize,
        dont_wait: bool,
        source: &mut impl ByteSource,
    ) -> Result<usize, Errno> {
        self.part_if_lost();
        let (mut done, mut refused) = (0, 0);
        let mut deadline = None;
        while done < wanted {
            let mut is_source_empty = false;
            match try_send_from(self, fd, wanted - done, source) {
                Ok(0) => break,
                Ok(n) => {
                    done += n;
                    refused = 0;
                    continue;
                }
                Err(SendFault::Source(Errno::AGAIN)) => is_source_empty = true,
                Err(SendFault::Connection(Errno::AGAIN)) => {}
                Err(fault) if done > 0 => {
                    self.errors().put_back(fault.error());
                    break;
                }
                Err(fault) => {
                    if fault == SendFault::Connection(Errno::PIPE) {
                        raise_sigpipe();
                    }
                    return Err(fault.error());
                }
            }
            if dont_wait || self.may_not_wait(fd) || self.tx.is_held_by_this_thread() {
                refused += 1;
                // An empty source is no want of room.
                if !is_source_empty && self.refuse() && refused < ROUNDS {
                    continue;
                }
                return if done > 0 { Ok(done) } else { Err(Errno::AGAIN) };
            }
            match self.sleep(Interest::OUT, &self.kernel.send_timeout, &mut deadline, done > 0) {
                Ok(()) => {}
                Err(_) if done > 0 => break,
                Err(error) => return Err(error),
            }
        }
        Ok(done)
    }

    /// Hands bytes to `write` until `wanted` have gone, without their being copied where they are in a ring.
    ///
    /// `write` takes as many as it can, at least one, or fails.
    pub(crate) fn receive_into(
        &'static self,
        fd: c_int,
        wanted: usize,
        dont_wait: bool,
        mut write: impl FnMut(*const u8, usize) -> Result<usize, Errno>,
    ) -> Result<usize, Errno> {
        let mut deadline = None;
        loop {
            match try_receive_into(self, fd, wanted, &mut write) {
                Ok(BytesFound::Bytes(n)) => return Ok(n),
                Ok(BytesFound::End) => return Ok(0),
                Ok(BytesFound::Nothing) if dont_wait || self.may_not_wait(fd) => return Err(Errno::AGAIN),
                Ok(BytesFound::Nothing) => {
                    self.sleep(Interest::IN, &self.kernel.receive_timeout, &mut deadline, false)?;
                }
                Err(error) => return Err(error),
            }
        }
    }
}

/// One step of [`Conn::send_from`].
fn try_send_from<S: ByteSource>(
    conn: &'static Conn,
    fd: c_int,
    wanted: usize,
    source: &mut S,
) -> Result<usize, SendFault> {
    let Some(pages) = conn.pages() else { return Err(conn.without_ring(fd).into()) };
    // Dropped after the direction is free: a handler of SIGPIPE may use this connection or jump out, and without a handler the signal ends the
    // process, while others may share the connection.
    let mut signals = BlockedSignals::none();
    let mut tx = conn.tx.hold()?;
    let mut turn = SendTurn { conn, pages, tx: &mut tx };
    turn.may_send(fd)?;
    match turn.choose_way()? {
        Way::Ring => turn.send_on_ring_from(wanted, source),
        Way::Tcp => {
            if S::RAISES_SIGPIPE {
                signals.hold();
            }
            turn.send_on_tcp_from(fd, wanted, source)
        }
    }
}

impl SendTurn<'_> {
    fn send_on_ring_from(&mut self, wanted: usize, source: &mut impl ByteSource) -> Result<usize, SendFault> {
        let Pages { own, peer, local, .. } = self.pages;
        let mut free = self.tx.half.free();
        if free < (wanted as u64).min(PIECE) {
            free = self.tx.half.refresh(&peer.control.rx).map_err(|e| self.conn.corrupt(e))?;
        }
        if free == 0 {
            add(&own.control.tx.counters.stalls, 1);
            // There is no room for what follows.
            self.release_held();
            return Err(Errno::AGAIN.into());
        }
        let n = free.min(wanted as u64).min(PIECE.min(self.tx.half.capacity() / 4));
        // SAFETY: as in `send_on_ring`.
        #[expect(unsafe_code, reason = "writes into our own ring")]
        let span = unsafe { local.own.own_span(self.tx.half.tail(), n) };
        let n = source.take(span.into_mut_slice()).map_err(SendFault::Source)?;
        if n > 0 {
            self.commit(n as u64, self.conn.kernel.is_corked());
            add(&own.control.tx.counters.messages, 1);
        }
        Ok(n)
    }

    /// Sends by the kernel, and counts what it has accepted. The rest stays in the source. The direction is held, so that bytes keep their order.
    fn send_on_tcp_from(&mut self, fd: c_int, wanted: usize, source: &mut impl ByteSource) -> Result<usize, SendFault> {
        if let Some(error) = self.conn.errors().take() {
            return Err(error.into());
        }
        // A call that waits sleeps for room after the direction was released.
        let mut one = [PollFd::from_borrowed_fd(sys::borrow(fd), PollFlags::OUT)];
        if rustix::event::poll(&mut one, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))? == 0 {
            return Err(Errno::AGAIN.into());
        }
        let sent = source.give(fd, wanted.min(PIECE as usize));
        match sent {
            Ok(n) => self.count_sent_by_kernel(n),
            Err(SendFault::Source(_)) => {}
            Err(fault @ (SendFault::Connection(_) | SendFault::Signalled)) => {
                self.note_failure_of_kernel(fault.error())
            }
        }
        sent
    }
}

/// One step of [`Conn::receive_into`].
fn try_receive_into(
    conn: &'static Conn,
    fd: c_int,
    wanted: usize,
    write: &mut impl FnMut(*const u8, usize) -> Result<usize, Errno>,
) -> Result<BytesFound, Errno> {
    let Some(pages) = conn.pages() else { return Err(conn.without_ring(fd)) };
    // Dropped after the direction is free, as in `try_send_from`.
    let mut signals = BlockedSignals::none();
    let mut rx = conn.rx.hold()?;
    let mut turn = ReceiveTurn { conn, pages, rx: &mut rx };
    turn.may_receive(fd)?;
    turn.rx.half.refresh(&pages.peer.control.tx).map_err(|e| conn.corrupt(e))?;
    let available = pages.takeable_of(turn.rx);
    if turn.rx.path.way() == Way::Ring && available > 0 && !conn.has(flags::LEFT) {
        let n = available.min(wanted as u64);
        // SAFETY: attached, and kept until both directions are held.
        #[expect(unsafe_code, reason = "hands the peer's ring to the kernel")]
        let span = unsafe { pages.local.peer.peer_span(turn.rx.half.head(), n) };
        // A pipe without readers raises a signal, whose handler must not find the direction held.
        signals.hold();
        let n = write(span.as_ptr(), span.len())?;
        turn.release(n as u64)?;
        return Ok(BytesFound::Bytes(n));
    }
    // The end, a switch, or TCP: by a look, and then by what the look has shown to be there. The direction is held, so that no other reader
    // takes these bytes in between.
    let mut buffer = [0u8; 4096];
    let mut list = [iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: wanted.min(buffer.len()) }];
    let Some(mut peek) = Cursor::of(&mut list) else { return Ok(BytesFound::Nothing) };
    match turn.receive(fd, &mut peek, libc::MSG_PEEK)? {
        BytesFound::Bytes(n) => {
            signals.hold();
            list[0].iov_len = write(buffer.as_ptr(), n)?;
            let Some(mut rest) = Cursor::of(&mut list) else { return Ok(BytesFound::Nothing) };
            turn.receive(fd, &mut rest, 0)
        }
        other => Ok(other),
    }
}
