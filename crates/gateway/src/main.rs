//! `partywall-gateway`: shares this host's names with a cluster of hosts, and carries streams between them.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};
use partywall_gateway::config::GatewayConfig;
use partywall_gateway::{GatewayError, certificates};
use partywall_terminal::{end, log_to_stderr};

/// Shares the names of this host's domains and services with other hosts, and carries streams between them.
///
/// Programs connect as always: `Stream::connect("db:queries")` finds the domain wherever it is. The broker's policy has a table `[cluster]`, which
/// names this host and its gateway, and rules with `from_host` and `to_host`. docs/cluster.md sets up two hosts from nothing.
#[derive(Debug, Parser)]
#[command(
    version,
    args_conflicts_with_subcommands = true,
    after_help = "Examples:
  partywall-gateway certificates /etc/partywall/cluster alpha beta
  partywall-gateway --config /etc/partywall/gateway.toml
  RUST_LOG=debug partywall-gateway --config gateway.toml"
)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    run: RunArgs,
}

#[derive(Debug, Args)]
struct RunArgs {
    /// The configuration file.
    #[arg(long, value_name = "FILE", default_value = "/etc/partywall/gateway.toml")]
    config: PathBuf,
    /// Only check the configuration file.
    #[arg(long)]
    check: bool,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Make certificates for hosts, and an authority for them if there is none.
    ///
    /// Writes HOST.pem and HOST.key for each host, and ca.pem and ca.key. Copy ca.pem and the two files of a host to that host. Keep ca.key where
    /// no host can read it: its holder can be any host.
    Certificates {
        /// The folder for the files.
        folder: PathBuf,
        /// The names of the hosts in the cluster.
        #[arg(required = true, value_name = "HOST")]
        hosts: Vec<String>,
        /// How long the certificates of hosts are valid.
        #[arg(long, default_value_t = 365, value_parser = clap::value_parser!(u16).range(1..))]
        days: u16,
    },
}

fn main() -> ExitCode {
    log_to_stderr("info");
    end("partywall-gateway", run(Cli::parse()))
}

fn run(cli: Cli) -> Result<(), GatewayError> {
    match cli.command {
        Some(Command::Certificates { folder, hosts, days }) => {
            certificates::make(&folder, &hosts, days)?;
            let folder = folder.display();
            println!("certificates of {} are in {folder}; keep {folder}/ca.key apart", hosts.join(", "));
            Ok(())
        }
        None => {
            let config = GatewayConfig::read(&cli.run.config)?;
            if cli.run.check { Ok(()) } else { partywall_gateway::run(&config) }
        }
    }
}
