//! Waiting for a datagram: awake at the rings for a while, then asleep in the kernel with the rings closed (protocol U6).

use super::address::Wanted;
use super::inbound::DatagramFound;
use super::kernel_queue;
use super::outbound::RingsOut;
use super::{DatagramSocket, flags};
use crate::awake::QuickestSleep;
use crate::buffers::CallerBuffers;
use crate::kernel_questions::KernelQuestions;
use crate::patience::shorter;
use crate::processor_turns::ProcessorTurns;
use crate::signals::BlockedSignals as SignalsHeld;
use crate::{real, sys};
use libc::{c_int, c_short, pollfd, ssize_t, timeval};
use rustix::io::Errno;
use std::ptr;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Looks before the clock is read and signals are held back.
const FIRST_LOOKS: u32 = 64;
/// Looks between two readings of the clock.
const BATCH: u32 = 8;
/// The longest sleep while something may come by a ring that is closed, or a flow may end with a datagram of ours in it.
const NAP: Duration = Duration::from_millis(50);
/// The longest sleep while the socket has an offered or attached ring to send by, or a ring from another machine. The flow can end, which no
/// bell announces. Another thread may have written a datagram to that ring during the sleep, which then goes by the kernel (protocol U11.8).
/// A ring between machines has to be unmapped when its machine is to be migrated (protocol U14.16).
const LONG_NAP: Duration = Duration::from_secs(1);
/// Turns that are left to a peer on the same core.
const WAYS: u32 = 4;

/// A thread that stays awake for longer than this heeds the time limit of its call, and leaves its processor to others.
const BRIEF: u32 = 50_000;

/// Of sleeps that a datagram from another machine has ended. It came by the kernel.
static QUICKEST_FAR: QuickestSleep = QuickestSleep::new();

/// What a receiving call keeps from one look to the next.
struct ReceivingCall {
    held: SignalsHeld,
    /// When it ends, once that was asked for; `Some(None)`: never.
    until: Option<Option<Duration>>,
    /// The sleeps of its kind, if the socket has a ring from another machine.
    far: Option<&'static QuickestSleep>,
    /// It was shut down for reading.
    is_shut_down: bool,
}

impl ReceivingCall {
    fn deadline(&mut self, fd: c_int, start: Duration) -> Option<Duration> {
        *self.until.get_or_insert_with(|| timeout(fd).map(|time| start + time))
    }
}

