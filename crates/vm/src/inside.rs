//! A machine from inside: whether what Partywall needs of it is there.

use partywall_region::pmem::{WindowHeader, dax};
use partywall_region::window::{UNCACHED, Window};
use partywall_region::{RegionError, bar, relay};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The kernel modules for the serial port, and for the `/dev/dax*` of a window.
pub const MODULES: [&str; 6] = ["virtio_console", "virtio_pmem", "nd_pmem", "nfit", "dax_pmem", "device_dax"];
/// The agent, as the kernel calls its process.
const AGENT: &str = "partywall-agent";

/// A window that this machine sees.
#[derive(Debug, Clone)]
pub struct SeenWindow {
    /// Its device, as `dax0.0`, or a PCI device's address.
    pub device: String,
    /// The header of the window.
    pub header: WindowHeader,
    /// This machine may write it.
    pub own: bool,
    /// How many times slower it is read than ordinary memory, where that could be measured.
    pub slowness: Option<f64>,
}

impl SeenWindow {
    /// It is a memory device, not a PCI device.
    pub fn is_memory(&self) -> bool {
        self.device.starts_with("dax")
    }

    /// Its mapping is not cached, so that it is slower than it should be.
    pub fn is_uncached(&self) -> bool {
        self.slowness.is_some_and(|times| times > UNCACHED)
    }
}

/// Whether this is a machine of QEMU's.
pub fn is_machine() -> bool {
    let vendor = fs::read_to_string("/sys/class/dmi/id/sys_vendor").unwrap_or_default();
    vendor.trim() == "QEMU" || port().is_ok() || !windows().is_empty()
}

/// The serial port to the host.
pub fn port() -> io::Result<PathBuf> {
    relay::find_port(relay::PORT)
}

/// Modules that are neither loaded nor part of this kernel.
pub fn missing_modules() -> Vec<&'static str> {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let built_in = Path::new("/lib/modules").join(release.trim()).join("modules.builtin");
    let built_in = fs::read_to_string(built_in).unwrap_or_default();
    missing(&built_in, |name| Path::new("/sys/module").join(name).exists())
}

fn missing(built_in: &str, loaded: impl Fn(&str) -> bool) -> Vec<&'static str> {
    let part = |name: &str| {
        let stems = built_in.lines().filter_map(|line| line.rsplit('/').next()?.split(".ko").next());
        stems.map(|stem| stem.replace('-', "_")).any(|stem| stem == name)
    };
    MODULES.into_iter().filter(|name| !loaded(name) && !part(name)).collect()
}

/// The windows, by their headers. The owner and the peer in a header are statements of the window's owner.
pub fn windows() -> Vec<SeenWindow> {
    let slowness = |opened: Result<Window, RegionError>| opened.and_then(|window| window.slowness()).ok();
    let memory = dax::devices().into_iter().filter_map(|device| {
        let slowness = slowness(dax::open(&device.name, false));
        Some(SeenWindow { header: device.header?, own: !device.read_only, slowness, device: device.name })
    });
    let devices = bar::windows().into_iter().map(|shown| {
        let slowness = slowness(bar::open(&shown.device, false));
        SeenWindow { header: shown.header, own: !shown.read_only, slowness, device: shown.device.name }
    });
    memory.chain(devices).collect()
}

/// The process of the agent, if one runs.
pub fn agent() -> Option<u32> {
    let named = |pid: &u32| fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim() == AGENT);
    let all = fs::read_dir("/proc").into_iter().flatten().flatten();
    all.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).find(named)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn module_is_present_if_loaded_or_built_in() {
        let built_in = "kernel/drivers/nvdimm/nd_pmem.ko\nkernel/drivers/char/virtio-console.ko\n";
        let loaded = |name: &str| name == "nfit" || name == "device_dax";
        assert_eq!(missing(built_in, loaded), ["virtio_pmem", "dax_pmem"]);
        assert_eq!(missing("", |_| false), MODULES);
    }

    #[test]
    fn agent_name_fits_into_comm() {
        assert!(AGENT.len() <= 15);
    }
}
