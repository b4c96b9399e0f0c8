//! Every ratio that Partywall promises, measured in one run, with its target and whether it is met.

use std::time::Duration;

use super::{CommandResults, RoundTripPace, channels, hand_over_plan, ring_plan, round_trip_plan, stream_plan};
use crate::{
    args::Scale,
    bench::{Bench, BenchPlan},
    error::Result,
    mechanism::{Mechanism, Tuning, WaitMode},
    report::{
        cell::{Cell, Key},
        metric::Metric,
        table, unit,
        verdict::{Bound, Verdict},
    },
    task::MeasuringWork,
};

const NAME: &str = "ratios";
/// Rings of given size: with messages of 64 KiB each of these, and with each of the smaller messages one of 1 MiB.
const RINGS: [u64; 4] = [128 << 10, 1 << 20, 4 << 20, 8 << 20];
const RINGED: [u64; 3] = [64, 512, 4 << 10];
const BULK: u64 = 64 << 10;
/// Sizes at which the adapting stream is held against the kernel's, with the least ratio to UNIX sockets and to TCP.
const STREAMS: [(u64, f64, Option<f64>); 6] = [
    (64, 15.0, None),
    (512, 12.0, None),
    (4 << 10, 4.0, None),
    (BULK, 2.0, Some(2.5)),
    (256 << 10, 2.0, Some(2.5)),
    (1 << 20, 2.0, Some(2.5)),
];

/// Writes for which the adapting stream is held against the best of [`RINGS`].
const ADAPTED: [u64; 4] = [4 << 10, BULK, 256 << 10, 1 << 20];

/// Fixed rings that no plain ring is measured beside: those of [`ADAPTED`] that are not among the others.
fn fixed_only() -> impl Iterator<Item = (u64, u64)> {
    let others = |message, ring| message == BULK || (RINGED.contains(&message) && ring == 1 << 20);
    ADAPTED.into_iter().flat_map(|message| RINGS.map(|ring| (message, ring))).filter(move |&(m, r)| !others(m, r))
}

fn round_trips() -> [(Mechanism, u64, RoundTripPace, WaitMode); 7] {
    [
        (Mechanism::TwoLine, 64, RoundTripPace::Tight, WaitMode::Spinning),
        (Mechanism::Partywall, 64, RoundTripPace::Tight, WaitMode::Spinning),
        (Mechanism::Partywall, 64, RoundTripPace::Tight, WaitMode::Adaptive),
        (Mechanism::Eventfd, 8, RoundTripPace::Tight, WaitMode::Blocking),
        (Mechanism::Partywall, 64, RoundTripPace::Tight, WaitMode::Blocking),
        (Mechanism::Partywall, 64, RoundTripPace::Light, WaitMode::Blocking),
        (Mechanism::Partywall, 64, RoundTripPace::Light, WaitMode::Adaptive),
    ]
}

/// Bytes handed over by reference.
const REFERENCES: [u64; 2] = [64, 1 << 20];

fn plans(scale: Scale) -> Vec<BenchPlan> {
    let mut plans = Vec::new();
    let ringed = RINGS.map(|ring| (BULK, ring)).into_iter().chain(RINGED.map(|message| (message, 1 << 20)));
    for (message, ring) in ringed {
        plans.extend(
            [Mechanism::PlainRing, Mechanism::PartywallFixed].map(|m| ring_plan(NAME, scale, m, message, ring)),
        );
    }
    // Cells to be compared are measured one after the other, so that a change of the machine's speed affects both.
    for (message, ..) in STREAMS {
        let fixed = fixed_only().filter(|&(fixed, _)| fixed == message);
        plans.extend(fixed.map(|(message, ring)| ring_plan(NAME, scale, Mechanism::PartywallFixed, message, ring)));
        plans.extend(
            [Mechanism::Partywall, Mechanism::Unix, Mechanism::Tcp].map(|m| stream_plan(NAME, scale, m, message)),
        );
    }
    plans.extend(
        round_trips().map(|(m, message, load, waiting)| round_trip_plan(NAME, scale, m, message, load, waiting)),
    );
    plans.extend(REFERENCES.map(|message| hand_over_plan(NAME, scale, Mechanism::PartywallZeroCopy, message)));
    let measured = Duration::from_millis(if scale == Scale::Smoke { 20 } else { 2000 });
    plans.push(BenchPlan {
        key: Key::new(NAME, Mechanism::Partywall).with("rate", 0),
        tuning: Tuning::of(Mechanism::Partywall, BULK),
        work: MeasuringWork::Paced { message: BULK, rate: 0, measured },
        one_cpu: false,
    });
    plans
}

