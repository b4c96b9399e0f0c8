//! The numbers by which the core's records name one another. A record has the numbers of others, and not the others themselves.

/// Number of a domain.
pub(super) type DomainId = u32;

/// Number of a channel.
pub(super) type ChannelId = u64;

/// Number of a service that is bound.
pub(super) type ServiceKey = u64;

/// Number of a session; the event loop never uses one twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId(pub u64);
