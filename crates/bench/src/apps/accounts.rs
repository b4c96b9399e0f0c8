//! The kernel's own accounts of a stretch of time: what the machine was busy with, and how a server fared.

use std::{fs, time::Instant};

use crate::{report::metric::Metric, task::Figures};

/// A reading of them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Accounts {
    when: Instant,
    server: u32,
    /// Ticks of all processors together, idle.
    idle: u64,
    /// Context switches of the machine.
    switches: u64,
    /// Nanoseconds that the server was ready and did not run.
    waited: u64,
    /// Times that it gave its processor up.
    blocked: u64,
}

impl Accounts {
    /// Reads the counters of the machine, and of a server with its descendants.
    pub(crate) fn now(server: u32) -> Self {
        let stat = fs::read_to_string("/proc/stat").unwrap_or_default();
        let number = |line: Option<&str>, at: usize| {
            line.and_then(|line| line.split_whitespace().nth(at)).and_then(|word| word.parse::<u64>().ok()).unwrap_or(0)
        };
        let cpu = stat.lines().next();
        let switches = stat.lines().find(|line| line.starts_with("ctxt "));
        let (mut waited, mut blocked) = (0, 0);
        for process in family(server) {
            for task in fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten() {
                let read = |name: &str| fs::read_to_string(task.path().join(name)).unwrap_or_default();
                waited += number(Some(&read("schedstat")), 1);
                let status = read("status");
                blocked += number(status.lines().find(|line| line.starts_with("voluntary_ctxt_switches")), 1);
            }
        }
        // Waiting for a disk is idling, too.
        Self {
            when: Instant::now(),
            server,
            idle: number(cpu, 4) + number(cpu, 5),
            switches: number(switches, 1),
            waited,
            blocked,
        }
    }

    /// The figures for the time since this reading, on a machine with this number of processors.
    pub(crate) fn since(self, processors: usize) -> Figures {
        let now = Self::now(self.server);
        let wall = now.when.duration_since(self.when).as_secs_f64().max(1e-9);
        // A tick is 10 ms on every Linux that we know (`USER_HZ`).
        let idle = now.idle.saturating_sub(self.idle) as f64 / 100.0 / wall;
        Figures::from([
            (Metric::MachineCpuPercent, 100.0 * (processors as f64 - idle).max(0.0)),
            (Metric::SwitchesPerSecond, now.switches.saturating_sub(self.switches) as f64 / wall),
            (Metric::WaitPercent, 100.0 * now.waited.saturating_sub(self.waited) as f64 / 1e9 / wall),
            (Metric::BlocksPerSecond, now.blocked.saturating_sub(self.blocked) as f64 / wall),
        ])
    }
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
}
