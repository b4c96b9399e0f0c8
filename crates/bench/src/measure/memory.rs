//! The use of resources by a process: descriptors, mappings and memory.

use std::fs;

/// A count of what this process and the machine hold now.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Holdings {
    /// Open descriptors.
    pub(super) fds: u64,
    /// Mappings.
    pub(super) mappings: u64,
    /// Bytes mapped and present, each shared page divided among those who map it.
    pub(super) bytes: u64,
    /// Bytes that the machine cannot give to others.
    pub(super) machine: u64,
}

impl Holdings {
    /// Looks now.
    pub(super) fn now() -> Self {
        Self {
            fds: descriptors(std::process::id()).unwrap_or(0),
            mappings: fs::read_to_string("/proc/self/maps").map_or(0, |maps| maps.lines().count() as u64),
            bytes: kib("/proc/self/smaps_rollup", "Pss:").unwrap_or(0) << 10,
            machine: kib("/proc/meminfo", "MemTotal:")
                .zip(kib("/proc/meminfo", "MemAvailable:"))
                .map_or(0, |(all, free)| (all - free) << 10),
        }
    }

    /// The growth since an earlier reading, per one of `count`.
    pub(super) fn per(self, earlier: Self, count: u64) -> [f64; 4] {
        let each = |now: u64, then: u64| now.saturating_sub(then) as f64 / count.max(1) as f64;
        [
            each(self.fds, earlier.fds),
            each(self.mappings, earlier.mappings),
            each(self.bytes, earlier.bytes),
            each(self.machine, earlier.machine),
        ]
    }
}

/// Open descriptors of a process.
pub(super) fn descriptors(pid: u32) -> Option<u64> {
    Some(fs::read_dir(format!("/proc/{pid}/fd")).ok()?.count() as u64)
}

fn kib(path: &str, field: &str) -> Option<u64> {
    let text = fs::read_to_string(path).ok()?;
    text.lines().find(|line| line.starts_with(field))?.split_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holdings_count_descriptors_mappings_and_bytes() {
        let now = Holdings::now();
        assert!(now.fds >= 3 && now.mappings > 5 && now.bytes > 0 && now.machine > 0);
        let more = Holdings { fds: now.fds + 20, ..now };
        assert_eq!(more.per(now, 10)[0], 2.0);
        assert!(descriptors(u32::MAX).is_none());
    }
}
