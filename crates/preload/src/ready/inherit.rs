//! Sets that several processes use, since `fork` hands them on.
//!
//! A child that uses its parent's set knows neither what the parent has registered since, nor does the parent know what the
//! child does. So the child says in shared memory that it is there, and both leave that set to the kernel: its connections go
//! back to TCP, and none in it gets a ring any more. Most children never touch what they inherit.
#![expect(unsafe_code, reason = "lays flags over shared anonymous memory")]

use super::set::{SETS, Set};
use partywall_shm::status::Reason;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU8, AtomicU32, Ordering};
use std::time::Duration;

/// How long a parent sleeps at most before it looks whether a child has come to its set.
const SLICE: Duration = Duration::from_millis(100);

static FLAGS: AtomicPtr<AtomicU8> = AtomicPtr::new(ptr::null_mut());
/// Forks of this process.
static FORKS: AtomicU32 = AtomicU32::new(0);

fn flag(set: &Set) -> Option<&'static AtomicU8> {
    let base = FLAGS.load(Ordering::Acquire);
    // SAFETY: there is a flag for each set, and they are never unmapped.
    (!base.is_null()).then(|| unsafe { &*base.add(set.number() as usize % SETS) })
}

/// Makes the flags, once, before a set can be inherited.
pub(super) fn prepare() {
    if !FLAGS.load(Ordering::Acquire).is_null() {
        return;
    }
    let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::NORESERVE);
    // SAFETY: new memory at an address that the kernel chooses.
    let Ok(base) = (unsafe { mmap_anonymous(ptr::null_mut(), SETS, prot, flags) }) else { return };
    let none = ptr::null_mut();
    if FLAGS.compare_exchange(none, base.cast(), Ordering::AcqRel, Ordering::Acquire).is_err() {
        // SAFETY: ours, and nobody has heard of it: another thread was first.
        let _ = unsafe { rustix::mm::munmap(base, SETS) };
    }
}

/// This process has forked, as the parent.
pub(super) fn forked() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// How often it has.
pub(super) fn forks() -> u32 {
    FORKS.load(Ordering::Relaxed)
}

/// A new set of that number.
pub(super) fn begin(set: &Set) {
    if let Some(flag) = flag(set) {
        flag.store(0, Ordering::Relaxed);
    }
}

/// Whether several processes use it; without memory to say so in, every fork is taken for that.
pub(super) fn is_shared(set: &Set) -> bool {
    if !set.is_own() || set.lost.load(Ordering::Relaxed) != 0 {
        return true;
    }
    set.forks_since() && flag(set).is_none_or(|f| f.load(Ordering::Relaxed) != 0)
}

/// To be called before and after waiting in a set: gives it up if it is shared.
#[inline]
pub(super) fn check(set: &'static Set) {
    if set.forks_since() || !set.is_own() {
        give_up(set);
    }
}

#[cold]
fn give_up(set: &'static Set) {
    if !set.is_own()
        && let Some(flag) = flag(set)
    {
        flag.store(1, Ordering::Release);
    }
    if is_shared(set) {
        set.give_datagrams_up();
        empty(set);
    }
}

/// Leaves a set to the kernel permanently: somebody gets it who knows nothing of us.
pub(super) fn lose(set: &'static Set) {
    set.lost.store(1, Ordering::Relaxed);
    set.give_datagrams_up();
    if !set.is_own()
        && let Some(flag) = flag(set)
    {
        // Its maker must know, too.
        flag.store(1, Ordering::Release);
    }
    empty(set);
    set.leave_to_stranger();
}

fn empty(set: &'static Set) {
    if set.rings.load(Ordering::Relaxed) != 0 {
        // One after the other: the lock of the set is not held while a connection waits for its peer.
        while let Some(conn) = set.first_ring(|c| !c.is_tcp_for_good()) {
            conn.bring_down(Reason::Shared);
        }
        set.lower_all();
    }
}

/// How long to sleep at most in this set.
pub(super) fn slice(set: &Set) -> Option<Duration> {
    set.forks_since().then_some(SLICE)
}
