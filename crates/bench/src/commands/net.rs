//! The switch for virtual machines, without a machine: `partywall net` beside DPDK's `testpmd`, by the same two drivers, and by DPDK's own
//! driver, virtio-user.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use partywall_vhost::driver::load::{FrameGenerator, RoundTrips};

use super::{CommandResults, RoundTripPace, stretch};
use crate::{
    affinity::{self, Placement},
    args::Scale,
    bench::{Bench, BenchPlan},
    error::{BenchError, During, Result},
    measure::cpu,
    mechanism::{Mechanism, Tuning, WaitMode},
    peers::sources::missing,
    process::GuardedChild,
    report::{
        cell::{Cell, Key},
        metric::Metric,
        plot::{Axis, Chart, Picture, Series},
        table::{self, Layout},
        verdict::{Bound, Verdict},
    },
    task::{Figures, MeasuringWork},
};

/// Bytes of frames: the shortest, those of an ordinary network, and nearly those of the largest.
const FRAMES: [u64; 3] = [64, 1500, 65_000];
/// Bytes of each buffer of `testpmd`: its default, and nearly the most. A frame of 65,000 bytes fits into one of the latter.
const PACKET_BUFFERS: [u64; 2] = [2176, 65_535];
/// How long a switch may take to listen, or to end.
const PATIENCE: Duration = Duration::from_secs(30);
/// A switch that has had no work for this long sleeps.
const SETTLED: Duration = Duration::from_millis(300);
/// The same frames pass over and over, until all are lost: the switch drops what a port does not take in time, as one whose program gets no
/// processor. They are sent again this many times at most.
const STARTS: u32 = 5;
/// The source of the library that seals DPDK's memory.
const SEALED: &str = include_str!("../../peers/sealed.c");
/// The word in front of a rate that `testpmd` shows.
const RATE: &str = "Rx-pps:";
/// How `testpmd` asks for a line.
const PROMPT: &str = "testpmd> ";
/// Bursts of 32 frames that DPDK's driver sends first from each port; they go to and fro until it ends.
const BURSTS: u32 = 16;
/// Microseconds that no measurement takes.
const FOREVER: &str = "1000000000";

/// The settings of a cell, by name.
const FRAME: &str = "frame";
const WAITING: &str = "waiting";
const BUFFER: &str = "buffer";
const PACE: &str = "pace";
const DRIVER: &str = "driver";

/// The drivers of a round trip look for frames.
const POLLING: &str = "polling";
/// They sleep until the switch calls them.
const ASLEEP: &str = "asleep";

/// A switch, and how it waits. `testpmd` has one way.
const SWITCHES: [(Mechanism, WaitMode); 4] = [
    (Mechanism::PartywallNet, WaitMode::Spinning),
    (Mechanism::PartywallNet, WaitMode::Adaptive),
    (Mechanism::PartywallNet, WaitMode::Blocking),
    (Mechanism::Testpmd, WaitMode::Spinning),
];

fn plan(experiment: &str, mechanism: Mechanism, waiting: WaitMode, frame: u64, work: MeasuringWork) -> BenchPlan {
    BenchPlan {
        key: Key::new(experiment, mechanism).with(FRAME, frame).with(WAITING, waiting.name()),
        tuning: Tuning::of(mechanism, frame).waiting(waiting),
        work,
        one_cpu: false,
    }
}

fn streams(scale: Scale) -> Vec<BenchPlan> {
    let (measured, warm_up) = stretch(scale);
    let mut plans = Vec::new();
    for frame in FRAMES {
        let stream = || MeasuringWork::Stream { message: frame, measured, warm_up };
        for (mechanism, waiting) in SWITCHES.into_iter().filter(|(_, waiting)| *waiting != WaitMode::Blocking) {
            let mut one = plan("net-stream", mechanism, waiting, frame, stream());
            if mechanism == Mechanism::Testpmd {
                one.key = one.key.with(BUFFER, PACKET_BUFFERS[0]);
            }
            plans.push(one);
        }
        if frame > PACKET_BUFFERS[0] {
            let mut large = plan("net-stream", Mechanism::Testpmd, WaitMode::Spinning, frame, stream());
            large.key = large.key.with(BUFFER, PACKET_BUFFERS[1]);
            plans.push(large);
        }
    }
    plans
}

