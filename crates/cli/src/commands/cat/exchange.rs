//! One connection from its start to its end: both directions at once, and what the end was.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use partywall::Stream;

use super::endpoints::Endpoints;
use super::stop::StopBell;
use super::{CatDirections, receive, send};
use crate::args::When;
use crate::exit::{Code, CommandFailure, Context};
use crate::progress::{Meter, Progress, TICK, TransferReport};

/// How long the other direction gets to end in good order once this end has failed.
const GRACE: Duration = Duration::from_secs(1);

/// The plan that the command line asks for.
#[derive(Debug, Clone, Copy)]
pub(super) struct CatPlan {
    pub(super) ways: CatDirections,
    /// Tell the peer when the input has ended.
    pub(super) half_close: bool,
    /// More connections will come for the same output.
    pub(super) keep: bool,
    /// Give up when nothing has passed for so long.
    pub(super) idle: Option<Duration>,
    pub(super) progress: When,
    pub(super) report: bool,
}

/// The side that caused the end of a direction.
#[derive(Debug)]
pub(super) enum Ended {
    /// The peer, or the quiet: a listener may go on with the next visitor.
    Peer(CommandFailure),
    /// A file or pipe of ours: no use going on.
    Local(CommandFailure),
}

impl Ended {
    /// The failure as it is reported. A failure of the peer begins with its name.
    pub(super) fn report(self, peer: impl std::fmt::Display) -> CommandFailure {
        match self {
            Self::Peer(failure) => failure.context(peer),
            Self::Local(failure) => failure,
        }
    }

    fn failure(self) -> CommandFailure {
        match self {
            Self::Peer(failure) | Self::Local(failure) => failure,
        }
    }
}

/// The state that both directions share.
#[derive(Debug)]
pub(super) struct CatExchange {
    pub(super) endpoints: Arc<Endpoints>,
    pub(super) plan: CatPlan,
    pub(super) meter: Meter,
    /// Ends the sending direction early.
    pub(super) stop: StopBell,
    /// The receiving direction has failed.
    receiving_broken: AtomicBool,
}

impl CatExchange {
    /// Whether the receiving direction has failed, so that the sending direction ends before its time.
    pub(super) fn is_receiving_broken(&self) -> bool {
        self.receiving_broken.load(Ordering::Relaxed)
    }

    /// How much longer nothing may pass; `None` without limit. Zero when it has been too long.
    pub(super) fn patience(&self) -> Option<Duration> {
        self.plan.idle.map(|limit| limit.saturating_sub(self.meter.idle()))
    }

    /// The error for when it has been too long.
    pub(super) fn idle_failure(&self) -> Ended {
        let limit = self.plan.idle.unwrap_or_default();
        Ended::Peer(CommandFailure::new(Code::TimedOut, format!("nothing passed for {} s", limit.as_secs_f64())))
    }
}

/// Carries all bytes in both directions; returns when both have ended, or one has failed.
pub(super) fn run(stream: Stream, endpoints: &Arc<Endpoints>, plan: CatPlan) -> Result<(), Ended> {
    if plan.ways.receive {
        endpoints.output.prepare().map_err(Ended::Local)?;
    }
    let CatDirections { send, receive } = plan.ways;
    let (input, output) = (&endpoints.input, &endpoints.output);
    let expected = if send { input.expected() } else { None };
    let (typed, printed) = (send && input.is_terminal(), receive && output.is_terminal());
    let mut progress = Progress::start(plan.progress, expected, typed, printed);
    let stop = StopBell::new().map_err(Ended::Local)?;
    let (meter, receiving_broken) = (Meter::start(), AtomicBool::new(false));
    let shared = Arc::new(CatExchange { endpoints: Arc::clone(endpoints), plan, meter, stop, receiving_broken });
    let result = both(stream, &shared, &mut progress);
    progress.finish(&shared.meter);
    if plan.report {
        TransferReport::of(&shared.meter).print();
    }
    result
}

/// The direction that ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum EndedDirection {
    Send,
    Receive,
}

fn both(stream: Stream, shared: &Arc<CatExchange>, progress: &mut Progress) -> Result<(), Ended> {
    let (reader, writer) = stream.into_halves();
    let (tell, told) = mpsc::channel();
    let mut open = 0;
    // These are not scoped threads: a thread that is stuck in a write to a full pipe must not keep this process alive. An unwanted half
    // is dropped here, which the peer sees at once. A half that a one-way connection of the peer does not have is not waited for.
    if let Some(reader) = reader.filter(|_| shared.plan.ways.receive) {
        open += 1;
        start("receive", EndedDirection::Receive, &tell, Arc::clone(shared), move |shared| {
            receive::run(reader, shared)
        })?;
    }
    if let Some(writer) = writer.filter(|_| shared.plan.ways.send) {
        open += 1;
        start("send", EndedDirection::Send, &tell, Arc::clone(shared), move |shared| send::run(writer, shared))?;
    }
    drop(tell);
    supervise(&told, open, shared, progress)
}

