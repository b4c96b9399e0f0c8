//! Calling functions of other processes.
#![expect(unsafe_code, reason = "passes the memory of Python objects as arguments")]

use crate::block::{self, PyBlock, PyPeerView, ViewOrigin};
use crate::buffer::ObjectMemory;
use crate::call_error;
use crate::child;
use crate::outcome::{exception, forked};
use crate::peer::PyPeer;
use crate::slot::{self, Slot};
use partywall::rpc::{CallClient, CallError, Method, Ongoing, Reply};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

/// The longest wait between two looks for a signal.
const LOOK: Duration = Duration::from_millis(50);

/// A method by its name or number.
#[derive(FromPyObject)]
pub(crate) enum MethodArgument {
    Numbered(u32),
    Named(String),
}

impl MethodArgument {
    pub(crate) fn method(&self) -> Method {
        match self {
            Self::Numbered(number) => Method::numbered(*number),
            Self::Named(name) => Method::named(name),
        }
    }
}

/// When a wait of `timeout` seconds is over; `None`: never.
fn deadline(py: Python<'_>, timeout: Option<f64>) -> PyResult<Option<Instant>> {
    Ok(slot::timeout(py, timeout)?.and_then(|timeout| Instant::now().checked_add(timeout)))
}

/// The time left until `deadline`, but at most until the next look for a signal.
fn slice(deadline: Option<Instant>) -> Duration {
    deadline.map_or(LOOK, |deadline| deadline.saturating_duration_since(Instant::now()).min(LOOK))
}

fn is_late(deadline: Option<Instant>) -> bool {
    deadline.is_some_and(|deadline| Instant::now() >= deadline)
}

/// Begins a call, however long that takes to be possible.
fn start(
    py: Python<'_>,
    client: &CallClient,
    method: Method,
    arguments: &ObjectMemory,
    deadline: Option<Instant>,
) -> PyResult<Ongoing> {
    let piece = arguments.piece();
    loop {
        // SAFETY: `arguments` lives until this returns.
        match py.detach(|| client.start_within(slice(deadline), method, unsafe { piece.bytes() })) {
            Ok(mut ongoing) => {
                ongoing.set_timeout(deadline.map(|deadline| deadline.saturating_duration_since(Instant::now())));
                return Ok(ongoing);
            }
            Err(CallError::TimedOut) if !is_late(deadline) => py.check_signals()?,
            Err(e) => return Err(call_error::raised(py, e)),
        }
    }
}

/// A connection to a server of calls.
#[pyclass(name = "CallClient", module = "partywall", frozen)]
#[derive(Debug)]
pub(crate) struct PyCallClient {
    client: Slot<CallClient>,
    peer: PyPeer,
}

impl PyCallClient {
    pub(crate) fn new(client: CallClient) -> Self {
        let peer = PyPeer { info: client.peer().clone() };
        Self { client: Slot::new(Some(client)), peer }
    }

    fn client(&self, py: Python<'_>) -> PyResult<CallClient> {
        self.client.with(py, |client| client.clone())
    }
}

#[pymethods]
impl PyCallClient {
    /// Calls a method and waits for its result, at most `timeout` seconds.
    #[pyo3(signature = (method, args=None, timeout=None))]
    fn call(
        &self,
        py: Python<'_>,
        method: MethodArgument,
        args: Option<&Bound<'_, PyAny>>,
        timeout: Option<f64>,
    ) -> PyResult<PyPeerView> {
        self.start(py, method, args, timeout)?.result(py)
    }

    /// Begins a call and does not wait for its result.
    #[pyo3(signature = (method, args=None, timeout=None))]
    fn start(
        &self,
        py: Python<'_>,
        method: MethodArgument,
        args: Option<&Bound<'_, PyAny>>,
        timeout: Option<f64>,
    ) -> PyResult<PyOngoing> {
        let client = self.client(py)?;
        let arguments = args.map_or_else(|| Ok(ObjectMemory::empty()), ObjectMemory::of)?;
        let ongoing = start(py, &client, method.method(), &arguments, deadline(py, timeout)?)?;
        let (ongoing, waiting) = (Mutex::new(Some(ongoing)), Mutex::default());
        Ok(PyOngoing { ongoing, waiting, is_cancelled: AtomicBool::new(false) })
    }

