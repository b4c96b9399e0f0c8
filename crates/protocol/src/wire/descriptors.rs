//! The descriptors that travel beside a message (protocol C6).

use super::{BellWay, Message};

impl Message {
    /// How many descriptors travel with it.
    pub fn fd_count(&self) -> usize {
        match self {
            Self::Connected { links, .. } => usize::from(*links),
            Self::Bell { way, region, .. } => {
                let events = if *way == BellWay::Interrupts { 2 } else { 0 };
                1 + events + usize::from(region.is_in_window())
            }
            Self::Incoming { directions, .. } => 1 + directions.count(),
            Self::Connect { .. }
            | Self::ConnectFor { .. }
            | Self::Accepted { .. }
            | Self::Attached { .. }
            | Self::Grow { .. }
            | Self::Ring { .. }
            | Self::AddRegion { .. }
            | Self::RegionAdded { .. }
            | Self::Reclaim { .. }
            | Self::DirectoryIs { .. }
            | Self::Publish { .. }
            | Self::RoomIs { .. }
            | Self::DatagramsTaken { .. }
            | Self::Receiver { .. }
            | Self::Confirm { .. }
            | Self::Finish { .. }
            | Self::PeerIs { .. }
            | Self::GroupWindowIs { .. } => 1,
            Self::Offer { .. }
            | Self::Take { .. }
            | Self::OfferDatagrams { .. }
            | Self::TakeDatagrams { .. }
            | Self::ReclaimSocket { .. } => 2,
            Self::Regions { connecting, accepting } => usize::from(*connecting) + usize::from(*accepting),
            Self::JoinGroup { memory, .. } | Self::SeatIs { memory, .. } => usize::from(*memory),
            _ => 0,
        }
    }

    /// Whether the first of its descriptors is a socket of the program's, to be looked at and closed at once (protocol T3.2).
    pub fn brings_socket(&self) -> bool {
        self.shows_connection()
            || matches!(self, Self::Publish { .. } | Self::OfferDatagrams { .. } | Self::TakeDatagrams { .. })
    }

    /// Whether this message shows a connection, of which the sequence numbers are read: no thread of the client may be inside a system call on it
    /// meanwhile (protocol T3.3).
    pub fn shows_connection(&self) -> bool {
        self.is_step_of_handshake() || matches!(self, Self::ReclaimSocket { .. })
    }

    /// Whether this message is one of the four by which a connection gets its rings (protocol T4).
    pub fn is_step_of_handshake(&self) -> bool {
        matches!(self, Self::Offer { .. } | Self::Take { .. } | Self::Confirm { .. } | Self::Finish { .. })
    }
}
