//! Starts the two measuring processes, watches over both, and leaves neither behind.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::{
    control::TaskSocket,
    error::{BenchError, During, Result},
    interrupt::Interrupt,
    task::{MeasuringSide, MeasuringTask, TaskAnswer},
};

/// A child that does not outlive this value.
#[derive(Debug)]
pub(crate) struct GuardedChild(Child);

impl GuardedChild {
    /// Starts it.
    pub(crate) fn spawn(command: &mut Command) -> Result<Self> {
        let doing = format!("starting {}", command.get_program().to_string_lossy());
        command.spawn().map(Self).during(doing)
    }

    /// Its process id.
    pub(crate) fn id(&self) -> u32 {
        self.0.id()
    }

    /// The ends of its standard input and output, if these are pipes that were not taken yet.
    pub(crate) fn pipes(&mut self) -> Option<(OwnedFd, OwnedFd)> {
        self.0.stdin.take().map(OwnedFd::from).zip(self.0.stdout.take().map(OwnedFd::from))
    }

    /// The end of its standard input, if that is a pipe that was not taken yet.
    pub(crate) fn input(&mut self) -> Option<OwnedFd> {
        self.0.stdin.take().map(OwnedFd::from)
    }

    /// How it ended, if it has.
    pub(crate) fn ended(&mut self) -> Option<String> {
        self.0.try_wait().ok().flatten().map(|status| status.to_string())
    }

    /// Waits for a moment for it to end by itself.
    fn settle(&mut self, patience: Duration) -> Option<String> {
        let begin = Instant::now();
        loop {
            match self.ended() {
                None if begin.elapsed() < patience => std::thread::sleep(Duration::from_millis(1)),
                end => return end,
            }
        }
    }

    /// Asks it to end, waits for that, and only then insists.
    pub(crate) fn terminate(mut self, patience: Duration) {
        if self.ended().is_none()
            && let Some(pid) = rustix::process::Pid::from_raw(self.0.id().cast_signed())
        {
            // A failure means that it is gone already.
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
            self.settle(patience);
        }
    }
}

impl Drop for GuardedChild {
    fn drop(&mut self) {
        // Both fail only if it has been waited for, which is all that is wanted.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// One side: its process and the control socket to it.
struct MeasuringRole {
    side: MeasuringSide,
    child: GuardedChild,
    control: TaskSocket,
    answer: Option<TaskAnswer>,
}

impl MeasuringRole {
    fn start(task: &MeasuringTask, beat: &TaskSocket, fds: &[OwnedFd]) -> Result<Self> {
        let (ours, theirs) = TaskSocket::pair()?;
        let program = std::env::current_exe().during("finding this program")?;
        let mut command = Command::new(program);
        command.arg("role").stdin(OwnedFd::from(theirs)).stdout(Stdio::null());
        let child = GuardedChild::spawn(&mut command)?;
        let fds: Vec<BorrowedFd<'_>> = std::iter::once(beat.as_fd()).chain(fds.iter().map(AsFd::as_fd)).collect();
        ours.send(task, &fds)?;
        Ok(Self { side: task.side, child, control: ours, answer: None })
    }

    /// Takes the answer, or finds out how the process ended without one.
    fn hear(&mut self) -> Result<(), String> {
        match self.control.recv::<TaskAnswer>() {
            Ok(Some((TaskAnswer::Failed(reason), _))) => Err(reason),
            Ok(Some((answer, _))) => {
                self.answer = Some(answer);
                Ok(())
            }
            Ok(None) => {
                let end = self.child.settle(Duration::from_secs(1));
                Err(format!("it ended without an answer ({})", end.as_deref().unwrap_or("still running")))
            }
            Err(e) => Err(e.to_string()),
        }
    }
}

/// The tasks and descriptors for the two sides of a pair: the active side, then the passive.
pub(crate) type Pair = [(MeasuringTask, Vec<OwnedFd>); 2];

/// Runs both sides of each pair to their answers, which come in the order of the pairs. Whatever goes wrong, no process stays.
pub(crate) fn run_pairs(pairs: Vec<Pair>, patience: Duration, interrupt: &Interrupt) -> Result<Vec<TaskAnswer>> {
    interrupt.check()?;
    let mechanism = pairs.iter().flatten().next().map(|(task, _)| task.mechanism.to_string()).unwrap_or_default();
    let failed = |side: MeasuringSide, reason: String| BenchError::Role {
        side: side.name(),
        mechanism: mechanism.clone(),
        reason,
    };
    let mut roles = Vec::with_capacity(2 * pairs.len());
    for pair in pairs {
        let (beat_a, beat_b) = TaskSocket::pair()?;
        for ((task, fds), beat) in pair.into_iter().zip([beat_a, beat_b]) {
            // The bench's own copies of beat and transport go here: the end of a process has to be seen by the other.
            roles.push(MeasuringRole::start(&task, &beat, &fds)?);
        }
    }
    let deadline = Instant::now() + patience;
    let mut first_fault: Option<BenchError> = None;
    while roles.iter().any(|role| role.answer.is_none()) {
        let ready = wait(&roles, interrupt, deadline)?;
        interrupt.check()?;
        if ready.is_empty() {
            let side = roles.iter().find(|role| role.answer.is_none()).map_or(MeasuringSide::Active, |role| role.side);
            return Err(
                first_fault.unwrap_or_else(|| failed(side, format!("no answer within {} s", patience.as_secs())))
            );
        }
        for at in ready {
            let role = &mut roles[at];
            if let Err(reason) = role.hear() {
                // The side that only lost its peer often speaks first: give the culprit a moment to say why.
                let lost_peer = reason.contains("has gone");
                let fault = failed(role.side, reason);
                match first_fault {
                    None if lost_peer => {
                        first_fault = Some(fault);
                        role.answer = Some(TaskAnswer::Failed(String::new()));
                    }
                    _ => return Err(fault),
                }
            }
        }
    }
    if let Some(fault) = first_fault {
        return Err(fault);
    }
    Ok(roles.into_iter().map(|role| role.answer.unwrap_or_else(|| TaskAnswer::Failed("no answer".into()))).collect())
}

/// The processes that have output to read; none at the deadline.
fn wait(roles: &[MeasuringRole], interrupt: &Interrupt, deadline: Instant) -> Result<Vec<usize>> {
    let left = deadline.saturating_duration_since(Instant::now());
    let left = Timespec::try_from(left).unwrap_or(Timespec { tv_sec: 3600, tv_nsec: 0 });
    let waiting: Vec<usize> = (0..roles.len()).filter(|&at| roles[at].answer.is_none()).collect();
    let mut polled: Vec<PollFd<'_>> =
        waiting.iter().map(|&at| PollFd::new(&roles[at].control, PollFlags::IN)).collect();
    polled.push(PollFd::new(interrupt, PollFlags::IN));
    match poll(&mut polled, Some(&left)) {
        Ok(0) => return Ok(Vec::new()),
        Ok(_) | Err(rustix::io::Errno::INTR) => {}
        Err(e) => return Err(e).during("waiting for the measuring processes"),
    }
    interrupt.check()?;
    Ok(waiting.into_iter().zip(&polled).filter(|(_, fd)| !fd.revents().is_empty()).map(|(at, _)| at).collect())
}
