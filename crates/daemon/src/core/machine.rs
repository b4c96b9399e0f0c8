//! Virtual machines: which there are, who is in one, and places in the windows between them (protocol G).
//!
//! ```text
//!   Machine (name, number)  2 --- n  Window (owner, peer)  1 --- n  place --- held by ---> a process, then a channel
//! ```
//!
//! Sessions of a machine's programs come over its port, and the port alone says which machine that is: they are of that machine
//! ([`User::Machine`](partywall_protocol::wire::User::Machine)), and of no user of this host. Nothing that a guest says of itself is believed; what its programs may be
//! called begins with its own name, unless the policy says more.
//!
//! Places are handed out by the broker, which knows when both ends of a channel are gone. A guest that writes elsewhere in its
//! window than in its places spoils what it says itself.

use std::collections::BTreeMap;

use partywall_protocol::wire::{
    EventKind, MachineId, MachineRow, Message, Name, Origin, PluggedAs, Refusal, RungBy, User,
};
use partywall_shm::carve::Carve;
use partywall_shm::layout::{HUGE_PAGE, PAGE};

use super::channel::{ChannelId, EndState};
use super::domain::DomainId;
use super::events::Happened;
use super::group::{Membership, WindowFiles};
use super::refuse::{self, Refuse, refuse};
use super::{Action, Core, Descriptor, SessionId};
use crate::credentials::Credentials;

/// Where the directory of a machine begins in its window from the host, and the bytes that are kept for it there (protocol T1.6).
pub(super) const DIRECTORY_BASE: u64 = HUGE_PAGE;
const DIRECTORY_ROOM: u64 = partywall_protocol::directory::SIZE.next_multiple_of(HUGE_PAGE);
/// A window has a directory if that takes at most one part in so many of it.
const DIRECTORY_SHARE: u64 = 3;

/// Places that one process may have without a channel in them.
const MOST_RESERVED: usize = 64;
/// Places of one end of a channel: where its region is, and rings that it has grown to.
const MOST_OF_AN_END: usize = 4;
/// A ring that grows takes at most this part of what is free in its window, so that there is room for others.
const SHARE: u64 = 4;

/// What an administrator asks for, which takes more than the core.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Order {
    /// Take this machine in.
    Add {
        /// Its name.
        name: Name,
        /// Its monitor's socket.
        monitor: String,
        /// Its port's socket.
        port: String,
        /// Bytes for regions in each of its windows.
        room: u64,
    },
    /// Let it go.
    Remove {
        /// Its name.
        name: Name,
    },
}

/// What is known of the machines, told by who attends to them.
#[derive(Debug)]
pub enum MachineNews<F> {
    /// There is a new one.
    Added {
        /// Its number.
        machine: MachineId,
        /// Its name.
        name: Name,
        /// Its monitor's socket.
        monitor: String,
        /// Its port's socket.
        port: String,
    },
    /// It has been removed, and its windows with it. Its sessions are ended by who carries them.
    Removed {
        /// Which.
        machine: MachineId,
    },
    /// Its agent has greeted, or nobody is there any more. Either way it sees no window until it says so again.
    Up {
        /// Which.
        machine: MachineId,
        /// Whether somebody is there.
        up: bool,
    },
    /// What windows are to it was asked of its monitor.
    Plugged {
        /// Which.
        machine: MachineId,
        /// What they are.
        plugged_as: PluggedAs,
    },
    /// How its programs are rung from now on, until its agent greets again.
    Rung {
        /// Which.
        machine: MachineId,
        /// How.
        rung_by: RungBy,
    },
    /// There is a window.
    Window {
        /// Who writes it.
        owner: Origin,
        /// Who reads it.
        peer: Origin,
        /// For the owner.
        memory: F,
        /// For the peer, if that is the host: it cannot be written through this.
        reader: F,
        /// Bytes from its header to its end.
        size: u64,
        /// Those of them that have memory. The rest follows, or that there is a shortage.
        allocated: u64,
    },
    /// More of a window has memory.
    Allocated {
        /// Who writes it.
        owner: Origin,
        /// Who reads it.
        peer: Origin,
        /// Bytes from its header on.
        to: u64,
    },
    /// The rest of a window's memory cannot be had for now.
    Shortage {
        /// Who writes it.
        owner: Origin,
        /// Who reads it.
        peer: Origin,
        /// Why, and what to do.
        why: String,
    },
    /// A machine sees a window.
    Seen {
        /// Who.
        machine: MachineId,
        /// Who writes it.
        owner: Origin,
        /// Who reads it.
        peer: Origin,
    },
    /// There is room for the seats of a member of a group of the host alone. Each of them brings separate memory.
    GroupRoom {
        /// Whose room it is.
        of: Membership,
        /// Bytes of the window that the seats are placed in.
        size: u64,
    },
    /// There is the window of a member of a group.
    GroupWindow {
        /// Whose window it is.
        of: Membership,
        /// The machine that the member is; the host if it is a domain of it.
        owner: Origin,
        /// For the member.
        memory: F,
        /// For the others: it cannot be written through this.
        reader: F,
        /// Bytes from its header to its end.
        size: u64,
    },
    /// A machine sees such a window.
    GroupSeen {
        /// Who.
        machine: MachineId,
        /// Whose window it is.
        of: Membership,
    },
}

