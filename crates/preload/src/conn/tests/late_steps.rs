//! Handshakes whose answers come later, as in a virtual machine.

use super::*;
use crate::broker::tests::{alone::alone, late_steps::TestAgent};
use crate::broker::{LateStep, is_answered};
use std::time::Instant;

fn deadline() -> Instant {
    Instant::now() + Duration::from_secs(100)
}

/// On TCP, and about to take the first step.
fn due() -> Pair {
    let p = Pair::candidates(4096);
    [p.conn_a(), p.conn_b()].iter().for_each(|conn| conn.moves.set_due(Upgrade::Now));
    p
}

fn look_at(p: &Pair) {
    for fd in [p.a, p.b] {
        assert_eq!(recv(fd, 9, libc::MSG_DONTWAIT), Err(Errno::AGAIN));
    }
}

/// The steps of both sides whose answers are still to come.
fn awaited(p: &Pair) -> Vec<LateStep> {
    let steps = [p.conn_a(), p.conn_b()].into_iter().filter_map(|conn| LateStep::of(&conn.local().late));
    steps.filter(|step| !is_answered(*step)).collect()
}

/// Calls of both sides, until a step of one waits for its answer, which does not come. `None` if both have a ring before.
fn go_on_to_next_step(p: &Pair, agent: &TestAgent) -> Option<LateStep> {
    agent.hold();
    let end = deadline();
    while awaited(p).is_empty() && !(p.conn_a().is_up() && p.conn_b().is_up()) {
        let stages = [p.conn_a(), p.conn_b()].map(|conn| (conn.ring_path.stage(), conn.ring_path.reason()));
        assert!(Instant::now() < end, "no step is taken: {stages:?}");
        look_at(p);
    }
    awaited(p).first().copied()
}

fn answer(step: LateStep, agent: &TestAgent) {
    agent.release();
    let end = deadline();
    while !is_answered(step) {
        assert!(Instant::now() < end, "no answer comes");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn connection_carries_bytes_while_each_step_waits() {
    let Some(_alone) = alone!() else { return };
    let agent = TestAgent::start();
    let p = due();
    let mut steps = Vec::new();
    while let Some(step) = go_on_to_next_step(&p, &agent) {
        for (from, to) in [(p.a, p.b), (p.b, p.a)] {
            send(from, b"meanwhile", 0).unwrap();
            assert_eq!(recv(to, 9, 0).unwrap(), b"meanwhile");
        }
        // The offer may be taken while the answer to it is still to come.
        steps.extend(awaited(&p).into_iter().filter(|step| !steps.contains(step)).collect::<Vec<_>>());
        answer(step, &agent);
    }
    assert_eq!(steps.len(), 4, "offer, take, confirm, finish");
    for (from, to) in [(p.a, p.b), (p.b, p.a)] {
        send(from, b"by ring", 0).unwrap();
        assert_eq!(recv(to, 9, 0).unwrap(), b"by ring");
        assert_eq!(ways(Conn::of(from).unwrap()).0, Way::Ring);
    }
}

#[test]
fn connection_closed_while_a_step_waits_leaves_no_offer() {
    let Some(_alone) = alone!() else { return };
    let agent = TestAgent::start();
    let mut p = due();
    let step = go_on_to_next_step(&p, &agent).unwrap();
    assert_eq!(LateStep::of(&p.conn_a().local().late), Some(step));
    let (local, peer) = p.conn_b().identity.addresses();
    close(p.a);
    p.a = -1;
    agent.release();
    // Less than the life of an offer, which is 30 s.
    let end = Instant::now() + Duration::from_secs(20);
    while crate::broker::find_offer(p.b, local, peer).is_some() || !is_answered(step) {
        assert!(Instant::now() < end, "it is still offered");
        crate::broker::cancel_untaken(u64::MAX);
    }
}

#[test]
fn step_that_waits_while_its_process_forks_is_given_up() {
    let Some(_alone) = alone!() else { return };
    let agent = TestAgent::start();
    let p = due();
    go_on_to_next_step(&p, &agent).unwrap();
    crate::conn::fork::before();
    crate::conn::fork::in_parent();
    assert!(awaited(&p).is_empty());
    assert_eq!(p.conn_a().ring_path.stage(), ConnStage::Candidate);
    agent.release();
    look_at(&p);
}
