//! Channels between domains: services, connections, rings that grow, and further regions (protocol C, A and F).

/// Passes these rows of the table, behind those that it was given, to the first macro of the list.
macro_rules! channels {
    ($next:ident $(, $later:ident)*; $($rows:tt)*) => { $next! { $($later),*; $($rows)*
    /// Client: offer a service.
    4 Bind {
        /// The name of the service.
        service: String,
        /// The kind of its channels.
        kind: Kind,
        /// How many connections may wait.
        backlog: u16,
    }
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
    } };
}
pub(super) use channels;
