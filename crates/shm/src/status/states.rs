//! What a line says of a connection by a number: where it is, why, and which side.

use crate::numbered;

numbered! {
    /// Where a connection is.
    #[derive(Default)]
    LineState: u8 {
        /// No connection.
        #[default]
        Free = 0 "free",
        /// On TCP, and counted until the move rules say that it is worth a ring.
        Counting = 1 "counting",
        /// On TCP, and offered to the other side.
        Offered = 2 "offered",
        /// On a ring, or able to be in either direction.
        Up = 3 "up",
        /// On TCP permanently.
        Tcp = 4 "tcp",
        /// On TCP again after a ring, and may go back.
        Down = 5 "down",
    }
}

numbered! {
    /// Why a connection is on TCP.
    #[derive(Default)]
    Reason: u8 {
        /// No obstacle.
        #[default]
        None = 0 "",
        /// The other side is not under Partywall on this host.
        NoPeer = 1 "the peer is not under Partywall on this host",
        /// The move rules say so.
        MovesNever = 2 "the move rules say never",
        /// It has not carried enough yet.
        TooShort = 3 "it has not carried enough yet",
        /// No broker.
        BrokerAbsent = 4 "no broker answers",
        /// Bytes passed that we did not see.
        RawCalls = 5 "the program also uses raw system calls or io_uring on it",
        /// Several processes hold it.
        Shared = 6 "several processes hold it",
        /// An option that a ring cannot honour.
        Option = 7 "a socket option that only TCP can honour is set",
        /// It was sent through a UNIX socket.
        Passed = 8 "it was passed to another process",
        /// The program became another.
        Exec = 9 "it was kept open across exec",
        /// The peer broke the protocol.
        Corrupt = 10 "the peer broke the protocol",
        /// The broker refused.
        Refused = 11 "the broker refused",
        /// Addresses that do not name one connection.
        Ambiguous = 12 "its addresses do not name one connection on this host",
        /// The other side stays on TCP.
        PeerOnTcp = 13 "the peer stays on TCP",
        /// Something was not to be had: memory, descriptors.
        Resources = 14 "memory or descriptors ran out",
        /// The other side has not answered the offer yet.
        NotTaken = 15 "offered, and not taken up by the peer yet",
        /// Told to go back to TCP.
        Told = 16 "it was told to go back to TCP",
        /// The bell to another machine has hung up.
        LinkLost = 17 "the way to the peer's machine was lost",
        /// A list of the policy leaves its program out.
        ProgramNotListed = 18 "the policy's list of programs leaves its program out",
        /// One of the two machines is not attached, or is being migrated.
        NoWindow = 19 "no window leads to the peer's machine now",
    }
}

numbered! {
    /// The side of a connection that a socket is.
    #[derive(Default)]
    Role: u8 {
        /// Unknown.
        #[default]
        Unknown = 0 "?",
        /// The connecting side.
        Connecting = 1 "connecting",
        /// The accepting side.
        Accepting = 2 "accepting",
    }
}

impl Reason {
    /// A word for programs. It keeps its meaning: a reason that means something else gets another code.
    pub const fn code(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::NoPeer => "no-peer",
            Self::MovesNever => "moves-never",
            Self::TooShort => "too-short",
            Self::BrokerAbsent => "broker-absent",
            Self::RawCalls => "raw-calls",
            Self::Shared => "shared",
            Self::Option => "socket-option",
            Self::Passed => "passed",
            Self::Exec => "exec",
            Self::Corrupt => "corrupt",
            Self::Refused => "refused",
            Self::Ambiguous => "ambiguous",
            Self::PeerOnTcp => "peer-on-tcp",
            Self::Resources => "resources",
            Self::NotTaken => "not-taken",
            Self::Told => "told",
            Self::LinkLost => "link-lost",
            Self::ProgramNotListed => "program-not-listed",
            Self::NoWindow => "no-window",
        }
    }
}
