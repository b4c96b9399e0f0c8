//! Two stock machines, a real file by `partywall cat`, by a mount and by TCP, a tree that is read in place, and what the one says when the
//! other is killed.

mod carry;
mod figures;
mod in_place;
mod payload;
mod redis;

use crate::left::Left;
use crate::stop;
use figures::DemoFigures;
use partywall_lab::{Accel, Guest, GuestOptions, LabError, Network, Playground, PlaygroundOptions};
use partywall_terminal::Show;
use payload::HostFile;
use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// Longer is a hang, even on a busy machine that emulates.
const LONGEST: Duration = Duration::from_secs(90);
/// The exit code where machines cannot be booted (`EX_UNAVAILABLE` of sysexits.h).
pub(crate) const UNAVAILABLE: u8 = 69;
/// A machine's memory besides the file, in MiB.
const MEMORY: u64 = 448;
/// PCI Express ports of a machine: one for its doorbell device, the others spare.
const PORTS: u32 = 4;

/// Carries a file between two machines over Partywall and over TCP, measures round trips, and kills one of the two.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Carry (the beginning of) this file; it is only read [default: what the machines boot]
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,

    /// MiB of it at most, 1 to 512 [default: 64, with --quick 16]
    #[arg(long, value_name = "MIB", value_parser = partywall_terminal::whole::<u64>(1..=512))]
    size: Option<u64>,

    /// A small file, one round, fewer pings
    #[arg(long)]
    quick: bool,

    /// Measure each so often and show the median, 1 to 99 [default: 3, with --quick 1]
    #[arg(long, value_name = "N", value_parser = partywall_terminal::whole::<u32>(1..=99))]
    rounds: Option<u32>,
}

impl Args {
    fn size(&self) -> u64 {
        self.size.unwrap_or(if self.quick { 16 } else { 64 }) << 20
    }

    fn rounds(&self) -> u32 {
        self.rounds.unwrap_or(if self.quick { 1 } else { 3 })
    }

    fn requests(&self) -> u32 {
        if self.quick { 200 } else { 5_000 }
    }

    fn nodes(&self) -> u32 {
        if self.quick { 20_000 } else { 1_000_000 }
    }

    /// MiB of each window. The heap with the tree takes 32 MiB, and one request gets a quarter of a window at most.
    fn window(&self) -> u64 {
        if self.quick { 64 } else { 160 }
    }

    /// MiB that are read through a mount.
    fn mounted(&self) -> u64 {
        if self.quick { 4 } else { 64 }
    }

    fn pings(&self) -> u32 {
        if self.quick { 300 } else { 1_000 }
    }
}

/// The files and machines of the demo.
struct DemoSetUp {
    payload: HostFile,
    network: Network,
    playground: Playground,
    has: Optional,
}

/// What is in the machines if this host has it.
#[derive(Debug, Clone, Copy)]
struct Optional {
    /// Redis, and the library of `partywall run`.
    redis: bool,
    /// The file system.
    fs: bool,
}