impl DatagramSocket {
    /// A receiving call.
    pub(super) fn receive(
        &'static self,
        fd: c_int,
        buffers: CallerBuffers<'_>,
        message: c_int,
        wanted: Wanted,
        kernel: impl Fn() -> ssize_t,
    ) -> ssize_t {
        let usual = libc::MSG_DONTWAIT | libc::MSG_PEEK | libc::MSG_TRUNC | libc::MSG_NOSIGNAL | libc::MSG_CMSG_CLOEXEC;
        if message & !(usual | libc::MSG_WAITALL) != 0 {
            return kernel();
        }
        if let Some(error) = self.take_error() {
            return sys::fail(error);
        }
        if self.has(flags::SHARED) {
            self.look_whether_shared(fd);
        }
        self.join_group(fd);
        if !self.concerns_waits() {
            if self.has(flags::KERNEL) {
                return kernel();
            }
            if let Some(got) = self.on_kernel_alone(|| self.receive_plainly(fd, message, wanted, &kernel)) {
                return got;
            }
        }
        if !self.may_have_rings() && self.has_read_rings() {
            // A socket that several processes hold may have rings again while this thread sleeps.
            let got = if self.has(flags::KERNEL) { None } else { self.on_kernel_alone(&kernel) };
            return got.unwrap_or_else(kernel);
        }
        let generation = self.generation();
        self.follow_policy(fd);
        let dont_wait = message & libc::MSG_DONTWAIT != 0 || self.has(flags::NONBLOCK);
        let message = message & usual;
        let mut call = ReceivingCall { held: SignalsHeld::none(), until: None, far: None, is_shut_down: false };
        let errno = sys::errno_number();
        loop {
            match self.try_receive(fd, buffers, message, wanted) {
                Ok(DatagramFound::Datagram(n)) => {
                    // A look that found nothing does not concern the program.
                    sys::restore_errno(errno);
                    return ssize_t::try_from(n).unwrap_or(ssize_t::MAX);
                }
                // A call that waits would not wait any more.
                Ok(DatagramFound::Nothing) if call.is_shut_down => {
                    return self.receive_plainly(fd, message, wanted, &kernel);
                }
                Ok(DatagramFound::Nothing) => {}
                Err(error) => return sys::fail(error),
            }
            if dont_wait {
                self.found_nothing(fd);
                return sys::fail(Errno::AGAIN);
            }
            if self.stay_awake(fd, &mut call) {
                continue;
            }
            self.look_after_receivers(fd);
            if !self.fall_asleep(generation) {
                continue;
            }
            let since = sys::now();
            let nap = self.longest_sleep();
            if !call.held.is_held() && nap.is_none() {
                let got = self.receive_plainly(fd, message, wanted, &kernel);
                let errno = sys::errno_number();
                let open = match got {
                    0.. => self.budget.slept(sys::now().saturating_sub(since), call.far),
                    _ => self.budget.slept_for_nothing(call.far),
                };
                self.wake_up(generation, open);
                sys::restore_errno(errno);
                return got;
            }
            // Unmasking the signals and waiting are one step, so a signal that came before interrupts the wait.
            let deadline = call.deadline(fd, since);
            let left = deadline.map(|deadline| deadline.saturating_sub(since));
            let slept = sleep(fd, shorter(left, nap), &call.held);
            let open = match slept {
                Ok(events) if events != 0 => self.budget.slept(sys::now().saturating_sub(since), call.far),
                Ok(_) | Err(_) => self.budget.slept_for_nothing(call.far),
            };
            self.wake_up(generation, open);
            call.is_shut_down = slept.is_ok_and(|events| events & libc::POLLRDHUP != 0);
            match slept {
                Ok(0) if deadline.is_some_and(|deadline| sys::now() >= deadline) => return sys::fail(Errno::AGAIN),
                Ok(_) => {}
                Err(Errno::INTR) if deadline.is_none() && crate::signals::all_restart() => {}
                Err(error) => return sys::fail(error),
            }
            call.held.release();
        }
    }

    /// A socket that stays on the kernel, or does for now: whether the rings from before are read. In a handler that has interrupted a call that
    /// looks at them, the kernel is all that there is.
    fn has_read_rings(&self) -> bool {
        let Some(mut rx) = self.rx.hold() else { return true };
        rx.sweep();
        // EDGE inbound: as in `DatagramSocket::longest_sleep`.
        self.inbound.store(rx.count(), Ordering::Release);
        rx.count() == 0
    }

    /// Makes a call that may sleep in the kernel on a socket without inbound rings. Rings that another thread takes meanwhile stay closed
    /// until the call has returned (protocol U6.3). `None`: the socket has a ring, and the call was not made.
    pub(super) fn on_kernel_alone<R>(&self, call: impl FnOnce() -> R) -> Option<R> {
        let generation = self.generation();
        self.sleepers.enter(generation);
        // Either this thread sees the ring that another one takes, or that one sees this sleeper (`DatagramSocket::take`).
        // EDGE inbound: as in `DatagramSocket::concerns_waits`.
        let result = if self.inbound.load(Ordering::SeqCst) == 0 { Some(call()) } else { None };
        // EDGE inbound: as above.
        if self.inbound.load(Ordering::Acquire) == 0 {
            self.sleepers.leave(generation);
        } else {
            let errno = sys::errno_number();
            self.wake_up(generation, true);
            sys::restore_errno(errno);
        }
        result
    }

