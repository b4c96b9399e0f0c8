//! Network cards of virtual machines that have nothing of Partywall inside: a switch of `partywall net` beside tap devices and a bridge.
//!
//! ```text
//!   machine a, the clients                                machine b, the servers
//!   eth0 === tap === bridge of the host's kernel === tap === eth0
//!   eth1 === vhost-user === partywall net ====== vhost-user === eth1
//! ```
//!
//! Both machines have both cards all the time, and the programs take turns.

use std::{collections::BTreeMap, net::Ipv4Addr, time::Duration};

use partywall_lab::{Guest, GuestOptions, ImageOptions, Lab, NetSwitch, Network};

use super::{
    host_cpu::HostCpu,
    machines::{PROGRAM, fault, place},
    programs::{self, IPERF3, MachineApp, MachineServers, SOCKPERF},
};
use crate::{
    affinity,
    apps::{App, AppAddress, Case, accounts::Accounts, network},
    args::{Common, Scale},
    bench::{Bench, BenchPlan},
    commands::CommandResults,
    error::{BenchError, During, Result},
    mechanism::{Mechanism, Tuning},
    report::{
        cell::{Cell, Key},
        metric::Metric,
        plot::{Axis, Chart, Picture, Series},
        table::{self, Layout},
        verdict::{Bound, Verdict},
    },
    task::{Figures, MeasuringWork},
};

/// The ordinary card, and the card on the switch.
pub(super) const SIDES: [Mechanism; 2] = [Mechanism::TcpVirtio, Mechanism::PartywallNet];
/// The names of the machines and of their ports, with the last part of the cards' addresses.
const NAMES: [(&str, u8); 2] = [("a", 1), ("b", 2)];
/// MiB of a machine.
const MEMORY: u32 = 512;
/// The first bytes of the datagrams that are counted.
const DATAGRAM: &str = "UDP, 64 B";

static APPS: [MachineApp; 3] = [
    MachineApp { app: App { cases: iperf3_cases, figures: iperf3_figures, ..network::IPERF3 }, cases: &[], ..IPERF3 },
    SOCKPERF,
    // This program knows nothing of Partywall when it is called so.
    MachineApp {
        app: App {
            name: FLOW,
            needs: &[],
            cases: flow_cases,
            client: flow_client,
            figures: flow_figures,
            ..IPERF3.app
        },
        cases: &[],
        server: |_, port, _| Ok(format!("{PROGRAM} flow serve 0.0.0.0 {port}")),
    },
];
const FLOW: &str = "flow";
/// The kinds of flows, with the words for them, and whether they are datagrams.
const FLOWS: [(&str, &str, bool); 4] = [
    ("stream", "TCP stream", false),
    ("rounds", "TCP round trip", false),
    ("udp-stream", "UDP stream", true),
    ("udp-rounds", "UDP round trip", true),
];
const SIZES: [u64; 6] = [64, 256, 1 << 10, 4 << 10, 16 << 10, 64 << 10];
/// A datagram holds less than 64 KiB.
const LARGEST_DATAGRAM: u64 = 60_000;

/// Program, case, figure, and the least or greatest ratio to the ordinary card.
const TARGETS: &[(&str, &str, Metric, Bound, f64)] = &[
    ("iperf3", "TCP, 1 stream", Metric::BytesPerSecond, Bound::AtLeast, 1.4),
    ("iperf3", "TCP, 4 streams", Metric::BytesPerSecond, Bound::AtLeast, 1.3),
    ("sockperf", "TCP, awake", Metric::P50Ns, Bound::AtMost, 0.7),
    ("sockperf", "TCP, 200 a second: both sleep", Metric::P50Ns, Bound::AtMost, 0.7),
    ("iperf3", DATAGRAM, Metric::PerSecond, Bound::AtLeast, 2.0),
    ("iperf3", "TCP, 1 stream", Metric::CpuSecondsPerGigabyte, Bound::AtMost, 0.5),
    ("iperf3", "TCP, 4 streams", Metric::CpuSecondsPerGigabyte, Bound::AtMost, 0.5),
    ("iperf3", "TCP, 1 stream", Metric::OutsideCpuSecondsPerGigabyte, Bound::Report, 0.5),
    ("iperf3", "TCP, 4 streams", Metric::OutsideCpuSecondsPerGigabyte, Bound::Report, 0.5),
    ("sockperf", "UDP, awake", Metric::P50Ns, Bound::Report, 0.7),
    ("sockperf", "UDP, 200 a second: both sleep", Metric::P50Ns, Bound::Report, 0.7),
    ("iperf3", "UDP, 8 KiB", Metric::BytesPerSecond, Bound::Report, 1.0),
];

