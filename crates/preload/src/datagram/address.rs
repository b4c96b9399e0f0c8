//! Addresses as the program gives them and wants them.
#![expect(unsafe_code, reason = "reads and writes the caller's addresses")]

use crate::sockaddr::ProgramAddress;
use libc::{c_int, c_void, msghdr, sockaddr, sockaddr_in, sockaddr_in6, socklen_t};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::ptr;

/// The longest datagram that goes to an address of this family: 65,535 bytes less the header of UDP and, in IPv4, its own. Longer
/// datagrams are neither written nor accepted; the kernel handles them.
pub(super) const fn longest(ip: IpAddr) -> usize {
    match ip {
        IpAddr::V4(_) => 65_507,
        IpAddr::V6(_) => 65_527,
    }
}

const NULL: *mut c_void = ptr::null_mut();
/// The bytes of control data with the length of the datagrams that were joined.
const JOINED: usize = size_of::<libc::cmsghdr>() + size_of::<c_int>();

/// The caller's places for the sender's address, and for the flag that the buffer was too short.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wanted {
    address: *mut sockaddr,
    len: *mut socklen_t,
    /// `msg_flags`, if the call has such.
    flags: *mut c_int,
    /// `msg_controllen`, likewise.
    control: *mut usize,
    /// `msg_control`, likewise.
    space: *mut c_void,
}

impl Wanted {
    /// No address, length, flags or control data are wanted.
    pub(crate) const NONE: Self =
        Self { address: NULL.cast(), len: NULL.cast(), flags: NULL.cast(), control: NULL.cast(), space: NULL };

    /// The two pointers of `recvfrom`.
    ///
    /// # Safety
    /// Each is null, an address that no program can have, or valid until the call ends: `address` for writes of `*len` bytes, and `len`
    /// for reads and writes.
    pub(crate) unsafe fn new(address: *mut sockaddr, len: *mut socklen_t) -> Self {
        Self { address, len, ..Self::NONE }
    }

    /// The fields that a message header asks for.
    ///
    /// # Safety
    /// `message` is valid for reads and writes until the call ends, its `msg_name` as [`Wanted::new`] demands, and its `msg_control` for
    /// writes of `msg_controllen` bytes if that is not null.
    pub(crate) unsafe fn by_header(message: *mut msghdr) -> Self {
        // SAFETY: by this function's contract.
        unsafe {
            Self {
                address: (*message).msg_name.cast(),
                len: &raw mut (*message).msg_namelen,
                flags: &raw mut (*message).msg_flags,
                control: &raw mut (*message).msg_controllen,
                space: (*message).msg_control,
            }
        }
    }

    /// Whether the call wants an address, and the pointer to its length is one that no program can have. The kernel answers `EFAULT`.
    pub(super) fn lacks_length(self) -> bool {
        !self.address.is_null() && !(0x1_0000..1 << 47).contains(&self.len.addr())
    }

    /// The room for an address, before the kernel's call: afterwards the word says how long the address is, be it cut or not. 0 if the pointer is
    /// one that programs cannot have, of which the kernel is to judge.
    pub(super) fn room(self) -> socklen_t {
        if self.address.is_null() || self.lacks_length() {
            return 0;
        }
        // SAFETY: valid by the contract of `Wanted::new`, and none of the addresses that it may be instead.
        unsafe { *self.len }
    }

    /// The address that the kernel has put there, if it was not cut for want of `room`.
    pub(super) fn given(self, room: socklen_t) -> Option<SocketAddr> {
        if room == 0 {
            return None;
        }
        // SAFETY: the caller's word: `room` was read from it.
        let len = unsafe { *self.len };
        if len > room {
            return None;
        }
        // SAFETY: the caller has `room` bytes there, of which the kernel has just written `len`.
        unsafe { ProgramAddress::new(self.address, len) }.read_unscoped()
    }

    /// The place for an address and its room, if the call wants an address.
    pub(super) fn name(self) -> Option<(*mut sockaddr, socklen_t)> {
        // SAFETY: valid by the contract of `Wanted::new`, beside an address that is not null.
        (!self.address.is_null()).then(|| (self.address, unsafe { *self.len }))
    }

    /// Sets the length of the address that the kernel has put into [`Wanted::name`].
    pub(super) fn put_len(self, len: socklen_t) {
        // SAFETY: as in `name`.
        unsafe { *self.len = len }
    }

    /// Returns the address as the kernel does: cut to the room, with the whole length reported.
    pub(super) fn give(self, from: SocketAddr, six: bool, flags: c_int) {
        self.put_flags(flags);
        if self.address.is_null() || self.len.is_null() {
            return;
        }
        with(from, six, |name, len| self.put(name, len));
    }

    /// Sets the flags of the message, without control data.
    pub(super) fn put_flags(self, flags: c_int) {
        // SAFETY: the caller's words, if it gives them.
        unsafe {
            if let Some(word) = self.flags.as_mut() {
                *word = flags;
            }
            if let Some(word) = self.control.as_mut() {
                *word = 0;
            }
        }
    }

    /// The place for control data, and its room, if the call has any.
    pub(super) fn control(self) -> Option<(*mut c_void, usize)> {
        // SAFETY: the caller's word, if it gives one.
        let room = unsafe { self.control.as_ref() }?;
        (!self.space.is_null() && *room > 0).then_some((self.space, *room))
    }

