//! Real descriptors for the core.

use std::cell::RefCell;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use partywall_protocol::wire::Located;
use partywall_region::{Link, bell, link, memfd, packet, pmem};
use partywall_shm::layout::Geometry;

use crate::core::Descriptor;

/// A descriptor that arrived from a client, or one of the broker's own. Counted, because the core keeps regions that are also in
/// transit to a listener.
#[derive(Debug, Clone)]
pub(super) enum ClientDescriptor {
    /// Memory. Closing it never waits.
    Kept(Arc<OwnedFd>),
    /// A link or a bell that the broker has made.
    Made(Arc<MadeSocket>),
    /// A descriptor without use, which is closed already.
    Nothing,
}

impl From<OwnedFd> for ClientDescriptor {
    fn from(fd: OwnedFd) -> Self {
        Self::Kept(Arc::new(fd))
    }
}

/// A socket that the broker has made, and gives to a client or to a machine.
///
/// The holder of the other end may have left descriptors in it. To close the last copy is to close them, which takes as long as their sender likes: the
/// broker's copy is the last if the socket was not given away, or if the one who has it was faster.
#[derive(Debug)]
pub(super) struct MadeSocket {
    /// `None` when it is dropped.
    socket: Option<OwnedFd>,
    /// It has refused descriptors from the beginning. Who it was given to may have changed that.
    is_guarded: bool,
}

thread_local! {
    /// Sockets that this thread, which is an event loop's, has no use for any more, and in which there may be descriptors.
    static LEFT: RefCell<Vec<OwnedFd>> = const { RefCell::new(Vec::new()) };
}

/// What another process is to close.
pub(super) fn take_left() -> Vec<OwnedFd> {
    LEFT.take()
}

impl Drop for MadeSocket {
    fn drop(&mut self) {
        if let Some(socket) = self.socket.take_if(|socket| !self.is_guarded || packet::holds_anything(socket)) {
            // It fails while the thread ends, which nobody waits for.
            let _ = LEFT.try_with(|left| left.borrow_mut().push(socket));
        }
    }
}

impl ClientDescriptor {
    fn made(socket: OwnedFd) -> Self {
        let is_guarded = packet::refuses_descriptors(&socket);
        Self::Made(Arc::new(MadeSocket { socket: Some(socket), is_guarded }))
    }

    pub(super) fn fd(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Kept(fd) => Some(fd.as_fd()),
            Self::Made(made) => made.socket.as_ref().map(AsFd::as_fd),
            Self::Nothing => None,
        }
    }
}

impl Descriptor for ClientDescriptor {
    fn link() -> Result<(Self, Self), String> {
        let (near, far) = link::pair().map_err(|e| format!("the broker cannot make a link: {e}"))?;
        Ok((Self::made(near), Self::made(far)))
    }

    fn link_to_machine() -> Result<(Self, Self), String> {
        let (near, far) = Link::pair().map_err(|e| format!("the broker cannot make a link: {e}"))?;
        Ok((Self::made(near), Self::made(far)))
    }

    fn hang_up(&self) {
        if let Some(socket) = self.fd() {
            let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Both);
        }
    }

    fn check_region(&self, geometry: Geometry) -> Result<(), String> {
        match self.fd().map(|fd| memfd::verify_blocks(fd, geometry)) {
            Some(Ok(())) => Ok(()),
            _ => {
                let size = geometry.region_size();
                Err(format!("a region must be a memfd of {size} bytes, wholly allocated and sealed (protocol M1, M2)"))
            }
        }
    }

    fn check_reserved(&self, geometry: Geometry) -> Result<(), String> {
        match self.fd().map(|fd| memfd::verify_reserved(fd, geometry)) {
            Some(Ok(())) => Ok(()),
            _ => Err(format!(
                "the memory of a region must be a sealed memfd of {} bytes (protocol M1, M2)",
                geometry.region_size()
            )),
        }
    }

    fn check_seat(&self, size: u64) -> Result<(), String> {
        match self.fd().map(|fd| memfd::verify_seat_blocks(fd, size)) {
            Some(Ok(())) => Ok(()),
            _ => Err(format!(
                "a seat's memory must be a memfd of {size} bytes, wholly allocated and sealed (protocol J3)"
            )),
        }
    }

    fn make_bell(&self) -> Result<[Self; 2], String> {
        let (a, b) = bell::pair().map_err(|e| e.to_string())?;
        Ok([Self::made(a), Self::made(b)])
    }

    fn written(&self, located: Located) -> u64 {
        let read = |region: BorrowedFd<'_>| {
            let first = match located {
                Located::OwnMemory => 0,
                // The core has given out the place, so it lies in the window.
                Located::Window { base } => pmem::data_offset(region, base).ok()? + base,
            };
            memfd::written(region, first)
        };
        // An owner whose word cannot be read has written nothing.
        self.fd().and_then(read).unwrap_or(0)
    }
}
