//! Huge pages for a test. The kernel's pool of them belongs to the whole machine.

use super::process::role;
use std::fs::{self, File};
use std::io::Write as _;
use std::path::Path;

const POOL: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB";

/// Huge pages that are free. The process that has made this has added what was missing, and its drop gives that back. So that it does so even if
/// the test aborts, the test itself runs in another process (`alone`).
pub(crate) struct HugePages {
    /// The size of the pool before, if this process has changed it.
    before: Option<u64>,
    /// Held by one test of the machine at a time, in whatever program. `None` in the process in which a test runs alone.
    _turn: Option<File>,
}

impl HugePages {
    /// At least `pages` huge pages that are free. `None`, reported on standard error, where there are fewer and this process cannot add any.
    pub(crate) fn get(test: &str, pages: u64) -> Option<Self> {
        if role().is_some() {
            return Some(Self { before: None, _turn: None });
        }
        // A machine without such pages has none free either.
        let turn = File::open(Path::new(POOL).join("nr_hugepages")).ok();
        turn.iter().for_each(|turn| rustix::fs::flock(turn, rustix::fs::FlockOperation::LockExclusive).unwrap());
        let mut this = Self { before: None, _turn: turn };
        if free() < pages {
            let size = number("nr_hugepages");
            this.before = Some(size);
            // Refused without the right to do so; without memory in one piece, the pool grows by fewer.
            let _ = fs::write(Path::new(POOL).join("nr_hugepages"), (size + pages - free()).to_string());
        }
        if free() >= pages {
            return Some(this);
        }
        // Past the harness, which captures what tests print.
        let _ = writeln!(
            std::io::stderr(),
            "NOT TESTED: {test}: fewer than {pages} huge pages are free, and this process cannot add them (as root: \
             `sysctl -w vm.nr_hugepages=64`)"
        );
        None
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            let _ = fs::write(Path::new(POOL).join("nr_hugepages"), before.to_string());
        }
    }
}

/// Huge pages that nobody has.
pub(crate) fn free() -> u64 {
    number("free_hugepages")
}

fn number(file: &str) -> u64 {
    fs::read_to_string(Path::new(POOL).join(file)).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}
