//! One-way bulk: transfers of a given size, and streaming for a given time.
//!
//! A *stage* is a number of messages. The sender announces it, the receiver says that it is ready and begins to receive, and only
//! then does the clock start: at the sender's first message. It stops when the receiver has the last byte. Both read the
//! same clock; two virtual machines have compared theirs.

use std::time::Duration;

use super::{
    clock,
    ledger::{Ledger, Source},
    sum::WordSum,
};
use crate::{
    apps::accounts::BusyStretch,
    control::Beat,
    error::{BenchError, Result},
    mechanism::Mechanism,
    report::{metric::Metric, stats::RunSummary},
    task::{Figures, MeasuringSide, MeasuringTask, MeasuringWork},
    transport::{CopyLink, InPlace},
};

/// Ends the stages.
const STOP: u64 = 0;
/// The value that the receiver sends when it is about to receive.
const READY: u64 = 1;

/// Something that sends and receives whole stages.
pub(super) trait Stages {
    /// Sends one message.
    fn send(&mut self) -> Result<()>;

    /// Sends buffered messages: no more will follow for now.
    fn flush(&mut self) -> Result<()> {
        Ok(())
    }

    /// Receives that many messages.
    fn receive(&mut self, count: u64) -> Result<()>;

    /// After a stage, both sides agree on what was in it.
    fn agree(&mut self, _beat: &Beat, _side: MeasuringSide) -> Result<()> {
        Ok(())
    }

    /// Bytes of ring in use, where there is a ring.
    fn ring(&self) -> Option<u64>;
}

/// The size of the messages of a task.
pub(super) fn message_of(task: &MeasuringTask) -> usize {
    match task.work {
        MeasuringWork::Transfer { message, .. }
        | MeasuringWork::Stream { message, .. }
        | MeasuringWork::Paced { message, .. }
        | MeasuringWork::RoundTrip { message, .. }
        | MeasuringWork::HandOver { message, .. }
        | MeasuringWork::ManyChannels { message, .. } => message as usize,
        MeasuringWork::OpenChannels { .. }
        | MeasuringWork::ConnectClose { .. }
        | MeasuringWork::Ask { .. }
        | MeasuringWork::Peer(_)
        | MeasuringWork::Files(_) => 0,
    }
}

/// Stages whose bytes are copied from a buffer and to a buffer.
#[derive(Debug)]
pub(super) struct CopyingStage<L> {
    link: L,
    message: usize,
    source: Source,
    ledger: Ledger,
    buffer: Vec<u8>,
}

impl<L: CopyLink> CopyingStage<L> {
    /// The receiver reads as real programs do: with a buffer for one message, but no less than 64 KiB and no more than 1 MiB.
    pub(super) fn new(link: L, task: &MeasuringTask) -> Self {
        let message = message_of(task);
        let most = if link.whole_messages() { usize::MAX } else { 1 << 20 };
        let buffer = message.clamp(64 << 10, most);
        let (source, ledger, buffer) = match task.side {
            MeasuringSide::Active => (Source::new(message), Ledger::new(message), 0),
            MeasuringSide::Passive => (Source::new(0), Ledger::new(message).thorough(), buffer),
        };
        Self { link, message, source, ledger, buffer: vec![0; buffer] }
    }
}

impl<L: CopyLink> Stages for CopyingStage<L> {
    #[inline]
    fn send(&mut self) -> Result<()> {
        self.link.send(self.source.next())
    }

    fn flush(&mut self) -> Result<()> {
        self.link.flush()
    }

    fn receive(&mut self, count: u64) -> Result<()> {
        let mut left = count * self.message as u64;
        while left > 0 {
            let most = self.buffer.len().min(left as usize);
            let n = self.link.receive(&mut self.buffer[..most])?;
            if n == 0 {
                return Err(BenchError::Damaged(format!("the stream ended with {left} bytes missing")));
            }
            self.ledger.check(&self.buffer[..n])?;
            left -= n as u64;
        }
        Ok(())
    }

    fn ring(&self) -> Option<u64> {
        self.link.ring()
    }
}

/// Stages whose bytes are produced and consumed where they lie: the sender writes and the receiver reads every one of them.
#[derive(Debug)]
pub(super) struct InPlaceStage<L> {
    link: L,
    message: usize,
    number: u64,
    sum: WordSum,
}

impl<L: InPlace> InPlaceStage<L> {
    pub(super) fn new(link: L, task: &MeasuringTask) -> Self {
        Self { link, message: message_of(task), number: 0, sum: WordSum::default() }
    }
}

impl<L: InPlace> Stages for InPlaceStage<L> {
    #[inline]
    fn send(&mut self) -> Result<()> {
        // Any odd factor: successive words differ in all bytes.
        let word = self.number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.number += 1;
        self.sum.add_equal(word, self.message as u64 / 8);
        self.link.produce(self.message, word)
    }

    fn receive(&mut self, count: u64) -> Result<()> {
        let mut left = count * self.message as u64;
        while left > 0 {
            left -= self.link.consume(left as usize, &mut self.sum)? as u64;
        }
        Ok(())
    }

