//! Unmodified programs, the server in one machine and the client in the other: each beside itself over virtio-net, tap and bridge.

use std::{net::Ipv4Addr, path::PathBuf, time::Duration};

use partywall_lab::{Guest, Running};
use partywall_protocol::environment::LIBRARY;

use super::{
    NAME,
    machines::fault,
    postgresql,
    program::{await_listener, execute, with_library},
    rings,
};
use crate::{
    affinity,
    apps::{App, AppAddress, Case, accounts::Accounts, ask_until_measured, databases, network, site, web},
    args::Scale,
    bench::BenchPlan,
    error::{BenchError, Result},
    interrupt::Interrupt,
    mechanism::{Mechanism, Tuning},
    report::{
        cell::{Cell, Key},
        metric::Metric,
        verdict::{Bound, Verdict},
    },
    task::{Figures, MeasuringWork},
};

/// Without the library, and with it.
const SIDES: [Mechanism; 2] = [Mechanism::TcpVirtio, Mechanism::Transparent];
/// The first port. Each server has two, of which most use one.
const FIRST_PORT: u16 = 7000;
/// How many times fewer requests are sent to an emulated machine: enough to last some seconds by TCP.
const SLOWNESS: u32 = 6;

/// A program that is measured between machines.
pub(super) struct MachineApp {
    pub(super) app: App,
    /// The cases out of the program's own.
    pub(super) cases: &'static [&'static str],
    /// Brings the server's files into its machine. Returns the line that becomes the server, on all addresses of the machine.
    pub(super) server: fn(&Guest, u16, &Interrupt) -> Result<String>,
}

pub(super) const IPERF3: MachineApp = MachineApp {
    app: network::IPERF3,
    cases: &["TCP, 1 stream", "TCP, 4 streams", "UDP, 8 KiB"],
    server: |_, port, _| Ok(format!("iperf3 -s -p {port}")),
};

pub(super) const SOCKPERF: MachineApp = MachineApp {
    app: network::SOCKPERF,
    cases: &["TCP, awake", "TCP, 200 a second: both sleep", "UDP, awake", "UDP, 200 a second: both sleep"],
    // A server for each protocol, since a server for both would wait for sockets in another way.
    server: |_, port, _| {
        let server = format!("sockperf sr -i 0.0.0.0 -p {port}");
        Ok(format!("sh -c '{server} & exec {server} --tcp'"))
    },
};

static ALL: [MachineApp; 5] = [
    MachineApp {
        app: databases::REDIS,
        cases: &["GET 3 B -c 1 -P 1", "GET 3 B -c 50 -P 1", "SET 3 B -c 50 -P 16", "GET 4096 B -c 50 -P 1"],
        server: |_, port, _| {
            Ok(format!("redis-server --bind 0.0.0.0 --port {port} --save '' --appendonly no --protected-mode no"))
        },
    },
    MachineApp { app: web::NGINX, cases: &["612 B, kept, 1", "612 B, kept, 50", "64 KiB, kept, 50"], server: nginx },
    MachineApp {
        app: databases::POSTGRESQL,
        cases: &["select prepared -c 8", "select prepared -c 1"],
        server: postgresql::install,
    },
    IPERF3,
    SOCKPERF,
];

/// Least or greatest ratios to TCP over virtio-net.
const TARGETS: &[(&str, &str, Metric, Bound, f64)] = &[
    ("redis", "GET 3 B -c 1 -P 1", Metric::PerSecond, Bound::AtLeast, 5.0),
    ("redis", "GET 3 B -c 50 -P 1", Metric::PerSecond, Bound::AtLeast, 3.0),
    ("nginx", "612 B, kept, 1", Metric::PerSecond, Bound::AtLeast, 3.0),
    ("nginx", "612 B, kept, 50", Metric::PerSecond, Bound::AtLeast, 3.0),
    ("iperf3", "TCP, 1 stream", Metric::BytesPerSecond, Bound::AtLeast, 4.0),
    ("sockperf", "TCP, awake", Metric::P50Ns, Bound::AtMost, 0.05),
    ("sockperf", "TCP, 200 a second: both sleep", Metric::P50Ns, Bound::AtMost, 1.0),
];

fn nginx(guest: &Guest, port: u16, _: &Interrupt) -> Result<String> {
    let folder = format!("/tmp/nginx-{port}");
    let file = format!("{folder}/nginx.conf");
    let users = "echo root:x:0:0::/:/bin/sh > /etc/passwd; echo root:x:0: > /etc/group";
    guest.shell(&format!("mkdir -p /etc {folder}; {users}")).map_err(fault)?;
    for (name, size) in web::FILES.into_iter().filter(|(_, size)| *size < 1 << 20) {
        let root = format!("{folder}/root");
        let make = format!("mkdir -p {root}; head -c {size} /dev/zero | tr '\\0' x > {root}/{name}");
        guest.shell(&make).map_err(fault)?;
    }
    let configuration = web::nginx_configuration(&folder, "0.0.0.0", port, "user root;");
    guest.put(configuration.as_bytes(), &file, 0o644).map_err(fault)?;
    Ok(format!("nginx -e stderr -c {file}"))
}

