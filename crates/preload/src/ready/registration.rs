//! The registrations of connections in epoll sets: one per connection, descriptor and set.
//!
//! ```text
//!   Plain   the kernel's set has the program's own events and number, and tells the program itself
//!   Ring    the connection is up: the kernel has {socket: all, edge} and {link: in, edge} under our tag, and what the
//!           program gets is made from the connection's own state
//! ```
//!
//! A registration belongs to its set, whose lock guards it. The registrations of a connection are chained through
//! `same_conn`; that chain and the free list have a separate lock, which is taken last. Those of a socket that is no connection yet
//! ([`super::early`]) have a chain for each descriptor.

use super::local_readiness::local;
use super::mask::{ET, OUT};
use super::tag;
use super::word::AtomicWord;
use crate::conn::{Armed, Conn};
use crate::lock::{Lock, Taken};
use crate::table::DESCRIPTORS;
use std::ffi::c_int;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};

/// How many there can be. A connection for which no place is left stays on TCP.
const REGISTRATIONS: usize = 1 << 17;
const _: () = assert!(REGISTRATIONS <= tag::NUMBERS);

/// The kernel has it under our tag.
pub(super) const RING: u32 = 1;
/// It is in the list of those that are looked at.
pub(super) const HOT: u32 = 2;
/// One shot, and that was fired.
pub(super) const SPENT: u32 = 4;
/// The program has taken it out; the kernel still has it, in case the program puts it in again.
pub(super) const GONE: u32 = 8;
/// Every ready event is news, as after a change.
pub(super) const FRESH: u32 = 16;
/// The link is registered.
pub(super) const LINKED: u32 = 32;
/// The kernel tells of room to write, too.
pub(super) const HEARS_ROOM: u32 = 64;

/// The links of one list ([`super::list`]) in a registration.
#[derive(Debug)]
pub(super) struct Links {
    pub(super) next: AtomicU32,
    pub(super) prev: AtomicU32,
}

impl Links {
    const fn new() -> Self {
        Self { next: AtomicU32::new(0), prev: AtomicU32::new(0) }
    }
}

/// One registration. All zeros when new, so that untouched ones are neither in the file nor in memory.
#[derive(Debug)]
pub(super) struct SetRegistration {
    /// Number of the set plus 1; 0 if free. Changes under the lock of that set.
    pub(super) set: AtomicU32,
    same_conn: AtomicU32,
    /// Index of the connection plus 1; 0 if there is none yet.
    conn: AtomicU32,
    pub(super) fd: AtomicI32,
    pub(super) state: AtomicU32,
    /// The events and flags that the program asked for.
    pub(super) events: AtomicU32,
    pub(super) data: AtomicU64,
    /// The marks when the program was last told.
    pub(super) rx_told: AtomicU64,
    pub(super) tx_told: AtomicU64,
    /// The events that the kernel may have ready, as far as is known.
    pub(super) kernel: AtomicU32,
    /// The events that have come from the kernel and were not reported yet.
    pub(super) edge: AtomicU32,
    /// The set's count of answers when this was last part of one.
    pub(super) active: AtomicU32,
    /// The ends that the peer's process had told of when the kernel was last asked for them ([`crate::conn::RingLook::ends`]).
    pub(super) ends: AtomicU32,
    /// The state in which it was armed last ([`Armed`]).
    armed: [AtomicU64; 2],
    pub(super) links: [Links; 2],
}

impl SetRegistration {
    const fn new() -> Self {
        Self {
            set: AtomicU32::new(0),
            same_conn: AtomicU32::new(0),
            conn: AtomicU32::new(0),
            fd: AtomicI32::new(0),
            state: AtomicU32::new(0),
            events: AtomicU32::new(0),
            data: AtomicU64::new(0),
            rx_told: AtomicU64::new(0),
            tx_told: AtomicU64::new(0),
            kernel: AtomicU32::new(0),
            edge: AtomicU32::new(0),
            active: AtomicU32::new(0),
            ends: AtomicU32::new(0),
            armed: [const { AtomicU64::new(0) }; 2],
            links: [const { Links::new() }; 2],
        }
    }

