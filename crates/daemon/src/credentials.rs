//! What is known of the program at the other end of a session: what the kernel says (`SO_PEERCRED`), or which machine's port it came by
//! (protocol G1).

use partywall_protocol::wire::{MachineId, Origin, User};

/// The user and the process at the other end of a session. Nothing in it is the program's own word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Credentials {
    /// The user that it counts as: the effective user when it connected, or its machine.
    pub user: User,
    /// The effective group when it connected; none in a machine.
    pub gid: Option<u32>,
    /// Its process, by the number that it has in the broker's pid namespace or in its machine.
    pub pid: u32,
}

impl Credentials {
    /// Of a process of the host.
    pub fn of_host(uid: u32, gid: u32, pid: u32) -> Self {
        Self { user: User::Host(uid), gid: Some(gid), pid }
    }

    /// Of a process in a virtual machine.
    pub fn of_machine(machine: MachineId, pid: u32) -> Self {
        Self { user: User::Machine(machine), gid: None, pid }
    }

    /// Where it runs.
    pub fn origin(self) -> Origin {
        self.user.origin()
    }

    /// Whether both are of one user.
    pub(crate) fn is_user_of(self, other: Self) -> bool {
        self.user == other.user
    }
}
