//! UDP sockets: datagrams to neighbours go by rings while the receiver is awake, and by the kernel otherwise (protocol U).
//!
//! ```text
//!   sender                                        receiver
//!   outbound: by destination          flow        inbound: by source
//!      | receiver WATCHING ------> ring -----------> | rings first
//!      | else -------------------> kernel ---------> | then the kernel's queue
//! ```
//!
//! There are no bells here. A receiver closes its rings before it sleeps, and later datagrams come by the kernel, which wakes any kind of
//! sleep at its usual cost. So readiness, signals and timeouts of sleepers are the kernel's own, and a socket with unusual options just
//! keeps its rings closed.
//!
//! The modules use one another downwards: `wait` and `shared` are above the two sides, `inbound` and `outbound`. Below those are `flow`,
//! `kernel_queue`, `arrivals`, `asks`, `closed_ring`, `sleepers`, `address` and `guarded`. What a program does to a socket as a whole is in
//! `descriptors`, `changes` and `processes`, and when the broker gets to know of it in `publication`.
//!
//! None of this is shared with children: a socket stays on the kernel for as long as several processes hold it ([`shared`]).

mod address;
mod arrivals;
mod asks;
mod changes;
mod closed_ring;
mod descriptors;
mod flow;
mod guarded;
mod inbound;
mod kernel_queue;
mod options;
mod outbound;
mod processes;
mod publication;
mod retry;
mod segments;
mod shared;
mod sleepers;
#[cfg(test)]
mod tests;
mod wait;

pub(crate) use address::Wanted;
pub(crate) use changes::{blocking_was_set, connected, give_up, option_was_set, past_rings};
pub(crate) use descriptors::{copied, dropped, made};
pub(crate) use processes::{before_exec, before_fork, forked};
pub(crate) use wait::{Poller, by_kernel_alone, concerns, entered_set, join_group};

use crate::awake::AwakeBudget;
use crate::buffers::CallerBuffers;
use crate::conn::Holders;
use crate::sockaddr::ProgramAddress;
use crate::table::{self, DescriptorKind, Entry};
use crate::{broker, sys};
use guarded::SharedMutex;
use inbound::DatagramRx;
use libc::{c_int, socklen_t, ssize_t};
use outbound::DatagramTx;
use rustix::io::Errno;
use sleepers::Sleepers;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, AtomicU64, Ordering};

/// Sockets that are looked after at once. Further ones stay on the kernel.
const SOCKETS: usize = 1024;

mod flags {
    /// `O_NONBLOCK` is set.
    pub(super) const NONBLOCK: u32 = 1;
    /// It is an IPv6 socket.
    pub(super) const SIX: u32 = 2;
    /// No rings any more: something was done with it that only the kernel can do.
    pub(super) const KERNEL: u32 = 4;
    /// The broker was told that it receives.
    pub(super) const PUBLISHED: u32 = 8;
    /// The broker does not want to hear of it.
    pub(super) const UNWANTED: u32 = 16;
    /// It has lived through a `fork`: no rings for as long as another process may have it.
    pub(super) const SHARED: u32 = 64;
    /// It has `SO_REUSEPORT`: others of its user may have its address too.
    pub(super) const GROUPED: u32 = 128;
    /// As a member of a group it was published, or refused, before anything had come.
    pub(super) const JOINED: u32 = 256;
    /// It has `UDP_GRO`: datagrams of one sender may be joined.
    pub(super) const JOINS: u32 = 512;
    /// Senders on other machines have rings to it, so datagrams that come by the kernel are counted.
    pub(super) const ARRIVALS: u32 = 1024;
    /// It may have a ring to send by. Checked first, so that a receiving call does not take the lock of the sending side.
    pub(super) const RING_OUT: u32 = 32;
}

