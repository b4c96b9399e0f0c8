//! The state of this process's session, in memory that the kernel clears in a child of `fork`.
//!
//! So a forked child begins without a session. A child of `vfork`, which shares its parent's memory, recognises the state as its parent's
//! and does not touch it.
#![expect(unsafe_code, reason = "separate memory, with a rule for fork that no allocator offers")]

use super::answer_place::{AnswerPlace, STEPS};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

/// Listening sockets that can be published at a time.
pub(super) const LISTENERS: usize = 4096;
/// Ends of channels that a later call tells the broker. More are rare, and last as long as the session.
const OWED: usize = 32;
/// Network namespaces of which a process says that it is there.
pub(super) const NAMESPACES: usize = 8;

/// All zeros at first.
#[derive(Debug)]
#[repr(C)]
pub(super) struct State {
    /// 0 or 1: one thread at a time talks to the broker. Its signals are blocked during that time, so that a handler on the same thread
    /// cannot take the lock again.
    pub(super) lock: AtomicU32,
    /// The session's descriptor plus 1, or 0.
    pub(super) session: AtomicU32,
    /// The cookie of that socket: should the program close it and get its number again, this tells.
    pub(super) cookie: AtomicU64,
    /// The process whose session it is.
    pub(super) process: AtomicU32,
    /// The last request's number.
    pub(super) request: AtomicU32,
    /// Not before this moment (nanoseconds of the monotonic clock) is the broker tried again.
    pub(super) retry_at: AtomicU64,
    /// How long to wait after the next failure.
    pub(super) patience: AtomicU64,
    /// Grows with every session that has opened.
    pub(super) sessions: AtomicU32,
    /// The request whose answer a later call takes, or 0.
    pub(super) awaited: AtomicU32,
    /// The meaning of that request: a [`super::opening::OpeningStep`].
    pub(super) step: AtomicU32,
    /// For a publication: the slot of the listener, and the namespace of its socket.
    pub(super) step_slot: AtomicU32,
    pub(super) step_netns: AtomicU64,
    /// When that request was sent, in nanoseconds of the monotonic clock.
    pub(super) step_sent: AtomicU64,
    /// Until then the broker counts as slow, because it was late with an answer.
    pub(super) slow_until: AtomicU64,
    /// The session joins as a domain of this process, because the configured domain is another user's.
    pub(super) joins_as_own: AtomicU32,
    /// The next listener that the broker is to get again, plus 1. The number after the last listener stands for the rings, and 0 for nothing
    /// more.
    pub(super) told: AtomicU32,
    /// The numbers of channels, offers and takes that have ended, of which the broker could not be told; 0 for none.
    owed: [AtomicU64; OWED],
    /// The steps of handshakes whose answers later calls take.
    pub(super) late: [AnswerPlace; STEPS],
    /// Namespaces whose addresses this session has published.
    pub(super) announced: [AtomicU64; NAMESPACES],
    /// The broker's keys of the [`super::listeners`]; 0 for a listener that this session has not published.
    pub(super) keys: [AtomicU64; LISTENERS],
}

static STATE: AtomicPtr<State> = AtomicPtr::new(ptr::null_mut());

/// This process' state; `None` if the kernel has no such memory for us.
pub(super) fn get() -> Option<&'static State> {
    // EDGE broker-state: acquires from `make`.
    let known = STATE.load(Ordering::Acquire);
    // SAFETY: set once, below, to a mapping of this size and of atomics alone, that is never given back.
    unsafe { known.as_ref() }.or_else(make)
}

/// This process' state, if it has any yet.
pub(super) fn peek() -> Option<&'static State> {
    // SAFETY: as in `get`.
    // EDGE broker-state: as in `get`.
    unsafe { STATE.load(Ordering::Acquire).as_ref() }
}

/// Has a later call tell the broker that this channel, offer or take has ended, if there is room for it.
pub(super) fn owe(number: u64) {
    let owed = peek().map_or(&[][..], |state| &state.owed);
    let enter = |place: &&AtomicU64| place.compare_exchange(0, number, Ordering::Relaxed, Ordering::Relaxed).is_ok();
    let _ = owed.iter().find(enter);
}

/// The next of them, which is taken out.
pub(super) fn take_owed() -> Option<u64> {
    let owed = peek().map_or(&[][..], |state| &state.owed);
    owed.iter().map(|place| place.swap(0, Ordering::Relaxed)).find(|number| *number != 0)
}

#[cold]
fn make() -> Option<&'static State> {
    let len = size_of::<State>();
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: a fresh mapping, over nothing.
    let memory = unsafe { mmap_anonymous(ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, flags) }.ok()?;
    // SAFETY: our own fresh mapping, all of it.
    let wiped = unsafe { madvise(memory, len, Advice::LinuxWipeOnFork) };
    let fresh = memory.cast::<State>();
    let settled = match wiped {
        // EDGE broker-state: releases the mapping to `get`; if another thread was first, acquires its.
        Ok(()) => STATE.compare_exchange(ptr::null_mut(), fresh, Ordering::AcqRel, Ordering::Acquire).map(|_| fresh),
        Err(_) => Err(ptr::null_mut()),
    };
    let state = settled.unwrap_or_else(|other| {
        // Another thread was first, or the kernel cannot do it.
        // SAFETY: this mapping was not shared yet.
        let _ = unsafe { munmap(memory, len) };
        other
    });
    // SAFETY: as in `get`.
    unsafe { state.as_ref() }
}
