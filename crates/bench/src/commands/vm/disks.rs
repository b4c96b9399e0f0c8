//! Disks of a virtual machine that has nothing of Partywall inside: `partywall blk` and `qemu-storage-daemon` by vhost-user, and its QEMU's own, under
//! fio.
//!
//! ```text
//!   machine, fio === virtio-blk === vhost-user === partywall blk ---------- file
//!                === virtio-blk === vhost-user === qemu-storage-daemon ---- file
//!                === virtio-blk === QEMU ---------------------------------- file
//! ```

use std::{collections::BTreeMap, path::Path, time::Duration};

use partywall_lab::{Accel, Guest, GuestOptions, ImageOptions, Lab};

use super::{NAME, host_cpu::HostCpu, machines::fault, program::execute};
use crate::{
    affinity,
    apps::{accounts::Accounts, site},
    args::{Common, Scale},
    bench::{Bench, BenchPlan},
    commands::{
        CommandResults,
        blk::{DiskServer, DiskServing},
    },
    error::{BenchError, During, Result},
    mechanism::{Mechanism, Tuning},
    process::GuardedChild,
    report::{
        cell::{Cell, Key},
        metric::Metric,
        table::{self, Layout},
        verdict::{Bound, Verdict},
    },
    task::{Figures, MeasuringWork},
};

/// All disks, in the order of tables, each with its place on the machine's bus.
pub(super) const DISKS: [(Mechanism, u32); 3] =
    [(Mechanism::PartywallBlk, 0x10), (Mechanism::QemuStorageDaemon, 0x11), (Mechanism::VirtioBlk, 0x12)];
/// The program in the machine, and its package.
const FIO: (&str, &str) = ("fio", "fio");
/// MiB of the machine.
const MEMORY: u32 = 512;
/// MiB of each disk.
const SIZE: u64 = 256;

/// A load on a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct DiskCase {
    label: &'static str,
    /// The words of fio for what is done, and for the size of a request.
    direction: &'static str,
    size: &'static str,
    depth: u32,
    /// The figure by which disks are compared.
    metric: Metric,
}

const fn case(
    label: &'static str,
    direction: &'static str,
    size: &'static str,
    depth: u32,
    metric: Metric,
) -> DiskCase {
    DiskCase { label, direction, size, depth, metric }
}

const CASES: [DiskCase; 6] = [
    case("4 KiB random read, depth 1", "randread", "4k", 1, Metric::PerSecond),
    case("4 KiB random write, depth 1", "randwrite", "4k", 1, Metric::PerSecond),
    case("4 KiB random read, depth 32", "randread", "4k", 32, Metric::PerSecond),
    case("4 KiB random write, depth 32", "randwrite", "4k", 32, Metric::PerSecond),
    case("1 MiB sequential read, depth 8", "read", "1m", 8, Metric::BytesPerSecond),
    case("1 MiB sequential write, depth 8", "write", "1m", 8, Metric::BytesPerSecond),
];

pub(super) fn plans(scale: Scale) -> Vec<BenchPlan> {
    let some = if scale == Scale::Smoke { &CASES[..1] } else { &CASES };
    let plan = |case: &DiskCase, mechanism| BenchPlan {
        key: Key::new(NAME, mechanism).with("part", "disks").with("case", case.label),
        tuning: Tuning::of(mechanism, 0),
        work: MeasuringWork::Transfer { message: 0, total: 0, repeats: 1, warm_up: Duration::ZERO },
        one_cpu: false,
    };
    some.iter().flat_map(|case| DISKS.map(|(mechanism, _)| plan(case, mechanism))).collect()
}

/// Whether the options ask for any of the disks.
pub(super) fn are_wanted(common: &Common) -> bool {
    DISKS.into_iter().any(|(disk, _)| common.wants(disk))
}

/// The machine with its disks. Dropping it ends it.
struct DiskMachine {
    // The machine ends before what serves it.
    guest: Guest,
    servers: BTreeMap<Mechanism, GuardedChild>,
    /// Why a disk is not there.
    lacks: BTreeMap<Mechanism, String>,
    accel: Accel,
}

