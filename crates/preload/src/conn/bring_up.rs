//! From the offer of a ring to both directions being attached.
//!
//! ```text
//!   connecting side               broker                accepting side
//!        | -- offer: socket, region, link ->|                      |
//!        |                                  | directory: an offer  |
//!        |                                  |<- take: socket, region --|
//!        |                                  |-- region, link ----->|
//!        |<============== attach: region, over the link ===========|
//! ```
//!
//! Nobody waits for anybody: each side looks on its next call. No byte changes its way by this; that is for the senders, later.

use super::rx::Rx;
use super::tx::Tx;
use super::{Conn, Stage};
use crate::log::log;
use crate::{broker, hidden, ready, sys};
use partywall_region::RegionOptions;
use partywall_shm::layout::{Geometry, PAGE, RegionKind, path_flags};
use partywall_shm::status::Reason;
use partywall_shm::upgrade::Upgrade;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketFlags, SocketType,
};
use std::ffi::c_int;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::sync::atomic::Ordering;

const ATTACH: usize = 32;
/// Larger rings of a peer than this are not mapped.
const MAX_PEER_RING: u64 = 64 << 20;
/// Looks for an answer on each call, so often; after that on every sixteenth.
const EAGER: u32 = 64;

/// Calls until the next attempt when another thread was in the way.
const SOON: u64 = 16;

/// Whether a reason passes.
const fn may_try_again(reason: Reason) -> bool {
    use Reason::{BrokerAbsent, NoPeer, NotTaken, PolicyNever, Resources, Shared};
    matches!(reason, BrokerAbsent | Resources | NotTaken | NoPeer | PolicyNever | Shared)
}

impl Conn {
    /// The connecting side's first step.
    #[cold]
    pub(super) fn offer(&'static self, fd: c_int) {
        let Some(_held) = self.tx.try_hold() else { return };
        if self.stage() != Stage::Candidate {
            return;
        }
        match self.make_offer(fd) {
            Ok(()) => {
                self.because(Reason::NotTaken);
                self.set_stage(Stage::Offered);
                log!("offered fd {fd}");
            }
            Err(reason) => self.put_off(reason),
        }
    }

    fn make_offer(&self, fd: c_int) -> Result<(), Reason> {
        self.may_be_handed_over(fd)?;
        self.know_own_address(fd);
        let (region, geometry) = self.make_region()?;
        let (mine, theirs) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
                .map_err(|_| Reason::Resources)?;
        let channel = broker::offer(fd, geometry, region.as_fd(), theirs.as_fd())?;
        self.channel.store(channel, Ordering::Relaxed);
        self.note_neighbour(None);
        let local = self.local();
        local.set_link(hidden::keep(mine));
        local.keep_memory(region);
        Ok(())
    }

    /// Whether the broker may have the socket for a moment.
    fn may_be_handed_over(&self, fd: c_int) -> Result<(), Reason> {
        if self.holders.has_others(sys::process()) {
            return Err(Reason::Shared);
        }
        if !hidden::are_plenty(sys::borrow(fd)) {
            // The program needs the numbers itself.
            return Err(Reason::Resources);
        }
        if ready::unseen::may_be() {
            return Err(Reason::RawCalls);
        }
        // What `close` does then would be for the last to close it, and that could be the broker.
        match rustix::net::sockopt::socket_linger(sys::borrow(fd)) {
            Ok(None) => Ok(()),
            Ok(Some(_)) => Err(Reason::Option),
            Err(_) => Err(Reason::Resources),
        }
    }

    pub(super) fn make_region(&self) -> Result<(OwnedFd, Geometry), Reason> {
        let size = self.ring_size.load(Ordering::Relaxed);
        let options = RegionOptions { kind: RegionKind::Socket, ..RegionOptions::endpoint(size) };
        let geometry = Geometry::new(PAGE, size).map_err(|_| Reason::Resources)?;
        let region = self.local().own.create(&options).map_err(|_| Reason::Resources)?;
        Ok((region, geometry))
    }

    /// Not now; and if it is for good, not at all.
    pub(super) fn put_off(&self, reason: Reason) {
        if reason == Reason::BrokerAbsent && broker::directory().is_some() {
            // It is there, but another thread speaks to it just now.
            self.try_again_soon();
            return;
        }
        log!("no ring for fd {}: {}", self.fd(), reason.words());
        self.because(reason);
        if may_try_again(reason) {
            // Ten times as many calls until the next attempt.
            let calls = u64::from(self.calls.load(Ordering::Relaxed)).max(100);
            self.due_calls.store(calls * 10, Ordering::Relaxed);
            self.due_bytes.store(u64::MAX, Ordering::Relaxed);
            self.set_stage(Stage::Candidate);
        } else {
            self.set_stage(Stage::Tcp);
        }
    }

