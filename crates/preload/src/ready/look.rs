//! Looking at the hot connections of a set, arming them, and leaving them to others.

use super::budget::Peers;
use super::lift::register_bell;
use super::list::{HOT, List};
use super::mask::{self, ET, ONESHOT, OUT};
use super::registration::{self as reg, FRESH, GONE, SPENT};
use super::set::{MANY, Set};
use super::tag::Tag;
use super::word::AtomicWord;
use crate::conn::bell::sleep_number;
use crate::conn::{Armed, Conn};
use crate::{hidden, sys};
use partywall_shm::half::{Fenced, Rounds, SecondLook, SleepStep};
use rustix::event::{EventfdFlags, eventfd};
use std::sync::atomic::Ordering;

/// Answers without it after which one of few hot ones is idle.
const IDLE: u32 = 256;
/// How many are armed at once.
const BATCH: usize = 64;
/// The kernel is asked after this number of answers at the latest.
const ANSWERS: u32 = 8;
/// Or after this time, in [`sys::ticks`]: about 50 microseconds.
const TICKS: u64 = 120_000;
/// Answers without room for all ends after which bytes are reported all the same.
const MOST_UNSUCCESSFUL: u32 = 16;

/// Whether the kernel was asked for ends before bytes are reported ([`crate::conn::RingLook::ends`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EndsAsked {
    /// It was, or that is not needed.
    Yes,
    /// It was not, and no connection has made it necessary so far.
    NotYet,
    /// It must be asked before the next event.
    MustAsk(EndsNews),
}

/// The ends that a connection's peer has announced and that the kernel was not asked for yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct EndsNews {
    /// The number of the registration.
    number: u32,
    /// The count of ends that its peer's process has told of.
    ends: u32,
}

impl Set {
    /// The events of a registration that the program gets now; 0 for none. With `tell`, they are recorded as reported.
    #[inline]
    pub(super) fn look(&self, number: u32, tell: bool) -> u32 {
        self.look_after_ends(number, tell, &mut EndsAsked::Yes)
    }

    /// Like [`Self::look`], but bytes are not reported while `asked` says that the kernel may have ends that came before them.
    #[inline]
    fn look_after_ends(&self, number: u32, tell: bool, asked: &mut EndsAsked) -> u32 {
        let r = reg::get(number);
        let (events, state) = (r.events.get(), r.state.get());
        if state & (SPENT | GONE) != 0 {
            return 0;
        }
        let Some(conn) = r.conn() else { return 0 };
        // Before the look: what comes after it is news.
        let marks = || if events & ET != 0 { (conn.look().rx_mark(), conn.look().tx_mark()) } else { (0, 0) };
        let (mut rx, mut tx) = marks();
        let mut ready = mask::of(conn, events, &r.kernel);
        // Bytes that came during the look may have been seen already, and would be reported twice.
        if marks() != (rx, tx) {
            (rx, tx) = marks();
            ready = mask::of(conn, events, &r.kernel);
        }
        if ready == 0 {
            return 0;
        }
        if events & ET != 0 {
            let news = state & FRESH != 0
                || r.edge.get() & ready != 0
                // As in the kernel: whatever has come is an edge, and what is ready then is reported, be it only room.
                || rx != r.rx_told.get()
                || (ready & OUT != 0 && tx != r.tx_told.get());
            if !news {
                return 0;
            }
        }
        if tell && *asked != EndsAsked::Yes {
            // Loaded after the bytes were seen: it is as it was when they were committed, or later.
            let ends = conn.look().ends();
            if ends != r.ends.get() {
                *asked = EndsAsked::MustAsk(EndsNews { number, ends });
                return 0;
            }
        }
        if tell {
            if events & ET != 0 {
                r.edge.put(0);
                r.rx_told.put(rx);
                if ready & OUT != 0 {
                    r.tx_told.put(tx);
                }
            }
            r.state.put(state & !FRESH);
            r.active.put(self.answers.get());
            if events & ONESHOT != 0 {
                r.raise(SPENT);
                self.cool(number);
            }
        }
        ready
    }

    /// The kernel was asked for these ends. If there may be more than fitted, the next answer asks again, but not without a limit: other
    /// events that are always ready may leave no room.
    #[cold]
    pub(super) fn note_ends(&self, news: EndsNews, has_told_all: bool) {
        let Some(_held) = self.hold() else { return };
        let unfinished_answers = if has_told_all { 0 } else { self.unfinished_answers.get() + 1 };
        let is_enough = has_told_all || unfinished_answers >= MOST_UNSUCCESSFUL;
        self.unfinished_answers.put(if is_enough { 0 } else { unfinished_answers });
        let r = reg::get(news.number);
        if is_enough && r.set.get() == self.number() + 1 {
            r.ends.put(news.ends);
        }
    }

