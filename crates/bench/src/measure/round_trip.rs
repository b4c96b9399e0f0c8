//! There and back, one at a time.
//!
//! One reading of the clock per round trip, unless there is a pause: the end of one is the beginning of the next.

use std::time::Duration;

use super::transfer::message_of;
use super::turns::TurnTimes;
use crate::{
    control::Beat,
    error::{BenchError, Result},
    task::{Figures, MeasuringSide, MeasuringTask, MeasuringWork},
    transport::{CopyLink, InPlace},
};

/// Something that asks and answers.
trait RequestReply {
    /// Asks, and takes the answer. `number` differs from one to the next.
    fn ask(&mut self, number: u64) -> Result<()>;

    /// Takes one question, and answers it.
    fn answer(&mut self) -> Result<()>;

    /// Waits until all questions have been answered, where the mechanism answers them; `false` where the caller has to.
    fn answers_by_itself(&mut self) -> Result<bool> {
        Ok(false)
    }
}

/// By copying the payload.
struct Copied<L> {
    link: L,
    out: Vec<u8>,
    inward: Vec<u8>,
}

impl<L: CopyLink> Copied<L> {
    #[inline]
    fn receive_all(&mut self) -> Result<()> {
        let mut got = 0;
        while got < self.inward.len() {
            match self.link.receive(&mut self.inward[got..])? {
                0 => return Err(BenchError::Damaged("the connection closed in the middle of a round trip".into())),
                n => got += n,
            }
        }
        Ok(())
    }
}

impl<L: CopyLink> RequestReply for Copied<L> {
    #[inline]
    fn ask(&mut self, number: u64) -> Result<()> {
        // A mechanism without payload leaves the answer as it is, and it stays equal.
        match self.out.first_chunk_mut::<8>() {
            Some(head) => *head = number.to_ne_bytes(),
            None => self.out.fill(number as u8),
        }
        self.inward[0] = self.out[0];
        self.link.send(&self.out)?;
        self.receive_all()?;
        if self.inward[0] != self.out[0] || self.inward.last() != self.out.last() {
            return Err(BenchError::Damaged(format!("the answer to round trip {number} is not what was asked")));
        }
        Ok(())
    }

    #[inline]
    fn answer(&mut self) -> Result<()> {
        self.receive_all()?;
        self.link.send(&self.inward)
    }

    fn answers_by_itself(&mut self) -> Result<bool> {
        self.link.answers_by_itself()
    }
}

/// By naming the payload.
struct Referenced<L> {
    link: L,
    message: usize,
}

impl<L: InPlace> RequestReply for Referenced<L> {
    #[inline]
    fn ask(&mut self, number: u64) -> Result<()> {
        self.link.hand_over(self.message, number)?;
        match self.link.take_over(self.message)? {
            found if found == number => Ok(()),
            found => Err(BenchError::Damaged(format!("hand-over {number} came back as {found}"))),
        }
    }

    #[inline]
    fn answer(&mut self) -> Result<()> {
        let number = self.link.take_over(self.message)?;
        self.link.hand_over(self.message, number)
    }
}

/// Runs one side of a copied round trip.
pub(super) fn run(link: impl CopyLink, task: &MeasuringTask, beat: &Beat) -> Result<Figures> {
    let message = message_of(task);
    exchange(Copied { link, out: vec![0; message], inward: vec![0; message] }, task, beat)
}

/// Runs one side of a hand-over by reference.
pub(super) fn run_by_reference(link: impl InPlace, task: &MeasuringTask, beat: &Beat) -> Result<Figures> {
    exchange(Referenced { link, message: message_of(task) }, task, beat)
}

fn exchange(mut over: impl RequestReply, task: &MeasuringTask, beat: &Beat) -> Result<Figures> {
    let (warm_up, count, think) = match task.work {
        MeasuringWork::RoundTrip { warm_up, count, think, .. } => (warm_up, count, think),
        MeasuringWork::HandOver { warm_up, count, .. } => (warm_up, count, Duration::ZERO),
        _ => return Err(BenchError::Transport("this is not a round trip".into())),
    };
    beat.meet()?;
    if task.side == MeasuringSide::Passive {
        if !over.answers_by_itself()? {
            for _ in 0..warm_up + count {
                over.answer()?;
            }
        }
        // The connection stays until the other side has the last answer.
        beat.meet()?;
        return Ok(Figures::new());
    }
    for number in 0..warm_up {
        pause(think);
        over.ask(number)?;
    }
    let mut turns = TurnTimes::start()?;
    for number in warm_up..warm_up + count {
        if !think.is_zero() {
            pause(think);
            turns.skip();
        }
        over.ask(number)?;
        turns.note();
    }
    beat.meet()?;
    Ok(turns.figures())
}

fn pause(think: Duration) {
    if !think.is_zero() {
        std::thread::sleep(think);
    }
}