    fn try_again_soon(&self) {
        let calls = u64::from(self.calls.load(Ordering::Relaxed));
        self.due_calls.store(calls + SOON, Ordering::Relaxed);
        self.due_bytes.store(u64::MAX, Ordering::Relaxed);
    }

    pub(super) fn because(&self, reason: Reason) {
        self.reason.store(reason as u32, Ordering::Relaxed);
    }

    /// The connecting side's second step: has the peer taken the offer?
    #[inline]
    pub(super) fn look_for_answer(&'static self, fd: c_int) {
        let looks = self.in_vain.load(Ordering::Relaxed).saturating_add(1);
        self.in_vain.store(looks, Ordering::Relaxed);
        if looks < EAGER || looks.is_multiple_of(16) {
            self.look_at_link(fd);
        }
    }

    #[cold]
    fn look_at_link(&'static self, fd: c_int) {
        let (Some(mut tx), Some(mut rx)) = (self.tx.try_hold(), self.rx.try_hold()) else { return };
        if self.stage() != Stage::Offered {
            return;
        }
        // Before the message is taken: it comes once.
        if !self.is_quiet() {
            self.go_on_as(Stage::Offered);
            return;
        }
        let result = receive_attach(sys::borrow(self.link()));
        let reason = match result {
            Err(Errno::AGAIN | Errno::INTR) => {
                self.go_on_as(Stage::Offered);
                return;
            }
            Ok(Some((region, geometry))) => match self.attach(fd, &mut tx, &mut rx, region.as_fd(), geometry) {
                Ok(()) => return,
                Err(reason) => reason,
            },
            Ok(None) => Reason::Corrupt,
            // The broker has dropped it, or is gone: the peer did not look in time. Or it has looked, and stays on TCP.
            Err(_) => Reason::NotTaken,
        };
        self.withdraw(reason);
        if may_try_again(reason) {
            self.put_off(reason);
        }
    }

    /// The accepting side's only step.
    #[cold]
    pub(super) fn look_for_offer(&'static self, fd: c_int, generation: u64) {
        self.know_own_address(fd);
        let (local, peer) = self.addresses();
        self.offers_seen.store(generation, Ordering::Relaxed);
        if !broker::knows_offer(fd, local, peer) {
            return;
        }
        let (Some(mut tx), Some(mut rx)) = (self.tx.try_hold(), self.rx.try_hold()) else { return };
        if self.stage() != Stage::Candidate {
            return;
        }
        if !self.is_quiet() {
            self.go_on_as(Stage::Candidate);
            // To be looked at again on the next call.
            self.offers_seen.store(generation.wrapping_sub(1), Ordering::Relaxed);
            return;
        }
        match self.take(fd, &mut tx, &mut rx) {
            Ok(()) => {}
            Err(reason) => {
                self.withdraw(reason);
                if may_try_again(reason) {
                    self.set_stage(Stage::Candidate);
                }
                if matches!(reason, Reason::BrokerAbsent | Reason::Shared) {
                    // The offer stands, and nobody will make another.
                    self.offers_seen.store(generation.wrapping_sub(1), Ordering::Relaxed);
                    self.try_again_soon();
                }
            }
        }
    }

    fn take(&'static self, fd: c_int, tx: &mut Tx, rx: &mut Rx) -> Result<(), Reason> {
        self.may_be_handed_over(fd)?;
        match self.is_accounted_for(fd) {
            Some(true) => {}
            Some(false) => return Err(Reason::RawCalls),
            None => return Err(Reason::TooShort),
        }
        let (region, geometry) = self.make_region()?;
        let taken = broker::take(fd, geometry, region.as_fd())?;
        self.channel.store(taken.channel, Ordering::Relaxed);
        self.note_neighbour(Some(taken.pid));
        let link = hidden::keep(taken.link);
        self.local().set_link(link);
        self.attach(fd, tx, rx, taken.region.as_fd(), taken.geometry)?;
        // From here on the peer may use its ring: everything on our side is in place.
        if send_attach(sys::borrow(link), geometry, region.as_fd()).is_err() {
            log!("the peer of fd {fd} went before it heard of the ring");
        }
        self.local().keep_memory(region);
        Ok(())
    }

    /// No other thread is in the kernel with this connection, and none gets there until the stage is set again.
    pub(super) fn is_quiet(&self) -> bool {
        self.stage.store(super::ATTACHING, Ordering::SeqCst);
        self.in_kernel.load(Ordering::SeqCst) == 0
    }

    /// After [`Conn::is_quiet`]: it stays what it was.
    fn go_on_as(&self, stage: Stage) {
        self.stage.store(stage as u32, Ordering::SeqCst);
    }

