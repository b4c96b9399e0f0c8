//! The datagrams of a ring that has ended go by the kernel.

use super::destination::Outbound;
use crate::datagram::{DatagramSocket, address, flags};
use crate::log::log;
use crate::{real, sys};
use libc::c_int;
use partywall_shm::bytes::PeerBytes;
use partywall_shm::record;
use rustix::io::Errno;
use std::net::SocketAddr;
use std::sync::atomic::Ordering;

impl DatagramSocket {
    /// A flow has ended. The bytes of its ring from `limit` on are not the receiver's: they go by the kernel, as they would have from the
    /// moment at which the receiver's socket was gone.
    #[cold]
    pub(super) fn take_back(&self, fd: c_int, one: &mut Outbound, limit: u64) {
        let Some((flow, (_, peer))) = one.flow.and_then(|flow| Some((flow, flow.pages()?))) else { return };
        let to = one.to();
        log!("datagrams to {to} no longer go by a ring: one of the two sockets is gone");
        // Bytes that were read are not sent again. If a head breaks the protocol, the last valid one counts.
        let _ = one.half.refresh(&peer.control.rx);
        let end = one.half.tail();
        let mut at = (end - (one.half.capacity() - one.half.free())).max(limit);
        while at < end {
            let mut header = [0; record::HEADER as usize];
            #[expect(unsafe_code, reason = "reads our own ring")]
            // SAFETY: our own ring, between its head and its tail, under the lock of the sending side.
            let span = unsafe { flow.own.peer_span(at, end - at) };
            span.copy_to(&mut header);
            let Ok(len) = record::parse(header, end - at, record::longest(flow.own.ring_size())) else { break };
            let body = span.slice(record::HEADER as usize, len as usize);
            let splits = self.segment.load(Ordering::Relaxed) != 0;
            send_past(fd, body, to, (self.has(flags::SIX), splits));
            at += record::footprint(len.into());
        }
        one.give_up();
    }
}

/// A datagram by the kernel, past everything. `splits`: the socket has `UDP_SEGMENT`, by which the kernel would split this one, too.
fn send_past(fd: c_int, bytes: PeerBytes<'_>, to: SocketAddr, (six, splits): (bool, bool)) {
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    address::with(to, six, |name, len| {
        if splits {
            send_whole(fd, bytes, (name, len), flags);
            return;
        }
        #[expect(unsafe_code, reason = "hands memory of our own to the kernel")]
        // SAFETY: a span of our ring, and an address of ours, which both live to the end of this closure.
        let send = || unsafe { real::sendto(fd, bytes.as_ptr().cast(), bytes.len(), flags, name, len) };
        if send() < 0 && sys::errno() == Errno::CONNREFUSED {
            // That was about an earlier datagram.
            send();
        }
    });
}

/// Sends a datagram that is not to be split, whatever the socket's option says.
#[cold]
fn send_whole(fd: c_int, bytes: PeerBytes<'_>, (name, len): (*const libc::sockaddr, libc::socklen_t), flags: c_int) {
    // `cmsghdr {len, level, type}`, and a `u16` behind it that is 0.
    let mut control = [0u64; 3];
    let mut one = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    #[expect(unsafe_code, reason = "hands memory of our own to the kernel")]
    // SAFETY: zeros are a message without anything. `control` is aligned for a `cmsghdr` and has room for it and two bytes. All that the message
    // points to, a span of our ring and an address of ours, lives to the end of the call, and the kernel only reads it.
    unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        (message.msg_name, message.msg_namelen) = (name.cast_mut().cast(), len);
        (message.msg_iov, message.msg_iovlen) = (&raw mut one, 1);
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = libc::CMSG_SPACE(2) as _;
        if let Some(head) = libc::CMSG_FIRSTHDR(&raw const message).as_mut() {
            (head.cmsg_level, head.cmsg_type) = (libc::SOL_UDP, libc::UDP_SEGMENT);
            head.cmsg_len = libc::CMSG_LEN(2) as _;
        }
        real::sendmsg(fd, &raw const message, flags);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fd::AsRawFd;
    use std::net::UdpSocket;

    #[test]
    fn datagram_that_is_taken_back_is_not_split() {
        let [to, from] = [(); 2].map(|()| UdpSocket::bind(("127.0.0.1", 0)).unwrap());
        let (fd, at) = (from.as_raw_fd(), to.local_addr().unwrap());
        crate::calls::testing::number_option(fd, libc::SOL_UDP, libc::UDP_SEGMENT, 10);
        let bytes = [7; 25];
        #[expect(unsafe_code, reason = "memory of this test")]
        // SAFETY: an array that outlives the call.
        let body = unsafe { PeerBytes::new(bytes.as_ptr(), bytes.len()) };
        from.send_to(&bytes, at).unwrap();
        send_past(fd, body, at, (false, true));
        let lengths = [(); 4].map(|()| to.recv(&mut [0; 100]).unwrap());
        assert_eq!(lengths, [10, 10, 5, 25]);
    }
}
