//! Connections that a program keeps through `exec`, and that may have rings in the program that follows (protocol T13.14).
//!
//! The next program is another one in the same process, with another copy of this library. Only the first program knows whether this
//! process alone has a connection: it has followed its forks. So it leaves a note in the environment of the next program, which takes it
//! out again before `main`:
//!
//! ```text
//!   PARTYWALL_INHERITED=PROCESS:NAME,FD:ROLE:COOKIE:RINGS,FD:ROLE:COOKIE:RINGS
//! ```
//!
//! Children and further programs of the process inherit the environment, if the next program has no copy of this library that takes the
//! note out. They may have given the connection away, so the note must not be believed there. It therefore has the number of the process
//! and the name of the next program, as a hash, which the kernel tells each program (`AT_EXECFN`). The cookie is the kernel's
//! name of the socket, and the last number is how often it has had rings. A connection that is not in the note stays on TCP in the next
//! program.
#![expect(unsafe_code, reason = "the caller's environment, which is an array of C strings")]

use crate::conn::{self, Conn};
use crate::table::{self, DescriptorKind, Entry};
use crate::{broker, process, ready, scratch, sys, unseen};
use libc::{c_char, c_int};
use partywall_protocol::environment::INHERITED;
use partywall_shm::status::Role;
use rustix::io::{Errno, FdFlags};
use rustix::net::sockopt;
use std::fmt::{self, Write};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::net::SocketAddr;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

