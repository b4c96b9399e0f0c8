//! Groups: members that see each other's windows at the same addresses, and the seats of the processes that take part (protocol J).
//!
//! ```text
//!   Group (name)  1 --- n  Member (a machine, or a domain of the host)  1 --- 1  Window  1 --- n  Seat --- of ---> a session
//! ```
//!
//! The operator defines the members. A seat is part of its member's window. Its place is reused only when all processes that took part
//! with the seat's process have confirmed that they read nothing of it any more.
//!
//! In a group with machines, a window is one file, which hypervisors map as a whole. In a group of the host alone, a window is a range of
//! addresses, and each seat's process brings sealed memory for it.

use std::collections::{BTreeMap, BTreeSet};

use partywall_protocol::wire::{GroupRow, MachineId, Message, Name, Origin, Refusal};
use partywall_shm::carve::Carve;
use partywall_shm::group::{CONTROL, MEMBERS, SEATS, address};
use partywall_shm::layout::PAGE;

use super::refuse::{Refuse, refuse};
use super::{Action, Core, Descriptor, SessionId};
use crate::credentials::Credentials;
use crate::policy::GroupEntry;

/// A member of a group, by their places in the operator's file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Membership {
    /// The place of the group in the file.
    pub group: usize,
    /// The index of the member.
    pub member: usize,
}

/// The file of a window.
#[derive(Debug)]
pub(super) struct WindowFiles<F> {
    /// For the member.
    pub(super) memory: F,
    /// For the others: it cannot be written through this.
    pub(super) reader: F,
}

#[derive(Debug)]
struct MemberWindow<F> {
    owner: Origin,
    /// `None`: each seat has separate memory.
    files: Option<WindowFiles<F>>,
    size: u64,
    carve: Carve,
    /// Seats that the last broker gave out, where each begins and its bytes: processes that took part then may still use them. They are kept
    /// until the window goes.
    kept: Vec<(u64, u64)>,
    /// Seats that were taken or have become free since the book was written: where, how many bytes, and whether somebody has it.
    changes: Vec<(u64, u64, bool)>,
    /// From where it is seen; from the host it always is.
    seen: BTreeSet<Origin>,
    /// The physical address of its header in each machine that has it as a device.
    places: BTreeMap<MachineId, u64>,
}

#[derive(Debug)]
struct Member<F> {
    name: Name,
    /// It is a virtual machine, and not a domain of the host.
    machine: bool,
    /// Windows that it has had.
    life: u32,
    window: Option<MemberWindow<F>>,
}

#[derive(Debug)]
struct SeatRecord<F> {
    key: u64,
    member: usize,
    life: u32,
    base: u64,
    size: u64,
    /// The memory that its process has brought for it, unless the seat is a part of the window's file.
    memory: Option<F>,
    /// `None` once its process is gone.
    session: Option<SessionId>,
    /// The seats of processes that may still read it.
    readers: BTreeSet<u64>,
}

impl<F: Descriptor> SeatRecord<F> {
    /// The news that there is this seat.
    fn told(&self, seat: usize) -> (Message, Vec<F>) {
        let brought: Vec<F> = self.memory.iter().cloned().collect();
        (self.message(seat, !brought.is_empty()), brought)
    }
}

impl<F> SeatRecord<F> {
    fn message(&self, seat: usize, memory: bool) -> Message {
        Message::SeatIs {
            key: self.key,
            // There are at most `SEATS` of them, and `MEMBERS` members.
            seat: seat as u8,
            member: self.member as u8,
            life: self.life,
            alive: self.session.is_some(),
            memory,
            base: self.base,
            size: self.size,
        }
    }
}

#[derive(Debug)]
struct GroupRecord<F> {
    name: Name,
    members: Vec<Member<F>>,
    seats: BTreeMap<usize, SeatRecord<F>>,
}

impl<F> GroupRecord<F> {
    fn seat_of(&self, session: SessionId) -> Option<(usize, &SeatRecord<F>)> {
        self.seats.iter().find(|(_, seat)| seat.session == Some(session)).map(|(place, seat)| (*place, seat))
    }

    fn live(&self) -> impl Iterator<Item = (usize, &SeatRecord<F>, SessionId)> {
        self.seats.iter().filter_map(|(place, seat)| Some((*place, seat, seat.session?)))
    }

    fn member_called(&self, name: &Name, machine: bool) -> Option<usize> {
        self.members.iter().position(|m| m.name == *name && m.machine == machine)
    }

