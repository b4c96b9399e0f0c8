//! How many descriptors there are, and what they are for.

use std::os::fd::AsFd;

use partywall_region::descriptors;
use rustix::process::{Resource, getrlimit};

use crate::core::Capacity;

/// Left to the listening socket, the logger, descriptors in flight, and the rest of the process.
const RESERVE: u64 = 64;

/// Raises the soft limit on descriptors to the hard one. Best effort: with the old limit the broker serves fewer clients.
pub(super) fn raise() {
    if let Err(error) = descriptors::raise_limit() {
        tracing::warn!(%error, "cannot raise the limit on open descriptors");
    }
}

/// Descriptors that the kernel's table of this process has room for from the beginning: 512 KiB of kernel memory.
const TABLE: u64 = 1 << 16;

/// Makes the kernel's table of descriptors large at once. A table that grows makes the thread that needs the descriptor wait until every
/// processor has left what it does in the kernel (`expand_files`, `synchronize_rcu`): 10 to 50 ms on busy processors, for the event loop.
/// Best effort: a table that is not large now grows later.
pub(super) fn make_table(any: impl AsFd) {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    // The table never shrinks.
    let last = limit.min(TABLE).saturating_sub(1);
    if let Err(error) = rustix::io::fcntl_dupfd_cloexec(any, last as i32) {
        tracing::debug!(%error, last, "the table of descriptors grows as it must");
    }
}

/// Entries of the directory, over all domains: more than its tables find room for, and still little memory.
const ENTRIES: usize = 1 << 18;

/// Descriptors of one offer: both regions, the accepting side's two bells, and a copy of what the offering side rings by.
const OF_AN_OFFER: usize = 5;

/// Shares the descriptors out: a third for sessions, half for the regions of channels, of which each has two, and the rest for
/// offers.
pub(super) fn capacity() -> Capacity {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    // No machine has more descriptors than this, and the core's tables should not promise more.
    let usable = limit.saturating_sub(RESERVE).min(1 << 24) as usize;
    let (sessions, regions) = (usable / 3, usable / 2);
    Capacity { sessions, regions, offers: (usable - sessions - regions) / OF_AN_OFFER, entries: ENTRIES }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_of_descriptors_is_large_before_it_is_needed() {
        raise();
        make_table(std::io::stdin());
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let size = status.lines().find_map(|line| line.strip_prefix("FDSize:")).unwrap().trim().parse::<u64>().unwrap();
        assert!(size >= getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX).min(TABLE), "{size}");
    }
}
