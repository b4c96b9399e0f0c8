//! One destination of a socket, and how far the way to a ring has come.

use super::RingsOut;
use crate::datagram::asks::BusyPause;
use crate::datagram::flow::{FlowPlaces, proof_for_sender};
use crate::datagram::retry::OfferRetry;
use crate::datagram::segments::SentSegments;
use crate::{broker, sys};
use partywall_protocol::directory::Proof;
use partywall_shm::half::WritingHalf;
use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// The time after which an offer that was not taken has ended (protocol U3.3), and the next may be made.
const OFFER_LIFE: Duration = Duration::from_secs(31);

/// How far the way to a ring has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum FlowStage {
    /// Counting.
    Counting,
    /// Offered.
    Offered,
    /// There is one.
    Attached,
}

#[derive(Debug)]
pub(super) struct Outbound {
    pub(super) ip: u128,
    pub(super) port: u16,
    pub(super) stage: FlowStage,
    pub(super) calls: u64,
    pub(super) bytes: u64,
    /// The number of listeners when one was looked for and not found.
    pub(super) asked: u64,
    pub(super) retry: OfferRetry,
    pub(super) busy: BusyPause,
    pub(super) flow: Option<&'static FlowPlaces>,
    pub(super) channel: u64,
    pub(super) half: WritingHalf,
    /// Datagrams that went by the kernel; modulo 2^32.
    pub(super) by_kernel: u32,
    pub(super) looks: u32,
    pub(super) unread: u32,
    /// When it was offered.
    pub(super) offered: Duration,
    /// The segments that the kernel has sent there.
    pub(super) segments: SentSegments,
}

impl Outbound {
    pub(super) const NONE: Self = Self {
        ip: 0,
        port: 0,
        stage: FlowStage::Counting,
        calls: 0,
        bytes: 0,
        asked: 0,
        retry: OfferRetry::NONE,
        busy: BusyPause::NONE,
        flow: None,
        channel: 0,
        half: WritingHalf::new(0),
        by_kernel: 0,
        looks: 0,
        unread: 0,
        offered: Duration::ZERO,
        segments: SentSegments::NONE,
    };

    pub(super) fn to(&self) -> SocketAddr {
        SocketAddr::new(partywall_shm::address::narrow(self.ip), self.port)
    }

    pub(super) fn is_to(&self, to: SocketAddr) -> bool {
        self.port == to.port() && self.ip == partywall_shm::address::wide(to.ip())
    }

    /// What an offered or attached ring demands of a receiving call that sleeps.
    pub(super) fn demand(&mut self) -> RingsOut {
        match self.flow.and_then(FlowPlaces::pages) {
            Some((_, peer)) if self.half.refresh(&peer.control.rx).is_ok() && !self.half.is_drained() => {
                RingsOut::Unread
            }
            _ => RingsOut::Begun,
        }
    }

    /// Counts datagrams that have gone by the kernel, for the receiver (protocol U5.2).
    pub(super) fn count_by_kernel(&mut self, count: u32) {
        let Some((own, _)) = self.flow.and_then(FlowPlaces::pages) else { return };
        self.by_kernel = self.by_kernel.wrapping_add(count);
        // EDGE sent-by-kernel: the datagrams are in the receiver's queue before this is seen; acquired in `DatagramRx::sent`.
        own.tx_path.switches.store(self.by_kernel, Ordering::Release);
    }

    /// Gives up a flow that is offered, if it has ended, or was not taken in time. Returns what the broker says of it.
    pub(super) fn look_for_end(&mut self) -> Proof {
        let proof = proof_for_sender(self.channel);
        match proof {
            Proof::Good | Proof::Stale => {}
            Proof::Ended { .. } => self.give_up(),
            Proof::Unknown => {
                if sys::coarse_now().saturating_sub(self.offered) >= OFFER_LIFE {
                    self.give_up();
                }
            }
        }
        proof
    }

    /// Back to the kernel, and to counting.
    pub(super) fn give_up(&mut self) {
        let channel = std::mem::take(&mut self.channel);
        let is_attached = self.stage == FlowStage::Attached;
        if is_attached {
            // The flow may have ended because a machine was late, and its receiver is still there (protocol U14.17).
            self.retry.put_off(sys::coarse_millis());
        }
        if let Some(flow) = self.flow.take() {
            if let (true, Some((own, _))) = (is_attached, flow.pages()) {
                self.half.finish(&own.control.tx);
            }
            // First: the broker may give our place in a window to another program from then on (protocol U14.12).
            flow.free();
            if is_attached {
                broker::closed(channel);
            } else {
                broker::cancel(channel);
            }
        }
        self.stage = FlowStage::Counting;
        // Not before as many again.
        (self.calls, self.bytes) = (0, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn destination_of_ended_flow_is_offered_a_ring_again() {
        let mut one = Outbound { stage: FlowStage::Attached, ..Outbound::NONE };
        one.give_up();
        assert!(!one.retry.is_due(sys::coarse_millis()) && one.retry.is_due(sys::coarse_millis() + 1000));
        let mut one = Outbound { stage: FlowStage::Offered, ..Outbound::NONE };
        one.give_up();
        assert!(!one.retry.is_due(u64::MAX), "an offer that nobody took waits for a change of the directory");
    }
}