    /// `reader` reads nothing any more of those that fit, which may free them.
    fn let_go(&mut self, reader: u64, of: impl Fn(&SeatRecord<F>) -> bool) {
        for seat in self.seats.values_mut().filter(|seat| of(seat)) {
            seat.readers.remove(&reader);
        }
        self.free();
    }

    /// Frees the seats of dead processes that no member reads.
    fn free(&mut self) {
        let members = &mut self.members;
        self.seats.retain(|_, seat| {
            let stays = seat.session.is_some() || !seat.readers.is_empty();
            if let (false, Some(member)) = (stays, members.get_mut(seat.member))
                && member.life == seat.life
                && let Some(window) = &mut member.window
            {
                window.carve.give_back(seat.base);
                window.changes.push((seat.base, seat.size, false));
            }
            stays
        });
    }
}

/// All of them.
#[derive(Debug)]
pub(super) struct Groups<F> {
    all: Vec<GroupRecord<F>>,
    next_key: u64,
}

impl<F> Groups<F> {
    /// No groups yet. Numbers of seats count up from the broker's instance, as those of channels do.
    pub(super) fn new(instance: u64) -> Self {
        Self { all: Vec::new(), next_key: instance + 1 }
    }

    fn member(&mut self, of: Membership) -> Option<&mut Member<F>> {
        self.all.get_mut(of.group)?.members.get_mut(of.member)
    }

    pub(super) fn window(&mut self, of: Membership, owner: Origin, files: Option<WindowFiles<F>>, size: u64) {
        if let Some(member) = self.member(of) {
            member.life = member.life.wrapping_add(1);
            let (carve, seen) = (Carve::new(PAGE, size), BTreeSet::from([Origin::Host]));
            let (kept, changes, places) = (Vec::new(), Vec::new(), BTreeMap::new());
            member.window = Some(MemberWindow { owner, files, size, carve, kept, changes, seen, places });
        }
    }

    /// Keeps seats of a window from everybody: processes that took part with the last broker may still use them (protocol J10.1).
    pub(super) fn keep_seats(&mut self, of: Membership, seats: &[(u64, u64)]) {
        if let Some(window) = self.member(of).and_then(|m| m.window.as_mut()) {
            for &(base, size) in seats {
                if window.carve.take_at(base, size) {
                    window.kept.push((base, size));
                }
            }
        }
    }

    pub(super) fn plugged(&mut self, machine: MachineId, of: Membership, place: u64) {
        if let Some(window) = self.member(of).and_then(|m| m.window.as_mut()) {
            window.places.insert(machine, place);
        }
    }

    /// Nothing is known of the machine's devices any more.
    pub(super) fn unplugged(&mut self, machine: MachineId) {
        for window in self.all.iter_mut().flat_map(|g| &mut g.members).filter_map(|m| m.window.as_mut()) {
            window.places.remove(&machine);
        }
    }

    pub(super) fn seen(&mut self, machine: MachineId, of: Membership) {
        if let Some(window) = self.member(of).and_then(|m| m.window.as_mut()) {
            window.seen.insert(machine.into());
        }
    }

    /// The machine is not known to be running, so it sees no window.
    pub(super) fn unseen(&mut self, machine: MachineId) {
        for window in self.all.iter_mut().flat_map(|g| &mut g.members).filter_map(|m| m.window.as_mut()) {
            window.seen.remove(&machine.into());
        }
    }

    /// Windows that there are of groups that a machine is a member of, and those of them that it sees.
    pub(super) fn windows_of(&self, machine: MachineId, name: &Name) -> (usize, usize) {
        let own = self.all.iter().filter(|group| group.member_called(name, true).is_some());
        let windows: Vec<&MemberWindow<F>> = own.flat_map(|g| &g.members).filter_map(|m| m.window.as_ref()).collect();
        (windows.len(), windows.iter().filter(|w| w.seen.contains(&machine.into())).count())
    }

    /// A member of the group that a session takes part in, with the group and its number. Refuses the session's `request` if there is none.
    fn member_beside(
        &self,
        session: SessionId,
        member: usize,
        request: &str,
    ) -> Result<(usize, &GroupRecord<F>, &Member<F>), Refuse> {
        let mut groups = self.all.iter().enumerate();
        let Some((number, group)) = groups.find(|(_, group)| group.seat_of(session).is_some()) else {
            return refuse(Refusal::Protocol, format!("{request} is for sessions that take part in a group"));
        };
        match group.members.get(member) {
            Some(found) => Ok((number, group, found)),
            None => refuse(Refusal::Protocol, format!("{} has no member {member}", group.name)),
        }
    }

