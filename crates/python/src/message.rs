//! Message sockets.
#![expect(unsafe_code, reason = "moves messages from and to the memory of Python objects")]

use crate::buffer::ObjectMemory;
use crate::outcome::WaitsFor;
use crate::peer::PyPeer;
use crate::slot::{Slot, Timeout};
use partywall::{MessageSocket, PeerInfo};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// A connection that carries messages, each whole.
#[pyclass(name = "MessageSocket", module = "partywall", frozen)]
#[derive(Debug)]
pub(crate) struct PyMessageSocket {
    socket: Slot<MessageSocket>,
    timeout: Timeout,
    peer: Option<PeerInfo>,
}

impl PyMessageSocket {
    pub(crate) fn new(socket: MessageSocket, peer: Option<PeerInfo>) -> Self {
        Self { socket: Slot::new(Some(socket)), timeout: Timeout::new(), peer }
    }
}

#[pymethods]
impl PyMessageSocket {
    /// Sends one message.
    fn send(&self, message: &Bound<'_, PyAny>) -> PyResult<()> {
        let memory = ObjectMemory::of(message)?;
        let piece = memory.piece();
        self.socket.wait(message.py(), self.timeout.get(), WaitsFor::Room, |socket| {
            // SAFETY: `memory` lives until the wait has ended.
            socket.send(unsafe { piece.bytes() })
        })
    }

    /// Receives one message.
    fn recv<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let message = self.socket.wait(py, self.timeout.get(), WaitsFor::Data, |socket| {
            let mut message = Vec::new();
            socket.recv(&mut message).map(|()| message)
        })?;
        Ok(PyBytes::new(py, &message))
    }

    /// Receives one message into a writable buffer, and returns its length. One that does not fit stays.
    fn recv_into(&self, buffer: &Bound<'_, PyAny>) -> PyResult<usize> {
        let memory = ObjectMemory::writable(buffer)?;
        let piece = memory.piece();
        self.socket.wait(buffer.py(), self.timeout.get(), WaitsFor::Data, |socket| {
            // SAFETY: `memory` is writable and lives until the wait has ended.
            socket.recv_into(unsafe { piece.bytes_mut() })
        })
    }

    /// Ends sending: the peer receives what was sent, and then `Closed`.
    fn finish(&self, py: Python<'_>) -> PyResult<()> {
        self.socket.with(py, MessageSocket::finish)
    }

    /// The longest message that can be sent, in bytes.
    #[getter]
    fn max_message(&self, py: Python<'_>) -> PyResult<usize> {
        self.socket.with(py, |socket| socket.max_message())
    }

    /// Sets the longest wait of a call in seconds; `None` waits for ever, and 0 does not wait.
    fn settimeout(&self, py: Python<'_>, value: Option<f64>) -> PyResult<()> {
        self.timeout.set(py, value)
    }

    /// The longest wait of a call.
    fn gettimeout(&self) -> Option<f64> {
        self.timeout.seconds()
    }

    /// `settimeout(None)` or `settimeout(0)`.
    fn setblocking(&self, py: Python<'_>, flag: bool) -> PyResult<()> {
        self.timeout.set_blocking(py, flag)
    }

    /// The descriptor that is readable when receiving is worth repeating; -1 after `close`.
    fn fileno(&self, py: Python<'_>) -> i32 {
        self.socket.number(py, WaitsFor::Data)
    }

    /// The descriptor that is *readable* when sending is worth repeating; -1 after `close`.
    fn write_fileno(&self, py: Python<'_>) -> i32 {
        self.socket.number(py, WaitsFor::Room)
    }

    /// The other side of an accepted socket.
    #[getter]
    fn peer(&self) -> Option<PyPeer> {
        PyPeer::from_info(self.peer.as_ref())
    }

    /// Closes the socket: the peer receives what was sent, and then `Closed`.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.socket.close());
    }

    fn __enter__(this: Py<Self>) -> Py<Self> {
        this
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyAny>) {
        self.close(py);
    }
}
