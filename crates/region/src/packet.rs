//! Packets with descriptors over `SOCK_SEQPACKET` UNIX sockets: what links and control sessions are made of.
//!
//! One packet is one message: it arrives whole, or visibly truncated, with exactly the descriptors sent with it.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;

/// The most descriptors a packet carries; a sender's further ones are closed by the kernel and the packet is `truncated`.
pub const MAX_FDS: usize = 4;

/// More packets than a socket holds.
pub(crate) const ALL: usize = 1 << 14;

/// A received packet.
#[derive(Debug)]
pub struct ReceivedPacket {
    /// Bytes of data. 0 without descriptors is the end of the connection.
    pub len: usize,
    /// Data or descriptors did not fit and were lost. The sender broke the protocol.
    pub truncated: bool,
    /// The descriptors, close-on-exec.
    pub fds: Vec<OwnedFd>,
}

/// A connected pair of sockets, close-on-exec.
pub fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}

/// Sends one packet; blocks while the socket is full. Never raises `SIGPIPE`.
pub fn send(fd: BorrowedFd<'_>, data: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    send_with(fd, data, fds, SendFlags::NOSIGNAL)
}

/// Sends one packet or fails with `WouldBlock`, whatever the descriptor's own flags.
pub fn try_send(fd: BorrowedFd<'_>, data: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    send_with(fd, data, fds, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)
}

/// Receives one packet; blocks until there is one, unless the descriptor is non-blocking.
pub fn recv(fd: BorrowedFd<'_>, buf: &mut [u8]) -> io::Result<ReceivedPacket> {
    recv_with(fd, buf, RecvFlags::CMSG_CLOEXEC)
}

/// Receives one packet or fails with `WouldBlock`, whatever the descriptor's own flags.
pub fn try_recv(fd: BorrowedFd<'_>, buf: &mut [u8]) -> io::Result<ReceivedPacket> {
    recv_with(fd, buf, RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT)
}

/// Whether no process has the other end any more. Packets may still be there.
pub fn has_hung_up(fd: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::empty())];
    let ended = PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL;
    poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok() && fds[0].revents().intersects(ended)
}

/// Receives a packet, if it has bytes and brings no descriptor. Any other packet stays in the socket, as does the end of the connection,
/// and the result is `None`. So the caller never closes a descriptor of the sender's, which could take any time.
///
/// No other process or thread may receive from this socket at the same time. Otherwise the packet that is received may not be the one
/// that was examined.
pub fn try_recv_without_descriptors(fd: BorrowedFd<'_>, buf: &mut [u8]) -> io::Result<Option<ReceivedPacket>> {
    match retry(|| peek(fd, RecvFlags::DONTWAIT))? {
        // No bytes may be the end, and behind what looks like the end there may be a packet (see `has_descriptors`).
        PeekedPacket { descriptors: true, .. } | PeekedPacket { len: 0, .. } => Ok(None),
        PeekedPacket { .. } => try_recv(fd, buf).map(Some),
    }
}

/// Looks at the first bytes of the next packet, which stays in the socket with its descriptors. Returns how many were filled in: 0 at the end of
/// the connection, and for an empty packet.
pub fn try_peek(fd: BorrowedFd<'_>, buf: &mut [u8]) -> io::Result<usize> {
    let mut look = || retry_reset(|| peek_into(fd, RecvFlags::DONTWAIT, &mut *buf)).map(|seen| seen.len);
    match look()? {
        // As in `has_descriptors`.
        0 => look(),
        seen => Ok(seen),
    }
}

/// Whether descriptors come with the next packet, or on a stream with what comes next. They are not taken, so none has to be closed.
pub(crate) fn has_descriptors(fd: impl AsFd, how: RecvFlags) -> rustix::io::Result<bool> {
    Ok(look_at(fd, how, &mut [0; 1])?.descriptors)
}

/// Looks at as many bytes of a stream as `buf` has room for. Returns how many there are; 0 at the end. `None` if descriptors come with one of them.
///
/// To receive as many bytes takes no descriptor, if no other thread or process receives from this socket meanwhile.
pub(crate) fn bytes_without_descriptors(fd: impl AsFd, buf: &mut [u8]) -> rustix::io::Result<Option<usize>> {
    let seen = look_at(fd, RecvFlags::DONTWAIT, buf)?;
    Ok((!seen.descriptors).then_some(seen.len))
}

fn look_at(fd: impl AsFd, how: RecvFlags, buf: &mut [u8]) -> rustix::io::Result<PeekedPacket> {
    let first = peek_into(&fd, how, buf)?;
    if first.descriptors || first.len > 0 {
        return Ok(first);
    }
    // The kernel looks for a packet first and for the end afterwards. A packet that was sent, and the sender's end shut down, between these
    // two looks as if it were not there. After the end nothing can be sent, so the second look is right.
    peek_into(&fd, how, buf)
}

