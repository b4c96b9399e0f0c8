//! `partywall doctor`: tests this machine, and reports missing requirements with remedies.

mod broker;
mod check;
mod guest;
mod host;
mod isolation;
mod limits;
mod machine;
mod memory;
mod networks;
mod probe;
mod program;
mod tracking;
mod wakeups;
mod worker;

use std::ffi::OsString;

use crate::args::Global;
use crate::exit::{CommandFailure, Context};
use crate::program::Program;
use crate::{output, session};
use check::{Check, DoctorReport};

const AFTER: &str = "\
Every result comes from a test: for example, doctor makes and seals a memfd, and writing to it must fail. It changes nothing. \
On a host it also reports the problems of each attached virtual machine. In such a machine it reports the missing requirements. \
With a command, it examines that program without running it, and reports whether `partywall run` can accelerate it, or the \
reason why not. A broker that does not answer, or does not let the program join, is then a failure.

  ok     works
  warn   works, but slower, smaller or without a feature; the next line names it and the remedy
  fail   Partywall cannot work until this is changed

Examples:
  partywall doctor
  partywall doctor                                    in a virtual machine: its port, modules, agent and windows
  partywall doctor -- redis-server                    whether `partywall run redis-server` would help
  partywall doctor --channels 100000                  check the limits for this many channels
  partywall doctor --json | jq '.checks[] | select(.status != \"ok\")'

Exit codes:
  0   nothing required is missing (warnings are allowed)
  1   something is missing, or the program cannot be accelerated
  2   wrong usage: unknown flag, value out of range
  127 there is no such program";

/// Test this machine, and report missing requirements with remedies
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER)]
pub(crate) struct Args {
    /// Check the limits for this many channels in one process, 1 to 10000000
    #[arg(long, default_value_t = 10_000, value_name = "N", value_parser = partywall_terminal::whole::<u64>(1..=10_000_000))]
    channels: u64,

    /// Print JSON
    #[arg(long)]
    json: bool,

    /// Examine this program instead of the machine; its arguments are ignored
    #[arg(trailing_var_arg = true, value_name = "COMMAND", value_hint = clap::ValueHint::CommandWithArguments)]
    command: Vec<OsString>,
}

pub(crate) fn run(global: &Global, args: &Args) -> Result<(), CommandFailure> {
    match args.command.first() {
        None => {
            let failed = tell(args, machine_checks(global, args.channels))?;
            let missing = |n| CommandFailure::general(format!("{n} thing(s) that Partywall needs are missing"));
            if failed == 0 { Ok(()) } else { Err(missing(failed)) }
        }
        Some(command) => {
            let program = Program::find(command)?;
            let joined = session::try_join(global, &program.domain(global)).ok();
            let checks = program::checks(&program).into_iter();
            let checks = checks.chain([worker::check(global, &program), broker::admits(global, &program)]);
            let checks = checks.chain(guest::program_checks()).chain(broker::when_connections_move(joined));
            let failed = tell(args, checks.collect())?;
            let name = command.display();
            if failed == 0 {
                Ok(())
            } else {
                Err(CommandFailure::general(format!(
                    "{name} cannot be accelerated, see above; `partywall run` still runs it"
                )))
            }
        }
    }
}

fn machine_checks(global: &Global, channels: u64) -> Vec<Check> {
    machine::checks()
        .into_iter()
        .chain(memory::checks())
        .chain(wakeups::checks())
        .chain(limits::checks(channels))
        .chain(isolation::checks())
        .chain(broker::checks(global))
        .chain(broker::when_connections_move(session::join(global).ok()))
        .chain(tracking::check(global))
        .chain(networks::check(global))
        .chain(virtual_machines(global))
        .collect()
}

/// The checks inside a machine differ from those on its host.
fn virtual_machines(global: &Global) -> Vec<Check> {
    let inside = guest::checks();
    if inside.is_empty() { host::checks(global) } else { inside }
}

/// Prints the findings; returns how many are failures.
fn tell(args: &Args, checks: Vec<Check>) -> Result<usize, CommandFailure> {
    let report = DoctorReport::of(checks);
    if args.json {
        output::print_json(&report)?;
    } else {
        output::print(report.to_text())?;
    }
    Ok(report.failed())
}

/// First line of a small file of the kernel's, without blanks around it.
fn read_line(path: &str) -> Result<String, CommandFailure> {
    let text = std::fs::read_to_string(path).context(format_args!("cannot read {path}"))?;
    Ok(text.lines().next().unwrap_or_default().trim().to_owned())
}

/// A file of the kernel's that holds one number.
fn read_number(path: &str) -> Result<u64, CommandFailure> {
    let line = read_line(path)?;
    line.parse().map_err(|_| CommandFailure::general(format!("{path} holds `{line}`, not a number")))
}