    /// Whether a call that waits for it has to look at rings.
    fn concerns_waits(&self) -> bool {
        // EDGE inbound: acquires from the thread that took or gave up a ring.
        self.inbound.load(Ordering::Acquire) != 0 || self.rings_out() != RingsOut::None
    }

    /// Whether a thread that waits for it has to be counted as its sleeper: it has rings, or another thread may take one meanwhile.
    fn may_get_rings(&self) -> bool {
        !self.has(flags::KERNEL) || self.concerns_waits()
    }

    /// How long it may sleep with its rings closed; `None`: until something comes by the kernel.
    pub(super) fn longest_sleep(&self) -> Option<Duration> {
        let (unsettled, between_machines) = self.rx.hold().map_or((false, false), |mut rx| {
            let unsettled = rx.is_unsettled();
            // EDGE inbound: releases how many rings there are; acquired in `DatagramSocket::concerns_waits`.
            self.inbound.store(rx.count(), Ordering::Release);
            (unsettled, rx.is_between_machines())
        });
        match self.rings_out() {
            _ if unsettled => Some(NAP),
            RingsOut::Unread => Some(NAP),
            RingsOut::None if !between_machines => None,
            RingsOut::None | RingsOut::Begun => Some(LONG_NAP),
        }
    }

    /// A call that does not wait has found nothing. The program may go on to look in this way, and send nothing, until it has an answer to what lies
    /// unread in a ring. So this looks after those rings from time to time, as a sleep does.
    fn found_nothing(&self, fd: c_int) {
        let now = sys::coarse_millis();
        if self.has(flags::RING_OUT) && self.looked_after.swap(now, Ordering::Relaxed) != now {
            self.look_after_receivers(fd);
        }
    }

    /// As the program called it; what has come is counted.
    fn receive_plainly(&self, fd: c_int, message: c_int, wanted: Wanted, kernel: impl Fn() -> ssize_t) -> ssize_t {
        let room = wanted.room();
        let got = kernel();
        if got >= 0 && message & libc::MSG_PEEK == 0 {
            self.came_by_kernel(fd, got.unsigned_abs(), || wanted.given(room).or_else(|| self.remote()));
        } else if got >= 0 {
            self.note_peek_at_kernel();
        }
        got
    }

    /// Looks at the rings for a while, and at the kernel now and then; whether there is anything.
    fn stay_awake(&self, fd: c_int, call: &mut ReceivingCall) -> bool {
        let (open, here, is_far) = match self.rx.hold() {
            Some(mut rx) => (rx.is_open(), rx.shares_core(), rx.is_between_machines()),
            None => return false,
        };
        call.far = is_far.then_some(&QUICKEST_FAR);
        let budget = self.budget.nanos(call.far);
        if budget == 0 || !open {
            return false;
        }
        for _ in 0..FIRST_LOOKS {
            if self.is_waiting() {
                return true;
            }
            std::hint::spin_loop();
        }
        call.held.hold();
        if here {
            for _ in 0..WAYS {
                std::thread::yield_now();
                if self.is_waiting() {
                    return true;
                }
            }
            return false;
        }
        let (is_brief, mut budget) = (budget <= BRIEF, Duration::from_nanos(budget.into()));
        let start = sys::now();
        if !is_brief && let Some(deadline) = call.deadline(fd, start) {
            budget = budget.min(deadline.saturating_sub(start));
        }
        let (mut questions, mut turns) = (KernelQuestions::from(start), ProcessorTurns::from(start));
        loop {
            for _ in 0..BATCH {
                if self.is_waiting() {
                    return true;
                }
                std::hint::spin_loop();
            }
            let now = sys::now();
            if now.saturating_sub(start) >= budget {
                return false;
            }
            let (now, kernel_has_something) = questions.ask(now, || {
                let has_something = kernel_queue::has_something(fd);
                // A sender on another machine may count a datagram only after this thread has received it.
                if is_far && !has_something {
                    self.settle(fd);
                }
                has_something
            });
            if kernel_has_something {
                return true;
            }
            if !is_brief && turns.are_wanted(now) {
                return self.is_waiting();
            }
        }
    }
}

