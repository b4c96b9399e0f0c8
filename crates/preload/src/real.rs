//! The next definition of each function: the C library's, or that of another library loaded like ours.
//!
//! They are looked up at the first call, since other libraries' constructors may call before ours has run. A function that is not found
//! (newer than this C library) fails with `ENOSYS`, as it would without this library.
#![expect(unsafe_code, reason = "calls C functions through pointers that the dynamic loader gave")]
#![allow(clippy::too_many_arguments, reason = "the signatures are the C library's")]

use libc::{
    FILE, c_char, c_int, c_long, c_uint, c_ulong, c_void, iovec, loff_t, mmsghdr, msghdr, nfds_t, off_t, pollfd,
    size_t, sockaddr, socklen_t, ssize_t, timespec, timeval,
};
use std::ffi::CStr;
use std::sync::atomic::{AtomicPtr, Ordering};

#[cold]
fn find(name: &'static CStr, slot: &AtomicPtr<c_void>) -> *mut c_void {
    // SAFETY: a constant, NUL-terminated name. The C library's `dlsym` takes no lock that a signal handler's caller could
    // hold but the loader's own, which is recursive.
    let found = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
    // EDGE real: releases the function, of a library that the loader has just relocated; acquired by each call.
    slot.store(found, Ordering::Release);
    found
}

/// The result of a missing function.
trait FailedCall {
    const FAILED: Self;
}

impl FailedCall for c_int {
    const FAILED: Self = -1;
}

impl FailedCall for ssize_t {
    const FAILED: Self = -1;
}

impl FailedCall for c_long {
    const FAILED: Self = -1;
}

impl FailedCall for libc::sighandler_t {
    const FAILED: Self = libc::SIG_ERR;
}

impl<T> FailedCall for *mut T {
    const FAILED: Self = std::ptr::null_mut();
}

