//! The number of a socket's network namespace.
#![expect(unsafe_code, reason = "a socket option that rustix has no name for")]

use crate::{real, sys};
use partywall_protocol::directory::OfferKey;
use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// The last result; 0 if it is too old.
static RECENT: AtomicU64 = AtomicU64::new(0);

/// The namespace that a socket is probably in: nearly every process has all of its sockets in one. To look something up with;
/// what one does thereupon, the broker decides by the socket itself.
#[inline]
pub(super) fn probable_cookie(fd: c_int) -> u64 {
    match RECENT.load(Ordering::Relaxed) {
        0 => {
            let cookie = cookie(fd);
            RECENT.store(cookie, Ordering::Relaxed);
            cookie
        }
        known => known,
    }
}

/// A process may have gone to another namespace since.
pub(super) fn doubt() {
    RECENT.store(0, Ordering::Relaxed);
}

/// Namespaces whose key is known.
const KEYS: usize = 8;

/// The key of one namespace. In ordinary memory: a child of `fork` goes on with its parent's.
struct KeyPlace {
    /// 0 while it is written, or if there is none.
    cookie: AtomicU64,
    /// The broker that has told it.
    instance: AtomicU64,
    key: [AtomicU64; 2],
}

static PLACES: [KeyPlace; KEYS] = [const {
    KeyPlace { cookie: AtomicU64::new(0), instance: AtomicU64::new(0), key: [const { AtomicU64::new(0) }; 2] }
}; KEYS];

/// The key for offers in a namespace, as this broker has told it.
pub(super) fn key(cookie: u64, instance: u64) -> Option<OfferKey> {
    // EDGE namespace-key: acquires the key from `learn_key`.
    let place = PLACES.iter().find(|place| cookie != 0 && place.cookie.load(Ordering::Acquire) == cookie)?;
    let [low, high] = &place.key;
    let key = OfferKey([low.load(Ordering::Relaxed), high.load(Ordering::Relaxed)]);
    let same = place.instance.load(Ordering::Relaxed) == instance;
    // EDGE namespace-reuse: acquires from the fence in `learn_key`. If any of that was another's, so is the cookie by now.
    fence(Ordering::Acquire);
    (same && place.cookie.load(Ordering::Relaxed) == cookie).then_some(key)
}

/// Stores a key. Only the thread that has the turn with the broker calls this.
pub(super) fn learn_key(cookie: u64, instance: u64, OfferKey([low, high]): OfferKey) {
    if cookie == 0 {
        return;
    }
    let has = |wanted: u64| PLACES.iter().find(|place| place.cookie.load(Ordering::Relaxed) == wanted);
    let place = has(cookie).or_else(|| has(0)).unwrap_or(&PLACES[cookie as usize % KEYS]);
    place.cookie.store(0, Ordering::Relaxed);
    // EDGE namespace-reuse: what is stored from here on is seen no earlier than that the cookie is gone; acquired in `key`.
    fence(Ordering::Release);
    place.instance.store(instance, Ordering::Relaxed);
    place.key[0].store(low, Ordering::Relaxed);
    place.key[1].store(high, Ordering::Relaxed);
    // EDGE namespace-key: releases the key; acquired in `key`.
    place.cookie.store(cookie, Ordering::Release);
}

/// `SO_NETNS_COOKIE` of a socket; 0 if the kernel does not say. `errno` is left alone.
pub(super) fn cookie(fd: c_int) -> u64 {
    let errno = sys::errno();
    let mut cookie = 0u64;
    // It is 8.
    let mut len = size_of::<u64>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes to `cookie`.
    let result = unsafe {
        real::getsockopt(fd, libc::SOL_SOCKET, libc::SO_NETNS_COOKIE, (&raw mut cookie).cast(), &raw mut len)
    };
    if result == 0 {
        return cookie;
    }
    sys::set_errno(errno);
    0
}
