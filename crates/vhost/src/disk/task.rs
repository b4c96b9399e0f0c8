//! The course of one request: one or more tasks for the store, then its answer.

use super::request::{DiskOperation, DiskRequest, DiskStatus};
use super::store_task::{HOLE, StoreTask, ZERO_RANGE};
use crate::chain::BufferPiece;
use rustix::io::Errno;
use vm_memory::GuestAddress;

/// A request that is under way.
#[derive(Debug)]
pub(crate) struct DiskTask {
    pub(crate) ring: usize,
    pub(crate) head: u16,
    pub(crate) status: GuestAddress,
    pub(crate) request: DiskRequest,
    pub(crate) pieces: Vec<BufferPiece>,
    /// Bytes that are done.
    pub(crate) done: u64,
    /// Each write is durable when it completes.
    pub(crate) writethrough: bool,
    /// A write of the store can be durable itself. All other changes are followed by a flush.
    pub(crate) is_durable_by_itself: bool,
    pub(crate) step: TaskStep,
}

/// Where a request is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TaskStep {
    /// It waits, as a test wants it.
    Delay,
    /// Its bytes are read or written, or its range is changed.
    Main,
    /// Zeroes are written, because the file system has nothing better.
    Zeroes,
    /// Makes the changes durable.
    Sync,
}

/// The step after a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AfterTask {
    /// Another task.
    Continue,
    /// The answer.
    Answer(DiskStatus),
}

impl DiskTask {
    /// The next task for the store.
    pub(crate) fn next(&self) -> StoreTask {
        let (offset, left) = (self.request.offset + self.done, self.request.length - self.done);
        let durable = self.writethrough && self.is_durable_by_itself;
        match (self.step, self.request.operation) {
            (TaskStep::Delay, _) => StoreTask::Delay,
            (TaskStep::Sync, _) | (_, DiskOperation::Flush | DiskOperation::Identify) => StoreTask::Sync,
            (TaskStep::Zeroes, _) => StoreTask::Zero { offset, length: left, durable },
            (TaskStep::Main, DiskOperation::Read) => StoreTask::Read { offset },
            (TaskStep::Main, DiskOperation::Write) => StoreTask::Write { offset, durable },
            (TaskStep::Main, DiskOperation::Discard) => StoreTask::Discard { offset, length: left },
            (TaskStep::Main, DiskOperation::WriteZeroes { unmap: true }) => {
                StoreTask::Allocate { offset, length: left, mode: HOLE }
            }
            (TaskStep::Main, DiskOperation::WriteZeroes { unmap: false }) => {
                StoreTask::Allocate { offset, length: left, mode: ZERO_RANGE }
            }
        }
    }

    /// Takes the result of what [`Self::next`] wanted.
    pub(crate) fn after(&mut self, result: Result<u32, Errno>) -> AfterTask {
        if self.step == TaskStep::Delay {
            self.step = TaskStep::Main;
            return AfterTask::Continue;
        }
        let ranged = matches!(self.request.operation, DiskOperation::Discard | DiskOperation::WriteZeroes { .. });
        let flushes = self.step == TaskStep::Sync || self.request.operation == DiskOperation::Flush;
        match result {
            // The kernel may count as written what it has not written, so another flush would prove nothing.
            Err(_) if flushes => AfterTask::Answer(DiskStatus::Failed),
            Err(Errno::INTR | Errno::AGAIN) => AfterTask::Continue,
            Err(Errno::OPNOTSUPP)
                if self.step == TaskStep::Main && self.request.operation == DiskOperation::Discard =>
            {
                AfterTask::Answer(DiskStatus::Unsupported)
            }
            // A block device does not take a range that is not whole blocks. Its page cache writes such a range.
            Err(Errno::OPNOTSUPP | Errno::INVAL)
                if self.step == TaskStep::Main
                    && matches!(self.request.operation, DiskOperation::WriteZeroes { .. }) =>
            {
                self.step = TaskStep::Zeroes;
                AfterTask::Continue
            }
            Err(_) => AfterTask::Answer(DiskStatus::Failed),
            Ok(_) if self.step == TaskStep::Sync => AfterTask::Answer(DiskStatus::Done),
            Ok(_) if self.step == TaskStep::Main && ranged => self.durable(),
            Ok(0) if self.request.length > 0 => AfterTask::Answer(DiskStatus::Failed),
            Ok(bytes) => {
                self.done = (self.done + u64::from(bytes)).min(self.request.length);
                let is_read = self.request.operation == DiskOperation::Read;
                match self.done < self.request.length {
                    true => AfterTask::Continue,
                    false if is_read || self.is_durable_by_itself => AfterTask::Answer(DiskStatus::Done),
                    false => self.durable(),
                }
            }
        }
    }

