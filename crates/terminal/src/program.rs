//! The start and the end of a program: its log, and its exit code.

use std::fmt::Display;
use std::io::{IsTerminal as _, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::process::ExitCode;

use tracing_subscriber::Layer as _;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

use crate::flood::FloodLimit;
use crate::{printable, printable_lines};

/// Sends the log of a command to standard error: what `RUST_LOG` asks for, or else lines of this level and above. Once in a process.
///
/// A place in the program that writes very many lines is cut off for some seconds, with one line about it. If the lines are about one peer, only
/// those about that peer are cut off.
pub fn log_to_stderr(level: &str) {
    start_log(level, false);
}

/// As [`log_to_stderr`], for a program that runs for long: lines have the time, except in systemd's journal, which adds it.
pub fn log_of_service_to_stderr(level: &str) {
    start_log(level, !is_read_by_journal());
}

/// Whether systemd's journal reads standard error. It names the device and the inode of its stream.
fn is_read_by_journal() -> bool {
    let stream = std::env::var("JOURNAL_STREAM").unwrap_or_default();
    std::fs::metadata("/proc/self/fd/2").is_ok_and(|file| stream == format!("{}:{}", file.dev(), file.ino()))
}

fn start_log(level: &str, times: bool) {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env()
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new(level));
    let limit = FloodLimit::new(|place, peer| {
        let (file, line) = (place.file().unwrap_or_default(), place.line().unwrap_or_default());
        let of = peer.map(|peer| format!(" about {}", printable(peer))).unwrap_or_default();
        let _ = writeln!(
            std::io::stderr(),
            " WARN more lines like the last{of} are left out for some seconds ({file}:{line})"
        );
    });
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        // A closed log must not end the program: the report of a failed write would panic.
        .log_internal_errors(false)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false);
    let lines = if times { lines.boxed() } else { lines.without_time().boxed() };
    tracing_subscriber::registry().with(filter).with(limit).with(lines).init();
}

/// The exit code of a program. An error is shown on standard error under the program's name.
pub fn end<E: Display>(program: &str, outcome: Result<(), E>) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "{program}: {}", printable_lines(&error.to_string()));
            ExitCode::FAILURE
        }
    }
}
