//! The windows of groups (protocol J2): their files, and which machines they are for.
//!
//! The next broker uses the files again, so that machines need no further devices for them. It does so only where everything that has a
//! window as a device may have it: the group has the same members, and behind the name of each machine is the same machine.

use std::collections::BTreeMap;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;

use partywall_protocol::window::{DATA_OFFSET, WindowId};
use partywall_protocol::wire::{MachineId, Name, Origin};
use partywall_region::RegionError;
use partywall_region::pmem::{WindowFile, WindowSpec, WindowTrace};
use partywall_shm::group::{CONTROL, SEATS};
use partywall_vm::{WindowDevice, WindowRole};

use super::state::{self, AttachmentRecord, GroupWindowRecord};
use super::store;
use crate::core::{MachineNews, Membership};
use crate::policy::{GroupEntry, MachineEntry};

/// The files of the windows, which exist while a process has them open.
#[derive(Debug, Default)]
pub(crate) struct GroupWindows {
    entries: Vec<GroupEntry>,
    files: BTreeMap<Membership, (Origin, WindowFile)>,
    /// Windows of the last broker that were not used again yet, and the machines that it had.
    left: BTreeMap<Membership, WindowTrace>,
    machines: Vec<AttachmentRecord>,
}

impl GroupWindows {
    /// Makes the windows of the host's domains, and returns the news for the core. Windows of machines are made with the machines. In a
    /// group without machines there are none: each seat has separate memory, from which its owner cannot remove pages (protocol J3.7).
    ///
    /// Those that the last broker of this socket has made are used again, unless one of its machines is another one by `machines`, the
    /// operator's file.
    pub(crate) fn open(
        entries: &[GroupEntry],
        machines: &[MachineEntry],
        socket: &Path,
    ) -> Result<(Self, Vec<MachineNews<OwnedFd>>), RegionError> {
        let mut this = Self { entries: entries.to_vec(), ..Self::default() };
        if this.has_machines() {
            let remembered = state::remembered(socket);
            this.left = usable(entries, machines, &remembered.machines, &remembered.groups);
            this.machines = remembered.machines;
        }
        let news = this.create(Origin::Host, &[], |_, machine| !machine)?;
        Ok((this, news))
    }

    /// Every machine of the last broker has been looked for. One that comes later may be another machine behind the same name, while the
    /// earlier one still has the windows.
    pub(super) fn settle(&mut self) {
        self.left.clear();
        self.machines.clear();
    }

    /// Whether any machine is a member of any.
    pub(crate) fn has_machines(&self) -> bool {
        self.entries.iter().flat_map(|group| &group.members).any(|(_, machine)| *machine)
    }

    /// Makes those of a machine, or uses those again that it had with the last broker, behind the same monitor.
    pub(super) fn add(
        &mut self,
        machine: MachineId,
        name: &Name,
        monitor: &str,
    ) -> Result<Vec<MachineNews<OwnedFd>>, RegionError> {
        let is_known = self.machines.iter().any(|known| known.name == name.as_str() && known.monitor == monitor);
        if !is_known {
            // It is not the machine that had them, and that one may still write them.
            let entries = &self.entries;
            self.left.retain(|of, _| !entries[of.group].members.get(of.member).is_some_and(|(n, m)| *m && n == name));
        }
        self.create(machine.into(), &[monitor], |member, is_machine| is_machine && member == name)
    }

    fn create(
        &mut self,
        owner: Origin,
        monitors: &[&str],
        whose: impl Fn(&Name, bool) -> bool,
    ) -> Result<Vec<MachineNews<OwnedFd>>, RegionError> {
        let mut news = Vec::new();
        let Self { entries, files, left, machines } = self;
        for (group, entry) in entries.iter().enumerate() {
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
                // All members have it open.
                let is_member = |known: &&AttachmentRecord| {
                    entry.members.iter().any(|(name, machine)| *machine && name.as_str() == known.name)
                };
                let of_members = machines.iter().filter(is_member).map(|known| known.monitor.as_str());
                let monitors: Vec<&str> = monitors.iter().copied().chain(of_members).collect();
                let size = spec.file_size()?;
                let found = left.remove(&of).and_then(|trace| state::find_again(trace, size, &monitors));
                let (file, in_use) = match found {
                    Some(found) => found,
                    None => (WindowFile::create(&spec)?, Vec::new()),
                };
                store::give_up(file.id());
                store::keep(file.id(), file.as_fd());
                let (memory, reader, size) = (file.writer()?, file.reader()?, file.window()?.size());
                news.push(MachineNews::GroupWindow { of, owner, memory, reader, size, in_use });
                files.insert(of, (owner, file));
            }
        }
        Ok(news)
    }

    /// The windows that a machine sees, with its role in each.
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

    /// The ids of all that there are.
    pub(super) fn ids(&self) -> impl Iterator<Item = WindowId> {
        self.files.values().map(|(_, file)| file.id())
    }

    /// All of them, by what the next broker finds their files by.
    pub(super) fn records(&self) -> Vec<GroupWindowRecord> {
        let record = |(of, (_, file)): (&Membership, &(Origin, WindowFile))| {
            let (entry, trace) = (self.entries.get(of.group)?, file.trace().ok()?);
            let WindowTrace { id, inode, size } = trace;
            let (group, members, id) = (entry.name.to_string(), named(entry), id.to_string());
            Some(GroupWindowRecord { group, members, member: of.member, id, inode, size })
        };
        self.files.iter().filter_map(record).collect()
    }

    /// Releases a machine's windows.
    pub(super) fn close(&mut self, machine: MachineId) {
        self.files.retain(|_, (owner, file)| {
            let stays = *owner != machine.into();
            if !stays {
                store::give_up(file.id());
            }
            stays
        });
    }
}

