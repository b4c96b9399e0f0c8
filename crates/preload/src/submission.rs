//! Submission queues of the `io_uring` rings that the program has made, mapped a second time to be read.
//!
//! The mapping would keep a ring alive that the program has closed, so it goes with the program's last descriptor, and children do not
//! get it.
#![expect(unsafe_code, reason = "maps rings, and follows the kernel's offsets into them")]

mod entry;

pub(crate) use entry::{EntryDescriptor, EntryWork, Submitted, each_of, registered};

use crate::lock::{Lock, Taken};
use crate::table::{self, DescriptorKind, Entry};
use crate::{process, sys};
use entry::RawEntry;
use libc::c_int;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

/// `struct io_uring_params`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct Params {
    entries: u32,
    completions: u32,
    flags: u32,
    rest: [u32; 4],
    reserved: [u32; 3],
    head: u32,
    tail: u32,
    mask: u32,
    count: u32,
    queue_flags: u32,
    dropped: u32,
    array: u32,
    more: [u32; 3],
    completion_queue: [u32; 10],
}
const _: () = assert!(size_of::<Params>() == 120);

/// Entries of 128 bytes.
const WIDE: u32 = 1 << 10;
/// Entries are used in order.
const WITHOUT_ARRAY: u32 = 1 << 16;
/// Ways to make a ring that do not change who takes entries, or how they lie: IOPOLL, CQSIZE, CLAMP, ATTACH_WQ, R_DISABLED, SUBMIT_ALL,
/// COOP_TASKRUN, TASKRUN_FLAG, CQE32, SINGLE_ISSUER, DEFER_TASKRUN, HYBRID_IOPOLL, CQE_MIXED.
const READABLE: u32 = 1 | 0b11_1111_1000 | WIDE | 0b11_1000_0000_0000 | WITHOUT_ARRAY | 1 << 17 | 1 << 18;
/// `IORING_OFF_SQES`
const ENTRIES_AT: u64 = 0x1000_0000;
/// Rings that are looked after at once.
const RINGS: usize = 64;

/// One ring's queue. All zeros while it is free.
struct UringQueue {
    lock: Lock,
    used: AtomicU32,
    generation: AtomicU32,
    epoch: AtomicU32,
    ring: AtomicPtr<u8>,
    ring_len: AtomicU32,
    entries: AtomicPtr<u8>,
    entries_len: AtomicU32,
    count: AtomicU32,
    flags: AtomicU32,
    head: AtomicU32,
    tail: AtomicU32,
    array: AtomicU32,
}

impl UringQueue {
    const fn new() -> Self {
        Self {
            lock: Lock::new(),
            used: AtomicU32::new(0),
            generation: AtomicU32::new(0),
            epoch: AtomicU32::new(0),
            ring: AtomicPtr::new(ptr::null_mut()),
            ring_len: AtomicU32::new(0),
            entries: AtomicPtr::new(ptr::null_mut()),
            entries_len: AtomicU32::new(0),
            count: AtomicU32::new(0),
            flags: AtomicU32::new(0),
            head: AtomicU32::new(0),
            tail: AtomicU32::new(0),
            array: AtomicU32::new(0),
        }
    }
}

static QUEUES: [UringQueue; RINGS] = [const { UringQueue::new() }; RINGS];

fn get(word: &AtomicU32) -> u32 {
    word.load(Ordering::Relaxed)
}

fn put(word: &AtomicU32, value: u32) {
    word.store(value, Ordering::Relaxed);
}

