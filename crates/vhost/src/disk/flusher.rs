//! Flushes of a file or device of this host: one at a time, each for all requests that wait for one.
//!
//! The kernel reports a write that failed in its page cache to one flush, and counts the lost bytes as written after that. So a flush that succeeds
//! later proves nothing, and neither does one that runs beside the one that fails.

use rustix::io::Errno;
use std::collections::VecDeque;

/// The flushes of one open file, by the numbers of their tasks.
#[derive(Debug)]
pub(super) struct DiskFlusher {
    /// Tasks for which a flush is under way. The kernel knows the first one's number.
    current: Vec<usize>,
    /// Tasks that need a flush that begins later.
    waiting: Vec<usize>,
    /// Tasks whose flush has ended, and its result.
    ended: VecDeque<(usize, Result<u32, Errno>)>,
    /// After a failure all further flushes fail.
    is_final: bool,
    has_failed: bool,
}

impl DiskFlusher {
    /// For a file whose data goes through the page cache, a failure is final.
    pub(super) fn new(is_final: bool) -> Self {
        let (current, waiting, ended) = (Vec::new(), Vec::new(), VecDeque::new());
        Self { current, waiting, ended, is_final, has_failed: false }
    }

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
        let fails = result.is_err_and(|e| !matches!(e, Errno::INTR | Errno::AGAIN));
        if fails && self.is_final {
            // What waits would begin a flush that proves nothing.
            self.ended.extend(self.waiting.drain(..).map(|other| (other, result)));
            return !std::mem::replace(&mut self.has_failed, true);
        }
        false
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
        let mut flusher = DiskFlusher::new(true);
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
    fn failure_of_a_flush_is_final_only_for_the_page_cache() {
        let failed = Err(Errno::IO);
        for is_final in [true, false] {
            let mut flusher = DiskFlusher::new(is_final);
            assert!(flusher.add(1) && flusher.add(2));
            assert_eq!(flusher.begin_next(), Some(1));
            assert!(flusher.add(3));
            assert_eq!(flusher.end(1, failed), is_final);
            assert_eq!(flusher.next_ended(), Some((2, failed)));
            assert_eq!(flusher.next_ended(), is_final.then_some((3, failed)));
            assert_eq!(flusher.add(4), !is_final);
            assert_eq!(flusher.begin_next(), (!is_final).then_some(3));
        }
    }

    #[test]
    fn flush_that_is_interrupted_is_no_failure() {
        let mut flusher = DiskFlusher::new(true);
        assert!(flusher.add(1));
        assert_eq!(flusher.begin_next(), Some(1));
        assert!(!flusher.end(1, Err(Errno::INTR)));
        assert!(flusher.add(1));
    }
}
