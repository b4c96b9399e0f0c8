//! Many Partywall channels between two processes.

use std::{
    io::{Read, Write},
    time::{Duration, Instant},
};

use partywall::{Domain, Listener, Options, RingSize, Stream};

use super::{
    clock,
    cpu::{self, Usage},
    memory::{self, Holdings},
    transfer,
};
use crate::{
    control::Beat,
    error::{BenchError, Result},
    report::{metric::Metric, stats::RunSummary},
    task::{Figures, MeasuringSide, MeasuringTask, MeasuringWork},
    transport::SideDescriptors,
    transport::partywall::{CopyingStream, fault, join, listen, options, target},
};

/// Tells the passive side whether another connection comes.
const ANOTHER: u64 = 1;
const ENOUGH: u64 = 0;
/// The byte by which a connection says whether it is the last.
const LAST: [u8; 1] = [1];
const NOT_LAST: [u8; 1] = [0];

/// Runs one side. `wires` lead to the other pairs of processes, if there are any.
pub(crate) fn run(task: &MeasuringTask, beat: &Beat, wires: SideDescriptors) -> Result<Figures> {
    match task.work {
        MeasuringWork::ManyChannels { channels, turns, message, measured, warm_up } => {
            by_turns(task, beat, channels, turns, Stretch { message, measured, warm_up })
        }
        MeasuringWork::OpenChannels { channels, share, idle } => {
            hold(task, beat, &wires.into_rest().map(Beat::from).collect::<Vec<_>>(), channels, share, idle)
        }
        MeasuringWork::ConnectClose { measured } => connect_and_close(task, beat, measured),
        _ => Err(BenchError::Transport("this is not about many channels".into())),
    }
}

/// One side's domain, in which it can open channels to the other side.
struct ChannelSide<'a> {
    task: &'a MeasuringTask,
    beat: &'a Beat,
    options: Options,
    domain: Domain,
    /// The listener of the passive side.
    listener: Option<Listener>,
}

impl<'a> ChannelSide<'a> {
    fn join(task: &'a MeasuringTask, beat: &'a Beat, options: Options) -> Result<Self> {
        let domain = join(task)?;
        let listener = match task.side {
            MeasuringSide::Passive => Some(listen(beat, &domain, &options)?),
            MeasuringSide::Active => {
                beat.hear()?;
                None
            }
        };
        Ok(Self { task, beat, options, domain, listener })
    }

    /// Opens `count` channels, or as many as can be, and gives the reason if these are fewer.
    fn open(&mut self, count: u64) -> Result<(Vec<Stream>, Option<BenchError>)> {
        let mut streams = Vec::with_capacity(count as usize);
        let mut stopped = None;
        if let Some(listener) = &mut self.listener {
            while self.beat.hear()? == ANOTHER {
                match listener.accept() {
                    Ok((stream, _)) => streams.push(stream),
                    Err(e) => stopped = Some(fault("accepting a stream")(e)),
                }
                self.beat.tell(if stopped.is_none() { ANOTHER } else { ENOUGH })?;
            }
            return Ok((streams, stopped));
        }
        while stopped.is_none() && (streams.len() as u64) < count {
            match self.domain.connect_with(&target(self.task), &self.options) {
                Err(e) => stopped = Some(fault("connecting a stream")(e)),
                Ok(stream) => {
                    self.beat.tell(ANOTHER)?;
                    if self.beat.hear()? == ANOTHER {
                        streams.push(stream);
                    } else {
                        stopped = Some(BenchError::Transport("the other side could not accept it".into()));
                    }
                }
            }
        }
        self.beat.tell(ENOUGH)?;
        Ok((streams, stopped))
    }

    /// Opens exactly `count`.
    fn open_all(&mut self, count: u64) -> Result<Vec<Stream>> {
        match self.open(count)? {
            (streams, None) => Ok(streams),
            (_, Some(why)) => Err(why),
        }
    }
}

/// The data to stream in each turn.
#[derive(Debug, Clone, Copy)]
struct Stretch {
    message: u64,
    measured: Duration,
    warm_up: Duration,
}

/// How long closed channels have to be cleared away, by both sides and the broker, before anything is measured.
const CLEARING: Duration = Duration::from_millis(50);

/// Streams over one connection, by turns while it is the only one and beside others. What a shared machine does from one
/// minute to the next is so in both.
fn by_turns(task: &MeasuringTask, beat: &Beat, channels: u64, turns: u32, stretch: Stretch) -> Result<Figures> {
    let mut place = ChannelSide::join(task, beat, options(task))?;
    let used = place.open_all(1)?.pop().ok_or_else(|| BenchError::Transport("no channel was opened".into()))?;
    let mut stages = transfer::CopyingStage::new(CopyingStream::over(used)?, task);
    let (mut alone, mut beside) = (Vec::new(), Vec::new());
    let mut stream = |rates: &mut Vec<f64>| -> Result<()> {
        beat.meet()?;
        std::thread::sleep(CLEARING);
        beat.meet()?;
        if task.side == MeasuringSide::Passive {
            while transfer::receive_stage(&mut stages, beat)?.is_some() {}
            return Ok(());
        }
        let (seconds, count) = transfer::stretch(&mut stages, beat, stretch.measured, stretch.warm_up)?;
        rates.push((count * stretch.message) as f64 / seconds.max(1e-9));
        transfer::stop(beat)
    };
    stream(&mut alone)?;
    for _ in 0..turns {
        let others = place.open_all(channels - 1)?;
        stream(&mut beside)?;
        drop(others);
        stream(&mut alone)?;
    }
    // The used one stays until the other side is done, too.
    beat.meet()?;
    let median = |values: Vec<f64>| RunSummary::of(values).map(|summary| summary.median);
    let ratios = [(Metric::BesideToAlone, median(paired(&alone, &beside)))];
    let rates = [(Metric::BytesPerSecond, median(beside)), (Metric::AloneBytesPerSecond, median(alone))];
    Ok(ratios.into_iter().chain(rates).filter_map(|(metric, value)| Some((metric, value?))).collect())
}

