//! Sessions: one socket each, from `accept` to its end.

use std::collections::BTreeSet;

use partywall_protocol::socket::NamespaceId;
use partywall_protocol::wire::{EventKind, Message, Origin, Refusal, Side};

use super::happened::Happened;
use super::id::{ChannelId, DomainId, ServiceKey, SessionId};
use super::{Action, Core, Descriptor};
use crate::credentials::Credentials;

#[derive(Debug)]
pub(super) struct SessionRecord {
    pub(super) peer: Credentials,
    /// The path of its executable, where the broker may read it.
    pub(super) program: Option<String>,
    /// `None` until it has joined.
    pub(super) domain: Option<DomainId>,
    pub(super) services: BTreeSet<ServiceKey>,
    /// Offers in its socket that it has neither accepted nor closed.
    pub(super) waiting: BTreeSet<ChannelId>,
    /// Its publications in the directory, by the namespace of their sockets.
    pub(super) publications: BTreeSet<(NamespaceId, u64)>,
    /// Connections that it offers.
    pub(super) offers: BTreeSet<ChannelId>,
    /// Offers of others that it has taken and that are not channels yet.
    pub(super) takes: BTreeSet<ChannelId>,
}

impl SessionRecord {
    fn new(peer: Credentials, program: Option<String>) -> Self {
        Self {
            peer,
            program,
            domain: None,
            services: BTreeSet::new(),
            waiting: BTreeSet::new(),
            publications: BTreeSet::new(),
            offers: BTreeSet::new(),
            takes: BTreeSet::new(),
        }
    }
}

impl<F: Descriptor> Core<F> {
    pub(super) fn open(&mut self, id: SessionId, peer: Credentials, program: Option<String>) {
        let of_user = self.sessions_by_account.get(&peer.account()).copied().unwrap_or(0);
        let refused = if self.sessions.len() >= self.capacity.sessions {
            Some((Refusal::OutOfResources, "the broker has as many sessions as it has descriptors for".to_owned()))
        } else if !self.may_join_something(peer) {
            Some((Refusal::Denied, format!("no rule of the policy lets {} join", peer.user)))
        } else if of_user >= self.policy.sessions_per_user() {
            Some((Refusal::Quota, format!("{} has {of_user} sessions, the most one user may have", peer.account())))
        } else {
            None
        };
        if let Some((code, reason)) = refused {
            if self.may_log(peer.user) {
                tracing::info!(user = %peer.user, pid = peer.pid, %code, reason, "session refused");
            }
            let happened = Happened { code: Some(code), grounds: reason.clone(), ..Happened::default() };
            self.record(EventKind::JoinRefused, peer.user, peer.pid, 0, happened);
            self.tally.refusal("session", code);
            self.send(id, 0, Message::Refused { code, reason });
            self.actions.push(Action::Close { session: id });
            return;
        }
        self.tally.session();
        *self.sessions_by_account.entry(peer.account()).or_default() += 1;
        self.sessions.insert(id, SessionRecord::new(peer, program));
    }

    fn may_join_something(&self, peer: Credentials) -> bool {
        match peer.origin() {
            Origin::Host => self.policy.may_join_something(peer),
            Origin::Machine(machine) => self.machines.name(machine).is_some(),
        }
    }

    /// Ends a session from this side.
    pub(super) fn dismiss(&mut self, id: SessionId) {
        self.end(id, false);
        self.actions.push(Action::Close { session: id });
    }

    /// Removes a session and all objects that depend on it. Unknown ones have been dismissed before.
    ///
    /// Unless its program has closed it, its places in windows are not given out again (protocol G4.1).
    pub(super) fn end(&mut self, id: SessionId, by_program: bool) {
        let Some(session) = self.sessions.remove(&id) else { return };
        if let Some(count) = self.sessions_by_account.get_mut(&session.peer.account()) {
            *count -= 1;
            if *count == 0 {
                self.sessions_by_account.remove(&session.peer.account());
            }
        }
        // Offers in its socket go with it: the kernel drops the descriptors, and the connecting side sees that (C7).
        for channel in session.waiting {
            if !by_program {
                self.machines.abandon(channel);
            }
            if let Some(state) = self.channels.get(&channel).map(|c| c.end(Side::Accepting).state) {
                self.release(channel, Side::Accepting, state);
            }
        }
        for key in session.services {
            self.unbind(key);
        }
        for (_, key) in session.publications {
            self.unpublish(key);
        }
        for offer in session.offers.into_iter().chain(session.takes) {
            self.drop_offer(offer);
        }
        self.machines.waiting.retain(|one| one.session != id);
        self.leave_group(id);
        self.events.forget(id);
        self.end_in_cluster(id, by_program);
        if let Some(domain) = session.domain {
            let from = self.name_of(domain).map_or_else(String::new, |name| name.to_string());
            self.note(EventKind::Left, session.peer, domain, Happened { from, ..Happened::default() });
            self.leave(domain, session.peer.pid, by_program);
        }
    }

    /// After a change of policy: ends the sessions that it would not let join, and sets the quotas of the others' domains.
    pub(super) fn rejudge(&mut self) {
        let mut unwelcome = Vec::new();
        let mut quotas = Vec::new();
        for (&id, session) in &self.sessions {
            let welcome = match session.domain.and_then(|d| Some((d, self.domains.get(&d)?))) {
                None => self.may_join_something(session.peer),
                Some((number, domain)) => match self.quota_of(session.peer, &domain.name) {
                    Some(quota) => {
                        quotas.push((number, quota));
                        true
                    }
                    None => false,
                },
            };
            if !welcome {
                unwelcome.push(id);
            }
        }
        for (number, quota) in quotas {
            if let Some(domain) = self.domains.get_mut(&number) {
                domain.quota = quota;
            }
        }
        unwelcome.sort_unstable();
        for id in unwelcome {
            let reason = "the policy has changed and no longer lets you join".to_owned();
            self.send(id, 0, Message::Refused { code: Refusal::Denied, reason });
            self.dismiss(id);
        }
    }
}
