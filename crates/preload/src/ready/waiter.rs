//! The hidden epoll set of a thread, on which blocking calls on a connection with a ring sleep.
//!
//! It holds the sockets and links that the thread has waited for, edge-triggered and for as long as they live, so that a wait
//! costs one system call. A link is never emptied: its last byte keeps every waiter's edge deliverable (see [`crate::local`]).
#![expect(unsafe_code, reason = "the C library's sleep, at which threads can be cancelled")]

use super::budget::{Awake, Peers};
use super::local_readiness::local;
use super::mask::{self, ENDS, IN, OUT, RDHUP};
use super::{registration, thread};
use crate::conn::{Armed, Conn, Deadline, Interest, WaitOutcome};
use crate::local::longest_sleep;
use crate::patience::{self, TimeLimit, shorter};
use crate::signals::{self, BlockedSignals};
use crate::{real, sys};
use libc::{c_int, epoll_event, sigset_t};
use partywall_shm::half::{Fenced, NAP, Rounds, SecondLook, SleepStep};
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Marks events of a link.
const LINK: u64 = 1 << 32;

/// Has the peer ring. A fence and another look must follow before sleeping ([`Fenced`]).
#[inline]
pub(super) fn arm(conn: &Conn, interest: Interest) -> Armed {
    let armed = Armed::begin(conn, interest);
    conn.bell().drain();
    armed
}

/// The event tag of a connection in hidden sets: slot index plus generation, so that a stale event for a reused slot is ignored. A socket
/// that is closed here and open elsewhere may still have events.
fn name(conn: &Conn) -> u64 {
    u64::from(conn.index()) | u64::from(conn.generation() as u16) << 16
}

/// Enters a connection into this thread's hidden set. `false` if there is none to be had.
pub(super) fn enter(conn: &Conn, set: thread::Hidden) -> bool {
    let local = local(conn);
    if local.is_in(set.serial) {
        return true;
    }
    let (fd, link) = (conn.fd(), conn.bell().fd());
    if fd < 0 || link < 0 {
        return false;
    }
    let index = name(conn);
    let all = EventFlags::from_bits_retain(IN & 0xf | OUT & 0xf | RDHUP) | EventFlags::PRI | EventFlags::ET;
    let add = |fd: c_int, data: u64, flags: EventFlags| {
        match epoll::add(sys::borrow(set.fd), sys::borrow(fd), EventData::new_u64(data), flags) {
            Ok(()) => true,
            // The entry is left from an earlier wait: it is modified, so that events since then are reported.
            Err(Errno::EXIST) => {
                epoll::modify(sys::borrow(set.fd), sys::borrow(fd), EventData::new_u64(data), flags).is_ok()
            }
            Err(_) => false,
        }
    };
    let hears = |fd| add(fd, index | LINK, EventFlags::IN | EventFlags::ET);
    if !add(fd, index, all) || !conn.bell().listening().all(hears) {
        return false;
    }
    local.enter(set.serial);
    // From here on no thread arms it for a sleep in an epoll set alone.
    registration::settle();
    true
}

/// Notes what a hidden set had to say. Returns the index of the connection.
pub(super) fn note(event: &epoll_event) -> u16 {
    let (data, events) = (event.u64, event.events);
    let index = (data & 0xffff) as u16;
    if let Some(conn) = Conn::at(index)
        && name(conn) == data & 0xffff_ffff
        && local(conn).is_hidden()
    {
        if data & LINK == 0 {
            conn.kernel.note(events);
            if events & OUT & 0xf != 0 {
                // Room for what a peer that has left its ring is to be sent again.
                conn.attend();
            }
        } else {
            conn.death().note_link(events);
            conn.bell().drain();
            conn.attend();
        }
    }
    index
}

