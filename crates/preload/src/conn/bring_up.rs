//! From the offer of a ring to both directions being attached.
//!
//! ```text
//!   connecting side               broker                accepting side
//!        | -- Offer: socket, region ------->|                        |
//!        |<---------------- bells ----------|                        |
//!        |                                  | directory: an offer    |
//!        |                                  |<- Take: socket, region |
//!        |<-------------- a bell -----------|-- bells -------------->|
//!        | -- Confirm: socket ------------->|                        |
//!        |<---------------- its region -----|-- a bell ------------->|
//!        |                                  |<------ Finish: socket -|
//!        |                                  |-- its region --------->| attaches, is WATCHING
//!        | sees that, attaches, is WATCHING |                        |
//! ```
//!
//! Nobody waits for anybody: each side looks on its next call. No byte changes its way by this; that is for the senders, later.
//! The broker reads a socket only while no thread of ours is in the kernel with it ([`Conn::is_quiet`]): what it does to read the
//! connection's numbers would make such a thread's call fail.

use super::rx::ConnRx;
use super::tx::ConnTx;
use super::waiters::waiters;
use super::{Conn, ConnStage, Pages, flags};
use crate::broker::BegunHandshake;
use crate::log::log;
use crate::{broker, hidden, process, sys, unseen};
use partywall_protocol::upgrade::Upgrade;
use partywall_protocol::wire::Located;
use partywall_region::RegionOptions;
use partywall_region::bell::{self, Heard};
use partywall_shm::layout::{Geometry, PAGE, RegionKind, path_flags};
use partywall_shm::status::{Reason, Role};
use partywall_shm::sync::load_acquire_u32;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ffi::c_int;
use std::sync::atomic::Ordering;

/// Larger rings of a peer than this are not mapped.
const MAX_PEER_RING: u64 = 64 << 20;
/// The stages of an offer: waiting for the other side; the broker has rung, and it is our turn; the connecting side has confirmed, and
/// waits for the peer to watch its ring; no process answers any more.
const WAITS: u32 = 0;
const HEARD: u32 = 1;
const CONFIRMED: u32 = 2;
const GONE: u32 = 3;

/// Whether a reason passes.
const fn may_try_again(reason: Reason) -> bool {
    use Reason::{BrokerAbsent, MovesNever, NoPeer, NotTaken, ProgramNotListed, Resources, Shared};
    matches!(reason, BrokerAbsent | Resources | NotTaken | NoPeer | MovesNever | ProgramNotListed | Shared)
}

/// Whether a reason may pass with another policy, or with another broker, which may have more rights. `judge_again` makes the next
/// attempt then.
const fn may_pass_with_policy(reason: Reason) -> bool {
    matches!(reason, Reason::Refused | Reason::Ambiguous)
}

impl Conn {
    /// The connecting side's first step.
    #[cold]
    pub(super) fn offer(&'static self, fd: c_int) {
        let Some(_held) = self.tx.try_hold() else { return };
        if !self.may_step(fd, ConnStage::Candidate) {
            return;
        }
        if !self.is_quiet() {
            self.ring_path.set_stage(ConnStage::Candidate);
            return;
        }
        match self.make_offer(fd) {
            Ok(()) => {
                self.ring_path.because(Reason::NotTaken);
                self.set_stage(ConnStage::Offered);
                log!("offered fd {fd}");
            }
            Err(reason) => {
                self.local().own.vacate();
                self.ring_path.set_stage(ConnStage::Candidate);
                self.put_off(reason);
            }
        }
    }

    fn make_offer(&self, fd: c_int) -> Result<(), Reason> {
        if !waiters().may_come_up(self) {
            // Until the program arms it again.
            return Err(Reason::BrokerAbsent);
        }
        self.may_be_handed_over(fd)?;
        match self.is_accounted_for(fd) {
            Some(true) => {}
            Some(false) => return Err(Reason::RawCalls),
            // Bytes come just now, or it ends.
            None => return Err(Reason::BrokerAbsent),
        }
        self.know_own_address(fd);
        self.note_neighbour(None);
        self.show_with_region(|geometry, memory, move_to| broker::offer(fd, geometry, memory, move_to))
    }

