#![expect(unsafe_code, reason = "io_uring is handed addresses that the kernel uses until a task has ended")]
//! Reads and writes of a disk's file, by io_uring: straight into and out of a guest's memory.
//!
//! A task owns what the kernel uses for it: the guest's memory and the list of its pieces. A queue that is dropped waits for its tasks.

use super::discarder::outcome;
use super::store_task::{HOLE, MOST_TASKS, StoreTask};
use crate::VhostError;
use crate::chain::BufferPiece;
use io_uring::{IoUring, opcode, squeue, types};
use rustix::io::Errno;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use vm_memory::{GuestMemoryBackend, GuestMemoryMmap};

/// Pieces that the kernel takes in one call.
const MOST_PIECES: usize = 1024;
/// Tasks that are handed to the kernel by one call at most.
const ENTRIES: u32 = 256;
/// Zeroes for file systems that cannot fill a range by themselves.
static ZEROES: &AlignedZeroes = &AlignedZeroes([0; 1 << 16]);
/// Unbuffered writes need the alignment.
#[repr(align(4096))]
struct AlignedZeroes([u8; 1 << 16]);

/// The file among the registered ones.
const FILE: types::Fixed = types::Fixed(0);

/// The memory that the kernel uses until the task has ended.
#[derive(Default)]
struct HeldTask {
    memory: Option<Arc<GuestMemoryMmap>>,
    pieces: Vec<libc::iovec>,
    /// The event of a discard, and its value.
    event: Option<(Arc<OwnedFd>, Box<[u8; 8]>)>,
    busy: bool,
}

// SAFETY: the addresses are for the kernel alone. They stay valid in every thread: the memory behind them belongs to `memory`, or lives as
// long as the process.
unsafe impl Send for HeldTask {}

/// A queue of tasks for one file.
pub(crate) struct TaskQueue {
    ring: IoUring,
    held: Vec<HeldTask>,
    busy: usize,
    /// Handed to the queue, and not to the kernel yet.
    unsubmitted: usize,
    delay: Box<types::Timespec>,
}

impl std::fmt::Debug for TaskQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TaskQueue").field("busy", &self.busy).finish_non_exhaustive()
    }
}

/// The step that has failed, with the likely cause of the error.
fn set_up(error: &std::io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EINVAL) => "set up io_uring (disks need Linux 6.0 or later)",
        _ => "set up io_uring (is kernel.io_uring_disabled set?)",
    }
}

impl TaskQueue {
    /// A queue for `file`.
    pub(crate) fn new(file: BorrowedFd<'_>, delay: std::time::Duration) -> Result<Self, VhostError> {
        let failed = |call| move |source| VhostError::System { call, source };
        let ring = IoUring::builder()
            .setup_cqsize(2 * MOST_TASKS as u32)
            .setup_coop_taskrun()
            .setup_taskrun_flag()
            .setup_submit_all()
            .build(ENTRIES)
            .map_err(|error| failed(set_up(&error))(error))?;
        // The kernel keeps the file, and the lock on it, until the last task has ended, also if this process is killed.
        ring.submitter().register_files(&[file.as_raw_fd()]).map_err(failed("hand the disk to io_uring"))?;
        let held = std::iter::repeat_with(HeldTask::default).take(MOST_TASKS).collect();
        Ok(Self { ring, held, busy: 0, unsubmitted: 0, delay: Box::new(delay.into()) })
    }

    /// Tasks that are under way.
    pub(crate) fn busy(&self) -> usize {
        self.busy
    }

