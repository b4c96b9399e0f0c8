//! The machine that a report is about.

use std::{fs, time::Instant};

use serde::{Deserialize, Serialize};

/// Facts that figures depend on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Host {
    /// The name of the processor's model.
    pub(crate) cpu: String,
    /// Processors that this process may use.
    pub(crate) cores: usize,
    /// Cache sizes of the first processor, as the kernel lists them.
    pub(crate) caches: Vec<String>,
    /// Kernel release.
    pub(crate) kernel: String,
    /// Architecture.
    pub(crate) machine: String,
    /// Bytes of memory.
    pub(crate) memory: u64,
    /// Whether a hypervisor lies between.
    pub(crate) virtualized: bool,
    /// The load average of the last minute when the bench began: above 0.5 or so the figures suffer.
    pub(crate) load: f64,
    /// The time to read the clock. Each latency sample contains one reading.
    pub(crate) clock_ns: f64,
}

impl Host {
    /// Looks at this machine.
    pub(crate) fn look() -> Self {
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let field = |name: &str| {
            let line = cpuinfo.lines().find(|line| line.starts_with(name))?;
            Some(line.split_once(':')?.1.trim().to_owned())
        };
        let uname = rustix::system::uname();
        Self {
            cpu: field("model name").unwrap_or_else(|| "unknown".into()),
            cores: crate::affinity::allowed().map_or(0, |all| all.len()),
            caches: caches(),
            kernel: uname.release().to_string_lossy().into_owned(),
            machine: uname.machine().to_string_lossy().into_owned(),
            memory: memory().unwrap_or(0),
            virtualized: field("flags").is_some_and(|flags| flags.split(' ').any(|flag| flag == "hypervisor")),
            load: load().unwrap_or(0.0),
            clock_ns: clock_cost(),
        }
    }

    /// One line for the head of a table.
    pub(crate) fn line(&self) -> String {
        let kind = if self.virtualized { " (virtual)" } else { "" };
        format!(
            "{}{kind}, {} cores usable, Linux {}, load {:.2}, clock {:.0} ns",
            self.cpu, self.cores, self.kernel, self.load, self.clock_ns
        )
    }
}

fn caches() -> Vec<String> {
    let read = |index: usize, name: &str| {
        let text = fs::read_to_string(format!("/sys/devices/system/cpu/cpu0/cache/index{index}/{name}")).ok()?;
        Some(text.trim().to_owned())
    };
    (0..8)
        .filter_map(|index| {
            Some(format!("L{} {} {}", read(index, "level")?, read(index, "type")?, read(index, "size")?))
        })
        .collect()
}

fn memory() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let kib: u64 = text.lines().find(|l| l.starts_with("MemTotal:"))?.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib << 10)
}

fn load() -> Option<f64> {
    fs::read_to_string("/proc/loadavg").ok()?.split(' ').next()?.parse().ok()
}

fn clock_cost() -> f64 {
    const READINGS: u32 = 10_000;
    let begin = Instant::now();
    for _ in 0..READINGS {
        std::hint::black_box(Instant::now());
    }
    begin.elapsed().as_nanos() as f64 / f64::from(READINGS)
}