/// Measures and shows.
pub(crate) fn run(bench: &mut Bench) -> Result<CommandResults> {
    let mut cells = bench.measure(plans(bench.scale()))?;
    cells.extend(channels::measure(bench, NAME)?);
    let verdicts = judge(&cells);
    bench.say("\n## What is promised, and what was measured (median of the ratios of the turns of this run; figures are medians)\n")?;
    bench.say(&table::verdicts(&verdicts))?;
    Ok(CommandResults { cells, verdicts })
}

/// Looks figures up.
struct FigureTable<'a>(&'a [Cell]);

impl FigureTable<'_> {
    fn cell(&self, mechanism: Mechanism, settings: &[(&str, &str)], numbers: &[(&str, u64)]) -> Option<&Cell> {
        let fits = |cell: &&Cell| {
            let key = &cell.key;
            key.experiment == NAME
                && key.mechanism == mechanism
                && key.settings.len() == settings.len() + numbers.len()
                && settings.iter().all(|(name, word)| key.word(name) == Some(word))
                && numbers.iter().all(|(name, number)| key.number(name) == Some(*number))
        };
        self.0.iter().find(fits)
    }

    fn stream(&self, mechanism: Mechanism, message: u64) -> Option<&Cell> {
        self.cell(mechanism, &[], &[("message", message)])
    }

    fn ringed(&self, mechanism: Mechanism, message: u64, ring: u64) -> Option<&Cell> {
        self.cell(mechanism, &[], &[("message", message), ("ring", ring)])
    }

    fn round_trip(&self, mechanism: Mechanism, message: u64, load: &str, waiting: WaitMode) -> Option<&Cell> {
        self.cell(mechanism, &[("load", load), ("waiting", waiting.name())], &[("message", message)])
    }
}

fn judge(cells: &[Cell]) -> Vec<Verdict> {
    let figures = FigureTable(cells);
    let mut verdicts = rings(&figures);
    verdicts.extend(sizes(&figures));
    verdicts.extend(streams(&figures));
    verdicts.extend(latencies(&figures));
    verdicts.extend(channels::judge(cells, NAME));
    verdicts
}

fn rings(figures: &FigureTable<'_>) -> Vec<Verdict> {
    let ringed = RINGS.map(|ring| (BULK, ring)).into_iter().chain(RINGED.map(|message| (message, 1 << 20)));
    ringed
        .map(|(message, ring)| {
            let claim =
                format!("stream of {}, ring of {} : plain ring of that size", unit::bytes(message), unit::bytes(ring));
            let [ours, theirs] =
                [Mechanism::PartywallFixed, Mechanism::PlainRing].map(|m| figures.ringed(m, message, ring));
            Verdict::by_turns(claim, Bound::AtLeast, 0.9, Metric::BytesPerSecond, ours, theirs)
        })
        .collect()
}

/// The size that a stream finds for its ring, held against the best of the fixed ones on this machine.
fn sizes(figures: &FigureTable<'_>) -> Vec<Verdict> {
    let verdict = |message| {
        let fixed = RINGS.map(|ring| figures.ringed(Mechanism::PartywallFixed, message, ring));
        let rate = |cell: &&Cell| cell.median(Metric::BytesPerSecond).unwrap_or_default();
        let best = fixed.into_iter().flatten().max_by(|a, b| rate(a).total_cmp(&rate(b)));
        let claim = format!("stream of {}, adaptive ring : best fixed ring", unit::bytes(message));
        let ours = figures.stream(Mechanism::Partywall, message);
        Verdict::by_turns(claim, Bound::AtLeast, 0.95, Metric::BytesPerSecond, ours, best)
    };
    ADAPTED.map(verdict).into()
}

