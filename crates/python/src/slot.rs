//! A half, socket or listener that Python threads share, and waits that neither hold the interpreter's lock nor hide a signal.

use crate::child;
use crate::outcome::{self, WaitsFor};
use partywall::{Error, Listener, MessageListener, ReadHalf, WriteHalf};
use pyo3::prelude::*;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The first wait is in the library, which spins as long as that pays. Longer waits sleep in `poll`, which signals interrupt.
const IN_LIBRARY: Duration = Duration::from_millis(2);
/// The longest sleep before another look, should another thread close what is polled.
const SLEEP: Duration = Duration::from_secs(1);

/// An object whose calls can wait.
pub(crate) trait Waits {
    /// How long the next call may wait.
    fn wait_at_most(&mut self, nonblocking: bool, timeout: Option<Duration>);

    /// The descriptor that is readable when a call for `what` is worth repeating.
    fn descriptor(&self, what: WaitsFor) -> Result<BorrowedFd<'_>, Error>;
}

macro_rules! waits {
    ($($type:ty),*) => {$(
        impl Waits for $type {
            fn wait_at_most(&mut self, nonblocking: bool, timeout: Option<Duration>) {
                self.set_nonblocking(nonblocking);
                self.set_timeout(timeout);
            }

            fn descriptor(&self, _: WaitsFor) -> Result<BorrowedFd<'_>, Error> {
                Ok(self.as_fd())
            }
        }
    )*};
}
waits!(ReadHalf, WriteHalf, Listener, MessageListener);

impl Waits for partywall::MessageSocket {
    fn wait_at_most(&mut self, nonblocking: bool, timeout: Option<Duration>) {
        self.set_nonblocking(nonblocking);
        self.set_timeout(timeout);
    }

    fn descriptor(&self, what: WaitsFor) -> Result<BorrowedFd<'_>, Error> {
        match what {
            WaitsFor::Data => self.receive_fd(),
            WaitsFor::Room => self.send_fd(),
        }
    }
}

/// A value until it is closed. Python's threads use it one after the other; none holds it while it sleeps.
pub(crate) struct Slot<H> {
    value: Mutex<Option<H>>,
}

/// How one attempt ended.
enum Attempt<T> {
    Done(T),
    Failed(Error),
    /// Not now.
    Again,
    /// Not before this descriptor is readable.
    Asleep(OwnedFd),
    Closed,
}

impl<H> Slot<H> {
    pub(crate) fn new(value: Option<H>) -> Self {
        Self { value: Mutex::new(value) }
    }

    fn lock(&self) -> MutexGuard<'_, Option<H>> {
        // A thread that panicked while it held the lock left a value that is memory-safe in every state.
        self.value.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Uses the value for a call that does not wait.
    pub(crate) fn with<T: Send>(&self, py: Python<'_>, call: impl FnOnce(&mut H) -> T + Send) -> PyResult<T>
    where
        H: Send,
    {
        if child::is_child() {
            return Err(outcome::forked(py));
        }
        // Another thread may hold the value in a wait, which goes on without the interpreter's lock.
        py.detach(|| self.lock().as_mut().map(call)).ok_or_else(|| outcome::closed_here(py))
    }

    /// Closes the value. In the child of a fork it stays as it is: it is the parent's, and a thread of the parent may have held the lock.
    pub(crate) fn close(&self) {
        if child::is_child() {
            return;
        }
        // Dropped after the lock is released: dropping a server waits for functions, which may use the server.
        let value = self.lock().take();
        drop(value);
    }
}

impl<H: Waits + Send> Slot<H> {
    /// The number of the descriptor to poll, or -1 if the value is closed or this process is the child of a fork.
    pub(crate) fn number(&self, py: Python<'_>, what: WaitsFor) -> i32 {
        use std::os::fd::AsRawFd;
        if child::is_child() {
            return -1;
        }
        py.detach(|| {
            let value = self.lock();
            value.as_ref().and_then(|value| value.descriptor(what).ok()).map_or(-1, |fd| fd.as_raw_fd())
        })
    }

