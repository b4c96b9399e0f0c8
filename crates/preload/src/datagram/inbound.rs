//! The receiving side of a socket: the rings of those who send to it, and the kernel's queue behind them (protocol U6-U8).

mod delivery;
mod ring;
mod sleep;
mod taking;

pub(super) use delivery::DatagramFound;

use super::asks::OfferAsks;
use super::closed_ring::ClosedRing;
use super::flow::FlowPlaces;
use crate::conn::heavy_fence;
use crate::log::log;
use crate::{broker, sys};
use libc::c_int;
use partywall_region::wait::this_core;
use partywall_shm::layout::path_flags;
use partywall_shm::sync::load_acquire_u32;
use ring::Inbound;
use std::net::SocketAddr;
use std::sync::atomic::Ordering;

/// Rings that one socket receives by, at most.
pub(super) const RINGS: usize = 64;
/// Naps of a receiver during which a sender stays in the middle of a datagram, before its ring is given up.
const UNFINISHED: u32 = 20;

/// Where a datagram lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DatagramSource {
    /// In the ring of this flow.
    Flow(u64),
    /// In the kernel's queue.
    Kernel,
}

/// The state that the lock of the receiving side guards.
#[derive(Debug)]
pub(super) struct DatagramRx {
    rings: [Inbound; RINGS],
    /// How many of them are in use, all at the beginning.
    count: usize,
    /// Where the next look begins.
    next: usize,
    turns: u32,
    /// Where the datagram lies that the program was shown last (`MSG_PEEK`, `FIONREAD`) and has not received. The next receiving call takes
    /// it, as it would from the kernel's single queue.
    shown: Option<DatagramSource>,
    /// `WATCHING` is set in all of them.
    open: bool,
    /// Bytes could still come by a ring, or be proved, at the last look before a sleep.
    was_unsettled: bool,
    /// What the broker was asked for.
    asks: OfferAsks,
    /// The socket's network namespace, which never changes, once it was needed: a look at the directory is no system call.
    netns: Option<u64>,
}

impl DatagramRx {
    pub(super) const fn new() -> Self {
        Self {
            rings: [const { Inbound::NONE }; RINGS],
            count: 0,
            next: 0,
            turns: 0,
            shown: None,
            open: false,
            was_unsettled: false,
            asks: OfferAsks::NONE,
            netns: None,
        }
    }

    fn in_use(&mut self) -> &mut [Inbound] {
        &mut self.rings[..self.count]
    }

    /// How many rings there are.
    pub(super) fn count(&self) -> u32 {
        self.count as u32
    }

    /// The counts of senders up to which the kernel's queue was read.
    #[cfg(test)]
    pub(super) fn seen(&mut self) -> Vec<u32> {
        let pages = self.in_use().iter().filter_map(|ring| ring.flow.and_then(FlowPlaces::pages));
        pages.map(|(own, _)| own.rx_path.seen.load(Ordering::Relaxed)).collect()
    }

    /// As if all its rings were of senders on another machine.
    #[cfg(test)]
    pub(super) fn pretend_between_machines(&mut self) {
        self.in_use().iter().filter_map(|ring| ring.flow).for_each(FlowPlaces::pretend_between_machines);
    }

    /// Whether a ring is of a sender on another machine.
    pub(super) fn is_between_machines(&mut self) -> bool {
        self.in_use().iter().any(|ring| !ring.is_of_this_kernel())
    }

    pub(super) fn is_waiting(&mut self) -> bool {
        self.in_use().iter_mut().any(|ring| ring.waiting() > 0)
    }

    /// Whether anything lies in a ring, proved or not.
    pub(super) fn has_bytes(&mut self) -> bool {
        self.in_use().iter_mut().any(|ring| ring.unproved() > 0)
    }

    /// If something lies in a ring, a number that changes with every datagram that comes.
    pub(super) fn mark(&mut self) -> Option<u64> {
        let mut waiting = 0;
        let mut mark = 0u64;
        for ring in self.in_use() {
            // Without this, a datagram behind an unread one is not seen.
            ring.refresh();
            let n = ring.waiting();
            waiting += n;
            // Bytes that are not proved yet count when they are, and bytes that are read still count.
            let end = ring.half.head() + n;
            mark = mark.wrapping_add(end.wrapping_mul(2 * ring.channel + 1)).wrapping_add(ring.channel);
        }
        (waiting > 0).then_some(mark)
    }

    /// Whether every peer was, when it last said so, on the core that this thread is on.
    pub(super) fn shares_core(&mut self) -> bool {
        let core = this_core();
        core != 0
            && self.in_use().iter().filter_map(|ring| ring.flow).all(|flow| !flow.is_between_machines())
            && self.in_use().iter().filter_map(|ring| ring.flow.and_then(FlowPlaces::pages)).all(|(own, peer)| {
                if own.control.rx.control.cpu.load(Ordering::Relaxed) != core {
                    own.control.rx.control.cpu.store(core, Ordering::Relaxed);
                }
                peer.control.tx.control.cpu.load(Ordering::Relaxed) == core
            })
    }

