//! `partywall demo`: two domains, a real file, unmodified programs, Partywall and TCP side by side, and nothing left behind.

mod children;
mod files;
mod machines;
mod measure;
mod payload;
mod programs;
mod tree;
mod world;

use std::path::PathBuf;

use crate::args::exit_table;
use crate::exit::CommandFailure;
use files::FilesTimes;
use measure::{Latencies, Transfers};
use partywall_terminal::Show;
use payload::CarriedFile;
use programs::Programs;
use tree::TreeTimes;
use world::World;

const AFTER: &str = "\
The demo takes these steps. It shows each command, so that you can repeat it by hand:
  1. makes a file: a tar stream of this machine's own files
  2. makes two network namespaces with a cable (veth) between them, when it is root and has `ip`
  3. starts a private broker
  4. carries the file from one domain to the other over Partywall and over TCP, in turns, and compares SHA-256 sums
  5. measures round trips over both
  6. calls a function that reads a tree of a million nodes in the caller's memory, and sends the same tree over TCP, serialised
  7. mounts a directory of one domain in the other (`partywall fs`) by calls and over TCP, reads a file there, and compares SHA-256 sums; \
this needs /dev/fuse, and root or fusermount3
  8. runs unmodified programs, without and with `partywall run`: redis-server and redis-benchmark, or, \
if those are missing, a client and a server in Python
  9. boots two virtual machines (by `partywall-lab`: Debian's kernel, emulated where there is no KVM), repeats steps 4 to 8 \
between them through shared memory and over TCP, and kills one of the two
 10. boots two virtual machines without Partywall inside, and sends TCP between them over the switch of `partywall net` and over tap \
and bridge; this needs root, and --quick leaves it out
 11. removes all its files, namespaces, mounts and processes, even after an error or Ctrl-C, and checks that nothing is left

Examples:
  partywall demo                                      300 MiB, three rounds
  partywall demo --quick                              32 MiB, one round: a few seconds, and half a minute for the machines
  partywall demo --no-vm                              without virtual machines
  partywall demo --file big.iso                       your own file, which is only read";

/// Demonstrate a file transfer and unmodified programs, over Partywall and over TCP
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER, after_long_help = exit_table(AFTER))]
pub(crate) struct Args {
    /// Size of the file to make, 1M to 4G [default: 300M, with --quick 32M]
    #[arg(long, value_name = "SIZE", value_parser = parse_size, conflicts_with = "file")]
    size: Option<u64>,

    /// Use this file instead of a generated one
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,

    /// Use a small file, one round and fewer pings
    #[arg(long)]
    quick: bool,

    /// Rounds of each measurement, 1 to 99; the median is shown [default: 3, with --quick 1]
    #[arg(long, value_name = "N", value_parser = partywall_terminal::whole::<u32>(1..=99))]
    rounds: Option<u32>,

    /// Use no network namespaces: both domains in this one, TCP over loopback
    #[arg(long)]
    no_namespaces: bool,

    /// Skip the part with virtual machines
    #[arg(long)]
    no_vm: bool,
}

fn parse_size(text: &str) -> Result<u64, String> {
    match partywall_terminal::size(text)? {
        size @ 0x10_0000..=0x1_0000_0000 => Ok(size),
        _ => Err("must be from 1M to 4G".into()),
    }
}

impl Args {
    fn size(&self) -> u64 {
        self.size.unwrap_or(if self.quick { 32 << 20 } else { 300 << 20 })
    }

    fn rounds(&self) -> u32 {
        self.rounds.unwrap_or(if self.quick { 1 } else { 3 })
    }

    fn pings(&self) -> u32 {
        if self.quick { 1_000 } else { 5_000 }
    }
}

pub(crate) fn run(args: &Args) -> Result<(), CommandFailure> {
    children::catch_signals()?;
    let show = Show::new();
    let mut world = World::new(&show)?;
    let result = play(args, &show, &mut world);
    show.quiet();
    show.show_commands(true);
    show.step("Taking everything away again");
    let left = world.take_down(&show);
    // Leftovers are reported even if the demo failed.
    for thing in &left {
        show.say(&format!("left behind: {thing}"));
    }
    // If the demo was interrupted, that is the cause of any other failure.
    children::check_interrupted()?;
    result?;
    if !left.is_empty() {
        return Err(CommandFailure::general(
            "the demo worked, but could not remove everything it has made (see above)",
        ));
    }
    show.say("Checked: no namespace, interface, mount, process, socket or file of the demo is left.");
    Ok(())
}

fn play(args: &Args, show: &Show, world: &mut World) -> Result<(), CommandFailure> {
    let payload = match &args.file {
        Some(path) => CarriedFile::from_file(path, show)?,
        None => CarriedFile::make(world.dir(), args.size(), show)?,
    };
    world.make_room_for(payload.size)?;
    world.separate(args.no_namespaces, show)?;
    world.start_broker(show)?;
    let transfers = Transfers::run(world, &payload, args.rounds(), show)?;
    let latencies = Latencies::run(world, args.rounds(), args.pings(), show)?;
    let tree = TreeTimes::run(world, args.quick, show)?;
    let files = FilesTimes::run(world, &payload, args.rounds(), args.quick, show)?;
    let programs = Programs::run(world, args.rounds(), args.quick, show)?;
    show.quiet();
    show.say(&format!(
        "\nResults (medians of {} round(s); all {} copies have the SHA-256 sum of the original, {}...)\n",
        args.rounds(),
        transfers.copies(),
        &payload.sum[..16]
    ));
    show.say(&transfers.to_text(&payload));
    show.say("");
    show.say(&latencies.to_text());
    show.say("");
    show.say(&tree.to_text());
    if let Some(files) = files {
        show.say("");
        show.say(&files.to_text());
    }
    if let Some(programs) = programs {
        show.say("");
        show.say(&programs.to_text());
    }
    if args.no_vm { Ok(()) } else { machines::run(args.rounds(), args.quick, &payload, show) }
}
