//! What of a connection is ready, by a look at memory alone.

use super::kernel_facts::SEND_ENDS;
use super::{Conn, Pages, accounts, flags};
use crate::sys;
use partywall_shm::path::Way;
use partywall_shm::sync::load_acquire_u32;
use std::sync::atomic::Ordering;

/// The result of a look without the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RingReadiness {
    /// Not ready, as far as the ring goes; the kernel's socket tells by an event if that changes.
    No,
    /// Ready.
    Yes,
    /// The way is TCP, or the end may have come over it: what `poll` says of the descriptor decides.
    AskKernel,
}

/// The free space from which on a ring of this size is writable.
#[inline]
pub(super) const fn enough(size: u64) -> u64 {
    size / 4
}

/// A look at a connection without the kernel, and without any lock.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RingLook<'a>(pub(super) &'a Conn);

impl RingLook<'_> {
    /// Whether something can be read, or the end has come; a look without the kernel, and without any lock.
    pub(crate) fn readable(&self) -> RingReadiness {
        if !self.0.is_up() {
            return RingReadiness::AskKernel;
        }
        let Some(pages) = self.0.pages() else { return RingReadiness::AskKernel };
        let Pages { own, peer, .. } = pages;
        let always = flags::READ_SHUT | flags::BROKEN | flags::RESET;
        if self.0.has(always | flags::LEFT) {
            return if self.0.has(always) { RingReadiness::Yes } else { RingReadiness::AskKernel };
        }
        let seen = own.rx_path.seen.load(Ordering::Relaxed);
        // EDGE path: as in `Receiver::refresh`.
        let switches = load_acquire_u32(&peer.tx_path.switches);
        let waiting = pages.takeable();
        let low_water = u64::from(self.0.kernel.low_water.load(Ordering::Relaxed));
        match Way::after(seen) {
            Way::Ring => {
                if waiting > 0 && (waiting >= low_water || switches != seen && self.are_enough(waiting, low_water)) {
                    return RingReadiness::Yes;
                }
                let ended = pages.has_said_end() || self.0.has(flags::PEER_GONE);
                let asked = self.0.kernel.said() != 0;
                if switches != seen || ended || asked { RingReadiness::AskKernel } else { RingReadiness::No }
            }
            // The switch up has been announced: what waits in the ring is next once TCP is read up to there. Bytes before it may
            // be under way still.
            Way::Tcp
                if switches != seen
                    && waiting > 0
                    && if low_water > 1 {
                        self.are_enough(waiting, low_water)
                    } else {
                        self.0.rx.counted.load(Ordering::Relaxed) == peer.tx_path.switched_at.load(Ordering::Relaxed)
                    } =>
            {
                RingReadiness::Yes
            }
            Way::Tcp => RingReadiness::AskKernel,
        }
    }

    /// Whether the bytes that wait in the ring and those in the kernel's queue are together what `SO_RCVLOWAT` asks for. At a switch,
    /// neither has to be enough alone.
    #[cold]
    fn are_enough(&self, waiting: u64, low_water: u64) -> bool {
        low_water > 1 && waiting + accounts::queued(sys::borrow(self.0.fd()), libc::FIONREAD).unwrap_or(0) >= low_water
    }

    /// Whether something can be written, or will fail at once; a look without the kernel, and without any lock.
    pub(crate) fn writable(&self) -> RingReadiness {
        if !self.0.is_up() {
            return RingReadiness::AskKernel;
        }
        let Some(pages) = self.0.pages() else { return RingReadiness::AskKernel };
        let Pages { own, local, .. } = pages;
        if self.0.has(flags::WRITE_SHUT | flags::BROKEN | flags::RESET) {
            return RingReadiness::Yes;
        }
        match Way::after(own.tx_path.switches.load(Ordering::Relaxed)) {
            Way::Tcp => RingReadiness::AskKernel,
            Way::Ring => {
                if !pages.writing().is_read() || self.0.has(flags::PEER_GONE) {
                    return RingReadiness::AskKernel;
                }
                let size = local.own.ring_size();
                if pages.writing().unread(size) <= size - enough(size) {
                    RingReadiness::Yes
                } else if self.0.kernel.said() & SEND_ENDS != 0 {
                    RingReadiness::AskKernel
                } else {
                    RingReadiness::No
                }
            }
        }
    }

    /// Bytes that wait in the ring to be read.
    pub(crate) fn unread(&self) -> u64 {
        if !self.0.is_up() || self.0.has(flags::LEFT) {
            return 0;
        }
        self.0.pages().map_or(0, |pages| pages.takeable())
    }

    /// Whether the peer has left our ring, and may miss something of it.
    pub(crate) fn owes(&self) -> bool {
        self.0.pages().is_some_and(|pages| pages.owes())
    }

    /// Bytes of ours that wait in the ring for the peer.
    pub(crate) fn unsent(&self) -> u64 {
        // What a peer has left in the ring is in the kernel's queue by then.
        if !self.0.is_up() || self.0.has(flags::SENT_AGAIN) {
            return 0;
        }
        self.0.pages().map_or(0, |pages| pages.unsent())
    }

    /// Whether either side has said that it sends or reads no more, or the peer has gone: then the kernel has news, now or soon.
    #[inline]
    pub(crate) fn is_ending(&self) -> bool {
        self.0.is_up()
            && (self.0.has(flags::PEER_GONE | flags::READ_SHUT | flags::WRITE_SHUT)
                || self.0.pages().is_some_and(|pages| pages.has_said_end()))
    }

    /// Whether the kernel may have an error to tell: it always may where bytes come from it.
    pub(crate) fn may_have_failed(&self) -> bool {
        !self.0.is_up() || self.is_ending() || self.readable() == RingReadiness::AskKernel
    }

    /// Moves when something new has come to be read.
    pub(crate) fn rx_mark(&self) -> u64 {
        self.0.pages().map_or(0, |pages| pages.visible_tail())
    }

    /// Changes when the peer's process had ended a connection before it sent what is in the ring (protocol T17).
    #[inline]
    pub(crate) fn ends(&self) -> u32 {
        self.0.pages().filter(|_| self.0.is_up()).map_or(0, |pages| pages.peer.tx_path.ends.load(Ordering::Relaxed))
    }

    /// Moves when a sending call was refused for want of room: that there is room again is news then.
    pub(crate) fn tx_mark(&self) -> u64 {
        u64::from(self.0.moves.refusals.load(Ordering::Relaxed))
    }
}
