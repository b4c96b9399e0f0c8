//! The experiments of the residency study: local and remote peers mixed, what the library costs where it cannot help, message sizes on
//! shared and on separate processors, and what connections cost. `machines` has them between virtual machines.

pub(crate) mod machines;
mod pictures;
pub(crate) mod timeline;

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use super::{CommandResults, apps::SIDES};
use crate::{
    affinity,
    apps::{
        accounts::Accounts,
        site::{BenchScene, Locality, Site},
    },
    args::{Common, Scale},
    bench::Bench,
    error::{BenchError, Result},
    mechanism::Mechanism,
    process::GuardedChild,
    report::{
        cell::{Cell, Key, Problem},
        metric::Metric,
        table::{self, Layout},
        verdict::{Bound, Verdict},
    },
    task::Figures,
};

const NAME: &str = "residency";
/// Flows at a time in the mixed workload.
const FLOWS: u64 = 5;
const MIXED_MESSAGE: u64 = 16 << 10;
/// Sizes of the study's table on interception.
const REMOTE: [u64; 6] = [4, 16, 32, 64, 1 << 10, 16 << 10];
/// Entries in the directory there.
const ENTRIES: [u64; 2] = [1, 100_000];
/// "At most 1 %", and "2 %", which is also what "no slower" can be told from.
const INTERCEPTION: f64 = 1.0 / 1.01;
const CONNECTING: f64 = 1.0 / 1.02;

/// One measurement.
struct ResidencyPlan {
    key: Key,
    place: Locality,
    /// The kind of flow, its message, and to how many local and remote servers.
    flow: &'static str,
    message: u64,
    local: u64,
    remote: u64,
    /// Whether the server has the library, as the client.
    resident: bool,
    entries: u64,
}

fn plans(scale: Scale, has_veth: bool) -> Vec<ResidencyPlan> {
    let mut plans = Vec::new();
    for mechanism in SIDES {
        let key = |part: &str| Key::new(NAME, mechanism).with("part", part);
        if has_veth {
            for local in (0..=FLOWS).filter(|n| scale > Scale::Smoke || *n == 2) {
                plans.push(ResidencyPlan {
                    key: key("mixed").with("local", local),
                    place: Locality::Veth,
                    flow: "stream",
                    message: MIXED_MESSAGE,
                    local,
                    remote: FLOWS - local,
                    resident: true,
                    entries: 1,
                });
            }
            for entries in ENTRIES.into_iter().take(if scale == Scale::Smoke { 1 } else { 2 }) {
                for message in REMOTE.into_iter().take(if scale == Scale::Smoke { 1 } else { REMOTE.len() }) {
                    for flow in ["rounds", "stream"] {
                        plans.push(ResidencyPlan {
                            key: key("remote").with("flow", flow).with("message", message).with("entries", entries),
                            place: Locality::Veth,
                            flow,
                            message,
                            local: 0,
                            remote: 1,
                            resident: false,
                            entries,
                        });
                    }
                }
            }
        }
        let sizes: &[u64] = match scale {
            Scale::Smoke => &[64],
            Scale::Quick => &[64, 1 << 10, 16 << 10, 64 << 10],
            Scale::Full => &[64, 256, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10],
        };
        for place in [Locality::Loopback, Locality::OneCpu] {
            for flow in ["stream", "rounds", "udp-stream", "udp-rounds"] {
                // A datagram holds less than 64 KiB.
                let largest = if flow.starts_with("udp") { 60_000 } else { u64::MAX };
                for &message in sizes.iter().filter(|size| **size <= largest) {
                    plans.push(ResidencyPlan {
                        key: key("sizes").with("flow", flow).with("message", message).with("place", place.name()),
                        place,
                        flow,
                        message,
                        local: 1,
                        remote: 0,
                        resident: true,
                        entries: 1,
                    });
                }
            }
        }
        for (flow, resident) in [("meet", false), ("meet", true), ("errand", false), ("errand", true)] {
            let whose = if resident { "resident" } else { "remote" };
            plans.push(ResidencyPlan {
                key: key("connections").with("flow", flow).with("peer", whose),
                place: Locality::Loopback,
                flow,
                message: 100,
                local: u64::from(resident),
                remote: u64::from(!resident),
                resident,
                entries: 1,
            });
        }
    }
    plans
}