    /// Sets how many bytes of control data there are.
    pub(super) fn put_control_len(self, len: usize) {
        // SAFETY: as in `put_flags`.
        if let Some(word) = unsafe { self.control.as_mut() } {
            *word = len;
        }
    }

    /// Whether there is room for the length of the datagrams that were joined.
    pub(super) fn can_join(self) -> bool {
        self.control().is_some_and(|(_, room)| room >= JOINED)
    }

    /// Writes the length of the datagrams that were joined (`UDP_GRO`), in a place for which [`Wanted::can_join`] was true.
    pub(super) fn put_joined(self, space: *mut c_void, room: usize, size: c_int) {
        let header = libc::cmsghdr { cmsg_len: JOINED, cmsg_level: libc::SOL_UDP, cmsg_type: libc::UDP_GRO };
        // SAFETY: the caller has at least `JOINED` bytes there, by the contract of `Wanted::by_header`.
        unsafe {
            space.cast::<libc::cmsghdr>().write_unaligned(header);
            space.cast::<u8>().add(size_of::<libc::cmsghdr>()).cast::<c_int>().write_unaligned(size);
        }
        self.put_control_len(room.min(JOINED.next_multiple_of(size_of::<usize>())));
    }

    fn put(self, name: *const sockaddr, len: socklen_t) {
        // SAFETY: the caller has room for as many bytes as its own word says, and that word is its own to be written.
        unsafe {
            let room = (*self.len).min(len) as usize;
            ptr::copy_nonoverlapping(name.cast::<u8>(), self.address.cast(), room);
            *self.len = len;
        }
    }
}

/// An address as the kernel writes it, in the family of the socket.
pub(super) fn with(at: SocketAddr, six: bool, what: impl FnOnce(*const sockaddr, socklen_t)) {
    let port = at.port().to_be();
    let (four, ip) = match at.ip() {
        IpAddr::V4(four) => (four, four.to_ipv6_mapped()),
        IpAddr::V6(six) => (Ipv4Addr::UNSPECIFIED, six),
    };
    if six {
        let name = sockaddr_in6 {
            sin6_family: libc::AF_INET6 as libc::sa_family_t,
            sin6_port: port,
            sin6_flowinfo: 0,
            sin6_addr: libc::in6_addr { s6_addr: ip.octets() },
            sin6_scope_id: 0,
        };
        what((&raw const name).cast(), size_of_val(&name) as socklen_t);
    } else {
        let name = sockaddr_in {
            sin_family: libc::AF_INET as libc::sa_family_t,
            sin_port: port,
            sin_addr: libc::in_addr { s_addr: u32::from(four).to_be() },
            sin_zero: [0; 8],
        };
        what((&raw const name).cast(), size_of_val(&name) as socklen_t);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn given(from: &str, six: bool, room: usize) -> (Option<SocketAddr>, socklen_t) {
        let mut space = [0u8; 64];
        let mut len = room as socklen_t;
        // SAFETY: both live to the end of the function, and `space` has room for `len` bytes.
        let wanted = unsafe { Wanted::new(space.as_mut_ptr().cast(), &raw mut len) };
        wanted.give(from.parse().unwrap(), six, 0);
        assert!(space[room..].iter().all(|b| *b == 0), "nothing beyond the caller's room");
        // SAFETY: `space` has at least `room` bytes and lives to the end of the function.
        let written = unsafe { ProgramAddress::new(space.as_ptr().cast(), room.min(len as usize) as socklen_t) };
        (written.read_unscoped(), len)
    }

    #[test]
    fn address_that_was_cut_is_not_read() {
        let mut space = [0u8; 64];
        let mut len = 28;
        // SAFETY: both live to the end of the function, and `space` has room for `len` bytes.
        let wanted = unsafe { Wanted::new(space.as_mut_ptr().cast(), &raw mut len) };
        assert_eq!(wanted.room(), 28);
        wanted.give("10.1.2.3:4567".parse().unwrap(), false, 0);
        assert_eq!(wanted.given(28), Some("10.1.2.3:4567".parse().unwrap()));
        assert_eq!(wanted.given(8), None, "the program has only 8 bytes there");
        assert_eq!((Wanted::NONE.room(), Wanted::NONE.given(0)), (0, None));
        // SAFETY: the length is null, which the contract allows.
        let without_length = unsafe { Wanted::new(space.as_mut_ptr().cast(), ptr::null_mut()) };
        assert!(without_length.lacks_length() && without_length.room() == 0);
        assert!(!wanted.lacks_length() && !Wanted::NONE.lacks_length());
    }

    #[test]
    fn written_address_reads_back_in_family_of_socket() {
        let four: SocketAddr = "10.1.2.3:4567".parse().unwrap();
        assert_eq!(given("10.1.2.3:4567", false, 28), (Some(four), 16));
        assert_eq!(given("10.1.2.3:4567", true, 28), (Some(four), 28));
        assert_eq!(given("[fd00::7]:9", true, 64), (Some("[fd00::7]:9".parse().unwrap()), 28));
        assert_eq!(given("10.1.2.3:4567", false, 4), (None, 16), "cut, and the whole length told");
    }
}