    /// Makes our region, and shows it to the broker with the socket by `show`: in separate memory at first, and if the other end turns out to be
    /// on another machine, at the place of a window that the broker says.
    fn show_with_region(
        &self,
        show: impl FnOnce(
            Geometry,
            BorrowedFd<'_>,
            &mut dyn FnMut(u64, BorrowedFd<'_>) -> Result<(), Reason>,
        ) -> Result<BegunHandshake, Reason>,
    ) -> Result<(), Reason> {
        self.ring_path.set_flag(flags::FAR, false);
        let (region, geometry) = self.make_region()?;
        let options = RegionOptions { kind: RegionKind::Socket, ..RegionOptions::endpoint(geometry.ring_size()) };
        let mut move_to = |base: u64, window: BorrowedFd<'_>| {
            self.local().own.create_in(window, base, &options).map_err(|_| Reason::Resources)?;
            self.ring_path.set_flag(flags::FAR, true);
            Ok(())
        };
        let BegunHandshake { number, bell } = show(geometry, region.as_fd(), &mut move_to)?;
        // A region in a window is of no use to a later broker, which has other windows.
        let kept = (!self.has(flags::FAR)).then_some(region);
        self.enter_handshake(number, bell, kept)
    }

    /// The broker has an offer or a take of ours, by this number. The memory of the region is kept, to be shown to a later broker.
    fn enter_handshake(&self, channel: u64, bell: OwnedFd, region: Option<OwnedFd>) -> Result<(), Reason> {
        let local = self.local();
        if !local.bell.keep(bell) {
            broker::cancel(channel);
            return Err(Reason::Resources);
        }
        self.local().channel.store(channel, Ordering::Relaxed);
        self.ring_path.shown.store(WAITS, Ordering::Relaxed);
        self.moves.looks_for_answer.store(0, Ordering::Relaxed);
        if let Some(region) = region {
            local.keep_memory(region);
        }
        Ok(())
    }

    /// Whether the broker may have the socket for a moment.
    fn may_be_handed_over(&self, fd: c_int) -> Result<(), Reason> {
        if self.identity.holders.has_others(process::kernel_pid()) {
            return Err(Reason::Shared);
        }
        if !hidden::are_plenty(sys::borrow(fd)) {
            // The program needs the numbers itself.
            return Err(Reason::Resources);
        }
        if unseen::may_be() {
            return Err(Reason::RawCalls);
        }
        // The last process that closes the socket would linger then, and that could be the broker.
        match rustix::net::sockopt::socket_linger(sys::borrow(fd)) {
            Ok(None) => Ok(()),
            Ok(Some(_)) => Err(Reason::Option),
            Err(_) => Err(Reason::Resources),
        }
    }

    pub(super) fn make_region(&self) -> Result<(OwnedFd, Geometry), Reason> {
        let size = self.local().planned_ring.load(Ordering::Relaxed);
        let options = RegionOptions { kind: RegionKind::Socket, ..RegionOptions::endpoint(size) };
        let geometry = Geometry::new(PAGE, size).map_err(|_| Reason::Resources)?;
        let region = self.local().own.create(&options).map_err(|_| Reason::Resources)?;
        Ok((region, geometry))
    }

    /// Not now; and if that is permanent, not at all.
    pub(super) fn put_off(&self, reason: Reason) {
        if reason == Reason::BrokerAbsent && broker::directory().is_some() {
            // It is there, but another thread speaks to it just now, or the socket did not hold still.
            self.moves.try_again_soon();
            return;
        }
        log!("no ring for fd {}: {}", self.fd(), reason.words());
        self.ring_path.because(reason);
        if may_try_again(reason) {
            self.moves.try_again_later();
            self.set_stage(ConnStage::Candidate);
        } else if may_pass_with_policy(reason) {
            self.wait_for_policy();
        } else {
            self.set_stage(ConnStage::Tcp);
        }
    }

    /// The next attempt comes with the next policy. The sending direction is held.
    fn wait_for_policy(&self) {
        self.moves.set_due(Upgrade::Never);
        self.set_stage(ConnStage::Candidate);
    }

    /// The further steps of both sides: is it our turn?
    #[inline]
    pub(super) fn look_for_answer(&'static self, fd: c_int) {
        if self.moves.is_to_look() {
            self.look_at_bell(fd);
        }
    }

    #[cold]
    fn look_at_bell(&'static self, fd: c_int) {
        let (Some(mut tx), Some(mut rx)) = (self.tx.try_hold(), self.rx.try_hold()) else { return };
        if !self.may_step(fd, ConnStage::Offered) {
            return;
        }
        // Before the bell is taken: it comes once.
        if !self.is_quiet() || !self.is_our_turn() {
            self.ring_path.set_stage(ConnStage::Offered);
            return;
        }
        let result = match (self.ring_path.shown.load(Ordering::Relaxed), self.role()) {
            (GONE, _) => Err(Reason::NotTaken),
            (CONFIRMED, _) => self.begin(fd, &mut tx, &mut rx),
            (_, Role::Accepting) => self.finish(fd, &mut tx, &mut rx),
            _ => self.confirm(fd),
        };
        let Err(reason) = result else { return };
        if reason == Reason::BrokerAbsent && broker::directory().is_some() {
            // Another thread speaks to it just now.
            self.ring_path.set_stage(ConnStage::Offered);
            return;
        }
        self.withdraw(reason);
        if may_try_again(reason) {
            match self.role() {
                Role::Accepting => self.set_stage(ConnStage::Candidate),
                _ => self.put_off(reason),
            }
        } else if may_pass_with_policy(reason) {
            self.wait_for_policy();
        }
    }

