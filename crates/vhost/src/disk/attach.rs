//! How a machine gets a disk: at its start, and while it runs.

use crate::VhostError;
use partywall_vm::qmp::{Qmp, QmpError};
use serde_json::json;
use std::path::Path;

/// Options for QEMU's command line.
pub fn arguments(id: &str, socket: &Path, queues: u16) -> String {
    format!(
        "\
-object memory-backend-memfd,id=ram,size=1G,share=on
-machine memory-backend=ram -m 1G
-chardev socket,id=disk-{id},path={},reconnect=1
-device vhost-user-blk-pci,chardev=disk-{id},id=disk-{id},num-queues={queues}",
        socket.display()
    )
}

/// XML for libvirt.
pub fn libvirt(socket: &Path, queues: u16) -> String {
    format!(
        "\
<domain type='kvm'>
  <!-- beside what is there: -->
  <memoryBacking>
    <source type='memfd'/>
    <access mode='shared'/>
  </memoryBacking>
  <devices>
    <disk type='vhostuser' device='disk'>
      <driver name='qemu' type='raw' queues='{queues}'/>
      <source type='unix' path='{}'>
        <reconnect enabled='yes' timeout='1'/>
      </source>
      <target dev='vdb' bus='virtio'/>
    </disk>
  </devices>
</domain>",
        socket.display()
    )
}

/// Plugs a disk into a running machine, by its monitor.
pub fn plug(monitor: &Path, id: &str, socket: &Path, queues: u16) -> Result<(), VhostError> {
    let refused = |e: QmpError| VhostError::Refused(format!("cannot plug a disk into the machine: {e}"));
    let mut qmp = Qmp::connect(monitor).map_err(refused)?;
    let id = format!("disk-{id}");
    let address = json!({ "type": "unix", "data": { "path": socket } });
    let backend = json!({ "type": "socket", "data": { "addr": address, "server": false, "reconnect": 1 } });
    qmp.execute("chardev-add", json!({ "id": id, "backend": backend })).map_err(refused)?;
    let device = json!({ "driver": "vhost-user-blk-pci", "chardev": id, "id": id, "num-queues": queues });
    let added = qmp.execute("device_add", device);
    if added.is_err() {
        let _ = qmp.execute("chardev-remove", json!({ "id": id }));
    }
    added.map(drop).map_err(refused)
}