impl<F> MachineNews<F> {
    /// The same with other descriptors.
    pub(crate) fn map<G>(self, turn: impl Fn(F) -> G) -> MachineNews<G> {
        match self {
            Self::Added { machine, name, monitor, port } => MachineNews::Added { machine, name, monitor, port },
            Self::Removed { machine } => MachineNews::Removed { machine },
            Self::Up { machine, up } => MachineNews::Up { machine, up },
            Self::Plugged { machine, plugged_as } => MachineNews::Plugged { machine, plugged_as },
            Self::Rung { machine, rung_by } => MachineNews::Rung { machine, rung_by },
            Self::Window { owner, peer, memory, reader, size, allocated } => {
                MachineNews::Window { owner, peer, memory: turn(memory), reader: turn(reader), size, allocated }
            }
            Self::Allocated { owner, peer, to } => MachineNews::Allocated { owner, peer, to },
            Self::Shortage { owner, peer, why } => MachineNews::Shortage { owner, peer, why },
            Self::Seen { machine, owner, peer } => MachineNews::Seen { machine, owner, peer },
            Self::GroupRoom { of, size } => MachineNews::GroupRoom { of, size },
            Self::GroupWindow { of, owner, memory, reader, size } => {
                MachineNews::GroupWindow { of, owner, memory: turn(memory), reader: turn(reader), size }
            }
            Self::GroupSeen { machine, of } => MachineNews::GroupSeen { machine, of },
        }
    }
}

#[derive(Debug)]
struct MachineRecord {
    name: Name,
    monitor: String,
    port: String,
    up: bool,
    plugged_as: PluggedAs,
    rung_by: RungBy,
}

/// Who may use a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Holder {
    /// A process that is about to connect.
    Process { domain: DomainId, pid: u32 },
    /// A channel, until both its ends are gone.
    Channel(ChannelId),
    /// A program whose session has ended without the program: it may live, and read or write there. Until the window goes.
    Abandoned,
}

#[derive(Debug)]
struct PairWindow<F> {
    memory: F,
    reader: F,
    size: u64,
    /// Those of its bytes that have memory: there is no place elsewhere.
    allocated: u64,
    /// Why the rest has none, and why no window is being made.
    shortage: Option<String>,
    carve: Carve,
    places: BTreeMap<u64, (u64, Holder)>,
    seen_by_owner: bool,
    seen_by_peer: bool,
    /// Whether there is a directory in it.
    has_directory: bool,
}

/// Somebody who has asked for a place, and waits for memory that is being made.
#[derive(Debug)]
struct Waiting {
    session: SessionId,
    request: u32,
    channel: ChannelId,
    size: u64,
    target: String,
}

impl<F> PairWindow<F> {
    /// Bytes whose memory is being made.
    fn coming(&self) -> u64 {
        if self.shortage.is_none() { self.size.saturating_sub(self.allocated) } else { 0 }
    }

    /// Hands out a place, if there is one. Returns where it is, and the memory for the owner.
    fn place(&mut self, size: u64, holder: Holder) -> Option<(u64, F)>
    where
        F: Clone,
    {
        let base = self.carve.take(size)?;
        self.places.insert(base, (size, holder));
        Some((base, self.memory.clone()))
    }

