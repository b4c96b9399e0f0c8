//! The study between two virtual machines: a client in one, and servers in the other machine (the neighbour) and on the host, outside of both (the
//! remote peer). The remote server has no library, so every byte to it goes over the machine's network card.

use std::{process::Stdio, time::Duration};

use partywall_lab::Running;
use partywall_protocol::environment::LIBRARY;

use super::{CommandResults, FLOWS, MIXED_MESSAGE, NAME, REMOTE, SIDES, is_close, measure_pairs, report, turns};
use crate::{
    affinity::{self, Placement},
    apps::{accounts::Accounts, site},
    args::Scale,
    bench::Bench,
    commands::vm::{
        machines::{MeasuredMachines, PROGRAM, fault, interruptible},
        program::{await_listener, execute, with_library},
    },
    error::{BenchError, Result},
    interrupt::Interrupt,
    mechanism::Mechanism,
    process::GuardedChild,
    report::{
        cell::{Cell, Key},
        metric::Metric,
    },
    task::Figures,
};

/// Bytes of a window: what a machine gets unless told otherwise.
const WINDOW: u64 = 64 << 20;
/// Places on a machine's bus: for the windows to the other machine and the host, the doorbell device, and one to spare.
const PORTS: u32 = 4;
/// Each machine on a processor, and both on one.
pub(super) const PLACES: [&str; 2] = ["machines", "machines-one-cpu"];
/// The ports of the servers in the machine, without the library and with it. The port after each is the server's as well.
const SERVERS: [(Mechanism, u16); 2] = [(Mechanism::Tcp, 7000), (Mechanism::Transparent, 7010)];
/// The port of the server on the host.
const HOST_PORT: u16 = 7000;
/// How often a pair is measured at most, where a hundredth matters. One turn of emulated machines differs from the next by about 4 %, so 100 turns
/// or more are needed to tell 1 %.
const MOST_TURNS: u32 = 300;
/// A server on the host starts within a fraction of this.
const START: Duration = Duration::from_secs(20);

/// One measurement.
struct MachinePlan {
    key: Key,
    flow: &'static str,
    message: u64,
    neighbours: u64,
    remotes: u64,
}

fn plans(scale: Scale, has_host: bool) -> Vec<MachinePlan> {
    let sizes: &[u64] = match scale {
        Scale::Smoke => &[64],
        Scale::Quick => &[64, 1 << 10, 16 << 10],
        Scale::Full => &[64, 1 << 10, 4 << 10, 16 << 10, 64 << 10],
    };
    let flows: &[&str] =
        if scale == Scale::Smoke { &["stream"] } else { &["stream", "rounds", "udp-stream", "udp-rounds"] };
    let mut plans = Vec::new();
    for mechanism in SIDES {
        let key = |part: &str| Key::new(NAME, mechanism).with("part", part);
        for place in PLACES.into_iter().take(if scale == Scale::Smoke { 1 } else { 2 }) {
            for &flow in flows {
                // A datagram holds less than 64 KiB.
                for &message in sizes.iter().filter(|size| !flow.starts_with("udp") || **size <= 60_000) {
                    let key = key("sizes").with("flow", flow).with("message", message).with("place", place);
                    plans.push(MachinePlan { key, flow, message, neighbours: 1, remotes: 0 });
                }
            }
        }
        if has_host && scale > Scale::Smoke {
            for neighbours in 0..=FLOWS {
                let key = key("mixed").with("local", neighbours);
                let remotes = FLOWS - neighbours;
                plans.push(MachinePlan { key, flow: "stream", message: MIXED_MESSAGE, neighbours, remotes });
            }
            let sizes = if scale == Scale::Full { &REMOTE[..] } else { &[64, 16 << 10] };
            for &message in sizes {
                for flow in ["rounds", "stream"] {
                    let key = key("remote").with("flow", flow).with("message", message).with("entries", 1u64);
                    plans.push(MachinePlan { key, flow, message, neighbours: 0, remotes: 1 });
                }
            }
        }
    }
    plans
}

/// Boots, measures and shows.
pub(crate) fn run(bench: &mut Bench) -> Result<CommandResults> {
    let interrupt = bench.interrupt.again()?;
    let result = interruptible(&interrupt, || measure(bench))?;
    interrupt.check()?;
    result
}

fn measure(bench: &mut Bench) -> Result<CommandResults> {
    let (scale, runs) = (bench.scale(), bench.common.runs());
    let library = vec![(site::library()?, LIBRARY.to_owned())];
    let mut machines =
        MeasuredMachines::boot(WINDOW, PORTS, library, &[], &bench.scratch(), &mut |what| bench.progress(what))?;
    bench.say(&machines.describe()?)?;
    machines.attach()?;
    let host = machines.network().host().map(|address| format!("{address}:{HOST_PORT}"));
    let _server = host.as_ref().map(|_| serve_on_host(&machines, &bench.interrupt)).transpose()?;
    let plans: Vec<MachinePlan> =
        plans(scale, host.is_some()).into_iter().filter(|plan| bench.common.wants(plan.key.mechanism)).collect();
    let mut cells: Vec<Cell> = plans.iter().map(|plan| Cell::new(plan.key.clone())).collect();
    let apart = bench.placement;
    let one = Placement { passive: apart.active, ..apart };
    for (place, name) in [(apart, PLACES[0]), (one, PLACES[1])] {
        machines.place(place)?;
        let mut study = Study::new(&machines, host.as_deref());
        let is_here = |key: &Key| (key.word("place") == Some(PLACES[1])) == (name == PLACES[1]);
        measure_pairs(
            &mut cells,
            runs,
            is_here,
            |key| if scale == Scale::Full && is_close(key) { MOST_TURNS } else { turns(key, scale) },
            |at| {
                bench.progress(&plans[at].key.to_string());
                study.flow(&plans[at], scale, &bench.interrupt)
            },
        )?;
    }
    report(bench, cells)
}

