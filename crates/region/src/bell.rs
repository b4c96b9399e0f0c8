//! Doorbells of a connection of unmodified programs: a socket pair that the broker makes, each end given away once.
//!
//! A party listens to its end and rings by it. The broker keeps no end, so no third process can change the options of an end, or receive
//! from it. Only the peer can send, and its descriptors must not arrive: the thread that closes one may wait for a FUSE server or a
//! lingering TCP socket of the peer's.
//!
//! - From Linux 6.16 on, both ends refuse descriptors, so the peer's `sendmsg` fails.
//! - Before that, the listener looks at what comes before it takes it. Descriptors are never taken: the bell counts as hung up, and
//!   [`is_poisoned`] says that its socket must stay open, because closing it would close what lies in it.
//!
//! A pipe would carry no descriptors at all. But the kernel copies from and to a pipe under a lock that both ends share: a peer that writes
//! from memory, or reads into memory, whose page faults it answers late (FUSE, userfaultfd) blocks the other's reads, writes and `close`,
//! non-blocking or not. A socket copies before it takes any lock of the other end's.
//!
//! The links of the library ([`crate::Link`]) are made the same way. They carry packets, where a bell is a byte of a stream, so that one
//! call takes many.

use crate::packet;
use crate::sockopt::{guarded_pair, refuses_descriptors};
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, SocketFlags, SocketType};
use std::io;

/// Makes the two ends. The caller gives each away and keeps none. An end is readable when the peer has rung, and hangs up when the peer's
/// is closed.
///
/// # Errors
///
/// Out of descriptors.
pub fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let (a, b) = guarded_pair(SocketType::STREAM, SocketFlags::NONBLOCK)?;
    for end in [&a, &b] {
        // An urgent byte is a bell like any other. Out of line, it is readable without end to a listener that does not ask for it, and a look passes
        // over the descriptors that come with it.
        rustix::net::sockopt::set_socket_oobinline(end, true)?;
    }
    Ok((a, b))
}

/// Rings: whether the peer has a bell waiting now, so that it wakes. Never blocks.
pub fn ring(end: impl AsFd, byte: u8) -> bool {
    // Full: bells are waiting.
    matches!(try_ring(end, byte), Ok(()) | Err(Errno::AGAIN))
}

/// Rings, and fails with `EAGAIN` if the socket is full. A listener that waits for edges hears none then. Never raises `SIGPIPE`.
///
/// # Errors
///
/// The error of the kernel.
pub fn try_ring(end: impl AsFd, byte: u8) -> Result<(), Errno> {
    loop {
        match rustix::net::send(&end, &[byte], SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Err(Errno::INTR) => {}
            other => return other.map(|_| ()),
        }
    }
}

/// The result of one look at a listening end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Heard {
    /// No bell waits.
    Nothing,
    /// A bell, which has been taken.
    Bell,
    /// The peer has closed its end, or has sent something other than a bell.
    Gone,
}

/// Takes one bell, if there is one. Never blocks.
pub fn hear(listen: impl AsFd) -> Heard {
    match take(listen, &mut [0; 1]) {
        Ok(1..) => Heard::Bell,
        Err(Errno::AGAIN) => Heard::Nothing,
        Ok(_) | Err(_) => Heard::Gone,
    }
}

/// Takes as many bells as there are, at most as many as `bells` has room for. Returns how many; 0 at the end. Never blocks.
///
/// # Errors
///
/// `EAGAIN` if there are none, `EBADMSG` if the peer has sent descriptors. They are not taken.
pub fn take(listen: impl AsFd, bells: &mut [u8]) -> Result<usize, Errno> {
    let room = if refuses_descriptors(&listen) {
        bells.len()
    } else {
        // Only what has been looked at: one call goes on from bells without descriptors to one that has some.
        packet::bytes_without_descriptors(&listen, bells)?.ok_or(Errno::BADMSG)?
    };
    let bells = &mut bells[..room];
    loop {
        match rustix::net::recv(&listen, &mut *bells, RecvFlags::DONTWAIT) {
            Err(Errno::INTR) => {}
            other => return other.map(|(len, _)| len),
        }
    }
}

