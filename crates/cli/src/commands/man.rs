//! `partywall man`: manual pages, made from the same definitions as `--help`.

use std::path::{Path, PathBuf};

use clap::CommandFactory;

use crate::args::Cli;
use crate::exit::{CommandFailure, Context};
use crate::output;

const AFTER: &str = "\
Examples:
  partywall man | man -l -                            read the main page
  partywall man /usr/local/share/man/man1             install all pages";

/// Print the manual page, or write all pages into a directory
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER)]
pub(crate) struct Args {
    /// Folder for partywall.1 and a page for each command; without it, the main page goes to standard output
    #[arg(value_name = "DIR")]
    directory: Option<PathBuf>,
}

pub(crate) fn run(args: &Args) -> Result<(), CommandFailure> {
    match &args.directory {
        None => {
            let mut page = Vec::new();
            clap_mangen::Man::new(Cli::command()).render(&mut page).context("cannot make the manual page")?;
            output::write(&page)
        }
        Some(directory) => write_all(directory),
    }
}

fn write_all(directory: &Path) -> Result<(), CommandFailure> {
    std::fs::create_dir_all(directory).context(format_args!("cannot make {}", directory.display()))?;
    clap_mangen::generate_to(Cli::command(), directory)
        .context(format_args!("cannot write into {}", directory.display()))
}
