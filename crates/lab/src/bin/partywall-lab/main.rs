//! Virtual machines to play with: `partywall-lab up` boots two and attaches them to a broker, `partywall-lab shell a` is in one.

mod demo;
mod playground;
mod shell;
mod stop;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// Boots virtual machines that share memory, to play with.
#[derive(Debug, Parser)]
#[command(name = "partywall-lab", version)]
struct LabArguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Boots the machines, attaches them to a broker, and starts an agent in each; ends them when it is interrupted.
    Up {
        /// Their names.
        #[arg(default_values = ["a", "b"])]
        names: Vec<String>,
        /// MiB for rings in each window.
        #[arg(long, default_value_t = 64, value_parser = partywall_terminal::whole::<u64>(1..))]
        window: u64,
    },
    /// A file between two machines, over Partywall and over TCP; and one of the two is killed.
    Demo(demo::Args),
    /// A shell in one of them; Ctrl-] leaves it.
    Shell {
        /// The name of the machine.
        name: String,
    },
}

fn main() -> ExitCode {
    let done = match LabArguments::parse().command {
        Command::Up { names, window } => playground::up(&names, window).map(|()| ExitCode::SUCCESS),
        Command::Demo(arguments) => demo::run(&arguments),
        Command::Shell { name } => shell::run(&name).map(|()| ExitCode::SUCCESS),
    };
    match done {
        Ok(code) => code,
        Err(_) if partywall_lab::interrupted() => {
            eprintln!("partywall-lab: interrupted");
            ExitCode::FAILURE
        }
        Err(e) => {
            eprintln!("partywall-lab: {e}");
            ExitCode::FAILURE
        }
    }
}
