//! The shorter way for rings between machines (protocol I): an interrupt of the machine that is to wake, instead of two serial ports.
//!
//! ```text
//!   process A --event--> doorbell --> interrupt --event--> process B
//!       | both events come by the links, once each:                |
//!       +--socket-- relay A == port == host == host == port == relay B
//! ```
//!
//! How a guest is rung, and rings, is its device's business ([`GuestDoorbells`]); whom it may ring the host decides, which hands out the
//! other ends ([`HostDoorbells`]). A relay without either leaves all rings to the port.

use rustix::fd::OwnedFd;
use std::fmt::Debug;

/// A guest's device.
pub trait GuestDoorbells: Debug + Send {
    /// A vector for one link, and the event that it signals; `None` if all are taken, or the device is out of order.
    fn take(&mut self) -> Option<(u32, OwnedFd)>;

    /// The link of this vector is gone.
    fn give_back(&mut self, vector: u32);

    /// Rings a peer. What the device has not been told of is not rung.
    fn ring(&self, peer: u32);

    /// An event that rings a peer whenever it is signalled; `None` if there is no such thing.
    fn ringer(&mut self, peer: u32) -> Option<OwnedFd>;

    /// That event rings nobody any more.
    fn forget(&mut self, peer: u32);
}

/// The host's end of a guest's device.
pub trait HostDoorbells: Debug + Send {
    /// What to signal so that this vector of the guest's is rung; `None` if it has no such vector.
    fn event(&self, vector: u32) -> Option<OwnedFd>;

    /// Lets the guest ring this event, as a peer of the number that is returned, from now on. The same event always has the same number.
    /// `None` if it cannot.
    fn introduce(&mut self, event: OwnedFd) -> Option<u32>;
}

/// What a relay rings and is rung by besides its port.
#[derive(Debug, Default)]
pub enum Doorbells {
    /// Nothing.
    #[default]
    None,
    /// In a guest.
    Guest(Box<dyn GuestDoorbells>),
    /// On the host.
    Host(Box<dyn HostDoorbells>),
}

/// Whether a descriptor is an event of the kernel's, which can be given to a hypervisor to signal: anything else might hold it up, or
/// end it.
pub(super) fn is_event(fd: &OwnedFd) -> bool {
    use std::os::fd::AsRawFd as _;
    let link = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()));
    // Links to files begin with a slash.
    link.is_ok_and(|to| to.as_os_str() == "anon_inode:[eventfd]")
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};

    #[test]
    fn events_are_told_from_other_descriptors() {
        assert!(is_event(&eventfd(0, EventfdFlags::CLOEXEC).unwrap()));
        let folder = tempfile::tempdir().unwrap();
        let file = std::fs::File::create(folder.path().join("anon_inode:[eventfd]")).unwrap();
        assert!(!is_event(&file.into()));
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        assert!(!is_event(&reader) && !is_event(&writer));
        assert!(!is_event(&rustix::event::epoll::create(rustix::event::epoll::CreateFlags::CLOEXEC).unwrap()));
    }
}
