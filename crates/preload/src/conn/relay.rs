//! Bytes between a connection and a file or a pipe (`sendfile`, `splice`), without a copy where they are in a ring.

use super::cursor::Cursor;
use super::rx::{BytesFound, ReceiveTurn};
use super::tx::{PIECE, SendTurn, raise_sigpipe};
use super::{Conn, Interest, Pages, REPLACED, flags};
use crate::{scratch, sys};
use libc::{c_int, iovec};
use partywall_shm::counters::add;
use partywall_shm::half::ROUNDS;
use partywall_shm::path::Way;
use rustix::io::Errno;

impl Conn {
    /// Sends what `read` puts into the ring, at most `wanted` bytes; by way of a buffer where the way is TCP.
    ///
    /// `read` is given room and returns how much of it it has filled: 0 ends.
    pub(crate) fn send_from(
        &'static self,
        fd: c_int,
        wanted: usize,
        dont_wait: bool,
        mut read: impl FnMut(&mut [u8]) -> Result<usize, Errno>,
    ) -> Result<usize, Errno> {
        self.part_if_lost();
        let (mut done, mut refused) = (0, 0);
        let mut deadline = None;
        while done < wanted {
            let mut is_source_empty = false;
            let result = try_send_from(self, fd, wanted - done, &mut |room| {
                let result = read(room);
                is_source_empty = result == Err(Errno::AGAIN);
                result
            });
            match result {
                Ok(0) => break,
                Ok(n) => {
                    done += n;
                    refused = 0;
                    continue;
                }
                Err(Errno::AGAIN) => {}
                Err(error) if done > 0 => {
                    self.errors().put_back(error);
                    break;
                }
                Err(error) => {
                    if error == Errno::PIPE {
                        raise_sigpipe();
                    }
                    return Err(error);
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
            match self.sleep(Interest::OUT, &self.kernel.send_timeout, &mut deadline) {
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
                Ok(BytesFound::Nothing) => self.sleep(Interest::IN, &self.kernel.receive_timeout, &mut deadline)?,
                Err(error) => return Err(error),
            }
        }
    }
}

/// One step of [`Conn::send_from`].
fn try_send_from(
    conn: &'static Conn,
    fd: c_int,
    wanted: usize,
    read: &mut impl FnMut(&mut [u8]) -> Result<usize, Errno>,
) -> Result<usize, Errno> {
    let Some(pages) = conn.pages() else { return Err(conn.without_ring(fd)) };
    let mut tx = conn.tx.hold()?;
    let mut turn = SendTurn { conn, pages, tx: &mut tx };
    turn.may_send(fd)?;
    match turn.choose_way()? {
        Way::Ring => turn.send_on_ring_from(wanted, read),
        Way::Tcp => turn.send_on_tcp_from(fd, wanted, read),
    }
}

impl SendTurn<'_> {
    fn send_on_ring_from(
        &mut self,
        wanted: usize,
        read: &mut impl FnMut(&mut [u8]) -> Result<usize, Errno>,
    ) -> Result<usize, Errno> {
        let Pages { own, peer, local, .. } = self.pages;
        let mut free = self.tx.half.free();
        if free < (wanted as u64).min(PIECE) {
            free = self.tx.half.refresh(&peer.control.rx).map_err(|e| self.conn.corrupt(e))?;
        }
        if free == 0 {
            add(&own.control.tx.counters.stalls, 1);
            // There is no room for what follows.
            self.release_held();
            return Err(Errno::AGAIN);
        }
        let n = free.min(wanted as u64).min(PIECE.min(self.tx.half.capacity() / 4));
        // SAFETY: as in `send_on_ring`.
        #[expect(unsafe_code, reason = "writes into our own ring")]
        let span = unsafe { local.own.own_span(self.tx.half.tail(), n) };
        let n = read(span.into_mut_slice())?;
        if n > 0 {
            self.commit(n as u64, self.conn.kernel.is_corked());
            add(&own.control.tx.counters.messages, 1);
        }
        Ok(n)
    }

    /// The socket's own buffer takes less than it is given at times, and what was read from a pipe cannot be put back: so only
    /// as much is read as the kernel says it has room for.
    fn send_on_tcp_from(
        &mut self,
        fd: c_int,
        wanted: usize,
        read: &mut impl FnMut(&mut [u8]) -> Result<usize, Errno>,
    ) -> Result<usize, Errno> {
        if let Some(error) = self.conn.errors().take() {
            return Err(error);
        }
        let mut one = [rustix::event::PollFd::from_borrowed_fd(sys::borrow(fd), rustix::event::PollFlags::OUT)];
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        if rustix::event::poll(&mut one, Some(&now))? == 0 {
            return Err(Errno::AGAIN);
        }
        // As much at once as the kernel would take in one step: it may be the last thing that can be sent.
        scratch::with_memory(wanted.min(PIECE as usize), 0u8, |buffer| {
            let n = read(buffer)?;
            let mut rest = &mut buffer[..n];
            while !rest.is_empty() {
                let mut list = [iovec { iov_base: rest.as_mut_ptr().cast(), iov_len: rest.len() }];
                match self.send_to_kernel(fd, &mut list, 0) {
                    Ok(sent) => rest = &mut rest[sent..],
                    Err(Errno::AGAIN) => {
                        let _ = rustix::event::poll(&mut one, None);
                    }
                    Err(error) => return Err(error),
                }
            }
            Ok(n)
        })
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
    {
        let mut rx = conn.rx.hold()?;
        ReceiveTurn { conn, pages, rx: &mut rx }.may_receive(fd)?;
        rx.half.refresh(&pages.peer.control.tx).map_err(|e| conn.corrupt(e))?;
        let available = pages.takeable_of(&rx);
        if rx.path.way() == Way::Ring && available > 0 && !conn.has(flags::LEFT) {
            let n = available.min(wanted as u64);
            // SAFETY: attached, and kept until both directions are held.
            #[expect(unsafe_code, reason = "hands the peer's ring to the kernel")]
            let span = unsafe { pages.local.peer.peer_span(rx.half.head(), n) };
            let n = write(span.as_ptr(), span.len())?;
            ReceiveTurn { conn, pages, rx: &mut rx }.release(n as u64)?;
            return Ok(BytesFound::Bytes(n));
        }
    }
    // The end, a switch, or TCP: by a look, and then by what the look has shown to be there.
    let mut buffer = [0u8; 4096];
    let mut list = [iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: wanted.min(buffer.len()) }];
    let Some(mut peek) = Cursor::of(&mut list) else { return Ok(BytesFound::Nothing) };
    match conn.try_receive(fd, &mut peek, libc::MSG_PEEK)? {
        BytesFound::Bytes(n) => {
            let n = write(buffer.as_ptr(), n)?;
            list[0].iov_len = n;
            let Some(mut rest) = Cursor::of(&mut list) else { return Ok(BytesFound::Nothing) };
            match conn.try_receive(fd, &mut rest, 0) {
                // Another thread has replaced the connection since the look. The bytes have gone, and only those are taken.
                Err(REPLACED) => {
                    conn.now().receive_rest(fd, &mut rest, libc::MSG_DONTWAIT, n);
                    Ok(BytesFound::Bytes(n))
                }
                result => result,
            }
        }
        other => Ok(other),
    }
}
