//! Each thread's hidden epoll set: made when first needed, closed when the thread ends, made again in a child.
#![expect(unsafe_code, reason = "a key whose destructor the C library calls when a thread ends")]

use crate::{hidden, process, sys};
use libc::{c_int, c_void};
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::fd::{FromRawFd, OwnedFd};
use std::cell::Cell;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicU32, Ordering};

/// A hidden set.
#[derive(Debug, Clone, Copy)]
pub(super) struct Hidden {
    /// The descriptor of the set.
    pub(super) fd: c_int,
    /// Unlike that of any other in this process and its ancestors.
    pub(super) serial: u32,
}

thread_local! {
    /// The set, and in which process it was made.
    static MINE: Cell<Option<(Hidden, u32)>> = const { Cell::new(None) };
}

/// A set around the hidden one, in which signals are noticed without being let in.
#[derive(Debug, Clone, Copy)]
struct Around {
    fd: c_int,
    signals: c_int,
    epoch: u32,
}

thread_local! {
    static AROUND: Cell<Option<Around>> = const { Cell::new(None) };
}

/// This thread's set around its hidden one; `None` if there is none to be had.
pub(super) fn around(inner: Hidden) -> Option<c_int> {
    let epoch = process::fork_epoch();
    let before = AROUND.try_with(Cell::get).ok()?;
    if let Some(around) = before {
        if around.epoch == epoch {
            return Some(around.fd);
        }
        discard_around(around);
    }
    let mut all = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: fills in the set. The kernel returns a new descriptor, which has no other owner.
    let signals = unsafe {
        libc::sigfillset(all.as_mut_ptr());
        match libc::signalfd(-1, all.as_ptr(), libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) {
            signals @ 0.. => OwnedFd::from_raw_fd(signals),
            _ => return None,
        }
    };
    let set = epoll::create(CreateFlags::CLOEXEC).ok()?;
    epoll::add(&set, sys::borrow(inner.fd), EventData::new_u64(0), EventFlags::IN).ok()?;
    // Signals that the program itself blocks may be pending throughout: only new ones are reported.
    epoll::add(&set, &signals, EventData::new_u64(0), EventFlags::IN | EventFlags::ET).ok()?;
    let around = Around { fd: hidden::keep(set), signals: hidden::keep(signals), epoch };
    AROUND.try_with(|mine| mine.set(Some(around))).ok()?;
    Some(around.fd)
}

fn discard_around(around: Around) {
    hidden::discard(around.fd);
    hidden::discard(around.signals);
}

static SERIAL: AtomicU32 = AtomicU32::new(1);
/// The key, plus 1.
static KEY: AtomicU32 = AtomicU32::new(0);

/// This thread's; `None` if there is none to be had.
#[inline]
pub(super) fn hidden() -> Option<Hidden> {
    let epoch = process::fork_epoch();
    match MINE.try_with(Cell::get).ok()? {
        Some((set, of)) if of == epoch => Some(set),
        before => make(epoch, before),
    }
}

#[cold]
fn make(epoch: u32, before: Option<(Hidden, u32)>) -> Option<Hidden> {
    if let Some((parents, _)) = before {
        // The set that the parent's thread sleeps on must not be shared.
        hidden::discard(parents.fd);
    }
    let fd = hidden::keep(epoll::create(CreateFlags::CLOEXEC).ok()?);
    let set = Hidden { fd, serial: SERIAL.fetch_add(1, Ordering::Relaxed) };
    MINE.try_with(|mine| mine.set(Some((set, epoch)))).ok()?;
    if let Some(key) = key() {
        // SAFETY: a key that was made. The value is a number, never followed; not null, so that the destructor is called.
        unsafe { libc::pthread_setspecific(key, std::ptr::without_provenance::<c_void>(fd as usize + 1)) };
    }
    Some(set)
}

fn key() -> Option<libc::pthread_key_t> {
    // EDGE thread-key: acquires from the exchange below.
    match KEY.load(Ordering::Acquire) {
        0 => {}
        key => return Some(key - 1),
    }
    let mut key = 0;
    // SAFETY: fills in `key`; the destructor is a function of this library, which is never unloaded.
    if unsafe { libc::pthread_key_create(&raw mut key, Some(end)) } != 0 {
        return None;
    }
    // EDGE thread-key: releases the key to other threads; if one of them was first, acquires its.
    match KEY.compare_exchange(0, key + 1, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => Some(key),
        Err(first) => {
            // SAFETY: made above, and not used yet.
            unsafe { libc::pthread_key_delete(key) };
            Some(first - 1)
        }
    }
}

extern "C" fn end(value: *mut c_void) {
    let _ = MINE.try_with(|mine| mine.set(None));
    if let Ok(Some(around)) = AROUND.try_with(Cell::take) {
        discard_around(around);
    }
    if let Ok(fd) = c_int::try_from(value.addr() - 1) {
        hidden::discard(fd);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_open(fd: c_int) -> bool {
        rustix::io::fcntl_getfd(crate::sys::borrow(fd)).is_ok()
    }

    #[test]
    fn thread_has_one_hidden_set_which_ends_with_it() {
        let mine = hidden().unwrap();
        assert_eq!(hidden().unwrap().fd, mine.fd);
        let theirs = std::thread::spawn(|| {
            let set = hidden().unwrap();
            assert!(is_open(set.fd));
            set
        })
        .join()
        .unwrap();
        assert_ne!((mine.fd, mine.serial), (theirs.fd, theirs.serial));
        // Destructors of keys run before the thread can be joined.
        assert!(!crate::hidden::is(theirs.fd));
        assert!(is_open(mine.fd));
    }
}
