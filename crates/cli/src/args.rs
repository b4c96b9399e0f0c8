//! The command line as a whole, and the arguments that several commands share.

use std::path::PathBuf;
use std::time::Duration;

use clap::builder::{OsStringValueParser, TypedValueParser as _};
use clap::{Args, Parser, Subcommand};
use partywall::{Options, RingSize};
use partywall_protocol::environment;
use partywall_protocol::wire::Name;

use crate::commands::{
    agent, bench, blk, cat, completions, container, demo, doctor, enable, events, fs, group, ivshmem_server, list, man,
    moves, net, numbers, ping, policy, run, stat, sysdump, tcp_cat, tcp_ping, top, tree_call, vm, why,
};
use crate::human;

const LONG_ABOUT: &str = "\
Partywall is memory-speed communication between processes, containers and virtual machines of one host.

A domain joins the broker under a name, binds services, and connects to `DOMAIN:SERVICE` of other domains. The broker \
(`partywalld`) hands out memory and doorbells. It is not on the data path: bytes go through shared memory.";

const AFTER: &str = "\
Examples:
  partywalld &                                        start a broker
  partywall --domain a cat -l greet                   in one terminal: wait for a visitor
  echo hello | partywall cat a:greet                  in another: say hello
  partywall doctor                                    test this machine, and name remedies
  partywall demo                                      a demonstration, compared with TCP

Environment:
  PARTYWALL_BROKER    the broker's socket, as --broker
  PARTYWALL_DOMAIN    the name to join under, as --domain
  RUST_LOG            a log filter that replaces -v (as in RUST_LOG=partywall=debug)

Files:
  /run/partywall/broker.sock              the broker's socket, when it exists
  $XDG_RUNTIME_DIR/partywall/broker.sock  the socket of a user's own broker, otherwise";

/// Memory-speed streams between domains that share a host.
#[derive(Debug, Parser)]
#[command(name = "partywall", version, long_version = crate::version::long(), long_about = LONG_ABOUT, after_help = exit_table(""), after_long_help = exit_table(AFTER))]
#[command(propagate_version = true, arg_required_else_help = true)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// The end of a help page: `before`, then the table of exit codes.
pub(crate) fn exit_table(before: &str) -> String {
    match before {
        "" => crate::exit::TABLE.into(),
        text => format!("{text}\n\n{}", crate::exit::TABLE),
    }
}

/// The options of every command that talks to a broker.
#[derive(Debug, Args)]
pub(crate) struct Global {
    /// Socket of the broker [default: /run/partywall/broker.sock if it exists, else $XDG_RUNTIME_DIR/partywall/broker.sock]
    #[arg(long, global = true, value_name = "PATH", env = environment::BROKER, hide_env_values = true, value_parser = OsStringValueParser::new().map(PathBuf::from))]
    pub(crate) broker: Option<PathBuf>,

    /// Name to join under: 1 to 64 of A-Z a-z 0-9 . _ -, first a letter or digit [default: USER-PID; for `run` and `enable`, PROGRAM-PID of each process]
    #[arg(long, global = true, value_name = "NAME", env = environment::DOMAIN, hide_env_values = true, value_parser = parse_domain)]
    pub(crate) domain: Option<String>,

    /// Log more to standard error: -v events, -vv details, -vvv everything
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub(crate) verbose: u8,
}

impl Global {
    /// Passes the broker and the domain on to a program that `command` executes, by its environment. They stand before the name of the
    /// subcommand, so they are not among the arguments of that program.
    pub(crate) fn pass_on(&self, command: &mut std::process::Command) {
        command.envs(self.broker.iter().map(|broker| (environment::BROKER, broker.as_os_str())));
        command.envs(self.domain.iter().map(|domain| (environment::DOMAIN, domain)));
    }
}

/// One per file in `commands/`.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Run(run::Args),
    Cat(cat::Args),
    Ping(ping::Args),
    List(list::Args),
    Stat(stat::Args),
    Top(top::Args),
    Why(why::Args),
    Events(events::Args),
    Moves(moves::Args),
    Policy(policy::Args),
    Vm(vm::Args),
    Enable(enable::EnableArgs),
    Disable(enable::DisableArgs),
    Container(container::Args),
    Numbers(numbers::Args),
    Group(group::Args),
    Agent(agent::Args),
    Net(net::Args),
    Blk(blk::Args),
    Fs(fs::Args),
    IvshmemServer(ivshmem_server::Args),
    Doctor(doctor::Args),
    Sysdump(sysdump::Args),
    Demo(demo::Args),
    Bench(bench::Args),
    Completions(completions::Args),
    Man(man::Args),
    #[command(hide = true)]
    TcpCat(tcp_cat::Args),
    #[command(hide = true)]
    TcpPing(tcp_ping::Args),
    #[command(hide = true)]
    TreeCall(tree_call::Args),
}