    /// Why there is no place of this size.
    fn no_room(&self, wanted: u64, from: &str, to: &str) -> String {
        let free = self.carve.free() + self.coming();
        let mut reason = format!("the window from {from} to {to} has no room for {wanted} bytes ({free} are free)");
        let abandoned: u64 =
            self.places.values().filter(|(_, of)| *of == Holder::Abandoned).map(|(size, _)| *size).sum();
        if abandoned > 0 {
            reason.push_str(&format!(
                "; {abandoned} bytes are kept for programs that an agent's end has cut off, until the machine is detached"
            ));
        }
        if let Some(why) = &self.shortage {
            let Self { allocated, size, .. } = self;
            reason.push_str(&format!("; only {allocated} of its {size} bytes have memory: {why}"));
        }
        reason
    }

    fn free(&mut self, gone: impl Fn(Holder) -> bool) {
        let carve = &mut self.carve;
        self.places.retain(|base, (_, holder)| {
            let goes = gone(*holder);
            if goes {
                carve.give_back(*base);
            }
            !goes
        });
    }
}

/// Everything about machines.
#[derive(Debug)]
pub(super) struct Machines<F> {
    known: BTreeMap<MachineId, MachineRecord>,
    windows: BTreeMap<(Origin, Origin), PairWindow<F>>,
    /// In the order in which they asked. Empty while nothing is being allocated.
    waiting: Vec<Waiting>,
}

impl<F> Default for Machines<F> {
    fn default() -> Self {
        Self { known: BTreeMap::new(), windows: BTreeMap::new(), waiting: Vec::new() }
    }
}

impl<F> Machines<F> {
    /// How many machines have a port that is connected, and how many have not.
    pub(super) fn up_and_down(&self) -> [u64; 2] {
        let up = self.known.values().filter(|machine| machine.up).count() as u64;
        [up, self.known.len() as u64 - up]
    }
}

impl<F> Machines<F> {
    pub(super) fn name(&self, machine: MachineId) -> Option<&Name> {
        self.known.get(&machine).map(|m| &m.name)
    }

    fn name_of(&self, origin: Origin) -> Option<&Name> {
        origin.machine().and_then(|machine| self.name(machine))
    }

    fn called(&self, origin: Origin) -> &str {
        match origin {
            Origin::Host => "the host",
            Origin::Machine(machine) => self.name(machine).map_or("a machine that is gone", Name::as_str),
        }
    }

    fn window_from_host(&self, machine: MachineId) -> Option<&PairWindow<F>> {
        self.windows.get(&(Origin::Host, machine.into()))
    }

    /// Whether there is a directory for this machine.
    pub(super) fn has_directory(&self, machine: MachineId) -> bool {
        self.window_from_host(machine).is_some_and(|window| window.has_directory)
    }

    /// The machines that have one.
    pub(super) fn with_directory(&self) -> Vec<MachineId> {
        self.known.keys().copied().filter(|machine| self.has_directory(*machine)).collect()
    }

    /// Says that a machine has one from now on, if its window has room and memory for it. Returns the window.
    pub(super) fn begin_directory(&mut self, machine: MachineId) -> Option<F>
    where
        F: Clone,
    {
        let window = self.windows.get_mut(&(Origin::Host, machine.into()))?;
        let fits = window.size / DIRECTORY_SHARE >= DIRECTORY_ROOM;
        let has_memory = window.allocated >= DIRECTORY_BASE + DIRECTORY_ROOM;
        if window.has_directory || !fits || !has_memory {
            return None;
        }
        window.has_directory = true;
        Some(window.memory.clone())
    }

    /// The window that a machine's directory is in, if the machine sees it.
    pub(super) fn directory_window(&self, machine: MachineId) -> Result<F, Refuse>
    where
        F: Clone,
    {
        match self.window_from_host(machine) {
            Some(window) if window.has_directory && window.seen_by_peer => Ok(window.memory.clone()),
            Some(window) if window.has_directory => refuse(
                Refusal::Machine,
                "this machine does not see its window from the host yet; `partywall vm list` on the host says more",
            ),
            _ => refuse(
                Refusal::Machine,
                "the window from the host has no room for the directory; attach this machine with a larger --window",
            ),
        }
    }

    /// The window from one machine to another, if both see it.
    fn ready_window(&mut self, between: (Origin, Origin)) -> Result<&mut PairWindow<F>, Refuse> {
        let (from, to) = (self.called(between.0).to_owned(), self.called(between.1).to_owned());
        let Some(window) = self.windows.get_mut(&between) else {
            let advice = "attach both with `partywall vm attach`";
            return refuse(Refusal::Machine, format!("there is no window from {from} to {to}; {advice}"));
        };
        if window.seen_by_owner && window.seen_by_peer {
            return Ok(window);
        }
        let blind = if window.seen_by_owner { &to } else { &from };
        refuse(
            Refusal::Machine,
            format!("the window from {from} to {to} is not seen by {blind} yet; `partywall vm list` says more"),
        )
    }

