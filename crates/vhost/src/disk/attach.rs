//! How a machine gets a disk: at its start, and while it runs.

use crate::VhostError;
use crate::attach::{plug_device, unplug_device};
use partywall_vm::{VhostUserDevice, VhostUserKind, VhostUserOptions};
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

/// The disk, as QEMU names it.
fn disk(id: &str) -> VhostUserDevice {
    VhostUserDevice { name: format!("disk-{id}"), kind: VhostUserKind::Disk }
}

/// Plugs a disk into a running machine, by its monitor; `false` if it has it already.
///
/// `is_taken` tells whether another machine uses the disk.
pub fn plug(
    monitor: &Path,
    id: &str,
    socket: &Path,
    queues: u16,
    is_taken: impl FnOnce() -> Result<bool, VhostError>,
) -> Result<bool, VhostError> {
    plug_device(monitor, &disk(id), socket, &VhostUserOptions::Disk { queues }, is_taken)
}

/// Takes a disk out of a running machine; `false` if it does not have it.
pub fn unplug(monitor: &Path, id: &str) -> Result<bool, VhostError> {
    unplug_device(monitor, &disk(id))
}
