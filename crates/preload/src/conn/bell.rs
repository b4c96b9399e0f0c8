//! One bell for one sleep, however many connections a thread sleeps on.
//!
//! A thread that waits for fifty connections would make fifty peers ring, or one peer fifty times, although the first bell wakes it and
//! it then looks at all of them. So a sleeper may publish a number of its sleep beside its wishes (protocol T11). A peer that has rung
//! for that number need not ring for it again.
//!
//! A number counts only for connections to the same program, as far as this side can identify it. Otherwise a hostile peer could copy
//! another program's number and so keep it asleep.

use super::{Conn, Pages};
use partywall_shm::status::Role;
use rustix::rand::{GetRandomFlags, getrandom};
use std::cell::Cell;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};

/// Programs whose last sleep a thread remembers.
const KNOWN: usize = 8;

thread_local! {
    /// The sleeps that this thread has rung for: whose, and which.
    static RUNG: [Cell<(u64, u64)>; KNOWN] = const { [const { Cell::new((0, 0)) }; KNOWN] };
}

/// A number that no other sleep of this process has, nor one of its forks, and hardly any other. 0 if there is none to be had.
pub(crate) fn sleep_number() -> u64 {
    static BASE: AtomicU64 = AtomicU64::new(0);
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let mut base = BASE.load(Ordering::Relaxed);
    if base == 0 {
        let mut bytes = [0; 8];
        if getrandom(&mut bytes, GetRandomFlags::NONBLOCK) != Ok(8) {
            return 0;
        }
        let new = u64::from_ne_bytes(bytes) | 1;
        base = match BASE.compare_exchange(0, new, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => new,
            Err(first) => first,
        };
    }
    // Forks have the base in common, and not their number, which is below 2^22.
    let count = COUNT.fetch_add(1, Ordering::Relaxed) & ((1 << 42) - 1);
    mix(base.wrapping_add(u64::from(crate::process::kernel_pid()) << 42 | count))
}

/// One to one, and scattered.
const fn mix(n: u64) -> u64 {
    let n = (n ^ n >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let n = (n ^ n >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    n ^ n >> 31
}

/// Records which program is at the other end: the one that listens there, or, for an accepted connection, the one whose number the broker
/// has told.
pub(super) fn note_neighbour(conn: &Conn, program: Option<u64>) {
    let (_, peer): (_, SocketAddr) = conn.identity.addresses();
    let bits = partywall_shm::address::wide(peer.ip());
    let at = mix(mix(bits as u64) ^ (bits >> 64) as u64) ^ u64::from(peer.port());
    let who = match (conn.role(), program) {
        (Role::Connecting, _) => mix(at) | 1,
        (_, Some(program)) if program != 0 => mix(program) & !1,
        _ => 0,
    };
    conn.local().neighbour.store(who, Ordering::Relaxed);
}

impl Pages<'_> {
    /// Rings the peer for the bytes that were just committed, unless another bell wakes it anyway. Returns whether it rang.
    pub(super) fn wake_reader(&self) -> bool {
        let sleep = self.peer.rx_path.sleep.load(Ordering::Relaxed);
        let who = self.local.neighbour.load(Ordering::Relaxed);
        if sleep == 0 || who == 0 {
            self.local.bell.ring();
            return true;
        }
        let rung = |place: &[Cell<(u64, u64)>; KNOWN]| {
            let place = &place[(who >> 1) as usize % KNOWN];
            if place.get() == (who, sleep) {
                return false;
            }
            // A bell that was not heard is none.
            if self.local.bell.ring() {
                place.set((who, sleep));
            }
            true
        };
        // The thread may be at its end.
        RUNG.try_with(rung).unwrap_or_else(|_| {
            self.local.bell.ring();
            true
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sleep_numbers_are_unique_and_not_zero() {
        let numbers: std::collections::BTreeSet<_> = (0..1000).map(|_| sleep_number()).collect();
        assert_eq!(numbers.len(), 1000);
        assert!(!numbers.contains(&0));
    }
}
