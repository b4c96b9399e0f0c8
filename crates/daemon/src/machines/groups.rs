//! The windows of groups (protocol J2): their files, and which machines they are for.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;

use partywall_protocol::window::DATA_OFFSET;
use partywall_protocol::wire::{MachineId, Name, Origin};
use partywall_region::RegionError;
use partywall_region::pmem::{WindowFile, WindowSpec};
use partywall_shm::group::{CONTROL, SEATS};
use partywall_vm::{WindowDevice, WindowRole};

use crate::core::{MachineNews, Membership};
use crate::policy::GroupEntry;

/// The files, which live as long as somebody has them open.
#[derive(Debug, Default)]
pub(crate) struct GroupWindows {
    entries: Vec<GroupEntry>,
    files: BTreeMap<Membership, (Origin, WindowFile)>,
}

impl GroupWindows {
    /// Makes those of the host's domains, and says what the core is to know of them. Those of machines come with the machines. In a group
    /// without machines there are none: each seat has separate memory, out of which its owner cannot take pages (protocol J3.7).
    pub(crate) fn open(entries: &[GroupEntry]) -> Result<(Self, Vec<MachineNews<OwnedFd>>), RegionError> {
        let mut this = Self { entries: entries.to_vec(), files: BTreeMap::new() };
        let news = this.create(Origin::Host, |_, machine| !machine)?;
        Ok((this, news))
    }

    /// Whether any machine is a member of any.
    pub(crate) fn has_machines(&self) -> bool {
        self.entries.iter().flat_map(|group| &group.members).any(|(_, machine)| *machine)
    }

    /// Makes those of a machine.
    pub(super) fn add(&mut self, machine: MachineId, name: &Name) -> Result<Vec<MachineNews<OwnedFd>>, RegionError> {
        self.create(machine.into(), |member, is_machine| is_machine && member == name)
    }

    fn create(
        &mut self,
        owner: Origin,
        whose: impl Fn(&Name, bool) -> bool,
    ) -> Result<Vec<MachineNews<OwnedFd>>, RegionError> {
        let mut news = Vec::new();
        for (group, entry) in self.entries.iter().enumerate() {
            for (member, (name, is_machine)) in entry.members.iter().enumerate() {
                if !whose(name, *is_machine) {
                    continue;
                }
                let room = entry.room.saturating_add(SEATS as u64 * CONTROL);
                let spec = WindowSpec { room, owner: name.to_string(), peer: entry.name.to_string() };
                let of = Membership { group, member };
                if entry.members.iter().all(|(_, is_machine)| !is_machine) {
                    news.push(MachineNews::GroupRoom { of, size: spec.file_size()? - DATA_OFFSET });
                    continue;
                }
                let file = WindowFile::create(&spec)?;
                let (memory, reader, size) = (file.writer()?, file.reader()?, file.window()?.size());
                news.push(MachineNews::GroupWindow { of, owner, memory, reader, size });
                self.files.insert(of, (owner, file));
            }
        }
        Ok(news)
    }

    /// Those that a machine is to see, and as what.
    pub(super) fn of(&self, machine: MachineId, name: &Name) -> Vec<(Membership, WindowRole, WindowDevice)> {
        let is_member = |of: &Membership| {
            self.entries.get(of.group).is_some_and(|group| group.members.iter().any(|(n, m)| *m && n == name))
        };
        let seen = self.files.iter().filter(|(of, _)| is_member(of));
        seen.map(|(of, (owner, file))| {
            (*of, if *owner == machine.into() { WindowRole::Owner } else { WindowRole::Peer }, WindowDevice::of(file))
        })
        .collect()
    }

    /// Whether this one is a machine's own.
    pub(super) fn is_of(&self, of: Membership, machine: MachineId) -> bool {
        self.files.get(&of).is_some_and(|(owner, _)| *owner == machine.into())
    }

    /// Name of the member, for people.
    pub(super) fn member(&self, of: Membership) -> String {
        let entry = self.entries.get(of.group);
        let named = entry.and_then(|group| Some((&group.name, &group.members.get(of.member)?.0)));
        named.map(|(group, member)| format!("{member} in {group}")).unwrap_or_default()
    }

    /// A descriptor of it that cannot be written through.
    pub(super) fn reader(&self, of: Membership) -> Option<OwnedFd> {
        self.files.get(&of)?.1.reader().ok()
    }

    /// Releases a machine's windows.
    pub(super) fn close(&mut self, machine: MachineId) {
        self.files.retain(|_, (owner, _)| *owner != machine.into());
    }
}
