//! The broker's answers to an honest client: alone, beside threads that only keep the processors busy, and while hostile sessions send
//! whatever a user's programs may send.

use std::time::Duration;

use super::CommandResults;
use crate::{
    args::Scale,
    bench::{Bench, BenchPlan},
    error::Result,
    flood::THREADS,
    measure::broker::{PAUSE, other_user},
    mechanism::{Mechanism, Tuning},
    report::{
        cell::{Cell, Key},
        metric::Metric,
        table::{self, Layout},
        unit,
        verdict::{Bound, Verdict},
    },
    task::{Beside, BrokerQuestion, MeasuringWork},
};

/// Hostile sessions that are open at once.
const HOSTILE: u64 = 40;
/// The promised p99 of the broker's answers under that flood, in milliseconds.
const LIMIT_MS: f64 = 10.0;
const ALONE: &str = "alone";
const BUSY: &str = "busy";
const FLOOD: &str = "flood";
/// Under the same flood, a client that has to wait for a processor like any other program.
const FLOOD_ORDINARY: &str = "flood, ordinary";

fn plans(scale: Scale) -> Vec<BenchPlan> {
    let (least, millis) = match scale {
        Scale::Smoke => (10, 20),
        Scale::Quick => (200, 1_000),
        Scale::Full => (500, 5_000),
    };
    let plan = |question: BrokerQuestion, (load, beside, urgent): (&str, Beside, bool)| BenchPlan {
        key: Key::new("broker", Mechanism::Partywall).with("question", question.name()).with("load", load),
        tuning: Tuning::of(Mechanism::Partywall, 1),
        work: MeasuringWork::Ask { question, beside, urgent, least, measured: Duration::from_millis(millis) },
        one_cpu: false,
    };
    let loads = [
        (ALONE, Beside::Nothing, true),
        (BUSY, Beside::BusyThreads, true),
        (FLOOD, Beside::HostileSessions(HOSTILE), true),
        (FLOOD_ORDINARY, Beside::HostileSessions(HOSTILE), false),
    ];
    BrokerQuestion::ALL.iter().flat_map(|question| loads.map(|load| plan(*question, load))).collect()
}

/// Measures and shows.
pub(crate) fn run(bench: &mut Bench) -> Result<CommandResults> {
    bench.let_other_users_in()?;
    let whose = match other_user() {
        Some(user) => format!("of user {user}"),
        None => "of the honest client's own user, to whom nothing is promised (run it as root)".into(),
    };
    bench.say(&format!(
        "# flood: {HOSTILE} hostile sessions {whose}, in {THREADS} threads of one process\n\
         # busy: {THREADS} threads that say nothing to the broker: what they cost is the kernel's scheduling\n\
         # the client goes before all other programs (nice -20, as root), so that it waits for the broker and hardly for a processor;\n\
         # ordinary: it does not, and what it waits for is mostly a processor\n\
         # it asks {} times a second; nothing is pinned to a processor",
        Duration::from_secs(1).as_millis() / PAUSE.as_millis()
    ))?;
    let cells = bench.measure(plans(bench.scale()))?;
    let verdicts = judge(&cells, other_user().is_some());
    bench.say("\n## The broker's answers to an honest client\n")?;
    let layout = Layout {
        group: &[("question", "question")],
        row: &[("load", "load")],
        metrics: &[Metric::P99Ns, Metric::P50Ns, Metric::MaxNs, Metric::HostilePerSecond],
        baseline: Mechanism::Partywall,
    };
    bench.say(&table::cells(&cells, &layout))?;
    bench.say("")?;
    bench.say(&table::verdicts(&verdicts))?;
    Ok(CommandResults { cells, verdicts })
}

/// The promise, question by question. It is about other users than the hostile one.
fn judge(cells: &[Cell], other_user: bool) -> Vec<Verdict> {
    let p99 = |question: BrokerQuestion, load: &str| {
        let fits =
            |cell: &&Cell| cell.key.word("question") == Some(question.name()) && cell.key.word("load") == Some(load);
        cells.iter().find(fits).and_then(|cell| cell.summary(Metric::P99Ns))
    };
    let verdict = |question: &BrokerQuestion| {
        let flood = p99(*question, FLOOD);
        let show = |ns: f64| unit::nanoseconds(ns);
        let others = [ALONE, BUSY, FLOOD_ORDINARY].map(|load| p99(*question, load));
        let figures = match (others, flood) {
            ([Some(alone), Some(busy), Some(ordinary)], Some(flood)) => {
                let [alone, busy, ordinary] = [alone, busy, ordinary].map(|summary| show(summary.median));
                let (min, max) = (show(flood.min), show(flood.max));
                format!("alone {alone}; busy {busy}; runs from {min} to {max}; ordinary client {ordinary}")
            }
            _ => String::new(),
        };
        let bound = if other_user { Bound::AtMost } else { Bound::Report };
        let claim = format!("{}: p99 under {HOSTILE} hostile sessions, ms", question.name());
        Verdict { figures, ..Verdict::figure(claim, bound, LIMIT_MS, flood.map(|summary| summary.median / 1e6)) }
    };
    BrokerQuestion::ALL.iter().map(verdict).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::task::Figures;

    fn measured(flood_ms: [f64; 3]) -> Vec<Cell> {
        let cell = |plan: BenchPlan| {
            let mut cell = Cell::new(plan.key);
            let runs = if cell.key.word("load") == Some(FLOOD) { flood_ms } else { [0.1; 3] };
            cell.runs = runs.map(|ms| Figures::from([(Metric::P99Ns, ms * 1e6)])).into();
            cell
        };
        plans(Scale::Smoke).into_iter().map(cell).collect()
    }

    #[test]
    fn verdict_is_on_median_of_runs_under_flood() {
        let words = |ms, other| -> Vec<&str> { judge(&measured(ms), other).iter().map(Verdict::word).collect() };
        assert_eq!(words([1.0, 9.9, 50.0], true), ["met"; 3]);
        assert_eq!(words([1.0, 10.1, 50.0], true), ["MISSED"; 3]);
    }

    #[test]
    fn verdict_about_flood_of_own_user_is_none() {
        assert!(judge(&measured([99.0; 3]), false).iter().all(|verdict| verdict.met().is_none()));
    }
}