    /// Frees the places of a channel that is gone.
    pub(super) fn channel_gone(&mut self, channel: ChannelId) {
        self.windows.values_mut().for_each(|w| w.free(|holder| holder == Holder::Channel(channel)));
    }

    /// A program that has an end of this channel may live, though its session has ended: the channel's places are nobody's any more.
    pub(super) fn abandon(&mut self, channel: ChannelId) {
        for window in self.windows.values_mut() {
            for (_, holder) in window.places.values_mut().filter(|(_, holder)| *holder == Holder::Channel(channel)) {
                *holder = Holder::Abandoned;
            }
        }
    }

    /// Frees the places of a process that is gone, except those that have become a channel's.
    pub(super) fn process_gone(&mut self, domain: DomainId, pid: u32) {
        self.windows.values_mut().for_each(|w| w.free(|holder| holder == Holder::Process { domain, pid }));
    }

    /// A process may live, though its session has ended: it may still use the places that it was given.
    pub(super) fn abandon_process(&mut self, domain: DomainId, pid: u32) {
        for window in self.windows.values_mut() {
            let held = window.places.values_mut().filter(|(_, of)| *of == Holder::Process { domain, pid });
            held.for_each(|(_, holder)| *holder = Holder::Abandoned);
        }
    }

    /// Frees a place that a process asked for and could not use. If it has places at this byte of several windows, which it meant is not known:
    /// they stay until it ends.
    pub(super) fn give_back(&mut self, owner: Origin, base: u64, domain: DomainId, pid: u32) {
        let mine = Holder::Process { domain, pid };
        let own = self.windows.iter_mut().filter(|((of, _), _)| *of == owner).map(|(_, window)| window);
        let mut held = own.filter(|window| window.places.get(&base).is_some_and(|(_, holder)| *holder == mine));
        if let (Some(window), None) = (held.next(), held.next()) {
            window.places.remove(&base);
            window.carve.give_back(base);
        }
    }

    /// Whether the place is the holder's and large enough; it is the channel's from now on. Returns the memory for the peer.
    pub(super) fn settle(
        &mut self,
        between: (Origin, Origin),
        base: u64,
        size: u64,
        holder: Holder,
        channel: ChannelId,
    ) -> Result<F, Refuse>
    where
        F: Descriptor,
    {
        let place = self.windows.get_mut(&between).and_then(|w| Some((w.places.get_mut(&base)?, &w.reader)));
        match place {
            Some(((room, held_by), reader)) if *held_by == holder && size <= *room => {
                *held_by = Holder::Channel(channel);
                Ok(reader.clone())
            }
            _ => refuse(Refusal::BadRegion, format!("no place at {base} in the window was given to this process")),
        }
    }
}

impl<F: Descriptor> Core<F> {
    /// Takes in what has become of a machine.
    pub fn machine_news(&mut self, news: MachineNews<F>) -> Vec<Action<F>> {
        self.take_news(news);
        self.serve_followers();
        std::mem::take(&mut self.actions)
    }

    fn note_machine(&mut self, kind: EventKind, machine: MachineId, name: String) {
        let happened = Happened { from: name, ..Happened::default() };
        self.record(kind, User::Machine(machine), 0, 0, happened);
    }

