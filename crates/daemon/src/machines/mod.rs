//! Virtual machines from the host's side: their windows, their monitors, their serial ports (protocol G).
//!
//! ```text
//!   core --- Order ---> Attendant --- plugs windows ---> monitors (QMP)
//!     ^                     | one thread for each machine
//!     |                     v
//!     +--- Errand ------ Port ====== serial port ====== agent
//!     +--- sessions ----/    (a socket for each program in the guest)
//! ```
//!
//! The attendant is a separate thread, because a monitor answers when it pleases. It is started by the first machine. To the
//! core and the event loop a program in a guest is a session like any other, of the machine and of no user of the host.

pub(crate) mod carried;
mod groups;
mod migration;
mod plugging;
mod port;
pub(crate) mod state;
mod store;
mod tasks;
#[cfg(test)]
mod tests;
mod windows;

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::thread::JoinHandle;
use std::time::Duration;

use partywall_protocol::window::WindowId;
use partywall_protocol::wire::{MachineId, Message, Name, Origin, Refusal, Text};
use partywall_region::pmem::WindowTrace;
use partywall_vm::ivshmem::Switchboard;
use partywall_vm::{Machine, VmError, WindowLayout, WindowRole};

use crate::control::{Errand, ServerControl};
use crate::core::{MachineNews, Order, SessionId};
use crate::policy::MachineEntry;
use crate::priority;
pub(crate) use groups::GroupWindows;
use plugging::{Plugged, remark};
pub(crate) use port::MOST_SESSIONS;
use port::Port;
use state::{AttachmentFile, AttachmentRecord, WindowRecord};
use tasks::AttendantTasks;
use windows::Windows;

/// Bytes of each window, unless told otherwise.
const ROOM: u64 = 64 << 20;

/// How long the attendant waits before it asks again for a monitor that another program holds. Each attempt takes as long as a monitor may take to
/// greet, and other machines wait for that.
const PAUSE: Duration = Duration::from_secs(10);

/// Why a machine has no doorbell device before its monitor was asked.
const NOT_YET: &str = "nothing was plugged in yet";

/// A task of the attendant.
#[derive(Debug)]
pub(crate) enum Task {
    /// An administrator's order, with the session and the request that wait for its result.
    Order { session: SessionId, request: u32, order: Order },
    /// A machine of the operator's file, which may not be running yet.
    Entry(MachineEntry),
    /// The machines that the last broker had, after those of the operator's file.
    Remembered,
    /// The groups that machines are members of. Before anything else.
    Groups(GroupWindows),
    /// Its agent has greeted, perhaps several times.
    Up { machine: MachineId },
    /// The result of a machine's release; `failure` has the reason if it failed.
    Released { machine: MachineId, failure: Option<String> },
    /// End the thread.
    Stop,
}

/// The thread that attends to machines. Dropping it ends it, and every port.
#[derive(Debug)]
pub(crate) struct Attendant {
    tasks: AttendantTasks,
    thread: Option<JoinHandle<()>>,
}

impl Attendant {
    /// Starts it, for the broker that serves `socket`. A guest that sends nothing for `silence` counts as hung.
    pub(crate) fn start(control: ServerControl, socket: &Path, silence: Duration) -> std::io::Result<Self> {
        let tasks = AttendantTasks::default();
        let (windows, machines) = (Windows::default(), BTreeMap::new());
        let groups = GroupWindows::default();
        let state = AttachmentFile::open(socket);
        let work = Work {
            control,
            silence,
            tasks: tasks.clone(),
            windows,
            groups,
            state,
            machines,
            left: BTreeMap::new(),
            held: BTreeSet::new(),
            next: MachineId::MIN,
        };
        let thread = std::thread::Builder::new().name("machines".to_owned()).spawn(move || {
            priority::lower();
            // The threads of the ports inherit this. Where it is forbidden, answers come later on a busy machine.
            let _ = priority::shorten_slices();
            work.run()
        })?;
        Ok(Self { tasks, thread: Some(thread) })
    }

