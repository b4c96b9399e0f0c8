//! Registrations of a set, between the program's own and ours in the kernel. The lock of the set is held in all of this.

use super::mask::{self, ET, EXCLUSIVE, IN, OUT, PRI, RDHUP};
use super::registration::{self as reg, FRESH, GONE, HEARS_ROOM, LINKED, RING, SPENT, SetRegistration};
use super::set::{MANY, Set};
use super::tag::Tag;
use super::word::AtomicWord;
use crate::conn::Conn;
use crate::local::longest_sleep;
use crate::{sys, watched};
use partywall_shm::half::{Fenced, SecondLook};
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use std::ffi::c_int;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// The events registered for a socket, and [`ROOM`] in addition once the program has asked for it.
const SOCKET: EventFlags = EventFlags::from_bits_retain(IN & 0xf | PRI | RDHUP | ET);
const ROOM: EventFlags = EventFlags::OUT;
/// And for a link.
const LINK: EventFlags = EventFlags::IN.union(EventFlags::ET);

/// A change of one descriptor's registration in the kernel's set.
enum SetChange {
    Add,
    Modify,
}

fn wanted_of(r: &SetRegistration) -> EventFlags {
    if r.events.get() & OUT != 0 { SOCKET.union(ROOM) } else { SOCKET }
}

fn register(set: BorrowedFd<'_>, fd: c_int, tag: u64, flags: EventFlags, change: &SetChange) -> Result<(), Errno> {
    let (fd, data) = (sys::borrow(fd), EventData::new_u64(tag));
    match change {
        SetChange::Add => epoll::add(set, fd, data, flags),
        SetChange::Modify => epoll::modify(set, fd, data, flags),
    }
}

/// Registers a set's bell.
pub(super) fn register_bell(set: BorrowedFd<'_>, bell: c_int) {
    let _ = register(set, bell, Tag::Bell.data(), EventFlags::IN, &SetChange::Add);
}

impl Set {
    /// Enters what the program has registered and the kernel has accepted.
    pub(super) fn remember(&self, conn: &Conn, fd: c_int, events: u32, data: u64) -> Option<u32> {
        let number = reg::allocate(conn, fd, self.number())?;
        let r = reg::get(number);
        r.events.put(events);
        r.data.put(data);
        self.all.insert(number);
        Some(number)
    }

    /// Forgets a registration, whatever the kernel has of it.
    pub(super) fn forget(&self, number: u32) {
        let r = reg::get(number);
        self.cool(number);
        if r.is(RING) {
            // EDGE set-rings: releases that the kernel has the registration as the program made it; acquired in `Set::has_own_sources`.
            self.rings.fetch_sub(1, Ordering::Release);
        }
        self.all.remove(number);
        reg::free(number);
    }

    pub(super) fn heat(&self, number: u32) {
        let r = reg::get(number);
        if !r.is(reg::HOT | SPENT | GONE) {
            r.raise(reg::HOT);
            self.untold(r);
            self.hot.insert(number);
        }
    }

    /// It is active, but was not part of the latest answer.
    pub(super) fn untold(&self, r: &SetRegistration) {
        r.active.put(self.answers.get().wrapping_sub(2));
    }

    pub(super) fn cool(&self, number: u32) {
        let r = reg::get(number);
        if r.is(reg::HOT) {
            r.lower(reg::HOT);
            self.hot.remove(number);
        }
    }

    /// Has the next scan look at those whose peer rings by interrupts, because an interrupt may be lost (protocol I6): whenever half of the
    /// time of the longest sleep has passed, whatever the set has reported meanwhile.
    #[inline]
    pub(super) fn heat_interrupted(&self) {
        if let Some(late) = longest_sleep() {
            self.heat_interrupted_after(late / 2);
        }
    }