/// The two, and what there is to tell of them.
struct GuestPair<'a> {
    show: &'a Show,
    playground: &'a Playground,
    a: &'a Guest,
    b: &'a Guest,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode, Box<dyn Error>> {
    let _stop = stop::on_signals()?;
    let show = Show::new();
    show.step("Two virtual machines");
    let DemoSetUp { payload, network, playground, has } = match set_up(args, &show) {
        Ok(done) => done,
        // Tools and packages are this host's; whatever a machine does wrong is not.
        Err(e) if !partywall_lab::interrupted() && is_of_the_host(e.as_ref()) => {
            show.quiet();
            show.say(&format!("   left out: {e}"));
            return Ok(UNAVAILABLE.into());
        }
        Err(e) => return Err(e),
    };
    let left = Left::of(&playground);
    let result = play(args, &show, &payload, &network, &playground, has);
    show.busy("taking both machines down");
    drop((playground, network, payload));
    show.quiet();
    let figures = result?;
    figures.print(&show);
    left.check()?;
    show.say("Checked: no machine, network, process or file of this part is left.");
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn is_of_the_host(error: &(dyn Error + 'static)) -> bool {
    matches!(error.downcast_ref(), Some(LabError::Tool { .. } | LabError::Program { .. }))
}

fn set_up(args: &Args, show: &Show) -> Result<DemoSetUp, Box<dyn Error>> {
    show.busy("kernel and file system (the first time, Debian's kernel package is fetched)");
    partywall_lab::check_tools()?;
    let payload = HostFile::new(args.file.as_deref(), args.size())?;
    let network = Network::new()?;
    let memory = u32::try_from(MEMORY + 3 * (payload.size >> 20))?;
    let guest = |name| GuestOptions::new(name).memory(memory).interrupts(PORTS).network(&network);
    let options = PlaygroundOptions::new("demo")
        .module("virtio_blk")
        .module("vfio_pci")
        .module("vfio_iommu_type1")
        .window_mib(args.window())
        .guest(guest("a")?.arguments(payload.arguments()))
        .guest(guest("b")?);
    let with_redis = redis::add_to(options.clone());
    let redis = with_redis.is_some();
    let (options, fs) = in_place::add_to(with_redis.unwrap_or(options));
    let playground = Playground::boot(options, &mut |said| show.busy(said))?;
    for guest in playground.guests() {
        show.say(&format!(
            "   {}: Debian's kernel {}, {}, up in {:.1} s",
            guest.name(),
            playground.kernel(),
            playground.accel(),
            guest.booted_in().as_secs_f64()
        ));
    }
    show.say(&format!("   between them: {}", network.kind()));
    Ok(DemoSetUp { payload, network, playground, has: Optional { redis, fs } })
}

fn play(
    args: &Args,
    show: &Show,
    payload: &HostFile,
    network: &Network,
    playground: &Playground,
    has: Optional,
) -> Result<DemoFigures, Box<dyn Error>> {
    let [a, b] = playground.guests() else { return Err("there are not two machines".into()) };
    let pair = GuestPair { show, playground, a, b };
    show.step("Attached while they run");
    for guest in [a, b] {
        show.command("", &format!("partywall vm attach {0} --qmp {0}.qmp --port {0}.port", guest.name()));
        show.say(&format!("   {}", playground.attach(guest)?.said.lines().next().unwrap_or_default()));
    }
    show.busy("waiting until both see their windows");
    let took = playground.wait_ready(LONGEST)?;
    show.say(&format!("   both machines see all windows, {:.2} s later", took.as_secs_f64()));
    show.busy("waiting until doorbells are interrupts");
    let took = playground.wait_interrupts(LONGEST)?;
    show.say(&format!("   doorbells are interrupts, {:.2} s later", took.as_secs_f64()));

    show.step("The file from machine a to machine b");
    show.busy("putting the file into a");
    let sum = pair.a.shell(&format!("head -c {} /dev/vda > /tmp/file && sha256sum < /tmp/file", payload.size))?;
    payload.compare(&sum, "the file in a")?;
    show.say(&format!("   {}: {} MiB, SHA-256 {}", payload.name(), payload.size >> 20, payload.sum));
    let mut figures = DemoFigures::new(payload.size, network.kind().to_string(), playground.accel() == Accel::Tcg);
    for round in 1..=args.rounds() {
        show.show_commands(round == 1);
        show.busy(&format!("Partywall, round {round} of {}", args.rounds()));
        figures.ours.push(pair.by_partywall(payload)?);
        show.busy(&format!("TCP, round {round} of {}", args.rounds()));
        figures.tcp.push(pair.by_tcp(payload)?);
    }
    show.say(&format!(
        "   all {} copies in b have the SHA-256 sum of the original",
        figures.ours.len() + figures.tcp.len()
    ));

    show.step("Round trips of 64 bytes");
    show.show_commands(true);
    // Far longer than a round trip takes, so that neither side sleeps, also where processors are emulated.
    figures.awake = pair.ping_partywall(args.pings(), &["--spin", "50ms"])?;
    figures.asleep = pair.ping_partywall(args.pings(), &["--spin", "0"])?;
    figures.tcp_ping = pair.ping_tcp(args.pings())?;

    show.step("A call that reads a tree in place, across the wall of both machines");
    show.show_commands(true);
    figures.tree = Some(pair.tree(args.nodes())?);

    show.step("A directory of machine a, mounted in machine b");
    if has.fs {
        figures.files = Some(pair.files(args.mounted() << 20)?);
    } else {
        show.say("   left out: partywall-fs is not beside this program");
    }

    show.step("An unmodified redis: the server in b, its client in a");
    if has.redis {
        show.show_commands(true);
        figures.redis = Some(pair.redis(args.requests())?);
    } else {
        show.say("   left out: redis-server or redis-benchmark is not installed here");
    }

    show.step("Machine b is killed while a program in a is connected to it");
    pair.kill()?;
    Ok(figures)
}