    /// Has it do this.
    ///
    /// # Errors
    /// It is one request more than may wait.
    pub(crate) fn tell(&self, task: Task) -> std::io::Result<()> {
        self.tasks.add(task)
    }
}

impl Drop for Attendant {
    fn drop(&mut self) {
        let _ = self.tell(Task::Stop);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A machine that is attended to.
#[derive(Debug)]
struct Attended {
    name: Name,
    monitor: String,
    socket: String,
    room: u64,
    /// `None` once it has given up its windows to be migrated, and after a port that could not be opened again.
    port: Option<Port>,
    layout: WindowLayout,
    migration: MigrationStep,
    /// Its windows were made, or found again. Those of a machine that had released them with the last broker are looked for when it stays.
    has_windows: bool,
    /// Why windows could not be plugged in at the last attempt.
    plug_failure: Option<String>,
    /// Its agent has greeted, and was not told its windows because the monitor did not answer.
    untold: bool,
    /// The doorbell device of its guest, or the reason why there is none.
    doorbell: Result<Switchboard, String>,
}

impl Attended {
    /// Whether its agent has greeted, since it was attached or has come back.
    fn has_greeted(&self) -> bool {
        self.port.as_ref().is_some_and(Port::has_greeted)
    }

    /// Whether it has released its windows and may be migrated.
    fn has_released(&self) -> bool {
        self.migration == MigrationStep::Released
    }
}

/// The doorbell device of a machine that was detached.
#[derive(Debug)]
struct LeftDoorbell {
    doorbell: Switchboard,
    /// The process that has the device. This becomes readable when the process has ended.
    qemu: OwnedFd,
}

/// How far a machine has come with its move to another host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum MigrationStep {
    /// It stays here.
    None,
    /// Its agent gives up the windows, and an administrator's request waits for that.
    Releasing { session: SessionId, request: u32 },
    /// It gets no links and sessions. Its agent has not given up the windows, so programs may still map them.
    Migrating,
    /// It has no links, sessions and windows, and gets none.
    Released,
}

impl MigrationStep {
    /// Whether it was to leave and nobody waits for its agent.
    fn is_leaving(self) -> bool {
        matches!(self, Self::Migrating | Self::Released)
    }
}

#[derive(Debug)]
struct Work {
    control: ServerControl,
    silence: Duration,
    tasks: AttendantTasks,
    windows: Windows,
    groups: GroupWindows,
    /// The record for the next broker, and that of the last one.
    state: AttachmentFile,
    machines: BTreeMap<MachineId, Attended>,
    /// Doorbell devices of machines that were detached, by their monitors: they stay in, and serve again.
    left: BTreeMap<String, LeftDoorbell>,
    /// The names of machines of the operator's file whose monitors another program holds. They are tried again.
    held: BTreeSet<String>,
    next: MachineId,
}

impl Work {
    fn run(mut self) {
        loop {
            match self.tasks.next() {
                Task::Order { session, request, order } => {
                    let done = match order {
                        Order::Add { name, monitor, port, room, migratable } => {
                            self.add(NewMachine { name, monitor, socket: port, room, layout: layout(migratable) }, true)
                        }
                        Order::Remove { name } => self.remove(&name),
                        Order::Release { name } => match self.release(&name, session, request) {
                            Ok(()) => continue,
                            Err(why) => Err(why),
                        },
                        Order::Resume { name } => self.resume(&name),
                    };
                    self.remember();
                    let answer = done.unwrap_or_else(|reason| Message::Refused { code: Refusal::Machine, reason });
                    self.control.errand(Errand::Answer(session, request, answer));
                }
                Task::Entry(entry) => self.attend_entry(entry),
                Task::Remembered => self.attach_remembered(),
                Task::Up { machine } => {
                    // It may have been started again, without what was plugged in.
                    self.plug_and_tell(machine, true);
                }
                Task::Released { machine, failure } => self.released(machine, failure),
                Task::Groups(groups) => {
                    groups.ids().for_each(|id| self.state.use_again(id));
                    self.groups = groups;
                }
                Task::Stop => return,
            }
        }
    }

