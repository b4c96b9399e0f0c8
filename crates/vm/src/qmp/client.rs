//! A connection to a monitor: commands out, answers and events in.

use super::error::QmpError;
use partywall_region::packet;
use rustix::fd::{AsFd as _, BorrowedFd};
use serde_json::{Value, json};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long a monitor may take for an answer. Hot-plugging takes milliseconds; a busy machine takes longer.
pub(super) const PATIENCE: Duration = Duration::from_secs(20);

/// A connected monitor.
#[derive(Debug)]
pub struct Qmp {
    path: PathBuf,
    stream: BufReader<UnixStream>,
    /// The beginning of a message that has not come whole yet.
    partial: String,
    events: Vec<Value>,
}

impl Qmp {
    pub(super) fn new(path: PathBuf, stream: BufReader<UnixStream>) -> Self {
        Self { path, stream, partial: String::new(), events: Vec::new() }
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
        let peer = rustix::net::sockopt::socket_peercred(self.stream.get_ref());
        let peer = peer.map_err(|e| self.lost("SO_PEERCRED", e.into()))?;
        Ok(peer.pid.as_raw_nonzero().get().unsigned_abs())
    }

    /// One command, and what it returns.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value, QmpError> {
        self.send(&[(command, arguments)])?;
        self.answer(command)?
    }

    /// One command that comes with a descriptor, as `getfd` and `add-fd` do.
    pub fn execute_with(&mut self, command: &str, arguments: Value, fd: BorrowedFd<'_>) -> Result<Value, QmpError> {
        let text = line(command, &arguments);
        packet::send(self.stream.get_ref().as_fd(), text.as_bytes(), &[fd]).map_err(|e| self.lost(command, e))?;
        self.answer(command)?
    }

    /// Executes several commands, all sent before the first answer is read, and returns their answers. A refused command does not keep
    /// the later ones from being executed. A few dozen at most: QEMU's answers wait while they are being sent.
    pub fn execute_all(&mut self, commands: &[(&str, Value)]) -> Result<Vec<Result<Value, QmpError>>, QmpError> {
        self.send(commands)?;
        commands.iter().map(|(command, _)| self.answer(command)).collect()
    }

    fn send(&mut self, commands: &[(&str, Value)]) -> Result<(), QmpError> {
        let mut text = String::new();
        for (command, arguments) in commands {
            text.push_str(&line(command, arguments));
        }
        let first = commands.first().map_or("nothing", |(command, _)| command);
        self.stream.get_mut().write_all(text.as_bytes()).map_err(|e| self.lost(first, e))
    }

    /// The next answer: the outer error is the monitor's end, the inner a refusal.
    fn answer(&mut self, command: &str) -> Result<Result<Value, QmpError>, QmpError> {
        loop {
            let mut message = self.message().map_err(|e| self.lost(command, e))?;
            if let Some(answer) = message.get_mut("return") {
                return Ok(Ok(answer.take()));
            }
            if let Some(error) = message.get("error") {
                let why = error.get("desc").and_then(Value::as_str).unwrap_or("(no reason given)").to_owned();
                return Ok(Err(QmpError::Refused { command: command.to_owned(), why }));
            }
            self.events.push(message);
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
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(false);
            }
            self.stream.get_ref().set_read_timeout(Some(left)).map_err(lost)?;
            let message = self.message();
            self.stream.get_ref().set_read_timeout(Some(PATIENCE)).map_err(lost)?;
            match message {
                Ok(event) => self.events.push(event),
                Err(e) if is_silence(&e) => return Ok(false),
                Err(e) => return Err(lost(e)),
            }
        }
    }

    /// The events that came during commands and that nobody has waited for. Each is returned once.
    pub fn take_events(&mut self) -> Vec<Value> {
        std::mem::take(&mut self.events)
    }

    fn message(&mut self) -> io::Result<Value> {
        read_line(&mut self.stream, &mut self.partial)?;
        if !self.partial.ends_with('\n') {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        serde_json::from_str(&std::mem::take(&mut self.partial)).map_err(io::Error::from)
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

/// Reads on until `line` is whole: after a timeout it holds what has come so far.
pub(super) fn read_line(stream: &mut BufReader<UnixStream>, line: &mut String) -> io::Result<usize> {
    // Longer than any line of QEMU's: what pretends to be a monitor must not fill our memory.
    const LONGEST: u64 = 16 << 20;
    stream.take(LONGEST).read_line(line)
}

pub(super) fn is_silence(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}
