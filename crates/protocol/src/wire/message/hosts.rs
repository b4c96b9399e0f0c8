//! Connections between hosts, by their gateways (protocol H).

/// Passes these rows of the table, behind those that it was given, to the first macro of the list.
macro_rules! hosts {
    ($next:ident $(, $later:ident)*; $($rows:tt)*) => { $next! { $($later),*; $($rows)*
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
        /// The number of the claim, from its row in `Names`.
        claim: u64,
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
    } };
}
pub(super) use hosts;
