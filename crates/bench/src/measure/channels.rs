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
    error::{Error, Result},
    report::metric::Metric,
    task::{Figures, Side, Task, Work},
    transport::partywall::{Copying, fault, join, listen, options, target},
};

/// Tells the passive side whether another connection comes.
const ANOTHER: u64 = 1;
const ENOUGH: u64 = 0;
/// The byte by which a connection says whether it is the last.
const LAST: [u8; 1] = [1];
const NOT_LAST: [u8; 1] = [0];

/// Runs one side.
pub(crate) fn run(task: &Task, beat: &Beat) -> Result<Figures> {
    match task.work {
        Work::ManyChannels { channels, .. } => stream_beside(task, beat, channels),
        Work::OpenChannels { channels, idle } => hold(task, beat, channels, idle),
        Work::ConnectClose { measured } => connect_and_close(task, beat, measured),
        _ => Err(Error::Transport("this is not about many channels".into())),
    }
}

/// Channels between the two sides, and the domain that they belong to.
struct Opened {
    streams: Vec<Stream>,
    /// Why there are fewer than asked for.
    stopped: Option<Error>,
    _domain: Domain,
    _listener: Option<Listener>,
}

/// Opens `count` channels, or as many as can be.
fn open(task: &Task, beat: &Beat, count: u64, options: &Options) -> Result<Opened> {
    let domain = join(task)?;
    let mut streams = Vec::with_capacity(count as usize);
    let mut stopped = None;
    if task.side == Side::Passive {
        let mut listener = listen(beat, &domain, options)?;
        while beat.hear()? == ANOTHER {
            match listener.accept() {
                Ok((stream, _)) => streams.push(stream),
                Err(e) => stopped = Some(fault("accepting a stream")(e)),
            }
            beat.tell(if stopped.is_none() { ANOTHER } else { ENOUGH })?;
        }
        return Ok(Opened { streams, stopped, _domain: domain, _listener: Some(listener) });
    }
    beat.hear()?;
    while stopped.is_none() && (streams.len() as u64) < count {
        match domain.connect_with(&target(task), options) {
            Err(e) => stopped = Some(fault("connecting a stream")(e)),
            Ok(stream) => {
                beat.tell(ANOTHER)?;
                if beat.hear()? == ANOTHER {
                    streams.push(stream);
                } else {
                    stopped = Some(Error::Transport("the other side could not accept it".into()));
                }
            }
        }
    }
    beat.tell(ENOUGH)?;
    Ok(Opened { streams, stopped, _domain: domain, _listener: None })
}

/// Streams over the last of many.
fn stream_beside(task: &Task, beat: &Beat, count: u64) -> Result<Figures> {
    let mut opened = open(task, beat, count, &options(task))?;
    if let Some(why) = opened.stopped {
        return Err(why);
    }
    let used = opened.streams.pop().ok_or_else(|| Error::Transport("no channel was opened".into()))?;
    let figures = transfer::run(transfer::Copying::new(Copying::over(used)?, task), task, beat)?;
    // The others stay open until both are done.
    beat.meet()?;
    Ok(figures)
}

/// Holds many small channels, and looks at what they take.
fn hold(task: &Task, beat: &Beat, count: u64, idle: Duration) -> Result<Figures> {
    let options = options(task).ring(RingSize::Fixed(task.tuning.ring));
    let before = Holdings::now();
    let broker = |look: fn(u32) -> Option<u64>| task.broker_pid.and_then(look).unwrap_or(0);
    let broker_before = broker(memory::descriptors);
    beat.meet()?;
    let opened = open(task, beat, count, &options)?;
    if let Some(why) = &opened.stopped {
        eprintln!("partywall-bench: only {} of {count} channels could be opened: {why}", opened.streams.len());
    }
    let number = opened.streams.len() as u64;
    beat.meet()?;
    let [fds, mappings, bytes, machine] = Holdings::now().per(before, number);
    let broker_fds = broker(memory::descriptors).saturating_sub(broker_before) as f64 / number.max(1) as f64;
    beat.meet()?;
    let broker_time = || task.broker_pid.and_then(cpu::of_process).unwrap_or_default();
    let (usage, time) = (Usage::now(), broker_time());
    clock::sleep_until(clock::now() + idle.as_nanos() as u64);
    let share = usage.since();
    let broker_share = 100.0 * (broker_time() - time).as_secs_f64() / idle.as_secs_f64().max(1e-9);
    beat.meet()?;
    if task.side == Side::Passive {
        beat.tell(bytes.to_bits())?;
        beat.meet()?;
        return Ok(Figures::from([(Metric::ReceiverCpuPercent, share.own)]));
    }
    let other = f64::from_bits(beat.hear()?);
    beat.meet()?;
    Ok(Figures::from([
        (Metric::Channels, number as f64),
        (Metric::FdsPerChannel, fds),
        (Metric::MappingsPerChannel, mappings),
        (Metric::BytesPerChannel, bytes + other),
        (Metric::MachineBytesPerChannel, machine),
        (Metric::BrokerFdsPerChannel, broker_fds),
        (Metric::SenderCpuPercent, share.own),
        (Metric::BrokerCpuPercent, broker_share),
    ]))
}

/// Connects, is accepted, exchanges a byte each way, and closes, over and over.
fn connect_and_close(task: &Task, beat: &Beat, time: Duration) -> Result<Figures> {
    let (domain, options) = (join(task)?, options(task));
    let mut byte = [0];
    if task.side == Side::Passive {
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
