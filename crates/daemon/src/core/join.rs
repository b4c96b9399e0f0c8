//! `Join`: a session becomes part of a domain (protocol C3, C5).

use std::collections::BTreeMap;

use partywall_protocol::wire::{EventKind, Message, Name, Origin, Refusal, VERSION};

use super::claim::{Claiming, WaitingRequest};
use super::domain::DomainRecord;
use super::happened::Happened;
use super::id::DomainId;
use super::refuse::{self, Denial, Refuse, refuse};
use super::{Core, Descriptor, SessionId};
use crate::credentials::Credentials;
use crate::policy::Quota;

impl<F: Descriptor> Core<F> {
    /// `is_claimed` says that the request has waited for the cluster's decision about the name.
    pub(super) fn join(
        &mut self,
        id: SessionId,
        request: u32,
        version: u16,
        name: &str,
        is_claimed: bool,
    ) -> Result<(), Refuse> {
        let Some(session) = self.sessions.get(&id) else { return Ok(()) };
        let peer = session.peer;
        if session.domain.is_some() {
            return refuse(Refusal::Protocol, "this session has joined already; open another one");
        }
        if version != VERSION {
            return refuse(Refusal::Version, format!("this broker speaks version {VERSION}, not {version}"));
        }
        let name = self.qualified(peer, refuse::name(name)?)?;
        let ruling = self.judge_join(peer, &name).map(|grounds| self.policy.ruling(&grounds))?;
        if !is_claimed {
            self.tally.decision("join", &ruling);
        }
        let Some(quota) = self.quota_of(peer, &name) else {
            let reason = format!("the policy does not let {} join as {name}", peer.user);
            let (kind, from) = (EventKind::JoinRefused, name.to_string());
            let (to, service) = Default::default();
            return Err(Refuse::denied(
                reason,
                Denial { kind, peer, domain: 0, from, to, service, other: None, ruling },
            ));
        };
        let known = self.domain_named(&name).and_then(|d| self.domains.get(&d));
        if let Some(known) = known.filter(|known| !known.founder.shares_names_with(peer)) {
            return refuse(Refusal::NameTaken, format!("{name} belongs to {}", known.founder.user));
        }
        let sessions = known.map_or(0, |known| known.sessions);
        if sessions >= known.map_or(quota, |known| known.quota).sessions {
            return refuse(Refusal::Quota, format!("{name} has {sessions} sessions, its quota"));
        }
        let domain = match self.domain_named(&name) {
            Some(domain) => domain,
            None if !is_claimed && self.must_claim(&name, false) => {
                let what = Claiming::Join { version };
                return self.claim(name, WaitingRequest { session: id, request, what });
            }
            None => self.new_domain(name, peer, quota),
        };
        let Some(found) = self.domains.get_mut(&domain) else { return Ok(()) };
        found.sessions += 1;
        found.processes.entry(peer.pid).or_default().sessions += 1;
        let joined = Message::Joined {
            domain,
            epoch: found.epoch,
            instance: self.instance,
            max_ring: found.quota.max_ring,
            max_channels: found.quota.channels,
            user: peer.user,
            name: found.name.to_string(),
        };
        if let Some(session) = self.sessions.get_mut(&id) {
            session.domain = Some(domain);
        }
        let from = self.name_of(domain).map_or_else(String::new, |name| name.to_string());
        self.note(EventKind::Joined, peer, domain, Happened { from, ..Happened::by(&ruling) });
        self.send(id, request, joined);
        Ok(())
    }

    /// The quota of a domain of this name, if this session may join it.
    pub(super) fn quota_of(&self, peer: Credentials, name: &Name) -> Option<Quota> {
        match peer.origin() {
            Origin::Host => self.policy.may_join(peer, name),
            Origin::Machine(machine) => self.policy.may_join_machine(self.machines.name(machine)?, name),
        }
    }

    fn new_domain(&mut self, name: Name, peer: Credentials, quota: Quota) -> DomainId {
        // Ids of ended domains are free again after a wrap; 0 means "not known".
        while self.next_domain == 0 || self.domains.contains_key(&self.next_domain) {
            self.next_domain = self.next_domain.wrapping_add(1);
        }
        let (id, epoch) = (self.next_domain, self.next_epoch);
        self.next_domain = id.wrapping_add(1);
        self.next_epoch += 1;
        if self.may_log(peer.user) {
            tracing::info!(domain = %name, id, epoch, user = %peer.user, pid = peer.pid, "domain joined");
        }
        self.domain_ids.insert(name.clone(), id);
        let empty = DomainRecord {
            name,
            epoch,
            founder: peer,
            quota,
            sessions: 0,
            services: 0,
            ends: 0,
            ring_bytes: 0,
            entries: 0,
            offers: 0,
            processes: BTreeMap::new(),
        };
        let name = empty.name.clone();
        self.domains.insert(id, empty);
        self.touch_name(&name, None);
        id
    }
}
