//! Real descriptors for the core.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use partywall_region::{memfd, packet};
use partywall_shm::layout::Geometry;
use rustix::net::sockopt;

use crate::core::Descriptor;

/// A descriptor that arrived from a client. Counted, because the core keeps regions that are also on their way to a listener.
#[derive(Debug, Clone)]
pub(super) struct Received(Arc<Unhurried>);

impl From<OwnedFd> for Received {
    fn from(fd: OwnedFd) -> Self {
        Unhurried(fd).into()
    }
}

impl From<Unhurried> for Received {
    fn from(fd: Unhurried) -> Self {
        Self(Arc::new(fd))
    }
}

/// A stranger's descriptor, that does not make us wait when it is closed: a TCP socket may have been told to linger until its
/// peer has taken everything, and ours may be the last descriptor of it.
#[derive(Debug)]
pub(super) struct Unhurried(pub(super) OwnedFd);

impl Drop for Unhurried {
    fn drop(&mut self) {
        // Of anything but a socket this fails, and there is nothing to be done.
        if let Ok(Some(_)) = sockopt::socket_linger(&self.0) {
            let _ = sockopt::set_socket_linger(&self.0, None);
        }
    }
}

impl AsFd for Received {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.0.as_fd()
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

    fn check_stream_link(&self) -> Result<(), String> {
        use rustix::net::{AddressFamily, SocketType};
        let unix = sockopt::socket_domain(self) == Ok(AddressFamily::UNIX);
        if unix && sockopt::socket_type(self) == Ok(SocketType::STREAM) {
            Ok(())
        } else {
            Err("a socket's link end must be a SOCK_STREAM UNIX socket (protocol T3)".to_owned())
        }
    }
}