    fn take_news(&mut self, news: MachineNews<F>) {
        let Machines { known, windows, .. } = &mut self.machines;
        match news {
            MachineNews::Added { machine, name, monitor, port } => {
                let (plugged_as, rung_by) = (PluggedAs::Unknown, RungBy::Port);
                let from = name.to_string();
                known.insert(machine, MachineRecord { name, monitor, port, up: false, plugged_as, rung_by });
                self.note_machine(EventKind::MachineAttached, machine, from);
            }
            MachineNews::Removed { machine } => {
                let gone = known.remove(&machine);
                let from = gone.map_or_else(String::new, |gone| gone.name.to_string());
                self.note_machine(EventKind::MachineDetached, machine, from);
                let Machines { windows, .. } = &mut self.machines;
                self.actions.push(Action::EndDirectory { machine });
                windows.retain(|(owner, peer), _| ![*owner, *peer].contains(&machine.into()));
                self.group_machine_removed(machine);
                self.serve_waiting();
            }
            MachineNews::Up { machine, up } => {
                self.groups.unseen(machine);
                let mut changed = None;
                if let Some(known) = known.get_mut(&machine) {
                    changed = (known.up != up).then(|| known.name.to_string());
                    (known.up, known.rung_by) = (up, RungBy::Port);
                }
                for ((owner, peer), window) in windows {
                    window.seen_by_owner &= *owner != machine.into();
                    window.seen_by_peer &= *peer != machine.into();
                }
                if let Some(name) = changed {
                    self.note_machine(if up { EventKind::MachineUp } else { EventKind::MachineDown }, machine, name);
                }
            }
            MachineNews::Plugged { machine, plugged_as } => {
                if let Some(known) = known.get_mut(&machine) {
                    known.plugged_as = plugged_as;
                }
            }
            MachineNews::Rung { machine, rung_by } => {
                if let Some(known) = known.get_mut(&machine) {
                    known.rung_by = rung_by;
                }
            }
            MachineNews::Window { owner, peer, memory, reader, size, allocated } => {
                let keeps_directory = owner == Origin::Host && size / DIRECTORY_SHARE >= DIRECTORY_ROOM;
                // The first huge page is the header's.
                let first = if keeps_directory { DIRECTORY_BASE + DIRECTORY_ROOM } else { HUGE_PAGE };
                let window = PairWindow {
                    memory,
                    reader,
                    size,
                    allocated,
                    shortage: None,
                    carve: Carve::new(first, allocated.max(first)),
                    places: BTreeMap::new(),
                    seen_by_owner: owner == Origin::Host,
                    seen_by_peer: peer == Origin::Host,
                    has_directory: false,
                };
                windows.insert((owner, peer), window);
                self.look_for_directory(owner, peer);
            }
            MachineNews::Allocated { owner, peer, to } => {
                // It may be that of a machine that was let go meanwhile.
                if let Some(window) = windows.get_mut(&(owner, peer)) {
                    window.allocated = window.allocated.max(to);
                    window.shortage = None;
                    window.carve.extend(to);
                    self.look_for_directory(owner, peer);
                    self.serve_waiting();
                }
            }
            MachineNews::Shortage { owner, peer, why } => {
                if let Some(window) = windows.get_mut(&(owner, peer)) {
                    window.shortage = Some(why);
                    self.serve_waiting();
                }
            }
            MachineNews::Seen { machine, owner, peer } => {
                if let Some(window) = windows.get_mut(&(owner, peer)) {
                    window.seen_by_owner |= owner == machine.into();
                    window.seen_by_peer |= peer == machine.into();
                }
            }
            MachineNews::GroupRoom { of, size } => self.groups.window(of, Origin::Host, None, size),
            MachineNews::GroupWindow { of, owner, memory, reader, size } => {
                self.groups.window(of, owner, Some(WindowFiles { memory, reader }), size);
            }
            MachineNews::GroupSeen { machine, of } => self.groups.seen(machine, of),
        }
    }

    /// What a session's domain is to be called: in a machine everything begins with the machine's name, except what the policy
    /// allows besides.
    pub(super) fn qualified(&self, peer: Credentials, name: Name) -> Result<Name, Refuse> {
        let Some(machine) = self.machines.name_of(peer.origin()) else { return Ok(name) };
        if self.policy.may_join_machine(machine, &name).is_some() {
            return Ok(name);
        }
        refuse::name(&format!("{machine}.{name}"))
    }

    /// Which domain is meant by a name: in a machine also one on that machine, without the machine's name.
    pub(super) fn meant(&self, peer: Credentials, name: Name) -> Name {
        match self.machines.name_of(peer.origin()) {
            Some(machine) if self.domain_named(&name).is_none() => Name::new(&format!("{machine}.{name}"))
                .ok()
                .filter(|own| self.domain_named(own).is_some())
                .unwrap_or(name),
            _ => name,
        }
    }

    /// Whether a session may have channels to another machine. On the host all of a window's users can read it, and some write
    /// it, so that is for administrators.
    pub(super) fn may_leave(&self, peer: Credentials) -> Result<(), Refuse> {
        if peer.origin() != Origin::Host || self.policy.is_administrator(peer) {
            return Ok(());
        }
        refuse(Refusal::Denied, "on the host, channels to virtual machines are for administrators of the broker")
    }

