//! Connections whose destination is translated on the way to a listener, as the operator lists them (protocol T1.12).
//!
//! A listener is listed at the addresses that are forwarded to it as well, so that a client that connects to one of these offers a ring. The
//! accepting side shows where it listens, and the sequence numbers decide, as for a translated connecting end
//! ([`super::translated`]).

use std::net::SocketAddr;

use partywall_protocol::directory::{DirectoryChange, Fingerprint, Transport};

use super::publish::{EntryScope, Publication, PublishedEntry};
use crate::core::{Core, Descriptor};

impl<F: Descriptor> Core<F> {
    /// Where connections to this address lead, as the operator says; `None` if it is not forwarded.
    pub(super) fn forwarded(&self, address: SocketAddr) -> Option<SocketAddr> {
        let address = SocketAddr::new(address.ip().to_canonical(), address.port());
        let forward = self.policy.forwards().iter().find(|forward| forward.addresses.contains(&address));
        forward.map(|forward| forward.to)
    }

    /// The entries of a publication for the addresses that are forwarded to its listeners.
    pub(super) fn forwarded_to(&self, listeners: &[PublishedEntry]) -> Vec<PublishedEntry> {
        // The policy refuses loopback and link-local addresses, so no namespace is needed.
        let at = |address: SocketAddr| Fingerprint::listener(Transport::Tcp, address, 0);
        let leads_here = |to: Fingerprint| listeners.iter().any(|listener| listener.fingerprint == to);
        let forwards = self.policy.forwards().iter().filter(|forward| leads_here(at(forward.to)));
        let addresses = forwards.flat_map(|forward| &forward.addresses);
        addresses.map(|address| PublishedEntry { fingerprint: at(*address), scope: EntryScope::All }).collect()
    }

    /// After a change of the policy: listeners are listed at the addresses that are forwarded to them now, as far as there is room.
    pub(in crate::core) fn list_forwarded_again(&mut self) {
        let keys: Vec<u64> = self.sockets.publications.keys().copied().collect();
        // Entries that go make room for those that come.
        for are_added in [false, true] {
            for key in &keys {
                let Some(publication) = self.sockets.publications.get(key) else { continue };
                let mut wanted = self.forwarded_to(&publication.listeners);
                if !are_added {
                    wanted.retain(|entry| publication.forwarded.contains(entry));
                }
                if wanted == publication.forwarded {
                    continue;
                }
                let now = publication.with_forwarded(wanted);
                if self.may_list(&now, publication.entries()).is_ok() {
                    self.set_forwarded(*key, now);
                }
            }
        }
    }

    /// Lists a publication at other forwarded addresses, and leaves its other entries as they are.
    fn set_forwarded(&mut self, key: u64, now: Publication) {
        let more = now.forwarded.len();
        self.count_entries(&now, |count| count + more);
        self.show(&now.forwarded_alone(), DirectoryChange::Address, DirectoryChange::Listener);
        if let Some(before) = self.sockets.publications.insert(key, now) {
            let fewer = before.forwarded.len();
            self.count_entries(&before, |count| count - fewer);
            self.show(&before.forwarded_alone(), DirectoryChange::NoAddress, DirectoryChange::NoListener);
        }
    }
}
