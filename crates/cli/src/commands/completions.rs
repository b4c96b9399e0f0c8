//! `partywall completions`: scripts that let a shell complete our commands.

use clap::CommandFactory;
use clap_complete::Shell;

use crate::args::Cli;
use crate::exit::CommandFailure;
use crate::output;

const AFTER: &str = "\
Examples:
  partywall completions bash > /etc/bash_completion.d/partywall
  partywall completions zsh  > \"${fpath[1]}/_partywall\"
  partywall completions fish > ~/.config/fish/completions/partywall.fish";

/// Print a completion script for a shell
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER)]
pub(crate) struct Args {
    /// Which shell
    shell: Shell,
}

pub(crate) fn run(args: &Args) -> Result<(), CommandFailure> {
    // Into memory first: the generator panics when its writer fails, and standard output may be closed.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "partywall", &mut script);
    output::write(&script)
}
