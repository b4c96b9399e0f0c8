//! `partywall-fs`: exports a directory, mounts one, unmounts it.

mod convert;
mod filesystem;
mod locks;
mod mount;

use clap::{Parser, Subcommand, ValueEnum};
use partywall::{Domain, Error, Refusal};
use partywall_fs::FsError;
use partywall_fs::export::{Export, ExportOptions, Squash};
use partywall_fs::remote::{LONGEST_CACHE, Remote, RemoteOptions, ServerAddress};
use partywall_fs::serve::{ExportServer, serve_tcp};
use rustix::process::{Resource, Rlimit};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::io::Write;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

const AFTER: &str = "\
A client sees the directory as a file system. On one host, also between its virtual machines, the bytes of files are passed by reference in \
shared memory. With --transport stream or tcp they are copied into messages.

A server that does not run as root executes all requests as its own user. A server of root executes them as the client's user, as the \
broker reports it. A client of root names the user of each request, where root becomes nobody, except with --squash none.

Examples:
  partywall fs export /srv/data --as files:data         offer a directory, in the foreground
  partywall fs mount files:data /mnt                    mount it, in the foreground
  partywall fs unmount /mnt
  partywall fs export /srv/data --tcp 127.0.0.1:7100    the same over TCP, which authenticates nobody
  partywall fs mount --transport tcp 127.0.0.1:7100 /mnt

Exit codes:
  0   success, or stopped by a signal
  1   a failure, also if the broker refuses or does not answer
  2   wrong usage: unknown flag, malformed value";

/// A file system of another domain
#[derive(Debug, Parser)]
#[command(name = "partywall fs", version, after_help = AFTER, arg_required_else_help = true)]
struct Cli {
    /// Socket of the broker [default: /run/partywall/broker.sock if it exists, else $XDG_RUNTIME_DIR/partywall/broker.sock]
    #[arg(long, global = true, value_name = "PATH", env = "PARTYWALL_BROKER", hide_env_values = true)]
    broker: Option<PathBuf>,
    /// Name to join under, for mount [default: partywallfs-PID]
    #[arg(long, global = true, value_name = "NAME", env = "PARTYWALL_DOMAIN", hide_env_values = true)]
    domain: Option<String>,
    #[command(subcommand)]
    command: FsCommand,
}

#[derive(Debug, Subcommand)]
enum FsCommand {
    /// Offer a directory, in the foreground
    Export(ExportArgs),
    /// Mount an exported directory, in the foreground until it is unmounted
    Mount(MountArgs),
    /// Unmount a directory; open files stay usable until they are closed
    Unmount {
        /// The mount point
        mountpoint: PathBuf,
    },
}

