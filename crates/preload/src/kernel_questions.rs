//! A thread that is awake looks at rings, and asks the kernel now and then, so that other sources of events are not starved.

use crate::sys;
use std::time::Duration;

/// The kernel is asked that often.
const PAUSE: Duration = Duration::from_micros(20);
/// How many times as long as the last question took passes until the next one, at least. On an emulated processor a question takes
/// a hundred times as long as a look at a ring.
const PAUSE_FACTOR: u32 = 4;
/// The longest time between two questions, if one was slow because the thread lost its processor.
const LONGEST_PAUSE: Duration = Duration::from_micros(400);

/// The questions of one wait.
#[derive(Debug)]
pub(crate) struct KernelQuestions {
    last: Duration,
    pause: Duration,
}

impl KernelQuestions {
    /// The thread is awake from this time on.
    pub(crate) const fn from(start: Duration) -> Self {
        Self { last: start, pause: PAUSE }
    }

    /// Asks if it is time to. Returns the time after that and the answer: whether the kernel has something.
    #[inline]
    pub(crate) fn ask(&mut self, now: Duration, ask: impl FnOnce() -> bool) -> (Duration, bool) {
        if now.saturating_sub(self.last) < self.pause {
            return (now, false);
        }
        let answer = ask();
        self.last = sys::now();
        self.pause = (self.last.saturating_sub(now) * PAUSE_FACTOR).clamp(PAUSE, LONGEST_PAUSE);
        (self.last, answer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_questions_are_asked_more_rarely() {
        let start = sys::now();
        let mut questions = KernelQuestions::from(start);
        let unasked = || unreachable!("it is not time yet");
        assert_eq!(questions.ask(start, unasked), (start, false));
        std::thread::sleep(PAUSE);
        let asked_at = sys::now();
        let (after, answer) = questions.ask(asked_at, || {
            std::thread::sleep(LONGEST_PAUSE);
            true
        });
        assert!(answer && after >= asked_at + LONGEST_PAUSE, "the time of the question has passed too");
        assert!(!questions.ask(after + LONGEST_PAUSE / 2, unasked).1);
        assert!(questions.ask(after + LONGEST_PAUSE, || true).1, "however slow the last one was");
    }
}
