//! The session with the broker, and the directory that it publishes.
//!
//! Opened by the first `listen` or `connect` of the program, which waits for that, a second at most. While there is no broker, everything
//! here says no, and quickly. A session is opened again a step at a time, and no call waits for it (protocol T14.6).
//!
//! - `settings` is what the environment says; `state` what this process knows, in memory that a child of `fork` finds empty;
//! - `session` speaks to the broker, in packets that are written and read without allocating (`packet`), and `opening` opens the session,
//!   a step at a time, so that no call waits for a broker that is busy;
//! - `handshake` brings a TCP connection up to rings, `late` keeps those of its answers that a later call takes, each in an `answer_place`, and `datagram` a flow of datagrams; `repair_mode` mends a connection that a killed broker
//!   was reading;
//! - `listeners` is what is, or ought to be, published; `memory` is where the directory is mapped; `addresses` asks the kernel what a wildcard stands for.

mod addresses;
mod answer_place;
pub(crate) mod claim;
pub(crate) mod datagram;
mod handshake;
mod late;
mod listed;
mod listeners;
mod memory;
mod netns;
mod opening;
mod packet;
mod repair_mode;
mod session;
mod settings;
mod state;
#[cfg(test)]
pub(crate) mod tests;

use partywall_protocol::directory::{Directory, Fingerprint, PolicyCase, Terms, Transport, is_scoped};
use partywall_protocol::passed::{PassedSocket, PassedState};
use partywall_protocol::upgrade::{self, Upgrade};
use partywall_protocol::wire::{BorrowedMessage, Refusal};
use partywall_shm::status::Reason;
use partywall_shm::sync::Peer;
use rustix::net::sockopt;
use std::ffi::c_int;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::{local, patience, sys};
pub(crate) use datagram::{
    fetch_receiver, knows_datagram_offer, knows_receiver, listener_generation, offer_datagrams, take_datagrams,
};
pub(crate) use handshake::{
    BegunHandshake, HandshakeWords, PeerSide, PlaceOfRegion, cancel, cancel_untaken, closed, confirm, finish,
    late_bell, late_peer, offer, take,
};
pub(crate) use late::{LateStep, StepAnswer, give_up, is_answered};
use opening::{NO_SLOT, PublicationStep};
pub(crate) use repair_mode::is_in_repair_mode;
use session::{BrokerFailure, Turn, Urgency, done};

/// How often a broker that has gone is noticed by those who have nothing else to ask it.
const LOOK_EVERY_MS: u64 = 200;
/// The longest sleep of a server, in milliseconds, while there is no broker.
const ABSENCE_MS: u64 = 2000;
/// The longest sleep while there is a broker, which may be replaced. Not a whole number of seconds, so that the signal of a periodic timer rarely
/// falls between two sleeps.
const IDLE_MS: u64 = 9_700;
/// How often a session that is opening is looked at.
const STEP_EVERY_MS: u64 = 10;

/// The policy's decision about one connection.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PolicyView {
    /// When it goes to a ring.
    pub(crate) upgrade: Upgrade,
    /// Size of our ring in bytes: a power of two.
    pub(crate) ring_size: u64,
    /// The longest spin of a wait, in microseconds.
    pub(crate) spin_us: u32,
    /// Why it stays on TCP, if it does.
    pub(crate) never: Reason,
}

impl PolicyView {
    /// The terms of a connection that no broker has decided about.
    pub(crate) const UNKNOWN: Self = Self {
        upgrade: Upgrade::Never,
        ring_size: Terms::DEFAULT.ring_size,
        spin_us: Terms::DEFAULT.spin_us,
        never: Reason::MovesNever,
    };

    /// The condition that a connection without a ring waits for.
    pub(crate) const fn waits_for(&self) -> Reason {
        match self.upgrade {
            Upgrade::Never => self.never,
            Upgrade::Now | Upgrade::After { .. } => Reason::TooShort,
        }
    }

    /// Waits of this process last as long as this says.
    pub(crate) fn hold(&self) {
        patience::set_longest_spin(Duration::from_micros(u64::from(self.spin_us)));
    }
}

/// Reads the environment. Called before `main`.
pub(crate) fn configure() {
    settings::get();
}

/// The directory, while there is a broker.
#[inline]
pub(crate) fn directory() -> Option<&'static Directory<Peer>> {
    memory::get()
}

/// The directory, or that of a broker that has gone: only for words that grow old by themselves.
#[inline]
pub(crate) fn last_directory() -> Option<&'static Directory<Peer>> {
    memory::last()
}

