//! What of a socket's options changes what its calls do: read when it gets a ring, followed from then on.

use super::{Conn, flags};
use crate::{real, sys};
use libc::{c_int, socklen_t};
use rustix::fs::OFlags;
use std::sync::atomic::{AtomicU64, Ordering};

impl Conn {
    /// Asks the kernel for all of them.
    pub(super) fn learn_options(&self, fd: c_int) {
        if let Ok(status) = rustix::fs::fcntl_getfl(sys::borrow(fd)) {
            self.set_flag(flags::NONBLOCK, status.contains(OFlags::NONBLOCK));
        }
        self.learn_timeout(fd, libc::SO_RCVTIMEO, &self.receive_timeout);
        self.learn_timeout(fd, libc::SO_SNDTIMEO, &self.send_timeout);
        self.learn_low_water(fd);
    }

    fn learn_timeout(&self, fd: c_int, name: c_int, word: &AtomicU64) {
        let mut value = libc::timeval { tv_sec: 0, tv_usec: 0 };
        if get(fd, libc::SOL_SOCKET, name, &mut value) {
            let seconds = u64::try_from(value.tv_sec).unwrap_or(0);
            let microseconds = u64::try_from(value.tv_usec).unwrap_or(0);
            word.store(seconds.saturating_mul(1_000_000_000).saturating_add(microseconds * 1000), Ordering::Relaxed);
        }
    }

    fn learn_low_water(&self, fd: c_int) {
        let mut value: c_int = 1;
        if get(fd, libc::SOL_SOCKET, libc::SO_RCVLOWAT, &mut value) {
            self.low_water.store(u32::try_from(value).unwrap_or(1), Ordering::Relaxed);
        }
    }

    /// The program has set an option, and the kernel has taken it.
    pub(crate) fn option_was_set(&'static self, fd: c_int, level: c_int, name: c_int) {
        if level == libc::SOL_SOCKET {
            match name {
                libc::SO_RCVTIMEO => self.learn_timeout(fd, libc::SO_RCVTIMEO, &self.receive_timeout),
                libc::SO_SNDTIMEO => self.learn_timeout(fd, libc::SO_SNDTIMEO, &self.send_timeout),
                libc::SO_RCVLOWAT => self.learn_low_water(fd),
                _ => {}
            }
        }
    }

    /// The program has set or cleared `O_NONBLOCK`.
    pub(crate) fn blocking_was_set(&self, nonblocking: bool) {
        self.set_flag(flags::NONBLOCK, nonblocking);
    }
}

/// Whether an option is one that bytes in memory cannot honour.
pub(crate) fn needs_tcp(level: c_int, name: c_int) -> bool {
    match level {
        libc::SOL_SOCKET => matches!(
            name,
            libc::SO_ZEROCOPY
                | libc::SO_TIMESTAMP
                | libc::SO_TIMESTAMPNS
                | libc::SO_TIMESTAMPING
                | libc::SO_OOBINLINE
                | libc::SO_ATTACH_FILTER
                | libc::SO_ATTACH_BPF
        ),
        _ => changes_stream(level, name),
    }
}

/// Whether an option makes of the stream something else than what is read and written.
pub(crate) fn changes_stream(level: c_int, name: c_int) -> bool {
    level == libc::IPPROTO_TCP && matches!(name, libc::TCP_ULP | libc::TCP_REPAIR | libc::TCP_MD5SIG)
}

#[expect(unsafe_code, reason = "asks for a socket option by pointer")]
fn get<T>(fd: c_int, level: c_int, name: c_int, value: &mut T) -> bool {
    let mut len = size_of::<T>() as socklen_t;
    // SAFETY: the kernel writes at most `len` bytes of plain numbers.
    unsafe { real::getsockopt(fd, level, name, std::ptr::from_mut(value).cast(), &raw mut len) == 0 }
}
