//! Flushes of an exported disk: one at a time, each for all requests that wait for one.
//!
//! The kernel reports a write that failed in its page cache to one flush, and counts the lost bytes as written after that. So a flush that succeeds
//! later proves nothing, and neither does one that runs beside the one that fails.

use rustix::io::Errno;
use std::sync::{Condvar, Mutex, PoisonError};

/// The flushes of one open file.
#[derive(Debug, Default)]
pub(super) struct FlushGate {
    rounds: Mutex<FlushRounds>,
    ended: Condvar,
}

/// Flushes are numbered from 1.
#[derive(Debug, Default)]
struct FlushRounds {
    begun: u64,
    done: u64,
    /// The result of all flushes after one that failed.
    failed: Option<Errno>,
}

impl FlushGate {
    /// Returns once a flush has ended that began after this call (protocol E2.5): the caller's own, or that of another thread.
    pub(super) fn flush(&self, flush: impl FnOnce() -> Result<(), Errno>) -> Result<(), Errno> {
        let mut rounds = self.rounds.lock().unwrap_or_else(PoisonError::into_inner);
        let needed = rounds.begun + 1;
        loop {
            if let Some(errno) = rounds.failed {
                return Err(errno);
            }
            if rounds.done >= needed {
                return Ok(());
            }
            if rounds.begun == rounds.done {
                break;
            }
            rounds = self.ended.wait(rounds).unwrap_or_else(PoisonError::into_inner);
        }
        rounds.begun = needed;
        drop(rounds);
        // A user repeats a write that was interrupted, which would never end.
        let flushed = flush().map_err(|e| if matches!(e, Errno::INTR | Errno::AGAIN) { Errno::IO } else { e });
        let mut rounds = self.rounds.lock().unwrap_or_else(PoisonError::into_inner);
        rounds.done = needed;
        if let Err(errno) = flushed {
            rounds.failed = Some(errno);
        }
        self.ended.notify_all();
        flushed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::sync::mpsc::channel;

    #[test]
    fn flush_that_failed_is_final() {
        let gate = FlushGate::default();
        assert_eq!(gate.flush(|| Ok(())), Ok(()));
        assert_eq!(gate.flush(|| Err(Errno::INTR)), Err(Errno::IO));
        assert_eq!(gate.flush(|| Ok(())), Err(Errno::IO));
    }

    #[test]
    fn flush_that_waits_has_the_result_of_a_later_one() {
        let gate = FlushGate::default();
        let flushes = AtomicU32::new(0);
        std::thread::scope(|scope| {
            let (begun, has_begun) = channel();
            let (end, may_end) = channel::<()>();
            let (gate, flushes) = (&gate, &flushes);
            let first = scope.spawn(move || {
                gate.flush(|| {
                    begun.send(()).unwrap();
                    may_end.recv().unwrap();
                    Ok(())
                })
            });
            has_begun.recv().unwrap();
            let others = [(); 4].map(|()| {
                let (asks, has_asked) = channel();
                let other = scope.spawn(move || {
                    asks.send(()).unwrap();
                    gate.flush(|| {
                        flushes.fetch_add(1, Ordering::SeqCst);
                        Err(Errno::NOSPC)
                    })
                });
                has_asked.recv().unwrap();
                other
            });
            // They are in the gate, or about to enter it. One that comes after the end of the first flush has its own.
            std::thread::sleep(std::time::Duration::from_millis(50));
            assert_eq!(flushes.load(Ordering::SeqCst), 0, "two flushes at a time");
            end.send(()).unwrap();
            assert_eq!(first.join().unwrap(), Ok(()));
            for other in others {
                assert_eq!(other.join().unwrap(), Err(Errno::NOSPC), "the result of the flush is lost");
            }
        });
        assert!((1..=4).contains(&flushes.load(Ordering::SeqCst)));
    }
}
