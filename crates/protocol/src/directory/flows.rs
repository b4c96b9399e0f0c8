//! The proofs of datagram flows, in words that both ends of a flow load with each datagram (protocol U11).
//!
//! A flow is a ring between two sockets that had their addresses when it was made. A socket can be closed, and its port reused by another
//! user, while the programs still have the ring. So the broker watches the sockets, and publishes its observations here:
//!
//! ```text
//!   proved_at      when all flows were last found proved, in milliseconds of CLOCK_MONOTONIC_COARSE
//!
//!   slot  0 +--------+   live: the number of the flow that is proved; 0 if there is none
//!         8 +--------+   ended: the number of the flow that was in this slot last, once it has ended
//!        16 +--------+   limit: of that flow, the byte of the ring up to which it was proved
//!        24 +--------+   proved: when the flow itself was last found proved, likewise; 0: `proved_at` counts
//! ```
//!
//! A flow with an end in a virtual machine has a separate date, because one machine may be late with its answers when the others are not
//! (protocol U14). In the directory of a machine the dates are those of the machine's clock.

use super::Directory;
use partywall_shm::sync::{Access, Load, Ordering, Own, load_acquire};

/// Flows of a host at once. The slot of a flow is its number modulo this.
pub const FLOWS: usize = 1 << 12;

/// When all flows were last found proved.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct ProofLine<A: Access = Own> {
    proved_at: A::U64,
}

/// The published state of one flow.
#[derive(Debug)]
#[repr(C, align(32))]
pub struct FlowSlot<A: Access = Own> {
    live: A::U64,
    ended: A::U64,
    limit: A::U64,
    proved: A::U64,
}

/// The broker's statement about a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Proof {
    /// Both of its sockets have their addresses.
    Good,
    /// The flow has no end on record, but the broker has not looked for too long.
    Stale,
    /// One of its sockets has lost its address. The bytes of the ring below `limit` were written while both sockets had theirs.
    Ended {
        /// The byte of the ring. If the receiver's socket is the one that went, 0: the sender owns what was not read.
        limit: u64,
    },
    /// The broker does not know the flow: it is another broker, or has not made it yet.
    Unknown,
}

impl<A: Access> Directory<A> {
    /// Whether a flow is proved now. `now` is in milliseconds of `CLOCK_MONOTONIC_COARSE`; a proof older than `lease` milliseconds is
    /// stale.
    #[inline]
    pub fn proof(&self, flow: u64, now: u64, lease: u64) -> Proof {
        let Some(slot) = self.flows.get(slot_of(flow)) else { return Proof::Unknown };
        if load_acquire(&slot.live) != flow {
            return slot.end_of(flow);
        }
        let proved_at = match slot.proved.load(Ordering::Relaxed) {
            0 => self.proof_line.proved_at.load(Ordering::Relaxed),
            own => own,
        };
        // A proof of the future was dated by another clock (a time namespace), and says nothing.
        let age = now.wrapping_sub(proved_at).cast_signed();
        let lease = lease.cast_signed();
        if (-lease..=lease).contains(&age) { Proof::Good } else { Proof::Stale }
    }
}

impl<A: Access> FlowSlot<A> {
    #[cold]
    fn end_of(&self, flow: u64) -> Proof {
        if load_acquire(&self.ended) != flow {
            return Proof::Unknown;
        }
        let limit = load_acquire(&self.limit);
        // The slot may have been given to another flow between the two loads; then the limit is that one's.
        if load_acquire(&self.ended) == flow { Proof::Ended { limit } } else { Proof::Unknown }
    }
}

/// The slot of a flow.
pub fn slot_of(flow: u64) -> usize {
    (flow % FLOWS as u64) as usize
}

/// The date of a flow that was never proved: as far in the past, or in the future, as a date can be.
const NEVER: u64 = 1 << 62;

