//! Serving calls with functions of Python.
#![expect(
    unsafe_code,
    reason = "keeps the interpreter's state of a thread, and takes the memory of Python objects as results"
)]

use crate::block::{self, PyBlock, PyPeerView, ViewOrigin};
use crate::buffer::ObjectMemory;
use crate::call_error;
use crate::calling::MethodArgument;
use crate::child;
use crate::peer::PyPeer;
use crate::slot::Slot;
use partywall::rpc::{CallAnswer, CallError, CallServer, CallServerBuilder, IncomingCall};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// The interpreter's state of a thread of the library's. Without it the interpreter would make one for each call, and throw it away.
struct ThreadState {
    state: *mut ffi::PyThreadState,
    before: ffi::PyGILState_STATE,
}

impl ThreadState {
    fn make() -> Self {
        // SAFETY: the interpreter runs as long as a server does (`stop_servers`). The thread has the interpreter's lock between the calls.
        unsafe {
            let before = ffi::PyGILState_Ensure();
            Self { state: ffi::PyEval_SaveThread(), before }
        }
    }
}

impl Drop for ThreadState {
    fn drop(&mut self) {
        // SAFETY: as above: a server that stops waits for its threads. The state is this thread's, which `make` has saved.
        unsafe {
            ffi::PyEval_RestoreThread(self.state);
            ffi::PyGILState_Release(self.before);
        }
    }
}

thread_local! {
    static STATE: ThreadState = ThreadState::make();
}

/// Servers that run, to be stopped before the interpreter ends.
static SERVERS: Mutex<Vec<Weak<Slot<CallServer>>>> = Mutex::new(Vec::new());

/// A service of calls. Each client has a thread.
#[pyclass(name = "CallServer", module = "partywall", frozen)]
#[derive(Debug)]
pub(crate) struct PyCallServer {
    server: Arc<Slot<CallServer>>,
}

/// Offers functions: a dictionary of functions by their names or numbers.
pub(crate) fn with_functions(
    mut builder: CallServerBuilder,
    methods: &Bound<'_, PyDict>,
) -> PyResult<CallServerBuilder> {
    for (name, function) in methods {
        let (method, function) = (name.extract::<MethodArgument>()?, function.unbind());
        let serve =
            move |call: &IncomingCall<'_>| STATE.with(|_| Python::attach(|py| answer(py, function.bind(py), call)));
        builder = match method {
            MethodArgument::Named(name) => builder.method(&name, serve),
            MethodArgument::Numbered(_) => builder.numbered(method.method(), serve),
        };
    }
    Ok(builder)
}

fn answer(py: Python<'_>, function: &Bound<'_, PyAny>, call: &IncomingCall<'_>) -> Result<CallAnswer, CallError> {
    let incoming = PyIncomingCall { call: call.to_owned() };
    let result = function.call1((incoming,)).and_then(|result| answer_of(py, &result, call));
    result.map_err(|error| {
        call_error::from_exception(py, &error).unwrap_or_else(|| {
            // The program's author sees what went wrong, and the client that something did.
            error.write_unraisable(py, Some(function));
            CallError::Panicked
        })
    })
}

fn answer_of(py: Python<'_>, result: &Bound<'_, PyAny>, call: &IncomingCall<'_>) -> PyResult<CallAnswer> {
    if result.is_none() {
        return Ok(().into());
    }
    if let Ok(block) = result.cast::<PyBlock>() {
        return Ok(block.get().take(py)?.into());
    }
    let memory = ObjectMemory::of(result)?;
    // SAFETY: `memory` lives until this returns.
    let bytes = unsafe { memory.piece().bytes() };
    if bytes.len() <= 40 {
        return Ok(bytes.to_vec().into());
    }
    let failed = |e: partywall::Error| call_error::raised(py, e.into());
    let mut block = py.detach(|| call.heap().allocate(bytes.len())).map_err(failed)?;
    block.copy_from_slice(bytes);
    Ok(block.into())
}

impl PyCallServer {
    pub(crate) fn new(server: CallServer) -> Self {
        let server = Arc::new(Slot::new(Some(server)));
        let mut servers = SERVERS.lock().unwrap_or_else(PoisonError::into_inner);
        servers.retain(|server| server.strong_count() > 0);
        servers.push(Arc::downgrade(&server));
        Self { server }
    }
}

impl Drop for PyCallServer {
    fn drop(&mut self) {
        // Calls under way need the interpreter's lock to end.
        Python::attach(|py| self.close(py));
    }
}

#[pymethods]
impl PyCallServer {
    /// How many clients are connected.
    #[getter]
    fn clients(&self, py: Python<'_>) -> PyResult<usize> {
        self.server.with(py, |server| server.clients())
    }

    /// Closes all connections and waits for the calls under way.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.server.close());
    }

    fn __enter__(this: Py<Self>) -> Py<Self> {
        this
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyAny>) {
        self.close(py);
    }
}

/// Called before the interpreter ends (`atexit`).
#[pyfunction]
pub(crate) fn stop_servers(py: Python<'_>) {
    let servers = std::mem::take(&mut *SERVERS.lock().unwrap_or_else(PoisonError::into_inner));
    if !child::is_child() {
        py.detach(|| servers.iter().filter_map(Weak::upgrade).for_each(|server| server.close()));
    }
}

/// A call, as the function sees it that executes it.
#[pyclass(name = "IncomingCall", module = "partywall", frozen)]
#[derive(Debug)]
pub(crate) struct PyIncomingCall {
    call: IncomingCall<'static>,
}

#[pymethods]
impl PyIncomingCall {
    /// The arguments. They are the client's to change once the function has returned.
    #[getter]
    fn args(&self) -> PyPeerView {
        PyPeerView::new(ViewOrigin::Peer(self.call.args().clone()))
    }

    /// The number of the method.
    #[getter]
    fn method(&self) -> u32 {
        self.call.method().number()
    }

    /// Who calls.
    #[getter]
    fn peer(&self) -> PyPeer {
        PyPeer { info: self.call.peer().clone() }
    }

    /// `size` bytes at an address of the client's.
    fn follow(&self, py: Python<'_>, address: u64, size: u64) -> PyResult<PyPeerView> {
        let view = self.call.follow(address, size).map_err(|e| call_error::raised(py, e))?;
        Ok(PyPeerView::new(ViewOrigin::Peer(view)))
    }

    /// Allocates memory for a result that the client reads in place.
    #[pyo3(signature = (size, alignment=1))]
    fn allocate(&self, py: Python<'_>, size: usize, alignment: usize) -> PyResult<PyBlock> {
        block::allocate(py, self.call.heap(), size, alignment)
    }
}
