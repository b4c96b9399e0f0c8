//! The directory, as far as the core has to do with it: handing it out, and the policy in it (protocol T1, T6).

use partywall_protocol::directory::DirectoryChange;
use partywall_protocol::wire::{Message, Refusal, Text};

use crate::core::refuse::{Refuse, refuse};
use crate::core::{Action, Core, Descriptor, SessionId};
use crate::policy::SocketRules;

impl<F: Descriptor> Core<F> {
    /// Gives the core a handle on the directory's memory, for clients; it has none before. Says what is to be written there.
    pub fn set_directory(&mut self, directory: F) -> Vec<Action<F>> {
        self.directory = Some(directory);
        self.publish_policy();
        std::mem::take(&mut self.actions)
    }

    pub(in crate::core) fn directory(&mut self, id: SessionId, request: u32) -> Result<(), Refuse> {
        let Some(directory) = self.directory.clone() else {
            return refuse(Refusal::OutOfResources, "this broker has no directory");
        };
        let message = Message::DirectoryIs { size: partywall_protocol::directory::SIZE };
        self.actions.push(Action::Send { session: id, request, message, descriptors: vec![directory] });
        Ok(())
    }

    /// The policy for sockets that holds: the administrator's, or the file's.
    fn sockets_policy(&self) -> &SocketRules {
        self.live_policy.as_ref().unwrap_or_else(|| self.policy.sockets())
    }

    /// Writes the policy that holds into the directory.
    pub(in crate::core) fn publish_policy(&mut self) {
        let policy = self.sockets_policy();
        let change = DirectoryChange::Policy { terms: policy.terms, clauses: policy.clauses.clone() };
        self.actions.push(Action::Directory(change));
    }

    pub(in crate::core) fn get_policy(&mut self, id: SessionId, request: u32) {
        let policy = self.sockets_policy();
        let message = Message::PolicyIs {
            live: self.live_policy.is_some(),
            clauses: Text(policy.to_string()),
            ring_size: policy.terms.ring_size,
            spin_us: policy.terms.spin_us,
        };
        self.send(id, request, message);
    }

    pub(in crate::core) fn set_socket_policy(
        &mut self,
        id: SessionId,
        request: u32,
        reset: bool,
        clauses: &str,
        ring_size: u64,
        spin_us: u32,
    ) -> Result<(), Refuse> {
        let Some((_, domain, peer)) = self.member(id) else { return Ok(()) };
        if !self.policy.is_administrator(peer) {
            let reason = format!("only administrators set the policy, and {} is none", peer.user);
            return refuse(Refusal::Denied, reason);
        }
        let name = domain.name.clone();
        self.live_policy = if reset {
            None
        } else {
            let mut policy = self.sockets_policy().clone();
            policy.set_clauses(clauses).or_else(|e| refuse(Refusal::Protocol, e))?;
            if ring_size != 0 {
                policy.set_ring_size(ring_size).or_else(|e| refuse(Refusal::Protocol, e))?;
            }
            if spin_us != u32::MAX {
                policy.terms.spin_us = spin_us;
            }
            Some(policy)
        };
        tracing::info!(by = %name, user = %peer.user, policy = %self.sockets_policy(), reset, "the policy for sockets was set");
        self.publish_policy();
        self.get_policy(id, request);
        Ok(())
    }
}
