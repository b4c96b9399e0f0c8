//! `exec`: another program takes the sockets over that stay open, and it knows nothing of rings.
#![expect(unsafe_code, reason = "C functions, and the caller's lists of arguments")]

use super::inherited::{InheritedNote, environment, name_at, name_of, name_of_descriptor, stays_open};
use crate::conn::{self, Conn, Descent};
use crate::table::{self, DescriptorKind};
use crate::{hidden, process, ready, real, sys};
use libc::{c_char, c_int, c_ulong};
use partywall_shm::status::Reason;
use rustix::io::Errno;

/// The connections that another program would find.
fn inherited() -> impl Iterator<Item = &'static Conn> {
    table::entries(0, u32::MAX).filter_map(|(fd, _)| Conn::of(fd).filter(|_| stays_open(fd)))
}

/// Brings every connection back to TCP that stays open. `goes_on`: this process does, and has them still.
fn see_off(goes_on: bool) {
    crate::datagram::before_exec();
    let visits = process::is_visitor();
    for (fd, entry) in table::entries(0, u32::MAX) {
        if entry.kind() == DescriptorKind::Epoll && !visits && stays_open(fd) {
            ready::hand_over(fd);
        }
    }
    if !goes_on {
        conn::await_lone_hold(inherited());
    }
    let descent =
        |conn: &'static Conn| Descent { conn, reason: Reason::Exec, shared: goes_on || visits || conn.is_shared() };
    let mut any = false;
    for conn in inherited() {
        descent(conn).begin();
        any = true;
    }
    if !any {
        return;
    }
    conn::heavy_fence();
    let begin = sys::now();
    for conn in inherited() {
        descent(conn).end(begin);
    }
}

/// A child is made by the C library, which calls no handler.
fn begin_birth() -> (process::Birth, hidden::LimitKept) {
    (process::Birth::begin(), hidden::LimitKept::begin())
}

export! {
    /// `execve`
    fn execve(path: *const c_char, argv: *const *const c_char, envp: *const *const c_char) -> c_int {
        let note = InheritedNote::take(name_of(path));
        see_off(false);
        // SAFETY: the caller's arguments, passed on.
        unsafe { note.run(envp, |envp| real::execve(path, argv, envp), || real::execve(path, argv, envp)) }
    }

    /// `execv`
    fn execv(path: *const c_char, argv: *const *const c_char) -> c_int {
        let note = InheritedNote::take(name_of(path));
        see_off(false);
        // SAFETY: the caller's arguments, passed on, and the environment that this call uses.
        unsafe { note.run(environment(), |envp| real::execve(path, argv, envp), || real::execv(path, argv)) }
    }

    /// `execvp`
    fn execvp(file: *const c_char, argv: *const *const c_char) -> c_int {
        let note = InheritedNote::take(name_of(file));
        see_off(false);
        // SAFETY: the caller's arguments, passed on, and the environment that this call uses.
        unsafe { note.run(environment(), |envp| real::execvpe(file, argv, envp), || real::execvp(file, argv)) }
    }

    /// `execvpe`
    fn execvpe(file: *const c_char, argv: *const *const c_char, envp: *const *const c_char) -> c_int {
        let note = InheritedNote::take(name_of(file));
        see_off(false);
        // SAFETY: the caller's arguments, passed on.
        unsafe { note.run(envp, |envp| real::execvpe(file, argv, envp), || real::execvpe(file, argv, envp)) }
    }

    /// `posix_spawn`, whose child is made inside the C library.
    fn posix_spawn(
        pid: *mut libc::pid_t,
        path: *const c_char,
        actions: *const libc::posix_spawn_file_actions_t,
        attributes: *const libc::posix_spawnattr_t,
        argv: *const *mut c_char,
        envp: *const *mut c_char,
    ) -> c_int {
        let _birth = begin_birth();
        see_off(true);
        // SAFETY: the caller's arguments, passed on.
        unsafe { real::posix_spawn(pid, path, actions, attributes, argv, envp) }
    }

    /// `posix_spawnp`
    fn posix_spawnp(
        pid: *mut libc::pid_t,
        file: *const c_char,
        actions: *const libc::posix_spawn_file_actions_t,
        attributes: *const libc::posix_spawnattr_t,
        argv: *const *mut c_char,
        envp: *const *mut c_char,
    ) -> c_int {
        let _birth = begin_birth();
        see_off(true);
        // SAFETY: the caller's arguments, passed on.
        unsafe { real::posix_spawnp(pid, file, actions, attributes, argv, envp) }
    }

    /// `system`
    fn system(command: *const c_char) -> c_int {
        let (_birth, limit) = begin_birth();
        see_off(true);
        // The command may run for long, and other threads need numbers above the limit meanwhile.
        drop(limit);
        // SAFETY: the caller's argument, passed on.
        unsafe { real::system(command) }
    }

    /// `popen`
    fn popen(command: *const c_char, mode: *const c_char) -> *mut libc::FILE {
        let _birth = begin_birth();
        see_off(true);
        // SAFETY: the caller's arguments, passed on.
        unsafe { real::popen(command, mode) }
    }

    /// `fexecve`
    fn fexecve(fd: c_int, argv: *const *const c_char, envp: *const *const c_char) -> c_int {
        let note = InheritedNote::take(name_of_descriptor(fd));
        see_off(false);
        // SAFETY: the caller's arguments, passed on.
        unsafe { note.run(envp, |envp| real::fexecve(fd, argv, envp), || real::fexecve(fd, argv, envp)) }
    }

    /// `execveat`
    fn execveat(
        folder: c_int,
        path: *const c_char,
        argv: *const *const c_char,
        envp: *const *const c_char,
        flags: c_int,
    ) -> c_int {
        let note = InheritedNote::take(name_at(folder, path));
        see_off(false);
        // By its number: older C libraries have no such function.
        let run = |envp: *const *const c_char| {
            let (path, argv, envp) = (path.addr() as c_ulong, argv.addr() as c_ulong, envp.addr() as c_ulong);
            // SAFETY: the caller's arguments, passed on.
            unsafe { real::syscall(libc::SYS_execveat, folder as c_ulong, path, argv, envp, flags as c_ulong, 0) as c_int }
        };
        // SAFETY: the caller's environment.
        unsafe { note.run(envp, run, || run(envp)) }
    }
}

