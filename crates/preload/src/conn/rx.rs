//! The receiving direction.

use super::cursor::Cursor;
use super::direction::{DirectionState, WORDS, optional};
use super::shown;
use super::waiters::deadline as deadline_of;
use super::{Conn, Interest, Pages, REPLACED, flags};
use crate::broker;
use crate::local::LocalState;
use crate::lock::Lock;
use crate::{real, sys};
use libc::{c_int, iovec};
use partywall_shm::counters::add;
use partywall_shm::half::ReadingHalf;
use partywall_shm::path::{Receiver, Way};
use rustix::io::Errno;
use rustix::thread::NanosleepRelativeResult;
use std::sync::atomic::Ordering;

/// Between two questions to the kernel by a program that polls by reading an empty ring, in [`sys::ticks`]: about a millisecond.
const RARELY: u64 = 2_400_000;

/// The state that the lock of the receiving direction guards.
#[derive(Debug)]
pub(super) struct ConnRx {
    pub(super) half: ReadingHalf,
    pub(super) path: Receiver,
}

impl ConnRx {
    pub(super) const fn new(capacity: u64, received: u64) -> Self {
        Self { half: ReadingHalf::new(capacity, 0), path: Receiver::new(received) }
    }
}

impl DirectionState for ConnRx {
    #[inline]
    fn capacity(local: &LocalState) -> u64 {
        local.peer.ring_size()
    }

    #[inline]
    fn private(local: &LocalState) -> &Lock {
        &local.receiving
    }

    #[inline]
    fn words(&self) -> [u64; WORDS] {
        let path = u64::from(self.path.seen());
        [self.half.head(), self.half.tail(), self.path.total(), path, optional(self.path.next()), 0]
    }

    #[inline]
    fn resume(capacity: u64, [head, tail, total, seen, next, _]: [u64; WORDS]) -> Option<Self> {
        let half = ReadingHalf::resume(capacity, head, tail)?;
        Some(Self { half, path: Receiver::resume(total, seen as u32, next.checked_sub(1))? })
    }

    fn empty(capacity: u64) -> Self {
        Self::new(capacity, 0)
    }
}

/// The result of one look for bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BytesFound {
    /// Bytes.
    Bytes(usize),
    /// No more bytes will come.
    End,
    /// No bytes are there now.
    Nothing,
}

/// The result of one look at the present segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SegmentLook {
    /// Bytes; there may be more.
    Bytes(usize),
    /// Bytes, and no more now.
    Last(usize),
    /// The segment is used up, or the ring is to be looked at again.
    Used,
    /// No more bytes will come.
    End,
    /// No bytes are there now.
    Nothing,
}

/// Segments that one look goes through. An honest peer changes the way now and then; one that does so whenever it is followed must not keep a
/// call here beyond its time.
pub(super) const MOST_SEGMENTS: u32 = 16;

/// The most entries of a list that are handed to the kernel at once.
pub(super) const NO_BUFFERS: [iovec; 16] = [iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; 16];

impl Conn {
    /// Receives into the cursor. Blocks as the socket would.
    ///
    /// Of the flags, `MSG_DONTWAIT`, `MSG_PEEK`, `MSG_WAITALL` and `MSG_TRUNC` (which discards) have a meaning.
    pub(crate) fn receive(&'static self, fd: c_int, cursor: &mut Cursor<'_>, message: c_int) -> Result<usize, Errno> {
        self.part_if_lost();
        let dont_wait = message & libc::MSG_DONTWAIT != 0;
        let peek = message & libc::MSG_PEEK != 0;
        let enough = self.kernel.enough_of(cursor.left(), message & libc::MSG_WAITALL != 0);
        let mut done = 0;
        let mut deadline = None;
        loop {
            match self.try_receive(fd, cursor, message) {
                Ok(BytesFound::Bytes(n)) => {
                    // Peeked bytes are read again.
                    done = if peek { n } else { done + n };
                    if done >= enough || (peek && enough as u64 > self.local().peer.ring_size()) {
                        return Ok(done);
                    }
                }
                Ok(BytesFound::End) => return Ok(done),
                Ok(BytesFound::Nothing) => {}
                Err(REPLACED) if done > 0 && !peek => {
                    return Ok(done + self.now().receive_rest(fd, cursor, message, enough - done));
                }
                Err(error) if done > 0 => {
                    self.errors().put_back(error);
                    return Ok(done);
                }
                Err(error) => return Err(error),
            }
            if dont_wait || self.may_not_wait(fd) || self.rx.is_held_by_this_thread() {
                return if done > 0 { Ok(done) } else { Err(Errno::AGAIN) };
            }
            if peek && done > 0 {
                // There is something, so that a sleep would end at once.
                let end = *deadline.get_or_insert_with(|| deadline_of(&self.kernel.receive_timeout));
                let nap = rustix::thread::Timespec { tv_sec: 0, tv_nsec: 20_000 };
                if end.is_some_and(|end| sys::now() >= end)
                    || sys::has_ended(fd)
                    || matches!(rustix::thread::nanosleep(&nap), NanosleepRelativeResult::Interrupted(_))
                {
                    return Ok(done);
                }
                continue;
            }
            let nothing_wanted = cursor.left() == 0 && enough == 0;
            match self.sleep(Interest::IN, &self.kernel.receive_timeout, &mut deadline, done > 0) {
                // A caller that wants no bytes has waited, and is done.
                _ if nothing_wanted => return Ok(0),
                Ok(()) => {}
                Err(_) if done > 0 => return Ok(done),
                Err(error) => return Err(error),
            }
        }
    }

