//! Streaming at a fixed rate, for the processor time that it takes on both sides.

use std::time::Duration;

use super::{
    clock,
    cpu::Usage,
    transfer::{Stages, receive_stage, send_stage, stop},
};
use crate::{
    control::Beat,
    error::{BenchError, Result},
    report::metric::Metric,
    task::{Figures, MeasuringSide, MeasuringTask, MeasuringWork},
};

/// Messages are sent in bursts about a millisecond apart: few programs time their sending more finely. Not a whole number of the
/// kernel's own ticks, by whose sampling it tells kernel from user time: it would always look at the same moment of a burst.
const TICK: u64 = 1_037_000;

/// Runs one side.
pub(super) fn run(mut stages: impl Stages, task: &MeasuringTask, beat: &Beat) -> Result<Figures> {
    let MeasuringWork::Paced { message, rate, measured } = task.work else {
        return Err(BenchError::Transport("this is not a paced measurement".into()));
    };
    match task.side {
        MeasuringSide::Active => {
            // One message beforehand, so that everything exists.
            send_stage(&mut stages, beat, 1, |_| ())?;
            let usage = Usage::now();
            let (count, took) = if rate == 0 {
                (0, idle(&mut stages, beat, measured)?)
            } else {
                let count = ((rate as f64 * measured.as_secs_f64()) as u64 / message).max(1);
                let schedule = Schedule::new(rate as f64 / message as f64);
                (count, send_stage(&mut stages, beat, count, |at| schedule.wait_for(at))?)
            };
            let share = usage.since();
            stop(beat)?;
            let achieved = (count * message) as f64 / took.as_secs_f64().max(1e-9);
            Ok(Figures::from([
                (Metric::BytesPerSecond, achieved),
                (Metric::SenderCpuPercent, share.own),
                (Metric::SenderKernelPercent, share.kernel),
                (Metric::MachineCpuPercent, share.machine),
            ]))
        }
        MeasuringSide::Passive => {
            receive_stage(&mut stages, beat)?;
            let usage = Usage::now();
            receive_stage(&mut stages, beat)?;
            let share = usage.since();
            while receive_stage(&mut stages, beat)?.is_some() {}
            Ok(Figures::from([(Metric::ReceiverCpuPercent, share.own), (Metric::ReceiverKernelPercent, share.kernel)]))
        }
    }
}

/// Leaves the connection idle, with the receiver waiting, and sends one message in the end to release it.
fn idle(stages: &mut impl Stages, beat: &Beat, time: Duration) -> Result<Duration> {
    let end = clock::now() + time.as_nanos() as u64;
    send_stage(stages, beat, 1, |_| clock::sleep_until(end))
}

/// When each message is due.
struct Schedule {
    start: u64,
    per_tick: f64,
}

impl Schedule {
    fn new(messages_per_second: f64) -> Self {
        Self { start: clock::now(), per_tick: messages_per_second * TICK as f64 / 1e9 }
    }

    /// Sleeps until message `at` is due; the messages of one tick are due together.
    fn wait_for(&self, at: u64) {
        let tick = (at as f64 / self.per_tick) as u64;
        let previous = if at == 0 { 0 } else { ((at - 1) as f64 / self.per_tick) as u64 };
        if tick != previous {
            let due = self.start + tick * TICK;
            if clock::now() < due {
                clock::sleep_until(due);
            }
        }
    }
}