    /// Whether the window can have a directory now.
    fn look_for_directory(&mut self, owner: Origin, peer: Origin) {
        if let (Origin::Host, Some(machine)) = (owner, peer.machine()) {
            self.begin_directory(machine);
        }
    }

    /// Looks again at who waits for a place.
    fn serve_waiting(&mut self) {
        // A request that must wait longer is put back.
        for Waiting { session, request, channel, size, target } in std::mem::take(&mut self.machines.waiting) {
            if let Err(Refuse { code, reason, .. }) = self.room(session, request, channel, size, &target) {
                self.send(session, request, Message::Refused { code, reason });
            }
        }
    }

    /// Hands out a place in a window. If its memory is being made, the answer waits for that.
    pub(super) fn room(
        &mut self,
        id: SessionId,
        request: u32,
        channel: ChannelId,
        size: u64,
        named: &str,
    ) -> Result<(), Refuse> {
        let target = refuse::name(named)?;
        let Some((domain_id, domain, peer)) = self.member(id) else { return Ok(()) };
        self.may_leave(peer)?;
        let here = peer.origin();
        let mut grows = false;
        let (there, holder) = match channel {
            0 => {
                let target = self.meant(peer, target);
                let found = self.domain_named(&target).and_then(|d| self.domains.get(&d)).filter(|to| {
                    let (me, to_name) = (&domain.name, &to.name);
                    self.policy.is_administrator(peer)
                        || self.policy.may_reach(me, to_name)
                        || self.policy.may_reach(to_name, me)
                });
                let Some(found) = found else {
                    return refuse(Refusal::NoSuchDomain, format!("no domain is called {target} now"));
                };
                (found.founder.origin(), Holder::Process { domain: domain_id, pid: peer.pid })
            }
            number => {
                let waits = |state| match state {
                    EndState::Waiting { listener, .. } => self
                        .sessions
                        .get(&listener)
                        .is_some_and(|l| l.domain == Some(domain_id) && l.peer.pid == peer.pid),
                    _ => false,
                };
                let holds = |state| state == EndState::Held { domain: domain_id, pid: peer.pid };
                let Some(user) = self.channels.get(&number).and_then(|channel| {
                    let [connecting, accepting] = &channel.ends;
                    let other = if waits(accepting.state) {
                        connecting
                    } else if !channel.ends.iter().all(|end| matches!(end.state, EndState::Held { .. })) {
                        return None;
                    } else if holds(connecting.state) && connecting.user == Some(peer.user) {
                        grows = true;
                        accepting
                    } else if holds(accepting.state) && accepting.user == Some(peer.user) {
                        grows = true;
                        connecting
                    } else {
                        return None;
                    };
                    other.user
                }) else {
                    return refuse(
                        Refusal::NoSuchChannel,
                        format!("channel {number} is not waiting for you, nor yours"),
                    );
                };
                (user.origin(), Holder::Channel(number))
            }
        };
        if here == there {
            return refuse(Refusal::Protocol, "both sides are on this machine: use a region in a memfd");
        }
        if grows { domain.afford_ring(size.saturating_sub(PAGE)) } else { domain.afford(size) }?;
        let (most, whose) = match (channel, grows) {
            (0, _) => (MOST_RESERVED, "this process has as many places as it may have without using them"),
            (_, false) => (1, "this end of the channel has its place"),
            (_, true) => (MOST_OF_AN_END, "this end of the channel has as many places as it may have"),
        };
        let (from, to) = (self.machines.called(here).to_owned(), self.machines.called(there).to_owned());
        let window = self.machines.ready_window((here, there))?;
        if window.places.values().filter(|(_, h)| *h == holder).count() >= most {
            return refuse(Refusal::Quota, whose);
        }
        let coming = window.coming();
        let free = window.carve.free() + coming;
        if grows && size > free / SHARE {
            let reason = format!("{size} bytes are more than a part in {SHARE} of the {free} free from {from} to {to}");
            return refuse(Refusal::OutOfResources, reason);
        }
        let Some((base, memory)) = window.place(size, holder) else {
            if coming > 0 && size <= free {
                let waiting = &mut self.machines.waiting;
                if waiting.iter().filter(|w| w.session == id).count() >= MOST_RESERVED {
                    return refuse(Refusal::Quota, "this process waits for as many places as it may");
                }
                waiting.push(Waiting { session: id, request, channel, size, target: named.to_owned() });
                return Ok(());
            }
            return refuse(Refusal::OutOfResources, window.no_room(size, &from, &to));
        };
        self.send_with(id, request, Message::RoomIs { base }, vec![memory]);
        Ok(())
    }

