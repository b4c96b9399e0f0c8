//! Doorbells as a pair of pipes: one for each direction, made by the broker, each end given away once.
//!
//! A socket that a peer can write to can bring descriptors, and the receiver pays for closing them: a descriptor of a FUSE file or of a
//! lingering TCP socket blocks the thread that closes it for as long as the peer likes. A socket option set by a peer that kept a copy
//! of our end (`SO_PASSPIDFD`) even leaves a descriptor in our process with each packet. A pipe carries bytes and nothing else.
//!
//! A pipe is not proof against every peer, though: the kernel copies from and to a pipe under a lock that both ends share. A peer that
//! answers page faults late (FUSE, userfaultfd) and reads or writes there blocks the other's reads, writes and `close`. The links of the
//! library are therefore sockets that refuse descriptors ([`crate::link::pair`]).
//!
//! The broker makes both pipes and keeps no end, so each end is an open file description of one party alone: nobody else can change
//! whether its calls block, or steal its bells.
//!
//! ```text
//!   party A                                   party B
//!   ring   (read-write, end of pipe 1) ---->  listen (read-only, end of pipe 1)
//!   listen (read-only, end of pipe 2)  <----  ring   (read-write, end of pipe 2)
//! ```
//!
//! The end that rings is open for reading as well. So its pipe always has a reader, and ringing a peer that is gone does not raise
//! `SIGPIPE` in the program that rings. That the peer is gone shows on the listening end, which hangs up with the last writer.

use rustix::fd::{AsRawFd, OwnedFd};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, fcntl_setpipe_size, pipe_with};
use std::io;

/// Bytes that a bell pipe holds. Rings beyond them are dropped, because the listener has that many waiting.
///
/// Two pages, which is also what the kernel gives to users who have many pipes. One page would not do: the kernel frees it only when it is
/// read to its end, and a listener that leaves a few bells in the pipe would one day have it full of read ones.
const PIPE_BYTES: usize = 8192;

/// What one party holds of a pair of bells.
#[derive(Debug)]
pub struct BellEnds {
    /// Readable when the peer has rung, hung up when the peer's [`ring`](Self::ring) end is closed. Read-only, non-blocking.
    pub listen: OwnedFd,
    /// A byte written here rings the peer; `EAGAIN` says that it has enough rings waiting. Non-blocking, never raises `SIGPIPE`.
    pub ring: OwnedFd,
}

/// Makes the bells of two parties. The caller passes each party its ends and keeps none.
///
/// # Errors
///
/// Out of descriptors, or `/proc` is not mounted: an end that is open both ways can only be opened through `/proc/self/fd`.
pub fn pair() -> io::Result<(BellEnds, BellEnds)> {
    let (listen_b, ring_a) = pipe()?;
    let (listen_a, ring_b) = pipe()?;
    Ok((BellEnds { listen: listen_a, ring: ring_a }, BellEnds { listen: listen_b, ring: ring_b }))
}

/// The listening and the ringing end of one pipe.
fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    let (listen, writer) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
    // A smaller pipe saves kernel memory that is counted against the broker's user; the kernel's own size does as well.
    let _ = fcntl_setpipe_size(&writer, PIPE_BYTES);
    let path = format!("/proc/self/fd/{}", writer.as_raw_fd());
    let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let ring = rustix::fs::open(path, flags, Mode::empty())?;
    Ok((listen, ring))
}

/// Whether `fd` is a pipe's end, as both bells must be.
pub fn is_pipe(fd: impl rustix::fd::AsFd) -> bool {
    rustix::fs::fstat(fd).is_ok_and(|stat| rustix::fs::FileType::from_raw_mode(stat.st_mode).is_fifo())
}

/// Rings: whether the peer has a bell waiting now, so that it wakes. Never blocks.
pub fn ring(end: impl rustix::fd::AsFd, byte: u8) -> bool {
    // Full: bells are waiting.
    matches!(try_ring(end, byte), Ok(()) | Err(Errno::AGAIN))
}

/// Rings, and fails with `EAGAIN` if the pipe is full. A listener that waits for edges hears none then.
///
/// # Errors
///
/// What the kernel says.
pub fn try_ring(end: impl rustix::fd::AsFd, byte: u8) -> Result<(), Errno> {
    loop {
        match rustix::io::write(&end, &[byte]) {
            Err(Errno::INTR) => {}
            other => return other.map(|_| ()),
        }
    }
}

/// What one look at a listening end has found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Heard {
    /// No bell waits.
    Nothing,
    /// A bell, which has been taken.
    Bell,
    /// Nobody can ring any more.
    Gone,
}

/// Takes one bell, if there is one. Never blocks.
pub fn hear(listen: impl rustix::fd::AsFd) -> Heard {
    loop {
        match rustix::io::read(&listen, &mut [0u8; 1]) {
            Err(Errno::INTR) => {}
            Ok(1..) => return Heard::Bell,
            Err(Errno::AGAIN) => return Heard::Nothing,
            Ok(_) | Err(_) => return Heard::Gone,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    fn state(fd: &OwnedFd) -> PollFlags {
        let mut fds = [PollFd::new(fd, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap();
        fds[0].revents()
    }

    #[test]
    fn each_party_hears_only_the_other() {
        let (a, b) = pair().unwrap();
        assert!(ring(&a.ring, b'B'));
        assert_eq!(state(&b.listen), PollFlags::IN);
        assert_eq!(state(&a.listen), PollFlags::empty());
        let mut bytes = [0; 8];
        assert_eq!(rustix::io::read(&b.listen, &mut bytes).unwrap(), 1);
        assert_eq!(bytes[0], b'B');
    }

    #[test]
    fn full_bell_never_blocks_the_ringer() {
        let (a, b) = pair().unwrap();
        for _ in 0..3 * PIPE_BYTES {
            assert!(ring(&a.ring, b'B'));
        }
        assert_eq!(state(&b.listen), PollFlags::IN);
    }

    #[test]
    fn listener_that_leaves_some_bells_can_be_rung_for_ever() {
        let (a, b) = pair().unwrap();
        for _ in 0..20 {
            assert_eq!(try_ring(&a.ring, b'B'), Ok(()));
        }
        for round in 0..10 * PIPE_BYTES {
            assert_eq!(try_ring(&a.ring, b'B'), Ok(()), "{round}");
            assert_eq!(hear(&b.listen), Heard::Bell);
        }
        for _ in 0..20 {
            assert_eq!(hear(&b.listen), Heard::Bell);
        }
        assert_eq!(hear(&b.listen), Heard::Nothing);
        while try_ring(&a.ring, b'B').is_ok() {}
        assert_eq!(try_ring(&a.ring, b'B'), Err(Errno::AGAIN));
        drop(a);
        while hear(&b.listen) == Heard::Bell {}
        assert_eq!(hear(&b.listen), Heard::Gone);
    }

    #[test]
    fn closed_party_hangs_up_and_ringing_it_raises_no_signal() {
        let (a, b) = pair().unwrap();
        drop(b);
        assert!(state(&a.listen).contains(PollFlags::HUP));
        // SIGPIPE would end the test.
        assert!(ring(&a.ring, b'B'));
    }

    #[test]
    fn only_pipes_are_bells() {
        let (a, _b) = pair().unwrap();
        assert!(is_pipe(&a.listen) && is_pipe(&a.ring));
        let (socket, _other) = crate::packet::pair().unwrap();
        assert!(!is_pipe(&socket));
    }
}
