//! Sessions: joining, answers, listing, events and the policy (protocol C).

/// Passes these rows of the table, behind those that it was given, to the first macro of the list.
macro_rules! sessions {
    ($next:ident $(, $later:ident)*; $($rows:tt)*) => { $next! { $($later),*; $($rows)*
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
    /// Broker: yes. Answers `Bind`, `Accepted`, `Grow`, `TakeRegions`, `AddRegion`, `Reclaim`, `ReclaimRegion`, `ReclaimSocket`, `Ping`, `Withdraw`, `Cancel`, `TakePassed`, `RemoveMachine` and `ReleaseMachine`.
    5 Done {}
    /// Client: are you there?
    17 Ping {}
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
    } };
}
pub(super) use sessions;
