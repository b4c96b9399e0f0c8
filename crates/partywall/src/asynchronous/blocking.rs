//! Calls that may wait, on the runtime's threads for blocking calls.

use crate::{Error, Result};
use std::io;
use tokio::task::{JoinError, spawn_blocking};

/// Makes the call on a thread for blocking calls, and returns its result.
pub(super) async fn blocking<T: Send + 'static>(call: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    spawn_blocking(call).await.map_err(ended)?
}

/// The runtime has ended, or the call has panicked.
pub(super) fn ended(error: JoinError) -> Error {
    Error::system("run a blocking call", io::Error::other(error))
}
