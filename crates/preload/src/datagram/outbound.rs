//! The sending side of a socket: to where it sends, and by which ring (protocol U3, U5-U8, U10).

mod destination;
mod offers;
mod ring;
mod taken_back;
#[cfg(test)]
mod tests;

use super::flow::proof_for_sender;
use super::{DatagramCarrier, DatagramSocket, flags};
use crate::buffers::CallerBuffers;
use crate::sys;
use destination::{FlowStage, Outbound};
use libc::{c_int, ssize_t};
use partywall_protocol::directory::Proof;
use partywall_shm::address::wide;
use std::net::SocketAddr;
use std::sync::atomic::Ordering;

/// Destinations that a socket remembers. Of more, those that it sends to least stay on the kernel.
const DESTINATIONS: usize = 16;

/// The state that the lock of the sending side guards.
#[derive(Debug)]
pub(super) struct DatagramTx {
    to: [Outbound; DESTINATIONS],
    last: usize,
}

impl DatagramTx {
    pub(super) const fn new() -> Self {
        Self { to: [const { Outbound::NONE }; DESTINATIONS], last: 0 }
    }

    /// The place of a destination.
    #[inline]
    fn find(&mut self, to: SocketAddr) -> Option<usize> {
        let (ip, port) = (wide(to.ip()), to.port());
        let is = |one: &Outbound| one.is_to(to);
        if is(&self.to[self.last]) {
            return Some(self.last);
        }
        let at = self.to.iter().position(is).or_else(|| {
            let idle = self.to.iter().enumerate().filter(|(_, one)| one.stage == FlowStage::Counting);
            let (at, _) = idle.min_by_key(|(_, one)| one.calls)?;
            self.to[at] = Outbound { ip, port, ..Outbound::NONE };
            Some(at)
        })?;
        self.last = at;
        Some(at)
    }

    /// Gives up all rings. Unread datagrams in them can still be read.
    pub(super) fn give_up(&mut self) {
        for one in &mut self.to {
            one.give_up();
        }
    }

    /// In a child: they are its parent's.
    pub(super) fn forget(&mut self) {
        *self = Self::new();
    }
}

/// What the rings that a socket sends by demand of a receiving call that sleeps: how often it has to look after them
/// ([`DatagramSocket::look_after_receivers`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum RingsOut {
    /// Nothing.
    None,
    /// A ring is offered or attached. Another thread may write a datagram to it during the sleep. Should the flow end, that datagram goes by
    /// the kernel, and a ring to another machine has to be unmapped.
    Begun,
    /// A datagram lies unread in a ring. Should the flow end, it goes by the kernel.
    Unread,
}

/// The fate of a datagram.
enum Sent {
    /// It is in a ring, or was dropped as the kernel would have.
    Done(usize),
    /// The kernel is to have it.
    Kernel,
}

impl DatagramSocket {
    /// Sends a datagram. `kernel` is the call as the program made it.
    pub(super) fn send_to(
        &'static self,
        fd: c_int,
        to: SocketAddr,
        carrier: DatagramCarrier,
        buffers: CallerBuffers<'_>,
        kernel: impl FnOnce() -> ssize_t,
    ) -> ssize_t {
        let Some(mut tx) = self.tx.hold() else { return kernel() };
        let Some(at) = tx.find(to) else { return kernel() };
        let one = &mut tx.to[at];
        let len = buffers.len();
        let sent = match (one.stage, carrier) {
            (FlowStage::Attached, DatagramCarrier::Any(segment)) => self.send_by_ring(fd, one, buffers, (len, segment)),
            (_, DatagramCarrier::Kernel) => Sent::Kernel,
            _ => {
                one.calls += 1;
                one.bytes += len as u64;
                self.advance(fd, one);
                Sent::Kernel
            }
        };
        match sent {
            Sent::Done(n) => ssize_t::try_from(n).unwrap_or(ssize_t::MAX),
            Sent::Kernel => {
                drop(tx);
                let result = kernel();
                // A ring is offered before it is attached, which another thread may do during the kernel's call.
                if self.has(flags::RING_OUT) {
                    let errno = sys::errno_number();
                    self.count_sent(at, to, carrier, len, result);
                    sys::restore_errno(errno);
                }
                result
            }
        }
    }

    /// The kernel has had the datagrams of one call: they are in the receiver's queue, or lost. If there is a ring by now, datagrams that follow
    /// by it must not overtake them (protocol U7.2).
    fn count_sent(&self, at: usize, to: SocketAddr, carrier: DatagramCarrier, len: usize, result: ssize_t) {
        let Some(mut tx) = self.tx.hold() else { return };
        let one = &mut tx.to[at];
        // Another thread may have given the place to another destination.
        if one.stage != FlowStage::Attached || !one.is_to(to) {
            return;
        }
        let segment = match carrier {
            DatagramCarrier::Any(segment) => {
                if result >= 0 {
                    one.segments.note(segment, len);
                }
                segment
            }
            DatagramCarrier::Kernel => self.segment.load(Ordering::Relaxed) as u16,
        };
        one.count_by_kernel(if result < 0 { 1 } else { datagrams_of(len, segment) });
    }

    /// Before sleeping: whether flows have ended, in which something of ours may lie unread, or which the program may never use again.
    pub(super) fn look_after_receivers(&self, fd: c_int) {
        let Some(mut tx) = self.tx.hold() else { return };
        for one in tx.to.iter_mut().filter(|one| one.stage != FlowStage::Counting) {
            if one.stage == FlowStage::Offered {
                one.look_for_end();
                continue;
            }
            match proof_for_sender(one.channel) {
                Proof::Ended { limit } => self.take_back(fd, one, limit),
                Proof::Unknown => one.give_up(),
                Proof::Good | Proof::Stale => {}
            }
        }
    }

    /// What the rings that it sends by demand of a receiving call that sleeps.
    pub(super) fn rings_out(&self) -> RingsOut {
        // The lock is held while the broker is asked. A socket without such rings does not wait for that when it receives.
        if !self.has(flags::RING_OUT) {
            return RingsOut::None;
        }
        let Some(mut tx) = self.tx.hold() else { return RingsOut::None };
        let mut begun = tx.to.iter_mut().filter(|one| one.stage != FlowStage::Counting).peekable();
        // Under the lock under which it is set.
        self.set(flags::RING_OUT, begun.peek().is_some());
        begun.map(Outbound::demand).max().unwrap_or(RingsOut::None)
    }

    /// Datagrams that went to the kernel at once, counted for their destination.
    pub(super) fn sent_many(&self, fd: c_int, to: SocketAddr, count: u32) {
        let Some(mut tx) = self.tx.hold() else { return };
        let Some(at) = tx.find(to) else { return };
        let one = &mut tx.to[at];
        if one.stage == FlowStage::Attached {
            // Another thread has attached the ring during the kernel's call.
            one.count_by_kernel(count);
        }
        one.calls += u64::from(count);
        self.advance(fd, one);
    }

    /// Whether a list of messages may hold some that could go by a ring.
    pub(super) fn has_ring_out(&self) -> bool {
        self.tx.hold().is_some_and(|tx| tx.to.iter().any(|one| one.stage == FlowStage::Attached))
    }
}

/// How many datagrams the kernel makes of a call of `len` bytes. A receiver on another machine counts them one by one.
fn datagrams_of(len: usize, segment: u16) -> u32 {
    let count = if segment == 0 { 1 } else { len.div_ceil(segment.into()).max(1) };
    u32::try_from(count).unwrap_or(u32::MAX)
}
