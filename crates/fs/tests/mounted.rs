//! Mounted exports: operations have the results of a local directory, and clients see what others have done.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::expect_used,
    reason = "a test fails by panicking, in its helpers too"
)]

mod common;

#[path = "mounted/appends.rs"]
mod appends;
#[path = "mounted/kept_names.rs"]
mod kept_names;
#[path = "mounted/locks.rs"]
mod locks;
#[path = "mounted/mounts.rs"]
mod mounts;
#[path = "mounted/random_operations.rs"]
mod random_operations;
#[path = "mounted/results.rs"]
mod results;
#[path = "mounted/two_clients.rs"]
mod two_clients;

/// The errno of an outcome, or 0.
fn code<T>(outcome: std::io::Result<T>) -> i32 {
    outcome.err().map_or(0, |e| e.raw_os_error().unwrap_or(-1))
}

/// The option of a mount whose kernel caches names and attributes for longer than a test takes.
const LONG_CACHE: [&str; 2] = ["--cache", "3600"];
