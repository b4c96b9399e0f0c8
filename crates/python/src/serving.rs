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
use crate::outcome::{exception, forked};
use crate::peer::PyPeer;
use crate::slot::{self, Slot};
use partywall::rpc::{CallAnswer, CallClientBuilder, CallError, CallServer, CallServerBuilder, IncomingCall, PeerView};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::ptr::NonNull;
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

/// Offers functions to the server that a client connects to. The thread that waits for a call executes them, which is one of the
/// interpreter's own.
pub(crate) fn with_functions_of_client(
    mut builder: CallClientBuilder,
    methods: &Bound<'_, PyDict>,
) -> PyResult<CallClientBuilder> {
    for (name, function) in methods {
        let (method, function) = (name.extract::<MethodArgument>()?, function.unbind());
        let serve = move |call: &IncomingCall<'_>| Python::attach(|py| answer(py, function.bind(py), call));
        builder = match method {
            MethodArgument::Named(name) => builder.method(&name, serve),
            MethodArgument::Numbered(_) => builder.numbered(method.method(), serve),
        };
    }
    Ok(builder)
}

/// Ends the loan of a call to its Python object, also if the function panics.
struct Loan<'a, 'py> {
    py: Python<'py>,
    lent: &'a LentCall,
}

impl Drop for Loan<'_, '_> {
    fn drop(&mut self) {
        if let Ok(mut lent) = self.lent.0.try_lock() {
            *lent = None;
            return;
        }
        // Another thread calls back now. It needs the interpreter's lock afterwards.
        self.py.detach(|| *self.lent.0.lock().unwrap_or_else(PoisonError::into_inner) = None);
    }
}

fn answer(py: Python<'_>, function: &Bound<'_, PyAny>, call: &IncomingCall<'_>) -> Result<CallAnswer, CallError> {
    let lent = LentCall::new(call);
    let _loan = Loan { py, lent: &lent };
    let incoming = PyIncomingCall { call: call.to_owned(), lent: lent.clone() };
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

/// The call that a function executes, while it does so: calls back are made by it.
#[derive(Debug, Clone)]
struct LentCall(Arc<Mutex<Option<CallPointer>>>);

#[derive(Debug)]
struct CallPointer(NonNull<IncomingCall<'static>>);

// SAFETY: `IncomingCall` is `Send` and `Sync`, which `assert_shared` checks.
unsafe impl Send for CallPointer {}

const fn assert_shared<T: Send + Sync>() {}
const _: () = assert_shared::<IncomingCall<'static>>();

impl LentCall {
    fn new(call: &IncomingCall<'_>) -> Self {
        Self(Arc::new(Mutex::new(Some(CallPointer(NonNull::from(call).cast())))))
    }

    /// Calls back. `None`: the function has returned.
    fn call_back(&self, call_back: impl FnOnce(&IncomingCall<'_>) -> CallBackResult) -> Option<CallBackResult> {
        let lent = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: `answer` borrows the call longer than its `Loan` lives, which takes the pointer away under this lock. So the call is there
        // as long as the lock is held, and the borrow that is made of it ends before.
        lent.as_ref().map(|call| call_back(unsafe { call.0.as_ref() }))
    }
}

type CallBackResult = Result<PeerView, CallError>;

/// A call, as the function sees it that executes it.
#[pyclass(name = "IncomingCall", module = "partywall", frozen)]
#[derive(Debug)]
pub(crate) struct PyIncomingCall {
    call: IncomingCall<'static>,
    lent: LentCall,
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

    /// Calls a function of the client while the client waits for this call, and waits for its result, at most `timeout` seconds.
    #[pyo3(signature = (method, args=None, timeout=None))]
    fn call_back(
        &self,
        py: Python<'_>,
        method: MethodArgument,
        args: Option<&Bound<'_, PyAny>>,
        timeout: Option<f64>,
    ) -> PyResult<PyPeerView> {
        if child::is_child() {
            return Err(forked(py));
        }
        let timeout = slot::timeout(py, timeout)?;
        let arguments = args.map_or_else(|| Ok(ObjectMemory::empty()), ObjectMemory::of)?;
        let (piece, method) = (arguments.piece(), method.method());
        // One wait without looks for signals: a call back whose time is up cannot be waited for again, and threads of servers get no signals.
        let result = py.detach(|| {
            self.lent.call_back(|call| {
                // SAFETY: `arguments` lives until this returns.
                let bytes = unsafe { piece.bytes() };
                match timeout {
                    Some(longest) => call.call_back_within(longest, method, bytes),
                    None => call.call_back(method, bytes),
                }
            })
        });
        let returned = || exception(py, "CallRefused", "the function has returned, so its call cannot call back");
        let view = result.ok_or_else(returned)?.map_err(|e| call_error::raised(py, e))?;
        Ok(PyPeerView::new(ViewOrigin::Peer(view)))
    }

    /// Allocates memory for a result that the client reads in place.
    #[pyo3(signature = (size, alignment=1))]
    fn allocate(&self, py: Python<'_>, size: usize, alignment: usize) -> PyResult<PyBlock> {
        block::allocate(py, self.call.heap(), size, alignment)
    }
}
