//! Programs in machines: run to their end, and servers waited for.

use std::{
    thread,
    time::{Duration, Instant},
};

use partywall_lab::{Guest, Running};
use rustix::process::Signal;

use super::machines::fault;
use crate::{
    apps::PATIENCE,
    error::{BenchError, Result},
    interrupt::Interrupt,
    mechanism::Mechanism,
};

/// Emulated servers start slowly.
pub(super) const START: Duration = Duration::from_secs(60);
/// How often to look at a program, and at Ctrl-C.
pub(super) const LOOK: Duration = Duration::from_millis(20);

/// A command line, with the library or without.
pub(in crate::commands) fn with_library(mechanism: Mechanism, line: Vec<String>) -> Vec<String> {
    let prefix: &[&str] =
        if mechanism == Mechanism::Transparent { &["partywall", "run", "--quiet", "--"] } else { &[] };
    prefix.iter().map(|word| (*word).to_owned()).chain(line).collect()
}

/// Runs a program to its end, and returns what it has written. One that fails, or lasts too long, is an error.
pub(in crate::commands) fn execute(guest: &Guest, line: &[String], interrupt: &Interrupt) -> Result<String> {
    let words: Vec<&str> = line.iter().map(String::as_str).collect();
    let mut running = guest.start(&words).map_err(fault)?;
    await_end(&mut running, PATIENCE, interrupt, || line.join(" "))?;
    let output = running.so_far();
    if output.status != 0 {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(BenchError::Transport(format!("{} ended with {}: {said}", line.join(" "), output.status)));
    }
    Ok(output.text())
}

/// Waits until a program has ended. It is killed when the time is over, and on Ctrl-C.
pub(super) fn await_end(
    running: &mut Running<'_>,
    limit: Duration,
    interrupt: &Interrupt,
    what: impl FnOnce() -> String,
) -> Result<()> {
    let deadline = Instant::now() + limit;
    while running.look(LOOK).map_err(fault)? != Some(true) {
        let is_late = Instant::now() > deadline;
        let interrupted = interrupt.check();
        if is_late || interrupted.is_err() {
            // If it cannot be told it is gone.
            let _ = running.signal(Signal::KILL);
            interrupted?;
            return Err(BenchError::Transport(format!("{} does not end within {limit:?}", what())));
        }
    }
    Ok(())
}

/// The line of shell that succeeds if something in its machine listens on this port of TCP.
pub(super) fn listens(port: u16) -> String {
    format!("grep -q ':{port:04X} 0*:0000 0A' /proc/net/tcp /proc/net/tcp6")
}

/// Waits until a server in this machine listens on this port of TCP.
pub(in crate::commands) fn await_listener(
    guest: &Guest,
    port: u16,
    server: &mut Running<'_>,
    interrupt: &Interrupt,
) -> Result<()> {
    let deadline = Instant::now() + START;
    let listens = format!("{} && echo yes; true", listens(port));
    while !guest.shell(&listens).map_err(fault)?.contains("yes") {
        interrupt.check()?;
        if Instant::now() > deadline {
            let _ = server.look(LOOK);
            let output = server.so_far();
            let said = format!("{}{}", output.text(), String::from_utf8_lossy(&output.stderr));
            return Err(BenchError::Transport(format!("the server of port {port} does not listen: {said}")));
        }
        thread::sleep(LOOK);
    }
    Ok(())
}
