//! The options that a machine must be started with so that it can be attached.

use std::path::Path;

/// For QEMU's command line.
pub(super) fn arguments(name: &str, sockets: &Path) -> String {
    let sockets = sockets.display();
    format!(
        "\
-machine pc,nvdimm=on -m 1G,slots=64,maxmem=16G
-qmp unix:{sockets}/{name}.qmp,server=on,wait=off
-device virtio-serial
-chardev socket,id=partywall,path={sockets}/{name}.port,server=on,wait=off
-device virtserialport,chardev=partywall,name=org.partywall.0

# With -machine q35 in place of pc: one port for each other machine and one for the host, each with another id and chassis:
-device pcie-root-port,id=partywall1,chassis=1 -device pcie-root-port,id=partywall2,chassis=2
# With -machine q35 it can also be rung by interrupts, faster than by its serial port; that takes one more port, in its kernel's
# command line intel_iommu=on, and, in front of the lines above:
-machine kernel-irqchip=split -device intel-iommu,intremap=on
# With KVM: -accel kvm. Without it, so that guests that share memory have atomic instructions:
-accel tcg,thread=multi -smp 1,maxcpus=2
# For network cards of `partywall net` and disks of `partywall blk`, its memory has to be shared with them:
-object memory-backend-memfd,id=ram,size=1G,share=on -machine memory-backend=ram
# and the lines of `partywall net args SWITCH {name}` and `partywall blk args --socket SOCKET`, or, while it runs and is attached:
partywall vm attach {name} --net SWITCH; partywall vm attach {name} --disk SOCKET
# Then:
partywall vm attach {name} --qmp {sockets}/{name}.qmp --port {sockets}/{name}.port
# and in the machine:
modprobe -a virtio_console virtio_pmem nd_pmem nfit dax_pmem device_dax vfio-pci; partywall agent"
    )
}

/// For libvirt, whose own monitor is its own, so this machine gets a second.
///
/// QEMU makes that one's socket as libvirt's user, and AppArmor lets it do so in few places: this one is in libvirt's own rules.
pub(super) fn libvirt(name: &str, sockets: Option<&Path>) -> String {
    let (folder, monitor, port) = match sockets {
        Some(folder) => (folder.to_owned(), folder.join(format!("{name}.qmp")), folder.join(format!("{name}.port"))),
        None => {
            let folder = Path::new("/var/lib/libvirt/qemu").join(format!("domain-{name}"));
            (folder.clone(), folder.join("monitor.sock"), folder.join("partywall.port"))
        }
    };
    let (folder, monitor, port) = (folder.display(), monitor.display(), port.display());
    format!(
        "\
<domain type='kvm' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>
  <name>{name}</name>
  <!-- beside what is there; xmlns:qemu above is needed, too: -->
  <maxMemory slots='64' unit='GiB'>16</maxMemory>
  <cpu>
    <numa>
      <cell id='0' cpus='0' memory='1' unit='GiB'/>  <!-- all processors (0-3, if it has four) and all memory of the machine -->
    </numa>
  </cpu>
  <devices>
    <channel type='unix'>
      <source mode='bind' path='{port}'/>
      <target type='virtio' name='org.partywall.0'/>
    </channel>
  </devices>
  <qemu:commandline>
    <qemu:arg value='-machine'/>
    <qemu:arg value='nvdimm=on'/>
    <qemu:arg value='-qmp'/>
    <qemu:arg value='unix:{monitor},server=on,wait=off'/>
  </qemu:commandline>
</domain>

# Once, before it starts (the user is Debian's; elsewhere it is qemu):
install -d -o libvirt-qemu -g libvirt-qemu -m 750 {folder}
# With machine='q35', in <devices>, one for each other machine and one for the host:
<controller type='pci' model='pcie-root-port'/>
# With machine='q35' it can also be rung by interrupts, faster than by its serial port; that takes one more port, in its kernel's
# command line intel_iommu=on, and in <features> the first, in <devices> the second of these:
<ioapic driver='qemu'/>
<iommu model='intel'><driver intremap='on'/></iommu>
# With type='qemu', which is without KVM, so that guests that share memory have atomic instructions, and cpus='0-1' above:
<vcpu current='1'>2</vcpu>
# For network cards of `partywall net` and disks of `partywall blk`, its memory has to be shared with them:
<memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>
# and, in <devices>, what `partywall net args SWITCH {name} --libvirt` and `partywall blk args --socket SOCKET --libvirt` print, or, while
# it runs and is attached:
partywall vm attach {name} --net SWITCH; partywall vm attach {name} --disk SOCKET
# A broker under systemd has no capabilities. To connect to these sockets it needs their group: systemctl edit partywalld
[Service]
SupplementaryGroups=libvirt-qemu
# Then:
partywall vm attach {name} --qmp {monitor} --port {port}
# and in the machine:
modprobe -a virtio_console virtio_pmem nd_pmem nfit dax_pmem device_dax vfio-pci; partywall agent"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn qemu_and_libvirt_output_have_port_and_memory_slots() {
        for text in [arguments("a", Path::new("/run/x")), libvirt("a", Some(Path::new("/run/x")))] {
            for needed in [
                "org.partywall.0",
                "slots='64'|slots=64",
                "nvdimm=on",
                "memfd",
                "attach a --net",
                "/run/x/a.qmp",
                "/run/x/a.port",
            ] {
                assert!(needed.split('|').any(|word| text.contains(word)), "{needed} in {text}");
            }
        }
    }

    #[test]
    fn libvirt_sockets_are_where_apparmor_permits_them() {
        let text = libvirt("web", None);
        for needed in [
            "value='unix:/var/lib/libvirt/qemu/domain-web/monitor.sock,server=on,wait=off'",
            "path='/var/lib/libvirt/qemu/domain-web/partywall.port'",
            "-m 750 /var/lib/libvirt/qemu/domain-web\n",
            "attach web --qmp /var/lib/libvirt/qemu/domain-web/monitor.sock --port /var/lib/libvirt/qemu/domain-web/partywall.port",
        ] {
            assert!(text.contains(needed), "{needed} in {text}");
        }
        // The text above the blank line is literal XML, where `--` ends a comment.
        let xml = text.split("\n\n").next().unwrap_or_default();
        let comments: Vec<&str> = xml.split("<!--").skip(1).filter_map(|rest| rest.split("-->").next()).collect();
        assert!(xml.ends_with("</domain>") && comments.iter().all(|comment| !comment.contains("--")), "{xml}");
    }
}
