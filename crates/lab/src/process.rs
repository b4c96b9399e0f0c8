//! Programs as children that never outlive us: QEMU above all.
//!
//! A separate thread starts each, waits for it and reaps it. The kernel ends the child when that thread ends, and it ends
//! early only with the whole process: so no guest is left behind by a panic, a `SIGINT` or a `kill -9` either.

use crate::LabError;
use rustix::fd::{AsFd, OwnedFd};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::fs::File;
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};

/// How it ended, and what it complained of.
type End = (Mutex<Option<String>>, Condvar);

/// Everything that runs, by descriptor: a number could have become another process. `None` once no more may be started.
static RUNNING: Mutex<Option<Vec<Arc<OwnedFd>>>> = Mutex::new(Some(Vec::new()));

fn running() -> MutexGuard<'static, Option<Vec<Arc<OwnedFd>>>> {
    // Entries are inserted and removed whole.
    RUNNING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Ends every guest, broker and network of this process, and lets no further one start. A caller that waits for one gets an error, so that a
/// program that was interrupted comes to its end by the way on which it takes everything down.
pub fn interrupt() {
    for pidfd in running().take().into_iter().flatten() {
        // It may have ended by itself.
        let _ = pidfd_send_signal(pidfd, Signal::KILL);
    }
}

/// Whether [`interrupt`] was called.
pub fn interrupted() -> bool {
    running().is_none()
}

/// A running (or ended) program.
#[derive(Debug)]
pub(crate) struct LabProcess {
    pid: u32,
    pidfd: Arc<OwnedFd>,
    end: Arc<End>,
}

impl LabProcess {
    /// Starts a process; `last` is the name of the signal that ends it if this process ends first. Its error output goes to `log`, or is
    /// kept.
    pub(crate) fn start(command: &Command, last: &str, log: Option<File>) -> Result<Self, LabError> {
        let name = command.get_program().to_string_lossy().into_owned();
        let mut bound = Command::new("setpriv");
        bound.args(["--pdeathsig", last, "--"]);
        bound.arg(command.get_program()).args(command.get_args());
        bound.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log.map_or_else(Stdio::piped, Stdio::from));
        // Ctrl-C is for us, who then end it in order.
        bound.process_group(0);
        let end = Arc::new(End::default());
        let ended = Arc::clone(&end);
        let (say, started) = mpsc::channel();
        std::thread::spawn(move || match spawn(&mut bound, &name) {
            Ok((mut child, pidfd)) => {
                let _ = say.send(Ok((child.id(), Arc::clone(&pidfd))));
                let mut said = String::new();
                if let Some(mut stderr) = child.stderr.take() {
                    let _ = stderr.read_to_string(&mut said);
                }
                let status = child.wait().map_or_else(|e| e.to_string(), |status| status.to_string());
                if let Some(all) = &mut *running() {
                    all.retain(|other| !Arc::ptr_eq(other, &pidfd));
                }
                *ended.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(format!("{status}. {}", said.trim()));
                ended.1.notify_all();
            }
            Err(e) => drop(say.send(Err(e))),
        });
        let (pid, pidfd) = started.recv().map_err(|e| LabError::tool("setpriv", e))??;
        Ok(Self { pid, pidfd, end })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.pid
    }

    /// Waits until it has ended, and says how; `None` if it has not within `limit`.
    pub(crate) fn wait(&self, limit: Duration) -> Option<String> {
        let deadline = Instant::now() + limit;
        let mut end = self.end.0.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if end.is_some() || left.is_zero() {
                return end.clone();
            }
            end = self.end.1.wait_timeout(end, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// `kill -9`, and waits for the end.
    pub(crate) fn kill(&self) {
        self.signal(Signal::KILL);
        let _ = self.wait(Duration::from_secs(20));
    }

    /// Asks it to end, and insists after a while.
    pub(crate) fn stop(&self) {
        self.signal(Signal::TERM);
        if self.wait(Duration::from_secs(5)).is_none() {
            self.kill();
        }
    }

    fn signal(&self, signal: Signal) {
        // It fails when the process has ended.
        let _ = pidfd_send_signal(self.pidfd.as_fd(), signal);
    }
}

impl Drop for LabProcess {
    fn drop(&mut self) {
        self.kill();
    }
}

fn spawn(command: &mut Command, name: &str) -> Result<(Child, Arc<OwnedFd>), LabError> {
    let mut all = running();
    let all = all.as_mut().ok_or_else(|| LabError::tool(name, "not started: interrupted"))?;
    let child = command.spawn().map_err(|e| LabError::tool("setpriv", e))?;
    // Not reaped yet, so the number is still its own.
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    let pid = pid.ok_or_else(|| LabError::tool("setpriv", "a child without a number"))?;
    let pidfd = Arc::new(pidfd_open(pid, PidfdFlags::empty()).map_err(|e| LabError::tool("setpriv", e))?);
    all.push(Arc::clone(&pidfd));
    Ok((child, pidfd))
}