    #[cold]
    fn heat_interrupted_after(&self, pause: Duration) {
        let now = sys::coarse_millis();
        if u128::from(now.wrapping_sub(self.looked_for_lost.get())) < pause.as_millis() {
            return;
        }
        let Some(_held) = self.hold() else { return };
        self.looked_for_lost.put(now);
        let is_rung_so = |&number: &u32| reg::get(number).conn().is_some_and(|conn| conn.bell().is_interrupt());
        self.all
            .iter()
            .filter(|&number| reg::get(number).is(LINKED))
            .filter(is_rung_so)
            .for_each(|number| self.heat(number));
    }

    /// Looks again at a member that was armed before the fence. If it has nothing, and its peer will ring, no scan looks at it any more.
    pub(super) fn cool_if_quiet(&self, fenced: Fenced<()>, number: u32) {
        let r = reg::get(number);
        let look = fenced.look(|| (self.look(number, false) != 0).then_some(()));
        if let SecondLook::Nothing(quiet) = look
            && quiet.is_armed(|()| r.conn().is_none_or(|conn| r.armed().is_in_force(conn)))
        {
            self.cool(number);
        }
    }

    /// From the program's own registration to ours, in the kernel. `false` if the kernel does not let us.
    pub(super) fn lift(&self, number: u32) -> bool {
        let r = reg::get(number);
        let Some(conn) = r.conn() else { return false };
        let (fd, tag) = (r.fd.get(), Tag::Socket(number).data());
        if !r.is(RING) {
            self.tagged.put(1);
            let changed = if r.events.get() & EXCLUSIVE != 0 {
                // The kernel does not let those be modified.
                let _ = epoll::delete(self.borrow(), sys::borrow(fd));
                register(self.borrow(), fd, tag, wanted_of(r), &SetChange::Add)
            } else {
                register(self.borrow(), fd, tag, wanted_of(r), &SetChange::Modify)
            };
            if changed.is_err() {
                return false;
            }
            self.begin(number, conn);
        }
        if conn.bell().fd() < 0 {
            // One-shot, and without a ring yet.
            return !conn.is_up();
        }
        let linked = self.link(number, conn);
        r.note_armed(conn, super::arm(conn, mask::interest(r.events.get())));
        if self.hot.len() > MANY {
            // Enough to look at: this one is to ring.
            self.cool_if_quiet(Fenced::after(()), number);
        }
        linked
    }

    /// Registers a connection under our tag from the beginning.
    pub(super) fn add_ring(&self, number: u32, conn: &Conn) -> Result<(), Errno> {
        let r = reg::get(number);
        self.tagged.put(1);
        register(self.borrow(), r.fd.get(), Tag::Socket(number).data(), wanted_of(r), &SetChange::Add)?;
        self.begin(number, conn);
        r.raise(FRESH);
        Ok(())
    }

    /// Makes the kernel report room to write as well from now on. It does so only where room was lacking.
    pub(super) fn hear_of_room(&self, number: u32) {
        let r = reg::get(number);
        if !r.is(HEARS_ROOM) {
            let tag = Tag::Socket(number).data();
            let _ = register(self.borrow(), r.fd.get(), tag, SOCKET.union(ROOM), &SetChange::Modify);
            r.raise(HEARS_ROOM);
        }
    }

    /// Registers the link of a connection.
    fn link(&self, number: u32, conn: &Conn) -> bool {
        if conn.bell().fd() < 0 {
            return false;
        }
        let hears = |fd| match register(self.borrow(), fd, Tag::Link(number).data(), LINK, &SetChange::Add) {
            // By another descriptor of the connection, or by a registration that was forgotten: it is to name this one.
            Err(Errno::EXIST) => self.name_link(fd, number),
            other => other.is_ok(),
        };
        if !conn.bell().listening().all(hears) {
            return false;
        }
        reg::get(number).raise(LINKED);
        true
    }

