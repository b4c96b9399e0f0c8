//! The errors of a lab, with their remedies.

use crate::NetworkKind;
use partywall_vm::qmp::QmpError;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Why a lab, an image or a guest did not do what was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LabError {
    /// A tool of the host is missing or failed.
    #[error("{tool} failed: {why}; `make setup` installs what the lab needs")]
    Tool {
        /// The name of the tool.
        tool: String,
        /// The output of the tool, or the reason why it did not start.
        why: String,
    },
    /// A file of the host.
    #[error("cannot {doing} {path}: {source}", path = path.display())]
    File {
        /// The operation that failed.
        doing: &'static str,
        /// The file.
        path: PathBuf,
        /// The error of the kernel.
        source: io::Error,
    },
    /// The kernel package lacks what a guest needs.
    #[error("kernel {kernel} has no module {module}, neither built in nor as a file")]
    Module {
        /// The version of the kernel.
        kernel: String,
        /// The module that it lacks.
        module: String,
    },
    /// A program of ours is not where it belongs.
    #[error("{name} is not beside {beside}; `make build` builds it", beside = beside.display())]
    Program {
        /// The name of the program.
        name: String,
        /// Beside which other.
        beside: PathBuf,
    },
    /// The broker did not start, or refused.
    #[error("broker: {what}\n{log}")]
    Broker {
        /// The message or the action of the broker.
        what: String,
        /// The end of its log.
        log: String,
    },
    /// There is no place left on a network.
    #[error("a network of {kind} takes {most} guests and no more")]
    Full {
        /// How many it has.
        most: u8,
        /// The kind of network.
        kind: NetworkKind,
    },
    /// Transactions have left a database that a condition of consistency does not hold for.
    #[error(
        "the database is not consistent after the load: {broken}; its disks have lost or changed what was durable, or a transaction is wrong"
    )]
    Inconsistent {
        /// The clauses of TPC-C, and the rows that break them.
        broken: String,
    },
    /// A guest did not come up, or went away.
    #[error("guest {guest}: {what}\n{serial}")]
    Guest {
        /// The name of the guest.
        guest: String,
        /// The message of the guest or of its QEMU.
        what: String,
        /// The end of its serial log.
        serial: String,
    },
    /// A guest did not answer in time.
    #[error("guest {guest}: no answer to {what} within {after:?}\n{serial}")]
    Silent {
        /// The name of the guest.
        guest: String,
        /// The operation that was waited for.
        what: String,
        /// How long it was given.
        after: Duration,
        /// The end of its serial log.
        serial: String,
    },
    /// A guest refused a file operation.
    #[error("guest {guest} refused: {why}")]
    Refused {
        /// The name of the guest.
        guest: String,
        /// In its words.
        why: String,
    },
    /// A stream between two guests did not do as expected.
    #[error("stream {name}: {what}\n{said}")]
    Stream {
        /// The name of the stream.
        name: String,
        /// What went wrong.
        what: String,
        /// What its receiver and the library in it said.
        said: String,
    },
    /// A guest's monitor failed or refused a command.
    #[error("guest {guest}: {source}\n{serial}")]
    Monitor {
        /// The name of the guest.
        guest: String,
        /// The answer of the monitor.
        source: QmpError,
        /// The end of its serial log.
        serial: String,
    },
}

impl LabError {
    pub(crate) fn file(doing: &'static str, path: impl AsRef<Path>) -> impl FnOnce(io::Error) -> Self {
        let path = path.as_ref().to_owned();
        move |source| Self::File { doing, path, source }
    }

    pub(crate) fn tool(tool: &str, why: impl ToString) -> Self {
        Self::Tool { tool: tool.to_owned(), why: why.to_string() }
    }
}