fn iperf3_cases(_: Scale) -> Vec<Case> {
    vec![
        Case::new("TCP, 1 stream", &["-P", "1", "-l", "128K"]),
        Case::new("TCP, 4 streams", &["-P", "4", "-l", "128K"]),
        Case::new(DATAGRAM, &["-u", "-b", "0", "-l", "64"]),
        Case::new("UDP, 1400 B", &["-u", "-b", "0", "-l", "1400"]),
        Case::new("UDP, 8 KiB", &["-u", "-b", "0", "-l", "8192"]),
    ]
}

/// Datagrams are counted as well.
fn iperf3_figures(case: &Case, report: &str) -> Result<Figures> {
    let mut figures = (network::IPERF3.figures)(case, report)?;
    if let ("-u", Ok(size)) = (case.word(0), case.word(4).parse::<f64>()) {
        let rate = figures.get(&Metric::BytesPerSecond).copied().unwrap_or(0.0);
        figures.insert(Metric::PerSecond, rate / size);
    }
    Ok(figures)
}

fn flow_cases(_: Scale) -> Vec<Case> {
    let case = |(kind, words, is_udp): (&str, &str, bool), size: u64| {
        let size = if is_udp { size.min(LARGEST_DATAGRAM) } else { size };
        Case::new(format!("{words}, {size} B"), &[kind, &size.to_string()])
    };
    FLOWS.into_iter().flat_map(|flow| SIZES.map(|size| case(flow, size))).collect()
}

fn flow_client(at: &AppAddress, case: &Case, scale: Scale) -> Vec<String> {
    let millis = match (scale, case.word(0)) {
        (Scale::Smoke, _) => 500,
        // Longer than the time in which processor time counts, see `HostCpu`.
        (_, "stream" | "udp-stream") => 3_500,
        _ => 2_000,
    };
    let to = format!("{}:{}", at.address, at.port());
    [PROGRAM, "flow", case.word(0), &to, case.word(1), &millis.to_string()].map(str::to_owned).into()
}

fn flow_figures(_: &Case, report: &str) -> Result<Figures> {
    serde_json::from_str(report).map_err(|e| BenchError::transport("reading figures of a flow", e))
}

/// The cases of a program at a scale.
fn cases(app: &App, scale: Scale) -> Vec<Case> {
    let all = (app.cases)(Scale::Full);
    let sizes: &[u64] = match scale {
        Scale::Smoke => &SIZES[..1],
        Scale::Quick => &[64, 1 << 10, 16 << 10],
        Scale::Full => &SIZES,
    };
    match (app.name, scale) {
        (FLOW, Scale::Smoke) => all.into_iter().take(1).collect(),
        (FLOW, _) => {
            let of_size = |case: &Case| case.word(1).parse().is_ok_and(|n| sizes.contains(&n) || n == LARGEST_DATAGRAM);
            all.into_iter().filter(|case| of_size(case) && (scale == Scale::Full || case.word(1) != "60000")).collect()
        }
        ("iperf3", Scale::Smoke) => all.into_iter().take(1).collect(),
        (_, Scale::Smoke) => Vec::new(),
        _ => all
            .into_iter()
            .filter(|case| app.name != SOCKPERF.app.name || SOCKPERF.cases.contains(&&*case.label))
            .collect(),
    }
}

fn key(app: &App, case: &Case, mechanism: Mechanism) -> Key {
    let key = programs::key(app, case, mechanism).with("part", "cards");
    match case.word(1).parse::<u64>() {
        Ok(size) if app.name == FLOW => key.with("flow", case.word(0)).with("message", size),
        _ => key,
    }
}

pub(super) fn plans(scale: Scale) -> Vec<BenchPlan> {
    let of_case = |app: &App, case: &Case| {
        SIDES.map(|mechanism| BenchPlan {
            key: key(app, case, mechanism),
            tuning: Tuning::of(mechanism, 0),
            work: MeasuringWork::Transfer { message: 0, total: 0, repeats: 1, warm_up: Duration::ZERO },
            one_cpu: false,
        })
    };
    APPS.iter().flat_map(|it| cases(&it.app, scale).into_iter().flat_map(move |case| of_case(&it.app, &case))).collect()
}

/// Two machines with two cards each. Dropping it ends them.
struct CardMachines {
    // The machines end before what serves them.
    guests: [Guest; 2],
    switch: NetSwitch,
    network: Network,
    lab: Lab,
}

/// The address of a card on the switch.
fn address(number: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 99, 0, number)
}

