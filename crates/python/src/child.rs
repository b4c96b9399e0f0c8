//! Forks: a child shares its parent's sessions and rings, and has none of the library's threads. So the library does nothing in it.

use pyo3::prelude::*;
use std::sync::atomic::{AtomicBool, Ordering};

static USED: AtomicBool = AtomicBool::new(false);
static IS_CHILD: AtomicBool = AtomicBool::new(false);

/// Called before the first domain or channel of this process.
pub(crate) fn begin_use() {
    USED.store(true, Ordering::Relaxed);
}

/// Whether this process is the child of one that had used the library before the fork.
pub(crate) fn is_child() -> bool {
    IS_CHILD.load(Ordering::Relaxed)
}

/// Called by the interpreter in the child of each fork (`os.register_at_fork`).
#[pyfunction]
pub(crate) fn mark_child() {
    if USED.load(Ordering::Relaxed) {
        IS_CHILD.store(true, Ordering::Relaxed);
    }
}