/// One socket. All zeros when new.
#[derive(Debug)]
pub(crate) struct DatagramSocket {
    used: AtomicU32,
    generation: AtomicU32,
    descriptors: AtomicU32,
    fd: AtomicI32,
    flags: AtomicU32,
    /// Its port; 0 while it is unknown.
    port: AtomicU32,
    /// Where it is connected to.
    remote: SharedMutex<(u128, u16)>,
    /// What `UDP_SEGMENT` is set to.
    segment: AtomicU32,
    /// Datagrams that have come by the kernel, and their bytes.
    came: AtomicU64,
    bytes: AtomicU64,
    /// The key to withdraw the publication by.
    published: AtomicU64,
    /// Before this moment it is not published, in milliseconds of [`sys::coarse_millis`]: the last attempt ended with [`Unpublished::NotNow`].
    publish_from: AtomicU64,
    /// How often its rings were closed, or the socket itself. A request to the broker that began before does not count any more.
    closings: AtomicU32,
    policy_seen: AtomicU32,
    /// How many rings it receives by: to be seen without the lock.
    inbound: AtomicU32,
    /// The page in which its processes say that they hold it ([`shared`]); null if no child has had it.
    holders: AtomicPtr<Holders>,
    /// Calls while it was shared.
    shared_calls: AtomicU32,
    /// The `errno` that the next receiving call fails with; 0: none.
    error: AtomicI32,
    /// Threads that sleep in the kernel on it, or may.
    sleepers: Sleepers,
    /// When a call that found nothing last looked after the rings that it sends by, in milliseconds of [`sys::coarse_millis`].
    looked_after: AtomicU64,
    budget: AwakeBudget,
    rx: SharedMutex<DatagramRx>,
    tx: SharedMutex<DatagramTx>,
}

static TABLE: [DatagramSocket; SOCKETS] = [const { DatagramSocket::new() }; SOCKETS];
static USED: AtomicU32 = AtomicU32::new(0);

impl DatagramSocket {
    const fn new() -> Self {
        Self {
            used: AtomicU32::new(0),
            generation: AtomicU32::new(0),
            descriptors: AtomicU32::new(0),
            fd: AtomicI32::new(0),
            flags: AtomicU32::new(0),
            port: AtomicU32::new(0),
            remote: SharedMutex::new((0, 0)),
            segment: AtomicU32::new(0),
            came: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            published: AtomicU64::new(0),
            publish_from: AtomicU64::new(0),
            closings: AtomicU32::new(0),
            policy_seen: AtomicU32::new(0),
            inbound: AtomicU32::new(0),
            holders: AtomicPtr::new(std::ptr::null_mut()),
            shared_calls: AtomicU32::new(0),
            error: AtomicI32::new(0),
            sleepers: Sleepers::new(),
            looked_after: AtomicU64::new(0),
            budget: AwakeBudget::new(),
            rx: SharedMutex::new(DatagramRx::new()),
            tx: SharedMutex::new(DatagramTx::new()),
        }
    }