    /// Hands out a place for the region of a socket whose other end is on another machine (protocol T4.8). It does not wait for memory: the
    /// client asks again later. A side that takes an offer and asks twice gets the place that it has.
    pub(super) fn socket_room(
        &mut self,
        (id, request): (SessionId, u32),
        there: Origin,
        size: u64,
        holder: Holder,
    ) -> Result<(), Refuse> {
        let Some((_, domain, peer)) = self.member(id) else { return Ok(()) };
        domain.afford(size)?;
        self.may_leave(peer)?;
        let here = peer.origin();
        let (from, to) = (self.machines.called(here).to_owned(), self.machines.called(there).to_owned());
        let window = self.machines.ready_window((here, there))?;
        let held = window.places.iter().filter(|(_, (_, of))| *of == holder);
        let (base, memory) = match (holder, held.clone().find(|(_, (has, _))| *has == size)) {
            (Holder::Channel(_), Some((base, _))) => (*base, window.memory.clone()),
            _ if held.count() >= MOST_RESERVED => {
                return refuse(Refusal::Quota, "this process has as many places as it may have without using them");
            }
            _ => match window.place(size, holder) {
                Some(place) => place,
                None => return refuse(Refusal::OutOfResources, window.no_room(size, &from, &to)),
            },
        };
        self.send_with(id, request, Message::RoomIs { base }, vec![memory]);
        Ok(())
    }

    /// The process of a session of the host, if it has places in windows or shares channels there.
    pub(crate) fn process_in_windows(&self, id: SessionId) -> Option<u32> {
        let session = self.sessions.get(&id)?;
        let (domain, pid) = (session.domain?, session.peer.pid);
        if session.peer.origin() != Origin::Host {
            return None;
        }
        let held = &self.domains.get(&domain)?.processes.get(&pid)?.held;
        let is_its = |holder: Holder| match holder {
            Holder::Process { domain: of, pid: by } => (of, by) == (domain, pid),
            Holder::Channel(channel) => held.iter().any(|(id, _)| *id == channel),
            Holder::Abandoned => false,
        };
        let mut places = self.machines.windows.values().flat_map(|window| window.places.values());
        places.any(|(_, holder)| is_its(*holder)).then_some(pid)
    }

    /// Passes on what an administrator asks for.
    pub(super) fn order(&mut self, id: SessionId, request: u32, order: Order) -> Result<(), Refuse> {
        let Some((_, _, peer)) = self.member(id) else { return Ok(()) };
        if !self.policy.is_administrator(peer) {
            return refuse(Refusal::Denied, "virtual machines are for administrators to attach and detach");
        }
        self.actions.push(Action::Order { session: id, request, order });
        Ok(())
    }

    /// The machines, for an administrator.
    pub(super) fn machine_rows(&self, after: u64) -> Vec<MachineRow> {
        let from = u32::try_from(after.saturating_add(1)).ok().and_then(MachineId::new);
        let Some(from) = from else { return Vec::new() };
        let row = |(&machine, known): (&MachineId, &MachineRecord)| {
            let windows: Vec<&PairWindow<F>> = self
                .machines
                .windows
                .iter()
                .filter(|((owner, peer), _)| [*owner, *peer].contains(&machine.into()))
                .map(|(_, window)| window)
                .collect();
            let ready = windows.iter().filter(|w| w.seen_by_owner && w.seen_by_peer).count();
            let (of_groups, seen) = self.groups.windows_of(machine, &known.name);
            MachineRow {
                machine: machine.get(),
                up: known.up,
                sessions: self
                    .sessions_by_account
                    .get(&Credentials::of_machine(machine, 0).account())
                    .copied()
                    .unwrap_or(0),
                windows: (windows.len() + of_groups) as u32,
                ready: (ready + seen) as u32,
                plugged_as: known.plugged_as,
                rung_by: known.rung_by,
                name: known.name.to_string(),
                monitor: known.monitor.clone(),
                port: known.port.clone(),
            }
        };
        self.machines.known.range(from..).map(row).collect()
    }
}
