//! `partywall-blk`: serves a disk, and asks a running one.

use clap::{Parser, Subcommand};
use partywall::{Domain, Group};
use partywall_terminal::{bytes, printable, table, whole};
use partywall_vhost::disk::control::{self, DiskControl, DiskReport};
use partywall_vhost::disk::engine::DiskEngine;
use partywall_vhost::disk::exported::{DiskExport, DiskExportOptions, ImportOptions, ImportedDisk};
use partywall_vhost::disk::{DiskOptions, FaultRule, MOST_QUEUES, attach, background};
use partywall_vhost::{VhostError, check_access, machine_user};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

const AFTER: &str = "\
Serves a disk to a virtual machine on this host from a raw file or a block device. The machine needs only a virtio driver. \
Data passes between the file and the machine's memory without a copy in this program.

The machine's memory must be shared: -object memory-backend-memfd,id=ram,size=1G,share=on -machine memory-backend=ram.
If this program ends or is killed, start it again with the same arguments: the machine reconnects, and no request is lost.
A new back end waits up to 30 s until another process has unlocked the disk.

Examples:
  partywall blk serve disk.raw --socket /run/disk.sock              a disk, in the foreground
  partywall blk serve /dev/vg/home --socket /run/home.sock --direct
  partywall blk args --socket /run/disk.sock                        options to start a machine with it
  partywall blk attach --socket /run/disk.sock --qmp /run/a.qmp     plug it into a running machine
  partywall blk detach --socket /run/disk.sock --qmp /run/a.qmp     and remove it
  partywall blk resize --socket /run/disk.sock 20G                  make it larger while it is in use
  partywall blk show --socket /run/disk.sock
  partywall blk export data /dev/vdb --domain store                 in machine a: offer a disk to other domains
  partywall blk serve --from a.store:data --socket /run/data.sock   on the host: serve it to another machine

Exit codes:
  0   success, or stopped by a signal
  1   a failure, also if the broker refuses or does not answer
  2   wrong usage: unknown flag, value out of range";

const COLUMNS: &str = "\
Columns, counted since the back end started:
  STATE           up: a driver uses the disk; no driver: a machine is connected; no machine
  READS, WRITES   requests that were done, and READ, WRITTEN their bytes
  FLUSHES         flushes that were done
  COPIED          bytes that the back end copied, apart from copies of kernels
  COPIES/READ     copies of each byte that was read; COPIES/WRITTEN of each that was written; - before the first
  PASSED          written bytes that were passed on without a copy, in a buffer of a group
  FAILED          requests that the file or device failed
  REFUSED         requests that were invalid: beyond the end, misaligned or unknown
  RECOVERED       requests that an earlier back end had taken and not completed";

/// Disks for virtual machines without Partywall inside
#[derive(Debug, Parser)]
#[command(name = "partywall blk", version, after_help = AFTER, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: BlkCommand,
}