    /// Has input when a task has ended.
    pub(crate) fn descriptor(&self) -> std::io::Result<OwnedFd> {
        // SAFETY: the descriptor of the ring is open for as long as `self.ring` is there, which outlives this function.
        unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) }.as_fd().try_clone_to_owned()
    }

    /// Begins a task with the number `id`, which no other task has. Returns `false` if one of the pieces is not in the memory.
    ///
    /// The first `skip` bytes of the pieces are left out.
    pub(crate) fn begin(
        &mut self,
        id: usize,
        task: StoreTask,
        memory: &Arc<GuestMemoryMmap>,
        pieces: &[BufferPiece],
        skip: usize,
    ) -> bool {
        let Some(held) = self.held.get_mut(id).filter(|held| !held.busy) else { return false };
        held.pieces.clear();
        match task {
            StoreTask::Read { .. } | StoreTask::Write { .. } => {
                if !collect(memory, pieces, skip, &mut held.pieces) {
                    return false;
                }
            }
            StoreTask::Zero { length, .. } => {
                let mut left = usize::try_from(length).unwrap_or(usize::MAX).min(ZEROES.0.len() * 64);
                while left > 0 {
                    let part = left.min(ZEROES.0.len());
                    held.pieces.push(libc::iovec { iov_base: ZEROES.0.as_ptr().cast_mut().cast(), iov_len: part });
                    left -= part;
                }
            }
            StoreTask::Allocate { .. } | StoreTask::Discard { .. } | StoreTask::Sync | StoreTask::Delay => {}
        }
        let (list, count) = (held.pieces.as_ptr(), u32::try_from(held.pieces.len()).unwrap_or(0));
        let single = held.pieces.first().filter(|_| count == 1).map(|piece| (piece.iov_base, piece.iov_len));
        let single = single.and_then(|(base, length)| Some((base.cast::<u8>(), u32::try_from(length).ok()?)));
        let flags = |durable: bool| if durable { libc::RWF_DSYNC } else { 0 };
        let entry = match (task, single) {
            (StoreTask::Read { offset }, Some((base, length))) => {
                opcode::Read::new(FILE, base, length).offset(offset).build()
            }
            (StoreTask::Read { offset }, None) => opcode::Readv::new(FILE, list, count).offset(offset).build(),
            (StoreTask::Write { offset, durable }, Some((base, length))) => {
                opcode::Write::new(FILE, base, length).offset(offset).rw_flags(flags(durable)).build()
            }
            (StoreTask::Write { offset, durable } | StoreTask::Zero { offset, durable, .. }, _) => {
                opcode::Writev::new(FILE, list, count).offset(offset).rw_flags(flags(durable)).build()
            }
            (StoreTask::Discard { offset, length }, _) => {
                opcode::Fallocate::new(FILE, length).offset(offset).mode(HOLE).build()
            }
            (StoreTask::Allocate { offset, length, mode }, _) => {
                opcode::Fallocate::new(FILE, length).offset(offset).mode(mode).build()
            }
            (StoreTask::Sync, _) => sync_entry(),
            (StoreTask::Delay, _) => opcode::Timeout::new(&raw const *self.delay).build(),
        };
        held.memory = Some(Arc::clone(memory));
        held.busy = true;
        self.busy += 1;
        self.push(&entry.user_data(id as u64));
        true
    }

    /// Begins a task that ends with its event, as a discard of a block device does. Returns `false` if the number is of another task.
    pub(crate) fn begin_event(&mut self, id: usize, event: Arc<OwnedFd>) -> bool {
        let Some(held) = self.held.get_mut(id).filter(|held| !held.busy) else { return false };
        let (event, value) = held.event.insert((event, Box::default()));
        let entry = opcode::Read::new(types::Fd(event.as_raw_fd()), value.as_mut_ptr(), 8).build();
        held.busy = true;
        self.busy += 1;
        self.push(&entry.user_data(id as u64));
        true
    }

    /// Begins `fdatasync`. Returns `false` if the number is of another task.
    pub(crate) fn begin_sync(&mut self, id: usize) -> bool {
        let Some(held) = self.held.get_mut(id).filter(|held| !held.busy) else { return false };
        held.busy = true;
        self.busy += 1;
        self.push(&sync_entry().user_data(id as u64));
        true
    }

    fn push(&mut self, entry: &squeue::Entry) {
        // SAFETY: all addresses in the entry are of `self.held[id]`, of `ZEROES` or of `self.delay`. The memory that the pieces are in is
        // kept by `held.memory`. Neither is changed or freed until the task has ended: `begin` refuses a busy number, `ended` alone
        // clears it, and dropping the queue waits for all tasks.
        while unsafe { self.ring.submission().push(entry) }.is_err() {
            // The submission queue is full, so the kernel takes what is in it.
            let _ = self.ring.submit();
        }
        self.unsubmitted += 1;
    }

    /// Hands all tasks to the kernel, and lets it report those that have ended.
    pub(crate) fn submit(&mut self) {
        if self.unsubmitted > 0 || self.ring.submission().taskrun() {
            match self.ring.submit() {
                // Entries that the kernel did not take stay in the queue for the next call.
                Ok(_) | Err(_) => self.unsubmitted = self.ring.submission().len(),
            }
        }
    }

    /// Waits until a task has ended.
    pub(crate) fn wait(&mut self) {
        let _ = self.ring.submit_and_wait(1);
        self.unsubmitted = self.ring.submission().len();
    }

    /// The next task that has ended, and what the kernel says of it.
    pub(crate) fn ended(&mut self) -> Option<(usize, Result<u32, Errno>)> {
        let entry = self.ring.completion().next()?;
        let id = usize::try_from(entry.user_data()).unwrap_or(usize::MAX);
        let held = self.held.get_mut(id)?;
        held.memory = None;
        held.busy = false;
        self.busy -= 1;
        let result = entry.result();
        let event = held.event.take();
        if let Some((_, value)) = event
            && result == 8
        {
            return Some((id, outcome(u64::from_ne_bytes(*value))));
        }
        Some((id, u32::try_from(result).map_err(|_| Errno::from_raw_os_error(-result))))
    }
}

impl Drop for TaskQueue {
    fn drop(&mut self) {
        while self.busy > 0 {
            self.wait();
            while self.ended().is_some() {}
        }
    }
}

fn sync_entry() -> squeue::Entry {
    opcode::Fsync::new(FILE).flags(types::FsyncFlags::DATASYNC).build()
}

/// The addresses of pieces in this process.
fn collect(memory: &GuestMemoryMmap, pieces: &[BufferPiece], mut skip: usize, into: &mut Vec<libc::iovec>) -> bool {
    for piece in pieces {
        if skip >= piece.length {
            skip -= piece.length;
            continue;
        }
        if into.len() == MOST_PIECES {
            // A short read or write, which is continued.
            return true;
        }
        let Ok(slice) = memory.get_slice(piece.address, piece.length).and_then(|slice| Ok(slice.offset(skip)?)) else {
            return false;
        };
        skip = 0;
        into.push(libc::iovec { iov_base: slice.ptr_guard_mut().as_ptr().cast(), iov_len: slice.len() });
    }
    !into.is_empty()
}
