//! The table of messages (protocol C6): each kind once, with its fields in the order of the wire.
//!
//! Everything that a number or a field's place decides comes from this table: [`Message`], [`BorrowedMessage`], their encoders, the
//! decoder, and the spelling that a test compares with docs/protocol.md.

use alloc::string::String;

use super::declare::messages;
use super::{
    AddressList, BellWay, ChannelRow, Directions, DomainRow, EventRow, GroupRow, Kind, MachineRow, NameRow, Page,
    PolicyQuestion, Refusal, RegionReference, ServiceRow, Side, Text, User, What,
};

messages! {
    /// Client: the first message of a session.
    1 Join {
        /// [`VERSION`](super::VERSION) of the client.
        version: u16,
        /// The domain it wants to be.
        name: String,
    }
    /// Broker: the answer to `Join`.
    2 Joined {
        /// Id of the domain.
        domain: u32,
        /// The incarnation of the domain.
        epoch: u64,
        /// The broker's incarnation.
        instance: u64,
        /// Largest ring in bytes that the domain may bring.
        max_ring: u64,
        /// Most ends of channels that the domain may hold.
        max_channels: u32,
        /// The user that the client's program counts as.
        user: User,
        /// Name of the domain.
        name: String,
    }
    /// Broker: no. Answers any message; many end the session, which the client sees as the end of the socket.
    3 Refused {
        /// Why, for programs.
        code: Refusal,
        /// Why, for people.
        reason: String,
    }
    /// Client: offer a service.
    4 Bind {
        /// The name of the service.
        service: String,
        /// The kind of its channels.
        kind: Kind,
        /// How many connections may wait.
        backlog: u16,
    }
    /// Broker: yes. Answers `Bind`, `Accepted`, `Grow`, `TakeRegions`, `AddRegion`, `Reclaim`, `ReclaimRegion`, `ReclaimSocket`, `Ping`, `Withdraw`, `Cancel`, `TakePassed`, `RemoveMachine` and `ReleaseMachine`.
    5 Done {}
    /// Client: make a channel. Brings its region; to another machine, also one link end for each direction, forward first.
    6 Connect {
        /// The domain to connect to.
        target: String,
        /// The service there.
        service: String,
        /// The kind of the channel.
        kind: Kind,
        /// The directions that the channel has.
        directions: Directions,
        /// Where the connecting side's region is.
        region: RegionReference,
    }
    /// Broker: the answer to `Connect`; the connection waits in the listener's backlog. Brings the connecting side's end of each link,
    /// forward first; none to another machine, where the client brought them.
    7 Connected {
        /// Number of the channel.
        channel: u64,
        /// Id of the accepting domain.
        domain: u32,
        /// The incarnation of the listener's domain.
        epoch: u64,
        /// How many link ends come with it.
        links: u8,
    }
    /// Broker: a connection for a listener. Brings the region of its `Connect`, and the accepting side's end of each link.
    8 Incoming {
        /// Number of the channel.
        channel: u64,
        /// Id of the connecting domain.
        domain: u32,
        /// The incarnation of the connecting domain.
        epoch: u64,
        /// The name of the connecting domain.
        name: String,
        /// The user that the connecting process counts as.
        user: User,
        /// The connecting process.
        pid: u32,
        /// Whether `user` is known without doubt: a machine, or a user of the host whose process runs where the broker does (C3.1). In a
        /// container a uid may be another user's.
        at_home: bool,
        /// The kind of the channel.
        kind: Kind,
        /// The directions that the channel has.
        directions: Directions,
        /// Where the connecting side's region is.
        region: RegionReference,
    }
    /// Client: the listener took an `Incoming`; brings its own region. Answered by `Done` once the connecting side has been sent
    /// `Attached`.
    9 Accepted {
        /// Number of the channel.
        channel: u64,
        /// The byte of the stream at which the connecting side begins to read: 0 except for broadcast (protocol B1).
        start: u64,
        /// Where the accepting side's region is.
        region: RegionReference,
    }
    /// Client: this side no longer holds the channel, or does not want the `Incoming`. No answer.
    10 Closed {
        /// Number of the channel.
        channel: u64,
    }
    /// Client: what is there?
    11 List {
        /// The kind of rows to list.
        what: What,
        /// Only rows whose key is greater.
        after: u64,
    }
    /// Broker: answers `List`.
    12 Domains {
        /// The domains of this page.
        page: Page<DomainRow>,
    }
    /// Broker: answers `List`.
    13 Services {
        /// The services of this page.
        page: Page<ServiceRow>,
    }
    /// Broker: answers `List`.
    14 Channels {
        /// The channels of this page.
        page: Page<ChannelRow>,
    }
    /// Client: show me the regions of a channel.
    15 Inspect {
        /// Number of the channel.
        channel: u64,
    }
    /// Broker: answers `Inspect`. Brings the endpoint regions it knows, the connecting side's first.
    16 Regions {
        /// Whether that of the connecting side is among them.
        connecting: bool,
        /// Whether that of the accepting side is.
        accepting: bool,
    }
    /// Client: are you there?
    17 Ping {}
    /// Client: after the broker came again, this is a channel that I hold. Brings this side's region.
    18 Reclaim {
        /// Number of the channel.
        channel: u64,
        /// The side that the client has.
        side: Side,
        /// Name of the domain on the other side.
        peer: String,
        /// Name of the service.
        service: String,
        /// The kind of the channel.
        kind: Kind,
        /// The directions that the channel has.
        directions: Directions,
        /// Where the client's region is.
        region: RegionReference,
    }
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
    /// Broker: the answer to `OfferDatagrams`.
    25 Offered {
        /// The number that identifies it in `Cancel`. It becomes the number of the channel once the offer is taken.
        offer: u64,
    }
    /// Client: ends an `Offer` or a `Take` that is not a channel yet, and gives back the place in a window that came with it. Refused if it is
    /// a channel. `Closed` does the same without an answer.
    26 Cancel {
        /// As in `Bell` or `Offered`.
        offer: u64,
    }
    /// Client: I have the other end of a connection that is offered (protocol T4). Brings that socket, and the memory of the client's region.
    /// Answered by `Bell`.
    27 Take {
        /// The taking side's region, in separate memory.
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
    /// Client: what would the policy decide (protocol C17)? Answered by `PolicyDecides`.
    58 TestPolicy {
        /// The request that the policy would decide.
        question: PolicyQuestion,
        /// Whether the question is about the client itself. `user` and `gid` mean nothing then.
        own: bool,
        /// The user who would join as `from`.
        user: User,
        /// Its primary group; `u32::MAX` if that is not known.
        gid: u32,
        /// The socket of the other side would be the client's too; `to_user` means nothing then.
        to_own: bool,
        /// The user whose socket would be the other side.
        to_user: User,
        /// The domain to join as, and to connect from.
        from: String,
        /// The domain to connect to.
        to: String,
        /// The service there.
        service: String,
    }
    /// Broker: the answer to `TestPolicy`.
    59 PolicyDecides {
        /// Whether the request would be allowed.
        allowed: bool,
        /// Where in the file the clause is; 0 for a default.
        line: u32,
        /// The clause, for people.
        grounds: String,
        /// The policy file; empty without one.
        file: String,
    }
    /// Client: a place for my region in the window towards a domain on another machine (protocol G4).
    32 Room {
        /// The channel that is being accepted; 0 before connecting.
        channel: u64,
        /// Bytes of the region.
        size: u64,
        /// The domain on the other side.
        peer: String,
    }
    /// Broker: the answer to `Room`. Brings the window.
    33 RoomIs {
        /// Where in the window the region is to begin.
        base: u64,
        /// Bytes of the region, as many as were asked for.
        size: u64,
    }
    /// Client, an administrator: this virtual machine belongs to us (protocol G1).
    34 AddMachine {
        /// Bytes that regions can have in each of its windows.
        room: u64,
        /// Only with devices that a live migration allows.
        migratable: bool,
        /// The name of the machine.
        name: String,
        /// The path of its monitor.
        monitor: String,
        /// The path of the host's end of its serial port.
        port: String,
    }
    /// Broker: the answer to `AddMachine`.
    35 MachineAdded {
        /// The number of the machine.
        machine: u32,
        /// Windows that were plugged into it now.
        plugged: u32,
        /// Microseconds that the host took for them.
        took_us: u64,
        /// A remark about a degraded state; empty if there is none.
        remark: Text,
    }
    /// Client, an administrator: it no longer does.
    36 RemoveMachine {
        /// The name of the machine.
        name: String,
    }
    /// Broker: the answer to `List`.
    37 Machines {
        /// The machines of this page.
        page: Page<MachineRow>,
    }
    /// Client: what this socket sends to an address may reach its receiver by a ring (protocol U3). Brings the socket and its
    /// region. Answered by `Offered`, or by `RoomIs` (protocol U14.4).
    38 OfferDatagrams {
        /// Upper half of the address, in 128 bits as IPv6 sees it.
        to_high: u64,
        /// Lower half.
        to_low: u64,
        /// The port of the receiver.
        to_port: u16,
        /// Where the sender's region is.
        region: RegionReference,
    }
    /// Client: this socket has received a datagram from that address, whose sender offers a ring (protocol U4). Brings the
    /// socket, and its region, which has no ring. Answered by `DatagramsTaken`, or by `RoomIs` (protocol U14.4).
    39 TakeDatagrams {
        /// Upper half of the address that the kernel has said it is from.
        from_high: u64,
        /// Lower half.
        from_low: u64,
        /// The port of the sender.
        from_port: u16,
        /// Where the receiver's region is.
        region: RegionReference,
    }
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
    /// Broker: the answer to `List`.
    46 Groups {
        /// The rows, one for each member of each group.
        page: Page<GroupRow>,
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
    /// Broker: the answer to `TakeDatagrams`. Brings the sender's region.
    48 DatagramsTaken {
        /// Number of the flow.
        flow: u64,
        /// The sender's region.
        region: RegionReference,
    }
    /// Client: the directory says that my offer of a flow was taken; asks for the receiver's region (protocol U4). Once for each flow.
    49 FetchReceiver {
        /// Number of the flow, as in `Offered`.
        flow: u64,
    }
    /// Broker: the answer to `FetchReceiver`. Brings the receiver's region, which has no ring.
    50 Receiver {
        /// Where the receiver's region is.
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
    /// Broker, unasked: the accepting side's region of a channel that this client has connected (protocol A1).
    55 Attached {
        /// Number of the channel.
        channel: u64,
        /// The byte of the stream at which to begin to read.
        start: u64,
        /// Where the accepting side's region is.
        region: RegionReference,
    }
    /// Client: a ring to go on in (protocol A2). Brings its region. Answered by `Done` once the other side has been sent `Ring`.
    56 Grow {
        /// Number of the channel.
        channel: u64,
        /// The side that the client has.
        side: Side,
        /// Number of the ring on its side.
        generation: u32,
        /// Where the new ring's region is.
        region: RegionReference,
    }
    /// Broker, unasked: the next ring of the other side (protocol A2). Brings its region.
    28 Ring {
        /// Number of the channel.
        channel: u64,
        /// The side that the ring belongs to.
        side: Side,
        /// Number of the ring on its side.
        generation: u32,
        /// Where the new ring's region is.
        region: RegionReference,
    }
    /// Client: this side of the channel takes further regions of a kind (protocol F2). Answered by `Done`.
    60 TakeRegions {
        /// Number of the channel.
        channel: u64,
        /// The side that the client has.
        side: Side,
        /// The kind that the two programs have agreed on.
        kind: u32,
        /// Most regions of that kind at a time; 0 takes none any more.
        count: u8,
        /// Most bytes of them together.
        bytes: u64,
    }
    /// Client: a further region of this side for the other (protocol F3). Brings it. Answered by `Done` once the other side has been sent
    /// `RegionAdded`.
    61 AddRegion {
        /// Number of the channel.
        channel: u64,
        /// The side that the client has.
        side: Side,
        /// Number of the region on its side.
        number: u32,
        /// The kind that the two programs have agreed on.
        kind: u32,
        /// Where the region is.
        region: RegionReference,
    }
    /// Broker, unasked: a further region of the other side. Brings it.
    62 RegionAdded {
        /// Number of the channel.
        channel: u64,
        /// The side that the region belongs to.
        side: Side,
        /// Number of the region on its side.
        number: u32,
        /// The kind that the two programs have agreed on.
        kind: u32,
        /// Where the region is.
        region: RegionReference,
    }
    /// Client: this side has given up a further region (protocol F5). No answer.
    63 DropRegion {
        /// Number of the channel.
        channel: u64,
        /// The side that the client has.
        side: Side,
        /// Whether the region is this side's. Otherwise it is the other side's.
        own: bool,
        /// Number of the region on its owner's side.
        number: u32,
    }
    /// Client: which events have there been since? Answered by `Events`, the first time at once, and from then on as soon as there are some
    /// (protocol C18).
    64 FollowEvents {
        /// The number of the last event that the client has; 0 at the beginning.
        after: u64,
    }
    /// Broker: the answer to `FollowEvents`.
    65 Events {
        /// Events that were dropped because the client did not ask in time, since it began to follow.
        lost: u64,
        /// The events, and whether more wait.
        page: Page<EventRow>,
    }
    /// Client, an administrator: this machine is to be migrated, so it gives up its windows (protocol G7). Answered by `Done` once it
    /// has.
    66 ReleaseMachine {
        /// The name of the machine.
        name: String,
    }
    /// Client, an administrator: a released machine stays here after all. Answered by `MachineAdded`.
    67 ResumeMachine {
        /// The name of the machine.
        name: String,
    }
    /// Client, after `Reclaim`: a further region that the side still has since an earlier broker (protocol F6). Answered by `Done`.
    68 ReclaimRegion {
        /// Number of the channel.
        channel: u64,
        /// The side that the client has.
        side: Side,
        /// Whether the region is this side's. Otherwise it is the other side's.
        own: bool,
        /// Number of the region on its owner's side.
        number: u32,
        /// The kind that the two programs have agreed on.
        kind: u32,
        /// Bytes of its content.
        bytes: u64,
    }
    /// Client, the gateway: which names of this host have changed since (protocol H2)? Answered by `Names`, the first time at once, and from
    /// then on as soon as some have.
    69 FollowNames {
        /// The key of the last row that the gateway has; 0 at the beginning.
        after: u64,
    }
    /// Broker: the answer to `FollowNames`.
    70 Names {
        /// The name of this host in the cluster.
        host: String,
        /// The names, and whether more wait.
        page: Page<NameRow>,
    }
    /// Client, the gateway: the cluster has decided about a name that this host claims (protocol H3). Answered by `Done`.
    71 NameClaimed {
        /// The domain.
        domain: String,
        /// The host that has the name; empty if this host may use it.
        holder: String,
    }
    /// Client, the gateway: where is this connection to go (protocol H4)? Answered by `RouteIs`.
    72 Route {
        /// Number of the channel.
        channel: u64,
    }
    /// Broker: the answer to `Route`.
    73 RouteIs {
        /// The domain that the client wants.
        domain: String,
        /// The service there.
        service: String,
    }
    /// Client, the gateway: the domain is on this host (protocol H4). Answered by `Done` if the policy lets the client connect to it there.
    74 RouteTo {
        /// Number of the channel.
        channel: u64,
        /// The name of the other host.
        host: String,
    }
    /// Client, the gateway: the connection cannot be made (protocol H4). Answered by `Done` once the connecting side has been refused.
    75 RefuseRoute {
        /// Number of the channel.
        channel: u64,
        /// Why, for programs.
        code: Refusal,
        /// Why, for people.
        reason: String,
    }
    /// Client, the gateway: connect to a service here for a domain of another host (protocol H5). Brings the gateway's region. Answered as
    /// `Connect`.
    76 ConnectFor {
        /// The domain on the other host, `@`, and the name of that host, which its gateway has proved.
        client: String,
        /// The domain to connect to.
        target: String,
        /// The service there.
        service: String,
        /// The kind of the channel.
        kind: Kind,
        /// The directions that the channel has.
        directions: Directions,
        /// Where the gateway's region is.
        region: RegionReference,
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
}
