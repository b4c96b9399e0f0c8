//! The policy: who may join as what, who may connect to whom, how much of everything, and who sees it all.
//!
//! A policy is a TOML file ([`partywalld.toml`](https://toml.io) beside the crate is a sample) of allowing rules; what no rule
//! allows is refused. Rules only add, so their order matters for one thing alone: a domain has the quota of the first `join`
//! rule that admits it.
//!
//! ```toml
//! administrators = ["root"]            # may join as anything, connect to anything, see and inspect everything; root if left out
//! administrators_in_containers = []    # the same, from a pid or user namespace that is not the broker's
//! sessions_per_user = 4096
//!
//! [quota]                              # of each domain; every key has a default
//! channels = 1000
//!
//! [[join]]                             # these users may be these domains ...
//! domain = "web-*"
//! users = ["www-data", 1001]
//! groups = ["web"]
//! machines = ["vm-web"]                # programs in this virtual machine too; as its own name they always may
//! quota = { channels = 100 }           # ... and have this much
//!
//! [[connect]]                          # these domains may connect to those
//! from = "web-*"
//! to = "db"
//! service = "sql"                      # connections of unmodified programs: "tcp-PORT"
//!
//! [sockets]                            # when those go to a ring; every key has a default
//! move = "after=128,bytes=2097152"
//! rules = ["never@port=22", "now@program=redis-*", "never@address=10.9.0.0/16"]
//! same_user = true                     # the connections of one user to itself need no `connect` rule
//!
//! [programs]                           # which programs are accelerated, where the library is loaded into more than those
//! allow = ["nginx", "/opt/*/bin/app"]  # names or absolute paths of executables; every program, if left out
//! deny = ["redis-cli"]                 # not these
//!
//! [[machine]]                          # a virtual machine that is attached when the broker starts
//! name = "vm-web"
//! monitor = "/run/vm-web/qmp"          # -qmp unix:...,server=on,wait=off
//! port = "/run/vm-web/port"            # the host's end of its serial port org.partywall.0
//!
//! [[group]]                            # from the start on: buffers that all members read where they are
//! name = "pool"
//! machines = ["vm-web", "vm-db"]       # programs in these virtual machines
//! domains = ["web"]                    # and processes of the host that are these domains
//! room = "64M"                         # bytes for buffers of each member, allocated at the start
//!
//! [[network]]                          # UDP datagrams go by rings between the listed network namespaces
//! namespace = "/run/netns/blue"        # the namespace's file; "host" is the broker's own
//! addresses = ["10.0.0.2"]             # these belong to it, and reach the other listed ones without translation
//!
//! [[network]]
//! machine = "vm-web"                   # a virtual machine
//! addresses = ["10.77.0.1"]
//!
//! [[forward]]                          # TCP connections to these addresses are translated, and reach the listener at `to`
//! addresses = ["192.0.2.1:8080"]
//! to = "10.0.0.2:80"
//!
//! [cluster]                            # this host shares its names with others (docs/cluster.md)
//! host = "alpha"                       # its name there
//! gateway = "gateway"                  # the domain of `partywall-gateway`
//! users = ["partywall-gateway"]        # who may be it, beside administrators
//! machines = false                     # true: programs in virtual machines take part; the gateway gets the memory shared with them
//!
//! [[connect]]                          # a rule without `from_host` and `to_host` is for domains of this host
//! from = "web-*"
//! from_host = "beta"                   # these domains of other hosts may connect to those here
//! to = "db"
//!
//! [metrics]                            # off without this table
//! listen = "127.0.0.1:9464"            # or the path of a UNIX socket
//! ```
//!
//! Sizes are numbers of bytes, or text with K, M, G or T (powers of 1024).
//!
//! Users and groups are those of the host: names, resolved when the file is read, or numbers; `"*"` is everyone. A user is in a group if it is
//! its primary group (as the kernel reports of the peer) or if the group database listed the user when the file was read.
//! Containers have the user ids of the broker's user namespace in `join` rules, but a user of a container is no administrator, and is not
//! the same user as one of the host or of another container.
//! A domain may always connect to itself. Without a file, the broker's own user and root are administrators, and nobody
//! else may do anything; programs in virtual machines that an administrator attaches may connect to everything.

mod cluster;
mod decision;
mod forward;
mod group;
mod machine;
mod metrics;
mod network;
mod pattern;
mod programs;
mod quota;
mod size;
mod sockets;
mod warnings;
mod who;

use std::path::{Path, PathBuf};

use partywall_protocol::wire::Name;
use serde::Deserialize;
use toml::Spanned;

pub use cluster::ClusterTable;
pub(crate) use decision::{Grounds, RuleCode, Ruling};
pub use forward::ForwardEntry;
pub use group::GroupEntry;
pub use machine::MachineEntry;
pub use metrics::MetricsAddress;
pub use network::{NamespacePlace, NetworkEntry};
pub use pattern::NamePattern;
pub use quota::Quota;
pub use sockets::SocketRules;
pub use who::{HostGroup, HostUser};

use crate::credentials::Credentials;
use decision::PolicySource;
use metrics::MetricsTable;
use programs::ProgramLists;
use quota::QuotaChange;

