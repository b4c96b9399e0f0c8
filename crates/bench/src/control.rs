//! Packets between the bench and its measuring processes, and between those two: JSON with descriptors, and plain beats.

use std::{
    io::{IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
        SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
    },
};
use serde::{Serialize, de::DeserializeOwned};

use crate::error::{BenchError, During, Result};

/// Descriptors that one packet may carry.
const MAX_FDS: usize = 16;
/// Bytes that one packet may carry: well under the kernel's default socket buffer.
const MAX_PACKET: usize = 128 << 10;

/// One end of a packet socket.
#[derive(Debug)]
pub(crate) struct TaskSocket(OwnedFd);

impl TaskSocket {
    /// Two connected ends, neither inherited by children.
    pub(crate) fn pair() -> Result<(Self, Self)> {
        let (a, b) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .during("making a control socket pair")?;
        Ok((Self(a), Self(b)))
    }

    /// Sends a value and the descriptors that belong to it.
    pub(crate) fn send(&self, value: &impl Serialize, fds: &[BorrowedFd<'_>]) -> Result<()> {
        let bytes = serde_json::to_vec(value).map_err(|e| BenchError::transport("writing a control message", e))?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(BenchError::Transport(format!(
                "{} descriptors are more than a control message carries",
                fds.len()
            )));
        }
        sendmsg(&self.0, &[IoSlice::new(&bytes)], &mut ancillary, SendFlags::NOSIGNAL)
            .during("sending a control message")?;
        Ok(())
    }

    /// The next value and its descriptors; `None` once the other side has gone.
    pub(crate) fn recv<T: DeserializeOwned>(&self) -> Result<Option<(T, Vec<OwnedFd>)>> {
        let mut bytes = vec![0; MAX_PACKET];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let got = loop {
            match recvmsg(&self.0, &mut [IoSliceMut::new(&mut bytes)], &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
                Err(Errno::INTR) => {}
                // A peer killed with our packets unread shows as a reset.
                Err(Errno::CONNRESET) => return Ok(None),
                other => break other.during("receiving a control message")?,
            }
        };
        let mut fds = Vec::new();
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
        if got.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
            return Err(BenchError::Transport("a control message was cut off".into()));
        }
        if got.bytes == 0 {
            return Ok(None);
        }
        let value = serde_json::from_slice(&bytes[..got.bytes])
            .map_err(|e| BenchError::transport("reading a control message", e))?;
        Ok(Some((value, fds)))
    }
}

impl AsFd for TaskSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<OwnedFd> for TaskSocket {
    fn from(fd: OwnedFd) -> Self {
        Self(fd)
    }
}

impl From<TaskSocket> for OwnedFd {
    fn from(control: TaskSocket) -> Self {
        control.0
    }
}

/// The small socket by which the two measuring processes keep step; never used inside a timed stretch. Between virtual machines it is
/// a serial port.
#[derive(Debug)]
pub(crate) struct Beat {
    wire: OwnedFd,
    /// How far the other side's clock is ahead of this one's; 0 where both read the same clock.
    ahead: i64,
}

/// The number of exchanges to compare two clocks. The quickest exchange counts.
const COMPARISONS: u32 = 40;

impl Beat {
    /// Tells the other side a number.
    pub(crate) fn tell(&self, number: u64) -> Result<()> {
        let written = rustix::io::write(&self.wire, &number.to_ne_bytes()).during("telling the other process")?;
        if written == 8 { Ok(()) } else { Err(BenchError::Transport("a number was truncated".into())) }
    }

    /// Waits for the other side's number.
    pub(crate) fn hear(&self) -> Result<u64> {
        let mut number = [0; 8];
        let mut got = 0;
        // A packet comes whole; what comes over a serial port may not.
        while got < number.len() {
            match rustix::io::read(&self.wire, &mut number[got..]) {
                Err(Errno::INTR) => {}
                Ok(0) | Err(Errno::CONNRESET) => {
                    return Err(BenchError::Transport("the other measuring process has gone".into()));
                }
                other => got += other.during("waiting for the other process")?,
            }
        }
        Ok(u64::from_ne_bytes(number))
    }

    /// Whether the other side has told a number that is not heard yet, or has gone. Does not wait.
    pub(crate) fn has_spoken(&self) -> Result<bool> {
        let mut wires = [PollFd::new(&self.wire, PollFlags::IN)];
        match poll(&mut wires, Some(&Timespec::default())) {
            Err(Errno::INTR) => Ok(false),
            other => Ok(other.during("looking whether the other process has spoken")? > 0),
        }
    }

    /// Waits for a reading of the other side's clock, and gives what this side's showed then.
    pub(crate) fn hear_time(&self) -> Result<u64> {
        Ok(self.hear()?.saturating_add_signed(-self.ahead))
    }

    /// Finds out how far apart the two clocks are, as both sides call this. Right to half of the quickest exchange.
    pub(crate) fn compare_clocks(&mut self, asks: bool, now: impl Fn() -> u64) -> Result<()> {
        let mut quickest = u64::MAX;
        for _ in 0..COMPARISONS {
            if !asks {
                self.hear()?;
                self.tell(now())?;
                continue;
            }
            let before = now();
            self.tell(before)?;
            let theirs = self.hear()?;
            let took = now().saturating_sub(before);
            if took < quickest {
                quickest = took;
                self.ahead = theirs.cast_signed() - (before + took / 2).cast_signed();
            }
        }
        Ok(())
    }

    /// Both sides come here before either goes on.
    pub(crate) fn meet(&self) -> Result<()> {
        self.tell(0)?;
        self.hear().map(drop)
    }
}

impl From<TaskSocket> for Beat {
    fn from(control: TaskSocket) -> Self {
        control.0.into()
    }
}

impl From<OwnedFd> for Beat {
    fn from(wire: OwnedFd) -> Self {
        Self { wire, ahead: 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn carries_values_and_descriptors() {
        let (a, b) = TaskSocket::pair().unwrap();
        let (x, y) = TaskSocket::pair().unwrap();
        a.send(&vec![1, 2, 3], &[x.as_fd()]).unwrap();
        let (value, mut fds) = b.recv::<Vec<i32>>().unwrap().unwrap();
        assert_eq!((value, fds.len()), (vec![1, 2, 3], 1));
        Beat::from(fds.remove(0)).tell(7).unwrap();
        assert_eq!(Beat::from(y).hear().unwrap(), 7);
        drop(a);
        assert!(b.recv::<Vec<i32>>().unwrap().is_none());
    }

    #[test]
    fn clock_offset_is_corrected() {
        let (a, b) = TaskSocket::pair().unwrap();
        let (mut here, mut there) = (Beat::from(a), Beat::from(b));
        let start = std::time::Instant::now();
        let now = move || start.elapsed().as_nanos() as u64;
        const AHEAD: u64 = 5_000_000_000;
        let other = std::thread::spawn(move || {
            there.compare_clocks(false, || now() + AHEAD).unwrap();
            there.tell(now() + AHEAD).unwrap();
            now()
        });
        here.compare_clocks(true, now).unwrap();
        let told = here.hear_time().unwrap();
        let then = other.join().unwrap();
        // Without the comparison it would be five seconds off.
        assert!(told.abs_diff(then) < AHEAD / 5, "{told} {then}");
    }
}