#[derive(Debug, Subcommand)]
enum BlkCommand {
    /// Serve a disk in the foreground
    Serve(Box<ServeArgs>),
    /// Offer a disk of this machine, container or host to other domains, in the foreground
    Export(DiskExportArgs),
    /// Show a disk and its counters
    #[command(after_help = COLUMNS)]
    Show {
        #[command(flatten)]
        at: SocketArgs,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Make a disk larger, or adopt the new size of its device, while it is in use
    Resize {
        #[command(flatten)]
        at: SocketArgs,
        /// New size of the file in bytes, with K, M, G or T (powers of 1024) [default: the present size of the file or device]
        #[arg(value_parser = partywall_terminal::size)]
        size: Option<u64>,
    },
    /// Print the options for QEMU, or the XML for libvirt, of a machine with the disk
    Args {
        #[command(flatten)]
        at: SocketArgs,
        /// Queues of the machine's disk; at most as many as `serve` offers
        #[arg(long, default_value_t = 4)]
        queues: u16,
        /// Print XML for `virsh edit`
        #[arg(long)]
        libvirt: bool,
    },
    /// Plug the disk into a running QEMU
    Attach {
        #[command(flatten)]
        disk: PluggedArgs,
        /// Queues of the machine's disk; at most as many as `serve` offers
        #[arg(long, default_value_t = 4)]
        queues: u16,
    },
    /// Remove the disk from a running QEMU
    Detach {
        #[command(flatten)]
        disk: PluggedArgs,
    },
}

/// The disk of a running machine.
#[derive(Debug, clap::Args)]
struct PluggedArgs {
    /// The disk's socket
    #[arg(long, value_name = "SOCKET", required_unless_present = "from", conflicts_with = "from")]
    socket: Option<PathBuf>,
    /// A disk that another domain offers: a back end for it is started in the background, and ended by `detach`
    #[arg(long, value_name = "DOMAIN:NAME")]
    from: Option<String>,
    /// Socket of the broker, for --from [default: /run/partywall/broker.sock if it exists, else $XDG_RUNTIME_DIR/partywall/broker.sock]
    #[arg(long, value_name = "PATH", env = "PARTYWALL_BROKER", hide_env_values = true)]
    broker: Option<PathBuf>,
    /// The machine's monitor: the PATH of -qmp unix:PATH,server=on,wait=off
    #[arg(long, value_name = "SOCKET")]
    qmp: PathBuf,
}

impl PluggedArgs {
    /// The disk's socket: QEMU may run in another folder.
    fn socket(&self) -> Result<PathBuf, VhostError> {
        match (&self.socket, &self.from) {
            (Some(socket), _) => absolute(socket),
            (None, Some(target)) => background::socket(target),
            (None, None) => Err(VhostError::Refused("name the disk by --socket or --from".into())),
        }
    }

    /// Starts the back end of an exported disk, whose socket belongs to `user`.
    fn start(&self, socket: &Path, user: u32) -> Result<(), VhostError> {
        let Some(target) = &self.from else { return Ok(()) };
        let program = std::env::current_exe().map_err(VhostError::file_error("find", "partywall-blk"))?;
        let owner = user.to_string();
        let mut words = vec!["serve", "--from", target];
        // The rights of root need no owner.
        if user != 0 {
            words.extend(["--owner", &owner]);
        }
        let broker = self.broker.as_ref().map(|broker| broker.to_string_lossy().into_owned());
        if let Some(broker) = &broker {
            words.extend(["--broker", broker]);
        }
        background::start(&program, &words, socket, user)
    }
}

#[derive(Debug, clap::Args)]
struct SocketArgs {
    /// The disk's socket
    #[arg(long, value_name = "SOCKET")]
    socket: PathBuf,
}

#[derive(Debug, clap::Args)]
struct ServeArgs {
    /// A raw file, or a block device
    #[arg(required_unless_present = "from", conflicts_with = "from")]
    path: Option<PathBuf>,
    /// A disk that another domain offers by `partywall blk export`, instead of a file
    #[arg(long, value_name = "DOMAIN:NAME")]
    from: Option<String>,
    #[command(flatten)]
    importing: ImportArgs,
    #[command(flatten)]
    at: SocketArgs,
    /// Let the guest only read
    #[arg(long)]
    read_only: bool,
    /// Bypass the host's page cache (O_DIRECT)
    #[arg(long, conflicts_with = "from")]
    direct: bool,
    /// Make each write durable before it completes, so that the guest need not flush
    #[arg(long)]
    writethrough: bool,
    /// Ignore discards of the guest, so that the file keeps its allocated blocks
    #[arg(long)]
    no_discard: bool,
    /// Queues that the guest may use, 1 to 16
    #[arg(long, default_value_t = 4, value_parser = whole::<u16>(1..=MOST_QUEUES as u16))]
    queues: u16,
    /// Serial number that the guest sees, at most 20 characters [default: the file's name]
    #[arg(long)]
    serial: Option<String>,
    /// The user whose QEMU may connect [default: this user]
    #[arg(long, value_name = "USER", value_parser = partywall_vhost::user_number)]
    owner: Option<u32>,
    /// Microseconds to poll empty queues before sleeping; 0 sleeps at once
    #[arg(long, value_name = "MICROSECONDS", default_value_t = 50)]
    spin: u64,
    /// For tests: requests that fail, as read, write:2048-4095, flush, discard or write-zeroes; may be repeated
    #[arg(long, value_name = "KIND[:SECTORS]")]
    inject_error: Vec<FaultRule>,
    /// For tests: the least time of each request, in milliseconds
    #[arg(long, value_name = "MILLISECONDS", default_value_t = 0)]
    inject_delay: u64,
}

#[derive(Debug, clap::Args)]
struct ImportArgs {
    #[command(flatten)]
    join: JoinArgs,
    /// Requests that the exporter executes at once, 1 to 32; each takes a connection, of up to 8 MiB of memory on each side
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = whole::<u16>(1..=32), requires = "from")]
    connections: u16,
    /// Group of which this domain and the exporter are members: written data lies in buffers of the group, where the exporter reads it
    #[arg(long, value_name = "NAME", requires = "from")]
    group: Option<String>,
    /// Name of the machine that uses the disk, a member of the group: data that it writes from another back end's buffer is not copied
    #[arg(long, value_name = "NAME", requires = "group")]
    machine: Option<String>,
    /// Seconds that the start, and later each request, waits for an exporter that is away or does not answer, before it fails
    #[arg(long, value_name = "SECONDS", default_value_t = 60, requires = "from")]
    grace: u64,
}