export! {
    /// `posix_spawn_file_actions_adddup2`: the child of a spawn will use this descriptor past us.
    fn posix_spawn_file_actions_adddup2(
        actions: *mut libc::posix_spawn_file_actions_t,
        fd: c_int,
        to: c_int,
    ) -> c_int {
        if let Some(conn) = Conn::of(fd) {
            let descent = Descent { conn, reason: Reason::Exec, shared: true };
            descent.begin();
            conn::heavy_fence();
            descent.end(sys::now());
        }
        crate::datagram::give_up(fd);
        // SAFETY: the caller's arguments, passed on.
        unsafe { real::posix_spawn_file_actions_adddup2(actions, fd, to) }
    }
}

/// The most arguments that `execl` and its kin take here; the C library has room for more, but no program writes out that many.
const ARGUMENTS: usize = 1024;

/// The variant of the functions with a list of arguments.
const PATH: usize = 0;
const FILE: usize = 1;

/// `execl`, `execlp` and `execle`: their arguments are a list in registers and on the stack, which the assembly below has
/// laid out: five words from `registers` on, then those from `stack` on.
///
/// # Safety
/// As the C library's functions: the list ends with a null pointer.
#[cfg(target_arch = "x86_64")]
unsafe extern "C-unwind" fn exec_list(
    name: *const c_char,
    registers: *const *const c_char,
    stack: *const *const c_char,
    which: usize,
) -> c_int {
    let mut argv = [std::ptr::null(); ARGUMENTS];
    let at = |i: usize| {
        // SAFETY: the caller ends its list with a null pointer, and nothing is read behind that but `execle`'s one word.
        unsafe { if i < 5 { *registers.add(i) } else { *stack.add(i - 5) } }
    };
    let mut n = 0;
    loop {
        let argument = at(n);
        if n == ARGUMENTS {
            sys::set_errno(Errno::TOOBIG);
            return -1;
        }
        argv[n] = argument;
        if argument.is_null() {
            break;
        }
        n += 1;
    }
    // SAFETY: a list that ends with a null pointer, of the caller's own strings.
    unsafe {
        match which {
            PATH => execv(name, argv.as_ptr()),
            FILE => execvp(name, argv.as_ptr()),
            _ => execve(name, argv.as_ptr(), at(n + 1).cast()),
        }
    }
}

/// Variadic functions cannot be written in Rust yet. Each lays its registers out and says where the rest is.
#[cfg(all(target_arch = "x86_64", not(test)))]
macro_rules! list {
    ($($name:ident = $which:literal;)*) => { $(
        /// A function of the C library with a list of arguments.
        ///
        /// # Safety
        /// As the C library's function of this name.
        // SAFETY: the name is the C library's, whose function this stands for.
        #[unsafe(no_mangle)]
        // SAFETY: the body keeps to the C calling convention: it restores the stack pointer, and touches argument registers only.
        #[unsafe(naked)]
        pub(crate) unsafe extern "C" fn $name() {
            std::arch::naked_asm!(
                "sub rsp, 56",
                "mov [rsp], rsi",
                "mov [rsp + 8], rdx",
                "mov [rsp + 16], rcx",
                "mov [rsp + 24], r8",
                "mov [rsp + 32], r9",
                "mov rsi, rsp",
                "lea rdx, [rsp + 64]",
                concat!("mov ecx, ", $which),
                "call {list}",
                "add rsp, 56",
                "ret",
                list = sym exec_list,
            )
        }
    )* };
}

#[cfg(all(target_arch = "x86_64", not(test)))]
list! {
    execl = 0;
    execlp = 1;
    execle = 2;
}
