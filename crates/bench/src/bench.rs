//! One run of the bench: what it needs while it runs, and the loop over everything to be measured.

use std::{
    cell::RefCell,
    collections::BTreeMap,
    io::{IsTerminal, Write},
    path::PathBuf,
    time::Duration,
};

use indicatif::{ProgressBar, ProgressStyle};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tempfile::TempDir;

use crate::{
    affinity::Placement,
    apps::site::{self, BenchScene},
    args::{Common, Scale},
    broker::BrokerProcess,
    commands::CommandResults,
    control::TaskSocket,
    error::{BenchError, During, Result},
    interrupt::Interrupt,
    mechanism::{Mechanism, Tuning, WaitMode},
    netns::Namespaces,
    process::run_pairs,
    report::{
        cell::{Cell, Key, Problem},
        host::Host,
        html::HtmlReport,
        json::BenchReport,
        metric::Metric,
        plot::{self, Picture},
    },
    task::{Figures, MeasuringSide, MeasuringTask, MeasuringWork, TaskAnswer},
    transport,
};

/// One measurement to make.
#[derive(Debug, Clone)]
pub(crate) struct BenchPlan {
    /// How it is known.
    pub(crate) key: Key,
    /// How the mechanism is set up.
    pub(crate) tuning: Tuning,
    /// The work to measure.
    pub(crate) work: MeasuringWork,
    /// Both sides on one processor, whatever the options say.
    pub(crate) one_cpu: bool,
}

/// Everything that exists while the bench runs. Dropping it removes all of it.
#[derive(Debug)]
pub(crate) struct Bench {
    /// The options that every subcommand has.
    pub(crate) common: Common,
    /// Where the two sides run.
    pub(crate) placement: Placement,
    host: Host,
    /// Ctrl-C.
    pub(crate) interrupt: Interrupt,
    // Made when first wanted; the reason, if that failed. Both go before the folder they use.
    broker: Option<Result<BrokerProcess, String>>,
    namespaces: Option<Result<Namespaces, String>>,
    scratch: TempDir,
    pairs: u64,
    /// Problems that have been reported.
    told: Vec<(Mechanism, String)>,
    /// The tables and plots that were shown.
    page: RefCell<HtmlReport>,
}

impl Bench {
    /// Looks at the machine; starts nothing yet.
    pub(crate) fn new(common: &Common) -> Result<Self> {
        let placement = Placement::choose(common.cpus.as_deref(), common.same_cpu)?;
        let host = Host::look();
        let interrupt = Interrupt::catch()?;
        raise_descriptor_limit();
        let scratch =
            tempfile::Builder::new().prefix("partywall-bench-").tempdir().during("making a temporary folder")?;
        let bench = Self {
            common: common.clone(),
            placement,
            host,
            interrupt,
            broker: None,
            namespaces: None,
            scratch,
            pairs: 0,
            told: Vec::new(),
            page: RefCell::default(),
        };
        bench.say(&format!("# {}", bench.host.line()))?;
        let Placement { active, passive } = placement;
        bench.say(&format!("# sender on processor {active}, receiver on {passive}, {} runs each", common.runs()))?;
        if bench.scale() == Scale::Smoke {
            bench.say("# NOTE: at this scale figures mean nothing")?;
        } else if bench.host.load > 0.5 {
            bench.say("# NOTE: the machine is busy with something else; expect wide ranges")?;
        }
        Ok(bench)
    }

    /// How thoroughly the options ask to measure.
    pub(crate) fn scale(&self) -> Scale {
        self.common.scale()
    }

    /// A folder that is removed in the end.
    pub(crate) fn scratch(&self) -> std::path::PathBuf {
        self.scratch.path().to_owned()
    }

    /// Reports on standard error a step that takes a while.
    pub(crate) fn progress(&self, what: &str) {
        eprintln!("partywall-bench: {what}");
    }

    /// Prints a paragraph to standard output.
    pub(crate) fn say(&self, text: &str) -> Result<()> {
        self.page.borrow_mut().add_text(text);
        let mut out = std::io::stdout().lock();
        writeln!(out, "{text}").and_then(|()| out.flush()).during("writing to standard output")
    }