/// The result of a look at the next packet.
#[derive(Debug, Clone, Copy)]
struct PeekedPacket {
    /// How many bytes were seen. Without any it is an empty packet, or the end.
    len: usize,
    /// There are any.
    descriptors: bool,
}

fn peek(fd: impl AsFd, how: RecvFlags) -> rustix::io::Result<PeekedPacket> {
    peek_into(fd, how, &mut [0; 1])
}

fn peek_into(fd: impl AsFd, how: RecvFlags, buf: &mut [u8]) -> rustix::io::Result<PeekedPacket> {
    let mut no_room = RecvAncillaryBuffer::new(&mut []);
    let seen = rustix::net::recvmsg(fd, &mut [IoSliceMut::new(buf)], &mut no_room, how | RecvFlags::PEEK)?;
    // Ancillary data that found no room: nothing but descriptors comes on a socket whose options are as they were made.
    Ok(PeekedPacket { len: seen.bytes, descriptors: seen.flags.contains(ReturnFlags::CTRUNC) })
}

/// Whether a socket to which nothing can be sent any more, because an end of its connection is closed or shut down, holds nothing whose closing
/// could wait: it throws away up to `most` packets that bring no descriptor, and leaves the others. `false` also if it cannot tell.
///
/// No other process or thread may receive from this socket meanwhile, and it must not be used for anything but closing afterwards.
pub fn is_harmless_to_close(fd: BorrowedFd<'_>, most: usize) -> bool {
    let mut bytes = [0; 4096];
    for _ in 0..=most {
        match look_at_last(fd, &mut bytes) {
            Ok(LastPacket::End) => return true,
            Ok(LastPacket::Descriptors) | Err(_) => return false,
            Ok(LastPacket::Plain(seen)) => {
                // The rest of a packet goes with its first bytes. Of a stream, no more is taken than was looked at.
                let seen = &mut bytes[..seen];
                if retry(|| rustix::net::recv(fd, &mut *seen, RecvFlags::DONTWAIT)).is_err() {
                    return false;
                }
            }
        }
    }
    false
}

/// The next packet of a socket to which nothing can be sent any more.
enum LastPacket {
    End,
    /// Without descriptors. The number is that of the bytes seen, and is 0 for an empty packet.
    Plain(usize),
    Descriptors,
}

fn look_at_last(fd: BorrowedFd<'_>, bytes: &mut [u8]) -> io::Result<LastPacket> {
    let mut look = || retry_reset(|| peek_into(fd, RecvFlags::DONTWAIT, bytes));
    let judged =
        |seen: PeekedPacket| if seen.descriptors { LastPacket::Descriptors } else { LastPacket::Plain(seen.len) };
    let first = look()?;
    if first.descriptors || first.len > 0 {
        return Ok(judged(first));
    }
    if !is_seqpacket(fd) {
        // A stream has no empty packets.
        return Ok(LastPacket::End);
    }
    // The end, or a packet of no bytes. Every packet brings the sender's credentials to a socket that wants them, and the end does not. There is no
    // room for them either.
    rustix::net::sockopt::set_socket_passcred(fd, true)?;
    let second = look();
    rustix::net::sockopt::set_socket_passcred(fd, false)?;
    let second = second?;
    if second.len == 0 && !second.descriptors {
        return Ok(LastPacket::End);
    }
    // Once more without the credentials, which look as descriptors do.
    look().map(judged)
}

/// Whether `fd` is a `SOCK_SEQPACKET` UNIX socket, as links and sessions must be.
pub fn is_seqpacket(fd: impl AsFd) -> bool {
    rustix::net::sockopt::socket_domain(&fd) == Ok(AddressFamily::UNIX)
        && rustix::net::sockopt::socket_type(&fd) == Ok(SocketType::SEQPACKET)
}

/// Whether a UNIX socket refuses descriptors (Linux 6.16): none can come to it.
pub fn refuses_descriptors(fd: impl AsFd) -> bool {
    crate::sockopt::refuses_descriptors(fd)
}

/// Whether anything waits in a socket, a packet or the end. `true` also if that cannot be told.
pub fn holds_anything(fd: impl AsFd) -> bool {
    !matches!(retry(|| peek(&fd, RecvFlags::DONTWAIT)), Err(e) if e.kind() == io::ErrorKind::WouldBlock)
}

/// Bytes, with the kernel's bookkeeping, that were sent on a UNIX socket and that its peer has not read.
pub fn unread(fd: impl AsFd) -> usize {
    crate::sockopt::unread(fd)
}

