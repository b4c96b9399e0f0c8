//! The monitor of a running QEMU (QMP): commands, each with its answer.
//!
//! A command costs QEMU microseconds and a turn of its main loop, so several that do not depend on one another's answers are sent
//! at once; the answers come in the order of the commands.
//!
//! A monitor serves one client at a time and lets the next wait without a word. Every wait here therefore has an end, and
//! the message says what the silence most likely means.

use partywall_region::packet;
use rustix::fd::{AsFd as _, BorrowedFd};
use serde_json::{Value, json};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long a monitor may take for an answer. Hot-plugging takes milliseconds; a busy machine takes longer.
const PATIENCE: Duration = Duration::from_secs(20);
/// How long it may take to greet.
const GREETING: Duration = Duration::from_secs(5);

/// Why a monitor did not do as asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QmpError {
    /// Nobody is there.
    #[error("cannot reach the monitor at {path}: {source}; start QEMU with -qmp unix:{path},server=on,wait=off, and run as a user who may open it", path = path.display())]
    Unreachable {
        /// Its socket.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Somebody is there, but not for us.
    #[error("{path} accepts connections but sends no QMP greeting; another program (libvirt?) probably has this monitor: give QEMU a second -qmp", path = path.display())]
    Busy {
        /// Its socket.
        path: PathBuf,
    },
    /// It is no QMP monitor.
    #[error("{path} does not speak QMP (it said {said:?}); it wants QEMU's -qmp socket, not -monitor, -serial or -chardev", path = path.display())]
    NotQmp {
        /// Its socket.
        path: PathBuf,
        /// The beginning of what it said.
        said: String,
    },
    /// QEMU refused a command.
    #[error("QEMU refused {command}: {why}")]
    Refused {
        /// The command.
        command: String,
        /// In QEMU's words.
        why: String,
    },
    /// The connection broke or fell silent.
    #[error("lost the monitor at {path} during {command}: {source}; the virtual machine has ended or hangs", path = path.display())]
    Lost {
        /// Its socket.
        path: PathBuf,
        /// What had been asked.
        command: String,
        /// How.
        source: io::Error,
    },
}

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
    /// Connects and negotiates.
    pub fn connect(path: impl AsRef<Path>) -> Result<Self, QmpError> {
        let path = path.as_ref().to_owned();
        let unreachable = |source| QmpError::Unreachable { path: path.clone(), source };
        let stream = UnixStream::connect(&path).map_err(unreachable)?;
        stream.set_read_timeout(Some(GREETING)).map_err(unreachable)?;
        stream.set_write_timeout(Some(PATIENCE)).map_err(unreachable)?;
        let mut this =
            Self { path: path.clone(), stream: BufReader::new(stream), partial: String::new(), events: Vec::new() };
        let mut line = String::new();
        match read_line(&mut this.stream, &mut line) {
            Ok(0) => return Err(QmpError::NotQmp { path, said: String::new() }),
            Ok(_) => {}
            Err(e) if is_silence(&e) && line.is_empty() => return Err(QmpError::Busy { path }),
            Err(_) => return Err(QmpError::NotQmp { path, said: beginning(&line) }),
        }
        if serde_json::from_str::<Value>(&line).ok().is_none_or(|v| v.get("QMP").is_none()) {
            return Err(QmpError::NotQmp { path, said: beginning(&line) });
        }
        this.stream.get_ref().set_read_timeout(Some(PATIENCE)).map_err(unreachable)?;
        this.execute("qmp_capabilities", json!({}))?;
        Ok(this)
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The user that QEMU opens files as: now, if that can be seen, else when it made the socket, before it gave up rights (`-runas`).
    pub fn user(&self) -> Result<u32, QmpError> {
        let peer = rustix::net::sockopt::socket_peercred(self.stream.get_ref());
        let peer = peer.map_err(|e| self.lost("SO_PEERCRED", e.into()))?;
        let status = std::fs::read_to_string(format!("/proc/{}/status", peer.pid.as_raw_nonzero()));
        Ok(status.ok().and_then(|status| file_user(&status)).unwrap_or(peer.uid.as_raw()))
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

    /// Several commands, all sent before the first answer is read, and what each returns. One that is refused does not keep those
    /// after it from being done. A few dozen at most: QEMU's answers wait while they are being sent.
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

    /// What comes next that is an answer: the outer error is the monitor's end, the inner a refusal.
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

/// What `/proc/PID/status` says after `Uid:`: the real, the effective, the saved user, and the one for files.
fn file_user(status: &str) -> Option<u32> {
    status.lines().find_map(|line| line.strip_prefix("Uid:"))?.split_whitespace().nth(3)?.parse().ok()
}

/// Reads on until `line` is whole: after a timeout it holds what has come so far.
fn read_line(stream: &mut BufReader<UnixStream>, line: &mut String) -> io::Result<usize> {
    // Longer than any line of QEMU's: what pretends to be a monitor must not fill our memory.
    const LONGEST: u64 = 16 << 20;
    stream.take(LONGEST).read_line(line)
}

fn is_silence(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

fn beginning(line: &str) -> String {
    line.trim_end().chars().take(60).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    /// A monitor that says `script`, one line after each line it hears (the first at once).
    fn monitor(script: &[&'static str]) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("qmp");
        let listener = UnixListener::bind(&path).unwrap();
        let script = script.to_vec();
        std::thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            let mut heard = BufReader::new(stream.try_clone().unwrap());
            for (n, line) in script.iter().enumerate() {
                if n > 0 {
                    heard.read_line(&mut String::new()).unwrap();
                }
                (&stream).write_all(line.as_bytes()).unwrap();
            }
            let _ = (&stream).read(&mut [0; 1000]);
        });
        (dir, path)
    }

    const HELLO: &str = "{\"QMP\": {\"version\": {}, \"capabilities\": []}}\n";
    const DONE: &str = "{\"return\": {}}\n";

    #[test]
    fn file_user_is_the_fourth_uid() {
        assert_eq!(file_user("Name:\tqemu\nUid:\t0\t1\t2\t64055\nGid:\t3\t3\t3\t3\n"), Some(64055));
        assert_eq!(file_user("Name:\tUid:\n"), None);
        let (_dir, path) = monitor(&[HELLO, DONE]);
        assert_eq!(Qmp::connect(&path).unwrap().user().unwrap(), rustix::process::geteuid().as_raw());
    }

    #[test]
    fn events_between_answers_are_kept() {
        let event = "{\"event\": \"STOP\", \"data\": {\"n\": 1}}\n{\"return\": {\"status\": \"running\"}}\n";
        let (_dir, path) = monitor(&[HELLO, DONE, event]);
        let mut qmp = Qmp::connect(&path).unwrap();
        assert_eq!(qmp.execute("query-status", json!({})).unwrap()["status"], "running");
        let soon = Instant::now() + Duration::from_millis(20);
        assert!(!qmp.wait_event("STOP", soon, |d| d["n"] == 2).unwrap());
        assert!(qmp.wait_event("STOP", soon, |d| d["n"] == 1).unwrap());
        assert!(!qmp.wait_event("STOP", soon, |_| true).unwrap(), "taken");
    }

    #[test]
    fn a_refusal_gives_the_reason_and_the_monitor_stays_usable() {
        let no = "{\"error\": {\"class\": \"GenericError\", \"desc\": \"no free slots\"}}\n";
        let (_dir, path) = monitor(&[HELLO, DONE, no, DONE]);
        let mut qmp = Qmp::connect(&path).unwrap();
        let e = qmp.execute("device_add", json!({})).unwrap_err().to_string();
        assert!(e.contains("device_add") && e.contains("no free slots"), "{e}");
        assert!(qmp.execute("query-status", json!({})).is_ok());
    }

    #[test]
    fn pipelined_commands_get_their_own_answers() {
        let answers = "{\"return\": 1}\n{\"event\": \"STOP\"}\n{\"error\": {\"desc\": \"no\"}}\n{\"return\": 3}\n";
        // All three are heard before the first answer: the script answers after the third.
        let (_dir, path) = monitor(&[HELLO, DONE, "", "", answers]);
        let mut qmp = Qmp::connect(&path).unwrap();
        let done = qmp.execute_all(&[("a", json!({})), ("b", json!({})), ("c", json!({}))]).unwrap();
        assert_eq!(done[0].as_ref().unwrap(), 1);
        assert!(matches!(&done[1], Err(QmpError::Refused { command, .. }) if command == "b"));
        assert_eq!(done[2].as_ref().unwrap(), 3);
        assert!(qmp.wait_event("STOP", Instant::now(), |_| true).unwrap(), "events are kept");
    }

    #[test]
    fn socket_without_monitor_is_reported() {
        let (_dir, path) = monitor(&["login: \n"]);
        let e = Qmp::connect(&path).unwrap_err();
        assert!(matches!(&e, QmpError::NotQmp { said, .. } if said.starts_with("login")), "{e}");
        let (_dir, path) = monitor(&[]);
        let e = Qmp::connect(path.with_file_name("absent")).unwrap_err().to_string();
        assert!(e.contains("-qmp unix:"), "{e}");
    }

    #[test]
    fn machine_that_ends_in_mid_command_is_lost() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("qmp");
        let listener = UnixListener::bind(&path).unwrap();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(HELLO.as_bytes()).unwrap();
            let mut heard = BufReader::new(stream.try_clone().unwrap());
            heard.read_line(&mut String::new()).unwrap();
            stream.write_all(DONE.as_bytes()).unwrap();
            heard.read_line(&mut String::new()).unwrap();
        });
        let mut qmp = Qmp::connect(&path).unwrap();
        assert!(matches!(qmp.execute("quit", json!({})), Err(QmpError::Lost { .. })));
        server.join().unwrap();
    }
}
