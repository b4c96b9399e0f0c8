//! Services that streams and message sockets connect to: two classes that differ in what they accept.

use crate::message::PyMessageSocket;
use crate::outcome::WaitsFor;
use crate::peer::PyPeer;
use crate::slot::{Slot, Timeout};
use crate::stream::PyStream;
use partywall::{Listener, MessageListener};
use pyo3::prelude::*;

/// PyO3 takes one block of methods for each class, and no generic classes, so both blocks are made here.
macro_rules! listener {
    ($(#[$meta:meta])* $class:ident, $name:literal, $listener:ident, $accepted:ident) => {
        $(#[$meta])*
        #[pyclass(name = $name, module = "partywall", frozen)]
        #[derive(Debug)]
        pub(crate) struct $class {
            listener: Slot<$listener>,
            timeout: Timeout,
        }

        impl $class {
            pub(crate) fn new(listener: $listener) -> Self {
                Self { listener: Slot::new(Some(listener)), timeout: Timeout::new() }
            }
        }

        #[pymethods]
        impl $class {
            /// Waits for a connection, and returns it with its peer.
            fn accept(&self, py: Python<'_>) -> PyResult<($accepted, PyPeer)> {
                let (accepted, peer) = self.listener.wait(py, self.timeout.get(), WaitsFor::Data, $listener::accept)?;
                Ok(($accepted::new(accepted, Some(peer.clone())), PyPeer { info: peer }))
            }

            /// Sets the longest wait of `accept` in seconds; `None` waits for ever, and 0 does not wait.
            fn settimeout(&self, py: Python<'_>, value: Option<f64>) -> PyResult<()> {
                self.timeout.set(py, value)
            }

            /// The longest wait of `accept`.
            fn gettimeout(&self) -> Option<f64> {
                self.timeout.seconds()
            }

            /// `settimeout(None)` or `settimeout(0)`.
            fn setblocking(&self, py: Python<'_>, flag: bool) -> PyResult<()> {
                self.timeout.set_blocking(py, flag)
            }

            /// The descriptor that is readable when there is a connection; -1 after `close`. It changes when the broker goes away and when it is
            /// back.
            fn fileno(&self, py: Python<'_>) -> i32 {
                self.listener.number(py, WaitsFor::Data)
            }

            /// Withdraws the service. Accepted connections stay.
            fn close(&self, py: Python<'_>) {
                py.detach(|| self.listener.close());
            }

            fn __enter__(this: Py<Self>) -> Py<Self> {
                this
            }

            #[pyo3(signature = (*_exception))]
            fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyAny>) {
                self.close(py);
            }
        }
    };
}

listener! {
    /// A service that streams connect to.
    PyListener, "Listener", Listener, PyStream
}

listener! {
    /// A service that message sockets connect to.
    PyMessageListener, "MessageListener", MessageListener, PyMessageSocket
}