#[derive(Debug, clap::Args)]
struct JoinArgs {
    /// Socket of the broker [default: /run/partywall/broker.sock if it exists, else $XDG_RUNTIME_DIR/partywall/broker.sock]
    #[arg(long, value_name = "PATH", env = "PARTYWALL_BROKER", hide_env_values = true)]
    broker: Option<PathBuf>,
    /// Name to join under [default: partywallblk-PID]
    #[arg(long, value_name = "NAME", env = "PARTYWALL_DOMAIN", hide_env_values = true)]
    domain: Option<String>,
}

#[derive(Debug, clap::Args)]
struct DiskExportArgs {
    /// The service to offer; the service NAME.calls is offered beside it
    name: String,
    /// A raw file, or a block device
    path: PathBuf,
    #[command(flatten)]
    join: JoinArgs,
    /// Let users only read, and several at once
    #[arg(long)]
    read_only: bool,
    /// Bypass the page cache (O_DIRECT)
    #[arg(long)]
    direct: bool,
    /// Ignore discards, so that the file keeps its allocated blocks
    #[arg(long)]
    no_discard: bool,
    /// A group that this machine or domain is a member of: what users write may lie in it, and is read there
    #[arg(long, value_name = "NAME")]
    group: Option<String>,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    partywall_terminal::log_of_service_to_stderr("info");
    partywall_terminal::end("partywall blk", run(cli.command))
}

fn run(command: BlkCommand) -> Result<(), VhostError> {
    match command {
        BlkCommand::Serve(arguments) => serve(*arguments),
        BlkCommand::Export(arguments) => export(arguments),
        BlkCommand::Show { at, json } => show(&control::ask(&at.socket, &DiskControl::Show)?, json),
        BlkCommand::Resize { at, size } => {
            let answer = control::ask(&at.socket, &DiskControl::Resize { size })?;
            let size = answer.as_u64().map_or_else(|| answer.to_string(), |n| format!("{} ({n} bytes)", bytes(n)));
            say(format_args!("the size of {} is {size}", printable(&at.socket.to_string_lossy())))
        }
        BlkCommand::Args { at, queues, libvirt } => {
            let socket = absolute(&at.socket)?;
            say(if libvirt { attach::libvirt(&socket, queues) } else { attach::arguments(&socket, queues) })
        }
        BlkCommand::Attach { disk, queues } => {
            let socket = disk.socket()?;
            let user = machine_user(&disk.qmp)?;
            disk.start(&socket, user)?;
            let report = || report(&control::ask(&socket, &DiskControl::Show)?);
            report()?;
            check_access(&socket, user, "start its back end again with --owner")?;
            let is_taken = || Ok(report()?.occupied);
            let plugged = attach::plug(&disk.qmp, &socket, queues, is_taken)?;
            say(format_args!(
                "{} is {}",
                printable(&socket.to_string_lossy()),
                if plugged { "plugged in" } else { "in place" }
            ))
        }
        BlkCommand::Detach { disk } => {
            // Its back end may have ended.
            let socket = disk.socket()?;
            if !attach::unplug(&disk.qmp, &socket)? {
                return Err(VhostError::Refused(format!("the machine has no disk of {}", socket.display())));
            }
            if disk.from.is_some() {
                background::stop(&socket)?;
            }
            say(format_args!("{} is unplugged", printable(&socket.to_string_lossy())))
        }
    }
}