    /// Whether there is something to be done: the broker has rung, or the peer watches its ring, or is gone.
    fn is_our_turn(&self) -> bool {
        let shown = self.ring_path.shown.load(Ordering::Relaxed);
        let watches = || {
            // EDGE watching (protocol T7): acquires from the peer's `Conn::watch`; its region is set up.
            let flags = |p: Pages| load_acquire_u32(&p.peer.rx_path.flags);
            self.pages().is_some_and(|p| flags(p) & path_flags::WATCHING != 0)
        };
        if shown == HEARD || shown == CONFIRMED && watches() {
            return true;
        }
        let link = self.link();
        let heard = if link < 0 { Heard::Gone } else { bell::hear(sys::borrow(link)) };
        match heard {
            Heard::Nothing => return false,
            // Confirmed, it waits for the peer's memory to say so.
            Heard::Bell if shown == CONFIRMED => return false,
            Heard::Bell => self.ring_path.shown.store(HEARD, Ordering::Relaxed),
            Heard::Gone => self.ring_path.shown.store(GONE, Ordering::Relaxed),
        }
        true
    }

    /// The connecting side shows its socket once more, and maps the peer's region.
    fn confirm(&'static self, fd: c_int) -> Result<(), Reason> {
        self.may_be_handed_over(fd)?;
        let peer = broker::confirm(fd, self.channel())?;
        self.map_peer(peer.region.as_fd(), peer.place)?;
        self.ring_path.shown.store(CONFIRMED, Ordering::Relaxed);
        self.moves.looks_for_answer.store(0, Ordering::Relaxed);
        self.ring_path.set_stage(ConnStage::Offered);
        Ok(())
    }

    /// The accepting side shows its socket once more, and has its ring.
    fn finish(&'static self, fd: c_int, tx: &mut ConnTx, rx: &mut ConnRx) -> Result<(), Reason> {
        self.may_be_handed_over(fd)?;
        let peer = broker::finish(fd, self.channel())?;
        self.note_neighbour(Some(peer.pid));
        self.attach(fd, tx, rx, peer.region.as_fd(), peer.place)
    }

    /// The accepting side's first step.
    #[cold]
    pub(super) fn look_for_offer(&'static self, fd: c_int, generation: u64) {
        self.know_own_address(fd);
        let (local, peer) = self.identity.addresses();
        self.moves.offers_seen.store(generation, Ordering::Relaxed);
        if !broker::knows_offer(fd, local, peer) {
            return;
        }
        let Some(_held) = self.tx.try_hold() else { return };
        if !self.may_step(fd, ConnStage::Candidate) {
            return;
        }
        if !self.is_quiet() {
            self.ring_path.set_stage(ConnStage::Candidate);
            // To be looked at again on the next call.
            self.moves.offers_seen.store(generation.wrapping_sub(1), Ordering::Relaxed);
            return;
        }
        match self.take(fd) {
            Ok(()) => {
                self.ring_path.because(Reason::NotTaken);
                self.set_stage(ConnStage::Offered);
            }
            Err(reason) => {
                self.withdraw(reason);
                if may_try_again(reason) {
                    self.set_stage(ConnStage::Candidate);
                } else if may_pass_with_policy(reason) {
                    self.wait_for_policy();
                }
                if matches!(reason, Reason::BrokerAbsent | Reason::Shared) {
                    // The offer stands, and no other will be made.
                    self.moves.offers_seen.store(generation.wrapping_sub(1), Ordering::Relaxed);
                    self.moves.try_again_soon();
                }
            }
        }
    }

    fn take(&'static self, fd: c_int) -> Result<(), Reason> {
        self.may_be_handed_over(fd)?;
        match self.is_accounted_for(fd) {
            Some(true) => {}
            Some(false) => return Err(Reason::RawCalls),
            None => return Err(Reason::TooShort),
        }
        self.show_with_region(|geometry, memory, move_to| broker::take(fd, geometry, memory, move_to))
    }

    /// Whether the step from this stage may be taken, with this descriptor. The sending direction is held.
    ///
    /// A thread that closes the descriptor takes it out of the table before it takes the direction. So a step that begins now ends before
    /// that thread looks at the stage, and none begins later.
    fn may_step(&self, fd: c_int, from: ConnStage) -> bool {
        self.ring_path.stage() == from && self.is_of(fd)
    }

    /// No other thread is in the kernel with this connection, and none gets there until the stage is set again.
    pub(super) fn is_quiet(&self) -> bool {
        self.ring_path.set_stage(ConnStage::Attaching);
        self.kernel.is_quiet()
    }