    fn group_of(&mut self, session: SessionId) -> Option<&mut GroupRecord<F>> {
        self.all.iter_mut().find(|group| group.seat_of(session).is_some())
    }
}

#[cfg(any(test, feature = "invariants"))]
impl<F: Descriptor> Core<F> {
    /// Panics if seats contradict sessions, each other, or what is free of a window.
    pub(super) fn check_groups(&self) {
        let mut sessions = BTreeSet::new();
        for group in &self.groups.all {
            for (place, seat) in &group.seats {
                assert!(*place < SEATS && seat.key < self.groups.next_key);
                match seat.session {
                    Some(session) => {
                        assert!(self.sessions[&session].domain.is_some() && sessions.insert(session));
                        assert!(seat.readers.is_empty());
                    }
                    None => assert!(!seat.readers.is_empty(), "a seat that nobody needs"),
                }
                let alive = |key: &u64| group.live().any(|(_, other, _)| other.key == *key);
                assert!(seat.readers.iter().all(alive), "the dead read nothing");
            }
            for (m, member) in group.members.iter().enumerate() {
                let Some(window) = &member.window else { continue };
                let seats = group.seats.values().filter(|seat| seat.member == m && seat.life == member.life);
                let mut taken: Vec<(u64, u64)> = seats.map(|seat| (seat.base, seat.base + seat.size)).collect();
                taken.extend(window.kept.iter().map(|(base, size)| (*base, base + size)));
                taken.sort_unstable();
                assert!(taken.windows(2).all(|two| two[0].1 <= two[1].0), "seats overlap");
                let used: u64 = taken.iter().map(|(from, to)| to - from).sum();
                assert_eq!(window.carve.free() + used, window.size - PAGE);
            }
        }
    }
}

impl<F: Descriptor> Core<F> {
    /// Has the books of group windows written, where seats have changed hands.
    pub(super) fn keep_books_of_groups(&mut self) {
        let members = self.groups.all.iter_mut().flat_map(|group| &mut group.members);
        for window in members.filter_map(|member| member.window.as_mut()) {
            let changes = window.changes.drain(..);
            // Seats with separate memory are in no file.
            if let Some(files) = &window.files {
                for (base, size, in_use) in changes {
                    self.actions.push(Action::Book { window: files.memory.clone(), base, size, in_use });
                }
            }
        }
    }

    /// Sets the groups. Their windows follow later.
    pub fn set_groups(&mut self, entries: &[GroupEntry]) {
        let member =
            |(name, machine): &(Name, bool)| Member { name: name.clone(), machine: *machine, life: 0, window: None };
        self.groups.all = entries
            .iter()
            .map(|entry| GroupRecord {
                name: entry.name.clone(),
                members: entry.members.iter().map(member).collect(),
                seats: BTreeMap::new(),
            })
            .collect();
    }