/// A flow is live from here on: proved like all flows, or `separately`, and not proved yet. The broker alone writes, one thread of it.
pub(super) fn begin(directory: &Directory, flow: u64, separately: bool) {
    let Some(slot) = directory.flows.get(slot_of(flow)) else { return };
    // Before its number: a reader that finds that finds this.
    slot.proved.store(if separately { NEVER } else { 0 }, Ordering::Release);
    // In this order: a reader that finds the number of a flow in `ended` finds its limit, or none of the two.
    slot.ended.store(0, Ordering::Release);
    slot.live.store(flow, Ordering::Release);
}

/// A flow was proved up to a byte of its ring, and is no more.
pub(super) fn end(directory: &Directory, flow: u64, limit: u64) {
    let Some(slot) = directory.flows.get(slot_of(flow)) else { return };
    slot.limit.store(limit, Ordering::Release);
    slot.ended.store(flow, Ordering::Release);
    slot.live.store(0, Ordering::Release);
}

/// A flow that is proved separately was found proved then.
pub(super) fn prove_one(directory: &Directory, flow: u64, now: u64) {
    let Some(slot) = directory.flows.get(slot_of(flow)) else { return };
    if slot.live.load(Ordering::Relaxed) == flow {
        slot.proved.store(now, Ordering::Release);
    }
}

/// All flows that have not ended, and are not proved separately, were found proved then.
pub(super) fn prove(directory: &Directory, now: u64) {
    directory.proof_line.proved_at.store(now, Ordering::Release);
}

#[cfg(test)]
mod tests {
    use super::super::tests::directory;
    use super::*;

    const LEASE: u64 = 500;

    #[test]
    fn flow_is_good_while_its_proof_is_fresh() {
        let directory = directory();
        assert_eq!(directory.proof(7, 1000, LEASE), Proof::Unknown);
        begin(&directory, 7, false);
        prove(&directory, 1000);
        assert_eq!(directory.proof(7, 1400, LEASE), Proof::Good);
        assert_eq!(directory.proof(7, 1501, LEASE), Proof::Stale);
        assert_eq!(directory.proof(7, 499, LEASE), Proof::Stale, "dated by another clock");
        prove(&directory, 1500);
        assert_eq!(directory.proof(7, 1501, LEASE), Proof::Good);
    }

    #[test]
    fn ended_flow_keeps_its_limit_until_its_slot_is_used_again() {
        let directory = directory();
        begin(&directory, 7, false);
        prove(&directory, 1000);
        end(&directory, 7, 4096);
        assert_eq!(directory.proof(7, 1000, LEASE), Proof::Ended { limit: 4096 });
        let next = 7 + FLOWS as u64;
        assert_eq!(directory.proof(next, 1000, LEASE), Proof::Unknown);
        begin(&directory, next, false);
        assert_eq!(directory.proof(next, 1000, LEASE), Proof::Good);
        assert_eq!(directory.proof(7, 1000, LEASE), Proof::Unknown);
    }

    #[test]
    fn flow_that_is_proved_separately_has_its_own_date() {
        let directory = directory();
        begin(&directory, 7, true);
        begin(&directory, 8, false);
        for now in [0, 1000, u64::MAX / 2, u64::MAX] {
            prove(&directory, now);
            assert_eq!(directory.proof(7, now, LEASE), Proof::Stale, "the others' date is not its date");
            assert_eq!(directory.proof(8, now, LEASE), Proof::Good);
        }
        prove_one(&directory, 7, 1000);
        assert_eq!(directory.proof(7, 1500, LEASE), Proof::Good);
        assert_eq!(directory.proof(7, 1501, LEASE), Proof::Stale);
        end(&directory, 7, 1);
        prove_one(&directory, 7, 2000);
        assert_eq!(directory.proof(7, 2000, LEASE), Proof::Ended { limit: 1 });
        let next = 7 + FLOWS as u64;
        begin(&directory, next, false);
        prove(&directory, 3000);
        assert_eq!(directory.proof(next, 3000, LEASE), Proof::Good, "the date of the flow before it is gone");
    }
}
