//! Who is on the other side.

/// The other side of a channel, as the broker vouches for it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct PeerInfo {
    /// Name of its domain.
    pub name: String,
    /// Id of its domain.
    pub domain_id: u32,
    /// Its domain's epoch: a restarted domain has another.
    pub epoch: u64,
    /// The user of its process, as the kernel told the broker; `None` on the connecting side.
    pub uid: Option<u32>,
    /// Its process at the time of connecting, likewise.
    pub pid: Option<u32>,
    /// The service.
    pub service: String,
}