    pub(super) fn join_group(
        &mut self,
        id: SessionId,
        request: u32,
        room: u64,
        name: &str,
        brought: Vec<F>,
    ) -> Result<(), Refuse> {
        let Some((_, domain, peer)) = self.member(id) else { return Ok(()) };
        let here = peer.origin();
        let Some(me) = self.member_name(peer, &domain.name).cloned() else {
            return Ok(());
        };
        if self.groups.group_of(id).is_some() {
            return refuse(Refusal::Protocol, "this session takes part in a group already; open another one");
        }
        let key = self.groups.next_key;
        let found = self.groups.all.iter_mut().find(|g| g.name.as_str() == name);
        let found = found.and_then(|group| Some((group.member_called(&me, here != Origin::Host)?, group)));
        let Some((member, group)) = found else {
            return refuse(Refusal::Denied, format!("there is no group {name} of which {me} is a member"));
        };
        let Some(place) = (0..SEATS).find(|place| !group.seats.contains_key(place)) else {
            return refuse(Refusal::Quota, format!("{SEATS} processes take part in {name}, as many as can"));
        };
        let Some(Member { life, window: Some(window), .. }) = group.members.get_mut(member) else {
            return refuse(Refusal::Machine, format!("{me} has no window for {name} yet"));
        };
        if !window.seen.contains(&here) {
            return refuse(
                Refusal::Machine,
                format!("{me} does not see its own window for {name} yet; try again soon"),
            );
        }
        let room =
            if room == u64::MAX { (window.size - PAGE).saturating_sub(SEATS as u64 * CONTROL) / 4 } else { room };
        let size = room.checked_next_multiple_of(PAGE).and_then(|room| room.checked_add(CONTROL));
        let memory = brought.into_iter().next();
        match (&window.files, &memory) {
            (Some(_), None) => {}
            (Some(_), Some(_)) => return refuse(Refusal::Protocol, format!("seats of {name} are parts of a window")),
            (None, Some(memory)) => {
                memory.check_seat(size.unwrap_or(u64::MAX)).or_else(|e| refuse(Refusal::BadRegion, e))?;
            }
            // A request for too much is refused below, with what is free.
            (None, None) if size.is_none_or(|size| size > window.size) => {}
            (None, None) => return refuse(Refusal::Protocol, format!("each seat of {name} brings separate memory")),
        }
        let Some((size, base)) = size.and_then(|size| Some((size, window.carve.take(size)?))) else {
            let left = window.carve.free();
            let mut reason = format!("{me} has no {room} bytes for buffers in one piece in {name}; {left} are free");
            let kept: u64 = window.kept.iter().map(|(_, size)| size).sum();
            if kept > 0 {
                reason.push_str(&format!("; {kept} bytes are kept for processes that took part with the last broker"));
            }
            return refuse(Refusal::OutOfResources, reason);
        };
        if window.files.is_some() {
            window.changes.push((base, size, true));
        }
        self.groups.next_key += 1;
        let seat =
            SeatRecord { key, member, life: *life, base, size, memory, session: Some(id), readers: BTreeSet::new() };
        if self.log.allows(peer.user, self.now) {
            tracing::info!(group = name, member = %me, seat = place, pid = peer.pid, "takes part");
        }
        // The others hear of it before it can give them anything.
        let ((told, memory), members) = (seat.told(place), group.members.len() as u8);
        let to_others: Vec<SessionId> = group.live().map(|(.., session)| session).collect();
        let of_others: Vec<(Message, Vec<F>)> = group.live().map(|(place, seat, _)| seat.told(place)).collect();
        group.seats.insert(place, seat);
        let joined = Message::GroupJoined { key, seat: place as u8, member: member as u8, members, base, size };
        to_others.into_iter().for_each(|other| self.send_with(other, 0, told.clone(), memory.clone()));
        of_others.into_iter().for_each(|(other, memory)| self.send_with(id, 0, other, memory));
        self.send(id, request, joined);
        Ok(())
    }

    /// The name of a process as a member of groups: its domain on the host, or its machine.
    fn member_name<'a>(&'a self, peer: Credentials, domain: &'a Name) -> Option<&'a Name> {
        match peer.origin() {
            Origin::Host => Some(domain),
            Origin::Machine(machine) => self.machines.name(machine),
        }
    }

    pub(super) fn group_window(&mut self, id: SessionId, request: u32, member: u8) -> Result<(), Refuse> {
        let Some((_, _, peer)) = self.member(id) else { return Ok(()) };
        let here = peer.origin();
        let asked = usize::from(member);
        let (number, group, Member { name, life, window, .. }) = self.groups.member_beside(id, asked, "GroupWindow")?;
        let own = group.seat_of(id).is_some_and(|(_, seat)| seat.member == asked);
        match window {
            Some(window @ MemberWindow { files: Some(files), .. }) if window.seen.contains(&here) => {
                let memory = if own { &files.memory } else { &files.reader };
                let (life, address, size) = (*life, address(number, asked), window.size);
                let message = Message::GroupWindowIs { life, address, size, own, name: name.to_string() };
                let memory = memory.clone();
                self.send_with(id, request, message, vec![memory]);
                Ok(())
            }
            _ => refuse(Refusal::Machine, format!("the window of {name} is not there, or not seen from here yet")),
        }
    }

