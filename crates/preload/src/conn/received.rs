//! A connection that another process has passed to this one: whether no other process holds it, and its counts (protocol T13.15).
//!
//! ```text
//!   received --the broker confirms that this process alone has it--> a candidate with the kernel's counts
//!      |
//!      +-- MOST_LOOKS looks without success --> TCP
//! ```
//!
//! Until then it is a candidate for which no step comes: its side is not known.

use super::{Conn, ConnStage, accounts, bring_up, shown};
use crate::log::log;
use crate::{broker, process, sys};
use partywall_protocol::passed::PassedState;
use partywall_protocol::wire::Side;
use partywall_shm::status::{Reason, Role};
use std::ffi::c_int;
use std::sync::atomic::Ordering;

/// How often a receiver asks the broker (protocol T13.21).
const MOST_LOOKS: u32 = 12;
/// The pause after the first look, in milliseconds. Each later one is twice as long, so the last look comes after about 100 seconds.
const FIRST_PAUSE_MS: u64 = 50;

/// Whether no other process holds a connection that was received. Asks the broker, if it is time to.
#[cold]
pub(super) fn is_confirmed(conn: &'static Conn) -> bool {
    let passing = &conn.passing;
    let now = sys::coarse_millis();
    if now < passing.next_look_at.load(Ordering::Relaxed) || process::is_visitor() || conn.is_shared() {
        return false;
    }
    let fd = conn.fd();
    let Some(_held) = conn.tx.try_hold() else { return false };
    if conn.ring_path.stage() != ConnStage::Candidate || !conn.is_of(fd) {
        return false;
    }
    // Before the statement is taken: the counts must hold still then, and it comes once.
    let is_quiet = bring_up::is_quiet(conn);
    let answer = if is_quiet { broker::take_passed(passing.of()) } else { Err(Reason::BrokerAbsent) };
    if !passing.is_received() {
        // A program here, or a signal handler, has passed it on or done something with it that only TCP can do.
        conn.set_stage(ConnStage::Tcp);
        return false;
    }
    // A broker of an earlier version refuses the question.
    let is_answered = matches!(answer, Ok(_) | Err(Reason::Refused));
    if !is_answered {
        passing.next_look_at.store(now + FIRST_PAUSE_MS, Ordering::Relaxed);
        conn.ring_path.set_stage(ConnStage::Candidate);
        return false;
    }
    let Ok(Some(state)) = answer else {
        let looks = passing.looks.load(Ordering::Relaxed).min(MOST_LOOKS) + 1;
        passing.looks.store(looks, Ordering::Relaxed);
        passing.next_look_at.store(now + (FIRST_PAUSE_MS << (looks - 1)), Ordering::Relaxed);
        conn.set_stage(if looks < MOST_LOOKS { ConnStage::Candidate } else { ConnStage::Tcp });
        return false;
    };
    let is_begun = begin(conn, fd, state);
    conn.set_stage(if is_begun { ConnStage::Candidate } else { ConnStage::Tcp });
    log!("fd {fd} is held by no other process, after {} rings", state.rings);
    is_begun
}

/// It is this process's alone, and a candidate from here on. No thread is in the kernel with it.
pub(super) fn begin(conn: &Conn, fd: c_int, state: PassedState) -> bool {
    let role = match state.side {
        Side::Connecting => Role::Connecting,
        Side::Accepting => Role::Accepting,
    };
    let Some((sent, received)) = accounts::kernel_counts(role, fd) else { return false };
    let is_confirmed = conn.passing.confirm();
    conn.ring_path.set_role(role);
    conn.tx.counted.store(sent, Ordering::Relaxed);
    conn.rx.counted.store(received, Ordering::Relaxed);
    conn.moves.renewals.store(state.rings, Ordering::Relaxed);
    shown::state(conn, conn.ring_path.state_of(ConnStage::Candidate));
    is_confirmed
}