fn trips(scale: Scale) -> Vec<BenchPlan> {
    let mut plans = Vec::new();
    for (driver, pace) in
        [(POLLING, RoundTripPace::Tight), (POLLING, RoundTripPace::Light), (ASLEEP, RoundTripPace::Tight)]
    {
        let (count, think) = match (scale, pace) {
            (Scale::Smoke, _) => (10, Duration::ZERO),
            (Scale::Quick, RoundTripPace::Tight) => (20_000, Duration::ZERO),
            (Scale::Full, RoundTripPace::Tight) => (50_000, Duration::ZERO),
            (Scale::Quick, RoundTripPace::Light) => (200, Duration::from_millis(1)),
            (Scale::Full, RoundTripPace::Light) => (500, Duration::from_millis(1)),
        };
        let work = MeasuringWork::RoundTrip { message: FRAMES[0], warm_up: count / 10 + 1, count, think };
        for (mechanism, waiting) in SWITCHES {
            let mut one = plan("net-trip", mechanism, waiting, FRAMES[0], work.clone());
            one.key = one.key.with(PACE, pace.name()).with(DRIVER, driver);
            plans.push(one);
        }
    }
    plans
}

/// Frames that DPDK's own driver sends to and fro.
fn front_ends(scale: Scale) -> Vec<BenchPlan> {
    let (measured, warm_up) = stretch(scale);
    let mut plans = Vec::new();
    for frame in FRAMES.into_iter().filter(|frame| *frame < PACKET_BUFFERS[0]) {
        for mechanism in [Mechanism::PartywallNet, Mechanism::Testpmd] {
            let stream = MeasuringWork::Stream { message: frame, measured, warm_up };
            plans.push(plan("net-user", mechanism, WaitMode::Spinning, frame, stream));
        }
    }
    plans
}

fn idles(scale: Scale) -> Vec<BenchPlan> {
    let measured = if scale == Scale::Smoke { Duration::from_millis(10) } else { Duration::from_secs(1) };
    let idle = MeasuringWork::Paced { message: FRAMES[0], rate: 0, measured };
    let adaptive = plan("net-idle", Mechanism::PartywallNet, WaitMode::Adaptive, FRAMES[0], idle.clone());
    vec![adaptive, plan("net-idle", Mechanism::Testpmd, WaitMode::Spinning, FRAMES[0], idle)]
}

/// A running switch with two ports.
struct RunningSwitch {
    child: GuardedChild,
    ports: [PathBuf; 2],
}

