//! A connection that may get a ring: its bytes are counted while the kernel carries them.

use super::bring_up;
use super::received;
use super::reclaim;
use super::shown;
use super::{Conn, ConnStage, KernelSleep, flags};
use crate::arena::{self, NewBlock};
use crate::table;
use crate::{broker, local, process, sys, watched};
use partywall_protocol::passed::PassedSocket;
use partywall_protocol::upgrade::Upgrade;
use partywall_shm::status::{Reason, Role};
use std::ffi::c_int;
use std::net::SocketAddr;
use std::sync::atomic::Ordering;

/// How a call of a candidate goes on.
#[derive(Debug)]
pub(crate) enum CandidateStep {
    /// Call the kernel, and say how that went.
    Kernel(KernelCall),
    /// It has a ring; or, below the signal handler that makes the call, this very thread is in the middle of a step towards one. The call
    /// goes on with this connection, which may stand for the descriptor since this step.
    Up(&'static Conn),
}

impl Conn {
    /// Starts to manage a descriptor: a connection whose peer seems to have the library too.
    ///
    /// It makes no system call: most connections end before one would pay. `local` has the port if it is
    /// the accepting side's, and need not have more (see [`SocketIdentity::know_own_address`](super::identity::SocketIdentity::know_own_address)).
    pub(crate) fn adopt(fd: c_int, role: Role, local: SocketAddr, peer: SocketAddr) -> Option<&'static Self> {
        if !may_adopt(fd, role) {
            return None;
        }
        let port = if role == Role::Connecting { peer.port() } else { local.port() };
        adopt_under(broker::policy(port, peer.ip()), fd, role, local, peer)
    }

    /// Adopts a connection that is made while there is no broker. Its bytes are counted, and the policy is applied once there is a
    /// broker.
    pub(crate) fn adopt_unknown(fd: c_int, role: Role, local: SocketAddr, peer: SocketAddr) -> Option<&'static Self> {
        if !may_adopt(fd, role) {
            return None;
        }
        adopt_carrying((0, 0), fd, role, local, peer)
    }

    /// Adopts a connection that the program has inherited through `exec`, at a descriptor that has no entry. This process alone has it.
    /// Its bytes are counted from what the kernel has carried so far. `rings`: how often it has had rings.
    pub(crate) fn adopt_inherited(
        fd: c_int,
        role: Role,
        rings: u32,
        local: SocketAddr,
        peer: SocketAddr,
    ) -> Option<&'static Self> {
        let counts = super::accounts::kernel_counts(role, fd)?;
        let conn = if may_adopt(fd, role) { adopt_carrying(counts, fd, role, local, peer)? } else { return None };
        conn.moves.renewals.store(rings, Ordering::Relaxed);
        Some(conn)
    }

    /// Begins to look after a connection that another process has passed to this one. It counts as held by others until the broker confirms
    /// that it is not. Its side and its counts are not known until then.
    pub(crate) fn adopt_received(
        fd: c_int,
        of: PassedSocket,
        local: SocketAddr,
        peer: SocketAddr,
    ) -> Option<&'static Self> {
        // The number stands for something new.
        if !may_adopt(fd, Role::Accepting) {
            return None;
        }
        let conn = adopt_carrying((0, 0), fd, Role::Unknown, local, peer)?;
        conn.passing.receive(of);
        conn.ring_path.because(Reason::Shared);
        conn.set_stage(ConnStage::Candidate);
        Some(conn)
    }

    /// Before a receiving or sending call: it goes to the kernel, or the connection has a ring by now.
    #[inline]
    pub(crate) fn before_call(&'static self, fd: c_int) -> CandidateStep {
        let mut conn = self;
        loop {
            follow_policy(conn);
            if conn.is_up() {
                match conn.renewed(fd) {
                    None => return CandidateStep::Up(conn),
                    Some(renewed) => conn = renewed,
                }
            }
            super::end_abandoned();
            advance(conn, fd);
            match conn.kernel_block_enter() {
                KernelSleep::Entered => return CandidateStep::Kernel(KernelCall(conn)),
                KernelSleep::HasRing | KernelSleep::OwnStep => return CandidateStep::Up(conn),
                KernelSleep::Replaced(by) => conn = by,
            }
        }
    }
}

