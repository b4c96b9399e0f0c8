//! Connections whose destination is translated on the way to a listener, as the operator lists them (protocol T1.12).
//!
//! A listener is listed at the addresses that are forwarded to it as well, so that who connects to one of these offers a ring. The
//! accepting side shows where it listens, and the sequence numbers decide, as for a translated connecting end
//! ([`super::translated`]).

use std::net::SocketAddr;

use partywall_protocol::directory::{Fingerprint, Transport};

use super::publish::{EntryScope, PublishedEntry};
use crate::core::{Core, Descriptor};

impl<F: Descriptor> Core<F> {
    /// Where the accepting side of a connection to this address listens, as far as the operator says.
    pub(super) fn accepted_at(&self, remote: SocketAddr) -> SocketAddr {
        let remote = SocketAddr::new(remote.ip().to_canonical(), remote.port());
        let forward = self.policy.forwards().iter().find(|forward| forward.addresses.contains(&remote));
        forward.map_or(remote, |forward| forward.to)
    }

    /// The entries of a publication for the addresses that are forwarded to its listeners.
    pub(super) fn forwarded_to(&self, listeners: &[PublishedEntry]) -> Vec<PublishedEntry> {
        // None of these addresses means something else in each namespace.
        let at = |address: SocketAddr| Fingerprint::listener(Transport::Tcp, address, 0);
        let leads_here = |to: Fingerprint| listeners.iter().any(|listener| listener.fingerprint == to);
        let forwards = self.policy.forwards().iter().filter(|forward| leads_here(at(forward.to)));
        let addresses = forwards.flat_map(|forward| &forward.addresses);
        addresses.map(|address| PublishedEntry { fingerprint: at(*address), scope: EntryScope::All }).collect()
    }

    /// After a change of the policy: listeners are listed at the addresses that are forwarded to them now.
    pub(in crate::core) fn list_forwarded_again(&mut self) {
        let keys: Vec<u64> = self.sockets.publications.keys().copied().collect();
        for key in keys {
            let Some(before) = self.sockets.publications.get(&key) else { continue };
            let forwarded = self.forwarded_to(&before.listeners);
            if forwarded != before.forwarded {
                let now = before.with_forwarded(forwarded);
                self.list_again(key, now);
            }
        }
    }
}
