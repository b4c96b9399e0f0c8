//! `partywall top`: every live connection: on the ring or on TCP, why, and how fast.

mod choice;
mod devices;
mod plain;
mod screen;
mod trend;

use std::io::IsTerminal;
use std::time::Duration;

use crate::args::{Global, exit_table};
use crate::connections::{Gatherer, WIDE};
use crate::exit::CommandFailure;
use crate::{human, output};
use choice::{RowOrder, TopChoice};
use devices::ShownDeviceArgs;

const AFTER: &str = "\
Shows the TCP connections of programs under `partywall run` and the channels of programs that use the library. A \
connection between two such programs has two rows, one for each end. Datagrams from one UDP socket to another on a ring have \
a row of kind udp. Datagrams that go through the kernel are not shown.

  WAY       present transport, ring or tcp; sent/received if they differ
  WHY       reason for not using the ring: its code, which docs/reasons.md explains, and a sentence
  SENT, RECEIVED    bytes so far on both transports
  RING      share of these bytes that went through rings; ? if the present ring cannot be counted, as between virtual machines
  SWITCHES  changes of the sending transport
  RUNG      doorbells sent because the other side slept
  SAVED     doorbells not sent because the other side was awake

Below the connections are the ports of your network switches (`partywall net`), and the disks (`partywall blk`) that --disk names, with their \
traffic so far.

On a terminal, top fills the screen and charts the latest total rates by rings and by TCP. The keys: q quits, \
space pauses, arrows scroll, s changes the order, / filters. Without a terminal it prints a table at each interval. A narrow terminal shows fewer columns, and the reason of the selected row in the last line. You see only your own \
programs; root sees all.

Examples:
  partywall top
  partywall top --once                                one table
  partywall top --sort program --filter nginx         the connections of one program
  partywall top --disk /run/disk.sock                 a disk of a virtual machine as well
  partywall top --json --interval 1 | jq -c '.connections[] | select(.way != \"ring\") | [.program, .reason]'";

/// Watch every connection: its transport, the reason, and its rate
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER, after_long_help = exit_table(AFTER))]
pub(crate) struct Args {
    /// Interval in seconds (or with a unit, as in 500ms): 50ms to 1h
    #[arg(short, long, value_name = "SECONDS", default_value = "1", value_parser = parse_interval)]
    interval: Duration,

    /// Print one table without rates, and end
    #[arg(long)]
    once: bool,

    /// Order of the rows
    #[arg(long, value_enum, default_value_t)]
    sort: RowOrder,

    /// Show only rows with this text in the program, addresses, way, reason or kind, or with this process number
    #[arg(long, value_name = "TEXT")]
    filter: Option<String>,

    /// End after this many tables
    #[arg(short, long, value_name = "N", value_parser = partywall_terminal::whole::<u64>(1..))]
    count: Option<u64>,

    /// Print JSON, one line for each interval
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    devices: ShownDeviceArgs,
}

fn parse_interval(text: &str) -> Result<Duration, String> {
    let interval = human::parse_duration(text)?;
    if (Duration::from_millis(50)..=Duration::from_secs(3600)).contains(&interval) {
        Ok(interval)
    } else {
        Err("must be from 50ms to 1h".into())
    }
}

pub(crate) fn run(global: &Global, args: &Args) -> Result<(), CommandFailure> {
    let mut gatherer = Gatherer::new(global);
    let looks = if args.once { Some(1) } else { args.count };
    let choice = TopChoice { sort: args.sort, filter: args.filter.clone().unwrap_or_default() };
    let terminal = std::io::stdout().is_terminal();
    if looks.is_none() && !args.json && terminal {
        return screen::run(&mut gatherer, args.interval, choice, &args.devices);
    }
    let narrow = || terminal && ratatui::crossterm::terminal::size().is_ok_and(|(width, _)| width < WIDE);
    let mut done = 0;
    loop {
        let look = args.devices.look(choice.look(&mut gatherer));
        if args.json {
            output::print_json_line(&look)?;
        } else {
            let gap = if done > 0 { "\n" } else { "" };
            output::print(format_args!("{gap}{}", plain::text(&look, narrow())))?;
        }
        done += 1;
        if looks.is_some_and(|looks| done >= looks) {
            return Ok(());
        }
        std::thread::sleep(args.interval);
    }
}