/// A socket is about to connect: the first of a process opens the session, and makes known where the process runs, since
/// the process that accepts the connection looks for an offer only if it comes from a neighbour. `errno` is left alone.
#[inline]
pub(crate) fn before_connect(fd: c_int) {
    tick();
    if fd >= 0 && !session::has_announced() {
        make_known(fd);
    }
}

#[cold]
fn make_known(fd: c_int) {
    let socket = sys::borrow(fd);
    let tcp = sockopt::socket_type(socket) == Ok(rustix::net::SocketType::STREAM)
        && sockopt::socket_protocol(socket) == Ok(Some(rustix::net::ipproto::TCP));
    if tcp && session::may_be_open() {
        announce(fd);
    }
}

/// Whether a program of ours listens there. One probe, no system call when the answer is no; but the first call of a process
/// opens the session, if [`before_connect`] has not. `fd` is the connecting socket.
pub(crate) fn knows_listener(fd: c_int, address: SocketAddr) -> bool {
    if address.port() == 0 {
        return false;
    }
    if directory().is_none() && session::may_be_open() {
        // Only to have it opened, if it can be.
        if let Ok(turn) = Turn::take(Urgency::Long) {
            turn.look(true);
        }
    }
    tick();
    // While a broker is being replaced, those who listened before listen still.
    let Some(directory) = memory::last() else { return false };
    let scoped = is_scoped(address.ip());
    let netns = if scoped { netns::probable_cookie(fd) } else { 0 };
    if !directory.has_listener(Fingerprint::listener(Transport::Tcp, address, netns)) {
        return false;
    }
    if !scoped && self::directory().is_some() {
        announce(fd);
    }
    true
}

/// Whether that address belongs to programs of ours. `fd` is the accepted socket.
pub(crate) fn knows_resident(fd: c_int, peer: SocketAddr) -> bool {
    tick();
    let Some(directory) = memory::last() else { return false };
    let netns = if is_scoped(peer.ip()) { netns::probable_cookie(fd) } else { 0 };
    directory.has_address(Fingerprint::address(peer.ip(), netns))
}

/// Whether a program of ours listens at the address of the other end of this connected socket, or runs there.
pub(crate) fn knows_program(fd: c_int, peer: SocketAddr) -> bool {
    knows_listener(fd, peer) || knows_resident(fd, peer)
}

/// Whether a connection from an address that belongs to none of our programs may be from one all the same, because its addresses are
/// translated on the way (protocol T1.11). Connections from public addresses are left alone: translators within a host have private ones.
pub(crate) fn may_be_translated(peer: SocketAddr) -> bool {
    addresses::is_private(peer.ip())
        && memory::last().is_some_and(|directory| directory.has_address(Fingerprint::translators()))
}

/// Changes whenever an offer is made to anyone.
#[inline]
pub(crate) fn offer_generation() -> u64 {
    directory().map_or(0, |directory| directory.instance().wrapping_add(directory.offer_generation()))
}

/// An offer in the directory that an accepted connection may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FoundOffer {
    /// It is one between exactly these ends.
    OfTheseEnds,
    /// It is one to the accepting end, whose connecting end may be translated. It may be another connection's.
    Translated,
    /// That cannot be seen yet: the broker is late with the key.
    Unseen,
}

/// The offer that the other end of this accepted connection makes, or may make. The first call in a network namespace asks the broker for
/// the key by which that can be seen.
pub(crate) fn find_offer(fd: c_int, local: SocketAddr, peer: SocketAddr) -> Option<FoundOffer> {
    let directory = directory()?;
    let netns = netns::probable_cookie(fd);
    let key = || netns::key(netns, directory.instance());
    let Some(key) = key().or_else(|| {
        announce(fd);
        key()
    }) else {
        return opening::is_under_way().then_some(FoundOffer::Unseen);
    };
    if directory.has_offer(Fingerprint::connection(local, peer, key)) {
        return Some(FoundOffer::OfTheseEnds);
    }
    directory.has_offer(Fingerprint::translated(local, key)).then_some(FoundOffer::Translated)
}

/// Why a socket is not published.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unpublished {
    /// The broker has refused it, or it is no socket that can be published. It is not tried again.
    Refused,
    /// Another thread has the session, or this process has no session or no room for another socket. It can be tried again.
    NotNow,
}

/// Milliseconds from an attempt to publish a socket that ended with [`Unpublished::NotNow`] to the next.
pub(crate) const PUBLISH_PAUSE: u64 = 100;

