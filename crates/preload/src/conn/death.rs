//! The death of a peer without a close: calls return what TCP would have reported, although the unread bytes are in our ring.
//!
//! When a process dies, its kernel ends the connection in order (FIN) if nothing unread lies in the socket, and resets it (RST) if
//! something does. Bytes in a ring are not in the socket, so the kernel reports an orderly end even where the peer has lost bytes of
//! ours. The survivor detects this in memory, and from then on its calls return the same results as after a reset (protocol T10).
//!
//! A peer that closes with bytes of ours unread publishes *Reset* in memory (protocol T10.5), before its kernel resets the connection. So
//! the result of a call in between does not depend on which of the two comes first.
//!
//! ```text
//!   the peer says *Reset*,
//!   or its end of the link is gone,             our tail is ahead       the kernel has no
//!   or the kernel has its FIN and the     and   of the peer's     and   error itself         ->   RESET
//!   peer has not announced an end (S1)          head                    to report
//! ```

use super::{Conn, flags, options};
use crate::log::log;
use crate::sys;
use partywall_shm::layout::path_flags;
use partywall_shm::state::{RxState, TxState};
use partywall_shm::status::Reason;
use rustix::event::epoll::EventFlags;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::sync::atomic::Ordering;

/// Between two questions whether the peer is alive, in [`sys::ticks`]: about a millisecond. An end that nothing in memory announces
/// is noticed this late by calls that ask the kernel nothing else.
const RARELY: u64 = 2_400_000;

/// The end of a connection's peer, as this side can tell it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PeerDeath<'a>(&'a Conn);

impl PeerDeath<'_> {
    /// Whether the connection has ended by a reset that the kernel does not know of.
    #[inline]
    pub(crate) fn is_reset(&self) -> bool {
        self.0.has(flags::RESET | flags::BROKEN)
    }

    /// The events that `poll` reports of a connection that [is reset](Self::is_reset), in the numbers that `poll` and `epoll` share.
    #[cold]
    pub(crate) fn reset_events(&self) -> u32 {
        let always = EventFlags::IN | EventFlags::RDNORM | EventFlags::OUT | EventFlags::WRNORM | EventFlags::RDHUP;
        let always = always | EventFlags::HUP;
        let untold = self.0.has(flags::RESET_UNTOLD | flags::BROKEN) || self.0.errors().has_kept();
        (if untold { always | EventFlags::ERR } else { always }).bits()
    }

    /// Judges whether the peer has ended with bytes of ours unread, and keeps the verdict. Returns [`PeerDeath::is_reset`].
    ///
    /// Costs a question to the kernel only while something unread lies in our ring. An error that the kernel has already goes before the verdict.
    #[cold]
    pub(crate) fn look_for_reset(&self) -> bool {
        if self.0.has(flags::RESET | flags::BROKEN) {
            return true;
        }
        let Some(pages) = self.0.pages().filter(|_| self.0.is_up() && !self.0.has(flags::ERROR_SEEN)) else {
            return false;
        };
        let (tx, rx) = match (
            TxState::load(&pages.peer.control.tx.control.state),
            RxState::load(&pages.peer.control.rx.control.state),
        ) {
            (Ok(tx), Ok(rx)) => (tx, rx),
            (Err(what), _) | (_, Err(what)) => {
                // Protocol S4.
                self.0.corrupt(what);
                return true;
            }
        };
        // A peer that has left the ring gets its bytes by TCP, and the kernel knows what becomes of them.
        let has_left = || pages.peer.rx_path.flags.load(Ordering::Relaxed) & path_flags::LEFT != 0;
        if self.0.look().unsent() == 0 || has_left() {
            return false;
        }
        let fd = self.0.fd();
        if fd < 0 {
            return false;
        }
        let fd = sys::borrow(fd);
        let mut one = [PollFd::new(&fd, PollFlags::RDHUP)];
        if poll(&mut one, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_err() {
            return false;
        }
        let said = one[0].revents();
        if said.intersects(PollFlags::ERR | PollFlags::NVAL) {
            return false;
        }
        // After our own `shutdown` for reading the kernel reports the same as after the peer's end.
        let has_fin = said.contains(PollFlags::RDHUP) && !self.0.has(flags::READ_SHUT);
        let is_dead = match rx {
            RxState::Open => self.0.has(flags::PEER_GONE) || has_fin && tx == TxState::Open,
            // It has said so itself. The kernel's reset may come later (protocol T10.5).
            RxState::Reset => true,
            // It has closed, or shut down both ways and may read on.
            RxState::Closed | RxState::Broken => has_fin && self.0.has(flags::PEER_GONE),
        };
        // Once it is dead its head is final. Where both directions had ended before, TCP has closed, and nothing follows.
        let both_ended = tx != TxState::Open && self.0.has(flags::WRITE_SHUT);
        if !is_dead || both_ended || self.0.look().unsent() == 0 || has_left() {
            return false;
        }
        log!("fd {}: reset: the peer has ended with {} bytes of ours unread", self.0.fd(), self.0.look().unsent());
        // After the peer's FIN a reset is an error of the sending side alone, as in the kernel.
        let kind = if tx == TxState::Open { 0 } else { flags::RESET_IS_PIPE };
        let verdict = flags::RESET | flags::RESET_UNTOLD | kind;
        // Once: the error is not to be reported a second time.
        // EDGE reset: releases the verdict with its kind; acquired in `RingPath::take_reset_error`.
        let _ = self.0.ring_path.flags.fetch_update(Ordering::AcqRel, Ordering::Acquire, |old| {
            (old & flags::RESET == 0).then_some(old | verdict)
        });
        true
    }
}

