//! A connection that may get a ring: its bytes are counted while the kernel carries them.

use super::{Conn, ConnStage, KernelSleep, flags};
use crate::table::{self};
use crate::{arena, broker, local, process, sys, watched};
use partywall_protocol::upgrade::Upgrade;
use partywall_shm::status::{Reason, Role};
use rustix::io::Errno;
use std::ffi::c_int;
use std::net::SocketAddr;
use std::sync::atomic::Ordering;

/// How a call of a candidate goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CandidateStep {
    /// Call the kernel, and say how that went.
    Kernel,
    /// It has a ring; or, below the signal handler that makes the call, this very thread is in the middle of a step towards one.
    Up,
}

impl Conn {
    /// Starts to manage a descriptor: a connection whose peer seems to have the library too.
    ///
    /// It makes no system call: most connections end before one would pay. `local` has the port if it is
    /// the accepting side's, and need not have more (see [`Conn::know_own_address`]).
    pub(crate) fn adopt(fd: c_int, role: Role, local: SocketAddr, peer: SocketAddr) -> Option<&'static Self> {
        if !Self::may_adopt(fd, role) {
            return None;
        }
        let port = if role == Role::Connecting { peer.port() } else { local.port() };
        Self::adopt_under(broker::policy(port, peer.ip()), fd, role, local, peer)
    }

    /// Adopts a connection that is made while there is no broker. Its bytes are counted, and the policy is applied once there is a
    /// broker.
    pub(crate) fn adopt_unknown(fd: c_int, role: Role, local: SocketAddr, peer: SocketAddr) -> Option<&'static Self> {
        if !Self::may_adopt(fd, role) {
            return None;
        }
        let conn = Self::adopt_under(broker::PolicyView::UNKNOWN, fd, role, local, peer)?;
        conn.ring_path.set_flag(flags::UNKNOWN_PEER, true);
        conn.ring_path.because(Reason::BrokerAbsent);
        conn.set_stage(ConnStage::Candidate);
        conn.moves.judge_later();
        Some(conn)
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

    /// Adopts a connection under a given policy.
    pub(super) fn adopt_under(
        policy: broker::PolicyView,
        fd: c_int,
        role: Role,
        local: SocketAddr,
        peer: SocketAddr,
    ) -> Option<&'static Self> {
        broker::claim::install(&super::reclaim::EACH);
        policy.hold();
        // Kept until the table has the connection.
        let block = arena::allocate(Self::is_vacant)?;
        let conn = Self::at(block.index())?;
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
        mine.planned_ring.store(policy.ring_size, Ordering::Relaxed);
        conn.identity.addresses.store(local, peer);
        conn.tx.reset();
        conn.rx.reset();
        conn.ring_path.set_stage(ConnStage::Candidate);
        conn.begin_line(fd);
        mine.descriptors.store(1, Ordering::Relaxed);
        mine.set_fd(fd);
        table::set(fd, conn.entry());
        drop(block);
        Some(conn)
    }

    /// Whether no thread uses the block of a closed connection any more. A thread that still sleeps in the kernel with that connection,
    /// or holds
    /// a direction of it, does to the block what it would have done to the connection.
    fn is_vacant(index: u16) -> bool {
        let is_left = |conn: &Self| conn.kernel.is_quiet() && conn.tx.is_free() && conn.rx.is_free();
        Self::at(index).is_some_and(is_left)
    }

    /// Asks the kernel for our own address, if it is not known yet.
    pub(super) fn know_own_address(&self, fd: c_int) {
        let (local, peer) = self.identity.addresses();
        if local.ip().is_unspecified()
            && let Ok(name) = rustix::net::getsockname(sys::borrow(fd))
            && let Ok(local) = SocketAddr::try_from(name)
        {
            self.identity.addresses.store(local, peer);
        }
    }

    /// Before a receiving call: it goes to the kernel, or it has a ring by now. After [`CandidateStep::Kernel`],
    /// [`Conn::received`] must be called.
    #[inline]
    pub(crate) fn before_receiving(&'static self, fd: c_int) -> CandidateStep {
        self.follow_policy();
        if !self.is_up() {
            super::end_abandoned();
            self.advance(fd);
            if self.kernel_block_enter() == KernelSleep::Entered {
                return CandidateStep::Kernel;
            }
        }
        CandidateStep::Up
    }

    /// The kernel's receiving call has given `result`, and taken those bytes out of the stream unless it only peeked.
    #[inline]
    pub(crate) fn received(&self, result: isize, peeked: bool) {
        if result > 0 && !peeked {
            let n = result.cast_unsigned() as u64;
            let total = self.rx.counted.fetch_add(n, Ordering::Relaxed).wrapping_add(n);
            if let Some(line) = self.line() {
                line.rx.tcp.store(total, Ordering::Relaxed);
            }
        }
        self.kernel_block_leave();
    }

    /// Before a sending call; [`Conn::sent`] must be called after [`CandidateStep::Kernel`].
    #[inline]
    pub(crate) fn before_sending(&'static self, fd: c_int) -> CandidateStep {
        self.follow_policy();
        if !self.is_up() {
            super::end_abandoned();
            self.advance(fd);
            if self.kernel_block_enter() == KernelSleep::Entered {
                return CandidateStep::Kernel;
            }
        }
        CandidateStep::Up
    }

    /// The kernel's sending call has given `result`.
    #[inline]
    pub(crate) fn sent(&self, result: isize) {
        if result > 0 {
            let n = result.cast_unsigned() as u64;
            let total = self.tx.counted.fetch_add(n, Ordering::Relaxed).wrapping_add(n);
            if let Some(line) = self.line() {
                line.tx.tcp.store(total, Ordering::Relaxed);
            }
        }
        self.kernel_block_leave();
    }

    /// A policy that has changed holds from the next call on.
    #[inline]
    fn follow_policy(&'static self) {
        if !self.moves.has_seen_policy() {
            self.judge_again();
        }
    }

    #[cold]
    fn judge_again(&'static self) {
        if broker::directory().is_none() {
            // A broker that has gone has not changed its mind; but one that comes is to be met.
            broker::seek();
            return;
        }
        if self.has(flags::UNKNOWN_PEER) && !self.knows_peer_by_now() {
            return;
        }
        self.moves.note_policy();
        let (local, peer) = self.identity.addresses();
        let port = if self.role() == Role::Connecting { peer.port() } else { local.port() };
        let policy = broker::policy(port, peer.ip());
        let upgrade = policy.upgrade;
        match (self.ring_path.stage(), upgrade) {
            (ConnStage::Attached, Upgrade::Never) if !self.has(flags::WANT_TCP) => self.stay_on_tcp(policy.never),
            (ConnStage::Attached, Upgrade::Never) => {}
            (ConnStage::Attached, _) => match self.ring_path.reason() {
                reason @ (Reason::MovesNever | Reason::ProgramNotListed) => self.allow_ring(reason),
                _ => self.reclaim_later(self.fd()),
            },
            (ConnStage::Tcp, _) => {}
            (ConnStage::Attaching, _) => self.moves.judge_later(),
            (ConnStage::Offered, Upgrade::Never) => self.take_offer_back(policy.never),
            (ConnStage::Offered, upgrade) => self.moves.set_due(upgrade),
            (ConnStage::Candidate, upgrade) => {
                // The thread that brings it up holds this direction, and reads the size of the ring.
                let Some(_held) = self.tx.try_hold() else {
                    self.moves.judge_later();
                    return;
                };
                self.moves.set_due(upgrade);
                self.local().planned_ring.store(policy.ring_size, Ordering::Relaxed);
                self.show_wait(policy.waits_for());
            }
        }
    }

    /// Shows what a candidate waits for. The sending direction is held.
    fn show_wait(&self, reason: Reason) {
        if self.ring_path.stage() == ConnStage::Candidate && self.ring_path.reason() != reason {
            self.ring_path.because(reason);
            self.set_stage(ConnStage::Candidate);
        }
    }

    /// Whether the peer of a connection that was [adopted unknown](Self::adopt_unknown) seems to have the library too. If it does not
    /// yet, the broker's directory is looked at again whenever it has changed: the listener may be published later than the client asks.
    fn knows_peer_by_now(&'static self) -> bool {
        // The accepting side needs no more than an offer.
        if self.role() == Role::Connecting && self.ring_path.stage() == ConnStage::Candidate {
            let generation = broker::listener_generation();
            if generation == self.moves.offers_seen.swap(generation, Ordering::Relaxed) {
                return false;
            }
            let (fd, peer) = (self.fd(), self.identity.addresses().1);
            // A server's parent that has made no call since the broker came has not published its listener, while a child that has taken over
            // the connection has published its address.
            if !broker::knows_listener(fd, peer) && !broker::knows_resident(fd, peer) {
                if let Some(_held) = self.tx.try_hold() {
                    self.show_wait(Reason::NoPeer);
                }
                return false;
            }
        }
        self.ring_path.set_flag(flags::UNKNOWN_PEER, false);
        let (local, peer) = self.identity.addresses();
        let port = if self.role() == Role::Connecting { peer.port() } else { local.port() };
        broker::policy(port, peer.ip()).hold();
        true
    }

    /// Counts a call, and takes the next step towards a ring if it is time to.
    #[inline]
    fn advance(&'static self, fd: c_int) {
        let stage = self.ring_path.stage();
        if stage == ConnStage::Tcp {
            return;
        }
        let calls = self.moves.count_call();
        let due = self
            .moves
            .is_due(self.tx.counted.load(Ordering::Relaxed).wrapping_add(self.rx.counted.load(Ordering::Relaxed)));
        match (stage, self.role()) {
            (ConnStage::Offered, _) => self.look_for_answer(fd),
            // Another thread takes this step.
            (ConnStage::Attaching, _) => {}
            // The other side counts as we do, so that there is no offer before.
            // It may wait for another policy, or for another broker.
            _ if !due && calls.is_multiple_of(NOW_AND_THEN) => broker::tick(),
            _ if !due => {}
            (_, Role::Accepting) => {
                let generation = broker::offer_generation();
                if generation != self.moves.offers_seen.load(Ordering::Relaxed) {
                    self.look_for_offer(fd, generation);
                } else if calls.is_multiple_of(NOW_AND_THEN) {
                    // The broker may be another one by now, whose directory is another.
                    broker::tick();
                }
            }
            _ => self.offer(fd),
        }
    }

    /// Whether all bytes that the kernel has carried were counted here (protocol T12). They were not if some passed by raw system calls,
    /// by `io_uring` or inside the C library.
    ///
    /// `None` while the kernel's numbers change, and while the connection ends: the kernel counts the end as a byte.
    pub(super) fn is_accounted_for(&self, fd: c_int) -> Option<bool> {
        let fd = sys::borrow(fd);
        for _ in 0..64 {
            let (unread, unsent) = (queued(fd, FIONREAD).ok()?, queued(fd, SIOCOUTQ).ok()?);
            let info = info(fd).ok()?;
            if queued(fd, FIONREAD) != Ok(unread) || queued(fd, SIOCOUTQ) != Ok(unsent) {
                continue;
            }
            if info.state != ESTABLISHED {
                return None;
            }
            let received = info.bytes_received.wrapping_sub(unread);
            // The SYN of a connecting side is a byte to the kernel.
            let syn = u64::from(self.role() == Role::Connecting);
            let sent = info.bytes_acked.wrapping_add(unsent).wrapping_sub(syn);
            return Some(
                received == self.rx.counted.load(Ordering::Relaxed) && sent == self.tx.counted.load(Ordering::Relaxed),
            );
        }
        None
    }
}

