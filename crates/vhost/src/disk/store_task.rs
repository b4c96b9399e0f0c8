//! One task for the store of a disk: a part of a request.

use rustix::fs::FallocateFlags;

/// Tasks that are under way at most.
pub(crate) const MOST_TASKS: usize = 1024;

/// The operation of a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StoreTask {
    /// Reads into the task's pieces.
    Read { offset: u64 },
    /// Writes the task's pieces, durably if wanted.
    Write { offset: u64, durable: bool },
    /// Writes zeroes, as many as one call takes and not more than `length`.
    Zero { offset: u64, length: u64, durable: bool },
    /// Gives a range up.
    Discard { offset: u64, length: u64 },
    /// `fallocate` with this mode.
    Allocate { offset: u64, length: u64, mode: i32 },
    /// `fdatasync`.
    Sync,
    /// Waits for a while.
    Delay,
}

/// The mode of `fallocate` that makes a hole, and keeps the file's size.
pub(crate) const HOLE: i32 = range_mode(FallocateFlags::PUNCH_HOLE);
/// The mode of `fallocate` that fills with zeroes, and keeps the file's size.
pub(crate) const ZERO_RANGE: i32 = range_mode(FallocateFlags::ZERO_RANGE);

const fn range_mode(flag: FallocateFlags) -> i32 {
    flag.union(FallocateFlags::KEEP_SIZE).bits().cast_signed()
}