impl RunningSwitch {
    /// Starts it on the processors that the calling thread may use. Its sockets are in `folder`.
    fn start(key: &Key, folder: &Path) -> Result<Self> {
        let (mut command, ports) = match key.mechanism {
            Mechanism::Testpmd => Self::testpmd(key.number(BUFFER).unwrap_or(PACKET_BUFFERS[0]), folder)?,
            _ => Self::partywall(key.word(WAITING), folder)?,
        };
        let log = folder.join("log");
        let output = || File::create(&log).during("making a log of the switch");
        // `testpmd` ends at the end of its input.
        command.stdin(Stdio::piped()).stdout(output()?).stderr(Stdio::null());
        let mut child = GuardedChild::spawn(&mut command)?;
        let begin = Instant::now();
        while !ports.iter().all(|port| port.exists()) {
            let late = || (begin.elapsed() > PATIENCE).then(|| "it does not listen".to_owned());
            if let Some(end) = child.ended().or_else(late) {
                let said = std::fs::read_to_string(&log).unwrap_or_default();
                let line = said.lines().rfind(|line| !line.trim().is_empty()).unwrap_or_default();
                return Err(BenchError::Unavailable(format!("{end}: {line}")));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(Self { child, ports })
    }

    fn partywall(waiting: Option<&str>, folder: &Path) -> Result<(Command, [PathBuf; 2])> {
        let here = std::env::current_exe().during("finding this program")?;
        let program = here.with_file_name("partywall-net");
        if !program.exists() {
            let why = format!("{} is not there: run `make build`", program.display());
            return Err(BenchError::Unavailable(why));
        }
        let mut command = Command::new(program);
        command.arg("--folder").arg(folder).args(["run", "lan", "--port", "a", "--port", "b"]);
        match waiting {
            Some(mode) if mode == WaitMode::Spinning.name() => command.args(["--spin", FOREVER]),
            Some(mode) if mode == WaitMode::Blocking.name() => command.args(["--spin", "0"]),
            _ => &mut command,
        };
        command.env("RUST_LOG", "warn");
        Ok((command, ["a.port", "b.port"].map(|port| folder.join("lan").join(port))))
    }

    fn testpmd(buffer: u64, folder: &Path) -> Result<(Command, [PathBuf; 2])> {
        let ports = ["a", "b"].map(|port| folder.join(port));
        let mut command = dpdk(&[])?;
        for (n, port) in ports.iter().enumerate() {
            command.args(["--vdev", &format!("net_vhost{n},iface={},queues=1", port.display())]);
        }
        command.args(["--", "--forward-mode=io", "--auto-start", "--nb-cores=1", "--disable-link-check"]);
        command.args([&format!("--mbuf-size={buffer}"), "--total-num-mbufs=4096"]);
        Ok((command, ports))
    }
}

/// `testpmd` without devices, on the first processor that the calling thread may use. It also needs these programs, which are in packages.
fn dpdk(more: &[(&str, &'static str)]) -> Result<Command> {
    let missing = missing(&[&[("dpdk-testpmd", "dpdk-dev")], more].concat());
    if !missing.is_empty() {
        return Err(BenchError::Unavailable(format!("it needs Debian's {}", missing.join(" "))));
    }
    let cpu = affinity::allowed()?.first().copied().unwrap_or(0);
    let mut command = Command::new("dpdk-testpmd");
    command.args(["--no-huge", "-m", "512", "--no-pci", "--no-telemetry", "--no-shconf"]);
    // Its first thread only waits; the second one forwards.
    command.args(["--lcores", &format!("0@{cpu},1@{cpu}")]);
    Ok(command)
}

/// DPDK's virtio-user at both ports of a switch. What arrives at one port is sent from the other, so the same frames pass the switch over and
/// over.
struct VirtioUser {
    child: GuardedChild,
    log: PathBuf,
}

impl VirtioUser {
    fn start(switch: &RunningSwitch, frame: u64, folder: &Path) -> Result<Self> {
        let mut command = dpdk(&[("cc", "gcc")])?;
        let (source, library, log) = (folder.join("sealed.c"), folder.join("sealed.so"), folder.join("front-end.log"));
        fs::write(&source, SEALED).during("writing a library that seals memory")?;
        let mut compiler = Command::new("cc");
        compiler.args(["-shared", "-fPIC", "-O2", "-o"]).arg(&library).arg(&source);
        if !compiler.status().during("compiling a library that seals memory")?.success() {
            return Err(BenchError::Unavailable("the library that seals DPDK's memory does not compile here".into()));
        }
        for (n, port) in switch.ports.iter().enumerate() {
            let device = format!("net_virtio_user{n},path={},mac=02:00:00:00:00:0{n},queue_size=1024", port.display());
            command.args(["--vdev", &device]);
        }
        command.args(["--", "-i", "--forward-mode=io", "--nb-cores=1", "--disable-link-check"]);
        command.args(["--eth-peer=0,02:00:00:00:00:01", "--eth-peer=1,02:00:00:00:00:00"]);
        command.args([&format!("--txpkts={frame}"), "--total-num-mbufs=8192"]);
        let output = File::create(&log).during("making a log of the front end")?;
        command.env("LD_PRELOAD", &library).stdin(Stdio::piped()).stdout(output).stderr(Stdio::null());
        Ok(Self { child: GuardedChild::spawn(&mut command)?, log })
    }

    /// Frames that arrive in a second, of both ports. `around` waits for as long as is measured.
    fn rate(mut self, warm_up: Duration, around: impl FnOnce() -> Result<()>) -> Result<f64> {
        let failed = |what: &str| BenchError::transport("dpdk-testpmd", what);
        let input = self.child.input().ok_or_else(|| failed("it has no input"))?;
        let mut input = File::from(input);
        let mut tell = |line: &str| input.write_all(line.as_bytes()).during("writing to `testpmd`");
        // It asks for lines when its ports are set up.
        let begin = Instant::now();
        while !fs::read_to_string(&self.log).during("reading the log of the front end")?.contains(PROMPT) {
            if let Some(end) = self.child.ended() {
                return Err(failed(&end));
            }
            if begin.elapsed() > PATIENCE {
                return Err(failed("it does not ask for lines"));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        tell(&format!("start tx_first {BURSTS}\n"))?;
        std::thread::sleep(SETTLED + warm_up);
        tell("show port stats all\n")?;
        around()?;
        tell("show port stats all\nstop\nquit\n")?;
        let begin = Instant::now();
        while self.child.ended().is_none() {
            if begin.elapsed() > PATIENCE {
                return Err(failed("it does not end"));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        let said = fs::read_to_string(&self.log).during("reading the log of the front end")?;
        last_rates(&said).ok_or_else(|| failed("it shows no rates"))
    }
}

/// The rates of both ports of the second look, together.
fn last_rates(said: &str) -> Option<f64> {
    let rates: Vec<f64> = said
        .split(RATE)
        .skip(1)
        .map(|rest| rest.split_whitespace().next().and_then(|number| number.parse().ok()))
        .collect::<Option<_>>()?;
    let [_, _, a, b] = rates[..] else { return None };
    Some(a + b)
}

/// One run of one measurement, by a separate thread, which is pinned.
fn measure(plan: &BenchPlan, placement: Placement) -> Result<Figures> {
    let Placement { active, passive } = placement;
    if active == passive {
        return Err(BenchError::Unavailable("the switch and its drivers need a processor each".into()));
    }
    let run = || -> Result<Figures> {
        let folder = tempfile::Builder::new().prefix("partywall-bench-net-").tempdir();
        let folder = folder.during("making a temporary folder")?;
        affinity::pin(passive)?;
        let switch = RunningSwitch::start(&plan.key, folder.path())?;
        affinity::pin(active)?;
        let figures = match plan.key.experiment.as_str() {
            "net-user" => drive_front_end(plan, &switch, folder.path()),
            _ => drive(plan, &switch),
        };
        switch.child.terminate(PATIENCE);
        figures
    };
    let joined = std::thread::scope(|scope| scope.spawn(run).join());
    joined.unwrap_or_else(|_| Err(BenchError::Transport("the thread that drives the ports has panicked".into())))
}

fn drive(plan: &BenchPlan, switch: &RunningSwitch) -> Result<Figures> {
    let name = plan.key.mechanism.name();
    let failed = |e| BenchError::transport(name, e);
    let frame = usize::try_from(plan.key.number(FRAME).unwrap_or(FRAMES[0])).unwrap_or(usize::MAX);
    let [a, b] = &switch.ports;
    let mut generator = FrameGenerator::connect(a, b, frame).map_err(failed)?;
    let spent = || cpu::time_of(switch.child.id()).ok_or_else(|| BenchError::transport(name, "it has ended"));
    match plan.work {
        MeasuringWork::Stream { measured, warm_up, .. } => {
            generator.stream(warm_up).map_err(failed)?;
            let before = spent()?;
            let rate = generator.stream(measured).map_err(failed)?;
            let cpu = (spent()?.saturating_sub(before)).as_secs_f64();
            let (frames, bytes) = (rate.frames as f64, rate.frames as f64 * frame as f64);
            Ok(Figures::from([
                (Metric::PerSecond, rate.per_second()),
                (Metric::BytesPerSecond, bytes / rate.seconds),
                (Metric::LostPercent, 100.0 * rate.lost as f64 / (frames + rate.lost as f64)),
                (Metric::MiddleCpuPercent, 100.0 * cpu / rate.seconds),
                (Metric::CpuSecondsPerGigabyte, cpu * 1e9 / bytes),
                (Metric::CpuSecondsPerMillion, cpu * 1e6 / frames),
            ]))
        }
        MeasuringWork::RoundTrip { count, warm_up, think, .. } => {
            let asleep = plan.key.word(DRIVER) == Some(ASLEEP);
            let mut trips = |count: u64| {
                let count = usize::try_from(count).unwrap_or(usize::MAX);
                generator.round_trips(RoundTrips { count, pause: think, asleep }).map_err(failed)
            };
            trips(warm_up)?;
            let mut times = trips(count)?;
            times.sort_unstable();
            let at = |percent: usize| times.get(times.len() * percent / 100).copied().unwrap_or(0) as f64;
            Ok(Figures::from([(Metric::P50Ns, at(50)), (Metric::P99Ns, at(99))]))
        }
        MeasuringWork::Paced { measured, .. } => {
            std::thread::sleep(SETTLED);
            let before = spent()?;
            std::thread::sleep(measured);
            let cpu = spent()?.saturating_sub(before);
            Ok(Figures::from([(Metric::IdleNs, cpu.as_nanos() as f64 / measured.as_secs_f64())]))
        }
        _ => Err(BenchError::Transport("this is not a measurement of a switch".into())),
    }
}

fn drive_front_end(plan: &BenchPlan, switch: &RunningSwitch, folder: &Path) -> Result<Figures> {
    let MeasuringWork::Stream { message, measured, warm_up } = plan.work else {
        return Err(BenchError::Transport("this is not a measurement of a switch".into()));
    };
    let name = plan.key.mechanism.name();
    let spent = || cpu::time_of(switch.child.id()).ok_or_else(|| BenchError::transport(name, "it has ended"));
    for _ in 0..STARTS {
        let mut used = 0.0;
        let rate = VirtioUser::start(switch, message, folder)?.rate(warm_up, || {
            let (before, begin) = (spent()?, Instant::now());
            // In less than that, either program may not run at all on a machine with other work.
            std::thread::sleep(measured.max(SETTLED));
            used = spent()?.saturating_sub(before).as_secs_f64() / begin.elapsed().as_secs_f64();
            Ok(())
        })?;
        if rate > 0.0 {
            return Ok(Figures::from([
                (Metric::PerSecond, rate),
                (Metric::BytesPerSecond, rate * message as f64),
                (Metric::MiddleCpuPercent, 100.0 * used),
                (Metric::CpuSecondsPerMillion, used * 1e6 / rate),
            ]));
        }
    }
    Err(BenchError::transport(name, "no frames of DPDK's virtio-user arrive"))
}

/// Measures and shows.
pub(crate) fn run(bench: &mut Bench) -> Result<CommandResults> {
    let scale = bench.scale();
    let placement = bench.placement;
    bench.say(&format!(
        "# switch on processor {}, both drivers on {}; 1,024 entries a queue, buffers of 2,112 bytes, of 4,160 for large frames",
        placement.passive, placement.active
    ))?;
    let mut plans = [streams(scale), front_ends(scale), trips(scale), idles(scale)].concat();
    if scale == Scale::Smoke {
        // Once for each kind of measurement shows that it works.
        let mut kinds = BTreeSet::new();
        plans.retain(|plan| kinds.insert((plan.key.experiment.clone(), plan.key.mechanism, plan.tuning.waiting)));
    }
    let runs = bench.common.runs();
    let cells = bench.measure_by(plans, runs, |bench, plan| {
        bench.interrupt.check()?;
        measure(plan, placement)
    })?;
    let of = |experiment: &str| -> Vec<Cell> {
        cells.iter().filter(|cell| cell.key.experiment == experiment).cloned().collect()
    };
    let row = [(WAITING, "waiting"), (BUFFER, "its buffers")];
    let layout = |group, row, metrics| Layout { group, row, metrics, baseline: Mechanism::Testpmd };
    let metrics = [
        Metric::PerSecond,
        Metric::BytesPerSecond,
        Metric::MiddleCpuPercent,
        Metric::CpuSecondsPerMillion,
        Metric::CpuSecondsPerGigabyte,
        Metric::LostPercent,
    ];
    bench.say(&format!(
        "\n## Frames from one port to the other, and processor time of the switch\n\n{}",
        table::cells(&of("net-stream"), &layout(&[(FRAME, "bytes")], &row, &metrics))
    ))?;
    let metrics = [Metric::PerSecond, Metric::BytesPerSecond, Metric::MiddleCpuPercent, Metric::CpuSecondsPerMillion];
    bench.say(&format!(
        "\n## Frames that DPDK's virtio-user sends to and fro, its memory sealed, and processor time of the switch\n\n{}",
        table::cells(&of("net-user"), &layout(&[(FRAME, "bytes")], &[(WAITING, "waiting")], &metrics))
    ))?;
    bench.say(&format!(
        "\n## Round trips of {} bytes between two ports\n\n{}",
        FRAMES[0],
        table::cells(
            &of("net-trip"),
            &layout(&[(DRIVER, "drivers"), (PACE, "load")], &[(WAITING, "waiting")], &[Metric::P50Ns, Metric::P99Ns])
        )
    ))?;
    bench.say(&format!(
        "\n## Processor time of an idle switch with two connected ports\n\n{}",
        table::cells(&of("net-idle"), &layout(&[], &[(WAITING, "waiting")], &[Metric::IdleNs]))
    ))?;
    let verdicts = judge(&cells);
    bench.say("\n## What is promised, and what was measured (median of the ratios of the turns of this run; figures are medians)\n")?;
    bench.say(&table::verdicts(&verdicts))?;
    bench.draw(&pictures(&cells))?;
    Ok(CommandResults { cells, verdicts })
}

/// Rates by the size of frames: in frames and in bytes, each way to wait and each size of the peer's buffers by a separate line.
fn pictures(cells: &[Cell]) -> BTreeMap<String, Picture> {
    let ways = [
        (Mechanism::PartywallNet, WaitMode::Spinning, None),
        (Mechanism::PartywallNet, WaitMode::Adaptive, None),
        (Mechanism::Testpmd, WaitMode::Spinning, Some(PACKET_BUFFERS[0])),
        (Mechanism::Testpmd, WaitMode::Spinning, Some(PACKET_BUFFERS[1])),
    ];
    let chart = |title: &str, y, experiment: &str, metric| {
        let line = |(mechanism, waiting, buffer): (Mechanism, WaitMode, Option<u64>)| {
            let is_shown = |cell: &&Cell| {
                let key = &cell.key;
                let is_way = key.word(WAITING) == Some(waiting.name());
                // DPDK's own driver is measured by its default buffers only.
                let is_buffer =
                    key.number(BUFFER) == buffer || (experiment == "net-user" && buffer == Some(PACKET_BUFFERS[0]));
                key.experiment == experiment && is_way && is_buffer
            };
            let some: Vec<Cell> = cells.iter().filter(is_shown).cloned().collect();
            let name = match buffer {
                Some(bytes) if experiment == "net-stream" => format!("{mechanism}, buffers of {bytes}"),
                _ => format!("{mechanism}, {}", waiting.name()),
            };
            let dashed = waiting == WaitMode::Adaptive || buffer == Some(PACKET_BUFFERS[1]);
            Series { name, dashed, ..Series::of(&some, mechanism, FRAME, metric, 1.0) }
        };
        let series = ways.map(line).into();
        Picture::Chart(Chart { title: title.into(), x: ("bytes per frame", Axis::Bytes), y, series })
    };
    let (frames, bytes) = (("frames per second", Axis::CountByTens), ("rate", Axis::RateByTens));
    let used = ("processor of the switch", Axis::Percent);
    BTreeMap::from([
        ("net-frames".into(), chart("Frames through a switch", frames, "net-stream", Metric::PerSecond)),
        ("net-rate".into(), chart("Bytes through a switch", bytes, "net-stream", Metric::BytesPerSecond)),
        ("net-cpu".into(), chart("Processor time of a switch", used, "net-stream", Metric::MiddleCpuPercent)),
        ("net-user".into(), chart("Frames of DPDK's virtio-user", frames, "net-user", Metric::PerSecond)),
    ])
}

fn judge(cells: &[Cell]) -> Vec<Verdict> {
    let find = |experiment: &str, mechanism: Mechanism, settings: &[(&str, &str)]| {
        cells
            .iter()
            .filter(move |cell| cell.key.experiment == experiment && cell.key.mechanism == mechanism)
            .filter(|cell| settings.iter().all(|(name, word)| cell.key.word(name) == Some(*word)))
            .collect::<Vec<_>>()
    };
    let mut verdicts = Vec::new();
    for (frame, limit) in FRAMES.into_iter().zip([0.7, 1.0, 1.0]) {
        let of = |mechanism, waiting: WaitMode| {
            let mut all = find("net-stream", mechanism, &[(WAITING, waiting.name())]);
            all.retain(|cell| cell.key.number(FRAME) == Some(frame));
            // Of several sizes of buffers, the best one counts.
            let rate = |cell: &&Cell| cell.median(Metric::PerSecond).unwrap_or(0.0);
            all.into_iter().max_by(|a, b| rate(a).total_cmp(&rate(b)))
        };
        let peer = of(Mechanism::Testpmd, WaitMode::Spinning);
        for (waiting, bound) in [(WaitMode::Spinning, Bound::AtLeast), (WaitMode::Adaptive, Bound::Report)] {
            let text = format!("frames of {frame} bytes, {}: partywall-net : testpmd", waiting.name());
            let ours = of(Mechanism::PartywallNet, waiting);
            verdicts.push(Verdict::by_turns(text, bound, limit, Metric::PerSecond, ours, peer));
        }
    }
    for frame in FRAMES.into_iter().filter(|frame| *frame < PACKET_BUFFERS[0]) {
        let [ours, theirs] = [Mechanism::PartywallNet, Mechanism::Testpmd].map(|mechanism| {
            find("net-user", mechanism, &[]).into_iter().find(|cell| cell.key.number(FRAME) == Some(frame))
        });
        let text = format!("frames of {frame} bytes of DPDK's virtio-user, spinning: partywall-net : testpmd");
        verdicts.push(Verdict::by_turns(text, Bound::Report, 1.0, Metric::PerSecond, ours, theirs));
    }
    let idle = find("net-idle", Mechanism::PartywallNet, &[]).first().and_then(|cell| cell.median(Metric::IdleNs));
    verdicts.push(Verdict::figure("nanoseconds of processor time in an idle second", Bound::AtMost, 0.0, idle));
    let trip = |mechanism, waiting: WaitMode, pace: RoundTripPace| {
        let settings = [(WAITING, waiting.name()), (PACE, pace.name()), (DRIVER, POLLING)];
        find("net-trip", mechanism, &settings).first().copied()
    };
    for (pace, bound) in [(RoundTripPace::Tight, Bound::AtMost), (RoundTripPace::Light, Bound::Report)] {
        let text = format!("round trip, {}: adaptive : spinning", pace.name());
        let [adaptive, spinning] =
            [WaitMode::Adaptive, WaitMode::Spinning].map(|waiting| trip(Mechanism::PartywallNet, waiting, pace));
        verdicts.push(Verdict::by_turns(text, bound, 1.3, Metric::P50Ns, adaptive, spinning));
    }
    let [ours, theirs] = [Mechanism::PartywallNet, Mechanism::Testpmd]
        .map(|mechanism| trip(mechanism, WaitMode::Spinning, RoundTripPace::Tight));
    let text = "round trip, tight, spinning: partywall-net : testpmd";
    verdicts.push(Verdict::by_turns(text, Bound::Report, 1.0, Metric::P50Ns, ours, theirs));
    verdicts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_claim_finds_its_cells() {
        let scale = Scale::Full;
        let plans = [streams(scale), front_ends(scale), trips(scale), idles(scale)].concat();
        let cells: Vec<Cell> = plans
            .into_iter()
            .map(|plan| {
                let mut cell = Cell::new(plan.key);
                cell.runs.push(Figures::from([Metric::PerSecond, Metric::P50Ns, Metric::IdleNs].map(|m| (m, 1.0))));
                cell
            })
            .collect();
        let verdicts = judge(&cells);
        assert_eq!(verdicts.len(), 12);
        for verdict in verdicts {
            assert!(verdict.measured.is_some(), "{}", verdict.claim);
        }
    }

    #[test]
    fn every_picture_of_the_switch_has_its_lines() {
        let scale = Scale::Full;
        let cells: Vec<Cell> = [streams(scale), front_ends(scale)]
            .concat()
            .into_iter()
            .map(|plan| {
                let metrics = [Metric::PerSecond, Metric::BytesPerSecond, Metric::MiddleCpuPercent];
                Cell { runs: vec![Figures::from(metrics.map(|metric| (metric, 1.0)))], ..Cell::new(plan.key) }
            })
            .collect();
        let points = |name: &str| -> Vec<usize> {
            match &pictures(&cells)[name] {
                Picture::Chart(chart) => chart.series.iter().map(|series| series.points.len()).collect(),
                other => panic!("{other:?}"),
            }
        };
        for name in ["net-frames", "net-rate", "net-cpu"] {
            assert_eq!(points(name), [3, 3, 3, 1], "{name}");
        }
        assert_eq!(points("net-user"), [2, 0, 2, 0]);
    }

    #[test]
    fn rates_of_the_second_look_are_added() {
        let port = |rate: u32| format!("  Throughput (since last show)\n  {RATE}      {rate}          Rx-bps:   7\n");
        let said = [1, 2, 300, 4000].map(port);
        assert_eq!(last_rates(&said.concat()), Some(4300.0));
        assert_eq!(last_rates(&said[..3].concat()), None);
        assert_eq!(last_rates(""), None);
    }

    #[test]
    fn better_buffers_of_the_peer_count() {
        let cells: Vec<Cell> = streams(Scale::Full)
            .into_iter()
            .map(|plan| {
                let large = plan.key.number(BUFFER) == Some(PACKET_BUFFERS[1]);
                let mut cell = Cell::new(plan.key);
                cell.runs.push(Figures::from([(Metric::PerSecond, if large { 4.0 } else { 1.0 })]));
                cell
            })
            .collect();
        let measured: Vec<_> = judge(&cells).iter().take(6).filter_map(|verdict| verdict.measured).collect();
        assert_eq!(measured, [1.0, 1.0, 1.0, 1.0, 0.25, 0.25]);
    }
}