    fn agree(&mut self, beat: &Beat, side: MeasuringSide) -> Result<()> {
        match side {
            MeasuringSide::Active => beat.tell(self.sum.value()),
            MeasuringSide::Passive if beat.hear()? == self.sum.value() => Ok(()),
            MeasuringSide::Passive => {
                Err(BenchError::Damaged("the sum of all words that arrived is not that of those sent".into()))
            }
        }
    }

    fn ring(&self) -> Option<u64> {
        self.link.ring()
    }
}

/// The sender's part of one stage. `pace` is called before each message.
pub(super) fn send_stage(
    stages: &mut impl Stages,
    beat: &Beat,
    count: u64,
    mut pace: impl FnMut(u64),
) -> Result<Duration> {
    beat.tell(count)?;
    if beat.hear()? != READY {
        return Err(BenchError::Transport("the receiver did not become ready".into()));
    }
    let start = clock::now();
    for at in 0..count {
        pace(at);
        stages.send()?;
    }
    stages.flush()?;
    let end = beat.hear_time()?;
    stages.agree(beat, MeasuringSide::Active)?;
    Ok(clock::between(start, end))
}

/// The receiver's part of one stage; `None` when there is no other.
pub(super) fn receive_stage(stages: &mut impl Stages, beat: &Beat) -> Result<Option<()>> {
    let count = beat.hear()?;
    if count == STOP {
        return Ok(None);
    }
    beat.tell(READY)?;
    stages.receive(count)?;
    beat.tell(clock::now())?;
    stages.agree(beat, MeasuringSide::Passive)?;
    Ok(Some(()))
}

/// Ends the stages.
pub(super) fn stop(beat: &Beat) -> Result<()> {
    beat.tell(STOP)
}

/// Runs one side of a bulk measurement.
pub(super) fn run(mut stages: impl Stages, task: &MeasuringTask, beat: &Beat) -> Result<Figures> {
    if task.side == MeasuringSide::Passive {
        while receive_stage(&mut stages, beat)?.is_some() {}
        return Ok(Figures::new());
    }
    let mut more = Figures::new();
    let (seconds, bytes) = match task.work {
        MeasuringWork::Transfer { message, total, repeats, warm_up } => {
            let count = (total / message).max(1);
            warm(&mut stages, beat, warm_up)?;
            let mut times = Vec::with_capacity(repeats as usize);
            for _ in 0..repeats {
                times.push(send_stage(&mut stages, beat, count, |_| ())?.as_secs_f64());
            }
            let median = RunSummary::of(times).map_or(f64::NAN, |s| s.median);
            (median, (count * message) as f64)
        }
        MeasuringWork::Stream { message, measured, warm_up } => {
            let count = count_for(&mut stages, beat, measured, warm_up)?;
            // Between hosts, other processes have a part in it.
            let busy = (task.mechanism == Mechanism::PartywallGateway).then(BusyStretch::begin);
            let seconds = send_stage(&mut stages, beat, count, |_| ())?.as_secs_f64();
            let bytes = (count * message) as f64;
            let spent = busy.and_then(|busy| busy.end(bytes).get(&Metric::CpuNsPerOperation).copied());
            // Nanoseconds for a byte are seconds for a gigabyte.
            more.extend(spent.map(|spent| (Metric::CpuSecondsPerGigabyte, spent)));
            (seconds, bytes)
        }
        _ => return Err(BenchError::Transport("this is not a bulk measurement".into())),
    };
    stop(beat)?;
    let mut figures = Figures::from([(Metric::Seconds, seconds), (Metric::BytesPerSecond, bytes / seconds.max(1e-9))]);
    figures.extend(more);
    figures.extend(stages.ring().map(|ring| (Metric::RingBytes, ring as f64)));
    Ok(figures)
}

/// One measured stretch: the seconds that it took, and its messages.
pub(super) fn stretch(
    stages: &mut impl Stages,
    beat: &Beat,
    measured: Duration,
    warm_up: Duration,
) -> Result<(f64, u64)> {
    let count = count_for(stages, beat, measured, warm_up)?;
    Ok((send_stage(stages, beat, count, |_| ())?.as_secs_f64(), count))
}

/// Warms up, and gives the messages that a stretch of this length takes.
fn count_for(stages: &mut impl Stages, beat: &Beat, measured: Duration, warm_up: Duration) -> Result<u64> {
    let rate = warm(stages, beat, warm_up)?;
    Ok(((rate * measured.as_secs_f64()) as u64).max(3))
}

/// Streams for at least `time`, in stages that double, and gives the messages per second of the last.
fn warm(stages: &mut impl Stages, beat: &Beat, time: Duration) -> Result<f64> {
    let mut count = 1;
    let begin = clock::now();
    loop {
        let took = send_stage(stages, beat, count, |_| ())?;
        let spent = clock::between(begin, clock::now());
        let rate = count as f64 / took.as_secs_f64().max(1e-9);
        if spent >= time && (took >= time / 4 || spent >= time * 4) {
            return Ok(rate);
        }
        // A stage of more than half the time would overshoot.
        count = (count * 2).min(((rate * time.as_secs_f64() / 2.0) as u64).max(count));
    }
}