    /// Says where a machine has a window (protocol J11).
    pub(super) fn group_place(&mut self, id: SessionId, request: u32, member: u8, machine: &str) -> Result<(), Refuse> {
        let Some((_, _, peer)) = self.member(id) else { return Ok(()) };
        if peer.origin() != Origin::Host {
            return refuse(Refusal::Denied, "GroupPlace is for processes of the host");
        }
        let asked = usize::from(member);
        let (number, group, asked_member) = self.groups.member_beside(id, asked, "GroupPlace")?;
        let Member { name, machine: is_machine, life, window } = asked_member;
        if !group.members.iter().any(|m| m.machine && m.name.as_str() == machine) {
            return refuse(Refusal::Denied, format!("no machine {machine} is a member of {}", group.name));
        }
        let place = window.as_ref().and_then(|window| {
            let found =
                window.places.iter().find(|(id, _)| self.machines.name(**id).is_some_and(|n| n.as_str() == machine));
            Some((window.size, *found?.1))
        });
        let Some((size, place)) = place else {
            return refuse(Refusal::Machine, format!("{machine} does not have the window of {name}"));
        };
        let (life, address, host) = (*life, address(number, asked), !is_machine);
        self.send(id, request, Message::GroupPlaceIs { life, address, size, place, host });
        Ok(())
    }

    /// Sends a seat with its memory to a process that could not receive or map it when it was told of the seat.
    pub(super) fn fetch_seat(&mut self, id: SessionId, request: u32, key: u64) -> Result<(), Refuse> {
        let group = self.groups.group_of(id);
        let seat = group.and_then(|group| group.seats.iter().find(|(_, seat)| seat.key == key));
        let Some((place, seat)) = seat.filter(|(_, seat)| seat.memory.is_some()) else {
            return refuse(
                Refusal::Protocol,
                format!("there is no seat {key} with separate memory that this session may see"),
            );
        };
        let (told, memory) = seat.told(*place);
        self.send_with(id, request, told, memory);
        Ok(())
    }

    pub(super) fn let_go(&mut self, id: SessionId, key: u64) {
        if let Some(group) = self.groups.group_of(id)
            && let Some(me) = group.seat_of(id).map(|(_, seat)| seat.key)
        {
            group.let_go(me, |seat| seat.key == key && seat.session.is_none());
        }
    }

    /// A session has ended, and with it the seat of its process.
    pub(super) fn leave_group(&mut self, id: SessionId) {
        let Some(group) = self.groups.group_of(id) else { return };
        let Some((place, gone)) = group.seats.iter_mut().find(|(_, seat)| seat.session == Some(id)) else { return };
        gone.session = None;
        let (me, told) = (gone.key, gone.message(*place, false));
        let place = *place;
        let others: Vec<(u64, SessionId)> = group.live().map(|(_, seat, session)| (seat.key, session)).collect();
        if let Some(gone) = group.seats.get_mut(&place) {
            gone.readers = others.iter().map(|(key, _)| *key).collect();
        }
        group.let_go(me, |_| true);
        others.into_iter().for_each(|(_, session)| self.send(session, 0, told.clone()));
    }

    /// A machine has been removed, and with it its windows.
    pub(super) fn group_machine_removed(&mut self, machine: MachineId) {
        let mut ended = Vec::new();
        for group in &mut self.groups.all {
            let is = |m: &Member<F>| m.window.as_ref().is_some_and(|w| w.owner == machine.into());
            let gone: BTreeSet<usize> = (0..group.members.len()).filter(|m| is(&group.members[*m])).collect();
            gone.iter().for_each(|member| group.members[*member].window = None);
            ended.extend(group.live().filter(|(_, seat, _)| gone.contains(&seat.member)).map(|(.., session)| session));
        }
        self.groups.unplugged(machine);
        ended.into_iter().for_each(|session| self.leave_group(session));
    }

    /// The members of groups: all for an administrator, and for others those in their groups.
    pub(super) fn group_rows(&self, domain: &Name, peer: Credentials, after: u64) -> Vec<GroupRow> {
        let here = peer.origin();
        let me = self.member_name(peer, domain);
        let sees = |group: &GroupRecord<F>| {
            self.policy.is_administrator(peer)
                || me.is_some_and(|me| group.member_called(me, here != Origin::Host).is_some())
        };
        let groups = self.groups.all.iter().enumerate().filter(|(_, group)| sees(group));
        let rows = groups.flat_map(|(g, group)| {
            group.members.iter().enumerate().map(move |(m, member)| GroupRow {
                key: (g * MEMBERS + m + 1) as u32,
                address: address(g, m),
                size: member.window.as_ref().map_or(0, |w| w.size),
                free: member.window.as_ref().map_or(0, |w| w.carve.free()),
                seats: group.live().filter(|(_, seat, _)| seat.member == m).count() as u32,
                machine: member.machine,
                group: group.name.to_string(),
                member: member.name.to_string(),
            })
        });
        rows.filter(|row| u64::from(row.key) > after).collect()
    }
}