    /// Measures everything planned, run by run: first everything once, then everything again, so that a slow minute of the machine
    /// touches one run of all and not all runs of one.
    pub(crate) fn measure(&mut self, plans: Vec<BenchPlan>) -> Result<Vec<Cell>> {
        self.measure_by(plans, self.common.runs(), Self::run)
    }

    /// Like `measure`, for measurements that are not made by two processes of this machine.
    pub(crate) fn measure_by(
        &mut self,
        plans: Vec<BenchPlan>,
        runs: u32,
        mut run: impl FnMut(&mut Self, &BenchPlan) -> Result<Figures>,
    ) -> Result<Vec<Cell>> {
        let plans: Vec<BenchPlan> = plans.into_iter().filter(|plan| self.common.wants(plan.key.mechanism)).collect();
        let mut cells: Vec<Cell> = plans.iter().map(|plan| Cell::new(plan.key.clone())).collect();
        let progress = progress(plans.len() as u64 * u64::from(runs));
        for _ in 0..runs {
            for (plan, cell) in plans.iter().zip(&mut cells) {
                progress.set_message(plan.key.to_string());
                if cell.problem.is_none() {
                    match run(self, plan) {
                        Ok(figures) => cell.runs.push(figures),
                        Err(BenchError::Interrupted) => {
                            progress.finish_and_clear();
                            return Err(BenchError::Interrupted);
                        }
                        Err(e) => {
                            let problem = match e {
                                BenchError::Unavailable(why) => Problem::Unavailable(why),
                                e => Problem::Failed(e.to_string()),
                            };
                            // A lack of the machine is reported once, and not for every size again.
                            let told = (plan.key.mechanism, problem.to_string());
                            if matches!(problem, Problem::Failed(_)) || !self.told.contains(&told) {
                                progress.suspend(|| eprintln!("partywall-bench: {}: {problem}", plan.key));
                                self.told.push(told);
                            }
                            cell.problem = Some(problem);
                        }
                    }
                }
                progress.inc(1);
            }
        }
        progress.finish_and_clear();
        Ok(cells)
    }

    /// One run of one measurement.
    pub(crate) fn run(&mut self, plan: &BenchPlan) -> Result<Figures> {
        let mechanism = plan.key.mechanism;
        let Placement { active, mut passive } = self.placement;
        if plan.one_cpu {
            passive = active;
        }
        let spins = mechanism.only_spins() || (mechanism.is_partywall() && plan.tuning.waiting == WaitMode::Spinning);
        if spins && active == passive {
            return Err(BenchError::Unavailable("it spins, and both sides share a processor".into()));
        }
        let broker = mechanism.is_partywall().then(|| self.broker()).transpose()?;
        let broker_pid = broker.and_then(BrokerProcess::id);
        let broker = broker.map(|broker| broker.socket().to_owned());
        self.run_pairs(plan, [Some(active), Some(passive)], [broker.clone(), broker], broker_pid)
    }

    /// The same where the scheduler places both sides, each of which may have a broker.
    pub(crate) fn run_unpinned(&mut self, plan: &BenchPlan, brokers: Option<&[PathBuf; 2]>) -> Result<Figures> {
        let brokers = [0, 1].map(|side| brokers.map(|brokers| brokers[side].clone()));
        self.run_pairs(plan, [None; 2], brokers, None)
    }

