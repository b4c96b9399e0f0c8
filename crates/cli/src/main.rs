//! `partywall`, the command line: reads arguments, runs one command, turns its end into an exit code.

mod admission;
mod args;
mod broker_process;
mod commands;
mod complete;
mod connections;
mod exit;
mod human;
mod networks;
mod output;
mod program;
mod progress;
mod reopen;
mod session;
mod siblings;
mod version;
mod words;

use std::io::Write;
use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    complete::answer();
    // Wrong usage exits with 2, help and version with 0, both from inside clap.
    let cli = args::Cli::parse();
    start_log(cli.global.verbose);
    match commands::run(&cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) if failure.code == exit::Code::ReaderLeft => failure.code.into(),
        Err(failure) => {
            // Not eprintln: a closed standard error must not turn the exit code into a panic's.
            let text = format!("partywall: {failure}");
            let _ = writeln!(std::io::stderr(), "{}", partywall_terminal::printable_lines(&text));
            failure.code.into()
        }
    }
}

/// Logs go to standard error: warnings always, more with each `-v`, or exactly what `RUST_LOG` asks for.
fn start_log(verbose: u8) {
    let default = match verbose {
        0 => "warn",
        1 => "info",
        2 => "debug",
        _ => "trace",
    };
    partywall_terminal::log_to_stderr(default);
}
