//! The errors of making an export or a mount.

use std::io;

/// A failure of the program, not of a request: those fail with an errno.
#[derive(Debug, thiserror::Error)]
pub enum FsError {
    /// The library or the broker.
    #[error(transparent)]
    Partywall(#[from] partywall::Error),
    /// The operating system refused a call.
    #[error("cannot {call}: {source}")]
    System {
        /// The call that failed.
        call: String,
        /// Its answer.
        source: io::Error,
    },
    /// The request makes no sense, or is not allowed.
    #[error("{0}")]
    Refused(String),
}

impl FsError {
    /// Wraps an error with the name of the call that failed.
    pub fn system<E: Into<io::Error>>(call: impl Into<String>) -> impl FnOnce(E) -> Self {
        let call = call.into();
        move |source| Self::System { call, source: source.into() }
    }
}
