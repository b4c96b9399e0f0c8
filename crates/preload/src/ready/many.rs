//! `poll`, and `select` made of it: descriptors of which some have a ring.
//!
//! Those are looked at; the others are the kernel's to judge, again in each call. To sleep for both kinds at once, the thread's
//! hidden set stands for all the former as one more descriptor.
#![expect(unsafe_code, reason = "hands arrays to the C library")]

use super::budget::{Awake, Peers, SpinBudget};
use super::mask::{self, ENDS, PRI, RDHUP};
use super::thread;
use super::waiter;
use crate::conn::{self, Armed, Conn, KernelSleep};
use crate::datagram::Poller;
use crate::local::longest_sleep;
use crate::patience::{self, TimeLimit, shorter};
use crate::signals::BlockedSignals;
use crate::table::{self, DescriptorKind, Entry};
use crate::{broker, real, scratch, sys};
use libc::{c_int, nfds_t, pollfd, sigset_t};
use partywall_shm::half::{Fenced, NAP, Rounds, SecondLook, SleepStep};
use rustix::io::Errno;
use std::ptr;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

/// How long calls stay awake.
static BUDGET: SpinBudget = SpinBudget::new();

/// Whether a descriptor is one that a call with this patience should not leave to the kernel alone.
#[inline]
pub(crate) fn concerns(fd: c_int, patience: &TimeLimit) -> bool {
    let entry = table::get(fd);
    if entry == Entry::NONE {
        return false;
    }
    match entry.kind() {
        DescriptorKind::Connection => true,
        DescriptorKind::Datagram => {
            crate::datagram::join_group(fd);
            crate::datagram::concerns(fd, !patience.is_none())
        }
        DescriptorKind::Epoll => {
            super::watch_set(fd);
            false
        }
        // A server that only waits has its listeners published all the same (protocol T14.9).
        DescriptorKind::Listener => broker::awaits_broker(),
        _ => false,
    }
}

/// The state of one descriptor during a call.
#[derive(Clone, Copy)]
struct PolledDescriptor {
    /// As the kernel is to be asked; ignored (-1) if it has a ring.
    kernel: pollfd,
    /// With a ring.
    up: Option<&'static Conn>,
    /// Without one yet: noted as slept on.
    entered: Option<&'static Conn>,
    /// The events that the kernel may have ready for a descriptor with a ring.
    known: u32,
    /// The state in which it was armed for this sleep.
    armed: Armed,
    /// A UDP socket that receives by rings as well, or may once another thread has taken one.
    datagrams: Option<Poller>,
    /// Its rings are closed for the time of a sleep.
    asleep: bool,
}

const NO_FD: pollfd = pollfd { fd: -1, events: 0, revents: 0 };
const EMPTY: PolledDescriptor = PolledDescriptor {
    kernel: NO_FD,
    up: None,
    entered: None,
    known: mask::ALL,
    armed: Armed::NOTHING,
    datagrams: None,
    asleep: false,
};

/// Waits as `ppoll`: what is ready is noted in `fds`, how many are is returned.
///
/// # Errors
/// As `ppoll`.
///
/// # Safety
/// `signals` is null, or valid for reads until the call ends.
pub(crate) unsafe fn poll(
    fds: &mut [pollfd],
    mut patience: TimeLimit,
    signals: *const sigset_t,
) -> Result<usize, Errno> {
    scratch::with_memory(fds.len(), EMPTY, |places| {
        scratch::with_memory(fds.len() + 1, NO_FD, |array| {
            let mut poll = Poll { fds, places, array, ups: 0, others: 0, rounds: Rounds::new() };
            // SAFETY: the mask by this function's contract.
            unsafe { poll.run(&mut patience, signals) }
        })
    })
}

/// Lets signals in that wait for this mask, as a call that does not wait does: the error is then `EINTR`.
///
/// # Safety
/// `signals` is valid for reads until the call ends.
unsafe fn let_signals_in(signals: *const sigset_t) -> Result<(), Errno> {
    let now = patience::timespec(Duration::ZERO);
    // SAFETY: no descriptors; the mask by this function's contract.
    if unsafe { real::ppoll(ptr::null_mut(), 0, &raw const now, signals) } < 0 { Err(sys::errno()) } else { Ok(()) }
}

