//! ObjectMemory of Python objects: bytes to send, and buffers to receive into.
#![expect(unsafe_code, reason = "uses the memory of Python objects without the interpreter's lock")]

use crate::outcome::{self, WaitsFor};
use partywall::Error;
use pyo3::buffer::PyUntypedBuffer;
use pyo3::prelude::*;

/// The contiguous memory of a Python object, which keeps it where it is while this lives.
pub(crate) struct ObjectMemory {
    /// `None`: no bytes at all.
    buffer: Option<PyUntypedBuffer>,
}

/// A piece of it without the object. It may go to the closure that runs without the interpreter's lock, and no further.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Piece {
    start: *mut u8,
    len: usize,
}

// SAFETY: a pointer and a length. The methods of `Piece` state when it may be dereferenced.
unsafe impl Send for Piece {}
// SAFETY: as for `Send`.
unsafe impl Sync for Piece {}

impl ObjectMemory {
    /// No bytes, of no object.
    pub(crate) const fn empty() -> Self {
        Self { buffer: None }
    }

    /// The memory of any object with a contiguous buffer, such as `bytes`, a `memoryview` or a NumPy array.
    pub(crate) fn of(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let buffer = PyUntypedBuffer::get(object)?;
        if !buffer.is_c_contiguous() {
            let error = Error::Invalid("the buffer is not contiguous: copy it first".into());
            return Err(outcome::raised(object.py(), &error, WaitsFor::Data));
        }
        Ok(Self { buffer: Some(buffer) })
    }

    /// The memory of an object that can be written.
    pub(crate) fn writable(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let memory = Self::of(object)?;
        if memory.buffer.as_ref().is_some_and(PyUntypedBuffer::readonly) {
            let error = Error::Invalid("the buffer is read-only: pass a bytearray or another writable buffer".into());
            return Err(outcome::raised(object.py(), &error, WaitsFor::Data));
        }
        Ok(memory)
    }

    pub(crate) fn piece(&self) -> Piece {
        match &self.buffer {
            Some(buffer) => Piece { start: buffer.buf_ptr().cast(), len: buffer.len_bytes() },
            None => Piece { start: std::ptr::null_mut(), len: 0 },
        }
    }
}

impl Piece {
    pub(crate) fn len(self) -> usize {
        self.len
    }

    /// The piece from `from` on, at most `len` bytes.
    pub(crate) fn part(self, from: usize, len: usize) -> Self {
        let from = from.min(self.len);
        // SAFETY: `from` is within the memory, or just behind it.
        Self { start: unsafe { self.start.add(from) }, len: len.min(self.len - from) }
    }

    /// Its bytes.
    ///
    /// # Safety
    /// The `ObjectMemory` that it comes from lives during `'a`. As for Python's sockets, no other thread writes the object meanwhile; a program
    /// that does so sends some mixture of bytes.
    pub(crate) unsafe fn bytes<'a>(self) -> &'a [u8] {
        if self.len == 0 {
            return &[];
        }
        // SAFETY: the exporter of the buffer keeps `len` bytes at `start` while the `ObjectMemory` lives.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }

    /// Its bytes, to be written.
    ///
    /// # Safety
    /// As [`Piece::bytes`]; and the `ObjectMemory` is writable, and nothing else uses the piece meanwhile.
    pub(crate) unsafe fn bytes_mut<'a>(self) -> &'a mut [u8] {
        if self.len == 0 {
            return &mut [];
        }
        // SAFETY: as above, and the exporter has said that the memory may be written.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
    }
}
