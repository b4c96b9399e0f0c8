//! The errors, with their cause and their remedy.

use std::io;
use std::path::{Path, PathBuf};

/// A failure of the switch, or of one of its front ends.
#[derive(Debug, thiserror::Error)]
pub enum VhostError {
    /// The operating system refused a call.
    #[error("cannot {call}: {source}")]
    System {
        /// The call that failed.
        call: &'static str,
        /// Its answer.
        source: io::Error,
    },
    /// A file or socket could not be used.
    #[error("cannot {call} {path}: {source}")]
    File {
        /// The call that failed.
        call: &'static str,
        /// The file.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// The library or the broker.
    #[error(transparent)]
    Partywall(#[from] partywall::Error),
    /// A front end broke the vhost-user protocol.
    #[error("the front end broke the vhost-user protocol: {0}")]
    Protocol(String),
    /// A front end offered memory that the switch does not map.
    #[error("the front end's memory cannot be used: {0}")]
    Memory(String),
    /// A guest's driver wrote something into a queue that no driver may.
    #[error("the guest's driver broke its queue: {0}")]
    Queue(&'static str),
    /// A request on the control socket could not be done.
    #[error("{0}")]
    Refused(String),
    /// The front end has gone.
    #[error("the front end has closed its connection")]
    Closed,
}

impl VhostError {
    pub(crate) fn system(call: &'static str) -> impl FnOnce(rustix::io::Errno) -> Self {
        move |source| Self::System { call, source: source.into() }
    }

    /// The same error, or `what` if no process listens at a socket.
    pub(crate) fn or_absent(self, what: std::fmt::Arguments<'_>) -> Self {
        use io::ErrorKind::{ConnectionRefused, NotFound};
        match self {
            Self::File { source, .. } if matches!(source.kind(), NotFound | ConnectionRefused) => {
                Self::Refused(what.to_string())
            }
            other => other,
        }
    }

    /// Wraps an error of a file or socket.
    pub fn file_error(call: &'static str, path: impl AsRef<Path>) -> impl FnOnce(io::Error) -> Self {
        Self::file(call, path)
    }

    pub(crate) fn file(call: &'static str, path: impl AsRef<Path>) -> impl FnOnce(io::Error) -> Self {
        let path = path.as_ref().to_owned();
        move |source| Self::File { call, path, source }
    }
}
