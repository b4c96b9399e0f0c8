//! Handshakes between machines that have ended without a channel, whose places processes may still use (protocol T4.11).
//!
//! A process learns of its place in a window by the answer to its `Offer` or `Take`, and makes its region there afterwards. It may read the
//! other side's place as well. Meanwhile the broker may have ended the handshake. If it gave these places out at once, the process would write
//! into the region of another connection, or read it. So they are kept until each of the two processes has given the handshake up.

use std::collections::BTreeMap;

use super::id::{ChannelId, DomainId};
use super::{Core, Descriptor};

/// Handshakes that one process may leave like this.
pub(super) const MOST_LEFT: usize = 64;

/// A process of a domain.
pub(super) type ProcessOfDomain = (DomainId, u32);

/// How many processes have to give up each of these handshakes.
pub(super) type EndedHandshakes = BTreeMap<ChannelId, usize>;

impl<F: Descriptor> Core<F> {
    /// A handshake has ended without a channel. These are the processes that may use its places.
    pub(super) fn handshake_ended(&mut self, id: ChannelId, processes: &[ProcessOfDomain]) {
        let mut left = 0;
        for &(domain, pid) in processes {
            let process = self.domains.get_mut(&domain).and_then(|domain| domain.processes.get_mut(&pid));
            left += usize::from(process.is_some_and(|process| process.ended.insert(id)));
        }
        if left == 0 || !self.machines.has_places(id) {
            self.forget_ended(id, processes);
            self.machines.channel_gone(id);
        } else {
            self.machines.ended.insert(id, left);
        }
    }

    fn forget_ended(&mut self, id: ChannelId, processes: &[ProcessOfDomain]) {
        for (domain, pid) in processes {
            if let Some(process) = self.domains.get_mut(domain).and_then(|domain| domain.processes.get_mut(pid)) {
                process.ended.remove(&id);
            }
        }
    }

    /// A process gives up a handshake. Returns whether it had one of this number that has ended.
    pub(super) fn give_up_handshake(&mut self, id: ChannelId, (domain, pid): ProcessOfDomain) -> bool {
        let process = self.domains.get_mut(&domain).and_then(|domain| domain.processes.get_mut(&pid));
        let had = process.is_some_and(|process| process.ended.remove(&id));
        if had {
            self.process_left_handshake(id);
        }
        had
    }

    /// One process fewer may use the places of a handshake that has ended.
    pub(super) fn process_left_handshake(&mut self, id: ChannelId) {
        let Some(left) = self.machines.ended.get_mut(&id) else { return };
        *left -= 1;
        if *left == 0 {
            self.machines.ended.remove(&id);
            self.machines.channel_gone(id);
        }
    }
}
