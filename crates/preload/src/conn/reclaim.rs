//! Rings are reported to a broker that replaces the one that helped to make them, so that people can see them (protocol T14).
//!
//! A process reports its rings when it opens its session, as many as take no noticeable time. The others are reported with the next call
//! on each connection. A ring whose memory was not kept, for want of descriptors, is not reported.

use super::{Conn, ConnStage};
use crate::broker::claim::{ConnClaim, EachClaim};
use crate::{broker, sys, table};
use partywall_shm::layout::{Geometry, PAGE};
use std::ffi::c_int;
use std::sync::atomic::Ordering;

/// For the broker's session: [`reclaim_all`].
pub(super) static EACH: EachClaim = reclaim_all;

/// Tells the broker of every ring that it has not heard of, until `tell` says that it is enough.
fn reclaim_all(broker: u64, tell: &mut dyn FnMut(&ConnClaim) -> bool) {
    for (fd, _) in table::entries(0, u32::MAX) {
        if let Some(conn) = Conn::of(fd)
            && conn.fd() == fd
            && conn.is_up()
            && reclaim(conn, fd, broker, &mut *tell) == Some(Some(false))
        {
            return;
        }
    }
}

/// Whether the broker that we have now, and whose number this is, has not heard of its ring.
pub(super) fn is_older_than(conn: &Conn, broker: u64) -> bool {
    let channel = conn.channel();
    channel != 0 && channel < broker && conn.local().reclaimed.load(Ordering::Relaxed) != broker
}

/// Tells the broker by `tell`, which returns whether it has heard, if it has not heard of this ring; `None`: a thread is in the way.
fn reclaim(conn: &'static Conn, fd: c_int, broker: u64, tell: impl FnOnce(&ConnClaim) -> bool) -> Option<Option<bool>> {
    // While these are held, no thread closes the descriptors that are sent, and no call sends or receives: it would fail while the broker
    // reads the socket (protocol T3.3).
    let (_tx, _rx) = (conn.tx.try_hold()?, conn.rx.try_hold()?);
    let local = conn.local();
    let Some(memory) =
        local.memory().filter(|_| conn.ring_path.stage() == ConnStage::Attached && is_older_than(conn, broker))
    else {
        return Some(None);
    };
    // With another `SO_LINGER`, the broker would have to do the work of `close`, if it came to hold the socket last.
    if !matches!(rustix::net::sockopt::socket_linger(sys::borrow(fd)), Ok(None)) {
        local.reclaimed.store(broker, Ordering::Relaxed);
        return Some(None);
    }
    let geometry = Geometry::new(PAGE, local.own.ring_size()).ok();
    let claim = geometry.map(|geometry| ConnClaim {
        channel: conn.channel(),
        role: conn.role(),
        geometry,
        socket: sys::borrow(fd),
        region: sys::borrow(memory),
    });
    let told = claim.map(|claim| tell(&claim));
    if told != Some(false) {
        local.reclaimed.store(broker, Ordering::Relaxed);
    }
    Some(told)
}

/// The policy is another, and so perhaps is the broker.
pub(super) fn reclaim_later(conn: &'static Conn, fd: c_int) {
    let number = broker::directory().map_or(0, |directory| directory.instance());
    let show =
        |tell: &dyn Fn(&ConnClaim) -> bool| reclaim(conn, fd, number, tell).is_some_and(|told| told != Some(false));
    if is_older_than(conn, number) && !broker::reclaim(show) {
        conn.moves.judge_later();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conn::{Pair, bring_up};

    #[test]
    fn ring_counts_as_reported_after_the_answer() {
        let pair = Pair::candidates(4096);
        let (memory, _) = bring_up::make_region(pair.conn_b()).unwrap();
        pair.bring_up();
        let conn = pair.conn_a();
        conn.local().keep_memory(memory);
        conn.local().channel.store(5, Ordering::Relaxed);
        let show = |answer| reclaim(conn, pair.a, 9, |_| answer);
        assert_eq!((show(false), is_older_than(conn, 9)), (Some(Some(false)), true));
        assert_eq!((show(true), is_older_than(conn, 9)), (Some(Some(true)), false));
        assert_eq!(show(true), Some(None));
        conn.local().channel.store(0, Ordering::Relaxed);
    }
}
