//! Streams that behave as Python's sockets do.
#![expect(unsafe_code, reason = "moves bytes from and to the memory of Python objects")]

use crate::buffer::{ObjectMemory, Piece};
use crate::outcome::{WaitsFor, forked, raised};
use crate::peer::PyPeer;
use crate::slot::{Slot, Timeout};
use crate::{child, options};
use partywall::{Error, PeerInfo, ReadHalf, Stream, WriteHalf};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use std::io::{self, Read, Write};
use std::time::{Duration, Instant};

/// A connection that carries bytes in order.
#[pyclass(name = "Stream", module = "partywall", frozen)]
#[derive(Debug)]
pub(crate) struct PyStream {
    read: Slot<ReadHalf>,
    write: Slot<WriteHalf>,
    timeout: Timeout,
    peer: Option<PeerInfo>,
    channel: Option<u64>,
}

/// The bytes of one call of the library. Between two calls signals are handled, and other threads get the half.
const MOST_AT_ONCE: usize = 64 << 10;

/// The library's error that an error of `std::io` carries.
fn inner(error: io::Error) -> Error {
    match error.downcast::<Error>() {
        Ok(inner) => inner,
        Err(source) => Error::System { doing: "read or write", source },
    }
}

impl PyStream {
    pub(crate) fn new(stream: Stream, peer: Option<PeerInfo>) -> Self {
        let peer = peer.or_else(|| stream.peer().cloned());
        let channel = stream.channel_id();
        let (read, write) = stream.into_halves();
        Self { read: Slot::new(read), write: Slot::new(write), timeout: Timeout::new(), peer, channel }
    }

    fn read_into(&self, py: Python<'_>, piece: Piece) -> PyResult<usize> {
        self.read.wait(py, self.timeout.get(), WaitsFor::Data, |half| {
            // SAFETY: the caller of this method holds the writable `ObjectMemory` until the wait has ended.
            half.read(unsafe { piece.bytes_mut() }).map_err(inner)
        })
    }

    /// Writes the beginning of a piece, at most [`MOST_AT_ONCE`].
    fn write_from(&self, py: Python<'_>, piece: Piece, timeout: Option<Duration>) -> PyResult<usize> {
        let piece = piece.part(0, MOST_AT_ONCE);
        self.write.wait(py, timeout, WaitsFor::Room, |half| {
            // SAFETY: the caller of this method holds the `ObjectMemory` until the wait has ended.
            half.write(unsafe { piece.bytes() }).map_err(inner)
        })
    }
}

