//! Ctrl-C and requests to terminate, as a descriptor to wait on: the main loop returns, and returning cleans up.

use std::{
    io::Read,
    os::{
        fd::{AsFd, BorrowedFd},
        unix::net::UnixStream,
    },
};

use signal_hook::{consts, low_level::pipe};

use crate::error::{BenchError, During, Result};

/// Readable once the user wants the bench to end.
#[derive(Debug)]
pub(crate) struct Interrupt(UnixStream);

impl Interrupt {
    /// From here on the signals no longer end the process by themselves.
    pub(crate) fn catch() -> Result<Self> {
        let (told, tell) = UnixStream::pair().during("making the signal pipe")?;
        told.set_nonblocking(true).during("making the signal pipe")?;
        for signal in [consts::SIGINT, consts::SIGTERM, consts::SIGHUP] {
            let tell = tell.try_clone().during("making the signal pipe")?;
            pipe::register(signal, tell).during("catching signals")?;
        }
        Ok(Self(told))
    }

    /// A second handle to the same signals. Each signal is an error of only one of the handles, which is enough to end the bench.
    pub(crate) fn again(&self) -> Result<Self> {
        Ok(Self(self.0.try_clone().during("duplicating the signal pipe")?))
    }

    /// An error if a signal has come.
    pub(crate) fn check(&self) -> Result<()> {
        // An empty pipe is an error of a nonblocking socket: no signal has come.
        if (&self.0).read_exact(&mut [0]).is_ok() { Err(BenchError::Interrupted) } else { Ok(()) }
    }
}

impl AsFd for Interrupt {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
