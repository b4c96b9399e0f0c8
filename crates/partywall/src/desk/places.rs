//! A bound of the requests that wait for their answers.

use std::sync::{Condvar, Mutex, PoisonError};

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

    /// Waits for a place, which ends when the result is dropped.
    pub(super) fn take(&self) -> RequestPlace<'_> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        while *free == 0 {
            free = self.freed.wait(free).unwrap_or_else(PoisonError::into_inner);
        }
        *free -= 1;
        RequestPlace(self)
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
