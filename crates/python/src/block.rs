//! Memory of a heap, and memory of a peer's heap.
#![expect(unsafe_code, reason = "exports buffers, and offers the peer's memory in place to those who trust it")]

use crate::buffer::ObjectMemory;
use crate::call_error;
use crate::child;
use crate::export::Exported;
use crate::outcome::{WaitsFor, exception, forked, raised};
use partywall::rpc::{Block, Heap, PeerView, Reply};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyMemoryView};
use std::ffi::c_int;

/// Memory of this side's heap, which the peer reads in place.
#[pyclass(name = "Block", module = "partywall", frozen)]
#[derive(Debug)]
pub(crate) struct PyBlock {
    memory: Exported<Block>,
}

/// Allocates from a heap.
pub(crate) fn allocate(py: Python<'_>, heap: &Heap, size: usize, alignment: usize) -> PyResult<PyBlock> {
    if child::is_child() {
        return Err(forked(py));
    }
    let block = py.detach(|| heap.allocate_aligned(size, alignment)).map_err(|e| raised(py, &e, WaitsFor::Room))?;
    Ok(PyBlock { memory: Exported::new(block) })
}

/// The size of a heap, and the part of it in use.
pub(crate) fn stats<'py>(py: Python<'py>, heap: &Heap) -> PyResult<Bound<'py, PyDict>> {
    let stats = heap.stats();
    let named = PyDict::new(py);
    named.set_item("segments", stats.segments)?;
    named.set_item("bytes", stats.bytes)?;
    named.set_item("blocks", stats.blocks)?;
    named.set_item("bytes_used", stats.bytes_used)?;
    Ok(named)
}

impl PyBlock {
    /// The block itself, for a reply.
    pub(crate) fn take(&self, py: Python<'_>) -> PyResult<Block> {
        self.memory.take(py)?.ok_or_else(|| exception(py, "Closed", "this memory was released"))
    }
}

impl Drop for PyBlock {
    fn drop(&mut self) {
        if child::is_child() {
            // The parent has the same block.
            Python::attach(|py| std::mem::forget(self.memory.take(py)));
        }
    }
}

#[pymethods]
impl PyBlock {
    /// Where the block is. The peer knows it by this address, too.
    #[getter]
    fn address(&self, py: Python<'_>) -> PyResult<u64> {
        self.memory.with(py, |block| block.address())
    }

    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        self.memory.with(py, |block| block.len())
    }

    /// Changes the length. The content stays; the address changes if the block becomes longer.
    fn resize(&self, py: Python<'_>, size: usize) -> PyResult<()> {
        if child::is_child() {
            return Err(forked(py));
        }
        // With the interpreter's lock, because another thread that has it may want this block.
        let resized = self.memory.with_unexported(py, |block| block.resize(size))?;
        resized.map_err(|e| raised(py, &e, WaitsFor::Room))
    }

    /// Gives the memory back. Fails while a memoryview or an array uses it.
    fn release(&self, py: Python<'_>) -> PyResult<()> {
        if child::is_child() {
            return Err(forked(py));
        }
        self.memory.take(py).map(drop)
    }

    fn __enter__(this: Py<Self>) -> Py<Self> {
        this
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyAny>) -> PyResult<()> {
        self.release(py)
    }

    // SAFETY: the interpreter calls this with a place for the view, by its buffer protocol.
    unsafe fn __getbuffer__(slf: &Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        if child::is_child() {
            return Err(forked(slf.py()));
        }
        let memory = |block: &mut Block| (block.as_mut_ptr(), block.len());
        // SAFETY: a block stays where it is until it is dropped or resized, which `Exported` does not allow while there are exports.
        unsafe { slf.get().memory.export(slf.as_any(), view, flags, false, memory) }
    }

    // SAFETY: the interpreter calls this once for each view that was filled in; nothing in the view is used.
    unsafe fn __releasebuffer__(&self, _view: *mut ffi::Py_buffer) {
        self.memory.end_export();
    }
}

/// Bytes of the peer's.
#[derive(Debug)]
pub(crate) enum ViewOrigin {
    /// The result of a call.
    Reply(Reply),
    /// Arguments, or what a pointer leads to.
    Peer(PeerView),
}

impl ViewOrigin {
    fn view(&self) -> &PeerView {
        match self {
            Self::Reply(reply) => reply.view(),
            Self::Peer(view) => view,
        }
    }
}

