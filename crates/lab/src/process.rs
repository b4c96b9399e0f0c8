//! QEMU as a child that never outlives us.
//!
//! A thread of its own starts it, waits for it and reaps it. The kernel kills the child when that thread ends, and it ends
//! early only with the whole process: so no guest is left behind by a panic, a `SIGINT` or a `kill -9` either.

use crate::LabError;
use rustix::fd::OwnedFd;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Condvar, Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

/// How it ended, and what it complained of.
type End = (Mutex<Option<String>>, Condvar);

/// A running (or ended) QEMU.
#[derive(Debug)]
pub(crate) struct Process {
    pid: u32,
    pidfd: OwnedFd,
    end: Arc<End>,
}

impl Process {
    pub(crate) fn start(command: &Command) -> Result<Self, LabError> {
        let mut bound = Command::new("setpriv");
        bound.args(["--pdeathsig", "KILL", "--"]).arg(command.get_program()).args(command.get_args());
        bound.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let end = Arc::new(End::default());
        let ended = Arc::clone(&end);
        let (say, started) = mpsc::channel();
        std::thread::spawn(move || match bound.spawn() {
            Ok(mut child) => {
                let _ = say.send(open(&child));
                let mut said = String::new();
                if let Some(mut stderr) = child.stderr.take() {
                    let _ = stderr.read_to_string(&mut said);
                }
                let status = child.wait().map_or_else(|e| e.to_string(), |status| status.to_string());
                *ended.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(format!("{status}. {}", said.trim()));
                ended.1.notify_all();
            }
            Err(e) => drop(say.send(Err(LabError::tool("setpriv", e)))),
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
        // It fails when there is nobody left to kill.
        let _ = pidfd_send_signal(&self.pidfd, Signal::KILL);
        let _ = self.wait(Duration::from_secs(20));
    }
}

fn open(child: &Child) -> Result<(u32, OwnedFd), LabError> {
    // Not reaped yet, so the number is still its own.
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    let pid = pid.ok_or_else(|| LabError::tool("setpriv", "a child without a number"))?;
    let pidfd = pidfd_open(pid, PidfdFlags::empty()).map_err(|e| LabError::tool("setpriv", e))?;
    Ok((child.id(), pidfd))
}
