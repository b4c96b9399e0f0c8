//! A transfer with a checksum between two machines, one of which is migrated to another host and back meanwhile.

mod figures;

use crate::stop;
use figures::{MigrationFigures, MigrationRound};
use partywall_lab::LabError;
use partywall_lab::migration::{HopDirection, HopReport, MigrationStage, StreamTransport, Timeline, left_behind};
use partywall_terminal::Show;
use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// The exit code where machines cannot be booted (`EX_UNAVAILABLE` of sysexits.h).
const UNAVAILABLE: u8 = 69;
/// The stream that lives from the first migration to the last.
const TRANSFER: &str = "transfer";
/// The same without Partywall, to compare with.
const PLAIN: &str = "plain";
/// How long streams go on before a migration and after it, to be seen in the time line.
const MARGIN: Duration = Duration::from_secs(1);
/// The kernel takes a moment to end what has been killed.
const MOMENT: Duration = Duration::from_secs(10);

const EXAMPLES: &str = "\
Examples:
  partywall-lab migrate                             there and back
  partywall-lab migrate --rounds 10 --json out.json";

/// Sends checksummed streams from a machine to its neighbour while the machine is migrated live to another host and back, and shows their
/// throughput, what carried them, and how long they paused.
///
/// Three streams at most go on at a time. The transfer runs under `partywall run` from the first migration to the last: its connection
/// begins in memory, is on TCP while the machine is away, and is in memory again after each return. A new connection is opened then, which
/// does the same in the next round. The plain stream is the same without Partywall.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Migrate there and back so often, 1 to 99
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = partywall_terminal::whole::<u32>(1..=99))]
    rounds: u32,

    /// Bytes a second of each stream
    #[arg(long, value_name = "BYTES", default_value = "512K", value_parser = partywall_terminal::size)]
    rate: u64,

    /// Before that, try a migration to a host that does not expect the machine: it stays, with its windows
    #[arg(long)]
    with_failure: bool,

    /// Write all figures and the throughput by time to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode, Box<dyn Error>> {
    let _stop = stop::on_signals()?;
    let show = Show::new();
    show.step("Two hosts, a machine on the first that is to be migrated, and its neighbour there");
    show.busy("kernel and file system (the first time, Debian's kernel package is fetched)");
    let booted = partywall_lab::check_tools()
        .and_then(|()| MigrationStage::boot("migrate", args.rate, &mut |said| show.busy(said)));
    let mut stage = match booted {
        Ok(stage) => stage,
        // Tools and packages are this host's; whatever a machine does wrong is not.
        Err(e @ (LabError::Tool { .. } | LabError::Program { .. })) if !partywall_lab::interrupted() => {
            show.quiet();
            show.say(&format!("   left out: {e}"));
            return Ok(UNAVAILABLE.into());
        }
        Err(e) => return Err(e.into()),
    };
    let result = play(args, &show, &mut stage);
    show.busy("taking the machines and both hosts down");
    drop(stage);
    show.quiet();
    let figures = result?;
    figures.print(&show);
    if let Some(path) = &args.json {
        std::fs::write(path, figures.to_json()?).map_err(|e| format!("cannot write {}: {e}", path.display()))?;
    }
    check_nothing_is_left()?;
    show.say("Checked: no machine, network, process or file of it is left.");
    Ok(ExitCode::SUCCESS)
}

fn play(args: &Args, show: &Show, stage: &mut MigrationStage) -> Result<MigrationFigures, Box<dyn Error>> {
    let mut figures = MigrationFigures::new(stage, args.rate);
    let mobility = stage.mobility()?;
    show.say(&format!(
        "   Debian's kernel {}, {}, {}; the hosts' bridges are joined by a link of {} Mbit/s; a is {}, its neighbour b is {}",
        stage.kernel(),
        stage.accel(),
        stage.network().kind(),
        stage.link_megabits(),
        mobility[0],
        mobility[1]
    ));
    figures.mobility = mobility;
    show.busy("streams from a to b come up");
    stage.begin_stream(TRANSFER, true)?;
    stage.begin_stream(PLAIN, false)?;
    if args.with_failure {
        show.step("A migration to a host that does not expect the machine");
        show.command("", "partywall vm migrate a --to unix:/nonexistent/socket");
        show.busy("it fails");
        show.say(&format!("   {}", stage.fail_to_migrate()?));
        stage.wait_flow()?;
        let at = stage.begin_stream("after-failure", true)?;
        show.say(&format!("   new connection on rings at {:.2} s", at.as_secs_f64()));
        figures.failed_at = Some(at);
    }
    for round in 1..=args.rounds {
        for direction in [HopDirection::Away, HopDirection::Back] {
            show.step(&format!("Round {round} of {}: {direction}", args.rounds));
            show.command("", "partywall vm migrate a --to tcp:HOST:PORT");
            show.busy("migrating");
            let hop = hop(stage, round)?;
            print_hop(show, stage, &hop);
            figures.rounds.push(MigrationRound { round, hop });
        }
        // The connection of the round before has shown what it is for: from memory to TCP, and through two migrations.
        if round > 1 {
            stage.end_stream(&new_connection(round - 1))?;
        }
    }
    show.step("The end of all streams");
    show.busy("comparing sums");
    for stream in stage.streams().iter().filter(|stream| stream.sum.is_none()) {
        stage.end_stream(&stream.name)?;
    }
    figures.finish(stage);
    Ok(figures)
}

fn new_connection(round: u32) -> String {
    format!("new-{round}")
}

/// One migration, with some time before and after it.
fn hop(stage: &mut MigrationStage, round: u32) -> Result<HopReport, LabError> {
    std::thread::sleep(MARGIN);
    let mut hop = stage.hop()?;
    stage.wait_flow()?;
    if hop.direction == HopDirection::Back {
        hop.on_ring = Some(stage.begin_stream(&new_connection(round), true)?);
    }
    std::thread::sleep(MARGIN);
    stage.wait_flow()?;
    Ok(hop)
}

fn print_hop(show: &Show, stage: &MigrationStage, hop: &HopReport) {
    let streams = stage.streams();
    for line in hop.said.lines() {
        show.say(&format!("   {line}"));
    }
    let line = Timeline::new(&streams, stage.elapsed());
    show.say(&format!("   100 ms a column, {} kB at most; r: carried by rings, t: by TCP\n", line.most() / 1_000));
    let marks = hop.marks();
    for text in line.lines(hop.detach_begins.saturating_sub(MARGIN), hop.end() + MARGIN, &marks) {
        show.say(&format!("   {text}"));
    }
    for (number, (name, at)) in marks.iter().enumerate() {
        show.say(&format!("   {} {:8.3} s  {name}", number + 1, at.as_secs_f64()));
    }
    for stream in streams.iter().filter(|stream| stream.by_partywall && stream.sum.is_none()) {
        let carried = match stream.record.transport_at(stage.elapsed()) {
            StreamTransport::Ring => "in memory",
            StreamTransport::Tcp => "by TCP",
        };
        show.say(&format!("   {} goes on {carried}", stream.name));
    }
}

fn check_nothing_is_left() -> Result<(), String> {
    let deadline = Instant::now() + MOMENT;
    loop {
        let left = left_behind();
        if left.is_empty() {
            return Ok(());
        }
        if Instant::now() > deadline {
            return Err(format!("left behind: {left:?}"));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}
