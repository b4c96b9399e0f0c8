//! The gate that each request of a session passes, and that its end closes.

use super::lock;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// Counts the requests that are executed.
#[derive(Debug, Default)]
pub(super) struct RequestGate {
    state: Mutex<GateState>,
    left: Condvar,
}

#[derive(Debug, Default)]
struct GateState {
    running: usize,
    is_closed: bool,
}

/// A request that is executed. Its session does not end before this is dropped.
#[derive(Debug)]
pub struct RunningRequest<'a>(&'a RequestGate);

impl RequestGate {
    /// `None` if the gate is closed.
    pub(super) fn enter(&self) -> Option<RunningRequest<'_>> {
        let mut state = lock(&self.state);
        if state.is_closed {
            return None;
        }
        state.running += 1;
        Some(RunningRequest(self))
    }

    /// Lets no further request in, and waits for those inside, for `longest` at most. `false` if some are still there; the gate stays closed.
    pub(super) fn close(&self, longest: Option<Duration>) -> bool {
        let mut state = lock(&self.state);
        state.is_closed = true;
        let is_waited_for = |state: &mut GateState| state.running > 0;
        let state = match longest {
            None => self.left.wait_while(state, is_waited_for).unwrap_or_else(PoisonError::into_inner),
            Some(longest) => {
                let waited = self.left.wait_timeout_while(state, longest, is_waited_for);
                waited.unwrap_or_else(PoisonError::into_inner).0
            }
        };
        state.running == 0
    }
}

impl Drop for RunningRequest<'_> {
    fn drop(&mut self) {
        lock(&self.0.state).running -= 1;
        self.0.left.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closed_gate_rejects_entry_and_waits_for_running_requests() {
        let gate = RequestGate::default();
        let running = gate.enter().unwrap();
        assert!(!gate.close(Some(Duration::from_millis(20))), "a request is still inside");
        assert!(gate.enter().is_none());
        std::thread::scope(|s| {
            let closing = s.spawn(|| gate.close(None));
            drop(running);
            assert!(closing.join().unwrap());
        });
        assert!(gate.enter().is_none());
    }
}
