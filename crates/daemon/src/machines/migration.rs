//! A machine that leaves for another host, or comes back from a migration that has failed (protocol G7).
//!
//! ```text
//!   attached -- Release --> releasing -- its agent has removed the devices --> migrating -- detach --> gone
//!      ^                        |                                 (Released)       |
//!      |                        v  the agent says what holds a window, or nothing  |
//!      +------ Resume ----- migrating, port open                                   |
//!      +------------------------------- Resume ------------------------------------+
//! ```
//!
//! The windows of a migrating machine stay with its QEMU until that ends. No places in them are given out, so a guest that falsely claims
//! to have released them keeps only the places that it had. A broker that starts meanwhile takes the machine over as *migrating*.

use std::io;

use partywall_protocol::wire::{MachineId, Message, Name, Refusal};
use partywall_vm::qmp::QmpError;
use partywall_vm::{Machine, VmError, WindowLayout};

use super::plugging::Plugged;
use super::port::Port;
use super::state::AttachmentRecord;
use super::{AddFailure, Attended, MigrationStep, NOT_YET, NewMachine, Work, layout};
use crate::control::Errand;
use crate::core::{MachineNews, SessionId};

impl Work {
    /// Begins to have a machine give up its windows. The answer follows when its agent has done so.
    pub(super) fn release(&mut self, name: &Name, session: SessionId, request: u32) -> Result<(), String> {
        let machine = self.find(name)?;
        let Some(attended) = self.machines.get_mut(&machine) else { return Ok(()) };
        match (attended.migration, &attended.port) {
            (MigrationStep::Releasing { .. }, _) => {
                return Err(format!("{name} is being released for another request; wait for that one to end"));
            }
            // An earlier request has done so, and its client ended before the migration.
            (MigrationStep::Released, _) => {
                self.control.errand(Errand::Answer(session, request, Message::Done {}));
                return Ok(());
            }
            // Its programs may still map its windows, and nobody can be asked to remove them.
            (MigrationStep::Migrating, None) => {
                return Err(format!(
                    "{name} has not released its windows, and its port is closed since it could not be opened again; use `partywall vm attach \
                     {name} --resume`, and then repeat the command"
                ));
            }
            (MigrationStep::Migrating | MigrationStep::None, _) => {}
        }
        if !attended.has_greeted() {
            return Err(format!(
                "the agent of {name} is not connected, so nobody in it can remove its windows; start `partywall agent` in it, or \
                 use `partywall vm detach {name}`, after which it stays with its devices and QEMU refuses to migrate some of them"
            ));
        }
        let mut monitor = Machine::connect(&attended.monitor).map_err(|e| e.to_string())?;
        if let Some(why) = monitor.migration_obstacle().map_err(|e| e.to_string())? {
            return Err(format!("{name} cannot be migrated: {why}"));
        }
        drop(monitor);
        // An agent that has started since the last attempt knows of no window, and would remove none.
        attended.migration = MigrationStep::None;
        self.plug_and_tell(machine, false);
        self.tell(machine);
        self.control.errand(Errand::News(MachineNews::Migrating { machine, leaves: true }));
        let Some(attended) = self.machines.get_mut(&machine) else { return Ok(()) };
        attended.migration = MigrationStep::Releasing { session, request };
        let Some(port) = &attended.port else { return Ok(()) };
        port.release();
        tracing::info!(machine = %name, "the machine is to give up its windows");
        Ok(())
    }

    /// The agent has removed the windows, or says why it has not.
    pub(super) fn released(&mut self, machine: MachineId, failure: Option<String>) {
        let Some(attended) = self.machines.get_mut(&machine) else { return };
        let MigrationStep::Releasing { session, request } = attended.migration else { return };
        attended.migration = MigrationStep::Migrating;
        let name = &attended.name;
        let answer = match failure {
            None => {
                tracing::info!(machine = %name, "the machine has given up its windows");
                // The machine's sessions end with the port, and its monitor is free.
                attended.port = None;
                attended.migration = MigrationStep::Released;
                Message::Done {}
            }
            Some(why) => {
                tracing::warn!(machine = %name, why, "the machine has not given up its windows");
                let reason = format!(
                    "{name} has not released its windows: {why}. Its connections are on TCP. Repeat the command to try again, or use \
                     `partywall vm attach {name} --resume` to let it stay"
                );
                Message::Refused { code: Refusal::Machine, reason }
            }
        };
        // Before the answer: a broker that starts after it must not give the machine its windows back.
        self.remember();
        self.control.errand(Errand::Answer(session, request, answer));
    }

