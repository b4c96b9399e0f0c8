//! The route of a socket connection's bytes: the index logic of the switch between TCP and the ring (protocol T8, T9).
//!
//! The stream of one direction is a sequence of segments, by turns on TCP and in the ring. Its sender counts its bytes over
//! both ways, and publishes where the latest segment begins; its receiver counts too, and publishes which segment it has reached.
//!
//! ```text
//!    switches:        0        |       1        |        2
//!    the stream: --- TCP ------|----- ring -----|------ TCP ------>
//!                              at               at
//! ```
//!
//! At most one switch is ahead of the receiver: the sender waits with the next until the receiver has *seen* the last one. So bytes that
//! a receiver finds on TCP belong to the segment that it reads while it is on TCP, and likewise in the ring: it cannot read past a
//! switch. Neither side waits for the other: a sender that may not switch yet stays where it is.
//!
//! I/O-free, as [`crate::producer`]: every value of the peer is loaded once and judged here.

use crate::corrupt::Corrupt;
use crate::layout::{RxPath, TxPath, path_flags};
use crate::sync::{Access, Load, Ordering, load_acquire_u32};

/// Where the bytes are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// In the kernel's socket.
    Tcp,
    /// In shared memory.
    Ring,
}

impl Way {
    /// The way after this number of switches.
    pub const fn after(switches: u32) -> Self {
        if switches.is_multiple_of(2) { Self::Tcp } else { Self::Ring }
    }
}

/// The sender's private state.
#[derive(Debug, Clone, Copy)]
pub struct Sender {
    /// Bytes ever sent, by both ways.
    total: u64,
    switches: u32,
    /// The peer's `seen` as last loaded.
    seen: u32,
}

/// The switches that the peer allows a sender.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Leave {
    /// It has followed the last switch: another is allowed.
    pub may_switch: bool,
    /// It would notice bytes in the ring.
    pub ring_is_watched: bool,
    /// It asks for TCP.
    pub wants_tcp: bool,
    /// It reads nothing from the ring any more: [`Sender::follow_out`] is next.
    pub has_left: bool,
}

impl Leave {
    /// Whether a sender that is on TCP may go up to the ring.
    pub const fn may_go_up(self) -> bool {
        self.may_switch && self.ring_is_watched && !self.wants_tcp
    }
}

impl Sender {
    /// A sender on TCP that has sent `total` bytes there.
    pub const fn new(total: u64) -> Self {
        Self { total, switches: 0, seen: 0 }
    }

    /// A sender that goes on where another left off. `None` if no sender says this: the three were kept in memory that others can write.
    #[inline]
    pub const fn resume(total: u64, switches: u32, seen: u32) -> Option<Self> {
        // One switch is ahead of the peer at most, and two after [`Sender::follow_out`].
        if switches.wrapping_sub(seen) <= 2 { Some(Self { total, switches, seen }) } else { None }
    }

    /// The peer's word for the switch that it has passed last, as it was loaded last.
    pub const fn seen(&self) -> u32 {
        self.seen
    }

    /// Bytes ever sent.
    pub const fn total(&self) -> u64 {
        self.total
    }

    /// How often the way has changed.
    pub const fn switches(&self) -> u32 {
        self.switches
    }

    /// The present way.
    #[inline]
    pub const fn way(&self) -> Way {
        Way::after(self.switches)
    }

    /// `n` bytes have been sent by the present way.
    #[inline]
    pub fn sent(&mut self, n: u64) {
        self.total = self.total.wrapping_add(n);
    }

    /// Loads how far the peer has followed, and what it asks for.
    #[inline]
    pub fn ask<A: Access>(&mut self, peer: &RxPath<A>) -> Result<Leave, Corrupt> {
        // EDGE seen: acquires from `Receiver::pass`.
        let seen = load_acquire_u32(&peer.seen);
        let flags = peer.flags.load(Ordering::Relaxed);
        // It may be where we are, or one behind; it never goes back.
        if seen != self.seen && seen != self.switches {
            return Err(Corrupt::BadSwitch);
        }
        self.seen = seen;
        Ok(Leave {
            may_switch: seen == self.switches,
            ring_is_watched: flags & path_flags::WATCHING != 0,
            wants_tcp: flags & path_flags::WANT_TCP != 0,
            has_left: flags & path_flags::LEFT != 0,
        })
    }