/// QEMU may run in another folder.
fn absolute(path: &Path) -> Result<PathBuf, VhostError> {
    std::path::absolute(path).map_err(VhostError::file_error("find", path))
}

fn join(arguments: &JoinArgs) -> Result<Domain, VhostError> {
    let mut builder = Domain::builder();
    if let Some(name) = &arguments.domain {
        builder = builder.name(name);
    }
    if let Some(broker) = &arguments.broker {
        builder = builder.broker(broker);
    }
    Ok(builder.join()?)
}

fn catch_signals() -> Result<signal_hook::iterator::Signals, VhostError> {
    let signals = signal_hook::iterator::Signals::new([SIGINT, SIGTERM, SIGHUP]);
    signals.map_err(|source| VhostError::System { call: "catch signals", source })
}

fn export(arguments: DiskExportArgs) -> Result<(), VhostError> {
    let DiskExportArgs { name, path, join: joining, read_only, direct, no_discard, group } = arguments;
    let mut signals = catch_signals()?;
    let domain = join(&joining)?;
    let shown = printable(&path.to_string_lossy()).to_string();
    // It lends nothing itself.
    let group = group.map(|name| Group::builder(name).room(0).join(&domain)).transpose()?;
    let options = DiskExportOptions { path, read_only, direct, discard: !no_discard, group };
    let _export = DiskExport::bind(options, &domain, &name)?;
    say(format_args!("exporting {shown} as {}:{name}", domain.name()))?;
    signals.forever().next();
    Ok(())
}

/// Takes part in a group, once back ends behind the exporter keep no buffers of an earlier one there. `None` if the flush for that fails, or the
/// broker refuses: the disk is served by copies then.
fn join_group(domain: &Domain, name: &str, target: &str, grace: Duration) -> Result<Option<Group>, VhostError> {
    if let Err(error) = ImportedDisk::sync(domain, target, grace) {
        tracing::warn!(group = name, %error, "the disk is served without the group");
        return Ok(None);
    }
    match Group::join(domain, name) {
        Ok(group) => Ok(Some(group)),
        Err(error @ partywall::Error::Refused { .. }) => {
            tracing::warn!(group = name, %error, "the disk is served without the group; start the back end again when the reason is gone");
            Ok(None)
        }
        Err(e) => Err(e.into()),
    }
}

/// The result of `start`; `None` at a signal before that. A start may wait for another back end or for an exporter, and what it has begun ends with
/// the process.
fn until_signal<T: Send + 'static>(start: impl FnOnce() -> T + Send + 'static) -> Result<Option<T>, VhostError> {
    let mut signals = catch_signals()?;
    let watcher = signals.handle();
    let started = std::thread::spawn(move || {
        let started = start();
        watcher.close();
        started
    });
    if signals.forever().next().is_some() {
        return Ok(None);
    }
    started.join().map(Some).map_err(|_| VhostError::Refused("the start has ended by an internal fault".into()))
}

