//! PCI Express ports: the places that a device can be plugged into, where a machine's bus does not take devices directly.

use super::Machine;
use crate::error::VmError;
use crate::facts::WindowObstacle;

/// The kinds of objects that are ports.
const PORTS: [&str; 3] = ["child<pcie-root-port>", "child<ioh3420>", "child<xio3130-downstream>"];
/// Ports looked at together.
const SOME: usize = 8;
/// Free ports that are enough for now.
const ENOUGH: usize = 4;

impl Machine {
    /// A port for a PCI device, which from now on is taken; `None` where the bus takes devices directly.
    pub(crate) fn take_port(&mut self) -> Result<Option<String>, VmError> {
        self.know_a_free_port()?;
        let machine = self.name.clone();
        match &mut self.know()?.facts.free_ports {
            None => Ok(None),
            Some(ports) if ports.is_empty() => Err(VmError::Obstacle { machine, obstacle: WindowObstacle::NoPort }),
            Some(ports) => Ok(Some(ports.remove(0))),
        }
    }

    /// Ports that have a name to plug into.
    pub(super) fn ports(&mut self) -> Result<Vec<String>, VmError> {
        let devices = self.qmp.children("/machine/peripheral")?;
        Ok(devices.into_iter().filter(|device| PORTS.contains(&device.kind.as_str())).map(|port| port.name).collect())
    }

    /// Some ports without a device, from the first on. Ports that were not examined are left in `ports`; none are left if there is no
    /// free one. (Each costs QEMU half a millisecond.)
    ///
    /// Not from `query-pci`: until the firmware has numbered the buses, that shows every port as empty.
    pub(super) fn free_ports(&mut self, ports: &mut Vec<String>) -> Result<Vec<String>, VmError> {
        let mut free = Vec::new();
        while free.len() < ENOUGH && !ports.is_empty() {
            let some: Vec<String> = ports.drain(..ports.len().min(SOME)).collect();
            // A port's bus has the port's name, and a link for each device on it.
            let buses: Vec<String> = some.iter().map(|port| format!("/machine/peripheral/{port}/{port}")).collect();
            for (port, children) in some.into_iter().zip(self.qmp.children_of_each(&buses)?) {
                if !children.iter().any(|child| child.name.starts_with("child[")) {
                    free.push(port);
                }
            }
        }
        Ok(free)
    }

    /// Looks for more free ports if those that are known are used up.
    pub(super) fn know_a_free_port(&mut self) -> Result<(), VmError> {
        let known = self.know()?;
        if known.facts.free_ports.as_ref().is_some_and(Vec::is_empty) && !known.ports.is_empty() {
            let mut ports = std::mem::take(&mut known.ports);
            let free = self.free_ports(&mut ports)?;
            let known = self.know()?;
            (known.ports, known.facts.free_ports) = (ports, Some(free));
        }
        Ok(())
    }
}