/// What has ended the sleep; 0: the time is over.
fn sleep(fd: c_int, left: Option<Duration>, held: &SignalsHeld) -> Result<c_short, Errno> {
    let mut one = pollfd { fd, events: libc::POLLIN | libc::POLLRDHUP, revents: 0 };
    let time = left.map(|left| libc::timespec {
        tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: left.subsec_nanos().into(),
    });
    let time = time.as_ref().map_or(ptr::null(), ptr::from_ref);
    #[expect(unsafe_code, reason = "the C library's call, at which threads can be cancelled")]
    // SAFETY: an array of one; the mask is null or valid.
    sys::take(unsafe { real::ppoll(&raw mut one, 1, time, held.mask(ptr::null())) } as isize)?;
    Ok(one.revents)
}

/// `SO_RCVTIMEO`.
fn timeout(fd: c_int) -> Option<Duration> {
    let mut value = timeval { tv_sec: 0, tv_usec: 0 };
    let is_read = sys::read_option(fd, libc::SOL_SOCKET, libc::SO_RCVTIMEO, &mut value);
    let time = Duration::from_secs(u64::try_from(value.tv_sec).unwrap_or(0))
        + Duration::from_micros(u64::try_from(value.tv_usec).unwrap_or(0));
    (is_read && !time.is_zero()).then_some(time)
}

/// Whether a descriptor is a socket that a call must not leave to the kernel alone: it has rings, or may get one while a thread sleeps.
#[inline]
pub(crate) fn concerns(fd: c_int, may_sleep: bool) -> bool {
    let is_concerned =
        |socket: &DatagramSocket| if may_sleep { socket.may_get_rings() } else { socket.concerns_waits() };
    DatagramSocket::of(fd).is_some_and(is_concerned)
}

/// Makes a call that may sleep in the kernel on any descriptor. `None`: it is a socket that receives by a ring, and the call was not made.
pub(crate) fn by_kernel_alone<R>(fd: c_int, call: impl FnOnce() -> R) -> Option<R> {
    match DatagramSocket::of(fd).filter(|socket| socket.may_get_rings()) {
        Some(socket) => socket.on_kernel_alone(call),
        None => Some(call()),
    }
}

/// A socket is about to be waited for in an epoll set.
pub(crate) fn join_group(fd: c_int) {
    if let Some(socket) = DatagramSocket::of(fd) {
        socket.join_group(fd);
    }
}

/// A socket was added to an epoll set, which looks at its rings, and closes them before a thread sleeps. `false`: there are none, and
/// there will be none.
pub(crate) fn entered_set(fd: c_int) -> bool {
    let Some(socket) = DatagramSocket::of(fd) else { return false };
    // A socket that several processes hold may have rings again later.
    // EDGE inbound: as in `DatagramSocket::concerns_waits`.
    !socket.has(flags::KERNEL) || socket.inbound.load(Ordering::Acquire) != 0
}

/// A socket that has rings, or may get them, in a call that waits for several descriptors.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Poller {
    socket: &'static DatagramSocket,
    /// Of the socket. Its place may have the next one when the call is over.
    generation: u32,
}

impl Poller {
    fn new(socket: &'static DatagramSocket) -> Self {
        Self { socket, generation: socket.generation() }
    }

    /// `None` if it is not one.
    pub(crate) fn of(fd: c_int) -> Option<Self> {
        DatagramSocket::of(fd).filter(|socket| socket.may_get_rings()).map(Self::new)
    }

