//! A bound of the requests that wait for their answers.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Instant;

/// A number of threads that may wait for answers at the same time.
#[derive(Debug)]
pub(super) struct RequestPlaces {
    free: Mutex<usize>,
    freed: Condvar,
}

impl RequestPlaces {
    pub(super) fn new(most: usize) -> Self {
        Self { free: Mutex::new(most), freed: Condvar::new() }
    }

    /// Waits for a place, which ends when the result is dropped. `None` if there is none in time.
    pub(super) fn take(&self, deadline: Instant) -> Option<RequestPlace<'_>> {
        let free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let left = deadline.saturating_duration_since(Instant::now());
        let waited = self.freed.wait_timeout_while(free, left, |free| *free == 0);
        let (mut free, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        if timeout.timed_out() {
            return None;
        }
        *free -= 1;
        Some(RequestPlace(self))
    }
}

/// A place, until it is dropped.
pub(super) struct RequestPlace<'a>(&'a RequestPlaces);

impl Drop for RequestPlace<'_> {
    fn drop(&mut self) {
        *self.0.free.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        self.0.freed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn wait_for_a_place_ends_at_its_deadline() {
        let places = RequestPlaces::new(1);
        let taken = places.take(Instant::now() + Duration::from_secs(60)).unwrap();
        assert!(places.take(Instant::now()).is_none());
        drop(taken);
        assert!(places.take(Instant::now() + Duration::from_secs(60)).is_some());
    }
}
