//! How a machine gets a card on a port: at its start, and while it runs.

use crate::VhostError;
use crate::switch::MacAddress;
use partywall_vm::{CardOptions, Machine, VhostUserDevice, VhostUserKind, VhostUserOptions, VmError};
use std::path::Path;
use std::time::{Duration, Instant};

/// Entries of a card's queues. QEMU's own default is 256, of which few hold frames of 64 KiB.
const ENTRIES: u16 = 1024;
/// How long a guest may take to release a device. A guest that is busy, or emulated, takes seconds.
const PATIENCE: Duration = Duration::from_secs(20);
/// How long a back end may take to notice that a front end has gone.
const GOODBYE: Duration = Duration::from_millis(400);

/// The settings of a card that a machine is started with, or gets while it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CardSettings {
    /// Pairs of queues, at most [`PAIRS`](crate::PAIRS).
    pub queues: u16,
    /// The largest packet that the guest sends, in bytes; the guest's own choice without it.
    pub mtu: Option<u16>,
}

/// Options for QEMU's command line.
pub fn arguments(switch: &str, port: &str, socket: &Path, settings: CardSettings) -> String {
    let name = card(switch, port, socket).name;
    // QEMU computes the number of interrupt vectors from the number of queues.
    let (of_netdev, mut of_device) = match settings.queues {
        0 | 1 => (String::new(), String::new()),
        queues => (format!(",queues={queues}"), ",mq=on".to_owned()),
    };
    if let Some(mtu) = settings.mtu {
        of_device.push_str(&format!(",host_mtu={mtu}"));
    }
    format!(
        "\
-object memory-backend-memfd,id=ram,size=1G,share=on
-machine memory-backend=ram -m 1G
-chardev socket,id={name},path={},reconnect=1
-netdev vhost-user,id={name},chardev={name}{of_netdev}
-device virtio-net-pci,netdev={name},id={name},rx_queue_size={ENTRIES},tx_queue_size={ENTRIES}{of_device}

# Each machine needs its own Ethernet address: ,mac=52:54:00:... behind the device.
# Without KVM, QEMU 7.2 needs also ,vectors=0 there.",
        socket.display()
    )
}

/// XML for libvirt.
pub fn libvirt(socket: &Path, settings: CardSettings) -> String {
    let queues = if settings.queues > 1 { format!(" queues='{}'", settings.queues) } else { String::new() };
    let mtu = settings.mtu.map(|mtu| format!("\n      <mtu size='{mtu}'/>")).unwrap_or_default();
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
      <driver{queues} rx_queue_size='{ENTRIES}' tx_queue_size='{ENTRIES}'/>{mtu}
    </interface>
  </devices>
</domain>",
        socket.display()
    )
}

/// The card on a port, as QEMU names it. Switches in different folders may have the same name; their sockets differ.
fn card(switch: &str, port: &str, socket: &Path) -> VhostUserDevice {
    VhostUserDevice {
        name: format!("partywall-net-{switch}-{port}"),
        socket: socket.to_owned(),
        kind: VhostUserKind::Card,
    }
}

/// Plugs a card into a running machine, by its monitor; `false` if it has it already.
///
/// `is_taken` tells whether a front end is connected to the port.
pub fn plug(
    monitor: &Path,
    (switch, port): (&str, &str),
    socket: &Path,
    mac: Option<MacAddress>,
    CardSettings { queues, mtu }: CardSettings,
    is_taken: impl FnMut() -> Result<bool, VhostError>,
) -> Result<bool, VhostError> {
    let mac = mac.map_or_else(|| mac_of(socket, &machine_id()), |mac| mac.to_string());
    let options = VhostUserOptions::Card(CardOptions { mac, entries: ENTRIES, queues, mtu });
    plug_device(monitor, &card(switch, port, socket), &options, is_taken)
}

/// Plugs a device in that the machine does not have, unless its back end has a front end already.
///
/// A second front end is sent away, and QEMU would wait for the back end in its main loop: the machine would stand still. A machine whose
/// guest has no driver yet counts as a front end as well.
pub(crate) fn plug_device(
    monitor: &Path,
    device: &VhostUserDevice,
    options: &VhostUserOptions,
    mut is_taken: impl FnMut() -> Result<bool, VhostError>,
) -> Result<bool, VhostError> {
    let refused = |e: VmError| VhostError::Refused(format!("cannot plug {} in: {e}", device.name));
    let mut machine = Machine::connect(monitor).map_err(refused)?;
    if machine.has_vhost_user(device).map_err(refused)? {
        return Ok(false);
    }
    machine.remove_vhost_user_leftovers(device).map_err(refused)?;
    let deadline = Instant::now() + GOODBYE;
    while is_taken()? {
        if Instant::now() >= deadline {
            return Err(VhostError::Refused(format!("another machine uses {}", device.socket.display())));
        }
        std::thread::sleep(GOODBYE / 20);
    }
    machine.plug_vhost_user(device, options).map_err(refused)
}

