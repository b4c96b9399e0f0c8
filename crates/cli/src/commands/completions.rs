//! `partywall completions`: scripts that let a shell complete our commands.

use clap_complete::Shell;
use clap_complete::env::Shells;

use crate::exit::{CommandFailure, Context};
use crate::{complete, output};

const AFTER: &str = "\
For each completion the script runs this program, which asks the broker for its services, domains, channels and machines. \
PARTYWALL_BROKER names the broker's socket if it is not the default one.

Examples:
  partywall completions bash > /etc/bash_completion.d/partywall
  partywall completions zsh  > \"${fpath[1]}/_partywall\"
  partywall completions fish > ~/.config/fish/completions/partywall.fish";

/// Print a completion script for a shell
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER)]
pub(crate) struct Args {
    /// The shell
    shell: Shell,
}

pub(crate) fn run(args: &Args) -> Result<(), CommandFailure> {
    if args.shell == Shell::Bash {
        return output::write(complete::BASH.as_bytes());
    }
    let shells = Shells::builtins();
    let name = args.shell.to_string();
    let unknown = || CommandFailure::usage(format!("there is no script for {name}"));
    let shell = shells.completer(&name).ok_or_else(unknown)?;
    let mut script = Vec::new();
    let written = shell.write_registration(complete::VARIABLE, "partywall", "partywall", "partywall", &mut script);
    written.context("cannot make the script")?;
    output::write(&script)
}
