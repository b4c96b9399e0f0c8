//! The measuring loops. Each runs in two processes at once, one side each, and is the same for every mechanism.

pub(crate) mod broker;
pub(crate) mod channels;
pub(crate) mod clock;
mod cpu;
mod ledger;
mod memory;
mod paced;
mod round_trip;
pub(crate) mod sum;
mod transfer;

use crate::{
    control::Beat,
    error::{Error, Result},
    task::{Figures, Task, Work},
    transport::{CopyLink, InPlace, LinkJob},
};

/// One side of what a task asks for, over whatever connection the mechanism makes.
#[derive(Debug)]
pub(crate) struct Measurement<'a> {
    /// What is asked.
    pub(crate) task: &'a Task,
    /// The way to keep step with the other side.
    pub(crate) beat: &'a Beat,
}

impl LinkJob for Measurement<'_> {
    type Output = Figures;

    fn by_copy(self, link: impl CopyLink) -> Result<Figures> {
        let Self { task, beat } = self;
        match &task.work {
            Work::Transfer { .. } | Work::Stream { .. } => {
                transfer::run(transfer::Copying::new(link, task), task, beat)
            }
            Work::Paced { .. } => paced::run(transfer::Copying::new(link, task), task, beat),
            Work::RoundTrip { .. } => round_trip::run(link, task, beat),
            _ => unsuitable(task),
        }
    }

    fn in_place(self, link: impl InPlace) -> Result<Figures> {
        let Self { task, beat } = self;
        match &task.work {
            Work::Transfer { .. } | Work::Stream { .. } => {
                transfer::run(transfer::Staying::new(link, task), task, beat)
            }
            Work::Paced { .. } => paced::run(transfer::Staying::new(link, task), task, beat),
            Work::HandOver { .. } => round_trip::run_by_reference(link, task, beat),
            _ => unsuitable(task),
        }
    }
}

fn unsuitable(task: &Task) -> Result<Figures> {
    Err(Error::Unavailable(format!(
        "{} is not something that can be measured over {}",
        work_name(&task.work),
        task.mechanism
    )))
}

fn work_name(work: &Work) -> &'static str {
    match work {
        Work::Transfer { .. } => "a transfer",
        Work::Stream { .. } => "a stream",
        Work::Paced { .. } => "a stream of fixed rate",
        Work::RoundTrip { .. } => "a copied round trip",
        Work::HandOver { .. } => "a hand-over by reference",
        Work::ManyChannels { .. } | Work::OpenChannels { .. } | Work::ConnectClose { .. } => "many channels",
        Work::Ask { .. } => "an answer of the broker",
    }
}
