//! Flushes of a file or device of this host: one at a time, each for all requests that wait for one.
//!
//! The kernel reports a write that failed in its page cache to one flush, and counts the lost bytes as written after that. So a flush that succeeds
//! later proves nothing, and neither does one that runs beside the one that fails.

use rustix::io::Errno;
use std::collections::VecDeque;

/// The flushes of one open file, by the numbers of their tasks.
#[derive(Debug, Default)]
pub(super) struct DiskFlusher {
    /// Tasks for which a flush is under way. The kernel knows the first one's number.
    current: Vec<usize>,
    /// Tasks that need a flush that begins later.
    waiting: Vec<usize>,
    /// Tasks whose flush has ended, and its result.
    ended: VecDeque<(usize, Result<u32, Errno>)>,
    /// All further flushes fail.
    has_failed: bool,
}

impl DiskFlusher {
    /// Has the task of this number wait for a flush. Returns `false` if all further flushes fail.
    pub(super) fn add(&mut self, id: usize) -> bool {
        if !self.has_failed {
            self.waiting.push(id);
        }
        !self.has_failed
    }

    /// Tasks that the kernel does not know of.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.len() + self.current.len().saturating_sub(1) + self.ended.len()
    }

    /// Begins a flush, if one is wanted and no other is under way. Returns its number.
    pub(super) fn begin_next(&mut self) -> Option<usize> {
        if self.current.is_empty() {
            self.current = std::mem::take(&mut self.waiting);
            return self.current.first().copied();
        }
        None
    }

    /// The kernel has ended the task of this number, which may be a flush. Returns whether it is the first one that fails.
    pub(super) fn end(&mut self, id: usize, result: Result<u32, Errno>) -> bool {
        if self.current.first() != Some(&id) {
            return false;
        }
        let others = self.current.drain(..).skip(1);
        self.ended.extend(others.map(|other| (other, result)));
        if result.is_err() {
            // What waits would begin a flush that proves nothing.
            self.ended.extend(self.waiting.drain(..).map(|other| (other, result)));
            return !std::mem::replace(&mut self.has_failed, true);
        }
        false
    }

    /// Flushes while the kernel has no task.
    pub(super) fn flush_alone(&mut self, flush: impl FnOnce() -> Result<(), Errno>) -> Result<(), Errno> {
        if self.has_failed {
            return Err(Errno::IO);
        }
        let flushed = flush();
        self.has_failed = flushed.is_err();
        flushed
    }

    /// Whether [`Self::next_ended`] returns one.
    pub(super) fn has_ended(&self) -> bool {
        !self.ended.is_empty()
    }

    /// The next task that has ended with the flush of another one.
    pub(super) fn next_ended(&mut self) -> Option<(usize, Result<u32, Errno>)> {
        self.ended.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flush_is_for_all_tasks_that_waited_when_it_began() {
        let mut flusher = DiskFlusher::default();
        assert!([7, 3, 5].into_iter().all(|id| flusher.add(id)));
        assert_eq!(flusher.begin_next(), Some(7));
        assert!(flusher.add(4));
        assert_eq!((flusher.begin_next(), flusher.waiting()), (None, 3));
        assert!(!flusher.end(9, Err(Errno::IO)), "a task that is no flush");
        assert!(!flusher.end(7, Ok(0)));
        assert_eq!((flusher.next_ended(), flusher.next_ended()), (Some((3, Ok(0))), Some((5, Ok(0)))));
        assert_eq!((flusher.next_ended(), flusher.begin_next(), flusher.waiting()), (None, Some(4), 0));
    }

    #[test]
    fn failure_of_a_flush_is_final_also_if_it_was_interrupted() {
        for failed in [Errno::IO, Errno::INTR, Errno::AGAIN].map(Err) {
            let mut flusher = DiskFlusher::default();
            assert!(flusher.add(1) && flusher.add(2));
            assert_eq!(flusher.begin_next(), Some(1));
            assert!(flusher.add(3));
            assert!(flusher.end(1, failed));
            assert_eq!((flusher.next_ended(), flusher.next_ended()), (Some((2, failed)), Some((3, failed))));
            assert!(!flusher.add(4));
            assert_eq!((flusher.begin_next(), flusher.flush_alone(|| Ok(()))), (None, Err(Errno::IO)));
        }
    }

    #[test]
    fn failure_of_a_flush_beside_a_copy_is_final() {
        let mut flusher = DiskFlusher::default();
        assert_eq!(flusher.flush_alone(|| Ok(())), Ok(()));
        assert_eq!(flusher.flush_alone(|| Err(Errno::NOSPC)), Err(Errno::NOSPC));
        assert!(!flusher.add(1));
    }
}
