//! Two virtual machines on this host: what goes between them by windows, beside TCP over virtio-net and a relay on the host.
//!
//! An emulated processor is slower by a factor that differs from instruction to instruction, so of emulated machines only ratios of
//! one run mean anything.

mod calls;
mod cards;
mod disks;
mod files;
mod host_cpu;
pub(super) mod machines;
mod postgresql;
pub(super) mod program;
pub(super) mod programs;
mod rings;
mod setup;

use std::collections::BTreeMap;

use clap::ValueEnum as _;

use calls::{CallPrograms, GuestPeers};
use files::GuestFiles;
use machines::{MeasuredMachines, interruptible};
use programs::MachineServers;

use super::{CommandResults, RoundTripPace, hand_over_plan, round_trip_plan, stream_plan};
use crate::{
    affinity::Placement,
    args::{Common, Scale, VmPart},
    bench::{Bench, BenchPlan},
    error::{BenchError, Result},
    mechanism::{Mechanism, Tuning, WaitMode},
    report::{
        cell::{Cell, Key, Problem},
        metric::Metric,
        plot::{Axis, Chart, Picture, Series},
        table::{self, Layout},
        unit,
        verdict::{Bound, Verdict},
    },
    task::{Figures, MeasuringWork},
};

const NAME: &str = "vm";
const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
/// Also the order of the legend.
const STREAMS: [Mechanism; 6] = [
    Mechanism::TcpVirtio,
    Mechanism::Vsock,
    Mechanism::SerialRelay,
    Mechanism::Partywall,
    Mechanism::PartywallFixed,
    Mechanism::PartywallZeroCopy,
];
/// Streams that are held against TCP, with the least ratio.
const FASTER: [(u64, f64); 2] = [(64 * KIB, 5.0), (MIB, 5.0)];
/// A ring that a program asks for: between machines rings do not grow, and have 1 MiB unless one does.
const FIXED: u64 = 8 * MIB;
/// Both machines on one processor.
const SHARED: &str = "shared";
/// The size of window with which a machine is attached unless told otherwise.
const USUAL: u64 = 64 * MIB;
/// Windows stay in a machine, and its bus has few places.
const MOST_SETUPS: u32 = 3;

fn messages(scale: Scale) -> Vec<u64> {
    match scale {
        Scale::Smoke => vec![64, 64 * KIB],
        Scale::Quick => vec![64, 64 * KIB, MIB],
        Scale::Full => vec![64, 512, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB],
    }
}

/// Bytes handed over by reference, of which the last fills the ring.
fn references(scale: Scale) -> Vec<u64> {
    match scale {
        Scale::Smoke => vec![64, MIB],
        Scale::Quick => vec![64, 64 * MIB],
        Scale::Full => vec![64, 4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB],
    }
}

/// Memory that is plugged in: VMRPC's sizes, and the usual one.
fn rooms(scale: Scale) -> Vec<u64> {
    match scale {
        Scale::Smoke => vec![KIB],
        Scale::Quick => vec![KIB, USUAL],
        Scale::Full => vec![KIB, 10 * KIB, 100 * KIB, MIB, 10 * MIB, USUAL, 100 * MIB],
    }
}

/// Places on a machine's bus: for each window that it owns, and for its doorbell device. QEMU is the slower the more there are.
fn ports(scale: Scale) -> u32 {
    let plugged = rooms(scale).len() as u32 * MOST_SETUPS;
    // To the other machine and the host, the doorbell, and one to spare.
    plugged + 4
}

/// Room for the largest ring, with some to spare for those that are being given back.
fn window(scale: Scale) -> u64 {
    let largest = references(scale).into_iter().max().unwrap_or(MIB);
    2 * largest + 16 * MIB + FIXED
}

/// Round trips; those by way of the host take a hundred times as long as those that stay awake.
fn round_trips(scale: Scale, waiting: WaitMode, mechanism: Mechanism) -> u64 {
    let awake = waiting == WaitMode::Spinning && mechanism.is_partywall();
    match (scale, awake) {
        (Scale::Smoke, _) => 10,
        (Scale::Quick, true) => 10_000,
        (Scale::Quick, false) => 500,
        (Scale::Full, true) => 50_000,
        (Scale::Full, false) => 3_000,
    }
}