    /// Attends to a machine of the operator's file. If it may be leaving, it is tried again later.
    fn attend_entry(&mut self, entry: MachineEntry) {
        let MachineEntry { name, monitor, port, room, migratable } = entry.clone();
        let layout = layout(migratable);
        let named = Name::new(&name).map_err(|e| AddFailure::from(e.to_string()));
        let added =
            named.and_then(|name| self.try_add(NewMachine { name, monitor, socket: port, room, layout }, false));
        let was_held = self.held.remove(&name);
        match added {
            Ok(_) => {}
            Err(AddFailure { why, is_held: true }) => {
                if !was_held {
                    tracing::warn!(machine = name, why, "a machine of the configuration is attended to later");
                }
                self.held.insert(name);
                self.tasks.add_later(Task::Entry(entry), PAUSE);
            }
            Err(AddFailure { why, .. }) => {
                tracing::error!(machine = name, why, "a machine of the configuration is not attended to");
            }
        }
        if was_held && self.state.is_settled() {
            // Those of its windows that are not used again need not be kept.
            self.settle();
        }
        self.remember();
    }

    /// Attends to the machines that the last broker had, if they still run.
    fn attach_remembered(&mut self) {
        for record in self.state.released_left() {
            match self.take_released(&record) {
                Some(Ok(_)) => {}
                Some(Err(why)) => {
                    tracing::warn!(
                        machine = record.name,
                        why,
                        "a machine that has released its windows is not attended to"
                    );
                }
                None => tracing::info!(machine = record.name, "a machine that had released its windows has left"),
            }
        }
        for AttachmentRecord { name, monitor, port, room, migratable } in self.state.machines_left() {
            if self.held.contains(&name) {
                continue;
            }
            let named = Name::new(&name).map_err(|e| e.to_string());
            let runs = Machine::connect(&monitor).map_err(|e| e.to_string());
            let layout = layout(migratable);
            let added = runs
                .and(named)
                .and_then(|name| self.add(NewMachine { name, monitor, socket: port, room, layout }, false));
            match added {
                Ok(_) => tracing::info!(machine = name, "attached, as it was with the last broker"),
                Err(why) => tracing::info!(machine = name, why, "a machine of the last broker is not attended to"),
            }
        }
        self.settle();
        self.groups.settle();
        self.remember();
    }

    /// Every machine of the last broker has been looked for.
    fn settle(&mut self) {
        let waiting = self.windows_waiting();
        self.state.settle(&waiting);
    }

    /// The windows of the last broker that are looked for later.
    fn windows_waiting(&self) -> Vec<WindowRecord> {
        let waiting =
            self.machines.values().filter(|machine| !machine.has_windows).map(|machine| machine.name.as_str());
        let waiting = waiting.chain(self.held.iter().map(String::as_str));
        let mut windows: Vec<_> = waiting.flat_map(|name| self.state.windows_left(name)).collect();
        // One may be between two of them.
        windows.sort_by(|a, b| a.id.cmp(&b.id));
        windows.dedup();
        windows
    }

    /// Writes down for the next broker what there is.
    fn remember(&mut self) {
        let attachment = |machine: &Attended| AttachmentRecord {
            name: machine.name.to_string(),
            monitor: machine.monitor.clone(),
            port: machine.socket.clone(),
            room: machine.room,
            migratable: machine.layout == WindowLayout::Migratable,
        };
        let name = |side: Origin| Some(self.machines.get(&side.machine()?)?.name.to_string());
        let window = |(owner, peer): (Origin, Origin), trace: WindowTrace| WindowRecord {
            owner: name(owner),
            peer: name(peer),
            id: trace.id.to_string(),
            inode: trace.inode,
            size: trace.size,
        };
        // A machine that is about to leave must not get its windows back from a broker that starts meanwhile.
        let (released, stay): (Vec<_>, Vec<_>) = self.machines.values().partition(|machine| machine.has_released());
        let [mut stay, released] = [stay, released].map(|all| all.into_iter().map(attachment).collect::<Vec<_>>());
        stay.extend(self.state.machines_left().into_iter().filter(|machine| self.held.contains(&machine.name)));
        let windows = self.windows.traces().into_iter().map(|(key, trace)| window(key, trace));
        let windows = windows.chain(self.windows_waiting()).collect();
        self.state.save((stay, released), windows, self.groups.records());
    }

