//! The command line, and where things are if it does not say.

use std::io::IsTerminal as _;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::LazyLock;
use std::time::Duration;

use clap::Parser;
use clap_complete::Shell;
use partywall_daemon::Config;
use partywall_daemon::policy::MetricsAddress;
use partywall_protocol::environment;
use partywall_region::number_record;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

use crate::DaemonFailure;
use crate::journal::{self, Journal};
use crate::manual::ManualPage;

/// The policy file if the broker runs as root, this file exists, and the command line names no other.
const SYSTEM_POLICY: &str = "/etc/partywall/partywalld.toml";

/// The socket of the broker of the host, which programs try first.
pub(crate) const HOST_SOCKET: &str = "/run/partywall/broker.sock";

const AFTER_HELP: &str = "\
Exit codes:
  0  stopped by SIGTERM or SIGINT, or the policy is valid
  1  the system refused a resource that the broker needs, such as its socket
  2  wrong command line
  3  the policy file cannot be read or is invalid
  4  another broker serves the socket

Signals:
  SIGTERM, SIGINT  stop; open channels continue without the broker
  SIGHUP           load the policy file again, or for the first time if it was made after the start; an invalid or missing
                   file is reported, and the old policy kept

Files:
  /run/partywall/broker.sock              the socket, if run as root (mode 0666: the policy decides)
  $XDG_RUNTIME_DIR/partywall/broker.sock  the socket, if run by another user (mode 0600); if the broker of the host also runs,
                                          programs need PARTYWALL_BROKER to find this one
  /run/partywall/containers/broker.sock   a socket for containers, if the folder exists (partywall container setup); its clients are never administrators
  SOCKET.lock                             locked by the broker that serves SOCKET; the file remains when the broker stops
  /etc/partywall/partywalld.toml          the policy, if run as root and the file exists; see partywalld.toml(5)

Without a policy file, root and the user who runs the broker may do everything. Other users may do nothing.";

/// The Partywall broker: names the domains on this host, decides who may connect to whom, and hands out memory and doorbells.
///
/// It never touches the bytes of a channel. When it stops, open channels keep working.
#[derive(Debug, Parser)]
#[command(name = "partywalld", version, long_version = long_version(), after_help = AFTER_HELP)]
pub(crate) struct DaemonArguments {
    /// Socket to serve
    #[arg(long, value_name = "PATH", env = environment::BROKER)]
    socket: Option<PathBuf>,

    /// Permissions of the socket, in octal [default: 666 as root, else 600]
    #[arg(long, value_name = "MODE", value_parser = parse_mode)]
    socket_mode: Option<u32>,

    /// Policy file (TOML)
    #[arg(long, value_name = "FILE")]
    policy: Option<PathBuf>,

    /// Check the policy file, warn about each right that it gives to nobody, and exit
    #[arg(long)]
    pub(crate) check_policy: bool,

    /// Print a sample policy file, with every key explained, and exit
    #[arg(long)]
    pub(crate) print_sample_policy: bool,

    /// Print a page of the manual, and exit: broker is partywalld(8), policy is partywalld.toml(5)
    #[arg(long, value_name = "PAGE", value_enum, num_args = 0..=1, require_equals = true, default_missing_value = "broker")]
    pub(crate) print_manual: Option<ManualPage>,

    /// Print a completion script for a shell, and exit
    #[arg(long, value_name = "SHELL", value_enum)]
    pub(crate) print_completions: Option<Shell>,

    /// Seconds without a message after which a virtual machine counts as hung
    #[arg(long, value_name = "SECONDS", default_value_t = 15, value_parser = parse_silence)]
    machine_silence: u64,

    /// Serve metrics (OpenMetrics over HTTP) at this loopback address, such as 127.0.0.1:9464, or UNIX socket path [default: the
    /// address in the policy file, else none]
    #[arg(long, value_name = "ADDRESS", value_parser = str::parse::<MetricsAddress>)]
    metrics: Option<MetricsAddress>,

