//! Sockets in which the other end's holder may have left descriptors, closed by a thread that does not wait.
//!
//! To close a UNIX socket is to close what lies unread in it. A TCP socket that lingers then waits for its peer, for as long as its maker likes.

use crate::packet;
use rustix::fd::{AsFd, OwnedFd};
use rustix::net::Shutdown;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Threads that may hang, at once in this process.
const MOST: usize = 32;

static AT_WORK: AtomicUsize = AtomicUsize::new(0);

/// Closes a socket that no other process has had, and no other thread uses. The other end hangs up at once. If there are descriptors in the socket, another thread closes
/// it. Where no thread can be had, it stays open until the process ends.
pub fn close(socket: OwnedFd) {
    // From here on nothing is added to it.
    let _ = rustix::net::shutdown(&socket, Shutdown::Both);
    // Nobody else has had this end and could have changed that.
    if packet::refuses_descriptors(&socket) {
        return;
    }
    if !packet::is_harmless_to_close(socket.as_fd(), packet::ALL) {
        let socket = ManuallyDrop::new(socket);
        begin("partywall-close", move || drop(ManuallyDrop::into_inner(socket)));
    }
}

/// Runs something that may hang. `false`, without having run it, if too many do or there is no thread to be had.
pub(crate) fn begin(name: &str, what: impl FnOnce() + Send + 'static) -> bool {
    struct AtWork;
    impl Drop for AtWork {
        fn drop(&mut self) {
            AT_WORK.fetch_sub(1, Ordering::Relaxed);
        }
    }
    let before = AT_WORK.fetch_add(1, Ordering::Relaxed);
    let at_work = AtWork;
    let run = move || {
        let _at_work = at_work;
        what();
    };
    before < MOST && std::thread::Builder::new().name(name.into()).spawn(run).is_ok()
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    /// Whether the reader of this writing end of a pipe is open.
    fn is_open(writer: &OwnedFd) -> bool {
        poll(&mut [PollFd::new(writer, PollFlags::empty())], Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() == 0
    }

    #[test]
    fn descriptor_behind_empty_packets_is_not_closed_here() {
        // As many are at work as may be, so no thread can be had.
        AT_WORK.fetch_add(MOST, Ordering::Relaxed);
        for empty in 0..3 {
            let (here, there) = packet::pair().unwrap();
            let (spare, other) = rustix::pipe::pipe().unwrap();
            for _ in 0..empty {
                packet::try_send(there.as_fd(), b"", &[]).unwrap();
            }
            packet::try_send(there.as_fd(), b"x", &[spare.as_fd()]).unwrap();
            drop(spare);
            close(here);
            assert!(is_open(&other), "behind {empty}");
            assert!(packet::has_hung_up(there.as_fd()));
        }
        AT_WORK.fetch_sub(MOST, Ordering::Relaxed);
    }
}
