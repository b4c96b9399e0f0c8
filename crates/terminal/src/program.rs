//! The start and the end of a program: its log, and its exit code.

use std::fmt::Display;
use std::io::Write as _;
use std::process::ExitCode;

use crate::printable_lines;

/// Sends the log to standard error: what `RUST_LOG` asks for, or else lines of this level and above. Once in a process.
pub fn log_to_stderr(level: &str) {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env()
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new(level));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        // A closed log must not end the program: the report of a failed write would panic.
        .log_internal_errors(false)
        .with_target(false)
        .without_time()
        .init();
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
