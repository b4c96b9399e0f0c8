//! Errors of the socket that were taken from the kernel before the program asked for them, and the error of a reset.

use super::kernel_facts::KernelFacts;
use super::ring_path::RingPath;
use super::{Conn, flags};
use crate::sys;
use rustix::io::Errno;

/// The errors of a connection: the kernel's, and that of a reset of which the kernel does not know.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SocketErrors<'a> {
    pub(super) path: &'a RingPath,
    pub(super) kernel: &'a KernelFacts,
}

impl SocketErrors<'_> {
    /// To ask takes an error of the socket away. A call after the last byte returns it.
    pub(crate) fn keep(&self, answer: Result<usize, Errno>) {
        if let Err(error) = answer
            && !matches!(error, Errno::AGAIN | Errno::INTR | Errno::BADF)
            && self.path.is_up()
            && !self.path.has(flags::RESET)
        {
            self.note(error);
            self.kernel.keep_error(error);
        }
    }

    /// An error that a call has met after it had moved bytes. As in the kernel, that call reports the bytes and the next one the error, if it
    /// has ended the connection: what `sendfile` meets in the file is no error of the socket.
    pub(super) fn put_back(&self, error: Errno) {
        if !self.path.has(flags::RESET) {
            // The kernel goes on reporting `EPIPE` to senders by itself.
            if self.path.has(flags::ERROR_SEEN) && error != Errno::PIPE {
                self.keep(Err(error));
            }
        } else if error == self.path.reset_error() {
            self.path.set_flag(flags::RESET_UNTOLD, true);
        }
    }

    /// The kernel has reported an error that ends the connection: no verdict of ours is to follow, and report it again.
    pub(crate) fn note(&self, error: Errno) {
        if !matches!(error, Errno::AGAIN | Errno::INTR | Errno::BADF | Errno::FAULT | Errno::INVAL | Errno::NOBUFS) {
            self.path.set_flag(flags::ERROR_SEEN, true);
        }
    }

    /// An answer of the kernel, of whose errors is noted that they were reported.
    pub(super) fn noted(&self, answer: Result<usize, Errno>) -> Result<usize, Errno> {
        answer.inspect_err(|error| self.note(*error))
    }

    /// Whether an error was kept.
    pub(crate) fn has_kept(&self) -> bool {
        self.kernel.has_error()
    }

    /// An error that was kept.
    pub(super) fn take(&self) -> Option<Errno> {
        if !self.has_kept() {
            return if self.path.has(flags::RESET_UNTOLD) { self.path.take_reset_error() } else { None };
        }
        self.kernel.take_error()
    }

    /// A saved error, at the end of the kernel's bytes. It is returned before the end, unless the peer had closed cleanly before; then
    /// the sending calls get it.
    pub(super) fn take_reset(&self) -> Option<Errno> {
        let is_pipe = match self.kernel.kept_error() {
            0 => self.path.has(flags::RESET_IS_PIPE),
            kept => kept == Errno::PIPE.raw_os_error(),
        };
        if is_pipe { None } else { self.take() }
    }
}

impl Conn {
    /// Its errors.
    #[inline]
    pub(crate) fn errors(&self) -> SocketErrors<'_> {
        SocketErrors { path: &self.ring_path, kernel: &self.kernel }
    }

    /// An error that was kept, or that the kernel has; it is returned once.
    pub(crate) fn pending_error(&'static self) -> Option<Errno> {
        self.kept_error().or_else(|| {
            let error = rustix::net::sockopt::socket_error(sys::borrow(self.fd())).ok()?.err()?;
            self.errors().note(error);
            (!self.has(flags::RESET)).then_some(error)
        })
    }

    /// An error that was kept, or that the kernel does not have; it is returned once.
    pub(crate) fn kept_error(&'static self) -> Option<Errno> {
        if self.is_up() {
            self.death().look();
            self.death().look_for_reset();
        }
        self.errors().take()
    }
}
