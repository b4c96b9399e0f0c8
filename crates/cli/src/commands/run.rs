//! `partywall run`: executes a program whose connections use shared memory if their peer is on this host and runs the same way.

use std::ffi::{OsStr, OsString};
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use partywall_protocol::directory::Clause;
use partywall_protocol::environment;

use crate::admission;
use crate::args::{Global, RingOption, parse_ring};
use crate::exit::{Code, CommandFailure, Context, RUN_TABLE};
use crate::program::Program;
use crate::program::worker::{self, Standing};
use crate::words;
use crate::{human, session, siblings};

const AFTER: &str = "\
Addresses, ports and the program's view of its sockets stay the same. A connection starts on TCP. It moves to shared memory if both \
ends run like this, on one host with one broker, and returns to TCP where necessary. All other connections stay on TCP. \
`partywall top` shows the transport of each connection, and the reason.

The move rules decide when a connection moves; the last one that matches applies. The default is the broker's rules \
(`partywall moves`), `after=128,bytes=2M` unless changed. Their `never` cannot be overridden:
  now                        at once; makes programs with many short connections several times slower
  after=16,bytes=64K         after 16 calls or 64 KiB, whichever is first; either may be omitted
  never                      stays on TCP
  never@port=22              only connections to a listener on port 22
  now@address=10.0.0.0/8     only connections with a peer of these addresses

Examples:
  partywall run redis-server                          in one terminal
  partywall run redis-benchmark -t get                in another, or in another container
  partywall run --move now --move never@port=22 -- ssh host
  partywall doctor -- nginx                           report whether `run` can accelerate nginx";

/// Run an unmodified program, with its connections in shared memory if the peer on this host runs in the same way
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER, after_long_help = format!("{AFTER}\n\n{RUN_TABLE}"))]
pub(crate) struct Args {
    /// When the program's connections move to shared memory; repeatable [default: the broker's move rules]
    #[arg(long = "move", alias = "policy", value_name = "MODE[@WHICH]", value_parser = words::parse_own_clause)]
    moves: Vec<Clause>,

    /// Size of the program's rings: a power of two from 4K to 1G, or auto, the broker's choice
    #[arg(long, value_name = "SIZE|auto", default_value = "auto", value_parser = parse_ring)]
    ring: RingOption,

    /// Longest time to spin before sleeping, with a unit, as in 50us or 2ms, at most 1h; 0 sleeps at once [default: the broker's choice]
    #[arg(long, value_name = "DURATION", value_parser = human::parse_spin)]
    spin: Option<Duration>,

    /// Suppress warnings about obstacles to acceleration, a missing broker, and a move rule that slows the program down
    #[arg(short, long)]
    quiet: bool,

    /// The program, and its arguments; `--` before it if its name begins with a hyphen
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND", value_hint = clap::ValueHint::CommandWithArguments)]
    command: Vec<OsString>,
}

pub(crate) fn run(global: &Global, args: &Args) -> Result<(), CommandFailure> {
    // clap has seen to it that there is one.
    let (name, arguments) = args.command.split_first().ok_or_else(|| CommandFailure::usage("run what?"))?;
    let program = Program::find(name)?;
    let library = siblings::find_library()?;
    let obstacles = program.obstacles();
    let broker = absolute(&session::broker_path(global))?;
    if !args.quiet {
        let path = program.path.display();
        for obstacle in obstacles.iter().take(1) {
            warn(format_args!("{path} stays on TCP: {}", obstacle.words()));
        }
        if obstacles.is_empty() {
            if let Err(error) = probe(global, &program) {
                warn(format_args!("{path} stays on TCP: {error}"));
            } else if let Some(why) = workers_stay_outside(global, &program) {
                warn(format_args!("{path} stays on TCP: {why}"));
            }
            if words::moves_all_at_once(&args.moves) {
                warn(format_args!(
                    "--move now: {}; `after=16,bytes=64K` spares those (--quiet hides this)",
                    words::NOW_IS_SLOW
                ));
            }
        }
    }
    let workers = rustix::process::geteuid().is_root().then(|| worker::user_of(&program.path)).flatten();
    let mut command = Command::new(name);
    command.args(arguments);
    for (variable, value) in environment(args, &broker, session::chosen_name(global), workers)? {
        command.env(variable, value);
    }
    if obstacles.iter().all(|obstacle| obstacle.keeps_preload()) {
        let before = std::env::var_os(environment::PRELOAD);
        command.env(environment::PRELOAD, prepend(library.as_os_str(), before.as_deref())?);
    }
    // Only comes back when it failed.
    let error = command.exec();
    let code = if error.kind() == std::io::ErrorKind::NotFound { Code::NotFound } else { Code::NotExecutable };
    Err(CommandFailure::new(code, format!("cannot run {}: {error}", program.path.display())))
}