fn streams(figures: &FigureTable<'_>) -> Vec<Verdict> {
    let mut verdicts = Vec::new();
    for (message, over_unix, over_tcp) in STREAMS {
        let rivals = [(Mechanism::Unix, Some(over_unix)), (Mechanism::Tcp, over_tcp)];
        for (rival, limit) in rivals.into_iter().filter_map(|(rival, limit)| Some((rival, limit?))) {
            let claim = format!("stream of {} : {rival}", unit::bytes(message));
            let (ours, theirs) = (figures.stream(Mechanism::Partywall, message), figures.stream(rival, message));
            verdicts.push(Verdict::by_turns(claim, Bound::AtLeast, limit, Metric::BytesPerSecond, ours, theirs));
        }
    }
    verdicts
}

fn latencies(figures: &FigureTable<'_>) -> Vec<Verdict> {
    let two_line = figures.round_trip(Mechanism::TwoLine, 64, "tight", WaitMode::Spinning);
    let eventfd = figures.round_trip(Mechanism::Eventfd, 8, "tight", WaitMode::Blocking);
    let ours = |load, waiting| figures.round_trip(Mechanism::Partywall, 64, load, waiting);
    let handed =
        |message| figures.round_trip(Mechanism::PartywallZeroCopy, message, "by-reference", WaitMode::Spinning);
    let light_blocking = ours("light", WaitMode::Blocking);
    let idle =
        figures.cell(Mechanism::Partywall, &[], &[("rate", 0)]).and_then(|cell| cell.median(Metric::BothCpuPercent));
    let claim =
        |text: &str, limit, ours, theirs| Verdict::by_turns(text, Bound::AtMost, limit, Metric::P50Ns, ours, theirs);
    vec![
        claim("round trip of 64 B, spinning : two-line ping-pong", 1.7, ours("tight", WaitMode::Spinning), two_line),
        claim(
            "round trip of 64 B, adaptive and awake : two-line ping-pong",
            1.7,
            ours("tight", WaitMode::Adaptive),
            two_line,
        ),
        claim("round trip of 64 B, blocking : eventfd ping-pong", 1.15, ours("tight", WaitMode::Blocking), eventfd),
        claim(
            "round trip after 1 ms of pause, adaptive : blocking",
            1.1,
            ours("light", WaitMode::Adaptive),
            light_blocking,
        ),
        claim("hand-over of 1 MiB by reference : of 64 B", 1.2, handed(REFERENCES[1]), handed(REFERENCES[0])),
        claim("hand-over of 1 MiB by reference : two-line ping-pong", 2.0, handed(REFERENCES[1]), two_line),
        Verdict::figure("idle connection, percent of one processor, both sides", Bound::AtMost, 0.1, idle),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::task::Figures as Run;

    #[test]
    fn every_claim_finds_its_figures() {
        let cells: Vec<Cell> = plans(Scale::Full)
            .into_iter()
            .chain(channels::plans(Scale::Full, NAME))
            .map(|plan| {
                let mut cell = Cell::new(plan.key);
                let all = [
                    Metric::BytesPerSecond,
                    Metric::P50Ns,
                    Metric::BothCpuPercent,
                    Metric::BesideToAlone,
                    Metric::Channels,
                    Metric::PerSecond,
                    Metric::BytesPerChannel,
                    Metric::FdsPerChannel,
                    Metric::MappingsPerChannel,
                    Metric::AllCpuPercent,
                ];
                cell.runs = vec![all.map(|metric| (metric, 2.0)).into_iter().collect::<Run>()];
                cell
            })
            .collect();
        let mut keys: Vec<&Key> = cells.iter().map(|cell| &cell.key).collect();
        keys.sort();
        keys.dedup();
        assert_eq!(keys.len(), cells.len(), "two measurements have the same name");
        for verdict in judge(&cells) {
            assert!(verdict.measured.is_some(), "{} has no figures", verdict.claim);
        }
        assert!(judge(&[]).iter().all(|verdict| verdict.measured.is_none()));
    }
}
