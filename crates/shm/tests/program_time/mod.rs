//! Time that a program takes, without the time for which its threads wait for a processor: a loaded machine takes that, and no fault of
//! the program does.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Measures from its start on.
pub(crate) struct ProgramTime<F> {
    threads: F,
    /// How long each thread had waited for a processor at the start.
    before: BTreeMap<PathBuf, Duration>,
    start: Instant,
}

impl<F: Fn() -> Vec<PathBuf>> ProgramTime<F> {
    /// `threads` returns the folders in `/proc` of the threads whose work is measured.
    pub(crate) fn start(threads: F) -> Self {
        let before = threads().into_iter().map(|thread| (thread.clone(), run_delay(&thread))).collect();
        Self { threads, before, start: Instant::now() }
    }

    /// The time since the start, less the time that each thread has waited for a processor since.
    pub(crate) fn elapsed(&self) -> Duration {
        let elapsed = self.start.elapsed();
        let before = |thread: &Path| self.before.get(thread).copied().unwrap_or_default();
        let waits = (self.threads)().into_iter().map(|thread| run_delay(&thread).saturating_sub(before(&thread)));
        elapsed.saturating_sub(waits.sum())
    }
}

/// How long a thread has waited for a processor. Zero for a thread that has ended, and where the kernel does not count it.
fn run_delay(thread: &Path) -> Duration {
    let times = fs::read_to_string(thread.join("schedstat")).unwrap_or_default();
    Duration::from_nanos(times.split_whitespace().nth(1).and_then(|time| time.parse().ok()).unwrap_or(0))
}

/// The calling thread.
pub(crate) fn this_thread() -> PathBuf {
    Path::new("/proc").join(fs::read_link("/proc/thread-self").unwrap())
}

/// Threads of this process that have this name, of which the kernel keeps 15 bytes.
#[allow(dead_code, reason = "some tests measure the calling thread alone")]
pub(crate) fn threads_named(name: &str) -> Vec<PathBuf> {
    let name = &name[..name.len().min(15)];
    let threads = fs::read_dir("/proc/self/task").unwrap().flatten().map(|thread| thread.path());
    threads.filter(|thread| fs::read_to_string(thread.join("comm")).is_ok_and(|comm| comm.trim() == name)).collect()
}
