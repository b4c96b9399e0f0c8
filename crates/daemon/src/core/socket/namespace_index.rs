//! In which network namespaces something is: a listener at an address, or a program that has an address.

use std::collections::{BTreeMap, HashMap};

use partywall_protocol::directory::Fingerprint;

use super::NamespaceId;

/// For each fingerprint, the network namespaces with publications that have it, and the number of these.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(in crate::core) struct NamespaceIndex(HashMap<Fingerprint, BTreeMap<NamespaceId, u32>>);

impl NamespaceIndex {
    pub(in crate::core) fn add(&mut self, of: Fingerprint, at: NamespaceId) {
        *self.0.entry(of).or_default().entry(at).or_default() += 1;
    }

    pub(super) fn remove(&mut self, of: Fingerprint, at: NamespaceId) {
        let Some(all) = self.0.get_mut(&of) else { return };
        if let Some(count) = all.get_mut(&at) {
            *count -= 1;
            if *count == 0 {
                all.remove(&at);
            }
        }
        if all.is_empty() {
            self.0.remove(&of);
        }
    }

    pub(super) fn has(&self, of: Fingerprint, at: NamespaceId) -> bool {
        self.0.get(&of).is_some_and(|all| all.contains_key(&at))
    }

    /// The namespaces, those of one machine beside each other.
    pub(super) fn of(&self, of: Fingerprint) -> impl Iterator<Item = NamespaceId> {
        self.0.get(&of).into_iter().flat_map(BTreeMap::keys).copied()
    }
}
