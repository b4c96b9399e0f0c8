//! Forks: a child shares its parent's sessions and rings, and has none of the library's threads. So the library does nothing in it.
#![expect(unsafe_code, reason = "registers a handler with the C library")]

use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

static IS_CHILD: AtomicBool = AtomicBool::new(false);

extern "C" fn mark_child() {
    IS_CHILD.store(true, Ordering::Relaxed);
}

/// Remembers that this process uses the library, so that a child of it may not. Called before the first domain or channel.
pub fn begin_use() {
    static REGISTERED: Once = Once::new();
    REGISTERED.call_once(|| {
        // SAFETY: the handler is a function of this library, which stays loaded (`-z nodelete`). It only stores to an atomic, which is
        // allowed in the child of a process with threads. A failure (no memory) leaves children unmarked, and nothing else.
        unsafe { libc::pthread_atfork(None, None, Some(mark_child)) };
    });
}

/// Whether this process is the child of one that had used the library before the fork.
pub fn is_child() -> bool {
    IS_CHILD.load(Ordering::Relaxed)
}
