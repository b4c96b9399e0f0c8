//! Domains, the processes in them, and what they hold.

use std::collections::{BTreeMap, BTreeSet};

use partywall_protocol::wire::{Name, Refusal, Side};

use super::channel::EndState;
use super::id::{ChannelId, DomainId};
use super::refuse::{Refuse, refuse};
use super::{Core, Descriptor};
use crate::credentials::Credentials;
use crate::policy::Quota;

/// One incarnation of a name, from its first session to the end of its last (protocol C5).
#[derive(Debug)]
pub(super) struct DomainRecord {
    pub(super) name: Name,
    pub(super) epoch: u64,
    /// The process of its first session. Only sessions of its user, and from its place, may join.
    pub(super) founder: Credentials,
    pub(super) quota: Quota,
    pub(super) sessions: u32,
    pub(super) services: u32,
    /// Ends of channels, waiting or held, and of handshakes that have ended and are not given up.
    pub(super) ends: u32,
    /// Bytes of the rings that it brought to these ends, and of the further regions that count for them.
    pub(super) ring_bytes: u64,
    /// Entries in the directory.
    pub(super) entries: u32,
    /// Offers that wait.
    pub(super) offers: u32,
    pub(super) processes: BTreeMap<u32, DomainProcess>,
}

/// The sessions of one process in one domain. A channel lives in a process, not in the session that made it; it is given up
/// when the last session of the process ends.
#[derive(Debug, Default)]
pub(super) struct DomainProcess {
    pub(super) sessions: u32,
    pub(super) held: BTreeSet<(ChannelId, Side)>,
    /// Handshakes that have ended, and whose places it may still use.
    pub(super) ended: BTreeSet<ChannelId>,
}

impl DomainRecord {
    /// Whether it may hold one more end, for which it brings a ring of this size.
    pub(super) fn afford(&self, ring_size: u64) -> Result<(), Refuse> {
        let Self { name, quota, .. } = self;
        if self.ends >= quota.channels {
            return refuse(Refusal::Quota, format!("{name} has {} ends of channels, its quota", self.ends));
        }
        self.afford_ring(ring_size)
    }

    /// Whether it may bring a ring of this size to an end that it has.
    pub(super) fn afford_ring(&self, ring_size: u64) -> Result<(), Refuse> {
        self.afford_ring_instead(ring_size, 0)
    }

    /// Whether it may bring a ring of this size, which replaces one of `present` bytes that it has brought.
    pub(super) fn afford_ring_instead(&self, ring_size: u64, present: u64) -> Result<(), Refuse> {
        let Self { name, quota, .. } = self;
        if ring_size > quota.max_ring {
            let max = quota.max_ring;
            return refuse(Refusal::Quota, format!("a ring of {ring_size} bytes; {name} may bring at most {max}"));
        }
        if self.ring_bytes.saturating_sub(present).saturating_add(ring_size) > quota.ring_bytes {
            let (has, may) = (self.ring_bytes, quota.ring_bytes);
            return refuse(Refusal::Quota, format!("{name} has brought {has} bytes of rings, and may bring {may}"));
        }
        Ok(())
    }

    /// Fails if the domain's quota has no room for this many bytes of further regions.
    pub(super) fn afford_memory(&self, bytes: u64) -> Result<(), Refuse> {
        let Self { name, quota, .. } = self;
        if self.ring_bytes.saturating_add(bytes) > quota.ring_bytes {
            let (has, may) = (self.ring_bytes, quota.ring_bytes);
            let reason = format!("{has} bytes of rings and regions count for {name}, whose quota is {may}");
            return refuse(Refusal::Quota, reason);
        }
        Ok(())
    }
}

impl<F: Descriptor> Core<F> {
    pub(super) fn domain_named(&self, name: &Name) -> Option<DomainId> {
        self.domain_ids.get(name).copied()
    }

    /// Takes one session of process `pid` out of a domain; the last of the process gives up its channels, the last of all
    /// ends the domain.
    pub(super) fn leave(&mut self, id: DomainId, pid: u32, by_program: bool) {
        let Some(domain) = self.domains.get_mut(&id) else { return };
        domain.sessions -= 1;
        let Some(process) = domain.processes.get_mut(&pid) else { return };
        process.sessions -= 1;
        if process.sessions == 0 {
            let ended: Vec<_> = process.ended.iter().copied().collect();
            for (channel, side) in std::mem::take(&mut process.held) {
                if !by_program {
                    self.machines.abandon(channel);
                }
                self.release(channel, side, EndState::Held { domain: id, pid });
            }
            for handshake in ended {
                if by_program {
                    self.give_up_handshake(handshake, id, pid);
                } else {
                    self.abandon_handshake(handshake);
                }
            }
            if by_program {
                self.machines.process_gone(id, pid);
            } else {
                self.machines.abandon_process(id, pid);
            }
            if let Some(domain) = self.domains.get_mut(&id) {
                domain.processes.remove(&pid);
                if domain.sessions == 0 {
                    if self.log.allows(domain.founder.user, self.now) {
                        tracing::info!(domain = %domain.name, id, epoch = domain.epoch, "domain ended");
                    }
                    let name = domain.name.clone();
                    self.domain_ids.remove(&name);
                    self.domains.remove(&id);
                    self.touch_name(&name, None);
                }
            }
        }
    }
}