fn round_trip(scale: Scale, mechanism: Mechanism, message: u64, waiting: WaitMode) -> BenchPlan {
    let mut plan = round_trip_plan(NAME, scale, mechanism, message, RoundTripPace::Tight, waiting);
    let count = round_trips(scale, waiting, mechanism);
    if let MeasuringWork::RoundTrip { warm_up, count: counted, .. } = &mut plan.work {
        (*warm_up, *counted) = (count / 10 + 1, count);
    }
    plan
}

fn plans(scale: Scale) -> Vec<BenchPlan> {
    let mut plans = Vec::new();
    for message in messages(scale) {
        plans.extend(STREAMS.map(|m| {
            let mut plan = stream_plan(NAME, scale, m, message);
            if m == Mechanism::PartywallFixed {
                plan.tuning = plan.tuning.ring(FIXED);
            }
            plan
        }));
    }
    plans.push(round_trip(scale, Mechanism::TcpVirtio, 64, WaitMode::Blocking));
    plans.push(round_trip(scale, Mechanism::SerialRelay, 64, WaitMode::Blocking));
    for waiting in [WaitMode::Spinning, WaitMode::Adaptive, WaitMode::Blocking] {
        plans.push(round_trip(scale, Mechanism::Partywall, 64, waiting));
    }
    let ring = references(scale).into_iter().max().unwrap_or(MIB);
    for message in references(scale) {
        let mut plan = hand_over_plan(NAME, scale, Mechanism::PartywallZeroCopy, message);
        plan.tuning = Tuning::of(Mechanism::PartywallZeroCopy, message).ring(ring).waiting(WaitMode::Spinning);
        plans.push(plan);
    }
    let shared = |mut plan: BenchPlan| {
        plan.key = plan.key.with("processors", SHARED);
        plan.one_cpu = true;
        plan
    };
    for (message, _) in FASTER.into_iter().filter(|_| scale > Scale::Smoke) {
        plans
            .extend([Mechanism::TcpVirtio, Mechanism::Partywall].map(|m| shared(stream_plan(NAME, scale, m, message))));
    }
    for (mechanism, waiting) in [(Mechanism::TcpVirtio, WaitMode::Blocking), (Mechanism::Partywall, WaitMode::Blocking)]
    {
        plans.push(shared(round_trip(scale, mechanism, 64, waiting)));
    }
    plans
}

/// Memory to be plugged in, as a measurement.
fn setup_plan(mechanism: Mechanism, room: u64) -> BenchPlan {
    BenchPlan {
        key: Key::new(NAME, mechanism).with("total", room),
        tuning: Tuning::of(mechanism, room),
        work: MeasuringWork::Transfer { message: room, total: room, repeats: 1, warm_up: std::time::Duration::ZERO },
        one_cpu: false,
    }
}

/// Boots, measures and shows. Without a choice of parts, all are measured.
pub(crate) fn run(bench: &mut Bench, parts: &[VmPart]) -> Result<CommandResults> {
    let interrupt = bench.interrupt.again()?;
    check_choice(&bench.common, parts)?;
    let result = interruptible(&interrupt, || measure_parts(bench, parts))?;
    // After Ctrl-C, the result is an interruption and not a failed measurement.
    interrupt.check()?;
    result
}

/// Refuses a part with stock machines that was chosen, and of which `--only` leaves nothing.
fn check_choice(common: &Common, chosen: &[VmPart]) -> Result<()> {
    let disks = disks::DISKS.map(|(disk, _)| disk);
    for (part, name, mechanisms) in [(VmPart::Cards, "cards", &cards::SIDES[..]), (VmPart::Disks, "disks", &disks)] {
        if chosen.contains(&part) && !mechanisms.iter().any(|mechanism| common.wants(*mechanism)) {
            let names: Vec<&str> = mechanisms.iter().map(|mechanism| mechanism.name()).collect();
            let why = format!("--part {name} has none of the mechanisms of --only; name one of {}", names.join(", "));
            return Err(BenchError::Usage(why));
        }
    }
    Ok(())
}

