//! Connections that are passed to another process, and received from one.

use super::*;
use crate::conn::{UNBORN, accounts, may_be_inherited, received};
use crate::process;
use partywall_protocol::passed::{PassedSocket, PassedState};
use partywall_protocol::wire::Side;
use partywall_shm::status::Role;

const CARRIER: Option<u64> = Some(7);

#[test]
fn connection_is_stated_if_it_is_passed_once() {
    for p in [Pair::candidates(4096), Pair::up(4096)] {
        let conn = p.conn_a();
        assert!(!conn.passing.is_passed());
        assert!(conn.pass(p.a, CARRIER));
        assert!(conn.passing.is_passed() && !conn.has(flags::BROKEN));
        assert!(!conn.pass(p.a, CARRIER));
        assert!(!conn.passing.is_passed());
        conn.was_not_passed();
        assert!(!conn.pass(p.a, CARRIER), "once was too often");
    }
}

#[test]
fn child_made_before_the_kernel_closes_prevents_statement() {
    let p = Pair::candidates(4096);
    for (conn, fd) in [(p.conn_a(), p.a), (p.conn_b(), p.b)] {
        assert!(conn.pass(fd, CARRIER));
    }
    let birth = process::Birth::begin();
    assert!(p.conn_a().drop_descriptor(p.a).is_none(), "the child may have it, and was not counted");
    drop(birth);
    // Other tests of this process may make a child just now, but none makes that statement hold again.
    let statement = p.conn_b().drop_descriptor(p.b);
    drop(process::Birth::begin());
    assert!(statement.is_none_or(|statement| !statement.holds()));
}

#[test]
fn statement_holds_if_no_child_is_made() {
    // Other tests of this process make children now and then.
    let holds = || {
        let p = Pair::candidates(4096);
        assert!(p.conn_a().pass(p.a, CARRIER));
        p.conn_a().drop_descriptor(p.a).is_some_and(|statement| statement.holds())
    };
    assert!((0..1000).any(|_| holds()));
}

#[test]
fn message_that_was_not_sent_passes_nothing() {
    let p = Pair::candidates(4096);
    assert!(p.conn_a().pass(p.a, CARRIER));
    p.conn_a().was_not_passed();
    assert!(!p.conn_a().passing.is_passed());
    assert!(p.conn_a().pass(p.a, CARRIER), "the program tries again");
    p.conn_a().was_not_passed();
    p.conn_a().stay_on_tcp(Reason::Option);
    assert!(!p.conn_a().pass(p.a, CARRIER));
}

#[test]
fn connection_that_others_hold_is_not_stated() {
    let p = Pair::candidates(4096);
    p.conn_a().identity.holders.add(process::kernel_pid() | UNBORN);
    assert!(!p.conn_a().pass(p.a, CARRIER));
    // A child gets it after it was passed.
    assert!(p.conn_b().pass(p.b, CARRIER));
    p.conn_b().bring_down(Reason::Exec);
    assert!(!p.conn_b().passing.is_passed());
    let p = Pair::candidates(4096);
    assert!(!p.conn_a().pass(p.a, None), "it is not known to whom");
    assert!(!p.conn_a().passing.is_passed());
}

#[test]
fn spawned_program_prevents_statement_before_and_after() {
    // Another thread may start the program between any two steps.
    let p = Pair::candidates(4096);
    p.conn_a().stay_on_tcp(Reason::Exec);
    assert!(!p.conn_a().passing.pass(PassedSocket { socket: 1, carrier: 2 }));
    assert!(p.conn_b().passing.pass(PassedSocket { socket: 1, carrier: 2 }));
    p.conn_b().stay_on_tcp(Reason::Exec);
    assert!(!p.conn_b().passing.is_passed());
    // The policy says nothing about holders.
    let p = Pair::up(4096);
    p.conn_a().stay_on_tcp(Reason::MovesNever);
    assert!(p.conn_a().passing.pass(PassedSocket { socket: 1, carrier: 2 }));
}

/// The socket of `p.a`, as if this process had it from another one.
fn receive(p: &Pair) -> &'static Conn {
    let (peer, local) = p.conn_b().identity.addresses();
    crate::table::remove(p.a, p.conn_a().entry());
    Conn::adopt_received(p.a, PassedSocket { socket: 1, carrier: 2 }, local, peer).unwrap()
}

#[test]
fn received_connection_is_no_candidate_until_confirmed() {
    let p = Pair::candidates(4096);
    let conn = receive(&p);
    assert_eq!((conn.ring_path.stage(), conn.role()), (ConnStage::Candidate, Role::Unknown));
    assert_eq!(conn.ring_path.reason(), Reason::Shared);
    for _ in 0..3000 {
        send(p.b, b"by tcp", 0).unwrap();
        assert_eq!(recv(p.a, 9, 0).unwrap(), b"by tcp");
    }
    assert_eq!((conn.ring_path.stage(), conn.role()), (ConnStage::Candidate, Role::Unknown));
    assert!(!may_be_inherited(conn));
    assert!(!conn.pass(p.a, CARRIER), "the sender may have it still");
}

#[test]
fn confirmed_connection_counts_from_the_kernels_numbers() {
    let p = Pair::candidates(4096);
    send(p.a, b"before", 0).unwrap();
    assert_eq!(recv(p.b, 9, 0).unwrap(), b"before");
    send(p.b, b"unread", 0).unwrap();
    let conn = receive(&p);
    assert_eq!(recv(p.a, 2, 0).unwrap(), b"un");
    assert!(received::begin(conn, p.a, PassedState { side: Side::Connecting, rings: 3 }));
    assert_eq!((conn.role(), accounts::is_accounted_for(conn, p.a)), (Role::Connecting, Some(true)));
    assert_eq!(conn.moves.renewals.load(Ordering::Relaxed), 3);
    assert_eq!(recv(p.a, 9, 0).unwrap(), b"read");
    send(p.a, b"more", 0).unwrap();
    assert_eq!(accounts::is_accounted_for(conn, p.a), Some(true));
}

#[test]
fn confirmation_comes_too_late_for_connection_that_stays_on_tcp() {
    let p = Pair::candidates(4096);
    let conn = receive(&p);
    conn.passing.forbid();
    assert!(!received::begin(conn, p.a, PassedState { side: Side::Connecting, rings: 0 }));
}
