//! Network namespaces joined by veth pairs, as between containers: two that see each other, or with a router between them that translates
//! addresses.

use std::{
    path::Path,
    process::Command,
    sync::atomic::{AtomicU32, Ordering},
};

/// Exists as long as this value.
pub(crate) struct Namespaces {
    /// The server's, the client's, and the router's if there is one.
    names: Vec<String>,
}

impl Namespaces {
    /// The addresses of the two ends, from the range kept for documentation. They are visible in these namespaces only.
    pub(crate) const ADDRESSES: [&str; 2] = ["198.51.100.1", "198.51.100.2"];

    /// The server's end of the link to a third namespace, and the end in that.
    pub(crate) const THIRD: [&str; 2] = ["203.0.113.1", "203.0.113.2"];

    /// The server behind a router, as [`Self::behind_router`] has it.
    pub(crate) const BEHIND_ROUTER: &str = "10.99.2.2";

    /// The router's address on the client's side.
    pub(crate) const ROUTER: &str = "10.99.1.1";

    /// Makes both; `None`, said aloud, where that is not allowed.
    pub(crate) fn create() -> Option<Self> {
        let made = Self::named(&["a", "b"])?;
        let [from, to] = Self::ADDRESSES.map(|address| format!("{address}/30"));
        made.join([0, 1], "pw-test", [&from, &to]);
        Some(made)
    }

    /// As [`Self::create`], with a third one that reaches the server's address too.
    pub(crate) fn three() -> Option<Self> {
        let made = Self::named(&["a", "b", "c"])?;
        made.join_three();
        Some(made)
    }

    fn join_three(&self) {
        let mask = |address: &str| format!("{address}/30");
        self.join([0, 1], "pw-test", Self::ADDRESSES.map(mask).each_ref().map(String::as_str));
        self.join([0, 2], "pw-third", Self::THIRD.map(mask).each_ref().map(String::as_str));
        let [near, far] = Self::THIRD;
        ip(&["-n", &self.names[2], "route", "add", Self::ADDRESSES[0], "via", near]);
        // Answers come from the address that was asked, from a wildcard too.
        ip(&["-n", &self.names[0], "route", "add", far, "dev", "pw-third", "src", Self::ADDRESSES[0]]);
    }

    /// Replaces three namespaces by others with the same names and addresses.
    pub(crate) fn make_again(&self) {
        for name in &self.names {
            ip(&["netns", "delete", name]);
            Self::add(name);
        }
        self.join_three();
    }

    /// Takes the name of one of them away. Its processes keep it.
    pub(crate) fn unname(&self, which: usize) {
        ip(&["netns", "delete", &self.names[which]]);
    }

    /// The file of one of them.
    pub(crate) fn path(&self, which: usize) -> String {
        format!("/run/netns/{}", self.names[which])
    }

    /// The server's and the client's, and a router between them that gives all connections its own addresses (masquerade). The server has no
    /// route to the client. `None`, said aloud, where that is not possible.
    pub(crate) fn behind_router() -> Option<Self> {
        let made = Self::named(&["a", "b", "r"])?;
        made.join([2, 0], "pw-test-a", ["10.99.2.1/24", &format!("{}/24", Self::BEHIND_ROUTER)]);
        made.join([2, 1], "pw-test-b", [&format!("{}/24", Self::ROUTER), "10.99.1.2/24"]);
        ip(&["-n", &made.names[1], "route", "add", "default", "via", Self::ROUTER]);
        let router = |program: &str, arguments: &[&str]| {
            let mut command = made.command(2, Path::new(program));
            command.args(arguments).output().is_ok_and(|output| output.status.success())
        };
        let forwards = router("sh", &["-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"]);
        if forwards && router("iptables", &["-t", "nat", "-A", "POSTROUTING", "-j", "MASQUERADE"]) {
            return Some(made);
        }
        super::skipped("`iptables` cannot translate addresses in a network namespace here");
        None
    }

    /// The router leads connections to this port of the router to an address.
    pub(crate) fn forward(&self, port: u16, to: &str) {
        let (port, to) = (port.to_string(), ["--to-destination", to]);
        let to_router = ["-t", "nat", "-A", "PREROUTING", "-d", Self::ROUTER, "-p", "tcp", "--dport", &port];
        self.run(2, "iptables", &[&to_router[..], &["-j", "DNAT"], &to].concat());
    }

    /// From now on the router leaves the addresses of clients as they are, and the server has a route to them.
    pub(crate) fn end_masquerade(&self) {
        self.run(2, "iptables", &["-t", "nat", "-F", "POSTROUTING"]);
        ip(&["-n", &self.names[0], "route", "add", "default", "via", "10.99.2.1"]);
    }

    /// Whether the server has received bytes at this port.
    pub(crate) fn serves(&self, port: u16) -> bool {
        let port = format!(":{port}");
        let said = self.run(0, "ss", &["-Htni", "state", "established", "sport", "=", &port]);
        String::from_utf8_lossy(&said).contains("bytes_received")
    }

    /// Runs a program inside one of them to its end; what it printed.
    fn run(&self, which: usize, program: &str, arguments: &[&str]) -> Vec<u8> {
        let output = self.command(which, Path::new(program)).args(arguments).output().unwrap();
        assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        output.stdout
    }

    /// Makes namespaces, with nothing but loopback in them.
    fn named(places: &[&str]) -> Option<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        if !rustix::process::geteuid().is_root() {
            super::skipped("network namespaces need root");
            return None;
        }
        let nth = COUNT.fetch_add(1, Ordering::Relaxed);
        let mark = format!("partywall-preload-{}-{nth}", std::process::id());
        let made = Self { names: places.iter().map(|place| format!("{mark}-{place}")).collect() };
        for name in &made.names {
            Self::add(name);
        }
        Some(made)
    }

    fn add(name: &str) {
        ip(&["netns", "add", name]);
        ip(&["-n", name, "link", "set", "lo", "up"]);
    }

    /// Joins two of them by a link, with these addresses.
    fn join(&self, between: [usize; 2], link: &str, addresses: [&str; 2]) {
        let [a, b] = between.map(|which| &self.names[which]);
        ip(&["link", "add", link, "netns", a, "type", "veth", "peer", "name", link, "netns", b]);
        for (name, address) in [a, b].into_iter().zip(addresses) {
            ip(&["-n", name, "address", "add", address, "dev", link]);
            ip(&["-n", name, "link", "set", link, "up"]);
        }
    }

    /// A program inside one of them.
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
