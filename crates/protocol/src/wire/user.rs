//! The place where a program runs, and the user that it counts as there (protocol G1).

use core::fmt;
use core::num::NonZeroU32;

use super::WireError;
use super::codec::{PacketReader, PacketWriter, Put, Take, plain_field};

/// Number of a virtual machine. A broker never uses one twice.
pub type MachineId = NonZeroU32;

/// Where a program runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Origin {
    /// On the broker's host.
    Host,
    /// In this virtual machine.
    Machine(MachineId),
}

impl Origin {
    /// The machine, unless it is the host.
    pub fn machine(self) -> Option<MachineId> {
        match self {
            Self::Host => None,
            Self::Machine(machine) => Some(machine),
        }
    }
}

impl From<MachineId> for Origin {
    fn from(machine: MachineId) -> Self {
        Self::Machine(machine)
    }
}

/// The user that a program counts as, for rights and accounts (protocol G1.2).
///
/// A user number has a meaning on the host only. The broker cannot see the users of a virtual machine, so all programs of a machine are
/// one user. The two kinds are distinct, whatever user number a process of the host has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum User {
    /// The user of the host with this number.
    Host(u32),
    /// Every program in this virtual machine.
    Machine(MachineId),
}

impl User {
    /// Where its programs run.
    pub fn origin(self) -> Origin {
        match self {
            Self::Host(_) => Origin::Host,
            Self::Machine(machine) => Origin::Machine(machine),
        }
    }

    /// Its number on the host; `None` in a virtual machine.
    pub fn uid(self) -> Option<u32> {
        match self {
            Self::Host(uid) => Some(uid),
            Self::Machine(_) => None,
        }
    }
}

impl fmt::Display for User {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host(uid) => write!(f, "user {uid}"),
            Self::Machine(machine) => write!(f, "machine {machine}"),
        }
    }
}

/// Protocol G1.1: `machine u32, uid u32`, where machine 0 is the host and a machine has uid 0.
impl Put for User {
    fn put(&self, out: &mut PacketWriter<'_>) {
        self.origin().machine().map_or(0, MachineId::get).put(out);
        self.uid().unwrap_or(0).put(out);
    }
}

impl<'a> Take<'a> for User {
    const MIN: usize = 2 * size_of::<u32>();
    fn take(reader: &mut PacketReader<'a>) -> Result<Self, WireError> {
        let (machine, uid) = (u32::take(reader)?, u32::take(reader)?);
        match (MachineId::new(machine), uid) {
            (None, uid) => Ok(Self::Host(uid)),
            (Some(machine), 0) => Ok(Self::Machine(machine)),
            (Some(_), uid) => Err(WireError::Value { field: "uid of a machine", value: uid.into() }),
        }
    }
}

// Two integers, whatever the field is called.
plain_field! { User, "machine u32, uid u32"; }