/// A call of the kernel on a connection that has no ring. Until its result is reported, the thread counts as one that is in the kernel.
#[derive(Debug)]
#[must_use = "the result of the call is to be reported"]
pub(crate) struct KernelCall(&'static Conn);

impl KernelCall {
    /// The kernel's receiving call has given `result`, and taken those bytes out of the stream unless it only peeked.
    #[inline]
    pub(crate) fn received(self, result: isize, peeked: bool) {
        let Self(conn) = self;
        if result > 0 && !peeked {
            let n = result.cast_unsigned() as u64;
            let total = conn.rx.counted.fetch_add(n, Ordering::Relaxed).wrapping_add(n);
            if let Some(line) = shown::line(conn) {
                line.rx.tcp.store(total, Ordering::Relaxed);
            }
        }
        conn.kernel_block_leave();
    }

    /// The kernel's call has given `result`, and taken those bytes out of the stream.
    pub(crate) fn took(self, result: isize) {
        self.received(result, false);
    }

    /// The kernel's sending call has given `result`.
    #[inline]
    pub(crate) fn sent(self, result: isize) {
        let Self(conn) = self;
        if result > 0 {
            let n = result.cast_unsigned() as u64;
            let total = conn.tx.counted.fetch_add(n, Ordering::Relaxed).wrapping_add(n);
            if let Some(line) = shown::line(conn) {
                line.tx.tcp.store(total, Ordering::Relaxed);
            }
        }
        conn.kernel_block_leave();
    }
}

/// Whether a new descriptor can be looked after.
fn may_adopt(fd: c_int, role: Role) -> bool {
    if !table::fits(fd) || fd <= 2 {
        // Standard input and output are read and written inside the C library, past us.
        return false;
    }
    if role == Role::Accepting {
        watched::unwatch(fd);
        return true;
    }
    // It was registered in an epoll set before it was a connection of ours, so waiters in that set could not be notified.
    !watched::was_watched(fd)
}

/// Adopts a connection of which only the kernel knows what it has carried: `(sent, received)` bytes. The policy is applied once a broker
/// says that the peer is one of ours.
pub(super) fn adopt_carrying(
    (sent, received): (u64, u64),
    fd: c_int,
    role: Role,
    local: SocketAddr,
    peer: SocketAddr,
) -> Option<&'static Conn> {
    let block = new_block()?;
    let conn = begin_carrying(&block, (sent, received), fd, role, local, peer)?;
    conn.set_stage(ConnStage::Candidate);
    table::set(fd, conn.entry());
    drop(block);
    Some(conn)
}

/// The place of a new connection. To be kept until the connection is complete, and in the table.
pub(super) fn new_block() -> Option<NewBlock> {
    broker::claim::install(&super::reclaim::EACH);
    arena::allocate(is_vacant)
}

/// A connection as of [`adopt_carrying`], before it is in the table. It has no stage, except that a thread may wait for one.
pub(super) fn begin_carrying(
    block: &NewBlock,
    (sent, received): (u64, u64),
    fd: c_int,
    role: Role,
    local: SocketAddr,
    peer: SocketAddr,
) -> Option<&'static Conn> {
    let policy = broker::PolicyView::UNKNOWN;
    policy.hold();
    let conn = begin(block, policy, fd, role, local, peer)?;
    conn.tx.counted.store(sent, Ordering::Relaxed);
    conn.rx.counted.store(received, Ordering::Relaxed);
    conn.ring_path.set_flag(flags::UNKNOWN_PEER, true);
    conn.ring_path.because(Reason::BrokerAbsent);
    conn.moves.judge_later();
    Some(conn)
}

/// Adopts a connection under a given policy.
pub(super) fn adopt_under(
    policy: broker::PolicyView,
    fd: c_int,
    role: Role,
    local: SocketAddr,
    peer: SocketAddr,
) -> Option<&'static Conn> {
    policy.hold();
    let block = new_block()?;
    let conn = begin(&block, policy, fd, role, local, peer)?;
    conn.ring_path.set_stage(ConnStage::Candidate);
    table::set(fd, conn.entry());
    drop(block);
    Some(conn)
}

