//! Fields that are one of a few values: kinds, directions, sides, lists, refusals.

use core::fmt;

use partywall_shm::numbered;

use super::WireError;
use super::codec::{PacketReader, PacketWriter, Put, Take, plain_field};

/// Makes fields of types that are one integer on the wire, by the functions that give the integer and take it back.
macro_rules! integer_fields {
    ($($name:ident: $repr:ty, $number:ident, $from:ident;)*) => {$(
        impl Put for $name {
            fn put(&self, out: &mut PacketWriter<'_>) {
                self.$number().put(out);
            }
        }
        impl<'a> Take<'a> for $name {
            const MIN: usize = size_of::<$repr>();
            fn take(reader: &mut PacketReader<'a>) -> Result<Self, WireError> {
                let value = <$repr>::take(reader)?;
                Self::$from(value).ok_or(WireError::Value { field: stringify!($name), value: value.into() })
            }
        }
        plain_field! { $name, concat!("{name} ", stringify!($repr)); }
    )*};
}

integer_fields! {
    Kind: u8, number, from_number;
    Side: u8, number, from_number;
    What: u8, number, from_number;
    PolicyQuestion: u8, number, from_number;
    EventKind: u8, number, from_number;
    NameNews: u8, number, from_number;
    PluggedAs: u8, number, from_number;
    RungBy: u8, number, from_number;
    BellWay: u8, number, from_number;
    Mobility: u8, number, from_number;
    Refusal: u16, number, from_number;
    Directions: u8, bits, from_bits;
}

numbered! {
    /// The kind of a channel: the form of the data that it carries.
    Kind: u8 {
        /// Bytes in order, without boundaries.
        Stream = 1 "stream",
        /// Records whose boundaries are kept (protocol D).
        Message = 2 "message",
        /// Records from one writer to many readers (protocol B).
        Broadcast = 3 "broadcast",
        /// The bytes of a TCP connection (protocol T). Made by `Take`, never by `Bind` or `Connect`.
        Socket = 4 "socket",
    }
}

numbered! {
    /// An end of a channel.
    Side: u8 {
        /// The side that asked for it.
        Connecting = 0 "connecting",
        /// The side that had bound the service.
        Accepting = 1 "accepting",
    }
}

impl Side {
    /// The other end.
    #[must_use]
    pub fn other(self) -> Self {
        match self {
            Self::Connecting => Self::Accepting,
            Self::Accepting => Self::Connecting,
        }
    }
}

numbered! {
    /// The rows that `List` asks for.
    What: u8 {
        /// Domains, by id.
        Domains = 0 "domains",
        /// Services, by key.
        Services = 1 "services",
        /// Channels, by id.
        Channels = 2 "channels",
        /// Virtual machines, by number.
        Machines = 3 "machines",
        /// Members of groups, by place.
        Groups = 4 "groups",
    }
}

numbered! {
    /// The subject of a `TestPolicy`.
    PolicyQuestion: u8 {
        /// To join as a domain.
        Join = 0 "join",
        /// To join as a domain and connect to a service of another.
        Connect = 1 "connect",
        /// To join as a domain and have a connection of an unmodified program on a ring.
        Sockets = 2 "sockets",
        /// To move connections of an unmodified program to a ring: of the one whose executable `from` names, or if `from` is empty, of the
        /// client itself, whose executable is `to` unless the broker knows better.
        Program = 3 "program",
        /// To join as a domain and connect to a service on another host, which `to` names as `domain@host`.
        ConnectTo = 4 "connect to another host",
        /// To connect to a service here as a domain of another host, which `from` names as `domain@host`.
        ConnectFrom = 5 "connect from another host",
    }
}

numbered! {
    /// The kind of an event of the broker (protocol C18).
    EventKind: u8 {
        /// A session has joined a domain.
        Joined = 0 "joined",
        /// A session that had joined has ended.
        Left = 1 "left",
        /// A session, or its request to join, was refused.
        JoinRefused = 2 "join-refused",
        /// A program has connected to a service.
        Connected = 3 "connected",
        /// A request to connect was refused.
        ConnectRefused = 4 "connect-refused",
        /// A connection of unmodified programs has got rings, or a flow of datagrams its ring.
        RingMade = 5 "ring-made",
        /// A ring for a connection or a flow was refused.
        RingRefused = 6 "ring-refused",
        /// Both ends of a channel are gone.
        Ended = 7 "ended",
        /// A virtual machine was attached.
        MachineAttached = 8 "machine-attached",
        /// A virtual machine was detached.
        MachineDetached = 9 "machine-detached",
        /// The agent of a virtual machine has greeted.
        MachineUp = 10 "machine-up",
        /// The agent of a virtual machine does not answer any more.
        MachineDown = 11 "machine-down",
        /// Another policy is in force.
        PolicyChanged = 12 "policy-changed",
        /// Other move rules are in force.
        MovesChanged = 13 "moves-changed",
    }
}

