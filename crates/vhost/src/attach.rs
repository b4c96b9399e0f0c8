//! How a machine gets a card on a port: at its start, and while it runs.

use crate::VhostError;
use crate::switch::MacAddress;
use partywall_vm::{Machine, VhostUserDevice, VhostUserKind, VhostUserOptions, VmError};
use std::path::Path;
use std::time::{Duration, Instant};

/// Entries of a card's queues. QEMU's own default is 256, of which few hold frames of 64 KiB.
const ENTRIES: u16 = 1024;
/// How long a guest may take to release a device. A guest that is busy, or emulated, takes seconds.
const PATIENCE: Duration = Duration::from_secs(20);

/// Options for QEMU's command line.
pub fn arguments(port: &str, socket: &Path) -> String {
    format!(
        "\
-object memory-backend-memfd,id=ram,size=1G,share=on
-machine memory-backend=ram -m 1G
-chardev socket,id=net-{port},path={},reconnect=1
-netdev vhost-user,id=net-{port},chardev=net-{port}
-device virtio-net-pci,netdev=net-{port},id=net-{port},rx_queue_size={ENTRIES},tx_queue_size={ENTRIES}

# Each machine needs its own Ethernet address: ,mac=52:54:00:... behind the device.
# Without KVM, QEMU 7.2 needs also ,vectors=0 there.",
        socket.display()
    )
}

/// XML for libvirt.
pub fn libvirt(socket: &Path) -> String {
    format!(
        "\
<domain type='kvm'>
  <!-- beside what is there: -->
  <memoryBacking>
    <source type='memfd'/>
    <access mode='shared'/>
  </memoryBacking>
  <devices>
    <interface type='vhostuser'>
      <source type='unix' path='{}' mode='client'>
        <reconnect enabled='yes' timeout='1'/>
      </source>
      <model type='virtio'/>
      <driver rx_queue_size='{ENTRIES}' tx_queue_size='{ENTRIES}'/>
    </interface>
  </devices>
</domain>",
        socket.display()
    )
}

/// The card on a port, as QEMU names it.
fn card(port: &str) -> VhostUserDevice {
    VhostUserDevice { name: format!("net-{port}"), kind: VhostUserKind::Card }
}

/// Plugs a card into a running machine, by its monitor; `false` if it has it already.
///
/// `is_taken` tells whether another machine uses the port.
pub fn plug(
    monitor: &Path,
    port: &str,
    socket: &Path,
    mac: Option<MacAddress>,
    is_taken: impl FnOnce() -> Result<bool, VhostError>,
) -> Result<bool, VhostError> {
    let mac = mac.map_or_else(|| mac_of(socket), |mac| mac.to_string());
    let options = VhostUserOptions::Card { mac, entries: ENTRIES };
    plug_device(monitor, &card(port), socket, &options, is_taken)
}

/// Plugs a device in that the machine does not have, unless another machine uses its back end.
pub(crate) fn plug_device(
    monitor: &Path,
    device: &VhostUserDevice,
    socket: &Path,
    options: &VhostUserOptions,
    is_taken: impl FnOnce() -> Result<bool, VhostError>,
) -> Result<bool, VhostError> {
    let refused = |e: VmError| VhostError::Refused(format!("cannot plug {} in: {e}", device.name));
    let mut machine = Machine::connect(monitor).map_err(refused)?;
    if machine.has_vhost_user(device).map_err(refused)? {
        return Ok(false);
    }
    if is_taken()? {
        return Err(VhostError::Refused(format!("another machine uses {}", socket.display())));
    }
    machine.plug_vhost_user(device, socket.to_owned(), options).map_err(refused)
}

/// Takes a device out, which the guest has to release in time; `false` if the machine does not have it.
pub(crate) fn unplug_device(monitor: &Path, device: &VhostUserDevice) -> Result<bool, VhostError> {
    let unplugged =
        Machine::connect(monitor).and_then(|mut machine| machine.unplug_vhost_user(device, Instant::now() + PATIENCE));
    unplugged.map_err(|e| VhostError::Refused(format!("cannot unplug {}: {e}", device.name)))
}

/// Takes the card on a port out of a running machine; `false` if it has none.
pub fn unplug(monitor: &Path, port: &str) -> Result<bool, VhostError> {
    unplug_device(monitor, &card(port))
}

/// An Ethernet address for a port that has none. QEMU would give the same to the first card of each machine.
///
/// It follows from the socket's path (FNV-1a), so that a card that is plugged in again has the same one.
fn mac_of(socket: &Path) -> String {
    let step = |hash: u32, byte: &u8| (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193);
    let [_, a, b, c] = socket.as_os_str().as_encoded_bytes().iter().fold(0x811c_9dc5, step).to_be_bytes();
    format!("52:54:00:{a:02x}:{b:02x}:{c:02x}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_without_address_get_different_ones_that_stay() {
        let of = |path: &str| mac_of(Path::new(path));
        assert_eq!(of("/run/lan/a.port"), of("/run/lan/a.port"));
        assert!(of("/run/lan/a.port") != of("/run/lan/b.port") && of("/run/lan/a.port") != of("/run/wan/a.port"));
        assert!(of("/run/lan/a.port").parse::<MacAddress>().is_ok());
    }
}
