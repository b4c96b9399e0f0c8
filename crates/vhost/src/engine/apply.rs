//! A file comes into force: its changes are found and prepared first, and nothing is changed unless all of them can be made.

use super::{Engine, PortEnd, rate_bucket};
use crate::VhostError;
use crate::card::{TAP, token};
use crate::config::{ListedPort, SwitchConfig};
use crate::control::ReloadReport;
use crate::listener::FrontendListener;
use crate::spin::nanoseconds;
use crate::switch::{PortNumber, SourceGuard};
use crate::tap::TapDevice;
use std::time::Duration;
use tracing::info;

/// The changes that a file makes.
#[derive(Debug, Default)]
struct FileChanges<'a> {
    removed: Vec<PortNumber>,
    changed: Vec<(PortNumber, &'a ListedPort)>,
    added: Vec<&'a ListedPort>,
}

/// What replaces the socket or the device of a port that stays.
#[derive(Debug)]
enum RenewedEnd {
    /// For another owner, or in place of a socket whose file is gone.
    Listener(FrontendListener),
    /// In place of a device that is gone.
    Device(TapDevice),
}

impl Engine {
    /// Brings a file into force, or fails and changes nothing.
    pub(super) fn apply(&mut self, config: SwitchConfig) -> Result<ReloadReport, VhostError> {
        let changes = self.changes(&config)?;
        let opened = self.open_added(&config, &changes)?;
        let renewed = match self.open_renewed(&config, &changes) {
            Ok(renewed) => renewed,
            Err(e) => {
                opened.into_iter().for_each(|(_, end)| end.abandon());
                return Err(e);
            }
        };
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
        let stay = changes.changed.iter().map(|(number, listed)| (*number, *listed));
        let come = opened.iter().map(|(number, _)| *number).zip(changes.added.iter().copied());
        let owns =
            |(number, listed): (_, &ListedPort)| listed.spec.ip.iter().map(|ip| (*ip, number)).collect::<Vec<_>>();
        self.switch.set_address_owners(stay.chain(come).flat_map(owns));
        let is_renewed: Vec<PortNumber> = renewed.iter().map(|(number, _)| *number).collect();
        renewed.into_iter().for_each(|(number, end)| self.renew(number, end));
        for (number, listed) in changes.changed {
            report.changed.extend(self.change_port(number, listed, is_renewed.contains(&number)));
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

    /// Opens new sockets of ports with another owner, and what is gone of ports that stay: all of it, or nothing.
    fn open_renewed(
        &self,
        config: &SwitchConfig,
        changes: &FileChanges<'_>,
    ) -> Result<Vec<(PortNumber, RenewedEnd)>, VhostError> {
        let mut renewed = Vec::new();
        for (number, listed) in &changes.changed {
            let Some(port) = self.ports.get(number) else { continue };
            let after = user(listed.spec.owner);
            let end = match &port.end {
                PortEnd::Card(card) if user(port.spec.owner) != after || !card.is_there() => {
                    card.successor(after).map(RenewedEnd::Listener)
                }
                PortEnd::Uplink { device, .. } if !device.exists() => {
                    let (name, folder) = (&listed.spec.name, &self.options.folder);
                    TapDevice::open(name, folder, &self.poller, token(*number, TAP)).map(RenewedEnd::Device)
                }
                PortEnd::Card(_) | PortEnd::Uplink { .. } => continue,
            };
            match end {
                Ok(end) => renewed.push((*number, end)),
                Err(e) => {
                    renewed.into_iter().for_each(|(_, end)| end.abandon());
                    return Err(failed(config, listed, &e));
                }
            }
        }
        Ok(renewed)
    }

    /// Replaces the socket or the device of a port.
    fn renew(&mut self, number: PortNumber, end: RenewedEnd) {
        let Some(port) = self.ports.get_mut(&number) else { return };
        match (&mut port.end, end) {
            (PortEnd::Card(card), RenewedEnd::Listener(successor)) => card.replace(successor),
            (PortEnd::Uplink { device, waiting, .. }, RenewedEnd::Device(successor)) => {
                (*device, *waiting) = (successor, None);
            }
            // Both were made for the same port.
            (PortEnd::Card(_) | PortEnd::Uplink { .. }, end) => end.abandon(),
        }
    }

    /// Changes the limits of a port; its name, if anything of it has changed. The guards are changed already.
    fn change_port(&mut self, number: PortNumber, listed: &ListedPort, is_renewed: bool) -> Option<String> {
        let now = self.now();
        let port = self.ports.get_mut(&number)?;
        if port.spec == listed.spec && !is_renewed {
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
        info!(port = %port.spec.name, "the port was changed");
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

impl RenewedEnd {
    /// Closes an end that has replaced nothing.
    fn abandon(self) {
        match self {
            Self::Listener(listener) => drop(listener),
            Self::Device(device) => device.abandon(),
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
