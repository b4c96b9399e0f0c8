//! Before `main`, and around `fork`.
#![expect(unsafe_code, reason = "a constructor, and handlers that the C library calls")]

use crate::sys;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous};
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

/// How many forks lie between the first process and this one.
static EPOCH: AtomicU32 = AtomicU32::new(1);
/// The process this memory belongs to; 0 until somebody asked.
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// What memory of thread numbers is valid for.
#[inline]
pub(crate) fn fork_epoch() -> u32 {
    EPOCH.load(Ordering::Relaxed)
}

/// Whether the caller runs in memory of another process: a child after `vfork`, that will `exec` or end. It may use what it
/// finds and must not write what says which descriptors are ours.
pub(crate) fn is_visitor() -> bool {
    let me = sys::process();
    match PROCESS.compare_exchange(0, me, Ordering::Relaxed, Ordering::Relaxed) {
        Ok(_) => false,
        Err(owner) if owner == me => false,
        // Memory that `fork` empties is empty, and no handler has run: a child by a raw system call.
        Err(_) if witness().is_some_and(|w| w.load(Ordering::Relaxed) == 0) => {
            is_child();
            crate::conn::fork::in_stray_child();
            false
        }
        Err(_) => true,
    }
}

/// The process this memory belongs to, without asking the kernel: in a child after `vfork`, its parent.
pub(crate) fn process() -> u32 {
    let known = PROCESS.load(Ordering::Relaxed);
    if known != 0 && witness().is_some_and(|word| word.load(Ordering::Relaxed) != 0) {
        return known;
    }
    // Before our constructor, or in a child that nobody was told of.
    if is_visitor() { sys::process() } else { PROCESS.load(Ordering::Relaxed) }
}

/// A word that is 1, but 0 in a child that `fork` has made and that has not been told so.
static WITNESS: AtomicPtr<AtomicU32> = AtomicPtr::new(ptr::null_mut());

fn witness() -> Option<&'static AtomicU32> {
    // SAFETY: null, or a page that is never unmapped.
    unsafe { WITNESS.load(Ordering::Relaxed).as_ref() }
}

fn call_witness() {
    let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
    // SAFETY: a new page at an address that the kernel chooses.
    let Ok(page) = (unsafe { mmap_anonymous(ptr::null_mut(), 4096, prot, flags) }) else { return };
    // SAFETY: the page that was just made; in a child it will read as zeros.
    if unsafe { madvise(page, 4096, Advice::LinuxWipeOnFork) }.is_ok() {
        WITNESS.store(page.cast(), Ordering::Relaxed);
        if let Some(word) = witness() {
            word.store(1, Ordering::Relaxed);
        }
    }
}

#[cfg(not(test))]
#[used]
// SAFETY: the section holds pointers to functions that are called before `main` and need no arguments.
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = start;

extern "C" fn start() {
    crate::log::open();
    // The standard library would write to the program's standard error. (This is our own copy of it: a program in Rust has its
    // own, with hooks of its own.)
    std::panic::set_hook(Box::new(|info| crate::log::log!("{info}")));
    crate::broker::configure();
    PROCESS.store(sys::process(), Ordering::Relaxed);
    call_witness();
    // SAFETY: the handlers are functions of this library, which is never unloaded.
    unsafe { libc::pthread_atfork(Some(before_fork), Some(after_fork_in_parent), Some(after_fork_in_child)) };
}

#[cfg(not(test))]
#[used]
// SAFETY: the section holds pointers to functions that are called when the program ends in good order.
#[unsafe(link_section = ".fini_array")]
static FINISH: extern "C" fn() = finish;

#[cfg(not(test))]
extern "C" fn finish() {
    if !is_visitor() {
        crate::conn::leave::before_exit();
    }
}

extern "C" fn before_fork() {
    crate::conn::fork::before();
    crate::ready::before_fork();
    crate::datagram::before_fork();
}

extern "C" fn after_fork_in_parent() {
    crate::datagram::forked(false);
    crate::conn::fork::in_parent();
    crate::ready::forked();
}

extern "C" fn after_fork_in_child() {
    is_child();
    crate::datagram::forked(true);
    crate::conn::fork::in_child();
    crate::broker::after_fork();
    crate::ready::after_fork();
}

fn is_child() {
    EPOCH.fetch_add(1, Ordering::Relaxed);
    PROCESS.store(sys::process(), Ordering::Relaxed);
    if let Some(word) = witness() {
        word.store(1, Ordering::Relaxed);
    }
}

/// For tests, that are no children.
#[cfg(test)]
pub(crate) fn is_child_now() {
    is_child();
}