/// The parts with Partywall in the machines, and after these the parts with stock machines. Without a choice of parts, all are measured.
fn measure_parts(bench: &mut Bench, chosen: &[VmPart]) -> Result<CommandResults> {
    let parts = if chosen.is_empty() { VmPart::value_variants() } else { chosen };
    let (stock, attached): (Vec<VmPart>, Vec<VmPart>) =
        parts.iter().partition(|part| matches!(part, VmPart::Cards | VmPart::Disks));
    let mut all = if attached.is_empty() { CommandResults::default() } else { measure(bench, &attached)? };
    let mut add = |results: CommandResults| {
        all.cells.extend(results.cells);
        all.verdicts.extend(results.verdicts);
    };
    let scale = bench.scale();
    if stock.contains(&VmPart::Cards) && cards::are_wanted(&bench.common, !chosen.is_empty()) {
        let done = cards::run(bench);
        add(done.or_else(|e| not_measured(bench, "cards", cards::plans(scale), e))?);
    }
    if stock.contains(&VmPart::Disks) && disks::are_wanted(&bench.common) {
        let done = disks::run(bench);
        add(done.or_else(|e| not_measured(bench, "disks", disks::plans(scale), e))?);
    }
    Ok(all)
}

/// Reports a part that ended with an error. Its cells have the reason, and the results of other parts stay.
fn not_measured(bench: &Bench, part: &str, plans: Vec<BenchPlan>, error: BenchError) -> Result<CommandResults> {
    bench.interrupt.check()?;
    let problem = match error {
        BenchError::Interrupted => return Err(error),
        BenchError::Unavailable(why) => Problem::Unavailable(why),
        e => Problem::Failed(e.to_string()),
    };
    eprintln!("partywall-bench: part {part}: {problem}");
    bench.say(&format!("\n## Part {part}: {problem}"))?;
    let problem = Some(problem);
    let plans = plans.into_iter().filter(|plan| bench.common.wants(plan.key.mechanism));
    let cells: Vec<Cell> = plans.map(|plan| Cell { problem: problem.clone(), ..Cell::new(plan.key) }).collect();
    Ok(cells.into())
}

/// Plans of a part, if the part was asked for.
fn if_selected(parts: &[VmPart], part: VmPart, plans: impl FnOnce() -> Vec<BenchPlan>) -> Vec<BenchPlan> {
    if parts.contains(&part) { plans() } else { Vec::new() }
}

