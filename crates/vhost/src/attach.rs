//! How a machine gets a card on a port: at its start, and while it runs.

use crate::VhostError;
use crate::switch::MacAddress;
use partywall_vm::qmp::Qmp;
use serde_json::json;
use std::path::Path;

/// Entries of a card's queues. QEMU's own default is 256, of which few hold frames of 64 KiB.
const ENTRIES: u16 = 1024;

/// Options for QEMU's command line.
pub fn arguments(port: &str, socket: &Path) -> String {
    format!(
        "\
-object memory-backend-memfd,id=ram,size=1G,share=on
-machine memory-backend=ram -m 1G
-chardev socket,id=net-{port},path={},reconnect=1
-netdev vhost-user,id=net-{port},chardev=net-{port}
-device virtio-net-pci,netdev=net-{port},rx_queue_size={ENTRIES},tx_queue_size={ENTRIES}

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

/// Plugs a card into a running machine, by its monitor.
pub fn plug(monitor: &Path, port: &str, socket: &Path, mac: Option<MacAddress>) -> Result<(), VhostError> {
    let refused =
        |e: partywall_vm::qmp::QmpError| VhostError::Refused(format!("cannot plug a card into the machine: {e}"));
    let mut qmp = Qmp::connect(monitor).map_err(refused)?;
    let id = format!("net-{port}");
    let address = json!({ "type": "unix", "data": { "path": socket } });
    let backend = json!({ "type": "socket", "data": { "addr": address, "server": false, "reconnect": 1 } });
    qmp.execute("chardev-add", json!({ "id": id, "backend": backend })).map_err(refused)?;
    let mut device = json!({
        "driver": "virtio-net-pci", "netdev": id, "id": id, "rx_queue_size": ENTRIES, "tx_queue_size": ENTRIES,
    });
    if let Some(mac) = mac {
        device["mac"] = json!(mac);
    }
    // Under emulation, QEMU 7.2 ends when the guest's driver asks such a card for interrupt vectors.
    let kvm = qmp.execute("query-kvm", json!({})).map_err(refused)?;
    if kvm["enabled"] != true {
        device["vectors"] = json!(0);
    }
    let added = qmp.execute("netdev_add", json!({ "type": "vhost-user", "id": id, "chardev": id })).and_then(|_| {
        qmp.execute("device_add", device).inspect_err(|_| {
            let _ = qmp.execute("netdev_del", json!({ "id": id }));
        })
    });
    if added.is_err() {
        let _ = qmp.execute("chardev-remove", json!({ "id": id }));
    }
    added.map(drop).map_err(refused)
}
