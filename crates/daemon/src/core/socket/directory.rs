//! The directory, as far as the core has to do with it: handing it out, and the policy in it (protocol T1, T6).

use partywall_protocol::directory::{DirectoryChange, Fingerprint, Terms};
use partywall_protocol::wire::{EventKind, MachineId, Message, Origin, Refusal, Text};

use super::publish::{EntryScope, Publication, PublishedEntry};
use crate::core::happened::Happened;
use crate::core::machine::DIRECTORY_BASE;
use crate::core::refuse::{Refuse, refuse};
use crate::core::{Action, Core, Descriptor, SessionId};
use crate::policy::SocketRules;

/// The visible part of a publication in one directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(in crate::core) struct Visible {
    /// The addresses at which programs under Partywall run are visible.
    addresses: bool,
    /// Where it listens.
    listeners: bool,
    /// It is the directory of the publication's own machine.
    is_own: bool,
}

impl Visible {
    fn changes(
        self,
        publication: &Publication,
        address: &impl Fn(Fingerprint) -> DirectoryChange,
        listener: &impl Fn(Fingerprint) -> DirectoryChange,
    ) -> Vec<DirectoryChange> {
        let is_shown = |entry: &&PublishedEntry| match entry.scope {
            EntryScope::Own => self.is_own,
            EntryScope::All => true,
        };
        let addresses = publication.addresses.iter().filter(|_| self.addresses).filter(is_shown);
        let listeners = publication.listed().filter(|_| self.listeners).filter(is_shown);
        // The addresses first: who finds the listener and connects must be known as a neighbour.
        let addresses = addresses.map(|entry| address(entry.fingerprint));
        addresses.chain(listeners.map(|entry| listener(entry.fingerprint))).collect()
    }
}

/// The visible part of each publication in each machine's directory.
#[derive(Debug)]
pub(in crate::core) struct Visibility(Vec<(MachineId, u64, Visible)>);

impl<F: Descriptor> Core<F> {
    /// The visibility in machines under the present policy.
    pub(in crate::core) fn visibility(&self) -> Visibility {
        let machines = self.machines.with_directory();
        let of = |machine: MachineId| {
            self.sockets.publications.iter().map(move |(key, of)| (machine, *key, self.visible(machine.into(), of)))
        };
        Visibility(machines.into_iter().flat_map(of).collect())
    }

    /// After a change of policy: shows what has become visible, and takes out what no longer is.
    pub(in crate::core) fn show_again(&mut self, before: &Visibility) {
        for (machine, key, was) in &before.0 {
            let Some(publication) = self.sockets.publications.get(key) else { continue };
            let is = self.visible((*machine).into(), publication);
            if is == *was {
                continue;
            }
            let mut changes = is.changes(publication, &DirectoryChange::Address, &DirectoryChange::Listener);
            changes.extend(was.changes(publication, &DirectoryChange::NoAddress, &DirectoryChange::NoListener));
            self.show_on((*machine).into(), changes);
        }
    }

    /// Gives the core a descriptor of the directory's memory, for clients; it has none before. Returns the initial changes to write
    /// there.
    pub fn set_directory(&mut self, directory: F) -> Vec<Action<F>> {
        self.directory = Some(directory);
        self.publish_policy();
        std::mem::take(&mut self.actions)
    }

    pub(in crate::core) fn directory(&mut self, id: SessionId, request: u32) -> Result<(), Refuse> {
        if let Some(Origin::Machine(machine)) = self.sessions.get(&id).map(|session| session.peer.origin()) {
            let window = self.machines.directory_window(machine)?;
            let message = Message::DirectoryIs { base: DIRECTORY_BASE, size: partywall_protocol::directory::SIZE };
            self.send_with(id, request, message, vec![window]);
            return Ok(());
        }
        let Some(directory) = self.directory.clone() else {
            return refuse(Refusal::OutOfResources, "this broker has no directory");
        };
        let message = Message::DirectoryIs { base: 0, size: partywall_protocol::directory::SIZE };
        self.actions.push(Action::Send { session: id, request, message, descriptors: vec![directory] });
        Ok(())
    }

    /// The move rules that hold: the administrator's, or the file's.
    fn sockets_policy(&self) -> &SocketRules {
        self.live_policy.as_ref().unwrap_or_else(|| self.policy.sockets())
    }