fn send_with(fd: BorrowedFd<'_>, data: &[u8], fds: &[BorrowedFd<'_>], flags: SendFlags) -> io::Result<()> {
    if fds.is_empty() {
        // The plain call is measurably cheaper, and doorbells take this path.
        retry(|| rustix::net::send(fd, data, flags))?;
        return Ok(());
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if fds.len() > MAX_FDS || !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "too many descriptors for one packet"));
    }
    retry(|| rustix::net::sendmsg(fd, &[IoSlice::new(data)], &mut control, flags))?;
    Ok(())
}

fn recv_with(fd: BorrowedFd<'_>, buf: &mut [u8], flags: RecvFlags) -> io::Result<ReceivedPacket> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let got = retry_reset(|| rustix::net::recvmsg(fd, &mut [IoSliceMut::new(&mut *buf)], &mut control, flags))?;
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    let truncated = got.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC);
    Ok(ReceivedPacket { len: got.bytes, truncated, fds })
}

/// The kernel reports once, before the packets of the peer, that it has gone without reading all of ours. Its packets are still there, and then
/// the end.
pub(crate) fn retry_reset<T>(mut call: impl FnMut() -> rustix::io::Result<T>) -> io::Result<T> {
    let mut reset = false;
    loop {
        match call() {
            Err(Errno::INTR) => {}
            Err(Errno::CONNRESET) if !reset => reset = true,
            other => return Ok(other?),
        }
    }
}