fn measure(bench: &mut Bench, parts: &[VmPart]) -> Result<CommandResults> {
    let scale = bench.scale();
    let runs = bench.common.runs();
    let has = |part| parts.contains(&part);
    let call_programs = if has(VmPart::Calls) { CallPrograms::compile(bench) } else { CallPrograms::default() };
    let mut programs = call_programs.files();
    let mut modules: &[&str] = &[];
    let has_programs = has(VmPart::Programs) || has(VmPart::Datagrams);
    if has_programs {
        programs.extend(programs::programs());
    }
    if has(VmPart::Files) {
        programs.extend(files::programs(&bench.common));
        modules = files::modules(&bench.common);
    }
    let mut machines =
        MeasuredMachines::boot(window(scale), ports(scale), programs, modules, &bench.scratch(), &mut |what| {
            bench.progress(what)
        })?;
    bench.say(&machines.describe()?)?;
    if machines.are_emulated() {
        bench.say(
            "# NOTE: the machines' processors are emulated: ratios of figures of this run mean something, the figures themselves do not.\n\
             # The emulator copies in user space much faster than a guest's kernel does, which favours copies in user space.",
        )?;
    }
    let attached = machines.attach()?;
    let mut attach = Cell::new(Key::new(NAME, Mechanism::PmemWindow).with("step", "attach"));
    attach.runs.push(Figures::from([
        (Metric::Seconds, attached.whole.as_secs_f64()),
        (Metric::HostSeconds, attached.host.as_secs_f64()),
        (Metric::GuestSeconds, (attached.whole - attached.host).as_secs_f64()),
    ]));

    let between = bench.placement;
    let one = Placement { passive: between.active, ..between };
    let mut run = |bench: &mut Bench, plan: &BenchPlan| {
        let placement = if plan.one_cpu { one } else { between };
        let awake = plan.tuning.waiting == WaitMode::Spinning && plan.key.mechanism.is_partywall();
        if awake && placement.active == placement.passive {
            return Err(BenchError::Unavailable("it spins, and both machines share a processor".into()));
        }
        let done = machines.run(plan, placement, &bench.interrupt);
        bench.interrupt.check()?;
        done
    };
    let mut cells = bench.measure_by(if_selected(parts, VmPart::Streams, || plans(scale)), runs, &mut run)?;
    let mut of_calls = bench.measure_by(if_selected(parts, VmPart::Calls, || calls::trips(scale)), runs, &mut run)?;
    machines.place(between)?;
    let of_programs = {
        let mut servers = MachineServers::new(machines.guests(), machines.are_emulated());
        let mut plans = if_selected(parts, VmPart::Programs, || programs::plans(scale, false));
        plans.extend(if_selected(parts, VmPart::Datagrams, || programs::plans(scale, true)));
        bench.measure_by(plans, runs, |bench, plan| {
            let done = servers.run(plan, scale, &bench.interrupt);
            bench.interrupt.check()?;
            done
        })?
    };
    of_calls.extend({
        let mut peers = GuestPeers::new(machines.guests(), &call_programs);
        bench.measure_by(if_selected(parts, VmPart::Calls, || calls::plans(scale)), runs, |bench, plan| {
            let done = peers.run(plan, &bench.interrupt);
            bench.interrupt.check()?;
            done
        })?
    });
    let of_files = {
        let mut files = GuestFiles::new(machines.guests());
        bench.measure_by(if_selected(parts, VmPart::Files, || files::plans(scale)), runs, |bench, plan| {
            let done = files.run(bench, plan);
            bench.interrupt.check()?;
            done
        })?
    };
    let setups =
        rooms(scale).into_iter().flat_map(|room| [Mechanism::PmemWindow, Mechanism::Ivshmem].map(|m| (m, room)));
    let setups =
        if_selected(parts, VmPart::Memory, || setups.map(|(mechanism, room)| setup_plan(mechanism, room)).collect());
    let setups = bench.measure_by(setups, runs.min(MOST_SETUPS), |bench, plan| {
        let room = plan.key.number("total").unwrap_or(0);
        let done = match plan.key.mechanism {
            Mechanism::PmemWindow => setup::windows(machines.guests(), room),
            _ => setup::ivshmem(machines.guests(), room),
        };
        bench.interrupt.check()?;
        done
    })?;
    if has(VmPart::Streams) || has(VmPart::Memory) {
        show(bench, &cells, &setups, &attach)?;
    }
    if has_programs {
        show_programs(bench, &of_programs)?;
    }
    calls::show(bench, &of_calls)?;
    files::show(bench, &of_files)?;
    let network = machines.network().kind().to_string();
    cells.extend(setups);
    cells.push(attach);
    let mut verdicts = Vec::new();
    if has(VmPart::Streams) || has(VmPart::Memory) {
        verdicts.extend(judge(&cells, &network));
    }
    if has_programs {
        let judged = programs::judge(&of_programs, &network);
        verdicts.extend(judged.into_iter().filter(|one| has(VmPart::Programs) || one.measured.is_some()));
    }
    verdicts.extend(calls::judge(&of_calls));
    verdicts.extend(files::judge(&of_files));
    bench.say("\n## What is promised, and what was measured (ratios of medians of this run; of calls and file systems, the median of the ratios of its turns)\n")?;
    bench.say(&table::verdicts(&verdicts))?;
    let mut drawn = BTreeMap::new();
    if has(VmPart::Streams) || has(VmPart::Memory) {
        drawn.extend(pictures(&cells));
    }
    if has(VmPart::Files) {
        drawn.insert("vm-fs".into(), files::picture(&of_files));
    }
    bench.draw(&drawn)?;
    cells.extend([of_programs, of_calls, of_files].concat());
    Ok(CommandResults { cells, verdicts })
}