    /// Goes on by the other way, from the next byte on. Everything sent so far must have been handed to TCP, or committed.
    ///
    /// # Panics
    /// If the last [`Sender::ask`] did not allow it.
    pub fn switch(&mut self, own: &TxPath) {
        assert!(self.seen == self.switches, "the peer has not followed the last switch");
        self.switches = self.switches.wrapping_add(1);
        own.switched_at.store(self.total, Ordering::Relaxed);
        // EDGE path: releases `switched_at`, and every cursor stored before; acquired in `Receiver::refresh`.
        own.switches.store(self.switches, Ordering::Release);
    }

    /// Goes to TCP, permanently, after a peer that has left the ring with `unread` of our bytes in it. They are to be sent there once
    /// more, before any other. `false`: the stream has gone on by TCP already, and they cannot go before that any more.
    ///
    /// The flag must have been seen before an acquire fence: what is loaded here is then the peer's last word.
    pub fn follow_out<A: Access>(&mut self, own: &TxPath, peer: &RxPath<A>, unread: u64) -> Result<bool, Corrupt> {
        // EDGE seen: acquires from `Receiver::pass`.
        let seen = load_acquire_u32(&peer.seen);
        if seen != self.seen && seen != self.switches {
            return Err(Corrupt::BadSwitch);
        }
        self.seen = seen;
        if self.way() == Way::Tcp {
            return Ok(unread == 0 || own.switched_at.load(Ordering::Relaxed) == self.total);
        }
        // One more than a receiver would have to cope with; this one copes with none.
        self.switches = self.switches.wrapping_add(1);
        own.switched_at.store(self.total, Ordering::Relaxed);
        // EDGE path: as in `Sender::switch`.
        own.switches.store(self.switches, Ordering::Release);
        Ok(true)
    }
}

/// The receiver's private state.
#[derive(Debug, Clone, Copy)]
pub struct Receiver {
    /// Bytes ever received, by both ways.
    total: u64,
    seen: u32,
    /// Where the next segment begins, once the sender has said so.
    next: Option<u64>,
}

impl Receiver {
    /// A receiver on TCP that has received `total` bytes there.
    pub const fn new(total: u64) -> Self {
        Self { total, seen: 0, next: None }
    }

    /// A receiver that goes on where another left off. `None` if no receiver says this: the three were kept in memory that others can write.
    #[inline]
    pub const fn resume(total: u64, seen: u32, next: Option<u64>) -> Option<Self> {
        match next {
            Some(at) if at < total => None,
            _ => Some(Self { total, seen, next }),
        }
    }

    /// Where the next segment begins, once the sender has said so.
    pub const fn next(&self) -> Option<u64> {
        self.next
    }

    /// Bytes ever received.
    pub const fn total(&self) -> u64 {
        self.total
    }

    /// The switch that was passed last.
    pub const fn seen(&self) -> u32 {
        self.seen
    }

    /// The present way.
    #[inline]
    pub const fn way(&self) -> Way {
        Way::after(self.seen)
    }

    /// Looks whether the sender has switched. To be called *before* TCP is read, and before the ring's tail is loaded for the
    /// judgement in [`Receiver::limit`]: what is found there afterwards is known to belong to the present segment.
    #[inline]
    pub fn refresh<A: Access>(&mut self, peer: &TxPath<A>) -> Result<(), Corrupt> {
        if self.next.is_some() {
            // No further one is allowed before this one is passed.
            return Ok(());
        }
        // EDGE path: acquires from `Sender::switch`.
        let switches = load_acquire_u32(&peer.switches);
        if switches == self.seen {
            return Ok(());
        }
        let at = peer.switched_at.load(Ordering::Relaxed);
        if switches != self.seen.wrapping_add(1) || at < self.total {
            return Err(Corrupt::BadSwitch);
        }
        self.next = Some(at);
        Ok(())
    }