    /// Attaches a machine, or plugs in the devices that an attached machine lacks. With `at_once`, fails if the windows cannot be plugged in now.
    fn add(&mut self, new: NewMachine, at_once: bool) -> Result<Message, String> {
        self.try_add(new, at_once).map_err(|failure| failure.why)
    }

    fn try_add(&mut self, mut new: NewMachine, at_once: bool) -> Result<Message, AddFailure> {
        if new.room == 0 {
            new.room = ROOM;
        }
        self.drop_departed(&new.name, &new.monitor)?;
        if let Some(machine) = self.check_new(&new)? {
            return Ok(self.complete(machine)?);
        }
        if !at_once && let Some(taken) = self.take_released_as(&new) {
            return Ok(taken?);
        }
        if at_once {
            // Before memory is allocated that has no place in the machine.
            can_take(&new.monitor, &new.socket, new.room, new.layout)?;
        } else {
            let has_windows = !self.state.windows_left(new.name.as_str()).is_empty();
            Self::check_stays(&new, has_windows)?;
        }
        let machine = self.number()?;
        let (name, monitor, port) = (new.name.clone(), new.monitor.clone(), new.socket.clone());
        self.control.errand(Errand::News(MachineNews::Added { machine, name: name.clone(), monitor, port }));
        match self.attach(machine, new, at_once) {
            Ok(plugged) => {
                self.plug_doorbell(machine);
                self.tell_others(machine);
                tracing::info!(machine = %name, plugged = plugged.count, "machine attached");
                Ok(self.added(machine, &plugged))
            }
            Err(why) => {
                self.forget(machine);
                Err(why.into())
            }
        }
    }

    /// A machine has got windows: the others get theirs of them, and all of them their memory.
    fn tell_others(&mut self, machine: MachineId) {
        let others: Vec<MachineId> = self.machines.keys().copied().filter(|id| *id != machine).collect();
        for other in others {
            self.plug_and_tell(other, false);
        }
        self.windows.allocate(machine, news(&self.control));
    }

    /// The machine if it is attached already, in the same way. Fails if it is attached otherwise, or if another machine has its sockets.
    fn check_new(&self, new: &NewMachine) -> Result<Option<MachineId>, String> {
        let NewMachine { name, monitor, socket, layout, .. } = new;
        if let Some((machine, there)) = self.machines.iter().find(|(_, m)| m.name == *name) {
            if (&there.monitor, &there.socket) != (monitor, socket) {
                let (monitor, socket) = (&there.monitor, &there.socket);
                return Err(format!("{name} is attached, by monitor {monitor} and port {socket}; detach it first"));
            }
            if there.layout != *layout {
                return Err(format!("{name} is attached {}; detach it first", layout_in_words(there.layout)));
            }
            return Ok(Some(*machine));
        }
        match self.machines.values().find(|m| m.monitor == *monitor || m.socket == *socket) {
            Some(other) => Err(format!("these sockets are those of {}, which is attached", other.name)),
            None => Ok(None),
        }
    }

    /// Plugs in the devices that an attached machine lacks, and tells its agent, which may not have been told before.
    fn complete(&mut self, machine: MachineId) -> Result<Message, String> {
        let plugged = self.plug(machine, false)?;
        // Memory that was not available before may be available now.
        let whole = self.windows.complete(machine, news(&self.control));
        self.plug_doorbell(machine);
        self.tell(machine);
        whole?;
        Ok(self.added(machine, &plugged))
    }

    /// The number of the next machine.
    fn number(&mut self) -> Result<MachineId, String> {
        let machine = self.next;
        let next = machine.checked_add(1);
        self.next = next.ok_or("this broker has had as many machines as it can number; restart it")?;
        Ok(machine)
    }

