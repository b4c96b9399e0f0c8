//! `Publish` and `Withdraw`: the listeners, and the addresses at which programs under Partywall run (protocol T2).
//!
//! The kernel reports where a socket listens. The client, which runs there, reports the addresses that a wildcard stands for. A false
//! report only makes others ask the broker without result.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use partywall_protocol::directory::{DirectoryChange, Fingerprint, OfferKey, Transport, is_scoped};
use partywall_protocol::wire::{Message, Name, Origin, Refusal};

use super::open::service_of;
use super::{NamespaceId, SocketFacts, SocketState, Sockets};
use crate::core::id::DomainId;
use crate::core::networks::Networks;
use crate::core::refuse::{Refuse, refuse};
use crate::core::{Action, Core, Descriptor, SessionId};

/// The entries of one `Publish` in the directory.
#[derive(Debug, Clone)]
pub(in crate::core) struct Publication {
    pub(in crate::core) domain: DomainId,
    pub(in crate::core) listeners: Vec<PublishedEntry>,
    /// Where its listeners are reached by way of a translator.
    pub(in crate::core) forwarded: Vec<PublishedEntry>,
    pub(in crate::core) addresses: Vec<PublishedEntry>,
    /// The service that its port stands for.
    pub(in crate::core) service: Name,
    pub(in crate::core) netns: NamespaceId,
    /// The number of a socket in a `SO_REUSEPORT` group (protocol U11.12).
    pub(in crate::core) member: Option<u64>,
    /// For a UDP socket, the message and the socket as they came: whether it may listen depends on the list of namespaces.
    shown: Option<(Vec<IpAddr>, SocketFacts)>,
}

/// A line of the directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::core) struct PublishedEntry {
    pub(in crate::core) fingerprint: Fingerprint,
    pub(in crate::core) scope: EntryScope,
}

/// The directories that a line may be in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::core) enum EntryScope {
    /// That of the same machine: it means nothing elsewhere.
    Own,
    /// All.
    All,
}

impl Publication {
    pub(in crate::core) fn entries(&self) -> usize {
        self.listed().count() + self.addresses.len()
    }

    /// The addresses at which its program runs and that mean the same in every namespace.
    pub(in crate::core) fn residences(&self) -> impl Iterator<Item = Fingerprint> {
        self.addresses.iter().filter(|entry| entry.scope == EntryScope::All).map(|entry| entry.fingerprint)
    }

    /// The entries of its listeners, at their addresses and at those that are forwarded to them.
    pub(super) fn listed(&self) -> impl Iterator<Item = &PublishedEntry> {
        self.listeners.iter().chain(&self.forwarded)
    }

    /// The same, with other forwarded addresses.
    pub(super) fn with_forwarded(&self, forwarded: Vec<PublishedEntry>) -> Self {
        Self { forwarded, ..self.clone() }
    }

    /// The same, with its forwarded addresses alone.
    pub(super) fn forwarded_alone(&self) -> Self {
        Self { listeners: Vec::new(), addresses: Vec::new(), ..self.clone() }
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
        let Some((domain_id, ..)) = self.member(id) else { return Ok(()) };
        let mut publication = self.describe(domain_id, addresses, socket)?;
        if self.may_list(&publication, 0).is_err() {
            publication.forwarded.clear();
            self.may_list(&publication, 0)?;
        }
        let key = self.sockets.next_publication;
        self.sockets.next_publication += 1;
        let netns = publication.netns;
        self.list_publication(key, publication);
        if let Some(session) = self.sessions.get_mut(&id) {
            session.publications.insert((netns, key));
        }
        let OfferKey([secret_low, secret_high]) = self.sockets.key_of(socket.namespace());
        self.send(id, request, Message::Published { key, secret_low, secret_high });
        Ok(())
    }

