//! Errors of the socket that were taken from the kernel before the program asked for them, and the error of a reset.

use super::{Conn, flags};
use crate::sys;
use rustix::io::Errno;
use std::sync::atomic::Ordering;

impl Conn {
    /// To ask takes an error of the socket away. A call after the last byte returns it.
    pub(crate) fn keep_error(&self, answer: Result<usize, Errno>) {
        if let Err(error) = answer
            && !matches!(error, Errno::AGAIN | Errno::INTR | Errno::BADF)
            && self.is_up()
            && !self.has(flags::RESET)
        {
            self.note_error(error);
            self.kernel.keep_error(error);
        }
    }

    /// An error that a call has met after it had moved bytes. As in the kernel, that call reports the bytes and the next one the error, if it
    /// has ended the connection: what `sendfile` meets in the file is no error of the socket.
    pub(super) fn put_error_back(&self, error: Errno) {
        if !self.has(flags::RESET) {
            // The kernel goes on reporting `EPIPE` to senders by itself.
            if self.has(flags::ERROR_SEEN) && error != Errno::PIPE {
                self.keep_error(Err(error));
            }
        } else if error == self.ring_path.reset_error() {
            self.ring_path.set_flag(flags::RESET_UNTOLD, true);
        }
    }

    /// An error that was kept, or that the kernel has; it is returned once.
    pub(crate) fn pending_error(&'static self) -> Option<Errno> {
        self.kept_error().or_else(|| {
            let error = rustix::net::sockopt::socket_error(sys::borrow(self.fd())).ok()?.err()?;
            self.note_error(error);
            (!self.has(flags::RESET)).then_some(error)
        })
    }

    /// An error that was kept, or that the kernel does not have; it is returned once.
    pub(crate) fn kept_error(&'static self) -> Option<Errno> {
        if self.is_up() {
            self.look_for_death();
            self.look_for_reset();
        }
        self.take_error()
    }

    pub(crate) fn has_kept_error(&self) -> bool {
        self.kernel.error.load(Ordering::Relaxed) != 0
    }

    /// An error that was kept.
    pub(super) fn take_error(&self) -> Option<Errno> {
        if self.kernel.error.load(Ordering::Relaxed) == 0 {
            return if self.has(flags::RESET_UNTOLD) { self.ring_path.take_reset_error() } else { None };
        }
        self.kernel.take_error()
    }

    /// A saved error, at the end of the kernel's bytes. It is returned before the end, unless the peer had closed cleanly before; then
    /// the sending calls get it.
    pub(super) fn take_reset(&self) -> Option<Errno> {
        let kept = self.kernel.error.load(Ordering::Relaxed).cast_signed();
        let is_pipe = kept == Errno::PIPE.raw_os_error() || kept == 0 && self.has(flags::RESET_IS_PIPE);
        if is_pipe { None } else { self.take_error() }
    }
}