/// The operator's rules.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Policy {
    /// Users who may do everything, where they run in the broker's own user namespace and pid namespace.
    #[serde(default = "root")]
    administrators: Spanned<Vec<HostUser>>,
    /// Users who may do everything from within containers too.
    #[serde(default = "nobody")]
    administrators_in_containers: Spanned<Vec<HostUser>>,
    /// Most sessions that one user may have, over all domains.
    #[serde(default = "default_sessions_per_user")]
    sessions_per_user: u32,
    /// The quota of a domain unless its join rule has another.
    #[serde(default)]
    quota: Quota,
    #[serde(default)]
    join: Vec<Spanned<JoinRule>>,
    #[serde(default)]
    connect: Vec<Spanned<ConnectRule>>,
    /// When connections of unmodified programs go to a ring.
    #[serde(default)]
    sockets: SocketRules,
    /// The unmodified programs that are accelerated; every one without it.
    #[serde(default)]
    programs: Option<ProgramLists>,
    /// Programs in virtual machines, which an administrator has attached, may connect to everything.
    #[serde(skip)]
    machines_meet: bool,
    /// Virtual machines to attend to from the start on.
    #[serde(default)]
    machine: Vec<MachineEntry>,
    /// Members whose windows all of them see at the same addresses.
    #[serde(default, deserialize_with = "group::all")]
    group: Vec<GroupEntry>,
    /// Network namespaces between which datagrams may go by rings, and the addresses of each.
    #[serde(default, deserialize_with = "network::all")]
    network: Vec<NetworkEntry>,
    /// Addresses at which listeners are reached by way of a translator.
    #[serde(default, deserialize_with = "forward::all")]
    forward: Vec<ForwardEntry>,
    /// Where metrics are served.
    #[serde(default)]
    metrics: Option<MetricsTable>,
    /// The part of this host in a cluster.
    #[serde(default)]
    cluster: Option<ClusterTable>,
    /// Where clauses stand.
    #[serde(skip)]
    source: PolicySource,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct JoinRule {
    domain: NamePattern,
    #[serde(default)]
    users: Vec<HostUser>,
    #[serde(default)]
    groups: Vec<HostGroup>,
    #[serde(default)]
    machines: Vec<NamePattern>,
    #[serde(default)]
    quota: QuotaChange,
}

impl JoinRule {
    fn admits(&self, peer: Credentials) -> bool {
        self.users.iter().any(|user| user.is(peer.user)) || self.groups.iter().any(|group| group.has(peer))
    }
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ConnectRule {
    from: NamePattern,
    /// The other host that `from` is on; this host, if left out.
    #[serde(default)]
    from_host: Option<NamePattern>,
    to: NamePattern,
    /// The other host that `to` is on; this host, if left out.
    #[serde(default)]
    to_host: Option<NamePattern>,
    #[serde(default)]
    service: NamePattern,
}

impl ConnectRule {
    /// Whether both domains are on this host.
    fn is_local(&self) -> bool {
        self.from_host.is_none() && self.to_host.is_none()
    }
}

/// Root, who may change the file anyway.
fn root() -> Spanned<Vec<HostUser>> {
    by_default(vec![HostUser::Id(0)])
}

fn nobody() -> Spanned<Vec<HostUser>> {
    by_default(Vec::new())
}

/// A value that stands in no file.
fn by_default<T>(value: T) -> Spanned<T> {
    Spanned::new(0..0, value)
}

fn default_sessions_per_user() -> u32 {
    4096
}

/// Why there is no policy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PolicyError {
    /// The file is not there, or not ours to read.
    #[error("cannot read the policy file {}: {source}", path.display())]
    Unreadable {
        /// Where the policy file should be.
        path: PathBuf,
        /// The error of the system.
        source: std::io::Error,
    },
    /// The file says something that a policy cannot say.
    #[error("the policy file {} is wrong: {source}", path.display())]
    Wrong {
        /// Where the policy file is.
        path: PathBuf,
        /// Where, and what.
        source: Box<toml::de::Error>,
    },
}

impl Policy {
    /// The policy without a file: `uid` and root may do everything, others nothing.
    pub fn for_user(uid: u32) -> Self {
        Self {
            administrators: by_default(vec![HostUser::Id(0), HostUser::Id(uid)]),
            administrators_in_containers: nobody(),
            sessions_per_user: u32::MAX,
            quota: Quota::default(),
            join: Vec::new(),
            connect: Vec::new(),
            machines_meet: true,
            sockets: SocketRules::default(),
            programs: None,
            machine: Vec::new(),
            group: Vec::new(),
            network: Vec::new(),
            forward: Vec::new(),
            metrics: None,
            cluster: None,
            source: PolicySource::default(),
        }
    }

