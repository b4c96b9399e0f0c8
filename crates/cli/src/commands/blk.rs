//! `partywall blk`: executes `partywall-blk`, a separate program.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::Command;

use crate::args::Global;
use crate::exit::{CommandFailure, Context};

/// Disks for virtual machines without Partywall inside
///
/// Executes the program `partywall-blk` from this program's folder, else from PATH, with all arguments unchanged.
/// `partywall blk --help` shows its own help.
#[derive(Debug, clap::Args)]
#[command(disable_help_flag = true, disable_version_flag = true)]
pub(crate) struct Args {
    /// Arguments for partywall-blk
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENTS")]
    arguments: Vec<OsString>,
}

pub(crate) fn run(global: &Global, args: &Args) -> Result<(), CommandFailure> {
    let program = crate::siblings::find("partywall-blk", "partywall-vhost")?;
    let mut command = Command::new(&program);
    global.pass_on(&mut command);
    // Only comes back when it failed.
    Err(command.args(&args.arguments).exec()).context(format_args!("cannot run {}", program.display()))
}
