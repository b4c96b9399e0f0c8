//! The events that the engine waits for.

use crate::VhostError;
use rustix::buffer::spare_capacity;
use rustix::event::epoll;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

/// Waits until something comes, however long that takes.
pub(crate) const UNLIMITED: u64 = u64::MAX;

/// An epoll set that its members share.
#[derive(Debug, Clone)]
pub(crate) struct WatchSet(Arc<OwnedFd>);

/// A descriptor in a set. It leaves the set when it is dropped, also if others hold the same open file.
#[derive(Debug)]
pub(crate) struct Watched<F: AsFd> {
    poller: WatchSet,
    token: u64,
    paused: bool,
    fd: F,
}

impl WatchSet {
    pub(crate) fn new() -> Result<Self, VhostError> {
        let set = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(VhostError::system("make an epoll set"))?;
        Ok(Self(Arc::new(set)))
    }

    /// Watches a descriptor for input, and for its peer's end.
    pub(crate) fn watch<F: AsFd>(&self, fd: F, token: u64) -> Result<Watched<F>, VhostError> {
        self.add(&fd, token)?;
        Ok(Watched { poller: self.clone(), token, paused: false, fd })
    }

    /// As [`Self::watch`], for a descriptor that its owner takes out again, or closes as its only holder.
    pub(crate) fn add(&self, fd: &impl AsFd, token: u64) -> Result<(), VhostError> {
        epoll::add(&*self.0, fd, epoll::EventData::new_u64(token), epoll::EventFlags::IN)
            .map_err(VhostError::system("watch a descriptor"))
    }

    /// Does not watch it any longer.
    pub(crate) fn remove(&self, fd: &impl AsFd) {
        let _ = epoll::delete(&*self.0, fd);
    }

    /// Waits, at most `nanoseconds` ([`UNLIMITED`] is no limit), and puts the tokens of what has something to be read into `tokens`.
    pub(crate) fn wait(
        &self,
        nanoseconds: u64,
        events: &mut Vec<epoll::Event>,
        tokens: &mut Vec<u64>,
    ) -> Result<(), VhostError> {
        events.clear();
        tokens.clear();
        let limit = rustix::time::Timespec {
            tv_sec: i64::try_from(nanoseconds / 1_000_000_000).unwrap_or(0),
            tv_nsec: i64::try_from(nanoseconds % 1_000_000_000).unwrap_or(0),
        };
        match epoll::wait(&*self.0, spare_capacity(events), (nanoseconds != UNLIMITED).then_some(&limit)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(VhostError::system("wait")(e)),
        }
        tokens.extend(events.iter().map(|event| event.data.u64()));
        Ok(())
    }
}

impl<F: AsFd> Watched<F> {
    pub(crate) fn get(&self) -> &F {
        &self.fd
    }

    /// Leaves the set until [`Self::resume`]: its input waits, and wakes nobody.
    pub(crate) fn pause(&mut self) {
        if !self.paused {
            self.poller.remove(&self.fd);
            self.paused = true;
        }
    }

    /// Returns to the set. If that fails, it is still paused.
    pub(crate) fn resume(&mut self) {
        if self.paused {
            self.paused = self.poller.add(&self.fd, self.token).is_err();
        }
    }

    /// Whether it is not in the set.
    pub(crate) fn is_paused(&self) -> bool {
        self.paused
    }
}

impl<F: AsFd> Drop for Watched<F> {
    fn drop(&mut self) {
        self.poller.remove(&self.fd);
    }
}