    /// Repeats `call` until it succeeds or fails, at most for `timeout`. Zero does not wait, and `None` waits without a limit.
    pub(crate) fn wait<T: Send>(
        &self,
        py: Python<'_>,
        timeout: Option<Duration>,
        what: WaitsFor,
        mut call: impl FnMut(&mut H) -> Result<T, Error> + Send,
    ) -> PyResult<T> {
        if child::is_child() {
            return Err(outcome::forked(py));
        }
        // A time-out too long for an `Instant` counts as no limit.
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let left = || deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let is_patient = timeout != Some(Duration::ZERO);
        let mut in_library = is_patient;
        loop {
            let attempt = py.detach(|| {
                let mut value = self.lock();
                let Some(value) = value.as_mut() else { return Attempt::Closed };
                let bound = left().map_or(IN_LIBRARY, |left| left.clamp(Duration::from_nanos(1), IN_LIBRARY));
                value.wait_at_most(!in_library, in_library.then_some(bound));
                match call(value) {
                    Ok(done) => Attempt::Done(done),
                    Err(Error::TimedOut) if in_library => Attempt::Again,
                    Err(Error::WouldBlock) if is_patient => {
                        let copy = value.descriptor(what).and_then(|fd| {
                            fd.try_clone_to_owned().map_err(|source| Error::System { doing: "wait", source })
                        });
                        copy.map_or_else(Attempt::Failed, Attempt::Asleep)
                    }
                    Err(e) => Attempt::Failed(e),
                }
            });
            in_library = false;
            match attempt {
                Attempt::Done(done) => return Ok(done),
                Attempt::Failed(e) => return Err(outcome::raised(py, &e, what)),
                Attempt::Closed => return Err(outcome::closed_here(py)),
                Attempt::Again => {}
                Attempt::Asleep(fd) => {
                    let left = left();
                    if left == Some(Duration::ZERO) {
                        return Err(outcome::raised(py, &Error::TimedOut, what));
                    }
                    let sleep = left.map_or(SLEEP, |left| left.min(SLEEP));
                    py.detach(|| sleep_on(&fd, sleep))
                        .map_err(|source| outcome::raised(py, &Error::System { doing: "wait", source }, what))?;
                }
            }
            py.check_signals()?;
        }
    }
}

/// Sleeps until the descriptor is readable, a signal comes, or the time is over.
fn sleep_on(fd: &OwnedFd, longest: Duration) -> std::io::Result<()> {
    let longest = Timespec { tv_sec: longest.as_secs().cast_signed(), tv_nsec: longest.subsec_nanos().into() };
    match poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&longest)) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

impl<H> Drop for Slot<H> {
    fn drop(&mut self) {
        if child::is_child() {
            // Without the lock: a thread of the parent may have held it at the fork.
            std::mem::forget(self.value.get_mut().unwrap_or_else(PoisonError::into_inner).take());
        }
    }
}

impl<H> fmt::Debug for Slot<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Slot")
    }
}

/// A length of time that a program gives in seconds, and what it is called in an error.
pub(crate) fn duration(what: &str, seconds: f64) -> Result<Duration, String> {
    Duration::try_from_secs_f64(seconds).map_err(|e| format!("{what}: {e}"))
}

/// A time-out that a program gives in seconds; `None` is no limit.
pub(crate) fn timeout(py: Python<'_>, seconds: Option<f64>) -> PyResult<Option<Duration>> {
    let timeout = seconds.map(|seconds| duration("a time-out in seconds", seconds)).transpose();
    timeout.map_err(|text| outcome::exception(py, "Invalid", &text))
}

/// The time-out of an object, as `settimeout` of Python's sockets has it.
#[derive(Debug)]
pub(crate) struct Timeout(Mutex<Option<Duration>>);

impl Timeout {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(None))
    }

    pub(crate) fn get(&self) -> Option<Duration> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the time-out in seconds; `None` is no limit.
    pub(crate) fn set(&self, py: Python<'_>, seconds: Option<f64>) -> PyResult<()> {
        let timeout = timeout(py, seconds)?;
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = timeout;
        Ok(())
    }

    /// Python's `setblocking`.
    pub(crate) fn set_blocking(&self, py: Python<'_>, blocking: bool) -> PyResult<()> {
        self.set(py, if blocking { None } else { Some(0.0) })
    }

    pub(crate) fn seconds(&self) -> Option<f64> {
        self.get().map(|timeout| timeout.as_secs_f64())
    }
}