    /// Has the events of a registered link name this registration. An event that the link has had already is reported again.
    fn name_link(&self, link: c_int, number: u32) -> bool {
        register(self.borrow(), link, Tag::Link(number).data(), LINK, &SetChange::Modify).is_ok()
    }

    /// The kernel has it under our tag.
    fn begin(&self, number: u32, conn: &Conn) {
        let r = reg::get(number);
        r.raise(if r.events.get() & OUT != 0 { RING | HEARS_ROOM } else { RING });
        r.kernel.put(0);
        r.edge.put(0);
        r.rx_told.put(conn.look().rx_mark());
        r.tx_told.put(conn.look().tx_mark());
        // This comes before the caller looks for sleepers; a thread that falls asleep looks here afterwards.
        self.rings.fetch_add(1, Ordering::SeqCst);
        self.heat(number);
    }

    /// Back to the program's own registration.
    fn lower(&self, number: u32) {
        let r = reg::get(number);
        let (fd, flags) = (r.fd.get(), EventFlags::from_bits_retain(r.events.get()));
        let is_its = Conn::of(fd).is_some_and(|c| r.conn().is_some_and(|own| std::ptr::eq(c, own)));
        if r.is(GONE) {
            self.unregister(number);
            self.forget(number);
        } else if is_its && !r.is(SPENT) {
            if r.events.get() & EXCLUSIVE != 0 {
                let _ = epoll::delete(self.borrow(), sys::borrow(fd));
                let _ = register(self.borrow(), fd, r.data.get(), flags, &SetChange::Add);
            } else {
                let _ = register(self.borrow(), fd, r.data.get(), flags, &SetChange::Modify);
            }
            self.unlink(number);
            self.cool(number);
            r.lower(RING | HEARS_ROOM);
            // EDGE set-rings: releases that the kernel has the registration as the program made it; acquired in `Set::has_own_sources`.
            self.rings.fetch_sub(1, Ordering::Release);
        }
    }

    pub(super) fn unlink(&self, number: u32) {
        let r = reg::get(number);
        if r.is(LINKED) {
            r.lower(LINKED);
            if let Some(conn) = r.conn() {
                // The link is registered once for all descriptors of the connection.
                let heir = reg::search(conn, |r| r.set.get() == self.number() + 1 && r.is(LINKED));
                for fd in conn.bell().listening() {
                    if !heir.is_some_and(|(heir, _)| self.name_link(fd, heir)) {
                        let _ = epoll::delete(self.borrow(), sys::borrow(fd));
                    }
                }
            }
            if self.sleepers.load(Ordering::SeqCst) != 0 {
                // It may have been rung for others too, and that bell goes with it.
                self.ring();
            }
        }
    }

    /// Takes it out of the kernel's set.
    pub(super) fn unregister(&self, number: u32) {
        let r = reg::get(number);
        let _ = epoll::delete(self.borrow(), sys::borrow(r.fd.get()));
        self.unlink(number);
    }

    /// A connection has got its ring: registers it as ours.
    pub(super) fn lift_all_of(&self, conn: &'static Conn) -> bool {
        let number = self.number();
        let mut well = true;
        loop {
            let Some(_held) = self.hold() else { return false };
            let plain = |r: &SetRegistration| r.set.get() == number + 1 && !r.is(LINKED);
            let Some((found, _)) = reg::search(conn, plain) else { break };
            if !self.lift(found) {
                well = false;
                break;
            }
        }
        if self.is_watched() {
            self.leave();
        }
        well
    }

    /// A connection's registration in this set is to be forgotten, as its last descriptor is being closed.
    ///
    /// `false` in a signal handler that has interrupted a holder.
    pub(super) fn forget_one_of(&self, conn: &Conn) -> bool {
        let number = self.number();
        let Some(_held) = self.hold() else { return false };
        if let Some((found, _)) = reg::search(conn, |r| r.set.get() == number + 1) {
            // A socket that is open elsewhere stays in the kernel's set when it is closed here, and its end would be reported under a
            // number that may be another connection's by then. But a set that other processes made is theirs to change.
            if self.is_own() && reg::get(found).is(RING) {
                self.unregister(found);
            }
            self.forget(found);
        }
        true
    }

