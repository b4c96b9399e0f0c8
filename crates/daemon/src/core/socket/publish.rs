//! `Publish` and `Withdraw`: the listeners, and the addresses at which programs under Partywall run (protocol T2).
//!
//! The kernel reports where a socket listens. The client, which runs there, reports the addresses that a wildcard stands for. A false
//! report only makes others ask the broker without result.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use partywall_protocol::directory::{DirectoryChange, Fingerprint, OfferKey, Transport, is_scoped};
use partywall_protocol::wire::{Message, Name, Origin, Refusal};

use super::open::service_of;
use super::{NamespaceId, SocketFacts, SocketState};
use crate::core::id::DomainId;
use crate::core::refuse::{Refuse, refuse};
use crate::core::{Action, Core, Descriptor, SessionId};

/// The entries of one `Publish` in the directory.
#[derive(Debug)]
pub(in crate::core) struct Publication {
    pub(in crate::core) domain: DomainId,
    pub(in crate::core) listeners: Vec<PublishedEntry>,
    pub(in crate::core) addresses: Vec<PublishedEntry>,
    /// The service that its port stands for.
    pub(in crate::core) service: Name,
    pub(in crate::core) netns: NamespaceId,
    /// The number of a socket in a `SO_REUSEPORT` group (protocol U11.12).
    pub(in crate::core) member: Option<u64>,
}

/// A line of the directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::core) struct PublishedEntry {
    pub(in crate::core) fingerprint: Fingerprint,
    /// It means nothing on other machines: a loopback address, or one for datagrams.
    pub(in crate::core) is_local: bool,
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
        let publication = describe(domain_id, addresses, socket)?;
        let new = publication.entries();
        let (has, may) = (domain.entries, domain.quota.listeners);
        if u64::from(has) + new as u64 > u64::from(may) {
            let name = &domain.name;
            let reason = format!("{name} has {has} entries in the directory, and may have {may}");
            return refuse(Refusal::Quota, reason);
        }
        self.sockets.may_have(socket.origin, |counts| counts.entries, new, self.capacity.entries)?;
        if self.sockets.entries + new > self.capacity.entries {
            return refuse(Refusal::OutOfResources, "the directory is full");
        }
        self.sockets.entries += new;
        if let Some(counts) = self.sockets.counts_of(socket.origin) {
            counts.entries += new;
        }
        if let Some(domain) = self.domains.get_mut(&domain_id) {
            // It fits the quota, which is of this type.
            domain.entries += new as u32;
        }
        for listener in &publication.listeners {
            *self.sockets.listening.entry(listener.fingerprint).or_default().entry(publication.netns).or_default() += 1;
        }
        self.namespace_gained(publication.netns);
        self.show(&publication, DirectoryChange::Address, DirectoryChange::Listener);
        if let Some(cookie) = publication.member {
            self.actions.push(Action::Member { cookie, is_published: true });
        }
        let key = self.sockets.next_publication;
        self.sockets.next_publication += 1;
        self.sockets.publications.insert(key, publication);
        if let Some(session) = self.sessions.get_mut(&id) {
            session.publications.insert(key);
        }
        let OfferKey([secret_low, secret_high]) = self.sockets.key_of(socket.namespace());
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
        if let Some(cookie) = publication.member {
            self.actions.push(Action::Member { cookie, is_published: false });
        }
        self.sockets.entries -= publication.entries();
        if let Some(counts) = self.sockets.counts_of(publication.netns.origin) {
            counts.entries -= publication.entries();
        }
        if let Some(domain) = self.domains.get_mut(&publication.domain) {
            domain.entries -= publication.entries() as u32;
        }
        for listener in &publication.listeners {
            let Some(of) = self.sockets.listening.get_mut(&listener.fingerprint) else { continue };
            if let Some(count) = of.get_mut(&publication.netns) {
                *count -= 1;
                if *count == 0 {
                    of.remove(&publication.netns);
                }
            }
            if of.is_empty() {
                self.sockets.listening.remove(&listener.fingerprint);
            }
        }
        self.show(&publication, DirectoryChange::NoAddress, DirectoryChange::NoListener);
        self.namespace_lost(publication.netns);
    }
}

/// The publication of a socket: its address, and the addresses at which it runs.
fn describe(domain: DomainId, addresses: &[IpAddr], socket: &SocketFacts) -> Result<Publication, Refuse> {
    let SocketFacts { local, netns, transport, .. } = *socket;
    let mut here: Vec<IpAddr> = addresses.iter().copied().filter(|ip| !ip.is_unspecified()).collect();
    here.extend([IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)]);
    if !local.ip().is_unspecified() {
        here.push(local.ip());
    }
    let mut listeners: Vec<PublishedEntry> = Vec::new();
    // Datagrams go by rings on the host alone.
    let may_listen = transport == Transport::Tcp || socket.origin == Origin::Host;
    if (socket.state == SocketState::Listening || socket.may_have_flows()) && may_listen {
        // A wildcard of IPv6 is one of IPv4 too, unless it says otherwise.
        let takes = |ip: &IpAddr| match local.ip() {
            IpAddr::V4(at) => at.is_unspecified() && ip.is_ipv4(),
            IpAddr::V6(at) => at.is_unspecified() && (ip.is_ipv6() || !socket.only_v6),
        };
        let at = |ip: IpAddr| PublishedEntry {
            fingerprint: Fingerprint::listener(transport, SocketAddr::new(ip, local.port()), netns),
            is_local: is_scoped(ip) || transport == Transport::Udp,
        };
        listeners = here.iter().copied().filter(takes).map(at).collect();
        if !local.ip().is_unspecified() {
            listeners.push(at(local.ip()));
        }
    }
    let entry = |ip| PublishedEntry { fingerprint: Fingerprint::address(ip, netns), is_local: is_scoped(ip) };
    let mut addresses: Vec<PublishedEntry> = here.into_iter().map(entry).collect();
    for list in [&mut listeners, &mut addresses] {
        list.sort_unstable();
        list.dedup();
    }
    let service = service_of(transport, local.port())?;
    let is_member = socket.origin == Origin::Host && socket.state == SocketState::Grouped;
    let member = is_member.then_some(socket.cookie);
    Ok(Publication { domain, listeners, addresses, service, netns: socket.namespace(), member })
}
