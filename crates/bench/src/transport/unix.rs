//! A UNIX stream socket pair, with the kernel's default buffers.

use std::os::{fd::OwnedFd, unix::net::UnixStream};

use super::descriptor::twice;
use crate::error::{During, Result};

/// Connected already: a named socket behaves the same once it is.
pub(super) fn connect() -> Result<[Vec<OwnedFd>; 2]> {
    let (active, passive) = UnixStream::pair().during("making a UNIX socket pair")?;
    Ok([twice(active.into())?, twice(passive.into())?])
}
