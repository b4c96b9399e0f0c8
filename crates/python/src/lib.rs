//! The library for Python: what `partywall` offers for streams, messages and calls, as the native part of the package `partywall`.
//!
//! The package's Python files (`python/partywall`) define the exceptions, file objects and coroutines. This crate has no protocol logic: it
//! waits without the interpreter's lock (`slot.rs`), and turns errors into exceptions (`outcome.rs`).

mod block;
mod buffer;
mod call_error;
mod calling;
mod child;
mod domain;
mod export;
mod listener;
mod message;
mod options;
mod outcome;
mod peer;
mod serving;
mod slot;
mod stream;

use pyo3::prelude::*;

/// The native part of the package.
#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<domain::PyDomain>()?;
    module.add_class::<peer::PyPeer>()?;
    module.add_class::<stream::PyStream>()?;
    module.add_class::<listener::PyListener>()?;
    module.add_class::<message::PyMessageSocket>()?;
    module.add_class::<listener::PyMessageListener>()?;
    module.add_class::<calling::PyCallClient>()?;
    module.add_class::<calling::PyOngoing>()?;
    module.add_class::<serving::PyCallServer>()?;
    module.add_class::<serving::PyIncomingCall>()?;
    module.add_class::<block::PyBlock>()?;
    module.add_class::<block::PyPeerView>()?;
    module.add_function(wrap_pyfunction!(serving::stop_servers, module)?)?;
    module.add_function(wrap_pyfunction!(stream::pair, module)?)?;
    module.add_function(wrap_pyfunction!(child::mark_child, module)?)?;
    module.add("__version__", env!("CARGO_PKG_VERSION"))
}
