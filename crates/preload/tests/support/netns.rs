//! Two network namespaces joined by a veth pair, as between two containers.

use std::{
    path::Path,
    process::Command,
    sync::atomic::{AtomicU32, Ordering},
};

/// Exists as long as this value.
pub(crate) struct Namespaces {
    names: [String; 2],
}

impl Namespaces {
    /// The addresses of the two ends, from the range kept for documentation. They are visible in these namespaces only.
    pub(crate) const ADDRESSES: [&str; 2] = ["198.51.100.1", "198.51.100.2"];

    /// Makes both; `None`, said aloud, where that is not allowed.
    pub(crate) fn create() -> Option<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        if !rustix::process::geteuid().is_root() {
            super::skipped("network namespaces need root");
            return None;
        }
        let nth = COUNT.fetch_add(1, Ordering::Relaxed);
        let mark = format!("partywall-preload-{}-{nth}", std::process::id());
        let made = Self { names: [format!("{mark}-a"), format!("{mark}-b")] };
        let [a, b] = &made.names;
        let links = ["pw-test-a", "pw-test-b"];
        ip(&["netns", "add", a]);
        ip(&["netns", "add", b]);
        ip(&["link", "add", links[0], "netns", a, "type", "veth", "peer", "name", links[1], "netns", b]);
        for ((name, link), address) in [a, b].into_iter().zip(links).zip(Self::ADDRESSES) {
            ip(&["-n", name, "address", "add", &format!("{address}/30"), "dev", link]);
            ip(&["-n", name, "link", "set", link, "up"]);
            ip(&["-n", name, "link", "set", "lo", "up"]);
        }
        Some(made)
    }

    /// A program inside one of the two.
    pub(crate) fn command(&self, which: usize, program: &Path) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.names[which]]).arg(program);
        command
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        for name in &self.names {
            let _ = Command::new("ip").args(["netns", "delete", name]).output();
        }
    }
}

fn ip(arguments: &[&str]) {
    let output = Command::new("ip").args(arguments).output().unwrap();
    assert!(output.status.success(), "ip {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
}
