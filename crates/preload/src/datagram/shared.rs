//! Sockets that several processes hold after a `fork`.
//!
//! Parent and child take datagrams from one queue of the kernel, and only the kernel can share them out. So a socket stays on the kernel
//! while several processes have it, and may have rings again when all others have closed it or have ended. Each process records this in a
//! page that `fork` shares. There is one page for each socket, so a child can write false values about a socket that it holds, but not
//! about later ones.
//!
//! A process that does with such a socket what only the kernel can follow (passes it on, takes it through `exec`, sets an unusual option)
//! marks it as crowded, and it stays on the kernel in all of them, because its holders are then unknown.
#![expect(unsafe_code, reason = "maps a page that children share, and gives it back")]

use super::guarded::SharedMutexGuard;
use super::inbound::DatagramRx;
use super::{DatagramSocket, flags};
use crate::conn::{Holders, UNBORN};
use crate::{process, sys};
use partywall_shm::address::wide;
use rustix::fs::OFlags;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use std::ffi::c_int;
use std::net::SocketAddr;
use std::ptr;
use std::sync::atomic::Ordering;

/// Calls between two looks whether other processes still have a socket.
const EVERY: u32 = 16;
/// Bytes of a mapping.
const PAGE: usize = 4096;
const _: () = assert!(size_of::<Holders>() <= PAGE);

/// A new page, in which `me` alone holds the socket; null if there is none to be had.
fn make(me: u32) -> *mut Holders {
    let (prot, map) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
    // SAFETY: new memory at an address that the kernel chooses.
    let Ok(page) = (unsafe { mmap_anonymous(ptr::null_mut(), PAGE, prot, map) }) else { return ptr::null_mut() };
    let page = page.cast::<Holders>();
    // SAFETY: the page that was just made. Zeros are valid holders, whose words are atomics.
    unsafe { &*page }.own(me);
    page
}

impl DatagramSocket {
    /// The processes that hold it. The page is unmapped only under the lock that the caller holds.
    fn holders<'a>(&self, _held: &'a SharedMutexGuard<'_, DatagramRx>) -> Option<&'a Holders> {
        // SAFETY: null, or a page of `make` that stays mapped while the lock is held.
        unsafe { self.holders.load(Ordering::Relaxed).as_ref() }
    }

    /// This process is about to fork.
    pub(super) fn become_shared(&self) {
        if self.has(flags::KERNEL) {
            return;
        }
        let me = process::kernel_pid();
        // This runs under the lock, so that no other thread finds this process alone at the same time.
        let held = self.rx.hold();
        if held.is_some() && self.holders.load(Ordering::Relaxed).is_null() {
            self.holders.store(make(me), Ordering::Relaxed);
        }
        match held.as_ref().and_then(|held| self.holders(held)) {
            // Numbers of processes mean others in another pid namespace.
            Some(holders) if !process::children_leave_pid_namespace() => {
                holders.add(me | UNBORN);
                self.set(flags::SHARED, true);
                drop(held);
                self.close_rings();
                self.unpublish();
            }
            _ => {
                drop(held);
                self.stay_on_kernel();
            }
        }
    }

    /// This process is the child.
    pub(super) fn enter_holders(&self) {
        if self.has(flags::SHARED)
            && let Some(held) = self.rx.hold()
            && let Some(holders) = self.holders(&held)
        {
            holders.rename(process::forker() | UNBORN, process::kernel_pid());
        }
    }

    /// The last descriptor of this process is about to be closed.
    pub(super) fn leave_holders(&self) {
        if self.holders.load(Ordering::Relaxed).is_null() {
            return;
        }
        // A handler that has interrupted a holder leaves the page mapped.
        if let Some(held) = self.rx.hold()
            && let Some(holders) = self.holders(&held)
        {
            holders.leave(process::kernel_pid());
            let page = self.holders.swap(ptr::null_mut(), Ordering::Relaxed);
            // SAFETY: a page of `make` that no thread can reach any more: that would take the lock.
            let _ = unsafe { munmap(page.cast(), PAGE) };
        }
        self.holders.store(ptr::null_mut(), Ordering::Relaxed);
    }

    /// Every other process that holds it must leave it to the kernel, too.
    pub(super) fn tell_holders(&self) {
        if !self.holders.load(Ordering::Relaxed).is_null()
            && let Some(held) = self.rx.hold()
            && let Some(holders) = self.holders(&held)
        {
            holders.crowd();
        }
    }

    /// A call on a socket that a child has had: from time to time, looks whether this process has it alone by now.
    pub(super) fn look_whether_shared(&self, fd: c_int) {
        if self.shared_calls.fetch_add(1, Ordering::Relaxed).is_multiple_of(EVERY) {
            self.end_sharing(fd);
        }
    }

    #[cold]
    fn end_sharing(&self, fd: c_int) {
        let errno = sys::errno_number();
        // A fork in another thread comes before or after this.
        if let Some(held) = self.rx.hold()
            && !self.has(flags::KERNEL)
            && self.holders(&held).is_some_and(|holders| !holders.has_others(process::kernel_pid()))
        {
            // Others may have changed what belongs to the socket and not to a process.
            let socket = sys::borrow(fd);
            let is_nonblocking = rustix::fs::fcntl_getfl(socket).is_ok_and(|flags| flags.contains(OFlags::NONBLOCK));
            self.set(flags::NONBLOCK, is_nonblocking);
            self.port.store(0, Ordering::Relaxed);
            self.follow_segments(fd);
            self.set(flags::GROUPED, rustix::net::sockopt::socket_reuseport(socket).unwrap_or(true));
            let peer = rustix::net::getpeername(socket).ok().flatten().and_then(|name| SocketAddr::try_from(name).ok());
            if let Some(mut remote) = self.remote.hold() {
                *remote = peer.map_or((0, 0), |peer| (wide(peer.ip()), peer.port()));
                drop(remote);
                self.set(flags::SHARED | flags::UNWANTED, false);
            }
        }
        sys::restore_errno(errno);
    }
}