/// Takes a device out, which the guest has to release in time; `false` if the machine does not have it.
pub(crate) fn unplug_device(monitor: &Path, device: &VhostUserDevice) -> Result<bool, VhostError> {
    let unplugged =
        Machine::connect(monitor).and_then(|mut machine| machine.unplug_vhost_user(device, Instant::now() + PATIENCE));
    unplugged.map_err(|e| VhostError::Refused(format!("cannot unplug {}: {e}", device.name)))
}

/// Takes the card on a port out of a running machine; `false` if it has none.
pub fn unplug(monitor: &Path, (switch, port): (&str, &str), socket: &Path) -> Result<bool, VhostError> {
    unplug_device(monitor, &card(switch, port, socket))
}

/// An Ethernet address for a port that has none. QEMU would give the same to the first card of each machine.
///
/// It follows from the socket's absolute path and from the host, so that a card that is plugged in again has the same one, and hosts that are
/// bridged have different ones for the same path.
fn mac_of(socket: &Path, host: &[u8]) -> String {
    let [_, a, b, c] = hash([socket.as_os_str().as_encoded_bytes(), b"\0", host]).to_be_bytes();
    format!("52:54:00:{a:02x}:{b:02x}:{c:02x}")
}

/// A value that differs between hosts; empty where the file is absent.
fn machine_id() -> Vec<u8> {
    std::fs::read("/etc/machine-id").unwrap_or_default()
}

/// FNV-1a: the same in each version of this program.
pub(crate) fn hash<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> u32 {
    let step = |hash: u32, byte: &u8| (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193);
    parts.into_iter().flatten().fold(0x811c_9dc5, step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_without_address_get_different_ones_that_stay() {
        let of = |path: &str| mac_of(Path::new(path), b"one\n");
        assert_eq!(of("/run/lan/a.port"), of("/run/lan/a.port"));
        assert!(of("/run/lan/a.port") != of("/run/lan/b.port") && of("/run/lan/a.port") != of("/run/wan/a.port"));
        assert!(of("/run/lan/a.port").parse::<MacAddress>().is_ok());
        let path = Path::new("/run/lan/a.port");
        assert!(mac_of(path, b"two\n") != of("/run/lan/a.port") && mac_of(path, b"") == mac_of(path, b""));
    }

    #[test]
    fn cards_of_two_switches_on_ports_of_one_name_have_two_names() {
        let of = |switch: &str| card(switch, "a", Path::new("/run/a.port")).name;
        assert_eq!(of("lan"), "partywall-net-lan-a");
        assert!(of("lan") != of("wan"));
        let printed = arguments("lan", "a", Path::new("/run/lan/a.port"), CardSettings { queues: 1, mtu: None });
        assert!(printed.contains("netdev=partywall-net-lan-a,id=partywall-net-lan-a,"), "{printed}");
    }

    #[test]
    fn printed_card_has_its_queues_and_mtu() {
        let socket = Path::new("/run/lan/a.port");
        let plain = CardSettings { queues: 1, mtu: None };
        for printed in [arguments("lan", "a", socket, plain), libvirt(socket, plain)] {
            assert!(!["queues=", "mq=", "mtu"].iter().any(|word| printed.contains(word)), "{printed}");
        }
        let both = CardSettings { queues: 4, mtu: Some(9000) };
        let printed = arguments("lan", "a", socket, both);
        let line = |begin: &str| printed.lines().find(|line| line.starts_with(begin)).unwrap();
        assert!(line("-netdev").ends_with(",chardev=partywall-net-lan-a,queues=4"), "{printed}");
        assert!(line("-device").ends_with("tx_queue_size=1024,mq=on,host_mtu=9000"), "{printed}");
        let printed = libvirt(socket, both);
        assert!(printed.contains("<driver queues='4' rx_queue_size='1024'"), "{printed}");
        assert!(printed.contains("\n      <mtu size='9000'/>\n    </interface>"), "{printed}");
    }
}