    /// Whether a publication has room in the directory, once `less` entries of the same domain have left it.
    pub(super) fn may_list(&self, publication: &Publication, less: usize) -> Result<(), Refuse> {
        let Some(domain) = self.domains.get(&publication.domain) else { return Ok(()) };
        // An earlier form of the publication has its entries still.
        let more = publication.entries().saturating_sub(less);
        if more == 0 {
            return Ok(());
        }
        let (has, may) = (domain.entries, domain.quota.listeners);
        if u64::from(has) + more as u64 > u64::from(may) {
            let name = &domain.name;
            let reason = format!("{name} has {has} entries in the directory, and may have {may}");
            return refuse(Refusal::Quota, reason);
        }
        self.sockets.may_have(publication.netns.origin, |counts| counts.entries, more, self.capacity.entries)?;
        if self.sockets.entries + more > self.capacity.entries {
            return refuse(Refusal::OutOfResources, "the directory is full");
        }
        Ok(())
    }

    /// Enters a publication, for which there is room, into the tables.
    fn list_publication(&mut self, key: u64, publication: Publication) {
        let new = publication.entries();
        self.count_entries(&publication, |count| count + new);
        for listener in &publication.listeners {
            self.sockets.listening.add(listener.fingerprint, publication.netns);
        }
        for address in publication.residences() {
            self.sockets.resident.add(address, publication.netns);
        }
        self.namespace_gained(publication.netns);
        self.show(&publication, DirectoryChange::Address, DirectoryChange::Listener);
        if let Some(cookie) = publication.member {
            self.actions.push(Action::Member { cookie, is_published: true });
        }
        self.sockets.publications.insert(key, publication);
    }

    /// After a change of the list of namespaces for these origins: UDP sockets that it newly admits listen, and those that it no longer admits
    /// do not.
    pub(super) fn list_datagrams_again(&mut self, changed: &BTreeSet<Origin>) {
        let concerned = self.sockets.publications.iter().filter(|(_, of)| changed.contains(&of.netns.origin));
        let keys: Vec<u64> = concerned.map(|(key, _)| *key).collect();
        for key in keys {
            let Some(before) = self.sockets.publications.get(&key) else { continue };
            let Some((addresses, socket)) = &before.shown else { continue };
            let Ok(now) = self.describe(before.domain, addresses, socket) else { continue };
            let has_changed = now.listeners != before.listeners || now.member != before.member;
            // Without room the publication stays as it was. An entry proves nothing.
            if has_changed && self.may_list(&now, before.entries()).is_ok() {
                self.unpublish(key);
                self.list_publication(key, now);
            }
        }
    }

    /// Counts entries of a publication, which come or go, wherever entries are limited.
    pub(super) fn count_entries(&mut self, of: &Publication, change: impl Fn(usize) -> usize) {
        self.sockets.entries = change(self.sockets.entries);
        if let Some(counts) = self.sockets.counts_of(of.netns.origin) {
            counts.entries = change(counts.entries);
        }
        if let Some(domain) = self.domains.get_mut(&of.domain) {
            // It fits the quota, which is of this type.
            domain.entries = change(domain.entries as usize) as u32;
        }
    }

    /// The publication of a socket, under the present list of namespaces.
    fn describe(&self, domain: DomainId, addresses: &[IpAddr], socket: &SocketFacts) -> Result<Publication, Refuse> {
        let mut judged = *socket;
        self.sockets.networks.judge(&mut judged);
        let shown = (socket.transport == Transport::Udp).then(|| (addresses.to_vec(), *socket));
        let described = describe(domain, addresses, &judged, &self.sockets.networks)?;
        Ok(Publication { shown, forwarded: self.forwarded_to(&described.listeners), ..described })
    }

    pub(in crate::core) fn withdraw(&mut self, id: SessionId, request: u32, key: u64) -> Result<(), Refuse> {
        let Some(session) = self.sessions.get_mut(&id) else { return Ok(()) };
        let of = self.sockets.publications.get(&key);
        if !of.is_some_and(|of| session.publications.remove(&(of.netns, key))) {
            return refuse(Refusal::NoSuchService, format!("you have published nothing that has the number {key}"));
        }
        self.keep_addresses(id, key);
        self.unpublish(key);
        self.send(id, request, Message::Done {});
        Ok(())
    }