    /// Like [`Set::scan`], after it was stopped and the kernel has been asked for ends: reports connections that end first, and then all
    /// others. Events in the same answer are not reported twice.
    #[cold]
    pub(super) fn scan_after_ends(&self, max: usize, tell: impl FnMut(u32, u64)) -> usize {
        self.scan_in_order(&[true, false], max, tell)
    }

    /// If the last answer had no room for all ends: tells of those that are known by now, before the kernel fills the array again.
    #[cold]
    pub(super) fn scan_known_ends(&self, max: usize, tell: impl FnMut(u32, u64)) -> usize {
        if self.unfinished_answers.get() == 0 { 0 } else { self.scan_in_order(&[true], max, tell) }
    }

    fn scan_in_order(&self, passes: &[bool], max: usize, mut tell: impl FnMut(u32, u64)) -> usize {
        let Some(_held) = self.hold() else { return 0 };
        let mut told = 0;
        for &ends_only in passes {
            let mut number = self.hot.first();
            for _ in 0..self.hot.len() {
                let next = List::<HOT>::next(number);
                let r = reg::get(number);
                let is_next = r.active.get() != self.answers.get()
                    && r.conn().is_some_and(|conn| {
                        !ends_only
                            || conn.look().is_ending()
                            || conn.kernel.has_hung_up() != 0
                            || conn.death().is_reset()
                    });
                let ready = if is_next && told < max { self.look(number, true) } else { 0 };
                if ready != 0 {
                    tell(ready, r.data.get());
                    told += 1;
                }
                number = next;
            }
        }
        told
    }

    /// Looks at the hot ones and tells what is ready; returns how many were told. The next look goes on where this one ended, and so does one
    /// that was stopped to ask the kernel for ends.
    #[inline]
    pub(super) fn scan(&self, max: usize, asked: &mut EndsAsked, mut tell: impl FnMut(u32, u64)) -> usize {
        if max == 0 || self.hot.len() == 0 {
            return 0;
        }
        let Some(_held) = self.hold() else { return 0 };
        let mut told = 0;
        let mut number = self.hot.first();
        for _ in 0..self.hot.len() {
            if told == max {
                break;
            }
            let next = List::<HOT>::next(number);
            let ready = self.look_after_ends(number, true, asked);
            if matches!(asked, EndsAsked::MustAsk(_)) {
                break;
            }
            if ready != 0 {
                tell(ready, reg::get(number).data.get());
                told += 1;
            }
            number = next;
        }
        // One-shot ones are out of the list by now, and the next may have been the last of them.
        if self.hot.len() != 0 && reg::get(number).is(reg::HOT) {
            self.hot.rotate(number);
        }
        told
    }

    /// Tells of an edge that no event of the kernel brings. `false`: the registration is another's by now, or a signal handler has
    /// interrupted a holder of the set.
    pub(super) fn tell_edge(&self, number: u32, conn: &Conn, edge: u32) -> bool {
        let Some(_held) = self.hold() else { return false };
        let r = reg::get(number);
        if r.set.get() != self.number() + 1 || !r.conn().is_some_and(|c| std::ptr::eq(c, conn)) {
            return false;
        }
        r.edge.put(r.edge.get() | edge);
        self.heat(number);
        if self.sleepers.load(Ordering::SeqCst) != 0 || self.nested.get() != 0 {
            self.ring();
        }
        true
    }

    /// Notes an event that the kernel had for us, under our tag.
    pub(super) fn note(&self, tag: Tag, events: u32) {
        match tag {
            Tag::Bell => {
                let bell = self.bell.get();
                if bell != 0 {
                    let _ = rustix::io::read(sys::borrow(bell.cast_signed() - 1), &mut [0; 8]);
                }
            }
            // Another call gets it, or the program has the registration back already.
            Tag::Datagrams(number) => {
                let _held = self.hold();
                self.arm_once_again(number);
            }
            Tag::Socket(number) | Tag::Link(number) => {
                let Some(_held) = self.hold() else { return };
                let r = reg::get(number);
                if r.set.get() != self.number() + 1 {
                    return;
                }
                let Some(conn) = r.conn() else { return };
                if let Tag::Link(_) = tag {
                    conn.death().note_link(events);
                    conn.bell().drain();
                    conn.attend();
                    if conn.look().owes() {
                        self.hear_of_room(number);
                    }
                    // The kernel's set has the link once, for all descriptors of the connection.
                    reg::each_in(conn, number, self.number(), |number| {
                        let r = reg::get(number);
                        // The end of a peer that had finished before is an event of the link alone, and an edge if it is a reset.
                        r.edge.put(r.edge.get() | events & mask::ENDS);
                        self.heat(number);
                    });
                } else {
                    r.edge.put(r.edge.get() | events);
                    r.kernel.put(r.kernel.get() | events);
                    conn.kernel.note(events);
                    if conn.look().owes() {
                        conn.attend();
                    }
                    self.heat(number);
                }
            }
        }
    }

