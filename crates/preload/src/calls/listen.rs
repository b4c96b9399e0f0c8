//! `listen`: where others find us.
#![expect(unsafe_code, reason = "C functions")]

use crate::broker::Unpublished;
use crate::table::{self, DescriptorKind, Entry};
use crate::{arena, broker, real, sys};
use libc::c_int;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// How many listeners are published at once, at most.
const LISTENERS: usize = 4096;

/// A published listener.
struct PublishedListener {
    /// Its key; 0 where there is none.
    key: AtomicU64,
    /// How many descriptors this process has of it.
    descriptors: AtomicU32,
    port: AtomicU32,
}

static KEYS: [PublishedListener; LISTENERS] =
    [const { PublishedListener { key: AtomicU64::new(0), descriptors: AtomicU32::new(0), port: AtomicU32::new(0) } };
        LISTENERS];

/// The index of a descriptor that is no TCP listener, or that the broker has refused.
const UNKNOWN: u16 = u16::MAX;

/// No listener of this process is published at an `accept` before this moment, in milliseconds of [`sys::coarse_millis`]: the last attempt ended with
/// [`Unpublished::NotNow`]. 0: none has.
static PUBLISH_FROM: AtomicU64 = AtomicU64::new(0);

/// The port of a listening descriptor, if it is published. A listener that another program has made, and that was inherited through
/// `exec`, is published at its first use; so is one for which `listen` has found that another thread has the session with the broker.
pub(super) fn published_port(fd: c_int) -> Option<u16> {
    let mut entry = table::get(fd);
    let from = PUBLISH_FROM.load(Ordering::Relaxed);
    if entry == Entry::NONE && fd >= 0 && sys::coarse_millis() >= from {
        let errno = sys::errno_number();
        // What `listen` would wait for, an inherited listener waits for here: one that is not known gets no rings.
        publish(fd, if from == 0 { broker::publish } else { broker::publish_now });
        sys::restore_errno(errno);
        entry = table::get(fd);
    }
    let listener = KEYS.get(usize::from(entry.index())).filter(|_| entry.kind() == DescriptorKind::Listener)?;
    Some(listener.port.load(Ordering::Relaxed) as u16)
}

fn is_published_already(fd: c_int) -> bool {
    let entry = table::get(fd);
    entry.kind() == DescriptorKind::Listener && entry.index() != UNKNOWN
}

/// A descriptor of a listener is about to be closed.
pub(super) fn closed(fd: c_int, entry: Entry) {
    table::remove(fd, entry);
    let Some(listener) = KEYS.get(usize::from(entry.index())) else { return };
    // EDGE listener: releases what this descriptor was used for; the last one acquires it from all others.
    if listener.descriptors.fetch_sub(1, Ordering::AcqRel) == 1 {
        // EDGE listener: frees the place, for `publish`, which acquires it.
        broker::withdraw(listener.key.swap(0, Ordering::AcqRel));
    }
}

/// A descriptor of a listener was copied.
pub(super) fn copied(fd: c_int, copy: c_int, entry: Entry) {
    if entry.kind() == DescriptorKind::Listener && table::fits(copy) && table::get(fd) == entry {
        if let Some(listener) = KEYS.get(usize::from(entry.index())) {
            // EDGE listener: as in `closed`.
            listener.descriptors.fetch_add(1, Ordering::AcqRel);
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

fn publish(fd: c_int, by: impl FnOnce(c_int) -> Result<u64, Unpublished>) {
    if fd < 0 || !table::fits(fd) || is_published_already(fd) {
        return;
    }
    let answer = if is_tcp(fd) { by(fd) } else { Err(Unpublished::Refused) };
    let key = match answer {
        Ok(key) => key,
        Err(Unpublished::Refused) => {
            table::set(fd, Entry::new(DescriptorKind::Listener, 0, UNKNOWN));
            return;
        }
        Err(Unpublished::NotNow) => {
            PUBLISH_FROM.store(sys::coarse_millis() + broker::PUBLISH_PAUSE, Ordering::Relaxed);
            return;
        }
    };
    let name = rustix::net::getsockname(sys::borrow(fd)).ok().and_then(|name| SocketAddr::try_from(name).ok());
    for (index, listener) in KEYS.iter().enumerate() {
        // EDGE listener: acquires the place from `closed`.
        if listener.key.compare_exchange(0, key, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            listener.port.store(name.map_or(0, |name| name.port().into()), Ordering::Relaxed);
            // EDGE listener: releases the port to the thread that closes it last. Others get it by the table (`entry`).
            listener.descriptors.store(1, Ordering::Release);
            table::set(fd, Entry::new(DescriptorKind::Listener, 0, index as u16));
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
            publish(fd, broker::publish);
            sys::restore_errno(errno);
        }
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::broker::tests::alone::alone;
    use crate::broker::tests::{broker as start_broker, busy_session};
    use rustix::fd::AsRawFd;
    use std::net::{Ipv4Addr, TcpListener};
    use std::time::{Duration, Instant};

    #[test]
    fn listener_that_finds_session_busy_is_published_later() {
        let Some(_alone) = alone!() else { return };
        let _broker = start_broker();
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let (fd, at) = (listener.as_raw_fd(), listener.local_addr().unwrap());
        let busy = busy_session();
        publish(fd, broker::publish);
        drop(busy);
        assert!(!is_published_already(fd));
        let start = Instant::now();
        // As each `accept` does.
        while published_port(fd) != Some(at.port()) {
            assert!(start.elapsed() < Duration::from_secs(100), "it stays unpublished");
        }
        closed(fd, table::get(fd));
    }
}
