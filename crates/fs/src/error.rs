//! What keeps an export or a mount from being made.

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
        /// What was asked for.
        call: String,
        /// Its answer.
        source: io::Error,
    },
    /// The request makes no sense, or is not allowed.
    #[error("{0}")]
    Refused(String),
}

impl FsError {
    /// Names the call that failed.
    pub fn system<E: Into<io::Error>>(call: impl Into<String>) -> impl FnOnce(E) -> Self {
        let call = call.into();
        move |source| Self::System { call, source: source.into() }
    }
}
