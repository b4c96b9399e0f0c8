//! Groups that share buffers (protocol J).

/// Passes these rows of the table, behind those that it was given, to the first macro of the list.
macro_rules! groups {
    ($next:ident $(, $later:ident)*; $($rows:tt)*) => { $next! { $($later),*; $($rows)*
    /// Client: this process takes part in a group, as the member that its domain or machine is (protocol J3). Once per session,
    /// and for as long as it lasts.
    40 JoinGroup {
        /// Bytes that it wants for buffers; `u64::MAX`: a quarter of what its member has.
        room: u64,
        /// Whether it brings the memory of its seat, as it must in a group of the host alone.
        memory: bool,
        /// The name of the group.
        group: String,
    }
    /// Broker: the answer to `JoinGroup`.
    41 GroupJoined {
        /// Number of the seat, never used twice.
        key: u64,
        /// Its place among the seats of the group.
        seat: u8,
        /// The number of this member.
        member: u8,
        /// Members there are.
        members: u8,
        /// Where in the member's window the seat begins.
        base: u64,
        /// Bytes of it.
        size: u64,
    }
    /// Client, after `JoinGroup`: show me the window of this member.
    42 GroupWindow {
        /// The member whose window is asked for.
        member: u8,
    }
    /// Broker: the answer to `GroupWindow`. Brings the window.
    43 GroupWindowIs {
        /// The number of this window among the windows that the member has had.
        life: u32,
        /// The address at which every member maps it.
        address: u64,
        /// The size of the window in bytes, including its header.
        size: u64,
        /// Whether it is the asking process's own member's.
        own: bool,
        /// Name of the member.
        name: String,
    }
    /// Broker, unasked, to all who take part: a seat was taken, or its holder is gone. Also the answer to `FetchSeat`.
    44 SeatIs {
        /// The number of the seat.
        key: u64,
        /// Its place among the seats of the group.
        seat: u8,
        /// The member that the seat belongs to.
        member: u8,
        /// The number of the member's window that the seat lies in.
        life: u32,
        /// Whether a process holds the seat.
        alive: bool,
        /// Whether its memory comes with this.
        memory: bool,
        /// Where in the window it begins.
        base: u64,
        /// Bytes of it.
        size: u64,
    }
    /// Client, after `JoinGroup`: send me this seat, with its memory, which this process could not receive or map. Answered by
    /// `SeatIs`.
    57 FetchSeat {
        /// The number of the seat.
        key: u64,
    }
    /// Client: I have seen that this seat's process is gone, and read nothing of it any more. No answer.
    45 LetGo {
        /// The number of the seat.
        key: u64,
    }
    /// Client of the host, after `JoinGroup`: where does this machine have the window of this member? Answered by `GroupPlaceIs`.
    77 GroupPlace {
        /// The member whose window is asked for.
        member: u8,
        /// The name of the machine, which is a member as well.
        machine: String,
    }
    /// Broker: the answer to `GroupPlace`.
    78 GroupPlaceIs {
        /// The number of this window among the windows that the member has had.
        life: u32,
        /// The address at which every member maps it.
        address: u64,
        /// The size of the window in bytes, including its header.
        size: u64,
        /// The machine's physical address of the window's header.
        place: u64,
        /// Whether the member is a domain of the host.
        host: bool,
    }
    /// Broker: the answer to `List`.
    46 Groups {
        /// The rows, one for each member of each group.
        page: Page<GroupRow>,
    }
    } };
}
pub(super) use groups;
