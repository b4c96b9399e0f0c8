//! A network between guests: virtio-net, as machines without Partywall have it.
//!
//! ```text
//!   guest a -- virtio-net -- tap --+-- bridge --+-- tap -- virtio-net -- guest b
//! ```
//!
//! A network may be joined by a link of limited rate to that of another host, with another bridge in another namespace
//! ([`Network::joined`]).
//!
//! Bridge and taps are in a separate network namespace, which a process of ours holds. They disappear with that process and the guests,
//! even if no process is left to remove them. Without root, there are two guests whose QEMUs send each other frames.

use crate::process::LabProcess;
use crate::{LabError, NetworkKind, scratch, tool};
use std::fs::{File, read_link};
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

/// Guests of one network at most: the last part of their addresses, below those of the hosts.
const MOST: u8 = 252;
/// The address of the host at the other end of a link, on its bridge.
const FAR_HOST: u8 = 253;
/// The host's address on the bridge.
const HOST: u8 = 254;

#[derive(Debug)]
enum NetworkWires {
    /// The process in whose namespace they are.
    Namespace {
        holder: LabProcess,
        vhost: bool,
        host: u8,
    },
    Folder(tempfile::TempDir),
}

#[derive(Debug)]
struct NetworkInner {
    wires: NetworkWires,
    guests: AtomicU8,
}

/// A network. It lives until it and all guests on it are dropped.
#[derive(Debug, Clone)]
pub struct Network(Arc<NetworkInner>);

/// A guest's place on a network.
#[derive(Debug, Clone)]
pub(crate) struct NetworkPort {
    network: Network,
    number: u8,
    /// The number of the wire at this place. Two machines have one place while one is migrated into the other.
    wire: u8,
}

impl Network {
    /// Uses a bridge if this process may make tap devices, otherwise sockets; [`kind`](Self::kind) returns which.
    pub fn new() -> Result<Self, LabError> {
        let tun = File::options().read(true).write(true).open("/dev/net/tun").is_ok();
        if rustix::process::geteuid().is_root() && tun { Self::bridge() } else { Self::sockets() }
    }

    /// With a bridge.
    pub fn bridge() -> Result<Self, LabError> {
        Self::bridge_of(HOST)
    }

    fn bridge_of(host: u8) -> Result<Self, LabError> {
        let mut command = Command::new("unshare");
        command.args(["--net", "--", "sleep", "infinity"]);
        let holder = LabProcess::start(&command, "KILL", None)?;
        let vhost = File::options().read(true).write(true).open("/dev/vhost-net").is_ok();
        let wires = NetworkWires::Namespace { holder, vhost, host };
        let network = Self(Arc::new(NetworkInner { wires, guests: AtomicU8::new(0) }));
        network.wait_for_namespace()?;
        // Otherwise it has the lowest address of its ports, which changes with them. The other host sends to the old address until its
        // neighbour table gives that up, for up to a minute.
        network.ip(&format!("link add bridge0 address 02:70:77:00:00:{host:02x} type bridge"))?;
        network.ip(&format!("address add {}/24 dev bridge0", address(host)))?;
        network.ip("link set bridge0 up")?;
        network.ip("link set lo up")?;
        Ok(network)
    }

    /// The network of another host that is joined to this one by a link, which carries `megabits` a second each way. The addresses are those
    /// of one network. Guests get their places on this one, and may be migrated to the other ([`GuestOptions::arrives_on`]).
    ///
    /// [`GuestOptions::arrives_on`]: crate::GuestOptions::arrives_on
    pub fn joined(&self, megabits: u32) -> Result<Self, LabError> {
        let far = Self::bridge_of(FAR_HOST)?;
        let NetworkWires::Namespace { holder, .. } = &far.0.wires else {
            return Err(LabError::tool("the link between the hosts", "only root can make it"));
        };
        self.ip(&format!("link add link0 type veth peer name link0 netns {}", holder.pid()))?;
        for network in [self, &far] {
            network.ip("link set link0 master bridge0 up")?;
            // A packet of 64 KiB, as segmentation offload makes them, must fit into the bucket.
            let shape = format!("qdisc add dev link0 root tbf rate {megabits}mbit burst 256kb latency 50ms");
            tool::run_command("tc", network.command("tc").args(shape.split(' ')))?;
        }
        Ok(far)
    }

    /// A network whose wires are sockets between the QEMU processes.
    pub fn sockets() -> Result<Self, LabError> {
        Ok(Self(Arc::new(NetworkInner { wires: NetworkWires::Folder(scratch::folder()?), guests: AtomicU8::new(0) })))
    }