    /// A change is done; it is durable only after a sync.
    fn durable(&mut self) -> AfterTask {
        if !self.writethrough {
            return AfterTask::Answer(DiskStatus::Done);
        }
        self.step = TaskStep::Sync;
        AfterTask::Continue
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn task(operation: DiskOperation, writethrough: bool) -> DiskTask {
        let request = DiskRequest { operation, offset: 4096, length: 8192 };
        let (pieces, status) = (Vec::new(), GuestAddress(0));
        let (is_durable_by_itself, step) = (true, TaskStep::Main);
        DiskTask { ring: 0, head: 0, status, request, pieces, done: 0, writethrough, is_durable_by_itself, step }
    }

    #[test]
    fn short_read_is_continued_and_the_end_of_a_file_is_a_failure() {
        let mut task = task(DiskOperation::Read, false);
        assert_eq!(task.after(Ok(4096)), AfterTask::Continue);
        assert_eq!(task.next(), StoreTask::Read { offset: 8192 });
        assert_eq!(task.after(Err(Errno::AGAIN)), AfterTask::Continue);
        assert_eq!(task.after(Ok(0)), AfterTask::Answer(DiskStatus::Failed));
        assert_eq!(task.after(Ok(4096)), AfterTask::Answer(DiskStatus::Done));
    }

    #[test]
    fn errors_of_the_file_are_failures() {
        for error in [Errno::IO, Errno::NOSPC, Errno::FAULT, Errno::FBIG] {
            let mut task = task(DiskOperation::Write, false);
            assert_eq!(task.after(Err(error)), AfterTask::Answer(DiskStatus::Failed));
        }
    }

    #[test]
    fn writethrough_makes_each_change_durable() {
        assert_eq!(task(DiskOperation::Write, true).next(), StoreTask::Write { offset: 4096, durable: true });
        for operation in [DiskOperation::Discard, DiskOperation::WriteZeroes { unmap: true }] {
            let mut task = task(operation, true);
            assert_eq!(task.after(Ok(0)), AfterTask::Continue);
            assert_eq!(task.next(), StoreTask::Sync);
            assert_eq!(task.after(Ok(0)), AfterTask::Answer(DiskStatus::Done));
        }
    }

    #[test]
    fn write_of_the_page_cache_is_durable_after_a_flush() {
        let mut write = task(DiskOperation::Write, true);
        write.is_durable_by_itself = false;
        assert_eq!(write.next(), StoreTask::Write { offset: 4096, durable: false });
        assert_eq!(write.after(Ok(4096)), AfterTask::Continue);
        assert_eq!(write.next(), StoreTask::Write { offset: 8192, durable: false });
        assert_eq!(write.after(Ok(4096)), AfterTask::Continue);
        assert_eq!(write.next(), StoreTask::Sync);
        assert_eq!(write.after(Ok(0)), AfterTask::Answer(DiskStatus::Done));
        let mut read = task(DiskOperation::Read, true);
        read.is_durable_by_itself = false;
        assert_eq!(read.after(Ok(8192)), AfterTask::Answer(DiskStatus::Done));
    }

    #[test]
    fn flush_that_is_interrupted_has_failed() {
        for error in [Errno::INTR, Errno::AGAIN, Errno::IO] {
            assert_eq!(task(DiskOperation::Flush, false).after(Err(error)), AfterTask::Answer(DiskStatus::Failed));
            let mut write = task(DiskOperation::Write, true);
            write.step = TaskStep::Sync;
            assert_eq!(write.after(Err(error)), AfterTask::Answer(DiskStatus::Failed));
        }
    }

    #[test]
    fn zeroes_are_written_where_the_file_system_cannot_fill_a_range() {
        let mut zeroes = task(DiskOperation::WriteZeroes { unmap: false }, true);
        assert_eq!(zeroes.after(Err(Errno::OPNOTSUPP)), AfterTask::Continue);
        assert_eq!(zeroes.next(), StoreTask::Zero { offset: 4096, length: 8192, durable: true });
        assert_eq!(zeroes.after(Ok(4096)), AfterTask::Continue);
        assert_eq!(zeroes.next(), StoreTask::Zero { offset: 8192, length: 4096, durable: true });
        assert_eq!(zeroes.after(Ok(4096)), AfterTask::Answer(DiskStatus::Done));
        let mut discard = task(DiskOperation::Discard, false);
        assert_eq!(discard.after(Err(Errno::OPNOTSUPP)), AfterTask::Answer(DiskStatus::Unsupported));
    }

    #[test]
    fn zeroes_of_partial_blocks_are_written_and_may_fail_once() {
        for unmap in [false, true] {
            let mut zeroes = task(DiskOperation::WriteZeroes { unmap }, false);
            assert_eq!(zeroes.after(Err(Errno::INVAL)), AfterTask::Continue);
            assert_eq!(zeroes.next(), StoreTask::Zero { offset: 4096, length: 8192, durable: false });
            assert_eq!(zeroes.after(Err(Errno::INVAL)), AfterTask::Answer(DiskStatus::Failed));
        }
        for operation in [DiskOperation::Discard, DiskOperation::Write] {
            assert_eq!(task(operation, false).after(Err(Errno::INVAL)), AfterTask::Answer(DiskStatus::Failed));
        }
    }
}
