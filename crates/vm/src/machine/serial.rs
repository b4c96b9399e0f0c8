//! The host's end of a machine's serial port, which is a chardev of QEMU's.

use super::Machine;
use crate::error::VmError;
use std::path::Path;

impl Machine {
    /// Whether a program of the guest has the port open whose host's end is this socket; `true` if QEMU does not know such a socket.
    pub fn is_listening(&mut self, socket: &Path) -> Result<bool, VmError> {
        let listed = self.qmp.chardevs()?;
        let open: Vec<bool> = listed.iter().filter(|port| port.is_at(socket)).map(|port| port.open).collect();
        Ok(open.is_empty() || open.contains(&true))
    }

    /// Fails if none of the machine's chardevs is this socket. A chardev that QEMU was handed as a descriptor (libvirt does so) has no
    /// path that QEMU knows, so it may be the wanted one.
    pub fn expect_port(&mut self, socket: &Path) -> Result<(), VmError> {
        let listed = self.qmp.chardevs()?;
        let exists = std::fs::symlink_metadata(socket).is_ok();
        if listed.iter().any(|port| port.is_at(socket) || exists && port.path().is_none() && port.is_socket()) {
            return Ok(());
        }
        let monitor = self.qmp.path();
        let there = listed.iter().filter(|port| !port.is_monitor() && !port.is_at(monitor));
        let there = there.filter_map(|port| Some((port.name.clone(), port.path()?.to_owned()))).collect();
        Err(VmError::NoSuchPort { machine: self.name.clone(), port: socket.to_owned(), there })
    }
}
