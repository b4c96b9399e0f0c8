//! Handshakes between machines that have ended without a channel, whose places processes may still use (protocol T4.11).
//!
//! A process learns of its place in a window by the answer to its `Offer` or `Take`, and makes its region there afterwards. It may read the
//! other side's place as well. Meanwhile the broker may have ended the handshake. If it gave these places out at once, the process would write
//! into the region of another connection, or read it. So they are kept until each of the two processes has given the handshake up. Until then
//! each side counts for its domain's quota like an end of a channel.

use std::collections::BTreeMap;

use super::id::{ChannelId, DomainId};
use super::{Core, Descriptor};

/// A side of a handshake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct HandshakeSide {
    pub(super) domain: DomainId,
    pub(super) pid: u32,
    pub(super) ring_size: u64,
}

/// The sides that have not given up each of these handshakes.
pub(super) type EndedHandshakes = BTreeMap<ChannelId, Vec<HandshakeSide>>;

impl<F: Descriptor> Core<F> {
    /// A handshake between these sides has ended without a channel.
    pub(super) fn handshake_ended(&mut self, id: ChannelId, mut sides: Vec<HandshakeSide>) {
        let process_of =
            |side: &HandshakeSide| self.domains.get(&side.domain).is_some_and(|d| d.processes.contains_key(&side.pid));
        sides.retain(process_of);
        if sides.is_empty() || !self.machines.has_places(id) {
            return self.machines.channel_gone(id);
        }
        for side in &sides {
            let Some(domain) = self.domains.get_mut(&side.domain) else { continue };
            domain.ends += 1;
            domain.ring_bytes += side.ring_size;
            if let Some(process) = domain.processes.get_mut(&side.pid) {
                process.ended.insert(id);
            }
        }
        self.machines.ended.insert(id, sides);
    }

    /// A process gives up a handshake. Returns whether it had one of this number that has ended.
    pub(super) fn give_up_handshake(&mut self, id: ChannelId, domain: DomainId, pid: u32) -> bool {
        let Some(sides) = self.machines.ended.get_mut(&id) else { return false };
        let Some(at) = sides.iter().position(|side| (side.domain, side.pid) == (domain, pid)) else { return false };
        let side = sides.swap_remove(at);
        let is_last = sides.is_empty();
        self.relieve(id, side);
        if is_last {
            self.machines.ended.remove(&id);
            self.machines.channel_gone(id);
        }
        true
    }

    /// A process with such a handshake may live, though its sessions have ended: nobody gets the places.
    pub(super) fn abandon_handshake(&mut self, id: ChannelId) {
        self.machines.abandon(id);
        self.forget_handshake(id);
    }

    /// Forgets the handshakes whose windows have gone.
    pub(super) fn forget_handshakes_without_places(&mut self) {
        let gone: Vec<_> = self.machines.ended.keys().copied().filter(|id| !self.machines.has_places(*id)).collect();
        gone.into_iter().for_each(|id| self.forget_handshake(id));
    }

    fn forget_handshake(&mut self, id: ChannelId) {
        for side in self.machines.ended.remove(&id).unwrap_or_default() {
            self.relieve(id, side);
        }
    }

    /// A side does not count for its domain any more.
    fn relieve(&mut self, id: ChannelId, side: HandshakeSide) {
        let Some(domain) = self.domains.get_mut(&side.domain) else { return };
        domain.ends -= 1;
        domain.ring_bytes -= side.ring_size;
        if let Some(process) = domain.processes.get_mut(&side.pid) {
            process.ended.remove(&id);
        }
    }
}