    /// The connection that it belongs to.
    #[inline]
    pub(super) fn conn(&self) -> Option<&'static Conn> {
        Conn::at(u16::try_from(self.conn.get().checked_sub(1)?).ok()?)
    }

    /// It was armed. A fence and a look follow.
    pub(super) fn note_armed(&self, conn: &Conn, armed: Armed) {
        let events = self.events.get();
        self.put_armed(if events & ET == 0 { armed } else { armed.by_edges(conn, events & OUT != 0) });
    }

    fn put_armed(&self, armed: Armed) {
        for (word, value) in self.armed.iter().zip(armed.to_words()) {
            word.put(value);
        }
    }

    /// The state in which it was armed last.
    pub(super) fn armed(&self) -> Armed {
        Armed::from_words([self.armed[0].get(), self.armed[1].get()])
    }

    pub(super) fn is(&self, bits: u32) -> bool {
        self.state.get() & bits != 0
    }

    pub(super) fn raise(&self, bits: u32) {
        self.state.put(self.state.get() | bits);
    }

    pub(super) fn lower(&self, bits: u32) {
        self.state.put(self.state.get() & !bits);
    }
}

static POOL: [SetRegistration; REGISTRATIONS] = [const { SetRegistration::new() }; REGISTRATIONS];
static LOCK: Lock = Lock::new();
/// The first free one, of those that were used before.
static FREE: AtomicU32 = AtomicU32::new(0);
/// The first that was never used. 0 stands for none.
static UNUSED: AtomicU32 = AtomicU32::new(1);
/// The first registration of each descriptor that is no connection yet; 0 if there is none. Untouched pages of it cost nothing.
static EARLY: [AtomicU32; DESCRIPTORS] = [const { AtomicU32::new(0) }; DESCRIPTORS];

/// The registration with this number, which an event may have named: any value is taken.
#[inline]
pub(super) fn get(number: u32) -> &'static SetRegistration {
    &POOL[number as usize % REGISTRATIONS]
}

/// The lock of chains and free list, which is held for some instructions only.
#[derive(Debug)]
struct Chains;

impl Chains {
    /// `None` in a signal handler that has interrupted a holder.
    fn lock() -> Option<Self> {
        (LOCK.lock() != Taken::Recursive).then(|| Self)
    }
}

impl Drop for Chains {
    fn drop(&mut self) {
        LOCK.unlock();
    }
}

/// For as long as this lives no connection is registered anywhere.
#[derive(Debug)]
pub(super) struct Alone {
    _chains: Chains,
}

impl Alone {
    /// `None` in a signal handler that has interrupted a holder.
    pub(super) fn begin() -> Option<Self> {
        Chains::lock().map(|chains| Self { _chains: chains })
    }

    /// Whether this registration is the only way by which any thread of this or another process can wait for the connection.
    pub(super) fn has(&self, conn: &Conn, number: u32) -> bool {
        head(conn).get() == number && get(number).same_conn.get() == 0 && !local(conn).is_hidden() && !conn.is_shared()
    }
}

/// A thread within [`Alone`] has left it, or sees what the caller has done before.
pub(super) fn settle() {
    drop(Chains::lock());
}

/// Whether this thread holds the lock of chains, in a call that a signal handler has interrupted.
pub(super) fn are_held_by_this_thread() -> bool {
    LOCK.is_own()
}

/// Lets no other thread be in the middle of something when a child gets its copy.
pub(super) fn before_fork() {
    LOCK.freeze();
}

/// In the parent.
pub(super) fn forked() {
    LOCK.thaw();
}

/// In the child, whose other threads are no more.
pub(super) fn after_fork() {
    LOCK.thaw_in_child();
}

fn head(conn: &Conn) -> &'static AtomicU32 {
    &local(conn).first
}