/// Whether descriptors lie in the socket, so that closing it would close them. Takes the bells before them.
pub fn is_poisoned(listen: impl AsFd) -> bool {
    if refuses_descriptors(&listen) {
        return false;
    }
    loop {
        match take(&listen, &mut [0; 256]) {
            Ok(1..) => {}
            Ok(_) => return false,
            Err(e) => return e == Errno::BADMSG,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use rustix::net::AddressFamily;

    fn state(fd: &OwnedFd) -> PollFlags {
        let mut fds = [PollFd::new(fd, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap();
        fds[0].revents()
    }

    #[test]
    fn each_party_hears_only_the_other() {
        let (a, b) = pair().unwrap();
        assert!(ring(&a, b'B'));
        assert_eq!(state(&b), PollFlags::IN);
        assert_eq!(state(&a), PollFlags::empty());
        assert_eq!((hear(&b), hear(&b)), (Heard::Bell, Heard::Nothing));
    }

    #[test]
    fn full_bell_never_blocks_the_ringer() {
        let (a, b) = pair().unwrap();
        while try_ring(&a, b'B').is_ok() {}
        assert_eq!(try_ring(&a, b'B'), Err(Errno::AGAIN));
        assert!(ring(&a, b'B'), "bells are waiting");
        assert_eq!(state(&b), PollFlags::IN);
        let mut many = [0; 64];
        assert_eq!(take(&b, &mut many), Ok(64), "one call takes many");
    }

    #[test]
    fn closed_party_hangs_up_and_ringing_it_raises_no_signal() {
        let (a, b) = pair().unwrap();
        assert!(ring(&b, b'B'));
        drop(b);
        assert!(state(&a).contains(PollFlags::HUP));
        // SIGPIPE would end the test.
        assert!(!ring(&a, b'B'));
        assert_eq!((hear(&a), hear(&a)), (Heard::Bell, Heard::Gone));
    }

    #[test]
    fn descriptors_are_never_taken() {
        let (a, b) = pair().unwrap();
        let sent = crate::packet::try_send(a.as_fd(), b"B", &[a.as_fd()]);
        if refuses_descriptors(&b) {
            assert_eq!(sent.unwrap_err().raw_os_error(), Some(Errno::PERM.raw_os_error()));
            assert!(!is_poisoned(&b));
        } else {
            sent.unwrap();
            assert_eq!((hear(&b), hear(&b)), (Heard::Gone, Heard::Gone));
            assert!(is_poisoned(&b));
        }
    }

    #[test]
    fn look_at_descriptors_leaves_them_in_the_socket() {
        // As before Linux 6.16: ends that take descriptors.
        let (a, b) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        crate::packet::try_send(a.as_fd(), b"B", &[a.as_fd()]).unwrap();
        assert_eq!((hear(&b), hear(&b)), (Heard::Gone, Heard::Gone));
        assert!(is_poisoned(&b));
        let received = crate::packet::try_recv(b.as_fd(), &mut [0; 4]).unwrap();
        assert_eq!((received.len, received.fds.len()), (1, 1), "nobody has taken it");
    }

    #[test]
    fn bells_before_descriptors_are_taken_without_them() {
        for is_looked_for in [false, true] {
            let (a, b) =
                rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
            let (spare, other) = rustix::pipe::pipe().unwrap();
            for _ in 0..3 {
                assert!(ring(&a, b'B'));
            }
            crate::packet::try_send(a.as_fd(), b"B", &[spare.as_fd()]).unwrap();
            drop(spare);
            if !is_looked_for {
                // Some kernels look further than they were asked to, and none takes the descriptors.
                while let Ok(taken) = take(&b, &mut [0; 2]) {
                    assert!((1..=2).contains(&taken));
                }
            }
            assert!(is_poisoned(&b), "{is_looked_for}");
            assert!(!state(&other).contains(PollFlags::ERR), "its reader is open still");
        }
    }

    #[test]
    fn urgent_byte_is_a_bell() {
        let (a, b) = pair().unwrap();
        rustix::net::send(&a, b"B", SendFlags::OOB).unwrap();
        assert_eq!((hear(&b), hear(&b)), (Heard::Bell, Heard::Nothing));
        assert_eq!(state(&b), PollFlags::empty());
    }
}
