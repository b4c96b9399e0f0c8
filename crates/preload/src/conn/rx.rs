//! The receiving direction.

use super::cursor::Cursor;
use super::{Conn, Pages, flags};
use crate::ready::Interest;
use crate::{real, status, sys};
use libc::{c_int, iovec};
use partywall_shm::consumer::Consumer;
use partywall_shm::counters::add;
use partywall_shm::path::{Receiver, Way};
use partywall_shm::state::{RxState, TxState};
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use std::sync::atomic::Ordering;

/// Reads in vain after which the kernel is asked in any case: a program may poll by reading.
const IN_VAIN: u32 = 8;

/// What the lock of the receiving direction guards.
#[derive(Debug)]
pub(super) struct Rx {
    pub(super) consumer: Consumer,
    pub(super) path: Receiver,
}

impl Rx {
    pub(super) const fn new(capacity: u64, received: u64) -> Self {
        Self { consumer: Consumer::new(capacity, 0), path: Receiver::new(received) }
    }
}

/// What one look for bytes has brought.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Got {
    /// Bytes.
    Bytes(usize),
    /// None will come any more.
    End,
    /// None now.
    Nothing,
}

impl Conn {
    /// Receives into the cursor. Blocks as the socket would.
    ///
    /// Of the flags, `MSG_DONTWAIT`, `MSG_PEEK`, `MSG_WAITALL` and `MSG_TRUNC` (which discards) have a meaning.
    pub(crate) fn receive(&'static self, fd: c_int, cursor: &mut Cursor<'_>, message: c_int) -> Result<usize, Errno> {
        let dont_wait = message & libc::MSG_DONTWAIT != 0;
        let peek = message & libc::MSG_PEEK != 0;
        let all = message & libc::MSG_WAITALL != 0;
        let mut done = 0;
        let mut deadline = None;
        if cursor.left() == 0 {
            return Ok(0);
        }
        loop {
            match self.try_receive(fd, cursor, message) {
                Ok(Got::Bytes(n)) => {
                    done += n;
                    if !all || peek && done >= cursor.left() || !peek && cursor.left() == 0 {
                        return Ok(done);
                    }
                    if peek {
                        // What was peeked at is seen again: there is not enough of it yet.
                        if dont_wait || self.has(flags::NONBLOCK) || !self.may_hold(cursor.left()) {
                            return Ok(done);
                        }
                        done = 0;
                        std::thread::yield_now();
                    } else {
                        continue;
                    }
                }
                Ok(Got::End) => return Ok(done),
                Ok(Got::Nothing) => {}
                Err(_) if done > 0 => return Ok(done),
                Err(error) => return Err(error),
            }
            if dont_wait || self.has(flags::NONBLOCK) {
                return if done > 0 { Ok(done) } else { Err(Errno::AGAIN) };
            }
            match self.sleep(Interest::IN, &self.receive_timeout, &mut deadline) {
                Ok(()) => {}
                Err(_) if done > 0 => return Ok(done),
                Err(error) => return Err(error),
            }
        }
    }

    /// Whether the ring can ever hold so much at once.
    fn may_hold(&self, n: usize) -> bool {
        n as u64 <= self.local().peer.ring_size()
    }

    fn try_receive(&'static self, fd: c_int, cursor: &mut Cursor<'_>, message: c_int) -> Result<Got, Errno> {
        let Some(pages) = self.pages() else { return Err(Errno::BADF) };
        let mut rx = self.rx.hold()?;
        self.may_receive(fd)?;
        loop {
            let got = match rx.path.way() {
                Way::Ring => self.receive_from_ring(&mut rx, pages, fd, cursor, message)?,
                Way::Tcp => self.receive_from_tcp(&mut rx, pages, fd, cursor, message)?,
            };
            // `None`: another segment begins here.
            if let Some(got) = got {
                return Ok(got);
            }
        }
    }

    #[inline]
    fn receive_from_ring(
        &self,
        rx: &mut Rx,
        pages: Pages,
        fd: c_int,
        cursor: &mut Cursor<'_>,
        message: c_int,
    ) -> Result<Option<Got>, Errno> {
        let Pages { own, peer, local } = pages;
        let wanted = cursor.left() as u64;
        let mut available = rx.consumer.available();
        if available < wanted {
            available = rx.consumer.refresh(&peer.control.tx).map_err(|e| self.corrupt(e))?;
        }
        if available > 0 {
            let n = available.min(wanted);
            // SAFETY: attached, and kept until both directions are held.
            #[expect(unsafe_code, reason = "reads from the peer's ring")]
            let span = unsafe { local.peer.peer_span(rx.consumer.head(), n) };
            if message & libc::MSG_PEEK != 0 {
                let mut place = cursor.here();
                return Ok(Some(Got::Bytes(place.copy_from(span))));
            }
            let n = if message & libc::MSG_TRUNC != 0 {
                cursor.skip(n as usize);
                n
            } else {
                cursor.copy_from(span) as u64
            };
            self.release(rx, pages, n)?;
            add(&own.control.rx.counters.messages, 1);
            return Ok(Some(Got::Bytes(n as usize)));
        }
        rx.path.refresh(&peer.tx_path).map_err(|e| self.corrupt(e))?;
        if let Some(left) = rx.path.limit() {
            // The sender has left the ring; all that it committed before can be seen by now.
            let more = rx.consumer.refresh(&peer.control.tx).map_err(|e| self.corrupt(e))?;
            if more > 0 {
                return Ok(None);
            }
            if left > 0 {
                return Err(self.fail_for_good("the peer left bytes out at a switch"));
            }
            self.rx.counted.store(rx.path.total(), Ordering::Relaxed);
            if rx.path.pass(&own.rx_path) {
                add(&own.control.rx.counters.switches, 1);
            }
            return Ok(None);
        }
        add(&own.control.rx.counters.stalls, 1);
        self.ask_the_kernel(rx, pages, fd)
            .map(|end| if end == Some(Got::Nothing) { None } else { end.or(Some(Got::Nothing)) })
    }