/// The registration of a connection under this descriptor in this set, whose lock the caller holds; 0 if there is none.
#[inline]
pub(super) fn find(conn: &Conn, fd: c_int, set: u32) -> u32 {
    // EDGE registration: acquires from `allocate` and `take_over`.
    let first = head(conn).load(Ordering::Acquire);
    if first == 0 {
        return 0;
    }
    // Nearly every connection is registered once. A registration of our set cannot leave it while we hold its lock.
    let r = get(first);
    if r.set.get() == set + 1 && r.fd.get() == fd && r.conn.get() == u32::from(conn.index()) + 1 {
        return first;
    }
    let Some(_chains) = Chains::lock() else { return 0 };
    chain(conn).find(|&n| get(n).set.get() == set + 1 && get(n).fd.get() == fd).unwrap_or(0)
}

/// The caller holds the lock of chains.
fn chain(conn: &Conn) -> impl Iterator<Item = u32> {
    chain_from(head(conn))
}

fn chain_from(head: &AtomicU32) -> impl Iterator<Item = u32> + use<> {
    let mut next = head.get();
    std::iter::from_fn(move || {
        let this = next;
        next = get(this).same_conn.get();
        (this != 0).then_some(this)
    })
}

/// Visits the registrations of a connection in this set, whose lock the caller holds. One of them is `number`.
pub(super) fn each_in(conn: &Conn, number: u32, set: u32, mut visit: impl FnMut(u32)) {
    // Nearly every connection is registered once. A registration of this set stays behind its predecessor while its lock is held.
    // EDGE registration: as in `find`.
    let is_only = head(conn).load(Ordering::Acquire) == number && get(number).same_conn.get() == 0;
    let chains = if is_only { None } else { Chains::lock() };
    if chains.is_none() {
        return visit(number);
    }
    chain(conn).filter(|&n| get(n).set.get() == set + 1).for_each(visit);
}

/// The first registration of a connection that meets a condition, and its set. Both may have changed once the caller has
/// the lock of that set.
pub(super) fn search(conn: &Conn, wanted: impl Fn(&SetRegistration) -> bool) -> Option<(u32, u32)> {
    // EDGE registration: as in `find`.
    if head(conn).load(Ordering::Acquire) == 0 {
        return None;
    }
    let _chains = Chains::lock()?;
    chain(conn).find(|&n| wanted(get(n))).and_then(|n| Some((n, get(n).set.get().checked_sub(1)?)))
}

/// Takes a free one for a connection, of a set whose lock the caller holds. `None` if there is none.
pub(super) fn allocate(conn: &Conn, fd: c_int, set: u32) -> Option<u32> {
    let _chains = Chains::lock()?;
    let number = take_free(fd)?;
    let r = get(number);
    r.conn.put(u32::from(conn.index()) + 1);
    r.same_conn.put(head(conn).get());
    r.set.put(set + 1);
    // EDGE registration: releases what the registration says; acquired in `find`.
    head(conn).store(number, Ordering::Release);
    Some(number)
}

/// Takes a free one for a descriptor. The caller holds the lock of chains.
fn take_free(fd: c_int) -> Option<u32> {
    let number = match FREE.get() {
        0 => {
            let number = UNUSED.get();
            if number as usize >= REGISTRATIONS {
                return None;
            }
            UNUSED.put(number + 1);
            number
        }
        number => {
            FREE.put(get(number).same_conn.get());
            number
        }
    };
    let r = get(number);
    r.fd.put(fd);
    r.state.put(0);
    r.kernel.put(0);
    r.edge.put(0);
    r.put_armed(Armed::NOTHING);
    Some(number)
}

fn early_head(fd: c_int) -> Option<&'static AtomicU32> {
    EARLY.get(fd as usize)
}

/// Whether sets have a descriptor that is no connection yet.
#[inline]
pub(super) fn has_early(fd: c_int) -> bool {
    // EDGE early-registration: acquires from `allocate_early`.
    early_head(fd).is_some_and(|head| head.load(Ordering::Acquire) != 0)
}

