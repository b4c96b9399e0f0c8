//! The devices that are plugged into a machine: its windows and its doorbell device. The guest gets a list of them.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use partywall_protocol::window::DATA_OFFSET;
use partywall_protocol::wire::{MachineId, Name, Origin, PluggedAs};
use partywall_vm::ivshmem::Switchboard;
use partywall_vm::{Machine, PlugKind, VmError, WindowDevice, WindowLayout, WindowRole};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::port::{Announced, Announcement, Part};
use super::{MigrationStep, PAUSE, Task, Work, windows};
use crate::control::Errand;
use crate::core::MachineNews;

/// The devices that were plugged in.
#[derive(Debug, Default)]
pub(super) struct Plugged {
    pub(super) count: u32,
    pub(super) took: Duration,
    /// As what; unknown where it could not be tried yet.
    pub(super) kind: Option<PlugKind>,
    /// Windows of groups that it cannot have.
    pub(super) left_out: usize,
    /// Windows that wait for its agent to greet.
    pub(super) later: usize,
    /// Why some windows are not plugged in, and what to do.
    pub(super) failure: Option<String>,
}

impl Work {
    /// Makes the windows between a new machine and each other, and the host, and those that it has in groups.
    /// Those of the last broker are used again.
    pub(super) fn open_windows(
        &mut self,
        machine: MachineId,
        name: &Name,
        monitor: &str,
        room: u64,
    ) -> Result<(), String> {
        let others = self
            .machines
            .iter()
            .filter(|(id, m)| **id != machine && m.has_windows)
            .map(|(id, m)| ((Origin::Machine(*id), m.name.as_str()), m.room.min(room), Some(m.monitor.as_str())));
        let this = (Origin::Machine(machine), name.as_str());
        for (other, room, monitors) in others.chain([((Origin::Host, "host"), room, None)]) {
            let monitors: Vec<&str> = monitors.into_iter().chain([monitor]).collect();
            let size = windows::file_size(room).map_err(|e| e.to_string())?;
            for (owner, peer) in [(this, other), (other, this)] {
                let known = |side: (Origin, &'_ str)| side.0.machine().map(|_| side.1.to_owned());
                let (owned_by, read_by) = (known(owner), known(peer));
                let key = (owner.0, peer.0);
                // An earlier attempt may have failed half-way.
                if self.windows.has(key) {
                    continue;
                }
                let (news, in_use) = match self.state.find((owned_by.as_deref(), read_by.as_deref()), size, &monitors) {
                    Some((file, in_use)) => (self.windows.insert(key, file), in_use),
                    None => (self.windows.open(owner, peer, room), Vec::new()),
                };
                self.control.errand(Errand::News(news.map_err(|e| e.to_string())?));
                if !in_use.is_empty() {
                    let (owner, peer) = key;
                    self.control.errand(Errand::News(MachineNews::InUse { owner, peer, places: in_use }));
                }
            }
        }
        for news in self.groups.add(machine, name, monitor).map_err(|e| e.to_string())? {
            self.control.errand(Errand::News(news));
        }
        self.groups.ids().for_each(|id| self.state.use_again(id));
        Ok(())
    }

    /// Plugs in the missing devices: as memory if the machine was started for that, as PCI devices otherwise.
    ///
    /// A kernel that is still starting would miss a read-only window (an nvdimm): an event announces it, which is lost while the driver
    /// (`nfit`) is not loaded, and the driver does not look again. So it is plugged in once the agent is there.
    pub(super) fn plug(&self, machine: MachineId, greeted: bool) -> Result<Plugged, String> {
        let Some(attended) = self.machines.get(&machine) else { return Ok(Plugged::default()) };
        if attended.migration != MigrationStep::None {
            return Ok(Plugged::default());
        }
        let monitor = Machine::connect(&attended.monitor).map_err(|e| e.to_string())?;
        self.plug_by(monitor, machine, greeted)
    }

    /// The same, by this connection to its monitor.
    fn plug_by(&self, monitor: Machine, machine: MachineId, greeted: bool) -> Result<Plugged, String> {
        let start = Instant::now();
        let mut plugged = Plugged::default();
        let Some(attended) = self.machines.get(&machine) else { return Ok(plugged) };
        let mut monitor = monitor.with_layout(attended.layout);
        let facts = monitor.facts().map_err(|e| e.to_string())?;
        let kind = if attended.layout == WindowLayout::Migratable { PlugKind::Memory } else { facts.kind() };
        let plugged_as = if kind == PlugKind::Memory { PluggedAs::Memory } else { PluggedAs::Device };
        self.control.errand(Errand::News(MachineNews::Plugged { machine, plugged_as }));
        let socket = Path::new(&attended.socket);
        let has_started = greeted
            || kind != PlugKind::Memory
            || attended.layout == WindowLayout::Migratable
            || monitor.is_listening(socket).map_err(|e| e.to_string())?;
        let mut plug = |window: &WindowDevice, role| {
            if role == WindowRole::Peer && !has_started {
                plugged.later += 1;
                return Ok(None);
            }
            let (took, address) = match kind {
                PlugKind::Memory => monitor.plug(window, role).map(|there| (there.took, Some(there.address))),
                PlugKind::Device { .. } => monitor.plug_device(window, role).map(|there| (there.took, None)),
            }
            .map_err(|e| e.to_string())?;
            plugged.count += u32::from(took.is_some());
            Ok::<_, String>(address)
        };
        for ((owner, _), window) in self.windows.of(machine) {
            plug(&window, if owner == machine.into() { WindowRole::Owner } else { WindowRole::Peer })?;
        }
        let of_groups = self.groups.of(machine, &attended.name);
        if kind == PlugKind::Memory && attended.layout == WindowLayout::Usual {
            for (of, role, window) in of_groups {
                if let Some(address) = plug(&window, role)? {
                    let place = address.saturating_add(DATA_OFFSET);
                    self.control.errand(Errand::News(MachineNews::GroupPlugged { machine, of, place }));
                }
            }
        } else {
            // Members map each other's whole, at the same addresses, and hold on to it: uncached that is of no use.
            plugged.left_out = of_groups.len();
        }
        let by = monitor.migration_obstacle().unwrap_or_else(|e| Some(e.to_string()));
        self.control.errand(Errand::News(MachineNews::Fixed { machine, by }));
        Ok(Plugged { took: start.elapsed(), kind: Some(kind), ..plugged })
    }

    /// Gives the machine a doorbell device, if it has none of this broker's and can have one. Without it rings go by its port.
    pub(super) fn plug_doorbell(&mut self, machine: MachineId) {
        self.drop_ended_doorbells();
        let Some(attended) = self.machines.get_mut(&machine) else { return };
        if attended.layout == WindowLayout::Migratable {
            attended.doorbell =
                Err("it was attached to be migratable, and a doorbell device does not survive a migration".to_owned());
            return;
        }
        if attended.doorbell.is_err()
            && let Some(left) = self.left.remove(&attended.monitor)
        {
            attended.doorbell = Ok(left.doorbell);
        }
        let before = attended.doorbell.as_ref().err().cloned();
        let plugged = Machine::connect(&attended.monitor).and_then(|mut monitor| {
            // Doorbell devices of earlier brokers stay, without a process at their other end.
            let there = monitor.doorbells()?;
            if attended.doorbell.as_ref().is_ok_and(|doorbell| there.contains(&doorbell.id())) {
                return Ok(());
            }
            attended.doorbell = Err("it was taken out".to_owned());
            let (doorbell, socket) = Switchboard::new()?;
            monitor.plug_doorbell(doorbell.id(), &socket)?;
            attended.doorbell = Ok(doorbell);
            Ok(())
        });
        let Err(error) = plugged else { return };
        let why = match error {
            VmError::Obstacle { obstacle, .. } => obstacle.to_string(),
            error => error.to_string(),
        };
        // A guest that greets without end must not fill the log.
        if before.as_ref() != Some(&why) {
            tracing::info!(machine = %attended.name, why, "no doorbell device was plugged in");
        }
        // A machine keeps the doorbell device that it has, though its monitor may not answer now.
        if attended.doorbell.is_err() {
            attended.doorbell = Err(why);
        }
    }

    /// Drops what there is of doorbell devices whose machines have ended.
    pub(super) fn drop_ended_doorbells(&mut self) {
        self.left.retain(|_, left| !has_ended(&left.qemu));
    }

    /// Plugs in what is not there, and tells the guest what it has.
    ///
    /// A migratable machine whose monitor does not answer may be leaving. It is not told anything: its agent would look for devices, and
    /// find those again that it has given up. The monitor is asked again after a pause, in case the machine stays.
    pub(super) fn plug_and_tell(&mut self, machine: MachineId, greeted: bool) {
        let Some(attended) = self.machines.get(&machine) else { return };
        let stays = attended.migration == MigrationStep::None;
        let monitor = stays.then(|| Machine::connect(&attended.monitor).map_err(|e| e.to_string())).transpose();
        let may_leave = monitor.is_err() && attended.layout == WindowLayout::Migratable;
        let plugged =
            monitor.and_then(|monitor| monitor.map(|monitor| self.plug_by(monitor, machine, greeted)).transpose());
        let failure = plugged.err();
        if failure.is_none() {
            self.plug_doorbell(machine);
        }
        let Some(attended) = self.machines.get_mut(&machine) else { return };
        // A guest that greets without end must not fill the log.
        if attended.plug_failure != failure {
            if let Some(why) = &failure {
                tracing::warn!(machine = %attended.name, why, "windows are not plugged in");
            }
            attended.plug_failure = failure;
        }
        if !may_leave {
            return self.tell(machine);
        }
        attended.untold = attended.has_greeted();
        if attended.untold {
            self.tasks.add_later(Task::Up { machine }, PAUSE);
        }
    }

    /// Tells the guest what it has.
    pub(super) fn tell(&mut self, machine: MachineId) {
        self.machines.entry(machine).and_modify(|attended| attended.untold = false);
        let Some(attended) = self.machines.get(&machine) else { return };
        let Some(port) =
            attended.port.as_ref().filter(|port| port.has_greeted() && attended.migration == MigrationStep::None)
        else {
            return;
        };
        let name = |origin: Origin| {
            let machine = origin.machine().and_then(|machine| self.machines.get(&machine));
            machine.map_or("host", |machine| machine.name.as_str()).to_owned()
        };
        let pairs = self.windows.of(machine).into_iter().filter_map(|((owner, peer), window)| {
            let own = owner == machine.into();
            let memory = self.windows.reader((owner, peer))?;
            let other = name(if own { peer } else { owner });
            Some(Announcement { id: window.id, own, part: Part::Between(owner, peer), other, memory })
        });
        let of_groups =
            if attended.layout == WindowLayout::Usual { self.groups.of(machine, &attended.name) } else { Vec::new() };
        let groups = of_groups.into_iter().filter_map(|(of, role, window)| {
            let memory = self.groups.reader(of)?;
            let (own, other) = (role == WindowRole::Owner, self.groups.member(of));
            Some(Announcement { id: window.id, own, part: Part::Group(of), other, memory })
        });
        let doorbell = attended.doorbell.as_ref().ok().cloned();
        port.announce(Announced { windows: pairs.chain(groups).collect(), doorbell });
    }
}

/// The process behind a monitor that answers. It becomes readable when the process has ended.
pub(super) fn process_behind(monitor: &str) -> Option<OwnedFd> {
    let process = Machine::connect(monitor).ok()?.process().ok()?;
    let process = rustix::process::Pid::from_raw(process.try_into().ok()?)?;
    rustix::process::pidfd_open(process, rustix::process::PidfdFlags::empty()).ok()
}

fn has_ended(process: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(process, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
}

/// The remark for the administrator who has attached the machine: the kind of its windows with the reason, and other facts worth knowing.
pub(super) fn remark(plugged: &Plugged, by_port: Option<&str>, up: bool) -> String {
    let mut said = match &plugged.kind {
        None => String::new(),
        Some(PlugKind::Memory) => {
            "as memory devices, for which it was started with places (slots, maxmem, nvdimm)".to_owned()
        }
        Some(PlugKind::Device { because }) => format!(
            "as PCI devices (ivshmem), which may be uncached in it and then slow (`partywall doctor` in it says so): {because}"
        ),
    };
    let mut also = |what: &str| {
        said.push_str(if said.is_empty() { "" } else { "\n" });
        said.push_str(what);
    };
    if let Some(failure) = &plugged.failure {
        also(failure);
    }
    if plugged.left_out > 0 {
        also("it cannot take part in its groups, whose windows are memory devices only");
    }
    match by_port {
        Some(why) if plugged.kind.is_some() => {
            also(&format!("it is rung by its serial port, which is slower than interrupts would be: {why}"));
        }
        Some(_) => {}
        None => also("it can be rung by interrupts (`partywall vm list` shows whether it is)"),
    }
    if plugged.later > 0 {
        also(&format!("windows plugged in when its agent greets: {} more", plugged.later));
    }
    if !up {
        also("its agent has not greeted yet (`partywall agent` in it); `partywall vm list` shows when it has");
    }
    said
}