    /// Directory with the record of sequence numbers that `partywall numbers on` has made. Without one, they are read in TCP's repair mode,
    /// which takes CAP_NET_ADMIN
    #[arg(long, value_name = "DIR", default_value = number_record::DIRECTORY)]
    number_record: PathBuf,

    /// Log level on stderr: error, warn, info, debug, trace, or a filter as of tracing's EnvFilter
    #[arg(long, value_name = "FILTER", env = environment::LOG_FILTER, default_value = "info", value_parser = parse_filter)]
    log: String,

    /// Format of the log: lines for people, or one JSON object on each line, with named fields
    #[arg(long, value_name = "FORMAT", value_enum, default_value_t)]
    log_format: LogFormat,
}

/// The text of `--version`; `-V` prints the number alone.
fn long_version() -> &'static str {
    static TEXT: LazyLock<String> = LazyLock::new(|| {
        // The build of a release tells it.
        let commit = option_env!("PARTYWALL_COMMIT").filter(|commit| !commit.is_empty()).unwrap_or("unknown");
        let (number, protocol) = (env!("CARGO_PKG_VERSION"), partywall_protocol::wire::VERSION);
        format!(
            "{number}\ncommit: {commit}\nprotocol: control {protocol}, memory {}, directory {}\nfeatures: policy, groups, unmodified programs (TCP, UDP), \
             containers, virtual machines (serial port, memory windows), metrics (OpenMetrics), journal, systemd (readiness, stored descriptors)",
            partywall_shm::layout::VERSION,
            partywall_protocol::directory::VERSION
        )
    });
    &TEXT
}

/// How the log is written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
enum LogFormat {
    /// Lines for people; where systemd's journal reads them, entries with a field for each value, such as PARTYWALL_DOMAIN
    #[default]
    Text,
    /// A JSON object on each line
    Json,
}

/// How the program ends; `--help` lists the codes, and a wrong command line is clap's 2.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Exit {
    System = 1,
    Policy = 3,
    Running = 4,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

impl DaemonArguments {
    pub(crate) fn start_log(&self) {
        let journal = journal::reads_stderr();
        if journal
            && self.log_format == LogFormat::Text
            && let Ok(layer) = Journal::open()
        {
            tracing_subscriber::registry().with(EnvFilter::new(&self.log)).with(layer).init();
            return;
        }
        let log = tracing_subscriber::fmt()
            .with_env_filter(EnvFilter::new(&self.log))
            .with_writer(std::io::stderr)
            // A closed log must not end the program: the report of a failed write would panic.
            .log_internal_errors(false)
            .with_ansi(std::io::stderr().is_terminal())
            .with_target(false);
        match (self.log_format, journal) {
            (LogFormat::Text, false) => log.init(),
            // The journal stamps lines itself.
            (LogFormat::Text, true) => log.without_time().init(),
            (LogFormat::Json, _) => {
                log.json().flatten_event(true).with_current_span(false).with_span_list(false).init()
            }
        }
    }

    /// Whether programs without a setting find the broker of the host instead of this one, which serves its user's default socket.
    pub(crate) fn is_hidden_by(&self, host: &Path, is_root: bool) -> bool {
        self.socket.is_none() && !is_root && host.exists()
    }

    pub(crate) fn config(&self) -> Result<Config, DaemonFailure> {
        let root = rustix::process::geteuid().is_root();
        let socket = match &self.socket {
            Some(path) => path.clone(),
            // Only a policy is wanted: no directory need be made, and none need be known.
            None if self.check_policy => PathBuf::new(),
            None => default_socket(root)?,
        };
        let mode = self.socket_mode.unwrap_or(if root { 0o666 } else { 0o600 });
        let silence = Duration::from_secs(self.machine_silence);
        let mut config =
            Config::new(socket).socket_mode(mode).machine_silence(silence).number_record(&self.number_record);
        config.metrics.clone_from(&self.metrics);
        Ok(match &self.policy {
            Some(path) => config.policy_file(path),
            None if root => config.optional_policy_file(SYSTEM_POLICY),
            None => config,
        })
    }
}