    /// After a session has withdrawn a listener or a UDP socket: enters the addresses of its program once more, until the end of the session,
    /// unless another publication of the session is in the namespace. Connections that it has accepted are found by them (protocol T2.4).
    fn keep_addresses(&mut self, id: SessionId, key: u64) {
        let Sockets { publications, next_publication, .. } = &mut self.sockets;
        let Some(gone) = publications.get(&key).filter(|of| of.shown.is_some() || !of.listeners.is_empty()) else {
            return;
        };
        let Some(session) = self.sessions.get_mut(&id) else { return };
        if session.publications.range((gone.netns, 0)..=(gone.netns, u64::MAX)).next().is_some() {
            return;
        }
        // Nothing that it has takes more room than what goes.
        let kept =
            Publication { listeners: Vec::new(), forwarded: Vec::new(), member: None, shown: None, ..gone.clone() };
        let number = *next_publication;
        *next_publication += 1;
        session.publications.insert((kept.netns, number));
        self.list_publication(number, kept);
    }

    /// Takes a publication out of the tables; its session has forgotten it already.
    pub(in crate::core) fn unpublish(&mut self, key: u64) {
        let Some(publication) = self.sockets.publications.remove(&key) else { return };
        if let Some(cookie) = publication.member {
            self.actions.push(Action::Member { cookie, is_published: false });
        }
        let gone = publication.entries();
        self.count_entries(&publication, |count| count - gone);
        for listener in &publication.listeners {
            self.sockets.listening.remove(listener.fingerprint, publication.netns);
        }
        for address in publication.residences() {
            self.sockets.resident.remove(address, publication.netns);
        }
        self.show(&publication, DirectoryChange::NoAddress, DirectoryChange::NoListener);
        self.namespace_lost(publication.netns);
    }
}

/// The publication of a socket: its address, and the addresses at which it runs.
fn describe(
    domain: DomainId,
    addresses: &[IpAddr],
    socket: &SocketFacts,
    networks: &Networks,
) -> Result<Publication, Refuse> {
    let SocketFacts { local, netns, transport, .. } = *socket;
    let mut here: Vec<IpAddr> = addresses.iter().copied().filter(|ip| !ip.is_unspecified()).collect();
    here.extend([IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)]);
    if !local.ip().is_unspecified() {
        here.push(local.ip());
    }
    let mut listeners: Vec<PublishedEntry> = Vec::new();
    if socket.state == SocketState::Listening || socket.may_have_flows() {
        // A wildcard of IPv6 is one of IPv4 too, unless it says otherwise.
        let takes = |ip: &IpAddr| match local.ip() {
            IpAddr::V4(at) => at.is_unspecified() && ip.is_ipv4(),
            IpAddr::V6(at) => at.is_unspecified() && (ip.is_ipv6() || !socket.only_v6),
        };
        let at = |ip: IpAddr| PublishedEntry {
            fingerprint: Fingerprint::listener(transport, SocketAddr::new(ip, local.port()), netns),
            scope: listener_scope(ip, socket, networks),
        };
        let own = (!local.ip().is_unspecified()).then_some(local.ip());
        listeners = here.iter().copied().filter(takes).chain(own).map(at).collect();
    }
    let scope = |ip| if is_scoped(ip) { EntryScope::Own } else { EntryScope::All };
    let entry = |ip| PublishedEntry { fingerprint: Fingerprint::address(ip, netns), scope: scope(ip) };
    let mut addresses: Vec<PublishedEntry> = here.into_iter().map(entry).collect();
    for list in [&mut listeners, &mut addresses] {
        list.sort_unstable();
        list.dedup();
    }
    let service = service_of(transport, local.port())?;
    let is_member = socket.origin == Origin::Host && socket.state == SocketState::Grouped;
    let member = is_member.then_some(socket.cookie);
    Ok(Publication {
        domain,
        listeners,
        forwarded: Vec::new(),
        addresses,
        service,
        netns: socket.namespace(),
        member,
        shown: None,
    })
}

/// Where a listener is listed. Datagrams come from elsewhere only to an address that the operator lists.
fn listener_scope(ip: IpAddr, socket: &SocketFacts, networks: &Networks) -> EntryScope {
    match socket.transport {
        Transport::Tcp if is_scoped(ip) => EntryScope::Own,
        Transport::Tcp => EntryScope::All,
        Transport::Udp if networks.has(socket.namespace(), ip) => EntryScope::All,
        Transport::Udp => EntryScope::Own,
    }
}
