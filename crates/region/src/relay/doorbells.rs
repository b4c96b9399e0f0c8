//! The shorter way for rings between machines (protocol I): an interrupt of the machine that is to wake, instead of two serial ports.
//!
//! ```text
//!   process A --event--> doorbell --> interrupt --event--> process B
//!       | both events come by the links, once each:                |
//!       +--socket-- relay A == port == host == host == port == relay B
//! ```
//!
//! A guest rings and is rung by its device ([`GuestDoorbells`]). The host decides which peers it may ring, and hands out the other ends
//! ([`HostDoorbells`]). A relay without either leaves all rings to the port.

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use rustix::io::{ReadWriteFlags, preadv2};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::io::{self, IoSliceMut};
use std::sync::{Mutex, PoisonError};

/// A guest's device.
pub trait GuestDoorbells: Debug + Send {
    /// A vector for one link, and the event that it signals; `None` if all are taken, or the device is out of order.
    fn take(&mut self) -> Option<(u32, OwnedFd)>;

    /// The link of this vector is gone.
    fn give_back(&mut self, vector: u32);

    /// Rings a peer. A peer that the device does not know is not rung.
    fn ring(&self, peer: u32);

    /// Rings a peer whenever this event is signalled, and once if it is signalled already. `false` if that cannot be.
    fn ring_upon(&mut self, peer: u32, event: BorrowedFd<'_>) -> bool;

    /// The event no longer rings that peer.
    fn forget(&mut self, peer: u32);
}

/// The host's end of a guest's device.
pub trait HostDoorbells: Debug + Send {
    /// The event to signal to ring this vector of the guest; `None` if the guest has no such vector.
    fn event(&self, vector: u32) -> Option<OwnedFd>;

    /// Lets the guest ring this event from now on, as the peer whose number is returned. The same event always has the same number.
    /// `None` if the device cannot take it.
    fn introduce(&mut self, event: OwnedFd) -> Option<u32>;
}

/// The events of a bell's process in a guest (protocol I7). The process gets them with its end of the bell, and not by the link.
#[derive(Debug)]
pub struct BellEvents {
    /// Signalled when the other side rings by the device.
    pub heard: OwnedFd,
    /// To be signalled instead of ringing by the link.
    pub ringing: OwnedFd,
}

/// The events that no process has been given yet, by link.
#[derive(Debug, Default)]
pub(super) struct WaitingEvents(Mutex<BTreeMap<u32, BellEvents>>);

impl WaitingEvents {
    pub(super) fn put(&self, link: u32, events: BellEvents) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(link, events);
    }

    pub(super) fn take(&self, link: u32) -> Option<BellEvents> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&link)
    }
}

/// An event that never blocks who signals it.
pub(super) fn event() -> rustix::io::Result<OwnedFd> {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
}

/// Takes the signals of an event that a process has as well. The process can make the event blocking, and take its signals first, so this
/// asks for the read itself not to wait, which takes Linux 5.8.
pub(super) fn take_signals(event: &OwnedFd) -> rustix::io::Result<()> {
    let mut count = [0; 8];
    preadv2(event, &mut [IoSliceMut::new(&mut count)], u64::MAX, ReadWriteFlags::NOWAIT).map(drop)
}

/// Signals an event that a hypervisor has as well. A hypervisor that was taken over can make it blocking and fill it, so this looks for
/// room first. Full, it is signalled already.
pub(super) fn signal(event: &OwnedFd) {
    let mut fds = [PollFd::new(event, PollFlags::OUT)];
    if poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) == Ok(1) && fds[0].revents() == PollFlags::OUT {
        let _ = rustix::io::write(event, &1u64.to_ne_bytes());
    }
}

/// The doorbell device of a relay, if it has one besides its port.
#[derive(Debug, Default)]
pub enum Doorbells {
    /// No device.
    #[default]
    None,
    /// In a guest.
    Guest(Box<dyn GuestDoorbells>),
    /// On the host.
    Host(Box<dyn HostDoorbells>),
}

/// An event that is an interrupt of some guest's, as a hypervisor signals and takes it. It never blocks who signals it.
#[derive(Debug)]
pub struct VectorEvent {
    event: OwnedFd,
    number: u64,
}

/// The numbers of all that this process has made.
static MADE: Mutex<BTreeSet<u64>> = Mutex::new(BTreeSet::new());

impl VectorEvent {
    /// Makes an event.
    pub fn new() -> io::Result<Self> {
        let event = event()?;
        let number = Self::number(&event).ok_or(io::ErrorKind::Unsupported)?;
        MADE.lock().unwrap_or_else(PoisonError::into_inner).insert(number);
        Ok(Self { event, number })
    }

    /// The number by which the kernel tells one event from others, in whichever process its descriptors are; `None` for what is no event.
    pub fn number(event: &OwnedFd) -> Option<u64> {
        let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", event.as_raw_fd())).ok()?;
        info.lines().find_map(|line| line.strip_prefix("eventfd-id:"))?.trim().parse().ok()
    }

    /// Whether a descriptor belongs to an event that this process has made. Signalling any other descriptor may block or kill the caller:
    /// a process can fill an event so that a write blocks, or pass something else.
    pub fn is_one(event: &OwnedFd) -> bool {
        let made = |number: &u64| MADE.lock().unwrap_or_else(PoisonError::into_inner).contains(number);
        Self::number(event).as_ref().is_some_and(made)
    }
}

impl Drop for VectorEvent {
    fn drop(&mut self) {
        MADE.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.number);
    }
}

impl AsFd for VectorEvent {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    use super::*;

    #[test]
    fn event_that_hypervisor_filled_does_not_block_relay() {
        let event = event().unwrap();
        rustix::io::ioctl_fionbio(&event, false).unwrap();
        rustix::io::write(&event, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        signal(&event);
        take_signals(&event).unwrap();
        signal(&event);
        assert_eq!(take_signals(&event), Ok(()), "with room it is signalled");
    }

    #[test]
    fn event_that_process_made_blocking_is_taken_without_waiting() {
        let event = event().unwrap();
        rustix::io::ioctl_fionbio(&event, false).unwrap();
        assert_eq!(take_signals(&event), Err(rustix::io::Errno::AGAIN));
        rustix::io::write(&event, &1u64.to_ne_bytes()).unwrap();
        assert_eq!((take_signals(&event), take_signals(&event)), (Ok(()), Err(rustix::io::Errno::AGAIN)));
    }

    #[test]
    fn own_event_is_recognised_until_it_is_dropped() {
        let own = VectorEvent::new().unwrap();
        let copy = own.as_fd().try_clone_to_owned().unwrap();
        assert!(VectorEvent::is_one(&copy));
        assert!(!VectorEvent::is_one(&eventfd(0, EventfdFlags::CLOEXEC).unwrap()));
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        assert!(!VectorEvent::is_one(&reader) && !VectorEvent::is_one(&writer));
        drop(own);
        assert!(!VectorEvent::is_one(&copy), "it is nobody's any more");
    }
}