#[derive(Debug, clap::Args)]
struct ExportArgs {
    /// The directory
    directory: PathBuf,
    /// The domain to join as and the service to offer; the service NAME.calls is offered beside it
    #[arg(long = "as", value_name = "DOMAIN:SERVICE", default_value = "files:fs")]
    name: String,
    /// Export read-only
    #[arg(long)]
    read_only: bool,
    /// Users as which a server of root executes requests
    #[arg(long, value_enum, default_value = "root")]
    squash: SquashArg,
    /// Serve TCP at this address instead of a service; there is no authentication
    #[arg(long, value_name = "ADDRESS:PORT")]
    tcp: Option<SocketAddr>,
    /// Allow --tcp at an address that other hosts can reach
    #[arg(long, requires = "tcp")]
    insecure: bool,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum SquashArg {
    /// All requests are executed as nobody
    All,
    /// Requests of root are executed as nobody
    Root,
    /// Each request names its user, and root is root
    None,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum TransportArg {
    /// Calls by reference if the server is on the same machine, else a stream
    Partywall,
    /// A stream of the library, without calls
    Stream,
    /// TCP
    Tcp,
}

#[derive(Debug, clap::Args)]
struct MountArgs {
    /// DOMAIN:SERVICE of an export, or ADDRESS:PORT with --transport tcp
    target: String,
    /// An empty directory to mount it on
    mountpoint: PathBuf,
    /// Transport of requests
    #[arg(long, value_enum, default_value = "partywall")]
    transport: TransportArg,
    /// Let other users use the mount, within the permissions of its files
    #[arg(long)]
    allow_other: bool,
    /// Seconds that the kernel may cache attributes and names, except at opening: up to 31536000 (a year); 0 always asks the server
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0)]
    cache: f64,
    /// Seconds after which a request fails with EIO
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    timeout: u64,
    /// Seconds that requests wait for a server that has ended, before they fail with EIO
    #[arg(long, value_name = "SECONDS", default_value_t = 5)]
    grace: u64,
    /// Threads that serve the kernel's requests
    #[arg(long, value_name = "N", default_value_t = 4)]
    threads: usize,
    /// Connect by --transport tcp to an address that is not this host's own
    #[arg(long)]
    insecure: bool,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    partywall_terminal::log_of_service_to_stderr("info");
    let outcome = match &cli.command {
        FsCommand::Export(args) => export(&cli, args),
        FsCommand::Mount(args) => mount(&cli, args),
        FsCommand::Unmount { mountpoint } => mount::unmount(mountpoint),
    };
    partywall_terminal::end("partywall fs", outcome)
}

fn join(cli: &Cli, name: Option<&str>) -> Result<Domain, FsError> {
    let mut builder = Domain::builder();
    if let Some(name) = name {
        builder = builder.name(name);
    }
    if let Some(broker) = &cli.broker {
        builder = builder.broker(broker);
    }
    Ok(builder.join()?)
}

/// Each open file and each node of a client takes a descriptor.
fn raise_descriptor_limit() {
    let limit = rustix::process::getrlimit(Resource::Nofile);
    let _ = rustix::process::setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
}

/// With this capability the kernel would let every client exceed quotas and use the blocks that are reserved for root. Threads that are made later
/// have as few capabilities as the one that makes them.
fn respect_quotas() -> Result<(), FsError> {
    let dropped = (|| {
        let mut sets = capabilities(None)?;
        sets.effective.remove(CapabilitySet::SYS_RESOURCE);
        sets.permitted.remove(CapabilitySet::SYS_RESOURCE);
        sets.inheritable.remove(CapabilitySet::SYS_RESOURCE);
        set_capabilities(None, sets)
    })();
    dropped.map_err(FsError::system("give up the right to exceed quotas"))
}

fn export(cli: &Cli, args: &ExportArgs) -> Result<(), FsError> {
    raise_descriptor_limit();
    respect_quotas()?;
    let mut options = ExportOptions::default();
    options.read_only = args.read_only;
    options.squash = match args.squash {
        SquashArg::All => Squash::All,
        SquashArg::Root => Squash::Root,
        SquashArg::None => Squash::None,
    };
    options.has_calls = args.tcp.is_none();
    let open = Export::open(&args.directory, options);
    let export = open.map_err(FsError::system(format!("open {}", args.directory.display())))?;
    let mut signals =
        signal_hook::iterator::Signals::new([SIGINT, SIGTERM, SIGHUP]).map_err(FsError::system("catch signals"))?;
    let shown = args.directory.display();
    if let Some(address) = args.tcp {
        if !address.ip().is_loopback() && !args.insecure {
            return Err(FsError::Refused(format!(
                "{address} can be reached by others, and TCP authenticates nobody: use a loopback address, or --insecure"
            )));
        }
        let listener = TcpListener::bind(address).map_err(FsError::system(format!("listen at {address}")))?;
        let address = listener.local_addr().map_err(FsError::system("tell the address"))?;
        say(format_args!("exporting {shown} at {address}"));
        std::thread::spawn(move || {
            if let Err(e) = serve_tcp(&export, &listener) {
                tracing::error!(error = %e, "no more clients are accepted");
            }
        });
        signals.forever().next();
        return Ok(());
    }
    let (domain, service) =
        args.name.split_once(':').ok_or_else(|| FsError::Refused(format!("`{}` is no DOMAIN:SERVICE", args.name)))?;
    let joined = join(cli, Some(domain))?;
    let server = ExportServer::bind(&export, &joined, service)?;
    say(format_args!("exporting {shown} as {}:{service}", joined.name()));
    signals.forever().next();
    drop(server);
    Ok(())
}

