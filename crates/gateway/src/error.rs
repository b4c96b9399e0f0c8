//! Why the gateway cannot start or go on.

use std::io;
use std::path::PathBuf;

/// The reason why the gateway ends, or why an operation failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GatewayError {
    /// A file cannot be read or written.
    #[error("cannot {doing} {}: {source}", path.display())]
    File {
        /// What was tried.
        doing: &'static str,
        /// The file.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// The configuration is wrong.
    #[error("{}: {reason}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// What is wrong, and where.
        reason: String,
    },
    /// A certificate or a key cannot be used.
    #[error("{what}: {reason}")]
    Tls {
        /// What cannot be used.
        what: String,
        /// The reason.
        reason: String,
    },
    /// The broker refuses the gateway, or is gone.
    #[error(transparent)]
    Broker(#[from] partywall::Error),
    /// The directory of the cluster cannot be used.
    #[error("the directory in etcd: {0}")]
    Directory(String),
    /// A system call failed.
    #[error("cannot {doing}: {source}")]
    System {
        /// What was tried.
        doing: &'static str,
        /// The error of the system.
        source: io::Error,
    },
}

impl From<etcd_client::Error> for GatewayError {
    fn from(error: etcd_client::Error) -> Self {
        Self::Directory(error.to_string())
    }
}
