//! `listen`: where others find us.
#![expect(unsafe_code, reason = "C functions")]

use crate::table::{self, Entry, Kind};
use crate::{arena, broker, real, sys};
use libc::c_int;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// How many listeners are published at once, at most.
const LISTENERS: usize = 4096;

/// Keys of published listeners, and how many descriptors this process has of each.
static KEYS: [(AtomicU64, AtomicU32); LISTENERS] = [const { (AtomicU64::new(0), AtomicU32::new(0)) }; LISTENERS];

/// The index of a listener that could not be published.
const UNKNOWN: u16 = u16::MAX;

/// Whether a descriptor that connections are accepted from is a published listener. One that another program has made, and that
/// came to this one by `exec`, is published when it is used first.
pub(super) fn is_published(fd: c_int) -> bool {
    let entry = table::get(fd);
    if entry == Entry::NONE && fd >= 0 {
        publish(fd);
        return is_published_already(fd);
    }
    is_published_already(fd)
}

fn is_published_already(fd: c_int) -> bool {
    let entry = table::get(fd);
    entry.kind() == Kind::Listener && entry.index() != UNKNOWN
}

/// A descriptor of a listener is about to be closed.
pub(super) fn closed(fd: c_int, entry: Entry) {
    table::remove(fd, entry);
    let Some((key, descriptors)) = KEYS.get(usize::from(entry.index())) else { return };
    if descriptors.fetch_sub(1, Ordering::AcqRel) == 1 {
        broker::withdraw(key.swap(0, Ordering::AcqRel));
    }
}

/// A descriptor of a listener was copied.
pub(super) fn copied(fd: c_int, copy: c_int, entry: Entry) {
    if entry.kind() == Kind::Listener && table::fits(copy) && table::get(fd) == entry {
        if let Some((_, descriptors)) = KEYS.get(usize::from(entry.index())) {
            descriptors.fetch_add(1, Ordering::AcqRel);
        }
        table::set(copy, entry);
    }
}

/// Whether it is a stream socket of the internet families, as those are that we can do something for.
pub(super) fn is_tcp(fd: c_int) -> bool {
    use rustix::net::{AddressFamily, SocketType, sockopt};
    let fd = sys::borrow(fd);
    sockopt::socket_type(fd) == Ok(SocketType::STREAM)
        && matches!(sockopt::socket_domain(fd), Ok(AddressFamily::INET | AddressFamily::INET6))
}

fn publish(fd: c_int) {
    if fd < 0 || !table::fits(fd) || is_published_already(fd) {
        return;
    }
    let Some(key) = is_tcp(fd).then(|| broker::publish(fd)).flatten() else {
        table::set(fd, Entry::new(Kind::Listener, 0, UNKNOWN));
        return;
    };
    for (index, (slot, descriptors)) in KEYS.iter().enumerate() {
        if slot.compare_exchange(0, key, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            descriptors.store(1, Ordering::Release);
            table::set(fd, Entry::new(Kind::Listener, 0, index as u16));
            // Before a server forks its workers: connections then survive the forks.
            arena::prepare();
            return;
        }
    }
    broker::withdraw(key);
}

export! {
    /// `listen`
    fn listen(fd: c_int, backlog: c_int) -> c_int {
        // SAFETY: the caller's arguments, passed on.
        let result = unsafe { real::listen(fd, backlog) };
        if result == 0 {
            let errno = sys::errno_number();
            publish(fd);
            sys::restore_errno(errno);
        }
        result
    }
}