macro_rules! real {
    ($( $(#[$attribute:meta])* fn $name:ident($($argument:ident: $kind:ty),*) -> $result:ty; )*) => {
        $(
            #[doc = concat!("The next `", stringify!($name), "`.")]
            ///
            /// # Safety
            /// As the C library's.
            #[inline]
            $(#[$attribute])*
            pub(crate) unsafe fn $name($($argument: $kind),*) -> $result {
                static SLOT: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
                const NAME: &CStr = match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                    Ok(name) => name,
                    Err(_) => c"",
                };
                /// The first call. Apart, so that all others are a jump.
                ///
                /// # Safety
                /// As the C library's.
                #[cold]
                #[inline(never)]
                unsafe extern "C-unwind" fn first_call($($argument: $kind),*) -> $result {
                    if find(NAME, &SLOT).is_null() {
                        crate::errno::set_errno(rustix::io::Errno::NOSYS);
                        return <$result as FailedCall>::FAILED;
                    }
                    // SAFETY: the caller's arguments, passed on.
                    unsafe { self::$name($($argument),*) }
                }
                // EDGE real: acquires from `find`.
                let found = SLOT.load(Ordering::Acquire);
                if found.is_null() {
                    // SAFETY: as below.
                    return unsafe { first_call($($argument),*) };
                }
                // SAFETY: the loader found it under the name of the C function that has this signature; what its
                // arguments must be is the caller's to keep.
                let function: unsafe extern "C-unwind" fn($($kind),*) -> $result = unsafe { std::mem::transmute(found) };
                // SAFETY: as above.
                unsafe { function($($argument),*) }
            }
        )*
    };
}

real! {
    fn read(fd: c_int, buf: *mut c_void, len: size_t) -> ssize_t;
    fn write(fd: c_int, buf: *const c_void, len: size_t) -> ssize_t;
    fn readv(fd: c_int, iov: *const iovec, count: c_int) -> ssize_t;
    fn writev(fd: c_int, iov: *const iovec, count: c_int) -> ssize_t;
    fn preadv2(fd: c_int, iov: *const iovec, count: c_int, offset: off_t, flags: c_int) -> ssize_t;
    fn pwritev2(fd: c_int, iov: *const iovec, count: c_int, offset: off_t, flags: c_int) -> ssize_t;
    fn recv(fd: c_int, buf: *mut c_void, len: size_t, flags: c_int) -> ssize_t;
    fn send(fd: c_int, buf: *const c_void, len: size_t, flags: c_int) -> ssize_t;
    fn recvfrom(fd: c_int, buf: *mut c_void, len: size_t, flags: c_int, from: *mut sockaddr, from_len: *mut socklen_t) -> ssize_t;
    fn sendto(fd: c_int, buf: *const c_void, len: size_t, flags: c_int, to: *const sockaddr, to_len: socklen_t) -> ssize_t;
    fn recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t;
    fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t;
    fn recvmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int, timeout: *mut timespec) -> c_int;
    fn sendmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int;
    fn sendfile(to: c_int, from: c_int, offset: *mut off_t, count: size_t) -> ssize_t;
    fn sendfile64(to: c_int, from: c_int, offset: *mut off_t, count: size_t) -> ssize_t;
    fn splice(from: c_int, from_offset: *mut loff_t, to: c_int, to_offset: *mut loff_t, len: size_t, flags: c_uint) -> ssize_t;
    fn close(fd: c_int) -> c_int;
    fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int;
    fn dup(fd: c_int) -> c_int;
    fn dup2(from: c_int, to: c_int) -> c_int;
    fn dup3(from: c_int, to: c_int, flags: c_int) -> c_int;
    fn fcntl(fd: c_int, command: c_int, argument: c_ulong) -> c_int;
    fn fcntl64(fd: c_int, command: c_int, argument: c_ulong) -> c_int;
    fn ioctl(fd: c_int, request: c_ulong, argument: c_ulong) -> c_int;
    fn shutdown(fd: c_int, how: c_int) -> c_int;
    fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int;
    fn connect(fd: c_int, address: *const sockaddr, len: socklen_t) -> c_int;
    fn accept(fd: c_int, address: *mut sockaddr, len: *mut socklen_t) -> c_int;
    fn accept4(fd: c_int, address: *mut sockaddr, len: *mut socklen_t, flags: c_int) -> c_int;
    fn listen(fd: c_int, backlog: c_int) -> c_int;
    fn getsockopt(fd: c_int, level: c_int, name: c_int, value: *mut c_void, len: *mut socklen_t) -> c_int;
    fn setsockopt(fd: c_int, level: c_int, name: c_int, value: *const c_void, len: socklen_t) -> c_int;
    fn execve(path: *const c_char, argv: *const *const c_char, envp: *const *const c_char) -> c_int;
    fn execvp(file: *const c_char, argv: *const *const c_char) -> c_int;
    fn execv(path: *const c_char, argv: *const *const c_char) -> c_int;
    fn execvpe(file: *const c_char, argv: *const *const c_char, envp: *const *const c_char) -> c_int;
    fn posix_spawn(pid: *mut libc::pid_t, path: *const c_char, actions: *const libc::posix_spawn_file_actions_t, attributes: *const libc::posix_spawnattr_t, argv: *const *mut c_char, envp: *const *mut c_char) -> c_int;
    fn posix_spawnp(pid: *mut libc::pid_t, file: *const c_char, actions: *const libc::posix_spawn_file_actions_t, attributes: *const libc::posix_spawnattr_t, argv: *const *mut c_char, envp: *const *mut c_char) -> c_int;
    fn system(command: *const c_char) -> c_int;
    fn popen(command: *const c_char, mode: *const c_char) -> *mut FILE;
    fn fexecve(fd: c_int, argv: *const *const c_char, envp: *const *const c_char) -> c_int;
    fn posix_spawn_file_actions_adddup2(actions: *mut libc::posix_spawn_file_actions_t, fd: c_int, to: c_int) -> c_int;
    fn vdprintf(fd: c_int, format: *const c_char, arguments: *mut c_void) -> c_int;
    fn __vdprintf_chk(fd: c_int, flag: c_int, format: *const c_char, arguments: *mut c_void) -> c_int;
    fn fdopen(fd: c_int, mode: *const c_char) -> *mut FILE;
    fn syscall(number: c_long, a: c_ulong, b: c_ulong, c: c_ulong, d: c_ulong, e: c_ulong, f: c_ulong) -> c_long;
    fn sigaction(signal: c_int, action: *const libc::sigaction, old: *mut libc::sigaction) -> c_int;
    fn signal(signal: c_int, handler: libc::sighandler_t) -> libc::sighandler_t;
    fn __sysv_signal(signal: c_int, handler: libc::sighandler_t) -> libc::sighandler_t;
    fn sysv_signal(signal: c_int, handler: libc::sighandler_t) -> libc::sighandler_t;
    fn bsd_signal(signal: c_int, handler: libc::sighandler_t) -> libc::sighandler_t;
    fn sigset(signal: c_int, handler: libc::sighandler_t) -> libc::sighandler_t;
    fn siginterrupt(signal: c_int, interrupt: c_int) -> c_int;
    fn poll(fds: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int;
    fn ppoll(fds: *mut pollfd, count: nfds_t, timeout: *const timespec, mask: *const libc::sigset_t) -> c_int;
    fn select(count: c_int, r: *mut libc::fd_set, w: *mut libc::fd_set, e: *mut libc::fd_set, timeout: *mut timeval) -> c_int;
    fn pselect(count: c_int, r: *mut libc::fd_set, w: *mut libc::fd_set, e: *mut libc::fd_set, timeout: *const timespec, mask: *const libc::sigset_t) -> c_int;
    fn epoll_create(size: c_int) -> c_int;
    fn epoll_create1(flags: c_int) -> c_int;
    fn epoll_ctl(set: c_int, operation: c_int, fd: c_int, event: *mut libc::epoll_event) -> c_int;
    fn epoll_wait(set: c_int, events: *mut libc::epoll_event, count: c_int, timeout: c_int) -> c_int;
    fn epoll_pwait(set: c_int, events: *mut libc::epoll_event, count: c_int, timeout: c_int, mask: *const libc::sigset_t) -> c_int;
    fn epoll_pwait2(set: c_int, events: *mut libc::epoll_event, count: c_int, timeout: *const timespec, mask: *const libc::sigset_t) -> c_int;
}
