//! Outcomes of calls as exceptions of the package, and the reverse.

use crate::outcome::{self, WaitsFor, exception};
use partywall::rpc::CallError;
use pyo3::prelude::*;

/// The exception for a call without a result.
pub(crate) fn raised(py: Python<'_>, error: CallError) -> PyErr {
    let text = error.to_string();
    let (name, seen) = match error {
        CallError::UnknownMethod => ("UnknownMethod", None),
        CallError::Refused(_) => ("CallRefused", None),
        CallError::Application { code, message } => return application(py, code, &message),
        CallError::BadPointer => ("BadPointer", None),
        CallError::OutOfMemory(_) => ("NoMemory", None),
        CallError::Panicked => ("FunctionFailed", None),
        CallError::TimedOut => ("TimedOut", None),
        CallError::Dead { seen } => ("Dead", Some(seen)),
        CallError::Moved { seen, .. } => ("Moved", Some(seen)),
        CallError::Closed { seen } => ("Closed", Some(seen)),
        CallError::Corrupt(_) => ("Corrupt", None),
        CallError::Connection(inner) => return outcome::raised(py, &inner, WaitsFor::Room),
        _ => ("Error", None),
    };
    let error = exception(py, name, &text);
    if let Some(seen) = seen {
        // Exceptions of classes written in Python take attributes.
        let _ = error.value(py).setattr("seen", seen);
    }
    error
}

fn application(py: Python<'_>, code: u32, message: &str) -> PyErr {
    let class = py.import("partywall._errors").and_then(|errors| errors.getattr("ApplicationError"));
    match class.and_then(|class| class.call1((code, message))) {
        Ok(error) => PyErr::from_value(error),
        Err(e) => e,
    }
}

/// The outcome that an exception of a function stands for; `None` if it is a mistake of the function's.
pub(crate) fn from_exception(py: Python<'_>, error: &PyErr) -> Option<CallError> {
    let errors = py.import("partywall._errors").ok()?;
    let is = |name: &str| errors.getattr(name).is_ok_and(|class| error.matches(py, class).unwrap_or(false));
    let value = error.value(py);
    if is("ApplicationError") {
        let code = value.getattr("code").and_then(|code| code.extract::<u32>());
        let message = value.getattr("message").and_then(|message| message.extract::<String>());
        return Some(CallError::application(code.unwrap_or(0), message.unwrap_or_default()));
    }
    let text = || value.to_string();
    if is("BadPointer") {
        Some(CallError::BadPointer)
    } else if is("NoMemory") || error.is_instance_of::<pyo3::exceptions::PyMemoryError>(py) {
        Some(CallError::OutOfMemory(text()))
    } else if is("CallRefused") {
        Some(CallError::Refused(text()))
    } else {
        None
    }
}
