//! Partywall, used as any program would use it: streams that copy, message sockets, and streams in place.

use std::{
    io::{Read, Write},
    time::{Duration, Instant},
};

use partywall::{
    Domain, Error, Listener, MessageListener, MessageSocket, Options, ReadHalf, Refusal, RingSize, Stream, WriteHalf,
};

use super::{CopyLink, InPlace, memory};
use crate::{
    control::Beat,
    error::{BenchError, Result},
    measure::sum::{self, WordSum},
    mechanism::{Mechanism, WaitMode},
    task::{MeasuringSide, MeasuringTask},
};

/// The service that the passive side offers.
pub(super) const SERVICE: &str = "bench";
/// The length of a spin: longer than any wait that the bench measures, but finite, because a spinning side sees neither attach nor death.
const LONG: Duration = Duration::from_millis(50);
/// How long the directory of a cluster may take to publish a service.
const PUBLISHED: Duration = Duration::from_secs(10);
/// The largest piece of a message produced in place, as a part of the ring, so that both sides work at once.
const PIECES: usize = 4;

/// Gives a function that says, of a Partywall error, what was being done.
pub(crate) fn fault<E: std::fmt::Display>(doing: &'static str) -> impl Fn(E) -> BenchError {
    move |e| BenchError::transport(doing, e)
}

/// Joins as a domain of this side's own.
pub(crate) fn join(task: &MeasuringTask) -> Result<Domain> {
    let broker = task.broker.as_ref().ok_or_else(|| BenchError::Transport("the order names no broker".into()))?;
    Domain::builder().name(name(task, task.side)).broker(broker).join().map_err(fault("joining the broker"))
}

/// The domain name of one side of a pair. In a virtual machine all names begin with the machine's.
fn name(task: &MeasuringTask, side: MeasuringSide) -> String {
    let own = format!("{}-{}", task.session, side.name());
    match (&task.inside, side) {
        (None, _) => own,
        (Some(inside), MeasuringSide::Active) => format!("{}.{own}", inside.active),
        (Some(inside), MeasuringSide::Passive) => format!("{}.{own}", inside.passive),
    }
}

/// Where the active side connects to.
pub(crate) fn target(task: &MeasuringTask) -> String {
    format!("{}:{SERVICE}", name(task, MeasuringSide::Passive))
}

/// The options of a task's connections.
pub(crate) fn options(task: &MeasuringTask) -> Options {
    let options = match task.mechanism {
        Mechanism::PartywallFixed | Mechanism::PartywallZeroCopy => {
            Options::default().ring(RingSize::Fixed(task.tuning.ring))
        }
        _ => Options::default(),
    };
    match task.tuning.waiting {
        WaitMode::Adaptive => options,
        WaitMode::Blocking => options.spin(Duration::ZERO),
        WaitMode::Spinning => options.spin(LONG),
    }
}

/// Offers the service before the other side connects to it.
pub(crate) fn listen(beat: &Beat, domain: &Domain, options: &Options) -> Result<Listener> {
    let listener = domain.bind_with(SERVICE, options).map_err(fault("binding a service"))?;
    beat.tell(0)?;
    Ok(listener)
}

/// Connects. On another host, the service is found when the directory of the cluster has it.
fn reach(domain: &Domain, target: &str, options: &Options) -> Result<Stream> {
    let begin = Instant::now();
    loop {
        match domain.connect_with(target, options) {
            Err(Error::Refused { code: Refusal::NoSuchDomain | Refusal::NoSuchService, .. })
                if begin.elapsed() < PUBLISHED =>
            {
                std::thread::sleep(Duration::from_millis(5));
            }
            connected => return connected.map_err(fault("connecting a stream")),
        }
    }
}

/// A connected stream, each side's end.
fn connect(task: &MeasuringTask, beat: &Beat) -> Result<(Domain, Stream)> {
    let (domain, options) = (join(task)?, options(task));
    let stream = match task.side {
        MeasuringSide::Passive => listen(beat, &domain, &options)?.accept().map_err(fault("accepting a stream"))?.0,
        MeasuringSide::Active => {
            beat.hear()?;
            reach(&domain, &target(task), &options)?
        }
    };
    Ok((domain, stream))
}

/// `read` and `write`.
#[derive(Debug)]
pub(crate) struct CopyingStream {
    reader: ReadHalf,
    writer: WriteHalf,
    _domain: Option<Domain>,
}

impl CopyingStream {
    pub(super) fn open(task: &MeasuringTask, beat: &Beat) -> Result<Self> {
        let (domain, stream) = connect(task, beat)?;
        Ok(Self { _domain: Some(domain), ..Self::over(stream)? })
    }