    /// Lets those who have a ring use it, or not.
    pub(super) fn open(&mut self, open: bool) {
        self.open = open;
        for ring in self.in_use() {
            if let Some((own, _)) = ring.flow.and_then(FlowPlaces::pages) {
                let flags = if open && ring.closed.is_none() { path_flags::WATCHING } else { 0 };
                // EDGE ring-open: releases that the kernel's queue was read up to here; acquired in `DatagramSocket::send_by_ring`.
                own.rx_path.flags.store(flags, Ordering::Release);
            }
        }
    }

    /// Closes all of them permanently.
    pub(super) fn close(&mut self) {
        let closed = ClosedRing::new(sys::coarse_millis());
        self.in_use().iter_mut().filter(|ring| ring.closed.is_none()).for_each(|ring| ring.closed = Some(closed));
        self.open(false);
        // A sender that saw `WATCHING` is seen to write from here on, or has written (protocol U6.1).
        heavy_fence();
    }

    pub(super) fn is_open(&self) -> bool {
        self.open
    }

    /// Gives up a ring; what is in it is lost, as what lies in the queue of a socket that is closed.
    fn remove(&mut self, at: usize) {
        let mut ring = std::mem::replace(&mut self.rings[at], Inbound::NONE);
        self.count -= 1;
        self.rings.swap(at, self.count);
        if self.shown == Some(DatagramSource::Flow(ring.channel)) {
            self.shown = None;
        }
        let Some(flow) = ring.flow else { return };
        if let Some((own, _)) = flow.pages() {
            own.rx_path.flags.store(0, Ordering::Relaxed);
            ring.half.close(&own.control.rx);
        }
        flow.free();
        broker::closed(ring.channel);
    }

    pub(super) fn remove_all(&mut self) {
        while self.count > 0 {
            self.remove(self.count - 1);
        }
        self.shown = None;
        // The next socket in this place has asked for nothing.
        self.asks = OfferAsks::NONE;
        self.netns = None;
    }

    /// In a child: they are its parent's.
    pub(super) fn forget(&mut self) {
        self.rings = [const { Inbound::NONE }; RINGS];
        self.count = 0;
        self.shown = None;
        // The thread that awaits an answer is not in the child.
        self.asks = OfferAsks::NONE;
    }

    /// Whether the directory shows an offer from there to this socket.
    pub(super) fn shows_offer(&mut self, fd: c_int, port: u16, from: SocketAddr) -> bool {
        broker::knows_datagram_offer((fd, &mut self.netns), port, from)
    }

    /// How many datagrams each sender says to have sent by the kernel.
    fn sent(&mut self) -> [u32; RINGS] {
        let mut sent = [0; RINGS];
        for (sent, ring) in sent.iter_mut().zip(self.in_use()) {
            *sent =
                // EDGE sent-by-kernel: acquires from `DatagramSocket::send_to`.
                ring.flow.and_then(FlowPlaces::pages).map_or(0, |(_, peer)| load_acquire_u32(&peer.tx_path.switches));
        }
        sent
    }

    /// The kernel's queue was found empty after these had been sent by it.
    fn has_seen(&mut self, sent: &[u32; RINGS]) {
        for (sent, ring) in sent.iter().zip(self.in_use()) {
            if let Some((own, _)) = ring.flow.and_then(FlowPlaces::pages)
                && own.rx_path.seen.load(Ordering::Relaxed) != *sent
                && (ring.is_of_this_kernel() || ring.arrivals.are_complete(*sent, sys::now()))
            {
                // EDGE received: the kernel's queue was read up to these before this is seen; acquired in `DatagramSocket::send_by_ring`.
                own.rx_path.seen.store(*sent, Ordering::Release);
            }
        }
    }

    /// Whether something may come by a ring during a sleep for which all are closed. A sender that never finishes loses its ring.
    pub(super) fn is_unsettled(&mut self) -> bool {
        let mut unsettled = self.was_unsettled && self.count > 0;
        for at in (0..self.count).rev() {
            unsettled |= self.rings[at].is_unsettled();
            if self.rings[at].unfinished > UNFINISHED {
                log!("a sender of datagrams does not finish what it has begun");
                self.remove(at);
            }
        }
        unsettled
    }

    /// Gives up the rings that are not used any more, once they are read: their senders have finished or have gone, or they are closed.
    pub(super) fn sweep(&mut self) {
        for at in (0..self.count).rev() {
            let ring = &mut self.rings[at];
            let Some((_, peer)) = ring.flow.and_then(FlowPlaces::pages) else { continue };
            if ring.closed.is_none() && ring.half.judge(Some(&peer.control.tx), false).is_some() {
                ring.closed = Some(ClosedRing::new(sys::coarse_millis()));
            }
            if (ring.closed.is_some() || ring.has_ended()) && ring.is_read() {
                self.remove(at);
            }
        }
    }
}