    /// Makes the windows of a new machine, starts its port, and plugs in what can be plugged in now.
    fn attach(&mut self, machine: MachineId, new: NewMachine, at_once: bool) -> Result<Plugged, String> {
        let NewMachine { name, monitor, socket, room, layout } = new;
        self.state.attached(&AttachmentRecord {
            name: name.to_string(),
            monitor: monitor.clone(),
            port: socket.clone(),
            room,
            migratable: layout == WindowLayout::Migratable,
        });
        self.open_windows(machine, &name, &monitor, room)?;
        // Before anything is done that would have to be undone.
        self.windows.afford(machine)?;
        let port = Port::start(machine, &name, &socket, self.silence, self.control.clone(), self.tasks.clone());
        let port = Some(port.map_err(|e| format!("cannot attend to {name}: {e}"))?);
        let attended = Attended {
            name: name.clone(),
            monitor,
            socket,
            room,
            port,
            layout,
            migration: MigrationStep::None,
            has_windows: true,
            plug_failure: None,
            untold: false,
            doorbell: Err(NOT_YET.to_owned()),
        };
        self.machines.insert(machine, attended);
        // If this broker is killed now, the next one must know the windows that are in the machine.
        self.remember();
        match self.plug(machine, false) {
            Err(why) if at_once => {
                self.take_back(machine);
                Err(why)
            }
            Err(why) => {
                tracing::info!(machine = %name, why, "not plugged in yet");
                Ok(Plugged::default())
            }
            Ok(done) => Ok(done),
        }
    }

    fn added(&self, machine: MachineId, plugged: &Plugged) -> Message {
        let attended = self.machines.get(&machine);
        let up = attended.is_some_and(Attended::has_greeted);
        let by_port = attended.and_then(|m| m.doorbell.as_ref().err()).map(String::as_str);
        let took_us = u64::try_from(plugged.took.as_micros()).unwrap_or(u64::MAX);
        let remark = Text(remark(plugged, by_port, up));
        Message::MachineAdded { machine: machine.get(), plugged: plugged.count, took_us, remark }
    }

    fn remove(&mut self, name: &Name) -> Result<Message, String> {
        let found = self.machines.iter().find(|(_, m)| m.name == *name).map(|(id, _)| *id);
        let machine = found.ok_or_else(|| format!("no machine is called {name}; see `partywall vm list`"))?;
        if self.machines.get(&machine).is_some_and(|m| matches!(m.migration, MigrationStep::Releasing { .. })) {
            return Err(format!("{name} is being released for a migration; wait for that to end"));
        }
        let pairs =
            self.windows.of(machine).into_iter().flat_map(|(key, window)| {
                [(key.0, WindowRole::Owner, window.id), (key.1, WindowRole::Peer, window.id)]
            });
        let mut plugged: Vec<(Origin, WindowRole, WindowId)> = pairs.collect();
        for (side, there) in &self.machines {
            for (of, role, window) in self.groups.of(*side, &there.name) {
                if *side == machine || self.groups.is_of(of, machine) {
                    plugged.push((Origin::Machine(*side), role, window.id));
                }
            }
        }
        // Those between it and a machine that was taken over and has not looked for its windows.
        let called = |name: &Option<String>| {
            let (id, _) = self.machines.iter().find(|(_, there)| name.as_deref() == Some(there.name.as_str()))?;
            Some(Origin::Machine(*id))
        };
        for window in self.state.windows_left(name.as_str()) {
            let Ok(id) = window.id.parse::<WindowId>() else { continue };
            let sides = [(called(&window.owner), WindowRole::Owner), (called(&window.peer), WindowRole::Peer)];
            plugged.extend(sides.into_iter().filter_map(|(side, role)| Some((side?, role, id))));
        }
        self.drop_ended_doorbells();
        // A window that QEMU does not release stays in the machine, without an owner.
        for (side, role, id) in plugged {
            if let Some(there) = side.machine().and_then(|machine| self.machines.get(&machine))
                && let Ok(mut monitor) = Machine::connect(&there.monitor)
            {
                let outcome = monitor.unplug(id, role);
                tracing::debug!(machine = %there.name, window = %id, ?outcome, "unplugged");
            }
        }
        if let Some(there) = self.machines.get(&machine)
            && let Ok(doorbell) = &there.doorbell
            && let Some(qemu) = plugging::process_behind(&there.monitor)
        {
            self.left.insert(there.monitor.clone(), LeftDoorbell { doorbell: doorbell.clone(), qemu });
        }
        self.forget(machine);
        tracing::info!(machine = %name, "machine detached");
        Ok(Message::Done {})
    }

