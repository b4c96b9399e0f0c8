//! When a socket is published to the broker, and when no longer.

use super::{DatagramSocket, flags};
use crate::broker::Unpublished;
use crate::{broker, sys};
use libc::c_int;
use partywall_protocol::upgrade::Upgrade;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::atomic::Ordering;

/// Datagrams after which a process that has no session with the broker opens one.
const WORTH_IT: u64 = 8;

impl DatagramSocket {
    /// Whether this much traffic with a peer is worth a ring.
    pub(super) fn is_due(&self, fd: c_int, calls: u64, bytes: u64, peer: SocketAddr) -> bool {
        if broker::directory().is_none() {
            if calls.is_multiple_of(WORTH_IT) {
                let errno = sys::errno_number();
                broker::datagram::be_open();
                sys::restore_errno(errno);
            }
            return false;
        }
        // Either of the two may be the server, so a rule for either port counts.
        let ours = broker::policy(self.port(fd), peer.ip()).upgrade;
        let theirs = broker::policy(peer.port(), peer.ip()).upgrade;
        ours != Upgrade::Never && theirs != Upgrade::Never && ours.is_due(calls, bytes) && theirs.is_due(calls, bytes)
    }

    /// A policy that has changed may forbid what there is.
    pub(super) fn follow_policy(&self, fd: c_int) {
        let now = broker::policy_generation();
        let seen = self.policy_seen.swap(now, Ordering::Relaxed);
        if seen == now || broker::directory().is_none() {
            return;
        }
        let any =
            if self.has(flags::SIX) { IpAddr::V6(Ipv6Addr::UNSPECIFIED) } else { IpAddr::V4(Ipv4Addr::UNSPECIFIED) };
        if broker::policy(self.port(fd), any).upgrade == Upgrade::Never {
            self.close_rings();
        }
    }

    /// A datagram has come by the kernel: perhaps its sender offers a ring.
    pub(super) fn came_by_kernel(&self, fd: c_int, len: usize, from: impl FnOnce() -> Option<SocketAddr>) {
        let (known, from) = if self.has(flags::ARRIVALS) { (from(), None) } else { (None, Some(from)) };
        if let Some(from) = known {
            self.note_arrival(from);
        }
        let from = || from.map_or(known, |from| from());
        if !self.may_have_rings() || self.has(flags::UNWANTED) {
            return;
        }
        let came = self.came.fetch_add(1, Ordering::Relaxed) + 1;
        let bytes = self.bytes.fetch_add(len as u64, Ordering::Relaxed) + len as u64;
        if self.has(flags::PUBLISHED) && broker::directory().is_some() {
            if let Some(from) = from() {
                self.look_for_offer(fd, from);
            }
            return;
        }
        let errno = sys::errno_number();
        let Some(from) = from() else { return };
        if self.is_due(fd, came, bytes, from) && !self.has(flags::PUBLISHED) {
            self.publish(fd);
        }
        sys::restore_errno(errno);
    }

    #[cold]
    pub(super) fn publish(&self, fd: c_int) {
        if sys::coarse_millis() >= self.publish_from.load(Ordering::Relaxed) {
            self.publish_since(fd, self.closings());
        }
    }

    /// Publishes it. If another thread has closed its rings since `closings` were counted, it has found no publication to withdraw, and the
    /// publication may name an address that the socket has lost. So this thread withdraws it.
    pub(super) fn publish_since(&self, fd: c_int, closings: u32) {
        match broker::publish_now(fd) {
            Ok(key) => {
                self.published.store(key, Ordering::Relaxed);
                // EDGE publication: releases the key; acquires from `unpublish` of another thread, if that came before, what it did first.
                self.flags.fetch_or(flags::PUBLISHED, Ordering::AcqRel);
                if !self.may_have_rings() || self.closings() != closings {
                    self.unpublish();
                }
            }
            // It may be wanted at the address that another thread has given it meanwhile.
            Err(Unpublished::Refused) => {
                self.set(flags::UNWANTED, broker::directory().is_some());
                if self.closings() != closings {
                    self.set(flags::UNWANTED, false);
                }
            }
            Err(Unpublished::NotNow) => {
                self.publish_from.store(sys::coarse_millis() + broker::PUBLISH_PAUSE, Ordering::Relaxed);
            }
        }
    }

    /// The program has set `SO_REUSEPORT`, or cleared it. A publication from before is no longer true.
    pub(super) fn note_group(&self, fd: c_int) {
        let errno = sys::errno_number();
        let is_grouped = rustix::net::sockopt::socket_reuseport(sys::borrow(fd)).unwrap_or(true);
        sys::restore_errno(errno);
        if is_grouped != self.has(flags::GROUPED) {
            self.close_rings();
            self.unpublish();
            self.set(flags::GROUPED, is_grouped);
        }
    }

    /// Publishes a socket of a group before anything has come to it: while one member of the group is not known, no other has rings
    /// (protocol U11.12).
    #[inline]
    pub(super) fn join_group(&self, fd: c_int) {
        if self.has(flags::GROUPED) && !self.has(flags::JOINED) && self.may_have_rings() {
            self.join_group_now(fd);
        }
    }

    #[cold]
    pub(super) fn join_group_now(&self, fd: c_int) {
        if self.port(fd) == 0 {
            // Not bound yet.
            return;
        }
        if !self.has(flags::PUBLISHED) {
            let errno = sys::errno_number();
            broker::datagram::be_open();
            if broker::directory().is_some() {
                self.publish(fd);
            }
            sys::restore_errno(errno);
        }
        // If there is no broker yet, the next call tries again.
        self.set(flags::JOINED, self.has(flags::PUBLISHED | flags::UNWANTED));
    }

    pub(super) fn unpublish(&self) {
        // EDGE publication: acquires the key from `publish_since`, or releases to it that the rings were closed.
        let before = self.flags.fetch_and(!(flags::PUBLISHED | flags::JOINED), Ordering::AcqRel);
        if before & flags::PUBLISHED != 0 {
            broker::withdraw(self.published.swap(0, Ordering::Relaxed));
        }
    }
}