    /// A machine that was to leave stays, and gets the same windows again.
    pub(super) fn resume(&mut self, name: &Name) -> Result<Message, String> {
        let machine = self.find(name).map_err(|why| {
            format!(
                "{why}. If this broker has started since the machine was released, attach the machine with `partywall vm attach {name} \
                 --qmp ... --port ... --migratable`"
            )
        })?;
        let Some(attended) = self.machines.get_mut(&machine) else { return Ok(Message::Done {}) };
        match attended.migration {
            MigrationStep::None => return Err(format!("{name} is attached, and was not released for a migration")),
            MigrationStep::Releasing { .. } => {
                return Err(format!("{name} is being released for another request; wait for that one to end"));
            }
            MigrationStep::Migrating | MigrationStep::Released => {}
        }
        let mut monitor = Machine::connect(&attended.monitor).map_err(|e| e.to_string())?;
        if monitor.has_migrated_away().map_err(|e| e.to_string())? {
            return Err(format!(
                "{name} has left this QEMU: its migration has succeeded. Attach it at its new host, and here use `partywall vm \
                 detach {name}`"
            ));
        }
        still_migrates(name, &mut monitor)?;
        drop(monitor);
        if !attended.has_windows {
            self.find_windows(machine, name)?;
        }
        let Some(attended) = self.machines.get_mut(&machine) else { return Ok(Message::Done {}) };
        // The old thread ends first: a port has one client.
        attended.port = None;
        let port = Port::start(machine, name, &attended.socket, self.silence, self.control.clone(), self.tasks.clone());
        attended.port = Some(port.map_err(|e| format!("cannot attend to {name}: {e}"))?);
        attended.migration = MigrationStep::None;
        let again = format!(
            "partywall vm attach {name} --qmp {} --port {}{}",
            attended.monitor,
            attended.socket,
            if attended.layout == WindowLayout::Migratable { " --migratable" } else { "" }
        );
        self.control.errand(Errand::News(MachineNews::Migrating { machine, leaves: false }));
        // The machine stays even if that fails: it can be attached again, but not be taken back again.
        let plugged = self.plug(machine, false).unwrap_or_else(|why| {
            let failure = format!("some windows are not plugged in: {why}; `{again}` tries again");
            Plugged { failure: Some(failure), ..Plugged::default() }
        });
        tracing::info!(machine = %name, failure = plugged.failure, "the machine stays");
        Ok(self.added(machine, &plugged))
    }

    /// Takes over a machine that had released its windows with the last broker, as its administrator or the operator's file names it now.
    /// `None` if it is not one, or if it has left.
    pub(super) fn take_released_as(&mut self, new: &NewMachine) -> Option<Result<Message, String>> {
        let all = self.state.released_left();
        let record = all.into_iter().find(|one| one.name == new.name.as_str() && one.monitor == new.monitor)?;
        self.take_released(&record)
    }

    /// Takes over a machine that had released its windows with the last broker and that may be leaving: it is migrating. `None` if it has
    /// left: its QEMU has ended, or another QEMU has its monitor.
    pub(super) fn take_released(&mut self, record: &AttachmentRecord) -> Option<Result<Message, String>> {
        let known: Vec<String> = self.state.windows_left(&record.name).into_iter().map(|window| window.id).collect();
        let may_leave = match Machine::connect(&record.monitor).and_then(|mut monitor| monitor.windows()) {
            Ok(plugged) => plugged.iter().any(|window| known.contains(&window.id.to_string())),
            // Unless QEMU has ended, the program that migrates the machine probably has the monitor.
            Err(error) => !is_absent(&error),
        };
        may_leave.then(|| self.take_migrating(record))
    }

    /// Takes over a machine that may be leaving. Nothing is plugged in, and nobody is at its port. Its windows are looked for when it stays:
    /// now another program may take the monitor, by which they are found, at any moment.
    fn take_migrating(&mut self, record: &AttachmentRecord) -> Result<Message, String> {
        let AttachmentRecord { name, monitor, port, room, migratable } = record.clone();
        let (name, layout) = (Name::new(&name).map_err(|e| e.to_string())?, layout(migratable));
        let new = NewMachine { name: name.clone(), monitor: monitor.clone(), socket: port.clone(), room, layout };
        if self.check_new(&new)?.is_some() {
            return Err(format!("{name} is attached"));
        }
        let machine = self.number()?;
        self.state.attached(record);
        let added = MachineNews::Added { machine, name: name.clone(), monitor: monitor.clone(), port: port.clone() };
        for news in [added, MachineNews::Migrating { machine, leaves: true }] {
            self.control.errand(Errand::News(news));
        }
        let attended = Attended {
            name: name.clone(),
            monitor,
            socket: port,
            room,
            port: None,
            layout,
            migration: MigrationStep::Released,
            has_windows: false,
            plug_failure: None,
            untold: false,
            doorbell: Err(NOT_YET.to_owned()),
        };
        self.machines.insert(machine, attended);
        tracing::info!(machine = %name, "the machine had released its windows with the last broker, and may be migrated");
        Ok(self.added(machine, &Plugged::default()))
    }