impl CardMachines {
    fn boot(bench: &Bench) -> Result<Self> {
        let me = std::env::current_exe().during("finding this program")?;
        let image = ImageOptions::default().program(me, PROGRAM);
        let programs = programs::needed(&APPS).into_iter();
        let lab = Lab::new("bench-vm-cards", &programs.fold(image, |image, (path, name)| image.program(path, &name)));
        let (lab, network) = (lab.map_err(fault)?, Network::new().map_err(fault)?);
        let switch = NetSwitch::start(&NAMES.map(|(name, _)| name)).map_err(fault)?;
        bench.progress("two machines boot, with cards of `partywall net` and of tap and bridge");
        let boot = |(name, number): (&str, u8)| -> Result<Guest> {
            let card = switch.card(name, &format!("52:54:00:99:00:{number:02x}"));
            let options = GuestOptions::new(name).slots(0).memory(MEMORY).shared_memory();
            let options = options.network(&network).map_err(fault)?.arguments(card);
            let guest = lab.boot(options).map_err(fault)?;
            let line = format!("ip address add {}/24 dev eth1 && ip link set eth1 up", address(number));
            guest.shell(&line).map_err(fault)?;
            Ok(guest)
        };
        let guests = [boot(NAMES[0])?, boot(NAMES[1])?];
        Ok(Self { guests, switch, network, lab })
    }

    fn guests(&self) -> [&Guest; 2] {
        [&self.guests[0], &self.guests[1]]
    }

    fn describe(&self) -> Result<String> {
        let [a, b] = self.guests();
        let kernel = a.shell("uname -r").map_err(fault)?;
        Ok(format!(
            "# cards: two machines without anything of Partywall, {}, Linux {kernel}, one virtual processor each, up in {:.1} and {:.1} s\n\
             # tcp-virtio: {}; partywall-net: virtio-net, vhost-user and a switch, without MSI-X vectors in the card\n\
             # Processor time of the host (cpu s/GB): user and system time of both QEMUs, of the switch, and of the kernel's threads vhost-* and\n\
             # ksoftirqd, in the middle of each run. The idle switch is counted with the other card as well. outside s/GB: the same without the\n\
             # threads of the virtual processors. machine cpu: all that the host was busy with, other programs included.",
            self.lab.accel(),
            a.booted_in().as_secs_f64(),
            b.booted_in().as_secs_f64(),
            self.network.kind(),
        ))
    }
}

/// Whether the options ask for the card on the switch. The ordinary card alone is measured by the other parts.
pub(super) fn are_wanted(common: &Common, is_chosen: bool) -> bool {
    // TCP over tap and bridge is measured in other parts too, so it alone is measured here only if this part was chosen.
    common.wants(Mechanism::PartywallNet) || is_chosen && SIDES.into_iter().any(|side| common.wants(side))
}

/// Boots, measures and shows.
pub(super) fn run(bench: &mut Bench) -> Result<CommandResults> {
    let (scale, runs) = (bench.scale(), bench.common.runs());
    let plans = plans(scale);
    let machines = CardMachines::boot(bench)?;
    bench.say(&machines.describe()?)?;
    let is_emulated = machines.lab.accel() == partywall_lab::Accel::Tcg;
    place(machines.guests(), bench.placement)?;
    let cpu = HostCpu::of(&machines.guests(), &[machines.switch.pid()])?;
    let mut servers = MachineServers::of(&APPS, machines.guests(), Some(address(NAMES[1].1)), is_emulated);
    let processors = affinity::allowed()?.len();
    // A short run would be about its beginning.
    let length = if scale == Scale::Smoke { scale } else { Scale::Full };
    let cells = bench.measure_by(plans, runs, |bench, plan| {
        servers.prepare(plan, &bench.interrupt)?;
        let accounts = Accounts::now(machines.guests()[1].pid());
        let (done, busy) = cpu.during(|| servers.run(plan, length, &bench.interrupt));
        let host = accounts.since(processors);
        bench.interrupt.check()?;
        let mut figures = done?;
        figures.remove(&Metric::CpuNsPerOperation);
        figures.extend(host.into_iter().filter(|(metric, _)| *metric == Metric::MachineCpuPercent));
        if let Some(rate) = figures.get(&Metric::BytesPerSecond).copied().filter(|rate| *rate > 0.0) {
            figures.insert(Metric::CpuSecondsPerGigabyte, busy.all * 1e9 / rate);
            figures.insert(Metric::OutsideCpuSecondsPerGigabyte, busy.outside * 1e9 / rate);
        }
        Ok(figures)
    })?;
    drop(servers);
    show(bench, &cells)?;
    let verdicts = judge(&cells, &machines.network.kind().to_string());
    bench.say("\n## Cards: what is promised, and what was measured (the median of the ratios of the turns)\n")?;
    bench.say(&table::verdicts(&verdicts))?;
    bench.draw(&pictures(&cells))?;
    Ok(CommandResults { cells, verdicts })
}