/// Sets the state of a new connection up, before it is in the table.
fn begin(
    block: &NewBlock,
    policy: broker::PolicyView,
    fd: c_int,
    role: Role,
    local: SocketAddr,
    peer: SocketAddr,
) -> Option<&'static Conn> {
    let conn = Conn::at(block.index())?;
    conn.identity.holders.own(process::owner());
    // Counted in memory of our own: the block may be in a page that has never been used.
    let mine = local::get(conn.index());
    let generation = mine.generation.load(Ordering::Relaxed).wrapping_add(1);
    mine.generation.store(generation, Ordering::Relaxed);
    mine.begin();
    // A connection that may never have a ring is counted all the same, since the policy may change.
    conn.ring_path.begin(role, policy.waits_for());
    conn.kernel.begin();
    conn.moves.begin(policy.upgrade);
    conn.passing.begin();
    mine.planned_ring.store(policy.ring_size, Ordering::Relaxed);
    conn.identity.addresses.store(local, peer);
    conn.tx.reset();
    conn.rx.reset();
    conn.ring_path.set_stage(ConnStage::Attaching);
    shown::begin(conn, fd);
    mine.descriptors.store(1, Ordering::Relaxed);
    mine.set_fd(fd);
    Some(conn)
}

/// Whether no thread uses the block of a closed connection any more. A thread that still sleeps in the kernel with that connection,
/// or holds
/// a direction of it, does to the block what it would have done to the connection.
fn is_vacant(index: u16) -> bool {
    let is_left = |conn: &Conn| conn.kernel.is_quiet() && conn.tx.is_free() && conn.rx.is_free();
    Conn::at(index).is_some_and(is_left)
}

/// A policy that has changed holds from the next call on.
#[inline]
fn follow_policy(conn: &'static Conn) {
    if !conn.moves.has_seen_policy() {
        judge_again(conn);
    }
}

#[cold]
fn judge_again(conn: &'static Conn) {
    if broker::directory().is_none() {
        // A broker that has gone has not changed its mind; but one that comes is to be met.
        broker::seek();
        return;
    }
    if conn.has(flags::UNKNOWN_PEER) && !knows_peer_by_now(conn) {
        return;
    }
    conn.moves.note_policy();
    let (local, peer) = conn.identity.addresses();
    let port = if conn.role() == Role::Connecting { peer.port() } else { local.port() };
    let policy = broker::policy(port, peer.ip());
    let upgrade = policy.upgrade;
    match (conn.ring_path.stage(), upgrade) {
        (ConnStage::Attached, Upgrade::Never) if !conn.has(flags::WANT_TCP) => conn.stay_on_tcp(policy.never),
        (ConnStage::Attached, Upgrade::Never) => {}
        (ConnStage::Attached, _) => match conn.ring_path.reason() {
            reason @ (Reason::MovesNever | Reason::ProgramNotListed) => conn.allow_ring(reason),
            _ => reclaim::reclaim_later(conn, conn.fd()),
        },
        (ConnStage::Tcp, _) => {}
        (ConnStage::Attaching, _) => conn.moves.judge_later(),
        (ConnStage::Offered, Upgrade::Never) => bring_up::take_offer_back(conn, policy.never),
        (ConnStage::Offered, upgrade) => conn.moves.set_due(upgrade),
        (ConnStage::Candidate, upgrade) => {
            // The thread that brings it up holds this direction, and reads the size of the ring.
            let Some(_held) = conn.tx.try_hold() else {
                conn.moves.judge_later();
                return;
            };
            conn.moves.set_due(upgrade);
            conn.local().planned_ring.store(policy.ring_size, Ordering::Relaxed);
            show_wait(conn, policy.waits_for());
        }
    }
}

/// Shows what a candidate waits for. The sending direction is held.
fn show_wait(conn: &Conn, reason: Reason) {
    if conn.ring_path.stage() == ConnStage::Candidate && conn.ring_path.reason() != reason {
        conn.ring_path.because(reason);
        conn.set_stage(ConnStage::Candidate);
    }
}