    pub(super) fn attach(
        &'static self,
        fd: c_int,
        tx: &mut ConnTx,
        rx: &mut ConnRx,
        memory: BorrowedFd<'_>,
        place: (Located, Geometry),
    ) -> Result<(), Reason> {
        self.map_peer(memory, place)?;
        self.begin(fd, tx, rx)
    }

    fn map_peer(&self, memory: BorrowedFd<'_>, (located, geometry): (Located, Geometry)) -> Result<(), Reason> {
        if geometry.ring_size() > MAX_PEER_RING || geometry.ring_size() == 0 {
            return Err(Reason::Corrupt);
        }
        let (peer, kind) = (&self.local().peer, RegionKind::Socket);
        let attached = match located {
            // Each side's region is where the other's is: both in windows or neither.
            Located::OwnMemory if !self.has(flags::FAR) => peer.attach(memory, kind, geometry),
            Located::Window { base } if self.has(flags::FAR) => peer.attach_in(memory, base, kind, geometry),
            _ => return Err(Reason::Corrupt),
        };
        attached.map(drop).map_err(|_| Reason::Corrupt)
    }

    /// Both regions are mapped: the stage is what they are for.
    fn begin(&'static self, fd: c_int, tx: &mut ConnTx, rx: &mut ConnRx) -> Result<(), Reason> {
        match self.is_accounted_for(fd) {
            Some(true) => {}
            Some(false) => return Err(Reason::RawCalls),
            None => return Err(Reason::TooShort),
        }
        let local = self.local();
        local.held.reset();
        *tx = ConnTx::new(local.own.ring_size(), self.tx.counted.load(Ordering::Relaxed));
        *rx = ConnRx::new(local.peer.ring_size(), self.rx.counted.load(Ordering::Relaxed));
        self.learn_options(fd);
        if !self.has(flags::WANT_TCP) {
            self.ring_path.because(Reason::None);
        }
        // It may have changed since the offer.
        self.moves.judge_later();
        self.kernel.said.store(0, Ordering::Relaxed);
        self.moves.looks_for_answer.store(0, Ordering::Relaxed);
        self.set_stage(ConnStage::Attached);
        // A thread that waits for several descriptors learns of the link before the first byte can come by the ring.
        let all_are_notified = waiters().brought_up(self);
        if !all_are_notified || self.has(flags::WANT_TCP) {
            // Then none comes by the ring.
            let reason = if all_are_notified { self.ring_path.reason() } else { Reason::Shared };
            self.ask_for_tcp(reason, false);
            return Ok(());
        }
        if let Some(pages) = self.pages() {
            pages.watch();
        }
        log!("fd {fd} has a ring: {} bytes out, {} in", local.own.ring_size(), local.peer.ring_size());
        Ok(())
    }

    /// Gives back what an attempt has made, and stays on TCP.
    pub(super) fn withdraw(&self, reason: Reason) {
        log!("no ring for fd {}: {}", self.fd(), reason.words());
        let channel = self.local().channel.swap(0, Ordering::Relaxed);
        if channel != 0 {
            broker::cancel(channel);
        }
        let local = self.local();
        local.bell.discard();
        local.discard_memory();
        local.own.vacate();
        local.peer.vacate();
        self.ring_path.because(reason);
        self.set_stage(ConnStage::Tcp);
    }

    /// The policy says never by now. Should the peer have taken the offer already, its ring is attached all the same, and then left:
    /// the peer would have one that leads nowhere.
    pub(super) fn take_offer_back(&self, reason: Reason) {
        let Some(_held) = self.tx.try_hold() else {
            self.moves.judge_later();
            return;
        };
        if self.ring_path.stage() == ConnStage::Offered && broker::cancel_untaken(self.channel()) {
            self.local().channel.store(0, Ordering::Relaxed);
            self.withdraw(reason);
            self.moves.set_due(Upgrade::Never);
            self.set_stage(ConnStage::Candidate);
        }
    }

    /// As if the broker had confirmed its offer, with this region of the peer's. The next call attaches the ring.
    #[cfg(test)]
    pub(super) fn be_confirmed(&self, region: BorrowedFd<'_>, geometry: Geometry) {
        self.map_peer(region, (Located::OwnMemory, geometry)).unwrap();
        self.ring_path.shown.store(CONFIRMED, Ordering::Relaxed);
        self.set_stage(ConnStage::Offered);
    }
}

impl Pages<'_> {
    /// Lets the peer use its ring.
    pub(super) fn watch(&self) {
        // EDGE watching (protocol T7): releases the region and its wishes; acquired in the peer's `is_our_turn`, and in `Sender::ask`.
        self.own.rx_path.flags.fetch_or(path_flags::WATCHING, Ordering::Release);
    }
}
