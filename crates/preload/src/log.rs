//! A log for people who look into a program that misbehaves: to the file that the environment names ([`environment::LOG`]), or nowhere.
//!
//! Never to the program's own output. One line is one write, so that processes may share the file. It begins with the numbers of the process and
//! the thread, and with the seconds since 1970.

use partywall_protocol::environment;
use rustix::fd::BorrowedFd;
use rustix::fs::{Mode, OFlags};
use std::fmt::{Arguments, Write};
use std::sync::atomic::{AtomicI32, Ordering};

static FILE: AtomicI32 = AtomicI32::new(-1);

/// Opens the log if the environment names one (see [`crate::sys::environment`]). Called once, before `main`.
pub(crate) fn open() {
    let Some(path) = crate::sys::environment(environment::LOG) else { return };
    let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::CREATE | OFlags::CLOEXEC;
    let Ok(file) = rustix::fs::open(&path, flags, Mode::from_raw_mode(0o600)) else { return };
    let file = crate::hidden::keep(file);
    FILE.store(file, Ordering::Relaxed);
}

/// Whether the log has a destination.
#[inline]
pub(crate) fn is_open() -> bool {
    FILE.load(Ordering::Relaxed) >= 0
}

/// Writes a line. Neither allocates nor fails.
pub(crate) fn line(arguments: Arguments<'_>) {
    let file = FILE.load(Ordering::Relaxed);
    if file < 0 {
        return;
    }
    let mut text = LogText { bytes: [0; 400], len: 0 };
    let at = crate::sys::wall_clock();
    let (process, thread) = (crate::process::kernel_pid(), crate::sys::thread());
    let _ = write!(text, "{process} {thread} {}.{:06} ", at.as_secs(), at.subsec_micros());
    let _ = text.write_fmt(arguments);
    text.bytes[text.len] = b'\n';
    let file: BorrowedFd<'_> = crate::sys::borrow(file);
    let _ = rustix::io::write(file, &text.bytes[..=text.len]);
}

/// Text of bounded length; what does not fit is left out.
struct LogText {
    bytes: [u8; 400],
    len: usize,
}

impl Write for LogText {
    fn write_str(&mut self, s: &str) -> std::fmt::Result {
        // One byte stays for the end of the line.
        let room = self.bytes.len() - 1 - self.len;
        let n = s.len().min(room);
        self.bytes[self.len..self.len + n].copy_from_slice(&s.as_bytes()[..n]);
        self.len += n;
        Ok(())
    }
}

/// Writes a line to the log, if there is one; nothing is formatted otherwise.
macro_rules! log {
    ($($argument:tt)*) => {
        if $crate::log::is_open() {
            $crate::log::line(format_args!($($argument)*));
        }
    };
}
pub(crate) use log;