    /// Takes what is there now, across the ends of segments.
    pub(super) fn try_receive(
        &'static self,
        fd: c_int,
        cursor: &mut Cursor<'_>,
        message: c_int,
    ) -> Result<BytesFound, Errno> {
        let Some(pages) = self.pages() else { return Err(self.without_ring(fd)) };
        let mut rx = match self.rx.hold() {
            Ok(rx) => rx,
            // Another process keeps the direction.
            Err(_) if !self.rx.is_held_by_this_thread() => return Ok(BytesFound::Nothing),
            Err(error) => return Err(error),
        };
        let mut turn = ReceiveTurn { conn: self, pages, rx: &mut rx };
        turn.may_receive(fd)?;
        turn.receive(fd, cursor, message)
    }

    /// Goes on to the next segment if nothing of the present one is left, without a call that reads.
    pub(super) fn finish_segment(&'static self) {
        if let Some(mut rx) = self.rx.try_hold()
            && self.is_up()
            && !self.has(flags::LEFT)
            && let Some(pages) = self.pages()
            && rx.path.refresh(&pages.peer.tx_path).is_ok()
        {
            self.rx.counted.store(rx.path.total(), Ordering::Relaxed);
            ReceiveTurn { conn: self, pages, rx: &mut rx }.pass();
        }
    }
}

/// What a thread does in the receiving direction while it holds it.
#[derive(Debug)]
pub(super) struct ReceiveTurn<'a> {
    pub(super) conn: &'static Conn,
    pub(super) pages: Pages<'a>,
    pub(super) rx: &'a mut ConnRx,
}

