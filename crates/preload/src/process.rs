//! The process that this memory belongs to: `fork` copies it, and a child after `vfork` borrows it.
#![expect(unsafe_code, reason = "asks the kernel, and keeps a page that fork empties")]

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous};
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

/// How many forks lie between the first process and this one.
static EPOCH: AtomicU32 = AtomicU32::new(1);
/// The process this memory belongs to; 0 while it is unknown.
static OWNER: AtomicU32 = AtomicU32::new(0);
/// A word that is 1, and 0 in a child that `fork` has made without calling our handlers.
static WITNESS: AtomicPtr<AtomicU32> = AtomicPtr::new(ptr::null_mut());
/// The process that has forked last, as far as this memory knows.
static FORKER: AtomicU32 = AtomicU32::new(0);
/// Children that threads of this process are making, and from `BEGUN` on how many they have begun to make.
static BIRTHS: AtomicU64 = AtomicU64::new(0);
/// One child more that a thread has begun to make, in [`BIRTHS`].
const BEGUN: u64 = 1 << 32;
/// The function to call in such a child, a `fn()`; null before [`begin`].
static IN_STRAY_CHILD: AtomicPtr<()> = AtomicPtr::new(ptr::null_mut());

/// This process, as the kernel says now: it is another one after `vfork`, which calls no handler.
pub(crate) fn kernel_pid() -> u32 {
    // SAFETY: a raw system call without arguments.
    u32::try_from(unsafe { libc::getpid() }).unwrap_or(0)
}

/// Whether the next child of this process is born into another pid namespace, after `unshare(CLONE_NEWPID)` or `setns`. Each of the two
/// then has other numbers for the same processes.
pub(crate) fn children_leave_pid_namespace() -> bool {
    const OWN: &str = "/proc/self/ns/pid";
    const OF_CHILDREN: &str = "/proc/self/ns/pid_for_children";
    let identity = |path| rustix::fs::stat(path).map(|stat| (stat.st_dev, stat.st_ino));
    match (identity(OWN), identity(OF_CHILDREN)) {
        (Ok(own), Ok(of_children)) => own != of_children,
        // A namespace that has no process yet cannot be looked at, though its name is there.
        (Ok(_), Err(Errno::NOENT)) => rustix::fs::lstat(OF_CHILDREN).is_ok(),
        // Without `/proc` this cannot be found out.
        _ => false,
    }
}

/// The number of forks, for memory that is valid in one process only.
#[inline]
pub(crate) fn fork_epoch() -> u32 {
    EPOCH.load(Ordering::Relaxed)
}

/// Whether the calling thread is the only one of this process. Other threads come only from this one, so the answer holds for as long as it
/// makes none. `false` also where `/proc` does not say.
pub(crate) fn has_one_thread() -> bool {
    // The folder has two links, and one more for each thread.
    rustix::fs::stat("/proc/self/task").is_ok_and(|folder| folder.st_nlink == 3)
}

/// Before `main`. `in_stray_child` runs in a child that a bare system call has made, when it first asks what it is.
pub(crate) fn begin(in_stray_child: fn()) {
    IN_STRAY_CHILD.store(in_stray_child as *mut (), Ordering::Relaxed);
    OWNER.store(kernel_pid(), Ordering::Relaxed);
    make_witness();
}

/// This process is about to fork.
pub(crate) fn before_fork() {
    begin_birth();
    FORKER.store(kernel_pid(), Ordering::Relaxed);
}

/// This process has forked.
pub(crate) fn after_fork_in_parent() {
    end_birth();
}

fn begin_birth() {
    BIRTHS.fetch_add(BEGUN + 1, Ordering::SeqCst);
}

fn end_birth() {
    BIRTHS.fetch_sub(1, Ordering::SeqCst);
}

/// How many children this process has begun to make; `None` while it makes one.
///
/// Two equal answers say that no child was made between them. To be asked before a descriptor leaves the table, and once more when the kernel
/// has closed it: a child that was made between has the descriptor, and nothing in the table told its maker so.
pub(crate) fn births() -> Option<u64> {
    let births = BIRTHS.load(Ordering::SeqCst);
    births.is_multiple_of(BEGUN).then_some(births)
}

/// A child that the C library makes without calling the handlers of `fork`.
#[derive(Debug)]
pub(crate) struct Birth;

impl Birth {
    /// To be called before the table is searched for what the child gets.
    pub(crate) fn begin() -> Self {
        begin_birth();
        Self
    }
}

impl Drop for Birth {
    fn drop(&mut self) {
        end_birth();
    }
}

/// In a child of `fork`, from its handlers on: the process that has made it. `getppid` names another one if that has ended.
pub(crate) fn forker() -> u32 {
    FORKER.load(Ordering::Relaxed)
}

/// This process is a child, with memory that is its own from here on.
pub(crate) fn became_child() {
    EPOCH.fetch_add(1, Ordering::Relaxed);
    // Children that the parent was making are not made here.
    BIRTHS.store(0, Ordering::SeqCst);
    OWNER.store(kernel_pid(), Ordering::Relaxed);
    if let Some(word) = witness() {
        word.store(1, Ordering::Relaxed);
    }
}

/// Whether the caller runs in memory of another process: a child after `vfork`, that will `exec` or end. It may use what it
/// finds and must not write what says which descriptors are ours.
pub(crate) fn is_visitor() -> bool {
    let me = kernel_pid();
    match OWNER.compare_exchange(0, me, Ordering::Relaxed, Ordering::Relaxed) {
        Ok(_) => false,
        Err(owner) if owner == me => false,
        // Memory that `fork` empties is empty, and no handler has run: a child by a raw system call.
        Err(_) if witness().is_some_and(|w| w.load(Ordering::Relaxed) == 0) => {
            became_child();
            in_stray_child();
            false
        }
        Err(_) => true,
    }
}

/// The process this memory belongs to, without asking the kernel: in a child after `vfork`, its parent.
pub(crate) fn owner() -> u32 {
    let known = OWNER.load(Ordering::Relaxed);
    if known != 0 && witness().is_some_and(|word| word.load(Ordering::Relaxed) != 0) {
        return known;
    }
    // Before our constructor, or in a child whose handlers were not called.
    if is_visitor() { kernel_pid() } else { OWNER.load(Ordering::Relaxed) }
}

fn in_stray_child() {
    let handler = IN_STRAY_CHILD.load(Ordering::Relaxed);
    if !handler.is_null() {
        // SAFETY: only `begin` stores here, and stores a `fn()`; a function's address and a data pointer have the same size.
        let handler = unsafe { std::mem::transmute::<*mut (), fn()>(handler) };
        handler();
    }
}

fn witness() -> Option<&'static AtomicU32> {
    // SAFETY: null, or a page that is never unmapped.
    unsafe { WITNESS.load(Ordering::Relaxed).as_ref() }
}

fn make_witness() {
    let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
    // SAFETY: a new page at an address that the kernel chooses.
    let Ok(page) = (unsafe { mmap_anonymous(ptr::null_mut(), 4096, prot, flags) }) else { return };
    // SAFETY: the page that was just made; in a child it will read as zeros.
    if unsafe { madvise(page, 4096, Advice::LinuxWipeOnFork) }.is_ok() {
        WITNESS.store(page.cast(), Ordering::Relaxed);
        if let Some(word) = witness() {
            word.store(1, Ordering::Relaxed);
        }
    }
}