/// The programs of this host that go into the machines, with their names there. A missing one is reported when it is measured.
pub(super) fn programs() -> Vec<(PathBuf, String)> {
    let mut programs = needed(&ALL);
    programs.extend(site::library().ok().map(|library| (library, LIBRARY.to_owned())));
    programs
}

/// The programs of this host that these apps need and that are there, with their names in the machines.
pub(super) fn needed(apps: &[MachineApp]) -> Vec<(PathBuf, String)> {
    let needed = apps.iter().flat_map(|it| it.app.needs);
    needed.filter_map(|(program, package)| Some((site::find(program, package).ok()?, (*program).to_owned()))).collect()
}

fn cases(it: &MachineApp, scale: Scale) -> Vec<Case> {
    let all = (it.app.cases)(Scale::Full);
    let mut cases: Vec<Case> =
        it.cases.iter().filter_map(|label| all.iter().find(|c| c.label == *label)).cloned().collect();
    if scale == Scale::Smoke {
        cases.truncate(usize::from(it.app.name == databases::REDIS.name));
    }
    cases
}

pub(super) fn key(app: &App, case: &Case, mechanism: Mechanism) -> Key {
    Key::new(NAME, mechanism).with("program", app.name).with("case", case.label.as_str())
}

/// Whether a case sends datagrams.
fn is_udp(case: &Case) -> bool {
    case.label.starts_with("UDP")
}

/// All cases by TCP, or all by UDP.
pub(super) fn plans(scale: Scale, udp: bool) -> Vec<BenchPlan> {
    let of_case = |app: &App, case: &Case| {
        SIDES.map(|mechanism| BenchPlan {
            key: key(app, case, mechanism),
            tuning: Tuning::of(mechanism, 0),
            work: MeasuringWork::Transfer { message: 0, total: 0, repeats: 1, warm_up: Duration::ZERO },
            one_cpu: false,
        })
    };
    let some = |it| cases(it, scale).into_iter().filter(move |case| is_udp(case) == udp);
    let of_apps = ALL.iter().flat_map(|it| some(it).flat_map(move |case| of_case(&it.app, &case)));
    of_apps.chain((!udp).then(rings::plan)).collect()
}

/// The servers that run in the passive machine, each from its first measurement on.
pub(super) struct MachineServers<'a> {
    apps: &'static [MachineApp],
    active: &'a Guest,
    passive: &'a Guest,
    /// The address of the passive machine's card on a switch of `partywall net`.
    card: Option<Ipv4Addr>,
    emulated: bool,
    running: Vec<(&'static str, Mechanism, u16, Running<'a>)>,
}

