//! Sessions of programs in virtual machines, which the event loop reads itself. All sessions of one machine have one turn together, as all
//! sessions of a user of the host have by their reader (protocol C16.7).
//!
//! ```text
//!   the event loop's set:     listeners   reader of user A   reader of user B   machine 1   machine 2
//!                                                                                   |           |
//!   a set of each machine:                                         sessions 4, 5, 6, ..., 515   sessions 7, 21
//! ```
//!
//! The set of a machine is one event in the event loop's set, however many of its sessions are ready. The kernel reports the ready sessions of a
//! set in turn.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

use partywall_protocol::wire::MachineId;
use rustix::event::epoll::{self, EventData, EventFlags};

use super::BURST;
use crate::core::SessionId;

/// Epoll's names for the sets of machines have this bit. Sessions do not reach it, and names for readers have a higher one.
const MACHINE: u64 = 1 << 61;

/// The sessions of one machine.
#[derive(Debug)]
struct MachineSet {
    epoll: OwnedFd,
    sessions: usize,
    /// The machine has used up a share of the event loop's time, so its packets wait in the sockets.
    left_alone: bool,
}

/// The sessions of all machines.
#[derive(Debug, Default)]
pub(super) struct MachineTurns {
    machines: BTreeMap<MachineId, MachineSet>,
}

/// The machine that an epoll event is about; `None` if it is about something else.
pub(super) fn machine_of(data: u64) -> Option<MachineId> {
    if data & !u64::from(u32::MAX) != MACHINE {
        return None;
    }
    MachineId::new(data as u32)
}

impl MachineSet {
    fn begin(of_loop: BorrowedFd<'_>, machine: MachineId) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(of_loop, &epoll, data_of(machine), EventFlags::IN)?;
        Ok(Self { epoll, sessions: 0, left_alone: false })
    }

    /// Sets whether the event loop hears of it.
    fn leave(&mut self, of_loop: BorrowedFd<'_>, machine: MachineId, left_alone: bool) {
        if self.left_alone == left_alone {
            return;
        }
        self.left_alone = left_alone;
        let flags = if left_alone { EventFlags::empty() } else { EventFlags::IN };
        if let Err(error) = epoll::modify(of_loop, &self.epoll, data_of(machine), flags) {
            tracing::error!(%error, "cannot change whether the sessions of a machine are watched");
        }
    }
}

fn data_of(machine: MachineId) -> EventData {
    EventData::new_u64(MACHINE | u64::from(machine.get()))
}

impl MachineTurns {
    /// Watches the socket of a session of a machine.
    pub(super) fn add(
        &mut self,
        of_loop: BorrowedFd<'_>,
        machine: MachineId,
        session: SessionId,
        socket: &OwnedFd,
    ) -> io::Result<()> {
        let set = match self.machines.entry(machine) {
            Entry::Occupied(set) => set.into_mut(),
            Entry::Vacant(place) => place.insert(MachineSet::begin(of_loop, machine)?),
        };
        let added = epoll::add(&set.epoll, socket, EventData::new_u64(session.0), EventFlags::IN | EventFlags::RDHUP);
        // Before the error is returned: a set without sessions is not kept.
        set.sessions += 1;
        if added.is_err() {
            self.remove(machine);
        }
        Ok(added?)
    }

    /// A session of a machine has ended. The kernel takes its socket out of the set when the socket is closed.
    pub(super) fn remove(&mut self, machine: MachineId) {
        let Some(set) = self.machines.get_mut(&machine) else { return };
        set.sessions -= 1;
        if set.sessions == 0 {
            self.machines.remove(&machine);
        }
    }

    /// How many sessions a machine has here.
    pub(super) fn sessions(&self, machine: MachineId) -> usize {
        self.machines.get(&machine).map_or(0, |set| set.sessions)
    }

    /// The sessions whose turn it is, and what has happened on the socket of each.
    pub(super) fn ready(&self, machine: MachineId) -> Vec<(SessionId, EventFlags)> {
        let Some(set) = self.machines.get(&machine) else { return Vec::new() };
        let mut room = [MaybeUninit::uninit(); BURST];
        // It fails only if a signal comes first, and then the next turn looks again.
        let ready = epoll::wait(&set.epoll, &mut room, Some(&rustix::time::Timespec::default()));
        let Ok((events, _)) = ready else { return Vec::new() };
        // The event is packed; its fields are copied out before use.
        events.iter().map(|event| (SessionId({ event.data }.u64()), event.flags)).collect()
    }

    /// Leaves the packets of a machine where they are, until [`listen_to_all`](Self::listen_to_all).
    pub(super) fn leave_alone(&mut self, of_loop: BorrowedFd<'_>, machine: MachineId) {
        if let Some(set) = self.machines.get_mut(&machine) {
            set.leave(of_loop, machine, true);
        }
    }

    /// Hears of the packets of all machines again.
    pub(super) fn listen_to_all(&mut self, of_loop: BorrowedFd<'_>) {
        for (machine, set) in &mut self.machines {
            set.leave(of_loop, *machine, false);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::eventfd;
    use std::os::fd::AsFd as _;

    #[test]
    fn only_names_of_machines_are_machines() {
        assert_eq!(machine_of(data_of(MachineId::MIN).u64()), Some(MachineId::MIN));
        let of_others = [0, 7, u64::from(u32::MAX), MACHINE, (1 << 63) | 7, (3 << 62) | 7, u64::MAX];
        assert!(of_others.into_iter().all(|data| machine_of(data).is_none()));
    }

    #[test]
    fn set_of_machine_lasts_as_long_as_its_sessions() {
        let of_loop = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        let mut turns = MachineTurns::default();
        let socket = eventfd(1, rustix::event::EventfdFlags::CLOEXEC).unwrap();
        turns.add(of_loop.as_fd(), MachineId::MIN, SessionId(4), &socket).unwrap();
        // It is in the set already, so it cannot be added.
        assert!(turns.add(of_loop.as_fd(), MachineId::MIN, SessionId(5), &socket).is_err());
        assert_eq!(turns.ready(MachineId::MIN), [(SessionId(4), EventFlags::IN)]);
        turns.remove(MachineId::MIN);
        assert!(turns.machines.is_empty());
        // A regular file cannot be watched.
        let regular = tempfile::tempfile().unwrap().into();
        assert!(turns.add(of_loop.as_fd(), MachineId::MIN, SessionId(6), &regular).is_err());
        assert!(turns.machines.is_empty());
    }
}
