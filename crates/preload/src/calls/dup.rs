//! `dup` and its kin.
#![expect(unsafe_code, reason = "C functions")]

use super::close::let_go;
use crate::conn::{Conn, ends};
use crate::table::{self, Entry};
use crate::{hidden, process, ready, real, sys};
use libc::c_int;
use partywall_shm::status::Reason;
use rustix::io::Errno;

/// `copy` is a copy of `fd` now.
pub(super) fn copied(fd: c_int, copy: c_int) {
    if copy < 0 || fd == copy {
        return;
    }
    let entry = table::get(fd);
    if process::is_visitor() {
        // The copy is the child's, that will be another program.
        if let Some(conn) = Conn::of(fd) {
            conn.bring_down(Reason::Exec);
        }
        return;
    }
    // A number that is stale: closed past us, inside the C library.
    super::close::forget(copy);
    ready::renumbered(copy);
    if entry == Entry::NONE {
        ready::copied_early(fd, copy);
        return;
    }
    match Conn::of(fd) {
        Some(conn) => conn.add_descriptor(copy),
        None => {
            crate::datagram::copied(fd, copy);
            super::listen::copied(fd, copy, entry);
        }
    }
    ready::duplicated(fd, copy);
}

/// Puts a copy of `fd` at the number `to`, by the kernel's `dup`. The state of the old descriptor there is ended first.
fn copy_to(fd: c_int, to: c_int, dup: impl FnOnce() -> c_int) -> c_int {
    if hidden::is(to) {
        // As for a number beyond the limit, where ours are.
        sys::set_errno(Errno::BADF);
        return -1;
    }
    let (mut is_conn, mut statement) = (false, None);
    // Only if it will be replaced: a copy of nothing leaves the target alone.
    if fd != to && table::get(to) != Entry::NONE && rustix::io::fcntl_getfd(sys::borrow(fd)).is_ok() {
        is_conn = Conn::of(to).is_some();
        statement = let_go(to);
    }
    let copy = dup();
    if is_conn {
        ends::note();
    }
    if copy >= 0
        && let Some(statement) = statement
    {
        statement.make();
    }
    copied(fd, copy);
    copy
}

export! {
    /// `dup`
    fn dup(fd: c_int) -> c_int {
        // SAFETY: the caller's argument.
        let copy = unsafe { real::dup(fd) };
        copied(fd, copy);
        copy
    }

    /// `dup2`
    fn dup2(fd: c_int, to: c_int) -> c_int {
        // SAFETY: the caller's arguments.
        copy_to(fd, to, || unsafe { real::dup2(fd, to) })
    }

    /// `dup3`
    fn dup3(fd: c_int, to: c_int, flags: c_int) -> c_int {
        // SAFETY: the caller's arguments.
        let dup = || unsafe { real::dup3(fd, to, flags) };
        // A call that fails leaves the target alone.
        if fd == to || flags & !libc::O_CLOEXEC != 0 { dup() } else { copy_to(fd, to, dup) }
    }
}
