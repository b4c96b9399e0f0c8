//! How other threads ask a running loop for something.

use crate::VhostError;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Sender, SyncSender, sync_channel};

/// The answer of a loop.
pub(crate) type Answer = Result<serde_json::Value, VhostError>;
/// A request, and where its answer goes.
pub(crate) type Asked<R> = (R, SyncSender<Answer>);

/// Asks a running loop.
#[derive(Debug, Clone)]
pub struct RequestHandle<R> {
    requests: Sender<Asked<R>>,
    wake: Arc<OwnedFd>,
}

impl<R> RequestHandle<R> {
    pub(crate) fn new(requests: Sender<Asked<R>>, wake: Arc<OwnedFd>) -> Self {
        Self { requests, wake }
    }

    /// Asks for something and waits for the answer.
    pub fn ask(&self, request: R) -> Result<serde_json::Value, VhostError> {
        let (sender, receiver) = sync_channel(1);
        self.requests.send((request, sender)).map_err(|_| VhostError::Closed)?;
        rustix::io::write(&*self.wake, &1_u64.to_ne_bytes()).map_err(VhostError::system("wake the loop"))?;
        receiver.recv().map_err(|_| VhostError::Closed)?
    }
}