    /// One run: the processors of the two sides, and their brokers.
    fn run_pairs(
        &mut self,
        plan: &BenchPlan,
        cpus: [Option<usize>; 2],
        brokers: [Option<PathBuf>; 2],
        broker_pid: Option<u32>,
    ) -> Result<Figures> {
        let mechanism = plan.key.mechanism;
        if mechanism == Mechanism::TcpVeth {
            self.namespaces()?;
        }
        let namespaces = self.namespaces.as_ref().and_then(|made| made.as_ref().ok());
        let parent = std::process::id();
        let works = spread(&plan.work, getrlimit(Resource::Nofile).current);
        let mut pairs = Vec::with_capacity(works.len());
        for (at, work) in works.into_iter().enumerate() {
            self.pairs += 1;
            let task = |side: MeasuringSide| MeasuringTask {
                side,
                parent,
                leads: at == 0,
                cpu: cpus[usize::from(side == MeasuringSide::Passive)],
                mechanism,
                tuning: plan.tuning.clone(),
                work: work.clone(),
                broker: brokers[usize::from(side == MeasuringSide::Passive)].clone(),
                broker_pid,
                session: format!("bench-{parent}-{}", self.pairs),
                scratch: self.scratch.path().to_owned(),
                inside: None,
            };
            let [active_wires, passive_wires] = transport::prepare(mechanism, &plan.tuning, namespaces)?;
            pairs.push([(task(MeasuringSide::Active), active_wires), (task(MeasuringSide::Passive), passive_wires)]);
        }
        // The first pair's active side keeps step with those of the others.
        if let Some(([(_, first), _], others)) = pairs.split_first_mut() {
            for [(_, other), _] in others {
                let (here, there) = TaskSocket::pair()?;
                first.push(here.into());
                other.push(there.into());
            }
        }
        let answers = run_pairs(pairs, patience(&plan.work), &self.interrupt)?;
        let sides: Vec<Figures> = answers
            .into_iter()
            .map(|answer| match answer {
                TaskAnswer::Figures(figures) => Ok(figures),
                TaskAnswer::Unavailable(why) => Err(BenchError::Unavailable(why)),
                TaskAnswer::Failed(why) => Err(BenchError::Transport(why)),
            })
            .collect::<Result<_>>()?;
        let mut figures = merge(sides.chunks(2).map(|pair| pair.iter().flatten().map(|(m, v)| (*m, *v)).collect()));
        combine(&mut figures);
        Ok(figures)
    }

    /// Programs that become another user must find the broker.
    pub(crate) fn let_other_users_in(&self) -> Result<()> {
        let open = <std::fs::Permissions as std::os::unix::fs::PermissionsExt>::from_mode(0o755);
        std::fs::set_permissions(self.scratch.path(), open).during("opening the temporary folder")
    }

    /// The surroundings of unmodified programs: the library, the broker, and namespaces where there can be any.
    pub(crate) fn scene(&mut self) -> Result<BenchScene<'_>> {
        let library = site::library()?;
        let broker = self.broker()?.socket().to_owned();
        self.let_other_users_in()?;
        let spaces = match self.namespaces() {
            Ok(made) => Some(made.ends().clone()),
            Err(BenchError::Interrupted) => return Err(BenchError::Interrupted),
            Err(e) => {
                eprintln!("partywall-bench: nothing is measured between namespaces: {e}");
                None
            }
        };
        let (scratch, interrupt) = (self.scratch.path(), &self.interrupt);
        Ok(BenchScene { library, broker, spaces, scratch, interrupt, cpu: self.placement.active })
    }

    /// The broker, started when first asked for.
    pub(crate) fn broker(&mut self) -> Result<&BrokerProcess> {
        let (folder, interrupt) = (self.scratch.path(), &self.interrupt);
        once(&mut self.broker, || BrokerProcess::start(folder, interrupt))
    }

    /// The network namespaces, made when first asked for.
    fn namespaces(&mut self) -> Result<&Namespaces> {
        once(&mut self.namespaces, Namespaces::create)
    }

    /// Draws pictures, if asked to.
    pub(crate) fn draw(&self, pictures: &BTreeMap<String, Picture>) -> Result<()> {
        if self.common.html.is_some() {
            let mut page = self.page.borrow_mut();
            pictures.iter().try_for_each(|(stem, picture)| page.add_picture(stem, picture))?;
        }
        let Some(folder) = &self.common.plots else { return Ok(()) };
        pictures.iter().try_for_each(|(stem, picture)| plot::draw(folder, stem, picture))
    }

    /// Writes the result file, if asked to, and gives the exit status: 1 if something that should work did not, 3 if a target was missed.
    pub(crate) fn finish(self, results: CommandResults) -> Result<u8> {
        let CommandResults { cells, verdicts } = results;
        let failed = cells.iter().filter(|cell| matches!(cell.problem, Some(Problem::Failed(_)))).count();
        let missed = verdicts.iter().filter(|verdict| verdict.met() == Some(false)).count();
        if let Some(path) = &self.common.json {
            BenchReport::new(self.host.clone(), self.placement, cells, verdicts).write(path)?;
        }
        if let Some(path) = &self.common.html {
            let page = self.page.borrow().page("Partywall bench");
            std::fs::write(path, page).during(format!("writing {}", path.display()))?;
        }
        if failed > 0 {
            eprintln!("partywall-bench: {failed} measurements failed");
        }
        // At the smallest scale nothing is measured, so nothing can be missed.
        Ok(match (failed, missed) {
            (1.., _) => 1,
            (0, 1..) if self.common.scale() > Scale::Smoke => 3,
            _ => 0,
        })
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        #[cfg(feature = "iceoryx2")]
        transport::iceoryx2::remove_leftovers();
    }
}

