//! `partywall cat`: sends standard input to a peer, and writes the peer's bytes to standard output.

mod endpoints;
mod exchange;
mod receive;
mod room;
mod send;
mod stop;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::args::{ChannelArgs, Global, Target, When, exit_table, parse_name, parse_target, pin};
use crate::exit::{CommandFailure, Context};
use crate::{human, session};
use endpoints::Endpoints;
use exchange::{CatPlan, Ended};

const AFTER: &str = "\
Both directions run at once. At the end of its input, cat half-closes the connection and continues to receive until \
the peer closes too. Without -k, a listener serves one connection.

Ctrl-C ends cat at once and loses the rest of its input. The peer gets all bytes sent so far, and then exit code 4 \
instead of a clean end. Ctrl-D ends typed input cleanly.

Examples:
  partywall --domain a cat -l inbox > got             receive a file ...
  partywall cat a:inbox < file                        ... from any sender
  tar c dir | partywall cat --send-only a:inbox       a tree of files
  partywall cat --wait 10 a:inbox                     wait up to 10 s for the service to appear
  partywall cat --ring 16M --one-way a:inbox -i big   a large ring in one direction, none in the other
  mkfifo f; partywall cat -l echo < f | cat > f       a service: the program after | reads the peer's bytes and answers";

/// Carry bytes between domains, as netcat does between hosts
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER, after_long_help = exit_table(AFTER))]
pub(crate) struct Args {
    /// DOMAIN:SERVICE to connect to; with -l, the SERVICE to offer
    #[arg(value_name = "DOMAIN:SERVICE", add = clap_complete::ArgValueCompleter::new(crate::complete::services))]
    endpoint: String,

    /// Offer the service, and wait for a connection
    #[arg(short, long)]
    listen: bool,

    /// Accept again after a connection has ended, one connection at a time; input goes to the connected peer
    #[arg(short, long, requires = "listen")]
    keep: bool,

    /// Read from this file in place of standard input
    #[arg(short, long, value_name = "FILE", conflicts_with = "recv_only")]
    input: Option<PathBuf>,

    /// Write to this file in place of standard output; created or truncated once a peer connects
    #[arg(short, long, value_name = "FILE", conflicts_with = "send_only")]
    output: Option<PathBuf>,

    /// Only send: read nothing from the peer, and end with the input
    #[arg(long, conflicts_with = "recv_only")]
    send_only: bool,

    /// Only receive: close the sending direction at once
    #[arg(long)]
    recv_only: bool,

    /// Allocate memory for one direction only: the connecting side sends and the listening side receives
    #[arg(long)]
    one_way: bool,

    /// Do not half-close at the end of the input; the peer ends the connection
    #[arg(long, conflicts_with = "send_only")]
    no_shutdown: bool,

    /// Half-close at the end of the input; this is the default, and -N is accepted for compatibility with netcat
    #[arg(short = 'N', hide = true, conflicts_with = "no_shutdown")]
    shutdown: bool,

    /// Retry for at most this time until broker, domain and service exist; seconds, or with a unit as in 500ms
    #[arg(short, long, value_name = "SECONDS", value_parser = human::parse_duration, conflicts_with = "listen")]
    wait: Option<Duration>,

    /// End with exit code 6 after this time without a byte in either direction
    #[arg(long, value_name = "SECONDS", value_parser = parse_timeout)]
    idle_timeout: Option<Duration>,

    #[command(flatten)]
    channel: ChannelArgs,

    /// Show bytes and rate on standard error
    #[arg(long, value_enum, default_value = "auto", value_name = "WHEN")]
    progress: When,

    /// At the end of each connection, print bytes and seconds of both directions to standard error, as a line of JSON
    #[arg(long)]
    report: bool,

    /// Run on this processor only
    #[arg(long, value_name = "N", value_parser = partywall_terminal::whole::<usize>(..))]
    cpu: Option<usize>,
}

/// A timeout of nothing would end everything at once.
fn parse_timeout(text: &str) -> Result<Duration, String> {
    match human::parse_duration(text)? {
        Duration::ZERO => Err("must be more than 0".into()),
        timeout => Ok(timeout),
    }
}

/// The directions that a connection uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct CatDirections {
    send: bool,
    receive: bool,
}

impl Args {
    fn plan(&self, ways: CatDirections) -> CatPlan {
        CatPlan {
            ways,
            half_close: !self.no_shutdown,
            keep: self.keep,
            idle: self.idle_timeout,
            progress: self.progress,
            report: self.report,
        }
    }

    fn ways(&self) -> Result<CatDirections, CommandFailure> {
        let (wrong, ways) = match (self.one_way, self.listen) {
            (false, _) => (false, CatDirections { send: !self.recv_only, receive: !self.send_only }),
            (true, true) => (self.send_only || self.input.is_some(), CatDirections { send: false, receive: true }),
            (true, false) => (self.recv_only || self.output.is_some(), CatDirections { send: true, receive: false }),
        };
        if wrong {
            return Err(CommandFailure::usage(
                "with --one-way the connecting side sends and the listening side receives",
            ));
        }
        Ok(ways)
    }
}

pub(crate) fn run(global: &Global, args: &Args) -> Result<(), CommandFailure> {
    let ways = args.ways()?;
    if args.listen {
        let service = parse_name(&args.endpoint).map_err(|e| {
            CommandFailure::usage(format!("`{}` is no service name: {e}", args.endpoint))
                .hint("with -l, name only the service, not DOMAIN:SERVICE")
        })?;
        pin(args.cpu)?;
        listen(global, args, ways, &service)
    } else {
        let target = parse_target(&args.endpoint, None)
            .map_err(|e| CommandFailure::usage(e).hint("to offer a service, add -l"))?;
        pin(args.cpu)?;
        connect(global, args, ways, &target)
    }
}

fn connect(global: &Global, args: &Args, ways: CatDirections, target: &Target) -> Result<(), CommandFailure> {
    let endpoints = Arc::new(Endpoints::open(args.input.as_deref(), args.output.as_deref(), ways)?);
    let options = args.channel.options().one_way(args.one_way);
    let (_domain, stream) = session::connect(global, target, &options, args.wait)?;
    tracing::info!("connected to {target}");
    exchange::run(stream, &endpoints, args.plan(ways)).map_err(|ended| ended.report(target))
}

fn listen(global: &Global, args: &Args, ways: CatDirections, service: &str) -> Result<(), CommandFailure> {
    let endpoints = Arc::new(Endpoints::open(args.input.as_deref(), args.output.as_deref(), ways)?);
    let domain = session::join(global)?;
    let options = args.channel.options().one_way(args.one_way);
    let mut listener = domain.bind_with(service, &options).context(format_args!("cannot offer {service}"))?;
    session::announce(global, &domain, service);
    loop {
        let (stream, peer) = session::accept(&mut listener, service, args.keep)?;
        match exchange::run(stream, &endpoints, args.plan(ways)) {
            // A failure of one visitor does not end the service; a failure on this side does.
            Err(Ended::Peer(failure)) if args.keep => tracing::warn!("{}: {failure}", peer.name),
            Ok(()) if args.keep => {}
            result => return result.map_err(|ended| ended.report(&peer.name)),
        }
    }
}