/// Publishes a listening socket and returns the key to withdraw it by. An existing publication is kept.
///
/// If there is no broker it will be published when there is one, and after a restart of the broker again, by every process that has it,
/// at its next [`tick`].
///
/// It waits up to a second for another thread that has the session.
pub(crate) fn publish(fd: c_int) -> Result<u64, Unpublished> {
    publish_in_turn(fd, Urgency::Long)
}

/// As [`publish`], for a socket that is tried again: it waits for another thread that has the session for 2 ms at the most.
pub(crate) fn publish_now(fd: c_int) -> Result<u64, Unpublished> {
    publish_in_turn(fd, Urgency::Brief)
}

fn publish_in_turn(fd: c_int, urgency: Urgency) -> Result<u64, Unpublished> {
    let turn = Turn::take(urgency).map_err(|_| Unpublished::NotNow)?;
    let cookie = sockopt::socket_cookie(sys::borrow(fd)).map_err(|_| Unpublished::Refused)?;
    let known = listeners::all().find(|(_, listener)| listener.fd() == Some(fd) && listener.cookie() == cookie);
    let (at, listener) = known.or_else(|| listeners::add(fd, cookie)).ok_or(Unpublished::NotNow)?;
    let key = turn.key(at).ok_or(Unpublished::NotNow)?;
    // Opening a session publishes all that is entered.
    for _ in 0..2 {
        if turn.be_open().is_err() || !turn.await_publication(at) || key.load(Ordering::Relaxed) != 0 {
            break;
        }
        match turn.publish(at, fd) {
            Ok(PublicationStep::Answered) if key.load(Ordering::Relaxed) == 0 => {
                listener.clear();
                return Err(Unpublished::Refused);
            }
            Ok(_) => break,
            // The session had ended, which this has found out.
            Err(_) => {}
        }
    }
    if key.load(Ordering::Relaxed) != 0 {
        turn.announce(netns::cookie(fd));
    }
    Ok(listener.handle(at))
}

/// The listener is gone.
pub(crate) fn withdraw(handle: u64) {
    let Ok(turn) = Turn::take(Urgency::Long) else { return };
    let Some((at, listener)) = listeners::find(handle) else { return };
    turn.finish_publication(at);
    listener.clear();
    // A child must not withdraw an inherited publication: its parent still listens.
    let key = turn.key(at).map_or(0, |key| key.swap(0, Ordering::Relaxed));
    if key != 0 {
        let _ = turn.ask_here_until(turn.deadline, &BorrowedMessage::Withdraw { key }, &[], done);
    }
}

/// This process has passed a connection to another one once, and no process holds it but the receiver (protocol T13.15).
pub(crate) fn passed(of: PassedSocket, PassedState { side, rings }: PassedState) {
    if let Ok(turn) = Turn::take(Urgency::Long) {
        turn.tell(&BorrowedMessage::Passed { socket: of.socket, carrier: of.carrier, side, rings });
    }
}

/// Whether a process has stated so of a connection that this one has received. The statement is given out once.
pub(crate) fn take_passed(of: PassedSocket) -> Result<Option<PassedState>, Reason> {
    let turn = Turn::take(Urgency::Brief).map_err(reason)?;
    let request = BorrowedMessage::TakePassed { socket: of.socket, carrier: of.carrier };
    turn.ask(&request, &[], |answer, _| match answer {
        BorrowedMessage::PassedIs { side, rings } => Some(Some(PassedState { side, rings })),
        BorrowedMessage::Done {} => Some(None),
        _ => None,
    })
    .map_err(reason)
}

/// Lends `show` a way to report a ring to a broker that is younger than the ring. `false` if that was not done now, because the session
/// is busy, the broker is slow, or `show` returned `false`.
pub(crate) fn reclaim(show: impl FnOnce(&dyn Fn(&claim::ConnClaim) -> bool) -> bool) -> bool {
    Turn::take(Urgency::Brief).is_ok_and(|turn| !turn.is_slow() && show(&|claim| turn.claim(claim)))
}

/// The policy's decision about a connection to a listener on `port`, with `peer` at the other end. The broker's `never` always holds;
/// otherwise the rules of `partywall run` come first.
pub(crate) fn policy(port: u16, peer: IpAddr) -> PolicyView {
    let settings = settings::get();
    let question = PolicyCase { port, peer, program: &settings.program };
    let terms = memory::last().map_or(Terms::NEVER, |directory| directory.decide(&question));
    let (upgrade, never) = match terms.upgrade {
        Upgrade::Never => (Upgrade::Never, Reason::MovesNever),
        _ if terms.lists_programs && listed::is_left_out(directory().map(|_| policy_generation())) => {
            (Upgrade::Never, Reason::ProgramNotListed)
        }
        brokers => (upgrade::decide(&settings.upgrade, port, peer).unwrap_or(brokers), Reason::MovesNever),
    };
    let ring_size = settings.ring_size.unwrap_or(terms.ring_size);
    PolicyView { upgrade, ring_size, spin_us: settings.spin_us.unwrap_or(terms.spin_us), never }
}