/// Whether the peer of a connection that was [adopted unknown](Conn::adopt_unknown) seems to have the library too. If it does not
/// yet, the broker's directory is looked at again whenever it has changed: the listener may be published later than the client asks.
fn knows_peer_by_now(conn: &'static Conn) -> bool {
    if conn.role() == Role::Unknown && conn.ring_path.is_candidate() && !received::is_confirmed(conn) {
        return false;
    }
    // The accepting side needs no more than an offer.
    if conn.role() == Role::Connecting && conn.ring_path.stage() == ConnStage::Candidate {
        let generation = broker::listener_generation();
        if generation == conn.moves.offers_seen.swap(generation, Ordering::Relaxed) {
            return false;
        }
        let (fd, peer) = (conn.fd(), conn.identity.addresses().1);
        // A server's parent that has made no call since the broker came has not published its listener, while a child that has taken over
        // the connection has published its address.
        if !broker::knows_program(fd, peer) {
            if let Some(_held) = conn.tx.try_hold() {
                show_wait(conn, Reason::NoPeer);
            }
            return false;
        }
    }
    conn.ring_path.set_flag(flags::UNKNOWN_PEER, false);
    let (local, peer) = conn.identity.addresses();
    let port = if conn.role() == Role::Connecting { peer.port() } else { local.port() };
    broker::policy(port, peer.ip()).hold();
    true
}

/// Counts a call, and takes the next step towards a ring if it is time to.
#[inline]
fn advance(conn: &'static Conn, fd: c_int) {
    let stage = conn.ring_path.stage();
    if stage == ConnStage::Tcp {
        return;
    }
    let calls = conn.moves.count_call();
    let carried = conn.tx.counted.load(Ordering::Relaxed).wrapping_add(conn.rx.counted.load(Ordering::Relaxed));
    let is_time = || conn.moves.is_time_for_attempt(sys::coarse_millis);
    let due = conn.moves.is_due(carried) || is_time();
    match (stage, conn.role()) {
        (ConnStage::Offered, _) => bring_up::look_for_answer(conn, fd),
        // Another thread takes this step.
        (ConnStage::Attaching, _) => {}
        // It may wait for another policy, or for another broker.
        _ if !due && calls.is_multiple_of(NOW_AND_THEN) => broker::tick(),
        // The other side counts as we do, so that there is no offer before.
        _ if !due => {}
        (_, Role::Accepting) => {
            let generation = broker::offer_generation();
            if generation != conn.moves.offers_seen.load(Ordering::Relaxed) {
                bring_up::look_for_offer(conn, fd, generation);
            } else if calls.is_multiple_of(NOW_AND_THEN) {
                // The broker may be another one by now, whose directory is another.
                broker::tick();
            }
        }
        _ => bring_up::offer(conn, fd),
    }
}

/// Calls between two looks at the broker of a connection that takes no step.
const NOW_AND_THEN: u32 = 16;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::broker::PolicyView;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::IntoRawFd;

    #[test]
    fn own_address_is_read_only_when_offer_is_due() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let listening = listener.local_addr().unwrap();
        let near = TcpStream::connect(listening).unwrap();
        let own = near.local_addr().unwrap();
        let fd = near.into_raw_fd();
        let after = Upgrade::After { calls: 2, bytes: 0 };
        let policy = PolicyView { upgrade: after, ring_size: 4096, spin_us: 0, ..PolicyView::UNKNOWN };
        let unknown = SocketAddr::from(([0, 0, 0, 0], 0));
        let conn = adopt_under(policy, fd, Role::Connecting, unknown, listening).unwrap();
        for call in 0..3 {
            assert_eq!(conn.identity.addresses(), (unknown, listening), "after {call} calls");
            let CandidateStep::Kernel(call) = conn.before_call(fd) else { panic!("there is no ring") };
            call.sent(-1);
        }
        // There is no broker here, or it refuses: the question was asked before it was.
        assert_eq!(conn.identity.addresses(), (own, listening));
        crate::calls::testing::close(fd);
    }
}
