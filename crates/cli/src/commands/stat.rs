//! `partywall stat`: the counters of live channels, read from their own memory.

pub(super) mod devices;
mod total;
mod view;

use std::collections::HashMap;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use partywall::{ChannelRow, Domain, Error, Refusal, StatPage};

use crate::args::{Global, exit_table};
use crate::connections::{Gatherer, Scope};
use crate::exit::{Code, CommandFailure, Context};
use crate::{human, output, session};
use devices::CountedDeviceArgs;
use total::Adder;
use view::{ChannelView, Stats};

const AFTER: &str = "\
The counters lie in each channel's memory, which is mapped read-only, so reading them does not slow the channel down. Each side has \
two halves, one that writes and one that reads:

  BYTES     bytes committed or released
  CALLS     commits or releases; on a channel of messages, messages
  BELLS     doorbells rung because the other half slept
  SAVED     doorbells not rung because the other half was awake
  SLEEPS    times this half slept
  SPINS     waits that ended before this half slept
  STALLS    times the ring was full (writing) or empty (reading)
  QUEUED    bytes written and not read yet
  RING      present size of the ring
  SWITCHES  replacements of the ring by one of another size

A connection of an unmodified program (kind socket) also shows the present transport of each side, and the code of the \
reason if that is not the ring. Bytes that went by TCP \
are not counted here. `partywall top` shows both, and connections that are only on TCP.

--total adds up all connections of programs under `partywall run` and all channels that you may see: by kind and transport, the \
reasons for TCP, bytes and doorbells. With --watch, these counts do not fall when connections end. --metrics writes them for Prometheus. \
The ports of network switches and the named disks of virtual machines are counted as well. Their counts begin at 0 when a port is added, or \
when the program of the switch or disk starts again. A switch or disk that does not answer within a second is reported by name and not counted.

Examples:
  partywall stat --total                              totals of this host
  partywall stat --total --watch 15 --metrics /var/lib/prometheus/node-exporter/partywall.prom
  partywall stat --total --disk /run/disk.sock        with a disk of a virtual machine
  partywall stat                                      every channel that you may see
  partywall stat 7 --watch 1                          channel 7, each second, with rates
  partywall stat --json --watch 1 | jq -c .           one line of JSON each second";

/// Show the counters of live channels
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER, after_long_help = exit_table(AFTER))]
pub(crate) struct Args {
    /// Number of a channel, as `partywall list` shows it [default: all channels that you may see]
    #[arg(value_parser = partywall_terminal::whole::<u64>(..), add = clap_complete::ArgValueCompleter::new(crate::complete::channels))]
    channel: Option<u64>,

    /// Show totals of all connections and channels that you may see
    #[arg(long, conflicts_with = "channel")]
    total: bool,

    /// With --total: write the totals to this file as metrics for Prometheus, instead of showing them; --watch rewrites the file
    #[arg(long, value_name = "FILE", requires = "total", conflicts_with = "json")]
    metrics: Option<PathBuf>,

    #[command(flatten)]
    devices: CountedDeviceArgs,

    /// Repeat at this interval in seconds (or with a unit, as in 500ms), and show rates
    #[arg(short, long, value_name = "SECONDS", value_parser = human::parse_duration)]
    watch: Option<Duration>,