/// Bytes of a note. Connections that do not fit stay on TCP.
const LENGTH: usize = 4096;
/// Memory can be read or not by pages.
const PAGE: usize = 4096;
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
    /// `name` is the next program's, by [`name_of`] or [`name_of_descriptor`].
    pub(super) fn take(name: Option<u64>) -> Self {
        let mut note = Self::NONE;
        let Some(name) = name else { return note };
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
        let _ = write!(note, "{INHERITED}={}:{name}", process::kernel_pid());
        let empty = note.len;
        for (fd, _) in conns().filter(|(fd, _)| stays_open(*fd)) {
            let Some(conn) = Conn::of(fd).filter(|conn| conn::may_be_inherited(conn)) else { continue };
            let Ok(cookie) = sockopt::socket_cookie(sys::borrow(fd)) else { continue };
            let Some(rings) = conn::rings_after_exec(conn) else { continue };
            // All connections or none: a socket may have several descriptors. One byte is for the zero.
            if write!(note, ",{fd}:{}:{cookie}:{rings}", conn.role() as u8).is_err() || note.len == LENGTH {
                return Self::NONE;
            }
        }
        if note.len == empty { Self::NONE } else { note }
    }

    /// Runs a program by `with_note`, which gets the environment with this note in place of an older one, or by `without` if there is neither,
    /// or no room, or if the environment cannot be read. As the functions of the C library, both return only if they fail.
    ///
    /// # Safety
    /// `environment` is null, or an array of C strings that ends with a null pointer and does not change during the call, as far as its memory
    /// can be read.
    pub(super) unsafe fn run(
        &self,
        environment: *const *const c_char,
        with_note: impl FnOnce(*const *const c_char) -> c_int,
        without: impl FnOnce() -> c_int,
    ) -> c_int {
        // SAFETY: by this function's contract, the array has an entry behind each that is not null.
        let Some(count) = (unsafe { length(environment) }) else { return without() };
        // SAFETY: below the number of entries, which can be read.
        let variable = |at: usize| unsafe { *environment.add(at) };
        // SAFETY: a C string, by this function's contract.
        let is_note = |at: &usize| unsafe { begins_with_name(variable(*at)) };
        let has_older = !process::is_visitor() && (0..count).any(|at| is_note(&at));
        if self.len == 0 && !has_older {
            return without();
        }
        let run = scratch::with_memory(count + 2, ptr::null(), |list| {
            let mut used = 0;
            for at in (0..count).filter(|at| !is_note(at)) {
                list[used] = variable(at);
                used += 1;
            }
            if self.len > 0 {
                list[used] = self.bytes.as_ptr().cast();
            }
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

/// The number of variables of an environment. `None` if it cannot be read, or has too many.
///
/// # Safety
/// It is null, or an array that ends with a null pointer, as far as its memory can be read.
unsafe fn length(environment: *const *const c_char) -> Option<usize> {
    if environment.is_null() {
        return Some(0);
    }
    for at in 0..VARIABLES {
        let entry = environment.wrapping_add(at);
        if (at == 0 || entry.addr() % PAGE == 0) && !sys::is_readable(entry, 1) {
            return None;
        }
        // SAFETY: readable, and an entry of the array, because none before it was null.
        if unsafe { entry.read_unaligned() }.is_null() {
            return Some(at);
        }
    }
    None
}

/// At most `limit` bytes of a C string, without the zero. `None` if they cannot be read.
///
/// # Safety
/// It is null, or a C string that does not change while the result is used, as far as its memory can be read.
unsafe fn text<'a>(string: *const c_char, limit: usize) -> Option<&'a [u8]> {
    let at = |n: usize| string.cast::<u8>().wrapping_add(n);
    let mut len = 0;
    while len < limit {
        if (len == 0 || at(len).addr() % PAGE == 0) && !sys::is_readable(at(len), 1) {
            return None;
        }
        // SAFETY: readable, and no byte before it ends the string.
        if unsafe { *at(len) } == 0 {
            break;
        }
        len += 1;
    }
    // SAFETY: these bytes were read just now.
    Some(unsafe { std::slice::from_raw_parts(at(0), len) })
}

/// Whether a variable is a note.
///
/// # Safety
/// As for [`text`].
unsafe fn begins_with_name(variable: *const c_char) -> bool {
    // SAFETY: by this function's contract.
    let beginning = unsafe { text(variable, NAME.len()) };
    beginning == Some(NAME)
}

/// The hash of a program's name.
fn hash(name: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    name.hash(&mut hasher);
    hasher.finish()
}

/// The name of the program that a path or, in `PATH`, a file stands for. `None` if it cannot be read.
pub(super) fn name_of(path: *const c_char) -> Option<u64> {
    // SAFETY: the caller's argument, a C string as far as it can be read.
    unsafe { text(path, LENGTH) }.map(hash)
}

/// The name by which a program runs that is executed by its descriptor.
pub(super) fn name_of_descriptor(fd: c_int) -> Option<u64> {
    let mut name = InheritedNote::NONE;
    write!(name, "/dev/fd/{fd}").ok()?;
    Some(hash(&name.bytes[..name.len]))
}

/// The name by which the kernel runs a program that `execveat` executes. `None` if it cannot be read, or is no text.
pub(super) fn name_at(folder: c_int, path: *const c_char) -> Option<u64> {
    // SAFETY: the caller's argument, a C string as far as it can be read.
    let path = unsafe { text(path, LENGTH) }?;
    if path.is_empty() {
        return name_of_descriptor(folder);
    }
    if folder == libc::AT_FDCWD || path[0] == b'/' {
        return Some(hash(path));
    }
    let mut name = InheritedNote::NONE;
    write!(name, "/dev/fd/{folder}/{}", str::from_utf8(path).ok()?).ok()?;
    Some(hash(&name.bytes[..name.len]))
}

/// Whether this program is the one that a note is for.
fn is_this_program(name: u64) -> bool {
    // SAFETY: the kernel's own value: the name by which it was told to execute this program, on the stack for as long as it runs.
    let path = unsafe { libc::getauxval(libc::AT_EXECFN) } as usize;
    // SAFETY: as above.
    let path = unsafe { text(ptr::with_exposed_provenance(path), LENGTH) }.unwrap_or_default();
    // A file that was found in `PATH` has its folder in front.
    let file = path.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
    !path.is_empty() && [hash(path), hash(file)].contains(&name)
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
    // With other threads nothing is known, and the variable cannot be taken out. `InheritedNote::run` does not pass it on.
    if !process::has_one_thread() {
        return;
    }
    // SAFETY: no other thread runs that could look into the environment.
    unsafe { std::env::remove_var(INHERITED) };
    for inherited in read(&note, process::kernel_pid(), is_this_program) {
        let fd = inherited.fd;
        if table::get(fd) == Entry::NONE && sockopt::socket_cookie(sys::borrow(fd)) == Ok(inherited.cookie) {
            adopt(&inherited);
        }
    }
}

/// A descriptor of a connection, as a note has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct InheritedSocket {
    fd: c_int,
    role: Role,
    cookie: u64,
    /// How often it has had rings.
    rings: u32,
}

/// The connections in a note for this process and program.
fn read<'n, F: Fn(u64) -> bool>(
    note: &'n str,
    process: u32,
    is_this_program: F,
) -> impl Iterator<Item = InheritedSocket> + use<'n, F> {
    let mut items = note.split(',');
    let is_for = |head: &str| -> Option<bool> {
        let (number, name) = head.split_once(':')?;
        Some(number.parse() == Ok(process) && is_this_program(name.parse().ok()?))
    };
    let is_ours = items.next().and_then(is_for) == Some(true);
    items.take_while(move |_| is_ours).filter_map(|item| {
        let mut parts = item.split(':');
        let fd = parts.next()?.parse().ok().filter(|fd| *fd >= 0 && table::fits(*fd))?;
        let role = Role::from_number(parts.next()?.parse().ok()?).filter(|role| *role != Role::Unknown)?;
        let (cookie, rings) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
        Some(InheritedSocket { fd, role, cookie, rings })
    })
}

