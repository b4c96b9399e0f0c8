//! Waits that we cannot see: rings of `io_uring` whose entries pass us by.
//!
//! A thread that waits there for a connection would never wake once its bytes come by a ring of ours. So a process that has such a ring, or
//! has loaded the library that makes them by its own system calls, keeps its connections on TCP.
#![expect(unsafe_code, reason = "asks the loader for a symbol")]

use crate::table::{self, DescriptorKind};
use rustix::fs::{CWD, Mode, OFlags, RawDir, openat, readlinkat_raw};
use std::ffi::{CStr, c_int};
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicU32, Ordering};

/// Descriptors that are asked about in one search, at most. Programs make their rings when they start, under low numbers.
const MOST: usize = 1024;

/// There is, or was, a ring that we cannot read.
static FOUND: AtomicU32 = AtomicU32::new(0);

/// Threads that make a ring, which is in the table of descriptors a moment after it is open.
static MAKING: AtomicU32 = AtomicU32::new(0);

/// A ring is being made by a function of ours.
#[derive(Debug)]
pub(crate) struct Making;

impl Making {
    pub(crate) fn begin() -> Self {
        MAKING.fetch_add(1, Ordering::SeqCst);
        Self
    }
}

impl Drop for Making {
    fn drop(&mut self) {
        MAKING.fetch_sub(1, Ordering::SeqCst);
    }
}

/// There is a ring that we cannot read, or was one. Returns whether that was not known yet.
pub(crate) fn note() -> bool {
    FOUND.swap(1, Ordering::SeqCst) == 0
}

/// Whether one was found.
pub(crate) fn was_found() -> bool {
    FOUND.load(Ordering::SeqCst) != 0
}

/// Whether this process may wait in a way that we cannot see. Takes a system call for each descriptor that is not ours: to be asked
/// once or twice for each connection that is to have a ring.
#[cold]
pub(crate) fn may_be() -> bool {
    if was_found() {
        return true;
    }
    // SAFETY: a constant, NUL-terminated name.
    let has_liburing = !unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"io_uring_queue_init".as_ptr()) }.is_null();
    has_liburing || any_is_open().unwrap_or(false)
}

/// `None` without `/proc`.
fn any_is_open() -> Option<bool> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let folder = openat(CWD, c"/proc/self/fd", flags, Mode::empty()).ok()?;
    let mut space = [MaybeUninit::<u8>::uninit(); 4096];
    let mut entries = RawDir::new(&folder, &mut space);
    let mut asked = 0;
    while let Some(Ok(entry)) = entries.next() {
        let Some(fd) = number(entry.file_name()) else { continue };
        if table::get(fd).kind() != DescriptorKind::Stranger {
            continue;
        }
        asked += 1;
        if asked > MOST {
            break;
        }
        let mut target = [MaybeUninit::<u8>::uninit(); 64];
        if let Ok((target, _)) = readlinkat_raw(&folder, entry.file_name(), &mut target)
            && &*target == b"anon_inode:[io_uring]"
            && !becomes_known(fd)
        {
            return Some(true);
        }
    }
    Some(false)
}

/// Whether a ring is one that another thread was just making by a function of ours.
fn becomes_known(fd: c_int) -> bool {
    for _ in 0..1000 {
        if MAKING.load(Ordering::SeqCst) == 0 {
            break;
        }
        rustix::thread::sched_yield();
    }
    table::get(fd).kind() != DescriptorKind::Stranger
}

fn number(name: &CStr) -> Option<c_int> {
    name.to_str().ok()?.parse().ok()
}