impl ReceiveTurn<'_> {
    /// The errors that forbid receiving on either route.
    #[inline]
    pub(super) fn may_receive(&self, fd: c_int) -> Result<(), Errno> {
        let conn = self.conn;
        if conn.has(flags::BROKEN) {
            return Err(Errno::CONNRESET);
        }
        if conn.rx.is_broken() {
            return Err(conn.fail_permanently("a process died while it was receiving"));
        }
        if conn.is_of(fd) && conn.is_up() { Ok(()) } else { Err(conn.without_ring(fd)) }
    }

    /// Takes what is there now, across the ends of segments. The caller has checked [`Self::may_receive`].
    pub(super) fn receive(&mut self, fd: c_int, cursor: &mut Cursor<'_>, message: c_int) -> Result<BytesFound, Errno> {
        if self.conn.has(flags::LEFT) {
            return self.receive_outside(fd, cursor, message);
        }
        if message & libc::MSG_PEEK != 0 || cursor.left() == 0 {
            return self.peek(fd, cursor);
        }
        let mut done = 0;
        for _ in 0..MOST_SEGMENTS {
            let got = match self.rx.path.way() {
                Way::Ring => self.receive_from_ring(fd, cursor, message, done > 0),
                Way::Tcp => self.receive_from_tcp(fd, cursor, message),
            };
            match got {
                // Another segment begins here.
                Ok(SegmentLook::Used) => {}
                Ok(SegmentLook::Bytes(n)) => {
                    done += n;
                    if cursor.left() == 0 {
                        return Ok(BytesFound::Bytes(done));
                    }
                }
                Ok(SegmentLook::Last(n)) => return Ok(BytesFound::Bytes(done + n)),
                Ok(_) if done > 0 => return Ok(BytesFound::Bytes(done)),
                Ok(SegmentLook::End) => return Ok(BytesFound::End),
                Ok(SegmentLook::Nothing) => return Ok(BytesFound::Nothing),
                Err(error) if done > 0 => {
                    self.conn.errors().put_back(error);
                    return Ok(BytesFound::Bytes(done));
                }
                Err(error) => return Err(error),
            }
        }
        Ok(if done > 0 { BytesFound::Bytes(done) } else { BytesFound::Nothing })
    }

    /// Goes on to the next segment, if this one is used up.
    pub(super) fn pass(&mut self) -> bool {
        if !self.rx.path.pass(&self.pages.own.rx_path) {
            return false;
        }
        add(&self.pages.own.control.rx.counters.switches, 1);
        shown::receiving(self.conn, self.rx.path.way());
        // The peer may have rung for it.
        self.conn.bell().drain();
        if self.conn.has(flags::WANT_TCP) && self.rx.path.way() == Way::Ring {
            // It could not go back before this, and may be asleep.
            self.conn.bell().ring();
        }
        true
    }

    #[inline]
    fn receive_from_ring(
        &mut self,
        fd: c_int,
        cursor: &mut Cursor<'_>,
        message: c_int,
        is_more: bool,
    ) -> Result<SegmentLook, Errno> {
        let Pages { own, peer, local, .. } = self.pages;
        let wanted = cursor.left() as u64;
        let mut available = self.rx.half.available();
        if available < wanted {
            available = self.rx.half.refresh(&peer.control.tx).map_err(|e| self.conn.corrupt(e))?;
        }
        if available > 0 {
            available = self.pages.takeable_of(self.rx);
        }
        if available == 0 {
            return self.nothing_in_ring(fd, is_more);
        }
        let n = available.min(wanted);
        // SAFETY: attached, and kept until both directions are held.
        #[expect(unsafe_code, reason = "reads from the peer's ring")]
        let span = unsafe { local.peer.peer_span(self.rx.half.head(), n) };
        let n = if message & libc::MSG_TRUNC != 0 {
            cursor.skip(n as usize);
            n
        } else {
            cursor.copy_from(span) as u64
        };
        self.release(n)?;
        if !is_more {
            add(&own.control.rx.counters.messages, 1);
        }
        Ok(SegmentLook::Bytes(n as usize))
    }

    /// The ring is empty: by a switch, at the end, or just so.
    pub(super) fn nothing_in_ring(&mut self, fd: c_int, is_more: bool) -> Result<SegmentLook, Errno> {
        let Pages { own, peer, .. } = self.pages;
        self.rx.path.refresh(&peer.tx_path).map_err(|e| self.conn.corrupt(e))?;
        if let Some(left) = self.rx.path.limit() {
            // The sender has left the ring; all that it committed before can be seen by now.
            let more = self.rx.half.refresh(&peer.control.tx).map_err(|e| self.conn.corrupt(e))?;
            if more > 0 {
                return Ok(SegmentLook::Used);
            }
            if left > 0 {
                return Err(self.conn.fail_permanently("the peer left bytes out at a switch"));
            }
            self.conn.rx.counted.store(self.rx.path.total(), Ordering::Relaxed);
            self.pass();
            return Ok(SegmentLook::Used);
        }
        if is_more {
            return Ok(SegmentLook::Nothing);
        }
        add(&own.control.rx.counters.stalls, 1);
        self.ask_the_kernel(fd)
    }

    /// The rest has come by rings, which count themselves.
    fn show_received(&self) {
        if let Some(line) = shown::line(self.conn) {
            line.rx.tcp.store(self.rx.path.total().wrapping_sub(self.rx.half.head()), Ordering::Relaxed);
        }
    }

    /// Gives `n` bytes of the ring back.
    #[inline]
    pub(super) fn release(&mut self, n: u64) -> Result<(), Errno> {
        let Pages { own, peer, .. } = self.pages;
        self.rx.path.received(n).map_err(|e| self.conn.corrupt(e))?;
        let ring = self.rx.half.release(&own.control.rx, &peer.control.tx, n, super::FENCING);
        if ring {
            add(&own.control.rx.counters.bells_rung, 1);
            self.conn.bell().ring();
        } else {
            add(&own.control.rx.counters.bells_saved, 1);
        }
        Ok(())
    }

    /// The ring is empty: has the end come over the kernel's socket? `Used`: look at the ring again.
    fn ask_the_kernel(&mut self, fd: c_int) -> Result<SegmentLook, Errno> {
        let Pages { peer, .. } = self.pages;
        // Told once, while the ring still had something.
        if let Some(error) = self.conn.errors().take_reset() {
            return Err(error);
        }
        let said = self.conn.kernel.said();
        let ended = self.pages.has_said_end() || self.conn.has(flags::PEER_GONE);
        let is_shut = self.conn.has(flags::READ_SHUT);
        let now = sys::ticks();
        let is_due = now.wrapping_sub(self.conn.moves.asked_at.load(Ordering::Relaxed)) >= RARELY;
        if said == 0 && !ended && !is_shut && !is_due {
            return Ok(SegmentLook::Nothing);
        }
        self.conn.moves.asked_at.store(now, Ordering::Relaxed);
        // A program that never sleeps and never sends notices the peer's requests here.
        self.conn.follow();
        self.conn.kernel.take_readable();
        let mut byte = 0u8;
        let mut list = [iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 }];
        let answer = kernel_receive(fd, &mut list, libc::MSG_PEEK);
        if answer == Err(Errno::AGAIN) && !(ended && self.conn.death().look_for_reset()) {
            return Ok(if is_shut { SegmentLook::End } else { SegmentLook::Nothing });
        }
        if answer != Err(Errno::AGAIN) && broker::is_in_repair_mode(sys::borrow(fd)) {
            // A broker reads the socket, or was killed while it did (protocol T3.8). What the kernel says of a queue means nothing then.
            return Ok(SegmentLook::Nothing);
        }
        // Anything that the kernel has, an end or bytes, came after the peer's earlier changes in memory: look there once more.
        let more = self.rx.half.refresh(&peer.control.tx).map_err(|e| self.conn.corrupt(e))?;
        self.rx.path.refresh(&peer.tx_path).map_err(|e| self.conn.corrupt(e))?;
        if more > 0 || self.rx.path.limit().is_some() {
            // A sender that has ended holds nothing back.
            self.pages.local.held.pass_to(self.rx.half.head() + more);
            self.conn.errors().keep(answer);
            return Ok(SegmentLook::Used);
        }
        match answer {
            Ok(1..) => Err(self.conn.fail_permanently("bytes came over TCP past the ring")),
            // The kernel's own reset may come after our verdict.
            Err(error) if error != Errno::AGAIN && !self.conn.has(flags::RESET) => {
                self.conn.errors().note(error);
                Err(error)
            }
            _ => self.end(),
        }
    }

    /// The end of the data: in order, or by a reset that the kernel does not know of.
    pub(super) fn end(&self) -> Result<SegmentLook, Errno> {
        self.conn.death().look_for_reset();
        if self.conn.has(flags::BROKEN) {
            return Err(Errno::CONNRESET);
        }
        self.conn.errors().take_reset().map_or(Ok(SegmentLook::End), Err)
    }

    fn receive_from_tcp(&mut self, fd: c_int, cursor: &mut Cursor<'_>, message: c_int) -> Result<SegmentLook, Errno> {
        let peer = self.pages.peer;
        self.rx.path.refresh(&peer.tx_path).map_err(|e| self.conn.corrupt(e))?;
        if self.pass() {
            return Ok(SegmentLook::Used);
        }
        let mut space = NO_BUFFERS;
        let list = cursor.rest(&mut space, self.rx.path.limit().unwrap_or(u64::MAX));
        let asked: usize = list.iter().map(|one| one.iov_len).sum();
        let answer = kernel_receive(fd, list, message & libc::MSG_TRUNC);
        if let Ok(n @ 1..) = answer {
            cursor.skip(n);
            self.rx.path.received(n as u64).map_err(|e| self.conn.corrupt(e))?;
            // Lock-free readers must see whether the segment is used up.
            self.conn.rx.counted.store(self.rx.path.total(), Ordering::Relaxed);
            self.show_received();
            return Ok(if n < asked { SegmentLook::Last(n) } else { SegmentLook::Bytes(n) });
        }
        self.conn.kernel.take_readable();
        // The sender's changes in memory before the kernel's event are visible by now.
        self.rx.path.refresh(&peer.tx_path).map_err(|e| self.conn.corrupt(e))?;
        if self.rx.path.limit() == Some(0) {
            self.conn.errors().keep(answer);
            return Ok(SegmentLook::Used);
        }
        match answer {
            Ok(_) if self.rx.path.limit().is_some() => {
                Err(self.conn.fail_permanently("the peer ended before the byte of its switch"))
            }
            Ok(_) => self.end(),
            Err(_) if self.conn.has(flags::RESET) => self.end(),
            Err(Errno::AGAIN) if self.conn.has(flags::READ_SHUT) => Ok(SegmentLook::End),
            Err(Errno::AGAIN) => self.conn.errors().take().map_or(Ok(SegmentLook::Nothing), Err),
            Err(error) => {
                self.conn.errors().note(error);
                Err(error)
            }
        }
    }
}

/// One receiving call of the kernel that does not wait.
pub(super) fn kernel_receive(fd: c_int, list: &mut [iovec], message: c_int) -> Result<usize, Errno> {
    receive_message(fd, list, message | libc::MSG_DONTWAIT)
}

/// One receiving call of the kernel.
pub(super) fn receive_message(fd: c_int, list: &mut [iovec], message: c_int) -> Result<usize, Errno> {
    #[expect(unsafe_code, reason = "hands the caller's buffers to the kernel")]
    // SAFETY: a message of zeros except the list, whose entries are the caller's buffers.
    let got = unsafe {
        let mut header: libc::msghdr = std::mem::zeroed();
        header.msg_iov = list.as_mut_ptr();
        header.msg_iovlen = list.len();
        real::recvmsg(fd, &raw mut header, message)
    };
    sys::take(got)
}
