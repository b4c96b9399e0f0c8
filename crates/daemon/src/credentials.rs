//! The identity of the program at the other end of a session: the kernel's report (`SO_PEERCRED`), or the machine whose port it came by
//! (protocol G1).

use std::fmt;

use partywall_protocol::wire::{MachineId, Origin, User};

/// Whether a process of the host runs where the broker does, when it connected (protocol C3.1).
///
/// A user id names a user only within one user namespace, and root of a container without one has the number of the host's root.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Home {
    /// In the broker's user namespace and pid namespace.
    Broker,
    /// In others, which have these numbers.
    Container {
        /// The user namespace's.
        user: u64,
        /// The pid namespace's.
        pid: u64,
    },
    /// The broker cannot tell, or the process has ended.
    Unknown,
}

impl Home {
    /// Whether two processes certainly run in the same place.
    fn is_that_of(self, other: Self) -> bool {
        self == other && self != Self::Unknown
    }
}

/// The unit in which the broker counts and limits: a user of the host, all programs in containers with one user id, or a machine.
///
/// Root of a container without a user namespace has the same user id as the host's root. It must not use up the limits of the host's
/// root. All containers share one account for each user id: otherwise a user could get more accounts by making namespaces.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Account {
    /// The user, or the machine.
    pub(crate) user: User,
    in_container: bool,
}

impl Account {
    pub(crate) fn of(user: User, home: Home) -> Self {
        Self { user, in_container: user.origin() == Origin::Host && home != Home::Broker }
    }

    /// That of all programs of a machine.
    pub(crate) fn of_machine(machine: MachineId) -> Self {
        Self::of(User::Machine(machine), Home::Unknown)
    }
}

impl fmt::Display for Account {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.user, if self.in_container { " of containers" } else { "" })
    }
}

/// The identity of the program at the other end of a session: the kernel's report (`SO_PEERCRED`), or the machine whose port it came by
/// (protocol G1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Credentials {
    /// The user that it counts as: the effective user when it connected, or its machine.
    pub user: User,
    /// The effective group when it connected; none in a machine.
    pub gid: Option<u32>,
    /// Where it runs, on the host.
    pub home: Home,
    /// Its process, by the number that it has in the broker's pid namespace or in its machine.
    pub pid: u32,
}

impl Credentials {
    /// A process on the host.
    pub fn on_host(uid: u32, gid: u32, home: Home, pid: u32) -> Self {
        Self { user: User::Host(uid), gid: Some(gid), home, pid }
    }

    /// A process in a virtual machine.
    pub fn in_machine(machine: MachineId, pid: u32) -> Self {
        Self { user: User::Machine(machine), gid: None, home: Home::Unknown, pid }
    }

    /// Where it runs.
    pub fn origin(self) -> Origin {
        self.user.origin()
    }

    /// The account that its sessions count for: turns, limits, and the process that reads them.
    pub(crate) fn account(self) -> Account {
        Account::of(self.user, self.home)
    }

    /// Whether both are of one user: on the host, in one place as well.
    pub(crate) fn is_user_of(self, other: Self) -> bool {
        self.user == other.user && (self.origin() != Origin::Host || self.home.is_that_of(other.home))
    }

    /// Whether both may join as one domain. Of those of which the broker cannot tell where they run, it cannot tell whether they run in
    /// one place either.
    pub(crate) fn shares_names_with(self, other: Self) -> bool {
        self.user == other.user && self.home == other.home
    }

    /// Whether it may see what belongs to its user. In a container its uid may be that of another user of the host.
    pub(crate) fn sees_what_its_user_has(self) -> bool {
        self.origin() != Origin::Host || self.home == Home::Broker
    }
}