/// Servers that run all the time: each (place, with the library or not).
struct Servers<'a> {
    all: Vec<(Site<'a>, GuardedChild)>,
}

impl<'a> Servers<'a> {
    fn start(scene: &'a BenchScene<'a>, me: &str) -> Result<Self> {
        let mut all = Vec::new();
        let places = [Some(Locality::Loopback), Some(Locality::OneCpu), scene.spaces.as_ref().map(|_| Locality::Veth)];
        for place in places.into_iter().flatten() {
            for mechanism in SIDES {
                let folder = scene.scratch.join(format!("flow-{}-{}", place.name(), mechanism.name()));
                let site = Site::new(scene, mechanism, place, folder)?;
                let mut server = site.serve(me, &["flow", "serve", &site.address(), &site.port()])?;
                site.await_listener(&mut server)?;
                all.push((site, server));
            }
        }
        Ok(Self { all })
    }

    fn get(&self, place: Locality, mechanism: Mechanism) -> Result<&(Site<'a>, GuardedChild)> {
        let fits = |(site, _): &&(Site<'_>, GuardedChild)| site.place == place && site.mechanism == mechanism;
        self.all.iter().find(fits).ok_or_else(|| BenchError::Unavailable("there are no network namespaces".into()))
    }
}

/// Measures and shows.
pub(crate) fn run(bench: &mut Bench) -> Result<CommandResults> {
    let cells = {
        let common = bench.common.clone();
        let scene = bench.scene()?;
        measure(&scene, &common)?
    };
    report(bench, cells)
}

/// Shows what was measured and what was promised.
fn report(bench: &Bench, cells: Vec<Cell>) -> Result<CommandResults> {
    show(bench, &cells)?;
    let verdicts = judge(&cells);
    bench.say("\n## What is promised, and what was measured (ratios of medians of this run)\n")?;
    bench.say(&table::verdicts(&verdicts))?;
    bench.draw(&pictures::all(&cells))?;
    Ok(CommandResults { cells, verdicts })
}

fn show(bench: &Bench, cells: &[Cell]) -> Result<()> {
    let accounts = [
        Metric::MachineCpuPercent,
        Metric::CpuNsPerOperation,
        Metric::SwitchesPerSecond,
        Metric::WaitPercent,
        Metric::BlocksPerSecond,
    ];
    type Names<'a> = &'a [(&'a str, &'a str)];
    let parts: [(&str, &str, Names<'_>, &[Metric]); 4] = [
        (
            "mixed",
            "Five flows of 16 KiB messages, some to local and some to remote peers",
            &[("local", "local")],
            &[Metric::BytesPerSecond, Metric::RemoteBytesPerSecond],
        ),
        (
            "remote",
            "A purely remote peer: what the library costs (the study's Table 2)",
            &[("flow", "flow"), ("entries", "entries"), ("message", "message")],
            &[Metric::PerSecond, Metric::BytesPerSecond, Metric::P50Ns],
        ),
        (
            "sizes",
            "TCP and UDP by message size, on separate processors and on one (its Figs. 4, 8, 9)",
            &[("flow", "flow"), ("place", "place"), ("message", "message")],
            &[Metric::BytesPerSecond, Metric::PerSecond, Metric::P50Ns, Metric::P99Ns, Metric::LostPercent],
        ),
        (
            "connections",
            "Connections that come and go: connect and close; one question of 100 B and its answer",
            &[("flow", "flow"), ("peer", "peer")],
            &[Metric::PerSecond, Metric::P50Ns, Metric::P99Ns],
        ),
    ];
    for (part, title, group, metrics) in parts {
        let of_part: Vec<Cell> = cells.iter().filter(|cell| cell.key.word("part") == Some(part)).cloned().collect();
        let metrics: Vec<Metric> = metrics.iter().copied().chain(accounts).collect();
        bench.say(&format!("\n## {title}\n"))?;
        bench.say(&table::cells(&of_part, &Layout { group, row: &[], metrics: &metrics, baseline: Mechanism::Tcp }))?;
    }
    Ok(())
}

fn measure(scene: &BenchScene<'_>, common: &Common) -> Result<Vec<Cell>> {
    let scale = common.scale();
    let me = std::env::current_exe().map_err(|e| BenchError::transport("finding this program", e))?;
    let me = me.to_string_lossy().into_owned();
    let servers = Servers::start(scene, &me)?;
    let plans: Vec<ResidencyPlan> =
        plans(scale, scene.spaces.is_some()).into_iter().filter(|plan| common.wants(plan.key.mechanism)).collect();
    let mut cells: Vec<Cell> = plans.iter().map(|plan| Cell::new(plan.key.clone())).collect();
    let mut crowd: Option<GuardedChild> = None;
    measure_pairs(
        &mut cells,
        common.runs(),
        |_| true,
        |key| turns(key, scale),
        |at| {
            let plan = &plans[at];
            if plan.entries > 1 && crowd.is_none() {
                crowd = Some(listeners(scene, &me, plan.entries)?);
            } else if plan.entries == 1 {
                crowd = None;
            }
            flow(scene, &servers, plan, &me, scale)
        },
    )?;
    Ok(cells)
}

/// Measures the wanted cells this many times by `one`. Those of the same settings are measured one after the other, as often as `turns` of their
/// key allows while more turns would tell more.
fn measure_pairs(
    cells: &mut [Cell],
    runs: u32,
    is_wanted: impl Fn(&Key) -> bool,
    turns: impl Fn(&Key) -> u32,
    mut one: impl FnMut(usize) -> Result<Figures>,
) -> Result<()> {
    let mut pairs = pairs_of(&cells.iter().map(|cell| &cell.key).collect::<Vec<_>>());
    pairs.retain(|pair| is_wanted(&cells[pair[0]].key));
    for _ in 0..runs {
        for pair in &pairs {
            let mut pair = pair.clone();
            for _ in 0..turns(&cells[pair[0]].key) {
                for &at in &pair {
                    if cells[at].problem.is_some() {
                        continue;
                    }
                    match one(at) {
                        Ok(figures) => cells[at].runs.push(figures),
                        Err(BenchError::Interrupted) => return Err(BenchError::Interrupted),
                        Err(e) => {
                            eprintln!("partywall-bench: {}: {e}", cells[at].key);
                            cells[at].problem = Some(Problem::Failed(e.to_string()));
                        }
                    }
                }
                pair.reverse();
                if judge_pair(&pair, cells).is_none_or(|verdict| is_settled(&verdict)) {
                    break;
                }
            }
        }
    }
    Ok(())
}

/// The measurements in their order, those of the same settings without the library and with it together. Where a hundredth matters, a pair is
/// measured again and again, each time in the other order, so that other load on the machine affects both.
fn pairs_of(keys: &[&Key]) -> Vec<Vec<usize>> {
    let mut sorted: Vec<usize> = (0..keys.len()).collect();
    // Measurements with a full directory come last: it stays full.
    sorted.sort_by_key(|at| (keys[*at].number("entries").unwrap_or(1), keys[*at].settings.clone()));
    sorted.chunk_by(|a, b| keys[*a].settings == keys[*b].settings).map(<[usize]>::to_vec).collect()
}

/// How often a pair is measured in one run, at most.
fn turns(key: &Key, scale: Scale) -> u32 {
    match scale {
        Scale::Smoke => 1,
        // As many as an interval takes.
        Scale::Quick if is_mixed(key) => 6,
        Scale::Full if is_mixed(key) => LEAST_TURNS as u32,
        _ if !is_close(key) => 1,
        Scale::Quick => 24,
        Scale::Full => 120,
    }
}

/// Whether a hundredth matters, and the pair is measured until the interval of its ratio tells.
fn is_close(key: &Key) -> bool {
    matches!(key.word("part"), Some("remote" | "connections"))
}

/// Whether flows to local and to remote peers go at a time. The interval of the remote flows' ratio is reported.
fn is_mixed(key: &Key) -> bool {
    key.word("part") == Some("mixed")
}

/// Fewer turns are not enough to say how far apart they lie.
const LEAST_TURNS: usize = 12;
/// The width of an interval that tells a hundredth.
const NARROW: f64 = 0.005;

/// The verdict on a pair so far; `None` if there is no other side.
fn judge_pair(pair: &[usize], cells: &[Cell]) -> Option<Verdict> {
    let of = |mechanism| pair.iter().map(|&at| &cells[at]).find(|cell| cell.key.mechanism == mechanism);
    Some(judge_cell(of(Mechanism::Tcp)?, Some(of(Mechanism::Transparent)?)))
}

/// Whether more turns would tell nothing new. The answer is yes only after 12, 24, 48 turns and so on. If a pair could end after any turn, its
/// interval would lie on one side of the limit by chance sooner or later.
fn is_settled(verdict: &Verdict) -> bool {
    let is_asked = |turns: usize| turns.is_multiple_of(LEAST_TURNS) && (turns / LEAST_TURNS).is_power_of_two();
    verdict.interval.is_some_and(|interval| {
        is_asked(interval.values) && (interval.decides_clearly(verdict.limit) || interval.width() <= NARROW)
    })
}

/// One run.
fn flow(
    scene: &BenchScene<'_>,
    servers: &Servers<'_>,
    plan: &ResidencyPlan,
    me: &str,
    scale: Scale,
) -> Result<Figures> {
    let mechanism = plan.key.mechanism;
    let millis: u64 = match scale {
        Scale::Smoke => 50,
        _ if is_close(&plan.key) => 150,
        Scale::Quick => 500,
        Scale::Full => 1500,
    };
    // A remote peer is one without the library. In the mixed workload it is in another namespace as well.
    let with = if plan.resident { mechanism } else { Mechanism::Tcp };
    let near_place = if plan.place == Locality::Veth { Locality::Loopback } else { plan.place };
    let (mut targets, mut remote) = (Vec::new(), Vec::new());
    for _ in 0..plan.local {
        let (site, _) = servers.get(plan.place, with)?;
        targets.push(format!("{}:{}", site.address(), site.port));
    }
    for _ in 0..plan.remote {
        let (site, _) =
            servers.get(if plan.place == Locality::Veth { Locality::Veth } else { near_place }, Mechanism::Tcp)?;
        remote.push(format!("{}:{}", site.address(), site.port));
    }
    let folder: PathBuf = scene.scratch.join("flow-client");
    let client = Site::new(scene, mechanism, plan.place, folder)?;
    let accounts = Accounts::now(std::process::id());
    let targets = format!("{}/{}", targets.join(","), remote.join(","));
    let (bytes, millis) = (plan.message.to_string(), millis.to_string());
    let report =
        client.ask(me, &["flow", plan.flow, &targets, &bytes, &millis, "accounts"], Duration::from_secs(60))?;
    let mut figures: Figures =
        serde_json::from_str(&report).map_err(|e| BenchError::transport("reading figures of a flow", e))?;
    let mut kernel = accounts.since(affinity::allowed()?.len());
    // The server has told how its threads fared, including those that have ended, and the client how busy the machine was meanwhile.
    kernel.retain(|metric, _| *metric == Metric::SwitchesPerSecond);
    figures.extend(kernel);
    Ok(figures)
}

/// Fills the directory.
fn listeners(scene: &BenchScene<'_>, me: &str, count: u64) -> Result<GuardedChild> {
    let site = Site::new(scene, Mechanism::Transparent, Locality::Loopback, scene.scratch.join("listeners"))?;
    let server = site.serve(me, &["flow", "listen", "127.64.0.0", "20000", &count.to_string()])?;
    let log = site.folder.join("server.log");
    let deadline = Instant::now() + Duration::from_secs(120);
    let mut server = server;
    loop {
        scene.interrupt.check()?;
        let said = std::fs::read_to_string(&log).unwrap_or_default();
        if said.contains("listening on") {
            return Ok(server);
        }
        if let Some(end) = server.ended() {
            return Err(BenchError::Unavailable(format!(
                "{count} listeners are more than this machine allows: {end}: {}",
                said.trim()
            )));
        }
        if Instant::now() > deadline {
            return Err(BenchError::Transport(format!("{count} listeners take too long")));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn judge(cells: &[Cell]) -> Vec<Verdict> {
    let of = |mechanism| cells.iter().filter(move |cell| cell.key.mechanism == mechanism);
    let pair = |plain: &Cell| of(Mechanism::Transparent).find(|cell| cell.key.settings == plain.key.settings);
    of(Mechanism::Tcp)
        .flat_map(|plain| {
            let ours = pair(plain);
            std::iter::once(judge_cell(plain, ours)).chain(judge_remote_flows(plain, ours))
        })
        .collect()
}

/// Whether flows to remote peers pay for the local ones beside them.
fn judge_remote_flows(plain: &Cell, ours: Option<&Cell>) -> Option<Verdict> {
    let metric = Metric::RemoteBytesPerSecond;
    // Without local flows the remote ones are all that is measured, and have a verdict.
    let local = plain.key.number("local").filter(|local| *local > 0)?;
    if !is_mixed(&plain.key) || plain.summary(metric).is_none() {
        return None;
    }
    let claim = format!("the remote flows beside {local} local : plain");
    let interval = ours.and_then(|ours| ours.interval_to(plain, metric));
    Some(Verdict::by_turns(claim, Bound::Report, 0.0, metric, ours, Some(plain)).with_interval(interval))
}

/// The verdict on the same settings without the library and with it.
fn judge_cell(plain: &Cell, ours: Option<&Cell>) -> Verdict {
    let number = |name| plain.key.number(name).unwrap_or(0);
    let word = |name| plain.key.word(name).unwrap_or("");
    let (claim, bound, limit, metric) = match word("part") {
        "mixed" => (format!("{} of 5 flows local", number("local")), Bound::Report, 0.0, Metric::BytesPerSecond),
        "remote" => (
            format!("remote {} of {} B, {} entries", word("flow"), number("message"), number("entries")),
            Bound::AtLeast,
            INTERCEPTION,
            Metric::PerSecond,
        ),
        "sizes" if machines::PLACES.contains(&word("place")) => (
            format!("{} of {} B, {}", word("flow"), number("message"), word("place")),
            Bound::Report,
            0.0,
            Metric::PerSecond,
        ),
        "sizes" if word("place") == Locality::OneCpu.name() => (
            format!("{} of {} B on one processor", word("flow"), number("message")),
            Bound::AtLeast,
            0.97,
            Metric::PerSecond,
        ),
        "connections" => {
            // One question and its answer, of two that could have had a ring, may cost nothing at all.
            let limit = if word("flow") == "errand" && word("peer") == "resident" { 1.0 } else { CONNECTING };
            (format!("{}, peer {}", word("flow"), word("peer")), Bound::AtLeast, limit, Metric::PerSecond)
        }
        _ => (format!("{} of {} B", word("flow"), number("message")), Bound::Report, 0.0, Metric::PerSecond),
    };
    let interval = ours.and_then(|ours| ours.interval_to(plain, metric));
    Verdict::by_turns(format!("{claim} : plain"), bound, limit, metric, ours, Some(plain)).with_interval(interval)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::stats::MedianInterval;

    #[test]
    fn pair_is_settled_only_after_turns_that_double() {
        let verdict = |turns, ratio| {
            let ratios = MedianInterval::of(std::iter::repeat_n(ratio, turns));
            Verdict::figure("x", Bound::AtLeast, 0.99, None).with_interval(ratios)
        };
        let settled: Vec<usize> = (1..=300).filter(|turns| is_settled(&verdict(*turns, 1.0))).collect();
        assert_eq!(settled, [12, 24, 48, 96, 192]);
    }

    #[test]
    fn every_measurement_has_its_own_name_and_its_counterpart() {
        let all = plans(Scale::Full, true);
        let mut keys: Vec<&Key> = all.iter().map(|plan| &plan.key).collect();
        keys.sort();
        keys.dedup();
        assert_eq!(keys.len(), all.len(), "two measurements have the same name");
        let cells: Vec<Cell> = all
            .iter()
            .map(|plan| {
                let mut cell = Cell::new(plan.key.clone());
                let rates = [Metric::PerSecond, Metric::BytesPerSecond, Metric::RemoteBytesPerSecond];
                cell.runs = vec![rates.map(|metric| (metric, 2.0)).into()];
                cell
            })
            .collect();
        let verdicts = judge(&cells);
        for verdict in &verdicts {
            assert!(verdict.measured.is_some(), "{} has no figures", verdict.claim);
        }
        let of_remote = |verdict: &&Verdict| verdict.claim.starts_with("the remote flows");
        assert_eq!(
            verdicts.iter().filter(of_remote).count(),
            FLOWS as usize,
            "one for each number of local flows but 0"
        );
    }
}
