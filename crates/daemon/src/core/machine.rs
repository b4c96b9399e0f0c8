//! Virtual machines: their list, their sessions, and the windows between them (protocol G).
//!
//! ```text
//!   Machine (name, number)  2 --- n  Window (owner, peer)  1 --- n  place (`window_places`)
//! ```
//!
//! Sessions of a machine's programs come over its port, and the port alone says which machine that is: they are of that machine
//! ([`User::Machine`](partywall_protocol::wire::User::Machine)), and of no user of this host. The broker trusts no statement of a guest
//! about itself. The names of a guest's programs begin with the machine's name, unless the policy allows others.

use std::collections::BTreeMap;

use partywall_protocol::wire::{
    EventKind, MachineId, MachineRow, Mobility, Name, Origin, PluggedAs, Refusal, RungBy, User,
};
use partywall_shm::layout::HUGE_PAGE;

use super::action::{Action, Order};
use super::ended_handshakes::EndedHandshakes;
use super::group::{Membership, WindowFiles};
use super::happened::Happened;
use super::id::SessionId;
use super::pair_window::{PairWindow, Waiting};
use super::refuse::{self, Refuse, refuse};
use super::{Core, Descriptor};
use crate::credentials::Credentials;

/// Where the directory of a machine begins in its window from the host, and the bytes that are kept for it there (protocol T1.6).
pub(super) const DIRECTORY_BASE: u64 = HUGE_PAGE;
const DIRECTORY_ROOM: u64 = partywall_protocol::directory::SIZE.next_multiple_of(HUGE_PAGE);
/// A window has a directory if the directory takes at most this fraction of it: one part in three.
const DIRECTORY_SHARE: u64 = 3;

/// News about the machines, from the thread that attends to them.
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
        /// The machine.
        machine: MachineId,
    },
    /// The machine's agent has greeted, or has gone. Either way the machine sees no window until it reports one.
    Up {
        /// The machine.
        machine: MachineId,
        /// Whether the machine's agent is there.
        up: bool,
    },
    /// The monitor has reported how the windows are plugged into the machine.
    Plugged {
        /// The machine.
        machine: MachineId,
        /// The kind of device that the windows are.
        plugged_as: PluggedAs,
    },
    /// Whether it can be migrated, as far as its devices are concerned.
    Fixed {
        /// The machine.
        machine: MachineId,
        /// The reason why it cannot be migrated; `None` if it can.
        by: Option<String>,
    },
    /// It gives up its windows to be migrated, or has them again.
    Migrating {
        /// The machine.
        machine: MachineId,
        /// Whether it is to leave.
        leaves: bool,
    },
    /// How its programs are rung from now on, until its agent greets again.
    Rung {
        /// The machine.
        machine: MachineId,
        /// The way in which its programs are rung.
        rung_by: RungBy,
    },
    /// There is a window.
    Window {
        /// The machine that writes the window.
        owner: Origin,
        /// The machine that reads it.
        peer: Origin,
        /// For the owner.
        memory: F,
        /// For the peer, if that is the host: it cannot be written through this.
        reader: F,
        /// Bytes from its header to its end.
        size: u64,
        /// The bytes of the window that have memory. The rest follows, or a notice of a shortage.
        allocated: u64,
    },
    /// A window of the last broker has places that programs of before may still use. Right after [`MachineNews::Window`].
    InUse {
        /// The machine that writes the window.
        owner: Origin,
        /// The machine that reads it.
        peer: Origin,
        /// Where each begins, from the header on, and its bytes.
        places: Vec<(u64, u64)>,
    },
    /// More of a window has memory.
    Allocated {
        /// The machine that writes the window.
        owner: Origin,
        /// The machine that reads it.
        peer: Origin,
        /// Bytes from its header on.
        to: u64,
    },
    /// The rest of a window's memory cannot be had for now.
    Shortage {
        /// The machine that writes the window.
        owner: Origin,
        /// The machine that reads it.
        peer: Origin,
        /// Why, and what to do.
        why: String,
    },
    /// A machine sees a window.
    Seen {
        /// The machine that is concerned.
        machine: MachineId,
        /// The machine that writes the window.
        owner: Origin,
        /// The machine that reads it.
        peer: Origin,
    },
    /// There is room for the seats of a member of a group of the host alone. Each of them brings separate memory.
    GroupRoom {
        /// The membership whose window has the room.
        of: Membership,
        /// Bytes of the window that the seats are placed in.
        size: u64,
    },
    /// There is the window of a member of a group.
    GroupWindow {
        /// The membership whose window it is.
        of: Membership,
        /// The machine that the member is; the host if it is a domain of it.
        owner: Origin,
        /// For the member.
        memory: F,
        /// For the others: it cannot be written through this.
        reader: F,
        /// Bytes from its header to its end.
        size: u64,
        /// Seats of the last broker that processes may still use: where each begins, from the header on, and its bytes.
        in_use: Vec<(u64, u64)>,
    },
    /// A machine has such a window as a device.
    GroupPlugged {
        /// The machine that is concerned.
        machine: MachineId,
        /// The member that the window belongs to.
        of: Membership,
        /// The machine's physical address of the window's header, by its hypervisor.
        place: u64,
    },
    /// A machine sees such a window.
    GroupSeen {
        /// The machine that is concerned.
        machine: MachineId,
        /// The member that the window belongs to.
        of: Membership,
    },
}

