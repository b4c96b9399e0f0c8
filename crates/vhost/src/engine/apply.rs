//! A file comes into force: its changes are found and prepared first, and nothing is changed unless all of them can be made.

use super::{Engine, PortEnd, rate_bucket};
use crate::VhostError;
use crate::card::Card;
use crate::config::{ListedPort, SwitchConfig};
use crate::control::ReloadReport;
use crate::spin::nanoseconds;
use crate::switch::{PortNumber, SourceGuard};
use std::time::Duration;
use tracing::info;

/// The changes that a file makes.
#[derive(Debug, Default)]
struct FileChanges<'a> {
    removed: Vec<PortNumber>,
    changed: Vec<(PortNumber, &'a ListedPort)>,
    added: Vec<&'a ListedPort>,
}

impl Engine {
    /// Brings a file into force, or fails and changes nothing.
    pub(super) fn apply(&mut self, config: SwitchConfig) -> Result<ReloadReport, VhostError> {
        let changes = self.changes(&config)?;
        let opened = self.open_added(&config, &changes)?;
        if let Err(e) = self.give_to_owners(&config, &changes) {
            opened.into_iter().for_each(|(_, end)| end.abandon());
            return Err(e);
        }
        // From here on, nothing can fail.
        let mut report = ReloadReport::default();
        let mut guards = Vec::new();
        for number in changes.removed {
            report.removed.extend(self.remove_port(number));
        }
        for (number, listed) in &changes.changed {
            if let Some(port) = self.ports.get(number)
                && (port.spec.mac != listed.spec.mac || port.spec.ip != listed.spec.ip)
            {
                guards.push((*number, SourceGuard::new(listed.spec.mac.clone(), listed.spec.ip.clone())));
            }
        }
        self.switch.set_guards(guards);
        for (number, listed) in changes.changed {
            report.changed.extend(self.change_port(number, listed));
        }
        for ((number, end), listed) in opened.into_iter().zip(changes.added) {
            self.insert(number, listed.spec.clone(), end);
            report.added.push(listed.spec.name.clone());
        }
        self.set_forwarding(&config);
        self.config = Some(config);
        Ok(report)
    }

    fn changes<'a>(&self, config: &'a SwitchConfig) -> Result<FileChanges<'a>, VhostError> {
        let mut changes = FileChanges::default();
        for (number, port) in &self.ports {
            match config.find(&port.spec.name) {
                Some(listed) if listed.spec.tap == port.spec.tap => changes.changed.push((*number, listed)),
                None if config.other_ports && self.listed(&port.spec.name).is_none() => {
                    if let Some((address, listed)) = config.conflict(&port.spec) {
                        let (place, name, other) = (config.place(listed), &listed.spec.name, &port.spec.name);
                        return Err(VhostError::Refused(format!(
                            "{place}: {address} of the port {name} is fixed to the port {other}, which a command has added: remove that port first"
                        )));
                    }
                }
                _ => changes.removed.push(*number),
            }
        }
        let is_there = |port: &&ListedPort| changes.changed.iter().any(|(_, there)| there.spec.name == port.spec.name);
        changes.added = config.ports.iter().filter(|port| !is_there(port)).collect();
        Ok(changes)
    }

    /// Opens the ends of all new ports, or of none.
    fn open_added(
        &mut self,
        config: &SwitchConfig,
        changes: &FileChanges<'_>,
    ) -> Result<Vec<(PortNumber, PortEnd)>, VhostError> {
        let mut opened: Vec<(PortNumber, PortEnd)> = Vec::new();
        for listed in &changes.added {
            let number = self.new_number();
            match self.open(number, &listed.spec) {
                Ok((_, end)) => opened.push((number, end)),
                Err(e) => {
                    opened.into_iter().for_each(|(_, end)| end.abandon());
                    return Err(failed(config, listed, &e));
                }
            }
        }
        Ok(opened)
    }

    /// Gives the sockets of ports with another owner to that user: all of them, or none.
    fn give_to_owners(&self, config: &SwitchConfig, changes: &FileChanges<'_>) -> Result<(), VhostError> {
        let mut given: Vec<(&Card, u32)> = Vec::new();
        for (number, listed) in &changes.changed {
            let Some(port) = self.ports.get(number) else { continue };
            let PortEnd::Card(card) = &port.end else { continue };
            let (before, after) = (user(port.spec.owner), user(listed.spec.owner));
            if before == after {
                continue;
            }
            if let Err(e) = card.set_owner(after) {
                for (card, before) in given {
                    let _ = card.set_owner(before);
                }
                return Err(failed(config, listed, &e));
            }
            given.push((&**card, before));
        }
        Ok(())
    }

    /// Changes the limits of a port; its name, if any has changed. The guards are changed already.
    fn change_port(&mut self, number: PortNumber, listed: &ListedPort) -> Option<String> {
        let now = self.now();
        let port = self.ports.get_mut(&number)?;
        if port.spec == listed.spec {
            return None;
        }
        if port.spec.rate != listed.spec.rate {
            port.rate = listed.spec.rate.map(|rate| rate_bucket(rate, now));
            match &mut port.end {
                PortEnd::Card(card) => card.end_rate_waits(),
                PortEnd::Uplink { waiting, .. } => {
                    let waits = waiting.iter_mut().filter(|waiting| waiting.parked.on.is_none());
                    waits.for_each(|waiting| waiting.parked.until = 0);
                }
            }
        }
        if user(port.spec.owner) != user(listed.spec.owner)
            && let PortEnd::Card(card) = &mut port.end
        {
            // Its machine's QEMU may be the earlier owner's.
            card.disconnect();
        }
        port.spec = listed.spec.clone();
        info!(port = %port.spec.name, "the limits of the port were changed");
        Some(port.spec.name.clone())
    }

    /// How the switch forwards: by the file, and as it was started where the file says nothing.
    fn set_forwarding(&mut self, config: &SwitchConfig) {
        let (now, settings) = (self.now(), config.settings);
        let floods = settings.floods.unwrap_or(self.usual.switch.floods);
        let age = settings.age.map_or(self.usual.switch.table.age, |age| age.saturating_mul(1_000_000_000));
        self.switch.set_limits(floods, age, now);
        let hold = settings.hold.map_or(self.usual.hold, Duration::from_millis);
        if self.options.hold != hold {
            self.options.hold = hold;
            for port in self.ports.values_mut() {
                if let PortEnd::Card(card) = &mut port.end {
                    card.set_hold(nanoseconds(hold));
                }
            }
        }
    }
}

impl PortEnd {
    /// Closes an end that never became a port. A device that was there before stays.
    fn abandon(self) {
        if let Self::Uplink { device, .. } = self {
            device.abandon();
        }
    }
}

/// The user that may connect.
fn user(owner: Option<u32>) -> u32 {
    owner.unwrap_or_else(|| rustix::process::geteuid().as_raw())
}

fn failed(config: &SwitchConfig, listed: &ListedPort, e: &VhostError) -> VhostError {
    VhostError::Refused(format!("{}: the port {}: {e}", config.place(listed), listed.spec.name))
}
