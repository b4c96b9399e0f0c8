//! A virtual machine from inside: what the agent needs, and the windows that the host has plugged in.

use partywall_vm::inside::{self, SeenWindow};

use super::check::Check;
use crate::human;

const AREA: &str = "this virtual machine";

/// The checks in a virtual machine; none elsewhere.
pub(super) fn checks() -> Vec<Check> {
    if !inside::is_machine() {
        return Vec::new();
    }
    let windows = inside::windows();
    let mut missing = inside::missing_modules();
    if windows.iter().any(|window| !window.is_memory()) {
        // Windows that are PCI devices need no driver.
        missing.retain(|module| *module == "virtio_console");
    }
    let mut all = vec![port(missing.contains(&"virtio_console")), modules(&missing), agent(), seen(&windows)];
    all.extend(windows.iter().filter(|window| window.is_uncached()).map(uncached));
    all
}

/// The requirements of a program under `partywall run` beside the broker. There are none outside of virtual machines.
pub(super) fn program_checks() -> Vec<Check> {
    if !inside::is_machine() {
        return Vec::new();
    }
    vec![agent(), seen(&inside::windows())]
}

fn port(no_driver: bool) -> Check {
    let means = "the agent cannot reach the broker of the host";
    let check = |found: String| Check::ok(AREA, "serial port", means, found);
    match inside::port() {
        Ok(path) => check(format!("org.partywall.0 is {}", path.display())),
        Err(_) if no_driver => check("this kernel has no driver for it".into()).warn("modprobe virtio_console"),
        Err(_) => check("there is none called org.partywall.0".into())
            .warn("on the host, start this machine with what `partywall vm args NAME` prints"),
    }
}

fn modules(missing: &[&str]) -> Check {
    let means = "windows that are plugged in do not appear as /dev/dax*";
    let check = |found: String| Check::ok(AREA, "modules", means, found);
    if missing.is_empty() {
        return check("all are there that windows need".into());
    }
    let names = missing.join(" ");
    check(format!("not loaded: {names}")).warn(format!(
        "modprobe -a {names}; where there is none of that name, install the distribution's full kernel package"
    ))
}

fn agent() -> Check {
    let check = |found: String| Check::ok(AREA, "agent", "programs in this machine find no broker", found);
    match inside::agent() {
        Some(pid) => check(format!("runs as process {pid}")),
        None => check("does not run".into())
            .warn("partywall agent &, or: systemctl enable --now partywall-agent (it takes root)"),
    }
}

fn seen(windows: &[SeenWindow]) -> Check {
    let means = "channels to other machines and to the host have no memory to go through";
    let check = |found: String| Check::ok(AREA, "windows", means, found);
    if windows.is_empty() {
        let remedy = if rustix::process::geteuid().is_root() {
            "on the host: partywall vm attach NAME --qmp SOCKET --port SOCKET; then see its `partywall doctor`"
        } else {
            "run this as root, who may open /dev/dax* and PCI devices"
        };
        return check("not found".into()).warn(remedy);
    }
    let mut own: Vec<String> = windows.iter().filter(|w| w.own).map(|w| printable(&w.header.peer)).collect();
    own.sort();
    own.dedup();
    let size = windows.iter().map(|w| w.header.size).max().unwrap_or(0);
    let writable = windows.iter().filter(|w| w.own).count();
    check(format!(
        "{} ({writable} to write, towards {}), of {} at most",
        windows.len(),
        if own.is_empty() { "nobody".to_owned() } else { own.join(", ") },
        human::bytes(size)
    ))
}

fn uncached(window: &SeenWindow) -> Check {
    let found = format!("{} is {:.0} times slower to read than memory", window.device, window.slowness.unwrap_or(0.0));
    Check::ok(
        AREA,
        "window uncached",
        "bytes pass many times slower than they should, perhaps slower than by TCP",
        found,
    )
    .warn(if window.is_memory() {
        "on the host, see that QEMU has it as virtio-pmem or nvdimm over a file in memory (/dev/shm, memfd)"
    } else {
        "it is a PCI device; start this machine with memory slots (`partywall vm args NAME` on the host), and attach it again"
    })
}

/// Headers are written by their owners, who may be hostile: no control characters reach the terminal.
fn printable(name: &str) -> String {
    name.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::super::check::FindingStatus;
    use super::*;
    use partywall_vm::inside::MODULES;

    #[test]
    fn missing_part_is_reported_with_remedy() {
        let found = modules(&MODULES);
        assert!(
            found.status == FindingStatus::Warn
                && found.remedy.unwrap().starts_with("modprobe -a virtio_console virtio_pmem")
        );
        assert!(modules(&[]).status == FindingStatus::Ok);
        assert!(seen(&[]).status == FindingStatus::Warn);
        assert_eq!(printable("a\x1b[2Jb\n"), "a?[2Jb?");
    }
}