struct Poll<'a> {
    fds: &'a mut [pollfd],
    places: &'a mut [PolledDescriptor],
    /// For the kernel: a copy of the places', and one more for the hidden set.
    array: &'a mut [pollfd],
    ups: usize,
    others: usize,
    rounds: Rounds,
}

impl Poll<'_> {
    /// # Safety
    /// `signals` is null, or valid for reads until the call ends.
    unsafe fn run(&mut self, patience: &mut TimeLimit, signals: *const sigset_t) -> Result<usize, Errno> {
        if broker::awaits_broker() {
            broker::tick();
        }
        self.classify();
        let found = self.look() + self.ask()?;
        if found > 0 {
            return Ok(found);
        }
        if patience.is_none() {
            if !signals.is_null() {
                // SAFETY: the mask by this function's contract.
                unsafe { let_signals_in(signals) }?;
            }
            // No thread will sleep, so an end over the kernel's sockets must be asked for.
            return Ok(self.ask_for_ends());
        }
        conn::end_abandoned();
        let mut held = BlockedSignals::none();
        if (self.ups > 0 || self.has_hot_datagrams()) && self.stay_awake(&mut held, patience) {
            let found = self.look() + self.ask()?;
            // Another thread may have taken what was there.
            if found > 0 {
                return Ok(found);
            }
        }
        loop {
            // A sleep that is cut is followed by another one, and no signal may come between them.
            let cut = shorter(broker::longest_idle(), broker::longest_sleep());
            let left = patience.left();
            let is_cut = cut.is_some_and(|cut| left.is_none_or(|left| cut < left));
            if self.ups > 0 || self.datagrams().next().is_some() || is_cut {
                held.hold_if_handled();
            }
            if !self.enter() {
                // One has got its ring just now.
                self.leave();
                self.classify();
                continue;
            }
            let since = sys::now();
            // SAFETY: the mask by this function's contract, or the one that `held` keeps.
            let result = unsafe { self.sleep(shorter(left, cut), held.mask(signals)) };
            self.leave();
            self.open_datagrams(sys::now().saturating_sub(since));
            match result {
                Ok(0) if patience.left() != Some(Duration::ZERO) => {
                    broker::tick();
                    self.classify();
                }
                result => return result,
            }
        }
    }

    /// Finds out what each descriptor is by now.
    fn classify(&mut self) {
        (self.ups, self.others) = (0, 0);
        for (one, place) in self.fds.iter_mut().zip(self.places.iter_mut()) {
            one.revents = 0;
            place.up = Conn::of(one.fd).filter(|c| c.is_up());
            // What a peer has left in its ring is sent again, also for a program that never waits, and calls nothing else.
            if let Some(conn) = place.up.filter(|conn| conn.look().owes()) {
                conn.attend();
            }
            place.known = mask::ALL;
            let wants = one.events & (libc::POLLIN | libc::POLLRDNORM) != 0;
            place.datagrams = if wants { Poller::of(one.fd) } else { None };
            place.kernel = match place.up {
                Some(_) => NO_FD,
                None => pollfd { fd: one.fd, events: one.events, revents: 0 },
            };
            self.ups += usize::from(place.up.is_some());
            self.others += usize::from(place.up.is_none() && one.fd >= 0);
        }
    }

    /// Looks at those with a ring; how many are ready.
    fn look(&mut self) -> usize {
        let mut found = 0;
        for (one, place) in self.fds.iter_mut().zip(self.places.iter_mut()) {
            let Some(conn) = place.up else { continue };
            let known = AtomicU32::new(place.known);
            let mut ready = mask::of(conn, u32::from(one.events.cast_unsigned()), &known);
            if ready != 0 && conn.death().has_news() {
                ready = mask::of(conn, u32::from(one.events.cast_unsigned()), &known);
            }
            place.known = known.into_inner();
            one.revents = (ready as u16).cast_signed();
            found += usize::from(ready != 0);
        }
        found
    }

    fn datagrams(&self) -> impl Iterator<Item = Poller> {
        self.places.iter().filter_map(|place| place.datagrams)
    }

    fn has_hot_datagrams(&self) -> bool {
        self.datagrams().any(Poller::is_hot)
    }

    /// Closes the rings of datagrams, and counts this thread as a sleeper on those sockets that may get one (protocol U6.3). `false`: something
    /// lies in a ring.
    fn close_datagrams(&mut self) -> bool {
        for place in self.places.iter_mut() {
            if let Some(datagrams) = place.datagrams {
                if !datagrams.fall_asleep() {
                    return false;
                }
                place.asleep = true;
            }
        }
        true
    }

    fn open_datagrams(&mut self, slept: Duration) {
        for place in self.places.iter_mut().filter(|place| place.asleep) {
            place.asleep = false;
            if let Some(datagrams) = place.datagrams {
                datagrams.wake_up(slept);
            }
        }
    }

    /// Asks the kernel for the others, without waiting; how many are ready.
    fn ask(&mut self) -> Result<usize, Errno> {
        if self.others == 0 {
            return Ok(0);
        }
        self.fill();
        let n = self.fds.len();
        // SAFETY: an array of at least `n` entries.
        let found = unsafe { real::poll(self.array.as_mut_ptr(), n as nfds_t, 0) };
        if found < 0 {
            return if sys::errno() == Errno::INTR { Ok(0) } else { Err(sys::errno()) };
        }
        Ok(self.take())
    }

    fn fill(&mut self) {
        for (slot, place) in self.array.iter_mut().zip(self.places.iter()) {
            *slot = place.kernel;
        }
    }

    /// Notes what the kernel said of the others.
    fn take(&mut self) -> usize {
        let mut found = 0;
        for ((one, slot), place) in self.fds.iter_mut().zip(self.array.iter()).zip(self.places.iter()) {
            if place.up.is_none() {
                one.revents = slot.revents;
                if let Some(datagrams) = place.datagrams {
                    if datagrams.is_waiting() {
                        one.revents |= one.events & (libc::POLLIN | libc::POLLRDNORM);
                    } else if slot.revents & libc::POLLIN == 0 {
                        datagrams.settle();
                    }
                }
                found += usize::from(one.revents != 0 && one.fd >= 0);
            }
        }
        found
    }

    /// Asks the kernel whether those with a ring have come to their end.
    #[cold]
    fn ask_for_ends(&mut self) -> usize {
        for (one, place) in self.fds.iter().zip(self.places.iter_mut()) {
            if let Some(conn) = place.up {
                let said = sys::poll_now(conn.fd(), RDHUP | u32::from(one.events.cast_unsigned()) & PRI);
                conn.kernel.note(said & (RDHUP | ENDS));
                conn.death().has_news();
                place.known = mask::ALL;
            }
        }
        self.look()
    }

    fn stay_awake(&mut self, held: &mut BlockedSignals, patience: &mut TimeLimit) -> bool {
        let core = partywall_region::wait::this_core();
        let limit = patience.left();
        let elsewhere = self.places.iter().filter_map(|p| p.up).take(16).find(|c| !c.shares_core(core));
        let peers = match elsewhere {
            Some(conn) if conn.is_far() => Peers::Far,
            Some(_) => Peers::Elsewhere,
            None if self.has_hot_datagrams() => Peers::Elsewhere,
            None => Peers::Here,
        };
        let this = std::cell::RefCell::new(self);
        let awake = BUDGET.stay_awake(
            held,
            limit,
            || peers,
            || this.borrow_mut().look() > 0 || this.borrow().datagrams().any(Poller::is_waiting),
            // The next thread that asks finds a failure again.
            || this.borrow_mut().ask().unwrap_or(1) > 0,
        );
        !matches!(awake, Awake::Vain)
    }

    /// Notes that this thread sleeps on those without a ring. `false` if one has it by now.
    fn enter(&mut self) -> bool {
        for (one, place) in self.fds.iter().zip(self.places.iter_mut()) {
            if place.up.is_none()
                && let Some(conn) = Conn::of(one.fd)
            {
                match conn.kernel_block_enter() {
                    KernelSleep::Entered => place.entered = Some(conn),
                    KernelSleep::HasRing | KernelSleep::Replaced(_) => return false,
                    // Until the handler that asks has returned, the connection has no ring, and the kernel tells all of it.
                    KernelSleep::OwnStep => {}
                }
            }
        }
        true
    }

    fn leave(&mut self) {
        for place in self.places.iter_mut() {
            if let Some(conn) = place.entered.take() {
                conn.kernel_block_leave();
            }
        }
    }

    /// # Safety
    /// `signals` is null, or valid for reads until the call ends.
    unsafe fn sleep(&mut self, mut time: Option<Duration>, signals: *const sigset_t) -> Result<usize, Errno> {
        let mut hidden = None;
        if self.ups > 0 {
            hidden = thread::hidden();
            for (one, place) in self.fds.iter().zip(self.places.iter_mut()) {
                let Some(conn) = place.up else { continue };
                if !hidden.is_some_and(|set| waiter::enter(conn, set)) {
                    // Out of descriptors: it is looked at now and then.
                    time = Some(time.unwrap_or(NAP).min(NAP));
                }
                place.armed = waiter::arm(conn, mask::interest(u32::from(one.events.cast_unsigned())));
            }
            let quiet = match Fenced::after(()).look(|| Some(self.look()).filter(|found| *found > 0)) {
                SecondLook::Found(found) => return Ok(found + self.ask()?),
                SecondLook::Nothing(quiet) => quiet,
            };
            let are_armed = self.places.iter().all(|place| place.up.is_none_or(|conn| place.armed.is_in_force(conn)));
            match self.rounds.next(quiet, |()| are_armed) {
                // The caller looks and comes again.
                SleepStep::ArmAgain => return Ok(0),
                SleepStep::Sleep(limit) => time = shorter(shorter(time, limit), longest_sleep()),
            }
        }
        if !self.close_datagrams() {
            return Ok(self.look() + self.ask()?);
        }
        let napping = self.places.iter().filter(|place| place.asleep).filter_map(|place| place.datagrams);
        let time = shorter(time, napping.filter_map(Poller::longest_sleep).min());
        let since = sys::now();
        let mut found = 0;
        if let (Some(set), 0) = (hidden, self.others) {
            // SAFETY: the mask by this function's contract.
            let (events, n) = unsafe { waiter::sleep(set.fd, time, signals) }?;
            self.note(&events[..n]);
        } else {
            self.fill();
            let n = self.fds.len();
            self.array[n] = pollfd { fd: hidden.map_or(-1, |set| set.fd), events: libc::POLLIN, revents: 0 };
            let time = time.map(patience::timespec);
            let time = time.as_ref().map_or(ptr::null(), ptr::from_ref);
            // SAFETY: an array of `n + 1` entries; the mask by this function's contract.
            if unsafe { real::ppoll(self.array.as_mut_ptr(), n as nfds_t + 1, time, signals) } < 0 {
                return Err(sys::errno());
            }
            found = self.take();
            if self.array[n].revents != 0
                && let Some(set) = hidden
            {
                // SAFETY: no mask.
                let (events, n) = unsafe { waiter::sleep(set.fd, Some(Duration::ZERO), ptr::null()) }?;
                self.note(&events[..n]);
            }
        }
        let slept = sys::now().saturating_sub(since);
        found += self.look();
        if found > 0 && (self.ups > 0 || self.datagrams().any(Poller::has_rings)) {
            BUDGET.slept(slept);
        }
        Ok(found)
    }

    fn note(&mut self, events: &[libc::epoll_event]) {
        for event in events {
            waiter::note(event);
        }
        if !events.is_empty() {
            for place in self.places.iter_mut() {
                place.known = mask::ALL;
            }
        }
    }
}
