//! The mailbox of a running server: what other threads ask of it (a stop, a new policy, an errand for virtual machines), and its status.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::event::EventfdFlags;

use partywall_protocol::wire::Message;

use crate::core::{MachineNews, SessionId, Status};
use crate::credentials::Credentials;
use crate::policy::Policy;

/// A handle on a running [`Server`](crate::Server), for any thread.
#[derive(Debug, Clone)]
pub struct Control(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    bell: OwnedFd,
    wishes: Mutex<Wishes>,
    status: Mutex<Status>,
}

/// What other threads have asked of the server.
#[derive(Debug, Default)]
pub(crate) struct Wishes {
    pub(crate) stop: bool,
    pub(crate) policy: Option<Policy>,
    pub(crate) errands: Vec<Errand>,
}

/// What the thread that attends to virtual machines has for the server.
#[derive(Debug)]
pub(crate) enum Errand {
    /// A session of a program in a machine: the broker's end of its socket, and the program's credentials.
    Admit(OwnedFd, Credentials),
    /// A machine has changed its state.
    News(MachineNews<OwnedFd>),
    /// The answer to an order.
    Answer(SessionId, u32, Message),
}

impl Control {
    pub(crate) fn new() -> std::io::Result<Self> {
        let bell = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self(Arc::new(Inner { bell, wishes: Mutex::default(), status: Mutex::default() })))
    }

    /// Ends [`Server::run`](crate::Server::run) soon.
    pub fn stop(&self) {
        lock(&self.0.wishes).stop = true;
        self.ring();
    }

    /// Puts another policy in force soon. Sessions that it would not let join are ended; open channels go on.
    pub fn set_policy(&self, policy: Policy) {
        lock(&self.0.wishes).policy = Some(policy);
        self.ring();
    }

    /// Has the server do this soon; errands are done in order.
    pub(crate) fn errand(&self, errand: Errand) {
        lock(&self.0.wishes).errands.push(errand);
        self.ring();
    }

    /// How much there was of everything after the latest event.
    pub fn status(&self) -> Status {
        *lock(&self.0.status)
    }

    pub(crate) fn set_status(&self, status: Status) {
        *lock(&self.0.status) = status;
    }

    pub(crate) fn take_wishes(&self) -> Wishes {
        // Emptied before the wishes are taken: a wish that comes later rings again.
        let _ = rustix::io::read(&self.0.bell, &mut [0u8; 8]);
        std::mem::take(&mut *lock(&self.0.wishes))
    }

    fn ring(&self) {
        // Fails only if 2^64 - 2 rings wait, which wake the server as well as one more would.
        let _ = rustix::io::write(&self.0.bell, &1u64.to_ne_bytes());
    }
}

impl AsFd for Control {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.bell.as_fd()
    }
}

/// Each value is stored whole, so one that a panicking thread left behind is as good as any.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