fn default_socket(root: bool) -> Result<PathBuf, DaemonFailure> {
    let (base, mode) = if root {
        (PathBuf::from("/run"), 0o755)
    } else {
        let base = std::env::var_os("XDG_RUNTIME_DIR").ok_or_else(|| DaemonFailure {
            exit: Exit::System,
            message: "XDG_RUNTIME_DIR is not set, so there is no default socket; use --socket PATH".to_owned(),
        })?;
        (PathBuf::from(base), 0o700)
    };
    let dir = base.join("partywall");
    make_dir(&dir, mode)
        .map_err(|e| DaemonFailure { exit: Exit::System, message: format!("cannot create {}: {e}", dir.display()) })?;
    Ok(dir.join("broker.sock"))
}

fn make_dir(dir: &Path, mode: u32) -> std::io::Result<()> {
    match std::fs::DirBuilder::new().mode(mode).create(dir) {
        Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists && dir.is_dir() => Ok(()),
        other => other,
    }
}

fn parse_mode(text: &str) -> Result<u32, String> {
    match u32::from_str_radix(text, 8) {
        Ok(mode) if mode <= 0o777 => Ok(mode),
        _ => Err("not an octal mode such as 660".to_owned()),
    }
}

fn parse_silence(text: &str) -> Result<u64, String> {
    text.parse()
        .ok()
        .filter(|seconds| (1..=3600).contains(seconds))
        .ok_or("write a whole number from 1 to 3600".to_owned())
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
    fn command_line_is_consistent() {
        DaemonArguments::command().debug_assert();
    }

    #[test]
    fn invalid_mode_silence_or_filter_is_rejected() {
        assert_eq!(parse_mode("0660"), Ok(0o660));
        for bad in ["", "9", "1777", "rw", "-1"] {
            assert!(parse_mode(bad).is_err(), "{bad}");
        }
        assert_eq!(parse_silence("3600"), Ok(3600));
        for bad in ["0", "x", "3601"] {
            assert!(parse_silence(bad).unwrap_err().contains("from 1 to 3600"), "{bad}");
        }
        for valid in ["info,partywall_daemon=debug", "OFF", "partywall_daemon", "warn,[span{field=1}]=debug"] {
            assert!(parse_filter(valid).is_ok(), "{valid}");
        }
        for bad in ["a=b=c", "warning", "inf", "info,bogus"] {
            assert!(parse_filter(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn users_broker_is_hidden_by_hosts_unless_socket_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let (host, absent) = (dir.path(), dir.path().join("absent"));
        let named = DaemonArguments::try_parse_from(["partywalld", "--socket", "/run/user/1/own.sock"]).unwrap();
        let unnamed = DaemonArguments::try_parse_from(["partywalld"]).unwrap();
        // The environment of the tests may name a socket.
        let unnamed = DaemonArguments { socket: None, ..unnamed };
        assert!(unnamed.is_hidden_by(host, false));
        assert!(!unnamed.is_hidden_by(&absent, false), "there is no other broker");
        assert!(!unnamed.is_hidden_by(host, true), "it is the broker of the host");
        assert!(!named.is_hidden_by(host, false), "programs need its name anyway");
    }

    #[test]
    fn version_has_commit_protocols_and_features() {
        let text = long_version();
        let commit = option_env!("PARTYWALL_COMMIT").unwrap_or("unknown");
        for part in [
            env!("CARGO_PKG_VERSION"),
            &format!("commit: {commit}"),
            "protocol: control ",
            "features: policy",
            "metrics",
        ] {
            assert!(text.contains(part), "{part} is missing: {text}");
        }
    }

    #[test]
    fn help_tells_codes_and_files() {
        let help = DaemonArguments::command().render_long_help().to_string();
        for word in ["Exit codes", "SIGHUP", "broker.sock", "--check-policy", "PARTYWALL_BROKER"] {
            assert!(help.contains(word), "{word}");
        }
    }
}
