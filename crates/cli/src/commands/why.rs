//! `partywall why`: where the bytes of one connection go, why, and what would have to change.

mod target;
mod view;

use crate::args::{Global, exit_table};
use crate::connections::{Gatherer, Scope};
use crate::exit::{Code, CommandFailure};
use crate::{networks, output};
use target::WantedConnection;
use view::WhyAnswer;

const AFTER: &str = "\
Shows each end that this user may see: the transports of its sent and received bytes, the reason if one is not the ring, and \
the remedy. The last 8 moves of each direction between TCP and the ring follow, with their times and reasons. The codes of reasons are those of `partywall top`; docs/reasons.md lists them. The command also finds connections of programs that were not started \
under `partywall run`.

Examples:
  partywall why 127.0.0.1:6379                        connections from and to this address
  partywall why 127.0.0.1:6379 127.0.0.1:40112        both ends of one connection
  partywall why redis-server                          the connections of a program
  partywall why a.redis-server                        those of a program in virtual machine a
  partywall why 4242                                  the connections of a process
  partywall why 4242:7                                descriptor 7 of that process
  partywall why --json :6379 | jq -r '.connections[].reason'";

/// Show why a connection is on the ring or on TCP, and the remedy
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER, after_long_help = exit_table(AFTER))]
pub(crate) struct Args {
    /// Program, domain, virtual machine, process number, PID:FD, or address of one end as IP:PORT or :PORT
    #[arg(value_name = "CONNECTION", value_parser = target::parse)]
    connection: WantedConnection,

    /// Address of the other end; CONNECTION must be an address then
    #[arg(value_name = "ADDRESS", value_parser = target::parse_address)]
    other: Option<target::Address>,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(global: &Global, args: &Args) -> Result<(), CommandFailure> {
    if args.other.is_some() && !matches!(args.connection, WantedConnection::Address(_)) {
        return Err(CommandFailure::usage(
            "the first argument must be an address too if there is a second: write IP:PORT IP:PORT",
        ));
    }
    let mut look = Gatherer::new(global).look(Scope::All);
    look.connections.retain(|row| args.connection.is_of(row, args.other.as_ref()));
    look.notes.extend(networks::broker_and_list(global).and_then(|(broker, listed)| networks::note(broker, &listed)));
    if look.connections.is_empty() {
        return Err(nothing(&args.connection, &look.notes));
    }
    let answer = WhyAnswer::of(&look);
    if args.json { output::print_json(&answer) } else { output::print(answer.to_text()) }
}

fn nothing(target: &WantedConnection, notes: &[String]) -> CommandFailure {
    let failure = CommandFailure::new(Code::Refused, format!("no TCP connection or channel found for {target}"));
    let list =
        "`partywall top` lists those of programs with the library, and `partywall list` the process of each domain";
    match notes {
        [] => failure.hint(list),
        notes => failure.hint(format!("{list}\n  {}", notes.join("\n  "))),
    }
}
