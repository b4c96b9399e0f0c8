//! Taking the ring that a sender offers (protocol U3).

use super::RINGS;
use super::ring::Inbound;
use crate::datagram::arrivals::KernelArrivals;
use crate::datagram::flow::FlowPlaces;
use crate::datagram::{DatagramSocket, flags};
use crate::log::log;
use crate::{broker, sys};
use libc::c_int;
use partywall_shm::half::ReadingHalf;
use partywall_shm::status::Reason;
use rustix::fd::{AsFd, BorrowedFd};
use std::net::SocketAddr;
use std::sync::atomic::Ordering;

/// Larger rings of a peer than this are not mapped.
const MAX_PEER_RING: u64 = 64 << 20;

impl DatagramSocket {
    /// Looks for an offer of the sender of a datagram that the kernel has delivered just now.
    #[cold]
    pub(in crate::datagram) fn look_for_offer(&self, fd: c_int, from: SocketAddr) {
        let (generation, closings, is_full) = {
            let Some(mut rx) = self.rx.hold() else { return };
            let closings = self.closings();
            let generation = broker::offer_generation();
            let known = rx.in_use().iter().any(|ring| ring.is_from(from) && ring.closed.is_none() && !ring.has_ended());
            if known || rx.asks.are_held(generation) || !rx.shows_offer(fd, self.port(fd), from) {
                return;
            }
            rx.sweep();
            // What lies in this sender's last ring is read before it gets another.
            if rx.in_use().iter().any(|ring| ring.is_from(from)) || !rx.asks.begin(generation, sys::coarse_millis()) {
                return;
            }
            (generation, closings, rx.count == RINGS)
        };
        let answer = if is_full { Err(Reason::Resources) } else { self.take_offer(fd, from, closings) };
        if let Some(mut rx) = self.rx.hold() {
            rx.asks.end(generation, answer, sys::coarse_millis());
        }
    }

    /// Takes an offer of this sender, unless another thread has closed the rings since `closings` were counted, as `connect` does.
    pub(in crate::datagram) fn take_offer(&self, fd: c_int, from: SocketAddr, closings: u32) -> Result<(), Reason> {
        let Some(flow) = FlowPlaces::allocate() else { return Err(Reason::Resources) };
        let mut taken = None;
        let result = self.take(fd, flow, (from, closings), &mut taken);
        if let Err(reason) = result {
            log!("no ring for datagrams from {from}: {}", reason.words());
            // First: the broker may give our place in a window to another program from then on (protocol U14.12).
            flow.free();
            if let Some(number) = taken {
                broker::closed(number);
            }
        }
        result
    }

    /// `number` becomes that of the flow when the broker has made it, whether or not this process can use it.
    fn take(
        &self,
        fd: c_int,
        flow: &'static FlowPlaces,
        (from, closings): (SocketAddr, u32),
        number: &mut Option<u64>,
    ) -> Result<(), Reason> {
        if crate::unseen::may_be() {
            return Err(Reason::RawCalls);
        }
        let (region, geometry) = flow.make_region(0)?;
        let move_to = |base: u64, window: BorrowedFd<'_>| {
            // Its kernel joins datagrams, so that they cannot be counted one by one.
            if self.has(flags::JOINS) { Err(Reason::Option) } else { flow.move_region(0, base, window) }
        };
        let taken = broker::take_datagrams(fd, from, (geometry, region.as_fd()), move_to)?;
        *number = Some(taken.number);
        let (place, memory) = taken.region?;
        let size = place.1.ring_size();
        match size {
            1..=MAX_PEER_RING => flow.attach_peer(place, &memory)?,
            _ => return Err(Reason::Corrupt),
        }
        let Some(mut rx) = self.rx.hold() else { return Err(Reason::Resources) };
        // Rings that are closed after this look are closed under the lock, and this one with them.
        if self.closings() != closings
            || rx.count == RINGS
            || !self.may_have_rings()
            || (flow.is_between_machines() && self.has(flags::JOINS))
        {
            return Err(Reason::Option);
        }
        let at = rx.count;
        rx.rings[at] = Inbound {
            flow: Some(flow),
            ip: partywall_shm::address::wide(from.ip()),
            port: from.port(),
            half: ReadingHalf::new(size, 0),
            channel: taken.number,
            closed: None,
            arrivals: KernelArrivals::NONE,
            unfinished: 0,
        };
        rx.count += 1;
        if flow.is_between_machines() {
            self.set(flags::ARRIVALS, true);
        }
        // EDGE inbound: as in `DatagramSocket::longest_sleep`. Before the look at the sleepers, in the order that
        // `DatagramSocket::on_kernel_alone` relies on.
        self.inbound.store(rx.count(), Ordering::SeqCst);
        // If a thread of this socket sleeps, the ring stays closed until it has woken (protocol U6.3).
        rx.open(!self.sleepers.are_any());
        log!("fd {fd} receives from {from} by a ring of {size} bytes");
        Ok(())
    }
}