impl<'a> MachineServers<'a> {
    /// Servers of the programs that the two machines of the library have.
    pub(super) fn new(guests: [&'a Guest; 2], emulated: bool) -> Self {
        Self::of(&ALL, guests, None, emulated)
    }

    /// Servers of these programs. `card` is the address that [`Mechanism::PartywallNet`] goes to.
    pub(super) fn of(
        apps: &'static [MachineApp],
        [active, passive]: [&'a Guest; 2],
        card: Option<Ipv4Addr>,
        emulated: bool,
    ) -> Self {
        Self { apps, active, passive, card, emulated, running: Vec::new() }
    }

    /// One measurement.
    pub(super) fn run(&mut self, plan: &BenchPlan, scale: Scale, interrupt: &Interrupt) -> Result<Figures> {
        if plan.key == rings::key() {
            let port = self.server(&ALL[0], plan.key.mechanism, interrupt)?;
            let at = self.address(plan.key.mechanism, port)?;
            return rings::measure(self.active, &at, scale, interrupt);
        }
        let (it, case) = self.found(plan)?;
        let port = self.server(it, plan.key.mechanism, interrupt)?;
        let at = self.address(plan.key.mechanism, port)?;
        // Each client's connections move to memory while it runs. In a run of a second, much of what is measured would be that.
        let length = if scale == Scale::Smoke { scale } else { Scale::Full };
        let mut line = with_library(plan.key.mechanism, (it.app.client)(&at, &case, length));
        // In a smoke run connections carry too little for a ring.
        let has_rings = plan.key.mechanism == Mechanism::Transparent && scale != Scale::Smoke && !is_udp(&case);
        if has_rings {
            line = rings::logged(line);
        }
        let accounts = Accounts::now(self.passive.pid());
        let said = ask_until_measured(line, |line| execute(self.active, line, interrupt))?;
        let mut accounts = accounts.since(affinity::allowed()?.len());
        accounts.retain(|metric, _| *metric == Metric::MachineCpuPercent);
        if has_rings {
            rings::verify_made(self.active, it.app.name)?;
        }
        let mut figures = (it.app.figures)(&case, &said)?;
        figures.extend(accounts);
        Ok(figures)
    }

    /// The program of a plan and its case, if all that it needs is on this host.
    fn found(&self, plan: &BenchPlan) -> Result<(&'static MachineApp, Case)> {
        let (name, label) = (plan.key.word("program"), plan.key.word("case"));
        let found = self.apps.iter().find(|it| Some(it.app.name) == name).and_then(|it| {
            let case = (it.app.cases)(Scale::Full).into_iter().find(|case| Some(case.label.as_str()) == label);
            Some((it, case?))
        });
        let (it, case) = found.ok_or_else(|| BenchError::Transport("no such program".into()))?;
        for (program, package) in it.app.needs {
            site::find(program, package)?;
        }
        Ok((it, case))
    }

    /// Starts the server of a plan, if it does not run. A measurement would begin with that.
    pub(super) fn prepare(&mut self, plan: &BenchPlan, interrupt: &Interrupt) -> Result<()> {
        let (it, _) = self.found(plan)?;
        self.server(it, plan.key.mechanism, interrupt).map(drop)
    }

    fn address(&self, mechanism: Mechanism, port: u16) -> Result<AppAddress> {
        let address = if mechanism == Mechanism::PartywallNet { self.card } else { self.passive.address() };
        let address = address.map(|address| address.to_string());
        let address = address.ok_or_else(|| BenchError::Transport("the machine has no address".into()))?;
        Ok(AppAddress { address, port, slowness: if self.emulated { SLOWNESS } else { 1 } })
    }

    /// The port of a server, which is started if it does not run.
    fn server(&mut self, it: &MachineApp, mechanism: Mechanism, interrupt: &Interrupt) -> Result<u16> {
        if let Some((.., port, _)) = self.running.iter().find(|(name, of, ..)| (*name, *of) == (it.app.name, mechanism))
        {
            return Ok(*port);
        }
        let port = FIRST_PORT + 2 * u16::try_from(self.running.len()).unwrap_or_default();
        let server = (it.server)(self.passive, port, interrupt)?;
        let prefix = with_library(mechanism, Vec::new()).join(" ");
        let running = self.passive.start(&["sh", "-c", &format!("exec {prefix} {server}")]).map_err(fault)?;
        self.running.push((it.app.name, mechanism, port, running));
        if let Some((.., running)) = self.running.last_mut() {
            await_listener(self.passive, port, running, interrupt)?;
        }
        if it.app.name == databases::POSTGRESQL.name {
            databases::fill_database(&self.address(mechanism, port)?, |line| {
                execute(self.active, &line.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>(), interrupt)
            })?;
        }
        Ok(port)
    }
}

impl Drop for MachineServers<'_> {
    fn drop(&mut self) {
        for (.., running) in &self.running {
            // If it cannot be told it is gone.
            let _ = running.signal(rustix::process::Signal::KILL);
        }
    }
}

/// The figure of a case by which it is compared.
pub(super) fn main_metric(cell: &Cell) -> Option<Metric> {
    [Metric::PerSecond, Metric::BytesPerSecond, Metric::P50Ns].into_iter().find(|metric| cell.median(*metric).is_some())
}

/// Each case beside itself.
pub(super) fn judge(cells: &[Cell], network: &str) -> Vec<Verdict> {
    let find = |app: &App, case: &Case, mechanism| {
        let wanted = key(app, case, mechanism);
        cells.iter().find(|cell| cell.key == wanted)
    };
    let mut verdicts = Vec::new();
    for it in &ALL {
        for case in cases(it, Scale::Full) {
            let promised =
                TARGETS.iter().find(|(program, label, ..)| (*program, *label) == (it.app.name, &*case.label));
            let [ours, theirs] = [Mechanism::Transparent, Mechanism::TcpVirtio].map(|m| find(&it.app, &case, m));
            let metric = promised.map(|promise| promise.2).or_else(|| main_metric(ours?));
            let Some(metric) = metric else { continue };
            let (bound, limit) = promised.map_or((Bound::Report, 1.0), |promise| (promise.3, promise.4));
            let other = if is_udp(&case) { "without the library" } else { "TCP" };
            let claim = format!("{} {}, {} : {other} over {network}", it.app.name, case.label, metric.name());
            let [ours, theirs] = [ours, theirs].map(|cell| cell.and_then(|cell| cell.median(metric)));
            verdicts.push(Verdict::ratio(claim, bound, limit, metric, ours, theirs));
        }
    }
    verdicts.push(rings::judge(cells));
    verdicts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_case_of_machine_programs_exists() {
        for it in &ALL {
            let labels: Vec<String> = cases(it, Scale::Full).into_iter().map(|case| case.label).collect();
            assert_eq!(labels, it.cases, "{}", it.app.name);
        }
        for (program, label, ..) in TARGETS {
            let it = ALL.iter().find(|it| it.app.name == *program).unwrap();
            assert!(it.cases.contains(label), "{program} {label}");
        }
        assert!(!plans(Scale::Smoke, false).is_empty() && plans(Scale::Full, true).len() == 3 * 2);
        assert!(crate::apps::ALL.iter().any(|app| app.name == ALL[0].app.name));
    }
}
