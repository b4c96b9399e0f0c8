//! `close` and its plurals.
#![expect(unsafe_code, reason = "C functions")]

use crate::conn::{Conn, PassedStatement, ends};
use crate::table::{self, DescriptorKind, Entry};
use crate::{hidden, process, ready, real, submission, sys, unconnected};
use libc::{c_int, c_uint};
use rustix::io::Errno;

/// Statements of one call that closes many descriptors. Connections beyond these stay on TCP in their receivers.
const MOST_STATEMENTS: usize = 8;

/// Ends this library's state of a descriptor, just before the kernel closes it. Returns what is to be stated if the kernel does.
pub(super) fn let_go(fd: c_int) -> Option<PassedStatement> {
    let entry = table::get(fd);
    // A child after `vfork` closes its own descriptors, and the table is its parent's.
    if entry == Entry::NONE || process::is_visitor() {
        return None;
    }
    let mut statement = None;
    ready::closed(fd);
    match entry.kind() {
        DescriptorKind::Connection => {
            if let Some(conn) = Conn::of(fd) {
                statement = conn.drop_descriptor(fd);
            }
        }
        DescriptorKind::Listener => super::listen::closed(fd, entry),
        DescriptorKind::Datagram => crate::datagram::dropped(fd),
        DescriptorKind::Ring => submission::end(entry),
        DescriptorKind::Epoll | DescriptorKind::Hidden | DescriptorKind::Stranger => {}
    }
    // The entries of a connection and a listener are removed already, unless they were stale.
    if entry.kind() != DescriptorKind::Hidden && table::get(fd) == entry {
        table::remove(fd, entry);
    }
    statement
}

/// The descriptor belongs to another user now: removes its entry, if there is one.
pub(super) fn forget(fd: c_int) {
    let entry = table::get(fd);
    if entry == Entry::NONE {
        return;
    }
    match Conn::of(fd) {
        Some(conn) => {
            if let Some(statement) = conn.drop_descriptor(fd) {
                statement.make();
            }
        }
        None => {
            crate::datagram::dropped(fd);
            table::remove(fd, entry);
        }
    }
}

/// Closes what the program knows of, between two descriptors of ours that it does not.
fn close_around(first: c_uint, last: c_uint, close: impl Fn(c_uint, c_uint) -> c_int) -> c_int {
    let mut from = first;
    for (fd, entry) in table::entries(first, last) {
        let fd = fd.cast_unsigned();
        if entry.kind() == DescriptorKind::Hidden {
            if fd > from && close(from, fd - 1) != 0 {
                return -1;
            }
            from = fd + 1;
        }
    }
    if from <= last { close(from, last) } else { 0 }
}

export! {
    /// `close`. The program cannot close descriptors that this library hides from it.
    fn close(fd: c_int) -> c_int {
        let (mut is_conn, mut statement) = (false, None);
        if table::get(fd) != Entry::NONE {
            if hidden::is(fd) {
                sys::set_errno(Errno::BADF);
                return -1;
            }
            is_conn = Conn::of(fd).is_some();
            statement = let_go(fd);
        }
        ready::renumbered(fd);
        unconnected::closed(fd);
        // SAFETY: the caller's descriptor.
        let result = unsafe { real::close(fd) };
        if is_conn {
            ends::note();
        }
        if result == 0
            && let Some(statement) = statement
        {
            statement.make();
        }
        result
    }

    /// `close_range`
    fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
        const CLOEXEC: c_int = 4;
        if first > last {
            sys::set_errno(Errno::INVAL);
            return -1;
        }
        let mut statements = [const { None }; MOST_STATEMENTS];
        if flags & CLOEXEC == 0 {
            let mut places = statements.iter_mut();
            for (fd, entry) in table::entries(first, last) {
                if entry.kind() != DescriptorKind::Hidden
                    && let Some(statement) = let_go(fd)
                    && let Some(place) = places.next()
                {
                    *place = Some(statement);
                }
            }
        }
        // SAFETY: descriptors that the program knows of.
        let result = close_around(first, last, |first, last| unsafe { real::close_range(first, last, flags) });
        ends::note();
        // With a flag, other threads may have the descriptors still.
        if result == 0 && flags == 0 {
            statements.into_iter().flatten().for_each(PassedStatement::make);
        }
        result
    }

    /// `closefrom`
    fn closefrom(first: c_int) -> () {
        // SAFETY: as above; the C library's own falls back to closing one by one where the kernel has no such call.
        if unsafe { close_range(first.max(0).cast_unsigned(), c_uint::MAX, 0) } != 0 {
            let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(1 << 20);
            for fd in first.max(0)..c_int::try_from(limit).unwrap_or(1 << 20) {
                // SAFETY: descriptors of the program; ours are passed by.
                unsafe { close(fd) };
            }
        }
    }
}