fn show_programs(bench: &Bench, cells: &[Cell]) -> Result<()> {
    let layout = Layout {
        group: &[("program", "program"), ("case", "case")],
        row: &[],
        metrics: &[
            Metric::PerSecond,
            Metric::BytesPerSecond,
            Metric::P50Ns,
            Metric::P99Ns,
            Metric::MaxNs,
            Metric::MachineCpuPercent,
        ],
        baseline: Mechanism::TcpVirtio,
    };
    bench.say("\n## Unmodified programs: the client in one machine, the server in the other\n")?;
    bench.say(&table::cells(cells, &layout))
}

/// A table: its title, what it shows, and of which cells.
type Section<'a> = (&'a str, &'a [Metric], &'a dyn Fn(&Key) -> bool);

fn show(bench: &Bench, cells: &[Cell], setups: &[Cell], attach: &Cell) -> Result<()> {
    let streams = [Metric::BytesPerSecond, Metric::RingBytes];
    let trips = [Metric::P50Ns, Metric::P99Ns];
    let sections: [Section<'_>; 4] = [
        ("Streams, each machine on a separate processor", &streams, &|key| {
            key.word("load").is_none() && !is_shared(key)
        }),
        ("Round trips, each machine on a separate processor", &trips, &|key| {
            key.word("load") == Some("tight") && !is_shared(key)
        }),
        ("Streams and round trips, both machines on one processor", &streams, &|key| {
            key.word("load").is_none() && is_shared(key)
        }),
        ("", &trips, &|key| key.word("load") == Some("tight") && is_shared(key)),
    ];
    for (title, metrics, fits) in sections {
        let some: Vec<Cell> = cells.iter().filter(|cell| fits(&cell.key)).cloned().collect();
        let baseline = Mechanism::TcpVirtio;
        let layout = Layout { group: &[("message", "message")], row: &[("waiting", "waiting")], metrics, baseline };
        let title = if title.is_empty() { String::new() } else { format!("\n## {title}\n") };
        bench.say(&format!("{title}\n{}", table::cells(&some, &layout)))?;
    }
    let handed: Vec<Cell> =
        cells.iter().filter(|cell| cell.key.word("load") == Some("by-reference")).cloned().collect();
    let layout =
        Layout { group: &[], row: &[("message", "message")], metrics: &trips, baseline: Mechanism::PartywallZeroCopy };
    bench.say(&format!(
        "\n## Hand-over by reference, there and back, within one ring\n\n{}",
        table::cells(&handed, &layout)
    ))?;
    let layout = Layout {
        group: &[("total", "size")],
        row: &[],
        metrics: &[Metric::Seconds, Metric::HostSeconds, Metric::GuestSeconds, Metric::MemorySeconds],
        baseline: Mechanism::PmemWindow,
    };
    bench.say(&format!(
        "\n## Memory for both directions plugged into both machines, until programs in both can map it\n\n{}",
        table::cells(setups, &layout)
    ))?;
    let show = |metric: Metric| attach.median(metric).map_or_else(|| "-".into(), |value| metric.show(value));
    bench.say(&format!(
        "\n`partywall vm attach` of the second machine, windows to the first and to the host, agent and all: {}, of which {} until the broker had answered",
        show(Metric::Seconds),
        show(Metric::HostSeconds)
    ))
}

fn is_shared(key: &Key) -> bool {
    key.word("processors") == Some(SHARED)
}

/// Looks a figure up by all its settings.
fn find(cells: &[Cell], metric: Metric, key: &Key) -> Option<f64> {
    cells.iter().find(|cell| cell.key == *key)?.median(metric)
}

