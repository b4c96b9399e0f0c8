//! Bytes of a ring that are held back, because the sending program has said that more follows: `MSG_MORE`, `TCP_CORK` (protocol T16).
//!
//! By TCP the kernel holds such bytes back and sends them after 200 ms at the latest, by a timer. The library has no timer and no thread in
//! the programs that it is loaded into. So the sender commits the bytes at once and marks them, and the reader leaves them in the ring: a
//! reader that waits for a connection is in a call of the library, and can limit its sleep.
//!
//! ```text
//!   sender                             reader
//!   mark, commit -------- bell ------> sees no byte that it may take, sleeps for moments
//!   commit, commit
//!   commit, unmark ------ bell ------> takes all of them
//!        (or nothing more)             takes them after 200 ms, or when the sender has ended
//! ```

use super::rx::ConnRx;
use super::tx::SendTurn;
use super::{Conn, Pages, flags};
use crate::sys;
use partywall_shm::counters::add;
use partywall_shm::held;
use partywall_shm::path::Way;
use partywall_shm::sync::load_acquire_u32;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// How long a reader leaves bytes that are held back: as long as the kernel's timer runs.
const LONGEST: Duration = Duration::from_millis(200);

impl Conn {
    /// Releases all bytes that lie in the ring now: a waiter whose sleep the library cannot limit waits for them.
    pub(crate) fn pass_held(&self) {
        if self.is_up()
            && let Some(pages) = self.pages()
            && pages.peer.tx_path.held.load(Ordering::Relaxed) != 0
        {
            pages.local.held.pass_to(pages.reading().tail());
        }
    }
}

impl SendTurn<'_> {
    /// Releases the held bytes to the reader. The caller holds the sending direction.
    #[inline]
    pub(super) fn release_held(&mut self) {
        if self.tx.holder.is_holding() {
            self.release_slowly();
        }
    }

    #[cold]
    fn release_slowly(&mut self) {
        let Pages { own, peer, .. } = self.pages;
        if self.tx.holder.release(&own.tx_path, &peer.control.rx, self.tx.half.tail(), super::FENCING)
            && self.pages.wake_reader()
        {
            add(&own.control.tx.counters.bells_rung, 1);
        }
    }
}

impl Pages<'_> {
    /// Up to where the ring may be read now, as [`Pages::takeable`].
    #[inline]
    pub(super) fn visible_tail(&self) -> u64 {
        self.visible(self.reading().tail())
    }

    /// Bytes that wait in the ring and are not held back. A look without any lock.
    #[inline]
    pub(super) fn takeable(&self) -> u64 {
        let unread = self.reading().unread(self.local.peer.ring_size());
        if unread == 0 || self.peer.tx_path.held.load(Ordering::Relaxed) == 0 {
            return unread;
        }
        let head = self.own.control.rx.cursor.head.load(Ordering::Relaxed);
        self.visible(head.wrapping_add(unread)).saturating_sub(head)
    }

    /// Like [`Pages::takeable`], for the thread that holds the receiving direction: the part of its half's available bytes that is not
    /// held back.
    #[inline]
    pub(super) fn takeable_of(&self, rx: &ConnRx) -> u64 {
        let available = rx.half.available();
        // A sender that has left the ring holds nothing back, whatever it says by now.
        let has_left = rx.path.way() == Way::Ring && rx.path.limit().is_some();
        if has_left || self.peer.tx_path.held.load(Ordering::Relaxed) == 0 {
            return available;
        }
        let head = rx.half.head();
        self.visible(head + available).saturating_sub(head).min(available)
    }

    /// Up to where a ring may be read whose peer has committed everything before `tail`.
    #[inline]
    fn visible(&self, tail: u64) -> u64 {
        let word = self.peer.tx_path.held.load(Ordering::Relaxed);
        if word == 0 { tail } else { self.visible_of_held(tail, word) }
    }

    #[cold]
    fn visible_of_held(&self, tail: u64, word: u64) -> u64 {
        let local = &self.local.held;
        let visible = held::visible(tail, word, local.passed.load(Ordering::Relaxed));
        // A sender that has left the ring or has ended holds nothing back.
        // EDGE path: as in `Receiver::refresh`.
        let has_left = Way::after(load_acquire_u32(&self.peer.tx_path.switches)) == Way::Tcp;
        if visible == tail || has_left || self.has_said_end() || self.path.has(flags::PEER_GONE | flags::LEFT) {
            return tail;
        }
        let now = u64::try_from(sys::now().as_nanos()).unwrap_or(u64::MAX);
        // A hold that begins later than the last one. A sender that lies cannot begin again: what is read is behind it (protocol T16.6).
        let from = visible.max(self.own.control.rx.cursor.head.load(Ordering::Relaxed)).saturating_add(1);
        // EDGE hold: acquires from the thread that noted this hold, whose time is in `since`.
        if local.from.load(Ordering::Acquire) < from {
            local.since.store(now, Ordering::Relaxed);
            // EDGE hold: releases `since`; acquired above, by another thread that looks.
            local.from.store(from, Ordering::Release);
            return visible;
        }
        if u128::from(now.saturating_sub(local.since.load(Ordering::Relaxed))) < LONGEST.as_nanos() {
            return visible;
        }
        // For bytes held back from here on, the time starts again.
        local.since.store(now, Ordering::Relaxed);
        // EDGE hold: as above.
        local.from.store(tail.saturating_add(1), Ordering::Release);
        local.pass_to(tail);
        tail
    }
}
