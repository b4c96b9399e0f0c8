//! Virtual machines to play with: `partywall-lab up` boots two and attaches them to a broker, `partywall-lab shell a` is in one.

mod demo;
mod left;
mod migrate;
mod nas;
mod net;
mod playground;
mod shell;
mod stop;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// Boot virtual machines that share memory, to try Partywall in.
#[derive(Debug, Parser)]
#[command(name = "partywall-lab", version)]
struct LabArguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Boot the machines, attach them to a broker, and start an agent in each. Interrupting it ends them.
    Up {
        /// Their names.
        #[arg(default_values = ["a", "b"])]
        names: Vec<String>,
        /// MiB for rings in each window.
        #[arg(long, default_value_t = 64, value_parser = partywall_terminal::whole::<u64>(1..))]
        window: u64,
    },
    /// Carry a file and a tree between two machines, over Partywall and over TCP, and kill one of the two.
    Demo(demo::Args),
    /// Carry TCP between two machines without Partywall inside, over the switch of `partywall net` and over tap and bridge.
    Net(net::Args),
    /// Migrate a machine to another host and back while it sends to its neighbour, and show the time line.
    Migrate(migrate::Args),
    /// Build a storage appliance of four machines, to look at (`nas up`) or to measure beside two other forms of it.
    Nas(nas::Args),
    /// Open a shell in a machine; Ctrl-] leaves it.
    Shell {
        /// The name of the machine.
        name: String,
    },
}

fn main() -> ExitCode {
    let done = match LabArguments::parse().command {
        Command::Up { names, window } => playground::up(&names, window).map(|()| ExitCode::SUCCESS),
        Command::Demo(arguments) => demo::run(&arguments),
        Command::Net(arguments) => net::run(&arguments),
        Command::Migrate(arguments) => migrate::run(&arguments),
        Command::Nas(arguments) => nas::run(&arguments),
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
