//! The way of a destination to a ring: an offer, its answer, and the receiver's region (protocol U3).

use super::destination::{FlowStage, Outbound};
use crate::datagram::flow::FlowPlaces;
use crate::datagram::retry::OfferRetry;
use crate::datagram::{DatagramSocket, flags};
use crate::log::log;
use crate::{broker, sys};
use libc::c_int;
use partywall_protocol::directory::Proof;
use partywall_shm::half::WritingHalf;
use partywall_shm::status::Reason;
use rustix::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering;

/// Looks for the answer to an offer on each call, so often; after that on every sixteenth.
const EAGER: u32 = 64;
/// The shortest ring: that of the longest datagram, and room for others.
const LEAST: u64 = 128 << 10;

impl DatagramSocket {
    /// The next step towards a ring, if it is time for it.
    pub(super) fn advance(&self, fd: c_int, one: &mut Outbound) {
        match one.stage {
            FlowStage::Counting => {
                if !self.is_due(fd, one.calls, one.bytes, one.to()) {
                    return;
                }
                let generation = broker::listener_generation();
                let is_time_again = one.retry.is_due(sys::coarse_millis());
                if generation == one.asked && !is_time_again {
                    return;
                }
                one.asked = generation;
                if broker::knows_receiver(fd, one.to()) {
                    one.retry.begin();
                    self.offer(fd, one);
                } else if is_time_again {
                    one.retry.put_off(sys::coarse_millis());
                }
            }
            FlowStage::Offered => {
                one.looks = one.looks.wrapping_add(1);
                if one.looks < EAGER || one.looks.is_multiple_of(16) {
                    self.look_for_answer(one);
                }
            }
            FlowStage::Attached => {}
        }
    }

    #[cold]
    pub(super) fn offer(&self, fd: c_int, one: &mut Outbound) {
        let errno = sys::errno_number();
        if let Some(flow) = FlowPlaces::allocate() {
            match self.offer_by(fd, one, flow) {
                Ok(()) => {
                    one.flow = Some(flow);
                    one.stage = FlowStage::Offered;
                    self.set(flags::RING_OUT, true);
                    one.looks = 0;
                    one.offered = sys::coarse_now();
                }
                Err(reason) => {
                    log!("no ring for datagrams to {}: {}", one.to(), reason.words());
                    flow.free();
                    if matches!(reason, Reason::NoWindow | Reason::Resources | Reason::BrokerAbsent) {
                        one.retry.put_off(sys::coarse_millis());
                    }
                }
            }
        }
        sys::restore_errno(errno);
    }

    pub(super) fn offer_by(&self, fd: c_int, one: &mut Outbound, flow: &'static FlowPlaces) -> Result<(), Reason> {
        let size = self.ring_size(one.to()).max(LEAST);
        let (region, geometry) = flow.make_region(size)?;
        let move_to = |base: u64, window: BorrowedFd<'_>| flow.move_region(size, base, window);
        one.channel = broker::offer_datagrams(fd, one.to(), (geometry, region.as_fd()), move_to)?;
        one.half = WritingHalf::new(size);
        Ok(())
    }

    /// Whether a receiver has taken the flow that was offered.
    pub(super) fn look_for_answer(&self, one: &mut Outbound) {
        if one.look_for_end() == Proof::Good && one.busy.is_over(sys::coarse_millis()) {
            self.attach(one);
        }
    }

    #[cold]
    pub(super) fn attach(&self, one: &mut Outbound) {
        let errno = sys::errno_number();
        let fetched = one.flow.ok_or(Reason::Refused).and_then(|flow| {
            let (place, region) = broker::fetch_receiver(one.channel)?;
            if place.1.ring_size() == 0 { flow.attach_peer(place, &region) } else { Err(Reason::Corrupt) }
        });
        sys::restore_errno(errno);
        if fetched == Err(Reason::BrokerAbsent) {
            // The flow stands, and the receiver makes no other. The broker gives the receiver's region out once. A session that was busy has
            // not asked for it, and one that has ended after it did is refused the next time, which gives the flow up.
            one.busy.begin(sys::coarse_millis());
            return;
        }
        let Some((own, _)) = one.flow.and_then(FlowPlaces::pages).filter(|_| fetched.is_ok()) else {
            one.give_up();
            // A receiver is there, so the next offer does not wait for one to come. The pauses double until a flow is attached, so that a
            // receiver whose region is never valid costs little.
            one.retry.put_off(sys::coarse_millis());
            return;
        };
        one.stage = FlowStage::Attached;
        one.retry = OfferRetry::NONE;
        self.set(flags::RING_OUT, true);
        // The datagrams that have gone by the kernel so far count as one.
        one.by_kernel = 1;
        // EDGE sent-by-kernel: as in `DatagramSocket::send_to`.
        own.tx_path.switches.store(1, Ordering::Release);
        log!("datagrams to {} go by a ring", one.to());
    }
}
