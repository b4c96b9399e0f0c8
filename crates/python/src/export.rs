//! Memory of calls that Python sees in place: as a `memoryview`, and by it as a NumPy array.
#![expect(unsafe_code, reason = "fills in the buffer that Python asks for")]

use crate::outcome::exception;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use std::ffi::c_int;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A value with memory that can be exported, until it is released. It stays where it is while there are exports.
#[derive(Debug)]
pub(crate) struct Exported<T> {
    state: Mutex<ExportState<T>>,
}

#[derive(Debug)]
struct ExportState<T> {
    value: Option<T>,
    exports: usize,
}

impl<T> Exported<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { state: Mutex::new(ExportState { value: Some(value), exports: 0 }) }
    }

    fn lock(&self) -> MutexGuard<'_, ExportState<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Uses the value.
    pub(crate) fn with<R>(&self, py: Python<'_>, call: impl FnOnce(&mut T) -> R) -> PyResult<R> {
        self.lock().value.as_mut().map(call).ok_or_else(|| exception(py, "Closed", "this memory was released"))
    }

    /// Takes the value out, unless there are exports.
    pub(crate) fn take(&self, py: Python<'_>) -> PyResult<Option<T>> {
        let mut state = self.lock();
        if state.exports > 0 {
            let text = "the memory is in use by a memoryview or an array: release those first";
            return Err(PyBufferError::new_err(text));
        }
        let _ = py;
        Ok(state.value.take())
    }

    /// Uses the value for something that may move its memory, which must not be while there are exports.
    pub(crate) fn with_unexported<R>(&self, py: Python<'_>, call: impl FnOnce(&mut T) -> R) -> PyResult<R> {
        if self.lock().exports > 0 {
            let text = "the memory is in use by a memoryview or an array: release those first";
            return Err(PyBufferError::new_err(text));
        }
        self.with(py, call)
    }

    /// Exports memory of the value as the buffer of `owner`.
    ///
    /// # Safety
    /// `view` is what `__getbuffer__` was given. `memory` returns bytes that stay where they are until the value is dropped, and that may be
    /// written unless `is_readonly`. `owner` keeps this alive and calls [`Exported::end_export`] when the buffer is released.
    pub(crate) unsafe fn export(
        &self,
        owner: &Bound<'_, PyAny>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
        is_readonly: bool,
        memory: impl FnOnce(&mut T) -> (*mut u8, usize),
    ) -> PyResult<()> {
        if view.is_null() {
            return Err(PyBufferError::new_err("no place for the buffer"));
        }
        let mut state = self.lock();
        let value = state.value.as_mut();
        let (start, len) =
            value.map(memory).ok_or_else(|| exception(owner.py(), "Closed", "this memory was released"))?;
        let len = isize::try_from(len).map_err(|_| PyBufferError::new_err("more bytes than Python can count"))?;
        // SAFETY: Python's own function fills in the view, with a new reference to the owner, or fails with an exception.
        let done =
            unsafe { ffi::PyBuffer_FillInfo(view, owner.as_ptr(), start.cast(), len, c_int::from(is_readonly), flags) };
        if done != 0 {
            return Err(PyErr::fetch(owner.py()));
        }
        state.exports += 1;
        Ok(())
    }

    /// A buffer was released.
    pub(crate) fn end_export(&self) {
        self.lock().exports -= 1;
    }
}