    /// Uses a stream whose domain the caller keeps.
    pub(crate) fn over(stream: Stream) -> Result<Self> {
        let (reader, writer) = halves(stream)?;
        Ok(Self { reader, writer, _domain: None })
    }
}

fn halves(stream: Stream) -> Result<(ReadHalf, WriteHalf)> {
    match stream.into_halves() {
        (Some(reader), Some(writer)) => Ok((reader, writer)),
        _ => Err(BenchError::Transport("a stream has only one direction".into())),
    }
}

impl CopyLink for CopyingStream {
    #[inline]
    fn send(&mut self, message: &[u8]) -> Result<()> {
        self.writer.write_all(message).map_err(fault("writing to a stream"))
    }

    #[inline]
    fn receive(&mut self, buffer: &mut [u8]) -> Result<usize> {
        self.reader.read(buffer).map_err(fault("reading from a stream"))
    }

    fn ring(&self) -> Option<u64> {
        Some(self.writer.ring_size())
    }
}

/// `reserve` and `commit`, `peek` and `release`.
#[derive(Debug)]
pub(super) struct InPlaceStream {
    reader: ReadHalf,
    writer: WriteHalf,
    _domain: Domain,
}

impl InPlaceStream {
    pub(super) fn open(task: &MeasuringTask, beat: &Beat) -> Result<Self> {
        let (domain, stream) = connect(task, beat)?;
        let (reader, writer) = halves(stream)?;
        Ok(Self { reader, writer, _domain: domain })
    }
}

impl InPlace for InPlaceStream {
    fn produce(&mut self, len: usize, word: u64) -> Result<()> {
        let piece = self.writer.ring_size() as usize / PIECES;
        let mut left = len;
        while left > 0 {
            let n = left.min(piece);
            let mut span = self.writer.reserve(n).map_err(fault("reserving"))?;
            sum::fill(&mut span, word);
            span.commit(n);
            left -= n;
        }
        Ok(())
    }

    fn consume(&mut self, most: usize, sum: &mut WordSum) -> Result<usize> {
        let peeked = self.reader.peek_at_least(8).map_err(fault("peeking"))?;
        if peeked.is_empty() {
            return Err(BenchError::Damaged("the stream ended in the middle".into()));
        }
        // Not all at once, so that the producer gets its memory back early.
        let n = peeked.len().min(most).min(memory::SPAN) & !7;
        memory::sum_peeked(&peeked, n, sum);
        peeked.release(n);
        Ok(n)
    }

    #[inline]
    fn hand_over(&mut self, len: usize, word: u64) -> Result<()> {
        let mut span = self.writer.reserve(len).map_err(fault("reserving"))?;
        sum::fill(&mut span[..8], word);
        span.commit(len);
        Ok(())
    }

    #[inline]
    fn take_over(&mut self, len: usize) -> Result<u64> {
        let peeked = self.reader.peek_at_least(len).map_err(fault("peeking"))?;
        let mut head = [0; 8];
        if peeked.len() != len || peeked.copy_to(0, &mut head) != head.len() {
            return Err(BenchError::Damaged(format!("{} bytes arrived where {len} were handed over", peeked.len())));
        }
        peeked.release(len);
        Ok(u64::from_ne_bytes(head))
    }

    fn ring(&self) -> Option<u64> {
        Some(self.writer.ring_size())
    }
}

/// Message sockets.
#[derive(Debug)]
pub(super) struct Messages {
    socket: MessageSocket,
    _domain: Domain,
}

impl Messages {
    pub(super) fn open(task: &MeasuringTask, beat: &Beat) -> Result<Self> {
        let (domain, options) = (join(task)?, options(task));
        let socket = match task.side {
            MeasuringSide::Passive => {
                let mut listener =
                    MessageListener::bind(&domain, SERVICE, &options).map_err(fault("binding a service"))?;
                beat.tell(0)?;
                listener.accept().map_err(fault("accepting a message socket"))?.0
            }
            MeasuringSide::Active => {
                beat.hear()?;
                MessageSocket::connect_with(&domain, &target(task), &options)
                    .map_err(fault("connecting a message socket"))?
            }
        };
        let longest = socket.max_message() as u64;
        if task.tuning.message > longest {
            return Err(BenchError::Unavailable(format!("its longest message is {longest} bytes")));
        }
        Ok(Self { socket, _domain: domain })
    }
}

impl CopyLink for Messages {
    #[inline]
    fn send(&mut self, message: &[u8]) -> Result<()> {
        self.socket.send(message).map_err(fault("sending a message"))
    }

    #[inline]
    fn receive(&mut self, buffer: &mut [u8]) -> Result<usize> {
        self.socket.recv_into(buffer).map_err(fault("receiving a message"))
    }

    fn whole_messages(&self) -> bool {
        true
    }
}
