//! A reader may leave the ring with unread bytes in it, because a program without this library takes the connection over. Its peer then
//! sends these bytes again by TCP (protocol T13.3, T13.4).
//!
//! ```text
//!   the ring:   ... read by us | unread |        TCP: | unread, once more | what follows ...
//!                              head     tail
//! ```
//!
//! The reader publishes that it has left, and never moves its head again. Its peer checks this whenever it sends, waits, or ends. The new
//! program gets the bytes late, as if they had been in transit. It loses them only if the peer dies before it checks.

use super::cursor::Cursor;
use super::rx::{BytesFound, ReceiveTurn, kernel_receive};
use super::shown;
use super::tx::{SendTurn, kernel_send};
use super::{Conn, Pages, flags};
use crate::log::log;
use crate::sys;
use libc::{c_int, iovec};
use partywall_shm::counters::add;
use partywall_shm::layout::path_flags;
use partywall_shm::path::Way;
use partywall_shm::sync::load_acquire_u32;
use rustix::event::epoll::EventFlags;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

/// How long an end waits for the kernel to take what a peer has left: as long as that one waited for us.
const PATIENCE: Duration = Duration::from_secs(1);

impl Conn {
    /// Leaves the ring that we read. `false` if what lies there can only be had by reading: the peer has ended, or has gone on by
    /// TCP behind it.
    pub(super) fn leave_ring(&self) -> bool {
        let Ok(_rx) = self.rx.hold() else { return false };
        let Some(pages) = self.pages() else { return false };
        let Pages { own, peer, .. } = pages;
        if !self.is_up() || self.has(flags::BROKEN) {
            return false;
        }
        let unread = pages.reading().unread(u64::MAX) > 0;
        let ended = !pages.reading().is_written();
        // EDGE path: as in `Receiver::refresh`; the tail that was loaded before is older, so what it showed is still in the ring.
        let went_on = Way::after(load_acquire_u32(&peer.tx_path.switches)) == Way::Tcp;
        if unread && (ended || went_on || self.has(flags::PEER_GONE)) {
            return false;
        }
        self.ring_path.set_flag(flags::LEFT, true);
        // Releases the last head. Both at once: a peer that went to TCP first could not send anything again.
        // EDGE left (protocol T13.3): releases the last head; acquired by the fence in the peer's `SendTurn::send_again`.
        own.rx_path.flags.fetch_or(path_flags::LEFT | path_flags::WANT_TCP, Ordering::AcqRel);
        true
    }

    /// Before this side ends: sends the bytes that a peer that has left has not received, and waits for the kernel to take them. If the
    /// kernel does not take them all, the connection is reset, so they are not lost silently.
    pub(crate) fn send_again_before_the_end(&'static self, fd: c_int) {
        if !self.look().owes() {
            return;
        }
        let until = sys::now() + PATIENCE;
        while let (Ok(mut tx), Some(pages)) = (self.tx.hold(), self.pages()) {
            if !pages.owes() || (SendTurn { conn: self, pages, tx: &mut tx }).send_again() != Err(Errno::AGAIN) {
                return;
            }
            drop(tx);
            if sys::now() >= until {
                log!("fd {fd}: reset: the peer has left bytes in the ring, and nobody takes them by TCP");
                super::leave::reset_on_close(fd);
                return;
            }
            let socket = sys::borrow(fd);
            let moment = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
            let _ = poll(&mut [PollFd::new(&socket, PollFlags::OUT)], Some(&moment));
        }
    }
}

impl SendTurn<'_> {
    /// To a peer that has left the ring: sends what it has left there, as far as the kernel takes it. `EAGAIN` if that is not all.
    #[cold]
    pub(super) fn send_again(&mut self) -> Result<(), Errno> {
        if self.conn.has(flags::SENT_AGAIN) {
            return Ok(());
        }
        let Pages { own, peer, local, .. } = self.pages;
        let tail = self.tx.half.tail();
        let mut from = match self.tx.again {
            Some(from) => from,
            None => {
                // Pairs with the release in `leave_ring`: its head is final.
                // EDGE left (protocol T13.3): acquires from the peer's `Conn::leave_ring`, whose flag was seen before.
                fence(Ordering::Acquire);
                let free = self.tx.half.refresh(&peer.control.rx).map_err(|e| self.conn.corrupt(e))?;
                let unread = self.tx.half.capacity() - free;
                if !self.tx.path.follow_out(&own.tx_path, &peer.rx_path, unread).map_err(|e| self.conn.corrupt(e))? {
                    return Err(self
                        .conn
                        .fail_permanently("the peer has left bytes in the ring, and others have gone by TCP since"));
                }
                add(&own.control.tx.counters.switches, 1);
                shown::sending(self.conn, Way::Tcp);
                log!("fd {}: the peer has left the ring, {unread} bytes go again by TCP", self.conn.fd());
                tail - unread
            }
        };
        while from < tail {
            // SAFETY: made by `Berth::create` at attaching, kept until both directions are held; this one's lock makes the
            // span ours alone.
            #[expect(unsafe_code, reason = "reads our own ring")]
            let span = unsafe { local.own.own_span(from, tail - from) };
            let span = span.into_mut_slice();
            let mut list = [iovec { iov_base: span.as_mut_ptr().cast(), iov_len: span.len() }];
            match kernel_send(self.conn.fd(), &mut list, 0) {
                Ok(n) => from += n as u64,
                Err(error) => {
                    self.tx.again = Some(from);
                    if error != Errno::AGAIN {
                        // The kernel has ended the connection, and reports that itself from here on.
                        self.conn.ring_path.set_flag(flags::SENT_AGAIN, true);
                        self.conn.kernel.note(EventFlags::HUP.bits());
                    }
                    return Err(error);
                }
            }
        }
        self.tx.again = Some(from);
        self.conn.ring_path.set_flag(flags::SENT_AGAIN, true);
        Ok(())
    }
}

impl ReceiveTurn<'_> {
    /// Receives from the kernel alone, after we have left the ring. The direction is held.
    #[cold]
    pub(super) fn receive_outside(
        &mut self,
        fd: c_int,
        cursor: &mut Cursor<'_>,
        message: c_int,
    ) -> Result<BytesFound, Errno> {
        let mut space = [iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; 16];
        let wanted = cursor.left();
        let list = cursor.rest(&mut space, u64::MAX);
        match kernel_receive(fd, list, message & (libc::MSG_PEEK | libc::MSG_TRUNC)) {
            Ok(0) if wanted > 0 => Ok(BytesFound::End),
            Ok(n) => {
                if message & libc::MSG_PEEK == 0 {
                    cursor.skip(n);
                }
                Ok(BytesFound::Bytes(n))
            }
            Err(Errno::AGAIN) => Ok(BytesFound::Nothing),
            Err(error) => Err(error),
        }
    }
}

impl Pages<'_> {
    /// [`RingLook::owes`](super::RingLook::owes).
    pub(super) fn owes(&self) -> bool {
        !self.path.has(flags::SENT_AGAIN)
            && self.path.is_up()
            && self.peer.rx_path.flags.load(Ordering::Relaxed) & path_flags::LEFT != 0
    }
}