    /// Finds the windows of a machine that was taken over, or makes new ones.
    fn find_windows(&mut self, machine: MachineId, name: &Name) -> Result<(), String> {
        let Some(attended) = self.machines.get(&machine) else { return Ok(()) };
        let (monitor, room) = (attended.monitor.clone(), attended.room);
        self.open_windows(machine, name, &monitor, room)?;
        // Windows that were not found are new ones, which lack their memory.
        self.windows.afford(machine)?;
        self.machines.entry(machine).and_modify(|attended| attended.has_windows = true);
        self.settle();
        self.tell_others(machine);
        Ok(())
    }

    /// Forgets an attachment of this name whose machine has left: its QEMU has ended, or has migrated it, or another QEMU has its monitor.
    pub(super) fn drop_departed(&mut self, name: &Name, monitor: &str) -> Result<(), String> {
        let Ok(machine) = self.find(name) else { return Ok(()) };
        let Some(attended) = self.machines.get(&machine) else { return Ok(()) };
        let has_left = match Machine::connect(&attended.monitor) {
            Ok(mut there) => {
                let plugged = there.windows().map_err(|e| e.to_string())?;
                let known = self.windows.of(machine).into_iter().map(|(_, window)| window.id.to_string());
                let waiting = self.state.windows_left(name.as_str()).into_iter().map(|window| window.id);
                let known: Vec<_> = known.chain(waiting).collect();
                let has_ours = plugged.iter().any(|window| known.contains(&window.id.to_string()));
                there.has_migrated_away().map_err(|e| e.to_string())? || attended.migration.is_leaving() && !has_ours
            }
            // The monitor is not running. A machine of the operator's file need not have started yet. It is replaced by one with another
            // monitor.
            Err(VmError::Qmp(QmpError::Unreachable { source, .. }))
                if matches!(source.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound) =>
            {
                attended.monitor != monitor || attended.migration.is_leaving()
            }
            // Another program has its monitor, or it is slow to answer.
            Err(_) => false,
        };
        if has_left {
            tracing::info!(machine = %name, "the machine has left; its attachment is replaced");
            self.forget(machine);
        } else if attended.migration != MigrationStep::None {
            return Err(format!(
                "{name} is being migrated; `partywall vm attach {name} --resume` lets it stay, `partywall vm detach {name}` forgets it"
            ));
        }
        Ok(())
    }

    /// Fails if QEMU has migrated a machine, migrates it, or may do so: windows that it got now would be missing at its destination. Only a
    /// migratable machine may do so while its monitor does not answer. A machine that has windows of the last broker (`has_windows`) keeps them
    /// until its monitor says which they are.
    pub(super) fn check_stays(new: &NewMachine, has_windows: bool) -> Result<(), AddFailure> {
        let NewMachine { name, monitor, layout, .. } = new;
        let held = |why| AddFailure { why, is_held: true };
        match Machine::connect(monitor) {
            Ok(mut there) => {
                if there.has_migrated_away().map_err(|e| held(e.to_string()))? {
                    return Err(format!("{name} has left this QEMU: its migration has succeeded").into());
                }
                // The migration may fail.
                still_migrates(name, &mut there).map_err(held)
            }
            // A machine that does not run has no windows to get.
            Err(error) if is_absent(&error) => Ok(()),
            Err(_) if *layout == WindowLayout::Usual && !has_windows => Ok(()),
            Err(error) => {
                Err(held(format!("QEMU may be migrating {name}, or have windows of the last broker: {error}")))
            }
        }
    }

    fn find(&self, name: &Name) -> Result<MachineId, String> {
        let found = self.machines.iter().find(|(_, m)| m.name == *name).map(|(id, _)| *id);
        found.ok_or_else(|| format!("no machine is called {name}; see `partywall vm list`"))
    }
}

/// Whether no QEMU has this monitor.
fn is_absent(error: &VmError) -> bool {
    match error {
        VmError::Qmp(QmpError::Unreachable { source, .. }) => {
            matches!(source.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound)
        }
        // Another program, or a QEMU that is ending.
        VmError::Qmp(QmpError::NotQmp { .. }) => true,
        _ => false,
    }
}

fn still_migrates(name: &Name, monitor: &mut Machine) -> Result<(), String> {
    let progress = monitor.migration_progress().map_err(|e| e.to_string())?;
    match progress.is_under_way() {
        true => Err(format!(
            "QEMU is migrating {name} ({}); wait until that has ended, or end it by migrate_cancel at its monitor",
            progress.status
        )),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests;
