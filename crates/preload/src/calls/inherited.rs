//! Connections that a program keeps through `exec`, and that may have rings in the program that follows (protocol T13.10).
//!
//! The next program is another one in the same process, with another copy of this library. Only the first program knows whether this
//! process alone has a connection: it has followed its forks. So it leaves a note in the environment of the next program, which takes it
//! out again before `main`:
//!
//! ```text
//!   PARTYWALL_INHERITED=PROCESS,FD:ROLE:COOKIE,FD:ROLE:COOKIE
//! ```
//!
//! The number of the process says whom the note is for, as children inherit the environment. The cookie is the kernel's name of the
//! socket. A connection that is not in the note stays on TCP in the next program.
#![expect(unsafe_code, reason = "the caller's environment, which is an array of C strings")]

use crate::conn::{self, Conn};
use crate::table::{self, DescriptorKind, Entry};
use crate::{broker, process, ready, scratch, sys, unseen};
use libc::{c_char, c_int};
use partywall_protocol::environment::INHERITED;
use partywall_shm::status::Role;
use rustix::io::{Errno, FdFlags};
use rustix::net::sockopt;
use std::ffi::CStr;
use std::fmt::{self, Write};
use std::net::SocketAddr;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

/// Bytes of a note. Connections that do not fit stay on TCP.
const LENGTH: usize = 4096;
/// The most variables of an environment that gets a note.
const VARIABLES: usize = 1 << 16;

/// A note as an environment has it, with the zero at its end. Empty: there is none.
pub(super) struct InheritedNote {
    bytes: [u8; LENGTH],
    len: usize,
}

impl InheritedNote {
    const NONE: Self = Self { bytes: [0; LENGTH], len: 0 };

    /// The note about the connections that stay open, before they go back to TCP.
    pub(super) fn take() -> Self {
        let mut note = Self::NONE;
        let conns = || table::entries(0, u32::MAX).filter(|(_, entry)| entry.kind() == DescriptorKind::Connection);
        if conns().next().is_none() || process::is_visitor() || unseen::was_found() || !process::has_one_thread() {
            return note;
        }
        // The next program does not know what is in a set, and its threads could not be woken.
        let leads_past_us = |(fd, entry): (c_int, Entry)| {
            matches!(entry.kind(), DescriptorKind::Epoll | DescriptorKind::Ring) && stays_open(fd)
        };
        if table::entries(0, u32::MAX).any(leads_past_us) {
            return note;
        }
        let _ = write!(note, "{INHERITED}={}", process::kernel_pid());
        let empty = note.len;
        for (fd, _) in conns().filter(|(fd, _)| stays_open(*fd)) {
            let Some(conn) = Conn::of(fd).filter(|conn| conn::may_be_inherited(conn)) else { continue };
            let Ok(cookie) = sockopt::socket_cookie(sys::borrow(fd)) else { continue };
            let len = note.len;
            // All of it or nothing, and one byte for the zero.
            if write!(note, ",{fd}:{}:{cookie}", conn.role() as u8).is_err() || note.len == LENGTH {
                note.bytes[len..].fill(0);
                note.len = len;
                break;
            }
        }
        if note.len == empty { Self::NONE } else { note }
    }

    /// Runs a program by `with_note`, which gets the environment with the note in place of an older one, or by `without` if there is no note, or
    /// no room for it. As the functions of the C library, both return only if they fail.
    ///
    /// # Safety
    /// `environment` is null, or an array of C strings that ends with a null pointer and does not change during the call.
    pub(super) unsafe fn run(
        &self,
        environment: *const *const c_char,
        with_note: impl FnOnce(*const *const c_char) -> c_int,
        without: impl FnOnce() -> c_int,
    ) -> c_int {
        if self.len == 0 {
            return without();
        }
        // SAFETY: by this function's contract, the array has an entry behind each that is not null.
        let variable = |at: usize| if environment.is_null() { ptr::null() } else { unsafe { *environment.add(at) } };
        let Some(count) = (0..VARIABLES).find(|at| variable(*at).is_null()) else { return without() };
        let run = scratch::with_memory(count + 2, ptr::null(), |list| {
            let mut used = 0;
            for at in 0..count {
                // SAFETY: a C string, by this function's contract.
                let is_note = unsafe { CStr::from_ptr(variable(at)) }.to_bytes().starts_with(NAME);
                if !is_note {
                    list[used] = variable(at);
                    used += 1;
                }
            }
            list[used] = self.bytes.as_ptr().cast();
            let result = with_note(list.as_ptr());
            // The arguments and the environment have a limit together, and without the note they may fit.
            if result < 0 && sys::errno() == Errno::TOOBIG { Err(Errno::TOOBIG) } else { Ok(result) }
        });
        run.unwrap_or_else(|_| without())
    }
}

/// Whether another program would find this descriptor. (In a child after `vfork` it may be closed already.)
pub(super) fn stays_open(fd: c_int) -> bool {
    rustix::io::fcntl_getfd(sys::borrow(fd)).is_ok_and(|flags| !flags.contains(FdFlags::CLOEXEC))
}

/// The beginning of a note in an environment.
const NAME: &[u8] = b"PARTYWALL_INHERITED=";