    /// The socket of a descriptor, if it is one that we look after.
    #[inline]
    fn of(fd: c_int) -> Option<&'static Self> {
        let entry = table::get(fd);
        if entry == Entry::NONE || entry.kind() != DescriptorKind::Datagram {
            return None;
        }
        TABLE.get(usize::from(entry.index()))
    }

    /// The socket of an entry, unless it was closed.
    fn from_entry(bits: u32) -> Option<&'static Self> {
        let socket = TABLE.get((bits & 0xffff) as usize)?;
        // EDGE socket-place: acquires from `made`.
        (socket.used.load(Ordering::Acquire) != 0 && socket.entry().bits() == bits).then_some(socket)
    }

    fn entry(&self) -> Entry {
        let index = (std::ptr::from_ref(self).addr() - TABLE.as_ptr().addr()) / size_of::<Self>();
        Entry::new(DescriptorKind::Datagram, self.generation(), index as u16)
    }

    /// How many sockets have had this place before.
    #[inline]
    fn generation(&self) -> u32 {
        self.generation.load(Ordering::Relaxed)
    }

    #[inline]
    fn has(&self, flag: u32) -> bool {
        self.flags.load(Ordering::Relaxed) & flag != 0
    }

    fn set(&self, flag: u32, on: bool) {
        if on {
            self.flags.fetch_or(flag, Ordering::Relaxed);
        } else {
            self.flags.fetch_and(!flag, Ordering::Relaxed);
        }
    }

    fn may_have_rings(&self) -> bool {
        !self.has(flags::KERNEL | flags::SHARED)
    }

    fn port(&self, fd: c_int) -> u16 {
        let known = self.port.load(Ordering::Relaxed);
        if known != 0 {
            return known as u16;
        }
        let name = rustix::net::getsockname(sys::borrow(fd)).ok().and_then(|name| SocketAddr::try_from(name).ok());
        let port = name.map_or(0, |name| name.port());
        self.port.store(port.into(), Ordering::Relaxed);
        port
    }

    fn remote(&self) -> Option<SocketAddr> {
        let (ip, port) = *self.remote.hold()?;
        (port != 0).then(|| SocketAddr::new(partywall_shm::address::narrow(ip), port))
    }

    fn ring_size(&self, peer: SocketAddr) -> u64 {
        broker::policy(peer.port(), peer.ip()).ring_size
    }

    /// How often its rings were closed so far.
    fn closings(&self) -> u32 {
        self.closings.load(Ordering::Relaxed)
    }

    /// Reads how its datagrams are to be split and joined.
    fn follow_segments(&self, fd: c_int) {
        let read = |name| {
            let mut value: c_int = 0;
            if sys::read_option(fd, libc::SOL_UDP, name, &mut value) { value } else { 0 }
        };
        let errno = sys::errno_number();
        // The kernel takes numbers of 16 bits.
        self.segment.store(read(libc::UDP_SEGMENT) as u32, Ordering::Relaxed);
        self.set(flags::JOINS, read(libc::UDP_GRO) != 0);
        sys::restore_errno(errno);
    }

    /// Ends all rings, except that datagrams in the inbound rings are read first.
    fn close_rings(&self) {
        self.closings.fetch_add(1, Ordering::Relaxed);
        if let Some(mut rx) = self.rx.hold() {
            rx.close();
        }
        if let Some(mut tx) = self.tx.hold() {
            tx.give_up();
        }
    }

    fn stay_on_kernel(&self) {
        if !self.has(flags::KERNEL) {
            self.set(flags::KERNEL, true);
            self.tell_holders();
            self.close_rings();
            self.unpublish();
        }
    }

    /// The last descriptor is about to be closed.
    fn end(&self) {
        self.closings.fetch_add(1, Ordering::Relaxed);
        self.unpublish();
        self.leave_holders();
        if let Some(mut rx) = self.rx.hold() {
            rx.remove_all();
        }
        if let Some(mut tx) = self.tx.hold() {
            tx.give_up();
            tx.forget();
        }
        self.inbound.store(0, Ordering::Relaxed);
        // EDGE socket-place: releases the place to `made`.
        self.used.store(0, Ordering::Release);
    }

    fn keep_error(&self, error: Errno) {
        self.error.store(error.raw_os_error(), Ordering::Relaxed);
    }

    fn take_error(&self) -> Option<Errno> {
        let is_kept = self.error.load(Ordering::Relaxed) != 0;
        let error = if is_kept { self.error.swap(0, Ordering::Relaxed) } else { 0 };
        (error != 0).then(|| Errno::from_raw_os_error(error))
    }

    /// Whether something lies in a ring.
    fn is_waiting(&self) -> bool {
        // EDGE inbound: as in `DatagramSocket::concerns_waits`.
        self.inbound.load(Ordering::Acquire) != 0 && self.rx.hold().is_some_and(|mut rx| rx.is_waiting())
    }
}

/// Whether it is a socket that is looked after.
#[inline]
pub(crate) fn is(fd: c_int) -> bool {
    DatagramSocket::of(fd).is_some()
}

/// A receiving call; strangers go to the kernel at once. `kernel` is the call as the program made it.
#[inline]
pub(crate) fn receiving(
    fd: c_int,
    buffers: CallerBuffers<'_>,
    message: c_int,
    wanted: Wanted,
    kernel: impl Fn() -> ssize_t,
) -> ssize_t {
    match DatagramSocket::of(fd) {
        None => kernel(),
        Some(_) if wanted.lacks_length() => crate::errno::fail(rustix::io::Errno::FAULT),
        Some(socket) => socket.receive(fd, buffers, message, wanted, kernel),
    }
}

/// What a sending call asks for in its control data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SendControl {
    /// There are none.
    None,
    /// To be split into datagrams of this length (`UDP_SEGMENT`); 0: not to be split, though the socket may have that option.
    Segments(u16),
    /// Anything else.
    Other,
}

/// How the datagrams of a call may go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DatagramCarrier {
    /// By a ring, in datagrams of this length if that is not 0.
    Any(u16),
    /// By the kernel alone.
    Kernel,
}