/// Descriptors that a channel takes on each side: an end of each of its two links, and the two regions.
const PER_CHANNEL: u64 = 4;
/// Descriptors that a measuring process needs besides.
const BESIDES: u64 = 100;

/// Work as shared out to as many pairs of processes as the descriptors that each may have demand.
fn spread(work: &MeasuringWork, descriptors: Option<u64>) -> Vec<MeasuringWork> {
    let &MeasuringWork::OpenChannels { channels, share, idle } = work else { return vec![work.clone()] };
    let most = descriptors.map_or(u64::MAX, |limit| (limit.saturating_sub(BESIDES) / PER_CHANNEL).max(1));
    let pairs = share.div_ceil(most).clamp(1, MOST_PAIRS);
    let part =
        |at: u64| MeasuringWork::OpenChannels { channels, share: share / pairs + u64::from(at < share % pairs), idle };
    (0..pairs).map(part).collect()
}

/// One figure of each from several pairs of processes: sums of what adds up, and means, by channels, of what each channel has.
fn merge(pairs: impl Iterator<Item = Figures>) -> Figures {
    let mut all = Figures::new();
    let mut channels = 0.0;
    for pair in pairs {
        let here = pair.get(&Metric::Channels).copied().unwrap_or(1.0);
        for (metric, value) in pair {
            match all.get_mut(&metric) {
                None => {
                    all.insert(metric, value);
                }
                Some(sum) => match metric {
                    Metric::FdsPerChannel | Metric::MappingsPerChannel | Metric::BytesPerChannel => {
                        *sum = (*sum * channels + value * here) / (channels + here).max(1.0);
                    }
                    _ => *sum += value,
                },
            }
        }
        channels += here;
    }
    all
}

/// Adds the figures that only both sides together have.
fn combine(figures: &mut Figures) {
    let get = |metric: Metric| figures.get(&metric).copied();
    if let (Some(sender), Some(receiver)) = (get(Metric::SenderCpuPercent), get(Metric::ReceiverCpuPercent)) {
        let broker = get(Metric::BrokerCpuPercent);
        figures.insert(Metric::BothCpuPercent, sender + receiver);
        figures.extend(broker.map(|broker| (Metric::AllCpuPercent, sender + receiver + broker)));
    }
}

/// More processes than this would measure the scheduler.
const MOST_PAIRS: u64 = 16;

/// Descriptors for ten thousand channels with several each, and then some.
const DESCRIPTORS: u64 = 200_000;

/// Allows this process, and those it starts, the descriptors that many channels take, or as many as it may have.
fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    let wanted = limit.maximum.map(|maximum| maximum.max(DESCRIPTORS));
    for maximum in [wanted, limit.maximum] {
        // Only root may raise the maximum. If the limit stays too low, the measurement that needs it fails with an error.
        if setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).is_ok() {
            break;
        }
    }
}