impl DiskMachine {
    /// Boots it. `folder` is for the disks' files.
    fn boot(bench: &Bench, folder: &Path) -> Result<Self> {
        let fio = site::find(FIO.0, FIO.1)?;
        let lab = Lab::new("bench-vm-disks", &ImageOptions::default().program(fio, FIO.0).module("virtio_blk"));
        let lab = lab.map_err(fault)?;
        let (mut servers, mut lacks) = (BTreeMap::new(), BTreeMap::new());
        let mut options = GuestOptions::new("disks").slots(0).memory(MEMORY).shared_memory();
        bench.progress("the files of the disks are written");
        for (mechanism, place) in DISKS.into_iter().filter(|(mechanism, _)| bench.common.wants(*mechanism)) {
            let image = folder.join(format!("{mechanism}.raw"));
            // All of it is written, and in the page cache.
            std::fs::write(&image, vec![1; (SIZE << 20) as usize]).during("writing a disk's file")?;
            let server = match mechanism {
                Mechanism::PartywallBlk => DiskServer::Partywall,
                Mechanism::QemuStorageDaemon => DiskServer::Qemu { aio: "threads" },
                _ => {
                    let drive =
                        format!("if=none,id=own,format=raw,cache=writeback,aio=threads,file={}", image.display());
                    let device = format!("virtio-blk-pci,drive=own,num-queues=1,addr={place:#x}");
                    options = options.arguments(["-drive", &drive, "-device", &device]);
                    continue;
                }
            };
            let socket = folder.join(format!("{mechanism}.sock"));
            match server.start(&image, &socket, DiskServing::CACHED) {
                Ok(process) => {
                    let chardev = format!("socket,id={mechanism},path={}", socket.display());
                    let device =
                        format!("vhost-user-blk-pci,chardev={mechanism},num-queues=1,vectors=0,addr={place:#x}");
                    options = options.arguments(["-chardev", &chardev, "-device", &device]);
                    servers.insert(mechanism, process);
                }
                Err(e) => drop(lacks.insert(mechanism, e.to_string())),
            }
        }
        bench.progress("a machine boots, with three disks");
        let guest = lab.boot(options).map_err(fault)?;
        Ok(Self { guest, servers, lacks, accel: lab.accel() })
    }

    fn describe(&self) -> Result<String> {
        let kernel = self.guest.shell("uname -r").map_err(fault)?;
        let scheduler = self.guest.shell("cat /sys/block/vda/queue/scheduler").map_err(fault)?;
        Ok(format!(
            "# disks: a machine without anything of Partywall, {}, Linux {kernel}, one virtual processor, up in {:.1} s, scheduler {scheduler}\n\
             # files of {SIZE} MiB in the host's page cache (no O_DIRECT on the host), one queue each; qemu-storage-daemon and QEMU with aio=threads;\n\
             # fio with direct=1 and libaio in the machine. virtio-blk has MSI-X vectors, the disks of vhost-user have none.\n\
             # Processor time (cpu/operation): user and system time of QEMU and of the disk's back end, in the middle of each run;\n\
             # outside/operation: the same without the thread of the virtual processor. A request is an operation.",
            self.accel,
            self.guest.booted_in().as_secs_f64(),
        ))
    }

    /// The name of a disk in the machine.
    fn device(&self, mechanism: Mechanism) -> Result<String> {
        if let Some(why) = self.lacks.get(&mechanism) {
            return Err(BenchError::Unavailable(why.clone()));
        }
        let place = DISKS.into_iter().find(|(disk, _)| *disk == mechanism).map_or(0, |(_, place)| place);
        let name =
            self.guest.shell(&format!("ls /sys/bus/pci/devices/0000:00:{place:02x}.0/virtio*/block")).map_err(fault)?;
        Ok(format!("/dev/{name}"))
    }

    /// One run of fio.
    fn measure(&self, plan: &BenchPlan, scale: Scale, bench: &Bench) -> Result<Figures> {
        let mechanism = plan.key.mechanism;
        let device = self.device(mechanism)?;
        let found = CASES.into_iter().find(|case| plan.key.word("case") == Some(case.label));
        let case = found.ok_or_else(|| BenchError::Transport("no such load".into()))?;
        let servers: Vec<u32> = self.servers.get(&mechanism).map(GuardedChild::id).into_iter().collect();
        let cpu = HostCpu::of(&[&self.guest], &servers)?;
        let accounts = Accounts::now(self.guest.pid());
        let (report, busy) = cpu.during(|| execute(&self.guest, &fio(&device, case, scale), &bench.interrupt));
        let host = accounts.since(affinity::allowed()?.len());
        let mut figures = figures(&report?)?;
        figures.extend(host.into_iter().filter(|(metric, _)| *metric == Metric::MachineCpuPercent));
        if let Some(rate) = figures.get(&Metric::PerSecond).copied().filter(|rate| *rate > 0.0) {
            figures.insert(Metric::CpuNsPerOperation, busy.all * 1e9 / rate);
            figures.insert(Metric::OutsideCpuNsPerOperation, busy.outside * 1e9 / rate);
        }
        Ok(figures)
    }
}

/// The line of fio.
fn fio(device: &str, case: DiskCase, scale: Scale) -> Vec<String> {
    // A number of requests is done on any machine. In a second of a loaded one, there may be none.
    let length = if scale == Scale::Smoke { "--number_ios=500" } else { "--time_based --runtime=3" };
    let line = format!(
        "fio --name=load --filename={device} --rw={} --bs={} --iodepth={} --ioengine=libaio --direct=1 --thread --norandommap --randseed=7 \
         {length} --lat_percentiles=1 --clat_percentiles=0 --output-format=json",
        case.direction, case.size, case.depth
    );
    line.split_whitespace().map(str::to_owned).collect()
}

