//! `accept`.
#![expect(unsafe_code, reason = "C functions")]

use super::adopt::adopt;
use super::close::forget;
use crate::sockaddr::ProgramAddress;
use crate::table::{self, Entry};
use crate::{broker, ready, real, sys};
use libc::{c_int, sockaddr, sockaddr_storage, socklen_t};
use partywall_shm::status::Role;
use rustix::io::Errno;
use std::mem::MaybeUninit;
use std::net::SocketAddr;

/// Accepts by `call`, which is given where to put the peer's address. The connection may be from a program of ours if its
/// listener is known as one.
fn accept_by(
    listener: c_int,
    address: *mut sockaddr,
    len: *mut socklen_t,
    call: impl Fn(*mut sockaddr, *mut socklen_t) -> c_int,
) -> c_int {
    let Some(port) = super::listen::published_port(listener) else {
        let fd = call(address, len);
        forget_former(fd);
        return fd;
    };
    // One call of the kernel is to do, so the address is read from where the program wants it, or from here.
    let mut own = UnwantedAddress { address: MaybeUninit::uninit(), len: size_of::<sockaddr_storage>() as socklen_t };
    // SAFETY: `len` is the caller's word. A pointer that is none gets its `EFAULT` from the kernel, which is why it is not
    // followed.
    let room = if is_plausible(len) { unsafe { *len } } else { 0 };
    let (address, len) =
        if address.is_null() { (own.address.as_mut_ptr().cast(), &raw mut own.len) } else { (address, len) };
    let is_own = len == &raw mut own.len;
    let mut fd = call(address, len);
    if fd < 0 && sys::errno() == Errno::MFILE && crate::local::give_back() {
        fd = call(address, len);
    }
    forget_former(fd);
    if fd < 0 {
        return fd;
    }
    let errno = sys::errno_number();
    // SAFETY: the kernel has written the length there, and that much of the address as there was room for.
    let used = unsafe { *len };
    // SAFETY: the kernel has written `used` bytes there, if there was room for them.
    let given = unsafe { ProgramAddress::new(address, used) };
    let peer = if is_own || used <= room { given.read() } else { peer_of(fd) };
    if let Some(peer) = peer {
        let is_known = broker::knows_resident(fd, peer) || broker::may_be_translated(peer);
        if is_known || broker::directory().is_none() {
            adopt(fd, Role::Accepting, is_known, port, peer);
        }
    }
    sys::restore_errno(errno);
    fd
}

/// Where a peer's address goes that the program does not want.
struct UnwantedAddress {
    address: MaybeUninit<sockaddr_storage>,
    len: socklen_t,
}

/// The number stands for something new.
fn forget_former(fd: c_int) {
    if fd >= 0 {
        if table::get(fd) != Entry::NONE {
            forget(fd);
        }
        ready::renumbered(fd);
    }
}

/// Whether a pointer may be one that can be followed: not one of those with which the kernel's answers are tested.
fn is_plausible(len: *mut socklen_t) -> bool {
    (0x1_0000..1 << 47).contains(&len.addr())
}

#[cold]
fn peer_of(fd: c_int) -> Option<SocketAddr> {
    SocketAddr::try_from(rustix::net::getpeername(sys::borrow(fd)).ok().flatten()?).ok()
}

export! {
    /// `accept`
    fn accept(listener: c_int, address: *mut sockaddr, len: *mut socklen_t) -> c_int {
        // SAFETY: the caller's arguments, passed on, or memory of our own for what the caller does not want.
        accept_by(listener, address, len, |address, len| unsafe { real::accept(listener, address, len) })
    }

    /// `accept4`
    fn accept4(listener: c_int, address: *mut sockaddr, len: *mut socklen_t, flags: c_int) -> c_int {
        // SAFETY: as for `accept`.
        accept_by(listener, address, len, |address, len| unsafe { real::accept4(listener, address, len, flags) })
    }
}