fn named(entry: &GroupEntry) -> Vec<(String, bool)> {
    entry.members.iter().map(|(name, machine)| (name.to_string(), *machine)).collect()
}

/// The windows of the last broker that only members of today's groups can see. A window stays a device of each machine that has it, whatever
/// the operator's file says now.
fn usable(
    entries: &[GroupEntry],
    machines: &[MachineEntry],
    remembered: &[AttachmentRecord],
    groups: &[GroupWindowRecord],
) -> BTreeMap<Membership, WindowTrace> {
    let is_other = |name: &str| {
        let now = machines.iter().find(|now| now.name == name);
        now.is_some_and(|now| remembered.iter().any(|before| before.name == name && before.monitor != now.monitor))
    };
    let usable = |record: &GroupWindowRecord| {
        let group = entries.iter().position(|entry| entry.name.as_str() == record.group)?;
        let is_same = named(&entries[group]) == record.members;
        let is_other = record.members.iter().any(|(name, machine)| *machine && is_other(name));
        let trace = WindowTrace { id: record.id.parse().ok()?, inode: record.inode, size: record.size };
        (is_same && !is_other).then_some((Membership { group, member: record.member }, trace))
    };
    groups.iter().filter_map(usable).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(group: &str, machines: &[&str]) -> GroupEntry {
        let name = |name: &str| Name::new(name).unwrap();
        let machines = machines.iter().map(|machine| (name(machine), true));
        GroupEntry { name: name(group), members: machines.chain([(name("web"), false)]).collect(), room: 1 << 20 }
    }

    fn machine(name: &str, monitor: &str) -> AttachmentRecord {
        let (name, monitor) = (name.to_owned(), monitor.to_owned());
        AttachmentRecord { name, monitor, port: String::new(), room: 0, migratable: false }
    }

    #[test]
    fn windows_are_used_again_only_where_the_same_machines_see_them() {
        let pool = entry("pool", &["a", "b"]);
        let record = GroupWindowRecord {
            group: "pool".into(),
            members: named(&pool),
            member: 2,
            id: "01".repeat(16),
            inode: 7,
            size: 8 << 20,
        };
        let remembered = [machine("a", "/run/a.qmp"), machine("b", "/run/b.qmp")];
        let configured = |name: &str, monitor: &str| MachineEntry {
            name: name.into(),
            monitor: monitor.into(),
            port: String::new(),
            room: 0,
            migratable: false,
        };
        let used = |entries: &[GroupEntry], machines: &[MachineEntry], record: &GroupWindowRecord| {
            usable(entries, machines, &remembered, std::slice::from_ref(record)).keys().copied().collect::<Vec<_>>()
        };
        let here = |group| [Membership { group, member: 2 }];
        let entries = [entry("other", &["a"]), pool.clone()];
        assert_eq!(used(&entries, &[], &record), here(1), "the group has another place in the file");
        assert_eq!(used(&entries, &[configured("a", "/run/a.qmp"), configured("c", "/run/c.qmp")], &record), here(1));
        assert_eq!(used(&entries, &[configured("b", "/run/other.qmp")], &record), [], "another machine of this name");
        assert_eq!(used(&[entry("pool", &["a"])], &[], &record), [], "b is no member any more, and has the window");
        assert_eq!(used(&[entry("pool", &["a", "b", "c"])], &[], &record), [], "c is a member now");
        assert_eq!(used(&entries, &[], &GroupWindowRecord { id: "nonsense".into(), ..record }), []);
    }
}