    /// The policy as a change of a directory.
    fn policy_change(&self) -> DirectoryChange {
        let SocketRules { terms, clauses, .. } = self.sockets_policy();
        let terms = Terms { lists_programs: self.policy.lists_programs(), ..*terms };
        DirectoryChange::Policy { terms, clauses: clauses.clone() }
    }

    /// Writes the move rules that hold into the directory.
    pub(in crate::core) fn publish_policy(&mut self) {
        let change = self.policy_change();
        for machine in self.machines.with_directory() {
            self.actions.push(Action::MachineDirectory { machine, change: change.clone() });
        }
        self.actions.push(Action::Directory(change));
    }

    /// Writes a publication into every directory in which it is visible: its machine's directory, and if it is reachable from elsewhere,
    /// the host's and those of machines that the policy may let connect there.
    pub(super) fn show(
        &mut self,
        publication: &Publication,
        address: impl Fn(Fingerprint) -> DirectoryChange,
        listener: impl Fn(Fingerprint) -> DirectoryChange,
    ) {
        let machines = self.machines.with_directory();
        for to in machines.into_iter().map(Origin::Machine).chain([Origin::Host]) {
            let visible = self.visible(to, publication);
            self.show_on(to, visible.changes(publication, &address, &listener));
        }
    }

    /// The part of a publication that is visible there.
    fn visible(&self, to: Origin, publication: &Publication) -> Visible {
        let machine = match to {
            near if near == publication.netns.origin => {
                return Visible { addresses: true, listeners: true, is_own: true };
            }
            // One directory for all users of the host. Programs of administrators alone meet those of machines, whatever rules say.
            Origin::Host => return Visible { addresses: true, listeners: true, is_own: false },
            Origin::Machine(machine) => machine,
        };
        let Some((name, of)) = self.machines.name(machine).zip(self.name_of(publication.domain)) else {
            return Visible::default();
        };
        let listeners = self.policy.machine_may_reach(name, &of, &publication.service);
        Visible { addresses: listeners || self.policy.may_reach_machine(&of, name), listeners, is_own: false }
    }

    /// Makes changes of one directory.
    pub(super) fn show_on(&mut self, to: Origin, changes: Vec<DirectoryChange>) {
        match to {
            Origin::Host => self.actions.extend(changes.into_iter().map(Action::Directory)),
            Origin::Machine(machine) if self.machines.has_directory(machine) => {
                self.actions.extend(changes.into_iter().map(|change| Action::MachineDirectory { machine, change }));
            }
            Origin::Machine(_) => {}
        }
    }

    /// Begins the directory of a machine, as soon as its window from the host has the memory.
    pub(in crate::core) fn begin_directory(&mut self, machine: MachineId) {
        let Some(window) = self.machines.begin_directory(machine) else { return };
        self.actions.push(Action::BeginDirectory { machine, window, base: DIRECTORY_BASE });
        let mut changes = vec![self.policy_change()];
        changes.extend(self.may_translate().then(|| DirectoryChange::Address(Fingerprint::translators())));
        for publication in self.sockets.publications.values() {
            let visible = self.visible(machine.into(), publication);
            changes.extend(visible.changes(publication, &DirectoryChange::Address, &DirectoryChange::Listener));
        }
        self.show_on(machine.into(), changes);
    }

    pub(in crate::core) fn get_move_rules(&mut self, id: SessionId, request: u32) {
        let policy = self.sockets_policy();
        let message = Message::MoveRulesAre {
            live: self.live_policy.is_some(),
            clauses: Text(policy.to_string()),
            ring_size: policy.terms.ring_size,
            spin_us: policy.terms.spin_us,
        };
        self.send(id, request, message);
    }

    pub(in crate::core) fn set_move_rules(
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
            let reason = format!("only administrators set the move rules, and {} is none", peer.user);
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
        tracing::info!(by = %name, user = %peer.user, moves = %self.sockets_policy(), reset, "the move rules were set");
        let happened =
            Happened { from: name.to_string(), grounds: self.sockets_policy().to_string(), ..Happened::default() };
        self.record(EventKind::MovesChanged, peer.user, peer.pid, 0, happened);
        self.publish_policy();
        self.get_move_rules(id, request);
        Ok(())
    }
}
