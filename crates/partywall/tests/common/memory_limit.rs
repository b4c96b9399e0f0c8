//! A memory limit for processes of a test: a control group (version 1 or 2) of the test's own.

use super::process::role;
use std::cell::Cell;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The prefix of these control groups' names; they end with the number of the process that made them.
const PREFIX: &str = "partywall-";

/// A control group with a memory limit. Removed on drop, also when the test fails.
pub(crate) struct MemoryLimit {
    path: PathBuf,
    /// Whether this process made it. The process in which a test runs alone only uses it, so that it is removed even after an abort.
    made_here: bool,
    /// Huge pages were not limited in this hierarchy before, and are until the drop.
    limits_huge_pages: Cell<bool>,
}

impl MemoryLimit {
    /// A limit of `bytes` for the test. `None`, reported on standard error, where this process may not set one.
    pub(crate) fn of(test: &str, bytes: u64) -> Option<Self> {
        Self::made(test, |this| this.limit_memory(bytes))
    }

    /// A limit that leaves no huge pages to the test. `None`, reported on standard error, where this process may not set one.
    pub(crate) fn without_huge_pages(test: &str) -> Option<Self> {
        Self::made(test, |this| {
            let is_limited = |control| fs::read_to_string(control).is_ok_and(|names: String| names.contains("hugetlb"));
            if !is_limited(this.control()) && fs::write(this.control(), "+hugetlb").is_ok() {
                this.limits_huge_pages.set(true);
            }
            let version_2 = fs::write(this.path.join("hugetlb.2MB.max"), "0");
            version_2.or_else(|_| fs::write(this.path.join("hugetlb.2MB.limit_in_bytes"), "0"))
        })
    }

    fn made(test: &str, set: impl Fn(&Self) -> std::io::Result<()>) -> Option<Self> {
        let made_here = role().is_none();
        if made_here {
            remove_abandoned();
        }
        let maker = if made_here { std::process::id() } else { std::os::unix::process::parent_id() };
        let made = hierarchies().into_iter().find_map(|root| {
            let path = root.join(format!("{PREFIX}{test}-{maker}"));
            let this = Self { path, made_here, limits_huge_pages: Cell::new(false) };
            // A control group that was made here and has no limit is removed by the drop.
            let ready = if made_here {
                fs::create_dir(&this.path).and_then(|()| set(&this)).is_ok()
            } else {
                this.path.exists()
            };
            ready.then_some(this)
        });
        if made.is_none() {
            // Past the harness, which keeps what tests print to itself.
            let _ = writeln!(
                std::io::stderr(),
                "NOT TESTED: {test}: needs the right to make a control group with this limit (root, outside of a container)"
            );
        }
        made
    }

    /// A control group as it stays behind when the process that made it is killed. `None`, reported on standard error, where this process
    /// may not make one.
    pub(crate) fn abandoned(test: &str, maker: u32) -> Option<PathBuf> {
        let limit = Self::of(test, 1 << 30)?;
        let path = limit.path.with_file_name(format!("{PREFIX}{test}-{maker}"));
        fs::create_dir(&path).unwrap();
        Some(path)
    }

    fn limit_memory(&self, bytes: u64) -> std::io::Result<()> {
        let bytes = bytes.to_string();
        // Without swap, or a page that is too many would be swapped out. A kernel without swap accounting lacks these files.
        if fs::write(self.path.join("memory.max"), &bytes).is_ok() {
            let _ = fs::write(self.path.join("memory.swap.max"), "0");
        } else {
            fs::write(self.path.join("memory.limit_in_bytes"), &bytes)?;
            let _ = fs::write(self.path.join("memory.memsw.limit_in_bytes"), &bytes);
        }
        Ok(())
    }

    /// The file that says what control groups beside this one limit.
    fn control(&self) -> PathBuf {
        self.path.with_file_name("cgroup.subtree_control")
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Processes that the kernel has killed because of this limit.
    pub(crate) fn killed(&self) -> u64 {
        let read = |file: &str| fs::read_to_string(self.path.join(file));
        let counts = read("memory.events").or_else(|_| read("memory.oom_control")).unwrap();
        let count = counts.lines().find_map(|line| line.strip_prefix("oom_kill ")).expect("Linux 4.13 counts them");
        count.trim().parse().unwrap()
    }
}

impl Drop for MemoryLimit {
    fn drop(&mut self) {
        let start = Instant::now();
        // A process that was just killed is in it a moment longer.
        while self.made_here && self.path.exists() && fs::remove_dir(&self.path).is_err() {
            if start.elapsed() > Duration::from_secs(20) {
                let _ = writeln!(std::io::stderr(), "cannot remove {}", self.path.display());
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        if self.limits_huge_pages.get() {
            let _ = fs::write(self.control(), "-hugetlb");
        }
    }
}

/// Removes the control groups of tests that were killed. One whose processes have not ended yet stays for the next test.
fn remove_abandoned() {
    let entries = hierarchies().into_iter().filter_map(|root| fs::read_dir(root).ok()).flatten().flatten();
    for entry in entries {
        let name = entry.file_name();
        let maker = name.to_str().and_then(|name| name.strip_prefix(PREFIX)?.rsplit_once('-')?.1.parse::<u32>().ok());
        if maker.is_some_and(|maker| !Path::new(&format!("/proc/{maker}")).exists()) {
            let _ = fs::remove_dir(entry.path());
        }
    }
}

/// Puts this process under the limit at `path`. Earlier allocations do not count.
pub(crate) fn come_under(path: &Path) {
    fs::write(path.join("cgroup.procs"), "0").unwrap();
}

/// Where control groups that may limit memory or huge pages are mounted.
fn hierarchies() -> Vec<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let fields = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    let fits = |kind: &str, options: &str| {
        kind == "cgroup2" || kind == "cgroup" && options.split(',').any(|o| o == "memory" || o == "hugetlb")
    };
    fields.filter(|f| f.len() > 3 && fits(f[2], f[3])).map(|f| f[1].into()).collect()
}