/// Waits until a connection may have become ready ([`ConnWaiters::wait`](crate::conn::ConnWaiters::wait)). May return early.
pub(super) fn wait(conn: &'static Conn, interest: Interest, deadline: Deadline, may_restart: bool) -> WaitOutcome {
    let mut patience = TimeLimit::until(deadline);
    let wanted = (if interest.has(Interest::IN) { IN & 0xf } else { 0 })
        | (if interest.has(Interest::OUT) { OUT & 0xf } else { 0 });
    let kernel = AtomicU32::new(mask::ALL);
    let look = || mask::of(conn, wanted, &kernel) & (wanted | ENDS) != 0;
    let mut held = BlockedSignals::none();
    if look() {
        return WaitOutcome::Ready;
    }
    let peers = || match conn.shares_core(partywall_region::wait::this_core()) {
        true => Peers::Here,
        false if conn.is_far() => Peers::Far,
        false => Peers::Elsewhere,
    };
    match local(conn).budget.stay_awake(&mut held, None, peers, look, || false) {
        Awake::Ready | Awake::Kernel => return WaitOutcome::Ready,
        Awake::Vain => {}
    }
    let Some(set) = thread::hidden() else { return sleep_without(conn, wanted, &mut patience) };
    if !enter(conn, set) {
        return sleep_without(conn, wanted, &mut patience);
    }
    // A call that may be restarted goes on after some handlers, and fails after others.
    let around = if may_restart && signals::are_mixed() { thread::around(set) } else { None };
    held.hold_if_handled();
    let mut rounds = Rounds::new();
    loop {
        let armed = Armed::begin(conn, interest);
        // Beside a sleep a look at the link costs nothing, whatever has filled it.
        conn.bell().drain_now();
        let SecondLook::Nothing(quiet) = Fenced::after(armed).look(|| look().then_some(())) else {
            return WaitOutcome::Ready;
        };
        let left = patience.left();
        if left == Some(Duration::ZERO) {
            return WaitOutcome::TimedOut;
        }
        let SleepStep::Sleep(limit) = rounds.next(quiet, |armed| armed.is_in_force(conn)) else { continue };
        let time = shorter(shorter(left, limit), longest_sleep());
        let since = sys::now();
        let slept = match around {
            Some(around) => sleep_among_signals(around, set.fd, time, &mut held),
            // SAFETY: no mask, or the one that `held` keeps.
            None => unsafe { sleep(set.fd, time, held.mask(ptr::null())) },
        };
        match slept {
            Err(Errno::INTR) => return WaitOutcome::Interrupted,
            Err(_) => return WaitOutcome::Ready,
            Ok((events, n)) => {
                for event in &events[..n] {
                    if note(event) == conn.index() {
                        if event.u64 & LINK == 0 {
                            kernel.store(kernel.load(Ordering::Relaxed) | event.events, Ordering::Relaxed);
                        }
                    } else {
                        leave(event, set);
                    }
                }
                if n > 0 {
                    local(conn).budget.slept(sys::now().saturating_sub(since));
                }
            }
        }
        // Whatever the events were, the call that waits checks its own condition.
        if !conn.is_up() || look() {
            return WaitOutcome::Ready;
        }
    }
}

/// Takes a connection that no thread waits for out of the hidden set that it has woken.
fn leave(event: &epoll_event, set: thread::Hidden) {
    let Some(conn) = Conn::at((event.u64 & 0xffff) as u16) else { return };
    if local(conn).leave(set.serial) {
        for fd in std::iter::once(conn.fd()).chain(conn.bell().listening()).filter(|fd| *fd >= 0) {
            let _ = epoll::delete(sys::borrow(set.fd), sys::borrow(fd));
        }
    }
}

/// Sleeps in a hidden set.
///
/// # Safety
/// `mask` is null, or valid for reads until the call ends.
pub(super) unsafe fn sleep(
    set: c_int,
    time: Option<Duration>,
    mask: *const sigset_t,
) -> Result<([epoll_event; 8], usize), Errno> {
    let mut events = [epoll_event { events: 0, u64: 0 }; 8];
    let spec = time.map(patience::timespec);
    let spec = spec.as_ref().map_or(ptr::null(), ptr::from_ref);
    let len = events.len() as c_int;
    // SAFETY: an array of `len` entries; the mask by this function's contract.
    let mut n = unsafe { real::epoll_pwait2(set, events.as_mut_ptr(), len, spec, mask) };
    if n < 0 && sys::errno() == Errno::NOSYS {
        // SAFETY: as above.
        n = unsafe { real::epoll_pwait(set, events.as_mut_ptr(), len, patience::millis(time), mask) };
    }
    usize::try_from(n).map(|n| (events, n)).map_err(|_| sys::errno())
}

/// Sleeps in a call without a limit, for up to `time` at once, with signals blocked. Pending signals are delivered afterwards, when it is
/// known whether the call continues.
fn sleep_among_signals(
    around: c_int,
    set: c_int,
    time: Option<Duration>,
    held: &mut BlockedSignals,
) -> Result<([epoll_event; 8], usize), Errno> {
    held.hold();
    // SAFETY: no mask.
    match unsafe { sleep(around, time, ptr::null()) } {
        // With all signals held back that is a stop and its end.
        Ok(_) | Err(Errno::INTR) => {}
        Err(error) => return Err(error),
    }
    let (any, interrupts) = held.own_mask().map_or((false, false), signals::pending);
    if any {
        held.release();
    }
    if interrupts {
        return Err(Errno::INTR);
    }
    // SAFETY: no mask.
    unsafe { sleep(set, Some(Duration::ZERO), ptr::null()) }
}

/// Out of descriptors: looks every now and then.
fn sleep_without(conn: &Conn, wanted: u32, patience: &mut TimeLimit) -> WaitOutcome {
    let kernel = AtomicU32::new(mask::ALL);
    loop {
        kernel.store(mask::ALL, Ordering::Relaxed);
        if mask::of(conn, wanted, &kernel) != 0 || !conn.is_up() {
            return WaitOutcome::Ready;
        }
        let nap = patience.left().unwrap_or(Duration::MAX).min(NAP);
        if nap.is_zero() {
            return WaitOutcome::TimedOut;
        }
        let nap = rustix::thread::Timespec { tv_sec: 0, tv_nsec: i64::from(nap.subsec_nanos()) };
        if matches!(rustix::thread::nanosleep(&nap), rustix::thread::NanosleepRelativeResult::Interrupted(_)) {
            return WaitOutcome::Interrupted;
        }
    }
}
