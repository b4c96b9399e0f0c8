//! `partywall-agent`: Partywall in a virtual machine (protocol G).
//!
//! ```text
//!   programs --socket-- agent ======= serial port ======= broker on the host
//!                         |
//!                       /dev/dax*  windows towards other machines, and from them
//! ```
//!
//! It decides nothing. Each program's session is carried to the host's broker, which sees the guest as one user; what cannot cross
//! a serial port, memory and the ends of links, is put in place here. When the broker goes, so do the sessions, and programs join
//! again as they do on a host.

mod doorbell;
mod flows;
mod ghosts;
mod handshake;
mod introduce;
mod listen;
mod receivers;
mod release;
mod removal;
mod serve;
mod windows;

use std::io::IsTerminal as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use partywall_protocol::environment;
use partywall_region::descriptors;
use partywall_region::number_record;
use partywall_region::relay::{PORT, PortSide, Relay, open_port};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use tracing_subscriber::EnvFilter;

use listen::{Listening, SocketLock};
use serve::{Serving, ServingEnd};

/// The exit code if another process serves the socket, as of `partywalld`.
const IN_USE: u8 = 4;
/// Time between two attempts to open the port.
const AGAIN: Duration = Duration::from_secs(1);

const AFTER_HELP: &str = "\
Exit codes:
  0  stopped by SIGTERM or SIGINT
  1  the system refused something the agent needs, such as its socket
  2  wrong command line
  4  another agent or broker serves the socket

The host attaches this machine with `partywall vm attach`; until then the socket is not there, and programs find no broker.

All programs that can connect to the socket share the windows of this machine. Programs whose channels must be \
hidden from one another belong in different machines.";

/// Serves the programs of a virtual machine through the broker of its host.
#[derive(Debug, Parser)]
#[command(name = "partywall-agent", version, after_help = AFTER_HELP)]
struct Arguments {
    /// Socket to serve, where programs expect the broker; the agent locks SOCKET.lock while it runs
    #[arg(long, value_name = "PATH", env = environment::BROKER, default_value = "/run/partywall/broker.sock")]
    socket: PathBuf,

    /// Permissions of the socket, in octal
    #[arg(long, value_name = "MODE", value_parser = parse_mode, default_value = "600")]
    socket_mode: u32,

    /// Name of the serial port to the host
    #[arg(long, value_name = "NAME", default_value = PORT)]
    port: String,

    /// Directory with the record of sequence numbers that `partywall numbers on` has made. Without one, they are read in TCP's repair mode,
    /// which takes CAP_NET_ADMIN
    #[arg(long, value_name = "DIR", default_value = number_record::DIRECTORY)]
    number_record: PathBuf,

    /// Log level on stderr: error, warn, info, debug, trace, or a filter as of tracing's EnvFilter
    #[arg(long, value_name = "FILTER", env = environment::LOG_FILTER, default_value = "info", value_parser = parse_filter)]
    log: String,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let log = tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::new(&arguments.log))
        .with_writer(std::io::stderr)
        // A closed log must not end the program: the report of a failed write would panic.
        .log_internal_errors(false)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false);
    // The journal stamps lines itself.
    if std::env::var_os("JOURNAL_STREAM").is_some() {
        log.without_time().init();
    } else {
        log.init();
    }
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => {
            tracing::error!("{error}");
            ExitCode::from(IN_USE)
        }
        Err(error) => {
            tracing::error!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> std::io::Result<()> {
    // A flow of datagrams within this machine takes two, and each program one.
    if let Err(error) = descriptors::raise_limit() {
        tracing::warn!(%error, "cannot raise the limit on open descriptors; more programs may be refused");
    }
    // Before anything is there that a signal would leave behind.
    let signals = Signals::new([SIGTERM, SIGINT])?;
    // Before the socket is touched: it may be another's.
    let _lock = SocketLock::take(&arguments.socket)?;
    remove_on_signal(signals, &arguments.socket)?;
    let mut told = false;
    loop {
        let opened = open_port(&arguments.port).and_then(|port| Relay::start(port, PortSide::Guest));
        match opened {
            Ok((relay, notices)) => {
                told = false;
                let listening = Listening::new(&arguments.socket, arguments.socket_mode);
                let ServingEnd { why } = Serving::new(relay, listening, &arguments.number_record)?.serve(&notices)?;
                tracing::warn!(why, "the port was closed");
            }
            Err(error) if !told => {
                told = true;
                tracing::error!("{error}; trying again");
            }
            Err(_) => {}
        }
        std::thread::sleep(AGAIN);
    }
}

/// Removes the socket at a signal. A socket that no program serves would make clients wait.
fn remove_on_signal(mut signals: Signals, socket: &Path) -> std::io::Result<()> {
    let socket = socket.to_owned();
    std::thread::Builder::new().name("signals".to_owned()).spawn(move || {
        if signals.forever().next().is_some() {
            let _ = std::fs::remove_file(&socket);
            std::process::exit(0);
        }
    })?;
    Ok(())
}

fn parse_mode(text: &str) -> Result<u32, String> {
    match u32::from_str_radix(text, 8) {
        Ok(mode) if mode <= 0o777 => Ok(mode),
        _ => Err("not an octal mode such as 660".to_owned()),
    }
}

/// Reads a filter.
fn parse_filter(text: &str) -> Result<String, String> {
    if let Some(unknown) = environment::misspelt_level(text) {
        return Err(format!("`{unknown}` is no level: write error, warn, info, debug, trace or off, or MODULE=LEVEL"));
    }
    EnvFilter::builder().parse(text).map(|_| text.to_owned()).map_err(|e| e.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn misspelt_log_level_is_rejected() {
        for (filter, good) in [("info,partywall_agent=debug", true), ("warning", false), ("inf", false)] {
            let parsed = Arguments::try_parse_from(["partywall-agent", "--log", filter]);
            assert_eq!(parsed.is_ok(), good, "{filter}");
        }
    }

    #[test]
    fn command_line_is_consistent() {
        Arguments::command().debug_assert();
    }
}
