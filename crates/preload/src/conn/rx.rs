//! The receiving direction.

use super::cursor::Cursor;
use super::direction::{DirectionState, WORDS, optional};
use super::{Conn, Interest, Pages, flags};
use crate::local::LocalState;
use crate::lock::Lock;
use crate::{real, sys};
use libc::{c_int, iovec};
use partywall_shm::counters::add;
use partywall_shm::half::ReadingHalf;
use partywall_shm::path::{Receiver, Way};
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::thread::NanosleepRelativeResult;
use std::sync::atomic::Ordering;

/// Between two questions to the kernel by a program that polls by reading an empty ring, in [`sys::ticks`]: about a millisecond.
const RARELY: u64 = 2_400_000;

/// What the lock of the receiving direction guards.
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

/// What one look for bytes has brought.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BytesFound {
    /// Bytes.
    Bytes(usize),
    /// None will come any more.
    End,
    /// None now.
    Nothing,
}

/// What one look at the present segment has brought.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SegmentLook {
    /// Bytes; there may be more.
    Bytes(usize),
    /// Bytes, and no more now.
    Last(usize),
    /// The segment is used up, or the ring is to be looked at again.
    Used,
    /// None will come any more.
    End,
    /// None now.
    Nothing,
}

/// Segments that one look goes through. An honest peer changes the way now and then; one that does so whenever it is followed must not keep a
/// call here beyond its time.
const MOST_SEGMENTS: u32 = 16;

/// The most entries of a list that are handed to the kernel at once.
const NO_BUFFERS: [iovec; 16] = [iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; 16];

impl Conn {
    /// Receives into the cursor. Blocks as the socket would.
    ///
    /// Of the flags, `MSG_DONTWAIT`, `MSG_PEEK`, `MSG_WAITALL` and `MSG_TRUNC` (which discards) have a meaning.
    pub(crate) fn receive(&'static self, fd: c_int, cursor: &mut Cursor<'_>, message: c_int) -> Result<usize, Errno> {
        self.part_if_lost();
        let dont_wait = message & libc::MSG_DONTWAIT != 0;
        let peek = message & libc::MSG_PEEK != 0;
        let enough = self.enough_of(cursor.left(), message & libc::MSG_WAITALL != 0);
        let mut done = 0;
        let mut deadline = None;
        loop {
            match self.try_receive(fd, cursor, message) {
                Ok(BytesFound::Bytes(n)) => {
                    // What was peeked at is seen again.
                    done = if peek { n } else { done + n };
                    if done >= enough || (peek && !self.may_hold(enough)) {
                        return Ok(done);
                    }
                }
                Ok(BytesFound::End) => return Ok(done),
                Ok(BytesFound::Nothing) => {}
                Err(error) if done > 0 => {
                    self.put_error_back(error);
                    return Ok(done);
                }
                Err(error) => return Err(error),
            }
            if dont_wait || self.may_not_wait(fd) || self.rx.is_held_by_this_thread() {
                return if done > 0 { Ok(done) } else { Err(Errno::AGAIN) };
            }
            if peek && done > 0 {
                // There is something, so that a sleep would end at once.
                let end = *deadline.get_or_insert_with(|| Self::deadline(&self.receive_timeout));
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
            match self.sleep(Interest::IN, &self.receive_timeout, &mut deadline) {
                // Who wants nothing has waited, and has got it.
                _ if nothing_wanted => return Ok(0),
                Ok(()) => {}
                Err(_) if done > 0 => return Ok(done),
                Err(error) => return Err(error),
            }
        }
    }

    /// What a call waits for: all, or what `SO_RCVLOWAT` says. Even to receive nothing one waits for a byte.
    fn enough_of(&self, wanted: usize, all: bool) -> usize {
        match wanted {
            0 => 0,
            _ if all => wanted,
            _ => wanted.min(self.low_water.load(Ordering::Relaxed).max(1) as usize),
        }
    }

    /// Whether the ring can ever hold this much at once.
    fn may_hold(&self, n: usize) -> bool {
        n as u64 <= self.local().peer.ring_size()
    }

    /// Takes what is there now, across the ends of segments.
    fn try_receive(&'static self, fd: c_int, cursor: &mut Cursor<'_>, message: c_int) -> Result<BytesFound, Errno> {
        let Some(pages) = self.pages() else { return Err(self.without_ring(fd)) };
        let mut rx = match self.rx.hold() {
            Ok(rx) => rx,
            // Another process keeps the direction.
            Err(_) if !self.rx.is_held_by_this_thread() => return Ok(BytesFound::Nothing),
            Err(error) => return Err(error),
        };
        self.may_receive(fd)?;
        if self.has(flags::LEFT) {
            return self.receive_outside(fd, cursor, message);
        }
        if message & libc::MSG_PEEK != 0 || cursor.left() == 0 {
            return self.peek(&mut rx, pages, fd, cursor);
        }
        let mut done = 0;
        for _ in 0..MOST_SEGMENTS {
            let got = match rx.path.way() {
                Way::Ring => self.receive_from_ring(&mut rx, pages, fd, cursor, message, done > 0),
                Way::Tcp => self.receive_from_tcp(&mut rx, pages, fd, cursor, message),
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
                    self.put_error_back(error);
                    return Ok(BytesFound::Bytes(done));
                }
                Err(error) => return Err(error),
            }
        }
        Ok(if done > 0 { BytesFound::Bytes(done) } else { BytesFound::Nothing })
    }