impl Write for InheritedNote {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let end = self.len + text.len();
        self.bytes.get_mut(self.len..end).ok_or(fmt::Error)?.copy_from_slice(text.as_bytes());
        self.len = end;
        Ok(())
    }
}

/// The environment that `execv` and `execvp` use.
pub(super) fn environment() -> *const *const c_char {
    // SAFETY: the C library's own variable, of this type.
    unsafe extern "C" {
        static environ: AtomicPtr<*const c_char>;
    }
    // SAFETY: a word that the C library and the program set, and that is loaded once.
    unsafe { environ.load(Ordering::Relaxed) }
}

/// Before `main`: looks after the connections in the note that is for this process, if there is one.
pub(crate) fn adopt_inherited() {
    let Some(note) = sys::environment(INHERITED).and_then(|note| note.into_string().ok()) else { return };
    if !process::has_one_thread() {
        return;
    }
    // SAFETY: no other thread runs that could look into the environment.
    unsafe { std::env::remove_var(INHERITED) };
    for (fd, role, cookie) in read(&note, process::kernel_pid()) {
        if table::get(fd) == Entry::NONE && sockopt::socket_cookie(sys::borrow(fd)) == Ok(cookie) {
            adopt(fd, role, cookie);
        }
    }
}

/// The connections in a note for this process.
fn read(note: &str, process: u32) -> impl Iterator<Item = (c_int, Role, u64)> + use<'_> {
    let mut items = note.split(',');
    let is_ours = items.next().and_then(|number| number.parse().ok()) == Some(process);
    items.take_while(move |_| is_ours).filter_map(|item| {
        let mut parts = item.split(':');
        let fd = parts.next()?.parse().ok().filter(|fd| *fd >= 0 && table::fits(*fd))?;
        let role = Role::from_number(parts.next()?.parse().ok()?).filter(|role| *role != Role::Unknown)?;
        Some((fd, role, parts.next()?.parse().ok()?))
    })
}

fn adopt(fd: c_int, role: Role, cookie: u64) {
    let socket = sys::borrow(fd);
    let copied = table::entries(0, u32::MAX)
        .find_map(|(other, _)| Conn::of(other).filter(|_| sockopt::socket_cookie(sys::borrow(other)) == Ok(cookie)));
    if let Some(conn) = copied {
        conn.add_descriptor(fd);
        return;
    }
    let local = rustix::net::getsockname(socket).ok().and_then(|name| SocketAddr::try_from(name).ok());
    let peer = rustix::net::getpeername(socket).ok().flatten().and_then(|name| SocketAddr::try_from(name).ok());
    if let (true, Some(local), Some(peer)) = (super::listen::is_tcp(fd), local, peer) {
        conn::install(&ready::WAITERS);
        broker::expect();
        if Conn::adopt_inherited(fd, role, local, peer).is_some() {
            crate::log::log!("fd {fd} was inherited");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn note_for_another_process_is_ignored() {
        let note = "77,5:2:1234,6:1:99";
        assert_eq!(read(note, 77).collect::<Vec<_>>(), [(5, Role::Accepting, 1234), (6, Role::Connecting, 99)]);
        assert_eq!(read(note, 7).count(), 0);
        assert_eq!(read("", 0).count(), 0);
    }

    #[test]
    fn wrong_items_of_note_are_left_out() {
        let note = "7,,5:2,-1:2:3,5:0:3,5:9:3,99999999:1:3,x:1:3,8:1:-3,9:1:18446744073709551615";
        assert_eq!(read(note, 7).collect::<Vec<_>>(), [(9, Role::Connecting, u64::MAX)]);
    }

    #[test]
    fn note_takes_the_place_of_an_older_one() {
        let mut note = InheritedNote::NONE;
        write!(note, "{INHERITED}=5,6:1:7").unwrap();
        let variables = [c"A=1".as_ptr(), c"PARTYWALL_INHERITED=4".as_ptr(), c"B=2".as_ptr(), ptr::null()];
        let mut seen = Vec::new();
        let collect = |list: *const *const c_char| {
            for at in 0.. {
                // SAFETY: an array that ends with a null pointer, of C strings.
                let variable = unsafe { *list.add(at) };
                if variable.is_null() {
                    return 3;
                }
                // SAFETY: as above.
                seen.push(unsafe { CStr::from_ptr(variable) }.to_str().unwrap().to_owned());
            }
            4
        };
        // SAFETY: an array that ends with a null pointer.
        assert_eq!(unsafe { note.run(variables.as_ptr(), collect, || 5) }, 3);
        assert_eq!(seen, ["A=1", "B=2", "PARTYWALL_INHERITED=5,6:1:7"]);
        // SAFETY: as above.
        assert_eq!(unsafe { InheritedNote::NONE.run(variables.as_ptr(), |_| 4, || 5) }, 5);
        // SAFETY: no environment.
        assert_eq!(unsafe { note.run(ptr::null(), |_| 4, || 5) }, 4);
    }

    #[test]
    fn note_is_full_before_its_last_byte() {
        let mut note = InheritedNote::NONE;
        while write!(note, "1234567").is_ok() {}
        assert!(note.len <= LENGTH && note.len > LENGTH - 7);
    }
}
