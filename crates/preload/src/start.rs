//! Before `main`, and around `fork`.
#![expect(unsafe_code, reason = "a constructor, and handlers that the C library calls")]

use crate::process;

#[cfg(not(test))]
#[used]
// SAFETY: the section holds pointers to functions that are called before `main` and need no arguments.
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = start;

extern "C" fn start() {
    crate::log::open();
    // The standard library would write to the program's standard error. (This is our own copy of it: a program in Rust has its
    // own, with its own hooks.)
    std::panic::set_hook(Box::new(|info| crate::log::log!("{info}")));
    crate::broker::configure();
    process::begin(crate::conn::fork::in_stray_child);
    // SAFETY: the handlers are functions of this library, which is never unloaded.
    unsafe { libc::pthread_atfork(Some(before_fork), Some(after_fork_in_parent), Some(after_fork_in_child)) };
    crate::calls::adopt_inherited();
}

#[cfg(not(test))]
#[used]
// SAFETY: the section holds pointers to functions that are called when the program ends in good order.
#[unsafe(link_section = ".fini_array")]
static FINISH: extern "C" fn() = finish;

#[cfg(not(test))]
extern "C" fn finish() {
    if !process::is_visitor() {
        crate::conn::leave::before_exit();
    }
}

extern "C" fn before_fork() {
    process::before_fork();
    crate::hidden::keep_limit();
    crate::conn::fork::before();
    crate::ready::before_fork();
    crate::datagram::before_fork();
}

extern "C" fn after_fork_in_parent() {
    process::after_fork_in_parent();
    crate::hidden::release_limit();
    crate::datagram::forked(false);
    crate::conn::fork::in_parent();
    crate::ready::forked();
}

extern "C" fn after_fork_in_child() {
    process::became_child();
    crate::sys::became_child();
    crate::hidden::became_child();
    crate::datagram::forked(true);
    crate::conn::fork::in_child();
    crate::broker::after_fork();
    crate::ready::after_fork();
}