impl PeerDeath<'static> {
    /// Asks the kernel now and then whether the peer is alive. Returns whether it was asked.
    #[inline]
    pub(super) fn look_rarely(&self) -> bool {
        let now = sys::ticks();
        let is_due = now.wrapping_sub(self.0.moves.looked_at.load(Ordering::Relaxed)) >= RARELY;
        if is_due {
            self.0.moves.looked_at.store(now, Ordering::Relaxed);
            self.look();
        }
        is_due
    }

    /// Checks for a death before a call reports readiness that it has found in memory alone. Returns whether there may be news.
    #[inline]
    pub(crate) fn has_news(&self) -> bool {
        self.look_rarely() && (self.0.has(flags::PEER_GONE) || self.0.kernel.has_hung_up() != 0)
    }

    /// Asks the kernel, by socket and link, whether the peer is there. No bell is rung for this: bells without a wish would fill the link.
    #[cold]
    pub(super) fn look(&self) {
        let (fd, link) = (self.0.fd(), self.0.bell().fd());
        if fd < 0 || link < 0 {
            return;
        }
        let (fd, link) = (sys::borrow(fd), sys::borrow(link));
        let mut both = [PollFd::new(&fd, PollFlags::RDHUP), PollFd::new(&link, PollFlags::RDHUP)];
        if poll(&mut both, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok() {
            // A descriptor that another thread has closed (NVAL) is no news of the peer.
            let ends = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
            self.0.kernel.note((both[0].revents() & ends).bits().into());
            if both[1].revents().intersects(ends) {
                self.link_has_hung_up();
            }
        }
    }

    /// An event on the link said this.
    pub(crate) fn note_link(&self, events: u32) {
        if events & (EventFlags::HUP | EventFlags::ERR).bits() != 0 {
            self.link_has_hung_up();
        }
    }

    /// Our end of the bell has hung up. On one machine that is the end of the peer. A bell to another machine also hangs up if a relay, an
    /// agent or the broker ends while the peer lives: then the kernel's connection is there, and all that is lost is the way to ring. The
    /// connection goes back to TCP (protocol T15.5), and the kernel reports the end of a peer that has died.
    #[cold]
    pub(super) fn link_has_hung_up(&self) {
        // If a peer has ended only one direction, the other still works.
        let has_ended = self.0.pages().is_some_and(|pages| !pages.reading().is_written() && !pages.writing().is_read());
        if !self.0.has(flags::FAR) || has_ended || !self.0.is_up() {
            self.0.ring_path.set_flag(flags::PEER_GONE, true);
            return;
        }
        // The bell stays where it is: each set that has it learns once that it has hung up, and looks for itself from then on.
        if !self.0.has(flags::LINK_LOST) {
            self.0.ring_path.set_flag(flags::LINK_LOST, true);
            log!("fd {}: the way to the peer's machine was lost; back to TCP", self.0.fd());
            // None of our own data may be in flight, because the kernel would find it lost with the peer's machine.
            options::keep_alive(self.0.fd());
            self.0.ask_for_tcp(Reason::LinkLost, false);
        }
    }
}

impl Conn {
    /// Whether its peer has ended, and how.
    #[inline]
    pub(crate) fn death(&self) -> PeerDeath<'_> {
        PeerDeath(self)
    }
}
