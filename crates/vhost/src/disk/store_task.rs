//! One task for the store of a disk: a part of a request.

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
    /// `fallocate` with this mode.
    Allocate { offset: u64, length: u64, mode: i32 },
    /// `fdatasync`.
    Sync,
    /// Waits for a while.
    Delay,
}
