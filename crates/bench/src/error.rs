//! The errors of a measurement, worded to show their cause.

use std::io;

/// The result of everything in this crate that can fail.
pub(crate) type Result<T, E = BenchError> = std::result::Result<T, E>;

/// Why a measurement, or the whole bench, stopped.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BenchError {
    /// Ctrl-C or a request to terminate; everything started has been removed.
    #[error("interrupted; nothing was left behind")]
    Interrupted,
    /// The command line asks for something that makes no sense.
    #[error("{0}")]
    Usage(String),
    /// This machine cannot run a mechanism; the rest goes on without it.
    #[error("{0}")]
    Unavailable(String),
    /// The operating system refused something.
    #[error("{doing}: {source}")]
    System {
        /// The operation that failed.
        doing: String,
        /// The error of the kernel.
        source: io::Error,
    },
    /// One of the two measuring processes failed.
    #[error("the {side} of {mechanism} failed: {reason}")]
    Role {
        /// The name of that process.
        side: &'static str,
        /// The mechanism that it was measuring.
        mechanism: String,
        /// Its error message, or how it ended.
        reason: String,
    },
    /// Bytes arrived other than they were sent.
    #[error("data damaged on the way: {0}")]
    Damaged(String),
    /// The transport under test reported a fault.
    #[error("{0}")]
    Transport(String),
}

impl BenchError {
    /// A fault of the mechanism under test, with what it said.
    pub(crate) fn transport(doing: &str, fault: impl std::fmt::Display) -> Self {
        Self::Transport(format!("{doing}: {fault}"))
    }
}

/// Adds to a system error what was being done.
pub(crate) trait During<T> {
    /// Adds the operation to an error of the kernel.
    fn during(self, doing: impl Into<String>) -> Result<T>;
}

impl<T, E: Into<io::Error>> During<T> for Result<T, E> {
    fn during(self, doing: impl Into<String>) -> Result<T> {
        self.map_err(|e| BenchError::System { doing: doing.into(), source: e.into() })
    }
}
