//! Processes that the demo starts: ended when it ends, however it ends.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::process::{Command, ExitStatus};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use partywall_terminal::typed;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::exit::{CommandFailure, Context};

/// Whether a signal has asked us to stop.
static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// All running children, for the signal thread, with the signal that ends each. They are kept by descriptor, since a number could have
/// become another process.
static RUNNING: LazyLock<Mutex<HashMap<u32, (OwnedFd, Signal)>>> = LazyLock::new(Mutex::default);

fn running() -> MutexGuard<'static, HashMap<u32, (OwnedFd, Signal)>> {
    // Entries are inserted and removed whole, so that a panic elsewhere leaves nothing half done.
    RUNNING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// From now on, Ctrl-C and the like end the children, and thereby whatever the demo waits for; the rest of the demo then
/// takes down what it has set up as after any other failure.
pub(super) fn catch_signals() -> Result<(), CommandFailure> {
    let mut signals = signal_hook::iterator::Signals::new([SIGINT, SIGTERM, SIGHUP]).context("cannot catch signals")?;
    let thread = std::thread::Builder::new().name("signals".into());
    let started = thread.spawn(move || {
        for _ in signals.forever() {
            INTERRUPTED.store(true, Ordering::SeqCst);
            for (pidfd, last) in running().values() {
                // It may have ended by itself.
                let _ = pidfd_send_signal(pidfd, *last);
            }
        }
    });
    started.map(drop).context("cannot start a thread")
}

/// Fails once a signal has asked us to stop.
pub(super) fn check_interrupted() -> Result<(), CommandFailure> {
    if INTERRUPTED.load(Ordering::SeqCst) { Err(CommandFailure::general("interrupted")) } else { Ok(()) }
}

/// A running child. Dropping it ends it.
#[derive(Debug)]
pub(super) struct DemoChild {
    child: std::process::Child,
    line: String,
    ended: Option<ExitStatus>,
}

impl DemoChild {
    pub(super) fn start(command: &mut Command) -> Result<Self, CommandFailure> {
        Self::start_to_end_by(command, Signal::KILL)
    }

    /// A child that must clean up after itself: it is ended by SIGTERM.
    pub(super) fn start_orderly(command: &mut Command) -> Result<Self, CommandFailure> {
        Self::start_to_end_by(command, Signal::TERM)
    }

    fn start_to_end_by(command: &mut Command, last: Signal) -> Result<Self, CommandFailure> {
        check_interrupted()?;
        let line = typed(command);
        let child = command.spawn().context(format_args!("cannot start `{line}`"))?;
        let started = Self { child, line, ended: None };
        let pid = started.child.id();
        let number = i32::try_from(pid).ok().and_then(Pid::from_raw);
        // Not reaped yet, so that the number is still this child's.
        let pidfd = number.ok_or(rustix::io::Errno::SRCH).and_then(|n| pidfd_open(n, PidfdFlags::empty()));
        running().insert(pid, (pidfd.context("cannot watch a child process (pidfd_open, Linux 5.3)")?, last));
        // Asked to stop between the check above and the entry: the signal thread has not seen this child.
        check_interrupted()?;
        Ok(started)
    }

    pub(super) fn take_stdout(&mut self) -> Option<std::process::ChildStdout> {
        self.child.stdout.take()
    }

    /// Whether it has ended.
    pub(super) fn try_wait(&mut self) -> Result<Option<ExitStatus>, CommandFailure> {
        if self.ended.is_none() {
            self.ended = self.child.try_wait().context(format_args!("cannot wait for `{}`", self.line))?;
            if self.ended.is_some() {
                running().remove(&self.child.id());
            }
        }
        Ok(self.ended)
    }

    /// Waits until it has ended; `longest` is a guard against a hang.
    pub(super) fn wait(&mut self, longest: Duration) -> Result<ExitStatus, CommandFailure> {
        let deadline = Instant::now() + longest;
        let status = loop {
            if let Some(status) = self.try_wait()? {
                break status;
            }
            if Instant::now() > deadline {
                return Err(CommandFailure::general(format!("`{}` does not end", self.line)));
            }
            std::thread::sleep(Duration::from_millis(2));
        };
        check_interrupted()?;
        Ok(status)
    }

    /// Waits until it has ended well.
    pub(super) fn finish(&mut self, longest: Duration) -> Result<(), CommandFailure> {
        let status = self.wait(longest)?;
        if status.success() { Ok(()) } else { Err(CommandFailure::general(format!("`{}`: {status}", self.line))) }
    }

    /// Asks it to end; insists after two seconds.
    pub(super) fn stop(&mut self) {
        if let Some((pidfd, _)) = running().get(&self.child.id()) {
            let _ = pidfd_send_signal(pidfd, Signal::TERM);
        }
        let deadline = Instant::now() + Duration::from_secs(2);
        while matches!(self.try_wait(), Ok(None)) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(2));
        }
        self.kill();
    }

    fn kill(&mut self) {
        if self.ended.is_none() {
            let _ = self.child.kill();
            self.ended = self.child.wait().ok();
            running().remove(&self.child.id());
        }
    }
}

impl Drop for DemoChild {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Runs a short command to its end, silently; says what it said if it failed.
pub(super) fn run(command: &mut Command) -> Result<(), CommandFailure> {
    let line = typed(command);
    let output = command.stdin(std::process::Stdio::null()).output().context(format_args!("cannot run `{line}`"))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(CommandFailure::general(format!("`{line}`: {}: {}", output.status, said.trim())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn child_ends_with_its_guard() {
        let child = DemoChild::start(Command::new("sleep").arg("1000")).unwrap();
        let pid = child.child.id();
        assert!(running().contains_key(&pid));
        drop(child);
        assert!(!running().contains_key(&pid));
        assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists(), "ended and reaped");
    }

    #[test]
    fn failures_name_the_command() {
        let error = run(Command::new("sh").args(["-c", "echo because >&2; exit 3"])).unwrap_err().to_string();
        assert!(error.contains("because") && error.contains("exit 3"), "{error}");
        let mut child = DemoChild::start(&mut Command::new("false")).unwrap();
        assert!(child.finish(Duration::from_secs(60)).unwrap_err().to_string().contains("false"));
    }
}