fn adopt(&InheritedSocket { fd, role, cookie, rings }: &InheritedSocket) {
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
        if Conn::adopt_inherited(fd, role, rings, local, peer).is_some() {
            crate::log::log!("fd {fd} was inherited");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CStr;

    fn found(note: &str, process: u32, name: u64) -> Vec<InheritedSocket> {
        read(note, process, |of| of == name).collect()
    }

    #[test]
    fn note_for_another_process_or_program_is_ignored() {
        let note = "77:4,5:2:1234:0,6:1:99:3";
        let first = InheritedSocket { fd: 5, role: Role::Accepting, cookie: 1234, rings: 0 };
        assert_eq!(
            found(note, 77, 4),
            [first, InheritedSocket { fd: 6, role: Role::Connecting, cookie: 99, rings: 3 }]
        );
        assert_eq!(found(note, 7, 4), []);
        assert_eq!(found(note, 77, 5), []);
        assert_eq!(found("", 0, 0), []);
    }

    #[test]
    fn wrong_items_of_note_are_left_out() {
        let note = "7:1,,5:2,-1:2:3:0,5:0:3:0,5:9:3:0,99999999:1:3:0,x:1:3:0,8:1:-3:0,8:1:3,9:1:18446744073709551615:7";
        let only = InheritedSocket { fd: 9, role: Role::Connecting, cookie: u64::MAX, rings: 7 };
        assert_eq!(found(note, 7, 1), [only]);
    }

    #[test]
    fn program_knows_itself_by_its_path_and_file() {
        let path = std::env::current_exe().unwrap();
        let path = path.to_str().unwrap();
        let of = |name: &str| name_of(std::ffi::CString::new(name).unwrap().as_ptr()).unwrap();
        assert!(is_this_program(of(path.rsplit('/').next().unwrap())));
        assert!(!is_this_program(of("/bin/true")) && !is_this_program(of("")));
        assert_eq!(name_of(ptr::without_provenance(8)), None);
    }

    #[test]
    fn unreadable_environment_is_passed_on_as_it_is() {
        let mut note = InheritedNote::NONE;
        write!(note, "{INHERITED}=5:1,6:1:7:0").unwrap();
        // SAFETY: nothing of it can be read.
        assert_eq!(unsafe { note.run(ptr::without_provenance(8), |_| 4, || 5) }, 5);
        let variables = [ptr::without_provenance(8), ptr::null()];
        // SAFETY: an array that ends with a null pointer, whose only string cannot be read.
        assert_eq!(unsafe { note.run(variables.as_ptr(), |_| 4, || 5) }, 4);
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
        seen.clear();
        let collect = |list: *const *const c_char| {
            // SAFETY: two variables, and a null pointer.
            seen.extend((0..2).map(|at| unsafe { CStr::from_ptr(*list.add(at)) }.to_str().unwrap().to_owned()));
            // SAFETY: as above.
            assert!(unsafe { *list.add(2) }.is_null());
            4
        };
        // SAFETY: an array that ends with a null pointer.
        assert_eq!(unsafe { InheritedNote::NONE.run(variables.as_ptr(), collect, || 5) }, 4);
        assert_eq!(seen, ["A=1", "B=2"], "an older note is for nobody");
        // SAFETY: as above.
        assert_eq!(unsafe { InheritedNote::NONE.run(variables[2..].as_ptr(), |_| 4, || 5) }, 5);
        // SAFETY: no environment.
        assert_eq!(unsafe { note.run(ptr::null(), |_| 4, || 5) }, 4);
    }
}
