//! The host's processor time for virtual machines: of their QEMUs, of the processes that serve their devices, and of the kernel's threads that
//! move their frames.

use std::{
    fs,
    sync::mpsc::{RecvTimeoutError, channel},
    thread,
    time::{Duration, Instant},
};

use partywall_lab::Guest;

use super::machines::fault;
use crate::{
    error::{BenchError, Result},
    measure::cpu::{time_of_thread, whole_time_of},
};

/// A client has started and is connected after this, also in an emulated machine.
const LEAD: Duration = Duration::from_millis(1_200);
/// The time that counts. It ends before a client of 3 seconds does.
const STRETCH: Duration = Duration::from_millis(1_600);

/// What the time is taken of.
#[derive(Debug, Clone)]
pub(super) struct HostCpu {
    processes: Vec<u32>,
    /// The threads of virtual processors, each with its process.
    processors: Vec<(u32, u32)>,
}

/// Processors that were busy on average.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct BusyProcessors {
    /// With everything that is counted.
    pub(super) all: f64,
    /// The part of it outside of the virtual processors' threads.
    pub(super) outside: f64,
}

/// Processor time so far.
#[derive(Debug, Clone, Copy)]
struct CpuReading {
    when: Instant,
    all: Duration,
    processors: Duration,
}

impl HostCpu {
    /// The QEMUs of machines, these servers of their devices, and the kernel's threads for network devices.
    pub(super) fn of(guests: &[&Guest], servers: &[u32]) -> Result<Self> {
        let qemus: Vec<u32> = guests.iter().map(|guest| guest.pid()).collect();
        let mut processors = Vec::new();
        for guest in guests {
            let listed = guest.monitor_command("query-cpus-fast", serde_json::json!({})).map_err(fault)?;
            let threads = listed.as_array().into_iter().flatten().filter_map(|one| one["thread-id"].as_u64());
            processors.extend(threads.filter_map(|thread| Some((guest.pid(), u32::try_from(thread).ok()?))));
        }
        if processors.len() < guests.len() {
            return Err(BenchError::Transport("a monitor lists no virtual processor".into()));
        }
        let processes = qemus.iter().chain(servers).copied().chain(kernel_threads(&qemus)).collect();
        Ok(Self { processes, processors })
    }

    fn now(&self) -> CpuReading {
        let all = self.processes.iter().filter_map(|process| whole_time_of(*process)).sum();
        let processors = self.processors.iter().filter_map(|(process, thread)| time_of_thread(*process, *thread)).sum();
        CpuReading { when: Instant::now(), all, processors }
    }

    /// Does the work, and returns the use of processors in the middle of it, when the programs have started and none has ended. Of work that is
    /// short it is that of all of it.
    pub(super) fn during<T>(&self, work: impl FnOnce() -> T) -> (T, BusyProcessors) {
        self.during_after(LEAD, work)
    }

    /// The same, where programs have started after this lead.
    fn during_after<T>(&self, lead: Duration, work: impl FnOnce() -> T) -> (T, BusyProcessors) {
        let (done, ended) = channel::<()>();
        // Before the work, since the sampling thread may start late.
        let begin = self.now();
        thread::scope(|scope| {
            let sampler = scope.spawn(move || {
                let is_over = |time| !matches!(ended.recv_timeout(time), Err(RecvTimeoutError::Timeout));
                if is_over(lead) {
                    return begin.until(self.now());
                }
                let first = self.now();
                let is_short = is_over(STRETCH);
                if is_short { begin } else { first }.until(self.now())
            });
            let result = work();
            drop(done);
            let nothing = BusyProcessors { all: 0.0, outside: 0.0 };
            (result, sampler.join().unwrap_or(nothing))
        })
    }
}

impl CpuReading {
    fn until(self, later: Self) -> BusyProcessors {
        let wall = later.when.duration_since(self.when).as_secs_f64().max(1e-9);
        let all = later.all.saturating_sub(self.all).as_secs_f64() / wall;
        let processors = later.processors.saturating_sub(self.processors).as_secs_f64() / wall;
        BusyProcessors { all, outside: (all - processors).max(0.0) }
    }
}

/// The kernel's threads that move frames: `vhost-net`'s, which are named after their QEMU, and those of software interrupts.
fn kernel_threads(qemus: &[u32]) -> Vec<u32> {
    let names: Vec<String> = qemus.iter().map(|qemu| format!("vhost-{qemu}")).collect();
    let numbers = fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = numbers.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let moves_frames = |process: &u32| {
        let name = fs::read_to_string(format!("/proc/{process}/comm")).unwrap_or_default();
        let name = name.trim_end();
        name.starts_with("ksoftirqd/") || names.iter().any(|one| one == name)
    };
    numbers.filter(moves_frames).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own() -> HostCpu {
        HostCpu { processes: vec![std::process::id()], processors: Vec::new() }
    }

    #[test]
    fn short_work_is_counted_as_a_whole() {
        // A loaded machine may stop this process for longer than the usual lead.
        const LONG: Duration = Duration::from_secs(60);
        let begin = Instant::now();
        let (done, busy) = own().during_after(LONG, || {
            let used = own().now().all;
            // Processor time is counted in ticks, and a thread that is stopped uses none.
            while begin.elapsed() < Duration::from_millis(100) || own().now().all == used {
                std::hint::spin_loop();
            }
            7
        });
        assert_eq!(done, 7);
        assert!(busy.all > 0.0 && busy.outside == busy.all, "{busy:?}");
        assert!(begin.elapsed() < LONG, "it waits for work that has ended");
    }

    #[test]
    fn time_of_virtual_processors_is_not_outside() {
        let at = Instant::now();
        let reading = |ms: u64, all, processors| CpuReading {
            when: at + Duration::from_millis(ms),
            all: Duration::from_millis(all),
            processors: Duration::from_millis(processors),
        };
        let busy = reading(0, 100, 50).until(reading(1_000, 1_600, 800));
        assert_eq!(busy, BusyProcessors { all: 1.5, outside: 0.75 });
    }
}
