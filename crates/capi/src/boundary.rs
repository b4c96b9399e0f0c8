//! The boundary to C: the one place that defines exported functions and catches panics.
#![allow(unsafe_code, reason = "defines what the exported functions of the other modules expand to")]

use crate::failure::{CallFailure, ErrorCode};
use crate::fork;
use std::any::Any;
use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// The result of an exported function, which can also be a failure.
pub trait Outcome {
    /// The value that reports a failure with this code.
    fn failed(code: ErrorCode) -> Self;
}

impl Outcome for c_int {
    fn failed(code: ErrorCode) -> Self {
        code as Self
    }
}

impl Outcome for isize {
    fn failed(code: ErrorCode) -> Self {
        code as Self
    }
}

impl Outcome for usize {
    fn failed(_: ErrorCode) -> Self {
        0
    }
}

impl Outcome for () {
    fn failed(_: ErrorCode) {}
}

impl<T> Outcome for *const T {
    fn failed(_: ErrorCode) -> Self {
        std::ptr::null()
    }
}

impl<T> Outcome for *mut T {
    fn failed(_: ErrorCode) -> Self {
        std::ptr::null_mut()
    }
}

/// Runs the body of an exported function. Neither a failure nor a panic leaves it: the thread's last message keeps the text.
pub fn guarded<T: Outcome>(body: impl FnOnce() -> Result<T, CallFailure>) -> T {
    let outcome = if fork::is_child() {
        Err(CallFailure::forked())
    } else {
        // A panic can leave a half in any state that it can have between two statements. The half is memory-safe in all of them, and the
        // code asks the caller not to use the handle again.
        catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| Err(CallFailure::bug(text_of(&*panic))))
    };
    outcome.unwrap_or_else(|failure| T::failed(failure.keep()))
}

fn text_of(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}

/// Defines functions that C calls. A body returns `Result<_, CallFailure>`, and runs in [`guarded`].
///
/// A body may dereference its arguments after [`crate::argument`] has checked them for null. That they point to what their types say is
/// C's side of the contract, as `partywall.h` states it.
macro_rules! exported {
    ($($(#[$attribute:meta])* pub fn $name:ident($($argument:ident: $type:ty),* $(,)?) -> $result:ty $body:block)*) => {$(
        $(#[$attribute])*
        ///
        /// # Safety
        /// Pointers are null or point to what their types say, as `partywall.h` states for this function.
        // SAFETY: only this library defines symbols that begin with `pw_`.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> $result {
            $crate::boundary::guarded(move || $body)
        }
    )*};
}