#[pymethods]
impl PyStream {
    /// Receives at most `bufsize` bytes; empty at the end of the stream.
    fn recv<'py>(&self, py: Python<'py>, bufsize: usize) -> PyResult<Bound<'py, PyBytes>> {
        let bytes = self.read.wait(py, self.timeout.get(), WaitsFor::Data, |half| {
            // No more memory than there are bytes, whatever the caller allows.
            let there = if bufsize == 0 { 0 } else { half.peek()?.len() };
            let mut bytes = vec![0; there.min(bufsize)];
            let n = half.read(&mut bytes).map_err(inner)?;
            bytes.truncate(n);
            Ok(bytes)
        })?;
        Ok(PyBytes::new(py, &bytes))
    }

    /// Receives into a writable buffer, at most `nbytes` bytes if not 0, and returns how many.
    #[pyo3(signature = (buffer, nbytes=0))]
    fn recv_into(&self, buffer: &Bound<'_, PyAny>, nbytes: usize) -> PyResult<usize> {
        let memory = ObjectMemory::writable(buffer)?;
        let piece = memory.piece();
        self.read_into(buffer.py(), if nbytes == 0 { piece } else { piece.part(0, nbytes) })
    }

    /// Sends bytes, at most 64 KiB of them, and returns how many were taken.
    fn send(&self, data: &Bound<'_, PyAny>) -> PyResult<usize> {
        let memory = ObjectMemory::of(data)?;
        self.write_from(data.py(), memory.piece(), self.timeout.get())
    }

    /// Sends all of the bytes, within one time-out.
    fn sendall(&self, data: &Bound<'_, PyAny>) -> PyResult<()> {
        let memory = ObjectMemory::of(data)?;
        let piece = memory.piece();
        let timeout = self.timeout.get();
        let start = Instant::now();
        let mut done = 0;
        while done < piece.len() {
            let left = timeout.map(|timeout| timeout.saturating_sub(start.elapsed()));
            // To the wait, zero means not to wait at all, which is another error.
            if left == Some(Duration::ZERO) && timeout != left {
                return Err(raised(data.py(), &Error::TimedOut, WaitsFor::Room));
            }
            done += self.write_from(data.py(), piece.part(done, usize::MAX), left)?;
            data.py().check_signals()?;
        }
        Ok(())
    }

    /// Ends receiving (0), sending (1) or both (2): the numbers are `socket.SHUT_RD`, `SHUT_WR` and `SHUT_RDWR`.
    fn shutdown(&self, py: Python<'_>, how: u32) -> PyResult<()> {
        if how > 2 {
            let error = Error::Invalid("how is one of socket.SHUT_RD, SHUT_WR and SHUT_RDWR".into());
            return Err(raised(py, &error, WaitsFor::Data));
        }
        if how != 0 {
            self.write.with(py, WriteHalf::finish)?;
        }
        if how != 1 {
            self.read.with(py, ReadHalf::close)?;
        }
        Ok(())
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

    /// Whether calls wait.
    fn getblocking(&self) -> bool {
        self.timeout.get() != Some(Duration::ZERO)
    }

    /// The descriptor that is readable when receiving is worth repeating; -1 after `close`.
    fn fileno(&self, py: Python<'_>) -> i32 {
        match self.read.number(py, WaitsFor::Data) {
            -1 => self.write.number(py, WaitsFor::Room),
            number => number,
        }
    }

    /// The descriptor that is *readable* when sending is worth repeating; -1 after `close`.
    fn write_fileno(&self, py: Python<'_>) -> i32 {
        self.write.number(py, WaitsFor::Room)
    }

    /// The other side.
    #[getter]
    fn peer(&self) -> Option<PyPeer> {
        PyPeer::from_info(self.peer.as_ref())
    }

    /// The channel's number, as `partywall list` shows it.
    #[getter]
    fn channel_id(&self) -> Option<u64> {
        self.channel
    }

    /// A file object of this stream, with the arguments of `socket.makefile`.
    #[pyo3(signature = (mode="r", buffering=None, *, encoding=None, errors=None, newline=None))]
    fn makefile<'py>(
        this: &Bound<'py, Self>,
        mode: &str,
        buffering: Option<i64>,
        encoding: Option<&str>,
        errors: Option<&str>,
        newline: Option<&str>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let files = this.py().import("partywall._files")?;
        files.call_method1("makefile", (this, mode, buffering, encoding, errors, newline))
    }

    /// Closes the stream: the peer reads what was sent, and then the end.
    fn close(&self, py: Python<'_>) {
        py.detach(|| {
            self.write.close();
            self.read.close();
        });
    }

    fn __enter__(this: Py<Self>) -> Py<Self> {
        this
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyAny>) {
        self.close(py);
    }

    fn __repr__(&self) -> String {
        let peer = self.peer.as_ref().map_or_else(String::new, |peer| format!(" {}:{}", peer.name, peer.service));
        format!("<partywall.Stream{peer}>")
    }
}

/// Two streams of this process that are connected to each other.
#[pyfunction]
#[pyo3(signature = (**choices))]
pub(crate) fn pair(py: Python<'_>, choices: Option<&Bound<'_, PyDict>>) -> PyResult<(PyStream, PyStream)> {
    if child::is_child() {
        return Err(forked(py));
    }
    child::begin_use();
    let options = options::chosen(choices)?;
    let (a, b) = Stream::pair(&options).map_err(|e| raised(py, &e, WaitsFor::Data))?;
    Ok((PyStream::new(a, None), PyStream::new(b, None)))
}