/// Changes whenever the policy does.
#[inline]
pub(crate) fn policy_generation() -> u32 {
    // Two brokers count from the same number; that of the instance tells them apart.
    directory().map_or(0, |directory| {
        let instance = (directory.instance() >> 32) as u32;
        instance.wrapping_mul(0x9e37_79b1).wrapping_add(directory.policy_generation() as u32)
    })
}

/// A cheap moment: now and then, looks whether the broker has gone or come, and publishes again what was published.
#[inline]
pub(crate) fn tick() {
    look_if_due(|| listeners::is_any() || local::any_is_kept());
}

/// A process that has not asked for a session is to [`seek`] one.
pub(crate) fn expect() {
    let _ = state::get();
}

/// Like `tick`, for a caller that waits for a broker to start: opens a session if there is one.
#[inline]
pub(crate) fn seek() {
    look_if_due(|| true);
}

/// How long a thread may sleep while a session is opening, whose next step it is then to take by [`tick`].
#[inline]
pub(crate) fn longest_sleep() -> Option<Duration> {
    opening::is_under_way().then_some(Duration::from_millis(STEP_EVERY_MS))
}

/// How long a server may sleep until it is to [`tick`]: so its listeners are published once a broker has come, although the program makes no
/// call. `None` for a process without listeners, and for one that the broker has denied: it asks again when it next accepts or makes a connection.
#[inline]
pub(crate) fn longest_idle() -> Option<Duration> {
    match directory() {
        _ if !listeners::is_any() => None,
        Some(_) => Some(Duration::from_millis(IDLE_MS)),
        None => (!opening::was_denied()).then_some(Duration::from_millis(ABSENCE_MS)),
    }
}

/// Whether this process has listeners that are published once a broker comes, or once its session with one has opened.
#[inline]
pub(crate) fn awaits_broker() -> bool {
    listeners::is_any() && (opening::is_under_way() || directory().is_none() && !opening::was_denied())
}

#[inline]
fn look_if_due(open: impl FnOnce() -> bool) {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let now = sys::coarse_millis();
    let next = NEXT.load(Ordering::Relaxed);
    let step_at = next.saturating_sub(LOOK_EVERY_MS - STEP_EVERY_MS);
    let is_due = || NEXT.compare_exchange(next, now + LOOK_EVERY_MS, Ordering::Relaxed, Ordering::Relaxed).is_ok();
    let is_time = now >= next || now >= step_at && opening::is_under_way();
    if directory().is_some_and(Directory::is_closed) || (is_time && is_due()) {
        look(open());
    }
}

#[cold]
fn look(open: bool) {
    netns::doubt();
    // Before the first session there is nothing to be looked after.
    if state::peek().is_some()
        && let Ok(turn) = Turn::take(Urgency::Brief)
    {
        turn.look(open);
        turn.tell_owed();
    }
}

/// This is the child. The session is the parent's, and [`state`] is empty already.
pub(crate) fn after_fork() {
    opening::forget_denial();
    listeners::recount();
}

/// Makes known, once for each namespace, where this process runs, so that a process that accepts its connections looks for offers.
fn announce(fd: c_int) {
    if session::is_announced(netns::probable_cookie(fd)) {
        return;
    }
    let netns = netns::cookie(fd);
    if !session::is_announced(netns)
        && let Ok(turn) = Turn::take(Urgency::Long)
        && turn.be_open().is_ok()
        && matches!(turn.publish(NO_SLOT, fd), Ok(PublicationStep::Answered | PublicationStep::Outstanding))
    {
        // Refused, it would be refused again.
        turn.announce(netns);
    }
}

/// The reason that a connection gets for a failure of the broker.
fn reason(failure: BrokerFailure) -> Reason {
    match failure {
        BrokerFailure::Absent | BrokerFailure::Busy => Reason::BrokerAbsent,
        BrokerFailure::Refused(Refusal::Ambiguous) => Reason::Ambiguous,
        BrokerFailure::Refused(Refusal::NoSuchOffer) => Reason::NotTaken,
        BrokerFailure::Refused(Refusal::Quota | Refusal::OutOfResources) => Reason::Resources,
        BrokerFailure::Refused(Refusal::Machine) => Reason::NoWindow,
        BrokerFailure::Refused(_) => Reason::Refused,
    }
}