fn retry<T>(mut call: impl FnMut() -> rustix::io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            other => return Ok(other?),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peeked_packet_stays_with_its_descriptors_until_received() {
        let (a, b) = pair().unwrap();
        let mut first = [0; 2];
        assert_eq!(try_peek(b.as_fd(), &mut first).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        send(b.as_fd(), b"unread", &[]).unwrap();
        send(a.as_fd(), b"last", &[a.as_fd()]).unwrap();
        drop(a);
        for _ in 0..2 {
            assert_eq!((try_peek(b.as_fd(), &mut first).unwrap(), &first), (2, b"la"));
        }
        let received = recv(b.as_fd(), &mut [0; 8]).unwrap();
        assert_eq!((received.len, received.fds.len()), (4, 1));
        // It was the descriptor of the other end.
        drop(received);
        assert_eq!(try_peek(b.as_fd(), &mut first).unwrap(), 0, "the end");
    }

    #[test]
    fn closed_end_hangs_up_before_its_last_packet_is_read() {
        let (a, b) = pair().unwrap();
        send(a.as_fd(), b"last", &[]).unwrap();
        assert!(!has_hung_up(b.as_fd()));
        drop(a);
        assert!(has_hung_up(b.as_fd()));
        let mut buf = [0; 8];
        assert_eq!(recv(b.as_fd(), &mut buf).unwrap().len, 4);
    }

    #[test]
    fn packets_keep_their_bounds_and_descriptors() {
        let (a, b) = pair().unwrap();
        assert!(is_seqpacket(&a));
        assert!(!is_seqpacket(std::io::stdin()));
        send(a.as_fd(), b"one", &[]).unwrap();
        send(a.as_fd(), b"two", &[b.as_fd(), a.as_fd()]).unwrap();
        let mut buf = [0; 8];
        let r = recv(b.as_fd(), &mut buf).unwrap();
        assert_eq!((&buf[..r.len], r.fds.len(), r.truncated), (&b"one"[..], 0, false));
        let r = recv(b.as_fd(), &mut buf).unwrap();
        assert_eq!((&buf[..r.len], r.fds.len(), r.truncated), (&b"two"[..], 2, false));
        assert_eq!(try_recv(b.as_fd(), &mut buf).unwrap_err().kind(), io::ErrorKind::WouldBlock);
    }

    #[test]
    fn receive_without_descriptors_leaves_packet_with_descriptor() {
        let (a, b) = pair().unwrap();
        let mut buf = [0; 8];
        let mut take = || try_recv_without_descriptors(b.as_fd(), &mut buf).map(|taken| taken.map(|packet| packet.len));
        assert_eq!(take().unwrap_err().kind(), io::ErrorKind::WouldBlock);
        send(a.as_fd(), b"one", &[]).unwrap();
        send(a.as_fd(), b"", &[a.as_fd()]).unwrap();
        assert_eq!(take().unwrap(), Some(3));
        assert_eq!(take().unwrap(), None);
        assert_eq!(take().unwrap(), None);
        assert_eq!(recv(b.as_fd(), &mut [0; 8]).unwrap().fds.len(), 1, "it has stayed as it was");
    }

    #[test]
    fn receive_without_descriptors_leaves_end_and_empty_packet() {
        let (a, b) = pair().unwrap();
        let take = || try_recv_without_descriptors(b.as_fd(), &mut [0; 8]).map(|taken| taken.is_some());
        send(a.as_fd(), b"", &[]).unwrap();
        assert!(!take().unwrap());
        assert_eq!(recv(b.as_fd(), &mut [0; 8]).unwrap().len, 0);
        assert_eq!(take().unwrap_err().kind(), io::ErrorKind::WouldBlock, "the empty packet was there until now");
        drop(a);
        assert!(!take().unwrap());
    }

    /// The kernel reports the end although a packet is there, if it came and the sender left between its two looks.
    #[test]
    fn descriptor_that_races_with_the_end_is_never_taken() {
        for round in 0..3000 {
            let (a, b) = pair().unwrap();
            let start = std::sync::Barrier::new(2);
            std::thread::scope(|threads| {
                threads.spawn(|| {
                    start.wait();
                    send(a.as_fd(), b"x", &[a.as_fd()]).unwrap();
                    rustix::net::shutdown(&a, rustix::net::Shutdown::Write).unwrap();
                });
                start.wait();
                let seen = loop {
                    match has_descriptors(&b, RecvFlags::DONTWAIT) {
                        Err(Errno::AGAIN) => {
                            let taken = try_recv_without_descriptors(b.as_fd(), &mut [0; 8]);
                            assert!(!matches!(taken, Ok(Some(_))), "round {round}");
                        }
                        other => break other,
                    }
                };
                assert_eq!(seen, Ok(true), "round {round}");
            });
        }
    }

    #[test]
    fn close_is_harmless_if_no_packet_has_descriptors() {
        let send = |packets: &[(&[u8], bool)]| {
            let (left, right) = pair().unwrap();
            for (bytes, brings) in packets {
                let fds = [left.as_fd()];
                send(left.as_fd(), bytes, if *brings { &fds } else { &[] }).unwrap();
            }
            right
        };
        let harmless = |packets: &[(&[u8], bool)]| is_harmless_to_close(send(packets).as_fd(), 2);
        assert!(harmless(&[]));
        assert!(harmless(&[(b"one", false), (b"two", false)]));
        assert!(!harmless(&[(b"one", true)]));
        assert!(!harmless(&[(b"one", false), (b"two", true)]));
        assert!(!harmless(&[(b"", true)]));
        assert!(harmless(&[(b"", false), (b"two", false)]), "an empty packet is not the end");
        assert!(!harmless(&[(b"", false), (b"one", true)]));
        assert!(!harmless(&[(b"1", false), (b"2", false), (b"3", false)]), "there may be more");
    }

    #[test]
    fn close_of_stream_is_harmless_without_descriptors() {
        let cases = [(0, false, true), (3, false, true), (10_000, false, true), (0, true, false), (3, true, false)];
        for (bytes, brings, is_harmless) in cases {
            let (here, there) =
                rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
            if bytes > 0 {
                send(there.as_fd(), &vec![b'B'; bytes], &[]).unwrap();
            }
            if brings {
                send(there.as_fd(), b"B", &[there.as_fd()]).unwrap();
            }
            rustix::net::shutdown(&here, rustix::net::Shutdown::Both).unwrap();
            assert_eq!(is_harmless_to_close(here.as_fd(), 4), is_harmless, "{bytes} {brings}");
        }
    }

    #[test]
    fn descriptor_of_closed_connection_stays_where_it_is() {
        let (left, right) = pair().unwrap();
        let (inside, outside) = pair().unwrap();
        send(left.as_fd(), b"one", &[inside.as_fd()]).unwrap();
        drop((left, inside));
        assert!(!is_harmless_to_close(right.as_fd(), 2));
        assert_eq!(recv(right.as_fd(), &mut [0; 8]).unwrap().fds.len(), 1);
        drop(outside);
    }

    #[test]
    fn oversized_packet_is_reported_as_truncated() {
        let (a, b) = pair().unwrap();
        let mut buf = [0; 2];
        send(a.as_fd(), b"long", &[]).unwrap();
        assert!(recv(b.as_fd(), &mut buf).unwrap().truncated);
        let too_many = vec![a.as_fd(); MAX_FDS + 1];
        assert!(send(a.as_fd(), b"x", &too_many).is_err());
    }

    #[test]
    fn try_send_fails_on_full_and_on_closed_socket() {
        let (a, b) = pair().unwrap();
        let full = loop {
            match try_send(a.as_fd(), &[0; 1024], &[]) {
                Ok(()) => {}
                Err(e) => break e,
            }
        };
        assert_eq!(full.kind(), io::ErrorKind::WouldBlock);
        drop(b);
        // A reset where packets were lost unread, a broken pipe after.
        assert!(try_send(a.as_fd(), b"x", &[]).is_err());
        assert_eq!(try_send(a.as_fd(), b"x", &[]).unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }
}