    /// Whether the kernel is to be asked before the next answer.
    #[inline]
    pub(super) fn is_due(&self) -> bool {
        self.answers.get().wrapping_sub(self.asked_answers.get()) >= ANSWERS
            || self.nested.get() != 0
            || sys::ticks().wrapping_sub(self.asked_ticks.get()) >= TICKS
            || self.awaits_room_for_datagrams()
    }

    /// It was asked.
    pub(super) fn asked(&self) {
        self.asked_answers.put(self.answers.get());
        self.asked_ticks.put(sys::ticks());
    }

    /// Where the peers of those are that are hot and have a ring. One-shot registrations are hot before their connection has one.
    pub(super) fn peers(&self) -> Peers {
        let Some(held) = self.hold() else { return Peers::None };
        let core = partywall_region::wait::this_core();
        let mut peers = Peers::None;
        // All say where they are; a few are enough to ask.
        for conn in self.hot.iter().take(16).filter_map(|n| reg::get(n).conn()).filter(|c| c.is_up()) {
            if !conn.shares_core(core) {
                return if conn.is_far() { Peers::Far } else { Peers::Elsewhere };
            }
            peers = Peers::Here;
        }
        drop(held);
        match self.hot_datagrams() {
            (_, true) => Peers::Elsewhere,
            (true, false) => Peers::Here,
            _ => peers,
        }
    }

    /// Has the peers of all hot ones ring. Returns whether there are any: then a fence and another look must follow.
    pub(super) fn arm(&self) -> bool {
        let Some(_held) = self.hold() else { return false };
        for number in self.hot.iter() {
            let r = reg::get(number);
            if let Some(conn) = r.conn() {
                r.note_armed(conn, super::arm(conn, mask::interest(r.events.get())));
            }
        }
        self.hot.len() != 0
    }

    /// Arms all members for the sleep of a caller that [falls asleep](Self::fall_asleep). It looks at all of them when it is woken, so
    /// one bell is enough for those on which no other thread can sleep. A thread that adds one of them to another set arms it again, or
    /// wakes the sleeper.
    pub(super) fn arm_for_sleep(&self) -> bool {
        let Some(_held) = self.hold() else { return false };
        let is_ours = self.nested.get() == 0
            && self.is_own()
            && !self.forks_since()
            && self.lost.get() == 0
            && self.sleepers.load(Ordering::SeqCst) == 1;
        let sleep = if is_ours { sleep_number() } else { 0 };
        {
            let alone = reg::Alone::begin();
            for number in self.hot.iter() {
                let r = reg::get(number);
                let Some(conn) = r.conn() else { continue };
                let is_alone = r.is(reg::LINKED) && alone.as_ref().is_some_and(|alone| alone.has(conn, number));
                r.note_armed(
                    conn,
                    Armed::begin_for_sleep(conn, mask::interest(r.events.get()), if is_alone { sleep } else { 0 }),
                );
            }
        }
        for conn in self.hot.iter().filter_map(|number| reg::get(number).conn()) {
            conn.bell().drain();
        }
        self.hot.len() != 0
    }

    /// After the fence and a look that has found nothing: whether all hot ones will be heard of ([`Armed::is_in_force`]).
    pub(super) fn are_armed(&self) -> bool {
        let Some(_held) = self.hold() else { return true };
        self.hot.iter().all(|number| {
            let r = reg::get(number);
            r.conn().is_none_or(|conn| r.armed().is_in_force(conn))
        })
    }

    pub(super) fn fall_asleep(&self) {
        self.sleepers.fetch_add(1, Ordering::SeqCst);
    }

    pub(super) fn wake_up(&self) {
        self.sleeper_woke();
    }

    /// An answer goes to the program.
    #[inline]
    pub(super) fn answered(&self) {
        let answers = self.answers.get().wrapping_add(1);
        self.answers.put(answers);
        if answers.is_multiple_of(64) && self.hot.len() > 8 || self.hot.len() > MANY && answers.is_multiple_of(8) {
            self.cool_the_idle();
        }
        if self.is_watched() {
            self.leave();
        }
    }

