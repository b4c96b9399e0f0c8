//! The measuring loops. Each runs in two processes at once, one side each, and is the same for every mechanism.

pub(crate) mod broker;
pub(crate) mod channels;
pub(crate) mod clock;
pub(crate) mod cpu;
mod ledger;
mod memory;
mod paced;
mod round_trip;
pub(crate) mod set_up;
pub(crate) mod sum;
mod transfer;
pub(crate) mod turns;

use crate::{
    control::Beat,
    error::{BenchError, Result},
    task::{Figures, MeasuringTask, MeasuringWork},
    transport::{CopyLink, InPlace, LinkJob},
};

/// One side of what a task asks for, over whatever connection the mechanism makes.
#[derive(Debug)]
pub(crate) struct Measurement<'a> {
    /// The order for this process.
    pub(crate) task: &'a MeasuringTask,
    /// The way to keep step with the other side.
    pub(crate) beat: &'a Beat,
}

impl LinkJob for Measurement<'_> {
    type Output = Figures;

    fn by_copy(self, link: impl CopyLink) -> Result<Figures> {
        let Self { task, beat } = self;
        match &task.work {
            MeasuringWork::Transfer { .. } | MeasuringWork::Stream { .. } => {
                transfer::run(transfer::CopyingStage::new(link, task), task, beat)
            }
            MeasuringWork::Paced { .. } => paced::run(transfer::CopyingStage::new(link, task), task, beat),
            MeasuringWork::RoundTrip { .. } => round_trip::run(link, task, beat),
            _ => unsuitable(task),
        }
    }

    fn in_place(self, link: impl InPlace) -> Result<Figures> {
        let Self { task, beat } = self;
        match &task.work {
            MeasuringWork::Transfer { .. } | MeasuringWork::Stream { .. } => {
                transfer::run(transfer::InPlaceStage::new(link, task), task, beat)
            }
            MeasuringWork::Paced { .. } => paced::run(transfer::InPlaceStage::new(link, task), task, beat),
            MeasuringWork::HandOver { .. } => round_trip::run_by_reference(link, task, beat),
            _ => unsuitable(task),
        }
    }
}

fn unsuitable(task: &MeasuringTask) -> Result<Figures> {
    Err(BenchError::Unavailable(format!(
        "{} is not something that can be measured over {}",
        work_name(&task.work),
        task.mechanism
    )))
}

fn work_name(work: &MeasuringWork) -> &'static str {
    match work {
        MeasuringWork::Transfer { .. } => "a transfer",
        MeasuringWork::Stream { .. } => "a stream",
        MeasuringWork::Paced { .. } => "a stream of fixed rate",
        MeasuringWork::RoundTrip { .. } => "a copied round trip",
        MeasuringWork::HandOver { .. } => "a hand-over by reference",
        MeasuringWork::ManyChannels { .. }
        | MeasuringWork::OpenChannels { .. }
        | MeasuringWork::ConnectClose { .. } => "many channels",
        MeasuringWork::Ask { .. } => "an answer of the broker",
        MeasuringWork::Peer(_) => "a call of separate programs",
        MeasuringWork::Files(_) => "a workload of files",
    }
}
