//! Real descriptors for the core.

use std::mem::offset_of;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;

use partywall_region::{Link, bell, link, memfd};
use partywall_shm::layout::{Geometry, SocketPage};
use partywall_shm::sync::Own;

use crate::core::Descriptor;

/// A descriptor that arrived from a client, or one of the broker's own. Counted, because the core keeps regions that are also in
/// transit to a listener.
#[derive(Debug, Clone)]
pub(super) enum Received {
    /// Closed here, without waiting: memory, or a socket that the broker has made.
    Kept(Arc<OwnedFd>),
    /// A client's UNIX socket. What lies unread in it is closed with it, and that may wait.
    Foreign(Arc<Foreign>),
    /// Something that nobody could use, and that is closed already.
    Nothing,
}

/// A descriptor that must not be closed in the event loop: when it is dropped, the server disposes of it.
#[derive(Debug)]
pub(super) struct Foreign {
    fd: Option<OwnedFd>,
    /// A session has a copy, so that closing this one ends nothing.
    passed_on: AtomicBool,
    waste: Sender<OwnedFd>,
}

impl Drop for Foreign {
    fn drop(&mut self) {
        if let Some(fd) = self.fd.take()
            && !*self.passed_on.get_mut()
        {
            // The server has ended if nobody listens: then this process waits for nobody any more.
            let _ = self.waste.send(fd);
        }
    }
}

impl Received {
    /// What must not be closed in the event loop.
    pub(super) fn foreign(fd: OwnedFd, waste: &Sender<OwnedFd>) -> Self {
        Self::Foreign(Arc::new(Foreign { fd: Some(fd), passed_on: AtomicBool::new(false), waste: waste.clone() }))
    }

    /// It lies in another session's socket now.
    pub(super) fn passed_on(&self) {
        if let Self::Foreign(foreign) = self {
            foreign.passed_on.store(true, Ordering::Relaxed);
        }
    }
}

impl From<OwnedFd> for Received {
    fn from(fd: OwnedFd) -> Self {
        Self::Kept(Arc::new(fd))
    }
}

impl Received {
    pub(super) fn fd(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Kept(fd) => Some(fd.as_fd()),
            Self::Foreign(foreign) => foreign.fd.as_ref().map(AsFd::as_fd),
            Self::Nothing => None,
        }
    }
}

impl Descriptor for Received {
    fn link() -> Result<(Self, Self), String> {
        let (near, far) = link::pair().map_err(|e| format!("the broker cannot make a link: {e}"))?;
        Ok((near.into(), far.into()))
    }

    fn link_to_machine() -> Result<(Self, Self), String> {
        let (near, far) = Link::pair().map_err(|e| format!("the broker cannot make a link: {e}"))?;
        Ok((near.into(), far.into()))
    }

    fn check_region(&self, geometry: Geometry) -> Result<(), String> {
        match self.fd().map(|fd| memfd::verify(fd, geometry)) {
            Some(Ok(())) => Ok(()),
            _ => {
                let size = geometry.region_size();
                Err(format!("a region must be a memfd of {size} bytes, wholly allocated and sealed (protocol M1, M2)"))
            }
        }
    }

    fn check_seat(&self, size: u64) -> Result<(), String> {
        match self.fd().map(|fd| memfd::verify_seat(fd, size)) {
            Some(Ok(())) => Ok(()),
            _ => Err(format!(
                "a seat's memory must be a memfd of {size} bytes, wholly allocated and sealed (protocol J3)"
            )),
        }
    }

    fn make_bell(&self) -> Result<[Self; 2], String> {
        let (a, b) = bell::pair().map_err(|e| e.to_string())?;
        Ok([a.into(), b.into()])
    }

    fn written(&self) -> u64 {
        let mut tail = [0; 8];
        // A region is a sealed memfd, and the word lies in its first page. An owner whose word cannot be read has written nothing.
        let at = offset_of!(SocketPage<Own>, control.tx.cursor) as u64;
        match self.fd().map(|region| rustix::io::pread(region, &mut tail, at)) {
            Some(Ok(8)) => u64::from_le_bytes(tail),
            _ => 0,
        }
    }
}