/// A sending call.
#[inline]
pub(crate) fn sending(
    fd: c_int,
    buffers: CallerBuffers<'_>,
    message: c_int,
    to: ProgramAddress,
    control: SendControl,
    kernel: impl FnOnce() -> ssize_t,
) -> ssize_t {
    let Some(socket) = DatagramSocket::of(fd) else { return kernel() };
    let usual = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL | libc::MSG_CONFIRM;
    if socket.has(flags::SHARED) {
        socket.look_whether_shared(fd);
    }
    if message & libc::MSG_MORE != 0 {
        // The kernel keeps these bytes, and adds those of the next call.
        socket.stay_on_kernel();
    }
    if !socket.may_have_rings() {
        return kernel();
    }
    let carrier = match control {
        SendControl::None if message & !usual == 0 => {
            DatagramCarrier::Any(socket.segment.load(Ordering::Relaxed) as u16)
        }
        SendControl::Segments(size) if message & !usual == 0 => DatagramCarrier::Any(size),
        _ => DatagramCarrier::Kernel,
    };
    socket.follow_policy(fd);
    let to = if to.is_none() { socket.remote() } else { to.read_unscoped() };
    match to.filter(|to| to.port() != 0 && !to.ip().is_unspecified() && !to.ip().is_multicast()) {
        Some(to) => socket.send_to(fd, to, carrier, buffers, kernel),
        None => kernel(),
    }
}

/// Whether calls with many messages are to be taken apart: some may go, or come, by rings.
pub(crate) fn has_rings(fd: c_int) -> bool {
    // EDGE inbound: as in `DatagramSocket::concerns_waits`.
    DatagramSocket::of(fd).is_some_and(|socket| socket.inbound.load(Ordering::Acquire) != 0 || socket.has_ring_out())
}

/// One call has given the kernel `count` datagrams.
pub(crate) fn sent_many(fd: c_int, to: ProgramAddress, count: c_int) {
    if let Some(socket) = DatagramSocket::of(fd)
        && socket.may_have_rings()
        && let Ok(count @ 1..) = u32::try_from(count)
        && let Some(to) = if to.is_none() { socket.remote() } else { to.read_unscoped() }
    {
        socket.sent_many(fd, to, count);
    }
}

/// One call has received `count` datagrams from the kernel.
pub(crate) fn received_many(fd: c_int, from: Wanted, room: socklen_t, count: c_int) {
    if let Some(socket) = DatagramSocket::of(fd) {
        if socket.has(flags::SHARED) {
            socket.look_whether_shared(fd);
        }
        for _ in 0..count {
            socket.came_by_kernel(fd, 0, || from.given(room).or_else(|| socket.remote()));
        }
    }
}

/// Bytes of the next datagram if that lies in a ring, for `FIONREAD`.
pub(crate) fn next_len(fd: c_int) -> Option<c_int> {
    // EDGE inbound: as in `DatagramSocket::concerns_waits`.
    let socket = DatagramSocket::of(fd).filter(|socket| socket.inbound.load(Ordering::Acquire) != 0)?;
    let errno = sys::errno_number();
    let len = socket.next_len(fd).map(u32::cast_signed);
    sys::restore_errno(errno);
    len
}

/// An error has come to a call that had a result already. The next receiving call fails with it, as with one that the kernel keeps.
pub(crate) fn keep_error(fd: c_int, error: Errno) {
    if let Some(socket) = DatagramSocket::of(fd)
        && error != Errno::AGAIN
    {
        socket.keep_error(error);
    }
}

/// The error that was kept for the next receiving call.
pub(crate) fn take_error(fd: c_int) -> Option<Errno> {
    DatagramSocket::of(fd)?.take_error()
}

fn all() -> impl Iterator<Item = &'static DatagramSocket> {
    // EDGE socket-place: acquires from `made`.
    all_ever().filter(|socket| socket.used.load(Ordering::Acquire) != 0)
}

/// Those that are in use or have been.
fn all_ever() -> impl Iterator<Item = &'static DatagramSocket> {
    // EDGE sockets: acquires from `made`.
    TABLE[..(USED.load(Ordering::Acquire) as usize).min(SOCKETS)].iter()
}