    /// Copies what is there now, and leaves it there. With no room for any, says whether there is something.
    fn peek(&'static self, rx: &mut ConnRx, pages: Pages, fd: c_int, cursor: &Cursor<'_>) -> Result<BytesFound, Errno> {
        let mut byte = 0u8;
        let mut one = [iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 }];
        let counts = cursor.left() > 0;
        let mut place = if counts {
            cursor.here()
        } else {
            let Some(place) = Cursor::of(&mut one) else { return Ok(BytesFound::Nothing) };
            place
        };
        for _ in 0..MOST_SEGMENTS {
            let (mut from_ring, mut from_tcp) = (0, 0);
            // The first segment, and the one after it if that has begun; no more than one switch is ahead of us.
            let first = rx.path.way();
            if first == Way::Ring {
                from_ring = self.peek_at_ring(rx, pages, &mut place)?;
            }
            rx.path.refresh(&pages.peer.tx_path).map_err(|e| self.corrupt(e))?;
            let limit = rx.path.limit();
            let mut has_ended = false;
            if place.left() > 0
                && (first == Way::Tcp && limit != Some(0) || first == Way::Ring && limit == Some(from_ring as u64))
            {
                let most = if first == Way::Tcp { limit } else { None };
                let mut space = NO_BUFFERS;
                match kernel_receive(fd, place.rest(&mut space, most.unwrap_or(u64::MAX)), libc::MSG_PEEK) {
                    Ok(0) => has_ended = true,
                    Ok(n) => {
                        place.skip(n);
                        from_tcp = n;
                    }
                    Err(Errno::AGAIN) => {}
                    Err(error) => self.keep_error(Err(error)),
                }
            }
            if first == Way::Tcp && limit == Some(from_tcp as u64) {
                from_ring = self.peek_at_ring(rx, pages, &mut place)?;
            }
            if from_ring + from_tcp > 0 {
                return Ok(BytesFound::Bytes(if counts { from_ring + from_tcp } else { 0 }));
            }
            // Nothing: whether that is the end is judged as in receiving.
            let nothing = match rx.path.way() {
                Way::Ring => self.nothing_in_ring(rx, pages, fd, false)?,
                Way::Tcp if limit == Some(0) => {
                    self.pass(rx, pages);
                    SegmentLook::Used
                }
                Way::Tcp if has_ended => self.end()?,
                Way::Tcp => match self.take_error() {
                    Some(error) => return Err(error),
                    None if self.has(flags::READ_SHUT) => SegmentLook::End,
                    None => SegmentLook::Nothing,
                },
            };
            match nothing {
                SegmentLook::End => return Ok(BytesFound::End),
                SegmentLook::Used => {}
                SegmentLook::Nothing | SegmentLook::Bytes(_) | SegmentLook::Last(_) => return Ok(BytesFound::Nothing),
            }
        }
        Ok(BytesFound::Nothing)
    }

    fn peek_at_ring(&self, rx: &mut ConnRx, pages: Pages, place: &mut Cursor<'_>) -> Result<usize, Errno> {
        rx.half.refresh(&pages.peer.control.tx).map_err(|e| self.corrupt(e))?;
        let n = self.takeable_of(rx, pages).min(place.left() as u64);
        if n == 0 {
            return Ok(0);
        }
        // SAFETY: attached, and kept until both directions are held.
        #[expect(unsafe_code, reason = "reads from the peer's ring")]
        let span = unsafe { pages.local.peer.peer_span(rx.half.head(), n) };
        Ok(place.copy_from(span))
    }

    /// Goes on to the next segment, if this one is used up.
    fn pass(&self, rx: &mut ConnRx, pages: Pages) -> bool {
        if !rx.path.pass(&pages.own.rx_path) {
            return false;
        }
        add(&pages.own.control.rx.counters.switches, 1);
        self.show_receiving(rx.path.way());
        // The peer may have rung for it.
        self.drain();
        if self.has(flags::WANT_TCP) && rx.path.way() == Way::Ring {
            // It could not go back before this, and may be asleep.
            self.ring();
        }
        true
    }

    #[inline]
    fn receive_from_ring(
        &'static self,
        rx: &mut ConnRx,
        pages: Pages,
        fd: c_int,
        cursor: &mut Cursor<'_>,
        message: c_int,
        is_more: bool,
    ) -> Result<SegmentLook, Errno> {
        let Pages { own, peer, local } = pages;
        let wanted = cursor.left() as u64;
        let mut available = rx.half.available();
        if available < wanted {
            available = rx.half.refresh(&peer.control.tx).map_err(|e| self.corrupt(e))?;
        }
        if available > 0 {
            available = self.takeable_of(rx, pages);
        }
        if available == 0 {
            return self.nothing_in_ring(rx, pages, fd, is_more);
        }
        let n = available.min(wanted);
        // SAFETY: attached, and kept until both directions are held.
        #[expect(unsafe_code, reason = "reads from the peer's ring")]
        let span = unsafe { local.peer.peer_span(rx.half.head(), n) };
        let n = if message & libc::MSG_TRUNC != 0 {
            cursor.skip(n as usize);
            n
        } else {
            cursor.copy_from(span) as u64
        };
        self.release(rx, pages, n)?;
        if !is_more {
            add(&own.control.rx.counters.messages, 1);
        }
        Ok(SegmentLook::Bytes(n as usize))
    }

    /// The ring is empty: by a switch, at the end, or just so.
    fn nothing_in_ring(
        &'static self,
        rx: &mut ConnRx,
        pages: Pages,
        fd: c_int,
        is_more: bool,
    ) -> Result<SegmentLook, Errno> {
        let Pages { own, peer, .. } = pages;
        rx.path.refresh(&peer.tx_path).map_err(|e| self.corrupt(e))?;
        if let Some(left) = rx.path.limit() {
            // The sender has left the ring; all that it committed before can be seen by now.
            let more = rx.half.refresh(&peer.control.tx).map_err(|e| self.corrupt(e))?;
            if more > 0 {
                return Ok(SegmentLook::Used);
            }
            if left > 0 {
                return Err(self.fail_for_good("the peer left bytes out at a switch"));
            }
            self.rx.counted.store(rx.path.total(), Ordering::Relaxed);
            self.pass(rx, pages);
            return Ok(SegmentLook::Used);
        }
        if is_more {
            return Ok(SegmentLook::Nothing);
        }
        add(&own.control.rx.counters.stalls, 1);
        self.ask_the_kernel(rx, pages, fd)
    }

    /// The rest has come by rings, which count themselves.
    fn show_received(&self, rx: &ConnRx) {
        if let Some(line) = self.line() {
            line.rx.tcp.store(rx.path.total().wrapping_sub(rx.half.head()), Ordering::Relaxed);
        }
    }

    /// Goes on to the next segment if nothing of the present one is left, without a call that reads.
    pub(super) fn finish_segment(&self) {
        if let Some(mut rx) = self.rx.try_hold()
            && self.is_up()
            && !self.has(flags::LEFT)
            && let Some(pages) = self.pages()
            && rx.path.refresh(&pages.peer.tx_path).is_ok()
        {
            self.rx.counted.store(rx.path.total(), Ordering::Relaxed);
            self.pass(&mut rx, pages);
        }
    }

    /// Gives `n` bytes of the ring back.
    #[inline]
    fn release(&self, rx: &mut ConnRx, pages: Pages, n: u64) -> Result<(), Errno> {
        let Pages { own, peer, .. } = pages;
        rx.path.received(n).map_err(|e| self.corrupt(e))?;
        let ring = rx.half.release(&own.control.rx, &peer.control.tx, n, super::FENCING);
        if ring {
            add(&own.control.rx.counters.bells_rung, 1);
            self.ring();
        } else {
            add(&own.control.rx.counters.bells_saved, 1);
        }
        Ok(())
    }

    /// The ring is empty: has the end come over the kernel's socket? `Used`: look at the ring again.
    fn ask_the_kernel(&'static self, rx: &mut ConnRx, pages: Pages, fd: c_int) -> Result<SegmentLook, Errno> {
        let Pages { peer, .. } = pages;
        // Told once, while the ring still had something.
        if let Some(error) = self.take_reset() {
            return Err(error);
        }
        let said = self.kernel_said.load(Ordering::Relaxed);
        let ended = pages.has_said_end() || self.has(flags::PEER_GONE);
        let is_shut = self.has(flags::READ_SHUT);
        let now = sys::ticks();
        let is_due = now.wrapping_sub(self.asked_at.load(Ordering::Relaxed)) >= RARELY;
        if said == 0 && !ended && !is_shut && !is_due {
            return Ok(SegmentLook::Nothing);
        }
        self.asked_at.store(now, Ordering::Relaxed);
        // Who never sleeps and never sends hears of a peer's wishes here.
        self.follow();
        self.kernel_said.fetch_and(!EventFlags::IN.bits(), Ordering::Relaxed);
        let mut byte = 0u8;
        let mut list = [iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 }];
        let answer = kernel_receive(fd, &mut list, libc::MSG_PEEK);
        if answer == Err(Errno::AGAIN) && !(ended && self.look_for_reset()) {
            return Ok(if is_shut { SegmentLook::End } else { SegmentLook::Nothing });
        }
        // Whatever the kernel has, an end or bytes, came after what the peer did in memory before it: look there once more.
        let more = rx.half.refresh(&peer.control.tx).map_err(|e| self.corrupt(e))?;
        rx.path.refresh(&peer.tx_path).map_err(|e| self.corrupt(e))?;
        if more > 0 || rx.path.limit().is_some() {
            // A sender that has ended holds nothing back.
            self.pass_held_to(rx.half.head() + more);
            self.keep_error(answer);
            return Ok(SegmentLook::Used);
        }
        match answer {
            Ok(1..) => Err(self.fail_for_good("bytes came over TCP past the ring")),
            // The kernel's own reset may come after our verdict.
            Err(error) if error != Errno::AGAIN && !self.has(flags::RESET) => {
                self.note_error(error);
                Err(error)
            }
            _ => self.end(),
        }
    }

    /// Nothing more comes: in order, or by a reset that the kernel does not know of.
    fn end(&self) -> Result<SegmentLook, Errno> {
        self.look_for_reset();
        if self.has(flags::BROKEN) {
            return Err(Errno::CONNRESET);
        }
        self.take_reset().map_or(Ok(SegmentLook::End), Err)
    }

    /// To ask takes an error of the socket away. A call after the last byte returns it.
    pub(crate) fn keep_error(&self, answer: Result<usize, Errno>) {
        if let Err(error) = answer
            && !matches!(error, Errno::AGAIN | Errno::INTR | Errno::BADF)
            && self.is_up()
            && !self.has(flags::RESET)
        {
            self.note_error(error);
            self.kernel_error.store(error.raw_os_error().cast_unsigned(), Ordering::Relaxed);
            self.note_kernel(EventFlags::ERR.bits());
        }
    }

    /// An error that a call has met after it had moved bytes. As in the kernel, that call reports the bytes and the next one the error, if it
    /// has ended the connection: what `sendfile` meets in the file is no error of the socket.
    pub(super) fn put_error_back(&self, error: Errno) {
        if !self.has(flags::RESET) {
            // The kernel goes on reporting `EPIPE` to senders by itself.
            if self.has(flags::ERROR_SEEN) && error != Errno::PIPE {
                self.keep_error(Err(error));
            }
        } else if error == self.reset_error() {
            self.set_flag(flags::RESET_UNTOLD, true);
        }
    }

    /// An error that was kept, or that the kernel has; it is returned once.
    pub(crate) fn pending_error(&'static self) -> Option<Errno> {
        self.kept_error().or_else(|| {
            let error = rustix::net::sockopt::socket_error(sys::borrow(self.fd())).ok()?.err()?;
            self.note_error(error);
            (!self.has(flags::RESET)).then_some(error)
        })
    }

    /// An error that was kept, or that the kernel does not have; it is returned once.
    pub(crate) fn kept_error(&'static self) -> Option<Errno> {
        if self.is_up() {
            self.look_for_death();
            self.look_for_reset();
        }
        self.take_error()
    }

    pub(crate) fn has_kept_error(&self) -> bool {
        self.kernel_error.load(Ordering::Relaxed) != 0
    }

    /// An error that was kept.
    pub(super) fn take_error(&self) -> Option<Errno> {
        if self.kernel_error.load(Ordering::Relaxed) == 0 {
            return if self.has(flags::RESET_UNTOLD) { self.take_reset_error() } else { None };
        }
        let error = self.kernel_error.swap(0, Ordering::Relaxed).cast_signed();
        // The word may be another process' after a fork.
        (1..4096).contains(&error).then(|| Errno::from_raw_os_error(error))
    }

    /// An error that was kept, at the end of what the kernel has: it is returned before the end, except that of a peer that had ended in
    /// order before, which is for the sending calls.
    fn take_reset(&self) -> Option<Errno> {
        let kept = self.kernel_error.load(Ordering::Relaxed).cast_signed();
        let is_pipe = kept == Errno::PIPE.raw_os_error() || kept == 0 && self.has(flags::RESET_IS_PIPE);
        if is_pipe { None } else { self.take_error() }
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
                Ok(BytesFound::Bytes(n)) => return Ok(n),
                Ok(BytesFound::End) => return Ok(0),
                Ok(BytesFound::Nothing) if dont_wait || self.may_not_wait(fd) => return Err(Errno::AGAIN),
                Ok(BytesFound::Nothing) => self.sleep(Interest::IN, &self.receive_timeout, &mut deadline)?,
                Err(error) => return Err(error),
            }
        }
    }

    fn try_receive_into(
        &'static self,
        fd: c_int,
        wanted: usize,
        write: &mut impl FnMut(*const u8, usize) -> Result<usize, Errno>,
    ) -> Result<BytesFound, Errno> {
        let Some(pages) = self.pages() else { return Err(self.without_ring(fd)) };
        {
            let mut rx = self.rx.hold()?;
            self.may_receive(fd)?;
            rx.half.refresh(&pages.peer.control.tx).map_err(|e| self.corrupt(e))?;
            let available = self.takeable_of(&rx, pages);
            if rx.path.way() == Way::Ring && available > 0 && !self.has(flags::LEFT) {
                let n = available.min(wanted as u64);
                // SAFETY: attached, and kept until both directions are held.
                #[expect(unsafe_code, reason = "hands the peer's ring to the kernel")]
                let span = unsafe { pages.local.peer.peer_span(rx.half.head(), n) };
                let n = write(span.as_ptr(), span.len())?;
                self.release(&mut rx, pages, n as u64)?;
                return Ok(BytesFound::Bytes(n));
            }
        }
        // The end, a switch, or TCP: by a look, and then by what the look has shown to be there.
        let mut buffer = [0u8; 4096];
        let mut list = [iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: wanted.min(buffer.len()) }];
        let Some(mut peek) = Cursor::of(&mut list) else { return Ok(BytesFound::Nothing) };
        match self.try_receive(fd, &mut peek, libc::MSG_PEEK)? {
            BytesFound::Bytes(n) => {
                let n = write(buffer.as_ptr(), n)?;
                list[0].iov_len = n;
                let Some(mut rest) = Cursor::of(&mut list) else { return Ok(BytesFound::Nothing) };
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
        if self.is_of(fd) && self.is_up() { Ok(()) } else { Err(self.without_ring(fd)) }
    }

    fn receive_from_tcp(
        &self,
        rx: &mut ConnRx,
        pages: Pages,
        fd: c_int,
        cursor: &mut Cursor<'_>,
        message: c_int,
    ) -> Result<SegmentLook, Errno> {
        let peer = pages.peer;
        rx.path.refresh(&peer.tx_path).map_err(|e| self.corrupt(e))?;
        if self.pass(rx, pages) {
            return Ok(SegmentLook::Used);
        }
        let mut space = NO_BUFFERS;
        let list = cursor.rest(&mut space, rx.path.limit().unwrap_or(u64::MAX));
        let asked: usize = list.iter().map(|one| one.iov_len).sum();
        let answer = kernel_receive(fd, list, message & libc::MSG_TRUNC);
        if let Ok(n @ 1..) = answer {
            cursor.skip(n);
            rx.path.received(n as u64).map_err(|e| self.corrupt(e))?;
            // Who only looks must know whether the segment is used up.
            self.rx.counted.store(rx.path.total(), Ordering::Relaxed);
            self.show_received(rx);
            return Ok(if n < asked { SegmentLook::Last(n) } else { SegmentLook::Bytes(n) });
        }
        self.kernel_said.fetch_and(!EventFlags::IN.bits(), Ordering::Relaxed);
        // What the sender did in memory before the kernel's news can be seen by now.
        rx.path.refresh(&peer.tx_path).map_err(|e| self.corrupt(e))?;
        if rx.path.limit() == Some(0) {
            self.keep_error(answer);
            return Ok(SegmentLook::Used);
        }
        match answer {
            Ok(_) if rx.path.limit().is_some() => {
                Err(self.fail_for_good("the peer ended before the byte of its switch"))
            }
            Ok(_) => self.end(),
            Err(_) if self.has(flags::RESET) => self.end(),
            Err(Errno::AGAIN) if self.has(flags::READ_SHUT) => Ok(SegmentLook::End),
            Err(Errno::AGAIN) => self.take_error().map_or(Ok(SegmentLook::Nothing), Err),
            Err(error) => {
                self.note_error(error);
                Err(error)
            }
        }
    }
}

/// One receiving call of the kernel that does not wait.
pub(super) fn kernel_receive(fd: c_int, list: &mut [iovec], message: c_int) -> Result<usize, Errno> {
    #[expect(unsafe_code, reason = "hands the caller's buffers to the kernel")]
    // SAFETY: a message of zeros except the list, whose entries are the caller's buffers.
    let got = unsafe {
        let mut header: libc::msghdr = std::mem::zeroed();
        header.msg_iov = list.as_mut_ptr();
        header.msg_iovlen = list.len();
        real::recvmsg(fd, &raw mut header, message | libc::MSG_DONTWAIT)
    };
    sys::take(got)
}