/// The program has made a ring. `false`: what it submits cannot be read.
pub(crate) fn begin(fd: c_int, params: &Params) -> bool {
    if params.flags & !READABLE != 0 || !params.entries.is_power_of_two() || !table::fits(fd) {
        return false;
    }
    // EDGE uring-place: acquires the place from `end`, or from a `begin` that failed.
    let free = |queue: &&UringQueue| queue.used.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed).is_ok();
    let Some(queue) = QUEUES.iter().find(free) else { return false };
    let stride = if params.flags & WIDE != 0 { 128 } else { 64 };
    let array = if params.flags & WITHOUT_ARRAY == 0 { params.array + params.entries * 4 } else { 0 };
    let ring_len =
        [params.head, params.tail, params.mask, params.count].into_iter().fold(array, |end, at| end.max(at + 4));
    let entries_len = params.entries * stride;
    let map = |len: u32, at: u64, protection: ProtFlags| {
        // SAFETY: new memory at an address that the kernel chooses.
        let map =
            unsafe { mmap(ptr::null_mut(), len as usize, protection, MapFlags::SHARED, sys::borrow(fd), at) }.ok()?;
        // SAFETY: mapped just now.
        let _ = unsafe { madvise(map, len as usize, Advice::LinuxDontFork) };
        Some(map.cast::<u8>())
    };
    let ring = map(ring_len, 0, ProtFlags::READ);
    let entries = map(entries_len, ENTRIES_AT, ProtFlags::READ | ProtFlags::WRITE);
    let (Some(ring), Some(entries)) = (ring, entries) else {
        for (map, len) in [(ring, ring_len), (entries, entries_len)] {
            if let Some(map) = map {
                // SAFETY: mapped above, and not shared.
                let _ = unsafe { munmap(map.cast(), len as usize) };
            }
        }
        // EDGE uring-place: releases the place to `begin`.
        queue.used.store(0, Ordering::Release);
        return false;
    };
    queue.ring.store(ring, Ordering::Relaxed);
    queue.entries.store(entries, Ordering::Relaxed);
    for (word, value) in [
        (&queue.ring_len, ring_len),
        (&queue.entries_len, entries_len),
        (&queue.count, params.entries),
        (&queue.flags, params.flags),
        (&queue.head, params.head),
        (&queue.tail, params.tail),
        (&queue.array, params.array),
        (&queue.epoch, process::fork_epoch()),
    ] {
        put(word, value);
    }
    let generation = get(&queue.generation).wrapping_add(1);
    put(&queue.generation, generation);
    let number = (ptr::from_ref(queue).addr() - QUEUES.as_ptr().addr()) / size_of::<UringQueue>();
    let before = table::set(fd, Entry::new(DescriptorKind::Ring, generation, number as u16));
    if before.kind() == DescriptorKind::Ring {
        // Closed behind our back.
        end(before);
    }
    true
}

fn of(entry: Entry) -> Option<&'static UringQueue> {
    let queue = QUEUES.get(usize::from(entry.index()))?;
    (entry.kind() == DescriptorKind::Ring && get(&queue.generation) & 0xfff == entry.generation()).then_some(queue)
}

/// A ring's descriptor goes.
pub(crate) fn end(entry: Entry) {
    let Some(queue) = of(entry) else { return };
    if queue.lock.lock() == Taken::Recursive {
        return;
    }
    if of(entry).is_some() && get(&queue.used) != 0 {
        put(&queue.generation, get(&queue.generation).wrapping_add(1));
        if get(&queue.epoch) == process::fork_epoch() {
            for (map, len) in [(&queue.ring, &queue.ring_len), (&queue.entries, &queue.entries_len)] {
                // SAFETY: mapped by `begin` in this process, and each user of it holds the lock.
                let _ = unsafe { munmap(map.load(Ordering::Relaxed).cast(), get(len) as usize) };
            }
        }
        // EDGE uring-place: releases the place to `begin`.
        queue.used.store(0, Ordering::Release);
    }
    queue.lock.unlock();
}

/// Calls `look` with the entries that the next `submit` of the program hands to the kernel. `false`: they cannot be read.
pub(crate) fn each(fd: c_int, submit: u32, look: impl Fn(Submitted)) -> bool {
    let entry = table::get(fd);
    let Some(queue) = of(entry) else { return false };
    if get(&queue.epoch) != process::fork_epoch() || queue.lock.lock() == Taken::Recursive {
        return false;
    }
    let known = of(entry).is_some();
    // A `CLOSE` of this very ring is not followed while it is read.
    let mut linked = false;
    if known {
        let count = get(&queue.count);
        let ring = queue.ring.load(Ordering::Relaxed);
        let at = |offset: u32| ring.wrapping_add(offset as usize).cast::<AtomicU32>();
        // SAFETY: words of the mapped queue, at the kernel's offsets, which `begin` has made the mapping long enough for.
        let (head, tail) = unsafe { (&*at(get(&queue.head)), &*at(get(&queue.tail))) };
        // EDGE uring (with the kernel and the program): acquires the entries between the two.
        let (head, tail) = (head.load(Ordering::Acquire), tail.load(Ordering::Acquire));
        let stride = get(&queue.entries_len) / count;
        for position in 0..submit.min(tail.wrapping_sub(head)).min(count) {
            let mut index = head.wrapping_add(position) & (count - 1);
            if get(&queue.flags) & WITHOUT_ARRAY == 0 {
                // SAFETY: as above, one of the array's `count` words.
                index = unsafe { &*at(get(&queue.array) + index * 4) }.load(Ordering::Relaxed);
            }
            if index >= count {
                // The kernel drops such an entry.
                continue;
            }
            let place = queue.entries.load(Ordering::Relaxed).wrapping_add((index * stride) as usize);
            // SAFETY: one of the `count` entries that are mapped.
            let one = unsafe { Submitted::new(place.cast::<RawEntry>(), linked) };
            linked = one.is_linked();
            look(one);
        }
    }
    queue.lock.unlock();
    known
}
