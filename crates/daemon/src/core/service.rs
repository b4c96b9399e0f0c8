//! `Bind`: a session listens for connections to a service of its domain.

use partywall_protocol::wire::{Kind, Message, Name, Refusal};

use super::claim::{Claiming, WaitingRequest};
use super::id::{DomainId, ServiceKey, SessionId};
use super::refuse::{self, Refuse, refuse};
use super::{Core, Descriptor};

/// The most offers that lie in one session's socket, over all its services.
///
/// This many offers, with the kernel's bookkeeping, and the largest answer fit into the socket's buffer together. A listener that
/// reads more slowly than others connect therefore never loses its session (protocol C7).
pub(super) const MAX_WAITING: usize = 128;

#[derive(Debug)]
pub(super) struct Service {
    pub(super) domain: DomainId,
    pub(super) name: Name,
    pub(super) kind: Kind,
    /// The session of the listener.
    pub(super) session: SessionId,
    pub(super) backlog: u16,
    /// Offers that the listener has neither accepted nor closed.
    pub(super) waiting: u16,
    /// Offers that it has accepted.
    pub(super) accepted: u64,
}

impl<F: Descriptor> Core<F> {
    pub(super) fn bind(
        &mut self,
        id: SessionId,
        request: u32,
        service: &str,
        kind: Kind,
        backlog: u16,
        is_claimed: bool,
    ) -> Result<(), Refuse> {
        let name = refuse::name(service)?;
        if kind == Kind::Socket {
            return refuse(Refusal::Protocol, "a channel of this kind is made by Take alone (protocol T4)");
        }
        let Some(domain_id) = self.sessions.get(&id).and_then(|s| s.domain) else { return Ok(()) };
        if self.service_named(domain_id, &name).is_some() {
            return refuse(Refusal::ServiceTaken, format!("this domain has bound {name} already"));
        }
        let Some(domain) = self.domains.get(&domain_id) else { return Ok(()) };
        if !is_claimed && domain.services == 0 && self.must_claim(&domain.name, true) {
            let what = Claiming::Bind { service: service.to_owned(), kind, backlog };
            return self.claim(domain.name.clone(), WaitingRequest { session: id, request, what });
        }
        let Some(domain) = self.domains.get_mut(&domain_id) else { return Ok(()) };
        if domain.services >= domain.quota.services {
            return refuse(Refusal::Quota, format!("{} has {} services, its quota", domain.name, domain.services));
        }
        domain.services += 1;
        let key = self.next_service;
        self.next_service += 1;
        // A backlog of 0 could never be connected to; as with listen(2), a number too great means as many as there can be.
        let backlog = backlog.clamp(1, MAX_WAITING as u16);
        let service = Service { domain: domain_id, name, kind, session: id, backlog, waiting: 0, accepted: 0 };
        tracing::debug!(domain = %domain.name, service = %service.name, %kind, "bound");
        self.service_keys.insert((domain_id, service.name.clone()), key);
        self.services.insert(key, service);
        if let Some(session) = self.sessions.get_mut(&id) {
            session.services.insert(key);
        }
        self.touch_service(key);
        self.send(id, request, Message::Done {});
        Ok(())
    }

    pub(super) fn service_named(&self, domain: DomainId, name: &Name) -> Option<ServiceKey> {
        self.service_keys.get(&(domain, name.clone())).copied()
    }

    /// Forgets a service whose listener has ended.
    pub(super) fn unbind(&mut self, key: ServiceKey) {
        let Some(service) = self.services.remove(&key) else { return };
        self.service_keys.remove(&(service.domain, service.name.clone()));
        let Some(domain) = self.domains.get_mut(&service.domain) else { return };
        domain.services -= 1;
        let domain = domain.name.clone();
        self.touch_name(&domain, Some(&service.name));
    }

    fn touch_service(&mut self, key: ServiceKey) {
        let Some(service) = self.services.get(&key) else { return };
        let Some(domain) = self.domains.get(&service.domain) else { return };
        let (domain, service) = (domain.name.clone(), service.name.clone());
        self.touch_name(&domain, Some(&service));
    }
}
