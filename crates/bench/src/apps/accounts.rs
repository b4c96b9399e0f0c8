//! The kernel's own accounts of a stretch of time: what the machine was busy with, and how a server fared.

use std::{
    fs,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};

use crate::{report::metric::Metric, task::Figures};

/// A reading of them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Accounts {
    when: Instant,
    server: u32,
    /// Ticks of all processors together, idle.
    idle: u64,
    counters: FlowCounters,
}

/// The counters that a machine has of a flow: its switches, and those of a server in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FlowCounters {
    /// Context switches of the machine.
    pub(crate) switches: u64,
    /// The threads of the server.
    pub(crate) threads: ThreadCounters,
}

/// How threads fared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(crate) struct ThreadCounters {
    /// Nanoseconds that they were ready and did not run.
    pub(crate) waited: u64,
    /// Times that they gave their processor up.
    pub(crate) blocked: u64,
}

impl Accounts {
    /// Reads the counters of the machine, and of a server with its descendants.
    pub(crate) fn now(server: u32) -> Self {
        let idle = idle_ticks(&read_stat());
        Self { when: Instant::now(), server, idle, counters: FlowCounters::of(threads_of(server)) }
    }

    /// The figures for the time since this reading, on a machine with this number of processors.
    pub(crate) fn since(self, processors: usize) -> Figures {
        let now = Self::now(self.server);
        let wall = now.when.duration_since(self.when);
        let idle = now.idle.saturating_sub(self.idle) as f64 / TICKS / wall.as_secs_f64().max(1e-9);
        let mut figures = self.counters.until(&now.counters, wall);
        figures.insert(Metric::MachineCpuPercent, 100.0 * (processors as f64 - idle).max(0.0));
        figures
    }
}

/// How busy the machine is, from the first operation that counts to the last.
#[derive(Debug)]
pub(crate) struct BusyStretch {
    begun: Instant,
    idle: u64,
}

impl BusyStretch {
    /// Begins with the first operation.
    pub(crate) fn begin() -> Self {
        Self { begun: Instant::now(), idle: idle_ticks(&read_stat()) }
    }

    /// The figures of this number of operations, the last of which has just been done.
    pub(crate) fn end(self, operations: f64) -> Figures {
        let (wall, stat) = (self.begun.elapsed().as_secs_f64().max(1e-9), read_stat());
        let is_processor = |line: &&str| line.starts_with("cpu") && !line.starts_with("cpu ");
        let processors = stat.lines().filter(is_processor).count() as f64;
        let busy = (processors - idle_ticks(&stat).saturating_sub(self.idle) as f64 / TICKS / wall).max(0.0);
        Figures::from([
            (Metric::MachineCpuPercent, 100.0 * busy),
            (Metric::CpuNsPerOperation, busy * wall * 1e9 / operations.max(1.0)),
        ])
    }
}

/// Ticks in a second (`USER_HZ`), on every Linux that we know.
const TICKS: f64 = 100.0;

fn read_stat() -> String {
    fs::read_to_string("/proc/stat").unwrap_or_default()
}

/// Ticks that all processors together were idle. Waiting for a disk is idling, too.
fn idle_ticks(stat: &str) -> u64 {
    let cpu = stat.lines().next();
    number(cpu, 4) + number(cpu, 5)
}

impl FlowCounters {
    /// Reads the machine's switches, beside the counters of a server.
    pub(crate) fn of(threads: ThreadCounters) -> Self {
        let stat = read_stat();
        Self { switches: number(stat.lines().find(|line| line.starts_with("ctxt ")), 1), threads }
    }

    /// The figures from this reading to a later one.
    pub(crate) fn until(&self, later: &Self, wall: Duration) -> Figures {
        let wall = wall.as_secs_f64().max(1e-9);
        let (before, after) = (self.threads, later.threads);
        Figures::from([
            (Metric::SwitchesPerSecond, later.switches.saturating_sub(self.switches) as f64 / wall),
            (Metric::WaitPercent, 100.0 * after.waited.saturating_sub(before.waited) as f64 / 1e9 / wall),
            (Metric::BlocksPerSecond, after.blocked.saturating_sub(before.blocked) as f64 / wall),
        ])
    }
}

impl ThreadCounters {
    /// Reads those of one thread of a process.
    pub(crate) fn from_thread(process: u32, thread: u32) -> Self {
        let read = |name: &str| fs::read_to_string(format!("/proc/{process}/task/{thread}/{name}")).unwrap_or_default();
        let status = read("status");
        let blocked = status.lines().find(|line| line.starts_with("voluntary_ctxt_switches"));
        Self { waited: number(Some(&read("schedstat")), 1), blocked: number(blocked, 1) }
    }
}

impl std::ops::AddAssign for ThreadCounters {
    fn add_assign(&mut self, other: Self) {
        self.waited += other.waited;
        self.blocked += other.blocked;
    }
}

/// The word at this place of a line, as a number; 0 if there is none.
fn number(line: Option<&str>, at: usize) -> u64 {
    line.and_then(|line| line.split_whitespace().nth(at)).and_then(|word| word.parse().ok()).unwrap_or(0)
}

/// The threads of a process that there are now.
pub(crate) fn threads(process: u32) -> Vec<u32> {
    let all = fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
    all.filter_map(|task| task.file_name().to_str()?.parse().ok()).collect()
}

/// The counters of a process and its descendants.
fn threads_of(server: u32) -> ThreadCounters {
    let mut sum = ThreadCounters::default();
    for process in family(server) {
        threads(process).into_iter().for_each(|thread| sum += ThreadCounters::from_thread(process, thread));
    }
    sum
}

/// A process and its descendants.
fn family(process: u32) -> Vec<u32> {
    let mut all = vec![process];
    let mut at = 0;
    while let Some(&parent) = all.get(at) {
        for task in fs::read_dir(format!("/proc/{parent}/task")).into_iter().flatten().flatten() {
            let children = fs::read_to_string(task.path().join("children")).unwrap_or_default();
            all.extend(children.split_whitespace().filter_map(|word| word.parse::<u32>().ok()));
        }
        at += 1;
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accounts_read_kernel_counters() {
        let begin = Accounts::now(std::process::id());
        std::thread::sleep(std::time::Duration::from_millis(20));
        let figures = begin.since(64);
        assert!(figures[&Metric::SwitchesPerSecond] > 0.0);
        assert!(figures[&Metric::BlocksPerSecond] > 0.0);
        assert!(family(1).contains(&1));
    }

    #[test]
    fn processor_time_of_operations_is_that_of_their_stretch() {
        let stretch = BusyStretch::begin();
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_millis(100) {}
        let wall = begun.elapsed().as_secs_f64();
        let figures = stretch.end(10.0);
        let (percent, of_one) = (figures[&Metric::MachineCpuPercent], figures[&Metric::CpuNsPerOperation]);
        assert!(percent > 0.0, "{figures:?}");
        // Both are of one stretch: the busy time is the operations' together.
        let busy = of_one * 10.0 / 1e9;
        assert!(busy >= percent / 100.0 * wall, "{figures:?}");
    }
}
