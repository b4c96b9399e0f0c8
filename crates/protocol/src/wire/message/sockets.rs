//! Connections of sockets: the directory, offers, the move rules, and connections that are passed on (protocol T).

/// Passes these rows of the table, behind those that it was given, to the first macro of the list.
macro_rules! sockets {
    ($next:ident $(, $later:ident)*; $($rows:tt)*) => { $next! { $($later),*; $($rows)*
    /// Client: give me the directory (protocol T1).
    19 Directory {}
    /// Broker: answers `Directory`. Brings its memory, to be mapped read-only.
    20 DirectoryIs {
        /// Where it begins in that memory: 0 on the host, and in a virtual machine a place in the window from the host (T1.6).
        base: u64,
        /// Bytes of it.
        size: u64,
    }
    /// Client: I listen on this socket; or, if it does not listen, I run where these are my addresses (protocol T2). Brings the
    /// socket.
    21 Publish {
        /// Addresses of this network namespace: what a wildcard stands for.
        addresses: AddressList,
    }
    /// Broker: the answer to `Publish`.
    22 Published {
        /// The key that identifies it in `Withdraw`.
        key: u64,
        /// The key of the socket's network namespace for fingerprints of offers (protocol T1), its first half.
        secret_low: u64,
        /// The second half.
        secret_high: u64,
    }
    /// Client: takes a `Publish` back.
    23 Withdraw {
        /// As in `Published`.
        key: u64,
    }
    /// Client: the process that has the other end of this connection may have it on a ring (protocol T4). Brings the connected
    /// socket and the memory of the client's region. Answered by `Bell`.
    24 Offer {
        /// The offering side's region, in separate memory.
        region: RegionReference,
    }
    /// Broker: the answer to `Offer` and `Take`. Brings this side's end of the bell. By [`BellWay::Interrupts`], two events follow: one that is
    /// signalled when the other side rings, and one to signal in place of the link (protocol I7). If the region is in a window, the window
    /// follows.
    51 Bell {
        /// The number that identifies it in `Confirm`, `Finish` and `Cancel`. It becomes the number of the channel.
        offer: u64,
        /// How this side rings and is rung.
        way: BellWay,
        /// This side's region as the other side will get it, which the client has to make now: of the memory that was shown, or at this place of a
        /// window, because the other side is on another machine (protocol T4.8).
        region: RegionReference,
    }
    /// Client: I have the other end of a connection that is offered (protocol T4). Brings that socket, and the memory of the client's region.
    /// Answered by `Bell`.
    27 Take {
        /// The taking side's region, in separate memory.
        region: RegionReference,
    }
    /// Client, the offering side, when its bell has rung: here is the socket of that offer once more (protocol T4). Brings it.
    52 Confirm {
        /// As in `Bell`.
        offer: u64,
    }
    /// Client, the accepting side, when its bell has rung: here is the socket of that take once more (protocol T4). Brings it.
    53 Finish {
        /// As in `Bell`.
        offer: u64,
    }
    /// Broker: the answer to `Confirm` and `Finish`. Brings the region of the other side.
    54 PeerIs {
        /// Where the peer's region is.
        region: RegionReference,
        /// The number of the domain that the peer's socket belongs to. No other domain has it, on any machine and under any broker. Processes of
        /// one domain trust each other.
        program: u64,
        /// The user that the program counts as.
        user: User,
        /// Name of its domain.
        name: String,
    }
    /// Client: ends an `Offer` or a `Take` that is not a channel yet, and gives back the place in a window that came with it. Refused if it is
    /// a channel. `Closed` does the same without an answer.
    26 Cancel {
        /// As in `Bell` or `Offered`.
        offer: u64,
    }
    /// Client: after the broker came again, this connection is a channel that I hold an end of (protocol T14). Brings the socket,
    /// and this side's region.
    47 ReclaimSocket {
        /// Number of the channel.
        channel: u64,
        /// The side that the client has.
        side: Side,
        /// Where the client's region is.
        region: RegionReference,
    }
    /// Client, an administrator: other move rules hold until the policy file is loaded again.
    29 SetMoveRules {
        /// Go back to what the policy file says; the other fields mean nothing then.
        reset: bool,
        /// Clauses, separated by spaces (see `protocol::upgrade`); of those that fit a connection, the last decides.
        clauses: Text,
        /// Bytes of the rings; 0 leaves them as they are.
        ring_size: u64,
        /// Longest time to spin, in microseconds; `u32::MAX` leaves it as it is.
        spin_us: u32,
    }
    /// Client: which move rules hold?
    30 GetMoveRules {}
    /// Broker: answers `SetMoveRules` and `GetMoveRules`.
    31 MoveRulesAre {
        /// They are not the policy file's, but an administrator's.
        live: bool,
        /// Its clauses, the first of them for all connections.
        clauses: Text,
        /// Bytes of the rings.
        ring_size: u64,
        /// Longest time to spin, in microseconds.
        spin_us: u32,
    }
    /// Client: I have passed this connection to another process once, no other process held it, and I have closed it (protocol T13.15). No
    /// answer.
    79 Passed {
        /// The cookie of the connection's socket.
        socket: u64,
        /// The cookie of the UNIX socket by which the receiver gets it.
        carrier: u64,
        /// The side that the connection's end is.
        side: Side,
        /// How often the connection has had rings.
        rings: u32,
    }
    /// Client: am I the only process that holds this connection, which I have received by that UNIX socket? Answered by `PassedIs`, or by
    /// `Done` if no process has said so.
    80 TakePassed {
        /// The cookie of the connection's socket.
        socket: u64,
        /// The cookie of the UNIX socket by which it came.
        carrier: u64,
    }
    /// Broker: the answer to `TakePassed`.
    81 PassedIs {
        /// The side that the connection's end is.
        side: Side,
        /// How often the connection has had rings.
        rings: u32,
    }
    /// Agent: the socket of `Offer`, `Take`, `Confirm` or `Finish` is read, and the answer follows (protocol T3.12).
    82 SocketRead {}
    } };
}
pub(super) use sockets;
