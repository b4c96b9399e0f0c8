//! The functions that the program calls instead of the C library.
//!
//! Each function looks its descriptor up, and passes calls on other descriptors to the next definition at once. Only the route of a call
//! is decided here.

macro_rules! export {
    ($( $(#[$attribute:meta])* fn $name:ident($($argument:ident: $kind:ty),* $(,)?) -> $result:ty $body:block )*) => { $(
        $(#[$attribute])*
        ///
        /// # Safety
        /// As the C library's function of this name.
        // In this crate's own unit tests the C library's functions stay what they are.
        // SAFETY: the name is the C library's, whose function this stands for, with the same signature.
        #[cfg_attr(not(test), unsafe(no_mangle))]
        pub(crate) unsafe extern "C-unwind" fn $name($($argument: $kind),*) -> $result $body
    )* };
}

/// Exports functions on one descriptor. A call on a descriptor that is not ours goes straight to the next definition, without a stack
/// frame of this library. That is the cost of the library for such descriptors.
macro_rules! export_for_descriptor {
    ($( $(#[$attribute:meta])* fn $name:ident($fd:ident: c_int $(, $argument:ident: $kind:ty)* $(,)?) -> $result:ty $body:block )*) => {
        export! { $(
            $(#[$attribute])*
            fn $name($fd: c_int $(, $argument: $kind)*) -> $result {
                /// # Safety
                /// As the C library's function of this name.
                #[inline(never)]
                unsafe extern "C-unwind" fn known($fd: c_int $(, $argument: $kind)*) -> $result $body

                if $crate::table::get($fd) == $crate::table::Entry::NONE {
                    // SAFETY: the caller's arguments, passed on.
                    return unsafe { $crate::real::$name($fd $(, $argument)*) };
                }
                // SAFETY: as above.
                unsafe { known($fd $(, $argument)*) }
            }
        )* }
    };
}

mod accept;
mod adopt;
mod close;
mod connect;
mod dup;
mod epoll;
mod exec;
mod fcntl;
mod inherited;
mod ioctl;
mod listen;
mod msg;
mod poll;
mod read;
mod rights;
mod select;
mod sendfile;
mod shutdown;
mod signal;
mod sockopt;
mod stdio;
mod syscall;
mod uring;
mod write;

pub(crate) use inherited::adopt_inherited;

use crate::buffers::CallerBuffers;
use crate::conn::{CandidateStep, Conn, Cursor, REPLACED};
use crate::sys;
use libc::{c_int, iovec, ssize_t};
use partywall_shm::status::Reason;
use rustix::io::Errno;

/// A receiving call on a connection of ours. `kernel` is the call as the program made it.
#[expect(unsafe_code, reason = "takes the caller's buffers")]
fn receiving(
    conn: &'static Conn,
    fd: c_int,
    buffers: CallerBuffers<'_>,
    flags: c_int,
    kernel: impl Fn() -> ssize_t,
) -> ssize_t {
    if flags & (libc::MSG_OOB | libc::MSG_ERRQUEUE) != 0 {
        return kernel();
    }
    let mut conn = conn;
    loop {
        match conn.before_call(fd) {
            CandidateStep::Kernel(call) => {
                let got = kernel();
                call.received(got, flags & libc::MSG_PEEK != 0);
                return got;
            }
            CandidateStep::Up(up) => {
                if !buffers.are_plausible() {
                    return sys::fail(Errno::FAULT);
                }
                // SAFETY: valid by the contract of `CallerBuffers::new`.
                let Some(mut cursor) = (unsafe { Cursor::new(buffers.list()) }) else {
                    return sys::fail(Errno::INVAL);
                };
                match up.receive(fd, &mut cursor, flags) {
                    Err(REPLACED) => conn = up.now(),
                    result => return sys::give(result),
                }
            }
        }
    }
}

/// A sending call on a connection of ours.
#[expect(unsafe_code, reason = "takes the caller's buffers")]
fn sending(
    conn: &'static Conn,
    fd: c_int,
    buffers: CallerBuffers<'_>,
    flags: c_int,
    kernel: impl Fn() -> ssize_t,
) -> ssize_t {
    if flags & libc::MSG_OOB != 0 {
        // Urgent bytes are not counted like others where they are received.
        conn.stay_on_tcp(Reason::Option);
        if conn.is_up() {
            return conn.send_past(fd, flags & libc::MSG_DONTWAIT != 0, kernel);
        }
    }
    let mut conn = conn;
    loop {
        match conn.before_call(fd) {
            CandidateStep::Kernel(call) => {
                let sent = kernel();
                call.sent(sent);
                return sent;
            }
            CandidateStep::Up(up) => {
                if !buffers.are_plausible() {
                    return sys::fail(Errno::FAULT);
                }
                // SAFETY: valid by the contract of `CallerBuffers::new`.
                let Some(mut cursor) = (unsafe { Cursor::new(buffers.list()) }) else {
                    return sys::fail(Errno::INVAL);
                };
                match up.send(fd, &mut cursor, flags) {
                    Err(REPLACED) => conn = up.now(),
                    result => return sys::give(result),
                }
            }
        }
    }
}

/// A list of buffers as the program gave it; `None` if it is none that the kernel would take.
///
/// # Safety
/// If the list can be read at all, it is the caller's for as long as the result is used, and does not change meanwhile. Its buffers are as
/// [`CallerBuffers::new`] demands.
#[expect(unsafe_code, reason = "makes a slice of the caller's list")]
unsafe fn list_of<'a>(list: *const iovec, count: c_int) -> Option<CallerBuffers<'a>> {
    let count = usize::try_from(count).ok().filter(|n| *n <= 1024)?;
    if count == 0 {
        return Some(CallerBuffers::NONE);
    }
    if !list.is_aligned() || !sys::is_readable(list, count) {
        return None;
    }
    // SAFETY: it can be read, and is the caller's, as its buffers are.
    Some(unsafe { CallerBuffers::new(std::slice::from_raw_parts(list, count)) })
}

/// The functions as tests call them: results instead of `errno`.
#[cfg(test)]
#[expect(unsafe_code, reason = "calls C functions with its own buffers")]
pub(crate) mod testing {
    use crate::sys::take;
    use libc::c_int;
    use rustix::io::Errno;
    use std::time::{Duration, Instant};

    pub(crate) fn send(fd: c_int, bytes: &[u8], flags: c_int) -> Result<usize, Errno> {
        // SAFETY: a slice.
        take(unsafe { super::write::send(fd, bytes.as_ptr().cast(), bytes.len(), flags) })
    }

    /// At the offset that stands for the descriptor's own.
    pub(crate) fn pwritev2(fd: c_int, bytes: &[u8]) -> Result<usize, Errno> {
        let list = [libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() }];
        // SAFETY: a list of one slice, which the call only reads.
        take(unsafe { super::write::pwritev2(fd, list.as_ptr(), 1, -1, 0) })
    }

    pub(crate) fn recv(fd: c_int, len: usize, flags: c_int) -> Result<Vec<u8>, Errno> {
        let mut bytes = vec![0; len];
        // SAFETY: a vector of that length.
        let n = take(unsafe { super::read::recv(fd, bytes.as_mut_ptr().cast(), len, flags) })?;
        bytes.truncate(n);
        Ok(bytes)
    }

    /// # Safety
    /// As the C library's.
    pub(crate) unsafe fn fdopen(fd: c_int, mode: *const libc::c_char) -> *mut libc::FILE {
        // SAFETY: by the caller's word.
        unsafe { super::stdio::fdopen(fd, mode) }
    }

    /// # Safety
    /// As the C library's.
    pub(crate) unsafe fn sigaction(signal: c_int, action: &libc::sigaction) -> c_int {
        // SAFETY: by the caller's word.
        unsafe { super::signal::sigaction(signal, action, std::ptr::null_mut()) }
    }

    /// # Safety
    /// As the C library's.
    pub(crate) unsafe fn recvmsg(fd: c_int, message: *mut libc::msghdr, flags: c_int) -> isize {
        // SAFETY: by the caller's word.
        unsafe { super::msg::recvmsg(fd, message, flags) }
    }

    /// A list of `N` messages, with no room for bytes.
    pub(crate) fn recvmmsg<const N: usize>(fd: c_int, flags: c_int) -> Result<usize, Errno> {
        // SAFETY: zeros are empty messages.
        let mut list: [libc::mmsghdr; N] = unsafe { std::mem::zeroed() };
        // SAFETY: a list of `N`, without a timeout.
        take(unsafe { super::msg::recvmmsg(fd, list.as_mut_ptr(), N as _, flags, std::ptr::null_mut()) } as isize)
    }

    /// Milliseconds. A wait of this time has hung.
    pub(crate) const LONG: c_int = 100_000;
    /// The longest that a test waits for an event that is due at once.
    pub(crate) const HUNG: Duration = Duration::from_secs(60);

    /// An epoll set of a test.
    pub(crate) struct EpollSet(pub(crate) c_int);

    impl EpollSet {
        pub(crate) fn new() -> Self {
            // SAFETY: a flag.
            Self(unsafe { super::epoll::epoll_create1(libc::EPOLL_CLOEXEC) })
        }

        pub(crate) fn ctl(&self, operation: c_int, fd: c_int, events: u32, data: u64) -> Result<(), Errno> {
            let mut event = libc::epoll_event { events, u64: data };
            // SAFETY: an event that outlives the call.
            take(unsafe { super::epoll::epoll_ctl(self.0, operation, fd, &raw mut event) } as isize).map(drop)
        }

        pub(crate) fn add(&self, fd: c_int, events: u32, data: u64) {
            self.ctl(libc::EPOLL_CTL_ADD, fd, events, data).unwrap();
        }

        pub(crate) fn change(&self, fd: c_int, events: u32, data: u64) {
            self.ctl(libc::EPOLL_CTL_MOD, fd, events, data).unwrap();
        }

        pub(crate) fn take_out(&self, fd: c_int) -> Result<(), Errno> {
            self.ctl(libc::EPOLL_CTL_DEL, fd, 0, 0)
        }

        pub(crate) fn wait_for(&self, max: usize, timeout: c_int) -> Result<Vec<(u32, u64)>, Errno> {
            let mut events = vec![libc::epoll_event { events: 0, u64: 0 }; max];
            // SAFETY: a vector of that length.
            let n = unsafe { super::epoll::epoll_wait(self.0, events.as_mut_ptr(), max as c_int, timeout) };
            Ok(events[..take(n as isize)?].iter().map(|event| (event.events, event.u64)).collect())
        }

        pub(crate) fn now(&self) -> Vec<(u32, u64)> {
            self.wait_for(16, 0).unwrap()
        }

        pub(crate) fn wait(&self) -> Vec<(u32, u64)> {
            let start = Instant::now();
            let told = self.wait_for(16, LONG).unwrap();
            assert!(told.is_empty() || start.elapsed() < HUNG, "found when time was up: nobody was woken");
            told
        }
    }

    impl Drop for EpollSet {
        fn drop(&mut self) {
            close(self.0);
        }
    }

    pub(crate) fn sendfile(to: c_int, from: c_int, offset: &mut i64, count: usize) -> Result<usize, Errno> {
        // SAFETY: descriptors of the test, and its own offset.
        take(unsafe { super::sendfile::sendfile(to, from, offset, count) })
    }

    /// From the file's own offset on.
    pub(crate) fn sendfile_on(to: c_int, from: c_int, count: usize) -> Result<usize, Errno> {
        // SAFETY: descriptors of the test, without an offset.
        take(unsafe { super::sendfile::sendfile(to, from, std::ptr::null_mut(), count) })
    }

    pub(crate) fn splice(from: c_int, to: c_int, count: usize) -> Result<usize, Errno> {
        let none = std::ptr::null_mut();
        // SAFETY: descriptors of the test, without offsets.
        take(unsafe { super::sendfile::splice(from, none, to, none, count, libc::SPLICE_F_NONBLOCK) })
    }

    pub(crate) fn connect(fd: c_int, to: std::net::SocketAddrV4) -> Result<usize, Errno> {
        // SAFETY: zeros are an address, of no family yet.
        let mut address: libc::sockaddr_in = unsafe { std::mem::zeroed() };
        address.sin_family = libc::AF_INET as libc::sa_family_t;
        address.sin_port = to.port().to_be();
        address.sin_addr.s_addr = u32::from(*to.ip()).to_be();
        let len = size_of::<libc::sockaddr_in>() as libc::socklen_t;
        // SAFETY: an address of that size.
        take(unsafe { super::connect::connect(fd, (&raw const address).cast(), len) } as isize)
    }

    /// The events of one descriptor.
    pub(crate) fn poll(fd: c_int, events: libc::c_short, milliseconds: c_int) -> Result<usize, Errno> {
        let mut one = libc::pollfd { fd, events, revents: 0 };
        // SAFETY: an array of one.
        let found = take(unsafe { super::poll::poll(&raw mut one, 1, milliseconds) } as isize)?;
        assert_eq!(found, usize::from(one.revents != 0));
        Ok(one.revents.cast_unsigned().into())
    }

    pub(crate) fn close(fd: c_int) {
        // SAFETY: a descriptor of the test.
        assert_eq!(unsafe { super::close::close(fd) }, 0);
    }

    pub(crate) fn dup(fd: c_int) -> c_int {
        // SAFETY: as above.
        unsafe { super::dup::dup(fd) }
    }

    pub(crate) fn copy_by_fcntl(fd: c_int) -> c_int {
        // SAFETY: as above.
        unsafe { super::fcntl::fcntl(fd, libc::F_DUPFD_CLOEXEC, 0) }
    }

    pub(crate) fn dup2(fd: c_int, to: c_int) {
        // SAFETY: as above.
        assert_eq!(unsafe { super::dup::dup2(fd, to) }, to);
    }

    pub(crate) fn shutdown(fd: c_int, how: c_int) {
        // SAFETY: as above.
        assert_eq!(unsafe { super::shutdown::shutdown(fd, how) }, 0);
    }

    pub(crate) fn cork(fd: c_int, on: bool) {
        option(fd, libc::IPPROTO_TCP, libc::TCP_CORK, on.into());
    }

    pub(crate) fn low_water(fd: c_int, bytes: c_int) {
        option(fd, libc::SOL_SOCKET, libc::SO_RCVLOWAT, bytes);
    }

    pub(crate) fn number_option(fd: c_int, level: c_int, name: c_int, value: c_int) {
        option(fd, level, name, value);
    }

    fn option(fd: c_int, level: c_int, name: c_int, value: c_int) {
        // SAFETY: a number, and its size.
        let set = unsafe { super::sockopt::setsockopt(fd, level, name, (&raw const value).cast(), 4) };
        assert_eq!(set, 0);
    }

    pub(crate) fn is_corked(fd: c_int) -> bool {
        let (mut value, mut len): (c_int, _) = (0, 4);
        // SAFETY: as above.
        let got = unsafe {
            super::sockopt::getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_CORK, (&raw mut value).cast(), &raw mut len)
        };
        assert_eq!(got, 0);
        value != 0
    }

    pub(crate) fn timeout(fd: c_int, name: c_int, milliseconds: i64) {
        let value = libc::timeval { tv_sec: milliseconds / 1000, tv_usec: milliseconds % 1000 * 1000 };
        let len = size_of::<libc::timeval>() as libc::socklen_t;
        // SAFETY: a structure of that size.
        let set = unsafe { super::sockopt::setsockopt(fd, libc::SOL_SOCKET, name, (&raw const value).cast(), len) };
        assert_eq!(set, 0);
    }

    pub(crate) fn nonblocking(fd: c_int, on: bool) {
        let flags = if on { libc::O_NONBLOCK } else { 0 };
        // SAFETY: plain numbers.
        assert_eq!(unsafe { super::fcntl::fcntl(fd, libc::F_SETFL, flags as libc::c_ulong) }, 0);
    }

    pub(crate) fn ioctl_number(fd: c_int, request: libc::Ioctl) -> c_int {
        let mut n: c_int = -1;
        // SAFETY: both requests of the tests write one `int`.
        assert_eq!(unsafe { super::ioctl::ioctl(fd, request, (&raw mut n) as libc::c_ulong) }, 0);
        n
    }
}