    /// Takes out of a machine the windows that it has got, since it is not to have all of them.
    fn take_back(&self, machine: MachineId) {
        let Some(Ok(mut monitor)) = self.machines.get(&machine).map(|there| Machine::connect(&there.monitor)) else {
            return;
        };
        for ((owner, _), window) in self.windows.of(machine) {
            let role = if owner == machine.into() { WindowRole::Owner } else { WindowRole::Peer };
            let outcome = monitor.unplug(window.id, role);
            tracing::debug!(window = %window.id, ?outcome, "taken back");
        }
    }

    /// Ends what is between this machine and all others.
    fn forget(&mut self, machine: MachineId) {
        // Its sessions end with its port, before the core forgets whose they were.
        let gone = self.machines.remove(&machine);
        if let Some(gone) = &gone {
            self.state.forget_windows(gone.name.as_str());
        }
        if let Some(gone) = gone
            && let MigrationStep::Releasing { session, request } = gone.migration
        {
            let reason = format!("{} was detached before its agent had released the windows", gone.name);
            let answer = Message::Refused { code: Refusal::Machine, reason };
            self.control.errand(Errand::Answer(session, request, answer));
        }
        self.windows.close(machine);
        self.groups.close(machine);
        self.control.errand(Errand::News(MachineNews::Removed { machine }));
    }
}

/// A machine that an administrator, or the operator's file, has named.
#[derive(Debug)]
struct NewMachine {
    name: Name,
    monitor: String,
    socket: String,
    room: u64,
    layout: WindowLayout,
}

/// Why a machine was not attached.
#[derive(Debug)]
struct AddFailure {
    why: String,
    /// It may be leaving, because it is being migrated or another program holds its monitor. It can be tried again.
    is_held: bool,
}

impl From<String> for AddFailure {
    fn from(why: String) -> Self {
        Self { why, is_held: false }
    }
}

fn layout(migratable: bool) -> WindowLayout {
    if migratable { WindowLayout::Migratable } else { WindowLayout::Usual }
}

fn layout_in_words(layout: WindowLayout) -> &'static str {
    match layout {
        WindowLayout::Usual => "without --migratable",
        WindowLayout::Migratable => "with --migratable",
    }
}

/// Tells the core what has become of machines.
fn news(control: &ServerControl) -> impl Fn(MachineNews<OwnedFd>) + Send + Clone + use<> {
    let control = control.clone();
    move |news| control.errand(Errand::News(news))
}

/// Whether a machine can take windows of this size, in either role, and has this port.
fn can_take(monitor: &str, port: &str, room: u64, layout: WindowLayout) -> Result<(), String> {
    let size = windows::file_size(room).map_err(|e| e.to_string())?;
    let mut machine = Machine::connect(monitor).map_err(|e| e.to_string())?;
    machine.expect_port(Path::new(port)).map_err(|e| e.to_string())?;
    let facts = machine.facts().map_err(|e| e.to_string())?;
    let obstacle = match layout {
        WindowLayout::Usual => facts.any_obstacle(size),
        WindowLayout::Migratable => facts.migratable_obstacle(size),
    };
    match obstacle {
        Some(obstacle) => Err(VmError::Obstacle { machine: facts.name, obstacle }.to_string()),
        None => Ok(()),
    }
}