    /// Reads a policy file.
    ///
    /// # Errors
    /// [`PolicyError`] names the file, the line and the fault.
    pub fn read(path: &Path) -> Result<Self, PolicyError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| PolicyError::Unreadable { path: path.to_owned(), source })?;
        let mut policy = Self::parse(&text)
            .map_err(|source| PolicyError::Wrong { path: path.to_owned(), source: Box::new(source) })?;
        policy.source.read_from(path);
        Ok(policy)
    }

    /// Reads the text of a policy file.
    ///
    /// # Errors
    /// The error shows the line and the fault.
    pub fn parse(text: &str) -> Result<Self, toml::de::Error> {
        let policy: Self = toml::from_str(text)?;
        Ok(Self { source: PolicySource::of(text), ..policy })
    }

    /// Whether this process may do, see and inspect everything. No virtual machine may, and no process in a container unless the policy
    /// names its user for that.
    pub fn is_administrator(&self, peer: Credentials) -> bool {
        self.administrator(peer).is_some()
    }

    /// Whether there is any name that this user may join as. A user without one may not even keep a session open.
    pub fn may_join_something(&self, peer: Credentials) -> bool {
        self.is_administrator(peer) || self.join.iter().any(|rule| rule.get_ref().admits(peer))
    }

    /// The quota of a domain called `name`, if this user of the host may join as it.
    pub fn may_join(&self, peer: Credentials, name: &Name) -> Option<Quota> {
        self.quota_by(self.judge_join(peer, name))
    }

    /// The quota of a domain called `name`, if programs in the virtual machine `machine` may join as it.
    pub fn may_join_machine(&self, machine: &Name, name: &Name) -> Option<Quota> {
        self.quota_by(self.judge_join_machine(machine, name))
    }

    fn quota_by(&self, grounds: Grounds<'_>) -> Option<Quota> {
        match grounds {
            Grounds::JoinRule { rule, .. } => Some(rule.get_ref().quota.apply(self.quota)),
            grounds => grounds.allow().then_some(self.quota),
        }
    }

    /// Whether domain `from`, run by `peer`, may connect to `service` of domain `to`.
    pub fn may_connect(&self, peer: Credentials, from: &Name, to: &Name, service: &Name) -> bool {
        self.judge_connect(peer, from, to, service).allow()
    }

    /// Whether a connection of unmodified programs, of domain `from` run by `peer` to `service` of domain `to`, may go to a ring.
    /// `one_user`: both are run by the same user.
    pub fn may_share(&self, peer: Credentials, one_user: bool, domains: (&Name, &Name), service: &Name) -> bool {
        self.judge_share(peer, one_user, domains, service).allow()
    }

    /// Whether some rule lets `from` connect to something of `to`; then each is visible to the other (protocol C10).
    pub fn may_reach(&self, from: &Name, to: &Name) -> bool {
        self.machines_meet || self.connect_rules().any(|rule| rule.from.matches(from) && rule.to.matches(to))
    }

    /// Whether some rule lets a program in the virtual machine `machine`, under any name that it may have, connect to `service` of `to`.
    pub(crate) fn machine_may_reach(&self, machine: &Name, to: &Name, service: &Name) -> bool {
        self.machines_meet
            || self.connect_rules().any(|rule| {
                rule.to.matches(to) && rule.service.matches(service) && self.may_be_name_in(machine, &rule.from)
            })
    }

    /// Whether some rule lets `from` connect to anything of a program in the virtual machine `machine`, under any name that it may have.
    pub(crate) fn may_reach_machine(&self, from: &Name, machine: &Name) -> bool {
        self.machines_meet
            || self.connect_rules().any(|rule| rule.from.matches(from) && self.may_be_name_in(machine, &rule.to))
    }

    /// Rules for two domains of this host.
    fn connect_rules(&self) -> impl Iterator<Item = &ConnectRule> {
        self.connect.iter().map(Spanned::get_ref).filter(|rule| rule.is_local())
    }

    /// Whether a program in a virtual machine may join as what fits `pattern`.
    fn may_be_name_in(&self, machine: &Name, pattern: &NamePattern) -> bool {
        let admits =
            |rule: &JoinRule| rule.machines.iter().any(|of| of.matches(machine)) && rule.domain.may_meet(pattern);
        pattern.may_fit_what_begins_with(machine.as_str()) || self.join.iter().map(Spanned::get_ref).any(admits)
    }

    /// When connections of unmodified programs go to a ring.
    pub fn sockets(&self) -> &SocketRules {
        &self.sockets
    }

    /// Virtual machines that are attended to when the broker starts.
    pub fn machines(&self) -> &[MachineEntry] {
        &self.machine
    }

    /// Groups that there are from the broker's start on.
    pub fn groups(&self) -> &[GroupEntry] {
        &self.group
    }

    /// Network namespaces between which datagrams may go by rings.
    pub fn networks(&self) -> &[NetworkEntry] {
        &self.network
    }

    /// Addresses at which listeners are reached by way of a translator.
    pub fn forwards(&self) -> &[ForwardEntry] {
        &self.forward
    }

    /// The address of the metrics, if the file has one.
    pub fn metrics(&self) -> Option<&MetricsAddress> {
        self.metrics.as_ref().map(|table| &table.listen)
    }

    /// Most sessions that one user may have.
    pub fn sessions_per_user(&self) -> u32 {
        self.sessions_per_user
    }
}

#[cfg(test)]
mod tests;