fn judge(cells: &[Cell], network: &str) -> Vec<Verdict> {
    let one = |key: Key, shared: bool| if shared { key.with("processors", SHARED) } else { key };
    let rate = |mechanism, message: u64, shared| {
        find(cells, Metric::BytesPerSecond, &one(Key::new(NAME, mechanism).with("message", message), shared))
    };
    let trip = |mechanism, message: u64, load: &str, waiting: WaitMode, shared| {
        let key = Key::new(NAME, mechanism).with("message", message).with("load", load);
        find(cells, Metric::P50Ns, &one(key.with("waiting", waiting.name()), shared))
    };
    let mut verdicts = Vec::new();
    for (shared, bound, note) in [(false, Bound::AtLeast, ""), (true, Bound::Report, ", one processor")] {
        for (message, limit) in FASTER {
            let claim = format!("stream of {}{note} : TCP over {network}", unit::bytes(message));
            let [ours, theirs] = [Mechanism::Partywall, Mechanism::TcpVirtio].map(|m| rate(m, message, shared));
            verdicts.push(Verdict::ratio(claim, bound, limit, Metric::BytesPerSecond, ours, theirs));
        }
    }
    for (mechanism, how) in [
        (Mechanism::PartywallFixed, format!("ring of {}", unit::bytes(FIXED))),
        (Mechanism::PartywallZeroCopy, "in place".into()),
    ] {
        for (message, limit) in FASTER {
            let claim = format!("stream of {}, {how} : TCP over {network}", unit::bytes(message));
            let (ours, theirs) = (rate(mechanism, message, false), rate(Mechanism::TcpVirtio, message, false));
            verdicts.push(Verdict::ratio(claim, Bound::Report, limit, Metric::BytesPerSecond, ours, theirs));
        }
    }
    let tcp = |shared| trip(Mechanism::TcpVirtio, 64, "tight", WaitMode::Blocking, shared);
    for (what, waiting, bound, limit, shared) in [
        ("awake", WaitMode::Spinning, Bound::AtMost, 0.1, false),
        ("adaptive", WaitMode::Adaptive, Bound::Report, 1.0, false),
        ("blocking", WaitMode::Blocking, Bound::AtMost, 1.0, false),
        ("blocking, one processor", WaitMode::Blocking, Bound::Report, 1.0, true),
    ] {
        let ours = trip(Mechanism::Partywall, 64, "tight", waiting, shared);
        let claim = format!("round trip of 64 B, {what} : TCP over {network}");
        verdicts.push(Verdict::ratio(claim, bound, limit, Metric::P50Ns, ours, tcp(shared)));
    }
    let handed = |message| trip(Mechanism::PartywallZeroCopy, message, "by-reference", WaitMode::Spinning, false);
    let largest = references(Scale::Full).into_iter().max().unwrap_or(MIB);
    let claim = format!("hand-over of {} by reference : of 64 B", unit::bytes(largest));
    verdicts.push(Verdict::ratio(claim, Bound::AtMost, 1.2, Metric::P50Ns, handed(largest), handed(64)));
    let slowest = references(Scale::Full).into_iter().filter_map(handed).reduce(f64::max);
    let claim = "hand-over of the slowest of all sizes : of 64 B";
    verdicts.push(Verdict::ratio(claim, Bound::Report, 1.2, Metric::P50Ns, slowest, handed(64)));
    let setup = |metric, room: u64| find(cells, metric, &Key::new(NAME, Mechanism::PmemWindow).with("total", room));
    let attach = |metric| find(cells, metric, &Key::new(NAME, Mechanism::PmemWindow).with("step", "attach"));
    let usual = unit::bytes(USUAL);
    verdicts.extend([
        Verdict::figure(
            format!("a pair of windows of {usual} plugged in and seen, seconds"),
            Bound::AtMost,
            2.0,
            setup(Metric::Seconds, USUAL),
        ),
        Verdict::figure(
            format!("of that the host's part, seconds, {usual}"),
            Bound::AtMost,
            0.05,
            setup(Metric::HostSeconds, USUAL),
        ),
        Verdict::figure(
            format!("the same, {}", unit::bytes(KIB)),
            Bound::Report,
            0.05,
            setup(Metric::HostSeconds, KIB),
        ),
        Verdict::figure(
            "`vm attach` of a second machine until all is seen, seconds",
            Bound::AtMost,
            2.0,
            attach(Metric::Seconds),
        ),
    ]);
    verdicts
}