/// Bytes of the peer's, read by copies.
#[pyclass(name = "View", module = "partywall", frozen)]
#[derive(Debug)]
pub(crate) struct PyPeerView {
    memory: Exported<ViewOrigin>,
}

impl PyPeerView {
    pub(crate) fn new(origin: ViewOrigin) -> Self {
        Self { memory: Exported::new(origin) }
    }
}

impl Drop for PyPeerView {
    fn drop(&mut self) {
        if child::is_child() {
            Python::attach(|py| std::mem::forget(self.memory.take(py)));
        }
    }
}

#[pymethods]
impl PyPeerView {
    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        self.memory.with(py, |origin| origin.view().len())
    }

    /// A copy of all bytes.
    fn __bytes__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        self.read(py, 0, None)
    }

    /// A copy of `size` bytes from byte `at` on; of all from there unless `size` is given.
    #[pyo3(signature = (at=0, size=None))]
    fn read<'py>(&self, py: Python<'py>, at: usize, size: Option<usize>) -> PyResult<Bound<'py, PyBytes>> {
        let len = self.__len__(py)?;
        let size = size.unwrap_or(len.saturating_sub(at));
        // Before memory is allocated, whatever the caller asks for.
        if at.checked_add(size).is_none_or(|end| end > len) {
            return Err(exception(py, "BadPointer", &format!("{size} bytes from {at} on, of {len}")));
        }
        PyBytes::new_with(py, size, |bytes| {
            let copied = self.memory.with(py, |origin| origin.view().read_at(at, bytes))?;
            copied.map_err(|e| call_error::raised(py, e))
        })
    }

    /// Copies bytes from byte `at` on into a writable buffer, as many as it has room for.
    #[pyo3(signature = (buffer, at=0))]
    fn readinto(&self, buffer: &Bound<'_, PyAny>, at: usize) -> PyResult<usize> {
        let py = buffer.py();
        let memory = ObjectMemory::writable(buffer)?;
        let len = self.__len__(py)?;
        let piece = memory.piece().part(0, len.saturating_sub(at));
        // SAFETY: `memory` is writable, and lives until this returns.
        let bytes = unsafe { piece.bytes_mut() };
        let copied = self.memory.with(py, |origin| origin.view().read_at(at, bytes))?;
        copied.map_err(|e| call_error::raised(py, e))?;
        Ok(piece.len())
    }

    /// The difference between this process's address of the bytes and the peer's; `None` for bytes that came in the record.
    #[getter]
    fn offset(&self, py: Python<'_>) -> PyResult<Option<i64>> {
        self.memory.with(py, |origin| origin.view().offset())
    }

    /// The bytes in place, as a read-only memoryview. The peer can change them at any time: only for a peer that is trusted.
    fn trusting<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyMemoryView>> {
        let in_place = Bound::new(slf.py(), PyTrustingView { view: slf.clone().unbind() })?;
        PyMemoryView::from(in_place.as_any())
    }

    /// Gives the memory back to the peer. Fails while a memoryview or an array uses it.
    fn release(&self, py: Python<'_>) -> PyResult<()> {
        if child::is_child() {
            return Err(forked(py));
        }
        self.memory.take(py).map(drop)
    }

    fn __enter__(this: Py<Self>) -> Py<Self> {
        this
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyAny>) -> PyResult<()> {
        self.release(py)
    }
}

/// The exporter of [`PyPeerView::trusting`].
#[pyclass(name = "TrustingView", module = "partywall", frozen)]
#[derive(Debug)]
pub(crate) struct PyTrustingView {
    view: Py<PyPeerView>,
}

#[pymethods]
impl PyTrustingView {
    // SAFETY: the interpreter calls this with a place for the view, by its buffer protocol.
    unsafe fn __getbuffer__(slf: &Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let memory = |origin: &mut ViewOrigin| {
            // SAFETY: the program has asked for this level of trust by its name, and gets a pointer, no slice.
            let bytes = unsafe { origin.view().trusting() };
            (bytes.as_ptr().cast_mut(), bytes.len())
        };
        // SAFETY: bytes of a record lie in the object of Python's, which does not move, and others in a mapping that the view keeps.
        unsafe { slf.get().view.get().memory.export(slf.as_any(), view, flags, true, memory) }
    }

    // SAFETY: the interpreter calls this once for each view that was filled in; nothing in the view is used.
    unsafe fn __releasebuffer__(&self, _view: *mut ffi::Py_buffer) {
        self.view.get().memory.end_export();
    }
}
