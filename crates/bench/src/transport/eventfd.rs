//! Two eventfds, rung in turn: the least that wakes a sleeping process.

use std::os::fd::OwnedFd;

use rustix::event::{EventfdFlags, eventfd};

use super::{CopyLink, SideDescriptors};
use crate::error::{During, Result};

/// Carries no payload; a "message" is the number 1.
#[derive(Debug)]
pub(super) struct Eventfds {
    hear: OwnedFd,
    ring: OwnedFd,
}

/// One each way.
pub(super) fn prepare() -> Result<[Vec<OwnedFd>; 2]> {
    let make = || eventfd(0, EventfdFlags::CLOEXEC).during("making an eventfd");
    let (forward, reverse) = (make()?, make()?);
    let again = |fd: &OwnedFd| fd.try_clone().during("duplicating an eventfd");
    Ok([vec![again(&reverse)?, again(&forward)?], vec![forward, reverse]])
}

impl Eventfds {
    /// From the one to hear and the one to ring.
    pub(super) fn open(mut wires: SideDescriptors) -> Result<Self> {
        Ok(Self { hear: wires.take()?, ring: wires.take()? })
    }
}

impl CopyLink for Eventfds {
    fn send(&mut self, _message: &[u8]) -> Result<()> {
        rustix::io::write(&self.ring, &1u64.to_ne_bytes()).during("writing an eventfd")?;
        Ok(())
    }

    fn receive(&mut self, buffer: &mut [u8]) -> Result<usize> {
        rustix::io::read(&self.hear, &mut [0; 8]).during("reading an eventfd")?;
        Ok(buffer.len())
    }
}