fn pictures(cells: &[Cell]) -> BTreeMap<String, Picture> {
    let streams: Vec<Cell> =
        cells.iter().filter(|cell| cell.key.word("load").is_none() && !is_shared(&cell.key)).cloned().collect();
    let of = |mechanism, x, metric, scale| Series::of(&streams, mechanism, x, metric, scale);
    let rates = Chart {
        title: "Between two virtual machines: streams".into(),
        x: ("bytes per message", Axis::Bytes),
        y: ("rate", Axis::RateByTens),
        series: STREAMS.map(|m| of(m, "message", Metric::BytesPerSecond, 1.0)).into(),
    };
    let mut times = Vec::new();
    for mechanism in [Mechanism::PmemWindow, Mechanism::Ivshmem] {
        let whole = of(mechanism, "total", Metric::Seconds, 1e9);
        let mut host = of(mechanism, "total", Metric::HostSeconds, 1e9);
        host.name = format!("{mechanism}, host");
        host.dashed = true;
        times.extend([whole, host]);
    }
    let setup = Chart {
        title: "Memory plugged into two running machines".into(),
        x: ("bytes", Axis::Bytes),
        y: ("time", Axis::TimeByTens),
        series: times,
    };
    BTreeMap::from([("vm-stream".into(), Picture::Chart(rates)), ("vm-setup".into(), Picture::Chart(setup))])
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::args::{Cli, Command};

    #[test]
    fn every_claim_finds_its_figures() {
        let setups = rooms(Scale::Full)
            .into_iter()
            .flat_map(|room| [Mechanism::PmemWindow, Mechanism::Ivshmem].map(|mechanism| setup_plan(mechanism, room)));
        let keys = plans(Scale::Full).into_iter().chain(setups).map(|plan| plan.key);
        let attach = Key::new(NAME, Mechanism::PmemWindow).with("step", "attach");
        let mut cells: Vec<Cell> = keys.chain([attach]).map(Cell::new).collect();
        for cell in &mut cells {
            let all = [Metric::BytesPerSecond, Metric::P50Ns, Metric::Seconds, Metric::HostSeconds];
            cell.runs = vec![all.map(|metric| (metric, 2.0)).into_iter().collect()];
        }
        let mut keys: Vec<&Key> = cells.iter().map(|cell| &cell.key).collect();
        keys.sort();
        keys.dedup();
        assert_eq!(keys.len(), cells.len(), "two measurements have the same name");
        for verdict in judge(&cells, "a network") {
            assert!(verdict.measured.is_some(), "{} has no figures", verdict.claim);
        }
        assert!(judge(&[], "").iter().all(|verdict| verdict.measured.is_none()));
    }

    #[test]
    fn chosen_part_without_wanted_mechanism_is_refused() {
        let choose = |line: &str| {
            let cli = Cli::try_parse_from(line.split(' ')).unwrap();
            let Command::Vm { part: parts, common } = cli.command else { panic!("{line}") };
            (check_choice(&common, &parts), cards::are_wanted(&common, !parts.is_empty()))
        };
        for (line, are_cards_wanted) in [
            ("b vm --part cards", true),
            ("b vm --part cards --only tcp-virtio", true),
            ("b vm --only tcp-virtio", false),
            ("b vm --part disks --only virtio-blk", false),
        ] {
            let (done, wanted) = choose(line);
            assert!(done.is_ok() && wanted == are_cards_wanted, "{line}: {done:?}");
        }
        for (line, missing) in [
            ("b vm --part cards --only pipe", "tcp-virtio, partywall-net"),
            ("b vm --part disks --only tcp", "virtio-blk"),
        ] {
            let Err(BenchError::Usage(why)) = choose(line).0 else { panic!("{line} is measured") };
            assert!(why.contains(missing), "{why}");
        }
    }

    #[test]
    fn largest_ring_fits_window_and_all_windows_fit_machine() {
        for scale in [Scale::Smoke, Scale::Quick, Scale::Full] {
            assert!(references(scale).into_iter().max().unwrap() < window(scale) / 2);
        }
        // A machine's bus has 32 places, of which some are taken.
        assert!(rooms(Scale::Full).len() as u32 * MOST_SETUPS + 6 <= 28);
    }
}