/// The server on the host, on the machines' network.
fn serve_on_host(machines: &MeasuredMachines, interrupt: &Interrupt) -> Result<GuardedChild> {
    let network = machines.network();
    let address = network.host().map(|address| address.to_string()).unwrap_or_default();
    let me = std::env::current_exe().map_err(|e| BenchError::transport("finding this program", e))?;
    let mut command = network.command(me);
    command.args(["flow", "serve", &address, &HOST_PORT.to_string()]).stdout(Stdio::null());
    let mut server = GuardedChild::spawn(&mut command)?;
    let deadline = std::time::Instant::now() + START;
    let look = format!("exec 3<>/dev/tcp/{address}/{HOST_PORT}");
    loop {
        interrupt.check()?;
        let mut probe = network.command("bash");
        let probe = probe.args(["-c", &look]).stderr(Stdio::null()).status();
        if probe.is_ok_and(|status| status.success()) {
            return Ok(server);
        }
        if let Some(end) = server.ended() {
            return Err(BenchError::Unavailable(format!("the server on the host has ended: {end}")));
        }
        if std::time::Instant::now() > deadline {
            return Err(BenchError::Transport("the server on the host does not listen".into()));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The servers in one machine, and the clients in the other.
struct Study<'a> {
    machines: &'a MeasuredMachines,
    host: Option<&'a str>,
    servers: Vec<(Mechanism, Running<'a>)>,
}

impl<'a> Study<'a> {
    fn new(machines: &'a MeasuredMachines, host: Option<&'a str>) -> Self {
        Self { machines, host, servers: Vec::new() }
    }

    /// The address of the server in the neighbour. It is started if it does not run.
    fn server(&mut self, mechanism: Mechanism, interrupt: &Interrupt) -> Result<String> {
        let [_, passive] = self.machines.guests();
        let port = SERVERS.into_iter().find(|(of, _)| *of == mechanism).map_or(0, |(_, port)| port);
        let address = passive.address().ok_or_else(|| BenchError::Transport("the machine has no address".into()))?;
        if !self.servers.iter().any(|(of, _)| *of == mechanism) {
            let line = ["flow", "serve", "0.0.0.0", &port.to_string()].map(str::to_owned);
            let line = with_library(mechanism, std::iter::once(PROGRAM.to_owned()).chain(line).collect());
            let words: Vec<&str> = line.iter().map(String::as_str).collect();
            let mut server = passive.start(&words).map_err(fault)?;
            await_listener(passive, port, &mut server, interrupt)?;
            self.servers.push((mechanism, server));
        }
        Ok(format!("{address}:{port}"))
    }

    /// One run.
    fn flow(&mut self, plan: &MachinePlan, scale: Scale, interrupt: &Interrupt) -> Result<Figures> {
        let mechanism = plan.key.mechanism;
        let millis: u64 = match scale {
            Scale::Smoke => 50,
            _ if is_close(&plan.key) => 300,
            Scale::Quick => 1_000,
            Scale::Full => 2_000,
        };
        let mut neighbours = Vec::new();
        for _ in 0..plan.neighbours {
            neighbours.push(self.server(mechanism, interrupt)?);
        }
        let remotes = vec![self.host.unwrap_or_default(); usize::try_from(plan.remotes).unwrap_or(0)];
        let targets = format!("{}/{}", neighbours.join(","), remotes.join(","));
        let [active, passive] = self.machines.guests();
        let (message, millis) = (plan.message.to_string(), millis.to_string());
        let words = [PROGRAM, "flow", plan.flow, &targets, &message, &millis, "accounts"];
        let line = with_library(mechanism, words.map(str::to_owned).into());
        let accounts = Accounts::now(passive.pid());
        let report = execute(active, &line, interrupt)?;
        let mut kernel = accounts.since(affinity::allowed()?.len());
        kernel.retain(|metric, _| *metric == Metric::MachineCpuPercent);
        let mut figures: Figures =
            serde_json::from_str(&report).map_err(|e| BenchError::transport("reading figures of a flow", e))?;
        // The client's machine knows nothing of the other one, and the host's account is of a longer time than the operations.
        figures.remove(&Metric::CpuNsPerOperation);
        figures.extend(kernel);
        Ok(figures)
    }
}

impl Drop for Study<'_> {
    fn drop(&mut self) {
        for (_, server) in &self.servers {
            // If it cannot be told it is gone.
            let _ = server.signal(rustix::process::Signal::KILL);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::pairs_of;
    use super::*;

    #[test]
    fn every_measurement_between_machines_has_its_counterpart() {
        let all = plans(Scale::Full, true);
        let keys: Vec<&Key> = all.iter().map(|plan| &plan.key).collect();
        assert!(pairs_of(&keys).iter().all(|pair| pair.len() == SIDES.len()));
        assert!(plans(Scale::Full, false).iter().all(|plan| plan.remotes == 0));
    }
}
