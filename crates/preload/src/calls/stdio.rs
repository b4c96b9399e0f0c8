//! The C library's own input and output on sockets. Streams read and write inside the C library, past this one, so a stream on a
//! connection of ours gets functions of this library. `dprintf` makes its own stream, so its text is formatted here and written by this
//! library.
#![expect(unsafe_code, reason = "C functions")]

use super::{close, read, write};
use crate::conn::Conn;
use crate::{real, sys};
use libc::{FILE, c_char, c_int, c_void, off64_t, size_t, ssize_t};
use partywall_shm::status::Reason;
use rustix::io::Errno;

// SAFETY: the C library calls each of these as it declares `cookie_io_functions_t`: with the cookie that `fopencookie` got, and with a buffer
// of the stream's own that is valid for as many bytes as it says. The functions below are written for that.
/// `cookie_io_functions_t`
#[repr(C)]
struct Functions {
    read: unsafe extern "C-unwind" fn(*mut c_void, *mut c_char, size_t) -> ssize_t,
    write: unsafe extern "C-unwind" fn(*mut c_void, *const c_char, size_t) -> ssize_t,
    seek: unsafe extern "C-unwind" fn(*mut c_void, *mut off64_t, c_int) -> c_int,
    close: unsafe extern "C-unwind" fn(*mut c_void) -> c_int,
}

// SAFETY: the signature that the C library gives it.
unsafe extern "C-unwind" {
    fn fopencookie(cookie: *mut c_void, mode: *const c_char, functions: Functions) -> *mut FILE;
}

/// Where a stream of the GNU C library says which descriptor it is of: a part of its binary interface, by which programs compiled
/// long ago find it.
const NUMBER_AT: usize = 112;
/// The file number of a stream with custom functions.
const NO_NUMBER: c_int = -2;

fn descriptor(cookie: *mut c_void) -> c_int {
    cookie.addr() as c_int
}

// SAFETY: the C library calls it with its own buffer, as `cookie_io_functions_t` says.
unsafe extern "C-unwind" fn stream_read(cookie: *mut c_void, to: *mut c_char, n: size_t) -> ssize_t {
    // SAFETY: the stream's own buffer.
    unsafe { read::read(descriptor(cookie), to.cast(), n) }
}

/// All of it, or an error: a part would be one.
// SAFETY: as `stream_read`.
unsafe extern "C-unwind" fn stream_write(cookie: *mut c_void, from: *const c_char, n: size_t) -> ssize_t {
    let mut done = 0;
    while done < n {
        // SAFETY: the rest of the stream's own buffer.
        match unsafe { write::write(descriptor(cookie), from.add(done).cast(), n - done) } {
            some @ 1.. => done += some.cast_unsigned(),
            _ => break,
        }
    }
    done.cast_signed()
}

// SAFETY: as `stream_read`; no argument is used.
unsafe extern "C-unwind" fn stream_seek(_: *mut c_void, _: *mut off64_t, _: c_int) -> c_int {
    sys::set_errno(Errno::SPIPE);
    -1
}

// SAFETY: as `stream_read`; the stream closes once.
unsafe extern "C-unwind" fn stream_close(cookie: *mut c_void) -> c_int {
    // SAFETY: the stream owns its descriptor.
    unsafe { close::close(descriptor(cookie)) }
}

const FUNCTIONS: Functions =
    Functions { read: stream_read, write: stream_write, seek: stream_seek, close: stream_close };

export! {
    /// `fdopen`
    fn fdopen(fd: c_int, mode: *const c_char) -> *mut FILE {
        crate::datagram::give_up(fd);
        let Some(conn) = Conn::of(fd) else {
            // SAFETY: the caller's arguments, passed on.
            return unsafe { real::fdopen(fd, mode) };
        };
        let cookie = std::ptr::without_provenance_mut(fd as usize);
        // SAFETY: functions that take such a cookie; the mode is the caller's.
        let stream = unsafe { fopencookie(cookie, mode, FUNCTIONS) };
        if stream.is_null() {
            return stream;
        }
        // SAFETY: inside the structure, which is larger in every release.
        let number = unsafe { stream.cast::<u8>().add(NUMBER_AT).cast::<c_int>() };
        // SAFETY: as above; aligned, since the structure begins with an aligned word.
        if unsafe { number.read() } == NO_NUMBER {
            // SAFETY: as above. `fileno` gives it to the program.
            unsafe { number.write(fd) };
        } else {
            // Another C library: its streams have no number of ours, but they do read and write by us.
            conn.stay_on_tcp(Reason::RawCalls);
        }
        stream
    }
}