/// The time of `--cache`, where more than the longest counts as that.
fn cache_time(seconds: f64) -> Result<Duration, FsError> {
    let longest = LONGEST_CACHE.as_secs_f64();
    // `f64::min` would take a NaN for the longest.
    let seconds = if seconds > longest { longest } else { seconds };
    Duration::try_from_secs_f64(seconds).map_err(|_| FsError::Refused("--cache takes seconds from 0 on".into()))
}

/// Adds the remedy to the error of an export that is not there.
fn explain(error: FsError, target: &str) -> FsError {
    match error {
        FsError::Partywall(Error::Refused { code: Refusal::NoSuchDomain | Refusal::NoSuchService, .. }) => {
            FsError::Refused(format!(
                "{error}\n  start its export first: `partywall fs export DIRECTORY --as {target}`; `partywall list` shows what exists"
            ))
        }
        other => other,
    }
}

fn mount(cli: &Cli, args: &MountArgs) -> Result<(), FsError> {
    let mut options = RemoteOptions::default();
    options.timeout = Duration::from_secs(args.timeout.max(1));
    options.grace = Duration::from_secs(args.grace);
    options.cache = cache_time(args.cache)?;
    let address = match args.transport {
        TransportArg::Tcp => {
            let address: SocketAddr =
                args.target.parse().map_err(|_| FsError::Refused(format!("`{}` is no ADDRESS:PORT", args.target)))?;
            if !address.ip().is_loopback() && !args.insecure {
                return Err(FsError::Refused(format!(
                    "{address} is not this host, and TCP authenticates nobody: use a loopback address, or --insecure"
                )));
            }
            ServerAddress::Tcp(address)
        }
        transport => ServerAddress::Service {
            domain: join(cli, cli.domain.as_deref())?,
            target: args.target.clone(),
            calls: transport == TransportArg::Partywall,
        },
    };
    let remote = Remote::connect(address, options).map_err(|error| explain(error, &args.target))?;
    let by = match (args.transport, remote.has_calls()) {
        (TransportArg::Tcp, _) => "TCP",
        (_, true) => "calls",
        _ => "a stream",
    };
    let settings = mount::MountSettings {
        source: args.target.clone(),
        allow_other: args.allow_other,
        threads: args.threads.clamp(1, 64),
    };
    mount::run(remote, &args.mountpoint, &settings, || {
        say(format_args!("mounted {} on {} by {by}", args.target, args.mountpoint.display()));
    })
}

fn say(what: std::fmt::Arguments<'_>) {
    let mut out = std::io::stdout();
    let _ = writeln!(out, "{what}");
    let _ = out.flush();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cache_time_of_more_than_a_year_is_a_year() {
        for (seconds, expected) in
            [(0.0, Duration::ZERO), (0.5, Duration::from_millis(500)), (31_536_000.0, LONGEST_CACHE)]
        {
            assert_eq!(cache_time(seconds).unwrap(), expected);
        }
        for seconds in [31_536_001.0, 1e19, 1e30, f64::INFINITY] {
            assert_eq!(cache_time(seconds).unwrap(), LONGEST_CACHE, "{seconds}");
        }
        for seconds in [-1.0, f64::NEG_INFINITY, f64::NAN] {
            assert!(matches!(cache_time(seconds), Err(FsError::Refused(_))), "{seconds}");
        }
    }
}
