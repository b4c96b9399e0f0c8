//! Network namespaces of two hosts and of etcd, which can drop packets in transit.
//!
//! ```text
//!   host alpha (10.79.0.1) -- veth -- bridge, etcd (10.79.0.254) -- veth -- host beta (10.79.0.2)
//! ```
//!
//! Processes of this test hold the namespaces and end with it, so nothing has to be removed afterwards. It needs root, since a broker does not
//! trust a gateway in another user namespace, and `iptables`.

use std::io::Read as _;
use std::process::{Child, Command, Stdio};

/// A place in the network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Node {
    Alpha,
    Beta,
    Etcd,
}

const NODES: [Node; 3] = [Node::Alpha, Node::Beta, Node::Etcd];

impl Node {
    pub(crate) fn address(self) -> &'static str {
        match self {
            Self::Alpha => "10.79.0.1",
            Self::Beta => "10.79.0.2",
            Self::Etcd => "10.79.0.254",
        }
    }
}

/// A process in whose namespace others run. It ends when its input does, at the latest with this process.
#[derive(Debug)]
struct Holder(Child);

impl Holder {
    fn start() -> Result<Self, String> {
        let mut command = Command::new("unshare");
        command.args(["--net", "--", "sh", "-c", "echo; exec cat"]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut holder = Self(command.spawn().map_err(|e| e.to_string())?);
        // The line shows that it is in its namespace.
        let said = holder.0.stdout.as_mut().map(|said| said.read_exact(&mut [0]));
        if matches!(said, Some(Ok(()))) { Ok(holder) } else { Err("unshare --net fails (it needs root)".to_owned()) }
    }

    fn enter(&self) -> Vec<String> {
        let pid = self.0.id().to_string();
        ["nsenter", "--target", &pid, "--net", "--"].map(str::to_owned).into()
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The network. Packets arrive until it drops them.
#[derive(Debug)]
pub(crate) struct Wires {
    /// By the order of `NODES`.
    holders: [Holder; 3],
}

/// A command of these words.
pub(crate) fn command(words: &[String], program: &str) -> Command {
    let Some((first, rest)) = words.split_first() else { return Command::new(program) };
    let mut command = Command::new(first);
    command.args(rest).arg(program);
    command
}

impl Wires {
    /// `None`, with a note, if this machine lets the test make no network.
    pub(crate) fn new() -> Option<Self> {
        match Self::make() {
            Ok(wires) => Some(wires),
            Err(reason) => {
                eprintln!("LEFT OUT: no network of namespaces can be made here: {reason}");
                None
            }
        }
    }

    fn make() -> Result<Self, String> {
        let wires = Self { holders: [Holder::start()?, Holder::start()?, Holder::start()?] };
        wires.run(Node::Etcd, "ip link add bridge0 type bridge && ip link set bridge0 up")?;
        for (node, device) in NODES.into_iter().zip(["eth0", "eth0", "bridge0"]) {
            let pid = wires.holders[node as usize].0.id();
            if node != Node::Etcd {
                let to = format!("wire{}", node as usize);
                let lay = format!("ip link add {to} type veth peer name eth0 netns {pid}");
                wires.run(Node::Etcd, &format!("{lay} && ip link set {to} master bridge0 up"))?;
            }
            let address = node.address();
            let up =
                format!("ip link set lo up && ip link set {device} up && ip address add {address}/24 dev {device}");
            wires.run(node, &format!("{up} && iptables --wait --list INPUT"))?;
        }
        Ok(wires)
    }

    /// The words before a command that is to run there.
    pub(crate) fn enter(&self, node: Node) -> Vec<String> {
        self.holders[node as usize].enter()
    }

    fn run(&self, node: Node, line: &str) -> Result<(), String> {
        let path = format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default());
        let done = command(&self.enter(node), "sh").args(["-c", line]).env("PATH", path).output();
        let done = done.map_err(|e| e.to_string())?;
        if done.status.success() { Ok(()) } else { Err(format!("{line}: {}", String::from_utf8_lossy(&done.stderr))) }
    }

    /// Packets from one place to another vanish from now on. Neither side gets an error or a reset.
    pub(crate) fn drop_packets(&self, from: Node, to: Node) {
        self.run(to, &format!("iptables --wait --append INPUT --source {} --jump DROP", from.address())).unwrap();
    }

    /// All packets arrive again.
    pub(crate) fn mend(&self) {
        for node in NODES {
            self.run(node, "iptables --wait --flush INPUT").unwrap();
        }
    }
}