impl<F> MachineNews<F> {
    /// The same news with other descriptors.
    pub(crate) fn map<G>(self, turn: impl Fn(F) -> G) -> MachineNews<G> {
        match self {
            Self::Added { machine, name, monitor, port } => MachineNews::Added { machine, name, monitor, port },
            Self::Removed { machine } => MachineNews::Removed { machine },
            Self::Up { machine, up } => MachineNews::Up { machine, up },
            Self::Plugged { machine, plugged_as } => MachineNews::Plugged { machine, plugged_as },
            Self::Fixed { machine, by } => MachineNews::Fixed { machine, by },
            Self::Migrating { machine, leaves } => MachineNews::Migrating { machine, leaves },
            Self::Rung { machine, rung_by } => MachineNews::Rung { machine, rung_by },
            Self::Window { owner, peer, memory, reader, size, allocated } => {
                MachineNews::Window { owner, peer, memory: turn(memory), reader: turn(reader), size, allocated }
            }
            Self::InUse { owner, peer, places } => MachineNews::InUse { owner, peer, places },
            Self::Allocated { owner, peer, to } => MachineNews::Allocated { owner, peer, to },
            Self::Shortage { owner, peer, why } => MachineNews::Shortage { owner, peer, why },
            Self::Seen { machine, owner, peer } => MachineNews::Seen { machine, owner, peer },
            Self::GroupRoom { of, size } => MachineNews::GroupRoom { of, size },
            Self::GroupWindow { of, owner, memory, reader, size, in_use } => {
                MachineNews::GroupWindow { of, owner, memory: turn(memory), reader: turn(reader), size, in_use }
            }
            Self::GroupPlugged { machine, of, place } => MachineNews::GroupPlugged { machine, of, place },
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
    /// The reason why it cannot be migrated; empty if it can.
    fixed_by: String,
    /// It gives up its windows to be migrated, or has given them up.
    is_migrating: bool,
}

/// The reason why a machine cannot be migrated before its monitor was asked.
const NOT_ASKED: &str = "its devices are not known yet";

/// Everything about machines.
#[derive(Debug)]
pub(super) struct Machines<F> {
    known: BTreeMap<MachineId, MachineRecord>,
    pub(super) windows: BTreeMap<(Origin, Origin), PairWindow<F>>,
    /// In the order in which they asked. Empty while nothing is being allocated.
    pub(super) waiting: Vec<Waiting>,
    pub(super) ended: EndedHandshakes,
}

impl<F> Default for Machines<F> {
    fn default() -> Self {
        Self { known: BTreeMap::new(), windows: BTreeMap::new(), waiting: Vec::new(), ended: BTreeMap::new() }
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

    /// How many are attached.
    pub(super) fn count(&self) -> usize {
        self.known.len()
    }

    pub(super) fn called(&self, origin: Origin) -> &str {
        match origin {
            Origin::Host => "the host",
            Origin::Machine(machine) => self.name(machine).map_or("a machine that is gone", Name::as_str),
        }
    }

    /// The machine of these two that gives up its windows, if either does.
    pub(super) fn migrating(&self, between: (Origin, Origin)) -> Option<&str> {
        let leaves = |origin: Origin| origin.machine().and_then(|machine| self.known.get(&machine));
        let mut both = [between.0, between.1].into_iter().filter_map(leaves);
        both.find(|known| known.is_migrating).map(|known| known.name.as_str())
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

    /// Gives a machine a directory, if its window has room and memory for it. Returns the window.
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
}

impl<F: Descriptor> Core<F> {
    /// Takes in what has become of a machine at `now` (seconds since 1970).
    pub fn machine_news(&mut self, now: u64, news: MachineNews<F>) -> Vec<Action<F>> {
        self.now = now;
        self.take_news(news);
        self.serve_followers();
        self.keep_books();
        std::mem::take(&mut self.actions)
    }

    fn note_machine(&mut self, kind: EventKind, machine: MachineId, name: String) {
        let happened = Happened { from: name, ..Happened::default() };
        self.record(kind, User::Machine(machine), 0, 0, happened);
    }

    fn take_news(&mut self, news: MachineNews<F>) {
        match news {
            MachineNews::Added { machine, name, monitor, port } => self.machine_added(machine, name, monitor, port),
            MachineNews::Removed { machine } => self.machine_removed(machine),
            MachineNews::Up { machine, up } => self.machine_up(machine, up),
            MachineNews::Plugged { machine, plugged_as } => {
                self.with_machine(machine, |record| record.plugged_as = plugged_as);
            }
            MachineNews::Fixed { machine, by } => {
                self.with_machine(machine, |record| record.fixed_by = by.unwrap_or_default());
            }
            MachineNews::Migrating { machine, leaves } => {
                self.with_machine(machine, |record| record.is_migrating = leaves);
                // Requests that wait for a place in a window of this machine are refused now.
                self.serve_waiting();
            }
            MachineNews::Rung { machine, rung_by } => self.with_machine(machine, |record| record.rung_by = rung_by),
            MachineNews::Window { owner, peer, memory, reader, size, allocated } => {
                self.window_added((owner, peer), WindowFiles { memory, reader }, size, allocated);
            }
            MachineNews::InUse { owner, peer, places } => {
                if let Some(window) = self.machines.windows.get_mut(&(owner, peer)) {
                    window.abandon_places(&places);
                }
            }
            MachineNews::Allocated { owner, peer, to } => {
                // The window may belong to a machine that was detached meanwhile.
                if let Some(window) = self.machines.windows.get_mut(&(owner, peer)) {
                    window.extend(to);
                    self.look_for_directory(owner, peer);
                    self.serve_waiting();
                }
            }
            MachineNews::Shortage { owner, peer, why } => {
                if let Some(window) = self.machines.windows.get_mut(&(owner, peer)) {
                    window.shortage = Some(why);
                    self.serve_waiting();
                }
            }
            MachineNews::Seen { machine, owner, peer } => {
                if let Some(window) = self.machines.windows.get_mut(&(owner, peer)) {
                    window.seen_by_owner |= owner == machine.into();
                    window.seen_by_peer |= peer == machine.into();
                }
            }
            MachineNews::GroupRoom { of, size } => self.groups.window(of, Origin::Host, None, size),
            MachineNews::GroupWindow { of, owner, memory, reader, size, in_use } => {
                self.groups.window(of, owner, Some(WindowFiles { memory, reader }), size);
                self.groups.keep_seats(of, &in_use);
            }
            MachineNews::GroupPlugged { machine, of, place } => self.groups.plugged(machine, of, place),
            MachineNews::GroupSeen { machine, of } => self.groups.seen(machine, of),
        }
    }

    /// Changes the record of a machine that is known.
    fn with_machine(&mut self, machine: MachineId, change: impl FnOnce(&mut MachineRecord)) {
        if let Some(record) = self.machines.known.get_mut(&machine) {
            change(record);
        }
    }

    fn machine_added(&mut self, machine: MachineId, name: Name, monitor: String, port: String) {
        let (plugged_as, rung_by) = (PluggedAs::Unknown, RungBy::Port);
        let from = name.to_string();
        let (fixed_by, is_migrating) = (NOT_ASKED.to_owned(), false);
        let record = MachineRecord { name, monitor, port, up: false, plugged_as, rung_by, fixed_by, is_migrating };
        self.machines.known.insert(machine, record);
        self.note_machine(EventKind::MachineAttached, machine, from);
    }

    fn machine_removed(&mut self, machine: MachineId) {
        let gone = self.machines.known.remove(&machine);
        let from = gone.map_or_else(String::new, |gone| gone.name.to_string());
        self.note_machine(EventKind::MachineDetached, machine, from);
        self.actions.push(Action::EndDirectory { machine });
        self.machines.windows.retain(|(owner, peer), _| ![*owner, *peer].contains(&machine.into()));
        self.forget_handshakes_without_places();
        self.group_machine_removed(machine);
        self.serve_waiting();
    }

    /// The agent of a machine has come or gone. It has seen no window yet.
    fn machine_up(&mut self, machine: MachineId, up: bool) {
        self.groups.unseen(machine);
        if !up {
            // Its hypervisor may have ended. The next one may have windows elsewhere.
            self.groups.unplugged(machine);
        }
        let mut changed = None;
        self.with_machine(machine, |record| {
            changed = (record.up != up).then(|| record.name.to_string());
            (record.up, record.rung_by) = (up, RungBy::Port);
        });
        for ((owner, peer), window) in &mut self.machines.windows {
            window.seen_by_owner &= *owner != machine.into();
            window.seen_by_peer &= *peer != machine.into();
        }
        if let Some(name) = changed {
            self.note_machine(if up { EventKind::MachineUp } else { EventKind::MachineDown }, machine, name);
        }
    }

    fn window_added(&mut self, (owner, peer): (Origin, Origin), files: WindowFiles<F>, size: u64, allocated: u64) {
        let keeps_directory = owner == Origin::Host && size / DIRECTORY_SHARE >= DIRECTORY_ROOM;
        // The first huge page is the header's.
        let first = if keeps_directory { DIRECTORY_BASE + DIRECTORY_ROOM } else { HUGE_PAGE };
        let mut window = PairWindow::new(files.memory, files.reader, size, allocated, first);
        (window.seen_by_owner, window.seen_by_peer) = (owner == Origin::Host, peer == Origin::Host);
        self.machines.windows.insert((owner, peer), window);
        self.look_for_directory(owner, peer);
    }

    /// The qualified name of a session's domain. Guest names are prefixed with the machine's name unless policy allows an exception.
    pub(super) fn qualified(&self, peer: Credentials, name: Name) -> Result<Name, Refuse> {
        let Some(machine) = self.machines.name_of(peer.origin()) else { return Ok(name) };
        if self.policy.may_join_machine(machine, &name).is_some() {
            return Ok(name);
        }
        refuse::name(&format!("{machine}.{name}"))
    }

    /// The domain that a name refers to. In a machine, a domain of that machine may be named without the machine's name.
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
    /// it, so that is for administrators, and for the gateway if the policy says so.
    pub(super) fn may_leave(&self, peer: Credentials, domain: &Name) -> Result<(), Refuse> {
        let is_free = peer.origin() != Origin::Host || self.policy.is_administrator(peer);
        if is_free || self.policy.is_gateway_of_machines(peer, domain) {
            return Ok(());
        }
        let reason = match self.policy.is_gateway(peer, domain) {
            true => "the gateway reaches virtual machines only if [cluster] of the policy has `machines = true`",
            false => "on the host, channels to virtual machines are for administrators of the broker",
        };
        refuse(Refusal::Denied, reason)
    }

    /// Whether the window can have a directory now.
    fn look_for_directory(&mut self, owner: Origin, peer: Origin) {
        if let (Origin::Host, Some(machine)) = (owner, peer.machine()) {
            self.begin_directory(machine);
        }
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
                    .get(&Credentials::in_machine(machine, 0).account())
                    .copied()
                    .unwrap_or(0),
                windows: (windows.len() + of_groups) as u32,
                ready: (ready + seen) as u32,
                plugged_as: known.plugged_as,
                rung_by: known.rung_by,
                mobility: match (known.is_migrating, known.fixed_by.is_empty()) {
                    (true, _) => Mobility::Migrating,
                    (false, true) => Mobility::Migratable,
                    (false, false) => Mobility::Fixed,
                },
                fixed_by: known.fixed_by.clone(),
                name: known.name.to_string(),
                monitor: known.monitor.clone(),
                port: known.port.clone(),
            }
        };
        self.machines.known.range(from..).map(row).collect()
    }
}