// SAFETY: the signature that the C library gives it.
unsafe extern "C-unwind" {
    fn vasprintf(to: *mut *mut c_char, format: *const c_char, arguments: *mut c_void) -> c_int;
}

// A `va_list` is a pointer where it is an argument, on x86-64.
#[cfg(target_arch = "x86_64")]
export! {
    /// `vdprintf`
    fn vdprintf(fd: c_int, format: *const c_char, arguments: *mut c_void) -> c_int {
        if Conn::of(fd).is_none() {
            // SAFETY: the caller's arguments, passed on.
            return unsafe { real::vdprintf(fd, format, arguments) };
        }
        let mut text = std::ptr::null_mut();
        // SAFETY: the caller's format and arguments.
        let n = unsafe { vasprintf(&raw mut text, format, arguments) };
        let Ok(len) = size_t::try_from(n) else { return n };
        let cookie = std::ptr::without_provenance_mut(fd as usize);
        // SAFETY: `len` bytes, which the C library has allocated for us.
        let written = unsafe { stream_write(cookie, text, len) };
        let errno = sys::errno_number();
        // SAFETY: as above.
        unsafe { libc::free(text.cast()) };
        sys::restore_errno(errno);
        if written == n as ssize_t { n } else { -1 }
    }

    /// `vdprintf`, as compiled with `_FORTIFY_SOURCE`.
    fn __vdprintf_chk(fd: c_int, flag: c_int, format: *const c_char, arguments: *mut c_void) -> c_int {
        if Conn::of(fd).is_none() {
            // SAFETY: the caller's arguments, passed on.
            return unsafe { real::__vdprintf_chk(fd, flag, format, arguments) };
        }
        // SAFETY: as above.
        unsafe { vdprintf(fd, format, arguments) }
    }
}

/// Variadic functions cannot be written in Rust yet. Each lays its registers out as a `va_list` wants them.
#[cfg(all(target_arch = "x86_64", not(test)))]
macro_rules! printers {
    ($($name:ident: $format:literal, $used:literal;)*) => { $(
        /// A function of the C library that formats what it is given.
        ///
        /// # Safety
        /// As the C library's function of this name.
        // SAFETY: the name is the C library's, whose function this stands for.
        #[unsafe(no_mangle)]
        // SAFETY: the body keeps to the C calling convention: it restores the stack and frame pointers, and touches argument
        // registers only. `al` says whether there are arguments in vector registers.
        #[unsafe(naked)]
        pub(crate) unsafe extern "C" fn $name() {
            std::arch::naked_asm!(
                "push rbp",
                "mov rbp, rsp",
                "sub rsp, 208",
                "mov [rsp], rdi",
                "mov [rsp + 8], rsi",
                "mov [rsp + 16], rdx",
                "mov [rsp + 24], rcx",
                "mov [rsp + 32], r8",
                "mov [rsp + 40], r9",
                "test al, al",
                "je 2f",
                "movaps [rsp + 48], xmm0",
                "movaps [rsp + 64], xmm1",
                "movaps [rsp + 80], xmm2",
                "movaps [rsp + 96], xmm3",
                "movaps [rsp + 112], xmm4",
                "movaps [rsp + 128], xmm5",
                "movaps [rsp + 144], xmm6",
                "movaps [rsp + 160], xmm7",
                "2:",
                concat!("mov dword ptr [rsp + 176], ", $used),
                "mov dword ptr [rsp + 180], 48",
                "lea rax, [rbp + 16]",
                "mov [rsp + 184], rax",
                "mov [rsp + 192], rsp",
                concat!("mov rsi, [rsp + ", $format, "]"),
                "lea rdx, [rsp + 176]",
                "call {print}",
                "leave",
                "ret",
                print = sym vdprintf,
            )
        }
    )* };
}

// Where the format is among the registers, and how many bytes of them are used up after it.
#[cfg(all(target_arch = "x86_64", not(test)))]
printers! {
    dprintf: 8, 16;
    __dprintf_chk: 16, 24;
}