/// Calls between two looks at the broker of a connection that takes no step.
const NOW_AND_THEN: u32 = 16;

const ESTABLISHED: u8 = 1;
const FIONREAD: libc::Ioctl = libc::FIONREAD;
const SIOCOUTQ: libc::Ioctl = libc::TIOCOUTQ;

/// How many bytes wait in one of the socket's queues.
#[expect(unsafe_code, reason = "an ioctl that rustix has no name for")]
pub(crate) fn queued(fd: rustix::fd::BorrowedFd<'_>, which: libc::Ioctl) -> Result<u64, Errno> {
    use rustix::fd::AsRawFd;
    let mut n: c_int = 0;
    // SAFETY: both requests write one `int`. The raw system call, so as not to meet our own wrapper.
    let result = unsafe { libc::syscall(libc::SYS_ioctl, fd.as_raw_fd(), which, &raw mut n) };
    if result < 0 { Err(sys::errno()) } else { Ok(u64::try_from(n).unwrap_or(0)) }
}

struct KernelCounts {
    state: u8,
    bytes_acked: u64,
    bytes_received: u64,
}

/// The part of `TCP_INFO` that this library uses; libc's structure is older than these counts.
#[expect(unsafe_code, reason = "a socket option that rustix has no name for")]
fn info(fd: rustix::fd::BorrowedFd<'_>) -> Result<KernelCounts, Errno> {
    use rustix::fd::AsRawFd;
    let mut buffer = [0u8; 136];
    let mut len = buffer.len() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes.
    let result = unsafe {
        crate::real::getsockopt(
            fd.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            buffer.as_mut_ptr().cast(),
            &raw mut len,
        )
    };
    if result < 0 {
        return Err(sys::errno());
    }
    let long = |at: usize| buffer.get(at..at + 8).and_then(|b| b.try_into().ok()).map(u64::from_ne_bytes);
    match (long(120), long(128)) {
        (Some(bytes_acked), Some(bytes_received)) if len as usize >= buffer.len() => {
            Ok(KernelCounts { state: buffer[0], bytes_acked, bytes_received })
        }
        // A kernel from before 4.1.
        _ => Err(Errno::NOSYS),
    }
}

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
        let conn = Conn::adopt_under(policy, fd, Role::Connecting, unknown, listening).unwrap();
        for call in 0..3 {
            assert_eq!(conn.identity.addresses(), (unknown, listening), "after {call} calls");
            assert_eq!(conn.before_sending(fd), CandidateStep::Kernel);
            conn.sent(-1);
        }
        // There is no broker here, or it refuses: the question was asked before it was.
        assert_eq!(conn.identity.addresses(), (own, listening));
        crate::calls::testing::close(fd);
    }
}
