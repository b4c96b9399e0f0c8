//! Virtual machines as the operator's file names them.

use serde::Deserialize;

use super::size;

/// A machine that the broker attends to from the start on.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineEntry {
    /// The name of its programs' domains, or what these names begin with.
    pub name: String,
    /// The socket of its monitor (QMP).
    pub monitor: String,
    /// The socket of its serial port.
    pub port: String,
    /// Bytes of each of its windows, rounded up to a power of two, 8 MiB at least; 4 MiB of them hold no regions. 0 is the default size.
    #[serde(default, deserialize_with = "size::bytes")]
    pub room: u64,
    /// All its windows are `virtio-pmem`, and it has no doorbell device, so that it can be migrated.
    #[serde(default)]
    pub migratable: bool,
}
