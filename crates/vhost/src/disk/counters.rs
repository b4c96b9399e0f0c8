//! The counters of a disk's requests.

/// Counters of a disk since its back end started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct DiskCounters {
    /// Reads that were done.
    pub reads: u64,
    /// Their bytes.
    pub read_bytes: u64,
    /// Writes that were done.
    pub writes: u64,
    /// Their bytes.
    pub written_bytes: u64,
    /// Flushes that were done.
    pub flushes: u64,
    /// Ranges that were discarded or filled with zeroes.
    pub ranges: u64,
    /// Requests that the file or device failed.
    pub failed: u64,
    /// Requests that were not done: beyond the end, misaligned, unknown.
    pub refused: u64,
    /// Requests that an earlier back end had taken and not completed.
    pub recovered: u64,
    /// Bytes that the back end has copied: none of a file, and each byte of an imported disk once.
    #[serde(default)]
    pub copied_bytes: u64,
    /// Queues and connections that broke the rules.
    pub broken: u64,
}