    /// How many bytes the present segment still has; `None` while its end is not known.
    #[inline]
    pub const fn limit(&self) -> Option<u64> {
        match self.next {
            Some(at) => Some(at - self.total),
            None => None,
        }
    }

    /// `n` bytes have been received by the present way.
    ///
    /// More than [`Receiver::limit`] is the peer's lie: no honest sender puts bytes behind the end of a segment.
    #[inline]
    pub fn received(&mut self, n: u64) -> Result<(), Corrupt> {
        match self.next {
            Some(at) if n > at - self.total => Err(Corrupt::BadSwitch),
            _ => {
                self.total = self.total.wrapping_add(n);
                Ok(())
            }
        }
    }

    /// Goes on to the next segment if this one is used up, and tells the sender so. Returns whether it did.
    #[inline]
    pub fn pass(&mut self, own: &RxPath) -> bool {
        if self.next != Some(self.total) {
            return false;
        }
        self.next = None;
        self.seen = self.seen.wrapping_add(1);
        // EDGE seen: releases our reads of the segment; acquired in `Sender::ask`.
        own.seen.store(self.seen, Ordering::Release);
        true
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn both(total: u64) -> (Sender, TxPath, Receiver, RxPath) {
        (Sender::new(total), TxPath::new(), Receiver::new(total), RxPath::new())
    }

    #[test]
    fn reader_switches_at_the_published_bytes() {
        let (mut s, tx, mut r, rx) = both(5);
        s.sent(10);
        assert!(s.ask(&rx).unwrap().may_switch);
        assert!(!s.ask(&rx).unwrap().may_go_up(), "nobody watches the ring");
        rx.flags.store(path_flags::WATCHING, Ordering::Relaxed);
        assert!(s.ask(&rx).unwrap().may_go_up());
        s.switch(&tx);
        assert_eq!(s.way(), Way::Ring);
        assert!(!s.ask(&rx).unwrap().may_switch, "one switch at a time");
        r.refresh(&tx).unwrap();
        assert_eq!((r.way(), r.limit()), (Way::Tcp, Some(10)));
        r.received(4).unwrap();
        assert!(!r.pass(&rx));
        r.received(6).unwrap();
        assert!(r.pass(&rx));
        assert_eq!((r.way(), r.limit(), r.total()), (Way::Ring, None, 15));
        assert!(s.ask(&rx).unwrap().may_switch);
        s.switch(&tx);
        r.refresh(&tx).unwrap();
        assert_eq!(r.limit(), Some(0), "an empty segment");
        assert!(r.pass(&rx));
        assert_eq!((s.way(), r.way()), (Way::Tcp, Way::Tcp));
    }

    #[test]
    fn peer_that_wants_tcp_stays_on_tcp() {
        let (mut s, _, _, rx) = both(0);
        rx.flags.store(path_flags::WATCHING | path_flags::WANT_TCP, Ordering::Relaxed);
        let leave = s.ask(&rx).unwrap();
        assert!(leave.may_switch && leave.wants_tcp && !leave.may_go_up());
    }

    #[test]
    fn leaving_peer_is_followed_before_it_follows() {
        let (mut s, tx, _, rx) = both(5);
        rx.flags.store(path_flags::WATCHING, Ordering::Relaxed);
        s.ask(&rx).unwrap();
        s.switch(&tx);
        s.sent(7);
        rx.flags.store(path_flags::WANT_TCP | path_flags::LEFT, Ordering::Relaxed);
        assert!(s.ask(&rx).unwrap().has_left);
        assert_eq!(s.follow_out(&tx, &rx, 7), Ok(true), "it has not even seen the ring");
        assert_eq!((s.way(), tx.switches.load(Ordering::Relaxed)), (Way::Tcp, 2));
        assert!(s.ask(&rx).unwrap().has_left, "asked again and again, it says the same");
        assert_eq!(s.follow_out(&tx, &rx, 7), Ok(true), "nothing has gone by TCP since");
        s.sent(1);
        assert_eq!(s.follow_out(&tx, &rx, 7), Ok(false), "what is sent again would come too late");
        assert_eq!(s.follow_out(&tx, &rx, 0), Ok(true), "nothing is to be sent again");
        // The last that it did before it left was to go to the ring.
        let (mut s, tx, mut r, rx) = both(0);
        rx.flags.store(path_flags::WATCHING, Ordering::Relaxed);
        s.ask(&rx).unwrap();
        s.switch(&tx);
        r.refresh(&tx).unwrap();
        assert!(r.pass(&rx));
        rx.flags.store(path_flags::WANT_TCP | path_flags::LEFT, Ordering::Relaxed);
        assert_eq!(s.follow_out(&tx, &rx, 0), Ok(true));
        assert!(s.ask(&rx).is_ok());
        rx.seen.store(9, Ordering::Relaxed);
        assert_eq!(s.follow_out(&tx, &rx, 0), Err(Corrupt::BadSwitch), "a liar all the same");
    }

    #[test]
    fn impossible_switch_of_sender_is_corrupt() {
        for (switches, at) in [(2, 100), (u32::MAX, 100), (1, 99)] {
            let (_, tx, mut r, _) = both(100);
            tx.switched_at.store(at, Ordering::Relaxed);
            tx.switches.store(switches, Ordering::Relaxed);
            assert_eq!(r.refresh(&tx), Err(Corrupt::BadSwitch), "{switches} {at}");
        }
        let (mut s, tx, mut r, rx) = both(0);
        rx.flags.store(path_flags::WATCHING, Ordering::Relaxed);
        s.ask(&rx).unwrap();
        s.switch(&tx);
        r.refresh(&tx).unwrap();
        assert_eq!(r.received(1), Err(Corrupt::BadSwitch), "a byte behind the end of its segment");
    }

    #[test]
    fn impossible_switch_count_of_receiver_is_corrupt() {
        let (mut s, tx, _, rx) = both(0);
        rx.seen.store(1, Ordering::Relaxed);
        assert_eq!(s.ask(&rx), Err(Corrupt::BadSwitch), "ahead of the sender");
        rx.seen.store(0, Ordering::Relaxed);
        s.ask(&rx).unwrap();
        s.switch(&tx);
        rx.seen.store(1, Ordering::Relaxed);
        s.ask(&rx).unwrap();
        s.switch(&tx);
        rx.seen.store(0, Ordering::Relaxed);
        assert_eq!(s.ask(&rx), Err(Corrupt::BadSwitch), "it went back");
    }

    #[test]
    fn kept_state_that_no_side_has_is_not_resumed() {
        for (switches, seen, is_valid) in
            [(0, 0, true), (1, 0, true), (1, u32::MAX, true), (3, 0, false), (0, 1, false)]
        {
            assert_eq!(Sender::resume(7, switches, seen).is_some(), is_valid, "{switches} {seen}");
        }
        for (next, is_valid) in [(None, true), (Some(7), true), (Some(u64::MAX), true), (Some(6), false)] {
            assert_eq!(Receiver::resume(7, 3, next).is_some(), is_valid, "{next:?}");
        }
        let (sender, receiver) = (Sender::resume(7, 2, 1).unwrap(), Receiver::resume(7, 3, Some(9)).unwrap());
        assert_eq!((sender.total(), sender.switches(), sender.seen()), (7, 2, 1));
        assert_eq!((receiver.total(), receiver.seen(), receiver.next()), (7, 3, Some(9)));
    }

    #[test]
    fn counts_go_round() {
        let (mut s, tx, mut r, rx) = both(0);
        s = Sender { switches: u32::MAX, seen: u32::MAX, ..s };
        r = Receiver { seen: u32::MAX, ..r };
        rx.seen.store(u32::MAX, Ordering::Relaxed);
        assert!(s.ask(&rx).unwrap().may_switch);
        s.switch(&tx);
        assert_eq!(s.way(), Way::Tcp);
        r.refresh(&tx).unwrap();
        assert!(r.pass(&rx));
        assert_eq!(r.way(), Way::Tcp);
    }
}
