//! `Publish` and `Withdraw`: who listens where, and where programs under Partywall run (protocol T2).
//!
//! Where a socket listens, the kernel says. Which addresses a wildcard stands for, the client says, who runs there: a lie
//! makes others ask the broker for nothing.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use partywall_protocol::directory::{DirectoryChange, Fingerprint, OfferKey};
use partywall_protocol::wire::{Message, Refusal};

use super::facts::{SocketFacts, SocketState};
use crate::core::domain::DomainId;
use crate::core::refuse::{Refuse, refuse};
use crate::core::{Action, Core, Descriptor, SessionId};

/// What one `Publish` has put into the directory.
#[derive(Debug)]
pub(in crate::core) struct Publication {
    pub(in crate::core) domain: DomainId,
    pub(in crate::core) listeners: Vec<Fingerprint>,
    pub(in crate::core) addresses: Vec<Fingerprint>,
    pub(in crate::core) netns: u64,
}

impl Publication {
    pub(in crate::core) fn entries(&self) -> usize {
        self.listeners.len() + self.addresses.len()
    }
}

impl<F: Descriptor> Core<F> {
    pub(in crate::core) fn publish(
        &mut self,
        id: SessionId,
        request: u32,
        addresses: &[IpAddr],
        socket: &SocketFacts,
    ) -> Result<(), Refuse> {
        let Some((domain_id, domain, _)) = self.member(id) else { return Ok(()) };
        let publication = describe(domain_id, addresses, socket);
        let new = publication.entries();
        let (has, may) = (domain.entries, domain.quota.listeners);
        if u64::from(has) + new as u64 > u64::from(may) {
            let name = &domain.name;
            let reason = format!("{name} has {has} entries in the directory, and may have {may}");
            return refuse(Refusal::Quota, reason);
        }
        if self.sockets.entries + new > self.capacity.entries {
            return refuse(Refusal::OutOfResources, "the directory is full");
        }
        self.sockets.entries += new;
        if let Some(domain) = self.domains.get_mut(&domain_id) {
            // It fits the quota, which is of this type.
            domain.entries += new as u32;
        }
        for listener in &publication.listeners {
            *self.sockets.listening.entry(*listener).or_default().entry(publication.netns).or_default() += 1;
        }
        // The addresses first: who finds the listener and connects must be known as a neighbour.
        let addresses = publication.addresses.iter().map(|a| DirectoryChange::Address(*a));
        let listeners = publication.listeners.iter().map(|l| DirectoryChange::Listener(*l));
        self.actions.extend(addresses.chain(listeners).map(Action::Directory));
        let key = self.sockets.next_publication;
        self.sockets.next_publication += 1;
        self.sockets.publications.insert(key, publication);
        if let Some(session) = self.sessions.get_mut(&id) {
            session.publications.insert(key);
        }
        let OfferKey([secret_low, secret_high]) = self.sockets.key_of(socket.netns);
        self.send(id, request, Message::Published { key, secret_low, secret_high });
        Ok(())
    }

    pub(in crate::core) fn withdraw(&mut self, id: SessionId, request: u32, key: u64) -> Result<(), Refuse> {
        let Some(session) = self.sessions.get_mut(&id) else { return Ok(()) };
        if !session.publications.remove(&key) {
            return refuse(Refusal::NoSuchService, format!("you have published nothing that has the number {key}"));
        }
        self.unpublish(key);
        self.send(id, request, Message::Done {});
        Ok(())
    }

    /// Takes a publication out of the tables; its session has forgotten it already.
    pub(in crate::core) fn unpublish(&mut self, key: u64) {
        let Some(publication) = self.sockets.publications.remove(&key) else { return };
        self.sockets.entries -= publication.entries();
        if let Some(domain) = self.domains.get_mut(&publication.domain) {
            domain.entries -= publication.entries() as u32;
        }
        for listener in &publication.listeners {
            let Some(of) = self.sockets.listening.get_mut(listener) else { continue };
            if let Some(count) = of.get_mut(&publication.netns) {
                *count -= 1;
                if *count == 0 {
                    of.remove(&publication.netns);
                }
            }
            if of.is_empty() {
                self.sockets.listening.remove(listener);
            }
        }
        let listeners = publication.listeners.into_iter().map(DirectoryChange::NoListener);
        let addresses = publication.addresses.into_iter().map(DirectoryChange::NoAddress);
        self.actions.extend(listeners.chain(addresses).map(Action::Directory));
    }
}

/// What is to be known of a socket that is published, and of where it is.
fn describe(domain: DomainId, addresses: &[IpAddr], socket: &SocketFacts) -> Publication {
    let SocketFacts { local, netns, .. } = *socket;
    let mut here: Vec<IpAddr> = addresses.iter().copied().filter(|ip| !ip.is_unspecified()).collect();
    here.extend([IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)]);
    if !local.ip().is_unspecified() {
        here.push(local.ip());
    }
    let mut listeners: Vec<Fingerprint> = Vec::new();
    if socket.state == SocketState::Listening {
        // A wildcard of IPv6 is one of IPv4 too, unless it says otherwise.
        let takes = |ip: &IpAddr| match local.ip() {
            IpAddr::V4(at) => at.is_unspecified() && ip.is_ipv4(),
            IpAddr::V6(at) => at.is_unspecified() && (ip.is_ipv6() || !socket.only_v6),
        };
        let at = |ip: IpAddr| Fingerprint::listener(socket.transport, SocketAddr::new(ip, local.port()), netns);
        listeners = here.iter().copied().filter(takes).map(at).collect();
        if !local.ip().is_unspecified() {
            listeners.push(at(local.ip()));
        }
    }
    let mut addresses: Vec<Fingerprint> = here.into_iter().map(|ip| Fingerprint::address(ip, netns)).collect();
    for list in [&mut listeners, &mut addresses] {
        list.sort_unstable();
        list.dedup();
    }
    Publication { domain, listeners, addresses, netns }
}