    pub(super) fn attach(
        &'static self,
        fd: c_int,
        tx: &mut Tx,
        rx: &mut Rx,
        region: BorrowedFd<'_>,
        geometry: Geometry,
    ) -> Result<(), Reason> {
        match self.is_accounted_for(fd) {
            Some(true) => {}
            Some(false) => return Err(Reason::RawCalls),
            None => return Err(Reason::TooShort),
        }
        if geometry.ring_size() > MAX_PEER_RING || geometry.ring_size() == 0 {
            return Err(Reason::Corrupt);
        }
        let local = self.local();
        local.peer.attach(region, RegionKind::Socket, geometry).map_err(|_| Reason::Corrupt)?;
        *tx = Tx::new(local.own.ring_size(), self.tx.counted.load(Ordering::Relaxed));
        *rx = Rx::new(geometry.ring_size(), self.rx.counted.load(Ordering::Relaxed));
        self.learn_options(fd);
        self.because(Reason::None);
        // It may have changed since the offer.
        self.judge_later();
        self.kernel_said.store(0, Ordering::Relaxed);
        self.in_vain.store(0, Ordering::Relaxed);
        self.set_stage(Stage::Attached);
        // Whoever waits for several descriptors learns of the link before the first byte can come by the ring.
        if !ready::brought_up(self) {
            // Somebody cannot be told: then none comes by the ring.
            self.stay_on_tcp(Reason::Shared);
            return Ok(());
        }
        self.watch();
        log!("fd {fd} has a ring: {} bytes out, {} in", local.own.ring_size(), geometry.ring_size());
        Ok(())
    }

    /// Lets the peer use its ring.
    pub(super) fn watch(&self) {
        if let Some(pages) = self.pages() {
            pages.own.rx_path.flags.fetch_or(path_flags::WATCHING, Ordering::Release);
        }
    }

    /// Gives back what an attempt has made, and stays on TCP.
    pub(super) fn withdraw(&self, reason: Reason) {
        log!("no ring for fd {}: {}", self.fd(), reason.words());
        let channel = self.channel.swap(0, Ordering::Relaxed);
        if channel != 0 {
            broker::cancel(channel);
        }
        let local = self.local();
        let link = local.link();
        if link >= 0 {
            local.set_link(-1);
            hidden::discard(link);
        }
        local.discard_memory();
        local.own.vacate();
        local.peer.vacate();
        self.because(reason);
        self.set_stage(Stage::Tcp);
    }

    /// Takes an offer back that nobody has taken yet.
    pub(super) fn cancel_offer(&self, reason: Reason) {
        if let Some(_held) = self.tx.try_hold()
            && self.stage() == Stage::Offered
        {
            self.withdraw(reason);
        }
    }

    /// The policy says never by now. Should the peer have taken the offer already, its ring is attached all the same, and then left:
    /// the peer would have one that leads nowhere.
    pub(super) fn take_offer_back(&self) {
        let Some(_held) = self.tx.try_hold() else {
            self.judge_later();
            return;
        };
        if self.stage() == Stage::Offered && broker::cancel_untaken(self.channel()) {
            self.channel.store(0, Ordering::Relaxed);
            self.withdraw(Reason::PolicyNever);
            self.set_due(Upgrade::Never);
            self.set_stage(Stage::Candidate);
        }
    }
}

/// The first thing on a link: the accepting side's region. `Ok(None)`: something else.
fn receive_attach(link: BorrowedFd<'_>) -> Result<Option<(OwnedFd, Geometry)>, Errno> {
    let mut message = [0u8; ATTACH];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let got = rustix::net::recvmsg(link, &mut [IoSliceMut::new(&mut message)], &mut control, flags)?;
    if got.bytes == 0 {
        return Err(Errno::PIPE);
    }
    let mut region = None;
    for one in control.drain() {
        if let RecvAncillaryMessage::ScmRights(mut rights) = one {
            region = rights.next();
        }
    }
    let word = |at: usize| message.get(at..at + 4).and_then(|b| b.try_into().ok()).map(u32::from_le_bytes);
    let long = |at: usize| message.get(at..at + 8).and_then(|b| b.try_into().ok()).map(u64::from_le_bytes);
    if got.bytes == ATTACH
        && (word(0), word(4), long(24)) == (Some(1), Some(0), Some(0))
        && let (Some(offset), Some(size), Some(region)) = (long(8), long(16), region)
        && let Ok(geometry) = Geometry::new(offset, size)
    {
        return Ok(Some((region, geometry)));
    }
    Ok(None)
}

/// Sends what [`receive_attach`] receives.
fn send_attach(link: BorrowedFd<'_>, geometry: Geometry, region: BorrowedFd<'_>) -> Result<(), Errno> {
    let mut message = [0u8; ATTACH];
    message[0..4].copy_from_slice(&1u32.to_le_bytes());
    message[8..16].copy_from_slice(&geometry.ring_offset().to_le_bytes());
    message[16..24].copy_from_slice(&geometry.ring_size().to_le_bytes());
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let regions = [region];
    if !control.push(SendAncillaryMessage::ScmRights(&regions)) {
        return Err(Errno::NOBUFS);
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    rustix::net::sendmsg(link, &[IoSlice::new(&message)], &mut control, flags).map(|_| ())
}
