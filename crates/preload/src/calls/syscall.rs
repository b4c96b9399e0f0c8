//! `syscall`: the numbers that mean sockets go the same way as the functions of their name.
#![expect(unsafe_code, reason = "C functions")]

use super::{
    accept, close, connect, dup, epoll, exec, fcntl, ioctl, listen, msg, poll, read, select, sendfile, shutdown,
    sockopt,
};
use super::{uring, write};
use crate::real;
use libc::{c_int, c_long, c_uint, c_ulong};

export! {
    /// `syscall`, whose arguments are variadic in C and come in the same places as named ones.
    fn syscall(number: c_long, a: c_ulong, b: c_ulong, c: c_ulong, d: c_ulong, e: c_ulong, f: c_ulong) -> c_long {
        let (fd, second, third) = (a as c_int, b as c_int, c as c_int);
        // SAFETY: the caller's arguments, in the types of the function of that name; or passed on.
        unsafe {
            match number {
                libc::SYS_read => read::read(fd, b as _, c as _) as c_long,
                libc::SYS_write => write::write(fd, b as _, c as _) as c_long,
                libc::SYS_readv => read::readv(fd, b as _, third) as c_long,
                libc::SYS_writev => write::writev(fd, b as _, third) as c_long,
                libc::SYS_recvfrom => read::recvfrom(fd, b as _, c as _, d as c_int, e as _, f as _) as c_long,
                libc::SYS_sendto => write::sendto(fd, b as _, c as _, d as c_int, e as _, f as _) as c_long,
                libc::SYS_recvmsg => msg::recvmsg(fd, b as _, third) as c_long,
                libc::SYS_sendmsg => msg::sendmsg(fd, b as _, third) as c_long,
                libc::SYS_recvmmsg => msg::recvmmsg(fd, b as _, c as _, d as c_int, e as _).into(),
                libc::SYS_sendmmsg => msg::sendmmsg(fd, b as _, c as _, d as c_int).into(),
                libc::SYS_sendfile => sendfile::sendfile(fd, second, c as _, d as _) as c_long,
                libc::SYS_splice => {
                    sendfile::splice(fd, b as _, third, d as _, e as _, f as c_uint) as c_long
                }
                libc::SYS_close => close::close(fd).into(),
                libc::SYS_close_range => close::close_range(a as _, b as _, third).into(),
                libc::SYS_dup => dup::dup(fd).into(),
                libc::SYS_dup3 => dup::dup3(fd, second, third).into(),
                #[cfg(target_arch = "x86_64")]
                libc::SYS_dup2 => dup::dup2(fd, second).into(),
                libc::SYS_fcntl => fcntl::fcntl(fd, second, c).into(),
                libc::SYS_ioctl => ioctl::ioctl(fd, b, c).into(),
                libc::SYS_shutdown => shutdown::shutdown(fd, second).into(),
                libc::SYS_connect => connect::connect(fd, b as _, c as _).into(),
                libc::SYS_accept => accept::accept(fd, b as _, c as _).into(),
                libc::SYS_accept4 => accept::accept4(fd, b as _, c as _, d as c_int).into(),
                libc::SYS_listen => listen::listen(fd, second).into(),
                libc::SYS_setsockopt => sockopt::setsockopt(fd, second, third, d as _, e as _).into(),
                libc::SYS_getsockopt => sockopt::getsockopt(fd, second, third, d as _, e as _).into(),
                libc::SYS_execve => exec::execve(a as _, b as _, c as _).into(),
                libc::SYS_execveat => exec::execveat(fd, b as _, c as _, d as _, e as c_int).into(),
                #[cfg(target_arch = "x86_64")]
                libc::SYS_epoll_create => epoll::epoll_create(fd).into(),
                libc::SYS_epoll_create1 => epoll::epoll_create1(fd).into(),
                libc::SYS_epoll_ctl => epoll::epoll_ctl(fd, second, third, d as _).into(),
                #[cfg(target_arch = "x86_64")]
                libc::SYS_epoll_wait => epoll::epoll_wait(fd, b as _, third, d as c_int).into(),
                libc::SYS_epoll_pwait => epoll::epoll_pwait(fd, b as _, third, d as c_int, e as _).into(),
                libc::SYS_epoll_pwait2 => epoll::epoll_pwait2(fd, b as _, third, d as _, e as _).into(),
                #[cfg(target_arch = "x86_64")]
                libc::SYS_poll => poll::poll(a as _, b as _, third).into(),
                libc::SYS_ppoll => poll::ppoll(a as _, b as _, c as _, d as _).into(),
                #[cfg(target_arch = "x86_64")]
                libc::SYS_select => select::select(fd, b as _, c as _, d as _, e as _).into(),
                libc::SYS_pselect6 => {
                    let kernel = || real::syscall(number, a, b, c, d, e, f);
                    select::pselect6(fd, [b as _, c as _, d as _], e as _, f as _, kernel)
                }
                libc::SYS_rt_sigaction => {
                    let result = real::syscall(number, a, b, c, d, e, f);
                    crate::signals::changed();
                    result
                }
                libc::SYS_io_uring_setup => uring::setup(a, b),
                libc::SYS_io_uring_enter => uring::enter(fd, b as c_uint, c, d as c_uint, e, f),
                libc::SYS_io_uring_register => uring::register(a, b as c_uint, c, d as c_uint),
                _ => real::syscall(number, a, b, c, d, e, f),
            }
        }
    }
}
