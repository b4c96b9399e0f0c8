//! The QEMU options that give a machine a window from its start.

use crate::window::{WindowDevice, WindowRole, device_name, memory_name};

/// Arguments for QEMU, one per line. `-m` must leave room and `-machine` have `nvdimm=on`: [`REQUIRES`].
pub fn arguments(window: &WindowDevice, role: WindowRole) -> Vec<String> {
    let (memory, device) = (memory_name(window.id, role), device_name(window.id, role));
    let path = escape(&window.path.display().to_string());
    let read_only = if role == WindowRole::Peer { ",readonly=on" } else { "" };
    let kind = match role {
        WindowRole::Owner => format!("virtio-pmem-pci,id={device},memdev={memory}"),
        WindowRole::Peer => format!("nvdimm,id={device},memdev={memory},unarmed=on"),
    };
    vec![
        "-object".into(),
        format!("memory-backend-file,id={memory},mem-path={path},size={},share=on{read_only}", window.size),
        "-device".into(),
        kind,
    ]
}

/// The options that a machine must be started with to take windows at all.
pub const REQUIRES: &str = "-machine ...,nvdimm=on -m SIZE,slots=8,maxmem=SIZE+8G";

/// The same for libvirt: elements of `<devices>`, and the other settings that the domain needs.
pub fn libvirt(window: &WindowDevice, role: WindowRole) -> String {
    let path = window.path.display().to_string().replace('&', "&amp;").replace('<', "&lt;");
    let kib = window.size / 1024;
    match role {
        WindowRole::Owner => format!(
            "<memory model='virtio-pmem' access='shared'>\n  <source>\n    <path>{path}</path>\n  </source>\n  <target>\n    <size unit='KiB'>{kib}</size>\n  </target>\n</memory>\n"
        ),
        WindowRole::Peer => format!(
            "<memory model='nvdimm' access='shared'>\n  <source>\n    <path>{path}</path>\n  </source>\n  <target>\n    <size unit='KiB'>{kib}</size>\n    <node>0</node>\n    <readonly/>\n  </target>\n</memory>\n"
        ),
    }
}

/// A comma ends a value for QEMU, and two stand for one.
fn escape(value: &str) -> String {
    value.replace(',', ",,")
}

#[cfg(test)]
mod tests {
    use super::*;
    use partywall_region::pmem::WindowId;

    #[test]
    fn peer_gets_window_read_only_and_owner_writable() {
        let window = WindowDevice { id: WindowId([1; 16]), path: "/run/a,b".into(), size: 4 << 20 };
        let (owner, peer) =
            (arguments(&window, WindowRole::Owner).join(" "), arguments(&window, WindowRole::Peer).join(" "));
        assert!(owner.contains("virtio-pmem-pci") && !owner.contains("readonly"), "{owner}");
        assert!(peer.contains("readonly=on") && peer.contains("unarmed=on"), "{peer}");
        assert!(owner.contains("mem-path=/run/a,,b,size=4194304,share=on"), "{owner}");
        assert!(libvirt(&window, WindowRole::Peer).contains("<readonly/>"));
        assert!(!libvirt(&window, WindowRole::Owner).contains("readonly"));
    }
}
