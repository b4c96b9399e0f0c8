//! A connection to a monitor: commands out, answers and events in.

use super::error::QmpError;
use super::lines::MonitorLines;
use partywall_region::packet;
use rustix::fd::{AsFd as _, BorrowedFd};
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long a monitor may take for its answers to what is sent together. Hot-plugging takes milliseconds; a busy machine takes longer.
pub(super) const PATIENCE: Duration = Duration::from_secs(20);
/// The events that are kept until they are waited for; the newest count.
const MOST_EVENTS: usize = 256;
/// Events of QEMU have some hundred bytes. Longer ones are not kept.
const LONGEST_EVENT: usize = 16 << 10;

/// A connected monitor.
#[derive(Debug)]
pub struct Qmp {
    path: PathBuf,
    lines: MonitorLines,
    /// The longest wait for answers.
    patience: Duration,
    events: VecDeque<Value>,
}

impl Qmp {
    pub(super) fn new(path: PathBuf, lines: MonitorLines, patience: Duration) -> Self {
        Self { path, lines, patience, events: VecDeque::new() }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The user that QEMU opens files as. If the socket's file belongs to root, QEMU may have given up rights since (`-runas`). Then it is
    /// the user of the process that made the socket. A later process with that number does not count.
    pub fn user(&self) -> Result<u32, QmpError> {
        let file = std::fs::metadata(&self.path).map_err(|e| self.lost("the look at its file", e))?;
        if file.uid() != 0 {
            return Ok(file.uid());
        }
        let process = self.process()?;
        let read = |name: &str| std::fs::read_to_string(format!("/proc/{process}/{name}")).ok();
        // The start is read last, so that it is not of an earlier process than the user.
        let now = read("status").and_then(|status| file_user(&status));
        let system = std::fs::read_to_string("/proc/stat").unwrap_or_default();
        let started = read("stat").and_then(|stat| start_time(&stat, &system));
        let made_it = started.is_some_and(|started| started <= file.ctime() + 1);
        Ok(now.filter(|_| made_it).unwrap_or(file.uid()))
    }

    /// The process that made the monitor's socket. For a QEMU whose socket another program has made for it (libvirt), that is that program.
    pub fn process(&self) -> Result<u32, QmpError> {
        let peer = rustix::net::sockopt::socket_peercred(&self.lines);
        let peer = peer.map_err(|e| self.lost("SO_PEERCRED", e.into()))?;
        Ok(peer.pid.as_raw_nonzero().get().unsigned_abs())
    }

    /// One command, and what it returns.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value, QmpError> {
        self.send(&[(command, arguments)])?;
        self.answer(command, self.deadline())?
    }

    /// One command that comes with a descriptor, as `getfd` and `add-fd` do.
    pub fn execute_with(&mut self, command: &str, arguments: Value, fd: BorrowedFd<'_>) -> Result<Value, QmpError> {
        let text = line(command, &arguments);
        packet::send(self.lines.as_fd(), text.as_bytes(), &[fd]).map_err(|e| self.lost(command, e))?;
        self.answer(command, self.deadline())?
    }

    /// Executes several commands, all sent before the first answer is read, and returns their answers. A refused command does not keep
    /// the later ones from being executed. A few dozen at most: QEMU's answers wait while they are being sent.
    pub fn execute_all(&mut self, commands: &[(&str, Value)]) -> Result<Vec<Result<Value, QmpError>>, QmpError> {
        self.send(commands)?;
        let deadline = self.deadline();
        commands.iter().map(|(command, _)| self.answer(command, deadline)).collect()
    }

    /// The time by which answers to commands that are sent now are due.
    fn deadline(&self) -> Instant {
        Instant::now() + self.patience
    }

    fn send(&mut self, commands: &[(&str, Value)]) -> Result<(), QmpError> {
        let mut text = String::new();
        for (command, arguments) in commands {
            text.push_str(&line(command, arguments));
        }
        let first = commands.first().map_or("nothing", |(command, _)| command);
        self.lines.write(&text).map_err(|e| self.lost(first, e))
    }

    /// The next answer: the outer error is the monitor's end, the inner a refusal.
    fn answer(&mut self, command: &str, deadline: Instant) -> Result<Result<Value, QmpError>, QmpError> {
        loop {
            let Some(mut message) = self.message(deadline).map_err(|e| self.lost(command, e))? else { continue };
            if let Some(answer) = message.get_mut("return") {
                return Ok(Ok(answer.take()));
            }
            if let Some(error) = message.get("error") {
                let why = error.get("desc").and_then(Value::as_str).unwrap_or("(no reason given)").to_owned();
                return Ok(Err(QmpError::Refused { command: command.to_owned(), why }));
            }
            self.keep(message);
        }
    }

    fn lost(&self, command: &str, source: io::Error) -> QmpError {
        QmpError::Lost { path: self.path.clone(), command: command.to_owned(), source }
    }

    /// Waits until an event called `name` has come for which `wanted` holds; `false` if it has not by `deadline`.
    ///
    /// Events that came during commands count.
    pub fn wait_event(
        &mut self,
        name: &str,
        deadline: Instant,
        wanted: impl Fn(&Value) -> bool,
    ) -> Result<bool, QmpError> {
        let path = self.path.clone();
        let lost = |source| QmpError::Lost { path: path.clone(), command: format!("the wait for {name}"), source };
        loop {
            let found = self.events.iter().position(|e| {
                e.get("event").and_then(Value::as_str) == Some(name) && wanted(e.get("data").unwrap_or(&Value::Null))
            });
            if let Some(at) = found {
                self.events.drain(..=at);
                return Ok(true);
            }
            match self.message(deadline) {
                Ok(event) => event.into_iter().for_each(|event| self.keep(event)),
                Err(e) if e.kind() == io::ErrorKind::TimedOut => return Ok(false),
                Err(e) => return Err(lost(e)),
            }
        }
    }

    /// The events that came during commands and that nobody has waited for. Each is returned once.
    pub fn take_events(&mut self) -> Vec<Value> {
        std::mem::take(&mut self.events).into()
    }

    fn keep(&mut self, event: Value) {
        if self.events.len() == MOST_EVENTS {
            self.events.pop_front();
        }
        self.events.push_back(event);
    }

    /// The next message; `None` for an event that is too long to be one of QEMU's.
    fn message(&mut self, deadline: Instant) -> io::Result<Option<Value>> {
        let line = self.lines.next(deadline)?;
        let message: Value = serde_json::from_slice(&line)?;
        Ok(Some(message).filter(|message| line.len() <= LONGEST_EVENT || message.get("event").is_none()))
    }
}

fn line(command: &str, arguments: &Value) -> String {
    format!("{}\n", json!({ "execute": command, "arguments": arguments }))
}

/// The user for files in the line `Uid:` of `/proc/PID/status`, which has the real, the effective, the saved user, and the one for files.
pub(super) fn file_user(status: &str) -> Option<u32> {
    status.lines().find_map(|line| line.strip_prefix("Uid:"))?.split_whitespace().nth(3)?.parse().ok()
}

/// The second since 1970 in which a process started, by `/proc/PID/stat` and `/proc/stat`.
pub(super) fn start_time(stat: &str, system: &str) -> Option<i64> {
    let boot: i64 = system.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()?;
    // Behind the name, which is in parentheses and may hold any byte, comes the third field. The start is field 22.
    let ticks: u64 = stat.rsplit_once(')')?.1.split_whitespace().nth(22 - 3)?.parse().ok()?;
    Some(boot + i64::try_from(ticks / rustix::param::clock_ticks_per_second()).ok()?)
}
