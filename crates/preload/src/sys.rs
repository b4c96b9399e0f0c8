//! The few questions to the kernel that every part asks, and [`errno`](crate::errno).
#![expect(unsafe_code, reason = "some calls have no safe form")]

pub(crate) use crate::errno::{errno, errno_number, fail, restore_errno, set_errno};
use crate::real;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use std::cell::Cell;
use std::ffi::c_int;
use std::time::Duration;

/// A result as C functions give it.
pub(crate) fn give(result: Result<usize, Errno>) -> isize {
    match result {
        // A call carries less than `isize::MAX` bytes: the kernel's own limit is 2 GiB, and ours the caller's buffer.
        Ok(n) => isize::try_from(n).unwrap_or(isize::MAX),
        Err(error) => fail(error),
    }
}

/// The result of a C function.
pub(crate) fn take(result: isize) -> Result<usize, Errno> {
    usize::try_from(result).map_err(|_| errno())
}

/// A descriptor of the program, for one call.
#[track_caller]
pub(crate) fn borrow(fd: c_int) -> BorrowedFd<'static> {
    debug_assert!(fd >= 0, "callers have looked it up in the table");
    // SAFETY: not -1. If the program closes it meanwhile, the call fails, or reaches a descriptor that the program has opened under that
    // number, as the replaced call would have.
    unsafe { BorrowedFd::borrow_raw(fd.max(0)) }
}

/// Reads a socket option that is made of plain numbers, past the library's own `getsockopt`. `false`, and `errno`, if there is no such option.
pub(crate) fn read_option<T: Copy>(fd: c_int, level: c_int, name: c_int, value: &mut T) -> bool {
    let mut len = size_of::<T>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes of plain numbers.
    unsafe { real::getsockopt(fd, level, name, std::ptr::from_mut(value).cast(), &raw mut len) == 0 }
}

/// Sets a socket option that is made of plain numbers, past the library's own `setsockopt`. `false`, and `errno`, if the kernel refuses.
pub(crate) fn set_option<T: Copy>(fd: c_int, level: c_int, name: c_int, value: &T) -> bool {
    let len = size_of::<T>() as libc::socklen_t;
    // SAFETY: the kernel reads as many bytes as the value has.
    unsafe { real::setsockopt(fd, level, name, std::ptr::from_ref(value).cast(), len) == 0 }
}

/// The kernel's events of a descriptor now, of those asked for and those that are always reported.
pub(crate) fn poll_now(fd: c_int, events: u32) -> u32 {
    if fd < 0 {
        return 0;
    }
    let fd = borrow(fd);
    let wanted = PollFlags::from_bits_retain(events as u16);
    let mut fds = [PollFd::new(&fd, wanted)];
    match rustix::event::poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) {
        Ok(_) => u32::from(fds[0].revents().bits()) & !u32::from(PollFlags::NVAL.bits()),
        Err(_) => 0,
    }
}

/// Whether the kernel says that nothing more will come on a socket.
pub(crate) fn has_ended(fd: c_int) -> bool {
    poll_now(fd, PollFlags::RDHUP.bits().into()) != 0
}

thread_local! {
    static THREAD: Cell<u32> = const { Cell::new(0) };
    static FORMER_THREAD: Cell<u32> = const { Cell::new(0) };
}

/// This thread, remembered.
pub(crate) fn thread() -> u32 {
    // A thread that is being destroyed has no thread-local memory any more, and asks.
    THREAD
        .try_with(|known| {
            let epoch = crate::process::fork_epoch();
            let value = known.get();
            // The upper bits say in which process this was found out: memory survives fork.
            if value != 0 && value >> 24 == epoch & 0xff {
                return value & 0xff_ffff;
            }
            let asked = ask_thread();
            known.set(asked | (epoch & 0xff) << 24);
            let _ = FORMER_THREAD.try_with(|former| former.set(value & 0xff_ffff));
            asked
        })
        .unwrap_or_else(|_| ask_thread())
}

/// The number under which this thread was remembered until it found out that it is in a child, which a bare system call has made; else 0.
/// What it took under that number it still has to give back.
pub(crate) fn former_thread() -> u32 {
    FORMER_THREAD.try_with(Cell::get).unwrap_or(0)
}

/// This is the only thread of a child, from the first moment on.
pub(crate) fn became_child() {
    thread();
    let _ = FORMER_THREAD.try_with(|former| former.set(0));
}

fn ask_thread() -> u32 {
    // Numbers of threads are below 2^22 (the kernel's PID_MAX_LIMIT).
    u32::try_from(rustix::thread::gettid().as_raw_nonzero().get()).unwrap_or(1) & 0xff_ffff
}