    /// The rest has come by rings, which count themselves.
    fn show_received(&self, rx: &Rx) {
        if let Some(line) = status::line(self) {
            line.rx.tcp.store(rx.path.total().wrapping_sub(rx.consumer.head()), Ordering::Relaxed);
        }
    }

    /// Gives `n` bytes of the ring back.
    #[inline]
    fn release(&self, rx: &mut Rx, pages: Pages, n: u64) -> Result<(), Errno> {
        let Pages { own, peer, .. } = pages;
        rx.path.received(n).map_err(|e| self.corrupt(e))?;
        let ring = rx.consumer.release(&own.control.rx, &peer.control.tx, n, self.fencing());
        add(&own.control.rx.counters.bytes, n);
        if ring {
            add(&own.control.rx.counters.bells_rung, 1);
            self.ring();
        } else {
            add(&own.control.rx.counters.bells_saved, 1);
        }
        Ok(())
    }

    /// The ring is empty: has the end come over the kernel's socket? `Some(Nothing)`: look at the ring again.
    fn ask_the_kernel(&self, rx: &mut Rx, pages: Pages, fd: c_int) -> Result<Option<Got>, Errno> {
        let Pages { peer, .. } = pages;
        if self.has(flags::READ_SHUT) {
            return Ok(Some(Got::End));
        }
        // Told once, while the ring still had something.
        if let Some(error) = self.take_error() {
            return Err(error);
        }
        let said = self.kernel_said.load(Ordering::Relaxed);
        let ended = peer.control.tx.control.state.load(Ordering::Relaxed) != TxState::Open as u32
            || peer.control.rx.control.state.load(Ordering::Relaxed) != RxState::Open as u32
            || self.has(flags::PEER_GONE);
        let in_vain = self.in_vain.load(Ordering::Relaxed);
        if said == 0 && !ended && in_vain < IN_VAIN {
            self.in_vain.store(in_vain + 1, Ordering::Relaxed);
            return Ok(None);
        }
        self.in_vain.store(0, Ordering::Relaxed);
        self.kernel_said.fetch_and(!EventFlags::IN.bits(), Ordering::Relaxed);
        let mut byte = 0u8;
        let mut list = [iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 }];
        let answer = kernel_receive(fd, &mut list, libc::MSG_PEEK);
        if answer == Err(Errno::AGAIN) {
            return Ok(None);
        }
        // Whatever the kernel has, an end or bytes, came after what the peer did in memory before it: look there once more.
        let more = rx.consumer.refresh(&peer.control.tx).map_err(|e| self.corrupt(e))?;
        rx.path.refresh(&peer.tx_path).map_err(|e| self.corrupt(e))?;
        if more > 0 || rx.path.limit().is_some() {
            self.keep_error(answer);
            return Ok(Some(Got::Nothing));
        }
        match answer {
            Ok(0) => Ok(Some(Got::End)),
            Ok(_) => Err(self.fail_for_good("bytes came over TCP past the ring")),
            Err(error) => Err(error),
        }
    }

    /// To ask takes an error of the socket away. It is told to who asks after the last byte.
    fn keep_error(&self, answer: Result<usize, Errno>) {
        if let Err(error) = answer
            && error != Errno::AGAIN
        {
            self.kernel_error.store(error.raw_os_error().cast_unsigned(), Ordering::Relaxed);
            self.note_kernel(EventFlags::ERR.bits());
        }
    }

    /// An error that was kept.
    pub(super) fn take_error(&self) -> Option<Errno> {
        if self.kernel_error.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let error = self.kernel_error.swap(0, Ordering::Relaxed).cast_signed();
        (error != 0).then(|| Errno::from_raw_os_error(error))
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
            match self.try_receive_into(fd, wanted, &mut write) {
                Ok(Got::Bytes(n)) => return Ok(n),
                Ok(Got::End) => return Ok(0),
                Ok(Got::Nothing) if dont_wait || self.has(flags::NONBLOCK) => return Err(Errno::AGAIN),
                Ok(Got::Nothing) => self.sleep(Interest::IN, &self.receive_timeout, &mut deadline)?,
                Err(error) => return Err(error),
            }
        }
    }

    fn try_receive_into(
        &'static self,
        fd: c_int,
        wanted: usize,
        write: &mut impl FnMut(*const u8, usize) -> Result<usize, Errno>,
    ) -> Result<Got, Errno> {
        let Some(pages) = self.pages() else { return Err(Errno::BADF) };
        {
            let mut rx = self.rx.hold()?;
            self.may_receive(fd)?;
            let available = rx.consumer.refresh(&pages.peer.control.tx).map_err(|e| self.corrupt(e))?;
            if rx.path.way() == Way::Ring && available > 0 {
                let n = available.min(wanted as u64);
                // SAFETY: attached, and kept until both directions are held.
                #[expect(unsafe_code, reason = "hands the peer's ring to the kernel")]
                let span = unsafe { pages.local.peer.peer_span(rx.consumer.head(), n) };
                let n = write(span.as_ptr(), span.len())?;
                self.release(&mut rx, pages, n as u64)?;
                return Ok(Got::Bytes(n));
            }
        }
        // The end, a switch, or TCP: by a look, and then by what the look has shown to be there.
        let mut buffer = [0u8; 4096];
        let mut list = [iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: wanted.min(buffer.len()) }];
        let Some(mut peek) = Cursor::of(&mut list) else { return Ok(Got::Nothing) };
        match self.try_receive(fd, &mut peek, libc::MSG_PEEK)? {
            Got::Bytes(n) => {
                let n = write(buffer.as_ptr(), n)?;
                list[0].iov_len = n;
                let Some(mut rest) = Cursor::of(&mut list) else { return Ok(Got::Nothing) };
                self.try_receive(fd, &mut rest, 0)
            }
            other => Ok(other),
        }
    }

    /// What forbids to receive at all, whatever the way. The direction is held.
    #[inline]
    fn may_receive(&self, fd: c_int) -> Result<(), Errno> {
        if self.has(flags::BROKEN) {
            return Err(Errno::CONNRESET);
        }
        if self.rx.is_broken() {
            return Err(self.fail_for_good("a process died while it was receiving"));
        }
        // Closed by another thread, and perhaps another connection's by now.
        if self.is_of(fd) && self.is_up() { Ok(()) } else { Err(Errno::BADF) }
    }

    fn receive_from_tcp(
        &self,
        rx: &mut Rx,
        pages: Pages,
        fd: c_int,
        cursor: &mut Cursor<'_>,
        message: c_int,
    ) -> Result<Option<Got>, Errno> {
        let Pages { own, peer, .. } = pages;
        rx.path.refresh(&peer.tx_path).map_err(|e| self.corrupt(e))?;
        if rx.path.pass(&own.rx_path) {
            add(&own.control.rx.counters.switches, 1);
            return Ok(None);
        }
        let mut space = [iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; 16];
        let list = cursor.rest(&mut space, rx.path.limit().unwrap_or(u64::MAX));
        let kept = message & (libc::MSG_PEEK | libc::MSG_TRUNC);
        let answer = kernel_receive(fd, list, kept);
        if let Ok(n @ 1..) = answer {
            if message & libc::MSG_PEEK == 0 {
                cursor.skip(n);
                rx.path.received(n as u64).map_err(|e| self.corrupt(e))?;
                // Who only looks must know whether the segment is used up.
                self.rx.counted.store(rx.path.total(), Ordering::Relaxed);
                self.show_received(rx);
            }
            return Ok(Some(Got::Bytes(n)));
        }
        self.kernel_said.fetch_and(!EventFlags::IN.bits(), Ordering::Relaxed);
        // What the sender did in memory before the kernel's news can be seen by now.
        rx.path.refresh(&peer.tx_path).map_err(|e| self.corrupt(e))?;
        if rx.path.limit() == Some(0) {
            self.keep_error(answer);
            return Ok(None);
        }
        match answer {
            Ok(_) if rx.path.limit().is_some() => {
                Err(self.fail_for_good("the peer ended before the byte of its switch"))
            }
            Ok(_) => Ok(Some(Got::End)),
            Err(Errno::AGAIN) if self.has(flags::READ_SHUT) => Ok(Some(Got::End)),
            Err(Errno::AGAIN) => Ok(Some(Got::Nothing)),
            Err(error) => Err(error),
        }
    }
}

/// One receiving call of the kernel that does not wait.
fn kernel_receive(fd: c_int, list: &mut [iovec], message: c_int) -> Result<usize, Errno> {
    #[expect(unsafe_code, reason = "hands the caller's buffers to the kernel")]
    // SAFETY: a message of zeros but for the list, whose entries are the caller's buffers.
    let got = unsafe {
        let mut header: libc::msghdr = std::mem::zeroed();
        header.msg_iov = list.as_mut_ptr();
        header.msg_iovlen = list.len();
        real::recvmsg(fd, &raw mut header, message | libc::MSG_DONTWAIT)
    };
    sys::take(got)
}
