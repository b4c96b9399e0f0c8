//! An agent without a host: its socket, which two agents, or an agent and a broker, may want, and its limits.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

use std::io::Read as _;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// A guard against hangs; nothing here takes nearly as long.
const LONGEST: Duration = Duration::from_secs(120);

/// An agent that does not outlive its test. It has no port to a host, so it waits for one.
struct Agent(Child);

impl Agent {
    fn start(socket: &Path) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_partywall-agent"));
        command.arg("--socket").arg(socket).args(["--port", "no.such.port"]).env_remove("JOURNAL_STREAM");
        Self(command.stdin(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap())
    }

    /// Its exit code, and what it said.
    fn end(mut self) -> (Option<i32>, String) {
        await_that("the agent ends", || self.0.try_wait().unwrap().is_some());
        let mut said = String::new();
        self.0.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        (self.0.wait().unwrap().code(), said)
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        // Ended already is fine.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn await_that(what: &str, mut is: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is() {
        assert!(start.elapsed() < LONGEST, "never: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Whether an agent has locked this file, by the kernel's list of locks: an attempt to lock it could itself refuse the agent.
fn has_lock(agent: &Agent, path: &Path) -> bool {
    let Ok(file) = std::fs::metadata(path) else { return false };
    // As `1: FLOCK  ADVISORY  WRITE 1234 08:01:5678 0 EOF`, with the process and the file's inode.
    let locks = std::fs::read_to_string("/proc/locks").unwrap();
    locks.lines().map(|line| line.split_whitespace().collect::<Vec<_>>()).any(|words| match words[..] {
        [_, "FLOCK", _, "WRITE", process, file_of_lock, ..] => {
            let inode = file_of_lock.rsplit(':').next();
            (process, inode) == (&*agent.0.id().to_string(), Some(&*file.ino().to_string()))
        }
        _ => false,
    })
}

#[test]
fn second_agent_is_refused_and_socket_stays() {
    let dir = tempfile::tempdir().unwrap();
    let (socket, lock) = (dir.path().join("new/broker.sock"), dir.path().join("new/broker.sock.lock"));
    let first = Agent::start(&socket);
    await_that("the first agent has the lock", || has_lock(&first, &lock));
    // The socket that the first agent serves once its host is there.
    let _served = UnixListener::bind(&socket).unwrap();
    let (code, said) = Agent::start(&socket).end();
    assert_eq!(code, Some(4), "{said}");
    assert!(said.contains("another agent or broker serves") && said.contains("--socket"), "{said}");
    assert!(socket.exists(), "it was not the second agent's");
    // The first agent's end takes its socket away, and lets the next agent in.
    kill_process(Pid::from_child(&first.0), Signal::TERM).unwrap();
    let (code, said) = first.end();
    assert_eq!(code, Some(0), "{said}");
    assert!(!socket.exists());
    let next = Agent::start(&socket);
    await_that("the next agent has the lock", || has_lock(&next, &lock));
}

#[test]
fn limit_on_descriptors_is_raised() {
    let dir = tempfile::tempdir().unwrap();
    let (socket, lock) = (dir.path().join("broker.sock"), dir.path().join("broker.sock.lock"));
    let agent = format!("ulimit -S -n 100 && exec {} \"$@\"", env!("CARGO_BIN_EXE_partywall-agent"));
    let mut command = Command::new("sh");
    command.args(["-c", &agent, "sh", "--port", "no.such.port", "--socket"]).arg(&socket);
    let agent = Agent(command.stdin(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
    await_that("the agent has the lock", || has_lock(&agent, &lock));
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", agent.0.id())).unwrap();
    let of = limits.lines().find_map(|line| line.strip_prefix("Max open files")).unwrap();
    let [soft, hard, _] = of.split_whitespace().collect::<Vec<_>>()[..] else { panic!("{limits}") };
    assert_eq!(soft, hard);
}