    /// With --watch: end after this many repetitions, 1 to 1000000000
    #[arg(short, long, value_name = "N", requires = "watch", value_parser = partywall_terminal::whole::<u64>(1..=1_000_000_000))]
    count: Option<u64>,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(global: &Global, args: &Args) -> Result<(), CommandFailure> {
    if args.total {
        return run_total(global, args);
    }
    let domain = session::join(global)?;
    let mut viewer = StatViewer { only: args.channel, known: HashMap::new(), looked: None };
    let mut looks = 0;
    loop {
        let stats = viewer.look(&domain)?;
        show(args, &stats)?;
        looks += 1;
        match args.watch {
            Some(pause) if args.count.is_none_or(|count| looks < count) => std::thread::sleep(pause),
            _ => return Ok(()),
        }
    }
}

fn run_total(global: &Global, args: &Args) -> Result<(), CommandFailure> {
    let (mut gatherer, mut adder) = (Gatherer::new(global), Adder::default());
    let mut looks = 0;
    loop {
        let mut totals = adder.add(&gatherer.look(Scope::Preloaded));
        totals.add_devices(&args.devices);
        match (&args.metrics, args.json, args.watch) {
            (Some(path), ..) => totals.write_metrics(path)?,
            (None, true, None) => output::print_json(&totals)?,
            (None, true, Some(_)) => output::print_json_line(&totals)?,
            (None, false, Some(_)) if std::io::stdout().is_terminal() => output::print_screen(totals.to_text())?,
            (None, false, Some(_)) => output::print(format_args!("{}\n", totals.to_text()))?,
            (None, false, None) => output::print(totals.to_text())?,
        }
        looks += 1;
        match args.watch {
            Some(pause) if args.count.is_none_or(|count| looks < count) => std::thread::sleep(pause),
            _ => return Ok(()),
        }
    }
}

fn show(args: &Args, stats: &Stats) -> Result<(), CommandFailure> {
    match (args.json, args.watch) {
        (true, None) => output::print_json(stats),
        // A line each, so that a reader can tell one look from the next.
        (true, Some(_)) => output::print_json_line(stats),
        (false, None) => output::print(stats.to_text()),
        (false, Some(_)) if std::io::stdout().is_terminal() => output::print_screen(stats.to_text()),
        (false, Some(_)) => output::print(format_args!("{}\n", stats.to_text())),
    }
}

/// Remembers mappings and counts from one look to the next.
#[derive(Debug)]
struct StatViewer {
    only: Option<u64>,
    known: HashMap<u64, KnownChannel>,
    looked: Option<Instant>,
}

#[derive(Debug)]
struct KnownChannel {
    pages: Vec<StatPage>,
    /// Bytes written by each side at the last look.
    written: Vec<u64>,
}

impl StatViewer {
    fn look(&mut self, domain: &Domain) -> Result<Stats, CommandFailure> {
        let rows = domain.channels().context("cannot list channels")?;
        let rows: Vec<ChannelRow> =
            rows.into_iter().filter(|row| self.only.is_none_or(|id| row.channel == id)).collect();
        if let (Some(id), true) = (self.only, rows.is_empty()) {
            return Err(CommandFailure::new(Code::Refused, format!("there is no channel {id}"))
                .hint("`partywall list channels` shows which there are"));
        }
        let seconds = self.looked.replace(Instant::now()).map(|then| then.elapsed().as_secs_f64());
        self.known.retain(|id, _| rows.iter().any(|row| row.channel == *id));
        let mut stats = Stats::default();
        for row in rows {
            match self.look_at(domain, &row, seconds) {
                Ok(view) => stats.channels.push(view),
                Err(Error::Refused { code: Refusal::Denied, .. }) if self.only.is_none() => stats.hidden += 1,
                // It was closed since it was listed.
                Err(Error::Refused { code: Refusal::NoSuchChannel, .. }) if self.only.is_none() => {}
                Err(error) => return Err(error).context(format_args!("cannot look at channel {}", row.channel)),
            }
        }
        Ok(stats)
    }

    fn look_at(&mut self, domain: &Domain, row: &ChannelRow, seconds: Option<f64>) -> partywall::Result<ChannelView> {
        // Until the other side has accepted, or where it cannot be seen, it has no page: ask again.
        if self.known.get(&row.channel).is_none_or(|known| known.pages.len() < 2) {
            let pages = domain.inspect(row.channel)?;
            self.known.insert(row.channel, KnownChannel { pages, written: Vec::new() });
        }
        let known =
            self.known.entry(row.channel).or_insert_with(|| KnownChannel { pages: Vec::new(), written: Vec::new() });
        let before = std::mem::take(&mut known.written);
        let view = ChannelView::of(row, &known.pages, seconds.map(|s| (s, &before[..])));
        known.written = view.bytes_written();
        Ok(view)
    }
}