    /// The kernel has disconnected a connection's socket, which stays open: a registration of it in this set is the program's own from here
    /// on, and no connection's.
    ///
    /// `false` in a signal handler that has interrupted a holder.
    pub(super) fn release_one_of(&self, conn: &Conn) -> bool {
        let Some(_held) = self.hold() else { return false };
        let Some((found, _)) = reg::search(conn, |r| r.set.get() == self.number() + 1) else { return true };
        let r = reg::get(found);
        if r.is(GONE) {
            self.unregister(found);
        } else {
            if r.is(SPENT) {
                self.lower_spent(found);
            } else if r.is(RING) {
                self.lower(found);
            }
            self.strangers.fetch_add(1, Ordering::Relaxed);
            watched::watch(r.fd.get());
        }
        self.forget(found);
        true
    }

    /// A connection's registration in this set is another one's from here on, which has no ring yet and stands for the same socket. The
    /// kernel keeps what it has of the socket, so that no event of it is lost, and loses the link.
    ///
    /// `false` in a signal handler that has interrupted a holder.
    pub(super) fn move_one_of(&self, old: &Conn, new: &'static Conn) -> bool {
        let number = self.number();
        let Some(held) = self.hold() else { return false };
        let Some((found, _)) = reg::search(old, |r| r.set.get() == number + 1) else { return true };
        let r = reg::get(found);
        if r.is(GONE) {
            self.unregister(found);
            self.forget(found);
            return true;
        }
        self.unlink(found);
        if !reg::move_to(found, old, new) {
            return false;
        }
        // The cursors of the next ring begin at 0.
        r.rx_told.put(0);
        r.tx_told.put(0);
        r.ends.put(0);
        r.kernel.put(mask::ALL);
        if r.is(RING) {
            // Whatever is ready is news: an edge may be reported twice, but is never lost.
            r.raise(FRESH);
            self.heat(found);
        }
        drop(held);
        if self.is_watched() {
            self.leave();
        }
        true
    }

    /// Every connection in it is the kernel's from here on.
    pub(super) fn lower_all(&self) {
        let Some(_held) = self.hold() else { return };
        for number in self.all.iter() {
            if reg::get(number).is(RING) {
                self.lower(number);
            }
        }
    }

    /// Leaves nothing under our tags in the kernel's set, since a thread that waits in it from here on would get them. After
    /// [`Set::lower_all`] those are the bell and what was told once.
    pub(super) fn leave_to_stranger(&self) {
        let Some(_held) = self.hold() else { return };
        for number in self.all.iter() {
            self.lower_spent(number);
        }
        self.discard_bell();
    }

    /// Back to the program's own registration, of one that was told once.
    fn lower_spent(&self, number: u32) {
        let r = reg::get(number);
        if r.is(RING) && r.is(SPENT) {
            // The kernel has no call that makes a registration which was told once. This one may tell of an end.
            let flags = EventFlags::ET | EventFlags::ONESHOT;
            let _ = register(self.borrow(), r.fd.get(), r.data.get(), flags, &SetChange::Modify);
            self.unlink(number);
            r.lower(RING | HEARS_ROOM);
            // EDGE set-rings: releases that the kernel has the registration as the program made it; acquired in `Set::has_own_sources`.
            self.rings.fetch_sub(1, Ordering::Release);
        }
    }

    /// The connections in it that are ours to look after.
    pub(super) fn first_ring(&self, wanted: impl Fn(&'static Conn) -> bool) -> Option<&'static Conn> {
        let _held = self.hold()?;
        self.all.iter().filter(|&n| reg::get(n).is(RING)).filter_map(|n| reg::get(n).conn()).find(|c| wanted(c))
    }
}