fn start(
    name: &str,
    direction: EndedDirection,
    tell: &mpsc::Sender<(EndedDirection, Result<(), Ended>)>,
    shared: Arc<CatExchange>,
    work: impl FnOnce(&CatExchange) -> Result<(), Ended> + Send + 'static,
) -> Result<(), Ended> {
    let tell = tell.clone();
    let spawned = thread::Builder::new().name(name.into()).spawn(move || {
        let result = work(&shared);
        // The receiver is gone when the other direction has ended everything.
        let _ = tell.send((direction, result));
    });
    spawned.map(drop).context("cannot start a thread").map_err(Ended::Local)
}

fn supervise(
    told: &mpsc::Receiver<(EndedDirection, Result<(), Ended>)>,
    mut open: u32,
    shared: &CatExchange,
    progress: &mut Progress,
) -> Result<(), Ended> {
    let mut worst: Option<Ended> = None;
    let mut deadline: Option<Instant> = None;
    while open > 0 {
        let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
        if left == Some(Duration::ZERO) {
            break;
        }
        let (direction, result) = match next(told, left, progress.is_shown() || shared.plan.idle.is_some()) {
            Ok(ended) => ended,
            Err(RecvTimeoutError::Timeout) => {
                progress.update(&shared.meter);
                // Both directions see this by themselves, unless they are stuck in a write to a full pipe.
                if deadline.is_none() && shared.patience() == Some(Duration::ZERO) {
                    worst = worse(worst, Some(shared.idle_failure()));
                    deadline = Some(Instant::now() + GRACE);
                }
                continue;
            }
            Err(RecvTimeoutError::Disconnected) => break,
        };
        open -= 1;
        if (direction, shared.plan.keep) == (EndedDirection::Receive, false) {
            shared.endpoints.output.finish().map_err(Ended::Local)?;
        }
        match (direction, &result) {
            // Bytes that the peer committed before it died are still to be delivered, so receiving goes on to its own end.
            (EndedDirection::Send, Ok(()) | Err(Ended::Peer(_))) => {}
            // Without half-close our direction stays open until the peer has ended its own. And nobody is made to type an
            // end of input to a peer that has said its last word.
            (EndedDirection::Receive, Ok(())) if shared.plan.half_close && !shared.endpoints.input.is_terminal() => {}
            // An idle timeout is no failure of this direction. The sending one aborts only if input waits.
            (EndedDirection::Receive, Err(Ended::Peer(failure))) if failure.code == Code::TimedOut => {
                shared.stop.ring()
            }
            (EndedDirection::Receive, ended) => {
                // The sending direction reads this once it hears the bell.
                shared.receiving_broken.store(ended.is_err(), Ordering::Relaxed);
                shared.stop.ring();
            }
            (EndedDirection::Send, Err(Ended::Local(_))) => deadline = Some(Instant::now()),
        }
        if let Err(Ended::Local(_)) = &result {
            deadline.get_or_insert_with(|| Instant::now() + GRACE);
        }
        if let Err(Ended::Peer(failure)) = &result
            && failure.code == Code::TimedOut
        {
            deadline.get_or_insert_with(|| Instant::now() + GRACE);
        }
        worst = worse(worst, result.err());
    }
    worst.map_or(Ok(()), Err)
}

fn next<T>(told: &mpsc::Receiver<T>, left: Option<Duration>, ticks: bool) -> Result<T, RecvTimeoutError> {
    match (left, ticks) {
        (None, false) => told.recv().map_err(|_| RecvTimeoutError::Disconnected),
        (None, true) => told.recv_timeout(TICK),
        (Some(left), _) => told.recv_timeout(left.min(TICK)),
    }
}

/// The one of two ends that explains more: our own fault first, then an action of the peer, then its consequence.
fn worse(a: Option<Ended>, b: Option<Ended>) -> Option<Ended> {
    fn rank(ended: &Ended) -> u8 {
        match ended {
            Ended::Local(_) => 4,
            Ended::Peer(f) if f.code == Code::Corrupt => 3,
            Ended::Peer(f) if f.code == Code::Died => 2,
            Ended::Peer(f) if f.code == Code::TimedOut => 1,
            Ended::Peer(_) => 0,
        }
    }
    match (a, b) {
        (Some(a), Some(b)) if rank(&b) > rank(&a) => Some(b),
        (Some(a), _) => Some(a),
        (None, b) => b,
    }
}

impl From<Ended> for CommandFailure {
    fn from(ended: Ended) -> Self {
        ended.failure()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failure_report_prefers_disk_then_death_then_close() {
        let peer = |code| Some(Ended::Peer(CommandFailure::new(code, "")));
        let code = |ended: Option<Ended>| ended.map(|e| e.failure().code);
        assert_eq!(code(worse(peer(Code::General), peer(Code::Died))), Some(Code::Died));
        assert_eq!(code(worse(peer(Code::Corrupt), peer(Code::Died))), Some(Code::Corrupt));
        let local = Some(Ended::Local(CommandFailure::general("disk")));
        assert_eq!(code(worse(peer(Code::Corrupt), local)), Some(Code::General));
        assert_eq!(code(worse(None, None)), None);
    }
}
