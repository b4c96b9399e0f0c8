//! Real descriptors for the core.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use partywall_region::{memfd, packet};
use partywall_shm::layout::Geometry;

use crate::core::Descriptor;

/// A descriptor that arrived from a client. Counted, because the core keeps regions that are also on their way to a listener.
#[derive(Debug, Clone)]
pub(super) struct Received(Arc<OwnedFd>);

impl From<OwnedFd> for Received {
    fn from(fd: OwnedFd) -> Self {
        Self(Arc::new(fd))
    }
}

impl AsFd for Received {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Descriptor for Received {
    fn check_region(&self, geometry: Geometry) -> Result<(), String> {
        memfd::verify(self.as_fd(), geometry).map_err(|_| {
            let size = geometry.region_size();
            format!("a region must be a memfd of {size} bytes, wholly allocated and sealed (protocol M1, M2)")
        })
    }

    fn check_link(&self) -> Result<(), String> {
        if packet::is_seqpacket(self) {
            Ok(())
        } else {
            Err("a link end must be a SOCK_SEQPACKET UNIX socket (protocol L1)".to_owned())
        }
    }
}