/// How a connection's own half of the channel is made.
#[derive(Debug, Clone, Args)]
pub(crate) struct ChannelArgs {
    /// Size of this side's ring: a power of two from 4K to 1G, or auto to adapt to the traffic
    #[arg(long, value_name = "SIZE|auto", default_value = "auto", value_parser = parse_ring)]
    pub(crate) ring: RingOption,

    /// Longest time to spin before sleeping when there is nothing to do, with a unit, as in 50us or 2ms, at most 1h; 0 sleeps at once [default: the library's, adaptive]
    #[arg(long, value_name = "DURATION", value_parser = human::parse_spin)]
    pub(crate) spin: Option<Duration>,
}

impl ChannelArgs {
    /// As the library wants it.
    pub(crate) fn options(&self) -> Options {
        let mut options = Options::default();
        if let RingOption::Fixed(size) = self.ring {
            options = options.ring(RingSize::Fixed(size));
        }
        if let Some(spin) = self.spin {
            options = options.spin(spin);
        }
        options
    }
}

/// A ring size as asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RingOption {
    /// The library's own choice, adapted to use.
    Auto,
    /// Exactly this many bytes.
    Fixed(u64),
}

pub(crate) fn parse_ring(text: &str) -> Result<RingOption, String> {
    if text == "auto" {
        return Ok(RingOption::Auto);
    }
    let size = partywall_terminal::size(text)?;
    // protocol M3
    if size.is_power_of_two() && (4096..=1 << 30).contains(&size) {
        Ok(RingOption::Fixed(size))
    } else {
        Err("a ring is a power of two from 4K (4096) to 1G, or auto".into())
    }
}

/// A domain's or service's name (protocol C5).
pub(crate) fn parse_name(text: &str) -> Result<String, String> {
    Name::new(text).map(|_| text.to_owned()).map_err(|e| e.to_string())
}

/// Reads a name. An empty text means the default, so that an empty environment variable does too.
fn parse_domain(text: &str) -> Result<String, String> {
    if text.is_empty() { Ok(String::new()) } else { parse_name(text) }
}

/// Where to connect to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Target {
    /// The domain that offers the service.
    pub(crate) domain: String,
    /// The service's name in its domain.
    pub(crate) service: String,
}

impl std::fmt::Display for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.domain, self.service)
    }
}

/// Reads `DOMAIN:SERVICE`; with a `default` service, also `DOMAIN`.
pub(crate) fn parse_target(text: &str, default: Option<&str>) -> Result<Target, String> {
    let (domain, service) = match (text.split_once(':'), default) {
        (Some(both), _) => both,
        (None, Some(service)) => (text, service),
        (None, None) => return Err(format!("`{text}` has no service: write DOMAIN:SERVICE")),
    };
    Ok(Target { domain: parse_name(domain)?, service: parse_name(service)? })
}

/// When to show progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum When {
    /// On a terminal, unless input or received bytes are shown there
    Auto,
    /// Also into a file or pipe
    Always,
    /// Never
    Never,
}

/// Restricts this process to one processor, if one was asked for.
pub(crate) fn pin(cpu: Option<usize>) -> Result<(), crate::exit::CommandFailure> {
    use crate::exit::{CommandFailure, Context};
    let Some(cpu) = cpu else { return Ok(()) };
    if cpu >= rustix::thread::CpuSet::MAX_CPU {
        return Err(CommandFailure::usage(format!("--cpu {cpu}: there is no such processor")));
    }
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    rustix::thread::sched_setaffinity(None, &set).context(format_args!("cannot run on processor {cpu}"))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn argument_definitions_are_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn rings_are_powers_of_two_in_range() {
        assert_eq!(parse_ring("auto"), Ok(RingOption::Auto));
        assert_eq!(parse_ring("1M"), Ok(RingOption::Fixed(1 << 20)));
        for bad in ["3000", "2K", "2G", "", "x"] {
            assert!(parse_ring(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn targets_name_a_domain_and_a_service() {
        let target = parse_target("web:echo", None).unwrap();
        assert_eq!(target.to_string(), "web:echo");
        assert_eq!(parse_target("web", Some("ping")).unwrap().service, "ping");
        assert!(parse_target("web", None).unwrap_err().contains("DOMAIN:SERVICE"));
        for bad in [":echo", "web:", "a:b:c", "a b:c", ""] {
            assert!(parse_target(bad, None).is_err(), "{bad}");
        }
    }
}
