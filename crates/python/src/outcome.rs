//! Errors of the library as exceptions of the package.

use partywall::{Error, Refusal};
use pyo3::prelude::*;
use pyo3::types::PyType;

/// The event that a call waits for. It decides the exception of [`Error::WouldBlock`].
#[derive(Debug, Clone, Copy)]
pub(crate) enum WaitsFor {
    /// Bytes, a message or a connection.
    Data,
    /// Room in the ring.
    Room,
}

/// The exception with this name, and this text.
pub(crate) fn exception(py: Python<'_>, name: &str, text: &str) -> PyErr {
    let class = || py.import("partywall._errors")?.getattr(name)?.cast_into::<PyType>().map_err(PyErr::from);
    class().map_or_else(|e| e, |class| PyErr::from_type(class, (text.to_owned(),)))
}

/// The exception for a call on what has been closed here.
pub(crate) fn closed_here(py: Python<'_>) -> PyErr {
    exception(py, "Closed", "closed: this object was closed here, or the connection is one-way, the other way")
}

/// The exception for the child of a fork.
pub(crate) fn forked(py: Python<'_>) -> PyErr {
    let text = "this process is the child of a fork: use multiprocessing's start method `spawn`, or fork before the first join";
    exception(py, "Forked", text)
}

/// The exception for an error of a call that waits for `what`.
pub(crate) fn raised(py: Python<'_>, error: &Error, what: WaitsFor) -> PyErr {
    let name = match error {
        Error::WouldBlock => match what {
            WaitsFor::Data => "Empty",
            WaitsFor::Room => "Full",
        },
        Error::Full(_) => "Full",
        Error::TimedOut => "TimedOut",
        Error::Closed(_) | Error::Gone(_) => "Closed",
        Error::Dead { .. } | Error::Lagged => "Dead",
        Error::Moved { .. } => "Moved",
        Error::Corrupt(_) => "Corrupt",
        Error::Accused => "Accused",
        Error::TooLarge { .. } => "TooLarge",
        Error::Invalid(_) => "Invalid",
        Error::BrokerAbsent { .. } | Error::BrokerConfused(_) => "NoBroker",
        Error::Refused { code, .. } => match code {
            Refusal::NoSuchDomain | Refusal::NoSuchService => "NotFound",
            Refusal::Denied | Refusal::NameTaken => "Denied",
            Refusal::ServiceTaken => "InUse",
            _ => "Refused",
        },
        Error::Memory(_) => "NoMemory",
        _ => "Error",
    };
    exception(py, name, &error.to_string())
}
