//! Processor time: of this process, of another, and of the whole machine.

use std::{fs, time::Duration};

use rustix::time::{ClockId, clock_gettime};

use super::clock;

/// A reading of this process's processor time and of the machine's.
#[derive(Debug, Clone, Copy)]
pub(super) struct Usage {
    wall: u64,
    own: u64,
    ticks: Ticks,
    idle: u64,
}

/// Processor time by the kernel's tick counts: coarse, but split.
#[derive(Debug, Clone, Copy, Default)]
struct Ticks {
    user: u64,
    kernel: u64,
}

/// The use of processors between two readings, in percent of one processor.
#[derive(Debug, Clone, Copy)]
pub(super) struct Share {
    /// By this process.
    pub(super) own: f64,
    /// The part of it inside the kernel.
    pub(super) kernel: f64,
    /// By everything on the machine, interrupts included.
    pub(super) machine: f64,
}

impl Usage {
    /// Reads now.
    pub(super) fn now() -> Self {
        Self {
            wall: clock::now(),
            own: process_time(),
            ticks: ticks(std::process::id()).unwrap_or_default(),
            idle: idle().unwrap_or(0),
        }
    }

    /// The use since this reading.
    pub(super) fn since(self) -> Share {
        let now = Self::now();
        let wall = (now.wall - self.wall).max(1) as f64;
        let own = 100.0 * (now.own - self.own) as f64 / wall;
        let (user, kernel) = (now.ticks.user - self.ticks.user, now.ticks.kernel - self.ticks.kernel);
        let part = if user + kernel == 0 { 0.0 } else { kernel as f64 / (user + kernel) as f64 };
        let idle = now.idle.saturating_sub(self.idle) as f64;
        let machine = (100.0 * (processors() as f64 - idle / wall)).max(0.0);
        Share { own, kernel: own * part, machine }
    }
}

/// Nanoseconds that this process, with all its threads, has run.
fn process_time() -> u64 {
    clock::nanoseconds(clock_gettime(ClockId::ProcessCPUTime))
}

/// Processor time of another process so far: exact where the kernel keeps scheduler statistics, else to the tick.
pub(crate) fn time_of(pid: u32) -> Option<Duration> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).ok()?;
    let ran = |thread: fs::DirEntry| {
        let stat = fs::read_to_string(thread.path().join("schedstat")).ok()?;
        stat.split_whitespace().next()?.parse::<u64>().ok()
    };
    let exact: Option<u64> = threads.flatten().map(ran).sum();
    let exact = exact.filter(|ran| *ran > 0).map(Duration::from_nanos);
    exact.or_else(|| whole_time_of(pid))
}

/// Processor time of a process so far, that of its ended threads included, to the tick.
pub(crate) fn whole_time_of(pid: u32) -> Option<Duration> {
    ticks(pid).map(Ticks::time)
}

/// Processor time of one thread of a process so far, to the tick.
pub(crate) fn time_of_thread(pid: u32, thread: u32) -> Option<Duration> {
    read_ticks(&format!("/proc/{pid}/task/{thread}/stat")).map(Ticks::time)
}

impl Ticks {
    fn time(self) -> Duration {
        Duration::from_millis(10 * (self.user + self.kernel))
    }
}

fn ticks(pid: u32) -> Option<Ticks> {
    read_ticks(&format!("/proc/{pid}/stat"))
}

fn read_ticks(path: &str) -> Option<Ticks> {
    let stat = fs::read_to_string(path).ok()?;
    // The name in brackets may contain anything, so fields are counted after it; utime and stime are 14 and 15.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
    Some(Ticks { user: fields.next()?.parse().ok()?, kernel: fields.next()?.parse().ok()? })
}

/// Nanoseconds during which processors were idle, all together. The kernel measures these, while it samples what is not idle.
fn idle() -> Option<u64> {
    let stat = fs::read_to_string("/proc/stat").ok()?;
    let mut fields = stat.lines().next()?.split_whitespace().skip(1);
    let (idle, waiting): (u64, u64) = (fields.nth(3)?.parse().ok()?, fields.next()?.parse().ok()?);
    // A tick is 10 ms on every Linux that we know (`USER_HZ`).
    Some((idle + waiting) * 10_000_000)
}

/// Processors of the whole machine, usable or not.
fn processors() -> u64 {
    let stat = fs::read_to_string("/proc/stat").unwrap_or_default();
    stat.lines().skip(1).take_while(|line| line.starts_with("cpu")).count() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sees_work_and_rest() {
        let begin = Usage::now();
        let until = clock::now() + 30_000_000;
        while clock::now() < until {
            std::hint::spin_loop();
        }
        assert!(begin.since().own > 1.0, "spinning uses processor time");
        let rest = Usage::now();
        clock::sleep_until(clock::now() + 20_000_000);
        // Other tests run in this process, so only plausibility can be asserted.
        assert!(rest.since().own >= 0.0);
        assert!(time_of(std::process::id()).is_some());
        assert!(time_of(u32::MAX).is_none());
        let own = std::process::id();
        assert!(time_of_thread(own, own) <= whole_time_of(own));
        assert!(time_of_thread(own, u32::MAX).is_none());
    }
}
