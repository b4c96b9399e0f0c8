//! The threads that sleep in the kernel on a socket, while which its rings stay closed (protocol U6.3).

use std::sync::atomic::{AtomicU64, Ordering};

/// The bits of the number of threads. The generation of the socket is above them.
const GENERATION_SHIFT: u32 = 32;

/// How many threads sleep in the kernel on the socket of one place, or may. A thread can still sleep on a socket that another thread has
/// closed, while the place has the next socket. So the generation of the socket is in the same word, and a thread counts only for its own
/// socket.
#[derive(Debug)]
pub(super) struct Sleepers(AtomicU64);

impl Sleepers {
    pub(super) const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// No thread sleeps on the socket of this generation.
    pub(super) fn reset(&self, generation: u32) {
        self.0.store(u64::from(generation) << GENERATION_SHIFT, Ordering::SeqCst);
    }

    /// The calling thread may sleep on the socket of this generation from here on.
    pub(super) fn enter(&self, generation: u32) {
        self.change(generation, |count| count.checked_add(1));
    }

    /// It is awake again. Returns whether it was the last sleeper.
    pub(super) fn leave(&self, generation: u32) -> bool {
        // In a child the count is 0 again, also for a thread that forks in a signal handler which has interrupted its sleep.
        self.change(generation, |count| count.checked_sub(1)) == Some(1)
    }

    /// Whether any thread sleeps on the present socket.
    pub(super) fn are_any(&self) -> bool {
        self.count() != 0
    }

    pub(super) fn count(&self) -> u32 {
        self.0.load(Ordering::SeqCst) as u32
    }

    /// Changes the count of this generation. Returns the count before, or `None` if it stays.
    fn change(&self, generation: u32, change: impl Fn(u32) -> Option<u32>) -> Option<u32> {
        let word = |before: u64| {
            let count = ((before >> GENERATION_SHIFT) as u32 == generation).then(|| change(before as u32))??;
            Some(u64::from(generation) << GENERATION_SHIFT | u64::from(count))
        };
        self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, word).ok().map(|before| before as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_sleeper_to_leave_is_reported() {
        let sleepers = Sleepers::new();
        sleepers.reset(7);
        sleepers.enter(7);
        sleepers.enter(7);
        assert!(!sleepers.leave(7) && sleepers.are_any());
        assert!(sleepers.leave(7) && !sleepers.are_any());
        assert!(!sleepers.leave(7) && !sleepers.are_any(), "in a child");
    }

    #[test]
    fn sleeper_on_a_closed_socket_does_not_count_for_the_next() {
        let sleepers = Sleepers::new();
        sleepers.reset(7);
        sleepers.enter(7);
        sleepers.reset(8);
        assert!(!sleepers.are_any());
        sleepers.enter(8);
        sleepers.enter(7);
        assert!(!sleepers.leave(7) && !sleepers.leave(7));
        assert_eq!(sleepers.count(), 1);
    }
}