/// Whether a thread or process of this number exists.
pub(crate) fn is_alive(number: u32) -> bool {
    let Ok(number) = i32::try_from(number) else { return false };
    let Some(pid) = rustix::process::Pid::from_raw(number) else { return false };
    !matches!(rustix::process::test_kill_process(pid), Err(Errno::SRCH))
}

/// The monotonic clock. Differences are taken with `saturating_sub`: on some machines it goes back a little from one processor to the
/// next, and a panic here would end a foreign program.
pub(crate) fn now() -> Duration {
    clock(libc::CLOCK_MONOTONIC)
}

/// How long this thread has had a processor since it started.
pub(crate) fn thread_time() -> Duration {
    clock(libc::CLOCK_THREAD_CPUTIME_ID)
}

/// The monotonic time, some milliseconds late at most, for less cost.
pub(crate) fn coarse_now() -> Duration {
    clock(libc::CLOCK_MONOTONIC_COARSE)
}

/// By the C library, which knows where the kernel's own code for this is. (rustix looks that up itself, and follows an address that
/// is not mapped where a program is run by valgrind.)
fn clock(clock: libc::clockid_t) -> Duration {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the C library writes one structure. These clocks exist on every Linux; with none, the time stays 0.
    unsafe { libc::clock_gettime(clock, &raw mut t) };
    Duration::new(u64::try_from(t.tv_sec).unwrap_or(0), u32::try_from(t.tv_nsec).unwrap_or(0))
}

/// The coarse time in milliseconds.
#[inline]
pub(crate) fn coarse_millis() -> u64 {
    millis(coarse_now())
}

/// The time since 1970.
pub(crate) fn wall_clock() -> Duration {
    clock(libc::CLOCK_REALTIME)
}

/// Milliseconds since 1970, some milliseconds late at most.
pub(crate) fn wall_clock_millis() -> u64 {
    millis(clock(libc::CLOCK_REALTIME_COARSE))
}

fn millis(time: Duration) -> u64 {
    time.as_secs() * 1000 + u64::from(time.subsec_millis())
}

/// A measure of time that costs little and need not be exact: some two or three to a nanosecond.
#[inline]
pub(crate) fn ticks() -> u64 {
    #[cfg(target_arch = "x86_64")]
    {
        // SAFETY: every x86-64 has this instruction; a system that forbids it to programs is none that runs ours.
        unsafe { core::arch::x86_64::_rdtsc() }
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        now().as_nanos() as u64 * 2
    }
}

/// A variable of the environment that is meant for us.
///
/// None where the program has more rights than its caller (set-user-ID, file capabilities): there the caller chooses the environment, and
/// could make the program create and write files, and trust a broker, beyond the caller's own rights.
pub(crate) fn environment(name: &str) -> Option<std::ffi::OsString> {
    // SAFETY: reads a table that the kernel has made for this process.
    let is_secure = unsafe { libc::getauxval(libc::AT_SECURE) } != 0;
    std::env::var_os(name).filter(|value| !is_secure && !value.is_empty())
}

/// Whether memory that a program hands over can be read, so that a wrong pointer gets its `EFAULT` from the kernel instead of ending
/// the program in this library. For structures; the bytes of a call are the kernel's to read, or the ring's.
///
/// Memory just above this function's own frame is the caller's stack. For other memory a system call is made for each page: the kernel
/// reads a set of signals from there, and then refuses the operation.
pub(crate) fn is_readable<T>(at: *const T, count: usize) -> bool {
    const NEAR: usize = 16 << 10;
    const PAGE: usize = 4096;
    const SET: usize = 8;
    let here = 0u8;
    let (from, Some(len)) = (at.addr(), count.checked_mul(size_of::<T>())) else { return false };
    if len == 0 {
        return true;
    }
    let Some(end) = from.checked_add(len) else { return false };
    let frame = (&raw const here).addr();
    if from >= frame && end <= frame + NEAR {
        return true;
    }
    let errno = errno_number();
    let can_be_read = |at: usize| {
        let no_way = libc::c_ulong::MAX;
        let arguments = (no_way, at as libc::c_ulong, 0, SET as libc::c_ulong);
        // SAFETY: the kernel reads eight bytes, or fails with `EFAULT`; then it finds that there is no such way to change a mask.
        let result = unsafe {
            real::syscall(libc::SYS_rt_sigprocmask, arguments.0, arguments.1, arguments.2, arguments.3, 0, 0)
        };
        result == 0 || self::errno() != Errno::FAULT
    };
    let last = end - SET.min(len);
    let is_readable = (from..last).step_by(PAGE).all(can_be_read) && can_be_read(last);
    restore_errno(errno);
    is_readable
}
