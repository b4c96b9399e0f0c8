//! The status of our connections for people: a line for each, in memory that `partywall top` reads
//! ([`partywall_shm::status`]).
#![expect(unsafe_code, reason = "lays status lines over a mapping")]

use crate::hidden;
use partywall_region::memfd::check_limit;
use partywall_shm::status::{LINE, LINES, LineIdentity, MEMFD, StatusHeader, StatusLine, size};
use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, ProtFlags};
use std::ptr;
use std::sync::atomic::{AtomicI32, AtomicPtr, Ordering};

static BASE: AtomicPtr<u8> = AtomicPtr::new(ptr::null_mut());
/// The descriptor of the memory.
static MEMORY: AtomicI32 = AtomicI32::new(-1);

/// Makes the status memory. Without it other tools cannot see this process, and nothing else changes.
pub(crate) fn prepare() {
    // EDGE status: acquires from the exchange below.
    if !BASE.load(Ordering::Acquire).is_null() {
        return;
    }
    let bytes = size(LINES);
    let Ok(memory) = rustix::fs::memfd_create(MEMFD, MemfdFlags::CLOEXEC) else { return };
    let Ok(len) = usize::try_from(bytes) else { return };
    // Beyond the limit of file sizes, the kernel would end the program.
    if check_limit(bytes).and_then(|()| rustix::fs::ftruncate(&memory, bytes)).is_err() {
        return;
    }
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: new memory of ours, at an address that the kernel chooses.
    let Ok(base) = (unsafe { rustix::mm::mmap(ptr::null_mut(), len, prot, MapFlags::SHARED, &memory, 0) }) else {
        return;
    };
    let base = base.cast::<u8>();
    // EDGE status: releases the mapping to `line`; if another thread was first, acquires its.
    if BASE.compare_exchange(ptr::null_mut(), base, Ordering::AcqRel, Ordering::Acquire).is_err() {
        // SAFETY: made above, and not shared yet: another thread was first.
        let _ = unsafe { rustix::mm::munmap(base.cast(), len) };
        return;
    }
    header(base).init(LINES);
    // Open as long as the process lives: that is how it is found.
    MEMORY.store(hidden::keep(memory), Ordering::Relaxed);
}

/// In a child: it numbers its connections by itself from here on, so it has its own lines.
pub(crate) fn in_child() {
    // EDGE status: as in `prepare`.
    let before = BASE.swap(ptr::null_mut(), Ordering::AcqRel);
    if before.is_null() {
        return;
    }
    if let Ok(len) = usize::try_from(size(LINES)) {
        // SAFETY: what `prepare` has mapped. A child begins with one thread, which is here.
        let _ = unsafe { rustix::mm::munmap(before.cast(), len) };
    }
    let fd = MEMORY.swap(-1, Ordering::Relaxed);
    if fd >= 0 {
        hidden::discard(fd);
    }
    prepare();
}

fn header(base: *mut u8) -> &'static StatusHeader {
    // SAFETY: the mapping begins with a header, of atomics alone, and is never unmapped.
    unsafe { &*base.cast::<StatusHeader>() }
}

/// The line of the connection in block `index` of the arena; `None` if it has none.
#[inline]
pub(crate) fn line(index: u16) -> Option<&'static StatusLine> {
    // EDGE status: acquires from `prepare`.
    let base = BASE.load(Ordering::Acquire);
    let index = usize::from(index);
    // SAFETY: the mapping has `LINES` lines after its header, of atomics alone, and is never unmapped.
    (!base.is_null() && index < LINES as usize).then(|| unsafe { &*base.add((1 + index) * LINE).cast::<StatusLine>() })
}

/// A connection begins.
pub(crate) fn begin(index: u16, identity: &LineIdentity) {
    // EDGE status: acquires from `prepare`.
    let base = BASE.load(Ordering::Acquire);
    match line(index) {
        Some(line) => {
            header(base).use_line(index.into());
            line.begin(identity);
        }
        None if !base.is_null() => {
            header(base).unseen.fetch_add(1, Ordering::Relaxed);
        }
        None => {}
    }
}
