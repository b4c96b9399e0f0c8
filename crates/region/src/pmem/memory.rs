//! The memory that this host can spare. If windows took more, the kernel would end other processes to make room.

/// Bytes that windows leave to others.
pub const SPARE: u64 = 32 << 20;

/// Bytes of memory that can be allocated without ending other processes, by the kernel's estimate; `None` if it gives none.
pub fn available() -> Option<u64> {
    let said = std::fs::read_to_string("/proc/meminfo").ok()?;
    Some(line(&said, "MemAvailable")?.saturating_add(line(&said, "SwapFree").unwrap_or(0)))
}

fn line(said: &str, name: &str) -> Option<u64> {
    let mut words = said.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?.split_whitespace();
    let number: u64 = words.next()?.parse().ok()?;
    (words.next() == Some("kB")).then(|| number.saturating_mul(1024))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_lines_are_parsed() {
        let said = "MemTotal:       24683512 kB\nMemFree:         1000 kB\nMemAvailable:   23549000 kB\nSwapFree:              7 kB\n";
        assert_eq!(line(said, "MemAvailable"), Some(23_549_000 * 1024));
        assert_eq!(line(said, "SwapFree"), Some(7 * 1024));
        assert_eq!(line(said, "Mem"), None);
        assert_eq!(line("MemAvailable: lots\n", "MemAvailable"), None);
        assert!(available().is_some_and(|bytes| bytes > 0));
    }
}
