//! Where the bytes of a disk are.

use super::counters::CopiedBytes;
use super::request::{DiskGeometry, MOST_RANGE};
use super::store_task::StoreTask;
use super::task::DiskTask;
use crate::VhostError;
use crate::chain::BufferPiece;
use rustix::io::Errno;
use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use vm_memory::GuestMemoryMmap;

/// A file or block device of this host, or a disk that another domain exports.
pub(crate) trait DiskStore: fmt::Debug + Send {
    /// The limits of requests.
    fn geometry(&self, discards: bool) -> DiskGeometry;

    /// Bytes of a block.
    fn block(&self) -> u32;

    /// Sectors that a driver may discard by one request.
    fn longest_discard(&self) -> u32 {
        MOST_RANGE
    }

    /// Looks at the size again. Returns whether it has changed.
    fn refresh(&mut self) -> Result<bool, VhostError>;

    /// Makes the disk larger.
    fn grow(&mut self, size: u64) -> Result<(), VhostError>;

    /// Whether tasks can do this request with its buffers as they are.
    fn takes(&self, task: &DiskTask) -> bool;

    /// Whether a write can be durable itself, without a flush behind it that fails for all later ones as well.
    fn writes_durably(&self) -> bool {
        true
    }

    /// Does a request that tasks cannot do, by a copy. No task may be under way.
    fn by_copy(&mut self, task: &DiskTask, memory: &GuestMemoryMmap) -> Result<(), Errno>;

    /// Begins a task with the number `id`, which no other task has. Returns `false` if one of the pieces is not in the memory, and for a flush of
    /// a store that has lost data.
    ///
    /// The first `skip` bytes of the pieces are left out. A task may do fewer bytes than it is given.
    fn begin(
        &mut self,
        id: usize,
        task: StoreTask,
        memory: &Arc<GuestMemoryMmap>,
        pieces: &[BufferPiece],
        skip: usize,
    ) -> bool;

    /// Hands over what [`Self::begin`] has collected.
    fn submit(&mut self);

    /// Tasks that are under way.
    fn busy(&self) -> usize;

    /// Waits until a task has ended.
    fn wait(&mut self);

    /// The caller of [`Self::wait`] has waited until no task was under way. Later tasks are not waited for.
    fn all_ended(&mut self) {}

    /// The next task that has ended, and its result.
    fn ended(&mut self) -> Option<(usize, Result<u32, Errno>)>;

    /// Has input when a task has ended.
    fn descriptor(&self) -> Result<OwnedFd, VhostError>;

    /// The descriptor has input. The caller calls [`Self::ended`] until it returns `None` before it waits for input again.
    fn heard(&mut self) {}

    /// Bytes that the back end has copied.
    fn copied(&self) -> CopiedBytes;

    /// Another front end comes, perhaps of another machine.
    fn front_end_changes(&mut self) {}

    /// The machine's memory changes, or a queue stops, perhaps because the machine starts again. Other memory may be at an address afterwards.
    fn memory_changes(&mut self) {}
}