    /// A socket that may have rings only later, by its entry in the table of descriptors; `None` once it is closed.
    pub(crate) fn registered(entry: u32) -> Option<Self> {
        DatagramSocket::from_entry(entry).map(Self::new)
    }

    /// It stays on the kernel from here on.
    pub(crate) fn give_up(self) {
        self.socket.stay_on_kernel();
    }

    /// A call that waits for several sockets has found something else ready, or nothing.
    pub(crate) fn found_nothing(self) {
        self.socket.found_nothing(self.socket.fd.load(Ordering::Relaxed));
    }

    /// Whether it has rings already.
    pub(crate) fn has_rings(self) -> bool {
        self.socket.concerns_waits()
    }

    /// Whether something lies in a ring.
    pub(crate) fn is_waiting(self) -> bool {
        self.socket.is_waiting()
    }

    /// If something lies in a ring, a number that changes with every datagram that comes.
    pub(crate) fn mark(self) -> Option<u64> {
        // EDGE inbound: as in `DatagramSocket::concerns_waits`.
        if self.socket.inbound.load(Ordering::Acquire) == 0 { None } else { self.socket.rx.hold()?.mark() }
    }

    /// Whether anything lies in a ring, though the broker may not have proved yet whose it is.
    pub(crate) fn has_bytes(self) -> bool {
        // EDGE inbound: as in `DatagramSocket::concerns_waits`.
        self.socket.inbound.load(Ordering::Acquire) != 0 && self.socket.rx.hold().is_some_and(|mut rx| rx.has_bytes())
    }

    /// Whether its rings are in use.
    pub(crate) fn is_open(self) -> bool {
        // EDGE inbound: as in `DatagramSocket::concerns_waits`.
        self.socket.inbound.load(Ordering::Acquire) != 0 && self.socket.rx.hold().is_some_and(|rx| rx.is_open())
    }

    /// Whether it is worth it to stay awake for it.
    pub(crate) fn is_hot(self) -> bool {
        // A thread that polls stays awake no longer for other machines.
        self.socket.budget.nanos(None) != 0
            && self.socket.rx.hold().is_some_and(|mut rx| rx.is_open() && !rx.shares_core())
    }

    /// The kernel's queue seems to be empty: lets those know who have sent by it and would use their rings again (protocol U7).
    pub(crate) fn settle(self) {
        let fd = self.socket.fd.load(Ordering::Relaxed);
        // EDGE inbound: as in `DatagramSocket::concerns_waits`.
        if self.socket.inbound.load(Ordering::Acquire) != 0 {
            self.socket.settle(fd);
        }
        self.socket.found_nothing(fd);
    }

    /// Its rings are closed from here on; `false`, and nothing is to be undone, if there is something in one.
    pub(crate) fn fall_asleep(self) -> bool {
        self.look_after_receivers();
        self.socket.fall_asleep(self.generation)
    }

    /// Like [`Self::fall_asleep`], unless a ring holds a datagram that is news by its mark.
    pub(crate) fn fall_asleep_unless(self, is_news: impl Fn(u64) -> bool) -> bool {
        self.look_after_receivers();
        self.socket.fall_asleep_unless(self.generation, |rx| rx.mark().is_some_and(&is_news))
    }

    fn look_after_receivers(self) {
        if self.socket.has(flags::RING_OUT) {
            self.socket.look_after_receivers(self.socket.fd.load(Ordering::Relaxed));
        }
    }

    /// After it has fallen asleep: how long it may sleep; `None`: until something comes by the kernel.
    pub(crate) fn longest_sleep(self) -> Option<Duration> {
        self.socket.longest_sleep()
    }

    /// Cancels a sleep that was announced and did not happen.
    pub(crate) fn stay_awake(self) {
        self.socket.wake_up(self.generation, true);
    }

    /// After it has fallen asleep.
    pub(crate) fn wake_up(self, slept: Duration) {
        self.socket.wake_up(self.generation, self.socket.budget.slept(slept, None));
    }
}