fn show(bench: &Bench, cells: &[Cell]) -> Result<()> {
    let is_time = |cell: &Cell| match cell.key.word("flow") {
        Some(flow) => flow.ends_with("rounds"),
        None => cell.key.word("program") == Some(SOCKPERF.app.name),
    };
    let rates = [
        Metric::BytesPerSecond,
        Metric::PerSecond,
        Metric::LostPercent,
        Metric::CpuSecondsPerGigabyte,
        Metric::OutsideCpuSecondsPerGigabyte,
        Metric::MachineCpuPercent,
    ];
    let times = [Metric::P50Ns, Metric::P99Ns, Metric::MachineCpuPercent];
    for (title, metrics, wants_times) in [("rates", &rates[..], false), ("round trips", &times[..], true)] {
        let some: Vec<Cell> = cells.iter().filter(|cell| is_time(cell) == wants_times).cloned().collect();
        if some.is_empty() {
            continue;
        }
        let baseline = Mechanism::TcpVirtio;
        let layout = Layout { group: &[("program", "program"), ("case", "case")], row: &[], metrics, baseline };
        bench.say(&format!("\n## Cards of virtual machines, unmodified programs: {title}\n"))?;
        bench.say(&table::cells(&some, &layout))?;
    }
    Ok(())
}

/// The card on the switch beside the ordinary one.
fn judge(cells: &[Cell], network: &str) -> Vec<Verdict> {
    let mut verdicts = Vec::new();
    for (program, label, metric, bound, limit) in TARGETS {
        let find = |mechanism| {
            cells.iter().find(|cell| {
                let key = &cell.key;
                key.mechanism == mechanism && key.word("program") == Some(program) && key.word("case") == Some(label)
            })
        };
        let claim = format!("{program} {label}, {} : {network}", metric.name());
        let (ours, theirs) = (find(Mechanism::PartywallNet), find(Mechanism::TcpVirtio));
        verdicts.push(Verdict::by_turns(claim, *bound, *limit, *metric, ours, theirs));
    }
    verdicts
}

/// Rates and round trips by the size of messages.
fn pictures(cells: &[Cell]) -> BTreeMap<String, Picture> {
    let series = |flows: [&str; 2], metric| -> Vec<Series> {
        let one = |flow: &str, mechanism| {
            let some: Vec<Cell> = cells.iter().filter(|cell| cell.key.word("flow") == Some(flow)).cloned().collect();
            let mut series = Series::of(&some, mechanism, "message", metric, 1.0);
            let is_udp = flow.starts_with("udp");
            series.name = format!("{mechanism}, {}", if is_udp { "UDP" } else { "TCP" });
            series.dashed = is_udp;
            series
        };
        flows.into_iter().flat_map(|flow| SIDES.map(|side| one(flow, side))).collect()
    };
    let chart = |title: &str, y, series| {
        Picture::Chart(Chart { title: title.into(), x: ("bytes per message", Axis::Bytes), y, series })
    };
    let rates = series(["stream", "udp-stream"], Metric::BytesPerSecond);
    let times = series(["rounds", "udp-rounds"], Metric::P50Ns);
    BTreeMap::from([
        ("vm-cards-stream".into(), chart("Cards of two virtual machines: streams", ("rate", Axis::RateByTens), rates)),
        (
            "vm-cards-rounds".into(),
            chart("Cards of two virtual machines: round trips", ("time", Axis::TimeByTens), times),
        ),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_target_of_cards_finds_its_cells() {
        for scale in [Scale::Quick, Scale::Full] {
            let all = TARGETS.iter().map(|target| (target.2, 1.0)).collect::<Figures>();
            let cells: Vec<Cell> =
                plans(scale).into_iter().map(|plan| Cell { runs: vec![all.clone()], ..Cell::new(plan.key) }).collect();
            for verdict in judge(&cells, "") {
                assert!(verdict.measured.is_some(), "{}", verdict.claim);
            }
        }
        assert!(judge(&[], "").iter().all(|verdict| verdict.measured.is_none()));
    }

    #[test]
    fn plans_of_cards_have_unique_keys_and_pairs() {
        for (scale, pairs) in [(Scale::Smoke, 2), (Scale::Quick, 5 + 4 + 12), (Scale::Full, 5 + 4 + 24)] {
            let mut keys: Vec<Key> = plans(scale).into_iter().map(|plan| plan.key).collect();
            let count = keys.len();
            keys.sort();
            keys.dedup();
            assert_eq!((keys.len(), count), (2 * pairs, 2 * pairs), "{scale:?}");
        }
    }

    #[test]
    fn datagrams_of_iperf3_are_counted() {
        let case = iperf3_cases(Scale::Full).into_iter().find(|case| case.label == DATAGRAM).unwrap();
        let report = r#"{ "end": { "sum": { "bits_per_second": 51200.0, "lost_percent": 50.0 } } }"#;
        assert_eq!(iperf3_figures(&case, report).unwrap()[&Metric::PerSecond], 50.0);
    }
}
