//! `partywall policy`: questions about the broker's policy, which decides about joins and connections.

mod test;

use crate::args::Global;
use crate::exit::CommandFailure;

const AFTER: &str = "\
The policy is the broker's file, partywalld.toml(5). `partywall moves` shows and sets when connections of programs under `run` move.

Examples:
  partywall policy test --from web --to db:in         whether the policy lets web connect, and by which line";

/// Ask the broker for decisions of its policy
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER)]
pub(crate) struct Args {
    #[command(subcommand)]
    action: PolicyCommand,
}

#[derive(Debug, clap::Subcommand)]
enum PolicyCommand {
    Test(test::Args),
}

pub(crate) fn run(global: &Global, args: &Args) -> Result<(), CommandFailure> {
    match &args.action {
        PolicyCommand::Test(args) => test::run(global, args),
    }
}
