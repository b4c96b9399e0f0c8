//! The program's changes of an epoll set: `epoll_ctl` for connections.

use super::mask::{self, ENDS, ET, EXCLUSIVE, IN, ONESHOT, OUT};
use super::registration::{self as reg, FRESH, GONE, RING, SPENT};
use super::set::Set;
use super::tag::Tag;
use super::word::AtomicWord;
use crate::conn::Conn;
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use std::ffi::c_int;

/// The events that the kernel allows beside `EPOLLEXCLUSIVE`.
const WITH_EXCLUSIVE: u32 = IN & 0xf | OUT & 0xf | ENDS | EventFlags::WAKEUP.bits() | ET | EXCLUSIVE;

/// Whether a connection may have a ring after what was done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stays {
    /// As it likes.
    Either,
    /// It is registered where we cannot look after it.
    OnTcp,
    /// Nothing was done: another connection has replaced it in the table.
    Replaced,
}

impl Set {
    /// `epoll_ctl` for a connection. `real` is the kernel's answer to the program's own arguments.
    ///
    /// # Errors
    /// As `epoll_ctl`; `Errno::from_raw_os_error(0)` never.
    pub(super) fn control(
        &self,
        operation: c_int,
        conn: &'static Conn,
        fd: c_int,
        event: Option<(u32, u64)>,
        real: impl Fn() -> Result<(), Errno>,
    ) -> Result<Stays, Errno> {
        let held = self.hold().ok_or(Errno::NOMEM)?;
        if conn.is_replaced_at(fd) {
            return Ok(Stays::Replaced);
        }
        let found = reg::find(conn, fd, self.number());
        let stays = match (operation, event, found) {
            (libc::EPOLL_CTL_ADD, Some((events, data)), _) => self.add(found, conn, fd, events, data, real)?,
            (libc::EPOLL_CTL_MOD, Some((events, data)), 1..) => self.modify(found, conn, events, data, real)?,
            (libc::EPOLL_CTL_DEL, _, 1..) => {
                self.delete(found, real)?;
                Stays::Either
            }
            _ => {
                real()?;
                Stays::Either
            }
        };
        drop(held);
        if operation != libc::EPOLL_CTL_DEL && self.is_watched() && self.rings.get() > 0 {
            self.leave();
        }
        Ok(stays)
    }

    fn add(
        &self,
        found: u32,
        conn: &'static Conn,
        fd: c_int,
        events: u32,
        data: u64,
        real: impl Fn() -> Result<(), Errno>,
    ) -> Result<Stays, Errno> {
        let r = reg::get(found);
        if found != 0 && !r.is(GONE) {
            // The kernel refuses the call itself. If it does not, the number was closed without our functions, and our entry is of
            // another socket.
            real()?;
            self.unlink(found);
            self.forget(found);
            return Ok(Stays::OnTcp);
        }
        if Tag::is_ours(data) || self.is_shared() {
            if found != 0 {
                self.unregister(found);
                self.forget(found);
            }
            real()?;
            return Ok(Stays::OnTcp);
        }
        if found != 0 {
            if events & EXCLUSIVE != 0 && events & !WITH_EXCLUSIVE != 0 {
                return Err(Errno::INVAL);
            }
            // The kernel has it still.
            r.lower(GONE);
            self.renew(found, conn, events, data);
            return Ok(Stays::Either);
        }
        if !conn.is_up() && events & ONESHOT == 0 {
            real()?;
            return Ok(match self.remember(conn, fd, events, data) {
                // The connection is up by now. Then it is unknown whether this thread or the one that lifts all registrations came first.
                Some(number) if conn.is_up() && !self.lift(number) => Stays::OnTcp,
                Some(_) => Stays::Either,
                None => Stays::OnTcp,
            });
        }
        // One-shot ones are ours from the beginning: that one was fired, the kernel would not tell.
        if events & EXCLUSIVE != 0 && events & !WITH_EXCLUSIVE != 0 {
            return Err(Errno::INVAL);
        }
        let Some(number) = self.remember(conn, fd, events, data) else {
            real()?;
            return Ok(Stays::OnTcp);
        };
        if let Err(error) = self.add_ring(number, conn) {
            self.forget(number);
            return Err(error);
        }
        Ok(if self.lift(number) { Stays::Either } else { Stays::OnTcp })
    }

    fn modify(
        &self,
        found: u32,
        conn: &'static Conn,
        events: u32,
        data: u64,
        real: impl Fn() -> Result<(), Errno>,
    ) -> Result<Stays, Errno> {
        let r = reg::get(found);
        if r.is(GONE) {
            return Err(Errno::NOENT);
        }
        if !r.is(RING) {
            let stays = if self.is_shared() || Tag::is_ours(data) { Stays::OnTcp } else { Stays::Either };
            let is_exclusive = (events | r.events.get()) & EXCLUSIVE != 0;
            if stays == Stays::Either && !is_exclusive && (conn.is_up() || events & ONESHOT != 0) {
                // One change in the kernel, from the program's registration to ours. Were it the program's in between, a thread that
                // waits already could be told of it, and then once more by us.
                let before = (r.events.get(), r.data.get());
                r.events.put(events);
                r.data.put(data);
                let lifted = self.lift(found);
                if r.is(RING) {
                    r.raise(FRESH);
                    return Ok(if lifted { Stays::Either } else { Stays::OnTcp });
                }
                r.events.put(before.0);
                r.data.put(before.1);
            }
            real()?;
            r.events.put(events);
            r.data.put(data);
            if stays == Stays::OnTcp || events & ONESHOT != 0 {
                return Ok(Stays::OnTcp);
            }
            // The connection can have come up since the look above. The thread that lifts all its registrations may wait for this set.
            let is_followed = !conn.is_up() || !is_exclusive && self.lift(found);
            return Ok(if is_followed { Stays::Either } else { Stays::OnTcp });
        }
        if (events | r.events.get()) & EXCLUSIVE != 0 {
            return Err(Errno::INVAL);
        }
        self.renew(found, conn, events, data);
        Ok(Stays::Either)
    }

    /// Takes out of the kernel's set what the program has taken out.
    pub(super) fn settle_removed(&self, conn: &Conn, fd: c_int) {
        let Some(_held) = self.hold() else { return };
        let found = reg::find(conn, fd, self.number());
        if found != 0 && reg::get(found).is(GONE) {
            self.unregister(found);
            self.forget(found);
        }
    }

    /// As new: whatever is ready is news.
    fn renew(&self, number: u32, conn: &Conn, events: u32, data: u64) {
        let r = reg::get(number);
        r.events.put(events);
        r.data.put(data);
        r.lower(SPENT);
        r.raise(FRESH);
        if events & OUT != 0 {
            self.hear_of_room(number);
        }
        // The kernel's events were recorded while it was in the set, but not those that came while it was taken out.
        r.kernel.put(mask::ALL);
        r.edge.put(0);
        r.tx_told.put(conn.look().tx_mark());
        self.untold(r);
        self.heat(number);
    }

    fn delete(&self, number: u32, real: impl Fn() -> Result<(), Errno>) -> Result<(), Errno> {
        let r = reg::get(number);
        if r.is(GONE) {
            return Err(Errno::NOENT);
        }
        if r.is(RING) && self.is_own() && self.nested.get() == 0 {
            // Programs take out what they put in again at once. The kernel's registration does no harm until then.
            r.raise(GONE);
            self.cool(number);
            return Ok(());
        }
        let result = real();
        if r.is(RING) {
            self.unlink(number);
        }
        if result.is_ok() || r.is(RING) {
            self.forget(number);
        }
        result
    }
}
