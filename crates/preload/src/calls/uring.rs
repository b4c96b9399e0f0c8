//! `io_uring`, as far as a program reaches it by `syscall`: what it submits is read before the kernel does.
//!
//! A ring is another way to the kernel, past every function that we stand in for. A wait that is submitted there for a connection with a
//! ring of ours would never end, since its bytes do not come by the kernel's socket. So each entry is looked at before
//! `io_uring_enter`:
//!
//! - `EPOLL_CTL` is done by our own function, and the entry becomes one that does nothing;
//! - the same goes for `CLOSE` of a descriptor that we look after;
//! - a connection that any other entry names goes back to TCP first, and stays there.
//!
//! A ring whose entries we cannot read (a thread of the kernel takes them, its number is a registered one, or it was not made by
//! `syscall`) is [unseen](crate::unseen): then no connection of the process has a ring of ours.
#![expect(unsafe_code, reason = "system calls, and entries that the program has written")]

use super::{close, epoll};
use crate::submission::{self, EntryDescriptor, EntryWork, Params, Submitted};
use crate::table::{self, DescriptorKind};
use crate::{ready, real, sys, unseen};
use libc::{c_int, c_long, c_uint, c_ulong};

/// `IORING_ENTER_REGISTERED_RING`, and the same for `io_uring_register`.
const REGISTERED: c_uint = 1 << 4;
const REGISTER_BY_REGISTERED: c_uint = 1 << 31;

/// `io_uring_setup`
///
/// # Safety
/// As the system call: `params` is null or points to a `struct io_uring_params`.
pub(super) unsafe fn setup(entries: c_ulong, params: c_ulong) -> c_long {
    let _making = unseen::Making::begin();
    // SAFETY: the caller's arguments, passed on.
    let fd = unsafe { real::syscall(libc::SYS_io_uring_setup, entries, params, 0, 0, 0, 0) };
    if let Ok(number) = c_int::try_from(fd)
        && number >= 0
    {
        let errno = sys::errno_number();
        // SAFETY: the kernel has taken and filled it in.
        let params = unsafe { (params as *const Params).read_unaligned() };
        if !submission::begin(number, &params) {
            ready::found_unseen("a ring whose entries cannot be read");
        }
        sys::restore_errno(errno);
    }
    fd
}

/// `io_uring_enter`
///
/// # Safety
/// As the system call, for all entries that wait to be submitted, too.
pub(super) unsafe fn enter(fd: c_int, submit: c_uint, least: c_ulong, flags: c_uint, e: c_ulong, f: c_ulong) -> c_long {
    if submit != 0 {
        let errno = sys::errno_number();
        let known = flags & REGISTERED == 0 && submission::each(fd, submit, prepare);
        if !known {
            ready::found_unseen("a ring that was made past us");
        }
        sys::restore_errno(errno);
    }
    // SAFETY: the caller's arguments, passed on.
    unsafe { real::syscall(libc::SYS_io_uring_enter, fd as c_ulong, c_ulong::from(submit), least, flags.into(), e, f) }
}

/// `io_uring_register`: files that are registered are named by their place afterwards.
///
/// # Safety
/// As the system call.
pub(super) unsafe fn register(fd: c_ulong, operation: c_uint, argument: c_ulong, count: c_uint) -> c_long {
    let errno = sys::errno_number();
    if operation & REGISTER_BY_REGISTERED != 0 {
        ready::found_unseen("a ring that is named by a registered number");
    } else {
        // SAFETY: the caller's argument, as the operation has it.
        unsafe { submission::registered(operation, argument, count, |fd| ready::used_past_us(fd, false)) };
    }
    sys::restore_errno(errno);
    // SAFETY: the caller's arguments, passed on.
    unsafe { real::syscall(libc::SYS_io_uring_register, fd, operation.into(), argument, count.into(), 0, 0) }
}

fn prepare(entry: Submitted) {
    match entry.work() {
        EntryWork::Nothing => {}
        EntryWork::EpollControl { set, operation, fd, event } => {
            // A registration that this library kept in the kernel's set after the program removed it must be gone before the kernel
            // decides.
            ready::settle_removed(set, fd);
            // SAFETY: the program's event, as it would pass it to the function.
            if unsafe { epoll::epoll_ctl(set, operation, fd, event) } == 0 {
                entry.make_nothing();
            }
            // Otherwise the kernel refuses the entry for the same reason, and reports that in the completion.
        }
        EntryWork::Close { fd } => {
            let ours = matches!(
                table::get(fd).kind(),
                DescriptorKind::Connection
                    | DescriptorKind::Listener
                    | DescriptorKind::Datagram
                    | DescriptorKind::Epoll
                    | DescriptorKind::Ring
            );
            // SAFETY: the program's descriptor.
            if ours && unsafe { close::close(fd) } == 0 {
                entry.make_nothing();
            }
        }
        EntryWork::Uses { descriptors, takes_events } => {
            for descriptor in descriptors {
                match descriptor {
                    EntryDescriptor::None => {}
                    EntryDescriptor::One(fd) => ready::used_past_us(fd, takes_events),
                    // SAFETY: the program's list of `count` numbers.
                    EntryDescriptor::List(at, count) => unsafe {
                        submission::each_of(at, count, |fd| ready::used_past_us(fd, false));
                    },
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
