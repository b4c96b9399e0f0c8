//! Two network namespaces joined by a veth pair, as between two containers, made with `ip` and always removed.

use std::{
    fs::{self, File},
    net::{Ipv4Addr, UdpSocket},
    os::fd::AsFd,
    process::Command,
    thread,
};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::error::{BenchError, During, Result};

/// Where `ip netns` keeps its namespaces.
const FOLDER: &str = "/run/netns";
/// Begins the name of every namespace of ours; the process id follows, by which leftovers of killed runs are known.
const PREFIX: &str = "partywall-bench-";

/// Address ranges that are reserved for documentation, so no network should use them.
const RANGES: [[u8; 3]; 3] = [[198, 51, 100], [203, 0, 113], [192, 0, 2]];

/// Exists as long as this value.
#[derive(Debug)]
pub(crate) struct Namespaces {
    ends: NamespaceEnds,
}

/// The two ends, for callers that only start programs there.
#[derive(Debug, Clone)]
pub(crate) struct NamespaceEnds {
    /// For `ip netns exec`.
    pub(crate) names: [String; 2],
    /// The addresses of the two interfaces.
    pub(crate) addresses: [Ipv4Addr; 2],
}

impl Namespaces {
    /// Makes both, connects them, and brings the interfaces up.
    pub(crate) fn create() -> Result<Self> {
        if !rustix::process::geteuid().is_root() {
            return Err(BenchError::Unavailable(
                "network namespaces need root; run the bench as root to measure TCP over veth".into(),
            ));
        }
        remove_leftovers();
        let pid = std::process::id();
        let names = [format!("{PREFIX}{pid}-a"), format!("{PREFIX}{pid}-b")];
        let addresses = free_addresses()?;
        // Made before the first namespace is, so that a failure half-way removes what there is.
        let namespaces = Self { ends: NamespaceEnds { names, addresses } };
        let [a, b] = &namespaces.ends.names;
        let links = ["pw-bench-a", "pw-bench-b"];
        ip(&["netns", "add", a])?;
        ip(&["netns", "add", b])?;
        ip(&["link", "add", links[0], "netns", a, "type", "veth", "peer", "name", links[1], "netns", b])?;
        for ((name, link), address) in [a, b].into_iter().zip(links).zip(addresses) {
            ip(&["-n", name, "address", "add", &format!("{address}/30"), "dev", link])?;
            ip(&["-n", name, "link", "set", link, "up"])?;
            ip(&["-n", name, "link", "set", "lo", "up"])?;
        }
        Ok(namespaces)
    }

    /// Their names and addresses.
    pub(crate) fn ends(&self) -> &NamespaceEnds {
        &self.ends
    }

    /// Runs `make` on a thread inside one of the two; sockets made there stay there.
    pub(crate) fn within<T: Send>(&self, which: usize, make: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        let path = format!("{FOLDER}/{}", self.ends.names[which]);
        let namespace = File::open(&path).during(format!("opening {path}"))?;
        let inside = || {
            move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))
                .during("entering a network namespace")?;
            make()
        };
        thread::scope(|scope| scope.spawn(inside).join())
            .unwrap_or_else(|_| Err(BenchError::Transport("the thread in the network namespace ended".into())))
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        for name in &self.ends.names {
            remove(name);
        }
    }
}

/// Two addresses that this host has not itself: a broker that knows an address in three namespaces cannot tell whose a connection is,
/// and leaves it on TCP.
fn free_addresses() -> Result<[Ipv4Addr; 2]> {
    let ends = RANGES.map(|[a, b, c]| [1, 2].map(|end| Ipv4Addr::new(a, b, c, end)));
    let is_free = |ends: &[Ipv4Addr; 2]| ends.iter().all(|at| UdpSocket::bind((*at, 0)).is_err());
    ends.into_iter().find(is_free).ok_or_else(|| {
        BenchError::Unavailable(
            "this host has addresses in each of the ranges kept for documentation (RFC 5737)".into(),
        )
    })
}

/// Runs `ip`; what it says goes into the error.
fn ip(arguments: &[&str]) -> Result<()> {
    let unavailable = |why: String| BenchError::Unavailable(format!("`ip {}`: {why}", arguments.join(" ")));
    let output = Command::new("ip").args(arguments).output().map_err(|e| unavailable(e.to_string()))?;
    if output.status.success() {
        return Ok(());
    }
    Err(unavailable(String::from_utf8_lossy(&output.stderr).trim().to_owned()))
}

/// Removes a namespace, and its end of the veth pair with it.
fn remove(name: &str) {
    if fs::exists(format!("{FOLDER}/{name}")).unwrap_or(false)
        && let Err(e) = ip(&["netns", "delete", name])
    {
        eprintln!("partywall-bench: a network namespace stays behind: {e}");
    }
}

/// Removes what a killed bench could not.
fn remove_leftovers() {
    for entry in fs::read_dir(FOLDER).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let pid = name.strip_prefix(PREFIX).and_then(|rest| rest.split('-').next());
        if let Some(pid) = pid.and_then(|pid| pid.parse::<u32>().ok())
            && !fs::exists(format!("/proc/{pid}")).unwrap_or(true)
        {
            remove(&name);
        }
    }
}
