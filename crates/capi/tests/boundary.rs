//! The boundary keeps panics and failures on this side.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

use partywall_capi::boundary::guarded;
use partywall_capi::failure::{CallFailure, ErrorCode, pw_last_error, pw_strerror};
use std::ffi::{CStr, c_char, c_int};

#[expect(unsafe_code, reason = "reads texts as C does")]
fn text(pointer: *const c_char) -> String {
    // SAFETY: both functions return a text that ends with a zero and stays until this thread's next failure.
    unsafe { CStr::from_ptr(pointer) }.to_str().unwrap().to_owned()
}

#[test]
fn panic_becomes_a_code_and_a_text() {
    let code = guarded::<c_int>(|| panic!("the roof is open"));
    assert_eq!(code, ErrorCode::Bug as c_int);
    assert!(text(pw_last_error()).contains("the roof is open"));
    assert!(guarded::<*const u8>(|| panic!("again")).is_null());
}

#[test]
fn last_error_belongs_to_the_thread_that_failed() {
    assert_eq!(guarded::<c_int>(|| Err(CallFailure::invalid("here\0"))), ErrorCode::Invalid as c_int);
    let there = std::thread::spawn(|| text(pw_last_error())).join().unwrap();
    assert_eq!(there, "no call of this thread has failed");
    assert_eq!(guarded::<c_int>(|| Ok(7)), 7);
    assert_eq!(text(pw_last_error()), "here?");
}

#[test]
fn every_code_has_a_text() {
    let texts: Vec<String> = ErrorCode::ALL.iter().map(|code| text(pw_strerror(*code as c_int))).collect();
    assert!(texts.iter().all(|text| !text.is_empty() && !text.contains("unknown")), "{texts:?}");
}
