//! `partywall ping`: round-trip times to a peer, and their distribution.

pub(crate) mod distribution;
pub(crate) mod exchange;
mod plot;

use std::path::PathBuf;
use std::time::Duration;

use partywall::Stream;

use crate::args::{ChannelArgs, Global, exit_table, parse_name, parse_target, pin};
use crate::exit::{CommandFailure, Context};
use crate::{human, output, session};
use exchange::PingPlan;

/// The service that a responder offers by default.
const SERVICE: &str = "ping";

const AFTER: &str = "\
Both sides are `partywall ping`: one answers (-l), the other measures. Each side has its own --spin, so `--spin 0` on both \
sides measures sleeping and waking.

Examples:
  partywall --domain a ping -l                        answer
  partywall ping a                                    measure
  partywall ping a -c 1000 -i 1ms                     one per millisecond: the peer sleeps in between
  partywall ping a --one-way                          each direction separately (both clocks are this host's monotonic clock)
  partywall ping a --one-way --plot latency.svg       a picture of all percentiles, for a browser
  partywall ping a:ping -s 4K --json                  for scripts; all times in nanoseconds";

/// Measure the round trip to a peer
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER, after_long_help = exit_table(AFTER))]
pub(crate) struct Args {
    /// Domain to ping, with the SERVICE `ping` by default. With -l: the SERVICE to offer
    #[arg(value_name = "DOMAIN[:SERVICE]", required_unless_present = "listen", add = clap_complete::ArgValueCompleter::new(crate::complete::services))]
    endpoint: Option<String>,

    /// Answer pings until killed, any number of them at once
    #[arg(short, long, conflicts_with_all = ["json", "one_way", "plot", "wait"])]
    listen: bool,

    #[command(flatten)]
    pub(crate) measure: MeasureArgs,

    /// Retry for at most this time until broker, domain and service exist; seconds, or with a unit as in 500ms
    #[arg(short, long, value_name = "SECONDS", value_parser = human::parse_duration)]
    wait: Option<Duration>,

    #[command(flatten)]
    channel: ChannelArgs,

    /// Run on this processor only
    #[arg(long, value_name = "N", value_parser = partywall_terminal::whole::<usize>(..))]
    cpu: Option<usize>,
}

/// The options of the measurement, which are the same for TCP.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct MeasureArgs {
    /// Messages to send, 1 to 1000000000
    #[arg(short, long, default_value_t = 10_000, value_name = "N", value_parser = partywall_terminal::whole::<u64>(1..=1_000_000_000))]
    count: u64,

    /// Messages to send first without counting them
    #[arg(long, default_value_t = 100, value_name = "N", value_parser = partywall_terminal::whole::<u64>(..))]
    warm_up: u64,

    /// Bytes per message, 1 to 16M; --one-way needs at least 24
    #[arg(short, long, default_value = "64", value_name = "SIZE", value_parser = parse_message_size)]
    size: u32,

    /// Time between messages: seconds, or with a unit as in 1ms; 0 sends the next message when the answer has arrived
    #[arg(short, long, default_value = "0", value_name = "DURATION", value_parser = human::parse_duration)]
    interval: Duration,

    /// Longest wait for an answer; then exit with 6
    #[arg(long, default_value = "10", value_name = "SECONDS", value_parser = human::parse_duration)]
    timeout: Duration,

    /// Also measure each direction separately
    #[arg(long)]
    one_way: bool,

    /// Print JSON, times in nanoseconds
    #[arg(long)]
    json: bool,

    /// Also draw the latency at each percentile into this file, as SVG
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
}

fn parse_message_size(text: &str) -> Result<u32, String> {
    match partywall_terminal::size(text)? {
        size @ 1..=0x100_0000 => u32::try_from(size).map_err(|e| e.to_string()),
        _ => Err("a message has 1 byte to 16M".into()),
    }
}

impl MeasureArgs {
    pub(crate) fn plan(&self) -> Result<PingPlan, CommandFailure> {
        if self.one_way && self.size < exchange::STAMPS {
            return Err(CommandFailure::usage(format!(
                "--one-way carries times in the message: --size must be at least {}",
                exchange::STAMPS
            )));
        }
        Ok(PingPlan {
            size: self.size,
            count: self.count,
            warm_up: self.warm_up,
            interval: self.interval,
            stamped: self.one_way,
        })
    }

    /// How long to wait for one answer. Zero would mean "no wait at all", which no peer can satisfy.
    pub(crate) fn patience(&self) -> Result<Duration, CommandFailure> {
        if self.timeout.is_zero() {
            return Err(CommandFailure::usage("--timeout must be more than 0"));
        }
        Ok(self.timeout)
    }

    /// Prints what came out.
    pub(crate) fn print(&self, target: &str, results: &exchange::PingResults) -> Result<(), CommandFailure> {
        if let Some(path) = &self.plot {
            let picture = plot::draw(target, self.size, results);
            std::fs::write(path, picture).context(format_args!("cannot write {}", path.display()))?;
        }
        if self.json {
            output::print_json(&distribution::PingSummary::of(target, self.size, results))
        } else {
            output::print(distribution::describe(target, self.size, results))
        }
    }
}

pub(crate) fn run(global: &Global, args: &Args) -> Result<(), CommandFailure> {
    if args.listen {
        let service = args.endpoint.as_deref().unwrap_or(SERVICE);
        let service = parse_name(service).map_err(|e| {
            CommandFailure::usage(format!("`{service}` is no service name: {e}")).hint("with -l, name only the service")
        })?;
        pin(args.cpu)?;
        return answer(global, args, &service);
    }
    let plan = args.measure.plan()?;
    let patience = args.measure.patience()?;
    let endpoint = args.endpoint.as_deref().unwrap_or_default();
    let target = parse_target(endpoint, Some(SERVICE)).map_err(CommandFailure::usage)?;
    pin(args.cpu)?;
    let (_domain, mut stream) = session::connect(global, &target, &args.channel.options(), args.wait)?;
    stream.set_read_timeout(Some(patience));
    let results = exchange::measure(&mut stream, &plan).context(&target)?;
    args.measure.print(&target.to_string(), &results)
}

fn answer(global: &Global, args: &Args, service: &str) -> Result<(), CommandFailure> {
    let domain = session::join(global)?;
    let mut listener =
        domain.bind_with(service, &args.channel.options()).context(format_args!("cannot offer {service}"))?;
    session::announce(global, &domain, service);
    loop {
        let (stream, peer) = session::accept(&mut listener, service, true)?;
        let started = std::thread::Builder::new()
            .name(format!("ping {}", peer.name))
            .spawn(move || answer_one(stream, &peer.name));
        if let Err(error) = started {
            tracing::warn!("no thread for another peer: {error}");
        }
    }
}

fn answer_one(mut stream: Stream, peer: &str) {
    if let Err(failure) = exchange::respond(&mut stream) {
        tracing::warn!("{peer}: {failure}");
    }
}