/// The early registration of a descriptor in this set, whose lock the caller holds; 0 if there is none.
pub(super) fn find_early(fd: c_int, set: u32) -> u32 {
    // EDGE early-registration: as in `has_early`.
    let Some(head) = early_head(fd).filter(|head| head.load(Ordering::Acquire) != 0) else { return 0 };
    let Some(_chains) = Chains::lock() else { return 0 };
    chain_from(head).find(|&n| get(n).set.get() == set + 1).unwrap_or(0)
}

/// The first early registration of a descriptor, and its set. Both may have changed once the caller has the lock of that set.
pub(super) fn first_early(fd: c_int) -> Option<(u32, u32)> {
    let head = early_head(fd)?;
    let _chains = Chains::lock()?;
    let number = head.get();
    (number != 0).then(|| get(number).set.get().checked_sub(1).map(|set| (number, set)))?
}

/// Whether it is an early registration of this descriptor in this set, whose lock the caller holds.
pub(super) fn is_early(number: u32, fd: c_int, set: u32) -> bool {
    let r = get(number);
    r.set.get() == set + 1 && r.conn.get() == 0 && r.fd.get() == fd
}

/// As [`allocate`], for a descriptor that is no connection yet.
pub(super) fn allocate_early(fd: c_int, set: u32) -> Option<u32> {
    let head = early_head(fd)?;
    let _chains = Chains::lock()?;
    let number = take_free(fd)?;
    let r = get(number);
    r.conn.put(0);
    r.same_conn.put(head.get());
    r.set.put(set + 1);
    // EDGE early-registration: releases what the registration says; acquired in `has_early`.
    head.store(number, Ordering::Release);
    Some(number)
}

/// Turns an early registration of this set, whose lock the caller holds, into that of a connection. Returns `false` if it was removed.
pub(super) fn take_over(number: u32, fd: c_int, set: u32, conn: &Conn) -> bool {
    let Some(early) = early_head(fd) else { return false };
    let Some(_chains) = Chains::lock() else { return false };
    if !is_early(number, fd, set) {
        return false;
    }
    unchain(early, number);
    let r = get(number);
    r.conn.put(u32::from(conn.index()) + 1);
    r.same_conn.put(head(conn).get());
    // EDGE registration: releases what the registration says; acquired in `find`.
    head(conn).store(number, Ordering::Release);
    true
}

/// Turns a registration of a connection in a set, whose lock the caller holds, into one of another connection. `false` in a signal handler
/// that has interrupted a holder of the chains.
pub(super) fn move_to(number: u32, old: &Conn, new: &Conn) -> bool {
    let Some(_chains) = Chains::lock() else { return false };
    unchain(head(old), number);
    let r = get(number);
    r.conn.put(u32::from(new.index()) + 1);
    r.same_conn.put(head(new).get());
    r.put_armed(Armed::NOTHING);
    // EDGE registration: releases what the registration says; acquired in `find`.
    head(new).store(number, Ordering::Release);
    true
}

/// Takes a registration out of a chain, if it is in it. The caller holds the lock of chains.
fn unchain(head: &AtomicU32, number: u32) {
    let mut from = head;
    while from.get() != 0 && from.get() != number {
        from = &get(from.get()).same_conn;
    }
    if from.get() == number {
        from.put(get(number).same_conn.get());
    }
}

/// Gives one back, of a set whose lock the caller holds and from whose lists it has taken it.
pub(super) fn free(number: u32) {
    let r = get(number);
    let Some(_chains) = Chains::lock() else {
        // In a handler that has interrupted a holder: it is lost, and of no set any more.
        r.set.put(0);
        return;
    };
    let head = match r.conn() {
        Some(conn) => Some(head(conn)),
        None => early_head(r.fd.get()),
    };
    if let Some(head) = head {
        unchain(head, number);
    }
    r.set.put(0);
    r.conn.put(0);
    r.same_conn.put(FREE.get());
    FREE.put(number);
}
