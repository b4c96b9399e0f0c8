//! Limits of the kernel and of this process, against what many channels need.

use rustix::process::{Resource, Rlimit, getrlimit};

use super::check::Check;
use super::{read_line, read_number};
use crate::human;

const AREA: &str = "limits";

/// Descriptors that one channel costs each side: a link for each direction, and its own region kept to show to a new
/// broker.
const FDS_PER_CHANNEL: u64 = 3;
/// Descriptors that the broker keeps of one channel: the regions of both sides, for `partywall stat`.
const BROKER_FDS_PER_CHANNEL: u64 = 2;
/// Mappings that one quiet channel costs each side: its own region and the peer's, each with its ring mapped twice.
const MAPS_PER_CHANNEL: u64 = 4;
/// The descriptors of a process without channels.
const BASE: u64 = 256;
/// Memory of a quiet channel on each side: a control page and the smallest ring that the library begins with.
const BYTES_PER_CHANNEL: u64 = 4096 + (16 << 10);

pub(super) fn checks(channels: u64) -> Vec<Check> {
    vec![
        open_files(channels),
        broker_files(channels),
        mappings(channels),
        system_files(channels),
        locked_memory(),
        memory(channels),
        pending_connections(),
    ]
}

fn or_unlimited(limit: Option<u64>) -> String {
    limit.map_or_else(|| "unlimited".into(), |n| n.to_string())
}

fn open_files(channels: u64) -> Check {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let needed = channels * FDS_PER_CHANNEL + BASE;
    judge_files(current, maximum, channels, needed)
}

fn judge_files(current: Option<u64>, maximum: Option<u64>, channels: u64, needed: u64) -> Check {
    let means = "the next channel of this process is refused with `too many open files`";
    let enough = current.is_none_or(|n| n >= needed);
    let found =
        format!("{} (at most {}); {channels} channels need {needed}", or_unlimited(current), or_unlimited(maximum));
    let check = Check::ok(AREA, "open files", means, found);
    match (enough, maximum.is_none_or(|n| n >= needed)) {
        (true, _) => check,
        (false, true) => check.warn(format!("`ulimit -n {needed}` in the shell that starts the program, or LimitNOFILE={needed} in its systemd unit")),
        (false, false) => check.warn(format!(
            "as root: `* hard nofile {needed}` in /etc/security/limits.conf, or LimitNOFILE={needed} in the systemd unit, then `ulimit -n {needed}`"
        )),
    }
}

fn broker_files(channels: u64) -> Check {
    let means =
        "more open files than this no process can have, whatever its own limit says; the broker needs two a channel";
    let needed = channels * BROKER_FDS_PER_CHANNEL.max(FDS_PER_CHANNEL) + BASE;
    number("files per process", "/proc/sys/fs/nr_open", means, needed, "fs.nr_open", channels)
}

fn mappings(channels: u64) -> Check {
    let means = "the next channel of this process is refused with `cannot allocate memory`";
    let needed = channels * MAPS_PER_CHANNEL + 4 * BASE;
    number("mappings", "/proc/sys/vm/max_map_count", means, needed, "vm.max_map_count", channels)
}

fn system_files(channels: u64) -> Check {
    let means = "the whole system runs out of open files";
    // Both sides and the broker.
    let needed = channels * (2 * FDS_PER_CHANNEL + BROKER_FDS_PER_CHANNEL) + 4 * BASE;
    number("files of the system", "/proc/sys/fs/file-max", means, needed, "fs.file-max", channels)
}

fn number(name: &'static str, path: &str, means: &'static str, needed: u64, key: &str, channels: u64) -> Check {
    match read_number(path) {
        Ok(limit) => {
            let check = Check::ok(AREA, name, means, format!("{limit}; {channels} channels need {needed}"));
            if limit >= needed {
                check
            } else {
                check.warn(format!("`sysctl -w {key}={needed}`, and the same in /etc/sysctl.d/ to keep it"))
            }
        }
        Err(failure) => Check::ok(AREA, name, means, failure.to_string()).warn("mount /proc"),
    }
}

fn locked_memory() -> Check {
    let Rlimit { current, .. } = getrlimit(Resource::Memlock);
    let found = match current {
        Some(bytes) => format!("{}; channels lock none", human::bytes(bytes)),
        None => "unlimited".into(),
    };
    Check::ok(AREA, "locked memory", "only huge pages of virtual machines and vfio count towards it", found)
}

fn memory(channels: u64) -> Check {
    let means = "rings are allocated ahead, so that a channel is refused when there is no memory for it";
    let needed = channels * 2 * BYTES_PER_CHANNEL;
    let Some(available) = available_memory() else {
        return Check::ok(AREA, "memory", means, "cannot read /proc/meminfo").warn("mount /proc");
    };
    let cgroup = read_number("/sys/fs/cgroup/memory.max").ok();
    let limit = cgroup.map_or(available, |limit| limit.min(available));
    let found = format!(
        "{} available; both sides of {channels} quiet channels need {}",
        human::bytes(limit),
        human::bytes(needed)
    );
    let check = Check::ok(AREA, "memory", means, found);
    if limit >= needed {
        check
    } else {
        check.warn("use smaller rings (--ring 4K), more memory, or a higher memory.max of this cgroup")
    }
}

fn available_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? * 1024)
}

fn pending_connections() -> Check {
    let means = "more programs that join the broker in the same instant have to wait";
    let path = "/proc/sys/net/core/somaxconn";
    match read_line(path).ok().and_then(|line| line.parse::<u64>().ok()) {
        Some(n) if n >= 128 => Check::ok(AREA, "pending joins", means, n.to_string()),
        Some(n) => Check::ok(AREA, "pending joins", means, n.to_string()).warn("`sysctl -w net.core.somaxconn=4096`"),
        None => Check::ok(AREA, "pending joins", means, format!("cannot read {path}")),
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::FindingStatus;
    use super::*;

    #[test]
    fn low_file_limit_remedy_names_required_number() {
        let low = judge_files(Some(1024), Some(1_048_576), 10_000, 30_256);
        assert_eq!(low.status, FindingStatus::Warn);
        assert!(low.remedy.unwrap().contains("ulimit -n 30256"));
        let hard = judge_files(Some(1024), Some(4096), 10_000, 30_256);
        assert!(hard.remedy.unwrap().contains("limits.conf"));
        assert_eq!(judge_files(None, None, 10_000, 30_256).status, FindingStatus::Ok);
    }

    #[test]
    fn memory_of_this_machine_can_be_read() {
        assert!(available_memory().unwrap() > 0);
        assert_eq!(memory(u64::MAX / (4 * BYTES_PER_CHANNEL)).status, FindingStatus::Warn);
    }
}
