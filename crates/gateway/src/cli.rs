//! The command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use clap_complete::Shell;

use crate::manual::GatewayManualPage;

/// Shares the names of this host's domains and services with other hosts, and carries streams between them.
///
/// Programs connect as always: `Stream::connect("db:queries")` finds the domain wherever it is. The broker's policy has a table `[cluster]`, which
/// names this host and its gateway, and rules with `from_host` and `to_host`. docs/cluster.md sets up two hosts from nothing.
#[derive(Debug, Parser)]
#[command(
    name = "partywall-gateway",
    version,
    args_conflicts_with_subcommands = true,
    after_help = "Examples:
  partywall-gateway certificates /etc/partywall/cluster alpha beta
  partywall-gateway --config /etc/partywall/gateway.toml
  RUST_LOG=debug partywall-gateway --config gateway.toml

Exit codes:
  0  success, or stopped by a signal
  1  a failure, such as an invalid configuration, or the end of the broker
  2  wrong command line"
)]
pub(crate) struct GatewayArguments {
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
    #[command(flatten)]
    pub(crate) run: RunArgs,
}

#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// The configuration file.
    #[arg(long, value_name = "FILE", default_value = "/etc/partywall/gateway.toml", value_hint = clap::ValueHint::FilePath)]
    pub(crate) config: PathBuf,
    /// Only check the configuration file.
    #[arg(long)]
    pub(crate) check: bool,
    /// Print a sample configuration file, with every key explained, and exit.
    #[arg(long)]
    pub(crate) print_sample_config: bool,
    /// Print a page of the manual, and exit: gateway is partywall-gateway(8), certificates is partywall-gateway-certificates(8), config is
    /// partywall-gateway.toml(5).
    #[arg(long, value_name = "PAGE", value_enum, num_args = 0..=1, require_equals = true, default_missing_value = "gateway")]
    pub(crate) print_manual: Option<GatewayManualPage>,
    /// Print a completion script for a shell, and exit.
    #[arg(long, value_name = "SHELL")]
    pub(crate) print_completions: Option<Shell>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Make certificates for hosts, and an authority for them if there is none.
    ///
    /// Writes HOST.pem and HOST.key for each host, and ca.pem and ca.key. Copy ca.pem and the two files of a host to that host. Keep ca.key where
    /// no host can read it: its holder can be any host. The files of a host that has both are kept.
    Certificates {
        /// The folder for the files.
        #[arg(value_hint = clap::ValueHint::DirPath)]
        folder: PathBuf,
        /// The names of the hosts in the cluster.
        #[arg(required = true, value_name = "HOST")]
        hosts: Vec<String>,
        /// Days for which the certificates of hosts are valid, 1 to 65535.
        #[arg(long, default_value_t = 365, value_parser = partywall_terminal::whole::<u16>(1..=u16::MAX))]
        days: u16,
    },
}