/// One line on standard error; a closed one must not keep the program from running.
fn warn(what: impl std::fmt::Display) {
    let _ = writeln!(std::io::stderr(), "partywall: {what}");
}

/// The reason why its sockets would stay on TCP if it joined now.
fn probe(global: &Global, program: &Program) -> Result<(), String> {
    let joined = session::join_as(global, &program.domain(global));
    joined.map(drop).map_err(|failure| match failure.code {
        // With the rule that would allow it.
        Code::Refused => failure.to_string(),
        _ => failure.to_string().lines().next().unwrap_or_default().to_owned(),
    })
}

/// Why the workers of a server, which have another user, cannot join, where that is known.
fn workers_stay_outside(global: &Global, program: &Program) -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return None;
    }
    let worker = worker::of(&program.path)?;
    let (standing, user) = (worker::standing(global, program, &worker), worker.user);
    let (refusal, remedy) = match standing {
        Standing::May { .. } | Standing::Unknown(_) => return None,
        Standing::MayNot { name, grounds, rule } => {
            (format!("the broker's policy does not let join as {name} ({grounds})"), rule)
        }
        Standing::ShutOut { socket } => {
            (format!("the broker's socket does not let connect ({socket})"), admission::remedy().to_owned())
        }
    };
    Some(format!("its workers run as {user}, whom {refusal}\n  {remedy}"))
}

/// The environment variables that pass the options to the library. The broker decides about options that were not given. `workers`: the
/// user of the program's workers, which then have the domain's name.
fn environment(
    args: &Args,
    broker: &Path,
    domain: Option<&str>,
    workers: Option<u32>,
) -> Result<Vec<(&'static str, OsString)>, CommandFailure> {
    let mut variables = vec![(environment::BROKER, broker.as_os_str().to_owned())];
    if let Some(name) = domain {
        variables.push((environment::DOMAIN, name.into()));
        if let Some(user) = workers {
            variables.push((environment::DOMAIN_USER, user.to_string().into()));
        }
    }
    if !args.moves.is_empty() {
        variables.push((environment::MOVES, words::join(&args.moves).into()));
    }
    if let RingOption::Fixed(size) = args.ring {
        variables.push((environment::RING, size.to_string().into()));
    }
    if let Some(spin) = args.spin {
        let micros = u32::try_from(spin.as_micros());
        let micros = micros.map_err(|_| CommandFailure::usage("--spin: more than an hour of spinning is a mistake"))?;
        variables.push((environment::SPIN_US, micros.to_string().into()));
    }
    Ok(variables)
}

/// The program may go elsewhere, so that a path from here would mean nothing to it.
fn absolute(path: &Path) -> Result<std::path::PathBuf, CommandFailure> {
    std::path::absolute(path).context(format_args!("cannot tell where {} is", path.display()))
}

/// Our library first, then what was to be preloaded already; ours once, also when a run is inside a run.
pub(crate) fn prepend(library: &OsStr, before: Option<&OsStr>) -> Result<OsString, CommandFailure> {
    let separates = |byte: &u8| matches!(byte, b' ' | b':');
    if library.as_bytes().iter().any(separates) {
        let message =
            format!("the loader cannot be told of {}: spaces and colons separate libraries", library.display());
        return Err(CommandFailure::general(message).hint("install Partywall in a directory without them"));
    }
    let mut all = library.to_owned();
    let before = before.unwrap_or_default().as_bytes().split(|byte| separates(byte));
    for other in before.filter(|other| !other.is_empty() && *other != library.as_bytes()) {
        all.push(":");
        all.push(OsStr::from_bytes(other));
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn library_is_prepended_to_ld_preload_once() {
        let library = OsStr::new("/opt/lib.so");
        let with = |before: Option<&str>| prepend(library, before.map(OsStr::new)).unwrap().into_string().unwrap();
        assert_eq!(with(None), "/opt/lib.so");
        assert_eq!(with(Some("")), "/opt/lib.so");
        assert_eq!(with(Some("a.so b.so:c.so")), "/opt/lib.so:a.so:b.so:c.so");
        assert_eq!(with(Some("a.so:/opt/lib.so")), "/opt/lib.so:a.so");
        assert!(prepend(OsStr::new("/my lib.so"), None).unwrap_err().to_string().contains("spaces"));
    }
}