    /// Arms those that have had nothing for long, and looks at them no more.
    #[cold]
    fn cool_the_idle(&self) {
        let Some(_held) = self.hold() else { return };
        let now = self.answers.get();
        let patience = if self.hot.len() > MANY { IDLE / 8 } else { IDLE };
        let mut idle = [0; BATCH];
        let mut count = 0;
        for number in self.hot.iter() {
            let r = reg::get(number);
            if count < BATCH && now.wrapping_sub(r.active.get()) > patience {
                if let Some(conn) = r.conn() {
                    r.note_armed(conn, super::arm(conn, mask::interest(r.events.get())));
                }
                idle[count] = number;
                count += 1;
            }
        }
        if count == 0 {
            return;
        }
        let fenced = Fenced::after(());
        for &number in &idle[..count] {
            self.cool_if_quiet(fenced, number);
        }
    }

    /// The caller leaves while others wait: later events must reach those.
    #[cold]
    pub(super) fn leave(&self) {
        if self.nested.get() != 0
            && let Some(_held) = self.hold()
        {
            // Threads that watch the set from outside sleep in the kernel, without a limit of this library.
            self.hot.iter().filter_map(|number| reg::get(number).conn()).for_each(Conn::pass_held);
        }
        if self.nested.get() != 0 && self.has_waiting_datagrams() {
            if let Some(_held) = self.hold() {
                self.ring();
            }
            return;
        }
        let mut rounds = Rounds::new();
        loop {
            if !self.arm() {
                return;
            }
            let look = Fenced::after(()).look(|| self.has_news_for_others().then_some(()));
            let SecondLook::Nothing(quiet) = look else { break };
            match rounds.next(quiet, |()| self.are_armed()) {
                SleepStep::ArmAgain => {}
                SleepStep::Sleep(None) => return,
                SleepStep::Sleep(Some(_)) => break,
            }
        }
        // Something is there, or what comes could not be armed for.
        if let Some(_held) = self.hold() {
            self.ring();
        }
    }

    /// Whether something is there that is not the business of the program, which is about to be told.
    fn has_news_for_others(&self) -> bool {
        let nested = self.nested.get() != 0;
        let Some(_held) = self.hold() else { return false };
        let now = self.answers.get();
        let mut number = self.hot.first();
        for _ in 0..self.hot.len() {
            // A member that was just reported is the program's task, unless the set itself must be readable.
            let told = reg::get(number).active.get().wrapping_add(1) == now;
            if (nested || !told) && self.look(number, false) != 0 {
                return true;
            }
            number = List::<HOT>::next(number);
        }
        false
    }

    /// Makes the kernel's set ready. The lock is held.
    pub(super) fn ring(&self) {
        if self.lost.get() != 0 {
            // The process that has the set now does not know the tag of the bell.
            return;
        }
        if self.bell.get() == 0 {
            let Ok(bell) = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK) else { return };
            let bell = hidden::keep(bell);
            self.bell.put(bell.cast_unsigned() + 1);
            self.tagged.put(1);
            register_bell(self.borrow(), bell);
        }
        let _ = rustix::io::write(sys::borrow(self.bell.get().cast_signed() - 1), &1u64.to_ne_bytes());
    }

    /// A thread outside is about to ask the kernel whether the set is readable. The kernel's set also holds edges of ours with no event
    /// behind them. They are consumed first, if they can be told from the program's events without taking those away.
    pub(super) fn freshen(&self) {
        if self.tagged.get() == 0 {
            return;
        }
        // Level-triggered events are reported again.
        let is_reported_again = |number| {
            let r = reg::get(number);
            r.is(reg::RING) || r.events.get() & (ET | ONESHOT) == 0
        };
        let all_are = self.hold().is_some_and(|_held| self.all.iter().all(is_reported_again));
        if self.strangers.get() == 0 && all_are {
            self.note_all();
        } else {
            self.note(Tag::Bell, 0);
        }
        self.leave();
    }

    #[expect(unsafe_code, reason = "the C library's call")]
    fn note_all(&self) {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; 16];
        for _ in 0..64 {
            let fd = std::os::fd::AsRawFd::as_raw_fd(&self.borrow());
            // SAFETY: an array of 16 entries.
            let n = unsafe { crate::real::epoll_wait(fd, events.as_mut_ptr(), 16, 0) };
            let Ok(n) = usize::try_from(n) else { return };
            for event in &events[..n] {
                if let Some(tag) = Tag::of(event.u64) {
                    self.note(tag, event.events);
                }
            }
            if n < events.len() {
                return;
            }
        }
    }

    /// The set is watched from outside from here on.
    pub(super) fn nest(&self) {
        if self.nested.swap(1, Ordering::SeqCst) == 0 {
            self.give_datagrams_up();
            self.leave();
        }
    }
}
