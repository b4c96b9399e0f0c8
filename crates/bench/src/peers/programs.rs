//! The running programs of peers: a server and a client each, which take orders.

use std::{
    collections::BTreeMap,
    io::Write,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{
    order::PeerOrder,
    running::RunningPeers,
    sources::{AddressForm, SOURCES},
};
use crate::{
    affinity::Placement,
    apps::site::free_ports,
    error::{BenchError, During, Result},
    interrupt::Interrupt,
    mechanism::Mechanism,
    process::GuardedChild,
    report::cell::Key,
    task::Figures,
};

/// The environment variable by which a program learns its processor.
pub(crate) const CPU: &str = "PARTYWALL_BENCH_CPU";
/// How long a program may take to listen or to connect.
const STARTING: Duration = Duration::from_secs(30);
/// The longest time for one order beyond its own: the largest sequences of the slowest peer.
const PATIENCE: Duration = Duration::from_secs(180);

/// The programs that have been compiled, and those that run.
#[derive(Debug, Default)]
pub(crate) struct PeerLibraries {
    built: BTreeMap<Mechanism, Result<PathBuf, String>>,
    running: RunningPeers<RunningPeer>,
}

/// What programs need to run.
#[derive(Debug)]
pub(crate) struct PeerSurroundings<'a> {
    pub(crate) scratch: &'a Path,
    pub(crate) placement: Placement,
    pub(crate) interrupt: &'a Interrupt,
    /// The broker's socket, for Partywall.
    pub(crate) broker: Option<PathBuf>,
}

#[derive(Debug)]
struct RunningPeer {
    // The client goes first.
    client: PeerProgram,
    _server: PeerProgram,
}

#[derive(Debug)]
struct PeerProgram {
    child: GuardedChild,
    input: OwnedFd,
    output: OwnedFd,
    rest: Vec<u8>,
}

impl PeerLibraries {
    /// Executes one order by the programs of a peer, which are compiled and started if they are not there yet. Each run has new programs.
    pub(crate) fn execute(&mut self, key: &Key, order: &PeerOrder, around: &PeerSurroundings<'_>) -> Result<Figures> {
        let Self { built, running } = self;
        let start = |number| {
            let program = Self::program(built, key.mechanism, around)?;
            RunningPeer::start(key.mechanism, &program, number, around)
        };
        running.execute(key, start, |peer| peer.client.ask(&order.to_string(), order.time + PATIENCE, around.interrupt))
    }

    fn program(
        built: &mut BTreeMap<Mechanism, Result<PathBuf, String>>,
        mechanism: Mechanism,
        around: &PeerSurroundings<'_>,
    ) -> Result<PathBuf> {
        let Some(source) = SOURCES.iter().find(|source| source.mechanism == mechanism) else {
            // Partywall's own program is this one.
            return std::env::current_exe().during("finding this program");
        };
        let build = || {
            if source.missing().is_empty() {
                eprintln!("partywall-bench: compiling the program for {mechanism}");
            }
            source.build(&around.scratch.join(format!("peer-{mechanism}"))).map_err(|e| e.to_string())
        };
        let built = built.entry(mechanism).or_insert_with(build);
        built.clone().map_err(BenchError::Unavailable)
    }
}

impl RunningPeer {
    fn start(mechanism: Mechanism, program: &Path, number: u32, around: &PeerSurroundings<'_>) -> Result<Self> {
        let source = SOURCES.iter().find(|source| source.mechanism == mechanism);
        let address = match source.map_or(AddressForm::Name, |source| source.address) {
            AddressForm::Path => around.scratch.join(format!("peer-{number}")).display().to_string(),
            AddressForm::Port => free_ports()?.to_string(),
            AddressForm::Name => format!("bench-{}-peer-{number}", std::process::id()),
        };
        let start = |role: &str, cpu: usize| {
            let mut command = Command::new(program);
            if source.is_none() {
                command.arg("peer");
            }
            command.args([role, &address]).env(CPU, cpu.to_string());
            if let Some(broker) = &around.broker {
                command.env(partywall_protocol::environment::BROKER, broker);
            }
            let mut started = PeerProgram::start(&mut command)?;
            match started.line(STARTING, around.interrupt)?.as_str() {
                "ready" => Ok(started),
                said => Err(BenchError::Transport(format!("the {role} program of {mechanism} answered \"{said}\""))),
            }
        };
        let server = start("serve", around.placement.passive)?;
        let client = start("call", around.placement.active)?;
        Ok(Self { client, _server: server })
    }
}

impl PeerProgram {
    fn start(command: &mut Command) -> Result<Self> {
        let mut child = GuardedChild::spawn(command.stdin(Stdio::piped()).stdout(Stdio::piped()))?;
        let (input, output) =
            child.pipes().ok_or_else(|| BenchError::Transport("a program was started without pipes".into()))?;
        Ok(Self { child, input, output, rest: Vec::new() })
    }

    fn ask(&mut self, order: &str, patience: Duration, interrupt: &Interrupt) -> Result<String> {
        let mut input = std::fs::File::from(self.input.try_clone().during("duplicating a pipe")?);
        input.write_all(format!("{order}\n").as_bytes()).during("writing to a peer's program")?;
        self.line(patience, interrupt)
    }

    /// The next line of its output.
    fn line(&mut self, patience: Duration, interrupt: &Interrupt) -> Result<String> {
        let deadline = Instant::now() + patience;
        loop {
            if let Some(end) = self.rest.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.rest.drain(..=end).collect();
                return Ok(String::from_utf8_lossy(&line).trim_end().to_owned());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(BenchError::Transport("a peer's program does not answer".into()));
            }
            let wait = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
            let mut polled =
                [PollFd::new(&self.output, PollFlags::IN), PollFd::from_borrowed_fd(interrupt.as_fd(), PollFlags::IN)];
            match poll(&mut polled, Some(&wait)) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(e).during("waiting for a peer's program"),
            }
            let readable = !polled[0].revents().is_empty();
            interrupt.check()?;
            if readable {
                let mut buffer = [0; 4096];
                let n = rustix::io::read(&self.output, &mut buffer).during("reading from a peer's program")?;
                if n == 0 {
                    let end = self.child.ended().unwrap_or_else(|| "it has closed its output".into());
                    return Err(BenchError::Transport(format!("a peer's program ended without an answer: {end}")));
                }
                self.rest.extend_from_slice(&buffer[..n]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_a_program_are_read_one_by_one() {
        let interrupt = Interrupt::catch().unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", "echo ready; while read line; do echo \"got $line\"; done; exit 3"]);
        let mut program = PeerProgram::start(&mut command).unwrap();
        let patience = Duration::from_secs(60);
        assert_eq!(program.line(patience, &interrupt).unwrap(), "ready");
        assert_eq!(program.ask("one", patience, &interrupt).unwrap(), "got one");
        assert_eq!(program.ask("two", patience, &interrupt).unwrap(), "got two");
        let silent = program.line(Duration::from_millis(20), &interrupt).unwrap_err();
        assert!(silent.to_string().contains("does not answer"), "{silent}");
    }

    #[test]
    fn program_that_ends_is_an_error() {
        let interrupt = Interrupt::catch().unwrap();
        let mut program = PeerProgram::start(Command::new("sh").args(["-c", "exit 3"])).unwrap();
        let error = program.line(Duration::from_secs(60), &interrupt).unwrap_err();
        assert!(error.to_string().contains("ended without an answer"), "{error}");
    }
}
