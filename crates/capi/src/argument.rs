//! Arguments as C passes them: checked, and turned into what Rust calls them.
#![expect(unsafe_code, reason = "dereferences pointers that C passes")]

use crate::failure::CallFailure;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::time::Duration;

/// How long a call may wait.
#[derive(Debug, Clone, Copy)]
pub struct Patience {
    /// Does not wait at all.
    pub nonblocking: bool,
    /// The longest wait; `None` waits without a limit.
    pub timeout: Option<Duration>,
}

impl Patience {
    /// Milliseconds as in `poll`: a negative value waits without a limit, 0 does not wait.
    pub fn from_ms(timeout_ms: c_int) -> Self {
        let timeout = u64::try_from(timeout_ms).ok().map(Duration::from_millis);
        Self { nonblocking: timeout_ms == 0, timeout }
    }
}

fn null(name: &str) -> CallFailure {
    CallFailure::invalid(format!(
        "{name} is NULL: pass what an earlier call has returned, and look at that call's result"
    ))
}

/// The value behind a handle.
///
/// # Safety
/// The pointer is null, or a handle of the library's that is not closed before `'a` ends.
pub unsafe fn shared<'a, T>(handle: *const T, name: &str) -> Result<&'a T, CallFailure> {
    // SAFETY: the caller's promise.
    unsafe { handle.as_ref() }.ok_or_else(|| null(name))
}

/// The value behind a handle that one thread at a time uses.
///
/// # Safety
/// The pointer is null, or a handle of the library's that is not closed before `'a` ends, and that no other thread uses during `'a`.
pub unsafe fn exclusive<'a, T>(handle: *mut T, name: &str) -> Result<&'a mut T, CallFailure> {
    // SAFETY: the caller's promise.
    unsafe { handle.as_mut() }.ok_or_else(|| null(name))
}

/// A text that may be absent.
///
/// # Safety
/// The pointer is null, or points to a text that ends with a zero and stays as it is during `'a`.
pub unsafe fn optional_text<'a>(text: *const c_char, name: &str) -> Result<Option<&'a str>, CallFailure> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's promise, and the pointer is not null.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map(Some).map_err(|_| CallFailure::invalid(format!("{name} is not UTF-8")))
}

/// A text.
///
/// # Safety
/// As [`optional_text`].
pub unsafe fn text<'a>(text: *const c_char, name: &str) -> Result<&'a str, CallFailure> {
    // SAFETY: the caller's promise is the same.
    unsafe { optional_text(text, name) }?.ok_or_else(|| null(name))
}

fn check_length(bytes: *const c_void, len: usize, name: &str) -> Result<(), CallFailure> {
    if bytes.is_null() && len > 0 {
        return Err(null(name));
    }
    if isize::try_from(len).is_err() {
        return Err(CallFailure::invalid(format!("{len} bytes are more than an object can have")));
    }
    Ok(())
}

/// Bytes to read from.
///
/// # Safety
/// The pointer is null, or points to `len` bytes that nothing writes during `'a`.
pub unsafe fn bytes<'a>(bytes: *const c_void, len: usize) -> Result<&'a [u8], CallFailure> {
    check_length(bytes, len, "the pointer to the bytes")?;
    if len == 0 {
        return Ok(&[]);
    }
    // SAFETY: the caller's promise; the pointer is not null, and the length fits.
    Ok(unsafe { std::slice::from_raw_parts(bytes.cast(), len) })
}

/// The checks of [`buffer`], for a call that makes the slice later.
pub fn check_buffer(buffer: *const c_void, len: usize) -> Result<(), CallFailure> {
    check_length(buffer, len, "the pointer to the buffer")
}

/// A buffer to write into.
///
/// # Safety
/// The pointer is null, or points to `len` bytes that nothing else uses during `'a`.
pub unsafe fn buffer<'a>(buffer: *mut c_void, len: usize) -> Result<&'a mut [u8], CallFailure> {
    check_buffer(buffer, len)?;
    if len == 0 {
        return Ok(&mut []);
    }
    // SAFETY: the caller's promise; the pointer is not null, and the length fits. Bytes that come from C have some value each, and the
    // library only writes them.
    Ok(unsafe { std::slice::from_raw_parts_mut(buffer.cast(), len) })
}

/// Stores a result where the caller wants it. On failure of a call nothing is stored.
///
/// # Safety
/// The pointer is null, or one may write a `T` there.
pub unsafe fn store<T>(
    place: *mut T,
    name: &str,
    value: impl FnOnce() -> Result<T, CallFailure>,
) -> Result<(), CallFailure> {
    if place.is_null() {
        return Err(CallFailure::invalid(format!("{name} is NULL: pass the address of a variable for the result")));
    }
    let value = value()?;
    // SAFETY: the caller's promise, and the pointer is not null. What was there has no destructor: it is C's.
    unsafe { place.write(value) };
    Ok(())
}

/// Takes a handle back, to be dropped. Null is no handle, as for `free`.
///
/// # Safety
/// The pointer is null, or a handle that nothing uses any more.
pub unsafe fn take<T>(handle: *mut T) -> Option<Box<T>> {
    if handle.is_null() {
        return None;
    }
    // SAFETY: the caller's promise: a handle is made by `Box::into_raw`, and taken back once.
    Some(unsafe { Box::from_raw(handle) })
}