fn serve(arguments: ServeArgs) -> Result<(), VhostError> {
    let source = arguments.path.clone().or_else(|| arguments.from.clone().map(PathBuf::from)).unwrap_or_default();
    let mut options = DiskOptions::new(&source);
    options.read_only = arguments.read_only;
    options.direct = arguments.direct;
    options.writethrough = arguments.writethrough;
    options.discard = !arguments.no_discard;
    options.queues = arguments.queues;
    options.spin = Duration::from_micros(arguments.spin);
    options.faults.errors = arguments.inject_error;
    options.faults.delay = Duration::from_millis(arguments.inject_delay);
    if let Some(serial) = arguments.serial {
        options.serial = serial;
    }
    let socket = arguments.at.socket;
    let mut signals = catch_signals()?;
    let (at, owner, from, importing) = (socket.clone(), arguments.owner, arguments.from, arguments.importing);
    let started = until_signal(move || match from {
        None => DiskEngine::new(options, &at, owner),
        Some(target) => {
            let ImportArgs { join: joining, connections, grace, group, machine } = importing;
            let (domain, grace) = (join(&joining)?, Duration::from_secs(grace));
            let group = group.map(|name| join_group(&domain, &name, &target, grace)).transpose()?.flatten();
            let machine = machine.filter(|_| group.is_some());
            let from = ImportOptions { domain, target, connections: connections.into(), grace, group, machine };
            DiskEngine::import(options, from, &at, owner)
        }
    })?;
    let Some(started) = started else { return Ok(()) };
    let (engine, handle) = started?;
    let running = std::thread::spawn(move || engine.run());
    let listener = Arc::new(control::listen(&socket)?);
    let (served, asked) = (Arc::clone(&listener), handle.clone());
    std::thread::spawn(move || control::serve(&served, &asked));
    say(format_args!("serving {} at {}", printable(&source.to_string_lossy()), printable(&socket.to_string_lossy())))?;
    // An engine that ends by itself has failed, or was asked to end.
    let watcher = signals.handle();
    let ended = std::thread::spawn(move || {
        let end = running.join();
        watcher.close();
        end
    });
    if signals.forever().next().is_some() {
        let _ = handle.ask(DiskControl::Stop);
    }
    let end = ended.join();
    // A command that finds no control socket starts the next back end.
    listener.remove();
    match end {
        Ok(Ok(end)) => end,
        _ => Err(VhostError::Refused("the disk has ended by an internal fault".into())),
    }
}

fn say(what: impl std::fmt::Display) -> Result<(), VhostError> {
    let _ = writeln!(std::io::stdout(), "{what}");
    Ok(())
}

fn report(value: &serde_json::Value) -> Result<DiskReport, VhostError> {
    serde_json::from_value(value.clone()).map_err(|e| VhostError::Refused(format!("the disk answers otherwise: {e}")))
}

fn show(value: &serde_json::Value, json: bool) -> Result<(), VhostError> {
    if json {
        return say(value);
    }
    let report = report(value)?;
    let counters = report.counters;
    let mut shown = table(&[
        "DISK",
        ">SIZE",
        "STATE",
        ">READS",
        ">READ",
        ">WRITES",
        ">WRITTEN",
        ">FLUSHES",
        ">COPIED",
        ">COPIES/READ",
        ">COPIES/WRITTEN",
        ">PASSED",
        ">FAILED",
        ">REFUSED",
        ">RECOVERED",
    ]);
    let state = match (report.connected, report.occupied) {
        (true, _) => "up",
        (false, true) => "no driver",
        (false, false) => "no machine",
    };
    let per = |copies: Option<f64>| copies.map_or_else(|| "-".to_owned(), |copies| format!("{copies:.2}"));
    let [read, written] = [per(report.copies.read), per(report.copies.written)];
    shown.add_row([
        printable(&report.path.to_string_lossy()).to_string(),
        bytes(report.capacity),
        state.to_owned(),
        counters.reads.to_string(),
        bytes(counters.read_bytes),
        counters.writes.to_string(),
        bytes(counters.written_bytes),
        counters.flushes.to_string(),
        bytes(counters.copied_bytes),
        read,
        written,
        bytes(counters.passed_bytes),
        counters.failed.to_string(),
        counters.refused.to_string(),
        counters.recovered.to_string(),
    ]);
    say(shown)
}
