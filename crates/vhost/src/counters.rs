//! Counters of a port.

/// Counted since the port was added. Directions are the port's own: `sent` went into the switch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct PortCounters {
    /// Frames that its guest has sent.
    pub sent: u64,
    /// Their bytes.
    pub sent_bytes: u64,
    /// Frames that its guest was given.
    pub received: u64,
    /// Their bytes.
    pub received_bytes: u64,
    /// Frames for it that found no buffer.
    pub no_buffers: u64,
    /// Frames for it while no driver was there.
    pub unplugged: u64,
    /// Its frames whose source it may not use.
    pub spoofed: u64,
    /// Its flooded frames beyond the limit.
    pub flood_limited: u64,
    /// Its frames that were none, or whose header contradicted them.
    pub malformed: u64,
    /// Times that its frames waited for a receiver.
    pub held: u64,
    /// Times that its driver or front end broke the rules.
    pub broken: u64,
}
