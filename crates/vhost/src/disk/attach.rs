//! How a machine gets a disk: at its start, and while it runs.

use crate::VhostError;
use crate::attach::{hash, plug_device, unplug_device};
use partywall_vm::{VhostUserDevice, VhostUserKind, VhostUserOptions};
use std::path::Path;

/// Options for QEMU's command line.
pub fn arguments(socket: &Path, queues: u16) -> String {
    let name = disk(socket).name;
    format!(
        "\
-object memory-backend-memfd,id=ram,size=1G,share=on
-machine memory-backend=ram -m 1G
-chardev socket,id={name},path={},reconnect=1
-device vhost-user-blk-pci,chardev={name},id={name},num-queues={queues}",
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

/// The disk at a socket, as QEMU names it: sockets of one name in different folders have different names.
fn disk(socket: &Path) -> VhostUserDevice {
    let stem = socket.file_stem().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let fits = |c: char| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '_' };
    let stem: String = stem.chars().take(32).map(fits).collect();
    let hash = hash([socket.as_os_str().as_encoded_bytes()]);
    VhostUserDevice {
        name: format!("partywall-disk-{stem}-{hash:08x}"),
        socket: socket.to_owned(),
        kind: VhostUserKind::Disk,
    }
}

/// Plugs a disk into a running machine, by its monitor; `false` if it has it already.
///
/// `is_taken` tells whether a front end is connected to the disk.
pub fn plug(
    monitor: &Path,
    socket: &Path,
    queues: u16,
    is_taken: impl FnMut() -> Result<bool, VhostError>,
) -> Result<bool, VhostError> {
    plug_device(monitor, &disk(socket), &VhostUserOptions::Disk { queues }, is_taken)
}

/// Takes a disk out of a running machine; `false` if it does not have it.
pub fn unplug(monitor: &Path, socket: &Path) -> Result<bool, VhostError> {
    unplug_device(monitor, &disk(socket))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_of_one_name_in_two_folders_are_two_disks() {
        let of = |path: &str| disk(Path::new(path)).name;
        assert!(of("/x/disk.sock") != of("/y/disk.sock") && of("/x/disk.sock") == of("/x/disk.sock"));
        assert!(of("/x/disk.sock").starts_with("partywall-disk-disk-"));
        assert!(of("/x/a b,c=d.sock").starts_with("partywall-disk-a_b_c_d-"));
    }
}
