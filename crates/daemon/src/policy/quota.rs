//! How much one domain may have.

use serde::Deserialize;

use super::size;

/// The quota of one domain, for the objects that it has at once.
///
/// The broker limits the regions that are shown to it. A ring that grows later (protocol A2) is made without the broker, is charged to
/// the process that makes it, and is bounded by the reader's own limit (A4).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Quota {
    /// Sessions, that is processes or threads that joined as it.
    pub sessions: u32,
    /// Services bound.
    pub services: u32,
    /// Ends of channels held, those that wait in a backlog included.
    pub channels: u32,
    /// Bytes of the rings that it brought to its channels.
    #[serde(deserialize_with = "size::bytes")]
    pub ring_bytes: u64,
    /// Bytes of the largest ring that it may bring.
    #[serde(deserialize_with = "size::bytes")]
    pub max_ring: u64,
    /// Entries in the directory: one for each address that a listening socket or a network namespace has.
    pub listeners: u32,
    /// Connections that it offers, and whose other end has not taken them yet.
    pub offers: u32,
}

impl Default for Quota {
    fn default() -> Self {
        Self {
            sessions: 4096,
            services: 1024,
            channels: 32768,
            ring_bytes: 64 << 30,
            max_ring: 1 << 30,
            listeners: 65536,
            offers: 1024,
        }
    }
}

/// The quantities that a join rule sets differently.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct QuotaChange {
    sessions: Option<u32>,
    services: Option<u32>,
    channels: Option<u32>,
    #[serde(deserialize_with = "size::some_bytes")]
    ring_bytes: Option<u64>,
    #[serde(deserialize_with = "size::some_bytes")]
    max_ring: Option<u64>,
    listeners: Option<u32>,
    offers: Option<u32>,
}

impl QuotaChange {
    pub(super) fn apply(self, base: Quota) -> Quota {
        Quota {
            sessions: self.sessions.unwrap_or(base.sessions),
            services: self.services.unwrap_or(base.services),
            channels: self.channels.unwrap_or(base.channels),
            ring_bytes: self.ring_bytes.unwrap_or(base.ring_bytes),
            max_ring: self.max_ring.unwrap_or(base.max_ring),
            listeners: self.listeners.unwrap_or(base.listeners),
            offers: self.offers.unwrap_or(base.offers),
        }
    }
}
