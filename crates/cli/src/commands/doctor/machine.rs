//! The machine: kernel and processors.

use rustix::io::Errno;
use rustix::thread::{CpuSet, sched_getaffinity};

use super::check::Check;
use super::read_line;

const AREA: &str = "machine";
/// Before it, the broker cannot wait for the processes that it starts (`pidfd_open`), and before 5.1 there is no `F_SEAL_FUTURE_WRITE`.
const OLDEST: (u32, u32) = (5, 3);
/// Before it, the kernel does not tell in which network namespace a socket is (`SO_NETNS_COOKIE`).
const OLDEST_FOR_SOCKETS: (u32, u32) = (5, 14);

pub(super) fn checks() -> Vec<Check> {
    vec![kernel(), processors(), quota()]
}

fn kernel() -> Check {
    let uname = rustix::system::uname();
    let release = uname.release().to_string_lossy();
    let found = format!("Linux {release} on {}", uname.machine().to_string_lossy());
    judged(version(&release), found)
}

fn judged(version: Option<(u32, u32)>, found: String) -> Check {
    let means = "kernels before 5.3 cannot run the broker, and before 5.14 `partywall run` leaves connections on TCP";
    let check = Check::ok(AREA, "kernel", means, found);
    match version {
        Some(version) if version >= OLDEST_FOR_SOCKETS => check,
        Some(version) if version >= OLDEST => check.warn("boot Linux 5.14 or later for `partywall run`"),
        Some(_) => check.fail("boot Linux 5.14 or later"),
        None => check.warn("its version cannot be read; the checks below tell what it does"),
    }
}

fn version(release: &str) -> Option<(u32, u32)> {
    let mut parts = release.split(|c: char| !c.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

/// The processors that this process may run on.
fn usable() -> Result<Vec<usize>, Errno> {
    let set = sched_getaffinity(None)?;
    Ok((0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect())
}

fn processors() -> Check {
    let means = "both sides of a channel share one processor: nothing runs at the same time, and neither side spins";
    let online = read_line("/sys/devices/system/cpu/online").unwrap_or_else(|_| "?".into());
    let cpus = match usable() {
        Ok(cpus) => cpus,
        Err(error) => {
            return Check::ok(AREA, "processors", means, format!("cannot ask: {error}"))
                .warn("let seccomp profiles permit sched_getaffinity");
        }
    };
    let cores = cores(&cpus);
    let check =
        Check::ok(AREA, "processors", means, format!("{} usable on {cores} core(s), of {online} online", cpus.len()));
    match (cpus.len(), cores) {
        (0 | 1, _) => {
            check.warn("give this process or container at least two (see `taskset -p $$`, or the cpuset of its cgroup)")
        }
        (_, 1) => check.warn("these are two threads of one core; give it processors of two cores for full speed"),
        _ => check,
    }
}

/// How many cores these processors belong to; unknown ones count as their own.
fn cores(cpus: &[usize]) -> usize {
    let mut siblings: Vec<String> = cpus
        .iter()
        .map(|cpu| {
            read_line(&format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"))
                .unwrap_or_else(|_| cpu.to_string())
        })
        .collect();
    siblings.sort();
    siblings.dedup();
    siblings.len()
}

fn quota() -> Check {
    let means = "spinning uses up the quota, and then both sides stand still until the next period";
    // The file is that of the own cgroup, seen from inside a container; elsewhere the root has no such file.
    let Ok(line) = read_line("/sys/fs/cgroup/cpu.max") else {
        return Check::ok(AREA, "processor quota", means, "none");
    };
    match cpus_of_quota(&line) {
        None => Check::ok(AREA, "processor quota", means, "none"),
        Some(cpus) if cpus >= 2.0 => Check::ok(AREA, "processor quota", means, format!("{cpus:.1} processors")),
        Some(cpus) => Check::ok(AREA, "processor quota", means, format!("{cpus:.1} processors"))
            .warn("raise the quota to two processors (cpu.max), or set spinning to zero (--spin 0)"),
    }
}

/// Processors that `cpu.max` grants: `max 100000` is without limit, `150000 100000` one and a half.
fn cpus_of_quota(line: &str) -> Option<f64> {
    let (quota, period) = line.split_once(' ')?;
    Some(quota.parse::<f64>().ok()? / period.parse::<f64>().ok()?)
}

#[cfg(test)]
mod tests {
    use super::super::check::FindingStatus;
    use super::*;

    #[test]
    fn versions_are_read_from_any_release_name() {
        assert_eq!(version("6.18.44-amd64"), Some((6, 18)));
        assert_eq!(version("5.1"), Some((5, 1)));
        assert_eq!(version("4.19+deb"), Some((4, 19)));
        assert_eq!(version("odd"), None);
    }

    #[test]
    fn older_kernel_is_warned_of_or_refused() {
        let status = |text: &str| judged(version(text), text.to_owned()).status;
        assert_eq!(status("5.14.0"), FindingStatus::Ok);
        assert_eq!(status("5.13.19"), FindingStatus::Warn);
        assert_eq!(status("5.2.1"), FindingStatus::Fail);
        assert_eq!(status("odd"), FindingStatus::Warn);
    }

    #[test]
    fn quota_is_read_in_processors() {
        assert_eq!(cpus_of_quota("max 100000"), None);
        assert_eq!(cpus_of_quota("150000 100000"), Some(1.5));
    }

    #[test]
    fn unknown_processors_count_as_one_core_each() {
        assert_eq!(cores(&[]), 0);
        // Processors that do not exist have no topology: each counts.
        assert_eq!(cores(&[100_001, 100_002]), 2);
    }
}