numbered! {
    /// What has become of a name of this host (protocol H2).
    NameNews: u8 {
        /// A domain or service is there, and the cluster may know it.
        Present = 0 "present",
        /// It is not there any more.
        Gone = 1 "gone",
        /// A program wants to be this domain, and waits for `NameClaimed`.
        Claim = 2 "claim",
    }
}

numbered! {
    /// The way in which the windows of a virtual machine are plugged in.
    PluggedAs: u8 {
        /// Nothing was plugged in yet, so its monitor was not asked.
        Unknown = 0 "not known yet",
        /// Separate memory (`virtio-pmem`, `nvdimm`).
        Memory = 1 "memory devices",
        /// The memory of PCI devices (`ivshmem-plain`).
        Device = 2 "PCI devices",
    }
}

numbered! {
    /// How programs in a virtual machine are rung by those in others.
    RungBy: u8 {
        /// By way of its serial port.
        Port = 0 "its serial port",
        /// By interrupts of its doorbell device.
        Interrupts = 1 "interrupts",
    }
}

numbered! {
    /// The way of a connection's bell (protocol T4, I7).
    BellWay: u8 {
        /// The link, and nothing beside it.
        Link = 0 "a link",
        /// From the broker to a relay: the link goes to another machine's relay, and events may pass between the two relays.
        Relays = 1 "a link between relays",
        /// From an agent to a program: the link, and two events that an interrupt signals and that ring.
        Interrupts = 2 "a link and interrupts",
    }
}

numbered! {
    /// Whether a virtual machine can be migrated live (protocol G7).
    Mobility: u8 {
        /// One of its devices prevents it.
        Fixed = 0 "no",
        /// All its devices allow it.
        Migratable = 1 "yes",
        /// It is about to leave: it gives up its windows, or has given them up.
        Migrating = 2 "migrating",
    }
}

numbered! {
    /// Why the broker did not do as asked (protocol C8). The `reason` beside it is for people.
    Refusal: u16 {
        /// The message was malformed, or came at the wrong time.
        Protocol = 1 "protocol error",
        /// The broker speaks another version.
        Version = 2 "version not supported",
        /// Not a name by C5.
        NameInvalid = 3 "name invalid",
        /// The domain exists and belongs to another user.
        NameTaken = 4 "name taken",
        /// The policy says no.
        Denied = 5 "denied by policy",
        /// No domain has this name now.
        NoSuchDomain = 6 "no such domain",
        /// The domain has not bound this service.
        NoSuchService = 7 "no such service",
        /// The domain has bound this service already.
        ServiceTaken = 8 "service taken",
        /// Too many connections wait for the listener.
        BacklogFull = 9 "backlog full",
        /// The domain has as much as the policy lets it have.
        Quota = 10 "quota exceeded",
        /// No such channel, or not one of yours.
        NoSuchChannel = 11 "no such channel",
        /// The service carries another kind.
        KindMismatch = 12 "kind mismatch",
        /// The descriptor is not a sealed region of the stated geometry.
        BadRegion = 13 "bad region",
        /// The descriptor is not an end of a link.
        BadLink = 14 "bad link",
        /// The broker is short of descriptors or memory; try later.
        OutOfResources = 15 "out of resources",
        /// The two sides of a channel tell different stories of it.
        SelfContradiction = 16 "contradiction",
        /// The descriptor is not a TCP socket in the state that the message needs.
        BadSocket = 17 "bad socket",
        /// No program offers this connection now.
        NoSuchOffer = 18 "no such offer",
        /// The addresses do not name one connection on this host.
        Ambiguous = 19 "ambiguous",
        /// The peer is on another machine: the region must lie in a window, of which `Room` gives a place (protocol G).
        Elsewhere = 20 "on another machine",
        /// The connection to another machine cannot be used: no window, no monitor, or no such machine.
        Machine = 21 "machine",
    }
}

/// The directions in which a channel carries bytes: forward (the connecting side writes), reverse (the accepting side writes), or both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Directions(u8);

impl Directions {
    /// The connecting side writes.
    pub const FORWARD: Self = Self(1);
    /// The accepting side writes.
    pub const REVERSE: Self = Self(2);
    /// Both sides write.
    pub const BOTH: Self = Self(3);

    /// Its bits on the wire.
    pub fn bits(self) -> u8 {
        self.0
    }

    /// The directions with these bits: at least one, and none that is unknown.
    pub fn from_bits(bits: u8) -> Option<Self> {
        matches!(bits, 1..=3).then_some(Self(bits))
    }

    /// How many directions, and so links, there are: 1 or 2.
    pub fn count(self) -> usize {
        self.0.count_ones() as usize
    }

    /// Whether every direction of `other` is among these.
    pub fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

impl fmt::Display for Directions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match *self {
            Self::FORWARD => "forward",
            Self::REVERSE => "reverse",
            _ => "both",
        })
    }
}
