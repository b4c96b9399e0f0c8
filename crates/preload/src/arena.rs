//! Connections live in memory that `fork` shares: parent and child hold the same socket, so they must agree on its counts,
//! its cursors and its locks.
//!
//! The arena is made by the first candidate of a process and never given back; its pages cost memory only once used. A block
//! belongs to the processes noted in it. One that all of them have left, by closing or by dying, is free to be used again.
#![expect(unsafe_code, reason = "lays connections over shared anonymous memory")]

use crate::conn::Conn;
use crate::start;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

/// How many connections a process and its forks have at once, at most. More stay on TCP.
pub(crate) const CONNECTIONS: usize = 1 << 16;

static BASE: AtomicPtr<Conn> = AtomicPtr::new(ptr::null_mut());
/// How many blocks are in use, or have been.
static USED: AtomicU32 = AtomicU32::new(0);
/// Where the search for a free block goes on.
static NEXT: AtomicU32 = AtomicU32::new(0);

/// The block at `index`; `None` while there is no arena.
#[inline]
pub(crate) fn get(index: u16) -> Option<&'static Conn> {
    let base = BASE.load(Ordering::Acquire);
    // SAFETY: the arena is never unmapped, and has a block for every `u16`. A block is valid in whatever state it is, zeros
    // included: its words are atomics, and what is not is reached under its locks.
    (!base.is_null()).then(|| unsafe { &*base.add(usize::from(index)) })
}

/// Which block this is.
#[inline]
pub(crate) fn index_of(conn: &Conn) -> u16 {
    let offset = ptr::from_ref(conn).addr() - BASE.load(Ordering::Relaxed).addr();
    (offset / size_of::<Conn>()) as u16
}

/// Makes the arena if there is none. Called also before a program that listens forks, so that its children share it.
pub(crate) fn prepare() -> bool {
    if !BASE.load(Ordering::Acquire).is_null() {
        return true;
    }
    let bytes = CONNECTIONS * size_of::<Conn>();
    let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::NORESERVE);
    // SAFETY: new memory at an address that the kernel chooses.
    let Ok(base) = (unsafe { mmap_anonymous(ptr::null_mut(), bytes, prot, flags) }) else { return false };
    let (base, none) = (base.cast::<Conn>(), ptr::null_mut());
    if BASE.compare_exchange(none, base, Ordering::AcqRel, Ordering::Acquire).is_err() {
        // SAFETY: ours, and nobody has heard of it: another thread was first.
        let _ = unsafe { rustix::mm::munmap(base.cast(), bytes) };
    }
    crate::status::prepare();
    true
}

/// A block for a new connection, held by this process alone. Its fields are as the last user left them.
pub(crate) fn allocate() -> Option<&'static Conn> {
    if !prepare() {
        return None;
    }
    let me = start::process();
    // Blocks that have been used once are used again, as long as some of them are free, so that few pages are touched.
    let used = USED.load(Ordering::Relaxed).clamp(64, CONNECTIONS as u32);
    for _ in 0..used.min(256) {
        let index = (NEXT.fetch_add(1, Ordering::Relaxed) % used) as u16;
        if let Some(conn) = get(index).filter(|conn| conn.holders.try_own(me)) {
            return Some(conn);
        }
    }
    let more = USED.fetch_max((used * 2).min(CONNECTIONS as u32), Ordering::Relaxed);
    (used.max(more)..CONNECTIONS as u32).take(256).find_map(|index| get(index as u16).filter(|c| c.holders.try_own(me)))
}
