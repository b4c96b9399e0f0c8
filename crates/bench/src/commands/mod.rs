//! The subcommands: what each measures, and how it shows it.

pub(crate) mod advise;
pub(crate) mod all;
pub(crate) mod apps;
pub(crate) mod blk;
pub(crate) mod broker;
pub(crate) mod channels;
pub(crate) mod compare;
pub(crate) mod cpu;
pub(crate) mod fs;
pub(crate) mod gateway;
pub(crate) mod heap;
pub(crate) mod ipc;
pub(crate) mod latency;
pub(crate) mod net;
pub(crate) mod ratios;
pub(crate) mod residency;
pub(crate) mod rpc;
pub(crate) mod stream;
pub(crate) mod vm;

use std::time::Duration;

use crate::{
    args::Scale,
    bench::BenchPlan,
    mechanism::{Mechanism, Tuning, WaitMode},
    report::{cell::Cell, cell::Key, verdict::Verdict},
    task::MeasuringWork,
};

/// The results of a subcommand.
#[derive(Debug, Default)]
pub(crate) struct CommandResults {
    /// The figures, one cell for each combination of settings.
    pub(crate) cells: Vec<Cell>,
    /// The checks of the figures against their limits.
    pub(crate) verdicts: Vec<Verdict>,
}

impl From<Vec<Cell>> for CommandResults {
    fn from(cells: Vec<Cell>) -> Self {
        Self { cells, verdicts: Vec::new() }
    }
}

/// How long streams are measured, and how long they run before.
pub(crate) fn stretch(scale: Scale) -> (Duration, Duration) {
    let ms = Duration::from_millis;
    match scale {
        Scale::Smoke => (ms(2), ms(1)),
        Scale::Quick => (ms(200), ms(100)),
        Scale::Full => (ms(600), ms(200)),
    }
}

/// Streaming messages of one size.
pub(crate) fn stream_plan(experiment: &str, scale: Scale, mechanism: Mechanism, message: u64) -> BenchPlan {
    let (measured, warm_up) = stretch(scale);
    BenchPlan {
        key: Key::new(experiment, mechanism).with("message", message),
        tuning: Tuning::of(mechanism, message),
        work: MeasuringWork::Stream { message, measured, warm_up },
        one_cpu: false,
    }
}

/// Like `stream_plan`, with a ring of the given size.
pub(crate) fn ring_plan(experiment: &str, scale: Scale, mechanism: Mechanism, message: u64, ring: u64) -> BenchPlan {
    let mut plan = stream_plan(experiment, scale, mechanism, message);
    plan.key = plan.key.with("ring", ring);
    plan.tuning = plan.tuning.ring(ring);
    plan
}

/// Round trips, one after the other or with a pause before each.
pub(crate) fn round_trip_plan(
    experiment: &str,
    scale: Scale,
    mechanism: Mechanism,
    message: u64,
    load: RoundTripPace,
    waiting: WaitMode,
) -> BenchPlan {
    let think = match load {
        RoundTripPace::Tight => Duration::ZERO,
        RoundTripPace::Light => Duration::from_millis(1),
    };
    let count = match (scale, load) {
        (Scale::Smoke, _) => 10,
        (Scale::Quick, RoundTripPace::Tight) => 10_000,
        (Scale::Quick, RoundTripPace::Light) => 300,
        (Scale::Full, RoundTripPace::Tight) => 50_000,
        (Scale::Full, RoundTripPace::Light) => 1_000,
    };
    BenchPlan {
        key: Key::new(experiment, mechanism)
            .with("message", message)
            .with("load", load.name())
            .with("waiting", waiting.name()),
        tuning: Tuning::of(mechanism, message).waiting(waiting).prompt(),
        work: MeasuringWork::RoundTrip { message, warm_up: count / 10 + 1, count, think },
        one_cpu: false,
    }
}

/// Hand-overs by reference.
pub(crate) fn hand_over_plan(experiment: &str, scale: Scale, mechanism: Mechanism, message: u64) -> BenchPlan {
    let count = match scale {
        Scale::Smoke => 10,
        Scale::Quick => 20_000,
        Scale::Full => 100_000,
    };
    BenchPlan {
        key: Key::new(experiment, mechanism)
            .with("message", message)
            .with("load", "by-reference")
            .with("waiting", "spinning"),
        // The ring is the same for every size, so that size alone makes the difference.
        tuning: Tuning::of(mechanism, message).waiting(WaitMode::Spinning),
        work: MeasuringWork::HandOver { message, warm_up: count / 10 + 1, count },
        one_cpu: false,
    }
}

/// Whether round trips follow one another at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RoundTripPace {
    /// At once.
    Tight,
    /// A millisecond apart, as of a program that does something else between.
    Light,
}

impl RoundTripPace {
    /// The name in tables and results.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Tight => "tight",
            Self::Light => "light",
        }
    }
}

/// The ways to wait that a mechanism has.
pub(crate) fn waitings(mechanism: Mechanism) -> &'static [WaitMode] {
    match mechanism {
        Mechanism::Partywall | Mechanism::PartywallMessage | Mechanism::PartywallCall => {
            &[WaitMode::Spinning, WaitMode::Adaptive, WaitMode::Blocking]
        }
        mechanism if mechanism.only_spins() => &[WaitMode::Spinning],
        _ => &[WaitMode::Blocking],
    }
}