    /// Calls a method whose result is not wanted.
    #[pyo3(signature = (method, args=None))]
    fn notify(&self, py: Python<'_>, method: MethodArgument, args: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let client = self.client(py)?;
        let arguments = args.map_or_else(|| Ok(ObjectMemory::empty()), ObjectMemory::of)?;
        let piece = arguments.piece();
        loop {
            // SAFETY: `arguments` lives until this returns.
            match py.detach(|| client.notify_within(LOOK, method.method(), unsafe { piece.bytes() })) {
                Ok(()) => return Ok(()),
                Err(CallError::TimedOut) => py.check_signals()?,
                Err(e) => return Err(call_error::raised(py, e)),
            }
        }
    }

    /// Allocates memory that is passed to the server without a copy.
    #[pyo3(signature = (size, alignment=1))]
    fn allocate(&self, py: Python<'_>, size: usize, alignment: usize) -> PyResult<PyBlock> {
        block::allocate(py, self.client(py)?.heap(), size, alignment)
    }

    /// What this side's heap has, and what of it is in use.
    fn heap_stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        block::stats(py, self.client(py)?.heap())
    }

    /// `size` bytes at an address of the server's, which an earlier result contained.
    fn follow(&self, py: Python<'_>, address: u64, size: u64) -> PyResult<PyPeerView> {
        let view = self.client(py)?.follow(address, size).map_err(|e| call_error::raised(py, e))?;
        Ok(PyPeerView::new(ViewOrigin::Peer(view)))
    }

    /// Who serves.
    #[getter]
    fn peer(&self) -> PyPeer {
        PyPeer { info: self.peer.info.clone() }
    }

    /// Closes the connection, once all results are released.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.client.close());
    }

    fn __enter__(this: Py<Self>) -> Py<Self> {
        this
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyAny>) {
        self.close(py);
    }
}

/// A call under way.
#[pyclass(name = "Ongoing", module = "partywall", frozen)]
#[derive(Debug)]
pub(crate) struct PyOngoing {
    ongoing: Mutex<Option<Ongoing>>,
    /// The thread that has the call in its hands. It may be executing a call back, in which the call cannot be waited for.
    waiting: Mutex<Option<ThreadId>>,
    is_cancelled: AtomicBool,
}

enum WaitResult {
    Done(Reply),
    NotYet,
    Failed(CallError),
    Over,
}

impl PyOngoing {
    fn wait(&self, py: Python<'_>, longest: Duration) -> WaitResult {
        let this = std::thread::current().id();
        let waiting = || self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        if *waiting() == Some(this) {
            let why = "a function that is called back cannot wait for the call in which it is called";
            return WaitResult::Failed(CallError::Refused(why.into()));
        }
        py.detach(|| {
            let mut ongoing = self.ongoing.lock().unwrap_or_else(PoisonError::into_inner);
            if self.is_cancelled.load(Ordering::Acquire) {
                *ongoing = None;
            }
            let Some(call) = ongoing.as_mut() else { return WaitResult::Over };
            *waiting() = Some(this);
            let waited = call.wait_for(longest);
            *waiting() = None;
            match waited {
                Ok(None) => WaitResult::NotYet,
                Ok(Some(reply)) => {
                    *ongoing = None;
                    WaitResult::Done(reply)
                }
                Err(e) => {
                    *ongoing = None;
                    WaitResult::Failed(e)
                }
            }
        })
    }
}

impl Drop for PyOngoing {
    fn drop(&mut self) {
        if child::is_child() {
            // Without the lock: a thread of the parent may have held it at the fork.
            std::mem::forget(self.ongoing.get_mut().unwrap_or_else(PoisonError::into_inner).take());
        }
    }
}

#[pymethods]
impl PyOngoing {
    /// Waits for the result. It can be taken once.
    fn result(&self, py: Python<'_>) -> PyResult<PyPeerView> {
        if child::is_child() {
            return Err(forked(py));
        }
        loop {
            match self.wait(py, LOOK) {
                WaitResult::Done(reply) => return Ok(PyPeerView::new(ViewOrigin::Reply(reply))),
                WaitResult::NotYet => py.check_signals()?,
                WaitResult::Failed(e) => return Err(call_error::raised(py, e)),
                WaitResult::Over => {
                    return Err(exception(py, "Invalid", "the call was cancelled, or its result was taken before"));
                }
            }
        }
    }

    /// Gives the call up. The server may still execute it; its result is dropped.
    fn cancel(&self) {
        self.is_cancelled.store(true, Ordering::Release);
        // A thread that waits for the result sees the flag.
        if let Ok(mut ongoing) = self.ongoing.try_lock() {
            let call = ongoing.take();
            if child::is_child() {
                std::mem::forget(call);
            }
        }
    }
}