/// The figures in a report of fio.
fn figures(report: &str) -> Result<Figures> {
    let failed = |why: String| BenchError::Transport(format!("fio: {why}"));
    // Notes of fio may come first.
    let report = &report[report.find('{').unwrap_or(0)..];
    let report: serde_json::Value = serde_json::from_str(report).map_err(|e| failed(e.to_string()))?;
    let job = &report["jobs"][0];
    let side = ["read", "write"].map(|side| &job[side]).into_iter().find(|side| side["total_ios"].as_u64() > Some(0));
    let side = side.filter(|_| job["error"] == 0).ok_or_else(|| failed(format!("no result: {job}")))?;
    let number = |value: &serde_json::Value| value.as_f64().ok_or_else(|| failed("a figure is missing".into()));
    // With the time of the submission: a request may be complete when the system call that submits it returns.
    let latency = |percent: &str| number(&side["lat_ns"]["percentile"][percent]);
    Ok(Figures::from([
        (Metric::PerSecond, number(&side["iops"])?),
        (Metric::BytesPerSecond, number(&side["bw_bytes"])?),
        (Metric::P50Ns, latency("50.000000")?),
        (Metric::P99Ns, latency("99.000000")?),
    ]))
}

/// Boots, measures and shows.
pub(super) fn run(bench: &mut Bench) -> Result<CommandResults> {
    let (scale, runs) = (bench.scale(), bench.common.runs());
    let plans = plans(scale);
    let folder = bench.scratch().join("disks");
    std::fs::create_dir(&folder).during(format!("making {}", folder.display()))?;
    let machine = DiskMachine::boot(bench, &folder)?;
    bench.say(&machine.describe()?)?;
    let cells = bench.measure_by(plans, runs, |bench, plan| {
        let done = machine.measure(plan, scale, bench);
        bench.interrupt.check()?;
        done
    })?;
    drop(machine);
    // Files of a run are large.
    let _ = std::fs::remove_dir_all(&folder);
    let metrics = [
        Metric::PerSecond,
        Metric::BytesPerSecond,
        Metric::P50Ns,
        Metric::P99Ns,
        Metric::CpuNsPerOperation,
        Metric::OutsideCpuNsPerOperation,
        Metric::MachineCpuPercent,
    ];
    let layout = Layout { group: &[("case", "case")], row: &[], metrics: &metrics, baseline: Mechanism::VirtioBlk };
    bench.say("\n## Disks of a virtual machine, fio\n")?;
    bench.say(&table::cells(&cells, &layout))?;
    let verdicts = judge(&cells);
    bench.say("\n## Disks: ratios of `partywall blk` to the others (the median of the ratios of the turns)\n")?;
    bench.say(&table::verdicts(&verdicts))?;
    Ok(CommandResults { cells, verdicts })
}

/// Partywall's disk beside each other one.
fn judge(cells: &[Cell]) -> Vec<Verdict> {
    let mut verdicts = Vec::new();
    for case in CASES {
        let find = |mechanism| {
            cells.iter().find(|cell| cell.key.mechanism == mechanism && cell.key.word("case") == Some(case.label))
        };
        let ours = find(Mechanism::PartywallBlk);
        for rival in [Mechanism::QemuStorageDaemon, Mechanism::VirtioBlk] {
            for metric in [case.metric, Metric::CpuNsPerOperation, Metric::OutsideCpuNsPerOperation] {
                let claim = format!("{}, {} : {rival}", case.label, metric.name());
                verdicts.push(Verdict::by_turns(claim, Bound::Report, 1.0, metric, ours, find(rival)));
            }
        }
    }
    verdicts.retain(|verdict| verdict.measured.is_some());
    verdicts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_comparison_of_disks_finds_its_cells() {
        let metrics =
            [Metric::PerSecond, Metric::BytesPerSecond, Metric::CpuNsPerOperation, Metric::OutsideCpuNsPerOperation];
        let all: Figures = metrics.map(|metric| (metric, 2.0)).into();
        let cells: Vec<Cell> = plans(Scale::Full)
            .into_iter()
            .map(|plan| Cell { runs: vec![all.clone()], ..Cell::new(plan.key) })
            .collect();
        assert_eq!(judge(&cells).len(), CASES.len() * 2 * 3);
        assert!(judge(&[]).is_empty());
    }

    #[test]
    fn report_of_fio_becomes_figures() {
        let side = r#"{ "total_ios": 7, "iops": 10.5, "bw_bytes": 43008, "lat_ns": { "percentile": { "50.000000": 5, "99.000000": 9 } } }"#;
        let report = format!(
            r#"note
            {{ "jobs": [ {{ "error": 0, "read": {{ "total_ios": 0 }}, "write": {side} }} ] }}"#
        );
        let read = figures(&report).unwrap();
        assert_eq!([read[&Metric::PerSecond], read[&Metric::P99Ns]], [10.5, 9.0]);
        assert!(figures(r#"{ "jobs": [ { "error": 5 } ] }"#).is_err());
        assert!(figures("").is_err());
    }
}
