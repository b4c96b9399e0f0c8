//! `partywalld`: the broker as a program. A command line, signals, a log and word to systemd around a [`Server`].

mod cli;
mod journal;
mod manual;
mod notify;

use std::io::Write as _;
use std::path::Path;
use std::process::ExitCode;

use clap::Parser as _;
use partywall_daemon::policy::{Policy, PolicyError};
use partywall_daemon::{Config, Server, ServerControl, StartError};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use cli::{DaemonArguments, Exit};

fn main() -> ExitCode {
    let arguments = DaemonArguments::parse();
    arguments.start_log();
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            tracing::error!("{}", failure.message);
            failure.exit.into()
        }
    }
}

/// Why the program ends otherwise than by a signal.
struct DaemonFailure {
    exit: Exit,
    message: String,
}

fn run(arguments: &DaemonArguments) -> Result<(), DaemonFailure> {
    if arguments.print_sample_policy {
        return print(manual::SAMPLE_POLICY.as_bytes());
    }
    if let Some(page) = arguments.print_manual {
        let made = manual::page(page);
        let failed = |e| DaemonFailure { exit: Exit::System, message: format!("cannot make the manual page: {e}") };
        return print(&made.map_err(failed)?);
    }
    if let Some(shell) = arguments.print_completions {
        return print(&manual::completions(shell));
    }
    let config = arguments.config()?;
    if arguments.check_policy {
        let policy = config.policy()?;
        let lines = match config.present_policy_file() {
            Some(path) => {
                let warnings = policy.warnings().into_iter().map(|warning| format!("warning: {warning}"));
                let lines = warnings.chain(["a good policy".to_owned()]);
                lines.map(|line| format!("{}: {line}\n", path.display())).collect()
            }
            None => {
                "no policy file: the user who runs the broker and root may do everything, others nothing\n".to_owned()
            }
        };
        return print(lines.as_bytes());
    }
    // Before anything can be waited for: a signal must not find the default action.
    let signals = Signals::new([SIGTERM, SIGINT, SIGHUP]).map_err(StartError::from)?;
    let mut server = Server::open(&config)?;
    tracing::info!(socket = %server.path().display(), policy = %describe(&config), "serving");
    if let Some(port) = server.metrics_port() {
        tracing::info!("metrics at http://{port}/metrics");
    }
    if arguments.is_hidden_by(Path::new(cli::HOST_SOCKET), rustix::process::geteuid().is_root()) {
        tracing::warn!(
            "programs find the broker of the host first, at {}; for this one set PARTYWALL_BROKER={}",
            cli::HOST_SOCKET,
            server.path().display()
        );
    }
    let control = server.control();
    let obedient = control.clone();
    std::thread::Builder::new()
        .name("signals".to_owned())
        .spawn(move || obey(signals, &obedient, &config))
        .map_err(StartError::from)?;
    let reporter = notify::Reporter::start(control).map_err(StartError::from)?;
    // Only this thread: the processes and threads that the server has made already stay as they are.
    let ended = server.run_urgently(|_| reporter.changed());
    notify::stopping();
    drop(server);
    tracing::info!("stopped");
    ended.map_err(|e| StartError::from(e).into())
}

fn print(bytes: &[u8]) -> Result<(), DaemonFailure> {
    match std::io::stdout().write_all(bytes) {
        // A pager that has seen enough.
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        written => written.map_err(|e| DaemonFailure {
            exit: Exit::System,
            message: format!("cannot write to standard output: {e}"),
        }),
    }
}

/// Does what signals ask for, until one asks to stop.
fn obey(mut signals: Signals, control: &ServerControl, config: &Config) {
    for signal in signals.forever() {
        match (signal, &config.policy_file) {
            (SIGHUP, None) => tracing::warn!("SIGHUP: there is no policy file to load; start with --policy"),
            (SIGHUP, Some(path)) => match Policy::read(path) {
                Ok(policy) => {
                    control.set_policy(policy);
                    tracing::info!(policy = %path.display(), "SIGHUP: loaded the policy");
                }
                Err(error) => tracing::error!("SIGHUP: kept the old policy, because {error}"),
            },
            _ => {
                control.stop();
                // After it: a reader of the log that does not read must not keep the broker from stopping.
                tracing::info!(signal, "stopping; open channels go on");
                return;
            }
        }
    }
}

fn describe(config: &Config) -> String {
    match config.present_policy_file() {
        Some(path) => path.display().to_string(),
        None => "own user and root".to_owned(),
    }
}

impl From<PolicyError> for DaemonFailure {
    fn from(error: PolicyError) -> Self {
        Self { exit: Exit::Policy, message: error.to_string() }
    }
}

impl From<StartError> for DaemonFailure {
    fn from(error: StartError) -> Self {
        let exit = match error {
            StartError::Running { .. } => Exit::Running,
            StartError::Policy(_) => Exit::Policy,
            _ => Exit::System,
        };
        Self { exit, message: error.to_string() }
    }
}
