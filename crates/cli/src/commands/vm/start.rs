//! What a machine must be started with so that it can be attached.

use std::path::Path;

/// For QEMU's command line.
pub(super) fn arguments(name: &str, sockets: &Path) -> String {
    let sockets = sockets.display();
    format!(
        "\
-machine pc,nvdimm=on -m 1G,slots=16,maxmem=16G
-qmp unix:{sockets}/{name}.qmp,server=on,wait=off
-device virtio-serial
-chardev socket,id=partywall,path={sockets}/{name}.port,server=on,wait=off
-device virtserialport,chardev=partywall,name=org.partywall.0

# With -machine q35, one more line for each other machine and one for the host:
-device pcie-root-port,id=partywall1,chassis=1
# Without KVM, so that guests that share memory have atomic instructions:
-accel tcg,thread=multi -smp 1,maxcpus=2
# Then:
partywall vm attach {name} --qmp {sockets}/{name}.qmp --port {sockets}/{name}.port
# and in the machine:
modprobe -a virtio_console virtio_pmem nd_pmem nfit dax_pmem device_dax; partywall agent"
    )
}

/// For libvirt. Its own monitor is its own, so this machine gets a second.
pub(super) fn libvirt(name: &str, sockets: &Path) -> String {
    let sockets = sockets.display();
    format!(
        "\
<domain type='kvm' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>
  <!-- beside what is there: -->
  <maxMemory slots='16' unit='GiB'>16</maxMemory>
  <cpu>
    <numa>
      <cell id='0' cpus='0' memory='1' unit='GiB'/>  <!-- all processors and all memory of the machine -->
    </numa>
  </cpu>
  <devices>
    <channel type='unix'>
      <source mode='bind' path='{sockets}/{name}.port'/>
      <target type='virtio' name='org.partywall.0'/>
    </channel>
  </devices>
  <qemu:commandline>
    <qemu:arg value='-machine'/>
    <qemu:arg value='nvdimm=on'/>
    <qemu:arg value='-qmp'/>
    <qemu:arg value='unix:{sockets}/{name}.qmp,server=on,wait=off'/>
  </qemu:commandline>
</domain>
<!-- QEMU opens windows as files of the broker's process, so it must run as the broker's user, and AppArmor or SELinux must let it:
     in /etc/libvirt/qemu.conf, user = \"root\", and security_driver = \"none\" or a rule for /proc/*/fd/* -->"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_name_the_port_and_leave_room_for_windows() {
        for text in [arguments("a", Path::new("/run/x")), libvirt("a", Path::new("/run/x"))] {
            for needed in ["org.partywall.0", "slots='16'|slots=16", "nvdimm=on", "/run/x/a.qmp", "/run/x/a.port"] {
                assert!(needed.split('|').any(|word| text.contains(word)), "{needed} in {text}");
            }
        }
    }
}
