//! The kernel's queue of a socket, asked without waiting.

use super::address::Wanted;
use crate::buffers::CallerBuffers;
use crate::sockaddr::ProgramAddress;
use crate::{real, sys};
use libc::{c_int, msghdr, pollfd, sockaddr_storage, socklen_t};
use rustix::io::Errno;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

/// Whether the kernel has a datagram, or an error, which is left there.
pub(super) fn has_something(fd: c_int) -> bool {
    let mut one = pollfd { fd, events: libc::POLLIN, revents: 0 };
    #[expect(unsafe_code, reason = "the C library's call")]
    // SAFETY: an array of one.
    unsafe {
        real::poll(&raw mut one, 1, 0) != 0
    }
}

/// A datagram that was taken from the queue, or looked at there.
pub(super) struct KernelDatagram {
    /// The result of the call.
    pub(super) len: usize,
    /// The sender, if the kernel has named one.
    pub(super) from: Option<SocketAddr>,
}

/// Takes the next datagram, or with `MSG_PEEK` looks at it. `wanted` gets its address and flags.
pub(super) fn take(
    fd: c_int,
    buffers: CallerBuffers<'_>,
    message: c_int,
    wanted: Wanted,
) -> Result<KernelDatagram, Errno> {
    let mut own: sockaddr_storage = zeroed();
    let named = wanted.name();
    let mut header: msghdr = zeroed();
    let (name, room) = named.unwrap_or(((&raw mut own).cast(), size_of::<sockaddr_storage>() as socklen_t));
    (header.msg_name, header.msg_namelen) = (name.cast(), room);
    header.msg_iov = buffers.list().as_ptr().cast_mut();
    header.msg_iovlen = buffers.list().len();
    (header.msg_control, header.msg_controllen) = wanted.control().unwrap_or((std::ptr::null_mut(), 0));
    #[expect(unsafe_code, reason = "hands the caller's buffers to the kernel")]
    // SAFETY: a message of buffers that are valid by the contract of `CallerBuffers::new`, and of the caller's address or ours, and control data.
    let len = sys::take(unsafe { real::recvmsg(fd, &raw mut header, message | libc::MSG_DONTWAIT) })?;
    let from = {
        #[expect(unsafe_code, reason = "reads the address that the kernel has written")]
        // SAFETY: the room for a name that the header was made with. The kernel has written the name there, and no more than the room.
        let given = unsafe { ProgramAddress::new(header.msg_name.cast_const().cast(), header.msg_namelen.min(room)) };
        given.read_unscoped()
    };
    if named.is_some() {
        wanted.put_len(header.msg_namelen);
    }
    wanted.put_flags(header.msg_flags);
    wanted.put_control_len(header.msg_controllen);
    Ok(KernelDatagram { len, from })
}

/// Where the first datagram of the kernel's queue is from. An error that waits there is taken by this, and to be told.
pub(super) fn peek_source(fd: c_int) -> Result<Option<SocketAddr>, Errno> {
    let mut name: sockaddr_storage = zeroed();
    let mut len = size_of::<sockaddr_storage>() as socklen_t;
    let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
    let mut nothing = 0u8;
    #[expect(unsafe_code, reason = "asks for an address by pointer")]
    // SAFETY: a byte, and room for any address.
    let got = unsafe { real::recvfrom(fd, (&raw mut nothing).cast(), 0, flags, (&raw mut name).cast(), &raw mut len) };
    let unknown = SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), 0);
    match sys::take(got) {
        Ok(_) => {
            let room = size_of::<sockaddr_storage>() as socklen_t;
            #[expect(unsafe_code, reason = "reads the address that the kernel has written")]
            // SAFETY: `name` has as many bytes, all of which were set above or by the kernel.
            let given = unsafe { ProgramAddress::new((&raw const name).cast(), len.min(room)) };
            Ok(Some(given.read_unscoped().unwrap_or(unknown)))
        }
        Err(Errno::AGAIN) => Ok(None),
        Err(error) => Err(error),
    }
}

fn zeroed<T: Plain>() -> T {
    #[expect(unsafe_code, reason = "zeros of a C structure")]
    // SAFETY: by `Plain`.
    unsafe {
        std::mem::zeroed()
    }
}

/// C structures of numbers and pointers, that may be zeros.
trait Plain {}
impl Plain for msghdr {}
impl Plain for sockaddr_storage {}