/// Each rate beside others, as a part of the mean of the rates alone before and after it.
fn paired(alone: &[f64], beside: &[f64]) -> Vec<f64> {
    let neighbours = alone.iter().zip(alone.iter().skip(1)).map(|(before, after)| f64::midpoint(*before, *after));
    beside.iter().zip(neighbours).map(|(beside, alone)| beside / alone).collect()
}

/// All pairs of processes come here before any goes on. The first pair's active side leads to all others, theirs to it.
fn meet_pairs(pairs: &[Beat], leads: bool) -> Result<()> {
    if leads {
        pairs.iter().try_for_each(|pair| pair.hear().map(drop))?;
        return pairs.iter().try_for_each(|pair| pair.tell(0));
    }
    pairs.iter().try_for_each(Beat::meet)
}

/// Holds many small channels, and looks at what they take.
fn hold(
    task: &MeasuringTask,
    beat: &Beat,
    pairs: &[Beat],
    channels: u64,
    share: u64,
    idle: Duration,
) -> Result<Figures> {
    let before = Holdings::now();
    let broker = |look: fn(u32) -> Option<u64>| task.broker_pid.and_then(look).unwrap_or(0);
    let broker_before = broker(memory::descriptors);
    // Only active sides have wires.
    let meet = || -> Result<()> {
        meet_pairs(pairs, task.leads)?;
        beat.meet()
    };
    meet()?;
    let mut place = ChannelSide::join(task, beat, options(task).ring(RingSize::Fixed(task.tuning.ring)))?;
    let (streams, stopped) = place.open(share)?;
    let number = streams.len() as u64;
    if let Some(why) = &stopped {
        eprintln!("partywall-bench: only {number} of {share} channels could be opened by one pair: {why}");
    }
    meet()?;
    let [fds, mappings, bytes, _] = Holdings::now().per(before, number);
    let [.., machine] = Holdings::now().per(before, channels);
    let broker_fds = broker(memory::descriptors).saturating_sub(broker_before) as f64 / channels.max(1) as f64;
    meet()?;
    let broker_time = || task.broker_pid.and_then(cpu::time_of).unwrap_or_default();
    let (usage, time) = (Usage::now(), broker_time());
    clock::sleep_until(clock::now() + idle.as_nanos() as u64);
    let used = usage.since();
    let broker_share = 100.0 * (broker_time() - time).as_secs_f64() / idle.as_secs_f64().max(1e-9);
    meet()?;
    if task.side == MeasuringSide::Passive {
        beat.tell(bytes.to_bits())?;
        beat.meet()?;
        return Ok(Figures::from([(Metric::ReceiverCpuPercent, used.own)]));
    }
    let other = f64::from_bits(beat.hear()?);
    beat.meet()?;
    let mut figures = Figures::from([
        (Metric::Channels, number as f64),
        (Metric::Pairs, 1.0),
        (Metric::FdsPerChannel, fds),
        (Metric::MappingsPerChannel, mappings),
        (Metric::BytesPerChannel, bytes + other),
        (Metric::SenderCpuPercent, used.own),
    ]);
    if task.leads {
        // There is one machine, and one broker.
        figures.extend([
            (Metric::MachineBytesPerChannel, machine),
            (Metric::BrokerFdsPerChannel, broker_fds),
            (Metric::BrokerCpuPercent, broker_share),
        ]);
    }
    Ok(figures)
}

/// Connects, is accepted, exchanges a byte each way, and closes, over and over.
fn connect_and_close(task: &MeasuringTask, beat: &Beat, time: Duration) -> Result<Figures> {
    let (domain, options) = (join(task)?, options(task));
    let mut byte = [0];
    if task.side == MeasuringSide::Passive {
        let mut listener = listen(beat, &domain, &options)?;
        loop {
            let (mut stream, _) = listener.accept().map_err(fault("accepting a stream"))?;
            stream.read_exact(&mut byte).map_err(fault("reading the first byte"))?;
            stream.write_all(&byte).map_err(fault("answering the first byte"))?;
            if byte == LAST {
                return Ok(Figures::new());
            }
        }
    }
    beat.hear()?;
    let mut once = |last: bool| -> Result<()> {
        let mut stream = domain.connect_with(&target(task), &options).map_err(fault("connecting a stream"))?;
        stream.write_all(if last { &LAST } else { &NOT_LAST }).map_err(fault("writing the first byte"))?;
        stream.read_exact(&mut byte).map_err(fault("reading the answer"))
    };
    let begin = Instant::now();
    let mut count = 0u32;
    while begin.elapsed() < time {
        once(false)?;
        count += 1;
    }
    let took = begin.elapsed();
    once(true)?;
    Ok(Figures::from([(Metric::PerSecond, f64::from(count) / took.as_secs_f64())]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machine_slowdown_does_not_change_paired_ratio() {
        // Each rate is 0.8 of what it would be alone, while the machine gets slower and slower.
        assert_eq!(paired(&[100.0, 80.0, 60.0], &[72.0, 56.0]), [0.8, 0.8]);
        assert_eq!(paired(&[100.0], &[]), [0.0; 0]);
    }
}