/// Makes something when it is first wanted. A failure is remembered, and repeated each time.
fn once<T>(slot: &mut Option<Result<T, String>>, make: impl FnOnce() -> Result<T>) -> Result<&T> {
    if slot.is_none() {
        *slot = Some(match make() {
            Ok(made) => Ok(made),
            Err(BenchError::Interrupted) => return Err(BenchError::Interrupted),
            Err(e) => Err(e.to_string()),
        });
    }
    match slot {
        Some(Ok(made)) => Ok(made),
        Some(Err(why)) => Err(BenchError::Unavailable(why.clone())),
        None => Err(BenchError::Unavailable("it was not made".into())),
    }
}

/// How long a pair of processes may take before something must be wrong: far longer than the slowest mechanism needs.
pub(crate) fn patience(work: &MeasuringWork) -> Duration {
    const SETTING_UP: Duration = Duration::from_secs(30);
    const SLOWEST: u64 = 20_000_000;
    const OPENING: Duration = Duration::from_millis(5);
    const SLOW_ANSWER: Duration = Duration::from_millis(200);
    SETTING_UP
        + match work {
            MeasuringWork::Transfer { total, repeats, warm_up, .. } => {
                *warm_up * 8 + Duration::from_secs(total * u64::from(*repeats) / SLOWEST)
            }
            MeasuringWork::Stream { measured, warm_up, .. } => (*measured + *warm_up) * 20,
            MeasuringWork::ManyChannels { channels, turns, measured, warm_up, .. } => {
                (*measured + *warm_up) * 20 * (2 * turns + 1) + OPENING * *channels as u32 * *turns
            }
            MeasuringWork::Paced { measured, .. } | MeasuringWork::ConnectClose { measured } => *measured * 20,
            MeasuringWork::Ask { least, measured, .. } => *measured * 20 + SLOW_ANSWER * *least as u32,
            MeasuringWork::OpenChannels { channels, idle, .. } => *idle * 20 + OPENING * *channels as u32,
            MeasuringWork::RoundTrip { warm_up, count, think, .. } => {
                (*think + Duration::from_micros(200)) * (*warm_up + *count) as u32 * 4
            }
            MeasuringWork::HandOver { warm_up, count, .. } => Duration::from_micros(800) * (*warm_up + *count) as u32,
            // These are not made by a pair of measuring processes.
            MeasuringWork::Peer(_) | MeasuringWork::Files(_) => Duration::ZERO,
        }
}

/// A progress line on the terminal, and nothing elsewhere.
fn progress(steps: u64) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new(steps);
    // The template is ours and constant.
    if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len} {eta} {wide_msg}") {
        bar.set_style(style);
    }
    bar
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn channels_are_spread_over_as_many_pairs_as_descriptors_demand() {
        let idle = Duration::ZERO;
        let work = MeasuringWork::OpenChannels { channels: 10_000, share: 10_000, idle };
        let shares = |limit| -> Vec<u64> {
            let share = |work: MeasuringWork| match work {
                MeasuringWork::OpenChannels { share, .. } => share,
                other => panic!("{other:?}"),
            };
            spread(&work, limit).into_iter().map(share).collect()
        };
        assert_eq!(shares(None), [10_000]);
        assert_eq!(shares(Some(200_000)), [10_000]);
        assert_eq!(shares(Some(20_000)), [3_334, 3_333, 3_333]);
        assert_eq!(shares(Some(10_000)), [2_000; 5]);
        assert_eq!(shares(Some(0)).iter().sum::<u64>(), 10_000);
        let other = MeasuringWork::ConnectClose { measured: idle };
        assert_eq!(spread(&other, Some(0)), [other]);
    }

    #[test]
    fn figures_of_pairs_are_summed_or_averaged_by_channel() {
        let pair = |channels: f64, fds: f64| {
            Figures::from([(Metric::Channels, channels), (Metric::Pairs, 1.0), (Metric::FdsPerChannel, fds)])
        };
        let all = merge([pair(100.0, 3.0), pair(300.0, 5.0)].into_iter());
        let expected = [(Metric::Channels, 400.0), (Metric::Pairs, 2.0), (Metric::FdsPerChannel, 4.5)];
        assert_eq!(all, Figures::from(expected));
    }
}