    /// The kind of network.
    pub fn kind(&self) -> NetworkKind {
        match self.0.wires {
            NetworkWires::Namespace { vhost, .. } => NetworkKind::Bridge { vhost },
            NetworkWires::Folder(_) => NetworkKind::Sockets,
        }
    }

    /// The host's own address on it, if it has one.
    pub fn host(&self) -> Option<Ipv4Addr> {
        match self.0.wires {
            NetworkWires::Namespace { host, .. } => Some(address(host)),
            NetworkWires::Folder(_) => None,
        }
    }

    /// A program of the host, to be run on this network.
    pub fn command(&self, program: impl AsRef<Path>) -> Command {
        match self.namespace() {
            Some(namespace) => {
                let mut command = Command::new("nsenter");
                command.arg(format!("--net={}", namespace.display())).arg("--").arg(program.as_ref());
                command
            }
            None => Command::new(program.as_ref()),
        }
    }

    fn namespace(&self) -> Option<PathBuf> {
        match &self.0.wires {
            NetworkWires::Namespace { holder, .. } => Some(format!("/proc/{}/ns/net", holder.pid()).into()),
            NetworkWires::Folder(_) => None,
        }
    }

    fn wait_for_namespace(&self) -> Result<(), LabError> {
        let NetworkWires::Namespace { holder, .. } = &self.0.wires else { return Ok(()) };
        let ours = read_link("/proc/self/ns/net").ok();
        let deadline = Instant::now() + Duration::from_secs(20);
        while Instant::now() < deadline {
            let theirs = self.namespace().and_then(|path| read_link(path).ok());
            if theirs.is_some() && theirs != ours {
                return Ok(());
            }
            if let Some(end) = holder.wait(Duration::from_millis(2)) {
                return Err(LabError::tool("unshare", end));
            }
        }
        Err(LabError::tool("unshare", "it made no network namespace"))
    }

    fn ip(&self, line: &str) -> Result<(), LabError> {
        tool::run_command("ip", self.command("ip").args(line.split(' '))).map(drop)
    }

    /// Makes room for one more guest.
    pub(crate) fn place(&self) -> Result<NetworkPort, LabError> {
        let most = if self.kind() == NetworkKind::Sockets { 2 } else { MOST };
        let taken = self.0.guests.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| (n < most).then_some(n + 1));
        let number = 1 + taken.map_err(|_| LabError::Full { most, kind: self.kind() })?;
        let port = NetworkPort { network: self.clone(), number, wire: 0 };
        port.make_tap()?;
        Ok(port)
    }
}

impl NetworkPort {
    pub(crate) fn address(&self) -> Ipv4Addr {
        address(self.number)
    }

    /// The same place with another wire, for a machine that arrives, on this network or the given one: it has the address and the card of
    /// the machine that leaves.
    pub(crate) fn next_wire(&self, on: Option<&Network>) -> Result<Self, LabError> {
        let network = on.unwrap_or(&self.network).clone();
        let next = Self { network, wire: self.wire.wrapping_add(1), number: self.number };
        next.make_tap()?;
        Ok(next)
    }

    fn make_tap(&self) -> Result<(), LabError> {
        if self.network.namespace().is_some() {
            let tap = self.tap();
            self.network.ip(&format!("tuntap add dev {tap} mode tap"))?;
            self.network.ip(&format!("link set {tap} master bridge0 up"))?;
        }
        Ok(())
    }

    fn tap(&self) -> String {
        format!("tap{}-{}", self.number, self.wire)
    }

    /// A program that is to be on this network, as QEMU must be.
    pub(crate) fn command(&self, program: &str) -> Command {
        self.network.command(program)
    }

    /// The arguments that plug this port into a guest of QEMU.
    pub(crate) fn arguments(&self) -> [String; 4] {
        let number = self.number;
        let wire = match &self.network.0.wires {
            NetworkWires::Namespace { vhost, .. } => {
                let vhost = if *vhost { ",vhost=on" } else { "" };
                format!("tap,id=net,ifname={},script=no,downscript=no{vhost}", self.tap())
            }
            NetworkWires::Folder(folder) => {
                let path = |n: u8| folder.path().join(n.to_string()).display().to_string();
                let (here, there) = (path(number), path(3 - number));
                format!("dgram,id=net,local.type=unix,local.path={here},remote.type=unix,remote.path={there}")
            }
        };
        let device = format!("virtio-net-pci,netdev=net,mac=52:54:00:70:77:{number:02x}");
        ["-netdev".into(), wire, "-device".into(), device]
    }
}

fn address(number: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 77, 0, number)
}
